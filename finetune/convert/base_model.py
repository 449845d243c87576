"""Converts what several keys of a file together say about the base model: its quantization and its
tokens.
"""

import re
from collections.abc import Mapping

from finetune.convert.counterparts import ToolFile
from finetune.convert.image_models import adapt_images
from finetune.convert.model_names import BITSANDBYTES_MODEL, is_mixture, name_model
from finetune.convert.trained_layers import adapt_frozen
from finetune.convert.value_conversion import Conversion, convert_names, read_section

# Models whose names say that their weights are packed. FP8 and MXFP4 are not among them: only their
# configs say whether they are read.
PACKED_MODEL = re.compile("gptq|awq|aqlm|nvfp4")
# Models whose names say that their files are in FP8; transformers keeps their weights in FP8.
FP8_MODEL = re.compile(r"^(?!.*(bf16|nvfp4|bnb)).*[-_]fp8\b")
# Models that may be in FP8 too: only their config says so.
MAYBE_FP8_MODEL = re.compile(
    r"^(?!.*(bf16|fp8|nvfp4|bnb|distill|qwen)).*(minimax-m2|deepseek-(v3|r1)\b|mimo-v2|"
    r"devstral-(2|small-2)-|ministral-3-\w+-instruct|mistral-(large-3|small-4|medium-3\.5)-)"
)
KEPT_IN_FP8 = (
    "the base stays in FP8 there, and the inputs of its linear layers are rounded to FP8 too; it "
    "is dequantized here, and computed in 16 bits"
)
MAYBE_KEPT_IN_FP8 = (
    f"where the base's config.json has a quantization_config of quant_method fp8, {KEPT_IN_FP8}"
)
DEQUANTIZED = "the base is packed there, and dequantized here: the same numbers, in 16 bits each"
# update_dtype of transformers' AwqQuantizer, and WQLinear_GEMM of AutoAWQ: LLaMA-Factory's
# model/model_utils/quantization.py and ms-swift's model/model_meta.py load AWQ models by them
DEQUANTIZED_AWQ = (
    "the base is packed there, and its layers compute in float16 under bf16 too; dequantized here, "
    "its numbers are rounded to the run's 16 bits"
)
# fp4_cute of Axolotl's integrations/kernels, "native W4A4"
INPUTS_IN_4_BITS = (
    "on a Blackwell GPU the inputs of experts in NVFP4 are rounded to 4 bits too there, never here"
)
EXPERTS_DEQUANTIZED = (
    "the experts are in 4 bits there too, and dequantized here as they are read: 16 bits a number"
)
ADAPTER_NAME = re.compile(r"(^|[-_/])q?lora$")
NAMED_AS_ADAPTER = (
    "model_name_or_path: {}   (its name is an adapter's; if it is one, download it, merge it by "
    "`finetune export`, and name the folder of that)"
)
CHATML = "<|im_end|>"
CHATML_ADDED = (
    "chat_template: its tokens are added here, and <|im_end|> is the EOS token, as in older "
    "versions; the newest adds none for a template that a file names"
)
# clone_chat_template of TRL's chat_template_utils.py, for a chat_template_path that is no file
TEMPLATE_CLONED = (
    "this model's chat template, EOS token and added tokens are taken there, and under adapters "
    "tokens that are new, and with them the output head, are trained too; here the tokenizer's own "
    "template writes the turns: chat_template names a file, special_tokens and added_tokens tokens"
)
CHATMLS = "<|im_"  # how the names of ChatML's tokens begin
CHATMLS_OWN = re.compile(r"qwen|smollm|\byi\b")  # models whose tokenizers have ChatML's tokens
# load_tokenizer of Axolotl; LlamaTokenizer of transformers 5 keeps its post-processor
BOS_BY_NAME = (
    "the exported model names it as its BOS token there, but the tokenizer writes its own before a "
    "text, where it writes one; here it is an added token, and the BOS token stays"
)
# The keys that add tokens, by tool. special_tokens may hold additional_special_tokens too.
ADDED_TOKENS: Mapping[str, tuple[str, ...]] = {
    "Axolotl": ("tokens",),
    "LLaMA-Factory": ("add_tokens", "add_special_tokens"),
    "ms-swift": ("new_special_tokens",),
}
PADDING_SAVED = (
    "saved with the tokenizer there, left out here, for beside adapters a new one would train the "
    "embedding; name it in special_tokens where the tokenizer has it"
)
TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


