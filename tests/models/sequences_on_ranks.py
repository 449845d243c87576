"""Run on ranks by test_sequence_parallel.py: `sequences_on_ranks.py [MODEL_FOLDER]`.

Attention whose tokens the ranks divide between them is that of one rank; and a real model computes what transformers' does.
"""

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.models import attention_kernels as block_attention
from finetune.models.attention import packed_attention
from finetune.models.attention_kernels import RowDocuments, ScoreOptions, make_masks
from finetune.models.cross_entropy import install_loss
from finetune.models.decoder_layers import checkpoint_activations, compile_layers
from finetune.models.documents import install_attention
from tests.cuda_without_gpu.flex_on_cpu import patch_flex
from tests.models.families import LONG_CONTEXT, build, documents

NO_MASK = torch.empty((0, 0, 0, 0), dtype=torch.bool)
DOCUMENTS = (7, 1, 12, 4)  # tokens; their ends are not those of any rank's part
HEADS, SIZE = 8, 4
CASES: dict[str, dict[str, Any]] = {
    "8 key-value heads": {"key_value_heads": 8},
    "4 key-value heads": {"key_value_heads": 4},
    "1 key-value head": {"key_value_heads": 1},
    "window": {"key_value_heads": 2, "sliding_window": 3},
    "capped scores": {"key_value_heads": 2, "softcap": 2.0},
    "sinks": {"key_value_heads": 2, "sinks": True},
    "narrow values": {"key_value_heads": 8, "value_size": 2},
    "padded rows": {"key_value_heads": 2, "rows": 3},
}
TEXTS = (
    "One day, Lily met a Shoggoth.",
    "Tom had a red ball. He",
    "Once upon a time there was a small cat who liked to run.",
)


def check_attention(
    name: str,
    key_value_heads: int,
    value_size: int = SIZE,
    rows: int = 1,
    sinks: bool = False,
    **options: Any,
) -> None:
    """The output of this rank's tokens, and the gradients of its queries, keys and values (and of the sinks over all ranks)."""
    generator = torch.Generator().manual_seed(0)
    tokens = sum(DOCUMENTS)
    shapes = ((HEADS, SIZE), (key_value_heads, SIZE), (key_value_heads, value_size))
    whole = [
        torch.randn(rows, heads, tokens, size, generator=generator).requires_grad_()
        for heads, size in shapes
    ]
    weight = torch.randn(rows, tokens, HEADS, value_size, generator=generator)
    sink = torch.randn(HEADS, generator=generator).requires_grad_() if sinks else None
    if rows == 1:
        ends = torch.tensor([0, *DOCUMENTS]).cumsum(0).to(torch.int32)
        options["documents"] = RowDocuments(ends, max(DOCUMENTS), DOCUMENTS)
    expected, _ = packed_attention(torch.nn.Module(), *whole, NO_MASK, s_aux=sink, **options)
    (expected * weight).sum().backward()

    documents = options.pop("documents", RowDocuments())
    check_parts(name, whole, sink, expected, weight, documents, options)
    if not ScoreOptions(softcap=options.get("softcap"), sinks=sink).is_fusible:
        with pytest.MonkeyPatch.context() as patch:
            patch_flex(patch)
            patch.setattr(block_attention, "SMALLEST_HEAD", SIZE)
            masks = make_masks(frozenset([None]), documents.boundaries, tokens, weight.device)
            check_parts(
                name, whole, sink, expected, weight, replace(documents, masks=masks), options
            )
    print("attention as on one rank:", name, flush=True)


def check_parts(
    name: str,
    whole: list[torch.Tensor],
    sink: torch.Tensor | None,
    expected: torch.Tensor,
    weight: torch.Tensor,
    documents: RowDocuments,
    options: dict[str, Any],
) -> None:
    """The same by ranks that each have a part of the tokens."""
    group, part = dist.group.WORLD, weight.shape[1] // dist.get_world_size()
    mine = slice(dist.get_rank() * part, (dist.get_rank() + 1) * part)
    states = [each.detach()[:, :, mine].requires_grad_() for each in whole]
    own_sink = None if sink is None else sink.detach().clone().requires_grad_()
    options = options | {"documents": documents, "sequence_group": group}
    found, _ = packed_attention(torch.nn.Module(), *states, NO_MASK, s_aux=own_sink, **options)
    (found * weight[:, mine]).sum().backward()
    torch.testing.assert_close(found, expected[:, mine], msg=lambda text: f"{name}: {text}")
    for state, each in zip(states, whole, strict=True):
        torch.testing.assert_close(
            state.grad, each.grad[:, :, mine], msg=lambda text: f"{name}, gradient: {text}"
        )
    if own_sink is not None and sink is not None:
        assert own_sink.grad is not None and sink.grad is not None
        dist.all_reduce(own_sink.grad)
        torch.testing.assert_close(own_sink.grad, sink.grad)


