"""What a run shows: plain lines, samples, early stopping, the best checkpoint, trackers, a dry run."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from finetune.checkpoint.folders import step_folder
from finetune.checkpoint.manifest import Progress
from finetune.config.accelerate_file import read_sharding
from finetune.config.compatibility import TRACKERS
from finetune.config.layout import Sharding
from finetune.config.reader import read_recipe
from finetune.constants import read_versions
from finetune.distributed.world import World
from finetune.errors import UserError
from finetune.models import attention_kernels
from finetune.run import fine_tune
from finetune.training import lifecycle, loop
from finetune.training.screens import _describe_attention, explain_out_of_memory, last_screen
from finetune.training.training_run import describe_environment
from tests.plan.run_specs import make_spec
from tests.ranks import ROOT, launch_ranks

RUN = ROOT / "finetune" / "run.py"


def _lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]  # U+2028 ends no line


@pytest.mark.parametrize(
    ("losses", "more", "warns"),
    [
        ([2.0, 2.5, 2.2], {}, True),
        ([2.0, 2.5, 1.9], {}, False),
        ([2.0, 2.01, 2.015], {}, False),
        ([2.0, float("nan")], {}, False),
        ([-2.0, -1.0], {"eval_reward": 1.0}, False),
    ],
)
def test_a_model_that_became_worse_on_held_out_rows_is_said_to(
    losses: list[float], more: dict[str, float], warns: bool, tmp_path: Path
) -> None:
    """The best checkpoint is the best of those that were trained, and may be worse than the base."""
    lines = [{"step": step, "eval_loss": loss} | more for step, loss in enumerate(losses)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    said = [line for line in last_screen(tmp_path, len(losses)) if line.startswith("warning")]
    expected = (
        "warning the held-out loss was 2.0000 before the first step, and at the lowest 2.2000 after it (step 2): on the "
        "held-out rows the model is worse than before; lower learning_rate, or train on rows that are more like them"
    )
    assert said == [expected] * warns


@pytest.mark.parametrize(
    ("best", "said"),
    [
        (2, "step 3: stopped early; the held-out loss was lowest at step 2"),
        (None, "step 3: stopped early; no held-out loss was a number"),
    ],
)
def test_an_early_stop_names_the_best_step_if_there_is_one(best: int | None, said: str) -> None:
    lines: list[str] = []
    run: Any = SimpleNamespace(log=SimpleNamespace(say=lines.append))
    loop._say_early_stop(run, Progress(step=3, best_step=best))
    assert lines == [said]


def test_a_run_that_no_longer_learns_stops_early_and_exports_its_best(
    tiny_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    """The learning rate is so small that no weight changes, and the second held-out loss cannot be lower than the first."""
    recipe = tiny_recipe(
        eval_split_size=4,
        eval_steps=1,
        early_stopping_patience=2,
        keep_best_checkpoint=True,
        save_total_limit=1,
        max_steps=8,
        learning_rate=1e-30,
        sample_prompts=["How much is 1 plus 1?\u2028In one word.", "And 2?"],
        exact_match_samples=1,
        report_to="tensorboard" if find_spec("tensorboard") else "none",
        accelerate_config="fsdp_full_shard",
    )
    ended = launch_ranks(RUN, ["--recipe", str(recipe)], timeout=240).check()
    run, said = tmp_path / "run", ended.outputs[0]
    assert "step 3: stopped early; the held-out loss was lowest at step 1" in said
    assert next(line for line in said.splitlines() if line.startswith("step 1/8  loss ")).endswith(
        " left"
    )
    assert ended.outputs[1] == ""  # the other rank says nothing
    assert {path.name for path in (run / "checkpoints").glob("step-*")} == {
        "step-00000001",
        "step-00000003",
    }
    samples = [
        s for s in _lines(run / "samples.jsonl") if "How much is 1 plus 1?" in str(s["prompt"])
    ]
    assert [s["step"] for s in samples] == [0, 1, 2, 3]
    assert [line["step"] for line in _lines(run / "metrics.jsonl") if "eval_loss" in line] == [
        0,
        1,
        2,
        3,
    ]
    assert (
        "checkpoints/step-00000001" in (run / "export" / "README.md").read_text()
        or "best    step 1" in said
    )
    assert json.loads((run / "data_report.json").read_text())["examples"] == 20
    if find_spec("tensorboard"):
        assert list((run / "tensorboard").rglob("events.out.tfevents.*"))


def test_a_best_step_without_a_checkpoint_does_not_keep_the_run_from_its_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was evaluated and not saved, or lies in the folder that the run was resumed from."""
    said, exported = list[str](), list[Path | None]()
    recipe = SimpleNamespace(checkpoint=SimpleNamespace(keep_best_checkpoint=True))
    run: Any = SimpleNamespace(
        recipe=recipe, folder=tmp_path, log=SimpleNamespace(say=said.append), phases=None
    )
    monkeypatch.setattr(
        "finetune.export.export.export_run",
        lambda folder, checkpoint, log, phases: exported.append(checkpoint),
    )
    lifecycle.export(run, Progress(step=9, best_step=5, best_eval_loss=1.0))
    step_folder(tmp_path, 5).mkdir(parents=True)
    lifecycle.export(run, Progress(step=9, best_step=5, best_eval_loss=1.0))
    assert (
        exported == [None, step_folder(tmp_path, 5)]
        and "the newest one is exported" in said[1]
        and len(said) == 3
    )


