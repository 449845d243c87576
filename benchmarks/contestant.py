"""One contestant of `speed.py` or `preferences.py`, as a process of its own: it trains on command,
and reports how long each step took.

Protocol, a line each: `speed.py` writes a count of steps; the contestant trains so many and answers
a JSON list of [seconds, CPU seconds, tokens]. Tokens are those of documents: padding is not
counted. Closing its stdin ends it.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)


class Turns:
    """Holds a training loop until it is its turn."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)  # libraries print; the channel is for answers only
        self._left = 0
        self._steps: list[tuple[float, float, int]] = []
        self._mark = self._cpu_mark = 0.0

    def wait(self) -> None:
        """Says that it is ready (or has finished its turn), and waits for the next."""
        self._answers.write(json.dumps(self._steps) + "\n")
        self._steps = []
        line = sys.stdin.readline()
        if not line.strip():
            os._exit(0)  # nothing of the training is to be kept
        self._left = int(line)
        self._mark = time.perf_counter()
        self._cpu_mark = time.process_time()

    def done(self, tokens: int) -> None:
        """A step of `tokens` tokens is done."""
        now = time.perf_counter()
        cpu_now = time.process_time()
        self._steps.append((now - self._mark, cpu_now - self._cpu_mark, tokens))
        self._mark = now
        self._cpu_mark = cpu_now
        self._left = self._left - 1
        if self._left == 0:
            self.wait()


def ours(workspace: Path, layout: str, bf16: bool, keys: list[str], turns: Turns) -> None:
    """finetune's own run, all of it; only its batches are paced."""
    from finetune.config.accelerate_file import read_sharding
    from finetune.config.reader import read_recipe
    from finetune.data.packing import StoredBatches
    from finetune.run import fine_tune

    given = StoredBatches.batches

    def paced(self: StoredBatches, *arguments: Any) -> Iterator[Any]:
        turns.wait()
        for batch in given(self, *arguments):
            yield batch
            turns.done(batch.tokens)

    StoredBatches.batches = paced  # type: ignore[method-assign, assignment]
    config = workspace / f"{layout}-{'bf16' if bf16 else 'fp32'}.yaml"
    ranks = os.environ.get("WORLD_SIZE", "1")
    output = workspace / f"run-{config.stem}-{ranks}-{'-'.join(keys)}"
    recipe = read_recipe(str(workspace / "recipe.yaml"), [f"output_dir={output}", *keys])
    fine_tune(recipe, read_sharding(str(config), None, os.environ))


def bare(workspace: Path, bf16: bool, turns: Turns) -> None:
    """The bare loop, on the same batches as ours, built before the clock starts."""
    from benchmarks.bare_loop import train

    batches = step_batches(workspace)
    ready = [batches.step_batch(step) for step in range(min(batches.steps_per_epoch, 60))]
    turns.wait()
    train(workspace / "model", ready, bf16, turns.done)


def step_batches(workspace: Path) -> Any:
    """The training batches of the recipe, for one process."""
    import torch

    from finetune.config.reader import read_recipe
    from finetune.data.prepare import prepare_data
    from finetune.data.tokenizer import load_tokenizer

    @dataclass(frozen=True)
    class Alone:
        rank: int = 0
        size: int = 1
        local_rank: int = 0
        device: torch.device = torch.device("cpu")  # noqa: RUF009
        sequence_rank: int = 0
        sequence_size: int = 1

    recipe = read_recipe(str(workspace / "recipe.yaml"), [])
    return prepare_data(recipe, load_tokenizer(recipe.model, recipe.data), Alone()).train


def common_arguments(workspace: Path, name: str, bf16: bool) -> dict[str, Any]:
    """The arguments of Trainer and SFTTrainer: the same batch, optimizer and precision, and nothing
    that costs time.
    """
    facts = json.loads((workspace / "facts.json").read_text())
    return {
        "output_dir": str(workspace / name),
        "per_device_train_batch_size": facts["batch_size"],
        "max_steps": 10**6,
        "learning_rate": 1e-3,
        "optim": "adamw_torch_fused",
        "use_cpu": True,
        "bf16": bf16,
        "gradient_checkpointing": False,
        "logging_steps": 10,
        "save_strategy": "no",
        "report_to": "none",
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
    }


