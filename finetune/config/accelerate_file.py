"""Reads the layout of a run from an Accelerate config or from the launcher's environment.

Torch-free.
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from json import JSONDecodeError
from pathlib import Path
from typing import Any, cast, get_args

from finetune.config.deepspeed_file import JSON_KEYS, VARIABLES, Translation, translate_deepspeed
from finetune.config.layout import (
    DEFAULT_MIN_NUM_PARAMS,
    GROUP_KEYS,
    PLAIN_LAUNCH,
    Fp8,
    Fp8Recipe,
    Layout,
    MixedPrecision,
    Sharding,
    Strategy,
    Wrapping,
    describe_sizes,
)
from finetune.config.other_names import ACCELERATE_KEYS, IN_RECIPE
from finetune.config.reader import find_file, shipped_folder
from finetune.config.schema import recipe_keys
from finetune.config.yaml_file import Entry, read_entries
from finetune.constants import Names
from finetune.errors import UserError
from finetune.files.json_files import parse_json, read_bounded

# Sections for other libraries -> why they are refused. Accelerate writes them even when empty, so
# only a section with content is refused.
OTHER_SECTIONS = {
    "megatron_lm_config": "Megatron-LM is not supported; use an FSDP config",
    "dynamo_config": "set torch_compile: true in the recipe, and remove this section",
    "mpirun_config": (
        "mpirun is not supported as a launcher; start the ranks with accelerate launch or torchrun"
    ),
    "ipex_config": "Intel's extension is not supported; remove this section",
    "aws_config": "SageMaker is not supported; remove this section",
}
OTHER_TYPES = {"MEGATRON_LM": OTHER_SECTIONS["megatron_lm_config"]}
# distributed_type -> the layout. `_find_layout` changes FSDP's version 1 to fsdp1.
LAYOUTS: dict[str, Layout] = {
    "NO": "single",
    "MULTI_GPU": "ddp",
    "MULTI_CPU": "ddp",
    "FSDP": "fsdp2",
}
DISTRIBUTED_TYPES = (*LAYOUTS, "DEEPSPEED")
# Keys of fsdp_config without the prefix fsdp_ -> the launcher's environment variable for the key.
FSDP_KEYS = {
    "version": "FSDP_VERSION",
    "sharding_strategy": "FSDP_SHARDING_STRATEGY",
    "reshard_after_forward": "FSDP_RESHARD_AFTER_FORWARD",
    "offload_params": "FSDP_OFFLOAD_PARAMS",
    "min_num_params": "FSDP_MIN_NUM_PARAMS",
    "auto_wrap_policy": "FSDP_AUTO_WRAP_POLICY",
    "transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP",
    "forward_prefetch": "FSDP_FORWARD_PREFETCH",
    "activation_checkpointing": "FSDP_ACTIVATION_CHECKPOINTING",
    "use_orig_params": "FSDP_USE_ORIG_PARAMS",
}
# Keys of fp8_config without the prefix fp8_ -> the launcher's environment variable for the key.
# `recipe_name` is torchao's: Accelerate itself knows the first recipe only, but its launcher
# exports the key like the others.
FP8_KEYS = {
    "backend": "ACCELERATE_FP8_BACKEND",
    "recipe_name": "ACCELERATE_FP8_RECIPE_NAME",
    "enable_fsdp_float8_all_gather": "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER",
    "pad_inner_dim": "ACCELERATE_FP8_PAD_INNER_DIM",
}
# Keys of fp8_config for backends other than torchao, accepted without effect. The launcher exports
# some of them whatever the backend.
OTHER_BACKEND_KEYS = frozenset(
    """
    use_autocast_during_eval margin interval format amax_history_len amax_history_length
    amax_compute_algo amax_compute_algorithm override_linear_precision opt_level
    optimization_level
    """.split()  # noqa: SIM905 - a name a line would be a page
)
OTHER_BACKENDS = {"TE": "Transformer Engine", "MSAMP": "MS-AMP"}
# Keys of fsdp_config that are accepted without effect: each rank reads only its slices of the
# weights, checkpoints are always sharded, and backward prefetch is torch's default.
SUPERSEDED = frozenset(
    {
        "cpu_ram_efficient_loading",
        "sync_module_states",
        "state_dict_type",
        "backward_prefetch",
        "backward_prefetch_policy",
    }
)
# Keys of fsdp_config that are refused if set -> what to do.
UNSUPPORTED = {
    "ignored_modules": "every module is sharded here; remove the key",
    "activation_checkpointing_offload": "not supported here; remove the key",
}
# Keys of parallelism_config without the prefix -> the launcher's environment variable for the key.
MESH_KEYS = {
    key: f"PARALLELISM_CONFIG_{key.upper()}"
    for key in ("dp_replicate_size", "dp_shard_size", *GROUP_KEYS)
}
# Keys of parallelism_config that are accepted without effect -> Accelerate's default. Whatever a
# file names, this package shards sequences by one method.
OTHER_MESH_KEYS = {
    "cp_backend": "torch",
    "cp_comm_strategy": "allgather",
    "sp_backend": "deepspeed",
    "sp_seq_length": None,
    "sp_seq_length_is_variable": True,
    "sp_attn_implementation": None,
}


@dataclass(frozen=True, slots=True)
class Settings:
    """The raw settings of an Accelerate file or of the environment, not yet checked.

    Keys of `fsdp`, `mesh`, `fp8` and `places` have no prefix.
    """

    source: str  # the file's path, or a name for the environment; messages begin with it
    distributed_type: str
    mixed_precision: str
    use_cpu: bool
    fsdp: dict[str, Any]
    mesh: dict[str, Any]
    num_machines: int = 1
    fp8: dict[str, Any] = field(default_factory=dict)
    # lines for the log: what each DeepSpeed setting was translated into, and what has no effect
    translated: tuple[str, ...] = ()
    # (a recipe's key, the number that a DeepSpeed file gives for it)
    asked: tuple[tuple[str, float], ...] = ()
    # key -> FILE:LINE
    places: Mapping[str, str] = field(default_factory=dict)

    def place_of(self, key: str) -> str:
        """Returns FILE:LINE of `key` for a message, or the source if the line is not known."""
        return self.places.get(key, self.source)

    @property
    def has_sizes_alone(self) -> bool:
        """Whether mesh sizes are set without a layout.

        This happens if a person sets only PARALLELISM_CONFIG_* variables. DeepSpeed's stage 0 is
        MULTI_GPU too, but then `translated` is not empty.
        """
        return self.distributed_type == "MULTI_GPU" and bool(self.mesh) and not self.translated


SECTION_KEYS = (  # (section, the prefix of its keys, its keys without the prefix)
    ("fsdp_config", "fsdp_", {*FSDP_KEYS, *SUPERSEDED, *UNSUPPORTED}),
    ("parallelism_config", "parallelism_config_", {*MESH_KEYS, *OTHER_MESH_KEYS}),
    ("fp8_config", "fp8_", {*FP8_KEYS, *OTHER_BACKEND_KEYS}),
)


def read_file(path: Path) -> Settings:
    """Reads the settings of an Accelerate file or of DeepSpeed's own JSON file.

    Raises:
        UserError: The file cannot be read, is a recipe or is for SageMaker; otherwise one error
            that lists the mistakes in all keys.
    """
    if path.suffix == ".json":
        _refuse_broken_json(path)
    entries, problems = read_entries(path)
    values = {entry.key: entry.value for entry in entries}
    where = _find_places(entries)
    _refuse_recipe(path, values)
    _rename_old_keys(values, where)
    has_only_deepspeed_keys = bool(values) and values.keys() <= JSON_KEYS
    if "zero_optimization" in values or has_only_deepspeed_keys:
        return _read_deepspeed_file(path)
    if values.get("compute_environment") == "AMAZON_SAGEMAKER":
        raise UserError(
            f"{where['compute_environment']}: SageMaker is not supported; use a file for "
            "LOCAL_MACHINE"
        )
    unknown = values.keys() - ACCELERATE_KEYS - OTHER_SECTIONS.keys()
    problems += [f"{where[key]}: {key}: {_explain_unknown_key(key)}" for key in unknown]
    problems += [
        f"{where[key]}: {key}: {reason}"
        for key, reason in OTHER_SECTIONS.items()
        if values.get(key)
    ]
    places = dict(where)
    fsdp, mesh, fp8 = (
        _read_section(values, section, prefix, keys, places, problems)
        for section, prefix, keys in SECTION_KEYS
    )
    if fp8 and values.get("mixed_precision") != "fp8":
        problems.append(
            f"{where['fp8_config']}: fp8_config: it needs mixed_precision: fp8; set that, or "
            "remove the section"
        )
    # YAML 1.1 reads a bare NO as false
    distributed_type = str(values.get("distributed_type") or "NO").upper()
    if distributed_type not in DISTRIBUTED_TYPES:
        default_reason = f"not supported; one of {', '.join(DISTRIBUTED_TYPES)}"
        reason = OTHER_TYPES.get(distributed_type, default_reason)
        problems.append(
            f"{where['distributed_type']}: distributed_type: {distributed_type}: {reason}"
        )
    precision = values.get("mixed_precision")
    if precision is False:  # YAML 1.1 reads a bare no as false
        precision = "no"
    use_cpu = values.get("use_cpu") or False
    if str(use_cpu).lower() not in ("true", "false"):
        problems.append(f"{where['use_cpu']}: use_cpu: {use_cpu} does not fit; true or false")
    deepspeed_config = values.get("deepspeed_config") or {}
    translation = _translate_section(
        deepspeed_config, distributed_type, precision, path, where, problems
    )
    machines = values.get("num_machines") or 1
    if isinstance(machines, bool) or not str(machines).isdecimal():
        problems.append(
            f"{where['num_machines']}: num_machines: {machines} does not fit; a whole number is "
            "expected"
        )
    if problems:
        raise UserError.of(problems)
    settings = Settings(
        source=str(path),
        distributed_type=distributed_type,
        mixed_precision=str(precision or "no"),
        use_cpu=str(use_cpu).lower() == "true",
        fsdp=fsdp,
        mesh=mesh,
        num_machines=int(machines),
        fp8=fp8,
        translated=tuple(_list_ignored(mesh, fp8)),
        places=places,
    )
    if translation is None:
        return settings
    return _add_translation(settings, translation)


def _find_places(entries: Iterable[Entry]) -> dict[str, str]:
    """Returns FILE:LINE for each key; a key inside a section is named `section.key`."""
    where = {entry.key: entry.where for entry in entries}
    for entry in entries:
        where |= {f"{entry.key}.{key}": place for key, place in entry.places.items()}
    return where


def _refuse_recipe(path: Path, values: Mapping[str, Any]) -> None:
    """Raises `UserError` if the file is a recipe, not an Accelerate file."""
    has_recipe_keys = values.keys() & {"model_name_or_path", "model_config", "datasets"}
    if has_recipe_keys and "distributed_type" not in values:
        raise UserError(
            f"{path}: this is a recipe; pass it as --recipe, and an Accelerate config as --config"
        )


def _rename_old_keys(values: dict[str, Any], where: dict[str, str]) -> None:
    """Replaces the keys that Accelerate wrote before it had others for them, as it does itself."""
    if "fp16" in values:
        is_fp16 = str(values.pop("fp16")).lower() == "true"
        if is_fp16 and values.get("mixed_precision") is None:
            values["mixed_precision"] = "fp16"
            where["mixed_precision"] = where["fp16"]
    if "dynamo_backend" in values:
        backend = values.pop("dynamo_backend")
        if str(backend).upper() not in ("NO", "FALSE", "NONE"):  # YAML 1.1 reads NO as false
            values["dynamo_config"] = {"dynamo_backend": backend}
            where["dynamo_config"] = where["dynamo_backend"]


def _translate_section(
    section: Any,
    distributed_type: str,
    precision: str | None,
    path: Path,
    where: Mapping[str, str],
    problems: list[str],
) -> Translation | None:
    """Translates an Accelerate file's deepspeed_config section into FSDP's settings.

    Returns None if distributed_type is not DEEPSPEED, or if the section has mistakes. Adds the
    mistakes to `problems`; a section without distributed_type: DEEPSPEED is one too.
    """
    if distributed_type == "DEEPSPEED" and isinstance(section, dict):
        try:
            return translate_deepspeed(section, str(path), precision, path.parent)
        except UserError as error:
            problems.append(str(error))
    elif section:
        if distributed_type == "DEEPSPEED":
            reason = "a mapping is expected"
        else:
            reason = "it needs distributed_type: DEEPSPEED"
        problems.append(f"{where['deepspeed_config']}: deepspeed_config: {reason}")
    return None


def _refuse_broken_json(path: Path) -> None:
    """Raises `UserError` if a .json file does not hold JSON, or holds an empty object."""
    try:
        if parse_json(read_bounded(path).decode("utf-8-sig")) == {}:
            raise UserError(
                f"{path}: an empty object; DeepSpeed's keys or Accelerate's are expected"
            )
    except JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: not JSON: {error.msg}") from None
    except (OSError, ValueError):  # `read_entries` reports these
        return


def _list_ignored(mesh: Mapping[str, Any], fp8: Mapping[str, Any]) -> Iterator[str]:
    """Yields a line for each group of settings in a file that have no effect.

    `mesh` and `fp8` are the sections parallelism_config and fp8_config, by keys without prefix.
    """
    mesh_settings = []
    for key, default in OTHER_MESH_KEYS.items():
        if mesh.get(key) is not None and str(mesh[key]).lower() != str(default).lower():
            mesh_settings.append(f"{key}: {mesh[key]}")
    if mesh_settings:
        yield f"without effect here: {', '.join(mesh_settings)}, as ranks trade tokens for heads"
    backend_keys = sorted(key for key in fp8.keys() & OTHER_BACKEND_KEYS if fp8[key] is not None)
    if backend_keys:
        yield f"without effect here: {', '.join(backend_keys)} of fp8_config: not torchao's"
    recipe_name = fp8.get("recipe_name")
    gathers_fp8 = str(fp8.get("enable_fsdp_float8_all_gather")).lower() == "true"
    if recipe_name not in (None, "tensorwise") and gathers_fp8:
        yield (
            "without effect here: enable_fsdp_float8_all_gather, as torchao gathers in bf16 under "
            f"recipe_name: {recipe_name}"
        )


def _read_deepspeed_file(path: Path) -> Settings:
    """Reads DeepSpeed's own JSON file, which was given in place of an Accelerate file."""
    translation = translate_deepspeed(
        {"deepspeed_config_file": str(path)}, source=str(path), mixed_precision=None
    )
    if translation.mixed_precision is None:
        line = (
            "mixed_precision: no, as the file leaves it to a trainer; set bf16.enabled: true in it "
            "for bf16"
        )
        translation = replace(translation, lines=(*translation.lines, line))
    settings = Settings(
        source=str(path),
        distributed_type="DEEPSPEED",
        mixed_precision="no",
        use_cpu=False,
        fsdp={},
        mesh={},
    )
    return _add_translation(settings, translation)


