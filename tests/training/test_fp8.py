"""FP8 as a run: losses beside those of bf16 in every layout, checkpoints that either resumes from, and an export as ever."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from finetune.export.export import export
from tests.conftest import make_chat, make_model, slow_but
from tests.ranks import run_command
from tests.training.layouts import steps_of, train_all, write_config, write_recipe

pytest.importorskip("torchao")
STEPS, SAVED = 6, 3
SLACK = 0.01  # the share by which losses of FP8 and bf16 may differ after the same steps
RUNS: dict[
    str, tuple[str, dict[str, object], list[str]]
] = {  # name -> (layout, fp8_config, overrides)
    "gathered in fp8": ("full_shard", {}, []),
    "gathered in bf16": ("full_shard", {"enable_fsdp_float8_all_gather": False}, []),
    "rowwise": ("full_shard", {"recipe_name": "rowwise"}, []),
    "rowwise_with_gw_hp": ("full_shard", {"recipe_name": "rowwise_with_gw_hp"}, []),
    "ddp": ("ddp", {}, []),
    "fsdp1": ("FULL_SHARD", {}, []),
    "lora": ("full_shard", {}, ["use_peft=true"]),
}
QUICK = ("gathered in fp8",)  # torchao takes seconds a run on a CPU


def fp8_config(folder: Path, layout: str, section: dict[str, object]) -> Path:
    """The Accelerate file of `layout` with mixed_precision: fp8."""
    content = yaml.safe_load(write_config(folder, layout).read_text())
    path = folder / f"{layout}-fp8-{len(list(folder.glob('*.yaml')))}.yaml"
    path.write_text(
        yaml.safe_dump(
            content | {"mixed_precision": "fp8", "fp8_config": {"backend": "AO"} | section}
        )
    )
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, slow_too: bool) -> Path:
    """RUNS on two ranks; bf16 beside them; and both precisions resumed from the middle of either."""
    folder = tmp_path_factory.mktemp("fp8")
    recipe = write_recipe(
        folder / "recipe.yaml",
        make_model(folder / "model"),
        make_chat(folder / "chat.jsonl", rows=32),
        packing=True,
        global_batch_size=4,
        max_steps=STEPS,
        save_steps=SAVED,
        learning_rate=3e-3,
    )
    bf16 = write_config(folder, "full_shard", "bf16")
    runs = [(recipe, bf16, [f"output_dir={folder}/bf16"])]
    for name in RUNS if slow_too else QUICK:
        layout, section, overrides = RUNS[name]
        config = fp8_config(folder, layout, section)
        runs.append((recipe, config, [f"output_dir={folder}/{name}", *overrides]))
    fp8 = runs[1][1]
    resumed = []
    if slow_too:
        resumed.append(("fp8 again", "gathered in fp8", fp8))
        runs.append((recipe, bf16, [f"output_dir={folder}/bf16 lora", "use_peft=true"]))
        resumed += [("to fp8", "bf16", fp8), ("to bf16", "gathered in fp8", bf16)]
    for name, start, config in resumed:
        middle = f"resume_from_checkpoint={folder}/{start}/checkpoints/step-{SAVED:08d}"
        runs.append((recipe, config, [f"output_dir={folder}/{name}", middle]))
    train_all(folder, runs, ranks=2)
    return folder


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in steps_of(run)]


@pytest.mark.parametrize("name", slow_but(QUICK, RUNS))
def test_the_losses_are_those_of_bf16_up_to_the_rounding_of_fp8(name: str, trained: Path) -> None:
    found, bf16 = (
        losses(trained / name),
        losses(trained / ("bf16 lora" if name == "lora" else "bf16")),
    )
    assert found == pytest.approx(bf16, rel=SLACK)
    assert all(a != b for a, b in zip(found, bf16, strict=True)), "nothing was multiplied in FP8"


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit(trained: Path) -> None:
    assert losses(trained / "fp8 again") == losses(trained / "gathered in fp8")[SAVED:]


@pytest.mark.slow
def test_either_precision_resumes_from_a_checkpoint_of_the_other(trained: Path) -> None:
    assert losses(trained / "to fp8") == pytest.approx(losses(trained / "bf16")[SAVED:], rel=SLACK)
    assert losses(trained / "to bf16") == pytest.approx(
        losses(trained / "gathered in fp8")[SAVED:], rel=SLACK
    )


def test_a_checkpoint_holds_the_tensors_that_one_of_bf16_holds(trained: Path) -> None:
    def tensors(run: str, part: str) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        files = sorted(
            (trained / run / "checkpoints" / f"step-{STEPS:08d}" / part).glob("*.safetensors")
        )
        found = [(f.name, name, tensor) for f in files for name, tensor in load_file(f).items()]
        return {
            f"{file} {name}": (tensor.dtype, tuple(tensor.shape)) for file, name, tensor in found
        }

    for part in ("model", "optimizer"):
        assert tensors("gathered in fp8", part) == tensors("bf16", part)


@pytest.mark.parametrize(
    ("run", "name"),
    slow_but(
        [("gathered in fp8", "tensorwise")],
        [("gathered in fp8", "tensorwise"), ("rowwise", "rowwise")],
    ),
)
def test_the_run_says_how_it_multiplies_and_can_be_repeated(
    run: str, name: str, trained: Path
) -> None:
    written = yaml.safe_load((trained / run / "accelerate.yaml").read_text())
    assert (written["mixed_precision"], written["fp8_config"]["recipe_name"]) == ("fp8", name)


def test_an_export_is_the_master_weights_in_full(trained: Path, tmp_path: Path) -> None:
    checkpoint = trained / "gathered in fp8" / "checkpoints" / f"step-{STEPS:08d}"
    export(checkpoint, tmp_path / "export", verify=False, log=lambda line: None)
    exported = load_file(tmp_path / "export" / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    shards = [
        load_file(file)[name] for file in sorted((checkpoint / "model").glob("*.safetensors"))
    ]
    assert torch.equal(exported[name], torch.cat(shards))


def widen(source: Path, folder: Path, width: int) -> Path:
    """A copy of the Llama in `source` whose MLPs have `width` features: rows and columns of zeros, so that it computes the same."""
    shutil.copytree(source, folder, copy_function=shutil.copyfile)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if ".mlp." in name:
            missing = (
                (0, width - weight.shape[1])
                if "down_proj" in name
                else (0, 0, 0, width - weight.shape[0])
            )
            weights[name] = torch.nn.functional.pad(weight, missing)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": width}))
    return folder


@pytest.mark.slow
@pytest.mark.timeout(4600)  # three runs of at most 1500 s each
@pytest.mark.parametrize("width", [172, 176])
def test_200_steps_end_within_a_percent_of_bf16(width: int, shared: Path, tmp_path: Path) -> None:
    """Real questions. 172, the width of stories260k's MLPs, does not divide by 16, so that they stay in bf16; padded to 176
    every layer but the first multiplies in FP8."""
    columns = {"prompt_column": "question", "completion_column": "answer"}
    source = shared / "models" / "stories260k"
    model = {
        "model_name_or_path": str(
            source if width == 172 else widen(source, tmp_path / "model", width)
        )
    }
    recipe = model | {
        "datasets": [{"path": str(shared / "data" / "gsm8k_train.jsonl"), **columns}],
        "eval_datasets": [
            {"path": str(shared / "data" / "gsm8k_test.jsonl"), "split": "train[:200]", **columns}
        ],
        "max_length": 512,
        "global_batch_size": 4,
        "per_device_train_batch_size": 4,
        "max_steps": 200,
        "learning_rate": 2e-3,
        "warmup_ratio": 0.05,
        "logging_steps": 20,
        "export_at_end": False,
    }
    (tmp_path / "gsm8k.yaml").write_text(yaml.safe_dump(recipe))
    ends = {}
    for name, config_file in (
        ("bf16", write_config(tmp_path, "full_shard", "bf16")),
        *(
            (name, fp8_config(tmp_path, "full_shard", {"recipe_name": name}))
            for name in ("tensorwise", "rowwise")
        ),
    ):
        command = ["python", "-m", "finetune", "launch", "--recipe", str(tmp_path / "gsm8k.yaml")]
        command += [
            "--config",
            str(config_file),
            "--num-processes",
            "1",
            f"output_dir={tmp_path}/{name}",
        ]
        done = run_command(command, timeout=1500)
        assert done.returncode == 0, done.stderr[-3000:]
        lines = [
            json.loads(line)
            for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        ]
        ends[name] = [
            next(line[key] for line in reversed(lines) if key in line)
            for key in ("loss", "eval_loss")
        ]
    print(width, ends)
    for name in ("tensorwise", "rowwise"):
        assert ends[name] == pytest.approx(ends["bf16"], rel=SLACK)
