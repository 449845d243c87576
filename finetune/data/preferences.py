"""Rows of other methods: a prompt with a chosen and a rejected answer, a rated one, or a prompt
that waits for one.

They are read in the forms that people have; the common prompt of a pair is found.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from finetune.config.methods import RATED
from finetune.config.schema import FORMATS, Data, DatasetSource
from finetune.data.formats import (
    ANSWER_COLUMNS,
    CONVERSATION_COLUMNS,
    LABEL_COLUMNS,
    PARSERS,
    QUESTION_COLUMNS,
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
    role_of,
)
from finetune.units import is_fp32_number

CHOSEN = ("chosen", "response_w")
MARGIN = "margin"  # by how much the chosen answer's score should be larger
REJECTED = ("rejected", "response_l")
# those that are read
PROMPTS = ("prompt", "conversations", "conversation", "question", "messages", "instruction")
# text in these is a user's turn; in others it is a prompt without a template
OF_CHAT = ("question", "instruction")
USUAL_PROMPTS = {*CONVERSATION_COLUMNS, *QUESTION_COLUMNS, "user"}
ASKING = ("system", "developer", "user", "human", "prompter")  # roles that begin no answer
RATINGS = ("score", "rating", "reward")  # in the name of a column: the higher, the better


Side = Conversation | Completion  # an answer after its prompt, which is not trained on


def parse_pair(row: Row, source: DatasetSource) -> ParsedRow:
    """Reads a preference row, as a group of two. Raises `BadRow`.

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
    names = _require_sides(row, source)
    sides = [columns.take(name) for name in names]
    prompt_name = _find_prompt(row, source, names)
    if prompt_name is None:
        prompt = None
    else:
        prompt = _take_prompt(columns, prompt_name, source)
    if source.type:
        is_chat = FORMATS[source.type].is_chat
    else:
        is_chat = prompt_name in OF_CHAT
    are_texts = all(isinstance(side, str) for side in sides)
    if are_texts and not is_chat and not isinstance(prompt, list):
        pair = _read_texts(prompt, *sides)
    else:
        turns = [_read_turns(side, name) for side, name in zip(sides, names, strict=True)]
        pair = _read_messages(columns, prompt, turns, prompt_name)
    findings = _check_prompt(columns, pair[0], prompt)
    if _is_swapped(columns, is_turned="reject" in names[0]):
        findings = (*findings, "order_swapped")
    return ParsedRow((Group(pair),), "preference", columns.unused, findings)


def parse_scored_pair(row: Row, source: DatasetSource) -> ParsedRow:
    """Reads a preference row for a reward model, which scores the last token of each answer.

    The label of the chosen answer is the row's margin. Raises `BadRow`.
    """
    parsed = parse_pair(row, source)
    margin = 0.0 if row.get(MARGIN) is None else row[MARGIN]
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
    """Reads a prompt with the steps of its answer and whether each is right, as TRL's stepwise
    rows.

    Raises `BadRow`.

    >>> row = {"prompt": "2+2+1?", "completions": ["2+2=4", "4+1=6"], "labels": [True, False]}
    >>> parse_steps(row, DatasetSource(path="sums.jsonl"), Data()).document
    Steps(prompt='2+2+1?', steps=('2+2=4', '4+1=6'), labels=(1, 0), separator='\\n')
    """
    columns = Columns(row)
    prompt = columns.take_text(source.prompt_column or "prompt")
    name = source.completion_column or "completions"
    named = source.label_column or "labels"
    steps = columns.take(name)
    labels = columns.take(named)
    if not isinstance(steps, list) or not all(isinstance(s, str) and s for s in steps):
        raise BadRow(f"{name}: a list of text is expected, found {describe_value(steps)}")
    if not isinstance(labels, list) or any(label not in (0, 1) for label in labels):
        raise BadRow(f"{named}: a list of true and false is expected, found {labels!r:.100}")
    if len(steps) != len(labels) or not steps:
        raise BadRow(f"{named}: {len(labels)} labels for {len(steps)} steps in {name}")
    document = Steps(prompt, tuple(steps), tuple(map(int, labels)), data.step_separator)
    return ParsedRow((Group((document,)),), "steps", columns.unused)


