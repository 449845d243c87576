"""Which parameters a run's rows reach.

CLIP's last norm, or the layers after `vision_feature_layer`, work on nothing that the language
model reads. No gradient reaches them: the optimizer would keep no state for them, and DDP would
wait for their gradients in vain. So they are frozen. One forward over a small image finds them,
before the weights are read: the training forward up to the language model.

In the language model too some parameters get no gradient, but which ones depends on the text. One
forward over a short text says whether there may be any: DDP then looks for them in every step.

No number in these forwards matters, so parameters are one zero that is read at every place, and
products are zeros that nobody has multiplied: a model of any size takes neither memory nor time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from finetune.distributed.model_parts import text_names, trunk_of
from finetune.errors import UserError, on_one_line
from finetune.models.vision import forward_images

aten = torch.ops.aten
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
"""(the tokens of a document with one small image, int64[1, tokens]; the processor's arguments for
it).
"""


def freeze_unreached(model: nn.Module, make_document: BlankDocument) -> tuple[str, ...]:
    """Freezes what is trained beside the language model of `model`, and which no image reaches;
    returns their names.

    Args:
        model: On the meta device, with real buffers on the host; what is trained is marked.
        make_document: Called where anything beside the language model is trained.

    Raises:
        UserError: The model cannot take an image.
    """
    text = text_names(model)
    beside = {
        name: p
        for name, p in model.named_parameters()
        if p.requires_grad and not name.startswith(text)
    }
    if not beside:
        return ()
    reached = _find_reached(model, *make_document())
    unreached = tuple(name for name in beside if name not in reached)
    for name in unreached:
        beside[name].requires_grad_(False)
    return unreached


def find_unread(model: nn.Module) -> set[str]:
    """The names of the parameters on which the logits of a short text do not depend, by
    transformers' own forward; all names where it cannot run.

    No gradient reaches some in any run: a router's bias that only chooses experts, the indexer of
    sparse attention. Others wait for longer texts, or for images.

    model: On the meta device, with real buffers on the host, as `build_on_meta` returns it.
    """
    weights = {name: _stand_in(parameter) for name, parameter in model.named_parameters()}
    tensors = weights | _buffers_of(model)
    inputs = {"input_ids": torch.arange(1, SHORT_TEXT + 1)[None], "use_cache": False}
    model.eval()  # no layer is skipped at random
    try:
        with saved_tensors_hooks(lambda _: None, _never), _ZeroProducts():  # type: ignore[no-untyped-call]
            logits = torch.func.functional_call(model, tensors, (), inputs).logits
    except Exception:  # each family has its own
        return set(weights)
    finally:
        model.train()
    return weights.keys() - _names_reached([logits], weights)


def _find_reached(model: nn.Module, ids: Tensor, images: Mapping[str, Tensor]) -> set[str]:
    """The names of the trained parameters of `model` on which depends what enters its language
    model.
    """
    weights = {name: _stand_in(parameter) for name, parameter in model.named_parameters()}
    tensors = weights | _buffers_of(model)
    with saved_tensors_hooks(lambda _: None, _never), _ZeroProducts():  # type: ignore[no-untyped-call]
        try:
            torch.func.functional_call(_UpToTrunk(model), _within("model", tensors), (ids, images))
        except _TrunkEntered as entered:
            return _names_reached(entered.inputs, weights)
        except UserError:
            raise
        except Exception as error:  # each family has its own
            reason = on_one_line(error)
            raise UserError(
                f"{type(model).__name__}: cannot take an image ({type(error).__name__}: {reason}); "
                "name another model"
            ) from error
    raise AssertionError("the language model was not called")


class _TrunkEntered(Exception):
    """The forward has come to the language model, with these `inputs`."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.inputs = inputs


class _UpToTrunk(nn.Module):
    """The training forward of a document with an image. Ends with `_TrunkEntered`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, images: Mapping[str, Tensor]) -> None:
        hook = trunk_of(self.model).register_forward_pre_hook(_stop, with_kwargs=True)
        try:
            forward_images(
                self.model,
                images,
                [1],
                input_ids=ids,
                position_ids=torch.arange(ids.shape[1])[None],
            )
        finally:
            hook.remove()


def _stop(_: nn.Module, args: Any, kwargs: Any) -> None:
    raise _TrunkEntered([leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)])


class _ZeroProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it, matrix products and convolutions give zeros of the right shape."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in PRODUCTS:
            return func(*args, **kwargs)
        on_meta = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
        shapes = func(*on_meta[0], **on_meta[1])
        return tree_map_only(
            Tensor, lambda shape: torch.zeros(shape.shape, dtype=shape.dtype), shapes
        )


def _stand_in(parameter: nn.Parameter) -> Tensor:
    """A tensor like `parameter` that takes four bytes."""
    zeros = torch.zeros(()).expand(parameter.shape)
    return zeros.requires_grad_(parameter.requires_grad)


def _buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """The buffers of `model`, in fp32 as the stand-ins of its parameters are."""
    buffers = dict(model.named_buffers())
    return {name: b.float() if b.is_floating_point() else b for name, b in buffers.items()}


def _within(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{name}.{key}": tensor for key, tensor in tensors.items()}


def _never(_: Any) -> Tensor:
    raise AssertionError("there is no backward")


def _names_reached(outputs: Sequence[Tensor], weights: Mapping[str, Tensor]) -> set[str]:
    """The names of those of `weights` on which `outputs` depend."""
    reached = {id(leaf) for leaf in _leaves_of(outputs)}
    return {name for name, weight in weights.items() if id(weight) in reached}


def _leaves_of(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """The tensors at the ends of the graph of `tensors`: those to which a backward would bring a
    gradient.
    """
    left: list[Node] = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(left)
    while left:
        node: Any = left.pop()
        if hasattr(node, "variable"):
            yield node.variable
        following = {before for before, _ in node.next_functions if before is not None} - seen
        seen |= following
        left += following
