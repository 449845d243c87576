"""The cache of tokens: made once on a node, whole or not at all, found again by whatever made it."""

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune.config.reader import read_recipe
from finetune.config.schema import Data, DatasetSource
from finetune.data.prepare import open_cached_store
from finetune.data.sources import hash_content, hash_file
from finetune.data.token_store import DamagedStore, cache_key, open_store
from finetune.data.tokenizer import load_tokenizer
from finetune.errors import UserError
from tests.conftest import make_tokenizer
from tests.ranks import launch_ranks, start_ranks

# Each rank tokenizes or waits, as in a run, and prints what it found; no process group is there to help.
RANK = """
import os, sys, time
from finetune.data import prepare, token_store as cache
from finetune.data.prepare import open_cached_store
from finetune.errors import UserError
from finetune.config.schema import Data, DatasetSource
from tests.conftest import make_tokenizer

rank = int(os.environ["RANK"])
path, folder, scenario = sys.argv[1:]
made = []
publish = cache.publish_store
cache.publish_store = lambda *arguments: (made.append(rank), time.sleep(1 if scenario == "slow" else 0), publish(*arguments))
if scenario == "dies" and rank == 0:
    read = prepare.tokenize_rows
    def stopped(*arguments):
        yield next(read(*arguments))
        print("half-way", flush=True)
        time.sleep(60)
    prepare.tokenize_rows = stopped
try:
    store = open_cached_store(DatasetSource(path=path), Data(dataset_cache_dir=folder), make_tokenizer(), rank)
    print("made" if made else "found", len(store.rows), int(store.input_ids.sum()), type(store.input_ids).__name__)
except UserError as error:
    print("failed", error)
"""


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(json.dumps({"text": f"row {i} " + "x" * (i % 7)}) + "\n" for i in range(1200))
    )
    return path


def test_one_rank_writes_it_the_others_wait_and_all_read_the_same(
    rows: Path, tmp_path: Path
) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    cache = tmp_path / "cache"
    outputs = launch_ranks(script, [str(rows), str(cache), "slow"], ranks=3).check().outputs
    assert outputs[0].startswith("made 1200 ")
    assert {output.removeprefix("made").removeprefix("found") for output in outputs} == {
        outputs[0].removeprefix("made")
    }
    assert [output.split()[0] for output in outputs] == ["made", "found", "found"]
    assert outputs[0].split()[-1] == "memmap"

    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "a"}\nnot json\n')
    outputs = launch_ranks(script, [str(bad), str(cache), "slow"], ranks=2).check().outputs
    assert outputs[0] == outputs[1]
    assert outputs[0].startswith(f"failed {bad}:2: not JSON")

    killed = start_ranks(script, [str(rows), str(tmp_path / "cache2"), "dies"], ranks=1)
    deadline = time.monotonic() + 60
    while "half-way" not in killed.output(0) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(killed.processes[0].pid, signal.SIGKILL)
    killed.wait(30)
    left = list((tmp_path / "cache2").iterdir())
    assert [path.name.startswith("making-") for path in left] == [True]
    again = (
        launch_ranks(script, [str(rows), str(tmp_path / "cache2"), "well"], ranks=2).check().outputs
    )
    assert again[0].startswith("made 1200 ") and again[1].startswith("found 1200 ")
    (folder,) = (tmp_path / "cache2").iterdir()
    assert not folder.name.startswith("making-")  # swept

    # Every rank finds the damage; rank 0 writes the store again, and only then do the others read it.
    flip_bit(folder / "labels.bin")
    again = (
        launch_ranks(script, [str(rows), str(tmp_path / "cache2"), "slow"], ranks=2).check().outputs
    )
    assert "labels.bin: damaged: it is not what was written" in again[0]
    assert again[0].splitlines()[-1].startswith("made 1200 ") and again[1].startswith("found 1200 ")


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes() or b"0")  # a column of images, where there are none
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 8 * 4])


