"""Tiny models of the families that the recipes name, and the plain computation that ours must equal."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from finetune.models.cross_entropy import install_loss
from finetune.models.documents import install_attention

WINDOW = 7  # tokens; shorter than the longer documents below
LENGTHS = (13, 1, 22, 7, 8, 5)
VOCABULARY = 61

# What makes each family a case of its own beside Llama: windows, capped scores and logits, scaled logits, tied
# heads, experts, sinks.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
    },
    "qwen3": {"head_dim": 24, "tie_word_embeddings": True},
    "gemma": {"head_dim": 16},
    "gemma2": {
        "head_dim": 16,
        "sliding_window": WINDOW,
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 2.0,
    },
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "phi3": {"sliding_window": WINDOW},
    "granite": {"logits_scaling": 3.0, "attention_multiplier": 0.1, "tie_word_embeddings": True},
    "olmo2": {},
    "smollm3": {"no_rope_layers": [1, 0]},
    "cohere": {"logit_scale": 0.25},
    "mixtral": {"num_local_experts": 2, "sliding_window": WINDOW},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "sliding_window": WINDOW,
    },
}

# Of which a commit trains: plain, with windows and capped scores, with experts and sinks.
QUICK_FAMILIES = ("llama", "gemma2", "mixtral")

# Families whose layers keep documents apart by our attention, though they are built otherwise than Llama: saved buffers
# (Apertus, Gemma 4), tensors that the files name otherwise (GPT-NeoX), two embeddings and low-rank residuals (Gemma 3n), logits that are multiplied (HyperCLOVA X).
OTHERS: dict[str, dict[str, Any]] = {
    "hyperclovax": {"logits_scaling": 3.0},
    "apertus": {},
    "gemma3n_text": {
        "head_dim": 16,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "num_kv_shared_layers": 0,
        "laurel_rank": 4,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
        "activation_sparsity_pattern": [0.0, 0.0],
    },
    "gemma4_text": {
        "head_dim": 16,
        "global_head_dim": 32,  # sizes that differ from layer to layer, as published
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "num_kv_shared_layers": 0,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gpt2": {"n_embd": 48, "n_layer": 2, "n_head": 4},
    "gpt_neox": {},
}
MIXER = {"mamba_d_state": 8, "mamba_n_groups": 1}
DELTA = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
# State spaces, linear attention and convolutions carry a state from token to token; here beside attention, if the family has it.
HYBRIDS: dict[str, dict[str, Any]] = {
    "falcon_h1": MIXER | {"mamba_d_ssm": 48, "mamba_n_heads": 4, "mamba_d_head": 12},
    "qwen3_5_text": DELTA,
    "mamba2": {"num_heads": 6, "head_dim": 16, "state_size": 8, "n_groups": 1},
    "bamba": MIXER | {"attn_layer_indices": [1], "mamba_n_heads": 6, "mamba_d_head": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_ff_dim": 64},
    "rwkv": {"attention_hidden_size": 48},
    "xlstm": {"num_heads": 4, "num_blocks": 2},
}
# Layers that drop the boundaries of documents on their way to attention, and attention that reads a mask.
MASKED: dict[str, dict[str, Any]] = {
    "nemotron": {},
    "stablelm": {"partial_rotary_factor": 0.5},
    "mpt": {"d_model": 48, "n_layers": 2, "n_heads": 4, "expansion_ratio": 2, "max_seq_len": 256},
    "gptj": {"n_embd": 48, "n_layer": 2, "n_head": 4, "rotary_dim": 8},
    "falcon": {},
    "codegen": {"n_embd": 48, "n_layer": 2, "n_head": 4, "rotary_dim": 8},
    "xglm": {"d_model": 48, "num_layers": 2, "attention_heads": 4, "ffn_dim": 64},
}
# Attention of their own, which takes no mask of documents.
OWN_ATTENTION: dict[str, dict[str, Any]] = {"bloom": {"n_layer": 2, "n_head": 4}}
# RoPE whose frequencies depend on the length of a document beyond LONG tokens, and queries that are scaled by their
# position in it (Llama 4).
LONG = 7
LONG_CONTEXT: dict[str, dict[str, Any]] = {
    "phi3": {
        "original_max_position_embeddings": LONG,
        "max_position_embeddings": 4 * LONG,
        "rope_parameters": {
            "rope_type": "longrope",
            "short_factor": [1.0] * 6,  # one for each frequency: half of a head
            "long_factor": [3.0] * 6,
            "rope_theta": 1e4,
            "original_max_position_embeddings": LONG,
        },
    },
    "llama": {
        "max_position_embeddings": LONG,
        "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
    },
    "gemma3_text": {
        "max_position_embeddings": LONG,
        "rope_parameters": {
            "full_attention": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "llama4_text": {
        "floor_scale": LONG,
        "attn_scale": 2.0,
        "no_rope_layers": [1, 0],
        "attention_chunk_size": 2 * LONG,
        "intermediate_size_mlp": 64,
        "num_local_experts": 2,
        "head_dim": 12,
    },
}
EVERY = FAMILIES | OTHERS | HYBRIDS | MASKED | OWN_ATTENTION


def build(family: str, dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    """A model of two layers with random weights, the same for the same arguments, attention as transformers' eager."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
    }
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    made = AutoConfig.for_model(
        family, **sizes | heads | {"initializer_range": 0.3} | EVERY.get(family, {}) | config
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(made, dtype=dtype, attn_implementation="eager").train()


def ours(model: Any, implementation: str = "auto") -> Any:
    """`model` with our attention and our loss."""
    install_attention(model, implementation)
    install_loss(model)
    return model


def documents(lengths: tuple[int, ...] = LENGTHS) -> list[tuple[Tensor, Tensor]]:
    """Random ids and labels [tokens] of each document; about half of the positions are trained."""
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, VOCABULARY, (n,), generator=generator) for n in lengths]
    labels = [torch.randint(3, VOCABULARY, (n,), generator=generator) for n in lengths]
    for each in labels:
        each[torch.rand(len(each), generator=generator) < 0.5] = -100
    return list(zip(ids, labels, strict=True))


