"""Capped scores, sinks and wide heads by flex_attention: transformers' eager attention under an explicit mask, by masks that all layers share."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from finetune.models import attention_kernels as block_attention
from finetune.models import attention_kernels as document_attention
from finetune.models.attention_kernels import (
    ScoreOptions,
    attend_in_blocks,
    find_windows,
    make_masks,
)
from finetune.models.decoder_layers import checkpoint_activations, compile_layers
from tests.conftest import slow_but
from tests.cuda_without_gpu.flex_on_cpu import patch_flex
from tests.models.families import (
    WINDOW,
    build,
    documents,
    gradients,
    ours,
    packed,
    padded,
    relative_error,
)
from tests.models.test_attention import EXACT, GRADIENT_EXACT

# Tokens of the documents of each row: in one block, at its edges, over several, and fewer blocks than two.
ROWS = ((64,), (128, 128), (100, 28), (3, 1, 120, 68), (300, 129, 211))
# Gemma 4's full layers have wider heads than its sliding ones.
MODELS: dict[str, dict[str, Any]] = {
    "gemma2": {},
    "gpt_oss": {"experts_implementation": "eager"},
    "gemma4_text": {"global_head_dim": 512},
}


def visible(lengths: tuple[int, ...], window: int | None) -> Tensor:
    """bool[tokens, tokens]: what each token sees, by its document and its distance."""
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    places = torch.arange(len(document))
    distance = places[:, None] - places
    return (
        (document[:, None] == document) & (distance >= 0) & (distance < (window or len(document)))
    )


def _is_seen(seen: Tensor, _batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return seen[query, key]


def boundaries(lengths: tuple[int, ...]) -> Tensor:
    return F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32)


@pytest.mark.parametrize("lengths", ROWS)
def test_masks_are_those_that_torch_finds_from_all_pairs_of_tokens(
    lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    patch_flex(monkeypatch)
    tokens, device = sum(lengths), torch.device("cpu")
    windows = frozenset([None, 7, 128, 129, 250])
    blocks = -(-tokens // 128)
    for window, found in make_masks(windows, boundaries(lengths), tokens, device).items():
        seen = visible(lengths, window)
        is_seen = partial(_is_seen, seen)
        expected = create_block_mask(is_seen, None, None, tokens, tokens, device="cpu")
        for kind in ("kv", "full_kv", "q", "full_q"):
            counts, order = (
                getattr(expected, f"{kind}_{what}") for what in ("num_blocks", "indices")
            )
            assert torch.equal(getattr(found, f"{kind}_num_blocks")[..., :blocks], counts)
            used = torch.arange(blocks) < counts[..., None]
            assert torch.equal(
                getattr(found, f"{kind}_indices")[..., :blocks, :blocks][used], order[used]
            )
        places = torch.arange(tokens)
        assert torch.equal(found.mask_mod(None, None, places[:, None], places), seen)


@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_those_of_transformers_under_an_explicit_mask(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch_flex(monkeypatch)
    # In double precision, but for what the families compute in fp32 themselves: in fp32 the order of sums is the CPU's.
    model, lengths = build(name, **MODELS[name]).double(), (150, 3, 64, 71)
    ours_too = ours(copy.deepcopy(model))
    examples = documents(lengths)
    row = packed(examples)
    hidden = [
        torch.zeros(()).masked_fill(~visible(lengths, window), torch.finfo().min)
        for window in (None, WINDOW)
    ]
    masks = dict(
        zip(
            ("full_attention", "sliding_attention"),
            (each[None, None] for each in hidden),
            strict=True,
        )
    )
    logits = model(
        row["input_ids"], position_ids=row["position_ids"], attention_mask=masks, use_cache=False
    ).logits
    loss = F.cross_entropy(logits[0], row["labels"][0], ignore_index=-100, reduction="sum")
    expected = gradients(model, loss)
    attended: list[ScoreOptions] = []

    def attend(*arguments: Any) -> Tensor:
        attended.append(arguments[-1])
        return attend_in_blocks(*arguments)

    monkeypatch.setattr(document_attention, "attend_in_blocks", attend)
    for batch in (row, padded(examples)):
        found_loss = ours_too(**batch)
        assert relative_error(found_loss, loss) <= EXACT
        found = gradients(ours_too, found_loss)
        assert found.keys() == expected.keys()
        worst = max((relative_error(found[each], expected[each]), each) for each in found)
        assert worst[0] <= GRADIENT_EXACT, worst
    assert len(attended) == 2 * (1 if name == "gemma4_text" else 2), "a layer took another branch"


def test_sinks_are_those_of_transformers_in_double_precision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    patch_flex(monkeypatch)
    lengths, window = (70, 90, 5), 20
    generator = torch.Generator().manual_seed(0)
    states = [
        torch.randn(1, heads, 165, 16, generator=generator, dtype=torch.float64)
        for heads in (4, 2, 2)
    ]
    sinks = torch.randn(4, generator=generator, dtype=torch.float64)
    theirs, mine = ([each.clone().requires_grad_() for each in (*states, sinks)] for _ in range(2))
    module = torch.nn.Module()
    module.sinks, module.num_key_value_groups = theirs[3], 2  # type: ignore[assignment]
    mask = torch.zeros((), dtype=torch.float64).masked_fill(~visible(lengths, window), -1e300)
    expected, _ = eager_attention_forward(module, *theirs[:3], mask, scaling=0.3)
    mask = make_masks(frozenset([window]), boundaries(lengths), 165, torch.device("cpu"))[window]
    found = attend_in_blocks(*mine[:3], mask, ScoreOptions(scale=0.3, window=window, sinks=mine[3]))
    weight = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    for out in (expected, found):
        (out * weight).sum().backward()
    assert relative_error(found, expected) < 1e-13
    for a, b in zip(mine, theirs, strict=True):
        assert a.grad is not None and b.grad is not None
        assert relative_error(a.grad, b.grad) < 1e-13


def make_counting(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list to which each mask that is made adds its tokens."""
    made: list[int] = []
    make = block_attention.make_block_mask

    def make_counted(first: Tensor) -> BlockMask:
        made.append(len(first))
        return make(first)

    monkeypatch.setattr(block_attention, "make_block_mask", make_counted)
    return made


