"""The sharding, precision and memory that a file asks for, as an Accelerate file of ours."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import yaml

from finetune.config.accelerate_file import ACCELERATE_CONFIGS
from finetune.config.layout import GROUP_KEYS
from finetune.constants import ceil_div
from finetune.convert.counterparts import Tool, ToolFile
from finetune.convert.value_conversion import read_section
from finetune.units import counted

Precision = Literal["no", "bf16", "fp16"]
AskedSharding = Literal["none", "full", "grad_op", "offload", "hybrid"]
LAUNCHED = re.compile(r"--config_file[ =](\S*fsdp\S*)")  # in those of LLaMA-Factory and ms-swift
LAUNCH_FILE = re.compile(r"accelerate launch .*--config_file")
ZERO_STAGE = re.compile(r"'stage': (\d)|^[^{]*(?:z|zero|stage)[-_]?(\d)")  # in lower case
COMMAND = re.compile(r"tune run (?:--\S+[ =]\S+ )*(\w\S*)")  # in the comments of torchtune's files
FILES: Mapping[AskedSharding, str] = {
    "full": "fsdp_full_shard_auto",
    "grad_op": "fsdp_shard_grad_op",
    "offload": "fsdp_cpu_offload",
    "hybrid": "fsdp_hybrid_shard",
}

SHARD_SIZE = "parallelism_config_dp_shard_size"
REPLICATE_SIZE = "parallelism_config_dp_replicate_size"
WRITTEN = "the Accelerate file"
EXAMPLE = "the sizes of the groups in {} are an example; set them to yours"
GROUPS = f"{SHARD_SIZE}: {{}} in the Accelerate file is for {{}} of ranks; set it to their number"


@dataclass(frozen=True, slots=True)
class AskedLayout:
    """The layout that a file asks for. `precision` is Accelerate's mixed_precision."""

    sharding: AskedSharding
    precision: Precision
    checkpointing: bool
    pure_bf16: bool = False  # parameters in bf16 too
    keeps_fp32: bool = False  # in float32, whatever dtype they are loaded in
    tensors: int = 1  # ranks that shard a layer's matrices
    sequences: int = 1  # ranks that shard a row's tokens
    experts: int = 1  # ranks that hold a layer's experts between them
    replicas: int = 1  # groups of hybrid sharding, and the ranks in each; 1: it does not say
    shards: int = 1
    for_groups: bool = False  # sharded here alone, since groups of ranks are FSDP2's
    fp8: str = ""  # torchao's recipe, where linear layers multiply in FP8, the rest in `precision`

    @property
    def file(self) -> str | None:
        """A shipped Accelerate file; None if a run without accelerate_config is the same (fp32, DDP
        or one process).
        """
        if self.sharding != "none":
            return FILES[self.sharding]
        if self.precision == "no":
            return None
        return "ddp_checkpointing" if self.checkpointing else "ddp"

    @property
    def groups(self) -> int:
        """The fewest groups that share a layer's matrices and a row which hold all experts."""
        return ceil_div(self.experts, self.tensors * self.sequences)

    @property
    def changes(self) -> dict[str, Any]:
        """The file's changes to the shipped one, by Accelerate's keys; empty if none."""
        if self.file is None:
            return {}
        changes: dict[str, Any] = {}
        if self.fp8:
            changes = {
                "mixed_precision": "fp8",
                "fp8_config": {"backend": "AO", "recipe_name": self.fp8},
            }
        elif self.precision != "bf16":
            changes = {"mixed_precision": self.precision}
        sizes = zip(GROUP_KEYS, (self.tensors, self.sequences), strict=False)
        mesh = {f"parallelism_config_{key}": size for key, size in sizes if size > 1}
        if self.sharding == "hybrid" and (mesh or self.shards > 1):
            mesh = {REPLICATE_SIZE: self.replicas, SHARD_SIZE: self.shards} | mesh
        elif mesh:
            mesh = {SHARD_SIZE: self.groups} | mesh
        if mesh:
            changes["parallelism_config"] = mesh
        return changes

    def remarks(self) -> Iterator[str]:
        """Yields what the user must still set in the Accelerate file for their machine, one
        sentence each.
        """
        if self.sharding == "hybrid" and self.shards == 1:
            yield EXAMPLE.format(WRITTEN if self.changes else f"{self.file}.yaml")
        elif self.sharding != "hybrid" and "parallelism_config" in self.changes:
            yield GROUPS.format(self.groups, counted(self.groups, "group"))


