"""Checkpoints of two ranks in every layout, of this project and of Accelerate's, exported: the logits are those of the training."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.cli import main
from finetune.export.card import render_card
from finetune.export.export import export_run, export_source
from finetune.export.publish import ExportOptions
from finetune.export.source import open_source
from tests.conftest import make_chat, make_model
from tests.export.trained import IDS
from tests.ranks import ROOT, launch_ranks, run_command

LAYOUTS = ("fsdp2", "fsdp1", "ddp")
FULL: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "bf16": {"dtype": "bfloat16"},
}
LORA: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"use_dora": True, "use_rslora": True, "lora_target_modules": ["q_proj", "down_proj"]},
}
ACCELERATE = (
    {"name": "accelerate-fsdp2", "layout": "fsdp2"},
    {"name": "accelerate-fsdp2-full", "layout": "fsdp2", "state_dict_type": "FULL_STATE_DICT"},
    {"name": "accelerate-fsdp1", "layout": "fsdp1"},
    {"name": "accelerate-ddp", "layout": "ddp"},
)
GENERATION = {
    "eos_token_id": [1, 2],
    "temperature": 0.5,
    "do_sample": True,
}  # as no config.json would imply


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of runs, one for each layout and kind, all written by one start of two ranks."""
    folder = tmp_path_factory.mktemp("trained")
    chat = make_chat(folder / "chat.jsonl", rows=8)
    models = {name: make_model(folder / f"model-{name}", **config) for name, config in FULL.items()}
    (models["untied"] / "generation_config.json").write_text(json.dumps(GENERATION))
    runs = []
    for layout in LAYOUTS:
        for kind, keys in (FULL | LORA).items():
            recipe = {
                "model_name_or_path": str(models.get(kind, models["untied"])),
                "datasets": [{"path": str(chat)}],
                "output_dir": str(folder / f"{layout}-{kind}"),
                "use_peft": kind in LORA,
                "eval_split_size": 0.25,
            }
            recipe |= {"lora_r": 4} | keys if kind in LORA else {}
            recipe |= {"export_dtype": "float16"} if (layout, kind) == ("fsdp1", "tied") else {}
            path = folder / f"{layout}-{kind}.yaml"
            path.write_text(yaml.safe_dump(recipe))
            runs.append({"name": f"{layout}-{kind}", "layout": layout, "recipe": str(path)})
    given = {
        "folder": str(folder),
        "layouts": LAYOUTS,
        "runs": runs,
        "accelerate": ACCELERATE,
        "model": str(models["tied"]),
    }
    launch_ranks(ROOT / "tests" / "export" / "trained.py", [json.dumps(given)], timeout=240).check()
    yield folder


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(IDS, use_cache=False).logits.float()
    return logits


def in_training(trained: Path, name: str) -> torch.Tensor:
    """The logits of the training process, which must be the same on both ranks."""
    ranks = [load_file(trained / f"{name}.{rank}")["logits"] for rank in (0, 1)]
    assert torch.equal(*ranks)
    return ranks[0]


@pytest.mark.parametrize("kind", FULL)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_float32_the_logits_are_those_of_the_training(
    layout: str, kind: str, trained: Path, tmp_path: Path
) -> None:
    run, out = trained / f"{layout}-{kind}", tmp_path / "out"
    assert (
        main(["export", str(run), "--output", str(out), "--dtype", "float32", "--no-verify"]) == 0
    )
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.float32
    assert torch.equal(logits_of(model), in_training(trained, run.name))
    assert ("lm_head.weight" in load_file(out / "model.safetensors")) == (kind != "tied")


