"""Embeddings: the loss of a step is one number, whatever its micro-batches and ranks, and that of transformers' and of
sentence-transformers' own classes on the whole batch; what is exported opens there with the same vectors."""

import json
import math
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModel, AutoTokenizer

from finetune.cli import main
from finetune.config.accelerate_file import read_sharding
from finetune.config.compatibility import find_problems, refuse_problems
from finetune.config.pretrained import load_config, read_facts
from finetune.config.reader import read_recipe
from finetune.data.prepare import prepare_data
from finetune.data.tokenizer import load_tokenizer
from finetune.errors import UserError
from finetune.export.export import export
from finetune.models.contrast import contrast
from finetune.plan.plan import format_plan, make_plan
from finetune.report.page import render_page
from finetune.report.run_data import read_run
from finetune.run import fine_tune
from finetune.session import Session
from finetune.training.objectives.contrastive import embed_documents
from tests.conftest import make_model
from tests.training.layouts import (
    assert_losses,
    assert_resumed,
    cross,
    cross_resumed,
    steps_of,
    train_all,
    train_kinds,
    write_config,
    write_recipe,
)
from tests.training.reference import Alone, _cosine, _with_adapters

STEPS = 3
PAIRS = 16
ROWS = 160
NEGATIVES = 2
RECIPES: dict[str, dict[str, Any]] = {
    "last": {"query_prompt": "Find: ", "num_negatives": 0, "temperature": 0.1},
    "mean": {
        "pooling": "mean",
        "document_prompt": "Text: ",
        "num_negatives": NEGATIVES,
        "matryoshka_dims": [64, 16],
    },
}
# name -> ranks, layout, its sizes, keys of the recipe
RUNS: dict[str, tuple[int, str, dict[str, int], list[str]]] = {
    "one": (1, "single", {}, ["per_device_train_batch_size=1"]),
    "seven": (1, "single", {}, ["per_device_train_batch_size=7", "packing=false"]),
    "whole": (1, "single", {}, [f"per_device_train_batch_size={PAIRS}"]),
    "lora": (2, "full_shard", {}, ["per_device_train_batch_size=9", "use_peft=true", "lora_r=4"]),
    "ddp": (3, "ddp", {}, ["per_device_train_batch_size=5"]),
    "fsdp2": (3, "full_shard", {}, ["per_device_train_batch_size=7"]),
    "fsdp1": (3, "FULL_SHARD", {}, ["per_device_train_batch_size=4", "packing=false"]),
    "cp": (2, "full_shard", {"cp_size": 2}, ["per_device_train_batch_size=7"]),
    "two": (2, "full_shard", {}, ["per_device_train_batch_size=40"]),
    "offload": (2, "offload", {}, ["per_device_train_batch_size=16"]),
    "checkpointed": (2, "full_shard", {}, ["per_device_train_batch_size=16"]),
}

KINDS = list(RECIPES)
QUICK = {("one", "last"), ("lora", "mean")}
RESUMED = {"two": ("full_shard", "ddp"), "lora": ("full_shard",)}  # from step 2, in these layouts


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
            "eval_datasets": [{"path": str(data), "max_samples": 24}],
        }
        written[name] = write_recipe(
            folder / f"{name}.yaml", folder / "model", data, **common | keys
        )
    return written


@pytest.fixture(scope="module")
def runs(folder: Path, recipes: dict[str, Path], slow_too: bool) -> Callable[[str, str], Path]:
    wanted = product(RUNS, KINDS) if slow_too else QUICK
    return train_kinds(folder, RUNS, recipes, wanted, RESUMED if slow_too else {})


def read_texts(row: dict[str, Any], kind: str) -> list[str]:
    """The texts of a row, as whoever embeds them writes them: query, document, negatives."""
    keys = RECIPES[kind]
    query = row.get("anchor") or row["query"]
    positive = row.get("positive") or row["pos_doc"][0]["text"]
    negatives = row.get("negatives") or [row[f"negative_{n}"] for n in (1, 2, 3)]
    documents = [positive, *negatives[: keys["num_negatives"]]]
    return [
        keys.get("query_prompt", "") + query,
        *(keys.get("document_prompt", "") + text for text in documents),
    ]


