"""What an installed package holds: everything, under one name."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.ranks import ROOT


def test_every_package_is_listed() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    code = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "finetune").rglob("*.py")}
    recipes = {f"finetune.recipes{part}" for part in ("", ".quickstart", ".quickstart.vision")}
    data = recipes | {"finetune.accelerate_configs"}
    assert listed == code | data


@pytest.mark.slow  # pip builds in an environment of its own, for which it needs the network
def test_the_wheel_puts_nothing_beside_finetune_and_finds_its_recipes(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a copy: setuptools leaves a build folder, whose files a later wheel would take in
    ignored = shutil.ignore_patterns(".*", "runs", "build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, ignore=ignored)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run(pip, check=True)
    wheel = next(tmp_path.glob("*.whl"))
    installed = tmp_path / "site-packages"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    assert {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")} == {"finetune"}
    command = "import sys; sys.path.insert(0, sys.argv[1]); from finetune.cli import main; sys.exit(main(sys.argv[2:]))"
    plan = [sys.executable, "-c", command, str(installed), "plan", "--config", "fsdp_full_shard"]
    printed = subprocess.run(plan, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert "llama, 1.1 M parameters" in printed
    assert "site-packages/finetune/accelerate_configs/fsdp_full_shard.yaml" in printed
