"""DeepSpeed's part of an Accelerate file, and its JSON file, as the FSDP2 layout that does the
same.

Torch-free.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.config.layout import GROUP_KEYS
from finetune.config.yaml_file import read_entries
from finetune.constants import Fields, Record
from finetune.errors import UserError

STAGES = {
    0: "DDP, as every rank holds everything",
    1: "FSDP2 shard grad op, which shards the gradients too",
    2: "FSDP2 shard grad op",
    3: "FSDP2 full shard",
}
DEFAULT_STAGE = 2  # Accelerate's
# Keys of deepspeed_config -> the variables that Accelerate's launcher makes of them.
VARIABLES = {
    "zero_stage": "ACCELERATE_DEEPSPEED_ZERO_STAGE",
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
    "offload_optimizer_device": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "offload_param_device": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    "deepspeed_config_file": "ACCELERATE_DEEPSPEED_CONFIG_FILE",
}
# Without a counterpart, and nothing is lost: how the engine loads, saves, is launched and reports.
WITHOUT_EFFECT = frozenset(
    """
    zero3_init_flag zero3_save_16bit_model deepspeed_moe_layer_cls_names
    seq_parallel_communication_data_type offload_optimizer_nvme_path offload_param_nvme_path
    steps_per_print wall_clock_breakdown memory_breakdown dump_state comms_logger comms_config
    monitor_config flops_profiler tensorboard wandb csv_monitor checkpoint
    activation_checkpointing zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
    communication_data_type prescale_gradients gradient_predivide_factor aio data_types
    """.split()  # noqa: SIM905 - a name a line would be a page
)
ZERO_WITHOUT_EFFECT = frozenset(
    """
    overlap_comm contiguous_gradients reduce_scatter reduce_bucket_size allgather_partitions
    allgather_bucket_size sub_group_size round_robin_gradients elastic_checkpoint
    ignore_unused_parameters load_from_fp32_weights memory_efficient_linear
    use_multi_rank_bucket_allreduce prefetch_bucket_size param_persistence_threshold
    max_live_parameters max_reuse_distance gather_16bit_weights_on_model_save
    gather_fp16_weights_on_model_save use_all_reduce_for_fetch_params
    module_granularity_threshold
    """.split()  # noqa: SIM905 - a name a line would be a page
)
IN_RECIPE = {  # a number in DeepSpeed's JSON -> the recipe's key for it
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "train_batch_size": "global_batch_size",
    "gradient_clipping": "max_grad_norm",
}
JSON_KEYS = frozenset(
    [
        "zero_optimization",
        "bf16",
        "bfloat16",
        "fp16",
        "optimizer",
        "scheduler",
        *IN_RECIPE,
        *WITHOUT_EFFECT,
    ]
)
NO_COUNTERPART = "this part of DeepSpeed has no counterpart here; remove it"
OTHERS = {
    "sequence_parallel_size": (
        "remove it; parallelism_config_sp_size of an Accelerate file divides a row's tokens"
    ),
    "compile": "set torch_compile: true in the recipe, and remove this section",
    "tensor_parallel": (
        f"remove it; parallelism_config_{GROUP_KEYS[0]} of an Accelerate file divides matrices"
    ),
}
OPTIMIZER_IN_RECIPE = {"lr": "learning_rate", "weight_decay": "weight_decay", "eps": "adam_epsilon"}


@dataclass(frozen=True, slots=True)
class Translation:
    """A DeepSpeed section in our keys."""

    distributed_type: str  # of an Accelerate file
    fsdp: Record  # keys of fsdp_config, without their prefix
    mixed_precision: str | None  # None: the section leaves it to the file
    lines: tuple[str, ...]  # what was translated into what
    asked: tuple[tuple[str, float], ...]  # (a recipe's key, the number that it must have)


def translate_deepspeed(
    section: Fields, source: str, mixed_precision: str | None, folder: Path | None = None
) -> Translation:
    """Translates `deepspeed_config`.

    `folder`: the file's own, from which its JSON file may be named too.

    Raises `UserError` with every key that asks for what there is not, or contradicts another.
    """
    reader = _DeepspeedReader(source, mixed_precision)
    file = section.get("deepspeed_config_file")
    if file not in (None, "none", ""):
        reader.read_json(str(file), folder)
    reader.read_section(
        {key: value for key, value in section.items() if key != "deepspeed_config_file"}
    )
    if reader.problems:
        raise UserError.of(reader.problems)
    return reader.translation()


class _DeepspeedReader:
    """Gathers what the JSON file and the section ask for."""

    def __init__(self, source: str, mixed_precision: str | None) -> None:
        self.problems: list[str] = []
        self._where = source  # the file that is read
        self._precision = mixed_precision
        self._precision_of_json: str | None = None
        self._stage = DEFAULT_STAGE
        self._offloaded: list[str] = []
        self._ignored: list[str] = []
        self._asked: dict[str, float] = {}

    def translation(self) -> Translation:
        """Returns the layout for what has been read."""
        lines = [f"zero_stage {self._stage}: {STAGES[self._stage]}"]
        if self._offloaded:
            what = " and ".join(self._offloaded)
            lines.append(
                f"{what}: cpu: parameters, gradients and optimizer state stay in host memory, all "
                "three"
            )
        if self._ignored:
            lines.append(f"without effect here: {', '.join(sorted(self._ignored))}")
        fsdp = {
            "version": 2,
            "reshard_after_forward": self._stage == 3,
            "offload_params": bool(self._offloaded),
        }
        return Translation(
            distributed_type="FSDP" if self._stage else "MULTI_GPU",
            fsdp=fsdp if self._stage else {},
            mixed_precision=self._precision_of_json,
            lines=tuple(lines),
            asked=tuple(self._asked.items()),
        )

    def read_section(self, section: Fields) -> None:
        """Reads Accelerate's `deepspeed_config`, which prevails over the JSON file's `auto`."""
        for key, value in section.items():
            if key in ("offload_optimizer_device", "offload_param_device"):
                self._read_offload(key.removesuffix("_device"), value)
            elif key == "zero_stage":
                self._read_stage(key, value)
            elif key in IN_RECIPE:
                self._read_number(key, value, IN_RECIPE)
            elif key == "deepspeed_multinode_launcher" and value in (None, "standard"):
                continue
            elif key in WITHOUT_EFFECT and value not in (None, False, "none"):
                self._ignored.append(key)
            elif key.startswith("deepspeed_") and key not in WITHOUT_EFFECT and value:
                self._refuse(
                    key, "the ranks are started by accelerate launch on each machine; remove it"
                )
            elif key not in WITHOUT_EFFECT and not key.startswith("deepspeed_"):
                self._refuse(f"deepspeed_config.{key}", "no such key of Accelerate's; remove it")

    def read_json(self, name: str, folder: Path | None) -> None:
        """Reads DeepSpeed's own file."""
        candidates = [Path(name).expanduser(), *([folder / name] if folder else [])]
        path = next((candidate for candidate in candidates if candidate.is_file()), None)
        if path is None:
            self._refuse("deepspeed_config_file", f"{name}: no such file, here or beside it")
            return
        try:
            entries, twice = read_entries(path)
        except UserError as error:
            known = "not JSON that can be read, where an object with DeepSpeed's keys is expected"
            self._refuse("deepspeed_config_file", f"{path}: {known} ({error})")
            return
        if twice:
            self.problems += twice
            return
        content = {entry.key: entry.value for entry in entries}
        if "zero_optimization" not in content:
            self._stage = 0  # DeepSpeed's own default
        before = self._where
        self._where = str(path)
        self._read_content(content)
        self._where = before

    def _read_content(self, content: Fields) -> None:
        for key, value in content.items():
            if key == "zero_optimization":
                self._read_zero(value)
            elif key in IN_RECIPE:
                self._read_number(key, value, IN_RECIPE)
            elif key in ("bf16", "bfloat16", "fp16"):
                self._read_precision("fp16" if key == "fp16" else "bf16", value)
            elif key == "optimizer":
                self._read_optimizer(value)
            elif key == "scheduler":
                if not _is_auto(value):
                    self._refuse(
                        key,
                        "the recipe's lr_scheduler_type names the schedule; remove this section",
                    )
            elif key in WITHOUT_EFFECT:
                self._ignored.append(key)
            elif not key.startswith("_"):  # a comment
                self._refuse(key, OTHERS.get(key, NO_COUNTERPART))

    def _read_zero(self, section: Any) -> None:
        if not isinstance(section, dict):
            self._refuse("zero_optimization", "an object is expected")
            return
        for key, value in section.items():
            if key == "stage":
                self._read_stage("zero_optimization.stage", value)
            elif key in ("offload_optimizer", "offload_param"):
                self._read_offload(key, value.get("device") if isinstance(value, dict) else value)
            elif key == "cpu_offload":
                self._read_offload(key, "cpu" if value is True else None)
            elif key.removeprefix("stage3_") in ZERO_WITHOUT_EFFECT:
                self._ignored.append(key)
            else:
                self._refuse(f"zero_optimization.{key}", NO_COUNTERPART)

    def _read_stage(self, key: str, value: Any) -> None:
        if str(value) in map(str, STAGES) and not isinstance(value, bool):
            self._stage = int(value)
        elif value != "auto":
            self._refuse(key, f"{value} does not fit; 0, 1, 2 or 3")

    def _read_offload(self, key: str, device: Any) -> None:
        device = str(device).lower()
        if device == "cpu" and key not in self._offloaded:
            self._offloaded.append(key)
        elif device == "nvme":
            if key == "offload_optimizer":
                advice = "set optim_offload: nvme and offload_dir in the recipe, and this to none"
            else:
                advice = "parameters on NVMe are not supported; cpu keeps them in host memory"
            self._refuse(key, f"nvme: {advice}")
        elif device not in ("none", "auto", "cpu"):
            self._refuse(key, f"{device} does not fit; cpu or none")

    def _read_number(self, key: str, value: Any, names: Mapping[str, str]) -> None:
        if value in (None, "auto", "none"):
            return
        try:
            self._asked[names[key]] = float(value)
        except (TypeError, ValueError):
            self._refuse(key, f"{value} does not fit; a number is expected")

    def _read_precision(self, name: str, section: Any) -> None:
        if isinstance(section, dict):
            enabled = section.get("enabled", True)
        else:
            enabled = section
        if enabled is True and self._precision_of_json not in (None, name):
            self._refuse(
                name, f"on here, and {self._precision_of_json} too; set one of the two to false"
            )
        elif enabled is True and self._precision in (None, name):
            self._precision_of_json = name
        elif enabled is True or (enabled is False and self._precision == name):
            said = "on" if enabled else "off"
            self._refuse(
                name,
                (
                    f"{said} here, but mixed_precision is {self._precision}; set one to the other, "
                    "or this to auto"
                ),
            )

    def _read_optimizer(self, section: Any) -> None:
        if isinstance(section, dict):
            kind = section.get("type", "auto")
        else:
            kind = section
        if kind not in ("auto", "Adam", "AdamW"):
            self._refuse(
                "optimizer", f"{kind}: the recipe's optim names the optimizer; remove this section"
            )
            return
        for key, value in _parameters(section):
            if key in OPTIMIZER_IN_RECIPE:
                self._read_number(key, value, OPTIMIZER_IN_RECIPE)
            elif key == "torch_adam" or (key == "adam_w_mode" and value is True):
                # both are torch's AdamW here
                self._ignored.append(f"optimizer.params.{key}")
            elif not _is_auto(value):
                self._refuse(
                    f"optimizer.params.{key}",
                    "the recipe's keys set the optimizer; remove it, or set it to auto",
                )

    def _refuse(self, key: str, reason: str) -> None:
        self.problems.append(f"{self._where}: {key}: {reason}")


def _parameters(section: Any) -> Iterator[tuple[str, Any]]:
    """Yields the parameters of a section of an optimizer; none where it has none."""
    parameters = section.get("params") if isinstance(section, dict) else None
    if isinstance(parameters, dict):
        yield from parameters.items()


def _is_auto(value: Any) -> bool:
    """Whether every number in a section is left to the trainer."""
    if isinstance(value, dict):
        return all(_is_auto(inner) for key, inner in value.items() if key != "type")
    return value in ("auto", None)
