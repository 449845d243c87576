"""What a file does in its tool that a recipe's keys do not say: layers of new families, packed rows, turns, means, saved templates."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from finetune.config.facts import find_linear_layers
from finetune.config.module_names import is_within
from finetune.config.schema import recipe_keys
from finetune.convert.automodel import (
    ENDS_WITH_EPOCHS,
    LATER_TOKENS_PREDICTED,
    LONG_ROWS_CUT_IN_BATCHES,
    SAVED_IN_EPOCHS,
)
from finetune.convert.axolotl import (
    DOWN_UNDROPPED,
    EACH_IN_19,
    EXACT_GELU,
    FILLING_ROUTED,
    GELUS_BY_TANH,
    GROUPS_ALIKE,
    LOSS_WATCHED,
    MAYBE_UNDROPPED,
    MICRO_BATCHES_OF_GROUPS,
    MLPS_OTHERWISE,
    NEW_UNDER_TRL,
    RANKS_ALIKE,
    SHARE_REFUSED,
)
from finetune.convert.base_model import DEQUANTIZED, DEQUANTIZED_AWQ
from finetune.convert.by_tool import (
    ALWAYS_OF_EPOCHS,
    HELD_OUT_SMOOTHED,
    LAST_EXPORTED,
    RESIZED,
    RESIZED_BY_COMMON,
    STEPS_OF_EPOCHS,
    WHOLE_STEPS_COUNTED,
)
from finetune.convert.by_value import (
    ADDED_BY_MODEL,
    ADDED_EACH_TIME,
    AXOLOTLS_CHECKPOINTS,
    BALANCED_BY_CONFIG,
    BALANCED_BY_DEFAULT,
    ENABLED_TWICE,
    FACTORYS_CHECKPOINTS,
    HELD_OUT_SAMPLED,
    MODELS_OWN,
    OF_EACH_PART,
    OF_MICRO_BATCHES,
    SUM_REFUSED,
    SWIFTS_CHECKPOINTS,
    WITHOUT_GRADIENT,
)
from finetune.convert.chat_templates import (
    ANSWERS_STRIPPED,
    CALLS_THOUGHT_OF,
    EMPTY_SYSTEM,
    MAYBE_EARLIER_THOUGHTS,
    OTHER_TOOLS,
    SYSTEM_LAST,
    SYSTEM_REFUSED,
    TOOLS_IN_ITS_WORDS,
)
from finetune.convert.conversion import convert_file
from finetune.convert.counterparts import NOTES
from finetune.convert.datasets import ALPACA_SAVED, REPEATED, WITHOUT_TEMPLATE
from finetune.convert.defaults import UNLIMITED_NOTE
from finetune.convert.factory import (
    ALL_BUT_LAST,
    BASE_IS_REFERENCE,
    LOADED_IN_16_BITS,
    NEAT_WITHOUT_WINDOWS,
    NOT_NEAT,
    TRAINED_IN_16_BITS,
)
from finetune.convert.image_models import COLUMN_REFUSED, TRAINED_TOWER
from finetune.convert.model_names import (
    FAMILIES,
    REFUSED_NAMES,
    guess_family,
    guess_vision_family,
    is_mixture,
)
from finetune.convert.numbers import BOTH_WARMUPS, UNTRAINED_BY_CUT, WARMED_EARLIER
from finetune.convert.objectives import DROPOUT_ONLINE, KL_TIMES_RATIO, LONGER_SINCE
from finetune.convert.recognize import Refusal
from finetune.convert.runnable import NO_LAYER
from finetune.convert.shared import FIRST_TRAINED, MICRO_BATCHES_ALIKE
from finetune.convert.trained_layers import (
    ADAPTERS_LEFT_ALONE,
    AUTOMODEL_ADAPTERS,
    AUTOMODELS_START,
    BY_ITS_END,
    TRAINED_BESIDE,
)
from finetune.data.formats import Conversation
from finetune.data.render import render_turns
from finetune.data.tokenizer import make_renderer, read_template
from tests.convert.conftest import Convert, said
from tests.convert.test_axolotl_ids import load
from tests.convert.test_newest_versions import AXOLOTL, FACTORY, TUNE

GLM = "zai-org/GLM-5.3-Flash-BF16"
LORA = {"adapter": "lora", "lora_target_linear": True, "lora_dropout": 0.05}
MLP = ["gate_proj", "up_proj", "down_proj"]
MINISTRAL = "mistralai/Ministral-8B-Instruct-2410"
SMALL = "mistralai/Mistral-Small-3.2-24B-Instruct-2506"
COMPLETION = [{"path": "a/texts", "type": "completion"}]
ALPACA = [{"path": "a/rows", "type": "alpaca"}]


def test_glm_5_3_flash_has_the_layers_of_its_own_family(convert: Convert) -> None:
    """Its linear attention has queries, keys and values of its own, and its other layers DeepSeek's latents."""
    assert (guess_family(GLM), guess_vision_family(GLM)) == ("glm5_next_text", "glm5_next")
    assert guess_family("zai-org/GLM-5.2") == "glm_moe_dsa"
    targets = ["q_a_proj", "kv_b_proj", "q_proj", "k_proj", "v_proj", "o_proj"]
    assert set(targets) <= find_linear_layers("glm5_next_text")
    made = convert(
        AXOLOTL,
        base_model=GLM,
        adapter="lora",
        lora_target_modules=targets,
        sample_packing=True,
        num_epochs=1,
    )
    assert made.recipe["lora_target_modules"] == targets and NO_LAYER not in said(made)
    assert made.recipe["packing"] is False and WHOLE_STEPS_COUNTED in made.remarks
    assert MICRO_BATCHES_ALIKE in made.remarks
    factory = convert(
        FACTORY, model_name_or_path=GLM, template="default", finetuning_type="lora", lora_target="all"
    )  # fmt: skip
    assert MICRO_BATCHES_ALIKE in factory.remarks  # it has a processor, whose rows it reads


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({}, RANKS_ALIKE.format(EACH_IN_19)),
        ({"context_parallel_size": 4}, GROUPS_ALIKE.format(EACH_IN_19)),
        ({"context_parallel_size": 4, "deepspeed": "zero3_bf16.json"}, MICRO_BATCHES_OF_GROUPS),
        ({"deepspeed": "zero3_bf16.json"}, RANKS_ALIKE.format(EACH_IN_19)),
    ],
)
def test_ranks_that_share_a_row_count_as_one(
    keys: dict[str, object], line: str, convert: Convert
) -> None:
    made = convert(AXOLOTL, sample_packing=True, **keys)
    assert [each for each in made.remarks if each.startswith("loss: ")] == [line]


@pytest.mark.parametrize(
    ("keys", "is_said"),
    [
        ({"datasets": COMPLETION, "sample_packing": True}, True),
        ({"datasets": COMPLETION, "sample_packing": False}, False),
        ({"datasets": ALPACA, "sample_packing": True}, False),
        ({"datasets": ALPACA, "sample_packing": True, "train_on_inputs": True}, True),
        ({"sample_packing": True, "train_on_inputs": True}, False),  # its words alone
        (
            {
                "sample_packing": True,
                "train_on_inputs": True,
                "overrides_of_model_config": {"rope_scaling": {"type": "linear", "factor": 2.0}},
            },
            False,
        ),
    ],
)
def test_the_first_token_of_a_packed_document_is_said_to_be_trained(
    keys: dict[str, object], is_said: bool, convert: Convert
) -> None:
    assert (FIRST_TRAINED in convert(AXOLOTL, **keys).remarks) == is_said


def test_llama_factorys_packed_prompts_are_trained_from_their_first_token(convert: Convert) -> None:
    text = FACTORY | {"model_name_or_path": "Qwen/Qwen3-8B", "template": "default"}
    packed = convert(text, packing=True, train_on_prompt=True)
    assert FIRST_TRAINED in packed.remarks
    assert FIRST_TRAINED not in convert(text, packing=True).remarks


@pytest.mark.parametrize(("name", "texts"), [(MINISTRAL, 2), (SMALL, 1)])
def test_a_system_message_in_the_last_question_is_said(
    name: str, texts: int, convert: Convert
) -> None:
    """Of a row with two answers: the first has no system message before it where that stands in the last question."""
    made = convert(AXOLOTL, base_model=name, tokenizer_use_mistral_common=True)
    tokenizer = load("byte BPE")
    tokenizer.chat_template = read_template(made.recipe["chat_template"])
    roles = ("system", "user", "assistant", "user", "assistant")
    messages = tuple({"role": role, "content": f"{role} {i}"} for i, role in enumerate(roles))
    theirs = tokenizer.apply_chat_template(list(messages), tokenize=False)
    comes_late = theirs.index("system 0") > theirs.index("assistant 2")
    trained = tuple(role == "assistant" for role in roles)
    ours = render_turns(Conversation(messages, trained), make_renderer(tokenizer, True))
    assert len(ours) == texts and comes_late == (texts == 2)
    assert all(each.text.index("system 0") < each.text.index("assistant") for each in ours[:1])
    assert (SYSTEM_LAST in said(made)) == comes_late
    pairs = [{"path": "a/pairs", "type": "chat_template.default"}]
    compared = convert(
        AXOLOTL, base_model=name, tokenizer_use_mistral_common=True, rl="dpo", datasets=pairs
    )
    assert SYSTEM_LAST not in said(compared)


@pytest.mark.parametrize("template", ["gemma4", "gemma4_unified", "gemma3"])
def test_reasoning_that_axolotls_gemma_4_leaves_out_is_said(
    template: str, convert: Convert
) -> None:
    made = convert(AXOLOTL, base_model="google/gemma-4-31B", chat_template=template)
    tokenizer = load("byte BPE")
    tokenizer.chat_template = read_template(made.recipe["chat_template"])
    answer = {"role": "assistant", "content": "4.", "reasoning_content": "Add."}
    text = tokenizer.apply_chat_template([{"role": "user", "content": "?"}, answer], tokenize=False)
    assert (CALLS_THOUGHT_OF in said(made)) == ("Add." in text)


@pytest.mark.parametrize(
    ("name", "is_said"),
    [("zai-org/GLM-5", True), ("zai-org/GLM-4.7-Flash", False), ("Qwen/Qwen3-8B", False)],
)
def test_a_template_that_may_forget_earlier_thinking_is_named(
    name: str, is_said: bool, convert: Convert
) -> None:
    assert (MAYBE_EARLIER_THOUGHTS in said(convert(AXOLOTL, base_model=name))) == is_said


