"""Names the chat template of a recipe, and reports where the other tool writes or trains turns
otherwise.

The strings below are the reports. "Its name" of a template is the other tool's name; "ours" is a
template that this toolkit ships.
"""

import re
from collections.abc import Mapping
from typing import Any

from finetune.config.schema import FORMATS
from finetune.convert.counterparts import Counterpart, Tool, ToolFile
from finetune.convert.hints import find_texts, list_types
from finetune.convert.model_names import guess_family, name_model
from finetune.convert.value_conversion import Conversion, find_method_facts, read_section

# A template's name in Axolotl or LLaMA-Factory -> ours. alpaca, vicuna and zephyr are missing: they
# write other turns there than here.
TEMPLATES = {
    "llama3": "llama3",
    "llama-3": "llama3",
    "llama4": "llama4",
    "chatml": "chatml",
    "yi": "chatml",
    "smollm": "chatml",
    "qwen": "qwen",
    "qwen_25": "qwen",
    "qwen2_5": "qwen",
    "qwen3": "qwen3",
    "qwen3_nothink": "chatml",
    "qwen3_5_nothink": "chatml",
    "qwen3_5": "qwen3.5",
    "qwen3_6": "qwen3.6",
    "gemma": "gemma",
    "gemma2": "gemma",
    "gemma3": "gemma",
    "gemma3n": "gemma",
    "mistral": "mistral",
    "mistral_v1": "mistral-v1",
    "mistral_v2v3": "mistral-v3",
    "mistral_v3_tekken": "mistral-v3-tekken",
    "mistral_v7_tekken": "mistral-v7-tekken",
    "mistral_small": "mistral-v7-tekken",
    "phi_3": "phi3",
    "phi_35": "phi3",
    "phi": "phi3",
    "phi4": "phi4",
    "phi_4": "phi4",
    "deepseek3": "deepseek-v3",
    "deepseek_v2": "deepseek-v3",
    "deepseek_v3": "deepseek-v3",
    "cohere": "command-r",
    "aya": "command-r",
    "granite3": "granite",
    "llama2": "inst",
    "falcon_h1": "hermes",
    "nemotron_h": "chatml",
    "gemma4": "gemma4",
    "gemma4_unified": "gemma4",
}
FIRST_TOKEN = "the BOS token begins a conversation there"
OWN_SYSTEM = "a system message of its own there, where a row has none"
NO_SYSTEM = "system messages are left out there"
THOUGHT = "an empty thought in every turn there, in the last one here"
THOUGHT_OF_IMAGES = (
    "an empty thought before an answer without one there; what the tokenizer's template writes here"
)
OWN_THOUGHT = (
    "an empty thought, or its end, that the tokenizer's template writes before an answer is not "
    "trained there; it is here"
)
ONE_TEXT = (
    "one text for all answers of a row there, with an empty thought in the last one; here each "
    "follows the prompt of inference, and what that lacks of an empty thought is trained"
)
# _encode_normal_content_assistant_message of mistral-common's tokens/tokenizers/instruct.py
ANSWERS_STRIPPED = "chat_template: spaces at the end of an answer are left out there"
# MultiModalChatDataCollator trains all tokens between the markers of an answer
THOUGHT_WHOLE = (
    "a thought that the template writes before an answer, an empty one too, is trained from its "
    "first token on there; here from the end of the prompt of inference, which may open it"
)
# Families of which Automodel trains all that follows <|im_start|>assistant, by
# _IMSTART_TEMPLATE_PROCESSORS of components/datasets/vlm/collate_fns.py. For other families it
# trains what follows the start of an answer as the template writes that without a thought.
FAMILIES_MARKED_BY_HEADER = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
)
EARLIER_THOUGHTS = (
    "of a row with several answers one text is made there, in which the template leaves out the "
    "thinking of all but the last; here each has its own, after the prompt of inference"
)
MAYBE_EARLIER_THOUGHTS = (
    "of a row with several answers one text is made there, without the thinking of all but the "
    "last where the tokenizer's template leaves it out; here each has its own, after the prompt of "
    "inference"
)
EARLIER_ENDS = (
    "answers before the last one of a row end with <|end|> there, all with <|return|> here"
)
SCORED_END = "the EOS token follows an answer here, and is scored; there what stands before it is"
# PairwiseDatasetProcessor of LLaMA-Factory, for templates with efficient_eos: of those in TEMPLATES
# that is gemma2
SCORED_EOS_THERE = (
    "the EOS token follows an answer there, and is scored; here the line break before it is"
)
EMPTY_SYSTEM = (
    "a row whose system column is empty has a system message without words there; here what the "
    "chat template writes for a row without one: none, or its own"
)
SYSTEM_REFUSED = (
    "each row has a system message there, which this template refuses: no run ends; here one with "
    "words begins the question"
)
REFUSING_SYSTEMS = ("gemma",)  # Axolotl's templates that refuse a system message
# Axolotl's templates under which bradley_terry.chat_template loses words of an answer
LOSING_WORDS = ("gemma4", "gemma4_unified", "mistral_v2v3", "mistral_v3_tekken")
# Axolotl's templates/gemma4.jinja
CALLS_THOUGHT_OF = (
    "an answer's reasoning is written there only beside a tool call; here it is written, and "
    "trained, wherever it follows the last question"
)
# (tool, its name) -> what its template writes otherwise than ours. tests/convert/test_token_ids.py
# renders both.
OTHER_TURNS: Mapping[tuple[Tool, str], str] = {
    **{("LLaMA-Factory", name): THOUGHT for name in ("qwen3", "qwen3_5", "qwen3_6")},
    (
        "LLaMA-Factory",
        "gemma4",
    ): f"{OWN_SYSTEM}, which asks for thoughts, and an empty thought in every turn",
    (
        "LLaMA-Factory",
        "gemma2",
    ): "the token after an answer is trained too there, at the end the EOS token",
    ("torchtune", "phi3_mini_tokenizer"): FIRST_TOKEN,
    (
        "torchtune",
        "phi4_tokenizer",
    ): "no <|im_end|> follows an answer there: the model does not learn to end",
    ("Axolotl", "phi_3"): FIRST_TOKEN,
    ("Axolotl", "phi_4"): OWN_SYSTEM,
    ("Axolotl", "mistral_v7_tekken"): OWN_SYSTEM,
    ("Axolotl", "mistral_v2v3"): NO_SYSTEM,
    ("Axolotl", "mistral_v3_tekken"): NO_SYSTEM,
    **{("Axolotl", name): ONE_TEXT for name in ("qwen3", "qwen3_5")},
    ("Axolotl", "deepseek_v2"): "an empty line follows a system message there",
}
# Axolotl's templates that write their own system message where a row has none -> the families whose
# own template writes the same message in rows with images.
SYSTEM_OF_IMAGES: Mapping[str, tuple[str, ...]] = {
    "qwen2_vl": ("qwen2_vl", "qwen2_5_vl"),
    "mistral_v7_tekken": (),
}
# Axolotl's templates -> what they write otherwise for a row with tools, by their rendering. Other
# templates write the same as ours, or one of the two refuses the row.
OTHER_TOOLS: Mapping[str, str] = {
    "falcon_h1": (
        "of a row with tools, these are described in other words there, and the calls are left out"
    ),
    **dict.fromkeys(
        ("chatml", "nemotron_h"),
        "of a row with tools, their description and the calls are left out there",
    ),
    "mistral_v7_tekken": "of a row with tools, their description is left out there",
    "deepseek_v2": "of a row with tools, the calls and their results are left out there",
    "qwen3_5": (
        "of a row with tools, their description and the calls are in JSON there, in XML here"
    ),
}
# LLaMA-Factory's templates for which its data/tool_utils.py writes tools as our templates do.
SAME_TOOLS = ("qwen",)
TOOLS_IN_ITS_WORDS = (
    "of a row with tools, their description, the calls or the results are written in its own words "
    "there, in the chat template's here"
)
# Axolotl's templates that write a space before an answer. SentencePiece makes it a token by itself.
WRITING_SPACES = ("mistral_v1", "mistral_v2v3")
SPACE_TRAINED = (
    "the token of the space before an answer is trained here, not there, where a tokenizer has one "
    "for it"
)
# Axolotl's templates that treat white space around a turn otherwise than ours.
SPACE_KEPT = "white space around a turn is kept there, trimmed here"
OTHER_SPACE = {
    "qwen3_5": SPACE_KEPT,
    "mistral_v2v3": "white space around an answer is trimmed there, kept here",
}
# Axolotl's templates whose prompts for inference end otherwise than ours -> how both end. Axolotl
# saves its template with the tokenizer.
OTHER_PROMPTS = {
    "qwen3": "with <think> and two line breaks there, with the answer's header here",
    "qwen3_5": "with two line breaks after <think> there, with one here",
    **dict.fromkeys(
        ("gemma4", "gemma4_unified"), "with an empty thought there, with the answer's header here"
    ),
}
PROMPT_ENDS = "a prompt for inference, which the exported tokenizer writes, ends {}"
BREAK_TRAINED = "the line break after an answer is trained too there"
HEADER = "the header of an answer is trained too there"
# of a template with generation blocks
AFTER_PROMPT = "here what follows the prompt of inference, to the end of its turn"
HEADER_TRAINED = f"chat_template: {HEADER}, about three tokens"
# our templates with a line break after an answer, which LLaMA-Factory trains
BREAKING_TEMPLATES = (
    "chatml",
    "hermes",
    "qwen",
    "qwen3",
    "qwen3.5",
    "qwen3.6",
    "gemma",
    "phi3",
    "granite",
)
# LLaMA-Factory's templates for images that write such a line break
BREAKS_OF_IMAGES = re.compile(
    "chatml|qwen|(?<!pali)gemma|paligemma_chat|intern|minicpm|keye|lfm2|moss|mimo|yi|youtu"
)
# LLaMA-Factory's templates for images that write an empty thought (ReasoningTemplate)
THOUGHTS_OF_IMAGES = re.compile(
    "(ernie|keye|kimi|mimo|qwen3)_vl|gemma4n?|glm4v|glm4_5v|qwen3_[56]|qwen3_omni"
)
# Models whose tokenizer's template writes an empty thought in every turn.
THINKING = re.compile(r"glm-?4\.[567]|nex-n2|nemotron-?3-|kimi-k2-thinking|qwen-?3\.8")
# Those of them whose template leaves out the thinking of earlier turns.
FORGETTING = re.compile(r"glm-?4\.[567]|nemotron-?3-|kimi-k2-thinking")
# Models whose tokenizer's template writes an empty thought in the last turn.
THINKING_LAST = re.compile(r"qwen-?3(?!\.8|.*(instruct|coder|embedding|guard|omni))")
# Models of which only some have a template that writes an empty thought.
MAYBE_THINKING = re.compile(
    r"think|reason|nemotron-?3\.|glm-?5|minimax-?m|deepseek-?(r1|v3\.|v4)|kimi|hunyuan|\bhy3|ernie|"
    r"mimo|seed-oss|\bbeam-\d|minicpm-?5|deepcoder"
)
# LLaMA-Factory's template mistral, whose answers are " {{content}}", each encoded alone
SPACE_DOUBLED = (
    "where [INST] is no token of the tokenizer, as of Mistral 7B 0.1 and 0.2, two spaces stand "
    "before an answer there, and are trained; one here, in its first token"
)
# our templates that trim a turn's text; LLaMA-Factory's do not
TRIMMING_TEMPLATES = ("llama3", "gemma", "mistral", "command-r")
# _tokenize_body of the tokenizers in torchtune's transforms of Llama 3.2 Vision and Llama 4
MESSAGES_TRIMMED = "chat_template: white space around a message is left out there"
# tokenize_messages of torchtune's Phi3MiniTokenizer and Phi4Tokenizer
SPACES_STRIPPED = "chat_template: spaces at the end of a turn are left out there, kept here"
# tokenize_messages and __call__ of torchtune's Phi3MiniTokenizer. The model's own tokenizer strips
# what follows these tokens (rstrip), and puts a space before every text.
OF_PHI3 = (
    "chat_template: a space and a line break follow <|user|>, <|assistant|> and <|end|> there, as "
    "tokens of their turns; here the model's tokenizer leaves them out",
    "chat_template: the first word of a turn has no space before it there; here the model's "
    "tokenizer writes one, which makes it another token",
    SPACES_STRIPPED,
    "chat_template: since 0.7 the EOS token follows each answer there, and the BOS token begins "
    "each question; here an EOS token ends the row, and no BOS token is written",
)
# GPT2BaseTokenizer of torchtune splits as GPT-2's tokenizer does, Phi-4's tokenizer.json as cl100k
SPLIT_AS_GPT2 = (
    "a text is split into words as for GPT-2 there, as by the model's own tokenizer here: other "
    "tokens around line breaks, numbers and punctuation marks"
)
OF_PHI4 = (f"chat_template: {SPLIT_AS_GPT2}", SPACES_STRIPPED)
# encode of torchtune's SentencePieceBaseTokenizer writes a line break before an answer and cuts off
# its token. Gemma's vocabulary has one token for several line breaks, and all of them are cut off.
OF_GEMMA = (
    "chat_template: line breaks at the start of an answer are left out there, unless a space ends "
    "its question"
)
# torchtune's tokenizers, each with its built-in chat format -> our template.
TOKENIZERS = {
    "llama2_tokenizer": "inst-torchtune",
    "mistral_tokenizer": "inst-torchtune",
    "gemma_tokenizer": "joined",
    "llama3_tokenizer": "llama3",
    "qwen2_tokenizer": "chatml",
    "qwen2_5_tokenizer": "chatml",
    "qwen3_tokenizer": "chatml",
    "phi3_mini_tokenizer": "phi3",
    "phi4_tokenizer": "phi4",
}
# Our template -> what torchtune's tokenizer writes otherwise.
TOKENIZER_NOTES = {"phi3": OF_PHI3, "phi4": OF_PHI4, "joined": (OF_GEMMA,)}
# The same -> the token that begins or ends a plain text: `encode` of the tokenizer, which
# TextCompletionDataset calls, where that may differ from what the model's own tokenizer writes.
TEXT_STARTS = {"phi3": "<s>", "phi4": "<|endoftext|>"}
TEXT_ENDS = {"llama3": "<|end_of_text|>", "chatml": "<|im_end|>", "phi3": "</s>"}
# Pattern of a model's name -> our template for the turns that mistral-common writes, by the version
# of its tokenizer. For Devstral and the first Magistral the tokens in Axolotl's
# tests/prompt_strategies show the version.
MISTRAL_COMMON = {
    r"ministral-3-|magistral-small-25(07|09)|devstral-small-2507": "mistral-v13-tekken",
    r"mistral-small-3\.2|magistral-small-2506": "mistral-v11-tekken",
    r"mistral-small-(3\.1|24b)|devstral-small-2505": "mistral-v7-tekken",
    r"ministral-8b|nemo": "mistral-v3-tekken",
}
# those of these templates that write the system message in the last question
WITH_SYSTEM_LAST = ("mistral-v3-tekken",)
# Our templates that end a turn with a fixed token, and not with the tokenizer's EOS token -> that
# token.
TURN_ENDS: Mapping[str, str] = {
    **dict.fromkeys(
        ("chatml", "hermes", "qwen", "qwen3", "qwen3.5", "qwen3.6", "phi4"), "<|im_end|>"
    ),
    "llama3": "<|eot_id|>",
    "llama4": "<|eot|>",
    "gemma": "<end_of_turn>",
    "gemma4": "<turn|>",
    "phi3": "<|end|>",
    "command-r": "<|END_OF_TURN_TOKEN|>",
}
# Family -> the template of ours that writes the turns of its models' own templates.
FAMILY_TEMPLATES = {
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "gemma3n_text"), "gemma"),
    "gemma4_text": "gemma4",
    "phi3": "phi3",
}
# (pattern of a model's name, EOS token): models whose EOS token also ends a turn.
ENDS_AS_EOS = (
    (r"qwen-?[12]\S*(instruct|chat|-vl)|qwen-?3(?!.*base)|smollm\S*instruct|phi-?4", "<|im_end|>"),
    (r"llama-?3\S*instruct", "<|eot_id|>"),
    (r"llama-?4\S*instruct", "<|eot|>"),
    (r"command-?(r|a)|/aya", "<|END_OF_TURN_TOKEN|>"),
)
# Axolotl's templates that are no model's own
OTHER_STYLES = ("alpaca", "metharme")
# names that ask for the tokenizer's own template
OWN_TEMPLATE = ("tokenizer_default", "default", "empty")


