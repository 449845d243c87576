"""The README's commands, recipe and messages, as they stand there. Its Python block runs in test_quickstart.py."""

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from finetune.cli import read_arguments
from finetune.config.accelerate_file import ACCELERATE_CONFIGS, read_sharding
from finetune.config.reader import RECIPES, find_file, read_recipe
from finetune.config.schema import recipe_keys
from finetune.errors import UserError
from tests.conftest import QUICKSTART
from tests.ranks import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """The fenced blocks of README.md in `language` ("" for none)."""
    return [
        text
        for name, text in re.findall(r"^```(\w*)\n(.*?)^```$", README, re.M | re.S)
        if name == language
    ]


def commands(program: str) -> list[list[str]]:
    """The README's shell commands that start with `program`, as arguments."""
    lines = [
        shlex.split(line, comments=True) for block in blocks("sh") for line in block.splitlines()
    ]
    return [words[1:] for words in lines if words and words[0] == program]


def test_it_is_short_and_your_own_data_come_second() -> None:
    assert len(README.splitlines()) <= 250
    sections = re.findall(r"^## (.*)$", README, re.M)
    assert sections[:2] == ["Two minutes, no GPU", "Your own data"]
    assert "make quickstart" in README[: README.index("## ")], "the first screen has the command"


def test_its_figures_are_those_that_were_measured() -> None:
    """Our column is benchmarks/results/gpu.json, or the row of docs/performance.md, which also has Unsloth's."""
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    measured = json.loads((ROOT / "benchmarks" / "results" / "gpu.json").read_text())["cases"]
    known = [
        (f"{each['tokens_per_second']:,}", str(each["peak_memory_gib"]))
        for each in measured.values()
    ]
    rows = re.findall(
        r"^\| [^|]*\| ([\d,]+), ([\d.]+) GiB \| ([\d,]+), \*{0,2}([\d.]+) GiB", README, re.M
    )
    assert len(rows) == 5
    for ours, memory, unsloth, its_memory in rows:
        assert (ours, memory) in known or f"| {ours}, {memory} GiB |" in page
        assert f"{unsloth}, {its_memory} GiB" in page


def test_the_package_tree_is_on_another_page_and_other_tools_have_an_honest_line_each() -> None:
    assert "  checkpoint/" not in README and "tree of packages" in README
    assert "a tenth of a second" not in README
    (beside,) = re.findall(r"^## Beside other tools\n(.*?)^## ", README, re.M | re.S)
    lines = re.findall(r"^- \*\*(\w+)\*\*", beside, re.M)
    assert lines == ["vLLM", "Ollama", "Docker", "Colab", "Windows"] and len(
        beside.strip().splitlines()
    ) == len(lines)


def test_the_page_of_recipes_begins_with_the_ten_keys_that_most_need() -> None:
    first = re.split(
        r"^## ", (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8"), flags=re.M
    )[1]
    assert first.startswith("The ten keys that most recipes need\n")
    keys = re.findall(r"^\| `(\w+)` \|", first, re.M)
    assert len(keys) == 10 and set(keys) <= recipe_keys().keys()


def test_its_finetune_commands_are_read() -> None:
    found = commands("finetune")
    assert {words[0] for words in found} == {
        "init",
        "plan",
        "inspect",
        "launch",
        "report",
        "chat",
        "evaluate",
        "checkpoints",
        "export",
    }
    for words in found:
        options = read_arguments(words)
        if getattr(options, "recipe", "my_recipe.yaml") != "my_recipe.yaml":
            read_recipe(options.recipe, options.overrides)


def test_its_launcher_commands_name_files_that_there_are() -> None:
    found = commands("accelerate") + commands("torchrun")
    assert len(found) == 2
    for words in found:
        after = words[words.index("finetune/run.py") + 1 :]
        options = read_arguments(["launch", *after])
        assert not [word for word in options.overrides if not word.partition("=")[1]]
        read_recipe(options.recipe, options.overrides)
        config = options.config or words[words.index("--config_file") + 1]
        read_sharding(config, None, {})


def test_make_does_what_stands_under_it() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert [words[0] for words in commands("make")] == ["quickstart", "test", "check"]
    for target in ("quickstart", "test", "check"):
        assert f"\n{target}: " in makefile
    assert "\tfinetune launch --config fsdp_full_shard.yaml\n" in makefile
    assert commands("finetune")[0] == ["launch", "--config", "fsdp_full_shard.yaml"]
    assert README.index("\npip install -e .") < README.index("\nmake quickstart"), (
        "pip first: not everybody has make"
    )
    assert f"  # or {shlex.join(QUICKSTART)}\n" in README
    # The notice that pip has a newer version is no part of the first screen.
    assert "\nexport PIP_DISABLE_PIP_VERSION_CHECK := 1\n" in makefile


def test_its_recipe_is_read_and_its_mistakes_are_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (text,) = blocks("yaml")
    (said,) = [block for block in blocks("") if block.startswith("my_recipe.yaml:")]
    for source in yaml.safe_load(text)["datasets"]:
        Path(source["path"]).touch()
    recipe = Path("my_recipe.yaml")
    recipe.write_text(text)
    read = read_recipe("my_recipe.yaml")
    assert all(each.type == "messages" for each in read.data.datasets if each.prompt_column), (
        "an Instruct model learns questions and answers in its chat template"
    )

    wrong = text.replace("eval_split_size", "eval_split").replace("max_length", "sequence_len")
    recipe.write_text(wrong.replace("learning_rate: 1e-5", "learning_rate: fast"))
    with pytest.raises(UserError) as error:
        read_recipe("my_recipe.yaml")
    assert str(error.value) == said.rstrip("\n")


def test_its_tables_name_every_recipe_and_config_that_ships() -> None:
    for folder in (RECIPES, ACCELERATE_CONFIGS):
        for file in folder.glob("*.yaml"):
            assert f"| `{file.stem}` |" in README
            assert (
                find_file(file.stem, folder, "file") == folder.relative_to(Path.cwd()) / file.name
            )
    for link in re.findall(r"\]\((?!http)([^)#]+)", README):
        assert (ROOT / link).exists(), link
