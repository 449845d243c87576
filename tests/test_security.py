"""SECURITY.md says what is run and what is bounded: its names and numbers are those of the code."""

import pytest

from finetune.config import yaml_file
from finetune.config.schema import DatasetSource, Model, recipe_keys
from finetune.data import images, readers, template_sandbox
from finetune.export import torch_files
from finetune.files import json_files, network
from finetune.report import page
from tests.ranks import ROOT

TEXT = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
DATA = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
TRUSTED, REST = TEXT.split("## Not trusted")
BOUNDED = REST.split("## What is bounded")[1].split("## Report")[0]
KIB, MIB, GIB = 2**10, 2**20, 2**30
# What a row of the table of bounds says -> the numbers of it, as the code has them.
BOUNDS = {
    "recipe or Accelerate file": [f"{yaml_file.LIMIT_BYTES // KIB} KiB"],
    "JSON file": [
        f"{json_files.LIMIT_BYTES:,} bytes",
        f"{json_files.MAX_DEPTH} levels",
        f"{json_files.MAX_DIGITS} digits",
    ],
    "a row of data": [f"{readers.MAX_ROW_BYTES // MIB} MiB"],
    "unpacks to": [f"{readers.UNPACKED_TIMES} times", f"{readers.UNPACKED_BYTES // MIB} MiB"],
    "| an image |": [
        f"{images.MAX_PIXELS:,} pixels",
        f"{images.MAX_RATIO} times",
        f"{images.MAX_SCANS} scans",
    ],
    "chat template": [f"{template_sandbox.MAX_TEMPLATE:,} characters"],
    "answer of a server": [f"{network.MAX_ANSWER_BYTES // MIB} MiB", "`vllm_server_timeout`"],
    "reward's or tool's": ["`reward_timeout_seconds`"],
    "torch wrote": [
        f"{torch_files.MEMORY_LIMIT_BYTES // GIB} GiB",
        f"{torch_files.CPU_LIMIT_SECONDS} s",
    ],
}


def test_every_key_whose_python_is_run_is_named() -> None:
    names = {key.name for key in recipe_keys().values() if key.is_python_name}
    assert len(names) > 3 and "function" in DatasetSource.__dataclass_fields__
    for name in (*names, "function"):
        assert f"`{name}`" in TRUSTED
    assert Model().trust_remote_code is False and "`trust_remote_code: true`" in TRUSTED


@pytest.mark.parametrize("row", BOUNDS)
def test_the_bounds_are_those_of_the_code(row: str) -> None:
    (line,) = [line for line in BOUNDED.splitlines() if row in line]
    for bound in BOUNDS[row]:
        assert bound.removeprefix("`").removesuffix("`") in line
    named = {word.strip("`") for word in line.split() if word.startswith("`")}
    assert named <= recipe_keys().keys()


def test_the_page_on_data_has_the_bounds_of_unpacking() -> None:
    (line,) = [line for line in DATA.splitlines() if "Arrow file unpacks to" in line]
    assert all(bound in line for bound in BOUNDS["unpacks to"])


def test_the_table_has_no_other_bound() -> None:
    rows = [line for line in BOUNDED.splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + len(BOUNDS)  # with the heading


def test_the_report_is_served_to_this_machine_alone() -> None:
    assert page.ADDRESS == "127.0.0.1" and f"answers on {page.ADDRESS} alone" in REST
    assert len(images.FORMATS) == 7 and "seven formats" in REST


def test_the_readme_names_the_page() -> None:
    assert "](SECURITY.md)" in (ROOT / "README.md").read_text()
