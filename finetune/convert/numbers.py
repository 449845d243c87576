"""Where a step's numbers differ from those of another tool's trainer on the same rows: its rate,
its labels, and what is trained.
"""

import re
from collections.abc import Mapping
from typing import Any

from finetune.config.schema import recipe_keys
from finetune.convert.automodel import CUT_BEFORE_ANSWER, NEXT_IN_PLACE
from finetune.convert.axolotl import TEXTS_CUT
from finetune.convert.chat_templates import BREAKING_TEMPLATES, TRIMMING_TEMPLATES
from finetune.convert.counterparts import ToolFile
from finetune.convert.factory import is_of_mcore
from finetune.convert.foreign_values import convert_number
from finetune.convert.hints import find_texts
from finetune.convert.model_names import guess_family
from finetune.convert.objectives import find_masked_diffusion
from finetune.convert.value_conversion import Conversion, find_method_facts, read_section

# get_scheduler of transformers, and torchtune's copy of it; Automodel has a start of its own
WARMED_EARLIER = (
    "warm-up: the rate of its first step is 0 there; here each of its steps has the rate of the "
    "next one there"
)
# get_warmup_steps of transformers 4, and TrainingArguments of 5.12
BOTH_WARMUPS = (
    "warmup_steps beside it decides here, and under transformers 4 there; under 5 the share does"
)
# `labels` of data/examples.py are those of the whole document
LABEL_BEHIND_CUT = (
    "max_length: the last token of a row that is cut has the next one of the row as its label "
    "here, none there"
)
# `truncate` of torchtune's data/_utils.py
EOS_AT_CUT = (
    "max_length: the EOS token stands in place of the last token of a row that is cut there, and "
    "is not trained; here that token stays, and has the next one of the row as its label"
)
# _prepare_sample of torchtune's TextCompletionDataset
TEXT_CUT = (
    "max_length: a text is cut to one token less there, and its last token has no label; here that "
    "of a text that is cut has the next one of the text"
)
# tokenize_messages of torchtune's Qwen2Tokenizer and Qwen2_5Tokenizer, in 0.6.1 and 0.7, which
# masks the last token whether a row is cut or not
OF_QWEN = re.compile(r"^torchtune\.models\.qwen\w+\.\w+_tokenizer$")
END_MASKED = (
    "where a length is named, the last token of every row, which ends its last answer, is not "
    "trained there: the model does not learn to end; here it is trained"
)
# torchtune's tokenizers by SentencePiece, tiktoken and GPT-2's files, unlike those for Qwen and of
# Hugging Face's files; and mistral-common, which Axolotl asks by a key
PARSING_TOKENS = re.compile("qwen|hugging_face|HuggingFace")
TYPED_AS_WORDS = (
    "rows: a BOS, EOS or other control token that stands in a text is tokenized as words there, as "
    "that token here"
)
# mask_messages of torchtune's data/_messages.py
SYSTEM_MASKED = "after torchtune 0.6 a system message is not trained there; here it is"
# ModulesToSaveWrapper of peft, which copies a module with its weight
COPIES_WHERE_TIED = (
    "where the output head is the embedding, a copy of each module named is trained there, and "
    "what is not named stays; here it is one parameter"
)
# _set_trainable of peft
NAMES_END_SO = "every module whose name ends so is trained there; here those of that very name"
# ChatTemplateStrategy of Axolotl, which looks for the content of a turn
WORDS_OF_TURNS = (
    "type: chat_template trains what the turns say there, without the marks around those of "
    "others; every token here"
)
# AlpacaDatasetConverter of LLaMA-Factory, whose v1 has a line of its own, and concat_inst_input of
# ms-swift's dataset/preprocessor/core.py
ONE_BREAK = (
    "datasets: one line break stands between instruction and input of a row of alpaca there, two "
    "here"
)
# PretrainDatasetProcessor of LLaMA-Factory, which encodes without special tokens
BOS_BY_KEY = (
    "stage: pt   (a text begins with the BOS token there where the tokenizer says add_bos_token, "
    "as Llama 2's; here where it writes one, as Llama 3's too)"
)
BOS_OF_BLOCKS = (
    "stage: pt   (no text begins with the BOS token there; where the tokenizer says add_bos_token, "
    "as Llama 2's, it stands in place of the first token of a block; here each begins with it "
    "where the tokenizer writes one)"
)
# the trainers of these tools, of which the newest TRL, from 1.9, and Axolotl leave such rows out;
# select_examples of data/data_report.py
UNTRAINED_BY_CUT = (
    "max_length: a row whose answers are cut off whole stays there{}, and trains nothing; here it "
    "is left out"
)
KEEPING_UNTRAINED = {
    ("Automodel", "answers"): "",
    ("torchtune", "answers"): "",
    ("torchtune", "pairs"): "",
    ("ms-swift", "answers"): "",
    ("TRL", "answers"): ", in TRL before 1.9",
    ("TRL", "pairs"): ", in TRL 0.29 to 1.8",  # before, the prompt of a pair was cut
}
# TEACHES_NOTHING of data/groups.py
PAIRS_LEFT_OUT = (
    "rows: a pair of which an answer is empty, or both are the same, stays there; here it is left "
    "out"
)
# zeropower_via_newtonschulz5 of LLaMA-Factory, whose products are not fused with their sums: 2.4 to
# 3% from the iteration in float64 on random matrices, and 1.1 to 1.5% here
ROUNDED_MORE_OFTEN = (
    "the bfloat16 iteration rounds more often there: an update differs by some 3% from the one here"
)
BOUNDS = {"torchtune": "clip_grad_norm", "Automodel": "clip_grad_norm.max_norm"}
ALL_CLIPPED = (
    "every gradient is 0 there, but in torchtune's full_finetune_single_device; here none is "
    "clipped"
)
# xformers_attention_forward of Axolotl, and the kernel's own description
OTHER_ATTENTION = {
    "xformers": (
        "leaves out a scale or a cap of the scores that a family has, as Gemma 2, and in packed "
        "rows its sliding window; here they are computed"
    ),
    "kernels-community/sage-attention": "multiplies in 8 bits there; exact here",
}
# add_eos of TRL, and _tokenize of Axolotl's prompt_tokenizers.py; render of data/render.py
ENDS_OF_TEXTS = (
    "rows: a text that begins with the BOS token gets the tokenizer's before it there, and one "
    "that ends with the EOS token gets no other; here it has one BOS token, and two at its end"
)
# the same, and find_turn of Axolotl's ChatTemplateStrategy
ENDS_OF_ANSWERS = (
    "rows: no EOS token follows an answer there that ends with one, and an empty answer trains "
    "nothing; here one does, and ends an empty answer too"
)
EMPTY_ANSWERS = (
    "rows: an empty answer trains nothing there, and a message's train or weight is read by "
    "message_field_training alone; here the end of an empty answer is trained, and both are read"
)
# tokenize_fn of TRL's trainers, ChatTemplateStrategy of Axolotl, and Automodel's
# formatting_utils.py, which encode a prompt and its answer as one text
JOINED_BREAKS = (
    "rows: a line break at the start of an answer and one that ends its prompt, as ChatML's, are "
    "one token there where the tokenizer has one for both{}; two here"
)
# those of its versions that take as many tokens from the whole as the prompt has alone
LEFT_OUT = {
    ("TRL", "dpo"): ", which TRL 0.29 to 1.14 leaves out, and earlier ones do not join",
    ("TRL", "kto"): ", which TRL 1.3 to 1.14 leaves out",
    ("Axolotl", "dpo"): ", which is left out",
    ("Axolotl", "kto"): ", which is left out",
}
OF_TEXTS = ", in a row of two texts, prompt and completion"
OWN_TEMPLATE = re.compile(r"\{|/|\.jinja$")  # a template's text, or its file
ENCODING_AS_ONE = ("TRL", "Axolotl", "Automodel")
ONE_LINE = ("text", "squad", "hellaswag")  # kinds of rows without such a break
TIED = re.compile("embed|wte|lm_head|embed_out")
SCORING = ("score", "classifier")  # no other module has a name that ends so


