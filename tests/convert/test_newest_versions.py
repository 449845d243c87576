"""What a file means to the newest version of its tool, and where an older one reads it otherwise."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Split
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
from transformers.models.phi3.configuration_phi3 import Phi3Config
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from finetune.config.facts import has_fused_experts, read_family_source
from finetune.config.families import IMAGE_FAMILIES
from finetune.convert.axolotl import (
    ANSWERS_FOUND,
    APART_IN_21,
    BEST_ON_STEPS,
    EACH_IN_19,
    EMBEDDINGS_SPARED,
    FIRST_FIT,
    LONG_DROPPED,
    LONG_KEPT,
    MAMBA_SSM,
    RANKS_ALIKE,
    STATE_PASSED_ON,
    TWO_STEPS,
    UNCOUNTED_BY_LIGER,
)
from finetune.convert.base_model import CHATML_ADDED, TEMPLATE_CLONED
from finetune.convert.by_tool import (
    EMBEDDING_MOMENTS,
    HEAD_PASSED_BY,
    ROUNDED_DOWN,
    ROUTERS_IN_FP32,
    ROWS_BY_LENGTH,
    SMALL_MOMENTS,
    STEPS_OF_EPOCHS,
    WHOLE_STEPS_COUNTED,
)
from finetune.convert.by_value import ONE_AFTER_ANOTHER, STREAM_IN_ORDER
from finetune.convert.chat_templates import (
    BREAK_TRAINED,
    COMMON_TURNS_OF_IMAGES,
    ENDED_BEFORE,
    ENDS_ADDED,
    MAYBE_SCORED_EOS,
    OF_PHI3,
    OF_PHI4,
    ONE_TEXT,
    OWN_SYSTEM,
    OWN_THOUGHT,
    SCORED_BREAK,
    SCORED_QUESTION,
    THOUGHT,
    THOUGHT_OF_IMAGES,
    THOUGHT_WHOLE,
    THOUGHTS_LEFT_OUT,
    TOKENIZERS_BOS,
    TOOLS_IN_ITS_WORDS,
)
from finetune.convert.conversion import REDUCED_ALONE, REDUCED_IN_16_BITS
from finetune.convert.datasets import DRAWN_BY_WEIGHTS, OF_CHATS, OF_OPENAI, STARTS_TWICE
from finetune.convert.defaults import BUILDERS_LIMIT_NOTE
from finetune.convert.factory import (
    BRIDGES_ROWS,
    END_AS_PADDING,
    ENDS_OF_LLAMA,
    FEWER_ROWS,
    FP8_UNDER_4,
    FUSED_ADAPTERS,
    LEFT_OVER,
    MEGATRONS_FILES,
    NO_THOUGHT,
    NOW_A_COSINE,
)
from finetune.convert.image_models import (
    COLUMN_REFUSED,
    GLM_IMAGES,
    GLM_MARKS,
    IMAGES_OF_COLUMN,
    MARKED_IMAGES,
    MARKS_TRAINED,
    TOKENIZERS_BOS_OF_IMAGES,
)
from finetune.convert.numbers import LABEL_BEHIND_CUT
from finetune.convert.objectives import (
    ANSWERS_SLICED,
    COMPLETIONS_BREAK,
    CUT_BY_PARTS,
    CUT_BY_PARTS_THERE,
    DIVIDED_TWICE,
    PROMPT_CUT_ALONE,
    PROMPTS_WERE_CUT,
    SIDES_WERE_CUT,
    TEMPLATE_OF_TRL,
    WAS_CUT_BY_PARTS,
)
from finetune.convert.runnable import MORE_ROWS
from finetune.convert.shared import (
    BEST_AT_END,
    EXPERTS_UNDER_4,
    IN_ORDER,
    MICRO_BATCHES_ALIKE,
    NORMS_IN_FP32,
    PACKED_AT_A_TIME,
    PACKED_IN_ORDER,
    ROTATED_WHOLE,
    SUMMED_IN_16_BITS,
    UNMULTIPLIED,
    WHOLE_STEPS,
)
from finetune.convert.torchtune import (
    EXPERTS_UNADAPTED,
    MERGED_DEQUANTIZED,
    NO_DORA_SAVED,
    OWN_FORMAT,
    QWENS_IN_16_BITS,
    ROWS_REORDERED,
    STOPS_BOTH,
)
from finetune.convert.trained_layers import AUXILIARY, BY_LAYER
from finetune.optim.optimizers import adamw_8bit_moments
from tests.convert.conftest import Convert, said

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
        ("google/gemma-4-12B-it", "Gemma4UnifiedForConditionalGeneration"),
        ("Qwen/Qwen3.5-27B", "Qwen3_5ForConditionalGeneration"),
        ("Qwen/Qwen3.8-Flash-Next", "Qwen4ExpForConditionalGeneration"),
        ("zai-org/GLM-5.3-Flash", "Glm5NextForConditionalGeneration"),
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
    takes_count |= "gemma-4" in model  # patch_gemma4_accepts_loss_kwargs
    remarks = convert(AXOLOTL, base_model=model).remarks
    assert (MICRO_BATCHES_ALIKE in remarks) == (not takes_count)
    assert (RANKS_ALIKE.format(EACH_IN_19) in remarks) == takes_count
    weighted = convert(AXOLOTL, base_model=model, use_dft=True).remarks
    assert RANKS_ALIKE.format("") in weighted and MICRO_BATCHES_ALIKE not in weighted


@pytest.mark.parametrize(
    "keys",
    [
        {"rl": "dpo", "datasets": [{"path": "a/pairs", "type": "chat_template.default"}]},
        {"reward_model": True, "datasets": [{"path": "a/pairs", "type": "bradley_terry.chat_template"}]},
    ],
)  # fmt: skip
def test_a_trainer_of_pairs_has_no_mean_over_labels(
    keys: dict[str, object], convert: Convert
) -> None:
    assert "over its labels" not in said(convert(AXOLOTL, **keys))


@pytest.mark.parametrize("model", ["Qwen/Qwen3.5-9B", "Qwen/Qwen3-8B"])
def test_the_trainer_of_trl_asks_the_class_too(model: str, convert: Convert) -> None:
    file = {"model_name_or_path": model, "dataset_name": "a/rows", "max_length": 1024}
    assert (MICRO_BATCHES_ALIKE in convert(file).remarks) == (model == "Qwen/Qwen3.5-9B")


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ("LiquidAI/LFM2-350M", APART_IN_21),
        ("ibm-ai-platform/Bamba-9B-v2", APART_IN_21),
        ("moonshotai/Kimi-Linear-48B-A3B-Instruct", None),  # which 0.19 cannot load
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
        ({"base_model": "zai-org/GLM-4.5-Air"}, ROUTERS_IN_FP32),
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


@pytest.mark.parametrize(
    ("keys", "lines"),
    [
        ({"warmup_ratio": 0.1, "max_steps": 5}, [ROUNDED_DOWN.format(STEPS_OF_EPOCHS)]),
        ({"warmup_ratio": 0.1, "num_epochs": 1}, [ROUNDED_DOWN.format("")]),
        # whose rows are not counted
        ({"warmup_ratio": 0.1, "max_steps": 5, "streaming": True}, [ROUNDED_DOWN.format("")]),
        (
            {"warmup_ratio": 0.1, "max_steps": 5, "pretraining_dataset": [{"path": "a/texts"}]},
            [ROUNDED_DOWN.format("")],
        ),
        ({"warmup_ratio": 0.1, "num_epochs": 2}, [WHOLE_STEPS_COUNTED, ROUNDED_DOWN.format("")]),
        ({"warmup_steps": 10, "num_epochs": 1}, []),
        ({"warmup_ratio": 0.1, "lr_scheduler": "constant"}, []),
    ],
)
def test_how_axolotl_rounds_a_warm_ups_share_is_said(
    keys: dict[str, object], lines: list[str], convert: Convert
) -> None:
    made = convert(AXOLOTL, **keys)
    assert [
        line for line in made.remarks if "rounded down" in line or line == WHOLE_STEPS_COUNTED
    ] == lines


@pytest.mark.parametrize(
    ("keys", "is_kept"),
    [
        ({"eval_steps": 10, "save_steps": 20}, True),
        ({"evals_per_epoch": 4, "saves_per_epoch": 2}, True),
        ({"eval_steps": 30, "save_steps": 100}, False),
        ({"eval_steps": 30}, False),
    ],
)
def test_axolotl_keeps_the_best_checkpoint_where_its_saves_are_evaluated(
    keys: dict[str, object], is_kept: bool, convert: Convert
) -> None:
    made = convert(AXOLOTL, val_set_size=0.1, load_best_model_at_end=True, **keys)
    assert made.recipe.get("keep_best_checkpoint", False) == is_kept
    assert (BEST_ON_STEPS in said(made)) != is_kept
    assert (BEST_AT_END in said(made)) == is_kept


@pytest.mark.parametrize(
    ("keys", "are_in_32_bits"),
    [
        ({}, True),
        ({"unfrozen_parameters": ["model.layers.[0-7]."]}, False),
        ({"unfrozen_parameters": ["model.embed_tokens"]}, True),
        ({"deepspeed": "deepspeed_configs/zero2.json"}, False),
        ({"adapter": "lora", "lora_r": 8, "lora_alpha": 8}, False),
    ],
)
def test_moments_in_32_bits_are_those_of_an_embedding_that_is_trained_as_such(
    keys: dict[str, object], are_in_32_bits: bool, convert: Convert
) -> None:
    text = said(convert(AXOLOTL, optimizer="adamw_bnb_8bit", **keys))
    assert (EMBEDDING_MOMENTS in text) == are_in_32_bits


def test_torchao_keeps_the_moments_of_small_tensors_in_the_dtype_of_the_weights() -> None:
    """Through `_new_buffer` of its AdamW8bit, and of ours, which is made of it."""
    optim = pytest.importorskip("torchao.optim")
    norm = torch.nn.Parameter(torch.ones(2048, dtype=torch.bfloat16))
    classes: list[Any] = [optim.AdamW8bit, adamw_8bit_moments()]
    made = [each([norm])._new_buffer(norm, signed=False).dtype for each in classes]
    assert made == [torch.bfloat16, torch.float32]


@pytest.mark.parametrize(
    ("tool", "keys", "is_said"),
    [
        (AXOLOTL, {"optimizer": "adamw_torch_8bit"}, True),
        (AXOLOTL, {"optimizer": "adamw_bnb_8bit"}, False),
        (
            AXOLOTL,
            {"optimizer": "adamw_torch_8bit", "adapter": "lora", "lora_r": 8, "lora_alpha": 8},
            False,
        ),
        (FACTORY, {"optim": "adamw_torch_8bit"}, False),  # over weights in float32
        (FACTORY, {"optim": "adamw_torch_8bit", "pure_bf16": True}, True),
    ],
)
def test_moments_of_small_tensors_are_said_where_weights_in_16_bits_are_trained(
    tool: dict[str, object], keys: dict[str, object], is_said: bool, convert: Convert
) -> None:
    assert (SMALL_MOMENTS in said(convert(tool, **keys))) == is_said


@pytest.mark.parametrize(
    ("keys", "are_rounded"),
    [
        ({}, False),  # DDP, whose gradients have the dtype of what is trained
        ({"fsdp_config": {"offload_params": False}}, True),
        ({"fsdp": ["no_shard"], "fsdp_config": {"sharding_strategy": "NO_SHARD"}}, True),
        ({"deepspeed": "deepspeed_configs/zero3_bf16.json"}, True),
        ({"context_parallel_size": 2}, False),  # DDP too
        ({"context_parallel_size": 2, "fsdp_config": {"offload_params": False}}, True),
        ({"deepspeed": "zero3.json", "adapter": "lora", "lora_fp32_gradients": True}, False),
    ],
)
def test_the_sum_of_gradients_over_shards_is_said(
    keys: dict[str, object], are_rounded: bool, convert: Convert
) -> None:
    remarks = convert(AXOLOTL, **keys).remarks
    assert bool({REDUCED_ALONE, REDUCED_IN_16_BITS} & set(remarks)) == are_rounded


@pytest.mark.parametrize(
    ("name", "keys", "is_said"),
    [
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", {"context_parallel_size": 2}, True),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", {}, False),
        ("tiiuae/Falcon-H1-7B-Base", {"tensor_parallel_size": 2}, True),
        ("Qwen/Qwen3-8B", {"context_parallel_size": 2}, False),  # they share a row here too
    ],
)
def test_ranks_that_share_no_row_here_have_more_rows_a_step(
    name: str, keys: dict[str, object], is_said: bool, convert: Convert
) -> None:
    made = convert(AXOLOTL, base_model=name, **keys)
    assert (MORE_ROWS.format(2, 2, 2) in made.remarks) == is_said
    is_dropped = any("_size: 1 " in line for line in made.differences)
    assert is_dropped == is_said


@pytest.mark.parametrize("optimizer", ["ao_adamw_8bit", "ao_adamw_4bit"])
def test_an_optimizer_that_axolotl_names_and_refuses_is_said_to_be_so(
    optimizer: str, convert: Convert
) -> None:
    """Source: _configure_custom_optimizer of its core/builders/base.py."""
    made = convert(AXOLOTL, optimizer=optimizer)
    assert made.recipe["optim"] == "adamw_8bit" and "refuses it" in said(made)
    assert "bitsandbytes" not in said(made) and EMBEDDING_MOMENTS not in said(made)


@pytest.mark.parametrize(
    ("optimizer", "is_adamw"),
    [
        ("adamw_torch_fused", True),
        ("paged_adamw_32bit", True),
        ("adamw_bnb_8bit", True),
        ("adopt_adamw", False),
        ("schedule_free_adamw", False),
        ("q_galore_adamw8bit", False),
        ("apollo_adamw", False),
        ("ao_adamw_fp8", False),
        ("flash_adamw", False),
        ("optimi_adamw", False),
    ],
)
def test_what_is_an_adamw_by_name_alone_says_so(
    optimizer: str, is_adamw: bool, convert: Convert
) -> None:
    made = convert(AXOLOTL, optimizer=optimizer)
    assert made.recipe["optim"].startswith("adamw")
    assert any(line.startswith("optimizer") for line in made.differences) != is_adamw


@pytest.mark.parametrize(
    ("model", "implementation"),
    [
        ("meta-llama/Llama-4-Scout-17B-16E", "flash_attention_2"),
        ("meta-llama/Llama-4-Scout-17B-16E", "flex_attention"),
        ("Qwen/Qwen3-8B", "flash_attention_2"),
        ("bigscience/bloom-7b1", "sdpa"),
        ("bigscience/bloom-7b1", "flex_attention"),
    ],
)
def test_attention_that_the_models_class_does_not_have_is_dropped(
    model: str, implementation: str, convert: Convert
) -> None:
    names = {"Llama": "Llama4ForCausalLM", "Qwen3": "Qwen3ForCausalLM", "bloom": "BloomForCausalLM"}
    own_class = getattr(transformers, next(own for part, own in names.items() if part in model))
    kind = implementation.split("_")[0].replace("flash", "flash_attn").replace("flex", "flex_attn")
    made = convert(AXOLOTL, base_model=model, attn_implementation=implementation)
    assert ("attn_implementation" in made.recipe) == getattr(own_class, f"_supports_{kind}")
    assert (f"{implementation} is dropped" in said(made)) != ("attn_implementation" in made.recipe)


PAIRS = [{"path": "a/pairs", "type": "chat_template.default"}]


@pytest.mark.parametrize(
    ("template", "eos", "follows", "lacks_bos"),
    [
        ("chatml", None, True, True),
        ("chatml", "<|im_end|>", False, True),
        ("llama3", "<|eot_id|>", False, False),
        ("llama3", None, True, False),
        ("mistral_v1", None, False, False),
        ("cohere", "<|end_of_text|>", True, False),
        ("cohere", "<|END_OF_TURN_TOKEN|>", False, False),
    ],
)
def test_what_is_scored_after_an_answer_of_a_pair_is_said(
    template: str, eos: str | None, follows: bool, lacks_bos: bool, convert: Convert
) -> None:
    keys = {"base_model": "org/model", "rl": "dpo", "chat_template": template, "datasets": PAIRS}
    text = said(convert(AXOLOTL, **keys, special_tokens={"eos_token": eos}))
    assert ("the EOS token follows" in text) == follows
    assert (TOKENIZERS_BOS in text) == lacks_bos and SCORED_BREAK not in text


@pytest.mark.parametrize(
    ("model", "is_said"),
    [("arcee-ai/AFM-4.5B", True), ("CohereForAI/aya-23-8B", False), ("Qwen/Qwen3-8B", False)],
)
def test_an_eos_token_after_a_template_that_no_table_knows_is_said(
    model: str, is_said: bool, convert: Convert
) -> None:
    keys = {"base_model": model, "rl": "dpo", "datasets": PAIRS}
    assert (MAYBE_SCORED_EOS in said(convert(AXOLOTL, **keys))) == is_said


def test_what_trl_scores_after_an_answer_of_a_pair_is_said(convert: Convert) -> None:
    file = {"model_name_or_path": "org/model", "dataset_name": "org/pairs"}
    assert SCORED_BREAK in said(convert(file, beta=0.1))
    assert SCORED_QUESTION in said(convert(file, beta=0.1))
    assert SCORED_BREAK not in said(convert(file))
    assert SCORED_QUESTION not in said(convert(file, desirable_weight=1.0))


def test_what_trl_trains_around_an_answer_is_said(convert: Convert) -> None:
    """A run of TRL 1.16 trains 443 tokens of rows of which one here trains 433, and 433 of 429."""
    file = {"model_name_or_path": "org/model", "dataset_name": "org/rows"}
    marked = convert(file, assistant_only_loss=True)
    assert TEMPLATE_OF_TRL in said(marked) and marked.recipe["turns"] == "whole"
    own = convert(file, assistant_only_loss=True, chat_template="{% generation %}")
    assert TEMPLATE_OF_TRL not in said(own) and own.recipe["turns"] == "whole"
    assert COMPLETIONS_BREAK in said(convert(file, completion_only_loss=True))
    plain = convert(file)
    assert COMPLETIONS_BREAK not in said(plain) and TEMPLATE_OF_TRL not in said(plain)
    assert "turns" not in plain.recipe


@pytest.mark.parametrize(
    ("keys", "method"),
    [
        ({"beta": 0.1}, "dpo"),
        ({"desirable_weight": 1.5}, "kto"),
        ({"loss_type": "simpo", "cpo_alpha": 0, "simpo_gamma": 0.5}, None),
        ({}, None),
    ],
)
def test_the_tokens_that_older_versions_of_trl_add_to_an_answer_are_said(
    keys: dict[str, object], method: str | None, convert: Convert
) -> None:
    """Its DPOTrainer of 0.19.1 to 0.27.0 ends each answer with the EOS token, its KTOTrainer to 1.2.0."""
    file = {"model_name_or_path": "org/model", "dataset_name": "org/pairs"}
    text = said(convert(file, **keys))
    assert [name for name, line in ENDED_BEFORE.items() if line in text] == (
        [method] if method else []
    )


@pytest.mark.parametrize("method", ["orpo", "simpo", "dpo"])
def test_what_the_trainers_of_orpo_and_simpo_write_around_a_pair_is_said(
    method: str, convert: Convert
) -> None:
    pairs = {"base_model": "org/model", "rl": method, "datasets": PAIRS}
    text = said(convert(AXOLOTL, **pairs))
    assert (SCORED_BREAK in text) == (method == "orpo")
    assert (ENDS_ADDED in text) == (method != "dpo")
    file = {"model_name_or_path": "org/model", "dataset_name": "org/pairs", "beta": 0.1}
    keys = {"loss_type": "simpo", "cpo_alpha": 0} if method == "simpo" else {}
    made = convert(file | keys, **({"simpo_gamma": 0.5} if method == "simpo" else {}))
    assert (ENDS_ADDED in said(made)) == (made.recipe["method"] in ("orpo", "simpo"))


def test_a_thought_is_none_of_the_tokenizers_where_mistral_common_writes_the_turns(
    convert: Convert,
) -> None:
    keys = {"base_model": "mistralai/Ministral-3-3B-Reasoning-2512"}
    assert OWN_THOUGHT in said(convert(AXOLOTL, **keys))
    assert OWN_THOUGHT not in said(convert(AXOLOTL, **keys, tokenizer_use_mistral_common=True))


@pytest.mark.parametrize(
    ("template", "is_added"),
    [("{{ '<|im_start|>' + messages[0]['content'] + '<|im_end|>' }}", True), ("{{ messages }}", False)],
)  # fmt: skip
def test_tokens_that_older_versions_add_for_a_template_are_said(
    template: str, is_added: bool, convert: Convert
) -> None:
    made = convert(
        {"model_name_or_path": "a/model", "dataset_name": "a/rows"}, chat_template=template
    )
    assert (CHATML_ADDED in made.remarks) == ("added_tokens" in made.recipe) == is_added
    # resize_to_multiple_of of setup_chat_format is None
    assert made.recipe.get("pad_vocab_to_multiple_of") == (1 if is_added else None)


@pytest.mark.parametrize(
    ("path", "ours"), [("Qwen/Qwen3-0.6B", None), ("templates/ours.jinja", "templates/ours.jinja")]
)
def test_what_trl_takes_from_a_model_with_its_chat_template_is_said(
    path: str, ours: str | None, convert: Convert
) -> None:
    """SFTTrainer of TRL 1.9 calls clone_chat_template unless the path is a file."""
    keys = {"model_name_or_path": "a/model", "dataset_name": "a/rows"}
    made = convert(keys, chat_template_path=path)
    assert made.recipe.get("chat_template") == ours
    assert (TEMPLATE_CLONED in said(made)) == (ours is None)


@pytest.mark.parametrize(
    ("path", "is_adamw"),
    [
        ("transformer_engine.pytorch.optimizers.fused_adam.FusedAdam", True),
        ("flashoptim.FlashAdamW", False),
    ],
)
def test_an_optimizer_is_judged_by_its_own_name(
    path: str, is_adamw: bool, convert: Convert
) -> None:
    target = "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained"
    data = "nemo_automodel.components.datasets.llm.squad.make_squad_dataset"
    made = convert(
        {
            "model": {"_target_": target, "pretrained_model_name_or_path": "Qwen/Qwen3-8B"},
            "dataset": {"_target_": data, "dataset_name": "rajpurkar/squad"},
            "optimizer": {"_target_": path, "lr": 1e-5},
            "step_scheduler": {},
        }
    )
    assert any(line.startswith("optimizer") for line in made.differences) != is_adamw


@pytest.mark.parametrize(
    ("name", "template"),
    [
        ("Devstral-Small-2507", "mistral-v13-tekken"),
        ("Devstral-Small-2505", "mistral-v7-tekken"),
        ("Magistral-Small-2506", "mistral-v11-tekken"),
        ("Devstral-Small-2-24B-Instruct-2512", None),
    ],
)
def test_mistral_common_writes_the_turns_of_models_without_a_template(
    name: str, template: str | None, convert: Convert
) -> None:
    """Their calls have no id, an id in JSON, and an id after [CALL_ID] in Axolotl's own tests."""
    keys = {"base_model": f"mistralai/{name}", "tokenizer_use_mistral_common": True}
    made = convert(AXOLOTL, **keys)
    assert made.recipe.get("chat_template") == template
    assert ("the tokenizer's own template is used" in said(made)) == (template is None)


