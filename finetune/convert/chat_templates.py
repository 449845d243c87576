"""The chat template that a file of another tool trains with: our name for it, and what theirs writes otherwise."""

import re
from collections.abc import Mapping
from typing import Any

from finetune.config.other_tools import Counterpart
from finetune.convert.rules import Conversion, read_section, shorten
from finetune.convert.tool_keys import Tool

# Names of Axolotl and LLaMA-Factory for templates -> ours. Their alpaca, vicuna, and zephyr write other turns.
TEMPLATES = {
    "llama3": "llama3", "llama-3": "llama3", "llama4": "llama4", "chatml": "chatml", "yi": "chatml", "smollm": "chatml",
    "qwen": "qwen", "qwen_25": "qwen", "qwen2_5": "qwen", "qwen3": "qwen3", "qwen3_nothink": "chatml", "qwen3_5_nothink": "chatml", "qwen3_5": "qwen3.5", "qwen3_6": "qwen3.6",
    "gemma": "gemma", "gemma2": "gemma", "gemma3": "gemma", "gemma3n": "gemma", "mistral": "mistral",
    "mistral_v1": "mistral-v1", "mistral_v2v3": "mistral-v3", "mistral_v3_tekken": "mistral-v3-tekken",
    "mistral_v7_tekken": "mistral-v7-tekken", "mistral_small": "mistral-v7-tekken", "phi_3": "phi3", "phi_35": "phi3",
    "phi": "phi3", "phi4": "phi4", "phi_4": "phi4", "deepseek3": "deepseek-v3", "deepseek_v2": "deepseek-v3",
    "deepseek_v3": "deepseek-v3", "cohere": "command-r", "aya": "command-r", "granite3": "granite", "llama2": "inst",
    "falcon_h1": "hermes", "nemotron_h": "chatml", "gemma4": "gemma4", "gemma4_unified": "gemma4",
}  # fmt: skip
FIRST_TOKEN, OWN_SYSTEM = (
    "the BOS token begins a conversation there",
    "a system message of its own there, where a row has none",
)
NO_SYSTEM = "system messages are left out there"
THOUGHT = "an empty thought in every turn there, in the last one here"
ONE_TEXT = (
    "one text for all answers of a row there, with an empty thought in the last one; here each follows the prompt of "
    "inference"
)
# (tool, its name) -> what the tool writes otherwise than our template, by its own rendering (tests/convert/test_token_ids.py).
OTHER_TURNS: Mapping[tuple[Tool, str], str] = {
    **{("LLaMA-Factory", name): THOUGHT for name in ("qwen3", "qwen3_5", "qwen3_6")},
    ("LLaMA-Factory", "gemma2"): "the token after an answer is trained too there, at the end the EOS token",
    ("torchtune", "phi3_mini_tokenizer"): FIRST_TOKEN,
    ("torchtune", "phi4_tokenizer"): "no <|im_end|> follows an answer there: the model does not learn to end",
    ("Axolotl", "phi_3"): FIRST_TOKEN,
    ("Axolotl", "phi_4"): OWN_SYSTEM,
    ("Axolotl", "mistral_v7_tekken"): OWN_SYSTEM,
    ("Axolotl", "mistral_v2v3"): NO_SYSTEM,
    ("Axolotl", "mistral_v3_tekken"): NO_SYSTEM,
    **{("Axolotl", name): ONE_TEXT for name in ("qwen3", "qwen3_5")},
    ("Axolotl", "deepseek_v2"): "an empty line follows a system message there",
}
# LLaMA-Factory trains their line break after an answer.
BREAKS = ("chatml", "qwen", "qwen3", "qwen3.5", "qwen3.6", "gemma", "phi3", "granite")
TRIMMED = ("llama3", "gemma", "mistral", "command-r")  # templates that trim a turn's text; LLaMA-Factory's do not
# torchtune's tokenizers, which have a chat format built in -> ours.
TOKENIZERS = {
    "llama2_tokenizer": "inst-torchtune", "mistral_tokenizer": "inst-torchtune", "gemma_tokenizer": "joined", "llama3_tokenizer": "llama3",
    "qwen2_tokenizer": "chatml", "qwen2_5_tokenizer": "chatml", "qwen3_tokenizer": "chatml", "phi3_mini_tokenizer": "phi3", "phi4_tokenizer": "phi4",
}  # fmt: skip
# Models whose turns mistral-common writes, by the version of their tokenizers.
MISTRAL_COMMON = {
    r"ministral-3-|magistral-small-25(07|09)": "mistral-v13-tekken", r"mistral-small-3\.2": "mistral-v11-tekken",
    r"mistral-small-(3\.1|24b)": "mistral-v7-tekken", r"ministral-8b|nemo": "mistral-v3-tekken",
}  # fmt: skip
OTHER_STYLES = ("alpaca", "metharme")  # Axolotl's names that are of no model
OWN_TEMPLATE = ("tokenizer_default", "default", "empty")


def set_template(key: str, value: Any, pair: Counterpart, found: Conversion) -> None:
    """Names our template for theirs, or says that none is known here."""
    name = str(value)
    if found.images:
        found.remarks.append(f"{key}: {shorten(value)}   (the tokenizer's own template, which writes the images)")
        return
    if name in OWN_TEMPLATE and pair.theirs != "template":  # LLaMA-Factory's default writes `Human:`
        return
    if (ours := TEMPLATES.get(name.lower())) is not None:
        found.recipe["chat_template"] = ours
        compare_turns(key, name, found)
    elif found.tool == "Axolotl" and name not in OTHER_STYLES:
        note = "the tokenizer's own template is used; name a file for another"
        found.remarks.append(f"{key}: {shorten(value)}   ({note})")
    else:
        found.add_difference(key, value, "its turns are not known here; name a file for chat_template")


def add_tokenizers_turns(theirs: Mapping[str, Any], found: Conversion) -> None:
    """The chat format, which torchtune's tokenizers and mistral-common have built in whatever the model's files say."""
    if theirs.get("tokenizer_use_mistral_common") and not found.images:
        model = str(theirs.get("base_model")).lower()
        named = next((name for pattern, name in MISTRAL_COMMON.items() if re.search(pattern, model)), None)
        if named is None:
            found.add_difference("tokenizer_use_mistral_common", True, "the tokenizer's own template is used")
        else:
            found.recipe["chat_template"] = named
    tokenizer, data = read_section(theirs, "tokenizer"), str(read_section(theirs, "dataset").get("_component_"))
    name = TOKENIZERS.get(str(tokenizer.get("_component_")).rsplit(".", 1)[-1])
    if name is None or tokenizer.get("prompt_template") or data.endswith("text_completion_dataset"):
        return
    found.recipe["chat_template"] = name
    compare_turns("tokenizer._component_", str(tokenizer["_component_"]), found)
    if name in ("llama3", "chatml", "phi3", "phi4") and found.recipe.get("assistant_only_loss") is not False:
        found.remarks.append("chat_template: the header of an answer is trained too there, about three tokens")


def compare_turns(key: str, value: str, found: Conversion) -> None:
    """Reports where their template of that name and ours differ: in what is written, or in the tokens trained beside answers."""
    if note := OTHER_TURNS.get((found.tool, value.rsplit(".", 1)[-1])):
        found.add_difference(key, value, note)
    name = found.recipe["chat_template"]
    if found.tool == "LLaMA-Factory" and name in BREAKS:
        found.remarks.append(f"{key}: {value}   (the line break after an answer is trained too there)")
    if found.tool == "LLaMA-Factory" and name in TRIMMED:
        found.remarks.append(f"{key}: {value}   (white space around a turn is kept there, trimmed here)")
