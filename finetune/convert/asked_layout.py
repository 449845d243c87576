"""Finds the sharding, the precision and the checkpointing that a file asks for, and names or writes
the Accelerate file for them.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import yaml

from finetune.config.accelerate_file import ACCELERATE_CONFIGS
from finetune.constants import ceil_div
from finetune.convert.counterparts import Tool, ToolFile
from finetune.convert.value_conversion import read_section, read_value
from finetune.units import counted

Precision = Literal["no", "bf16", "fp16"]
# mixed_precision -> the dtype in which matrices are multiplied
COMPUTE_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "no": "float32"}
AskedSharding = Literal["none", "full", "grad_op", "offload", "hybrid"]
# an FSDP file of Accelerate in the launch command of a LLaMA-Factory or ms-swift file
LAUNCHED_FSDP = re.compile(r"--config_file[ =](\S*fsdp\S*)")
LAUNCH_FILE = re.compile(r"accelerate launch .*--config_file")
UNSHARDED = re.compile("(multi|single)_gpu|ddp")  # Accelerate files that shard nothing, by name
# in lower case: the key in the text of DeepSpeed's settings, or the file's name, as in ds_z3.json
ZERO_STAGE = re.compile(r"'stage': (\d)|^[^{]*(?:z|zero|stage)[-_]?(\d)")
# the name of the recipe, in the comments of a torchtune file
COMMAND = re.compile(r"tune run (?:--\S+[ =]\S+ )*(\w\S*)")
SHIPPED_FILES: Mapping[AskedSharding, str] = {
    "full": "fsdp_full_shard_auto",
    "grad_op": "fsdp_shard_grad_op",
    "offload": "fsdp_cpu_offload",
    "hybrid": "fsdp_hybrid_shard",
}

# keys of Accelerate's parallelism_config
SHARD_SIZE = "parallelism_config_dp_shard_size"
REPLICATE_SIZE = "parallelism_config_dp_replicate_size"
TENSOR_SIZE = "parallelism_config_tp_size"
CONTEXT_SIZE = "parallelism_config_cp_size"
WRITTEN_FILE = "the Accelerate file"
EXAMPLE_SIZES = "the sizes of the groups in {} are an example; set them to yours"
NUMBER_OF_GROUPS = (
    f"{SHARD_SIZE}: {{}} in the Accelerate file is for {{}} of ranks; set it to their number"
)


@dataclass(frozen=True, slots=True)
class AskedLayout:
    """The layout that another tool's file asks for."""

    sharding: AskedSharding
    precision: Precision  # Accelerate's mixed_precision
    checkpointing: bool  # of activations
    pure_bf16: bool = False  # the base's parameters, if they are trained, are trained in bf16 too
    keeps_fp32: bool = False  # the parameters are trained in float32, whatever dtype is loaded
    by_deepspeed: bool = False  # DeepSpeed trains, maybe at ZeRO's stage 0, which shards nothing
    tensors: int = 1  # tensor parallel size: ranks that shard a layer's matrices
    sequences: int = 1  # context parallel size: ranks that shard a row's tokens
    experts: int = 1  # expert parallel size: ranks that share a layer's experts
    replicas: int = 1  # number of groups in hybrid sharding; 1 where the file does not say
    shards: int = 1  # ranks in each of these groups; 1 where the file does not say
    # the file asks for no sharding, but groups of ranks need FSDP2 here
    for_groups: bool = False
    fp8: str = ""  # torchao's recipe for linear layers in FP8; empty without FP8

    @property
    def file(self) -> str | None:
        """The name of the shipped Accelerate file that is nearest to the layout.

        None for fp32 without sharding (DDP or one process), which needs no accelerate_config.
        """
        if self.sharding != "none":
            return SHIPPED_FILES[self.sharding]
        if self.precision == "no":
            return None
        return "ddp_checkpointing" if self.checkpointing else "ddp"

    @property
    def groups(self) -> int:
        """The smallest dp_shard_size with which a run has at least `experts` ranks.

        A run has dp_shard_size groups of `tensors` * `sequences` ranks.
        """
        return ceil_div(self.experts, self.tensors * self.sequences)

    @property
    def changes(self) -> dict[str, Any]:
        """What the Accelerate file must change in the shipped one, by key; empty if nothing."""
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
        sizes = {TENSOR_SIZE: self.tensors, CONTEXT_SIZE: self.sequences}
        mesh = {key: size for key, size in sizes.items() if size > 1}
        # the order of the keys is that in the file: replicas and shards come first
        if self.sharding == "hybrid" and (mesh or self.shards > 1):
            mesh = {REPLICATE_SIZE: self.replicas, SHARD_SIZE: self.shards} | mesh
        elif mesh:
            mesh = {SHARD_SIZE: self.groups} | mesh
        if mesh:
            changes["parallelism_config"] = mesh
        return changes

    def remarks(self) -> Iterator[str]:
        """Yields a sentence for each size in the Accelerate file that depends on the machine."""
        if self.sharding == "hybrid" and self.shards == 1:
            yield EXAMPLE_SIZES.format(WRITTEN_FILE if self.changes else f"{self.file}.yaml")
        elif self.sharding != "hybrid" and "parallelism_config" in self.changes:
            yield NUMBER_OF_GROUPS.format(self.groups, counted(self.groups, "group"))


