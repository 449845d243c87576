"""Packed attention equals one document at a time, for every family that the recipes name."""

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import library
from transformers import DynamicCache

from finetune.data.examples import Prompt
from finetune.data.tokenizer import find_stop_token_ids
from finetune.errors import UserError
from finetune.models import attention as attention
from finetune.models import attention_kernels as document_attention
from finetune.models.attention import NAME
from finetune.models.attention_kernels import (
    RowDocuments,
    ScoreOptions,
    attend_documents,
    attend_from,
)
from finetune.models.decoder_layers import decoder_layers
from finetune.models.documents import can_continue, install_attention
from finetune.models.routing import install_routing
from finetune.training.evaluate import SAMPLE_TOKENS, answer
from tests.conftest import make_tokenizer, slow_but
from tests.cuda_without_gpu.varlen_on_cpu import register_cpu_kernels, takes_varlen
from tests.models.families import (
    FAMILIES,
    LONG_CONTEXT,
    build,
    documents,
    forget_lengths,
    gradients,
    ours,
    packed,
    padded,
    plain_loss,
    relative_error,
)
from tests.training.test_preferences import ALONE

EXACT = 1e-6  # of the largest value, in fp32
GRADIENT_EXACT = 2e-5  # through two layers of fp32 products, summed in another order


@pytest.mark.parametrize(
    ("family", "config"),
    [pytest.param(family, {}, id=family) for family in FAMILIES]
    + [
        pytest.param(family, config, id=f"{family} long") for family, config in LONG_CONTEXT.items()
    ],
)
def test_every_family_packed_and_padded_gives_the_loss_and_gradients_of_one_document_at_a_time(
    family: str, config: dict[str, Any]
) -> None:
    model = build(family, **config)
    forget_lengths(model)
    examples = documents()
    true_loss = plain_loss(model, examples)
    true_gradients = gradients(model, true_loss)

    ours(model)
    for batch in (packed(examples), padded(examples)):
        loss = model(**batch)
        assert loss.dtype == torch.float32
        assert abs(loss.item() - true_loss.item()) <= EXACT * true_loss.item()
        found = gradients(model, loss)
        assert found.keys() == true_gradients.keys()
        worst = max((relative_error(found[name], true_gradients[name]), name) for name in found)
        assert worst[0] <= GRADIENT_EXACT, worst


@pytest.mark.parametrize(
    "implementation",
    [
        "sdpa",
        "eager",
        pytest.param("flex_attention", marks=pytest.mark.slow),
    ],  # it compiles a kernel
)
@pytest.mark.parametrize("family", ["mistral", "llama4_text"])
def test_other_implementations_keep_documents_apart_too(family: str, implementation: str) -> None:
    model, examples = build(family, **LONG_CONTEXT.get(family, {})), documents()
    true_loss = plain_loss(model, examples)
    with torch.no_grad():
        loss = ours(model, implementation)(**packed(examples))
    assert relative_error(loss, true_loss) <= EXACT


def test_activation_checkpointing_recomputes_the_same() -> None:
    model, examples = ours(build("mistral")), documents()
    expected = gradients(model, model(**packed(examples)))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    found = gradients(model, model(**packed(examples)))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "granite"])
def test_generation_is_the_models_own_batched_with_left_padding(family: str) -> None:
    model = build(family).eval()
    prompt = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(prompt)
    mask[1, :5] = 0
    arguments: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    with torch.no_grad():
        expected = model.generate(prompt, **arguments)
        logits = model(prompt, attention_mask=mask).logits
    ours(model)
    with torch.no_grad():
        assert torch.equal(model.generate(prompt, **arguments), expected)
        assert (
            relative_error(model(prompt, attention_mask=mask).logits[mask > 0], logits[mask > 0])
            <= EXACT
        )


def test_queries_are_scaled_by_position_behind_padding_and_over_a_cache() -> None:
    model = build("llama4_text", **LONG_CONTEXT["llama4_text"]).eval()
    (ids, _), *_ = documents((20,))
    found = []
    with torch.no_grad():
        expected = model(input_ids=ids[None], use_cache=False).logits[0]
        rows = torch.cat([torch.zeros(6, dtype=torch.int64), ids])[None]
        mask = rows.new_ones(rows.shape).index_fill(1, torch.arange(6), 0)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        ours(model)
        cache = DynamicCache(config=model.config)
        # the last token over the cache of those before it
        for read in (slice(0, -1), slice(-1, None)):
            arguments = rows[:, read], mask[:, : read.stop], positions[:, read], cache
            found.append(model(*arguments, use_cache=True).logits[0])
    assert relative_error(torch.cat(found)[6:], expected) <= GRADIENT_EXACT


