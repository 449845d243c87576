"""A stopped run resumes as if nobody had stopped it: through run.py, on real ranks."""

import json
import re
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune.checkpoint import folders, manifest
from tests.conftest import make_chat, make_model
from tests.ranks import ROOT, Finished, launch_ranks, start_ranks

RUN = ROOT / "finetune" / "run.py"
STEPS, SAVED = 24, 6
FSDP = {"distributed_type": "FSDP", "mixed_precision": "no", "use_cpu": True}
TIMES = ("tokens_per_second", "mfu", "mfu_of_whole_rows", "peak_memory_bytes", "data_wait_seconds")
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp2": FSDP | {"fsdp_config": {"fsdp_version": 2}},
    "fsdp1": FSDP | {"fsdp_config": {"fsdp_version": 1, "fsdp_sync_module_states": False}},
    "ddp": {"distributed_type": "MULTI_CPU", "mixed_precision": "no", "use_cpu": True},
    "single": {"distributed_type": "NO", "mixed_precision": "no", "use_cpu": True},
}


@dataclass(frozen=True)
class Place:
    """A folder with a tiny model and data, in which runs of one recipe start and resume."""

    root: Path

    def arguments(self, name: str, layout: str, **keys: Any) -> list[str]:
        config, recipe = self.root / f"{layout}.yaml", self.root / f"{name}-{layout}.yaml"
        config.write_text(yaml.safe_dump(LAYOUTS[layout]))
        given = {
            "model_name_or_path": str(self.root / "model"),
            "datasets": [{"path": str(self.root / "chat.jsonl")}],
            "max_length": 64,
            "global_batch_size": 4,
            "max_steps": STEPS,
            "save_steps": SAVED,
            "save_total_limit": None,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "export_at_end": False,
            "output_dir": str(self.root / name),
        }
        recipe.write_text(yaml.safe_dump(given | keys))
        return ["--recipe", str(recipe), "--config", str(config)]

    def run(
        self, name: str, layout: str, ranks: int, env: dict[str, str] | None = None, **keys: Any
    ) -> Finished:
        return launch_ranks(RUN, self.arguments(name, layout, **keys), ranks=ranks, env=env)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A place with one finished run, "whole": FSDP2 on two ranks in fp32."""
    place = Place(tmp_path_factory.mktemp("resuming"))
    make_model(place.root / "model")
    make_chat(place.root / "chat.jsonl", rows=24)
    place.run("whole", "fsdp2", 2).check()
    return place


def stopped_at(place: Place, step: int, name: str) -> Path:
    """A copy of the whole run as it was when the checkpoint of `step` was its newest."""
    run_folder = place.root / name
    shutil.copytree(place.root / "whole", run_folder)
    for later in [path for number, path in folders.list_checkpoints(run_folder) if number > step]:
        shutil.rmtree(later)
    return run_folder


def metrics(run_folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl of training steps, without what depends on the clock."""
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines if "loss" in line]


def tensors(run_folder: Path, step: int) -> dict[str, Any]:
    """The checksums of every tensor file of a checkpoint."""
    entries = manifest.read_manifest(folders.step_folder(run_folder, step)).files
    return {name: entry for name, entry in entries.items() if name.endswith(".safetensors")}


def kill_after(step: int, run_folder: Path, begin: list[str], ranks: int) -> None:
    """Starts a run and kills all its ranks once the checkpoint of `step` is there."""
    running = start_ranks(RUN, begin, ranks=ranks)
    deadline = time.monotonic() + 120
    while not folders.step_folder(run_folder, step).exists():
        assert all(p.poll() is None for p in running.processes) and time.monotonic() < deadline, (
            running.output(0)
        )
        time.sleep(0.01)
    running.kill()
    assert all(process.wait() == -signal.SIGKILL for process in running.processes)


@pytest.mark.parametrize(
    ("layout", "keys"),
    [
        ("fsdp2", {"attention_dropout": 0.1, "async_save": True}),
        pytest.param("fsdp2", {"use_peft": True, "lora_dropout": 0.1}, marks=pytest.mark.slow),
        pytest.param("fsdp1", {"attention_dropout": 0.1}, marks=pytest.mark.slow),
        pytest.param("ddp", {"attention_dropout": 0.1}, marks=pytest.mark.slow),
    ],
    ids=["fsdp2", "lora", "fsdp1", "ddp"],
)
def test_a_killed_run_ends_bit_for_bit_as_if_nobody_had_killed_it(
    place: Place, request: pytest.FixtureRequest, layout: str, keys: dict[str, Any]
) -> None:
    whole, killed = (f"{name}-{request.node.callspec.id}" for name in ("whole", "killed"))
    place.run(whole, layout, 2, **keys).check()
    kill_after(SAVED, place.root / killed, place.arguments(killed, layout, **keys), ranks=2)
    place.run(killed, layout, 2, **keys).check()
    assert metrics(place.root / killed) == metrics(place.root / whole)
    assert tensors(place.root / killed, STEPS) == tensors(place.root / whole, STEPS)


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ("single", 1),
        pytest.param("ddp", 2, marks=pytest.mark.slow),
        pytest.param("fsdp1", 2, marks=pytest.mark.slow),
        pytest.param("fsdp2", 1, marks=pytest.mark.slow),
        pytest.param("fsdp2", 3, marks=pytest.mark.slow),
    ],
)
def test_a_run_resumes_in_any_layout_and_on_any_number_of_ranks(
    place: Place, layout: str, ranks: int
) -> None:
    run_folder = stopped_at(place, SAVED, f"{layout}{ranks}")
    place.run(run_folder.name, layout, ranks).check()
    resumed, whole = metrics(run_folder), metrics(place.root / "whole")
    assert [line["tokens"] for line in resumed] == [line["tokens"] for line in whole]
    for one, other in zip(resumed, whole, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-5), one["step"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "ranks"), [("single", 1), ("ddp", 2), ("fsdp1", 2), ("fsdp2", 3)]
)
def test_what_any_layout_has_written_resumes_as_fsdp2(
    place: Place, layout: str, ranks: int
) -> None:
    name = f"from-{layout}{ranks}"
    place.run(name, layout, ranks).check()
    for later in [
        path for step, path in folders.list_checkpoints(place.root / name) if step > SAVED
    ]:
        shutil.rmtree(later)
    place.run(name, "fsdp2", 2).check()
    for one, other in zip(metrics(place.root / name), metrics(place.root / "whole"), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-5), one["step"]


