"""A CUDA device on a machine without one: fake tensors that say they are on it, and a record of what the host would wait for.

Nothing is computed. What is seen: operands on two devices, operators that have no fake kernel, and every operator for which the
host waits until the device has reached it, by the rules of torch.cuda.set_sync_debug_mode. For a process of its own: what it
replaces in torch stays replaced.
"""

import ctypes
import importlib
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._meta_registrations  # before its own are replaced
from torch import Tensor, nn
from torch._decomp import decomposition_table
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import finetune
from finetune.models import quantized_layers
from tests.cuda_without_gpu.varlen_on_cpu import check_operands

PACKAGE = Path(finetune.__file__).resolve().parent
TORCH = Path(torch.__file__).resolve().parent
aten = torch.ops.aten
OVERRIDES: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
# The number of elements of their results is known to the device alone.
SHAPED_BY_VALUES = {
    aten.masked_select.default,
    aten.unique_consecutive.default,
    aten.unique_dim.default,
    aten._unique.default,
    aten._unique2.default,
    aten.bincount.default,
}


@dataclass(frozen=True, slots=True)
class Wait:
    """A place where the host waits for the device."""

    what: str  # an operator, with the direction of a copy
    place: str  # file.py:function of the last frame in finetune
    by: str  # file.py:line of the last frame outside torch


