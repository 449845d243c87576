"""What several keys of another tool's file together say of the base model."""

import re
from collections.abc import Mapping

from finetune.convert.counterparts import ToolFile
from finetune.convert.image_models import adapt_images
from finetune.convert.model_names import BITSANDBYTES_MODEL, is_mixture, name_model
from finetune.convert.trained_layers import adapt_frozen
from finetune.convert.value_conversion import Conversion, convert_names, read_section

# Of FP8 and MXFP4 their config says whether they are read; of these it must be a kind that is.
PACKED_MODEL = re.compile("gptq|awq|aqlm|nvfp4")
# Models whose names say that their files are in FP8, for which transformers keeps them so.
FP8_MODEL = re.compile(r"^(?!.*(bf16|nvfp4|bnb)).*[-_]fp8\b")
# Of which only their config says it.
MAYBE_FP8_MODEL = re.compile(
    r"^(?!.*(bf16|fp8|nvfp4|bnb|distill)).*(minimax-m2|deepseek-(v3|r1)\b|mimo-v2|"
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
# update_dtype of transformers' AwqQuantizer, and WQLinear_GEMM of AutoAWQ, which LLaMA-Factory's
# model/model_utils/quantization.py and ms-swift's model/model_meta.py ask for
DEQUANTIZED_AWQ = (
    "the base is packed there, and its layers compute in float16 under bf16 too; dequantized here, "
    "its numbers are rounded to the run's 16 bits"
)
# fp4_cute of its integrations/kernels, "native W4A4"
INPUTS_IN_4_BITS = (
    "on a Blackwell GPU the inputs of experts in NVFP4 are rounded to 4 bits too there, never here"
)
EXPERTS_DEQUANTIZED = (
    "the experts are in 4 bits there too, and dequantized here as they are read: 16 bits a number"
)
CHATML = "<|im_end|>"
CHATML_ADDED = (
    "chat_template: its tokens are added here, and <|im_end|> is the EOS token, as in older "
    "versions; the newest adds none for a template that a file names"
)
CHATMLS = "<|im_"  # begins the names of ChatML's tokens
CHATMLS_OWN = re.compile(r"qwen|smollm|\byi\b")  # models whose tokenizers have them
# load_tokenizer of Axolotl, where LlamaTokenizer of transformers 5 keeps its post-processor
BOS_BY_NAME = (
    "the exported model names it as its BOS token there, but the tokenizer writes its own before a "
    "text, where it writes one; here it is an added token, and the BOS token stays"
)
# Keys of added tokens, by tool, beside those in special_tokens.
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
    """Adds what several keys together say of the model: its tokens, what is frozen of it, and its
    images.
    """
    name = name_model(settings).lower()
    if BITSANDBYTES_MODEL.search(name) and is_mixture(name):
        conversion.add_difference("base_model", name_model(settings), EXPERTS_DEQUANTIZED)
    loads_plain = conversion.tool in ("LLaMA-Factory", "Automodel") or read_section(
        settings, "model_quantization_config_kwargs"
    ).get("dequantize")
    for pattern, note in ((FP8_MODEL, KEPT_IN_FP8), (MAYBE_FP8_MODEL, MAYBE_KEPT_IN_FP8)):
        if pattern.search(name) and not loads_plain:
            conversion.add_difference("model", name_model(settings), note)
    if PACKED_MODEL.search(name):
        by_autoawq = conversion.tool in ("LLaMA-Factory", "ms-swift") and "awq" in name
        note = DEQUANTIZED_AWQ if by_autoawq else DEQUANTIZED
        conversion.remarks.append(f"model: {name_model(settings)}   ({note})")
    if "nvfp4" in name and settings.get("use_sonicmoe"):
        conversion.add_difference("use_sonicmoe", True, INPUTS_IN_4_BITS)
    _adapt_tokens(settings, conversion)
    adapt_frozen(settings, conversion)
    adapt_images(settings, conversion)


def _adapt_tokens(settings: ToolFile, conversion: Conversion) -> None:
    """Adds tokens by the keys of Axolotl, LLaMA-Factory and TRL; the padding token only without
    adapters.
    """
    recipe = conversion.recipe
    name = name_model(settings).lower()
    section = read_section(settings, "special_tokens")
    special = {key: section.get(key) for key in TOKEN_NAMES}
    if conversion.tool == "TRL" and "eos_token" in settings:
        special["eos_token"] = settings["eos_token"]
    has_adapters = (
        recipe.get("use_peft")
        or settings.get("adapter")
        or settings.get("finetuning_type") == "lora"
    )
    padding = special.pop("pad_token") if has_adapters else None
    if padding:
        conversion.add_remark("special_tokens.pad_token", padding, PADDING_SAVED)
    given = {key: str(token) for key, token in special.items() if token}
    added: list[str] = []
    is_new = CHATMLS in given.get("bos_token", "") and not CHATMLS_OWN.search(name)
    if conversion.tool == "Axolotl" and is_new:
        added.append(given.pop("bos_token"))
        conversion.add_remark("special_tokens.bos_token", added[0], BOS_BY_NAME)
    if given:
        recipe["special_tokens"] = given
    if conversion.tool == "Axolotl" and isinstance(settings.get("tokens"), dict):
        note = "a list of tokens to add is read there too; special_tokens names the four"
        conversion.add_difference("tokens", settings["tokens"], note)
    listed = [settings.get(key) for key in ADDED_TOKENS.get(conversion.tool, ())]
    for names in [*listed, section.get("additional_special_tokens")]:
        added += convert_names(names or None) or []
    if added:
        recipe["added_tokens"] = list(dict.fromkeys(added))
    # by its setup_chat_format
    if conversion.tool == "TRL" and CHATML in str(settings.get("chat_template")):
        conversion.remarks.append(CHATML_ADDED)
        recipe.setdefault("added_tokens", ["<|im_start|>", CHATML])
        recipe["special_tokens"] = {"eos_token": CHATML} | recipe.get("special_tokens", {})
    if conversion.tool == "Axolotl":
        _adapt_rows(settings, given, conversion)


# load_tokenizer of its loaders/tokenizer.py
SPECIAL_FIRST = (
    "special_tokens: those that the tokenizer does not have get the first of the new ids there, "
    "and here those behind added_tokens"
)


def _adapt_rows(settings: ToolFile, special: Mapping[str, str], conversion: Conversion) -> None:
    """Sets how many rows an embedding gets for new tokens by Axolotl (_resize_token_embeddings of
    its loaders/model.py), and reports in which order.
    """
    recipe = conversion.recipe
    if settings.get("resize_token_embeddings_to_32x"):
        recipe["pad_vocab_to_multiple_of"] = 32
    elif special or recipe.get("added_tokens"):
        recipe["pad_vocab_to_multiple_of"] = 1
    if special and settings.get("tokens") and recipe.get("added_tokens"):
        conversion.remarks.append(SPECIAL_FIRST)
