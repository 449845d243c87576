"""What converts must run: the recipe is judged by the rules of a run, and changed to what would run."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from finetune.config.accelerate_file import ACCELERATE_CONFIGS, read_sharding
from finetune.config.compatibility import find_problems
from finetune.config.facts import ModelFacts, find_linear_layers, read_family_source, read_model_facts, with_recipe_keys
from finetune.config.families import find_family
from finetune.config.layout import DIVISIONS, GROUP_KEYS, Fp8
from finetune.config.module_names import find_expert_layers
from finetune.config.reader import read_recipe
from finetune.config.rule import Problem
from finetune.config.schema import recipe_keys
from finetune.convert.counterparts import Tool
from finetune.convert.model_names import guess_family
from finetune.convert.rules import Conversion, read_section
from finetune.errors import UserError
from finetune.files.json_files import read_json_object

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
ABSENT: Mapping[str, tuple[str, ...]] = {"glm4_moe_lite": ("q_proj",)}
MOST_CHANGES = 12
SAME_LOSS = ("attn_implementation", "torch_compile", "use_liger_kernel", "expert_parallel_size", "activation_offload",
             "pipeline_parallel_size",
             "activation_checkpointing_keeps", "async_save", "optim_in_backward")  # fmt: skip
NO_CONV1D = "the family's layers are transformers' Conv1D, which get no adapters here"
NO_LAYER = "no such layer in this family: nothing is adapted by that name there either"


def make_runnable(conversion: Conversion) -> None:
    """Changes what no run of the recipe would take, a line for each; what nothing resolves is left to do."""
    facts = find_facts(conversion.recipe)
    if facts is not None and conversion.images:
        facts = replace(facts, vision=True)
    if facts is not None and read_family_source(facts.model_type):
        if conversion.recipe.pop("trust_remote_code", None):
            conversion.remarks.append(
                f"trust_remote_code is dropped: transformers has the code of {facts.model_type} itself"
            )
        if facts.family.sinks and conversion.recipe.get("attn_implementation") == "sdpa":
            del conversion.recipe["attn_implementation"]
            conversion.remarks.append(
                f"attn_implementation: sdpa is dropped: transformers' {facts.model_type} has sinks, which it does not "
                "compute"
            )
        _rename_targets(conversion, facts)
    for _ in range(MOST_CHANGES):
        problems = judge(conversion, facts)
        known = recipe_keys().keys() | {"mixed_precision", *DIVISIONS}
        change = next((problem for problem in problems if problem.fix and problem.fix.keys() <= known), None)
        if change is None:
            conversion.to_do += [_say(problem, conversion) for problem in problems]
            return
        _change(change, conversion)


def find_facts(recipe: Mapping[str, Any]) -> ModelFacts | None:
    """The facts of a recipe's model, from its config.json if at hand, else from what its name says."""
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


def judge(conversion: Conversion, facts: ModelFacts | None) -> list[Problem]:
    """What a run would refuse, by its rules. A file that is missing here may be there where it is trained."""
    known, recipe = recipe_keys(), conversion.recipe
    values: dict[str, Any] = {
        key: "some/name" if known[key].is_file_or_name and key != "accelerate_config" and value else value
        for key, value in recipe.items()
    }
    for key in values.keys() & {"datasets", "eval_datasets"}:
        values[key] = [entry | {"path": "some/name"} for entry in recipe[key]]
    try:
        read = read_recipe(None, [f"{key}={json.dumps(value)}" for key, value in values.items()])
        layout = with_recipe_keys(read_sharding(None, read.run.accelerate_config, {}), read)
    except UserError:
        return []  # the reader says what is wrong
    file = yaml.safe_load(conversion.accelerate_file or "{}")
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
        problem
        for problem in find_problems(read, layout, facts, ranks, images=conversion.images)
        if not problem.is_note
    ]


