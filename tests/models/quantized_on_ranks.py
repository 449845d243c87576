"""Run by test_quantize.py: quantized models on 1, 2, 3 and 4 forked ranks, in every layout that can hold them.

    quantized_on_ranks.py FOLDER RANKS...

Rank 0 writes FOLDER/<scenario>.json: the digests of every quantized weight's bytes, and what each rank read and holds.
"""

import json
import os
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed.tensor import DTensor

from finetune.config.layout import Sharding
from finetune.config.schema import Lora, Model, Quantization
from finetune.distributed.join import join, leave
from finetune.distributed.model_parts import Slices, Values, unwrap
from finetune.distributed.world import World
from finetune.models import load
from finetune.models import quantized_layers as layers_of_model
from finetune.models.load import load_model
from finetune.models.quantized_layers import CODES, SCALES, quantized_layers
from tests.forked_ranks import fork_ranks, import_all, wait
from tests.models.families import documents, packed
from tests.ranks import open_stores

KINDS = {
    "nf4": Quantization(load_in_4bit=True),
    "fp4": Quantization(load_in_4bit=True, bnb_4bit_quant_type="fp4"),
    "nf4-double": Quantization(load_in_4bit=True, bnb_4bit_use_double_quant=True),
    "int8": Quantization(load_in_8bit=True),
}
HYBRID: dict[str, Any] = {
    "layout": "fsdp2",
    "strategy": "HYBRID_SHARD",
    "replicate_size": 2,
    "shard_size": 2,
}
# (ranks, layout): the layout's Accelerate settings
WORLDS: dict[tuple[int, str], dict[str, Any]] = {
    (1, "single"): {"layout": "single"},
    (1, "fsdp2"): {"layout": "fsdp2"},
    (2, "ddp"): {"layout": "ddp"},
    (2, "fsdp2"): {"layout": "fsdp2"},
    (2, "offload"): {"layout": "fsdp2", "cpu_offload": True},
    (3, "fsdp2"): {"layout": "fsdp2"},
    (4, "hybrid"): HYBRID,
}
LORA = Lora(use_peft=True, lora_r=2)
TRAINED = "nf4-double"  # also in bf16, and where the files hold it
STORED = ["nf4-double", "int8"]


def kinds_of(layout: str) -> list[str]:
    """The kinds that are tried in a layout: all where FSDP2 shards."""
    return list(KINDS) if layout == "fsdp2" else STORED


def on_rank(rank: int, ranks: int, folder: Path) -> None:
    """One rank's walk through the scenarios of `ranks` ranks."""
    for number, ((size, layout), settings) in enumerate(WORLDS.items()):
        if size != ranks:
            continue
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + number)
        for precision in ("no", "bf16"):
            open_stores()
            world = join(Sharding(use_cpu=True, mixed_precision=precision, **settings))
            for kind in kinds_of(layout) if precision == "no" else [TRAINED]:
                quantization, scenario = KINDS[kind], f"{layout}-{ranks}-{precision}-{kind}"
                for source in (
                    ("plain", "stored") if kind in STORED and precision == "no" else ("plain",)
                ):
                    name = folder / ("model" if source == "plain" else f"stored-{kind}")
                    found = load_and_look(name, quantization, world)
                    if world.is_main:
                        (folder / f"{scenario}-{source}.json").write_text(json.dumps(found))
            if layout == "single" and precision == "no":
                (folder / "step.json").write_text(json.dumps(step_costs(folder / "model", world)))
            leave(world)
            os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 20)


def load_and_look(folder: Path, quantization: Quantization, world: World) -> dict[str, Any]:
    """The model of `folder`, quantized: its digests, its loss, and by rank what was read and is held. All ranks call it."""
    reads: Counter[str] = Counter()
    load.stored_values = counting(load_values, reads)  # type: ignore[attr-defined]
    model, size = load_model(Model(model_name_or_path=str(folder)), LORA, 0, world, quantization)
    plain = unwrap(model)
    digests, held = {}, 0
    for name, layer in quantized_layers(plain):
        parts = []
        for part, length in ((CODES, layer.sizes.codes), (SCALES, layer.sizes.scales)):
            parameter = layer.get_parameter(part)
            held += (parameter.to_local() if isinstance(parameter, DTensor) else parameter).nbytes
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            whole = whole.detach().view(torch.uint8)
            assert not whole[length:].any(), "the padding is not zero"
            parts.append(xxhash.xxh3_128_hexdigest(whole[:length].numpy().tobytes()))
        digests[name.replace(".base_layer", "")] = parts
    with torch.no_grad():
        loss = float(model(**packed(documents())))
    others = {
        name: str(p.dtype)
        for name, p in plain.named_parameters()
        if not name.endswith((CODES, SCALES))
    }
    return {
        "digests": digests,
        "loss": loss,
        "parameters": size.total,
        "dtypes": others,
        "read": world.gather(dict(reads)),
        "held": world.gather(held),
    }


def step_costs(folder: Path, world: World) -> dict[str, Any]:
    """By checkpointing (off, on): how often a layer was dequantized in a forward and a backward, and the adapters' gradients."""
    found = {}
    counted = layers_of_model.dequantize_tensor
    for checkpointing in (False, True):
        calls: Counter[torch.Size] = Counter()

        def count(quantized: Any, dtype: torch.dtype, calls: Counter[Any] = calls) -> torch.Tensor:
            calls[quantized.codes.data_ptr()] += 1
            return counted(quantized, dtype)

        on = replace(
            world, sharding=replace(world.sharding, activation_checkpointing=checkpointing)
        )
        model: Any = load_model(Model(model_name_or_path=str(folder)), LORA, 0, on, KINDS[TRAINED])[
            0
        ]
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:  # zero at first, when no gradient reaches A
                parameter.data.fill_(0.05)
        layers_of_model.dequantize_tensor = count  # type: ignore[attr-defined]
        model(**packed(documents())).backward()
        layers_of_model.dequantize_tensor = counted  # type: ignore[attr-defined]
        gradients = {
            n: p.grad.flatten().tolist() for n, p in model.named_parameters() if p.grad is not None
        }
        found["on" if checkpointing else "off"] = {
            "calls": sorted(calls.values()),
            "gradients": gradients,
        }
    return found


load_values = load.stored_values


def counting(make: Any, reads: Counter[str]) -> Any:
    """`stored_values` whose values count the numbers that are read of each weight."""

    def made(*arguments: Any) -> Values:
        values = make(*arguments)

        def counted(name: str, slices: Slices) -> torch.Tensor:
            value: torch.Tensor = values(name, slices)
            reads[name] += value.numel()
            return value

        return counted

    return made


def main() -> None:
    folder = Path(sys.argv[1])
    import_all()
    import bitsandbytes  # noqa: F401

    for ranks in map(int, sys.argv[2:]):
        processes = fork_ranks(
            lambda rank, ranks=ranks: on_rank(rank, ranks, folder), ranks, folder / "log.txt"
        )
        codes = wait(processes, 200)
        if any(codes):
            sys.exit(
                f"{ranks} ranks ended with {codes}\n{(folder / 'log.txt').read_text()[-4000:]}"
            )


if __name__ == "__main__":
    main()
