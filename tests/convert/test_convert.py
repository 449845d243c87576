"""`finetune convert` on files as each tool's own documentation shows them, and the tables behind it."""

import contextlib
import csv
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune.cli import main
from finetune.config.accelerate_file import read_sharding
from finetune.config.keys import keys_of
from finetune.config.reader import read_recipe
from finetune.config.schema import DatasetSource, recipe_keys
from finetune.convert import counterparts
from finetune.convert.automodel import HEAD_IN_4_BITS
from finetune.convert.base_model import BOS_BY_NAME, SPECIAL_FIRST
from finetune.convert.by_tool import SAVED_BY_LAUNCH
from finetune.convert.by_value import START_OF_ROWS, START_OF_SPECIAL, STARTS_OF_NEW_ROWS
from finetune.convert.chat_templates import TEMPLATES
from finetune.convert.conversion import EXIT_TO_DO, REDUCED_IN_16_BITS, convert_file, read_back
from finetune.convert.counterparts import (
    DATA_SET_KEYS,
    GRPO,
    KEYS,
    TOOL_NAMES,
    USUAL,
    Tool,
    list_counterparts,
)
from finetune.convert.factory_v1 import V1_BREAK
from finetune.convert.foreign_values import WrongValue
from finetune.convert.image_models import UNKNOWN_IMAGES
from finetune.convert.model_names import guess_family
from finetune.convert.numbers import (
    ENDS_OF_TEXTS,
    JOINED_BREAKS,
    LABEL_BEHIND_CUT,
    OF_TEXTS,
    UNTRAINED_BY_CUT,
)
from finetune.convert.objectives import COMPLETION_ALONE, COMPLETIONS_BREAK
from finetune.convert.runnable import find_facts
from finetune.convert.shared import MICRO_BATCHES_ALIKE
from finetune.convert.torchtune import DIVIDED_BY_TOKENS
from finetune.convert.value_conversion import convert_value
from finetune.data.tokenizer import TEMPLATES as NAMED
from finetune.errors import UserError
from tests.conftest import slow_but
from tests.ranks import run_command

Convert = Callable[[str], tuple[dict[str, object], str, Path]]

AXOLOTL = """
base_model: NousResearch/Meta-Llama-3.1-8B
datasets:
  - path: tatsu-lab/alpaca
    type: alpaca
  - path: org/chats
    type: chat_template
    field_messages: conversation
    split: train[:10%]
val_set_size: 0.05
sequence_len: 4096
sample_packing: true
train_on_inputs: false
adapter: lora
lora_target_linear: true
lora_r: 32
micro_batch_size: 2
num_epochs: 3
learning_rate: 2e-5
optimizer: adamw_torch_fused
lr_scheduler: cosine
bf16: auto
deepspeed: deepspeed_configs/zero1.json
load_in_8bit: false
neftune_noise_alpha: 5
wandb_project: fun
"""
LLAMA_FACTORY = """
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
stage: sft
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: questions
template: llama3
cutoff_len: 2048
train_on_prompt: true
eval_strategy: epoch
learning_rate: 1.0e-4
"""
TORCHTUNE = """
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  max_seq_len: 4096
dataset:
  _component_: torchtune.datasets.instruct_dataset
  source: org/pairs
  packed: true
model:
  _component_: torchtune.models.llama3_1.lora_llama3_1_8b
  lora_attn_modules: [q_proj, output_proj]
  lora_rank: 8
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: org/Llama-3.1-8B
optimizer:
  _component_: torch.optim.AdamW
  lr: 2e-5
lr_scheduler:
  num_warmup_steps: 100
epochs: 1
batch_size: 4
clip_grad_norm: null
fsdp_cpu_offload: true
dtype: bf16
"""
AUTOMODEL = """
recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler: {global_batch_size: 8, local_batch_size: 1, max_steps: 5}
model: {_target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained, pretrained_model_name_or_path: org/model}
peft: {_target_: nemo_automodel.components._peft.lora.PeftConfig, match_all_linear: true, dim: 8, alpha: 16}
dataset: {_target_: nemo_automodel.components.datasets.llm.squad.make_squad_dataset, dataset_name: org/squad, split: train}
optimizer: {_target_: torch.optim.AdamW, lr: 1.0e-4}
"""
TRL = """
model_name_or_path: Qwen/Qwen3-0.6B
dataset_name: trl-lib/Capybara
dataset_test_split: test
max_seq_length: 1024
packing: true
use_peft: true
lora_target_modules: [q_proj, v_proj]
eval_strategy: steps
eval_steps: 100
bf16: true
report_to: [wandb]
push_to_hub: true
"""