def write_accelerate(layout: AskedLayout) -> str | None:
    """Returns the text of the Accelerate file that `layout` needs; None where the shipped file is
    that.

    >>> print(write_accelerate(AskedLayout("none", "fp16", checkpointing=False)), end="")
    compute_environment: LOCAL_MACHINE
    distributed_type: MULTI_GPU
    mixed_precision: fp16
    """
    if not layout.changes:
        return None
    return yaml.safe_dump(read_shipped(str(layout.file)) | layout.changes, sort_keys=False)


def read_shipped(name: str) -> dict[str, Any]:
    """Reads an Accelerate file that this toolkit ships."""
    shipped: dict[str, Any] = yaml.safe_load(
        (ACCELERATE_CONFIGS / f"{name}.yaml").read_text(encoding="utf-8")
    )
    return shipped


def read_layout(tool: Tool, settings: ToolFile, text: str) -> AskedLayout:
    """Reads the layout of a file; `text` is the file with its comments, in which torchtune names
    the recipe.
    """
    if tool == "torchtune":
        layout = _read_torchtune(settings, text)
    elif tool == "Automodel":
        layout = _read_automodel(settings)
    else:
        layout = _read_trainer(tool, settings, text)
    layout = replace(layout, fp8=_find_fp8(settings) if layout.precision == "bf16" else "")
    if layout.tensors * layout.sequences * layout.experts > 1 and layout.sharding == "none":
        layout = replace(layout, sharding="full", for_groups=True)
    return layout


def _find_fp8(settings: ToolFile) -> str:
    """Returns torchao's FP8 recipe, by default one scale for each tensor; empty where the file asks
    for none.
    """
    section = read_section(settings, "fp8")
    if section:
        asks = section.get("enabled", True)
    else:
        asks = settings.get("fp8") or settings.get("enable_fp8_training")
    if not asks:
        return ""
    return str(section.get("recipe_name") or settings.get("fp8_recipe_name") or "tensorwise")


def _read_trainer(tool: Tool, settings: ToolFile, text: str) -> AskedLayout:
    """Reads files of Trainer's vocabulary: Axolotl's, LLaMA-Factory's, TRL's."""
    sharding = _find_sharding(tool, settings)
    launched = LAUNCHED.search(text)
    if tool in ("LLaMA-Factory", "ms-swift") and launched and sharding == "none":
        sharding = "offload" if "offload" in launched[1] else "full"
    precision = _find_precision(tool, settings)
    inner = _drop_prefix(read_section(settings, "fsdp_config"))
    checkpoints = settings.get("gradient_checkpointing", tool != "Axolotl") or inner.get(
        "activation_checkpointing"
    )
    is_full_bf16 = (
        tool == "Axolotl"
        and precision == "bf16"
        and (sharding == "none" or settings.get("bf16") == "full" or _keeps_loaded_dtype(settings))
    )
    is_loaded_bf16 = tool == "ms-swift" and precision == "bf16" and sharding == "none"
    pure_bf16 = settings.get("pure_bf16") is True or is_full_bf16 or is_loaded_bf16
    tensors = (settings.get("tensor_parallel_size"), settings.get("tensor_model_parallel_size"))
    experts = (settings.get("expert_parallel_size"), settings.get("expert_model_parallel_size"))
    return AskedLayout(
        sharding,
        precision,
        checkpointing=bool(checkpoints) and not settings.get("disable_gradient_checkpointing"),
        pure_bf16=pure_bf16,
        keeps_fp32=sharding != "none" and precision != "no" and not pure_bf16,
        tensors=max(map(_read_size, tensors)),
        sequences=count_sharing_ranks(settings),
        experts=max(map(_read_size, experts)),
        replicas=_read_size(settings.get("dp_replicate_size")),
        shards=_read_size(settings.get("dp_shard_size")),
    )


