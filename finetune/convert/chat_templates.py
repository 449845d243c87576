"""Names of chat templates, and what differs there in the turns that they write."""

import re
from collections.abc import Mapping
from typing import Any

from finetune.convert.counterparts import Counterpart, Tool, ToolFile
from finetune.convert.hints import find_texts
from finetune.convert.model_names import guess_family, name_model
from finetune.convert.value_conversion import Conversion, find_method_facts, read_section

# Names of Axolotl and LLaMA-Factory for templates -> ours. Their alpaca, vicuna, and zephyr write
# other turns.
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
# MultiModalChatDataCollator, which trains all that stands between the marks of an answer
THOUGHT_WHOLE = (
    "a thought that the template writes before an answer, an empty one too, is trained from its "
    "first token on there; here from the end of the prompt of inference, which may open it"
)
# _IMSTART_TEMPLATE_PROCESSORS of Automodel's components/datasets/vlm/collate_fns.py: of these
# families all is trained that follows <|im_start|>assistant; of others what follows the start of an
# answer without a thought, as the template writes it
MARKED_BY_HEADER = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
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
# efficient_eos of a name that is known here, in PairwiseDatasetProcessor of LLaMA-Factory
SCORED_EOS_THERE = (
    "the EOS token follows an answer there, and is scored; here the line break before it is"
)
EMPTY_SYSTEM = (
    "a row whose system column is empty has a system message without words there, none here"
)
SYSTEM_REFUSED = (
    "each row has a system message there, which this template refuses: no run ends; here one with "
    "words begins the question"
)
REFUSING_SYSTEMS = ("gemma",)  # templates of Axolotl's
# Of Axolotl, by bradley_terry.chat_template.
LOST_WORDS = ("gemma4", "gemma4_unified", "mistral_v2v3", "mistral_v3_tekken")
# templates/gemma4.jinja of Axolotl
CALLS_THOUGHT_OF = (
    "an answer's reasoning is written there only beside a tool call; here it is written, and "
    "trained, wherever it follows the last question"
)
# (tool, its name) -> what it writes otherwise than our template, by its rendering
# (tests/convert/test_token_ids.py).
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
# Axolotl's templates that write a system message of their own where a row has none -> the families
# whose own template writes the same one before images.
SYSTEM_OF_IMAGES: Mapping[str, tuple[str, ...]] = {
    "qwen2_vl": ("qwen2_vl", "qwen2_5_vl"),
    "mistral_v7_tekken": (),
}
# What Axolotl's templates write otherwise of a row with tools, by their rendering. Others write the
# same, or one of the two refuses the row.
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
# Of LLaMA-Factory: names of its template.py, of whose tools its data/tool_utils.py writes what ours
# write.
SAME_TOOLS = ("qwen",)
TOOLS_IN_ITS_WORDS = (
    "of a row with tools, their description, the calls or the results are written in its own words "
    "there, in the chat template's here"
)
# Axolotl's templates that write a space before an answer, which SentencePiece makes a token of its
# own.
SPACED = ("mistral_v1", "mistral_v2v3")
SPACE_TRAINED = (
    "the token of the space before an answer is trained here, not there, where a tokenizer has one "
    "for it"
)
# Axolotl's templates that keep, or trim, the white space around a turn otherwise than ours.
SPACE_KEPT = "white space around a turn is kept there, trimmed here"
OTHER_SPACE = {
    "qwen3_5": SPACE_KEPT,
    "mistral_v2v3": "white space around an answer is trimmed there, kept here",
}
# Axolotl's templates, which it saves with the tokenizer -> what follows an answer's header in their
# prompts for inference, where another text does in ours.
OTHER_PROMPTS = {
    "qwen3": "with <think> and two line breaks there, with the answer's header here",
    "qwen3_5": "with two line breaks after <think> there, with one here",
    **dict.fromkeys(
        ("gemma4", "gemma4_unified"), "with an empty thought there, with the answer's header here"
    ),
}
PROMPT_ENDS = "a prompt for inference, which the exported tokenizer writes, ends {}"
# LLaMA-Factory trains their line break after an answer.
BREAK_TRAINED = "the line break after an answer is trained too there"
HEADER = "the header of an answer is trained too there"
HEADER_TRAINED = f"chat_template: {HEADER}, about three tokens"
BREAKS = ("chatml", "hermes", "qwen", "qwen3", "qwen3.5", "qwen3.6", "gemma", "phi3", "granite")
# its templates of images that write one
BREAKS_OF_IMAGES = re.compile(
    "chatml|qwen|(?<!pali)gemma|paligemma_chat|intern|minicpm|keye|lfm2|moss|mimo|yi|youtu"
)
# its templates of images by which it adds an empty thought (ReasoningTemplate)
THOUGHTS_OF_IMAGES = re.compile(
    "(ernie|keye|kimi|mimo|qwen3)_vl|gemma4n?|glm4v|glm4_5v|qwen3_[56]|qwen3_omni"
)
# Models whose tokenizers' templates write an empty thought: in every turn, or in the last one.
THINKING = re.compile(r"glm-?4\.[567]|nex-n2|nemotron-?3-|kimi-k2-thinking|qwen-?3\.8")
FORGETTING = re.compile(r"glm-?4\.[567]|nemotron-?3-|kimi-k2-thinking")  # in earlier turns
THINKING_LAST = re.compile(r"qwen-?3(?!\.8|.*(instruct|coder|embedding|guard|omni))")
# Of these some may.
MAYBE_THINKING = re.compile(
    r"think|reason|nemotron-?3\.|glm-?5|minimax-?m|deepseek-?(r1|v3\.|v4)|kimi|hunyuan|\bhy3|ernie|"
    r"mimo|seed-oss|\bbeam-\d|minicpm-?5|deepcoder"
)
# templates that trim a turn's text; LLaMA-Factory's do not
TRIMMED = ("llama3", "gemma", "mistral", "command-r")
# _tokenize_body of the tokenizers in torchtune's transforms of Llama 3.2 Vision and Llama 4
MESSAGES_TRIMMED = "chat_template: white space around a message is left out there"
# tokenize_messages and __call__ of torchtune's Phi3MiniTokenizer; the model's own tokenizer has
# these tokens with rstrip, and puts a space before every text
OF_PHI3 = (
    "chat_template: a space and a line break follow <|user|>, <|assistant|> and <|end|> there, as "
    "tokens of their turns; here the model's tokenizer leaves them out",
    "chat_template: the first word of a question or a system message, and of an answer where all "
    "turns are trained, has no space before it there; here the model's tokenizer writes one, which "
    "makes it another token",
    "chat_template: spaces at the end of a turn are left out there, kept here",
    "chat_template: since 0.7 the EOS token follows each answer there, and the BOS token begins "
    "each question; here an EOS token ends the row, and no BOS token is written",
)
# encode of torchtune's SentencePieceBaseTokenizer, which writes a line break before an answer and
# cuts its token off: Gemma's vocabulary has one token for several
OF_GEMMA = (
    "chat_template: line breaks at the start of an answer are left out there, unless a space ends "
    "its question"
)
# torchtune's tokenizers, which have a chat format built in -> ours.
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
OF_TOKENIZERS = {"phi3": OF_PHI3, "joined": (OF_GEMMA,)}  # what these write otherwise
# Models whose turns mistral-common writes, by the version of their tokenizers; those of Devstral
# and of the first Magistral by the tokens of Axolotl's tests/prompt_strategies.
MISTRAL_COMMON = {
    r"ministral-3-|magistral-small-25(07|09)|devstral-small-2507": "mistral-v13-tekken",
    r"mistral-small-3\.2|magistral-small-2506": "mistral-v11-tekken",
    r"mistral-small-(3\.1|24b)|devstral-small-2505": "mistral-v7-tekken",
    r"ministral-8b|nemo": "mistral-v3-tekken",
}
WITH_SYSTEM_LAST = ("mistral-v3-tekken",)  # of these
# Templates whose turns do not end with a model's EOS token as such -> the token at the end of a
# turn.
TURN_ENDS: Mapping[str, str] = {
    **dict.fromkeys(
        ("chatml", "hermes", "qwen", "qwen3", "qwen3.5", "qwen3.6", "phi4"), "<|im_end|>"
    ),
    "llama3": "<|eot_id|>",
    "llama4": "<|eot|>",
    "gemma": "<end_of_turn>",
    "gemma4": "<turn|>",
    "phi3": "<|end|>",
}
FAMILY_TEMPLATES = {
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "gemma3n_text"), "gemma"),
    "gemma4_text": "gemma4",
    "phi3": "phi3",
}
# Models whose EOS token ends their turns too, by their names.
ENDS_AS_EOS = (
    (r"qwen-?[12]\S*(instruct|chat|-vl)|qwen-?3(?!.*base)|smollm\S*instruct|phi-?4", "<|im_end|>"),
    (r"llama-?3\S*instruct", "<|eot_id|>"),
    (r"llama-?4\S*instruct", "<|eot|>"),
)
OTHER_STYLES = ("alpaca", "metharme")  # Axolotl's names that are of no model
OWN_TEMPLATE = ("tokenizer_default", "default", "empty")


