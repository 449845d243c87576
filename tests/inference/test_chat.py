"""`finetune chat` on what runs leave: the same answers as transformers' own, from an export, a checkpoint and an adapter."""

import io
import json
import logging
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from finetune.cli import main
from finetune.errors import printable
from finetune.inference.conversation import interruptible
from finetune.inference.inference_model import LoadOptions, load_inference_model
from finetune.inference.inputs import find_model
from tests.conftest import QuickstartRun, make_chat
from tests.inference.conftest import LORA_STEPS
from tests.ranks import ROOT, default_interrupt, environment

QUESTION = "What is 3 plus 3?"
ENOUGH = 12  # tokens of an answer


@pytest.fixture
def chat(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """`finetune chat` in this process, answering greedily: what it prints."""

    def run(*arguments: object, code: int = 0, max_new_tokens: int = ENOUGH) -> str:
        capsys.readouterr()
        options = ("--temperature", "0", "--max-new-tokens", str(max_new_tokens))
        assert main(["chat", *map(str, arguments), *options]) == code
        printed = capsys.readouterr()
        return printed.err if code else printed.out

    return run


def own_answer(model: Any, folder: Path, prompt: str = QUESTION, *, is_chat: bool = True) -> str:
    """transformers' own greedy answer; `folder` has the tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = (
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        )
        if is_chat
        else tokenizer(prompt, return_tensors="pt")
    )
    with torch.inference_mode():
        output = model.generate(
            **inputs,
            max_new_tokens=ENOUGH,
            do_sample=False,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=0,
        )
    return str(
        tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    )


def read_answers(printed: str) -> list[dict[str, str]]:
    """model -> answer, for each prompt that was answered with --json."""
    return [
        {each["model"]: each["answer"] for each in json.loads(line)["answers"]}
        for line in printed.splitlines()
    ]


def test_a_run_and_its_checkpoint_answer_as_its_export(
    quickstart_run: QuickstartRun, chat: Callable[..., str]
) -> None:
    from transformers import AutoModelForCausalLM

    run = quickstart_run.folder
    exported = AutoModelForCausalLM.from_pretrained(run / "export")
    expected = own_answer(exported, run / "export")
    assert chat(run, "--prompt", QUESTION) == printable(expected) + "\n", (
        "the answer alone, for a script"
    )
    checkpoint = run / "checkpoints" / "step-00000004"
    loaded = load_inference_model(find_model(str(checkpoint)), LoadOptions(), print).model
    weights = exported.state_dict()
    assert loaded.state_dict().keys() == weights.keys()
    assert all(torch.equal(value, weights[name]) for name, value in loaded.state_dict().items())
    assert loaded.generation_config.to_dict() == exported.generation_config.to_dict()
    (answers,) = read_answers(
        chat(run, "--compare-with", checkpoint, "--json", "--prompt", QUESTION)
    )
    assert answers == {str(run / "export"): expected, str(checkpoint): expected}
    refused = chat(run, "--compare", "--prompt", QUESTION, code=2)
    assert refused.splitlines()[-1].endswith(
        "there is no base model; name another with --compare-with"
    )


def test_a_lora_run_needs_neither_export_nor_merge(
    lora_run: Path, tmp_path: Path, chat: Callable[..., str]
) -> None:
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    base, adapter = lora_run.parent / "tiny-llama", lora_run / "adapter"
    untrained = own_answer(AutoModelForCausalLM.from_pretrained(base), base)
    trained = own_answer(AutoPeftModelForCausalLM.from_pretrained(adapter), adapter)
    assert trained != untrained
    shown = chat(lora_run, "--compare", "--prompt", QUESTION)
    assert shown == printable(f"base:\n{untrained}\ntrained:\n{trained}\n"), (
        "the base is the base, not the adapter"
    )

    running = shutil.copytree(
        lora_run, tmp_path / "run", ignore=shutil.ignore_patterns("adapter", "export")
    )
    checkpoint = running / "checkpoints" / f"step-{LORA_STEPS:08d}"
    (answers,) = read_answers(chat(running, "--compare", "--json", "--prompt", QUESTION))
    assert answers == {str(base): untrained, str(checkpoint): trained}

    moved = base.rename(tmp_path / "elsewhere")
    try:
        refused = chat(lora_run, "--prompt", QUESTION, code=2)
        assert "the base model's folder is gone; name its new place with --base-model" in refused
        (answers,) = read_answers(
            chat(lora_run, "--compare", "--base-model", moved, "--json", "--prompt", QUESTION)
        )
        assert answers == {str(moved): untrained, str(adapter): trained}
    finally:
        moved.rename(base)


def test_an_adapter_stops_where_its_checkpoint_does_and_so_does_what_it_is_merged_into(
    lora_run: Path, tmp_path: Path
) -> None:
    """At the recipe's eot_tokens too, of which the base's generation_config.json has none."""
    from gguf import GGUFReader
    from transformers import AutoTokenizer, GenerationConfig

    adapter = shutil.copytree(lora_run / "adapter", tmp_path / "copied")
    tokenizer = AutoTokenizer.from_pretrained(adapter)
    eot_id = tokenizer.convert_tokens_to_ids("<|user|>")
    expected = GenerationConfig.from_pretrained(lora_run / "export").eos_token_id
    assert expected == [eot_id, tokenizer.eos_token_id]
    for place in (adapter, lora_run / "checkpoints" / f"step-{LORA_STEPS:08d}"):
        loaded = load_inference_model(find_model(str(place)), LoadOptions(), print)
        assert loaded.model.generation_config.eos_token_id == expected
    merge = ["export", str(adapter), "--no-verify", "--format", "safetensors,gguf", "--output"]
    assert main([*merge, str(tmp_path / "merged")]) == 0
    assert GenerationConfig.from_pretrained(tmp_path / "merged").eos_token_id == expected
    (file,) = (tmp_path / "merged").glob("*.gguf")
    assert GGUFReader(file).fields["tokenizer.ggml.eot_token_id"].contents() == eot_id


def test_a_qlora_run_says_in_which_form_its_base_is_loaded(
    lora_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(lora_run, tmp_path / "run")
    command = ["chat", str(run), "--prompt", QUESTION, "--max-new-tokens", "1"]
    assert main(command) == 0
    assert f"model   {run / 'adapter'} on cpu\n" in capsys.readouterr().err
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe | {"load_in_4bit": True}))
    assert main(command) == 0
    loaded = (
        f"model   {run / 'adapter'} on cpu; base loaded in float32, trained on in 4 bits (nf4)\n"
    )
    assert loaded in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tokens", "keys"),
    [
        (272, {"modules_to_save": ["embed_tokens", "lm_head"]}),
        (256, {"modules_to_save": ["embed_tokens", "lm_head"]}),
        (272, {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}),
    ],
    ids=["more", "fewer", "adapted"],
)
def test_an_adapter_of_another_vocabulary(
    tokens: int, keys: dict[str, Any], tiny_llama: Callable[..., Path], tmp_path: Path
) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base, adapter = tiny_llama(), tmp_path / "adapter"
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(tokens)
    config = LoraConfig(**{"target_modules": ["q_proj"], "task_type": "CAUSAL_LM"} | keys)
    trained = get_peft_model(model, config)
    trained.save_pretrained(adapter)
    AutoTokenizer.from_pretrained(base).save_pretrained(adapter)
    loaded = load_inference_model(find_model(str(adapter)), LoadOptions(), print)
    ids = torch.tensor([[5, tokens - 2, 7]])
    with torch.inference_mode():
        assert torch.equal(loaded.model(ids).logits, trained.eval()(ids).logits)
    assert loaded.has_adapter


def test_an_adapter_with_settings_and_no_vocabulary_is_asked_with_its_bases_tokenizer(
    tiny_llama: Callable[..., Path], tmp_path: Path
) -> None:
    """So it is exported, too."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base, adapter = tiny_llama(), tmp_path / "adapter"
    model = AutoModelForCausalLM.from_pretrained(base)
    get_peft_model(model, LoraConfig(target_modules=["q_proj"])).save_pretrained(adapter)
    shutil.copy(base / "tokenizer_config.json", adapter)
    loaded = load_inference_model(find_model(str(adapter)), LoadOptions(), print)
    assert loaded.tokenizer.get_vocab() == AutoTokenizer.from_pretrained(base).get_vocab()


def test_an_adapter_of_the_hub_as_peft_saves_it(
    tiny_llama: Callable[..., Path],
    tmp_path: Path,
    chat: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its tokenizer is the base's, and its revision not one of another base, which the command names."""
    from huggingface_hub import constants
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    places = []
    for name in ("base", "adapter"):
        cached = tmp_path / f"models--me--{name}"
        (cached / "refs").mkdir(parents=True)
        (cached / "refs" / "main").write_text("0" * 40)
        places.append(cached / "snapshots" / ("0" * 40))
    base, adapter = places
    shutil.copytree(tiny_llama(), base)
    config = LoraConfig(target_modules=["q_proj"], revision="v1", init_lora_weights=False)
    trained = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    trained.peft_config["default"].base_model_name_or_path = "me/another"
    trained.save_pretrained(adapter)
    answer = chat("me/adapter", "--base-model", "me/base", "--prompt", QUESTION)
    assert answer == f"{own_answer(trained.eval(), base)}\n"


def test_a_base_in_four_bits_of_any_width(
    tiny_llama: Callable[..., Path],
    tmp_path: Path,
    chat: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On CPUs with bf16 instructions, bitsandbytes has a kernel that takes only some widths."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    # another test's reference (tests/training/reference.py) replaces it
    own_product = bitsandbytes.autograd._functions.matmul_4bit
    monkeypatch.setattr(bitsandbytes, "matmul_4bit", own_product)
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    plain, folder = tiny_llama(intermediate_size=172), tmp_path / "stored"
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=settings)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(plain).save_pretrained(folder)
    answer = chat(folder, "--prompt", QUESTION)
    assert answer == f"{own_answer(model.train(), folder)}\n"  # the kernel is not used in training


def test_prompts_of_a_file_and_of_a_pipe(
    tiny_llama: Callable[..., Path],
    tmp_path: Path,
    chat: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_llama()
    rows: list[dict[str, Any]] = [
        {"prompt": QUESTION},
        {"question": QUESTION, "answer": "6"},
        {"instruction": "What is 3", "input": "plus 3?", "history": [["Hi", "Hello"]]},
        json.loads(make_chat(tmp_path / "chat.jsonl", rows=1).read_text()),
    ]
    rows[3]["messages"] = json.dumps(rows[3]["messages"])
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    printed = chat(model, "--prompts", file, "--system", "Be brief.", "--json").splitlines()
    asked = [json.loads(line)["messages"] for line in printed]
    system = {"role": "system", "content": "Be brief."}
    contents = [QUESTION, QUESTION, "What is 3\n\nplus 3?", "What is 0 plus 0?"]
    expected = [[system, {"role": "user", "content": content}] for content in contents]
    expected[2][1]["input"] = "plus 3?"  # as training gives it to a template that reads it
    expected[2][1:1] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
    ]
    assert asked == expected
    (answer,) = json.loads(printed[0])["answers"]
    assert answer["is_cut"] is (answer["tokens"] == ENOUGH)

    (tmp_path / "lines.txt").write_text(f"{QUESTION}\n\nAnd 4?\n")
    assert chat(model, "--prompts", tmp_path / "lines.txt").startswith(f"> {QUESTION}\n")
    for text, wrong in (
        ('{"score": 1}\n', ":1: no prompt; its columns are score, and one of messages, prompt, "),
        (
            '{"messages": [{"role": "assistant", "content": "Hi."}]}\n',
            ":1: messages: nothing is asked before ",
        ),
        ("", ": holds no prompts"),
    ):
        file.write_text(text)
        assert chat(model, "--prompts", file, code=2).startswith(f"{file}{wrong}")

    monkeypatch.setattr("sys.stdin", io.StringIO(f"{QUESTION}\n"))
    assert chat(model) == chat(model, "--prompt", QUESTION)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert chat(model, code=2).startswith(
        "stdin: empty, and no terminal to ask at; give a prompt with "
    )


def test_a_prompt_that_is_not_utf8_is_refused_before_loading(
    tmp_path: Path, chat: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")  # no weights: nothing could be loaded
    raw = b"caf\xe9 \xff"
    (tmp_path / "prompts.txt").write_bytes(raw)
    reason = "not UTF-8: invalid continuation byte at byte 4"
    assert (
        chat(tmp_path, "--prompts", tmp_path / "prompts.txt", code=2)
        == f"{tmp_path / 'prompts.txt'}:1: {reason}; save it as UTF-8\n"
    )
    argument = raw.decode("utf-8", "surrogateescape")  # as in sys.argv
    assert chat(tmp_path, "--prompt", argument, code=2) == f"--prompt: {reason}\n"
    assert (
        chat(tmp_path, "--prompt", QUESTION, "--system", argument, code=2)
        == f"--system: {reason}\n"
    )
    for errors in ("strict", "surrogateescape"):  # what Python chooses by the locale
        monkeypatch.setattr(
            "sys.stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8", errors=errors)
        )
        assert chat(tmp_path, code=2) == f"stdin: {reason}\n"


def test_a_line_that_is_not_utf8_is_typed_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from finetune.inference.conversation import read_turn

    for errors in ("strict", "surrogateescape"):
        monkeypatch.setattr(
            "sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9 \xff\n"), "utf-8", errors)
        )
        assert read_turn() is None
        assert capsys.readouterr().err.startswith("this line: not UTF-8: invalid continuation byte")


