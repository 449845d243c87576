"""Offloaded activations: the gradients bit for bit, the device's memory as planned, and copies that run ahead of the backward."""

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from finetune.config.schema import Lora
from finetune.models import attention_kernels as kernels
from finetune.models import decoder_layers as activation_offload
from finetune.models.cross_entropy import install_loss
from finetune.models.decoder_layers import (
    ActivationOffload,
    CudaCopies,
    _OffloadedTensor,
    checkpoint_activations,
    compile_layers,
)
from finetune.models.documents import install_attention
from finetune.models.fused_lora import fuse_adapters
from finetune.models.lora import add_adapters
from finetune.plan.activations import Computation, kept_bytes
from finetune.plan.architecture import read_architecture
from tests.conftest import slow_but
from tests.cuda_without_gpu.varlen_on_cpu import register_cpu_kernels, takes_varlen
from tests.plan.test_activations import CONFIG, DOCUMENTS, packed_inputs
from tests.plan.traced import allocated_after, allocated_peak

LAYERS = 6


class NumpyCopies:
    """numpy's memory stands for the host's, so that torch's allocator counts the device's alone; what is called, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def to_host(self, tensor: Tensor) -> tuple[Tensor, Any]:
        host = (
            torch.from_numpy(np.empty(tensor.nbytes, np.uint8))
            .view(tensor.dtype)
            .view(tensor.shape)
        )
        host.copy_(tensor.detach())
        return host, self._note("away")

    def to_device(self, tensor: Tensor, device: torch.device) -> tuple[Tensor, Any]:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device).copy_(
            tensor
        ), self._note("back")

    def wait(self, event: Any) -> None:
        self.calls.append(f"wait {event}")

    def _note(self, what: str) -> int:
        self.calls.append(what)
        return len(self.calls) - 1


def build(
    keeps: Any = "nothing",
    offload: ActivationOffload | None = None,
    *,
    lora: Lora | None = None,
    every: int = 1,
    dropout: float = 0.0,
) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        **CONFIG | {"num_hidden_layers": LAYERS, "head_dim": 16, "attention_dropout": dropout}
    )
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    install_attention(model)
    install_loss(model)
    if lora is not None:
        add_adapters(model, lora, torch.bfloat16)
        fuse_adapters(model)
        model.to(torch.bfloat16)
    checkpoint_activations(model, every, keeps, offload)
    return model.train()


def backward(model: Any) -> Tensor:
    """All gradients of a forward and backward, in one."""
    torch.manual_seed(1)
    model.model(
        **packed_inputs(), use_cache=False
    ).last_hidden_state.float().square().sum().backward()
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize(
    "keeps",
    slow_but(["attention_and_projections"], ["nothing", "attention", "attention_and_projections"]),
)
@pytest.mark.parametrize(
    "keys", [{}, {"lora": Lora(use_peft=True, lora_r=8)}, {"every": 2}, {"dropout": 0.1}], ids=["full", "lora", "every second", "dropout"]
)  # fmt: skip
def test_gradients_are_the_same_bit_for_bit_and_the_device_holds_one_layer(
    keeps: Any, keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        activation_offload, "MIN_OFFLOADED_BYTES", 1
    )  # the statistics of a short document too
    plain, ours = build(keeps, **keys), build(keeps, ActivationOffload(NumpyCopies()), **keys)
    assert torch.equal(backward(plain), backward(ours))
    assert torch.equal(backward(plain), backward(ours)), "a second time, as in the next step"
    if "dropout" in keys and keeps != "nothing":
        return  # which attention computes by a kernel that is not kept
    held = [
        allocated_after(lambda: model.model(**packed_inputs(), use_cache=False))  # noqa: B023
        for model in (plain, ours)
    ]
    a = read_architecture(
        {"model_type": "llama", **CONFIG, "num_hidden_layers": LAYERS, "head_dim": 16},
        "config.json",
    )
    every, lora = keys.get("every", 1), keys.get("lora")
    runs = [
        Computation(
            itemsize=2, checkpoint_every=every, keeps=keeps, lora=lora, cpu=True, offloads=o
        )
        for o in (False, True)
    ]
    planned = [sum(DOCUMENTS) * sum(kept_bytes(a, run).values()) for run in runs]
    assert held[0] - held[1] == planned[0] - planned[1] > 0


@pytest.mark.slow
def test_compiled_layers_offload_their_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no parameter, which they save as well; in the graphs that they have without it."""
    register_cpu_kernels()
    monkeypatch.setattr(kernels, "_can_use_varlen", takes_varlen)
    torch._dynamo.reset()
    counters.clear()
    copies = NumpyCopies()
    plain, ours = build(), build()
    compile_layers(plain, backend="aot_eager")
    compile_layers(ours, backend="aot_eager", offload=ActivationOffload(copies))
    assert torch.equal(backward(plain), backward(ours))
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert copies.calls.count("away") == LAYERS and copies.calls.count("back") == LAYERS - 1
    held = [
        allocated_after(lambda: model.model(**packed_inputs(), use_cache=False))  # noqa: B023
        for model in (plain, ours)
    ]
    assert held[0] - held[1] == (LAYERS - 1) * 2 * CONFIG["hidden_size"] * sum(DOCUMENTS)


