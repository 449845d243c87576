"""Fused LoRA layers: peft's numbers up to rounding, less kept for the backward, and peft's own forward where they do not apply."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.config.schema import Quantization
from finetune.models.cpu_products import OVERRIDES
from finetune.models.fused_lora import fuse_adapters
from finetune.models.quantized_layers import CODES, SCALES, QuantizedLinear
from tests.plan.traced import allocated_peak, saved_for_backward

aten = torch.ops.aten
WIDTH_IN, WIDTH_OUT, RANK, TOKENS = 96, 160, 8, 40
AUTOCAST = "autocast"
NAMES = ("gate_proj", "up_proj")  # which are one operation together


def make_layers(dtype: Any = torch.float32, *, bias: bool = False, **config: Any) -> nn.Module:
    """Two adapted linear layers that read the same input, both factors of their adapters random."""
    from peft import LoraConfig, inject_adapter_in_model

    torch.manual_seed(0)
    layers = nn.ModuleDict({name: nn.Linear(WIDTH_IN, WIDTH_OUT, bias=bias) for name in NAMES})
    layers = inject_adapter_in_model(
        LoraConfig(r=RANK, lora_alpha=12, target_modules=list(NAMES), **config), layers
    )
    for name, parameter in layers.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    frozen = torch.bfloat16 if dtype == AUTOCAST else dtype
    for name, parameter in layers.named_parameters():
        parameter.data = parameter.data.to(
            torch.float32 if dtype == AUTOCAST and "lora_" in name else frozen
        )
    return layers


def run(layers: nn.Module, dtype: Any, *, requires_grad: bool = True) -> dict[str, Tensor]:
    """Outputs and gradients of a product of both layers, over an input of two leading dimensions."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, TOKENS // 2, WIDTH_IN, generator=generator).to(
        torch.float32 if dtype == AUTOCAST else dtype
    )
    x.requires_grad_(requires_grad)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == AUTOCAST):
        outputs = {name: layer(x) for name, layer in layers.items()}
    loss = (outputs[NAMES[0]].float().tanh() * outputs[NAMES[1]].float()).square().sum()
    loss.backward()
    found = outputs | {name: p.grad for name, p in layers.named_parameters() if p.grad is not None}
    return found | ({"x": x.grad} if requires_grad else {})


def worst_error(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    assert found.keys() == exact.keys()
    return max(
        float((found[name].detach().double() - each.detach()).norm() / each.detach().norm())
        for name, each in exact.items()
    )


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, AUTOCAST], ids=str)
def test_outputs_and_gradients_are_pefts_up_to_rounding(
    dtype: Any, bias: bool, capsys: Any
) -> None:
    """Beside the same in fp64, of the same rounded weights: no further from it than peft's are."""
    peft, fused, exact = (make_layers(dtype, bias=bias) for _ in range(3))
    assert fuse_adapters(fused) == 2
    truth = run(exact.double(), torch.float64)
    theirs, ours = worst_error(run(peft, dtype), truth), worst_error(run(fused, dtype), truth)
    with capsys.disabled():
        print(f"\n{dtype}: error {ours:.1e}, peft's {theirs:.1e}")
    assert ours <= 1.25 * theirs and theirs > 0
    assert {n: g.dtype for n, g in run(fused, dtype).items()} == {
        n: g.dtype for n, g in run(peft, dtype).items()
    }


