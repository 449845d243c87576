"""What a file means to the newest version of its tool, and where an older one reads it otherwise."""

from collections.abc import Callable
from pathlib import Path

import pytest
import transformers
import yaml

from finetune.convert.by_tool import (
    APART_IN_21,
    BEST_AT_END,
    EACH_IN_19,
    MICRO_BATCHES_ALIKE,
    NORMS_IN_FP32,
    RANKS_ALIKE,
    ROUTERS_IN_FP32,
    STATE_PASSED_ON,
    TWO_STEPS,
)
from finetune.convert.conversion import convert_file
from finetune.convert.model_names import ONE_TEXT, OWN_THOUGHT, THOUGHT_OF_IMAGES
from finetune.convert.objectives import DIVIDED_TWICE, PROMPTS_WERE_CUT
from finetune.convert.value_conversion import Conversion

Convert = Callable[..., Conversion]
AXOLOTL = {
    "base_model": "Qwen/Qwen3-8B",
    "datasets": [{"path": "a/rows", "type": "chat_template"}],
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 4,
    "learning_rate": 1e-5,
    "bf16": True,
    "attn_implementation": "flash_attention_2",
}
FACTORY = {
    "model_name_or_path": "Qwen/Qwen3-VL-8B-Instruct",
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "full",
    "dataset": "rows",
    "template": "qwen3_vl",
    "bf16": True,
}


@pytest.fixture
def convert(tmp_path: Path) -> Convert:
    """Converts a file of some keys; `text` stands before them."""

    def made(file: dict[str, object], text: str = "", **keys: object) -> Conversion:
        path = tmp_path / "theirs.yaml"
        path.write_text(text + yaml.safe_dump(file | keys))
        return convert_file(path)

    return made


def said(conversion: Conversion) -> str:
    return "\n".join([*conversion.differences, *conversion.remarks])


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [
        ({"fsdp_version": 2, "fsdp_config": {"offload_params": False}}, "bfloat16"),
        ({"fsdp_config": {"fsdp_version": 2, "offload_params": False}}, "bfloat16"),
        ({"fsdp_config": {"offload_params": False}}, "bfloat16"),  # 0.21 has no other version
        ({"fsdp_version": 1, "fsdp_config": {"offload_params": False}}, None),
        ({"fsdp": ["full_shard"], "fsdp_config": {"offload_params": False}}, None),
        ({"fsdp": ["full_shard"], "fsdp_config": {"fsdp_version": 2}}, "bfloat16"),
    ],
)
def test_the_version_of_axolotls_fsdp_decides_the_dtype_of_weights(
    keys: dict[str, object], dtype: str | None, convert: Convert
) -> None:
    assert convert(AXOLOTL, **keys).recipe.get("dtype") == dtype


@pytest.mark.parametrize(
    ("model", "own_class"),
    [
        ("google/gemma-3-12b-it", "Gemma3ForConditionalGeneration"),
        ("google/gemma-4-31B", "Gemma4ForConditionalGeneration"),
        ("Qwen/Qwen3.5-27B", "Qwen3_5ForConditionalGeneration"),
        ("meta-llama/Llama-4-Scout-17B-16E", "Llama4ForConditionalGeneration"),
        ("google/gemma-3-1b-it", "Gemma3ForCausalLM"),
        ("Qwen/Qwen3-8B", "Qwen3ForCausalLM"),
    ],
)
def test_a_class_that_takes_no_count_of_labels_averages_each_micro_batch(
    model: str, own_class: str, convert: Convert
) -> None:
    """Axolotl loads a model with a tower as such for text too, and Trainer asks its class."""
    takes_count = getattr(getattr(transformers, own_class), "accepts_loss_kwargs", True)
    remarks = convert(AXOLOTL, base_model=model).remarks
    assert (MICRO_BATCHES_ALIKE in remarks) == (not takes_count)
    assert (RANKS_ALIKE.format(EACH_IN_19) in remarks) == takes_count
    weighted = convert(AXOLOTL, base_model=model, use_dft=True).remarks
    assert RANKS_ALIKE.format("") in weighted and MICRO_BATCHES_ALIKE not in weighted


@pytest.mark.parametrize("model", ["Qwen/Qwen3.5-9B", "Qwen/Qwen3-8B"])
def test_the_trainer_of_trl_asks_the_class_too(model: str, convert: Convert) -> None:
    file = {"model_name_or_path": model, "dataset_name": "a/rows", "max_length": 1024}
    assert (MICRO_BATCHES_ALIKE in convert(file).remarks) == (model == "Qwen/Qwen3.5-9B")


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ("LiquidAI/LFM2-350M", APART_IN_21),
        ("ai21labs/AI21-Jamba-Mini-1.5", STATE_PASSED_ON),
        ("Qwen/Qwen3-8B", None),
    ],
)
def test_states_between_packed_documents_are_said_by_version(
    model: str, line: str | None, convert: Convert
) -> None:
    text = said(convert(AXOLOTL, base_model=model, sample_packing=True))
    assert [each for each in (APART_IN_21, STATE_PASSED_ON) if each in text] == [line] * bool(line)


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"base_model": "Qwen/Qwen3-30B-A3B"}, ROUTERS_IN_FP32),
        ({"base_model": "Qwen/Qwen3-30B-A3B", "fsdp_config": {"offload_params": False}}, None),
        ({"base_model": "openai/gpt-oss-20b"}, None),  # whose routers have another name
        ({"fp32_norms": True}, NORMS_IN_FP32),
        ({"fp32_norms": True, "adapter": "lora"}, None),  # which trains none
        ({}, None),
    ],
)
def test_weights_that_axolotl_keeps_in_float32_are_named(
    keys: dict[str, object], line: str | None, convert: Convert
) -> None:
    text = said(convert(AXOLOTL, **keys))
    assert [each for each in (ROUTERS_IN_FP32, NORMS_IN_FP32) if each in text] == [line] * bool(
        line
    )


