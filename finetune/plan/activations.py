"""Bytes per token that the forward saves for the backward: every tensor that autograd saves, by
operation.

Counted from the forward of transformers' models and tested against torch's saved tensors and
allocations (tests/plan/test_activations.py). Korthikanti et al. 2022 (section 4) count the same way
for GPT.
"""

import math
from dataclasses import dataclass
from typing import Literal

from finetune.config.layout import divides_heads
from finetune.config.module_names import find_value, is_parameter_named
from finetune.config.schema import Lora
from finetune.constants import (
    BLOCK_TOKENS,
    EXPERT_RANK_MULTIPLE,
    FP32,
    LARGEST_FLASH_HEAD,
    ceil_div,
    round_up,
)
from finetune.plan.architecture import Architecture, LatentAttention, Mixture
from finetune.plan.state import is_adapted

INT32 = 4
KINDS = 2  # of layers that need masks: with a sliding window, and without

GATED_BY = ("silu", "swish", "gelu_pytorch_tanh")  # activations of models/gating.py


def attends_by_document(computation: "Computation") -> bool:
    """Whether attention runs over one document after the other, and their outputs are concatenated:
    a GPU's kernel takes all documents at once, but has no dropout.
    """
    return computation.cpu or computation.drops_attention


def materializes_scores(architecture: Architecture, computation: "Computation") -> bool:
    """Whether attention of capped scores or with sinks is written out."""
    return attends_by_document(computation) and (
        architecture.family.caps_scores or architecture.family.sinks
    )


def needs_masks(architecture: Architecture, computation: "Computation") -> bool:
    """Whether masks of blocks are made. Training with dropout makes them too, for evaluation, which
    has no dropout.
    """
    return not computation.cpu and (
        architecture.family.caps_scores
        or architecture.family.sinks
        or architecture.head_size > LARGEST_FLASH_HEAD
    )


def attends_in_blocks(architecture: Architecture, computation: "Computation") -> bool:
    """Whether flex_attention computes attention. It saves what flash attention does."""
    return needs_masks(architecture, computation) and not computation.drops_attention


def mask_bytes(architecture: Architecture, computation: "Computation", tokens: int) -> int:
    """Bytes of the attention masks when a rank holds `tokens` tokens.

    A mask holds how many blocks each block of queries sees, and which; the same for blocks of keys;
    both for blocks seen whole and for blocks seen in part; and the first token that each token
    sees.
    """
    if not needs_masks(architecture, computation):
        return 0
    tokens *= computation.sequence_ranks
    blocks = max(2, ceil_div(tokens, BLOCK_TOKENS))
    return KINDS * INT32 * (4 * blocks * (blocks + 1) + tokens)


TOKEN_ID = 8  # bytes of an int64
# Bytes of a token at one of its experts: which token, which of its choices, and how often each is
# saved
PLACES = 5 * TOKEN_ID


@dataclass(frozen=True, slots=True, kw_only=True)
class Computation:
    """The settings of a forward pass that affect its memory."""

    itemsize: int  # bytes of the compute dtype
    # Parameters and the residual stream are fp32, cast at each matmul (DDP, single); else they have
    # the compute dtype.
    autocast: bool = False
    checkpoint_every: int | None = None  # every k-th decoder layer is recomputed; None: no layer
    # what a recomputed layer keeps beside its input; see models/decoder_layers.py
    keeps: str = "nothing"
    # host memory holds what recomputed layers keep, but for one layer, or two in the backward
    offloads: bool = False
    lora: Lora | None = None
    document_length: int = 0  # tokens; matters where the scores [tokens, tokens] are materialized
    cpu: bool = False  # attention runs document by document, and its outputs are concatenated
    compiled: bool = False  # torch_compile
    # the kernel accepts fewer key-value heads than query heads (torch 2.12 and later)
    grouped_attention: bool = True
    sequence_ranks: int = 1  # that divide the tokens of a row, in attention the heads
    drops_attention: bool = False  # attention_dropout is not 0
    masks_images: bool = False  # the tokens of an image see each other, by a mask of each document
    divides_vocabulary: bool = False  # tensor parallelism: the softmax is normalized over ranks
    expert_ranks: int = 1  # that divide a layer's experts, and exchange their inputs

    @property
    def drops_inputs(self) -> bool:
        """Whether only the output of the adapter's dropout is saved, not the frozen layer's
        input.
        """
        return self.lora is not None and self.lora.lora_dropout > 0

    @property
    def fuses_adapters(self) -> bool:
        """Whether an adapted layer keeps its input as it came, shared, and no cast copy
        (models/fused_lora.py).
        """
        lora = self.lora
        return lora is not None and not (lora.lora_dropout or lora.use_dora or lora.oft_block_size)

    @property
    def remakes(self) -> bool:
        """Whether the backward makes again what a pointwise kernel makes of kept tensors: the
        compiler's choice, on a GPU (models/decoder_layers.py).
        """
        return self.compiled and not self.cpu and not self.autocast

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        return "cpu" if self.cpu else "cuda"

    @property
    def residual_itemsize(self) -> int:
        """Bytes of a number of the residual stream."""
        return FP32 if self.autocast else self.itemsize


