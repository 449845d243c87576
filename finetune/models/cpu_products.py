"""Faster bf16 and fp16 products on a CPU without instructions for them: in fp32, rounded once.

On such a CPU torch multiplies in plain loops, up to 60 times slower than in fp32. This file
overrides torch's matrix products and convolutions for these dtypes. The result is the rounded fp32
product, at least as exact as torch's own.
"""

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch import library as torch_library

# The most bytes of fp32 that an operand is converted to at once, so that an output head is never
# copied whole, and a chunk stays in the cache.
CHUNK_BYTES = 8 << 20
# torch multiplies up to this many rows by a transposed weight as fast as it reads the weight; so
# few rows come from generation
NATIVE_ROWS = 8

# torch's operators stay overridden for as long as the library lives that overrides them
_libraries: list[Any] = []


@cache
def find_slow_dtypes() -> frozenset[torch.dtype]:
    """Returns the dtypes that this CPU has no instructions for."""
    questions = {
        torch.bfloat16: "_is_mkldnn_bf16_supported",
        torch.float16: "_is_mkldnn_fp16_supported",
    }
    # A build of torch without oneDNN, as for macOS, has neither question; `bool()` then answers
    # False.
    return frozenset(
        dtype for dtype, name in questions.items() if not getattr(torch.ops.mkldnn, name, bool)()
    )


def multiply_in_fp32(device: torch.device, dtypes: Iterable[torch.dtype]) -> None:
    """Makes this process multiply in fp32 if its model computes in a slow dtype on a CPU.

    Does nothing in any other process: overridden, each product in fp32 takes 6 µs longer.

    Args:
        device: Where the model computes.
        dtypes: The dtypes that the model computes in.
    """
    if not _libraries and device.type == "cpu" and not find_slow_dtypes().isdisjoint(dtypes):
        override_products(find_slow_dtypes())


def override_products(slow: Collection[torch.dtype]) -> None:
    """Overrides torch's CPU products of the dtypes `slow`, until this process ends."""
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        # torch warns about the first kernel that is overridden
        warnings.simplefilter("ignore", UserWarning)
        for name, compute in OVERRIDES.items():
            library.impl(name, _make_kernel(name, compute, slow), "CPU", with_keyset=True)
    _libraries.append(library)


def describe_products() -> list[str]:
    """Returns the line of a run's first screen about overridden products; none if they are not."""
    names = sorted(str(dtype).removeprefix("torch.") for dtype in find_slow_dtypes())
    line = (
        f"cpu     no instructions for {' and '.join(names)}: matrices are multiplied in float32 "
        "and the result is rounded"
    )
    return [line] if _libraries else []


def _make_kernel(
    name: str, compute: Callable[..., Any], slow: Collection[torch.dtype]
) -> Callable[..., Any]:
    """Makes a kernel that calls `compute` for a slow dtype, and torch's own kernel for others.

    It calls torch's own kernel too if `compute` returns NotImplemented.

    name: The operator's, such as `addmm.out`.
    """
    own_kernel = torch_library.get_kernel(f"aten::{name}", "CPU").call_boxed

    def kernel(keys: Any, first: Tensor, *rest: Any, **options: Any) -> Any:
        if first.dtype in slow:
            result = compute(first, *rest, **options)
            if result is not NotImplemented:
                return result
        return own_kernel(keys, first, *rest, **options)

    return kernel


def _multiply(left: Tensor, right: Tensor, *, out: Tensor | None = None) -> Any:
    """Computes `mm` and `bmm`."""
    return _multiply_add(None, left, right, beta=0, out=out)


def _multiply_add(
    bias: Tensor | None,
    left: Tensor,
    right: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: Tensor | None = None,
) -> Any:
    """Computes `addmm` and `baddbmm`: beta * bias + alpha * left @ right.

    Args:
        bias: Broadcast to the result's shape; None: no bias, and `beta` is 0.
        left: [rows, inner], or [batch, rows, inner].
        right: [inner, columns], or [batch, inner, columns].
        beta: Scales the bias.
        alpha: Scales the product.
        out: Receives the result and is returned; None: a new tensor is.

    Returns:
        The result in left's dtype, or NotImplemented to leave the product to torch.
    """
    if _is_left_to_torch(bias, left, right, out):
        return NotImplemented
    shape = (*left.shape[:-1], right.shape[-1])
    if bias is not None:
        bias = bias.expand(shape)
    if out is None and 4 * max(left.numel(), right.numel()) <= CHUNK_BYTES:
        result = _add_product(shape, bias, left.float(), right.float(), beta, alpha)
        return result.to(left.dtype)
    if out is None:
        out = left.new_empty(shape)
    elif out.shape != shape:
        out.resize_(shape)
    inner = left.shape[-1]
    if left.dim() == 2 and inner > max(shape):
        # The largest dimension is the one that is summed over: its chunks are added in fp32.
        sums = torch.zeros(shape) if bias is None else bias.float() * beta
        for part in _split(inner, max(shape)):
            sums.addmm_(left[:, part].float(), right[part].float(), alpha=alpha)
        return out.copy_(sums)
    for place, left_part, right_part in _convert_in_chunks(left, right):
        out_part = out[place]
        bias_part = None if bias is None else bias[place]
        out_part.copy_(_add_product(out_part.shape, bias_part, left_part, right_part, beta, alpha))
    return out