def report_numbers(settings: ToolFile, conversion: Conversion) -> None:
    """Reports the differences of a step that no key names."""
    recipe = conversion.recipe
    rows = find_method_facts(recipe).rows
    steps = recipe.get("warmup_steps")
    share = recipe.get("warmup_ratio", recipe_keys()["warmup_ratio"].default)
    is_warmed = share if steps is None else steps
    if is_warmed and (conversion.tool != "Automodel" or _starts_at_zero(settings)):
        conversion.remarks.append(WARMED_EARLIER)
    if steps and settings.get("warmup_ratio") and conversion.tool in ("TRL", "LLaMA-Factory"):
        conversion.add_remark("warmup_ratio", settings["warmup_ratio"], BOTH_WARMUPS)
    # masked diffusion masks no token that is the label behind a cut, and mcore_adapter's rows have
    # one more token
    is_cut = (
        recipe.get("overlength") not in ("drop", "error")
        and find_masked_diffusion(settings) is None
        and not (conversion.tool == "LLaMA-Factory" and is_of_mcore(settings))
    )
    if is_cut and rows in ("answers", "pairs", "ratings"):
        conversion.remarks.append(_describe_cut(settings, conversion))
        _report_untrained(conversion)
    if rows in ("pairs", "scored_pairs"):
        conversion.remarks.append(PAIRS_LEFT_OUT)
    if settings.get("use_muon"):
        conversion.add_remark("use_muon", True, ROUNDED_MORE_OFTEN)
    _report_clipping(settings, conversion)
    _report_attention(settings, conversion)
    _report_copies(conversion)
    _report_row_texts(settings, conversion)
    _report_prompts(settings, conversion)
    _report_masked_end(settings, conversion)
    _report_typed_tokens(settings, conversion)
    _report_ends(settings, conversion)
    _report_joined_breaks(conversion)