def layer_bytes(
    architecture: Architecture, computation: Computation, *, is_dense: bool = False
) -> dict[str, int]:
    """Counts the activations that one decoder layer saves for its backward.

    Args:
        architecture: The model. Of a traced one, the layer that saves the most is counted.
        computation: The settings of the forward.
        is_dense: Counts a layer without experts, of a mixture that has both kinds.

    Returns:
        Part of the layer -> bytes per token on one rank.
    """
    if (trace := architecture.trace(computation)) is not None:
        return {"layer": trace.largest("saved", computation.document_length), "mlp": 0}
    if is_dense:
        mixture = None
        adapted_layer = architecture.dense_layer
    else:
        mixture = architecture.mixture
        adapted_layer = architecture.widest_layer
    return {
        "norms": _norms(architecture, mixture, computation),
        "attention": _attention(architecture, computation),
        "mlp": _mlp(architecture, mixture, computation),
        "adapters": _adapters(architecture, adapted_layer, computation),
    }


def kept_bytes(architecture: Architecture, computation: Computation) -> dict[str, int]:
    """Counts the bytes per token that the model without its head saves between forward and
    backward, by part.
    """
    every = computation.checkpoint_every
    # the layers that are not recomputed
    saving = [index for index in range(architecture.layers) if every is None or index % every]
    checkpoints = _checkpoints(architecture, computation, architecture.layers - len(saving))
    if (trace := architecture.trace(computation)) is not None:
        if trace.failure is None:
            by_layer = trace.layer_bytes("saved", computation.document_length)
            layers = sum(by_layer[index] for index in saving)
        else:
            layers = 0  # which the plan says (`RunSpec.uncounted`)
        return {
            "layers": layers,
            "checkpoints": checkpoints,
            "ids and rotary": round(trace.rest.per_token(computation.document_length)),
            "final norm": 0,
        }
    if architecture.mixture is None:
        dense = 0
    else:
        dense = len([index for index in saving if not architecture.has_experts(index)])
    layers = (len(saving) - dense) * sum(layer_bytes(architecture, computation).values())
    layers += dense * sum(layer_bytes(architecture, computation, is_dense=True).values())
    rotary = 2 * architecture.rotated_size * computation.residual_itemsize
    return {
        "layers": layers,
        "checkpoints": checkpoints,
        "ids and rotary": TOKEN_ID + rotary,
        "final norm": final_norm_bytes(architecture, computation),
    }


def final_norm_bytes(architecture: Architecture, computation: Computation) -> int:
    """Bytes per token that the norm before the head saves, and its output."""
    norm = _norm(architecture.hidden, architecture, computation)
    return norm + architecture.hidden * computation.residual_itemsize


def _checkpoints(architecture: Architecture, computation: Computation, layers: int) -> int:
    """Bytes per token on the device that `layers` checkpointed layers keep: under offload, those of
    one layer.
    """
    tensors = checkpointed_tensors(architecture, computation)
    if not computation.offloads:
        return layers * sum(tensors)
    # Under LoRA the graph keeps the first layer's input: transformers makes it a leaf that gets a
    # gradient.
    return sum(tensors) + (tensors[0] if computation.lora is not None else 0)


