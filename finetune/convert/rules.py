"""How a value of another tool becomes one of ours, kind by kind."""

import fnmatch
import re
from collections.abc import Mapping
from typing import Any

from finetune.recipe.counterpart import Counterpart

# Names of Axolotl and LLaMA-Factory for templates that write the same turns. Their alpaca, vicuna, zephyr and llama2 do not.
TEMPLATES = {
    "llama3": "llama3", "llama-3": "llama3", "llama4": "llama4", "chatml": "chatml",
    "qwen": "qwen", "qwen_25": "qwen", "qwen2_5": "qwen", "qwen3": "qwen3", "qwen3_nothink": "chatml",
    "gemma": "gemma", "gemma2": "gemma", "gemma3": "gemma", "mistral": "mistral",
    "mistral_v1": "mistral-v1", "mistral_v2v3": "mistral-v3", "mistral_v3_tekken": "mistral-v3-tekken",
    "phi_3": "phi3", "phi_35": "phi3", "phi": "phi3", "phi4": "phi4", "deepseek3": "deepseek-v3",
    "deepseek_v3": "deepseek-v3", "cohere": "command-r", "granite3": "granite",
}  # fmt: skip
OWN_TEMPLATE = ("tokenizer_default", "default", "empty")
SCHEDULES = {
    "cosine": "cosine", "cosine_with_min_lr": "cosine", "linear": "linear", "constant": "constant",
    "constant_with_warmup": "constant", "get_cosine_schedule_with_warmup": "cosine", "polynomial": "polynomial",
    "inverse_sqrt": "inverse_sqrt", "warmup_stable_decay": "warmup_stable_decay", "wsd": "warmup_stable_decay",
}  # fmt: skip
TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
ATTENTION = {"fa2": "flash_attention_2", "sdpa": "sdpa", "disabled": "eager", "auto": "auto"}
KNOWN_ATTENTION = (
    "auto",
    "sdpa",
    "eager",
    "flex_attention",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
)
OVERLENGTH = {"drop": "drop", "truncate": "truncate", "raise": "error"}
DTYPES = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32"}
TORCHTUNE_LAYERS = {"output_proj": "o_proj", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
LINEAR_LAYERS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "self_attn"),
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "mlp"),
}

STRATEGIES = {"eval_strategy": ("no", "epoch"), "save_strategy": ("no", "epoch", "best")}

LEAVE: Any = object()  # the default here does what they ask for


def convert_value(pair: Counterpart, value: Any, recipe: Mapping[str, Any]) -> Any:
    """Their value as ours; None where there is none, `LEAVE` where the default here is the same.

    `recipe` has what is converted already; the learning rate is needed for a rate that is given as such.
    """
    match pair.carry:
        case "same" | "lora-only":
            return convert_number(value)
        case "by-code":
            return LEAVE
        case "not":
            return not value if isinstance(value, bool) else None
        case "adapter":
            return {"lora": True, "qlora": True, "full": False}.get(str(value))
        case "all-linear":
            return "all-linear" if value else LEAVE
        case "on-if-true":
            return convert_number(value) if value else LEAVE
        case "targets":
            return convert_targets(value)
        case "schedule":
            name = str(value).lower().rsplit(".", 1)[-1]
            return SCHEDULES.get(name)
        case "optimizer":
            return _convert_optimizer(str(value))
        case "attention":
            return _convert_attention(value)
        case "tracker":
            return _convert_tracker(pair, value)
        case "dtype":
            name = str(value).rsplit(".", 1)[-1]
            return LEAVE if name == "auto" else DTYPES.get(name)
        case "template":
            name = str(value)
            return LEAVE if name in OWN_TEMPLATE else TEMPLATES.get(name.lower())
        case "resume":
            return "auto" if value is True else LEAVE if value in (False, "false") else str(value)
        case "overlength":
            return OVERLENGTH.get(str(value))
        case "steps":
            number = convert_number(value)
            is_share = isinstance(number, float) and 0 < number < 1
            return number if is_share else LEAVE if not number or number < 0 else int(number)
        case "names":
            return convert_names(value)
        case "parameters":
            names = convert_names(value)  # a tool's wrapper, which has no place in a parameter's name
            return names and [name.replace("_checkpoint_wrapped_module.", "") for name in names]
        case "module-patterns":
            return _convert_patterns(value)
        case "strategy":
            name = "no" if value is False else str(value)
            return LEAVE if name == "steps" else name if name in STRATEGIES[str(pair.ours)] else None
        case "warmup":
            return convert_number(value)
        case "schedule-argument":
            return recipe.get("lr_scheduler_kwargs", {}) | {pair.theirs.rsplit(".", 1)[-1]: convert_number(value)}
        case "min-rate":
            rate = convert_number(recipe.get("learning_rate"))
            return round(convert_number(value) / rate, 9) if rate else None
        case "clip":
            return convert_number(value) or "null"
        case "bits":
            return True if value in (4, 8) else None
        case "quantizer":
            return LEAVE if str(value) in ("bnb", "bitsandbytes") else None
        case "betas":
            return value if isinstance(value, list) and len(value) == 2 else None