@pytest.mark.parametrize("name", ["reflection/Beam-1.0-501B-A23B", "allenai/OLMo-2-1124-7B"])
def test_the_thoughts_that_beams_template_may_write_are_said(name: str, convert: Convert) -> None:
    assert (OWN_THOUGHT in said(convert(AXOLOTL, base_model=name))) == ("Beam" in name)


@pytest.mark.parametrize(
    ("keys", "is_said"),
    [
        ({"processor_type": "AutoProcessor"}, True),
        ({}, False),
        ({"processor_type": "AutoProcessor", "rl": "dpo"}, False),  # by TRL's collator
    ],
)
def test_where_axolotl_puts_the_image_of_a_column_is_said(
    keys: dict[str, object], is_said: bool, convert: Convert
) -> None:
    text = said(convert(AXOLOTL, **keys, base_model="Qwen/Qwen2.5-VL-7B-Instruct"))
    assert (IMAGES_OF_COLUMN in text) == is_said


def test_sparse_fine_tuning_is_named(convert: Convert) -> None:
    recipe = {"finetuning_stage": {"finetuning_modifiers": {}}}
    text = said(convert(AXOLOTL, llmcompressor={"recipe": recipe, "save_compressed": True}))
    assert "(sparse fine-tuning (zeros that stay zero): not supported)" in text


