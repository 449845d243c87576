"""What other tools train of models with images, and what their rows with images become."""

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
    """Finds (the key by which a file trains on images, the model_type with the tower); none if it
    trains on text.
    """
    components = " ".join(find_texts(settings, "_component_"))
    if tool == "torchtune" and re.search("vision|multimodal|clip", components):
        return "model", "mllama"  # its only family
    key = _find_image_key(tool, settings)
    if key is None:
        return "", None
    name = name_model(settings)
    config = read_json_object(Path(name).expanduser() / "config.json")
    return key, str(config["model_type"]) if config.get("model_type") else guess_vision_family(name)


def _find_image_key(tool: Tool, settings: ToolFile) -> str | None:
    for key in IMAGE_KEYS.get(tool, ()):
        if settings.get(key) is not None:
            return key
    is_template_of_images = re.search("_vl$|_vl_", str(settings.get("template")))
    is_data_of_images = re.search("mllm|vlm|_vl|multimodal", str(settings.get("dataset")))
    if tool == "LLaMA-Factory" and (is_template_of_images or is_data_of_images):
        return "template"
    if tool == "Automodel" and reads_images(settings):
        return "model"
    return None


# functions of Automodel's whose rows are texts, in its recipe for images too
OF_TEXTS = re.compile(r"tulu3|ChatDataset$")


def reads_images(settings: ToolFile) -> bool:
    """Whether a file of Automodel's trains on rows with images."""
    rows = str(read_section(settings, "dataset").get("_target_"))
    return runs_for_images(settings) and not OF_TEXTS.search(rows)


def runs_for_images(settings: ToolFile) -> bool:
    """Whether a file of Automodel's is of its recipe for images, which reads texts, too."""
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
# get_processing_strategy of Axolotl's processing_strategies.py, by whose other classes no role is
# left out of the loss, whatever train_on_inputs says: chat templates, and families by model_support
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
# whose processors write more than the patches' tokens for an image (replace_image_token), of which
# Axolotl leaves the patches' alone out
MARKED_IMAGES = ("gemma3", "gemma3n", "gemma4", "idefics3", "llama4", "mistral3", "smolvlm")
PIXTRAL = "pixtral"  # in names of models of LLaVA's family with Pixtral's processor
MARKS_TRAINED = "what the processor writes around an image's patches is trained too there, not here"
# Glm4vProcessingStrategy
GLM_IMAGES = ("glm4v", "glm46v")
GLM_MARKS = "<|begin_of_image|> and <|end_of_image|> are trained here, not there"
# transformers' get_keys_to_not_convert, which leaves the head in 16 bits
QUANTIZED_PARTS = (
    "the linear layers of the vision tower and the projector are in as few bits there, in 16 here"
)
QUANTIZED_TOWER = "the vision tower's linear layers are in as few bits there, in 16 here"
# apply_chat_template of transformers' processors, which encodes as the tokenizer does by itself
# what begins with no BOS token; the templates of other families begin with it
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
    """Reports what a tool trains of a vision-language model beside the language model, which is
    trained alone here.
    """
    key = _find_image_key(conversion.tool, settings)
    if conversion.images is None and key is not None:
        capability = "images of a family that the model's name does not say"
        conversion.add_difference(key, name_model(settings), UNKNOWN_IMAGES, capability)
    if conversion.images is None:
        return
    load_key = next((key for key in LOAD_KEYS if conversion.recipe.get(key)), None)
    if load_key and conversion.tool in ("Axolotl", "LLaMA-Factory"):
        conversion.add_difference(load_key, True, QUANTIZED_PARTS)
    if conversion.is_factory_v1:  # which freezes no part by itself
        adapts = settings.get("finetuning_type") == "lora"
        conversion.add_difference("model_class", "llm", TOWER_ADAPTED if adapts else TRAINED_TOWER)
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
# Of torchtune's parts of Llama 3.2 Vision, the layers with cross attention by the models' sizes.
FUSION_LAYERS = {r"90b": range(3, 100, 5), "": range(3, 40, 5)}
TOWER_ADAPTED = "the vision tower gets adapters too there"
PROJECTOR_ADAPTED = "the projector gets adapters too there"
FUSION_MLP = "the MLPs of the layers that read images get adapters too there"
# MultiHeadAttention of lora_llama3_2_vision_decoder, where a part gets no adapters
ATTENTION_IN_16_BITS = "the attention of {} is in 16 bits there, in 4 here"
FUSION_ROWS = "the embedding's rows for images are trained too there"
TEXTS_ALONE = re.compile(r"torchtune\.datasets\.(?!chat_dataset)\w+")
# TransformerCrossAttentionLayer of torchtune, and FusionEmbedding beside it
UNREAD = (
    "the rows have no images, and what is trained reads nothing else: the run stops at its first "
    "step here{}"
)
STOPS_TOO = ", and there"
DECAYS_ALONE = "; there nothing changes but the embedding's rows for images, by weight decay"


