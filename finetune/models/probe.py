"""A check before the first step: the training forward computes what transformers' does, document by
document.

Families differ in ways that no config names: layers drop `cu_seq_lens` on its way to attention,
have an attention of their own, carry states from one document into the next, or scale the logits.
So two forwards of the loaded and sharded model over a few tokens are compared: the training forward
and transformers' own.

How far the two may differ depends on the model and the precision, so the bounds are measured as
well: transformers' forward takes the documents as one text, which shows how much a leak between
documents changes the outputs.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from finetune.config.schema import Data, Model
from finetune.constants import COMPUTE_DTYPE, IGNORE_INDEX, ceil_div
from finetune.distributed.model_parts import has_scores, head_of, unwrap
from finetune.distributed.parallelize import reshard
from finetune.distributed.sequence_parallel import gather_tokens
from finetune.distributed.world import World
from finetune.errors import UserError, on_one_line
from finetune.models.documents import recurrent_modules

# A text is three documents. Their lengths in tokens:
DOCUMENT = 8
OTHER = 5
REPEATED = 6  # the third, which repeats the beginning of the first
PART = DOCUMENT + OTHER + 2  # tokens of each rank where sequence parallelism divides the packed row
# The first id of each text that is tried. The check passes if one text passes, since a fault shows
# in every text. In 16 bits rounding alone can make a text fail: it sends a token to another expert
# where two experts have nearly the same score.
FIRST_IDS = (11, 12, 13)
# How far rounding may move a token's output, as a share of how far a leak between documents moves
# it. LEAK_SHARE is for the third document against the first, both in the training forward;
# FORWARD_SHARE is for the training forward against transformers'.
LEAK_SHARE = {torch.float32: 0.01, torch.bfloat16: 0.25, torch.float16: 0.25}
FORWARD_SHARE = {torch.float32: 0.02, torch.bfloat16: 0.5, torch.float16: 0.5}


class ForwardOutput(NamedTuple):
    """The outputs of one forward, without gradients."""

    hidden: Tensor  # [rows, tokens, hidden], the input of the output head
    result: Tensor  # logits [rows, tokens, vocabulary]; with labels the summed loss, 0-dim fp32


def check_training_forward(model: nn.Module, recipe: Model, data: Data, world: World) -> None:
    """Checks that the training forward of `model` computes for each document what transformers
    computes for that document alone.

    Every rank calls it. Each text that is tried costs two forwards over 19 tokens. No parameter,
    gradient or random state changes.

    Raises:
        UserError: The outputs differ in every text that is tried, or a forward fails.
    """
    plain: Any = unwrap(model)
    name = type(plain).__name__.removeprefix("FSDP")  # FSDP2 changes the class
    vocabulary = plain.config.get_text_config().vocab_size
    dtype = getattr(torch, COMPUTE_DTYPE[world.sharding.mixed_precision])
    if dtype == torch.float32:
        dtype = getattr(torch, recipe.dtype)
    problems: list[str] = []
    for start in FIRST_IDS[:1] if dtype == torch.float32 else FIRST_IDS:
        ids = (torch.arange(DOCUMENT + OTHER, device=world.device) * 7919 + start) % vocabulary
        reference, trained, labels = _run_both_forwards(model, ids, name, recipe, data, world)
        problem = _find_difference(reference, trained, labels, dtype, data, recipe)
        # of all ranks, so that all try the next text, or none does
        problems = [each for each in world.gather(problem) if each]
        if not problems:
            return
    raise UserError(f"{name}: {problems[0]}")


def _run_both_forwards(
    model: nn.Module, ids: Tensor, name: str, recipe: Model, data: Data, world: World
) -> tuple[ForwardOutput, ForwardOutput, Tensor]:
    """Runs transformers' forward over the three documents as one text, and the training forward
    over the batch that `_lay_out` makes of them.

    Args:
        model: As it will be trained, sharded or not.
        ids: int64[DOCUMENT + OTHER], the first document and the second.
        name: The model's class, for messages.
        recipe: The recipe's keys of the model.
        data: Whether documents are packed.
        world: The ranks of the run.

    Returns:
        (transformers' outputs, those of the training forward, the labels of the first document
        int64[DOCUMENT]).

    Raises:
        UserError: A forward fails, its outputs are not finite, or its head reads several vectors of
            a token.
    """
    rows = _describe_rows(data)
    text = torch.cat([ids, ids[:REPEATED]])[None]
    try:
        with _evaluated(model, recipe.torch_compile), without_rounding(model):
            # With a mask of ones, all three documents are one text to transformers.
            reference = _run_forward(
                model, input_ids=text, attention_mask=torch.ones_like(text), use_cache=False
            )
            # With the likeliest tokens as labels, the loss depends most on a scale of the logits.
            labels = reference.result[0, :DOCUMENT].float().argmax(-1)
            batch = _lay_out(ids, labels, packed=data.packing)
            group = world.sequence_group
            if group is None:
                trained = _run_forward(model, **batch)
            else:
                trained = _run_divided_forward(model, batch, group)
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason = on_one_line(error)
        if recipe.attn_implementation == "auto":
            unpacked = "packing: false and " if data.packing else ""
            advice = f"set {unpacked}attn_implementation: eager"
        elif data.packing:
            advice = "set packing: false"
        else:
            advice = "name another model"
        raise UserError(
            f"{name} cannot be trained on {rows} ({type(error).__name__}: {reason}); {advice}"
        ) from error
    if reference.hidden.dim() != 3:  # ProphetNet's has one more, for its n-grams
        raise UserError(
            f"{name}: its head reads several vectors of a token; this family is not supported: "
            "name another model"
        )
    outputs = (reference.hidden, reference.result, trained.hidden, trained.result)
    if not all(torch.isfinite(output).all() for output in outputs):
        raise UserError(
            f"{name}: its outputs are not finite before the first step, on {rows}; check its "
            "weights"
        )
    return reference, trained, labels


def _find_difference(
    reference: ForwardOutput,
    trained: ForwardOutput,
    labels: Tensor,
    dtype: torch.dtype,
    data: Data,
    recipe: Model,
) -> str:
    """Compares the two forwards, and the third document with the first in the training forward.

    Args:
        reference: The outputs of transformers' forward over the documents as one text.
        trained: The outputs of the training forward.
        labels: int64[DOCUMENT], of the first document.
        dtype: The dtype in which the model computes.
        data: Whether documents are packed.
        recipe: The recipe's keys of the model.

    Returns:
        What is wrong, as the end of a message; "" if rounding in `dtype` explains every difference.
    """
    document = reference.hidden[0, :DOCUMENT]  # causal: what follows does not change it
    trained_document = trained.hidden[0, :DOCUMENT]
    if data.packing:
        repeated = trained.hidden[0, -REPEATED:]
    else:
        repeated = trained.hidden[1, :REPEATED]
    # In transformers' one text, the third document also reads the two before it.
    leak = _find_largest_difference(reference.hidden[0, -REPEATED:], document[:REPEATED])
    noise = _find_largest_difference(trained_document, document)
    rounding = 2 * torch.finfo(dtype).eps
    noise_limit = FORWARD_SHARE[dtype] * leak
    leak_limit = max(LEAK_SHARE[dtype] * leak, min(4 * noise, noise_limit), rounding)
    if _find_largest_difference(repeated, trained_document[:REPEATED]) > leak_limit:
        return (
            f"a document's outputs change with the documents around it in {_describe_rows(data)}: "
            f"its layers do not keep documents apart; {_advise(data, recipe)}"
        )
    logits = reference.result[0].float()
    losses = F.cross_entropy(logits[:DOCUMENT], labels, reduction="none")
    leaked_losses = F.cross_entropy(logits[-REPEATED:], labels[:REPEATED], reduction="none")
    # Noise in the outputs moves the loss as a leak does, in proportion to their sizes.
    loss_moved_by_leak = DOCUMENT * (leaked_losses - losses[:REPEATED]).abs().mean()
    loss_noise = loss_moved_by_leak * noise / max(leak, rounding)
    # The head rounds each logit once more.
    loss_rounding = rounding * logits[:DOCUMENT].abs().amax(-1).sum() + 1e-4 * losses.sum()
    is_other_loss = (trained.result - losses.sum()).abs() > 4 * loss_noise + loss_rounding
    if is_other_loss or noise > max(noise_limit, 16 * rounding):
        return (
            "the training forward does not compute what the model's own forward does "
            f"(loss {float(trained.result):.4g}, and {float(losses.sum()):.4g} by transformers); "
            "this family is not supported: name another model"
        )
    return ""


def _describe_rows(data: Data) -> str:
    return "packed documents" if data.packing else "padded rows"


def _advise(data: Data, recipe: Model) -> str:
    """Returns what the user can do about layers that do not keep documents apart."""
    if not data.packing:
        return "name another model"
    if recipe.attn_implementation == "auto":
        return "set packing: false"
    # Under other implementations some classes make a mask that knows nothing of documents.
    return "set attn_implementation: auto, or packing: false"


def _lay_out(ids: Tensor, labels: Tensor, *, packed: bool) -> dict[str, Any]:
    """Makes the inputs of a training forward.

    Packed, one row holds the three documents. Padded, one row holds the first, and one the third,
    filled up with other tokens.

    Args:
        ids: int64[DOCUMENT + OTHER], the first document and the second.
        labels: int64[DOCUMENT], of the first document. Nothing else is trained.
        packed: Whether the documents are packed.
    """
    first = ids[:DOCUMENT]
    third = ids[:REPEATED]
    if packed:
        input_ids = torch.cat([ids, third])[None]
        lengths = [DOCUMENT, OTHER, REPEATED]
    else:
        filling = ids[-(DOCUMENT - REPEATED) :]
        input_ids = torch.stack([first, torch.cat([third, filling])])
        lengths = [DOCUMENT, DOCUMENT]
    positions = [torch.arange(length, device=ids.device) for length in lengths]
    untrained = input_ids.numel() - DOCUMENT  # all tokens after the first document
    all_labels = F.pad(labels, (0, untrained), value=IGNORE_INDEX)
    batch: dict[str, Any] = {
        "input_ids": input_ids,
        "labels": all_labels.view_as(input_ids),
        "position_ids": torch.cat(positions).view_as(input_ids),
        "trained_positions": positions[0],  # the first document is first in the flattened rows
    }
    if packed:
        ends = torch.tensor(lengths, device=ids.device).cumsum(0).to(torch.int32)
        batch |= {"cu_seq_lens": F.pad(ends, (1, 0)), "max_document_length": DOCUMENT}
    return batch


def _run_forward(model: nn.Module, **inputs: Any) -> ForwardOutput:
    """Runs the forward of `model`, and keeps what enters the output head."""
    plain: Any = unwrap(model)
    head_calls: list[tuple[Tensor, Any]] = []  # (the input, the result)
    hook = head_of(plain).register_forward_hook(
        lambda _, args, result: head_calls.append((args[0].detach(), result))
    )
    try:
        result = model(**inputs)
    finally:
        hook.remove()
    hidden, head_result = head_calls[0]
    if has_scores(plain):  # the head scores all tokens, but the class returns the last one's scores
        return ForwardOutput(hidden, head_result)
    # With labels the result is the loss itself, else an object of transformers.
    return ForwardOutput(hidden, result if isinstance(result, Tensor) else result.logits)


def _run_divided_forward(
    model: nn.Module, batch: dict[str, Any], group: ProcessGroup
) -> ForwardOutput:
    """Runs the forward of a batch whose tokens are divided among the ranks of `group`.

    Returns on every rank the outputs of all tokens, and the loss summed over the ranks.
    """
    length = batch["input_ids"].shape[1]
    # The first rank's tokens end within the third document, or within each padded row: attention,
    # and whatever else reads other tokens, has to cross from one rank to the next. The last ranks
    # may have padding alone.
    if "cu_seq_lens" in batch:
        tokens = PART
    else:
        tokens = ceil_div(length, group.size())
    rank_tokens = slice(group.rank() * tokens, (group.rank() + 1) * tokens)
    padding = tokens * group.size() - length
    at_end = (0, padding)
    labels = F.pad(batch["labels"], at_end, value=IGNORE_INDEX)[:, rank_tokens]
    part = {
        "input_ids": F.pad(batch["input_ids"], at_end, value=1)[:, rank_tokens],
        "labels": labels,
        "position_ids": F.pad(batch["position_ids"], at_end)[:, rank_tokens],
        "trained_positions": (labels.flatten() != IGNORE_INDEX).nonzero().squeeze(1),
    }
    if "cu_seq_lens" in batch:  # the padding is a document of its own
        row_end = batch["cu_seq_lens"].new_full((1,), tokens * group.size())
        part["cu_seq_lens"] = torch.cat([batch["cu_seq_lens"], row_end])
        part["max_document_length"] = max(DOCUMENT, padding)
    hidden, loss = _run_forward(model, **part)
    dist.all_reduce(loss, group=group)
    return ForwardOutput(gather_tokens(hidden, group)[:, :length], loss)


def _find_largest_difference(values: Tensor, truth: Tensor) -> float:
    """Returns the largest relative difference of a token's vector, both [tokens, hidden]."""
    values = values.float()
    truth = truth.float()
    norms = truth.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    return float(((values - truth).norm(dim=-1) / norms).max())


@contextmanager
def without_rounding(model: nn.Module) -> Iterator[None]:
    """Makes linear layers multiply in the compute dtype in this block, in which outputs are
    compared: without FP8 products and without fake quantization.

    One FP8 scale for all tokens makes a token's output depend on the other tokens, and rounding can
    make a difference in the last bit a whole step of a number's scale.
    """
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "is_exact")]
    for layer in layers:
        layer.is_exact = True
    try:
        yield
    finally:
        for layer in layers:
            layer.is_exact = False


@contextmanager
def _evaluated(model: nn.Module, compiled: bool) -> Iterator[None]:
    """Makes the model run without dropout, without gradients and eagerly in this block.

    compiled: Whether the model is compiled. Graphs for the sizes of this check would be of no use.
    """
    training = model.training
    model.eval()
    for module in recurrent_modules(unwrap(model)):
        module.train()  # Mamba trains with another kernel; no recurrent module has dropout
    try:
        with (
            torch.no_grad(),
            torch.compiler.set_stance("force_eager") if compiled else nullcontext(),
        ):
            yield
    finally:
        model.train(training)
        reshard(model)  # FSDP2 keeps the root's unit gathered for a backward, which does not follow
