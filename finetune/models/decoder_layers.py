"""Makes decoder layers smaller or faster: checkpointing, offload, torch.compile, Liger.

None of these renames a parameter.
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
# those of selective checkpointing: for the forward, and for the recomputation
Contexts = tuple[AbstractContextManager[None], AbstractContextManager[None]]


class CudaCopies:
    """Copies between the device and pinned host memory, on a CUDA stream of its own.

    A method that copies returns the copy with the event of the copy's end.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def to_host(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Starts a copy to pinned memory."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host, self._copy(host, tensor)

    def to_device(self, tensor: Tensor, device: torch.device) -> tuple[Tensor, Any]:
        """Starts a copy from pinned memory to `device`."""
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        return copy, self._copy(copy, tensor)

    def wait(self, event: Any) -> None:
        """Makes the current stream wait for the copy of `event`; the host does not wait."""
        torch.cuda.current_stream().wait_event(event)

    def _copy(self, target: Tensor, source: Tensor) -> Any:
        """Starts a copy from `source` into `target`, and returns the event of its end."""
        # The current stream may still compute the source, or use the target's memory for a tensor
        # that has been freed since.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        return self._stream.record_event()


class _OffloadedTensor:
    """A tensor that a layer's forward saves for its backward, and that waits in host memory.

    The copy to the host starts at once. `release` frees the tensor on the device, `bring_back`
    copies it there again, and `take` hands it to the backward.
    """

    def __init__(self, tensor: Tensor, layer: "_Layer", copies: CudaCopies) -> None:
        self._device = tensor.device
        self._layer = layer
        self._copies = copies
        self._on_device: Tensor | None = tensor.detach()
        self._on_host, self._event = copies.to_host(self._on_device)

    def release(self) -> None:
        """Frees the tensor on the device, after the copy to the host.

        Without the wait for the copy, later work could overwrite the memory before it is copied.
        """
        if self._on_device is not None:
            self._copies.wait(self._event)
            self._on_device = self._event = None

    def bring_back(self) -> None:
        """Starts the copy to the device, unless the tensor is there already."""
        if self._on_device is None:
            self._on_device, self._event = self._copies.to_device(self._on_host, self._device)

    def take(self) -> Tensor:
        """Returns the tensor on the device and drops it here.

        It also starts to bring back the tensors of the layer below, whose backward is next.
        """
        self.bring_back()
        self._layer.bring_back_below()
        self._copies.wait(self._event)
        tensor = self._on_device
        self._on_device = None
        self._event = None
        assert tensor is not None
        return tensor


def _find_address(tensor: Tensor) -> int:
    """Returns the address of the storage of `tensor`."""
    return tensor.untyped_storage().data_ptr()


class _Layer:
    """The tensors that one forward of a checkpointed layer saves, and the layer below it.

    The layer below is the one that ran before.
    """

    def __init__(self, below: "_Layer | None", copies: CudaCopies) -> None:
        self._below = None if below is None else ref(below)
        self._copies = copies
        # Weak references, as to the layer below: a saved tensor must be freed together with the
        # graph that needs it, not when cycles are collected.
        self._saved: list[ref[_OffloadedTensor]] = []

    def keep(self, tensor: Tensor, storage: int | None = None) -> "_OffloadedTensor | Tensor":
        """Returns what autograd saves in place of `tensor`.

        That is the tensor on the host. A small tensor, and one that is not of floating point, stays
        as it is.

        storage: The address of the only storage whose tensors are offloaded; None: all are.
        """
        if storage is not None and _find_address(tensor) != storage:
            return tensor
        if not tensor.is_floating_point() or tensor.nbytes < MIN_OFFLOADED_BYTES:
            return tensor
        offloaded = _OffloadedTensor(tensor, self, self._copies)
        self._saved.append(ref(offloaded))
        return offloaded

    def release(self) -> None:
        """Frees this layer's saved tensors on the device."""
        for offloaded in self._list_saved():
            offloaded.release()

    def bring_back_below(self) -> None:
        """Starts to copy the saved tensors of the layer below to the device."""
        below = None if self._below is None else self._below()
        if below is None:
            return
        for offloaded in below._list_saved():
            offloaded.bring_back()

    def _list_saved(self) -> Iterator[_OffloadedTensor]:
        """Yields the saved tensors that the graph still needs."""
        return (offloaded for reference in self._saved if (offloaded := reference()) is not None)


