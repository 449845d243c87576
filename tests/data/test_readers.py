"""Hostile and broken files: an error with file and row, or a bad row in its place; never a traceback, and no other row lost."""

import cProfile
import csv
import gzip
import io
import json
import random
import tracemalloc
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.config.methods import RowKind
from finetune.config.schema import Data, DatasetSource
from finetune.data.formats import ParsedRow, parse_row
from finetune.data.messages import BadRow
from finetune.data.readers import MAX_ROW_BYTES, RepeatedKeys, _read_lines
from finetune.data.sources import find_splits, read_file
from finetune.errors import UserError
from tests.data.world import read_groups

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=3)
    ),
    max_leaves=5,
)
ROWS = st.lists(
    st.dictionaries(st.text(st.characters(codec="utf-8"), min_size=1), JSON_VALUES, max_size=4),
    min_size=1,
    max_size=8,
)


def numbers_and_problems(path: Path) -> list[tuple[int, str | None]]:
    """(number, None for a sound row or what is wrong with it) for every row of the file."""
    return [
        (number, str(row) if isinstance(row, BadRow) else None)
        for number, row in read_file(str(path))
    ]


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


def test_damaged_lines_are_bad_rows_with_their_number_and_the_others_are_kept(
    tmp_path: Path,
) -> None:
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


def test_a_line_of_100_mb_is_skipped_without_being_held(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "rows.jsonl",
        b'{"text": "a"}\n{"text": "' + b"x" * 100_000_000 + b'"}\n{"text": "b"}\n',
    )
    assert numbers_and_problems(path) == [
        (1, None),
        (2, f"longer than {MAX_ROW_BYTES // 2**20} MiB; cut it into several rows"),
        (3, None),
    ]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (
            "cut.jsonl.gz",
            gzip.compress(b'{"text": "a"}\n' * 10_000, mtime=0)[:-20],
            "the file is truncated",
        ),
        ("none.jsonl.gz", b'{"text": "a"}', "not a valid gzip file"),
        ("cut.json", b'[{"text": "a"}, {"text": "b"', ", row 2: not JSON"),
        ("open.json", b'[{"text": "a"}, {"text": "b"}', ", row 3: the array is never closed"),
        (
            "arrays.json",
            b'[{"text": "a"}]\n[{"text": "b"}]\n',
            "more text after its array of 1 row; join the",
        ),
        ("wrong.json", b'[{"text": "a"}, {"text": nope}, {"text": "c"}]', ", row 2: not JSON"),
        ("deep.json", b"[" * 100_000, ", row 1: nested too deeply"),
        ("object.json", b'{\n"a": 1}', "one JSON object; a list of rows"),
        ("bytes.json", b'[{"text": "\xff"}]', "not UTF-8"),
        (
            "quote.csv",
            b'prompt,completion\na,b\n"c,d\ne,f\n',
            ":3: a quoted field that begins here is never closed",
        ),
        (
            "bytes.csv",
            b"prompt,completion\na,\xff\n",
            ":2: not UTF-8: invalid start byte at byte 3; save it as UTF-8",
        ),
        ("none.parquet", b"PAR1 this is not", "cannot be read as parquet"),
        ("none.arrow", b"nothing of the kind", "cannot be read as arrow"),
        ("rows.xlsx", b"", "unknown kind of file"),
        ("rows.parquet.gz", b"", "files of columns are not read from gzip; unpack it"),
        ("utf16.jsonl", '{"text": "a"}\n'.encode("utf-16"), "text in UTF-16; save it as UTF-8"),
        (
            "bare.jsonl",
            '{"text": "a"}\n'.encode("utf-16-le"),
            "as in UTF-16 or a binary file; save it as UTF-8",
        ),
        (
            "packed.jsonl",
            gzip.compress(b'{"text": "a"}\n', mtime=0),
            "a gzip file; end its name with .gz",
        ),
        (
            "a.csv",
            b"question;answer\na;b\n",
            ": its columns are separated by semicolons, where commas are expected; save it",
        ),
        (
            "b.csv",
            b"question\tanswer\na\tb\n",
            ": its columns are separated by tabs, where commas are expected; end its name",
        ),
        (
            "c.tsv",
            b"question;answer\na;b\n",
            ": its columns are separated by semicolons, where tabs are expected; save it",
        ),
        ("columns.csv", b"PAR1....", "a Parquet file; end its name with .parquet"),
        ("zip.txt", b"PK\x03\x04", "a zip archive; unpack it"),
        (
            "twice.json",
            b'{"data": [{"text": "a"}],\n"data": [{"text": "b"}]}',
            "two keys of its one object",
        ),
    ],
)
def test_a_damaged_file_is_an_error_since_its_rows_would_be_lost(
    tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    path = written(tmp_path, name, content)
    with pytest.raises(UserError) as error:
        list(read_file(str(path)))
    assert str(error.value).startswith(str(path))
    assert words in str(error.value)


def test_csv_values_stay_the_text_that_they_are(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "rows.csv",
        b'question,answer\r\nseven?,007\r\n"two\nlines","a ""b"""\r\nonly one\r\n\r\nlast,1e3\r\n',
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


PAIR = {"prompt": "Q", "chosen": "a", "rejected": "b"}


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        ("classes", [{"text": "x", "label": 0}, {"text": "y", "label": 1}]),
        ("ranked", [{"query": "q", "document": "x", "label": n} for n in (1, 0.5, 2e-3)]),
        ("scored_pairs", [{**PAIR, "margin": n} for n in (1, -0.5, None)]),
        ("pairs", [{**PAIR, "score_chosen": 2, "score_rejected": n} for n in (7.5, 1, None)]),
    ],
)
def test_the_numbers_of_csv_are_those_of_json(
    kind: RowKind, rows: list[dict[str, object]], tmp_path: Path
) -> None:
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    source = DatasetSource(path="rows.csv")
    data = Data(labels=("bad", "good"), num_negatives=0)
    of_csv, of_json = (
        read_groups(kind, data, read, source)
        for read in ([row for _, row in read_file(str(path))], rows)
    )
    assert not any(isinstance(row, BadRow) for row in of_json)
    assert of_csv == of_json