def callback(turns: Turns, model: Any, padding_id: int) -> Any:
    """Paces a transformers.Trainer, and counts the tokens that go into the model, padding left
    out.
    """
    import torch
    from transformers import TrainerCallback

    tokens = 0

    def count(module: Any, arguments: Any, keywords: dict[str, Any]) -> None:
        nonlocal tokens
        if module.training and torch.is_grad_enabled():  # not DPO's forward without adapters
            tokens += int((keywords["input_ids"] != padding_id).sum())

    model.register_forward_pre_hook(count, with_kwargs=True)

    class Pace(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            turns.wait()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            nonlocal tokens
            turns.done(tokens)
            tokens = 0

    return Pace()


def trainer(workspace: Path, bf16: bool, turns: Turns) -> None:
    """transformers.Trainer on the same examples, padded to the longest of the batch."""
    from datasets import Dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        DataCollatorForSeq2Seq,
        Trainer,
        TrainingArguments,
    )

    examples = step_batches(workspace).examples
    rows = []
    for example in (examples[i] for i in range(len(examples))):
        # Ours are the ids to predict at a position; transformers shifts them itself.
        rows.append(
            {
                "input_ids": example.input_ids.tolist(),
                "labels": [-100, *example.labels[:-1].tolist()],
            }
        )
    model = AutoModelForCausalLM.from_pretrained(workspace / "model", dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(workspace / "model")
    run = Trainer(
        model,
        TrainingArguments(**common_arguments(workspace, "trainer", bf16)),
        train_dataset=Dataset.from_list(rows),
        data_collator=DataCollatorForSeq2Seq(tokenizer),
    )
    run.add_callback(callback(turns, model, tokenizer.pad_token_id))
    run.train()


def trl(workspace: Path, packing: bool, bf16: bool, turns: Turns) -> None:
    """TRL's SFTTrainer on the same file, padded or packed."""
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    facts = json.loads((workspace / "facts.json").read_text())
    rows = load_dataset("json", data_files=str(workspace / "data.jsonl"), split="train")
    rows = rows.rename_columns({"question": "prompt", "answer": "completion"})
    model = AutoModelForCausalLM.from_pretrained(workspace / "model", dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(workspace / "model")
    arguments = common_arguments(workspace, f"trl-{packing}", bf16)
    configuration = SFTConfig(max_length=facts["max_length"], packing=packing, **arguments)
    run = SFTTrainer(model, configuration, train_dataset=rows, processing_class=tokenizer)
    run.add_callback(callback(turns, model, tokenizer.pad_token_id))
    run.train()


def trl_dpo(workspace: Path, lora: bool, bf16: bool, turns: Turns) -> None:
    """TRL's DPOTrainer on the same pairs, with LoRA or in full."""
    from datasets import load_dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    facts = json.loads((workspace / "facts.json").read_text())
    rows = load_dataset("json", data_files=str(workspace / "pairs.jsonl"), split="train")
    model = AutoModelForCausalLM.from_pretrained(workspace / "model", dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(workspace / "model")
    arguments = common_arguments(workspace, f"trl-dpo-{lora}", bf16)
    adapters = (
        LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        if lora
        else None
    )
    run = DPOTrainer(
        model,
        args=DPOConfig(max_length=facts["max_length"], beta=facts["beta"], **arguments),
        train_dataset=rows,
        processing_class=tokenizer,
        peft_config=adapters,
    )
    run.add_callback(callback(turns, run.model, tokenizer.pad_token_id))
    run.train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "name",
        choices=["ours", "bare", "trainer", "trl-padded", "trl-packed", "trl-dpo", "trl-dpo-lora"],
    )
    parser.add_argument("workspace", type=Path)
    parser.add_argument(
        "--layout",
        default="single",
        help="of ours: a file <layout>-<precision>.yaml in the workspace",
    )
    parser.add_argument(
        "--keys",
        type=str.split,
        default=[],
        help="of ours: key=value of the recipe, in one argument",
    )
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    turns = Turns()

    import torch

    torch.set_num_threads(options.threads)
    if options.name == "ours":
        ours(options.workspace, options.layout, options.bf16, options.keys, turns)
    elif options.name == "bare":
        bare(options.workspace, options.bf16, turns)
    elif options.name == "trainer":
        trainer(options.workspace, options.bf16, turns)
    elif options.name.startswith("trl-dpo"):
        trl_dpo(options.workspace, options.name == "trl-dpo-lora", options.bf16, turns)
    else:
        trl(options.workspace, options.name == "trl-packed", options.bf16, turns)


if __name__ == "__main__":
    main()
