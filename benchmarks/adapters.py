"""Eight LoRA adapters on one base: their forward and backward one after the other beside one pass
of all, by PEFT's mixed batches and by products that are batched over the adapters.

    python benchmarks/adapters.py [--model FOLDER] [--datums 1 4] [--tokens 64 256]

Without a model, a Llama with random weights (hidden size 512, 4 layers). One process; fp32 on the
CPU, bf16 on a GPU. Every row is of one run, its times the median of `--rounds` that take turns.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from transformers import AutoModelForCausalLM, LlamaConfig  # noqa: E402

from finetune.plan.table import align_columns  # noqa: E402

ADAPTERS = 8
RANK = 16
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model")
    parser.add_argument("--datums", type=int, nargs="+", default=[1, 4], help="of each adapter")
    parser.add_argument("--tokens", type=int, nargs="+", default=[32, 128], help="of a datum")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = make_model(options.model)
    rows = [("datums", "tokens", "in turn, ms", "PEFT mixed", "batched", "loss differs by")]
    for datums in options.datums:
        for tokens in options.tokens:
            rows.append(compare(model, datums, tokens, options.rounds))
    print(align_columns(rows, ()))


def make_model(folder: str | None) -> Any:
    if folder is None:
        config = LlamaConfig(
            hidden_size=512,
            intermediate_size=1408,
            num_hidden_layers=4,
            num_attention_heads=8,
            vocab_size=8192,
        )
        base = AutoModelForCausalLM.from_config(config)
    else:
        base = AutoModelForCausalLM.from_pretrained(folder)
    base = base.to(DEVICE, torch.bfloat16 if DEVICE == "cuda" else torch.float32)
    config = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=LINEAR, init_lora_weights=False)
    model = get_peft_model(base, config, adapter_name="0")
    for number in range(1, ADAPTERS):
        model.add_adapter(str(number), config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)
    return model.eval()  # PEFT mixes adapters in this mode alone; there is no dropout


def compare(model: Any, datums: int, tokens: int, rounds: int) -> tuple[str, ...]:
    """A row of the table."""
    shape = (ADAPTERS, datums, tokens)
    ids = torch.randint(0, model.config.vocab_size, shape, device=DEVICE)
    contestants = {"turn": in_turn, "mixed": mixed, "batched": partial(batched, make_groups(model))}
    times: dict[str, list[float]] = {name: [] for name in contestants}
    losses: dict[str, Tensor] = {}
    for _ in range(rounds + 1):
        for name, contestant in contestants.items():
            model.zero_grad()
            times[name].append(
                timed(lambda c=contestant, n=name: losses.update({n: c(model, ids)}))
            )
    alone = median(times["turn"][1:])
    far = max(float((losses[name] - losses["turn"]).abs().max()) for name in losses)
    return (
        str(datums),
        str(tokens),
        f"{alone * 1000:.1f}",
        *(f"{alone / median(times[name][1:]):.2f}x" for name in ("mixed", "batched")),
        f"{far:.1e}",
    )


def timed(act: Callable[[], object]) -> float:
    begun = time.perf_counter()
    act()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def measure(model: Any, ids: Tensor, **options: Any) -> Tensor:
    """The loss of each row."""
    logits = model(ids, use_cache=False, **options).logits[:, :-1].float()
    scores = nn.functional.cross_entropy(
        logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
    )
    return scores.view(len(ids), -1).sum(1)


def in_turn(model: Any, ids: Tensor) -> Tensor:
    """As the service does."""
    losses = []
    for number, own in enumerate(ids):
        set_active(model, str(number))
        loss = measure(model, own).sum()
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses)


def set_active(model: Any, name: str) -> None:
    for layer in model.modules():
        if hasattr(layer, "lora_A"):
            layer._active_adapter = [name]


def mixed(model: Any, ids: Tensor) -> Tensor:
    names = [str(number) for number in range(ADAPTERS) for _ in range(ids.shape[1])]
    loss = measure(model, ids.flatten(0, 1), adapter_names=names)
    loss.sum().backward()
    return loss.detach().view(ADAPTERS, -1).sum(1)


class Group(nn.Module):
    """A layer whose rows are of all adapters, as many of each."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.base = layer.base_layer
        numbers = [str(number) for number in range(ADAPTERS)]
        down = [layer.lora_A[each].weight for each in numbers]
        up = [layer.lora_B[each].weight for each in numbers]
        self.down = nn.Parameter(torch.stack(down).detach().mT.contiguous())
        self.up = nn.Parameter(torch.stack(up).detach().mT.contiguous())

    def forward(self, rows: Tensor) -> Tensor:
        grouped = rows.reshape(ADAPTERS, -1, rows.shape[-1])
        return self.base(rows) + (grouped @ self.down @ self.up).view(*rows.shape[:-1], -1)


def make_groups(model: Any) -> dict[str, tuple[Any, Group]]:
    return {
        name: (layer, Group(layer))
        for name, layer in model.named_modules()
        if hasattr(layer, "lora_A")
    }


def batched(groups: dict[str, tuple[Any, Group]], model: Any, ids: Tensor) -> Tensor:
    for layer, group in groups.values():
        layer.forward = group.forward
    for _, group in groups.values():
        group.down.grad = None
        group.up.grad = None
    loss = measure(model, ids.flatten(0, 1))
    loss.sum().backward()
    for layer, _ in groups.values():
        del layer.forward
    return loss.detach().view(ADAPTERS, -1).sum(1)


if __name__ == "__main__":
    main()