def adapt_fusion(model: Mapping[str, Any], name: str, conversion: Conversion) -> None:
    """Adds which parts of Llama 3.2 Vision a file trains: the decoder, the layers of cross
    attention, the tower.
    """
    parts = {part: model.get(f"{part}_trainable") for part in ("decoder", "fusion", "encoder")}
    recipe = conversion.recipe
    if recipe.get("use_peft"):
        if parts["encoder"] == "lora":
            conversion.add_difference("model.encoder_trainable", "lora", TOWER_ADAPTED)
        if parts["fusion"] == "lora":  # fusion_lora of llama3_2_vision_encoder
            conversion.add_difference("model.fusion_trainable", "lora", PROJECTOR_ADAPTED)
        if parts["decoder"] != "lora" and parts["fusion"] == "lora":
            targets = recipe.get("lora_target_modules") or []
            own = [each for each in targets if LINEAR_LAYERS.get(each) == "self_attn"]
            recipe["lora_target_modules"] = [f"cross_attn.{each}" for each in own]
            if own != targets:
                conversion.add_difference("model.apply_lora_to_mlp", True, FUSION_MLP)
        if recipe.get("load_in_4bit"):
            _report_fusion_bits(parts, conversion)
        return
    if all(value in (True, "full") for value in (parts["decoder"], parts["fusion"])):
        trained = ["language_model", "lm_head"]
    elif parts["fusion"] in (True, "full"):
        sizes = (layers for pattern, layers in FUSION_LAYERS.items() if pattern in name.lower())
        trained = [rf"language_model\.layers\.({'|'.join(map(str, next(sizes)))})\."]
        conversion.add_difference("model.fusion_trainable", parts["fusion"], FUSION_ROWS)
    else:
        trained = []
    if parts["encoder"] in (True, "full"):
        trained += ["vision_model", "multi_modal_projector"]
    recipe["trainable_modules"] = trained


def report_unread_parts(settings: ToolFile, conversion: Conversion) -> None:
    """Reports that rows without images train nothing where torchtune trains no layers of text."""
    model = read_section(settings, "model")
    data = list(find_texts(settings.get("dataset"), "_component_"))
    are_texts = data and all(map(TEXTS_ALONE.fullmatch, data))
    decoder = model.get("decoder_trainable", False)
    if conversion.images == "mllama" and are_texts and decoder in (False, "frozen"):
        has_rows = model.get("fusion_trainable") in (True, "full")
        there = DECAYS_ALONE if has_rows else STOPS_TOO
        conversion.add_difference("model.decoder_trainable", decoder, UNREAD.format(there))


def _report_fusion_bits(parts: Mapping[str, Any], conversion: Conversion) -> None:
    """Reports which parts of Llama 3.2 Vision QLoRA has in 4 bits there, or in 16."""
    for part, layers in (("decoder", "layers of text"), ("fusion", "layers that read images")):
        if parts[part] != "lora":
            note = ATTENTION_IN_16_BITS.format(layers)
            conversion.add_difference(f"model.{part}_trainable", parts[part], note)
    if "lora" in (parts["encoder"], parts["fusion"]):
        conversion.add_difference("load_in_4bit", True, QUANTIZED_TOWER)


# apply_parameter_freezing of Automodel's components/utils/model_utils.py: a part is of the tower by
# its name, which a projector of these names is not
OF_TOWER = ("vision", "visual", "image_encoder")
TOWER_PART = re.compile(r"self\.(vision_tower|visual|vision_model|embed_vision) = ")
PROJECTOR = re.compile(r"self\.(\w*projector|connector|image_newline) = ")
TEXT_PART = re.compile(r"self\.(language_model|text_model) = ")
EMBEDDING_THERE = (
    "not read there since 0.3, and refused since 0.7; nor read here: the embedding is trained; "
    "frozen_modules: [embed_tokens] freezes it, as 0.2 does"
)
SOUND_THERE = "the tower of sound is trained there by rows with sound, which are not read here"


