"""Compiled forwards and backwards on a CUDA device of fake tensors, in a process of its own: `fake_graphs.py RESULTS.json CASES...`.

Written is, by the case's name, how many graphs dynamo made and where it broke off, or the error that ended it.
"""

import json
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.compilers import nop
from torch._subclasses.fake_tensor import FakeTensorMode

from finetune.config.schema import Model
from finetune.models import load
from finetune.models.decoder_layers import compile_layers
from tests.cuda_without_gpu.fake_cases import CASES, Case, config_of, make_micro_batch
from tests.cuda_without_gpu.fake_steps import joined, pretend


def trace(case: Case) -> dict[str, Any]:
    """The graphs of a forward and a backward, and the reasons of breaks between them."""
    torch._dynamo.reset()
    counters.clear()
    try:
        with (
            joined(case) as world,
            FakeTensorMode(),
            torch.autograd.set_multithreading_enabled(False),
        ):
            keys = Model(model_config=config_of(case), torch_compile=True, **case.model)
            optimization = next(iter(case.optimizations.values()))
            model, _ = load.load_model(keys, case.lora, 0, world, case.quantization, optimization)
            batch = make_micro_batch(case.packing, case.parts).to(world.device)
            model.train()(**batch.inputs).backward()
    except Exception:
        return {"error": traceback.format_exc()}
    return {"graphs": counters["stats"]["unique_graphs"], "breaks": dict(counters["graph_break"])}


def pad_in_rows(tensor: Tensor, pads: Sequence[Any], value: float = 0) -> Tensor:
    """`F.pad` at the ends of dimensions, as inductor writes it: in rows, also where there is nothing to pad.

    Torch's own kernel then keeps the strides, which a product of 8 bits refuses if a graph for all lengths was traced with others.
    """
    for place, (before, after) in enumerate(zip(pads[::2], pads[1::2], strict=True)):
        dim, sizes = tensor.dim() - 1 - place, list(tensor.shape)
        filled = tensor.new_full([*sizes[:dim], sizes[dim] + after, *sizes[dim + 1 :]], value)
        tensor = torch.slice_scatter(filled, tensor, dim, before, sizes[dim])
        assert before == 0
    return tensor


if __name__ == "__main__":
    pretend(traces=True)
    # Dynamo saves the state of the device's generator around what it traces; the fake one has none.
    torch.cuda.get_rng_state = lambda *_: torch.zeros(16, dtype=torch.uint8)
    torch.cuda.set_rng_state = lambda *_: None
    torch.accelerator.is_available = lambda: False  # type: ignore[assignment]
    backend = aot_autograd(
        fw_compiler=nop, decompositions={torch.ops.aten.constant_pad_nd.default: pad_in_rows}
    )
    load.compile_layers = partial(compile_layers, backend=backend)  # type: ignore[assignment]
    chosen = set(sys.argv[2:])
    results = {case.name: trace(case) for case in CASES if case.name in chosen}
    Path(sys.argv[1]).write_text(json.dumps(results))
