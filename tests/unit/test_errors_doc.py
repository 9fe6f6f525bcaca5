"""docs/errors.md lists every id that the code raises, with the exit codes of the classes that raise it."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import launcher
from launcher import errors

PACKAGE = Path(launcher.__file__).parent
DOC = PACKAGE.parent / "docs" / "errors.md"
CODES = {
    name: kind.exit_code
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.LauncherError)
}
KEBAB = re.compile(r"^[a-z][a-z0-9]*(-[a-z0-9]+)*$")


def strings_bound_to(tree: ast.Module, name: str) -> set[str]:
    """Every string that a module assigns to a variable of that name, alone or in a tuple."""
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=True))
            for left, right in pairs:
                if isinstance(left, ast.Name) and left.id == name and isinstance(right, ast.Constant):
                    found.add(str(right.value))
    return found


def raised() -> dict[str, set[int]]:
    """id -> exit codes, of every LauncherError that is built and every gate that is closed."""
    found: dict[str, set[int]] = defaultdict(set)
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            first = node.args[0] if node.args else None
            if name in CODES and isinstance(first, ast.Constant):
                found[str(first.value)].add(CODES[name])
            elif name in CODES and isinstance(first, ast.Name):
                for text in strings_bound_to(tree, first.id):
                    found[text].add(CODES[name])
            elif name == "refuse" and isinstance(first, ast.Constant):
                found[str(first.value)].add(errors.SlugInvalid.exit_code)
            elif name == "Gate":
                given = {k.arg: k.value.value for k in node.keywords if isinstance(k.value, ast.Constant)}
                if given.get("ok") is False and "name" in given:
                    found[str(given["name"])].add(errors.Refused.exit_code)
    return dict(found)


def listed() -> dict[str, set[int]]:
    """id -> exit codes of the table in docs/errors.md."""
    rows = re.findall(r"^\| `([^`]+)` \| ([0-9, ]+) \|", DOC.read_text(encoding="utf-8"), re.M)
    assert len({row[0] for row in rows}) == len(rows), "an id is listed twice"
    return {reference: {int(code) for code in codes.split(",")} for reference, codes in rows}


def test_every_id_is_documented_and_every_documented_id_exists() -> None:
    code, doc = raised(), listed()
    doc.pop("bug")  # not a refusal: whatever nobody foresaw
    assert sorted(set(code) - set(doc)) == [], "raised, not in docs/errors.md"
    assert sorted(set(doc) - set(code)) == [], "in docs/errors.md, never raised"
    assert {k: v for k, v in code.items() if doc[k] != v} == {}


def test_no_fix_begins_with_prose() -> None:
    """A fix is pasted: it begins with a command, an option, a variable or an editor, wherever it is written."""
    begins = re.compile(
        r"(launcher|switch|python|pip|curl|git|cat|ls|df|rm|cp|tail|ulimit|sudo|docker|nvidia-smi|chmod|llama-server"
        r"|ggml-rpc-server|export|unset|kill|mv|sed|systemctl)\b|\$\{EDITOR:-vi\} |--?[a-z]|[A-Z_]+="
    )
    prose = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for keyword in node.keywords if isinstance(node, ast.Call) else ():
                value = keyword.value
                first = value.values[0] if isinstance(value, ast.JoinedStr) and value.values else value
                text = first.value if isinstance(first, ast.Constant) else None
                if keyword.arg == "fix" and isinstance(text, str) and text and not begins.match(text):
                    prose.append(f"{path.relative_to(PACKAGE)}:{value.lineno}: {text}")
    assert prose == []


def test_ids_are_kebab_case() -> None:
    assert [r for r in raised() if not KEBAB.match(r)] == []


def test_every_row_says_what_it_means_and_what_to_do() -> None:
    for row in re.findall(r"^\| `.*$", DOC.read_text(encoding="utf-8"), re.M):
        cells = [c.strip() for c in row.strip("|").split("|")]
        assert len(cells) == 4, row
        assert all(cells), row
