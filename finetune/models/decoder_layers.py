"""What is done to decoder layers: activation checkpointing, torch.compile, Liger.

Parameters keep their names.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache, partial
from typing import Any, Literal
from weakref import ref

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.torch_version import TorchVersion
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from finetune.constants import CACHE_VARIABLE
from finetune.distributed.model_parts import decoder_layers, expert_modules, head_of, text_modules
from finetune.errors import UserError
from finetune.files.network import find_cache
from finetune.flops import count_heads, list_layer_configs
from finetune.models.loss_chunks import compute_fused_chunk

MIN_OFFLOADED_BYTES = 1 << 10  # smaller tensors stay on the device
Contexts = tuple[AbstractContextManager[None], AbstractContextManager[None]]


class CudaCopies:
    """Copies from and to pinned memory on a stream of their own.

    Each is returned with the event of its end.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def to_host(self, tensor: Tensor) -> tuple[Tensor, Any]:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host, self._copy(host, tensor)

    def to_device(self, tensor: Tensor, device: torch.device) -> tuple[Tensor, Any]:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        return copy, self._copy(copy, tensor)

    def wait(self, event: Any) -> None:
        """Has all that the device is given from now on wait for the copy of `event`."""
        torch.cuda.current_stream().wait_event(event)

    def _copy(self, target: Tensor, source: Tensor) -> Any:
        # The source has to be computed, and the target's memory may still be in use by what was
        # queued before it was freed.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        return self._stream.record_event()


class _Kept:
    """A tensor that a layer keeps: on the device until it is released, in host memory until it is
    taken.
    """

    def __init__(self, tensor: Tensor, layer: "_Layer", copies: CudaCopies) -> None:
        self._device = tensor.device
        self._layer = layer
        self._copies = copies
        self._here: Tensor | None = tensor.detach()
        self._host, self._event = copies.to_host(self._here)

    def release(self) -> None:
        """Frees the tensor on the device once it is copied.

        Freed without that wait, it would be overwritten before.
        """
        if self._here is not None:
            self._copies.wait(self._event)
            self._here = self._event = None

    def bring_back(self) -> None:
        """Starts the copy to the device."""
        if self._here is None:
            self._here, self._event = self._copies.to_device(self._host, self._device)

    def take(self) -> Tensor:
        """The tensor, for the backward; the layer below it is needed next."""
        self.bring_back()
        self._layer.bring_back_below()
        self._copies.wait(self._event)
        tensor = self._here
        self._here = None
        self._event = None
        assert tensor is not None
        return tensor


def address(tensor: Tensor) -> int:
    """Where the storage of `tensor` lies."""
    return tensor.untyped_storage().data_ptr()


class _Layer:
    """The tensors that one forward of a checkpointed layer keeps, and the layer below it."""

    def __init__(self, below: "_Layer | None", copies: CudaCopies) -> None:
        self._below = None if below is None else ref(below)
        self._copies = copies
        # Weakly, as below: what is saved has to be freed with the graph that needs it, not when
        # cycles are collected.
        self._kept: list[ref[_Kept]] = []

    def keep(self, tensor: Tensor, storage: int | None = None) -> "_Kept | Tensor":
        """Returns what autograd saves in place of `tensor`: a copy on the host.

        A small tensor is saved as it is; so is, if `storage` is given, a tensor that lies
        elsewhere.
        """
        if storage not in (None, address(tensor)):
            return tensor
        if not tensor.is_floating_point() or tensor.nbytes < MIN_OFFLOADED_BYTES:
            return tensor
        kept = _Kept(tensor, self, self._copies)
        self._kept.append(ref(kept))
        return kept

    def release(self) -> None:
        """Frees what this layer keeps on the device."""
        for kept in self._alive():
            kept.release()

    def bring_back_below(self) -> None:
        """Starts the copies of what the layer below keeps."""
        below = None if self._below is None else self._below()
        for kept in () if below is None else below._alive():
            kept.bring_back()

    def _alive(self) -> Iterator[_Kept]:
        return (kept for each in self._kept if (kept := each()) is not None)


