"""From launch to the first step: ours beside a bare script that imports the same libraries and
loads the same model.

    python benchmarks/start.py --data gsm8k_train.jsonl --tokenizer stories260k [--repeats 5]

Ours loads datasets and peft only where a run needs them; a second bare script leaves these two out
as well, and is what to compare with. All run in turns. Wall-clock and CPU seconds are given: on a
busy machine only the latter can be compared. Ours reads tokens from its cache, as every start but
the first does; so does the bare script, which trains on ids at hand.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

BARE = """
import sys, accelerate, torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
ids = torch.randint(3, 500, (8, 400))
loss = model(input_ids=ids, labels=ids, use_cache=False).loss
loss.backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
print("step 1", loss.item(), flush=True)
"""


BARE_SCRIPTS = {
    "bare script": BARE,
    "bare script, with datasets and peft": f"import datasets, peft\n{BARE}",
}


def to_first_step(command: list[str], environ: dict[str, str]) -> tuple[float, float]:
    """(wall-clock, CPU) seconds from starting `command` until it ends, its first step done."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    subprocess.run(command, env=environ, check=True, capture_output=True, cwd=ROOT)
    wall = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()

    from benchmarks.speed import MODEL, prepare

    with tempfile.TemporaryDirectory(prefix="finetune-start-") as folder:
        workspace = Path(folder)
        prepare(workspace, options.data, options.tokenizer, MODEL)
        for name, script in BARE_SCRIPTS.items():
            (workspace / f"{name}.py").write_text(script)
        environ = dict(os.environ) | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(workspace / "cache")}
        # Ends in the middle of its first step's line of metrics: what a run does at its end is no
        # part of its start.
        ours = f"""
import os, sys
sys.argv[0] = {str(ROOT / "finetune" / "run.py")!r}
sys.path[0] = {str(ROOT / "finetune")!r}
import runpy, threading
def watch():
    import time
    while True:
        time.sleep(0.02)
        try:
            if '"loss"' in open(os.path.join(sys.argv[-1].split("=")[1], "metrics.jsonl")).read():
                os._exit(0)
        except OSError:
            pass
threading.Thread(target=watch, daemon=True).start()
runpy.run_path(sys.argv[0], run_name="__main__")
"""
        (workspace / "ours.py").write_text(ours)
        recipe = str(workspace / "recipe.yaml")
        arguments = [
            "--recipe",
            recipe,
            "--config",
            str(workspace / "fsdp2-fp32.yaml"),
            "logging_steps=1",
        ]
        times: dict[str, list[tuple[float, float]]] = {
            name: [] for name in (*BARE_SCRIPTS, "finetune")
        }
        for repeat in range(options.repeats + 1):
            output = [f"output_dir={workspace / f'run-{repeat}'}"]
            scripts = {
                name: [str(workspace / f"{name}.py"), str(workspace / "model")]
                for name in BARE_SCRIPTS
            }
            for name, command in (
                scripts | {"finetune": [str(workspace / "ours.py"), *arguments, *output]}
            ).items():
                taken = to_first_step([sys.executable, *command], environ)
                if repeat:  # the first fills the file cache and the token cache
                    times[name].append(taken)
    print(
        "| start | wall s, median | CPU s, median | x bare, wall | x bare, CPU |\n"
        "|---|---|---|---|---|"
    )
    bare_wall, bare_cpu = (
        statistics.median(column) for column in zip(*times["bare script"], strict=True)
    )
    for name, measured in times.items():
        wall, cpu = (statistics.median(column) for column in zip(*measured, strict=True))
        print(
            f"| {name} | {wall:.2f} | {cpu:.2f} | {wall / bare_wall:.2f} | {cpu / bare_cpu:.2f} |"
        )


if __name__ == "__main__":
    main()
