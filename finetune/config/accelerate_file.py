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

# Sections of other libraries. Accelerate writes them empty too; only a section with content asks
# for something.
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
DISTRIBUTED_TYPES = ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP", "DEEPSPEED")
# Keys of fsdp_config without their fsdp_ prefix -> the variable that the launcher makes of them.
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
# Keys of fp8_config without their fp8_ prefix -> the variable that the launcher makes of them.
# `recipe_name` is torchao's: Accelerate itself knows the first recipe only, but its launcher
# exports the key like the others.
FP8_KEYS = {
    "backend": "ACCELERATE_FP8_BACKEND",
    "recipe_name": "ACCELERATE_FP8_RECIPE_NAME",
    "enable_fsdp_float8_all_gather": "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER",
    "pad_inner_dim": "ACCELERATE_FP8_PAD_INNER_DIM",
}
# Keys for the other backends. The launcher exports some of them whatever the backend.
OTHER_BACKEND_KEYS = frozenset(
    """
    use_autocast_during_eval margin interval format amax_history_len amax_history_length
    amax_compute_algo amax_compute_algorithm override_linear_precision opt_level
    optimization_level
    """.split()  # noqa: SIM905 - a name a line would be a page
)
OTHER_BACKENDS = {"TE": "Transformer Engine", "MSAMP": "MS-AMP"}
# Without effect: weights are read in slices, checkpoints sharded, and backward prefetch is torch's
# default.
SUPERSEDED = frozenset(
    {"cpu_ram_efficient_loading", "sync_module_states", "state_dict_type", "backward_prefetch"}
)
UNSUPPORTED = {
    "ignored_modules": "every module is sharded here; remove the key",
    "activation_checkpointing_offload": "not supported here; remove the key",
}
MESH_KEYS = {
    key: f"PARALLELISM_CONFIG_{key.upper()}"
    for key in ("dp_replicate_size", "dp_shard_size", *GROUP_KEYS)
}
# Accepted without effect, with Accelerate's defaults: sequences are divided by one method here,
# whatever a file names.
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
    """The settings of a file or the environment, before they are interpreted.

    Keys of `fsdp`, `mesh`, `fp8` and `places` have no prefix.
    """

    source: str
    distributed_type: str
    mixed_precision: str
    use_cpu: bool
    fsdp: dict[str, Any]
    mesh: dict[str, Any]
    num_machines: int = 1
    fp8: dict[str, Any] = field(default_factory=dict)
    # a line for each setting of another engine, with what it became, and for each without effect
    translated: tuple[str, ...] = ()
    # (a recipe's key, the number that the file gives for it)
    asked: tuple[tuple[str, float], ...] = ()
    # key -> the file and its line
    places: Mapping[str, str] = field(default_factory=dict)

    def place_of(self, key: str) -> str:
        """Returns where `key` is stated, as a message begins: the file and its line, else the
        source.
        """
        return self.places.get(key, self.source)

    @property
    def has_sizes_alone(self) -> bool:
        """Whether these are sizes of a mesh without a layout, as variables that a person has set
        state them.
        """
        return self.distributed_type == "MULTI_GPU" and bool(self.mesh) and not self.translated


SECTION_KEYS = (  # (section, what its keys begin with, its keys)
    ("fsdp_config", "fsdp_", {*FSDP_KEYS, *SUPERSEDED, *UNSUPPORTED}),
    ("parallelism_config", "parallelism_config_", {*MESH_KEYS, *OTHER_MESH_KEYS}),
    ("fp8_config", "fp8_", {*FP8_KEYS, *OTHER_BACKEND_KEYS}),
)


