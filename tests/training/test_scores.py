"""Reward models and classifiers: losses and norms are those of transformers' own classes over one document at a time, in every
layout; what is exported opens there with the same scores."""

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

import finetune
from finetune.cli import main
from finetune.config.accelerate_file import read_sharding
from finetune.config.compatibility import find_problems, refuse_problems
from finetune.config.export_formats import EXPORT_FORMATS
from finetune.config.methods import ScoreHead
from finetune.config.reader import read_recipe
from finetune.config.schema import Data, DatasetSource
from finetune.data.messages import BadRow
from finetune.data.preferences import parse_scored_pair, parse_steps
from finetune.errors import UserError
from finetune.export.export import export
from finetune.optim import optimizers
from finetune.plan.architecture import read_architecture, set_scores
from finetune.session import Session
from finetune.training.objectives.calibration import describe_probabilities
from tests.conftest import make_tokenizer
from tests.models import sweep
from tests.training.layouts import (
    assert_losses,
    assert_resumed,
    cross,
    cross_resumed,
    train_kinds,
    write_config,
    write_recipe,
)

# with several classes of a row, and of the steps of an answer
METHODS = ("reward", "classify", "several", "steps")
KEYS = {"reward": {"center_rewards_coefficient": 0.01}, "steps": {"step_separator": "\n;"}}
WEIGHTS = (1.0, 0.5, 2.0)
LABELS = ("sums", "words", "rest")
STEPS = 3
ROWS = 15
# name -> ranks, layout, its sizes, keys of the recipe
RUNS = {
    "single": (1, "single", {}, ["per_device_train_batch_size=1"]),
    "packed": (1, "single", {}, ["packing=true"]),
    "ddp": (2, "ddp", {}, ["per_device_train_batch_size=3"]),
    "fsdp2": (2, "full_shard", {}, ["packing=true", "per_device_train_batch_size=2"]),
    "fsdp1": (2, "FULL_SHARD", {}, []),
    "cp": (2, "full_shard", {"cp_size": 2}, ["packing=true"]),
    "pipeline": (2, "full_shard", {}, ["pipeline_parallel_size=2", "packing=true"]),
    "lora": (2, "full_shard", {}, ["use_peft=true", "lora_r=4", "packing=true"]),
    "three": (3, "full_shard", {}, ["packing=true"]),
}
QUICK = {("single", "reward"), ("single", "classify"), ("single", "several"), ("lora", "steps")}
RESUMED = {"fsdp2": ("full_shard", "ddp"), "lora": ("full_shard",)}  # from step 2, in these layouts