def checkpointed_tensors(architecture: Architecture, computation: Computation) -> list[int]:
    """Lists the bytes per token of each tensor that a checkpointed layer keeps: first its input,
    then those that `Computation.keeps` selects.
    """
    return [
        architecture.hidden * computation.residual_itemsize,
        *_selected_tensors(architecture, computation),
    ]


def _selected_tensors(architecture: Architecture, computation: Computation) -> list[int]:
    """Lists the bytes per token of each tensor that selective checkpointing keeps in a layer.

    With attention and projections, these are the outputs of attention and of the linear layers that
    read and write no more than the widest of hidden state and query: so not of the MLP's.
    """
    if computation.keeps == "nothing":
        return []
    # attention is written out, or is in what torch.compile makes of flex_attention
    has_no_operator = (
        materializes_scores(architecture, computation)
        or attends_in_blocks(architecture, computation)
        or (architecture.latent is not None and computation.cpu)
    )
    if has_no_operator:
        attention = []
    else:
        attention = [  # its output, and its log-sum-exp
            _kernel_itemsize(computation) * architecture.query_width,
            FP32 * architecture.heads,
        ]
    if computation.keeps == "attention":
        return attention
    width = max(architecture.hidden, architecture.query_width)
    features = []
    for linear in architecture.linears():
        width_out, width_in = linear.shape
        if max(width_out, width_in) <= width:
            features.append(width_out)
        if computation.lora is not None and is_adapted(linear, computation.lora):
            if width_in <= width:  # the product of A
                features.append(_largest_rank(linear.name, architecture, computation.lora))
            if width_out <= width:  # the product of B
                features.append(width_out)
    return attention + [computation.itemsize * each for each in features]


def prefetched_bytes(architecture: Architecture, computation: Computation) -> int:
    """Bytes per token of what the layer below keeps, copied back during a layer's backward; 0
    without offload.
    """
    if computation.offloads and architecture.layers > 1:
        return sum(checkpointed_tensors(architecture, computation))
    return 0


def offloaded_bytes(architecture: Architecture, computation: Computation, tokens: int) -> int:
    """Bytes of host memory for what checkpointed layers keep: torch rounds a pinned tensor up to a
    power of two.
    """
    if not computation.offloads or computation.checkpoint_every is None:
        return 0
    layers = ceil_div(architecture.layers, computation.checkpoint_every)
    return layers * sum(
        1 << (tokens * each - 1).bit_length()
        for each in checkpointed_tensors(architecture, computation)
    )


def recomputed_bytes(architecture: Architecture, computation: Computation) -> int:
    """Bytes per token of the one layer that is being recomputed; 0 without checkpointing."""
    if computation.checkpoint_every is not None:
        return sum(layer_bytes(architecture, computation).values()) - sum(
            _selected_tensors(architecture, computation)
        )
    return 0


def working_bytes(architecture: Architecture, computation: Computation) -> int:
    """Bytes per token that a layer's backward needs beyond what was saved.

    They are the gradients of gate and up, their product where it is made again, the gradient of the
    residual stream before and after the norm, and what ranks of an expert group exchange.
    """
    if (trace := architecture.trace(computation)) is not None:
        return trace.largest("working", computation.document_length)
    remade = architecture.mlp_width * computation.itemsize if computation.remakes else 0
    return (
        gate_gradient_bytes(architecture, computation)
        + remade
        + 2 * architecture.hidden * computation.residual_itemsize
        + exchanged_bytes(architecture, computation)
    )


def gate_gradient_bytes(architecture: Architecture, computation: Computation) -> int:
    """Bytes per token of the gradients of gate's and up's outputs; of one of them where the other
    takes the memory of the product's.
    """
    mixture = architecture.mixture
    both = architecture.mlp_width
    if _gates_again(architecture, computation):
        both = mixture.chosen * mixture.intermediate if mixture and mixture.keys.gates_itself else 0
    return (architecture.mlp_width + both) * computation.itemsize


