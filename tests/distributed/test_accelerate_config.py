"""Accelerate files, read strictly: what Accelerate would ignore or contradict is an error before anything is loaded."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config import load_config_from_file
from accelerate.utils import str_to_bool

from finetune.config.accelerate_file import ACCELERATE_CONFIGS, read_sharding
from finetune.config.compatibility import find_problems, refuse_problems
from finetune.config.layout import Fp8, Sharding, to_accelerate_config
from finetune.config.schema import Recipe
from finetune.errors import UserError
from tests.ranks import run_command
from tests.test_accelerate_configs import launched_environment

Write = Callable[..., str]
FOUR = {"WORLD_SIZE": "4"}
FSDP2: dict[str, Any] = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A maker of Accelerate files: `write(fsdp_config={...}, mixed_precision="bf16")` -> its path."""

    def make(**content: Any) -> str:
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump({"distributed_type": "FSDP"} | content))
        return str(path)

    return make


def refusal(
    config: str | None, environ: dict[str, str] | None = None, recipe: str | None = None
) -> str:
    with pytest.raises(UserError) as error:
        environ = {"WORLD_SIZE": "2"} | (environ or {})
        sharding = read_sharding(config, recipe, environ)
        refuse_problems(
            find_problems(Recipe(path="recipe.yaml"), sharding, ranks=int(environ["WORLD_SIZE"]))
        )
    return str(error.value)


def test_a_mistyped_key_inside_fsdp_config(write: Write) -> None:
    said = refusal(write(fsdp_config=FSDP2 | {"fsdp_activation_checkpointng": True}))
    assert (
        "fsdp_activation_checkpointng: no such key; did you mean fsdp_activation_checkpointing?"
        in said
    )


def test_a_recipes_size_in_a_mesh(write: Write) -> None:
    said = refusal(write(fsdp_config=FSDP2, parallelism_config={"parallelism_config_ep_size": 2}))
    assert said.endswith(
        "parallelism_config_ep_size: no such key; it is expert_parallel_size of the recipe; move it there"
    )


def test_all_mistakes_at_once(write: Write) -> None:
    said = refusal(write(mixed_precison="bf16", fsdp_config=FSDP2 | {"fsdp_ofload_params": True}))
    assert "did you mean mixed_precision?" in said
    assert "did you mean fsdp_offload_params?" in said