def test_the_turns_of_mistral_common_around_images_are_said(convert: Convert) -> None:
    keys = {"base_model": "mistralai/Magistral-Small-2509", "tokenizer_use_mistral_common": True}
    images = convert(AXOLOTL, **keys, processor_type="AutoProcessor")
    assert COMMON_TURNS_OF_IMAGES in said(images)
    assert COLUMN_REFUSED in said(images) and IMAGES_OF_COLUMN not in said(images)
    assert THOUGHTS_LEFT_OUT not in said(images)
    text = convert(AXOLOTL, **keys)
    assert COMMON_TURNS_OF_IMAGES not in said(text) and THOUGHTS_LEFT_OUT in said(text)
    assert text.recipe["chat_template"] == "mistral-v13-tekken"


@pytest.mark.parametrize(
    ("model", "kind", "is_said"),
    [
        ("THUDM/GLM-4-32B-0414", "alpaca", True),
        ("THUDM/GLM-4-32B-0414", "chat_template", False),
        ("Qwen/Qwen3-8B", "alpaca", False),
    ],
)
def test_tokens_before_every_text_are_said_where_answers_are_texts(
    model: str, kind: str, is_said: bool, convert: Convert
) -> None:
    made = convert(AXOLOTL, base_model=model, datasets=[{"path": "a/rows", "type": kind}])
    assert (STARTS_TWICE in said(made)) == is_said


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
        ("openbmb/MiniCPM5-2B", OWN_THOUGHT),
        ("agentica-org/DeepCoder-14B-Preview", OWN_THOUGHT),
        ("nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16", OWN_THOUGHT),
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


