"""`finetune inspect` from the command line, and the examples of docs/data.md and docs/chat-templates.md."""

import html
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from finetune.cli import main
from finetune.config.reader import read_recipe
from finetune.data.examples import Example as TokenExample
from finetune.data.findings import CHECKS
from finetune.data.inspect import decode_tokens
from finetune.data.tokenizer import load_tokenizer
from finetune.errors import EXIT_USER_ERROR
from tests.ranks import ROOT, environment

PAGES = [ROOT / "docs" / f"{name}.md" for name in ("data", "chat-templates", "findings")]
PAGE = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
HEAD = f"""
model_config: {{model_type: llama}}
tokenizer_name_or_path: {ROOT / "recipes" / "quickstart"}
dataset_cache_dir: cache
"""


@dataclass
class Example:
    """Files, a piece of a recipe, and what `finetune inspect` prints for them."""

    title: str
    files: dict[str, str] = field(default_factory=dict)
    recipe: str = ""
    printed: str = ""


def examples() -> list[Example]:
    """The examples of the page: blocks with a file's name, then yaml, then text."""
    found, current = [], Example("")
    for heading, language, name, body in re.findall(
        r"^#+ ([^\n]+)$|^```(\w+)(?: (\S+))?\n(.*?)^```$", PAGE, re.M | re.S
    ):
        if heading:
            current = Example(heading)
        elif name:
            current.files[name] = body
        elif language == "yaml":
            current.recipe = body
        elif language == "text":
            current.printed = body.rstrip("\n")
            found.append(current)
            current = Example(f"{current.title}, again")
    return found


@pytest.mark.parametrize("example", examples(), ids=lambda example: example.title)
def test_the_page_shows_what_inspect_prints(
    example: Example,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in example.files.items():
        Path(name).write_text(content)
    Path("recipe.yaml").write_text(HEAD + example.recipe)
    assert main(["inspect", "--recipe", "recipe.yaml"]) == 0
    assert example.printed in capsys.readouterr().out


def test_the_page_lists_every_finding() -> None:
    for name, check in CHECKS.items():
        assert f"| `{name}` | {check.what} | {check.some} | {check.every} |" in PAGE


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text(
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": "Hi\x1b[2J"},
                    {"role": "assistant", "content": "Hé 🙂"},
                ]
            }
        )
        + "\n"
    )
    path = tmp_path / "recipe.yaml"
    path.write_text(HEAD + "datasets:\n  - path: a.jsonl\n")
    return path