def test_a_recipe_given_as_config_and_the_reverse(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model_name_or_path: x\ndatasets: [{path: y}]\n")
    assert "pass it as --recipe" in refusal(str(recipe))
    assert "quickstart: no such Accelerate config; it is a recipe, which --recipe takes" in refusal(
        "quickstart"
    )
    from finetune.config.reader import read_recipe

    with pytest.raises(UserError, match="pass it as --config"):
        read_recipe(str(ACCELERATE_CONFIGS / "ddp.yaml"))


def test_a_recipe_key_in_an_accelerate_file(write: Write) -> None:
    assert "move it to the recipe" in refusal(write(learning_rate=1e-5, fsdp_config=FSDP2))


def test_forward_prefetch_under_version_2(write: Write) -> None:
    said = refusal(write(fsdp_config=FSDP2 | {"fsdp_forward_prefetch": True}))
    assert "FSDP2 has none; remove the key, or set fsdp_version: 1" in said


def test_offload_without_fsdp(write: Write) -> None:
    said = refusal(write(distributed_type="MULTI_GPU", fsdp_config={"fsdp_offload_params": True}))
    assert said.endswith("needs FSDP; set distributed_type: FSDP, or remove the key")


def test_version_1_ignores_reshard_after_forward(write: Write) -> None:
    assert "use fsdp_sharding_strategy" in refusal(
        write(fsdp_config={"fsdp_version": 1, "fsdp_reshard_after_forward": False})
    )


def test_version_1_takes_a_strategy_under_either_key(write: Write) -> None:
    for key in ("fsdp_sharding_strategy", "fsdp_reshard_after_forward"):
        path = write(fsdp_config={"fsdp_version": 1, key: "SHARD_GRAD_OP"})
        assert read_sharding(path, None, {"WORLD_SIZE": "2"}).strategy == "SHARD_GRAD_OP"
    said = refusal(
        write(fsdp_config={"fsdp_version": 1, "fsdp_reshard_after_forward": "SOME_SHARD"})
    )
    assert "fsdp_reshard_after_forward: SOME_SHARD is not known" in said


def test_version_2_has_no_sharding_strategy(write: Write) -> None:
    assert "fsdp_reshard_after_forward" in refusal(
        write(fsdp_config=FSDP2 | {"fsdp_sharding_strategy": "SHARD_GRAD_OP"})
    )


def test_mesh_whose_product_is_not_the_world(write: Write) -> None:
    mesh = {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 4}
    said = refusal(write(fsdp_config=FSDP2, parallelism_config=mesh))
    assert ".yaml:5: dp_replicate_size 2 x dp_shard_size 4 = 8, but 2 ranks were launched" in said


@pytest.mark.parametrize("key", ["dp_replicate_size", "dp_shard_size"])
@pytest.mark.parametrize(
    "file", [{"distributed_type": "MULTI_GPU"}, {"fsdp_config": {"fsdp_version": 1}}]
)
def test_sizes_of_a_mesh_need_fsdp2(write: Write, file: dict[str, Any], key: str) -> None:
    name = f"parallelism_config_{key}"
    said = refusal(write(**file, parallelism_config={name: 2}))
    assert f"{key}: 2 needs FSDP2; set distributed_type: FSDP and fsdp_version: 2, or the" in said
    read_sharding(write(**file, parallelism_config={name: 1}), None, FOUR)


def test_sizes_of_a_mesh_by_the_environment_alone(write: Write) -> None:
    sizes = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "4"}
    assert "dp_shard_size: 4 needs FSDP2" in refusal(None, FOUR | sizes)
    mesh = {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 2}
    said = refusal(write(fsdp_config=FSDP2, parallelism_config=mesh), FOUR | sizes)
    assert (
        "dp_replicate_size 2 x dp_shard_size 2, but the launcher's settings say dp_shard_size 4"
        in said
    )


def test_hybrid_sharding_on_one_rank(write: Write) -> None:
    config = write(fsdp_config={"fsdp_version": 1, "fsdp_sharding_strategy": "HYBRID_SHARD"})
    assert "needs at least 2 ranks" in refusal(config, {"WORLD_SIZE": "1"})


def test_hybrid_sharding_that_keeps_parameters(write: Write) -> None:
    mesh = {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 2}
    keeps = FSDP2 | {"fsdp_reshard_after_forward": False}
    path = write(fsdp_config=keeps, parallelism_config=mesh)
    said = refusal(path, FOUR)
    assert (
        ".yaml:4: fsdp_reshard_after_forward: hybrid sharding (dp_replicate_size above 1)" in said
    )
    of_deepspeed = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2}}
    assert "zero_stage: 3" in refusal(write(**of_deepspeed, parallelism_config=mesh), FOUR)
    of_deepspeed["deepspeed_config"] = {"zero_stage": 3}
    path = write(**of_deepspeed, parallelism_config=mesh)
    assert read_sharding(path, None, FOUR).strategy == "HYBRID_SHARD"


def test_single_under_two_processes() -> None:
    assert "this layout is for one process, but 2 were launched" in refusal("single")


def test_the_launchers_settings_and_config_disagree(write: Write) -> None:
    launched = {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "ACCELERATE_MIXED_PRECISION": "no",
    }
    said = refusal(write(mixed_precision="bf16", fsdp_config=FSDP2), launched)
    assert "mixed_precision is 'bf16', but the launcher's settings say 'no'" in said


def test_the_launchers_settings_alone() -> None:
    launched = {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "1",
        "FSDP_SHARDING_STRATEGY": "2",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
        "FSDP_USE_ORIG_PARAMS": "true",
        "FSDP_ACTIVATION_CHECKPOINTING": "true",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "WORLD_SIZE": "2",
    }
    read = read_sharding(None, "ddp", launched)
    assert (read.layout, read.strategy, read.mixed_precision) == ("fsdp1", "SHARD_GRAD_OP", "bf16")
    assert read.activation_checkpointing


