"""Reward models and classifiers: losses and norms are those of transformers' own classes over one document at a time, in every
layout; what is exported opens there with the same scores."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from finetune.cli import main
from finetune.config.accelerate_file import read_sharding
from finetune.config.compatibility import find_problems, refuse_problems
from finetune.config.export_formats import EXPORT_FORMATS
from finetune.config.reader import read_recipe
from finetune.errors import UserError
from finetune.export.export import export
from finetune.plan.architecture import read_architecture, set_scores
from tests.conftest import make_tokenizer
from tests.models import sweep
from tests.training.layouts import assert_losses, steps_of, train_all, write_config, write_recipe

METHODS = ("reward", "classify")
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
RESUMED = {
    "as before": "full_shard",
    "otherwise": "ddp",
}  # from step 2 of fsdp2, under these layouts


def make_rows(method: str) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for n in range(ROWS):
        if method == "reward":
            question = [{"role": "user", "content": f"What is {n} and {n}?"}]
            good = {"role": "assistant", "content": f"It is {2 * n}, " * (1 + n % 3)}
            bad = {"role": "assistant", "content": f"Nobody knows {n}."}
            rows.append({"prompt": question, "chosen": [good], "rejected": [bad]})
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
            "method": method,
            "global_batch_size": 5,
            "max_steps": STEPS,
            "adam_epsilon": 1e-4,
            "export_at_end": True,
            "save_steps": 2,
            "save_total_limit": None,
            "eval_datasets": [{"path": str(data)}],
        }
        keys |= (
            {"labels": list(LABELS)}
            if method == "classify"
            else {"center_rewards_coefficient": 0.01}
        )
        written[method] = write_recipe(folder / f"{method}.yaml", models[method], data, **keys)
    return written


@pytest.fixture(scope="module")
def runs(folder: Path, recipes: dict[str, Path]) -> Callable[[str, str], Path]:
    for ranks in sorted({ranks for ranks, *_ in RUNS.values()}):
        train_all(
            folder,
            [
                (
                    recipe,
                    write_config(folder, layout, sizes=sizes or None),
                    [*keys, f"output_dir={folder / name / method}"],
                )
                for name, (count, layout, sizes, keys) in RUNS.items()
                for method, recipe in recipes.items()
                if count == ranks
            ],
            ranks=ranks,
        )
    resumed = []
    keys = RUNS["fsdp2"][-1]
    for name, layout in RESUMED.items():
        for method, recipe in recipes.items():
            start = folder / "fsdp2" / method / "checkpoints" / "step-00000002"
            overrides = [
                *keys,
                f"output_dir={folder / name / method}",
                f"resume_from_checkpoint={start}",
            ]
            resumed.append((recipe, write_config(folder, layout), overrides))
    train_all(folder, resumed, ranks=2)
    return lambda name, method: folder / name / method


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
    own = AutoModelForSequenceClassification.from_pretrained(
        model, num_labels=len(names), dtype=torch.float32, pad_token_id=tokenizer.pad_token_id
    )
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
        for row in (rows[number] for number in numbers):
            scores = [own(input_ids=ids).logits[0] for ids in encode(row, tokenizer)]
            if method == "reward":
                losses.append(
                    -F.logsigmoid(scores[0] - scores[1]).sum()
                    + 0.01 * ((scores[0] + scores[1]) ** 2).sum()
                )
            else:
                label = row["label"]
                losses.append(
                    F.cross_entropy(
                        scores[0],
                        torch.tensor(LABELS.index(label) if isinstance(label, str) else label),
                    )
                )
        loss = torch.stack(losses).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, recipe.optimization.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        results.append((loss.item(), norm.item()))
    return results


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", RUNS)
def test_losses_and_norms_are_those_of_transformers_class(
    name: str, method: str, runs: Callable[[str, str], Path], models: dict[str, Path]
) -> None:
    run = runs(name, method)
    assert_losses(run, train_plainly(run, method, models[method]))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["single", "fsdp1", "pipeline", "lora"])
def test_the_export_has_the_scores_of_the_run(
    name: str, method: str, runs: Callable[[str, str], Path], models: dict[str, Path]
) -> None:
    export = runs(name, method) / "export"
    tokenizer = AutoTokenizer.from_pretrained(export)
    opened = AutoModelForSequenceClassification.from_pretrained(export, dtype=torch.float32)
    config = json.loads((export / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert [opened.config.id2label[i] for i in range(opened.num_labels)] == list(
        LABELS if method == "classify" else ["reward"]
    )
    texts = ["a b c", "What is 3 and 3, and what else is there?"]
    alone = [opened(**tokenizer(text, return_tensors="pt")).logits[0] for text in texts]
    together = opened(**tokenizer(texts, return_tensors="pt", padding=True)).logits
    torch.testing.assert_close(torch.stack(alone), together, rtol=1e-5, atol=1e-6)
    if name == "lora":
        base = AutoModelForSequenceClassification.from_pretrained(
            models[method],
            num_labels=opened.num_labels,
            dtype=torch.float32,
            pad_token_id=tokenizer.pad_token_id,
        )
        adapted = PeftModel.from_pretrained(base, runs(name, method) / "adapter")
        of_adapter = adapted(**tokenizer(texts, return_tensors="pt", padding=True)).logits
        torch.testing.assert_close(of_adapter, together, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_a_run_resumes_exactly(method: str, runs: Callable[[str, str], Path]) -> None:
    expected = steps_of(runs("fsdp2", method))[2:]
    for name, rel in (("as before", 0.0), ("otherwise", 1e-5)):
        lines = steps_of(runs(name, method))
        for line, other in zip(lines, expected, strict=True):
            assert line["loss"] == pytest.approx(other["loss"], rel=rel, abs=0.0), name
            assert line["grad_norm"] == pytest.approx(other["grad_norm"], rel=rel, abs=0.0), name
    one, other = (
        load_file(runs(name, method) / "export" / "model.safetensors")
        for name in ("fsdp2", "as before")
    )
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_held_out_metrics_are_those_that_the_export_gives(runs: Callable[[str, str], Path]) -> None:
    for name in ("single", "cp", "three"):
        run = runs(name, "classify")
        (line,) = [
            line for line in read_metrics(run) if "eval_loss" in line and line["step"] == STEPS
        ]
        tokenizer = AutoTokenizer.from_pretrained(run / "export")
        opened = AutoModelForSequenceClassification.from_pretrained(
            run / "export", dtype=torch.float32
        )
        given, true = [], []
        for row in make_rows("classify"):
            (ids,) = encode(row, tokenizer)
            given.append(int(opened(input_ids=ids).logits[0].argmax()))
            true.append(
                LABELS.index(row["label"]) if isinstance(row["label"], str) else row["label"]
            )
        of_classes = {}
        for index, label in enumerate(LABELS):
            hits = sum(g == t == index for g, t in zip(given, true, strict=True))
            of_classes[label] = 2 * hits / (given.count(index) + true.count(index))
        accuracy = sum(g == t for g, t in zip(given, true, strict=True)) / len(true)
        assert line["eval_accuracy"] == pytest.approx(accuracy, rel=1e-6), name
        assert line["eval_f1_macro"] == pytest.approx(
            sum(of_classes.values()) / len(LABELS), rel=1e-6
        ), name
        assert {label: line[f"eval_f1/{label}"] for label in LABELS} == pytest.approx(
            of_classes, rel=1e-6
        ), name


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
    "method=classify labels=[a,b] overlength=truncate": "overlength cannot be combined with method: classify",
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
        set_head(AutoConfig.for_model("mamba"), ("reward",), 0)


def test_chat_scores_what_is_said(
    runs: Callable[[str, str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for method in METHODS:
        export = runs("single", method) / "export"
        assert main(["chat", str(export), "--prompt", "What is 3 and 3?"]) == 0
        said = capsys.readouterr().out.split()
        opened = AutoModelForSequenceClassification.from_pretrained(export, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(export)
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": "What is 3 and 3?"}], tokenize=False
        )
        with torch.no_grad():
            scores = opened(
                **tokenizer(text, add_special_tokens=False, return_tensors="pt")
            ).logits[0]
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