def set_template(key: str, value: Any, pair: Counterpart, conversion: Conversion) -> None:
    """Sets our template for the one that a file names, or reports that none is known here.

    A file with images keeps the tokenizer's own template.
    """
    name = str(value)
    if conversion.image_family:
        conversion.add_remark(key, value, "the tokenizer's own template, which writes the images")
        if conversion.tool == "Axolotl":
            _compare_templates_of_images(key, name, conversion)
        if conversion.tool == "LLaMA-Factory" and BREAKS_OF_IMAGES.search(name):
            conversion.add_remark(key, value, BREAK_TRAINED)
        if conversion.tool == "LLaMA-Factory" and THOUGHTS_OF_IMAGES.fullmatch(name):
            conversion.add_difference(key, value, THOUGHT_OF_IMAGES)
        return
    # `template: default` of LLaMA-Factory is a template by itself: it writes `Human:`
    if name in OWN_TEMPLATE and pair.key != "template":
        return
    ours = TEMPLATES.get(name.lower())
    if ours is not None:
        conversion.recipe["chat_template"] = ours
        compare_turns(key, name, conversion)
    elif conversion.tool == "Axolotl" and name not in OTHER_STYLES:
        conversion.add_remark(
            key, value, "the tokenizer's own template is used; name a file for another"
        )
    else:
        conversion.add_difference(
            key, value, "its turns are not known here; name a file for chat_template"
        )


