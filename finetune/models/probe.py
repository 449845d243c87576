"""Before the first step: does the training forward compute what transformers' own does, for each document by itself?

Families differ in ways that no config names: layers that drop `cu_seq_lens` on its way to attention, attention of their
own, states that run from one document into the next, logits that are scaled. So two forwards over a few tokens are
compared instead, of the loaded and sharded model itself.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from finetune.constants import IGNORE_INDEX
from finetune.distributed.parallelize import unwrap
from finetune.distributed.world import World
from finetune.errors import UserError
from finetune.recipe.schema import Data, Model

TOKENS, BEFORE, AGAIN = 8, 5, 6  # of a document, of another after it, and of the first one's beginning once more
# The largest relative differences that rounding explains. What they look for is of the order of 1: a document that sees
# another differs by 1.0 to 1.4 in every family tried.
WITHIN_A_BATCH = {"no": 1e-3, "bf16": 0.02, "fp16": 0.02}  # of a token's hidden state: the same kernels, the same sums
BETWEEN_FORWARDS = {"no": 1e-3, "bf16": 0.3, "fp16": 0.3}  # of a token's hidden state, by two kernels
OF_THE_LOSS = {"no": 1e-3, "bf16": 0.05, "fp16": 0.05}


def refuse_unsound(model: nn.Module, recipe: Model, data: Data, world: World) -> None:
    """Raises `UserError` where the model, ready to train, would be trained on something else than `data` says.

    Every rank calls it. No parameter, gradient or random state is changed.
    """
    plain: Any = unwrap(model)
    if data.packing:
        _refuse_length_dependent_rope(plain.config, data.max_length)
    name = type(plain).__name__.removeprefix("FSDP")  # FSDP2 changes the class
    rows = "packed documents" if data.packing else "padded rows"
    advice = "set packing: false" if data.packing else "name another model"
    ids = (torch.arange(TOKENS + BEFORE, device=world.device) * 7919 + 11) % plain.config.get_text_config().vocab_size
    document = ids[:TOKENS][None]
    with _evaluated(model, recipe.torch_compile):
        try:
            own, logits = _forward(model, input_ids=document, attention_mask=torch.ones_like(document), use_cache=False)
            labels = logits[0].float().argmax(-1)  # where the loss depends most on a scale of the logits
            ours, loss = _forward(model, **_batch(ids, labels, packed=data.packing))
        except (UserError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            said = " ".join(str(error).split()) or type(error).__name__
            if recipe.attn_implementation == "auto":
                advice = "set packing: false and attn_implementation: eager"
            raise UserError(f"{name} cannot be trained on {rows} ({type(error).__name__}: {said}); {advice}") from error
    true_loss = F.cross_entropy(logits[0].float(), labels, reduction="sum")
    first, again = _twice(ours, packed=data.packing)
    if not all(torch.isfinite(each).all() for each in (own, first, again, loss)):
        raise UserError(f"{name}: its outputs are not finite before the first step, on {rows}; check its weights")
    precision = world.sharding.mixed_precision
    if _difference(again, first[:AGAIN]) > WITHIN_A_BATCH[precision]:
        raise UserError(
            f"{name}: a document's outputs change with what stands around it in {rows}: its layers do not keep documents "
            f"apart; {advice}"
        )
    is_other_loss = abs(loss - true_loss) > OF_THE_LOSS[precision] * true_loss.clamp_min(1.0)
    if is_other_loss or _difference(first, own[0]) > BETWEEN_FORWARDS[precision]:
        raise UserError(
            f"{name}: the training forward does not compute what the model's own forward does (loss {float(loss):.4g}, and "
            f"{float(true_loss):.4g} by transformers); this family is not supported: name another model"
        )


def _refuse_length_dependent_rope(config: Any, max_length: int) -> None:
    """longrope and dynamic RoPE choose their frequencies by the largest position in the batch, for all documents in it."""
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [each for each in parameters.values() if isinstance(each, dict)]
    for rope in by_layer_type or [parameters]:
        if rope.get("rope_type") not in ("longrope", "dynamic"):
            continue
        original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        if max_length > original:
            raise UserError(
                f"max_length: {max_length}: {rope['rope_type']} RoPE changes its frequencies beyond {original} tokens, by the "
                f"longest document in a row and for all of them; set packing: false, or max_length: {original} at most"
            )


def _batch(ids: Tensor, labels: Tensor, *, packed: bool) -> dict[str, Any]:
    """The first TOKENS of `ids`, which `labels` belong to, and their first AGAIN once more: behind BEFORE other tokens in
    one packed row, or in a second row that is filled up with others."""
    lengths = (TOKENS, BEFORE, AGAIN) if packed else (TOKENS, TOKENS)
    row = torch.cat([ids, ids[:AGAIN]]) if packed else torch.cat([ids[:TOKENS], ids[:AGAIN], ids[-(TOKENS - AGAIN) :]])
    rows = (1, -1) if packed else (2, TOKENS)
    batch = {
        "input_ids": row.view(rows),
        "labels": F.pad(labels, (0, len(row) - TOKENS), value=IGNORE_INDEX).view(rows),
        "position_ids": torch.cat([torch.arange(length, device=ids.device) for length in lengths]).view(rows),
        "trained_positions": torch.arange(TOKENS, device=ids.device),
    }
    if not packed:
        return batch
    boundaries = torch.tensor(lengths, device=ids.device).cumsum(0).to(torch.int32)
    return batch | {"cu_seq_lens": F.pad(boundaries, (1, 0)), "max_document_length": TOKENS}


def _twice(hidden: Tensor, *, packed: bool) -> tuple[Tensor, Tensor]:
    """Of the output for `_batch`, the document's and that of its beginning once more: [TOKENS, ...] and [AGAIN, ...]."""
    return hidden[0, :TOKENS], hidden[0, -AGAIN:] if packed else hidden[1, :AGAIN]


def _forward(model: nn.Module, **inputs: Any) -> tuple[Tensor, Tensor]:
    """What comes into the output head, [rows, tokens, hidden], and the logits, or with labels the loss."""
    plain: Any = unwrap(model)
    hidden: list[Tensor] = []
    hook = plain.get_output_embeddings().register_forward_pre_hook(lambda _, args: hidden.append(args[0].detach()))
    try:
        result = model(**inputs)
    finally:
        hook.remove()
    return hidden[0], result if isinstance(result, Tensor) else result.logits


def _difference(found: Tensor, truth: Tensor) -> float:
    """The largest relative difference of a token's vector."""
    found, truth = found.float(), truth.float()
    norms = truth.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    return float(((found - truth).norm(dim=-1) / norms).max())


@contextmanager
def _evaluated(model: nn.Module, compiled: bool) -> Iterator[None]:
    """Without dropout and gradients, and eager: graphs for these sizes would be of no use."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager") if compiled else nullcontext():
            yield
    finally:
        model.train(training)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # the last unit stays gathered until a backward, which does not follow
