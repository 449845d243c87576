"""What the base's files hold beside the model: no class of transformers trains it, and no export loses it."""

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
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

from finetune.config.multi_token import count_predicting_layers
from finetune.config.reader import read_recipe
from finetune.errors import UserError
from finetune.export.carried import account_for_base
from finetune.export.export import export
from finetune.export.publish import ExportOptions
from finetune.export.source import Source
from finetune.export.target import describe_target
from finetune.export.write import plan_weights
from finetune.files.tensors import header_bytes, read_folder
from finetune.models.carried import predicts
from finetune.session import Session
from tests.conftest import make_chat
from tests.models.sweep import TINY, is_composite, tiny_config
from tests.training.layouts import write_recipe
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


def classes() -> Iterator[tuple[str, str]]:
    """(model_type, class) of each model class of transformers with a list of tensors that it passes over."""
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES):
        for family, names in sorted(mapping.items()):
            for name in [names] if isinstance(names, str) else names:
                if family in transformers.CONFIG_MAPPING and getattr(
                    getattr(transformers, name), "_keys_to_ignore_on_load_unexpected", None
                ):
                    is_causal = mapping is MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
                    if not (is_causal and is_composite(family)):  # its text config has a row of its own
                        yield family, name


CLASSES = list(classes())


@cache
def small_config(family: str, name: str) -> Any:
    """The family's config with small sizes."""
    if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        return tiny_config(family)
    whole = transformers.CONFIG_MAPPING[family]().to_dict()
    sections = transformers.CONFIG_MAPPING[family].sub_configs
    small = {
        key: shrink(value) if key in sections and isinstance(value, dict) else value for key, value in whole.items()
    }
    return transformers.AutoConfig.for_model(**small)


WIDTHS = ("hidden_size", "out_hidden_size", "adapter_in_dim", "adapter_input_size", "adapter_out_dim")
SIZES = TINY | dict.fromkeys(WIDTHS, TINY["hidden_size"]) | {"depth": 2, "num_key_value_heads": 4}
OF_A_LAYER = (
    "intermediate_size",
    "moe_intermediate_size",
    "n_routed_experts",
    "num_attention_heads",
    "num_key_value_heads",
    "q_lora_rank",
    "kv_lora_rank",
)


def shrink(section: dict[str, Any]) -> dict[str, Any]:
    """A section of a config with small sizes."""
    if "per_layer_config" in section:  # which says for each of its own layers what to have
        kept = ("model_type", *WIDTHS, *OF_A_LAYER)
        return {key: SIZES.get(key, section[key]) for key in kept if key in section}
    small = {}
    for key, value in section.items():
        if isinstance(value, list) and len(value) == section.get("num_hidden_layers"):
            small[key] = value[: SIZES["num_hidden_layers"]]
        elif key in SIZES and key != "head_dim" and isinstance(value, int) and value:
            small[key] = SIZES[key]
        else:
            small[key] = value
    return small


def names_for(pattern: str) -> list[str]:
    """Names that a class passes over by `pattern`: published ones, else one made of it."""
    text = re.sub(r"\((\?:)?[^()]*\)\?", "", pattern)  # what may be missing
    text = re.sub(r"\((\?:)?([^()|]*)\|[^()]*\)", r"\2", text)  # the first of several
    text = re.sub(r"\[(.)[^]]*\]", r"\1", text.replace(r"\d+", "0"))
    text = re.sub(r"\\(.)", r"\1", re.sub(r"\.\*$|^\.\*|[\^$]", "", text))
    made = [text, f"{text}weight", f"{text}.weight"]
    return [name for name in PUBLISHED if re.search(pattern, name)] or [n for n in made if re.search(pattern, n)][-1:]


