"""READ the world: files, NVML, the engine, /proc. Each module runs the thing and, apart from it, parses its output."""
