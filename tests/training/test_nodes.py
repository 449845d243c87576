"""Given two "nodes" of two ranks (two launchers that meet at one rendezvous on loopback), when a recipe is trained with
shards within a node and replicas across them, then the losses are those of one process; and when a rank is killed,
the launchers start all ranks again and the run resumes from its last checkpoint, to the same end, without a person."""

import json
import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from finetune.errors import SECONDS_FOR_CAUSE
from tests.conftest import make_chat, make_model
from tests.ranks import environment, free_port
from tests.training import reference
from tests.training.layouts import steps_of, write_recipe
from tests.training.nodes_on_ranks import KILLED_AT_STEP
from tests.warm_processes import WarmProcess

pytestmark = pytest.mark.slow  # two launchers of two ranks each
STEPS, SAVE_STEPS = 6, 2
NODES, RANKS = 2, 4
SECONDS = 400
TIMEOUT_SECONDS = 120

FSDP1 = {"fsdp_version": 1, "fsdp_sharding_strategy": "HYBRID_SHARD"}
FSDP2 = {"fsdp_version": 2, "fsdp_reshard_after_forward": True}
MESH = {
    "parallelism_config_dp_replicate_size": NODES,
    "parallelism_config_dp_shard_size": RANKS // NODES,
}


@pytest.fixture(scope="module")
def recipe(folder: Path) -> Path:
    return write_recipe(
        folder / "recipe.yaml",
        make_model(folder / "model", hidden_size=72, vocab_size=509),
        make_chat(folder / "chat.jsonl", rows=26),
        global_batch_size=6,
        max_steps=STEPS,
        learning_rate=3e-3,
        save_steps=SAVE_STEPS,
        timeout_seconds=TIMEOUT_SECONDS,
    )


@pytest.fixture(scope="module")
def outputs(folder: Path, recipe: Path) -> list[str]:
    """What each node's launcher and ranks wrote; both have ended well."""
    runs = []
    for name, fsdp, mesh in (("fsdp1", FSDP1, None), ("fsdp2", FSDP2, MESH)):
        content = {"distributed_type": "FSDP", "mixed_precision": "no", "fsdp_config": fsdp}
        content |= {"parallelism_config": mesh} if mesh else {}
        config = folder / f"{name}.yaml"
        config.write_text(yaml.safe_dump(content))
        runs.append([str(recipe), str(config), [f"output_dir={folder}/{name}"]])
    (folder / "runs.json").write_text(json.dumps(runs))
    return launch_nodes(
        folder, [str(Path(__file__).with_name("nodes_on_ranks.py")), str(folder / "runs.json")]
    )


def launch_nodes(folder: Path, script: list[str]) -> list[str]:
    """Runs `script` under one `accelerate launch` for each node, as a cluster would, and waits for all of them."""
    port = free_port()
    command = ["-m", "accelerate.commands.launch", "--config_file", str(folder / "fsdp2.yaml")]
    command += [
        "--num_machines",
        str(NODES),
        "--num_processes",
        str(RANKS),
        "--rdzv_backend",
        "c10d",
    ]
    command += [
        "--main_process_ip",
        "127.0.0.1",
        "--main_process_port",
        str(port),
        "--max_restarts",
        "2",
    ]
    logs = [folder / f"node{node}.log" for node in range(NODES)]
    environ = environment() | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # see docs/clusters.md
    # On loopback each launcher takes itself for the host of the rendezvous, unless it is named.
    ranks = [
        ["--machine_rank", str(node), "--rdzv_conf", f"is_host={int(node == 0)}"]
        for node in range(NODES)
    ]
    nodes = [
        WarmProcess([*command, *rank, *script], environ, log, log)
        for rank, log in zip(ranks, logs, strict=True)
    ]
    deadline = time.monotonic() + SECONDS
    try:
        while time.monotonic() < deadline and not any(node.poll() for node in nodes):
            if all(node.poll() == 0 for node in nodes):
                break
            time.sleep(0.1)
    finally:
        for node in nodes:
            with suppress(ProcessLookupError):
                os.killpg(
                    node.pid, signal.SIGTERM
                )  # the launcher ends its ranks, which lead groups of their own
            node.wait(60)
    texts = [log.read_text(errors="replace") for log in logs]
    assert [node.poll() for node in nodes] == [0] * NODES, "\n".join(text[-6000:] for text in texts)
    return texts


@pytest.mark.parametrize("name", ["fsdp1", "fsdp2"])
def test_shards_within_and_replicas_across_nodes_give_the_losses_of_one_process(
    name: str, folder: Path, recipe: Path, outputs: list[str]
) -> None:
    last = {
        line["step"]: line for line in steps_of(folder / name)
    }  # a step done again is logged again
    for step, (loss, norm) in enumerate(reference.losses(recipe), start=1):
        assert last[step]["loss"] == pytest.approx(loss, rel=1e-5)
        assert last[step]["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_after_a_killed_rank_the_run_goes_on_from_its_last_checkpoint(
    folder: Path, outputs: list[str]
) -> None:
    saved = KILLED_AT_STEP // SAVE_STEPS * SAVE_STEPS
    assert f"resumed at step {saved}" in outputs[0]
    steps = [line["step"] for line in steps_of(folder / "fsdp2")]
    assert steps == [*range(1, STEPS + 1)]


@pytest.mark.parametrize("name", ["fsdp1", "fsdp2"])
def test_every_process_group_keeps_the_timeout_of_the_recipe(name: str, outputs: list[str]) -> None:
    """The mesh's groups, which hybrid sharding reduces over, too; SECONDS_FOR_CAUSE are for the watchdog to report first."""
    printed = re.search(rf"{name}: timeouts (\[.*\])", outputs[0])
    assert printed is not None
    seconds = json.loads(printed[1])
    assert len(seconds) >= 4  # of the world, of its replicas and shards, of the saves
    assert max(seconds) <= TIMEOUT_SECONDS + 2 * SECONDS_FOR_CAUSE


def test_the_loop_says_which_units_are_sharded(outputs: list[str]) -> None:
    assert "FSDP2 HYBRID_SHARD" in outputs[0] and "FSDP1 HYBRID_SHARD" in outputs[0]
