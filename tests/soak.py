"""Random faults, one line of counts: `python tests/soak.py [--faults 1000] [--seed 0] [--workers 2] [--minutes 60]`.

Kills, preemptions, damaged checkpoints, token caches, references, samples and metrics, edited inputs, in every layout
with every kind of recipe; see tests/checkpoint/soaking.py. Ends with 1 where anything was lost, or differed and was not
said, and keeps that run's folder. Runs are many times faster in memory (TMPDIR=/dev/shm); `--scratch` is for optimizer
state on a disk.

A long soak is done in parts: `--counts benchmarks/results/soak/soak.json` adds its counts to those of the parts before,
under the next seed. `--page benchmarks/results/soak/soak.md` writes the table of these counts into the page, and does nothing else.
"""

import argparse
import gc
import itertools
import json
import mmap
import os
import random
import re
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
from finetune.units import counted  # noqa: E402
from tests.checkpoint.disk import unmount_below  # noqa: E402
from tests.checkpoint.faults import KINDS, LAYOUTS, Setup  # noqa: E402
from tests.checkpoint.soaking import faults_in, soak  # noqa: E402
from tests.forked_ranks import import_all  # noqa: E402
from tests.warm_processes import start_server, warm_reload  # noqa: E402

MARKS = ("<!-- soak -->", "<!-- /soak -->")
BETWEEN_MARKS = re.compile(f"{MARKS[0]}.*?{MARKS[1]}", re.DOTALL)
# What a line of the table counts -> the kinds of faults in it; the first that matches.
GROUPS = (
    ("killed in an image: a copy of the folder while all ranks stood still", "^killed in an image"),
    ("killed: the launcher of `finetune launch` alone", "^killed: the launcher"),
    ("killed: all processes of `finetune launch`", "^killed: all ranks.*by the launcher"),
    ("killed: all ranks, or one", "^killed"),
    ("preempted under `finetune launch`", "^preempted.*by the launcher"),
    ("preempted: all ranks, or one", "^preempted"),
    ("disk full, for good or for a while", "^disk full"),
    ("folder read-only under the run", "read-only"),
    ("rollouts.jsonl edited or swapped", "rollouts"),
    ("checkpoint damaged", "^damaged"),
    ("token cache or reference pass damaged", "^(token cache|reference)"),
    ("metrics.jsonl doubled, cut or unreadable", "^metrics"),
    ("samples.jsonl or completions.jsonl cut", "^(samples|completions)"),
    ("input edited", "^edited"),
)
OPTIMIZERS = ("adamw_bf16_moments", "adamw_torch_fused", "adamw_torch", "adamw_8bit")
TABLES = ("kinds", "recipes", "layouts")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument(
        "--seed", type=int, help="default: 0, or with --counts the first that it does not have"
    )
    parser.add_argument("--workers", type=int, default=2, help="stories at the same time")
    parser.add_argument(
        "--kinds", nargs="*", default=KINDS, choices=KINDS, help="of recipes; default: all"
    )
    parser.add_argument("--minutes", type=float, default=1e6)
    parser.add_argument(
        "--launcher", type=float, default=0.08, help="share of lives that `finetune launch` starts"
    )
    parser.add_argument(
        "--scratch", type=Path, default=Path("/var/tmp"), help="a folder on a disk, for nvme"
    )
    parser.add_argument(
        "--counts",
        type=Path,
        help="a JSON file with the counts of earlier parts, to which these are added",
    )
    parser.add_argument("--page", type=Path, help="a page with a place for the table of --counts")
    options = parser.parse_args()
    if options.page is not None:
        text = options.page.read_text(encoding="utf-8")
        table = make_table(json.loads(options.counts.read_text()))
        options.page.write_text(
            BETWEEN_MARKS.sub(lambda _: f"{MARKS[0]}\n{table}{MARKS[1]}", text), encoding="utf-8"
        )
        return
    known = (
        json.loads(options.counts.read_text()) if options.counts and options.counts.exists() else {}
    )
    if options.seed is None:
        options.seed = len(known.get("seeds", {}))
    root, started = Path(tempfile.mkdtemp(prefix="soak-")), time.monotonic()
    import_all()
    import_more()
    del vars(sys.modules["__main__"])[
        "__file__"
    ]  # else each process of the server would run this file's imports
    start_server()
    vars(forkserver._forkserver)["ensure_running"] = lambda: (
        None
    )  # a forked rank uses it, and is not its parent
    warm = warm_reload()
    vars(reload_process)["subprocess"] = SimpleNamespace(
        **vars(warm) | {"Popen": partial(open_export, warm)}
    )
    done = memoryview(mmap.mmap(-1, 8 * options.workers)).cast(
        "q"
    )  # faults of each worker, seen by all
    workers = [fork_worker(options, root, worker, done) for worker in range(options.workers)]
    ended = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in workers]
    for child in psutil.Process().children(
        recursive=True
    ):  # openers of exports whose run was killed
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
    import finetune.training.objectives.online  # noqa: F401

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
    tables = {
        name: sum((Counter(result[name]) for result in results), Counter[str]()) for name in TABLES
    }
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


def make_table(counts: dict[str, Any]) -> str:
    """The counts of a soak for people: faults by kind, of which none was lost or silent where both are 0."""
    rows = {name: 0 for name, _ in GROUPS}
    for kind, number in counts["kinds"].items():
        group = next((name for name, pattern in GROUPS if re.search(pattern, kind)), None)
        if group is not None:
            rows[group] += number
    each = (
        "0" if counts["lost"] == counts["silent"] == 0 else ""
    )  # which of them were lost is in the soak's own output
    lives = counts["kinds"].get("lives", 0)
    launched = counts["kinds"].get("lives by the launcher", 0)
    ends = f"{counts['kinds'].get('stories finished', 0):,}"
    seeds = counted(len(counts["seeds"]), "seed")
    recipes = ", ".join(f"{name} {counts['recipes'].get(name, 0):,}" for name in sorted(KINDS))
    layouts = ", ".join(f"{name} {number:,}" for name, number in sorted(counts["layouts"].items()))
    return (
        f"| {counts['faults']:,} faults | | lost | silent |\n|---|---|---|---|\n"
        + "".join(f"| {name} | {number:,} | {each} | {each} |\n" for name, number in rows.items())
        + f"| all | {counts['faults']:,} | {counts['lost']:,} | {counts['silent']:,} |\n\n"
        f"In {lives + launched:,} starts, {launched:,} of them by `finetune launch`, and {ends} runs that came to their ends, from "
        f"{seeds}. By recipe: {recipes}. By layout: {layouts}.\n"
        + (f"{counts['note']}.\n" if "note" in counts else "")
    )


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
            setups(root, options.scratch, options.seed, options.kinds),
            worker,
            None,
            options.workers,
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
            folder,
            scratch / f"{root.name}-{number}",
            layout,
            kind,
            optim,
            streaming,
            asynchronous,
            limit,
            exports,
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
