"""The states of a collection's versions: from manifest to manifest, without a client."""

import pytest

from hubplugin import StoreError
from hubplugin_qdrant import manifest as versions
from hubplugin_qdrant.manifest import Manifest, Version


def version(number: int, vector: str = "image", model: str = "a", **fields) -> Version:
    return Version.model_validate(
        {
            "number": number, "vector": vector, "metric": "dot", "dim": 2, "method": "is",
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


def test_a_version_that_is_replaced_is_retired_and_its_model_is_the_previous_one():
    second = applied(Manifest(), 1, 2)
    assert numbers(second) == ({"image": 2}, None, [1])
    assert second.previous["image"].number == 1
    assert versions.unused_models(second) == (), "the model before stays"
    cleared = versions.cleared(second, second.retired)
    assert numbers(cleared) == ({"image": 2}, None, [])
    assert cleared.previous == second.previous
    third = applied(cleared, 3)
    assert numbers(third) == ({"image": 3}, None, [1, 2])
    assert third.previous["image"].number == 2
    assert [each.number for each in versions.unused_models(third)] == [1]


def test_the_version_of_one_vector_leaves_the_previous_one_of_another_alone():
    manifest = applied(Manifest(), 1, 2)
    text = version(3, "text")
    manifest = versions.activated(versions.begun(manifest, text), text)
    assert {name: each.number for name, each in manifest.previous.items()} == {"image": 1}


def test_what_was_retired_meanwhile_stays_so():
    second = applied(Manifest(), 1, 2)
    later = applied(second, 3)
    assert numbers(versions.cleared(later, second.retired)) == ({"image": 3}, None, [2])


@pytest.mark.parametrize(
    ("written", "way_out"), [(5, "delete the collection 'photos--hub' and apply again"), (7, "upgrade hubplugin")]
)
def test_a_manifest_of_another_format_is_refused_in_one_line(written, way_out):
    payload = applied(Manifest(), 1).model_dump(mode="json") | {"format": written, "hubplugin": "x", "kept": []}
    with pytest.raises(
        StoreError, match=rf"has manifest format {written} of hubplugin x; .* reads format 6: {way_out}$"
    ):
        versions.parse(payload, "photos")


def test_an_amended_version_stays_active_beside_what_another_run_writes():
    manifest = versions.activated(versions.begun(Manifest(), version(1)), version(1))
    manifest = versions.begun(manifest, version(2, "text"))
    amended = versions.activated(manifest, version(1, ceiling=9.0))
    assert numbers(amended) == ({"image": 1}, 2, [])
    assert amended.active["image"].ceiling == 9.0