class ActivationOffload:
    """Offloads the activations that checkpointed layers save for the backward.

    Only layers whose function has been passed to `wrap` take part.
    """

    def __init__(self, copies: CudaCopies) -> None:
        self._copies = copies
        # The layer whose forward began last. To a forward's first layer that is the last one of the
        # forward before, whose tensors are gone with its graph.
        self._latest: _Layer | None = None

    def wrap(self, function: Callable[..., Any], is_compiled: bool = False) -> Callable[..., Any]:
        """Wraps a layer's function, so that the activations that it saves are offloaded.

        Args:
            function: The layer's checkpointing function, which itself saves only its inputs; or its
                compiled forward, which is checkpointed inside.
            is_compiled: Whether it is the compiled forward. That saves its parameters and its other
                arguments too, so only its first input, the hidden state, is offloaded.
        """

        def run_offloaded(*inputs: Any, **others: Any) -> Any:
            if not torch.is_grad_enabled():  # nothing is saved
                return function(*inputs, **others)
            below = self._latest
            layer = _Layer(below, self._copies)
            self._latest = layer
            keep: Callable[[Tensor], _OffloadedTensor | Tensor] = layer.keep
            if is_compiled:
                keep = partial(layer.keep, storage=_find_address(inputs[0]))
            with saved_tensors_hooks(keep, _restore):
                outputs = function(*inputs, **others)
            # The copies of the layer below ran beside this forward. The last layer is never
            # released: its backward is first.
            if below is not None:
                below.release()
            return outputs

        return run_offloaded

    def wrap_contexts(self, contexts: Contexts) -> Contexts:
        """Wraps selective checkpointing's contexts, so that the stored outputs are offloaded.

        Called while a function of `wrap` runs.
        """
        layer = self._latest
        forward_context, recompute_context = contexts
        assert layer is not None
        return _offload_after(forward_context, layer), _restore_before(recompute_context)


def _restore(saved: "_OffloadedTensor | Tensor") -> Tensor:
    """Returns the tensor in place of which `_Layer.keep` returned `saved`."""
    return saved.take() if isinstance(saved, _OffloadedTensor) else saved


@contextmanager
def _offload_after(context: Any, layer: _Layer) -> Iterator[None]:
    """Runs the forward's context, then offloads the outputs that it has stored."""
    with context:
        yield
    for wrapper in _list_stored(context):
        if isinstance(wrapper.val, Tensor):
            wrapper.val = layer.keep(wrapper.val)


@contextmanager
def _restore_before(context: Any) -> Iterator[None]:
    """Brings the stored outputs back to the device, then runs the recomputation's context."""
    for wrapper in _list_stored(context):
        if isinstance(wrapper.val, _OffloadedTensor):
            wrapper.val = wrapper.val.take()
            # torch compares the versions to find values that were changed in place.
            wrapper.version = wrapper.val._version
    with context:
        yield


def _list_stored(context: Any) -> list[Any]:
    """Lists torch's wrappers of the values that selective checkpointing stores.

    A wrapper has the value as `val`, and the value's `version` when it was stored.
    """
    stored = tree_leaves(list(context.storage.values()))
    return [leaf for leaf in stored if hasattr(leaf, "val") and hasattr(leaf, "version")]


# what a checkpointed layer keeps besides its input
KeptOutputs = Literal["nothing", "attention", "attention_and_projections"]


def checkpoint_activations(
    model: nn.Module,
    every: int,
    keeps: KeptOutputs = "nothing",
    offload: ActivationOffload | None = None,
) -> int:
    """Makes every `every`-th decoder layer recompute its activations in the backward.

    Chen et al. 2016. It uses transformers' own checkpointing. The FSDP plugin's drops the RNG
    state, so that gradients are wrong with dropout (relative error 0.5), and renames modules under
    LoRA, so that the saved adapter is empty.

    Args:
        model: A transformers model.
        every: 1: all layers.
        keeps: Outputs that are kept besides the layer's input, and are not recomputed (selective
            checkpointing, Korthikanti et al. 2022, section 5).
        offload: Moves what is kept to host memory; None: it stays on the device.

    Returns:
        How many layers are checkpointed.

    Raises:
        UserError: transformers cannot recompute the layers of the model's class.
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
    """Returns the operators of the kernels that attention may choose: varlen's and SDPA's."""
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


def _make_contexts(config: Any, keeps: KeptOutputs, offload: ActivationOffload | None) -> Contexts:
    """Makes the contexts in which torch runs a checkpointed layer and later recomputes it."""
    width = 0
    if keeps == "attention_and_projections":
        # The widest state before or after a projection of attention: the hidden state, or the
        # queries of all heads.
        for layer_config in list_layer_configs(config.get_text_config()):
            heads = count_heads(layer_config)
            head_size = getattr(layer_config, "head_dim", None) or layer_config.hidden_size // heads
            width = max(width, layer_config.hidden_size, heads * head_size)
    policy = _make_policy(width)
    contexts: Contexts = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
    if offload is None:
        return contexts
    return offload.wrap_contexts(contexts)


def _make_policy(width: int) -> Callable[..., CheckpointPolicy]:
    """Makes a policy that keeps the outputs of attention and of products that are not too wide.

    width: The most features of a product's input or output. The MLP's have more. 0: no product's
        output is kept.
    """

    def choose(_context: object, operator: Any, *arguments: Any, **_: Any) -> CheckpointPolicy:
        is_kept = operator in _attention_operators()
        if operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            *_bias, left, right = arguments
            is_kept = max(left.shape[-1], right.shape[-1]) <= width
        if is_kept:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return choose


def compile_layers(
    model: nn.Module, backend: str = "inductor", offload: ActivationOffload | None = None
) -> int:
    """Compiles the forward of every decoder layer (regional compilation), and a chunk of the loss.

    It compiles `forward`, not the module's call: FSDP's hooks stay outside, and the layers, which
    are alike, share one compiled body. Sizes are symbols, since packed rows differ in length.

    Call it after sharding, which changes a layer's class under FSDP2: the forward compiled before
    would be the old class's, and transformers checkpoints a layer's activations only in the forward
    of the layer's own class.

    Args:
        model: Sharded already, if it is to be.
        backend: torch.compile's.
        offload: Offloads what checkpointed layers keep; None: it stays on the device.

    Returns:
        The number of layers.
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
    """Compiles a layer's forward, with the size of its heads as a constant."""
    return partial(_call_with_known_heads, torch.compile(forward, dynamic=True, backend=backend))


