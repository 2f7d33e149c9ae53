"""Docstrings say what is there: their examples run, and the names that they mention exist."""

import ast
import importlib
import inspect
import re
import textwrap
from pathlib import Path

import numpy as np
import pytest

import hubplugin
from hubplugin.evaluation.plans import PLANS
from hubplugin.methods import METHODS
from hubplugin.rerank import QUERY_METHODS
from tests.galleries import flat_store, normal
from tests.pages.blocks import ROOT

FILES = {
    path.relative_to(
        folder.parent if folder.name == "hubplugin" else folder
    ): ast.parse(path.read_text())
    for folder in (ROOT / "hubplugin", ROOT / "adapters")
    for path in sorted(folder.rglob("*.py"))
}
"""The tree of each file, by its path as it is imported."""

DOCSTRINGS = [
    (path, node.lineno, node.value.value)
    for path, tree in FILES.items()
    for node in ast.walk(tree)
    if isinstance(node, ast.Expr)
    and isinstance(node.value, ast.Constant)
    and isinstance(node.value.value, str)
]
"""Those of modules, classes and functions, and what stands behind a constant or a field."""

INDENTED = re.compile(r"(?<=\n\n)(?: {4}[^\n]*\n|\n(?= {4}))+")
"""A block, with the empty lines within it."""

NEED_A_SERVER = {"hubplugin_pgvector/__init__.py": "tests/pgvector/test_queries.py"}
"""Files whose examples need a server, and the tests that run the same with one."""

OTHERS = {
    *METHODS,
    *QUERY_METHODS,
    *PLANS,
    *("CenteringTransform", "IndexIDMap", "LinearTransform", "ParameterSpace"),  # Faiss
    *("downcast_index", "index_cpu_to_gpu", "metric_type", "reconstruct"),
    *("QueryRequest", "model_copy", "points_selector"),  # qdrant-client, pydantic
    *("Model.objects.order_by(...)", "select(...).order_by(...)"),  # Django, SQLAlchemy
    *("auth_flow", "concurrent.futures.Executor", "with", "wrapt"),  # httpx, Python
    *("from_documents", "from_existing_collection", "to_dict"),  # LangChain, Haystack
    *("photos", "photos__hubplugin"),  # tables of an example
    *("photos__hubplugin_1", "photos__hubplugin_1_model"),
    "hub_offset",  # a payload key and a column
}
"""Names of other libraries, and what users call the methods."""


def examples():
    """The blocks of docstrings that are Python and call or define something; formulas and tables are neither."""
    for path, line, text in DOCSTRINGS:
        first, _, rest = text.partition("\n")
        for block in INDENTED.findall(f"{first}\n{textwrap.dedent(rest)}\n"):
            code = textwrap.dedent(block)
            try:
                nodes = list(ast.walk(ast.parse(code)))
            except SyntaxError:
                continue
            kinds = (ast.Call, ast.Import, ast.ImportFrom)
            if any(isinstance(node, kinds) for node in nodes):
                yield pytest.param(path, code, id=f"{path}:{line}")


class Given(dict):
    """What examples take for granted, made when one asks for it."""

    def __missing__(self, name):
        if not hasattr(self, name):
            raise KeyError(name)
        return self.setdefault(name, getattr(self, name)())

    def gallery(self):
        return normal(np.random.default_rng(0), 60, 8)

    queries = bank = gallery

    def query(self):
        return self["queries"][0]

    def vector(self):
        return self["query"].tolist()

    def content(self):
        return b"offsets"

    def model(self):
        return hubplugin.fit(self["gallery"], self["bank"], "is")

    def store(self):
        return flat_store(Path(), self["gallery"])

    def client(self):
        import chromadb

        client = chromadb.EphemeralClient()
        photos = client.get_or_create_collection("photos")
        photos.upsert(["a", "b"], embeddings=self["gallery"][:2])
        return client


@pytest.mark.parametrize(("path", "code"), [*examples()])
def test_an_example_of_a_docstring_runs(path, code, cwd):
    if str(path) in NEED_A_SERVER:
        pytest.skip(f"needs a server: {NEED_A_SERVER[str(path)]}")
    name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    module = importlib.import_module(name)
    exec(compile(code, path, "exec"), {**vars(module), "hubplugin": hubplugin}, Given())


def names_in(tree):
    """All that a file names: what it defines, binds, imports, passes on or reads of an object."""
    for node in ast.walk(tree):
        for kind in ("name", "id", "arg", "attr", "asname"):
            yield from str(getattr(node, kind, None) or "").split(".")


def test_a_name_that_a_docstring_mentions_exists():
    known = {name for tree in FILES.values() for name in names_in(tree)}
    known |= {part for path in FILES for part in path.with_suffix("").parts}
    lacking = [
        f"{path}:{line}: {name}"
        for path, line, text in DOCSTRINGS
        for name in re.findall(r"(?<!`)`([^`\s]+)`", text)
        if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(\(.*\))?", name)
        and name not in OTHERS
        and not {*name.partition("(")[0].split(".")} <= known | OTHERS | {"faiss"}
    ]
    assert lacking == []


ARGS = re.compile(r"^Args:\n((?: {4}.*\n?)+)", re.MULTILINE)
"""The section of a docstring, without its first line."""


def unknown_parameters(function):
    """The entries of `Args` that name no parameter of a function."""
    section = ARGS.search(ast.get_docstring(function) or "")
    if section is None:
        return set()
    entries = re.findall(r"^ {4}(\S.*?): ", section[1], re.MULTILINE)
    told = {name.lstrip("*") for entry in entries for name in entry.split(", ")}
    return told - {node.arg for node in ast.walk(function.args) if hasattr(node, "arg")}


def test_a_docstring_tells_the_parameters_that_there_are():
    """That all are told is held below, for the functions that users call."""
    faults = [
        f"{path}:{node.lineno}: {node.name}: no parameter {name}"
        for path, tree in FILES.items()
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for name in unknown_parameters(node)
    ]
    assert faults == []


def on_the_api_page():
    """The functions and methods of docs/reference/api.md that are written where it names them."""
    page = (ROOT / "docs" / "reference" / "api.md").read_text()
    for name, members in re.findall(
        r"^::: ([\w.]+)(?:\n    options: \{members: (.*?)\})?", page, re.MULTILINE
    ):
        module, _, attribute = name.rpartition(".")
        thing = getattr(importlib.import_module(module), attribute)
        if inspect.isfunction(thing):
            yield name, thing
        elif inspect.isclass(thing) and members != "false":
            for member, value in vars(thing).items():
                function = getattr(value, "__func__", value)
                is_shown = not member.startswith("_") and (
                    not members or member in re.findall(r"\w+", members)
                )
                if is_shown and inspect.isfunction(function):
                    yield f"{name}.{member}", function


def test_functions_of_the_api_page_have_args():
    lacking = [
        name
        for name, function in on_the_api_page()
        if inspect.getdoc(function) and "Args:\n" not in str(inspect.getdoc(function))
        if len(set(inspect.signature(function).parameters) - {"self", "cls"}) > 1
        and function.__doc__
    ]
    assert lacking == []
