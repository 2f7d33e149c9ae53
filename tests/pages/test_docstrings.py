"""Docstrings say what is there: their examples run, and the names that they mention exist."""

import ast
import importlib
import re
import textwrap

import numpy as np
import pytest

import hubplugin
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
    *("CenteringTransform", "IndexIDMap", "LinearTransform", "ParameterSpace"),  # Faiss
    *("downcast_index", "index_cpu_to_gpu", "metric_type", "reconstruct"),
    *("QueryRequest", "model_copy", "points_selector"),  # qdrant-client, pydantic
    "Model.objects.order_by(...)",  # Django
    *(
        "auth_flow",
        "concurrent.futures.Executor",
        "select(...).order_by(...)",
        "wrapt",
    ),  # httpx, Python, SQLAlchemy
    *("from_documents", "from_existing_collection", "to_dict"),  # LangChain, Haystack
    *(
        "photos",
        "photos__hubplugin",
        "photos__hubplugin_WORD",
        "photos__hubplugin_WORD_model",
    ),  # tables of an example
    "hub_offset",  # a payload key and a column
    *(
        "with",
        "is",
        "sn",
        "dbsn",
        "dualis",
        "nnn",
        "csls",
        "dn",
        "dis",
        "dualdis",
        "gc",
        "otn",
        "l2n",
        "hn",
    ),
}
"""Names of other libraries, a word of Python, and what users call the methods."""


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
            if any(
                isinstance(node, (ast.Call, ast.Import, ast.ImportFrom))
                for node in nodes
            ):
                yield pytest.param(path, code, id=f"{path}:{line}")


class Given(dict):
    """What examples take for granted, made when one asks for it."""

    def __missing__(self, name):
        if not hasattr(self, name):
            raise KeyError(name)
        return self.setdefault(name, getattr(self, name)())

    def gallery(self):
        return np.random.default_rng(0).normal(size=(60, 8)).astype(np.float32)

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
        import faiss

        import hubplugin_faiss

        index = faiss.IndexFlatIP(8)
        index.add(self["gallery"])
        faiss.write_index(index, "photos.faiss")
        return hubplugin_faiss.open_store("photos.faiss")

    def client(self):
        import chromadb

        client = chromadb.EphemeralClient()
        client.get_or_create_collection("photos").upsert(
            ["a", "b"], embeddings=self["gallery"][:2]
        )
        return client


@pytest.mark.parametrize(("path", "code"), [*examples()])
def test_an_example_of_a_docstring_runs(path, code, tmp_path, monkeypatch):
    if str(path) in NEED_A_SERVER:
        pytest.skip(f"needs a server: {NEED_A_SERVER[str(path)]}")
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(
        ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    )
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
    faults = [
        f"{path}:{node.lineno}: {node.name}: no parameter {name}"
        for path, tree in FILES.items()
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for name in unknown_parameters(node)
    ]
    assert faults == []
