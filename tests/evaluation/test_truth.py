"""Ground truth in every accepted form, and one clear line for what is none."""

import numpy as np
import pytest

from hubplugin import InputError
from hubplugin.evaluation.truth import as_truth


def pairs(truth):
    return list(zip(truth.query_rows.tolist(), truth.target_rows.tolist(), strict=True))


def test_without_truth_row_i_belongs_to_row_i():
    assert pairs(as_truth(None, 3, 3)) == [(0, 0), (1, 1), (2, 2)]


@pytest.mark.parametrize(
    "source", [np.array([[4, 1], [0, 2]]), [[4, 1], [0, 2]], [np.array([4, 1]), (0, 2)]]
)
def test_several_targets_a_query_as_an_array_or_as_lists(source):
    assert pairs(as_truth(source, 2, 5)) == [(0, 1), (0, 4), (1, 0), (1, 2)]


def test_a_query_without_a_true_target_is_not_judged():
    truth = as_truth([[3], [], [1, 0]], 3, 4)
    assert truth.judged.tolist() == [0, 2]
    assert truth.counts.tolist() == [1, 2]


def test_a_qrels_file_by_name_with_grades_and_without_the_irrelevant(tmp_path):
    file = tmp_path / "photos.qrels"
    file.write_text("q2 0 cat 1\nq1 0 dog 3\nq1 0 cat 0\nq1 0 owl 1\n")
    truth = as_truth(file, 2, 3, query_names=["q1", "q2"], names=["cat", "dog", "owl"])
    assert pairs(truth) == [(0, 1), (0, 2), (1, 0)]
    assert truth.grades.tolist() == [3, 1, 1]


@pytest.mark.parametrize(
    ("name", "content"),
    [("truth.txt", "0 0 2 1\n0 0 1 1\n2 0 0 1\n"), ("truth.json", "[[2, 1], [], [0]]")],
)
def test_files_of_row_numbers_need_no_names(name, content, tmp_path):
    (tmp_path / name).write_text(content)
    assert pairs(as_truth(tmp_path / name, 3, 3)) == [(0, 1), (0, 2), (2, 0)]
    np.save(tmp_path / "truth.npy", np.array([2, 0]))
    assert pairs(as_truth(tmp_path / "truth.npy", 2, 3)) == [(0, 2), (1, 0)]


def test_a_qrels_file_of_beir_has_a_header_and_three_columns(tmp_path):
    file = tmp_path / "test.tsv"
    file.write_text(
        "query-id\tcorpus-id\tscore\n0\t2\t1\n1\t0\t2\n", encoding="utf-8-sig"
    )
    truth = as_truth(file, 2, 3)
    assert pairs(truth) == [(0, 2), (1, 0)]
    assert truth.grades.tolist() == [1, 2]


def test_a_name_that_is_there_twice_names_nothing(tmp_path):
    (tmp_path / "photos.qrels").write_text("q 0 cat 1\n")
    with pytest.raises(InputError, match="query_names: 'q' is there twice"):
        as_truth(tmp_path / "photos.qrels", 2, 1, query_names=["q", "q"], names=["cat"])


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (7, "no list with a row number"),
        ([[[1], [2, 3]], [0]], "row 0 is no list of row numbers: "),
        ({"a": 1, "b": 2}, "no list with a row number"),
        ("missing.json", "there is no file 'missing.json'"),
        ([0, 9], "target 9, but there are 5; expected rows 0 to 4"),
        ([0, -1], "target -1"),
        ([0], "1 rows for 2 queries"),
        ([[], []], "no true target"),
        ([0.5, 1.0], "no list of row numbers"),
        ([[0, 0], [1]], "target 0 twice for query 0"),
        (None, "do not pair up"),
    ],
)
def test_what_is_no_ground_truth_is_refused_in_one_line(source, said):
    with pytest.raises(InputError, match=said) as refused:
        as_truth(source, 2, 5)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("line", "said"),
    [("q1 0 owl 1", "'owl' is not among the 2 known"), ("q1 owl", "qrels file")],
)
def test_a_qrels_file_that_does_not_fit_is_refused(tmp_path, line, said):
    file = tmp_path / "photos.qrels"
    file.write_text(line + "\n")
    with pytest.raises(InputError, match=said):
        as_truth(file, 1, 2, query_names=["q1"], names=["cat", "dog"])
