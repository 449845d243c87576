"""Tiny models of the families that are exported as GGUF, a few steps away from random weights, with real kinds of tokenizers."""

import json
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
STEPS = 12
QWEN_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# name -> (model_type, what its config has beside the sizes, the tokenizer)
FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("llama", {"num_key_value_heads": 2}, "spm"),
    "llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
            }
            | {"high_freq_factor": 4.0, "original_max_position_embeddings": 64},
            "tie_word_embeddings": True,
        },
        "bpe",
    ),
    "llama_biases": ("llama", {"attention_bias": True, "mlp_bias": True}, "bpe"),
    "llama_linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
        "bpe",
    ),
    "mistral": ("mistral", {"head_dim": 32, "sliding_window": None}, "spm"),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, "spm"),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}, "bpe"),
    "qwen2_yarn": (
        "qwen2",
        {
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
            | {"original_max_position_embeddings": 32}
        },
        "bpe",
    ),
    "qwen2_yarn_attention": (
        "qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "attention_factor": 1.5,
            }
            | {"original_max_position_embeddings": 32}
        },
        "bpe",
    ),
    "qwen3": ("qwen3", {"head_dim": 32}, "bpe"),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "head_dim": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
        "bpe",
    ),
    "gemma": ("gemma", {"head_dim": 32}, "spm"),
    "gemma2": ("gemma2", {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8}, "spm"),
    "gemma3_text": (
        "gemma3_text",
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8, "num_hidden_layers": 7}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
        "spm",
    ),
    "phi3": ("phi3", {"sliding_window": None}, "spm"),
    "phi3_longrope": (
        "phi3",
        {
            "sliding_window": None,
            "original_max_position_embeddings": 512,
            "max_position_embeddings": 1024,
        }
        | {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "original_max_position_embeddings": 512,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
                "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
            }
        },
        "bpe",
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 5, "tie_word_embeddings": True}, "bpe"),
}


def make_gguf_model(
    folder: Path, name: str, shared: Path, *, hidden: int = 64, dtype: str = "float32"
) -> Path:
    """A Hugging Face folder of the family `name`, trained for some steps on a sentence."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, config, kind = FAMILIES[name]
    tokenizer = make_tokenizer_of(kind, shared)
    sizes: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": model_type.startswith("gemma"),
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(model_type, **sizes | config), dtype=torch.float32
        )
        ids = tokenizer(
            "Lily and Tom went to the park. They saw 12 ducks!", return_tensors="pt"
        ).input_ids
        # At a higher rate Gemma 3 answers every prompt alike, whatever its RoPE is.
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(STEPS):
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_tokenizer_of(kind: str, shared: Path) -> Any:
    """SentencePiece's BPE of 512 tokens (of a published model), or a byte-level BPE of as many, cut as Qwen's is."""
    from transformers import AutoTokenizer

    if kind == "spm":
        return _complete(AutoTokenizer.from_pretrained(shared / "models" / "stories260k"))
    from tokenizers import Regex, pre_tokenizers

    words = pre_tokenizers.Split(Regex(QWEN_WORDS), "isolated")
    cut = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return train_tokenizer(cut)


def train_tokenizer(pre_tokenizer: Any, *, ignore_merges: bool = False, size: int = 512) -> Any:
    """A byte-level BPE of `size` tokens that cuts texts by `pre_tokenizer`, trained on the license, which stays as it is."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(ROOT / "LICENSE")], trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    wrapped.chat_template = CHATML
    return wrapped


def _complete(tokenizer: Any) -> Any:
    """The tokenizer with every pair of tokens as a merge whose text is a token, in the order of these, as transformers
    converts SentencePiece's; the published one lacks some."""
    from tokenizers import Tokenizer

    described = json.loads(tokenizer.backend_tokenizer.to_str())
    model, ranks = described["model"], dict[str, int]()
    for rank, pair in enumerate(model["merges"]):
        ranks.setdefault("".join(pair), rank)
    vocabulary = model["vocab"]
    splits = [
        (ranks.get(token, len(ranks)), (token[:cut], token[cut:]))
        for token in vocabulary
        if not token.startswith("<")
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    model["merges"] = [list(pair) for _, pair in sorted(splits)]
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(described))
    return tokenizer