def _compare_templates_of_images(key: str, name: str, conversion: Conversion) -> None:
    """Reports what Axolotl's template `name` writes otherwise than the tokenizer's own one."""
    if name in OTHER_SPACE:
        conversion.add_remark(key, name, OTHER_SPACE[name])
    if name in SYSTEM_OF_IMAGES and conversion.image_family not in SYSTEM_OF_IMAGES[name]:
        conversion.add_difference(key, name, OWN_SYSTEM)


def shows_images(settings: ToolFile) -> bool:
    """Whether a torchtune file has a data set with images."""
    components = find_texts(settings, "_component_")
    return any(".datasets.multimodal." in each for each in components)


def add_tokenizers_turns(settings: ToolFile, conversion: Conversion) -> None:
    """Sets the template for tokenizers that write turns by themselves, without a template.

    These are torchtune's tokenizers and mistral-common, which Axolotl can use.
    """
    if settings.get("tokenizer_use_mistral_common"):
        conversion.remarks.append(ANSWERS_STRIPPED)
        if conversion.image_family:
            conversion.add_difference("tokenizer_use_mistral_common", True, COMMON_TURNS_OF_IMAGES)
        else:
            _add_mistral_turns(settings, conversion)
    tokenizer = read_section(settings, "tokenizer")
    component = str(tokenizer.get("_component_"))
    class_name = component.split(".")[-1]
    name = TOKENIZERS.get(class_name)
    if component.endswith("llama3_2_vision_transform") and not shows_images(settings):
        name = "llama3"  # the model's own template writes a system message into rows without images
    elif component.endswith("_transform"):
        conversion.remarks += [MESSAGES_TRIMMED, HEADER_TRAINED]
    rows = read_section(settings, "dataset")
    if str(rows.get("_component_")).endswith("text_completion_dataset"):
        _report_text_tokens(name, bool(rows.get("add_eos", True)), conversion)
        return
    if name is None or tokenizer.get("prompt_template"):
        return
    conversion.recipe["chat_template"] = name
    compare_turns("tokenizer._component_", component, conversion)
    conversion.remarks += TOKENIZER_NOTES.get(name, ())
    if (
        name in ("llama3", "chatml", "phi3", "phi4")
        and conversion.recipe.get("assistant_only_loss") is not False
    ):
        conversion.remarks.append(HEADER_TRAINED)