def packed(examples: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """All documents in one row, as the data room hands them to the model."""
    lengths = torch.tensor([len(ids) for ids, _ in examples])
    return {
        "input_ids": torch.cat([ids for ids, _ in examples])[None],
        "labels": torch.cat([labels for _, labels in examples])[None],
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        "cu_seq_lens": F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32),
        "max_document_length": int(lengths.max()),
    }


def padded(examples: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """One document a row, padded on the right, without a mask."""
    ids, labels = (list(column) for column in zip(*examples, strict=True))
    rows = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    targets = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
    return {
        "input_ids": rows,
        "labels": targets,
        "position_ids": torch.arange(rows.shape[1]).expand(rows.shape),
        "document_lengths": tuple(len(each) for each in ids),
    }


def plain_loss(model: Any, examples: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The truth: one document at a time through the unchanged model, F.cross_entropy over whole logits, summed."""
    losses = []
    for ids, labels in examples:
        logits = model(input_ids=ids[None], use_cache=False).logits[0].float()
        losses.append(F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum"))
    return torch.stack(losses).sum()


def forget_lengths(model: Any) -> None:
    """Makes transformers' dynamic RoPE treat every text as its first: it would keep the largest length that it has seen."""

    def forget(module: Any, *_: Any) -> None:
        for name in [name for name in vars(module) if name.endswith("max_seq_len_cached")]:
            setattr(module, name, 0)

    for module in model.modules():
        if hasattr(module, "max_seq_len_cached"):
            module.register_forward_pre_hook(forget)


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    """Of the mean over 50 tokens, as a loop would take them."""
    (loss / 50).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def relative_error(found: Tensor, truth: Tensor) -> float:
    """The largest difference, in units of the largest true value."""
    difference = (found.detach() - truth.detach()).abs().max()
    return float(difference / truth.detach().abs().max().clamp(min=1e-30))


def relative_distance(found: Tensor, truth: Tensor) -> float:
    """The norm of the difference, in units of the norm of the truth."""
    return float((found.float() - truth.float()).norm() / truth.float().norm().clamp(min=1e-30))