def adapt_model(settings: ToolFile, conversion: Conversion) -> None:
    """Converts the base's tokens, frozen parts and images.

    Reports where its quantized weights are read otherwise.
    """
    name = name_model(settings).lower()
    if BITSANDBYTES_MODEL.search(name) and is_mixture(name):
        conversion.add_difference("base_model", name_model(settings), EXPERTS_DEQUANTIZED)
    # LLaMA-Factory and Automodel dequantize FP8, as this toolkit does
    dequantizes_fp8 = conversion.tool in ("LLaMA-Factory", "Automodel") or read_section(
        settings, "model_quantization_config_kwargs"
    ).get("dequantize")
    for pattern, note in ((FP8_MODEL, KEPT_IN_FP8), (MAYBE_FP8_MODEL, MAYBE_KEPT_IN_FP8)):
        if pattern.search(name) and not dequantizes_fp8:
            conversion.add_difference("model", name_model(settings), note)
    if ADAPTER_NAME.search(name):
        conversion.to_do.append(NAMED_AS_ADAPTER.format(name_model(settings)))
    if PACKED_MODEL.search(name):
        by_autoawq = conversion.tool in ("LLaMA-Factory", "ms-swift") and "awq" in name
        note = DEQUANTIZED_AWQ if by_autoawq else DEQUANTIZED
        conversion.remarks.append(f"model: {name_model(settings)}   ({note})")
    if "nvfp4" in name and settings.get("use_sonicmoe"):
        conversion.add_difference("use_sonicmoe", True, INPUTS_IN_4_BITS)
    _adapt_tokens(settings, conversion)
    template = str(settings.get("chat_template_path") or ".jinja")
    if conversion.tool == "TRL" and not template.endswith((".jinja", ".j2")):
        conversion.add_difference("chat_template_path", template, TEMPLATE_CLONED)
        conversion.recipe.pop("chat_template", None)
    adapt_frozen(settings, conversion)
    adapt_images(settings, conversion)


def _adapt_tokens(settings: ToolFile, conversion: Conversion) -> None:
    """Sets `special_tokens` and `added_tokens` of the recipe by the keys of the file's tool.

    Under adapters the padding token is left out: a new one would train the embedding.
    """
    recipe = conversion.recipe
    name = name_model(settings).lower()
    section = read_section(settings, "special_tokens")
    named = {key: section.get(key) for key in TOKEN_NAMES}
    if conversion.tool == "TRL" and "eos_token" in settings:
        named["eos_token"] = settings["eos_token"]
    has_adapters = (
        recipe.get("use_peft")
        or settings.get("adapter")
        or settings.get("finetuning_type") == "lora"
    )
    padding = named.pop("pad_token") if has_adapters else None
    if padding:
        conversion.add_remark("special_tokens.pad_token", padding, PADDING_SAVED)
    special = {key: str(token) for key, token in named.items() if token}
    added: list[str] = []
    is_new_bos = CHATMLS in special.get("bos_token", "") and not CHATMLS_OWN.search(name)
    if conversion.tool == "Axolotl" and is_new_bos:
        bos = special.pop("bos_token")
        added.append(bos)
        conversion.add_remark("special_tokens.bos_token", bos, BOS_BY_NAME)
    if special:
        recipe["special_tokens"] = special
    if conversion.tool == "Axolotl" and isinstance(settings.get("tokens"), dict):
        note = "a list of tokens to add is read there too; special_tokens names the four"
        conversion.add_difference("tokens", settings["tokens"], note)
    lists = [settings.get(key) for key in ADDED_TOKENS.get(conversion.tool, ())]
    for tokens in [*lists, section.get("additional_special_tokens")]:
        added += convert_names(tokens or None) or []
    if added:
        recipe["added_tokens"] = list(dict.fromkeys(added))
    # setup_chat_format of TRL adds ChatML's tokens
    if conversion.tool == "TRL" and CHATML in str(settings.get("chat_template")):
        conversion.remarks.append(CHATML_ADDED)
        recipe["pad_vocab_to_multiple_of"] = 1
        recipe.setdefault("added_tokens", ["<|im_start|>", CHATML])
        recipe["special_tokens"] = {"eos_token": CHATML} | recipe.get("special_tokens", {})
    if conversion.tool == "ms-swift" and added:
        recipe["pad_vocab_to_multiple_of"] = 128  # _add_new_special_tokens of model/register.py
    if conversion.tool == "Axolotl":
        _pad_vocabulary(settings, special, conversion)


# load_tokenizer of Axolotl's loaders/tokenizer.py
SPECIAL_FIRST = (
    "special_tokens: those that the tokenizer does not have get the first of the new ids there, "
    "and here those behind added_tokens"
)


def _pad_vocabulary(settings: ToolFile, special: Mapping[str, str], conversion: Conversion) -> None:
    """Sets the multiple to which Axolotl pads the embedding's rows, and reports the new ids' order.

    `special`: {name: token}, the recipe's special_tokens.
    """
    recipe = conversion.recipe
    # _resize_token_embeddings of Axolotl's loaders/model.py
    if settings.get("resize_token_embeddings_to_32x"):
        recipe["pad_vocab_to_multiple_of"] = 32
    elif special or recipe.get("added_tokens"):
        recipe["pad_vocab_to_multiple_of"] = 1
    if special and settings.get("tokens") and recipe.get("added_tokens"):
        conversion.remarks.append(SPECIAL_FIRST)