def test_json_holds_every_token_with_its_mask(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", "--recipe", str(recipe), "--json"]) == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    (row,) = printed["rows"]
    assert row["where"] == "a.jsonl:1"
    assert (
        "".join(token["text"] for token in row["tokens"] if token["trained"])
        == "Hé 🙂<|end_of_turn|>"
    )
    assert printed["report"]["trained_tokens"] == sum(token["trained"] for token in row["tokens"])
    assert printed["report"]["tokens"] == len(row["tokens"])


@pytest.mark.parametrize("overlength", ["split", "truncate"])
def test_every_trained_token_of_a_cut_example_is_counted(
    recipe: Path, overlength: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("a.jsonl").write_text(json.dumps({"text": "one two three four five six seven"}) + "\n")
    with recipe.open("a") as file:
        file.write(f"max_length: 4\noverlength: {overlength}\n")
    assert main(["inspect", "--recipe", str(recipe), "--json"]) == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    ids = [[token["id"] for token in row["tokens"]] for row in printed["rows"]]
    counts = [sum(token["trained"] for token in row["tokens"]) for row in printed["rows"]]
    after = [row["next_token_id"] for row in printed["rows"] if "next_token_id" in row]
    assert printed["report"]["trained_tokens"] == sum(counts) + len(after)
    assert len(after) >= 1 and after[: len(ids) - 1] == [part[0] for part in ids[1:]]
    assert main(["inspect", "--recipe", str(recipe), "--rows", "1"]) == 0
    head = capsys.readouterr().out.splitlines()[0]
    assert head == "example 0, a.jsonl:1: 4 tokens, 4 trained, the last of them after the end shown"
    for length, is_cut in ((4, True), (400, False)):
        assert main(["inspect", "--recipe", str(recipe), "--turns", f"max_length={length}"]) == 0
        assert (
            "turns of the whole row, which max_length cuts" in capsys.readouterr().out
        ) is is_cut


def test_examples_are_selected_by_the_numbers_that_a_run_reports(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [json.dumps({"prompt": str(i), "completion": f"answer {i}"}) for i in range(5)]
    (recipe.parent / "a.jsonl").write_text("\n".join(rows))
    assert main(["inspect", "--recipe", str(recipe), "--json", "--examples", "3,1"]) == 0
    assert [row["where"] for row in json.loads(capsys.readouterr().out)["rows"]] == [
        "a.jsonl:4",
        "a.jsonl:2",
    ]
    for arguments, said in (
        (["--examples", "5"], "--examples 5: there are 5 examples, numbered from 0"),
        (["--examples", "a"], "--examples a: not numbers with commas between, such as 169,120"),
        (["--rows", "-1"], "--rows -1: not a count of examples; 0 shows the report alone"),
    ):
        assert main(["inspect", "--recipe", str(recipe), *arguments]) == EXIT_USER_ERROR
        assert said in capsys.readouterr().err


def test_a_fatal_finding_is_shown_and_sets_the_exit_code(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with recipe.open("a") as file:
        file.write("chat_template: '{% for m in messages %}{{ m.content }}{% endfor %}'\n")
    assert main(["inspect", "--recipe", str(recipe)]) == EXIT_USER_ERROR
    assert "fatal: no_end_of_turn: in 1 of 1 row " in capsys.readouterr().out


@pytest.mark.slow
def test_on_a_terminal_it_is_colored_and_the_data_cannot_control_it(recipe: Path) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "finetune", "inspect", "--recipe", str(recipe)],
        stdout=theirs,
        stderr=subprocess.PIPE,
        cwd=recipe.parent,
        env={key: value for key, value in environment().items() if key != "NO_COLOR"},
    )
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 65536):
            shown += chunk
    except OSError:  # a pseudo-terminal whose other end is closed
        pass
    assert process.wait(60) == 0
    text = shown.decode()
    assert "\x1b[2J" not in text and "␛[2J" in re.sub(r"\x1b\[[0-9;]*m", "", text)
    green = "".join(re.findall(r"\x1b\[1;9?[23]2?m(.*?)\x1b\[0m", text, re.S))
    assert green == "Hé 🙂<|end_of_turn|>"


def test_a_stream_shows_its_first_block(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finetune.data.prepare.BLOCK_ROWS", 64)
    with recipe.open("a") as file:
        file.write("streaming: true\nmax_steps: 3\n")
    shutil.copy(recipe.parent / "a.jsonl", recipe.parent / "b.jsonl")
    both = "datasets=[{path: a.jsonl}, {path: b.jsonl}]"
    assert main(["inspect", "--recipe", str(recipe), "--rows", "1", both]) == 0
    shown = capsys.readouterr().out
    assert "example 0, a.jsonl:1" in shown and "examples" in shown
    assert "\na.jsonl, b.jsonl: " in shown
    assert not list((recipe.parent / "cache").rglob("block-000000"))


def test_the_held_out_rows_of_a_stream_are_read(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with recipe.open("a") as file:
        file.write("streaming: true\nmax_steps: 3\neval_datasets: [{path: held_out.jsonl}]\n")
    Path("held_out.jsonl").write_text('{"text": "Hi"}\n')
    assert main(["inspect", "--recipe", str(recipe)]) == 0
    assert "held out: held_out.jsonl: 1 row read" in capsys.readouterr().out
    Path("held_out.jsonl").write_text('{"message": "what is this"}\n')
    assert main(["inspect", "--recipe", str(recipe)]) == EXIT_USER_ERROR
    assert "held_out.jsonl:1: unknown format" in capsys.readouterr().err


@pytest.mark.parametrize("replaced", ["datasets", "eval_datasets"])
def test_what_launch_refuses_of_images_is_shown(
    replaced: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether the rows with images are trained on or held out; the others are of text alone."""
    (tmp_path / "text.jsonl").write_text('{"text": "red"}\n')
    overrides = [
        "attn_implementation=eager",
        f"dataset_cache_dir={tmp_path}",
        f"{replaced}=[{{path: {tmp_path}/text.jsonl}}]",
    ]
    arguments = ["inspect", "--recipe", "quickstart_vision", "--rows", "0", *overrides]
    assert main(arguments) == EXIT_USER_ERROR
    printed = capsys.readouterr().out
    assert "attn_implementation: eager: does not keep packed documents" in printed


def test_the_spaces_of_sentencepiece_are_kept() -> None:
    words = [
        "<unk>",
        "▁Natalia",
        "▁sold",
        "▁",
        "4",
        "8",
        "▁clips",
        *(f"<0x{byte:02X}>" for byte in range(256)),
    ]
    vocabulary = {word: index for index, word in enumerate(words)}
    bpe = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    bpe.pre_tokenizer = pre_tokenizers.Metaspace()
    bpe.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    pieces = [
        "▁Natalia",
        "▁sold",
        "▁",
        "4",
        "8",
        "▁clips",
        "<0x0A>",
        "▁",
        *(f"<0x{b:02X}>" for b in "🙂".encode()),
    ]
    ids = np.array([vocabulary[piece] for piece in pieces], dtype=np.int32)
    texts = decode_tokens(TokenExample(ids, ids), PreTrainedTokenizerFast(tokenizer_object=bpe))
    assert texts == ["Natalia", " sold", " ", "4", "8", " clips", "\n", " ", "", "", "", "🙂"]


def test_a_file_is_shown_without_a_recipe(
    recipe: Path, tiny_llama: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", "a.jsonl", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["rows"][0]["where"] == "a.jsonl:1" and printed["warnings"] == []
    model = str(tiny_llama())
    assert main(["inspect", "--model", model, "a.jsonl", "max_length=60"]) == 0
    assert "<|user|>" in capsys.readouterr().out
    assert main(["inspect", "--model", model, "--packing", "a.jsonl"]) == 0, "no value of a switch"
    assert "<|user|>" in capsys.readouterr().out
    assert main(["inspect", "recipe.yaml"]) == EXIT_USER_ERROR
    assert (
        capsys.readouterr().err
        == "recipe.yaml: not a data file; for a recipe write --recipe recipe.yaml\n"
    )


def test_a_page_is_not_written_over_the_data(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = Path("a.jsonl").read_bytes()
    assert main(["inspect", "a.jsonl", "--html", "a.jsonl"]) == EXIT_USER_ERROR
    assert capsys.readouterr().err.startswith("--html: a.jsonl: a page's name ends in .html")
    assert Path("a.jsonl").read_bytes() == data
    assert main(["inspect", "a.jsonl", "--html", "page.HTM"]) == 0


def test_what_launch_would_report_about_the_model_is_shown(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = recipe.read_text()
    recipe.write_text(
        text.replace("model_type: llama", "model_type: llama, max_position_embeddings: 8")
    )
    assert main(["inspect", "--recipe", str(recipe)]) == 0
    out = capsys.readouterr().out
    assert (
        "warning: examples have up to " in out and "but the model was made for 8 positions" in out
    )
    assert "no problems found" not in out
    recipe.write_text(text.replace("model_type: llama", "model_type: llama, vocab_size: 100"))
    assert main(["inspect", "--recipe", str(recipe)]) == EXIT_USER_ERROR
    (fatal,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("fatal: ")]
    assert fatal.startswith(f"fatal: {recipe}:")
    assert "model_config: its embedding has 100 rows, but the tokenizer has " in fatal


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 / (messages | length - 1) }}",
        "{{ 1e308 * 10 | int }}{{ (10.0 ** 400) }}",
        "{{ 'a' * 2 ** 62 }}",
    ],
)
def test_failed_arithmetic_in_a_template_is_an_error_message(
    recipe: Path, template: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with recipe.open("a") as file:
        file.write(f"chat_template: {json.dumps(template)}\n")
    Path("a.jsonl").write_text('{"messages": [{"role": "assistant", "content": "Hi"}]}\n')
    assert main(["inspect", "--recipe", str(recipe)]) == EXIT_USER_ERROR
    assert "a.jsonl:1: the chat template rejects it: " in capsys.readouterr().err


def test_a_surrogate_in_the_name_of_a_column_is_an_error_message(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("a.jsonl").write_text('{"text": "a", "\\ud800": 1}\n{"\\udfff": "b"}\n')
    assert main(["inspect", "--recipe", str(recipe)]) == EXIT_USER_ERROR
    err = capsys.readouterr().err
    assert "a.jsonl:1: not valid Unicode: " in err and "a.jsonl:2: not valid Unicode: " in err


def test_keys_of_messages_that_the_template_does_not_read_are_named(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with recipe.open("a") as file:
        file.write("chat_template: qwen3\n")
    question = {"role": "user", "content": "Hi", "reasoning_content": "Shall I ask?"}
    answer = {"role": "assistant", "content": "Hi", "reasoning_content": "I greet.", "mood": "glad"}
    Path("a.jsonl").write_text(json.dumps({"messages": [question, answer]}) + "\n")
    main(["inspect", "--recipe", str(recipe), "--rows", "0"])
    out = capsys.readouterr().out
    assert (
        "  unused columns: reasoning_content of messages (1 row), mood of messages (1 row)\n" in out
    )


@pytest.mark.parametrize("written", ["m.mood + m['content']", "m | tojson"])
def test_a_template_that_writes_a_key_of_messages_reads_it(
    recipe: Path, written: str, capsys: pytest.CaptureFixture[str]
) -> None:
    template = f"{{% for m in messages %}}{{{{ {written} }}}}{{% endfor %}}"
    with recipe.open("a") as file:
        file.write(f"chat_template: {json.dumps(template)}\nassistant_only_loss: false\n")
    messages = [{"role": role, "content": "Hi", "mood": "glad"} for role in ("user", "assistant")]
    Path("a.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    main(["inspect", "--recipe", str(recipe), "--rows", "0"])
    out = capsys.readouterr().out
    assert "1 row read" in out and "unused columns" not in out


def test_a_column_name_that_breaks_the_line_is_quoted(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("a.jsonl").write_text('{"text": "a", "b\\nfatal: c": 1}\n')
    assert main(["inspect", "--recipe", str(recipe), "--rows", "0"]) == 0
    assert "  unused columns: 'b\\nfatal: c' (1 row)\n" in capsys.readouterr().out
    Path("a.jsonl").write_text('{"b\\nfatal: c": 1}\n')
    assert main(["inspect", "--recipe", str(recipe)]) == EXIT_USER_ERROR
    assert "its columns are 'b\\nfatal: c'; known formats:" in capsys.readouterr().err


def test_the_prompt_of_each_turn_stands_beside_what_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `apply_chat_template` gives it; in the terminal, as JSON and as a page."""
    monkeypatch.chdir(tmp_path)
    messages = [
        {"role": "user", "content": "<b>One</b>?"},
        {"role": "assistant", "content": "one", "reasoning_content": "hm"},
        {"role": "user", "content": "Two?"},
        {"role": "assistant", "content": "two", "reasoning_content": "so"},
    ]
    Path("a.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    keys = 'chat_template: qwen3\nadded_tokens: ["<|im_start|>", "<|im_end|>"]\neot_tokens: ["<|im_end|>"]\n'
    Path("recipe.yaml").write_text(HEAD + keys + "datasets:\n  - path: a.jsonl\n")
    tokenizer = load_tokenizer(read_recipe("recipe.yaml").model, read_recipe("recipe.yaml").data)
    prompts = [
        tokenizer.apply_chat_template(messages[:end], add_generation_prompt=True, tokenize=False)
        for end in (1, 3)
    ]
    asked = ["inspect", "--recipe", "recipe.yaml", "--turns"]
    assert main([*asked, "--json", "--html", "page.html"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [turn["prompt"] for turn in rows[0]["turns"]] == prompts
    texts = ["<think>\nhm\n</think>\n\none<|im_end|>", "<think>\nso\n</think>\n\ntwo<|im_end|>"]
    assert [turn["answer"] for turn in rows[0]["turns"]] == [
        [{"text": text, "trained": True}] for text in texts
    ]
    page = Path("page.html").read_text()
    columns = [
        html.unescape(re.sub("<[^>]*>", "", part))
        for part in re.findall("<pre>(.*?)</pre>", page, re.S)
    ]
    assert columns == [prompts[0], texts[0], prompts[1], texts[1]]
    assert (
        '<span class="other">' not in page.partition("</p>")[2] and '<span class="token">' in page
    )

    assert main([*asked, "turns=whole"]) == EXIT_USER_ERROR  # reasoning_dropped
    printed = capsys.readouterr().out
    assert (
        printed.count("which is not what stands before it in training") == 0
    )  # the first answer is not in a prompt
    assert (
        "  message 2, asked with:\n"
        + prompts[0]
        + "\n  and trained to answer:\n>>one<|im_end|><<\n"
        in printed
    )


def test_the_turns_are_those_of_what_is_trained(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not of a mismatched answer, and of the entry of `datasets` that the example comes from."""
    rated = [{"prompt": f"p{i}", "completion": f"a{i}", "label": True} for i in range(9)]
    Path("a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rated))
    Path("b.csv").write_text("q1,a1,q2,a2\nred?,yes,blue?,no\n")
    two = [
        {
            "path": "b.csv",
            "type": "messages",
            "prompt_column": f"q{i}",
            "completion_column": f"a{i}",
        }
        for i in (1, 2)
    ]
    kto = ["method=kto", 'datasets=[{"path": "a.jsonl", "max_samples": 3}]']
    for overrides in (kto, [f"datasets={json.dumps(two)}"]):
        asked = ["inspect", "--recipe", str(recipe), "--turns", "--json", "--rows", "3", *overrides]
        assert main(asked) == 0
        for row in json.loads(capsys.readouterr().out)["rows"]:
            trained = "".join(token["text"] for token in row["tokens"] if token["trained"])
            (turn,) = row["turns"]
            if row.get("side") != "mismatched":
                assert "".join(piece["text"] for piece in turn["answer"]) == trained
