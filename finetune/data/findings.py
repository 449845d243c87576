"""The kinds of findings about training data: how severe each is, and what its message says.

A finding is something that is wrong with the data, or worth knowing about it.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NoReturn

from finetune.data.messages import list_columns
from finetune.errors import UserError
from finetune.units import counted

Severity = Literal["notice", "warning", "fatal"]
MAX_SHOWN_ROWS = 3  # how many rows a finding names


@dataclass(frozen=True, slots=True)
class Finding:
    """Something found in the data. Returned by `Tally.list_findings`."""

    name: str  # a key of CHECKS
    severity: Severity
    rows: int  # number of rows that it was found in
    of: int  # number of rows that were examined
    where: tuple[str, ...]  # files and lines of the first rows that it was found in
    what: str  # the message, which also says the two fields that follow
    detail: str = ""  # what exactly the first row has
    tokens: int = 0  # number of tokens added to the data

    @property
    def is_fatal(self) -> bool:
        """Whether the finding stops the training."""
        return self.severity == "fatal"

    def __str__(self) -> str:
        """The finding as a line of the log.

        >>> print(
        ...     Finding(
        ...         "doubled_bos",
        ...         "fatal",
        ...         2,
        ...         2,
        ...         ("a.jsonl:1", "a.jsonl:2"),
        ...         "the text begins with two BOS",
        ...     )
        ... )
        fatal: doubled_bos: in 2 of 2 rows the text begins with two BOS (a.jsonl:1, a.jsonl:2)
        """
        text = (
            f"{self.severity}: {self.name}: in {self.rows:,} of {counted(self.of, 'row')} "
            f"{self.what}"
        )
        if not self.where:
            return text
        ellipsis = ", ..." if self.rows > len(self.where) else ""
        return f"{text} ({', '.join(self.where)}{ellipsis})"


@dataclass(frozen=True, slots=True)
class Check:
    """A kind of finding: the message, and how severe it is in some rows and in every row."""

    some: Severity  # the severity where some of the rows have it
    every: Severity  # the severity where every row has it, or more than the share `many` of them
    what: str  # the message
    many: float = 1.0
    names_unused: bool = False  # whether the message also lists the columns that were not read


CHECKS: dict[str, Check] = {
    "nothing_trained": Check("warning", "fatal", "no token is trained on; such rows are not used"),
    "no_end_of_turn": Check(
        "fatal",
        "fatal",
        "no end-of-turn token is trained on, so the model does not learn to stop; use a "
        "chat_template that writes one after the assistant's content (a named one, such as glm4 "
        "or chatml, or your own with it inside {% generation %} markers), or a tokenizer with "
        "an eos_token",
    ),
    "stop_not_trained": Check(
        "warning",
        "fatal",
        "the answer's trained end-of-turn token is not one at which generation stops "
        "(eos_token, generation_config.json), so no answer would end; name it in eot_tokens",
    ),
    "end_of_turn_is_text": Check(
        "warning",
        "warning",
        "the chat template ends the assistant's turn with text that is not a special token of "
        "this tokenizer; generation will not stop at it (added_tokens and eot_tokens make it one)",
    ),
    "doubled_bos": Check(
        "warning",
        "fatal",
        "the text begins with two BOS tokens; remove one from the template or the text",
    ),
    "typed_special_token": Check(
        "warning",
        "warning",
        "the content contains a special token, such as an end-of-turn, as text, and is "
        "tokenized with it: content can end a turn and begin another",
    ),
    "system_dropped": Check("warning", "warning", "the chat template drops the system message"),
    "user_dropped": Check("warning", "fatal", "the chat template drops a user's message"),
    "assistant_dropped": Check(
        "warning",
        "fatal",
        "the chat template drops the assistant's content; use one that writes message['content']",
        many=0.1,
    ),
    "tool_calls_dropped": Check(
        "fatal",
        "fatal",
        "the chat template drops tool calls, so the model learns to say nothing where it should "
        "call; use one that writes them (chat_template: chatml, qwen3, llama3.1, mistral-v3, ...)",
    ),
    "tools_dropped": Check(
        "warning",
        "warning",
        "the chat template drops tool schemas, tool results, or calls that are not trained on; "
        "use one that writes them (chat_template: chatml, qwen3, llama3.1, mistral-v3, ...)",
    ),
    "reasoning_dropped": Check(
        "warning",
        "fatal",
        (
            "the chat template drops an answer's reasoning; use one that writes it (and turns: "
            "auto), or remove it"
        ),
    ),
    "reasoning_twice": Check(
        "warning",
        "fatal",
        "an answer has reasoning in a key and between tags in its content, and the chat template "
        "writes both, so the model learns to think twice; keep one",
    ),
    "unlike_inference": Check(
        "warning",
        "warning",
        "the answer, or the text before it, differs from what the model sees and writes at "
        "inference: the chat template writes earlier turns differently once others follow; "
        "remove turns: whole, if it is set",
    ),
    "prompt_not_continued": Check(
        "warning",
        "warning",
        "a trained answer does not follow the prompt of inference, such as one that opens "
        "<think> for an answer without reasoning, so the model is not trained on what it will "
        "be asked; give the answers reasoning_content, turn thinking off (chat_template_kwargs: "
        "{enable_thinking: false} in the entry of datasets, and in chat), or use a "
        "chat_template whose prompt fits the answers",
    ),
    "no_reasoning": Check(
        "notice",
        "warning",
        "no answer has reasoning, although the chat template has a place for it, so the model "
        "learns to answer without; give the answers reasoning_content, or, if the template "
        "reads it, set chat_template_kwargs: {enable_thinking: false} in the entry of datasets, "
        "and in chat",
    ),
    "not_read_back": Check(
        "warning",
        "warning",
        "the tokenizer's own response_template does not parse the answer back into what the row "
        "has, and a server would parse it in the same way; use the chat_template that it was "
        "made for, or set it to null in tokenizer_config.json",
    ),
    "turns_split": Check(
        "notice",
        "notice",
        "the turns are trained in several documents, each with the prompt that inference gives, "
        "because the chat template writes earlier turns differently once others follow (turns: "
        "whole keeps one document)",
    ),
    "empty_answer": Check(
        "warning",
        "fatal",
        "an answer that is trained on is empty, so the model learns to say nothing",
        many=0.5,
    ),
    "repeated_keys": Check(
        "warning",
        "warning",
        (
            "two columns, or two keys of one object, have the same name; only the last one's "
            "value is read"
        ),
    ),
    "skipped": Check(
        "warning",
        "warning",
        "the format is unknown or the row is damaged; it was skipped (on_bad_row)",
    ),
    "truncated": Check(
        "warning",
        "warning",
        "the row has more than max_length tokens and was truncated (overlength)",
    ),
    "truncated_untrained": Check(
        "warning",
        "fatal",
        "no trained token is left after truncating to max_length; such rows are not used",
    ),
    "dropped": Check(
        "warning", "fatal", "the row has more than max_length tokens and was dropped (overlength)"
    ),
    "split": Check(
        "notice", "notice", "the row has more than max_length tokens and was split (overlength)"
    ),
    "duplicates": Check("notice", "warning", "the text is the same as an earlier row's", many=0.5),
    "held_out_in_training": Check(
        "warning",
        "warning",
        "a held-out text is also trained on; the held-out loss will be too low",
    ),
    "sides_equal": Check(
        "warning", "fatal", "chosen and rejected are the same; such pairs are not used"
    ),
    "side_empty": Check(
        "warning", "fatal", "the chosen or the rejected answer is empty; such pairs are not used"
    ),
    "side_untrained": Check(
        "warning",
        "fatal",
        (
            "the chosen or the rejected answer is masked (train: false or weight: 0); such pairs "
            "are not used"
        ),
    ),
    "prompt_missing": Check(
        "warning",
        "fatal",
        "no prompt is found: no column with a known name holds one, and the answers do not begin "
        "with it, so they would be trained on without it; name its column (prompt_column), or "
        "remove the columns that are not used",
        many=0.5,
        names_unused=True,
    ),
    "question_part_unread": Check(
        "warning",
        "warning",
        "the question is asked without a column that may be part of it, such as its context or its "
        "choices; write both into one column, or, if the question is whole, name its column "
        "(prompt_column)",
        names_unused=True,
    ),
    "prompt_unread": Check(
        "warning",
        "warning",
        "the prompt's column is not read: chosen and rejected are whole conversations that ask "
        "something else; remove the column, or keep only the answers in chosen and rejected",
    ),
    "truncated_equal": Check(
        "warning",
        "fatal",
        "chosen and rejected are the same after truncating to max_length; such pairs are not used",
    ),
    "order_swapped": Check(
        "notice",
        "warning",
        "the row's own scores rate the rejected answer higher; if most rows have this, the "
        "columns are swapped (chosen_column, rejected_column)",
        many=0.5,
    ),
    "best_unread": Check(
        "warning",
        "warning",
        "only the first num_negatives + 1 documents are read, and a later one has a higher "
        "score; put it first, or raise num_negatives",
    ),
    "same_scores": Check(
        "notice",
        "warning",
        "all documents of a query have the same score, from which only loss_type: pointwise learns",
    ),
    "same_texts": Check(
        "warning",
        "warning",
        "the document that answers the query is the query itself or one of its negatives, so "
        "the loss pulls a text toward itself or away from itself; correct the row",
    ),
    "same_ratings": Check(
        "warning",
        "warning",
        "the answer has the same rating as all others; a method of ratings learns from good "
        "answers beside bad ones",
    ),
    "images_unread": Check(
        "warning",
        "warning",
        "a column holds images that nothing reads; remove it, or name a vision-language model",
    ),
    "images_dropped": Check(
        "fatal",
        "fatal",
        "a column holds images that nothing reads, so the model would learn to answer without "
        "seeing them; make the rows conversations (type: messages, and a chat_template that "
        "writes images), with the images in a column `images`, or remove the column",
    ),
    "prompts_differ": Check(
        "warning",
        "warning",
        "the chat template writes the prompt differently before the chosen and before the "
        "rejected answer",
    ),
    "no_space_between": Check(
        "notice",
        "notice",
        "there is no space between prompt and completion; they are joined as they are",
    ),
    "begins_with_assistant": Check(
        "notice",
        "warning",
        "the conversation begins with the assistant; at inference it begins with the user",
    ),
    "calls_without_tools": Check(
        "warning",
        "warning",
        "the assistant calls a tool that neither `tools` nor a system message describes; name the "
        "schemas in `tools`",
    ),
    "plain_template": Check(
        "notice",
        "notice",
        (
            "the tokenizer has no chat template; `plain` is used and saved with the model "
            "(chat_template sets another)"
        ),
    ),
    "columns_recognized": Check(
        "notice",
        "notice",
        "two columns are read as the user's and the assistant's turn because of their names "
        "(type: messages, prompt_column and completion_column set this; type: prompt_completion "
        "joins them without a chat template)",
    ),
    "template_unused": Check(
        "warning",
        "warning",
        "prompt and completion are plain text and do not use the tokenizer's chat template, "
        "which chat and servers use; type: messages in the entry of datasets applies it",
    ),
}


@dataclass(slots=True)
class Tally:
    """Counts, for each kind of finding, the rows that have it. Each key is one of CHECKS.

    Stored with the tokens as JSON.
    """

    rows: dict[str, int] = field(default_factory=dict)  # number of rows
    where: dict[str, list[str]] = field(default_factory=dict)  # files and lines of the first rows
    details: dict[str, str] = field(default_factory=dict)  # what exactly the first row has
    tokens: dict[str, int] = field(default_factory=dict)  # number of tokens added to the data

    def add(self, name: str, places: Sequence[str], rows: int | None = None) -> None:
        """Counts a finding in some more rows.

        Args:
            name: A key of CHECKS.
            places: Files and lines of the rows that have it, or of the first of these rows.
            rows: The number of rows that have it; None: that of `places`.
        """
        rows = len(places) if rows is None else rows
        if rows:
            self.rows[name] = self.rows.get(name, 0) + rows
            shown = [*self.where.get(name, ()), *places[:MAX_SHOWN_ROWS]]
            # a stream can read a row again
            self.where[name] = list(dict.fromkeys(shown))[:MAX_SHOWN_ROWS]

    def add_finding(self, finding: Finding) -> None:
        """Counts what another tally has found in some more rows."""
        name = finding.name
        self.add(name, finding.where, finding.rows)
        if finding.detail:
            self.details.setdefault(name, finding.detail)
        if finding.tokens:
            self.tokens[name] = self.tokens.get(name, 0) + finding.tokens

    def list_findings(self, examined: int, unused_columns: Collection[str] = ()) -> list[Finding]:
        """Lists the findings, the most severe first, then by the number of rows.

        Args:
            examined: The number of rows that were examined.
            unused_columns: The columns that hold a value and were not read.
        """
        findings = []
        for name, rows in self.rows.items():
            check = CHECKS[name]
            if rows >= examined or rows > check.many * examined:
                severity = check.every
            else:
                severity = check.some
            what = check.what
            if check.names_unused:
                what += f"; not used: {list_columns(unused_columns)}"
            tokens = self.tokens.get(name, 0)
            if tokens:
                what += f"; {tokens:,} more tokens"
            detail = self.details.get(name, "")
            if detail:
                what += f"; first: {detail}"
            where = tuple(self.where.get(name, ()))
            findings.append(Finding(name, severity, rows, examined, where, what, detail, tokens))
        order = {"fatal": 0, "warning": 1, "notice": 2}
        return sorted(findings, key=lambda finding: (order[finding.severity], -finding.rows))


def list_warnings(findings: Iterable[Finding]) -> list[Finding]:
    """Lists the findings above a notice."""
    return [finding for finding in findings if finding.severity != "notice"]


def refuse_fatal(findings: Iterable[Finding]) -> None:
    """Raises one `UserError` that lists the fatal findings, if there are any."""
    if fatal := [str(finding) for finding in findings if finding.is_fatal]:
        raise UserError.of(fatal)


def refuse_empty(findings: Iterable[Finding], problem: str) -> NoReturn:
    """Raises one `UserError` that says why nothing is left of the data: the findings above a
    notice, and last `problem`.
    """
    raise UserError.of([*map(str, list_warnings(findings)), problem])


def check_longest_example(
    tokens: int, max_position_embeddings: int | None, whose: str = "model"
) -> list[str]:
    """Returns one warning if the longest example has more tokens than the model has positions.

    Args:
        tokens: The tokens of the longest example.
        max_position_embeddings: The positions of the model; None: its config does not say.
        whose: What the message calls the model, such as "teacher".

    >>> check_longest_example(512, 512), check_longest_example(512, None)
    ([], [])
    >>> "but the model was made for 512 positions" in check_longest_example(1024, 512)[0]
    True
    """
    if max_position_embeddings is None or tokens <= max_position_embeddings:
        return []
    return [
        f"warning: examples have up to {tokens:,} tokens, but the {whose} was made for "
        f"{max_position_embeddings:,} positions (max_position_embeddings of its config); set "
        f"max_length: {max_position_embeddings}"
    ]