def test_every_product_is_one_that_a_cpu_without_bf16_instructions_multiplies_in_fp32() -> None:
    """Those that work in place are not: torch's own loops would compute them."""
    products = set()

    class Products(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name = function.name().removeprefix("aten::")
            if any(part in name for part in ("mm", "mv", "dot")):
                products.add(name)
            return function(*args, **(kwargs or {}))

    for dtype in (torch.bfloat16, AUTOCAST):
        layers = make_layers(dtype, bias=True)
        fuse_adapters(layers)
        with Products():
            run(layers, dtype)
    assert products and not products - OVERRIDES.keys(), products


def test_the_first_layers_input_needs_no_gradient() -> None:
    peft, fused = make_layers(), make_layers()
    fuse_adapters(fused)
    assert (
        worst_error(
            run(fused, torch.float32, requires_grad=False),
            run(peft, torch.float32, requires_grad=False),
        )
        < 1e-5
    )


@pytest.mark.parametrize(
    "keeps", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["dequantized twice", "kept"]
)
def test_a_quantized_base_is_fused_too(keeps: bool) -> None:
    pytest.importorskip("bitsandbytes")
    from finetune.models.quantized_weights import quantize_tensor

    quantization = Quantization(load_in_4bit=True)
    peft, fused, unquantized = make_layers(), make_layers(), make_layers()
    for layer in (layer for layers in (peft, fused) for layer in layers.values()):
        whole = quantize_tensor(layer.base_layer.weight.detach(), quantization)
        layer.base_layer = QuantizedLinear(layer.base_layer, quantization, torch.float32)
        layer.base_layer.keeps_dequantized = keeps
        for name, part in ((CODES, whole.codes), (SCALES, whole.scales)):
            padded = nn.functional.pad(part, (0, -len(part) % 4)).view(torch.float32)
            setattr(layer.base_layer, name, nn.Parameter(padded, requires_grad=False))
    fuse_adapters(fused)
    theirs = run(peft, torch.float32)
    assert worst_error(run(fused, torch.float32), theirs) < 1e-5
    assert worst_error(run(fused, torch.float32), run(unquantized, torch.float32)) > 1e-2
    for parameter in fused.parameters():
        parameter.grad = None
    assert worst_error(run_compiled(fused, torch.float32, []), theirs) < 1e-5


def test_less_is_kept_and_allocated_than_by_peft(capsys: pytest.CaptureFixture[str]) -> None:
    kept, peaks = {}, {}
    for name in ("peft", "fused"):
        layers = make_layers(AUTOCAST)
        if name == "fused":
            fuse_adapters(layers)
        x = torch.randn(
            TOKENS, WIDTH_IN, requires_grad=True
        ).bfloat16()  # as a frozen base's layers hand it on
        with (
            saved_for_backward(layers.parameters()) as saved,
            torch.autocast("cpu", torch.bfloat16),
        ):
            layers[NAMES[0]](x), layers[NAMES[1]](x)
        # Casts of the adapters' factors are peft's under autocast too; they do not grow with the tokens.
        factors = {2 * RANK * WIDTH_IN, 2 * RANK * WIDTH_OUT}
        kept[name] = sum(size for size in saved.values() if size not in factors)
        run(layers, AUTOCAST)
        peaks[name] = allocated_peak(lambda: run(layers, AUTOCAST))  # noqa: B023
    with capsys.disabled():
        print(f"\nkept {kept}, allocated at most {peaks}")
    inner = 2 * 2 * RANK * TOKENS  # x A^T of both
    assert kept["fused"] == 2 * WIDTH_IN * TOKENS + inner  # the input itself, once
    assert kept["peft"] == 2 * 2 * WIDTH_IN * TOKENS + inner  # a copy for each, by way of fp32
    assert peaks["fused"] < peaks["peft"]


@pytest.mark.parametrize("config", [{"lora_dropout": 0.1}, {"use_dora": True}], ids=str)
def test_dropout_and_dora_stay_pefts(config: dict[str, Any]) -> None:
    assert fuse_adapters(make_layers(**config)) == 0


def test_a_layer_whose_adapter_is_off_or_merged_is_the_base() -> None:
    layers = make_layers()
    fuse_adapters(layers)
    layer, x = layers[NAMES[0]], torch.randn(3, WIDTH_IN)
    adapted = layer(x)
    layer.enable_adapters(False)
    assert torch.equal(layer(x), layer.base_layer(x)) and not torch.equal(layer(x), adapted)
    layer.enable_adapters(True)
    assert torch.equal(layer(x), adapted)
    layer.merge()
    torch.testing.assert_close(layer(x), adapted)


@pytest.mark.parametrize("dtype", [torch.float32, AUTOCAST], ids=str)
def test_the_compiled_form_reads_and_writes_less_than_pefts(dtype: Any) -> None:
    """Counted in the graphs that a compiler gets: what is computed number by number over the outputs of a layer."""
    passes = {}
    for name in ("peft", "fused"):
        layers = make_layers(dtype)
        if name == "fused":
            fuse_adapters(layers)
        graphs: list[Any] = []
        found = run_compiled(layers, dtype, graphs)
        assert worst_error(found, run(make_layers(dtype), dtype)) < (
            1e-5 if dtype == torch.float32 else 1e-2
        )
        nodes = [node for graph in graphs for node in graph.graph.nodes if "val" in node.meta]
        wide = [
            node
            for node in nodes
            if node.target in (aten.mul.Tensor, aten.add.Tensor) and is_wide(node.meta["val"])
        ]
        passes[name] = len(wide)
    # In graphs that both layers share: the product scaled and added, the gradient scaled, two gradients of the input added.
    assert passes == {"peft": 4, "fused": 0}


def is_wide(value: Tensor) -> bool:
    """Whether it has a number for each token and output."""
    return value.shape[-1] in (WIDTH_IN, WIDTH_OUT) and value.numel() >= TOKENS * WIDTH_IN


def run_compiled(layers: nn.Module, dtype: Any, graphs: list[Any]) -> dict[str, Tensor]:
    """`run` with compiled layers, each whole; their forward and backward graphs are added to `graphs`."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def compiler(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler)
    for layer in layers.values():
        layer.forward = torch.compile(layer.forward, dynamic=True, fullgraph=True, backend=backend)
    return run(layers, dtype)


def test_a_model_may_add_to_an_output_in_place() -> None:
    """As Falcon adds attention to the MLP."""
    found: list[dict[str, Tensor]] = []
    for fuse in (False, True):
        layers = make_layers()
        if fuse:
            fuse_adapters(layers)
        x = torch.randn(
            2, TOKENS, WIDTH_IN, generator=torch.Generator().manual_seed(1)
        ).requires_grad_()
        output = layers[NAMES[0]](x)
        output += layers[NAMES[1]](x)
        output.tanh().sum().backward()
        assert x.grad is not None
        gradients = {name: p.grad for name, p in layers.named_parameters() if p.grad is not None}
        found.append({"x": x.grad, "output": output} | gradients)
    assert worst_error(found[1], found[0]) < 1e-5


def test_layers_of_one_operation_may_have_inputs_of_their_own() -> None:
    """Then the second computes its own output; and a layer that is never called is no longer computed beside another."""
    for calls in (NAMES, NAMES[:1]):
        found: list[dict[str, Tensor]] = []
        for fuse in (False, True):
            layers = make_layers()
            if fuse:
                fuse_adapters(layers)
            generator = torch.Generator().manual_seed(1)
            for _ in range(2):
                inputs = {
                    name: torch.randn(TOKENS, WIDTH_IN, generator=generator) for name in calls
                }
                outputs = {name: layers[name](x) for name, x in inputs.items()}
                torch.stack(list(outputs.values())).square().sum().backward()
            grads = {
                name: p.grad
                for name, p in layers.named_parameters()
                if p.grad is not None and p.grad.any()
            }
            found.append(outputs | grads)
            if fuse and calls != NAMES:
                assert len(layers[NAMES[0]].group) == 1
        assert worst_error(found[1], found[0]) < 1e-5


def test_layers_that_share_their_input_multiply_it_once() -> None:
    """The factors A of both are one product, and the gradients of the input add up within the products."""
    layers = make_layers(torch.bfloat16)
    fuse_adapters(layers)
    products: list[tuple[str, tuple[int, ...]]] = []
    sums = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = function(*args, **(kwargs or {}))
            if function in (aten.mm.default, aten.addmm.out):
                products.append((function.name(), tuple(result.shape)))
            if function is aten.add.Tensor:
                sums.append(tuple(result.shape))
            return result

    with Products():
        run(layers, torch.bfloat16)
    assert products.count(("aten::mm", (TOKENS, 2 * RANK))) == 1  # x A^T of both
    assert products.count(("aten::mm", (2 * RANK, WIDTH_IN))) == 1  # the gradients of A
    assert (
        products.count(("aten::mm", (TOKENS, WIDTH_IN))) == 1
    )  # the gradient of the input, to which two are added
    assert products.count(("aten::addmm.out", (TOKENS, WIDTH_IN))) == 2
    assert (TOKENS, WIDTH_IN) not in sums and (2, TOKENS // 2, WIDTH_IN) not in sums
