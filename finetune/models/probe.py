"""A check before the first step: the training forward computes what transformers' does, document by
document.

Families differ in ways that no config names: layers that drop `cu_seq_lens` on its way to
attention, attention of their own, states that run from one document into the next, logits that are
scaled. So two forwards over a few tokens are compared instead, of the loaded and sharded model
itself.

How far two forwards may differ depends on the model and the precision, so the bounds are measured
as well: transformers' forward also runs over the documents as one text, which shows how much a leak
changes the outputs.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from finetune.config.schema import Data, Model
from finetune.constants import COMPUTE_DTYPE, IGNORE_INDEX, Record, ceil_div
from finetune.distributed.model_parts import has_scores, head_of, unwrap
from finetune.distributed.parallelize import reshard
from finetune.distributed.sequence_parallel import gather_tokens
from finetune.distributed.world import World
from finetune.errors import UserError, on_one_line
from finetune.models.documents import recurrent_modules
from finetune.models.fake_quantize import unrounded

# Tokens of a document, of a second one, and of a third, which repeats the beginning of the first.
DOCUMENT = 8
OTHER = 5
REPEATED = 6
PART = DOCUMENT + OTHER + 2  # tokens of a rank, where ranks divide the packed row
# The first id of each text. A fault shows in every text. In 16 bits rounding can also send a token
# of one text to other experts, where two of them have nearly the same score.
FIRST_IDS = (11, 12, 13)
# The share of a leak's effect on a token's output that rounding may reach.
LEAK_SHARE = {torch.float32: 0.01, torch.bfloat16: 0.25, torch.float16: 0.25}
FORWARD_SHARE = {torch.float32: 0.02, torch.bfloat16: 0.5, torch.float16: 0.5}


class ForwardOutput(NamedTuple):
    """The outputs of one forward, without gradients."""

    hidden: Tensor  # [rows, tokens, hidden], what enters the output head
    result: Tensor  # logits [rows, tokens, vocabulary], or with labels the summed loss


def check_training_forward(model: nn.Module, recipe: Model, data: Data, world: World) -> None:
    """Checks that the model's training forward gives each document the outputs that transformers
    gives it alone.

    Every rank calls it. It costs two forwards over 19 tokens for each text that it needs, and
    changes no parameter, gradient or random state.

    Raises `UserError` where the outputs differ, or the forward fails.
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
        own, trained, labels = _run(model, ids, name, recipe, data, world)
        problem = _find_difference(own, trained, labels, dtype, data, recipe)
        problems = [each for each in world.gather(problem) if each]
        if not problems:
            return
    raise UserError(f"{name}: {problems[0]}")


def _run(
    model: nn.Module, ids: Tensor, name: str, recipe: Model, data: Data, world: World
) -> tuple[ForwardOutput, ForwardOutput, Tensor]:
    """Returns the outputs of transformers' forward and of the training forward, and the labels of
    the first document.

    Args:
        ids: The first document and the second.
        name: The model's class.

    Raises:
        UserError: The forward fails, or its outputs are not finite.
    """
    rows = _describe_rows(data)
    text = torch.cat([ids, ids[:REPEATED]])[None]
    try:
        with _evaluated(model, recipe.torch_compile), _unrounded(model, world):
            # A mask of ones: all three documents are one text to transformers.
            own = _forward(
                model, input_ids=text, attention_mask=torch.ones_like(text), use_cache=False
            )
            # where the loss depends most on a scale of the logits
            labels = own.result[0, :DOCUMENT].float().argmax(-1)
            batch = _lay_out(ids, labels, packed=data.packing)
            group = world.sequence_group
            if group is None:
                trained = _forward(model, **batch)
            else:
                trained = _forward_in_parts(model, batch, group)
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason = on_one_line(error)
        if data.packing:
            advice = "set packing: false"
        else:
            advice = "name another model"
        if recipe.attn_implementation == "auto":
            advice = "set packing: false and attn_implementation: eager"
        raise UserError(
            f"{name} cannot be trained on {rows} ({type(error).__name__}: {reason}); {advice}"
        ) from error
    if own.hidden.dim() != 3:  # [rows, tokens, hidden], but for ProphetNet's n-grams
        raise UserError(
            f"{name}: its head reads several vectors of a token; this family is not supported: "
            "name another model"
        )
    outputs = (own.hidden, own.result, trained.hidden, trained.result)
    if not all(torch.isfinite(output).all() for output in outputs):
        raise UserError(
            f"{name}: its outputs are not finite before the first step, on {rows}; check its "
            "weights"
        )
    return own, trained, labels