def test_the_recipes_config_then_the_launch_itself() -> None:
    assert read_sharding(None, "ddp", {"WORLD_SIZE": "2"}).layout == "ddp"
    assert read_sharding(None, None, {"WORLD_SIZE": "2"}).layout == "ddp"
    assert read_sharding(None, None, {}).layout == "single"
    assert read_sharding("fsdp_full_shard", "ddp", {"WORLD_SIZE": "2"}).layout == "fsdp2"


@pytest.mark.parametrize("name", sorted(path.stem for path in ACCELERATE_CONFIGS.glob("*.yaml")))
def test_what_a_run_writes_reads_back_the_same(name: str, tmp_path: Path) -> None:
    ranks = {
        "single": 1,
        "fsdp_hybrid_shard": 64,
        "fsdp_sequence_parallel": 8,
        "fsdp_tensor_parallel": 8,
    }.get(name, 2)
    environ = {"WORLD_SIZE": str(ranks)}
    first = read_sharding(name, None, environ)
    written = tmp_path / "accelerate.yaml"
    written.write_text(yaml.safe_dump(to_accelerate_config(first, ranks)))
    second = read_sharding(str(written), None, environ)
    assert {f: getattr(second, f) for f in Sharding.__slots__ if f not in ("source", "places")} == {
        f: getattr(first, f) for f in Sharding.__slots__ if f not in ("source", "places")
    }


def test_a_run_on_several_machines_writes_their_number(tmp_path: Path) -> None:
    """As `accelerate launch` and the plan of a report read it: ranks / num_machines are those of a machine."""
    written = tmp_path / "accelerate.yaml"
    content = to_accelerate_config(Sharding(layout="ddp"), 16, machines=4)
    written.write_text(yaml.safe_dump(content))
    assert load_config_from_file(str(written)).num_machines == 4
    assert read_sharding(str(written), None, {"WORLD_SIZE": "16"}).num_machines == 4


def test_sections_of_other_libraries(write: Write) -> None:
    """Empty, as Accelerate writes them, they ask for nothing; else they are refused by name."""
    empty: dict[str, Any] = {
        "deepspeed_config": {},
        "megatron_lm_config": {},
        "dynamo_config": None,
    }
    assert (
        read_sharding(
            write(distributed_type="MULTI_GPU", **empty), None, {"WORLD_SIZE": "2"}
        ).layout
        == "ddp"
    )
    said = refusal(write(deepspeed_config={"zero_stage": 3}, megatron_lm_config={"tp": 2}))
    assert (
        "deepspeed_config: it needs distributed_type: DEEPSPEED" in said
        and "Megatron-LM is not supported" in said
    )


def test_keys_of_older_files_say_what_they_said(write: Write) -> None:
    """Accelerate reads them as these too: fp16 before mixed_precision, dynamo_backend before dynamo_config."""
    old = write(distributed_type="MULTI_GPU", fp16=True, dynamo_backend="NO", use_cpu="false")
    sharding = read_sharding(old, None, {"WORLD_SIZE": "2"})
    assert (sharding.mixed_precision, sharding.use_cpu) == ("fp16", False)
    both = write(distributed_type="MULTI_GPU", fp16=True, mixed_precision="bf16")
    assert read_sharding(both, None, {"WORLD_SIZE": "2"}).mixed_precision == "bf16"
    said = refusal(write(distributed_type="MULTI_GPU", dynamo_backend="INDUCTOR"))
    assert said.endswith(
        "dynamo_config: set torch_compile: true in the recipe, and remove this section"
    )
    section = {"fsdp_version": 1, "fsdp_backward_prefetch_policy": "BACKWARD_PRE"}
    assert read_sharding(write(fsdp_config=section), None, {"WORLD_SIZE": "2"}).layout == "fsdp1"


@pytest.mark.parametrize(
    ("value", "uses_cpu"),
    [
        ("true", True),
        ("'True'", True),
        ("false", False),
        ("'false'", False),
        ("no", False),
        ("", False),
    ],
)
def test_a_cpu_is_used_where_the_file_says_so(tmp_path: Path, value: str, uses_cpu: bool) -> None:
    """In quotes too: text that is not empty would be true, and a run on a GPU machine slow without a word."""
    file = tmp_path / "config.yaml"
    file.write_text(f"distributed_type: MULTI_GPU\nuse_cpu: {value}\n")
    assert read_sharding(str(file), None, {"WORLD_SIZE": "2"}).use_cpu is uses_cpu
    file.write_text("distributed_type: MULTI_GPU\nuse_cpu: never\n")
    assert refusal(str(file)).endswith(".yaml:2: use_cpu: never does not fit; true or false")


