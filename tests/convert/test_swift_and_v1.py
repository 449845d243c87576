"""What ms-swift and LLaMA-Factory's v1 do by themselves: their rows, turns, ends and defaults, converted or said."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from finetune.config.schema import DatasetSource
from finetune.convert.base_model import DEQUANTIZED_AWQ
from finetune.convert.by_tool import ALL_DECAYED
from finetune.convert.chat_templates import OWN_THOUGHT, THOUGHT_WHOLE
from finetune.convert.conversion import MAYBE_REDUCED, REDUCED_IN_16_BITS, convert_file
from finetune.convert.datasets import REPEATED
from finetune.convert.defaults import MODELS_LIMIT_NOTE, UNLIMITED_NOTE
from finetune.convert.factory_v1 import DIVIDED_AGAIN, DRAWN_AGAIN, V1_ROWS
from finetune.convert.image_models import TOWER_ADAPTED, TRAINED_TOWER
from finetune.convert.numbers import ROUNDED_MORE_OFTEN, UNTRAINED_BY_CUT
from finetune.convert.objectives import CHOSEN_BY_MICRO_BATCH, PACKED_ANSWERS, PACKED_BY_SUM
from finetune.convert.runnable import EMBEDDING_ADAPTED, NO_LAYER
from finetune.convert.shared import EXPERTS_UNDER_4, ROTATION_ROUNDED
from finetune.convert.swift import (
    ANOTHER_OPTIMIZER,
    ANY_SYSTEM,
    BOTH_RANDOM,
    BY_LORA_GA,
    COPIES_IN_16_BITS,
    DRAWN_ANEW,
    EARLIER_ENDS,
    EMPTY_SYSTEM,
    EMPTY_THOUGHTS,
    ENDS_WHOLE,
    FOUND_BY_CLASS,
    LOSS_OF_MESSAGES,
    NO_EMPTY_THOUGHTS,
    NOT_OF_ALL_RANKS,
    NOT_ON_MAMBA,
    ON_MODELSCOPE,
    OPENING_TRAINED,
    OTHER_WORDS,
    PACKED_AT_ONCE,
    READ_TWICE,
    ROWS_UNTRAINED,
    SYSTEM_THERE,
    THOUGHTS_KEPT,
    TRAINED_THOUGHTS,
)
from finetune.data.formats import Conversation, parse_row
from finetune.data.packing import BatchConfig, arrange_epoch
from finetune.errors import UserError
from tests.convert.conftest import Convert, said

SWIFT = {"model": "org/model", "tuner_type": "lora", "dataset": ["rows.jsonl"], "max_length": 512}
PACKED = PACKED_AT_ONCE.format("a thousand", "")
V1 = {
    "model": "Qwen/Qwen3-4B",
    "dist_config": {"name": "fsdp2"},
    "train_dataset": "a/rows",
    "max_steps": 10,
}


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("Qwen/Qwen2.5-7B", [SYSTEM_THERE]),
        ("Qwen/Qwen2.5-7B-Instruct", []),
        ("Qwen/Qwen2.5-Math-1.5B", [SYSTEM_THERE]),
        ("Qwen/Qwen3-8B", [EMPTY_THOUGHTS.format("in every turn"), THOUGHTS_KEPT]),
        ("Qwen/Qwen3.5-4B", [EMPTY_THOUGHTS.format("in every turn"), THOUGHTS_KEPT]),
        ("Qwen/Qwen3-4B-Instruct-2507", []),
        ("Qwen/Qwen3-4B-Thinking-2507", [THOUGHTS_KEPT]),
        ("deepseek-ai/DeepSeek-R1-0528-Qwen3-8B", [THOUGHTS_KEPT]),
        ("Qwen/QwQ-32B", [THOUGHTS_KEPT]),
        ("google/gemma-4-E2B-it", []),
        ("OpenBMB/MiniCPM5-1B", [EMPTY_THOUGHTS.format("in every turn"), THOUGHTS_KEPT]),
        ("Tencent-Hunyuan/Hy3-preview", [EMPTY_THOUGHTS.format("in every turn"), THOUGHTS_KEPT]),
        ("MiniMax/MiniMax-M2", [THOUGHTS_KEPT]),
    ],
)
def test_what_ms_swifts_template_of_a_model_writes_by_itself_is_said(
    name: str, lines: list[str], convert: Convert
) -> None:
    """default_system, non_thinking_prefix and is_thinking of its template/templates, by model/models."""
    text = said(convert(SWIFT, model=name))
    known = (SYSTEM_THERE, EMPTY_THOUGHTS.format("in every turn"), THOUGHTS_KEPT)
    assert [line for line in known if line in text] == lines
    assert (OPENING_TRAINED in text) is (THOUGHTS_KEPT in lines)
    assert EMPTY_SYSTEM in text
    assert SYSTEM_THERE not in said(convert(SWIFT, model=name, system="You help."))


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("baidu/ERNIE-4.5-21B-A3B-PT", [EARLIER_ENDS, NO_EMPTY_THOUGHTS]),
        ("openai/gpt-oss-20b", [EARLIER_ENDS]),
        ("mistralai/Mistral-7B-Instruct-v0.3", [ANY_SYSTEM]),
        ("mistralai/Mistral-Nemo-Instruct-2407", [next(iter(OTHER_WORDS.values()))]),
        ("meta-llama/Llama-2-7b-chat-hf", [ANY_SYSTEM]),
        ("meta-llama/Llama-3.1-8B-Instruct", []),
        ("Tencent-Hunyuan/Hunyuan-A13B-Instruct", [NO_EMPTY_THOUGHTS]),
        ("Tencent-Hunyuan/Hunyuan-7B-Instruct", [EMPTY_THOUGHTS.format("in every turn")]),
        ("Tencent-Hunyuan/Hy3", [TRAINED_THOUGHTS.format("in every turn")]),
        ("Qwen/Qwen3Guard-Gen-4B", [TRAINED_THOUGHTS.format("in every turn")]),
        ("ByteDance-Seed/Seed-OSS-36B-Instruct", [OTHER_WORDS["seed-oss"]]),
    ],
)
def test_words_that_ms_swifts_template_of_a_model_adds_are_said(
    name: str, lines: list[str], convert: Convert
) -> None:
    """chat_sep, suffix, default_system and template_cls of its templates, by model/models; those of
    ERNIE, Hunyuan, Hy3, Mistral, Qwen3Guard and Seed-OSS by running its encode on a row.
    """
    text = said(convert(SWIFT, model=name))
    empty, trained = (note.format("in every turn") for note in (EMPTY_THOUGHTS, TRAINED_THOUGHTS))
    known = (EARLIER_ENDS, ANY_SYSTEM, NO_EMPTY_THOUGHTS, empty, trained, *OTHER_WORDS.values())
    assert [line for line in known if line in text] == lines


def test_an_empty_thought_of_ms_swifts_may_stand_after_questions_alone(convert: Convert) -> None:
    """non_thinking_prefix_only_after_user of Gemma4Template and DeepseekV3_1Template."""
    text = said(convert(SWIFT, model="google/gemma-4-31B-it"))
    assert EMPTY_THOUGHTS.format("in every turn but those after a tool's result") in text


def test_qwen3_8_keeps_thoughts_under_last_round_too(convert: Convert) -> None:
    """preserve_thinking of its TemplateMeta."""
    text = said(convert(SWIFT, model="Qwen/Qwen3.8-27B", loss_scale="last_round"))
    assert EMPTY_THOUGHTS.format("in every turn") in text and THOUGHTS_KEPT in text


@pytest.mark.parametrize(
    ("keys", "is_said"),
    [
        ({"model": "nv-community/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16"}, True),
        ({"model": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"}, True),
        ({"model": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "template": "qwen2_5"}, False),
        ({"model": "Qwen/Qwen3-8B"}, False),
        ({"model": "Tencent-Hunyuan/Hy3"}, False),
        ({"model": "Qwen/Qwen2.5-7B-Instruct"}, False),
    ],
)
def test_a_template_of_ms_swifts_without_an_empty_thought_is_said_of_models_that_may_write_one(
    keys: dict[str, object], is_said: bool, convert: Convert
) -> None:
    """QwenTemplateMeta of Nemotron 3.5 in its template/templates/llm.py: thinking_prefix, which
    begins answers of inference, and no non_thinking_prefix.
    """
    assert (NO_EMPTY_THOUGHTS in said(convert(SWIFT, **keys))) == is_said


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("LLM-Research/Meta-Llama-3.1-8B-Instruct", "meta-llama/Meta-Llama-3.1-8B-Instruct"),
        (
            "LLM-Research/Meta-Llama-3.1-8B-Instruct-AWQ-INT4",
            "hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4",
        ),
        ("LLM-Research/phi-4", "microsoft/phi-4"),
        ("AI-ModelScope/Mistral-7B-v0.2-hf", "alpindale/Mistral-7B-v0.2-hf"),
        ("AI-ModelScope/Mistral-7B-v0.1", "mistralai/Mistral-7B-v0.1"),
        ("modelscope/Llama-2-7b-chat-ms", "meta-llama/Llama-2-7b-chat-hf"),
        ("openai-mirror/gpt-oss-20b", "openai/gpt-oss-20b"),
        ("ZhipuAI/GLM-4.5-Air", "zai-org/GLM-4.5-Air"),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
    ],
)
def test_a_model_of_modelscopes_hub_is_named_as_on_hugging_faces(
    name: str, there: str, convert: Convert
) -> None:
    """Model(ms_model_id, hf_model_id) of its model/models."""
    assert convert(SWIFT, model=name).recipe["model_name_or_path"] == there
    assert convert(SWIFT, model=name, use_hf=True).recipe["model_name_or_path"] == name


def test_a_name_of_modelscopes_hub_that_ms_swift_does_not_list_is_to_do(convert: Convert) -> None:
    to_do = convert(SWIFT, model="AI-ModelScope/Nemotron-Mini-4B-Instruct").to_do
    assert any(ON_MODELSCOPE in line for line in to_do)


def test_the_suffix_of_ms_swifts_templates_is_trained_whole(convert: Convert) -> None:
    """_add_dynamic_eos of its template/base.py: `<|im_end|>\\n` of ChatML, after each answer."""
    assert ENDS_WHOLE in said(convert(SWIFT))
    assert ENDS_WHOLE not in said(convert(SWIFT, loss_scale="all"))
    assert ENDS_WHOLE not in said(convert(SWIFT, model="meta-llama/Llama-3.1-8B-Instruct"))
    assert EARLIER_ENDS in said(convert(SWIFT, model="openai/gpt-oss-20b"))


def test_the_thoughts_of_earlier_turns_are_left_out_there_under_last_round(
    convert: Convert,
) -> None:
    text = said(convert(SWIFT, model="Qwen/Qwen3-8B", loss_scale="last_round"))
    assert EMPTY_THOUGHTS.format("in the last turn") in text and THOUGHTS_KEPT not in text


def test_what_ms_swift_does_with_thoughts_is_said_by_its_keys(convert: Convert) -> None:
    """_set_loss_scale of its template_args.py, _get_preserve_thinking of its template/base.py."""
    keys = {"disable_ignore_empty_think": True, "preserve_thinking": False}
    text = said(convert(SWIFT, model="Qwen/Qwen3-8B", **keys))
    assert TRAINED_THOUGHTS.format("in every turn") in text and THOUGHTS_KEPT not in text
    assert "preserve_thinking: false" in text
    last = {"loss_scale": "last_round", "preserve_thinking": True}
    text = said(convert(SWIFT, model="Qwen/Qwen3-8B", **last))
    assert THOUGHTS_KEPT in text and "preserve_thinking: " not in text


@pytest.mark.parametrize(
    ("keys", "lines"),
    [
        ({}, [NOT_OF_ALL_RANKS]),
        ({"streaming": True, "max_steps": 9}, []),
        ({"sequence_parallel_size": 2}, [READ_TWICE]),
        ({"packing": True}, [NOT_OF_ALL_RANKS, PACKED]),
        ({"model": "Qwen/Qwen3.5-4B"}, [NOT_OF_ALL_RANKS, DRAWN_ANEW]),
        ({"model": "Qwen/Qwen3.5-4B", "truncation_strategy": "right"}, [NOT_OF_ALL_RANKS]),
        ({"lazy_tokenize": True}, [NOT_OF_ALL_RANKS, DRAWN_ANEW]),
    ],
)
def test_which_rows_ms_swift_leaves_out_packs_or_draws_is_said(
    keys: dict[str, Any], lines: list[str], convert: Convert
) -> None:
    """BatchSamplerShard, SequenceParallelSampler, PackingDataset and LazyLLMDataset."""
    text = said(convert(SWIFT, **keys))
    known = (NOT_OF_ALL_RANKS, READ_TWICE, PACKED, DRAWN_ANEW)
    assert LOSS_OF_MESSAGES in text
    assert [line for line in known if line in text] == lines


@pytest.mark.parametrize(
    ("strategy", "stay"), [("normal", False), ("padding_free", True), ("dynamic_batching", True)]
)
def test_factorys_v1_leaves_out_rows_without_answers_in_normal_batches(
    strategy: str, stay: bool, convert: Convert
) -> None:
    """_drop_unsupervised of its core/utils/batching.py."""
    made = convert(V1, batching_strategy=strategy, flash_attn="flash_attention_2")
    assert (UNTRAINED_BY_CUT.format("") in said(made)) == stay


def test_factorys_v1_leaves_clipping_and_a_division_to_deepspeed(convert: Convert) -> None:
    """Its trainer clips without DeepSpeed alone; DeepSpeed divides by the micro-batches again."""
    keys = {"max_grad_norm": 0.5, "global_batch_size": 64}
    sharded = convert(V1, **keys)
    assert sharded.recipe["max_grad_norm"] == 0.5 and DIVIDED_AGAIN not in said(sharded)
    by_deepspeed = {"dist_config": {"name": "deepspeed", "config_file": "ds_z3_config.json"}}
    made = convert(V1 | by_deepspeed, **keys)
    assert "max_grad_norm" not in made.recipe and "max_grad_norm" in made.ignored
    assert DIVIDED_AGAIN in said(made)


def test_of_several_processes_of_ms_swift_each_packs_its_share_of_the_rows(
    convert: Convert,
) -> None:
    """create_packed_idx of its PackingDataset."""
    shares = ", of each of 4 shares by itself (packing_num_proc),"
    made = convert(SWIFT, packing=True, packing_num_proc=4)
    assert PACKED_AT_ONCE.format("a thousand", shares) in made.remarks


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_ms_swift_counts_both_answers_of_a_row_in_a_packed_one(kind: str, convert: Convert) -> None:
    """sum(length) in create_packed_idx of its PackingDataset: each of these pairs fills a row."""
    pairs_of_512_tokens = np.full(2 * 4, 256, np.int32)
    config = BatchConfig(seed=0, packing=True, max_length=512, global_batch_size=1)
    assert len(arrange_epoch(pairs_of_512_tokens, config, 2, 0)) == 2
    note = PACKED_BY_SUM.format(PACKED_ANSWERS[kind])
    pairs = {"rlhf_type": kind, "rpo_alpha": 0.1}
    packed = convert(SWIFT, packing=True, **pairs)
    assert f"packing: true   ({note})" in packed.differences
    assert packed.recipe["packing"] and note not in said(convert(SWIFT, packing="no", **pairs))
    of_micro_batches = [line for line in packed.remarks if line.startswith("rpo_alpha")]
    assert of_micro_batches == ([CHOSEN_BY_MICRO_BATCH] if kind == "dpo" else [])


def test_ms_swifts_limit_of_length_is_the_models(convert: Convert) -> None:
    text = said(convert(SWIFT, max_length=None))
    assert MODELS_LIMIT_NOTE in text and UNLIMITED_NOTE not in text


def test_ms_swift_puts_no_adapter_on_mambas_out_proj(convert: Convert) -> None:
    name = "nvidia/NVIDIA-Nemotron-Nano-9B-v2"
    assert NOT_ON_MAMBA in said(convert(SWIFT, model=name))
    assert NOT_ON_MAMBA not in said(convert(SWIFT, model=name, target_modules=["q_proj"]))
    assert NOT_ON_MAMBA in said(convert(SWIFT, model=name, target_modules=["all-linear", "a"]))


@pytest.mark.parametrize(
    "file",
    [
        SWIFT
        | {
            "model": "Qwen/Qwen2.5-1.5B",
            "target_modules": ["all-linear", "q_proj", "embed_tokens", "lm_head"],
        },
        {
            "base_model": "Qwen/Qwen2.5-1.5B",
            "datasets": [{"path": "a/rows", "type": "chat_template"}],
            "adapter": "lora",
            "lora_target_linear": True,
            "lora_target_modules": ["q_proj", "embed_tokens", "lm_head"],
        },
    ],
)
def test_what_is_named_beside_all_linear_layers_is_adapted_too_or_said(
    file: dict[str, Any], convert: Convert
) -> None:
    """get_target_modules of ms-swift and _build_peft_lora_config of Axolotl add the layers that they find to the names."""
    made = convert(file)
    assert made.recipe["lora_target_modules"] == ["all-linear", "lm_head"]
    embedding = f'lora_target_modules: ["embed_tokens"]   ({EMBEDDING_ADAPTED})'
    assert embedding in said(made) and NO_LAYER not in said(made)


def test_routers_that_ms_swift_finds_are_said(convert: Convert) -> None:
    text = said(convert(SWIFT, target_modules=["all-linear", "all-router"]))
    assert f'target_modules: ["all-router"]   ({FOUND_BY_CLASS})' in text


def test_experts_that_ms_swift_adapts_under_transformers_4_are_said(convert: Convert) -> None:
    mixture = "Qwen/Qwen3-30B-A3B-Instruct-2507"
    assert EXPERTS_UNDER_4 in said(convert(SWIFT, model=mixture))
    assert EXPERTS_UNDER_4 not in said(convert(SWIFT, model=mixture, tuner_type="full"))
    assert EXPERTS_UNDER_4 not in said(convert(SWIFT, model="Qwen/Qwen3-8B"))


@pytest.mark.parametrize(
    ("file", "line"), [("fsdp2.json", REDUCED_IN_16_BITS), ("multi_node.yaml", MAYBE_REDUCED)]
)
def test_the_file_of_an_accelerate_launch_may_shard(file: str, line: str, tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    options = "--model org/model --dataset rows.jsonl --max_length 512 --torch_dtype bfloat16"
    script.write_text(f"accelerate launch --config_file {file} swift/cli/sft.py {options}\n")
    assert line in said(convert_file(script))
    script.write_text(f"swift sft {options}\n")
    assert line not in said(convert_file(script))


@pytest.mark.parametrize(
    ("file", "layout"),
    [
        ("./activation_cpu_offload/fsdp2.json", "fsdp_full_shard_auto"),
        ("./configs/fsdp2_offload.json", "fsdp_cpu_offload"),
    ],
)
def test_the_folder_of_ms_swifts_fsdp_file_says_nothing_of_its_weights(
    file: str, layout: str, convert: Convert
) -> None:
    """That folder's file offloads activations."""
    made = convert(SWIFT, fsdp=file, torch_dtype="bfloat16")
    assert made.recipe["accelerate_config"] == layout