def is_empty_answer(document: Document) -> bool:
    """Whether nothing stands in what is trained on."""
    if isinstance(document, Completion):
        return not document.completion.strip()
    if isinstance(document, Text):
        return not document.text.strip()
    if isinstance(document, TokenRow):
        return not any(document.trained)
    assert isinstance(document, Conversation), "a prompt has no answer"
    answers = [
        message
        for message, is_trained in zip(document.messages, document.trained, strict=True)
        if is_trained
    ]
    return all(
        not message["content"].strip() and not message.keys() - {"role", "content"}
        for message in answers
    )


def find_end_of_prompt(chosen: str, rejected: str) -> int:
    """Finds where the prompt ends with which two texts begin.

    It ends at the start of a word, so that no token of an answer is cut in two, and leaves
    something of both answers. A space before the answer belongs to it, as in most tokenizers'
    words, and as in TRL's `extract_prompt`.

    >>> find_end_of_prompt("Q: 1+1? A: two is right", "Q: 1+1? A: twelve")
    10
    """
    end = count_common(chosen, rejected)
    while end > 0:
        begins_word = chosen[end - 1].isspace()
        if begins_word and chosen[end:].strip() and rejected[end:].strip():
            break
        end -= 1
    has_space_before = end > 0 and chosen[end - 1] == " "
    return end - 1 if has_space_before else end


def find_sides(row: Row, source: DatasetSource) -> tuple[str | None, str | None]:
    """Finds the columns of the chosen and of the rejected answer; None where the row has none."""
    chosen_names, rejected_names = _name_sides(source)
    chosen = first_given(row, chosen_names)
    rejected = first_given(row, rejected_names)
    return chosen, rejected


def _name_sides(source: DatasetSource) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the names that the column of the chosen, and of the rejected answer may have."""
    named = source.chosen_column or source.completion_column
    chosen = (named,) if named else CHOSEN
    rejected = (source.rejected_column,) if source.rejected_column else REJECTED
    return chosen, rejected


def _require_sides(row: Row, source: DatasetSource) -> tuple[str, str]:
    """The columns of the chosen and of the rejected answer.

    Raises `BadRow` where the row has none.
    """
    chosen_names, rejected_names = _name_sides(source)
    chosen, rejected = find_sides(row, source)
    if chosen is not None and rejected is not None:
        return chosen, rejected
    rated = first_given(row, LABEL_COLUMNS)
    hint = ""
    if rated:
        hint = f"; method: {RATED[0]} learns from answers rated by {rated}"
    missing = " or ".join(chosen_names if chosen is None else rejected_names)
    raise BadRow(
        f"{missing}: no such answer: its columns are {list_columns(row) or 'none'}; a preference "
        "row holds a chosen and a rejected answer (chosen_column and rejected_column name "
        f"them){hint}"
    )


def _named_prompt(row: Row, source: DatasetSource) -> str | None:
    """The column of the prompt that the source names.

    Raises `BadRow` where the row has nothing in it.
    """
    named = source.prompt_column or source.messages_column
    if named is not None and row.get(named) is None:
        raise BadRow(f"{named}: nothing; its columns are {list_columns(row)}")
    return named


def _find_prompt(row: Row, source: DatasetSource, sides: Sequence[str]) -> str | None:
    usual = (name for name in PROMPTS if name not in sides)
    return _named_prompt(row, source) or first_given(row, usual)


def _take_prompt(columns: Columns, name: str, source: DatasetSource) -> str | list[Any]:
    if name == "instruction":
        return take_question(columns, source)
    value = columns.take(name)
    if not isinstance(value, str | list):
        raise BadRow(
            f"{name}: text or a list of messages is expected, found {describe_value(value)}"
        )
    return value


def _read_turns(value: Any, column: str) -> list[Any]:
    """An answer as turns: a list of them, one of them, or the assistant's text."""
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
    columns: Columns, prompt: Any, sides: list[list[Any]], prompt_name: str | None
) -> tuple[Side, Side]:
    """The pair of a conversational row: a prompt and answers, or two conversations that begin
    alike.
    """
    if isinstance(prompt, str):
        turns = [make_message("user", prompt)]
    else:
        turns = list(prompt or [])
    holds_prompt = any(role_of(side[0]) in ASKING for side in sides)
    if turns and not holds_prompt:
        before = without_training(turns)
        chosen, rejected = (make_conversation(columns, [*before, *side]) for side in sides)
        return chosen, rejected
    # The answers hold the prompt; a column `prompt` may hold it again, or what comes before, such
    # as a system message.
    before = []
    if prompt_name == "prompt" and isinstance(prompt, list):
        before = turns
    is_repeated = all(side[: len(before)] == before for side in sides)
    if is_repeated:
        before = []
    chosen, rejected = (make_conversation(columns, [*before, *side]) for side in sides)
    shared = _count_shared(chosen.messages, rejected.messages)
    _require_shared(shared, chosen, rejected, prompt, prompt_name)
    return _train_from(shared, chosen), _train_from(shared, rejected)


