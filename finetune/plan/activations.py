"""Bytes per token that a forward saves for its backward: the tensors that autograd saves, operation
by operation.

The formulas follow the forward of transformers' models, and are tested against torch's saved
tensors and allocations (tests/plan/test_activations.py). Korthikanti et al. 2022 (section 4) count
the same way for GPT. For a model whose layers no table describes, the sizes are read from a trace
of transformers' own code instead (`Architecture.trace`).
"""

import math
from dataclasses import dataclass, replace
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

INT32 = 4  # bytes
# values of `attn_implementation`, by which transformers' own code masks the scores of a whole row
MASKED = ("eager", "sdpa")
MASK_KINDS = 2  # a mask for layers with a sliding window, and one for layers without

GATED_BY = ("silu", "swish", "gelu_pytorch_tanh")  # the activations that models/gating.py computes


def copies_attention_output(architecture: Architecture, computation: "Computation") -> bool:
    """Whether attention's output is copied.

    That is so where it runs on one document after another and their outputs are concatenated, and
    under transformers' masks. A GPU's kernels take all documents at once. They have no dropout and
    no masks of images, and only flex_attention computes in fp32.
    """
    if computation.cpu or computation.drops_attention or computation.masks_images:
        return True
    if computation.attention in MASKED:
        return True
    is_fp32 = computation.itemsize >= FP32
    uses_flex_attention = needs_masks(architecture, computation)
    return is_fp32 and not uses_flex_attention


def materializes_scores(architecture: Architecture, computation: "Computation") -> bool:
    """Whether attention computes its scores as a tensor, without a kernel.

    That is so for capped scores and for sinks, if attention runs by document, and for eager
    attention. torch's kernel for CPUs has no dropout.
    """
    return copies_attention_output(architecture, computation) and (
        architecture.family.caps_scores
        or architecture.family.sinks
        or computation.attention == "eager"
        or (computation.cpu and computation.drops_attention)
    )


def needs_masks(architecture: Architecture, computation: "Computation") -> bool:
    """Whether block masks of flex_attention are made.

    Training with attention dropout does not use them, but its evaluation does.
    """
    return not computation.cpu and (
        architecture.family.caps_scores
        or architecture.family.sinks
        or architecture.head_size > LARGEST_FLASH_HEAD
    )


def attends_in_blocks(architecture: Architecture, computation: "Computation") -> bool:
    """Whether flex_attention computes attention. It saves the same tensors as flash attention."""
    return needs_masks(architecture, computation) and not computation.drops_attention


def mask_bytes(architecture: Architecture, computation: "Computation", tokens: int) -> int:
    """Bytes of the attention masks if a rank holds `tokens` tokens; 0 if no masks are needed.

    A mask lists, for each block of queries, how many blocks of keys it sees and which ones; and the
    same for each block of keys. Both lists are made for blocks that are seen whole, and again for
    blocks that are seen in part. A mask also has the first token that each token sees.
    """
    if not needs_masks(architecture, computation):
        return 0
    tokens *= computation.sequence_ranks  # attention sees the whole row
    blocks = max(2, ceil_div(tokens, BLOCK_TOKENS))
    lists = 4 * blocks * (blocks + 1)
    return MASK_KINDS * INT32 * (lists + tokens)


TOKEN_ID = 8  # bytes of an int64
# Bytes of the indexes of a token at one of its experts. They say which token and which of its
# choices it is; as they are saved by several operations, there are 5 of them.
PLACES = 5 * TOKEN_ID


def row_mask_bytes(architecture: Architecture, computation: "Computation") -> int:
    """Bytes per token of the masks that transformers makes of a row for SDPA, one byte a score, if
    they are kept until the backward: layers that are recomputed read them again.

    What is counted for the scores of eager attention has room for its mask.
    """
    if computation.attention != "sdpa" or computation.checkpoint_every is None:
        return 0
    return _row_mask_bytes(architecture, computation)