@pytest.mark.parametrize("compiles_layers", slow_but([False], [False, True]))
def test_a_mask_a_forward_for_each_kind_of_layer_and_graphs_for_all_lengths(
    compiles_layers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = ROWS[1], ROWS[3]
    model = ours(build("gemma2", num_hidden_layers=3))
    batches = [packed(documents(lengths)) for lengths in rows]
    expected = [gradients(model, model(**batch)) for batch in batches]  # by documents

    # By AOTAutograd, under activation checkpointing too, whose backward computes the layers again; of whole layers that takes long.
    counter: Any = CompileCounter() if compiles_layers else CompileCounterWithBackend("aot_eager")
    patch_flex(monkeypatch, counter)
    made = make_counting(monkeypatch)
    torch._dynamo.reset()
    model, graphs = ours(build("gemma2", num_hidden_layers=3)), []
    if compiles_layers:
        compile_layers(model, counter)
    else:
        checkpoint_activations(model, every=1)
    for batch, truth in zip(batches, expected, strict=True):
        found = gradients(model, model(**batch))
        worst = max((relative_error(found[each], truth[each]), each) for each in found)
        assert worst[0] <= GRADIENT_EXACT, worst
        graphs.append(counter.frame_count)
    # Compiled layers that slide are another graph than those that do not, and the loss is one; attention alone is one for both.
    assert graphs == [3 if compiles_layers else 1] * len(rows)
    assert made == [sum(lengths) for lengths in rows for _kind in range(2)]


def test_only_layers_that_no_other_kernel_computes_get_masks() -> None:
    found = {
        name: find_windows(build(name, **MODELS.get(name, {})))
        for name in (*MODELS, "llama", "mistral", "gemma3_text")
    }
    nothing: frozenset[int | None] = frozenset()
    assert found == {
        "gemma2": {None, WINDOW},
        "gpt_oss": {None, WINDOW},
        "gemma4_text": {None},
        "llama": nothing,
        "mistral": nothing,
        "gemma3_text": nothing,
    }
