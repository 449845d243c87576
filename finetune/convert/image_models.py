"""Reports which parts of vision-language models other tools train, and how they read images."""

import fnmatch
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from finetune.config.facts import find_vision_layers, read_family_source
from finetune.config.quantization import LOAD_KEYS
from finetune.convert.chat_templates import (
    ONE_TEXT,
    OTHER_TURNS,
    OWN_TEMPLATE,
    THOUGHT_WHOLE,
    report_own_thoughts,
)
from finetune.convert.counterparts import Tool, ToolFile
from finetune.convert.hints import find_texts
from finetune.convert.model_names import guess_vision_family, name_model
from finetune.convert.value_conversion import LINEAR_LAYERS, Conversion, convert_names, read_section
from finetune.files.json_files import read_json_object

# tool -> the keys by which a file says that it trains on images
IMAGE_KEYS: Mapping[str, tuple[str, ...]] = {
    "Axolotl": ("processor_type", "is_multimodal"),
    "LLaMA-Factory": (
        "image_max_pixels",
        "freeze_vision_tower",
        "freeze_multi_modal_projector",
        "freeze_language_model",
        "model_class",  # of v1
    ),
}


def find_images(tool: Tool, settings: ToolFile) -> tuple[str, str | None]:
    """Finds (the key by which a file trains on images, the model_type of the model with its tower).

    Returns ("", None) for a file that trains on text. The model_type is None if it is not known.
    """
    components = " ".join(find_texts(settings, "_component_"))
    if tool == "torchtune" and re.search("vision|multimodal|clip", components):
        return "model", "mllama"  # its only family
    key = _find_image_key(tool, settings)
    if key is None:
        return "", None
    name = name_model(settings)
    config = read_json_object(Path(name).expanduser() / "config.json")
    model_type = config.get("model_type")
    return key, str(model_type) if model_type else guess_vision_family(name)


def _find_image_key(tool: Tool, settings: ToolFile) -> str | None:
    """Returns the key by which a file trains on images; None if it does not, and for torchtune."""
    for key in IMAGE_KEYS.get(tool, ()):
        if settings.get(key) is not None:
            return key
    has_image_template = re.search("_vl$|_vl_", str(settings.get("template")))
    has_image_data = re.search("mllm|vlm|_vl|multimodal", str(settings.get("dataset")))
    if tool == "LLaMA-Factory" and (has_image_template or has_image_data):
        return "template"
    if tool == "Automodel" and reads_images(settings):
        return "model"
    return None


# Automodel's functions and classes whose rows are texts, even in its recipe for images
OF_TEXTS = re.compile(r"tulu3|ChatDataset$")


def reads_images(settings: ToolFile) -> bool:
    """Whether an Automodel file trains on rows with images."""
    row_function = str(read_section(settings, "dataset").get("_target_"))
    return runs_for_images(settings) and not OF_TEXTS.search(row_function)


def runs_for_images(settings: ToolFile) -> bool:
    """Whether an Automodel file uses the recipe for images, which may train on texts alone."""
    target = f"{settings.get('recipe')} {read_section(settings, 'model').get('_target_')}"
    return re.search("ForVLM|ImageText", target) is not None


