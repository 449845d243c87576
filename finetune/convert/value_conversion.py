"""The result of a conversion, and the rules by which single values of another tool become ours."""

import fnmatch
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from finetune.config.compatibility import TRACKERS
from finetune.config.methods import DEFAULT_METHOD, METHODS, MethodFacts
from finetune.config.optimization import convert_optimizer
from finetune.config.quantization import LOAD_KEYS
from finetune.config.schema import recipe_keys
from finetune.constants import ALL_LINEAR
from finetune.convert.counterparts import Counterpart, Tool, ToolFile
from finetune.convert.foreign_values import convert_number, read_number, shorten


@dataclass(slots=True)
class Conversion:
    """The recipe made from a file of `tool`, and what to report about it."""

    tool: Tool
    is_factory_v1: bool = False  # of LLaMA-Factory's v1 schema
    recipe: dict[str, Any] = field(default_factory=dict)
    # lines on what the recipe does otherwise than the file, or does not do
    differences: list[str] = field(default_factory=list)
    # lines on what is converted, but worth a look
    remarks: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)  # keys without effect here
    # lines on what must be set or written before the recipe can train
    to_do: list[str] = field(default_factory=list)
    # text of an Accelerate file to write beside the recipe; None if a shipped one will do
    accelerate_file: str | None = None
    # model_type of the whole vision-language model; None if the file does not train on images
    image_family: str | None = None
    # last parts of the names, or patterns, of layers that an Automodel file excludes from LoRA
    excluded_layers: frozenset[str] = frozenset()
    # capabilities that we lack, and that some of the differences are due to
    missing_capabilities: list[str] = field(default_factory=list)

    @property
    def load_key(self) -> str | None:
        """The recipe's key that quantizes the base, such as load_in_4bit; None without one."""
        return next((key for key in LOAD_KEYS if self.recipe.get(key)), None)

    @property
    def is_measured(self) -> bool:
        """Whether the recipe says when held-out rows are measured."""
        return not self.recipe.keys().isdisjoint(("eval_steps", "eval_strategy"))

    def add_difference(self, key: str, value: Any, note: str, missing_capability: str = "") -> None:
        """Reports that the tool's `key: value` works differently here, or needs a capability that
        we lack.

        Keys with the same note share one line.
        """
        if missing_capability and missing_capability not in self.missing_capabilities:
            self.missing_capabilities.append(missing_capability)
        line = f"{key}: {shorten(value)}"
        end = f"   ({note})"
        index = next((i for i, other in enumerate(self.differences) if other.endswith(end)), None)
        if index is None:
            self.differences.append(line + end)
        else:
            self.differences[index] = f"{self.differences[index].removesuffix(end)}, {line}{end}"

    def add_remark(self, key: str, value: Any, note: str) -> None:
        """Reports that the tool's `key: value` is converted, but worth a look."""
        self.remarks.append(f"{key}: {shorten(value)}   ({note})")


# The tables below: another tool's value, or its end -> ours.
SCHEDULES = {
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "linear": "linear",
    "constant": "constant",
    "wsd": "warmup_stable_decay",
    "constant_with_warmup": "constant",
    "get_cosine_schedule_with_warmup": "cosine",
    "polynomial": "polynomial",
    "inverse_sqrt": "inverse_sqrt",
    "warmup_stable_decay": "warmup_stable_decay",
}
# values, and names of loggers, that ask for none of the trackers
NO_TRACKER = ("none", "", "all", "no", "false", "disklogger", "stdoutlogger")
ATTENTION = {**dict.fromkeys(("fa2", "flash_attn"), "flash_attention_2"), "disabled": "eager"}
OVERLENGTH = {
    "drop": "drop",
    "delete": "drop",
    "truncate": "truncate",
    "right": "truncate",
    "split": "split",
    "raise": "error",
}
DTYPES = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32"}
TORCHTUNE_LAYERS = {"output_proj": "o_proj"}
# a Llama's linear layers -> the block of a decoder layer that each is in
LINEAR_LAYERS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "self_attn"),
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "mlp"),
}

