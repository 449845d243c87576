"""Reads the layout of a run from an Accelerate config or from the launcher's environment. Torch-free."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast, get_args

from finetune.config.layout import (
    DEFAULT_MIN_NUM_PARAMS,
    PLAIN_LAUNCH,
    Layout,
    MixedPrecision,
    Sharding,
    Strategy,
    Wrapping,
    describe_sizes,
)
from finetune.config.reader import find_file, shipped_folder
from finetune.distributed.accelerate_settings import MESH_KEYS, Settings, read_environment, read_file
from finetune.distributed.fp8 import read_fp8, read_fp8_environment
from finetune.errors import UserError

ACCELERATE_CONFIGS = shipped_folder("accelerate_configs")

LAYOUTS: dict[str, Layout] = {"NO": "single", "MULTI_GPU": "ddp", "MULTI_CPU": "ddp", "FSDP": "fsdp2"}

# What a file and the launcher's settings must agree on: by `Sharding`, and by the keys that state it.
COMPARED = {
    "layout": "the layout",
    "strategy": "the sharding strategy",
    "mesh_sizes": "parallelism_config",
    "mixed_precision": "mixed_precision",
    "fp8": "fp8_config",
    "wrapping": "fsdp_auto_wrap_policy",
    "wrap_classes": "fsdp_transformer_layer_cls_to_wrap",
    "cpu_offload": "fsdp_offload_params",
    "activation_checkpointing": "fsdp_activation_checkpointing",
}


def read_sharding(config: str | None, accelerate_config: str | None, environ: Mapping[str, str]) -> Sharding:
    """The layout of this run.

    `config` (the --config of the command) decides; else the FSDP settings that the launcher put in `environ`; else
    `accelerate_config` (the recipe's key); else what the launch implies: several processes are DDP, one is single.
    Raises `UserError` where a file is wrong, or where the launcher's settings and `config` disagree. Whether the layout is
    possible on the launched ranks, `config.compatibility.refuse_problems` says.
    """
    launched = read_environment(environ)
    if config is not None:
        stated = read_file(find_file(config, ACCELERATE_CONFIGS, "Accelerate config"))
        sharding = _interpret(stated)
        if launched is not None:
            if launched.has_sizes_alone:
                launched = replace(stated, mesh=launched.mesh, source=launched.source, places={})
            _refuse_disagreement(sharding, _interpret(launched))
        return sharding
    if launched is not None:
        stated = launched
    elif accelerate_config is not None:
        stated = read_file(find_file(accelerate_config, ACCELERATE_CONFIGS, "Accelerate config"))
    else:
        processes = int(environ.get("WORLD_SIZE", "1"))
        precision, fp8 = environ.get("ACCELERATE_MIXED_PRECISION", "no"), read_fp8_environment(environ)
        stated = Settings(PLAIN_LAUNCH, "MULTI_GPU" if processes > 1 else "NO", precision, False, {}, {}, fp8=fp8)
    return _interpret(stated)


def _interpret(settings: Settings) -> Sharding:
    """The settings as a `Sharding`; raises `UserError` for values that do not fit."""
    problems: list[str] = []
    read = _SettingsReader(settings, problems)
    layout = LAYOUTS[settings.distributed_type]
    version = str(settings.fsdp.get("version", 1))
    if layout == "fsdp2":
        if version not in ("1", "2"):
            problems.append(f"{settings.place_of('version')}: fsdp_version: {version} is not a version; 1 or 2")
        layout = "fsdp1" if version == "1" else "fsdp2"
    is_fp8 = settings.mixed_precision == "fp8"
    precision = "bf16" if is_fp8 else settings.mixed_precision
    if precision not in get_args(MixedPrecision):
        problems.append(
            f"{settings.place_of('mixed_precision')}: mixed_precision: {settings.mixed_precision} is not supported; no, bf16, fp16 or fp8"
        )
    sizes = {key: read.integer(key, settings.mesh, at_least=1) for key in MESH_KEYS}
    problems += _find_mesh_problems(settings, layout, sizes)
    classes = settings.fsdp.get("transformer_layer_cls_to_wrap") or ""
    classes = classes.split(",") if isinstance(classes, str) else classes
    sharding = Sharding(
        layout=layout,
        mixed_precision=cast(MixedPrecision, precision),
        fp8=read_fp8(settings.fp8, settings.source, problems) if is_fp8 else None,
        strategy=_strategy(layout, settings, sizes["dp_replicate_size"], read, problems),
        replicate_size=sizes["dp_replicate_size"],
        shard_size=sizes["dp_shard_size"],
        sequence_parallel_size=(sizes["cp_size"] or 1) * (sizes["sp_size"] or 1),
        tensor_parallel_size=sizes["tp_size"] or 1,
        wrapping=cast(Wrapping, read.one_of("auto_wrap_policy", get_args(Wrapping), "TRANSFORMER_BASED_WRAP")),
        wrap_classes=tuple(str(name).strip() for name in classes if str(name).strip()),
        min_num_params=read.integer("min_num_params", settings.fsdp) or DEFAULT_MIN_NUM_PARAMS,
        activation_checkpointing=read.boolean("activation_checkpointing"),
        cpu_offload=read.boolean("offload_params"),
        forward_prefetch=read.boolean("forward_prefetch"),
        use_cpu=settings.use_cpu,
        num_machines=settings.num_machines,
        source=settings.source,
        translated=settings.translated,
        asked=settings.asked,
        places=settings.places,
    )
    if layout == "fsdp2" and sharding.forward_prefetch:
        problems.append(
            f"{settings.place_of('forward_prefetch')}: fsdp_forward_prefetch: FSDP2 has none; remove the key, or set fsdp_version: 1"
        )
    if layout == "fsdp1" and "use_orig_params" in settings.fsdp and not read.boolean("use_orig_params"):
        problems.append(
            f"{settings.place_of('use_orig_params')}: fsdp_use_orig_params: always true here; remove the key"
        )
    if problems:
        raise UserError.of(problems)
    return sharding


def _find_mesh_problems(settings: Settings, layout: Layout, sizes: Mapping[str, int | None]) -> list[str]:
    divided = {key: sizes[key] for key in ("tp_size", "cp_size", "sp_size") if (sizes[key] or 1) > 1}
    if layout != "fsdp2":
        return [
            f"{settings.place_of(key)}: {key}: {size} needs FSDP2; set distributed_type: FSDP and fsdp_version: 2, or the size to 1"
            for key, size in divided.items()
        ]
    if (sizes["cp_size"] or 1) > 1 and (sizes["sp_size"] or 1) > 1:
        return [
            f"{settings.place_of('sp_size')}: cp_size: {sizes['cp_size']} and sp_size: {sizes['sp_size']} both divide the tokens of a row; set one of them to 1"
        ]
    return []


def _strategy(
    layout: Layout, settings: Settings, replicas: int | None, read: "_SettingsReader", problems: list[str]
) -> Strategy:
    if layout == "fsdp1":
        numbered = {
            str(number): name
            for number, name in enumerate(("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"), 1)
        }
        # Accelerate's version 1 takes a strategy's name under either key, true or false under neither.
        if isinstance(settings.fsdp.get("reshard_after_forward"), bool):
            problems.append(
                f"{settings.place_of('reshard_after_forward')}: fsdp_reshard_after_forward: version 1 takes no true or false; use fsdp_sharding_strategy"
            )
            return "FULL_SHARD"
        key = "sharding_strategy" if "sharding_strategy" in settings.fsdp else "reshard_after_forward"
        return cast(Strategy, read.one_of(key, get_args(Strategy), "FULL_SHARD", numbered))
    if layout == "fsdp2":
        if "sharding_strategy" in settings.fsdp:
            problems.append(
                f"{settings.place_of('sharding_strategy')}: fsdp_sharding_strategy: version 1's key; version 2 takes fsdp_reshard_after_forward "
                "(true: FULL_SHARD, false: SHARD_GRAD_OP) and parallelism_config for hybrid sharding"
            )
        if (replicas or 1) > 1:
            return "HYBRID_SHARD"
        return "FULL_SHARD" if read.boolean("reshard_after_forward", default=True) else "SHARD_GRAD_OP"
    return "FULL_SHARD"


@dataclass(frozen=True, slots=True)
class _SettingsReader:
    """Values of a YAML, or of an environment (all strings), as the types that they mean."""

    settings: Settings
    problems: list[str]

    def boolean(self, key: str, default: bool = False) -> bool:
        value = self.settings.fsdp.get(key, default)
        if isinstance(value, bool):
            return value
        if str(value).lower() in ("true", "false"):
            return str(value).lower() == "true"
        self.problems.append(f"{self.settings.place_of(key)}: fsdp_{key}: {value} does not fit; true or false")
        return default

    def integer(self, key: str, section: Mapping[str, Any], at_least: int = 0) -> int | None:
        value = section.get(key)
        if value is None:
            return None
        if not isinstance(value, bool) and str(value).isdigit() and int(value) >= at_least:
            return int(value)
        self.problems.append(
            f"{self.settings.place_of(key)}: {key}: {value} does not fit; a whole number of at least {at_least} is expected"
        )
        return None

    def one_of(self, key: str, known: Iterable[str], default: str, also: Mapping[str, str] | None = None) -> str:
        value = str(self.settings.fsdp.get(key, default)).upper()
        value = (also or {}).get(value, value)
        if value in known:
            return value
        self.problems.append(
            f"{self.settings.place_of(key)}: fsdp_{key}: {value} is not known; use one of {', '.join(known)}"
        )
        return default


def _show(value: Any) -> str:
    """A value of `Sharding` as a sentence names it."""
    if isinstance(value, Mapping):
        return describe_sizes(value)
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else repr(value)


def _refuse_disagreement(config: Sharding, launched: Sharding) -> None:
    """Raises `UserError` naming both values where the config and the launcher's settings differ."""
    problems = [
        f"{config.source}: {shown} is {_show(getattr(config, name))}, but {launched.source} say "
        f"{_show(getattr(launched, name))}; remove --config, give both the same file, or unset the variables that say so"
        for name, shown in COMPARED.items()
        if getattr(config, name) != getattr(launched, name)
    ]
    if problems:
        raise UserError.of(problems)
