"""Reads the rows of methods that compare, rate or sample answers.

A row is a prompt with a chosen and a rejected answer, with a rated answer, with the labeled steps
of an answer, or without an answer. If the two answers of a pair hold their prompt, it is found as
what both begin with.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Any

from finetune.config.methods import RATED
from finetune.config.schema import FORMATS, Data, DatasetSource
from finetune.constants import Names
from finetune.data.formats import (
    ANSWER_COLUMNS,
    CONVERSATION_COLUMNS,
    LABEL_COLUMNS,
    QUESTION_COLUMNS,
    QUESTION_PART,
    Columns,
    Completion,
    Conversation,
    Document,
    Group,
    ParsedRow,
    Question,
    Row,
    Steps,
    Text,
    TokenRow,
    first_given,
    label_of_number,
    make_conversation,
    make_message,
    parse_document,
    recognize_format,
    take_question,
    without_training,
)
from finetune.data.images import holds_images
from finetune.data.messages import (
    IMAGE,
    BadRow,
    Message,
    count_common,
    describe_value,
    list_columns,
    parse_list,
    parse_number,
    parse_turns,
    read_role,
)
from finetune.units import is_fp32_number

# names of columns
CHOSEN = ("chosen", "response_w")
MARGIN = "margin"  # by how much the chosen answer's score should be larger
REJECTED = ("rejected", "response_l")
# columns that a pair's prompt is read from, in this order
PROMPTS = ("prompt", "conversations", "conversation", "question", "messages", "instruction")
# a text in these columns is a user's turn; a text in the other ones is a prompt without a template
CHAT_PROMPTS = ("question", "instruction")
# columns that usually hold a prompt, whether they are read or not
USUAL_PROMPTS = {*CONVERSATION_COLUMNS, *QUESTION_COLUMNS, "user"}
ASKING = ("system", "developer", "user")  # roles that no answer begins with
RATINGS = ("score", "rating", "reward")  # words in the name of a column: higher is better


AnsweredPrompt = Conversation | Completion  # a prompt and its answer; only the answer is trained on


def parse_pair(row: Row, source: DatasetSource) -> ParsedRow:
    """Reads a preference row as one group of two documents: chosen, rejected.

    Raises `BadRow` for a row that cannot be read.

    >>> row = {"prompt": "2+2=", "chosen": " 4", "rejected": " 5"}
    >>> parse_pair(row, DatasetSource(path="sums.jsonl")).groups[0].documents[1]
    Completion(prompt='2+2=', completion=' 5')
    """
    columns = Columns(row)
    if source.type == "text" or source.text_column:
        raise BadRow(
            "plain text (type: text, text_column) holds no pairs of answers; remove the key, or "
            "set method: sft"
        )
    chosen_name, rejected_name = _require_answer_columns(row, source)
    chosen = parse_turns(columns.take(chosen_name))
    rejected = parse_turns(columns.take(rejected_name))
    prompt_name = _find_prompt_column(row, source, (chosen_name, rejected_name))
    if prompt_name is None:
        prompt = None
    else:
        prompt = _take_prompt(columns, prompt_name, source)
    if source.type:
        is_chat = FORMATS[source.type].is_chat
    else:
        is_chat = prompt_name in CHAT_PROMPTS
    are_texts = isinstance(chosen, str) and isinstance(rejected, str)
    if are_texts and not is_chat and not isinstance(prompt, list):
        pair = _read_texts(prompt, chosen, rejected)
    else:
        answers = [_read_turns(chosen, chosen_name), _read_turns(rejected, rejected_name)]
        pair = _read_messages(columns, prompt, answers, prompt_name)
    chosen_document, _ = pair
    findings = _check_prompt_column(columns, chosen_document, prompt)
    if _is_swapped(columns, is_reversed="reject" in chosen_name):
        findings = (*findings, "order_swapped")
    return ParsedRow((Group(pair),), "preference", columns.unused, findings)


def parse_scored_pair(row: Row, source: DatasetSource) -> ParsedRow:
    """Reads a preference row for a reward model, which scores the last token of each answer.

    The label of the chosen answer is the row's margin, 0 without one; that of the rejected answer
    is 0. Raises `BadRow` for a row or a margin that cannot be read.
    """
    parsed = parse_pair(row, source)
    # an empty field of a CSV file is no margin
    margin = 0.0 if row.get(MARGIN) in (None, "") else parse_number(row[MARGIN])
    if isinstance(margin, bool) or not is_fp32_number(margin):
        raise BadRow(
            f"{MARGIN}: a number is expected, of at most 3.4e38, found {describe_value(margin)}"
        )
    labels = (label_of_number(margin), label_of_number(0.0))
    return replace(
        parsed,
        groups=tuple(replace(group, labels=labels) for group in parsed.groups),
        unused_columns=tuple(name for name in parsed.unused_columns if name != MARGIN),
    )


def parse_steps(row: Row, source: DatasetSource, data: Data) -> ParsedRow:
    """Reads a row with a prompt, the steps of its answer, and whether each step is right.

    This is the format of TRL's stepwise rows. Raises `BadRow` for any other row.

    >>> row = {"prompt": "2+2+1?", "completions": ["2+2=4", "4+1=6"], "labels": [True, False]}
    >>> parse_steps(row, DatasetSource(path="sums.jsonl"), Data()).document
    Steps(prompt='2+2+1?', steps=('2+2=4', '4+1=6'), labels=(1, 0), separator='\\n')
    """
    columns = Columns(row)
    prompt = columns.take_text(source.prompt_column or "prompt")
    steps_name = source.completion_column or "completions"
    labels_name = source.label_column or "labels"
    steps = parse_list(columns.take(steps_name), steps_name)
    labels = parse_list(columns.take(labels_name), labels_name)
    if not isinstance(steps, list) or not all(isinstance(step, str) and step for step in steps):
        raise BadRow(f"{steps_name}: a list of text is expected, found {describe_value(steps)}")
    if not isinstance(labels, list) or any(label not in (0, 1) for label in labels):
        raise BadRow(f"{labels_name}: a list of true and false is expected, found {labels!r:.100}")
    if len(steps) != len(labels) or not steps:
        raise BadRow(f"{labels_name}: {len(labels)} labels for {len(steps)} steps in {steps_name}")
    document = Steps(prompt, tuple(steps), tuple(map(int, labels)), data.step_separator)
    return ParsedRow((Group((document,)),), "steps", columns.unused)


def is_empty_answer(document: Document) -> bool:
    """Whether nothing but white space is trained on in a document of a pair.

    Calls and other keys of a message make an answer non-empty.
    """
    if isinstance(document, Completion):
        return not document.completion.strip()
    assert isinstance(document, Conversation), "parse_pair makes nothing else"
    return all(
        not message["content"].strip() and not message.keys() - {"role", "content"}
        for message in document.answers
    )


def find_end_of_prompt(chosen: str, rejected: str) -> int:
    """Finds the end of the prompt that two texts share, in characters; 0 if there is none.

    The prompt ends before a word, so that no token of an answer is cut in two, and both answers
    keep some text. A space before the answers belongs to them, as it does in the tokens of most
    tokenizers and in TRL's `extract_prompt`.

    >>> find_end_of_prompt("Q: 1+1? A: two is right", "Q: 1+1? A: twelve")
    10
    """
    end = count_common(chosen, rejected)
    while end > 0:
        is_before_word = chosen[end - 1].isspace()
        if is_before_word and chosen[end:].strip() and rejected[end:].strip():
            break
        end -= 1
    has_space_before = end > 0 and chosen[end - 1] == " "
    return end - 1 if has_space_before else end


def find_answer_columns(row: Row, source: DatasetSource) -> tuple[str | None, str | None]:
    """Returns the names of the chosen and of the rejected answer's column.

    A name is None if the row has no such answer.
    """
    chosen_names, rejected_names = _list_answer_columns(source)
    chosen = first_given(row, chosen_names)
    rejected = first_given(row, rejected_names)
    return chosen, rejected


def _list_answer_columns(source: DatasetSource) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the possible names of the chosen and of the rejected answer's column.

    A name in the source is then the only possible one.
    """
    chosen_name = source.chosen_column or source.completion_column
    chosen = (chosen_name,) if chosen_name else CHOSEN
    rejected = (source.rejected_column,) if source.rejected_column else REJECTED
    return chosen, rejected