TRAINED_TOWER = (
    "the vision tower and the projector are trained too there, frozen here; trainable_modules: "
    "[visual] trains them alone"
)
IMAGE_LABELS = (
    "some versions train on all text of rows with images, here the answers; assistant_only_loss: "
    "false trains all"
)
# Chat templates, families and keys for which get_processing_strategy of Axolotl's
# processing_strategies.py returns a class that knows roles. Its other classes leave no role out of
# the loss, whatever train_on_inputs says. The families come from model_support.
ROLES_BY_TEMPLATE = (
    "qwen2_vl",
    "qwen3_5",
    "gemma3",
    "gemma3n",
    "gemma4",
    "gemma4_unified",
    "llama3_2_vision",
    "llama4",
    "pixtral",
    "mistral_v7_tekken",
)
ROLES_BY_FAMILY = ("cohere_compass", "paddleocr_vl", "qwen3_5_moe", "qwen4_exp")
ROLES_BY_KEY = ("role_boundaries", "tokenizer_use_mistral_common")
ALL_OF_IMAGES = (
    "no role is known of this model there, and all text of a row is trained on; so it is here by "
    "assistant_only_loss: false, and by true the answers alone"
)
# Families whose processors write more for an image than the tokens of its patches
# (replace_image_token). Axolotl leaves only those of the patches out of the loss.
MARKED_IMAGES = ("gemma3", "gemma3n", "gemma4", "idefics3", "llama4", "mistral3", "smolvlm")
PIXTRAL = "pixtral"  # in the names of models of family llava that have Pixtral's processor
MARKS_TRAINED = "what the processor writes around an image's patches is trained too there, not here"
# families of Axolotl's Glm4vProcessingStrategy
GLM_IMAGES = ("glm4v", "glm46v")
GLM_MARKS = "<|begin_of_image|> and <|end_of_image|> are trained here, not there"
# transformers' get_keys_to_not_convert leaves only the head in 16 bits
QUANTIZED_PARTS = (
    "the linear layers of the vision tower and the projector are in as few bits there, in 16 here"
)
QUANTIZED_TOWER = "the vision tower's linear layers are in as few bits there, in 16 here"
# apply_chat_template of transformers' processors lets the tokenizer add its BOS token to a text
# without one at its start; the templates of families other than these two write one there
TOKENIZERS_BOS_OF_IMAGES = (
    "chat_template: where it writes no BOS token and the tokenizer does by itself, a row begins "
    "with it there, not here"
)
WITHOUT_BOS_BEFORE_IMAGES = ("llava", "llava_next")
# utils/collators/mm_chat.py of Axolotl
IMAGES_UNCUT = "a row is trained on at any length there; a longer one is dropped here"
# _maybe_adapt_message of transformers' MistralCommonBackend
COLUMN_REFUSED = (
    "a row with a column of images ends the run there, where parts of messages name an image by "
    "path, url or base64; here such a column is read"
)
# ProcessingStrategy.__call__ of Axolotl
IMAGES_OF_COLUMN = (
    "of a column of images the first of a row alone is read there, all here; it stands after the "
    "words of the first question there, and before them here, unless a part of a message holds its "
    "place; here <image> in the words does too"
)


def adapt_images(settings: ToolFile, conversion: Conversion) -> None:
    """Converts and reports which parts of a vision-language model a tool trains.

    Here only the language model is trained by default.
    """
    key = _find_image_key(conversion.tool, settings)
    if conversion.image_family is None and key is not None:
        capability = "images of a family that the model's name does not say"
        conversion.add_difference(key, name_model(settings), UNKNOWN_IMAGES, capability)
    if conversion.image_family is None:
        return
    load_key = next((key for key in LOAD_KEYS if conversion.recipe.get(key)), None)
    if load_key and conversion.tool in ("Axolotl", "LLaMA-Factory"):
        conversion.add_difference(load_key, True, QUANTIZED_PARTS)
    if conversion.is_factory_v1:  # v1 freezes no part by itself
        has_adapters = settings.get("finetuning_type") == "lora"
        note = TOWER_ADAPTED if has_adapters else TRAINED_TOWER
        conversion.add_difference("model_class", "llm", note)
    elif conversion.tool == "LLaMA-Factory":
        _report_frozen(settings, conversion)
    elif conversion.tool == "Automodel":
        _adapt_automodels_parts(settings, conversion)
        name = name_model(settings)
        report_own_thoughts(name, "model", name, conversion)
    elif conversion.tool == "Axolotl":
        _report_axolotl_images(settings, conversion)


UNKNOWN_IMAGES = (
    "rows with images are trained on there; the model's name says no family whose images are read "
    "here, and what else differs for it is not listed"
)
# indexes of the layers with cross attention in Llama 3.2 Vision, torchtune's "fusion" layers
FUSION_LAYERS_90B = range(3, 100, 5)
FUSION_LAYERS_11B = range(3, 40, 5)
TOWER_ADAPTED = "the vision tower gets adapters too there"
PROJECTOR_ADAPTED = "the projector gets adapters too there"
FUSION_MLP = "the MLPs of the layers that read images get adapters too there"
# MultiHeadAttention of lora_llama3_2_vision_decoder, in a part without adapters
ATTENTION_IN_16_BITS = "the attention of {} is in 16 bits there, in 4 here"
FUSION_ROWS = "the embedding's rows for images are trained too there"
# torchtune's data sets that never have images
TEXTS_ALONE = re.compile(r"torchtune\.datasets\.(?!chat_dataset)\w+")
# torchtune's TransformerCrossAttentionLayer, and FusionEmbedding
UNREAD = (
    "the rows have no images, and what is trained reads nothing else: the run stops at its first "
    "step here{}"
)
STOPS_TOO = ", and there"
DECAYS_ALONE = "; there nothing changes but the embedding's rows for images, by weight decay"
ROUNDED_AWAY = (
    "; there no weight changes: the weight decay of the embedding's rows for images is too small "
    "for bfloat16"
)


