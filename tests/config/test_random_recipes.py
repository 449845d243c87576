"""Given random recipes, layouts and tiny models, when they are judged, then plan and run give one answer, and what passes starts."""

import json
import random
import typing
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from finetune.config.compatibility import find_problems
from finetune.config.facts import adopt_quantization, with_recipe_keys
from finetune.config.layout import Fp8, Sharding
from finetune.config.methods import METHODS
from finetune.config.pretrained import load_config, read_facts
from finetune.config.reader import read_recipe, write_recipe
from finetune.config.schema import Recipe, recipe_keys
from finetune.distributed.join import describe_machine
from finetune.errors import UserError
from finetune.plan.plan import make_plan
from tests.conftest import make_model
from tests.training.layouts import train_all, write_config

SIZES = {
    "num_hidden_layers": [1, 2],
    "hidden_size": [48, 96],
    "intermediate_size": [48, 96],
    "vocab_size": [512, 515],
}
HEADS = [(4, 4), (4, 2), (6, 3), (8, 8)]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 8},
    "phi3": {"pad_token_id": 0},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "head_dim": 8,
    },
}
# Keys that no rule reads, need the network, or would compile for minutes.
LEFT_OUT = {
    "report_to",
    "trust_remote_code",
    "resume_from_checkpoint",
    "allow_changed_recipe",
    "export_dtype",
    "model_revision",
}
NUMBERS: dict[str, list[Any]] = {
    "neftune_noise_alpha": [5.0],
    "label_smoothing": [0.1, 0.6],
    "token_loss": ["dft", "eaft"],
    "max_grad_norm": [None],
    "per_device_train_batch_size": [2],
    "gradient_accumulation_steps": [2],
    "expert_parallel_size": [2, 3, 4],
    "router_aux_loss_coef": [0.01],
    "trainable_modules": [["lm_head"]],
    "frozen_modules": [["embed_tokens"]],
    "activation_checkpointing_every": [2],
    "attention_dropout": [0.1],
    "eval_split_size": [2],
    "exact_match_samples": [1],
    "warmup_steps": [1, 9],
    "min_lr_ratio": [0.1],
    "rpo_alpha": [1.0],
    "distill_alpha": [0.5],
    "offload_dir": ["FOLDER"],
    "dtype": ["bfloat16"],
    "profile_steps": [[1, 1], [5, 2]],
    "epsilon_high": [0.3, 5.0],
}
ROWS = {
    "answers": {"prompt": "Say {}", "completion": "It is {}"},
    "pairs": {"prompt": "Say {}", "chosen": "It is {}", "rejected": "No {}"},
    "prompts": {"prompt": "Say {}", "completion": "It is {}"},
    "ratings": {"prompt": "Say {}", "completion": "It is {}", "label": True},
}


