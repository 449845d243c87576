"""examples/launch/ and the Dockerfile: read by their own libraries where these are installed, and their commands by ours everywhere.

SkyPilot, dstack, Modal and Ray were installed in an environment of their own, since they bring conflicting packages; `pip install
skypilot dstack modal ray` there, and this file runs with it: `python -m pytest tests/test_launch_examples.py`.
"""

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from finetune.cli import read_arguments
from finetune.config.accelerate_file import read_sharding
from finetune.config.compatibility import find_problems, refuse_problems
from finetune.config.reader import read_recipe
from tests.ranks import ROOT

LAUNCH = ROOT / "examples" / "launch"


def commands() -> list[tuple[str, list[str]]]:
    """(file, words) of every command of ours: in YAML a line of a script, in Python a list of texts, in Docker a comment."""
    lines: list[tuple[str, list[str]]] = []
    for path in [*sorted(LAUNCH.iterdir()), ROOT / "Dockerfile"]:
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        if path.suffix == ".py":
            lists = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.List)]
            for node in lists:
                if (
                    node.elts
                    and isinstance(node.elts[0], ast.Constant)
                    and node.elts[0].value == "finetune"
                ):
                    words = [
                        "llama31_8b_lora" if isinstance(e, ast.Name) else ast.unparse(e)
                        for e in node.elts
                    ]
                    lines.append(
                        (path.name, [word.strip("f'\"").replace("{recipe}", "r") for word in words])
                    )
            continue
        for command in re.findall(
            r"(?:^|[-&] | )((?:finetune launch|accelerate launch) .*)$", text, re.M
        ):
            lines.append((path.name, shlex.split(command, comments=True)))
    return lines


@pytest.mark.parametrize(("name", "words"), commands())
def test_the_commands_are_taken(name: str, words: list[str]) -> None:
    if words[0] == "accelerate":
        config = words[words.index("--config_file") + 1]
        read_sharding(str(ROOT / config), None, {})
        words = ["finetune", "launch", *words[words.index("finetune/run.py") + 1 :]]
    options = read_arguments([word.replace("$RECIPE", "llama31_8b_full") for word in words[1:]])
    read_recipe(options.recipe, options.overrides)


def test_every_file_has_a_command_of_ours() -> None:
    assert {name for name, _ in commands()} == {
        "skypilot.yaml",
        "dstack.yaml",
        "modal_app.py",
        "Dockerfile",
    }


def test_every_file_installs_the_versions_that_the_tests_ran_on() -> None:
    for path in [*LAUNCH.iterdir(), ROOT / "Dockerfile"]:
        for options in re.findall(r"pip install (.*-e \.[^\n\")]*)", path.read_text("utf-8")):
            assert "-c constraints.txt" in options, path


def test_the_yaml_files_have_what_their_schemas_require() -> None:
    sky = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    assert {"resources", "setup", "run"} <= sky.keys() and set(
        re.findall(r"\$\{?(RECIPE)", sky["run"])
    ) <= {*sky["envs"]}
    dstack = yaml.safe_load((LAUNCH / "dstack.yaml").read_text())
    assert dstack["type"] == "task" and dstack["commands"] and dstack["resources"]
    subprocess.run(["bash", "-n"], input=sky["setup"] + sky["run"], text=True, check=True)


def test_skypilot_reads_its_file() -> None:
    sky = pytest.importorskip("sky", reason="pip install skypilot")
    task = sky.Task.from_yaml(str(LAUNCH / "skypilot.yaml"))
    assert task.name == "finetune" and task.num_nodes == 1


def test_dstack_reads_its_file() -> None:
    models = pytest.importorskip(
        "dstack._internal.core.models.configurations", reason="pip install dstack"
    )
    read = models.parse_run_configuration(yaml.safe_load((LAUNCH / "dstack.yaml").read_text()))
    assert type(read).__name__ == "TaskConfiguration"


def test_modal_builds_its_app() -> None:
    pytest.importorskip("modal", reason="pip install modal")
    code = "import modal_app; assert 'train' in modal_app.app.registered_functions"
    subprocess.run([sys.executable, "-c", code], cwd=LAUNCH, check=True)


@pytest.mark.slow
def test_ray_trains_on_two_ranks_of_this_machine(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="pip install ray")
    keys = [
        "--recipe",
        "quickstart",
        "--config",
        "ddp",
        "max_steps=5",
        "exact_match_samples=0",
        f"output_dir={tmp_path}/run",
    ]
    command = [sys.executable, str(LAUNCH / "ray_job.py"), "--ranks", "2", "--", *keys]
    subprocess.run(
        command, cwd=ROOT, check=True, env=os.environ | {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
    )
    assert (tmp_path / "run" / "export" / "model.safetensors").is_file()


def test_the_dockerfile_copies_what_there_is_and_all_that_the_package_is_made_of() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    instructions = [
        line.split()[0]
        for line in text.replace("\\\n", " ").splitlines()
        if line and line[0] != "#"
    ]
    assert instructions[0] == "FROM" and {*instructions} <= {
        "FROM",
        "RUN",
        "WORKDIR",
        "COPY",
        "ENTRYPOINT",
        "CMD",
    }
    copied = [word for line in re.findall(r"^COPY (.*)$", text, re.M) for word in line.split()[:-1]]
    assert all((ROOT / name).exists() for name in copied)
    assert {"pyproject.toml", "README.md", "finetune", "recipes", "accelerate_configs"} <= {*copied}


def test_the_files_of_the_page_on_clusters_fit_its_ranks(tmp_path: Path) -> None:
    """Slurm and Kubernetes start 2 x 8 ranks; a file of one's own is on the page, named in its first line."""
    page = (ROOT / "docs" / "clusters.md").read_text("utf-8")
    written = dict(re.findall(r"```yaml\n# (\S+)\n(.*?)```", page, re.DOTALL))
    used = re.findall(r"--config_file (\S+)(?=[^`]*?--recipe llama31_8b_full)", page)
    assert len(used) == 2, "one of Slurm, one of Kubernetes"
    recipe = read_recipe("llama31_8b_full")
    for name in used:
        file = ROOT / name
        if name in written:
            file = tmp_path / name
            file.write_text(written[name])
        sharding = read_sharding(str(file), None, {"WORLD_SIZE": "16"})
        refuse_problems(find_problems(recipe, sharding, None, 16))