def set_template(key: str, value: Any, pair: Counterpart, conversion: Conversion) -> None:
    """Sets our template for the tool's, or reports that none is known here."""
    name = str(value)
    if conversion.images:
        conversion.add_remark(key, value, "the tokenizer's own template, which writes the images")
        if conversion.tool == "Axolotl":
            _compare_templates_of_images(key, name, conversion)
        if conversion.tool == "LLaMA-Factory" and BREAKS_OF_IMAGES.search(name):
            conversion.add_remark(key, value, BREAK_TRAINED)
        if conversion.tool == "LLaMA-Factory" and THOUGHTS_OF_IMAGES.fullmatch(name):
            conversion.add_difference(key, value, THOUGHT_OF_IMAGES)
        return
    if name in OWN_TEMPLATE and pair.key != "template":  # LLaMA-Factory's default writes `Human:`
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
    """Reports what Axolotl's template of that name writes otherwise than a family's own."""
    if name in OTHER_SPACE:
        conversion.add_remark(key, name, OTHER_SPACE[name])
    if name in SYSTEM_OF_IMAGES and conversion.images not in SYSTEM_OF_IMAGES[name]:
        conversion.add_difference(key, name, OWN_SYSTEM)


def shows_images(settings: ToolFile) -> bool:
    """Whether rows of torchtune's data sets hold images."""
    components = find_texts(settings, "_component_")
    return any(".datasets.multimodal." in each for each in components)