def test_what_ms_swift_trains_whole_beside_adapters_is_said(convert: Convert) -> None:
    """cast_adapter_dtype of peft, and _add_new_special_tokens of its model/register.py."""
    saved = {"modules_to_save": ["embed_tokens"], "torch_dtype": "bfloat16"}
    assert COPIES_IN_16_BITS in said(convert(SWIFT, **saved))
    assert COPIES_IN_16_BITS not in said(convert(SWIFT, **saved, deepspeed="zero2"))
    tokens = {"new_special_tokens": ["<a>"]}
    assert ROWS_UNTRAINED in said(convert(SWIFT, **tokens))
    assert ROWS_UNTRAINED not in said(convert(SWIFT, **tokens, **saved))
    assert ROWS_UNTRAINED not in said(convert(SWIFT, **tokens, tuner_type="full"))


def test_new_tokens_get_the_rows_that_ms_swift_gives_them(convert: Convert) -> None:
    """_add_new_special_tokens of its model/register.py: math.ceil(len(tokenizer) / 128) * 128."""
    made = convert(SWIFT, new_special_tokens=["<a>"], tuner_type="full")
    assert made.recipe["pad_vocab_to_multiple_of"] == 128
    assert "pad_vocab_to_multiple_of" not in convert(SWIFT).recipe