@pytest.mark.parametrize(
    ("keys", "is_said"),
    [
        ({}, True),
        ({"lora_dropout": 0}, False),
        ({"lora_target_linear": False, "lora_target_modules": ["q_proj", "down_proj"]}, False),
        (
            {
                "lora_target_linear": False,
                "lora_target_modules": ["gate_proj", "up_proj", "down_proj"],
            },
            True,
        ),
        ({"load_in_8bit": True}, False),
        ({"adapter": "qlora", "load_in_4bit": True}, True),
        ({"lora_qkv_kernel": True}, False),  # the others are off then
        ({"fsdp_config": {"offload_params": True}}, True),
        ({"fsdp": ["full_shard"], "fsdp_config": {"offload_params": True}}, False),  # the first
        ({"fsdp_version": 1, "fsdp_config": {"offload_params": True}}, False),
        ({"lora_mlp_kernel": True}, True),
        ({"trust_remote_code": True}, False),
        ({"base_model": "alpindale/Llama-3.2-11B-Vision-Instruct"}, False),  # of another layout
        ({"base_model": "mistralai/Mistral-Small-3.1-24B-Base-2503"}, True),
        ({"base_model": "meta-models/Muse-Glimmer-30B"}, False),  # whose support turns them off
        ({"base_model": "Qwen/Qwen3-30B-A3B"}, False),  # whose layers have experts in its place
        ({"base_model": "google/gemma-4-26B-A4B"}, True),  # which has both
        ({"base_model": "ai21labs/Jamba-v0.1", "sample_packing": False}, False),  # feed_forward
        ({"base_model": "THUDM/GLM-4-32B-0414"}, False),  # gate_up_proj
        ({"rl": "dpo", "datasets": [{"path": "a/pairs", "type": "chat_template.default"}]}, False),
    ],
)
def test_the_adapter_whose_inputs_axolotls_kernel_does_not_drop_is_named(
    keys: dict[str, object], is_said: bool, convert: Convert
) -> None:
    assert (DOWN_UNDROPPED in said(convert(AXOLOTL, **LORA | keys))) == is_said


@pytest.mark.parametrize(
    ("keys", "note"),
    [
        ({}, MAYBE_UNDROPPED),
        ({"lora_target_linear": False, "lora_target_modules": MLP}, DOWN_UNDROPPED),
        ({"lora_target_linear": False, "lora_target_modules": ["q_proj"]}, None),
        ({"lora_dropout": 0}, None),
        ({"lora_mlp_kernel": False}, None),
        ({"base_model": "org/model-moe"}, None),
    ],
)
def test_the_same_adapter_of_a_model_whose_name_says_no_family_may_be(
    keys: dict[str, object], note: str | None, convert: Convert
) -> None:
    text = said(convert(AXOLOTL, **LORA | {"base_model": "org/model"} | keys))
    found = [each for each in (DOWN_UNDROPPED, MAYBE_UNDROPPED) if each in text]
    assert found == ([] if note is None else [note])


PLAIN = (
    r"def forward\(self, (?P<x>\w+)(: [\w.]+)?\)( -> [\w.]+)?: (return|down_proj =) self\.down_proj\("
    r"self\.act_fn\(self\.gate_proj\((?P=x)\)\) \* self\.up_proj\((?P=x)\)\)( return down_proj)?"
)


