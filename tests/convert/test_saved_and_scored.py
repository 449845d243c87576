"""What a tool writes when it has trained, and which token it scores: where that is another than here."""

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from finetune.convert.automodel import SAVED_IN_PARTS
from finetune.convert.axolotl import MORE_POSITIONS
from finetune.convert.base_model import PADDING_SAVED
from finetune.convert.by_tool import ADAPTERS_SAVED, SAVED_BY_LAUNCH
from finetune.convert.chat_templates import SCORED_END, SCORED_EOS_THERE
from finetune.convert.conversion import REDUCED_IN_16_BITS
from finetune.convert.numbers import JOINED_BREAKS, LEFT_OUT, OF_TEXTS, SPACE_BEFORE_ANSWERS
from finetune.convert.objectives import NO_CROSS_ENTROPY
from tests.convert.conftest import Convert, said
from tests.convert.test_newest_versions import AXOLOTL, FACTORY
from tests.convert.test_what_differs import NEMO

TEXT = FACTORY | {"model_name_or_path": "Qwen/Qwen3-8B", "template": "qwen3"}
SWIFT = {"model": "Qwen/Qwen3-8B", "tuner_type": "full", "dataset": ["a/rows"]}
ZERO = {"deepspeed": "ds_z3_config.json"}
TRL = {"model_name_or_path": "Qwen/Qwen3-8B", "dataset_name": "a/rows"}


@pytest.mark.parametrize(
    ("file", "exported"),
    [
        (TEXT, "float32"),
        (TEXT | {"pure_bf16": True}, "bfloat16"),
        (TEXT | ZERO, "bfloat16"),
        (TEXT | {"use_badam": True}, None),
        (TEXT | {"finetuning_type": "lora"}, None),
        (AXOLOTL, "bfloat16"),
        (AXOLOTL | {"bf16": False, "fp16": False}, "float32"),
        (AXOLOTL | {"fsdp": ["full_shard"]}, "float32"),
        (AXOLOTL | {"adapter": "lora"}, None),
        (SWIFT, "bfloat16"),
        (SWIFT | {"torch_dtype": "float32"}, "float32"),
        (TRL, None),
        (TRL | ZERO, "bfloat16"),
    ],
)
def test_an_export_has_the_dtype_that_trainer_saves(
    file: dict[str, object], exported: str | None, convert: Convert
) -> None:
    """Source: save_model of transformers' Trainer, which casts nothing, and Accelerate's get_state_dict and fsdp2_prepare_model."""
    made = convert(file)
    assert made.recipe.get("export_dtype") == exported
    assert (SAVED_BY_LAUNCH in said(made)) == (file == TRL)


@pytest.mark.parametrize(
    ("file", "is_said"),
    [
        (TEXT | ZERO | {"finetuning_type": "lora", "bf16": True}, True),
        (AXOLOTL | ZERO | {"adapter": "lora"}, True),
        (AXOLOTL | {"fsdp": ["full_shard"], "adapter": "lora"}, False),
        (AXOLOTL | ZERO, False),
    ],
)
def test_adapters_that_deepspeed_saves_in_16_bits_are_said(
    file: dict[str, object], is_said: bool, convert: Convert
) -> None:
    """Source: save_model of transformers' Trainer, which saves the module's own state."""
    assert (ADAPTERS_SAVED in said(convert(file))) == is_said


@pytest.mark.parametrize(("file", "in_fp32"), [(TEXT, True), (AXOLOTL, False), (SWIFT, False)])
def test_deepspeeds_stage_0_trains_float32_copies_of_weights_and_gradients_in_16_bits(
    file: dict[str, object], in_fp32: bool, convert: Convert
) -> None:
    """Source: DeepSpeedEngine casts the module at any stage, and FP16_UnfusedOptimizer copies its weights.

    Without it LLaMA-Factory trains in float32 (`in_fp32`), and the others in bfloat16.
    """
    plain = convert(file)
    made = convert(file, deepspeed="configs/ds_z0_config.json")
    assert "dtype" not in made.recipe and ("dtype" in plain.recipe) != in_fp32
    assert made.recipe["export_dtype"] == "bfloat16"
    assert made.recipe["accelerate_config"] == plain.recipe["accelerate_config"]
    assert REDUCED_IN_16_BITS in said(made) and REDUCED_IN_16_BITS not in said(plain)


