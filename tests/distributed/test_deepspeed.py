"""DeepSpeed's settings as the layout that does the same: what is translated, and what is refused in a sentence."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env

from finetune.config.accelerate_file import read_sharding
from finetune.config.compatibility import find_problems, refuse_problems
from finetune.config.layout import Sharding
from finetune.config.reader import read_recipe
from finetune.errors import UserError
from tests.ranks import run_command

AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}
Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A maker of Accelerate files for DeepSpeed: `write(zero_stage=3)`; `engine` is the JSON file that it names."""

    def make(
        engine: dict[str, Any] | None = None, file: dict[str, Any] | None = None, **section: Any
    ) -> str:
        if engine is not None:
            (tmp_path / "ds.json").write_text(json.dumps(engine))
            section["deepspeed_config_file"] = "ds.json"
        content = {"distributed_type": "DEEPSPEED", "deepspeed_config": section} | (file or {})
        (tmp_path / "accelerate.yaml").write_text(yaml.safe_dump(content))
        return str(tmp_path / "accelerate.yaml")

    return make


def read(path: str) -> Sharding:
    return read_sharding(path, None, {"WORLD_SIZE": "2"})


def refusal(path: str) -> str:
    with pytest.raises(UserError) as error:
        read(path)
    return str(error.value)


@pytest.mark.parametrize(
    ("stage", "layout", "strategy"),
    [
        (0, "ddp", "FULL_SHARD"),
        (1, "fsdp2", "SHARD_GRAD_OP"),
        (2, "fsdp2", "SHARD_GRAD_OP"),
        (3, "fsdp2", "FULL_SHARD"),
    ],
)
def test_each_stage_is_the_layout_that_shards_the_same(
    write: Write, stage: int, layout: str, strategy: str
) -> None:
    of_section = read(write(zero_stage=stage, file={"mixed_precision": "bf16"}))
    assert (of_section.layout, of_section.strategy, of_section.mixed_precision) == (
        layout,
        strategy,
        "bf16",
    )
    of_json = read(write(AUTO | {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}))
    assert (of_json.layout, of_json.strategy, of_json.mixed_precision) == (layout, strategy, "bf16")
    assert (
        of_section.translated[0].startswith(f"zero_stage {stage}: ") and not of_section.cpu_offload
    )


def test_without_a_stage_it_is_accelerates_default(write: Write) -> None:
    assert read(write(zero3_init_flag=False)).strategy == "SHARD_GRAD_OP"


def test_a_file_without_a_stage_is_deepspeeds_default(write: Write) -> None:
    """ZeRO's stage 0, whatever else the section has; auto is filled in by Accelerate."""
    assert read(write({"zero_optimization": {"overlap_comm": True}})).layout == "ddp"
    assert read(write({"zero_optimization": {"stage": "auto"}})).strategy == "SHARD_GRAD_OP"


def test_stage_0_offloads_nothing(write: Write) -> None:
    said = refusal(write(zero_stage=0, offload_optimizer_device="cpu"))
    assert said.endswith(
        "accelerate.yaml: offload_optimizer: cpu: stage 0 is DDP, which offloads nothing; set another stage, or this to none"
    )
    assert not read(write(zero_stage=0, offload_optimizer_device="none")).cpu_offload
    engine = {"zero_optimization": {"stage": 0, "offload_param": {"device": "cpu"}}}
    assert "offload_param: cpu: stage 0 is DDP" in refusal(write(engine))
    assert read(write(engine, zero_stage=3)).cpu_offload, "the section's stage replaces the file's"


def test_offload_and_activation_checkpointing(write: Write) -> None:
    fsdp = {"fsdp_config": {"fsdp_activation_checkpointing": True}}
    of_section = read(
        write(zero_stage=3, offload_optimizer_device="cpu", offload_param_device="none", file=fsdp)
    )
    assert of_section.cpu_offload and of_section.activation_checkpointing
    assert (
        "offload_optimizer: cpu: parameters, gradients and optimizer state stay in host memory"
        in of_section.translated[1]
    )
    zero = {
        "stage": 3,
        "offload_param": {"device": "cpu", "pin_memory": True},
        "offload_optimizer": {"device": "none"},
    }
    assert read(write({"zero_optimization": zero})).cpu_offload


def test_what_tunes_the_engine_is_listed_and_has_no_effect(write: Write) -> None:
    zero = {
        "stage": 2,
        "overlap_comm": True,
        "stage3_max_live_parameters": 1e9,
        "max_reuse_distance": 0,
    }
    lines = read(
        write({"zero_optimization": zero, "steps_per_print": 10, "_comment": "of its author"})
    ).translated
    assert (
        lines[1]
        == "without effect here: max_reuse_distance, overlap_comm, stage3_max_live_parameters, steps_per_print"
    )


