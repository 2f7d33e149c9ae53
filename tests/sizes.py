"""Whether files and functions keep their sizes: `python -m tests.sizes`, part of `make lint`.

A file is a chapter: it ends where a reader would stop reading, at `FILE` lines at most. A function is as long as its
one thought; above `FUNCTION` lines, without the docstring, it has two. Cutting a thought to please these numbers is a
defect; `tests.walk` counts what it costs. The name of a test has fewer than 80 characters.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PRODUCT, TESTS = ("hubplugin", "adapters"), ("tests", "integration_tests")
FILE, FUNCTION, NAME = 600, 70, 80

Function = ast.FunctionDef | ast.AsyncFunctionDef


def body_lines(node: Function) -> int:
    """Lines from `def` to the end, without the docstring."""
    first = node.body[0]
    docstring = first if ast.get_docstring(node) is not None else None
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    return lines - ((docstring.end_lineno or 0) - docstring.lineno + 1 if docstring else 0)


def too_large(path: Path) -> Iterator[tuple[str, str]]:
    """What in a file is too large: its name, and by how much."""
    text = path.read_text()
    name = path.relative_to(ROOT).as_posix()
    if (lines := text.count("\n")) > FILE:
        yield name, f"{lines} lines, at most {FILE}"

    def within(node: ast.AST, parents: list[str]) -> Iterator[tuple[str, str]]:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.ClassDef | Function):
                yield from within(child, parents)
                continue
            place = f"{name}:{'.'.join((*parents, child.name))}"
            if isinstance(child, Function) and (lines := body_lines(child)) > FUNCTION:
                yield place, f"{lines} lines, at most {FUNCTION}"
            yield from within(child, [*parents, child.name])

    yield from within(ast.parse(text), [])


def long_names(path: Path) -> Iterator[tuple[str, str]]:
    """The tests of a file whose names are too long: each name, and by how much."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, Function) and node.name.startswith("test_") and len(node.name) >= NAME:
            place = f"{path.relative_to(ROOT).as_posix()}:{node.name}"
            yield place, f"a name of {len(node.name)} characters, fewer than {NAME} were expected"


def main() -> None:
    found = [each for folder in PRODUCT for path in sorted((ROOT / folder).rglob("*.py")) for each in too_large(path)]
    found += [each for folder in TESTS for path in sorted((ROOT / folder).rglob("*.py")) for each in long_names(path)]
    if found:
        raise SystemExit("too large:\n" + "\n".join(f"{name}: {what}" for name, what in found))
    print("sizes: nothing is too large")


if __name__ == "__main__":
    main()