def _describe_cut(settings: ToolFile, conversion: Conversion) -> str:
    """Says how the end of a row that is cut differs."""
    if conversion.tool != "torchtune":
        return LABEL_BEHIND_CUT
    return TEXT_CUT if _holds_texts(settings) else EOS_AT_CUT


def _report_untrained(conversion: Conversion) -> None:
    """Reports that a row of which a cut leaves nothing to train on is no row here."""
    recipe = conversion.recipe
    rows = find_method_facts(recipe).rows
    sources = recipe.get("datasets", ())
    versions = KEEPING_UNTRAINED.get((conversion.tool, rows))
    where = ""
    if rows == "answers" and recipe.get("assistant_only_loss") is False:
        has_prompts = any(_has_prompt(each, True, conversion.tool == "TRL") for each in sources)
        where = OF_TEXTS
    else:
        has_prompts = any(each.get("type") != "text" for each in sources)
    said_elsewhere = (CUT_BEFORE_ANSWER, NEXT_IN_PLACE)
    is_said = any(note in line for line in conversion.remarks for note in said_elsewhere)
    if versions is not None and has_prompts and not is_said:
        conversion.remarks.append(UNTRAINED_BY_CUT.format(versions + where))


def _holds_texts(settings: ToolFile) -> bool:
    """Whether a file of torchtune's names rows of plain text."""
    return "text_completion_dataset" in str([settings.get(key) for key in ("dataset", "datasets")])


def _starts_at_zero(settings: ToolFile) -> bool:
    """Whether Automodel's warm-up starts as transformers' does."""
    return read_section(settings, "lr_scheduler").get("init_lr") == 0


def _report_clipping(settings: ToolFile, conversion: Conversion) -> None:
    """Reports a bound of 0, by which torch's clip_grad_norm_ multiplies."""
    key = BOUNDS.get(conversion.tool)
    bound = settings.get("clip_grad_norm")
    if isinstance(bound, dict):
        bound = bound.get("max_norm")
    if key and bound is not None and convert_number(bound) == 0:
        conversion.add_difference(key, bound, ALL_CLIPPED)


def _report_attention(settings: ToolFile, conversion: Conversion) -> None:
    """Reports the kernels of Axolotl that compute another attention than ours."""
    if conversion.tool != "Axolotl":
        return
    name = settings.get("attn_implementation")
    if name in OTHER_ATTENTION:
        conversion.add_difference("attn_implementation", name, OTHER_ATTENTION[name])
    elif settings.get("xformers_attention"):
        conversion.add_difference("xformers_attention", True, OTHER_ATTENTION["xformers"])


def _report_prompts(settings: ToolFile, conversion: Conversion) -> None:
    """Reports which tokens of a conversation are trained where a file asks for all of them."""
    answers = find_method_facts(conversion.recipe).rows == "answers" and not conversion.images
    is_asked = settings.get("train_on_inputs") and "chat_template" in find_texts(settings, "type")
    if conversion.tool == "Axolotl" and answers and is_asked:
        conversion.add_difference("train_on_inputs", True, WORDS_OF_TURNS)
    if conversion.tool == "torchtune" and read_section(settings, "dataset").get("train_on_input"):
        conversion.add_remark("dataset.train_on_input", True, SYSTEM_MASKED)


def _report_masked_end(settings: ToolFile, conversion: Conversion) -> None:
    """Reports that torchtune's tokenizers for Qwen leave the end of a row out."""
    tokenizer = read_section(settings, "tokenizer")
    longest = tokenizer.get("max_seq_len")
    name = str(tokenizer.get("_component_"))
    rows = find_method_facts(conversion.recipe).rows
    if (
        longest
        and OF_QWEN.search(name)
        and rows in ("answers", "pairs")
        and not _holds_texts(settings)
    ):
        conversion.add_difference("tokenizer.max_seq_len", longest, END_MASKED)