def _find_difference(
    own: ForwardOutput,
    trained: ForwardOutput,
    labels: Tensor,
    dtype: torch.dtype,
    data: Data,
    recipe: Model,
) -> str:
    """Says where the two forwards differ by more than rounding in `dtype` explains; empty if
    nowhere.
    """
    document = own.hidden[0, :DOCUMENT]  # causal: what follows does not change it
    ours = trained.hidden[0, :DOCUMENT]
    if data.packing:
        repeated = trained.hidden[0, -REPEATED:]
    else:
        repeated = trained.hidden[1, :REPEATED]
    leak = _difference(own.hidden[0, -REPEATED:], document[:REPEATED])
    noise = _difference(ours, document)
    rounding = 2 * torch.finfo(dtype).eps
    most = FORWARD_SHARE[dtype] * leak
    explained = max(LEAK_SHARE[dtype] * leak, min(4 * noise, most), rounding)
    if _difference(repeated, ours[:REPEATED]) > explained:
        return (
            f"a document's outputs change with the documents around it in {_describe_rows(data)}: "
            f"its layers do not keep documents apart; {_advise(data, recipe)}"
        )
    logits = own.result[0].float()
    losses = F.cross_entropy(logits[:DOCUMENT], labels, reduction="none")
    leaked = F.cross_entropy(logits[-REPEATED:], labels[:REPEATED], reduction="none")
    # The outputs' noise, in units of a leak's, reaches the loss as well; the head rounds each logit
    # once more.
    effect = DOCUMENT * (leaked - losses[:REPEATED]).abs().mean() * noise / max(leak, rounding)
    slack = rounding * logits[:DOCUMENT].abs().amax(-1).sum() + 1e-4 * losses.sum()
    is_other_loss = (trained.result - losses.sum()).abs() > 4 * effect + slack
    if is_other_loss or noise > max(most, 16 * rounding):
        return (
            "the training forward does not compute what the model's own forward does "
            f"(loss {float(trained.result):.4g}, and {float(losses.sum()):.4g} by transformers); "
            "this family is not supported: name another model"
        )
    return ""


def _describe_rows(data: Data) -> str:
    return "packed documents" if data.packing else "padded rows"


def _advise(data: Data, recipe: Model) -> str:
    """Says what to do where documents are not kept apart."""
    if not data.packing:
        return "name another model"
    if recipe.attn_implementation == "auto":
        return "set packing: false"
    # some classes make a mask that knows nothing of documents
    return "set attn_implementation: auto, or packing: false"


def _lay_out(ids: Tensor, labels: Tensor, *, packed: bool) -> Record:
    """The inputs of a training forward over three documents in one packed row, or over the first
    and the third in a row each, the third filled up with other tokens.

    Args:
        ids: The first document and the second. The third repeats the beginning of the first.
        labels: Of the first document. Nothing else is trained.
        packed: Whether they are one row.
    """
    first = ids[:DOCUMENT]
    third = ids[:REPEATED]
    if packed:
        rows = torch.cat([ids, third])[None]
        lengths = [DOCUMENT, OTHER, REPEATED]
    else:
        rows = torch.stack([first, torch.cat([third, ids[REPEATED - DOCUMENT :]])])
        lengths = [DOCUMENT, DOCUMENT]
    positions = [torch.arange(length, device=ids.device) for length in lengths]
    padding = (0, rows.numel() - DOCUMENT)
    batch: Record = {
        "input_ids": rows,
        "labels": F.pad(labels, padding, value=IGNORE_INDEX).view_as(rows),
        "position_ids": torch.cat(positions).view_as(rows),
        "trained_positions": positions[0],
    }
    if packed:
        ends = torch.tensor(lengths, device=ids.device).cumsum(0).to(torch.int32)
        batch |= {"cu_seq_lens": F.pad(ends, (1, 0)), "max_document_length": DOCUMENT}
    return batch


