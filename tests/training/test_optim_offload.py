"""optim_offload: nvme: the steps of a run whose optimizer's state lies in files are bit for bit those in memory."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from finetune.checkpoint.folders import step_folder
from finetune.config.reader import read_recipe
from finetune.errors import UserError
from tests.conftest import make_chat, make_model
from tests.ranks import run_python
from tests.training.layouts import assert_bit_equal, write_config, write_recipe

STEPS, SAVED_AT = 6, 2
Cases = dict[str, dict[str, Any]]
LORA: dict[str, Any] = {
    "use_peft": True,
    "lora_r": 4,
    "max_steps": 4,
    "save_steps": 2,
    "optim": "adamw_torch",
}


QUICK = ("memory", "killed", "resumed", "failing")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, slow_too: bool) -> Cases:
    """Every case's exit codes, log and checkpoints; all are run by one process that forks their ranks."""
    folder = tmp_path_factory.mktemp("offload")
    make_chat(folder / "chat.jsonl", rows=24)
    common = {
        "max_steps": STEPS,
        "save_steps": SAVED_AT,
        "global_batch_size": 4,
        "weight_decay": 0.1,
        "learning_rate": 1e-2,
    }
    model = make_model(folder / "model", num_hidden_layers=3)
    config = write_config(folder, "full_shard", "bf16")
    offload_dir = folder / "scratch"

    def case(
        name: str,
        ranks: int,
        *,
        nvme: bool,
        output: str | None = None,
        fault: str = "",
        **keys: Any,
    ) -> dict[str, Any]:
        where = {"optim_offload": "nvme", "offload_dir": str(offload_dir)} if nvme else {}
        recipe = write_recipe(
            folder / f"{name}.yaml", model, folder / "chat.jsonl", **common | keys | where, save_total_limit=None,
            attention_dropout=0.1, output_dir=str(folder / (output or name)),
        )  # fmt: skip
        found = {
            "recipe": str(recipe),
            "config": str(config),
            "overrides": [],
            "ranks": ranks,
            "fault": fault,
        }
        return found | {
            "log": str(folder / f"{name}.log"),
            "offload_dir": str(offload_dir),
            "folder": str(folder / (output or name)),
        }

    tied = make_model(folder / "tied", num_hidden_layers=3, tie_word_embeddings=True)
    bf16 = {"optim": "adamw_bf16_moments", "model_name_or_path": str(tied)}
    cases = {
        "memory": case("memory", 2, nvme=False),
        "killed": case("killed", 2, nvme=True, fault="killed"),
        "resumed": case("resumed", 2, nvme=True, output="killed"),
        "back": case(
            "back",
            2,
            nvme=False,
            resume_from_checkpoint=str(step_folder(folder / "killed", SAVED_AT)),
        ),
        "one in memory": case("one in memory", 1, nvme=False, **bf16),
        "one": case("one", 1, nvme=True, **bf16),
        "lora in memory": case("lora in memory", 1, nvme=False, **LORA),
        "lora": case(
            "lora",
            1,
            nvme=True,
            **LORA,
            resume_from_checkpoint=str(step_folder(folder / "lora in memory", 2)),
        ),
        "failing": case("failing", 2, nvme=True, fault="full", save_steps=None),
    }
    if not slow_too:
        cases = {name: cases[name] for name in QUICK}
    (folder / "cases.json").write_text(json.dumps(list(cases.values())))
    done = run_python(
        [str(Path(__file__).with_name("offloads_on_ranks.py")), str(folder / "cases.json")],
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results = [json.loads(line) for line in done.stdout.splitlines()]
    return {
        name: given | result | {"folder": Path(given["folder"])}
        for (name, given), result in zip(cases.items(), results, strict=True)
    }


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (
            ["optim_offload=nvme"],
            "optim_offload: nvme needs offload_dir, a folder on the NVMe disk of each node",
        ),
        (
            ["optim_offload=nvme", "offload_dir=''"],
            "optim_offload: nvme needs offload_dir, a folder on the NVMe disk of each node",
        ),
        (
            ["optim_offload=nvme", "offload_dir=off"],
            "command line: offload_dir: false does not fit; text is expected",
        ),
        (["offload_dir=/nvme"], "offload_dir has no effect without optim_offload: nvme"),
        (
            ["optim_offload=nvme", "offload_dir=/nvme", "optim=adamw_8bit"],
            "adamw_8bit cannot be combined with optim_offload: nvme",
        ),
        (
            ["optim_offload=nvme", "offload_dir=/nvme", "async_save=true"],
            "async_save cannot be combined with optim_offload: nvme: it copies the state to host memory",
        ),
    ],
)
def test_keys_that_contradict_each_other_are_named(
    tmp_path: Path, keys: list[str], sentence: str
) -> None:
    recipe = write_recipe(tmp_path / "recipe.yaml", Path("some/model"), Path("some/data"))
    with pytest.raises(UserError, match=re.escape(sentence)) as error:
        read_recipe(str(recipe), keys)
    assert "\n" not in str(error.value)


def test_a_run_killed_in_the_middle_of_a_write_resumes_to_the_state_in_memory(runs: Cases) -> None:
    killed, resumed, memory = runs["killed"], runs["resumed"], runs["memory"]
    assert memory["codes"] == [0, 0], memory["log"]
    assert killed["codes"] == [-9, -9], killed["log"]
    assert killed["left"] == []  # the files have no name, and their space is free again
    assert resumed["codes"] == [0, 0], resumed["log"]
    assert f"resumed at step {SAVED_AT}" in resumed["log"]
    windows = int(killed["log"].split("WINDOWS ")[1].split()[0])
    assert windows >= 4, "all of the state is in memory at once"
    for step in (SAVED_AT, STEPS):
        assert_bit_equal(resumed["folder"], memory["folder"], step)


@pytest.mark.slow
def test_a_run_saved_with_its_state_in_files_resumes_without(runs: Cases) -> None:
    assert runs["back"]["codes"] == [0, 0], runs["back"]["log"]
    assert_bit_equal(runs["back"]["folder"], runs["memory"]["folder"], STEPS, from_step=SAVED_AT)


@pytest.mark.slow
def test_one_rank_and_moments_rounded_at_random_are_those_in_memory(runs: Cases) -> None:
    assert runs["one"]["codes"] == [0], runs["one"]["log"]
    for step in (SAVED_AT, STEPS):
        assert_bit_equal(runs["one"]["folder"], runs["one in memory"]["folder"], step)


@pytest.mark.slow
def test_adapters_saved_without_files_resume_with_them(runs: Cases) -> None:
    assert runs["lora"]["codes"] == [0], runs["lora"]["log"]
    ours, theirs = runs["lora"]["folder"], runs["lora in memory"]["folder"]
    assert_bit_equal(ours, theirs, LORA["max_steps"], from_step=LORA["save_steps"])


def test_a_disk_that_fails_is_one_sentence_on_every_rank(runs: Cases) -> None:
    run = runs["failing"]
    assert run["codes"] == [2, 2], run["log"]
    assert "Traceback" not in run["log"] and "Input/output error" in run["log"]