@pytest.fixture
def converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Convert:
    """Runs the command on a text; returns our recipe as a mapping, what was said on stderr, and the file."""

    def convert(text: str) -> tuple[dict[str, object], str, Path]:
        source, output = tmp_path / "theirs.yaml", tmp_path / "ours.yaml"
        source.write_text(text)
        capsys.readouterr()
        code = main(["convert", str(source), "--output", str(output), "--overwrite"])
        said = capsys.readouterr().err
        assert code in (0, EXIT_TO_DO), said
        return yaml.safe_load(output.read_text()), said, output

    return convert


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended, and what it has said."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run_convert(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Ended]:
    """Runs `finetune convert ARGUMENTS` in the test's folder, in this process."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Ended:
        capsys.readouterr()
        code = main(["convert", *arguments])
        said = capsys.readouterr()
        return Ended(code, said.out, said.err)

    return run


def test_a_file_is_replaced_only_where_that_is_asked_for(
    tmp_path: Path, run_convert: Callable[..., Ended]
) -> None:
    source, output = tmp_path / "theirs.yaml", tmp_path / "ours.yaml"
    source.write_text(TRL)
    output.write_text("what took an afternoon\n")
    command = [str(source), "--output", str(output)]
    refused = run_convert(*command)
    assert (refused.returncode, refused.stderr) == (
        2,
        f"{output}: exists; name another file, or replace it with --overwrite\n",
    )
    assert output.read_text() == "what took an afternoon\n"
    assert run_convert(*command, "--overwrite").returncode == 0
    assert yaml.safe_load(output.read_text())["max_length"] == 1024


def test_axolotl(converted: Convert) -> None:
    ours, said, path = converted(AXOLOTL)
    assert ours["datasets"] == [
        {"path": "tatsu-lab/alpaca", "type": "alpaca", "answers_apart": True},
        {"path": "org/chats", "split": "train[:10%]", "messages_column": "conversation"},
    ]
    expected = {
        "model_name_or_path": "NousResearch/Meta-Llama-3.1-8B",
        "eval_split_size": 0.05,
        "max_length": 4096,
        "assistant_only_loss": True,
        "use_peft": True,
        "lora_target_modules": "all-linear",
        "per_device_train_batch_size": 2,
        "accelerate_config": "fsdp_shard_grad_op",
        "report_to": "wandb",
    }
    assert {key: ours[key] for key in expected} == expected
    assert ours["neftune_noise_alpha"] == 5
    assert "neftune_noise_alpha: 5   (bounded by each document's own tokens" in said
    assert "load_in_8bit" not in said  # it is off
    assert read_recipe(str(path)).optimization.learning_rate == 2e-5


def test_axolotl_columns_named_in_the_type(converted: Convert) -> None:
    kind = "{field_instruction: question, field_output: answer, field_system: persona}"
    ours, said, path = converted(AXOLOTL.replace("type: alpaca", f"type: {kind}"))
    (source, _) = read_recipe(str(path)).data.datasets
    assert ours["datasets"][0] == {  # type: ignore[index]
        "path": "tatsu-lab/alpaca",
        "prompt_column": "question",
        "completion_column": "answer",
        "answers_apart": True,
    }
    assert (source.prompt_column, source.completion_column) == ("question", "answer")
    assert (
        'datasets[0].type.field_system: "persona"   (only a prompt' in said
        and "field_output" not in said
    )


QLORA = {
    "Axolotl": AXOLOTL.replace("adapter: lora", "adapter: qlora\nload_in_4bit: true"),
    "Axolotl, by the adapter alone": AXOLOTL.replace("adapter: lora", "adapter: qlora"),
    "Axolotl, its own settings": AXOLOTL.replace("adapter: lora", "adapter: qlora")
    + "bnb_config_kwargs: {bnb_4bit_quant_type: fp4, bnb_4bit_use_double_quant: false}\n",
    "LLaMA-Factory": LLAMA_FACTORY + "quantization_bit: 4\nquantization_method: bnb\n",
    "LLaMA-Factory, LoRA by default": LLAMA_FACTORY.replace(
        "finetuning_type: lora", "quantization_bit: 4"
    ),
    "LLaMA-Factory, its own settings": LLAMA_FACTORY
    + "quantization_bit: 4\nquantization_type: fp4\ndouble_quantization: false\n",
    "TRL": TRL + "load_in_4bit: true\nbnb_4bit_quant_storage: bfloat16\n",
    "TRL, its own settings": TRL
    + "load_in_4bit: true\nuse_bnb_nested_quant: true\nbnb_4bit_quant_type: fp4\n",
    "torchtune": TORCHTUNE.replace("lora_llama3_1_8b", "qlora_llama3_1_8b"),
    "torchtune, by the key": TORCHTUNE.replace(
        "lora_rank: 8", "lora_rank: 8\n  quantize_base: true"
    ),
}
# What each tool gives bitsandbytes where the file says nothing: NF4, double-quantized but in TRL.
PLAIN, NESTED = ("nf4", False), ("nf4", True)
SETTINGS = {
    "Axolotl": NESTED, "Axolotl, by the adapter alone": NESTED, "Axolotl, its own settings": ("fp4", False),
    "LLaMA-Factory": NESTED, "LLaMA-Factory, LoRA by default": NESTED, "LLaMA-Factory, its own settings": ("fp4", False),
    "TRL": PLAIN, "TRL, its own settings": ("fp4", True),
    "torchtune": NESTED, "torchtune, by the key": NESTED,
}  # fmt: skip


@pytest.mark.parametrize("tool", QLORA)
def test_a_base_in_four_bits_is_one_here_with_the_tools_settings(
    converted: Convert, tool: str
) -> None:
    _, said, path = converted(QLORA[tool])
    recipe = read_recipe(str(path))
    assert recipe.lora.use_peft and recipe.quantization.bits == 4
    settings = (
        recipe.quantization.bnb_4bit_quant_type,
        recipe.quantization.bnb_4bit_use_double_quant,
    )
    assert settings == SETTINGS[tool]
    notes = (
        "NF4 by torchao there",
        "the exported model is merged onto the dequantized base there",
        "over a quantized base adapters and their moments",
        "before it is quantized there",
    )
    worth_a_look = [line for line in said.splitlines() if any(note in line for note in notes)]
    assert len(worth_a_look) == {"torchtune": 2, "TRL": 1, "Axolotl": 1}.get(
        tool.partition(",")[0], 0
    )
    rest = "".join(line for line in said.splitlines() if line not in worth_a_look)
    assert (
        "4bit" not in rest and "quant" not in rest and "qlora" not in rest
    )  # nothing of it differs


def test_a_base_in_eight_bits_is_one_here(converted: Convert) -> None:
    for theirs in (
        AXOLOTL.replace("load_in_8bit: false", "load_in_8bit: true"),
        LLAMA_FACTORY + "quantization_bit: 8\n",
        TRL + "load_in_8bit: true\nbnb_4bit_quant_type: nf4\n",
    ):
        ours, _, path = converted(theirs)
        assert "rounded to 8 bits there only" in path.read_text()
        assert read_recipe(str(path)).quantization.bits == 8 and not [
            key for key in ours if "4bit" in key
        ]


def test_automodels_quantization(converted: Convert) -> None:
    given = "quantization: {load_in_4bit: true, load_in_8bit: false, bnb_4bit_compute_dtype: bfloat16}\n"
    _, said, path = converted(AUTOMODEL + given)
    quantization = read_recipe(str(path)).quantization
    assert (quantization.bits, quantization.bnb_4bit_use_double_quant) == (4, True) and said.count(
        "quantization"
    ) == said.count(HEAD_IN_4_BITS)


def test_a_base_that_bitsandbytes_has_quantized_is_loaded_as_it_is(converted: Convert) -> None:
    stored = TRL.replace("Qwen/Qwen3-0.6B", "unsloth/Qwen3-0.6B-bnb-4bit") + "load_in_4bit: true\n"
    ours, _, path = converted(stored)
    assert not [key for key in ours if "bit" in key] and read_recipe(str(path)).lora.use_peft
    assert "whose files are quantized already" in path.read_text()


@pytest.mark.parametrize(
    ("theirs", "line"),
    [
        (LLAMA_FACTORY + "quantization_bit: 3\n", "quantization_bit: 3   (4 is load_in_4bit: true"),
        (
            LLAMA_FACTORY + "quantization_bit: 4\nquantization_method: hqq\n",
            'quantization_method: "hqq"   (bitsandbytes is the only one)',
        ),
        (
            TRL.replace("use_peft: true\n", "load_in_4bit: true\n"),
            "load_in_4bit: true   (only a frozen base can be quantized",
        ),
    ],
)
def test_what_cannot_be_quantized_so_is_listed(converted: Convert, theirs: str, line: str) -> None:
    _, said, path = converted(theirs)
    assert line in said
    read_recipe(str(path))


@pytest.mark.parametrize(
    ("name", "ours", "sentences"),
    [
        (
            "paged_adamw_32bit",
            "adamw_torch_fused",
            ["has the dtype of what is trained; there float32"],
        ),
        (
            "paged_adamw_8bit",
            "adamw_8bit",
            ["not paged to the host here", "8-bit moments by bitsandbytes there"],
        ),
        ("adamw_bnb_8bit", "adamw_8bit", ["8-bit moments by bitsandbytes there"]),
        ("adamw_torch_8bit", "adamw_8bit", []),
    ],
)
def test_paged_and_eight_bit_adam_are_ours_with_a_sentence(
    converted: Convert, name: str, ours: str, sentences: list[str]
) -> None:
    recipe, _, path = converted(AXOLOTL.replace("adamw_torch_fused", name))
    assert recipe.get("optim", "adamw_torch_fused") == ours
    found = [
        line
        for line in path.read_text().splitlines()
        if line.startswith(f'#   optimizer: "{name}"')
    ]
    assert len(found) == len(sentences)
    assert all(sentence in line for sentence, line in zip(sentences, found, strict=True))


def test_llama_factory(converted: Convert, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "questions.json").write_text('[{"q": "a", "a": "b"}]')
    info = '{"questions": {"file_name": "questions.json", "columns": {"prompt": "q", "response": "a"}}}'
    (tmp_path / "data" / "dataset_info.json").write_text(info)
    ours, said, path = converted(LLAMA_FACTORY)
    (source,) = read_recipe(str(path)).data.datasets
    assert (source.type, source.prompt_column, source.completion_column) == ("messages", "q", "a")
    assert Path(source.path).name == "questions.json"
    assert (
        "assistant_only_loss" not in said
    )  # it is false, and has its effect on a question with its answer
    expected = {
        "use_peft": True,
        "lora_r": 8,
        "chat_template": "llama3",
        "assistant_only_loss": False,
    }
    assert {key: ours[key] for key in expected} == expected
    assert "eval_strategy is dropped: no rows are held out" in said


def test_events_are_as_often_as_theirs(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.yaml"

    def ours(text: str) -> dict[str, object]:
        theirs.write_text(text)
        return convert_file(theirs).recipe

    found = ours(AXOLOTL + "saves_per_epoch: 2\nevals_per_epoch: 4\n")  # of 3 epochs
    assert (found["save_steps"], found["eval_steps"]) == (
        pytest.approx(1 / 6),
        pytest.approx(1 / 12),
    )
    trl = "model_name_or_path: org/model\ndataset_name: org/data\nsave_steps: 500\n"
    found = ours(trl + "save_strategy: epoch\neval_strategy: epoch\nlogging_steps: 0.01\n")
    assert {
        "save_strategy": "epoch",
        "eval_strategy": "epoch",
        "logging_steps": 0.01,
    }.items() <= found.items()
    assert "save_steps" not in found
    found = ours(trl.replace("500", "0.2") + "save_strategy: no\neval_strategy: no\n")
    assert not {"save_strategy", "save_steps", "eval_strategy"} & found.keys()
    found = ours(
        trl + "save_strategy: best\neval_strategy: steps\neval_steps: 0.5\nmax_steps: -1\n"
    )
    assert {
        "keep_best_checkpoint": True,
        "save_steps": 500,
        "eval_steps": 0.5,
    }.items() <= found.items()
    assert "max_steps" not in found


def test_parts_by_name(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text(AXOLOTL + "lora_modules_to_save: [embed_tokens, lm_head]\n")
    assert convert_file(theirs).recipe["modules_to_save"] == ["embed_tokens", "lm_head"]
    full = AXOLOTL.replace("adapter: lora\n", "")
    theirs.write_text(
        full + "unfrozen_parameters: [^lm_head.weight$, 'model.layers.4[4-7]+.mlp']\n"
    )
    assert convert_file(theirs).recipe["trainable_modules"] == [
        "lm_head.weight",
        "model.layers.4[4-7]+.mlp",
    ]
    theirs.write_text(full + "unfrozen_parameters: ['model.embed_tokens.weight[:32000]']\n")
    found = convert_file(theirs)
    assert "trainable_modules" not in found.recipe
    assert "training rows of a tensor" in found.missing_capabilities


@pytest.mark.parametrize(
    ("theirs_say", "here"),
    [
        ("optim: adafactor\nlabel_smoothing_factor: 0.1", {"optim": "adafactor", "label_smoothing": 0.1}),
        ("optim: sgd\nlr_scheduler_type: inverse_sqrt", {"optim": "sgd", "lr_scheduler_type": "inverse_sqrt"}),
        ("lr_scheduler_type: warmup_stable_decay\nlr_scheduler_kwargs: {num_decay_steps: 50, min_lr_ratio: 0.1}",
         {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 50}, "min_lr_ratio": 0.1}),
        ("lr_scheduler_type: polynomial\nlr_scheduler_kwargs: {power: 2.0, lr_end: 1e-6}\nlearning_rate: 1e-5",
         {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2.0}, "min_lr_ratio": 0.1}),
        ("lr_scheduler_type: polynomial\nlearning_rate: 1e-5",
         {"lr_scheduler_type": "polynomial", "min_lr_ratio": pytest.approx(0.01)}),  # lr_end is 1e-7 there
        ("lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr_rate: 0.2}",
         {"min_lr_ratio": 0.2}),
    ],
)  # fmt: skip
def test_schedules_and_optimizers_keep_their_meaning(
    theirs_say: str, here: dict[str, object], tmp_path: Path
) -> None:
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text(f"model_name_or_path: org/model\ndataset_name: org/data\n{theirs_say}\n")
    found = convert_file(theirs)
    assert found.recipe | here == found.recipe
    assert not found.differences


def test_torchtune(converted: Convert) -> None:
    ours, said, path = converted(TORCHTUNE)
    expected = {
        "model_name_or_path": "org/Llama-3.1-8B",
        "max_length": 4096,
        "packing": True,
        "use_peft": True,
        "lora_r": 8,
        "lora_target_modules": ["q_proj", "o_proj"],
        "learning_rate": 2e-5,
        "warmup_steps": 100,
        "num_train_epochs": 1,
        "per_device_train_batch_size": 4,
        "accelerate_config": "fsdp_cpu_offload",
        "datasets": [
            {
                "path": "org/pairs",
                "type": "messages",
                "prompt_column": "input",
                "completion_column": "output",
            }
        ],
    }
    assert {key: ours[key] for key in expected} == expected
    assert "to do" not in said
    read_recipe(str(path))


def test_trl(converted: Convert) -> None:
    ours, said, path = converted(TRL)
    assert ours["datasets"] == [{"path": "trl-lib/Capybara"}]
    assert ours["eval_datasets"] == [{"path": "trl-lib/Capybara", "split": "test"}]
    expected = {
        "max_length": 1024,
        "eval_steps": 100,
        "report_to": "wandb",
        "accelerate_config": "fsdp_full_shard_auto",
    }
    assert {key: ours[key] for key in expected} == expected
    about = [
        "packing",
        "completion_only_loss",
        "dtype",  # TRL loads the base in float32 by default
        "gradients",
        "max_length",
        "max_length",
        "rows",
        "rows",
        "eval_loss",
    ]
    assert [line.split(":")[0] for line in said.splitlines()] == about
    assert "# Without effect here: " in path.read_text()
    read_recipe(str(path))


def test_a_misspelled_key_is_asked_about(converted: Convert) -> None:
    _, said, path = converted(AXOLOTL + "sequence_length: 2048\nlearning_rat: 1e-5\nzzz: 1\n")
    asked = [
        "sequence_length: 2048   (not known here; did you mean sequence_len?)",
        'learning_rat: "1e-5"   (not known here; did you mean learning_rate?)',
        "zzz: 1   (not known here)",
    ]
    assert [line for line in said.splitlines() if "not known" in line] == asked
    assert all(f"#   {line}\n" in path.read_text() for line in asked)


def test_what_is_nobodys_file_is_one_sentence(
    tmp_path: Path, run_convert: Callable[..., Ended]
) -> None:
    for text in ("a: 1\n", "- 1\n", "a: [\n"):
        source = tmp_path / "theirs.yaml"
        source.write_text(text)
        ended = run_convert(str(source))
        assert (ended.returncode, len(ended.stderr.strip().splitlines())) == (2, 1), ended.stderr
        assert str(source) in ended.stderr


def test_every_counterpart_is_a_key_of_ours_and_named_once() -> None:
    for tool in TOOL_NAMES:
        pairs = list_counterparts(tool)
        names = [pair.key for pair in pairs]
        assert len(names) == len(set(names)), (
            tool,
            sorted(name for name in names if names.count(name) > 1),
        )
        assert {pair.ours for pair in pairs} - {None} <= recipe_keys().keys()
        assert all(pair.note for pair in pairs if pair.ours is None)
        of_entries = list_counterparts(tool, DATA_SET_KEYS)
        assert {pair.ours for pair in of_entries} - {None} <= keys_of(DatasetSource).keys() | {
            "chat_template"
        }


@pytest.mark.parametrize("table", [KEYS, DATA_SET_KEYS])
def test_every_row_of_the_tables_is_read(table: str) -> None:
    """A misspelled tool, way of carrying or status would drop its row, or be ignored."""
    with (Path(counterparts.__file__).parent / table).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    named = [(tool, row["key"]) for row in rows for tool in row["tools"].split()]
    pairs = [
        (tool, pair) for tool in (*TOOL_NAMES, GRPO) for pair in list_counterparts(tool, table)
    ]
    assert sorted(named) == sorted((tool, pair.key) for tool, pair in pairs)
    for _, pair in pairs:
        if pair.carry != "template":
            with contextlib.suppress(WrongValue):
                convert_value(pair, "1", {})  # a KeyError for an unknown way
    assert all(
        row["status"] in ("", "nearly", "ignored") or row["status"].startswith(("lacks ", USUAL))
        for row in rows
    )
    assert not any(row["ours"] and row["status"] not in ("", "nearly") for row in rows)


@pytest.mark.parametrize(
    "text",
    [
        AXOLOTL + "tensor_parallel_size: 4\ncontext_parallel_size: 2\nexpert_parallel_size: 8\n",
        AXOLOTL + "tensor_parallel_size: 4\nsequence_parallel_degree: 2\nexpert_parallel_size: 8\n",
        AUTOMODEL + "distributed: {strategy: fsdp2, tp_size: 4, cp_size: 2, ep_size: 8}\n",
    ],
)
def test_the_sizes_of_other_dimensions(text: str, converted: Convert) -> None:
    """Tensors and sequences are divided in an Accelerate file that is written beside the recipe; a dense model has no experts."""
    exact, said, path = converted(text)
    layout = read_sharding(
        None, str(path.with_name(str(exact["accelerate_config"]))), {"WORLD_SIZE": "8"}
    )
    assert (layout.tensor_parallel_size, layout.sequence_parallel_size, layout.layout) == (
        4,
        2,
        "fsdp2",
    )
    assert "expert_parallel_size" not in exact and "expert_parallel_size: 1   (" in said


@pytest.mark.parametrize(
    ("text", "precision", "fp8"),
    [
        (LLAMA_FACTORY + "bf16: true\n", "bf16", None),
        (LLAMA_FACTORY + "fp16: true\n", "fp16", None),
        (LLAMA_FACTORY + "bf16: true\nfp8: true\n", "bf16", "tensorwise"),
        (TORCHTUNE + "enable_fp8_training: true\nfp8_recipe_name: rowwise\n", "bf16", "rowwise"),
        (AUTOMODEL + "fp8: {enabled: true, recipe_name: tensorwise}\n", "bf16", "tensorwise"),
        (AUTOMODEL + "fp8: {enabled: false}\n", "bf16", None),
        (AXOLOTL.replace("bf16: auto", "bf16: false"), "no", None),
    ],
)
def test_precision_is_that_of_the_accelerate_file(
    text: str, precision: str, fp8: str | None, converted: Convert
) -> None:
    exact, said, path = converted(text)
    named = str(exact["accelerate_config"])
    beside = path.with_name(named)
    assert beside.is_file() == (precision != "bf16" or fp8 is not None)
    layout = read_sharding(None, str(beside) if beside.is_file() else named, {"WORLD_SIZE": "8"})
    assert (layout.mixed_precision, layout.fp8 and layout.fp8.recipe_name) == (precision, fp8)
    # which layers are multiplied in it, and whether all versions do, is a difference of its own
    rest = "\n".join(line for line in said.splitlines() if "in FP8 " not in line)
    assert "mixed_precision" not in rest and "fp8" not in rest


GPTJ = "base_model: EleutherAI/gpt-j-6b\ntrust_remote_code: true\nsequence_len: 512\nsample_packing: true\ndatasets: [{path: a/b}]\n"
PHI = "base_model: microsoft/Phi-3-mini-4k-instruct\nsequence_len: 512\ndatasets: [{path: a/b}]\nadapter: lora\n"


def test_what_is_written_runs_by_the_rules_of_a_run(converted: Convert) -> None:
    """The family's layers and experts: the recipe is changed, with a line, or the line says what is to be done."""
    ours, said, _ = converted(GPTJ)
    assert ours["packing"] is True and "trust_remote_code" not in ours  # it reads a mask
    ours, said, _ = converted(PHI + "lora_target_modules: [q_proj, o_proj]\n")
    assert (
        ours["lora_target_modules"] == ["o_proj"]
        and "q_proj: no such layer in this family: nothing is adapted" in said
    )
    ours, said, _ = converted(PHI + "lora_target_modules: [q_proj, v_proj]\n")
    assert (
        ours["lora_target_modules"] == ["qkv_proj"]
        and "adapters of qkv_proj here, the family's layers for q_proj, v_proj" in said
    )
    ours, said, _ = converted(
        TORCHTUNE.replace("org/Llama-3.1-8B", "microsoft/Phi-3-mini-4k-instruct")
    )
    assert ours["lora_target_modules"] == ["o_proj", "qkv_proj"]
    _, said, _ = converted(
        PHI.replace("microsoft/Phi-3-mini-4k-instruct", "cerebras/Cerebras-GPT-1.3B")
    )
    assert "to do: lora_target_modules: all-linear: no such linear layer in gpt2" in said