TEXTS = ["n1", "it's"]


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("retrieval", {"query": "q", "positive": "d", "negatives": TEXTS}),
        ("retrieval", {"query": "q", "positive": TEXTS, "negative": "n"}),
        ("ranked", {"query": "q", "documents": TEXTS, "labels": [1, 0.5]}),
        ("steps", {"prompt": "q", "completions": TEXTS, "labels": [True, False]}),
        ("classes", {"text": "x", "label": ["bad", "good"]}),
    ],
)
def test_the_lists_of_csv_are_those_of_json(kind: RowKind, row: dict[str, Any]) -> None:
    data = Data(labels=("bad", "good"), num_negatives=1, problem_type="multi_label_classification")

    def read(write: Callable[[Any], str]) -> ParsedRow | BadRow:
        cells = {
            name: write(value) if isinstance(value, list) else value for name, value in row.items()
        }
        (read_row,) = read_groups(kind, data, [cells], DatasetSource(path="rows.csv"))
        return read_row

    (of_json,) = read_groups(kind, data, [row], DatasetSource(path="rows.jsonl"))
    assert not isinstance(of_json, BadRow)
    assert read(json.dumps) == of_json
    # str() is what pandas writes for lists, and for the arrays that it reads from Parquet
    for write in (str, lambda values: str(np.array(values))):
        assert "a list that is not JSON" in str(read(write))


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
    assert list(read_file(str(tmp_path / "rows.txt"))) == [
        (1, {"text": "one"}),
        (4, {"text": "two"}),
    ]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json.gz", "a.csv.gz", "a.txt.gz"])
def test_a_gzip_bomb_is_an_error_before_it_is_unpacked(tmp_path: Path, name: str) -> None:
    start = {"a.json.gz": b'[{"text": "', "a.csv.gz": b"text\n"}.get(name, b'{"text": "')
    path = written(tmp_path, name, gzip.compress(start + b"x" * 200_000_000, compresslevel=1))
    problem = (
        ":2: longer than 16 MiB"
        if "csv" in name
        else ": unpacks to more than 64 MiB, the most for a file of its size; "
    )
    tracemalloc.start()
    with pytest.raises(UserError, match=name + problem):
        list(read_file(str(path)))
    assert tracemalloc.get_traced_memory()[1] < 150 * 2**20
    tracemalloc.stop()