class ActivationOffload:
    """Offloads the activations that checkpointed layers keep.

    A layer takes part once its checkpointing function, or its compiled forward, has been passed to
    `wrap`.
    """

    def __init__(self, copies: CudaCopies) -> None:
        self._copies = copies
        self._latest: _Layer | None = None

    def wrap(self, function: Callable[..., Any], is_compiled: bool = False) -> Callable[..., Any]:
        """The checkpointing function of a layer, whose inputs are offloaded, which are all that it
        saves by itself; or its compiled forward, which saves its parameters and its other arguments
        as well, with its hidden state.
        """

        def offloaded(*inputs: Any, **others: Any) -> Any:
            if not torch.is_grad_enabled():  # nothing is kept
                return function(*inputs, **others)
            above = self._latest
            self._latest = _Layer(self._latest, self._copies)
            keep = (
                partial(self._latest.keep, storage=address(inputs[0]))
                if is_compiled
                else self._latest.keep
            )
            with saved_tensors_hooks(keep, _take):
                outputs = function(*inputs, **others)
            # of the layer before, whose copy had this layer's forward to end in
            if above is not None:
                above.release()
            return outputs

        return offloaded

    def wrap_contexts(self, contexts: Contexts) -> Contexts:
        """The contexts of `create_selective_checkpoint_contexts`, with what they keep offloaded."""
        layer, (keeping, using) = self._latest, contexts
        assert layer is not None
        return _offload_after(keeping, layer), _take_before(using)


def _take(kept: "_Kept | Tensor") -> Tensor:
    return kept.take() if isinstance(kept, _Kept) else kept


@contextmanager
def _offload_after(keeping: Any, layer: _Layer) -> Iterator[None]:
    with keeping:
        yield
    for kept in _selected(keeping):
        if isinstance(kept.val, Tensor):
            kept.val = layer.keep(kept.val)


@contextmanager
def _take_before(using: Any) -> Iterator[None]:
    for kept in _selected(using):
        if isinstance(kept.val, _Kept):
            kept.val = kept.val.take()
            kept.version = kept.val._version
    with using:
        yield


def _selected(context: Any) -> list[Any]:
    """The values that selective checkpointing stores, in torch's wrappers: `val`, and the `version`
    it checks.
    """
    stored = tree_leaves(list(context.storage.values()))
    return [leaf for leaf in stored if hasattr(leaf, "val") and hasattr(leaf, "version")]


Kept = Literal["nothing", "attention", "attention_and_projections"]