def test_the_variable_for_the_cpu_is_read_beside_every_layout() -> None:
    """As Accelerate's own state reads it, which would be on the GPU without it."""
    sources = [(None, None), (None, "fsdp_full_shard"), ("fsdp_full_shard", None)]
    for value in ("true", "True", "1", "false", "False", "0"):
        environ = {"WORLD_SIZE": "2", "ACCELERATE_USE_CPU": value}
        read = [read_sharding(*source, environ).use_cpu for source in sources]
        assert read == [bool(str_to_bool(value))] * 3, value


def test_fp8_of_a_file_and_of_the_launcher(write: Write, tmp_path: Path) -> None:
    section = {"backend": "AO", "recipe_name": "rowwise", "fp8_pad_inner_dim": False}
    path = write(mixed_precision="fp8", fsdp_config=FSDP2, fp8_config=section)
    read = read_sharding(path, None, {"WORLD_SIZE": "2"})
    assert (read.mixed_precision, read.fp8) == ("bf16", Fp8("rowwise", True, False))
    again = tmp_path / "accelerate.yaml"
    again.write_text(yaml.safe_dump(to_accelerate_config(read, 2)))
    assert read_sharding(str(again), None, {"WORLD_SIZE": "2"}).fp8 == read.fp8
    pytest.importorskip("torchao")
    # What Accelerate's own launcher makes of the file.
    launched = launched_environment(str(again.with_suffix("")), "--num_processes", "2")
    assert read_sharding(None, None, launched | {"WORLD_SIZE": "2"}).fp8 == read.fp8
    bare = tmp_path / "bare.yaml"
    bare.write_text(
        yaml.safe_dump({"distributed_type": "FSDP", "mixed_precision": "fp8", "fsdp_config": FSDP2})
    )
    launched_bare = launched_environment(str(bare.with_suffix("")), "--num_processes", "2")
    assert read_sharding(str(bare), None, launched_bare | {"WORLD_SIZE": "2"}).fp8 == Fp8()
    assert read_sharding(None, None, launched_bare | {"WORLD_SIZE": "2"}).fp8 == Fp8()
    plain = {"ACCELERATE_MIXED_PRECISION": "fp8", "ACCELERATE_FP8_BACKEND": "AO", "WORLD_SIZE": "2"}
    assert (read_sharding(None, None, plain).layout, read_sharding(None, None, plain).fp8) == (
        "ddp",
        Fp8(),
    )
    said = refusal(write(mixed_precision="bf16", fsdp_config=FSDP2), launched)
    assert "fp8_config is none, but the launcher's settings say Fp8(recipe_name='rowwise'" in said


def test_what_has_no_effect_is_listed(write: Write) -> None:
    fp8 = {"recipe_name": "rowwise", "enable_fsdp_float8_all_gather": True, "margin": 0}
    mesh: dict[str, Any] = {
        "dp_shard_size": 2,
        "cp_comm_strategy": "alltoall",
        "sp_seq_length": 64,
        "sp_backend": "deepspeed",
    }
    mesh = {f"parallelism_config_{key}": value for key, value in mesh.items()}
    path = write(mixed_precision="fp8", fsdp_config=FSDP2, fp8_config=fp8, parallelism_config=mesh)
    assert [
        line.removeprefix("without effect here: ")
        for line in read_sharding(path, None, {"WORLD_SIZE": "2"}).translated
    ] == [
        "cp_comm_strategy: alltoall, sp_seq_length: 64, as ranks trade tokens for heads",
        "margin of fp8_config: not torchao's",
        "enable_fsdp_float8_all_gather, as torchao gathers in bf16 under recipe_name: rowwise",
    ]


