"""`finetune plan` as a person runs it."""

import io
import json
import os
import tracemalloc
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
import torch.distributed as dist
import yaml
from torch.distributed.fsdp._init_utils import _init_intra_node_process_group
from torch.testing._internal.distributed.fake_pg import FakeStore

from finetune.cli import main
from finetune.config.accelerate_file import read_sharding
from finetune.config.compatibility import find_problems, refuse_problems
from finetune.config.facts import with_recipe_keys
from finetune.config.layout import Sharding
from finetune.config.reader import read_recipe
from finetune.config.schema import Data, DatasetSource
from finetune.distributed.world import World
from finetune.plan.plan import _assume_ranks, make_plan
from finetune.plan.run_spec import CPU_PROCESS_BYTES
from finetune.plan.speed import estimate_epoch_tokens
from finetune.training.screens import _plan_for_world
from tests.ranks import run_command


def _plan(*arguments: str) -> tuple[int, str, str]:
    """Returns (exit code, stdout, stderr) of the command, in this process."""
    out, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(errors):
        code = main(["plan", *arguments])
    return code, out.getvalue(), errors.getvalue()


def test_a_plan_needs_no_torch_and_prints_every_phase(tiny_recipe: Callable[..., Path]) -> None:
    recipe = tiny_recipe(accelerate_config="fsdp_full_shard")
    ended = run_command(
        ["python", "-m", "finetune", "plan", "--recipe", str(recipe), "--num-processes", "2"]
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    shown = ended.stdout
    for phase in ("load", "first step", "steady step", "evaluation", "save", "resume", "export"):
        assert f"\n{phase} " in shown
    assert "4 rows x 64 tokens a step = 256 tokens: 2 ranks x 2 micro-batches x 1 row" in shown
    _, uneven, _ = _plan("--recipe", str(recipe), "--num-processes", "2", "global_batch_size=3", "per_device_train_batch_size=2")  # fmt: skip
    assert "3 rows x 64 tokens a step = 192 tokens: 2 ranks x 1 micro-batch x at most 2 rows" in (
        uneven
    )
    probe = "import sys; from finetune.cli import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    assert run_command(["python", "-c", probe, "plan", "--recipe", str(recipe)]).returncode == 0


def test_json_holds_the_same_plan(tiny_recipe: Callable[..., Path]) -> None:
    recipe = tiny_recipe(accelerate_config="fsdp_full_shard", use_peft=True)
    code, shown, _ = _plan(
        "--recipe", str(recipe), "--num-processes", "2", "--json", "--mfu", "0.5"
    )
    plan = json.loads(shown)
    assert code == 0
    assert plan["time"]["mfu"] == 0.5
    assert plan["time"]["steps"] == 4
    assert plan["trained_parameters"] < plan["parameters"]
    steady = plan["memory_bytes"]["steady step"]
    assert plan["peak_bytes"] >= steady["total"] > steady["allocated"] > 0


def test_it_fits_only_where_host_and_disk_were_compared(tiny_recipe: Callable[..., Path]) -> None:
    recipe = tiny_recipe(accelerate_config="fsdp_full_shard")
    arguments = ("--recipe", str(recipe), "--num-processes", "1", "--gpu-memory", "80GiB")
    code, shown, _ = _plan(*arguments)
    assert code == 0 and "\nrequires   " in shown and "\nfits" not in shown
    assert shown.endswith(" GiB of disk; compare with --host-memory and --disk\n")
    code, shown, errors = _plan(*arguments, "--host-memory", "64", "--disk", "1TB")
    assert code == 0 and "\nfits       " in shown and errors == "--host-memory 64: read as 64GiB\n"
    for flags in (("--host-memory", "1GiB"), ("--disk", "1MiB", "--host-memory", "64GiB")):
        code, shown, _ = _plan(*arguments, *flags)
        assert code == 1 and "\ntoo large  " in shown
    assert "less disk: a smaller save_total_limit, " in shown
    answers = [
        json.loads(_plan(*arguments, *flags, "--json")[1])["fits"]
        for flags in ((), ("--host-memory", "64GiB", "--disk", "1TB"))
    ]
    assert answers == [None, True]


def test_the_disk_is_compared_with_what_all_adapters_write(
    tiny_recipe: Callable[..., Path],
) -> None:
    recipe = tiny_recipe(use_peft=True, lora_r=512)  # more than the least --disk, 1 MiB
    names = ("a", "b", "c")
    each = yaml.safe_load(recipe.read_text())["datasets"]
    several = f"adapters={json.dumps([{'name': name, 'datasets': each} for name in names])}"
    arguments = ("--recipe", str(recipe), "--num-processes", "1", "--gpu-memory", "80GiB")
    arguments += ("--host-memory", "64GiB", "--json")
    alone = json.loads(_plan(*arguments)[1])["disk_bytes"]["total"]
    answers = {}
    for share in (2, 4):
        code, shown, _ = _plan(*arguments, several, "--disk", f"{share * alone / 2**20}MiB")
        plan = json.loads(shown)
        assert plan["disk_bytes"]["total"] == len(names) * alone
        answers[share] = (code, plan["fits"])
    assert answers == {2: (1, False), 4: (0, True)}


def test_what_does_not_fit_is_answered_with_settings_that_do(
    tiny_recipe: Callable[..., Path],
) -> None:
    recipe = tiny_recipe(
        accelerate_config="fsdp_shard_grad_op", per_device_train_batch_size=4, max_length=4096
    )
    arguments = ("--recipe", str(recipe), "--num-processes", "1", "--json", "--gpu-memory")
    _, shown, _ = _plan(*arguments, "80GiB")
    needed = json.loads(shown)["peak_bytes"]
    code, shown, _ = _plan(*arguments, str(needed - (1 << 20)))
    assert (code, json.loads(shown)["fits"]) == (1, False)
    changes = json.loads(shown)["changes"]
    assert changes
    pasted = [change for change in changes if "=" in change]
    again, shown, errors = _plan(*arguments, str(needed - (1 << 20)), *" ".join(pasted).split())
    assert (again, errors) == (0, ""), shown
    less = str(1 << 20)  # than any run needs: what was tried is listed
    _, shown, _ = _plan(*arguments[:-2], "--gpu-memory", less, "--config", "fsdp_shard_grad_op")
    assert "even with all changes that go together" in shown
    assert "--config fsdp_cpu_offload" in shown and "accelerate_config=" not in shown


def test_a_model_that_cannot_be_had_is_one_sentence(
    tiny_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "model.gguf").touch()
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(
        '{"base_model_name_or_path": "some/base"}'
    )
    adapter = f"to train it further set model_name_or_path: some/base, use_peft: true and adapter_name_or_path: {tmp_path}"
    for name, said in (
        (
            str(tmp_path / "model.gguf"),
            "a GGUF file, which inference engines read and nothing trains; name the original",
        ),
        (str(tmp_path / "adapter"), adapter),
        (
            "nobody/nothing",
            "nobody/nothing: config.json is not on this machine and HF_HUB_OFFLINE is set; download it",
        ),
        (str(tmp_path / "absent"), "absent: no such file or folder"),
        (str(tmp_path), "no config.json"),
        ("a/b/c", "a/b/c: neither a local folder nor a hub name"),
    ):
        code, _, errors = _plan("--recipe", str(tiny_recipe(model_name_or_path=name)))
        assert (code, len(errors.strip().splitlines())) == (2, 1)
        assert said in errors


def test_a_file_of_one_endless_line_is_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "')
    os.truncate(path, 2**28)
    tracemalloc.start()
    assert estimate_epoch_tokens(Data(datasets=(DatasetSource(path=str(path)),))) == 2**28 // 4
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    path.write_text('{"text": "ninety-nine"}')
    assert estimate_epoch_tokens(Data(datasets=(DatasetSource(path=str(path)),))) == 11 // 4


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.parquet"])
def test_a_compressed_file_says_nothing_of_its_tokens(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(bytes(4096))
    assert estimate_epoch_tokens(Data(datasets=(DatasetSource(path=str(path)),))) is None


def test_sizes_and_shares_are_read_strictly(tiny_recipe: Callable[..., Path]) -> None:
    recipe = str(tiny_recipe())
    assert _plan("--recipe", recipe, "--gpu-memory", "80 apples")[0] == 2
    code, _, errors = _plan("--recipe", recipe, "--gpu-memory", "24")
    assert (
        code == 0 and errors.startswith("--gpu-memory 24: ") and errors.endswith("read as 24GiB\n")
    )
    assert _plan("--recipe", recipe, "--mfu", "1.5")[0] == 2
    for flag, size, said in (
        ("--gpu-memory", "foo", "not a size"),
        ("--gpu-memory", "9" * 400, "more than 1 EiB"),
        ("--gpu-link", "0", "not a size"),
    ):
        code, _, errors = _plan("--recipe", recipe, flag, size)
        assert code == 2 and errors.splitlines()[-1].startswith(f"{flag}: {size}: {said}")
    for flag in ("--gpu-link", "--network"):  # bytes per second, of which no link has so few
        code, _, errors = _plan("--recipe", recipe, flag, "450")
        assert code == 2 and errors.startswith(f"{flag} 450: is 450 bytes; write a unit")


def test_what_is_assumed_or_guessed_says_so(
    tiny_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    recipe = str(
        tiny_recipe(accelerate_config="fsdp_full_shard", max_steps=None, num_train_epochs=2)
    )
    _, shown, _ = _plan("--recipe", recipe)
    assert "\nranks      8 assumed; --num-processes N plans for N" in shown
    assert "\nremark " not in shown
    _, shown, _ = _plan("--recipe", recipe, "--num-processes", "8", "max_length=1048576")
    assert "\nremark     max_length 1,048,576 is beyond the " in shown
    _, shown, _ = _plan("--recipe", recipe, "--num-processes", "8")
    assert "\nranks " not in shown
    assert "\ntime       no estimate: " in shown  # so small a model is not a matter of FLOP
    steps = json.loads(_plan("--recipe", recipe, "--json")[1])["time"]["steps"]
    assert f"; about {steps} steps by the files' size\n" in shown
    rows = [
        json.loads(row)["messages"] for row in (tmp_path / "chat.jsonl").read_text().splitlines()
    ]
    text = sum(len(turn["role"]) + len(turn["content"]) for turns in rows for turn in turns)
    assert steps == round(
        2 * (text // 4) / (4 * 64)
    )  # two epochs of 4 bytes a token, the punctuation of JSON left out
    # rows of one example each: the size of a file does not say how many there are
    for alone in (
        ["packing=false"],
        ["method=grpo", "rewards=[length]", "num_generations=2", "max_completion_length=16"],
    ):
        found = json.loads(_plan("--recipe", recipe, "--json", *alone)[1])["time"]
        assert found["steps"] is None
    _, shown, _ = _plan("--recipe", recipe, "--num-processes", "8", "max_steps=7")
    assert "; 7 steps\n" in shown


def test_a_cpu_rank_holds_in_host_memory_what_a_gpu_would(tiny_recipe: Callable[..., Path]) -> None:
    recipe = read_recipe(str(tiny_recipe(accelerate_config="fsdp_full_shard")))
    sharding = read_sharding(None, recipe.run.accelerate_config, {"WORLD_SIZE": "2"})
    plan = make_plan(recipe, sharding, 2, on_cpu=True)
    assert plan.host.processes == 2 * (
        CPU_PROCESS_BYTES + max(phase.peak.total for phase in plan.phases)
    )


def test_a_hybrid_file_is_planned_for_the_ranks_of_its_mesh(
    tiny_recipe: Callable[..., Path],
) -> None:
    code, shown, errors = _plan(
        "--recipe", str(tiny_recipe(global_batch_size=64)), "--config", "fsdp_hybrid_shard"
    )
    assert (code, errors) == (0, "")
    assert "ranks      64 assumed" in shown


def test_the_ranks_of_a_node_are_those_that_torch_counts(tiny_recipe: Callable[..., Path]) -> None:
    """FSDP1 shards over them. A dry run knows them, and a file of several machines; else the plan assumes 8."""
    recipe = read_recipe(str(tiny_recipe()))
    hybrid = Sharding(layout="fsdp1", strategy="HYBRID_SHARD")
    world = SimpleNamespace(
        size=16, local_size=4, device=torch.device("cpu"), sharding=replace(hybrid, use_cpu=True)
    )
    dist.init_process_group("fake", rank=0, world_size=16, store=FakeStore())
    group = _init_intra_node_process_group(num_devices_per_node=4)
    on_node = dist.get_world_size(group)
    dist.destroy_process_group()
    specs = [
        _plan_for_world(recipe, cast(World, world)).spec,
        make_plan(recipe, replace(hybrid, num_machines=4), 16).spec,
    ]
    assert [spec.state_ranks for spec in specs] == [on_node] * 2
    assert make_plan(recipe, hybrid, 16).spec.state_ranks == 8


@pytest.mark.parametrize(
    ("mesh", "keys", "ranks"),
    [
        ({"parallelism_config_tp_size": 2, "parallelism_config_dp_shard_size": 2}, {}, 8),
        (None, {}, 8),
        (None, {"expert_parallel_size": 3}, 12),
    ],
)
def test_the_assumed_ranks_are_those_of_all_stages(
    tiny_recipe: Callable[..., Path],
    tmp_path: Path,
    mesh: dict[str, int] | None,
    keys: dict[str, int],
    ranks: int,
) -> None:
    """The rules of the layout itself find nothing wrong with the assumed number."""
    config = tmp_path / "staged.yaml"
    file = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}
    config.write_text(json.dumps(file | ({"parallelism_config": mesh} if mesh else {})))
    recipe = read_recipe(str(tiny_recipe(pipeline_parallel_size=2, **keys)))
    assumed = _assume_ranks(recipe, str(config))
    sharding = with_recipe_keys(read_sharding(str(config), None, {}), recipe)
    assert assumed == ranks
    assert refuse_problems(find_problems(recipe, sharding, ranks=assumed)) == []


def test_the_table_has_a_row_for_ranks_that_divide_more_than_the_state(
    tiny_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    config = tmp_path / "divided.yaml"
    sizes = "{parallelism_config_tp_size: 2, parallelism_config_dp_shard_size: 4}"
    config.write_text(
        f"distributed_type: FSDP\nfsdp_config: {{fsdp_version: 2}}\nparallelism_config: {sizes}\n"
    )
    code, shown, errors = _plan(
        "--recipe", str(tiny_recipe(global_batch_size=64)), "--config", str(config)
    )
    assert (code, errors) == (0, "")
    head, own, other = shown.partition("GiB on one rank, by ranks")[2].splitlines()[:3]
    cells = own.removeprefix("this run's: tp_size 2").split()
    assert (
        head.split() == ["1", "2", "4", "8", "16", "64"]
        and cells[0] == "-"
        and "-" not in cells[1:]
    )
    assert other.startswith("fsdp_full_shard ")


def test_numbers_that_no_run_can_have() -> None:
    for count in ("-2", "0"):
        code, _, errors = _plan("--recipe", "quickstart", "--num-processes", count)
        assert (code, errors) == (2, f"--num-processes {count}: a run has at least one rank\n")
    code, _, errors = _plan("--recipe", "quickstart", "--num-processes", "9" * 400)
    assert code == 2 and errors.endswith(": a run has at most 100,000 ranks\n")
    code, _, errors = _plan("--recipe", "quickstart", "num_train_epochs=1e308")
    assert (
        code == 2
        and "num_train_epochs: 1e+308 does not fit; a number of at most 1e+06 is expected" in errors
    )
    sizes = "hidden_size: 64, intermediate_size: 64, num_hidden_layers: 1, vocab_size: 512"
    for heads in ("num_attention_heads: 0", "num_attention_heads: 4, num_key_value_heads: 1.5"):
        given = f"model_config={{model_type: llama, {sizes}, {heads}}}"
        code, _, errors = _plan("--recipe", "quickstart", "--num-processes", "1", given)
        assert code == 2 and errors.count("\n") == 1
        assert f"{heads.split(', ')[-1]}: a whole number from " in errors


def test_a_deepspeed_file_that_contradicts_the_recipe_is_not_planned(tmp_path: Path) -> None:
    config = tmp_path / "zero.yaml"
    config.write_text(
        "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3, gradient_clipping: 0.5}\n"
    )
    code, _, errors = _plan(
        "--recipe", "quickstart", "--config", str(config), "--num-processes", "2"
    )
    assert code == 2 and "gradient_clipping: 0.5, but max_grad_norm is 1 by the recipe" in errors