def embed_alone(model: Any, tokenizer: Any, text: str, kind: str) -> torch.Tensor:
    states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
    return states.mean(0) if kind == "mean" else states[-1]


def compute_loss(groups: list[list[torch.Tensor]], kind: str) -> torch.Tensor:
    """InfoNCE over all documents, summed over the lengths that vectors are cut to."""
    temperature = RECIPES[kind].get("temperature", 0.05)
    losses = []
    for dim in RECIPES[kind].get("matryoshka_dims", [None]):
        queries = F.normalize(torch.stack([group[0][:dim] for group in groups]))
        candidates = F.normalize(
            torch.stack([vector[:dim] for group in groups for vector in group[1:]])
        )
        own = torch.arange(len(groups)) * (len(groups[0]) - 1)
        losses.append(F.cross_entropy(queries @ candidates.T / temperature, own))
    return torch.stack(losses).sum()


def find_rows(run: Path, step: int) -> list[int]:
    """The rows of a step, by their number in the file."""
    recipe = read_recipe(str(run / "recipe.yaml"))
    data = prepare_data(recipe, load_tokenizer(recipe.model, recipe.data), Alone())
    size = data.train.examples.group_size
    ids = [int(index) for ids in data.train.rows_of(step) for index in ids]
    return [int(data.train.examples.where(index).rpartition(":")[2]) - 1 for index in ids[::size]]


def train_plainly(
    run: Path,
    model: Any,
    compute: Callable[[list[dict[str, Any]]], torch.Tensor],
    trained: list[torch.nn.Parameter],
) -> list[tuple[float, float]]:
    """(loss, gradient norm) of every step of a loop that computes the loss of a step's rows at once."""
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
def plain(
    runs: Callable[[str, str], Path], folder: Path
) -> Callable[[str, bool], list[tuple[float, float]]]:
    """(kind, whether adapters are trained) -> the steps of the plain loop, which is the same for every split."""
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
                return compute_loss(
                    [[embed_alone(model, tokenizer, t, kind) for t in group] for group in texts],
                    kind,
                )

            known[kind, has_adapters] = train_plainly(run, model, compute, trained)
        return known[kind, has_adapters]

    return train


@cross(RUNS, KINDS, QUICK)
def test_losses_and_norms_are_those_of_the_whole_batch(
    name: str,
    kind: str,
    runs: Callable[[str, str], Path],
    plain: Callable[[str, bool], list[tuple[float, float]]],
) -> None:
    expected = plain(kind, name == "lora")
    lines = assert_losses(runs(name, kind), expected)
    first = lines if name == "lora" else steps_of(runs("one", kind))
    for line, one in zip(lines, first, strict=True):
        assert line["recall@1"] == pytest.approx(one["recall@1"], abs=1e-6)
        assert line["loss"] == pytest.approx(one["loss"], rel=2e-6)


@pytest.mark.slow
def test_hybrid_sharding_has_the_same_losses(
    recipes: dict[str, Path], plain: Callable[[str, bool], list[tuple[float, float]]], folder: Path
) -> None:
    config = write_config(folder / "model", "full_shard", mesh=(2, 2))
    keys = ["per_device_train_batch_size=3"]
    listed = [
        (recipe, config, [*keys, f"output_dir={folder / 'hybrid' / kind}"])
        for kind, recipe in recipes.items()
    ]
    train_all(folder, listed, ranks=4)
    for kind in recipes:
        assert_losses(folder / "hybrid" / kind, plain(kind, False))


@pytest.mark.slow
def test_divided_experts_have_the_losses_of_one_rank(
    recipes: dict[str, Path], folder: Path
) -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    model = make_model(folder / "mixture", model_type="qwen3_moe", initializer_range=0.1, **sizes)
    keys = [f"model_name_or_path={model}", "per_device_train_batch_size=9", "export_at_end=false"]
    for ranks, layout, more in ((1, "single", []), (2, "full_shard", ["expert_parallel_size=2"])):
        config = write_config(folder, layout)
        overrides = [*keys, *more, f"output_dir={folder / f'experts-{ranks}'}"]
        train_all(folder, [(recipes["mean"], config, overrides)], ranks=ranks)
    alone = [(line["loss"], line["grad_norm"]) for line in steps_of(folder / "experts-1")]
    assert_losses(folder / "experts-2", alone)


