"""Tool calls of sampled answers: how they are read, and what a chat template writes from a result
to the next turn.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers.utils.chat_parsing import parse_response

from finetune.config.schema import Recipe
from finetune.data.messages import BadRow, Message, count_common
from finetune.data.tokenize import encode_after
from finetune.data.tokenizer import (
    Encoder,
    Renderer,
    Tools,
    add_variables,
    apply_template,
    choose_tools,
    end_of_answer_ids,
    make_encoder,
    make_renderer_of,
)
from finetune.errors import UserError

CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
TAGS = {"content": "xml-inline", "transform": CALL}
VALUES = {"value_parser": {"name": "text"}}  # whose types are those of the tool's schema
# How families write a call, as fields of transformers' response templates; STOP: a token at which
# generation stops.
CALLS: Sequence[Mapping[str, Any]] = (
    {  # Hermes, Qwen up to 3, and most others
        "open": "<tool_call>",
        "close_pattern": r"</tool_call>\s*",
        "content": "json",
        "transform": {"type": "function", "function": "{content}"},
    },
    {  # Llama 3
        "open_pattern": r'(?:<\|python_tag\|>)?\{"name":\s*"(?P<name>[^"]+)",\s*"parameters":\s*',
        "close_pattern": r"\}\s*(?:STOP)\s*",
        "content": "json",
        "transform": CALL,
    },
    {  # Qwen from 3.5, Nemotron 3
        "open_pattern": r"<tool_call>\s*<function=(?P<name>[^\n>]+)>",
        "close_pattern": r"</tool_call>\s*",
        "content_args": VALUES
        | {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
        **TAGS,
    },
    {  # GLM
        "open_pattern": r"<tool_call>(?P<name>[^\s<]+)\s*",
        "close_pattern": r"</tool_call>\s*",
        "content_args": VALUES
        | {
            "tag_pattern": r"<arg_key>(?P<key>[^<]+)</arg_key>"
            r"\s*<arg_value>(?P<value>.*?)</arg_value>"
        },
        **TAGS,
    },
)
PROBE = "probe_tool"
VALUE = "the value of a probe"
RESULT = "the result of a probe"
PARAMETERS = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "number": {"type": "integer"}},
}
PROBED: Tools = (
    {
        "type": "function",
        "function": {"name": PROBE, "description": "A probe.", "parameters": PARAMETERS},
    },
)
ADVICE = (
    "set chat_template to one with tools (qwen, hermes, llama3.1), or give the tokenizer a "
    "response_template"
)


def count_tool_tokens(tokenizer: Any) -> int:
    """The tokens by which the descriptions of the recipe's tools make a prompt longer, at most."""
    environments = getattr(tokenizer, "environments", {}).values()
    tools_of_prompts = [getattr(tokenizer, "tools", ()), *(facts.tools for facts in environments)]
    described = [tools for tools in tools_of_prompts if tools]
    if not described:
        return 0
    question = [{"role": "user", "content": "?"}]

    def count(tools: Tools) -> int:
        text = tokenizer.apply_chat_template(question, tools=list(tools) or None, tokenize=False)
        return len(tokenizer.encode(text, add_special_tokens=False))

    return max(map(count, described)) - count(())


@dataclass(frozen=True, slots=True)
class ToolTurns:
    """The turns in which tools are called, as a chat template writes them.

    Returned by `make_tool_turns`.
    """

    renderer: Renderer
    tokenizer: Any
    encoder: Encoder
    response_template: Any  # by which transformers reads an answer
    stops: re.Pattern[str]

    def read(self, ids: list[int], row: Mapping[str, Any]) -> Message:
        """A sampled turn as a message; without calls where they are not as the template writes
        them.

        `row`: of the prompt, with what else the template reads.
        """
        plain = {
            "role": "assistant",
            "content": self.tokenizer.decode(ids, skip_special_tokens=True),
        }
        return self.parse(self.tokenizer.decode(ids), row) or plain

    def parse(self, answer: str, row: Mapping[str, Any]) -> Message | None:
        """An answer as a message, its special tokens included; None where it cannot be read."""
        own, tools = self._of_row(row)
        try:
            parsed = parse_response(
                answer, self.response_template, prefix=own.generation_prompt, tools=list(tools)
            )
            calls = [
                {"type": "function", "function": _read_call(call)}
                for call in parsed.get("tool_calls") or ()
            ]
        except Exception:  # whatever patterns and parsers raise for what a model has written
            return None
        whole = own.generation_prompt + answer
        # transformers takes the rest for a thought that ended
        if whole.count("<think>") > whole.count("</think>"):
            return None
        words = {
            key: value for key, value in parsed.items() if key != "tool_calls" and value is not None
        }
        return {
            **words,
            "content": parsed.get("content") or "",
            **({"tool_calls": calls} if calls else {}),
        }

    def encode_results(self, results: Sequence[Message], row: Mapping[str, Any]) -> list[int]:
        """The ids that follow the token at which a turn with calls ended, up to where the assistant
        writes again.

        They are found in a conversation of their own, so that no sampled token is encoded again.
        Raises `UserError` where the template rejects them, as it may with a row's own tools and
        variables.
        """
        own, tools = self._of_row(row)
        try:
            text, boundary = _write_results(own, results, tools, self.stops)
        except BadRow as error:
            asked = f"{row.get('prompt', '')!s:.200}"
            advice = "change the row's tools or chat_template_kwargs, or set another chat_template"
            raise UserError(
                f"tools: the results of the prompt {asked!r}: {error}; {advice}"
            ) from None
        return encode_after(text[boundary.end() :], boundary[0], self.encoder)

    def _of_row(self, row: Mapping[str, Any]) -> tuple[Renderer, Tools]:
        return add_variables(self.renderer, row.get("variables")), choose_tools(self.renderer, row)