def test_chatml_of_alignment_handbook_brings_its_tokens(converted: Convert) -> None:
    """setup_chat_format there: both tokens are added, and the second ends a text."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\\n{{ m.content }}<|im_end|>\\n{% endfor %}"
    )
    ours, _, _ = converted(TRL + f'chat_template: "{template}"\n')
    assert ours["added_tokens"] == ["<|im_start|>", "<|im_end|>"]
    assert ours["special_tokens"] == {"eos_token": "<|im_end|>"}


TEACHER = """
teacher_model: {_component_: torchtune.models.llama3.llama3_8b}
teacher_checkpointer: {checkpoint_dir: org/teacher}
kd_loss: {_component_: torchtune.modules.loss.ForwardKLWithChunkedOutputLoss}
kd_ratio: 0.25
"""


@pytest.mark.parametrize("teacher", ["", TEACHER])
def test_a_gradient_of_torchtunes_distillation_is_divided_by_tokens_too(
    teacher: str, converted: Convert
) -> None:
    """Source: `train` of its recipes/knowledge_distillation_*.py, in 0.6.1 and 0.7."""
    text = converted(TORCHTUNE + teacher)[2].read_text()
    assert [note in text for note in (DIVIDED_BY_TOKENS, MICRO_BATCHES_ALIKE)] == [
        bool(teacher)
    ] * 2


FREEZE = LLAMA_FACTORY.replace("finetuning_type: lora", "finetuning_type: freeze")
MIXER = """
model_name_or_path: org/model
dataset_mixer: {org/a: 1.0, org/b: 0.5}
dataset_splits: [train_sft, test_sft]
max_seq_length: 512
"""
SQUAD = [{"path": "org/squad", "type": "squad", "split": "train"}]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # kd_recipe_single_device: (1 - kd_ratio) x cross entropy + kd_ratio x KL(teacher, student)
        (TORCHTUNE + TEACHER, {"method": "distill", "distill_alpha": 0.25, "distill_beta": 0.0, "teacher_model_name_or_path": "org/teacher"}),
        (TORCHTUNE + TEACHER.replace("Forward", "Reverse"), {"distill_beta": 1.0, "packing": True}),
        (AUTOMODEL.replace("TrainFinetuneRecipe", "KnowledgeDistillationRecipe") + "teacher_model: {pretrained_model_name_or_path: t/t}\n",
         {"method": "distill", "distill_alpha": 0.5, "distill_beta": 0.0, "teacher_model_name_or_path": "t/t", "datasets": SQUAD}),
        (AUTOMODEL, {"datasets": SQUAD}),
        # freeze_trainable_layers: the last 2 of 32 by default, the first ones where it is negative
        (FREEZE, {"use_peft": None, "trainable_modules": ["layers.(30|31)"]}),
        (FREEZE + "freeze_trainable_layers: -3\nfreeze_trainable_modules: mlp,self_attn\nfreeze_extra_modules: embed_tokens\n",
         {"trainable_modules": [r"layers.(0|1|2)\.(mlp|self_attn)", "embed_tokens"]}),
        (MIXER, {"datasets": [{"path": "org/a", "split": "train_sft"}, {"path": "org/b", "split": "train_sft[:50%]"}],
                 "eval_datasets": [{"path": "org/a", "split": "test_sft"}, {"path": "org/b", "split": "test_sft"}]}),
        (PHI.replace("microsoft/Phi-3-mini-4k-instruct", "google/gemma-3-4b-it") + "unfrozen_parameters: [model.language_model.*, lm_head]\n",
         {"trainable_modules": None}),
        (PHI.replace("microsoft/Phi-3-mini-4k-instruct", "tiiuae/Falcon-H1-1.5B") + "lora_target_modules: [q_proj]\n", {"packing": False}),
        (PHI.replace("microsoft/Phi-3-mini-4k-instruct", "unsloth/gpt-oss-20b-BF16"), {"model_name_or_path": "unsloth/gpt-oss-20b-BF16"}),
        (PHI.replace("microsoft/Phi-3-mini-4k-instruct", "unsloth/DeepSeek-V3-bf16"), {"model_name_or_path": "unsloth/DeepSeek-V3-bf16"}),
        (PHI.replace("microsoft/Phi-3-mini-4k-instruct", "XiaomiMiMo/MiMo-7B-Base"), {"model_name_or_path": "XiaomiMiMo/MiMo-7B-Base"}),
    ],
)  # fmt: skip
def test_what_was_refused_without_need_is_converted(
    text: str, expected: dict[str, object], converted: Convert
) -> None:
    ours, said, _ = converted(text)
    for key, value in expected.items():
        assert ours.get(key) == value or (value is None and not ours.get(key)), (key, said)


def test_llama_factorys_data_is_looked_up_from_its_root(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(
        '{"questions": {"hf_hub_url": "org/questions"}}'
    )
    source = tmp_path / "examples" / "train_lora" / "theirs.yaml"
    source.parent.mkdir(parents=True)
    source.write_text(LLAMA_FACTORY)
    found = convert_file(source)
    assert found.recipe["datasets"] == [{"path": "org/questions"}] and not found.to_do


def _datasets(entries: str) -> str:
    """An Axolotl file whose `datasets` are `entries`, in YAML."""
    return f"base_model: org/model\nsequence_len: 512\nbf16: false\ndatasets: {entries}\n"


def test_every_file_of_a_data_set_is_an_entry(converted: Convert) -> None:
    ours, _, _ = converted(
        _datasets("[{path: json, data_files: [a.jsonl, b.jsonl], type: alpaca}]")
    )
    kind = {"type": "alpaca", "answers_apart": True}
    assert ours["datasets"] == [{"path": "a.jsonl", **kind}, {"path": "b.jsonl", **kind}]
    ours, said, _ = converted(_datasets("[{path: org/many, data_files: [a.jsonl]}]"))
    assert ours["datasets"] == [{"path": "org/many"}]
    assert 'datasets[0].data_files: ["a.jsonl"]   (' in said


def test_alpaca_with_columns_of_other_names(converted: Convert) -> None:
    ours, said, _ = converted(
        _datasets("[{path: org/a, type: alpaca, field_instruction: q, field_output: a}]")
    )
    columns = {"prompt_column": "q", "completion_column": "a"}
    assert ours["datasets"] == [
        {"path": "org/a", "type": "alpaca", **columns, "answers_apart": True}
    ]
    assert "field_" not in said


@pytest.mark.parametrize(
    "entry", ["{path: a/b, type: alpaca}", "{path: a/b, type: alpaca, field_output: text}"]
)
def test_alpacas_prompt_is_a_chat_template(converted: Convert, entry: str) -> None:
    ours, said, _ = converted(_datasets(f"[{entry}, {{path: c/d, type: completion}}]"))
    assert ours["chat_template"] == "alpaca"
    assert "type" not in said


def test_alpacas_prompt_beside_another_is_a_difference(converted: Convert) -> None:
    ours, said, path = converted(
        _datasets("[{path: a/b, type: alpaca}, {path: c/d, type: chat_template}]")
    )
    assert "chat_template" not in ours
    assert (
        'datasets.type: "alpaca"   (chat_template: alpaca writes their prompt, but is one for all datasets'
        in said
    )
    assert (
        "datasets.type"
        in path.read_text().split("# Different here:")[1].split("# Worth a look:")[0]
    )
    _, styled, _ = converted(_datasets("[{path: a/b, type: 'alpaca:chat'}]"))
    assert 'datasets[0].type: "alpaca:chat"   (each prompt is in this style there' in styled
    assert "here the tokenizer's chat template writes the conversation" in styled
    ours, usual, _ = converted(_datasets("[{path: a/b, type: 'alpaca:instruct'}]"))
    assert ours["chat_template"] == "alpaca" and "datasets[0].type" not in usual
    asked = _datasets("[{path: a/b, type: 'alpaca:phi'}]") + "chat_template: phi_3\n"
    assert "here chat_template: phi3 writes the conversation" in converted(asked)[1]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("llama4", "llama4"), ("phi_3", "phi3"), ("mistral_v3_tekken", "mistral-v3-tekken"), ("qwen3", "qwen3"), ("cohere", "command-r")],
)  # fmt: skip
def test_templates_by_name(converted: Convert, theirs: str, ours: str) -> None:
    recipe, _, _ = converted(
        _datasets("[{path: a/b, type: chat_template}]") + f"chat_template: {theirs}\n"
    )
    assert recipe["chat_template"] == ours
    assert set(TEMPLATES.values()) <= set(NAMED)


@pytest.mark.parametrize(
    ("theirs", "listed"),
    [
        (
            _datasets("[{path: a/b, roles_to_train: [user]}]"),
            ['datasets[0].roles_to_train: ["user"]'],
        ),
        (
            _datasets("[{path: a/b}, {path: c/d, train_on_eos: none}]"),
            ['datasets[1].train_on_eos: "none"'],
        ),
        (_datasets("[{path: a/b, zzz: false}]"), ["datasets[0].zzz: false"]),
        (
            _datasets(
                "[{path: a/b, roles_to_train: [assistant], train_on_eos: turn, shards: null}]"
            ),
            [],
        ),
        (
            AXOLOTL + "test_datasets: [{path: a/b, revision: main}]\n",
            ['test_datasets[0].revision: "main"', 'datasets.type: "alpaca"'],
        ),
        (AXOLOTL + "dataset_shard_num: 4\n", ["dataset_shard_num: 4", 'datasets.type: "alpaca"']),
        (
            "model_name_or_path: a/b\ndatasets: [{path: c/d, data_dir: sub, columns: [x, y], id: k}]\n",
            [
                'datasets[0].data_dir: "sub"',
                'datasets[0].columns: ["x", "y"]',
                'datasets[0].id: "k"',
            ],
        ),
        (
            TORCHTUNE.replace("packed: true", "bogus_key: 5\n  split_across_pack: true"),
            ["dataset.bogus_key: 5", "dataset.split_across_pack: true"],
        ),
    ],
)
def test_what_is_not_understood_of_a_data_set_is_listed(
    converted: Convert, theirs: str, listed: list[str]
) -> None:
    _, said, path = converted(theirs)
    found = [line for line in said.splitlines() if line.startswith(("dataset", "test_datasets"))]
    assert [line.split("   (")[0] for line in found] == listed
    assert all(f"#   {line}\n" in path.read_text() for line in found)


def test_what_is_not_understood_of_dataset_info_is_listed(
    converted: Convert, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    info = {
        "hf_hub_url": "org/chats",
        "formatting": "sharegpt",
        "columns": {"messages": "turns"},
        "tags": {"role_tag": "speaker", "content_tag": "value", "user_tag": "client"},
        "ranking": True,
        "num_samples": 100,
    }
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps({"questions": info}))
    ours, said, _ = converted(LLAMA_FACTORY)
    assert ours["datasets"] == [
        {"path": "org/chats", "messages_column": "turns", "max_samples": 100}
    ]
    listed = ["ranking: true", 'tags.role_tag: "speaker"', 'tags.user_tag: "client"']
    listed.append("tags: no system_tag, function_tag, observation_tag")
    listed.append("num_samples: 100")  # of fewer rows some are repeated there
    found = [line.split("   (")[0] for line in said.splitlines() if line.startswith("dataset_info")]
    assert found == [f"dataset_info.json: questions.{key}" for key in listed]


def test_torchtune_columns_and_a_trained_prompt(converted: Convert) -> None:
    column_map = "column_map: {input: q, output: a}\n  train_on_input: true"
    ours, said, _ = converted(TORCHTUNE.replace("packed: true", column_map))
    columns = {"prompt_column": "q", "completion_column": "a"}
    assert ours["datasets"] == [{"path": "org/pairs", "type": "messages", **columns}]
    assert (
        ours["assistant_only_loss"] is False
    )  # of a conversation the question is then trained too
    assert "column_map" not in said


@pytest.mark.parametrize(
    ("builder", "path", "columns"),
    [  # the defaults of torchtune/datasets/_samsum.py, _grammar.py and _slimorca.py
        ("samsum", "Samsung/samsum", ("dialogue", "summary")),
        ("grammar", "liweili/c4_200m", ("input", "output")),
        ("slimorca", "Open-Orca/SlimOrca-Dedup", None),
    ],
)
def test_torchtunes_data_set_that_names_no_source(
    converted: Convert, builder: str, path: str, columns: tuple[str, str] | None
) -> None:
    text = TORCHTUNE.replace("instruct_dataset\n  source: org/pairs", f"{builder}_dataset")
    ours, _, _ = converted(text)
    [entry] = ours["datasets"]
    assert entry.pop("path") == path
    assert entry.pop("type") == "messages"
    names = ("prompt_column", "completion_column")
    assert entry == (dict(zip(names, columns, strict=True)) if columns else {})


def test_a_prompt_that_stays_masked_is_reported(converted: Convert) -> None:
    ours, said, _ = converted(
        _datasets("[{path: a/b, type: {field_output: a}}]\ntrain_on_inputs: true")
    )
    assert "assistant_only_loss" not in ours
    assert "datasets[0]: assistant_only_loss: false has no effect" in said


@pytest.mark.parametrize("output", [[], ["--output", "ours.yaml"]])
def test_a_recipe_of_ours_is_refused_as_such(
    tmp_path: Path, output: list[str], run_convert: Callable[..., Ended]
) -> None:
    ours = "model_name_or_path: a/b\ndatasets: [{path: c/d, prompt_column: q, completion_column: a}]\nmax_steps: 2\n"
    (tmp_path / "mine.yaml").write_text(ours)
    ended = run_convert("mine.yaml", *output)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert (
        ended.stderr.startswith("mine.yaml: a recipe of this toolkit already")
        and ended.stderr.count("\n") == 1
    )
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]


def test_what_is_left_to_do_is_listed_and_is_exit_code_1(
    tmp_path: Path, run_convert: Callable[..., Ended]
) -> None:
    (tmp_path / "theirs.yaml").write_text(LLAMA_FACTORY)
    ended = run_convert("theirs.yaml")
    assert ended.returncode == EXIT_TO_DO
    line = "datasets: questions is not in data/dataset_info.json; put its file or hub name as path"
    assert f"to do: {line}\n" in ended.stderr and f"# To do:\n#   {line}\n" in ended.stdout


@pytest.mark.parametrize(
    ("folder", "said"),
    [
        ("ONLINE", None),
        ("REMOTE:org/data", "is described in dataset_info.json of the hub data set org/data"),
    ],
)
def test_data_sets_of_the_hub_by_llama_factory(
    folder: str, said: str | None, tmp_path: Path
) -> None:
    (tmp_path / "theirs.yaml").write_text(f"{LLAMA_FACTORY}dataset_dir: {folder}\n")
    to_do = "\n".join(convert_file(tmp_path / "theirs.yaml").to_do)
    assert ("datasets: questions" in to_do) == (said is not None)
    assert said is None or f"questions {said}; put its file" in to_do


ALIKE = "rows: those of similar length share a step here; they are drawn at random there"


def test_our_keys_in_their_file_are_kept(converted: Convert) -> None:
    columns = {"path": "c/d", "prompt_column": "q", "completion_column": "a"}
    ours, said, _ = converted(
        f"model_name_or_path: a/b\nbf16: true\ndatasets: [{json.dumps(columns)}]\n"
    )
    alone = f"completion_only_loss: null   ({COMPLETION_ALONE})"
    cut = [LABEL_BEHIND_CUT, UNTRAINED_BY_CUT.format(f", in TRL before 1.9{OF_TEXTS}")]
    lines = [alone, REDUCED_IN_16_BITS, SAVED_BY_LAUNCH, ALIKE, *cut, ENDS_OF_TEXTS]
    assert ours["datasets"] == [columns]
    assert said.splitlines() == [*lines, JOINED_BREAKS.format(OF_TEXTS)]


@pytest.mark.parametrize("entries", ["foo", "[foo]", "{path: a/b}", "[[path]]"])
def test_what_are_no_data_sets_is_one_sentence(
    tmp_path: Path, entries: str, run_convert: Callable[..., Ended]
) -> None:
    (tmp_path / "theirs.yaml").write_text(_datasets(entries))
    ended = run_convert("theirs.yaml")
    assert (ended.returncode, len(ended.stderr.splitlines())) == (2, 1), ended.stderr
    assert ended.stderr.startswith("theirs.yaml: datasets") and ended.stderr.endswith(
        "; write `- path: ...`\n"
    )


@pytest.mark.parametrize("info", ["{bad", "[1]", '{"questions": "questions.json"}'])
def test_a_broken_dataset_info_is_one_sentence(
    tmp_path: Path, info: str, run_convert: Callable[..., Ended]
) -> None:
    (tmp_path / "theirs.yaml").write_text(LLAMA_FACTORY)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(info)
    ended = run_convert("theirs.yaml")
    assert (ended.returncode, len(ended.stderr.splitlines())) == (2, 1), ended.stderr
    assert ended.stderr.startswith("data/dataset_info.json: ")


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text(AXOLOTL)
    (tmp_path / "ours.yaml").write_text("mine\n")
    for output in ("ours.yaml", "new.yaml"):
        full = f"ulimit -f 0; exec {sys.executable} -m finetune convert theirs.yaml --output {output} --overwrite"
        ended = run_command(["bash", "-c", full], cwd=tmp_path)
        assert (ended.returncode, len(ended.stderr.splitlines())) == (2, 1), ended.stderr
        assert ended.stderr.startswith(f"{output}: cannot be written (")
    left = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert left == {"theirs.yaml": AXOLOTL, "ours.yaml": "mine\n"}


def test_a_value_of_the_wrong_kind_is_no_traceback(converted: Convert) -> None:
    _, said, _ = converted(AXOLOTL + "lora_target_modules: 5\nfsdp: 2020-01-01\n")
    assert "lora_target_modules: 5   (no such value here)" in said


FSDP = "fsdp: [full_shard, auto_wrap]\nfsdp_config: {fsdp_offload_params: %s, fsdp_cpu_ram_efficient_loading: true}\n"


NUL = "a\0b"
WITH_NUL: dict[str, dict[str, Any]] = {
    "axolotl": {
        "base_model": NUL,
        "datasets": [{"path": NUL, "type": "alpaca", "data_files": NUL}],
        "deepspeed": NUL,
    },
    "llamafactory": {
        "model_name_or_path": NUL,
        "stage": "sft",
        "dataset": NUL,
        "dataset_dir": NUL,
        "template": NUL,
    },
    "trl": {
        "model_name_or_path": NUL,
        "dataset_name": NUL,
        "per_device_train_batch_size": 1,
        "output_dir": NUL,
    },
    "torchtune": {
        "tokenizer": {"_component_": "torchtune.models.llama3.llama3_tokenizer", "path": NUL},
        "checkpointer": {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": NUL,
        },
        "dataset": {
            "_component_": "torchtune.datasets.alpaca_dataset",
            "source": NUL,
            "data_files": NUL,
        },
    },
}


@pytest.mark.parametrize("tool", WITH_NUL)
def test_a_nul_in_a_name_is_no_traceback(
    tool: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "theirs.json").write_text(json.dumps(WITH_NUL[tool]))
    assert main(["convert", str(tmp_path / "theirs.json")]) in (0, 1, 2)
    assert "\0" not in "".join(capsys.readouterr())


def test_a_class_without_a_module_is_refused_by_its_name(tmp_path: Path) -> None:
    text = AUTOMODEL.replace("nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained", "Seq2Seq")
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(UserError, match=r"model: Seq2Seq: encoder-decoder models: not supported"):
        convert_file(tmp_path / "a.yaml")


def test_offloading_is_only_what_asks_for_it(converted: Convert) -> None:
    for asked, layout in (("false", "fsdp_full_shard_auto"), ("true", "fsdp_cpu_offload")):
        text = AXOLOTL.replace("deepspeed: deepspeed_configs/zero1.json\n", FSDP % asked)
        assert converted(text)[0]["accelerate_config"] == layout
    for device, layout in (("none", "fsdp_full_shard_auto"), ("cpu", "fsdp_cpu_offload")):
        zero = {"stage": 3, "offload_optimizer": {"device": device}}
        section = json.dumps({"zero_optimization": zero})
        text = AXOLOTL.replace("deepspeed_configs/zero1.json", section)
        assert converted(text)[0]["accelerate_config"] == layout


def test_a_mixture_of_experts_is_converted(converted: Convert) -> None:
    """With the kernels that the tool chooses for experts left to the device."""
    mixtral = (
        AXOLOTL.replace("NousResearch/Meta-Llama-3.1-8B", "mistralai/Mixtral-8x7B-v0.1")
        + "use_scattermoe: true\n"
    )
    ours, said, _ = converted(mixtral)
    assert (
        ours["model_name_or_path"] == "mistralai/Mixtral-8x7B-v0.1" and "use_scattermoe" not in said
    )


def test_torchtunes_alpaca_trains_on_the_prompt_where_it_is_not_switched_off(
    converted: Convert,
) -> None:
    alpaca = TORCHTUNE.replace("instruct_dataset", "alpaca_dataset")
    assert converted(alpaca)[0]["assistant_only_loss"] is False
    assert converted(alpaca)[0]["datasets"][0]["alpaca_prompt"] is True  # type: ignore[index]
    assert "the header of an answer" not in converted(alpaca)[1]  # which is trained here too
    ours, said, _ = converted(alpaca.replace("packed: true", "train_on_input: false"))
    assert ours.get("assistant_only_loss", True) is True and ours["packing"] is False
    assert "the header of an answer is trained too there" in said
    pairs = TORCHTUNE.replace("instruct_dataset", "preference_dataset")
    pairs += "loss: {_component_: torchtune.rlhf.loss.DPOLoss}\n"
    assert "the header of an answer" not in converted(pairs)[1]  # which is alike in both answers


@pytest.mark.parametrize(
    ("component", "said"),
    [
        ("gemma2.lora_gemma2_9b", "attention scores are capped at 30 there"),
        ("gemma2.gemma2_27b", "attention scores are capped at 30 there"),
        ("gemma.lora_gemma_7b", None),
        ("mistral.mistral_7b", "a token attends to all before it there"),
        ("mistral.qlora_mistral_7b", "a token attends to all before it there"),
        ("phi3.phi3_mini", "a token attends to all before it there"),
        ("llama3_1.lora_llama3_1_8b", None),
    ],
)
def test_what_torchtunes_own_models_compute_otherwise_is_listed(
    converted: Convert, component: str, said: str | None
) -> None:
    """Source: torchtune/models/gemma2 (hidden_capping_value=30.0, final_capping_value=50.0), mistral and phi3."""
    theirs = TORCHTUNE.replace("llama3_1.lora_llama3_1_8b", component)
    text = converted(theirs)[2].read_text()
    assert ("#   model._component_:" in text) == (said is not None)
    assert said is None or said in text


def test_layers_of_torchtunes_mlp_and_of_a_pattern(converted: Convert) -> None:
    ours, _, _ = converted(
        TORCHTUNE.replace("  lora_rank: 8", "  lora_rank: 8\n  apply_lora_to_mlp: true")
    )
    assert set(ours["lora_target_modules"]) == {
        "q_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    }  # type: ignore[call-overload]
    pattern = r"model.layers.[\d]+.(mlp|self_attn).(up|q)_proj"
    ours, _, _ = converted(
        AXOLOTL.replace("lora_target_linear: true", f"lora_target_modules: '{pattern}'")
    )
    assert ours["lora_target_modules"] == ["q_proj", "up_proj"]


def test_references_are_resolved(converted: Convert) -> None:
    extra = "batch_size_val: ${batch_size}\noutput_dir: ${root}/${name}\nname: one\nroot: runs\n"
    ours, _, _ = converted(TORCHTUNE + extra)
    assert (ours["per_device_eval_batch_size"], ours["output_dir"]) == (4, "runs/one")
    circle, _, _ = converted(TORCHTUNE + "output_dir: ${other}\nother: ${output_dir}\n")
    assert "${" in str(circle["output_dir"])


@pytest.mark.parametrize(
    ("theirs", "cause"),
    [
        (AXOLOTL + "rl: grpo\n", "rl: grpo: online RL"),
        (AXOLOTL + "process_reward_model: true\n", "a reward for each step of an answer"),
        (AXOLOTL + "num_labels: 3\n", "a classifier, for which Axolotl has no prompt strategy"),
        (
            AXOLOTL + "reward_model: true\nprocessor_type: AutoProcessor\n",
            "a reward model of images",
        ),
        (
            AXOLOTL + "processor_type: AutoProcessor\n",
            "processor_type: NousResearch/Meta-Llama-3.1-8B: rows hold images, and training on images is not supported for llama;",
        ),
        (
            AXOLOTL.replace("NousResearch/Meta-Llama-3.1-8B", "mistralai/Voxtral-Mini-3B-2507"),
            "2507: audio: not supported",
        ),
        (
            AXOLOTL.replace("NousResearch/Meta-Llama-3.1-8B", "deepseek-ai/DeepSeek-V4-Flash"),
            "Flash: mixtures of experts whose files or code are of another kind, or not tried yet: not supported",
        ),
        (LLAMA_FACTORY.replace("stage: sft", "stage: ppo"), "stage: ppo: online RL"),
        (LLAMA_FACTORY.replace("finetuning_type: lora", "finetuning_type: ia3"), "IA3"),
        (
            "model_name_or_path: a/b\nadapter_name_or_path: c\nexport_dir: d\n",
            "merging (finetune export)",
        ),
        (
            TORCHTUNE + TEACHER.replace("ForwardKL", "SymmetricKL"),
            "distillation by another divergence",
        ),
        (TRL + "beta: 0.1\nloss_type: apo_down\n", "loss_type: apo_down: another loss (APO_DOWN)"),
        (
            "recipe: KnowledgeDistillationRecipeForNextTokenPrediction\nstep_scheduler: {max_steps: 1}\n",
            "distillation",
        ),
        ("compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\n", "an Accelerate config"),
    ],
)
def test_another_method_is_refused_by_name(
    tmp_path: Path, theirs: str, cause: str, run_convert: Callable[..., Ended]
) -> None:
    (tmp_path / "theirs.yaml").write_text(theirs)
    ended = run_convert("theirs.yaml", "--output", "ours.yaml")
    assert (ended.returncode, len(ended.stderr.splitlines())) == (2, 1), ended.stderr
    assert cause in ended.stderr and not (tmp_path / "ours.yaml").exists()


def test_aliases_of_single_values_are_read(converted: Convert) -> None:
    ours, _, _ = converted(
        AXOLOTL.replace("micro_batch_size: 2", "micro_batch_size: &rows 2")
        + "eval_batch_size: *rows\n"
    )
    assert ours["per_device_eval_batch_size"] == 2


def test_a_recipe_that_our_reader_refuses_is_not_written(
    tmp_path: Path, run_convert: Callable[..., Ended]
) -> None:
    (tmp_path / "theirs.yaml").write_text(AXOLOTL + "seed: -1\n")
    ended = run_convert("theirs.yaml", "--output", "ours.yaml")
    assert (
        ended.returncode == 2
        and "not converted; the recipe would be wrong" in ended.stderr
        and "seed" in ended.stderr
    )
    assert not (tmp_path / "ours.yaml").exists()


@pytest.mark.parametrize(
    "section", ["model", "dataset", "checkpointer", "optimizer", "lr_scheduler", "tokenizer"]
)
@pytest.mark.parametrize("value", ["null", "text", "[1]", "{a: 1}"])
def test_a_section_of_another_shape_is_no_traceback(
    tmp_path: Path, section: str, value: str
) -> None:
    theirs = yaml.safe_load(TORCHTUNE) | {section: yaml.safe_load(value)}
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(theirs))
    try:
        convert_file(tmp_path / "theirs.yaml")
    except UserError as error:
        assert str(tmp_path) in str(error)


@pytest.mark.parametrize(
    ("theirs", "lines", "expected"),
    [
        (AXOLOTL.replace("lr_scheduler: cosine\n", ""), ["lr_scheduler: constant", "warmup_steps: 10"], {"warmup_steps": 0}),
        (TRL, ["lr_scheduler_type: constant", "warmup_steps: 10"], {"warmup_steps": 0, "warmup_ratio": 0.0}),
        (TRL, ["lr_scheduler_type: constant", "warmup_ratio: 0.1"], {"warmup_steps": 0, "warmup_ratio": 0.0}),
        (LLAMA_FACTORY, ["packing: false", "neat_packing: true"], {"packing": True}),
        (LLAMA_FACTORY, ["packing: true", "neat_packing: false"], {"packing": True}),
        (LLAMA_FACTORY, ["packing: false", "neat_packing: false"], {"packing": False}),
        (LLAMA_FACTORY, ["use_muon: true", "optim: adamw_torch"], {"optim": "muon"}),
        (AXOLOTL.replace("lora_target_linear: true\n", ""), ["lora_target_linear: true", "lora_target_modules: [q_proj]"], {"lora_target_modules": "all-linear"}),
        (AXOLOTL.replace("lora_target_linear: true\n", ""), ["lora_target_linear: true", "lora_target_modules: [lm_head]"], {"lora_target_modules": ["all-linear", "lm_head"]}),
    ],
)  # fmt: skip
def test_the_order_of_keys_changes_nothing(
    converted: Convert, theirs: str, lines: list[str], expected: dict[str, object]
) -> None:
    made = [converted(theirs + "\n".join(order) + "\n")[0] for order in (lines, lines[::-1])]
    assert made[0] == made[1] and expected == {key: made[0].get(key) for key in expected}


def test_trls_mask_of_prompts_decides_what_is_trained(converted: Convert) -> None:
    ours, said, _ = converted(TRL + "completion_only_loss: true\nassistant_only_loss: false\n")
    about_masks = [line for line in said.splitlines() if "completion_only_loss" in line]
    assert ours.get("assistant_only_loss", True)
    assert about_masks == [f"completion_only_loss: true   ({COMPLETIONS_BREAK})"]
    ours, said, _ = converted(TRL + "completion_only_loss: false\n")
    assert ours["assistant_only_loss"] is False
    assert (
        "completion_only_loss: false   (where prompt and completion are two texts the prompt is never"
        in said
    )
    _, said, _ = converted(LLAMA_FACTORY + "completion_only_loss: true\n")
    assert "completion_only_loss: true   (not known here)" in said


def test_a_list_of_torchtunes_data_sets_is_packed(converted: Convert) -> None:
    entry = {"_component_": "torchtune.datasets.chat_dataset", "conversation_column": "messages"}
    for packed in (True, False):
        rows = [entry | {"source": source, "packed": packed} for source in ("a/b", "a/c")]
        ours, said, _ = converted(yaml.safe_dump(yaml.safe_load(TORCHTUNE) | {"dataset": rows}))
        assert ours.get("packing", True) is packed and "packed: " not in said


@pytest.mark.parametrize(
    ("name", "is_adapters"),
    [("org/m-7b-sft-qlora", True), ("org/lora", True), ("org/flora", False)],
)
def test_a_model_that_is_named_as_an_adapter_is_to_be_merged(
    converted: Convert, name: str, is_adapters: bool
) -> None:
    said = converted(f"model_name_or_path: {name}\ndataset_name: org/rows\nbeta: 0.1\n")[1]
    assert ("its name is an adapter's" in said) == is_adapters


def test_shares_of_a_mixer_are_kept_exactly(converted: Convert, tmp_path: Path) -> None:
    mixer = "dataset_mixer: {a/b: 0.125, a/c: 0.004, a/d: '0.5', a/e: 0.29, a/f: 0, a/g: 1}\n"
    ours, said, _ = converted("model_name_or_path: org/model\n" + mixer)
    assert ours["datasets"] == [
        {"path": "a/b", "split": "train", "weight": 0.125},
        {"path": "a/c", "split": "train", "weight": 0.004},
        {"path": "a/d", "split": "train[:50%]"},
        {"path": "a/e", "split": "train[:29%]"},
        {"path": "a/g", "split": "train"},
    ]
    assert "dataset_mixer: a/b: 0.125, a/c: 0.004   (a share that no slice names exactly" in said
    assert "an empty system message" in said
    assert (
        "an empty system"
        not in converted(
            "model_name_or_path: org/model\nauto_insert_empty_system_msg: false\n" + mixer
        )[1]
    )
    for wrong in (
        "dataset_mixer: {a/b: half}\n",
        "dataset_mixer: {a/b: 1}\ndataset_configs: [x, y]\n",
    ):
        (tmp_path / "theirs.yaml").write_text("model_name_or_path: org/model\n" + wrong)
        with pytest.raises(
            UserError, match=r"theirs.yaml: dataset_(mixer.a/b|configs): .* is expected, found"
        ):
            convert_file(tmp_path / "theirs.yaml")


def test_a_history_is_reported_where_the_form_does_not_read_it(
    converted: Convert, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    columns = {
        "prompt": "instruction",
        "query": "input",
        "response": "output",
        "history": "history",
    }
    for renamed, is_read in (({}, True), ({"prompt": "question", "query": None}, False)):
        info = {"hf_hub_url": "org/rows", "columns": columns | renamed}
        (tmp_path / "data" / "dataset_info.json").write_text(json.dumps({"questions": info}))
        _, said, _ = converted(LLAMA_FACTORY)
        assert ('columns.history: "history"   (type alpaca reads' in said) is not is_read


def test_no_limit_of_length_is_none_here(converted: Convert) -> None:
    ours, said, _ = converted(TRL.replace("max_seq_length: 1024", "max_length: null"))
    assert (ours["max_length"], ours["overlength"]) == (8192, "error")
    assert "no limit of length there" in said


ODD = ("auto", [1], {"a": 1}, True, float("nan"), None, 0, -1)


@pytest.mark.parametrize(
    ("theirs", "tool"),
    slow_but(
        [(TRL, "TRL"), (LLAMA_FACTORY, "LLaMA-Factory")],
        [(TRL, "TRL"), (AXOLOTL, "Axolotl"), (LLAMA_FACTORY, "LLaMA-Factory"), (TORCHTUNE, "torchtune"), (AUTOMODEL, "Automodel")],
    ),
)  # fmt: skip
def test_an_odd_value_is_converted_or_one_sentence(tmp_path: Path, theirs: str, tool: Tool) -> None:
    """Each key with one of the odd values in turn, keys of numbers with each of them."""
    path = tmp_path / "theirs.yaml"
    keys = [
        (pair.key.split("."), pair.carry in ("steps", "min-rate"))
        for pair in list_counterparts(tool)
        if pair.has_effect
    ]
    for i, (names, is_number) in enumerate(keys):
        for value in ODD if is_number else ODD[i % len(ODD) :][:1]:
            file = section = yaml.safe_load(theirs)
            for name in names[:-1]:
                section[name] = section[name] if isinstance(section.get(name), dict) else {}
                section = section[name]
            section[names[-1]] = value
            path.write_text(yaml.safe_dump(file))
            try:
                read_back(convert_file(path).recipe)
            except UserError as error:
                assert str(error).startswith(str(path)) and "\n" not in str(error)


@pytest.mark.parametrize("steps", ["auto", f"1{400 * '0'}"])
def test_a_number_of_steps_that_is_none_names_key_and_value(steps: str, tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text(TRL + f"save_steps: {steps}\n")
    with pytest.raises(UserError, match=r"theirs.yaml: save_steps: a number is expected, found"):
        convert_file(tmp_path / "theirs.yaml")


@pytest.mark.parametrize(
    ("name", "eos", "is_said"),
    [
        ("mistralai/Mistral-7B-Instruct-v0.2", "<|im_end|>", True),
        ("mistralai/Mistral-7B-Instruct-v0.2", "</s>", False),
        ("Qwen/Qwen2.5-7B", "<|im_end|>", False),
    ],
)
def test_the_rows_of_special_tokens_that_are_new_start_at_random_in_axolotl(
    name: str, eos: str, is_said: bool, converted: Convert
) -> None:
    """resize_token_embeddings without mean_resizing, the default of its utils/schemas/config.py."""
    text = _datasets("[{path: a/b, type: chat_template}]")
    text = re.sub("base_model: .*", f"base_model: {name}", text)
    _, said, _ = converted(text + f"special_tokens: {{eos_token: '{eos}'}}\n")
    assert (START_OF_SPECIAL.format(STARTS_OF_NEW_ROWS["Axolotl"]) in said) == is_said
    _, said, _ = converted(
        text + f"special_tokens: {{eos_token: '{eos}'}}\nmean_resizing_embeddings: true\n"
    )
    assert (START_OF_SPECIAL.format(STARTS_OF_NEW_ROWS["TRL"]) in said) == is_said


def test_a_bos_token_that_axolotl_names_alone_is_an_added_one(converted: Convert) -> None:
    """A run here refuses one where tokenizer.json writes another before every text, as Mistral's."""
    text = _datasets("[{path: a/b, type: chat_template}]")
    text += "special_tokens: {bos_token: '<|im_start|>', eos_token: '<|im_end|>'}\n"
    for name, is_new in (("mistralai/Mistral-7B-Instruct-v0.2", True), ("Qwen/Qwen2.5-7B", False)):
        ours, said, _ = converted(re.sub("base_model: .*", f"base_model: {name}", text))
        assert (ours.get("added_tokens") == ["<|im_start|>"]) == is_new
        assert ("bos_token" in ours["special_tokens"]) != is_new
        assert (BOS_BY_NAME in said) == is_new


