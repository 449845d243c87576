"""Embeddings: the loss of a step is one number, whatever its micro-batches and ranks, and that of transformers' and of
sentence-transformers' own classes on the whole batch; what is exported opens there with the same vectors."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModel, AutoTokenizer

from finetune.cli import main
from finetune.config.accelerate_file import read_sharding
from finetune.config.compatibility import find_problems
from finetune.config.reader import read_recipe
from finetune.errors import UserError
from finetune.export.export import export
from finetune.models.contrast import contrast
from tests.conftest import make_model
from tests.training.layouts import assert_bit_equal, assert_losses, steps_of, train_all, write_config, write_recipe

STEPS = 3
PAIRS = 64
ROWS = 160
NEGATIVES = 2
RECIPES: dict[str, dict[str, Any]] = {
    "last": {"query_prompt": "Find: ", "num_negatives": 0, "temperature": 0.1},
    "mean": {"pooling": "mean", "document_prompt": "Text: ", "num_negatives": NEGATIVES, "matryoshka_dims": [64, 16]},
}
# name -> ranks, layout, its sizes, keys of the recipe
RUNS: dict[str, tuple[int, str, dict[str, int], list[str]]] = {
    "one": (1, "single", {}, ["per_device_train_batch_size=1"]),
    "seven": (1, "single", {}, ["per_device_train_batch_size=7", "packing=false"]),
    "whole": (1, "single", {}, [f"per_device_train_batch_size={PAIRS}"]),
    "lora": (1, "single", {}, ["per_device_train_batch_size=9", "use_peft=true", "lora_r=4"]),
    "ddp": (3, "ddp", {}, ["per_device_train_batch_size=5"]),
    "fsdp2": (3, "full_shard", {}, ["per_device_train_batch_size=7"]),
    "fsdp1": (3, "FULL_SHARD", {}, ["per_device_train_batch_size=4", "packing=false"]),
    "cp": (2, "full_shard", {"cp_size": 2}, ["per_device_train_batch_size=7"]),
    "two": (2, "full_shard", {}, ["per_device_train_batch_size=40"]),
}


def make_rows() -> list[dict[str, Any]]:
    """Of two formats in turn, with more negatives than are read."""
    rows: list[dict[str, Any]] = []
    for n in range(ROWS):
        query = f"What is {n} and {n}?" + " Say it." * (n % 4)
        positive = f"It is {2 * n}." + " Surely." * (n % 3)
        negatives = [f"It is {n + 1}{' no' * (n % 5)}", "Nobody knows.", f"{n}"]
        if n % 2:
            rows.append({"anchor": query, "positive": positive, "negatives": negatives})
        else:
            texts = {f"negative_{i}": text for i, text in enumerate(negatives, start=1)}
            rows.append({"query": query, "pos_doc": [{"text": positive}], **texts})
    return rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("embedding")


@pytest.fixture(scope="module")
def recipes(folder: Path) -> dict[str, Path]:
    make_model(folder / "model", initializer_range=0.1)
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in make_rows()))
    written = {}
    for name, keys in RECIPES.items():
        common = {
            "method": "embed",
            "global_batch_size": PAIRS,
            "max_steps": STEPS,
            "packing": True,
            "adam_epsilon": 1e-4,
            "export_at_end": True,
            "save_steps": 2,
            "save_total_limit": None,
            "eval_datasets": [{"path": str(data), "max_samples": 50}],
        }
        written[name] = write_recipe(folder / f"{name}.yaml", folder / "model", data, **common | keys)
    return written


@pytest.fixture(scope="module")
def runs(folder: Path, recipes: dict[str, Path]) -> Callable[[str, str], Path]:
    for count in sorted({ranks for ranks, *_ in RUNS.values()}):
        listed = []
        for name, (ranks, layout, sizes, keys) in RUNS.items():
            config = write_config(folder, layout, sizes=sizes or None)
            for kind, recipe in recipes.items():
                if ranks == count:
                    listed.append((recipe, config, [*keys, f"output_dir={folder / name / kind}"]))
        train_all(folder, listed, ranks=count)
    return lambda name, kind: folder / name / kind


def read_texts(row: dict[str, Any], kind: str) -> list[str]:
    """The texts of a row, as whoever embeds them writes them: query, document, negatives."""
    keys = RECIPES[kind]
    query = row.get("anchor") or row["query"]
    positive = row.get("positive") or row["pos_doc"][0]["text"]
    negatives = row.get("negatives") or [row[f"negative_{n}"] for n in (1, 2, 3)]
    documents = [positive, *negatives[: keys["num_negatives"]]]
    return [keys.get("query_prompt", "") + query, *(keys.get("document_prompt", "") + text for text in documents)]


def embed_alone(model: Any, tokenizer: Any, text: str, kind: str) -> torch.Tensor:
    states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
    return states.mean(0) if kind == "mean" else states[-1]


def compute_loss(groups: list[list[torch.Tensor]], kind: str) -> torch.Tensor:
    """InfoNCE over all documents, summed over the lengths that vectors are cut to."""
    temperature = RECIPES[kind].get("temperature", 0.05)
    losses = []
    for dim in RECIPES[kind].get("matryoshka_dims", [None]):
        queries = F.normalize(torch.stack([group[0][:dim] for group in groups]))
        candidates = F.normalize(torch.stack([vector[:dim] for group in groups for vector in group[1:]]))
        own = torch.arange(len(groups)) * (len(groups[0]) - 1)
        losses.append(F.cross_entropy(queries @ candidates.T / temperature, own))
    return torch.stack(losses).sum()


def find_rows(run: Path, step: int) -> list[int]:
    """The rows of a step, by their number in the file."""
    from finetune.data.prepare import prepare_data
    from finetune.data.tokenizer import load_tokenizer
    from tests.training.reference import Alone

    recipe = read_recipe(str(run / "recipe.yaml"))
    data = prepare_data(recipe, load_tokenizer(recipe.model, recipe.data), Alone())
    size = data.train.examples.group_size
    ids = [int(index) for ids in data.train.rows_of(step) for index in ids]
    return [int(data.train.examples.where(index).rpartition(":")[2]) - 1 for index in ids[::size]]


def train_plainly(
    run: Path, model: Any, compute: Callable[[list[dict[str, Any]]], torch.Tensor], trained: list[torch.nn.Parameter]
) -> list[tuple[float, float]]:
    """(loss, gradient norm) of every step of a loop that computes the loss of a step's rows at once."""
    from tests.training.reference import _cosine

    recipe = read_recipe(str(run / "recipe.yaml"))
    optimizer = torch.optim.AdamW(trained, weight_decay=0.0, eps=recipe.optimization.adam_epsilon)
    rows = make_rows()
    results = []
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = _cosine(
            step, STEPS, recipe.optimization.learning_rate, recipe.optimization.warmup_ratio
        )
        loss = compute([rows[number] for number in find_rows(run, step)])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, recipe.optimization.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        results.append((loss.item(), norm.item()))
    return results


