"""What is read as vectors, and what is refused, in one line."""

import gc
import pickle
import tempfile
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from hubplugin import Bank, InputError, fit
from hubplugin.metric import Metric
from hubplugin.vectors import as_vectors, prepare, take_rows, to_tempfile
from tests.refusals import refused

X = np.arange(12, dtype=np.float32).reshape(4, 3) - 5


def refuses(source, *parts):
    """Assert that a source is refused in one line that has these parts."""
    with refused(InputError, "") as caught:
        as_vectors(source, "query bank").array()
    for part in parts:
        assert part in str(caught.value)
    return str(caught.value)


def assert_reads(source, expected=X):
    np.testing.assert_array_equal(as_vectors(source).array(), expected)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i1", "i4", "i8", ">f4"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_numpy_of_any_numeric_type_and_memory_order(dtype, order):
    assert_reads(np.asarray(X, dtype, order=order))


def test_strided_views_lists_and_memory_maps(tmp_path):
    assert_reads(np.repeat(X, 2, axis=0)[::2])
    assert_reads(X.tolist())
    np.save(tmp_path / "x.npy", X)
    assert_reads(np.load(tmp_path / "x.npy", mmap_mode="r"))


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32]
)
def test_torch_tensors(dtype):
    tensor = torch.from_numpy(X).to(dtype)
    assert_reads(tensor)
    if tensor.is_floating_point():
        assert_reads(tensor.requires_grad_())


def column(*rows):
    """As in the column of a table: an object array."""
    made = np.empty(len(rows), object)
    made[:] = rows
    return made


def test_the_column_of_a_table_with_one_vector_a_row():
    import pandas as pd

    for rows in (X.tolist(), list(X)):
        table = pd.DataFrame({"text": list("abcd"), "embedding": rows})
        assert_reads(table["embedding"])
        assert_reads(table["embedding"].to_numpy())
        assert_reads(list(table["embedding"]))
    refuses(table["text"], "is made of texts")