@pytest.mark.parametrize(
    ("builder", "keys", "is_said"),
    [
        ("qlora_llama2_7b", {}, True),
        ("qlora_llama2_7b", {"save_adapter_weights_only": True}, False),
        ("lora_llama2_7b", {"save_adapter_weights_only": False}, False),
    ],
)
def test_the_base_that_torchtune_merges_onto_is_said(
    builder: str, keys: dict[str, object], is_said: bool, convert: Convert
) -> None:
    model = {
        "_component_": f"torchtune.models.llama2.{builder}",
        "lora_attn_modules": ["q_proj"],
        "lora_rank": 8,
    }
    made = convert(TUNE, model=model, **keys)
    assert (MERGED_DEQUANTIZED in said(made)) == is_said
    assert ("save_adapter_weights_only" in made.ignored) == (bool(keys) and not is_said)


@pytest.mark.parametrize(
    ("builder", "keys", "has_experts"),
    [
        ("lora_llama4_scout_17b_16e", {"apply_lora_to_mlp": True}, True),
        ("lora_llama4_scout_17b_16e", {"apply_lora_to_mlp": False}, False),
        ("llama4_scout_17b_16e", {}, False),
    ],
)
def test_the_routed_experts_and_routers_of_torchtunes_llama_4_are_said(
    builder: str, keys: dict[str, object], has_experts: bool, convert: Convert
) -> None:
    """Transformers has such experts as parameters that no adapter is made for here, and chooses
    them by the scores: of these two, a sigmoid in 16 bits makes the same.
    """
    model: dict[str, object] = {"_component_": f"torchtune.models.llama4.{builder}"}
    if builder.startswith("lora"):
        model |= {"lora_attn_modules": ["q_proj"], "lora_rank": 8}
    made = convert(TUNE, model=model | keys)
    assert (EXPERTS_UNADAPTED in said(made)) == has_experts
    assert "a router takes the expert of the highest score" in said(made)
    assert not has_fused_experts("llama4_text")
    scores = torch.tensor([3.0, 3.015625], dtype=torch.bfloat16)
    first, second = scores.float().sigmoid().bfloat16().tolist()
    assert first == second and scores[0] != scores[1]


@pytest.mark.parametrize(
    ("builder", "differs"),
    [
        ("code_llama2.code_llama2_7b", False),
        ("code_llama2.lora_code_llama2_7b", True),
        ("phi4.phi4_14b", True),
        ("phi4.lora_phi4_14b", True),
        ("phi3.phi3_mini", False),
    ],
)
def test_models_of_torchtune_with_another_base_of_positions_are_said(
    builder: str, differs: bool, convert: Convert
) -> None:
    """models/phi4 calls phi3, whose rope_base is 10000; rope_theta of Phi-4's config is 250000."""
    made = convert(TUNE, model={"_component_": f"torchtune.models.{builder}"})
    assert ("positions are rotated by a base of 10000" in said(made)) == differs


@pytest.mark.parametrize(
    ("builder", "limit", "longest"),
    [
        ("llama2.lora_llama2_7b", {}, 4096),
        ("phi3.phi3_mini", {"max_seq_len": None}, 4096),
        ("gemma2.gemma2_2b", {}, 8192),
        ("llama3.llama3_8b", {}, 8192),
        ("llama3.llama3_8b", {"max_seq_len": 512}, None),
        ("llama3_1.llama3_1_8b", {}, None),
        ("code_llama2.code_llama2_7b", {}, None),
        ("qwen2.qwen2_7b", {}, None),
    ],
)
def test_a_row_that_a_model_of_torchtune_refuses_is_refused_here(
    builder: str, limit: dict[str, object], longest: int | None, convert: Convert
) -> None:
    """TransformerDecoder's max_seq_len, by which no tokenizer cuts."""
    tokenizer = TUNE["tokenizer"] | limit
    made = convert(TUNE, model={"_component_": f"torchtune.models.{builder}"}, tokenizer=tokenizer)
    is_refused = made.recipe.get("overlength") == "error"
    assert is_refused == ("max_seq_len" not in limit or limit["max_seq_len"] is None)
    assert made.recipe["max_length"] == (longest or limit.get("max_seq_len") or 8192)
    assert (STOPS_BOTH.format(longest) in said(made)) == bool(longest)
    assert (BUILDERS_LIMIT_NOTE in said(made)) == (is_refused and not longest)


def test_the_length_of_a_model_whose_layers_a_file_of_torchtune_names(convert: Convert) -> None:
    model = {"_component_": "torchtune.models.llama2.llama2", "num_layers": 22, "norm_eps": 1e-5}
    made = convert(TUNE, model=model | {"max_seq_len": 2048, "attn_dropout": 0.0})
    assert made.recipe["max_length"] == 2048 and "num_layers" not in said(made)
    assert "model.norm_eps" in said(made) and "model.attn_dropout" not in said(made)


@pytest.mark.parametrize(("keys", "length"), [({}, "cut"), ({"max_seq_len": None}, "limit")])
def test_torchtunes_transforms_cut_rows_where_no_length_is_named(
    keys: dict[str, object], length: str, convert: Convert
) -> None:
    transform = {"_component_": "torchtune.models.llama4.llama4_transform"} | keys
    model = {"_component_": "torchtune.models.llama4.llama4_scout_17b_16e"}
    made = convert(TUNE, model=model, tokenizer=transform)
    assert made.recipe["max_length"] == 8192
    assert ("overlength" in made.recipe) == (length == "limit")


@pytest.mark.parametrize(
    ("builder", "keys", "notes"),
    [
        ("qwen3.lora_qwen3_8b_instruct", {}, [ROWS_REORDERED]),
        ("qwen2.lora_qwen2_7b", {"lora_attn_modules": ["v_proj"]}, []),
        ("qwen2.lora_qwen2_7b", {"quantize_base": True}, [ROWS_REORDERED, QWENS_IN_16_BITS]),
        ("llama3.lora_llama3_8b", {"quantize_base": True}, []),
        ("llama3.lora_llama3_8b", {"use_dora": True}, [NO_DORA_SAVED]),
        ("phi4.lora_phi4_14b", {}, [OWN_FORMAT]),
    ],
)
@pytest.mark.parametrize("adapters_alone", [False, True])
def test_adapters_that_torchtune_saves_or_quantizes_otherwise_are_said(
    builder: str, keys: dict[str, object], notes: list[str], adapters_alone: bool, convert: Convert
) -> None:
    """Beside the merged model, which is right, a wrong adapter is worth a look; alone it is what
    the run leaves.
    """
    model = {"_component_": f"torchtune.models.{builder}", "lora_attn_modules": ["q_proj"]}
    made = convert(TUNE, model=model | keys, save_adapter_weights_only=adapters_alone)
    wanted = [note for note in notes if adapters_alone or note != OWN_FORMAT]
    every = (ROWS_REORDERED, NO_DORA_SAVED, OWN_FORMAT, QWENS_IN_16_BITS)
    assert sorted(note for note in every if note in said(made)) == sorted(wanted)
    wrong = [note for note in (ROWS_REORDERED, NO_DORA_SAVED) if note in str(made.differences)]
    assert bool(wrong) == (adapters_alone and bool({ROWS_REORDERED, NO_DORA_SAVED} & set(notes)))