def test_a_damaged_store_is_written_again(
    rows: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source, data, tokenizer = (
        DatasetSource(path=str(rows)),
        Data(dataset_cache_dir=str(tmp_path / "c")),
        make_tokenizer(),
    )
    facts = open_cached_store(source, data, tokenizer, 0).facts
    (folder,) = (tmp_path / "c").iterdir()
    written = {file.name: file.read_bytes() for file in folder.iterdir()}
    damages: list[tuple[str, Callable[[Path], None]]] = [
        *((name, flip_bit) for name in written),
        ("input_ids.bin", cut_in_half),
        ("lengths.bin", cut_in_half),
        ("facts.json", lambda path: path.write_text("")),
        ("labels.bin", Path.unlink),
        ("facts.json", Path.unlink),
    ]
    for name, damage in damages:
        damage(folder / name)
        again = open_cached_store(source, data, tokenizer, 0)
        assert {file.name: file.read_bytes() for file in folder.iterdir()} == written
        assert again.facts == facts and again.input_ids.tobytes() == written["input_ids.bin"]
        said = capfd.readouterr().err
        assert name in said and "the rows are tokenized again" in said
        assert list((tmp_path / "c").iterdir()) == [folder]


def test_damage_that_one_rank_alone_finds_ends_its_wait(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Local rank 0, which would write the store again, has found no damage and gone on."""
    source = DatasetSource(path=str(rows))
    data = Data(dataset_cache_dir=str(tmp_path / "c"))
    tokenizer = make_tokenizer()
    open_cached_store(source, data, tokenizer, 0)
    (folder,) = (tmp_path / "c").iterdir()
    flip_bit(folder / "labels.bin")
    monkeypatch.setattr("finetune.data.token_store.DAMAGE_SECONDS", 0.3)
    tries = []

    def open_at_most_20_times(folder: Path) -> Any:
        tries.append(folder)
        assert len(tries) <= 20
        return open_store(folder)

    monkeypatch.setattr("finetune.data.token_store.open_store", open_at_most_20_times)
    with pytest.raises(DamagedStore, match=r"labels\.bin: damaged"):
        open_cached_store(source, data, tokenizer, 1)
    assert len(tries) > 2


def test_what_a_living_process_is_writing_stays(rows: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "cache" / f"making-{socket.gethostname()}-{os.getppid()}-abc"
    theirs.mkdir(parents=True)
    open_cached_store(
        DatasetSource(path=str(rows)),
        Data(dataset_cache_dir=str(tmp_path / "cache")),
        make_tokenizer(),
        0,
    )
    assert theirs.exists()


def key_of(source: DatasetSource, data: Data, tokenizer: Any) -> str:
    return cache_key(source, hash_content(source), data, tokenizer)


def test_everything_that_makes_the_tokens_is_in_the_key_and_nothing_else(rows: Path) -> None:
    tokenizer, other = make_tokenizer(), make_tokenizer()
    other.add_tokens(["row"])
    templated = make_tokenizer()
    templated.chat_template = "{{ messages[0].content }}"
    stopping = make_tokenizer()
    stopping.stop_tokens = (
        "<|user|>",
    )  # of eot_tokens: whether the end of a turn is one of them is a finding
    source = DatasetSource(path=str(rows))
    keys = [
        key_of(source, Data(), tokenizer),
        key_of(source, Data(), stopping),
        key_of(source, Data(), other),
        key_of(source, Data(), templated),
        key_of(source, Data(assistant_only_loss=False), tokenizer),
        key_of(source, Data(on_bad_row="skip"), tokenizer),
        key_of(DatasetSource(path=str(rows), split="train[:5]"), Data(), tokenizer),
        key_of(DatasetSource(path=str(rows), type="text"), Data(), tokenizer),
    ]
    assert len(set(keys)) == len(keys)
    same = [
        key_of(DatasetSource(path=str(rows), weight=2.0), Data(), make_tokenizer()),
        key_of(
            source,
            Data(max_length=7, packing=False, overlength="drop", dataset_num_proc=3),
            tokenizer,
        ),
    ]
    assert set(same) == {keys[0]}
    before, stamp = hash_file(str(rows)), rows.stat()
    rows.write_text(rows.read_text().replace("row 7 ", "row 8 "))
    os.utime(
        rows, ns=(stamp.st_atime_ns, stamp.st_mtime_ns)
    )  # same size, same time: only the content differs
    assert hash_file(str(rows)) != before
    assert key_of(source, Data(), tokenizer) not in keys


def test_the_library_that_counts_the_tokens_of_images_is_in_their_key(
    rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = read_recipe("quickstart_vision")
    tokenizers = load_tokenizer(recipe.model, recipe.data), make_tokenizer()

    def keys() -> list[str]:
        source = DatasetSource(path=str(rows))
        return [cache_key(source, {}, recipe.data, tokenizer) for tokenizer in tokenizers]

    before = keys()
    monkeypatch.setattr("finetune.data.token_store.version", lambda _: "6.0")
    assert [key == old for key, old in zip(keys(), before, strict=True)] == [False, True]


def test_a_folder_that_cannot_be_written_is_an_error(rows: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"cannot write the tokens: .*; set dataset_cache_dir"):
        open_cached_store(
            DatasetSource(path=str(rows)),
            Data(dataset_cache_dir=str(tmp_path / "file" / "x")),
            make_tokenizer(),
            0,
        )


def test_what_the_system_does_not_let_us_read_is_an_error(tmp_path: Path) -> None:
    """A file without permission fails alike, but not for root, who may run these tests."""
    (unreadable := tmp_path / "a.jsonl").symlink_to("/proc/self/mem")
    os.mkfifo(pipe := tmp_path / "b.jsonl")
    too_long = "c" * 300 + ".jsonl"
    for path, problem in (
        (unreadable, r"a\.jsonl: cannot be read: Input/output error"),
        (pipe, r"b\.jsonl: a pipe or a device, not a file or folder"),
        (too_long, r"c\.jsonl: cannot be read: File name too long"),
    ):
        with pytest.raises(UserError, match=problem):
            open_cached_store(
                DatasetSource(path=str(path)),
                Data(dataset_cache_dir=str(tmp_path)),
                make_tokenizer(),
                0,
            )
    (recipe := tmp_path / "recipe.yaml").write_text(f"datasets:\n  - path: {too_long}\n")
    with pytest.raises(
        UserError, match=r"recipe\.yaml:2: path: c+\.jsonl: cannot be read: File name too long"
    ):
        read_recipe(str(recipe))


def test_the_number_of_threads_does_not_change_a_token(rows: Path, tmp_path: Path) -> None:
    stores = [
        open_cached_store(
            DatasetSource(path=str(rows)),
            Data(dataset_cache_dir=str(tmp_path / str(threads)), dataset_num_proc=threads),
            make_tokenizer(),
            0,
        )
        for threads in (1, 3)
    ]
    assert (stores[0].input_ids == stores[1].input_ids).all() and (
        stores[0].labels == stores[1].labels
    ).all()