def test_a_run_that_stops_early_keeps_its_best_checkpoint(convert: Convert) -> None:
    held_out = {"val_set_size": 0.1, "eval_steps": 10, "save_steps": 10}
    patient = convert(AXOLOTL, **held_out, early_stopping_patience=3)
    assert patient.recipe["keep_best_checkpoint"] is True
    assert BEST_AT_END in said(patient)
    assert "keep_best_checkpoint" not in convert(AXOLOTL, **held_out).recipe


@pytest.mark.parametrize(("theirs", "ours"), [(0, 0), (1, 2), (2, 2), (10, 10)])
def test_a_warm_up_of_one_step_is_one_of_two(theirs: int, ours: int, convert: Convert) -> None:
    made = convert(AXOLOTL, warmup_steps=theirs)
    assert made.recipe["warmup_steps"] == ours
    assert (TWO_STEPS in said(made)) == (theirs == 1)


def test_a_share_of_a_data_set_is_said(convert: Convert) -> None:
    rows = [{"path": "a/rows", "type": "chat_template", "weight": 0.5}]
    assert "datasets[0].weight: 0.5   (a share of the rows" in said(convert(AXOLOTL, datasets=rows))


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ("zai-org/GLM-4.5-Air", OWN_THOUGHT),
        ("Qwen/Qwen3-8B", ONE_TEXT),
        ("Qwen/Qwen3-4B-Instruct-2507", None),
        ("zai-org/GLM-5", OWN_THOUGHT),
        ("meta-llama/Llama-3.1-8B-Instruct", None),
    ],
)
def test_the_thought_of_a_tokenizers_own_template_is_said(
    model: str, line: str | None, convert: Convert
) -> None:
    text = said(convert(AXOLOTL, base_model=model))
    assert [each for each in (OWN_THOUGHT, ONE_TEXT) if each in text] == [line] * bool(line)
    named = said(convert(AXOLOTL, base_model=model, chat_template="chatml"))
    assert OWN_THOUGHT not in named and ONE_TEXT not in named


@pytest.mark.parametrize(("template", "thinks"), [("qwen3_vl", True), ("qwen3_vl_nothink", False)])
def test_a_template_of_images_with_thoughts_says_so(
    template: str, thinks: bool, convert: Convert
) -> None:
    assert (THOUGHT_OF_IMAGES in said(convert(FACTORY, template=template))) == thinks


@pytest.mark.parametrize(
    ("comment", "layout"),
    [
        ("", "ddp_checkpointing"),
        ("# accelerate launch \\\n#   --config_file a/fsdp2_config.yaml \\\n", "fsdp_full_shard_auto"),
        ("# accelerate launch --config_file a/fsdp_config_offload.yaml\n", "fsdp_cpu_offload"),
    ],
)  # fmt: skip
def test_the_launch_in_a_comment_says_the_layout(
    comment: str, layout: str, convert: Convert
) -> None:
    assert convert(FACTORY, comment).recipe["accelerate_config"] == layout


TUNE = {
    "tokenizer": {"_component_": "torchtune.models.llama2.llama2_tokenizer"},
    "checkpointer": {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_dir": "codellama/CodeLlama-7b-hf",
    },
    "dataset": {"_component_": "torchtune.datasets.alpaca_dataset"},
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-5},
}


@pytest.mark.parametrize("builder", ["code_llama2_7b", "lora_code_llama2_7b"])
def test_torchtunes_adapted_code_llama_has_another_base_of_positions(
    builder: str, convert: Convert
) -> None:
    model = {"_component_": f"torchtune.models.code_llama2.{builder}"}
    differs = "positions are rotated by a base of 10000" in said(convert(TUNE, model=model))
    assert differs == builder.startswith("lora")


def test_gradients_of_early_exits_are_divided_by_the_ranks_there(convert: Convert) -> None:
    model = {"_component_": "torchtune.models.llama2.llama2_7b"}
    exits = {"layers": "0::4", "scale_fn": "torchtune.modules.early_exit_loss.uniform_loss_scale"}
    assert DIVIDED_TWICE in said(convert(TUNE, model=model, early_exit_loss=exits))
    assert DIVIDED_TWICE not in said(convert(TUNE, model=model))


@pytest.mark.parametrize(("keys", "cut"), [({}, True), ({"max_prompt_length": 256}, False)])
def test_prompts_that_older_versions_of_trl_cut_are_said(
    keys: dict[str, object], cut: bool, convert: Convert
) -> None:
    file = {"model_name_or_path": "org/model", "dataset_name": "org/pairs", "beta": 0.1}
    assert (PROMPTS_WERE_CUT in said(convert(file | {"loss_type": "sigmoid"}, **keys))) == cut


@pytest.mark.parametrize("family", ["phi3", "llama2"])
def test_the_end_of_a_row_that_is_trained_whole_is_said(family: str, convert: Convert) -> None:
    names = {"phi3": "phi3.phi3_mini_tokenizer", "llama2": "llama2.llama2_tokenizer"}
    tokenizer = {"_component_": f"torchtune.models.{names[family]}"}
    model = {"_component_": f"torchtune.models.{family}.one_7b"}
    text = said(convert(TUNE, model=model, tokenizer=tokenizer))
    assert ("the EOS token after the last answer is trained too here" in text) == (family == "phi3")
