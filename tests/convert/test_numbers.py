"""What a tool's trainer computes otherwise than the run of the converted recipe on the same rows, step by step.

Each line was found by training both: TRL 1.16, Axolotl 0.21, LLaMA-Factory, torchtune and ours, in float32 on a CPU.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Gemma3nTextConfig

from finetune.config.module_names import is_within
from finetune.convert.axolotl import BEST_ON_STEPS, HIDDEN_BY_MASK, LAST_UNMEASURED
from finetune.convert.base_model import SPECIAL_FIRST
from finetune.convert.by_tool import ALTUP_IN_4_BITS, ROUNDED_BEFORE
from finetune.convert.chat_templates import MAYBE_BOS, OF_GEMMA, SECOND_BOS, TOKENIZERS_BOS
from finetune.convert.conversion import (
    LOADED_AS_FILED,
    MASTER_WEIGHTS,
    TRAINED_AS_FILED,
    convert_file,
)
from finetune.convert.factory_v1 import V1_ALPACA
from finetune.convert.numbers import (
    ALL_CLIPPED,
    BOS_BY_KEY,
    BOS_OF_BLOCKS,
    COPIES_WHERE_TIED,
    EMPTY_ANSWERS,
    END_MASKED,
    ENDS_OF_ANSWERS,
    ENDS_OF_TEXTS,
    EOS_AT_CUT,
    EPSILON_BEFORE,
    JOINED_BREAKS,
    LABEL_BEHIND_CUT,
    NAMES_END_SO,
    OF_TEXTS,
    ONE_BREAK,
    OTHER_ATTENTION,
    PAIRS_LEFT_OUT,
    RATES_AHEAD,
    ROUNDED_MORE_OFTEN,
    SYSTEM_MASKED,
    TEXT_CUT,
    TYPED_AS_WORDS,
    UNTRAINED_BY_CUT,
    WARMED_EARLIER,
    WORDS_OF_TURNS,
)
from finetune.convert.objectives import ALWAYS_SIGMOID, COMPLETION_ALONE, SMOOTHED_BEFORE
from finetune.convert.runnable import EMBEDDING_ADAPTED, NO_LAYER
from finetune.convert.value_conversion import Conversion
from finetune.optim.optimizers import orthogonalize

Convert = Callable[..., str]
TRL = {"model_name_or_path": "meta-llama/Llama-3.2-1B", "dataset_name": "a/rows", "bf16": True}
AXOLOTL = {
    "base_model": "meta-llama/Llama-3.2-1B",
    "datasets": [{"path": "a/rows", "type": "chat_template"}],
    "micro_batch_size": 1,
    "bf16": True,
}
FACTORY = {
    "model_name_or_path": "meta-llama/Llama-3.2-1B",
    "stage": "sft",
    "dataset": "rows",
    "template": "llama3",
    "finetuning_type": "full",
}
TUNE: dict[str, Any] = {
    "model": {"_component_": "torchtune.models.llama3_2.llama3_2_1b"},
    "tokenizer": {"_component_": "torchtune.models.llama3.llama3_tokenizer", "path": "a/b"},
    "dataset": {"_component_": "torchtune.datasets.alpaca_dataset"},
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-5},
    "lr_scheduler": {"num_warmup_steps": 10},
}
PAIRS = {"datasets": [{"path": "a/pairs", "type": "chat_template.default"}], "rl": "dpo"}
LORA = {"use_peft": True}


@pytest.fixture
def convert(tmp_path: Path) -> Convert:
    """What is said of a file of some keys."""

    def lines(file: dict[str, Any], **keys: Any) -> str:
        path = tmp_path / "theirs.yaml"
        path.write_text(yaml.safe_dump(file | keys))
        made: Conversion = convert_file(path)
        return "\n".join([*made.differences, *made.remarks])

    return lines


@pytest.mark.parametrize(
    ("file", "keys", "is_said"),
    [
        (TRL, {}, False),
        (TRL, {"warmup_steps": 10}, True),
        (TRL, {"warmup_ratio": 0.1}, True),
        (TRL, {"warmup_ratio": 0.1, "lr_scheduler_type": "constant"}, False),
        (AXOLOTL, {}, True),  # 3% without a key
        (AXOLOTL, {"warmup_steps": 0}, False),
        (FACTORY, {"warmup_ratio": 0.1}, True),
        (TUNE, {}, True),
    ],
)
def test_the_first_step_of_a_warmup_has_rate_0_there(
    convert: Convert, file: dict[str, Any], keys: dict[str, Any], is_said: bool
) -> None:
    assert (WARMED_EARLIER in convert(file, **keys)) == is_said


def test_restarts_put_the_rate_a_step_ahead(convert: Convert) -> None:
    """ReLoRA's rates of Axolotl 0.21 without a warm-up, of four steps: 0.85, 0.5, 0.15 and 0 of the peak."""
    text = convert(AXOLOTL | {"adapter": "lora", "relora": True}, jagged_restart_steps=150)
    assert RATES_AHEAD in text
    assert WARMED_EARLIER not in text
    assert RATES_AHEAD not in convert(AXOLOTL)


