"""A user's own code in a recipe: rows by a function, metrics of answers, callbacks with a state, and what is said of their mistakes."""

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

import finetune
from finetune.cli import main
from finetune.config.accelerate_file import read_sharding
from finetune.config.user_code import load, read_rows
from finetune.data.batches import StepBatch
from finetune.data.prepare import batch_rows
from finetune.data.tokenizer import load_tokenizer
from finetune.distributed.world import alone
from finetune.files.json_files import read_json_lines
from finetune.run import fine_tune
from finetune.training.callbacks import Hooks
from tests.ranks import ROOT

QUICKSTART = ROOT / "recipes" / "quickstart"
KEPT = {"train.jsonl": 400, "heldout.jsonl": 20}  # rows of its files
DATA = """
import json, pathlib
from my_helper import keep

def rows():
    with pathlib.Path(__file__).with_name("train.jsonl").open() as lines:
        for line in lines:
            yield keep(json.loads(line))

def fails_at_row_3():
    yield from [{"text": "one"}, {"text": "two"}]
    yield {"text": str(1 / 0)}

def scalars():
    yield 3

def leaves():
    raise SystemExit(0)

def numbered():
    yield {1: "one", "text": "two"}

def nothing():
    pass

def empty():
    return []

def arrays():
    import numpy as np
    yield {"input_ids": np.array([3, 4, 5]), "labels": np.array([3, 4, 5]), "number": np.int64(7)}

def lists():
    yield {"input_ids": [3, 4, 5], "labels": [3, 4, 5], "number": 7}

def needs(path):
    yield {"text": path}

def many():
    return ({"text": "row"} for number in range(100_001))
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


def line_of(function: str) -> int:
    """Of its definition, in my_data.py."""
    return DATA[: DATA.index(f"def {function}(")].count("\n") + 1


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A folder with a user's files."""
    for name, rows in KEPT.items():
        lines = (QUICKSTART / name).read_text().splitlines(keepends=True)
        (tmp_path / name).write_text("".join(lines[:rows]))
    (tmp_path / "my_data.py").write_text(DATA)
    (tmp_path / "my_helper.py").write_text("def keep(row): return row\n")
    (tmp_path / "my_eval.py").write_text(EVAL)
    (tmp_path / "my_callbacks.py").write_text(CALLBACKS.replace("FAILS_AT", "2"))
    return tmp_path


def read_recipe(mine: Path, **keys: Any) -> finetune.Recipe:
    """The quickstart with `keys`, in a file beside the user's, to whose folder its paths are relative."""
    recipe = mine / "mine.yaml"
    quick = (ROOT / "recipes" / "quickstart.yaml").read_text().replace("quickstart/", f"{mine}/")
    whole = (
        yaml.safe_load(quick)
        | {"tokenizer_name_or_path": str(QUICKSTART), "accelerate_config": "layout.yaml"}
        | keys
    )
    (mine / "layout.yaml").write_text("distributed_type: 'NO'\nmixed_precision: 'no'\n")
    recipe.write_text(yaml.safe_dump(whole, sort_keys=False))
    return finetune.load_recipe(recipe)


def tokens_of(recipe: finetune.Recipe, steps: int = 3) -> list[list[int]]:
    def ids(batch: StepBatch) -> list[int]:
        return [
            i
            for micro_batch in batch.micro_batches
            for i in micro_batch.input_ids.flatten().tolist()
        ]

    return [ids(batch) for batch in islice(finetune.prepare(recipe).train.batches(0), steps)]


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, id="stored"),
        pytest.param({"streaming": True, "max_steps": 3}, id="streamed", marks=pytest.mark.slow),
    ],
)
def test_rows_of_a_function_are_those_of_a_file(mine: Path, more: dict[str, Any]) -> None:
    """In a mixture, with `max_samples` and `weight`."""
    common = {"dataset_cache_dir": str(mine / "cache"), **more}
    for keys in ({"max_samples": 100}, {"weight": 0.5})[: 1 if more else 2]:
        entries = [
            [{**own, **keys}, {"path": "train.jsonl", "max_samples": 50}]
            for own in ({"function": "my_data.py:rows"}, {"path": "train.jsonl"})
        ]
        by_function, by_file = (
            tokens_of(read_recipe(mine, datasets=each, **common)) for each in entries
        )
        assert by_function == by_file