@pytest.mark.parametrize(
    ("tokenizer", "differs"), [("phi4.phi4_tokenizer", True), ("qwen2.qwen2_tokenizer", False)]
)
def test_torchtunes_phi4_splits_texts_as_gpt2(
    tokenizer: str, differs: bool, convert: Convert
) -> None:
    """GPT2BaseTokenizer, and tokenize_messages of Phi4Tokenizer.

    GPT-2 splits this text otherwise than cl100k, whose pattern the tokenizers of Phi-4 and Llama 3
    have.
    """
    text = said(convert(TUNE, tokenizer={"_component_": f"torchtune.models.{tokenizer}"}))
    assert [note in text for note in OF_PHI4] == [differs] * len(OF_PHI4)
    cl100k = Split(
        Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|[^\s\p{L}\p{N}]+[\r\n]*"), "isolated"
    )
    row = "(in 2023).\n\nYes"
    splits = [each.pre_tokenize_str(row) for each in (ByteLevel(add_prefix_space=False), cl100k)]
    gpt2, ours = [[word for word, _ in split] for split in splits]
    assert gpt2 == ["(", "in", "Ġ2023", ").", "Ċ", "Ċ", "Yes"]
    assert ours == ["(in", " ", "202", "3", ").\n\n", "Yes"]


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


PARTS = CUT_BY_PARTS.format("last", 512, 512)
PARTS_ASKED = CUT_BY_PARTS.format("first", 256, 768)
ASKED_FIRST = {"max_prompt_length": 256, "truncation_mode": "keep_start"}
ORPO = {"command": "orpo"}


@pytest.mark.parametrize(
    ("keys", "lists", "line"),
    [
        (ORPO, "differences", ANSWERS_SLICED.format(1024, PARTS)),
        ({"loss_type": "simpo"}, "differences", ANSWERS_SLICED.format(1024, PARTS)),
        ({"command": "kto"}, "remarks", WAS_CUT_BY_PARTS.format(1024, PARTS)),
        (ORPO | ASKED_FIRST, "differences", CUT_BY_PARTS_THERE.format(1024, PARTS_ASKED)),
    ],
)
def test_trls_trainers_of_orpo_simpo_and_kto_cut_prompt_and_answers_of_a_long_row_apart(
    keys: dict[str, object], lists: str, line: str, convert: Convert
) -> None:
    """tokenize_row of its ORPO trainer in 1.9: of 90 and 30 tokens after 20, with a max_length of
    100, it keeps 10 of each."""
    file = {"model_name_or_path": "org/model", "dataset_name": "org/pairs"}
    made = convert(file, **keys)  # max_length is 1024 by default
    assert any(line in each for each in getattr(made, lists))
    lines = (PROMPTS_WERE_CUT, PROMPT_CUT_ALONE, "cut off whole")
    assert not any(each in said(made) for each in lines)


@pytest.mark.parametrize(
    ("keys", "lists"),
    [
        ({}, "remarks"),
        ({"max_prompt_length": 256}, "differences"),
        ({"max_prompt_length": 256, "truncation_mode": "keep_start"}, None),
        ({"truncation_mode": "keep_end"}, None),
    ],
)
def test_the_end_of_a_long_pair_that_older_versions_of_trl_kept_is_said(
    keys: dict[str, object], lists: str | None, convert: Convert
) -> None:
    """A file with max_prompt_length is of a version that cuts a side's beginning by default."""
    file = {"model_name_or_path": "org/model", "dataset_name": "org/pairs", "beta": 0.1}
    made = convert(file | {"loss_type": "sigmoid"}, **keys)
    for name in ("remarks", "differences"):
        assert (SIDES_WERE_CUT in "".join(getattr(made, name))) == (name == lists)


LIGER = {"liger_fused_linear_cross_entropy": True}
CUT = {"plugins": ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"]}


@pytest.mark.parametrize(
    ("keys", "passed_by"),
    [
        (LIGER, True),
        (CUT, True),
        ({}, False),
        (CUT | {"cut_cross_entropy": False}, False),
        (LIGER | {"lora_target_modules": ["q_proj"]}, False),
        (LIGER | {"use_dft": True}, False),
    ],
)
def test_a_fused_loss_passes_by_the_adapter_of_the_head(
    keys: dict[str, object], passed_by: bool, convert: Convert
) -> None:
    adapted = {"adapter": "lora", "lora_r": 8, "lora_target_modules": ["q_proj", "lm_head"]}
    assert (HEAD_PASSED_BY in said(convert(AXOLOTL | adapted | keys))) == passed_by


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize(
    ("file", "key"),
    [
        (FACTORY | {"model_name_or_path": "Qwen/Qwen3-8B", "template": "qwen", "finetuning_type": "lora", "lora_target": "q_proj,lm_head"}, "enable_liger_kernel"),
        ({"model_name_or_path": "Qwen/Qwen3-8B", "dataset_name": "a/rows", "max_length": 1024, "use_peft": True, "lora_target_modules": ["q_proj", "lm_head"]}, "use_liger_kernel"),
    ],
)  # fmt: skip
def test_other_tools_ask_for_ligers_fused_loss_too(
    file: dict[str, object], key: str, asks: bool, convert: Convert
) -> None:
    assert (HEAD_PASSED_BY in said(convert(file | {key: asks}))) == asks


FALCON_H1 = "tiiuae/Falcon-H1-0.5B-Base"


@pytest.mark.parametrize(
    ("file", "is_said"),
    [
        (AXOLOTL | LIGER | {"base_model": FALCON_H1}, True),
        (AXOLOTL | LIGER | {"base_model": "Qwen/Qwen3-8B"}, False),
        (AXOLOTL | CUT | {"base_model": FALCON_H1}, False),
        ({"model_name_or_path": FALCON_H1, "dataset_name": "a/rows", "max_length": 1024, "use_liger_kernel": True}, True),
        (FACTORY | {"model_name_or_path": FALCON_H1, "template": "falcon_h1", "enable_liger_kernel": True}, False),
    ],
)  # fmt: skip
def test_the_multiplier_of_falcon_h1s_scores_is_unknown_to_ligers_loss(
    file: dict[str, object], is_said: bool, convert: Convert
) -> None:
    """lce_forward of Liger 0.8 gives its loss the head's weight; transformers' forward multiplies."""
    assert (UNMULTIPLIED in said(convert(file))) == is_said
    assert "self.lm_head(hidden_states) * self.model.lm_head_multiplier" in read_family_source(
        "falcon_h1"
    )


@pytest.mark.parametrize("name", ["microsoft/Phi-4-mini-instruct", "microsoft/phi-4"])
@pytest.mark.parametrize(
    ("file", "key"),
    [
        (AXOLOTL, "liger_rope"),
        (FACTORY | {"template": "phi4"}, "enable_liger_kernel"),
        ({"dataset_name": "a/rows", "max_length": 1024}, "use_liger_kernel"),
    ],
)
def test_ligers_rotation_of_a_model_that_turns_a_part_of_its_heads_is_said(
    file: dict[str, object], key: str, name: str, convert: Convert
) -> None:
    """LigerRopeFunction pairs a head's number with the one half a head after it."""
    model = "base_model" if file is AXOLOTL else "model_name_or_path"
    assert (ROTATED_WHOLE in said(convert(file | {model: name, key: True}))) == ("mini" in name)
    assert ROTATED_WHOLE not in said(convert(file | {model: name}))
    rope = Phi3Config(partial_rotary_factor=0.75, hidden_size=256, num_attention_heads=2)
    cos, _ = Phi3RotaryEmbedding(rope)(torch.zeros(1, 1, 256), torch.zeros(1, 1, dtype=torch.int64))
    assert cos.shape[-1] == 96  # of 128, of which the kernel reads 64


def test_pairs_are_compared_without_the_fused_loss(convert: Convert) -> None:
    adapted = {"adapter": "lora", "lora_r": 8, "lora_target_modules": ["q_proj", "lm_head"]}
    pairs = {"rl": "dpo", "datasets": [{"path": "a/pairs", "type": "chat_template.default"}]}
    assert HEAD_PASSED_BY not in said(convert(AXOLOTL | adapted | LIGER | pairs))


@pytest.mark.parametrize(
    "name", ["deepseek-ai/DeepSeek-V2-Lite", "ai21labs/Jamba-v0.1", "Qwen/Qwen3-8B"]
)
def test_the_fused_losses_of_two_families_take_no_count_of_labels(
    name: str, convert: Convert
) -> None:
    family = {"D": "deepseek_v2", "J": "jamba"}.get(name.split("/")[1][0], "")
    fused = convert(AXOLOTL, base_model=name, **LIGER).remarks
    plain = convert(AXOLOTL, base_model=name).remarks
    assert (RANKS_ALIKE.format(EACH_IN_19) in fused) == (not family)
    assert not family or UNCOUNTED_BY_LIGER[family] in fused
    assert RANKS_ALIKE.format(EACH_IN_19) in plain


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("state-spaces/mamba-2.8b", "mamba"),
        ("tiiuae/falcon-mamba-7b", ""),
        ("mistralai/Mamba-Codestral-7B-v0.1", ""),
    ],
)
def test_axolotls_trainer_of_mamba_trained_all_tokens_whatever_a_file_says(
    name: str, family: str, convert: Convert
) -> None:
    newest = convert(AXOLOTL, base_model=name, train_on_inputs=False)
    assert newest.recipe["assistant_only_loss"] is True
    assert ("0.19 trains on prompts too" in said(newest)) == bool(family)
    assert newest.recipe["model_name_or_path"] == name
    if family:
        older = convert(AXOLOTL, base_model=name, train_on_inputs=False, model_type=MAMBA_SSM)
        assert older.recipe["assistant_only_loss"] is False
        assert older.recipe["model_name_or_path"] == f"{name}-hf"


