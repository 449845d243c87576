"""Makes a converted recipe run: judges it by the rules of a run, and changes what they refuse."""

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
from finetune.convert.counterparts import NOTES
from finetune.convert.model_names import guess_family, has_tower, is_mixture
from finetune.convert.trained_layers import WITH_PEFT
from finetune.convert.value_conversion import Conversion
from finetune.errors import UserError
from finetune.files.json_files import read_json_object

# entries of config.json that are assumed of a model of which only the family is known
SIZES = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 1 << 18,
    "num_hidden_layers": 48,  # which most numbers of stages divide
}
# a Llama's layer -> the layers that compute the same in other families, or that it is fused into
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
# family -> layers of transformers' source that its published models do not have: they compute
# queries from a latent
ABSENT: Mapping[str, tuple[str, ...]] = dict.fromkeys(("glm4_moe_lite", "mistral4"), ("q_proj",))
STATE_LAYERS = "linear_attention"  # a value of layer_types in config.json
MOST_CHANGES = 12  # of the recipe, one problem each
SOME_NAME = "some/name"
# keys whose changes leave the loss the same: they are remarks, others are differences
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
    """Fixes each problem that a run of the recipe would have, and reports it with a line.

    Problems without a fix are left to do.
    """
    facts = find_facts(conversion.recipe)
    name = str(conversion.recipe.get("model_name_or_path"))
    # a model has its tower even if its rows have no images
    if facts is not None and (conversion.image_family or has_tower(name)):
        facts = replace(facts, vision=True)
    if facts is not None and read_family_source(facts.model_type):
        _fit_family(conversion, facts)
    if (
        conversion.image_family in IMAGE_FAMILIES
    ):  # `_fit_family` has not run for a family of images only
        _drop_remote_code(str(conversion.image_family), conversion)
    # keys of the recipe, and of the Accelerate file
    fixable = recipe_keys().keys() | {"mixed_precision", *DIVISIONS}
    problems = judge(conversion, facts)
    # One at a time, since a fix may solve other problems, or make some. The bound is against fixes
    # that undo each other.
    for _ in range(MOST_CHANGES):
        fixable_problem = next(
            (problem for problem in problems if problem.fix and problem.fix.keys() <= fixable), None
        )
        if fixable_problem is None:
            break
        _fix(fixable_problem, conversion)
        problems = judge(conversion, facts)
    conversion.to_do += [_say(problem, conversion) for problem in problems]


# families whose masks in transformers are of whole rows, so that packed documents see each other
WHOLE_ROW_MASKS = ("afmoe", "biogpt", "opt")
# value of attn_implementation -> what the source of a family in transformers says if it has it
CLASS_FLAGS = {
    "flash_attention_2": "_supports_flash_attn = True",
    "flex_attention": "_supports_flex_attn = True",
    "sdpa": "_supports_sdpa = True",
}


def _fit_family(conversion: Conversion, facts: ModelFacts) -> None:
    """Adapts the recipe to transformers' code of its family.

    Drops remote code, and an attention that the family does not compute; renames adapted layers.
    """
    recipe = conversion.recipe
    family = facts.model_type
    _drop_remote_code(family, conversion)
    attention = str(recipe.get("attn_implementation"))
    reason = None
    if attention == "sdpa" and facts.family.sinks:
        reason = f"transformers' {family} has sinks, which it does not compute"
    elif attention == "sdpa" and recipe.get("packing") and family in WHOLE_ROW_MASKS:
        reason = f"transformers' {family} does not keep packed documents apart with it"
    # other values than these have no flag: "" is in every source
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
# family -> what the code beside the model's files computes otherwise: modeling_deepseek.py and
# modeling_nemotron_h.py
OF_CODE_BESIDE = {"deepseek_v2": BALANCED_THERE, "nemotron_h": NOTES["STEPS_UNCLAMPED"]}