def _require_answer_columns(row: Row, source: DatasetSource) -> tuple[str, str]:
    """Returns the names of the chosen and of the rejected answer's column.

    Raises `BadRow` if the row lacks one of the two answers.
    """
    chosen_names, rejected_names = _list_answer_columns(source)
    chosen, rejected = find_answer_columns(row, source)
    if chosen is not None and rejected is not None:
        return chosen, rejected
    label_name = first_given(row, LABEL_COLUMNS)
    hint = ""
    if label_name:
        hint = f"; method: {RATED[0]} learns from answers rated by {label_name}"
    missing = " or ".join(chosen_names if chosen is None else rejected_names)
    raise BadRow(
        f"{missing}: no such answer: its columns are {list_columns(row) or 'none'}; a preference "
        "row holds a chosen and a rejected answer (chosen_column and rejected_column name "
        f"them){hint}"
    )


def _find_named_prompt(row: Row, source: DatasetSource) -> str | None:
    """Returns the prompt's column that the source names; None if it names none.

    Raises `BadRow` if the row has no value in that column.
    """
    name = source.prompt_column or source.messages_column
    if name is not None and row.get(name) is None:
        raise BadRow(f"{name}: nothing; its columns are {list_columns(row)}")
    return name


def _find_prompt_column(
    row: Row, source: DatasetSource, answer_columns: Sequence[str]
) -> str | None:
    """Returns the column of a pair's prompt; None if the row has none beside the two answers."""
    usual_names = (name for name in PROMPTS if name not in answer_columns)
    return _find_named_prompt(row, source) or first_given(row, usual_names)