def adapt_fusion(model: Mapping[str, Any], name: str, conversion: Conversion) -> None:
    """Sets which parts of Llama 3.2 Vision a torchtune file trains, or gives adapters.

    `model` is the file's section; `name` is the model's name. torchtune's parts are the decoder of
    text, the fusion layers (with cross attention) and the encoder (the vision tower).
    """
    parts = {part: model.get(f"{part}_trainable") for part in ("decoder", "fusion", "encoder")}
    if conversion.recipe.get("use_peft"):
        _adapt_fusion_adapters(parts, conversion)
        return
    full = {part for part, value in parts.items() if value in (True, "full")}
    if {"decoder", "fusion"} <= full:
        trained = ["language_model", "lm_head"]
    elif "fusion" in full:
        indexes = FUSION_LAYERS_90B if "90b" in name.lower() else FUSION_LAYERS_11B
        trained = [rf"language_model\.layers\.({'|'.join(map(str, indexes))})\."]
        conversion.add_difference("model.fusion_trainable", parts["fusion"], FUSION_ROWS)
    else:
        trained = []
    if "encoder" in full:
        trained += ["vision_model", "multi_modal_projector"]
    conversion.recipe["trainable_modules"] = trained


def _adapt_fusion_adapters(parts: Mapping[str, Any], conversion: Conversion) -> None:
    """Sets the layers of Llama 3.2 Vision with adapters, and reports those that get none here.

    `parts`: each of torchtune's parts, with its value ("lora", "frozen", true, ...).
    """
    recipe = conversion.recipe
    if parts["encoder"] == "lora":
        conversion.add_difference("model.encoder_trainable", "lora", TOWER_ADAPTED)
    if parts["fusion"] == "lora":  # fusion_lora of llama3_2_vision_encoder
        conversion.add_difference("model.fusion_trainable", "lora", PROJECTOR_ADAPTED)
    if parts["decoder"] != "lora" and parts["fusion"] == "lora":
        targets = recipe.get("lora_target_modules") or []
        attention = [layer for layer in targets if LINEAR_LAYERS.get(layer) == "self_attn"]
        recipe["lora_target_modules"] = [f"cross_attn.{layer}" for layer in attention]
        if attention != targets:
            conversion.add_difference("model.apply_lora_to_mlp", True, FUSION_MLP)
    if recipe.get("load_in_4bit"):
        _report_fusion_bits(parts, conversion)


def report_unread_parts(settings: ToolFile, conversion: Conversion) -> None:
    """Reports that a torchtune file trains parts that only images reach, on rows without images."""
    model = read_section(settings, "model")
    data_sets = list(find_texts(settings.get("dataset"), "_component_"))
    are_texts = data_sets and all(map(TEXTS_ALONE.fullmatch, data_sets))
    decoder = model.get("decoder_trainable", False)
    if conversion.image_family == "mllama" and are_texts and decoder in (False, "frozen"):
        # full training of the fusion layers includes the embedding's rows for images
        trains_embedding_rows = model.get("fusion_trainable") in (True, "full")
        decay = DECAYS_ALONE if str(settings.get("dtype")) == "fp32" else ROUNDED_AWAY
        there = decay if trains_embedding_rows else STOPS_TOO
        conversion.add_difference("model.decoder_trainable", decoder, UNREAD.format(there))


def _report_fusion_bits(parts: Mapping[str, Any], conversion: Conversion) -> None:
    """Reports which parts of Llama 3.2 Vision have other bits there under QLoRA: 4 or 16."""
    for part, layers in (("decoder", "layers of text"), ("fusion", "layers that read images")):
        if parts[part] != "lora":
            note = ATTENTION_IN_16_BITS.format(layers)
            conversion.add_difference(f"model.{part}_trainable", parts[part], note)
    if "lora" in (parts["encoder"], parts["fusion"]):
        conversion.add_difference("load_in_4bit", True, QUANTIZED_TOWER)


# words in the names of parts that are the tower for apply_parameter_freezing of Automodel's
# components/utils/model_utils.py; it freezes a projector with such a name too
OF_TOWER = ("vision", "visual", "image_encoder")
# How transformers' classes name the parts of a vision-language model.
TOWER_PART = re.compile(r"self\.(vision_tower|visual|vision_model|embed_vision) = ")
PROJECTOR = re.compile(r"self\.(\w*projector|connector|image_newline) = ")
TEXT_PART = re.compile(r"self\.(language_model|text_model) = ")
SOUND_THERE = "the tower of sound is trained there by rows with sound, which are not read here"