def test_tokens_of_other_tools(converted: Convert) -> None:
    tokens = "tokens: ['<a>', '<b>']\neot_tokens: ['<b>']\nresize_token_embeddings_to_32x: true\n"
    special = "special_tokens: {eos_token: '<b>', pad_token: '<p>', additional_special_tokens: ['<c>', '<a>']}\n"
    ours, said, _ = converted(_datasets("[{path: a/b, type: chat_template}]") + tokens + special)
    assert ours["added_tokens"] == ["<a>", "<b>", "<c>"]
    assert (ours["eot_tokens"], ours["pad_vocab_to_multiple_of"]) == (["<b>"], 32)
    assert ours["special_tokens"] == {"eos_token": "<b>", "pad_token": "<p>"}
    about = [line for line in said.splitlines() if "tokens" in line]
    assert about == [SPECIAL_FIRST, START_OF_ROWS.format(STARTS_OF_NEW_ROWS["Axolotl"])]
    adapted, _, _ = converted(
        _datasets("[{path: a/b, type: chat_template}]") + special + "adapter: lora\n"
    )
    assert adapted["special_tokens"] == {
        "eos_token": "<b>"
    }  # a pad_token that is new would train the embedding
    factory, _, _ = converted(
        LLAMA_FACTORY + "add_tokens: <a>,<b>\nadd_special_tokens: <c>\nresize_vocab: true\n"
    )
    assert factory["added_tokens"] == ["<a>", "<b>", "<c>"]
    trl, _, _ = converted(TRL + "eos_token: <|im_end|>\n")
    assert trl["special_tokens"] == {"eos_token": "<|im_end|>"}