def test_keys_of_ms_swift_that_ask_for_nothing_have_no_line(convert: Convert) -> None:
    asked = {"freeze_llm": True, "tuner_backend": "unsloth"}
    assert all(f"{key}: " in said(convert(SWIFT, **asked)) for key in asked)
    usual = {"freeze_llm": False, "tuner_backend": "peft", "use_logits_to_keep": True}
    usual["use_ray"] = True
    assert not any(f"{key}: " in said(convert(SWIFT, **usual)) for key in usual)


def test_awq_computes_in_float16_in_ms_swift(convert: Convert) -> None:
    """update_dtype of transformers' AwqQuantizer."""
    assert DEQUANTIZED_AWQ in said(convert(SWIFT, model="Qwen/Qwen2.5-7B-Instruct-AWQ"))


def test_the_rows_of_data_sets_that_ms_swift_knows(convert: Convert) -> None:
    """Its dataset/dataset/llm.py."""
    names = ["AI-ModelScope/alpaca-gpt4-data-zh#500", "swift/self-cognition:qwen3#600", "a/b"]
    made = convert(SWIFT, dataset=names)
    assert made.recipe["datasets"][1] == {
        "path": "modelscope/self-cognition",
        "type": "messages",
        "weight": round(600 / 108, 6),
        "prompt_column": "query",
        "completion_column": "response",
    }
    assert made.recipe["datasets"][0] == {
        "path": "llm-wizard/alpaca-gpt4-data-zh",
        "type": "alpaca",
        "max_samples": 500,
    }
    assert [line.split(": ")[1] for line in made.to_do] == ["a/b"]
    assert "输入：" in said(made) and "/no_think" in said(made)
    assert "/no_think" not in said(convert(SWIFT, dataset=["swift/self-cognition"]))
    streamed = convert(SWIFT, dataset=names, streaming=True, max_steps=9)
    assert REPEATED in said(made) and REPEATED not in said(streamed)