def _report_typed_tokens(settings: ToolFile, conversion: Conversion) -> None:
    """Reports that a special token that stands in a row is none for some tools' tokenizers."""
    component = str(read_section(settings, "tokenizer").get("_component_"))
    is_of_torchtune = conversion.tool == "torchtune" and not PARSING_TOKENS.search(component)
    if is_of_torchtune or settings.get("tokenizer_use_mistral_common"):
        conversion.remarks.append(TYPED_AS_WORDS)


def _report_ends(settings: ToolFile, conversion: Conversion) -> None:
    """Reports how texts and answers begin and end where they hold such a token, or nothing."""
    if find_method_facts(conversion.recipe).rows != "answers" or conversion.images:
        return
    if conversion.tool == "TRL":
        conversion.remarks.append(ENDS_OF_TEXTS)
    if conversion.tool != "Axolotl":
        return
    sources = conversion.recipe.get("datasets", ())
    if any(TEXTS_CUT in line for line in conversion.remarks):  # type: completion
        conversion.remarks.append(ENDS_OF_TEXTS)
    if any(each.get("answers_apart") for each in sources):
        conversion.remarks.append(ENDS_OF_ANSWERS)
    elif any(each.get("type") != "text" for each in sources):
        conversion.remarks.append(EMPTY_ANSWERS)


def _report_joined_breaks(conversion: Conversion) -> None:
    """Reports where the first token of an answer is the last one of its prompt, too."""
    recipe = conversion.recipe
    rows = find_method_facts(recipe).rows
    is_compared = rows in ("pairs", "ratings")
    if conversion.tool not in ENCODING_AS_ONE or conversion.images:
        return
    may_be_texts = conversion.tool == "TRL"
    if not _may_join_breaks(recipe, may_be_texts) or not (is_compared or rows == "answers"):
        return
    # a row of turns is one text here too where all of it is trained
    is_whole = rows == "answers" and recipe.get("assistant_only_loss") is False
    if any(_has_prompt(each, is_whole, may_be_texts) for each in recipe.get("datasets", ())):
        where = OF_TEXTS if is_whole else ""
        left_out = LEFT_OUT.get((conversion.tool, str(recipe.get("method"))), where)
        conversion.remarks.append(JOINED_BREAKS.format(left_out))


def _may_join_breaks(recipe: Mapping[str, Any], may_be_texts: bool) -> bool:
    """Whether the header of an answer may end with a line break, and an answer begin with one."""
    template = recipe.get("chat_template")
    if template is None:
        family = guess_family(str(recipe.get("model_name_or_path")))
        # whose own templates trim an answer
        return may_be_texts or not str(family).startswith("gemma")
    is_named = template in BREAKING_TEMPLATES and template not in TRIMMING_TEMPLATES
    return is_named or OWN_TEMPLATE.search(str(template)) is not None


def _has_prompt(entry: Mapping[str, Any], is_whole: bool, may_be_texts: bool) -> bool:
    """Whether rows of a data set have answers whose tokens begin where those of a prompt end."""
    if is_whole:
        kind = entry.get("type", "prompt_completion")
        return may_be_texts and "messages_column" not in entry and kind == "prompt_completion"
    return entry.get("type") not in ONE_LINE and not entry.get("answers_apart")


def _report_copies(conversion: Conversion) -> None:
    """Reports which modules peft trains for `modules_to_save`."""
    names = conversion.recipe.get("modules_to_save") or []
    tied = [name for name in names if TIED.search(str(name))]
    if tied:
        conversion.add_remark("modules_to_save", tied, COPIES_WHERE_TIED)
    others = [name for name in names if name not in (*tied, *SCORING)]
    if others:
        conversion.add_difference("modules_to_save", others, NAMES_END_SO)


def _report_row_texts(settings: ToolFile, conversion: Conversion) -> None:
    """Reports the tokens that LLaMA-Factory and ms-swift write otherwise around and within a row's
    texts.
    """
    if conversion.tool not in ("LLaMA-Factory", "ms-swift") or conversion.is_factory_v1:
        return
    if settings.get("stage") == "pt":
        are_joined = settings.get("packing", True)
        conversion.remarks.append(BOS_OF_BLOCKS if are_joined else BOS_BY_KEY)
        return
    sources = conversion.recipe.get("datasets", ())
    kinds = {"messages" if "messages_column" in each else each.get("type") for each in sources}
    if kinds & {None, "alpaca"}:
        conversion.remarks.append(ONE_BREAK)