@dataclass(frozen=True, slots=True, kw_only=True)
class Computation:
    """The settings of a forward that affect its memory."""

    itemsize: int  # bytes of the compute dtype
    # With autocast (DDP, single), parameters and the residual stream are fp32 and cast at each
    # matmul. Without it they have the compute dtype.
    autocast: bool = False
    checkpoint_every: int | None = None  # every k-th decoder layer is recomputed; None: no layer
    # what a recomputed layer keeps besides its input; see models/decoder_layers.py
    keeps: str = "nothing"
    # What recomputed layers keep is in host memory, except that of one layer, or in the backward of
    # two.
    offloads: bool = False
    lora: Lora | None = None  # None: no adapters
    document_length: int = 0  # tokens; matters if the scores [tokens, tokens] are materialized
    attention: str = "auto"  # the recipe's attn_implementation
    cpu: bool = False  # the CPU computes; attention then runs document by document
    compiled: bool = False  # torch_compile
    # the kernel accepts fewer key-value heads than query heads (torch 2.12 and later)
    grouped_attention: bool = True
    sequence_ranks: int = 1  # ranks that share the tokens of a row, and in attention the heads
    drops_attention: bool = False  # attention_dropout is not 0
    # the tokens of an image see each other, by a mask [tokens, tokens] of each document
    masks_images: bool = False
    # padded rows in which a token sees all of its document; SDPA makes a mask [tokens, tokens] then
    masks_padding: bool = False
    divides_vocabulary: bool = False  # tensor parallelism: the softmax is normalized over ranks
    loops_experts: bool = False  # one expert is computed after another
    expert_ranks: int = 1  # ranks that share a layer's experts, and exchange their inputs
    # the most tokens of shared prompts that attention repeats, for each token of a row
    repeated_prompts: float = 0.0

    @property
    def drops_inputs(self) -> bool:
        """Whether adapters have dropout.

        A layer then saves its adapter's input after dropout, and not its own input.
        """
        return self.lora is not None and self.lora.lora_dropout > 0

    @property
    def fuses_adapters(self) -> bool:
        """Whether layer and adapter are one operation (models/fused_lora.py).

        Layers that read the same input then save that one tensor in its own dtype, and no cast
        copies.
        """
        lora = self.lora
        return lora is not None and not (lora.lora_dropout or lora.use_dora or lora.oft_block_size)

    @property
    def remakes(self) -> bool:
        """Whether the backward recomputes the outputs of pointwise operations from saved tensors.

        torch's compiler chooses to do so on a GPU (models/decoder_layers.py).
        """
        return self.compiled and not self.cpu and not self.autocast

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        return "cpu" if self.cpu else "cuda"

    @property
    def residual_itemsize(self) -> int:
        """Bytes of one element of the residual stream."""
        return FP32 if self.autocast else self.itemsize


def layer_bytes(
    architecture: Architecture, computation: Computation, *, is_dense: bool = False
) -> dict[str, int]:
    """Counts the activations that one decoder layer saves for its backward.

    Args:
        architecture: The model. If it has a trace, the layer that saves the most is counted.
        computation: The settings of the forward.
        is_dense: Counts a layer without experts, in a model that has layers of both kinds.

    Returns:
        Part of the layer -> bytes per token on one rank.
    """
    if (trace := architecture.trace(computation)) is not None:
        saved = trace.largest("saved", computation.document_length)
        return {"layer": saved + _repeated_prompts(architecture, computation), "mlp": 0}
    if is_dense:
        mixture = None
        adapted_layer = architecture.dense_layer
    else:
        mixture = architecture.mixture
        adapted_layer = architecture.widest_layer
    return {
        "norms": _norms(architecture, mixture, computation),
        "attention": _attention(architecture, computation)
        + _repeated_prompts(architecture, computation),
        "mlp": _mlp(architecture, mixture, computation),
        "adapters": _adapters(architecture, adapted_layer, computation),
    }


def kept_bytes(architecture: Architecture, computation: Computation) -> dict[str, int]:
    """Counts the activations that the model without its head saves between forward and backward.

    Returns:
        Part of the model -> bytes per token on one rank.
    """
    every = computation.checkpoint_every
    # the layers that are not recomputed, and so save all their activations
    saving = [index for index in range(architecture.layers) if every is None or index % every]
    checkpoints = _checkpoints(architecture, computation, architecture.layers - len(saving))
    if (trace := architecture.trace(computation)) is not None:
        if trace.failure is None:
            by_layer = trace.layer_bytes("saved", computation.document_length)
            layers = sum(by_layer[index] for index in saving)
            layers += len(saving) * _repeated_prompts(architecture, computation)
        else:
            layers = 0  # not known, which the plan says (`RunSpec.uncounted`)
        return {
            "layers": layers,
            "checkpoints": checkpoints,
            "ids and rotary": round(trace.rest.per_token(computation.document_length)),
            "final norm": 0,  # part of the rest
        }
    if architecture.mixture is None:
        dense = 0  # all layers are alike, and counted without `is_dense`
    else:
        dense = len([index for index in saving if not architecture.has_experts(index)])
    layers = (len(saving) - dense) * sum(layer_bytes(architecture, computation).values())
    layers += dense * sum(layer_bytes(architecture, computation, is_dense=True).values())
    # cosine and sine
    rotary = 2 * architecture.rotated_size * computation.residual_itemsize
    return {
        "layers": layers,
        "checkpoints": checkpoints,
        "ids and rotary": TOKEN_ID + rotary,
        "final norm": final_norm_bytes(architecture, computation),
    }