def test_the_question_and_the_answer_of_advertise_gen_are_its_columns(convert: Convert) -> None:
    """Source: its dataset/dataset/llm.py."""
    made = convert(SWIFT, dataset=["lvjianjin/AdvertiseGen#9"])
    source = DatasetSource(**{**made.recipe["datasets"][0], "path": "rows.jsonl"})
    document = parse_row({"content": "a red skirt", "summary": "Buy it"}, source).document
    assert isinstance(document, Conversation)
    assert [turn["content"] for turn in document.messages] == ["a red skirt", "Buy it"]


@pytest.mark.parametrize("names", [["a/b"], ["a/b", "swift/self-cognition#9"]])
def test_a_name_for_the_model_is_read_with_the_data_set_on_itself_alone(
    names: list[str], convert: Convert
) -> None:
    """Source: init_self_cognition_preprocessor of its dataset/loader.py."""
    made = convert(SWIFT, dataset=names, model_name="robot", model_author="us")
    assert ("model_name" in made.ignored) == (len(names) == 1) != ("{{NAME}}" in said(made))


def test_keys_of_what_is_refused_are_refused_with_it(convert: Convert) -> None:
    made = convert(SWIFT, use_galore=True, galore_quantization=True)
    assert "galore_quantization: true, use_galore: true   (GaLore: not supported)" in said(made)
    made = convert(SWIFT, init_weights="lora-ga", lora_ga_scale="stable")
    assert "not known here" not in said(made)


