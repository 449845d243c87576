"""Preference training gives the same losses and gradient norms on every layout, as a plain loop over whole logits does; killed
and resumed it gives the same numbers bit for bit."""

import json
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from finetune.errors import EXIT_PREEMPTED
from tests.conftest import make_model, slow_but
from tests.ranks import run_python
from tests.training import reference
from tests.training.layouts import assert_losses, steps_of, write_config, write_recipe

STEPS, SAVED_AT = 3, 1
STOPPED_AT, DIED_AT = (
    2,
    3,
)  # the batch of the reference's pass, which is finished; that in which the ranks are killed
STOPPED = [(1, "single"), (2, "full_shard")]
ROWS = 14  # pairs, 6 in a step: 3 steps an epoch, the last of 2 pairs, fewer than 3 ranks
LORA = {"use_peft": True, "lora_r": 4}
MODES: dict[str, dict[str, Any]] = {
    "dpo-lora": {"method": "dpo", "beta": 0.5, "rpo_alpha": 0.3, **LORA},
    "dpo-full": {"method": "dpo", "beta": 0.3, "label_smoothing": 0.1},
    "dpo-norm": {
        "method": "dpo",
        "loss_type": "ipo",
        "beta": 0.5,
        "modules_to_save": ["model.norm"],
        **LORA,
    },
    "packed": {"method": "dpo", "beta": 0.3, "packing": True, "global_batch_size": 2},
    "orpo": {"method": "orpo", "beta": 0.5, "packing": True, "global_batch_size": 2},
    "kto": {"method": "kto", "beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.5},
    "kto-lora": {"method": "kto", "beta": 0.3, "packing": True, "global_batch_size": 2, **LORA},
    "simpo-lora": {"method": "simpo", "beta": 2.0, "simpo_gamma": 0.8, **LORA},
}
# (ranks, layout) -> the modes that are run so.
WANTED: dict[tuple[int, str], list[str]] = {
    (1, "single"): ["dpo-lora", "packed", "orpo"],
    (2, "full_shard"): ["dpo-norm", "packed", "orpo", "kto-lora"],
    (2, "FULL_SHARD"): ["dpo-lora"],
    (2, "ddp"): ["dpo-lora", "kto"],
    (3, "full_shard"): ["dpo-full", "simpo-lora", "kto"],
    (4, "hybrid"): ["dpo-full"],
}
CASES = [(ranks, layout, mode) for (ranks, layout), modes in WANTED.items() for mode in modes]
QUICK_CASES = [(1, "single", mode) for mode in WANTED[1, "single"]]
QUICK_CASES += [(2, "full_shard", "packed")]
MODES_COMPARED = ("dpo-lora", "dpo-full", "packed", "orpo", "kto")
QUICK_COMPARED = ("packed",)


def make_pairs(path: Path, rows: int) -> Path:
    """A file of preferences of different lengths, with `rows` rows."""
    with path.open("w") as file:
        for row in range(rows):
            prompt = [
                {"role": "user", "content": f"What is {row} plus {row}?" + " Briefly." * (row % 4)}
            ]
            answers = {"chosen": f"It is {2 * row}.", "rejected": "No" + " idea" * (row % 3) + "."}
            sides = {
                name: [{"role": "assistant", "content": text}] for name, text in answers.items()
            }
            file.write(json.dumps({"prompt": prompt, **sides}) + "\n")
    return path


@pytest.fixture(scope="module")
def recipes(folder: Path) -> dict[str, Path]:
    model = make_model(
        folder / "model",
        hidden_size=72,
        vocab_size=509,
        num_hidden_layers=2,
        tie_word_embeddings=True,
    )
    data = make_pairs(folder / "pairs.jsonl", ROWS)
    common = {"global_batch_size": 6, "max_steps": STEPS}
    return {
        mode: write_recipe(folder / f"{mode}.yaml", model, data, **common | keys)
        for mode, keys in MODES.items()
    }


@pytest.fixture(scope="module")
def runs(folder: Path, recipes: dict[str, Path], slow_too: bool) -> Path:
    """The folder of every run, `RANKS-LAYOUT-MODE`; all are run by one process that forks their ranks."""
    cases = CASES if slow_too else QUICK_CASES
    mesh = {"hybrid": (2, 2)}
    configs = {
        layout: write_config(
            folder / layout, "full_shard" if layout == "hybrid" else layout, mesh=mesh.get(layout)
        )
        for layout in {layout for _, layout in WANTED}
        if (folder / layout).mkdir() is None
    }
    held_out = f"eval_datasets=[{{path: {folder}/pairs.jsonl}}]"

    def run(
        ranks: int, layout: str, mode: str, *overrides: str, name: str = ""
    ) -> tuple[str, str, list[str]]:
        rows = f"per_device_train_batch_size={3 if ranks == 1 and 'packed' not in mode else 1 if ranks == 3 else 2}"
        output = f"output_dir={folder}/{name or f'{ranks}-{layout}-{mode}'}"
        return str(recipes[mode]), str(configs[layout]), [output, rows, *overrides]

    def start(ranks: int, *its_runs: Any, log: str = "log.txt", **how: int) -> dict[str, Any]:
        return {
            "killed_after": None,
            "stopped_at": None,
            "signal": signal.SIGTERM,
            "ranks": ranks,
            "log": str(folder / log),
            "runs": its_runs,
        } | how

    starts = [
        start(ranks, *(run(*case, held_out) for case in cases if case[0] == ranks))
        for ranks in sorted({ranks for ranks, _, _ in cases})
    ]
    dropout = ["attention_dropout=0.5", "lora_dropout=0.5", "max_steps=1"]
    starts[0]["runs"] += (run(1, "single", "dpo-lora", *dropout, name="dropout"),)
    killed = run(2, "full_shard", "packed", held_out, f"save_steps={SAVED_AT}", name="killed")
    starts += [start(2, killed, killed_after=SAVED_AT), start(2, killed)]
    for ranks, layout in (
        STOPPED if slow_too else STOPPED[:1]
    ):  # in a cache of its own: the others have left their references
        name = f"stopped-{ranks}"
        stopped = run(
            ranks,
            layout,
            "packed",
            held_out,
            f"dataset_cache_dir={folder}/cache-{ranks}",
            name=name,
        )
        starts += [
            start(ranks, stopped, log=f"{name}.{batch}", stopped_at=batch)
            for batch in (STOPPED_AT, 0)
        ]
    died = run(
        2, "full_shard", "packed", held_out, f"dataset_cache_dir={folder}/cache-died", name="died"
    )
    how = {"signal": signal.SIGKILL}
    if slow_too:
        starts += [
            start(2, died, log=f"died.{batch}", stopped_at=batch, **how) for batch in (DIED_AT, 0)
        ]
    (folder / "starts.json").write_text(json.dumps(starts))
    script = Path(__file__).with_name("preferences_on_ranks.py")
    done = run_python([str(script), str(folder / "starts.json")], timeout=500)
    codes = [json.loads(line) for line in done.stdout.splitlines()]
    expected = [
        [
            -signal.SIGKILL
            if each["killed_after"] or (each["stopped_at"] and each["signal"] == signal.SIGKILL)
            else EXIT_PREEMPTED
            if each["stopped_at"]
            else 0
        ]
        * each["ranks"]
        for each in starts
    ]
    assert codes == expected, done.stderr + "".join(log.read_text() for log in folder.glob("*.txt"))
    return folder


@pytest.mark.parametrize(("ranks", "layout", "mode"), slow_but(QUICK_CASES, CASES))
def test_every_layout_computes_what_a_plain_loop_does(
    ranks: int, layout: str, mode: str, runs: Path, recipes: dict[str, Path]
) -> None:
    assert_losses(runs / f"{ranks}-{layout}-{mode}", reference.losses(recipes[mode]))


@pytest.mark.parametrize(
    "modes", [QUICK_COMPARED, pytest.param(MODES_COMPARED, marks=pytest.mark.slow)], ids=len
)
def test_metrics_are_the_same_on_every_layout(
    modes: Sequence[str], runs: Path, slow_too: bool
) -> None:
    """Those of training, and those of the held-out pairs before and after it."""
    for mode in modes:
        cases = CASES if slow_too else QUICK_CASES
        first, *others = [
            _metrics(runs / f"{r}-{layout}-{m}") for r, layout, m in cases if m == mode
        ]
        assert others
        assert all(
            line.keys() == other.keys()
            for lines in others
            for line, other in zip(first, lines, strict=True)
        )
        for lines in others:
            if (
                mode.startswith("dpo") or mode == "packed"
            ):  # the model is its own reference: margins of 0, up to the rounding of another layout
                assert abs(lines[0]["eval_rewards/margins"]) < 1e-6
                assert "eval_rewards/accuracies" not in lines[0], (
                    "no pair is in order, or out of it"
                )
            for line, other in zip(first, lines, strict=True):
                assert other == pytest.approx(line, rel=1e-4, abs=2e-6), mode


def test_the_reference_has_no_dropout(runs: Path) -> None:
    """With it the model in training is another than its reference from the first step on; the reference stays what it is."""
    (dropped,), (plain, *_) = steps_of(runs / "dropout"), steps_of(runs / "1-single-dpo-lora")
    beta = MODES["dpo-lora"]["beta"]
    for side in ("chosen", "rejected"):
        assert plain[f"rewards/{side}"] == 0.0 != dropped[f"rewards/{side}"]
        reference = dropped[f"logps/{side}"] - dropped[f"rewards/{side}"] / beta
        assert reference == pytest.approx(plain[f"logps/{side}"], rel=1e-6)


def test_killed_and_resumed_it_gives_the_same_numbers_bit_for_bit(runs: Path) -> None:
    """Full fine-tuning, which resumes with the reference that was computed from the weights before training."""
    assert _metrics(runs / "killed") == _metrics(runs / "2-full_shard-packed")


@pytest.mark.parametrize(("ranks", "layout"), slow_but(STOPPED[:1], STOPPED))
def test_a_reference_that_is_stopped_continues_where_it_was(
    ranks: int, layout: str, runs: Path
) -> None:
    """SIGTERM to one rank, in a batch: that batch is finished and kept on disk, and the next start computes the others alone."""
    first, second = ((runs / f"stopped-{ranks}.{batch}").read_text() for batch in (STOPPED_AT, 0))
    assert first.count("SIGTERM: saving, then stopping") == 1
    kept = re.search(
        r"reference-\w+.json: stopped by a signal; the reference of (\d+) of (\d+) documents is kept there, and the same command "
        r"computes the rest\n\Z",
        first,
    )
    assert kept is not None, first
    assert first.count("batch of the reference\n") == STOPPED_AT, (
        "the one in which the signal came is the last"
    )
    computed = [
        int(documents) for documents in re.findall(r"reference  (\d+) documents \(", second)
    ]
    assert 0 < int(kept[1]) == int(kept[2]) - sum(computed), "none is computed twice"
    assert "Traceback" not in first + second
    assert _metrics(runs / f"stopped-{ranks}") == _metrics(runs / f"{ranks}-{layout}-packed"), (
        "bit for bit"
    )


@pytest.mark.slow
def test_a_reference_that_is_killed_continues_from_what_is_on_disk(runs: Path) -> None:
    """SIGKILL to all ranks in a batch, after the batches before it were kept: the next start computes the others alone."""
    first, second = ((runs / f"died.{batch}").read_text() for batch in (DIED_AT, 0))
    assert first.count("batch of the reference\n") == DIED_AT
    assert first.count("reference  training: ") == DIED_AT - 1, "the batches before it are on disk"
    computed, of_stopped = (
        re.findall(r"reference  (\d+) documents \(", text)
        for text in (second, (runs / "stopped-2.0").read_text())
    )
    assert computed == of_stopped, (
        "none is computed twice: as after the run that was stopped when it had as many"
    )
    assert not list((runs / "cache-died").rglob("*.part"))
    assert _metrics(runs / "died") == _metrics(runs / "2-full_shard-packed"), "bit for bit"


def _metrics(run: Path) -> list[dict[str, float]]:
    """Every line of metrics without what depends on the machine."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    other = {
        "tokens_per_second",
        "mfu",
        "mfu_of_whole_rows",
        "peak_memory_bytes",
        "data_wait_seconds",
    }
    return [
        {key: value for key, value in line.items() if key not in other}
        for line in lines
        if "phase" not in line
    ]
