"""Where a training step differs from the other tool's on the same rows: learning rate, tokens,
labels, and what is trained.

A comment above a text names the code, mostly the other tool's, whose behavior the text describes.
"""

import re
from collections.abc import Mapping
from typing import Any

from finetune.config.schema import recipe_keys
from finetune.convert.automodel import CUT_BEFORE_ANSWER, NEXT_IN_PLACE
from finetune.convert.axolotl import TEXTS_CUT
from finetune.convert.chat_templates import BREAKING_TEMPLATES, TRIMMING_TEMPLATES
from finetune.convert.counterparts import ToolFile
from finetune.convert.factory import is_of_megatron
from finetune.convert.foreign_values import convert_number, find_matches
from finetune.convert.hints import list_types
from finetune.convert.model_names import guess_family
from finetune.convert.objectives import find_masked_diffusion
from finetune.convert.shared import EXPERIMENTAL_METHODS, find_muon_key
from finetune.convert.value_conversion import (
    Conversion,
    find_method_facts,
    read_section,
    read_value,
)

# get_scheduler of transformers, and torchtune's copy of it. Automodel's warm-up begins at its own
# init_lr.
WARMED_EARLIER = (
    "warm-up: the rate of its first step is 0 there; here each of its steps has the rate of the "
    "next one there"
)
# __init__ of JaggedLRRestartScheduler, of Axolotl's utils/schedulers.py
RATES_AHEAD = (
    "apart from restarts, each step after the warm-up has the rate there that the next one has "
    "here, so that of the last one is 0"
)
# get_warmup_steps of transformers 4, and TrainingArguments of 5.12
BOTH_WARMUPS = (
    "warmup_steps beside it decides here, and under transformers 4 there; under 5 the share does"
)
# compute_loss of ms-swift's trainers/seq2seq_trainer.py, LabelSmoother of transformers up to 5.12
# (LLaMA-Factory takes up to 5.8), and training_step of its Trainer
SMOOTHED_MEANS = (
    "the sum of the micro-batches' means over their labels there, before clipping: about "
    "gradient_accumulation_steps times the processes as much; here the mean over the labels of the "
    "whole step"
)
# Here data/examples.py cuts the labels of the whole document: the last one is the next token.
LABEL_BEHIND_CUT = (
    "max_length: the last token of a row that is cut has the next one of the row as its label "
    "here, none there"
)
# `truncate` of torchtune's data/_utils.py
EOS_AT_CUT = (
    "max_length: the EOS token stands in place of the last token of a row that is cut there, and "
    "is {}; here that token stays, and has the next one of the row as its label"
)
# Pattern of the component of torchtune's tokenizer -> whether that EOS token is trained: the last
# mask of tokenize_messages, or of tokenize_messages_no_special_tokens.
ENDS_AT_CUT = {
    r"\.(llama2|mistral|gemma)_tokenizer$": "trained if the cut message is",
    r"\.phi3_mini_tokenizer$": "not trained in 0.7, but in 0.6 if the cut message is",
    "": "not trained",
}
# _prepare_sample of torchtune's TextCompletionDataset
TEXT_CUT = (
    "max_length: a text is cut to one token less there, and its last token has no label; here that "
    "of a text that is cut has the next one of the text"
)
# tokenize_messages of torchtune's Qwen2Tokenizer and Qwen2_5Tokenizer, in 0.6.1 and 0.7: it masks
# the last token of every row, cut or not
QWEN_TOKENIZER = re.compile(r"^torchtune\.models\.qwen\w+\.\w+_tokenizer$")
END_MASKED = (
    "where a length is named, the last token of every row, which ends its last answer, is not "
    "trained there: the model does not learn to end; here it is trained"
)
# torchtune's tokenizers that recognize special tokens within a text. Those by SentencePiece,
# tiktoken and GPT-2's files do not; nor does mistral-common, which Axolotl uses by a key.
PARSING_TOKENS = re.compile("qwen|hugging_face|HuggingFace")
TYPED_AS_WORDS = (
    "rows: a BOS, EOS or other control token that stands in a text is tokenized as words there, as "
    "that token here"
)
# mask_messages of torchtune's data/_messages.py
SYSTEM_MASKED = "after torchtune 0.6 a system message is not trained there; here it is"
# ModulesToSaveWrapper of peft copies a module with its weight.
COPIES_WHERE_TIED = (
    "where the output head is the embedding, a copy of each module named is trained there, and "
    "what is not named stays; here it is one parameter"
)
# _set_trainable of peft
NAMES_END_SO = "every module whose name ends so is trained there; here those of that very name"
# ChatTemplateStrategy of Axolotl trains the content that it finds of each turn.
WORDS_OF_TURNS = (
    "type: chat_template trains what the turns say there, without the marks around those of "
    "others; every token here"
)
# AlpacaDatasetConverter of LLaMA-Factory before v1, and concat_inst_input of ms-swift's
# dataset/preprocessor/core.py
ONE_BREAK = (
    "datasets: one line break stands between instruction and input of a row of alpaca there, two "
    "here"
)
# PretrainDatasetProcessor of LLaMA-Factory encodes a text without special tokens.
BOS_BY_KEY = (
    "stage: pt   (a text begins with the BOS token there where the tokenizer says add_bos_token, "
    "as Llama 2's; here where it writes one, as Llama 3's too)"
)
BOS_OF_BLOCKS = (
    "stage: pt   (no text begins with the BOS token there; where the tokenizer says add_bos_token, "
    "as Llama 2's, it stands in place of the first token of a block; here each begins with it "
    "where the tokenizer writes one)"
)
# Here select_examples of data/data_report.py leaves the row out.
UNTRAINED_BY_CUT = (
    "max_length: a row whose answers are cut off whole stays there{}, and trains nothing; here it "
    "is left out"
)
# (tool, kind of rows) -> the versions that keep such a row, "" for all. Axolotl, and TRL from 1.9,
# leave it out too. TRL cuts the rows of EXPERIMENTAL_METHODS otherwise.
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
# The same where _check_rejected_response of ms-swift's dataset/preprocessor/core.py is before it.
EMPTY_LEFT_OUT = "rows: a pair of which an answer is empty stays there; here it is left out"
# zeropower_via_newtonschulz5 of LLaMA-Factory does not fuse products with sums. On random matrices
# it is 2.4 to 3% away from the iteration in float64; ours is 1.1 to 1.5% away.
ROUNDED_MORE_OFTEN = (
    "the bfloat16 iteration rounds more often there: an update differs by some 3% from the one here"
)
# step of their Muon: buf1 / (eps + buf2.sqrt()), which is then scaled by both corrections
EPSILON_BEFORE = (
    "its AdamW, for the embedding, the head and vectors, adds adam_epsilon before the moments are "
    "corrected there: in the first steps an element with a small gradient moves less than here"
)
CLIPPING_KEYS = {"torchtune": "clip_grad_norm", "Automodel": "clip_grad_norm.max_norm"}
ALL_CLIPPED = (
    "every gradient is 0 there, but in torchtune's full_finetune_single_device; here none is "
    "clipped"
)
# Attention kernels of Axolotl's whose results are not ours -> how they differ. Sources:
# xformers_attention_forward of Axolotl, and the description of the sage-attention kernel.
OTHER_ATTENTION = {
    "xformers": (
        "leaves out a scale or a cap of the scores that a family has, as Gemma 2, and in packed "
        "rows its sliding window; here they are computed"
    ),
    "kernels-community/sage-attention": "multiplies in 8 bits there; exact here",
}
# add_eos of TRL, and _tokenize of Axolotl's prompt_tokenizers.py; here render of data/render.py
ENDS_OF_TEXTS = (
    "rows: a text that begins with the BOS token gets the tokenizer's before it there, and one "
    "that ends with the EOS token gets no other; here it has one BOS token, and two at its end"
)
# tokenize_prompt of Axolotl's prompt_strategies/completion.py; here _parse_text of data/formats.py
EMPTY_TEXTS = (
    "rows: an empty text is left out there; here a run stops at one, unless on_bad_row: skip "
    "leaves it out"
)
# the same functions as for texts, and find_turn of Axolotl's ChatTemplateStrategy, which compares
# an answer with [[dummy_message]]
ENDS_OF_ANSWERS = (
    "rows: no EOS token follows an answer there that ends with one, and an empty answer trains "
    "nothing; here one does, and ends an empty answer too"
)
EMPTY_ANSWERS = (
    "rows: an empty answer trains nothing there, nor do [[ at the start of an answer and ]] at its "
    "end, and a message's train or weight is read by message_field_training alone; here the end of "
    "an empty answer is trained, all of any other, and both are read"
)
# tokenize_fn of TRL's trainers, ChatTemplateStrategy of Axolotl, and Automodel's
# formatting_utils.py encode a prompt and its answer as one text.
JOINED_BREAKS = (
    "rows: a line break at the start of an answer and one that ends its prompt, as ChatML's, are "
    "one token there where the tokenizer has one for both{}; two here"
)
# (tool, method) -> the versions that lose the joined token: they take the answer from the tokens of
# the joined text, after as many tokens as the prompt has by itself
LEFT_OUT = {
    ("TRL", "dpo"): ", which TRL 0.29 to 1.14 leaves out, and earlier ones do not join",
    ("TRL", "kto"): ", which TRL 1.3 to 1.14 leaves out",
    ("Axolotl", "dpo"): ", which is left out",
    ("Axolotl", "kto"): ", which is left out",
}
OF_TEXTS = ", in a row of two texts, prompt and completion"
# tokenize_row of TRL's DPOTrainer, whose tokenizer gets an answer without its prompt
SPACE_BEFORE_ANSWERS = (
    "rows: until 0.28 an answer is tokenized as a text alone there, and its first token begins "
    "with the space that tokenizers as Llama 2's and the first Mistral's write before a text; "
    "here it is tokenized behind its prompt, after whose words or line break they write none"
)
# families that have such tokenizers, None for one that is not known, and names of their models
# that have others
SPACING_FAMILIES = (None, "llama", "mistral", "mixtral")
SPACING_NONE = re.compile(r"llama-?3|smollm|nemo")
OWN_TEMPLATE = re.compile(r"\{|/|\.jinja$")  # a template's text, or its file
# tools that encode a prompt and its answer as one text
ENCODING_AS_ONE = ("TRL", "Axolotl", "Automodel")
# types of rows without a line break between prompt and answer
ONE_LINE = ("text", "squad", "hellaswag")
# modules whose weight the embedding and the output head may share
TIED = re.compile("embed|wte|lm_head|embed_out")
SCORING = ("score", "classifier")  # no other module has a name that ends so