def test_adapters_of_lora_ga_have_pefts_defaults_whatever_the_file_says(convert: Convert) -> None:
    """Source: prepare_adapter of its pipelines/train/tuner.py, and get_lora_ga_model of the package lora_ga."""
    keys = {
        "init_weights": "lora-ga",
        "lora_rank": 16,
        "use_rslora": True,
        "target_modules": "q_proj",
    }
    made = convert(SWIFT, **keys)
    adapters = [made.recipe[key] for key in ("lora_r", "lora_alpha", "lora_dropout")]
    defaults = LoraConfig()
    assert adapters == [defaults.r, defaults.lora_alpha, defaults.lora_dropout]
    assert "use_rslora" not in made.recipe
    assert made.recipe.get("lora_target_modules", "all-linear") == "all-linear"
    assert BY_LORA_GA in said(made)
    for others in ({"init_weights": "pissa"}, {"tuner_backend": "unsloth"}):
        made = convert(SWIFT, **(keys | others))
        assert made.recipe["lora_r"] == 16 and BY_LORA_GA not in said(made)


def test_a_pattern_of_layers_stands_for_their_names(convert: Convert) -> None:
    """__post_init__ of its arguments/tuner_args.py reads the pattern before the names."""
    made = convert(SWIFT, target_regex=r".*\.(q|k)_proj", target_modules=["v_proj"])
    assert made.recipe["lora_target_modules"] == ["q_proj", "k_proj"]
    assert not any("target_" in line for line in made.differences)
    made = convert(SWIFT, target_regex=r"model\.layers\.(0|1)\..*\.q_proj")
    assert any("target_regex" in line for line in made.differences)