def test_its_own_file_in_place_of_an_accelerate_file(write: Write, tmp_path: Path) -> None:
    write(AUTO | {"zero_optimization": {"stage": 3}, "fp16": {"enabled": "auto"}})
    sharding = read(str(tmp_path / "ds.json"))
    assert (sharding.strategy, sharding.mixed_precision) == ("FULL_SHARD", "no")
    assert "set bf16.enabled: true in it for bf16" in sharding.translated[-1]
    (tmp_path / "ds.json").write_text('{"train_batch_size": 8}')
    sharding = read(str(tmp_path / "ds.json"))
    assert (sharding.layout, sharding.asked) == ("ddp", (("global_batch_size", 8.0),)), (
        "stage 0 is DeepSpeed's own default"
    )
    (tmp_path / "ds.json").write_text('{"train_batch_size": 8,\n "zero_optimization": {}')
    assert "ds.json:2: not JSON: Expecting ',' delimiter" in refusal(str(tmp_path / "ds.json"))
    (tmp_path / "ds.json").write_text('{\n\t"zero_optimization": {"stage": 3,\n\t"stage": 2}}')
    assert refusal(str(tmp_path / "ds.json")).endswith("ds.json:3: stage: given twice; keep one")
    for empty, named in (("", "ds.json:1: not JSON"), ("{}", "ds.json: an empty object")):
        (tmp_path / "ds.json").write_text(empty)
        assert named in refusal(str(tmp_path / "ds.json"))


def test_the_launchers_environment() -> None:
    launched = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "WORLD_SIZE": "2",
    }
    sharding = read_sharding(None, "ddp", launched)
    assert (sharding.layout, sharding.strategy, sharding.cpu_offload) == (
        "fsdp2",
        "FULL_SHARD",
        True,
    )
    assert sharding.asked == (("gradient_accumulation_steps", 2.0),)


@pytest.mark.parametrize(
    ("file", "expected"), [({}, "bf16"), ({"mixed_precision": "bf16"}, "bf16"), ({"mixed_precision": "no"}, None)]
)  # fmt: skip
def test_a_launcher_leaves_the_precision_to_the_json_file_as_its_own_file_does(
    file: dict[str, Any], expected: str | None, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accelerate's launcher exports mixed_precision: no where its file has no such key too."""
    path = write(
        engine={**AUTO, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}, file=file
    )
    monkeypatch.chdir(Path(path).parent)
    arguments = launch_command_parser().parse_args(
        ["--config_file", path, "--num_processes", "2", "run.py"]
    )
    arguments, defaults, is_in_file = _validate_launch_command(arguments)
    # as `launch_command` does before it starts DeepSpeed's launcher
    fields = [*defaults.deepspeed_config, *(["mixed_precision"] if is_in_file else [])]
    arguments.deepspeed_fields_from_accelerate_config = ",".join(fields)
    _, environ = prepare_deepspeed_cmd_env(arguments)
    for source, given in ((path, {"WORLD_SIZE": "2"}), (None, environ)):
        if expected is None:
            with pytest.raises(UserError, match="bf16: on here, but mixed_precision is no"):
                read_sharding(source, None, given)
        else:
            assert read_sharding(source, None, given).mixed_precision == expected


@pytest.mark.parametrize(
    ("engine", "file", "said"),
    [
        (
            {"zero_optimization": {"stage": 4}},
            {},
            "zero_optimization.stage: 4 does not fit; 0, 1, 2 or 3",
        ),
        (
            {
                "zero_optimization": {
                    "stage": 3,
                    "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"},
                }
            },
            {},
            "offload_optimizer: nvme: set optim_offload: nvme and offload_dir in the recipe, and this to none",
        ),
        (
            {"zero_optimization": {"zero_quantized_weights": True}},
            {},
            "zero_quantized_weights: this part of DeepSpeed has",
        ),
        (
            {"tensor_parallel": {"autotp_size": 2}},
            {},
            "tensor_parallel: remove it; parallelism_config_tp_size",
        ),
        ({"compile": {"disable": False}}, {}, "compile: set torch_compile: true in the recipe"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}},
            {},
            "lr_scheduler_type names the schedule",
        ),
        (
            {"optimizer": {"type": "OneBitAdam"}},
            {},
            "optimizer: OneBitAdam: the recipe's optim names the optimizer",
        ),
        (
            {"bf16": {"enabled": True}},
            {"mixed_precision": "fp16"},
            "bf16: on here, but mixed_precision is fp16",
        ),
        (
            {"bf16": {"enabled": "True"}},
            {"mixed_precision": "fp16"},
            "bf16: on here, but mixed_precision is fp16",
        ),
        ({"bf16": {"enabled": 1}}, {}, "bf16.enabled: 1 does not fit; true, false or auto"),
        (
            {"bf16": {"enabled": False}},
            {"mixed_precision": "bf16"},
            "bf16: off here, but mixed_precision is bf16",
        ),
        (
            {"gradient_clipping": "high"},
            {},
            "gradient_clipping: high does not fit; a number is expected",
        ),
        ([1], {}, "an object with DeepSpeed's keys is expected"),
    ],
)
def test_what_has_no_counterpart_is_refused(
    write: Write, engine: Any, file: dict[str, Any], said: str
) -> None:
    found = refusal(write(engine, file=file))
    assert said in found and "\n" not in found


