"""`finetune convert` on files of other tools that train on images, started with a tiny model of their family and pictures."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText, Gemma3TextConfig
from transformers.masking_utils import create_sliding_window_causal_mask
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
from transformers.models.gemma3.modeling_gemma3 import create_masks_for_vision_model
from transformers.models.gemma4.modeling_gemma4 import eager_attention_forward

from finetune.config.families import IMAGE_FAMILIES
from finetune.config.module_names import find_trained
from finetune.config.schema import Model
from finetune.convert.automodel import (
    BLANK_IMAGES,
    DROPPED_BY_ESTIMATE,
    FOUND_BY_WORDS,
    GRADIENTS_REDUCED_IN_DTYPE,
    HEADER_UNFOUND,
    IMAGES_IN_ORDER,
    IMAGES_UNSEEN_BY_ENGINE,
    KEPT_BY_ESTIMATE,
    NUMBERED_IN_STAGES,
    OF_ONE_DOCUMENT,
    PACKED_ROWS_UNMASKED,
    REDUCED_BY_MEGATRON,
    SEEN_BY_ENGINE,
    STARTS_TWICE,
    THOUGHT_ADDED,
    WITHOUT_WINDOWS,
)
from finetune.convert.by_tool import (
    IMAGES_SEEN_IN_ALL_LAYERS,
    IMAGES_SEEN_IN_ALL_LAYERS_IN_06,
    IMAGES_UNSEEN_IN_STAGES,
    RESIZED,
    RESIZED_IN_16_BITS,
)
from finetune.convert.chat_templates import (
    FAMILIES_MARKED_BY_HEADER,
    ONE_TEXT,
    OWN_THOUGHT,
    THOUGHT_WHOLE,
)
from finetune.convert.conversion import convert_file
from finetune.convert.datasets import MIXED_ROWS, MIXED_SHARES, MIXTURE
from finetune.convert.image_models import (
    ADAPTERS_OF_TEXT,
    DECAYS_ALONE,
    PART_ADAPTED,
    ROUNDED_AWAY,
    STOPS_TOO,
    UNREAD,
)
from finetune.convert.recognize import Refusal
from finetune.convert.torchtune import IMAGES_OF_LLAMA_3_2, TILES_EMBEDDED
from finetune.convert.value_conversion import Conversion
from finetune.models.load import names_of_parameters, text_names
from tests.convert.published import make_trial, start
from tests.vision import FAMILIES, MORE, make_vision_model

FACTORY = """
model_name_or_path: Qwen/Qwen2.5-VL-7B-Instruct
image_max_pixels: 262144
video_max_pixels: 16384
stage: sft
do_train: true
finetuning_type: lora
lora_target: all
freeze_vision_tower: true
freeze_multi_modal_projector: true
dataset: mllm_demo
media_dir: data
template: qwen2_vl
cutoff_len: 2048
learning_rate: 1.0e-4
"""
SHAREGPT = {"messages": "messages", "images": "images"}
TAGS = {
    "role_tag": "role",
    "content_tag": "content",
    "user_tag": "user",
    "assistant_tag": "assistant",
}
AUTOMODEL = """
recipe: FinetuneRecipeForVLM
model: {_target_: nemo_automodel.NeMoAutoModelForImageTextToText.from_pretrained, pretrained_model_name_or_path: google/gemma-3-4b-it}
freeze_config: {freeze_embeddings: true, freeze_vision_tower: true, freeze_language_model: false}
processor: {_target_: transformers.AutoProcessor.from_pretrained}
dataset: {_target_: nemo_automodel.components.datasets.vlm.datasets.make_cord_v2_dataset, path_or_dataset: naver-clova-ix/cord-v2, split: train}
step_scheduler: {global_batch_size: 8, max_steps: 100}
optimizer: {_target_: torch.optim.AdamW, lr: 1.0e-4}
"""


def write_factory(folder: Path, text: str = FACTORY, **columns: str) -> Path:
    """A file of LLaMA-Factory beside a data/dataset_info.json with mllm_demo as its own has it."""
    demo = {
        "formatting": "sharegpt",
        "columns": SHAREGPT | columns,
        "tags": TAGS,
        "file_name": "mllm_demo.json",
    }
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "dataset_info.json").write_text(json.dumps({"mllm_demo": demo}))
    (folder / "data" / "mllm_demo.json").write_text("[]")
    (folder / "theirs.yaml").write_text(text)
    return folder / "theirs.yaml"


def test_axolotls_file_for_qwen2_vl_means_the_same_and_trains(shared: Path, tmp_path: Path) -> None:
    file = shared / "peer_configs" / "axolotl" / "qwen2-vl__lora-7b.yaml"
    if not file.is_file():
        pytest.skip("the published files of other tools are not at hand")
    theirs, found = yaml.safe_load(file.read_text()), convert_file(file)
    names = {
        "base_model": "model_name_or_path", "sequence_len": "max_length", "micro_batch_size": "per_device_train_batch_size",
        "num_epochs": "num_train_epochs", "sample_packing": "packing", "lr_scheduler": "lr_scheduler_type",
    }  # fmt: skip
    same = (
        "learning_rate",
        "lora_r",
        "lora_alpha",
        "gradient_accumulation_steps",
        "warmup_ratio",
        "attn_implementation",
    )
    expected = {names.get(key, key): theirs[key] for key in (*names, *same)}
    expected["datasets"] = [{key: theirs["datasets"][0][key] for key in ("path", "split")}]
    assert {key: found.recipe[key] for key in expected} == expected
    assert "chat_template" not in found.recipe  # the model's own writes the images
    assert any(  # its MultiModalChatDataCollator knows no length
        line.startswith("sequence_len: ") and "at any length there" in line
        for line in found.differences
    )
    assert not found.to_do and not found.missing_capabilities
    trained, said = start(make_trial(file, found, tmp_path))
    assert trained and "images" in said, said


def test_llama_factorys_images_are_read_from_their_column(tmp_path: Path) -> None:
    file = write_factory(tmp_path / "theirs")
    found = convert_file(file)
    theirs = yaml.safe_load(FACTORY)
    (entry,) = found.recipe["datasets"]
    assert (entry["path"], entry["image_folder"]) == (
        str(file.parent / "data" / "mllm_demo.json"),
        theirs["media_dir"],
    )
    assert (
        found.recipe["max_length"] == theirs["cutoff_len"]
        and found.recipe["lora_target_modules"] == "all-linear"
    )
    assert (
        "chat_template" not in found.recipe and not found.to_do and not found.missing_capabilities
    )
    (size,) = found.differences
    assert size.startswith(
        f"image_max_pixels: {theirs['image_max_pixels']}   (the model's own image processor"
    )
    trained, said = start(make_trial(file, found, tmp_path))
    assert trained and "images" in said, said


def test_what_a_tool_trains_beside_the_language_model_is_listed(tmp_path: Path) -> None:
    unfrozen = FACTORY.replace("freeze_vision_tower: true", "freeze_vision_tower: false")
    found = convert_file(write_factory(tmp_path, unfrozen))
    assert any(line.startswith("freeze_vision_tower: false") for line in found.differences)
    assert any(
        "columns.images" in line and "rename it" in line
        for line in convert_file(write_factory(tmp_path / "named", images="pictures")).differences
    )
    assert (
        "video"
        in convert_file(write_factory(tmp_path / "video", videos="videos")).missing_capabilities
    )


def test_automodels_recipes_for_images_are_read(tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text(AUTOMODEL)
    found = convert_file(tmp_path / "theirs.yaml")
    assert (found.image_family, found.recipe["model_name_or_path"]) == (
        "gemma3",
        "google/gemma-3-4b-it",
    )
    assert any(line.startswith("freeze_embeddings: true") for line in found.remarks)
    assert found.missing_capabilities == ["a data set made by code"]


AUTOMODELS_TOWER = ("vision", "visual", "image_encoder")


def leave_trained(model: nn.Module) -> set[str]:
    """The parameters that Automodel's apply_parameter_freezing leaves trained by its defaults."""
    frozen = {
        f"{module}.{name}"
        for module, part in model.named_modules()
        for name, _ in part.named_parameters()
        if any(each in module.lower() for each in AUTOMODELS_TOWER)
    }
    return {name for name, _ in model.named_parameters()} - frozen


