"""The keys and values of an Accelerate YAML, or of the environment that its launcher makes of one, not yet interpreted.

Accelerate itself ignores a mistyped key inside fsdp_config; here it is an error.
"""

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from finetune.config.deepspeed_file import JSON_KEYS, VARIABLES, Translation, translate_deepspeed
from finetune.config.unknown_keys import ACCELERATE_KEYS, IN_RECIPE
from finetune.config.yaml_file import read_entries
from finetune.distributed.fp8 import FP8_KEYS, OTHER_BACKEND_KEYS, read_fp8_environment
from finetune.errors import UserError
from finetune.recipe.keys import recipe_keys

# Sections of other libraries. Accelerate writes them empty too; only a section with content asks for something.
OTHER_SECTIONS = {
    "megatron_lm_config": "Megatron-LM is not supported; use an FSDP config",
    "dynamo_config": "set torch_compile: true in the recipe, and remove this section",
    "mpirun_config": "mpirun is not supported as a launcher; start the ranks with accelerate launch or torchrun",
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
# Accepted without effect: weights are always read in slices, checkpoints are always sharded, backward prefetch is torch's
# default.
SUPERSEDED = frozenset({"cpu_ram_efficient_loading", "sync_module_states", "state_dict_type", "backward_prefetch"})
UNSUPPORTED = {
    "ignored_modules": "every module is sharded here; remove the key",
    "activation_checkpointing_offload": "not supported here; remove the key",
}
MESH_KEYS = {
    key: f"PARALLELISM_CONFIG_{key.upper()}"
    for key in ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
}
# Accepted without effect, with Accelerate's defaults: sequences are divided by one method here, whatever a file names.
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
    """What a file or the launcher's environment states, before it is interpreted; keys of `fsdp` and `mesh` without prefixes."""

    source: str
    distributed_type: str
    mixed_precision: str
    use_cpu: bool
    fsdp: dict[str, Any]
    mesh: dict[str, Any]
    num_machines: int = 1
    fp8: dict[str, Any] = field(default_factory=dict)  # keys without prefixes
    translated: tuple[str, ...] = ()  # what was another engine's, and what became of it; what has no effect
    asked: tuple[tuple[str, float], ...] = ()  # (a recipe's key, the number that the file gives for it)
    places: Mapping[str, str] = field(default_factory=dict)  # of keys without prefixes, with their lines

    def place_of(self, key: str) -> str:
        """Where `key` is stated, to begin a message with: the file and its line, or the source alone."""
        return self.places.get(key, self.source)

    @property
    def has_sizes_alone(self) -> bool:
        """Whether the launcher states the sizes of a mesh and no layout, as variables do that a person has set."""
        return self.distributed_type == "MULTI_GPU" and bool(self.mesh) and not self.translated


def read_file(path: Path) -> Settings:
    """The settings of a file; raises one `UserError` for all mistakes in its keys."""
    if path.suffix == ".json":
        _refuse_broken_json(path)
    entries, problems = read_entries(path)
    values = {entry.key: entry.value for entry in entries}
    where = {entry.key: entry.where for entry in entries}
    where |= {f"{entry.key}.{key}": place for entry in entries for key, place in entry.places.items()}
    if values.keys() & {"model_name_or_path", "model_config", "datasets"} and not values.keys() & {"distributed_type"}:
        raise UserError(f"{path}: this is a recipe; pass it as --recipe, and an Accelerate config as --config")
    if "zero_optimization" in values or (values and not values.keys() - JSON_KEYS):  # DeepSpeed's own file
        return _read_deepspeed_file(path)
    if values.get("compute_environment") == "AMAZON_SAGEMAKER":
        raise UserError(f"{where['compute_environment']}: SageMaker is not supported; use a file for LOCAL_MACHINE")
    for key in values.keys() - ACCELERATE_KEYS - OTHER_SECTIONS.keys():
        problems.append(f"{where[key]}: {key}: {_explain_unknown_key(key)}")
    for key in values.keys() & OTHER_SECTIONS.keys():
        if values[key]:
            problems.append(f"{where[key]}: {key}: {OTHER_SECTIONS[key]}")
    fsdp = _read_section(values, "fsdp_config", "fsdp_", {*FSDP_KEYS, *SUPERSEDED, *UNSUPPORTED}, where, problems)
    mesh_keys = {*MESH_KEYS, *OTHER_MESH_KEYS}
    mesh = _read_section(values, "parallelism_config", "parallelism_config_", mesh_keys, where, problems)
    fp8 = _read_section(values, "fp8_config", "fp8_", {*FP8_KEYS, *OTHER_BACKEND_KEYS}, where, problems)
    if fp8 and values.get("mixed_precision") != "fp8":
        problems.append(
            f"{where['fp8_config']}: fp8_config: it needs mixed_precision: fp8; set that, or remove the section"
        )
    distributed_type = str(values.get("distributed_type") or "NO").upper()  # YAML 1.1 reads a bare NO as false
    if distributed_type not in DISTRIBUTED_TYPES:
        reason = OTHER_TYPES.get(distributed_type, f"not supported; one of {', '.join(DISTRIBUTED_TYPES)}")
        problems.append(f"{where['distributed_type']}: distributed_type: {distributed_type}: {reason}")
    precision = values.get("mixed_precision")
    precision = "no" if precision is False else precision  # YAML 1.1 reads a bare no as false
    translation = None
    section = values.get("deepspeed_config") or {}
    if distributed_type == "DEEPSPEED" and isinstance(section, dict):
        try:
            translation = translate_deepspeed(section, str(path), precision, path.parent)
        except UserError as error:
            problems.append(str(error))
    elif section:
        stated = "a mapping is expected" if distributed_type == "DEEPSPEED" else "it needs distributed_type: DEEPSPEED"
        problems.append(f"{where['deepspeed_config']}: deepspeed_config: {stated}")
    machines = values.get("num_machines") or 1
    if isinstance(machines, bool) or not str(machines).isdigit():
        problems.append(f"{where['num_machines']}: num_machines: {machines} does not fit; a whole number is expected")
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
    return settings if translation is None else _with_translation(settings, translation)


def _plain_places(where: Mapping[str, str]) -> dict[str, str]:
    """The places of keys by their names without section and prefix.

    >>> _plain_places({"parallelism_config.parallelism_config_tp_size": "a.yaml:3", "fsdp_config.fsdp_version": "a.yaml:1"})
    {'tp_size': 'a.yaml:3', 'version': 'a.yaml:1'}
    """
    plain = {}
    for name, place in where.items():
        section, _, key = name.rpartition(".")
        prefix = "parallelism_config_" if section == "parallelism_config" else section.removesuffix("config")
        plain[key.removeprefix(prefix)] = place
    return plain


def _refuse_broken_json(path: Path) -> None:
    try:
        if json.loads(path.read_text(encoding="utf-8-sig")) == {}:
            raise UserError(f"{path}: an empty object; DeepSpeed's keys or Accelerate's are expected")
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: not JSON: {error.msg}") from None
    except (OSError, UnicodeDecodeError):  # reported where the file is read
        return


def _list_ignored(mesh: Mapping[str, Any], fp8: Mapping[str, Any]) -> Iterator[str]:
    """What a file asks for and has no effect, a line each."""
    sequences = [
        f"{key}: {mesh[key]}"
        for key, default in OTHER_MESH_KEYS.items()
        if mesh.get(key) is not None and str(mesh[key]).lower() != str(default).lower()
    ]
    if sequences:
        yield f"without effect here: {', '.join(sequences)}, as ranks trade tokens for heads"
    others = sorted(key for key in fp8.keys() & OTHER_BACKEND_KEYS if fp8[key] is not None)
    if others:
        yield f"without effect here: {', '.join(others)} of fp8_config: not torchao's"
    recipe_name, gathers = fp8.get("recipe_name"), fp8.get("enable_fsdp_float8_all_gather")
    if recipe_name not in (None, "tensorwise") and str(gathers).lower() == "true":
        yield f"without effect here: enable_fsdp_float8_all_gather, as torchao gathers in bf16 under recipe_name: {recipe_name}"


def _read_deepspeed_file(path: Path) -> Settings:
    """The settings of DeepSpeed's own JSON file, named in place of an Accelerate file."""
    translation = translate_deepspeed({"deepspeed_config_file": str(path)}, str(path), None)
    if translation.mixed_precision is None:
        left = "mixed_precision: no, as the file leaves it to a trainer; set bf16.enabled: true in it for bf16"
        translation = replace(translation, lines=(*translation.lines, left))
    return _with_translation(Settings(str(path), "DEEPSPEED", "no", False, {}, {}), translation)


def _with_translation(settings: Settings, translation: Translation) -> Settings:
    return replace(
        settings,
        distributed_type=translation.distributed_type,
        mixed_precision=translation.mixed_precision or settings.mixed_precision,
        fsdp=settings.fsdp | translation.fsdp,
        translated=(*settings.translated, *translation.lines),
        asked=translation.asked,
    )


def _read_section(
    values: dict[str, Any], name: str, prefix: str, known: set[str], where: dict[str, str], problems: list[str]
) -> dict[str, Any]:
    section = values.get(name) or {}
    if not isinstance(section, dict):
        problems.append(f"{where[name]}: {name}: a mapping is expected")
        return {}
    plain = {str(key).removeprefix(prefix): value for key, value in section.items()}
    places = {str(key).removeprefix(prefix): where[f"{name}.{key}"] for key in section}
    for key in plain.keys() - known:
        close = difflib.get_close_matches(key, known, n=1)
        hint = (
            f"did you mean {prefix}{close[0]}?" if close else f"known: {', '.join(sorted(prefix + k for k in known))}"
        )
        if key in IN_RECIPE:
            hint = f"it is {IN_RECIPE[key]} of the recipe; move it there"
        problems.append(f"{places[key]}: {name}.{prefix}{key}: no such key; {hint}")
    for key in plain.keys() & UNSUPPORTED.keys():
        if plain[key]:
            problems.append(f"{places[key]}: {name}.{prefix}{key}: {UNSUPPORTED[key]}")
    return plain


def _explain_unknown_key(key: str) -> str:
    if key in recipe_keys():
        return "a recipe's key, and this is an Accelerate config; move it to the recipe"
    close = difflib.get_close_matches(key, ACCELERATE_KEYS, n=1)
    return f"no such key; did you mean {close[0]}?" if close else "no such key of an Accelerate config; remove it"


def read_environment(environ: Mapping[str, str]) -> Settings | None:
    """The FSDP or DeepSpeed settings that the launcher exported; None where it exported none.

    Raises `UserError` where it asks for what is not supported: planned as something else, that would be ignored.
    """
    source = "the launcher's settings"  # of its --config_file, its options, or variables that were set before

    def asks_for(name: str) -> bool:
        return environ.get(f"ACCELERATE_USE_{name}", "false").lower() == "true"

    problems = [f"{source}: {OTHER_TYPES[name]}" for name in OTHER_TYPES if asks_for(name)]
    if problems:
        raise UserError.of(problems)
    precision, use_cpu = environ.get("ACCELERATE_MIXED_PRECISION", "no"), asks_for("CPU")
    mesh = {key: environ[variable] for key, variable in MESH_KEYS.items() if variable in environ}
    mesh = mesh if asks_for("PARALLELISM_CONFIG") else {}
    if asks_for("DEEPSPEED"):
        section = {key: environ[variable] for key, variable in VARIABLES.items() if variable in environ}
        settings = Settings(source, "DEEPSPEED", precision, use_cpu, {}, mesh, fp8=read_fp8_environment(environ))
        return _with_translation(settings, translate_deepspeed(section, source, precision))
    if not asks_for("FSDP"):
        divided = [key for key in ("tp_size", "cp_size", "sp_size") if str(mesh.get(key, "1")) != "1"]
        return Settings(source, "MULTI_GPU", precision, use_cpu, {}, mesh) if divided else None
    fsdp = {key: environ[variable] for key, variable in FSDP_KEYS.items() if variable in environ}
    version = str(fsdp.get("version", "1"))
    # The launcher exports both of these whatever the version; each version reads one.
    fsdp.pop("sharding_strategy" if version == "2" else "reshard_after_forward", None)
    if version == "2":
        fsdp.pop("forward_prefetch", None)
        fsdp.pop("use_orig_params", None)
    return Settings(source, "FSDP", precision, use_cpu, fsdp, mesh, fp8=read_fp8_environment(environ))
