"""Ground truth in every accepted form, and one clear line for what is none."""

import numpy as np
import pytest

from hubplugin import InputError
from hubplugin.evaluation.truth import as_truth, read_truth
from tests.refusals import refused


def pairs(truth):
    return list(zip(truth.query_rows.tolist(), truth.target_rows.tolist(), strict=True))


def test_without_truth_row_i_belongs_to_row_i():
    assert pairs(as_truth(None, 3, 3)) == [(0, 0), (1, 1), (2, 2)]


@pytest.mark.parametrize(
    "source",
    [
        np.array([[2, 1], [-1, -1], [0, 0]]),
        [[2, 1], [], [0]],
        [np.array([2, 1]), (), np.int64(0)],
        "truth.npy",
        "truth.txt",
        "truth.tsv",
    ],
)
def test_truth_comes_as_an_array_as_lists_and_as_files(source, tmp_path):
    np.save(tmp_path / "truth.npy", [[2, 1], [-1, -1], [0, 0]])
    (tmp_path / "truth.txt").write_text("0 0 2 1\n0 0 1 1\n2 0 0 1\n2 0 1 0\n")
    beir = "query-id\tcorpus-id\tscore\n0\t2\t1\n0\t1\t1\n2\t0\t1\n"
    (tmp_path / "truth.tsv").write_text(beir, encoding="utf-8-sig")
    if isinstance(source, str):
        source = tmp_path / source
    truth = as_truth(source, 3, 3)
    assert pairs(truth) == [(0, 1), (0, 2), (2, 0)]
    assert truth.judged.tolist() == [0, 2]
    of_store = [{int(key) for key in each} for each in read_truth(source, 3)]
    assert of_store == [{1, 2}, set(), {0}]


def test_a_qrels_file_by_name_with_grades_and_without_the_irrelevant(tmp_path):
    file = tmp_path / "photos.qrels"
    file.write_text("q2 0 cat 1\nq1 0 dog 3\nq1 0 cat 0\nq1 0 owl 1\n")
    truth = as_truth(file, 2, 3, query_names=["q1", "q2"], names=["cat", "dog", "owl"])
    assert pairs(truth) == [(0, 1), (0, 2), (1, 0)]
    assert truth.grades.tolist() == [3, 1, 1]
    assert read_truth(file, 2, ["q1", "q2"]) == [{"dog": 3, "owl": 1}, {"cat": 1}]
    with refused(InputError, "query_names: 'q' occurs twice"):
        read_truth(file, 2, ["q", "q"])


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (7, "1 rows for 2 queries"),
        ([[[1], [2, 3]], [0]], r"\[1\] is not an id"),
        ("missing.npy", "there is no file 'missing.npy'"),
        ([0, 9], "target 9, but there are 5: expected rows 0 to 4"),
        ([0, -2], "target -2"),
        ([0], "1 rows for 2 queries"),
        ([[], []], "no true target"),
        ([0.5, 1.0], "0.5 is not an id"),
        (None, "do not pair up"),
        (["owl", "cat"], "names target 'owl', but there are 5"),
        ("owl.qrels", "is not a qrels file"),
    ],
)
def test_what_is_no_ground_truth_is_refused_in_one_line(source, said, cwd):
    (cwd / "owl.qrels").write_text("q1 owl\n")
    with refused(InputError, said):
        as_truth(source, 2, 5)
