"""`finetune env`: what is installed and found, what a recipe lacks, and that it answers without torch."""

import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

from finetune.cli import main
from finetune.config.facts import has_compiler
from finetune.init import environment
from finetune.init.cli import find_gpus
from finetune.init.environment import OPTIONAL
from tests.ranks import ROOT, run_command

EXTRAS_OF_TESTS = {"dev", "benchmarks", "mlx"}


def test_it_answers_without_torch_and_says_what_is_installed() -> None:
    finished = run_command(
        ("python", "-m", "finetune", "env"), env={"PYTHONPROFILEIMPORTTIME": "1"}
    )
    assert finished.returncode == 0
    assert not re.search(
        r"\| +(torch|transformers|accelerate|datasets|peft)$", finished.stderr, re.M
    )
    for name in ("torch", "transformers", "accelerate", "peft"):
        assert f" {name} {version(name)}\n" in finished.stdout
    labels = re.findall(r"^(\w+) ", finished.stdout, re.M)
    assert labels == ["finetune", "python", "packages", "torch", "devices", "kernels", "optional"]


def test_every_optional_part_of_the_package_is_listed_with_its_distributions() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    distributions = {
        name: {re.split(r"[\[>]", each)[0] for each in needed}
        for name, needed in extras.items()
        if name not in EXTRAS_OF_TESTS
    }
    assert {name: set(needed) for name, (needed, _) in OPTIONAL.items()} == distributions


def test_without_pillow_a_recipe_lacks_it_where_its_rows_hold_images(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    is_found = environment._is_found
    monkeypatch.setattr(environment, "_is_found", lambda name: name != "PIL" and is_found(name))
    assert main(["env", "--recipe", "quickstart_vision"]) == 2
    assert 'rows with images need Pillow; pip install -e ".[images]"' in capsys.readouterr().out
    assert main(["env", "--recipe", "quickstart"]) == 0


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An nvidia-smi that answers the query as NVIDIA's does, with two cards."""
    script = tmp_path / "bin" / "nvidia-smi"
    script.parent.mkdir()
    script.write_text("#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 9.0, 81559, 570.86.15'\n" * 2)
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent), prepend=":")


@pytest.mark.usefixtures("two_gpus")
def test_gpus_are_described_and_a_recipe_is_judged_on_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    machine = find_gpus()
    assert machine is not None and (machine.gpus, machine.memory) == (2, "79.6GiB")
    command = [
        "env",
        "--recipe",
        "quickstart",
        "--config",
        "ddp",
        "attn_implementation=flash_attention_2",
    ]
    main(command)
    said = capsys.readouterr().out
    assert (
        "2 x NVIDIA H100 80GB HBM3: 79.65 GiB, compute capability 9.0, driver 570.86.15\n" in said
    )
    assert "pip install flash-attn-4 for a faster one" in said
    assert "this is a CPU run" not in said  # as the same recipe is refused without these GPUs


def test_what_a_recipe_lacks_comes_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")  # no nvidia-smi, no compiler
    has_compiler.cache_clear()
    assert main(["env", "--recipe", "quickstart", "--config", "single"]) == 0
    assert "recipe      quickstart: lacks nothing here\n" in capsys.readouterr().out
    assert main(["env", "--recipe", "quickstart", "torch_compile=true", "report_to=wandb"]) == 2
    said = capsys.readouterr().out
    assert (
        "no GPU: nvidia-smi lists none\n" in said
        and "recipe      quickstart: does not run here\n" in said
    )
    assert re.search(r"^missing .*torch_compile: .* needs a C\+\+ compiler", said, re.M)
    has_compiler.cache_clear()
    assert re.search(r'^missing .*wandb: .* pip install -e "\.\[wandb\]" in a clone', said, re.M)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--config", "ddp"],
            "env: --config, --num-processes and key=value are for a recipe; name one with --recipe",
        ),
        (["--recipe", "no_such"], "no_such: no such recipe; give a path, or one of: "),
        (
            ["--recipe", "quickstart", "max_stepz=3"],
            "max_stepz: no such key; did you mean max_steps?",
        ),
        (["--recipe", "quickstart", "--config", "no_such"], "no_such: no such Accelerate config; "),
        (
            ["--recipe", "quickstart", "--num-processes", "0"],
            "--num-processes 0: a run has at least one rank",
        ),
    ],
)
def test_a_wrong_request_is_a_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["env", *arguments]) == 2
    said = capsys.readouterr()
    assert sentence in said.err and said.err.count("\n") == 1 and not said.out
