"""Given folders of every form, when ranks load them, then each parameter is the file's bit for bit; a folder that does
not fit its config is refused with the names of the tensors, before training."""

from typing import Any

import pytest

FORMS = [
    f"{shards}, {tied}" for shards in ("one file", "several files") for tied in ("untied", "tied")
]


@pytest.mark.parametrize("form", [*FORMS, "tied twice"])
def test_every_parameter_is_the_files(form: str, loaded: dict[str, Any]) -> None:
    assert loaded[form]["differing"] == []


def test_a_tied_head_is_one_parameter(loaded: dict[str, Any]) -> None:
    assert loaded["one file, tied"]["parameters"] == loaded["one file, untied"]["parameters"] - 1
    assert loaded["tied twice"]["parameters"] == loaded["one file, tied"]["parameters"]


def test_a_missing_tensor_is_named(loaded: dict[str, Any]) -> None:
    error = loaded["missing"]["error"]
    assert (
        "model.layers.1.input_layernorm.weight is missing" in error and "LlamaForCausalLM" in error
    )


def test_an_extra_tensor_is_named(loaded: dict[str, Any]) -> None:
    error = loaded["extra"]["error"]
    assert "model.layers.2.input_layernorm.weight" in error and "without a place" in error


def test_a_misshapen_tensor_is_named_with_both_shapes(loaded: dict[str, Any]) -> None:
    error = loaded["misshapen"]["error"]
    assert (
        "model.layers.1.input_layernorm.weight has the shape [47], but the config says [48]"
        in error
    )


def test_all_mistakes_are_reported_at_once(loaded: dict[str, Any]) -> None:
    lines = loaded["all three"]["error"].splitlines()
    assert all(
        part in line
        for part, line in zip(("lm_head", "model.extra", "input_layernorm"), lines, strict=True)
    )


def test_a_folder_that_cannot_be_trained_is_refused_for_its_own_reason(
    loaded: dict[str, Any],
) -> None:
    missing = loaded["expert missing"]["error"]
    assert "the tensors of model.layers.1.mlp.experts.gate_up_proj do not fit together" in missing
    assert "holds an adapter, not a model" in loaded["adapter"]["error"]
    assert "is a run's folder" in loaded["run of others"]["error"]


def test_a_run_can_start_from_a_checkpoint(loaded: dict[str, Any]) -> None:
    assert loaded["checkpoint"]["moved"], "the checkpoint holds the weights of before"
    assert all(loaded["checkpoint"]["same"].values())


def test_an_inline_architecture_takes_adapters(loaded: dict[str, Any]) -> None:
    assert loaded["inline, LoRA"]["error"] is None
    assert loaded["inline, LoRA"]["std"] == pytest.approx(0.02, rel=0.05), (
        "the base is not the family's initialization"
    )


def test_an_inline_architecture_that_cannot_be_built_is_refused_in_a_sentence(
    loaded: dict[str, Any],
) -> None:
    error = loaded["inline, wrong"]["error"]
    assert (
        error.startswith("model_config: ")
        and "not a multiple of the number of attention heads" in error
    )
    assert "\n" not in error