@pytest.mark.parametrize("family", ["gemma3", "idefics3", "internvl", "llava_next", "qwen3_vl"])
def test_automodels_projector_is_trained_as_there(family: str, tmp_path: Path) -> None:
    """Its names of frozen parts are those of a tower; a projector that is called otherwise is trained."""
    names = {"gemma3": "google/gemma-3-4b-it", "qwen3_vl": "Qwen/Qwen3-VL-4B-Instruct"}
    names |= {
        "idefics3": "HuggingFaceM4/Idefics3-8B-Llama3",
        "internvl": "OpenGVLab/InternVL3-2B-hf",
    }
    names |= {"llava_next": "llava-hf/llava-v1.6-mistral-7b-hf"}
    (tmp_path / "theirs.yaml").write_text(AUTOMODEL.replace("google/gemma-3-4b-it", names[family]))
    found = convert_file(tmp_path / "theirs.yaml")
    assert found.image_family == family
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(family))
    keys = replace(Model(), trainable_modules=tuple(found.recipe.get("trainable_modules", ())))
    named = list(names_of_parameters(model).values())
    assert find_trained(named, keys, text_names(model)) == leave_trained(model)
    file = tmp_path / "theirs.yaml"
    file.write_text(file.read_text().replace("vision_tower: true", "vision_tower: false"))
    found = convert_file(file)
    keys = replace(Model(), trainable_modules=tuple(found.recipe["trainable_modules"]))
    every = {name for name, _ in model.named_parameters()}
    assert find_trained(named, keys, text_names(model)) == every
    assert not any("freeze_vision_tower" in line for line in found.differences)