def _add_translation(settings: Settings, translation: Translation) -> Settings:
    """Returns `settings` with the layout and precision that DeepSpeed's settings were translated
    into.
    """
    return replace(
        settings,
        distributed_type=translation.distributed_type,
        mixed_precision=translation.mixed_precision or settings.mixed_precision,
        fsdp=settings.fsdp | translation.fsdp,
        translated=(*settings.translated, *translation.lines),
        asked=translation.asked,
    )


def _read_section(
    values: dict[str, Any],
    name: str,
    prefix: str,
    known: set[str],
    places: dict[str, str],
    problems: list[str],
) -> dict[str, Any]:
    """Reads a section of an Accelerate file.

    Args:
        values: The file's top-level keys and values.
        name: The section, such as fsdp_config.
        prefix: The prefix that the section's keys may have.
        known: The section's known keys, without the prefix.
        places: Key or `section.key` -> FILE:LINE. The section's keys are added without the prefix.
        problems: A sentence is added to it for each mistake.

    Returns:
        The section's values, by keys without the prefix. Empty if the section is missing or is not
        a mapping.
    """
    section = values.get(name) or {}
    if not isinstance(section, dict):
        problems.append(f"{places[name]}: {name}: a mapping is expected")
        return {}
    settings = {str(key).removeprefix(prefix): value for key, value in section.items()}
    places |= {str(key).removeprefix(prefix): places[f"{name}.{key}"] for key in section}
    for key in settings.keys() - known:
        close = difflib.get_close_matches(key, known, n=1)
        if key in IN_RECIPE:
            hint = f"it is {IN_RECIPE[key]} of the recipe; move it there"
        elif close:
            hint = f"did you mean {prefix}{close[0]}?"
        else:
            hint = f"known: {', '.join(sorted(prefix + known_key for known_key in known))}"
        problems.append(f"{places[key]}: {name}.{prefix}{key}: no such key; {hint}")
    for key in settings.keys() & UNSUPPORTED.keys():
        if settings[key]:
            problems.append(f"{places[key]}: {name}.{prefix}{key}: {UNSUPPORTED[key]}")
    return settings