@pytest.mark.parametrize(("family", "config"), LONG_CONTEXT.items())
def test_prompts_are_answered_as_each_is_alone_beyond_the_original_length(
    family: str, config: dict[str, Any]
) -> None:
    """Prompts of 3 and 12 tokens, where frequencies change at 7: the answer to the shorter one crosses that length."""
    tokenizer = make_tokenizer()
    model = build(family, vocab_size=len(tokenizer), **config).eval()
    prompts = [Prompt(ids.tolist(), "") for ids, _ in documents((12, 3, 6))]
    ends: dict[str, Any] = {"eos_token_id": find_stop_token_ids(tokenizer), "do_sample": False}
    expected = []
    forget_lengths(model)
    for prompt in prompts:
        with torch.no_grad():
            ids = model.generate(
                torch.tensor([prompt.prompt_ids]), max_new_tokens=SAMPLE_TOKENS, **ends
            )
        new = ids[0, len(prompt.prompt_ids) :]
        expected.append(tokenizer.decode(new, skip_special_tokens=True).strip())
    found = answer(ours(model), prompts, tokenizer, ALONE)
    assert [sample.answer for sample in found] == expected


def test_dropout_works_on_the_weights_inside_each_document() -> None:
    model = ours(build("llama", attention_dropout=0.5))
    batch = packed(documents())
    torch.manual_seed(3)
    first = model(**batch).item()
    torch.manual_seed(3)
    assert model(**batch).item() == first
    assert model(**batch).item() != first
    model.eval()
    assert model(**batch).item() == model(**batch).item()


def test_under_autocast_the_kernel_sees_one_dtype_and_the_loss_stays_fp32() -> None:
    model, examples = build("llama"), documents()
    truth = plain_loss(model, examples)
    ours(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**packed(examples))
    assert loss.dtype == torch.float32
    assert relative_error(loss, truth) < 0.01
    loss.backward()


def test_in_bf16_a_cpu_rounds_once_after_attending_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, 50, 16, generator=generator).bfloat16() for heads in (4, 2, 2)
    )
    boundaries = torch.tensor([0, 17, 50], dtype=torch.int32)
    none = torch.empty((0, 0, 0, 0), dtype=torch.bool)

    def attended(*states: torch.Tensor) -> torch.Tensor:
        return attention.packed_attention(
            torch.nn.Module(), *states, none, documents=RowDocuments(boundaries)
        )[0]

    exact = attended(query.float(), key.float(), value.float())
    assert exact.dtype == torch.float32
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            torch.testing.assert_close(
                attended(query, key, value), exact.bfloat16(), rtol=0, atol=0
            )


def test_an_implementation_that_is_missing_is_refused_in_one_sentence() -> None:
    model = build("llama")
    if not torch.cuda.is_available():
        with pytest.raises(
            UserError, match="flash_attention_2 cannot be used with LlamaForCausalLM here"
        ):
            install_attention(model, "flash_attention_2")


def test_our_name_does_not_leak_into_the_saved_config(tmp_path: Path) -> None:
    model = ours(build("llama"))
    model.config.save_pretrained(tmp_path)
    assert NAME not in json.loads((tmp_path / "config.json").read_text()).values()


@library.custom_op("finetune_tests::varlen", mutates_args=())
def varlen_as_documented(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    scale: float | None = None,
    window_size: list[int] | None = None,
) -> torch.Tensor:
    """torch 2.11's varlen_attn: [tokens, heads, size], `window_size` tokens to the left of a query, and fewer heads of
    keys and values as they are."""
    left = (window_size or [-1])[0]
    outs = []
    for start, end in itertools.pairwise(cu_seq_q.tolist()):
        assert 0 < end - start <= max_q == max_k
        assert key.shape[1] == value.shape[1] == 2, (
            "keys and values were repeated, which costs memory"
        )
        repeated = (
            each.repeat_interleave(query.shape[1] // each.shape[1], dim=1)
            for each in (query, key, value)
        )
        q, k, v = (each[start:end].transpose(0, 1) for each in repeated)
        visible = torch.ones(end - start, end - start, dtype=torch.bool).tril()
        visible = visible if left < 0 else visible.triu(-left)
        scores = (
            q @ k.transpose(1, 2) * (q.shape[-1] ** -0.5 if scale is None else scale)
        ).masked_fill(~visible, -1e30)
        outs.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outs)


