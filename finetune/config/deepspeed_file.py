"""Translates DeepSpeed's settings to the FSDP2 layout that does the same.

They are in the deepspeed_config section of an Accelerate file, or in DeepSpeed's own JSON file.
Torch-free.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.config.layout import GROUP_KEYS
from finetune.config.yaml_file import read_entries
from finetune.errors import UserError
from finetune.units import expand_home

STAGES = {  # zero_stage -> the layout that it is translated to
    0: "DDP, as every rank holds everything",
    1: "FSDP2 shard grad op, which shards the gradients too",
    2: "FSDP2 shard grad op",
    3: "FSDP2 full shard",
}
DEFAULT_STAGE = 2  # Accelerate's
# Keys of deepspeed_config -> the environment variables of Accelerate's launcher.
VARIABLES = {
    "zero_stage": "ACCELERATE_DEEPSPEED_ZERO_STAGE",
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
    "offload_optimizer_device": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "offload_param_device": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    "deepspeed_config_file": "ACCELERATE_DEEPSPEED_CONFIG_FILE",
}
# Keys that are accepted without effect, as nothing is lost: they say how the engine loads, saves,
# is launched and reports.
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
# The same in the zero_optimization section, without the prefix stage3_.
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
IN_RECIPE = {  # DeepSpeed's key of a number -> the recipe's key
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "train_batch_size": "global_batch_size",
    "gradient_clipping": "max_grad_norm",
}
# A file that has only such top-level keys is recognized as DeepSpeed's JSON file.
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
# Other keys of DeepSpeed's JSON file -> what to do instead.
ADVICE = {
    "sequence_parallel_size": (
        "remove it; parallelism_config_sp_size of an Accelerate file divides a row's tokens"
    ),
    "compile": "set torch_compile: true in the recipe, and remove this section",
    "tensor_parallel": (
        f"remove it; parallelism_config_{GROUP_KEYS[0]} of an Accelerate file divides matrices"
    ),
}
# The optimizer section's key of a number -> the recipe's key.
OPTIMIZER_IN_RECIPE = {"lr": "learning_rate", "weight_decay": "weight_decay", "eps": "adam_epsilon"}


@dataclass(frozen=True, slots=True)
class Translation:
    """DeepSpeed's settings as settings of an Accelerate file."""

    distributed_type: str  # FSDP, or MULTI_GPU for stage 0
    fsdp: dict[str, Any]  # fsdp_config, by keys without the prefix; empty for stage 0
    mixed_precision: str | None  # None: not set by the JSON file
    lines: tuple[str, ...]  # lines for the log: what was translated into what
    asked: tuple[tuple[str, float], ...]  # (a recipe's key, the number that it must have)


def translate_deepspeed(
    section: Mapping[str, Any], source: str, mixed_precision: str | None, folder: Path | None = None
) -> Translation:
    """Translates the deepspeed_config section of an Accelerate file.

    Args:
        section: The section. It may name a JSON file, which is read first.
        source: The Accelerate file or the environment; a message about the section begins with it.
        mixed_precision: The value in `source`; None: not set. The JSON file may not contradict it.
        folder: The folder of the Accelerate file. The JSON file's path may start from it too, and
            not only from the working directory.

    Raises:
        UserError: One error for all keys that are not supported or that contradict another.
    """
    reader = _DeepspeedReader(source, mixed_precision)
    json_path = section.get("deepspeed_config_file")
    if json_path not in (None, "none", ""):
        reader.read_json(str(json_path), folder)
    reader.read_section(
        {key: value for key, value in section.items() if key != "deepspeed_config_file"}
    )
    reader.refuse_offload_without_shards()
    if reader.problems:
        raise UserError.of(reader.problems)
    return reader.make_translation()


