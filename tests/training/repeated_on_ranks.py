"""Gradients of one call, and of two calls with the same rows, before an update: under tensor parallelism, and in a pipeline."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import finetune
from tests.session_on_ranks import launches

ROWS = [
    {
        "messages": [
            {"role": "user", "content": f"What is {word}?"},
            {"role": "assistant", "content": str(number)},
        ]
    }
    for number, word in enumerate(("zero", "one", "two", "three"))
]


def measure(model: str, config: str, **keys: Any) -> list[float]:
    recipe = finetune.load_recipe(
        model_name_or_path=model, max_length=64, max_grad_norm=None, use_peft=False, **keys
    )
    with finetune.Session(recipe, config, saves=False) as session:
        norms = []
        for calls in (1, 2):
            for _ in range(calls):
                session.forward_backward(ROWS)
            norms.append(session.optim_step(learning_rate=0.0).grad_norm)
    return norms


def main() -> None:
    folder, starts, found = Path(sys.argv[1]), launches(2), {}
    next(starts)
    found["tensor"] = measure(str(folder / "qwen3"), str(folder / "tp.yaml"))
    next(starts)
    found["pipeline"] = measure(
        str(folder / "tied"), str(folder / "fsdp.yaml"), pipeline_parallel_size=2
    )
    if os.environ["RANK"] == "0":
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