def _take_prompt(columns: Columns, name: str, source: DatasetSource) -> str | list[Any]:
    """Takes a prompt from the column `name`, as text or as turns.

    Raises `BadRow` if the column holds neither.
    """
    if name == "instruction":
        return take_question(columns, source)
    value = parse_turns(columns.take(name))
    if not isinstance(value, str | list):
        raise BadRow(
            f"{name}: text or a list of messages is expected, found {describe_value(value)}"
        )
    return value


def _read_turns(value: Any, column: str) -> list[Any]:
    """Reads an answer as a list of turns. It may be such a list, one turn, or the assistant's text.

    Raises `BadRow` for any other value.
    """
    if isinstance(value, str):
        return [make_message("assistant", value)]
    if isinstance(value, dict):
        return [value]
    if not isinstance(value, list) or not value:
        raise BadRow(
            f"{column}: an answer is expected, as text or messages, found {describe_value(value)}"
        )
    return value


def _read_messages(
    columns: Columns, prompt: Any, answers: list[list[Any]], prompt_name: str | None
) -> tuple[AnsweredPrompt, AnsweredPrompt]:
    """Makes the two conversations of a row whose answers are messages: (chosen, rejected).

    Either the answers follow a prompt of another column, or they are whole conversations that begin
    with their prompt.

    Args:
        columns: The row.
        prompt: The content of the prompt's column, text or turns; None if there is none.
        answers: The turns of the chosen and of the rejected answer.
        prompt_name: The prompt's column; None if there is none.

    Raises:
        BadRow: The turns cannot be read, or two whole conversations have no common prompt.
    """
    if isinstance(prompt, str):
        turns = [make_message("user", prompt)]
    else:
        turns = list(prompt or [])
    holds_prompt = any(read_role(answer[0]) in ASKING for answer in answers)
    if turns and not holds_prompt:
        before = without_training(turns)
        chosen, rejected = (make_conversation(columns, [*before, *answer]) for answer in answers)
        return chosen, rejected
    # The answers hold their prompt. A column `prompt` may repeat it, or hold turns that come before
    # it, such as a system message.
    before = []
    if prompt_name == "prompt" and isinstance(prompt, list):
        before = turns
    is_repeated = all(answer[: len(before)] == before for answer in answers)
    if is_repeated:
        before = []
    chosen, rejected = (make_conversation(columns, [*before, *answer]) for answer in answers)
    shared = _count_shared(chosen.messages, rejected.messages)
    _require_shared(shared, chosen, rejected, prompt, prompt_name)
    return _train_from(shared, chosen), _train_from(shared, rejected)


