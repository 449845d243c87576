"""Rerankers: the loss of a step is that of transformers' class over one pair at a time and of sentence-transformers' losses on
the whole batch, in every layout; `CrossEncoder` opens what is exported, and gives the same scores."""

import json
import math
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from finetune.cli import main
from finetune.config.accelerate_file import read_sharding
from finetune.config.compatibility import find_problems, refuse_problems
from finetune.config.reader import read_recipe
from finetune.config.schema import Data, DatasetSource
from finetune.data.messages import BadRow
from finetune.data.prepare import prepare_data
from finetune.data.retrieval import parse_ranked
from finetune.data.tokenizer import load_tokenizer
from finetune.errors import UserError
from finetune.models.head_scores import draw_head
from finetune.plan.plan import format_plan, make_plan
from finetune.report.page import render_page
from finetune.report.run_data import read_run
from finetune.training.objectives.ranks import describe_order
from finetune.training.objectives.scores import RANKING
from tests.conftest import make_model
from tests.training.layouts import (
    assert_losses,
    assert_resumed,
    cross,
    cross_resumed,
    steps_of,
    train_kinds,
    write_config,
    write_recipe,
)
from tests.training.reference import Alone, _cosine, _with_adapters

STEPS = 3
QUERIES = 10  # in a step
ROWS = 25
NEGATIVES = 2
GRADES = ((2, 0, 1), (0, 2, 1), (1, 0, 2))
# as `rows`: pairs with a label, a document that answers with its negatives, or graded documents
RECIPES: dict[str, dict[str, Any]] = {
    "pointwise": {"rows": "pairs"},
    "pairwise": {"rows": "graded", "num_negatives": NEGATIVES, "document_prompt": "\nText: "},
    "listwise": {"rows": "negatives", "num_negatives": NEGATIVES},
    "listnet": {"rows": "graded", "num_negatives": NEGATIVES},
}
# name -> ranks, layout, its sizes, keys of the recipe
RUNS: dict[str, tuple[int, str, dict[str, int], list[str]]] = {
    "one": (1, "single", {}, ["per_device_train_batch_size=1"]),
    "seven": (1, "single", {}, ["per_device_train_batch_size=7", "packing=false"]),
    "lora": (2, "full_shard", {}, ["per_device_train_batch_size=3", "use_peft=true", "lora_r=4"]),
    "cp": (2, "full_shard", {"cp_size": 2}, ["per_device_train_batch_size=4"]),
    "pipeline": (2, "full_shard", {}, ["pipeline_parallel_size=2"]),
    "two": (2, "full_shard", {}, ["per_device_train_batch_size=2"]),
    "fsdp1": (2, "FULL_SHARD", {}, ["per_device_train_batch_size=3"]),
    "ddp": (3, "ddp", {}, ["per_device_train_batch_size=2"]),
    "fsdp2": (3, "full_shard", {}, ["per_device_train_batch_size=3"]),
}
KINDS = sorted(RECIPES)
QUICK = {("one", "listnet"), ("one", "listwise"), ("one", "pointwise"), ("lora", "pairwise")}
RESUMED = {"two": ("full_shard", "ddp"), "lora": ("full_shard",)}  # from step 2, in these layouts