def read_mlps() -> dict[str, bool]:
    """Causal families whose layers' `mlp` has the three layers -> whether its forward is what Axolotl's kernel computes."""
    found = {}
    for path in (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"):
        source, family = path.read_text(), path.parent.name
        classes = re.findall(r"^class (\w+)\(nn\.Module\):\n(.*?)(?=^\S|\Z)", source, re.DOTALL | re.MULTILINE)  # fmt: skip
        named = next(
            (
                each
                for each in (f"{family}_text", family)
                if each in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
            ),
            None,
        )
        for name, body in classes:
            forward = re.search(r"def forward\(.*", body, re.DOTALL)
            is_mlp = f"self.mlp = {name}(" in source and all(f"self.{each}" in body for each in MLP)
            if named and forward and is_mlp and "Vision" not in name:
                text = re.sub(r"\s+", " ", forward[0]).strip()
                found[named] = found.get(named, True) and bool(re.fullmatch(PLAIN, text))
    return found


def test_the_mlps_that_axolotls_kernel_computes_otherwise_are_those_of_transformers() -> None:
    mlps = read_mlps()
    assert len(mlps) > 30
    others = {family for family, is_plain in mlps.items() if not is_plain}
    assert others & {family for _, family in FAMILIES} == MLPS_OTHERWISE.keys() & mlps.keys()
    assert {"gemma3n_text", "seed_oss"} <= mlps.keys()  # of every version
    by_tanh = set()
    for family in mlps:
        config = transformers.CONFIG_MAPPING[family]()
        asked = {getattr(config, key, None) for key in ("hidden_activation", "hidden_act")}
        if "gelu_pytorch_tanh" in asked:
            by_tanh.add(family)
    assert by_tanh == set(GELUS_BY_TANH)


@pytest.mark.parametrize(
    ("name", "is_sparse", "is_by_tanh"),
    [
        ("google/gemma-3n-E2B-it", False, False),  # whose attention is refused, unless keys say so
        ("google/gemma-3-1b-it", False, True),
        ("Qwen/Qwen3-8B", False, False),
    ],
)
def test_what_axolotls_kernel_computes_otherwise_is_said(
    name: str, is_sparse: bool, is_by_tanh: bool, convert: Convert
) -> None:
    text = said(convert(AXOLOTL, **LORA | {"base_model": name, "lora_dropout": 0}))
    assert (MLPS_OTHERWISE["gemma3n_text"] in text) == is_sparse
    assert (EXACT_GELU in text) == is_by_tanh
    asked = {"lora_mlp_kernel": True, "lora_qkv_kernel": False, "lora_o_kernel": False}
    alone = said(convert(AXOLOTL, **LORA | asked | {"base_model": name}))
    assert (MLPS_OTHERWISE["gemma3n_text"] in alone) == ("3n" in name)
    assert (EXACT_GELU in alone) == ("gemma" in name)
    off = said(convert(AXOLOTL, **LORA | {"base_model": name, "lora_mlp_kernel": False}))
    assert EXACT_GELU not in off and MLPS_OTHERWISE["gemma3n_text"] not in off


COMMON = {"base_model": MINISTRAL, "tokenizer_use_mistral_common": True}
QWEN = {"model_name_or_path": "Qwen/Qwen3-8B"}


@pytest.mark.parametrize(
    ("file", "keys", "saved"),
    [
        (TUNE, {}, "the model's own tokenizer files are copied"),
        (AXOLOTL, COMMON, "tekken.json, without a template"),
        (AXOLOTL, {"chat_template": "chatml"}, None),  # which it saves too
        (AXOLOTL, {}, None),
        (FACTORY, QWEN | {"template": "qwen"}, "the tokenizer's own, where it has one"),
        (FACTORY, QWEN | {"template": "chatml"}, None),  # replace_jinja_template
        (FACTORY, {}, None),  # of images, which the tokenizer's own template writes
    ],
)
def test_the_template_that_a_tool_saves_is_named(
    file: dict[str, object], keys: dict[str, object], saved: str | None, convert: Convert
) -> None:
    made = convert(file, **keys)
    lines = [line for line in made.remarks if "is saved with the tokenizer here" in line]
    assert bool(lines) == bool(saved) and str(saved or "") in "".join(lines)
    assert saved is None or made.recipe["chat_template"] in lines[0]


def test_alpacas_template_is_said_once(convert: Convert) -> None:
    made = convert(AXOLOTL, **COMMON | {"datasets": ALPACA})
    lines = [line for line in made.remarks if "is saved with the tokenizer here" in line]
    assert lines == [ALPACA_SAVED.format("the tokenizer's own")]


# of Mistral's layers; the model that a draft model of another class is for
OTHERWISE_NAMED = {
    "mistralai/Ministral-8B-Instruct-2410": "mistral",
    "google/gemma-4-12b-it": "gemma4_unified_text",
}
PLACEHOLDER = re.compile("granite-speech")  # of many of Granite's configs


def test_names_say_the_families_that_transformers_own_configs_have_them_for() -> None:
    """Each config class names a published model; one that several classes name is of any of them."""
    named: dict[str, set[str]] = {}
    models = Path(transformers.__file__).parent / "models"
    for path in models.glob("*/configuration_*.py"):
        for name in re.findall(r'@auto_docstring\(\s*checkpoint="([^"]+)"', path.read_text()):
            named.setdefault(name, set()).add(path.parent.name)
    trained = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    wrong = {}
    for name, families in named.items():
        if PLACEHOLDER.search(name) or not families & {
            each.removesuffix("_text") for each in trained
        }:
            continue
        if any(pattern.search(name.lower()) for pattern in REFUSED_NAMES):
            continue
        guessed = {guess_family(name), guess_vision_family(name)} - {None}
        of_text = {str(each).removesuffix("_text") for each in guessed}
        if guessed and not (guessed | of_text) & families:
            wrong[name] = guess_family(name)
    assert len(named) > 200 and wrong == OTHERWISE_NAMED


@pytest.mark.parametrize(
    ("name", "family", "whole"),
    [
        ("google/gemma-4-12B-it", "gemma4_unified_text", "gemma4_unified"),
        ("google/gemma-4-31B-it", "gemma4_text", "gemma4"),
        ("CohereLabs/North-Micro-Vision-Instruct", "cohere_compass_text", "cohere_compass"),
        ("state-spaces/mamba-2.8b-hf", "mamba", "mamba"),
        ("mistralai/Mamba-Codestral-7B-v0.1", "mamba2", "mamba2"),
        ("AntonV/mamba2-130m-hf", "mamba2", "mamba2"),
        ("llava-hf/llava-1.5-7b-hf", None, "llava"),
        ("llava-hf/llava-v1.6-vicuna-7b-hf", "llama", "llava_next"),
        ("zai-org/GLM-4.5V", "glm4_moe", "glm4v_moe"),
        ("google/shieldgemma-9b", "gemma2", "gemma2"),
        ("nvidia/NVIDIA-Nemotron-Labs-Dory1.0-4B-BF16", "dory", "dory"),
        ("swiss-ai/Apertus-v1.5-8B", "apertus1p5_text", "apertus1p5"),
        ("swiss-ai/Apertus-8B-Instruct-2509", "apertus", "apertus"),
        ("google/embeddinggemma-300m", "gemma3_text", "gemma3_text"),
    ],
)  # fmt: skip
def test_names_close_to_anothers_say_their_own_family(
    name: str, family: str | None, whole: str
) -> None:
    assert (guess_family(name), guess_vision_family(name)) == (family, whole)


def test_images_of_a_family_that_is_not_read_are_refused(convert: Convert) -> None:
    with pytest.raises(Refusal, match="not supported for gemma4_unified"):
        convert(AXOLOTL, base_model="google/gemma-4-12B-it", processor_type="AutoProcessor")


@pytest.mark.parametrize("template", [*OTHER_TOOLS, "llama3", "qwen3"])
def test_what_axolotls_templates_write_otherwise_of_tools_is_said(
    template: str, convert: Convert
) -> None:
    """By its rendering in test_token_ids.py. A name that is said has a template here that writes calls."""
    made = convert(AXOLOTL, chat_template=template)
    lines = [line for line in made.remarks if "of a row with tools" in line]
    assert lines == [
        f'chat_template: "{template}"   ({note})'
        for name, note in OTHER_TOOLS.items()
        if name == template
    ]
    assert not lines or "tool_calls" in read_template(made.recipe["chat_template"])


@pytest.mark.parametrize("template", ["llama3", "qwen3", "gemma", "qwen"])
def test_tools_that_llama_factory_writes_in_its_own_words_are_said(
    template: str, convert: Convert
) -> None:
    made = convert(FACTORY, model_name_or_path="Qwen/Qwen3-8B", template=template)
    assert made.recipe["chat_template"] == template
    assert (TOOLS_IN_ITS_WORDS in said(made)) == (template != "qwen")
    assert TOOLS_IN_ITS_WORDS not in said(convert(AXOLOTL, chat_template="llama3"))


@pytest.mark.parametrize("template", ["gemma", "gemma3", "llama3"])
def test_a_template_that_refuses_every_scored_row_is_said_to(
    template: str, convert: Convert
) -> None:
    """Axolotl begins each with a system message, of the column of that name, which Gemma's first template refuses."""
    pairs = [{"path": "a/pairs", "type": "bradley_terry.chat_template"}]
    made = convert(AXOLOTL, reward_model=True, chat_template=template, datasets=pairs)
    assert (SYSTEM_REFUSED in said(made)) == (template == "gemma")
    assert (EMPTY_SYSTEM in said(made)) == (template != "gemma")


@pytest.mark.parametrize(
    ("keys", "is_said"),
    [
        ({"warmup_steps": 0.1}, True),
        ({"warmup_steps": 1.0}, False),
        ({"warmup_steps": 10}, False),
        ({"warmup_ratio": 0.1}, False),
        (
            {
                "warmup_steps": 0.1,
                "plugins": ["axolotl.integrations.diffusion.DiffusionPlugin"],
                "diffusion": {"mask_token_id": 5},
                "attn_implementation": "sdpa",
            },
            False,
        ),
    ],
)
def test_a_share_of_steps_that_axolotl_refuses_is_said_to_be_one_here(
    keys: dict[str, object], is_said: bool, convert: Convert
) -> None:
    made = convert(AXOLOTL, **keys)
    assert (SHARE_REFUSED in said(made)) == is_said
    if "diffusion" in keys or is_said:
        assert made.recipe["warmup_ratio"] == 0.1


QLORA = {"adapter": "qlora", "load_in_4bit": True, "lora_target_linear": True}


@pytest.mark.parametrize(
    ("keys", "asks"),
    [
        ({"base_model_config": "a/model"}, {"base_model_config": "another/model"}),
        ({"tokenizer_type": "AutoTokenizer"}, {"tokenizer_type": "CodeLlamaTokenizer"}),
        ({"tokenizer_legacy": None}, {"tokenizer_legacy": True}),
        ({"tokenizer_legacy": None}, {"tokenizer_legacy": False}),
        ({"max_packed_sequence_len": None}, {"max_packed_sequence_len": 2048}),
        ({"pretrain_multipack_attn": True}, {"pretrain_multipack_attn": False}),
        ({"metric_for_best_model": "eval_loss"}, {"metric_for_best_model": "eval_perplexity"}),
        ({"greater_is_better": False}, {"greater_is_better": True}),
        ({"do_causal_lm_eval": False}, {"do_causal_lm_eval": True}),
        ({"do_bench_eval": False}, {"do_bench_eval": True}),
        ({"s2_attention": False}, {"s2_attention": True}),
        (
            {"sample_packing": True, "sample_packing_eff_est": None},
            {"sample_packing": True, "sample_packing_eff_est": 0.98},
        ),
        (
            {"sample_packing": True, "sample_packing_eff_est": 0.98, "max_steps": 9},
            {"sample_packing": True, "sample_packing_eff_est": 1},
        ),
        (
            {"pretraining_dataset": [{"path": "a/b"}], "shuffle_merged_datasets": True},
            {"pretraining_dataset": [{"path": "a/b"}], "shuffle_merged_datasets": False},
        ),
        (
            QLORA | {"bnb_config_kwargs": {"bnb_4bit_compute_dtype": "bfloat16"}},
            QLORA | {"bnb_config_kwargs": {"bnb_4bit_compute_dtype": "float16"}},
        ),
    ],
)
def test_a_value_of_axolotls_that_does_otherwise_is_listed(
    keys: dict[str, object], asks: dict[str, object], convert: Convert
) -> None:
    """The last key of the second file, for a value that does as a run here, and for one that does not."""
    file = AXOLOTL | {"base_model": "a/model"}
    key, value = list(asks.items())[-1]
    if isinstance(value, dict):
        key = f"{key}.{next(iter(value))}"
    assert f"{key}: " not in said(convert(file, **keys))
    made = convert(file, **asks)
    assert f"{key}: " in said(made) and key not in made.ignored


def test_frozen_modules_with_images_are_not_said_to_be_trained(convert: Convert) -> None:
    images = AXOLOTL | {
        "base_model": "Qwen/Qwen2-VL-7B-Instruct",
        "processor_type": "AutoProcessor",
    }
    assert TRAINED_TOWER in said(convert(images))
    assert TRAINED_TOWER not in said(convert(images, freeze_mm_modules=True))


@pytest.mark.parametrize("file", [AXOLOTL | {"tokens": ["<a>"]}, FACTORY | {"add_tokens": "<a>"}])
def test_the_start_of_a_new_row_is_listed(file: dict[str, object], convert: Convert) -> None:
    made = convert(file)
    assert [line for line in made.remarks if line.startswith("added_tokens: ")]
    file = {key: value for key, value in file.items() if key not in ("tokens", "add_tokens")}
    assert "added_tokens" not in said(convert(file))


def test_accelerates_number_of_micro_batches_is_that_of_a_step(convert: Convert) -> None:
    asked = {"gradient_accumulation_kwargs": {"num_steps": 4}}
    file = {key: value for key, value in AXOLOTL.items() if key != "gradient_accumulation_steps"}
    assert convert(file, accelerator_config=asked).recipe["gradient_accumulation_steps"] == 4


TRL_FILE = {"model_name_or_path": "a/model", "dataset_name": "a/rows", "max_length": 1024}
ONLINE = TRL_FILE | {"num_generations": 8, "reward_funcs": ["think_format_reward"]}
SWIFT = {"model": "Qwen/Qwen3-8B", "tuner_type": "lora", "dataset": ["a/rows"], "lora_rank": 8}
TEXT = FACTORY | {"model_name_or_path": "Qwen/Qwen3-8B", "template": "default"}
ADAPTED = TEXT | {"finetuning_type": "lora", "lora_target": "all"}


@pytest.mark.parametrize(
    ("file", "key", "usual", "other"),
    [
        (TRL_FILE, "average_tokens_across_devices", True, False),
        (TEXT, "average_tokens_across_devices", True, False),
        (SWIFT, "average_tokens_across_devices", True, False),
        (TRL_FILE, "dataset_kwargs.append_concat_token", False, True),
        (TRL_FILE, "dataset_kwargs.add_special_tokens", False, True),
        (TRL_FILE, "metric_for_best_model", "eval_loss", "eval_accuracy"),
        (SWIFT, "metric_for_best_model", "loss", "rouge-l"),
        (SWIFT, "use_chat_template", True, False),
        (SWIFT, "dataset_shuffle", True, False),
        (SWIFT, "max_model_len", None, 512000),
        (SWIFT, "predict_with_generate", False, True),
        (TEXT, "predict_with_generate", False, True),
        (TEXT, "do_predict", False, True),
        (ADAPTED, "resize_vocab", False, True),
        (ADAPTED | {"additional_target": "embed_tokens"}, "resize_vocab", True, None),
        (TEXT | {"pure_bf16": True}, "upcast_layernorm", False, True),
        (TEXT, "upcast_layernorm", True, None),
        (ONLINE, "generation_kwargs", {}, {"top_p": 0.9}),
        (ONLINE, "vllm_structured_outputs_regex", None, "[0-9]+"),
        (ONLINE, "num_generations_eval", 1, 4),
        (ONLINE, "shuffle_dataset", True, False),
        (ONLINE, "cast_lm_head_to_fp32", False, True),
    ],
)
def test_a_value_that_does_otherwise_is_listed(
    file: dict[str, object], key: str, usual: object, other: object, convert: Convert
) -> None:
    """Where `other` is None the same value does otherwise only beside other keys."""
    outer, _, inner = key.partition(".")
    made = convert(file, **{outer: {inner: usual} if inner else usual})
    assert f"{key}: " not in said(made)
    if other is not None:
        made = convert(file, **{outer: {inner: other} if inner else other})
        assert f"{key}: " in said(made) and key not in made.ignored


def test_held_out_prompts_are_said_to_be_sampled_there(convert: Convert) -> None:
    measured = convert(ONLINE, dataset_test_split="test", eval_strategy="steps", eval_steps=10)
    assert HELD_OUT_SAMPLED in measured.remarks
    assert HELD_OUT_SAMPLED not in convert(ONLINE).remarks


MIXTURES = (("openai/gpt-oss-20b", True), ("Qwen/Qwen3-30B-A3B", True), ("Qwen/Qwen3-8B", False))


@pytest.mark.parametrize(("model", "is_balanced"), MIXTURES)
def test_the_auxiliary_loss_of_trls_default_is_said(
    convert: Convert, model: str, is_balanced: bool
) -> None:
    made = convert({"model_name_or_path": model, "dataset_name": "a/rows"})
    assert (BALANCED_BY_DEFAULT in said(made)) == is_balanced
    assert (OF_MICRO_BATCHES in said(made)) == is_balanced
    without = {"router_aux_loss_coef": 0.0} if is_balanced else {}
    made = convert({"model_name_or_path": model, "dataset_name": "a/rows"}, **without)
    assert BALANCED_BY_DEFAULT not in said(made) and OF_MICRO_BATCHES not in said(made)
    if is_balanced:
        made = convert(
            {"model_name_or_path": model, "dataset_name": "a/rows"}, router_aux_loss_coef=0.1
        )
        assert OF_MICRO_BATCHES in said(made) and BALANCED_BY_DEFAULT not in said(made)


@pytest.mark.parametrize(
    ("config", "is_balanced"),
    [
        ({"model_type": "qwen3_moe", "num_experts": 8}, True),
        ({"model_type": "any", "text_config": {"model_type": "qwen3_moe", "num_experts": 8}}, True),
        ({"model_type": "llama"}, False),
    ],
)
def test_a_local_model_is_of_the_family_that_its_config_says(
    config: dict[str, Any], is_balanced: bool, convert: Convert, tmp_path: Path
) -> None:
    """Whatever its folder is called."""
    folder = tmp_path / "mixtral"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    made = convert({"model_name_or_path": str(folder), "dataset_name": "a/rows"})
    assert (BALANCED_BY_DEFAULT in said(made)) == is_balanced
    assert is_mixture(str(folder)) == is_balanced


def test_experts_in_a_section_of_a_local_config_are_found(tmp_path: Path) -> None:
    for experts in ({"ffn_config": {"moe_num_experts": 4}}, {"moe_num_experts": [64, 64]}):
        (tmp_path / "config.json").write_text(json.dumps(experts))
        assert is_mixture(str(tmp_path))


@pytest.mark.parametrize("key", ["activation_checkpointing", "gradient_checkpointing"])
def test_trainers_newer_name_of_checkpointing_is_read(key: str, convert: Convert) -> None:
    for value, layout in ((True, "ddp_checkpointing"), (False, "ddp")):
        assert convert(SWIFT, **{key: value}).recipe["accelerate_config"] == layout


@pytest.mark.parametrize(("method", "is_balanced"), [("dpo", True), ("orpo", False)])
def test_trls_orpo_trainer_adds_no_auxiliary_loss_by_default(
    method: str, is_balanced: bool, convert: Convert
) -> None:
    """aux_loss_enabled of its ORPOTrainer is output_router_logits of the model's config."""
    file = {"model_name_or_path": "Qwen/Qwen3-30B-A3B", "dataset_name": "a/rows"}
    lines = said(convert(file, command=method))
    assert (BALANCED_BY_DEFAULT in lines) == (OF_MICRO_BATCHES in lines) == is_balanced


def test_the_auxiliary_loss_of_axolotls_config_is_said(convert: Convert) -> None:
    file = {"base_model": "mistralai/Mixtral-8x7B-v0.1", "datasets": [{"path": "a/rows"}]}
    assert ADDED_BY_MODEL in said(convert(file, model_config={"output_router_logits": True}))
    assert ADDED_BY_MODEL not in said(convert(file, model_config={"sliding_window": 64}))


@pytest.mark.parametrize(
    ("name", "overrides", "coefficient", "line"),
    [
        ("Mixtral-8x7B-v0.1", {"output_router_logits": True}, 0.02, None),
        ("Mixtral-8x22B-v0.1", {"output_router_logits": True}, None, BALANCED_BY_CONFIG),
        (
            "Mixtral-8x22B-v0.1",
            {"output_router_logits": True, "router_aux_loss_coef": 0.1},
            0.1,
            None,
        ),
        ("Mixtral-8x7B-v0.1", {"router_aux_loss_coef": 0.1}, None, None),
        ("Mixtral-8x7B-v0.1", {"sliding_window": 64}, None, MODELS_OWN),
    ],
)
def test_the_auxiliary_loss_of_axolotls_model_config_is_converted(
    name: str,
    overrides: dict[str, Any],
    coefficient: float | None,
    line: str | None,
    convert: Convert,
) -> None:
    """Without output_router_logits transformers' models add none, whatever the coefficient is."""
    file = {"base_model": f"mistralai/{name}", "datasets": [{"path": "a/rows"}]}
    made = convert(file, model_config=overrides)
    assert made.recipe.get("router_aux_loss_coef") == coefficient
    known = (BALANCED_BY_CONFIG, MODELS_OWN)
    assert [each for each in known if each in said(made)] == [line] * bool(line)


SWIFT = {"model": "Qwen/Qwen3-30B-A3B", "dataset": "a/rows#500", "router_aux_loss_coef": 1e-3}
SWIFT["tuner_type"] = "lora"


def test_the_auxiliary_loss_of_each_micro_batch_is_said(convert: Convert) -> None:
    """A sum over a step's micro-batches and processes, and their mean by ms-swift's compute_sft_loss."""
    made = convert(SWIFT)
    assert OF_EACH_PART in said(made) and ADDED_EACH_TIME not in said(made)
    assert OF_EACH_PART not in said(convert(SWIFT, router_aux_loss_coef=0.0))
    factory = FACTORY | {"template": "default", "moe_aux_loss_coef": 1e-3}
    made = convert(factory, model_name_or_path="Qwen/Qwen3-30B-A3B")
    assert ADDED_EACH_TIME in said(made) and made.recipe["router_aux_loss_coef"] == 1e-3
    made = convert(factory, model_name_or_path="openai/gpt-oss-20b")
    assert "router_aux_loss_coef" not in made.recipe and "moe_aux_loss_coef: 0.001" in said(made)


FACTORYS_MIXTURE = FACTORY | {
    "model_name_or_path": "Qwen/Qwen3-30B-A3B",
    "template": "default",
    "moe_aux_loss_coef": 1e-3,
}
AXOLOTLS_MIXTURE = {
    "base_model": "mistralai/Mixtral-8x7B-v0.1",
    "datasets": [{"path": "a/rows"}],
    "model_config": {"output_router_logits": True},
}
TRLS_MIXTURE = {"model_name_or_path": "openai/gpt-oss-20b", "dataset_name": "a/rows"}
CHECKPOINTS = {"gradient_checkpointing": True}
REENTRANT = {"gradient_checkpointing_kwargs": {"use_reentrant": True}}
KEPT = {"gradient_checkpointing_kwargs": {"use_reentrant": False}}
SHOWN_ALONE = WITHOUT_GRADIENT.partition("{}")[0]


@pytest.mark.parametrize(
    ("file", "keys", "checkpoints"),
    [
        (SWIFT, {}, SWIFTS_CHECKPOINTS),
        (SWIFT, REENTRANT, "use_reentrant: true"),
        (SWIFT, KEPT, ""),
        (SWIFT, {"gradient_checkpointing": False}, ""),
        (SWIFT, {"fsdp": "fsdp2"}, ""),
        (FACTORYS_MIXTURE, {}, FACTORYS_CHECKPOINTS),
        (FACTORYS_MIXTURE, {"use_reentrant_gc": False}, ""),
        (FACTORYS_MIXTURE, {"use_reentrant_gc": False, **CHECKPOINTS}, ENABLED_TWICE),
        (FACTORYS_MIXTURE, {**CHECKPOINTS, **KEPT}, ""),
        (FACTORYS_MIXTURE, {"use_reentrant_gc": False, "use_unsloth_gc": True}, "use_unsloth_gc"),
        (FACTORYS_MIXTURE, {"disable_gradient_checkpointing": True}, ""),
        (AXOLOTLS_MIXTURE, {}, ""),
        (AXOLOTLS_MIXTURE, CHECKPOINTS, AXOLOTLS_CHECKPOINTS),
        (AXOLOTLS_MIXTURE, CHECKPOINTS | REENTRANT, "use_reentrant: true"),
        (AXOLOTLS_MIXTURE, CHECKPOINTS | KEPT, ""),
        (AXOLOTLS_MIXTURE, CHECKPOINTS | {"unfrozen_parameters": ["model.layers.*"]}, ""),
        (AXOLOTLS_MIXTURE, CHECKPOINTS | {"activation_offloading": True}, ""),
        (AXOLOTLS_MIXTURE, CHECKPOINTS | {"activation_offloading": "hidden_states"}, ""),
        (TRLS_MIXTURE, {}, ""),
        (TRLS_MIXTURE, REENTRANT, "use_reentrant: true"),
        (TRLS_MIXTURE, REENTRANT | {"gradient_checkpointing": False}, ""),
    ],
)
def test_the_auxiliary_loss_without_a_gradient_is_said(
    convert: Convert, file: dict[str, Any], keys: dict[str, Any], checkpoints: str
) -> None:
    said_of_it = said(convert(file, **keys))
    assert (SHOWN_ALONE in said_of_it) == bool(checkpoints)
    assert not checkpoints or WITHOUT_GRADIENT.format(checkpoints) in said_of_it


def make_mixture(coefficient: float) -> MixtralForCausalLM:
    config = MixtralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        output_router_logits=True,
        router_aux_loss_coef=coefficient,
    )
    torch.manual_seed(0)
    return MixtralForCausalLM(config)


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_reentrant_checkpoints_take_the_auxiliary_losss_gradient(is_reentrant: bool) -> None:
    gradients = []
    for coefficient in (0.0, 1.0):
        model = make_mixture(coefficient)
        model.gradient_checkpointing_enable({"use_reentrant": is_reentrant})
        ids = torch.arange(8)[None]
        model.train()
        model(input_ids=ids, labels=ids).loss.backward()
        gradients.append(model.model.layers[0].self_attn.q_proj.weight.grad)
    assert torch.equal(*gradients) == is_reentrant