@pytest.mark.parametrize(
    ("file", "keys", "is_said"),
    [
        (TRL, {}, True),
        (TRL, {"max_length": None}, False),  # too long a row is an error here
        (TRL, {"beta": 0.1}, True),
        (TRL, {"center_rewards_coefficient": 0.1}, False),
        (FACTORY, {}, True),
        (AXOLOTL, {}, False),  # too long a row is dropped
        (AXOLOTL, {"datasets": [{"path": "a/rows", "type": "completion"}]}, True),
        (
            AXOLOTL,
            {
                "datasets": [{"path": "a/rows", "type": "completion"}],
                "diffusion_lm": {"from_causal_lm": True},
            },
            False,  # the token that is the label behind a cut is never masked
        ),
    ],
)
def test_a_row_that_is_cut_has_a_label_more_here(
    convert: Convert, file: dict[str, Any], keys: dict[str, Any], is_said: bool
) -> None:
    assert (LABEL_BEHIND_CUT in convert(file, **keys)) == is_said


@pytest.mark.parametrize(
    ("file", "keys", "versions"),
    [
        (TRL, {}, f", in TRL before 1.9{OF_TEXTS}"),
        (TRL, {"assistant_only_loss": True}, ", in TRL before 1.9"),
        (TRL, {"max_length": None}, None),
        (TRL, {"beta": 0.1}, ", in TRL 0.29 to 1.8"),
        (FACTORY, {}, None),  # whose cut leaves some of each
        (AXOLOTL, {"excess_length_strategy": "truncate"}, None),  # drop_no_trainable_tokens
        (TUNE, {"tokenizer": TUNE["tokenizer"] | {"max_seq_len": 512}}, None),  # trains prompts
        (
            TUNE,
            {
                "tokenizer": TUNE["tokenizer"] | {"max_seq_len": 512},
                "dataset": {"_component_": "torchtune.datasets.chat_dataset", "source": "a/rows"},
            },
            "",
        ),
    ],
)
def test_a_row_whose_answers_are_cut_off_stays_there(
    convert: Convert, file: dict[str, Any], keys: dict[str, Any], versions: str | None
) -> None:
    """A filter in TRL's newest trainers; select_examples here."""
    text = convert(file, **keys)
    assert ("cut off whole" in text) == (versions is not None)
    assert versions is None or UNTRAINED_BY_CUT.format(versions) in text


@pytest.mark.parametrize(
    ("file", "keys", "is_said"),
    [
        (TRL, {}, False),
        (TRL, {"beta": 0.1}, True),
        (TRL, {"center_rewards_coefficient": 0.1}, True),
        (TRL, {"desirable_weight": 1.0}, False),
        (AXOLOTL, PAIRS, True),
    ],
)
def test_a_pair_that_teaches_nothing_stays_there(
    convert: Convert, file: dict[str, Any], keys: dict[str, Any], is_said: bool
) -> None:
    assert (PAIRS_LEFT_OUT in convert(file, **keys)) == is_said


@pytest.mark.parametrize(
    ("file", "keys", "is_said"),
    [
        (TUNE, {}, True),
        (TUNE, {"tokenizer": {"_component_": "torchtune.models.qwen3.qwen3_tokenizer"}}, False),
        (AXOLOTL, {}, False),
        (AXOLOTL, {"tokenizer_use_mistral_common": True}, True),
        (FACTORY, {}, False),
    ],
)
def test_a_special_token_in_a_text_is_words_for_some_tokenizers(
    convert: Convert, file: dict[str, Any], keys: dict[str, Any], is_said: bool
) -> None:
    """encode of torchtune's SentencePieceBaseTokenizer and TikTokenBaseTokenizer, and Qwen's."""
    assert (TYPED_AS_WORDS in convert(file, **keys)) == is_said