def read_file(path: Path) -> Settings:
    """Reads the settings of a file; raises one `UserError` for all mistakes in its keys."""
    if path.suffix == ".json":
        _refuse_broken_json(path)
    entries, problems = read_entries(path)
    values = {entry.key: entry.value for entry in entries}
    where = _list_places(entries)
    _refuse_recipe(path, values)
    # DeepSpeed's own file
    if "zero_optimization" in values or (values and not values.keys() - JSON_KEYS):
        return _read_deepspeed_file(path)
    if values.get("compute_environment") == "AMAZON_SAGEMAKER":
        raise UserError(
            f"{where['compute_environment']}: SageMaker is not supported; use a file for "
            "LOCAL_MACHINE"
        )
    unknown = values.keys() - ACCELERATE_KEYS - OTHER_SECTIONS.keys()
    problems += [f"{where[key]}: {key}: {_explain_unknown_key(key)}" for key in unknown]
    problems += [
        f"{where[key]}: {key}: {text}" for key, text in OTHER_SECTIONS.items() if values.get(key)
    ]
    fsdp, mesh, fp8 = (
        _read_section(values, section, prefix, keys, where, problems)
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
        known = f"not supported; one of {', '.join(DISTRIBUTED_TYPES)}"
        reason = OTHER_TYPES.get(distributed_type, known)
        problems.append(
            f"{where['distributed_type']}: distributed_type: {distributed_type}: {reason}"
        )
    precision = values.get("mixed_precision")
    if precision is False:  # YAML 1.1 reads a bare no as false
        precision = "no"
    section = values.get("deepspeed_config") or {}
    translation = _translate_section(section, distributed_type, precision, path, where, problems)
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
        use_cpu=bool(values.get("use_cpu", False)),
        fsdp=fsdp,
        mesh=mesh,
        num_machines=int(machines),
        fp8=fp8,
        translated=tuple(_list_ignored(mesh, fp8)),
        places=_plain_places(where),
    )
    if translation is None:
        return settings
    return _with_translation(settings, translation)


def _list_places(entries: Iterable[Entry]) -> dict[str, str]:
    """Lists where each key stands; one of a section as `section.key`."""
    where = {entry.key: entry.where for entry in entries}
    for entry in entries:
        where |= {f"{entry.key}.{key}": place for key, place in entry.places.items()}
    return where


def _refuse_recipe(path: Path, values: Mapping[str, Any]) -> None:
    """Raises `UserError` where the file has the keys of a recipe."""
    has_recipe_keys = values.keys() & {"model_name_or_path", "model_config", "datasets"}
    if has_recipe_keys and "distributed_type" not in values:
        raise UserError(
            f"{path}: this is a recipe; pass it as --recipe, and an Accelerate config as --config"
        )


def _translate_section(
    section: Any,
    distributed_type: str,
    precision: str | None,
    path: Path,
    where: Mapping[str, str],
    problems: list[str],
) -> Translation | None:
    """Translates deepspeed_config; None where there is none, or where `problems` says what is wrong
    with it.
    """
    if distributed_type == "DEEPSPEED" and isinstance(section, dict):
        try:
            return translate_deepspeed(section, str(path), precision, path.parent)
        except UserError as error:
            problems.append(str(error))
    elif section:
        if distributed_type == "DEEPSPEED":
            stated = "a mapping is expected"
        else:
            stated = "it needs distributed_type: DEEPSPEED"
        problems.append(f"{where['deepspeed_config']}: deepspeed_config: {stated}")
    return None


def _plain_places(where: Mapping[str, str]) -> dict[str, str]:
    """Returns the places of keys by their names without section and prefix.

    >>> _plain_places(
    ...     {
    ...         "parallelism_config.parallelism_config_tp_size": "a.yaml:3",
    ...         "fsdp_config.fsdp_version": "a.yaml:1",
    ...     }
    ... )
    {'tp_size': 'a.yaml:3', 'version': 'a.yaml:1'}
    """
    plain = {}
    for name, place in where.items():
        section, _, key = name.rpartition(".")
        if section == "parallelism_config":
            prefix = "parallelism_config_"
        else:
            prefix = section.removesuffix("config")
        plain[key.removeprefix(prefix)] = place
    return plain