# A file of some kilobytes -> its column.
BOMBS: dict[str, Callable[[Any], Any]] = {
    "a value in many rows": lambda pa: repeat(pa, 500, 2_000_000),
    "a large value in some rows": lambda pa: repeat(pa, 30, 20_000_000),
    "within a list of structs": lambda pa: pa.ListArray.from_arrays(
        list(range(31)), pa.StructArray.from_arrays([repeat(pa, 30, 20_000_000)], ["content"])
    ),
    "within lists of one size": lambda pa: pa.FixedSizeListArray.from_arrays(
        repeat(pa, 30, 20_000_000), 2
    ),
    "a value in many maps": lambda pa: pa.MapArray.from_arrays(
        list(range(31)), pa.array(["key"] * 30), repeat(pa, 30, 20_000_000)
    ),
    "a value in many rows of bytes": lambda pa: pa.DictionaryArray.from_arrays(
        pa.array([0] * 500, pa.int32()),
        pa.array([b"a" * 2_000_000, *[b""] * 99], pa.large_binary()),
    ),
    "one value": lambda pa: pa.array(["a" * 200_000_000]),
    "nulls": lambda pa: pa.nulls(50_000_000, pa.string()),
    "nulls in a row": lambda pa: pa.array([[None] * 20_000_000]),
}


def repeat(pa: Any, rows: int, size: int) -> Any:
    """A column of `rows` rows of the same text."""
    return pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array(["a" * size]))


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_parquet_bomb_is_read_a_few_rows_at_a_time_or_not_at_all(
    bomb: str, tmp_path: Path
) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(
        pa.table({"text": BOMBS[bomb](pa)}), tmp_path / "a.parquet", compression="zstd"
    )
    assert (tmp_path / "a.parquet").stat().st_size < 200_000
    usual, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(pool)
    try:
        with pytest.raises(
            UserError,
            match=r"a\.parquet: unpacks to more than 64 MiB, the most for a file of its size; is it data\?",
        ):
            for _ in read_file(str(tmp_path / "a.parquet")):
                pass
    finally:
        pa.set_memory_pool(usual)
    assert pool.max_memory() < 300 * 2**20


def test_parquet_in_proportion_is_read(tmp_path: Path) -> None:
    """The same system prompt and tools in every row, as agents' data have them: dictionaries, and much smaller on disk."""
    import pyarrow as pa
    from pyarrow import parquet

    tools, generator = "tool " * 1000, random.Random(0)
    rows = [{"tools": tools, "text": generator.randbytes(200).hex()} for _ in range(20_000)]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", compression="zstd")
    assert sum(len(row["tools"]) for row in rows) > 15 * (tmp_path / "a.parquet").stat().st_size
    assert [row for _, row in read_file(str(tmp_path / "a.parquet"))] == rows