def test_line_breaks_that_torchtune_leaves_out_of_gemmas_answers_are_said(convert: Convert) -> None:
    """encode of its SentencePieceBaseTokenizer: seen with a vocabulary that has a token for two."""
    gemma = {"_component_": "torchtune.models.gemma.gemma_tokenizer", "path": "a/b"}
    assert OF_GEMMA in convert(TUNE, tokenizer=gemma) and OF_GEMMA not in convert(TUNE)


@pytest.mark.parametrize(
    ("file", "keys", "note"),
    [
        (TRL, {}, ENDS_OF_TEXTS),
        (TRL, {"beta": 0.1}, None),
        (FACTORY, {}, None),
        (TUNE, {}, None),
        (AXOLOTL, {"datasets": [{"path": "a/rows", "type": "completion"}]}, ENDS_OF_TEXTS),
        (AXOLOTL, {"datasets": [{"path": "a/rows", "type": "alpaca"}]}, ENDS_OF_ANSWERS),
        (AXOLOTL, {"datasets": [{"path": "a/rows", "type": "chat_template"}]}, EMPTY_ANSWERS),
        (
            AXOLOTL,
            {
                "datasets": None,
                "pretraining_dataset": [{"path": "a/rows", "type": "pretrain"}],
                "sample_packing": True,
                "max_steps": 2,
            },
            None,  # each piece of a text gets an EOS token, as here
        ),
    ],
)
def test_how_a_text_ends_that_holds_its_end_or_nothing_is_said(
    convert: Convert, file: dict[str, Any], keys: dict[str, Any], note: str | None
) -> None:
    """What TRL's add_eos and Axolotl's strategies make of such rows."""
    text = convert(file, **keys)
    known = (ENDS_OF_TEXTS, ENDS_OF_ANSWERS, EMPTY_ANSWERS)
    assert [each for each in known if each in text] == ([note] if note else [])


def test_answers_are_looked_for_in_rows_of_turns_alone(convert: Convert) -> None:
    """Axolotl reads rows of an entry without a type as tokens, and alpaca's answers by themselves."""
    notes = (ENDS_OF_ANSWERS, EMPTY_ANSWERS, JOINED_BREAKS.format(""))
    entries = [{"path": f"a/{kind}", "type": kind} for kind in (None, "alpaca", "chat_template")]
    model = {"base_model": "Qwen/Qwen3-8B"}
    tokens, texts, turns = (convert(AXOLOTL | model, datasets=[each]) for each in entries)
    assert [note in tokens for note in notes] == [False, False, False]
    assert [note in texts for note in notes] == [True, False, False]
    assert [note in turns for note in notes] == [False, True, True]
    both = convert(AXOLOTL | model, datasets=entries[1:])
    assert [note in both for note in notes] == [True, True, True]


@pytest.mark.parametrize(
    ("name", "max_seq_len", "dataset", "is_said"),
    [
        ("qwen2_5.qwen2_5_tokenizer", 512, "chat", True),
        ("qwen3.qwen3_tokenizer", 512, "chat", True),
        ("qwen3.qwen3_tokenizer", None, "chat", False),
        ("qwen3.qwen3_tokenizer", 512, "text_completion", False),
        ("llama3.llama3_tokenizer", 512, "chat", False),
    ],
)
def test_the_end_that_torchtunes_tokenizers_for_qwen_do_not_train_is_said(
    convert: Convert, name: str, max_seq_len: int | None, dataset: str, is_said: bool
) -> None:
    tokenizer = {"_component_": f"torchtune.models.{name}", "max_seq_len": max_seq_len}
    rows = {"_component_": f"torchtune.datasets.{dataset}_dataset", "source": "a/rows"}
    assert (END_MASKED in convert(TUNE, tokenizer=tokenizer, dataset=rows)) == is_said


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("llama2.llama2_tokenizer", "trained if the cut message is"),
        ("mistral.mistral_tokenizer", "trained if the cut message is"),
        ("gemma.gemma_tokenizer", "trained if the cut message is"),
        ("phi3.phi3_mini_tokenizer", "not trained in 0.7, but in 0.6 if the cut message is"),
        ("llama3.llama3_tokenizer", "not trained"),
        ("phi4.phi4_tokenizer", "not trained"),
    ],
)
def test_the_end_of_a_row_that_torchtune_cuts_is_said(
    convert: Convert, name: str, end: str
) -> None:
    """Source: tokenize_messages of its tokenizers, tokenize_messages_no_special_tokens of the first three."""
    tokenizer = {"_component_": f"torchtune.models.{name}", "max_seq_len": 512}
    text = convert(TUNE, tokenizer=tokenizer)
    assert EOS_AT_CUT.format(end) in text and LABEL_BEHIND_CUT not in text
    start = EOS_AT_CUT.partition("{}")[0]
    assert start not in convert(TUNE, tokenizer=tokenizer | {"max_seq_len": None})