def test_transformers_divides_no_auxiliary_loss_by_the_labels_of_a_step() -> None:
    model, ids = make_mixture(0.5), torch.arange(8)[None]
    outputs = [model(input_ids=ids, labels=ids, num_items_in_batch=labels) for labels in (7, 14)]
    auxiliary = 2 * outputs[1].loss - outputs[0].loss  # twice the labels halve the rest alone
    assert torch.isclose(auxiliary, 0.5 * outputs[0].aux_loss)


def test_repeated_rows_are_said(convert: Convert) -> None:
    assert REPEATED in said(convert(SWIFT)) and REPEATED not in said(convert(SWIFT, dataset="a/b"))


def test_automodels_mistral_has_no_chat_template(convert: Convert) -> None:
    instruct = {"pretrained_model_name_or_path": "mistralai/Ministral-3-3B-Instruct-2512"}
    template = NEMO["dataset"] | {"chat_template": "chatml"}
    assert WITHOUT_TEMPLATE in said(convert(NEMO, model=instruct))
    assert WITHOUT_TEMPLATE not in said(convert(NEMO, model=instruct, dataset=template))
    assert WITHOUT_TEMPLATE not in said(convert(NEMO))
    tokenizer = instruct | {"_target_": "transformers.AutoTokenizer.from_pretrained"}
    dataset = NEMO["dataset"] | {"tokenizer": tokenizer}
    assert WITHOUT_TEMPLATE not in said(convert(NEMO, model=instruct, dataset=dataset))
    tokenizer["_target_"] = "nemo_automodel.NeMoAutoTokenizer.from_pretrained"
    assert WITHOUT_TEMPLATE in said(convert(NEMO, dataset=dataset))


def test_a_remark_on_both_of_automodels_data_sets_is_one(convert: Convert) -> None:
    remarks = convert(NEMO, validation_dataset=dict(NEMO["dataset"])).remarks
    joined = [line for line in remarks if line.startswith("dataset, validation_dataset: ")]
    assert joined and not any(line.startswith(("dataset: ", "validation_")) for line in remarks)


@pytest.mark.parametrize(
    ("tool", "keys", "cause"),
    [
        ("NEMO", {"model": {"pretrained_model_name_or_path": "Qwen/Qwen2.5-Omni-3B"}}, "audio"),
        ("VLM", {"model": {"pretrained_model_name_or_path": "Qwen/Qwen2.5-Omni-3B"}}, "audio"),
        ("SWIFT", {"model": "Qwen/Qwen3-TTS-12Hz-1.7B-Base"}, "audio"),
        ("SWIFT", {"model": "Qwen/Qwen2.5-VL-3B-Instruct"}, "images by ms-swift"),
        ("NEMO", {"recipe": "TrainVispecRecipe"}, "speculative decoding"),
        ("NEMO", {"recipe": "FinetuneRecipeForMultimodal"}, "multimodal"),
    ],
)
def test_the_cause_of_a_refusal_is_that_of_the_model_or_recipe(
    tool: str, keys: dict[str, Any], cause: str, convert: Convert
) -> None:
    files = {"NEMO": NEMO, "VLM": VLM, "SWIFT": SWIFT}
    with pytest.raises(Refusal) as refusal:
        convert(files[tool], **keys)
    assert refusal.value.cause == cause


NEMO: dict[str, Any] = {
    "recipe": "TrainFinetuneRecipeForNextTokenPrediction",
    "step_scheduler": {"global_batch_size": 8, "local_batch_size": 1, "max_steps": 5},
    "model": {"pretrained_model_name_or_path": "a/model"},
    "dataset": {"_target_": "make_squad_dataset", "dataset_name": "a/squad", "split": "train"},
    "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-4},
}
VLM = NEMO | {
    "recipe": "FinetuneRecipeForVLM",
    "model": {"pretrained_model_name_or_path": "google/gemma-3-4b-it"},
}
COLLATERS = "nemo_automodel.components.datasets."