def _refuse_broken_json(path: Path) -> None:
    """Raises `UserError` where a file is no JSON, or an empty object."""
    try:
        if parse_json(read_bounded(path).decode("utf-8-sig")) == {}:
            raise UserError(
                f"{path}: an empty object; DeepSpeed's keys or Accelerate's are expected"
            )
    except JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: not JSON: {error.msg}") from None
    except (OSError, ValueError):  # reported where the file is read
        return


def _list_ignored(mesh: Mapping[str, Any], fp8: Mapping[str, Any]) -> Iterator[str]:
    """Yields a line for each thing that a file asks for and that has no effect."""
    sequences = []
    for key, default in OTHER_MESH_KEYS.items():
        if mesh.get(key) is not None and str(mesh[key]).lower() != str(default).lower():
            sequences.append(f"{key}: {mesh[key]}")
    if sequences:
        yield f"without effect here: {', '.join(sequences)}, as ranks trade tokens for heads"
    others = sorted(key for key in fp8.keys() & OTHER_BACKEND_KEYS if fp8[key] is not None)
    if others:
        yield f"without effect here: {', '.join(others)} of fp8_config: not torchao's"
    recipe_name = fp8.get("recipe_name")
    gathers = fp8.get("enable_fsdp_float8_all_gather")
    if recipe_name not in (None, "tensorwise") and str(gathers).lower() == "true":
        yield (
            "without effect here: enable_fsdp_float8_all_gather, as torchao gathers in bf16 under "
            f"recipe_name: {recipe_name}"
        )


def _read_deepspeed_file(path: Path) -> Settings:
    """Returns the settings of DeepSpeed's own JSON file, named in place of an Accelerate file."""
    translation = translate_deepspeed({"deepspeed_config_file": str(path)}, str(path), None)
    if translation.mixed_precision is None:
        left = (
            "mixed_precision: no, as the file leaves it to a trainer; set bf16.enabled: true in it "
            "for bf16"
        )
        translation = replace(translation, lines=(*translation.lines, left))
    return _with_translation(Settings(str(path), "DEEPSPEED", "no", False, {}, {}), translation)


def _with_translation(settings: Settings, translation: Translation) -> Settings:
    """Returns settings with what a DeepSpeed section or file was translated into."""
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
    where: dict[str, str],
    problems: list[str],
) -> dict[str, Any]:
    """Reads a section of an Accelerate file.

    Args:
        values: Of the file.
        name: The section, such as fsdp_config.
        prefix: What its keys may begin with.
        known: The keys that are read, without the prefix.
        where: Key, or `section.key` -> its place.
        problems: Gets a sentence for each mistake.

    Returns:
        The section's values by their keys without the prefix.
    """
    section = values.get(name) or {}
    if not isinstance(section, dict):
        problems.append(f"{where[name]}: {name}: a mapping is expected")
        return {}
    plain = {str(key).removeprefix(prefix): value for key, value in section.items()}
    places = {str(key).removeprefix(prefix): where[f"{name}.{key}"] for key in section}
    for key in plain.keys() - known:
        close = difflib.get_close_matches(key, known, n=1)
        if key in IN_RECIPE:
            hint = f"it is {IN_RECIPE[key]} of the recipe; move it there"
        elif close:
            hint = f"did you mean {prefix}{close[0]}?"
        else:
            hint = f"known: {', '.join(sorted(prefix + name for name in known))}"
        problems.append(f"{places[key]}: {name}.{prefix}{key}: no such key; {hint}")
    for key in plain.keys() & UNSUPPORTED.keys():
        if plain[key]:
            problems.append(f"{places[key]}: {name}.{prefix}{key}: {UNSUPPORTED[key]}")
    return plain


def _explain_unknown_key(key: str) -> str:
    """Says what to do about a key that an Accelerate file does not have."""
    if key in recipe_keys():
        return "a recipe's key, and this is an Accelerate config; move it to the recipe"
    close = difflib.get_close_matches(key, ACCELERATE_KEYS, n=1)
    if close:
        return f"no such key; did you mean {close[0]}?"
    return "no such key of an Accelerate config; remove it"


