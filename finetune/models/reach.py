"""Finds the parameters that get no gradient, before the weights are read.

The language model does not read what some parts of a vision tower compute: CLIP's last norm, the
layers after `vision_feature_layer`. No gradient reaches their parameters: the optimizer would keep
no state for them, and DDP would wait for their gradients in vain. So they are frozen. The training
forward of one small image finds them; it runs up to the language model.

In the language model too some parameters get no gradient, but which ones depends on the text. One
forward over a short text says whether there may be any: DDP then looks for them in every step.

Only the autograd graph of these forwards matters, not their numbers. So a parameter is one zero,
expanded to its shape, and a matrix product returns zeros without multiplying: a model of any size
takes neither memory nor time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from finetune.distributed.model_parts import text_names, trunk_of
from finetune.errors import UserError, on_one_line
from finetune.models.vision import forward_with_images

aten = torch.ops.aten
# the operators that would take most of the time
PRODUCTS = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.convolution.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
}
SHORT_TEXT = 8  # tokens
ONLY_IMAGES = (
    "names parts of the model that only images reach, and no row holds one; name parts of the "
    "language model"
)
BlankDocument = Callable[[], tuple[Tensor, Mapping[str, Tensor]]]
"""() -> a document with one small image: (its token ids int64[1, tokens], the processor's arguments
for the image).
"""


def freeze_unreached(model: nn.Module, make_document: BlankDocument) -> tuple[str, ...]:
    """Freezes the trained parameters beside the language model that do not change what the language
    model reads of an image.

    Args:
        model: On the meta device, with real buffers on the CPU; requires_grad is set on what is
            trained.
        make_document: Called only if something beside the language model is trained.

    Returns:
        The names of the parameters that it has frozen.

    Raises:
        UserError: The model cannot take an image.
    """
    text_prefixes = text_names(model)
    trained_beside_text = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and not name.startswith(text_prefixes)
    }
    if not trained_beside_text:
        return ()
    ids, images = make_document()
    reached = _find_reached(model, ids, images)
    unreached = tuple(name for name in trained_beside_text if name not in reached)
    for name in unreached:
        trained_beside_text[name].requires_grad_(False)
    return unreached


def find_unread(model: nn.Module) -> set[str]:
    """Finds the parameters on which the logits of a short text do not depend, by transformers' own
    forward.

    Some of them get no gradient in any run: a router's bias that only chooses experts, the indexer
    of sparse attention. Others get one from longer texts, or from images.

    Args:
        model: On the meta device, with real buffers on the CPU, as `build_on_meta` returns it.

    Returns:
        The names of these parameters; of all parameters if the forward fails.
    """
    inputs = torch.arange(1, SHORT_TEXT + 1)[None]
    model.eval()  # no layer is skipped at random
    try:
        with _stand_ins(model) as weights:
            logits = model(input_ids=inputs, use_cache=False).logits
    except Exception:  # a family's own code may fail in any way
        return {name for name, _ in model.named_parameters()}
    finally:
        model.train()
    return weights.keys() - _names_reached([logits], weights)


def _find_reached(model: nn.Module, ids: Tensor, images: Mapping[str, Tensor]) -> set[str]:
    """Finds the names of the trained parameters on which the language model's inputs depend, for
    one document with an image.

    Raises `UserError` where the model cannot take the image.
    """
    with _stand_ins(model) as weights:
        hook = trunk_of(model).register_forward_pre_hook(_stop_at_trunk, with_kwargs=True)
        places = torch.arange(ids.shape[1])[None]
        try:
            forward_with_images(model, images, [1], input_ids=ids, position_ids=places)
        except _TrunkEntered as entered:
            return _names_reached(entered.inputs, weights)
        except UserError:
            raise
        except Exception as error:  # a family's own code may fail in any way
            reason = on_one_line(error)
            raise UserError(
                f"{type(model).__name__}: cannot take an image ({type(error).__name__}: {reason}); "
                "name another model"
            ) from error
        finally:
            hook.remove()
    raise AssertionError("the language model was not called")


@contextmanager
def _stand_ins(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Makes forwards of `model` in this block build a graph without numbers and without memory.

    Yields the tensors that stand in for its parameters, by name.
    """
    weights = {name: _stand_in(parameter) for name, parameter in model.named_parameters()}
    tensors = weights | _buffers_of(model)
    with (
        _reparametrize_module(model, tensors, tie_weights=True),
        saved_tensors_hooks(lambda _: None, _refuse_backward),
        _ZeroProducts(),  # type: ignore[no-untyped-call]
    ):
        yield weights


class _TrunkEntered(Exception):
    """Ends a forward where it calls the language model; `inputs` are the tensors of that call."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.inputs = inputs


def _stop_at_trunk(_trunk: nn.Module, args: Any, kwargs: Any) -> None:
    raise _TrunkEntered([leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)])


class _ZeroProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """In this block the operators of PRODUCTS return zeros of the right shape and dtype."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in PRODUCTS:
            return func(*args, **kwargs)
        meta_args, meta_kwargs = tree_map_only(
            Tensor, lambda tensor: tensor.to("meta"), (args, kwargs)
        )
        outputs = func(*meta_args, **meta_kwargs)
        return tree_map_only(
            Tensor, lambda output: torch.zeros(output.shape, dtype=output.dtype), outputs
        )


def _stand_in(parameter: nn.Parameter) -> Tensor:
    """Returns fp32 zeros of the shape of `parameter` in four bytes, trained if it is."""
    zeros = torch.zeros(()).expand(parameter.shape)
    return zeros.requires_grad_(parameter.requires_grad)


def _buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """Returns the buffers of `model` by name, those of floating point in fp32, the dtype of the
    parameters' stand-ins.
    """
    buffers = dict(model.named_buffers())
    return {
        name: buffer.float() if buffer.is_floating_point() else buffer
        for name, buffer in buffers.items()
    }


def _refuse_backward(_: Any) -> Tensor:
    """Stands in for the hook that gives a backward its saved tensors: none are saved here."""
    raise AssertionError("there is no backward")


def _names_reached(outputs: Sequence[Tensor], weights: Mapping[str, Tensor]) -> set[str]:
    """Returns the names of the `weights` on which `outputs` depend."""
    reached = {id(leaf) for leaf in _find_leaves(outputs)}
    return {name for name, weight in weights.items() if id(weight) in reached}


def _find_leaves(outputs: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yields the leaves of the autograd graph of `outputs`: the tensors that would get a gradient
    from a backward.
    """
    waiting: list[Node] = [output.grad_fn for output in outputs if output.grad_fn is not None]
    visited = set(waiting)
    while waiting:
        node: Any = waiting.pop()
        if hasattr(node, "variable"):  # the node of a leaf
            yield node.variable
        following = {child for child, _ in node.next_functions if child is not None} - visited
        visited |= following
        waiting += following