def final_norm_bytes(architecture: Architecture, computation: Computation) -> int:
    """Bytes per token of the tensors that the norm before the head saves, and of its output."""
    norm = _norm(architecture.hidden, architecture, computation)
    return norm + architecture.hidden * computation.residual_itemsize


def _checkpoints(architecture: Architecture, computation: Computation, layers: int) -> int:
    """Bytes per token on the device that `layers` checkpointed layers keep.

    Under offload the device holds those of one layer at a time.
    """
    tensors = checkpointed_tensors(architecture, computation)
    if not computation.offloads:
        return layers * sum(tensors)
    if computation.lora is None:
        return sum(tensors)
    # Under LoRA the graph keeps the first layer's input on the device, too: transformers makes it a
    # leaf that gets a gradient.
    layer_input, *_ = tensors
    return sum(tensors) + layer_input


def checkpointed_tensors(architecture: Architecture, computation: Computation) -> list[int]:
    """Lists the bytes per token of each tensor that a checkpointed layer keeps.

    The layer's input comes first, then the tensors that `Computation.keeps` selects.
    """
    return [
        architecture.hidden * computation.residual_itemsize,
        *_selected_tensors(architecture, computation),
    ]


def _selected_tensors(architecture: Architecture, computation: Computation) -> list[int]:
    """Lists the bytes per token of each tensor that selective checkpointing keeps in a layer.

    `Computation.keeps` selects nothing, the output of attention, or that and the outputs of
    projections. Projections are the linear layers that are no wider than the wider of hidden state
    and query, so the MLP's are not among them.
    """
    if computation.keeps == "nothing":
        return []
    # Checkpointing selects by operator. Attention has none if its scores are materialized, or if
    # torch.compile makes it of flex_attention.
    has_no_operator = (
        materializes_scores(architecture, computation)
        or attends_in_blocks(architecture, computation)
        or (architecture.latent is not None and computation.cpu)
    )
    if has_no_operator:
        attention = []
    else:
        output = _kernel_itemsize(computation) * architecture.query_width
        log_sum_exp = FP32 * architecture.heads
        attention = [output, log_sum_exp]
    if computation.keeps == "attention":
        return attention
    widest = max(architecture.hidden, architecture.query_width)
    widths = []  # of the selected outputs
    for linear in architecture.linears():
        width_out, width_in = linear.shape
        if max(width_out, width_in) <= widest:
            widths.append(width_out)
        if computation.lora is not None and is_adapted(linear, computation.lora):
            if width_in <= widest:  # the output of A
                widths.append(_largest_rank(linear.name, architecture, computation.lora))
            if width_out <= widest:  # the output of B
                widths.append(width_out)
    return attention + [computation.itemsize * width for width in widths]


def prefetched_bytes(architecture: Architecture, computation: Computation) -> int:
    """Bytes per token that are copied back to the device during a layer's backward: the tensors
    that the layer below keeps.

    0 without offload.
    """
    if computation.offloads and architecture.layers > 1:
        return sum(checkpointed_tensors(architecture, computation))
    return 0


def offloaded_bytes(architecture: Architecture, computation: Computation, tokens: int) -> int:
    """Bytes of pinned host memory for the tensors that checkpointed layers keep; 0 without offload.

    torch rounds each pinned tensor up to a power of two.
    """
    if not computation.offloads or computation.checkpoint_every is None:
        return 0
    layers = ceil_div(architecture.layers, computation.checkpoint_every)
    return layers * sum(
        1 << (tokens * bytes_per_token - 1).bit_length()
        for bytes_per_token in checkpointed_tensors(architecture, computation)
    )


def recomputed_bytes(architecture: Architecture, computation: Computation) -> int:
    """Bytes per token that one layer saves while it is recomputed; 0 without checkpointing."""
    if computation.checkpoint_every is None:
        return 0
    saved = sum(layer_bytes(architecture, computation).values())
    # the selected tensors were kept from the first forward
    return saved - sum(_selected_tensors(architecture, computation))