def test_what_a_recipe_may_change_on_the_way(place: Place) -> None:
    """Named and taken: what is only looked at. Named and refused: what decides the course of the run."""
    run_folder, longer = stopped_at(place, STEPS, "changed"), STEPS + 3
    changes = {"seed": 7, "max_steps": longer, "global_batch_size": 8, "learning_rate": 1e-4}
    refused = place.run("changed", "single", 1, **changes)
    assert refused.returncodes == (2,)
    text = refused.outputs[0]
    for change in (
        "seed: 42 -> 7",
        f"max_steps: {STEPS} -> {longer}",
        "rows in a step: 4 -> 8",
        "allow_changed_recipe",
    ):
        assert change in text, text
    assert "Traceback" not in text
    assert "learning_rate" not in text, "the learning rate may change"
    taken = place.run(
        "changed", "single", 1, max_steps=longer, learning_rate=1e-4, allow_changed_recipe=True
    ).check()
    assert f"max_steps: {STEPS} -> {longer}" in taken.outputs[0]
    assert "learning_rate: 0.001 -> 0.0001" in taken.outputs[0]
    assert [line["step"] for line in metrics(run_folder)] == list(range(1, longer + 1))

    refused = place.run("changed", "single", 1, optim="sgd", allow_changed_recipe=True)
    assert refused.returncodes == (2,)
    sentence = "optim: adamw_torch_fused -> sgd: sgd cannot read the state that adamw_torch_fused"
    assert sentence in refused.outputs[0]
    assert "resuming with a changed recipe" not in refused.outputs[0]

    rows = (place.root / "chat.jsonl").read_text()
    (place.root / "chat.jsonl").write_text(rows.replace("0", "1"))
    refused = place.run("changed", "single", 1, max_steps=longer, learning_rate=1e-4)
    (place.root / "chat.jsonl").write_text(rows)
    assert refused.returncodes == (2,)
    assert "datasets: the same files are named, but their content has changed" in refused.outputs[0]
    elsewhere = [{"path": str(make_chat(place.root / "other.jsonl", rows=20))}]
    refused = place.run(
        "changed", "single", 1, max_steps=longer, learning_rate=1e-4, datasets=elsewhere
    )
    assert refused.returncodes == (2,)
    was, now = json.dumps(str(place.root / "chat.jsonl")), json.dumps(elsewhere[0]["path"])
    assert f"\n  datasets[0].path: {was} -> {now}\n" in refused.outputs[0], (
        "what differs, and nothing else"
    )
    assert "the same files are named" not in refused.outputs[0]


def test_a_damaged_checkpoint_is_named_and_passed_over_without_a_network(place: Place) -> None:
    """The network is unreachable too: nothing local is requested over it."""
    run_folder = stopped_at(place, STEPS, "damaged")
    newest = folders.step_folder(run_folder, STEPS)
    weights = next((newest / manifest.MODEL).glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    away = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}
    resumed = place.run("damaged", "fsdp2", 2, env=away).check()
    assert (
        f"{newest}: passed over: model/{weights.name} does not match its checksum"
        in resumed.outputs[0]
    )
    assert f"resumed at step {STEPS - SAVED}" in resumed.outputs[0]
    assert metrics(run_folder) == metrics(place.root / "whole")
    assert tensors(run_folder, STEPS) == tensors(place.root / "whole", STEPS), (
        "replaced by the same step, sound"
    )


# run.py, which prints each step whose batch it makes.
PRINTS_BATCHES = """
import sys
from finetune import run
from finetune.data.packing import StoredBatches
from finetune.errors import end_process, exit_code

def make(self, step, step_batch=StoredBatches.step_batch):
    print(f"batch of step {step}", flush=True)
    return step_batch(self, step)

StoredBatches.step_batch = make
end_process(exit_code(run.main))
"""


def test_a_resumed_run_reads_nothing_of_the_data_before_its_step(place: Place) -> None:
    """So that it is at its first step as soon as a fresh run, however late in the data."""
    stopped_at(place, STEPS - SAVED, "late")
    script = place.root / "prints_batches.py"
    script.write_text(PRINTS_BATCHES)
    output = launch_ranks(script, place.arguments("late", "single"), ranks=1).check().outputs[0]
    assert sorted(map(int, re.findall(r"batch of step (\d+)", output))) == list(
        range(STEPS - SAVED, STEPS)
    ), output