@pytest.mark.parametrize("bomb", [name for name in BOMBS if "value in" in name or "list" in name])
def test_an_arrow_dictionary_is_counted_in_every_row(bomb: str, tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import ipc

    batch = pa.record_batch([BOMBS[bomb](pa)], ["text"])
    with ipc.new_stream(
        tmp_path / "a.arrow", batch.schema, options=ipc.IpcWriteOptions(compression="zstd")
    ) as writer:
        writer.write(batch)
    with pytest.raises(
        UserError, match=r"a\.arrow: unpacks to more than 64 MiB, the most for a file of its size"
    ):
        list(read_file(str(tmp_path / "a.arrow")))


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
@pytest.mark.parametrize("kind", ["stream", "file", "dictionary"])
def test_an_arrow_bomb_is_refused_before_it_is_unpacked(
    tmp_path: Path, codec: str, kind: str
) -> None:
    import pyarrow as pa
    from pyarrow import ipc

    def write(name: str, texts: list[str]) -> str:
        column = pa.array(texts).dictionary_encode() if kind == "dictionary" else pa.array(texts)
        batch = pa.record_batch([pa.array([1] * len(texts)), column], ["number", "text"])
        new = ipc.new_file if kind == "file" else ipc.new_stream
        with new(
            str(tmp_path / name), batch.schema, options=ipc.IpcWriteOptions(compression=codec)
        ) as writer:
            writer.write(batch)
        return str(tmp_path / name)

    bomb, honest = (
        write("bomb.arrow", ["a" * 100_000_000]),
        write("honest.arrow", ["a" * 5000, "b"] * 100),
    )
    allocated = pa.total_allocated_bytes()
    with pytest.raises(UserError, match=r"bomb\.arrow: unpacks to more than 64 MiB"):
        list(read_file(bomb))
    assert pa.total_allocated_bytes() == allocated
    assert [row["text"] for _, row in read_file(honest) if isinstance(row, dict)] == [
        "a" * 5000,
        "b",
    ] * 100


def test_an_object_with_its_rows_inside_is_read_a_row_at_a_time(tmp_path: Path) -> None:
    rows = [{"text": "a" * 1000, "more": [1, {"b": None}]} for _ in range(20_000)]
    path = written(
        tmp_path,
        "a.json",
        json.dumps({"version": {"a": [1]}, "none": [], "data": rows}, indent=1).encode(),
    )
    # more than a row may have, on one line
    on_one_line = written(tmp_path, "b.json", json.dumps({"version": "1", "data": rows}).encode())
    assert sum(row == rows[0] for _, row in read_file(str(on_one_line))) == len(rows)
    cut = written(tmp_path, "cut.jsonl", b'{"text": "a\n' + b'{"text": "b"}\n' * 2_000_000)
    tracemalloc.start()
    assert sum(row == rows[0] for _, row in read_file(str(path))) == len(rows)
    assert [isinstance(row, BadRow) for _, row in islice(read_file(str(cut)), 3)] == [
        True,
        False,
        False,
    ]
    assert tracemalloc.get_traced_memory()[1] < 12 * 2**20
    tracemalloc.stop()


@pytest.mark.parametrize(
    "rows",
    [
        [{"messages": [{"role": "user", "content": '"data": [{'}]}],
        [{"text": "a", "more": {"data": [{"b": 1}]}}],
        [{"data": [{"b": 1}]}, {"data": [{"b": 2}]}],
    ],
)
def test_a_row_with_a_list_on_its_line_stays_one_row(
    rows: list[dict[str, object]], tmp_path: Path
) -> None:
    path = written(tmp_path, "a.json", "\n".join(map(json.dumps, rows)).encode())
    assert [row for _, row in read_file(str(path))] == rows


@pytest.mark.parametrize("blank", [b"\n", b"\r\n", b" \n", b"\n \n", b"\n" * 5000 + b"\r\n"])
def test_blank_lines_are_read_in_linear_time_and_counted(tmp_path: Path, blank: bytes) -> None:
    class Counting(io.BufferedReader):
        copied = 0

        def peek(self, size: int = 0, /) -> bytes:
            ahead = super().peek(size)
            self.copied += len(ahead)
            return ahead

    content = blank * (300_000 // len(blank)) + b"last"
    stream = Counting(io.BytesIO(content), 2**20)  # type: ignore[type-var]
    assert list(_read_lines(stream)) == [(content.count(b"\n") + 1, "last")]
    assert stream.copied < 100 * len(content)
    rows = read_file(
        str(written(tmp_path, "a.jsonl.gz", gzip.compress(content[:-4] + b'{"text": "a"}')))
    )
    assert list(rows) == [(content.count(b"\n") + 1, {"text": "a"})]


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.json"])
def test_many_thousand_columns_are_one_short_sentence_and_linear_in_memory_and_calls(
    tmp_path: Path, name: str
) -> None:
    def measure(columns: int) -> tuple[int, float]:
        row = {f"column {number}": "1" for number in range(columns)}
        lines = (
            f"{','.join(row)}\n{','.join(row.values())}\n" if name == "a.csv" else json.dumps(row)
        )
        path = written(tmp_path, name, (f"[{lines}]" if name == "a.json" else lines).encode())

        def read() -> None:
            ((_, found),) = read_file(str(path))
            assert found == row
            with pytest.raises(
                BadRow, match=rf"column 99, {columns - 100:,} more; known formats: "
            ) as refused:
                parse_row(row, DatasetSource(path=name))
            assert len(str(refused.value)) < 3000

        profile = cProfile.Profile()
        tracemalloc.start()
        profile.runcall(read)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return sum(entry.callcount for entry in profile.getstats()), peak / path.stat().st_size

    (calls, _), (more_calls, share) = measure(10_000), measure(20_000)
    assert more_calls < 2.2 * calls
    assert share < 30


def test_repetitive_text_is_no_bomb(tmp_path: Path) -> None:
    path = written(
        tmp_path, "a.jsonl.gz", gzip.compress(b'{"text": "again and again"}\n' * 100_000)
    )
    assert sum(1 for _ in read_file(str(path))) == 100_000


def test_rows_of_an_array_that_is_read_in_parts(tmp_path: Path) -> None:
    rows = [{"text": "é" * (i * 7919 % 300_000)} for i in range(20)]
    path = written(
        tmp_path,
        "a.json",
        b"\n["
        + b" ,\n ".join(json.dumps(row, ensure_ascii=False).encode() for row in rows)
        + b"\n]\n",
    )
    assert [row for _, row in read_file(str(path))] == rows
    cut = written(tmp_path, "b.json", path.read_bytes()[:3_000_000])
    with pytest.raises(UserError, match=r"b\.json, row \d+: (not JSON|the array is never closed)"):
        list(read_file(str(cut)))
    late = written(tmp_path, "c.json", path.read_bytes()[:-4] + b"\xff")
    with pytest.raises(
        UserError, match=rf"not UTF-8: invalid start byte at byte {path.stat().st_size - 3}"
    ):
        list(read_file(str(late)))


def test_a_name_with_a_glob_in_it_is_the_file_itself(tmp_path: Path) -> None:
    import datasets

    for name, text in (
        ("g*.parquet", "own"),
        ("gap.parquet", "neighbor"),
        ("g[a].parquet", "other"),
        ("ga.parquet", "no"),
    ):
        datasets.Dataset.from_list([{"text": text}]).to_parquet(tmp_path / name)
    assert [row for _, row in read_file(str(tmp_path / "g*.parquet"))] == [{"text": "own"}]
    assert [row for _, row in read_file(str(tmp_path / "g[a].parquet"))] == [{"text": "other"}]
    (folder := tmp_path / "d[1]").mkdir()
    (neighbor := tmp_path / "d1").mkdir()
    written(folder, "train.jsonl", b'{"text": "own"}\n')
    written(neighbor, "train.jsonl", b'{"text": "neighbor"}\n')
    assert find_splits(str(folder)) == {"train": (str(folder / "train.jsonl"),)}


def test_columns_and_keys_of_one_name_are_marked(tmp_path: Path) -> None:
    for name, content, marked in (
        ("a.csv", b"prompt,completion,completion\na,b,c\n", [True]),
        ("b.csv", b"prompt,completion\na,b\n", [False]),
        (
            "a.jsonl",
            b'{"text": "a", "text": "b"}\n{"text": "c"}\n{"a": [{"b": {"c": 1, "c": 2}}]}\n',
            [True, False, True],
        ),
        ("a.json", b'[{"text": "c"}, {"text": "a", "text": "b"}]', [False, True]),
        (
            "inside.json",
            b'{\n"data": [{"text": "c"}, {"text": "a", "text": "b"}, {"a": [{"b": {"c": 1, "c": 2}}]}]}',
            [False, True, True],
        ),
    ):
        rows = [row for _, row in read_file(str(written(tmp_path, name, content)))]
        assert [isinstance(row, RepeatedKeys) for row in rows] == marked, name


def test_what_a_data_set_on_the_disk_has_beside_its_rows_is_no_data(tmp_path: Path) -> None:
    import datasets

    folder = str(tmp_path / "saved")
    datasets.Dataset.from_list([{"text": "own"}]).save_to_disk(folder)
    datasets.load_from_disk(folder).map(
        lambda row: {"text": row["text"].upper()}, cache_file_name=f"{folder}/cache-1.arrow"
    )
    assert find_splits(folder) == {"train": (f"{folder}/data-00000-of-00001.arrow",)}


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.csv", "a.parquet", "a.arrow", "a.json.gz"])
def test_a_pointer_of_git_lfs_is_no_row(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n")
    with pytest.raises(UserError, match="a pointer of Git LFS in place of the file; fetch the"):
        list(read_file(str(path)))


def test_a_json_column_of_a_saved_data_set_keeps_its_objects(tmp_path: Path) -> None:
    """`datasets` stores it as text, and pyarrow alone would return that text."""
    datasets = pytest.importorskip("datasets", minversion="5")
    row = {"answer": {"x": [1, "two"]}}
    features = datasets.Features({"answer": datasets.Json()})
    dataset = datasets.Dataset.from_list([row], features=features)
    dataset.save_to_disk(tmp_path)
    [arrow_file] = tmp_path.glob("*.arrow")
    assert list(read_file(str(arrow_file))) == [(1, row)]
    parquet_file = str(tmp_path / "rows.parquet")
    dataset.to_parquet(parquet_file)
    assert list(read_file(parquet_file)) == [(1, row)]