ALL_LAYERS = ("all", ALL_LINEAR, "*", "*_proj", "linear")  # values that mean all linear layers
# what may precede `layers.0` in the name of a decoder layer
NAME_STARTS = ("", "model.", "model.language_model.", "model.text_model.")
# a pattern that matches these numbers, of one and two digits, is taken to match every decoder layer
LAYER_NUMBERS = (0, 1, 17)
# our keys -> the values that are converted
STRATEGIES = {"eval_strategy": ("no", "epoch"), "save_strategy": ("no", "epoch", "best")}

# the result of a conversion that sets no key: our default does what the file asks for
LEAVE: Any = object()


def find_method_facts(recipe: Mapping[str, Any]) -> MethodFacts:
    """Returns the facts about a recipe's method.

    They are the default method's if the recipe names none, or one that our reader will refuse.
    """
    return METHODS.get(str(recipe.get("method")), METHODS[DEFAULT_METHOD])


def read_section(settings: ToolFile, key: str) -> dict[str, Any]:
    """Returns the mapping under a key, dotted where it is nested; an empty one if there is none."""
    section = read_value(settings, key)
    return section if isinstance(section, dict) else {}


def read_value(settings: ToolFile, key: str, default: Any = None) -> Any:
    """Returns the value under a key, dotted where it is nested; `default` if there is none."""
    value: Any = settings
    for name in key.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return default
        value = value[name]
    return value


def convert_names(value: Any) -> list[str] | None:
    """Returns a list of names, or the names in a text with commas; None for another value.

    >>> convert_names("<a>, <b>"), convert_names(["<a>"]), convert_names(3)
    (['<a>', '<b>'], ['<a>'], None)
    """
    names = value.split(",") if isinstance(value, str) else value
    if isinstance(names, list):
        return [str(name).strip() for name in names]
    return None


def convert_targets(value: Any) -> Any:
    """Converts the layers that get adapters to `all-linear` or a list of names; None if there is no
    layer.

    A pattern stands for the layers of a Llama that it matches.

    >>> convert_targets(["*.q_proj", "output_proj"])
    ['q_proj', 'o_proj']
    >>> convert_targets(r"model.layers.[\\d]+.mlp.(up|down)_proj")
    ['up_proj', 'down_proj']
    >>> convert_targets(["all-linear", "q_proj", "lm_head"])
    ['all-linear', 'lm_head']
    """
    if not isinstance(value, str | list):
        return None
    names = convert_names(value) or []
    names = [TORCHTUNE_LAYERS.get(name, name) for name in names]
    has_all = any(name in ALL_LAYERS for name in names)
    layers: list[str] = []
    for name in names:
        layers += [name] if re.fullmatch(r"[\w.]+", name) else _match_layers(name)
    if has_all:
        others = [layer for layer in layers if layer not in (*ALL_LAYERS, *LINEAR_LAYERS)]
        return [ALL_LINEAR, *dict.fromkeys(others)] if others else ALL_LINEAR
    return list(dict.fromkeys(layers)) or None


def _match_layers(pattern: str) -> list[str]:
    """Lists the linear layers of a Llama whose dotted names match a shell pattern or a regular
    expression; empty if it is neither.

    >>> _match_layers("*.q_proj"), _match_layers(".*q_proj")
    (['q_proj'], ['q_proj'])
    """
    expressions = [pattern]
    if re.fullmatch(r"[\w.*]+", pattern):
        expressions.insert(0, fnmatch.translate(pattern))
    return next(filter(None, map(_match_expression, expressions)), [])