def test_saves_are_kept_and_made_as_the_tool_does(converted: Convert) -> None:
    """Axolotl keeps 4 and saves every epoch, torchtune every epoch and all of them, Trainer every 500 steps and all."""
    keys = ("save_strategy", "save_steps", "save_total_limit")
    epochs = TORCHTUNE.replace("epochs: 1", "epochs: 3")
    for theirs, expected in (
        (AXOLOTL, ("epoch", None, 4)),
        (AXOLOTL + "saves_per_epoch: 2\n", (None, pytest.approx(1 / 6), 4)),
        (epochs, ("epoch", None, None)),
        (TORCHTUNE, (None, None, "ours")),
        (TRL + "save_total_limit: 3\n", (None, 500, 3)),
        (TRL + "save_strategy: 'no'\n", (None, None, "ours")),
    ):
        ours, _, path = converted(theirs)
        assert tuple(ours.get(key, "ours" if key == keys[2] else None) for key in keys) == expected
        read_recipe(str(path))


def test_plain_text_of_axolotl_is_split_and_not_dropped(converted: Convert) -> None:
    assert converted(_datasets("[{path: a/b, type: completion}]"))[0].get("overlength") is None
    assert converted(_datasets("[{path: a/b, type: chat_template}]"))[0]["overlength"] == "drop"
    said = _datasets("[{path: a/b, type: chat_template}]") + "excess_length_strategy: truncate\n"
    assert converted(said)[0]["overlength"] == "truncate"


def test_weights_in_bfloat16_are_trained_in_the_precision_of_the_launch(converted: Convert) -> None:
    """alignment-handbook's torch_dtype is of the weights as they are loaded; ZeRO-3 trains a copy in float32."""
    full = TRL.replace("use_peft: true\n", "torch_dtype: bfloat16\n")
    ours, _, path = converted(full)
    assert "dtype" not in ours and "train a copy in float32 there" in path.read_text()
    assert (
        converted(
            TORCHTUNE.replace("lora_rank: 8", "").replace(
                "lora_attn_modules: [q_proj, output_proj]", ""
            )
        )[0]["dtype"]
        == "bfloat16"
    )  # torchtune's dtype is that of the parameters


@pytest.mark.parametrize(
    ("dtype", "exported"), [("bf16", "bfloat16"), ("fp32", "float32"), ("a name of its own", None)]
)
def test_an_export_has_the_dtype_that_torchtune_trains_and_saves(
    converted: Convert, dtype: str, exported: str | None
) -> None:
    """Source: gather_cpu_state_dict of torchtune's training/_distributed.py, which casts nothing."""
    assert converted(TORCHTUNE.replace("bf16", dtype))[0].get("export_dtype") == exported


@pytest.mark.parametrize(
    ("tokenizer", "ours"),
    [
        ("llama2.llama2_tokenizer", "inst-torchtune"),
        ("mistral.mistral_tokenizer", "inst-torchtune"),
        ("gemma.gemma_tokenizer", "joined"),
        ("llama3.llama3_tokenizer", "llama3"),
        ("qwen2_5.qwen2_5_tokenizer", "chatml"),
        ("qwen3.qwen3_tokenizer", "chatml"),
        ("custom.my_tokenizer", None),
    ],
)
def test_torchtunes_tokenizers_have_their_chat_format_built_in(
    converted: Convert, tokenizer: str, ours: str | None
) -> None:
    theirs = TORCHTUNE.replace("llama3.llama3_tokenizer", tokenizer)
    recipe, said, _ = converted(theirs)
    assert recipe.get("chat_template") == ours
    assert ours is None or ours in NAMED
    said = converted(theirs.replace("packed: true", "train_on_input: true"))[1]
    assert ("the line break after the last answer is trained too here" in said) == (
        ours == "chatml"
    )
    assert (
        "chat_template"
        not in converted(theirs.replace("instruct_dataset", "text_completion_dataset"))[0]
    )


def test_templates_of_llama_factory_that_write_other_turns_are_differences(
    converted: Convert,
) -> None:
    assert (
        converted(LLAMA_FACTORY.replace("template: llama3", "template: llama2"))[0]["chat_template"]
        == "inst"
    )
    for name, line in (
        ("default", "its turns are not known here"),
        ("qwen3", "an empty thought in every turn there"),
    ):
        _, said, _ = converted(LLAMA_FACTORY.replace("template: llama3", f"template: {name}"))
        assert f'template: "{name}"   ({line}' in said


def test_what_asks_for_nothing_is_not_listed_and_what_is_lacking_is_named(
    converted: Convert,
) -> None:
    roles = "roles: {user: [user, human], assistant: [gpt]}"
    _, said, _ = converted(
        _datasets(f"[{{path: a/b, type: chat_template, {roles}}}]")
        + "attn_implementation: kernels-community/flash-attn3\n"
    )
    assert "roles" not in said and "flash-attn3" not in said
    _, said, _ = converted(_datasets("[{path: a/b, type: chat_template, roles: {user: [client]}}]"))
    assert "datasets[0].roles.user" in said
    automodel = AUTOMODEL + "dataloader: {shuffle: false}\n"
    for theirs, line in (
        (AXOLOTL + "lisa_n_layers: 4\n", "LISA: not supported"),
        (automodel, "rows are trained on in their order there"),
        (TORCHTUNE + "shuffle: false\n", "rows are trained on in their order there"),
    ):
        _, said, _ = converted(theirs)
        assert line in said and "not known here" not in said, said


V1 = """
model: Qwen/Qwen3-4B
peft_config: {name: lora, r: 16, lora_alpha: 32, lora_dropout: 0.05, target_modules: all}
dist_config: {name: fsdp2}
train_dataset: data/rows.yaml
cutoff_len: 2048
max_steps: 10
"""


def refused(theirs: str, folder: Path) -> str:
    """What convert says of a file that it refuses."""
    source = folder / "refused.yaml"
    source.write_text(theirs)
    with pytest.raises(UserError) as said:
        convert_file(source)
    return str(said.value)


def test_a_file_of_llama_factorys_v1_schema_has_its_own_defaults(
    converted: Convert, tmp_path: Path
) -> None:
    """llamafactory/v1/config: batches of 1, 1e-4, the tokenizer's own template; v1/core/base_trainer.py: torch's AdamW at a constant rate."""
    ours, said, _ = converted(V1)
    assert "instruction and input of a row of alpaca follow one another there" in said
    expected = {
        "model_name_or_path": "Qwen/Qwen3-4B", "per_device_train_batch_size": 1, "learning_rate": 1e-4, "weight_decay": 0.01,
        "lr_scheduler_type": "constant", "max_steps": 10, "max_length": 2048, "chat_template": None, "lora_r": 16,
        "lora_alpha": 32, "lora_target_modules": "all-linear", "packing": False, "accelerate_config": "fsdp_full_shard_auto",
    }  # fmt: skip
    assert {key: ours.get(key) for key in expected} == expected and "dtype" not in ours
    assert "optim_config" in refused(V1 + "optim_config: {name: muon}\n", tmp_path)
    nulls = ("micro_batch_size", "learning_rate", "weight_decay", "lr_scheduler_type", "output_dir")
    assert converted(V1 + "".join(f"{key}:\n" for key in nulls))[0] == ours


@pytest.mark.parametrize("sharding", ["dist_config: {name: fsdp2}", ""])
def test_all_weights_of_llama_factorys_v1_are_in_float32_and_what_else_is_trained_there_is_listed(
    converted: Convert, sharding: str
) -> None:
    """v1/core/model_engine.py: model.to(float32) without adapters; FSDP2 alone reads bf16.

    v1/core/base_trainer.py: AdamW on every parameter, in one group. v1/core/rendering/rendering.py:
    all that follows the prompt has one weight; with a `template`, which it had before, the header
    too.
    """
    lines = [line for line in V1.splitlines() if not line.startswith(("peft", "dist"))]
    full, said, _ = converted("\n".join([*lines, sharding, ""]))
    layout = "fsdp_full_shard_auto" if sharding else None
    assert (full.get("dtype"), full.get("accelerate_config")) == (None, layout)
    assert "norms and biases are decayed too there" in said
    assert V1_BREAK in said and "the header of an answer is trained too there" not in said
    _, said, _ = converted(V1)
    assert "norms and biases are decayed too there" not in said  # adapters have neither
    _, said, _ = converted(V1 + "template: qwen3_nothink\n")
    assert V1_BREAK not in said and "the header of an answer is trained too there" in said


@pytest.mark.parametrize(
    ("model", "template", "more", "is_untrained"),
    [
        ("meta-llama/Llama-3.1-8B", "llama3", "", True),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama3", "", False),
        ("mistralai/Mistral-7B-v0.1", "chatml", "", True),
        ("mistralai/Mistral-7B-v0.1", "chatml", "special_tokens: {eos_token: <|im_end|>}", False),
        ("mistralai/Mistral-7B-v0.1", "chatml", "eot_tokens: [<|im_end|>]", False),
        ("microsoft/Phi-3.5-mini-instruct", "phi_3", "", True),
        ("google/gemma-2-9b-it", "tokenizer_default", "", True),
        ("Qwen/Qwen2.5-7B", "chatml", "", True),
        ("Qwen/Qwen2.5-7B-Instruct", "chatml", "", False),
    ],
)
def test_the_end_of_a_turn_that_axolotl_leaves_untrained_is_listed(
    converted: Convert, model: str, template: str, more: str, is_untrained: bool
) -> None:
    """prompt_strategies/chat_template.py: without eot_tokens they are [tokenizer.eos_token]."""
    rows = "datasets: [{path: a/b, type: chat_template}]"
    said = converted(
        f"base_model: {model}\nchat_template: {template}\n{rows}\nsequence_len: 64\n{more}\n"
    )[1]
    assert ("the EOS token alone ends a trained turn there" in said) == is_untrained


def test_the_last_layers_of_a_local_model_are_named(converted: Convert, tmp_path: Path) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = re.sub("model_name_or_path: .*", f"model_name_or_path: {tmp_path}", FREEZE)
    assert converted(text)[0]["trainable_modules"] == ["layers.(3|4)"]


def test_long_rows_and_joined_documents_of_llama_factory_are_named(converted: Convert) -> None:
    """data/processor/processor_utils.py, infer_seqlen; processor/pretrain.py: texts are concatenated, and cut into blocks."""
    assert "its prompt and its answer are both cut there" in converted(LLAMA_FACTORY)[1]
    pretrain = LLAMA_FACTORY.replace("stage: sft", "stage: pt")
    ours, said, _ = converted(pretrain)
    assert "documents are joined there" in said and "both cut" not in said
    ours, said, _ = converted(pretrain + "packing: false\n")
    assert ours["overlength"] == "truncate" and "documents are joined" not in said


@pytest.mark.parametrize(
    ("model", "cause"),
    [
        ("Qwen/Qwen-7B", "code is not in transformers"),
        ("Qwen/Qwen-14B-Chat", "code is not in transformers"),
        ("nvidia/Nemotron-Labs-Diffusion-8B", "diffusion"),
    ],
)
def test_a_model_that_only_its_name_tells_apart_is_refused(
    tmp_path: Path, model: str, cause: str
) -> None:
    rows = "datasets: [{path: a/b, type: alpaca}]\nsequence_len: 64\n"
    assert cause in refused(f"base_model: {model}\ntrust_remote_code: true\n{rows}", tmp_path)


@pytest.mark.parametrize(
    ("lines", "is_apart"),
    [
        ("", False),
        ("attn_implementation: kernels-community/vllm-flash-attn3\n", False),
        ("attn_implementation: kernels-community/flash-attn3@v1\n", True),
        ("attn_implementation: sdpa\n", True),
        ("flash_attention: true\n", True),
        ("flash_attention:\n", False),
    ],
)
def test_packed_documents_that_see_each_other_in_axolotl_are_said(
    lines: str, is_apart: bool, converted: Convert
) -> None:
    """As its own `attn_decontaminates_packing` decides."""
    assert ("those before under this attention" in converted(AXOLOTL + lines)[1]) != is_apart
    unpacked = AXOLOTL.replace("sample_packing: true", "sample_packing: false")
    assert "under this attention" not in converted(unpacked + lines)[1]


def test_axolotls_float16_alone_is_without_loss_scaling(converted: Convert) -> None:
    alone = AXOLOTL.replace("bf16: auto", "float16: true\nbf16: false")
    assert "neither autocast nor loss scaling" in converted(alone)[1]
    assert "autocast" not in converted(alone + "fp16: true\n")[1]
    assert "autocast" not in converted(AXOLOTL + "float16: true\n")[1]