def _adapt_automodels_parts(settings: ToolFile, conversion: Conversion) -> None:
    """Adds which parts of a vision-language model Automodel trains: its freeze_config freezes the
    tower, and no projector beside it; without one nothing is frozen.
    """
    frozen = read_section(settings, "freeze_config")
    if frozen.get("freeze_audio_tower") is False:
        conversion.add_remark("freeze_audio_tower", False, SOUND_THERE)
    source = read_family_source(conversion.images or "")
    parts = sorted(set(PROJECTOR.findall(source)))
    parts = [part for part in parts if not any(name in part for name in OF_TOWER)]
    trains_tower = not _freezes_tower(frozen)
    peft = read_section(settings, "peft")
    if peft:  # adapters alone are trained, of parts that are not frozen
        _report_adapted_parts(peft, parts, trains_tower, conversion)
        if frozen.get("freeze_language_model"):
            conversion.add_difference("freeze_language_model", True, ADAPTERS_OF_TEXT)
        return
    if frozen.get("freeze_embeddings"):
        conversion.add_remark("freeze_embeddings", True, EMBEDDING_THERE)
    text = sorted(set(TEXT_PART.findall(source)))
    tower = sorted(set(TOWER_PART.findall(source)))
    if frozen.get("freeze_language_model") or (trains_tower and not (text and tower)):
        _report_frozen({"freeze_vision_tower": not trains_tower} | frozen, conversion)
    elif trains_tower:
        conversion.recipe["trainable_modules"] = [*text, "lm_head", *parts, *tower]
    elif parts:
        conversion.recipe["trainable_modules"] = [*text, "lm_head", *parts]


def _freezes_tower(frozen: Mapping[str, Any]) -> bool:
    """Whether a freeze_config freezes the tower, as one that names no modules does by itself.

    >>> [_freezes_tower(each) for each in ({}, {"freeze_audio_tower": 1}, {"freeze_modules": []})]
    [False, True, False]
    """
    names_modules = "freeze_modules" in frozen or "unfreeze_modules" in frozen
    asked = frozen.get("freeze_vision_tower")
    return bool(frozen) and not names_modules if asked is None else bool(asked)


ADAPTERS_OF_TEXT = "adapters of the language model are frozen there, and trained here"
PART_ADAPTED = "layers of this part get adapters too there; those of the language model here"


def _report_adapted_parts(
    peft: Mapping[str, Any], projectors: Sequence[str], trains_tower: bool, conversion: Conversion
) -> None:
    """Reports which parts beside the language model get adapters there: ModuleMatcher of its
    components/_peft/module_matcher.py, by names of layers as its own classes have them.
    """
    family = conversion.images or ""
    source = read_family_source(family)
    of_tower = find_vision_layers(family) or ("q_proj",)  # as in other families' towers
    towers = set(TOWER_PART.findall(source)) if trains_tower else set()
    layers = [f"model.{part}.{name}" for part in towers for name in of_tower]
    classes = re.split(r"^(?=class )", source, flags=re.MULTILINE)
    of_projector = "".join(each for each in classes if re.match(r"class \w*Projector", each))
    linear = re.findall(r"self\.(\w+) = nn\.Linear", of_projector)
    layers += [f"model.{part}.{name}" for part in projectors for name in linear]
    asked = convert_names(peft.get("target_modules")) or []
    excluded = convert_names(peft.get("exclude_modules")) or []
    if not (asked or excluded or peft.get("match_all_linear")):
        asked = ["*_proj"]
    adapted = [
        name
        for name in layers
        if not any(_matches(pattern, name) for pattern in excluded)
        and (not asked or any(_matches(pattern, name) for pattern in asked))
    ]
    for part in sorted({name.split(".")[1] for name in adapted}):
        conversion.add_difference("peft", part, PART_ADAPTED)


def _matches(pattern: str, name: str) -> bool:
    """Whether Automodel's pattern names a layer, in full or by its last part."""
    return pattern == name.rpartition(".")[2] or fnmatch.fnmatchcase(name, pattern)


FROZEN_HERE = {
    "freeze_vision_tower": TRAINED_TOWER,
    "freeze_multi_modal_projector": (
        "the projector is trained too there, frozen here; trainable_modules names parts of the "
        "model"
    ),
}