def make_rows(method: str) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for n in range(ROWS):
        if method == "reward":
            question = [{"role": "user", "content": f"What is {n} and {n}?"}]
            good = {"role": "assistant", "content": f"It is {2 * n}, " * (1 + n % 3)}
            bad = {"role": "assistant", "content": f"Nobody knows {n}."}
            margin = {"margin": 0.3 * n} if n % 3 else {}
            rows.append({"prompt": question, "chosen": [good], "rejected": [bad], **margin})
        elif method == "steps":
            steps = [f"{n} and {m} is {n + m}." for m in range(1 + n % 4)]
            labels = [m % 3 != n % 3 for m in range(len(steps))]
            rows.append({"prompt": f"Add to {n}.", "completions": steps, "labels": labels})
        elif method == "several":
            several = [name for place, name in enumerate(LABELS) if n >> place & 1]
            label: object = several if n % 3 else n % 2
            if n % 2:
                rows.append({"text": f"{n} and {n} " * (1 + n % 4), "label": label})
            else:
                said = [{"role": "user", "content": f"Tell me {n}"}]
                rows.append({"messages": said, "label": label})
        elif n % 2:
            rows.append({"text": f"{n} and {n} " * (1 + n % 4), "label": LABELS[n % 3]})
        else:
            rows.append({"messages": [{"role": "user", "content": f"Tell me {n}"}], "label": n % 3})
    return rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scores")


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[str, Path]:
    """The base of each method: of one the head is the embedding."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    for method in METHODS:
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=method == "reward",
        )
        for saved in (LlamaForCausalLM(config), tokenizer):
            saved.save_pretrained(folder / f"{method}-model")
    return {method: folder / f"{method}-model" for method in METHODS}


@pytest.fixture(scope="module")
def recipes(folder: Path, models: dict[str, Path]) -> dict[str, Path]:
    written = {}
    for method in METHODS:
        data = folder / f"{method}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in make_rows(method)))
        keys = {
            "method": {"reward": "reward", "steps": "process_reward"}.get(method, "classify"),
            "global_batch_size": 5,
            "max_steps": STEPS,
            "adam_epsilon": 1e-4,
            "export_at_end": True,
            "save_steps": 2,
            "save_total_limit": None,
            "eval_datasets": [{"path": str(data)}],
        }
        keys |= KEYS.get(method, {"labels": list(LABELS), "class_weights": list(WEIGHTS)})
        if method == "several":
            keys["problem_type"] = "multi_label_classification"
        written[method] = write_recipe(folder / f"{method}.yaml", models[method], data, **keys)
    return written


@pytest.fixture(scope="module")
def runs(folder: Path, recipes: dict[str, Path], slow_too: bool) -> Callable[[str, str], Path]:
    wanted = product(RUNS, METHODS) if slow_too else QUICK
    return train_kinds(folder, RUNS, recipes, wanted, RESUMED if slow_too else {})


def read_metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def encode(row: dict[str, object], tokenizer: object) -> list[torch.Tensor]:
    """The ids of a row's documents, as whoever asks for their scores encodes them."""
    if "text" in row:
        return [tokenizer(row["text"] + tokenizer.eos_token, return_tensors="pt").input_ids]  # type: ignore
    ends = [row["chosen"], row["rejected"]] if "prompt" in row else [[]]
    start = row.get("prompt", row.get("messages"))
    texts = [tokenizer.apply_chat_template([*start, *end], tokenize=False) for end in ends]  # type: ignore
    return [
        tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids for text in texts
    ]  # type: ignore


def open_model(method: str, path: Path, **keys: Any) -> Any:
    """Transformers' class with these keys in its config."""
    config = AutoConfig.from_pretrained(path)
    for name, value in keys.items():
        setattr(config, name, value)
    is_of_tokens = method == "steps"
    auto = AutoModelForTokenClassification if is_of_tokens else AutoModelForSequenceClassification
    return auto.from_pretrained(path, config=config, dtype=torch.float32)


def encode_as_trl(row: dict[str, Any], tokenizer: Any) -> tuple[list[int], list[int]]:
    """(ids, labels) of a row in steps, as PRMTrainer.tokenize_row makes them."""
    separator = tokenizer.encode(KEYS["steps"]["step_separator"], add_special_tokens=False)
    ids = tokenizer(row["prompt"]).input_ids  # TRL's BOS, where the tokenizer writes it too
    labels = [-100] * len(ids)
    for step, label in zip(row["completions"], row["labels"], strict=True):
        own = tokenizer(step, add_special_tokens=False).input_ids + separator
        ids += own
        labels += [-100] * (len(own) - 1) + [int(label)]
    return ids, labels


def compute_as_trl(model: Any, tokenizer: Any, rows: list[dict[str, Any]]) -> torch.Tensor:
    """The loss that transformers' class itself computes of the padded rows."""
    encoded = [encode_as_trl(row, tokenizer) for row in rows]
    longest = max(len(ids) for ids, _ in encoded)
    shape = (len(rows), longest)
    inputs = {
        name: torch.zeros(shape, dtype=torch.long) for name in ("input_ids", "attention_mask")
    }
    inputs["labels"] = torch.full(shape, -100)
    for place, (ids, labels) in enumerate(encoded):
        inputs["input_ids"][place, : len(ids)] = torch.tensor(ids)
        inputs["attention_mask"][place, : len(ids)] = 1
        inputs["labels"][place, : len(ids)] = torch.tensor(labels)
    loss: torch.Tensor = model(**inputs).loss
    return loss


def find_true(row: dict[str, object]) -> torch.Tensor:
    """Whether a row has each class, bool[classes]."""
    label = row["label"]
    listed = label if isinstance(label, list) else [label]
    return torch.tensor([name in listed or place in listed for place, name in enumerate(LABELS)])