@varlen_as_documented.register_fake
def _(query: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.empty_like(query)


def use_documented_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends attention the way that CUDA takes under torch 2.11, to the kernel above."""
    monkeypatch.setattr(document_attention, "NEEDS_ENABLE_GQA", False)
    monkeypatch.setattr(document_attention, "_can_use_varlen", takes_varlen)
    monkeypatch.setattr(
        document_attention,
        "varlen_attn",
        lambda *a, window_size, **k: varlen_as_documented(*a, **k, window_size=list(window_size)),
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_the_varlen_kernel_is_called_as_its_documentation_says(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, examples = build(family), documents()
    true_loss = plain_loss(model, examples)
    use_documented_kernel(monkeypatch)
    ours(model)
    with torch.no_grad():
        for batch in (packed(examples), padded(examples)):
            assert abs(model(**batch).item() - true_loss.item()) <= EXACT * true_loss.item()


@pytest.mark.parametrize(
    "family", slow_but(["gemma3_text"], ["qwen3", "gemma3_text"])
)  # which slides
def test_a_layer_with_the_varlen_kernel_compiles_into_one_graph_for_all_lengths(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ours(build(family))
    batches = [packed(documents(lengths)) for lengths in ((13, 4, 22), (30, 2, 6, 9), (8, 41))]
    use_documented_kernel(monkeypatch)
    graphs = 0

    def counted(graph: Any, _: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    torch._dynamo.reset()
    with torch.no_grad():
        expected = [model(**batch).item() for batch in batches]
        for layer in decoder_layers(model):
            layer.forward = torch.compile(
                layer.forward, dynamic=True, fullgraph=True, backend=counted
            )  # type: ignore[method-assign]
        found = [model(**batch).item() for batch in batches]
    assert found == pytest.approx(expected, rel=1e-6)
    assert graphs <= len(decoder_layers(model)), (
        f"{graphs} graphs: something is recompiled for every length"
    )


@pytest.fixture
def varlen_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends attention the way that CUDA takes, through torch's own operator, which then has a kernel for the CPU."""
    register_cpu_kernels()
    monkeypatch.setattr(document_attention, "_can_use_varlen", takes_varlen)


@pytest.mark.usefixtures("varlen_kernel")
@pytest.mark.parametrize("head_dim", [2, 12, 20])
def test_head_sizes_that_8_does_not_divide_are_padded_for_the_varlen_kernel(head_dim: int) -> None:
    model, examples = build("qwen3", head_dim=head_dim), documents()
    true_loss = plain_loss(model, examples)
    with torch.no_grad():
        loss = ours(model)(**packed(examples))
    assert abs(loss.item() - true_loss.item()) <= EXACT * true_loss.item()


@pytest.mark.usefixtures("varlen_kernel")
def test_values_narrower_than_the_queries_are_padded_for_the_varlen_kernel() -> None:
    """DeepSeek's: here 24 for queries and keys, 16 for values."""
    mla = {
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    }
    routed = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 16,
    }
    model = build(
        "deepseek_v3", head_dim=8, num_key_value_heads=4, first_k_dense_replace=1, **mla | routed
    )
    examples = documents()
    true_loss = plain_loss(model, examples)
    with torch.no_grad():
        loss = ours(model)(**packed(examples))
    assert abs(loss.item() - true_loss.item()) <= EXACT * true_loss.item()


CONTINUING = ["llama", "qwen3", "gemma3_text", "mixtral", "gpt2", "nemotron", "gemma4_text"]
APART: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {},  # a recurrence
    "gptj": {},  # a mask
    "gpt_oss": {},  # a mask of blocks on a GPU
    "llama": LONG_CONTEXT["llama"],
    "llama4_text": {
        "layer_types": ["chunked_attention", "full_attention"],
        "attention_chunk_size": 8,
    },
    "mixtral": {"router_aux_loss_coef": 0.1, "output_router_logits": True},
}


def continuing(prompt: int, lengths: tuple[int, ...], last: int) -> dict[str, Any]:
    """A row of a prompt, documents of `lengths` that continue it, and one that does not; of the tokens of `documents`."""
    (first, _), *others = documents((prompt + 1, *lengths, last))
    batch = packed([(first[:prompt], torch.full((prompt,), -100)), *others])
    batch["position_ids"][:, prompt : prompt + sum(lengths)] += prompt
    places = None, *(0 for _ in lengths), None
    return batch | {"packed_lengths": (prompt, *lengths, last), "continued": places}


