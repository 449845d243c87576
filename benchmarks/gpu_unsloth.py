"""Unsloth's side of `gpu.py`: its loader, adapters and checkpointing under the SFTTrainer that it
patches, as in its notebooks.

It reads a model from a folder, so the common weights are written to one first. It takes TRL up to
1.15 and datasets below 5, so it needs packages of its own: `gpu_wheels.sh FOLDER unsloth` fetches
them, and `--unsloth-packages` names where they are installed. Packed rows need xformers, or
FlashAttention where it is installed; it prints which it has found.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu_cases import Case, Result
from benchmarks.gpu_weights import fill

WHO = "Unsloth, packed"
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def train_unsloth(case: Case, steps: int, warm_up: int, options: argparse.Namespace) -> Result:
    """The same model and rows: LoRA over a base in bf16 or NF4, or in full over fp32 weights."""
    if case.method != "sft" or case.fp8 or case.model["model_type"] != "llama":
        return Result(case.name, WHO, failure="not compared here: dense models without FP8, sft")
    from unsloth import FastLanguageModel  # patches TRL, transformers and peft: before any of them
    import torch  # isort: skip

    from benchmarks.gpu_trl import train_packed

    checkpointing: Any = "unsloth" if case.checkpointed else False
    with tempfile.TemporaryDirectory() as folder:
        write_model(case, Path(folder))
        model, _ = FastLanguageModel.from_pretrained(
            folder,
            max_seq_length=case.length,
            dtype=torch.bfloat16 if case.use_peft else torch.float32,
            load_in_4bit=case.load_in_4bit,
            full_finetuning=not case.use_peft,
            use_gradient_checkpointing=checkpointing,
        )
    if case.use_peft:
        model = FastLanguageModel.get_peft_model(
            model,
            r=16,
            lora_alpha=32,
            target_modules=TARGETS,
            use_gradient_checkpointing=checkpointing,
        )
    return train_packed(
        case, WHO, model, steps, warm_up, options, gradient_checkpointing=bool(checkpointing)
    )


def write_model(case: Case, folder: Path) -> None:
    """Writes a model's folder: the common weights, and the tokenizer that the loader asks for."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from benchmarks.gpu_trl import word_tokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**case.model),
            dtype=torch.bfloat16 if case.use_peft else torch.float32,
        )
    fill(model)
    model.save_pretrained(folder)
    word_tokenizer(case.model["vocab_size"]).save_pretrained(folder)