def checkpoint_activations(
    model: nn.Module, every: int, keeps: Kept = "nothing", offload: ActivationOffload | None = None
) -> int:
    """Recomputes the activations of every `every`-th decoder layer in backward (Chen et al. 2016);
    returns how many.

    What `keeps` names is kept with the layer's input (selective checkpointing, Korthikanti et al.
    2022, section 5), in host memory if there is an `offload`.

    By transformers' own checkpointing, not the FSDP plugin's, which drops the RNG state, so that
    its gradients are wrong with dropout (relative error 0.5), and renames modules under LoRA, so
    that the saved adapter is empty.

    Raises `UserError` where transformers cannot recompute layers of the model's class.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    transformer: Any = model
    if not transformer.supports_gradient_checkpointing:
        raise UserError(
            f"{type(model).__name__}: transformers has no activation checkpointing of this class; "
            "set fsdp_activation_checkpointing: false in the Accelerate file"
        )
    # Renamed in transformers 5.23; the older name goes in 6.
    enable = (
        getattr(transformer, "activation_checkpointing_enable", None)
        or transformer.gradient_checkpointing_enable
    )
    if keeps == "nothing":
        contexts = {}
    else:
        contexts = {"context_fn": partial(_make_contexts, model.config, keeps, offload)}
    enable({"use_reentrant": False, **contexts})
    layers: list[Any] = [
        module
        for _, module in text_modules(model)
        if hasattr(module, "gradient_checkpointing")
        and isinstance(module, GradientCheckpointingLayer)
    ]
    for index, layer in enumerate(layers):
        layer.gradient_checkpointing = index % every == 0
        if offload is not None:
            layer._gradient_checkpointing_func = offload.wrap(layer._gradient_checkpointing_func)
    return sum(bool(layer.gradient_checkpointing) for layer in layers)


@cache
def _attention_operators() -> frozenset[Any]:
    """The kernels that attention may choose: torch's varlen one, and those of its scaled dot
    product.
    """
    aten = torch.ops.aten
    return frozenset(
        [
            torch.ops.torch_attn._varlen_attn.default,
            aten._scaled_dot_product_flash_attention_for_cpu.default,
            aten._scaled_dot_product_flash_attention.default,
            aten._scaled_dot_product_efficient_attention.default,
            aten._scaled_dot_product_cudnn_attention.default,
        ]
    )


def _make_contexts(config: Any, keeps: Kept, offload: ActivationOffload | None) -> Contexts:
    """The contexts in which torch runs a checkpointed layer, and runs it again."""
    text = config.get_text_config()
    width = 0
    # the widest state round attention: the hidden state, or all of its heads
    if keeps == "attention_and_projections":
        for layer in list_layer_configs(text):
            head_size = getattr(layer, "head_dim", None) or layer.hidden_size // count_heads(layer)
            width = max(width, layer.hidden_size, count_heads(layer) * head_size)
    policy = _make_policy(width)
    contexts: Contexts = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
    if offload is None:
        return contexts
    return offload.wrap_contexts(contexts)


def _make_policy(width: int) -> Callable[..., CheckpointPolicy]:
    """Keeps the outputs of attention, and of products from and to at most `width` features, unlike
    the MLP's.
    """

    def choose(_context: object, operator: Any, *arguments: Any, **_: Any) -> CheckpointPolicy:
        is_kept = operator in _attention_operators()
        if operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            is_kept = max(arguments[-2].shape[-1], arguments[-1].shape[-1]) <= width
        if is_kept:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return choose


def compile_layers(
    model: nn.Module, backend: str = "inductor", offload: ActivationOffload | None = None
) -> int:
    """Compiles the forward of every decoder layer (regional compilation) of a sharded model, and a
    chunk of its loss; returns how many layers.

    Those that are checkpointed are so within what is compiled, with `offload` around it.

    Only `forward`, not the module's call: sharding's hooks stay outside, and the layers, which are
    alike, share one compiled body. After sharding, because FSDP2 changes a layer's class: the
    forward compiled before would be the old class's, and transformers checkpoints a layer's
    activations in the forward of its own class only. Sizes are symbols, since packed rows differ in
    length.
    """
    configure_compiler()
    layers = decoder_layers(model)
    for layer in layers:
        if getattr(layer, "gradient_checkpointing", False):
            layer.forward = _compile_checkpointed(layer, backend, offload)
        else:
            layer.forward = _compile_forward(layer.forward, backend)
    model.get_input_embeddings().register_forward_hook(_match_grad_mode)  # type: ignore[operator]
    head = head_of(model)
    head.chunk_function = torch.compile(compute_fused_chunk, dynamic=True, backend=backend)
    return len(layers)


def _compile_forward(forward: Callable[..., Any], backend: str) -> Callable[..., Any]:
    return partial(_call_with_known_heads, torch.compile(forward, dynamic=True, backend=backend))


def _compile_checkpointed(
    layer: Any, backend: str, offload: ActivationOffload | None
) -> Callable[..., Any]:
    """The compiled forward of a checkpointed layer, with checkpointing within what is compiled.

    Around it where torch's compiler would forget to recompute what an autograd function has
    computed (before 2.13).
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    checkpoint = layer._gradient_checkpointing_func
    if RECOMPUTES_FUNCTIONS:
        forward = layer.forward
        # transformers before 5.20: not in forward
        if "__init_subclass__" not in vars(GradientCheckpointingLayer):
            layer.gradient_checkpointing = False
            forward = partial(_checkpoint, layer, checkpoint, forward)
        compiled = _compile_forward(forward, backend)
        if offload is None:
            return compiled
        return offload.wrap(compiled, is_compiled=True)
    layer.gradient_checkpointing = False
    if offload is not None:
        checkpoint = offload.wrap(checkpoint)
    return partial(_checkpoint, layer, checkpoint, _compile_forward(layer.forward, backend))