# models with tokenization_kimi.py, whose pat_str splits a text into other words than the pattern of
# transformers' TikTokenConverter; Axolotl has a copy in model_support/kimi_linear
OWN_WORDS = re.compile("kimi|moonlight")
WORDS_THERE = (
    "where tiktoken.model stands beside the model, and no tokenizer.json, its own code splits a "
    "text into words there, and transformers by GPT-4's pattern here: contractions, capitals "
    "within a word, and Chinese make other tokens"
)


def _drop_remote_code(family: str, conversion: Conversion) -> None:
    """Drops trust_remote_code, and reports what such code of the model computes otherwise there."""
    recipe = conversion.recipe
    runs_remote_code = recipe.pop("trust_remote_code", None)
    if runs_remote_code:
        conversion.remarks.append(REMOTE_CODE.format(family))
        note = OF_CODE_BESIDE.get(family)
        # Automodel's own classes do so too, and a line may be on them already
        if note and not any(note in line for line in conversion.differences):
            conversion.add_difference("trust_remote_code", True, note)
    # ms-swift always runs such code, and Axolotl has its own copy
    has_copy = conversion.tool == "Axolotl" and family == "kimi_linear"
    runs_remote_code = runs_remote_code or conversion.tool == "ms-swift" or has_copy
    name = str(recipe.get("model_name_or_path"))
    if runs_remote_code and OWN_WORDS.search(name.lower()):
        conversion.add_difference("model", name, WORDS_THERE)


def find_facts(recipe: Mapping[str, Any]) -> ModelFacts | None:
    """Reads the facts about a recipe's model: from config.json if its folder is here, else assumed
    for the family that its name says.

    Returns None if neither says a family, or config.json is wrong, which a run reports.
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
            assumed["layer_types"] = [STATE_LAYERS]
        return read_model_facts(config or assumed, name)
    except (AttributeError, UserError):
        return None


def judge(conversion: Conversion, facts: ModelFacts | None) -> list[Problem]:
    """Lists the problems for which a run would refuse the recipe.

    Paths are left out: a file that is missing here may exist where the recipe is trained.
    """
    values = {key: _hide_path(key, value) for key, value in conversion.recipe.items()}
    try:
        recipe = read_recipe(None, [f"{key}={json.dumps(value)}" for key, value in values.items()])
        layout = with_recipe_keys(read_sharding(None, recipe.run.accelerate_config, {}), recipe)
    except UserError:
        return []  # the caller of the conversion reads the recipe again, and reports the error
    layout = _lay_out(layout, conversion.accelerate_file)
    ranks = max(layout.smallest_world, 1 if layout.layout == "single" else 2)
    if layout.ranks_per_row > 1:  # the mesh of the Accelerate file decides
        ranks = layout.ranks_per_batch * (layout.shard_size or 1)
    problems = find_problems(recipe, layout, facts, ranks, images=conversion.image_family)
    return [problem for problem in problems if not problem.is_note]


def _hide_path(key: str, value: Any) -> Any:
    """Replaces a path by the name of a hub repository, which no reader looks for on the disk."""
    if key in NESTED:
        return [entry | {"path": SOME_NAME} for entry in value]
    if recipe_keys()[key].is_file_or_name and key != "accelerate_config" and value:
        return SOME_NAME
    return value


def _lay_out(layout: Sharding, accelerate_file: str | None) -> Sharding:
    """Returns the layout of a shipped Accelerate file, with the mesh and the precision of the file
    that is written.

    `accelerate_file`: the text of that file; None if the shipped one is used.
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
        # the sizes of a shipped HYBRID_SHARD are an example
        strategy="FULL_SHARD" if layout.strategy == "HYBRID_SHARD" else layout.strategy,
        replicate_size=None,
        shard_size=mesh.get(SHARD_SIZE),
        **sizes,
    )