def count_sharing_ranks(settings: ToolFile) -> int:
    """Returns how many ranks share a row, in files of Trainer's vocabulary."""
    sizes = (
        settings.get("context_parallel_size"),
        settings.get("sequence_parallel_degree"),  # the older name
        read_section(settings, "context_parallel").get("size"),
        settings.get("sequence_parallel_size"),
    )
    return max(map(_read_size, sizes))


def is_first_fsdp(settings: ToolFile) -> bool:
    """Whether a file of Axolotl's asks for the first version of FSDP, by its number or by the list
    of options, which 0.21 refuses.
    """
    inner = _drop_prefix(read_section(settings, "fsdp_config"))
    asked = settings.get("fsdp_version") or inner.get("version")
    return str(asked) == "1" or (asked is None and bool(settings.get("fsdp")))


def _keeps_loaded_dtype(settings: ToolFile) -> bool:
    """Whether Axolotl's own fsdp2_prepare_model, which casts nothing to float32, takes the place of
    Accelerate's. Version 0.21 has no other FSDP.
    """
    is_sharded = bool(read_section(settings, "fsdp_config")) and not settings.get("deepspeed")
    return is_sharded and not is_first_fsdp(settings)


def _find_precision(tool: Tool, settings: ToolFile) -> Precision:
    asks_fp16 = settings.get("fp16") is True or settings.get("float16") is True
    asks_bf16 = any(settings.get(key) for key in ("bf16", "bfloat16", "pure_bf16"))
    if tool == "ms-swift":
        # the model's own, which is bfloat16 as a rule
        dtype = str(settings.get("torch_dtype") or "bfloat16")
        # _init_mixed_precision of its arguments/base_args/model_args.py
        is_half = dtype in ("float16", "float32") and not asks_bf16
        asks_fp16 = asks_fp16 or (is_half and settings.get("fp16") is not False)
        asks_bf16 = asks_bf16 or dtype == "bfloat16"
    # TRL's true, and Axolotl's auto
    is_default = tool in ("TRL", "Axolotl") and "bf16" not in settings and not asks_fp16
    if asks_bf16 or is_default:
        return "bf16"
    return "fp16" if asks_fp16 else "no"


def _find_sharding(tool: Tool, settings: ToolFile) -> AskedSharding:
    deepspeed = str(settings.get("deepspeed") or "").lower()
    if deepspeed:
        sharding = _read_deepspeed(deepspeed)
    else:
        sharding = _read_fsdp(settings)
    asks_fsdp2 = "fsdp_version" in settings or _read_size(settings.get("dp_shard_size")) > 1
    # TRL's is in the Accelerate file of the launch
    if sharding == "none" and (asks_fsdp2 or tool == "TRL"):
        sharding = "full"
    if _read_size(settings.get("dp_replicate_size")) > 1 and sharding != "none":
        sharding = "hybrid"
    return sharding


def find_zero_stage(file: Any) -> int | None:
    """Reads the stage of ZeRO off the name or the text of DeepSpeed's file; None where it says
    none.

    >>> find_zero_stage("ds_z2_offload_config.json"), find_zero_stage("ds_config.json")
    (2, None)
    >>> find_zero_stage({"zero_optimization": {"stage": 3}})
    3
    """
    named = ZERO_STAGE.search(str(file).lower())
    return int(named[1] or named[2]) if named else None


def _read_deepspeed(file: str) -> AskedSharding:
    stage = find_zero_stage(file)
    if stage == 0:
        return "none"
    if "offload" in file:
        return "offload"
    return "full" if stage == 3 else "grad_op"