def _explain_unknown_key(key: str) -> str:
    """Says what to do about a top-level key that Accelerate does not have."""
    if key in recipe_keys():
        return "a recipe's key, and this is an Accelerate config; move it to the recipe"
    close = difflib.get_close_matches(key, ACCELERATE_KEYS, n=1)
    if close:
        return f"no such key; did you mean {close[0]}?"
    return "no such key of an Accelerate config; remove it"


def read_environment(environ: Mapping[str, str]) -> Settings | None:
    """Reads the settings that the launcher exported as environment variables.

    The launcher takes them from its --config_file, its options, or variables that were set before.

    Returns:
        The settings; None if they ask for no FSDP, no DeepSpeed and no mesh.

    Raises:
        UserError: The variables ask for something that is not supported.
    """
    source = "the launcher's settings"
    problems = [f"{source}: {OTHER_TYPES[name]}" for name in OTHER_TYPES if _uses(name, environ)]
    if problems:
        raise UserError.of(problems)
    precision = environ.get("ACCELERATE_MIXED_PRECISION", "no")
    mesh = {}
    if _uses("PARALLELISM_CONFIG", environ):
        mesh = _read_variables(MESH_KEYS, environ)
    settings = Settings(
        source=source,
        distributed_type="FSDP",
        mixed_precision=precision,
        use_cpu=_uses("CPU", environ),
        fsdp={},
        mesh=mesh,
        fp8=_read_fp8_environment(environ),
    )
    if _uses("DEEPSPEED", environ):
        section = _read_variables(VARIABLES, environ)
        # the launcher says no where its file has no mixed_precision too, and lists what it has
        in_file = "mixed_precision" in environ.get("ACCELERATE_CONFIG_DS_FIELDS", "").split(",")
        given = precision if in_file or precision != "no" else None
        return _add_translation(settings, translate_deepspeed(section, source, given))
    if not _uses("FSDP", environ):
        has_sizes = any(str(size) != "1" for size in mesh.values())
        if has_sizes:  # see `Settings.has_sizes_alone`
            return replace(settings, distributed_type="MULTI_GPU")
        return None
    fsdp = _read_variables(FSDP_KEYS, environ)
    # The launcher exports the keys of both versions; a key of the other version is dropped.
    if str(fsdp.get("version", "1")) == "2":
        keys_of_other_version = ["sharding_strategy", "forward_prefetch", "use_orig_params"]
    else:
        keys_of_other_version = ["reshard_after_forward"]
    for key in keys_of_other_version:
        fsdp.pop(key, None)
    return replace(settings, fsdp=fsdp)