def _report_text_tokens(name: str | None, adds_end: bool, conversion: Conversion) -> None:
    """Reports tokens of a plain text that torchtune's tokenizer writes otherwise.

    `name`: our template for that tokenizer's turns.
    """
    eos = _find_eos(str(conversion.recipe.get("model_name_or_path")))
    start = TEXT_STARTS.get(str(name))
    end = TEXT_ENDS.get(str(name))
    if start is not None:
        conversion.remarks.append(f"dataset: {start} begins a text there; no token does here")
    if adds_end and end not in (None, eos):
        conversion.remarks.append(
            f"dataset: {end} ends a text there; here {eos or 'the EOS token of its tokenizer'} does"
        )
    if name == "phi4":
        conversion.remarks.append(f"dataset: {SPLIT_AS_GPT2}")


# encode_user_message of mistral-common, the same in its second and third version
SYSTEM_LAST = (
    "of a row with a system message and several answers one text is made there, with that message "
    "in the last question alone; here each answer has a text, with it in the last question of that"
)
COMMON_TURNS_OF_IMAGES = (
    "mistral-common writes a system message only where a row has one, and an image at the end of a "
    "question before its words; here the tokenizer's template decides, which may have a system "
    "message of its own"
)
# _convert_content_parts of Axolotl's ChatTemplateStrategy; rows with images are read otherwise
THOUGHTS_LEFT_OUT = (
    "an answer's parts of type thinking are left out there, in 0.18 and 0.21; here they are its "
    "reasoning"
)