def add_tokenizers_turns(settings: ToolFile, conversion: Conversion) -> None:
    """Adds the chat format that torchtune's tokenizers and mistral-common have built in, whatever
    the files say.
    """
    if settings.get("tokenizer_use_mistral_common"):
        conversion.remarks.append(ANSWERS_STRIPPED)
    if settings.get("tokenizer_use_mistral_common") and conversion.images:
        conversion.add_difference("tokenizer_use_mistral_common", True, COMMON_TURNS_OF_IMAGES)
    elif settings.get("tokenizer_use_mistral_common"):
        _add_mistral_turns(settings, conversion)
    tokenizer = read_section(settings, "tokenizer")
    component = str(tokenizer.get("_component_"))
    name = TOKENIZERS.get(component.rsplit(".", 1)[-1])
    if component.endswith("llama3_2_vision_transform") and not shows_images(settings):
        name = "llama3"  # the model's own writes a system message into a row without images
    elif component.endswith("_transform"):
        conversion.remarks += [MESSAGES_TRIMMED, HEADER_TRAINED]
    data = str(read_section(settings, "dataset").get("_component_"))
    if name is None or tokenizer.get("prompt_template") or data.endswith("text_completion_dataset"):
        return
    conversion.recipe["chat_template"] = name
    compare_turns("tokenizer._component_", component, conversion)
    conversion.remarks += OF_TOKENIZERS.get(name, ())
    if (
        name in ("llama3", "chatml", "phi3", "phi4")
        and conversion.recipe.get("assistant_only_loss") is not False
    ):
        conversion.remarks.append(HEADER_TRAINED)


# encode_user_message of mistral-common's third version, which is that of the second
SYSTEM_LAST = (
    "of a row with a system message and several answers one text is made there, with that message "
    "in the last question alone; here each answer has a text, with it in the last question of that"
)
COMMON_TURNS_OF_IMAGES = (
    "mistral-common writes a system message only where a row has one, and an image at the end of a "
    "question before its words; here the tokenizer's template decides, which may have a system "
    "message of its own"
)
# _convert_content_parts of ChatTemplateStrategy, whose images come by another way
THOUGHTS_LEFT_OUT = (
    "an answer's parts of type thinking are left out there, in 0.18 and 0.21; here they are its "
    "reasoning"
)


