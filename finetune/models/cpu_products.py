"""Matrix products in bf16 and fp16 on a CPU without instructions for them: multiplied in fp32,
rounded once.

There torch multiplies such matrices in plain loops, up to 60 times slower than in fp32. This file
overrides torch's operators for these dtypes. The result is the fp32 product, rounded: at least as
exact as torch's own.
"""

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

# Bytes of fp32 made of an operand at once: an output head is never copied whole, and a chunk stays
# in the cache.
CHUNK_BYTES = 8 << 20
# torch multiplies up to these by a transposed weight as fast as it reads the weight: generation
NATIVE_ROWS = 8

_libraries: list[Any] = []  # torch's operators are overridden for as long as a library lives


@cache
def find_slow_dtypes() -> frozenset[torch.dtype]:
    """Returns the dtypes that this CPU has no instructions for."""
    questions = {
        torch.bfloat16: "_is_mkldnn_bf16_supported",
        torch.float16: "_is_mkldnn_fp16_supported",
    }
    # A build of torch without oneDNN, as for macOS, has neither question.
    return frozenset(
        dtype for dtype, name in questions.items() if not getattr(torch.ops.mkldnn, name, bool)()
    )


def multiply_in_fp32(device: torch.device, dtypes: Iterable[torch.dtype]) -> None:
    """Makes this process multiply matrices of the slow dtypes in fp32, if its model computes in one
    of them on a CPU.

    A product in fp32 takes 6 µs longer from then on, so that a process that computes in fp32 is
    left as it is.

    Args:
        device: Where the model computes.
        dtypes: What it computes in.
    """
    if not _libraries and device.type == "cpu" and not find_slow_dtypes().isdisjoint(dtypes):
        override_products(find_slow_dtypes())


def override_products(slow: Collection[torch.dtype]) -> None:
    """Overrides torch's products of the dtypes `slow` on a CPU, for as long as this process
    lives.
    """
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        # torch warns of the first kernel that is overridden
        warnings.simplefilter("ignore", UserWarning)
        for name, compute in OVERRIDES.items():
            library.impl(name, _make_kernel(name, compute, slow), "CPU", with_keyset=True)
    _libraries.append(library)


def describe_products() -> list[str]:
    """Describes this process's products for the first screen of a run, if they are overridden."""
    names = sorted(str(dtype).removeprefix("torch.") for dtype in find_slow_dtypes())
    line = (
        f"cpu     no instructions for {' and '.join(names)}: matrices are multiplied in float32 "
        "and the result is rounded"
    )
    return [line] if _libraries else []


def _make_kernel(
    name: str, compute: Callable[..., Any], slow: Collection[torch.dtype]
) -> Callable[..., Any]:
    """A kernel that calls `compute` for a slow dtype, and torch's own for others or after
    NotImplemented.
    """
    own = torch.library.get_kernel(f"aten::{name}", "CPU").call_boxed

    def kernel(keys: Any, first: Tensor, *rest: Any, **options: Any) -> Any:
        if first.dtype in slow:
            result = compute(first, *rest, **options)
            if result is not NotImplemented:
                return result
        return own(keys, first, *rest, **options)

    return kernel


def _multiply(left: Tensor, right: Tensor, *, out: Tensor | None = None) -> Any:
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
    """beta * bias + alpha * left @ right, of matrices or of batches of them."""
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
        # chunks of what is summed over, added in fp32
        sums = torch.zeros(shape) if bias is None else bias.float() * beta
        for part in _split(inner, max(shape)):
            sums.addmm_(left[:, part].float(), right[part].float(), alpha=alpha)
        return out.copy_(sums)
    for place, left_part, right_part in _convert(left, right):
        into = out[place]
        own_bias = None if bias is None else bias[place]
        into.copy_(_add_product(into.shape, own_bias, left_part, right_part, beta, alpha))
    return out


def _is_left_to_torch(bias: Tensor | None, left: Tensor, right: Tensor, out: Tensor | None) -> bool:
    """Whether torch's own kernel multiplies: what cannot be multiplied, for it has the message; and
    few rows by a transposed matrix, where it is faster.
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
    sums = torch.empty(shape) if bias is None else bias.float()
    # The operators that work in place. Unlike `call_boxed`, they leave the GIL to other threads.
    add = sums.addmm_ if left.dim() == 2 else sums.baddbmm_
    return add(left, right, beta=beta, alpha=alpha)


def _convert(left: Tensor, right: Tensor) -> Iterator[tuple[Any, Tensor, Tensor]]:
    """Yields (place in the result, left operand, right operand) in fp32, in chunks of the larger
    one.
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


def _split(count: int, numbers: int) -> Iterator[slice]:
    """Splits `count` rows of `numbers` each into parts of CHUNK_BYTES."""
    size = max(CHUNK_BYTES // (4 * max(numbers, 1)), 1)
    return (slice(start, start + size) for start in range(0, count, size))


def _convolve(inputs: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Any:
    converted = None if bias is None else bias.float()
    # benchmark, deterministic, cudnn_enabled, allow_tf32: of a GPU
    flags = (False, False, False, False)
    operands: tuple[Any, ...] = inputs.float(), weight.float(), converted, *options, *flags
    return torch._convolution(*operands).to(inputs.dtype)


def _convolve_backward(gradient: Tensor, inputs: Tensor, weight: Tensor, *options: Any) -> Any:
    operands = gradient.float(), inputs.float(), weight.float(), *options
    gradients = torch.ops.aten.convolution_backward(*operands)
    return tuple(each if each is None else each.to(gradient.dtype) for each in gradients)


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
