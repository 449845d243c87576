"""What converts must run: the recipe is judged by the rules of a run, and changed to what would
run.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from finetune.config.accelerate_file import read_sharding
from finetune.config.compatibility import find_problems
from finetune.config.facts import (
    ModelFacts,
    find_linear_layers,
    read_family_source,
    read_model_facts,
    with_recipe_keys,
)
from finetune.config.families import IMAGE_FAMILIES, find_family
from finetune.config.layout import DIVISIONS, Fp8, Sharding
from finetune.config.module_names import find_expert_layers
from finetune.config.reader import read_recipe
from finetune.config.rule import Problem
from finetune.config.schema import NESTED, recipe_keys
from finetune.constants import ALL_LINEAR, HEADS
from finetune.convert.asked_layout import SHARD_SIZE, read_shipped
from finetune.convert.automodel import STEPS_UNCLAMPED
from finetune.convert.model_names import guess_family, has_tower, is_mixture
from finetune.convert.trained_layers import WITH_PEFT
from finetune.convert.value_conversion import Conversion
from finetune.errors import UserError
from finetune.files.json_files import read_json_object

SIZES = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 1 << 18,
    "num_hidden_layers": 48,  # which most numbers of stages divide
}
# Layers by the names of a Llama's, and what other families call those that compute the same, or
# fuse them into.
OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("q_proj", "k_proj", "v_proj"), ("qkv_proj", "query_key_value", "Wqkv", "c_attn")
    ),
    "o_proj": ("dense", "out_proj", "c_proj"),
    **dict.fromkeys(
        ("gate_proj", "up_proj"),
        ("gate_up_proj", "dense_h_to_4h", "fc1", "fc_in", "c_fc", "up_proj"),
    ),
    "down_proj": ("dense_4h_to_h", "fc2", "fc_out", "c_proj"),
}
# In transformers' source, but not in the published models, whose queries come out of a latent.
ABSENT: Mapping[str, tuple[str, ...]] = dict.fromkeys(("glm4_moe_lite", "mistral4"), ("q_proj",))
STATE_LAYERS = "linear_attention"
MOST_CHANGES = 12
SOME_NAME = "some/name"
SAME_LOSS = (
    "attn_implementation",
    "torch_compile",
    "use_liger_kernel",
    "expert_parallel_size",
    "activation_offload",
    "pipeline_parallel_size",
    "activation_checkpointing_keeps",
    "async_save",
    "optim_in_backward",
)
NO_CONV1D = "the family's layers are transformers' Conv1D, which get no adapters here"
BESIDE_TEXT = "no layer of the language model, which alone gets adapters here"
READ_UNCALLED = (
    "transformers reads its weight without calling it, which passes by an adapter, unless the "
    "base is quantized there"
)
NO_LAYER = "no such layer in this family: nothing is adapted by that name there either"
EMBEDDING_ADAPTED = "the embedding gets an adapter there, none here"
EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "embeddings", "word_embeddings")
OWN_CODE = (
    "no such layer in transformers' code of this family; the code beside the model's files, which "
    "is run there, may have it"
)
ROUTERS = (
    "the name of routers: they get adapters by it in some versions of transformers and peft, and "
    "make others refuse it; none here"
)
MORE_ROWS = (
    "gradient_accumulation_steps: groups of {} ranks share a row there; here each rank has rows of "
    "its own, and a step on as many GPUs has {} times the rows: divide it by {}, "
    "or train on as many times fewer GPUs"
)
REMOTE_CODE = "trust_remote_code is dropped: transformers has the code of {} itself"


def make_runnable(conversion: Conversion) -> None:
    """Changes what no run of the recipe would take, a line for each; what nothing resolves is left
    to do.
    """
    facts = find_facts(conversion.recipe)
    name = str(conversion.recipe.get("model_name_or_path"))
    if facts is not None and (conversion.images or has_tower(name)):  # of rows without images, too
        facts = replace(facts, vision=True)
    if facts is not None and read_family_source(facts.model_type):
        _fit_family(conversion, facts)
    if conversion.images in IMAGE_FAMILIES:
        _drop_remote_code(str(conversion.images), conversion)
    fixable = recipe_keys().keys() | {"mixed_precision", *DIVISIONS}
    for _ in range(MOST_CHANGES):
        problems = judge(conversion, facts)
        change = next(
            (problem for problem in problems if problem.fix and problem.fix.keys() <= fixable), None
        )
        if change is None:
            conversion.to_do += [_say(problem, conversion) for problem in problems]
            return
        _change(change, conversion)


# transformers' classes whose mask is of whole rows, whatever documents are packed in them
WHOLE_ROW_MASKS = ("afmoe", "biogpt", "opt")
# values of attn_implementation -> what transformers' classes say where they have it
CLASS_FLAGS = {
    "flash_attention_2": "_supports_flash_attn = True",
    "flex_attention": "_supports_flex_attn = True",
    "sdpa": "_supports_sdpa = True",
}


def _fit_family(conversion: Conversion, facts: ModelFacts) -> None:
    """Drops what the code of the family makes needless or does not have, and names its layers."""
    recipe = conversion.recipe
    family = facts.model_type
    _drop_remote_code(family, conversion)
    attention = str(recipe.get("attn_implementation"))
    reason = None
    if attention == "sdpa" and facts.family.sinks:
        reason = f"transformers' {family} has sinks, which it does not compute"
    elif attention == "sdpa" and recipe.get("packing") and family in WHOLE_ROW_MASKS:
        reason = f"transformers' {family} does not keep packed documents apart with it"
    elif CLASS_FLAGS.get(attention, "") not in read_family_source(family):
        reason = f"transformers' {family} cannot be computed with it"
    if reason:
        del recipe["attn_implementation"]
        conversion.remarks.append(f"attn_implementation: {attention} is dropped: {reason}")
    _rename_targets(conversion, facts)


BALANCED_THERE = (
    "the code beside the model's files adds a loss for the routers' balance in training "
    "(aux_loss_alpha of config.json); transformers' own does not"
)
# modeling_deepseek.py and modeling_nemotron_h.py beside the models' files
OF_CODE_BESIDE = {"deepseek_v2": BALANCED_THERE, "nemotron_h": STEPS_UNCLAMPED}

# pat_str of tokenization_kimi.py, which stands beside these models and in Axolotl's
# model_support/kimi_linear, and the pattern of transformers' TikTokenConverter
OWN_WORDS = re.compile("kimi|moonlight")
WORDS_THERE = (
    "where tiktoken.model stands beside the model, and no tokenizer.json, its own code splits a "
    "text into words there, and transformers by GPT-4's pattern here: contractions, capitals "
    "within a word, and Chinese make other tokens"
)


def _drop_remote_code(family: str, conversion: Conversion) -> None:
    recipe = conversion.recipe
    is_run = recipe.pop("trust_remote_code", None)
    if is_run:
        conversion.remarks.append(REMOTE_CODE.format(family))
        note = OF_CODE_BESIDE.get(family)
        # which classes of Automodel's own do too, whose line says so by now
        if note and not any(note in line for line in conversion.differences):
            conversion.add_difference("trust_remote_code", True, note)
    # ms-swift always runs such code, and Axolotl has its own copy
    is_run = is_run or conversion.tool == "ms-swift"
    is_run = is_run or (conversion.tool == "Axolotl" and family == "kimi_linear")
    name = str(recipe.get("model_name_or_path"))
    if is_run and OWN_WORDS.search(name.lower()):
        conversion.add_difference("model", name, WORDS_THERE)


def find_facts(recipe: Mapping[str, Any]) -> ModelFacts | None:
    """Reads the facts of a recipe's model from its config.json if at hand, else from what its name
    says.
    """
    name = str(recipe.get("model_name_or_path"))
    path = Path(name).expanduser() / "config.json"
    try:
        config = read_json_object(path)
        config = config.get("text_config") or config
        model_type = config.get("model_type") or guess_family(name)
        if model_type is None:
            return None
        assumed = SIZES | {"model_type": model_type}
        if find_family(model_type).mixture or is_mixture(name):
            assumed["num_experts"] = 1 << 7
        if f'"{STATE_LAYERS}"' in read_family_source(model_type):
            assumed["layer_types"] = [STATE_LAYERS]  # as the models of such a family have them
        return read_model_facts(config or assumed, name)
    except (AttributeError, UserError):
        return None  # a run says what is wrong with it


def judge(conversion: Conversion, facts: ModelFacts | None) -> list[Problem]:
    """Lists what a run would refuse, by its rules.

    A file that is missing here may be there where it is trained.
    """
    values = {key: _hide_path(key, value) for key, value in conversion.recipe.items()}
    try:
        read = read_recipe(None, [f"{key}={json.dumps(value)}" for key, value in values.items()])
        layout = with_recipe_keys(read_sharding(None, read.run.accelerate_config, {}), read)
    except UserError:
        return []  # the reader says what is wrong
    layout = _lay_out(layout, conversion.accelerate_file)
    ranks = max(layout.smallest_world, 1 if layout.layout == "single" else 2)
    if layout.ranks_per_row > 1:  # by the Accelerate file, which has so many groups of them
        ranks = layout.ranks_per_batch * (layout.shard_size or 1)
    problems = find_problems(read, layout, facts, ranks, images=conversion.images)
    return [problem for problem in problems if not problem.is_note]


def _hide_path(key: str, value: Any) -> Any:
    """Puts a name that may be anywhere in place of a path."""
    if key in NESTED:
        return [entry | {"path": SOME_NAME} for entry in value]
    if recipe_keys()[key].is_file_or_name and key != "accelerate_config" and value:
        return SOME_NAME
    return value


def _lay_out(layout: Sharding, accelerate_file: str | None) -> Sharding:
    """Returns the layout of a shipped Accelerate file with what the file that is written changes of
    it.
    """
    file = yaml.safe_load(accelerate_file or "{}")
    mesh = file.get("parallelism_config", {})
    sizes = {name: mesh.get(f"parallelism_config_{key}", 1) for key, (name, _) in DIVISIONS.items()}
    precision = file.get("mixed_precision", layout.mixed_precision)
    is_fp8 = precision == "fp8"
    return replace(
        layout,
        mixed_precision="bf16" if is_fp8 else precision,
        fp8=Fp8() if is_fp8 else None,
        # whose sizes are an example
        strategy="FULL_SHARD" if layout.strategy == "HYBRID_SHARD" else layout.strategy,
        replicate_size=None,
        shard_size=mesh.get(SHARD_SIZE),
        **sizes,
    )


def _change(problem: Problem, conversion: Conversion) -> None:
    """Sets what resolves a problem, and says so."""
    keys = recipe_keys()
    recipe = conversion.recipe
    changed = {}
    for key, value in (problem.fix or {}).items():
        if key not in keys:
            _change_file(key, value, conversion)
        elif recipe.get(key, keys[key].default) == value:
            continue
        elif value == keys[key].default:
            recipe.pop(key, None)
        else:
            recipe[key] = value
        changed[key] = value
    made = ", ".join(f"{key}: {json.dumps(value)}" for key, value in changed.items())
    sentence = _say(problem, conversion)
    line = f"{made}   ({sentence.rpartition('; ')[0] or sentence})"
    if changed.keys() <= {*SAME_LOSS}:
        lines = conversion.remarks
    else:
        lines = conversion.differences
    lines.append(line)


def _change_file(key: str, value: Any, conversion: Conversion) -> None:
    """Changes a key of the Accelerate file that is written beside the recipe; none is where the
    shipped one does it.
    """
    file = yaml.safe_load(conversion.accelerate_file or "{}")
    mesh = file.get("parallelism_config", {})
    if key == "mixed_precision":
        file[key] = value
    else:
        size = mesh.get(f"parallelism_config_{key}", 1)
        if size > 1 and not conversion.recipe.get("global_batch_size"):
            conversion.remarks.append(MORE_ROWS.format(size, size, size))
        mesh[f"parallelism_config_{key}"] = value
    if mesh and {size for name, size in mesh.items() if name != SHARD_SIZE} == {1}:
        del file["parallelism_config"]
        lines = conversion.remarks
        conversion.remarks = [line for line in lines if not line.startswith(SHARD_SIZE)]
    name = conversion.recipe.get("accelerate_config")
    if name and file == read_shipped(str(name)):
        conversion.accelerate_file = None
    else:
        conversion.accelerate_file = yaml.safe_dump(file, sort_keys=False)


def _say(problem: Problem, conversion: Conversion) -> str:
    return problem.sentence.replace(SOME_NAME, str(conversion.recipe.get("model_name_or_path")))


def _rename_targets(conversion: Conversion, facts: ModelFacts) -> None:
    """Names the adapted layers as the family does.

    A name that it does not have adapts nothing in the other tools.
    """
    family = facts.model_type
    targets = conversion.recipe.get("lora_target_modules")
    layers = find_linear_layers(family).difference(ABSENT.get(family, ()))
    unadaptable = facts.family.unadaptable
    if ALL_LINEAR in (targets or ()) and unadaptable:
        layer = unadaptable[-1]
        reason = READ_UNCALLED if layer == "dt_proj" else "peft has none for it"
        note = f"{layer} of {family} gets no adapter here: {reason}"
        if layer not in conversion.excluded_layers:
            conversion.differences.append(f"lora_target_modules: {note}")
        return
    if targets and not layers and read_family_source(family):
        conversion.add_difference(
            "lora_target_modules", targets, NO_CONV1D, "LoRA on transformers' Conv1D layers"
        )
    if not isinstance(targets, list) or not layers:
        return
    # a run renames the experts'
    known = layers | find_expert_layers(family).keys() | HEADS | {ALL_LINEAR}
    missing = [name for name in targets if name.rpartition(".")[2] not in known]
    others = [name for name in targets if name not in missing]
    # whose own models have the layers of a Llama
    if missing and (not others or conversion.tool == "torchtune"):
        _name_fused_layers(missing, others, layers, conversion)
        return
    conversion.recipe["lora_target_modules"] = others or targets
    if "gate" in missing and facts.family.mixture and conversion.tool in WITH_PEFT:
        missing.remove("gate")
        conversion.add_difference("lora_target_modules", "gate", ROUTERS)
    missing = _report_embeddings(missing, conversion)
    if missing:
        if conversion.images:
            reason = BESIDE_TEXT
        elif REMOTE_CODE.format(family) in conversion.remarks:
            reason = OWN_CODE
        else:
            reason = NO_LAYER
        conversion.remarks.append(f"lora_target_modules: {', '.join(missing)}: {reason}")


def _report_embeddings(missing: Sequence[str], conversion: Conversion) -> list[str]:
    """Reports the embedding among the names that get no adapter here; returns the others."""
    embeddings = [name for name in missing if name in EMBEDDINGS]
    if embeddings and conversion.tool in WITH_PEFT:
        conversion.add_difference("lora_target_modules", embeddings, EMBEDDING_ADAPTED)
        return [name for name in missing if name not in embeddings]
    return [*missing]


def _name_fused_layers(
    missing: Sequence[str], others: Sequence[str], layers: Collection[str], conversion: Conversion
) -> None:
    """Names the layers into which the family fuses those that it does not have."""
    fused: dict[str, None] = {}
    for name in missing:
        fused |= dict.fromkeys(
            [other for other in OTHER_NAMES.get(name, ()) if other in layers][:1]
        )
    if fused:
        conversion.recipe["lora_target_modules"] = list(dict.fromkeys([*others, *fused]))
        line = f"adapters of {', '.join(fused)} here, the family's layers for {', '.join(missing)}"
        conversion.differences.append(f"lora_target_modules: {line}")
    elif others:
        conversion.recipe["lora_target_modules"] = list(dict.fromkeys(others))