def write_accelerate(layout: AskedLayout) -> str | None:
    """Returns the text of the Accelerate file for `layout`; None if it needs no changed one.

    >>> print(write_accelerate(AskedLayout("none", "fp16", checkpointing=False)), end="")
    compute_environment: LOCAL_MACHINE
    distributed_type: MULTI_GPU
    mixed_precision: fp16
    """
    if not layout.changes:
        return None
    return yaml.safe_dump(read_shipped(str(layout.file)) | layout.changes, sort_keys=False)


def read_shipped(name: str) -> dict[str, Any]:
    """Reads the Accelerate file of that name (without .yaml) that this toolkit ships."""
    shipped: dict[str, Any] = yaml.safe_load(
        (ACCELERATE_CONFIGS / f"{name}.yaml").read_text(encoding="utf-8")
    )
    return shipped


def read_layout(tool: Tool, settings: ToolFile, text: str) -> AskedLayout:
    """Reads the layout that a file asks for.

    `text` is the file with its comments: torchtune's name the recipe, others the launch command.
    """
    if tool == "torchtune":
        layout = _read_torchtune(settings, text)
    elif tool == "Automodel":
        layout = _read_automodel(settings)
    else:
        layout = _read_trainers_file(tool, settings, text)
    # Accelerate's fp8 computes all other layers in bf16: beside fp16 or fp32 it is not taken over
    layout = replace(layout, fp8=_find_fp8(settings) if layout.precision == "bf16" else "")
    shares_layers = layout.tensors * layout.sequences * layout.experts > 1
    if shares_layers and layout.sharding == "none":
        layout = replace(layout, sharding="full", for_groups=True)
    return layout


def _find_fp8(settings: ToolFile) -> str:
    """Returns torchao's FP8 recipe; empty where the file asks for no FP8.

    The default, "tensorwise", has one scale for each tensor.
    """
    section = read_section(settings, "fp8")
    if section:
        is_asked = section.get("enabled", True)
    else:
        is_asked = settings.get("fp8") or settings.get("enable_fp8_training")
    if not is_asked:
        return ""
    return str(section.get("recipe_name") or settings.get("fp8_recipe_name") or "tensorwise")