def _require_shared(
    shared: int, chosen: Conversation, rejected: Conversation, prompt: Any, prompt_name: str | None
) -> None:
    """Raises `BadRow` where two conversations share no message, or differ where it is not the
    assistant's turn.
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
    if any(side.messages[shared]["role"] != "assistant" for side in (chosen, rejected)):
        raise BadRow(
            f"message {shared + 1}: chosen and rejected differ in a turn that is not the "
            "assistant's"
        )


def _train_from(first: int, conversation: Conversation) -> Conversation:
    """The conversation, of which no turn before message `first` is trained on."""
    trained = tuple(is_trained and i >= first for i, is_trained in enumerate(conversation.trained))
    return replace(conversation, trained=trained)


def _check_prompt(
    columns: Columns, chosen: Side, prompt: str | list[Any] | None
) -> tuple[str, ...]:
    """Lists the findings about a pair's prompt.

    Args:
        columns: The row.
        chosen: The chosen answer after its prompt, as it was read.
        prompt: The content of the prompt's column; None: there is no such column.
    """
    if isinstance(chosen, Conversation):
        return () if _holds_prompt(chosen, prompt) else ("prompt_unread",)
    if prompt is None and _lacks_prompt(columns, chosen.prompt):
        return ("prompt_missing",)
    return ()


def _lacks_prompt(columns: Columns, shared: str) -> bool:
    """Whether an unread column may hold the prompt of a pair.

    `shared`: what both answers begin with, which is their prompt otherwise.
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
            return True  # what the answers share is then how both begin, such as "It is"
    return False


def _holds_prompt(conversation: Conversation, prompt: str | list[Any] | None) -> bool:
    """Whether a conversation holds what the prompt's column asks; true without such a text."""
    if not isinstance(prompt, str) or not prompt.strip():
        return True
    asked = [
        m["content"].strip()
        for m, is_trained in zip(conversation.messages, conversation.trained, strict=True)
        if not is_trained
    ]
    return any(text and (text in prompt or prompt.strip() in text) for text in asked)


def _count_shared(chosen: Sequence[Message], rejected: Sequence[Message]) -> int:
    """Counts the messages of the prompt with which two conversations begin.

    They are all that both share. Where one conversation ends within these, they are those before
    the last answer that both have.
    """
    shared = count_common(chosen, rejected)
    if shared < min(len(chosen), len(rejected)):
        return shared
    return max((i for i in range(shared) if chosen[i]["role"] == "assistant"), default=0)