def _match_expression(expression: str) -> list[str]:
    """The same for a regular expression; empty if it is none."""
    try:
        matcher = re.compile(expression)
    except re.error:
        return []
    layers = []
    for layer, block in LINEAR_LAYERS.items():
        spellings = [
            [f"{start}layers.{i}.{block}.{layer}" for i in LAYER_NUMBERS] for start in NAME_STARTS
        ]
        # A pattern that matches only some decoder layers counts for none: a name here is for all.
        if any(all(map(matcher.fullmatch, names)) for names in spellings):
            layers.append(layer)
    return layers


def _convert_patterns(value: Any) -> list[str] | None:
    """Converts Axolotl's patterns, which match the start of a parameter's name, to ours of whole
    names.

    Returns None if a pattern names rows of a tensor, or the value is no list.

    >>> _convert_patterns(["^lm_head.weight$", "model.layers.1", "model.embed_tokens.weight[:9]"])
    >>> _convert_patterns(["^lm_head.weight$", "model.layers.4[4-7]+.mlp"])
    ['lm_head.weight', 'model.layers.4[4-7]+.mlp']
    """
    if not isinstance(value, list) or any(
        re.search(r"\[\d*(:\d*)?\]$", str(pattern)) for pattern in value
    ):
        return None
    return [_complete_pattern(str(pattern)) for pattern in value]


def _complete_pattern(pattern: str) -> str:
    """Returns a pattern of a whole module name for Axolotl's pattern of the start of a name.

    If the pattern ends with a dot or a dollar, its last name is complete. Otherwise `layers.1` also
    means the layers 10 to 19, and `gate` means `gate_proj`.

    >>> _complete_pattern("blocks.[0-7]."), _complete_pattern("layers.1"), _complete_pattern("gate")
    ('blocks.[0-7]', 'layers.1\\\\w*', 'gate\\\\w*')
    """
    whole = re.sub(r"^\^|\\?\.?\$?$", "", pattern)
    last = re.split(r"\.", whole)[-1]
    begins_layer = any(name != last and name.startswith(last) for name in LINEAR_LAYERS)
    ends_with_number = re.search(r"[\d\])+]$", whole) is not None
    may_continue = (begins_layer or ends_with_number) and not pattern.endswith((".", "$"))
    return rf"{whole}\w*" if may_continue else whole


def _convert_attention(value: Any) -> Any:
    """Returns our `attn_implementation`; LEAVE for another library's kernel, None if unknown."""
    if isinstance(value, bool):  # a switch, such as sdp_attention: true
        return "sdpa" if value else LEAVE
    is_of_hub = "/" in str(value)
    if value == "xformers" or is_of_hub:
        # our kernels are exact; `OTHER_ATTENTION` reports the ones that are not
        return LEAVE
    name = ATTENTION.get(str(value), str(value))
    literal = get_args(recipe_keys()["attn_implementation"].annotation)[0]  # without its help text
    return name if name in get_args(literal) else None


def read_trackers(key: str, value: Any) -> list[str]:
    """Lists the trackers that a setting asks for.

    A switch (`use_wandb: true`) names one by its key, other keys name them by their values.

    >>> read_trackers("use_wandb", True), read_trackers("report_to", ["tensorboard", "comet_ml"])
    (['wandb'], ['tensorboard', 'comet_ml'])
    >>> read_trackers("use_swanlab", True), read_trackers("report_to", "none")
    (['swanlab'], [])
    """
    is_switch = key.startswith("use_") or any(tracker in key for tracker in TRACKERS)
    if is_switch:
        values = [key.removeprefix("use_")] if value else []
    else:
        values = value if isinstance(value, list) else [value]
    names = [str(name).lower().rpartition(".")[2] for name in values]
    # a logger's class, as wandblogger, stands for its tracker
    trackers = {name: next((ours for ours in TRACKERS if ours in name), name) for name in names}
    return [trackers[name] for name in names if name not in NO_TRACKER]


def _convert_tracker(key: str, value: Any) -> Any:
    """Returns the first of our trackers that a setting names; LEAVE if it names none."""
    names = read_trackers(key, value)
    return next((tracker for tracker in TRACKERS if tracker in names), LEAVE)