def read_environment(environ: Mapping[str, str]) -> Settings | None:
    """Reads the layout's settings that the launcher exported; None where it exported none.

    They come from its --config_file, its options, or variables that were set before.

    Raises `UserError` where it asks for what is not supported, which would else be ignored.
    """
    source = "the launcher's settings"

    def asks_for(name: str) -> bool:
        return environ.get(f"ACCELERATE_USE_{name}", "false").lower() == "true"

    problems = [f"{source}: {OTHER_TYPES[name]}" for name in OTHER_TYPES if asks_for(name)]
    if problems:
        raise UserError.of(problems)
    precision = environ.get("ACCELERATE_MIXED_PRECISION", "no")
    use_cpu = asks_for("CPU")
    mesh = {}
    if asks_for("PARALLELISM_CONFIG"):
        mesh = {key: environ[name] for key, name in MESH_KEYS.items() if name in environ}
    if asks_for("DEEPSPEED"):
        section = {
            key: environ[variable] for key, variable in VARIABLES.items() if variable in environ
        }
        settings = Settings(
            source, "DEEPSPEED", precision, use_cpu, {}, mesh, fp8=_read_fp8_environment(environ)
        )
        return _with_translation(settings, translate_deepspeed(section, source, precision))
    if not asks_for("FSDP"):
        divided = [key for key in GROUP_KEYS if str(mesh.get(key, "1")) != "1"]
        if divided:
            return Settings(source, "MULTI_GPU", precision, use_cpu, {}, mesh)
        return None
    fsdp = {key: environ[variable] for key, variable in FSDP_KEYS.items() if variable in environ}
    version = str(fsdp.get("version", "1"))
    # The launcher exports all of these whatever the version.
    if version == "2":
        of_other_version = ["sharding_strategy", "forward_prefetch", "use_orig_params"]
    else:
        of_other_version = ["reshard_after_forward"]
    for key in of_other_version:
        fsdp.pop(key, None)
    return Settings(
        source, "FSDP", precision, use_cpu, fsdp, mesh, fp8=_read_fp8_environment(environ)
    )


def _read_fp8_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Rebuilds the fp8_config section from the launcher's variables.

    The launcher writes 1 and 0 for true and false.
    """
    section = {key: environ[variable] for key, variable in FP8_KEYS.items() if variable in environ}
    return {key: {"1": "true", "0": "false"}.get(value, value) for key, value in section.items()}


ACCELERATE_CONFIGS = shipped_folder("accelerate_configs")

LAYOUTS: dict[str, Layout] = {
    "NO": "single",
    "MULTI_GPU": "ddp",
    "MULTI_CPU": "ddp",
    "FSDP": "fsdp2",
}

# What a file and the launcher's settings must agree on: by `Sharding`, and by the keys that state
# it.
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
    """Reads the layout of this run from the first of its sources.

    These are `config`, the launcher's settings in `environ`, `accelerate_config`, and what the
    launch implies: several processes are DDP, one is single. Whether the layout is possible on the
    launched ranks, `config.compatibility.refuse_problems` says.

    Args:
        config: The --config of the command.
        accelerate_config: The recipe's key.
        environ: The environment of the process.

    Raises:
        UserError: A file is wrong, or `config` and the launcher's settings disagree.
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
        stated = _read_plain_launch(environ)
    return _interpret(stated)


