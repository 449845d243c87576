"""Hostile and broken files: an error with file and row, or a bad row in its place; never a traceback, nothing else lost."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.data.files import MAX_ROW_BYTES, read_file
from finetune.data.formats import BadRow
from finetune.errors import UserError

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=3)
    ),
    max_leaves=5,
)
ROWS = st.lists(
    st.dictionaries(st.text(st.characters(codec="utf-8"), min_size=1), JSON_VALUES, max_size=4), min_size=1, max_size=8
)


def numbers_and_problems(path: Path) -> list[tuple[int, str | None]]:
    """(number, None for a sound row or what is wrong with it) for every row of the file."""
    return [(number, str(row) if isinstance(row, BadRow) else None) for number, row in read_file(str(path))]


def written(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


@given(ROWS)
def test_rows_come_back_as_they_are_from_every_layout_of_json(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, object]]
) -> None:
    folder = tmp_path_factory.mktemp("json")
    lines = "\n".join(json.dumps(row) for row in rows).encode()
    layouts = {
        "lines.jsonl": lines,
        "lines-in.json": lines,
        "bom.jsonl": b"\xef\xbb\xbf" + lines,
        "packed.jsonl.gz": gzip.compress(lines),
        "array.json": json.dumps(rows).encode(),
        "laid-out.json": json.dumps(rows, indent=2, ensure_ascii=False).encode(),
        "inside.json": json.dumps({"version": 1, "data": rows}, indent=2).encode(),
    }
    for name, content in layouts.items():
        assert [row for _, row in read_file(str(written(folder, name, content)))] == rows, name


@given(st.binary(max_size=200), st.sampled_from(["jsonl", "json", "csv", "tsv", "txt", "jsonl.gz"]))
def test_any_bytes_at_all_give_rows_bad_rows_or_one_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, suffix: str
) -> None:
    path = written(tmp_path_factory.mktemp("bytes"), f"rows.{suffix}", content)
    try:
        for number, row in read_file(str(path)):
            assert number >= 1
            assert isinstance(row, dict | BadRow)
    except UserError as error:
        assert str(path) in str(error)


def test_damaged_lines_are_told_with_their_number_and_the_others_are_kept(tmp_path: Path) -> None:
    lines = [
        b'{"text": "first"}',
        b"not json",
        b"",
        b'{"text": "cut off',
        b'{"text": "\xff"}',
        b'{"text": "a\x00b"}',
        b"[1, 2]",
        b"7",
        b'{"a":' * 100_000,
        b'{"text": "last"}',
    ]
    found = numbers_and_problems(written(tmp_path, "rows.jsonl", b"\n".join(lines)))
    assert [number for number, problem in found if problem is None] == [1, 10]
    problems = {number: problem for number, problem in found if problem is not None}
    expected = {2: "not JSON", 4: "not JSON", 5: "not UTF-8", 6: "not JSON", 7: "found list", 8: "found int", 9: "nested too deeply"}  # fmt: skip
    assert problems.keys() == expected.keys()
    for number, words in expected.items():
        assert words in (problems[number] or "")


def test_a_line_of_100_mb_is_passed_over_without_being_held(tmp_path: Path) -> None:
    path = written(tmp_path, "rows.jsonl", b'{"text": "a"}\n{"text": "' + b"x" * 100_000_000 + b'"}\n{"text": "b"}\n')
    assert numbers_and_problems(path) == [
        (1, None),
        (2, f"longer than {MAX_ROW_BYTES // 2**20} MiB; cut it into several rows"),
        (3, None),
    ]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("cut.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 10_000)[:-20], "the file is cut off"),
        ("none.jsonl.gz", b'{"text": "a"}', "not a sound gzip file"),
        ("cut.json", b'[{"text": "a"}, {"text": "b"', ":2: not JSON"),
        ("open.json", b'[{"text": "a"}, {"text": "b"}', ":3: the array of rows has no end"),
        ("wrong.json", b'[{"text": "a"}, {"text": nope}, {"text": "c"}]', ":2: not JSON"),
        ("deep.json", b"[" * 100_000, ":1: nested too deeply"),
        ("object.json", b'{\n"a": 1}', "one JSON object; a list of rows"),
        ("bytes.json", b'[{"text": "\xff"}]', "not UTF-8"),
        ("quote.csv", b'prompt,completion\na,b\n"c,d\ne,f\n', ":3: a quoted field that begins here never ends"),
        ("bytes.csv", b"prompt,completion\na,\xff\n", ":2: not UTF-8"),
        ("none.parquet", b"PAR1 this is not", "cannot be read as parquet"),
        ("none.arrow", b"nothing of the kind", "cannot be read as arrow"),
        ("rows.xlsx", b"", "unknown kind of file"),
    ],
)
def test_a_damaged_file_is_an_error_for_its_rows_would_be_lost(
    tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    path = written(tmp_path, name, content)
    with pytest.raises(UserError) as error:
        list(read_file(str(path)))
    assert str(error.value).startswith(str(path))
    assert words in str(error.value)


def test_csv_values_stay_the_text_that_they_are(tmp_path: Path) -> None:
    path = written(
        tmp_path, "rows.csv", b'question,answer\r\nseven?,007\r\n"two\nlines","a ""b"""\r\nonly one\r\n\r\nlast,1e3\r\n'
    )
    rows = list(read_file(str(path)))
    assert [row for _, row in rows if isinstance(row, dict)] == [
        {"question": "seven?", "answer": "007"},
        {"question": "two\nlines", "answer": 'a "b"'},
        {"question": "last", "answer": "1e3"},
    ]
    assert [(number, str(row)) for number, row in rows if isinstance(row, BadRow)] == [
        (5, "1 fields where the first line names 2 columns")
    ]


def test_parquet_and_arrow_and_text_are_read(tmp_path: Path) -> None:
    import datasets

    rows = [{"prompt": "a", "completion": "1"}, {"prompt": "b", "completion": "2"}]
    data = datasets.Dataset.from_list(rows)
    data.to_parquet(tmp_path / "rows.parquet")
    data.save_to_disk(tmp_path / "saved")
    (tmp_path / "rows.txt").write_text("one\n\n  \ntwo\n")
    assert list(read_file(str(tmp_path / "rows.parquet"))) == list(enumerate(rows, 1))
    (arrow,) = (tmp_path / "saved").glob("*.arrow")
    assert list(read_file(str(arrow))) == list(enumerate(rows, 1))
    assert list(read_file(str(tmp_path / "rows.txt"))) == [(1, {"text": "one"}), (4, {"text": "two"})]