def working_bytes(architecture: Architecture, computation: Computation) -> int:
    """Bytes per token that a layer's backward needs besides the saved tensors.

    They are the gradients of gate and up, the product of both if the backward recomputes it, the
    gradients of an adapter's input, those of the residual stream before and after the norm,
    messages between expert ranks, and what gradients of repeated prompts need more. The gradients
    of materialized scores count if they are more.
    """
    # The gradients of repeated prompts come when at least two tensors of the MLP's width are freed.
    freed = 2 * architecture.mlp_width * computation.itemsize
    repeated = max(0, _repeated_prompts(architecture, computation) - freed)
    if (trace := architecture.trace(computation)) is not None:
        return trace.largest("working", computation.document_length) + repeated
    remade_product = architecture.mlp_width * computation.itemsize if computation.remakes else 0
    of_mlp = (
        gate_gradient_bytes(architecture, computation)
        + remade_product
        + _adapter_gradient_bytes(architecture, computation)
    )
    # attention's backward follows when the MLP's has ended
    return (
        max(of_mlp, _score_gradient_bytes(architecture, computation))
        + 2 * architecture.hidden * computation.residual_itemsize
        + exchanged_bytes(architecture, computation)
        + repeated
    )


def gate_gradient_bytes(architecture: Architecture, computation: Computation) -> int:
    """Bytes per token that the gradients of gate's and up's outputs in the MLP need of new memory.

    models/gating.py writes one of the two over the gradient of their product, so that only the
    other takes new memory. Experts that gate by a formula of their family's own need both. Experts
    that are computed one after another need three tensors, at most of all tokens.
    """
    mixture = architecture.mixture
    if mixture is not None and computation.loops_experts:
        of_expert = 3 * mixture.intermediate * computation.itemsize
        return max(of_expert, architecture.mlp_width * computation.itemsize)
    if not _recomputes_gate(architecture, computation):
        second_width = architecture.mlp_width
    elif mixture is not None and mixture.keys.gates_itself:
        second_width = mixture.chosen * mixture.intermediate
    else:
        second_width = 0
    if computation.lora is not None and computation.lora.use_dora:
        itemsize = computation.residual_itemsize  # the magnitudes make fp32 outputs under autocast
    else:
        itemsize = computation.itemsize
    return (architecture.mlp_width + second_width) * itemsize


def _score_gradient_bytes(architecture: Architecture, computation: Computation) -> int:
    """Bytes per token of the gradients of materialized scores: in fp32, before and after softmax.

    With dropout, one of them takes the place of what dropout has saved. 0 if a kernel computes
    attention.
    """
    if not materializes_scores(architecture, computation):
        return 0
    gradients = 1 if computation.drops_attention else 2
    return gradients * FP32 * architecture.heads * computation.document_length


def _adapter_gradient_bytes(architecture: Architecture, computation: Computation) -> int:
    """Bytes per token of the gradients of an adapter's input, beside that of its layer's input.

    With dropout they are those before and after dropout; autocast makes a copy, too. The widest
    input is the MLP's product. 0 without adapters, or if adapters are fused with their layers.
    """
    lora = computation.lora
    if lora is None or computation.fuses_adapters or lora.oft_block_size is not None:
        return 0
    gradients = 2 if computation.drops_inputs or computation.autocast else 1
    return gradients * architecture.mlp_width * computation.residual_itemsize


def exchanged_bytes(architecture: Architecture, computation: Computation) -> int:
    """Bytes per token of the hidden states that a rank sends to the ranks with the chosen experts,
    and of those that it receives.

    Both are counted once for each expert of a token. A rank whose experts the router prefers
    receives more than that. 0 without expert parallelism.
    """
    if architecture.mixture is None or computation.expert_ranks == 1:
        return 0
    return 2 * architecture.mixture.chosen * architecture.hidden * computation.itemsize


def evaluation_bytes(
    architecture: Architecture, computation: Computation, *, counts_scores: bool = True
) -> int:
    """Bytes per token of a forward that saves nothing for a backward, where it needs the most.

    They are those of the MLP, or what attention makes if that is more, four of the residual
    stream's (the embeddings, the layer's input, the stream after attention, and its norm), and
    messages between expert ranks.

    counts_scores: False where the caller counts scores and masks, as for a cache that is filled.
    """
    if (trace := architecture.trace(computation)) is not None:
        # A trace does not count what a layer is given: its input, and masks. The embeddings, from
        # which the first layer's input was made, are there as well.
        given = 2 * architecture.hidden * computation.residual_itemsize
        if counts_scores:
            given += _row_mask_bytes(architecture, computation)
        return given + trace.largest("forward", computation.document_length)
    # while the queries are rotated: before, after, and two between; and keys and values
    rotated_width = 4 * architecture.query_width + 2 * architecture.key_value_width
    of_mlp = max(
        architecture.mlp_width * _evaluated_gate_bytes(computation),
        _evaluated_expert_bytes(architecture, computation),
    )
    of_part = rotated_width * computation.residual_itemsize
    if counts_scores:
        of_mlp += _held_score_bytes(architecture, computation)
        of_part = max(of_part, _evaluated_attention_bytes(architecture, computation))
    of_part = max(of_part, of_mlp)
    return (
        of_part
        + 4 * architecture.hidden * computation.residual_itemsize
        + exchanged_bytes(architecture, computation)
    )