@pytest.mark.slow
@pytest.mark.usefixtures("varlen_kernel")
def test_a_layer_whose_documents_continue_a_prompt_compiles_for_all_lengths() -> None:
    model, graphs = ours(build("qwen3").eval()), [0]

    def counted(graph: Any, _: Any) -> Any:
        graphs[-1] += 1
        return graph.forward

    cases = (
        (12, (9, 21, 1), 5),
        (8, (30, 2), 6),
        (20, (8, 3, 3, 3), 9),
        (11, (4, 4), 3),
        (7, (9, 2, 6), 6),
    )
    batches = [continuing(*case) for case in cases]
    torch._dynamo.reset()
    with torch.no_grad():
        expected = [model(**batch).item() for batch in batches]
        for layer in decoder_layers(model):
            layer.forward = torch.compile(layer.forward, dynamic=True, backend=counted)  # type: ignore[method-assign]
        found = []
        for batch in batches:
            found.append(model(**batch).item())
            graphs.append(graphs[-1])
    assert found == pytest.approx(expected, rel=1e-6)
    assert graphs[2] == graphs[-1], f"{graphs} graphs: something is recompiled for every length"


@pytest.mark.parametrize("kernel", ["each", "varlen"])
@pytest.mark.parametrize("family", CONTINUING)
def test_what_continues_a_prompt_has_the_loss_and_gradients_of_both_together(
    family: str, kernel: str, request: pytest.FixtureRequest
) -> None:
    if kernel == "varlen":
        request.getfixturevalue("varlen_kernel")
    model, shared = build(family).eval(), 12  # more than a window; GPT-2 has dropout
    (prompt, _), *others = documents((shared + 1, 9, 21, 1, 5))
    none = torch.full((shared,), -100)
    whole = [
        (torch.cat([prompt[:shared], ids]), torch.cat([none, labels])) for ids, labels in others[:3]
    ]
    true_loss = plain_loss(model, [*whole, others[3]])
    true_gradients = gradients(model, true_loss)

    batch = continuing(shared, (9, 21, 1), 5)
    assert can_continue(ours(model))
    loss = model(**batch)
    assert abs(loss.item() - true_loss.item()) <= EXACT * true_loss.item()
    for name, gradient in gradients(model, loss).items():
        assert relative_error(gradient, true_gradients[name]) < GRADIENT_EXACT, name


@pytest.mark.parametrize("family", APART)
def test_nothing_continues_where_more_than_our_attention_reads_the_tokens_before(
    family: str,
) -> None:
    model = build(family, **APART[family])
    install_routing(model, None)
    assert not can_continue(ours(model))
    assert not can_continue(ours(build("llama"), "sdpa"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("family", [*FAMILIES, "gemma4_text"])
def test_on_cuda_one_kernel_for_all_documents_gives_the_same_without_synchronizing(
    family: str,
) -> None:
    wide = {"global_head_dim": 512} if family == "gemma4_text" else {}
    model, examples = build(family, torch.bfloat16, **wide).cuda(), documents()
    on_device = [(ids.cuda(), labels.cuda()) for ids, labels in examples]
    true_loss = plain_loss(copy.deepcopy(model).float(), on_device)
    batch = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in packed(examples).items()}
    ours(model)
    (model(**batch) / 50).backward()  # the first call may load kernels
    may_synchronize = family in ("mixtral", "gpt_oss")  # routing
    torch.cuda.set_sync_debug_mode("default" if may_synchronize else "error")
    try:
        loss = model(**batch)
        (loss / 50).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert abs(loss.item() - true_loss.item()) < 0.02 * true_loss.item()


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
            ],
        ),
    ],
)
@pytest.mark.parametrize(
    "options",
    [ScoreOptions(), ScoreOptions(window=7), ScoreOptions(chunk=6)],
    ids=["full", "window", "chunk"],
)
@pytest.mark.parametrize("lengths", [(13, 4, 22, 9), None], ids=["packed", "padded"])
def test_a_part_of_the_tokens_attends_as_in_the_whole_row(
    lengths: tuple[int, ...] | None, options: ScoreOptions, device: str
) -> None:
    rows, tokens, part = (1 if lengths else 2), 48, 16
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    shapes = (rows, 3, tokens, 16), (rows, 1, tokens, 16), (rows, 1, tokens, 16)
    query, key, value = (torch.randn(shape, device=device, dtype=dtype) for shape in shapes)
    row = RowDocuments()
    if lengths is not None:
        ends = torch.tensor((0, *lengths), device=device).cumsum(0).to(torch.int32)
        row = RowDocuments(ends, max(lengths), lengths)
    whole = attend_documents(query, key, value, row, options)
    for first in range(0, tokens, part):
        own = query[:, :, first : first + part]
        found = attend_from(own, key, value, first, row, options)
        torch.testing.assert_close(found, whole[:, first : first + part])
