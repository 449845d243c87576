"""Runs whose ranks say what they hold at every save, each on freshly forked ranks: `replicas_on_ranks.py CASES.json`.

CASES.json: a list of {recipe, config, overrides, ranks, local_size, fault, flipped, step, log}. `fault` happens at the save of
`step`: "killed" takes all ranks after it, "flipped" turns one bit of the last rank's tensor of that name before it. Prints one JSON
line for each case: the exit codes, and STEP -> the digest of the state of every rank.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from finetune.checkpoint import save as saving
from finetune.checkpoint import shards
from finetune.checkpoint.manifest import Progress
from finetune.config.accelerate_file import read_sharding
from finetune.config.reader import read_recipe
from finetune.run import fine_tune
from tests.checkpoint.tiny_run import digest
from tests.forked_ranks import fork_ranks, import_all, wait


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """Trains and returns how every rank ended, and what it held at each save."""
    log = Path(case["log"])

    def train(rank: int) -> None:
        watch_saves(case, rank, log.with_suffix(f".rank{rank}"))
        fine_tune(
            read_recipe(case["recipe"], case["overrides"]),
            read_sharding(case["config"], None, os.environ),
        )

    codes = wait(fork_ranks(train, case["ranks"], log, local_size=case["local_size"]), seconds=120)
    held: dict[str, list[str]] = {}
    for rank in range(case["ranks"]):
        for line in log.with_suffix(f".rank{rank}").read_text().splitlines():
            step, value = line.split()
            held.setdefault(step, []).append(value)
    return {"codes": codes, "held": held, "log": log.read_text()}


def watch_saves(case: dict[str, Any], rank: int, seen: Path) -> None:
    """Has this rank write down what it holds at each save, and suffer the case's fault."""
    save = saving.Saver.save

    def watched(self: saving.Saver, progress: Progress) -> None:
        moments = shards.select_tensors(shards.get_optimizer_state(self.model, self.optimizer))
        if (
            case["fault"] == "flipped"
            and progress.step == case["step"]
            and rank == case["ranks"] - 1
        ):
            flip_one_bit(
                next(tensor for name, tensor in moments.items() if name.endswith(case["flipped"]))
            )
        with seen.open("a") as file:
            print(progress.step, digest(shards.get_model_state(self.model) | moments), file=file)
        save(self, progress)
        if case["fault"] == "killed" and progress.step == case["step"]:
            os.kill(os.getpid(), signal.SIGKILL)

    saving.Saver.save = watched  # type: ignore[method-assign]


def flip_one_bit(tensor: Any) -> None:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    local.reshape(-1).view(torch.int16)[7] ^= 1


if __name__ == "__main__":
    import_all()
    for each in json.loads(Path(sys.argv[1]).read_text()):
        print(json.dumps(run_case(each)), flush=True)