@cross(["one", "fsdp2"], KINDS, QUICK)
def test_losses_and_norms_are_those_of_sentence_transformers(
    name: str, kind: str, runs: Callable[[str, str], Path], folder: Path
) -> None:
    """Of MultipleNegativesRankingLoss, and MatryoshkaLoss around it, over the padded whole batch in one process."""
    library = pytest.importorskip("sentence_transformers")
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    keys = RECIPES[kind]
    of_text = {
        "text": {"method": "forward", "method_output_name": "last_hidden_state"}
    }  # else by the chat template
    keywords = {"modality_config": of_text, "module_output_name": "token_embeddings"}
    transformer = modules.Transformer(str(folder / "model"), **keywords)
    pooling = modules.Pooling(64, pooling_mode=keys.get("pooling", "lasttoken"))
    model = library.SentenceTransformer(modules=[transformer, pooling], device="cpu")
    loss = losses.MultipleNegativesRankingLoss(model, scale=1 / keys.get("temperature", 0.05))
    if "matryoshka_dims" in keys:
        loss = losses.MatryoshkaLoss(model, loss, matryoshka_dims=keys["matryoshka_dims"])

    def compute(rows: list[dict[str, Any]]) -> torch.Tensor:
        columns = zip(*(read_texts(row, kind) for row in rows), strict=True)
        features = [model.preprocess(list(texts)) for texts in columns]
        value: torch.Tensor = loss(features, torch.zeros(len(rows)))
        return value

    expected = train_plainly(runs("one", kind), model, compute, list(model.parameters()))
    assert_losses(runs(name, kind), expected)