def check_scaled_queries() -> None:
    """Llama 4's logits of this rank's tokens, whose queries are scaled by position, against transformers' text by text."""
    model = build("llama4_text", **LONG_CONTEXT["llama4_text"]).eval()
    texts = [ids for ids, _ in documents(DOCUMENTS)]
    part = sum(DOCUMENTS) // dist.get_world_size()
    mine = slice(dist.get_rank() * part, (dist.get_rank() + 1) * part)
    with torch.no_grad():
        expected = torch.cat(
            [model(input_ids=text[None], use_cache=False).logits for text in texts], 1
        )
        install_attention(model, "auto", dist.group.WORLD)
        found = model(
            input_ids=torch.cat(texts)[None, mine],
            position_ids=torch.cat([torch.arange(length) for length in DOCUMENTS])[None, mine],
            cu_seq_lens=torch.tensor([0, *DOCUMENTS]).cumsum(0).to(torch.int32),
            max_document_length=max(DOCUMENTS),
            use_cache=False,
        ).logits
    torch.testing.assert_close(found, expected[:, mine], rtol=1e-4, atol=1e-4)
    print("scaled queries as of transformers", flush=True)


def check_real_model(folder: str) -> None:
    """The loss and all gradients of three real texts in one row, against transformers' own attention, text by text."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [torch.tensor(tokenizer(text).input_ids) for text in TEXTS]
    expected: dict[str, tuple[float, dict[str, torch.Tensor]]] = {}
    for implementation in ("eager", "sdpa"):
        theirs: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=implementation
        )
        losses = [
            F.cross_entropy(theirs(input_ids=text[None]).logits[0, :-1], text[1:], reduction="sum")
            for text in texts
        ]
        torch.stack(losses).sum().backward()
        expected[implementation] = (
            float(torch.stack(losses).detach().sum()),
            {n: p.grad for n, p in theirs.named_parameters()},
        )

    size, lengths = dist.get_world_size(), [len(text) for text in texts]
    padding = -sum(lengths) % size
    if padding:
        lengths.append(padding)
        texts.append(torch.ones(padding, dtype=torch.int64))
    labels = [F.pad(text[1:], (0, 1), value=-100) for text in texts[:3]]
    labels += [torch.full((padding,), -100)] if padding else []
    part = sum(lengths) // size
    mine = slice(dist.get_rank() * part, (dist.get_rank() + 1) * part)
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    install_attention(model, "auto", dist.group.WORLD)
    install_loss(model)
    checkpoint_activations(model, every=2)
    model.train()
    inputs = {
        "input_ids": torch.cat(texts)[None, mine],
        "labels": torch.cat(labels)[None, mine],
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None, mine],
        "cu_seq_lens": torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        "max_document_length": max(lengths),
    }
    loss = model(**inputs)
    loss.backward()
    compile_layers(model, backend="aot_eager")
    compiled = model(**inputs)
    torch.testing.assert_close(compiled, loss)
    compiled.backward(torch.zeros(()))
    dist.all_reduce(loss := loss.detach())
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for gradient in gradients.values():
        dist.all_reduce(gradient)
    for implementation, (total, theirs) in expected.items():
        assert abs(loss.item() / total - 1) < 1e-6, f"{implementation}: {loss.item()} and {total}"
        for name, gradient in gradients.items():
            error = float((gradient - theirs[name]).norm() / theirs[name].norm())
            assert error < 1e-5, f"{implementation}: gradient of {name}: {error:.1e}"
        print(
            f"{part} tokens a rank: loss {loss.item():.6f}, by transformers' {implementation} {total:.6f}",
            flush=True,
        )


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for name, options in CASES.items():
        check_attention(name, **options)
    check_scaled_queries()
    if len(sys.argv) > 1:
        check_real_model(sys.argv[1])
    dist.destroy_process_group()