@pytest.mark.parametrize(
    ("model", "template", "eos"),
    [
        ("Qwen/Qwen2.5-7B", "qwen", "<|im_end|>"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen", None),
        ("google/gemma-3-4b-it", "gemma3", "<end_of_turn>"),
        ("google/gemma-2-2b-it", "gemma2", None),
        ("microsoft/Phi-3-mini-4k-instruct", "phi", "<|end|>"),
        ("microsoft/Phi-4", "phi4", None),
        ("01-ai/Yi-6B", "yi", None),
    ],
)
def test_a_template_of_llama_factorys_names_the_eos_token(
    model: str, template: str, eos: str | None, convert: Convert
) -> None:
    """Source: replace_eos in its data/template.py."""
    for stage in ("sft", "pt"):
        made = convert(TEXT, model_name_or_path=model, template=template, stage=stage)
        assert made.recipe.get("special_tokens", {}).get("eos_token") == eos


def test_an_eos_token_that_is_named_leaves_a_line_break_behind_it_a_token() -> None:
    """add_special_tokens makes it a token that takes no space with it: LLaMA-Factory's, and ours."""
    characters = {token: index for index, token in enumerate(["?", "a", "\n"])}
    end = AddedToken("<|end|>", rstrip=True, normalized=False, special=True)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(BPE(characters, [], unk_token="?")),
        additional_special_tokens=[end],
        eos_token="<|endoftext|>",
    )
    assert len(tokenizer("a<|end|>\na").input_ids) == 3
    tokenizer.add_special_tokens({"eos_token": "<|end|>"})
    assert len(tokenizer("a<|end|>\na").input_ids) == 4


@pytest.mark.parametrize(
    ("template", "line"),
    [("phi", SCORED_END), ("gemma2", SCORED_EOS_THERE), ("qwen", None), ("gemma3", None)],
)
def test_the_token_whose_score_is_read_is_said_where_it_is_another(
    template: str, line: str | None, convert: Convert
) -> None:
    """Source: efficient_eos in PairwiseDatasetProcessor of LLaMA-Factory, whose trainer reads the last token."""
    text = said(convert(TEXT, stage="rm", template=template))
    assert [each for each in (SCORED_END, SCORED_EOS_THERE) if each in text] == [line] * bool(line)


@pytest.mark.parametrize(
    ("keys", "lines"),
    [
        ({"stage": "dpo"}, []),
        ({"stage": "dpo", "pref_loss": "orpo"}, [NO_CROSS_ENTROPY]),
        ({"stage": "kto"}, [NO_CROSS_ENTROPY]),
        ({"stage": "kto", "pref_ftx": None}, []),
    ],
)
def test_a_cross_entropy_that_is_not_added_is_said_once(
    keys: dict[str, object], lines: list[str], convert: Convert
) -> None:
    """Source: get_batch_loss_metrics of LLaMA-Factory's train/dpo/trainer.py and train/kto/trainer.py."""
    made = convert(TEXT | {"pref_ftx": 0.1} | keys)
    about = [line for line in said(made).splitlines() if line.startswith("pref_ftx: ")]
    assert [NO_CROSS_ENTROPY] * any(NO_CROSS_ENTROPY in line for line in about) == lines
    assert len(about) == (keys.get("pref_ftx", 0.1) is not None)


@pytest.mark.parametrize(
    ("model", "length", "is_said"),
    [("TinyLlama/TinyLlama_v1.1", 4096, True), ("meta-llama/Llama-3.1-8B", 8192, False)],
)
def test_positions_that_axolotl_adds_to_the_saved_config_are_said(
    model: str, length: int, is_said: bool, convert: Convert
) -> None:
    """Source: _adjust_model_config of its loaders/model.py."""
    made = convert(AXOLOTL, base_model=model, sequence_len=length)
    assert (MORE_POSITIONS in said(made)) == is_said


PAIRS = {"rl": "dpo", "datasets": [{"path": "a/pairs", "type": "chat_template.default"}]}
CHAT = {"_target_": "a.ChatDataset", "path_or_dataset_id": "a/rows"}
ALPACA = {"datasets": [{"path": "a/rows", "type": "alpaca"}]}