def test_a_size_that_does_not_fit_is_named_once_with_its_line(write: Write) -> None:
    mesh = {"parallelism_config_dp_replicate_size": -2, "parallelism_config_tp_size": 0}
    path = write(fsdp_config=FSDP2, parallelism_config=mesh)
    lines = [
        number
        for number, line in enumerate(Path(path).read_text().splitlines(), 1)
        if line.endswith(("-2", " 0"))
    ]
    assert refusal(path).splitlines() == [
        f"{path}:{line}: {key} does not fit; a whole number of at least 1 is expected"
        for line, key in zip(lines, ("dp_replicate_size: -2", "tp_size: 0"), strict=True)
    ]


def test_a_digit_that_is_no_number_is_named_as_others(write: Write) -> None:
    assert refusal(write(num_machines="²")).endswith(
        ":2: num_machines: ² does not fit; a whole number is expected"
    )
    path = write(fsdp_config=FSDP2, parallelism_config={"parallelism_config_tp_size": "²"})
    assert refusal(path).endswith(
        "tp_size: ² does not fit; a whole number of at least 1 is expected"
    )


@pytest.mark.parametrize(
    ("precision", "section", "named"),
    [
        (
            "fp8",
            {"backend": "TE", "margin": 0},
            "backend: Transformer Engine is not supported; set it to AO",
        ),
        ("fp8", {"backend": "MSAMP"}, "backend: MS-AMP is not supported"),
        (
            "fp8",
            {"recipe_name": "blockwise"},
            "blockwise is not one of torchao's; use one of tensorwise, rowwise",
        ),
        (
            "fp8",
            {"pad_inner_dim": "perhaps"},
            "fp8_config.pad_inner_dim: perhaps does not fit; true or false",
        ),
        ("fp8", {"pad_iner_dim": True}, "no such key; did you mean fp8_pad_inner_dim?"),
        ("bf16", {"backend": "AO"}, "fp8_config: it needs mixed_precision: fp8"),
    ],
)
def test_what_an_fp8_section_cannot_ask_for(
    write: Write, precision: str, section: dict[str, Any], named: str
) -> None:
    assert named in refusal(write(mixed_precision=precision, fsdp_config=FSDP2, fp8_config=section))


@pytest.mark.parametrize("mesh", ["tp_size", "cp_size", "sp_size"])
def test_other_meshes_are_accepted_at_size_1(write: Write, mesh: str) -> None:
    key = f"parallelism_config_{mesh}"
    sizes = {
        "parallelism_config_dp_shard_size": 2,
        "parallelism_config_cp_comm_strategy": "allgather",
    }
    assert read_sharding(
        write(fsdp_config=FSDP2, parallelism_config=sizes | {key: 1}), None, {"WORLD_SIZE": "2"}
    )
    divided = sizes | {key: 2}
    if mesh == "tp_size":
        sharding = read_sharding(write(fsdp_config=FSDP2, parallelism_config=divided), None, FOUR)
        assert (sharding.tensor_parallel_size, sharding.shard_size, sharding.ranks_per_batch) == (
            2,
            2,
            2,
        )
    else:
        read = read_sharding(write(fsdp_config=FSDP2, parallelism_config=divided), None, FOUR)
        assert (read.sequence_parallel_size, read.ranks_per_batch, read.shard_size) == (2, 2, 2)
    said = refusal(write(fsdp_config=FSDP2, parallelism_config=divided))
    shown = "tp_size" if mesh == "tp_size" else "cp_size (or sp_size)"
    assert f"dp_shard_size 2 x {shown} 2 = 4, but 2 ranks were launched" in said
    said = refusal(write(distributed_type="MULTI_GPU", parallelism_config=divided), FOUR)
    assert f"{mesh}: 2 needs FSDP2; set distributed_type: FSDP and fsdp_version: 2" in said


