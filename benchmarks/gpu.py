"""Tokens per second, MFU and peak memory on one GPU, ours beside TRL's, Unsloth's, torchtune's and
plain transformers'.

    python benchmarks/gpu.py --data train.jsonl --tokenizer llama3 --output benchmarks/results
    python benchmarks/gpu.py --smoke    # tiny, also on a CPU: does it still run?

Weights are random and made on the device, so nothing is downloaded. Rows are real text, packed as
in training; without --data, random ids in documents of random length. Weights and rows are the same
for all: loss and gradient norm of the first step must agree with ours, or the row is not
comparable, and the last lines say so. Each case is a process of its own, so that one that runs out
of memory takes no other with it; those with a goal come first, and each row is on disk as a line of
JSON before the next case starts. MFU counts 6N + 12 L H Q T FLOP a token (4N + ... under LoRA; N
without an untied input embedding) against the device's dense bf16 peak; recomputed activations are
not counted. Beside it stands the share of the rate that the device itself gave for a large matrix
product in the same run: the clock of a warm card is not that of its data sheet.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

from benchmarks.gpu_cases import CASES, Case, Result, tiny  # noqa: E402
from benchmarks.gpu_first_steps import find_differences  # noqa: E402
from benchmarks.gpu_ours import WHO as OURS  # noqa: E402
from benchmarks.gpu_ours import train_ours  # noqa: E402
from benchmarks.gpu_roofline import measure_device  # noqa: E402
from benchmarks.gpu_torchtune import WHO as TORCHTUNE  # noqa: E402
from benchmarks.gpu_torchtune import train_torchtune  # noqa: E402
from benchmarks.gpu_transformers import WHO as TRANSFORMERS  # noqa: E402
from benchmarks.gpu_transformers import train_transformers  # noqa: E402
from benchmarks.gpu_trl import WHO as TRL  # noqa: E402
from benchmarks.gpu_trl import train_trl  # noqa: E402
from benchmarks.gpu_unsloth import WHO as UNSLOTH  # noqa: E402
from benchmarks.gpu_unsloth import train_unsloth  # noqa: E402

CONTESTANTS = {
    OURS: train_ours,
    TRL: train_trl,
    UNSLOTH: train_unsloth,
    TORCHTUNE: train_torchtune,
    TRANSFORMERS: train_transformers,
}


PACKAGES = {TRL: "trl", UNSLOTH: "unsloth", TORCHTUNE: "torchtune"}


def run_case(case: Case, who: str, options: argparse.Namespace) -> Result:
    """One case in this process; what it fails of is its result."""
    package = PACKAGES.get(who)
    if package is not None and importlib.util.find_spec(package) is None:
        return Result(case.name, who, failure=f"not installed; pip install {package}")
    steps, warm_up = (4, 2) if options.smoke else (options.steps, 5)
    try:
        return (
            measure_device(options.smoke)
            if who == "device"
            else CONTESTANTS[who](case, steps, warm_up, options)
        )
    except ImportError as error:
        return Result(
            case.name, who, failure=f"cannot be imported here: {' '.join(str(error).split())}"
        )
    except (
        Exception
    ) as error:  # whatever it is, it is this row's, and the other rows are still measured
        text = (
            "does not fit in memory"
            if "out of memory" in str(error)
            else " ".join(str(error).split())[:200]
        )
        traceback.print_exc()
        return Result(case.name, who, failure=text or type(error).__name__)


def in_process_of_its_own(
    number: int, who: str, arguments: list[str], options: argparse.Namespace
) -> Result:
    """Runs a case by starting this script again; its last line on stdout is the result."""
    name = CASES[number].name
    python = options.torchtune_python if who == TORCHTUNE else sys.executable
    command = [python, __file__, *arguments, "--case", str(number), "--who", who]
    environment = dict(os.environ)
    if who == UNSLOTH and options.unsloth_packages is not None:
        searched = [str(options.unsloth_packages), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, searched))
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            text=True,
            timeout=options.timeout,
            check=False,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return Result(name, who, failure=f"took more than {options.timeout:.0f} s")
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        return Result(name, who, failure=f"ended with {done.returncode}; its messages stand above")
    return Result(**json.loads(lines[-1]))


def table(results: list[Result]) -> list[str]:
    lines = [
        "| case | who | tokens/s, median | middle half | MFU | of the device's products | peak "
        "memory | goal | to first step | a step waits for | loss of the first step |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    goals = {case.name: case.goal for case in CASES}
    gemm = next((r.gemm_flop_per_second for r in results if r.gemm_flop_per_second), None)
    for r in results:
        if r.gemm_flop_per_second and r.attention_flop_per_second:
            rates = (
                f"{r.gemm_flop_per_second / 1e12:.1f} TFLOP/s in products, "
                f"{r.attention_flop_per_second / 1e12:.1f} in attention"
            )
            lines.append(f"| {r.case} | {r.who} | {rates} | | | | | | | | |")
            continue
        if r.failure or r.tokens_per_second is None or r.spread is None:
            lines.append(f"| {r.case} | {r.who} | {r.failure} | | | | | | | | |")
            continue
        goal = goals.get(r.case)
        lines.append(
            f"| {r.case} | {r.who} | {r.tokens_per_second:,.0f} | {r.spread[0]:,.0f} to "
            f"{r.spread[1]:,.0f} | {f'{r.mfu:.1%}' if r.mfu else ''} | "
            f"{f'{r.flop_per_second / gemm:.1%}' if gemm and r.flop_per_second else ''} | "
            f"{(r.peak_memory_bytes or 0) / 2**30:.1f} GiB | "
            f"{f'{goal:,.0f}' if goal and r.who == 'finetune' else ''} | "
            f"{f'{r.seconds_to_first_step:.0f} s' if r.seconds_to_first_step else ''} | "
            f"{r.waits_for_device or ''} | {'' if r.loss is None else f'{r.loss:.3f}'} |"
        )
    return lines


def rows_of(numbers: list[int], contestants: list[str]) -> Iterator[tuple[str, int]]:
    """(contestant, number of its case) of every row: the device itself, then all that each
    contestant trains.
    """
    yield "device", 0
    for who in contestants:
        for number in numbers:
            case = CASES[number]
            before = CASES[number - 1]
            if who == OURS or case.torch_compile or number == 0 or before.model != case.model:
                yield who, number  # else the same to others as the case before it


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, help="JSON lines; the texts of a line are one document"
    )
    parser.add_argument("--tokenizer", type=Path, help="a folder with a tokenizer, for --data")
    parser.add_argument(
        "--cases", nargs="+", default=[""], help="those whose name contains one of these"
    )
    parser.add_argument(
        "--documents", type=float, default=16, help="in a row, about, where they are random"
    )
    parser.add_argument("--steps", type=int, default=15, help="measured steps of each case")
    parser.add_argument(
        "--smoke", action="store_true", help="tiny sizes: only to see that everything runs"
    )
    parser.add_argument(
        "--without-others", "--without-trl", action="store_true", help="finetune alone"
    )
    parser.add_argument("--only", help="the contestants whose name begins so, beside finetune")
    parser.add_argument(
        "--torchtune-python",
        default=sys.executable,
        help=(
            "of an environment with torchtune: it imports no torchao after 0.15, and peft none "
            "before 0.16"
        ),
    )
    parser.add_argument(
        "--unsloth-packages",
        type=Path,
        help="a folder with Unsloth and the older TRL and datasets that it takes",
    )
    parser.add_argument("--timeout", type=float, default=120, help="seconds for one case")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--who", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case is not None:
        case = tiny(CASES[options.case]) if options.smoke else CASES[options.case]
        answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)  # libraries print; stdout is for the result
        answers.write(json.dumps(asdict(run_case(case, options.who, options))) + "\n")
        answers.flush()
        os._exit(0)  # process groups and compile workers need no farewell

    others = [who for who in CONTESTANTS if who != OURS and who.startswith(options.only or "")]
    if not others:
        parser.error(
            f"--only {options.only}: the contestants are "
            f"{', '.join(who for who in CONTESTANTS if who != OURS)}"
        )
    numbers = [
        number
        for number, case in enumerate(CASES)
        if any(part in case.name for part in options.cases)
    ]
    if not numbers:
        parser.error(
            f"--cases {' '.join(options.cases)}: the cases are "
            f"{'; '.join(case.name for case in CASES)}"
        )
    numbers.sort(key=lambda number: CASES[number].goal is None)
    options.output.mkdir(parents=True, exist_ok=True)
    name = "gpu-smoke" if options.smoke else "gpu"
    results = []
    with (options.output / f"{name}.jsonl").open("w") as rows:
        for who, number in rows_of(numbers, [OURS, *([] if options.without_others else others)]):
            results.append(in_process_of_its_own(number, who, sys.argv[1:], options))
            print(table(results)[-1], file=sys.stderr, flush=True)
            rows.write(json.dumps(asdict(results[-1])) + "\n")
            rows.flush()
    lines = [*table(results), *find_differences(results, OURS, (TRL, UNSLOTH, TORCHTUNE))]
    print("\n".join(lines))
    (options.output / f"{name}.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