def _convert_steps(key: str, value: Any) -> Any:
    """Returns a number of steps, or a share of the run below 1; LEAVE unless it is above 0."""
    number = read_number(key, value, "100") if value else 0
    if not number or number < 0:
        return LEAVE
    is_share = isinstance(number, float) and number < 1
    return number if is_share else int(number)


def _convert_resume(value: Any) -> Any:
    """Returns "auto" for the newest checkpoint, else the checkpoint's path.

    Returns LEAVE where the file asks for our default, or does not resume.
    """
    if value in (False, "false", "LATEST"):  # Automodel's word for auto
        return LEAVE
    is_newest = value is True or str(value).lower() == "latest"
    return "auto" if is_newest else str(value)


def _convert_strategy(key: str, value: Any) -> Any:
    """Returns the value of our `key`; LEAVE for steps, whose number has a key, None if unknown."""
    name = "no" if value is False else str(value)
    if name == "steps":
        return LEAVE
    return name if name in STRATEGIES[key] else None


def _convert_parameters(value: Any) -> list[str] | None:
    """Returns the parameters' names without torch's wrapper for activation checkpointing; None if
    the value has no names.
    """
    names = convert_names(value)
    return names and [name.replace("_checkpoint_wrapped_module.", "") for name in names]


# `Counterpart.carry` of a key -> what converts its value; `convert_value` has the other carries
CONVERTERS: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("same", "lora-only", "warmup"), convert_number),
    # the code of the other modules converts these
    **dict.fromkeys(("by-code", "min-rate"), lambda value: LEAVE),
    "not": lambda value: not value if isinstance(value, bool) else None,
    "adapter": lambda value: {
        "lora": True,
        "qlora": True,
        "oft": True,
        "full": False,
        "freeze": False,
    }.get(str(value)),
    "all-linear": lambda value: "all-linear" if value else LEAVE,
    "on-if-true": lambda value: convert_number(value) if value else LEAVE,
    "flag": lambda value: True if value else LEAVE,
    "targets": convert_targets,
    "schedule": lambda value: SCHEDULES.get(str(value).lower().rsplit(".", 1)[-1]),
    # Automodel's name of a class, or of its Config
    "optimizer": lambda value: convert_optimizer(str(value).removesuffix("Config")),
    "attention": _convert_attention,
    "dtype": lambda value: {"auto": LEAVE, **DTYPES}.get(str(value).rsplit(".", 1)[-1]),
    "resume": _convert_resume,
    "overlength": lambda value: OVERLENGTH.get(str(value)),
    "names": convert_names,
    "parameters": _convert_parameters,
    "module-patterns": _convert_patterns,
    "clip": lambda value: convert_number(value) or "null",  # a bound of 0 becomes null
    "compile": lambda value: value.get("model", True) if isinstance(value, dict) else value,
    "bits": lambda value: True if value in (4, 8) else None,
    "quantizer": lambda value: LEAVE if str(value) in ("bnb", "bitsandbytes") else None,
    "betas": lambda value: value if isinstance(value, list) and len(value) == 2 else None,
}


def convert_value(pair: Counterpart, value: Any, recipe: Mapping[str, Any]) -> Any:
    """Converts the value of `pair.key` to ours.

    Returns None if we have no such value, `LEAVE` if our default does the same.

    `recipe` has the keys that are converted already: a schedule's arguments become one mapping.
    """
    match pair.carry:
        case "tracker":
            return _convert_tracker(pair.key, value)
        case "strategy":
            return _convert_strategy(str(pair.ours), value)
        case "schedule-argument":
            return recipe.get("lr_scheduler_kwargs", {}) | {
                pair.key.rsplit(".", 1)[-1]: convert_number(value)
            }
        case "optimizer-flag":
            if value:
                return convert_optimizer(pair.key.removeprefix("use_"))
            return LEAVE
        case "steps":
            return _convert_steps(pair.key, value)
    return CONVERTERS[pair.carry](value)