def report_numbers(settings: ToolFile, conversion: Conversion) -> None:
    """Reports how a training step there differs on the same rows, beyond what single keys say."""
    recipe = conversion.recipe
    rows = find_method_facts(recipe).rows
    steps = recipe.get("warmup_steps")
    share = recipe.get("warmup_ratio", recipe_keys()["warmup_ratio"].default)
    warmup = share if steps is None else steps
    restarts = settings.get("jagged_restart_steps")  # of Axolotl, as lr_quadratic_warmup
    if restarts:
        conversion.add_remark("jagged_restart_steps", restarts, RATES_AHEAD)
    has_line = restarts or settings.get("lr_quadratic_warmup")
    schedules = (settings.get("lr_scheduler_type"), settings.get("lr_scheduler"))
    warms_as_here = "cosine_warmup_with_min_lr" in schedules
    starts_at_zero = (
        conversion.tool != "Automodel" or read_value(settings, "lr_scheduler.init_lr") == 0
    )
    if warmup and not has_line and starts_at_zero and not warms_as_here:
        conversion.remarks.append(WARMED_EARLIER)
    written_share = settings.get("warmup_ratio")
    if steps and written_share is not None and conversion.tool in ("TRL", "LLaMA-Factory"):
        conversion.add_remark("warmup_ratio", written_share, BOTH_WARMUPS)
    smoothing = settings.get("label_smoothing_factor")
    sums_means = conversion.tool in ("LLaMA-Factory", "ms-swift")
    if smoothing and sums_means and rows == "answers" and recipe.get("label_smoothing"):
        conversion.add_difference("label_smoothing_factor", smoothing, SMOOTHED_MEANS)
    # Under masked diffusion no label is the token after a cut. Megatron's rows have one more token,
    # which is that label.
    is_cut = (
        recipe.get("overlength") not in ("drop", "error")
        and find_masked_diffusion(settings) is None
        and not (conversion.tool == "LLaMA-Factory" and is_of_megatron(settings))
    )
    if is_cut and rows in ("answers", "pairs", "ratings"):
        conversion.remarks.append(_describe_cut(settings, conversion))
        _report_untrained(settings, conversion)
    if rows in ("pairs", "scored_pairs"):
        is_swift = conversion.tool == "ms-swift"
        conversion.remarks.append(EMPTY_LEFT_OUT if is_swift else PAIRS_LEFT_OUT)
    muon_key = find_muon_key(conversion.tool, settings, recipe)
    if muon_key is not None:
        conversion.add_remark(muon_key, settings[muon_key], ROUNDED_MORE_OFTEN)
        if not recipe.get("use_peft"):  # adapters are matrices of layers
            conversion.add_remark(muon_key, settings[muon_key], EPSILON_BEFORE)
    _report_clipping(settings, conversion)
    _report_attention(settings, conversion)
    _report_copies(conversion)
    _report_row_texts(settings, conversion)
    _report_prompts(settings, conversion)
    _report_tokenizer(settings, conversion)
    _report_ends(settings, conversion)
    _report_joined_breaks(settings, conversion)
    _report_spaces(conversion)