@pytest.mark.parametrize("start", [True, "true", False, "pissa"])
def test_pefts_own_start_of_adapters_is_no_other_one_there(convert: Convert, start: Any) -> None:
    """Source: __post_init__ of its arguments/tuner_args.py, and reset_lora_parameters of peft."""
    made = convert(SWIFT, init_weights=start)
    is_own = start in (True, "true")
    assert ("init_weights" in made.ignored) == is_own
    assert ("another start of adapters" in made.missing_capabilities) == (not is_own)
    assert (BOTH_RANDOM in said(made)) == (start is False)
    layer = get_peft_model(
        nn.Sequential(nn.Linear(4, 4)),
        LoraConfig(target_modules=["0"], init_lora_weights=start is not False),
    )
    second = dict(layer.named_parameters())["base_model.model.0.lora_B.default.weight"]
    assert second.any() == (start is False)


def test_a_column_of_scores_that_ms_swift_leaves_unread_does_not_refuse_its_rows(
    convert: Convert,
) -> None:
    """Source: remove_useless_columns of its dataset/preprocessor/core.py."""
    name = "Chinese-DeepSeek-R1-Distill-data-110k-SFT"
    made = convert(SWIFT, dataset=[f"liucong/{name}#9"])
    source = DatasetSource(**{**made.recipe["datasets"][0], "path": "rows.jsonl"})
    row = {"instruction": "Two?", "input": "", "output": "2", "score": 9}
    document = parse_row(row, source).document
    assert isinstance(document, Conversation)
    assert [turn["content"] for turn in document.messages] == ["Two?", "2"]