def test_what_is_off_asks_for_nothing(write: Write) -> None:
    """DeepSpeed's fp16 and bf16 are off without `enabled`."""
    zero = {"stage": 2, "zero_quantized_weights": False}
    off = {"fp16": {"loss_scale": 0}, "amp": {"enabled": False}, "compile": {"enabled": False}}
    on = read(write(off | {"zero_optimization": zero, "bf16": {"enabled": True}}))
    assert (on.strategy, on.mixed_precision) == ("SHARD_GRAD_OP", "bf16")
    assert read(write(off | {"zero_optimization": zero})).mixed_precision == "no"
    assert "compile: set torch_compile" in refusal(write({"compile": {"deepcompile": True}}))


def test_mistakes_in_the_section(write: Write, tmp_path: Path) -> None:
    found = refusal(
        write(zero_stag=3, deepspeed_hostfile="hosts", deepspeed_config_file="absent.json")
    )
    assert (
        "deepspeed_config.zero_stag: no such key" in found and "absent.json: no such file" in found
    )
    assert "deepspeed_hostfile: the ranks are started by accelerate launch on each machine" in found
    torn = write({})
    (tmp_path / "ds.json").write_text('{"zero_optimization": ')
    assert "ds.json: not JSON that can be read" in refusal(torn)


def test_numbers_that_contradict_the_recipe_are_errors(write: Write) -> None:
    recipe = read_recipe(
        "quickstart", ["learning_rate=0.003"]
    )  # 12 rows in a step, 12 in a micro-batch
    agreeing = {"train_batch_size": 12, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0}
    adam = {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": "auto", "eps": 1e-8}}
    refuse_problems(
        find_problems(
            recipe, replace(read(write(agreeing | {"optimizer": adam})), layout="single", places={})
        )
    )
    other = {"train_batch_size": 16, "gradient_accumulation_steps": 4, "gradient_clipping": 0.5}
    adam["params"] = {"lr": 1e-5}
    with pytest.raises(UserError) as error:
        refuse_problems(
            find_problems(
                recipe,
                replace(read(write(other | {"optimizer": adam})), source="f", places={}),
                ranks=2,
            )
        )
    said = str(error.value)
    assert (
        "f: train_batch_size: 16, but global_batch_size is 12 by the recipe on 2 ranks; set one to the other"
        in said
    )
    assert (
        "gradient_accumulation_steps: 4, but gradient_accumulation_steps is 1 by the recipe on 2 ranks"
        in said
    )
    assert "gradient_clipping: 0.5, but max_grad_norm is 1 by the recipe; set" in said
    assert "lr: 1e-05, but learning_rate is 0.003 by the command line; set" in said


@pytest.mark.parametrize(("max_grad_norm", "clipping"), [("null", 0), ("0.5", 0.5)])
def test_zero_clips_no_gradients(write: Write, max_grad_norm: str, clipping: float) -> None:
    recipe = read_recipe("quickstart", [f"max_grad_norm={max_grad_norm}"])
    for value in (0, 0.5):
        layout = read(write(zero_stage=2, gradient_clipping=value))
        assert (find_problems(recipe, layout, ranks=2) == []) is (value == clipping)


def test_launch_refuses_them_before_anything_is_loaded(write: Write) -> None:
    path = write(zero_stage=2, gradient_clipping=0.5)
    ended = run_command(
        ["python", "-m", "finetune", "launch", "--config", path, "--num-processes", "2"]
    )
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stderr
    assert "gradient_clipping: 0.5, but max_grad_norm is 1 by the recipe" in ended.stderr