def _require_shared(
    shared: int, chosen: Conversation, rejected: Conversation, prompt: Any, prompt_name: str | None
) -> None:
    """Raises `BadRow` if two conversations have no common prompt that both answer.

    `shared` counts the messages of the prompt. There must be at least one, and the next message of
    both must be the assistant's. `prompt` and `prompt_name` are for the advice.
    """
    if shared == 0:
        advice = ""
        if prompt == []:
            advice = f", and {prompt_name} is an empty list"
        elif prompt_name is None:
            advice = "; name its column (prompt_column)"
        raise BadRow(
            f"chosen and rejected have no common prompt: their first messages differ{advice}"
        )
    next_messages = (chosen.messages[shared], rejected.messages[shared])
    if any(message["role"] != "assistant" for message in next_messages):
        raise BadRow(
            f"message {shared + 1}: chosen and rejected differ in a turn that is not the "
            "assistant's"
        )


def _train_from(first: int, conversation: Conversation) -> Conversation:
    """Returns a copy of a conversation in which no message before index `first` is trained on."""
    trained = tuple(is_trained and i >= first for i, is_trained in enumerate(conversation.trained))
    return replace(conversation, trained=trained)


def _check_prompt_column(
    columns: Columns, chosen: AnsweredPrompt, prompt: str | list[Any] | None
) -> tuple[str, ...]:
    """Returns the findings about where a pair's prompt was read from.

    Args:
        columns: The row.
        chosen: The chosen answer with the prompt that was found.
        prompt: The content of the prompt's column; None: there is no such column.
    """
    if isinstance(chosen, Conversation):
        is_read = all(_holds_prompt(chosen, text) for text in _list_questions(prompt))
        return () if is_read else ("prompt_unread",)
    if prompt is None and _lacks_prompt(columns, chosen.prompt):
        return ("prompt_missing",)
    return ()


def _lacks_prompt(columns: Columns, shared: str) -> bool:
    """Whether an unread column may hold the prompt of a pair of texts.

    `shared`: the text that both answers begin with. It is their prompt if no column holds it.
    """
    for name in columns.unused:
        value = columns.row[name]
        is_conversation = isinstance(value, list) and isinstance(value[0], dict)
        if not shared.strip() and (isinstance(value, str) or is_conversation):
            return True
        if (
            name.lower() in USUAL_PROMPTS
            and isinstance(value, str)
            and len(value.strip()) > len(shared)
        ):
            # The answers only happen to begin with the same words, such as "It is".
            return True
    return False


def _list_questions(prompt: str | list[Any] | None) -> list[str]:
    """Lists the texts in a prompt's column that are not the assistant's, without blank ones."""
    if isinstance(prompt, str):
        texts = [prompt]
    else:
        asking = [turn for turn in prompt or () if read_role(turn) in ASKING]
        texts = [turn.get("content", turn.get("value")) for turn in asking]
    return [text for text in texts if isinstance(text, str) and text.strip()]


def _holds_prompt(conversation: Conversation, prompt: str) -> bool:
    """Whether a message that is not trained on contains `prompt`, or is contained in it."""
    if conversation.images:
        prompt = prompt.replace("<image>", IMAGE)
    untrained_texts = [
        message["content"].strip()
        for message, is_trained in zip(conversation.messages, conversation.trained, strict=True)
        if not is_trained
    ]
    return any(text and (text in prompt or prompt.strip() in text) for text in untrained_texts)


def _count_shared(chosen: Sequence[Message], rejected: Sequence[Message]) -> int:
    """Counts the messages of the prompt that two conversations begin with.

    The prompt is all messages up to the first that differs. If no message differs before one
    conversation ends, the prompt ends before the last assistant message that both have.
    """
    shared = count_common(chosen, rejected)
    if shared < min(len(chosen), len(rejected)):
        return shared
    return max((i for i in range(shared) if chosen[i]["role"] == "assistant"), default=0)


def _read_texts(
    prompt: str | None, chosen: str, rejected: str
) -> tuple[AnsweredPrompt, AnsweredPrompt]:
    """Makes the two documents of a row whose answers are texts: (chosen, rejected).

    If `prompt` is None, the prompt is what both texts begin with.
    """
    if prompt is None:
        end = find_end_of_prompt(chosen, rejected)
        prompt = chosen[:end]
        chosen = chosen[end:]
        rejected = rejected[end:]
    return Completion(prompt, chosen), Completion(prompt, rejected)