@pytest.mark.parametrize(
    ("count", "keys", "asked"),
    [
        (1000, {}, {"weight": 9.259259}),
        (100, {}, {"max_samples": 100}),
        (1000, {"split_dataset_ratio": 0.1}, {"max_samples": 1000}),
        (1000, {"streaming": True, "max_steps": 9}, {"max_samples": 1000}),
    ],
)
def test_rows_that_ms_swift_repeats_are_repeated_where_their_number_is_known(
    count: int, keys: dict[str, Any], asked: dict[str, Any], convert: Convert
) -> None:
    """Source: sample_dataset of its dataset/utils.py, and the list of data sets that it documents."""
    made = convert(SWIFT, dataset=[f"swift/self-cognition#{count}"], **keys)
    entry = made.recipe["datasets"][0]
    assert {key: entry[key] for key in ("max_samples", "weight") if key in entry} == asked
    assert (REPEATED in said(made)) == (not keys.get("streaming") and "weight" not in asked)
    whole, rest = divmod(asked.get("weight", 1), 1)
    assert "weight" not in asked or int(whole) * 108 + round(rest * 108) == count


@pytest.mark.parametrize(
    "keys",
    [
        {"model": "deepseek-ai/DeepSeek-OCR"},
        {"model": "AIDC-AI/Ovis2.5-2B"},
        {"model": "deepseek-ai/deepseek-vl2-tiny"},
        {"dataset": ["AI-ModelScope/LaTeX_OCR:human_handwrite#20"]},
    ],
)
def test_images_of_ms_swift_are_refused(keys: dict[str, Any], convert: Convert) -> None:
    with pytest.raises(UserError, match="images by ms-swift"):
        convert(SWIFT, **keys)


def test_a_limit_of_minus_one_keeps_all_checkpoints(convert: Convert) -> None:
    assert convert(SWIFT, save_total_limit=-1).recipe["save_total_limit"] is None


def test_fsdpturbo_of_llama_factorys_v1_trains_weights_in_bfloat16(convert: Convert) -> None:
    """shard_model of its plugins/trainer_plugins/distributed/fsdpturbo.py; buffers are cast too."""
    turbo = convert(V1, dist_config={"name": "fsdpturbo"})
    assert turbo.recipe["dtype"] == "bfloat16" and ROTATION_ROUNDED in said(turbo)
    assert "dtype" not in convert(V1).recipe and ROTATION_ROUNDED not in said(convert(V1))
    rotation = LlamaRotaryEmbedding(LlamaConfig(hidden_size=32, num_attention_heads=2))
    exact = rotation.inv_freq.clone()
    assert not torch.equal(rotation.to(torch.bfloat16).inv_freq.float(), exact)


@pytest.mark.parametrize(
    ("sharding", "start", "is_said"),
    [
        ({"name": "fsdp2"}, "init_on_rank0", True),
        ({"name": "fsdp2"}, "init_on_meta", False),  # it restores them
        ({"name": "deepspeed"}, "init_on_rank0", False),
        (None, "init_on_rank0", False),
    ],
)
def test_buffers_that_llama_factorys_v1_leaves_empty_are_said(
    sharding: dict[str, str] | None, start: str, is_said: bool, convert: Convert
) -> None:
    """shard_model of its fsdp2.py calls to_empty, and then fills what is in the state_dict."""
    text = said(convert(V1, dist_config=sharding, init_config={"name": start}))
    assert ("have whatever was in memory under FSDP there" in text) == is_said
    rotation = LlamaRotaryEmbedding(LlamaConfig(hidden_size=32, num_attention_heads=2))
    kept, first = rotation.state_dict(), rotation.inv_freq.data_ptr()
    assert not kept and rotation.to_empty(device="cpu").inv_freq.data_ptr() != first


