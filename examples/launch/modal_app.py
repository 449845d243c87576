"""Modal: `modal run examples/launch/modal_app.py --recipe llama31_8b_lora`, in a clone."""

import subprocess
from pathlib import Path

import modal

ROOT = Path(__file__).resolve().parents[2] if modal.is_local() else Path("/finetune")
image = (
    modal.Image.debian_slim(python_version="3.12")
    .add_local_dir(ROOT, "/finetune", copy=True, ignore=[".git", ".venv*", "runs"])
    .run_commands("cd /finetune && pip install -e . -c constraints.txt")
)
app = modal.App("finetune", image=image)
runs = modal.Volume.from_name("finetune-runs", create_if_missing=True)


# A function that is preempted starts again, and the run resumes from its last checkpoint.
@app.function(
    gpu="H100", volumes={"/runs": runs}, timeout=24 * 3600, retries=modal.Retries(max_retries=3)
)
def train(recipe: str) -> None:
    """Trains `recipe` into the volume."""
    subprocess.run(
        ["finetune", "launch", "--recipe", recipe, f"output_dir=/runs/{recipe}"],
        check=True,
        cwd="/finetune",
    )
    runs.commit()


@app.local_entrypoint()
def main(recipe: str = "llama31_8b_lora") -> None:
    """Starts the function and waits for it."""
    train.remote(recipe)