@pytest.mark.parametrize(("max_seq_len", "overlength"), [(512, "truncate"), (None, "error")])
def test_a_text_that_torchtune_cuts_loses_its_rest(
    tmp_path: Path, max_seq_len: int | None, overlength: str
) -> None:
    """Source: _prepare_sample of its TextCompletionDataset."""
    rows = {"_component_": "torchtune.datasets.text_completion_dataset", "source": "a/rows"}
    tokenizer = TUNE["tokenizer"] | {"max_seq_len": max_seq_len}
    path = tmp_path / "theirs.yaml"
    path.write_text(yaml.safe_dump(TUNE | {"tokenizer": tokenizer, "dataset": rows}))
    made = convert_file(path)
    assert made.recipe["overlength"] == overlength
    assert (TEXT_CUT in made.remarks) == bool(max_seq_len)
    assert EOS_AT_CUT.partition("{}")[0] not in "\n".join(made.remarks)


@pytest.mark.parametrize(
    ("keys", "overlength"),
    [
        ({}, "truncate"),
        ({"packing": True}, "truncate"),
        ({"packing": True, "packing_strategy": "bfd_split"}, "split"),
        ({"packing_strategy": "bfd_split"}, "truncate"),
        ({"max_length": None}, "error"),
    ],
)
def test_a_text_that_trl_cuts_loses_its_rest_unless_it_is_split(
    tmp_path: Path, keys: dict[str, Any], overlength: str
) -> None:
    """Source: _prepare_dataset of TRL's SFTTrainer, and pack_dataset of its data_utils.py."""
    path = tmp_path / "theirs.yaml"
    path.write_text(yaml.safe_dump(TRL | {"dataset_name": "a/texts"} | keys))
    assert convert_file(path).recipe["overlength"] == overlength


@pytest.mark.parametrize("trains", [True, False])
def test_a_system_message_that_torchtune_does_not_train_is_said(
    convert: Convert, trains: bool
) -> None:
    rows = {"_component_": "torchtune.datasets.chat_dataset", "source": "a/rows"}
    text = convert(TUNE, dataset=rows | {"train_on_input": trains})
    assert (SYSTEM_MASKED in text) == trains


@pytest.mark.parametrize(
    ("keys", "is_said"),
    [
        ({}, True),
        ({"completion_only_loss": True}, False),
        ({"completion_only_loss": False}, False),
        ({"assistant_only_loss": True}, False),
        ({"beta": 0.1}, False),
    ],
)
def test_the_completion_alone_is_trained_where_it_is_messages(
    convert: Convert, keys: dict[str, Any], is_said: bool
) -> None:
    assert (COMPLETION_ALONE in convert(TRL, **keys)) == is_said


@pytest.mark.parametrize("schedule", ["cosine_warmup_with_min_lr", "cosine"])
def test_a_warm_up_that_begins_as_here_has_no_line(convert: Convert, schedule: str) -> None:
    text = convert(TRL, lr_scheduler_type=schedule, warmup_steps=3)
    assert (WARMED_EARLIER in text) == (schedule == "cosine")


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"dtype": "auto"}, MASTER_WEIGHTS),
        ({"dtype": "auto", "bf16": False}, TRAINED_AS_FILED),
        ({"loss_type": "simpo", "cpo_alpha": 0, "simpo_gamma": 0.5}, LOADED_AS_FILED),
        (
            {"loss_type": "simpo", "cpo_alpha": 0, "simpo_gamma": 0.5, "torch_dtype": "float32"},
            None,
        ),
        ({"dtype": "auto", "use_peft": True}, None),
        ({"dtype": None}, LOADED_AS_FILED),
        ({"torch_dtype": None, "beta": 0.1}, LOADED_AS_FILED),
        ({"dtype": None, "use_peft": True}, None),
        ({}, None),
    ],
)
def test_weights_that_trl_trains_in_the_dtype_of_their_files_are_said(
    convert: Convert, keys: dict[str, Any], line: str | None
) -> None:
    text = convert(TRL, **keys)
    lines = (MASTER_WEIGHTS, TRAINED_AS_FILED, LOADED_AS_FILED)
    assert [each for each in lines if each in text] == ([line] if line else [])