@cross(["one", "lora", "fsdp2"], KINDS, QUICK)
def test_held_out_metrics_are_those_of_the_export(
    name: str, kind: str, runs: Callable[[str, str], Path], folder: Path
) -> None:
    run = runs(name, kind)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (line,) = [line for line in lines if "eval_loss" in line and line["step"] == STEPS]
    model = AutoModel.from_pretrained(run / "export", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(run / "export")
    rows = make_rows()
    with torch.no_grad():
        held_out = [rows[number] for number in find_held_out(run)]
        groups = [
            [embed_alone(model, tokenizer, text, kind) for text in read_texts(row, kind)]
            for row in held_out
        ]
    assert line["eval_loss"] == pytest.approx(compute_loss(groups, kind).item(), rel=1e-5)
    queries = F.normalize(torch.stack([group[0] for group in groups]))
    documents = F.normalize(torch.stack([vector for group in groups for vector in group[1:]]))
    cosines = queries.double() @ documents.double().T
    own = cosines[torch.arange(len(groups)), torch.arange(len(groups)) * (len(groups[0]) - 1)]
    places = [int((row > mine + 1e-9).sum()) for row, mine in zip(cosines, own, strict=True)]
    expected = {
        "recall@1": sum(place == 0 for place in places),
        "recall@10": sum(place < 10 for place in places),
        "mrr@10": sum(1 / (place + 1) for place in places if place < 10),
        "ndcg@10": sum(1 / math.log2(place + 2) for place in places if place < 10),
    }
    for metric, total in expected.items():
        assert line[f"eval_{metric}"] == pytest.approx(total / len(places), abs=1e-6), metric
    assert line["eval_recall@10"] > 0 and line["eval_recall@1"] < line["eval_recall@10"]


def find_held_out(run: Path) -> list[int]:
    """The rows that are held out, by their number in the file."""
    recipe = read_recipe(str(run / "recipe.yaml"))
    data = prepare_data(recipe, load_tokenizer(recipe.model, recipe.data), Alone())
    assert data.evaluation is not None
    examples = data.evaluation.examples
    first = range(0, len(examples), examples.group_size)
    return [int(examples.where(index).rpartition(":")[2]) - 1 for index in first]


@cross(["one", "lora"], KINDS, QUICK)
def test_sentence_transformers_opens_the_export(
    name: str, kind: str, runs: Callable[[str, str], Path], folder: Path
) -> None:
    library = pytest.importorskip("sentence_transformers")
    export = runs(name, kind) / "export"
    opened = library.SentenceTransformer(str(export), device="cpu")
    model = AutoModel.from_pretrained(export, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(export)
    rows = make_rows()[:6]
    texts = [read_texts(row, kind) for row in rows]
    bare = [read_bare(row) for row in rows]
    encoded = {
        "query": opened.encode_query([query for query, _ in bare]),
        "document": opened.encode_document([document for _, document in bare]),
    }
    for place, vectors in enumerate(encoded.values()):
        with torch.no_grad():
            own = [
                F.normalize(embed_alone(model, tokenizer, group[place], kind), dim=0)
                for group in texts
            ]
        torch.testing.assert_close(torch.tensor(vectors), torch.stack(own), rtol=1e-5, atol=1e-6)
    assert opened.max_seq_length == 64 and opened.similarity_fn_name == "cosine"


def read_bare(row: dict[str, Any]) -> tuple[str, str]:
    """The query and the document of a row, without prompts."""
    return row.get("anchor") or row["query"], row.get("positive") or row["pos_doc"][0]["text"]


@cross(["one", "lora"], KINDS, QUICK)
def test_the_folder_says_how_it_is_pooled(
    name: str, kind: str, runs: Callable[[str, str], Path]
) -> None:
    """What sentence-transformers reads, where it is not installed."""
    keys = RECIPES[kind]
    export = runs(name, kind) / "export"
    modules = json.loads((export / "modules.json").read_text())
    assert [module["path"] for module in modules] == ["", "1_Pooling", "2_Normalize"]
    is_mean = keys.get("pooling") == "mean"
    pooling = json.loads((export / "1_Pooling" / "config.json").read_text())
    assert pooling["word_embedding_dimension"] == 64
    assert pooling["pooling_mode_mean_tokens"] == is_mean
    assert pooling["pooling_mode_lasttoken"] != is_mean
    prompts = json.loads((export / "config_sentence_transformers.json").read_text())["prompts"]
    assert prompts == {
        "query": keys.get("query_prompt", ""),
        "document": keys.get("document_prompt", ""),
    }
    card = (export / "README.md").read_text()
    assert "library_name: sentence-transformers" in card and "encode_query" in card


@cross_resumed(RESUMED, KINDS, quick=())
def test_a_run_resumes(
    name: str, kind: str, layout: str, runs: Callable[[str, str], Path], folder: Path
) -> None:
    assert_resumed(runs(name, kind), folder / layout / name / kind, layout, STEPS)


def test_dropout_is_the_same_in_both_forwards(recipes: dict[str, Path], folder: Path) -> None:
    """Else a gradient would be that of other vectors than those that it belongs to."""
    keys = [
        "attention_dropout=0.3",
        "per_device_train_batch_size=7",
        f"output_dir={folder / 'dropout'}",
    ]
    config = read_sharding(str(write_config(folder, "single")), None, {})
    with Session(read_recipe(str(recipes["last"]), keys), config) as session:
        model = session.model.train()
        batch = session.data.train.step_batch(0)
        objective = session._loaded.objectives.training
        torch.manual_seed(3)
        prepared = objective.prepare(model, lambda: batch.micro_batches, session.world)
        ids = [example_id for each in batch.micro_batches for example_id in each.example_ids]
        rows = [prepared.step.row_of[example_id] for example_id in ids]

        def embed() -> torch.Tensor:
            own = torch.cat(
                [embed_documents(model, each, each.inputs) for each in batch.micro_batches]
            )
            return torch.zeros_like(own).index_copy(0, torch.tensor(rows), own)

        with torch.no_grad():
            losses = [contrast(embed(), 2, 0.1).losses for _ in range(2)]
        torch.testing.assert_close(losses[0], prepared.step.contrast.losses, rtol=1e-12, atol=0.0)
        assert (losses[1] - losses[0]).abs().max() > 1e-3


def test_the_head_is_frozen_and_the_plan_knows(recipes: dict[str, Path], folder: Path) -> None:
    """Nothing asks the vocabulary's head; where it is the embedding, that is trained."""
    config = read_sharding(str(write_config(folder, "single")), None, {})
    for tied in (False, True):
        model = make_model(folder / f"tied-{tied}", tie_word_embeddings=tied)
        keys = [f"model_name_or_path={model}", f"output_dir={folder / f'planned-{tied}'}"]
        recipe = read_recipe(str(recipes["mean"]), keys)
        plan = make_plan(recipe, config, 1)
        with Session(recipe, config) as session:
            session.forward_backward(session.data.train.step_batch(0))
            trained = {name: p for name, p in session.model.named_parameters() if p.requires_grad}
            assert ("lm_head.weight" in dict(session.model.named_parameters())) != tied
            assert all(parameter.grad is not None for parameter in trained.values())
            session.optim_step()
            states = session._loaded.optimizer.state.values()
            held = sum(each[key].nbytes for each in states for key in ("exp_avg", "exp_avg_sq"))
        assert {tensor.name for tensor in plan.spec.tensors if tensor.trainable} == trained.keys()
        assert "lm_head.weight" not in trained
        state = plan.spec.state()
        assert (
            state.trained
            == state.gradients
            == sum(parameter.nbytes for parameter in trained.values())
        )
        assert 0 <= state.optimizer - held <= 8 * len(trained)  # the counters of steps
    documents = PAIRS * (1 + NEGATIVES)
    assert f"{PAIRS} pairs a step, each query among {documents} documents" in format_plan(plan)


@settings(max_examples=25, deadline=None)
@given(groups=st.integers(1, 9), size=st.integers(2, 4), seed=st.integers(0, 99), cut=st.booleans())
def test_the_contrast_of_vectors_is_that_of_autograd(
    groups: int, size: int, seed: int, cut: bool
) -> None:
    torch.manual_seed(seed)
    vectors = torch.randn(groups * size, 12, dtype=torch.float64)
    dims = (12, 5) if cut else ()
    compared = contrast(vectors, size, 0.2, dims)
    leaf = vectors.clone().requires_grad_()
    losses = []
    for dim in dims or (12,):
        by_group = leaf[:, :dim].reshape(groups, size, dim)
        cosines = F.cosine_similarity(by_group[:, None, None, 0], by_group[None, :, 1:], dim=-1)
        losses.append(
            -F.log_softmax(cosines.flatten(1) / 0.2, 1)[
                torch.arange(groups), torch.arange(groups) * (size - 1)
            ]
        )
    total = torch.stack(losses).sum(0)
    total.sum().backward()
    torch.testing.assert_close(compared.losses, total.detach())
    torch.testing.assert_close(compared.gradients, leaf.grad)
    assert compared.places.max() < groups * (size - 1)


def test_many_queries_are_compared_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = torch.randn(30, 8, dtype=torch.float64)
    at_once = contrast(vectors, 3, 0.1)
    monkeypatch.setattr("finetune.models.contrast.CONTRASTED_QUERIES", 4)
    in_parts = contrast(vectors, 3, 0.1)
    torch.testing.assert_close(in_parts.losses, at_once.losses)
    torch.testing.assert_close(in_parts.gradients, at_once.gradients)
    assert torch.equal(in_parts.places, at_once.places)


REFUSED = {
    "streaming=true max_steps=3": "streaming cannot be combined with method: embed",
    "neftune_noise_alpha=5": "neftune_noise_alpha cannot be combined with method: embed",
    "pipeline_parallel_size=2": "pipeline_parallel_size cannot be combined with method: embed",
    "exact_match_samples=4": "exact_match_samples cannot be combined with method: embed",
    "overlength=truncate": "overlength: truncate cannot be combined with method: embed",
    "export_formats=[safetensors,gguf]": "export_formats cannot be combined with method: embed",
    "beta=0.2": "beta has no effect with method: embed",
    "method=sft temperature=1.0 pooling=mean": "pooling has no effect with method: sft",
    "method=dpo temperature=1.0 num_negatives=2": "num_negatives has no effect with method: dpo",
    "method=dpo temperature=1.0 matryoshka_dims=[8]": "matryoshka_dims has no effect with method: dpo",
    "matryoshka_dims=[128,8]": "matryoshka_dims: 128: the model's states have 64 numbers",
}


@pytest.mark.parametrize("keys", REFUSED)
def test_what_does_not_go_with_embeddings_is_refused(
    keys: str, recipes: dict[str, Path], folder: Path
) -> None:
    unset = ["query_prompt=''", "temperature=0.05", *keys.split()]
    layout = read_sharding(str(write_config(folder, "full_shard")), None, {"WORLD_SIZE": "2"})
    with pytest.raises(UserError) as error:
        recipe = read_recipe(str(recipes["last"]), unset)
        facts = read_facts(load_config(recipe.model, None), str(folder / "model"), 512)
        refuse_problems(find_problems(recipe, layout, facts, ranks=2))
    assert REFUSED[keys] in str(error.value), str(error.value)


def test_a_dry_run_a_report_and_rows_of_a_script(
    runs: Callable[[str, str], Path],
    recipes: dict[str, Path],
    folder: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    config = read_sharding(str(write_config(folder, "single")), None, {})
    recipe = read_recipe(str(recipes["last"]), [f"output_dir={folder / 'dry'}"])
    fine_tune(recipe, config, dry_run=True)
    assert "160 pairs" in capfd.readouterr().out
    assert "Held-out recall@1" in render_page([read_run(runs("one", "last"))], [None])
    with Session(recipe, config, saves=False) as session:
        rows = [{"query": f"What is {n}?", "positive": f"It is {n}."} for n in range(5)]
        assert session.forward_backward(rows).metrics["recall@10"] == 1.0


def test_tensor_parallelism_is_refused(recipes: dict[str, Path], folder: Path) -> None:
    layout = read_sharding(
        str(write_config(folder, "full_shard", sizes={"tp_size": 2})), None, {"WORLD_SIZE": "2"}
    )
    (problem,) = find_problems(read_recipe(str(recipes["last"])), layout, ranks=2)
    assert "tp_size cannot be combined with method: embed" in str(problem)


def test_inspect_shows_what_is_pooled(
    recipes: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", "--recipe", str(recipes["last"]), "--rows", "1"]) == 0
    said = capsys.readouterr().out
    assert (
        "query" in said
        and "document" in said
        and "embedded by the states of the marked ones" in said
    )


def test_chat_and_other_formats_are_refused(
    runs: Callable[[str, str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs("one", "last")
    for name in (run / "export", run):
        assert main(["chat", str(name), "--prompt", "What is 3?"]) == 2
        assert "embeds texts and writes none; finetune chat --rank FILE" in capsys.readouterr().err
    with pytest.raises(UserError, match="gguf has no pooling; export safetensors"):
        export(run, tmp_path / "out", formats=["safetensors", "gguf"], log=lambda _: None)


def test_a_tokenizer_that_ends_texts_keeps_doing_so(
    folder: Path, recipes: dict[str, Path], tmp_path: Path
) -> None:
    """As Qwen3-Embedding's does: its last token is then the one that is read."""
    from tokenizers.processors import TemplateProcessing

    shutil.copytree(folder / "model", tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    ends = [("<|begin|>", tokenizer.bos_token_id), ("<|end|>", tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|begin|> $A <|end|>", special_tokens=ends
    )
    tokenizer.save_pretrained(tmp_path / "model")
    ours = read_recipe(str(recipes["last"]), [f"model_name_or_path={tmp_path / 'model'}"])
    data = prepare_data(ours, load_tokenizer(ours.model, ours.data), Alone())
    plain = AutoTokenizer.from_pretrained(tmp_path / "model")
    rows = make_rows()
    examples = data.train.examples
    for index in range(0, 20, 2):
        row = rows[int(examples.where(index).rpartition(":")[2]) - 1]
        for place, text in enumerate(read_texts(row, "last")):
            expected = plain(text).input_ids
            assert expected[-1] == tokenizer.eos_token_id
            assert examples[index + place].input_ids.tolist() == expected
            assert np.flatnonzero(examples[index + place].labels == 0).tolist() == [
                len(expected) - 1
            ]