def _compile_checkpointed(
    layer: Any, backend: str, offload: ActivationOffload | None
) -> Callable[..., Any]:
    """Compiles the forward of a checkpointed layer, with checkpointing inside what is compiled.

    Before torch 2.13 checkpointing is around it instead: there the compiler forgets to recompute
    what an autograd function has computed.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    checkpoint = layer._gradient_checkpointing_func
    if RECOMPUTES_FUNCTIONS:
        forward = layer.forward
        # Before transformers 5.20 a layer's call checkpoints, not its forward.
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
    """Runs `forward` of `layer`, checkpointed if the layer trains."""
    if not layer.training:
        return forward(*arguments, **keys)
    return checkpoint(partial(forward, **keys), *arguments)


def _call_with_known_heads(layer: Callable[..., Any], *arguments: Any, **keys: Any) -> Any:
    """Calls a compiled layer with the size of its heads as a constant.

    In the cosines and sines of the rotary embedding alone, the size would be a symbol. A symbol
    makes kernels divide for every number: those of the rotary embedding took 39 of a step's 514 ms
    (8B with LoRA on an H200).
    """
    for embedding in tree_leaves(keys.get("position_embeddings")):
        if isinstance(embedding, Tensor):
            torch._dynamo.mark_static(embedding, embedding.dim() - 1)
    return layer(*arguments, **keys)


def _match_grad_mode(_module: nn.Module, _inputs: object, embedded: Tensor) -> Tensor:
    """Makes the first layer's input require a gradient exactly when the inputs of other layers do.

    The output of a frozen embedding (LoRA) never does, and the first layer would be compiled by
    itself.
    """
    return embedded.requires_grad_(torch.is_grad_enabled())


def _rotates_parts(config: Any) -> bool:
    """Whether a config has a partial_rotary_factor, as Phi-4-mini's."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    kinds = [each for each in (rope, *rope.values()) if isinstance(each, Mapping)]
    return any(kind.get("partial_rotary_factor", 1.0) != 1.0 for kind in kinds)


def use_liger_kernels(model: Any) -> None:
    """Puts Liger's norms, rotary embeddings and MLPs into `model`.

    The loss stays this project's, which is chunked as Liger's is.

    A mixture keeps its MLPs: Liger's would replace the grouped products of its experts. A model
    that rotates only a part of each head keeps its own rotation: Liger's rotates whole heads.
    """
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    unused = ["fused_linear_cross_entropy", "cross_entropy"]
    if expert_modules(model):
        unused += ["swiglu", "geglu"]
    if _rotates_parts(model.config):
        unused += ["rope"]
    _apply_liger_kernel_to_instance(model, **dict.fromkeys(unused, False))


# The most graphs that dynamo compiles for one function; further ones run eagerly. The default of 8
# is too few: there is a graph for each kind of layer, with and without gradients, and for a batch
# of one row.
RECOMPILE_LIMIT = 64


def configure_compiler() -> None:
    """Sets torch's compiler up for packed rows, which differ in length.

    Call it before `torch.compile`.
    """
    _keep_compiled()
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    # Otherwise sizes that are equal in the first batch (tokens and hidden size, say) become one
    # symbol.
    torch.fx.experimental._config.use_duck_shape = False
    # Epsilons and scales are constants from the start. As symbols they become constants only after
    # a whole compile.
    torch._dynamo.config.specialize_float = True
    # The backward recomputes what a pointwise kernel makes of tensors that are kept anyway, even if
    # a matrix product reads it. Of the MLP, two tensors of the intermediate size are kept, and not
    # their product too.
    torch._functorch.config.ban_recompute_materialized_backward = False
    # The forward of a checkpointed layer stores what its router chose (models/routing.py); the
    # recomputation need not store it again.
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True


def _keep_compiled() -> None:
    """Makes torch keep compiled code in a folder that outlives a reboot, for the next start.

    torch's own folder is in /tmp. It stays in use if the user has set a folder, or if the new one
    cannot be made.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # The variable may hold torch's own folder: torch sets it when its compiler is imported, which
    # another library may have caused.
    if os.environ.get(CACHE_VARIABLE) not in (None, os.path.abspath(default_cache_dir())):  # noqa: PTH100
        return
    folder = find_cache("compiled")
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        os.environ[CACHE_VARIABLE] = str(folder)
