"""FP8 as Accelerate files ask for it: mixed_precision: fp8, with its fp8_config section. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from finetune.config.model_rules import FP8_MULTIPLE

if TYPE_CHECKING:
    from finetune.config.layout import Sharding

Fp8Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]

# Keys of fp8_config without their fp8_ prefix -> the variable that the launcher makes of them. `recipe_name` is torchao's:
# Accelerate itself knows the first recipe only, but its launcher exports the key like the others.
FP8_KEYS = {
    "backend": "ACCELERATE_FP8_BACKEND",
    "recipe_name": "ACCELERATE_FP8_RECIPE_NAME",
    "enable_fsdp_float8_all_gather": "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER",
    "pad_inner_dim": "ACCELERATE_FP8_PAD_INNER_DIM",
}
# Keys for the other backends. The launcher exports some of them whatever the backend.
OTHER_BACKEND_KEYS = frozenset(
    [
        "use_autocast_during_eval",
        "margin",
        "interval",
        "format",
        "amax_history_len",
        "amax_history_length",
        "amax_compute_algo",
        "amax_compute_algorithm",
        "override_linear_precision",
        "opt_level",
        "optimization_level",
    ]
)
OTHER_BACKENDS = {"TE": "Transformer Engine", "MSAMP": "MS-AMP"}


@dataclass(frozen=True, slots=True)
class Fp8:
    """How linear layers multiply in 8-bit floats, in torchao's terms. All else is computed in bf16."""

    recipe_name: Fp8Recipe = "tensorwise"
    enable_fsdp_float8_all_gather: bool = True  # where it applies: see `gathers_fp8`
    pad_inner_dim: bool = True

    @property
    def multiplies_weight_gradients(self) -> bool:
        """Whether a weight's gradient is a product in FP8 too."""
        return self.recipe_name != "rowwise_with_gw_hp"


def read_fp8(section: Mapping[str, Any], source: str, problems: list[str]) -> Fp8:
    """The settings of an fp8_config section, keys without their prefix; adds to `problems` what does not fit."""
    backend = str(section.get("backend") or "AO").upper()
    if backend not in ("AO", "NO"):
        name = OTHER_BACKENDS.get(backend, backend)
        problems.append(f"{source}: fp8_config.backend: {name} is not supported; set it to AO, which is torchao")
        return Fp8()
    name = str(section.get("recipe_name") or "tensorwise").lower()
    if name not in get_args(Fp8Recipe):
        known = ", ".join(get_args(Fp8Recipe))
        problems.append(f"{source}: fp8_config.recipe_name: {name} is not one of torchao's; use one of {known}")
    flags = {}
    for key in ("enable_fsdp_float8_all_gather", "pad_inner_dim"):
        value = str(section.get(key, True)).lower()
        if value not in ("true", "false"):
            problems.append(f"{source}: fp8_config.{key}: {section[key]} does not fit; true or false")
        flags[key] = value == "true"
    return Fp8(cast(Fp8Recipe, name), **flags)


def read_fp8_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """The fp8_config section of which the launcher has made these variables; its own defaults are 1 where a file says true."""
    section = {key: environ[variable] for key, variable in FP8_KEYS.items() if variable in environ}
    return {key: {"1": "true", "0": "false"}.get(value, value) for key, value in section.items()}


def is_multiplied_in_fp8(shape: tuple[int, ...]) -> bool:
    """Whether a GPU multiplies by a weight of this `shape` [out, in] in FP8; its tensor cores take 16 numbers at a time."""
    return all(size % FP8_MULTIPLE == 0 for size in shape)


def gathers_fp8(sharding: "Sharding") -> bool:
    """Whether FSDP gathers the weights of these linear layers as 8-bit numbers: torchao has it for FSDP2 and one scale a weight.

    Not under CPU offload, where a weight's scale, computed ahead for all ranks, does not survive the copy to the device.
    """
    fp8 = sharding.fp8
    return (
        fp8 is not None
        and fp8.enable_fsdp_float8_all_gather
        and fp8.recipe_name == "tensorwise"
        and sharding.layout == "fsdp2"
        and not sharding.cpu_offload
    )