@pytest.mark.parametrize(
    ("keys", "is_said"),
    [
        ({"optimizer": "optimi_adamw", "weight_decay": 0.1}, True),
        ({"optimizer": "optimi_adamw"}, False),
        ({"optimizer": "adamw_torch", "weight_decay": 0.1}, False),
        ({"optimizer": "optimi_adamw", "weight_decay": 0.1, "adapter": "lora"}, False),
    ],
)
def test_axolotls_own_optimizers_decay_no_embedding(
    keys: dict[str, object], is_said: bool, convert: Convert
) -> None:
    assert (EMBEDDINGS_SPARED in said(convert(AXOLOTL, lora_r=8, **keys))) == is_said


def test_what_axolotl_does_with_long_rows_of_a_stream_is_said(convert: Convert) -> None:
    stream = {"streaming": True, "max_steps": 9, "excess_length_strategy": "truncate"}
    packed = convert(AXOLOTL | stream, sample_packing=True)
    assert LONG_DROPPED in said(packed) and packed.recipe["overlength"] == "drop"
    assert LONG_KEPT in said(convert(AXOLOTL | stream))
    columns = {"field_instruction": "q", "field_output": "a"}
    assert LONG_KEPT in said(convert(AXOLOTL | stream, datasets=[{"path": "a/b", "type": columns}]))
    texts = convert(AXOLOTL | stream, datasets=[{"path": "a/texts", "type": "completion"}])
    assert not any(note in said(texts) for note in (LONG_DROPPED, LONG_KEPT))


@pytest.mark.parametrize(
    ("keys", "tokens", "most"),
    [
        ({}, 512, 200),
        ({"micro_batch_size": 8, "sequence_len": 4096}, 32768, 200),
        ({"micro_batch_size": 8, "sequence_len": 4096, "attn_implementation": None}, 4096, 200),
        ({"micro_batch_size": 8, "attn_implementation": "sdpa"}, 512, 200),
        ({"micro_batch_size": 8, "multipack_real_batches": True}, 512, 200),
        ({"sample_packing_bin_size": 900}, 512, 900),
    ],
)
def test_how_axolotl_packs_rows_is_said(
    keys: dict[str, object], tokens: int, most: int, convert: Convert
) -> None:
    note = FIRST_FIT.format(tokens, most)
    assert note in convert(AXOLOTL, sample_packing=True, **keys).remarks
    assert note not in convert(AXOLOTL, **keys).remarks
    in_order = convert(AXOLOTL, sample_packing=True, sample_packing_sequentially=True, **keys)
    assert note not in in_order.remarks and PACKED_IN_ORDER in in_order.remarks


@pytest.mark.parametrize(
    ("keys", "note"),
    [
        ({"packing": True}, PACKED_AT_A_TIME.format(1000, "")),
        ({"packing": True, "preprocessing_num_workers": 1}, PACKED_AT_A_TIME.format(1000, "")),
        ({"neat_packing": True, "preprocessing_batch_size": 128}, PACKED_AT_A_TIME.format(128, "")),
        ({"stage": "pt"}, LEFT_OVER.format(1000, "")),
        ({"stage": "pt", "packing": None}, LEFT_OVER.format(1000, "")),
        ({"stage": "pt", "packing": False}, None),
        ({}, None),
    ],
)
def test_how_many_rows_factory_packs_at_a_time_is_said(
    keys: dict[str, object], note: str | None, convert: Convert
) -> None:
    text = said(convert(FACTORY, model_name_or_path="Qwen/Qwen3-8B", template="qwen", **keys))
    assert note is None or note in text
    assert ("at a time" in text) == (note is not None)


STREAM = {"streaming": True, "max_steps": 9}
TRL = {"model_name_or_path": "Qwen/Qwen3-8B", "dataset_streaming": True, "max_steps": 9}


@pytest.mark.parametrize(
    ("file", "are_several"),
    [
        (AXOLOTL | STREAM, False),
        (AXOLOTL | STREAM | {"datasets": [{"path": "a/rows"}, {"path": "b/rows"}]}, True),
        (FACTORY | STREAM | {"dataset": "some/rows,other/rows"}, True),
        (TRL | {"datasets": [{"path": "a/rows"}, {"path": "b/rows"}]}, True),
        (TRL | {"dataset_name": "a/rows"}, False),
    ],
)
def test_a_stream_of_another_tool_reads_one_data_set_after_another(
    file: dict[str, object], are_several: bool, convert: Convert
) -> None:
    text = said(convert(file))
    assert (ONE_AFTER_ANOTHER in text) == are_several
    assert (STREAM_IN_ORDER in text) == ("dataset_streaming" in file)


@pytest.mark.parametrize(
    ("keys", "is_said"),
    [
        ({"packing": True}, True),
        ({"packing": True, "packing_strategy": "bfd_split"}, True),
        ({"packing": True, "packing_strategy": "wrapped"}, False),
        ({}, False),
    ],
)
def test_trl_packs_a_thousand_rows_at_a_time(
    keys: dict[str, object], is_said: bool, convert: Convert
) -> None:
    text = said(convert({"model_name_or_path": "Qwen/Qwen3-8B", "dataset_name": "a/rows"}, **keys))
    assert (PACKED_AT_A_TIME.format("a thousand", "") in text) == is_said


def test_of_several_processes_each_packs_its_share_of_the_rows(convert: Convert) -> None:
    """Those of datasets' map, to which LLaMA-Factory and TRL give their number."""
    rows = Dataset.from_dict({"text": [str(number) for number in range(10)]})
    counted = rows.map(count_rows, batched=True, num_proc=2, remove_columns=["text"])
    assert counted["rows"][:] == [5, 5]
    packs = {"model_name_or_path": "Qwen/Qwen3-8B", "packing": True}
    shares = ", of each of 16 shares by itself (preprocessing_num_workers),"
    asked = {"preprocessing_num_workers": 16}
    for stage, note in (("pt", LEFT_OVER), ("sft", PACKED_AT_A_TIME)):
        made = convert(FACTORY, **packs, **asked, stage=stage, template="qwen")
        assert note.format(1000, shares) in made.remarks
        streamed = convert(FACTORY | STREAM, **packs, **asked, stage=stage, template="qwen")
        assert "shares by itself" not in said(streamed)
    shares = ", of each of 12 shares by itself (dataset_num_proc),"
    made = convert({"dataset_name": "a/rows"}, **packs, dataset_num_proc=12)
    assert PACKED_AT_A_TIME.format("a thousand", shares) in made.remarks