@pytest.mark.parametrize(
    ("file", "keys", "is_said"),
    [
        (TRL, {"beta": 0.1, "label_smoothing": 0.1}, True),
        (TRL, {"beta": 0.1, "label_smoothing": 0.0}, False),
        (TRL, {"beta": 0.1, "label_smoothing_factor": 0.1}, False),
        (AXOLOTL | PAIRS, {"dpo_label_smoothing": 0.1}, True),
        (FACTORY, {"stage": "dpo", "dpo_label_smoothing": 0.1}, False),
    ],
)
def test_smoothing_of_pairs_has_no_effect_in_trl_any_more(
    convert: Convert, file: dict[str, Any], keys: dict[str, Any], is_said: bool
) -> None:
    assert (SMOOTHED_BEFORE in convert(file, **keys)) == is_said


@pytest.mark.parametrize(
    ("names", "are_copies", "end_so"),
    [
        (["embed_tokens"], True, False),
        (["lm_head", "embed_tokens"], True, False),
        (["norm"], False, True),
        (["embed_tokens", "norm"], True, True),
    ],
)
def test_what_peft_trains_beside_adapters_is_said(
    convert: Convert, names: list[str], are_copies: bool, end_so: bool
) -> None:
    text = convert(TRL | LORA, lora_modules_to_save=names)
    assert (COPIES_WHERE_TIED in text) == are_copies and (NAMES_END_SO in text) == end_so
    assert (NAMES_END_SO in convert(AXOLOTL, adapter="lora", lora_modules_to_save=names)) == end_so


def test_an_adapter_of_the_embedding_is_said(convert: Convert) -> None:
    text = convert(TRL | LORA, lora_target_modules=["q_proj", "embed_tokens"])
    assert f'lora_target_modules: ["embed_tokens"]   ({EMBEDDING_ADAPTED})' in text
    assert NO_LAYER not in text


@pytest.mark.parametrize(
    ("kind", "trains", "is_said"),
    [("chat_template", True, True), ("chat_template", False, False), ("alpaca", True, False)],
)
def test_words_of_turns_alone_are_trained_there(
    convert: Convert, kind: str, trains: bool, is_said: bool
) -> None:
    rows = [{"path": "a/rows", "type": kind}]
    text = convert(AXOLOTL, datasets=rows, train_on_inputs=trains)
    assert (WORDS_OF_TURNS in text) == is_said


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({}, MAYBE_BOS),
        ({"chat_template": "tokenizer_default"}, MAYBE_BOS),
        ({"chat_template": "chatml"}, TOKENIZERS_BOS),
        ({"chat_template": "llama3"}, None),
        ({"base_model": "google/gemma-3-1b-it"}, None),
    ],
)
def test_the_bos_before_a_prompt_of_axolotls_pairs_is_said(
    convert: Convert, keys: dict[str, Any], line: str | None
) -> None:
    text = convert(AXOLOTL | PAIRS, **keys)
    assert [each for each in (MAYBE_BOS, TOKENIZERS_BOS) if each in text] == [line] * bool(line)
    # Llama 3's rows of Axolotl 0.21, as trained with TRL 1.14.1, began with two
    assert (SECOND_BOS in text) == (line != TOKENIZERS_BOS)


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({}, ONE_BREAK),
        ({"dataset": "chat"}, None),
        ({"stage": "pt"}, BOS_OF_BLOCKS),
        ({"stage": "pt", "packing": False}, BOS_BY_KEY),
    ],
)
def test_what_llama_factory_writes_around_texts_is_said(
    convert: Convert, tmp_path: Path, keys: dict[str, Any], line: str | None
) -> None:
    chat = {"file_name": "chat.json", "formatting": "sharegpt", "columns": {"messages": "messages"}}
    rows = {"rows": {"file_name": "rows.json"}, "chat": chat}
    (tmp_path / "dataset_info.json").write_text(json.dumps(rows))
    text = convert(FACTORY | {"dataset_dir": str(tmp_path)}, **keys)
    assert [each for each in (ONE_BREAK, BOS_BY_KEY, BOS_OF_BLOCKS) if each in text] == [
        line
    ] * bool(line)


