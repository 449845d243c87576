"""What an installed package holds: everything, under one name."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune import __version__
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
    return (
        [text for part in parts for text in list_texts(part)]
        if isinstance(value, dict | list)
        else []
    )


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
    listed = set(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    )
    code = {
        ".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "finetune").rglob("*.py")
    }
    folders = {path.parent for path in list_files(ROOT / "recipes")}
    data = {".".join(("finetune", "recipes", *folder.parts)) for folder in folders} | {
        "finetune.accelerate_configs"
    }
    assert listed == code | data


@pytest.mark.slow
def test_the_wheel_puts_nothing_beside_finetune_and_runs_from_another_folder(
    tmp_path: Path,
) -> None:
    source = (
        tmp_path / "source"
    )  # a copy: setuptools leaves a build folder, whose files a later wheel would take in
    ignored = shutil.ignore_patterns(".*", "runs", "build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, ignore=ignored)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
    ]
    subprocess.run([*pip, str(tmp_path), str(source)], check=True)
    wheel = next(tmp_path.glob("finetune_exact-*.whl"))
    installed = tmp_path / "site-packages"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    assert {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")} == {
        "finetune"
    }
    command = tmp_path / "finetune"
    command.write_text(
        f"#!{sys.executable}\nimport sys\nfrom finetune.cli import main\nsys.exit(main())\n"
    )
    command.chmod(0o755)
    environment = os.environ | {"PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1"}
    tried = [sys.executable, str(ROOT / "tests" / "try_wheel.py"), str(command)]
    finished = subprocess.run(tried, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "site-packages/finetune/accelerate_configs/fsdp_full_shard.yaml" in finished.stdout


def test_the_version_is_the_newest_of_the_changelog() -> None:
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert newest is not None and newest[1] == __version__


def test_the_citation_names_this_version_and_license() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert citation["version"] == __version__ and citation["license"] == project["license"]
    assert citation["authors"] == project["authors"]
    assert {"cff-version", "message", "title"} <= citation.keys()


def test_every_issue_form_asks_for_the_environment() -> None:
    """By the keys that GitHub's schema requires: name, description, body; of each element type and attributes.label."""
    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yaml"))
    assert len(forms) == 2
    for path in forms:
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert {"name", "description", "body"} <= form.keys()
        asked = {each["id"]: each for each in form["body"]}
        assert len(asked) == len(form["body"])
        assert all(
            each["type"] == "textarea" and each["attributes"]["label"] for each in form["body"]
        )
        assert (
            "finetune env" in asked["env"]["attributes"]["label"]
            and asked["env"]["validations"]["required"]
        )


def list_ci_parts() -> set[str]:
    """The parts that .ci/run takes."""
    cases = (ROOT / ".ci" / "run").read_text().partition("case $part in")[2]
    return {
        name.strip()
        for line in re.findall(r"^  ([\w |]+)\) make", cases, re.M)
        for name in line.split("|")
    }


def test_workflows_are_read_and_call_parts_that_there_are() -> None:
    """With every value of their matrices; a job for a GPU is skipped where no runner is named."""
    called: set[str] = set()
    pythons: set[str] = set()
    for path in (ROOT / ".github" / "workflows").glob("*.yaml"):
        jobs = yaml.safe_load(path.read_text())["jobs"]
        for job in jobs.values():
            matrix = job.get("strategy", {}).get("matrix", {})
            pythons |= {*matrix.get("python", [])}
            rows = [
                *({"versions": each} for each in matrix.get("versions", [])),
                *matrix.get("include", []),
            ] or [{}]
            for step, row in product(job["steps"], rows):
                if "run" in step:
                    text = step["run"].replace("${{ matrix.versions }}", str(row.get("versions")))
                    assert text.startswith(".ci/run "), text
                    called.add(text.removeprefix(".ci/run "))
        assert "GPU_RUNNER" in jobs["gpu"]["if"] and "schedule" in jobs["slow"]["if"]
    assert called == list_ci_parts()
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    assert pythons == {
        each.rpartition(" ")[2] for each in classifiers if re.search(r":: 3\.\d+$", each)
    }
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert {f"test-{part}" for part in called - {"pinned", "site"}} | {"check", "test", "site"} <= {
        *targets
    }


def test_nothing_advises_a_package_of_another_project() -> None:
    """`finetune` on the package index is not this one; ours has another name, and is on none."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] != "finetune"
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "finetune").rglob("*.py")]
    files += [*(ROOT / "examples").rglob("*.*"), *(ROOT / "recipes").rglob("*.yaml")]
    advice = re.compile(
        r"""(pip|uv pip|pipx) install [^\n`]*?["' ]finetune(-exact)?(\[|["'\s`]|$)"""
    )
    wrong = [
        str(path)
        for path in files
        if advice.search(path.read_text(encoding="utf-8", errors="replace"))
    ]
    assert wrong == []