def test_its_tokens_are_kept_until_the_file_changes(mine: Path) -> None:
    recipe = read_recipe(
        mine, datasets=[{"function": "my_data.py:rows"}], dataset_cache_dir=str(mine / "cache")
    )
    first = finetune.prepare(recipe).train
    assert len(list((mine / "cache").iterdir())) == 2  # with the held-out rows
    assert finetune.prepare(recipe).train.fingerprint == first.fingerprint
    (mine / "my_data.py").write_text(DATA.replace("yield keep(", "yield 1 and keep("))
    assert finetune.prepare(recipe).train.fingerprint != first.fingerprint
    assert len(list((mine / "cache").iterdir())) == 3


def test_inspect_shows_them(
    mine: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(mine)
    assert (
        main(["inspect", "my_data.py:rows", "--rows", "1", f"dataset_cache_dir={mine}/cache"]) == 0
    )
    assert f"my_data.py:rows: {KEPT['train.jsonl']} rows read" in capsys.readouterr().out


def test_a_run_with_hooks_is_stopped_by_a_callback_and_resumes_with_its_state(
    mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is lost: the step after which the callback has failed is saved. It is repaired, which is said, and the run continues."""
    keys = {
        "datasets": [{"function": "my_data.py:rows"}],
        "metrics": ["my_eval.py:closeness"],
        "max_steps": 3,
    }
    keys |= {
        "exact_match_samples": 5,
        "logging_steps": 1,
        "output_dir": str(mine / "run"),
        "export_at_end": False,
    }
    recipe = read_recipe(mine, callbacks=["my_callbacks.py:Count"], global_batch_size=2, **keys)
    with pytest.raises(finetune.UserError) as failed:
        finetune.train(recipe)
    line = CALLBACKS[: CALLBACKS.index("raise")].count("\n") + 1
    assert (
        str(failed.value)
        == f"{mine}/my_callbacks.py:{line}: Count.on_step: ValueError: no network (step 2 is saved)"
    )

    (mine / "my_callbacks.py").write_text(CALLBACKS.replace("FAILS_AT", "-1"))
    own = Recorder()
    result = finetune.train(recipe, callbacks=[own])
    assert (
        "callbacks: the same classes are named, but their files have changed"
        in capsys.readouterr().out
    )
    assert (result.folder / "events.txt").read_text().splitlines() == [
        *("start 0/3 after 0", "evaluate 0 step", "evaluate 0 step", "log 1 True", "log 2 True"),
        *("start 2/3 after 2", "log 3 True", "save 3", "evaluate 3 step", "evaluate 3 step"),
    ]
    assert own.steps == [3]

    samples = [
        line for line in read_json_lines(result.folder / "samples.jsonl") if line is not None
    ]
    for step in (0, 3):
        scores = [
            1 / (1 + abs(len(s["answer"]) - len(s["expected"])))
            for s in samples
            if s["step"] == step
        ]
        assert len(scores) == 5
        logged = next(
            line for line in result.metrics if line["step"] == step and "exact_match" in line
        )
        assert logged["metrics/closeness"] == pytest.approx(sum(scores) / 5, abs=1e-9)


class Recorder:
    """A callback need not inherit."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_step(self, event: finetune.Event) -> None:
        self.steps.append(event.step)
        event.model.eval()  # a careless one, which must not end dropout

    def on_save(self, event: finetune.Event) -> None:
        assert event.model.training


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
        (prepare("my_data.py:scalars"), rf"/my_data.py:{line_of('scalars')}: .*my_data.py:scalars, row 1: int; a mapping is expected"),
        (prepare("my_data.py:needs"), rf"/my_data.py:{line_of('needs')}: .*my_data.py:needs: TypeError: needs\(\) missing 1 required"),
        (prepare("my_data.py:leaves"), r"/my_data.py:\d+: .*my_data.py:leaves: SystemExit: 0"),
        (prepare("my_data.py:numbered"), "my_data.py:numbered, row 1: a column's name is 1, and text is expected"),
        (prepare("my_data.py:nothing"), rf"/my_data.py:{line_of('nothing')}: .*my_data.py:nothing: returned NoneType; yield rows"),
        (prepare("my_data.py:empty"), "my_data.py:empty: it has no rows"),
        (start(callbacks=["my_callbacks.py:Misspelled"]), r"/my_callbacks.py:\d+: callbacks: Misspelled: on_stop is no event; did you mean on_step\?"),
        (start(given=[Recorder]), r"callbacks: Recorder is a class; give one of it, Recorder\(\)"),
        (start(given=[print]), "callbacks: builtin_function_or_method: it has no event; there are on_start"),
        (start(metrics=["my_eval.py:word"], exact_match_samples=2), "no function or class word; did you mean words?"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence(
    mine: Path, act: Callable[[Path], object], sentence: str
) -> None:
    with pytest.raises(finetune.UserError, match=sentence) as caught:
        act(mine)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_run_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    for content, sentence in (
        ("import json\ndef rows(:\n", ":2: .*mine.py: SyntaxError: invalid syntax"),
        (
            "import json\nimport no_such_thing\n",
            ":2: .*mine.py: ModuleNotFoundError: No module named 'no_such_thing'",
        ),
        ("import json\njson.loads('{')\n", ":2: .*JSONDecodeError: Expecting property name"),
    ):
        file.write_text(content)
        with pytest.raises(finetune.UserError, match=sentence) as caught:
            load(f"{file}:rows")
        assert "\n" not in str(caught.value)
        file.unlink()


@pytest.mark.parametrize(
    ("returned", "shown"),
    [
        ("float('nan')", "nan"),
        ("'high'", "'high'"),
        ("None", "None"),
        ("{'a': 1}", r"\{'a': 1\}"),
        ("[1, 2]", r"\[1, 2\]"),
    ],
)
def test_a_metric_that_returns_no_number_is_named_with_its_line(
    tmp_path: Path, returned: str, shown: str
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"import math\n\ndef score(prompt, answer, expected):\n    return {returned}\n")
    hooks = Hooks(metrics={f"{file}:score": load(f"{file}:score")})
    sentence = (
        f"^{file}:3: {file}:score: returned {shown} for the prompt '2 \\+ 2'; return a number$"
    )
    with pytest.raises(finetune.UserError, match=sentence):
        hooks.score([("2 + 2", "4", "4")])


def test_a_wrong_signature_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "\ndef score(prompt):\n    return 1\n\nclass Watch:\n    def on_step(self): ...\n"
    )
    metric, watch = load(f"{file}:score"), load(f"{file}:Watch")
    with pytest.raises(
        finetune.UserError, match=f"^{file}:2: {file}:score: TypeError: score\\(\\) takes 1"
    ):
        Hooks(metrics={f"{file}:score": metric}).score([("2 + 2", "4", "4")])
    with pytest.raises(finetune.UserError, match=f"^{file}:6: Watch.on_step: TypeError: "):
        Hooks(callbacks={"Watch": watch()}).call("on_step", cast("finetune.Event", None))


def test_modules_of_one_name_beside_two_files_are_two(tmp_path: Path) -> None:
    """As of two recipes in one notebook: the second must not get the helper of the first."""
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "my_words.py").write_text(f"WORD = {folder!r}\n")
        (tmp_path / folder / "mine.py").write_text(
            "import my_words\ndef word(): return my_words.WORD\n"
        )
    words = [load(f"{tmp_path}/{folder}/mine.py:word") for folder in ("one", "two", "one")]
    assert [word() for word in words] == ["one", "two", "one"]


def test_arrays_in_rows_are_lists(mine: Path) -> None:
    """Of a function, and of rows in memory."""
    by_function = [tokens_of(read_recipe(mine, datasets=[{"function": f"my_data.py:{name}"}], global_batch_size=1,
                                         per_device_train_batch_size=1), 1) for name in ("arrays", "lists")]  # fmt: skip
    assert by_function[0] == by_function[1] != []
    recipe = read_recipe(mine)
    tokenizer = load_tokenizer(recipe.model, recipe.data)
    row = next(iter(load(f"{mine}/my_data.py:arrays")()))
    batch, _ = batch_rows([row], recipe, tokenizer, alone())
    (micro_batch,) = batch.micro_batches
    assert micro_batch.input_ids.flatten()[:3].tolist() == [3, 4, 5]


def test_a_function_of_many_rows_says_how_far_it_is(
    mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One without an end would else run in silence."""
    assert sum(1 for _ in read_rows(f"{mine}/my_data.py:many")) == 100_001
    assert (
        "my_data.py:many: 100,000 rows so far; one without an end requires streaming: true"
        in capsys.readouterr().err
    )


def test_what_a_callback_raises_after_a_save_says_that_the_step_is_saved(mine: Path) -> None:
    class Uploads(finetune.Callback):
        def on_save(self, event: finetune.Event) -> None:
            raise ConnectionError("no network")

    recipe = read_recipe(
        mine, max_steps=1, output_dir=str(mine / "run"), exact_match_samples=0, eval_datasets=[]
    )
    with pytest.raises(
        finetune.UserError,
        match=r"Uploads.on_save: ConnectionError: no network \(step 1 is saved\)$",
    ):
        finetune.train(recipe, callbacks=[Uploads()])


@pytest.mark.parametrize("event", ["on_log", "on_evaluate", "on_step"])
def test_a_callback_that_fails_leaves_no_evaluation_out(mine: Path, event: str) -> None:
    """The resumed run's evaluations and their number without a new minimum are those of a run that did not fail."""

    def fail(at: finetune.Event) -> None:
        if at.step == 2:
            raise ConnectionError("no network")

    failing = finetune.Callback()
    setattr(failing, event, fail)
    keys = {"max_steps": 3, "logging_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    keys |= {"exact_match_samples": 0, "export_at_end": False, "global_batch_size": 2}
    found = []
    for folder in ("whole", "resumed"):
        recipe = read_recipe(mine, output_dir=str(mine / folder), **keys)
        if folder == "resumed":
            with pytest.raises(finetune.UserError, match=r"no network \(step 2 is saved\)$"):
                finetune.train(recipe, callbacks=[failing])
        result = finetune.train(recipe)
        losses = {line["step"]: line["eval_loss"] for line in result.metrics if "eval_loss" in line}
        state = json.loads((result.folder / "checkpoints/step-00000003/state.json").read_text())
        found.append((losses, state["best_step"], state["best_eval_loss"]))
    assert found[0] == found[1]
    assert [*found[0][0]] == [0, 2, 3]


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        (
            {1, 2},
            "Keeps.state_dict: checkpoints keep values of JSON: Object of type set is not JSON serializable",
        ),
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
        with pytest.raises(finetune.UserError, match=f"^{__file__}:[0-9]+: {sentence}") as caught:
            finetune.train(recipe, "single", callbacks=[Keeps(from_step)])
        assert ("step 2 is saved, without it" in str(caught.value)) == (from_step == 2)
        return sorted(path.name for path in folder.glob("checkpoints/step-*"))

    assert steps_saved(0) == []
    assert steps_saved(2) == ["step-00000001", "step-00000002"]