def _add_mistral_turns(settings: ToolFile, conversion: Conversion) -> None:
    """Sets the template for the turns that mistral-common writes for the model, if one is known."""
    model = str(settings.get("base_model")).lower()
    name = next(
        (template for pattern, template in MISTRAL_COMMON.items() if re.search(pattern, model)),
        None,
    )
    types = list_types(settings)
    has_chats = any(each.startswith("chat_template") for each in types) and not settings.get("rl")
    if has_chats:
        conversion.add_difference("tokenizer_use_mistral_common", True, THOUGHTS_LEFT_OUT)
    if name in WITH_SYSTEM_LAST and has_chats:
        conversion.add_difference("tokenizer_use_mistral_common", True, SYSTEM_LAST)
    if name is None:
        note = "the tokenizer's own template is used"
        conversion.add_difference("tokenizer_use_mistral_common", True, note)
    else:
        conversion.recipe["chat_template"] = name


# copy_files of torchtune's checkpointers, fix_jinja_template of LLaMA-Factory's templates, and
# HFMistralTokenizer and load_tokenizer of Axolotl
SAVED_TEMPLATE = (
    "chat_template: {}, which writes the turns, is saved with the tokenizer here; there {}"
)
# names in TEMPLATES that LLaMA-Factory saves with the tokenizer: replace_jinja_template
SAVED_BY_FACTORY = ("chatml",)
# add_eos of TRL's trainers, to which Axolotl hands rows as texts
SCORED_EOS = "the EOS token follows {} there unless it is that, and is scored; it is not here"
MAYBE_SCORED_EOS = (
    "where the tokenizer's template ends an answer with another token, the EOS token follows that "
    "there, and is scored; it is not here"
)
# add_bos_token_if_needed and add_eos_token_if_needed of TRL's ORPO and CPO trainers
ENDS_ADDED = (
    "the tokenizer's BOS token begins a prompt there, and its EOS token ends an answer and is "
    "scored, also where the template writes neither; here what the template writes"
)
SCORED_BREAK = (
    "chat_template: what it writes after the end of an answer, as ChatML's line break, is scored "
    "too there"
)
# apply_chat_template of TRL's data_utils.py takes for a side all that follows the text both share
SCORED_QUESTION = (
    "rows: of a side with several answers, what is asked between them is scored too there; here "
    "the answers alone"
)
# tokenize_row of TRL's DPOTrainer until 0.27, and _process_tokens of its KTOTrainer until 1.2
ENDED_BEFORE = {
    "dpo": (
        "chat_template: until 0.27 the EOS token follows what it writes after an answer there, "
        "also where that ends with it, and is scored; not here"
    ),
    "kto": (
        "chat_template: until 1.2 the tokenizer's BOS token begins a prompt there, and its EOS "
        "token follows what it writes after an answer, and is scored, unless they stand there; not "
        "here"
    ),
}
TOKENIZERS_BOS = (
    "chat_template: a prompt begins with the BOS token that the tokenizer writes by itself there, "
    "where it writes one; the template writes none here"
)
# for a template that is not known here
MAYBE_BOS = (
    "chat_template: a prompt begins with the tokenizer's BOS token there, where it has one, also "
    "under a template that writes none; not here"
)
# AxolotlDPOTrainer would take the second one away in _tokenize, which TRL's trainer no longer calls
# as a method since 1.8 at the latest
SECOND_BOS = (
    "chat_template: a prompt begins with two BOS tokens there, where the tokenizer writes one "
    "before that of the template; here with one"
)
ASKED_WITH_THOUGHT = "the prompt of a pair ends with an empty thought there, not here"
# our templates that write no BOS token
WITHOUT_BOS = ("chatml", "granite", "phi3", "phi4", "qwen", "qwen3", "qwen3.5", "qwen3.6")
OTHER_ENDS = (
    "the EOS token alone ends a trained turn there: where the tokenizer's template ends turns with "
    "another token, that is trained here alone"
)
CHANNEL_UNTRAINED = (
    "<|channel|> at the start of an answer is not trained there, nor the name and <|message|> "
    "after it where a row has no thinking; all three are here"
)