def _uses(feature: str, environ: Mapping[str, str]) -> bool:
    """Whether the launcher, or a person, has turned on ACCELERATE_USE_<feature>."""
    value = environ.get(f"ACCELERATE_USE_{feature}", "false")
    return value.lower() in ("true", "1", "yes", "y", "on", "t")  # as Accelerate reads it


def _read_variables(names: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Returns {key: value} for each key of `names` whose variable is set in `environ`."""
    return {key: environ[variable] for key, variable in names.items() if variable in environ}


def _read_fp8_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Rebuilds the fp8_config section from the launcher's environment variables."""
    booleans = {"1": "true", "0": "false"}  # as the launcher writes them
    section = _read_variables(FP8_KEYS, environ)
    return {key: booleans.get(value, value) for key, value in section.items()}


ACCELERATE_CONFIGS = shipped_folder("accelerate_configs")

# The fields of `Sharding` in which --config and the launcher's settings must agree -> the field's
# name in a message.
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


def read_sharding(
    config: str | None, accelerate_config: str | None, environ: Mapping[str, str]
) -> Sharding:
    """Reads the layout of this run from the first source that gives one.

    The sources in order: `config`, the launcher's settings in `environ`, `accelerate_config`, and
    the number of processes (several are DDP, one is single). ACCELERATE_USE_CPU in `environ` adds
    the CPU to any of them. Whether the layout works on the launched ranks is checked later, by the
    rules of `config.compatibility`.

    Args:
        config: --config of the command: a path or a shipped file's name.
        accelerate_config: The recipe's accelerate_config: a path or a shipped file's name.
        environ: The environment variables of the process.

    Raises:
        UserError: A file has mistakes, or `config` and the launcher's settings disagree.
    """
    launched = read_environment(environ)
    file = config
    if file is None and launched is None:
        file = accelerate_config
    if file is not None:
        settings = read_file(find_file(file, ACCELERATE_CONFIGS, "Accelerate config"))
    else:
        settings = launched or _read_plain_launch(environ)
    sharding = _interpret(settings)
    if config is not None and launched is not None:
        if launched.has_sizes_alone:
            # The variables give no layout, so the file's stands in: only the mesh can differ.
            launched = replace(settings, mesh=launched.mesh, source=launched.source, places={})
        _refuse_disagreement(sharding, _interpret(launched))
    return replace(sharding, use_cpu=sharding.use_cpu or _uses("CPU", environ))


def _read_plain_launch(environ: Mapping[str, str]) -> Settings:
    """Returns the settings of a launch without an Accelerate file: DDP for several processes."""
    processes = int(environ.get("WORLD_SIZE", "1"))
    return Settings(
        source=PLAIN_LAUNCH,
        distributed_type="MULTI_GPU" if processes > 1 else "NO",
        mixed_precision=environ.get("ACCELERATE_MIXED_PRECISION", "no"),
        use_cpu=False,
        fsdp={},
        mesh={},
        fp8=_read_fp8_environment(environ),
    )


def _interpret(settings: Settings) -> Sharding:
    """Converts raw settings to a `Sharding`; raises one `UserError` for all wrong values."""
    reader = _SettingsReader(settings)
    layout = _find_layout(reader)
    is_fp8 = settings.mixed_precision == "fp8"
    precision = "bf16" if is_fp8 else settings.mixed_precision
    if precision not in get_args(MixedPrecision):
        reader.add_problem(
            "mixed_precision",
            f"mixed_precision: {precision} is not supported; no, bf16, fp16 or fp8",
        )
    sizes = {key: reader.read_integer(key, settings.mesh, at_least=1) for key in MESH_KEYS}
    _check_mesh(reader, layout, sizes)
    wrapping = reader.read_choice("auto_wrap_policy", get_args(Wrapping), "TRANSFORMER_BASED_WRAP")
    sharding = Sharding(
        layout=layout,
        mixed_precision=cast(MixedPrecision, precision),
        fp8=reader.read_fp8() if is_fp8 else None,
        strategy=_find_strategy(layout, sizes["dp_replicate_size"], reader),
        replicate_size=sizes["dp_replicate_size"],
        shard_size=sizes["dp_shard_size"],
        sequence_parallel_size=(sizes["cp_size"] or 1) * (sizes["sp_size"] or 1),
        tensor_parallel_size=sizes["tp_size"] or 1,
        wrapping=cast(Wrapping, wrapping),
        wrap_classes=reader.read_names("transformer_layer_cls_to_wrap"),
        min_num_params=(
            reader.read_integer("min_num_params", settings.fsdp) or DEFAULT_MIN_NUM_PARAMS
        ),
        activation_checkpointing=reader.read_boolean("activation_checkpointing"),
        cpu_offload=reader.read_boolean("offload_params"),
        forward_prefetch=reader.read_boolean("forward_prefetch"),
        use_cpu=settings.use_cpu,
        num_machines=settings.num_machines,
        source=settings.source,
        translated=settings.translated,
        asked=settings.asked,
        places=settings.places,
    )
    if sharding.cpu_offload and not sharding.is_fsdp:
        text = "fsdp_offload_params: needs FSDP; set distributed_type: FSDP, or remove the key"
        reader.add_problem("offload_params", text)
    if layout == "fsdp2" and sharding.forward_prefetch:
        text = "fsdp_forward_prefetch: FSDP2 has none; remove the key, or set fsdp_version: 1"
        reader.add_problem("forward_prefetch", text)
    is_given = "use_orig_params" in settings.fsdp
    if layout == "fsdp1" and is_given and not reader.read_boolean("use_orig_params"):
        text = "fsdp_use_orig_params: always true here; remove the key"
        reader.add_problem("use_orig_params", text)
    if reader.problems:
        raise UserError.of(reader.problems)
    return sharding


def _find_layout(reader: "_SettingsReader") -> Layout:
    """Returns the layout by distributed_type and, under FSDP, by fsdp_version (default 1)."""
    settings = reader.settings
    layout = LAYOUTS[settings.distributed_type]
    if layout != "fsdp2":
        return layout
    version = str(settings.fsdp.get("version", 1))
    if version not in ("1", "2"):
        reader.add_problem("version", f"fsdp_version: {version} is not a version; 1 or 2")
    return "fsdp1" if version == "1" else "fsdp2"


def _check_mesh(reader: "_SettingsReader", layout: Layout, sizes: Mapping[str, int | None]) -> None:
    """Adds a problem for each size above 1 without FSDP2, and for cp_size with sp_size.

    `sizes`: the sizes of MESH_KEYS; None: not set.
    """
    sizes_above_1 = {key: size for key, size in sizes.items() if size is not None and size > 1}
    if layout != "fsdp2":
        advice = "set distributed_type: FSDP and fsdp_version: 2, or the size to 1"
        for key, size in sizes_above_1.items():
            reader.add_problem(key, f"{key}: {size} needs FSDP2; {advice}")
    elif {"cp_size", "sp_size"} <= sizes_above_1.keys():
        both = f"cp_size: {sizes['cp_size']} and sp_size: {sizes['sp_size']}"
        text = f"{both} both divide the tokens of a row; set one of them to 1"
        reader.add_problem("sp_size", text)


def _find_strategy(layout: Layout, replicas: int | None, reader: "_SettingsReader") -> Strategy:
    """Returns the sharding strategy, and adds a problem for a key that the FSDP version lacks.

    DDP and a single process get FULL_SHARD, the default of `Sharding`. `replicas`:
    dp_replicate_size of the mesh; None: not set.
    """
    fsdp = reader.settings.fsdp
    if layout == "fsdp1":
        # Under version 1 Accelerate takes a strategy's name or number from either key, and a
        # boolean from neither.
        if isinstance(fsdp.get("reshard_after_forward"), bool):
            text = (
                "fsdp_reshard_after_forward: version 1 takes no true or false; use "
                "fsdp_sharding_strategy"
            )
            reader.add_problem("reshard_after_forward", text)
            return "FULL_SHARD"
        if "sharding_strategy" in fsdp:
            key = "sharding_strategy"
        else:
            key = "reshard_after_forward"
        strategy = reader.read_choice(key, get_args(Strategy), "FULL_SHARD", is_numbered=True)
        return cast(Strategy, strategy)
    if layout == "fsdp2":
        if "sharding_strategy" in fsdp:
            reader.add_problem(
                "sharding_strategy",
                "fsdp_sharding_strategy: version 1's key; version 2 takes "
                "fsdp_reshard_after_forward (true: FULL_SHARD, false: SHARD_GRAD_OP) and "
                "parallelism_config for hybrid sharding",
            )
        reshards = reader.read_boolean("reshard_after_forward", default=True)
        is_hybrid = (replicas or 1) > 1
        if is_hybrid and not reshards:
            reader.add_problem(
                "reshard_after_forward",
                "fsdp_reshard_after_forward: hybrid sharding (dp_replicate_size above 1) frees the "
                "parameters of a layer after its forward; set it to true (under DeepSpeed, "
                "zero_stage: 3), or dp_replicate_size: 1",
            )
        if is_hybrid:
            return "HYBRID_SHARD"
        return "FULL_SHARD" if reshards else "SHARD_GRAD_OP"
    return "FULL_SHARD"


@dataclass(frozen=True, slots=True)
class _SettingsReader:
    """Reads typed values from raw settings, and collects a problem for each wrong value.

    A YAML file's values have types already; those of an environment are all strings. After a
    problem a method still returns a value, so that all problems are found in one pass.
    """

    settings: Settings
    problems: list[str] = field(default_factory=list)

    def add_problem(self, key: str, text: str) -> None:
        self.problems.append(f"{self.settings.place_of(key)}: {text}")

    def read_boolean(self, key: str, default: bool = False, is_fp8: bool = False) -> bool:
        """Reads a key of fsdp_config, or of fp8_config if `is_fp8`; False if the value is wrong."""
        section = self.settings.fp8 if is_fp8 else self.settings.fsdp
        value = section.get(key, default)
        if str(value).lower() not in ("true", "false"):
            prefix = "fp8_config." if is_fp8 else "fsdp_"
            self.add_problem(key, f"{prefix}{key}: {value} does not fit; true or false")
        return str(value).lower() == "true"

    def read_integer(self, key: str, section: Mapping[str, Any], at_least: int = 0) -> int | None:
        """Reads a whole number; None if it is not set or is wrong."""
        value = section.get(key)
        if value is None:
            return None
        if str(value).isdecimal() and int(value) >= at_least:
            return int(value)
        self.add_problem(
            key, f"{key}: {value} does not fit; a whole number of at least {at_least} is expected"
        )
        return None

    def read_choice(
        self, key: str, known: Sequence[str], default: str, *, is_numbered: bool = False
    ) -> str:
        """Reads a name of `known` from fsdp_config, in upper case; a wrong name is returned as is.

        `is_numbered`: whether the value may also be the name's number in `known`, from 1.
        """
        value = str(self.settings.fsdp.get(key, default)).upper()
        if is_numbered:
            names = {str(number): name for number, name in enumerate(known, 1)}
            value = names.get(value, value)
        if value not in known:
            text = f"fsdp_{key}: {value} is not known; use one of {', '.join(known)}"
            self.add_problem(key, text)
        return value

    def read_names(self, key: str) -> Names:
        """Reads a list of names, or names separated by commas; empty if it is not set or wrong."""
        value = self.settings.fsdp.get(key) or ""
        if isinstance(value, str):
            value = value.split(",")
        if not isinstance(value, list):
            self.add_problem(key, f"fsdp_{key}: {value} does not fit; names are expected")
            return ()
        names = (str(name).strip() for name in value)
        return tuple(filter(None, names))

    def read_fp8(self) -> Fp8:
        """Reads fp8_config; the default `Fp8` if the backend is not torchao."""
        section = self.settings.fp8
        backend = str(section.get("backend") or "AO").upper()
        name = str(section.get("recipe_name") or "tensorwise").lower()
        if backend not in ("AO", "NO"):
            other = OTHER_BACKENDS.get(backend, backend)
            self.add_problem(
                "backend",
                f"fp8_config.backend: {other} is not supported; set it to AO, which is torchao",
            )
            return Fp8()
        if name not in get_args(Fp8Recipe):
            known = ", ".join(get_args(Fp8Recipe))
            text = f"fp8_config.recipe_name: {name} is not one of torchao's; use one of {known}"
            self.add_problem("recipe_name", text)
        gathers_fp8 = self.read_boolean("enable_fsdp_float8_all_gather", default=True, is_fp8=True)
        pads_inner_dim = self.read_boolean("pad_inner_dim", default=True, is_fp8=True)
        return Fp8(cast(Fp8Recipe, name), gathers_fp8, pads_inner_dim)


def _describe_value(value: Any) -> str:
    """Writes the value of a `Sharding` field for a message."""
    if isinstance(value, Mapping):
        return describe_sizes(value)
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else repr(value)


def _refuse_disagreement(config: Sharding, launched: Sharding) -> None:
    """Raises `UserError` if --config and the launcher's settings differ; it names both values."""
    problems = []
    for field_name, title in COMPARED.items():
        in_config = getattr(config, field_name)
        in_launch = getattr(launched, field_name)
        if in_config != in_launch:
            problems.append(
                f"{config.source}: {title} is {_describe_value(in_config)}, but {launched.source} "
                f"say {_describe_value(in_launch)}; remove --config, give both the same file, or "
                "unset the variables that say so"
            )
    if problems:
        raise UserError.of(problems)
