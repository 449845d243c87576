"""Random faults, one line of counts: `python tests/soak.py [--faults 1000] [--seed 0] [--workers 2] [--minutes 60]`.

Kills, preemptions, damaged checkpoints, token caches, references, samples and metrics, edited inputs, in every layout
with every kind of recipe; see tests/checkpoint/soaking.py. Ends with 1 where anything was lost, or differed and was not
said, and keeps that run's folder. Runs are many times faster in memory (TMPDIR=/dev/shm); `--scratch` is for optimizer
state on a disk.

A long soak is done in parts: `--counts benchmarks/results/soak/soak.json` adds its counts to those of the parts before,
under the next seed.
"""

import argparse
import gc
import itertools
import json
import mmap
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

sys.path[0] = str(Path(__file__).resolve().parents[1])

from finetune.export import reload_process  # noqa: E402
from tests.checkpoint.disk import unmount_below  # noqa: E402
from tests.checkpoint.faults import KINDS, LAYOUTS, Setup  # noqa: E402
from tests.checkpoint.soaking import faults_in, soak  # noqa: E402
from tests.forked_ranks import import_all  # noqa: E402
from tests.warm_processes import start_server, warm_reload  # noqa: E402

OPTIMIZERS = ("adamw_bf16_moments", "adamw_torch_fused", "adamw_torch", "adamw_8bit")
TABLES = ("kinds", "recipes", "layouts")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--seed", type=int, help="default: 0, or with --counts the first that it does not have")
    parser.add_argument("--workers", type=int, default=2, help="stories at the same time")
    parser.add_argument("--kinds", nargs="*", default=KINDS, choices=KINDS, help="of recipes; default: all")
    parser.add_argument("--minutes", type=float, default=1e6)
    parser.add_argument("--launcher", type=float, default=0.08, help="share of lives that `finetune launch` starts")
    parser.add_argument("--scratch", type=Path, default=Path("/var/tmp"), help="a folder on a disk, for nvme")
    parser.add_argument(
        "--counts", type=Path, help="a JSON file with the counts of earlier parts, to which these are added"
    )
    options = parser.parse_args()
    known = json.loads(options.counts.read_text()) if options.counts and options.counts.exists() else {}
    if options.seed is None:
        options.seed = len(known.get("seeds", {}))
    root, started = Path(tempfile.mkdtemp(prefix="soak-")), time.monotonic()
    import_all()
    import_more()
    del vars(sys.modules["__main__"])["__file__"]  # else each process of the server would run this file's imports
    start_server()
    vars(forkserver._forkserver)["ensure_running"] = lambda: None  # a forked rank uses it, and is not its parent
    warm = warm_reload()
    vars(reload_process)["subprocess"] = SimpleNamespace(**vars(warm) | {"Popen": partial(open_export, warm)})
    done = memoryview(mmap.mmap(-1, 8 * options.workers)).cast("q")  # faults of each worker, seen by all
    workers = [fork_worker(options, root, worker, done) for worker in range(options.workers)]
    ended = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in workers]
    for child in psutil.Process().children(recursive=True):  # openers of exports whose run was killed
        child.kill()
    results = [json.loads(path.read_text()) for path in sorted(root.glob("worker*.json"))]
    part = summarize(results, options.seed, time.monotonic() - started)
    for kind in ("lost", "silent"):
        for text in (text for result in results for text in result[kind]):
            print(f"{kind.upper()} {text}", file=sys.stderr)
    if options.counts:
        options.counts.parent.mkdir(parents=True, exist_ok=True)
        options.counts.write_text(json.dumps(add(known, part), indent=1) + "\n")
    print(json.dumps(part))
    if part["lost"] or part["silent"] or any(ended):
        sys.exit(1)
    unmount_below(root)
    shutil.rmtree(root, ignore_errors=True)


def import_more() -> None:
    """What runs with images and runs that sample import besides."""
    import transformers.models.clip.image_processing_pil_clip
    import transformers.models.clip.modeling_clip
    import transformers.models.llava.modeling_llava
    import transformers.models.llava.processing_llava  # noqa: F401

    import finetune.data.images
    import finetune.models.vision
    import finetune.training.objectives.policy  # noqa: F401

    gc.collect()
    gc.freeze()


def open_export(warm: Any, *arguments: Any, **options: Any) -> Any:
    """The process that opens an export: of the fork server, or a fresh one where that is gone: a rank was killed while it
    spoke with it."""
    try:
        return warm.Popen(*arguments, **options)
    except OSError:
        return subprocess.Popen(*arguments, **options)


def summarize(results: list[dict[str, Any]], seed: int, seconds: float) -> dict[str, Any]:
    """What all workers have counted."""
    tables = {name: sum((Counter(result[name]) for result in results), Counter[str]()) for name in TABLES}
    faults = faults_in(tables["kinds"])
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "faults": faults,
        "lost": sum(len(result["lost"]) for result in results),
        "silent": sum(len(result["silent"]) for result in results),
        "minutes": round(seconds / 60, 1),
        "cpu_minutes": round((used.ru_utime + used.ru_stime) / 60, 1),
        "seeds": {str(seed): faults},
    } | {name: dict(sorted(table.items())) for name, table in tables.items()}


def add(known: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """The sum of two `summarize`."""
    return known | {
        key: dict(sorted((Counter(known.get(key, {})) + Counter(value)).items()))
        if isinstance(value, dict)
        else round(known.get(key, 0) + value, 1)
        for key, value in part.items()
    }


def fork_worker(options: argparse.Namespace, root: Path, worker: int, done: memoryview) -> int:
    """A process with its share of the stories. Leaves its counts in `root`/worker<N>.json, the number of faults in `done`."""
    process = os.fork()
    if process:
        return process
    code, ends = 1, time.monotonic() + options.minutes * 60

    def is_enough(faults: int) -> bool:
        done[worker] = faults
        return sum(done) >= options.faults or time.monotonic() > ends

    try:
        mine = itertools.islice(
            setups(root, options.scratch, options.seed, options.kinds), worker, None, options.workers
        )
        chance = random.Random(options.seed + worker)
        soak(mine, chance, is_enough, options.launcher, root / f"worker{worker}.json")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def setups(root: Path, scratch: Path, seed: int, kinds: Sequence[str]) -> Iterator[Setup]:
    """Every kind of recipe in one layout after another, again and again in another order, each in a folder of its own."""
    chance = random.Random(seed)
    for number, (kind, layout) in enumerate(_pairs(kinds, chance)):
        streaming, asynchronous, exports = (chance.random() < share for share in (0.3, 0.5, 0.5))
        limit, optim = chance.choice((1, 2, 3, None)), chance.choice(OPTIMIZERS)
        folder = root / f"setup{number}"
        yield Setup(
            folder, scratch / f"{root.name}-{number}", layout, kind, optim, streaming, asynchronous, limit, exports
        )


def _pairs(kinds: Sequence[str], chance: random.Random) -> Iterator[tuple[str, str]]:
    """Every kind with every layout, without end: all kinds have had a layout before one has another."""
    while True:
        left = {kind: chance.sample(list(LAYOUTS), len(LAYOUTS)) for kind in kinds}
        for _ in LAYOUTS:
            for kind in chance.sample(kinds, len(kinds)):
                yield kind, left[kind].pop()


if __name__ == "__main__":
    main()
