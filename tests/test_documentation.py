"""The commands of README and docs/ as they stand there: every one is read, and run, or says beside itself why not.

A fenced block of `bash` or `sh` is a list of commands. What a command needs stands in its comment (or in one on the line
above, for all that follow in the block): `# needs a GPU`, `# needs the hub`, `# ends with 1`, `# runs in tests/...`.
Nothing is passed over in silence: a command that is neither run nor marked fails.
"""

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from finetune.cli import TAKES_A_RECIPE, read_arguments
from finetune.config.reader import read_recipe
from tests.conftest import QuickstartRun
from tests.plan.run_specs import LLAMA_31_8B
from tests.ranks import ROOT, run_command, run_python

FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = (
    ROOT / "README.md",
    ROOT / "SECURITY.md",
    ROOT / "AGENTS.md",
    *sorted((ROOT / "docs").glob("*.md")),
)
PROGRAMS = (
    "finetune",
    "accelerate",
    "torchrun",
    "python",
    "python3",
    "make",
    "pip",
    "git",
    "hf",
    "srun",
    "sbatch",
    "for",
)
MARKS = re.compile(
    r"#.*?\b(needs (?:a|8) GPUs?|needs a (?:terminal|browser)|needs the (?:hub|network)|needs Slurm|ends with \d|runs in \S+)"
)
# Run by the build itself, or whole by a test of their own.
ELSEWHERE = {
    "make quickstart": "tests/test_readme.py",  # is the command below
    "make test": ".ci/run",
    "make check": ".ci/run",
    "python3 -m venv .venv && . .venv/bin/activate": "Makefile",
    "finetune launch --config fsdp_full_shard.yaml": "tests/test_quickstart.py",
}


@dataclass(frozen=True, slots=True)
class Command:
    """One command of a page, and what its comment says of it ("" for nothing)."""

    text: str
    mark: str
    page: str
    shown: str = ""  # the block of output that follows

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)


def commands(page: Path) -> Iterator[Command]:
    """The commands of a page in their order; a block that is a script (`#!`) is none."""
    blocks = list(FENCE.finditer(page.read_text(encoding="utf-8")))
    for block, following in zip(blocks, [*blocks, None][1:], strict=True):
        if block[1] not in ("bash", "sh") or block[2].startswith("#!"):
            continue
        shown, of_block = following[2] if following and not following[1] else "", ""
        body = re.sub(r"\\\n", " ", block[2])
        body = re.sub(
            r"^for .*?^done[^\n]*", lambda loop: loop[0].replace("\n", " "), body, flags=re.M | re.S
        )
        for line in body.splitlines():
            found = MARKS.search(line)
            of_block = found[1] if found and line.startswith("#") else of_block
            if line.strip() and not line.startswith(("#", "export ")):
                yield Command(line, found[1] if found else of_block, page.name, shown)


