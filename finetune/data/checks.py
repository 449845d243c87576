"""What is wrong, or only worth knowing, about the data: named, weighed, and said in one sentence each."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from finetune.units import counted

Severity = Literal["notice", "warning", "fatal"]
SHOWN = 3  # places named with a finding


@dataclass(frozen=True, slots=True)
class Finding:
    """Something found in the data. Fatal ones stop the training."""

    name: str
    severity: Severity
    rows: int  # that it was found in
    of: int  # rows looked at
    where: tuple[str, ...]  # the first of them, as file:row
    what: str

    def __str__(self) -> str:
        """
        >>> print(Finding("doubled_bos", "fatal", 2, 2, ("a.jsonl:1", "a.jsonl:2"), "the text begins with two BOS"))
        fatal: doubled_bos: in 2 of 2 rows the text begins with two BOS (a.jsonl:1, a.jsonl:2)
        """
        places = f" ({', '.join(self.where)}{', ...' if self.rows > len(self.where) else ''})" if self.where else ""
        return f"{self.severity}: {self.name}: in {self.rows:,} of {counted(self.of, 'row')} {self.what}{places}"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of finding: how bad it is in some rows, how bad in every row, and what it says."""

    some: Severity
    every: Severity
    what: str
    many: float = 1.0  # a greater share of the rows than this counts as every row


KINDS: dict[str, Kind] = {
    "nothing_trained": Kind("warning", "fatal", "no token is trained on; such rows are left out"),
    "no_end_of_turn": Kind(
        "warning",
        "fatal",
        "no end-of-turn token is trained, so that the model does not learn to stop; give a chat_template that writes "
        "one after the assistant's words, or a tokenizer with an eos_token",
    ),
    "end_of_turn_is_text": Kind(
        "warning",
        "warning",
        "the chat template ends the assistant's turn with something that is no special token of this tokenizer; "
        "generation will not stop at it",
    ),
    "doubled_bos": Kind(
        "warning", "fatal", "the text begins with two BOS tokens; take one out of the template or text"
    ),
    "typed_special_token": Kind(
        "warning",
        "warning",
        "a special token such as an end-of-turn is typed inside the content, and is read as one: text can end turns "
        "and begin others",
    ),
    "system_dropped": Kind("warning", "warning", "the chat template leaves the system turn out"),
    "user_dropped": Kind("warning", "fatal", "the chat template leaves a user's words out"),
    "assistant_dropped": Kind(
        "warning",
        "fatal",
        "the chat template leaves the assistant's words out; give one that writes message['content']",
        many=0.1,
    ),
    "tool_calls_dropped": Kind(
        "fatal",
        "fatal",
        "the chat template leaves tool calls out, so that the model learns to say nothing where it should call; give "
        "one that writes them (chat_template: chatml, hermes, qwen, llama3.1 or mistral)",
    ),
    "tools_dropped": Kind(
        "warning",
        "warning",
        "the chat template leaves tools out: their schemas, what they answered, or calls that are not trained on; "
        "give one that writes them (chat_template: chatml, hermes, qwen, llama3.1 or mistral)",
    ),
    "reasoning_dropped": Kind(
        "warning", "fatal", "the chat template leaves reasoning_content out; give one that writes it, or take it out"
    ),
    "empty_answer": Kind(
        "warning",
        "fatal",
        "an answer that is trained on is empty, so that the model learns to say nothing",
        many=0.5,
    ),
    "repeated_keys": Kind(
        "warning",
        "warning",
        "two columns, or two keys of one object, have the same name; only the last one's value is read",
    ),
    "skipped": Kind("warning", "warning", "the format is not known or the row is damaged; it was skipped (on_bad_row)"),
    "truncated": Kind("warning", "warning", "more than max_length tokens stood; the rest was cut off (overlength)"),
    "truncated_untrained": Kind(
        "warning", "fatal", "what was left after cutting at max_length holds no trained token; such rows are left out"
    ),
    "dropped": Kind("warning", "fatal", "more than max_length tokens stood; the row was dropped (overlength)"),
    "split": Kind("notice", "notice", "more than max_length tokens stood; the row was split (overlength)"),
    "duplicates": Kind("notice", "warning", "the text is that of an earlier row", many=0.5),  # the first is no copy
    "held_out_in_training": Kind("warning", "warning", "a held-out text is trained on too; the held-out loss flatters"),
    "no_space_between": Kind(
        "notice", "notice", "prompt and completion meet without a space; they are joined as they stand"
    ),
    "begins_with_assistant": Kind("notice", "notice", "the conversation begins with the assistant"),
    "plain_template": Kind(
        "notice",
        "notice",
        "the tokenizer has no chat template; the plain one is used and kept with the model (chat_template names another)",
    ),
    "template_unused": Kind(
        "notice",
        "notice",
        "prompt and completion are plain text; the tokenizer's chat template has no part in them (type: messages gives "
        "them one)",
    ),
}


@dataclass(slots=True)
class Tally:
    """What was found while rows were read, by name. Grows row by row; kept with the tokens as JSON."""

    rows: dict[str, int] = field(default_factory=dict)
    where: dict[str, list[str]] = field(default_factory=dict)

    def note(self, name: str, places: Sequence[str]) -> None:
        """Notes that `name` was found at `places`."""
        if places:
            self.count(name, len(places), places)

    def count(self, name: str, rows: int, places: Sequence[str]) -> None:
        """Notes that `name` was found in so many rows, the first of them at `places`."""
        self.rows[name] = self.rows.get(name, 0) + rows
        shown = [*self.where.get(name, ()), *places[:SHOWN]]
        self.where[name] = list(dict.fromkeys(shown))[:SHOWN]  # a row of a stream may come again


def findings(tally: Tally, of: int) -> list[Finding]:
    """The tally as findings over `of` rows, the gravest first."""
    found = [_finding(name, rows, of, tally.where.get(name, ())) for name, rows in tally.rows.items() if rows]
    order = {"fatal": 0, "warning": 1, "notice": 2}
    return sorted(found, key=lambda finding: (order[finding.severity], -finding.rows))


def fatal(found: Iterable[Finding]) -> list[Finding]:
    """Those that stop the training."""
    return [finding for finding in found if finding.severity == "fatal"]


def _finding(name: str, rows: int, of: int, where: Sequence[str]) -> Finding:
    kind = KINDS[name]
    severity = kind.every if rows >= of or rows > kind.many * of else kind.some
    return Finding(name, severity, rows, of, tuple(where), kind.what)
