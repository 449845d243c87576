"""What a careful person would write by hand, with nothing in the way: the same packed attention and
loss, inlined.

It is the yardstick of `speed.py`: batches are built before the clock starts, and nothing is logged,
saved or checked.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    scaling: float,
    lengths: list[int],
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal SDPA for each document, in float32. query: [1, heads, tokens, head size]."""
    documents = zip(
        *(torch.split(x.float(), lengths, dim=2) for x in (query, key, value)), strict=True
    )
    with torch.autocast("cpu", enabled=False):
        outs = [
            F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
            for q, k, v in documents
        ]
    return torch.cat([out.transpose(1, 2) for out in outs], dim=1).to(value.dtype), None


def train(folder: Path, batches: Sequence[Any], bf16: bool, done: Callable[[int], None]) -> None:
    """Trains the model in `folder` on step batches of the data room, round and round;
    `done(tokens)` after each step.
    """
    AttentionInterface.register("bare", attention)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="bare"
    ).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    step = 0
    while True:
        batch = batches[step % len(batches)]
        for micro_batch in batch.micro_batches:
            lengths = micro_batch.cu_seq_lens.diff().tolist()
            with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
                hidden = model.model(
                    input_ids=micro_batch.input_ids,
                    position_ids=micro_batch.position_ids,
                    use_cache=False,
                    lengths=lengths,
                ).last_hidden_state
                trained = micro_batch.trained_positions
                logits = model.lm_head(hidden[0][trained])
            loss = F.cross_entropy(logits.float(), micro_batch.labels[0][trained], reduction="sum")
            (loss / batch.trained_tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        done(batch.tokens)