def count_rows(batch: dict[str, list[str]]) -> dict[str, list[int]]:
    """How many rows map gives a function at a time."""
    return {"rows": [len(batch["text"])]}


MEGATRON = {"template": "qwen", "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2}


def test_what_factorys_megatron_does_otherwise_is_said(convert: Convert) -> None:
    """By mcore_adapter; without its keys LLaMA-Factory's own trainer reads the file."""
    mixture = "Qwen/Qwen3-30B-A3B-Instruct-2507"
    notes = (
        MICRO_BATCHES_ALIKE,
        WHOLE_STEPS,
        IN_ORDER,
        MEGATRONS_FILES,
        SUMMED_IN_16_BITS,
        AUXILIARY.format(BY_LAYER),
    )
    file = FACTORY | MEGATRON | {"model_name_or_path": mixture}
    text = said(convert(file, recompute_granularity="full"))
    assert all(note in text for note in notes)
    assert not any(note in text for note in (ROWS_BY_LENGTH, LABEL_BEHIND_CUT, "not known here"))
    dense = said(convert(file, model_name_or_path="Qwen/Qwen3-8B", calculate_per_token_loss=True))
    assert not any(
        note in dense for note in (AUXILIARY.format(BY_LAYER), MICRO_BATCHES_ALIKE, FUSED_ADAPTERS)
    )
    own = said(convert(FACTORY, model_name_or_path=mixture, template="qwen"))
    assert not any(note in own for note in notes)


def test_megatron_bridge_fuses_factorys_adapters(convert: Convert) -> None:
    keys = {"model_name_or_path": "Qwen/Qwen3-8B", "finetuning_type": "lora", "lora_dropout": 0.1}
    bridge = convert(FACTORY | MEGATRON | keys, export_hf_on_finish=True)
    assert FUSED_ADAPTERS in said(bridge) and MEGATRONS_FILES not in said(bridge)
    assert bridge.recipe["lora_dropout"] == 0.0


def test_megatron_bridge_writes_and_cuts_factorys_rows_itself(convert: Convert) -> None:
    """Its dataset takes messages, and the template as Jinja, without tools and thoughts."""
    file = FACTORY | MEGATRON | {"model_name_or_path": "Qwen/Qwen3-8B", "template": "qwen3"}
    of_factory = ("are both cut there", LABEL_BEHIND_CUT, TOOLS_IN_ITS_WORDS, THOUGHT)
    text = said(convert(file, mixed_precision="bf16_mixed", lr_scheduler_type="polynomial"))
    assert all(note in text for note in (*BRIDGES_ROWS, MEGATRONS_FILES, NO_THOUGHT, NOW_A_COSINE))
    assert not any(note in text for note in of_factory)
    mcore = said(convert(file))
    assert not any(note in mcore for note in (*BRIDGES_ROWS, NO_THOUGHT))
    assert all(note in mcore for note in of_factory if note != LABEL_BEHIND_CUT)


def test_factorys_fp8_acts_under_transformers_4_alone(convert: Convert) -> None:
    """LLaMA-Factory sets Accelerate's variable, which transformers 5 passes by; its trainers of
    pairs do not even set it.
    """
    passed = inspect.getsource(transformers.Trainer._build_accelerator_args)
    assert '"mixed_precision": self.args.mixed_precision' in passed
    file = FACTORY | {"model_name_or_path": "Qwen/Qwen3-8B", "template": "qwen"}
    made = convert(file, fp8=True)
    assert FP8_UNDER_4 in said(made) and "fp8" in str(made.accelerate_file)
    assert FP8_UNDER_4 not in said(convert(file))
    pairs = convert(file, fp8=True, stage="dpo")
    assert "fp8" in pairs.ignored and "fp8" not in said(pairs) + str(pairs.accelerate_file)


def test_experts_that_factory_adapts_under_transformers_4_are_said(convert: Convert) -> None:
    file = FACTORY | {"template": "qwen", "finetuning_type": "lora"}
    mixture = {"model_name_or_path": "Qwen/Qwen3-30B-A3B-Instruct-2507"}
    assert EXPERTS_UNDER_4 in said(convert(file | mixture))
    others: tuple[dict[str, object], ...] = (
        {"finetuning_type": "full"},
        {"lora_target": "q_proj,v_proj"},
        {"model_name_or_path": "Qwen/Qwen3-8B"},
    )
    assert not any(EXPERTS_UNDER_4 in said(convert(file | mixture, **keys)) for keys in others)


def test_rows_in_factorys_tokenized_path_are_trained_on_as_they_are(convert: Convert) -> None:
    """get_dataset of its data/loader.py loads them before it reads another key of the data."""
    made = convert(FACTORY, tokenized_path="saves/rows")
    assert made.recipe["dataset_cache_dir"] == "saves/rows"
    assert "rows that are in this folder already are trained on there" in said(made)


def test_what_megatron_does_not_read_of_a_factory_file_is_not_converted(convert: Convert) -> None:
    """mcore_adapter trains all weights by Adam, whatever finetuning_type and optim say."""
    keys = {"optim": "sgd", "use_dft_loss": True, "use_rslora": True, "finetuning_type": "lora"}
    shared = {"lr_scheduler_type": "constant", "warmup_steps": 5, "neftune_noise_alpha": 5}
    file = FACTORY | MEGATRON | keys | shared | {"model_name_or_path": "Qwen/Qwen3-8B"}
    mcore = convert(file).recipe
    bridge = convert(file, use_packed_sequences=True, packing=False, expert_model_parallel_size=2)
    for recipe in (mcore, bridge.recipe):
        assert not {"optim", "token_loss", "use_rslora"} & recipe.keys()
        assert recipe["warmup_steps"] == 5
    assert "lora_r" not in mcore and not mcore.get("use_peft") and bridge.recipe["use_peft"]
    assert mcore["neftune_noise_alpha"] == 5 and "neftune_noise_alpha" not in bridge.recipe
    assert bridge.recipe["packing"] and FEWER_ROWS.format(2) in said(bridge)


@pytest.mark.parametrize(
    ("method", "kind", "is_said"),
    [
        ("dpo", "chat_template.default", True),
        ("simpo", "chat_template.argilla_chat", True),
        ("dpo", "chatml.ultra", False),
        ("orpo", "chat_template.argilla", False),
    ],
)
def test_how_axolotl_cuts_an_answer_out_of_a_templates_text_is_said(
    method: str, kind: str, is_said: bool, convert: Convert
) -> None:
    pairs = {"rl": method, "datasets": [{"path": "a/pairs", "type": kind}]}
    assert (ANSWERS_FOUND in said(convert(AXOLOTL | pairs))) == is_said


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("HuggingFaceTB/SmolVLM2-2.2B-Instruct", MARKS_TRAINED),
        ("axolotl-ai-co/Mistral-Small-4-119B-2603-BF16", MARKS_TRAINED),
        ("mistral-community/pixtral-12b", MARKS_TRAINED),
        ("zai-org/GLM-4.6V-Flash", GLM_MARKS),
        ("llava-hf/llava-1.5-7b-hf", None),
    ],
)
def test_the_marks_around_an_image_that_are_trained_are_said(
    name: str, note: str | None, convert: Convert
) -> None:
    text = said(convert(AXOLOTL, base_model=name, processor_type="AutoProcessor"))
    assert [each for each in (MARKS_TRAINED, GLM_MARKS) if each in text] == ([note] if note else [])
    roles = [{"role": "assistant", "start": "a", "end": "b"}]
    asked = convert(AXOLOTL, base_model=name, processor_type="AutoProcessor", role_boundaries=roles)
    assert not any(each in said(asked) for each in (MARKS_TRAINED, GLM_MARKS))