def _read_trainers_file(tool: Tool, settings: ToolFile, text: str) -> AskedLayout:
    """Reads a file with the keys of transformers' Trainer: TRL's, Axolotl's, LLaMA-Factory's or
    ms-swift's.
    """
    sharding = _find_sharding(tool, settings)
    launched = LAUNCHED_FSDP.search(text)
    if tool in ("LLaMA-Factory", "ms-swift") and launched and sharding == "none":
        launched_file = launched[1]
        sharding = "offload" if "offload" in launched_file else "full"
    precision = _find_precision(tool, settings)
    fsdp_config = _read_fsdp_config(settings)
    # on by default, but for Axolotl; LLaMA-Factory reads `disable_gradient_checkpointing` instead
    checkpoints = (
        tool == "LLaMA-Factory"
        or settings.get("gradient_checkpointing", tool != "Axolotl")
        or fsdp_config.get("activation_checkpointing")
    )
    by_deepspeed = bool(settings.get("deepspeed"))
    is_plain = sharding == "none" and not by_deepspeed
    # Axolotl and ms-swift load the weights in bf16. They are trained in it unless DeepSpeed, at any
    # stage, or Accelerate's FSDP makes a float32 copy, which `bf16: full` does without.
    is_full_bf16 = (
        tool == "Axolotl"
        and precision == "bf16"
        and (is_plain or settings.get("bf16") == "full" or _keeps_loaded_dtype(settings))
    )
    is_loaded_bf16 = tool == "ms-swift" and precision == "bf16" and is_plain
    pure_bf16 = _trains_pure_bf16(settings, is_plain) or is_full_bf16 or is_loaded_bf16
    tensors = (settings.get("tensor_parallel_size"), settings.get("tensor_model_parallel_size"))
    experts = (settings.get("expert_parallel_size"), settings.get("expert_model_parallel_size"))
    return AskedLayout(
        sharding,
        precision,
        checkpointing=bool(checkpoints) and not settings.get("disable_gradient_checkpointing"),
        pure_bf16=pure_bf16,
        keeps_fp32=not is_plain and precision != "no" and not pure_bf16,
        by_deepspeed=by_deepspeed,
        tensors=max(map(_read_size, tensors)),
        sequences=count_sharing_ranks(settings),
        experts=max(map(_read_size, experts)),
        replicas=_read_size(settings.get("dp_replicate_size")),
        shards=_read_size(settings.get("dp_shard_size")),
    )


def _trains_pure_bf16(settings: ToolFile, is_plain: bool) -> bool:
    """Whether LLaMA-Factory's pure_bf16 has the weights trained in bfloat16.

    Under DeepSpeed, and under FSDP with bf16, they are copied to float32 for all that; not by v1,
    to whose files `rename_v1` adds the key.
    """
    is_copied = not is_plain and bool(settings.get("bf16") or settings.get("deepspeed"))
    is_v1 = "batching_strategy" in settings
    return settings.get("pure_bf16") is True and (is_v1 or not is_copied)


def count_sharing_ranks(settings: ToolFile) -> int:
    """Returns how many ranks share a row's tokens in a file with Trainer's keys; 1 by default."""
    sizes = (
        settings.get("context_parallel_size"),
        settings.get("sequence_parallel_degree"),  # the older name
        read_value(settings, "context_parallel.size"),
        settings.get("sequence_parallel_size"),
    )
    return max(map(_read_size, sizes))


def is_first_fsdp(settings: ToolFile) -> bool:
    """Whether an Axolotl file asks for FSDP1, which Axolotl 0.21 refuses.

    A file asks by the version, or without one by the list of options under `fsdp`.
    """
    fsdp_config = _read_fsdp_config(settings)
    version = settings.get("fsdp_version") or fsdp_config.get("version")
    return str(version) == "1" or (version is None and bool(settings.get("fsdp")))


def has_flat_parameters(settings: ToolFile) -> bool:
    """Whether an Axolotl file asks for FSDP1 with one flat parameter for all weights of a layer."""
    fsdp_config = _read_fsdp_config(settings)
    return is_first_fsdp(settings) and fsdp_config.get("use_orig_params") is False


def _keeps_loaded_dtype(settings: ToolFile) -> bool:
    """Whether Axolotl shards by FSDP2, under which weights keep the dtype that they are loaded in.

    Its own fsdp2_prepare_model then replaces Accelerate's and casts nothing to float32.
    """
    is_sharded = bool(read_section(settings, "fsdp_config")) and not settings.get("deepspeed")
    return is_sharded and not is_first_fsdp(settings)