def test_options_that_contradict_each_other_are_refused(chat: Callable[..., str]) -> None:
    for options in (
        ("--prompt", "a", "--prompts", "b.txt"),
        ("--chat-template", "plain", "--no-chat-template"),
    ):
        with pytest.raises(SystemExit, match="2"):
            chat("model", *options)


@pytest.mark.slow
def test_without_a_chat_template_it_asks_as_the_run_was_trained(
    tiny_llama: Callable[..., Path],
    tmp_path: Path,
    chat: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    from transformers import AutoModelForCausalLM

    model = tiny_llama()
    with_template = chat(model, "--prompt", QUESTION)
    template = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").unlink()
    said = chat(model, "--prompt", QUESTION, code=2)
    assert said.splitlines()[-1].startswith(
        f"{model}: has no chat template; name one with --chat-template ("
    )
    assert chat(model, "--prompt", QUESTION, "--chat-template", template) == with_template
    continued = own_answer(AutoModelForCausalLM.from_pretrained(model), model, is_chat=False)
    assert chat(model, "--prompt", QUESTION, "--no-chat-template") == printable(continued) + "\n"
    refused = chat(
        model, "--prompt", QUESTION, "--chat-template", "{{ raise_exception('no turns') }}", code=2
    )
    assert refused.splitlines()[-1] == f"{model}: the chat template rejects it: no turns"

    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.yaml").write_text(f"model_name_or_path: {model}\n")
    model.rename(run / "export")
    for formats, expected in ((["prompt_completion"], continued), (["messages"], None)):
        (run / "data_report.json").write_text(json.dumps({"sources": [{"formats": formats}]}))
        answered = chat(run, "--prompt", QUESTION)
        plain = chat(run, "--prompt", QUESTION, "--chat-template", "plain")
        assert answered == (plain if expected is None else printable(expected) + "\n")

    (run / "export" / "chat_template.jinja").write_text(template)
    capsys.readouterr()
    for formats, is_plain in ((["preference"], False), (["preference_text"], True)):
        (run / "data_report.json").write_text(json.dumps({"sources": [{"formats": formats}]}))
        assert main(["chat", str(run), "--prompt", QUESTION]) == 0
        assert ("without its chat template" in capsys.readouterr().err) == is_plain


@pytest.mark.parametrize("option", [("--compare",), ("--compare-with", "base")])
def test_a_run_on_text_and_its_base_without_a_template_continue_the_same_prompt(
    option: Sequence[str],
    tiny_llama: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    chat: Callable[..., str],
) -> None:
    base = tiny_llama().rename(tmp_path / "base")
    (base / "chat_template.jinja").unlink()
    run = tmp_path / "run"
    shutil.copytree(base, run / "export")
    (run / "recipe.yaml").write_text(f"model_name_or_path: {base}\n")
    (run / "data_report.json").write_text(json.dumps({"sources": [{"formats": ["text"]}]}))
    monkeypatch.chdir(tmp_path)
    (answered,) = map(json.loads, chat(run, *option, "--prompt", QUESTION, "--json").splitlines())
    first, second = answered["answers"]
    assert first["answer"] == second["answer"]


def test_what_cannot_be_talked_to_is_one_sentence(
    tiny_llama: Callable[..., Path], tmp_path: Path, chat: Callable[..., str]
) -> None:
    model, run, empty = tiny_llama(), tmp_path / "started", tmp_path / "empty"
    run.mkdir()
    empty.mkdir()
    (run / "recipe.yaml").write_text("seed: 1\n")
    ask, gguf = ("--prompt", QUESTION), tmp_path / "model.gguf"
    gguf.touch()
    long = "word " * 500
    for arguments, message in (
        ((tmp_path / "gone", *ask), f"{tmp_path / 'gone'}: no such folder; give a run's folder"),
        (
            (model / "config.json", *ask),
            f"{model / 'config.json'}: a file; give the folder that holds it",
        ),
        ((run, *ask), f"{run}: has no export and no checkpoint yet; train on, or name another run"),
        ((empty, *ask), f"{empty}: nothing to export: "),
        ((gguf, *ask), f"{gguf}: a GGUF file; chat with it in llama.cpp or Ollama"),
        (
            ("owner/name", *ask),
            "owner/name: config.json is not on this machine and HF_HUB_OFFLINE is set",
        ),
        (
            (model, *ask, "--compare"),
            f"{model}: does not say which model it was trained from; name it with ",
        ),
        ((model, *ask, "--top-p", "0"), "--top-p 0.0: above 0 and at most 1 is expected"),
        (
            (model, *ask, "--system", "S", "--no-chat-template"),
            "--system: goes through the chat template",
        ),
        ((model, "--prompt", long), f"{model}: the conversation has "),
        (
            (model, "--prompts", tmp_path / "gone.txt"),
            f"{tmp_path / 'gone.txt'}: cannot be read: No such file",
        ),
    ):
        assert chat(*arguments, code=2).splitlines()[-1].startswith(message), arguments
    (tmp_path / "checkpoints").mkdir()
    os.truncate(model / "model.safetensors", 10_000)
    said = chat(model, *ask, code=2).splitlines()[-1]
    assert said.startswith(f"{model / 'model.safetensors'}: ")
    assert said.endswith(
        f"again, or export it again: finetune export {tmp_path} --output {model} --overwrite"
    )


def test_odd_settings_of_a_model_are_one_answer_or_one_sentence(
    tiny_llama: Callable[..., Path], chat: Callable[..., str]
) -> None:
    model = tiny_llama()
    settings = model / "generation_config.json"
    ask = (model, "--prompt", QUESTION, "--json")
    plain = read_answers(chat(*ask))
    for several in (
        {"num_return_sequences": 3, "do_sample": True},
        {"num_beams": 4},
        {"return_dict_in_generate": True},
    ):
        settings.write_text(json.dumps(several))
        assert read_answers(chat(*ask)) == plain, several
    for odd in ({"repetition_penalty": -1}, {"forced_eos_token_id": "x"}, {"guidance_scale": "x"}):
        settings.write_text(json.dumps(odd))
        assert (
            chat(*ask, code=2)
            .splitlines()[-1]
            .startswith(f"{model}: generation_config.json: cannot be used: ")
        ), odd


def test_a_prompt_that_is_too_long_ends_only_its_own_answer(
    tiny_llama: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And an answer that is cut where the model can read no further says so, instead of advising more tokens."""
    logged = io.StringIO()
    transformers = logging.getLogger("transformers")
    monkeypatch.setattr(transformers, "handlers", [logging.StreamHandler(logged)])
    model = tiny_llama(max_position_embeddings=48)
    (tmp_path / "prompts.txt").write_text(f"{'word ' * 50}\nHi\n")
    arguments = [
        "chat",
        str(model),
        "--prompts",
        str(tmp_path / "prompts.txt"),
        "--json",
        "--temperature",
        "0",
    ]
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert "Token indices" not in shown.err + logged.getvalue(), (
        "our sentence alone, no warning of a library before it"
    )
    first, second = (json.loads(line)["answers"][0] for line in shown.out.splitlines())
    assert "and the model reads 48 at most" in first["error"] and second["tokens"] > 0
    assert shown.err.splitlines()[-1].startswith(f"prompt 1: {model}: the conversation has ")

    from finetune.inference.conversation import Answer, AnswerOptions, finish_answer

    finish_answer(Answer("It", 3, is_cut=True, limit=48), AnswerOptions())
    said = capsys.readouterr().out
    assert (
        "cut after 3 tokens: the conversation has reached the 48 tokens that the model reads; /new starts over"
        in said
    )


def test_a_long_answer_does_not_change_the_next_one(tiny_llama: Callable[..., Path]) -> None:
    """transformers' dynamic RoPE keeps the frequencies of the longest text that it has seen."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    location = find_model(
        str(tiny_llama("dynamic", max_position_embeddings=64, rope_parameters=rope))
    )
    model = load_inference_model(location, LoadOptions(), print)

    def ids_of(length: int) -> torch.Tensor:
        return (torch.arange(length)[None] * 7) % model.model.config.vocab_size

    with torch.no_grad():
        first = model.model(ids_of(80)).logits
        model.model(ids_of(120))
        assert torch.equal(model.model(ids_of(80)).logits, first)


def test_ctrl_c_stops_an_answer_and_keeps_what_there_is(tiny_llama: Callable[..., Path]) -> None:
    from finetune.inference.conversation import AnswerOptions, answer
    from finetune.inference.inputs import make_prompt

    model = load_inference_model(find_model(str(tiny_llama())), LoadOptions(), print)
    pieces: list[str] = []

    def write(piece: str) -> None:
        pieces.append(piece)
        if len(pieces) == 3:
            signal.raise_signal(signal.SIGINT)

    torch.manual_seed(0)
    before = signal.getsignal(signal.SIGINT)
    stopped = answer(
        model,
        make_prompt(QUESTION, None),
        AnswerOptions(max_new_tokens=400, temperature=1.0),
        write,
    )
    assert stopped.is_interrupted
    assert 3 <= stopped.tokens < 20
    assert stopped.text == "".join(pieces)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.slow
def test_a_conversation_at_a_terminal(tiny_llama: Callable[..., Path], tmp_path: Path) -> None:
    """Through a real terminal: two turns, the commands, Ctrl-C at the prompt, and Ctrl-D."""
    command = [
        sys.executable,
        "-m",
        "finetune",
        "chat",
        str(tiny_llama()),
        "--max-new-tokens",
        "8",
        "--temperature",
        "0",
    ]
    terminal, inner = pty.openpty()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment() | {"TERM": "dumb"},
        stdin=inner,
        stdout=inner,
        stderr=inner,
        start_new_session=True,
        preexec_fn=default_interrupt,
    )
    os.close(inner)
    said = screens(terminal)
    try:
        assert "/help lists the commands, Ctrl-D ends" in next(said)
        for typed, shown in (
            (f"{QUESTION}\n", "[cut after 8 tokens; --max-new-tokens allows more]"),
            ("/help\n", "start over, with this system message"),
            ("/nothing\n", "/nothing: no such command; /help lists them"),
            ("/system Be brief.\n", "a new conversation"),
            ("/image docs/report.png\n", "docs/report.png"),
            ("/new\n", "a new conversation"),
            (
                f"{QUESTION}\n",
                "[cut after 8 tokens",
            ),  # without the image, which this model would refuse
            ("/new\n", "a new conversation"),
            (f"{'word ' * 200}\n", "tokens, and the model reads 512 at most"),
        ):
            os.write(terminal, typed.encode())
            assert shown in next(said)
        time.sleep(
            0.5
        )  # a person's; readline sees a signal between its prompt and its first wait only at the next key
        process.send_signal(signal.SIGINT)
        assert "Ctrl-D or /exit ends the conversation" in next(said)
        os.write(terminal, b"\x04")
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def screens(terminal: int) -> Iterator[str]:
    """What is shown up to each new prompt."""
    shown = ""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if not select.select([terminal], [], [], 1.0)[0]:
            continue
        shown += os.read(terminal, 65536).decode(errors="replace")
        if shown.endswith("> "):
            yield shown
            shown = ""
    raise AssertionError(f"no prompt within 120 s after {shown!r}")


def test_outside_the_main_thread_no_signal_is_asked_for() -> None:
    """As in the handler of a web page."""
    with ThreadPoolExecutor(1) as pool, interruptible() as pressed:
        assert (
            not pool.submit(lambda: interruptible().__enter__().is_set()).result()
            and not pressed.is_set()
        )