def test_a_dry_run_prints_the_plan_and_leaves_nothing(
    tiny_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    recipe = tiny_recipe(accelerate_config="fsdp_full_shard")
    said = launch_ranks(RUN, ["--recipe", str(recipe), "--dry-run"], timeout=120).check().outputs
    assert "2 ranks x 2 micro-batches x 1 row" in said[0]
    assert "2 x LlamaDecoderLayer" in said[0]
    assert "4 in all" in said[0]
    assert "attention  causal SDPA, document by document" in said[0]
    assert said[0].endswith(
        "nothing was trained; the same command without --dry-run starts the run\n"
    )
    assert said[1] == ""
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("family", "precision", "dropout", "both_ways", "said"),
    [
        ("llama", "bf16", 0.0, False, "varlen"),
        ("llama", "bf16", 0.1, False, "causal SDPA, document by document"),
        ("llama", "no", 0.0, False, "causal SDPA, document by document"),
        ("llama", "bf16", 0.0, True, "in both directions, varlen"),
        ("gemma2", "bf16", 0.0, False, "flex_attention"),
        ("gemma2", "no", 0.0, False, "flex_attention"),
        ("gemma2", "bf16", 0.1, False, "causal products, document by document"),
        ("gemma2", "bf16", 0.0, True, "in both directions, products, document by document"),
        ("gpt_oss", "bf16", 0.0, False, "flex_attention"),
    ],
)
def test_a_dry_run_names_the_kernel_that_a_gpu_will_run(
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    precision: Literal["no", "bf16"],
    dropout: float,
    both_ways: bool,
    said: str,
) -> None:
    """Against the kernel that attention chooses for queries that say they are on a GPU."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "head_dim": 16}
    config = CONFIG_MAPPING[family](**sizes, vocab_size=256, attention_dropout=dropout)
    sharding = Sharding(layout="fsdp2", mixed_precision=precision)
    spec = make_spec(config.to_dict(), ranks=1, sharding=sharding)
    if both_ways:
        method = replace(spec.recipe.method, method="masked_diffusion")
        spec = replace(spec, recipe=replace(spec.recipe, method=method))
    assert _describe_attention(spec) == said
    kernels = {
        "_attend_varlen": "varlen",
        "attend_in_blocks": "flex_attention",
        "_attend_each_document": "document by document",
    }
    for kernel, name in kernels.items():
        monkeypatch.setattr(attention_kernels, kernel, lambda *_, name=name, **__: name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    layer = model.model.layers[0].self_attn
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    states: Any = SimpleNamespace(
        is_cuda=True, dtype=dtype, itemsize=dtype.itemsize, shape=(1, 4, 8, 16)
    )
    documents = attention_kernels.RowDocuments(
        torch.tensor([0, 8]),
        8,
        (8,),
        masks=dict.fromkeys(attention_kernels.find_windows(model), "a mask"),
        visible=torch.ones(1, 8, dtype=torch.bool) if both_ways else None,
    )
    options = attention_kernels.ScoreOptions(
        window=getattr(layer, "sliding_window", None),
        softcap=getattr(layer, "attn_logit_softcapping", None),
        dropout=layer.attention_dropout,
        sinks=getattr(layer, "sinks", None),
    )
    kernel = attention_kernels.attend_documents(states, states, states, documents, options)
    assert said.endswith(kernel)


@pytest.mark.parametrize(
    "kind", ["shape", "missing", "lora", "frozen", "adapter", "teacher", "output_dir", "a file"]
)
def test_a_dry_run_finds_what_loading_and_the_first_save_would(
    kind: str, tiny_recipe: Callable[..., Path], tiny_llama: Callable[..., Path], tmp_path: Path
) -> None:
    """Headers of the weights alone are read, and nothing is left in the output folder."""
    model = tiny_llama()
    other = tmp_path / "other"
    shutil.copytree(model, other)
    weights = load_file(other / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    if kind == "missing":
        del weights[name]
    else:
        weights[name] = weights[name][:-1].clone()
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    (tmp_path / "file").write_text("")
    named: dict[str, tuple[dict[str, object], str]] = {
        "shape": ({"model_name_or_path": str(other)}, f"{other}: .*up_proj.weight.*shape"),
        "missing": ({"model_name_or_path": str(other)}, f"{other}: .*up_proj.weight"),
        "lora": (
            {"use_peft": True, "lora_target_modules": ["query"]},
            "lora_target_modules: query: no such linear layer",
        ),
        "frozen": (
            {"frozen_modules": ["encoder"]},
            "frozen_modules: encoder: names no module of the model",
        ),
        "adapter": (
            {"use_peft": True, "modules_to_save": ["classifier"]},
            "modules_to_save: classifier: names no module",
        ),
        "teacher": (
            {"method": "distill", "teacher_model_name_or_path": str(other)},
            f"{other}: .*up_proj.weight.*shape",
        ),
        "output_dir": (
            {"output_dir": "/proc/run"},
            r"/proc/run: cannot be written \(.*\); set output_dir",
        ),
        "a file": (
            {"output_dir": str(tmp_path / "file" / "run")},
            r"file/run: cannot be written \(Not a directory\)",
        ),
    }
    keys, sentence = named[kind]
    recipe = tiny_recipe(accelerate_config="single", **keys)
    with pytest.raises(UserError, match=sentence) as error:
        fine_tune(read_recipe(str(recipe)), read_sharding("single", None, {}), dry_run=True)
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()


def test_a_tracker_that_is_not_installed_is_one_sentence_before_anything_is_loaded(
    tiny_recipe: Callable[..., Path],
) -> None:
    missing = next((name for name in TRACKERS if find_spec(name) is None), None)
    if missing is None:
        pytest.skip("every tracker is installed")
    recipe = read_recipe(str(tiny_recipe(report_to=missing)))
    for dry_run in (False, True):
        with pytest.raises(UserError) as error:
            fine_tune(recipe, read_sharding("single", None, {}), dry_run)
        assert f'pip install -e ".[{missing}]"' in str(error.value)
        assert "\n" not in str(error.value)


def test_out_of_memory_is_answered_with_the_plan_and_the_next_change(
    tiny_recipe: Callable[..., Path],
) -> None:
    recipe = read_recipe(str(tiny_recipe(per_device_train_batch_size=4)))
    world = World(
        0,
        1,
        0,
        1,
        torch.device("cpu"),
        Sharding(layout="fsdp2", activation_checkpointing=True),
        None,
    )  # type: ignore[arg-type]
    with pytest.raises(UserError) as answered, explain_out_of_memory(recipe, world):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    said = str(answered.value).splitlines()
    assert said[0] == "rank 0: out of memory: CUDA out of memory"
    assert "activations" in said[-2]
    assert said[-1].startswith("next       per_device_train_batch_size=1")


def test_out_of_memory_of_a_model_without_a_plan_is_still_out_of_memory(
    tiny_recipe: Callable[..., Path],
) -> None:
    """It was answered with the plan's refusal alone, as if the family could not be trained."""
    recipe = read_recipe(str(tiny_recipe()))
    config = Path(str(recipe.model.model_name_or_path)) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "its_own_code"}))
    world = World(0, 1, 0, 1, torch.device("cpu"), Sharding(layout="fsdp2"), None)  # type: ignore[arg-type]
    with pytest.raises(UserError) as answered, explain_out_of_memory(recipe, world):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    first, planned, after = str(answered.value).splitlines()
    assert first == "rank 0: out of memory: CUDA out of memory"
    assert planned.startswith("planned    not known: ") and "its_own_code" in planned
    assert after.startswith("next       more ranks")


def test_the_environment_names_the_optional_packages_that_are_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def version(name: str) -> str:
        if name == "torchao":
            raise metadata.PackageNotFoundError(name)
        return f"{name} 1"

    monkeypatch.setattr(metadata, "version", version)
    read_versions.cache_clear()
    try:
        world = World(0, 1, 0, 1, torch.device("cpu"), Sharding(layout="single"), None)  # type: ignore[arg-type]
        packages = describe_environment(world)["packages"]
    finally:
        read_versions.cache_clear()
    assert packages["bitsandbytes"] == "bitsandbytes 1" and packages["torch"] == "torch 1"
    assert "torchao" not in packages