def test_what_automodel_trains_of_the_tower_is_listed(tmp_path: Path) -> None:
    start_of = AUTOMODEL.index("freeze_config")
    section = AUTOMODEL[start_of : AUTOMODEL.index("\n", start_of) + 1]
    (tmp_path / "theirs.yaml").write_text(AUTOMODEL.replace(section, ""))
    found = convert_file(tmp_path / "theirs.yaml")
    assert "vision_tower" in found.recipe["trainable_modules"]
    (tmp_path / "theirs.yaml").write_text(AUTOMODEL + "peft: {dim: 8}\n")
    found = convert_file(tmp_path / "theirs.yaml")
    assert "trainable_modules" not in found.recipe
    assert not any("freeze" in line for line in [*found.differences, *found.remarks])
    sound = section.replace("freeze_vision_tower: true", "freeze_audio_tower: false")
    (tmp_path / "theirs.yaml").write_text(AUTOMODEL.replace(section, sound))
    found = convert_file(tmp_path / "theirs.yaml")
    assert any(line.startswith("freeze_audio_tower: false") for line in found.remarks)
    assert "multi_modal_projector" in found.recipe["trainable_modules"]


@pytest.mark.parametrize("family", sorted({*FAMILIES, *MORE}))
def test_a_familys_images_are_read_where_a_run_takes_them(family: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": family}))
    file = tmp_path / "theirs.yaml"
    file.write_text(
        f"base_model: {tmp_path / 'model'}\nprocessor_type: AutoProcessor\ndatasets: [{{path: org/rows}}]\n"
    )
    if family in IMAGE_FAMILIES:
        assert convert_file(file).image_family == family
    else:
        with pytest.raises(
            Refusal,
            match=f"training on images is not supported for {family}; it is tested with gemma3",
        ):
            convert_file(file)


@pytest.mark.parametrize("family", IMAGE_FAMILIES)
def test_what_resizes_images_is_said(family: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": family}))
    text = f"base_model: {tmp_path / 'model'}\ndatasets: [{{path: org/rows}}]\n"
    (tmp_path / "theirs.yaml").write_text(text + "processor_type: AutoProcessor\n")
    (tmp_path / "text.yaml").write_text(text)
    # a family that is not listed has another's
    has_both = "pil" in IMAGE_PROCESSOR_MAPPING_NAMES.get(family, {"pil": ""})
    assert (RESIZED in convert_file(tmp_path / "theirs.yaml").remarks) == has_both
    assert RESIZED not in convert_file(tmp_path / "text.yaml").remarks


def test_a_tower_in_few_bits_is_said(tmp_path: Path) -> None:
    """BitsAndBytesConfig without llm_int8_skip_modules in both tools: transformers leaves the head alone as it is."""
    note = "load_in_4bit: true   (the linear layers of the vision tower and the projector are in as few bits there"
    quantized = write_factory(tmp_path, FACTORY + "quantization_bit: 4\n")
    assert any(line.startswith(note) for line in convert_file(quantized).differences)
    plain = write_factory(tmp_path / "plain")
    assert not any(line.startswith(note) for line in convert_file(plain).differences)


@pytest.mark.parametrize(
    ("model", "is_said"), [("Qwen/Qwen2.5-VL-7B-Instruct", True), ("Qwen/Qwen2.5-7B", False)]
)
def test_llama_factorys_mean_of_means_is_said(model: str, is_said: bool, tmp_path: Path) -> None:
    """Source: model_accepts_loss_kwargs = False of train/sft/trainer.py, where the model has a processor."""
    text_alone = FACTORY.replace("Qwen/Qwen2.5-VL-7B-Instruct", model)
    for key in ("image_max_pixels: 262144", "freeze_vision_tower: true"):
        text_alone = text_alone.replace(key, "")
    text_alone = text_alone.replace("freeze_multi_modal_projector: true", "")
    text_alone = text_alone.replace("mllm_demo", "texts").replace("qwen2_vl", "qwen")
    (tmp_path / "theirs.yaml").write_text(text_alone)
    found = convert_file(tmp_path / "theirs.yaml")
    assert found.image_family is None
    assert any("the mean of each micro-batch" in line for line in found.remarks) == is_said


@pytest.mark.parametrize(
    ("template", "is_said"),
    [("qwen2_vl", True), ("gemma3", True), ("paligemma", False), ("kimi_vl", False)],
)
def test_llama_factory_trains_a_line_break_after_answers_about_images(
    template: str, is_said: bool, tmp_path: Path
) -> None:
    """Source: format_assistant of its data/template.py."""
    path = write_factory(tmp_path, FACTORY.replace("qwen2_vl", template))
    said = "the line break after an answer is trained too there"
    assert any(said in line for line in convert_file(path).remarks) == is_said


@pytest.mark.parametrize(
    ("name", "notes"),
    [
        ("Qwen/Qwen3.5-9B", [ONE_TEXT, THOUGHT_WHOLE]),
        ("Qwen/Qwen3.8-27B", [THOUGHT_WHOLE]),
        ("Qwen/Qwen3-VL-4B-Thinking", [ONE_TEXT, THOUGHT_WHOLE]),
        ("Qwen/Qwen3-VL-8B-Instruct", []),
        ("zai-org/GLM-4.6V-Flash", [OWN_THOUGHT]),
        ("google/gemma-3-4b-it", []),
    ],
)
def test_the_thoughts_that_automodel_trains_in_rows_with_images_are_said(
    name: str, notes: list[str], tmp_path: Path
) -> None:
    """build_labels_from_template of its components/datasets/vlm/collate_fns.py."""
    (tmp_path / "theirs.yaml").write_text(AUTOMODEL.replace("google/gemma-3-4b-it", name))
    text = "\n".join(convert_file(tmp_path / "theirs.yaml").differences)
    assert [note for note in (ONE_TEXT, THOUGHT_WHOLE, OWN_THOUGHT) if note in text] == notes


# _IMSTART_TEMPLATE_PROCESSORS of the same
MARKED_PROCESSORS = ("Qwen2VLProcessor", "Qwen2_5_VLProcessor", "Qwen3VLProcessor")


def test_the_families_whose_answers_automodel_marks_by_their_header() -> None:
    marked = {name for name in IMAGE_FAMILIES if PROCESSOR_MAPPING_NAMES[name] in MARKED_PROCESSORS}
    assert marked == set(FAMILIES_MARKED_BY_HEADER)


def convert_automodels(tmp_path: Path, name: str, **keys: object) -> Conversion:
    """Converts its file with another model and keys."""
    theirs = yaml.safe_load(AUTOMODEL.replace("google/gemma-3-4b-it", name)) | keys
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(theirs))
    return convert_file(tmp_path / "theirs.yaml")


def test_where_the_tokens_of_an_image_see_each_other_is_said_of_gemma_4s_large_models(
    tmp_path: Path,
) -> None:
    for name, is_said in (("31B-it", True), ("26B-A4B-it", False), ("E4B-it", False)):
        made = convert_automodels(tmp_path, f"google/gemma-4-{name}")
        assert made.image_family == "gemma4"
        assert any(IMAGES_SEEN_IN_ALL_LAYERS in line for line in made.remarks) == is_said


def test_between_automodels_stages_an_image_of_gemma_4_sees_what_is_before_it_alone(
    tmp_path: Path,
) -> None:
    """create_pipeline_forward_gemma4_text of its pipelining/hf_utils.py."""
    for stages, is_said in ((4, True), (1, False)):
        name = "google/gemma-4-31B-it"
        made = convert_automodels(tmp_path, name, distributed={"pp_size": stages})
        assert any(IMAGES_UNSEEN_IN_STAGES in line for line in made.differences) == is_said
        assert any(IMAGES_SEEN_IN_ALL_LAYERS in line for line in made.remarks) != is_said


@pytest.mark.parametrize(
    ("name", "keys", "is_said"),
    [
        ("Qwen/Qwen3-VL-235B-A22B-Instruct", {}, True),
        ("Qwen/Qwen3.5-27B", {}, True),
        ("Qwen/Qwen3.5-397B-A17B", {}, True),
        ("Qwen/Qwen3.5-397B-A17B", {"distributed": {"pp_size": 1}}, False),
        ("Qwen/Qwen3.5-397B-A17B", {"distributed": {"pp_size": 4, "cp_size": 2}}, False),
        ("Qwen/Qwen3.5-35B-A3B", {"packed_sequence": {"pack_size": 64}}, False),
        ("google/gemma-4-31B-it", {}, False),
    ],
)
def test_later_stages_of_automodels_number_the_tokens_of_an_image_in_their_row(
    name: str, keys: dict[str, object], is_said: bool, tmp_path: Path
) -> None:
    """forward of Qwen3VLMoeTextModelBackend of its models/qwen3_vl_moe/model.py."""
    made = convert_automodels(tmp_path, name, **{"distributed": {"pp_size": 4}, **keys})
    assert any(NUMBERED_IN_STAGES in line for line in made.differences) == is_said


@pytest.mark.parametrize(
    ("keys", "is_said"),
    [
        ({}, True),
        ({"packed_sequence": {"pretokenize": True, "pack_size": 64}}, False),
        ({"distributed": {"cp_size": 2}}, False),
    ],
)
def test_automodels_own_class_of_gemma_4s_mixture_hides_images_in_no_layer_in_06(
    keys: dict[str, object], is_said: bool, tmp_path: Path
) -> None:
    """_build_unpacked_gemma4_causal_mask_mapping of its models/gemma4_moe/model.py, which in 0.7
    calls transformers' create_masks_for_vision_model; the masks of packed rows and of context
    parallelism are as transformers' newest.
    """
    made = convert_automodels(tmp_path, "google/gemma-4-26B-A4B-it", **keys)
    assert any(IMAGES_SEEN_IN_ALL_LAYERS_IN_06 in line for line in made.remarks) == is_said


def test_a_mask_of_booleans_hides_nothing_under_eager_attention_and_drops_windows() -> None:
    """Of transformers' functions, which Automodel's masks of packed rows are handed to."""
    head = SimpleNamespace(num_key_value_groups=1, training=False)
    query, key, value = torch.ones(3, 1, 1, 4, 4)
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()
    seen = eager_attention_forward(head, query, key, value, mask, scaling=1.0)[1]
    assert (seen > 0).all()
    config = Gemma3TextConfig(sliding_window=2)
    assert create_sliding_window_causal_mask(config, torch.ones(1, 4, 8), mask, None) is mask


ALONE_WITHOUT_WINDOWS = WITHOUT_WINDOWS.format(OF_ONE_DOCUMENT)


@pytest.mark.parametrize(
    ("name", "attention", "lines"),
    [
        ("gemma-4-26B-A4B-it", "eager", [PACKED_ROWS_UNMASKED, ALONE_WITHOUT_WINDOWS]),
        ("gemma-4-26B-A4B-it", "sdpa", [ALONE_WITHOUT_WINDOWS]),
        ("gemma-4-31B-it", "eager", [PACKED_ROWS_UNMASKED]),
        ("gemma-4-31B-it", "sdpa", [WITHOUT_WINDOWS.format("")]),
        ("gemma-3-4b-it", "flash_attention_2", [IMAGES_IN_ORDER]),
        ("Qwen2.5-VL-3B-Instruct", "eager", [PACKED_ROWS_UNMASKED]),
        ("Qwen2.5-VL-3B-Instruct", "sdpa", []),
        ("Qwen3-VL-30B-A3B-Instruct", "eager", []),
        ("Qwen3-VL-30B-A3B-Instruct", "flash_attention_2", [SEEN_BY_ENGINE]),
        ("gemma-4-26B-A4B-it", "flash_attention_2", []),
    ],
)
def test_what_automodels_masks_of_packed_rows_hide_is_said(
    name: str, attention: str, lines: list[str], tmp_path: Path
) -> None:
    model = {"pretrained_model_name_or_path": f"org/{name}", "attn_implementation": attention}
    packed = {"pretokenize": True, "pack_size": 64}
    made = convert_automodels(tmp_path, "of no use", model=model, packed_sequence=packed)
    windows = (WITHOUT_WINDOWS.format(""), ALONE_WITHOUT_WINDOWS)
    known = (PACKED_ROWS_UNMASKED, *windows, IMAGES_IN_ORDER, SEEN_BY_ENGINE)
    assert [text for text in known if text in "".join(made.differences)] == lines
    apart = convert_automodels(tmp_path, "of no use", model=model)
    assert not any(text in "".join(apart.differences) for text in known)


def test_transformer_engine_takes_gemma_3s_masks_with_an_image_for_causal_in_automodel(
    tmp_path: Path,
) -> None:
    """_detect_causal_mask of its _transformers/te_attention.py goes by the first and the last row."""
    config = Gemma3TextConfig(sliding_window=4, attn_implementation="sdpa")
    images = torch.tensor([[-1, -1, 0, 0, -1, -1]])
    rows = (torch.ones(1, 6, 8), torch.ones_like(images), None, torch.arange(6)[None], images)
    masks = create_masks_for_vision_model(config, *rows)
    for mask, last in ((masks["full_attention"], 6), (masks["sliding_attention"], 4)):
        assert mask[0, 0, 2, 3] and mask[0, 0, 0].sum() == 1 and mask[0, 0, -1].sum() == last
    model = {"pretrained_model_name_or_path": "google/gemma-3-4b-it", "attn_implementation": "te"}
    for keys, is_said in (({}, True), ({"distributed": {"cp_size": 2}}, False)):
        made = convert_automodels(tmp_path, "of no use", model=model, **keys)
        assert any(IMAGES_UNSEEN_BY_ENGINE in line for line in made.differences) == is_said
    own = model | {"pretrained_model_name_or_path": "google/gemma-4-31B-it"}
    made = convert_automodels(tmp_path, "of no use", model=own)
    assert not any(IMAGES_UNSEEN_BY_ENGINE in line for line in made.differences)


@pytest.mark.parametrize(
    ("name", "packed", "is_said"),
    [
        ("google/gemma-3-4b-it", {"pretokenize": True}, True),
        ("google/gemma-3-4b-it", {"pack_size": 64}, True),
        ("google/gemma-3-4b-it", {}, False),
        ("google/gemma-4-31B", {"pack_size": 64}, True),
        ("google/gemma-4-31B-it", {"pack_size": 64}, False),
        ("Qwen/Qwen2.5-VL-3B-Instruct", {"pack_size": 64}, False),
    ],
)
def test_automodels_rows_that_are_tokenized_first_may_begin_with_two_bos_tokens(
    name: str, packed: dict[str, Any], is_said: bool, tmp_path: Path
) -> None:
    """PreTokenizedDatasetWrapper of its components/datasets/vlm/datasets.py."""
    made = convert_automodels(tmp_path, name, packed_sequence=packed)
    assert (STARTS_TWICE in made.remarks) == is_said


@pytest.mark.parametrize(
    ("model", "is_said"),
    [
        ({"backend": {"linear": "te"}}, True),
        ({"backend": {"attn": "sdpa"}}, False),
        ({"force_hf": True}, False),
    ],
)
def test_transformer_engine_sees_all_documents_of_a_packed_row_in_automodel(
    model: dict[str, Any], is_said: bool, tmp_path: Path
) -> None:
    """Where packing goes by attn_implementation, and the class by backend.attn."""
    named = {"pretrained_model_name_or_path": "Qwen/Qwen3-VL-30B-A3B-Instruct"} | model
    named["attn_implementation"] = "flash_attention_2"
    packed = {"pretokenize": True, "pack_size": 64}
    made = convert_automodels(tmp_path, "of no use", model=named, packed_sequence=packed)
    assert any(SEEN_BY_ENGINE in line for line in made.differences) == is_said


VLM_DATA = "nemo_automodel.components.datasets.vlm"
TULU = {
    "_target_": f"{VLM_DATA}.datasets.make_tulu3_dataset",
    "path_or_dataset": "allenai/tulu-3-sft-mixture",
}


@pytest.mark.parametrize(
    ("keys", "splits"),
    [
        ({"limit_total": 200}, ["train[:160]", "train[:40]"]),
        ({"limit_total": 200, "tulu_split": "train[:50000]"}, ["train[:50000]", "train"]),
        ({"magicoder_split": "test"}, ["train", "test"]),
    ],
)
def test_automodels_mixture_of_texts_is_its_two_data_sets_and_its_shares_are_kept_or_said(
    tmp_path: Path, keys: dict[str, Any], splits: list[str]
) -> None:
    mixture = {"_target_": f"{VLM_DATA}.datasets.{MIXTURE}", "seed": 42, "max_turns": 8}
    made = convert_automodels(tmp_path, "google/gemma-4-E4B-it", dataset=mixture | keys)
    assert [each["path"] for each in made.recipe["datasets"]] == [
        "allenai/tulu-3-sft-mixture",
        "ise-uiuc/Magicoder-OSS-Instruct-75K",
    ]
    assert [each["split"] for each in made.recipe["datasets"]] == splits
    text = " ".join(made.differences)
    assert (MIXED_SHARES in text) == ("[:160]" not in splits[0])
    assert MIXED_ROWS.format(8) in text and "not known here" not in text and not made.to_do


def test_texts_of_automodels_recipe_for_images_are_packed_as_texts(tmp_path: Path) -> None:
    hook = f"{VLM_DATA}.collate_fns.gemma4_inject_thinking_prefix"
    packed = {"pack_size": 2048, "max_length": 2048}
    made = convert_automodels(
        tmp_path,
        "google/gemma-4-31B-it",
        dataset=TULU | {"truncate": False},
        packed_sequence=packed | {"post_tokenize_hook_fn": hook},
    )
    assert made.image_family is None and not made.to_do
    assert made.recipe["datasets"] == [{"path": TULU["path_or_dataset"], "type": "messages"}]
    assert [made.recipe[key] for key in ("packing", "max_length", "overlength")] == [
        True,
        2048,
        "drop",
    ]
    text = "\n".join(made.differences)
    assert THOUGHT_ADDED in text and BLANK_IMAGES in text and "not known" not in text
    made = convert_automodels(
        tmp_path,
        "google/gemma-4-E4B-it",
        dataset=TULU | {"truncate": True, "inject_fake_images": False},
        packed_sequence=packed,
        freeze_config={"freeze_embeddings": True, "freeze_vision_tower": True},
    )
    assert made.recipe["overlength"] == "truncate"
    assert any(line.startswith("freeze_embeddings: true") for line in made.remarks)
    assert any("<image> and <video> in it" in line for line in made.remarks)
    assert not any(each in "\n".join(made.differences) for each in (THOUGHT_ADDED, BLANK_IMAGES))


def test_automodels_packed_rows_with_images_are_packed_here(tmp_path: Path) -> None:
    packed = {"pack_size": 4096, "max_length": 4096, "packing_ratio": 0.9}
    made = convert_automodels(tmp_path, "Qwen/Qwen3-VL-4B-Instruct", packed_sequence=packed)
    assert made.recipe["packing"] and made.recipe["max_length"] == 4096
    assert "attn_implementation" not in made.recipe
    assert any(line.startswith("packed_sequence.packing_ratio: 0.9") for line in made.differences)


@pytest.mark.parametrize(
    ("drops", "truncates", "overlength"),
    [(True, False, "drop"), (True, True, "drop"), (False, True, "truncate")],
)
def test_rows_that_automodel_leaves_out_by_an_estimate_are_said(
    drops: bool, truncates: bool, overlength: str, tmp_path: Path
) -> None:
    """_estimate_sample_length of its components/datasets/vlm/neat_packing_vlm.py."""
    packed = {"pack_size": 2048, "max_length": 2048, "drop_long_samples": drops}
    data = TULU | {"truncate": truncates}
    name = "google/gemma-4-31B-it"
    made = convert_automodels(tmp_path, name, dataset=data, packed_sequence=packed)
    text = "\n".join(made.differences)
    assert made.recipe["overlength"] == overlength
    assert (DROPPED_BY_ESTIMATE in text) == drops
    assert (KEPT_BY_ESTIMATE in text) == drops


def test_answers_that_automodel_finds_by_their_words_are_said(tmp_path: Path) -> None:
    """Source: build_labels of its components/datasets/vlm/collate_fns.py, where a template has no header of an answer."""
    for name, is_said in (
        ("mistralai/Ministral-3-3B-Reasoning-2512", True),
        ("a/gemma-3-4b", False),
    ):
        made = convert_automodels(tmp_path, name)
        assert any(FOUND_BY_WORDS in line for line in made.differences) == is_said


def test_an_answer_whose_break_joins_its_headers_is_not_trained_by_automodel(
    tmp_path: Path,
) -> None:
    """_build_labels_from_markers of the same file, run with a tokenizer that has such a token."""
    for name, is_said in (("Qwen/Qwen3-VL-4B-Instruct", True), ("a/gemma-3-4b", False)):
        assert (HEADER_UNFOUND in convert_automodels(tmp_path, name).remarks) == is_said


TEXT_ALONE = ["*vision*", "*visual*", "*lm_head*"]


@pytest.mark.parametrize(
    ("name", "peft", "parts"),
    [
        ("mistralai/Ministral-3-3B-Reasoning-2512", {"exclude_modules": TEXT_ALONE}, ["projector"]),
        ("google/gemma-3-4b-it", {"exclude_modules": TEXT_ALONE}, []),  # whose projector has none
        ("Qwen/Qwen3-VL-4B-Instruct", {"exclude_modules": TEXT_ALONE}, []),
        ("Qwen/Qwen3-VL-4B-Instruct", {"exclude_modules": ["*lm_head*"]}, ["visual"]),
        ("google/gemma-3-4b-it", {"target_modules": "*_proj"}, ["vision_tower"]),
        ("google/gemma-3-4b-it", {"target_modules": "*.language_model.*_proj"}, []),
        ("google/gemma-3-4b-it", {}, ["vision_tower"]),
    ],
)
def test_the_parts_beside_the_language_model_that_automodel_adapts_are_said(
    name: str, peft: dict[str, object], parts: list[str], tmp_path: Path
) -> None:
    frozen = {"freeze_vision_tower": False}
    made = convert_automodels(tmp_path, name, peft={"dim": 8} | peft, freeze_config=frozen)
    lines = [line for line in made.differences if PART_ADAPTED in line]
    assert len(lines) == bool(parts) and all(part in lines[0] for part in parts)


@pytest.mark.parametrize("names_modules", [False, True])
def test_automodel_freezes_adapters_of_frozen_parts(names_modules: bool, tmp_path: Path) -> None:
    """apply_parameter_freezing, after the adapters: of the tower too where no modules are named."""
    frozen = {"freeze_language_model": True} | ({"freeze_modules": []} if names_modules else {})
    peft = {"dim": 8, "match_all_linear": True}
    made = convert_automodels(
        tmp_path, "Qwen/Qwen2.5-VL-3B-Instruct", peft=peft, freeze_config=frozen
    )
    assert any(ADAPTERS_OF_TEXT in line for line in made.differences)
    assert any(PART_ADAPTED in line for line in made.differences) == names_modules


def test_gradients_that_automodel_adds_in_16_bits_are_said(tmp_path: Path) -> None:
    for dtype in ("bfloat16", "float32"):
        policy = {"param_dtype": "bfloat16", "reduce_dtype": dtype}
        made = convert_automodels(
            tmp_path, "google/gemma-3-4b-it", distributed={"mp_policy": policy}
        )
        assert any(GRADIENTS_REDUCED_IN_DTYPE in line for line in made.differences) == (
            dtype == "bfloat16"
        )
    for keys in ({}, {"grad_reduce_in_fp32": True}):
        made = convert_automodels(
            tmp_path, "google/gemma-3-4b-it", distributed={"strategy": "megatron_fsdp"} | keys
        )
        assert any(REDUCED_BY_MEGATRON in line for line in made.differences) != bool(keys)


TUNE = """
model: {_component_: torchtune.models.llama3_2_vision.llama3_2_vision_11b, decoder_trainable: true, encoder_trainable: false, fusion_trainable: true}
tokenizer: {_component_: torchtune.models.llama3_2_vision.llama3_2_vision_transform, path: /tmp/Llama-3.2-11B-Vision-Instruct/original/tokenizer.model}
checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: /tmp/Llama-3.2-11B-Vision-Instruct, checkpoint_files: [a], output_dir: /tmp/out, model_type: LLAMA3_VISION}
dataset: {_component_: %s}
optimizer: {_component_: torch.optim.AdamW, lr: 2e-5}
batch_size: 2
epochs: 1
"""


@pytest.mark.parametrize(
    ("rows", "template"),
    [
        ("torchtune.datasets.alpaca_cleaned_dataset", "llama3"),
        ("torchtune.datasets.multimodal.the_cauldron_dataset", None),
    ],
)
def test_torchtunes_texts_for_llama_3_2_vision_have_no_system_message_of_the_models_template(
    rows: str, template: str | None, tmp_path: Path
) -> None:
    """The model's own template writes one with a date into a row without images; torchtune's tokenizer none."""
    (tmp_path / "theirs.yaml").write_text(TUNE % rows)
    found = convert_file(tmp_path / "theirs.yaml")
    assert found.image_family == "mllama" and found.recipe.get("chat_template") == template
    assert (RESIZED_IN_16_BITS in found.remarks) == (template is None)
    is_saved = any("is saved with the tokenizer here" in each for each in found.remarks)
    assert is_saved == (template is not None)  # not what torchtune copies


LORA_OF_TUNE = {"decoder_trainable": "frozen", "encoder_trainable": "lora"} | {
    "fusion_trainable": "lora",
    "lora_attn_modules": ["q_proj"],
    "lora_rank": 8,
}
FULL_OF_TUNE = {"decoder_trainable": False, "encoder_trainable": True, "fusion_trainable": True}


@pytest.mark.parametrize(
    ("kind", "keys", "rows", "there"),
    [
        ("lora_", LORA_OF_TUNE, "alpaca_cleaned_dataset", STOPS_TOO),
        ("", FULL_OF_TUNE, "alpaca_cleaned_dataset", ROUNDED_AWAY),
        ("", FULL_OF_TUNE | {"fusion_trainable": False}, "alpaca_cleaned_dataset", STOPS_TOO),
        ("", FULL_OF_TUNE | {"decoder_trainable": True}, "alpaca_cleaned_dataset", None),
        ("lora_", LORA_OF_TUNE | {"decoder_trainable": "lora"}, "alpaca_dataset", None),
        ("lora_", LORA_OF_TUNE, "multimodal.the_cauldron_dataset", None),
        ("lora_", LORA_OF_TUNE, "chat_dataset", None),  # whose messages may hold images
    ],
)
def test_texts_that_train_no_part_of_llama_3_2_vision_are_said(
    kind: str, keys: dict[str, Any], rows: str, there: str | None, tmp_path: Path
) -> None:
    """Without an image torchtune's layers of cross attention return what they get, as those of transformers."""
    file = yaml.safe_load(TUNE % f"torchtune.datasets.{rows}")
    component = f"torchtune.models.llama3_2_vision.{kind}llama3_2_vision_11b"
    file["model"] = {"_component_": component} | keys
    file["dataset"]["source"] = "org/rows"
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(file))
    lines = "".join(convert_file(tmp_path / "theirs.yaml").differences)
    assert ("what is trained reads nothing else" in lines) == bool(there)
    assert there is None or UNREAD.format(there) in lines


