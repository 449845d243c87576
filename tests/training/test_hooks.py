"""A user's own code in a recipe: rows by a function, metrics of answers, callbacks with a state, and what is said of their mistakes."""

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import yaml

import finetune
from finetune.cli import main
from finetune.config.accelerate_file import read_sharding
from finetune.config.user_code import load
from finetune.data.batches import StepBatch
from finetune.files.run_json import read_json_lines
from finetune.run import fine_tune
from tests.ranks import ROOT

TRAIN = ROOT / "recipes" / "quickstart" / "train.jsonl"
DATA = f"""
import json
from my_helper import keep

def rows():
    with open({str(TRAIN)!r}) as lines:
        for line in lines:
            yield keep(json.loads(line))

def fails_at_row_3():
    yield from [{{"text": "one"}}, {{"text": "two"}}]
    yield {{"text": str(1 / 0)}}

def scalars():
    yield 3

def leaves():
    raise SystemExit(0)

def numbered():
    yield {{1: "one", "text": "two"}}

def nothing():
    pass

def empty():
    return []
"""
CALLBACKS = """
import finetune

class Count(finetune.Callback):
    def __init__(self):
        self.steps, self.events = 0, []
    def on_start(self, event):
        self.events.append(f"start {event.step}/{event.steps} after {self.steps}")
    def on_step(self, event):
        self.steps += 1
        if self.steps == FAILS_AT:
            raise ValueError("no network")
    def on_evaluate(self, event):
        self.events.append(f"evaluate {event.step} {sorted(event.metrics)[-1]}")
    def on_log(self, event):
        assert event.is_main and event.folder.is_dir() and event.model is not None
        self.events.append(f"log {event.step} {event.metrics['loss'] > 0}")
    def on_save(self, event):
        self.events.append(f"save {event.step}")
    def on_end(self, event):
        (event.folder / "events.txt").write_text(chr(10).join(self.events))
    def state_dict(self):
        return {"steps": self.steps, "events": self.events}
    def load_state_dict(self, state):
        self.steps, self.events = state["steps"], state["events"]

class Misspelled:
    def on_stop(self, event): ...
"""
EVAL = """
def closeness(prompt, answer, expected):
    assert prompt and expected
    return 1 / (1 + abs(len(answer) - len(expected)))

def words(prompt, answer, expected):
    return None
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A folder with a user's files."""
    (tmp_path / "my_data.py").write_text(DATA)
    (tmp_path / "my_helper.py").write_text("def keep(row): return row\n")
    (tmp_path / "my_eval.py").write_text(EVAL)
    (tmp_path / "my_callbacks.py").write_text(CALLBACKS.replace("FAILS_AT", "2"))
    return tmp_path


def read_recipe(mine: Path, **keys: Any) -> finetune.Recipe:
    """The quickstart with `keys`, in a file beside the user's, to whose folder its paths are relative."""
    recipe = mine / "mine.yaml"
    quick = (ROOT / "recipes" / "quickstart.yaml").read_text().replace("quickstart/", f"{TRAIN.parent}/")
    whole = (
        yaml.safe_load(quick) | {"tokenizer_name_or_path": str(TRAIN.parent), "accelerate_config": "layout.yaml"} | keys
    )
    (mine / "layout.yaml").write_text("distributed_type: 'NO'\nmixed_precision: 'no'\n")
    recipe.write_text(yaml.safe_dump(whole, sort_keys=False))
    return finetune.load_recipe(recipe)


def tokens_of(recipe: finetune.Recipe, steps: int = 3) -> list[list[int]]:
    def ids(batch: StepBatch) -> list[int]:
        return [i for micro_batch in batch.micro_batches for i in micro_batch.input_ids.flatten().tolist()]

    return [ids(batch) for batch in islice(finetune.prepare(recipe).train.batches(0), steps)]


@pytest.mark.parametrize("more", [{}, {"streaming": True, "max_steps": 3}], ids=["stored", "streamed"])
def test_rows_of_a_function_are_those_of_a_file(mine: Path, more: dict[str, Any]) -> None:
    """In a mixture, with `max_samples` and `weight`."""
    common = {"dataset_cache_dir": str(mine / "cache"), **more}
    for keys in ({"max_samples": 100}, {"weight": 0.5})[: 1 if more else 2]:
        entries = [
            [{**own, **keys}, {"path": str(TRAIN), "max_samples": 50}]
            for own in ({"function": "my_data.py:rows"}, {"path": str(TRAIN)})
        ]
        by_function, by_file = (tokens_of(read_recipe(mine, datasets=each, **common)) for each in entries)
        assert by_function == by_file