def _find_precision(tool: Tool, settings: ToolFile) -> Precision:
    """Returns the mixed precision of a file with Trainer's keys; "no" is float32."""
    asks_fp16 = settings.get("fp16") is True or settings.get("float16") is True
    asks_bf16 = any(settings.get(key) for key in ("bf16", "bfloat16", "pure_bf16"))
    if tool == "ms-swift":
        # without torch_dtype it is the dtype of the model's files, as a rule bfloat16
        dtype = str(settings.get("torch_dtype") or "bfloat16")
        # _init_mixed_precision of arguments/base_args/model_args.py trains all but bfloat16 in fp16
        implies_fp16 = dtype in ("float16", "float32") and not asks_bf16
        asks_fp16 = asks_fp16 or (implies_fp16 and settings.get("fp16") is not False)
        asks_bf16 = asks_bf16 or dtype == "bfloat16"
    if tool == "Axolotl" and settings.get("bf16", "auto") == "auto":
        # resolve_dtype of its utils/config, which looks at fp16 and not at float16
        return "fp16" if settings.get("fp16") is True else "bf16"
    is_default = tool == "TRL" and settings.get("bf16") is None and not asks_fp16
    if asks_bf16 or is_default:
        return "bf16"
    return "fp16" if asks_fp16 else "no"


def _find_sharding(tool: Tool, settings: ToolFile) -> AskedSharding:
    """Returns the sharding that a file with Trainer's keys asks for."""
    deepspeed = str(settings.get("deepspeed") or "").lower()
    if deepspeed:
        sharding = _read_deepspeed(deepspeed)
    else:
        sharding = _read_fsdp(settings)
    asks_fsdp2 = "fsdp_version" in settings or _read_size(settings.get("dp_shard_size")) > 1
    # TRL leaves the sharding to the Accelerate file of the launch: without its name, fully sharded
    # is assumed
    is_assumed = tool == "TRL" and not UNSHARDED.search(str(settings.get("accelerate_config")))
    if sharding == "none" and (asks_fsdp2 or is_assumed):
        sharding = "full"
    if _read_size(settings.get("dp_replicate_size")) > 1 and sharding != "none":
        sharding = "hybrid"
    return sharding


def find_zero_stage(file: Any) -> int | None:
    """Returns the stage of ZeRO by the path, the text or the settings of a DeepSpeed file.

    None where these name no stage.

    >>> find_zero_stage("ds_z2_offload_config.json"), find_zero_stage("ds_config.json")
    (2, None)
    >>> find_zero_stage({"zero_optimization": {"stage": 3}})
    3
    """
    match = ZERO_STAGE.search(str(file).lower())
    if match is None:
        return None
    by_key, by_name = match.groups()
    return int(by_key or by_name)


# a section of a DeepSpeed file, in lower case, that offloads nothing
NOTHING_OFFLOADED = re.compile(r"""["']offload_\w+["']: *\{[^{}]*["']device["']: *["']none["']""")


def _read_deepspeed(file: str) -> AskedSharding:
    """Returns the sharding by the path or the text, in lower case, of a DeepSpeed file.

    A file that names no stage is taken for stage 2.
    """
    stage = find_zero_stage(file)
    if stage == 0:
        return "none"
    if "offload" in NOTHING_OFFLOADED.sub("", file):
        return "offload"
    return "full" if stage == 3 else "grad_op"


def _read_fsdp(settings: ToolFile) -> AskedSharding:
    """Returns the sharding by `fsdp` and `fsdp_config`; "none" where a file has neither."""
    fsdp = settings.get("fsdp")
    if isinstance(fsdp, list):
        options = " ".join(map(str, fsdp))
    else:
        # ms-swift has the path of a file here: its folders' names say nothing
        options = str(fsdp or "").split("/")[-1]
    fsdp_config = _read_fsdp_config(settings)
    strategy = str(fsdp_config.get("sharding_strategy", "")).upper()
    if not options and not fsdp_config:
        return "none"
    return _name_sharding(
        offloads="offload" in options or fsdp_config.get("offload_params") is True,
        has_groups="HYBRID" in strategy or "hybrid" in options,
        keeps_gathered=fsdp_config.get("reshard_after_forward") is False
        # Accelerate makes float32 copies, and sums gradients in 16 bits, under NO_SHARD too
        or strategy in ("SHARD_GRAD_OP", "NO_SHARD")
        or "shard_grad_op" in options,
    )


