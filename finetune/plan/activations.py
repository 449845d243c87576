"""Bytes per token that the forward saves for the backward: every tensor that autograd saves, by operation.

Counted from the forward of transformers' models and tested against torch's saved tensors and allocations
(tests/plan/test_activations.py). Korthikanti et al. 2022 (section 4) count the same way for GPT.
"""

from dataclasses import dataclass

from finetune.constants import loss_chunk_tokens
from finetune.plan.architecture import Architecture, Mixture
from finetune.plan.state import FP32, is_adapted
from finetune.recipe.module_patterns import find_value
from finetune.recipe.schema import Lora

TOKEN_ID = 8  # bytes of an int64
PLACES = (
    5 * TOKEN_ID
)  # of a token at one of its experts: which token, which of its choices, and how often each is saved


@dataclass(frozen=True, slots=True, kw_only=True)
class Computation:
    """How a forward runs, as far as its memory depends on it."""

    itemsize: int  # bytes of the compute dtype
    autocast: bool = (
        False  # fp32 parameters and residual stream, cast at each matmul (DDP, single); else parameters are
    )
    checkpoint_every: int | None = None  # every k-th decoder layer is recomputed; None: no layer
    lora: Lora | None = None
    document_length: int = 0  # tokens; matters where the scores [tokens, tokens] are materialized
    cpu: bool = False  # attention runs document by document, and its outputs are concatenated
    grouped_attention: bool = True  # the kernel accepts fewer key-value heads than query heads (torch 2.12 and later)

    @property
    def drops_inputs(self) -> bool:
        """Whether only the output of the adapter's dropout is saved, not the frozen layer's input."""
        return self.lora is not None and self.lora.lora_dropout > 0

    @property
    def residual_itemsize(self) -> int:
        """Bytes of a number of the residual stream."""
        return FP32 if self.autocast else self.itemsize


def layer_bytes(a: Architecture, run: Computation) -> dict[str, int]:
    """Bytes per token that one decoder layer saves, by module."""
    return {
        "norms": _norms(a, run),
        "attention": _attention(a, run),
        "mlp": _mlp(a, run),
        "adapters": _adapters(a, run),
    }


