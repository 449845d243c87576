"""What the recipe reader says of other tools' names and files, wherever a process begins."""

import subprocess
import sys
from pathlib import Path

import pytest

from finetune.api import load_recipe
from finetune.config.other_names import IN_ACCELERATE_FILE, MEANT
from finetune.config.reader import explain_unknown
from finetune.config.schema import recipe_keys
from finetune.convert.counterparts import TOOL_NAMES, list_counterparts
from finetune.convert.hints import explain_key
from finetune.errors import UserError
from tests.ranks import ROOT


@pytest.mark.parametrize("root", ["api", "cli", "run"])
def test_every_process_of_a_user_knows_other_tools_names(root: str) -> None:
    code = (
        f"import finetune.{root}\nfrom finetune.config.reader import read_recipe\n"
        "read_recipe(None, ['model_name_or_path=a/b', 'datasets=[{path: a/b}]', 'sequence_len=9'])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stderr.endswith("sequence_len: Axolotl's name; here it is max_length\n"), (
        ended.stderr
    )


def test_every_key_of_another_tool_means_a_key_that_there_is_or_none() -> None:
    known = recipe_keys()
    names = {
        pair.key for tool in TOOL_NAMES for pair in list_counterparts(tool) if "." not in pair.key
    }
    explained = {name: explain_key(name) for name in names - known.keys()}
    assert len(explained) > 400
    for name, hint in explained.items():
        if hint is None:
            of_automodel = {pair.key for pair in list_counterparts("Automodel")}
            assert name in of_automodel or name in IN_ACCELERATE_FILE, name
        else:
            assert hint[0] in {*known, name} and (hint[0] == name) == (
                "no such key: " in hint[1]
            ), hint
    assert {"base_model", "cutoff_len", "lr", "torch_dtype"} <= explained.keys()
    for name in ("precompute_ref_log_probs", "ref_model"):
        assert "the reference is the model before training: its adapters" in str(explained[name])


# The arguments of Unsloth's FastLanguageModel.from_pretrained and get_peft_model, FastVisionModel's included.
UNSLOTH = """
    model_name max_seq_length full_finetuning fast_inference gpu_memory_utilization max_lora_rank token load_in_16bit r
    target_modules bias use_gradient_checkpointing random_state loftq_config finetune_vision_layers
    finetune_language_layers finetune_attention_modules finetune_mlp_modules target_parameters train_on_responses_only
    instruction_part response_part embedding_learning_rate
""".split()  # noqa: SIM905


def test_a_name_that_is_meant_names_a_key_that_there_is_and_hides_none() -> None:
    known = recipe_keys()
    for name, (ours, _) in MEANT.items():
        assert name not in known and (not ours or ours in known), (name, ours)
    for name in UNSLOTH:
        meant, sentence = explain_unknown(name, known)
        assert "did you mean" not in sentence and "docs/recipes.md" not in sentence, sentence
        assert meant == name or meant in known


PEER_CONFIGS = ROOT.parent / "shared" / "peer_configs"
ITS_FILES = {
    "axolotl": "an Axolotl",
    "llama_factory": "a LLaMA-Factory",
    "torchtune": "a torchtune",
    "automodel": "an Automodel",
    "alignment_handbook": "a TRL",
}


@pytest.mark.parametrize("folder", ITS_FILES)
def test_a_file_of_another_tool_is_named_in_one_line_with_the_command_that_converts_it(
    folder: str,
) -> None:
    files = sorted((PEER_CONFIGS / folder).glob("*.y*ml"))
    if not files:
        pytest.skip("needs the published files of other tools")
    others = []
    for file in files:
        with pytest.raises(UserError) as error:
            load_recipe(file)
        said = f"{file}: is {ITS_FILES[folder]} file, not a recipe; write one from it with `finetune convert {file} "
        if str(error.value) != said + "--output my_recipe.yaml`":
            others.append(str(error.value))
    others = [said for said in others if "this is an Accelerate config" not in said]
    assert len(others) <= 1, (
        others
    )  # a file for the cloud, and one for merging, which train nothing


def test_a_recipe_with_some_of_another_tools_names_is_still_a_recipe(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(
        "model_name_or_path: a/b\ndatasets: [{path: a/b}]\nsequence_len: 9\nnum_epochs: 2"
    )
    with pytest.raises(UserError) as error:
        load_recipe(file)
    assert str(error.value).splitlines() == [
        f"{file}:3: sequence_len: Axolotl's name; here it is max_length",
        f"{file}:4: num_epochs: Axolotl's name; here it is num_train_epochs",
    ]