def _change(problem: Problem, conversion: Conversion) -> None:
    """Sets what resolves a problem, and says so."""
    keys, file = recipe_keys(), yaml.safe_load(conversion.accelerate_file or "{}")
    fix = problem.fix or {}
    changed = {
        key: value
        for key, value in fix.items()
        if key not in keys or conversion.recipe.get(key, keys[key].default) != value
    }
    for key, value in changed.items():
        if key not in keys:
            in_file = file if key == "mixed_precision" else file.get("parallelism_config", {})
            in_file[key if in_file is file else f"parallelism_config_{key}"] = value
            conversion.accelerate_file = yaml.safe_dump(file, sort_keys=False)
        elif value == keys[key].default:
            conversion.recipe.pop(key, None)
        else:
            conversion.recipe[key] = value
    made = ", ".join(f"{key}: {json.dumps(value)}" for key, value in changed.items())
    line = f"{made}   ({_say(problem, conversion).rpartition('; ')[0] or _say(problem, conversion)})"
    (conversion.remarks if changed.keys() <= {*SAME_LOSS} else conversion.differences).append(line)


def _say(problem: Problem, conversion: Conversion) -> str:
    return problem.sentence.replace("some/name", str(conversion.recipe.get("model_name_or_path")))


def _rename_targets(conversion: Conversion, facts: ModelFacts) -> None:
    """The family's names for the adapted layers. A name that it does not have adapts nothing in the other tools."""
    targets = conversion.recipe.get("lora_target_modules")
    layers = find_linear_layers(facts.model_type).difference(ABSENT.get(facts.model_type, ()))
    if targets == "all-linear" and (left_out := facts.family.unadaptable):
        conversion.differences.append(
            f"lora_target_modules: {left_out[-1]} of {facts.model_type} gets no adapter here: peft has none for it"
        )
        return
    if targets and not layers and read_family_source(facts.model_type):
        conversion.add_difference("lora_target_modules", targets, NO_CONV1D, "LoRA on transformers' Conv1D layers")
    if not isinstance(targets, list) or not layers:
        return
    known = layers | find_expert_layers(facts.model_type).keys()  # which a run renames
    missing = [name for name in targets if name.rpartition(".")[2] not in known]
    others = [name for name in targets if name not in missing]
    if not missing or (others and conversion.tool != "torchtune"):  # whose own models have the layers of a Llama
        conversion.recipe["lora_target_modules"] = others or targets
        conversion.remarks += [f"lora_target_modules: {', '.join(missing)}: {NO_LAYER}"] if missing else []
        return
    fused = [next((other for other in OTHER_NAMES.get(name, ()) if other in layers), None) for name in missing]
    conversion.recipe["lora_target_modules"] = list(dict.fromkeys([*others, *filter(None, fused)])) or targets
    if any(fused):
        line = (
            f"adapters of {', '.join(filter(None, dict.fromkeys(fused)))} here, the family's layers for "
            f"{', '.join(missing)}"
        )
        conversion.differences.append(f"lora_target_modules: {line}")


Precision = Literal["no", "bf16", "fp16"]
Sharding = Literal["none", "full", "grad_op", "offload", "hybrid"]
COMMAND = re.compile(r"tune run (?:--\S+[ =]\S+ )*(\w\S*)")  # in the comments of torchtune's files
FILES: Mapping[Sharding, str] = {
    "full": "fsdp_full_shard_auto",
    "grad_op": "fsdp_shard_grad_op",
    "offload": "fsdp_cpu_offload",
    "hybrid": "fsdp_hybrid_shard",
}