def report_turn_ends(settings: ToolFile, conversion: Conversion) -> None:
    """Reports where Axolotl leaves the start or the end of an answer untrained.

    Without eot_tokens Axolotl trains no end of a turn but the EOS token. Of gpt-oss's answers the
    start is left out, which that model writes itself.
    """
    datasets = settings.get("datasets")
    entries = datasets if isinstance(datasets, list) else []
    types = [str(entry.get("type")) for entry in entries if isinstance(entry, dict)]
    if settings.get("rl") or not any(each.startswith("chat_template") for each in types):
        return
    name = name_model(settings)
    if guess_family(name) == "gpt_oss":
        for note in (CHANNEL_UNTRAINED, EARLIER_THOUGHTS, EARLIER_ENDS):
            conversion.add_difference("datasets.type", "chat_template", note)
    # add_tokenizers_turns sets the template for mistral-common later
    has_own_template = not settings.get("tokenizer_use_mistral_common")
    if (
        has_own_template
        and "chat_template" not in conversion.recipe
        and not conversion.image_family
    ):
        report_own_thoughts(name, "datasets.type", "chat_template", conversion)
    end = _find_end_besides_eos(name, conversion)
    eot_tokens = settings.get("eot_tokens")
    if end is not None and end not in (eot_tokens or ()):
        note = (
            f"the EOS token alone ends a trained turn there: {end} is not trained unless it is "
            "that; it is here"
        )
        conversion.add_difference("eot_tokens", eot_tokens, note)
    is_unknown = _has_unknown_ends(name, conversion)
    if has_own_template and is_unknown and not (eot_tokens or conversion.image_family):
        conversion.add_remark("eot_tokens", None, OTHER_ENDS)


def _has_unknown_ends(name: str, conversion: Conversion) -> bool:
    """Whether turns end as the model's own template says, which is not known here."""
    return (
        "chat_template" not in conversion.recipe
        and guess_family(name) not in FAMILY_TEMPLATES
        and not any(re.search(pattern, name.lower()) for pattern, _ in ENDS_AS_EOS)
    )


def _find_end_besides_eos(name: str, conversion: Conversion) -> str | None:
    """Returns the token that ends a turn, if it is known and is not the EOS token; else None.

    Where only the EOS token is not known, the end is returned.
    """
    recipe = conversion.recipe
    template = str(recipe.get("chat_template") or FAMILY_TEMPLATES.get(guess_family(name) or ""))
    end = TURN_ENDS.get(template)
    if end is None:
        return None
    eos = recipe.get("special_tokens", {}).get("eos_token")
    if eos is None:
        eos = _find_eos(name)
    return end if end != eos else None


def _find_eos(name: str) -> str | None:
    """Returns the EOS token of a model by its name, where that also ends a turn."""
    return next((token for pattern, token in ENDS_AS_EOS if re.search(pattern, name.lower())), None)


def report_saved_template(settings: ToolFile, conversion: Conversion) -> None:
    """Reports which template a tool saves where that is not the one by which it writes turns.

    The exported tokenizer has the recipe's template here. Nothing without one.
    """
    ours = conversion.recipe.get("chat_template")
    if ours is None or conversion.is_factory_v1:
        return
    if conversion.tool == "torchtune":
        saved = "the model's own tokenizer files are copied"
    elif conversion.tool == "LLaMA-Factory" and settings.get("template") not in SAVED_BY_FACTORY:
        saved = "the tokenizer's own, where it has one"
    elif conversion.tool == "Axolotl" and ours in MISTRAL_COMMON.values():
        saved = "tekken.json, without a template"
    else:
        return
    conversion.remarks.append(SAVED_TEMPLATE.format(ours, saved))