@pytest.mark.parametrize(("dtype", "there"), [("bf16", ROUNDED_AWAY), ("fp32", DECAYS_ALONE)])
def test_weight_decay_without_gradients_changes_no_weight_in_bfloat16(
    dtype: str, there: str, tmp_path: Path
) -> None:
    """The embedding's rows for images have gradients of 0 in torchtune where no row has an image."""
    file = yaml.safe_load(TUNE % "torchtune.datasets.alpaca_cleaned_dataset") | {"dtype": dtype}
    file["model"] |= FULL_OF_TUNE
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(file))
    lines = "".join(convert_file(tmp_path / "theirs.yaml").differences)
    assert UNREAD.format(there) in lines
    torch.manual_seed(0)
    weight = torch.randn(8, 64).to(torch.bfloat16 if dtype == "bf16" else torch.float32)
    parameter = torch.nn.Parameter(weight.clone())
    parameter.grad = torch.zeros_like(weight)
    torch.optim.AdamW([parameter], lr=2e-5, fused=True).step()  # decays by 0.01, its default
    assert torch.equal(parameter.data, weight) == (there == ROUNDED_AWAY)


@pytest.mark.parametrize(
    ("rows", "encoder", "is_said"),
    [
        ("multimodal.the_cauldron_dataset", True, True),
        ("multimodal.the_cauldron_dataset", False, True),
        ("alpaca_cleaned_dataset", True, False),
    ],
)
def test_what_torchtune_reads_otherwise_of_images_in_llama_3_2_vision_is_said(
    rows: str, encoder: bool, is_said: bool, tmp_path: Path
) -> None:
    """Of the parts alone that images reach; a tile's embedding is trained with the tower."""
    file = yaml.safe_load(TUNE % f"torchtune.datasets.{rows}")
    file["model"]["encoder_trainable"] = encoder
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(file))
    lines = "\n".join(convert_file(tmp_path / "theirs.yaml").differences)
    assert all((note in lines) == is_said for note in IMAGES_OF_LLAMA_3_2)
    assert (TILES_EMBEDDED in lines) == (is_said and encoder)


