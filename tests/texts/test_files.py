"""Texts and clicks read from logs."""

import sys
from functools import partial

import numpy as np
import pandas as pd
import pytest

from hubplugin import Bank, InputError
from hubplugin.bank.texts import read_clicks, read_texts
from tests.refusals import refused

TEXTS = ["red shoes", "blue, with laces", 'a "quoted" one', "ÄÖÜ"]


def write(path, texts, column="query"):
    table = pd.DataFrame({"at": 1, column: texts})
    kinds = {
        ".parquet": table.to_parquet,
        ".csv": partial(table.to_csv, index=False),
        ".tsv": partial(table.to_csv, index=False, sep="\t"),
        ".jsonl": partial(table.to_json, orient="records", lines=True),
        ".txt": partial(np.savetxt, X=texts, fmt="%s"),
    }
    kinds[path.suffix](path)
    return path


KINDS = [".txt", ".jsonl", ".csv", ".tsv", ".parquet"]


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_column_is_found_by_its_usual_name(kind, tmp_path):
    file = tmp_path / f"log{kind}"
    assert read_texts(write(file, TEXTS, "question")).texts == TEXTS
    said = "has no column called query or text or question; rename the column that has"
    with refused(InputError, said):
        read_texts(write(file, TEXTS, "what"))


def test_tables_need_pyarrow_and_lines_do_not(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    said = r"reading log.* needs pyarrow; .*pip install '\.\[tables\]'$"
    with refused(InputError, said):
        read_texts(write(tmp_path / "log.csv", TEXTS))
    assert read_texts(write(tmp_path / "log.txt", TEXTS)).texts == TEXTS


@pytest.mark.parametrize("kind", KINDS)
def test_rows_without_a_text_are_left_out_and_counted(kind, tmp_path, caplog):
    found = read_texts(write(tmp_path / f"log{kind}", ["one", " ", "two"]))
    assert (found.texts, found.rows) == (["one", "two"], [0, 2])
    assert "1 of 3 rows have no text" in caplog.text


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("log.txt", b"\n\n", "has no texts"),
        ("log.txt", b"\xff\xfe\x00", "cannot be read"),
        ("log.csv", b"query,at\na\n", "cannot be read as .csv: .*CSV parse error"),
        (
            "log.jsonl",
            b'{"query": 5}\n',
            "cannot be read as .jsonl: .*JSON parse error",
        ),
        ("log.parquet", b"PAR1 no", "cannot be read as .parquet"),
        ("log.docx", b"", "texts are read from .txt"),
    ],
)
def test_what_cannot_be_read_is_one_line(name, content, said, tmp_path):
    (tmp_path / name).write_bytes(content)
    with refused(InputError, said):
        read_texts(tmp_path / name)
    with refused(InputError, "there is no file"):
        read_texts(tmp_path / "nowhere.txt")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("clicks.csv", b"a,b\n1,2\n", "needs the columns query and target$"),
        ("clicks.npy", b"a,b\n1,2\n", "cannot be read as .npy"),
        ("clicks.xls", b"", r"unknown kind of file '\.xls'; expected one of \.npy"),
        ("clicks.txt", b"red", r"expected \.csv, \.tsv or \.npy"),
    ],
)
def test_clicks_that_cannot_be_read_are_one_line(name, content, said, tmp_path):
    path = tmp_path / name
    path.write_bytes(content)
    with refused(InputError, said):
        Bank(np.eye(3), path).clicks(3)


def clicked(path, content, *given):
    path = path / "clicks.csv"
    path.write_text(content)
    return read_clicks(path, *given)


@pytest.mark.parametrize(
    ("rows", "given", "expected"),
    [
        (["blue,7", "0,5"], (3, ["red", "blue", "green"]), [5, 7, -1]),
        (["0,18446744073709551615"], (1,), [2**64 - 1]),
        (
            ["0,042", "1,0", "2,5ab8c-9"],
            (3,),
            ["042", 0, "5ab8c-9"],
        ),  # a barcode keeps its zeros
        (
            ["2000,7"],
            (2, ["red", "2000"]),
            [-1, 7],
        ),  # a text that is a number is a text
        (["red,7"], (3, ["red", "blue", "red"]), [7, -1, 7]),
        (
            ["2,7"],
            (2, ["one", "two"], [0, 2]),
            [-1, 7],
        ),  # the row of the file, of which one was left out
        (
            ["0,7", "0,8", "0,8", "1,4", "1,3"],
            (2,),
            [8, 4],
        ),  # the most frequent counts, then the first
    ],
)
def test_clicks_name_queries_by_row_or_by_text(rows, given, expected, tmp_path):
    found = clicked(tmp_path, "\n".join(["query,target", *rows, ""]), *given)
    assert found.tolist() == expected
    assert (found.dtype == np.int64) == all(
        isinstance(target, int) and target < 2**63 for target in expected
    )


def test_clicks_of_unknown_queries_are_counted_and_named(tmp_path, caplog):
    found = clicked(tmp_path, "query,target\n0,7\n9,8\npurple,8\n9,8\n", 2)
    assert found.tolist() == [7, -1]
    unknown = "3 of 4 clicks belong to no query of the bank and are left out"
    assert f"{unknown}: '9', 'purple'" in caplog.text
    said = "none of 1 clicks belongs to a query of the bank; expected the text of a query, or"
    with refused(InputError, f"{said} its row from 0 to 1$"):
        clicked(tmp_path, "query,target\n9,8\n", 2)