def _evaluated_gate_bytes(computation: Computation) -> int:
    """Bytes per feature of the MLP's width in evaluation: gate, up and their product.

    Beside the gate, an adapter that is not fused with up holds the base's output, its own, and
    their sum. DoRA's magnitudes, which are fp32 under autocast, multiply both outputs.
    """
    lora = computation.lora
    if lora is None or computation.fuses_adapters or lora.oft_block_size is not None:
        return 3 * computation.itemsize
    if lora.use_dora:
        return 4 * computation.residual_itemsize + 2 * computation.itemsize
    return 4 * computation.itemsize


def _evaluated_expert_bytes(architecture: Architecture, computation: Computation) -> int:
    """Bytes per token of routed experts in evaluation, with their inputs and outputs of the hidden
    state's width; 0 without experts. Computed one after another, an expert has at most all tokens.
    """
    mixture = architecture.mixture
    if mixture is None:
        return 0
    hidden = architecture.hidden
    intermediate = mixture.intermediate
    if computation.loops_experts:
        width = 4 * hidden + 4 * intermediate
    else:
        width = mixture.chosen * max(2 * hidden, hidden + 2 * intermediate)
    return width * computation.itemsize


def _row_mask_bytes(architecture: Architecture, computation: Computation) -> int:
    """Bytes per token of the masks that transformers makes of a row: for SDPA of bools, for eager
    attention of numbers that are added to the scores.
    """
    if computation.attention not in MASKED:
        return 0
    masks = 1 if architecture.facts.window is None else MASK_KINDS
    itemsize = computation.residual_itemsize if computation.attention == "eager" else 1
    return masks * itemsize * computation.document_length


def _held_score_bytes(architecture: Architecture, computation: Computation) -> int:
    """Bytes per token of scores and masks during the MLP of an evaluation: transformers' decoder
    layer holds what its eager attention has returned, the softmax of its scores.
    """
    masks = _row_mask_bytes(architecture, computation)
    if computation.attention != "eager":
        return masks
    return masks + computation.itemsize * architecture.heads * computation.document_length


def _evaluated_attention_bytes(architecture: Architecture, computation: Computation) -> int:
    """Bytes per token of attention in evaluation, when it makes its output.

    They are the query, the key and the value, their copies that the kernel reads, and either the
    outputs of documents with what they are joined to, or three fp32 tensors of scores [tokens,
    tokens]: before softmax, after it, and between. A mask is there as bools, too.
    """
    computation = replace(computation, drops_attention=False)
    itemsize = _kernel_itemsize(computation)
    query = architecture.query_width
    key = architecture.key_value_width
    inputs = (query + key) * computation.residual_itemsize + key * computation.itemsize
    if architecture.family.fused:  # the value is a view of the output of the fused projection
        inputs += (query + key) * computation.itemsize
    keys_and_values = _keys_and_values_width(architecture, computation)
    if itemsize > computation.itemsize:
        inputs += itemsize * (query + keys_and_values)
    elif keys_and_values > 2 * key:  # repeated for each query head
        inputs += itemsize * keys_and_values
    if materializes_scores(architecture, computation):
        if computation.attention == "eager" and computation.itemsize == FP32:
            # before softmax and after; with sinks also joined with them, and less the largest
            scores = 4 if architecture.family.sinks else 2
        else:
            scores = 3
        masks = _row_mask_bytes(architecture, computation)
        return inputs + masks + scores * FP32 * architecture.heads * computation.document_length
    outputs = 2 if copies_attention_output(architecture, computation) else 1
    made = outputs * itemsize * query
    if _masks_scores(architecture, computation):
        made += (1 + itemsize) * computation.document_length
    return inputs + made


def _norm(
    width: int,
    architecture: Architecture,
    computation: Computation,
    *,
    itemsize: int | None = None,
    heads: int = 1,
) -> int:
    """Bytes per token that an RMSNorm over `width` features saves. The norm computes in fp32.

    It saves its input and the reciprocal root, both in fp32. If its weight is trained, which it is
    not under LoRA, it saves the normalized input too: in fp32 if the family multiplies the weight
    in fp32, as Gemma does.

    Args:
        width: Features of a token.
        architecture: The model.
        computation: The settings of the forward.
        itemsize: Bytes of one element of the input; None: the input is the residual stream.
        heads: Reciprocal roots of a token: several if each head is normalized by itself.
    """
    input_itemsize = itemsize or computation.residual_itemsize
    roots = FP32 * heads
    if computation.remakes:  # only the roots and the input, which is not cast, are saved
        return input_itemsize * width + roots
    if computation.lora is not None:
        normalized = 0
    elif architecture.family.norm_keeps_fp32:
        normalized = FP32 * width
    else:
        normalized = input_itemsize * width
    return FP32 * width + roots + normalized