def test_what_ms_swift_writes_between_instruction_and_input_is_said(convert: Convert) -> None:
    rows = {"model": "Qwen/Qwen3-8B", "tuner_type": "lora", "dataset": ["a/rows"]}
    assert ONE_BREAK in convert(rows)
    assert ONE_BREAK not in convert(TRL)


def test_the_newer_schema_of_llama_factory_has_a_line_of_its_own(convert: Convert) -> None:
    text = convert({"model": "a/b", "train_dataset": "a/rows", "dist_config": {"name": "fsdp2"}})
    assert V1_ALPACA in text and ONE_BREAK not in text


@pytest.mark.parametrize(
    ("keys", "is_said"),
    [
        ({"pref_loss": "hinge"}, True),
        ({"pref_loss": "ipo"}, True),
        ({"pref_loss": "sigmoid"}, False),
        ({}, False),
        ({"pref_loss": "simpo"}, False),
    ],
)
def test_the_loss_that_llama_factory_computes_of_pairs_is_said(
    convert: Convert, keys: dict[str, Any], is_said: bool
) -> None:
    assert (ALWAYS_SIGMOID in convert(FACTORY, stage="dpo", **keys)) == is_said


def test_muons_iteration_rounds_more_often_there(convert: Convert) -> None:
    assert ROUNDED_MORE_OFTEN in convert(FACTORY, use_muon=True)
    assert ROUNDED_MORE_OFTEN not in convert(FACTORY)


@pytest.mark.parametrize(("trained", "is_said"), [("full", True), ("lora", False)])
def test_the_epsilon_of_muons_own_adamw_is_said(
    convert: Convert, trained: str, is_said: bool
) -> None:
    """step of LLaMA-Factory's third_party/muon/muon.py: a gradient of 1e-7 moves a weight by 0.24 of the rate in the
    first step, and by 0.91 of it by torch's AdamW.
    """
    text = convert(FACTORY, use_muon=True, finetuning_type=trained)
    assert (EPSILON_BEFORE in text) == is_said


def test_muons_updates_are_some_hundredths_apart() -> None:
    """Newton and Schulz's iteration in bfloat16 with every product rounded, as LLaMA-Factory's, and in float64."""
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(172, 64, generator=generator)

    def iterate(dtype: torch.dtype) -> torch.Tensor:
        x = gradient.to(dtype).T
        x = x / (x.norm() + 1e-7)
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        return x.T.double()

    exact = iterate(torch.float64)
    theirs, ours = iterate(torch.bfloat16), orthogonalize(gradient.bfloat16()).double()
    from_exact = [float((each - exact).norm() / exact.norm()) for each in (theirs, ours)]
    assert 0.02 < from_exact[0] < 0.04 and 0.005 < from_exact[1] < 0.02
    assert 0.02 < float((theirs - ours).norm() / exact.norm()) < 0.05


@pytest.mark.parametrize(
    ("keys", "kernel"),
    [
        ({"attn_implementation": "xformers"}, "xformers"),
        ({"xformers_attention": True}, "xformers"),
        (
            {"attn_implementation": "kernels-community/sage-attention"},
            "kernels-community/sage-attention",
        ),
        ({"attn_implementation": "flash_attention_2"}, None),
    ],
)
def test_a_kernel_that_computes_another_attention_is_a_difference(
    convert: Convert, keys: dict[str, Any], kernel: str | None
) -> None:
    said = convert(AXOLOTL, **keys)
    assert [name for name, note in OTHER_ATTENTION.items() if note in said] == [kernel] * bool(
        kernel
    )


@pytest.mark.parametrize(
    ("file", "is_said"),
    [
        (AXOLOTL | {"adapter": "qlora", "load_in_4bit": True}, True),
        (AXOLOTL | {"adapter": "lora"}, False),
        (TRL | LORA | {"load_in_4bit": True, "dtype": "bfloat16"}, True),
        (TRL | LORA | {"load_in_4bit": True, "dtype": "float32"}, False),
        (TRL | LORA | {"load_in_4bit": True}, False),
        (FACTORY | {"finetuning_type": "lora", "quantization_bit": 4}, False),
    ],
)
def test_a_base_that_is_rounded_before_it_is_quantized_is_named(
    file: dict[str, object], is_said: bool, convert: Convert
) -> None:
    assert (ROUNDED_BEFORE in convert(file)) == is_said