def write_base(folder: Path, family: str, name: str) -> dict[str, torch.Tensor]:
    """A folder of the class's tensors, all zeros, and beside them of each name that it passes over; returns those."""
    config = small_config(family, name)
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
    if count_predicting_layers(model.config.to_dict()):  # numbered on, whichever number the class has in its list
        beside[f"model.layers.{layers}.eh_proj.weight"] = torch.randn(4, 8, generator=generator)
    shapes = [(each, torch.float32, box.shape) for each, box in own.files.items()]
    header = header_bytes(shapes + [(each, value.dtype, tuple(value.shape)) for each, value in beside.items()])
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header)
        zeros = sum(4 * torch.Size(shape).numel() for _, _, shape in shapes)
        file.seek(len(header) + zeros)  # a hole, which takes no room
        for value in beside.values():
            file.write(value.numpy().tobytes())
    return beside


@pytest.mark.parametrize(("family", "name"), CLASSES, ids=[name for _, name in CLASSES])
def test_no_tensor_of_a_base_is_lost(family: str, name: str, tmp_path: Path) -> None:
    """Of every class that passes some over: a full run's export has each name of the base's files, and its values."""
    try:
        beside = write_base(tmp_path / "base", family, name)
    except UserError as refused:  # nothing of it is trained
        assert "otherwise than its modules do, and transformers converts them by" in str(refused)
        return
    base = read_folder(tmp_path / "base")
    target = describe_target(tmp_path / "base")
    assert type(target.model).__name__ == name
    trained = {each: tensor for each, tensor in base.items() if each not in beside}
    source = Source(
        tmp_path / "checkpoint",
        tmp_path / "base",
        trained,
        state={"step": 1},
        base_model=str(tmp_path / "base"),
        base=tmp_path / "base",
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
    assert count_predicting_layers(account.target.config_json) == count_predicting_layers(target.config_json)
    with pytest.raises(UserError, match=re.escape(f"lacks {min(beside)}")):
        account.refuse_lost(written.keys() - {min(beside)}, card="")


def test_no_class_of_transformers_trains_multi_token_prediction() -> None:
    """What refuses `train_mtp`: none has such layers, and the one that drafts with them has no loss."""
    for family, name in CLASSES:
        config = small_config(family, name)
        with torch.device("meta"):
            model: Any = getattr(transformers, name)._from_config(config)
        is_predicting = predicts(model)
        assert not any(map(is_predicting, model.state_dict())), name
    model = transformers.AutoModelForCausalLM.from_config(tiny_config("deepseek_v3"))
    ids = torch.arange(8)[None]
    hidden = model.get_decoder()(ids).last_hidden_state
    with pytest.raises(TypeError, match="NoneType"):
        MtpModel(model, 1)(ids, hidden, None, ids, None, labels=ids)


def add_tensors(folder: Path, added: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    save_file(load_file(folder / "model.safetensors") | added, folder / "model.safetensors", {"format": "pt"})
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
        "max_steps": 1,
    }
    return write_recipe(tmp_path / "recipe.yaml", model, data, **settings | keys)


LORA = {"use_peft": True, "lora_target_modules": ["q_proj", "v_proj"]}


@pytest.mark.parametrize("keys", [{}, LORA, {"drop_vision": True}], ids=["full", "lora", "text"])
def test_an_export_of_qwen_has_the_base_s_layers(keys: dict[str, Any], tmp_path: Path, capfd: Any) -> None:
    beside = make_qwen(tmp_path / "model")
    (run,) = train(recipe_of(tmp_path, tmp_path / "model", **keys))
    said: list[str] = []
    exported = load_file(export(run, tmp_path / "out", log=said.append) / "model.safetensors")
    for name, value in beside.items():
        assert torch.equal(exported[name], value) and exported[name].dtype == value.dtype
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert count_predicting_layers(config) == 1
    class_name = "Qwen3_5ForCausalLM" if "drop_vision" in keys else "Qwen3_5ForConditionalGeneration"
    named = ", ".join(sorted(beside))
    sentence = f"3 tensors of the base ({named}), which {class_name} does not hold: untrained, and exported unchanged"
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"base    {sentence}" in said and f"- {sentence}" in card
    assert ("left out of the base, as drop_vision asks: model.visual." in card) == ("drop_vision" in keys)
    assert any("verified: every value" in line for line in said)