def read_section(theirs: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The mapping under `key`; empty where there is none."""
    section = theirs.get(key)
    return section if isinstance(section, dict) else {}


def convert_number(value: Any) -> Any:
    """Numbers that YAML 1.1 reads as text (2e-5).

    >>> convert_number("2e-5"), convert_number("auto")
    (2e-05, 'auto')
    """
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def convert_names(value: Any) -> list[str] | None:
    """A list of names, which may be written with commas between them.

    >>> convert_names("<a>, <b>"), convert_names(["<a>"]), convert_names(3)
    (['<a>', '<b>'], ['<a>'], None)
    """
    names = value.split(",") if isinstance(value, str) else value
    return [str(name).strip() for name in names] if isinstance(names, list) else None


def convert_targets(value: Any) -> Any:
    """The layers that get adapters, by our names for them; patterns are matched with the layers of a Llama.

    >>> convert_targets(["*.q_proj", "output_proj"]), convert_targets(r"model.layers.[\\d]+.mlp.(up|down)_proj")
    (['q_proj', 'o_proj'], ['up_proj', 'down_proj'])
    """
    if not isinstance(value, str | list):
        return None
    names = [str(name).strip() for name in (value.split(",") if isinstance(value, str) else value)]
    names = [TORCHTUNE_LAYERS.get(name, name) for name in names]
    if any(name in ("all", "all-linear", "*", "*_proj", "linear") for name in names):
        return "all-linear"
    plain = [found for name in names for found in ([name] if re.fullmatch(r"[\w.]+", name) else _matching_layers(name))]
    return list(dict.fromkeys(plain)) or None


def _matching_layers(pattern: str) -> list[str]:
    dotted = {
        layer: [f"{start}layers.0.{block}.{layer}" for start in ("model.", "model.language_model.", "")]
        for layer, block in LINEAR_LAYERS.items()
    }
    if re.fullmatch(r"[\w.*]+", pattern):
        return [layer for layer, names in dotted.items() if any(fnmatch.fnmatch(name, pattern) for name in names)]
    try:
        return [layer for layer, names in dotted.items() if any(re.fullmatch(pattern, name) for name in names)]
    except re.error:
        return []


def _convert_patterns(value: Any) -> list[str] | None:
    """Axolotl's regular expressions for the start of a parameter's name; None where one names a range of rows.

    >>> _convert_patterns(["^lm_head.weight$", r"model.layers.4[4-7]+.mlp"]), _convert_patterns(["lm_head.weight[:32000]"])
    (['lm_head.weight', 'model.layers.4[4-7]+.mlp'], None)
    """
    if not isinstance(value, list) or any(re.search(r"\[\d*:\d*\]$", str(pattern)) for pattern in value):
        return None
    return [str(pattern).removeprefix("^").removesuffix("$") for pattern in value]


def _convert_optimizer(name: str) -> str | None:
    plain = name.lower().rsplit(".", 1)[-1].replace("_", "")
    if name.lower() == "adafactor" or plain == "sgd":  # torch.optim.Adafactor scales the rate by the parameters
        return plain
    if "4bit" in plain or (plain not in ("adam",) and "adamw" not in plain):
        return None
    return "adamw_8bit" if "8bit" in plain else "adamw_torch_fused"


def _convert_attention(value: Any) -> Any:
    if isinstance(value, bool):
        return "sdpa" if value else LEAVE
    name = ATTENTION.get(str(value), str(value))
    return name if name in KNOWN_ATTENTION else None


def _convert_tracker(pair: Counterpart, value: Any) -> Any:
    by_key = next((tracker for tracker in TRACKERS if tracker in pair.theirs), None)
    if by_key is not None:
        return by_key if value else LEAVE
    names = [str(name) for name in (value if isinstance(value, list) else [value])]
    wanted = [tracker for tracker in TRACKERS for name in names if tracker in name.lower()]
    return wanted[0] if wanted else LEAVE