@pytest.mark.parametrize(
    ("key", "usual", "other"),
    [
        ("loss_fn.fp32_upcast", True, False),
        ("loss_fn.reduction", "sum", "mean"),
        (
            "distributed.pipeline",
            {"scale_grads_in_schedule": False},
            {"scale_grads_in_schedule": True},
        ),
        ("model.mtp_loss_scaling_factor", None, 0.1),
        ("model.drafter_path", None, "a/drafter"),
        ("model.text_config", {"use_cache": False}, {"mtp_num_hidden_layers": 1}),
        ("model.backend", {"attn": "te"}, {"fake_balanced_gate": True}),
        ("model.backend", {"experts": "gmm"}, {"experts": "torch_mm_mxfp8"}),
        ("model.backend", {"linear": "torch"}, {"te_fp8": {"recipe": "mxfp8"}}),
        ("optimizer.bias_correction", True, False),
        ("optimizer.adam_w_mode", True, False),
        ("optimizer.exp_avg_dtype", "torch.float32", "torch.float16"),
        ("optimizer.embed_lr", None, 1e-3),
        ("optimizer.amsgrad", False, True),
        ("packed_sequence.packing_strategy", "neat", "a.strategy"),
        ("packed_sequence.split_across_pack", False, True),
        ("peft.lora_dtype", "float32", "bfloat16"),
        (
            "dataloader.collate_fn",
            f"{COLLATERS}utils.default_collater",
            f"{COLLATERS}vlm.collate_fns.phi4_mm_collate_fn",
        ),
        ("tokenizer.padding_side", "right", None),
        ("freeze_config.freeze_projector", None, True),
        ("model.num_nextn_predict_layers", 0, 1),
        ("lr_scheduler.wd_incr_style", "constant", None),
        ("quantization.llm_int8_threshold", None, 3.0),
    ],
)
def test_a_value_of_automodels_that_does_otherwise_is_listed(
    key: str, usual: object, other: object, convert: Convert
) -> None:
    """A key of a section that is known is listed where it is not known itself."""
    section, _, name = key.partition(".")
    inner = dict(NEMO.get(section, {}))
    assert f"{key}" not in said(convert(NEMO, **{section: inner | {name: usual}}))
    if other is not None:
        made = convert(NEMO, **{section: inner | {name: other}})
        assert key in said(made) and not any(each.startswith(key) for each in made.ignored)


def test_modules_that_automodels_selectors_freeze_are_frozen(convert: Convert) -> None:
    """Source: ModuleSelector and apply_parameter_freezing of its components/utils/model_utils.py, in 0.7."""
    frozen = {"freeze_modules": [{"path": "lm_head"}, {"glob": "model.layers.[01].*"}]}
    made = convert(NEMO, freeze_config=frozen)
    names = ["lm_head.weight", "model.layers.1.mlp.up_proj.weight", "model.layers.2.mlp.weight"]
    patterns = made.recipe["frozen_modules"]
    assert [is_within(name, patterns) for name in names] == [True, True, False]
    assert "freeze" not in said(made)
    other = {"unfreeze_modules": [{"glob": "*.embed_tokens"}]}
    assert TRAINED_BESIDE in said(convert(NEMO, freeze_config=frozen | other))
    adapted = convert(NEMO, freeze_config=frozen, peft={"dim": 8, "target_modules": "*_proj"})
    assert ADAPTERS_LEFT_ALONE in said(adapted) and "frozen_modules" not in adapted.recipe


def test_automodels_rows_with_images_have_the_length_of_their_batches(convert: Convert) -> None:
    cut = convert(VLM, dataloader={"collate_fn": {"_target_": "a.collate_fn", "max_length": 2048}})
    assert (cut.recipe["max_length"], cut.recipe["overlength"]) == (2048, "drop")
    assert LONG_ROWS_CUT_IN_BATCHES in said(cut) and UNLIMITED_NOTE not in said(cut)
    mix = {"_target_": f"{COLLATERS}vlm.datasets.make_tulu3_magicoder_text_mix_dataset"}
    function = {"_target_": f"{COLLATERS}vlm.collate_fns.default_collate_fn", "max_length": 2048}
    for keys, overlength in (({}, "truncate"), ({"drop_overlong": True}, "drop")):
        text = convert(VLM, dataset=mix, dataloader={"collate_fn": function | keys})
        assert text.recipe["overlength"] == overlength and LONG_ROWS_CUT_IN_BATCHES not in said(
            text
        )
        assert (UNTRAINED_BY_CUT.format("") in said(text)) == (overlength == "truncate")
    packed = convert(VLM, packed_sequence={"pack_size": 4096, "max_length": 1024})
    assert (packed.recipe["max_length"], packed.recipe["packing"]) == (4096, True)
    assert UNLIMITED_NOTE not in said(packed)
    assert "packed_sequence.max_length: 1024   (a longer row gives its place" in said(packed)
    assert UNLIMITED_NOTE in said(convert(VLM))


def test_automodels_loss_of_later_tokens_is_listed(convert: Convert) -> None:
    for name, is_listed in (("Qwen/Qwen3.5-27B", True), ("Qwen/Qwen3-8B", False)):
        model = {"pretrained_model_name_or_path": name}
        assert (LATER_TOKENS_PREDICTED in said(convert(NEMO, model=model))) == is_listed
        for none in (
            {"num_nextn_predict_layers": 0},
            {"text_config": {"mtp_num_hidden_layers": 0}},
        ):
            assert LATER_TOKENS_PREDICTED not in said(convert(NEMO, model=model | none))
        distilled = convert(NEMO, model=model, teacher_model=model | {"torch_dtype": "bfloat16"})
        assert LATER_TOKENS_PREDICTED not in said(distilled)


COSINE = {"lr_decay_style": "cosine", "lr_warmup_steps": 0}
NEMO_STEPS = NEMO["step_scheduler"]
ADAM = {"_target_": "torch.optim.AdamW", "lr": 1e-4, "weight_decay": 0.1}


@pytest.mark.parametrize(
    ("keys", "ours"),
    [
        ({"clip_grad_norm": {"max_norm": None}}, {"max_grad_norm": 1.0}),
        ({"clip_grad_norm": {"max_norm": 0.5}}, {"max_grad_norm": 0.5}),
        ({"step_scheduler": {"num_epochs": 1}}, {"global_batch_size": 32}),
        ({"step_scheduler": {"save_checkpoint_every_epoch": False}}, {"save_steps": 100}),
        ({"step_scheduler": {"ckpt_every_steps": None}}, {"save_steps": None}),
        ({"lr_scheduler": COSINE | {"lr_warmup_steps": None}}, {"warmup_ratio": 0.1}),
        ({"lr_scheduler": COSINE | {"start_wd": 0, "end_wd": 0}}, {"weight_decay": 0.0}),
        ({"optimizer": {"_target_": "torch.optim.SGD"}}, {"weight_decay": 0.0}),
        ({"optimizer": {"_target_": "a.optimizers.FusedAdam"}}, {"weight_decay": 0.0}),
        ({"optimizer": {"_target_": "a.AdamWConfig"}}, {"learning_rate": 1e-4}),
        ({"checkpoint": {"restore_from": "LATEST"}}, {"resume_from_checkpoint": "auto"}),
        ({"peft": {"match_all_linear": True}}, {"use_peft": True, "lora_r": 8}),
        ({"neftune": {}}, {"neftune_noise_alpha": 5.0}),
        ({"tokenizer": {"pretrained_model_name_or_path": "b/c"}}, {"tokenizer_name_or_path": None}),
        (
            {"dataset": NEMO["dataset"] | {"tokenizer": {"pretrained_model_name_or_path": "b/c"}}},
            {"tokenizer_name_or_path": "b/c"},
        ),
    ],
)
def test_automodels_defaults_are_those_of_its_newest_version(
    keys: dict[str, object], ours: dict[str, object], convert: Convert
) -> None:
    made = convert(NEMO | {"optimizer": ADAM}, **keys)
    recipe = {key: field.default for key, field in recipe_keys().items()} | made.recipe
    assert {key: recipe[key] for key in ours} == ours


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"step_scheduler": NEMO_STEPS}, "num_epochs: 10"),
        ({"step_scheduler": NEMO_STEPS | {"num_epochs": None}}, SAVED_IN_EPOCHS),
        ({"lr_scheduler": COSINE | {"start_wd": 0, "end_wd": 0.2}}, "decay goes from 0 to 0.2"),
        (
            {"lr_scheduler": COSINE | {"start_wd": 0.2}},
            "lr_scheduler.start_wd: 0.2   (the weight decay goes from 0.2 to 0.1",
        ),
        ({"lr_scheduler": COSINE | {"start_wd": 0.1, "end_wd": 0.1}}, ""),
        ({"lr_scheduler": COSINE | {"lr_warmup_steps": 5, "init_lr": 0.0}}, "first step is 0"),
        ({"lr_scheduler": COSINE | {"lr_warmup_steps": 5}}, "from a tenth of the rate"),
        (
            {"dataset": NEMO["dataset"] | {"tokenizer": {"truncation_side": "left"}}},
            "dataset.tokenizer.truncation_side",
        ),
        ({"peft": {"target_modules": ["*.layers.0.*.q_proj"]}}, BY_ITS_END),
        ({"peft": {"target_modules": ["*.self_attn.*"]}}, BY_ITS_END),
        ({"peft": {"target_modules": ["*.self_attn.q_proj"]}}, ""),
    ],
)
def test_what_a_file_of_automodels_does_otherwise_is_said(
    keys: dict[str, object], line: str, convert: Convert
) -> None:
    lines = {
        "num_epochs: 10",
        "decay goes from",
        "first step is 0",
        "from a tenth of the rate",
        "dataset.tokenizer.",
        BY_ITS_END,
    }
    steps = {"num_epochs": 1, "ckpt_every_steps": 10}
    file = NEMO | {"step_scheduler": steps, "optimizer": ADAM}
    words = said(convert(file, **keys))
    assert line in words
    assert all(other in line for other in lines if other in words)


def test_no_noise_is_added_to_rows_with_images(convert: Convert) -> None:
    """Automodel's recipe of text alone reads the key."""
    made = convert(VLM, neftune={"noise_alpha": 5})
    assert "neftune_noise_alpha" not in made.recipe and "neftune.noise_alpha: 5" in said(made)
    assert convert(NEMO, neftune={"noise_alpha": 5}).recipe["neftune_noise_alpha"] == 5


def test_a_pattern_of_some_projections_adapts_these_alone(convert: Convert) -> None:
    model = {"pretrained_model_name_or_path": "meta-llama/Llama-3.1-8B"}
    made = convert(NEMO, model=model, peft={"target_modules": ["*_proj", "lm_head"]})
    assert "lm_head" in made.recipe["lora_target_modules"]


@pytest.mark.parametrize(
    ("key", "usual", "other"),
    [
        ("loss.ignore_index", -100, None),
        ("loss.label_smoothing_of_mine", None, 0.1),
        ("dataloader.shuffle", True, False),
        ("tokenizer.path", "/tmp/model/tokenizer.model", "/tmp/another/tokenizer.model"),
    ],
)
def test_a_value_of_torchtunes_that_does_otherwise_is_listed(
    key: str, usual: object, other: object, convert: Convert
) -> None:
    file = TUNE | {"checkpointer": TUNE["checkpointer"] | {"checkpoint_dir": "/tmp/model/"}}
    section, _, name = key.partition(".")
    inner = file.get(section, {})
    assert key not in said(convert(file, **{section: inner | {name: usual}}))
    if other is not None:
        made = convert(file, **{section: inner | {name: other}})
        assert key in said(made) and key not in made.ignored