def exchanged_bytes(architecture: Architecture, computation: Computation) -> int:
    """Bytes per token of what the ranks of an expert group exchange at once: what one sends, and
    what comes, both once for each expert of a token.

    Where the router prefers the experts of one rank, more come to it, up to all.
    """
    if architecture.mixture is None or computation.expert_ranks == 1:
        return 0
    return 2 * architecture.mixture.chosen * architecture.hidden * computation.itemsize


def evaluation_bytes(architecture: Architecture, computation: Computation) -> int:
    """Bytes per token of a forward that saves nothing: the MLP at its widest, the residual stream,
    and what ranks of an expert group exchange.
    """
    if (trace := architecture.trace(computation)) is not None:
        return trace.largest("forward", computation.document_length)
    return (
        3 * architecture.mlp_width * computation.itemsize
        + 3 * architecture.hidden * computation.residual_itemsize
        + exchanged_bytes(architecture, computation)
    )


def _norm(
    width: int,
    architecture: Architecture,
    computation: Computation,
    *,
    itemsize: int | None = None,
    heads: int = 1,
) -> int:
    """Bytes per token that an RMSNorm of `width` features saves. It works in fp32.

    It saves the reciprocal root (`heads` of them where it normalizes each head by itself) and its
    input, both in fp32. Where the weight is trained, not under LoRA, it saves the normalized input
    too: in fp32 if the weight is multiplied in fp32, as in Gemma.

    `itemsize`: bytes of a number of its input; None: those of the residual stream.
    """
    if computation.remakes:  # all but the roots, of the input as it came
        return (itemsize or computation.residual_itemsize) * width + FP32 * heads
    if architecture.family.norm_keeps_fp32:
        normalized = FP32
    else:
        normalized = itemsize or computation.residual_itemsize
    return FP32 * width + FP32 * heads + (normalized * width if computation.lora is None else 0)


def _norms(architecture: Architecture, mixture: Mixture | None, computation: Computation) -> int:
    """Bytes per token that the norms of a layer save, and the inputs of its attention and MLP."""
    total = len(architecture.family.norms) * _norm(architecture.hidden, architecture, computation)
    total += _inputs(architecture, mixture, computation)
    if (
        mixture is not None
        and mixture.keys.routes_in_fp32
        and computation.lora is None
        and computation.residual_itemsize < FP32
    ):
        total += FP32 * architecture.hidden  # the router's own copy of its input
    return total


def _inputs(architecture: Architecture, mixture: Mixture | None, computation: Computation) -> int:
    """Bytes per token of the saved inputs of attention and MLP: the norms' outputs or, where norms
    come after, the residual stream.
    """
    computed = architecture.hidden * computation.itemsize  # one input in the compute dtype
    if computation.remakes:  # a norm's output is made again, the residual stream is not
        return 2 * computed if architecture.family.norm_after else 0
    if computation.drops_inputs:
        return 0
    if computation.fuses_adapters:
        return 2 * architecture.hidden * computation.residual_itemsize
    if computation.autocast and not architecture.family.fused:
        # each layer that reads an fp32 input saves a cast copy of its own
        attention_readers = 3 if architecture.latent is None else 2
        return (attention_readers + _count_readers(mixture)) * computed
    return 2 * computed


def _count_readers(mixture: Mixture | None) -> int:
    """Linear layers that read the MLP's input: gate and up; in a mixture the router, and a shared
    expert's gate, up and, in some families, the layer that weighs its output.
    """
    if mixture is None:
        return 2
    if not mixture.shared:
        return 1
    return 3 if mixture.keys.shared is None else 4  # `shared_linears` names the fourth


def _attention(architecture: Architecture, computation: Computation) -> int:
    """Bytes a token that attention saves between its projections."""
    total = _attention_kernel(architecture, computation)
    # The documents' outputs, concatenated, or the heads' of other ranks: the input of the output
    # projection.
    if (
        attends_by_document(computation) or computation.sequence_ranks > 1
    ) and not computation.drops_inputs:
        total += computation.itemsize * (
            architecture.query_width
            if architecture.latent is None
            else architecture.heads * architecture.latent.value
        )
    if architecture.latent is not None:
        total += _latents(architecture, architecture.latent, computation)
    if architecture.query_key_norm:
        total += _query_key_norms(architecture, computation)
    if architecture.family.fused and _kernel_itemsize(computation) == computation.itemsize:
        # Value is a view of the whole fused output, which no cast frees: query and key before their
        # rotation remain.
        total += computation.itemsize * (architecture.query_width + architecture.key_value_width)
    return total


