"""The Accelerate file that a recipe of another tool asks for: how it is spread, in which precision it computes."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import yaml

from finetune.config.accelerate_file import ACCELERATE_CONFIGS
from finetune.config.layout import GROUP_KEYS
from finetune.convert.rules import read_section
from finetune.convert.tool_keys import Tool

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
        """A shipped Accelerate file; None where leaving accelerate_config out is the same (one process or DDP in
        fp32)."""
        if self.sharding == "none":
            return None if self.precision == "no" else "ddp_checkpointing" if self.checkpointing else "ddp"
        return FILES[self.sharding]

    @property
    def changes(self) -> dict[str, Any]:
        """What their file asks for beside the shipped file, by Accelerate's keys; empty where the shipped one does
        it."""
        if self.file is None:
            return {}
        precision: dict[str, Any] = {} if self.precision == "bf16" else {"mixed_precision": self.precision}
        if self.fp8:
            precision = {"mixed_precision": "fp8", "fp8_config": {"backend": "AO", "recipe_name": self.fp8}}
        sizes = zip(GROUP_KEYS, (self.tensors, self.sequences), strict=False)
        mesh = {f"parallelism_config_{key}": size for key, size in sizes if size > 1}
        return precision | ({"parallelism_config": {"parallelism_config_dp_shard_size": 1} | mesh} if mesh else {})

    def remarks(self) -> Iterator[str]:
        """What is to be set in the Accelerate file for the machine that trains, one sentence each."""
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


def read_layout(tool: Tool, theirs: Mapping[str, Any], text: str) -> Layout:
    """The layout of their file; `text` is the file with its comments, where torchtune names the recipe that it is
    for."""
    if tool == "torchtune":
        layout = _torchtune(theirs, text)
    else:
        layout = _automodel(theirs) if tool == "Automodel" else _trainer(tool, theirs)
    layout = replace(layout, fp8=_fp8(theirs) if layout.precision == "bf16" else "")
    if layout.tensors * layout.sequences > 1 and layout.sharding == "none":
        layout = replace(layout, sharding="full")  # groups of ranks are FSDP2's
    return layout


def _fp8(theirs: Mapping[str, Any]) -> str:
    """torchao's recipe, one scale for each tensor where they do not name another; empty where they multiply in their
    compute dtype."""
    section = read_section(theirs, "fp8")
    asks = section.get("enabled", bool(section)) if section else theirs.get("fp8") or theirs.get("enable_fp8_training")
    return str(section.get("recipe_name") or theirs.get("fp8_recipe_name") or "tensorwise") if asks else ""


def _trainer(tool: Tool, theirs: Mapping[str, Any]) -> Layout:
    """Files of Trainer's vocabulary: Axolotl's, LLaMA-Factory's, TRL's."""
    asks_fp16 = theirs.get("fp16") is True or theirs.get("float16") is True
    half = theirs.get("bf16") or theirs.get("bfloat16") or theirs.get("pure_bf16")
    half = half or (tool == "TRL" and "bf16" not in theirs and not asks_fp16)  # SFTConfig's default
    sharding = _sharding(theirs.get("fsdp"), theirs.get("fsdp_config"), theirs.get("deepspeed"))
    if sharding == "none" and ("fsdp_version" in theirs or _size(theirs.get("dp_shard_size")) > 1):
        sharding = "full"
    if tool == "TRL" and sharding == "none":
        sharding = "full"  # set in the Accelerate file of the launch, as here
    if _size(theirs.get("dp_replicate_size")) > 1 and sharding != "none":
        sharding = "hybrid"
    inner = _plain(read_section(theirs, "fsdp_config"))
    checkpointing = bool(theirs.get("gradient_checkpointing", tool != "Axolotl")) or bool(
        inner.get("activation_checkpointing")
    )
    if theirs.get("disable_gradient_checkpointing"):
        checkpointing = False
    pure = theirs.get("pure_bf16") is True or (
        tool == "Axolotl" and bool(half) and (sharding == "none" or theirs.get("bf16") == "full")
    )
    tensors, sequences = (_size(theirs.get(f"{kind}_parallel_size")) for kind in ("tensor", "context"))
    sequences = max(sequences, _size(theirs.get("sequence_parallel_degree")))  # Axolotl's older name
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


def _torchtune(theirs: Mapping[str, Any], text: str) -> Layout:
    command = COMMAND.search(text)
    offloads = theirs.get("fsdp_cpu_offload") or read_section(theirs, "fsdp").get("cpu_offload")
    is_single = command is not None and command[1].endswith("single_device")
    sharding: Sharding = "none" if is_single else "offload" if offloads else "full"
    if sharding == "full" and theirs.get("fsdp_reshard_after_forward") is False:
        sharding = "grad_op"
    if sharding == "full" and _size(theirs.get("data_parallel_replicate_dim")) > 1:
        sharding = "hybrid"
    dtype = str(theirs.get("dtype", "bf16"))
    precision: Precision = "bf16" if dtype == "bf16" else "fp16" if dtype == "fp16" else "no"
    tensors, sequences = (_size(theirs.get(f"{kind}_parallel_dim")) for kind in ("tensor", "context"))
    checkpointing = bool(theirs.get("enable_activation_checkpointing"))
    return Layout(sharding, precision, checkpointing, precision == "bf16", tensors=tensors, sequences=sequences)


def _automodel(theirs: Mapping[str, Any]) -> Layout:
    distributed = read_section(theirs, "distributed")
    dtype = str(read_section(theirs, "model").get("torch_dtype", "auto"))
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
    pure = "32" not in dtype and not read_section(theirs, "optimizer").get("master_weights")
    return Layout(sharding, "bf16", checkpointing, pure, keeps_fp32=not pure, tensors=tensors, sequences=sequences)


def _plain(config: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(key).removeprefix("fsdp_"): value for key, value in config.items()}


def _size(value: Any) -> int:
    """The ranks in a dimension; 1 where the file does not say."""
    return value if isinstance(value, int) and value > 1 else 1