def _norms(architecture: Architecture, mixture: Mixture | None, computation: Computation) -> int:
    """Bytes per token that a layer's norms save, and of the saved inputs of attention and MLP."""
    total = len(architecture.family.norms) * _norm(architecture.hidden, architecture, computation)
    total += _block_inputs(architecture, mixture, computation)
    if (
        mixture is not None
        and mixture.keys.routes_in_fp32
        and computation.lora is None
        and computation.residual_itemsize < FP32
    ):
        total += FP32 * architecture.hidden  # the router's own copy of its input
    return total


def _block_inputs(
    architecture: Architecture, mixture: Mixture | None, computation: Computation
) -> int:
    """Bytes per token of the saved inputs of attention and MLP.

    Each input is a norm's output; in families whose norms come after attention and MLP
    (`norm_after`), it is the residual stream.
    """
    compute_input = architecture.hidden * computation.itemsize  # one input in the compute dtype
    if computation.remakes:  # the backward recomputes a norm's output, but not the residual stream
        return 2 * compute_input if architecture.family.norm_after else 0
    if computation.drops_inputs:
        return 0
    if computation.fuses_adapters:
        return 2 * architecture.hidden * computation.residual_itemsize
    if computation.autocast and not architecture.family.fused:
        # Each linear layer that reads the fp32 input saves a cast copy of its own. Attention's are
        # q, k and v; in latent attention, the first layer to the queries and that to the latent.
        attention_readers = 3 if architecture.latent is None else 2
        return (attention_readers + _count_readers(mixture)) * compute_input
    return 2 * compute_input


def _count_readers(mixture: Mixture | None) -> int:
    """Counts the linear layers that read the MLP's input.

    In a dense layer they are gate and up. In a mixture they are the router and, with a shared
    expert, that expert's gate and up and, in some families, the layer that weighs its output.
    """
    if mixture is None:
        return 2
    if not mixture.shared:
        return 1
    weighs_shared_output = mixture.keys.shared is not None  # see `Mixture.shared_linears`
    return 4 if weighs_shared_output else 3


def _attention(architecture: Architecture, computation: Computation) -> int:
    """Bytes per token that attention saves between its projections."""
    total = _attention_kernel(architecture, computation)
    # The output projection saves its input. That is a tensor of its own if it is concatenated from
    # the outputs of documents, or from the heads of other ranks; else it is the kernel's output.
    if (
        copies_attention_output(architecture, computation) or computation.sequence_ranks > 1
    ) and not computation.drops_inputs:
        if architecture.latent is None:
            output_width = architecture.query_width
        else:
            output_width = architecture.heads * architecture.latent.value
        total += computation.itemsize * output_width
    if architecture.latent is not None:
        total += _latents(architecture, architecture.latent, computation)
    if architecture.query_key_norm:
        total += _query_key_norms(architecture, computation)
    if architecture.family.fused and _kernel_itemsize(computation) == computation.itemsize:
        # The saved value is a view of the fused projection's output. Without a cast it keeps all of
        # that output in memory: query and key before their rotation, too.
        total += computation.itemsize * (architecture.query_width + architecture.key_value_width)
    return total


def _attention_kernel(architecture: Architecture, computation: Computation) -> int:
    """Bytes per token that the attention kernel saves.

    They are query, keys, values, output and log-sum-exp; without a kernel, the scores instead of
    the last two.
    """
    itemsize = _kernel_itemsize(computation)
    output_width = architecture.query_width
    if architecture.latent is not None and computation.cpu:
        output_width = architecture.heads * architecture.latent.value
    total = itemsize * (
        architecture.query_width + _keys_and_values_width(architecture, computation)
    )
    # torch's CPU kernel needs one head size for queries and values.
    if materializes_scores(architecture, computation) or output_width != architecture.query_width:
        scores = architecture.heads * computation.document_length
        total += scores * _score_bytes(architecture, computation)
    else:
        total += itemsize * output_width + FP32 * architecture.heads
    # the sinks' share of the softmax's sum, and the output before the sinks take that share
    if architecture.family.sinks and attends_in_blocks(architecture, computation):
        total += FP32 * architecture.heads + computation.itemsize * architecture.query_width
    if _masks_scores(architecture, computation):
        total += itemsize * computation.document_length
    return total