def test_its_tokens_are_kept_until_the_file_changes(mine: Path) -> None:
    recipe = read_recipe(mine, datasets=[{"function": "my_data.py:rows"}], dataset_cache_dir=str(mine / "cache"))
    first = finetune.prepare(recipe).train
    assert len(list((mine / "cache").iterdir())) == 2  # with the held-out rows
    assert finetune.prepare(recipe).train.fingerprint == first.fingerprint
    (mine / "my_data.py").write_text(DATA.replace("yield keep(", "yield 1 and keep("))
    assert finetune.prepare(recipe).train.fingerprint != first.fingerprint
    assert len(list((mine / "cache").iterdir())) == 3


def test_inspect_shows_them(mine: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(mine)
    assert main(["inspect", "my_data.py:rows", "--rows", "1", f"dataset_cache_dir={mine}/cache"]) == 0
    assert "my_data.py:rows: 5,000 rows read" in capsys.readouterr().out


def test_a_run_with_hooks_is_stopped_by_a_callback_and_resumes_with_its_state(
    mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is lost: the step after which the callback has failed is saved. It is repaired, which is said, and the run continues."""
    keys = {"datasets": [{"function": "my_data.py:rows"}], "metrics": ["my_eval.py:closeness"], "max_steps": 3}
    keys |= {"exact_match_samples": 5, "logging_steps": 1, "output_dir": str(mine / "run"), "export_at_end": False}
    recipe = read_recipe(mine, callbacks=["my_callbacks.py:Count"], global_batch_size=2, **keys)
    with pytest.raises(finetune.UserError) as failed:
        finetune.train(recipe)
    line = CALLBACKS[: CALLBACKS.index("raise")].count("\n") + 1
    assert (
        str(failed.value) == f"{mine}/my_callbacks.py:{line}: Count.on_step: ValueError: no network (step 2 is saved)"
    )

    (mine / "my_callbacks.py").write_text(CALLBACKS.replace("FAILS_AT", "-1"))
    own = Recorder()
    result = finetune.train(recipe, callbacks=[own])
    assert "callbacks: the same classes are named, but their files have changed" in capsys.readouterr().out
    assert (result.folder / "events.txt").read_text().splitlines() == [
        *("start 0/3 after 0", "evaluate 0 step", "evaluate 0 step", "log 1 True", "log 2 True"),
        *("start 2/3 after 2", "log 3 True", "save 3", "evaluate 3 step", "evaluate 3 step"),
    ]
    assert own.steps == [3]

    samples = [line for line in read_json_lines(result.folder / "samples.jsonl") if line is not None]
    for step in (0, 3):
        scores = [1 / (1 + abs(len(s["answer"]) - len(s["expected"]))) for s in samples if s["step"] == step]
        assert len(scores) == 5
        logged = next(line for line in result.metrics if line["step"] == step and "exact_match" in line)
        assert logged["metrics/closeness"] == pytest.approx(sum(scores) / 5, abs=1e-9)


class Recorder:
    """A callback need not inherit."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_step(self, event: finetune.Event) -> None:
        self.steps.append(event.step)


def read(keys: dict[str, Any]) -> Callable[[Path], object]:
    return lambda mine: read_recipe(mine, **keys)


def prepare(function: str) -> Callable[[Path], object]:
    return lambda mine: finetune.prepare(read_recipe(mine, datasets=[{"function": function}]))


def start(**keys: Any) -> Callable[[Path], object]:
    callbacks = keys.pop("given", ())

    def dry_run(mine: Path) -> None:
        recipe = read_recipe(mine, **keys)
        fine_tune(recipe, read_sharding("single", None, {}), dry_run=True, callbacks=callbacks)

    return dry_run


@pytest.mark.parametrize(
    ("act", "sentence"),
    [
        (read({"datasets": [{"function": "my_data.py"}]}), r"mine.yaml:\d+: function: my_data.py: name a Python file and what is in it"),
        (read({"datasets": [{"function": "mine_data.py:rows"}]}), r"function: mine_data.py: no such file, here or in the recipe's folder"),
        (read({"metrics": ["my_evals.py:score"]}), "metrics: my_evals.py: no such file"),
        (read({"datasets": [{"function": "my_data.py:rows", "path": "my_data.py"}]}), "cannot combine function with path"),
        (read({"datasets": [{"function": "my_data.py:rows", "split": "train[:5%]"}]}), "cannot combine function with split"),
        (read({"metrics": ["my_eval.py:words"], "exact_match_samples": 0}), "metrics has no effect without exact_match_samples"),
        (lambda mine: finetune.prepare(read_recipe(mine, datasets=[{"path": "my_data.py:rows"}])), "named by the key function"),
        (prepare("my_data.py:row"), "my_data.py: no function or class row; did you mean rows?"),
        (prepare("my_data.py:fails_at_row_3"), r"/my_data.py:12: .*/my_data.py:fails_at_row_3, row 3: ZeroDivisionError: division by zero"),
        (prepare("my_data.py:scalars"), "my_data.py:scalars, row 1: int; a mapping is expected"),
        (prepare("my_data.py:leaves"), r"/my_data.py:\d+: .*my_data.py:leaves: SystemExit: 0"),
        (prepare("my_data.py:numbered"), "my_data.py:numbered, row 1: a column's name is 1, and text is expected"),
        (prepare("my_data.py:nothing"), "my_data.py:nothing: returned NoneType; yield rows"),
        (prepare("my_data.py:empty"), "my_data.py:empty: it has no rows"),
        (start(callbacks=["my_callbacks.py:Misspelled"]), "callbacks: Misspelled: on_stop is no event; did you mean on_step?"),
        (start(given=[Recorder]), r"callbacks: Recorder is a class; give one of it, Recorder\(\)"),
        (start(given=[print]), "callbacks: builtin_function_or_method: it has no event; there are on_start"),
        (start(metrics=["my_eval.py:word"], exact_match_samples=2), "no function or class word; did you mean words?"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence(mine: Path, act: Callable[[Path], object], sentence: str) -> None:
    with pytest.raises(finetune.UserError, match=sentence) as caught:
        act(mine)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_run_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    for content, sentence in (
        ("import json\ndef rows(:\n", ":2: .*mine.py: SyntaxError: invalid syntax"),
        ("import json\nimport no_such_thing\n", ":2: .*mine.py: ModuleNotFoundError: No module named 'no_such_thing'"),
        ("import json\njson.loads('{')\n", ":2: .*JSONDecodeError: Expecting property name"),
    ):
        file.write_text(content)
        with pytest.raises(finetune.UserError, match=sentence) as caught:
            load(f"{file}:rows")
        assert "\n" not in str(caught.value)
        file.unlink()


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        ({1, 2}, "Keeps.state_dict: checkpoints keep values of JSON: Object of type set is not JSON serializable"),
        (10**30, "Keeps.state_dict: a whole number has more than 20 digits; keep it as text"),
    ],
)
def test_a_state_that_checkpoints_cannot_keep_is_said_before_the_first_step_or_after_a_save(
    mine: Path, state: Any, sentence: str, tmp_path: Path
) -> None:
    class Keeps(finetune.Callback):
        def __init__(self, from_step: int) -> None:
            self.from_step, self.step = from_step, 0

        def on_step(self, event: finetune.Event) -> None:
            self.step = event.step

        def state_dict(self) -> dict[str, Any]:
            return {"seen": state if self.step >= self.from_step else 0}

    def steps_saved(from_step: int) -> list[str]:
        folder = tmp_path / str(from_step)
        recipe = read_recipe(mine, max_steps=2, save_steps=1, output_dir=str(folder))
        with pytest.raises(finetune.UserError, match=f"^{sentence}") as caught:
            finetune.train(recipe, "single", callbacks=[Keeps(from_step)])
        assert ("step 2 is saved, without it" in str(caught.value)) == (from_step == 2)
        return sorted(path.name for path in folder.glob("checkpoints/step-*"))

    assert steps_saved(0) == []
    assert steps_saved(2) == ["step-00000001", "step-00000002"]
