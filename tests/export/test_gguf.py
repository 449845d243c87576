"""GGUF exports: readers that share no code with ours say what they hold, and llama.cpp computes what transformers does.

What runs llama.cpp is slow, and needs `pip install -e ".[llama-cpp]"`, which builds it from source.
"""

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.cli import main
from finetune.config import export_formats
from finetune.files.tensors import read, read_folder
from tests.conftest import make_model
from tests.export.gguf_models import FAMILIES, make_gguf_model, train_tokenizer
from tests.ranks import ROOT, run_command

gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install gguf")
from finetune.export.formats import gguf_export  # noqa: E402
from finetune.export.formats.gguf_file import find_differences, plan_file  # noqa: E402
from finetune.export.formats.gguf_model import plan_tensors  # noqa: E402
from finetune.export.target import stored_value  # noqa: E402

MakeModel = Callable[..., Path]
TOKENS = 24
PROMPTS = ("Once upon a time", "Lily and Tom went to the park. They")
needs_llama_cpp = pytest.mark.skipif(
    not export_formats.is_installed("llama_cpp"),
    reason="llama.cpp is not installed: pip install -e '.[llama-cpp]'",
)


@pytest.fixture
def without_llama_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quick tests say the same whether llama.cpp is installed or not."""
    for module in (export_formats, gguf_export):
        monkeypatch.setattr(module, "is_installed", lambda package: package == "gguf")


def export(source: Path, output: Path, *arguments: str) -> int:
    return main(["export", str(source), "--output", str(output), "--format", "gguf", *arguments])


def read_tensors(path: Path) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


@pytest.mark.usefixtures("without_llama_cpp")
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_transformers_reads_the_same_model_and_tokens_from_gguf(
    name: str, shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_gguf_model(tmp_path / "model", name, shared)
    out = tmp_path / "out"
    assert main(["export", str(folder), "--output", str(out), "--format", "safetensors,gguf"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"{out}: ") and "identical logits in a separate process" in said[0]
    assert (
        said[1].startswith(f"{out}/out-F32.gguf: ")
        and "not run under llama.cpp, which is not installed" in said[1]
    )
    assert (
        said[2].startswith("use     transformers")
        and said[5] == f"        llama.cpp     llama-server -m {out}/out-F32.gguf"
    )
    exec(shlex.split(said[2])[-1])
    assert capsys.readouterr().out.strip()  # an answer
    assert sorted(
        path.name for path in out.iterdir() if path.suffix in (".gguf", ".safetensors")
    ) == ["model.safetensors", "out-F32.gguf"]
    plain = AutoModelForCausalLM.from_pretrained(out)
    theirs = AutoModelForCausalLM.from_pretrained(
        out, gguf_file="out-F32.gguf", dtype=torch.float32
    )
    ids = torch.arange(40)[None] * 7 % 512
    with torch.no_grad():
        assert torch.equal(plain(ids).logits, theirs(ids).logits)
    for text in PROMPTS:
        ours, read_back = (
            AutoTokenizer.from_pretrained(out),
            AutoTokenizer.from_pretrained(out, gguf_file="out-F32.gguf"),
        )
        assert ours(text).input_ids == read_back(text).input_ids


@pytest.mark.usefixtures("without_llama_cpp")
def test_each_type_holds_the_values_rounded_as_llama_cpp_rounds_them(
    tiny_llama: MakeModel, tmp_path: Path
) -> None:
    model, out = tiny_llama(), tmp_path / "out"
    assert export(model, out, "--gguf-type", "f16, bf16,q8_0") == 0
    stored = {name: read(tensor).float() for name, tensor in read_folder(model).items()}
    names = {
        "output.weight": "lm_head.weight",
        "blk.1.ffn_down.weight": "model.layers.1.mlp.down_proj.weight",
    }
    names |= {"blk.0.attn_norm.weight": "model.layers.0.input_layernorm.weight"}
    bounds = {"F16": 2**-11, "BF16": 2**-8, "Q8_0": 1 / 127}
    for kind, bound in bounds.items():
        found = read_tensors(out / f"out-{kind}.gguf")
        assert len(found) == len(stored)
        assert {tensor.tensor_type.name for tensor in found.values()} == {
            kind,
            "F32",
        }  # norms stay in float32
        for theirs, ours in names.items():
            values = gguf.quants.dequantize(found[theirs].data, found[theirs].tensor_type)
            difference = np.abs(values - stored[ours].numpy()).max()
            assert difference <= bound * float(stored[ours].abs().max()), (kind, theirs)
            assert ("norm" in ours) == (found[theirs].tensor_type.name == "F32")


@pytest.mark.usefixtures("without_llama_cpp")
def test_a_byte_that_changed_on_the_disk_is_found_and_nothing_published(
    tiny_llama: MakeModel,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_file = gguf_export.write_file

    def write_and_damage(folder: Path, file: Any, advance: Any) -> dict[str, str]:
        written = write_file(folder, file, advance)
        with (folder / file.name).open("r+b") as opened:
            opened.seek(-100, os.SEEK_END)
            byte = opened.read(1)
            opened.seek(-1, os.SEEK_CUR)
            opened.write(bytes([byte[0] ^ 1]))
        return written

    monkeypatch.setattr(gguf_export, "write_file", write_and_damage)
    assert export(tiny_llama(), tmp_path / "out") == 2
    assert "lm_head" not in (error := capsys.readouterr().err)
    assert "differs from what was written" in error
    assert not (tmp_path / "out").exists()


def test_a_tensor_that_is_missing_or_of_another_shape_is_found(
    tiny_llama: MakeModel, tmp_path: Path
) -> None:
    from transformers import AutoConfig

    model = tiny_llama()
    values = [
        stored_value(tensor, name, torch.float32) for name, tensor in read_folder(model).items()
    ]
    tensors = plan_tensors(values, AutoConfig.from_pretrained(model), "model")
    whole = plan_file("whole.gguf", "llama", tensors, "f32", lambda writer: [])
    less = plan_file("less.gguf", "llama", tensors[1:], "f32", lambda writer: [])
    digests = gguf_export.write_file(tmp_path, whole, lambda size: None)
    assert find_differences(tmp_path / "whole.gguf", whole, digests) == []
    gguf_export.write_file(tmp_path, less, lambda size: None)
    assert find_differences(tmp_path / "less.gguf", whole, digests) == [
        f"{tensors[0].name}: not in the files"
    ]
    assert find_differences(tmp_path / "whole.gguf", less, digests) == [
        f"{tensors[0].name}: in the files, but not in the model"
    ]


REFUSED: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "family": (
        {"model_type": "olmo2"},
        [],
        "olmo2: not among the families that are exported as GGUF: llama",
    ),
    "activation": (
        {"hidden_act": "gelu"},
        [],
        "hidden_act: 'gelu', where llama.cpp's llama has 'silu'",
    ),
    "rope": (
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        [],
        "rope_type: dynamic: llama.cpp's llama has linear, yarn, llama3",
    ),
    "bias": (
        {"model_type": "qwen3", "attention_bias": True},
        [],
        "q_proj.bias: llama.cpp's qwen3 has no such tensor",
    ),
    "type": (
        {},
        ["--gguf-type", "q9"],
        "--gguf-type: q9: one or more of f32, f16, bf16, q8_0, q6_k",
    ),
    "package": (
        {},
        ["--gguf-type", "q4_k_m"],
        "--gguf-type: q4_k_m: llama.cpp makes it, which is not installed: pip",
    ),
    "format": (
        {},
        ["--format", "onnx"],
        "--format: onnx: one or more of safetensors, gguf, compressed-tensors are expected",
    ),
    "no format": (
        {},
        ["--format", "safetensors", "--gguf-type", "f16"],
        "--gguf-type: nothing is written as GGUF",
    ),
    "no tokenizer": ({"tokenizer": None}, [], "needs a tokenizer, which does not load"),
    "words": (
        {"tokenizer": "WordLevel"},
        [],
        "a tokenizer of the kind WordLevel, which is not exported as GGUF",
    ),
    "cuts": (
        {"tokenizer": "cuts"},
        [],
        "llama.cpp is not known to cut a text as this tokenizer does ('[aeiou]+|",
    ),
    "exists": (
        {"out": "a file"},
        [],
        "exists; choose another --output, or replace it with --overwrite",
    ),
}


@pytest.mark.usefixtures("without_llama_cpp")
@pytest.mark.parametrize("case", REFUSED)
def test_what_llama_cpp_would_read_otherwise_is_refused_in_a_sentence(
    case: str, tiny_llama: MakeModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, arguments, sentence = REFUSED[case]
    kind, out = config.get("tokenizer", ""), tmp_path / "out"
    model = tiny_llama(
        **{key: value for key, value in config.items() if key not in ("tokenizer", "out")}
    )
    if kind is None:
        for path in model.glob("tokenizer*"):
            path.unlink()
    elif kind:
        make_other_tokenizer(kind).save_pretrained(model)
    if "out" in config:
        out.write_text("not an export")
    assert export(model, out, *arguments) == 2
    assert sentence in (error := capsys.readouterr().err), error
    assert not out.is_dir()


def make_other_tokenizer(kind: str) -> Any:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if kind == "cuts":
        vowels = pre_tokenizers.Split(Regex(r"[aeiou]+|."), "isolated")
        return train_tokenizer(
            pre_tokenizers.Sequence([vowels, pre_tokenizers.ByteLevel(use_regex=False)]), size=262
        )
    words = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")


@pytest.mark.usefixtures("without_llama_cpp")
def test_added_tokens_that_llama_cpp_does_not_print_are_named(
    tiny_llama: MakeModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers prints them: a mark of a citation, say, which is not special."""
    model = tiny_llama(vocab_size=272)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["<|cite|>", "[SRC]"])
    tokenizer.add_tokens(["<|turn|>"], special_tokens=True)
    tokenizer.save_pretrained(model)
    assert export(model, tmp_path / "out", "--gguf-pre-tokenizer", "gpt-2") == 0
    fields = gguf.GGUFReader(tmp_path / "out" / "out-F32.gguf").fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    types = dict(zip(tokens, fields["tokenizer.ggml.token_type"].contents(), strict=True))
    hidden = [
        token
        for token in ("<|cite|>", "[SRC]", "<|turn|>")
        if types[token] == gguf.TokenType.CONTROL
    ]
    printed = [
        token for token in hidden if tokenizer.decode(tokens.index(token), skip_special_tokens=True)
    ]
    assert (hidden, printed) == (["<|cite|>", "<|turn|>"], ["<|cite|>"])
    assert (
        "note: GGUF calls <|cite|> control tokens, as llama.cpp's own converter does"
        in capsys.readouterr().out
    )