@pytest.mark.parametrize("kind", LORA)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_merged_adapter_has_the_logits_of_the_training(
    layout: str, kind: str, trained: Path, tmp_path: Path
) -> None:
    run, out = trained / f"{layout}-{kind}", tmp_path / "out"
    assert main(["export", str(run), "--output", str(out), "--no-verify"]) == 0
    expected, untrained = (
        in_training(trained, run.name),
        AutoModelForCausalLM.from_pretrained(trained / "model-untied"),
    )
    merged = logits_of(AutoModelForCausalLM.from_pretrained(out))
    distance = (expected - logits_of(untrained)).norm()
    assert distance > 0.01 * expected.norm()  # the adapter does something
    torch.testing.assert_close(merged, expected)
    adapted = PeftModel.from_pretrained(untrained, out / "adapter")
    torch.testing.assert_close(logits_of(adapted), expected)
    torch.testing.assert_close(merged, logits_of(adapted.merge_and_unload()))


@pytest.mark.parametrize("name", [kind["name"] for kind in ACCELERATE])
def test_what_accelerate_saved_has_the_logits_of_the_training(
    name: str, trained: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    base = ["--base-model", str(trained / "model-tied")]
    assert (
        main(["export", str(trained / name / "state"), "--output", str(out), "--no-verify", *base])
        == 0
    )
    assert torch.equal(
        logits_of(AutoModelForCausalLM.from_pretrained(out)), in_training(trained, name)
    )
    assert AutoTokenizer.from_pretrained(out).chat_template is not None
    assert "lm_head.weight" not in load_file(out / "model.safetensors")


def test_the_dtype_is_the_base_models(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["export", str(trained / "fsdp2-bf16"), "--output", str(out), "--no-verify"]) == 0
    assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {
        torch.bfloat16
    }
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_verification_runs_the_adapter_beside_its_base(
    kind: str, trained: Path, tmp_path: Path, capsys: Any
) -> None:
    run = str(trained / f"fsdp2-{kind}")
    assert main(["export", run, "--output", str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    assert "verified: every value, and logits within 0.00" in capsys.readouterr().out


def test_adapter_only_is_a_peft_folder(trained: Path, tmp_path: Path) -> None:
    run, out = trained / "fsdp2-lora", tmp_path / "out"
    assert main(["export", str(run), "--output", str(out), "--adapter-only"]) == 0
    files = {path.name for path in out.iterdir()}
    assert {
        "adapter_model.safetensors",
        "adapter_config.json",
        "README.md",
        "tokenizer.json",
    } <= files
    assert not [name for name in files if name.startswith("model")]
    again = tmp_path / "again"
    assert main(["export", str(out), "--output", str(again), "--no-verify"]) == 0
    merged = AutoModelForCausalLM.from_pretrained(again)
    torch.testing.assert_close(logits_of(merged), in_training(trained, run.name))


def test_the_card_describes_the_run(trained: Path, tmp_path: Path) -> None:
    run, out = trained / "fsdp2-lora", tmp_path / "my-model"
    lines = [
        {"step": 1, "loss": 2.5, "eval_loss": 3.0},
        {"step": 1, "eval_loss": 1.25},
        {"step": 2, "loss": 1.125},
    ]
    lines += [
        {"step": 2, "eval_loss": 1.5},
        {"step": 3, "loss": 0.5, "eval_loss": 0.25},
    ]  # after what is exported
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = {"sources": [{"formats": ["sharegpt", "text"], "examples": 1234}]}
    (run / "data_report.json").write_text(json.dumps(report))
    license_fields = {"license": "other", "license_name": "tiny", "license_link": "LICENSE"}
    (trained / "model-untied" / "README.md").write_text(
        f"---\n{yaml.safe_dump(license_fields)}---\n# Base\n"
    )
    assert main(["export", str(run), "--output", str(out), "--no-verify"]) == 0
    card = (out / "README.md").read_text()
    assert yaml.safe_load(card.split("---")[1]).items() >= license_fields.items()
    for part in (
        "# my-model",
        "model-untied",
        "chat.jsonl",
        "2.5000 → 1.1250",
        "3.0000 → 1.5000",
        "1.2500 at step 1",
        "| training | chat.jsonl | train | sharegpt, text | 1.0 | 1,234 |",
        "Held out from these: 25.000% of the rows.",
        "`lora_r`",
        "| Method | supervised fine-tuning |",
        "| Steps | 2 |",
    ):
        assert part in card, part
    assert str(trained) not in card


def test_the_card_of_a_preference_run_says_the_method_and_the_last_margins(
    trained: Path, tmp_path: Path
) -> None:
    keys = {"method": "dpo", "beta": 0.2, "loss_type": "hinge"}
    shutil.copytree(
        trained / "ddp-tied",
        run := tmp_path / "run",
        ignore=shutil.ignore_patterns("*.safetensors"),
    )
    lines = [
        {
            "step": 1,
            "rewards/margins": 0.5,
            "rewards/accuracies": 0.5,
            "eval_rewards/accuracies": 0.4,
        },
        {
            "step": 2,
            "rewards/margins": 1.25,
            "rewards/accuracies": 0.75,
            "eval_rewards/accuracies": 0.625,
        },
        {
            "step": 3,
            "rewards/margins": 9.0,
            "rewards/accuracies": 1.0,
            "eval_rewards/accuracies": 1.0,
        },  # not exported
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "data_report.json").write_text(
        json.dumps({"sources": [{"formats": ["preference"], "pairs": 1234}]})
    )
    source = open_source(trained / "ddp-tied")
    card = render_card(
        replace(source, run=run, state={**source.state, "recipe": {**source.recipe, **keys}}),
        "mine",
    )
    assert "dpo" in yaml.safe_load(card.split("---")[1])["tags"]
    for part in (
        "| Method | dpo: beta 0.2, loss_type hinge |",
        "| Reward margin, last | 1.25 |",
        "| Pairs in order, last | 0.75 |",
        "| Pairs in order, last, held out | 0.625 |",
        "| training | chat.jsonl | train | preference | 1.0 | 1,234 pairs |",
    ):
        assert part in card, part


@pytest.mark.parametrize(("base", "expected"), [(None, "v1"), ("another/model", None)])
def test_an_adapter_names_the_revision_of_its_base(
    base: str | None, expected: str | None, trained: Path, tmp_path: Path
) -> None:
    """Else PEFT, vLLM and `finetune chat` would take the newest."""
    source = open_source(trained / "ddp-lora")
    source = replace(
        source, state={**source.state, "recipe": {**source.recipe, "model_revision": "v1"}}
    )
    source = source if base is None else replace(source, base_model=base)
    export_source(source, tmp_path / "out", ExportOptions(verify=False))
    config = json.loads(next((tmp_path / "out").rglob("adapter_config.json")).read_text())
    assert (
        config.get("revision") == expected
        and config["base_model_name_or_path"] == source.base_model
    )


IMPORTED = """
import sys
from pathlib import Path
from finetune.export.source import open_source
before = set(sys.modules)
for folder in sys.argv[1:]:
    open_source(Path(folder))
print(sorted(name for name in set(sys.modules) - before if name.split(".")[0] in ("finetune", "transformers", "torch")))
"""


@pytest.mark.cold
def test_a_source_is_opened_without_imports_since_another_thread_makes_them(trained: Path) -> None:
    """Of modules that import each other in a circle, two threads can each see half."""
    ended = run_command(
        ["python", "-c", IMPORTED, *(str(trained / f"ddp-{kind}") for kind in ("tied", "lora"))]
    )
    assert ended.stdout.splitlines()[-1:] == ["[]"], ended


@pytest.mark.parametrize("kind", ["tied", "lora"])
def test_the_end_of_a_run_leaves_export_and_adapter(kind: str, trained: Path) -> None:
    run = trained / f"ddp-{kind}"
    for _ in range(2):  # a run that is resumed after its end exports again
        export_run(run, verify=False)
    assert (run / "adapter" / "adapter_config.json").exists() == (kind == "lora")
    assert not (run / "export" / "adapter").exists()
    merged = AutoModelForCausalLM.from_pretrained(run / "export")
    torch.testing.assert_close(logits_of(merged), in_training(trained, run.name))


def test_generation_config_and_model_stand_without_the_base(
    trained: Path, tmp_path: Path, capsys: Any
) -> None:
    run, out = trained / "fsdp2-untied", tmp_path / "out"
    (checkpoint,) = (run / "checkpoints").glob("step-*")
    shutil.copytree(checkpoint, tmp_path / checkpoint.name)
    shutil.rmtree(tmp_path / checkpoint.name / "optimizer")  # nothing of it is exported
    command = ["export", str(tmp_path / checkpoint.name), "--output", str(out), "--no-verify"]
    assert main([*command, "--base-model", str(tmp_path / "moved")]) == 2
    assert (
        "moved: the base model's folder is gone; name its new place with --base-model"
        in capsys.readouterr().err
    )
    base = (trained / "model-untied").rename(tmp_path / "base")
    try:
        assert main(command) == 0
    finally:
        base = base.rename(trained / "model-untied")
    assert json.loads((out / "generation_config.json").read_text()) == GENERATION
    assert json.loads((out / "config.json").read_text())["use_cache"] is True, (
        "as the base's, though training turns it off"
    )
    base_tokenizer, tokenizer = (
        json.loads((at / "tokenizer_config.json").read_text()) for at in (base, out)
    )
    assert tokenizer == base_tokenizer
    assert torch.equal(
        logits_of(AutoModelForCausalLM.from_pretrained(out)), in_training(trained, run.name)
    )


def test_the_recipe_can_name_the_dtype(trained: Path) -> None:
    export_run(trained / "fsdp1-tied", verify=False)
    found = load_file(trained / "fsdp1-tied" / "export" / "model.safetensors")
    assert {tensor.dtype for tensor in found.values()} == {torch.float16}


def test_a_damaged_checkpoint_is_not_exported(
    trained: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    shutil.copytree(trained / "fsdp2-untied" / "checkpoints", run / "checkpoints")
    (checkpoint,) = (run / "checkpoints").glob("step-*")
    part = next((checkpoint / "model").glob("*.safetensors"))
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    folders = (run, checkpoint.parent, checkpoint, checkpoint / "model")
    for folder, source in [
        *((tmp_path, each) for each in folders),
        *((each, ".") for each in folders),
    ]:
        monkeypatch.chdir(folder)
        assert main(["export", str(source), "--output", str(out), "--no-verify"]) == 2
        assert f"model/{part.name} does not match its checksum" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.slow
def test_stories260k_of_two_ranks_has_the_logits_of_the_training_in_every_layout(
    shared: Path, tmp_path: Path
) -> None:
    chat, runs = make_chat(tmp_path / "chat.jsonl", rows=8), []
    for layout in LAYOUTS:
        recipe = {
            "model_name_or_path": str(shared / "models" / "stories260k"),
            "datasets": [{"path": str(chat)}],
            "chat_template": "chatml",
            "output_dir": str(tmp_path / layout),
        }
        (tmp_path / f"{layout}.yaml").write_text(yaml.safe_dump(recipe))
        runs.append({"name": layout, "layout": layout, "recipe": str(tmp_path / f"{layout}.yaml")})
    given = {"folder": str(tmp_path), "layouts": LAYOUTS, "runs": runs, "accelerate": []}
    launch_ranks(ROOT / "tests" / "export" / "trained.py", [json.dumps(given)], timeout=240).check()
    for layout in LAYOUTS:
        out = tmp_path / f"{layout}-export"
        assert (
            main(["export", str(tmp_path / layout), "--output", str(out), "--dtype", "float32"])
            == 0
        )
        assert torch.equal(
            logits_of(AutoModelForCausalLM.from_pretrained(out)), in_training(tmp_path, layout)
        )
