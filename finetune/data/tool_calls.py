"""Tool calls of sampled answers: how they are read, and what a chat template writes from a result
to the next turn.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from transformers.utils.chat_parsing import parse_response

from finetune.config.schema import Recipe
from finetune.constants import Fields, Record
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
CALLS: Sequence[Fields] = (
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
    """Counts the tokens that the descriptions of the recipe's tools add to a prompt, at most."""
    environments = getattr(tokenizer, "environments", {}).values()
    tools_of_prompts = [getattr(tokenizer, "tools", ())]
    tools_of_prompts += [facts.tools for facts in environments]
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

    def read(self, ids: list[int], row: Fields) -> Message:
        """Reads a sampled turn as a message.

        A turn that cannot be parsed becomes a message whose content is all of its text, without
        calls.

        Args:
            ids: The sampled tokens.
            row: The prompt's row, as rewards read it; with its own tools and variables.
        """
        message = self.parse(self.tokenizer.decode(ids), row)
        if message is not None:
            return message
        words = self.tokenizer.decode(ids, skip_special_tokens=True)
        return {"role": "assistant", "content": words}

    def parse(self, answer: str, row: Fields) -> Message | None:
        """Parses the text of an answer, special tokens included; None where that fails."""
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
        message = {
            key: value for key, value in parsed.items() if key != "tool_calls" and value is not None
        }
        message["content"] = parsed.get("content") or ""
        if calls:
            message["tool_calls"] = calls
        return message

    def encode_results(self, results: Sequence[Message], row: Fields) -> list[int]:
        """Encodes the results of tools: what follows the token at which the turn with calls ended,
        up to where the assistant writes again.

        The ids come from a conversation made up around the results, so that no sampled token is
        encoded again.

        Raises `UserError` where the template rejects it, as it may with a row's own tools and
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

    def _of_row(self, row: Fields) -> tuple[Renderer, Tools]:
        return add_variables(self.renderer, row.get("variables")), choose_tools(self.renderer, row)


def make_tool_turns(recipe: Recipe, tokenizer: Any) -> ToolTurns:
    """Finds how the chat template of a tokenizer writes calls and results of tools.

    Raises `UserError` where it cannot write tools, or no way to read its calls is known.
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
        thoughtful_call = _make_call() | {"reasoning_content": "Hm."}
        answered = apply_template(renderer, [question, thoughtful_call], PROBED)
        answer = answered[count_common(asked, answered) :]
        turns = _choose_response_template(renderer, tokenizer, answer, stop)
        result = {"role": "tool", "name": PROBE, "content": RESULT}
        _write_results(renderer, [result], PROBED, re.compile(stop))  # raises where it cannot
    except BadRow as error:
        raise UserError(f"tools: {error}; {ADVICE}") from None
    return turns


def _choose_response_template(
    renderer: Renderer, tokenizer: Any, answer: str, stop: str
) -> ToolTurns:
    """Returns turns with the first response template that reads the probe's call from `answer`.

    Args:
        renderer: The renderer; a response template of its tokenizer comes first.
        tokenizer: The tokenizer.
        answer: What the chat template writes for the probe's call.
        stop: A pattern of the tokens at which generation stops.

    Raises:
        UserError: None reads it.
    """
    encoder = make_encoder(tokenizer)
    for response_template in (renderer.response_template, *_list_response_templates(stop)):
        if not response_template:
            continue
        turns = ToolTurns(renderer, tokenizer, encoder, response_template, re.compile(stop))
        message = turns.parse(answer, {"tools": PROBED})
        if message is not None and message.get("tool_calls") == _make_call()["tool_calls"]:
            return turns
    raise UserError(
        f"tools: no way is known to read a call of this chat template: {answer!r}; {ADVICE}"
    )


def _list_response_templates(stop: str) -> Iterator[Fields]:
    """Yields a response template of transformers for each way of CALLS to write a call."""
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


def _read_call(call: Fields) -> Record:
    """Returns the name and arguments of a call. Raises `KeyError` or `TypeError` without a name."""
    function = call.get("function", call)
    name = function["name"]
    arguments = function.get("arguments")
    if not isinstance(name, str):
        raise TypeError(name)
    return {"name": name, "arguments": {} if arguments is None else arguments}


def _write_results(
    renderer: Renderer, results: Sequence[Message], tools: Tools, stops: re.Pattern[str]
) -> tuple[str, re.Match[str]]:
    """Renders a conversation that ends with a call of a tool and its `results`.

    Returns:
        Its text, with the generation prompt; and the token in it at which the call's turn ends.

    Raises:
        BadRow: The template writes no such token, or leaves the results out.
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
