"""Saving on real ranks, and what can go wrong with a disk; the rest of the faults are in test_protocol and test_killing."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.checkpoint import folders
from finetune.checkpoint.save import describe_model
from finetune.checkpoint.shards import read_shards
from finetune.config.reader import read_recipe
from finetune.data.tokenizer import load_tokenizer
from finetune.models.lora import add_adapters
from tests.checkpoint.tiny_run import ALONE
from tests.conftest import make_chat, make_model
from tests.plan.traced import allocated_peak
from tests.ranks import ROOT, launch_ranks, run_python

RUN = ROOT / "finetune" / "run.py"
HERE = Path(__file__).parent


# run.py on a file system of its own, as under `unshare -rm`; in the end the staging folders that are left.
ON_A_DISK = """
import ctypes, os, subprocess, sys
from pathlib import Path

disk, mount, recipe = sys.argv[1:]
user, group = os.getuid(), os.getgid()
assert ctypes.CDLL(None).unshare(0x10020000) == 0  # CLONE_NEWUSER | CLONE_NEWNS
Path("/proc/self/setgroups").write_text("deny")
Path("/proc/self/uid_map").write_text(f"0 {user} 1")
Path("/proc/self/gid_map").write_text(f"0 {group} 1")
subprocess.run(["mount", "-t", "tmpfs", "-o", mount, "tmpfs", disk], check=True)

from finetune import run
from finetune.errors import exit_code

sys.argv = ["finetune/run.py", "--recipe", recipe]
code = exit_code(run.main)
print(*Path(disk).rglob(".staging-*"))
sys.exit(code)
"""


@pytest.mark.slow  # test_protocol.py walks each step of a save on one rank
@pytest.mark.parametrize("slow_seconds", [1, 20])
def test_two_ranks_save_through_every_fault(tmp_path: Path, slow_seconds: int) -> None:
    make_model(tmp_path / "model")
    make_chat(tmp_path / "chat.jsonl", rows=4)
    recipe = {
        "model_name_or_path": str(tmp_path / "model"),
        "datasets": [{"path": str(tmp_path / "chat.jsonl")}],
    }
    (tmp_path / "recipe.yaml").write_text(
        json.dumps(recipe | {"save_total_limit": None, "export_at_end": False})
    )
    launch_ranks(
        HERE / "saving_on_ranks.py", [str(tmp_path), str(slow_seconds)], timeout=300
    ).check()


@pytest.mark.slow  # one kill is test_resume.py's
@pytest.mark.parametrize("kills", [3, 100])
def test_a_run_killed_at_random_moments_loses_nothing(kills: int) -> None:
    done = run_python([str(HERE / "killing.py"), "--kills", str(kills)], timeout=60 + 20 * kills)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1])["kills"] == kills


def test_an_adapters_config_is_the_same_bytes_in_every_process(
    tiny_recipe: Callable[..., Path],
) -> None:
    """peft keeps its targets in a set, whose order is another one in each process: found by the soak."""
    recipe = read_recipe(str(tiny_recipe(use_peft=True, lora_r=2)))
    assert recipe.model.model_name_or_path is not None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(recipe.model.model_name_or_path)
        )
    add_adapters(model, recipe.lora, torch.float32)
    files = describe_model(model, recipe, load_tokenizer(recipe.model, recipe.data))
    targets = json.loads(files["model/adapter_config.json"])["target_modules"]
    assert len(targets) == 7 and targets == sorted(targets)


def test_a_second_run_in_one_folder_is_refused(
    tmp_path: Path, tiny_recipe: Callable[..., Path]
) -> None:
    folders.lock_run(tmp_path / "run")  # as this process's own run would
    before = sorted((tmp_path / "run").rglob("*"))
    refused = launch_ranks(RUN, ["--recipe", str(tiny_recipe())], ranks=1)
    assert refused.returncodes == (2,)
    assert "is writing here; wait for it, or set another output_dir" in refused.outputs[0]
    assert "Traceback" not in refused.outputs[0]
    assert sorted((tmp_path / "run").rglob("*")) == before


@pytest.mark.parametrize(
    ("mount", "said"),
    [
        (
            "size=1m",
            r"\.safetensors: No space left on device \(.* free there\); make room, or set output_dir to a larger disk",
        ),
        (
            "size=200m,nr_inodes=12",
            r": No space left on device \(no inodes are left there, though bytes are\); remove files, or set output_dir to another disk",
        ),
        (
            "size=60m",  # enough for what is written, not for what the export wants to be free beside it
            r"the run will write 3 checkpoints of 1\.32 MB and an export of 215 kB \(with 67\.1 MB to spare\), but 62\.\d MB are free here",
        ),
        ("ro", r"cannot be written \(Read-only file system\); set output_dir to a folder that can"),
    ],
    ids=["too small for one", "too few inodes", "too small for all", "read-only"],
)
def test_a_run_that_could_not_save_does_not_start(
    tmp_path: Path, tiny_recipe: Callable[..., Path], mount: str, said: str
) -> None:
    """On a real file system that is small or read-only, mounted where only this process sees it."""
    if (
        not shutil.which("unshare")
        or subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode
    ):
        pytest.skip("this system lets nobody mount a file system of their own (unshare -rm)")
    disk = tmp_path / "disk"
    disk.mkdir()
    base = make_model(
        tmp_path / "base", dtype="bfloat16"
    )  # trained in fp32, exported as the base's files are
    recipe = tiny_recipe(output_dir=str(disk / "run"), save_steps=1, model_name_or_path=str(base))
    script = tmp_path / "on_a_disk.py"
    script.write_text(ON_A_DISK)
    done = run_python([str(script), str(disk), mount, str(recipe)])
    assert done.returncode == 2, done.stderr[-3000:]
    assert re.search(said, done.stderr), done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    assert "step 1/" not in done.stdout, "it was said before the first step"
    assert ".staging-" not in done.stdout, "what was written before the disk was full is removed"


def test_a_checkpoint_is_read_a_tensor_at_a_time(tmp_path: Path) -> None:
    """As the plan of a resume says."""
    (tmp_path / "model").mkdir()
    stored = {name: torch.randn(1000, 100) for name in "abc"}
    save_file(stored, tmp_path / "model" / "shard.safetensors")
    state = {name: torch.zeros(1000, 100) for name in stored}
    peak = allocated_peak(lambda: read_shards(state, "model", tmp_path, ALONE))
    assert peak < 1.5 * state["a"].nbytes
    assert all(torch.equal(state[name], stored[name]) for name in stored)
