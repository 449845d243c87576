"""The shipped Accelerate files, read by Accelerate itself: what its launcher would put in the ranks' environment."""

import os
from pathlib import Path

import pytest
from accelerate.commands.config import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env

from finetune.config.accelerate_file import ACCELERATE_CONFIGS

FILES = sorted(ACCELERATE_CONFIGS.glob("*.yaml"))


@pytest.fixture(autouse=True)
def nothing_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without the variables that a launcher passes on."""
    for name in [
        name
        for name in os.environ
        if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_"))
    ]:
        monkeypatch.delenv(name)


def launched_environment(name: str, *flags: str) -> dict[str, str]:
    """The environment that `accelerate launch --config_file NAME` gives its ranks."""
    arguments = [
        "--config_file",
        str(ACCELERATE_CONFIGS / f"{name}.yaml"),
        "--main_process_port",
        "0",
        *flags,
    ]
    parsed, _, _ = _validate_launch_command(
        launch_command_parser().parse_args([*arguments, "finetune/run.py"])
    )
    return {key: value for key, value in prepare_multi_gpu_env(parsed).items() if value}


def test_all_the_promised_files_are_there() -> None:
    assert {"fsdp_full_shard", "fsdp_shard_grad_op", "fsdp_hybrid_shard", "fsdp_cpu_offload"} <= {
        f.stem for f in FILES
    }
    assert {"fsdp1_full_shard", "ddp", "single"} <= {f.stem for f in FILES}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_accelerate_loads_the_file(file: Path) -> None:
    config = load_config_from_file(str(file))
    assert config.mixed_precision == "bf16"
    known = vars(launch_command_parser().parse_args(["finetune/run.py"]))
    unknown = [
        key for key in {**config.fsdp_config, **config.parallelism_config} if key not in known
    ]
    assert not unknown, "keys that Accelerate's launcher would drop without a word"


def test_the_launcher_passes_on_what_the_files_say() -> None:
    full = launched_environment("fsdp_full_shard", "--num_processes", "2")
    assert full["ACCELERATE_USE_FSDP"] == "true"
    assert full["FSDP_VERSION"] == "2"
    assert full["FSDP_RESHARD_AFTER_FORWARD"] == "true"
    assert full["FSDP_AUTO_WRAP_POLICY"] == "TRANSFORMER_BASED_WRAP"
    assert full["FSDP_TRANSFORMER_CLS_TO_WRAP"] == "LlamaDecoderLayer"
    assert full["FSDP_ACTIVATION_CHECKPOINTING"] == "true"
    assert full["FSDP_STATE_DICT_TYPE"] == "SHARDED_STATE_DICT"
    assert full["ACCELERATE_MIXED_PRECISION"] == "bf16"

    assert "FSDP_TRANSFORMER_CLS_TO_WRAP" not in launched_environment(
        "fsdp_full_shard_auto", "--num_processes", "2"
    )
    assert (
        launched_environment("fsdp_shard_grad_op", "--num_processes", "2")[
            "FSDP_RESHARD_AFTER_FORWARD"
        ]
        == "false"
    )
    assert (
        launched_environment("fsdp_cpu_offload", "--num_processes", "2")["FSDP_OFFLOAD_PARAMS"]
        == "true"
    )

    hybrid = launched_environment("fsdp_hybrid_shard", "--num_processes", "64")
    assert (
        hybrid["PARALLELISM_CONFIG_DP_REPLICATE_SIZE"],
        hybrid["PARALLELISM_CONFIG_DP_SHARD_SIZE"],
    ) == ("2", "32")

    divided = launched_environment("fsdp_tensor_parallel", "--num_processes", "8")
    assert (divided["PARALLELISM_CONFIG_TP_SIZE"], divided["PARALLELISM_CONFIG_DP_SHARD_SIZE"]) == (
        "4",
        "2",
    )
    divided = launched_environment("fsdp_sequence_parallel", "--num_processes", "8")
    assert (divided["PARALLELISM_CONFIG_CP_SIZE"], divided["PARALLELISM_CONFIG_DP_SHARD_SIZE"]) == (
        "8",
        "1",
    )
    first = launched_environment("fsdp1_full_shard", "--num_processes", "2")
    assert (first["FSDP_VERSION"], first["FSDP_SHARDING_STRATEGY"]) == ("1", "FULL_SHARD")
    assert "ACCELERATE_USE_FSDP" not in launched_environment("ddp", "--num_processes", "2")


def test_full_shard_auto_is_full_shard_without_the_class() -> None:
    full = load_config_from_file(str(ACCELERATE_CONFIGS / "fsdp_full_shard.yaml"))
    auto = load_config_from_file(str(ACCELERATE_CONFIGS / "fsdp_full_shard_auto.yaml"))
    assert full.fsdp_config.pop("fsdp_transformer_layer_cls_to_wrap") == "LlamaDecoderLayer"
    assert full == auto
