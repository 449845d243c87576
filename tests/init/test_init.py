"""`finetune init`: the recipe that it writes is read, planned and inspected by the other commands, and says why."""

import json
import os
import pty
import re
import select
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune.cli import main
from finetune.config.reader import read_recipe, to_dict
from finetune.init.new_recipe import TEMPLATE_TOKENS, Hardware, fit_recipe
from tests.conftest import make_chat, make_model
from tests.plan.run_specs import LLAMA_31_8B
from tests.ranks import ROOT, environment


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """Llama 3.1 8B as far as `init` looks: its config and a chat template."""
    folder = tmp_path / "llama"
    folder.mkdir()
    config = LLAMA_31_8B | {"torch_dtype": "bfloat16", "max_position_embeddings": 131072}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.fixture
def init(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """`finetune init` in this process, into tmp_path / r.yaml: what it prints, or its message where `code` is 2."""

    def run(*arguments: object, code: int = 0) -> str:
        capsys.readouterr()
        output = str(tmp_path / "r.yaml")
        assert (
            main(
                [
                    "init",
                    *map(str, arguments),
                    *([] if code else ["--overwrite"]),
                    "--output",
                    output,
                ]
            )
            == code
        )
        printed = capsys.readouterr()
        return printed.err if code else printed.out

    return run


def write_rows(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("gpus", "memory", "options", "expected"),
    [
        (1, "24GiB", (), {"use_peft": True, "learning_rate": 2e-4}),
        (8, "80GiB", (), {"use_peft": False, "learning_rate": 1e-5}),
        (8, "80GiB", ("--train", "lora"), {"use_peft": True}),
        (
            1,
            "40GiB",
            ("--train", "full"),
            {"use_peft": False, "accelerate_config": "fsdp_cpu_offload"},
        ),
        (1, "12GiB", (), {"use_peft": True, "load_in_8bit": True}),
        (
            2,
            "10GiB",
            ("--train", "full"),
            {"use_peft": False, "accelerate_config": "fsdp_cpu_offload"},
        ),
        (3, "80GiB", (), {"use_peft": False}),
    ],
)
def test_what_it_writes_fits_by_the_plan(
    gpus: int,
    memory: str,
    options: tuple[str, ...],
    expected: dict[str, Any],
    llama: Path,
    tmp_path: Path,
    init: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = make_chat(tmp_path / "chat.jsonl", rows=2000)
    machine = ("--gpus", gpus, "--gpu-memory", memory, "--host-memory", "512GiB", "--disk", "2TiB")
    printed = init("--model", llama, "--data", data, *machine, *options)
    assert (
        f"by the plan it fits {gpus} GPU" in printed and " of 512 GiB of host memory, " in printed
    )
    commands = {
        line.split()[0]: shlex.split(line)[2:]
        for line in printed.splitlines()
        if " finetune " in line
    }
    assert main(commands["plan"]) == 0, "the plan that it prints says that it fits"
    assert "\nfits " in capsys.readouterr().out
    recipe = read_recipe(str(tmp_path / "r.yaml"))
    found = to_dict(recipe)
    assert {key: found[key] for key in expected} == expected
    assert recipe.batch.global_batch_size is not None
    assert recipe.batch.global_batch_size % gpus == 0
    assert commands["train"] == [
        "launch",
        "--recipe",
        str(tmp_path / "r.yaml"),
        "--num-processes",
        str(gpus),
    ]
    keys = [
        line for line in (tmp_path / "r.yaml").read_text().splitlines() if re.match(r"[a-z]", line)
    ]
    assert sum("#" in line for line in keys) > len(keys) / 2, "choices say why"


@pytest.mark.parametrize(
    ("row", "options", "expected"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, (), {"method": "dpo", "learning_rate": 5e-6}),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, ("--method", "simpo"), {"method": "simpo"}),
        ({"question": "a", "better": "b", "worse": "c"}, ("--chosen-column", "better", "--rejected-column", "worse"), {"method": "dpo"}),
        ({"prompt": "a", "completion": "b", "label": False}, (), {"method": "kto"}),
        ({"question": "a", "answer": "b"}, ("--method", "distill", "--teacher", "MODEL"), {"method": "distill"}),
        (
            {"question": "a", "answer": "b"},
            ("--method", "grpo", "--rewards", "exact_answer, length"),
            {"method": "grpo", "rewards": ["exact_answer", "length"], "max_completion_length": 256, "max_length": 512},
        ),
        ({"question": "a", "answer": "b"}, ("--train", "qlora"), {"load_in_4bit": True, "use_peft": True}),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, ("--train", "lora"), {"method": "dpo", "use_peft": True, "learning_rate": 5e-6}),
        (
            {"question": "a", "answer": "b"},
            ("--method", "grpo", "--rewards", "length", "--train", "lora"),
            {"method": "grpo", "use_peft": True},
        ),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else None,
)  # fmt: skip
def test_every_method_has_a_first_recipe(
    row: dict[str, Any],
    options: tuple[str, ...],
    expected: dict[str, Any],
    llama: Path,
    tmp_path: Path,
    init: Callable[..., str],
) -> None:
    data = write_rows(tmp_path / "rows.jsonl", *[row] * 50)
    teacher = shutil.copytree(llama, tmp_path / "teacher")
    given = [str(teacher) if option == "MODEL" else option for option in options]
    init("--model", llama, "--data", data, "--gpus", 1, "--gpu-memory", "40G", *given)
    found = to_dict(read_recipe(str(tmp_path / "r.yaml")))
    assert {key: found[key] for key in expected} == expected
    words = (
        "their reward shows|prompts in a step"
        if expected.get("method") == "grpo"
        else "their loss shows|rows in a step"
    )
    assert all(word in (tmp_path / "r.yaml").read_text() for word in words.split("|"))


