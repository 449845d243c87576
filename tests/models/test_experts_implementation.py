"""How experts are computed: grouped matrix products on a GPU where torch has them, the exact loop elsewhere; both agree."""

import copy
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from finetune.config.layout import Layout, MixedPrecision, Sharding
from finetune.config.schema import Lora
from finetune.distributed.model_parts import expert_modules, local_part
from finetune.models import attention_kernels as kernels
from finetune.models.cross_entropy import install_loss
from finetune.models.decoder_layers import checkpoint_activations, compile_layers
from finetune.models.documents import install_attention
from finetune.models.experts import (
    DividedExperts,
    choose_experts_implementation,
    divide_layer,
    multiply_by_factors,
    register_grouped,
)
from finetune.models.load import build_on_meta
from finetune.models.lora import add_adapters
from finetune.models.routing import find_routing, install_routing
from finetune.training.reference import adapters_off
from tests.cuda_without_gpu.varlen_on_cpu import register_cpu_kernels, takes_varlen
from tests.models.families import VOCABULARY, documents, packed

BF16, FP32 = torch.bfloat16, torch.float32
CHOICES = [
    # layout, mixed precision, dtype of the parameters, device: implementation
    ("fsdp2", "bf16", FP32, "cuda", "grouped"),
    ("fsdp2", "bf16", FP32, "cpu", "eager"),
    ("fsdp2", "no", FP32, "cuda", "eager"),
    ("fsdp2", "no", BF16, "cuda", "grouped"),
    ("fsdp2", "fp16", BF16, "cuda", "eager"),
    ("ddp", "bf16", FP32, "cuda", "grouped"),  # autocast
    ("ddp", "fp16", BF16, "cuda", "eager"),
    ("single", "no", BF16, "cuda", "grouped"),
    ("single", "no", BF16, "cpu", "eager"),
]
CONFIG: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "vocab_size": 64, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "initializer_range": 0.3,
}  # fmt: skip


@pytest.mark.parametrize(("layout", "precision", "dtype", "device", "expected"), CHOICES)
def test_the_choice(
    layout: str, precision: str, dtype: torch.dtype, device: str, expected: str
) -> None:
    sharding = Sharding(
        layout=cast(Layout, layout), mixed_precision=cast(MixedPrecision, precision)
    )
    assert choose_experts_implementation(sharding, dtype, device) == expected


def make_model(family: str, implementation: str, *, adapted: bool, **sizes: int) -> Any:
    """A model of random weights, the same for each implementation, with adapters on its experts if asked for."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model: Any = build_on_meta(CONFIG_MAPPING[family](**CONFIG | sizes), FP32)
    assert model.config._experts_implementation == "eager"  # until the loading knows better
    if adapted:
        targets = ("experts.gate_up_proj", "experts.down_proj")
        add_adapters(
            model,
            Lora(use_peft=True, lora_r=4, lora_target_modules=(), lora_target_parameters=targets),
            FP32,
        )
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2, generator=generator)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    register_grouped()
    model.set_experts_implementation(implementation)
    return model


class Operators(TorchDispatchMode):
    """Records the operators that run, and the largest tensor that one of them makes."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.largest = 0

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = operator(*args, **kwargs or {})
        inputs = {
            each.untyped_storage().data_ptr()
            for each in tree_leaves(args)
            if isinstance(each, torch.Tensor)
        }
        made = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        new = [each.numel() for each in made if each.untyped_storage().data_ptr() not in inputs]
        self.names.add(str(operator))
        self.largest = max(self.largest, *new, 0)
        return result