@pytest.mark.usefixtures("without_llama_cpp")
def test_a_named_pre_tokenizer_is_taken_where_none_is_known(
    tiny_llama: MakeModel, tmp_path: Path
) -> None:
    model = tiny_llama(vocab_size=300)
    make_other_tokenizer("cuts").save_pretrained(model)
    assert export(model, tmp_path / "out", "--gguf-pre-tokenizer", "gpt-2") == 0
    field = gguf.GGUFReader(tmp_path / "out" / "out-F32.gguf").fields["tokenizer.ggml.pre"]
    assert field.contents() == "gpt-2"


@pytest.mark.parametrize(
    ("keys", "said"),
    [({"use_dora": True}, "use_dora"), ({"modules_to_save": ["lm_head"]}, "lm_head")],
)
def test_an_adapter_that_llama_cpp_would_apply_otherwise_is_refused(
    keys: Any, said: str, tiny_llama: MakeModel, tmp_path: Path, capsys: Any
) -> None:
    adapter = make_adapter(tiny_llama(), tmp_path / "adapter", **keys)
    assert export(adapter, tmp_path / "out", "--adapter-only") == 2
    assert (
        f"{said}" in (error := capsys.readouterr().err)
        and "llama.cpp has no adapter of this kind" in error
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@needs_llama_cpp
@pytest.mark.parametrize("name", FAMILIES)
def test_llama_cpp_says_what_transformers_says(
    name: str, shared: Path, tmp_path: Path, capsys: Any
) -> None:
    """The export compares logits and tokens itself; here greedy answers are, by llama-cpp-python's own sampling."""
    import llama_cpp

    folder, out = make_gguf_model(tmp_path / "model", name, shared), tmp_path / "out"
    assert export(folder, out, "--gguf-type", "f32") == 0, capsys.readouterr().err
    assert "under llama.cpp the same tokens, and logits within" in capsys.readouterr().out
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    f32 = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
    llama = llama_cpp.Llama(str(out / "out-F32.gguf"), n_ctx=128, n_threads=1, verbose=False, **f32)
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.no_grad():
            answer = model.generate(
                ids, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
            )[0]
        theirs: list[int] = []
        for token in llama.generate(ids[0].tolist(), temp=0.0, repeat_penalty=1.0):
            theirs.append(token)
            if len(theirs) == TOKENS:
                break
        assert theirs == answer[ids.shape[1] :].tolist(), prompt


@pytest.mark.slow
@needs_llama_cpp
def test_llama_cpp_quantizes_and_every_tensor_is_near(
    shared: Path, tmp_path: Path, capsys: Any
) -> None:
    folder, out = (
        make_gguf_model(tmp_path / "model", "qwen3", shared, hidden=256, dtype="bfloat16"),
        tmp_path / "out",
    )
    assert export(folder, out, "--gguf-type", "q8_0,q6_k,q4_k_m,q2_k") == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert sorted(path.name for path in out.glob("*.gguf")) == [
        f"out-{k}.gguf" for k in ("Q2_K", "Q4_K_M", "Q6_K", "Q8_0")
    ]
    for kind in ("Q6_K", "Q4_K_M", "Q2_K"):
        assert f"{kind}.gguf" in said and "verified: every tensor within 0." in said
        kinds = {
            tensor.tensor_type.name for tensor in read_tensors(out / f"out-{kind}.gguf").values()
        }
        assert any(each.startswith(kind[:4]) for each in kinds), kinds


@pytest.mark.slow
@needs_llama_cpp
def test_another_tensor_in_a_quantized_file_is_found(
    shared: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    folder = make_gguf_model(tmp_path / "model", "qwen3", shared, hidden=256)
    quantize = gguf_export.quantize

    def quantize_and_damage(source: Path, target: Path, file_type: str) -> None:
        quantize(source, target, file_type)
        tensor = read_tensors(target)["blk.0.ffn_down.weight"]
        with target.open("r+b") as file:
            file.seek(tensor.data_offset)
            file.write(bytes(tensor.n_bytes))

    monkeypatch.setattr(gguf_export, "quantize", quantize_and_damage)
    assert export(folder, tmp_path / "out", "--gguf-type", "q4_k_m") == 2
    assert "blk.0.ffn_down.weight: differs by 1 from the checkpoint" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@needs_llama_cpp
@pytest.mark.parametrize(
    "name", ["gpt-2", "smollm", "llama-bpe", "dbrx", "qwen2", "tekken", "gpt-4o"]
)
def test_llama_cpp_cuts_texts_as_each_known_pre_tokenizer_does(
    name: str, tmp_path: Path, capsys: Any
) -> None:
    from tokenizers import Regex, pre_tokenizers

    from finetune.export.formats.gguf_tokenizer import PRE_TOKENIZERS

    (expression, ignores_merges) = next(
        key for key, found in PRE_TOKENIZERS.items() if found == name
    )
    if "ByteLevel" in expression:
        digits = [pre_tokenizers.Digits(individual_digits=True)] if "Digits" in expression else []
        parts = [*digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    else:
        words = pre_tokenizers.Split(Regex(expression), "isolated")
        parts = [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    tokenizer = train_tokenizer(
        pre_tokenizers.Sequence(parts), ignore_merges=ignores_merges, size=900
    )
    model = make_model(tmp_path / "model", vocab_size=900)
    tokenizer.save_pretrained(model)
    assert export(model, tmp_path / "out") == 0, capsys.readouterr().err
    assert "under llama.cpp the same tokens" in capsys.readouterr().out


@pytest.mark.slow
@needs_llama_cpp
def test_the_tokenizer_of_llama_3_reads_the_same_tokens(
    shared: Path, tmp_path: Path, capsys: Any
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(shared / "tokenizers" / "llama3")
    model = make_model(tmp_path / "model", vocab_size=128256, hidden_size=32, head_dim=8)
    tokenizer.save_pretrained(model)
    assert export(model, tmp_path / "out", "--gguf-type", "bf16") == 0, capsys.readouterr().err
    assert "under llama.cpp the same tokens" in capsys.readouterr().out
    fields = gguf.GGUFReader(tmp_path / "out" / "out-BF16.gguf").fields
    assert fields["tokenizer.ggml.pre"].contents() == "llama-bpe"
    assert fields["tokenizer.chat_template"].contents() == tokenizer.chat_template


@pytest.mark.slow
@needs_llama_cpp
def test_a_published_model_whose_tokenizer_llama_cpp_reads_otherwise_is_refused(
    shared: Path, tmp_path: Path, capsys: Any
) -> None:
    """The merges of stories260k leave out pairs; without verification it is written, and continues the same ids alike."""
    import llama_cpp

    source, out = shared / "models" / "stories260k", tmp_path / "out"
    assert export(source, out) == 2
    assert "llama.cpp reads the tokens ['ver'" in capsys.readouterr().err
    assert export(source, out, "--no-verify") == 0
    assert "note: llama.cpp may cut some texts otherwise: it merges" in capsys.readouterr().out
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(source),
        AutoTokenizer.from_pretrained(source),
    )
    f32 = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
    llama = llama_cpp.Llama(str(out / "out-F32.gguf"), n_ctx=128, n_threads=1, verbose=False, **f32)
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.no_grad():
            answer = model.generate(
                ids, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False
            )[0]
        theirs = llama.create_completion(
            ids[0].tolist(), max_tokens=TOKENS, temperature=0, repeat_penalty=1.0
        )
        assert prompt + theirs["choices"][0]["text"] == tokenizer.decode(
            answer, skip_special_tokens=True
        )


@pytest.mark.slow
@needs_llama_cpp
@pytest.mark.parametrize("keys", [{}, {"use_peft": True, "lora_r": 4}], ids=["full", "lora"])
def test_a_run_is_exported_as_gguf(
    keys: Any, tiny_recipe: MakeModel, tmp_path: Path, capsys: Any
) -> None:
    recipe = tiny_recipe(export_at_end=False, **keys)
    launched = run_command(
        [sys.executable, "-m", "finetune", "launch", "--config", "single", "--recipe", str(recipe)]
    )
    assert launched.returncode == 0, launched.stderr
    assert export(tmp_path / "run", tmp_path / "out", "--gguf-type", "f32") == 0, (
        capsys.readouterr().err
    )
    assert "under llama.cpp the same tokens, and logits within" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "README.md",
        "out-F32.gguf",
    ]


PATTERNS = {"rank_pattern": {"q_proj": 8}, "alpha_pattern": {"v_proj": 3}, "use_rslora": True}


def make_adapter(model: Path, folder: Path, **keys: Any) -> Path:
    """A PEFT folder of LoRA on every linear layer, of random factors."""
    from peft import LoraConfig, get_peft_model

    keys = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "k_proj", "v_proj", "down_proj"],
    } | keys
    torch.manual_seed(1)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), LoraConfig(**keys))
    for name, parameter in adapted.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    adapted.save_pretrained(folder)
    return folder