def table(path, columns, **options):
    """Writes a parquet file of `columns`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table(columns), path, **options)


@pytest.mark.parametrize(
    ("suffix", "write"),
    [
        (".npy", lambda path: np.save(path, X)),
        (".npy", lambda path: np.save(path, np.asfortranarray(X))),
        (
            ".parquet",
            lambda path: table(
                path, {"id": [1, 2, 3, 4], "vector": X.tolist()}, row_group_size=3
            ),
        ),
    ],
)
def test_files_are_read_in_blocks_and_truncated_ones_refused(suffix, write, tmp_path):
    path = tmp_path / f"x{suffix}"
    write(path)
    vectors = as_vectors(path)
    assert (vectors.rows, vectors.dim) == (4, 3)
    blocks = list(vectors.blocks(3))
    assert [len(block) for block in blocks] in ([3, 1], [3, 1, 0])
    for _ in range(2):  # as often as needed
        assert_reads(vectors)
        np.testing.assert_array_equal(vectors.select(np.array([0, 3])), X[[0, 3]])
    path.write_bytes(path.read_bytes()[:-7])
    refuses(path, f"cannot be read as {suffix}")


def test_one_of_several_columns_is_named_behind_a_hash(tmp_path):
    table(tmp_path / "x.parquet", {"a": X.tolist(), "b": (X + 1).tolist()})
    assert_reads(f"{tmp_path}/x.parquet#b", X + 1)
    refuses(tmp_path / "x.parquet", "a, b")
    refuses(f"{tmp_path}/x.parquet#c", "a, b")


def test_pickles_are_never_unpickled(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "exploded"), "w"))

    np.save(tmp_path / "x.npy", np.array([[Bomb()]], dtype=object), allow_pickle=True)
    (tmp_path / "z.npy").write_bytes(pickle.dumps(Bomb()))
    for name in ("x.npy", "z.npy"):
        refuses(tmp_path / name)
        assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (np.empty((0, 3)), "empty"),
        (np.empty((3, 0)), "empty"),
        (np.zeros(3), "1 dimension"),
        (np.array([[1, "a"]], dtype=object), "an array of object"),
        (["how do I", "what is"], "is made of texts; embed texts with the model"),
        (np.array(["how do I", "what is"], object), "is made of texts; embed"),
        (column([1.0, 2.0], [3.0]), "a vector of the same length in each row"),
        (column([1.0, None], [2.0, 3.0]), "an array of object"),
        (np.array([[True, False]]), "bool"),
        (np.array([[1j, 2]]), "complex"),
        (torch.tensor([[True]]), "torch.bool"),
        (torch.full((2, 2), 1e300, dtype=torch.float64), "too large for float32"),
        (
            [torch.ones(2, requires_grad=True)],
            "list is not a matrix [rows, d]: Can't call numpy()",
        ),
        (np.ma.masked_array(X, mask=X > 1), "masked values"),
        ([[1.0, 2.0], [3.0]], "not a matrix [rows, d]: setting an array element"),
        ("nowhere.npy", "no file 'nowhere.npy'"),
        ("some text " * 500, "there is no file"),
    ],
)
def test_what_is_no_matrix_of_numbers_is_refused_by_name(source, says):
    refuses(source, says, "query bank")


def test_another_kind_of_file_is_refused_with_the_kinds_that_are_read(tmp_path):
    (tmp_path / "bank.txt").write_text("how do I\n")
    names = "for a file of texts name the model, embed="
    refuses(tmp_path / "bank.txt", "expected one of .npy, .parquet", names)


def test_a_folder_a_store_and_a_text_are_called_what_they_are(tmp_path):
    (tmp_path / "x.npy").write_text("0.1 0.2\n0.3 0.4\n")
    refuses(tmp_path, "is a folder")
    refuses(tmp_path / "x.npy", "cannot be read as .npy")
    refuses(object(), "object is not a matrix [rows, d]")
    by_url = refuses("qdrant://user:secret@host/photos", "hubplugin.open_store")
    assert "secret" not in by_url


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_the_first_row_that_is_not_finite_is_named(bad):
    x = np.ones((40_000, 2), np.float32)
    x[30_007, 1] = x[35_000, 0] = bad
    refuses(x, "row 30007 ")


def test_a_zero_vector_is_refused_under_cosine_alone():
    x = np.ones((20_000, 2), np.float32)
    x[17_000] = 0
    assert len(prepare(as_vectors(x), Metric.DOT)) == 20_000
    with refused(InputError, "row 17000 is a zero vector"):
        prepare(as_vectors(x), Metric.COSINE)


@pytest.mark.parametrize(
    "source", [np.asarray, torch.from_numpy, lambda x: to_tempfile([x], "x")]
)
def test_of_some_rows_the_others_are_not_looked_at(source):
    x = np.ones((20_000, 2), np.float32)
    x[5_000] = np.nan
    x[17_000] = 0
    vectors = as_vectors(source(x), "x")
    assert len(take_rows(vectors, np.array([4_999, 5_001]), Metric.COSINE)) == 2
    for rows, says in (
        ([4, 5_000], "row 5000 holds a value"),
        ([4, 17_000], "row 17000 is a zero vector"),
    ):
        with refused(InputError, says):
            take_rows(vectors, np.array(rows), Metric.COSINE)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ([["a", "b"]], "has no column of vectors; embed texts with the model"),
        ([[1.0, 2.0], [3.0]], "mixed dimensions"),
        ([None, [1.0, 2.0]], r"query bank (x.parquet): mixed dimensions"),
        (["how do I"], "has no column of vectors; embed texts with the model"),
    ],
)
def test_a_parquet_column_without_a_vector_in_each_row_is_refused(
    values, says, tmp_path
):
    table(tmp_path / "x.parquet", {"v": values})
    assert says in refuses(tmp_path / "x.parquet")


def test_a_parquet_file_with_a_damaged_page_is_refused_when_it_is_reached(tmp_path):
    import pyarrow.parquet as pq

    path = tmp_path / "x.parquet"
    numbers = np.random.default_rng(0).normal(size=(3000, 2))
    table(path, {"v": numbers.tolist()}, row_group_size=500, compression="zstd")
    content = bytearray(path.read_bytes())
    page = pq.ParquetFile(path).metadata.row_group(5).column(0)
    content[page.data_page_offset : page.data_page_offset + 400] = bytes(400)
    path.write_bytes(content)
    refuses(path, "cannot be read as .parquet")


def test_blocks_that_can_be_read_once_are_spooled_and_leave_no_file_and_none_open(
    tmp_path, monkeypatch, recwarn
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    warnings.simplefilter("always", ResourceWarning)
    vectors = to_tempfile(iter([X, X + 1]), "gallery")
    assert not list(tmp_path.iterdir()), "not even while it is read: a kill leaves none"
    for _ in range(2):
        assert_reads(vectors, np.concatenate([X, X + 1]))
    del vectors
    gc.collect()
    assert not any(issubclass(told.category, ResourceWarning) for told in recwarn)


@pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="needs a device that is always full"
)
def test_a_gallery_for_which_the_disk_has_no_room_is_refused(monkeypatch):
    monkeypatch.setattr(tempfile, "TemporaryFile", partial(open, "/dev/full", "wb"))
    needed = rf"No space left on device; at least {X.nbytes} bytes are needed and [\d,]+ are free; set"
    with refused(InputError, needed):
        to_tempfile(iter([X]), "gallery")


def test_bank_and_targets_of_different_dimensions_are_both_named():
    other = np.ones((5, 2))
    for call, said in (
        (lambda: fit(other, X, "is"), "targets has 2 dimensions, the query bank has 3"),
        (
            lambda: fit(None, Bank(X, other), "dualis"),
            "query bank has 3 dimensions, target bank has 2",
        ),
        (
            lambda: fit(None, X, "is").offsets(other),
            "targets has 2 dimensions, the bank has 3; embed both with the same model",
        ),
    ):
        with refused(InputError, said):
            call()


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1.0, 1e20, 1e38])
def test_vectors_of_any_length_that_float32_holds_have_a_direction(scale):
    x = np.array([[3, 4], [3 * scale / 4, scale], [1, 0]], np.float32)
    unit = prepare(as_vectors(x), Metric.COSINE)
    np.testing.assert_allclose(unit, [[0.6, 0.8], [0.6, 0.8], [1, 0]], rtol=2e-7)
