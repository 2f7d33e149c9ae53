"""Whether files, classes and functions keep their sizes: `python -m tests.sizes`, part of `make lint`.

Docstrings do not count as lines of a function. Names in a package's `__all__` may take as many parameters as their
users need. The name of a test has fewer than 80 characters.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PRODUCT, TESTS = ("hubplugin", "adapters"), ("tests", "integration_tests")
FILE, CLASS, FUNCTION, PARAMETERS, NAME = 360, 250, 45, 6, 80

Function = ast.FunctionDef | ast.AsyncFunctionDef


def public_names() -> set[str]:
    """What the packages name in their `__all__`."""
    names: set[str] = set()
    for package in ("hubplugin", "adapters/hubplugin_faiss", "adapters/hubplugin_qdrant"):
        for node in ast.parse((ROOT / package / "__init__.py").read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                names.update(ast.literal_eval(node.value))
    return names


PUBLIC = public_names()


def body_lines(node: Function) -> int:
    """Lines from `def` to the end, without the docstring."""
    first = node.body[0]
    docstring = first if ast.get_docstring(node) is not None else None
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    return lines - ((docstring.end_lineno or 0) - docstring.lineno + 1 if docstring else 0)


def parameters(node: Function) -> int:
    arguments = node.args
    named = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len([name for name in named if name not in ("self", "cls")])


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
            if isinstance(child, ast.ClassDef):
                lines = (child.end_lineno or child.lineno) - child.lineno + 1
                if lines > CLASS:
                    yield place, f"a class of {lines} lines, at most {CLASS}"
            else:
                if (lines := body_lines(child)) > FUNCTION:
                    yield place, f"{lines} lines, at most {FUNCTION}"
                if (count := parameters(child)) > PARAMETERS and [*parents, child.name][0] not in PUBLIC:
                    yield place, f"{count} parameters, at most {PARAMETERS}"
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