@pytest.mark.parametrize("method", ["grpo", "ppo"])
def test_what_it_says_of_memory_is_the_plan_of_what_it_writes(
    method: str,
    llama: Path,
    tmp_path: Path,
    init: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of ppo too, which samples one completion of a prompt where other methods sample eight."""
    data = write_rows(tmp_path / "rows.jsonl", *[{"question": "what " * 900, "answer": "b"}] * 24)
    machine = ("--gpus", 1, "--gpu-memory", "80GiB")
    printed = init(
        *("--model", llama, "--data", data, *machine, "--train", "lora"),
        *("--method", method, "--rewards", "length"),
    )
    recipe = str(tmp_path / "r.yaml")
    main(["plan", "--recipe", recipe, "--num-processes", "1", "--gpu-memory", "80GiB"])
    device_memory = r"[\d.]+ of 80.00 GiB"
    assert re.findall(device_memory, printed) == re.findall(device_memory, capsys.readouterr().out)
    assert f"method: {method}" in Path(recipe).read_text()


def test_a_sample_of_the_rows_is_checked_as_inspect_does(
    tiny_llama: Callable[..., Path],
    tmp_path: Path,
    init: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The tiny model's template drops tool calls, which inspect calls fatal."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    turns = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    data = write_rows(tmp_path / "calls.jsonl", *[{"messages": turns}] * 40)
    output = tmp_path / "calls.yaml"
    assert (
        main(
            [
                "init",
                "--model",
                str(tiny_llama()),
                "--data",
                str(data),
                "--gpus",
                "0",
                "--output",
                str(output),
            ]
        )
        == 2
    )
    shown = capsys.readouterr().out
    assert "fatal: tool_calls_dropped: in 40 of 40 rows the chat template drops tool calls" in shown
    assert "\ntrain " not in shown and "\nplan " not in shown, "nothing is trained of what is fatal"
    fixed = re.search(
        r"^fix     the same command with --chat-template (\S+) --overwrite", shown, re.M
    )
    assert fixed is not None
    assert main(["inspect", "--recipe", str(output), "--rows", "0"]) == 2
    assert "fatal: tool_calls_dropped" in capsys.readouterr().out
    again = [
        "init",
        "--model",
        str(tiny_llama()),
        "--data",
        str(data),
        "--gpus",
        "0",
        "--output",
        str(output),
    ]
    assert main([*again, "--chat-template", fixed[1], "--overwrite"]) == 0
    shown = capsys.readouterr().out
    assert "\ntrain   finetune launch" in shown
    assert re.search(r"fits the CPU: [\d.]+ of [\d.]+ GiB of CPU memory, ", shown), shown
    assert "on each GPU" not in shown, "there is none"
    assert read_recipe(str(output)).data.chat_template == fixed[1]
    assert main(["inspect", "--recipe", str(output), "--rows", "0"]) == 0


def test_the_key_that_makes_rows_trainable_is_offered_at_a_terminal(
    tiny_llama: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    turns = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    data, asked = write_rows(tmp_path / "calls.jsonl", *[{"messages": turns}] * 40), list[str]()
    monkeypatch.setattr("finetune.init.cli.is_interactive", lambda: True)
    monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or "yes")
    given = [
        "--model",
        str(tiny_llama()),
        "--data",
        str(data),
        "--gpus",
        "0",
        "--method",
        "sft",
        "--train",
        "full",
    ]
    assert main(["init", *given, "--output", str(tmp_path / "r.yaml")]) == 0
    (question,) = asked
    assert "tool_calls_dropped" in question and "Write it into the recipe? [yes]: " in question
    assert "\ntrain   finetune launch" in capsys.readouterr().out
    assert main(["inspect", "--recipe", str(tmp_path / "r.yaml"), "--rows", "0"]) == 0


def test_what_needs_more_host_memory_than_there_is_does_not_fit(
    llama: Path, tmp_path: Path, init: Callable[..., str]
) -> None:
    """All parameters of an 8B on a card of 24 GiB by offload to the host, which takes 211 GiB there."""
    data = make_chat(tmp_path / "chat.jsonl", rows=2000)
    given = (
        "--model",
        llama,
        "--data",
        data,
        "--gpus",
        1,
        "--gpu-memory",
        "24GiB",
        "--train",
        "full",
    )
    unknown = init(*given)
    assert "by the plan it requires 4." in unknown and "fits" not in unknown
    needed = re.search(
        r"GPU, (\d+) GiB of host memory, [\d.]+ GiB of disk; compare with", unknown, re.M
    )
    assert needed is not None and int(needed[1]) > 150
    enough = init(*given, "--host-memory", f"{int(needed[1]) + 1}GiB", "--disk", "2TiB")
    assert "by the plan it fits 1 GPU of 24GiB: " in enough
    (tmp_path / "r.yaml").unlink()
    for flags, said in (
        (
            ("--host-memory", "64GiB"),
            "does not fit 1 GPU of 24GiB with 64GiB of host memory, whatever is changed; --train",
        ),
        (
            ("--host-memory", "512GiB", "--disk", "20GiB"),
            "needs 284 GiB of disk, and there are 20GiB; make room",
        ),
    ):
        assert init(*given, *flags, code=2).startswith(f"{llama}: {said}")
    assert "adapters (LoRA)" in init(*given[:-2], "--host-memory", "64GiB", "--disk", "100GiB")


def test_of_what_is_not_held_out_no_comment_speaks(
    llama: Path, tmp_path: Path, init: Callable[..., str]
) -> None:
    data = tmp_path / "book.txt"
    data.write_text("Call me Ishmael. Some years ago, never mind how long precisely.\n" * 20)
    init("--model", llama, "--data", data, "--gpus", 1, "--gpu-memory", "80GiB")
    written = (tmp_path / "r.yaml").read_text()
    assert "eval_" not in written and "held-out" not in written and "held out" not in written


def test_what_only_an_accelerate_file_can_say_is_not_chosen(llama: Path, tmp_path: Path) -> None:
    """Where four GPUs that divide rows would be the cheapest change, by the plan."""
    data = make_chat(tmp_path / "chat.jsonl", rows=2)
    given = {
        "model_name_or_path": str(llama),
        "datasets": [{"path": str(data)}],
        "max_length": 163840,
    }
    fit = fit_recipe(given, 100.0, Hardware(4, "32GiB"), "lora")
    assert fit.need.device == fit.plan.peak_bytes <= 32 * 2**30
    assert [text.partition("=")[0] for text, _ in fit.changes] == [
        "activation_offload",
        "max_length",
    ]


@pytest.mark.parametrize(
    ("row", "entry"),
    [
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, {}),
        ({"instruction": "a", "input": "", "output": "b"}, {}),
        ({"text": "a"}, {}),
        ({"Question": "a", "Answer": "b"}, {"prompt_column": "Question", "completion_column": "Answer", "type": "messages"}),
        ({"prompt": "a", "completion": "b"}, {"prompt_column": "prompt", "completion_column": "completion", "type": "messages"}),
        ({"body": "a", "id": 7}, {"text_column": "body"}),
        ({"text": None, "body": "a"}, {"text_column": "body"}),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else None,
)  # fmt: skip
def test_columns_are_named_where_they_must_be(
    row: dict[str, Any],
    entry: dict[str, str],
    llama: Path,
    tmp_path: Path,
    init: Callable[..., str],
) -> None:
    data = write_rows(tmp_path / "rows.jsonl", *[row] * 50)
    init("--model", llama, "--data", data, "--gpus", 1, "--gpu-memory", "80GiB")
    written = yaml.safe_load((tmp_path / "r.yaml").read_text())
    assert written["datasets"] == [{"path": str(data)} | entry]
    assert written["eval_split_size"] == 2
    (llama / "chat_template.jinja").unlink()
    init("--model", llama, "--data", data, "--gpus", 1, "--gpu-memory", "80GiB")
    without = yaml.safe_load((tmp_path / "r.yaml").read_text())["datasets"][0]
    assert "type" not in without, "without a chat template, questions and answers are completions"


def test_what_it_writes_is_inspected(
    tiny_llama: Callable[..., Path],
    tmp_path: Path,
    init: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = write_rows(
        tmp_path / "a.jsonl",
        *({"question": f"What is {n}+{n}?", "answer": str(2 * n)} for n in range(60)),
    )
    init("--model", tiny_llama(), "--data", data, "--gpus", 0)
    assert main(["inspect", "--recipe", str(tmp_path / "r.yaml"), "--rows", "1"]) == 0
    shown = capsys.readouterr().out
    assert "<|user|>What is" in shown and "held out: 3 examples" in shown


@pytest.mark.parametrize(("number", "said"), [(60, "60 rows"), (2000, "more than 1,000 rows")])
def test_a_function_makes_the_rows(
    number: int,
    said: str,
    tiny_llama: Callable[..., Path],
    tmp_path: Path,
    init: Callable[..., str],
) -> None:
    data = tmp_path / "my_data.py"
    data.write_text(
        f"def rows():\n    return ({{'question': f'{{n}}?', 'answer': str(n)}} for n in range({number}))\n"
    )
    printed = init("--model", tiny_llama(), "--data", f"{data}:rows", "--gpus", 0)
    assert printed.startswith(f"data    {data}:rows: {said}, read as")
    (source,) = read_recipe(str(tmp_path / "r.yaml")).data.datasets
    assert (source.function, source.path, source.prompt_column) == (f"{data}:rows", "", "question")


def test_what_it_cannot_answer_is_one_sentence(
    llama: Path, tmp_path: Path, init: Callable[..., str]
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", {"u": "a", "v": "b"})
    pairs = write_rows(tmp_path / "pairs.jsonl", {"prompt": "a", "chosen": "b", "rejected": "c"})
    empty = write_rows(tmp_path / "empty.jsonl")
    counts = write_rows(tmp_path / "counts.jsonl", {"question": "1+2", "answer": 3})
    null = write_rows(tmp_path / "null.jsonl", {"prompt": "a", "completion": None})
    later = write_rows(
        tmp_path / "later.jsonl",
        {"prompt": "a", "completion": "b"},
        {"prompt": "a", "completion": None},
    )
    table = tmp_path / "table.csv"
    table.write_text("question;answer\nWhy?;So.\n")
    gpu = ("--gpus", 1, "--gpu-memory", "80GiB")
    (tmp_path / "r.yaml").touch()
    taken = init("--model", llama, "--data", rows, *gpu, code=2)
    assert (
        taken
        == f"{tmp_path / 'r.yaml'}: exists; choose another --output, or replace it with --overwrite\n"
    )
    (tmp_path / "r.yaml").unlink()
    for arguments, message in (
        ((), "--model: needed, since there is no terminal to ask at"),
        (
            ("--model", "owner/name"),
            "owner/name: config.json is not on this machine and HF_HUB_OFFLINE is set",
        ),
        (("--model", llama), "--data: needed, since there is no terminal to ask at"),
        (
            ("--model", llama, "--data", "gone.py:rows"),
            "--data: gone.py:rows: no such file; name a function as",
        ),
        (("--model", llama, "--data", "./gone.jsonl"), "./gone.jsonl: no such file or folder"),
        (("--model", llama, "--data", empty), f"{empty}: has no rows"),
        (
            ("--model", llama, "--data", rows),
            f"{rows}: its columns are u, v; say which to read with --prompt-column",
        ),
        (
            ("--model", llama, "--data", null),
            f"{null}: completion: text is expected, found nothing",
        ),
        (
            ("--model", llama, "--data", later),
            f"{later}:2: completion: text is expected, found nothing",
        ),
        (
            ("--model", llama, "--data", ""),
            "--data: empty; leave the flag out to be asked, or give a value",
        ),
        (
            ("--model", llama, "--data", pairs, "--method", "sft"),
            f"{pairs}: rejected: method: dpo or orpo or simpo or reward learns from pairs; to train on the chosen answers alone, pass "
            "--completion-column chosen\n",
        ),
        (
            ("--model", llama, "--data", counts),
            f"{counts}: answer: text is expected, found 3 (int); write it as text",
        ),
        (
            ("--model", llama, "--data", table),
            f"{table}: its columns are separated by semicolons, where commas are",
        ),
        (
            ("--model", llama, "--data", rows, "--prompt-column", "w"),
            f"{rows}:1: w: text is expected, found ",
        ),
        (
            ("--model", llama, "--data", rows, "--text-column", "u", "--gpus", "two"),
            "--gpus: two: a number of GPUs",
        ),
        (
            ("--model", llama, "--data", rows, "--text-column", "u", "--gpus", "9" * 5000),
            "--gpus: 9999",
        ),
        (
            (
                "--model",
                llama,
                "--data",
                rows,
                "--text-column",
                "u",
                "--gpus",
                1,
                "--gpu-memory",
                "80MB",
            ),
            "--gpu-memory: 80MB: less than 1 GiB",
        ),
        (
            ("--model", llama, "--data", pairs, "--method", "dpo", "--teacher", llama, "--gpus", 0),
            "--teacher: is for --method distill",
        ),
        (
            ("--model", llama, "--data", pairs, "--method", "lora", "--gpus", 0),
            "--method: lora is what is trained: --train lora; --method says what it learns from: dpo, orpo, simpo, reward, kto",
        ),
        (
            ("--model", llama, "--data", pairs, "--train", "dora", "--gpus", 0),
            "--train: dora: one of auto, full, lora",
        ),
        (
            (
                "--model",
                llama,
                "--data",
                rows,
                "--text-column",
                "u",
                "--method",
                "distill",
                "--gpus",
                0,
            ),
            "--teacher: needed, since there is no terminal to ask at",
        ),
        (
            (
                "--model",
                llama,
                "--data",
                rows,
                "--text-column",
                "u",
                "--gpus",
                1,
                "--gpu-memory",
                "1GiB",
            ),
            f"{llama}: does not fit 1 GPU of 1GiB, whatever is changed",
        ),
    ):
        assert init(*arguments, code=2).startswith(message), arguments
    assert not (tmp_path / "r.yaml").exists()


@pytest.mark.parametrize("output", [".", "", "/", ".."])
def test_a_folder_is_no_recipe_to_write(output: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--output", output]) == 2
    said = capsys.readouterr().err
    assert "a recipe's name ends in .yaml; write --output " in said and said.endswith(
        "my_recipe.yaml\n"
    )


@pytest.mark.parametrize("positions", [0, 1, -5])
def test_positions_that_no_model_has_are_not_taken(
    positions: int, llama: Path, tmp_path: Path, init: Callable[..., str]
) -> None:
    config = json.loads((llama / "config.json").read_text()) | {
        "max_position_embeddings": positions
    }
    (llama / "config.json").write_text(json.dumps(config))
    data = write_rows(tmp_path / "rows.jsonl", *[{"text": "a"}] * 50)
    init("--model", llama, "--data", data, "--gpus", 1, "--gpu-memory", "80GiB")
    assert yaml.safe_load((tmp_path / "r.yaml").read_text())["max_length"] == 2048


def test_it_says_what_it_guesses_and_what_it_does_not_read(
    llama: Path, tiny_llama: Callable[..., Path], tmp_path: Path, init: Callable[..., str]
) -> None:
    from transformers import AutoTokenizer

    folder, model = tmp_path / "folder", tiny_llama()
    folder.mkdir()
    texts = ["Once upon a time there was a dog. " * n for n in range(1, 40)]
    write_rows(folder / "train.jsonl", *({"text": text} for text in texts))
    write_rows(folder / "test.jsonl", {"text": "a"})
    (folder / "README.md").touch()
    printed = init(
        "--model", llama, "--data", folder, "--gpus", 1, "--gpu-memory", "80GiB"
    ).splitlines()
    assert printed[0].endswith(" tokens each (a guess from their characters)")
    assert printed[1] == "        not read: test.jsonl; name a file or a glob as --data to choose"
    printed = init("--model", model, "--data", folder / "train.jsonl", "--gpus", 0).splitlines()
    tokens = AutoTokenizer.from_pretrained(model)(texts, add_special_tokens=False).input_ids
    mean = sum(map(len, tokens)) / len(tokens) + TEMPLATE_TOKENS
    assert printed[0].endswith(f", read as text, about {mean:,.0f} tokens each")
    assert printed[1].startswith("wrote ")


def test_a_wrong_answer_is_asked_again(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", {"u": "a", "v": "b", "n": 3})
    answers = [
        "./gone",
        str(llama),
        "./gone.jsonl",
        str(rows),
        "u",
        "n",
        "v",
        "dpo",
        "sft",
        "dora",
        "qlora",
        "two",
        "2",
        "80MB",
        "80",
    ]
    monkeypatch.setattr("finetune.init.cli.is_interactive", lambda: True)
    monkeypatch.setattr("finetune.init.cli.is_interactive", lambda: True)
    monkeypatch.setattr("builtins.input", lambda _: answers.pop(0))
    assert main(["init", "--output", str(tmp_path / "r.yaml")]) == 0
    said = [
        line
        for line in capsys.readouterr().out.splitlines()
        if not line.startswith(("data", "wrote", "look", "plan", "train", "  "))
    ]
    assert [line.partition(" ")[0] for line in said] == [
        "./gone:",
        "./gone.jsonl:",
        f"{rows}:",
        "n:",
        "--method:",
        "--train:",
        "--gpus:",
        "--gpu-memory:",
        "memory",
    ]
    assert to_dict(read_recipe(str(tmp_path / "r.yaml")))["load_in_4bit"] is True

    def end(_: str) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", end)
    assert main(["init", "--output", str(tmp_path / "other.yaml")]) == 2
    assert (
        capsys.readouterr().err == "ended before all questions were answered; nothing was written\n"
    )


@pytest.mark.slow
def test_a_person_is_asked_at_a_terminal(llama: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", {"u": "a", "v": "b"})
    terminal, inner = pty.openpty()
    command = [sys.executable, "-m", "finetune", "init", "--output", str(tmp_path / "r.yaml")]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdin=inner, stdout=inner, stderr=inner
    )
    shown = ""
    try:
        for question, typed in (
            ("Model, a folder or a hub name: ", str(llama)),
            ("Data, a file, a folder or a hub name: ", str(rows)),
            ("Which one holds the prompt or question? (none: plain text): ", "w"),
            (
                "w: no such column; there are u, v\r\nWhich one holds the prompt or question? (none: plain text): ",
                "u",
            ),
            ("Which one holds the answer?: ", "v"),
            ("Learn from what?\r\n  sft               learns the answers\r\n", ""),
            (
                "Train what? auto: all parameters where they fit, else adapters; full, lora, qlora [auto]: ",
                "full",
            ),
            ("GPUs for the run (0: the CPU) ", "2"),
            ("Memory of each GPU [", "80GiB"),
        ):
            shown = read_until(terminal, question)
            os.write(terminal, f"{typed}\n".encode())
        shown = read_until(terminal, "train   finetune launch --recipe ")
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(
            inner
        )  # not before: reading a terminal that nobody else has open fails, with what it still holds unread
        os.close(terminal)
    assert "by the plan it requires " in shown, "the host of those GPUs is not known"
    entry = yaml.safe_load((tmp_path / "r.yaml").read_text())["datasets"][0]
    assert (entry["prompt_column"], entry["completion_column"]) == ("u", "v")


def read_until(terminal: int, text: str) -> str:
    """What is shown up to `text`."""
    shown, deadline = "", time.monotonic() + 60
    while text not in shown:
        assert time.monotonic() < deadline, f"{text!r} is not in {shown!r}"
        if select.select([terminal], [], [], 1.0)[0]:
            shown += os.read(terminal, 65536).decode(errors="replace")
    return shown


TEXTS = [{"text": f"mail {n}", "label": ["praise", "complaint"][n % 2]} for n in range(80)]
CHATS = [{"messages": [{"role": "user", "content": f"mail {n}"}], "kind": n % 3} for n in range(80)]
QUERIES = [
    {"query": f"what is {n}", "positive": f"{n}", "negatives": ["x", "y"][: 1 + n % 2]}
    for n in range(80)
]
QUESTIONS = [{"question": f"what is {n}", "answer": f"{n}"} for n in range(80)]
PAIRS = [{"prompt": f"{n}", "chosen": "yes", "rejected": "no"} for n in range(80)]


@pytest.mark.parametrize(
    ("rows", "flags", "expected"),
    [
        (TEXTS, (), {"method": "classify", "labels": ["complaint", "praise"]}),
        (
            CHATS,
            ("--method", "classify", "--label-column", "kind"),
            {"method": "classify", "labels": ["0", "1", "2"]},
        ),
        (QUERIES, (), {"method": "embed", "num_negatives": 1, "global_batch_size": 4}),
        (QUESTIONS, ("--method", "embed"), {"method": "embed", "num_negatives": 0}),
        (PAIRS, ("--method", "reward"), {"method": "reward"}),
        (TEXTS, ("--text-column", "text"), {"method": "sft"}),
    ],
    ids=["texts", "chats", "queries", "questions", "pairs", "plain"],
)
def test_other_heads_are_recognized_by_the_columns(
    rows: list[dict[str, Any]],
    flags: tuple[str, ...],
    expected: dict[str, Any],
    tmp_path: Path,
    init: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What is written is planned and inspected without a finding, at the rate of a method that is no preference."""
    model = make_model(tmp_path / "model")
    data = write_rows(tmp_path / "rows.jsonl", *rows)
    said = init("--model", model, "--data", data, "--train", "full", "--gpus", 0, *flags)
    assert "fatal" not in said
    recipe = to_dict(read_recipe(str(tmp_path / "r.yaml")))
    assert {key: recipe[key] for key in expected} == expected
    assert recipe["learning_rate"] == 1e-5
    assert main(["inspect", "--recipe", str(tmp_path / "r.yaml"), "--rows", "0"]) == 0
    assert "80 rows read, 0 skipped" in capsys.readouterr().out


@pytest.mark.parametrize("method", ["dpo", "kto", "reward"])
def test_intervals_are_tenths_of_the_steps_into_which_pairs_are_packed(
    method: str, tmp_path: Path, init: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A row has room for max_length tokens of each document of a pair."""
    model = make_model(tmp_path / "model")
    pair = {"prompt": "What? " * 30, "chosen": "This. " * 10, "rejected": "That. " * 10}
    data = write_rows(
        tmp_path / "rows.jsonl",
        *(pair | {"prompt": pair["prompt"] + f"{n:04}"} for n in range(1400)),
    )
    init("--model", model, "--data", data, "--gpus", 0, "--method", method)
    text = (tmp_path / "r.yaml").read_text()
    assert ("(a row holds 2 times as many)" in text) == (method != "reward")
    keys = yaml.safe_load(text)
    capsys.readouterr()
    assert main(["inspect", "--recipe", str(tmp_path / "r.yaml"), "--rows", "0"]) == 0
    (steps,) = re.findall(r"([\d,]+) steps on one rank", capsys.readouterr().out)
    tenth = keys["num_train_epochs"] * int(steps.replace(",", "")) / 10
    assert keys["save_steps"] == pytest.approx(tenth, rel=0.2)


def test_a_column_that_holds_no_classes_is_a_sentence(
    tmp_path: Path, init: Callable[..., str]
) -> None:
    model = make_model(tmp_path / "model")
    data = write_rows(
        tmp_path / "rows.jsonl", *({"text": f"{n}", "label": f"l{n}"} for n in range(200))
    )
    asked = ("--model", model, "--data", data, "--gpus", 0)
    assert "label: 200 classes, the last of them l99; is it the column" in init(*asked, code=2)
    numbered = write_rows(
        tmp_path / "numbered.jsonl", *({"text": f"{n}", "label": n} for n in (10, 20, 99_999))
    )
    said = init("--model", model, "--data", numbered, "--gpus", 0, code=2)
    assert "label: 100,000 classes, the last of them 99999; is it the column" in said
    asked = ("--model", model, "--data", data, "--gpus", 0, "--label-column", "kind")
    assert "kind: no class; its columns are text, label, and" in init(*asked, code=2)