def make_rows(kind: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for n in range(ROWS):
        query = f"What is {n} and {n}?" + " Say it." * (n % 4)
        texts = [f"It is {2 * n}." + " Surely." * (n % 3), f"It is {n + 1}.", "Nobody knows."]
        match RECIPES[kind]["rows"]:
            case "pairs":
                row = {"query": query, "document": texts[n % 3], "label": (1, 0.25, 0)[n % 3]}
            case "negatives":
                row = {"anchor": query, "positive": texts[0], "negatives": [*texts[1:], "more"]}
            case _:
                row = {"query": query, "docs": texts, "labels": list(GRADES[n % 3])}
        rows.append(row)
    return rows


def read_pairs(row: dict[str, Any]) -> tuple[list[tuple[str, str]], list[float]]:
    """The pairs of a row with their numbers, as whoever trains on them by hand reads them."""
    if "label" in row:
        return [(row["query"], row["document"])], [float(row["label"])]
    if "docs" in row:
        return [(row["query"], text) for text in row["docs"]], [float(n) for n in row["labels"]]
    texts = [row["positive"], *row["negatives"][:NEGATIVES]]
    return [(row["anchor"], text) for text in texts], [1.0, 0.0, 0.0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reranking")


@pytest.fixture(scope="module")
def recipes(folder: Path) -> dict[str, Path]:
    make_model(folder / "model", initializer_range=0.1)
    written = {}
    for kind, keys in RECIPES.items():
        data = folder / f"{kind}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in make_rows(kind)))
        common = {
            "method": "rerank",
            "loss_type": kind,
            "global_batch_size": QUERIES,
            "max_steps": STEPS,
            "packing": True,
            "max_length": 160,
            "adam_epsilon": 1e-4,
            "export_at_end": True,
            "save_steps": 2,
            "save_total_limit": None,
            "eval_datasets": [{"path": str(data)}],
        }
        keys = {key: value for key, value in keys.items() if key != "rows"}
        written[kind] = write_recipe(
            folder / f"{kind}.yaml", folder / "model", data, **common | keys
        )
    return written


@pytest.fixture(scope="module")
def runs(folder: Path, recipes: dict[str, Path], slow_too: bool) -> Callable[[str, str], Path]:
    wanted = product(RUNS, KINDS) if slow_too else QUICK
    return train_kinds(folder, RUNS, recipes, wanted, RESUMED if slow_too else {})


def write_pair(tokenizer: Any, query: str, document: str, kind: str) -> torch.Tensor:
    text = f"Query: {query}{RECIPES[kind].get('document_prompt', chr(10) + 'Document: ')}{document}"
    ids: torch.Tensor = tokenizer(text + tokenizer.eos_token, return_tensors="pt").input_ids
    return ids


def compute_loss(scores: torch.Tensor, numbers: torch.Tensor, kind: str) -> torch.Tensor:
    """The loss of a query, document by document."""
    if kind == "pointwise":
        return F.binary_cross_entropy_with_logits(scores, numbers)
    if kind == "pairwise":
        pairs = [
            -F.logsigmoid(scores[i] - scores[j])
            for i in range(len(scores))
            for j in range(len(scores))
            if numbers[i] > numbers[j]
        ]
        return torch.stack(pairs).mean()
    if kind == "listwise":
        return F.cross_entropy(scores, numbers.argmax())
    return F.cross_entropy(scores, numbers.softmax(0))


def find_rows(run: Path, step: int) -> list[int]:
    """The rows of a step, by their number in the file."""
    recipe = read_recipe(str(run / "recipe.yaml"))
    data = prepare_data(recipe, load_tokenizer(recipe.model, recipe.data), Alone())
    size = data.train.examples.group_size
    ids = [int(index) for ids in data.train.rows_of(step) for index in ids]
    return [int(data.train.examples.where(index).rpartition(":")[2]) - 1 for index in ids[::size]]


def make_class(run: Path, folder: Path) -> tuple[Any, Any]:
    """(transformers' class with the head with which the run began, its tokenizer)."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForSequenceClassification.from_pretrained(
        folder / "model", num_labels=1, dtype=torch.float32, pad_token_id=tokenizer.pad_token_id
    )
    seed = read_recipe(str(run / "recipe.yaml")).run.seed
    with torch.no_grad():
        model.score.weight.copy_(draw_head(model, "score.weight", seed, (slice(None),)))
    return model, tokenizer


def train_plainly(
    run: Path,
    compute: Callable[[list[dict[str, Any]]], torch.Tensor],
    trained: list[torch.nn.Parameter],
    kind: str,
) -> list[tuple[float, float]]:
    """(loss, gradient norm) of every step of a loop that computes the loss of a step's rows at once."""
    recipe = read_recipe(str(run / "recipe.yaml"))
    optimizer = torch.optim.AdamW(trained, weight_decay=0.0, eps=recipe.optimization.adam_epsilon)
    rows = make_rows(kind)
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
            model, tokenizer = make_class(run, folder)
            if has_adapters:
                model = _with_adapters(model, read_recipe(str(run / "recipe.yaml")))

            def compute(rows: list[dict[str, Any]]) -> torch.Tensor:
                losses = []
                for pairs, numbers in map(read_pairs, rows):
                    scores = [
                        model(input_ids=write_pair(tokenizer, *pair, kind)).logits[0, 0]
                        for pair in pairs
                    ]
                    losses.append(compute_loss(torch.stack(scores), torch.tensor(numbers), kind))
                return torch.stack(losses).mean()

            trained = [p for p in model.parameters() if p.requires_grad]
            known[kind, has_adapters] = train_plainly(run, compute, trained, kind)
        return known[kind, has_adapters]

    return train


@cross(RUNS, KINDS, QUICK)
def test_losses_and_norms_are_those_of_transformers_class(
    name: str,
    kind: str,
    runs: Callable[[str, str], Path],
    plain: Callable[[str, bool], list[tuple[float, float]]],
) -> None:
    lines = assert_losses(runs(name, kind), plain(kind, name == "lora"))
    if name != "lora":  # the same number, whatever the micro-batches and ranks
        for line, one in zip(lines, steps_of(runs("one", kind)), strict=True):
            assert line["loss"] == pytest.approx(one["loss"], rel=2e-6)
            if kind != "pointwise":
                assert line["mrr@10"] == pytest.approx(one["mrr@10"], abs=1e-6)


@cross(["one", "fsdp2"], KINDS, QUICK)
def test_losses_and_norms_are_those_of_sentence_transformers(
    name: str, kind: str, runs: Callable[[str, str], Path], folder: Path
) -> None:
    """Of its losses for CrossEncoder, over the padded whole batch in one process, written by the exported template."""
    library = pytest.importorskip("sentence_transformers")
    losses = pytest.importorskip("sentence_transformers.cross_encoder.losses")
    run = runs("one", kind)
    model = library.CrossEncoder(str(run / "export"), device="cpu")
    own, _ = make_class(run, folder)
    model.model.load_state_dict(own.state_dict())
    model.train()
    if kind == "pointwise":
        loss = losses.BinaryCrossEntropyLoss(model)
    elif kind == "pairwise":
        loss = losses.RankNetLoss(model, reduction_log="natural")
    else:
        loss = losses.ListNetLoss(model)

    def compute(rows: list[dict[str, Any]]) -> torch.Tensor:
        read = [read_pairs(row) for row in rows]
        queries = [pairs[0][0] for pairs, _ in read]
        documents = [[document for _, document in pairs] for pairs, _ in read]
        numbers = [torch.tensor(numbers) for _, numbers in read]
        if kind == "pointwise":
            value = loss([queries, [each[0] for each in documents]], torch.cat(numbers))
        elif kind == "listwise":  # the share of each document is its label: their logits are
            value = loss([queries, documents], [torch.log(each + 1e-30) for each in numbers])
        else:
            value = loss([queries, documents], numbers)
        return value

    expected = train_plainly(run, compute, list(model.parameters()), kind)
    assert_losses(runs(name, kind), expected)


@cross(["one", "lora"], KINDS, QUICK)
def test_the_export_has_the_scores_of_the_run(
    name: str, kind: str, runs: Callable[[str, str], Path]
) -> None:
    export = runs(name, kind) / "export"
    tokenizer = AutoTokenizer.from_pretrained(export)
    opened = AutoModelForSequenceClassification.from_pretrained(export, dtype=torch.float32)
    assert opened.config.num_labels == 1
    card = (export / "README.md").read_text()
    assert "CrossEncoder" in card and "text-ranking" in card
    pairs = [pair for row in make_rows(kind)[:4] for pair in read_pairs(row)[0]]
    with torch.no_grad():
        scores = [
            opened(input_ids=write_pair(tokenizer, *pair, kind)).logits[0, 0] for pair in pairs
        ]
    for pair in pairs:
        roles = [
            {"role": r, "content": c} for r, c in zip(("query", "document"), pair, strict=True)
        ]
        text = tokenizer.apply_chat_template(roles, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert ids == write_pair(tokenizer, *pair, kind)[0].tolist()
    library = pytest.importorskip("sentence_transformers")
    ranker = library.CrossEncoder(str(export), device="cpu")
    predicted = ranker.predict(pairs, activation_fn=torch.nn.Identity())
    torch.testing.assert_close(torch.tensor(predicted), torch.stack(scores), rtol=1e-5, atol=1e-6)


@cross(["one", "fsdp2", "lora"], KINDS, QUICK)
def test_held_out_metrics_are_those_of_the_export(
    name: str, kind: str, runs: Callable[[str, str], Path]
) -> None:
    run = runs(name, kind)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (line,) = [line for line in lines if "eval_loss" in line and line["step"] == STEPS]
    model = AutoModelForSequenceClassification.from_pretrained(run / "export", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(run / "export")
    losses, measured = [], []
    for pairs, numbers in map(read_pairs, make_rows(kind)):
        with torch.no_grad():
            scores = [
                model(input_ids=write_pair(tokenizer, *pair, kind)).logits[0, 0] for pair in pairs
            ]
        losses.append(float(compute_loss(torch.stack(scores), torch.tensor(numbers), kind)))
        if kind != "pointwise":
            measured.append(measure_plainly([float(score) for score in scores], numbers))
    assert line["eval_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    if kind == "pointwise":
        assert "eval_mrr@10" not in line
        return
    for metric in measured[0]:
        expected = sum(each[metric] for each in measured) / len(measured)
        assert line[f"eval_{metric}"] == pytest.approx(expected, abs=1e-6), metric


def measure_plainly(scores: list[float], numbers: list[float]) -> dict[str, float]:
    """Of one query: documents in order, those that answer worse first among equal ones."""
    ranked = [n for _, n in sorted(zip(scores, numbers, strict=True), key=lambda p: (-p[0], p[1]))]
    answers = [number > 0 for number in ranked]
    first = answers.index(True)

    def gain(ordered: list[float]) -> float:
        return sum(n / math.log2(place + 2) for place, n in enumerate(ordered[:10]))

    return {
        "recall@1": answers[0] / sum(answers),
        "recall@10": sum(answers[:10]) / sum(answers),
        "mrr@10": 1 / (first + 1) if first < 10 else 0.0,
        "ndcg@10": gain(ranked) / gain(sorted(numbers, reverse=True)),
    }


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_ranks_of_random_queries(drawn: st.DataObject) -> None:
    """With ties, several documents that answer, and more than ten."""
    documents = drawn.draw(st.integers(1, 14))
    rows = [
        (
            drawn.draw(st.lists(st.integers(-2, 2), min_size=documents, max_size=documents)),
            drawn.draw(st.lists(st.integers(0, 3), min_size=documents, max_size=documents)),
        )
        for _ in range(drawn.draw(st.integers(1, 4)))
    ]
    scores = torch.tensor([scores for scores, _ in rows], dtype=torch.float64)
    numbers = torch.tensor([numbers for _, numbers in rows], dtype=torch.float64)
    answered = [measure_plainly(*row) for row in rows if any(row[1])]
    for name, (total, count) in describe_order(scores, numbers).items():
        assert count == len(answered)
        assert float(total) == pytest.approx(sum(each[name] for each in answered)), name


@settings(max_examples=40, deadline=None)
@given(st.permutations(range(5)), st.sampled_from(KINDS))
def test_a_loss_does_not_depend_on_the_order_of_documents(order: list[int], kind: str) -> None:
    scores = torch.tensor([[0.3, -1.0, 2.0, 0.0, 0.7]], dtype=torch.float64)
    numbers = torch.tensor([[1.0, 0.0, 0.5, 0.0, 0.25]], dtype=torch.float64)
    loss = RANKING[kind](scores, numbers).sum()
    torch.testing.assert_close(RANKING[kind](scores[:, order], numbers[:, order]).sum(), loss)


@cross_resumed(RESUMED, KINDS, quick=())
def test_a_run_resumes(
    name: str, kind: str, layout: str, runs: Callable[[str, str], Path], folder: Path
) -> None:
    assert_resumed(runs(name, kind), folder / layout / name / kind, layout, STEPS)


ROWS_REFUSED = {
    '{"query": "a", "document": "b", "label": -1}': "label: a number from 0 on is expected, of at most 3.4e38, found -1",
    '{"query": "a", "document": "b", "label": 1e39}': "label: a number from 0 on is expected, of at most 3.4e38, found",
    '{"query": "a", "document": "b", "label": "yes"}': "label: a number from 0 on is expected, of at most 3.4e38, found 'yes'",
    '{"query": "a", "docs": ["b", "c"], "labels": [1]}': "labels: 1 numbers for 2 documents in docs",
    '{"query": "a", "document": "b", "label": 1}': "1 documents, where num_negatives: 1 asks for 2",
    '{"query": "a", "docs": ["b", ""], "labels": [1, 0]}': "docs: text is expected, found ''",
    '{"docs": ["b", "c"], "labels": [1, 0]}': "no query: its columns are docs, labels (prompt_column names it)",
}


@pytest.mark.parametrize("row", ROWS_REFUSED)
def test_a_row_that_cannot_be_ranked_says_why(row: str) -> None:
    with pytest.raises(BadRow) as problem:
        parse_ranked(json.loads(row), DatasetSource(path="a.jsonl"), Data(num_negatives=1))
    assert ROWS_REFUSED[row] in str(problem.value)


@pytest.mark.parametrize(
    ("scores", "findings"),
    [
        ([1, 0], ()),
        ([1, 0, 1], ()),
        ([0.5, 0, 1], ("best_unread",)),
        ([1, 1], ("same_scores",)),
        ([0, 0, 1], ("best_unread", "same_scores")),
    ],
)
def test_scores_from_which_nothing_is_learned_are_found(
    scores: list[float], findings: tuple[str, ...]
) -> None:
    row = {"query": "a", "docs": [*"bcd"][: len(scores)], "labels": scores}
    parsed = parse_ranked(row, DatasetSource(path="a.jsonl"), Data(num_negatives=1))
    assert parsed.findings == findings


def test_one_document_without_a_label_says_why() -> None:
    row = {"query": "a", "positive": "b", "negative": "c"}
    with pytest.raises(BadRow, match="a document without a label says nothing"):
        parse_ranked(row, DatasetSource(path="a.jsonl"), Data())


REFUSED = {
    "loss_type=pairwise": "num_negatives: 0: loss_type: pairwise compares the documents of a query",
    "loss_type=sigmoid": "loss_type: sigmoid is not for method: rerank; set one of pointwise, pairwise, listwise, listnet",
    "pooling=mean": "pooling has no effect with method: rerank",
    "labels=[a,b]": "labels has no effect with method: rerank",
    "overlength=truncate": "overlength: truncate cannot be combined with method: rerank",
    "beta=0.2": "beta has no effect with method: rerank",
    "export_formats=[safetensors,gguf]": "export_formats cannot be combined with method: rerank",
}


@pytest.mark.parametrize("keys", REFUSED)
def test_what_does_not_go_with_rerankers_is_refused(keys: str, recipes: dict[str, Path]) -> None:
    with pytest.raises(UserError) as error:
        refuse_problems(find_problems(read_recipe(str(recipes["pointwise"]), keys.split())))
    assert REFUSED[keys] in str(error.value), str(error.value)


def test_tensor_parallelism_is_refused(recipes: dict[str, Path], folder: Path) -> None:
    layout = read_sharding(
        str(write_config(folder, "full_shard", sizes={"tp_size": 2})), None, {"WORLD_SIZE": "2"}
    )
    (problem,) = find_problems(read_recipe(str(recipes["listnet"])), layout, ranks=2)
    assert "tp_size cannot be combined with method: rerank" in str(problem)


def test_inspect_plan_report_and_chat(
    runs: Callable[[str, str], Path],
    recipes: dict[str, Path],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["inspect", "--recipe", str(recipes["pairwise"]), "--rows", "1"]) == 0
    said = capsys.readouterr().out
    first = GRADES[0]
    for grade in first:
        assert f"scored at the marked one as {grade}" in said
    assert "(document)" in said and ">><|end|><<" in said, said
    sharding = read_sharding(str(write_config(folder, "single")), None, {})
    plan = make_plan(read_recipe(str(recipes["pairwise"])), sharding, 1)
    assert "1 score of each document" in format_plan(plan)
    assert "Held-out recall@1" in render_page([read_run(runs("one", "listnet"))], [None])
    export = runs("one", "listnet") / "export"
    text = "Query: What is 3?\nDocument: It is 3."
    assert main(["chat", str(export), "--prompt", text]) == 0
    name, score = capsys.readouterr().out.split()
    opened = AutoModelForSequenceClassification.from_pretrained(export, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(export)
    with torch.no_grad():
        ids = write_pair(tokenizer, "What is 3?", "It is 3.", "listnet")
        expected = float(opened(input_ids=ids).logits[0, 0])
    assert name == "rerank" and float(score) == pytest.approx(expected, abs=1e-4)