class _DeepspeedReader:
    """Collects the settings and the problems of the JSON file and of the section."""

    def __init__(self, source: str, mixed_precision: str | None) -> None:
        self.problems: list[str] = []
        self._source = source  # of what is being read now; problems begin with it
        self._precision = mixed_precision  # in the Accelerate file
        self._precision_of_json: str | None = None
        self._stage = DEFAULT_STAGE
        self._offload_keys: list[str] = []  # keys that are set to cpu
        self._ignored_keys: list[str] = []
        self._recipe_numbers: dict[str, float] = {}  # the recipe's key -> the number here

    def make_translation(self) -> Translation:
        """Returns the translation of the settings that have been read."""
        lines = [f"zero_stage {self._stage}: {STAGES[self._stage]}"]
        if self._offload_keys:
            keys = " and ".join(self._offload_keys)
            lines.append(
                f"{keys}: cpu: parameters, gradients and optimizer state stay in host memory, all "
                "three"
            )
        if self._ignored_keys:
            lines.append(f"without effect here: {', '.join(sorted(self._ignored_keys))}")
        fsdp: dict[str, Any] = {}
        if self._stage == 0:
            distributed_type = "MULTI_GPU"
        else:
            distributed_type = "FSDP"
            fsdp = {
                "version": 2,
                "reshard_after_forward": self._stage == 3,
                "offload_params": bool(self._offload_keys),
            }
        return Translation(
            distributed_type=distributed_type,
            fsdp=fsdp,
            mixed_precision=self._precision_of_json,
            lines=tuple(lines),
            asked=tuple(self._recipe_numbers.items()),
        )

    def refuse_offload_without_shards(self) -> None:
        """Adds a problem for each offload key beside stage 0, under which nothing is offloaded."""
        if self._stage > 0:
            return
        for key in self._offload_keys:
            self._add_problem(
                key,
                "cpu: stage 0 is DDP, which offloads nothing; set another stage, or this to none",
            )

    def read_section(self, section: Mapping[str, Any]) -> None:
        """Reads the deepspeed_config section without the JSON file that it names.

        It is read after that file, so its stage and numbers replace the file's unless they are
        auto.
        """
        for key, value in section.items():
            if key in ("offload_optimizer_device", "offload_param_device"):
                self._read_offload(key.removesuffix("_device"), value)
            elif key == "zero_stage":
                self._read_stage(key, value)
            elif key in IN_RECIPE:
                self._read_number(key, value, IN_RECIPE)
            elif key == "deepspeed_multinode_launcher" and value in (None, "standard"):
                continue
            elif key in WITHOUT_EFFECT:
                if value not in (None, False, "none"):
                    self._ignored_keys.append(key)
            elif key.startswith("deepspeed_"):  # for DeepSpeed's own launcher
                if value:
                    self._add_problem(
                        key, "the ranks are started by accelerate launch on each machine; remove it"
                    )
            else:
                self._add_problem(
                    f"deepspeed_config.{key}", "no such key of Accelerate's; remove it"
                )

    def read_json(self, name: str, folder: Path | None) -> None:
        """Reads DeepSpeed's own JSON file.

        `name`: its path, from the working directory or from `folder`.
        """
        candidates = [Path(expand_home(name))]
        if folder is not None:
            candidates.append(folder / name)
        path = next((candidate for candidate in candidates if candidate.is_file()), None)
        if path is None:
            self._add_problem("deepspeed_config_file", f"{name}: no such file, here or beside it")
            return
        try:
            entries, problems = read_entries(path)
        except UserError as error:
            reason = "not JSON that can be read, where an object with DeepSpeed's keys is expected"
            self._add_problem("deepspeed_config_file", f"{path}: {reason} ({error})")
            return
        if problems:
            self.problems += problems
            return
        content = {entry.key: entry.value for entry in entries}
        zero = content.get("zero_optimization")
        if not isinstance(zero, dict) or "stage" not in zero:
            self._stage = 0  # DeepSpeed's own default
        outer_source = self._source
        self._source = str(path)
        self._read_json_content(content)
        self._source = outer_source

    def _read_json_content(self, content: Mapping[str, Any]) -> None:
        """Reads the top-level keys of DeepSpeed's JSON file."""
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
                    self._add_problem(
                        key,
                        "the recipe's lr_scheduler_type names the schedule; remove this section",
                    )
            elif key in WITHOUT_EFFECT:
                self._ignored_keys.append(key)
            elif not key.startswith("_") and not _is_off(value):  # _: such a key is a comment
                self._add_problem(key, ADVICE.get(key, NO_COUNTERPART))

    def _read_zero(self, section: Any) -> None:
        """Reads the zero_optimization section of the JSON file."""
        if not isinstance(section, dict):
            self._add_problem("zero_optimization", "an object is expected")
            return
        for key, value in section.items():
            if key == "stage":
                self._read_stage("zero_optimization.stage", value)
            elif key in ("offload_optimizer", "offload_param"):
                device = value.get("device") if isinstance(value, dict) else value
                self._read_offload(key, device)
            elif key == "cpu_offload":
                self._read_offload(key, "cpu" if value is True else None)
            elif key.removeprefix("stage3_") in ZERO_WITHOUT_EFFECT:
                self._ignored_keys.append(key)
            elif not _is_off(value):
                self._add_problem(f"zero_optimization.{key}", NO_COUNTERPART)

    def _read_stage(self, key: str, value: Any) -> None:
        """Reads a ZeRO stage, a number or text; auto changes nothing."""
        if str(value) in map(str, STAGES) and not isinstance(value, bool):
            self._stage = int(value)
        elif value != "auto":
            self._add_problem(key, f"{value} does not fit; 0, 1, 2 or 3")

    def _read_offload(self, key: str, device: Any) -> None:
        """Reads an offload device.

        `key`: the key that sets it, as messages name it. `device` may be None, for none.
        """
        device = str(device).lower()
        if device == "cpu" and key not in self._offload_keys:
            self._offload_keys.append(key)
        elif device == "nvme":
            if key == "offload_optimizer":
                advice = "set optim_offload: nvme and offload_dir in the recipe, and this to none"
            else:
                advice = "parameters on NVMe are not supported; cpu keeps them in host memory"
            self._add_problem(key, f"nvme: {advice}")
        elif device not in ("none", "auto", "cpu"):
            self._add_problem(key, f"{device} does not fit; cpu or none")

    def _read_number(self, key: str, value: Any, recipe_keys: Mapping[str, str]) -> None:
        """Notes the number that the recipe must have too; none, auto and None ask for nothing.

        `recipe_keys`: DeepSpeed's key -> the recipe's key.
        """
        if value in (None, "auto", "none"):
            return
        try:
            self._recipe_numbers[recipe_keys[key]] = float(value)
        except (TypeError, ValueError):
            self._add_problem(key, f"{value} does not fit; a number is expected")

    def _read_precision(self, name: str, section: Any) -> None:
        """Reads the section bf16 or fp16 of the JSON file, a mapping or the value of `enabled`.

        Both on, or one that contradicts mixed_precision of the Accelerate file, is a problem.
        """
        if isinstance(section, dict):
            enabled = section.get("enabled", False)  # DeepSpeed's own default
        else:
            enabled = section
        if str(enabled).lower() in ("true", "false"):  # in quotes too
            enabled = str(enabled).lower() == "true"
        if not isinstance(enabled, bool) and not _is_auto(enabled):
            self._add_problem(f"{name}.enabled", f"{enabled} does not fit; true, false or auto")
        if enabled is True and self._precision_of_json not in (None, name):
            self._add_problem(
                name, f"on here, and {self._precision_of_json} too; set one of the two to false"
            )
        elif enabled is True and self._precision in (None, name):
            self._precision_of_json = name
        elif enabled is True or (enabled is False and self._precision == name):
            state = "on" if enabled else "off"
            self._add_problem(
                name,
                (
                    f"{state} here, but mixed_precision is {self._precision}; set one to the "
                    "other, or this to auto"
                ),
            )

    def _read_optimizer(self, section: Any) -> None:
        """Reads the optimizer section of the JSON file: a mapping, or auto.

        Adam's numbers must be the recipe's; any other optimizer is a problem.
        """
        if isinstance(section, dict):
            kind = section.get("type", "auto")
        else:
            kind = section
        if kind not in ("auto", "Adam", "AdamW"):
            self._add_problem(
                "optimizer", f"{kind}: the recipe's optim names the optimizer; remove this section"
            )
            return
        for key, value in _iterate_parameters(section):
            if key in OPTIMIZER_IN_RECIPE:
                self._read_number(key, value, OPTIMIZER_IN_RECIPE)
            elif key == "torch_adam" or (key == "adam_w_mode" and value is True):
                # both are torch's AdamW here
                self._ignored_keys.append(f"optimizer.params.{key}")
            elif not _is_auto(value):
                self._add_problem(
                    f"optimizer.params.{key}",
                    "the recipe's keys set the optimizer; remove it, or set it to auto",
                )

    def _add_problem(self, key: str, reason: str) -> None:
        self.problems.append(f"{self._source}: {key}: {reason}")


def _iterate_parameters(section: Any) -> Iterator[tuple[str, Any]]:
    """Yields the keys and values of `params` in an optimizer section; nothing if it has none."""
    parameters = section.get("params") if isinstance(section, dict) else None
    if isinstance(parameters, dict):
        yield from parameters.items()


def _is_off(value: Any) -> bool:
    """Whether a part of DeepSpeed is turned off: false, or a section with enabled: false."""
    if isinstance(value, dict):
        value = value.get("enabled")
    return value is False


def _is_auto(value: Any) -> bool:
    """Whether a value is auto or null; of a section, whether all values except `type` are."""
    if isinstance(value, dict):
        return all(_is_auto(inner) for key, inner in value.items() if key != "type")
    return value in ("auto", None)
