"""A thousand random faults, one line of counts: `python tests/soak.py [--faults 1000] [--seed 0] [--workers 2] [--minutes 60]`.

Kills, preemptions, damaged checkpoints, token caches and samples, edited inputs, in every layout with every optimizer;
see tests/checkpoint/soaking.py. Ends with 1 where anything was lost, and keeps that run's folder.
"""

import argparse
import importlib.util
import itertools
import json
import mmap
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from tests.checkpoint.faults import LAYOUTS, Setup  # noqa: E402
from tests.checkpoint.soaking import faults_in, soak  # noqa: E402
from tests.forked_ranks import import_all  # noqa: E402

OPTIMIZERS = ("adamw_bf16_moments", "adamw_torch_fused", "adamw_torch", "adamw_8bit")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2, help="stories at the same time")
    parser.add_argument("--minutes", type=float, default=1e6)
    parser.add_argument("--launcher", type=float, default=0.02, help="share of lives that `finetune launch` starts")
    options = parser.parse_args()
    root, started = Path(tempfile.mkdtemp(prefix="soak-")), time.monotonic()
    import_all()
    done = memoryview(mmap.mmap(-1, 8 * options.workers)).cast("q")  # faults of each worker, seen by all
    workers = [fork_worker(options, root, worker, done) for worker in range(options.workers)]
    ended = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in workers]
    results = [json.loads(path.read_text()) for path in sorted(root.glob("worker*.json"))]
    counts = sum((Counter(result["counts"]) for result in results), Counter[str]())
    lost = [text for result in results for text in result["lost"]]
    for text in lost:
        print(f"LOST {text}", file=sys.stderr)
    print(
        json.dumps(
            {"faults": faults_in(counts), "lost": len(lost), "minutes": round((time.monotonic() - started) / 60, 1)}
            | dict(sorted(counts.items()))
        )
    )
    if lost or any(ended):
        sys.exit(1)
    shutil.rmtree(root, ignore_errors=True)


def fork_worker(options: argparse.Namespace, root: Path, worker: int, done: memoryview) -> int:
    """A process with its share of the stories. Leaves its counts in `root`/worker<N>.json, and how many faults in `done`."""
    process = os.fork()
    if process:
        return process
    code, ends = 1, time.monotonic() + options.minutes * 60

    def is_enough(faults: int) -> bool:
        done[worker] = faults
        return sum(done) >= options.faults or time.monotonic() > ends

    try:
        mine = itertools.islice(setups(root, options.seed), worker, None, options.workers)
        chance = random.Random(options.seed + worker)
        soak(mine, chance, is_enough, options.launcher, root / f"worker{worker}.json")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def setups(root: Path, seed: int) -> Iterator[Setup]:
    """Every layout with every optimizer, again and again in another order, each in a folder of its own."""
    chance = random.Random(seed)
    optimizers = OPTIMIZERS if importlib.util.find_spec("torchao") else OPTIMIZERS[:-1]
    pairs: list[tuple[str, str]] = [
        (layout, optim)
        for layout in LAYOUTS
        for optim in optimizers
        if (layout, optim) != ("FULL_SHARD", "adamw_8bit")  # refused by name
    ]
    for number in itertools.count():
        if number % len(pairs) == 0:
            chance.shuffle(pairs)
        layout, optim = pairs[number % len(pairs)]
        lora, streaming, asynchronous, exports = (chance.random() < share for share in (0.4, 0.3, 0.5, 0.25))
        limit = chance.choice((1, 2, 3, None))
        yield Setup(root / f"setup{number}", layout, optim, lora, streaming, asynchronous, limit, exports)


if __name__ == "__main__":
    main()