def _adapt_automodels_parts(settings: ToolFile, conversion: Conversion) -> None:
    """Sets or reports which parts of a vision-language model Automodel trains.

    Its freeze_config freezes the tower, but not the projector. Without one nothing is frozen.
    """
    frozen = read_section(settings, "freeze_config")
    if frozen.get("freeze_audio_tower") is False:
        conversion.add_remark("freeze_audio_tower", False, SOUND_THERE)
    source = read_family_source(conversion.image_family or "")
    projectors = [
        part
        for part in sorted(set(PROJECTOR.findall(source)))
        if not any(word in part for word in OF_TOWER)
    ]
    trains_tower = not _freezes_tower(frozen)
    peft = read_section(settings, "peft")
    if peft:  # only adapters are trained, on parts that are not frozen
        _report_adapted_parts(peft, projectors, trains_tower, conversion)
        if frozen.get("freeze_language_model"):
            conversion.add_difference("freeze_language_model", True, ADAPTERS_OF_TEXT)
        return
    text = sorted(set(TEXT_PART.findall(source)))
    tower = sorted(set(TOWER_PART.findall(source)))
    are_parts_known = text and tower
    if frozen.get("freeze_language_model") or (trains_tower and not are_parts_known):
        _report_frozen({"freeze_vision_tower": not trains_tower} | frozen, conversion)
    elif trains_tower:
        conversion.recipe["trainable_modules"] = [*text, "lm_head", *projectors, *tower]
    elif projectors:
        conversion.recipe["trainable_modules"] = [*text, "lm_head", *projectors]


def _freezes_tower(frozen: Mapping[str, Any]) -> bool:
    """Whether a freeze_config freezes the tower: by its key, or by default if it lists no modules.

    >>> [_freezes_tower(each) for each in ({}, {"freeze_audio_tower": 1}, {"freeze_modules": []})]
    [False, True, False]
    """
    if frozen.get("freeze_vision_tower") is not None:
        return bool(frozen["freeze_vision_tower"])
    lists_modules = "freeze_modules" in frozen or "unfreeze_modules" in frozen
    return bool(frozen) and not lists_modules


ADAPTERS_OF_TEXT = "adapters of the language model are frozen there, and trained here"
PART_ADAPTED = "layers of this part get adapters too there; those of the language model here"


def _report_adapted_parts(
    peft: Mapping[str, Any], projectors: Sequence[str], trains_tower: bool, conversion: Conversion
) -> None:
    """Reports the parts besides the language model that get adapters in Automodel.

    The names of their linear layers, from transformers' source, are matched as ModuleMatcher of
    components/_peft/module_matcher.py does.
    """
    family = conversion.image_family or ""
    source = read_family_source(family)
    tower_layers = find_vision_layers(family) or ("q_proj",)  # a tower of another family has q_proj
    towers = set(TOWER_PART.findall(source)) if trains_tower else set()
    layers = [f"model.{part}.{layer}" for part in towers for layer in tower_layers]
    classes = re.split(r"^(?=class )", source, flags=re.MULTILINE)
    projector_code = "".join(code for code in classes if re.match(r"class \w*Projector", code))
    projector_layers = re.findall(r"self\.(\w+) = nn\.Linear", projector_code)
    layers += [f"model.{part}.{layer}" for part in projectors for layer in projector_layers]
    targets = convert_names(peft.get("target_modules")) or []
    excluded = convert_names(peft.get("exclude_modules")) or []
    if not (targets or excluded or peft.get("match_all_linear")):
        targets = ["*_proj"]
    adapted = [
        name
        for name in layers
        if not any(_matches(pattern, name) for pattern in excluded)
        and (not targets or any(_matches(pattern, name) for pattern in targets))
    ]
    for part in sorted({name.split(".")[1] for name in adapted}):  # of model.PART.LAYER
        conversion.add_difference("peft", part, PART_ADAPTED)


def _matches(pattern: str, name: str) -> bool:
    """Whether Automodel's pattern matches a layer: its full name, or exactly its last part."""
    return pattern == name.rpartition(".")[2] or fnmatch.fnmatchcase(name, pattern)


# a key that is false if the part is trained there -> the note that it is frozen here
FROZEN_HERE = {
    "freeze_vision_tower": TRAINED_TOWER,
    "freeze_multi_modal_projector": (
        "the projector is trained too there, frozen here; trainable_modules names parts of the "
        "model"
    ),
}