@pytest.fixture(scope="module")
def plain(runs: Callable[[str, str], Path], folder: Path) -> Callable[[str, bool], list[tuple[float, float]]]:
    """(kind, whether adapters are trained) -> the steps of the plain loop, which is the same for every split."""
    from tests.training.reference import _with_adapters

    known: dict[tuple[str, bool], list[tuple[float, float]]] = {}

    def train(kind: str, has_adapters: bool) -> list[tuple[float, float]]:
        if (kind, has_adapters) not in known:
            run = runs("lora" if has_adapters else "one", kind)
            model = AutoModel.from_pretrained(folder / "model", dtype=torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(folder / "model")
            if has_adapters:
                from transformers import AutoModelForCausalLM

                whole = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
                adapted = _with_adapters(whole, read_recipe(str(run / "recipe.yaml")))
                model = adapted.get_base_model().model
                trained = [p for p in adapted.parameters() if p.requires_grad]
            else:
                trained = list(model.parameters())

            def compute(rows: list[dict[str, Any]]) -> torch.Tensor:
                texts = [read_texts(row, kind) for row in rows]
                return compute_loss([[embed_alone(model, tokenizer, t, kind) for t in group] for group in texts], kind)

            known[kind, has_adapters] = train_plainly(run, model, compute, trained)
        return known[kind, has_adapters]

    return train


@pytest.mark.parametrize("kind", RECIPES)
@pytest.mark.parametrize("name", RUNS)
def test_losses_and_norms_are_those_of_the_whole_batch(
    name: str, kind: str, runs: Callable[[str, str], Path], plain: Callable[[str, bool], list[tuple[float, float]]]
) -> None:
    expected = plain(kind, name == "lora")
    lines = assert_losses(runs(name, kind), expected)
    first = steps_of(runs("one", kind))
    for line, one in zip(lines, first if name != "lora" else lines, strict=True):
        assert line["recall@1"] == pytest.approx(one["recall@1"], abs=1e-6)
        assert line["loss"] == pytest.approx(one["loss"], rel=2e-6)