def test_axolotl_leaves_a_projection_of_falcon_h1_unquantized(converted: Convert) -> None:
    falcon = AXOLOTL.replace("NousResearch/Meta-Llama-3.1-8B", "tiiuae/Falcon-H1-1.5B-Instruct")
    four = falcon.replace("adapter: lora", "adapter: qlora\nload_in_4bit: true")
    assert "out_proj stays in 16 bits there" in converted(four)[1]
    assert "out_proj stays" not in converted(falcon)[1]


def test_axolotl_leaves_jambas_mamba_layers_out_of_8_bits(converted: Convert) -> None:
    """Source: llm_int8_skip_modules of its loaders/model.py."""
    jamba = AXOLOTL.replace("NousResearch/Meta-Llama-3.1-8B", "ai21labs/AI21-Jamba-1.5-Mini")
    note = "the Mamba layers stay in 16 bits there"
    assert note in converted(jamba.replace("load_in_8bit: false", "load_in_8bit: true"))[1]
    four = jamba.replace("adapter: lora", "adapter: qlora\nload_in_4bit: true")
    assert note not in converted(four)[1]
    assert note not in converted(AXOLOTL.replace("load_in_8bit: false", "load_in_8bit: true"))[1]


@pytest.mark.parametrize(
    ("model", "is_said"),
    [
        ("ai21labs/AI21-Jamba-1.5-Mini", True),
        ("LiquidAI/LFM2-8B-A1B", True),
        ("tiiuae/Falcon-H1-1.5B-Instruct", False),  # by its monkeypatch/models/falcon_h1
        ("Qwen/Qwen3-0.6B", False),
    ],
)
def test_states_that_pass_from_document_to_document_in_axolotl_are_said(
    model: str, is_said: bool, converted: Convert
) -> None:
    packed = AXOLOTL.replace("NousResearch/Meta-Llama-3.1-8B", model)
    note = "start from the state of those before"
    assert (note in converted(packed)[1]) == is_said
    assert note not in converted(packed.replace("sample_packing: true", ""))[1]


@pytest.mark.parametrize(
    ("lines", "dtype"),
    [
        ("fsdp_version: 2\nfsdp_config: {offload_params: false}\n", "bfloat16"),
        ("fsdp_version: 1\nfsdp_config: {offload_params: false}\n", None),
        ("fsdp_version: 2\nfsdp_config: {offload_params: false}\nadapter: lora\n", None),
    ],
)
def test_axolotl_trains_the_weights_of_fsdp2_as_they_are_loaded(
    lines: str, dtype: str | None, converted: Convert
) -> None:
    """Source: its monkeypatch/accelerate/fsdp2.py, in place of Accelerate's, which casts to float32."""
    assert converted(SMALL_AXOLOTL + "bf16: true\n" + lines)[0].get("dtype") == dtype


def test_how_trainer_averages_the_loss_of_held_out_rows_is_said(converted: Convert) -> None:
    """Source: losses = loss.repeat(batch_size) of Trainer's evaluation_loop."""
    note = "eval_loss: each row counts by its batch's mean over labels there"
    assert note in converted(AXOLOTL + "eval_steps: 10\n")[1]
    assert note not in converted(AXOLOTL.replace("val_set_size: 0.05", "eval_steps: 10"))[1]
    assert note not in converted(AUTOMODEL)[1]


def test_rows_that_are_held_out_and_not_measured_are_said(converted: Convert) -> None:
    """Sources: _configure_save_and_eval_strategy of Axolotl; run_val_every_n_steps of torchtune's recipes."""
    note = "eval_loss: not measured there"
    assert note in converted(AXOLOTL)[1]
    assert note not in converted(AXOLOTL + "eval_steps: 10\n")[1]
    held_out = (
        "dataset_val: {_component_: torchtune.datasets.alpaca_dataset, split: 'train[95%:]'}\n"
    )
    assert note in converted(TORCHTUNE + held_out)[1]
    assert note not in converted(TORCHTUNE + held_out + "run_val_every_n_steps: 10\n")[1]
    assert note not in converted(TORCHTUNE)[1]


def test_messages_in_torchtunes_transforms_are_trimmed_and_headers_trained(
    converted: Convert,
) -> None:
    """Source: _tokenize_body and tokenize_messages of its models/llama4/_tokenizer.py."""
    trimmed, header = "white space around a message is left out there", "the header of an answer"
    assert trimmed not in converted(TORCHTUNE)[1]
    images = TORCHTUNE.replace("llama3.llama3_tokenizer", "llama4.llama4_transform")
    assert trimmed in converted(images)[1] and header in converted(images)[1]
    whole = images.replace("source: org/pairs", "source: org/pairs\n  train_on_input: true")
    assert trimmed in converted(whole)[1] and header not in converted(whole)[1]


@pytest.mark.parametrize(
    ("model", "is_said"),
    [("nvidia/Llama-3_3-Nemotron-Super-49B-v1_5", True), ("meta-llama/Llama-3.2-1B", False)],
)
def test_other_layers_of_a_model_of_its_own_code_are_said_to_get_adapters(
    model: str, is_said: bool, converted: Convert
) -> None:
    """Automodel's *_proj are names; all linear layers of a family that is not known may have others."""
    text = AUTOMODEL.replace("match_all_linear: true", "target_modules: '*_proj'")
    said = converted(text.replace("org/model", model))[1]
    assert ("one of another name gets no adapter there" in said) == is_said


def test_targets_beside_the_language_model_are_not_said_to_be_missing(converted: Convert) -> None:
    scout = AXOLOTL.replace("NousResearch/Meta-Llama-3.1-8B", "meta-llama/Llama-4-Scout-17B-16E")
    scout = scout.replace("lora_target_linear: true", "lora_target_modules: [q_proj, adapter.fc1]")
    assert "no such layer in this family" in converted(scout)[1]
    said = converted(scout + "processor_type: Llama4Processor\n")[1]
    assert "adapter.fc1: no layer of the language model" in said and "no such layer" not in said


def test_a_model_named_after_qwens_size_is_not_qwens_first(converted: Convert) -> None:
    cogito = "deepcogito/cogito-v1-preview-qwen-14B"
    rows = "datasets: [{path: a/b, type: alpaca}]\nsequence_len: 64\n"
    recipe, _, _ = converted(f"base_model: {cogito}\n{rows}")
    facts = find_facts(recipe)
    assert facts is not None and facts.model_type == "qwen2"


def test_a_later_qwen_converts_and_a_super_of_nemotrons_is_a_mixture(converted: Convert) -> None:
    rows = "datasets: [{path: a/b, type: alpaca}]\nsequence_len: 64\nexpert_parallel_size: 2\n"
    assert (
        converted(f"base_model: Qwen/Qwen1.5-7B\n{rows}")[0]["model_name_or_path"]
        == "Qwen/Qwen1.5-7B"
    )
    recipe, _, _ = converted(f"base_model: nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16\n{rows}")
    facts = find_facts(recipe)
    assert facts is not None and facts.experts


def test_what_trains_otherwise_is_refused_by_its_key(tmp_path: Path) -> None:
    for lines in (
        "diffusion_lm: {time_weighting: inv_t}\n",
        "diffusion: {eps: 1e-3}\n",  # which nothing reads without the plugin
        "plugins: [axolotl.integrations.diffusion_decision.DiffusionDecisionPlugin]\n",
    ):
        assert "diffusion" in refused(AXOLOTL + lines, tmp_path)
    assert "KTransformers" in refused(LLAMA_FACTORY + "use_kt: true\n", tmp_path)


def test_axolotls_masked_diffusion_converts_with_each_difference(converted: Convert) -> None:
    """As core/trainers/diffusion_lm of Axolotl 0.21 has it; the noise schedule and the ratios are read nowhere in its training."""
    block = "{eps: 5e-4, mask_token_id: 128002, noise_schedule: cosine, min_mask_ratio: 0.15}\n"
    plugin = "plugins: [axolotl.integrations.diffusion.DiffusionPlugin]\n"
    ours, said, _ = converted(AXOLOTL + plugin + f"diffusion: {block}attn_implementation: sdpa\n")
    assert (ours["method"], ours["mask_token"], ours["mask_eps"]) == (
        "masked_diffusion",
        128002,
        5e-4,
    )
    assert "attn_implementation" not in ours and "added_tokens" not in ours
    for difference in (
        "base vocabulary",
        "no text is sampled",
        "never masked there",
        "divided by its trained tokens",
        "one probability there",
    ):
        assert difference in said
    assert "noise_schedule" not in said and "not known here" not in said
    core = "diffusion_lm: {from_causal_lm: true, generate_samples: false, importance_weighting: false}\n"
    ours, said, _ = converted(AXOLOTL + core)
    assert ours["added_tokens"] == [ours["mask_token"]] == ["<|diffusion_mask|>"]
    assert "mask_eps" not in ours  # 1e-3 there and here
    assert "it is trained here" in said  # beside adapters
    assert "not divided by the probability" in said and "no text is sampled" not in said


def test_torchtunes_early_exits_convert_with_each_difference(converted: Convert) -> None:
    """As dev/early_exit_finetune_distributed.py of torchtune 0.6.1 has them."""
    module = "torchtune.modules.early_exit_loss"
    lines = f"""
early_exit_loss: {{layers: "8,12,16", curriculum: {module}.GradualEarlyExitCurriculum, scale_fn: {module}.inv_sqrt_l_loss_scale, scale: 0.2, include_last_layer: false}}
layer_dropout: {{prob: 0.5, layers: "1::2", disable_on_eval: true}}
"""
    ours, said, _ = converted(TORCHTUNE + lines)
    keys = {key: value for key, value in ours.items() if key.startswith(("exit_", "layer_drop"))}
    assert ours["method"] == "early_exit"
    assert keys == {
        "exit_layers": [8, 12, 16],
        "exit_curriculum": "gradual",
        "exit_weights": "inverse_root",
        "exit_scale": 0.2,
        "layer_dropout": 0.5,
        "layer_dropout_layers": "1::2",
        "layer_dropout_schedule": "uniform",
    }
    assert "so that the last layer learns nothing" in said
    assert "always scored here" in said and "a step later there" in said
    ours, said, _ = converted(TORCHTUNE + "layer_dropout: {prob: 0.5}\n")
    assert ours["exit_layers"] == [] and "learns nothing" not in said
    ours, said, _ = converted(TORCHTUNE + "early_exit_loss: {scale_fn: mine.scale}\n")
    assert (ours["exit_layers"], ours["exit_curriculum"]) == (":", "none")
    assert "one of torchtune's own is expected" in said and "exit_weights" not in ours


def test_the_keys_of_axolotl_0_21(converted: Convert) -> None:
    more = """
context_parallel: {size: 2, backend: auto, ring_impl: auto}
chat_template_kwargs: {reasoning_effort: low}
expert_parallel_backend: deep_ep
nf4_backend: torchao
load_in_4bit: true
optim_args: {eps: 1.0e-6, bf16_stochastic_round: true}
"""
    axolotl = AXOLOTL.replace("optimizer: adamw_torch_fused", "optimizer: ao_adamw_fp8")
    ours, said, path = converted(axolotl + more)
    assert "not known here" not in said
    alpaca, chats = ours["datasets"][:2]  # type: ignore[index]
    assert "chat_template_kwargs" not in alpaca and chats["chat_template_kwargs"] == {
        "reasoning_effort": "low"
    }
    assert (
        ours["adam_epsilon"] == 1e-6
        and "are rounded to nearest here" in said
        and "NF4 by torchao there" in said
    )
    assert "parallelism_config_cp_size: 2" in path.with_suffix(".accelerate.yaml").read_text()


def test_what_is_not_known_and_not_asked_for_is_no_difference(converted: Convert) -> None:
    """A name that is nearly one of ours may be a slip, and is shown."""
    _, said, path = converted(AXOLOTL + "longalign: false\nsample_packin: false\n")
    assert "longalign" not in said and "longalign" in path.read_text() and "sample_packin" in said


def test_sizes_of_megatron_are_read(converted: Convert) -> None:
    sizes = (
        "tensor_model_parallel_size: 2\npipeline_model_parallel_size: 1\nsequence_parallel: true\n"
    )
    _, said, path = converted(LLAMA_FACTORY + "bf16: true\n" + sizes)
    assert "did you mean" not in said
    assert "parallelism_config_tp_size: 2" in path.with_suffix(".accelerate.yaml").read_text()


def test_the_method_of_a_v1_file_stands_on_its_command_line(
    converted: Convert, tmp_path: Path
) -> None:
    """llamafactory/v1/launcher.py: sft, dpo and rm are commands; none is a key of the file."""
    assert "the command names the method of such a file" in converted(V1)[1]
    assert "train_dataset" in refused(V1.replace("data/rows", "data/v1_dpo_demo"), tmp_path)
    assert "output_dir" in refused(V1 + "output_dir: outputs/test_rm\n", tmp_path)
    assert "a classifier" in refused(V1 + "model_class: cls\n", tmp_path)
    (tmp_path / "train_full_dpo.yaml").write_text(V1)
    with pytest.raises(UserError, match="the file's name"):
        convert_file(tmp_path / "train_full_dpo.yaml")
    (tmp_path / "plain.yaml").write_text(
        V1.replace("Qwen3-4B", "Qwen3-VL-4B-Instruct") + "model_class: other\n"
    )
    assert convert_file(tmp_path / "plain.yaml").image_family == "qwen3_vl"


def test_optimizers_that_decay_by_the_gradient_or_keep_master_weights_are_told_apart(
    converted: Convert,
) -> None:
    """torch.optim.Adam adds weight_decay to the gradient; Transformer Engine's FusedAdam decays as AdamW, on fp32 copies."""
    adam, said, _ = converted(AUTOMODEL.replace("torch.optim.AdamW", "torch.optim.Adam"))
    assert adam["optim"] == "adam" and "optimizer" not in said
    full = re.sub("peft: .*", "", AUTOMODEL)
    fused = full.replace(
        "torch.optim.AdamW", "te.pytorch.optimizers.fused_adam.FusedAdam, master_weights: true"
    )
    assert converted(full)[0]["dtype"] == "bfloat16"
    ours, _, _ = converted(fused)
    assert (ours["optim"], "dtype" in ours) == ("adamw_torch_fused", False)


def test_muon_scales_its_updates_as_the_tool_does(converted: Convert) -> None:
    """LLaMA-Factory's third_party/muon and axolotl-contribs-mit's Muon scale updates by 0.2 x the root of the larger size;
    the latter leaves out vectors, and under FSDP2 takes Microsoft's, which scales otherwise."""
    ours, said, _ = converted(
        LLAMA_FACTORY.replace("lora\n", "full\n") + "use_muon: true\nweight_decay: 0.1\n"
    )
    assert ours["optim"] == "muon" and "norms and biases are decayed too there" in said
    muon = AXOLOTL.replace("adamw_torch_fused", "muon").replace("adapter: lora\n", "")
    ours, said, _ = converted(muon)
    assert ours["optim"] == "muon" and "norms and biases are not trained there" in said
    assert "root of rows / columns" in converted(muon + "fsdp_config: {offload_params: false}\n")[1]
    assert "optimizer" not in converted(AXOLOTL.replace("adamw_torch_fused", "muon"))[1]
    with_dora = AXOLOTL.replace("adamw_torch_fused", "muon") + "peft_use_dora: true\n"
    assert "DoRA's magnitudes are not trained there" in converted(with_dora)[1]
    with_head = AXOLOTL.replace("adamw_torch_fused", "muon") + "lora_target_modules: [lm_head]\n"
    assert "the adapter of lm_head is trained by AdamW there" in converted(with_head)[1]
    assert "optim" not in converted(AUTOMODEL.replace("torch.optim.AdamW", "dion.Muon"))[0]


