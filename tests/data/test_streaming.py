"""Data read while training: the same sequence on any ranks and after any stop, with or without the notes on disk."""

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finetune.config.schema import Batch, Data, DatasetSource, Optimization, Recipe, Run
from finetune.data import prepare as streaming
from finetune.data.data_report import Report, StreamReport
from finetune.data.findings import Finding, Tally
from finetune.data.prepare import PreparedData, StreamedBatches, open_stream
from finetune.data.sources import RowBatch, interleave_sources, read_rows
from finetune.errors import UserError
from tests.conftest import make_tokenizer
from tests.data.world import Rank
from tests.ranks import ROOT, launch_ranks

Stream = Callable[..., StreamedBatches]


@pytest.fixture
def stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stream:
    """A maker of streams over two files, 100 and 50 rows, in blocks of about 64."""
    monkeypatch.setattr(streaming, "BLOCK_ROWS", 64)
    monkeypatch.setattr("finetune.data.sources.TURN_ROWS", 8)
    sources = []
    for name, rows in (("a", 100), ("b", 50)):
        path = tmp_path / f"{name}.jsonl"
        path.write_text(
            "".join(json.dumps({"text": f"{name}{i} " + "x" * (i % 9)}) + "\n" for i in range(rows))
        )
        sources.append(DatasetSource(path=str(path), weight=2.0 if name == "a" else 1.0))

    def make(
        rank: int = 0, size: int = 1, steps: int = 40, threads: int = 1, **keys: Any
    ) -> StreamedBatches:
        data = Data(
            datasets=tuple(sources),
            dataset_cache_dir=str(tmp_path / "cache"),
            max_length=48,
            dataloader_num_workers=threads,
            **keys,
        )
        batch = Batch(per_device_train_batch_size=1, global_batch_size=3)
        recipe = Recipe(
            path="recipe.yaml",
            data=data,
            batch=batch,
            optimization=Optimization(max_steps=steps),
            run=Run(seed=0),
        )
        return open_stream(recipe, make_tokenizer(), Rank(rank, size))

    return make


def texts(batches: Iterator[streaming.StepBatch]) -> list[list[str]]:
    """For each step the texts of its documents on this rank."""
    tokenizer = make_tokenizer()
    steps = []
    for batch in batches:
        rows = []
        for micro_batch in batch.micro_batches:
            assert micro_batch.cu_seq_lens is not None
            bounds = micro_batch.cu_seq_lens.tolist()[
                : len(micro_batch.example_ids) + 1
            ]  # padding may come after
            ids = micro_batch.input_ids[0].tolist()
            rows += [tokenizer.decode(ids[a:b]) for a, b in pairwise(bounds)]
        steps.append(rows)
    return steps


def test_the_sequence_is_the_same_on_any_ranks_and_after_any_stop(
    stream: Stream, tmp_path: Path
) -> None:
    truth = texts(stream().batches())
    assert len(truth) == 40
    seen = Counter(text for step in truth for text in step)
    assert len(seen) == 150 and {text[0] for text in seen} == {
        "a",
        "b",
    }  # all of both files, again and again
    assert sum(seen.values()) > 300
    for start in (0, 1, 11, 25, 39):
        assert texts(stream().batches(start)) == truth[start:]
    shutil.rmtree(
        tmp_path / "cache"
    )  # another machine: the notes are lost, the blocks are made again
    assert texts(stream().batches(25)) == truth[25:]
    for start in (0, 17):
        # In step with each other, as the collectives of training keep them.
        together = zip(*(stream(rank, 3).batches(start) for rank in range(3)), strict=False)
        steps = [
            sum((Counter(texts(iter([share]))[0]) for share in shares), Counter())
            for shares in together
        ]
        assert steps == [Counter(step) for step in truth[start:]]


