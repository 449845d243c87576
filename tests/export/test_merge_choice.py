"""A QLoRA run's two merges against plain transformers, bitsandbytes and peft: what is measured, chosen, exported and stated."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from torch.nn import functional
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from finetune.cli import main
from finetune.errors import UserError
from finetune.export.export import export
from finetune.export.merge_choice import ROWS_FILE, read_comparison_rows
from tests.conftest import make_chat, make_model
from tests.ranks import run_command, run_python

bnb = pytest.importorskip("bitsandbytes")
Scored = tuple[float, torch.Tensor]  # loss per labeled token, logits of the real tokens


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short QLoRA run through the command, in fp32, with held-out rows and its export."""
    folder = tmp_path_factory.mktemp("qlora")
    recipe = {
        # Weights of which no row divides into blocks of 64. Where it has 16, 32, 48 or 96 columns, bitsandbytes 0.50.2
        # dequantizes a weight wrongly on a CPU.
        "model_name_or_path": str(
            make_model(folder / "model", hidden_size=72, intermediate_size=101, head_dim=18)
        ),
        "datasets": [{"path": str(make_chat(folder / "chat.jsonl", rows=40))}],
        "eval_split_size": 6,
        "use_peft": True,
        "load_in_4bit": True,
        "bnb_4bit_use_double_quant": True,
        "max_steps": 6,
        "global_batch_size": 8,
        "learning_rate": 3e-2,
        "output_dir": str(folder / "run"),
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (folder / "fp32.yaml").write_text(
        "distributed_type: 'NO'\nmixed_precision: 'no'\nuse_cpu: true\n"
    )
    command = [
        "finetune/run.py",
        "--recipe",
        str(folder / "recipe.yaml"),
        "--config",
        str(folder / "fp32.yaml"),
    ]
    done = run_python(command, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    (folder / "said").write_text(done.stdout + done.stderr)
    return folder / "run"


def quantized_base(run: Path) -> Any:
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )
    return AutoModelForCausalLM.from_pretrained(
        run.parent / "model", quantization_config=config, device_map="cpu"
    )


def dequantized_base(run: Path) -> Any:
    """The original with the weights that bitsandbytes' own layers multiply with."""
    plain = AutoModelForCausalLM.from_pretrained(run.parent / "model")
    for name, module in quantized_base(run).named_modules():
        if isinstance(module, bnb.nn.Linear4bit):
            weight = bnb.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
            plain.get_submodule(name).weight.data = weight
    return plain


@torch.no_grad()
def scored(model: Any, run: Path) -> Scored:
    """The model on the run's comparison rows, one at a time, unpadded."""
    model.train()  # there is no dropout, and bitsandbytes' kernel for inference on a CPU takes rows in multiples of 32 only
    logits, losses = [], []
    for row in json.loads((run / ROWS_FILE).read_text())["rows"]:
        logits.append(model(torch.tensor([row["input_ids"]]), use_cache=False).logits[0].float())
        losses.append(
            functional.cross_entropy(logits[-1], torch.tensor(row["labels"]), reduction="none")
        )
    labeled = torch.cat(
        [torch.tensor(row["labels"]) for row in json.loads((run / ROWS_FILE).read_text())["rows"]]
    )
    return float(torch.cat(losses).sum() / (labeled != -100).sum()), torch.cat(logits)


@pytest.fixture(scope="module")
def references(run: Path) -> dict[str, Scored]:
    """The three models by the plain libraries."""
    trained = PeftModel.from_pretrained(quantized_base(run), run / "adapter")
    models = {"trained": trained}
    for name, base in (
        ("original", AutoModelForCausalLM.from_pretrained(run.parent / "model")),
        ("dequantized", dequantized_base(run)),
    ):
        models[name] = PeftModel.from_pretrained(base, run / "adapter").merge_and_unload()
    return {name: scored(model, run) for name, model in models.items()}


def numbers(text: str) -> dict[str, list[float]]:
    """Loss and largest logit difference by model, from the lines of the terminal or the rows of the card."""
    found = {}
    for name, pattern in (
        ("trained", "base (?:\\+|with the) adapter"),
        ("original", "onto the original base"),
        ("dequantized", "onto the dequantized base"),
    ):
        (line,) = re.findall(rf"^.*{pattern}(?: \(this one\))?(?::| \|).*$", text, re.MULTILINE)
        found[name] = [
            float(number)
            for number in re.findall(r"\d+\.\d+(?:e-\d+)?|(?<= )\d+(?:e-\d+)?(?= \||$)", line)
        ]
    return found


def test_what_is_measured_is_what_the_plain_libraries_compute(
    run: Path, references: dict[str, Scored]
) -> None:
    said, card = (run.parent / "said").read_text(), (run / "export" / "README.md").read_text()
    for text in (said, card):
        found = numbers(text)
        for name, (loss, logits) in references.items():
            assert found[name][0] == pytest.approx(loss, abs=1e-3), (name, text)
            if name != "trained":
                largest = float((logits - references["trained"][1]).abs().max())
                assert found[name][1] == pytest.approx(largest, rel=0.02, abs=1e-4), (name, text)
    assert (
        abs(references["original"][0] - references["dequantized"][0]) > 1e-3
    )  # else nothing here could fail


def test_the_trained_model_is_the_one_whose_held_out_loss_the_run_logged(
    run: Path, references: dict[str, Scored]
) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    logged = [line["eval_loss"] for line in lines if "eval_loss" in line]
    rows = read_comparison_rows(run, 10**6, 1000)
    assert rows is not None and rows.held_out and len(rows) == 6
    assert logged[-1] == pytest.approx(references["trained"][0], abs=1e-4)


def test_the_better_merge_is_exported_and_the_card_states_its_loss(
    run: Path, references: dict[str, Scored]
) -> None:
    better = min(("original", "dequantized"), key=lambda name: references[name][0])
    card = (run / "export" / "README.md").read_text()
    assert f"merged onto the {better} base (this one)" in card and card.count("(this one)") == 1
    loss, logits = scored(AutoModelForCausalLM.from_pretrained(run / "export"), run)
    torch.testing.assert_close(logits, references[better][1], atol=1e-4, rtol=1e-4)
    assert loss == pytest.approx(numbers(card)[better][0], abs=1e-3)
    assert "quantization_config" not in json.loads((run / "export" / "config.json").read_text())


@pytest.mark.parametrize("onto", ["original", "dequantized"])
def test_merge_onto_decides_otherwise(
    onto: str, run: Path, references: dict[str, Scored], tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "out"
    assert main(["export", str(run), "--output", str(out), "--merge-onto", onto]) == 0
    said = capsys.readouterr().out
    assert f"exported: onto the {onto} base, as --merge-onto says" in said
    assert "verified: every value" in said
    torch.testing.assert_close(
        scored(AutoModelForCausalLM.from_pretrained(out), run)[1],
        references[onto][1],
        atol=1e-4,
        rtol=1e-4,
    )
    config = json.loads((out / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(run.parent / "model")
    assert "not the weights" not in said + (out / "README.md").read_text()


def test_the_adapters_card_opens_it_with_the_logits_that_were_trained(
    run: Path, references: dict[str, Scored]
) -> None:
    card = (run / "adapter" / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert 'bnb_4bit_compute_dtype="float32"' in code and "call `model.train()`" in card
    found: dict[str, Any] = {}
    exec(code.replace("PATH_OR_NAME", str(run / "adapter")), found)
    torch.testing.assert_close(
        scored(found["model"], run)[1], references["trained"][1], atol=1e-5, rtol=1e-5
    )


def test_without_rows_it_is_the_base_that_was_trained(
    run: Path, tmp_path: Path, capsys: Any
) -> None:
    (checkpoint,) = (run / "checkpoints").glob("step-*")
    shutil.copytree(checkpoint, tmp_path / checkpoint.name)
    command = [
        "export",
        str(tmp_path / checkpoint.name),
        "--output",
        str(tmp_path / "out"),
        "--no-verify",
    ]
    assert main(command) == 0
    assert (
        "merged onto the dequantized base, which the adapter was trained on; nothing was measured"
        in capsys.readouterr().out
    )
    assert "| Model |" not in (tmp_path / "out" / "README.md").read_text()


def test_a_runs_adapter_is_merged_as_the_run_is(run: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    export(run / "adapter", tmp_path / "out", log=lines.append)
    assert lines[0].startswith("merge   on ") and "exported: onto the " in lines[4]
    weights = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert weights == (run / "export" / "model.safetensors").read_bytes()


def test_rounding_to_bfloat16_is_part_of_what_is_measured(run: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    export(run, tmp_path / "out", dtype="bfloat16", verify=True, log=lines.append)
    found = numbers("\n".join(lines))
    assert found["dequantized"][1] > 1e-3  # in float32 it is next to nothing
    onto = "original" if "onto the original base, whose" in "\n".join(lines) else "dequantized"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert scored(model, run)[0] == pytest.approx(found[onto][0], abs=1e-3)


def test_a_base_that_is_stored_in_four_bits_is_merged_onto_as_it_is(
    run: Path, references: dict[str, Scored], tmp_path: Path, capsys: Any
) -> None:
    quantized_base(run).save_pretrained(tmp_path / "base")
    command = [
        "export",
        str(run),
        "--output",
        str(tmp_path / "out"),
        "--base-model",
        str(tmp_path / "base"),
    ]
    assert main([*command, "--merge-onto", "original"]) == 2
    assert (
        "the base is stored in 4 bits; name the original with --base-model"
        in capsys.readouterr().err
    )
    assert main([*command, "--dtype", "float32"]) == 0
    said = capsys.readouterr().out
    assert "exported: onto the dequantized base, for the base is stored quantized" in said
    assert "onto the original base" not in said and "verified: every value" in said
    assert f"warning: {tmp_path / 'base'}: not the weights that the adapter of {run}" in said
    for card in ("README.md", "adapter/README.md"):
        assert (
            "**These are not the weights that the adapter was trained on**"
            in (tmp_path / "out" / card).read_text()
        )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(
        scored(model, run)[1], references["dequantized"][1], atol=1e-4, rtol=1e-4
    )


def test_a_foreign_adapter_on_a_base_that_is_stored_in_four_bits(
    run: Path, references: dict[str, Scored], tmp_path: Path
) -> None:
    quantized_base(run).save_pretrained(tmp_path / "base")
    copied = shutil.copytree(run / "adapter", tmp_path / "adapter")
    export(copied, tmp_path / "out", base_model=str(tmp_path / "base"), dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    # It dequantizes to bfloat16, since a foreign adapter does not say in which dtype it was trained.
    torch.testing.assert_close(
        scored(model, run)[1], references["dequantized"][1], atol=0.05, rtol=0.05
    )
    alone = tmp_path / "alone"
    export(copied, alone, base_model=str(tmp_path / "base"), adapter_only=True)
    assert (alone / "adapter_model.safetensors").is_file()


def test_merge_onto_is_refused_where_it_means_nothing(
    run: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = str(tmp_path / "out")
    monkeypatch.delattr("finetune.export.source.open_source")  # at once: nothing is opened
    copied = str(shutil.copytree(run / "adapter", tmp_path / "adapter"))  # no longer in its run
    assert main(["export", copied, "--output", out, "--merge-onto", "original"]) == 2
    assert (
        "--merge-onto: not known to be trained on a quantized base; omit it"
        in capsys.readouterr().err
    )
    assert (
        main(["export", str(run), "--output", out, "--merge-onto", "original", "--adapter-only"])
        == 2
    )
    assert (
        "--merge-onto: nothing is merged with --adapter-only; omit one of them"
        in capsys.readouterr().err
    )
    assert not Path(out).exists()


def test_a_large_model_is_measured_on_fewer_rows(run: Path) -> None:
    small, large = (
        read_comparison_rows(run, 10**6, 1000),
        read_comparison_rows(run, 70 * 10**9, 1000),
    )
    assert small is not None and large is not None
    assert 1 <= len(large) < len(small) and large.input_ids.numel() <= 256
    assert torch.equal(
        large.labels[0, : int(large.lengths[0])], small.labels[0, : int(small.lengths[0])]
    )


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"held_out": true}',
        '{"held_out": true, "rows": [{"input_ids": [1, 2], "labels": [3]}]}',
        '{"held_out": true, "rows": [{"input_ids": [1, 1000], "labels": [-100, 3]}]}',
        '{"held_out": true, "rows": [{"input_ids": [1, 2], "labels": [-100, -100]}]}',
        '{"held_out": true, "rows": [{"input_ids": [1, 1e99], "labels": [2, 3]}]}',
    ],
    ids=["empty", "a list", "no rows", "unequal", "another vocabulary", "no label", "no ids"],
)
def test_damaged_rows_are_one_sentence(content: str, tmp_path: Path) -> None:
    (tmp_path / ROWS_FILE).write_text(content)
    with pytest.raises(UserError, match=r"damaged; remove it, and decide with --merge-onto"):
        read_comparison_rows(tmp_path, 10**6, 1000)


@pytest.mark.slow
def test_stories260k_in_four_bits_on_gsm8k(shared: Path, tmp_path: Path, capsys: Any) -> None:
    """The export's two merges of a real run; the exported folder has the loss that its card states."""
    columns = {"prompt_column": "question", "completion_column": "answer"}
    recipe = {
        "model_name_or_path": str(shared / "models" / "stories260k"),
        "datasets": [{"path": str(shared / "data" / "gsm8k_train.jsonl"), **columns}],
        "eval_datasets": [
            {"path": str(shared / "data" / "gsm8k_test.jsonl"), "split": "train[:200]", **columns}
        ],
        "use_peft": True,
        "load_in_4bit": True,
        "bnb_4bit_use_double_quant": True,
        "max_length": 512,
        "global_batch_size": 16,
        "per_device_train_batch_size": 8,
        "max_steps": 100,
        "learning_rate": 1e-2,
        "output_dir": str(tmp_path / "run"),
    }
    (tmp_path / "gsm8k.yaml").write_text(yaml.safe_dump(recipe))
    command = [
        "python",
        "-m",
        "finetune",
        "launch",
        "--recipe",
        str(tmp_path / "gsm8k.yaml"),
        "--config",
        "single",
    ]
    done = run_command(command, timeout=1500)
    assert done.returncode == 0, done.stderr[-3000:]
    run = tmp_path / "run"
    card = (run / "export" / "README.md").read_text()
    (chosen,) = re.findall(r"merged onto the (\w+) base \(this one\)", card)
    loss, _ = scored(AutoModelForCausalLM.from_pretrained(run / "export"), run)
    assert loss == pytest.approx(numbers(card)[chosen][0], abs=1e-3)
    with capsys.disabled():
        print(
            "\n"
            + card[card.index("## Merge") : card.index("## Data")]
            + f"plain transformers: {loss:.5f}"
        )
