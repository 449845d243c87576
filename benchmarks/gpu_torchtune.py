"""torchtune's side of `gpu.py`: its recipes for one device, by a config as its users write one.

Its precision is one for everything: weights, gradients and moments are in bf16. Only weights, rows
and the log are ours, as components that the config names. torchtune is archived: 0.6.1, its last
version, imports no torchao after 0.15, with which it runs under torch 2.13. peft takes no torchao
before 0.16, so torchtune needs an environment of its own.
"""

import argparse
import importlib.util
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_cases import STEPS, Case, Result, rows, summarize
from benchmarks.gpu_weights import random_weight

WHO = "torchtune, all in bf16"
THIS = "benchmarks.gpu_torchtune"
LORA = {
    "lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"],
    "apply_lora_to_mlp": True,
    "lora_rank": 16,
    "lora_alpha": 32,
}
# what the components below must know, which the recipe makes; a process runs one case
_running: dict[str, Any] = {}


def train_torchtune(case: Case, steps: int, warm_up: int, options: argparse.Namespace) -> Result:
    """The same model, rows and optimizer under its full or LoRA recipe, packed, its own
    attention.
    """
    import torch
    import torchtune
    from omegaconf import OmegaConf

    from finetune.training.metrics import peak_flops, peak_memory_bytes

    if case.method != "sft" or case.fp8 or case.load_in_4bit or case.model["model_type"] != "llama":
        return Result(
            case.name,
            WHO,
            failure="not compared here: its recipes of one device have no such model or method",
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    _running.update(case=case, options=options, device=device, steps=steps + warm_up)
    name = f"{'lora' if case.use_peft else 'full'}_finetune_single_device"
    file = Path(torchtune.__file__).parents[1] / "recipes" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    recipe_class = (
        module.LoRAFinetuneRecipeSingleDevice
        if case.use_peft
        else module.FullFinetuneRecipeSingleDevice
    )
    with tempfile.TemporaryDirectory() as folder:
        config = OmegaConf.create(_config(case, steps + warm_up, device.type, folder))
        recipe = recipe_class(cfg=config)
        recipe.save_checkpoint = lambda epoch: None
        recipe.setup(cfg=config)
        recipe.train()
    log: _Log = recipe._metric_logger
    speeds = [case.rows * case.length / each for each in log.seconds[warm_up:]]
    facts = peak_flops(device), peak_memory_bytes(device)
    return summarize(case, WHO, speeds, *facts, loss=log.losses[0], grad_norm=log.norms[0])


def _config(case: Case, steps: int, device: str, folder: str) -> dict[str, Any]:
    """The recipe's config: its published one for Llama 3.1 8B on one device, packed, uncompiled and
    with the case's sizes.
    """
    tied = case.model["tie_word_embeddings"]
    family = "llama3_2" if tied else "llama3_1"
    model = {
        "_component_": f"torchtune.models.{family}.{'lora_' if case.use_peft else ''}{family}",
        "vocab_size": case.model["vocab_size"],
        "num_layers": case.model["num_hidden_layers"],
        "num_heads": case.model["num_attention_heads"],
        "num_kv_heads": case.model["num_key_value_heads"],
        "embed_dim": case.model["hidden_size"],
        "intermediate_dim": case.model["intermediate_size"],
        "max_seq_len": case.length,
        # As transformers' LlamaConfig has them where a config names none.
        "rope_base": 10_000,
        "scale_factor": 1,
        "norm_eps": 1e-6,
    }
    return {
        "output_dir": folder,
        "seed": 0,
        "device": device,
        "dtype": "bf16",
        "model": model | (LORA if case.use_peft else {}),
        "checkpointer": {"_component_": f"{THIS}.Weights", "model_type": "LLAMA3"},
        "tokenizer": {"_component_": f"{THIS}.Tokenizer"},
        "dataset": {"_component_": f"{THIS}.packed_rows", "packed": True},
        "metric_logger": {"_component_": f"{THIS}._Log"},
        "optimizer": {"_component_": "torch.optim.AdamW", "fused": True, "lr": 1e-5},
        "lr_scheduler": {
            "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
            "num_warmup_steps": 0,
        },
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
        "shuffle": False,
        "batch_size": case.rows,
        "epochs": 1,
        "max_steps_per_epoch": steps,
        "gradient_accumulation_steps": 1,
        "optimizer_in_bwd": False,
        "clip_grad_norm": 1.0,
        "compile": case.torch_compile,
        "enable_activation_checkpointing": case.checkpointed,
        "enable_activation_offloading": False,
        "resume_from_checkpoint": False,
        "save_adapter_weights_only": False,
        "log_every_n_steps": 1,
        "log_peak_memory_stats": False,
    }


class Weights:
    """A checkpointer that reads the contestants' common weights."""

    def __init__(self, **_: Any) -> None: ...

    def load_checkpoint(self) -> dict[str, Any]:
        """The state dict by torchtune's names, in bf16."""
        import torch
        from torchtune.models.convert_weights import hf_to_tune

        from finetune.config.pretrained import load_config
        from finetune.config.schema import Model
        from finetune.models.load import build_on_meta

        case: Case = _running["case"]
        model = build_on_meta(load_config(Model(model_config=case.model)), torch.float32)
        weights = {
            name: random_weight(name, p.shape, _running["device"]).bfloat16()
            for name, p in model.named_parameters()
        }
        sizes = {
            "num_heads": "num_attention_heads",
            "num_kv_heads": "num_key_value_heads",
            "dim": "hidden_size",
        }
        return {
            "model": hf_to_tune(weights, **{key: case.model[name] for key, name in sizes.items()})
        }


class Tokenizer:
    """The rows are ids already."""

    pad_id = 0


def packed_rows(_tokenizer: Tokenizer, packed: bool, **_: Any) -> list[dict[str, Any]]:
    """The rows as its PackedDataset has them: the first token of a document is no label."""
    import torch

    made = []
    for row in rows(_running["case"], _running["options"]):
        ids = torch.tensor([i for each in row for i in each])
        lengths = torch.tensor([len(each) for each in row])
        positions = torch.cat([torch.arange(len(each)) for each in row])
        labels = ids.masked_fill(positions == 0, -100)
        made.append({"tokens": ids, "labels": labels, "input_pos": positions, "seq_lens": lengths})
    return made * (1 + _running["steps"] // STEPS)


class _Log:
    """A metric logger that keeps losses and norms, and the time of each step, which the recipe has
    just waited for.
    """

    def __init__(self, **_: Any) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.seconds: list[float] = []
        self.mark = time.perf_counter()

    def log_config(self, _: Any) -> None: ...

    def log_dict(self, values: dict[str, Any], step: int) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self.mark)
        self.mark = now
        self.losses.append(float(values["loss"]))
        self.norms.append(float(values["grad_norm"]))

    def close(self) -> None: ...