@dataclass(frozen=True, slots=True)
class Layout:
    """What a file says of sharding, precision and memory; `precision` as Accelerate's mixed_precision."""

    sharding: Sharding
    precision: Precision
    checkpointing: bool
    pure_bf16: bool = False  # parameters in bf16 too
    keeps_fp32: bool = False  # in float32, whatever dtype they are loaded in
    tensors: int = 1  # ranks that divide a layer's matrices
    sequences: int = 1  # ranks that divide a row's tokens
    fp8: str = ""  # torchao's recipe, where linear layers multiply in FP8, the rest in `precision`

    @property
    def file(self) -> str | None:
        """A shipped Accelerate file; None if a run without accelerate_config is the same (fp32, DDP or one process)."""
        if self.sharding == "none":
            return None if self.precision == "no" else "ddp_checkpointing" if self.checkpointing else "ddp"
        return FILES[self.sharding]

    @property
    def changes(self) -> dict[str, Any]:
        """What their file asks for beside the shipped file, by Accelerate's keys; empty if nothing."""
        if self.file is None:
            return {}
        precision: dict[str, Any] = {} if self.precision == "bf16" else {"mixed_precision": self.precision}
        if self.fp8:
            precision = {"mixed_precision": "fp8", "fp8_config": {"backend": "AO", "recipe_name": self.fp8}}
        sizes = zip(GROUP_KEYS, (self.tensors, self.sequences), strict=False)
        mesh = {f"parallelism_config_{key}": size for key, size in sizes if size > 1}
        return precision | ({"parallelism_config": {"parallelism_config_dp_shard_size": 1} | mesh} if mesh else {})

    def remarks(self) -> Iterator[str]:
        """What the user must still set in the Accelerate file for their machine, one sentence each."""
        if self.sharding == "hybrid":
            yield "the sizes of the groups in fsdp_hybrid_shard.yaml are an example; set them to yours"
        elif "parallelism_config" in self.changes:
            yield (
                "parallelism_config_dp_shard_size: 1 in the Accelerate file is for one group of ranks; set it to "
                "the number of groups"
            )


def write_accelerate(layout: Layout) -> str | None:
    """The text of the Accelerate file that `layout` needs; None where the shipped file is that.

    >>> print(write_accelerate(Layout("none", "fp16", checkpointing=False)), end="")
    compute_environment: LOCAL_MACHINE
    distributed_type: MULTI_GPU
    mixed_precision: fp16
    """
    if not layout.changes:
        return None
    shipped = yaml.safe_load((ACCELERATE_CONFIGS / f"{layout.file}.yaml").read_text(encoding="utf-8"))
    return yaml.safe_dump(shipped | layout.changes, sort_keys=False)


def read_layout(tool: Tool, settings: Mapping[str, Any], text: str) -> Layout:
    """The layout of their file; `text` is the file with its comments, in which torchtune names the recipe."""
    if tool == "torchtune":
        layout = _torchtune(settings, text)
    else:
        layout = _automodel(settings) if tool == "Automodel" else _trainer(tool, settings)
    layout = replace(layout, fp8=_fp8(settings) if layout.precision == "bf16" else "")
    if layout.tensors * layout.sequences > 1 and layout.sharding == "none":
        layout = replace(layout, sharding="full")  # groups of ranks are FSDP2's
    return layout


def _fp8(settings: Mapping[str, Any]) -> str:
    """torchao's FP8 recipe, by default one scale for each tensor; empty if they multiply in their compute dtype."""
    section = read_section(settings, "fp8")
    asks = (
        section.get("enabled", bool(section)) if section else settings.get("fp8") or settings.get("enable_fp8_training")
    )
    return str(section.get("recipe_name") or settings.get("fp8_recipe_name") or "tensorwise") if asks else ""


def _trainer(tool: Tool, settings: Mapping[str, Any]) -> Layout:
    """Files of Trainer's vocabulary: Axolotl's, LLaMA-Factory's, TRL's."""
    asks_fp16 = settings.get("fp16") is True or settings.get("float16") is True
    half = settings.get("bf16") or settings.get("bfloat16") or settings.get("pure_bf16")
    half = half or (tool == "TRL" and "bf16" not in settings and not asks_fp16)  # SFTConfig's default
    sharding = _sharding(settings.get("fsdp"), settings.get("fsdp_config"), settings.get("deepspeed"))
    if sharding == "none" and ("fsdp_version" in settings or _size(settings.get("dp_shard_size")) > 1):
        sharding = "full"
    if tool == "TRL" and sharding == "none":
        sharding = "full"  # set in the Accelerate file of the launch, as here
    if _size(settings.get("dp_replicate_size")) > 1 and sharding != "none":
        sharding = "hybrid"
    inner = _plain(read_section(settings, "fsdp_config"))
    checkpointing = bool(settings.get("gradient_checkpointing", tool != "Axolotl")) or bool(
        inner.get("activation_checkpointing")
    )
    if settings.get("disable_gradient_checkpointing"):
        checkpointing = False
    pure = settings.get("pure_bf16") is True or (
        tool == "Axolotl" and bool(half) and (sharding == "none" or settings.get("bf16") == "full")
    )
    tensors, sequences = (_size(settings.get(f"{kind}_parallel_size")) for kind in ("tensor", "context"))
    sequences = max(sequences, _size(settings.get("sequence_parallel_degree")))  # Axolotl's older name
    precision: Precision = "bf16" if half else "fp16" if asks_fp16 else "no"
    keeps_fp32 = sharding != "none" and precision != "no" and not pure
    return Layout(sharding, precision, checkpointing, pure, keeps_fp32, tensors, sequences)