def _add_mistral_turns(settings: ToolFile, conversion: Conversion) -> None:
    model = str(settings.get("base_model")).lower()
    name = next(
        (name for pattern, name in MISTRAL_COMMON.items() if re.search(pattern, model)), None
    )
    kinds = find_texts(settings, "type")
    are_turns = any(kind.startswith("chat_template") for kind in kinds) and not settings.get("rl")
    if are_turns:
        conversion.add_difference("tokenizer_use_mistral_common", True, THOUGHTS_LEFT_OUT)
    if name in WITH_SYSTEM_LAST and are_turns:
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
SAVED_BY_FACTORY = ("chatml",)  # replace_jinja_template, of the names in TEMPLATES
# add_eos of its trainers, which get Axolotl's rows as texts
SCORED_EOS = "the EOS token follows {} there unless it is that, and is scored; it is not here"
# add_bos_token_if_needed and add_eos_token_if_needed of its ORPO and CPO trainers
ENDS_ADDED = (
    "the tokenizer's BOS token begins a prompt there, and its EOS token ends an answer and is "
    "scored, also where the template writes neither; here what the template writes"
)
SCORED_BREAK = (
    "chat_template: what it writes after the end of an answer, as ChatML's line break, is scored "
    "too there"
)
# apply_chat_template of TRL's data_utils.py, by which a side is all that follows what both share
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
# of a template that is not known here
MAYBE_BOS = (
    "chat_template: a prompt begins with the tokenizer's BOS token there, where it has one, also "
    "under a template that writes none; not here"
)
ASKED_WITH_THOUGHT = "the prompt of a pair ends with an empty thought there, not here"
WITHOUT_BOS = ("chatml", "granite", "phi3", "phi4", "qwen", "qwen3", "qwen3.5", "qwen3.6")
OTHER_ENDS = (
    "the EOS token alone ends a trained turn there: where the tokenizer's template ends turns with "
    "another token, that is trained here alone"
)
CHANNEL = (
    "<|channel|> at the start of an answer is not trained there, nor the name and <|message|> "
    "after it where a row has no thinking; all three are here"
)


def report_turn_ends(settings: ToolFile, conversion: Conversion) -> None:
    """Reports where Axolotl leaves the start of a turn untrained, which gpt-oss writes itself, or
    its end: it trains the EOS token alone, without `eot_tokens`.
    """
    entries = settings.get("datasets")
    entries = entries if isinstance(entries, list) else []
    kinds = [str(entry.get("type")) for entry in entries if isinstance(entry, dict)]
    if settings.get("rl") or not any(kind.startswith("chat_template") for kind in kinds):
        return
    name = name_model(settings)
    if guess_family(name) == "gpt_oss":
        for note in (CHANNEL, EARLIER_THOUGHTS, EARLIER_ENDS):
            conversion.add_difference("datasets.type", "chat_template", note)
    has_own = not settings.get("tokenizer_use_mistral_common")  # which comes later
    if has_own and "chat_template" not in conversion.recipe and not conversion.images:
        report_own_thoughts(name, "datasets.type", "chat_template", conversion)
    end = _find_other_end(name, conversion)
    if end is not None and not settings.get("eot_tokens"):
        note = (
            f"the EOS token alone ends a trained turn there: {end} is not trained unless it is "
            "that; it is here"
        )
        conversion.add_difference("eot_tokens", settings.get("eot_tokens"), note)
    is_unknown = (
        "chat_template" not in conversion.recipe
        and guess_family(name) not in FAMILY_TEMPLATES
        and not any(re.search(pattern, name.lower()) for pattern, _ in ENDS_AS_EOS)
    )
    if has_own and is_unknown and not (settings.get("eot_tokens") or conversion.images):
        conversion.add_remark("eot_tokens", None, OTHER_ENDS)


def _find_other_end(name: str, conversion: Conversion) -> str | None:
    """Returns the token at the end of a turn; None where it is not known, or the model's EOS."""
    recipe = conversion.recipe
    template = str(recipe.get("chat_template") or FAMILY_TEMPLATES.get(guess_family(name) or ""))
    end = TURN_ENDS.get(template)
    eos = recipe.get("special_tokens", {}).get("eos_token")
    if eos is None:
        eos = next(
            (token for pattern, token in ENDS_AS_EOS if re.search(pattern, name.lower())), None
        )
    return None if eos == end else end


def report_saved_template(settings: ToolFile, conversion: Conversion) -> None:
    """Reports which template a tool saves with the tokenizer where it writes turns by another."""
    ours = conversion.recipe.get("chat_template")
    if ours is None or conversion.images or conversion.is_factory_v1:
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