def _report_frozen(frozen: Mapping[str, Any], conversion: Conversion) -> None:
    """Reports the parts that are trained on one side only, by the keys `freeze_...` in `frozen`."""
    for key, note in FROZEN_HERE.items():
        if frozen.get(key) is False:
            conversion.add_difference(key, False, note)
    if frozen.get("freeze_language_model"):
        note = "trained here; trainable_modules: [visual] trains the tower"
        conversion.add_difference("freeze_language_model", True, note)


def _may_adapt_tower(targets: Any, family: str) -> bool:
    """Whether `targets` may be names of layers in the family's vision tower; True if not known."""
    tower_layers = find_vision_layers(family)
    if not tower_layers or not isinstance(targets, list) or not targets:
        return True
    names = {name.split(".")[-1] for name in targets}
    return bool(tower_layers & names)


def _report_tower(settings: ToolFile, conversion: Conversion) -> None:
    """Reports that Axolotl trains the vision tower, or adapters on it."""
    if not settings.get("adapter"):
        conversion.add_difference("adapter", None, TRAINED_TOWER)
        return
    targets = settings.get("lora_target_modules")
    if settings.get("lora_target_linear"):
        targets = "all-linear"
    names_language_model = re.search("language_model|text_model", str(targets))
    if not names_language_model and _may_adapt_tower(targets, str(conversion.image_family)):
        note = "layers of the vision tower by these names too there"
        conversion.add_difference("lora_target_modules", targets, note)


def _report_axolotl_images(settings: ToolFile, conversion: Conversion) -> None:
    """Reports what Axolotl trains of a vision-language model and of its rows."""
    if not settings.get("freeze_mm_modules"):  # tower and projector: its utils/freeze.py
        _report_tower(settings, conversion)
    conversion.add_difference("sequence_len", settings.get("sequence_len"), IMAGES_UNCUT)
    knows_roles = (
        settings.get("chat_template") in ROLES_BY_TEMPLATE
        or conversion.image_family in ROLES_BY_FAMILY
        or any(map(settings.get, ROLES_BY_KEY))
        or settings.get("rl")  # TRL's trainers read these rows
    )
    if not knows_roles:
        conversion.recipe["assistant_only_loss"] = False
        conversion.add_remark("processor_type", settings.get("processor_type"), ALL_OF_IMAGES)
        _report_marks(settings, conversion)
    elif "train_on_inputs" not in settings:
        conversion.add_difference("processor_type", settings.get("processor_type"), IMAGE_LABELS)
    if settings.get("rl"):
        return  # the rest is about rows that Axolotl reads by its own code
    _report_image_rows(settings, conversion)
    if knows_roles and not settings.get("train_on_inputs"):
        _report_image_thoughts(settings, conversion)


def _report_image_rows(settings: ToolFile, conversion: Conversion) -> None:
    """Remarks on where an image stands in Axolotl's rows, and on their BOS token."""
    note = COLUMN_REFUSED if settings.get("tokenizer_use_mistral_common") else IMAGES_OF_COLUMN
    conversion.remarks.append(f"datasets: {note}")
    is_pixtral = PIXTRAL in name_model(settings).lower()
    if conversion.image_family in WITHOUT_BOS_BEFORE_IMAGES and not is_pixtral:
        conversion.remarks.append(TOKENIZERS_BOS_OF_IMAGES)


def _report_image_thoughts(settings: ToolFile, conversion: Conversion) -> None:
    """Reports which thoughts Axolotl trains: it makes one text of a row, with all its answers."""
    template = settings.get("chat_template")
    if OTHER_TURNS.get(("Axolotl", str(template))) == ONE_TEXT:
        conversion.add_difference("chat_template", template, ONE_TEXT)
        conversion.add_difference("chat_template", template, THOUGHT_WHOLE)
    elif template in (None, *OWN_TEMPLATE) and not settings.get("tokenizer_use_mistral_common"):
        name = name_model(settings)
        report_own_thoughts(name, "datasets.type", "chat_template", conversion)


def _report_marks(settings: ToolFile, conversion: Conversion) -> None:
    """Reports which tokens around an image are trained when all text of a row is."""
    processor = settings.get("processor_type")
    if conversion.image_family in MARKED_IMAGES or PIXTRAL in name_model(settings).lower():
        conversion.add_difference("processor_type", processor, MARKS_TRAINED)
    elif conversion.image_family in GLM_IMAGES:
        conversion.add_difference("processor_type", processor, GLM_MARKS)