def _read_texts(prompt: str | None, chosen: str, rejected: str) -> tuple[Side, Side]:
    if prompt is None:
        end = find_end_of_prompt(chosen, rejected)
        prompt = chosen[:end]
        chosen = chosen[end:]
        rejected = rejected[end:]
    return Completion(prompt, chosen), Completion(prompt, rejected)


def _is_swapped(columns: Columns, is_turned: bool) -> bool:
    """Whether all of the row's own ratings are higher for its rejected answer, such as
    score_rejected above score_chosen; false without ratings.

    `is_turned`: the recipe names the column `rejected` as that of the chosen answer.
    """
    ratings = list(_read_ratings(columns))
    if not ratings:
        return False
    if is_turned:
        return all(of_rejected < of_chosen for of_chosen, of_rejected in ratings)
    return all(of_chosen < of_rejected for of_chosen, of_rejected in ratings)


def _read_ratings(columns: Columns) -> Iterator[tuple[float, float]]:
    """Yields (rating of the column `chosen`, of `rejected`) for each kind of rating in the row."""
    for name in columns.row:
        if name.endswith("_w"):
            other = f"{name[:-2]}_l"
        else:
            other = re.sub("chosen", "rejected", name, flags=re.IGNORECASE)
        values = [columns.row.get(column) for column in (name, other)]
        is_number = all(
            isinstance(value, int | float) and not isinstance(value, bool) for value in values
        )
        if other != name and is_number and any(word in name.lower() for word in RATINGS):
            yield columns.take(name), columns.take(other)


Turns = list[tuple[Message, bool]]  # messages, each with whether it is trained on
MEANINGS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


def parse_ratings(row: Row, source: DatasetSource) -> ParsedRow:
    """Reads a row with a label, or a preference row as two. Raises `BadRow`.

    >>> row = {"prompt": "2+2=", "completion": " 5", "label": False}
    >>> parse_ratings(row, DatasetSource(path="sums.jsonl")).groups
    (Group(documents=(Completion(prompt='2+2=', completion=' 5'),), rating=-1, labels=None),)
    """
    if source.label_column is None and None not in find_sides(row, source):
        parsed = parse_pair(row, source)
        chosen, rejected = parsed.groups[0].documents
        return replace(parsed, groups=(Group((chosen,), 1), Group((rejected,), -1)))
    names = (source.label_column,) if source.label_column else LABEL_COLUMNS
    label = first_given(row, names)
    if label is None:
        raise BadRow(
            f"{' or '.join(names)}: no rating of the answer; its columns are "
            f"{list_columns(row) or 'none'} (label_column names it); rows with a chosen and a "
            "rejected answer are read too"
        )
    columns = Columns(row)
    value = columns.take(label)
    is_good = MEANINGS.get(str(value).strip().lower())
    if is_good is None:
        raise BadRow(f"{label}: true or false is expected, found {describe_value(value)}")
    row_format = source.type or recognize_format(row, source)
    document = PARSERS[row_format](columns, source)
    if isinstance(document, Text | TokenRow):
        raise BadRow(
            "plain text is no answer that could be rated; name its prompt and completion "
            "(prompt_column, completion_column)"
        )
    if isinstance(document, Conversation) and row_format != "prompt_completion":
        document = _train_last(document)
    return ParsedRow((Group((document,), 1 if is_good else -1),), row_format, columns.unused)


def join_answer(prompt: Document, answer: Document) -> Document:
    """The prompt of one document with the answer of another.

    >>> join_answer(Completion("2+2=", " 4"), Completion("Who?", " Me."))
    Completion(prompt='2+2=', completion=' Me.')
    """
    if isinstance(prompt, Completion):
        if isinstance(answer, Completion):
            return replace(prompt, completion=answer.completion)
        contents = []
        if isinstance(answer, Conversation):
            contents = [m["content"] for m, is_trained in _split(answer)[1] if is_trained]
        return replace(prompt, completion="\n".join(contents))
    assert isinstance(prompt, Conversation), "plain text has no prompt"
    if isinstance(answer, Conversation):
        turns = _split(answer)[1]
    else:
        assert isinstance(answer, Completion), "plain text has no answer"
        turns = [(make_message("assistant", answer.completion), True)]
    whole = [*_split(prompt)[0], *turns]
    return replace(
        prompt,
        messages=tuple(m for m, _ in whole),
        trained=tuple(is_trained for _, is_trained in whole),
    )


