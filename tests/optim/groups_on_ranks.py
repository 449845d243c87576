"""Run on two ranks: which parameters of a sharded model decay, by layout and family. Rank 0 writes them into argument 1."""

import functools
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from finetune.config.schema import Optimization
from finetune.optim.optimizers import build_optimizer

CONFIGS: dict[str, Any] = {
    "gpt2": GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=31, n_positions=8, tie_word_embeddings=False),
    "llama": LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=31, attention_bias=True
    ),
}  # fmt: skip


def main() -> None:
    dist.init_process_group("gloo")
    decaying = {}
    for family, config in CONFIGS.items():
        for layout in ("single", "fsdp1", "fsdp2"):
            model: Any = AutoModelForCausalLM.from_config(config)
            classes = {
                type(module)
                for module in model.modules()
                if type(module).__name__ in model._no_split_modules
            }
            if layout == "fsdp1":
                policy = functools.partial(
                    transformer_auto_wrap_policy, transformer_layer_cls=classes
                )
                device = torch.device("cpu")
                model = Fsdp1(
                    model, use_orig_params=True, auto_wrap_policy=policy, device_id=device
                )
            elif layout == "fsdp2":
                for module in model.modules():
                    if type(module) in classes:
                        fully_shard(module)
                fully_shard(model)
            optimizer = build_optimizer(model, Optimization(weight_decay=0.1))
            decay = {
                id(p)
                for group in optimizer.param_groups
                if group["weight_decay"]
                for p in group["params"]
            }
            names = [
                name.replace("_fsdp_wrapped_module.", "")
                for name, p in model.named_parameters()
                if id(p) in decay
            ]
            decaying[f"{family} {layout}"] = sorted(names)
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(decaying))


if __name__ == "__main__":
    main()
