"""How a value of another tool becomes one of ours, kind by kind."""

import json
from typing import Any

from finetune.recipe.hints import Counterpart

TEMPLATES = {"llama3": "llama3", "llama-3": "llama3", "chatml": "chatml", "qwen": "chatml", "qwen_25": "chatml"}
SCHEDULES = ("cosine", "linear", "constant")
TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
ATTENTION = {"fa2": "flash_attention_2", "sdpa": "sdpa", "disabled": "eager", "auto": "auto"}
KNOWN_ATTENTION = ("auto", "sdpa", "eager", "flex_attention", "flash_attention_2", "flash_attention_3")
OVERLENGTH = {"drop": "drop", "truncate": "truncate", "raise": "error"}
DEFAULT_SHARDING = "fsdp_full_shard"  # bf16 and activation checkpointing stand in it too; what is more particular wins
TORCHTUNE_LAYERS = {"output_proj": "o_proj", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}

LEAVE: Any = object()  # the default here does what they ask for


def carried(pair: Counterpart, value: Any) -> Any:
    """Their value as ours; None where there is none, `LEAVE` where nothing need be said."""
    match pair.carry:
        case "same" | "lora-only":
            return _number(value)
        case "name":
            return None
        case "not":
            if pair.ours in ("eval_steps", "save_steps"):  # a strategy: "steps" is what a number of steps says
                return LEAVE if str(value) in ("steps", "no") else None
            return not value if isinstance(value, bool) else None
        case "adapter":
            return {"lora": True, "qlora": True, "full": False}.get(str(value))
        case "all-linear":
            return "all-linear" if value else LEAVE
        case "on-if-true":
            return _number(value) if value else LEAVE
        case "targets":
            return _targets(value)
        case "schedule":
            name = str(value).lower()
            return next((schedule for schedule in SCHEDULES if schedule in name and "restart" not in name), None)
        case "optimizer":
            name = str(value).lower().replace("_", "")
            return None if "adamw" not in name else "adamw_8bit" if "8bit" in name else "adamw_torch_fused"
        case "attention":
            if value is True:
                return "sdpa"
            name = ATTENTION.get(str(value), str(value))
            return name if name in KNOWN_ATTENTION else None
        case "tracker":
            return _tracker(pair, value)
        case "dtype":
            return {"bfloat16": "bfloat16", "float32": "float32"}.get(str(value))
        case "template":
            name = str(value)
            return LEAVE if name in ("tokenizer_default", "default", "empty") else TEMPLATES.get(name.lower())
        case "resume":
            return "auto" if value is True else LEAVE if value in (False, "false") else str(value)
        case "overlength":
            return OVERLENGTH.get(str(value))
        case "precision":
            return LEAVE if not value or value == "fp32" else DEFAULT_SHARDING
        case "sharding":
            return _sharding(pair, value)
        case "data":
            return None


def _number(value: Any) -> Any:
    """Numbers that YAML 1.1 reads as text (2e-5)."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _targets(value: Any) -> Any:
    if not isinstance(value, str | list):
        return None
    names = value.split(",") if isinstance(value, str) else value
    names = [TORCHTUNE_LAYERS.get(str(name).strip(), str(name).strip()) for name in names]
    return "all-linear" if names in (["all"], ["all-linear"]) else names


def _tracker(pair: Counterpart, value: Any) -> Any:
    names = value if isinstance(value, list) else [value]
    by_key = next((tracker for tracker in TRACKERS if tracker in pair.theirs), None)
    if by_key is not None:
        return by_key if value else LEAVE
    wanted = [tracker for tracker in TRACKERS for name in names if tracker in str(name).lower()]
    wanted += ["wandb" for name in names if "WandB" in str(name)]
    return wanted[0] if wanted else LEAVE


def _sharding(pair: Counterpart, value: Any) -> Any:
    text = json.dumps(value, default=str).lower()
    if not value:
        return LEAVE
    if "offload" in pair.theirs or ("offload" in text and "true" in text) or "offload" in str(value).lower():
        return "fsdp_cpu_offload"
    if "zero2" in text or "shard_grad_op" in text:
        return "fsdp_shard_grad_op"
    return DEFAULT_SHARDING