def _masks_scores(architecture: Architecture, computation: Computation) -> bool:
    """Whether a layer saves a mask [tokens, tokens] of each document, which is added to the scores.

    A layer with a sliding window does if attention runs by document. All layers are counted as if
    they had that window. In transformers' own attention each layer does.
    """
    if computation.masks_images or computation.attention in MASKED:
        return True
    window = architecture.facts.window
    has_window = window is not None and window < computation.document_length
    return (
        copies_attention_output(architecture, computation)
        and (has_window or computation.masks_padding)
        and not materializes_scores(architecture, computation)
    )


def _kernel_itemsize(computation: Computation) -> int:
    """Bytes of one element in attention: on a CPU the kernel computes in fp32."""
    return max(computation.itemsize, FP32) if computation.cpu else computation.itemsize


def _keys_and_values_width(architecture: Architecture, computation: Computation) -> int:
    """The width of keys and values together that the kernel reads on one rank.

    It is counted for each token that the rank has of a row: under sequence parallelism a rank reads
    more tokens, of fewer heads.
    """
    if computation.attention in MASKED or materializes_scores(architecture, computation):
        is_grouped = False
    elif copies_attention_output(architecture, computation):
        # A GPU's SDPA gets keys repeated, except in half precision without windows and images.
        is_grouped = computation.cpu
    else:
        is_grouped = computation.grouped_attention or attends_in_blocks(architecture, computation)
    ranks = computation.sequence_ranks
    key_value_heads = architecture.key_value_heads
    repeats = 1
    if architecture.latent is not None:
        # a key for each head, and narrower values, which are padded for a GPU's kernel
        if computation.cpu:
            values = architecture.heads * architecture.latent.value
        else:
            values = architecture.query_width
        width = architecture.query_width + values
    elif is_grouped:
        width = 2 * architecture.key_value_width
        # Ranks that trade tokens for heads repeat the key-value heads until each rank has as many.
        repeats = math.lcm(key_value_heads, ranks) // key_value_heads
    else:  # a key and a value for each query head
        width = 2 * architecture.query_width
    if divides_heads(architecture.heads, ranks):
        return width * repeats
    return width * ranks  # no trade: each rank gathers the keys and values of the whole row


def _repeated_prompts(architecture: Architecture, computation: Computation) -> int:
    """Bytes per token of a layer's keys and values of shared prompts, which are repeated for each
    completion that shares the prompt (models/attention_kernels.py).
    """
    width = _keys_and_values_width(architecture, computation)
    return round(computation.repeated_prompts * width * _kernel_itemsize(computation))


def _query_key_norms(architecture: Architecture, computation: Computation) -> int:
    """Bytes per token that the norms of queries and keys save."""
    by_head = architecture.family.query_key_norm == "head"
    query = _norm(
        architecture.query_width,
        architecture,
        computation,
        itemsize=computation.itemsize,
        heads=architecture.heads if by_head else 1,
    )
    key = _norm(
        architecture.key_value_width,
        architecture,
        computation,
        itemsize=computation.itemsize,
        heads=architecture.key_value_heads if by_head else 1,
    )
    return query + key


def _score_bytes(architecture: Architecture, computation: Computation) -> int:
    """Bytes that are saved for one materialized score.

    They are its tanh, if scores are capped, its fp32 softmax, and the softmax in attention's dtype,
    if that is smaller. Dropout saves its mask, and what it leaves of the softmax.
    """
    itemsize = _kernel_itemsize(computation)
    tanh = itemsize if architecture.family.caps_scores else 0
    cast = itemsize if itemsize < FP32 else 0
    dropout = 0
    if computation.drops_attention:
        dropout = itemsize + (itemsize if computation.cpu else 1)
    return tanh + FP32 + cast + dropout


def _latents(architecture: Architecture, latent: LatentAttention, computation: Computation) -> int:
    """Bytes per token that the norms of the latents save, and of the norms' outputs, which the
    linear layers that read them save.
    """
    widths = [width for width in (latent.query_rank, latent.key_value_rank) if width is not None]
    outputs = 0 if computation.drops_inputs else computation.itemsize * sum(widths)
    norms = sum(
        _norm(width, architecture, computation, itemsize=computation.itemsize) for width in widths
    )
    total = outputs + norms
    if computation.cpu and computation.itemsize == FP32:
        # The saved value is a view of the projection's output, which also has the plain part of the
        # keys.
        total += FP32 * architecture.heads * latent.plain
    return total


def _mlp(architecture: Architecture, mixture: Mixture | None, computation: Computation) -> int:
    """Bytes per token that the MLP, down(act(gate) * up), or the experts of a mixture save.

    An MLP saves gate, up, their product, and act(gate) unless the backward recomputes that.
    """
    saved_tensors = 3 if _recomputes_gate(architecture, computation) else 4
    if computation.remakes:  # gate and up; the backward recomputes the product as well
        saved_tensors = 2
    elif computation.drops_inputs:  # not the product, which is down's input
        saved_tensors -= 1
    if mixture is None:
        return saved_tensors * architecture.intermediate * computation.itemsize
    shared = saved_tensors * mixture.shared * computation.itemsize
    return shared + _experts(architecture, mixture, computation)