def kept_bytes(a: Architecture, run: Computation) -> dict[str, int]:
    """Bytes per token that the model without its head saves between forward and backward."""
    layer = sum(layer_bytes(a, run).values())
    every = run.checkpoint_every
    recomputed = 0 if every is None else -(-a.layers // every)
    rotary = 2 * a.head_size * run.residual_itemsize
    final_norm = _norm(a.hidden, a, run) + a.hidden * run.residual_itemsize
    return {
        "layers": (a.layers - recomputed) * layer,
        "checkpoints": recomputed * a.hidden * run.residual_itemsize,
        "ends": TOKEN_ID + rotary + final_norm,
    }


def recomputed_bytes(a: Architecture, run: Computation) -> int:
    """Bytes per token of the one layer that is being recomputed; 0 without checkpointing."""
    return sum(layer_bytes(a, run).values()) if run.checkpoint_every is not None else 0


def working_bytes(a: Architecture, run: Computation) -> int:
    """Bytes per token that a layer's backward needs beyond what was saved: the gradients of the MLP's gate and up, and
    the gradient of the residual stream twice (before and after the norm)."""
    return 2 * a.mlp_width * run.itemsize + 2 * a.hidden * run.residual_itemsize


def evaluation_bytes(a: Architecture, run: Computation) -> int:
    """Bytes per token of a forward that saves nothing: the MLP at its widest, and the residual stream."""
    return 3 * a.mlp_width * run.itemsize + 3 * a.hidden * run.residual_itemsize


def loss_chunk_bytes(vocabulary: int, tokens: int, run: Computation) -> int:
    """Bytes of the chunk of logits that the loss works on: scores, fp32 log-probabilities, their gradient cast back."""
    chunks = max(-(-tokens // loss_chunk_tokens(vocabulary, "cpu" if run.cpu else "cuda")), 1)
    casts = 0 if run.itemsize == FP32 else FP32 if run.cpu else run.itemsize  # a CPU's softmax casts its input first
    return -(-tokens // chunks) * vocabulary * (run.itemsize + FP32 + casts)


def _norm(width: int, a: Architecture, run: Computation, *, itemsize: int | None = None, heads: int = 1) -> int:
    """RMSNorm works in fp32: it saves its input in fp32 (the residual itself where that is fp32), the reciprocal root,
    and the normalized input if the weight is trained (in fp32 if the weight is multiplied in fp32, as in Gemma)."""
    normalized = FP32 if a.family.norm_keeps_fp32 else itemsize or run.residual_itemsize
    return FP32 * width + FP32 * heads + (normalized * width if run.lora is None else 0)


def _norms(a: Architecture, run: Computation) -> int:
    # The inputs of attention and MLP: the norms' outputs or, where norms come after, the residual stream. Autocast
    # casts an fp32 input separately for each of q, k, v, gate and up; in a mixture the router, and the shared expert with
    # its own gate, stand for the last two.
    readers = 2 if a.mixture is None else 4 if a.mixture.shared else 1
    inputs = 0 if run.drops_inputs else 3 + readers if run.autocast and not a.family.fused else 2
    return len(a.family.norms) * _norm(a.hidden, a, run) + inputs * a.hidden * run.itemsize


def _attention(a: Architecture, run: Computation) -> int:
    query, key_value, size = a.query_width, a.key_value_width, run.itemsize
    inside = max(size, FP32) if run.cpu else size  # of the scores: on a CPU the kernel works in fp32
    attended = query + 2 * (key_value if run.grouped_attention else query)
    total = inside * (attended + query) + FP32 * a.heads
    if run.cpu and not run.drops_inputs:
        total += size * query  # the concatenated documents, the input of the output projection
    if a.family.query_key_norm is not None:
        by_head = a.family.query_key_norm == "head"
        total += _norm(query, a, run, itemsize=size, heads=a.heads if by_head else 1)
        total += _norm(key_value, a, run, itemsize=size, heads=a.key_value_heads if by_head else 1)
    if a.family.caps_scores:  # key and value repeated for each head; tanh, softmax in fp32, and its cast
        total += 2 * inside * (query - key_value) + a.heads * run.document_length * (
            inside + FP32 + (inside if inside < FP32 else 0)
        )
        total -= FP32 * a.heads  # the log-sum-exp of a fused kernel
    if a.family.fused and inside == size:
        total += size * (query + key_value)  # value is a view of the whole fused output, which no cast frees
    return total


def _mlp(a: Architecture, run: Computation) -> int:
    """down(act(gate) * up): gate, act(gate), up, and their product."""
    saved = 3 if run.drops_inputs else 4
    if a.mixture is None:
        return saved * a.intermediate * run.itemsize
    return saved * a.mixture.shared * run.itemsize + _experts(a, a.mixture, run)


def _experts(a: Architecture, mixture: Mixture, run: Computation) -> int:
    """For each expert of a token: its input, gathered; the same four; its output, which the router weighs; and where it
    belongs. A frozen expert does not save what it multiplies. The router: logits, and probabilities in fp32."""
    trained = run.lora is None
    states = (2 if trained else 1) * a.hidden + (4 if trained else 3) * mixture.intermediate
    return mixture.chosen * (states * run.itemsize + PLACES) + mixture.experts * (run.itemsize + FP32)


def _adapters(a: Architecture, run: Computation) -> int:
    """What lies between A and B; with dropout also the dropped input and its mask, for each adapted layer."""
    if run.lora is None:
        return 0
    adapted = [linear for linear in a.linears(a.widest_layer) if is_adapted(linear, run.lora)]
    dropped = run.itemsize + (run.itemsize if run.cpu else 1) if run.drops_inputs else 0
    return sum(_largest_rank(linear.name, a, run.lora) * run.itemsize + linear.shape[1] * dropped for linear in adapted)


def _largest_rank(linear: str, a: Architecture, lora: Lora) -> int:
    """The largest rank that rank_pattern gives the linear layer of this name (in layer 0) in any layer."""
    name = linear.removesuffix(".weight")
    names = (name.replace(".layers.0.", f".layers.{layer}.") for layer in range(a.layers if lora.rank_pattern else 1))
    return max(find_value(name, lora.rank_pattern, lora.lora_r) for name in names)
