"""What vLLM was seen to serve (finetune/config/served.json): the page shows it, and the last screen advises no more."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from benchmarks.serving import FAMILIES, KEYS, MIXTURES, PAGE, render_page
from finetune.cli import main
from finetune.config.served import (
    CLOSE,
    KINDS,
    RANKS,
    list_kinds_of_adapter,
    read_served,
    serve_adapter,
    was_served,
)
from tests.conftest import make_model
from tests.vision import make_vision_model

SERVED = read_served()["families"]
CELLS = [(family, kind, cell) for family, cells in SERVED.items() for kind, cell in cells.items()]


def test_the_page_shows_what_was_measured() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert render_page(page) == page, "run python benchmarks/serving.py table FOLDER"


def test_each_family_was_asked_about_each_kind_that_it_has() -> None:
    assert list(SERVED) == list(FAMILIES)
    for family, cells in SERVED.items():
        assert {"merged", "adapter", "head", "added"} <= cells.keys() <= KINDS.keys(), family
        assert ("experts" in cells) == (family in MIXTURES), family
    assert not [cell for cell in CELLS if cell[2] == "not run"]


def test_four_fifths_of_the_table_are_served_as_trained_and_the_rest_has_a_cause() -> None:
    close = [cell for _, _, cell in CELLS if isinstance(cell, float) and cell <= CLOSE]
    assert len(close) >= 40
    for family, kind, cell in CELLS:
        assert isinstance(cell, str) or cell <= CLOSE, f"{family} {kind}: a difference has a cause"


@given(st.lists(st.sampled_from(sorted(KINDS)), min_size=1), st.sampled_from([*SERVED, "gpt2", ""]))
def test_a_kind_is_advised_where_its_own_cell_is_green_and_nowhere_else(
    kinds: list[str], family: str
) -> None:
    cells = [SERVED.get(family, {}).get(kind) for kind in kinds]
    assert was_served(family, kinds) == all(
        isinstance(cell, float) and cell <= 1e-4 for cell in cells
    )


@pytest.mark.parametrize(
    ("family", "is_advised"),
    [("qwen3", True), ("olmo2", True), ("starcoder2", False), ("stablelm", False)],
)
def test_the_last_screen_advises_vllm_for_a_family_that_it_was_seen_to_serve(
    family: str, is_advised: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert (
        main(
            ["export", str(make_model(tmp_path / "model", model_type=family)), "--output", str(out)]
        )
        == 0
    )
    said = capsys.readouterr().out
    assert (f"vLLM          vllm serve {out}\n" in said) == is_advised
    assert ("vllm" in said) == is_advised and "use     transformers" in said


PLAIN: dict[str, Any] = {"r": 16, "target_modules": ["q_proj"]}
EXPERTS = {"target_parameters": KEYS["experts"]["lora_target_parameters"]}


@given(
    st.integers(1, 512), st.dictionaries(st.sampled_from(["q_proj", "o_proj"]), st.integers(1, 512))
)
def test_the_rank_of_an_adapter_is_the_smallest_that_vllm_takes(
    rank: int, pattern: dict[str, int]
) -> None:
    command = serve_adapter(Path("out"), "base", {"r": rank, "rank_pattern": pattern})
    assert command is not None
    largest = max(rank, *pattern.values(), 1)
    given_rank = int(command[command.index("--max-lora-rank") + 1])
    assert given_rank in RANKS and given_rank >= largest
    assert not [each for each in RANKS if largest <= each < given_rank]


def test_an_adapter_on_experts_is_served_in_the_form_of_peft() -> None:
    command = serve_adapter(Path("out/it"), "base", PLAIN | EXPERTS)
    assert command is not None and command[-3:-1] == [
        "--enable-mixed-moe-lora-format",
        "--lora-modules",
    ]
    assert json.loads(command[-1]) == {"name": "it", "path": "out/it", "is_3d_lora_weight": True}
    assert list_kinds_of_adapter(PLAIN | EXPERTS) == ["adapter", "experts"]


@pytest.mark.parametrize(
    "keys",
    [
        {"r": 513},
        {"modules_to_save": ["lm_head"]},
        {"use_dora": True},
        {"bias": "all"},
        {"target_parameters": ["experts.down_proj"]},
    ],
)
def test_an_adapter_that_vllm_does_not_load_has_no_command(keys: dict[str, Any]) -> None:
    assert serve_adapter(Path("out"), "base", PLAIN) is not None
    assert serve_adapter(Path("out"), "base", PLAIN | keys) is None
    assert serve_adapter(Path("out"), None, PLAIN) is None


def test_the_last_screen_of_an_adapter_names_its_base(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    for family, is_advised in (("qwen3", True), ("starcoder2", False)):
        base = make_model(tmp_path / f"{family} base", model_type=family)
        adapter = tmp_path / family
        config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
        get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(adapter)
        out = tmp_path / f"{family}-out"
        assert main(["export", str(adapter), "--adapter-only", "--output", str(out)]) == 0
        said = capsys.readouterr().out
        command = shlex.join(
            ["vllm", "serve", str(base), "--enable-lora", "--max-lora-rank", "8", "--lora-modules"]
        )
        assert (command in said) == is_advised == ("vllm" in said)


def test_a_tower_keeps_the_names_that_its_base_was_published_with(tmp_path: Path) -> None:
    """transformers 5.23 writes Gemma 3's tower without `vision_model.`, and vLLM 0.32 does not open that."""
    base = make_vision_model(tmp_path / "base", "gemma3")
    tensors = load_file(base / "model.safetensors")
    published = {
        re.sub(r"^vision_tower\.(?!vision_model)", "vision_tower.vision_model.", k): v
        for k, v in tensors.items()
    }
    save_file(published, base / "model.safetensors", metadata={"format": "pt"})
    out = tmp_path / "out"
    assert main(["export", str(base), "--output", str(out)]) == 0
    exported = load_file(out / "model.safetensors")
    assert exported.keys() == published.keys()
    assert all(torch.equal(exported[name], each) for name, each in published.items())
