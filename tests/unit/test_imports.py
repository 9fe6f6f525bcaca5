"""The arrows of the house: who may import whom, what the pure rooms may touch, and what a start may load."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import launcher

PACKAGE = Path(launcher.__file__).parent
EVERYBODY = {"structs", "errors", "units"}
ALLOWED = {
    "cli": {"workflows", "render", "options", "cli_service"},
    "cli_service": {"workflows", "render", "options"},
    "options": {"workflows"},
    "__main__": {"cli"},
    "render": set(),
    "workflows": {"facts", "planner", "serve", "measure", "weights", "engines"},
    "measure": {"serve", "facts", "planner"},
    "serve": {"facts", "planner"},
    "engines": {"facts"},
    "weights": {"facts"},
    "facts": set(),
    "planner": set(),
    "structs": set(),
    "errors": set(),
    "units": set(),
    "__init__": set(),
}
PURE = {"planner", "structs", "errors", "units"}
# Of the standard library, what a pure module may use: data and arithmetic, nothing that reaches outside.
PURE_STDLIB = {
    "__future__", "bisect", "collections", "dataclasses", "enum", "fractions", "functools", "heapq", "itertools",
    "math", "operator", "re", "struct", "types", "typing",
}  # fmt: skip
HEAVY = ("gguf", "numpy", "httpx", "pynvml", "psutil", "rich", "yaml", "huggingface_hub")


def modules() -> list[tuple[str, Path]]:
    """(room, file) of every module of the package."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).parts
        found.append((parts[0] if len(parts) > 1 else path.stem, path))
    return found


def imported(path: Path) -> list[tuple[int, str]]:
    """(line, absolute name) of every import, also of those inside functions."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            base = node.module or ""
            names += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
    return names


def test_no_arrow_runs_back() -> None:
    wrong = []
    for room, path in modules():
        for line, name in imported(path):
            parts = name.split(".")
            if parts[0] != "launcher" or len(parts) < 2 or parts[1] == "__version__":
                continue
            target = parts[1]
            if target == room or target in EVERYBODY or target in ALLOWED[room]:
                continue
            wrong.append(f"{path.relative_to(PACKAGE)}:{line} ({room}) imports {name}")
    assert wrong == []


def test_the_rule_itself_sees_a_wrong_arrow(tmp_path: Path) -> None:
    source = tmp_path / "x.py"
    source.write_text("def f():\n    from launcher.facts import host\n    import launcher.serve.state\n")
    assert [name for _, name in imported(source)] == ["launcher.facts.host", "launcher.serve.state"]


def test_pure_rooms_reach_nothing_outside() -> None:
    wrong = []
    for room, path in modules():
        if room not in PURE:
            continue
        for line, name in imported(path):
            top = name.split(".")[0]
            if top != "launcher" and top not in PURE_STDLIB:
                wrong.append(f"{path.relative_to(PACKAGE)}:{line} imports {name}")
    assert wrong == []


def test_only_render_imports_rich() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for room, path in modules()
        for line, name in imported(path)
        if name.split(".")[0] == "rich" and room != "render"
    ]
    assert wrong == []


def test_nobody_catches_everything() -> None:
    """`except Exception` lives in the one place that catches, nowhere else."""
    wrong = []
    for _, path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ExceptHandler):
                bare = node.type is None
                everything = isinstance(node.type, ast.Name) and node.type.id == "Exception"
                if (bare or everything) and path.name != "cli.py":
                    wrong.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert wrong == []


def loaded_by(*argv: str) -> set[str]:
    """Top-level names of the modules that a command of the launcher loads."""
    program = (
        "import sys, json, atexit\n"
        "atexit.register(lambda: print('MODULES' + json.dumps(sorted({m.split('.')[0] for m in sys.modules}))))\n"
        "from launcher import cli\n"
        f"sys.argv = ['launcher', *{list(argv)!r}]\n"
        "cli.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    return set(json.loads(done.stdout.rpartition("MODULES")[2]))


def test_help_loads_nothing_heavy() -> None:
    names = loaded_by("--help")
    assert "typer" in names
    assert names.isdisjoint(HEAVY)


def test_help_of_a_command_loads_nothing_heavy() -> None:
    assert loaded_by("plan", "--help").isdisjoint(HEAVY)