def take_step(model: Any, tokens: int) -> list[torch.Tensor]:
    """The loss, and the gradient of each trained parameter."""
    loss = (
        model(input_ids=torch.arange(3, 3 + tokens)[None], use_cache=False).logits.square().mean()
    )
    loss.backward()
    return [loss, *(p.grad for p in model.parameters() if p.requires_grad)]


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_grouped_products_compute_what_the_loop_computes(family: str) -> None:
    """On a CPU torch has them too, so that the way of a GPU is walked, forward and gradients. Rows are moved without adding
    gradients up by index."""
    expected = take_step(make_model(family, "eager", adapted=False), 40)
    with Operators() as seen:
        found = take_step(make_model(family, "grouped", adapted=False), 40)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    assert "aten._grouped_mm.default" in seen.names
    assert not any("index_put" in name or "index_add" in name for name in seen.names), seen.names


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_adapters_of_experts_compute_what_peft_does_and_nothing_of_the_size_of_the_experts(
    family: str,
) -> None:
    """Neither the product of the factors nor its gradient; peft's own way makes both."""
    model, expected = make_model(family, "eager", adapted=True), []
    experts = min(
        p.numel() for module in expert_modules(model) for p in module.parameters() if p.dim() == 3
    )
    with Operators() as of_peft:
        expected = take_step(model, 8)
    assert of_peft.largest >= experts
    model = make_model(family, "eager", adapted=True)
    multiply_by_factors(model)
    with Operators() as seen:
        found = take_step(model, 8)
    assert seen.largest < experts
    for one, other in zip(expected, found, strict=True):
        assert (one - other).norm() < 1e-5 * one.norm()
    with adapters_off(model), torch.no_grad():
        without = model(input_ids=torch.arange(3, 11)[None], use_cache=False).logits.square().mean()
    assert abs(without - found[0]) > 0.01 * found[0]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_layers_of_a_mixture_compile_to_one_graph_without_a_break(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With adapters on experts, checkpointed, balanced: the loss, gradients, and what routers chose, of rows of two lengths."""
    register_cpu_kernels()
    monkeypatch.setattr(kernels, "_can_use_varlen", takes_varlen)
    torch._dynamo.reset()
    counters.clear()
    found = []
    for is_compiled in (False, True):
        model = make_model(family, "grouped", adapted=True, vocab_size=VOCABULARY).train()
        install_attention(model)
        install_loss(model)
        install_routing(model, 0.1)
        multiply_by_factors(model)
        checkpoint_activations(model, 1, "attention")
        if is_compiled:
            compile_layers(model, backend="eager")
        for length in (40, 24):
            inputs = packed(documents((length,))) | {
                "token_mask": torch.ones(1, length, dtype=torch.bool)
            }
            loss, routing = model(**inputs, use_cache=False), find_routing(model)
            assert routing is not None
            (loss + routing.auxiliary_loss(routing.count_selected())).backward()
        found.append([routing._counts, *(p.grad for p in model.parameters() if p.requires_grad)])
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= 1e-5 * one.norm()


def test_widths_that_grouped_products_do_not_take_are_multiplied_all_the_same() -> None:
    sizes = {"intermediate_size": 50}  # not a multiple of 16 bytes
    one, other = (
        take_step(make_model("gpt_oss", way, adapted=False, **sizes), 8)
        for way in ("eager", "grouped")
    )
    for each, same in zip(one, other, strict=True):
        torch.testing.assert_close(each, same, rtol=1e-3, atol=1e-5)


def test_a_token_that_chooses_no_expert_gets_nothing_of_them() -> None:
    """As Zaya's routers may choose: beyond the last expert."""
    module = expert_modules(make_model("mixtral", "grouped", adapted=False))[0]
    hidden, weights = torch.randn(3, 32, requires_grad=True), torch.ones(3, 2)
    outputs = module(hidden, torch.tensor([[0, 4], [4, 4], [1, 2]]), weights)
    alone = module(
        hidden,
        torch.tensor([[0, 1], [0, 1], [1, 2]]),
        torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]]),
    )
    torch.testing.assert_close(outputs, alone)
    assert not outputs[1].any() and outputs[0].any()
    gradient = torch.autograd.grad(outputs.square().sum(), hidden)[0]
    assert not gradient[1].any() and gradient[0].any()


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_divided_experts_add_the_adapters_that_peft_adds(family: str) -> None:
    """And none where they are off, as for a reference."""
    model, ids = make_model(family, "eager", adapted=True), torch.arange(3, 43)[None]

    def compute() -> list[torch.Tensor]:
        with torch.no_grad():
            on = model(input_ids=ids, use_cache=False).logits
            with adapters_off(model):
                return [on, model(input_ids=ids, use_cache=False).logits]

    on, off = compute()
    assert (on - off).norm() > 0.1 * off.norm()
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        for module in expert_modules(model):
            weights = [parameter.detach().clone() for parameter in module.parameters()]
            divide_layer(model, module, init_device_mesh("cpu", (1,)))
            for parameter, whole in zip(module.parameters(), weights, strict=True):
                local_part(parameter).data.copy_(whole)
        torch.testing.assert_close(compute(), [on, off])
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_divided_experts_compute_what_transformers_does(family: str, implementation: str) -> None:
    """In a group of one, by either implementation; experts that no token comes to have gradients of zero."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[family](**CONFIG)
    config._experts_implementation = implementation
    whole = next(iter(expert_modules(AutoModelForCausalLM.from_config(config))))
    for parameter in whole.parameters():
        nn.init.normal_(parameter, 0, 0.2)
    module = copy.deepcopy(whole)
    hidden, chosen = torch.randn(7, 32, requires_grad=True), torch.randint(0, 4, (7, 2))
    weights = torch.rand(7, 2, requires_grad=True)
    inputs = [hidden, weights, *whole.parameters()]
    expected = whole(hidden, chosen, weights)
    expected_gradients = torch.autograd.grad(expected.square().sum(), inputs)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        divided = DividedExperts(module, init_device_mesh("cpu", (1,)))
        for ours, theirs in zip(module.parameters(), whole.parameters(), strict=True):
            local_part(ours).data.copy_(theirs)
        found = divided.forward(hidden, chosen, weights)
        gradients = torch.autograd.grad(
            found.square().sum(), [hidden, weights, *module.parameters()]
        )
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(
            [local_part(each) for each in gradients], list(expected_gradients)
        )
        nothing = divided.compute(hidden[:0], chosen[:0, 0])
        assert nothing.shape == (0, 32)
        empty = torch.autograd.grad(nothing.sum(), list(module.parameters()))
        assert [each.shape for each in empty] == [each.shape for each in whole.parameters()]
        assert not any(local_part(each).any() for each in empty)
    finally:
        dist.destroy_process_group()