@pytest.mark.parametrize(
    ("name", "keys", "is_said"),
    [
        ("google/gemma-3n-E2B-it", {"adapter": "qlora", "load_in_4bit": True}, True),
        ("google/gemma-3n-E2B-it", {"adapter": "lora"}, False),
        ("google/gemma-3-1b-it", {"adapter": "qlora", "load_in_4bit": True}, False),
    ],
)
def test_a_model_that_stops_in_4_bits_there_is_said(
    convert: Convert, name: str, keys: dict[str, Any], is_said: bool
) -> None:
    assert (ALTUP_IN_4_BITS in convert(AXOLOTL, base_model=name, **keys)) == is_said


def test_the_coefficients_of_altup_are_read_packed_by_transformers(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    sizes = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_kv_shared_layers": 0}
    inputs = {"vocab_size": 64, "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8}
    layers = {"layer_types": ["full_attention"], "activation_sparsity_pattern": [0.0]}
    config = Gemma3nTextConfig(**sizes, **heads, **inputs, **layers, laurel_rank=8)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_storage=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=quantization, dtype=torch.bfloat16, device_map="cpu"
    )
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model.train()(input_ids=torch.tensor([[1, 2, 3]]))


NAMES = (
    "model.embed_tokens.weight",
    *(
        f"model.layers.{layer}.{name}.weight"
        for layer in range(21)
        for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", "mlp.up_proj")
    ),
    "model.norm.weight",
    "lm_head.weight",
)


def unfrozen_by_axolotl(pattern: str) -> set[str]:
    """What its LayerNamePattern matches."""
    return {name for name in NAMES if re.match(re.sub(r"\.(?!\+)", "\\.", pattern), name)}


def convert_unfrozen(path: Path, patterns: list[str], **keys: object) -> Conversion:
    path.write_text(yaml.safe_dump(AXOLOTL | {"unfrozen_parameters": patterns} | keys))
    return convert_file(path)


@pytest.mark.parametrize(
    "pattern",
    [
        "model.layers.1",
        "model.layers.1.",
        "model.layers.[0-1]",
        "model.layers.[0-1]+",
        "model.layers.(1|2)",
        "model.layers.1[0-9]+.mlp",
        "model.layers.2.mlp.gate",
        "model.layers.2.mlp.up_proj.weight$",
        "^lm_head.*",
    ],
)
def test_a_pattern_trains_what_axolotl_matches(pattern: str, tmp_path: Path) -> None:
    made = convert_unfrozen(tmp_path / "theirs.yaml", [pattern])
    trained = {name for name in NAMES if is_within(name, made.recipe["trainable_modules"])}
    assert trained == unfrozen_by_axolotl(pattern) != set()
    assert not [line for line in made.differences if "unfrozen_parameters" in line]


@pytest.mark.parametrize("pattern", ["model.layers.*.mlp", r"model\.layers", "layers.3", "embed"])
def test_a_pattern_that_names_nothing_for_axolotl_is_said(pattern: str, tmp_path: Path) -> None:
    made = convert_unfrozen(tmp_path / "theirs.yaml", [pattern, "lm_head"])
    assert unfrozen_by_axolotl(pattern) == set()
    (line,) = [each for each in made.differences if each.startswith("unfrozen_parameters")]
    assert f"is meant by {pattern} is frozen there" in line


def test_a_name_that_transformers_5_has_no_more_is_said(tmp_path: Path) -> None:
    path = tmp_path / "theirs.yaml"
    made = convert_unfrozen(
        path,
        ["^lm_head.weight$", "model.layers.1.block_sparse_moe.gate"],
        base_model="mistralai/Mixtral-8x7B-v0.1",
    )
    (line,) = [each for each in made.differences if each.startswith("unfrozen_parameters")]
    assert "is meant by model.layers.1.block_sparse_moe.gate is frozen there" in line
    tower = ["model.language_model.layers.1."]
    made = convert_unfrozen(path, tower, base_model="google/gemma-3-4b-it")
    assert not [line for line in made.differences if "unfrozen_parameters" in line]


def test_a_row_of_a_tensor_is_no_pattern(tmp_path: Path) -> None:
    made = convert_unfrozen(tmp_path / "theirs.yaml", ["model.embed_tokens.weight[5]"])
    assert "trainable_modules" not in made.recipe
    assert "training rows of a tensor" in made.missing_capabilities


@pytest.mark.parametrize(
    ("file", "is_said"),
    [
        (TUNE | {"clip_grad_norm": 0}, True),
        (TUNE | {"clip_grad_norm": 1.0}, False),
        (AXOLOTL | {"max_grad_norm": 0}, False),
    ],
)
def test_a_bound_of_zero_is_said_where_it_clips(
    file: dict[str, object], is_said: bool, convert: Convert
) -> None:
    assert (ALL_CLIPPED in convert(file)) == is_said


@pytest.mark.parametrize(
    ("asked", "is_kept"), [({}, False), ({"load_best_model_at_end": None}, True)]
)
def test_null_is_not_false_where_axolotl_asks_for_the_best_checkpoint(
    asked: dict[str, None], is_kept: bool, tmp_path: Path
) -> None:
    path = tmp_path / "theirs.yaml"
    evaluated = {"val_set_size": 0.1, "eval_steps": 10, "save_steps": 20}
    path.write_text(yaml.safe_dump(AXOLOTL | evaluated | asked))
    made = convert_file(path)
    assert made.recipe.get("keep_best_checkpoint", False) == is_kept
    path.write_text(yaml.safe_dump(AXOLOTL | evaluated | asked | {"save_steps": 15}))
    made = convert_file(path)
    assert "keep_best_checkpoint" not in made.recipe
    assert not [line for line in made.remarks if BEST_ON_STEPS in line]


@pytest.mark.parametrize("evaluated", [{}, {"eval_steps": 10}])
def test_held_out_rows_are_left_out_only_where_they_are_measured(
    evaluated: dict[str, int], convert: Convert
) -> None:
    packed = {"sample_packing": True, "eval_sample_packing": False, "val_set_size": 0.1}
    assert (LAST_UNMEASURED in convert(AXOLOTL | packed | evaluated)) == bool(evaluated)


@pytest.mark.parametrize(
    ("parts", "is_compiled"), [({"loss": False}, True), ({"model": False}, False), (True, True)]
)
def test_torchtunes_parts_to_compile_are_read(
    parts: dict[str, bool] | bool, is_compiled: bool, tmp_path: Path
) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text(yaml.safe_dump(TUNE | {"compile": parts}))
    assert convert_file(path).recipe.get("torch_compile", False) == is_compiled


def test_a_switch_of_gptqs_kernels_is_without_effect(tmp_path: Path) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text(yaml.safe_dump(AXOLOTL | {"gptq_disable_exllama": True}))
    assert "gptq_disable_exllama" in convert_file(path).ignored


@pytest.mark.parametrize(
    ("attention", "is_said"),
    [
        ({"attn_implementation": "sdpa"}, True),
        ({"eager_attention": True}, True),
        ({"attn_implementation": "flex_attention"}, True),
        ({"attn_implementation": "flash_attention_2"}, False),
        ({"flash_attention": True}, False),
        ({"attn_implementation": "sdpa", "base_model": "google/gemma-3-4b-pt"}, False),
    ],
)
def test_packed_documents_of_pretraining_that_see_each_other_are_said(
    attention: dict[str, object], is_said: bool, convert: Convert
) -> None:
    """Axolotl 0.21's first loss of these rows was 5.816 under sdpa and eager, and 4.463 without the mask that its loader makes."""
    texts = {"pretraining_dataset": [{"path": "a/texts", "type": "pretrain"}], "max_steps": 9}
    packed = AXOLOTL | texts | {"sample_packing": True} | attention
    assert (HIDDEN_BY_MASK in convert(packed)) == is_said
    assert HIDDEN_BY_MASK not in convert(AXOLOTL | {"sample_packing": True} | attention)


@pytest.mark.parametrize(
    ("keys", "rows", "is_said"),
    [
        ({}, None, False),
        ({"tokens": ["<a>"]}, 1, False),
        ({"special_tokens": {"eos_token": "<b>"}}, 1, False),
        ({"tokens": ["<a>"], "special_tokens": {"eos_token": "<b>"}}, 1, True),
        ({"tokens": ["<a>"], "resize_token_embeddings_to_32x": True}, 32, False),
    ],
)
def test_new_tokens_get_the_rows_that_axolotl_gives_them(
    keys: dict[str, object], rows: int | None, is_said: bool, tmp_path: Path
) -> None:
    """Of 512 rows Axolotl 0.21 made 514 for two tokens, and 576 were made here."""
    path = tmp_path / "theirs.yaml"
    path.write_text(yaml.safe_dump(AXOLOTL | keys))
    made = convert_file(path)
    assert made.recipe.get("pad_vocab_to_multiple_of") == rows
    assert (SPECIAL_FIRST in made.remarks) == is_said
