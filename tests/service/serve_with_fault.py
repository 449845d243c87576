"""The server on a rank, where an operation fails on one rank alone, at a token that is named.

`serve_with_fault.py TOKEN:RANK:KIND... -- ARGUMENTS`
"""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from finetune.config.schema import Recipe
from finetune.data.batches import StepBatch
from finetune.distributed.world import World
from finetune.errors import exit_code
from finetune.service import operations, serve
from finetune.training.screens import explain_out_of_memory

FAULTS = {
    "memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "fault": RuntimeError("a kernel has failed"),
}


def main() -> None:
    split = sys.argv.index("--")
    planned = [each.split(":") for each in sys.argv[1:split]]
    faults = {
        int(token): FAULTS[kind] for token, rank, kind in planned if rank == os.environ["RANK"]
    }
    sys.argv = [sys.argv[0], *sys.argv[split + 1 :]]
    make_batch = operations.make_batch

    def fail_at_a_token(
        data: Sequence[Mapping[str, Any]], recipe: Recipe, world: World
    ) -> StepBatch:
        for token, fault in faults.items():
            if token in data[0]["tokens"]:
                with explain_out_of_memory(recipe, world):
                    raise fault
        return make_batch(data, recipe, world)

    operations.make_batch = fail_at_a_token
    serve.main()


if __name__ == "__main__":
    sys.exit(exit_code(main))