def test_what_llama_factorys_v1_trains_of_a_model_that_reads_images_is_said(
    convert: Convert,
) -> None:
    """Its core/model_engine.py freezes nothing, and its processor resizes no image by itself."""
    file = V1 | {"model": "Qwen/Qwen3.5-0.8B", "train_dataset": "a/multimodal"}
    text = said(convert(file))
    assert TRAINED_TOWER in text and OWN_THOUGHT in text and THOUGHT_WHOLE not in text
    assert "image_max_pixels" not in text
    assert TOWER_ADAPTED in said(convert(file, peft_config={"name": "lora"}))


def test_the_keys_of_llama_factorys_v1_are_its_arguments(convert: Convert) -> None:
    """Its config/training_args.py and config/model_args.py."""
    keys = {"save_steps": 20, "cp_size": 1, "dist_timeout": 60, "full_determinism": True}
    made = convert(V1, **keys, custom_chat_template="{{ messages }}")
    assert made.recipe["save_steps"] == 20 and made.recipe["timeout_seconds"] == 60
    assert made.recipe["chat_template"] == "{{ messages }}"
    assert "not known here" not in said(made) and OWN_THOUGHT not in said(made)
    assert "cp_size: 2" in str(convert(V1, cp_size=2, cp_mode="ulysses").accelerate_file)
    assert convert(V1, save_epochs=1).recipe["save_strategy"] == "epoch"


@pytest.mark.parametrize("tuner", [None, "full"])
def test_ms_swifts_muon_is_muon_here(tuner: str | None, convert: Convert) -> None:
    """optimizers/muon.py has Moonlight's, as LLaMA-Factory; it has one group, which decays whole."""
    keys = {"optimizer": "muon", "optim": "adamw_torch", "lazy_tokenize": False}
    made = convert(SWIFT | {"tuner_type": tuner}, weight_decay=0.1, **keys)
    assert made.recipe["optim"] == "muon" and ROUNDED_MORE_OFTEN in said(made)
    assert (ALL_DECAYED in made.remarks) == (tuner == "full")
    assert not made.missing_capabilities


@pytest.mark.parametrize(("name", "is_said"), [("default", False), ("galore", True)])
def test_another_optimizer_of_ms_swift_is_said(name: str, is_said: bool, convert: Convert) -> None:
    made = convert(SWIFT, optimizer=name)
    assert (ANOTHER_OPTIMIZER in said(made)) == is_said and made.recipe.get("optim") != "muon"


def test_a_list_of_data_sets_of_llama_factorys_v1_is_read(tmp_path: Path, convert: Convert) -> None:
    """_load_dataset of its core/data_engine.py, and adjust_data_index of its loader.py."""
    (tmp_path / "rows.json").write_text("[]")
    listed = {
        "one": {"path": "rows.json", "source": "local", "converter": "alpaca", "size": 50},
        "two": {"path": "a/b", "split": "test", "weight": 2.0},
    }
    (tmp_path / "listed.yaml").write_text(yaml.safe_dump(listed))
    made = convert(V1, train_dataset="listed.yaml")
    assert made.recipe["datasets"] == [
        {"path": str(tmp_path / "rows.json"), "type": "alpaca", "max_samples": 50},
        {"path": "a/b", "split": "test"},
    ]
    assert not made.to_do and DRAWN_AGAIN in said(made) and "two.weight: 2.0" in said(made)
    assert V1_ROWS in said(made) and V1_ROWS in said(convert(V1))
    assert V1_ROWS in said(convert(V1, train_dataset="elsewhere.yaml"))
    listed["two"]["converter"] = "sharegpt"
    (tmp_path / "listed.yaml").write_text(yaml.safe_dump(listed))
    assert V1_ROWS not in said(convert(V1, train_dataset="listed.yaml"))


def test_llama_factorys_script_is_its_command(tmp_path: Path) -> None:
    file = {"model_name_or_path": "org/model", "stage": "sft", "do_train": True, "dataset": "a"}
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(file))
    script = tmp_path / "train.sh"
    script.write_text("accelerate launch --config_file fsdp.yaml src/train.py theirs.yaml\n")
    made = convert_file(script)
    assert made.tool == "LLaMA-Factory" and made.recipe["model_name_or_path"] == "org/model"