def _describe_cut(settings: ToolFile, conversion: Conversion) -> str:
    """Returns the remark on how the last token or label of a row differs where the row is cut."""
    if conversion.tool != "torchtune":
        return LABEL_BEHIND_CUT
    if _holds_texts(settings):
        return TEXT_CUT
    component = str(read_value(settings, "tokenizer._component_"))
    return EOS_AT_CUT.format(next(find_matches(ENDS_AT_CUT, component)))


def _report_untrained(settings: ToolFile, conversion: Conversion) -> None:
    """Reports that a row stays there if a cut removes all of its answers, and is left out here.

    A remark on Automodel's dataset.seq_length may say so already.
    """
    recipe = conversion.recipe
    rows = find_method_facts(recipe).rows
    sources = recipe.get("datasets", ())
    versions = KEEPING_UNTRAINED.get((conversion.tool, rows))
    if conversion.tool == "TRL" and recipe.get("method") in EXPERIMENTAL_METHODS:
        versions = None
    # _drop_unsupervised of LLaMA-Factory's v1/core/utils/batching.py
    if conversion.is_factory_v1 and settings.get("batching_strategy") != "normal":
        versions = ""
    if rows == "answers" and recipe.get("assistant_only_loss") is False:
        # prompts are trained too, so a cut leaves something to train, except in these rows
        has_prompts = any(
            _has_prompt(each, trains_all=True, may_be_texts=conversion.tool == "TRL")
            for each in sources
        )
        form = OF_TEXTS
    else:
        has_prompts = any(each.get("type") != "text" for each in sources)
        form = ""
    same_notes = (CUT_BEFORE_ANSWER, NEXT_IN_PLACE)
    is_reported = any(note in line for line in conversion.remarks for note in same_notes)
    if versions is not None and has_prompts and not is_reported:
        conversion.remarks.append(UNTRAINED_BY_CUT.format(versions + form))