def _is_swapped(columns: Columns, is_reversed: bool) -> bool:
    """Whether every rating in the row is higher for the rejected answer; False without ratings.

    `is_reversed`: the source names the column `rejected` as that of the chosen answer.
    """
    ratings = list(_read_ratings(columns))
    if is_reversed:
        ratings = [(of_rejected, of_chosen) for of_chosen, of_rejected in ratings]
    return bool(ratings) and all(of_chosen < of_rejected for of_chosen, of_rejected in ratings)


def _read_ratings(columns: Columns) -> Iterator[tuple[float, float]]:
    """Yields (rating of `chosen`, rating of `rejected`) for each kind of rating in the row.

    The two are in columns such as score_chosen and score_rejected, or score_w and score_l.
    """
    for chosen_name in columns.row:
        if chosen_name.endswith("_w"):
            rejected_name = chosen_name.removesuffix("_w") + "_l"
        else:
            rejected_name = re.sub("chosen", "rejected", chosen_name, flags=re.IGNORECASE)
        is_rating = any(word in chosen_name.lower() for word in RATINGS)
        # The names are equal if the column is not one of a pair.
        if rejected_name == chosen_name or not is_rating:
            continue
        names = (chosen_name, rejected_name)
        of_chosen, of_rejected = (parse_number(columns.row.get(name)) for name in names)
        are_numbers = all(
            isinstance(value, int | float) and not isinstance(value, bool)
            for value in (of_chosen, of_rejected)
        )
        if are_numbers:
            columns.used.update(names)
            yield of_chosen, of_rejected


Turns = list[tuple[Message, bool]]  # (message, whether it is trained on)
# a label as lower-case text -> whether the answer is good
MEANINGS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


def parse_ratings(row: Row, source: DatasetSource) -> ParsedRow:
    """Reads an answer that a label rates as good or bad, as one group.

    A preference row is read as two groups: its chosen answer is good, its rejected one bad.

    Raises `BadRow` for any other row.

    >>> row = {"prompt": "2+2=", "completion": " 5", "label": False}
    >>> parse_ratings(row, DatasetSource(path="sums.jsonl")).groups
    (Group(documents=(Completion(prompt='2+2=', completion=' 5'),), rating=-1, labels=None),)
    """
    if source.label_column is None and None not in find_answer_columns(row, source):
        parsed = parse_pair(row, source)
        chosen, rejected = parsed.groups[0].documents
        groups = (Group((chosen,), rating=1), Group((rejected,), rating=-1))
        return replace(parsed, groups=groups)
    label_names = (source.label_column,) if source.label_column else LABEL_COLUMNS
    label_name = first_given(row, label_names)
    if label_name is None:
        raise BadRow(
            f"{' or '.join(label_names)}: no rating of the answer; its columns are "
            f"{list_columns(row) or 'none'} (label_column names it); rows with a chosen and a "
            "rejected answer are read too"
        )
    columns = Columns(row)
    label = columns.take(label_name)
    is_good = MEANINGS.get(str(label).strip().lower())
    if is_good is None:
        raise BadRow(f"{label_name}: true or false is expected, found {describe_value(label)}")
    row_format = source.type or recognize_format(row, source)
    document = parse_document(row_format, columns, source)
    if isinstance(document, Text | TokenRow):
        raise BadRow(
            "plain text is no answer that could be rated; name its prompt and completion "
            "(prompt_column, completion_column)"
        )
    if isinstance(document, Conversation) and row_format != "prompt_completion":
        document = _train_last(document)
    group = Group((document,), rating=1 if is_good else -1)
    return ParsedRow((group,), row_format, columns.unused)


def join_answer(prompt: Document, answer: Document) -> Document:
    """Returns the prompt of one document with the answer of another, in the form of the first.

    >>> join_answer(Completion("2+2=", " 4"), Completion("Who?", " Me."))
    Completion(prompt='2+2=', completion=' Me.')
    """
    if isinstance(answer, Conversation):
        _, answer_turns = _split_prompt(answer)
    else:
        assert isinstance(answer, Completion), "plain text has no answer"
        answer_turns = [(make_message("assistant", answer.completion), True)]
    if isinstance(prompt, Completion):
        contents = [message["content"] for message, is_trained in answer_turns if is_trained]
        return replace(prompt, completion="\n".join(contents))
    assert isinstance(prompt, Conversation), "plain text has no prompt"
    prompt_turns, _ = _split_prompt(prompt)
    turns = [*prompt_turns, *answer_turns]
    return replace(
        prompt,
        messages=tuple(message for message, _ in turns),
        trained=tuple(is_trained for _, is_trained in turns),
    )