def have_same_prompt(first: Document, second: Document) -> bool:
    """Whether two documents answer the same prompt."""
    if isinstance(first, Conversation) and isinstance(second, Conversation):
        return _split(first)[0] == _split(second)[0]
    return (
        isinstance(first, Completion)
        and isinstance(second, Completion)
        and first.prompt == second.prompt
    )


def find_mismatched(
    documents: Sequence[Document], earlier: Document | None
) -> list[Document | None]:
    """Finds for each document one that answers another prompt.

    It is the next of `documents`, in a circle, whose prompt differs; else `earlier`, which was read
    before them; else None.
    """
    count = len(documents)
    mismatched: list[Document | None] = []
    for i, document in enumerate(documents):
        following = (documents[(i + k) % count] for k in range(1, count))
        candidates = chain(following, () if earlier is None else (earlier,))
        mismatched.append(
            next((other for other in candidates if _can_mismatch(other, document)), None)
        )
    return mismatched


def _can_mismatch(other: Document, document: Document) -> bool:
    """Whether `other` has a trained answer, and answers another prompt than `document`."""
    has_answer = not isinstance(other, Conversation) or any(other.trained)
    return has_answer and not have_same_prompt(document, other)


def _train_last(conversation: Conversation) -> Conversation:
    """Trains on the last answer alone, which is rated; what comes before it is its prompt."""
    last = max(
        i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"
    )
    trained = tuple(is_trained and i == last for i, is_trained in enumerate(conversation.trained))
    return replace(conversation, trained=trained)


def _split(conversation: Conversation) -> tuple[Turns, Turns]:
    """Returns (the turns before the first trained one, the others), each with whether it is
    trained on.
    """
    turns = list(zip(conversation.messages, conversation.trained, strict=True))
    first = next((i for i, is_trained in enumerate(conversation.trained) if is_trained), len(turns))
    return turns[:first], turns[first:]


ENVIRONMENT = "environment"  # the column by which rows choose theirs
ANSWER = "answer"  # the argument of reward functions that has the row's own answer
# columns that TRL does not hand to reward functions
OF_COMPLETION = ("prompt", "completion", "completion_ids")
EMPTY = make_message("assistant", "")  # in the place of the answer, which a conversation needs


def parse_prompt(row: Row, source: DatasetSource) -> ParsedRow:
    """Reads a row as a prompt: messages without the last answer, a question as the user's turn, or
    a text.

    Raises `BadRow`.

    >>> parsed = parse_prompt(
    ...     {"prompt": "2+2=", "completion": "4", "level": 1}, DatasetSource(path="sums.jsonl")
    ... )
    >>> parsed.document.asked, parsed.document.row
    ('2+2=', '{"prompt": "2+2=", "columns": {"level": 1, "answer": "4"}}')
    """
    if ENVIRONMENT in row and not _find_question(row, source):  # which asks itself, as TRL's
        row = {**row, "prompt": [make_message("user", "")]}
    columns = Columns(row)
    name = _require_question(row, source)
    is_named = source.completion_column is not None
    kept_row = {key: value for key, value in row.items() if not (is_named and key == ANSWER)}
    turns = _take_turns(columns, name, source)
    answer = _find_answer(columns, source)
    if turns is None:
        question = Question(row[name], _keep(kept_row, row[name], answer))
        return ParsedRow((Group((question,)),), "prompt_completion", ())
    has_answer = role_of(turns[-1]) in ("assistant", "gpt", "model")
    conversation = make_conversation(columns, turns if has_answer else [*turns, EMPTY])
    if conversation.messages[-1]["role"] != "assistant" or len(conversation.messages) == 1:
        raise BadRow(
            f"{name}: the prompt is empty, or it does not end where the assistant would answer"
        )
    if has_answer and not is_named:
        answer = str(conversation.messages[-1]["content"])
    messages = conversation.messages[:-1]
    asked = replace(conversation, messages=messages, trained=(False,) * len(messages))
    variables = {**(source.chat_template_kwargs or {}), **conversation.variables}
    if conversation.images:  # which rewards do not get
        kept_row = {
            key: value
            for key, value in kept_row.items()
            if key != name and not holds_images(key, value)
        }
    kept = _keep(kept_row, list(messages), answer, variables=variables, tools=conversation.tools)
    return ParsedRow((Group((Question(asked, kept),)),), "messages", ())