def train_plainly(run: Path, method: str, model: Path) -> list[tuple[float, float]]:
    """(loss, gradient norm) of every step of a loop over transformers' own class, and peft's, from the head with which the run
    began."""
    from finetune.data.prepare import prepare_data
    from finetune.data.tokenizer import load_tokenizer
    from finetune.models.head_scores import draw_head
    from tests.training.reference import Alone, _cosine, _with_adapters

    recipe = read_recipe(str(run / "recipe.yaml"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    names = recipe.score_names
    keywords: dict[str, Any] = {"pad_token_id": tokenizer.pad_token_id, "num_labels": len(names)}
    if method == "steps":
        keywords |= {"token_classification_bias": False, "classifier_dropout": 0.0}
    own = open_model(method, model, **keywords)
    with torch.no_grad():
        own.score.weight.copy_(draw_head(own, "score.weight", recipe.run.seed, (slice(None),)))
    if recipe.lora.use_peft:
        own = _with_adapters(own, recipe)
    data = prepare_data(recipe, load_tokenizer(recipe.model, recipe.data), Alone())
    rows = make_rows(method)
    trained = [p for p in own.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, weight_decay=0.0, eps=recipe.optimization.adam_epsilon)
    results = []
    size = recipe.method_facts.documents
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = _cosine(
            step, STEPS, recipe.optimization.learning_rate, recipe.optimization.warmup_ratio
        )
        chosen = [int(index) for ids in data.train.rows_of(step) for index in ids]
        numbers = [
            int(data.train.examples.where(index).rpartition(":")[2]) - 1 for index in chosen[::size]
        ]
        losses = []
        if method == "steps":
            losses.append(compute_as_trl(own, tokenizer, [rows[number] for number in numbers]))
            numbers = []
        for row in (rows[number] for number in numbers):
            scores = [own(input_ids=ids).logits[0] for ids in encode(row, tokenizer)]
            if method == "reward":
                losses.append(
                    -F.logsigmoid(scores[0] - scores[1] - row.get("margin", 0.0)).sum()
                    + 0.01 * ((scores[0] + scores[1]) ** 2).sum()
                )
            elif method == "several":
                weights = torch.tensor(WEIGHTS)
                losses.append(
                    F.binary_cross_entropy_with_logits(scores[0], find_true(row).float(), weights)
                )
            else:
                weights = torch.tensor(WEIGHTS)
                label = find_true(row).int().argmax()
                losses.append(F.cross_entropy(scores[0], label, weights, reduction="sum"))
        loss = torch.stack(losses).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, recipe.optimization.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        results.append((loss.item(), norm.item()))
    return results


@cross(RUNS, METHODS, QUICK)
def test_losses_and_norms_are_those_of_transformers_class(
    name: str, kind: str, runs: Callable[[str, str], Path], models: dict[str, Path]
) -> None:
    run = runs(name, kind)
    assert_losses(run, train_plainly(run, kind, models[kind]))


@cross(["single", "fsdp1", "pipeline", "lora"], METHODS, QUICK)
def test_the_export_has_the_scores_of_the_run(
    name: str, kind: str, runs: Callable[[str, str], Path], models: dict[str, Path]
) -> None:
    export = runs(name, kind) / "export"
    tokenizer = AutoTokenizer.from_pretrained(export)
    opened = open_model(kind, export)
    config = json.loads((export / "config.json").read_text())
    of_what = "Token" if kind == "steps" else "Sequence"
    assert config["architectures"] == [f"LlamaFor{of_what}Classification"]
    names = {"reward": ["reward"], "steps": ["wrong", "right"]}.get(kind, list(LABELS))
    assert [opened.config.id2label[i] for i in range(opened.num_labels)] == names
    assert f"AutoModelFor{of_what}Classification" in (export / "README.md").read_text()
    problem = {"classify": "single_label_classification", "several": "multi_label_classification"}
    assert opened.config.problem_type == problem.get(kind)
    texts = ["a b c", "What is 3 and 3, and what else is there?"]
    alone = [opened(**tokenizer(text, return_tensors="pt")).logits[0] for text in texts]
    together = opened(**tokenizer(texts, return_tensors="pt", padding=True)).logits
    if kind == "steps":
        padded = tokenizer(texts, return_tensors="pt", padding=True).attention_mask
        alone, together = list(torch.cat(alone)), together[padded.bool()]
    torch.testing.assert_close(torch.stack(alone), together, rtol=1e-5, atol=1e-6)
    if name == "lora":
        keywords = {"pad_token_id": tokenizer.pad_token_id, "num_labels": opened.num_labels}
        if kind == "steps":
            keywords["token_classification_bias"] = False
            card = (runs(name, kind) / "adapter" / "README.md").read_text()
            assert "config.token_classification_bias = False" in card
        base = open_model(kind, models[kind], **keywords)
        adapted = PeftModel.from_pretrained(base, runs(name, kind) / "adapter")
        of_adapter = adapted(**tokenizer(texts, return_tensors="pt", padding=True)).logits
        if kind == "steps":
            of_adapter = of_adapter[padded.bool()]
        torch.testing.assert_close(of_adapter, together, rtol=1e-5, atol=1e-6)


@cross_resumed(RESUMED, METHODS, quick=())
def test_a_run_resumes(
    name: str, kind: str, layout: str, runs: Callable[[str, str], Path], folder: Path
) -> None:
    assert_resumed(runs(name, kind), folder / layout / name / kind, layout, STEPS)


@cross(["single", "cp", "pipeline", "three"], ["classify", "several"], QUICK)
def test_held_out_metrics_are_those_that_the_export_gives(
    name: str, kind: str, runs: Callable[[str, str], Path]
) -> None:
    run = runs(name, kind)
    (line,) = [line for line in read_metrics(run) if "eval_loss" in line and line["step"] == STEPS]
    tokenizer = AutoTokenizer.from_pretrained(run / "export")
    opened = AutoModelForSequenceClassification.from_pretrained(run / "export", dtype=torch.float32)
    rows = make_rows(kind)
    with torch.no_grad():
        scores = torch.cat(
            [opened(input_ids=encode(row, tokenizer)[0]).logits for row in rows]
        ).double()
    true = torch.stack([find_true(row) for row in rows])
    if kind == "several":
        given = scores > 0
    else:
        given = F.one_hot(scores.argmax(1), len(LABELS)).bool()
    of_classes = {}
    for index, label in enumerate(LABELS):
        hits = (given & true)[:, index].sum()
        of_classes[label] = float(2 * hits / (given[:, index].sum() + true[:, index].sum()))
    accuracy = float((given == true).all(1).double().mean())
    measured = measure_plainly(scores, true, kind == "several", line["eval_temperature"])
    assert {key: line[f"eval_{key}"] for key in measured} == pytest.approx(measured, rel=1e-4)
    card = (run / "export" / "README.md").read_text()
    for key in ("accuracy", "f1_macro", "auc", "ece", "temperature", "ece_with_temperature"):
        assert f" {line[f'eval_{key}']:.4f} |" in card, key
    assert line["eval_accuracy"] == pytest.approx(accuracy, rel=1e-6), name
    assert line["eval_f1_macro"] == pytest.approx(
        sum(of_classes.values()) / len(LABELS), rel=1e-6
    ), name
    assert {label: line[f"eval_f1/{label}"] for label in LABELS} == pytest.approx(
        of_classes, rel=1e-6
    ), name


def measure_plainly(
    scores: torch.Tensor, true: torch.Tensor, has_several: bool, temperature: float
) -> dict[str, float]:
    """AUC pair by pair, calibration bin by bin; the loss has no slope at the temperature."""
    shares = scores.sigmoid() if has_several else scores.softmax(1)
    areas = []
    for values, is_true in zip(shares.T, true.T, strict=True):
        above = values[is_true][:, None] - values[~is_true]
        if above.numel():
            areas.append(float(((above > 0).double() + (above == 0) / 2).mean()))
    log_temperature = torch.tensor(temperature, dtype=torch.float64).log().requires_grad_()
    scaled = scores / log_temperature.exp()
    if has_several:
        loss = F.binary_cross_entropy_with_logits(scaled, true.double())
    else:
        loss = F.cross_entropy(scaled, true.int().argmax(1))
    loss.backward()
    is_within = temperature * 0.99 > 1e-3 and temperature * 1.01 < 1e3
    assert not is_within or abs(log_temperature.grad) < 1e-4
    return {
        "auc": sum(areas) / len(areas),
        "ece": calibrate_plainly(scores, true, has_several),
        "ece_with_temperature": calibrate_plainly(scores / temperature, true, has_several),
    }


def calibrate_plainly(scores: torch.Tensor, true: torch.Tensor, has_several: bool) -> float:
    pairs: list[tuple[float, bool]] = []  # (confidence, whether it is right)
    for row, is_true in zip(scores, true, strict=True):
        if has_several:
            for share, has in zip(row.sigmoid().tolist(), is_true.tolist(), strict=True):
                pairs.append((max(share, 1 - share), (share > 0.5) == has))
        else:
            shares = row.softmax(0)
            pairs.append((float(shares.max()), bool(is_true[shares.argmax()])))
    total = 0.0
    for place in range(15):
        held = [pair for pair in pairs if place / 15 < pair[0] <= (place + 1) / 15]
        total += abs(sum(confidence - right for confidence, right in held))
    return total / len(pairs)


@cross(["single", "cp", "three", "lora"], ["steps"], QUICK)
def test_held_out_steps_are_those_that_the_export_scores(
    name: str, kind: str, runs: Callable[[str, str], Path]
) -> None:
    run = runs(name, kind)
    (line,) = [line for line in read_metrics(run) if "eval_loss" in line and line["step"] == STEPS]
    tokenizer = AutoTokenizer.from_pretrained(run / "export")
    opened = open_model("steps", run / "export")
    most = read_recipe(str(run / "recipe.yaml")).data.max_length  # longer ones are dropped
    rows = [row for row in make_rows("steps") if len(encode_as_trl(row, tokenizer)[0]) <= most]
    assert 3 < len(rows) < ROWS
    with torch.no_grad():
        loss = compute_as_trl(opened, tokenizer, rows)
        right = []
        for row in rows:
            ids, labels = map(torch.tensor, encode_as_trl(row, tokenizer))
            given = opened(input_ids=ids[None]).logits[0].argmax(1)
            right += (given == labels)[labels >= 0].tolist()
    assert line["eval_loss"] == pytest.approx(float(loss), rel=1e-5), name
    assert line["eval_accuracy"] == pytest.approx(sum(right) / len(right)), name


ROWS_REFUSED = {
    '{"prompt": "a", "completions": ["b"], "labels": [1, 0]}': "labels: 2 labels for 1 steps in completions",
    '{"prompt": "a", "completions": ["b"], "labels": ["yes"]}': "labels: a list of true and false is expected, found ['yes']",
    '{"prompt": "a", "completions": "b", "labels": [1]}': "completions: a list of text is expected",
    '{"prompt": "a", "completions": ["b", ""], "labels": [1, 1]}': "completions: a list of text is expected",
    '{"prompt": "a", "completions": ["b"]}': "labels: a list of true and false is expected, found None",
}


@pytest.mark.parametrize("row", ROWS_REFUSED)
def test_a_row_of_steps_that_cannot_be_used_says_why(row: str) -> None:
    with pytest.raises(BadRow) as problem:
        parse_steps(json.loads(row), DatasetSource(path="a.jsonl"), Data())
    assert ROWS_REFUSED[row] in str(problem.value)


@pytest.mark.parametrize("margin", ['"one"', "true", "[1]", "Infinity", "1e39", f"1{400 * '0'}"])
def test_a_margin_is_a_number(margin: str) -> None:
    row = f'{{"prompt": "a", "chosen": "b", "rejected": "c", "margin": {margin}}}'
    with pytest.raises(BadRow, match="margin: a number is expected"):
        parse_scored_pair(json.loads(row), DatasetSource(path="a.jsonl"))


def test_inspect_shows_margins_and_steps(
    recipes: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    said = {}
    for method in ("reward", "steps", "several"):
        assert main(["inspect", "--recipe", str(recipes[method]), "--rows", "6"]) == 0
        said[method] = capsys.readouterr().out
    assert "scored at the marked one as larger by 0.3" in said["reward"]
    assert "scored at the marked ones as right, wrong" in said["steps"]
    assert "scored at the marked one as sums, rest" in said["several"]


@pytest.mark.parametrize("has_several", [False, True])
def test_measures_of_random_scores_are_those_of_scikit_learn(has_several: bool) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    torch.manual_seed(1)
    for spread in (0.3, 2.0, 20.0):
        scores = (torch.randn(200, 4, dtype=torch.float64) * spread).round(decimals=1)
        if has_several:
            true = torch.rand(200, 4) < scores.sigmoid()
        else:
            drawn = torch.multinomial(scores.softmax(1), 1)
            true = torch.zeros(200, 4, dtype=torch.bool).scatter_(1, drawn, True)
        described = describe_probabilities(scores, true, has_several)
        shares = scores.sigmoid() if has_several else scores.softmax(1)
        area = metrics.roc_auc_score(true.numpy(), shares.numpy(), average="macro")
        assert described["auc"] == pytest.approx(area)
        plain = measure_plainly(scores, true, has_several, described["temperature"])
        assert {key: described[key] for key in plain} == pytest.approx(plain)
        assert 0.5 < described["temperature"] < 2  # they were drawn by these scores


def test_held_out_rows_without_any_class_have_no_f1(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """Nothing is predicted of them after training on such rows, and nothing is true."""
    data = tmp_path / "none.jsonl"
    rows = [{"text": f"{n} and", "label": []} for n in range(8)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"method": "classify", "problem_type": "multi_label_classification"}
    keys |= {"labels": list(LABELS), "max_steps": 4, "learning_rate": 0.1, "eval_split_size": 3}
    keys |= {"global_batch_size": 5, "output_dir": str(tmp_path / "run")}
    finetune.train(write_recipe(tmp_path / "none.yaml", models["several"], data, **keys))
    last = read_metrics(tmp_path / "run")[-1]
    assert last["eval_accuracy"] == 1 and "eval_f1_macro" not in last


@pytest.mark.parametrize("family", ["llama", "mixtral", "jamba", "gpt2"])
def test_the_plan_counts_the_class_that_is_trained(family: str) -> None:
    """By the tables of a family, and by transformers' own class."""
    config = sweep.tiny_config(family)
    config.num_labels, config.tie_word_embeddings = 3, False
    own = AutoModelForSequenceClassification.from_config(config)
    planned = read_architecture(set_scores(config.to_dict(), LABELS), family)
    named = {name: tuple(parameter.shape) for name, parameter in own.named_parameters()}
    assert {tensor.name: tensor.shape for tensor in planned.tensors()} == named
    assert planned.head_name == "score.weight"


REFUSED = {
    "method=reward labels=[a,b]": "labels has no effect with method: reward",
    "method=classify": "labels: method: classify learns which of several classes",
    "method=classify labels=[a,a]": "labels: method: classify learns which of several classes",
    "method=reward step_separator=;": "step_separator has no effect with method: reward",
    "method=process_reward overlength=truncate": "overlength: truncate cannot be combined with method: process_reward",
    "method=classify labels=[a,b] class_weights=[1]": "class_weights: 1 numbers for 2 labels",
    "method=reward class_weights=[1]": "class_weights has no effect with method: reward",
    "method=reward problem_type=multi_label_classification": "problem_type has no effect with method: reward",
    f"method=classify problem_type=multi_label_classification labels=[{','.join(f'n{n}' for n in range(32))}]": "labels: 32 are named",
    "method=classify labels=[a,b] overlength=truncate": "overlength: truncate cannot be combined with method: classify",
    "method=reward exact_match_samples=4": "exact_match_samples cannot be combined with method: reward",
    "method=reward turns=split": "turns cannot be combined with method: reward",
    "method=reward export_formats=[safetensors,gguf]": "export_formats cannot be combined with method: reward",
    "method=reward label_smoothing=0.1": "label_smoothing has no effect with method: reward",
    "method=dpo center_rewards_coefficient=0.1": "center_rewards_coefficient has no effect with method: dpo",
}


@pytest.mark.parametrize("keys", REFUSED)
def test_what_does_not_go_with_scores_is_refused(keys: str, recipes: dict[str, Path]) -> None:
    overrides = ["center_rewards_coefficient=null", *keys.split()]
    with pytest.raises(UserError) as error:
        recipe = read_recipe(str(recipes["reward"]), overrides)
        refuse_problems(find_problems(recipe))
    assert REFUSED[keys] in str(error.value), str(error.value)


def test_tensor_parallelism_is_refused(recipes: dict[str, Path], folder: Path) -> None:
    layout = read_sharding(
        str(write_config(folder, "full_shard", sizes={"tp_size": 2})), None, {"WORLD_SIZE": "2"}
    )
    (problem,) = find_problems(read_recipe(str(recipes["reward"])), layout, ranks=2)
    assert "tp_size cannot be combined with method: reward" in str(problem)


def test_a_model_that_transformers_cannot_make_score_is_refused(tmp_path: Path) -> None:
    from transformers import AutoConfig

    from finetune.config.pretrained import set_head

    with pytest.raises(UserError, match="no class for sequence classification of this type"):
        set_head(AutoConfig.for_model("mamba"), ScoreHead(("reward",)), 0)


@cross(["single", "lora"], METHODS, QUICK)
def test_chat_scores_what_is_said(
    name: str, kind: str, runs: Callable[[str, str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    export = runs(name, kind) / "export"
    assert main(["chat", str(export), "--prompt", "What is 3 and 3?"]) == 0
    said = capsys.readouterr().out.split()
    opened = open_model(kind, export)
    tokenizer = AutoTokenizer.from_pretrained(export)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 3 and 3?"}], tokenize=False
    )
    with torch.no_grad():
        scores = opened(**tokenizer(text, add_special_tokens=False, return_tensors="pt")).logits[0]
    if kind == "steps":  # rows without turns: no template is used, and no EOS follows a step
        text = "What is 3 and 3?"
        with torch.no_grad():
            scores = opened(**tokenizer(text, return_tensors="pt")).logits[0, -1]
    if kind == "several":
        scores = scores.sigmoid()
    else:
        scores = scores.softmax(0) if len(scores) > 1 else scores
    shown = {said[i]: float(said[i + 1]) for i in range(0, len(said), 2)}
    assert shown == pytest.approx(
        {opened.config.id2label[i]: float(score) for i, score in enumerate(scores)}, abs=1e-4
    )


@pytest.mark.parametrize("format_name", sorted(EXPORT_FORMATS.keys() - {"safetensors"}))
def test_other_formats_are_refused_by_the_command_too(
    format_name: str, runs: Callable[[str, str], Path], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="has no head of scores; export safetensors"):
        export(
            runs("single", "reward"),
            tmp_path / "out",
            formats=["safetensors", format_name],
            log=lambda _: None,
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", ["reward", "classify", "steps"])
def test_muon_updates_the_head_of_scores_as_torchs_adamw_does(
    method: str,
    recipes: dict[str, Path],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A checkpoint of an earlier version, to which it was a matrix of a layer, is refused."""
    config = read_sharding(str(write_config(folder, "single")), None, {})
    keys = ["optim=muon", "max_grad_norm=null", "adam_epsilon=1e-4", f"output_dir={tmp_path}"]
    recipe = read_recipe(str(recipes[method]), keys)
    with Session(recipe, config) as session:
        head = session.model.score.weight
        session.forward_backward(next(iter(session.batches())))
        expected = head.detach().clone().requires_grad_()
        assert head.grad is not None
        expected.grad = head.grad.clone()
        torch.optim.AdamW([expected], lr=0.01, eps=1e-4, weight_decay=0.0).step()
        session.optim_step(learning_rate=0.01)
        torch.testing.assert_close(head, expected)
    with monkeypatch.context() as earlier:
        earlier.setattr(optimizers, "is_layers_matrix", lambda name, shape: "embed" not in name)
        with Session(recipe, config) as session:
            session.forward_backward(next(iter(session.batches())))
            session.optim_step()
            session.save()
    with (
        Session(recipe, config) as session,
        pytest.raises(UserError, match=r"with a different optimizer .* lacks state\.score\.weight"),
    ):
        session.load()
