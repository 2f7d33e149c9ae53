"""What a service does, where torch cannot be imported: python -m tests.serving.walk FOLDER STEP ...

FOLDER holds models, fitted elsewhere, `gallery.npy` [n, d] and `queries.npy` [m, d]. Each step runs in a process of its
own, a fork of this one, which has filled and corrected the collection. Prints a line for each: its name and
"done", or "torch" if that was imported, or "failed", after which its traceback stands.
"""

import asyncio
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

STEPS: dict[str, Callable[[Any], None]] = {}
ENDS = ["done", "torch", "failed"]
NO_TORCH = r"needs torch, which is not installed; .*pip install '\.\[fit\]'"


def step(function: Callable[[Any], None]) -> Callable[[Any], None]:
    STEPS[function.__name__] = function
    return function


class Service:
    """A collection "photos" in a folder, corrected by a model that came as a file, and a wrapped client of it."""

    def __init__(self, folder: Path, storage: str = "payload"):
        from qdrant_client import QdrantClient, models

        import hubplugin
        from hubplugin_qdrant import HubQdrantClient

        self.folder, self.models = folder, models
        self.gallery, self.queries = (
            np.load(folder / "gallery.npy"),
            np.load(folder / "queries.npy"),
        )
        self.plain = QdrantClient(":memory:")
        self.plain.create_collection(
            "photos",
            {
                "image": models.VectorParams(
                    size=self.gallery.shape[1], distance=models.Distance.COSINE
                )
            },
        )
        self.plain.upload_collection(
            "photos", {"image": self.gallery}, ids=range(len(self.gallery))
        )
        self.model = hubplugin.load(folder / "model.hub")
        self.apply(storage)
        self.client = HubQdrantClient.wrap(self.plain)

    def apply(self, storage: str) -> None:
        import hubplugin

        hubplugin.apply(self.store(storage=storage), self.model)

    def store(self, **given: Any) -> Any:
        from hubplugin_qdrant.store import QdrantStore

        return QdrantStore(self.plain, "photos", "image", **given)

    def expected(self, row: int, k: int = 5) -> list[int]:
        """The k best targets of a query by the corrected score."""
        unit = self.gallery / np.linalg.norm(self.gallery, axis=1, keepdims=True)
        scores = unit @ self.queries[row] / np.linalg.norm(
            self.queries[row]
        ) + self.model.offsets(self.gallery)
        return np.argsort(-scores)[:k].tolist()

    def found(self, row: int, k: int = 5) -> list[int]:
        return [
            point.id
            for point in self.client.query_points(
                "photos", self.queries[row], using="image", limit=k
            ).points
        ]


@step
def search(service: Service) -> None:
    models = service.models
    for row in range(5):
        assert service.found(row) == service.expected(row)
    requests = [models.QueryRequest(query=[1.0] * 16, using="image", limit=5)] * 2
    assert len(service.client.query_batch_points("photos", requests)) == 2


@step
def search_second_vector(service: Service) -> None:
    other = Service(service.folder, "vector")
    assert other.found(0) == other.expected(0)


@step
def search_async(service: Service) -> None:
    from qdrant_client import AsyncQdrantClient

    from hubplugin_qdrant import AsyncHubQdrantClient

    async def found() -> None:
        client = AsyncHubQdrantClient.wrap(AsyncQdrantClient(":memory:"))
        await client.create_collection(
            "plain",
            service.models.VectorParams(size=4, distance=service.models.Distance.DOT),
        )
        await client.query_points("plain", [1.0, 0, 0, 0])

    asyncio.run(found())


@step
def write(service: Service) -> None:
    batch = {"image": service.gallery[::-1]}
    service.client.upload_collection("photos", batch, ids=range(1000, 1200))
    assert service.store().count() == 400


@step
def keep(service: Service) -> None:
    import hubplugin

    store = service.store()
    service.plain.upsert(
        "photos",
        [
            service.models.PointStruct(
                id=2000, vector={"image": service.gallery[0].tolist()}
            )
        ],
    )
    assert "1" in str(hubplugin.refresh(store, dry_run=True))
    hubplugin.refresh(store)
    found = hubplugin.inspect(store, service.queries)
    assert found.missing == found.stale == 0
    assert store.previous() is None
    store.explain(service.queries[0])


@step
def roll_back(service: Service) -> None:
    import hubplugin

    hubplugin.apply(service.store(), hubplugin.load(service.folder / "other.hub"))
    hubplugin.rollback(service.store())
    assert service.found(0) == service.expected(0)
    service.store().remove()


@step
def record(service: Service) -> None:
    import hubplugin

    recorder = hubplugin.Recorder(service.folder / "queries.recorded")
    recorder.add(service.queries)
    recorder.close()
    copy = service.folder / "copy.hub"
    service.model.save(copy)
    assert hubplugin.load(copy).fingerprint == service.model.fingerprint


@step
def evaluate(service: Service) -> None:
    import hubplugin

    truth = [service.expected(row, 1) for row in range(len(service.queries))]
    found = hubplugin.evaluate(service.store(), queries=service.queries, truth=truth)
    assert found["corrected"].recall[1].value == 1.0


@step
def faiss_file(service: Service) -> None:
    faiss = __import__("faiss")
    import hubplugin

    index = faiss.index_factory(
        service.gallery.shape[1], "IVF8,Flat", faiss.METRIC_INNER_PRODUCT
    )
    unit = service.gallery / np.linalg.norm(service.gallery, axis=1, keepdims=True)
    index.train(unit)
    index.add(unit)
    path = service.folder / "photos.faiss"
    faiss.write_index(index, str(path))
    hubplugin.apply(hubplugin.open_store(f"faiss:{path}"), service.model)
    assert faiss.read_index(str(path)).search(unit[:1], 5)[1].shape == (1, 5)


@step
def command_line(service: Service) -> None:
    from typer.testing import CliRunner

    from hubplugin.cli import app

    for given in (["refresh"], ["rollback"], ["inspect"]):
        assert (
            CliRunner()
            .invoke(app, [*given, f"qdrant-local:{service.folder}/none?collection=x"])
            .exit_code
            != 0
        )


@step
def fits(service: Service) -> None:
    """numpy fits, too; a device of torch says what to install."""
    import hubplugin

    store = service.store()
    model = hubplugin.fit(service.gallery, service.queries)
    np.testing.assert_allclose(model.offsets(service.gallery), model.fitted, atol=1e-5)
    hubplugin.apply(store, service.queries, force=True)
    hubplugin.refit(store, service.queries, force=True)
    hubplugin.diagnose(service.gallery, service.queries)
    with pytest.raises(hubplugin.InputError, match=NO_TORCH) as caught:
        model.offsets(service.gallery, compute=hubplugin.Compute("cpu"))
    assert "\n" not in str(caught.value)


def forked(service: Service, name: str) -> str:
    """How a step ended."""
    child = os.fork()
    if child:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return (
            ENDS[status]
            if 0 <= status < len(ENDS)
            else f"ended with the status {status}"
        )
    end = "failed"
    try:
        STEPS[name](service)
        end = "done" if sys.modules.get("torch") is None else "torch"
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(ENDS.index(end))


def main() -> None:
    folder, *given = sys.argv[1:]
    if "--may-import" not in given:
        sys.modules["torch"] = None  # type: ignore[assignment]
    warnings.simplefilter("ignore")
    import_module("hubplugin_qdrant.store")
    import_module("hubplugin.calibration").QUERIES = 6  # local mode searches in Python
    service = Service(Path(folder))
    for name in given:
        if name in STEPS:
            print(name, forked(service, name), flush=True)


if __name__ == "__main__":
    main()
