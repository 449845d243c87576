"""What the base's files hold beside the model: no class of transformers trains it, and no export loses it."""

import json
import re
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from finetune.checkpoint import folders
from finetune.config.multi_token import count_predicting_layers
from finetune.config.reader import read_recipe
from finetune.constants import EXPORT_SPARE_BYTES
from finetune.errors import UserError
from finetune.export.base_account import account_for_base
from finetune.export.export import export
from finetune.export.publish import ExportOptions
from finetune.export.source import Source
from finetune.export.target import describe_target
from finetune.export.write import plan_weights
from finetune.files.run_files import find_origin
from finetune.files.tensors import header_bytes, read_folder
from finetune.models.carried import make_prediction_filter
from finetune.session import Session
from tests.conftest import make_chat, make_model
from tests.models.sweep import is_composite, small_config, tiny_config
from tests.ranks import run_python
from tests.training.layouts import write_recipe
from tests.training.test_experts import FAMILIES, SMALL
from tests.training.test_published_bases import store_in_fp8
from tests.vision import make_vision_model

# Names as published files have them; each pattern of a class must find one of these, or itself.
PUBLISHED = (
    "mtp.fc.weight",
    "mtp.layers.0.self_attn.q_proj.weight",
    "model.mtp.layers.0.eh_proj.weight",
    "model.mtp_layers.0.mlp.up_proj.weight",
    "model.visual.merger.norm.weight",
    "mtp_dspark.layers.0.input_layernorm.weight",
    "encoder.version",
    "model.layers.0.self_attn.rotary_emb.inv_freq",
    "model.layers.0.mlp.post_mlp_layernorm.weight",
    "model.language_model.layers.0.self_attn.add_q_proj.weight",
    "model.language_model.layers.0.self_attn.norm_added_q.weight",
    "model.language_model.layers.0.mlp_moe_gen.up_proj.weight",
    "model.language_model.layers.0.input_layernorm_moe_gen.weight",
    "model.language_model.layers.0.post_attention_layernorm_moe_gen.weight",
    "model.language_model.layers.0.shared_head.norm.weight",
    "action_proj_in.fc.weight",
    "proj_out.weight",
    "action_modality_embed",
)


@cache
def list_classes() -> list[tuple[str, str]]:
    """(model_type, class) of each model class of transformers with a list of tensors that it passes over. Imports them all."""
    listed = []
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES):
        for family, names in sorted(mapping.items()):
            for name in [names] if isinstance(names, str) else names:
                if family in transformers.CONFIG_MAPPING and getattr(
                    getattr(transformers, name), "_keys_to_ignore_on_load_unexpected", None
                ):
                    is_causal = mapping is MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
                    if not (
                        is_causal and is_composite(family)
                    ):  # its text config has a row of its own
                        listed.append((family, name))
    return listed


def names_for(pattern: str) -> list[str]:
    """Names that a class passes over by `pattern`: published ones, else one made of it."""
    text = re.sub(r"\((\?:)?[^()]*\)\?", "", pattern)  # what may be missing
    text = re.sub(r"\((\?:)?([^()|]*)\|[^()]*\)", r"\2", text)  # the first of several
    text = re.sub(r"\[(.)[^]]*\]", r"\1", text.replace(r"\d+", "0"))
    text = re.sub(r"\\(.)", r"\1", re.sub(r"\.\*$|^\.\*|[\^$]", "", text))
    made = [text, f"{text}weight", f"{text}.weight"]
    return [name for name in PUBLISHED if re.search(pattern, name)] or [
        n for n in made if re.search(pattern, n)
    ][-1:]


