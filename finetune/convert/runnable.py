"""What converts must run: a recipe is judged by the rules of a run, for the model's family, and written as what would
run."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from finetune.config.accelerate_file import read_sharding
from finetune.config.compatibility import find_problems
from finetune.config.facts import ModelFacts, Problem, read_model_facts, with_expert_parallelism
from finetune.config.families import find_family, find_linear_layers, read_family_source
from finetune.config.layout import DIVISIONS, Fp8
from finetune.config.reader import read_recipe
from finetune.config.schema import recipe_keys
from finetune.convert.model_names import guess_family
from finetune.convert.rules import Conversion
from finetune.errors import UserError
from finetune.files.run_json import read_json_object

SIZES = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 1 << 18,
}
# Layers by the names of a Llama's, and what other families call those that compute the same, or fuse them into.
OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), ("qkv_proj", "query_key_value", "Wqkv", "c_attn")),
    "o_proj": ("dense", "out_proj", "c_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), ("gate_up_proj", "dense_h_to_4h", "fc1", "fc_in", "c_fc", "up_proj")),
    "down_proj": ("dense_4h_to_h", "fc2", "fc_out", "c_proj"),
}
# In transformers' source, but not in the published models, whose queries come out of a latent.
RENAMED = {"mixtral": ("block_sparse_moe", "mlp")}  # modules, by transformers 5
ABSENT: Mapping[str, tuple[str, ...]] = {"glm4_moe_lite": ("q_proj",)}
MOST_CHANGES = 12
SAME_LOSS = ("attn_implementation", "torch_compile", "use_liger_kernel", "expert_parallel_size", "activation_offload",
             "activation_checkpointing_keeps", "async_save", "optim_in_backward")  # fmt: skip
NO_CONV1D = "the family's layers are transformers' Conv1D, which get no adapters here"
NO_LAYER = "no such layer in this family: nothing is adapted by that name there either"


def make_runnable(found: Conversion) -> None:
    """Changes in the recipe what no run of it would take, with a line for each change; what no change resolves is left
    to do."""
    facts = find_facts(found.recipe)
    if facts is not None and found.images:
        facts = replace(facts, vision=True)
    if facts is not None and read_family_source(facts.model_type):
        if found.recipe.pop("trust_remote_code", None):
            found.remarks.append(
                f"trust_remote_code is dropped: transformers has the code of {facts.model_type} itself"
            )
        if facts.family.sinks and found.recipe.get("attn_implementation") == "sdpa":
            del found.recipe["attn_implementation"]
            found.remarks.append(
                f"attn_implementation: sdpa is dropped: transformers' {facts.model_type} has sinks, which it does not "
                "compute"
            )
        _rename_targets(found, facts)
        if patterns := found.recipe.get("trainable_modules"):
            old, new = RENAMED.get(facts.model_type, ("", ""))
            found.recipe["trainable_modules"] = [str(pattern).replace(old, new) for pattern in patterns]
    for _ in range(MOST_CHANGES):
        problems = judge(found, facts)
        known = recipe_keys().keys() | {"mixed_precision", *DIVISIONS}
        change = next((problem for problem in problems if problem.fix and problem.fix.keys() <= known), None)
        if change is None:
            found.to_do += [_say(problem, found) for problem in problems]
            return
        _change(change, found)


def find_facts(recipe: Mapping[str, Any]) -> ModelFacts | None:
    """The facts of a recipe's model: by its config.json where that is at hand, else what its name says of its
    family."""
    name = str(recipe.get("model_name_or_path"))
    path = Path(name).expanduser() / "config.json"
    try:
        config = read_json_object(path)
        config = config.get("text_config") or config
        guessed = config.get("model_type") or guess_family(name)
        if guessed is None:
            return None
        family = find_family(guessed)
        assumed = SIZES | {"model_type": guessed} | ({"num_experts": 1 << 7} if family.mixture else {})
        return read_model_facts(config or assumed, name)
    except (AttributeError, UserError):
        return None  # a run says what is wrong with it


def judge(found: Conversion, facts: ModelFacts | None) -> list[Problem]:
    """What a run would refuse, by its rules. A file that is missing here may be there where it is trained."""
    known, recipe = recipe_keys(), found.recipe
    values: dict[str, Any] = {
        key: "some/name" if known[key].is_file_or_name and key != "accelerate_config" and value else value
        for key, value in recipe.items()
    }
    for key in values.keys() & {"datasets", "eval_datasets"}:
        values[key] = [entry | {"path": "some/name"} for entry in recipe[key]]
    try:
        read = read_recipe(None, [f"{key}={json.dumps(value)}" for key, value in values.items()])
        layout = with_expert_parallelism(read_sharding(None, read.run.accelerate_config, {}), read)
    except UserError:
        return []  # the reader says what is wrong
    file = yaml.safe_load(found.accelerate_file or "{}")
    mesh, precision = file.get("parallelism_config", {}), file.get("mixed_precision", layout.mixed_precision)
    sizes = {name: mesh.get(f"parallelism_config_{key}", 1) for key, (name, _) in DIVISIONS.items()}
    layout = replace(
        layout,
        mixed_precision="bf16" if precision == "fp8" else precision,
        fp8=Fp8() if precision == "fp8" else None,
        strategy="FULL_SHARD" if layout.strategy == "HYBRID_SHARD" else layout.strategy,  # whose sizes are an example
        replicate_size=None,
        shard_size=None,
        **sizes,
    )
    least = 1 if layout.layout == "single" else 2
    ranks = layout.ranks_per_batch if layout.ranks_per_batch > 1 else max(least, layout.expert_parallel_size)
    return [
        problem for problem in find_problems(read, layout, facts, ranks, images=found.images) if not problem.is_note
    ]


def _change(problem: Problem, found: Conversion) -> None:
    """Sets what resolves a problem, and says so."""
    keys, file = recipe_keys(), yaml.safe_load(found.accelerate_file or "{}")
    fix = problem.fix or {}
    changed = {
        key: value for key, value in fix.items() if key not in keys or found.recipe.get(key, keys[key].default) != value
    }
    for key, value in changed.items():
        if key not in keys:
            in_file = file if key == "mixed_precision" else file.get("parallelism_config", {})
            in_file[key if in_file is file else f"parallelism_config_{key}"] = value
            found.accelerate_file = yaml.safe_dump(file, sort_keys=False)
        elif value == keys[key].default:
            found.recipe.pop(key, None)
        else:
            found.recipe[key] = value
    made = ", ".join(f"{key}: {json.dumps(value)}" for key, value in changed.items())
    line = f"{made}   ({_say(problem, found).rpartition('; ')[0] or _say(problem, found)})"
    (found.remarks if changed.keys() <= {*SAME_LOSS} else found.differences).append(line)


def _say(problem: Problem, found: Conversion) -> str:
    return problem.sentence.replace("some/name", str(found.recipe.get("model_name_or_path")))


def _rename_targets(found: Conversion, facts: ModelFacts) -> None:
    """Layers that get adapters by the family's names for them. A name that it does not have adapts nothing in the other
    tools."""
    targets = found.recipe.get("lora_target_modules")
    layers = find_linear_layers(facts.model_type).difference(ABSENT.get(facts.model_type, ()))
    if targets == "all-linear" and (left_out := facts.family.unadaptable):
        found.differences.append(
            f"lora_target_modules: {left_out[-1]} of {facts.model_type} gets no adapter here: peft has none for it"
        )
        return
    if targets and not layers and read_family_source(facts.model_type):
        found.add_difference("lora_target_modules", targets, NO_CONV1D, "LoRA on transformers' Conv1D layers")
    if not isinstance(targets, list) or not layers:
        return
    missing = [name for name in targets if name.rpartition(".")[2] not in layers]
    others = [name for name in targets if name not in missing]
    if not missing or (others and found.tool != "torchtune"):  # whose own models have the layers of a Llama
        found.recipe["lora_target_modules"] = others or targets
        found.remarks += [f"lora_target_modules: {', '.join(missing)}: {NO_LAYER}"] if missing else []
        return
    fused = [next((other for other in OTHER_NAMES.get(name, ()) if other in layers), None) for name in missing]
    found.recipe["lora_target_modules"] = list(dict.fromkeys([*others, *filter(None, fused)])) or targets
    if any(fused):
        line = (
            f"adapters of {', '.join(filter(None, dict.fromkeys(fused)))} here, the family's layers for "
            f"{', '.join(missing)}"
        )
        found.differences.append(f"lora_target_modules: {line}")