def _read_plain_launch(environ: Mapping[str, str]) -> Settings:
    """Returns the settings that a launch without an Accelerate file implies."""
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
    """Returns the settings as a `Sharding`; raises `UserError` for values that do not fit."""
    read = _SettingsReader(settings)
    layout = _find_layout(read)
    is_fp8 = settings.mixed_precision == "fp8"
    precision = "bf16" if is_fp8 else settings.mixed_precision
    if precision not in get_args(MixedPrecision):
        read.refuse(
            "mixed_precision",
            f"mixed_precision: {precision} is not supported; no, bf16, fp16 or fp8",
        )
    sizes = {key: read.integer(key, settings.mesh, at_least=1) for key in MESH_KEYS}
    _refuse_impossible_mesh(read, layout, sizes)
    policy = read.one_of("auto_wrap_policy", get_args(Wrapping), "TRANSFORMER_BASED_WRAP")
    sharding = Sharding(
        layout=layout,
        mixed_precision=cast(MixedPrecision, precision),
        fp8=read.fp8() if is_fp8 else None,
        strategy=_find_strategy(layout, sizes["dp_replicate_size"], read),
        replicate_size=sizes["dp_replicate_size"],
        shard_size=sizes["dp_shard_size"],
        sequence_parallel_size=(sizes["cp_size"] or 1) * (sizes["sp_size"] or 1),
        tensor_parallel_size=sizes["tp_size"] or 1,
        wrapping=cast(Wrapping, policy),
        wrap_classes=_list_wrapped(settings),
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
        text = "fsdp_forward_prefetch: FSDP2 has none; remove the key, or set fsdp_version: 1"
        read.refuse("forward_prefetch", text)
    has_orig_params = "use_orig_params" in settings.fsdp
    if layout == "fsdp1" and has_orig_params and not read.boolean("use_orig_params"):
        read.refuse("use_orig_params", "fsdp_use_orig_params: always true here; remove the key")
    if read.problems:
        raise UserError.of(read.problems)
    return sharding


def _find_layout(read: "_SettingsReader") -> Layout:
    """Returns the layout, of FSDP by its version."""
    layout = LAYOUTS[read.settings.distributed_type]
    if layout != "fsdp2":
        return layout
    version = str(read.settings.fsdp.get("version", 1))
    if version not in ("1", "2"):
        read.refuse("version", f"fsdp_version: {version} is not a version; 1 or 2")
    return "fsdp1" if version == "1" else "fsdp2"


def _list_wrapped(settings: Settings) -> Names:
    """Lists the classes of layers that are units, from a list or a text with commas."""
    classes = settings.fsdp.get("transformer_layer_cls_to_wrap") or ""
    listed = classes.split(",") if isinstance(classes, str) else classes
    names = (str(name).strip() for name in listed)
    return tuple(filter(None, names))


def _refuse_impossible_mesh(
    read: "_SettingsReader", layout: Layout, sizes: Mapping[str, int | None]
) -> None:
    """Adds to the problems of `read` what no layout, or not this one, can do.

    `sizes`: of the mesh, by its keys; None: not set.
    """
    divided = {}
    for key in GROUP_KEYS:
        size = sizes[key] or 1
        if size > 1:
            divided[key] = size
    if layout != "fsdp2":
        advice = "set distributed_type: FSDP and fsdp_version: 2, or the size to 1"
        for key, size in divided.items():
            read.refuse(key, f"{key}: {size} needs FSDP2; {advice}")
    elif {"cp_size", "sp_size"} <= divided.keys():
        both = f"cp_size: {sizes['cp_size']} and sp_size: {sizes['sp_size']}"
        read.refuse("sp_size", f"{both} both divide the tokens of a row; set one of them to 1")


def _find_strategy(layout: Layout, replicas: int | None, read: "_SettingsReader") -> Strategy:
    """Returns the sharding strategy by the keys that the layout's version of FSDP reads.

    `replicas`: the mesh's dp_replicate_size.
    """
    fsdp = read.settings.fsdp
    if layout == "fsdp1":
        # Accelerate's version 1 takes a strategy's name or number under either key, true or false
        # under neither.
        if isinstance(fsdp.get("reshard_after_forward"), bool):
            text = (
                "fsdp_reshard_after_forward: version 1 takes no true or false; use "
                "fsdp_sharding_strategy"
            )
            read.refuse("reshard_after_forward", text)
            return "FULL_SHARD"
        if "sharding_strategy" in fsdp:
            key = "sharding_strategy"
        else:
            key = "reshard_after_forward"
        return cast(Strategy, read.one_of(key, get_args(Strategy), "FULL_SHARD", numbered=True))
    if layout == "fsdp2":
        if "sharding_strategy" in fsdp:
            read.refuse(
                "sharding_strategy",
                "fsdp_sharding_strategy: version 1's key; version 2 takes "
                "fsdp_reshard_after_forward (true: FULL_SHARD, false: SHARD_GRAD_OP) and "
                "parallelism_config for hybrid sharding",
            )
        if (replicas or 1) > 1:
            return "HYBRID_SHARD"
        if read.boolean("reshard_after_forward", default=True):
            return "FULL_SHARD"
        return "SHARD_GRAD_OP"
    return "FULL_SHARD"


@dataclass(frozen=True, slots=True)
class _SettingsReader:
    """Values of a YAML, or of an environment (all strings), as the types that they mean."""

    settings: Settings
    problems: list[str] = field(default_factory=list)

    def refuse(self, key: str, text: str) -> None:
        self.problems.append(f"{self.settings.place_of(key)}: {text}")

    def boolean(self, key: str, default: bool = False, is_fp8: bool = False) -> bool:
        section = self.settings.fp8 if is_fp8 else self.settings.fsdp
        value = section.get(key, default)
        if str(value).lower() not in ("true", "false"):
            prefix = "fp8_config." if is_fp8 else "fsdp_"
            self.refuse(key, f"{prefix}{key}: {value} does not fit; true or false")
        return str(value).lower() == "true"

    def integer(self, key: str, section: Mapping[str, Any], at_least: int = 0) -> int | None:
        value = section.get(key)
        if value is None:
            return None
        if not isinstance(value, bool) and str(value).isdecimal() and int(value) >= at_least:
            return int(value)
        self.refuse(
            key, f"{key}: {value} does not fit; a whole number of at least {at_least} is expected"
        )
        return None

    def one_of(
        self, key: str, known: Sequence[str], default: str, *, numbered: bool = False
    ) -> str:
        value = str(self.settings.fsdp.get(key, default)).upper()
        if numbered:  # from 1 on
            value = {str(number): name for number, name in enumerate(known, 1)}.get(value, value)
        if value not in known:
            self.refuse(key, f"fsdp_{key}: {value} is not known; use one of {', '.join(known)}")
        return value

    def fp8(self) -> Fp8:
        """Returns the fp8_config section."""
        section = self.settings.fp8
        backend = str(section.get("backend") or "AO").upper()
        name = str(section.get("recipe_name") or "tensorwise").lower()
        if backend not in ("AO", "NO"):
            other = OTHER_BACKENDS.get(backend, backend)
            self.refuse(
                "backend",
                f"fp8_config.backend: {other} is not supported; set it to AO, which is torchao",
            )
            return Fp8()
        if name not in get_args(Fp8Recipe):
            known = ", ".join(get_args(Fp8Recipe))
            text = f"fp8_config.recipe_name: {name} is not one of torchao's; use one of {known}"
            self.refuse("recipe_name", text)
        gathers_fp8 = self.boolean("enable_fsdp_float8_all_gather", default=True, is_fp8=True)
        pads_inner_dim = self.boolean("pad_inner_dim", default=True, is_fp8=True)
        return Fp8(cast(Fp8Recipe, name), gathers_fp8, pads_inner_dim)


def _show(value: Any) -> str:
    """Returns a value of `Sharding` as a sentence names it."""
    if isinstance(value, Mapping):
        return describe_sizes(value)
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else repr(value)


def _refuse_disagreement(config: Sharding, launched: Sharding) -> None:
    """Raises `UserError` naming both values where the config and the launcher's settings differ."""
    problems = []
    for name, shown in COMPARED.items():
        in_config = getattr(config, name)
        in_launch = getattr(launched, name)
        if in_config != in_launch:
            problems.append(
                f"{config.source}: {shown} is {_show(in_config)}, but {launched.source} say "
                f"{_show(in_launch)}; remove --config, give both the same file, or unset the "
                "variables that say so"
            )
    if problems:
        raise UserError.of(problems)