def test_transformers_reads_images_of_llama_3_2_vision_as_is_said(tmp_path: Path) -> None:
    """The projector reads what comes out of a layer, a tile sees those that fill its image up, and
    a token before the image reads it.
    """
    model = AutoModelForImageTextToText.from_pretrained(
        make_vision_model(tmp_path / "model", "mllama")
    )
    for name, parameter in model.named_parameters():
        if "gate" in name and "proj" not in name:
            nn.init.constant_(parameter, 0.5)
    tower = model.model.vision_model
    outputs: list[torch.Tensor] = []
    tower.transformer.layers[0].register_forward_hook(lambda *call: outputs.append(call[-1]))
    image = torch.randn(1, 1, 4, 3, 28, 28)
    filled_up = image.clone()
    filled_up[:, :, 1:] = 0
    shape = {"aspect_ratio_ids": torch.tensor([[1]]), "aspect_ratio_mask": torch.eye(4)[None, :1]}
    with torch.no_grad():
        states, others = (tower(each, **shape).last_hidden_state for each in (image, filled_up))
    tile_outputs = outputs[0].view(4, 8, 16)  # five tokens of a tile, and three that fill it up
    assert torch.equal(states[0, 0, ..., 16:], tile_outputs[:, :5])
    assert not torch.equal(states[0, 0, 0], others[0, 0, 0])
    ids = torch.tensor([[5, model.config.image_token_id, 6]])
    attends = torch.tensor([0, 1, 1])[None, :, None, None] * shape["aspect_ratio_mask"]
    with torch.no_grad():
        first, second = (
            model(input_ids=ids, pixel_values=each, cross_attention_mask=attends, **shape).logits
            for each in (filled_up, -filled_up)
        )
    assert not torch.allclose(first[0, 0], second[0, 0])
