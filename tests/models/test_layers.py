"""Compiled layers compute the same, once for all of them; Liger is refused in a sentence where it cannot run."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.models.decoder_layers import (
    checkpoint_activations,
    compile_layers,
    decoder_layers,
    use_liger_kernels,
)
from tests.models.families import build, documents, gradients, ours, packed, relative_error


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_layers_give_the_same_loss_and_gradients_also_when_recomputed(
    backend: str,
) -> None:
    model = ours(build("mistral"))
    names = [name for name, _ in model.named_parameters()]
    batches = [packed(documents()), packed(documents((31, 3, 9)))]
    losses = [model(**batch) for batch in batches]
    expected = [gradients(model, loss) for loss in losses]
    assert compile_layers(model, backend) == 2
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert [name for name, _ in model.named_parameters()] == names
    for batch, truth, plain in zip(batches, expected, losses, strict=True):
        loss = model(**batch)
        assert relative_error(loss, plain) <= 1e-6
        found = gradients(model, loss)
        assert max(relative_error(found[name], truth[name]) for name in truth) <= 1e-5


def test_decoder_layers_are_those_that_transformers_does_not_split() -> None:
    assert len(decoder_layers(build("qwen3"))) == 2


class KernelCalls(TorchDispatchMode):
    """Counts the calls of attention's kernel on a CPU."""

    count = 0

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += operator is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return operator(*args, **(kwargs or {}))


def test_attention_that_is_kept_is_not_computed_again() -> None:
    def count_calls(keeps: Any) -> int:
        model = ours(build("llama"))
        checkpoint_activations(model, 1, keeps)
        with KernelCalls() as calls:
            model(**packed(documents())).backward()
        return calls.count

    once = count_calls("attention")
    assert count_calls("nothing") == 2 * once > 0
    assert count_calls("attention_and_projections") == once


def test_every_kth_layer_is_computed_again_in_backward_and_no_other(loaded: dict[str, Any]) -> None:
    recomputed = loaded["deep"]
    assert recomputed["None"] == [False, False, False, False]
    assert recomputed["1"] == [True, True, True, True]
    assert recomputed["2"] == [True, False, True, False]
    assert recomputed["3"] == [True, False, False, True]


@pytest.mark.parametrize(
    ("family", "config"),
    [("llama", {}), ("mixtral", {}), ("phi3", {}), ("phi3", {"partial_rotary_factor": 0.5})],
)
def test_liger_leaves_the_experts_of_a_mixture_and_heads_rotated_in_part_alone(
    family: str, config: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Liger runs on a GPU only: its own function is replaced by one that remembers what it is asked for."""
    asked: dict[str, bool] = {}
    liger = ModuleType("liger_kernel.transformers")
    vars(liger)["_apply_liger_kernel_to_instance"] = lambda _model, **keys: asked.update(keys)
    for module in (ModuleType("liger_kernel"), liger):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    use_liger_kernels(build(family, **config))
    assert asked.get("swiglu", True) is (family != "mixtral") and asked["cross_entropy"] is False
    assert asked.get("rope", True) is not bool(config)