def _attention_kernel(architecture: Architecture, computation: Computation) -> int:
    """Bytes a token that the kernel saves: query, keys, values, output and log-sum-exp; without a
    kernel the scores.
    """
    itemsize = _kernel_itemsize(computation)
    output_width = architecture.query_width
    if architecture.latent is not None and computation.cpu:
        output_width = architecture.heads * architecture.latent.value
    total = itemsize * (
        architecture.query_width + _keys_and_values_width(architecture, computation)
    )
    # torch's kernel for a CPU wants one head size.
    if materializes_scores(architecture, computation) or output_width != architecture.query_width:
        total += (
            architecture.heads * computation.document_length * _score_bytes(architecture, itemsize)
        )
    else:
        total += itemsize * output_width + FP32 * architecture.heads
    # the sinks' part of the softmax's sum, and the output that is left without them
    if architecture.family.sinks and attends_in_blocks(architecture, computation):
        total += FP32 * architecture.heads + computation.itemsize * architecture.query_width
    if computation.masks_images:  # which the kernel adds to the scores
        total += itemsize * computation.document_length
    return total


def _kernel_itemsize(computation: Computation) -> int:
    """Bytes of a number in attention: on a CPU the kernel works in fp32."""
    return max(computation.itemsize, FP32) if computation.cpu else computation.itemsize


def _keys_and_values_width(architecture: Architecture, computation: Computation) -> int:
    """Features of keys and values together that the kernel reads on one rank, for each token that
    the rank has of a row.
    """
    is_grouped = (
        computation.grouped_attention or attends_in_blocks(architecture, computation)
    ) and not materializes_scores(architecture, computation)
    ranks = computation.sequence_ranks
    key_value_heads = architecture.key_value_heads
    repeats = 1
    if architecture.latent is not None:
        # a key for each head, and narrower values, which the GPU's kernel takes padded
        if computation.cpu:
            values = architecture.heads * architecture.latent.value
        else:
            values = architecture.query_width
        width = architecture.query_width + values
    elif is_grouped:
        width = 2 * architecture.key_value_width
        # ranks that trade tokens for heads repeat key-value heads until each rank has as many
        repeats = math.lcm(key_value_heads, ranks) // key_value_heads
    else:  # a key and a value for each head of the query
        width = 2 * architecture.query_width
    if divides_heads(architecture.heads, ranks):
        return width * repeats
    return width * ranks  # not traded: each rank gathers those of the whole row


def _query_key_norms(architecture: Architecture, computation: Computation) -> int:
    by_head = architecture.family.query_key_norm == "head"
    query = _norm(
        architecture.query_width,
        architecture,
        computation,
        itemsize=computation.itemsize,
        heads=architecture.heads if by_head else 1,
    )
    return query + _norm(
        architecture.key_value_width,
        architecture,
        computation,
        itemsize=computation.itemsize,
        heads=architecture.key_value_heads if by_head else 1,
    )


def _score_bytes(architecture: Architecture, itemsize: int) -> int:
    """Bytes of one materialized score: tanh, where scores are capped; softmax in fp32, and its cast
    to the `itemsize` of attention.
    """
    tanh = itemsize if architecture.family.caps_scores else 0
    cast = itemsize if itemsize < FP32 else 0
    return tanh + FP32 + cast


def _latents(architecture: Architecture, latent: LatentAttention, computation: Computation) -> int:
    """Bytes per token that the norms of the latents save, and their outputs, which linear layers
    read.
    """
    widths = [width for width in (latent.query_rank, latent.key_value_rank) if width is not None]
    outputs = 0 if computation.drops_inputs else computation.itemsize * sum(widths)
    total = outputs + sum(
        _norm(width, architecture, computation, itemsize=computation.itemsize) for width in widths
    )
    if computation.cpu and computation.itemsize == FP32:
        # value is a view of its common product with the keys, whose plain part remains
        total += FP32 * architecture.heads * latent.plain
    return total