# Our template -> a pattern of the models whose tokenizers have the same one, but for the token that
# ours writes after the last answer: see tests/data/test_published_templates.py
ENDED_TEMPLATES = {"glm4.5": r"glm-?4\.[56]", "glm4.7": r"glm-?4\.7"}
# other models of these families, whose template may lack the token too
MAYBE_ENDLESS = re.compile(r"(?<![a-z])glm")
ENDED_HERE = (
    "the tokenizer's own writes no token after the last answer there, and none is trained; here "
    "{} is the same one with <|user|> after that, at which generation stops"
)
ENDED_THERE_TOO = (
    "chat_template: {} is the tokenizer's own, with <|user|> after the last answer, as there"
)
STOPPED_HERE = (
    "where the tokenizer's own writes no token after the last answer, as GLM-4.7's, a run stops "
    "here until this key names a template that writes one"
)


# formats of single texts that the tokenizer's template, where there is one, writes as turns
TURNS_WITH_TEMPLATE = ("squad",)


def end_last_answers(settings: ToolFile, conversion: Conversion) -> None:
    """Sets our template for models whose own one ends no last answer, which no run here takes."""
    recipe = conversion.recipe
    name = name_model(settings).lower()
    types = [entry.get("type", "messages") for entry in recipe.get("datasets", ())]
    is_rendered = any(
        each in TURNS_WITH_TEMPLATE or (each in FORMATS and FORMATS[each].is_chat) for each in types
    )
    learns_turns = is_rendered and find_method_facts(recipe).rows in ("answers", "pairs", "ratings")
    if "chat_template" in recipe or not learns_turns or not MAYBE_ENDLESS.search(name):
        return
    matches = (ours for ours, models in ENDED_TEMPLATES.items() if re.search(models, name))
    template = None if conversion.image_family else next(matches, None)
    asked = settings.get("chat_template")
    if template is None:
        conversion.add_remark("chat_template", asked, STOPPED_HERE)
        return
    recipe["chat_template"] = template
    if conversion.tool == "ms-swift":
        conversion.remarks.append(ENDED_THERE_TOO.format(template))
    else:
        conversion.add_difference("chat_template", asked, ENDED_HERE.format(template))


def report_scored_ends(settings: ToolFile, conversion: Conversion) -> None:
    """Reports what TRL's trainers of preferences put before a prompt and score besides an answer.

    Axolotl uses these trainers too. Nothing for methods without pairs or rated answers.
    """
    rows = find_method_facts(conversion.recipe).rows
    if rows not in ("pairs", "ratings"):
        return
    # alignment-handbook's dataset_mixer scores the last message alone, as is done here
    if conversion.tool == "TRL" and rows == "pairs" and "dataset_mixer" not in settings:
        conversion.remarks.append(SCORED_QUESTION)
    method = conversion.recipe.get("method")
    is_axolotl = conversion.tool == "Axolotl"
    # argilla of Axolotl's prompt_strategies/orpo strips no answer
    if conversion.tool == "TRL" or (is_axolotl and method == "orpo"):
        conversion.remarks.append(SCORED_BREAK)
    adds_ends = method in ("orpo", "simpo")
    if adds_ends and conversion.tool in ("TRL", "Axolotl"):
        conversion.remarks.append(ENDS_ADDED)
    if conversion.tool == "TRL" and method in ENDED_BEFORE:
        conversion.remarks.append(ENDED_BEFORE[method])
    if not is_axolotl:
        return
    name = name_model(settings)
    end = _find_end_besides_eos(name, conversion)
    if end is not None and not adds_ends:
        conversion.add_remark("rl", settings.get("rl"), SCORED_EOS.format(end))
    elif _has_unknown_ends(name, conversion) and not adds_ends:
        conversion.add_remark("rl", settings.get("rl"), MAYBE_SCORED_EOS)
    ours = conversion.recipe.get("chat_template")
    if ours == "gemma4":
        conversion.add_difference(
            "chat_template", settings.get("chat_template"), ASKED_WITH_THOUGHT
        )
    if adds_ends:
        return  # ENDS_ADDED says what becomes of the BOS token
    template = ours or FAMILY_TEMPLATES.get(guess_family(name) or "")
    if template in WITHOUT_BOS:
        conversion.remarks.append(TOKENIZERS_BOS)
    elif template not in TEMPLATES.values():
        conversion.remarks.append(MAYBE_BOS)
    is_template_text = any(each.startswith("chat_template") for each in list_types(settings))
    if is_template_text and method == "dpo" and template not in WITHOUT_BOS:
        conversion.remarks.append(SECOND_BOS)