@dataclass(frozen=True)
class Place:
    """Where data, a trained model and scratch files are."""

    folder: Path
    tokenizer: Path

    @classmethod
    def make(cls, folder: Path, tokenizer: Path) -> "Place":
        for kind, row in ROWS.items():
            rows = [
                {k: v.format(n) if isinstance(v, str) else n % 2 == 0 for k, v in row.items()}
                for n in range(8)
            ]
            (folder / f"{kind}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
        make_model(folder / "model", vocab_size=512, hidden_size=32, num_attention_heads=4)
        for file in tokenizer.glob("tokenizer*"):  # a teacher's tokenizer is that of the run
            (folder / "model" / file.name).write_bytes(file.read_bytes())
        return cls(folder, tokenizer)

    def base(self, draw: random.Random) -> dict[str, Any]:
        """The keys that every recipe has: a model, adapters on it or not, data."""
        keys: dict[str, Any] = {
            "tokenizer_name_or_path": str(self.tokenizer),
            "max_length": 32,
            "max_steps": 1,
            "packing": False,
        }
        if draw.random() < 0.3:
            return keys | {"model_name_or_path": str(self.folder / "model"), "use_peft": True}
        family = draw.choice([*FAMILIES])
        heads, key_values = draw.choice(HEADS)
        config = {
            "model_type": family,
            **{key: draw.choice(values) for key, values in SIZES.items()},
            **FAMILIES[family],
        }
        config |= {
            "num_attention_heads": heads,
            "num_key_value_heads": key_values,
            "max_position_embeddings": 64,
        }
        return keys | {"model_config": config}

    def draw_recipe(self, draw: random.Random) -> Recipe:
        """A recipe whose keys may stand together by themselves: others are refused when they are read, by all alike."""
        while True:
            keys = self.base(draw) | {
                key: draw.choice(values)
                for key, values in draw.sample(CANDIDATES, draw.randint(0, 5))
            }
            rows = METHODS[keys.get("method", "sft")].rows
            keys["datasets"] = [{"path": str(self.folder / f"{rows}.jsonl")}]
            if METHODS[keys.get("method", "sft")].masks:
                keys["mask_token"] = 0
            if METHODS[keys.get("method", "sft")].needs_teacher:
                keys["teacher_model_name_or_path"] = str(self.folder / "model")
            if METHODS[keys.get("method", "sft")].samples:
                keys |= {"rewards": ["length"], "max_completion_length": 8, "num_generations": 2}
            if keys.get("optim_offload") == "nvme":
                keys["offload_dir"] = str(self.folder / "state")
            try:
                return read_recipe(
                    None, [f"{key}={json.dumps(value)}" for key, value in keys.items()]
                )
            except UserError:
                continue


def _list_candidates() -> Iterator[tuple[str, list[Any]]]:
    """Each key with a choice of words, or true and false; and the numbers above."""
    for name, key in recipe_keys().items():
        values = [value for value in _words(key.annotation) if value != key.default]
        if values and name not in LEFT_OUT | {"use_peft"}:
            yield name, values
    yield from NUMBERS.items()


def _words(annotation: Any) -> list[Any]:
    arguments = typing.get_args(annotation)
    if annotation is bool:
        return [True, False]
    if typing.get_origin(annotation) is typing.Literal:
        return list(arguments)
    return [
        word
        for each in arguments[: 1 if hasattr(annotation, "__metadata__") else None]
        for word in _words(each)
    ]


CANDIDATES = [*_list_candidates()]


def draw_layout(draw: random.Random) -> tuple[Sharding, int]:
    """A layout, and the ranks that are launched under it."""
    layout, ranks = (
        draw.choice(["fsdp2", "fsdp2", "fsdp2", "fsdp1", "ddp", "single"]),
        draw.choice([1, 2, 4, 8]),
    )
    sharding = Sharding(
        layout=layout,  # type: ignore[arg-type]
        mixed_precision=draw.choice(["no", "bf16", "bf16", "fp16"]),
        activation_checkpointing=draw.random() < 0.6,
        cpu_offload=layout.startswith("fsdp") and draw.random() < 0.2,
        strategy=draw.choice(["FULL_SHARD", "SHARD_GRAD_OP"]),
        source="layout.yaml",
    )
    if draw.random() < 0.1:
        sharding = replace(sharding, mixed_precision="bf16", fp8=Fp8())
    if layout == "fsdp2" and draw.random() < 0.5:
        tensors, sequences = draw.choice([1, 2, 4]), draw.choice([1, 1, 2])
        shards = max(1, ranks // (tensors * sequences))
        sharding = replace(
            sharding,
            tensor_parallel_size=tensors,
            sequence_parallel_size=sequences,
            shard_size=shards,
        )
    return sharding, 1 if layout == "single" else ranks


def judge_as_a_run(recipe: Recipe, sharding: Sharding, ranks: int, **machine: Any) -> set[str]:
    """What a run, and its dry run, refuse by the config of transformers."""
    facts = read_facts(load_config(recipe.model), recipe.model.model_name_or_path)
    teacher = None
    if recipe.teacher is not None:
        teacher = read_facts(load_config(recipe.teacher), recipe.teacher.model_name_or_path)
    assert adopt_quantization(recipe, facts) == recipe
    layout = with_recipe_keys(sharding, recipe)
    found = find_problems(recipe, layout, facts, ranks, teacher=teacher, **machine)
    return {str(problem) for problem in found if not problem.is_note}


def judge_as_a_plan(recipe: Recipe, sharding: Sharding, ranks: int) -> set[str]:
    try:
        make_plan(recipe, sharding, ranks)
    except UserError as error:
        return set(str(error).splitlines())
    return set()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, shared: Path) -> Place:
    return Place.make(tmp_path_factory.mktemp("random"), shared / "models" / "stories260k")


@pytest.mark.parametrize("count", [100, pytest.param(5000, marks=pytest.mark.slow)])
def test_plan_and_run_give_the_same_answer(count: int, place: Place) -> None:
    draw, passed = random.Random(count), 0
    for _ in range(count):
        recipe, (sharding, ranks) = place.draw_recipe(draw), draw_layout(draw)
        planned, run = (
            judge_as_a_plan(recipe, sharding, ranks),
            judge_as_a_run(recipe, sharding, ranks),
        )
        assert planned == run, (recipe.places, recipe, sharding, ranks)
        passed += not planned
    assert count / 10 < passed < count * 9 / 10, "the drawn recipes show both answers"


@pytest.mark.parametrize("count", [5, pytest.param(200, marks=pytest.mark.slow)])
def test_what_no_rule_refuses_starts(count: int, place: Place, tmp_path: Path) -> None:
    draw, config = random.Random(count), write_config(tmp_path, "single")
    single = Sharding(layout="single", use_cpu=True)
    machine, runs = describe_machine(single), []
    while len(runs) < count:
        recipe = place.draw_recipe(draw)
        compiles = (
            recipe.model.torch_compile or recipe.model.attn_implementation == "flex_attention"
        )  # for minutes
        if compiles or judge_as_a_run(recipe, single, 1, machine=machine):
            continue
        number = len(runs)
        path = tmp_path / f"{number}.yaml"
        write_recipe(recipe, path)
        runs.append(
            (
                path,
                config,
                [
                    f"output_dir={tmp_path / str(number)}",
                    "export_at_end=false",
                    "dataset_num_proc=1",
                ],
            )
        )
    train_all(tmp_path, runs, ranks=1, timeout=60 + 20 * count)
    assert [(tmp_path / str(number) / "metrics.jsonl").is_file() for number in range(count)] == [
        True
    ] * count