def _mlp(architecture: Architecture, mixture: Mixture | None, computation: Computation) -> int:
    """down(act(gate) * up): gate, up and their product, and act(gate) where the backward does not
    make it again.
    """
    saved = 3 if _gates_again(architecture, computation) else 4
    if computation.remakes:  # the product as well
        saved = 2
    elif computation.drops_inputs:
        saved -= 1
    if mixture is None:
        return saved * architecture.intermediate * computation.itemsize
    return saved * mixture.shared * computation.itemsize + _experts(
        architecture, mixture, computation
    )


def _gates_again(architecture: Architecture, computation: Computation) -> bool:
    """Whether a backward makes act(gate) again, in memory that is there (models/gating.py)."""
    return not computation.compiled and architecture.activation in GATED_BY


def _experts(architecture: Architecture, mixture: Mixture, computation: Computation) -> int:
    """Bytes per token that the routed experts and their router save.

    Each expert of the token saves its gathered input, what its gating saves, the product, its
    output, which the router weighs, and where it belongs. A frozen expert does not save what it
    multiplies. The router saves logits, and probabilities in fp32.
    """
    inputs, products = _read_by_trained_experts(computation)
    gate_tensors = mixture.keys.gate_tensors
    if _gates_again(architecture, computation) and not mixture.keys.gates_itself:
        gate_tensors -= 1
    states = (inputs + 1) * architecture.hidden + (products + gate_tensors) * mixture.intermediate
    states += sum(
        expert_adapter_rank(tensor.name, computation)[1]
        for tensor in architecture.experts(architecture.widest_layer)
    )
    return mixture.chosen * (computation.itemsize * states + PLACES) + mixture.experts * (
        computation.itemsize + FP32
    )


def expert_adapter_rank(name: str, computation: Computation) -> tuple[int, int]:
    """The rank of the adapter on an expert's parameter, and the padded rank of its products; both 0
    without an adapter.
    """
    if computation.lora is None or not is_parameter_named(
        name, computation.lora.lora_target_parameters
    ):
        return 0, 0
    rank = find_value(name, computation.lora.rank_pattern, computation.lora.lora_r)
    return rank, round_up(rank, EXPERT_RANK_MULTIPLE)


def _read_by_trained_experts(computation: Computation) -> tuple[int, int]:
    """How many tensors an expert saves as the input of gate and up, and as that of down: 1 each
    where a weight or an adapter gets a gradient, else 0.
    """
    if computation.lora is None:
        return 1, 1
    targets = computation.lora.lora_target_parameters
    gate_up = any(target.endswith("gate_up_proj") for target in targets)
    down = any(target.endswith("down_proj") for target in targets)
    return int(gate_up), int(down)


def _adapters(architecture: Architecture, layer: int, computation: Computation) -> int:
    """Bytes per token that the adapters of a layer save: the products of A; with dropout also the
    dropped inputs and their masks; of rotations their inputs alone.
    """
    if computation.lora is None:
        return 0
    adapted = [
        linear for linear in architecture.linears(layer) if is_adapted(linear, computation.lora)
    ]
    if computation.lora.oft_block_size is not None:  # what is rotated, in the type of the rotations
        itemsize = FP32 if computation.autocast else computation.itemsize
        return sum(linear.shape[1] * itemsize for linear in adapted)
    dropped = 0
    if computation.drops_inputs:
        mask = computation.itemsize if computation.cpu else 1
        dropped = computation.itemsize + mask
    return sum(
        _largest_rank(linear.name, architecture, computation.lora) * computation.itemsize
        + linear.shape[1] * dropped
        for linear in adapted
    )


def _largest_rank(linear: str, architecture: Architecture, lora: Lora) -> int:
    """The largest rank that `rank_pattern` gives a linear layer in any decoder layer; `linear` is
    its name in one of them.
    """
    trunk, _, place = linear.removesuffix(".weight").partition(".layers.")
    in_layer = place.partition(".")[2]
    names = (
        f"{trunk}.layers.{layer}.{in_layer}"
        for layer in range(architecture.layers if lora.rank_pattern else 1)
    )
    return max(find_value(name, lora.rank_pattern, lora.lora_r) for name in names)