RECOMPUTES_FUNCTIONS = torch.__version__ >= TorchVersion("2.13")


def _checkpoint(
    layer: nn.Module,
    checkpoint: Callable[..., Any],
    forward: Callable[..., Any],
    *arguments: Any,
    **keys: Any,
) -> Any:
    """Runs `forward` of `layer`, checkpointed where it trains."""
    if not layer.training:
        return forward(*arguments, **keys)
    return checkpoint(partial(forward, **keys), *arguments)


def _call_with_known_heads(layer: Callable[..., Any], *arguments: Any, **keys: Any) -> Any:
    """Calls a compiled layer, to which the head size is a constant.

    As a symbol, which it would be in the cosines and sines alone, it makes kernels divide for every
    number: those of the rotary embedding took 39 of a step's 514 ms (8B with LoRA on an H200).
    """
    for embedding in tree_leaves(keys.get("position_embeddings")):
        if isinstance(embedding, Tensor):
            torch._dynamo.mark_static(embedding, embedding.dim() - 1)
    return layer(*arguments, **keys)


def _match_grad_mode(_module: nn.Module, _inputs: object, embedded: Tensor) -> Tensor:
    """Makes the first layer's input require a gradient exactly when those of the other layers do: a
    frozen embedding's output (LoRA) does not, which would compile the first layer by itself.
    """
    return embedded.requires_grad_(torch.is_grad_enabled())


def _rotates_parts(config: Any) -> bool:
    """Whether a config has a partial_rotary_factor, as Phi-4-mini's."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    kinds = [each for each in (rope, *rope.values()) if isinstance(each, Mapping)]
    return any(kind.get("partial_rotary_factor", 1.0) != 1.0 for kind in kinds)


def use_liger_kernels(model: Any) -> None:
    """Puts Liger's norms, rotary embeddings and MLPs into `model`.

    The loss stays ours, which is chunked as well.

    A mixture keeps its MLPs: Liger's would replace the grouped products of its experts. A model
    that rotates a part of each head keeps its own rotation: Liger's pairs the numbers of whole
    heads.
    """
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    off = [
        "fused_linear_cross_entropy",
        "cross_entropy",
        *(("swiglu", "geglu") if expert_modules(model) else ()),
        *(("rope",) if _rotates_parts(model.config) else ()),
    ]
    _apply_liger_kernel_to_instance(model, **dict.fromkeys(off, False))


# Graphs that dynamo keeps for one piece of code before it runs the rest eagerly. A model soon needs
# more than the default of 8: one for each kind of layer, with and without gradients, and for a
# batch of one row.
RECOMPILE_LIMIT = 64


def configure_compiler() -> None:
    """Sets torch's compiler up for packed rows, which differ in length.

    Call it before `torch.compile`.
    """
    _keep_compiled()
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    # Else equal sizes in the first batch (tokens and hidden size, say) become one symbol.
    torch.fx.experimental._config.use_duck_shape = False
    # Epsilons and scales as constants at once: as symbols they become constants after a whole
    # compile.
    torch._dynamo.config.specialize_float = True
    # What a pointwise kernel makes of what is kept anyway is made again, also where a product reads
    # it: of the MLP, two tensors of the intermediate size are kept and not their product too.
    torch._functorch.config.ban_recompute_materialized_backward = False
    # A checkpointed layer leaves what its router chose (models/routing.py); when it is recomputed,
    # it need not.
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True


def _keep_compiled() -> None:
    """Makes torch keep what it compiles where it outlives a reboot, for the next start.

    Its own folder is in /tmp.

    Where that cannot be written, or the user has set a folder, all stays as it is.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # torch sets the variable to its own folder when its compiler is imported, which another library
    # may have done.
    if os.environ.get(CACHE_VARIABLE) not in (None, os.path.abspath(default_cache_dir())):  # noqa: PTH100
        return
    folder = find_cache("compiled")
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        os.environ[CACHE_VARIABLE] = str(folder)