LORA_THERE = {
    "_component_": "torchtune.models.llama3_1.lora_llama3_1_8b",
    "lora_attn_modules": ["q_proj"],
}
PAIRS_THERE = {
    "model": LORA_THERE,
    "dataset": {"_component_": "torchtune.datasets.stack_exchange_paired_dataset"},
    "loss": {"_component_": "torchtune.rlhf.loss.DPOLoss"},
}
SCHEDULED = {"_component_": "get_cosine_schedule_with_warmup", "num_warmup_steps": 10}


@pytest.mark.parametrize(
    ("keys", "columns"),
    [
        ({}, {"prompt": "question", "chosen": "response_j", "rejected": "response_k"}),
        ({"source": "mine/pairs", "column_map": {"prompt": "ask"}}, {"prompt": "ask"}),
    ],
)
def test_stack_exchange_of_torchtune_makes_turns_of_texts_from_any_source(
    keys: dict[str, object], columns: dict[str, str], convert: Convert
) -> None:
    """As `stack_exchange_paired_dataset`: a map of columns replaces all of the default ones."""
    made = convert(TUNE, **PAIRS_THERE | {"dataset": {**PAIRS_THERE["dataset"], **keys}})
    (source,) = made.recipe["datasets"]
    assert source["type"] == "messages"
    assert {k: v for k, v in source.items() if k.endswith("_column")} == {
        f"{name}_column": column for name, column in columns.items()
    }
    assert "data/rl" in said(made)


@pytest.mark.parametrize(
    ("command", "keys", "unread"),
    [
        ("", PAIRS_THERE | {"clip_grad_norm": 1.0}, "clip_grad_norm"),
        ("", {"clip_grad_norm": 1.0}, ""),
        ("lora_finetune_single_device", {"clip_grad_norm": 1.0}, ""),
        ("knowledge_distillation_distributed", {"clip_grad_norm": 1.0}, "clip_grad_norm"),
        ("qat_single_device", {"lr_scheduler": SCHEDULED}, "lr_scheduler"),
        ("qat_distributed", {"lr_scheduler": SCHEDULED}, ""),
        ("full_finetune_single_device", {"dataset_val": dict(TUNE["dataset"])}, "dataset_val"),
        ("full_finetune_distributed", {"dataset_val": dict(TUNE["dataset"])}, ""),
    ],
)
def test_a_key_that_a_recipe_of_torchtunes_does_not_read_is_said(
    command: str, keys: dict[str, object], unread: str, tmp_path: Path
) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text(f"# tune run {command} --config a.yaml\n" if command else "")
    with path.open("a") as file:
        yaml.safe_dump(TUNE | keys, file)
    made = convert_file(path)
    assert ("does not read it" in said(made)) == bool(unread) and f"{unread}: " in said(made)
    recipe = {key: field.default for key, field in recipe_keys().items()} | made.recipe
    if "clip_grad_norm" in keys:
        assert recipe["max_grad_norm"] == (None if unread else 1.0)
    if "lr_scheduler" in keys:
        schedule = ("constant", 0) if unread else ("cosine", 10)
        assert (recipe["lr_scheduler_type"], recipe["warmup_steps"]) == schedule


def test_torchtunes_optimizer_has_its_own_rate(convert: Convert) -> None:
    assert convert(TUNE, lr=1.0).recipe["learning_rate"] == 1e-5
    made = convert(TUNE, optimizer={"_component_": "torch.optim.SGD"}, lr=1.0)
    assert (made.recipe["learning_rate"], made.recipe["weight_decay"]) == (1e-3, 0.0)


def test_a_class_of_another_family_is_listed(convert: Convert) -> None:
    mistral = AXOLOTL | {"base_model": "mistralai/Mistral-7B-v0.1"}
    assert "model_type: " in said(convert(mistral, model_type="LlamaForCausalLM"))
    for own in ("MistralForCausalLM", "AutoModelForCausalLM"):
        assert "model_type: " not in said(convert(mistral, model_type=own))


def test_automodels_adapters_may_have_the_dtype_of_those_here(convert: Convert) -> None:
    assert AUTOMODEL_ADAPTERS in said(convert(NEMO, peft={"dim": 8, "match_all_linear": True}))
    made = convert(NEMO, peft={"dim": 8, "match_all_linear": True, "lora_dtype": "torch.float32"})
    assert AUTOMODEL_ADAPTERS not in said(made) and AUTOMODELS_START in made.remarks


PAIRS = {"rl": "dpo", "datasets": [{"path": "a/pairs", "type": "chat_template.default"}]}
HELD_OUT = {"val_set_size": 0.1, "save_steps": 100, "eval_steps": 100}
TEXT = FACTORY | {"model_name_or_path": "Qwen/Qwen3-8B", "template": "default"}
TRL = {"model_name_or_path": "Qwen/Qwen3-8B", "dataset_name": "a/rows"}
SWIFT_ROWS = {"model": "Qwen/Qwen3-8B", "tuner_type": "lora", "dataset": ["a/rows.jsonl"]}


@pytest.mark.parametrize(
    ("file", "keys", "ours", "read"),
    [
        (AXOLOTL, {"cosine_min_lr_ratio": 0.1}, "min_lr_ratio", {"lr_scheduler": "cosine"}),
        (AXOLOTL | PAIRS, {"neftune_noise_alpha": 5}, "neftune_noise_alpha", None),
        (AXOLOTL | PAIRS | HELD_OUT, {"early_stopping_patience": 3}, "early_stopping_patience", None),
        (AXOLOTL | PAIRS | HELD_OUT, {"load_best_model_at_end": True}, "keep_best_checkpoint", None),
        (AXOLOTL, {"optim_args": {"eps": 1e-6}}, "adam_epsilon", {"optimizer": "flash_adamw"}),
        (AXOLOTL | {"optimizer": "optimi_adamw"}, {"adam_beta1": 0.8}, "adam_beta1", {"adam_beta2": 0.95}),
        (AXOLOTL | {"optimizer": "muon"}, {"adam_beta1": 0.8}, "adam_beta1", {"optimizer": "adamw_torch_fused"}),
        (TEXT, {"warmup_steps": 0, "warmup_ratio": 0.1}, "warmup_steps", {"warmup_ratio": 0}),
        (TRL, {"warmup_steps": 0, "warmup_ratio": 0.1}, "warmup_steps", {"warmup_ratio": 0}),
        (SWIFT_ROWS, {"warmup_steps": 0, "warmup_ratio": 0.1}, "warmup_steps", {"warmup_ratio": 0}),
        (TEXT, {"save_total_limit": 0}, "save_total_limit", {"save_total_limit": 3}),
        (TRL, {"neftune_noise_alpha": 0}, "neftune_noise_alpha", {"neftune_noise_alpha": 5}),
        (TEXT | {"stage": "pt"}, {"use_dft_loss": True}, "token_loss", {"stage": "sft"}),
        (TEXT | {"use_dft_loss": True}, {"label_smoothing_factor": 0.1}, "label_smoothing", {"use_dft_loss": False}),
    ],
)  # fmt: skip
def test_a_key_that_its_tool_does_not_read_is_not_carried(
    file: dict[str, object],
    keys: dict[str, object],
    ours: str,
    read: dict[str, object] | None,
    convert: Convert,
) -> None:
    """`read`: with these keys it is."""
    unread = {"lr_scheduler": "linear"} if ours == "min_lr_ratio" else {}
    made = convert(file, **unread, **keys)
    assert made.recipe.get(ours) is None
    assert any(key.startswith(next(iter(keys))) for key in made.ignored)
    if read is not None:
        assert ours in convert(file, **keys | read).recipe
    else:
        supervised = {key: value for key, value in file.items() if key not in PAIRS}
        assert ours in convert(supervised, datasets=AXOLOTL["datasets"], **keys).recipe


def test_null_is_no_clipping_but_for_axolotl(convert: Convert) -> None:
    """Axolotl leaves out what is null, and Trainer's default clips."""
    assert convert(AXOLOTL, max_grad_norm=None).recipe.get("max_grad_norm", 1.0) == 1.0
    for file in (TEXT, TRL, AXOLOTL):
        zero = {"max_grad_norm": 0 if file is AXOLOTL else None}
        assert convert(file, **zero).recipe["max_grad_norm"] is None


def test_two_warm_ups_are_said(convert: Convert) -> None:
    both = {"warmup_steps": 10, "warmup_ratio": 0.1}
    assert BOTH_WARMUPS in said(convert(TEXT, **both))
    assert BOTH_WARMUPS in said(convert(TEXT, warmup_steps=10, warmup_ratio=0.0))
    assert BOTH_WARMUPS not in said(convert(TEXT, warmup_steps=10))


def test_trainer_measures_with_each_log_where_a_file_says_no_steps(convert: Convert) -> None:
    made = convert(TEXT, val_size=0.1, eval_strategy="steps", load_best_model_at_end=True)
    assert made.recipe["eval_steps"] == 500 and made.recipe["keep_best_checkpoint"] is True
    made = convert(TEXT, val_size=0.1, eval_strategy="steps", logging_steps=5)
    assert made.recipe["eval_steps"] == 5
    assert convert(TRL, eval_strategy="steps").recipe["eval_steps"] == 10
    smoothed = {"label_smoothing_factor": 0.1}
    assert HELD_OUT_SMOOTHED in convert(TRL, eval_strategy="steps", **smoothed).remarks


@pytest.mark.parametrize(("keys", "is_said"), [({}, True), ({"neat_packing": True}, False)])
def test_llama_factorys_packed_documents_see_each_other(
    keys: dict[str, object], is_said: bool, convert: Convert
) -> None:
    made = convert(TEXT, packing=True, **keys)
    assert made.recipe["packing"] and (NOT_NEAT in said(made)) == is_said


@pytest.mark.parametrize(
    ("name", "attention", "is_said"),
    [
        ("google/gemma-3-1b-it", "auto", True),
        ("google/gemma-3-1b-it", "fa2", False),
        ("google/gemma-2-9b-it", None, False),
        ("google/gemma-2-9b-it", "sdpa", True),
        ("Qwen/Qwen3-8B", "auto", False),
    ],
)
def test_llama_factorys_masks_of_packed_documents_have_no_windows(
    name: str, attention: str | None, is_said: bool, convert: Convert
) -> None:
    """Its masks have four dimensions, which transformers hands on as they are."""
    keys = {"flash_attn": attention} if attention else {}
    made = convert(TEXT, model_name_or_path=name, neat_packing=True, **keys)
    assert (NEAT_WITHOUT_WINDOWS in said(made)) == is_said
    apart = convert(TEXT, model_name_or_path=name, packing=True, **keys)
    assert NEAT_WITHOUT_WINDOWS not in said(apart)


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"finetuning_type": "lora"}, LOADED_IN_16_BITS),
        ({"finetuning_type": "lora", "bf16": True}, None),
        ({"finetuning_type": "full"}, None),
        ({"finetuning_type": "full", "use_badam": True}, TRAINED_IN_16_BITS),
        ({"finetuning_type": "full", "use_badam": True, "fp16": True}, None),
    ],
)
def test_weights_of_llama_factory_without_a_precision_have_the_dtype_of_their_files(
    keys: dict[str, object], line: str | None, convert: Convert
) -> None:
    """torch_dtype "auto" of its model/loader.py; cast_trainable_params_to_fp32 of its model/adapter.py."""
    text = said(convert(TEXT, **({"bf16": None} | keys)))
    assert [each for each in (LOADED_IN_16_BITS, TRAINED_IN_16_BITS) if each in text] == [
        line
    ] * bool(line)