def test_a_rows_tokens_are_divided_by_one_key(write: Write) -> None:
    sizes = {
        "parallelism_config_cp_size": 2,
        "parallelism_config_sp_size": 2,
        "parallelism_config_tp_size": 0,
    }
    said = refusal(write(fsdp_config=FSDP2, parallelism_config=sizes), FOUR)
    assert "cp_size: 2 and sp_size: 2 both divide the tokens of a row; set one of them to 1" in said
    del sizes["parallelism_config_sp_size"]
    said = refusal(write(fsdp_config=FSDP2, parallelism_config=sizes), FOUR)
    assert "tp_size: 0 does not fit; a whole number of at least 1 is expected" in said


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        (
            {
                "ACCELERATE_USE_DEEPSPEED": "true",
                "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "nvme",
            },
            "offload_param: nvme: parameters on NVMe are not supported",
        ),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "Megatron-LM is not supported"),
    ],
)
def test_what_only_the_launchers_environment_asks_for_is_refused(
    environ: dict[str, str], named: str
) -> None:
    assert named in refusal(None, environ, recipe="fsdp_full_shard")
    assert named in refusal("fsdp_full_shard", environ)


@pytest.mark.parametrize(
    ("key", "shown"), [("cp_size", "cp_size (or sp_size)"), ("tp_size", "tp_size")]
)
def test_sizes_in_variables_alone(key: str, shown: str) -> None:
    """Without a file they divide a layout that there is not; beside one it is the file that does not say so."""
    environ = {
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        f"PARALLELISM_CONFIG_{key.upper()}": "2",
    }
    assert f"{key}: 2 needs FSDP2" in refusal(None, environ, recipe="fsdp_full_shard")
    said = refusal("fsdp_full_shard", environ)
    assert said.endswith(
        f"fsdp_full_shard.yaml: parallelism_config is none, but the launcher's settings say dp_shard_size 1 x {shown} 2; "
        "remove --config, give both the same file, or unset the variables that say so"
    )
    assert f"{key}: 2 needs FSDP2" in refusal("ddp", environ)


def test_more_machines_than_processes(write: Write, tmp_path: Path) -> None:
    path = write(fsdp_config=FSDP2, num_machines=2, num_processes=1)
    ended = run_command(
        ["python", "-m", "finetune", "launch", "--config", path, "--num-processes", "1"]
    )
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stderr
    assert "num_machines: 2, but --num-processes 1" in ended.stderr


def test_every_published_accelerate_file_is_read_or_refused_in_a_sentence(shared: Path) -> None:
    folder = shared / "peer_configs" / "accelerate_files"
    if not folder.is_dir():
        pytest.skip("the published Accelerate files are not at hand")
    refused = set()
    for path in sorted(folder.iterdir()):
        try:
            launched = re.search(r"^num_processes: *(\d+)", path.read_text(), re.MULTILINE)
            read_sharding(str(path), None, {"WORLD_SIZE": launched[1] if launched else "8"})
        except UserError as error:
            refused.add(path.name)
            assert (
                "did you mean" not in str(error) and "is not supported" in str(error)
            ) or "invalid" in path.name
    assert not {
        name for name in refused if not {"ulysses", "invalid", "mpi"} & set(re.split(r"\W|_", name))
    }, refused


@pytest.mark.parametrize("value", ["true", "1", "{a: b}"])
def test_layer_classes_are_names(tmp_path: Path, value: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        f"distributed_type: FSDP\nfsdp_config:\n  fsdp_transformer_layer_cls_to_wrap: {value}\n"
    )
    with pytest.raises(UserError, match=r"cls_to_wrap: .* does not fit; names are expected"):
        read_sharding(str(path), None, {"WORLD_SIZE": "2"})


def test_accelerates_own_files_are_understood_key_by_key(tmp_path: Path) -> None:
    """What `accelerate config` writes holds keys of launchers and of work done otherwise here: none is an error."""
    from accelerate.commands.config.config_args import ClusterConfig

    config = ClusterConfig(
        compute_environment="LOCAL_MACHINE",
        distributed_type="FSDP",
        mixed_precision="bf16",
        use_cpu=False,
        debug=False,
        num_processes=2,
        fsdp_config={
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_reshard_after_forward": True,
            "fsdp_offload_params": False,
            "fsdp_activation_checkpointing": True,
        },
    )
    config.to_yaml_file(str(tmp_path / "config.yaml"))
    read = read_sharding(str(tmp_path / "config.yaml"), None, {"WORLD_SIZE": "2"})
    assert read.wrap_classes == ("LlamaDecoderLayer",)
