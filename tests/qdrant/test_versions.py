"""The states of a collection's versions: from manifest to manifest, without a client."""

from hubplugin_qdrant import manifest as versions
from hubplugin_qdrant.manifest import Manifest, Version


def version(number: int, vector: str = "image", model: str = "a", **fields) -> Version:
    return Version.model_validate(
        {
            "number": number, "vector": vector, "metric": "dot", "dim": 2,
            "model": model, "parts": 1, **fields,
        }
    )  # fmt: skip


def numbers(manifest: Manifest) -> tuple[dict[str, int], int | None, list[int]]:
    writing = manifest.writing.number if manifest.writing is not None else None
    active = {name: each.number for name, each in manifest.active.items()}
    return active, writing, [each.number for each in manifest.retired]


def applied(manifest: Manifest, *numbers: int) -> Manifest:
    for number in numbers:
        new = version(number, model=f"model {number}")
        manifest = versions.activated(versions.begun(manifest, new), new)
    return manifest


def test_what_was_retired_meanwhile_stays_so():
    second = applied(Manifest(), 1, 2)
    later = applied(second, 3)
    assert numbers(versions.cleared(later, second.retired)) == ({"image": 3}, None, [2])


def test_an_amended_version_stays_active_beside_what_another_run_writes():
    manifest = versions.activated(versions.begun(Manifest(), version(1)), version(1))
    manifest = versions.begun(manifest, version(2, "text"))
    amended = versions.activated(manifest, version(1, ceiling=9.0))
    assert numbers(amended) == ({"image": 1}, 2, [])
    assert amended.active["image"].ceiling == 9.0
