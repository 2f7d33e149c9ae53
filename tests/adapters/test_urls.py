"""URLs as people paste them: accepted, or told what was meant."""

import subprocess
import sys

import numpy as np
import pytest

from hubplugin import HubpluginError, StoreError, open_store
from tests.galleries import collection, flat_index
from tests.refusals import refused


@pytest.mark.parametrize(
    "pasted",
    [
        "http://me:secret@localhost:6333/photos",
        "qdrnt://me:secret@host/x",
        "http:secret",
        "photos.faiss",
    ],
)
def test_what_is_no_store_url_is_answered_with_the_list_of_those_there_are(pasted):
    with pytest.raises(StoreError, match=r"known: .*faiss:\.\.\., .*qdrant:") as caught:
        open_store(pasted)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("needs", "url"),
    [
        ("faiss", "faiss:FOLDER/p.faiss?password=secret"),
        ("chromadb", "chroma:FOLDER/photos?PASSWORD=secret"),
        ("chromadb", "chroma://me%3Asecret@127.0.0.1:1/photos"),
        ("lancedb", "lancedb:FOLDER/photos?api_key=secret"),
        ("lancedb", "lancedb:s3://me:secret@bucket/photos"),
        ("qdrant_client", "qdrant://127.0.0.1:1/photos?API_KEY=secret"),
        ("qdrant_client", "qdrant://user:secret@127.0.0.1:1/photos"),
        ("qdrant_client", "qdrant-local:FOLDER/photos?apikey=secret"),
    ],
)
def test_no_error_shows_a_password_however_it_is_spelt(needs, url, tmp_path):
    pytest.importorskip(needs, reason=f"needs {needs}: pip install '.[all]'")
    with pytest.raises(HubpluginError) as caught:
        open_store(url.replace("FOLDER", str(tmp_path)))
    assert "secret" not in str(caught.value)


def test_two_slashes_before_a_path_are_read_as_in_other_urls(cwd):
    flat_index(cwd / "p.faiss", np.eye(3, dtype=np.float32))
    for url in (
        "faiss:p.faiss",
        "faiss://p.faiss",
        f"faiss://{cwd}/p.faiss",
        f"faiss:/{cwd}/p.faiss",
    ):
        assert open_store(url).count() == 3


def test_a_store_shows_what_it_is(cwd):
    store = open_store(flat_index("p.faiss", np.eye(3, dtype=np.float32)))
    assert repr(store) == "<FaissStore: faiss:p.faiss, dot, 3 dimensions>"


@pytest.mark.parametrize("name", ["a?b.faiss", "a?metric=dot.faiss", "?.faiss"])
def test_a_question_mark_in_the_name_of_an_index_is_told_from_that_of_options(
    tmp_path, monkeypatch, name
):
    flat_index(tmp_path / name, np.eye(3, dtype=np.float32))
    monkeypatch.chdir(tmp_path)
    for place in (name, f"//{name}", f"{tmp_path}/{name}", f"/{tmp_path}/{name}"):
        for metric in ("cosine", "dot"):
            store = open_store(f"faiss:{place}?metric={metric}")
            assert (store.count(), store.metric) == (3, metric)
        assert open_store(open_store(f"faiss:{place}").url).count() == 3


def test_two_slashes_before_the_folder_of_a_local_collection(cwd):
    qdrant_client = pytest.importorskip(
        "qdrant_client", reason="needs qdrant-client: pip install '.[qdrant]'"
    )
    client = qdrant_client.QdrantClient(path=str(cwd / "q"))
    collection(client, np.eye(3))
    client.close()
    for url in (
        "qdrant-local:q/photos",
        "qdrant-local://q/photos",
        f"qdrant-local://{cwd}/q/photos",
    ):
        store = open_store(url)
        assert store.dim == 3
        store.client.close()


def install(folder, monkeypatch, name, function, source):
    """An adapter of that name, of which `function` opens a URL."""
    (folder / f"{name}-1.dist-info").mkdir()
    (folder / f"{name}-1.dist-info/METADATA").write_text(f"Name: {name}\nVersion: 1\n")
    entry_point = f"[hubplugin.adapters]\n{name} = {name}:{function}\n"
    (folder / f"{name}-1.dist-info/entry_points.txt").write_text(entry_point)
    (folder / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(folder)


def test_an_adapter_that_is_installed_while_a_program_runs_is_found(
    tmp_path, monkeypatch
):
    with refused(StoreError, "no installed adapter can open"):
        open_store("late:x")
    install(tmp_path, monkeypatch, "late", "str", "")
    with pytest.raises(AttributeError, match="late"):
        open_store("late:x")


WITHOUT = """
import sys
from hubplugin.errors import HubpluginError
from hubplugin.registry import open_store
for url, package in zip(sys.argv[1::2], sys.argv[2::2]):
    sys.modules[package] = None  # its import fails as if it were not installed
    try:
        open_store(url)
    except HubpluginError as error:
        print(error)
"""

LACKING = {
    "faiss:photos.faiss": ("faiss", "faiss"),
    "qdrant://localhost:6333/photos": ("qdrant_client", "qdrant"),
    "qdrant-local:folder/photos": ("qdrant_client", "qdrant"),
    "postgresql://me@host/db?table=photos": ("psycopg", "pgvector"),
    "chroma:folder/photos": ("chromadb", "chroma"),
    "lancedb:folder/photos": ("lancedb", "lancedb"),
}
"""Of each URL, the package that is not there, and the extra that brings it."""


def test_a_store_whose_package_is_missing_names_its_own_extra():
    words = [word for url, (package, _) in LACKING.items() for word in (url, package)]
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT, *words],
        capture_output=True,
        text=True,
        check=True,
    )
    for line, (url, (package, extra)) in zip(
        run.stdout.splitlines(), LACKING.items(), strict=True
    ):
        scheme = url.partition(":")[0]
        assert line.startswith(f"{scheme}: needs {package}, which is not installed; ")
        assert line.endswith(f"pip install '.[{extra}]'")


def test_an_adapter_of_somebody_else_names_no_extra_of_ours(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, "lone", "open_url", "import lonely_client")
    with refused(
        StoreError,
        r"needs lonely_client, which is not installed; install what lone needs$",
    ):
        open_store("lone:x")