def report_scored_ends(settings: ToolFile, conversion: Conversion) -> None:
    """Reports what TRL's trainers of preferences, which are Axolotl's too, read before a prompt and
    score after an answer.
    """
    rows = find_method_facts(conversion.recipe).rows
    if rows not in ("pairs", "ratings"):
        return
    if conversion.tool == "TRL" and rows == "pairs":
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
    end = _find_other_end(name_model(settings), conversion)
    if end is not None and not adds_ends:
        conversion.add_remark("rl", settings.get("rl"), SCORED_EOS.format(end))
    if conversion.recipe.get("chat_template") == "gemma4":
        template = settings.get("chat_template")
        conversion.add_difference("chat_template", template, ASKED_WITH_THOUGHT)
    if adds_ends:
        return
    template = conversion.recipe.get("chat_template")
    template = template or FAMILY_TEMPLATES.get(guess_family(name_model(settings)) or "")
    if template in WITHOUT_BOS:
        conversion.remarks.append(TOKENIZERS_BOS)
    elif template not in TEMPLATES.values():
        conversion.remarks.append(MAYBE_BOS)


def report_own_thoughts(name: str, key: str, value: str, conversion: Conversion) -> None:
    """Reports the empty thoughts that a tokenizer's own template writes; `key: value` asks for
    it.
    """
    lower = name.lower()
    is_marked = conversion.tool != "Automodel" or conversion.images in MARKED_BY_HEADER
    is_marked = is_marked and not conversion.is_factory_v1
    own_thought = THOUGHT_WHOLE if conversion.images and is_marked else OWN_THOUGHT
    # LLaMA-Factory's v1 splits the turns as here
    is_one_text = conversion.tool in ("Axolotl", "Automodel")
    if THINKING.search(lower):
        conversion.add_difference(key, value, own_thought)
        if is_one_text and FORGETTING.search(lower):
            conversion.add_difference(key, value, EARLIER_THOUGHTS)
    elif THINKING_LAST.search(lower):
        if is_one_text:
            conversion.add_difference(key, value, ONE_TEXT)
        if conversion.tool != "Axolotl" or conversion.images:
            conversion.add_difference(key, value, own_thought)
    elif MAYBE_THINKING.search(lower):
        conversion.remarks.append(f"{key}: {value}   ({own_thought})")
        if is_one_text:
            conversion.remarks.append(f"{key}: {value}   ({MAYBE_EARLIER_THOUGHTS})")


def compare_scored_turns(settings: ToolFile, conversion: Conversion) -> None:
    """Reports where a reward model reads another text there, in place of which tokens are trained:
    one is scored.
    """
    conversion.differences = [line for line in conversion.differences if ONE_TEXT not in line]
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
        if template in LOST_WORDS:
            conversion.add_difference(
                "chat_template", template, "words of the answers are left out there"
            )


def compare_turns(key: str, value: str, conversion: Conversion) -> None:
    """Reports where their template of that name and ours differ: in the text, or in the tokens that
    are trained.
    """
    note = OTHER_TURNS.get((conversion.tool, value.rsplit(".", 1)[-1]))
    if note is not None:
        conversion.add_difference(key, value, note)
    if conversion.tool == "Axolotl" and value in ("gemma4", "gemma4_unified"):
        conversion.add_remark(key, value, CALLS_THOUGHT_OF)
    if conversion.tool == "Axolotl" and value in SPACED:
        conversion.add_remark(key, value, SPACE_TRAINED)
    if conversion.tool == "Axolotl" and value in OTHER_SPACE:
        conversion.add_remark(key, value, OTHER_SPACE[value])
    if conversion.tool == "Axolotl" and value in OTHER_PROMPTS:
        conversion.add_remark(key, value, PROMPT_ENDS.format(OTHER_PROMPTS[value]))
    _compare_tools(key, value, conversion)
    name = conversion.recipe["chat_template"]
    if conversion.tool == "LLaMA-Factory" and name in BREAKS:
        conversion.remarks.append(f"{key}: {value}   ({BREAK_TRAINED})")
    if conversion.tool == "LLaMA-Factory" and name in TRIMMED:
        conversion.remarks.append(f"{key}: {value}   ({SPACE_KEPT})")


def _compare_tools(key: str, value: str, conversion: Conversion) -> None:
    """Reports what a template of that name writes otherwise of a row with tools."""
    if conversion.tool == "Axolotl" and value in OTHER_TOOLS:
        conversion.add_remark(key, value, OTHER_TOOLS[value])
    if conversion.tool == "LLaMA-Factory" and value not in SAME_TOOLS:
        conversion.add_remark(key, value, TOOLS_IN_ITS_WORDS)