def write_base(folder: Path, family: str, name: str) -> dict[str, torch.Tensor]:
    """A folder of the class's tensors, all zeros, and beside them of each name that it passes over; returns those."""
    config = small_config(family)
    with torch.device("meta"):
        model: Any = getattr(transformers, name)._from_config(config)
    model.config.architectures = [name]
    folder.mkdir()
    model.config.save_pretrained(folder)
    own = describe_target(folder)
    generator = torch.Generator().manual_seed(0)
    beside = {
        found: torch.randn(2, 3, generator=generator)
        for pattern in sorted(model._keys_to_ignore_on_load_unexpected)
        for found in names_for(pattern)
        if found not in own.shapes
    }
    patterns = model._keys_to_ignore_on_load_unexpected
    assert all(any(re.search(pattern, found) for found in beside) for pattern in patterns), patterns
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if count_predicting_layers(
        model.config.to_dict()
    ):  # numbered on, whichever number the class has in its list
        beside[f"model.layers.{layers}.eh_proj.weight"] = torch.randn(4, 8, generator=generator)
    shapes = [(each, torch.float32, box.shape) for each, box in own.files.items()]
    header = header_bytes(
        shapes + [(each, value.dtype, tuple(value.shape)) for each, value in beside.items()],
        {"format": "pt"},
    )
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header)
        zeros = sum(4 * torch.Size(shape).numel() for _, _, shape in shapes)
        file.seek(len(header) + zeros)  # a hole, which takes no room
        for value in beside.values():
            file.write(value.numpy().tobytes())
    return beside


PARTS = 4  # in which the classes are tested: which they are is known once they are imported


@pytest.mark.parametrize("part", range(PARTS))
def test_no_tensor_of_a_base_is_lost(part: int, tmp_path: Path) -> None:
    """Of every class that passes some over: a full run's export has each name of the base's files, and its values."""
    for family, name in list_classes()[part::PARTS]:
        if "Dots3" not in name:
            assert_no_tensor_is_lost(tmp_path / name, family, name)


@pytest.mark.slow
def test_no_tensor_of_the_largest_base_is_lost(tmp_path: Path) -> None:
    large = [(family, name) for family, name in list_classes() if "Dots3" in name]
    assert large
    for family, name in large:
        assert_no_tensor_is_lost(tmp_path / name, family, name)


def assert_no_tensor_is_lost(folder: Path, family: str, name: str) -> None:
    folder.mkdir()
    try:
        beside = write_base(folder / "base", family, name)
    except UserError as refused:  # nothing of it is trained
        assert "otherwise than its modules do, and transformers converts them by" in str(refused)
        return
    base = read_folder(folder / "base")
    target = describe_target(folder / "base")
    assert type(target.model).__name__ == name
    trained = {each: tensor for each, tensor in base.items() if each not in beside}
    source = Source(
        folder / "checkpoint",
        folder / "base",
        trained,
        state={"step": 1},
        base_model=str(folder / "base"),
        base=folder / "base",
    )
    account = account_for_base(source, target, ["safetensors"])
    weights = plan_weights(source, target, ExportOptions(), account=account)
    written = {value.name: value for shard in weights.model for value in shard.values}
    assert written.keys() == base.keys()
    account.refuse_lost(written.keys(), card="")
    for each, value in beside.items():
        assert written[each].dtype == value.dtype
        assert torch.equal(written[each].rows(0, len(value)), value)
    assert account.target is not None
    assert count_predicting_layers(account.target.config_json) == count_predicting_layers(
        target.config_json
    )
    with pytest.raises(UserError, match=re.escape(f"lacks {min(beside)}")):
        account.refuse_lost(written.keys() - {min(beside)}, card="")


def test_no_class_of_transformers_trains_multi_token_prediction() -> None:
    """What refuses `train_mtp`: none has such layers, and the one that drafts with them has no loss."""
    for family, name in list_classes():
        config = small_config(family)
        with torch.device("meta"):
            model: Any = getattr(transformers, name)._from_config(config)
        is_predicting = make_prediction_filter(model)
        assert not any(map(is_predicting, model.state_dict())), name
    model = transformers.AutoModelForCausalLM.from_config(tiny_config("deepseek_v3"))
    ids = torch.arange(8)[None]
    hidden = model.get_decoder()(ids).last_hidden_state
    with pytest.raises(TypeError, match="NoneType"):
        MtpModel(model, 1)(ids, hidden, None, ids, None, labels=ids)