def test_streams_of_axolotl_name_their_column_and_a_pad_token_is_mentioned(
    converted: Convert,
) -> None:
    stream = (
        AXOLOTL
        + "pretraining_dataset: [{path: a/b, type: pretrain, text_column: body}]\nmax_steps: 10\n"
    )
    ours, _, path = converted(stream + "special_tokens: {pad_token: <pad>}\n")
    assert {"path": "a/b", "type": "text", "text_column": "body"} in ours["datasets"]
    assert "special_tokens.pad_token" in path.read_text()


def test_a_published_model_is_a_mixture_or_dense_by_its_own_config(
    converted: Convert, tmp_path: Path
) -> None:
    """MiMo-7B and Nemotron-3-Nano-4B are dense; the 30B of the latter has experts."""
    theirs = AXOLOTL.replace("NousResearch/Meta-Llama-3.1-8B", "{}").replace(
        "sample_packing: true", "sample_packing: false"
    )
    for name in ("nvidia/NVIDIA-Nemotron-3-Nano-4B-BF16", "XiaomiMiMo/MiMo-7B-Base"):
        assert converted(theirs.replace("{}", name))[0]["model_name_or_path"] == name
    nano = theirs.replace("{}", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16").replace(
        "adapter: lora", "adapter: qlora"
    )
    assert (
        "a mixture's experts are quantized here too" in converted(nano + "load_in_4bit: true\n")[1]
    )


def test_a_mixture_whose_config_is_at_hand_is_judged_by_it(
    converted: Convert, tmp_path: Path
) -> None:
    """Whatever its name says."""
    folder = tmp_path / "ling-mini-awq"
    folder.mkdir()
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 512,
        "num_local_experts": 4,
    }
    (folder / "config.json").write_text(json.dumps(sizes | {"model_type": "mixtral"}))
    ours, _, _ = converted(AXOLOTL.replace("NousResearch/Meta-Llama-3.1-8B", str(folder)))
    assert ours["model_name_or_path"] == str(folder)


def test_a_mixture_in_few_bits_is_converted_with_its_experts(
    converted: Convert, tmp_path: Path
) -> None:
    """Axolotl quantizes routed experts where `quantize_moe_experts` asks for it; here that is how a mixture is quantized."""
    theirs = AXOLOTL.replace("NousResearch/Meta-Llama-3.1-8B", "{}").replace(
        "adapter: lora", "adapter: qlora"
    )
    theirs += "load_in_4bit: true\n"
    glm = theirs.replace("{}", "zai-org/GLM-4.5-Air")
    ours, said, _ = converted(glm + "quantize_moe_experts: true\n")
    quantized = "a mixture's experts are quantized here too; there only linear layers are"
    assert ours["load_in_4bit"] is True and quantized not in said
    assert quantized in converted(glm)[1]
    named = theirs.replace("lora_target_linear: true", "lora_target_modules: [q_proj, o_proj]")
    flash = named.replace("{}", "zai-org/GLM-4.7-Flash")
    assert converted(flash)[0]["lora_target_modules"] == [
        "o_proj"
    ]  # its queries come out of a latent
    hybrid, said, _ = converted(theirs.replace("{}", "LiquidAI/LFM2-8B-A1B"))
    assert hybrid["packing"] is True  # each document starts with a new state
    dbrx = theirs.replace("{}", "LnL-AI/dbrx-base-converted-v2")
    assert "in few bits: quantized experts" in refused(dbrx, tmp_path)
    stored, said, _ = converted(theirs.replace("{}", "axolotl-quants/DeepSeek-V2.5-bnb-nf4-bf16"))
    assert "load_in_4bit" not in stored  # left to the files
    assert "the experts are in 4 bits there too, and dequantized here" in said


def test_keys_of_axolotls_schema_have_an_effect_a_line_or_a_refusal(converted: Convert) -> None:
    keys = "full_determinism: true\nlora_rank_pattern: {q_proj: 4}\nmin_sample_len: 10\ntiled_mlp: true\nuse_pose: true\n"
    ours, said, path = converted(
        AXOLOTL + keys + "chat_template: metharme\ncls_model_config: LlamaConfig\n"
    )
    assert ours["deterministic"] is True and ours["rank_pattern"] == {"q_proj": 4}
    assert (
        "min_sample_len: 10   (rows of any length" in said
        and "use_pose: true   (PoSE: not supported)" in said
    )
    assert (
        "tiled_mlp" not in said
        and "tiled_mlp" in path.read_text()
        and "not known here" not in said.replace("turns are not known", "")
    )
    assert "its turns are not known here; name a file for chat_template" in said


def test_torchtunes_phi4_and_the_files_of_its_tokenizer(converted: Convert) -> None:
    """Phi4Tokenizer.tokenize_messages ends an answer without a token unless add_eos, which its __call__ does not set."""
    theirs = TORCHTUNE.replace(
        "llama3.llama3_tokenizer", "phi4.phi4_tokenizer\n  vocab_path: v\n  merges_path: m"
    )
    ours, said, _ = converted(
        theirs.replace("fsdp_cpu_offload: true", "fsdp: {cpu_offload: false}")
    )
    assert (ours["chat_template"], ours["accelerate_config"]) == ("phi4", "fsdp_full_shard_auto")
    assert "no <|im_end|> follows an answer there" in said and "not known here" not in said


def test_losses_of_tokens_have_a_key(converted: Convert) -> None:
    """TRL's SFTConfig has dft beside nll; test_token_losses.py holds the losses to LLaMA-Factory's own functions."""
    assert converted(TRL + "loss_type: dft\n")[0]["token_loss"] == "dft"
    assert (
        converted(LLAMA_FACTORY + "use_dft_loss: true\neaft_alpha: 2.0\n")[0]["token_loss"] == "dft"
    )
    ours, said, _ = converted(AXOLOTL + "use_eaft: true\neaft_alpha: 0.5\neaft_k: 20\n")
    assert (ours["token_loss"], ours["eaft_alpha"]) == ("eaft", 0.5) and "eaft_k" not in said
    assert "20 likeliest" in converted(AXOLOTL + "use_eaft: true\neaft_k: 10\n")[1]


def test_a_row_that_is_cut_before_it_is_packed_is_listed(converted: Convert) -> None:
    """Muse Glimmer's file packs rows of at most 1024 tokens into 16384."""
    packed = AUTOMODEL.replace("split: train}", "split: train, seq_length: 1024, truncation: true}")
    ours, said, _ = converted(packed + "packed_sequence: {packed_sequence_size: 16384}\n")
    assert (ours["packing"], ours["max_length"]) == (
        True,
        16384,
    ) and "dataset.seq_length: 1024" in said


def test_what_a_schedule_and_a_decay_do_otherwise_is_said(converted: Convert) -> None:
    """Automodel's OptimizerParamScheduler begins at a tenth of the rate; torch's AdamW decays every parameter."""
    full = (
        re.sub("peft: .*", "", AUTOMODEL)
        + "lr_scheduler: {lr_decay_style: cosine, lr_warmup_steps: 5}\n"
    )
    _, said, _ = converted(full)
    assert (
        "from a tenth of the rate there" in said
        and "norms and biases are decayed too there" in said
    )
    _, said, _ = converted(
        AUTOMODEL
    )  # adapters are matrices alone, and no schedule is a constant rate
    assert "from a tenth of the rate" not in said and "decayed" not in said


def test_mixtures_that_are_published_in_fp8_or_mxfp4_are_read_as_they_are(
    converted: Convert,
) -> None:
    theirs = AXOLOTL.replace("NousResearch/Meta-Llama-3.1-8B", "{}")
    for name in (
        "openai/gpt-oss-20b",
        "deepseek-ai/DeepSeek-V3",
        "MiniMaxAI/MiniMax-M2",
        "Qwen/Qwen3-30B-A3B-FP8",
    ):
        assert converted(theirs.replace("{}", name))[0]["model_name_or_path"] == name
    sinks = AUTOMODEL.replace("org/model}", "openai/gpt-oss-20b, attn_implementation: sdpa}")
    assert (
        "attn_implementation" not in converted(sinks)[0]
    )  # transformers' gpt_oss: _supports_sdpa = False
    packed = AXOLOTL.replace("NousResearch/Meta-Llama-3.1-8B", "arcee-ai/Trinity-Nano-Preview")
    ours, _, _ = converted(f"{packed}sdp_attention: true\n")  # its mask is of whole rows
    assert ours["packing"] and "attn_implementation" not in ours


def test_automodels_lengths(converted: Convert) -> None:
    """Rows longer than a pack are dropped (drop_long_samples: true is its default); seq_length cuts where truncation asks for it."""
    packed = AUTOMODEL + "packed_sequence: {packed_sequence_size: 4096, max_packs: 104}\n"
    ours, said, _ = converted(packed)
    assert (ours["max_length"], ours["packing"], ours["overlength"]) == (4096, True, "drop")
    assert "packed_sequence.max_packs: 104   (all packed rows are trained on)" in said
    ours, _, _ = converted(
        packed.replace("max_packs: 104", "packing_strategy: neat, drop_long_samples: false")
    )
    assert ours["overlength"] == "error"
    long = AUTOMODEL.replace("split: train}", "split: train, seq_length: 1024}")
    ours, said, _ = converted(long)
    assert (ours["max_length"], ours["overlength"]) == (
        8192,
        "error",
    ) and "no limit of length there" in said
    for asked in ("true", "longest_first"):
        ours, said, _ = converted(
            long.replace("seq_length: 1024", f"seq_length: 1024, truncation: {asked}")
        )
        assert ours["max_length"] == 1024 and "overlength" not in ours


def test_what_automodels_own_classes_do_is_said(converted: Convert) -> None:
    mixture = AUTOMODEL.replace("org/model", "Qwen/Qwen3-30B-A3B")
    _, said, _ = converted(mixture)
    assert "the routers' auxiliary loss of the model's config is added there" in said
    _, said, _ = converted(mixture.replace("A3B}", "A3B, force_hf: true}"))
    assert "auxiliary loss" not in said
    ours, _, _ = converted(mixture.replace("A3B}", "A3B, router_aux_loss_coef: 1.0e-05}"))
    assert ours["router_aux_loss_coef"] == 1e-5
    without = AUTOMODEL.replace(
        "dim: 8", 'dim: 8, exclude_modules: ["*vision_tower*", "*.out_proj"]'
    )
    assert (
        "LoRA without some layers" in converted(without)[1]
        or "they get adapters here" in converted(without)[1]
    )
    nemotron = "nvidia/NVIDIA-Nemotron-Nano-9B-v2"
    _, said, _ = converted(without.replace("org/model", nemotron))
    assert "they get adapters here" not in said
    assert "gets no adapter here" not in said  # nor does it there
    _, said, _ = converted(AUTOMODEL.replace("org/model", nemotron))
    assert "out_proj of nemotron_h gets no adapter here" in said
    _, said, _ = converted(
        AUTOMODEL + "tokenizer: {add_bos_token: true, pretrained_model_name_or_path: org/model}\n"
    )
    assert "tokenizer.add_bos_token: true" not in said  # which is not read there


@pytest.mark.parametrize(
    ("given", "model", "targets"),
    [
        # the whole model's linear layers
        ("match_all_linear: true", "org/model", ["all-linear", "lm_head"]),
        ("target_modules: ['*']", "meta-llama/Llama-3.1-8B", ["all-linear", "lm_head"]),
        ("exclude_modules: ['lm_head']", "meta-llama/Llama-3.1-8B", "all-linear"),
        ("target_modules: '*_proj'", "meta-llama/Llama-3.1-8B", "all-linear"),
        # not dense, fc1 and fc2
        ("target_modules: '*_proj'", "microsoft/phi-2", ["k_proj", "q_proj", "v_proj"]),
        ("dropout: 0.0", "microsoft/phi-2", ["k_proj", "q_proj", "v_proj"]),  # the default
        ("target_modules: [q_proj]", "microsoft/phi-2", ["q_proj"]),
        ("target_modules: [q_proj, lm_head]", "microsoft/phi-2", ["q_proj", "lm_head"]),
    ],
)
def test_the_layers_that_automodel_adapts(
    converted: Convert, given: str, model: str, targets: object
) -> None:
    """Source: its ModuleMatcher."""
    theirs = AUTOMODEL.replace("match_all_linear: true", given).replace("org/model", model)
    ours, said, _ = converted(theirs)
    assert ours.get("lora_target_modules", "all-linear") == targets
    assert "adapters have the base's dtype" in said


def test_a_file_that_automodels_names_from_its_root_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "examples" / "convergence" / "tulu3"
    folder.mkdir(parents=True)
    (folder / "chat.jinja").write_text("{{ messages }}")
    chat = "components.datasets.llm.ChatDataset, path_or_dataset_id: org/rows, chat_template: examples/convergence/tulu3/chat.jinja"
    theirs = AUTOMODEL.replace(
        "components.datasets.llm.squad.make_squad_dataset, dataset_name: org/squad", chat
    )
    (folder / "theirs.yaml").write_text(theirs)
    assert convert_file(folder / "theirs.yaml").recipe["chat_template"] == str(
        folder / "chat.jinja"
    )


def test_a_constant_rate_has_no_minimum(converted: Convert) -> None:
    ours, _, _ = converted(
        AUTOMODEL + "lr_scheduler: {lr_decay_style: constant, lr_warmup_steps: 5, min_lr: 1.0e-6}\n"
    )
    assert ours["lr_scheduler_type"] == "constant" and "min_lr_ratio" not in ours


def test_a_file_of_automodels_without_checkpoints_at_epochs(converted: Convert) -> None:
    epochs = AUTOMODEL.replace("max_steps: 5", "num_epochs: 3")
    assert converted(epochs)[0]["save_strategy"] == "epoch"
    assert (
        "save_strategy"
        not in converted(
            epochs.replace("epochs: 3", "epochs: 3, save_checkpoint_every_epoch: false")
        )[0]
    )


def test_moments_in_fewer_bits(converted: Convert) -> None:
    ours, said, _ = converted(
        AXOLOTL.replace("optimizer: adamw_torch_fused", "optimizer: adamw_torch_4bit")
    )
    assert ours["optim"] == "adamw_8bit" and "moments in 4 bits there, in 8 bits here" in said
    adam = "optimizer: {_target_: transformer_engine.pytorch.optimizers.fused_adam.FusedAdam, exp_avg_dtype: torch.bfloat16, lr: 1.0e-4}"
    ours, _, _ = converted(
        AUTOMODEL.replace("optimizer: {_target_: torch.optim.AdamW, lr: 1.0e-4}", adam)
    )
    assert ours["optim"] == "adamw_bf16_moments"


@pytest.mark.parametrize("name", ["GaLore", "APOLLO", "BAdam"])
def test_an_optimizer_without_a_kept_library_is_refused_by_name(
    converted: Convert, name: str
) -> None:
    _, said, _ = converted(LLAMA_FACTORY + f"use_{name.lower()}: true\n{name.lower()}_rank: 8\n")
    assert f"use_{name.lower()}: true" in said and f"({name}: not supported)" in said


def test_the_turns_of_mistral_common(converted: Convert) -> None:
    theirs = AXOLOTL + "tokenizer_use_mistral_common: true\n"
    ours, _, _ = converted(
        theirs.replace("NousResearch/Meta-Llama-3.1-8B", "mistralai/Ministral-3-3B-Reasoning-2512")
    )
    assert ours["chat_template"] == "mistral-v13-tekken"
    _, said, _ = converted(theirs)
    assert "tokenizer_use_mistral_common: true   (the tokenizer's own template is used)" in said


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("Qwen/Qwen3.6-27B", "qwen3_5_text"),  # transformers loads both generations as qwen3_5
        ("Qwen/Qwen3-8B", "qwen3"),
        ("HuggingFaceTB/SmolLM-360M", "llama"),
        ("HuggingFaceTB/SmolLM3-3B-Base", "smollm3"),
        ("openbmb/MiniCPM5-1B", "llama"),  # its model card: "Standard LlamaForCausalLM"
        ("google/gemma-4-31B", "gemma4_text"),
        ("google/gemma-3n-E2B-it", "gemma3n_text"),
        ("ibm-granite/granite-4.0-tiny-preview", "granitemoehybrid"),
        ("mistralai/Devstral-2-123B-Instruct-2512", "ministral3"),
        ("mistralai/Ministral-8B-Instruct-2410", "mistral"),
    ],
)
def test_the_family_that_a_models_name_says(name: str, family: str) -> None:
    assert guess_family(name) == family


