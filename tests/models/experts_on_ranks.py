"""Run on every rank: digests of each expert's bytes in quantized mixtures, under every layout of so many ranks.

Arguments: the folder of the models and of the results.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed.tensor import DTensor

from finetune.config.layout import Sharding
from finetune.config.module_names import base_name
from finetune.config.schema import Lora, Model, Quantization
from finetune.distributed.join import join, leave
from finetune.distributed.model_parts import unwrap
from finetune.distributed.world import World
from finetune.models.load import load_model
from finetune.models.quantized_layers import CODES, SCALES, QuantizedWeight, quantized_layers
from finetune.models.quantized_weights import QuantizedTensor, unpack_scales
from tests.ranks import open_stores

KINDS = {
    "nf4": Quantization(load_in_4bit=True),
    "double": Quantization(load_in_4bit=True, bnb_4bit_use_double_quant=True),
    "int8": Quantization(load_in_8bit=True),
}
WORLDS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"single": {"layout": "single"}},
    2: {
        "ddp": {"layout": "ddp"},
        "fsdp2": {"layout": "fsdp2"},
        "divided": {"layout": "fsdp2", "expert_parallel_size": 2},
    },
    4: {
        "divided by two": {"layout": "fsdp2", "expert_parallel_size": 2},
        "replicas": {
            "layout": "fsdp2",
            "expert_parallel_size": 2,
            "replicate_size": 2,
            "shard_size": 2,
        }
        | {"strategy": "HYBRID_SHARD"},
    },
}
LORA = Lora(use_peft=True, lora_r=2, lora_target_modules=("o_proj",))


def digest(codes: torch.Tensor, scales: torch.Tensor) -> str:
    """Of the codes and the fp32 scales of one expert's matrix."""
    return xxhash.xxh3_128_hexdigest(
        codes.flatten().view(torch.uint8).numpy().tobytes() + scales.numpy().tobytes()
    )


def look(folder: Path, quantization: Quantization, world: World) -> dict[str, str]:
    """By weight and expert: the digest of what is held of it. All ranks call it."""
    model = unwrap(
        load_model(Model(model_name_or_path=str(folder)), LORA, 0, world, quantization)[0]
    )
    found: dict[str, str] = {}
    for name, layer in quantized_layers(model):
        if not layer.leaf:
            found |= {f"{base_name(name)}.{expert}": each for expert, each in _experts(layer)}
    everywhere: list[dict[str, str]] = world.gather(found)
    merged: dict[str, str] = {}
    for each in everywhere:
        assert all(merged.get(key, value) == value for key, value in each.items()), (
            "two ranks differ in an expert"
        )
        merged |= each
    return merged


def _experts(layer: QuantizedWeight) -> list[tuple[int, str]]:
    held = {}
    for part, size in ((CODES, layer.sizes.codes), (SCALES, layer.sizes.scales)):
        parameter = layer.get_parameter(part).detach()
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        held[part] = whole.view(torch.uint8)[:size]
    tensor = QuantizedTensor(
        held[CODES], held[SCALES], layer.shape, layer.quantization, layer.block
    )
    scales = (
        tensor.scales.view(torch.float32) if layer.quantization.bits == 8 else unpack_scales(tensor)
    )
    experts = layer.shape[0]
    return [
        (layer.part.start + number, digest(codes, magnitudes))
        for number, (codes, magnitudes) in enumerate(
            zip(tensor.codes.view(experts, -1), scales.view(experts, -1), strict=True)
        )
    ]


def main() -> None:
    folder, ranks = Path(sys.argv[1]), int(os.environ["WORLD_SIZE"])
    for number, (layout, settings) in enumerate(WORLDS[ranks].items()):
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + number)
        open_stores()
        world = join(Sharding(use_cpu=True, **settings))
        found = {
            f"{family.name} {kind}": look(family, quantization, world)
            for family in sorted(folder.glob("*/"))
            for kind, quantization in KINDS.items()
        }
        if world.is_main:
            (folder / f"{layout}.json").write_text(json.dumps(found))
        leave(world)


if __name__ == "__main__":
    main()
