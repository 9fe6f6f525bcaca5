"""llama-launcher: read the world, plan with pure arithmetic, serve, measure, compare with the plan."""

__version__ = "0.1.0"
