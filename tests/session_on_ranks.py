"""One recipe by the command, by `finetune.train` and by a loop over `Session`; then losses of a user's own: all in one set of ranks.

`session_on_ranks.py FOLDER LAYOUT.yaml` leaves what each has measured in FOLDER/found.json.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import finetune
from finetune import run
from finetune.data.batches import MicroBatch
from finetune.errors import exit_code
from tests.ranks import ROOT, open_stores

Steps = list[tuple[float, float]]  # (loss, gradient norm)
QUICKSTART = ROOT / "recipes" / "quickstart"
QUICK: dict[str, Any] = {
    "max_steps": 5,
    "global_batch_size": 4,
    "logging_steps": 1,
    "datasets": [{"path": str(QUICKSTART / "train.jsonl"), "split": "train[:200]"}],
    "eval_datasets": [],
    "exact_match_samples": 0,
}
ROWS = [
    {
        "messages": [
            {"role": "user", "content": f"What is {word} in digits?"},
            {"role": "assistant", "content": str(n)},
        ]
    }
    for n, word in enumerate(("zero", "one", "two", "three", "four"))
]


def main() -> None:
    folder, layout = Path(sys.argv[1]), sys.argv[2]
    starts = launches(10)
    found: dict[str, Any] = {}

    next(starts)
    keys = [f"{key}={json.dumps(value)}" for key, value in QUICK.items()]
    sys.argv = ["run.py", "--config", layout, f"output_dir={folder}/command", *keys]
    run.main()
    next(starts)
    trained = finetune.train(
        finetune.load_recipe("quickstart", output_dir=f"{folder}/train", **QUICK), layout
    )
    for name, stop_after in (("begun", 2), ("continued", None)):
        next(starts)
        found[name] = train_by_hand(folder / "loop", layout, stop_after)
    model = str(trained.export)
    for name, by_hand in (("dpo", False), ("dpo by hand", True)):
        next(starts)
        found[name] = compare_pairs(folder / name, layout, model, by_hand)
    next(starts)
    watched = finetune.load_recipe(
        "quickstart", output_dir=f"{folder}/hooks", **QUICK | HOOKS | own_files(folder)
    )
    finetune.train(watched, layout)
    next(starts)
    found["rows"] = train_on_rows(folder / "rows", layout, model)
    next(starts)
    own = {"max_steps": 2, "export_at_end": False, "output_dir": f"{folder}/refused"}
    try:
        finetune.train(finetune.load_recipe("quickstart", **QUICK | own), layout, [Refuses()])
    except finetune.UserError as error:
        found["refused"] = str(error)
    if os.environ["RANK"] == "0":
        (folder / "found.json").write_text(json.dumps(found))


class Refuses:
    """Raises on the last rank alone; the others learn of it and do not wait."""

    def on_step(self, event: finetune.Event) -> None:
        if os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
            raise ValueError(f"not on rank {os.environ['RANK']}")


HOOKS: dict[str, Any] = {"max_steps": 2, "exact_match_samples": 5, "export_at_end": False}
HOOKS |= {"eval_datasets": [{"path": str(QUICKSTART / "heldout.jsonl")}]}
CODE = """
import json

