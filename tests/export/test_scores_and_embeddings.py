"""Exports of models that write no text: their configs, their cards and the lines on how to use them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from finetune.export.export import export_source
from finetune.export.publish import ExportOptions
from finetune.export.source import open_source
from tests.conftest import make_model


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_the_length_of_an_embedding_is_found_by_whatever_name_the_config_has_for_it(
    model_type: str, tmp_path: Path
) -> None:
    model = make_model(tmp_path / "model", model_type=model_type)
    config = json.loads((model / "config.json").read_text())
    source = replace(open_source(model), state={"recipe": {"method": "embed"}})
    out = export_source(source, tmp_path / "out", ExportOptions(verify=False))
    pooling = json.loads((out / "1_Pooling" / "config.json").read_text())
    name = "n_embd" if model_type == "gpt2" else "hidden_size"
    assert pooling["word_embedding_dimension"] == config[name]