def _holds_texts(settings: ToolFile) -> bool:
    """Whether a torchtune file trains on plain text."""
    return "text_completion_dataset" in str([settings.get(key) for key in ("dataset", "datasets")])


def _report_clipping(settings: ToolFile, conversion: Conversion) -> None:
    """Reports a clipping bound of 0, by which torch's clip_grad_norm_ multiplies the gradients."""
    key = CLIPPING_KEYS.get(conversion.tool)
    bound = read_value(settings, key) if key else None
    if key and bound is not None and convert_number(bound) == 0:
        conversion.add_difference(key, bound, ALL_CLIPPED)


def _report_attention(settings: ToolFile, conversion: Conversion) -> None:
    """Reports a kernel that Axolotl attends with and whose results are not ours."""
    if conversion.tool != "Axolotl":
        return
    name = settings.get("attn_implementation")
    if name in OTHER_ATTENTION:
        conversion.add_difference("attn_implementation", name, OTHER_ATTENTION[name])
    elif settings.get("xformers_attention"):
        conversion.add_difference("xformers_attention", True, OTHER_ATTENTION["xformers"])


def _report_prompts(settings: ToolFile, conversion: Conversion) -> None:
    """Reports which tokens of a conversation are not trained there though the file asks for prompts
    too: Axolotl's marks around turns, and torchtune's system messages.
    """
    has_answers = (
        find_method_facts(conversion.recipe).rows == "answers" and not conversion.image_family
    )
    has_turns = _has_chats(settings)
    if (
        conversion.tool == "Axolotl"
        and has_answers
        and settings.get("train_on_inputs")
        and has_turns
    ):
        conversion.add_difference("train_on_inputs", True, WORDS_OF_TURNS)
    if conversion.tool == "torchtune" and read_value(settings, "dataset.train_on_input"):
        conversion.add_remark("dataset.train_on_input", True, SYSTEM_MASKED)