def _recomputes_gate(architecture: Architecture, computation: Computation) -> bool:
    """Whether the backward recomputes act(gate), in memory that is allocated already
    (models/gating.py).
    """
    return not computation.compiled and architecture.activation in GATED_BY


def _experts(architecture: Architecture, mixture: Mixture, computation: Computation) -> int:
    """Bytes per token that the routed experts and their router save.

    Each expert of the token saves its gathered input, the tensors of its gating, the product, its
    output, which the router's weight multiplies, and the token's indexes. A frozen expert does not
    save the inputs of its matmuls. The router saves logits, and probabilities in fp32.
    """
    inputs, products = _count_expert_inputs(computation)
    gate_tensors = mixture.keys.gate_tensors
    has_formula = mixture.keys.gates_itself or computation.loops_experts
    if _recomputes_gate(architecture, computation) and not has_formula:
        gate_tensors -= 1
    hidden_tensors = inputs + 1  # 1: the output
    elements = hidden_tensors * architecture.hidden
    elements += (products + gate_tensors) * mixture.intermediate
    for weights in architecture.experts(architecture.widest_layer):
        _, padded_rank = expert_adapter_rank(weights.name, computation)
        elements += padded_rank  # the output of A
    of_chosen = mixture.chosen * (computation.itemsize * elements + PLACES)
    of_router = mixture.experts * (computation.itemsize + FP32)
    return of_chosen + of_router


def expert_adapter_rank(name: str, computation: Computation) -> tuple[int, int]:
    """The LoRA rank of the adapter on the experts' parameter `name`, and the rank padded for
    grouped matmuls; (0, 0) without an adapter.
    """
    if computation.lora is None or not is_parameter_named(
        name, computation.lora.lora_target_parameters
    ):
        return 0, 0
    rank = find_value(name, computation.lora.rank_pattern, computation.lora.lora_r)
    return rank, round_up(rank, EXPERT_RANK_MULTIPLE)


def _count_expert_inputs(computation: Computation) -> tuple[int, int]:
    """Counts the inputs that an expert saves: (of gate and up, of down), each 1 or 0.

    An input is saved if its weight or an adapter on that weight gets a gradient.
    """
    if computation.lora is None:
        return 1, 1
    targets = computation.lora.lora_target_parameters
    gate_up = any(target.endswith("gate_up_proj") for target in targets)
    down = any(target.endswith("down_proj") for target in targets)
    return int(gate_up), int(down)


def _adapters(architecture: Architecture, layer: int, computation: Computation) -> int:
    """Bytes per token that the adapters of decoder layer `layer` save; 0 without adapters.

    LoRA saves the outputs of A and, with dropout, the inputs after dropout and the dropout's masks.
    DoRA saves the outputs of base layer and adapter too, because magnitudes multiply them. OFT
    saves only the inputs that it rotates.
    """
    lora = computation.lora
    if lora is None:
        return 0
    adapted = [linear for linear in architecture.linears(layer) if is_adapted(linear, lora)]
    if lora.oft_block_size is not None:
        itemsize = FP32 if computation.autocast else computation.itemsize  # of the rotations
        return sum(linear.shape[1] * itemsize for linear in adapted)
    dropout = 0  # bytes per input feature
    if computation.drops_inputs:
        # Under autocast peft casts the input to the adapter's fp32 before dropout. What is saved of
        # the result is a copy that autocast casts back.
        mask = computation.residual_itemsize if computation.cpu else 1
        dropout = computation.itemsize + mask
    total = 0
    for linear in adapted:
        width_out, width_in = linear.shape
        rank = _largest_rank(linear.name, architecture, lora)
        total += rank * computation.itemsize + width_in * dropout
        if lora.use_dora:
            total += 2 * width_out * computation.itemsize
    return total


def _largest_rank(linear: str, architecture: Architecture, lora: Lora) -> int:
    """The largest LoRA rank that `rank_pattern` gives a linear layer in any decoder layer.

    `linear`: the name of its weight in one of the decoder layers.
    """
    trunk, _, index_and_rest = linear.removesuffix(".weight").partition(".layers.")
    _, _, name_in_layer = index_and_rest.partition(".")
    layers = architecture.layers if lora.rank_pattern else 1  # without patterns all are alike
    names = (f"{trunk}.layers.{layer}.{name_in_layer}" for layer in range(layers))
    return max(find_value(name, lora.rank_pattern, lora.lora_r) for name in names)