def _take_turns(columns: Columns, name: str, source: DatasetSource) -> list[Any] | None:
    """Takes the turns of a prompt from its column; None where it is text without a template.

    Raises `BadRow` where the column holds neither text nor messages.
    """
    if name == "instruction":
        return take_question(columns, source)
    value = columns.take(name)
    if isinstance(value, list) and value:
        return value
    if not isinstance(value, str):
        raise BadRow(
            f"{name}: text or a list of messages is expected, found {describe_value(value)}"
        )
    is_chat = FORMATS[source.type].is_chat if source.type else name != "prompt"
    return [make_message("user", value)] if is_chat else None


def _find_question(row: Row, source: DatasetSource) -> str | None:
    """Finds the column of the prompt; None where the row has none."""
    usual = ("prompt", *CONVERSATION_COLUMNS, *QUESTION_COLUMNS[1:])
    return _named_prompt(row, source) or first_given(row, usual)


def _require_question(row: Row, source: DatasetSource) -> str:
    """Finds the column of the prompt. Raises `BadRow` where the row has none."""
    name = _find_question(row, source)
    if name is None:
        raise BadRow(
            f"no prompt: its columns are {list_columns(row) or 'none'}; name the one that holds "
            "the question or the messages (prompt_column)"
        )
    return name


def _find_answer(columns: Columns, source: DatasetSource) -> Any:
    """Returns what the row's answer column holds, for rewards: the column that the source names,
    else the first of ANSWER_COLUMNS with a text; None without any.
    """
    if source.completion_column is not None:
        return columns.row.get(source.completion_column)
    return next(
        (columns.row[name] for name in ANSWER_COLUMNS if isinstance(columns.row.get(name), str)),
        None,
    )


def _keep(row: Row, prompt: Any, answer: Any, **of_template: Any) -> str:
    """Writes what reward functions read of a row as JSON; values that JSON lacks become text.

    Args:
        row: Its columns, but those of OF_COMPLETION.
        prompt: The text or the messages.
        answer: The value of a column ANSWER, where the row has no such column.
        of_template: What the chat template reads beside the messages.
    """
    columns = {name: value for name, value in row.items() if name not in OF_COMPLETION}
    if answer is not None:
        columns.setdefault(ANSWER, answer)
    kept = {"prompt": prompt, "columns": columns} | {
        name: value for name, value in of_template.items() if value
    }
    return json.dumps(kept, ensure_ascii=False, default=str)


def check_prompt(question: Question, text: str, has_template: bool) -> Iterator[str]:
    """Yields the findings about `text`, what the chat template made of a prompt."""
    if isinstance(question.asked, str):
        return
    if not has_template:
        yield "plain_template"
    for role, name in (("system", "system_dropped"), ("user", "user_dropped")):
        contents = [
            m["content"].rpartition(IMAGE)[2].strip()
            for m in question.asked.messages
            if m["role"] == role
        ]
        if any(content.rpartition("\n")[2].strip() not in text for content in contents):
            yield name
