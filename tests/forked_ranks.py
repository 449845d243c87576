"""Ranks forked from one process that has imported everything once: a start takes a second instead of ten.

For scripts (`*_on_ranks.py`, soak.py), not for pytest's own process: who forks must have no threads.
"""

import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from finetune.errors import end_process, exit_code
from tests.ranks import free_port, open_stores


def import_all() -> None:
    """Imports what a run imports on its way, so that no rank has to; what is there then, no rank's collector looks at."""
    import peft.tuners.lora.bnb  # with bitsandbytes and, by its operators, torch's inductor: a second for every process
    import peft.utils.transformers_weight_conversion  # noqa: F401
    import tabulate  # noqa: F401
    import torch.distributed._tools
    import torch.distributed.tensor.debug  # noqa: F401
    import transformers.models.llama.modeling_llama
    import transformers.models.mixtral.modeling_mixtral  # noqa: F401
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    import finetune.checkpoint.resume
    import finetune.data.prepare
    import finetune.distributed.world
    import finetune.export.export
    import finetune.models.load
    import finetune.optim.offload
    import finetune.optim.optimizers
    import finetune.run
    import finetune.session
    import finetune.training.lifecycle
    import finetune.training.objectives.preference
    import finetune.training.screens
    import finetune.training.step  # noqa: F401
    from finetune.config.module_names import find_expert_layers

    # Tables of transformers' conversions, which are made once in a process, of a thousand patterns.
    get_checkpoint_conversion_mapping("llama")
    find_expert_layers("llama")
    gc.collect()
    gc.freeze()


def fork_ranks(
    main: Callable[[int], None],
    ranks: int,
    log: Path,
    *,
    local_size: int | None = None,
    launched: bool = True,
) -> list[int]:
    """Starts `main(rank)` on `ranks` ranks that find each other by gloo, and returns their processes.

    They end as run.py ends, and write into one `log`. `local_size`: ranks a node, where there are several nodes.
    `launched=False`: one process without a launcher's environment.
    """
    port, local_size = free_port(), local_size or ranks
    processes = []
    for rank in range(ranks):
        process = os.fork()
        if process:
            processes.append(process)
            continue
        try:
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            if launched:
                os.environ |= {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank % local_size),
                    "WORLD_SIZE": str(ranks),
                }
                os.environ |= {"LOCAL_WORLD_SIZE": str(local_size), "MASTER_ADDR": "127.0.0.1"}
                os.environ["MASTER_PORT"] = str(port)
                open_stores()
            end_process(exit_code(partial(main, rank)))
        finally:
            os._exit(99)
    return processes


def run_main(arguments: Sequence[str]) -> None:
    """`python finetune/run.py ARGUMENTS` in this process."""
    from finetune import run

    sys.argv = ["finetune/run.py", *arguments]
    run.main()


def reap(processes: Sequence[int], codes: dict[int, int]) -> None:
    """Adds the exit codes of the ranks that have ended to `codes`, by rank."""
    for rank, process in enumerate(processes):
        if rank not in codes and (status := os.waitpid(process, os.WNOHANG))[0]:
            codes[rank] = os.waitstatus_to_exitcode(status[1])


def kill(processes: Sequence[int], codes: Mapping[int, int]) -> None:
    """Kills the ranks that have not ended."""
    for rank, process in enumerate(processes):
        if rank not in codes:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def wait(processes: Sequence[int], seconds: float) -> list[int]:
    """Every rank's exit code, in order; past `seconds` the ranks are killed."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + seconds
    while len(codes) < len(processes):
        reap(processes, codes)
        if time.monotonic() > deadline:
            kill(processes, codes)
        time.sleep(0.01)
    return [codes[rank] for rank in range(len(processes))]