def _is_left_to_torch(bias: Tensor | None, left: Tensor, right: Tensor, out: Tensor | None) -> bool:
    """Returns whether torch's own kernel should multiply.

    It should if the operands do not fit together, since it has the error message, and if few rows
    are multiplied by a transposed matrix, since it is faster there.
    """
    others = [tensor for tensor in (bias, right, out) if tensor is not None]
    is_wrong = left.shape[-1] != right.shape[-2] or any(
        tensor.dtype is not left.dtype for tensor in others
    )
    has_few_rows = left.dim() == 2 and left.shape[0] <= NATIVE_ROWS
    return is_wrong or (has_few_rows and right.stride(0) == 1)


def _add_product(
    shape: Sequence[int],
    bias: Tensor | None,
    left: Tensor,
    right: Tensor,
    beta: float,
    alpha: float,
) -> Tensor:
    """Returns beta * bias + alpha * left @ right in fp32, [*shape], of fp32 operands.

    Without a bias `beta` is 0, so that the empty tensor is not read.
    """
    sums = torch.empty(shape) if bias is None else bias.float()
    # Unlike `call_boxed`, the operators that work in place release the GIL for other threads.
    add = sums.addmm_ if left.dim() == 2 else sums.baddbmm_
    return add(left, right, beta=beta, alpha=alpha)


def _convert_in_chunks(left: Tensor, right: Tensor) -> Iterator[tuple[Any, Tensor, Tensor]]:
    """Converts the operands to fp32, a chunk at a time; shapes as in `_multiply_add`.

    The chunks are of matrices in a batch, else of left's rows or right's columns, whichever are
    more.

    Yields:
        (where the chunk's product belongs in the result, left operand, right operand).
    """
    rows = left.shape[-2]
    inner = left.shape[-1]
    columns = right.shape[-1]
    if left.dim() == 3:
        for part in _split(len(left), max(rows * inner, inner * columns, rows * columns)):
            yield part, left[part].float(), right[part].float()
    elif rows > columns:
        converted = right.float()
        for part in _split(rows, max(inner, columns)):
            yield part, left[part].float(), converted
    else:
        converted = left.float()
        for part in _split(columns, max(inner, rows)):
            yield (slice(None), part), converted, right[:, part].float()


def _split(count: int, width: int) -> Iterator[slice]:
    """Splits `count` rows of `width` fp32 numbers into slices of CHUNK_BYTES, or of one row."""
    rows = max(CHUNK_BYTES // (4 * max(width, 1)), 1)
    return (slice(start, start + rows) for start in range(0, count, rows))


def _convolve(inputs: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Any:
    """Computes `convolution`; `options` are its further arguments, from the stride on."""
    fp32_bias = None if bias is None else bias.float()
    # benchmark, deterministic, cudnn_enabled and allow_tf32 only concern a GPU
    flags = (False, False, False, False)
    operands: tuple[Any, ...] = inputs.float(), weight.float(), fp32_bias, *options, *flags
    return torch._convolution(*operands).to(inputs.dtype)


def _convolve_backward(gradient: Tensor, inputs: Tensor, weight: Tensor, *options: Any) -> Any:
    """Computes `convolution_backward`: the gradients of inputs, weight and bias, None if not asked.

    options: The operator's further arguments, from the bias' sizes on.
    """
    operands = gradient.float(), inputs.float(), weight.float(), *options
    gradients = torch.ops.aten.convolution_backward(*operands)
    return tuple(each if each is None else each.to(gradient.dtype) for each in gradients)


# torch's operator in the aten namespace -> what computes it
OVERRIDES: Mapping[str, Callable[..., Any]] = {
    "mm": _multiply,
    "mm.out": _multiply,
    "bmm": _multiply,
    "bmm.out": _multiply,
    "addmm": _multiply_add,
    "addmm.out": _multiply_add,
    "baddbmm": _multiply_add,
    "baddbmm.out": _multiply_add,
    "convolution": _convolve,
    "convolution_backward": _convolve_backward,
}
