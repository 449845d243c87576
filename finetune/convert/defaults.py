"""Each tool's defaults, written into a recipe where ours differ."""

from collections.abc import Mapping
from typing import Any

from finetune.convert.counterparts import TOOL_NAMES, Tool

# Each tool's defaults in our keys; written out where ours differ. warmup_steps: None means that warmup_ratio decides.
TRAINER = {
    "num_train_epochs": 3.0,
    "per_device_train_batch_size": 8,
    "lr_scheduler_type": "linear",
    "warmup_ratio": 0.0,
    "save_steps": 500,
    "save_total_limit": None,
}
COMPONENTS = {"packing": False, "lr_scheduler_type": "constant", "warmup_steps": 0, "save_total_limit": None}
UNLIMITED = {"max_length": 8192, "overlength": "error"}
UNLIMITED_NOTE = (
    "no limit of length there: a row of over 8192 tokens stops the run here; raise max_length for longer ones"
)
DEFAULTS: Mapping[Tool, Mapping[str, Any]] = {
    "TRL": TRAINER | {"max_length": 1024, "packing": False, "assistant_only_loss": False},
    "Axolotl": {"max_length": 512, "packing": False, "warmup_ratio": 0.03, "save_total_limit": 4},
    "LLaMA-Factory": TRAINER | {"packing": False, "learning_rate": 5e-5, "use_peft": True},
    "torchtune": COMPONENTS | {"max_grad_norm": None},
    "Automodel": COMPONENTS | {"num_train_epochs": 10.0},
}
LORA_DEFAULTS: Mapping[Tool, Mapping[str, Any]] = {
    "TRL": {"lora_dropout": 0.05, "lora_target_modules": ["q_proj", "v_proj"]},
    "Axolotl": {"lora_r": 8, "lora_alpha": 8},
    "LLaMA-Factory": {"lora_r": 8},
    "torchtune": {"lora_r": 8, "lora_alpha": 16},
    "Automodel": {"lora_r": 8},
}
# Of a 4-bit base: the settings that each tool gives bitsandbytes where the file gives none (torchtune: torchao's NF4).
FOUR_BIT_DEFAULTS: Mapping[Tool, Mapping[str, Any]] = {
    tool: {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": tool != "TRL"} for tool in TOOL_NAMES
}
