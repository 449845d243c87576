"""What an installed package holds: everything, under one name."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.ranks import ROOT

# What a wheel installs, without pip: its build would make an environment of its own, for which it needs the network.
INSTALL = "import sys, setuptools; setuptools.setup(script_args=['egg_info', '-e', sys.argv[1], 'build_py', '-d', sys.argv[2]])"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as a wheel of this checkout installs it."""
    metadata = tmp_path_factory.mktemp("metadata")
    folder = tmp_path_factory.mktemp("installed")
    install = [sys.executable, "-c", INSTALL, str(metadata), str(folder)]
    subprocess.run(install, cwd=ROOT, check=True, capture_output=True)
    return folder / "finetune"


def list_files(folder: Path) -> set[Path]:
    """The files below `folder`, but for what Python leaves there."""
    files = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
    return {path for path in files if "__pycache__" not in path.parts}


def list_texts(value: Any) -> list[str]:
    """Every text in a YAML document."""
    if isinstance(value, str):
        return [value]
    parts = value.values() if isinstance(value, dict) else value
    return [text for part in parts for text in list_texts(part)] if isinstance(value, dict | list) else []


def test_a_wheel_has_all_files(installed: Path) -> None:
    data = ("recipes", "accelerate_configs")
    wanted = list_files(ROOT / "finetune")
    for name in data:
        wanted |= {Path(name) / path for path in list_files(ROOT / name)}
    assert list_files(installed) == wanted


def test_a_wheel_has_what_the_shipped_recipes_name(installed: Path) -> None:
    """Beside the recipe: data, tokenizers, and functions, which stand behind a colon."""
    compared = 0
    for recipe in (ROOT / "recipes").glob("*.yaml"):
        for text in list_texts(yaml.safe_load(recipe.read_text())):
            name = text.partition(":")[0]
            source = ROOT / "recipes" / name
            if source.is_dir():
                assert list_files(installed / "recipes" / name) == list_files(source)
            elif source.is_file():
                assert (installed / "recipes" / name).read_bytes() == source.read_bytes()
            compared += source.exists()
    assert compared > 12


def test_every_package_is_listed() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    code = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "finetune").rglob("*.py")}
    folders = {path.parent for path in list_files(ROOT / "recipes")}
    data = {".".join(("finetune", "recipes", *folder.parts)) for folder in folders} | {"finetune.accelerate_configs"}
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


def test_nothing_advises_a_package_of_another_project() -> None:
    """`finetune` on the package index is not this one; ours has another name, and is on none."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] != "finetune"
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "finetune").rglob("*.py")]
    files += [*(ROOT / "examples").rglob("*.*"), *(ROOT / "recipes").rglob("*.yaml")]
    advice = re.compile(r"""(pip|uv pip|pipx) install [^\n`]*?["' ]finetune(\[|["'\s`]|$)""")
    wrong = [str(path) for path in files if advice.search(path.read_text(encoding="utf-8", errors="replace"))]
    assert wrong == []
