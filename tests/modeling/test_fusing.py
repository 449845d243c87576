"""Compiled layers compute the same; Liger is refused in a sentence where it cannot run."""

import pytest
import torch

from finetune.errors import UserError
from finetune.modeling.fusing import compile_layers, decoder_layers, use_liger_kernels
from tests.modeling.families import build, documents, gradients, ours, packed, relative_error


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_layers_give_the_same_loss_and_gradients_also_when_recomputed(backend: str) -> None:
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


def test_decoder_layers_are_found_by_the_models_own_word() -> None:
    assert len(decoder_layers(build("qwen3"))) == 2


def test_liger_without_a_gpu_is_refused_in_a_sentence() -> None:
    with pytest.raises(UserError, match="Liger's kernels run on CUDA only"):
        use_liger_kernels(build("llama"), torch.device("cpu"))