def have_same_prompt(first: Document, second: Document) -> bool:
    """Whether two documents answer the same prompt."""
    if isinstance(first, Conversation) and isinstance(second, Conversation):
        first_prompt, _ = _split_prompt(first)
        second_prompt, _ = _split_prompt(second)
        return first_prompt == second_prompt
    return (
        isinstance(first, Completion)
        and isinstance(second, Completion)
        and first.prompt == second.prompt
    )


def find_mismatched(
    documents: Sequence[Document], others: Sequence[Document]
) -> list[Document | None]:
    """Finds for each document another one that answers another prompt.

    Candidates are the documents after it, then those from the first one on up to it, and last the
    `others`, from other rows. The first that fits is taken; None if none does.
    """
    count = len(documents)
    mismatched: list[Document | None] = []
    for i, document in enumerate(documents):
        others_in_circle = (documents[(i + offset) % count] for offset in range(1, count))
        candidates = chain(others_in_circle, others)
        mismatched.append(
            next((other for other in candidates if _can_mismatch(other, document)), None)
        )
    return mismatched


def _can_mismatch(other: Document, document: Document) -> bool:
    """Whether `other` has a trained answer, and answers another prompt than `document`."""
    return _has_answer(other) and not have_same_prompt(document, other)


def _has_answer(document: Document) -> bool:
    """Whether a document has a trained answer."""
    return not isinstance(document, Conversation) or any(document.trained)


def find_last_answers(documents: Iterable[Document]) -> tuple[Document, ...]:
    """Finds the last of the documents with a trained answer, and the last to another prompt.

    Returns both in this order, or as many as there are.
    """
    answers = list(filter(_has_answer, documents))[::-1]
    to_others = (answer for answer in answers if not have_same_prompt(answer, answers[0]))
    return (*answers[:1], *islice(to_others, 1))


def _train_last(conversation: Conversation) -> Conversation:
    """Returns a copy that trains on the last answer alone, which is the rated one.

    Everything before it is the answer's prompt.
    """
    last = max(
        i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"
    )
    return _train_from(last, conversation)


def _split_prompt(conversation: Conversation) -> tuple[Turns, Turns]:
    """Returns (the turns of the prompt, the turns from the first trained one on)."""
    turns = list(zip(conversation.messages, conversation.trained, strict=True))
    first = next((i for i, is_trained in enumerate(conversation.trained) if is_trained), len(turns))
    return turns[:first], turns[first:]


ENVIRONMENT = "environment"  # the column that names a row's environment
ANSWER = "answer"  # the argument of reward functions that gets the row's own answer
# columns of a row that TRL does not pass on to reward functions
COMPLETION_COLUMNS = ("prompt", "completion", "completion_ids")


def parse_prompt(row: Row, source: DatasetSource) -> ParsedRow:
    """Reads a row as a prompt whose answers are sampled.

    The prompt is the row's messages without a last answer, a question as the user's turn, or a text
    without a template. The row's own answer, if there is one, is kept for the rewards.

    Raises `BadRow` if there is no prompt.

    >>> parsed = parse_prompt(
    ...     {"prompt": "2+2=", "completion": "4", "level": 1}, DatasetSource(path="sums.jsonl")
    ... )
    >>> parsed.document.asked, parsed.document.row
    ('2+2=', '{"prompt": "2+2=", "columns": {"level": 1, "answer": "4"}}')
    """
    if ENVIRONMENT in row and not _find_question(row, source):
        # The environment itself asks the question, as with TRL.
        row = {**row, "prompt": [make_message("user", "")]}
    columns = Columns(row)
    name = _require_question(row, source)
    is_answer_named = source.completion_column is not None
    reward_row = dict(row)
    if is_answer_named:
        # The named column becomes `answer`, in place of a column that has this name.
        reward_row.pop(ANSWER, None)
    turns = _take_turns(columns, name, source)
    answer = _find_answer(columns, source)
    if turns is None:
        question = Question(row[name], _write_reward_row(reward_row, row[name], answer))
        return ParsedRow((Group((question,)),), "prompt_completion", ())
    conversation = make_conversation(columns, turns, needs_answer=False)
    messages = conversation.messages
    if messages[-1]["role"] == "assistant":
        if not is_answer_named:
            answer = str(messages[-1]["content"])
        messages = messages[:-1]
    if not messages:
        raise BadRow(f"{name}: nothing is asked before the assistant's turn")
    asked = replace(conversation, messages=messages, trained=(False,) * len(messages))
    variables = {**(source.chat_template_kwargs or {}), **conversation.variables}
    if conversation.images:  # rewards do not get images
        reward_row = {
            key: value
            for key, value in reward_row.items()
            if key != name and not holds_images(key, value)
        }
    row_text = _write_reward_row(
        reward_row, list(messages), answer, variables=variables, tools=conversation.tools
    )
    parts = _find_question_parts(row, name, source)
    findings = ("question_part_unread",) if parts else ()
    return ParsedRow((Group((Question(asked, row_text),)),), "messages", parts, findings)