def _report_frozen(frozen: Mapping[str, Any], conversion: Conversion) -> None:
    for key, note in FROZEN_HERE.items():
        if frozen.get(key) is False:
            conversion.add_difference(key, False, note)
    if frozen.get("freeze_language_model"):
        note = "trained here; trainable_modules: [visual] trains the tower"
        conversion.add_difference("freeze_language_model", True, note)


def _may_adapt_tower(targets: Any, family: str) -> bool:
    """Whether a family's vision tower may have a layer by one of these names; in doubt it may."""
    of_tower = find_vision_layers(family)
    names = {name.rpartition(".")[2] for name in targets} if isinstance(targets, list) else set()
    return not of_tower or not names or bool(of_tower & names)


def _report_tower(settings: ToolFile, conversion: Conversion) -> None:
    """Reports where Axolotl trains the vision tower, or adapters on it."""
    if not settings.get("adapter"):
        conversion.add_difference("adapter", None, TRAINED_TOWER)
        return
    targets = settings.get("lora_target_modules")
    if settings.get("lora_target_linear"):
        targets = "all-linear"
    is_of_text = re.search("language_model|text_model", str(targets))
    if not is_of_text and _may_adapt_tower(targets, str(conversion.images)):
        note = "layers of the vision tower by these names too there"
        conversion.add_difference("lora_target_modules", targets, note)


def _report_axolotl_images(settings: ToolFile, conversion: Conversion) -> None:
    if not settings.get("freeze_mm_modules"):  # tower and projector: its utils/freeze.py
        _report_tower(settings, conversion)
    conversion.add_difference("sequence_len", settings.get("sequence_len"), IMAGES_UNCUT)
    knows_roles = (
        settings.get("chat_template") in ROLES_BY_TEMPLATE
        or conversion.images in ROLES_BY_FAMILY
        or any(map(settings.get, ROLES_BY_KEY))
        or settings.get("rl")  # TRL's
    )
    if not knows_roles:
        conversion.recipe["assistant_only_loss"] = False
        conversion.add_remark("processor_type", settings.get("processor_type"), ALL_OF_IMAGES)
        _report_marks(settings, conversion)
    elif "train_on_inputs" not in settings:
        conversion.add_difference("processor_type", settings.get("processor_type"), IMAGE_LABELS)
    if settings.get("rl"):
        return  # TRL's
    _report_rows_of_images(settings, conversion)
    if knows_roles and not settings.get("train_on_inputs"):
        _report_thoughts_of_images(settings, conversion)


def _report_rows_of_images(settings: ToolFile, conversion: Conversion) -> None:
    """Reports where an image stands in a row, and what the row begins with."""
    is_common = settings.get("tokenizer_use_mistral_common")
    conversion.remarks.append(f"datasets: {COLUMN_REFUSED if is_common else IMAGES_OF_COLUMN}")
    is_pixtral = PIXTRAL in name_model(settings).lower()
    if conversion.images in WITHOUT_BOS_BEFORE_IMAGES and not is_pixtral:
        conversion.remarks.append(TOKENIZERS_BOS_OF_IMAGES)


def _report_thoughts_of_images(settings: ToolFile, conversion: Conversion) -> None:
    """Reports the thoughts in the one text that Axolotl makes of a row, and trains with its
    answers.
    """
    template = settings.get("chat_template")
    if OTHER_TURNS.get(("Axolotl", str(template))) == ONE_TEXT:
        conversion.add_difference("chat_template", template, ONE_TEXT)
        conversion.add_difference("chat_template", template, THOUGHT_WHOLE)
    elif template in (None, *OWN_TEMPLATE) and not settings.get("tokenizer_use_mistral_common"):
        name = name_model(settings)
        report_own_thoughts(name, "datasets.type", "chat_template", conversion)


def _report_marks(settings: ToolFile, conversion: Conversion) -> None:
    """Reports which tokens of an image are trained where all of a row's text is."""
    processor = settings.get("processor_type")
    if conversion.images in MARKED_IMAGES or PIXTRAL in name_model(settings).lower():
        conversion.add_difference("processor_type", processor, MARKS_TRAINED)
    elif conversion.images in GLM_IMAGES:
        conversion.add_difference("processor_type", processor, GLM_MARKS)