def test_gemma_3n_is_trained_on_text_and_images_and_refused_on_sound(converted: Convert) -> None:
    theirs = AXOLOTL.replace("NousResearch/Meta-Llama-3.1-8B", "google/gemma-3n-E2B-it")
    ours, _, _ = converted(theirs)
    assert ours["model_name_or_path"] == "google/gemma-3n-E2B-it"
    ours, said, _ = converted(theirs + "processor_type: AutoProcessor\n")
    assert ours["max_length"] == 4096 and UNKNOWN_IMAGES not in said
    with pytest.raises(AssertionError, match="a/text-audio-2k: audio: not supported"):
        converted(theirs.replace("tatsu-lab/alpaca", "a/text-audio-2k"))


COLUMNS = """
recipe: TrainFinetuneRecipeForNextTokenPrediction
model: {_target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained, pretrained_model_name_or_path: org/model}
dataset:
  _target_: nemo_automodel.components.datasets.llm.column_mapped_text_instruction_dataset.ColumnMappedTextInstructionDataset
  path_or_dataset_id: rows.jsonl
  column_mapping: {question: asked, answer: said}
"""


@pytest.mark.parametrize(
    ("more", "kind", "said"),
    [
        ("", "prompt_completion", "a space stands between prompt and answer there"),
        ("  use_hf_chat_template: true\n", "messages", "a system message without words there"),
    ],
)
def test_automodels_two_columns_are_plain_text_unless_a_template_is_asked_for(
    more: str, kind: str, said: str, converted: Convert
) -> None:
    """nemo-automodel 0.7, ColumnMappedTextInstructionDataset._apply_tokenizer."""
    ours, output, _ = converted(COLUMNS + more)
    assert ours["datasets"] == [
        {"path": "rows.jsonl", "type": kind, "prompt_column": "asked", "completion_column": "said"}
    ]
    assert said in output


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (
            AXOLOTL.replace("NousResearch/Meta-Llama-3.1-8B", "deepseek-ai/DeepSeek-V2-Lite")
            + "trust_remote_code: true\n",
            "adds a loss for the routers' balance",
        ),
        (TORCHTUNE + "max_steps_per_epoch: 50\n", "an epoch that is shorter ends there"),
        (
            TRL.replace("dataset_name: ", "datasets:\n  - fraction: 0.3\n    path: "),
            "the first rows of each",
        ),
    ],
)
def test_what_only_the_tools_source_says_is_listed(
    theirs: str, said: str, converted: Convert
) -> None:
    assert said in converted(theirs)[1].partition("Worth a look")[0]


def test_what_asks_for_what_is_always_done_is_no_difference(converted: Convert) -> None:
    ours, said, _ = converted(
        AUTOMODEL
        + "neftune: {noise_alpha: 5.0}\nmoe_metrics: {enabled: true}\noffload_teacher_model: false\n"
    )
    assert ours["neftune_noise_alpha"] == 5.0 and "not known here" not in said
    assert "not known here" not in converted(TRL + "average_tokens_across_devices: true\n")[1]


def test_a_hybrid_is_refused_only_where_its_code_is_its_own(
    converted: Convert, tmp_path: Path
) -> None:
    for name in (
        "ai21labs/Jamba-v0.1",
        "Zyphra/Zamba2-1.2B",
        "tiiuae/falcon-mamba-7b",
        "Qwen/Qwen3.5-4B",
    ):
        theirs = AXOLOTL.replace("NousResearch/Meta-Llama-3.1-8B", name)
        assert converted(theirs)[0]["model_name_or_path"] == name
    theirs = AXOLOTL.replace("NousResearch/Meta-Llama-3.1-8B", "nvidia/Nemotron-Flash-1B")
    assert "hybrid or linear attention: not supported" in refused(theirs, tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            AUTOMODEL + "method: 500\n",
            "not converted; the recipe would be wrong: the recipe: method: 500 does not fit",
        ),
        (
            AXOLOTL + "optim: ours\n",
            'not converted; the recipe would be wrong: the recipe: optim: "ours" does not fit',
        ),
        (
            TORCHTUNE.replace("source: org/pairs", "data_files: []"),
            "names no source; set it to a file or hub name",
        ),
    ],
)
def test_our_own_key_with_a_value_that_is_none_and_a_data_set_of_no_file_are_one_sentence(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "theirs.yaml"
    source.write_text(text)
    assert main(["convert", str(source)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and said in lines[0], lines


@pytest.mark.parametrize(
    ("first", "model", "cause"),
    [
        ("recipe: TrainBiEncoderRecipe\n", "BiEncoder", "retrieval, for which Automodel's models"),
        ("recipe: TrainCrossEncoderRecipe\n", "CrossEncoder", "reranking, for which Automodel's"),
        ("", "ForBiencoder", "retrieval, for which Automodel's models attend in both directions"),
    ],
    ids=["bi-encoder", "cross-encoder", "no recipe"],
)
def test_automodels_retrieval_is_refused_with_its_reason(
    first: str, model: str, cause: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As examples/retrieval and examples/biencoder of its repository have them."""
    path = tmp_path / "theirs.yaml"
    path.write_text(
        f"{first}temperature: 0.02\nmodel:\n"
        f"  _target_: nemo_automodel.NeMoAutoModel{model}.from_pretrained\n"
        "  pretrained_model_name_or_path: meta-llama/Llama-3.2-1B\n  pooling: avg\n"
        "dataloader:\n  dataset:\n"
        "    _target_: nemo_automodel.components.datasets.llm.make_retrieval_dataset\n"
        "    data_dir_list: [train.json]\n"
    )
    assert main(["convert", str(path)]) == 2
    assert cause in capsys.readouterr().err


def test_axolotls_mean_over_processes_is_said(converted: Convert) -> None:
    """core/builders/base.py sets average_tokens_across_devices = False for its trainer of answers."""
    _, said, _ = converted(AXOLOTL)
    assert "on several processes the mean of each over its labels counts alike there" in said


SMALL_AXOLOTL = "base_model: Qwen/Qwen3-0.6B\ndatasets:\n- {path: a/rows, type: chat_template}\n"


@pytest.mark.parametrize(
    ("model", "data"),
    [
        ("Qwen/Qwen3-0.6B", "a/text-audio-2k"),  # a model that takes no sound
        ("google/gemma-3n-E2B-it", "a/audiobooks"),  # words about it
    ],
)
def test_rows_about_sound_are_rows(model: str, data: str, converted: Convert) -> None:
    theirs = SMALL_AXOLOTL.replace("Qwen/Qwen3-0.6B", model).replace("a/rows", data)
    recipe, _, _ = converted(theirs)
    assert recipe["datasets"] == [{"path": data}]


@pytest.mark.parametrize("value", ["offload", "offload_disk"])
def test_checkpoints_that_are_offloaded_are_offloaded_here(value: str, converted: Convert) -> None:
    recipe, text, _ = converted(SMALL_AXOLOTL + f"bf16: true\ngradient_checkpointing: {value}\n")
    assert recipe["activation_offload"] is True
    assert recipe["accelerate_config"] == "ddp_checkpointing"
    assert "activation_offload: to host memory" in text


@pytest.mark.parametrize(
    ("theirs", "kept", "line"),
    [
        ("use_wandb: true\nuse_mlflow: true\n", "mlflow", "report_to: wandb   (a run reports to mlflow alone"),
        ("wandb_project: mine\nuse_comet: true\n", "wandb", "report_to: comet   (a run reports to wandb alone"),
        ("use_swanlab: true\n", None, "report_to: swanlab   (a run knows none of these"),
        ("use_wandb: false\nuse_tensorboard: true\n", "tensorboard", None),
    ],
)  # fmt: skip
def test_a_tracker_that_is_not_reported_to_is_named(
    theirs: str, kept: str | None, line: str | None, converted: Convert
) -> None:
    recipe, text, _ = converted(SMALL_AXOLOTL + theirs)
    assert recipe.get("report_to") == kept
    if line is None:
        assert "report_to: wandb" not in text
    else:
        assert line in text


def test_a_family_of_layers_with_a_state_is_not_packed(converted: Convert) -> None:
    """Its name says so, where its config.json is not at hand."""
    theirs = SMALL_AXOLOTL.replace("Qwen/Qwen3-0.6B", "a/Qwen3.8-Flash-Next")
    recipe, text, _ = converted(theirs + "sample_packing: true\nattn_implementation: sdpa\n")
    assert recipe["packing"] is False
    assert "packing: false   (a/Qwen3.8-Flash-Next: qwen4_exp_text has linear_attention" in text


def test_a_layer_that_the_code_passes_by_says_so(converted: Convert) -> None:
    theirs = SMALL_AXOLOTL.replace("Qwen/Qwen3-0.6B", "ai21labs/AI21-Jamba-1.5-Mini")
    _, text, _ = converted(theirs + "adapter: lora\nlora_target_linear: true\n")
    assert "dt_proj of jamba gets no adapter here: transformers reads its weight" in text


OFT = "model_name_or_path: Qwen/Qwen3-0.6B\nstage: sft\ndo_train: true\nfinetuning_type: oft\ndataset: rows\n"


@pytest.mark.parametrize(
    ("theirs", "block", "targets"),
    [
        ("", 32, None),  # LLaMA-Factory's default
        ("oft_block_size: 16\nlora_target: q_proj,v_proj\n", 16, ["q_proj", "v_proj"]),
        ("oft_target: q_proj\n", 32, None),  # which nothing there reads
    ],
)
def test_rotations_of_llama_factory_are_rotations(
    theirs: str, block: int, targets: list[str] | None, tmp_path: Path
) -> None:
    (tmp_path / "theirs.yaml").write_text(OFT + theirs)
    conversion = convert_file(tmp_path / "theirs.yaml")
    recipe = conversion.recipe
    assert recipe["use_peft"] is True and recipe["oft_block_size"] == block
    assert recipe.get("lora_target_modules") == targets
    assert not {"lora_r", "lora_alpha", "lora_dropout"} & recipe.keys()
    assert not conversion.missing_capabilities


@pytest.mark.parametrize("theirs", ["oft_rank: 4\n", "module_dropout: 0.1\n"])
def test_rotations_of_another_kind_are_said_to_be_missing(theirs: str, tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text(OFT + theirs)
    assert any(
        "OFT" in cause for cause in convert_file(tmp_path / "theirs.yaml").missing_capabilities
    )


LORA = "adapter: lora\nlora_target_linear: true\n"


@pytest.mark.parametrize(
    ("key", "theirs"),
    [
        ("optimizer", SMALL_AXOLOTL + "optimizer: NAME\n"),
        (
            "optimizer",
            SMALL_AXOLOTL + LORA + "lora_modules_to_save: [embed_tokens]\noptimizer: NAME\n",
        ),
        (
            "optim",
            LLAMA_FACTORY.replace("finetuning_type: lora", "finetuning_type: full\noptim: NAME"),
        ),
        ("optim", TRL.replace("use_peft: true", "optim: NAME")),
    ],
)
def test_the_embeddings_moments_of_trainer_are_said(
    converted: Convert, key: str, theirs: str
) -> None:
    """Source: Trainer.create_optimizer of transformers, register_module_override(module, "weight", {"optim_bits": 32})."""
    line = f'#   {key}: "adamw_bnb_8bit"   (the embedding\'s moments are in 32 bits there)'
    text = converted(theirs.replace("NAME", "adamw_bnb_8bit"))[2].read_text()
    assert line in text
    frozen = converted(SMALL_AXOLOTL + LORA + "optimizer: adamw_bnb_8bit\n")[2].read_text()
    assert line not in frozen
    assert "32 bits there" not in converted(theirs.replace("NAME", "adamw_torch_8bit"))[1]


def test_modules_that_axolotl_trains_whole_have_the_bases_dtype(converted: Convert) -> None:
    """peft's cast_adapter_dtype leaves modules_to_save as they are."""
    copies = SMALL_AXOLOTL + LORA + "lora_modules_to_save: [lm_head]\n"
    line = 'lora_modules_to_save: ["lm_head"]   (trained in bfloat16 there'
    assert line in converted(copies + "bf16: auto\n")[1]
    assert "trained in bfloat16" not in converted(copies)[1]


ENDS_EARLIER = "the run ends up to a step an epoch earlier there"


def test_how_an_epoch_ends_is_said(converted: Convert) -> None:
    """Source: drop_last=True in torchtune's recipes, calculate_total_num_steps of Axolotl; TRL trains the last batch."""
    left_out = "rows that fill no step are left out there"
    assert left_out in converted(TORCHTUNE)[1]
    assert left_out not in converted(TORCHTUNE + "max_steps_per_epoch: 10\n")[1]
    assert ENDS_EARLIER in converted(SMALL_AXOLOTL + "num_epochs: 3\n")[1]
    assert ENDS_EARLIER in converted(SMALL_AXOLOTL + "sample_packing: true\n")[1]
    assert ENDS_EARLIER not in converted(SMALL_AXOLOTL)[1]  # ceil(rows / batch), as here
    assert ENDS_EARLIER not in converted(SMALL_AXOLOTL + "num_epochs: 3\nmax_steps: 10\n")[1]
    said = converted(TRL)[1]
    assert left_out not in said and ENDS_EARLIER not in said


def test_rows_that_share_a_step_by_their_length_are_said(converted: Convert) -> None:
    assert ALIKE in converted(SMALL_AXOLOTL)[1]
    assert ALIKE not in converted(SMALL_AXOLOTL + "sample_packing: true\n")[1]
    assert ALIKE not in converted(SMALL_AXOLOTL + "group_by_length: true\n")[1]
    assert ALIKE in converted(TRL.replace("packing: true", "packing: false"))[1]
    grouped = "packing: false\ntrain_sampling_strategy: group_by_length"
    assert ALIKE not in converted(TRL.replace("packing: true", grouped))[1]
    assert ALIKE in converted(AUTOMODEL)[1]
    for asked in ("shuffle: false", "group_by_length: true"):
        assert ALIKE not in converted(f"{AUTOMODEL}dataloader: {{{asked}}}\n")[1]


def test_a_line_break_that_is_trained_here_too_is_not_said_to_be_trained_there(
    converted: Convert,
) -> None:
    chatml = LLAMA_FACTORY.replace("template: llama3", "template: qwen3_nothink")
    note = "the line break after an answer is trained too there"
    assert note not in converted(chatml)[1]  # train_on_prompt: true
    assert note in converted(chatml.replace("train_on_prompt: true\n", ""))[1]


def test_weights_that_axolotl_keeps_in_float32_are_said(converted: Convert) -> None:
    """Source: _configure_embedding_dtypes of its loaders/model.py."""
    note = "the embedding, the output head and norms are in float32 there"
    full = SMALL_AXOLOTL + "bf16: true\n"
    assert note in converted(full)[1]
    assert note in converted(full + "attn_implementation: sdpa\n")[1]
    for cast in (
        "attn_implementation: flash_attention_2",
        "flash_attention: true",
        "cut_cross_entropy: true",
        "fsdp_config: {reshard_after_forward: true}",
        LORA.strip(),
    ):
        assert note not in converted(f"{full}{cast}\n")[1], cast
