"""What a run reads beside its recipe is compared by content when it starts again, and what is refused changes nothing."""

import re
from pathlib import Path

import pytest

from finetune.checkpoint.resume import compare_recipes, find_changed_inputs
from finetune.config.reader import read_recipe, to_dict
from finetune.config.schema import DatasetSource
from finetune.data.sources import SAMPLE_BYTES, fingerprint_samples
from tests.ranks import run_python

SCENARIOS = re.findall(
    r"^def (an?_\w+|adapters_\w+|metrics_\w+)\(",
    (Path(__file__).parent / "starts.py").read_text(),
    re.M,
)


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What starts.py says of all its scenarios."""
    done = run_python(
        ["tests/checkpoint/starts.py", str(tmp_path_factory.mktemp("starts"))], timeout=500
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_run_that_is_started_again(starts: str, scenario: str) -> None:
    assert f"passed {scenario}" in starts, starts


def test_a_long_stream_is_sampled_from_its_first_byte_to_its_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finetune.data.sources.FINGERPRINT_BYTES", 4 * SAMPLE_BYTES)
    path = tmp_path / "rows.jsonl"
    content = bytes(range(256)) * (40 * SAMPLE_BYTES // 256) + b"the end"
    sources = (DatasetSource(path=str(path)),)
    path.write_bytes(content)
    whole = fingerprint_samples(sources)
    for other in (
        b"!" + content[1:],
        content[:-1] + b"!",
        content[1:] + content[:1],
        content + b"!",
    ):
        path.write_bytes(other)
        assert fingerprint_samples(sources) != whole
    path.write_bytes(content)
    assert fingerprint_samples(sources) == whole


def test_only_the_key_that_names_an_input_explains_its_change() -> None:
    """Not another one that begins alike."""
    then, now = {"environment": "a"}, {"environment": "b"}
    assert not find_changed_inputs(then, now, ["environment: null -> my_game.py:Game"])
    (sentence,) = find_changed_inputs(then, now, ["environment_processes: 1 -> 2"])
    assert sentence.startswith("environment: the same classes are named")


def test_the_same_files_are_the_same_from_any_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recipe holds a path as it is written if the file is found from there, else from the recipe's folder."""
    folder = tmp_path / "exp"
    folder.mkdir()
    (folder / "rows.jsonl").touch()
    (folder / "rewards.py").touch()
    (folder / "model").mkdir()
    (folder / "r.yaml").write_text(
        "model_name_or_path: model\ndatasets: [{path: rows.jsonl}]\nmethod: grpo\n"
        "rewards: [rewards.py:right]\nmax_completion_length: 16\n"
    )
    monkeypatch.chdir(folder)
    within = read_recipe("r.yaml")
    monkeypatch.chdir(tmp_path)
    beside = read_recipe("exp/r.yaml", ["seed=3"])
    assert within.data.datasets[0].path != beside.data.datasets[0].path
    for then, now in ((within, beside), (beside, within)):
        changes, other = compare_recipes(to_dict(then), to_dict(now), folder)
        assert (len(changes), other) == (1, []) and changes[0].startswith("seed: ")
    without_data = to_dict(within) | {"datasets": []}
    changes, _ = compare_recipes(without_data, to_dict(within), folder)
    assert changes and not any(change.startswith("datasets: ") for change in changes)