def _find_question_parts(row: Row, name: str, source: DatasetSource) -> Names:
    """Returns the columns that may be a part of the question in the column `name`, by their names.

    They are empty where the question is whole: the source names its column, or it is a column
    `prompt` or messages.
    """
    is_named = source.prompt_column or source.messages_column
    if is_named or name not in QUESTION_COLUMNS[1:] or not isinstance(row[name], str):
        return ()
    # an instruction is asked with its history
    known = (name, source.completion_column, "history" if name == "instruction" else None)
    return tuple(
        column
        for column, value in row.items()
        if value not in (None, "", [])
        and column not in known
        and QUESTION_PART.fullmatch(column.lower())
    )


def _take_turns(columns: Columns, name: str, source: DatasetSource) -> list[Any] | None:
    """Takes the turns of a prompt from the column `name`.

    Returns None if the prompt is a text without a template. Raises `BadRow` if the column holds
    neither text nor messages.
    """
    prompt = _take_prompt(columns, name, source)
    if isinstance(prompt, list):
        return prompt
    is_chat = FORMATS[source.type].is_chat if source.type else name != "prompt"
    return [make_message("user", prompt)] if is_chat else None


def _find_question(row: Row, source: DatasetSource) -> str | None:
    """Returns the column of the prompt; None if the row has none."""
    usual_names = ("prompt", *CONVERSATION_COLUMNS, *QUESTION_COLUMNS[1:])
    return _find_named_prompt(row, source) or first_given(row, usual_names)


def _require_question(row: Row, source: DatasetSource) -> str:
    """Returns the column of the prompt. Raises `BadRow` if the row has none."""
    name = _find_question(row, source)
    if name is None:
        raise BadRow(
            f"no prompt: its columns are {list_columns(row) or 'none'}; name the one that holds "
            "the question or the messages (prompt_column)"
        )
    return name


def _find_answer(columns: Columns, source: DatasetSource) -> Any:
    """Returns the row's own answer for the rewards; None if the row has none.

    It is the value of the column that the source names, or else the text of the first of
    ANSWER_COLUMNS that holds a text; if none does, the first number in one of them.
    """
    if source.completion_column is not None:
        return columns.row.get(source.completion_column)
    values = [columns.row.get(name) for name in ANSWER_COLUMNS]
    texts = [value for value in values if isinstance(value, str)]
    numbers = [value for value in values if isinstance(value, int | float)]
    return next(iter([*texts, *numbers]), None)


def _write_reward_row(row: Row, prompt: Any, answer: Any, **template_values: Any) -> str:
    """Writes the parts of a row that rewards read as JSON; values that JSON lacks become text.

    Args:
        row: The columns. Those of COMPLETION_COLUMNS are left out.
        prompt: The prompt's text or messages.
        answer: Written as the column ANSWER, unless that has a value; None: no answer.
        template_values: What the chat template reads besides the messages; empty values are left
            out.
    """
    columns = {name: value for name, value in row.items() if name not in COMPLETION_COLUMNS}
    if answer is not None and columns.get(ANSWER) is None:
        columns[ANSWER] = answer
    reward_row = {"prompt": prompt, "columns": columns}
    reward_row |= {name: value for name, value in template_values.items() if value}
    return json.dumps(reward_row, ensure_ascii=False, default=str)