def add_tensors(folder: Path, added: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    save_file(
        load_file(folder / "model.safetensors") | added,
        folder / "model.safetensors",
        {"format": "pt"},
    )
    return added


def make_qwen(folder: Path) -> dict[str, torch.Tensor]:
    """A Qwen3.5 as published, a vision-language model whose files hold a layer for multi-token prediction; returns that."""
    make_vision_model(folder, "qwen3_5")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    names = ("mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.mlp.up_proj.weight")
    return add_tensors(folder, {name: torch.randn(3, 5).bfloat16() for name in names})


def train(recipe: Path, steps: int = 1) -> list[str]:
    """Trains in this process; returns the run's folder."""
    with Session(read_recipe(str(recipe))) as session:
        for batch, _ in zip(session.batches(), range(steps), strict=False):
            session.forward_backward(batch)
            session.optim_step()
        session.save()
    return [str(session.folder)]


def recipe_of(tmp_path: Path, model: Path, **keys: Any) -> Path:
    data = make_chat(tmp_path / "chat.jsonl", rows=8)
    settings = {
        "accelerate_config": "single",
        "output_dir": str(tmp_path / "run"),
        "global_batch_size": 4,
        "export_at_end": True,
        "max_steps": 1,
    }
    return write_recipe(tmp_path / "recipe.yaml", model, data, **settings | keys)


LORA = {"use_peft": True, "lora_target_modules": ["q_proj", "v_proj"]}


@pytest.mark.parametrize("keys", [{}, LORA, {"drop_vision": True}], ids=["full", "lora", "text"])
def test_an_export_of_qwen_has_the_base_s_layers(
    keys: dict[str, Any], tmp_path: Path, capfd: Any
) -> None:
    beside = make_qwen(tmp_path / "model")
    recipe = recipe_of(tmp_path, tmp_path / "model", **keys)
    if keys:
        said: list[str] = []
        out = export(*train(recipe), tmp_path / "out", log=said.append)
    else:
        launched = run_python(["-m", "finetune", "launch", "--recipe", str(recipe)])
        assert launched.returncode == 0, launched.stderr
        said = (launched.stdout + launched.stderr).splitlines()
        out = tmp_path / "run" / "export"
    exported = load_file(out / "model.safetensors")
    for name, value in beside.items():
        assert torch.equal(exported[name], value) and exported[name].dtype == value.dtype
    assert count_predicting_layers(config_of(out)) == 1
    class_name = (
        "Qwen3_5ForCausalLM" if "drop_vision" in keys else "Qwen3_5ForConditionalGeneration"
    )
    named = ", ".join(sorted(beside))
    sentence = f"3 tensors of the base ({named}), which {class_name} does not hold: untrained, and exported unchanged"
    card = (out / "README.md").read_text()
    assert f"base    {sentence}" in said and f"- {sentence}" in card
    assert keys or f"        {sentence}" in said  # the first screen
    assert ("left out of the base, as drop_vision asks: model.visual." in card) == (
        "drop_vision" in keys
    )
    assert any("verified: every value" in line for line in said)


def make_deepseek(folder: Path, **config: Any) -> dict[str, torch.Tensor]:
    """A DeepSeek V3 of two layers, whose files number the layer for multi-token prediction on, with copies of embedding and head."""
    make_model(
        folder,
        model_type="deepseek_v3",
        **SMALL | FAMILIES["deepseek_v3"] | {"num_nextn_predict_layers": 1} | config,
    )
    stored = load_file(folder / "model.safetensors")
    beside = {
        name.replace("layers.1.", "layers.2."): torch.randn_like(value)
        for name, value in stored.items()
        if "layers.1." in name
    }
    beside["model.layers.2.eh_proj.weight"] = torch.randn(64, 128)
    for name in ("embed_tokens", "shared_head.head"):
        beside[f"model.layers.2.{name}.weight"] = torch.randn(262, 64)
    return add_tensors(folder, beside)


def config_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return content


def test_numbered_layers_are_carried_out_of_an_fp8_base_too(tmp_path: Path) -> None:
    """Whatever number transformers' own list has; those in FP8 as transformers dequantizes them."""
    beside = make_deepseek(tmp_path / "model", dtype="bfloat16")
    store_in_fp8(tmp_path / "model")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    quantized = {name for name in beside if f"{name}_scale_inv" in stored}
    assert "model.layers.2.self_attn.o_proj.weight" in quantized
    (run,) = train(
        recipe_of(tmp_path, tmp_path / "model", use_peft=True, lora_target_modules=["o_proj"])
    )
    exported = load_file(export(run, tmp_path / "out", log=lambda _: None) / "model.safetensors")
    assert beside.keys() <= exported.keys() and not any(
        name.endswith("_scale_inv") for name in exported
    )
    for name in beside:
        value = stored[name].float()
        if name in quantized:
            scales = stored[f"{name}_scale_inv"].repeat_interleave(32, 0).repeat_interleave(32, 1)
            value *= scales[: value.shape[0], : value.shape[1]]
        assert torch.equal(exported[name], value.to(exported[name].dtype)), name
    assert count_predicting_layers(config_of(tmp_path / "out")) == 1


def test_what_the_base_no_longer_holds_is_not_promised(tmp_path: Path) -> None:
    """A base that has moved, holds other values, or never had the layers: config.json says 0, and a line says why."""
    beside = make_deepseek(tmp_path / "model")
    (run,) = train(recipe_of(tmp_path, tmp_path / "model"))
    name = min(beside)

    def exported(**options: Any) -> tuple[list[str], int, bool]:
        said: list[str] = []
        out = export(
            run, tmp_path / "out", log=said.append, verify=False, overwrite=True, **options
        )
        is_carried = name in load_file(out / "model.safetensors")
        lines = [line.removeprefix("base    ") for line in said if line.startswith("base")]
        card = (out / "README.md").read_text()
        assert all(f"- {line}" in card for line in lines)
        return lines, count_predicting_layers(config_of(out)), is_carried

    assert exported()[1:] == (1, True)
    (tmp_path / "model").rename(tmp_path / "moved")
    lines, promised, is_carried = exported()
    assert (promised, is_carried) == (0, False)
    gone = f"the weights of {tmp_path}/model are not on this machine; name their folder with --base-model"
    assert lines[0] == f"its list of tensors was not compared: {gone}"
    assert lines[1].endswith(f"is 0 in config.json: {gone}")
    assert exported(base_model=str(tmp_path / "moved"))[1:] == (1, True)
    add_tensors(tmp_path / "moved", {name: beside[name] + 1})
    (tmp_path / "moved").rename(tmp_path / "model")
    lines, promised, is_carried = exported()
    assert (promised, is_carried) == (0, False)
    assert (
        "model holds other values than when the run began" in lines[0]
        and "is 0 in config.json" in lines[-1]
    )
    lines, promised, is_carried = exported(base_model=str(tmp_path / "model"))
    assert (promised, is_carried) == (1, True)
    assert lines[0] == f"warning: {tmp_path}/model is not the base that the run began with"


def test_a_run_does_not_go_on_from_another_base(tmp_path: Path) -> None:
    beside = make_deepseek(tmp_path / "model")
    recipe = recipe_of(tmp_path, tmp_path / "model", max_steps=2)
    train(recipe)
    name = min(beside)
    add_tensors(tmp_path / "model", {name: beside[name] + 1})
    with (
        pytest.raises(
            UserError, match="the same name is given, but what an export carries over has changed"
        ),
        Session(read_recipe(str(recipe))) as session,
    ):
        session.load()


def test_a_promise_that_the_base_itself_does_not_keep_is_withdrawn(tmp_path: Path) -> None:
    """Another tool's export: config.json promises layers that are in no file."""
    make_model(tmp_path / "model", model_type="deepseek_v3", **SMALL | FAMILIES["deepseek_v3"])
    assert count_predicting_layers(config_of(tmp_path / "model")) == 1
    said: list[str] = []
    out = export(tmp_path / "model", tmp_path / "out", log=said.append)
    assert count_predicting_layers(config_of(out)) == 0
    assert any(
        "is 0 in config.json: the base's files hold no layers for multi-token prediction" in line
        for line in said
    )


def test_a_promise_that_builds_other_layers_stays(tmp_path: Path) -> None:
    """Nemotron H Omni has a norm in its vision tower only where its config promises layers for multi-token prediction."""
    name = "NemotronH_Omni_Reasoning_V3"
    config = small_config("nemotron_h_omni").to_dict()
    config["text_config"]["num_nextn_predict_layers"] = 1
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(
        json.dumps(config | {"architectures": [name]}, default=str)
    )
    target = describe_target(tmp_path / "base")
    assert any("vision_final_layernorm" in each for each in target.shapes)
    account = account_for_base(
        Source(tmp_path, tmp_path / "base", {}, state={"step": 1}), target, ["safetensors"]
    )
    assert account.target is not None and count_predicting_layers(account.target.config_json) == 1
    assert (
        "stays in config.json, as NemotronH_Omni_Reasoning_V3 has other layers without it"
        in account.sentences[0]
    )


def test_rows_of_a_grown_vocabulary_are_not_carried(tmp_path: Path) -> None:
    """DeepSeek's copies of embedding and head would not fit the tokens that were added."""
    make_deepseek(tmp_path / "model")
    (run,) = train(
        recipe_of(tmp_path, tmp_path / "model", added_tokens=["[TOOL]"], pad_vocab_to_multiple_of=1)
    )
    said: list[str] = []
    out = export(run, tmp_path / "out", log=said.append)
    assert not any("layers.2." in name for name in load_file(out / "model.safetensors"))
    assert count_predicting_layers(config_of(out)) == 0
    why = "it has a row for each of the base's 262 tokens, and the model 263"
    assert any(
        line.startswith(f"base    left out of the base, {why}: model.layers.2.") for line in said
    )


def test_a_run_from_a_checkpoint_carries_what_that_one_s_base_has(tmp_path: Path) -> None:
    beside = make_deepseek(tmp_path / "model")
    (first,) = train(recipe_of(tmp_path, tmp_path / "model"))
    checkpoint = next(Path(first).glob("checkpoints/step-*/model"))
    (second,) = train(recipe_of(tmp_path, checkpoint, output_dir=str(tmp_path / "second")))
    exported = load_file(export(second, tmp_path / "out", log=lambda _: None) / "model.safetensors")
    assert all(torch.equal(exported[name], value) for name, value in beside.items())


def test_the_base_of_a_checkpoint_is_that_of_its_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    cached = tmp_path / "hub" / "models--some--base"
    (cached / "refs").mkdir(parents=True)
    for revision, commit in (("main", "a" * 40), ("v2", "b" * 40)):
        snapshot = cached / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").touch()
        (snapshot / "model.safetensors").touch()
        (cached / "refs" / revision).write_text(commit)
        state = {"base_model": "some/base", "recipe": {"model_revision": revision}}
        (tmp_path / "state.json").write_text(json.dumps(state))
        assert find_origin(tmp_path / "model") == snapshot


def test_other_formats_say_what_they_hold(tmp_path: Path) -> None:
    """GGUF has no place for it, and says so; compressed-tensors has it as the base does, and names it as not quantized."""
    model = make_model(tmp_path / "model")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"  # as Llama 2's files hold it
    beside = add_tensors(model, {name: torch.arange(8.0)})
    said: list[str] = []
    out = export(model, tmp_path / "gguf", formats=["gguf"], log=said.append)
    assert (
        f"left out of the base, as GGUF has no place for it: {name}"
        in (out / "README.md").read_text()
    )
    keys: dict[str, Any] = {"formats": ["compressed-tensors"], "quantization": "int8"}
    out = export(model, tmp_path / "compressed", log=said.append, **keys)
    assert torch.equal(load_file(out / "model.safetensors")[name], beside[name])


def test_the_disk_must_have_room_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first step."""
    beside = make_deepseek(tmp_path / "model")
    with Session(read_recipe(str(recipe_of(tmp_path, tmp_path / "model")))) as session:
        carried = sum(value.nbytes for value in beside.values())
        assert session._loaded.size.carried_bytes == carried
        checkpoint = session._saver.check_save(1)
        needed = checkpoint + 4 * session._loaded.size.total + carried + EXPORT_SPARE_BYTES
        for free, is_enough in ((needed + 1000, True), (needed - 1000, False)):  # some buffers
            monkeypatch.setattr(
                folders.shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free)
            )
            with (
                nullcontext()
                if is_enough
                else pytest.raises(UserError, match="free space, or set another output_dir")
            ):
                session._saver.check_save(1)