@pytest.mark.parametrize(
    ("keys", "is_said"),
    [
        ({"beta": 0.1, "model_name_or_path": "mistralai/Mistral-7B-v0.1"}, True),
        ({"beta": 0.1, "model_name_or_path": "org/ours"}, True),
        ({"beta": 0.1, "model_name_or_path": "meta-llama/Llama-3.1-8B"}, False),
        ({"beta": 0.1, "model_name_or_path": "HuggingFaceTB/SmolLM2-1.7B"}, False),
        ({"beta": 0.1}, False),
        ({"model_name_or_path": "mistralai/Mistral-7B-v0.1"}, False),
    ],
)
def test_an_answer_of_a_pair_begins_with_a_space_in_trls_older_versions(
    keys: dict[str, object], is_said: bool, convert: Convert
) -> None:
    """Source: tokenize_row of its DPOTrainer, until 0.28. test_preferences.py has the ids."""
    assert (SPACE_BEFORE_ANSWERS in convert(TRL, **keys).remarks) == is_said


@pytest.mark.parametrize(
    ("file", "end"),
    [
        (TRL, OF_TEXTS),
        (TRL | {"assistant_only_loss": True}, ""),
        (TRL | {"datasets": [{"path": "a/b", "messages_column": "messages"}]}, None),
        (TRL | {"beta": 0.1}, LEFT_OUT["TRL", "dpo"]),
        (TRL | {"desirable_weight": 1.0}, LEFT_OUT["TRL", "kto"]),
        (AXOLOTL, ""),
        (AXOLOTL | PAIRS, LEFT_OUT["Axolotl", "dpo"]),
        (AXOLOTL | ALPACA, None),
        (AXOLOTL | {"chat_template": "phi_4"}, None),
        (AXOLOTL | {"chat_template": "gemma3"}, None),  # which trims an answer
        (AXOLOTL | {"chat_template": "jinja", "chat_template_jinja": "{{ messages }}"}, ""),
        (NEMO | {"dataset": CHAT}, ""),
        (NEMO | {"dataset": {**CHAT, "chat_template": "a/chat.jinja"}}, ""),
        (NEMO | {"dataset": {"_target_": "a.make_squad_dataset", "dataset_name": "a/b"}}, None),
        (TEXT, None),
    ],
)
def test_line_breaks_that_join_to_one_token_are_said(
    file: dict[str, object], end: str | None, convert: Convert
) -> None:
    """Source: tokenize_fn of TRL's trainers, ChatTemplateStrategy of Axolotl, and Automodel's
    formatting_utils.py. Where every turn is trained a row is one text here too.
    """
    lines = [line for line in convert(file).remarks if "one token there" in line]
    assert lines == ([] if end is None else [JOINED_BREAKS.format(end)])


@pytest.mark.parametrize(
    ("checkpoint", "is_said"),
    [
        ({"save_consolidated": False}, True),
        ({"model_save_format": "torch_save"}, True),
        ({"model_save_format": "safetensors", "save_consolidated": "final"}, False),
        ({"save_consolidated": False, "enabled": False}, False),
        ({}, False),
    ],
)
def test_weights_that_automodel_saves_in_parts_are_said(
    checkpoint: dict[str, object], is_said: bool, convert: Convert
) -> None:
    """Source: CheckpointingConfig of its components/checkpoint/config.py, whose adapters are whole."""
    assert (SAVED_IN_PARTS in said(convert(NEMO, checkpoint=checkpoint))) == is_said
    peft = {"dim": 8, "target_modules": "*_proj"}
    assert SAVED_IN_PARTS not in said(convert(NEMO, checkpoint=checkpoint, peft=peft))


def test_a_padding_token_that_is_left_out_beside_adapters_is_said(convert: Convert) -> None:
    named = {"special_tokens": {"pad_token": "<|end_of_text|>"}}
    adapted = convert(AXOLOTL, adapter="lora", lora_target_linear=True, **named)
    assert PADDING_SAVED in said(adapted) and "special_tokens" not in adapted.recipe
    assert PADDING_SAVED not in said(convert(AXOLOTL, **named))