ALL = [command for page in PAGES for command in commands(page)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_command_hides_in_another_kind_of_block(page: Path) -> None:
    for language, body in FENCE.findall(page.read_text(encoding="utf-8")):
        if language not in ("bash", "sh"):
            assert not [
                line
                for line in body.splitlines()
                if re.match(rf"\$? ?({'|'.join(PROGRAMS)}) \S+ ?-", line)
            ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_row_of_a_table_stands_below_its_heading(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    lines = ["", *text.splitlines(), ""]
    for before, line, after in zip(lines, lines[1:], lines[2:], strict=False):
        if line.startswith("|") and not before.startswith("|"):
            assert re.fullmatch(r"[|: -]+", after), f"{page.name}: a row outside its table: {line}"


@pytest.mark.parametrize("command", ALL, ids=lambda command: f"{command.page}: {command.text[:60]}")
def test_every_command_is_one_that_is_taken(command: Command) -> None:
    words = command.words
    if "finetune/run.py" in words:
        words = ["finetune", "launch", *words[words.index("finetune/run.py") + 1 :]]
    if words[0] == "finetune":
        with contextlib.redirect_stderr(io.StringIO()) as said:
            try:
                options = read_arguments(words[1:])
            except SystemExit as end:
                raise AssertionError(said.getvalue()) from end
        is_file = (
            getattr(options, "file", None) is not None
        )  # inspect's FILE stands in place of a recipe
        if (
            options.command in TAKES_A_RECIPE
            and "&" not in words
            and not is_file
            and options.recipe != "my_recipe.yaml"
        ):
            read_recipe(options.recipe or "quickstart", options.overrides)
    elif words[0] == "python" and words[1].endswith(".py"):
        assert (ROOT / words[1]).is_file()
    if command.mark.startswith("runs in"):
        assert (ROOT / command.mark.removeprefix("runs in ")).is_file()


@pytest.mark.usefixtures("hub_cache")
def test_every_command_is_run_or_says_what_it_needs(
    quickstart_run: QuickstartRun, tmp_path: Path
) -> None:
    """In a checkout of its own, where every run that the pages name is a short one of the quickstart."""
    checkout = _checkout(tmp_path / "finetune", quickstart_run.folder)
    done: dict[str, int] = {}
    for command in ALL:
        words, plain = command.words, " ".join(command.words)
        # A plan asks the hub for nothing but the model's config.json, which is laid ready.
        waits = command.mark.startswith("needs") and words[:2] != ["finetune", "plan"]
        if waits or command.mark.startswith("runs in") or plain in ELSEWHERE or plain in done:
            continue
        ended = (
            run_python(["-m", *words], cwd=checkout)
            if words[0] == "finetune"
            else run_command(words, cwd=checkout)
        )
        done[plain] = ended.returncode
        wanted = int(command.mark.split()[-1]) if command.mark.startswith("ends with") else 0
        assert ended.returncode == wanted, f"{command.page}: {plain}\n{ended.stderr}"
        if words[:2] == ["finetune", "plan"] and command.shown:
            assert ended.stdout.replace(f"{ROOT}/", "") == command.shown, (
                f"{command.page}: {plain}: prints something else now"
            )
    assert {words.split()[1] for words in done} == {
        "plan",
        "inspect",
        "launch",
        "report",
        "chat",
        "checkpoints",
        "export",
        "env",
    }
    for place in ELSEWHERE.values():
        assert (ROOT / place).is_file()


def test_scripts_and_manifests_are_well_formed() -> None:
    for page in PAGES:
        for language, body in FENCE.findall(page.read_text(encoding="utf-8")):
            if language in ("bash", "sh"):
                subprocess.run(
                    ["bash", "-n"],
                    input=body.replace("<this repository>", "it"),
                    text=True,
                    check=True,
                )
            if language == "yaml":
                assert list(yaml.safe_load_all(body))


def _checkout(folder: Path, run: Path) -> Path:
    """The project by links, with a runs/ of its own."""
    folder.mkdir()
    for name in ("finetune", "recipes", "accelerate_configs", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    for name in ("quickstart", "llama31_8b_lora", "math"):
        shutil.copytree(run, folder / "runs" / name)
    return folder


@pytest.fixture
def hub_cache() -> Iterator[None]:
    """Puts Llama 3.1 8B's config.json, as published, into the Hugging Face cache of the tests."""
    hub = Path(os.environ["HF_HOME"]) / "hub"
    repositories = [
        hub / f"models--meta-llama--{name}" for name in ("Llama-3.1-8B", "Llama-3.1-8B-Instruct")
    ]
    for repository in repositories:
        (repository / "snapshots" / "0").mkdir(parents=True)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("0")
        rope = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
        config = LLAMA_31_8B | {
            "torch_dtype": "bfloat16",
            "max_position_embeddings": 131072,
            "rope_scaling": rope,
        }
        (repository / "snapshots" / "0" / "config.json").write_text(json.dumps(config))
    yield
    for repository in repositories:
        shutil.rmtree(repository)