def _report_tokenizer(settings: ToolFile, conversion: Conversion) -> None:
    """Reports that torchtune's Qwen tokenizers mask a row's last token once max_seq_len is set, and
    which tokenizers read a special token in a row's text as plain words.
    """
    tokenizer = read_section(settings, "tokenizer")
    max_tokens = tokenizer.get("max_seq_len")
    component = str(tokenizer.get("_component_"))
    rows = find_method_facts(conversion.recipe).rows
    has_answers = rows in ("answers", "pairs") and not _holds_texts(settings)
    if max_tokens and QWEN_TOKENIZER.search(component) and has_answers:
        conversion.add_difference("tokenizer.max_seq_len", max_tokens, END_MASKED)
    parses_none = conversion.tool == "torchtune" and not PARSING_TOKENS.search(component)
    if parses_none or settings.get("tokenizer_use_mistral_common"):
        conversion.remarks.append(TYPED_AS_WORDS)


def _report_ends(settings: ToolFile, conversion: Conversion) -> None:
    """Reports how texts and answers begin and end if they hold a BOS or EOS token, or are empty."""
    if find_method_facts(conversion.recipe).rows != "answers" or conversion.image_family:
        return
    if conversion.tool == "TRL":
        conversion.remarks.append(ENDS_OF_TEXTS)
    if conversion.tool != "Axolotl":
        return
    sources = conversion.recipe.get("datasets", ())
    if any(TEXTS_CUT in line for line in conversion.remarks):  # some rows are type: completion
        conversion.remarks += [ENDS_OF_TEXTS, EMPTY_TEXTS]
    if any(each.get("answers_apart") for each in sources):
        conversion.remarks.append(ENDS_OF_ANSWERS)
    if _has_chats(settings):
        conversion.remarks.append(EMPTY_ANSWERS)


def _has_chats(settings: ToolFile) -> bool:
    """Whether Axolotl's ChatTemplateStrategy reads rows of the file."""
    return any(each.startswith("chat_template") for each in list_types(settings))


