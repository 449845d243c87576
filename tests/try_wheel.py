"""Tries an installed `finetune` from a folder that is not the repository: `python tests/try_wheel.py COMMAND`."""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

QUESTION = "What is four thousand seventy-two in digits?"
COMMANDS = (
    ("env",),
    ("plan", "--config", "fsdp_full_shard"),
    ("launch", "--num-processes", "1", "--dry-run"),
    ("launch", "--num-processes", "1", "max_steps=20"),
    ("chat", "runs/quickstart", "--prompt", QUESTION, "--max-new-tokens", "4"),
    (
        "init",
        "--model",
        "runs/quickstart/export",
        "--data",
        "rows.jsonl",
        "--gpus",
        "0",
        "--train",
        "full",
    ),
    ("launch", "--recipe", "my_recipe.yaml", "--dry-run"),
)


def main() -> None:
    """Runs the commands in a new folder. Raises `CalledProcessError` for the first that fails."""
    command = str(Path(sys.argv[1]).absolute())
    with TemporaryDirectory() as folder:
        row = '{"prompt": "What is nine in digits?", "completion": "9"}\n'
        Path(folder, "rows.jsonl").write_text(row * 50, encoding="utf-8")
        for arguments in COMMANDS:
            print(f"$ finetune {' '.join(arguments)}", flush=True)
            subprocess.run(
                [command, *arguments],
                cwd=folder,
                check=True,
                env=os.environ | {"HF_HUB_OFFLINE": "1"},
            )


if __name__ == "__main__":
    main()