def test_rows_are_parsed_once_and_those_before_a_restart_once_more(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed = []

    def count_rows(*arguments: Any, **options: Any) -> Iterator[RowBatch]:
        for batch in read_rows(*arguments, **options):
            parsed.append(len(batch.rows))
            yield batch

    monkeypatch.setattr("finetune.data.sources.read_rows", count_rows)
    reports: list[Any] = []
    list(stream().batches(on_report=lambda report, _: reports.append(report)))
    rows_of_blocks = reports[-1].counts["rows_read"]
    assert len(reports) > 3 and sum(parsed) == rows_of_blocks > 300
    parsed.clear()
    list(stream().batches(25))
    assert sum(parsed) == rows_of_blocks


def test_blocks_that_are_made_for_their_notes_do_not_stay(stream: Stream) -> None:
    """The other ranks of the machine wait for the notes."""
    first, second = stream(0, 2), stream(1, 2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(second._find_block, 25)
        found = first._find_block(25)
        assert waiting.result(timeout=30) == found
    block, _, _ = found
    assert block > 1 and [path.name for path in first.folder.iterdir()] == [f"block-{block:06}"]


def test_a_damaged_note_is_not_used(stream: Stream, tmp_path: Path) -> None:
    truth = texts(stream().batches())
    note = next((tmp_path / "cache").rglob("block-000000.json"))
    written = note.read_bytes()
    steps = re.sub(rb'"steps": (\d+)', lambda found: b'"steps": %d' % (int(found[1]) + 1), written)
    for damaged in (
        steps,
        written.replace(b"runs", b"zuns"),
        written[: len(written) // 2],
        b"",
        b"\xff",
    ):
        assert damaged != written
        note.write_bytes(damaged)
        assert texts(stream().batches(25)) == truth[25:]
        assert note.read_bytes() == written


def test_only_notes_are_left_when_it_ends_or_is_closed_early(
    stream: Stream, tmp_path: Path
) -> None:
    whole, early = stream(), stream()
    assert len(list(whole.batches())) == 40
    batches = early.batches()
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    left = [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert left and all(name.startswith("block-") and name.endswith(".json") for name in left)


def test_a_rank_that_resumes_at_the_end_waits_for_nothing(stream: Stream) -> None:
    assert list(stream(1, 2).batches(40)) == []  # rank 0, which would write the block, is not here


def test_the_rows_of_sources_are_in_the_proportion_of_their_weights(
    stream: Stream, tmp_path: Path
) -> None:
    (tmp_path / "b.jsonl").write_text(
        '{"text": "b"}\n' * 3
    )  # it gives 3 rows at a time, the other one 8 or 4
    given: Counter[str] = Counter()
    for source, batch, _ in islice(interleave_sources(stream().data.datasets), 1000):
        given[Path(source.path).stem] += len(batch.rows)
        assert abs(given["a"] - 2 * given["b"]) <= 16


def test_a_bad_row_is_an_error_on_every_rank_when_it_is_reached(
    stream: Stream, tmp_path: Path
) -> None:
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write("nope\n")
    with pytest.raises(UserError, match=r"a\.jsonl:101: not JSON"):
        list(stream().batches())
    (tmp_path / "b.jsonl").write_text("")
    with pytest.raises(UserError, match=r"b\.jsonl: it has no rows"):
        list(stream().batches())


def test_what_is_skipped_and_cut_is_reported_once_and_counted(
    stream: Stream, tmp_path: Path
) -> None:
    rows = [
        json.dumps({"text": f"row {i} " + "x" * (60 if i in (80, 90) else i % 9)})
        for i in range(100)
    ]
    rows[70] = "nope"
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    reports: list[Report] = []
    news: list[list[str]] = []

    def keep(report: Report, new: list[str]) -> None:
        reports.append(report)
        news.append(new)

    batches = stream(on_bad_row="skip", overlength="truncate")
    assert len(list(batches.batches(on_report=keep))) == 40
    assert (
        len(news) > 3 and news[0] == []
    )  # a block is 64 rows of both files: what is wrong comes after it
    lines = [line for block in news for line in block]
    assert len(lines) == 3
    assert any(
        re.search(r"^.*: \d\.\d% of the tokens are lost to max_length: ", line) for line in lines
    )
    assert any(
        line.startswith("warning: skipped: in 1 of ") and line.endswith("a.jsonl:71)")
        for line in lines
    )
    assert any(
        line.startswith("warning: truncated: in ") and "a.jsonl:81" in line for line in lines
    )
    assert (
        not batches.report.counts
    )  # of what is known before anything is read; a second start counts from 0
    kept = reports[-1].as_json()
    blocks = [batches.open_block(number)[2] for number in range(len(news))]
    assert kept["rows_read"] == sum(block.rows_read for block in blocks) > 300
    assert kept["rows_skipped"] == sum(block.rows_skipped for block in blocks) >= 2
    assert kept["overlong"] == 2 * kept["rows_skipped"] and kept["tokens_lost"] > 0
    assert "not JSON" in kept["skipped"][0]
    found = {finding["name"]: finding for finding in kept["findings"]}
    assert set(found) == {"skipped", "truncated"}  # the files come round again: no duplicates
    assert found["skipped"]["where"] == (f"{tmp_path / 'a.jsonl'}:71",)
    # Ten times as many are reported again.
    grown = replace(blocks[-1], findings=(Finding("truncated", "warning", 500, 600, (), ""),))
    report = reports[-1]
    assert isinstance(report, StreamReport) and report.add(grown)[0].startswith(
        "warning: truncated: in "
    )


def test_a_stream_says_of_a_finding_what_a_file_that_is_all_read_does(
    stream: Stream, tmp_path: Path
) -> None:
    rows = [{"text": f"row {i}", "photo": {"path": "a.png", "bytes": None}} for i in range(100)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    reports: list[Report] = []
    batches = stream()
    list(batches.batches(on_report=lambda report, _: reports.append(report)))
    (finding,) = (each for each in reports[-1].findings if each.name == "images_unread")
    (of_block,) = batches.open_block(0)[2].findings
    assert finding.rows > of_block.rows
    assert finding.what == of_block.what and finding.what.endswith("; first: the column photo")
    tally = Tally()
    for tokens in (3, 4):
        block = Tally(rows={"turns_split": 1}, tokens={"turns_split": tokens})
        tally.add_finding(*block.list_findings(examined=2))
    assert tally.list_findings(examined=4)[0].what.endswith("; 7 more tokens")


def test_a_stream_does_not_take_the_plain_template_for_the_tokenizers_own(
    stream: Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_with_template = make_tokenizer

    def make_without_template() -> Any:
        tokenizer = make_with_template()
        tokenizer.chat_template = None
        return tokenizer

    monkeypatch.setattr("tests.data.test_streaming.make_tokenizer", make_without_template)
    question = [{"role": "user", "content": "how"}, {"role": "assistant", "content": "so"}]
    (tmp_path / "a.jsonl").write_text('{"prompt": "how ", "completion": "so"}\n' * 100)
    (tmp_path / "b.jsonl").write_text(json.dumps({"messages": question}) + "\n")
    found = {finding.name for finding in stream().open_block(0)[2].findings}
    assert "template_unused" not in found and "plain_template" in found


def test_a_run_over_a_stream_reports_what_it_skips_and_cuts(
    tiny_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    rows = [json.dumps({"text": f"row {i} " + "word " * (100 if i == 5 else 1)}) for i in range(20)]
    (tmp_path / "a.jsonl").write_text("\n".join([*rows, "nope"]))
    (tmp_path / "held.jsonl").write_text(json.dumps({"text": "word " * 100}))
    recipe = tiny_recipe(
        datasets=[{"path": str(tmp_path / "a.jsonl")}],
        eval_datasets=[{"path": str(tmp_path / "held.jsonl")}],
        streaming=True,
        on_bad_row="skip",
        overlength="truncate",
        max_steps=2,
        export_at_end=False,
        dataset_cache_dir=str(tmp_path / "cache"),
        accelerate_config="fsdp_full_shard",
    )
    said = (
        launch_ranks(ROOT / "finetune" / "run.py", ["--recipe", str(recipe)], timeout=240)
        .check()
        .outputs
    )
    for line in (
        "held out: warning: truncated: in 1 of 1 row ",
        "stream  warning: skipped: in ",
        "stream  warning: truncated",
    ):
        assert said[0].count(line) == 1
    assert said[1] == ""
    report = json.loads((tmp_path / "run" / "data_report.json").read_text())
    assert report["rows_skipped"] > 100 and report["overlong"] == report["rows_skipped"]
    assert {finding["name"] for finding in report["findings"]} == {"skipped", "truncated"}


def test_the_images_of_a_stream_are_known_once_they_are_read(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message about memory plans the mask of their tokens."""
    make = StreamedBatches._make_batches

    def make_with_images(self: StreamedBatches, *arguments: Any) -> Any:
        return replace(make(self, *arguments), images=SimpleNamespace(family="gemma3"))

    monkeypatch.setattr(StreamedBatches, "_make_batches", make_with_images)
    train = stream(threads=0)
    data = PreparedData(train, None, train.report, train.tokenizer)
    assert data.images is None
    train.open_block(0)
    assert data.images == "gemma3"