def _report_joined_breaks(settings: ToolFile, conversion: Conversion) -> None:
    """Reports that a line break at a prompt's end and one at an answer's start become one token
    there, and stay two here.
    """
    recipe = conversion.recipe
    rows = find_method_facts(recipe).rows
    if conversion.tool not in ENCODING_AS_ONE or conversion.image_family:
        return
    if conversion.tool == "Axolotl" and rows == "answers" and not _has_chats(settings):
        return  # its other strategies encode an answer by itself, or read tokens
    may_be_texts = conversion.tool == "TRL"  # rows of two texts, without a template
    if rows not in ("answers", "pairs", "ratings") or not _may_join_breaks(recipe, may_be_texts):
        return
    # If all tokens are trained, a row of turns is encoded as one text here too.
    trains_all = rows == "answers" and recipe.get("assistant_only_loss") is False
    if any(_has_prompt(each, trains_all, may_be_texts) for each in recipe.get("datasets", ())):
        form = OF_TEXTS if trains_all else ""
        addition = LEFT_OUT.get((conversion.tool, str(recipe.get("method"))), form)
        conversion.remarks.append(JOINED_BREAKS.format(addition))


def _report_spaces(conversion: Conversion) -> None:
    """Reports that TRL may put a space before an answer of a pair."""
    recipe = conversion.recipe
    name = str(recipe.get("model_name_or_path")).lower()
    may_space = guess_family(name) in SPACING_FAMILIES and not SPACING_NONE.search(name)
    if conversion.tool == "TRL" and recipe.get("method") == "dpo" and may_space:
        conversion.remarks.append(SPACE_BEFORE_ANSWERS)


def _may_join_breaks(recipe: Mapping[str, Any], may_be_texts: bool) -> bool:
    """Whether what precedes an answer may end with a line break, and an answer begin with one.

    `may_be_texts`: rows may be two texts, which the model's own template does not trim.
    """
    template = recipe.get("chat_template")
    if template is None:
        family = guess_family(str(recipe.get("model_name_or_path")))
        # the templates of Gemma's own models trim an answer
        return may_be_texts or not str(family).startswith("gemma")
    is_named = template in BREAKING_TEMPLATES and template not in TRIMMING_TEMPLATES
    return is_named or OWN_TEMPLATE.search(str(template)) is not None


def _has_prompt(entry: Mapping[str, Any], trains_all: bool, may_be_texts: bool) -> bool:
    """Whether an answer follows on a prompt in a data set's rows, maybe after a line break.

    `trains_all`: every token of a row is trained, so only rows of two texts, prompt and completion,
    count. `may_be_texts`: the tool reads such rows.
    """
    if trains_all:
        kind = entry.get("type", "prompt_completion")
        return may_be_texts and "messages_column" not in entry and kind == "prompt_completion"
    return entry.get("type") not in ONE_LINE and not entry.get("answers_apart")


def _report_copies(conversion: Conversion) -> None:
    """Reports modules that peft trains otherwise than here for the names in `modules_to_save`."""
    names = conversion.recipe.get("modules_to_save") or []
    tied = [name for name in names if TIED.search(str(name))]
    if tied:
        conversion.add_remark("modules_to_save", tied, COPIES_WHERE_TIED)
    others = [name for name in names if name not in (*tied, *SCORING)]
    if others:
        conversion.add_difference("modules_to_save", others, NAMES_END_SO)


def _report_row_texts(settings: ToolFile, conversion: Conversion) -> None:
    """Reports what LLaMA-Factory and ms-swift write otherwise in a row: the BOS token of a plain
    text, and the line break between instruction and input.
    """
    if conversion.tool not in ("LLaMA-Factory", "ms-swift") or conversion.is_factory_v1:
        return
    if settings.get("stage") == "pt":
        are_joined = settings.get("packing", True)
        conversion.remarks.append(BOS_OF_BLOCKS if are_joined else BOS_BY_KEY)
        return
    sources = conversion.recipe.get("datasets", ())
    types = {"messages" if "messages_column" in each else each.get("type") for each in sources}
    if types & {None, "alpaca"}:  # without a type the format is recognized, and may be alpaca
        conversion.remarks.append(ONE_BREAK)