def make_tool_turns(recipe: Recipe, tokenizer: Any) -> ToolTurns:
    """Raises `UserError` where the chat template cannot write tools, or no way to read its calls is
    known.
    """
    renderer = make_renderer_of(recipe.data, tokenizer)
    words = tokenizer.convert_ids_to_tokens(end_of_answer_ids(tokenizer, recipe.model.eot_tokens))
    stop = "|".join(map(re.escape, words))
    if not renderer.has_template:
        raise UserError(f"tools: the tokenizer has no chat template; {ADVICE}")
    question = {"role": "user", "content": "?"}
    try:
        asked = apply_template(renderer, [question], PROBED, add_generation_prompt=True)
        if PROBE not in asked:
            raise UserError(
                f"tools: the chat template does not describe them to the model; {ADVICE}"
            )
        # With thoughts, which a generation prompt may begin.
        answered = apply_template(
            renderer, [question, _make_call() | {"reasoning_content": "Hm."}], PROBED
        )
        answer = answered[count_common(asked, answered) :]
        for response_template in filter(
            None, (renderer.response_template, *_list_response_templates(stop))
        ):
            turns = ToolTurns(
                renderer, tokenizer, make_encoder(tokenizer), response_template, re.compile(stop)
            )
            if (turns.parse(answer, {"tools": PROBED}) or {}).get("tool_calls") == _make_call()[
                "tool_calls"
            ]:
                break
        else:
            raise UserError(
                f"tools: no way is known to read a call of this chat template: {answer!r}; {ADVICE}"
            )
        _write_results(
            renderer, [{"role": "tool", "name": PROBE, "content": RESULT}], PROBED, re.compile(stop)
        )
    except BadRow as error:
        raise UserError(f"tools: {error}; {ADVICE}") from None
    return turns


def _list_response_templates(stop: str) -> Iterator[Mapping[str, Any]]:
    for calls in CALLS:
        own = {
            key: value.replace("STOP", stop) if key == "close_pattern" else value
            for key, value in calls.items()
        }
        yield {
            "defaults": {"role": "assistant"},
            # what is given is the generation prompt alone
            "start_anchor_pattern": r"\A.*?(?=<think>|\Z)",
            "fields": {
                "reasoning_content": {"open": "<think>", "close_pattern": r"</think>\s*"},
                "tool_calls": own | {"repeats": True},
                "content": {"close_pattern": rf"(?:{stop})\s*"},
            },
        }


def _make_call(name: str = PROBE) -> Message:
    function = {"name": name, "arguments": {"text": VALUE, "number": 7}}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": function}],
    }


def _read_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Name and arguments of a call. Raises for what has no name."""
    function = call.get("function", call)
    name = function["name"]
    arguments = function.get("arguments")
    if not isinstance(name, str):
        raise TypeError(name)
    return {"name": name, "arguments": {} if arguments is None else arguments}


def _write_results(
    renderer: Renderer, results: Sequence[Message], tools: Tools, stops: re.Pattern[str]
) -> tuple[str, re.Match[str]]:
    """Returns (a conversation that ends with `results`, where the turn before them ends in it).

    Raises `BadRow`.
    """
    messages = [{"role": "user", "content": "?"}, _make_call(results[0]["name"]), *results]
    text = apply_template(renderer, messages, tools, add_generation_prompt=True)
    called = text.find(VALUE)  # templates may write it in quotes, but not in other words
    boundary = stops.search(text, called) if called >= 0 else None
    if boundary is None:
        raise BadRow(
            "the chat template writes no token at which generation stops after a call; a marker "
            "that is no token of this tokenizer, such as <|im_end|>, belongs in added_tokens"
        )
    if results[0]["content"] == RESULT and RESULT not in text[boundary.end() :]:
        raise BadRow("the chat template does not write the result of a tool")
    return text, boundary