def test_an_adapter_that_is_trained_further_elsewhere(convert: Convert) -> None:
    """LLaMA-Factory merges all but the last, and compares with the base; Axolotl's trainers of TRL make one of their own."""
    lora = TEXT | {"finetuning_type": "lora"}
    made = convert(lora, adapter_name_or_path="a/first, a/second")
    assert made.recipe["adapter_name_or_path"] == "a/second" and ALL_BUT_LAST in said(made)
    assert BASE_IS_REFERENCE not in said(made)
    compared = convert(lora, adapter_name_or_path="a/first", stage="dpo")
    assert BASE_IS_REFERENCE in said(compared) and ALL_BUT_LAST not in said(compared)
    assert BASE_IS_REFERENCE not in said(
        convert(lora, adapter_name_or_path="a/first", stage="dpo", pref_loss="simpo")
    )
    given = AXOLOTL | LORA | {"lora_model_dir": "a/first"}
    assert NEW_UNDER_TRL in said(convert(given | PAIRS))
    assert NEW_UNDER_TRL not in said(convert(given))


def test_a_pattern_of_some_decoder_layers_is_listed(convert: Convert) -> None:
    some = r"model.layers.[0-7].self_attn.q_proj"
    made = convert(AXOLOTL | LORA | {"lora_target_linear": False}, lora_target_modules=some)
    assert "lora_target_modules" in said(made)
    every = r"model.layers.[\d]+.self_attn.q_proj"
    made = convert(AXOLOTL | LORA | {"lora_target_linear": False}, lora_target_modules=every)
    assert made.recipe["lora_target_modules"] == ["q_proj"]


@pytest.mark.parametrize(
    ("name", "decay"),
    [("torch.optim.AdamW", 0.01), ("torch.optim.Adam", 0), ("torch.optim.SGD", 0)],
)
def test_an_optimizers_own_defaults_are_its_classes(
    name: str, decay: float, convert: Convert
) -> None:
    tune = convert(TUNE, optimizer={"_component_": name}).recipe
    assert (tune.get("weight_decay", 0), tune["learning_rate"]) == (decay, 1e-3)
    made = convert(NEMO, optimizer={"_target_": name, "lr": 1e-5})
    assert made.recipe.get("weight_decay", 0) == decay
    fused = {"_target_": "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam", "lr": 1e-5}
    assert not convert(NEMO, optimizer=fused).recipe.get("weight_decay")


def test_automodels_adapters_need_no_dim(convert: Convert) -> None:
    made = convert(NEMO, peft={"target_modules": ["q_proj"]})
    assert made.recipe["use_peft"] is True and made.recipe["lora_r"] == 8


def test_a_text_of_torchtunes_without_an_end_is_listed(convert: Convert) -> None:
    texts = {"_component_": "torchtune.datasets.text_completion_dataset", "source": "a/texts"}
    assert "add_eos" in said(convert(TUNE, dataset=texts | {"add_eos": False}))
    assert "add_eos" not in said(convert(TUNE, dataset=texts | {"add_eos": True}))


@pytest.mark.parametrize(
    ("tokenizer", "model", "said_there"),
    [
        (
            "llama3.llama3",
            "Llama-3.2-1B-Instruct",
            ["<|end_of_text|> ends", "here <|eot_id|> does"],
        ),
        ("llama3.llama3", "Meta-Llama-3-8B", ["<|end_of_text|> ends", "here the EOS token of"]),
        ("qwen2_5.qwen2_5", "Qwen2.5-0.5B-Instruct", []),
        ("qwen2_5.qwen2_5", "Qwen2.5-0.5B", ["<|im_end|> ends"]),
        ("phi3.phi3_mini", "Phi-3-mini-4k-instruct", ["<s> begins", "</s> ends"]),
        ("phi4.phi4", "phi-4", ["<|endoftext|> begins", "as for GPT-2"]),
        ("gemma.gemma", "gemma-2b", []),
    ],
)
def test_the_tokens_around_a_text_of_torchtunes_are_listed(
    convert: Convert, tokenizer: str, model: str, said_there: list[str]
) -> None:
    """Source: encode of its tokenizers; the ids were compared with those of `finetune inspect`."""
    keys = {
        "tokenizer": {"_component_": f"torchtune.models.{tokenizer}_tokenizer", "path": "a"},
        "checkpointer": TUNE["checkpointer"] | {"checkpoint_dir": f"/tmp/{model}"},
        "dataset": {"_component_": "torchtune.datasets.text_completion_dataset", "source": "a/b"},
    }
    lines = "\n".join(line for line in convert(TUNE, **keys).remarks if "dataset: " in line)
    assert all(each in lines for each in said_there)
    assert lines.count(" a text there") == sum(
        each.endswith("s") and "here" not in each for each in said_there
    )
    without_end = keys["dataset"] | {"add_eos": False}
    assert " ends a text" not in said(convert(TUNE, **keys | {"dataset": without_end}))


def test_trls_newest_defaults_of_grpo_are_said(convert: Convert) -> None:
    online = TRL | {"reward_funcs": ["think_format_reward"]}
    assert LONGER_SINCE in said(convert(online))
    assert LONGER_SINCE not in said(convert(online, max_completion_length=128))
    assert convert(online, max_staleness=2).recipe["max_completion_length"] == 2048
    assert KL_TIMES_RATIO in said(convert(online, beta=0.04))
    for keys in ({"beta": 0}, {"beta": 0.04, "use_bias_correction_kl": False}):
        assert KL_TIMES_RATIO not in said(convert(online, **keys))
    assert DROPOUT_ONLINE in said(convert(online, use_peft=True))
    for keys in ({"lora_dropout": 0}, {"disable_dropout": True}):
        assert DROPOUT_ONLINE not in said(convert(online, use_peft=True, **keys))


@pytest.mark.parametrize(
    ("file", "key", "usual", "other"),
    [
        (TEXT, "enable_thinking", True, False),
        (TRL, "train_sampling_strategy", "random", "sequential"),
        (TRL, "packing_strategy", "bfd", "wrapped"),
        (TRL | {"beta": 0.1}, "truncation_mode", "keep_start", "keep_end"),
        (TEXT, "ignore_pad_token_for_loss", True, False),
        (SWIFT_ROWS, "add_non_thinking_prefix", True, False),
        (SWIFT_ROWS, "train_dataloader_shuffle", True, False),
    ],
)
def test_what_a_tool_does_unless_it_is_turned_off_is_listed_where_it_is(
    file: dict[str, object], key: str, usual: object, other: object, convert: Convert
) -> None:
    assert f"{key}: " not in said(convert(file, **{key: usual}))
    assert f"{key}: " in said(convert(file, **{key: other}))


def test_ms_swift_quantizes_by_its_method_and_measures_with_its_saves(convert: Convert) -> None:
    assert "load_in_4bit" not in convert(SWIFT_ROWS, quant_bits=4).recipe
    assert convert(SWIFT_ROWS, quant_bits=4, quant_method="bnb").recipe["load_in_4bit"] is True
    assert convert(SWIFT_ROWS, split_dataset_ratio=0.01, save_steps=50).recipe["eval_steps"] == 50
    made = convert(SWIFT_ROWS, split_dataset_ratio=0.01, save_strategy="epoch")
    assert made.recipe["eval_strategy"] == "epoch"
    assert "eval_steps" not in convert(SWIFT_ROWS).recipe


def test_automodels_step_scheduler_has_defaults(convert: Convert) -> None:
    made = convert(NEMO, step_scheduler={"local_batch_size": 1, "max_steps": 500})
    assert made.recipe["global_batch_size"] == 32 and ENDS_WITH_EPOCHS.format(10) in said(made)
    made = convert(NEMO, step_scheduler={"max_steps": 500, "num_epochs": None})
    assert "num_epochs" not in said(made)


def test_arguments_of_a_schedule_may_be_written_as_json(convert: Convert) -> None:
    schedule = {"lr_scheduler_type": "cosine_with_min_lr"}
    made = convert(TEXT, lr_scheduler_kwargs='{"min_lr_rate": 0.1}', **schedule)
    assert made.recipe["min_lr_ratio"] == 0.1


def test_a_key_that_axolotls_newest_version_refuses_is_said(convert: Convert) -> None:
    assert SUM_REFUSED in said(convert(AXOLOTL | PAIRS, rpo_alpha=1.0))
    assert SUM_REFUSED not in said(convert(AXOLOTL | PAIRS))


SWIFT_QWEN = {
    "model": "Qwen/Qwen2.5-7B-Instruct",
    "tuner_type": "lora",
    "dataset": ["rows.jsonl"],
    "torch_dtype": "bfloat16",
    "gradient_accumulation_steps": 4,
}
COSINE_TO = {"lr_scheduler_type": "cosine_with_min_lr", "learning_rate": 1e-4}


@pytest.mark.parametrize(
    ("keys", "ours", "line"),
    [
        ({"quant_bits": 4}, {"load_in_4bit": False}, "quant_bits: 4"),
        ({"quant_bits": 4, "quant_method": "bnb"}, {"load_in_4bit": True}, ""),
        ({"early_stop_interval": 0}, {"early_stopping_patience": None}, ""),
        ({"label_smoothing_factor": 0.1}, {"label_smoothing": 0.1}, "label_smoothing_factor: "),
        ({"new_special_tokens": ["<a>", "b.txt"]}, {"added_tokens": ["<a>"]}, '"b.txt"'),
        ({"modules_to_save": ["all-norm", "head"]}, {"modules_to_save": ["head"]}, '"all-norm"'),
        (
            {"target_modules": ["all-linear", "all-embedding"]},
            {"lora_target_modules": "all-linear"},
            "target_modules: ",
        ),
        (COSINE_TO | {"lr_scheduler_kwargs": '{"min_lr": 1e-5}'}, {"min_lr_ratio": 0.1}, ""),
        ({"loss_scale": "last_round+hermes"}, {"turns": "last"}, "loss_scale: "),
        ({"val_dataset": ["a.jsonl"], "save_steps": 20}, {"eval_steps": 20}, ""),
        ({"val_dataset": ["a.jsonl"]}, {"eval_steps": 500}, ""),
        (
            {"split_dataset_ratio": 0.1, "save_strategy": "epoch"},
            {"eval_strategy": "epoch", "eval_split_size": 0.1},
            "",
        ),
        (
            {"split_dataset_ratio": 0.1, "eval_strategy": "no"},
            {"eval_split_size": None},
            "split_dataset_ratio: ",
        ),
        (
            {"freeze_parameters_ratio": 1, "tuner_type": "full"},
            {"use_peft": False},
            "freeze_parameters_ratio: ",
        ),
        ({"acc_strategy": "seq"}, {}, ""),
    ],
)
def test_a_value_of_ms_swifts_does_what_it_does_there(
    keys: dict[str, object], ours: dict[str, object], line: str, convert: Convert
) -> None:
    made = convert(SWIFT_QWEN, **keys)
    recipe = {key: field.default for key, field in recipe_keys().items()} | made.recipe
    assert {key: recipe[key] for key in ours} == ours
    assert line in said(made)
    if not line:
        assert not any(f"{key}: " in said(made) for key in keys if key != "val_dataset")