def _sharding(fsdp: Any, config: Any, deepspeed: Any) -> Sharding:
    stage = str(deepspeed or "").lower()
    if "z0" in stage or "zero0" in stage:
        return "none"
    if stage:
        if "offload" in stage:
            return "offload"
        return "full" if any(mark in stage for mark in ("z3", "zero3", "zero_3", "'stage': 3")) else "grad_op"
    options = " ".join(map(str, fsdp)) if isinstance(fsdp, list) else str(fsdp or "")
    inner = _plain(config) if isinstance(config, dict) else {}
    if not options and not inner:
        return "none"
    strategy = str(inner.get("sharding_strategy", "")).upper()
    if "offload" in options or inner.get("offload_params") is True:
        return "offload"
    if "HYBRID" in strategy or "hybrid" in options:
        return "hybrid"
    keeps = inner.get("reshard_after_forward") is False or strategy == "SHARD_GRAD_OP" or "shard_grad_op" in options
    return "none" if strategy == "NO_SHARD" else "grad_op" if keeps else "full"


def _torchtune(settings: Mapping[str, Any], text: str) -> Layout:
    command = COMMAND.search(text)
    offloads = settings.get("fsdp_cpu_offload") or read_section(settings, "fsdp").get("cpu_offload")
    is_single = command is not None and command[1].endswith("single_device")
    sharding: Sharding = "none" if is_single else "offload" if offloads else "full"
    if sharding == "full" and settings.get("fsdp_reshard_after_forward") is False:
        sharding = "grad_op"
    if sharding == "full" and _size(settings.get("data_parallel_replicate_dim")) > 1:
        sharding = "hybrid"
    dtype = str(settings.get("dtype", "bf16"))
    precision: Precision = "bf16" if dtype == "bf16" else "fp16" if dtype == "fp16" else "no"
    tensors, sequences = (_size(settings.get(f"{kind}_parallel_dim")) for kind in ("tensor", "context"))
    checkpointing = bool(settings.get("enable_activation_checkpointing"))
    return Layout(sharding, precision, checkpointing, precision == "bf16", tensors=tensors, sequences=sequences)


def _automodel(settings: Mapping[str, Any]) -> Layout:
    distributed = read_section(settings, "distributed")
    dtype = str(read_section(settings, "model").get("torch_dtype", "auto"))
    sharding: Sharding = "full"
    if distributed.get("strategy") == "ddp":
        sharding = "none"
    elif "CPUOffload" in str(distributed.get("offload_policy")):
        sharding = "offload"
    elif _size(distributed.get("dp_replicate_size")) > 1:
        sharding = "hybrid"
    elif distributed.get("reshard_after_forward") is False:
        sharding = "grad_op"
    tensors, sequences = (_size(distributed.get(f"{kind}_size")) for kind in ("tp", "cp"))
    checkpointing = bool(distributed.get("activation_checkpointing"))
    pure = "32" not in dtype and not read_section(settings, "optimizer").get("master_weights")
    return Layout(sharding, "bf16", checkpointing, pure, keeps_fp32=not pure, tensors=tensors, sequences=sequences)


def _plain(config: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(key).removeprefix("fsdp_"): value for key, value in config.items()}


def _size(value: Any) -> int:
    """The ranks in a dimension; 1 where the file does not say."""
    return value if isinstance(value, int) and value > 1 else 1