def _name_sharding(*, offloads: bool, has_groups: bool, keeps_gathered: bool) -> AskedSharding:
    """Names the sharding by what a file asks for; fully sharded unless it says otherwise.

    `keeps_gathered`: weights stay gathered between the forward and the backward pass.
    """
    if offloads:
        return "offload"
    if has_groups:
        return "hybrid"
    return "grad_op" if keeps_gathered else "full"


def _read_torchtune(settings: ToolFile, text: str) -> AskedLayout:
    """Reads the layout of a torchtune file; in bf16 its parameters are in bf16 too."""
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
    """Returns the sharding of a torchtune file; fully sharded unless it says otherwise.

    A recipe for one device, by the command in the comments of `text`, shards nothing.
    """
    command = COMMAND.search(text)
    if command is not None and command[1].endswith("single_device"):
        return "none"
    return _name_sharding(
        offloads=bool(settings.get("fsdp_cpu_offload") or read_value(settings, "fsdp.cpu_offload")),
        has_groups=_read_size(settings.get("data_parallel_replicate_dim")) > 1,
        keeps_gathered=settings.get("fsdp_reshard_after_forward") is False,
    )


def _read_automodel(settings: ToolFile) -> AskedLayout:
    """Reads the layout of an Automodel file, whose mixed precision is always bf16."""
    distributed = read_section(settings, "distributed")
    dtype = str(read_value(settings, "model.torch_dtype", "auto"))
    is_pure_bf16 = "32" not in dtype and not trains_copy(settings)
    return AskedLayout(
        _find_automodel_sharding(distributed),
        "bf16",
        checkpointing=bool(distributed.get("activation_checkpointing")),
        pure_bf16=is_pure_bf16,
        keeps_fp32=not is_pure_bf16,
        tensors=_read_size(distributed.get("tp_size")),
        sequences=_read_size(distributed.get("cp_size")),
        experts=_read_size(distributed.get("ep_size")),
        replicas=_read_size(distributed.get("dp_replicate_size")),
    )


def trains_copy(settings: ToolFile) -> bool:
    """Whether Automodel's optimizer trains a copy, in more bits, of weights that are in 16 bits."""
    if "32" in str(read_value(settings, "model.torch_dtype")):
        return False
    optimizer = read_section(settings, "optimizer")
    name = str(optimizer.get("_target_"))
    if "FlashAdamW" in name:
        return bool(optimizer.get("master_weight_bits", 24))
    return bool(optimizer.get("master_weights", name.endswith("FusedAdamConfig")))


def _find_automodel_sharding(distributed: Mapping[str, Any]) -> AskedSharding:
    """Returns the sharding by the section `distributed`; fully sharded unless it says otherwise."""
    if distributed.get("strategy") == "ddp":
        return "none"
    return _name_sharding(
        offloads="CPUOffload" in str(distributed.get("offload_policy")),
        has_groups=_read_size(distributed.get("dp_replicate_size")) > 1,
        keeps_gathered=distributed.get("reshard_after_forward") is False,
    )


def _read_fsdp_config(settings: ToolFile) -> dict[str, Any]:
    """Returns `fsdp_config` without the prefix "fsdp_", which files have in its keys and not."""
    config = read_section(settings, "fsdp_config")
    return {str(key).removeprefix("fsdp_"): value for key, value in config.items()}


def _read_size(value: Any) -> int:
    """Returns the number of ranks under a key; 1 for None and for what is no number above 1."""
    return value if isinstance(value, int) and value > 1 else 1