def _fix(problem: Problem, conversion: Conversion) -> None:
    """Applies a problem's fix to the recipe and the Accelerate file, and reports it in one line."""
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
    settings = ", ".join(f"{key}: {json.dumps(value)}" for key, value in changed.items())
    sentence = _say(problem, conversion)
    reason, _, _ = sentence.rpartition("; ")  # without the advice behind it
    line = f"{settings}   ({reason or sentence})"
    if changed.keys() <= {*SAME_LOSS}:
        lines = conversion.remarks
    else:
        lines = conversion.differences
    lines.append(line)


def _change_file(key: str, value: Any, conversion: Conversion) -> None:
    """Changes a key of the Accelerate file beside the recipe, or a size of its mesh.

    If the file is then the shipped one, none is written.
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
    # a mesh without groups is none
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
    """Returns a problem's sentence with the model's name in it."""
    return problem.sentence.replace(SOME_NAME, str(conversion.recipe.get("model_name_or_path")))


def _rename_targets(conversion: Conversion, facts: ModelFacts) -> None:
    """Names the layers that get adapters as the family does, and reports names that it lacks.

    Names that the family lacks are dropped: they adapt nothing in the other tools either.
    """
    family = facts.model_type
    targets = conversion.recipe.get("lora_target_modules")
    layers = find_linear_layers(family).difference(ABSENT.get(family, ()))
    unadaptable = facts.family.unadaptable
    if ALL_LINEAR in (targets or ()) and unadaptable:
        layer = unadaptable[-1]  # the last one alone is reported
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
    # names of experts count: a run renames them to parameters
    known = layers | find_expert_layers(family).keys() | HEADS | {ALL_LINEAR}
    missing = [name for name in targets if name.rpartition(".")[2] not in known]
    others = [name for name in targets if name not in missing]
    # torchtune's own models have a Llama's layers, whatever the family calls them
    if missing and (not others or conversion.tool == "torchtune"):
        _name_fused_layers(missing, others, layers, conversion)
        return
    conversion.recipe["lora_target_modules"] = others or targets
    if "gate" in missing and facts.family.mixture and conversion.tool in WITH_PEFT:
        missing.remove("gate")
        conversion.add_difference("lora_target_modules", "gate", ROUTERS)
    missing = _report_embeddings(missing, conversion)
    if missing:
        if conversion.image_family:
            reason = BESIDE_TEXT
        elif REMOTE_CODE.format(family) in conversion.remarks:
            reason = OWN_CODE
        else:
            reason = NO_LAYER
        conversion.remarks.append(f"lora_target_modules: {', '.join(missing)}: {reason}")


def _report_embeddings(missing: Sequence[str], conversion: Conversion) -> list[str]:
    """Reports an embedding among the names that get no adapter here; returns the other names."""
    embeddings = [name for name in missing if name in EMBEDDINGS]
    if embeddings and conversion.tool in WITH_PEFT:
        conversion.add_difference("lora_target_modules", embeddings, EMBEDDING_ADAPTED)
        return [name for name in missing if name not in embeddings]
    return [*missing]


def _name_fused_layers(
    missing: Sequence[str], others: Sequence[str], layers: Collection[str], conversion: Conversion
) -> None:
    """Puts the family's own layers in the place of the names in `missing`, and reports them.

    `others`: the adapted layers that the family has by name. `layers`: all of the family's.
    """
    fused: dict[str, None] = {}
    for name in missing:
        fused_layer = next((other for other in OTHER_NAMES.get(name, ()) if other in layers), None)
        if fused_layer is not None:
            fused[fused_layer] = None
    if fused:
        conversion.recipe["lora_target_modules"] = list(dict.fromkeys([*others, *fused]))
        line = f"adapters of {', '.join(fused)} here, the family's layers for {', '.join(missing)}"
        conversion.differences.append(f"lora_target_modules: {line}")
    elif others:
        conversion.recipe["lora_target_modules"] = list(dict.fromkeys(others))