def rows():
    for number in range(200):
        yield {"messages": [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": str(2 * number)}]}

def closeness(prompt, answer, expected):
    return 1 / (1 + abs(len(answer) - len(expected)))

class Note:
    def on_log(self, event):
        if event.is_main:
            (event.folder / "noted.json").write_text(json.dumps(event.metrics))
"""


def own_files(folder: Path) -> dict[str, Any]:
    """Keys that name functions of a file in `folder`."""
    if os.environ["RANK"] == "0":
        (folder / "my_code.py").write_text(CODE)
    while not (folder / "my_code.py").exists():
        time.sleep(0.05)
    function = f"{folder}/my_code.py"
    return {
        "datasets": [{"function": f"{function}:rows"}],
        "metrics": [f"{function}:closeness"],
        "callbacks": [f"{function}:Note"],
    }


def launches(count: int) -> Iterator[None]:
    """Before each world, the environment that a launcher would set."""
    launched = dict(os.environ)
    open_stores(count)
    for number in range(count):
        os.environ.clear()
        os.environ |= launched | {"MASTER_PORT": str(int(launched["MASTER_PORT"]) + number)}
        yield


def train_by_hand(folder: Path, layout: str, stop_after: int | None) -> Steps:
    """The loop of a user."""
    recipe = finetune.load_recipe("quickstart", output_dir=str(folder), **QUICK)
    steps = []
    with finetune.Session(recipe, layout) as session:
        session.load()
        for batch in session.batches():
            measured = session.forward_backward(batch)
            update = session.optim_step()
            steps.append((measured.loss, update.grad_norm))
            if update.step == stop_after:
                break
        session.save()
    session.export()
    return steps


def compare_pairs(folder: Path, layout: str, model: str, by_hand: bool) -> Steps:
    """DPO, by the recipe's method or as a user's function with a reference of its own."""
    own: dict[str, Any] = {
        "model_name_or_path": model,
        "output_dir": str(folder),
        "rpo_alpha": None,
        "max_steps": 3,
        "datasets": [{"path": str(QUICKSTART / "pairs_train.jsonl"), "split": "train[:100]"}],
    }
    recipe = finetune.load_recipe("quickstart_dpo", **QUICK | own)
    with finetune.Session(recipe, layout) as session:
        batches = list(session.batches())
        reference: dict[int, Tensor] = {}
        for batch in batches if by_hand else ():
            for found, micro_batch in zip(
                session.log_probabilities(batch), batch.micro_batches, strict=True
            ):
                reference |= zip(
                    micro_batch.example_ids, sum_documents(found, micro_batch), strict=True
                )

        def dpo(found: Tensor, batch: MicroBatch) -> Tensor:
            ratios = sum_documents(found, batch) - torch.stack(
                [reference[i] for i in batch.example_ids]
            )
            return -torch.nn.functional.logsigmoid(
                recipe.method.beta * (ratios[::2] - ratios[1::2])
            ).sum()

        return list(steps_of(session, batches, dpo if by_hand else None))


def sum_documents(found: Tensor, batch: MicroBatch) -> Tensor:
    of = batch.with_documents().trained_documents
    assert of is not None
    return torch.zeros(len(batch.example_ids), dtype=torch.float64).index_add(0, of, found.double())


def train_on_rows(folder: Path, layout: str, model: str) -> dict[str, Any]:
    """Rows in memory, where the recipe names no data: all at once, and in two parts whose losses are summed."""
    recipe = finetune.load_recipe(
        model_name_or_path=model, output_dir=str(folder), max_length=64, use_peft=False
    )
    with finetune.Session(recipe, layout) as session:
        whole = list(steps_of(session, [ROWS], None, learning_rate=0.0))
        session.forward_backward(ROWS[:2], lambda found, batch: -found.sum())
        parts = session.forward_backward(ROWS[2:], lambda found, batch: -found.sum())
        halves = (parts.loss, session.optim_step(learning_rate=0.0).grad_norm)
        sampled = session.sample(
            ["What is two in digits?", ROWS[2]["messages"][:1]], max_new_tokens=4
        )
        answers = [each.text for each in sampled]
        fault = fail_on_the_first_rank(session)
        weighted = weigh_columns(session)
        scored = session.sample(
            [row["messages"][:1] for row in ROWS], max_new_tokens=2, prompt_log_probabilities=True
        )
    prompts = [(each.prompt_ids, each.prompt_log_probabilities) for each in scored]
    own = [each.row for each in scored]
    return {
        "whole": whole, "halves": halves, "answers": answers, "weighted": weighted,
        "prompts": prompts, "rows": own, "fault": fault,
    }  # fmt: skip


def fail_on_the_first_rank(session: "finetune.Session") -> str:
    """What every rank gets for a loss that fails on one."""

    def fail(log_probabilities: Tensor, batch: MicroBatch) -> Tensor:
        return -log_probabilities.sum() * (1 / session.world.rank)

    try:
        session.forward_backward(ROWS, fail)
    except finetune.UserError as error:
        return str(error)
    raise AssertionError(f"rank {session.world.rank} has no error")


def weigh_columns(session: "finetune.Session") -> float:
    """The loss of rows with a number of the row and one of each token, which the test computes too."""

    def weigh(log_probabilities: Tensor, batch: MicroBatch) -> Tensor:
        assert batch.columns is not None
        return -(batch.columns["scale"] * batch.columns["weights"] * log_probabilities).sum()

    counts = [
        len(session.tokenizer.encode(row["messages"][1]["content"], add_special_tokens=False)) + 1
        for row in ROWS
    ]
    rows = [
        {**row, "scale": 0.5 + place, "weights": [1.0 + token for token in range(count)]}
        for place, (row, count) in enumerate(zip(ROWS, counts, strict=True))
    ]
    batch = session.batch(rows, columns=["scale", "weights"])
    loss = session.forward_backward(batch, weigh).loss
    session.optim_step(learning_rate=0.0)
    return loss


def steps_of(
    session: "finetune.Session",
    batches: Any,
    loss: Callable[[Tensor, MicroBatch], Tensor] | None,
    **keys: float,
) -> Iterator[tuple[float, float]]:
    for batch in batches:
        measured = session.forward_backward(batch, loss)
        yield measured.loss, session.optim_step(**keys).grad_norm


if __name__ == "__main__":
    sys.exit(exit_code(main))