def report_own_thoughts(name: str, key: str, value: str, conversion: Conversion) -> None:
    """Reports what the tool trains of the empty thoughts that the tokenizer's own template writes.

    `name` is the model's; `key: value` is the setting that asks for that template.
    """
    lower = name.lower()
    # LLaMA-Factory's v1 splits the turns as this toolkit does
    trains_from_header = not conversion.is_factory_v1 and (
        conversion.tool != "Automodel" or conversion.image_family in FAMILIES_MARKED_BY_HEADER
    )
    own_thought = THOUGHT_WHOLE if conversion.image_family and trains_from_header else OWN_THOUGHT
    # these two write one text for all answers of a row
    is_one_text = conversion.tool in ("Axolotl", "Automodel")
    if THINKING.search(lower):
        conversion.add_difference(key, value, own_thought)
        if is_one_text and FORGETTING.search(lower):
            conversion.add_difference(key, value, EARLIER_THOUGHTS)
    elif THINKING_LAST.search(lower):
        if is_one_text:
            conversion.add_difference(key, value, ONE_TEXT)
        if conversion.tool != "Axolotl" or conversion.image_family:
            conversion.add_difference(key, value, own_thought)
    elif MAYBE_THINKING.search(lower):
        conversion.remarks.append(f"{key}: {value}   ({own_thought})")
        if is_one_text:
            conversion.remarks.append(f"{key}: {value}   ({MAYBE_EARLIER_THOUGHTS})")


def report_scored_text(settings: ToolFile, conversion: Conversion) -> None:
    """Reports where a reward model reads another text there than here.

    Replaces the reports about trained tokens: a reward model only scores the text.
    """
    conversion.differences = [line for line in conversion.differences if ONE_TEXT not in line]
    if conversion.recipe.pop("eot_tokens", None):
        conversion.ignored.append("eot_tokens")
    for note in (SPACE_TRAINED, BREAK_TRAINED):
        conversion.remarks = [line for line in conversion.remarks if note not in line]
    template = settings.get("chat_template") or settings.get("template")
    if conversion.recipe.get("chat_template") == "phi3":
        conversion.add_difference("chat_template", template, SCORED_END)
    if conversion.tool == "LLaMA-Factory" and template == "gemma2":
        conversion.add_difference("template", template, SCORED_EOS_THERE)
    if conversion.tool == "Axolotl":
        note = SYSTEM_REFUSED if template in REFUSING_SYSTEMS else EMPTY_SYSTEM
        conversion.add_difference("datasets.type", "bradley_terry.chat_template", note)
        if template in LOSING_WORDS:
            conversion.add_difference(
                "chat_template", template, "words of the answers are left out there"
            )


def compare_turns(key: str, value: str, conversion: Conversion) -> None:
    """Reports where the tool's template and ours differ, in the text or in the trained tokens.

    `key: value` names the tool's template; ours is in the recipe.
    """
    last_part = value.split(".")[-1]  # of the path of a torchtune component
    note = OTHER_TURNS.get((conversion.tool, last_part))
    if note is not None:
        conversion.add_difference(key, value, note)
    if conversion.tool == "Axolotl" and value in ("gemma4", "gemma4_unified"):
        conversion.add_remark(key, value, CALLS_THOUGHT_OF)
    if conversion.tool == "Axolotl" and value in WRITING_SPACES:
        conversion.add_remark(key, value, SPACE_TRAINED)
    if conversion.tool == "Axolotl" and value in OTHER_SPACE:
        conversion.add_remark(key, value, OTHER_SPACE[value])
    if conversion.tool == "Axolotl" and value in OTHER_PROMPTS:
        conversion.add_remark(key, value, PROMPT_ENDS.format(OTHER_PROMPTS[value]))
    _compare_tools(key, value, conversion)
    name = conversion.recipe["chat_template"]
    if conversion.tool == "LLaMA-Factory" and name in BREAKING_TEMPLATES:
        conversion.remarks.append(f"{key}: {value}   ({BREAK_TRAINED})")
    if conversion.tool == "LLaMA-Factory" and name in TRIMMING_TEMPLATES:
        conversion.remarks.append(f"{key}: {value}   ({SPACE_KEPT})")
    if conversion.tool == "LLaMA-Factory" and value == "mistral":
        conversion.add_remark(key, value, SPACE_DOUBLED)


def forget_turns(template: str, conversion: Conversion) -> None:
    """Drops what `compare_turns` says of the rows of an Axolotl file: `template` writes none there.

    It is saved with the tokenizer all the same: how its prompts end is said where ours is its own.
    """
    notes = [
        OTHER_TURNS.get(("Axolotl", template)),
        OTHER_SPACE.get(template),
        OTHER_TOOLS.get(template),
        SPACE_TRAINED,
        CALLS_THOUGHT_OF,
    ]
    if conversion.recipe.get("chat_template") != TEMPLATES.get(template):
        notes.append(PROMPT_ENDS.format(OTHER_PROMPTS.get(template)))
    ends = tuple(f"({note})" for note in notes if note)
    for lines in (conversion.differences, conversion.remarks):
        lines[:] = [line for line in lines if not line.endswith(ends)]


def _compare_tools(key: str, value: str, conversion: Conversion) -> None:
    """Reports what the tool's template `value` writes otherwise for a row with tools."""
    if conversion.tool == "Axolotl" and value in OTHER_TOOLS:
        conversion.add_remark(key, value, OTHER_TOOLS[value])
    if conversion.tool == "LLaMA-Factory" and value not in SAME_TOOLS:
        conversion.add_remark(key, value, TOOLS_IN_ITS_WORDS)