def _forward(model: nn.Module, **inputs: Any) -> ForwardOutput:
    plain: Any = unwrap(model)
    read: list[tuple[Tensor, Any]] = []
    hook = head_of(plain).register_forward_hook(
        lambda _, args, result: read.append((args[0].detach(), result))
    )
    try:
        result = model(**inputs)
    finally:
        hook.remove()
    hidden, of_head = read[0]
    if has_scores(plain):  # of all tokens: the class returns those of the last
        return ForwardOutput(hidden, of_head)
    return ForwardOutput(hidden, result if isinstance(result, Tensor) else result.logits)


def _forward_in_parts(model: nn.Module, batch: Record, group: ProcessGroup) -> ForwardOutput:
    """The forward of a batch whose tokens the ranks of `group` share, gathered again on every
    rank.
    """
    length = batch["input_ids"].shape[1]
    # The first rank's tokens end inside the document that repeats the first, or the padded row:
    # attention, and whatever else reads other tokens, has to cross from one rank to the next. The
    # last ranks may have padding alone.
    if "cu_seq_lens" in batch:
        tokens = PART
    else:
        tokens = ceil_div(length, group.size())
    mine = slice(group.rank() * tokens, (group.rank() + 1) * tokens)
    padding = (0, tokens * group.size() - length)
    labels = F.pad(batch["labels"], padding, value=IGNORE_INDEX)[:, mine]
    part = {
        "input_ids": F.pad(batch["input_ids"], padding, value=1)[:, mine],
        "labels": labels,
        "position_ids": F.pad(batch["position_ids"], padding)[:, mine],
        "trained_positions": (labels.flatten() != IGNORE_INDEX).nonzero().squeeze(1),
    }
    if "cu_seq_lens" in batch:  # the padding is a document of its own
        row_end = batch["cu_seq_lens"].new_full((1,), tokens * group.size())
        part["cu_seq_lens"] = torch.cat([batch["cu_seq_lens"], row_end])
        part["max_document_length"] = max(DOCUMENT, padding[1])
    hidden, loss = _forward(model, **part)
    dist.all_reduce(loss, group=group)
    return ForwardOutput(gather_tokens(hidden, group)[:, :length], loss)


def _difference(values: Tensor, truth: Tensor) -> float:
    """The largest relative difference of a token's vector."""
    values = values.float()
    truth = truth.float()
    norms = truth.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    return float(((values - truth).norm(dim=-1) / norms).max())


def _unrounded(model: nn.Module, world: World) -> AbstractContextManager[None]:
    """In this block linear layers that multiply in FP8, or round for quantization, do neither."""
    if world.sharding.fp8 is None:
        return unrounded(model)
    from finetune.models.fp8 import without_fp8  # imports torchao

    return without_fp8(model)


@contextmanager
def _evaluated(model: nn.Module, compiled: bool) -> Iterator[None]:
    """In this block the model has no dropout and no gradients, and runs eagerly: graphs for these
    sizes would be of no use.
    """
    training = model.training
    model.eval()
    for module in recurrent_modules(unwrap(model)):
        module.train()  # Mamba has another kernel for it; none of these has dropout
    try:
        with (
            torch.no_grad(),
            torch.compiler.set_stance("force_eager") if compiled else nullcontext(),
        ):
            yield
    finally:
        model.train(training)
        reshard(model)  # the last unit stays gathered until a backward, which does not follow