def _read_fsdp(settings: ToolFile) -> AskedSharding:
    fsdp = settings.get("fsdp")
    if isinstance(fsdp, list):
        options = " ".join(map(str, fsdp))
    else:
        options = str(fsdp or "").rpartition("/")[2]  # ms-swift's is the path of a file
    inner = _drop_prefix(read_section(settings, "fsdp_config"))
    strategy = str(inner.get("sharding_strategy", "")).upper()
    if not options and not inner:
        return "none"
    if "offload" in options or inner.get("offload_params") is True:
        return "offload"
    if "HYBRID" in strategy or "hybrid" in options:
        return "hybrid"
    if strategy == "NO_SHARD":
        return "none"
    keeps = (
        inner.get("reshard_after_forward") is False
        or strategy == "SHARD_GRAD_OP"
        or "shard_grad_op" in options
    )
    return "grad_op" if keeps else "full"


def _read_torchtune(settings: ToolFile, text: str) -> AskedLayout:
    dtype = str(settings.get("dtype", "bf16"))
    precision: Precision = "no"
    if dtype == "bf16":
        precision = "bf16"
    elif dtype == "fp16":
        precision = "fp16"
    return AskedLayout(
        _find_torchtune_sharding(settings, text),
        precision,
        checkpointing=bool(settings.get("enable_activation_checkpointing")),
        pure_bf16=precision == "bf16",
        tensors=_read_size(settings.get("tensor_parallel_dim")),
        sequences=_read_size(settings.get("context_parallel_dim")),
        replicas=_read_size(settings.get("data_parallel_replicate_dim")),
        shards=_read_size(settings.get("data_parallel_shard_dim")),
    )


def _find_torchtune_sharding(settings: ToolFile, text: str) -> AskedSharding:
    command = COMMAND.search(text)
    if command is not None and command[1].endswith("single_device"):
        return "none"
    if settings.get("fsdp_cpu_offload") or read_section(settings, "fsdp").get("cpu_offload"):
        return "offload"
    if settings.get("fsdp_reshard_after_forward") is False:
        return "grad_op"
    if _read_size(settings.get("data_parallel_replicate_dim")) > 1:
        return "hybrid"
    return "full"


def _read_automodel(settings: ToolFile) -> AskedLayout:
    distributed = read_section(settings, "distributed")
    dtype = str(read_section(settings, "model").get("torch_dtype", "auto"))
    is_pure = "32" not in dtype and not trains_copy(settings)
    return AskedLayout(
        _find_automodel_sharding(distributed),
        "bf16",
        checkpointing=bool(distributed.get("activation_checkpointing")),
        pure_bf16=is_pure,
        keeps_fp32=not is_pure,
        tensors=_read_size(distributed.get("tp_size")),
        sequences=_read_size(distributed.get("cp_size")),
        experts=_read_size(distributed.get("ep_size")),
        replicas=_read_size(distributed.get("dp_replicate_size")),
    )


def trains_copy(settings: ToolFile) -> bool:
    """Whether an optimizer of Automodel's trains a copy of weights in 16 bits, in more."""
    if "32" in str(read_section(settings, "model").get("torch_dtype")):
        return False
    optimizer = read_section(settings, "optimizer")
    name = str(optimizer.get("_target_"))
    if "FlashAdamW" in name:
        return bool(optimizer.get("master_weight_bits", 24))
    return bool(optimizer.get("master_weights", name.endswith("FusedAdamConfig")))


def _find_automodel_sharding(distributed: Mapping[str, Any]) -> AskedSharding:
    if distributed.get("strategy") == "ddp":
        return "none"
    if "CPUOffload" in str(distributed.get("offload_policy")):
        return "offload"
    if _read_size(distributed.get("dp_replicate_size")) > 1:
        return "hybrid"
    if distributed.get("reshard_after_forward") is False:
        return "grad_op"
    return "full"


def _drop_prefix(config: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(key).removeprefix("fsdp_"): value for key, value in config.items()}


def _read_size(value: Any) -> int:
    """Returns the ranks in a dimension; 1 where the file does not say."""
    return value if isinstance(value, int) and value > 1 else 1