def test_the_backward_holds_two_layers(capsys: pytest.CaptureFixture[str]) -> None:
    """And under LoRA the first layer's input, which transformers has made a leaf that gets a gradient."""
    lora = Lora(use_peft=True, lora_r=1)  # so that gradients are small
    plain, ours = build(lora=lora), build(offload=ActivationOffload(NumpyCopies()), lora=lora)
    peaks = []
    for model in (plain, ours):
        backward(model)
        peaks.append(allocated_peak(lambda: backward(model)))  # noqa: B023
    layer = 2 * CONFIG["hidden_size"] * sum(DOCUMENTS)
    with capsys.disabled():
        print(
            f"\nactivation offload: {peaks[0]:,} bytes, offloaded {peaks[1]:,}; a layer keeps {layer:,}"
        )
    assert 0.9 * (LAYERS - 3) * layer <= peaks[0] - peaks[1] <= (LAYERS - 2) * layer


def test_copies_overlap_with_the_next_layer_and_come_back_one_ahead() -> None:
    copies = NumpyCopies()
    model = build(offload=ActivationOffload(copies))
    hidden = model.model(**packed_inputs(), use_cache=False).last_hidden_state
    # Each layer's copy begins with its forward, and is waited for when the next layer's has ended.
    kinds = [call.split()[0] for call in copies.calls]
    assert kinds == ["away"] + ["away", "wait"] * (LAYERS - 1)
    copies.calls.clear()
    hidden.float().sum().backward()
    # The last layer's is still on the device; with each one taken, the copy of the one below begins before the wait for it.
    assert [call.split()[0] for call in copies.calls] == ["back", "wait"] * (LAYERS - 1) + ["wait"]
    gc.disable()  # as within a step: nothing waits for a collection
    try:
        before = weakref.WeakSet(
            each for each in gc.get_objects() if isinstance(each, _OffloadedTensor)
        )
        del hidden
        assert len(before) == 0
    finally:
        gc.enable()
    with torch.no_grad():
        model.model(**packed_inputs(), use_cache=False)
    assert "away" not in copies.calls


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("keeps", ["nothing", "attention_and_projections"])
def test_on_cuda_the_gradients_are_the_same(keeps: Any) -> None:
    inputs = {k: v.cuda() if isinstance(v, Tensor) else v for k, v in packed_inputs().items()}
    found = []
    for offload in (None, ActivationOffload(CudaCopies())):
        model = build(keeps, offload).cuda()
        model.model(**inputs, use_cache=False).last_hidden_state.float().square().sum().backward()
        found.append(torch.cat([p.grad.flatten() for p in model.model.parameters()]))
    assert torch.equal(*found)
