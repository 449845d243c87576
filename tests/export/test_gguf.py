"""A reader that shares no code with ours or transformers': the export, written as GGUF, says the same under llama.cpp.

Needs `pip install -e ".[llama-cpp]"`, which builds llama.cpp from source.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.cli import main

TOKENS = 32
PROMPTS = ("Once upon a time", "Lily and Tom went to the park. They")


@pytest.mark.slow
def test_llama_cpp_says_what_transformers_says(shared: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the second reader is not installed: pip install -e '.[llama-cpp]'")
    llama_cpp = pytest.importorskip(
        "llama_cpp", reason="the second reader is not installed: pip install -e '.[llama-cpp]'"
    )
    export = tmp_path / "export"
    assert main(["export", str(shared / "models" / "stories260k"), "--output", str(export)]) == 0
    write_gguf(export, tmp_path / "model.gguf")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(export), AutoTokenizer.from_pretrained(export)
    f32 = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
    llama = llama_cpp.Llama(str(tmp_path / "model.gguf"), n_ctx=128, n_threads=1, verbose=False, seed=0, **f32)
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.no_grad():
            answer = model.generate(ids, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)[0]
        completion = llama.create_completion(ids[0].tolist(), max_tokens=TOKENS, temperature=0, repeat_penalty=1.0)
        theirs = completion["choices"][0]["text"]
        assert len(answer) == ids.shape[1] + TOKENS
        assert prompt + theirs == tokenizer.decode(answer, skip_special_tokens=True)


def write_gguf(folder: Path, path: Path) -> None:
    """A Llama-style folder with a byte-fallback BPE tokenizer as one GGUF file in float32."""
    import gguf

    config = json.loads((folder / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    _add_tokenizer(writer, json.loads((folder / "tokenizer.json").read_text())["model"], config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in load_file(folder / "model.safetensors").items():
        values = tensor.float().numpy()
        if "q_proj" in name or "k_proj" in name:
            values = _interleaved(values, heads if "q_proj" in name else kv_heads)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp rotates neighboring rows of a head, the Hugging Face layout rows half a head apart."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def _add_tokenizer(writer: Any, bpe: dict[str, Any], config: dict[str, Any]) -> None:
    """The BPE as llama.cpp's SentencePiece kind, which merges the pair with the highest score first."""
    import gguf

    ranks: dict[str, int] = {}
    for rank, pair in enumerate(bpe["merges"]):
        ranks.setdefault("".join(pair), rank)  # several pairs may make one token
    tokens = sorted(bpe["vocab"], key=bpe["vocab"].__getitem__)
    special = {0: gguf.TokenType.UNKNOWN, 1: gguf.TokenType.CONTROL, 2: gguf.TokenType.CONTROL}
    is_byte = [len(token) == 6 and token.startswith("<0x") for token in tokens]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(ranks.get(token, len(ranks))) for token in tokens])
    writer.add_token_types(
        [special.get(i, gguf.TokenType.BYTE if byte else gguf.TokenType.NORMAL) for i, byte in enumerate(is_byte)]
    )
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_unk_token_id(0)
    writer.add_add_space_prefix(True)