def test_the_families_whose_processors_write_marks_are_those_of_transformers() -> None:
    models = Path(transformers.__file__).parent / "models"
    texts = [path.read_text() for path in models.glob("*/processing_*.py")]
    families = {
        family: [
            each
            for text in texts
            for each in re.findall(
                rf"^class {PROCESSOR_MAPPING_NAMES[family]}\(.*?"
                r"(def replace_image_token.*?(?=\n    def |\n    @|\nclass |\n__all__|\Z))",
                text,
                re.DOTALL | re.MULTILINE,
            )
        ]
        for family in IMAGE_FAMILIES
    }
    assert all(len(written) <= 1 for written in families.values())
    marked = {
        family
        for family, written in families.items()
        if written and not re.search(r"return self\.image_token( \*|$)", written[0], re.MULTILINE)
    }
    # of InternVL's Axolotl leaves the marks out too
    assert marked - {"internvl"} == set(MARKED_IMAGES)
    assert not marked & set(GLM_IMAGES)


@pytest.mark.parametrize(
    ("name", "template", "notes"),
    [
        ("Qwen/Qwen3.5-9B", "qwen3_5", [ONE_TEXT, THOUGHT_WHOLE]),
        ("Qwen/Qwen3.5-35B-A3B", None, [ONE_TEXT, THOUGHT_WHOLE]),
        ("nex-agi/Nex-N2.5-mini", "tokenizer_default", [THOUGHT_WHOLE]),
        ("google/gemma-3-4b-it", "gemma3", []),
        ("zai-org/GLM-4.6V-Flash", None, []),  # all of its text is trained, as here
    ],
)
def test_the_thoughts_of_rows_with_images_are_said(
    name: str, template: str | None, notes: list[str], convert: Convert
) -> None:
    keys = {"base_model": name, "processor_type": "AutoProcessor", "chat_template": template}
    text = said(convert(AXOLOTL, **keys))
    assert [note for note in (ONE_TEXT, THOUGHT_WHOLE, OWN_THOUGHT) if note in text] == notes
    assert THOUGHT_WHOLE not in said(convert(AXOLOTL, train_on_inputs=True, **keys))


@pytest.mark.parametrize(
    ("name", "processor", "notes"),
    [
        ("Qwen/Qwen3.5-9B", "AutoProcessor", [IMAGES_OF_COLUMN]),
        ("llava-hf/llava-1.5-7b-hf", "AutoProcessor", [IMAGES_OF_COLUMN, TOKENIZERS_BOS_OF_IMAGES]),
        ("mistral-community/pixtral-12b", "AutoProcessor", [IMAGES_OF_COLUMN]),
        ("Qwen/Qwen3.5-9B", None, []),
    ],
)
def test_where_an_image_without_a_place_stands_is_said(
    name: str, processor: str | None, notes: list[str], convert: Convert
) -> None:
    text = said(convert(AXOLOTL, base_model=name, processor_type=processor))
    known = (IMAGES_OF_COLUMN, TOKENIZERS_BOS_OF_IMAGES)
    assert [note for note in known if note in text] == notes


@pytest.mark.parametrize(
    ("name", "template", "is_said"),
    [
        ("Qwen/Qwen2-VL-7B-Instruct", "qwen2_vl", False),
        ("Qwen/Qwen2.5-VL-7B-Instruct", "qwen2_vl", False),
        ("Qwen/Qwen3-VL-8B-Instruct", "qwen2_vl", True),
        ("mistralai/Mistral-Small-3.1-24B-Instruct-2503", "mistral_v7_tekken", True),
        ("google/gemma-3-4b-it", "gemma3", False),
    ],
)
def test_a_system_message_before_images_that_the_models_own_template_lacks_is_said(
    name: str, template: str, is_said: bool, convert: Convert
) -> None:
    keys = {"base_model": name, "processor_type": "AutoProcessor", "chat_template": template}
    assert (OWN_SYSTEM in said(convert(AXOLOTL, **keys))) == is_said


@pytest.mark.parametrize("family", ["phi3", "llama2"])
def test_the_end_of_a_row_that_is_trained_whole_is_said(family: str, convert: Convert) -> None:
    names = {"phi3": "phi3.phi3_mini_tokenizer", "llama2": "llama2.llama2_tokenizer"}
    tokenizer = {"_component_": f"torchtune.models.{names[family]}"}
    model = {"_component_": f"torchtune.models.{family}.one_7b"}
    text = said(convert(TUNE, model=model, tokenizer=tokenizer))
    end = "the EOS token after the last answer is trained too here; there since 0.7 alone"
    assert (end in text) == (family == "phi3")


@pytest.mark.parametrize("family", ["phi3", "llama2"])
def test_the_tokens_around_the_turns_of_phi3_are_said(family: str, convert: Convert) -> None:
    """Source: tokenize_messages and __call__ of torchtune's Phi3MiniTokenizer, in 0.6.1 and 0.7."""
    names = {"phi3": "phi3.phi3_mini_tokenizer", "llama2": "llama2.llama2_tokenizer"}
    tokenizer = {"_component_": f"torchtune.models.{names[family]}"}
    text = said(convert(TUNE, tokenizer=tokenizer))
    assert [note in text for note in OF_PHI3] == [family == "phi3"] * len(OF_PHI3)


@pytest.mark.parametrize("style", ["openai", "sharegpt"])
def test_what_torchtune_reads_otherwise_of_messages_is_said(style: str, convert: Convert) -> None:
    """Source: OpenAIToMessages and validate_messages of its data/_messages.py."""
    rows = {
        "_component_": "torchtune.datasets.chat_dataset",
        "source": "a/rows",
        "conversation_column": "messages",
        "conversation_style": style,
    }
    text = said(convert(TUNE, dataset=rows))
    assert [note in text for note in (OF_CHATS, *OF_OPENAI)] == [True, *[style == "openai"] * 2]
    assert OF_CHATS not in said(convert(TUNE))


@pytest.mark.parametrize("count", [1, 2])
def test_torchtunes_weights_of_several_data_sets_are_their_shares_of_the_draws(
    count: int, convert: Convert
) -> None:
    """Source: get_multi_dataset, torchdata's MultiNodeWeightedSampler, and _setup_data of
    recipes/dev/lora_finetune_distributed_multi_dataset.py, which mixes no single data set.
    """
    transform = {"_component_": "torchtune.datasets.multimodal.the_cauldron_transform"}
    rows = [
        {"source": "a/b", "subset": name, "transform": {**transform}, "weight": weight}
        for name, weight in (("x", 0.25), ("y", 1.0))
    ]
    made = convert({key: TUNE[key] for key in TUNE if key != "dataset"}, datasets=rows[:count])
    assert (DRAWN_BY_WEIGHTS in said(made)) == (count > 1)
    assert ("weight" in made.recipe["datasets"][0]) == (count > 1)


@pytest.mark.parametrize(("stage", "is_read"), [("rm", False), ("sft", False), ("dpo", True)])
def test_pref_ftx_is_no_key_of_a_stage_that_does_not_read_it(
    stage: str, is_read: bool, convert: Convert
) -> None:
    """Source: PairwiseTrainer and CustomSeq2SeqTrainer of LLaMA-Factory."""
    keys = {"model_name_or_path": "Qwen/Qwen3-8B", "template": "qwen", "stage": stage}
    assert ("pref_ftx" in said(convert(FACTORY, pref_ftx=0.1, **keys))) == is_read


@pytest.mark.parametrize(
    ("stage", "template"), [("pt", "qwen"), ("pt", "llama3"), ("pt", None), ("sft", "qwen")]
)
def test_a_template_of_llama_factorys_ends_texts_and_writes_no_turns_of_them(
    stage: str, template: str | None, convert: Convert
) -> None:
    """Source: PretrainDatasetProcessor, and fix_special_tokens of its data/template.py."""
    keys = {"model_name_or_path": "Qwen/Qwen3-8B", "template": template, "stage": stage}
    made = convert(FACTORY, **keys)
    assert (ENDS_OF_LLAMA in made.remarks) == (template == "llama3")
    assert (END_AS_PADDING in made.remarks) == (stage == "pt" and template != "llama3")
    assert ("chat_template" in made.recipe) == (stage == "sft")
    assert (BREAK_TRAINED in said(made)) == (stage == "sft")
