"""Objectives of single documents: documents to measure, the same recipes under several layouts, and a plain loop, a document at a time."""

import json
import math
from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from finetune.config.reader import read_recipe
from finetune.config.schema import Recipe
from finetune.data.packing import pack_documents, pad_documents
from finetune.data.prepare import prepare_data
from finetune.data.tokenizer import load_tokenizer
from tests.training import reference
from tests.training.layouts import train_all, write_config


def examples_of(lengths: tuple[int, ...]) -> list[Any]:
    """Documents whose labels are the next ids, of which some are not trained on."""
    random = np.random.default_rng(1)
    made = []
    for length in lengths:
        ids = random.integers(3, 60, length).astype(np.int32)
        labels = np.append(ids[1:], -100).astype(np.int32)
        labels[: length // 3] = -100
        made.append(SimpleNamespace(input_ids=ids, labels=labels))
    return made


def collate(examples: list[Any], *, is_packed: bool, first: int = 0) -> Any:
    """The micro-batch of documents that are numbered from `first`."""
    batch = pack_documents(examples) if is_packed else pad_documents(examples, 0)
    numbers = tuple(range(first, first + len(examples)))
    return replace(batch, example_ids=numbers)


def train_kinds(
    folder: Path,
    recipes: Mapping[str, Path],
    runs: Mapping[str, tuple[str, str, int]],
    *,
    measured: Container[str],
    checkpointed: Container[str] = (),
) -> None:
    """Trains each of `runs` (name -> kind of recipe, layout or a size of the mesh, ranks) into `folder`/run-NAME.

    measured: runs that save each step, and measure held-out data.
    checkpointed: kinds whose layers are recomputed."""
    for kind in recipes:
        (folder / kind).mkdir()
    for ranks in (1, 2):
        wanted = []
        for name, (kind, layout, of) in runs.items():
            if of != ranks:
                continue
            rows = 3 if ranks == 1 else 2
            keys = [f"output_dir={folder}/run-{name}", f"per_device_train_batch_size={rows}"]
            if name in measured:
                data = f"eval_datasets=[{{path: {folder}/chat.jsonl}}]"
                keys += [data, "eval_steps=2", "save_steps=1"]
            sizes = {layout: 2} if layout.endswith("_size") else None
            config = write_config(
                folder / kind,
                "full_shard" if sizes else layout,
                checkpointing=kind in checkpointed,
                sizes=sizes,
            )
            wanted.append((recipes[kind], config, keys))
        train_all(folder, wanted, ranks=ranks)


def held_out(run: Path) -> list[float]:
    """The held-out losses of a run."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["eval_loss"] for line in lines if "eval_loss" in line]


Measure = Callable[[Recipe, Any, Any, Any, int, int], torch.Tensor]
"""(recipe, tokenizer, transformers' model, example, its number, step) -> the document's loss, then what else is summed up of it."""


def train_plainly(path: Path, steps: int, measure: Measure) -> list[tuple[float, list[float], float]]:  # fmt: skip
    """(loss, what else `measure` gives, gradient norm) of every step, by transformers' own model, a document at a time; sums are over trained tokens."""
    recipe = read_recipe(str(path))
    tokenizer = load_tokenizer(recipe.model, recipe.data)
    data = prepare_data(recipe, tokenizer, reference.Alone())  # type: ignore[arg-type]
    model: Any = AutoModelForCausalLM.from_pretrained(recipe.model.model_name_or_path, attn_implementation="eager")  # fmt: skip
    bare = model
    if recipe.lora.use_peft:
        model = reference._with_adapters(model, recipe)
        bare = model.base_model.model
    trained = [p for p in model.parameters() if p.requires_grad]
    keys = recipe.optimization
    optimizer = torch.optim.AdamW(trained, lr=0.0, weight_decay=0.0, eps=keys.adam_epsilon)
    results = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = reference._cosine(step, steps, keys.learning_rate, keys.warmup_ratio)  # fmt: skip
        sums, count = torch.zeros(1), 0
        for index in (index for ids in data.train.rows_of(step) for index in ids):  # type: ignore[union-attr]
            example = data.train.examples[index]  # type: ignore[union-attr]
            sums = sums + measure(recipe, tokenizer, bare, example, int(index), step)
            count += int((example.labels != -100).sum())
        (sums[0] / count).backward()
        for p in trained:  # of a layer that no document has reached
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        norm = torch.nn.utils.get_total_norm([p.grad.double() for p in trained])  # type: ignore[union-attr]
        torch.nn.utils.clip_grads_with_norm_(trained, keys.max_grad_norm or math.inf, norm)
        optimizer.step()
        optimizer.zero_grad()
        loss, *others = (sums / count).tolist()
        results.append((loss, others, norm.item()))
    return results