@pytest.mark.parametrize(("strategy", "is_said"), [("binpack", False), ("sequential", True)])
def test_ms_swifts_packing_in_order_is_said(strategy: str, is_said: bool, convert: Convert) -> None:
    """calculate_matched_group of its dataset/packing.py."""
    made = convert(SWIFT_QWEN, packing=True, packing_strategy=strategy)
    assert ("each row is packed where it fits best" in said(made)) is is_said
    assert ("packing_strategy" in made.ignored) is not is_said


def test_ms_swift_computes_in_fp16_where_weights_are_in_float32(convert: Convert) -> None:
    made = convert(SWIFT_QWEN, torch_dtype="float32")
    assert "mixed_precision: fp16" in str(made.accelerate_file)
    assert convert(SWIFT_QWEN, torch_dtype="float32", fp16=False).accelerate_file is None


def test_what_mistral_common_and_glms_indexer_do_otherwise_is_said(convert: Convert) -> None:
    common = {"base_model": "mistralai/Mistral-Small-3.1-24B-Instruct-2503", "tokenizer_use_mistral_common": True}  # fmt: skip
    text = said(convert(AXOLOTL, **common))
    assert ANSWERS_STRIPPED in text and RESIZED_BY_COMMON not in text
    seen = said(convert(AXOLOTL, **common, processor_type="AutoProcessor"))
    assert RESIZED_BY_COMMON in seen and RESIZED not in seen and COLUMN_REFUSED in seen
    model = {"_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained"}
    named = {
        "zai-org/GLM-5.2": [NOTES["INDEXED_OTHERWISE"], NOTES["LATENTS_IN_06"]],
        "/path/to/deepseek-v32": [NOTES["INDEXED_OTHERWISE_IN_06"], NOTES["LATENTS"]],
        "deepseek-ai/DeepSeek-V3.2": [NOTES["INDEXED_OTHERWISE_IN_06"], NOTES["LATENTS"]],
        "Qwen/Qwen3-8B": [],
    }
    for name, lines in named.items():
        text = said(convert(NEMO, model=model | {"pretrained_model_name_or_path": name}))
        known = (
            NOTES["INDEXED_OTHERWISE"],
            NOTES["INDEXED_OTHERWISE_IN_06"],
            NOTES["LATENTS"],
            NOTES["LATENTS_IN_06"],
        )
        assert [each for each in known if each in text] == lines


@pytest.mark.parametrize(
    ("tool", "name", "line"),
    [
        ("LLaMA-Factory", "Qwen/Qwen2-7B-Instruct-AWQ", DEQUANTIZED_AWQ),
        ("LLaMA-Factory", "Qwen/Qwen2-7B-Instruct-GPTQ-Int4", DEQUANTIZED),
        ("TRL", "Qwen/Qwen2-7B-Instruct-AWQ", DEQUANTIZED),
        ("LLaMA-Factory", "Qwen/Qwen2-7B-Instruct", None),
    ],
)
def test_how_a_packed_base_is_computed_is_said(
    tool: str, name: str, line: str | None, convert: Convert
) -> None:
    """AutoAWQ's WQLinear_GEMM casts its inputs to float16 under autocast to bfloat16 too."""
    files: dict[str, dict[str, Any]] = {
        "LLaMA-Factory": {"stage": "sft", "dataset": "rows", "template": "qwen", "bf16": True},
        "TRL": {"dataset_name": "a/rows", "use_peft": True, "bf16": True},
    }
    text = said(convert(files[tool] | {"model_name_or_path": name}))
    assert [each for each in (DEQUANTIZED, DEQUANTIZED_AWQ) if each in text] == [line] * bool(line)


ENDS_BY_US = "is the same one with <|user|> after that"
MAY_STOP = "a run stops here until this key names a template that writes one"


@pytest.mark.parametrize(
    ("file", "template", "lines"),
    [
        (AXOLOTL | {"base_model": "zai-org/GLM-4.7-Flash"}, "glm4.7", [ENDS_BY_US]),
        (TRL_FILE | {"model_name_or_path": "zai-org/GLM-4.5-Air"}, "glm4.5", [ENDS_BY_US]),
        (SWIFT | {"model": "ZhipuAI/GLM-4.6"}, "glm4.5", ["after the last answer, as there"]),
        (AXOLOTL | {"base_model": "zai-org/GLM-5.2"}, None, [MAY_STOP]),
        (
            AXOLOTL | {"base_model": "zai-org/GLM-4.6V-Flash", "processor_type": "AutoProcessor"},
            None,
            [MAY_STOP],
        ),
        (
            NEMO | {"model": {"pretrained_model_name_or_path": "zai-org/GLM-4.7-Flash"}},
            "glm4.7",
            [ENDS_BY_US],
        ),
        (
            NEMO | {"model": {"pretrained_model_name_or_path": "zai-org/glm-4-9b-chat-hf"}},
            None,
            [MAY_STOP],
        ),
        (
            NEMO
            | {
                "model": {"pretrained_model_name_or_path": "zai-org/GLM-4.7-Flash"},
                "dataset": {"_target_": "a.HellaSwag", "path_or_dataset": "a/b"},
            },
            None,
            [],
        ),
        (AXOLOTL | {"base_model": "facebook/xglm-564M"}, None, []),
        (AXOLOTL, None, []),
    ],
)
def test_models_whose_template_ends_no_last_answer_get_ours_which_does(
    file: dict[str, Any], template: str | None, lines: list[str], convert: Convert
) -> None:
    """A run refuses rows that train no end of an answer: no_end_of_turn of data/findings.py."""
    made = convert(file)
    assert made.recipe.get("chat_template") == template
    known = (ENDS_BY_US, MAY_STOP, "after the last answer, as there")
    assert [each for each in known if each in said(made)] == lines


def test_what_fills_up_axolotls_packed_rows_is_routed_too(convert: Convert) -> None:
    """It drops the mask of packed rows, and without one transformers' loss counts every token."""
    logits = (torch.randn(6, 4, generator=torch.Generator().manual_seed(0)),)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0]])
    of_all, of_all_there, of_words = (
        load_balancing_loss_func(logits, 4, 2, each) for each in (None, torch.ones(1, 6), mask)
    )
    assert torch.allclose(of_all, of_all_there) and not torch.allclose(of_all, of_words)
    file = AXOLOTL | {
        "base_model": "mistralai/Mixtral-8x7B-v0.1",
        "attn_implementation": "flash_attention_2",
        "sample_packing": True,
        "model_config": {"output_router_logits": True},
    }
    assert FILLING_ROUTED in said(convert(file))
    for keys in (
        {"sample_packing": False},
        {"pad_to_sequence_len": False},
        {"model_config": None},
        {"attn_implementation": "kernels-community/vllm-flash-attn3"},  # has a mask
    ):
        assert FILLING_ROUTED not in said(convert(file, **keys))


@pytest.mark.parametrize("rl", [None, "orpo"])
def test_axolotl_reads_keys_of_its_trainer_of_answers_under_no_rl(
    rl: str | None, convert: Convert
) -> None:
    keys = {
        "loss_watchdog_threshold": 5.0,
        "dataloader_drop_last": True,
        "lr_quadratic_warmup": True,
        "use_dft": True,
    }
    made = convert(AXOLOTL, **({"rl": rl, "chat_template": "chatml"} if rl else {}), **keys)
    text = said(made)
    is_read = rl is None
    for line in (LOSS_WATCHED, "the last batch is trained on too", "a quadratic warm-up"):
        assert (line in text) == is_read
    assert ("token_loss" in made.recipe) == is_read
    assert (WARMED_EARLIER in text) != is_read
    assert set(keys) <= {*made.ignored, *(key for key in keys if is_read)}


def test_axolotls_warm_up_is_quadratic_under_cosine_alone(convert: Convert) -> None:
    keys = {"lr_quadratic_warmup": True, "warmup_steps": 5}
    assert "a quadratic warm-up" in said(convert(AXOLOTL, **keys))
    linear = convert(AXOLOTL, lr_scheduler="linear", **keys)
    assert "a quadratic warm-up" not in said(linear) and WARMED_EARLIER in said(linear)


@pytest.mark.parametrize(
    ("keys", "is_read"),
    [
        ({"cosine_min_lr_ratio": 0.1}, True),
        ({"cosine_min_lr_ratio": 0}, False),
        ({}, False),
        ({"cosine_min_lr_ratio": 0.1, "lr_scheduler": "linear"}, False),
        ({"cosine_min_lr_ratio": 0.1, "lr_quadratic_warmup": True}, False),
    ],
)
def test_axolotls_cosine_stays_constant_above_a_minimum_alone(
    keys: dict[str, Any], is_read: bool, convert: Convert
) -> None:
    made = convert(AXOLOTL, cosine_constant_lr_ratio=0.5, **keys)
    assert ("cosine_constant_lr_ratio" in said(made)) == is_read
    assert ("cosine_constant_lr_ratio" in made.ignored) != is_read


def test_axolotl_counts_the_warm_up_of_pairs_in_epochs_whatever_max_steps_is(
    convert: Convert,
) -> None:
    keys = {"max_steps": 9, "warmup_ratio": 0.1}
    pairs = said(convert(AXOLOTL, rl="orpo", chat_template="chatml", **keys))
    assert ALWAYS_OF_EPOCHS in pairs and STEPS_OF_EPOCHS not in pairs
    assert STEPS_OF_EPOCHS in said(convert(AXOLOTL, **keys))


@pytest.mark.parametrize(
    ("keys", "is_tf32"),
    [({}, True), ({"tf32": "auto"}, True), ({"tf32": None}, None), ({"tf32": False}, False)],
)
def test_axolotl_multiplies_in_tensorfloat_where_a_file_does_not_say(
    keys: dict[str, object], is_tf32: bool | None, convert: Convert
) -> None:
    """auto is its default, and means yes on a GPU that can; null is left out, and means no."""
    assert convert(AXOLOTL, **keys).recipe.get("tf32") is is_tf32


def test_a_tokenizer_of_bytes_has_no_space_to_place(convert: Convert) -> None:
    for name, is_said in (("GPT2Tokenizer", False), ("LlamaTokenizer", True)):
        made = convert(AXOLOTL, tokenizer_type=name, tokenizer_legacy=True)
        assert ("tokenizer_legacy" in said(made)) == is_said
        assert ("tokenizer_legacy" in made.ignored) != is_said


@pytest.mark.parametrize("file", [TRL_FILE, AXOLOTL])
def test_the_last_model_is_exported_there_where_the_best_ones_are_saved_alone(
    file: dict[str, Any], convert: Convert
) -> None:
    held_out = {"val_set_size": 0.1} if file is AXOLOTL else {}
    keys = held_out | {"eval_strategy": "epoch", "save_strategy": "best"}
    made = convert(file, **keys)
    assert made.recipe["keep_best_checkpoint"] and LAST_EXPORTED in said(made)
    loads_best = convert(file, **keys, load_best_model_at_end=True, metric_for_best_model="loss")
    assert LAST_EXPORTED not in said(loads_best)