class DeviceWaits(TorchDispatchMode):
    """Records each wait, and lets the step continue: numbers that are read are 1, all elements of a mask are set."""

    supports_higher_order_operators = True  # flex_attention is one

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Wait] = []

    def add(self, what: str) -> None:
        """Records that the host waits here."""
        place = by = ""
        for frame, line in traceback.walk_stack(sys._getframe()):  # from here outwards
            code = frame.f_code
            if not by and not code.co_filename.startswith((str(TORCH), __file__)):
                by = f"{code.co_filename}:{line}"
            if code.co_filename.startswith(str(PACKAGE)):
                place = f"{Path(code.co_filename).name}:{code.co_name}"
                break
        self.found.append(Wait(what, place or "nowhere in finetune", by))

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if operator is aten._local_scalar_dense.default:
            return self._read(args[0])
        if operator in SHAPED_BY_VALUES and is_on_device(args):
            raise AssertionError(f"{operator}: the host waits for the size of its result")
        if operator is aten.nonzero.default and is_on_device(args):
            return self._find_all(args[0])
        if operator in (
            aten.index.Tensor,
            aten.index_put.default,
            aten.index_put_.default,
            aten._index_put_impl_.default,
        ):
            args = self._replace_masks(operator, args)
        elif operator in (aten._to_copy.default, aten.copy_.default, aten._foreach_copy_.default):
            self._see_copy(operator, args, kwargs)
        elif operator is aten.where.self and is_on_device(args[:1]):
            if any(each.device.type == "cpu" for each in args[1:]):
                self.add(f"{operator} of a number on the host")
        elif operator is aten._pin_memory.default:
            return args[0].clone()
        elif operator is aten.record_stream.default:
            return None
        elif operator is aten.allclose.default:
            self.add("a number is read")
            return True
        elif operator is torch.ops.torch_attn._varlen_attn.default:
            check_operands(*args, **kwargs)
        elif operator is quantized_layers.dequantize_bytes._opoverload:
            with self:  # what it is made of
                return quantized_layers.dequantize_bytes._init_fn(*args, **kwargs)
        return operator(*args, **kwargs)

    def _read(self, tensor: FakeTensor) -> Any:
        """The value of a tensor of one element, where it is known; else 1."""
        if tensor.device.type != "cpu":
            self.add("a number is read")
        elif not isinstance(tensor, FakeTensor):
            return aten._local_scalar_dense.default(tensor)
        elif tensor.constant is not None:
            with unset_fake_temporarily():
                return tensor.constant.item()
        return True if tensor.dtype == torch.bool else 1.0 if tensor.dtype.is_floating_point else 1

    def _find_all(self, mask: Tensor) -> Tensor:
        self.add("nonzero")
        return mask.new_empty((mask.numel(), mask.dim()), dtype=torch.int64)

    def _replace_masks(self, operator: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Indices in place of masks, which the device would have to search first."""
        target, indices, *rest = args
        masks = [
            each for each in indices if each is not None and each.dtype in (torch.bool, torch.uint8)
        ]
        if not masks or not is_on_device(args):
            return args
        is_filling = (
            operator is not aten.index.Tensor
            and rest[0].numel() == 1
            and rest[0].device.type == "cpu"
        )
        if is_filling and len(indices) == 1:
            return args  # masked_fill
        self.add(f"{operator} by a mask")
        found: list[Any] = []
        for each in indices:
            is_mask = any(each is mask for mask in masks)
            places = (
                [each.new_zeros(each.numel(), dtype=torch.int64) for _ in range(each.dim())]
                if is_mask
                else [each]
            )
            found += places
        return (target, found, *rest)

    def _see_copy(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if operator is aten._to_copy.default:
            pairs = [(kwargs.get("device") or args[0].device, args[0])]
            is_async = kwargs.get("non_blocking", False)
        else:
            many = operator is aten._foreach_copy_.default
            pairs = [
                (to.device, source)
                for to, source in (zip(*args[:2], strict=True) if many else [args[:2]])
            ]
            is_async = kwargs.get("non_blocking", len(args) > 2 and args[2])
        for to, source in pairs:
            kinds = source.device.type, torch.device(to).type
            if set(kinds) == {"cpu", "cuda"} and source.numel():
                if not is_async:
                    self.add(f"{operator} from {kinds[0]} to {kinds[1]}")
                elif kinds[1] == "cpu":
                    self.add(f"{operator} to the host, which may read it before it has arrived")


def _ones(shape: tuple[int, ...]) -> Any:
    return [_ones(shape[1:]) for _ in range(shape[0])] if shape else 1


def is_on_device(values: Any) -> bool:
    """Whether any tensor among `values` is on the device."""
    return any(
        isinstance(leaf, Tensor) and leaf.device.type == "cuda" for leaf in tree_leaves(values)
    )


class Event:
    """A mark in a stream: the host may wait for it."""

    waits: DeviceWaits | None = None

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> "Event":
        return self

    def wait(self, *_: Any) -> None: ...

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def synchronize(self) -> None:
        if Event.waits is not None:
            Event.waits.add("an event")


class Stream(Event):
    """A queue of the device's work. Streams wait for each other without the host."""

    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def record_event(self, *_: Any) -> Event:
        return Event()


class HostGenerator(torch.Generator):
    """A generator for any device: fake tensors draw nothing."""

    def __new__(cls, *_: Any) -> "HostGenerator":
        return super().__new__(cls)


def _replace_parameters(
    module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    """In place of `nn.Module._apply`, which swaps the content of fake tensors, and cannot while FakeTensorMode refers to them."""
    for child in module.children() if recurse else ():
        child._apply(change)
    if not any(isinstance(each, FakeTensor) for each in module._parameters.values()):
        return _apply(module, change, recurse=False)
    with torch.no_grad():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(change(parameter), parameter.requires_grad)
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else change(buffer)
    return module


_apply = nn.Module._apply


def _leave_uncompiled(function: Any = None, **_: Any) -> Any:
    """In place of `torch.compile`, whose kernels are made on a GPU only. To import the compiler takes seconds."""
    return function if function is not None else _leave_uncompiled


def build_device(library: Path) -> None:
    """Compiles fake_device.cpp."""
    compiler, source = shutil.which("c++"), Path(__file__).with_name("fake_device.cpp")
    assert compiler is not None, (
        "a C++ compiler is needed: torch's own Python interface knows no such device"
    )
    options = [
        "-O0",
        "-std=c++20",
        "-shared",
        "-fPIC",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    ]
    where = [f"-I{TORCH / 'include'}", f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-lc10"]
    subprocess.run([compiler, *options, str(source), "-o", str(library), *where], check=True)


def pretend_device(before: Sequence[str] = (), traces: bool = False) -> None:
    """Makes torch see one CUDA device in this process, on which only fake tensors can be.

    before: packages that look for CUDA's own functions where torch has a device; imported before it has one.
    traces: `torch.compile` stays torch's own, for backends that generate no kernels.
    """
    if not traces:
        torch.compile = _leave_uncompiled  # type: ignore[assignment]
    for package in before:
        importlib.import_module(package)
    with tempfile.TemporaryDirectory() as folder:
        build_device(Path(folder) / "fake_device.so")
        ctypes.CDLL(str(Path(folder) / "fake_device.so")).install_fake_device()
    stream, capability = Stream(), (9, 0)
    cuda: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda _: None,
        "get_device_capability": lambda *_: capability,
        "get_device_name": lambda *_: "NVIDIA H100 80GB HBM3",
        "is_bf16_supported": lambda *_, **__: True,
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda *_: stream,
        "stream": lambda _: nullcontext(),
        "synchronize": lambda *_: stream.synchronize(),
        "manual_seed_all": lambda _: None,
        "is_current_stream_capturing": lambda: False,
    }
    for name, value in cuda.items():
        setattr(torch.cuda, name, value)
    torch.accelerator.current_stream = lambda *_: stream  # type: ignore[assignment]
    torch.Generator = HostGenerator  # type: ignore[misc]
    nn.Module._apply = _replace_parameters  # type: ignore[assignment,method-assign]
    fake_tensor.init_gpu_context = lambda _: None
    if torch.__version__ < "2.12":
        _repair_addmm()
    FakeTensorMode.avoid_device_init = property(lambda _: True)  # type: ignore[method-assign,assignment]


def _repair_addmm() -> None:
    """`torch.addmm` of factors in another dtype: torch 2.11 takes the dtype of a fake result for a factor."""

    def add(
        total: Tensor, left: Tensor, right: Tensor, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Tensor:
        result = total + (left @ right).to(dtype)
        return result if out is None else out.copy_(result)

    for overload in (aten.addmm.dtype, aten.addmm.dtype_out):
        decomposition_table[overload] = add
        OVERRIDES.impl(overload, add, "Meta", allow_override=True)


@contextmanager
def fake_tensors(values: Mapping[tuple[int, ...], Sequence[Any]]) -> Iterator[DeviceWaits]:
    """Within it every new tensor is fake. Backwards run on this thread, where the modes see them.

    values: what `tolist` gives, by the shape of the tensor; 1 everywhere for others.
    """
    waits = DeviceWaits()

    def tolist(tensor: FakeTensor) -> list[Any]:
        if is_on_device(tensor):
            waits.add("numbers are read")
        return list(values[tensor.shape]) if tensor.shape in values else _ones(tuple(tensor.shape))

    FakeTensor.tolist = tolist  # type: ignore[method-assign]
    FakeTensor.record_stream = lambda *_: None  # type: ignore[assignment,method-assign]
    FakeTensor.pin_memory = FakeTensor.clone  # type: ignore[assignment,method-assign]
    with FakeTensorMode(), waits, torch.autograd.set_multithreading_enabled(False):
        Event.waits = waits
        try:
            yield waits
        finally:
            Event.waits = None