@pytest.mark.usefixtures("without_llama_cpp")
def test_an_adapter_of_a_head_without_a_tensor_in_the_bases_gguf_is_refused(
    tiny_llama: MakeModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, out = tiny_llama(tie_word_embeddings=True), tmp_path / "out"
    assert export(base, tmp_path / "base-gguf") == 0
    (file,) = (tmp_path / "base-gguf").glob("*.gguf")
    assert "output.weight" not in read_tensors(file)  # llama.cpp would look for it
    adapter = make_adapter(base, tmp_path / "adapter", target_modules=["q_proj", "lm_head"])
    stored = adapter / "adapter_model.safetensors"
    factors = {name: each for name, each in load_file(stored).items() if ".lora_" in name}
    save_file(factors, stored)  # without the head's own weight, as our adapters are
    assert export(adapter, out, "--adapter-only") == 2
    assert (
        f"{adapter}: lm_head.weight: adapted, but a GGUF of this base has no such tensor, since it "
        "is tied to the embedding; export the merged model as GGUF"
    ) in " ".join(capsys.readouterr().err.split())
    assert not out.exists()


@pytest.mark.slow
@needs_llama_cpp
@pytest.mark.parametrize("keys", [{}, PATTERNS], ids=["plain", "patterns"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_llama_cpp_applies_the_adapter_as_peft_does(
    name: str, keys: Any, shared: Path, tmp_path: Path, capsys: Any
) -> None:
    import llama_cpp
    from peft import PeftModel

    base = make_gguf_model(tmp_path / "base", name, shared)
    adapter = make_adapter(base, tmp_path / "adapter", **keys)
    assert export(base, tmp_path / "base-gguf") == 0
    assert export(adapter, tmp_path / "out", "--adapter-only") == 0, capsys.readouterr().err
    assert "llama-server -m BASE.gguf --lora" in (said := capsys.readouterr().out), said
    f32 = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
    paths = {"model_path": str(next((tmp_path / "base-gguf").glob("*.gguf")))}
    paths["lora_path"] = str(next((tmp_path / "out").glob("*.gguf")))
    llama = llama_cpp.Llama(**paths, n_ctx=64, n_threads=1, verbose=False, logits_all=True, **f32)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    ids = torch.arange(16)[None] * 7 % 512
    with torch.no_grad():
        expected = model(ids).logits[0]
        with model.disable_adapter():
            plain = model(ids).logits[0]
    llama.eval(ids[0].tolist())
    theirs = torch.from_numpy(np.array(llama.scores[:16]))
    assert (theirs - expected).norm() / expected.norm() < 1e-4
    assert (plain - expected).norm() / expected.norm() > 0.1  # the adapter changes much


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_llama_cpps_own_converter_writes_the_same_tensors(
    name: str, shared: Path, tmp_path: Path
) -> None:
    """LLAMA_CPP_SOURCE names a folder of llama.cpp's source (its convert_hf_to_gguf.py); b7000 of November 2026 or later."""
    source = Path(os.environ.get("LLAMA_CPP_SOURCE", "absent"))
    if not (source / "convert_hf_to_gguf.py").is_file():
        pytest.skip("LLAMA_CPP_SOURCE names no folder of llama.cpp's source")
    folder, out = make_gguf_model(tmp_path / "model", name, shared), tmp_path / "out"
    assert export(folder, out, "--gguf-type", "f32", "--no-verify") == 0
    converted = run_command(
        [
            sys.executable,
            str(ROOT / "tests/export/convert_by_llama_cpp.py"),
            str(source),
            str(folder),
        ]
    )
    assert converted.returncode == 0, converted.stderr[-2000:]
    theirs, ours = read_tensors(folder / "converted.gguf"), read_tensors(out / "out-F32.gguf")
    assert theirs.keys() == ours.keys()
    for tensor, expected in theirs.items():
        assert (
            list(ours[tensor].shape) == list(expected.shape)
            and ours[tensor].tensor_type == expected.tensor_type
        )
        assert np.array_equal(ours[tensor].data, expected.data), tensor
