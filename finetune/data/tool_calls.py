"""Tool calls of sampled answers: reading the calls, and encoding the results for the next turn."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers.utils.chat_parsing import parse_response

from finetune.config.schema import Recipe
from finetune.data.messages import REASONING_KEYS, BadRow, Message, count_common
from finetune.data.tokenize import encode_after
from finetune.data.tokenizer import (
    Encoder,
    Renderer,
    Tools,
    add_variables,
    apply_template,
    choose_tools,
    find_stop_token_ids,
    make_encoder,
    make_renderer_of,
)
from finetune.errors import UserError

# How the name and the arguments that a pattern has matched become a call.
CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
TAGGED_CALL = {"content": "xml-inline", "transform": CALL}
# Arguments written as text; transformers converts them to the types of the tool's schema.
TEXT_VALUES = {"value_parser": {"name": "text"}}
# How model families write a call, as the field `tool_calls` of transformers' response templates.
# STOP stands for any token at which generation stops.
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
        "content_args": TEXT_VALUES
        | {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
        **TAGGED_CALL,
    },
    {  # GLM
        "open_pattern": r"<tool_call>(?P<name>[^\s<]+)\s*",
        "close_pattern": r"</tool_call>\s*",
        "content_args": TEXT_VALUES
        | {
            "tag_pattern": r"<arg_key>(?P<key>[^<]+)</arg_key>"
            r"\s*<arg_value>(?P<value>.*?)</arg_value>"
        },
        **TAGGED_CALL,
    },
)
# A call of a tool that does not exist shows how a chat template writes calls and results.
PROBE = "probe_tool"
PROBE_VALUE = "the value of a probe"
PROBE_RESULT = "the result of a probe"
PROBE_PARAMETERS = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "number": {"type": "integer"}},
}
PROBE_TOOLS: Tools = (
    {
        "type": "function",
        "function": {"name": PROBE, "description": "A probe.", "parameters": PROBE_PARAMETERS},
    },
)
ADVICE = (
    "set chat_template to one with tools (qwen, hermes, llama3.1), or give the tokenizer a "
    "response_template"
)


def count_tool_tokens(tokenizer: Any) -> int:
    """Counts the tokens that the descriptions of the recipe's tools add to a prompt, at most.

    With environments, the prompt of each describes other tools. Returns 0 without tools.

    `tokenizer`: from `load_tokenizer`.
    """
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
    """Reads turns that may call tools, and encodes the tools' results, as a chat template writes
    them.

    Returned by `make_tool_turns`.
    """

    renderer: Renderer
    tokenizer: Any
    encoder: Encoder
    response_template: Any  # by which transformers parses an answer
    stops: re.Pattern[str]  # matches a token at which generation stops

    def read(self, ids: list[int], row: Mapping[str, Any]) -> Message:
        """Reads a sampled turn as a message.

        If the turn cannot be parsed, the message has no calls, and its content is the whole text
        without special tokens.

        Args:
            ids: The sampled tokens.
            row: The prompt's row as rewards read it; it may have its own tools and variables.
        """
        message = self.parse(self.tokenizer.decode(ids), row)
        if message is not None:
            return message
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        return {"role": "assistant", "content": text}

    def parse(self, answer: str, row: Mapping[str, Any]) -> Message | None:
        """Parses the text of an answer, special tokens included, as a message.

        Reasoning is under `reasoning_content`, whatever key the response template gives it.

        Returns None if the text cannot be parsed, or a thought in it is not closed.
        """
        renderer, tools = self._fit_to_row(row)
        prompt = renderer.generation_prompt
        try:
            parsed = parse_response(
                answer, self.response_template, prefix=prompt, tools=list(tools)
            )
            calls = [
                {"type": "function", "function": _read_call(call)}
                for call in parsed.get("tool_calls") or ()
            ]
        except Exception:  # patterns and parsers raise anything for what a model may write
            return None
        # transformers would take the rest of an unclosed thought for one that has ended.
        turn = prompt + answer
        if turn.count("<think>") > turn.count("</think>"):
            return None
        message = {
            "reasoning_content" if key in REASONING_KEYS else key: value
            for key, value in parsed.items()
            if key != "tool_calls" and value is not None
        }
        message["content"] = parsed.get("content") or ""
        if calls:
            message["tool_calls"] = calls
        return message

    def encode_results(self, results: Sequence[Message], row: Mapping[str, Any]) -> list[int]:
        """Encodes the results of tools, as they follow the turn that called the tools.

        The ids begin after the stop token of that turn, and end with the next generation prompt.
        They come from a conversation made up around the results, so that no sampled token is
        encoded again.

        Raises `UserError` if the template rejects the results, which may depend on the row's own
        tools and variables.
        """
        renderer, tools = self._fit_to_row(row)
        try:
            text, stop = _render_results(renderer, results, tools, self.stops)
        except BadRow as error:
            prompt = f"{row.get('prompt', '')!s:.200}"
            advice = "change the row's tools or chat_template_kwargs, or set another chat_template"
            raise UserError(
                f"tools: the results of the prompt {prompt!r}: {error}; {advice}"
            ) from None
        return encode_after(text[stop.end() :], stop[0], self.encoder)

    def _fit_to_row(self, row: Mapping[str, Any]) -> tuple[Renderer, Tools]:
        """Returns the renderer with the row's variables, and the tools of the row's prompt."""
        return add_variables(self.renderer, row.get("variables")), choose_tools(self.renderer, row)


def make_tool_turns(recipe: Recipe, tokenizer: Any) -> ToolTurns:
    """Finds how the chat template of a tokenizer writes calls and results of tools.

    Raises `UserError` if the template does not describe tools, calls or results to the model, or if
    no known way to read calls fits it.
    """
    renderer = make_renderer_of(recipe.data, tokenizer)
    stop_ids = find_stop_token_ids(tokenizer)
    stop_pattern = "|".join(map(re.escape, tokenizer.convert_ids_to_tokens(stop_ids)))
    if not renderer.has_template:
        raise UserError(f"tools: the tokenizer has no chat template; {ADVICE}")
    question = {"role": "user", "content": "?"}
    try:
        asked = apply_template(renderer, [question], PROBE_TOOLS, add_generation_prompt=True)
        if PROBE not in asked:
            raise UserError(
                f"tools: the chat template does not describe them to the model; {ADVICE}"
            )
        # With a thought, since the generation prompt may open one.
        thoughtful_call = _make_call_message() | {"reasoning_content": "Hm."}
        answered = apply_template(renderer, [question, thoughtful_call], PROBE_TOOLS)
        answer = answered[count_common(asked, answered) :]
        turns = _choose_response_template(renderer, tokenizer, answer, stop_pattern)
        result = {"role": "tool", "name": PROBE, "content": PROBE_RESULT}
        # Raises if the template cannot write results.
        _render_results(renderer, [result], PROBE_TOOLS, re.compile(stop_pattern))
    except BadRow as error:
        raise UserError(f"tools: {error}; {ADVICE}") from None
    return turns


def _choose_response_template(
    renderer: Renderer, tokenizer: Any, answer: str, stop_pattern: str
) -> ToolTurns:
    """Returns the turns with the first response template that reads the probe's call correctly.

    Args:
        renderer: The renderer. If its tokenizer has a response template, that is tried first.
        tokenizer: The tokenizer.
        answer: The text that the chat template writes for the probe's call.
        stop_pattern: Matches a token at which generation stops.

    Raises:
        UserError: No response template reads the call.
    """
    encoder = make_encoder(tokenizer)
    stops = re.compile(stop_pattern)
    for response_template in (renderer.response_template, *_list_response_templates(stop_pattern)):
        if not response_template:  # the tokenizer has none
            continue
        turns = ToolTurns(renderer, tokenizer, encoder, response_template, stops)
        message = turns.parse(answer, {"tools": PROBE_TOOLS})
        if message is not None and message.get("tool_calls") == _make_call_message()["tool_calls"]:
            return turns
    raise UserError(
        f"tools: no way is known to read a call of this chat template: {answer!r}; {ADVICE}"
    )


def _list_response_templates(stop_pattern: str) -> Iterator[Mapping[str, Any]]:
    """Yields a response template of transformers for each way to write a call in CALLS.

    `stop_pattern`: matches a token at which generation stops.
    """
    for call_format in CALLS:
        calls_field = {
            key: value.replace("STOP", stop_pattern) if key == "close_pattern" else value
            for key, value in call_format.items()
        }
        yield {
            "defaults": {"role": "assistant"},
            # The prefix that `parse` passes is the generation prompt alone.
            "start_anchor_pattern": r"\A.*?(?=<think>|\Z)",
            "fields": {
                "reasoning_content": {"open": "<think>", "close_pattern": r"</think>\s*"},
                "tool_calls": calls_field | {"repeats": True},
                "content": {"close_pattern": rf"(?:{stop_pattern})\s*"},
            },
        }


def _make_call_message(name: str = PROBE) -> Message:
    """Makes an assistant's message that calls the tool `name` with the probe's arguments."""
    function = {"name": name, "arguments": {"text": PROBE_VALUE, "number": 7}}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": function}],
    }


def _read_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Returns {"name": ..., "arguments": ...} of a parsed call.

    Raises `KeyError` or `TypeError` if the call has no name.
    """
    function = call.get("function", call)
    name = function["name"]
    arguments = function.get("arguments")
    if not isinstance(name, str):
        raise TypeError(name)
    return {"name": name, "arguments": {} if arguments is None else arguments}


def _render_results(
    renderer: Renderer, results: Sequence[Message], tools: Tools, stops: re.Pattern[str]
) -> tuple[str, re.Match[str]]:
    """Renders a made-up conversation that ends with a call of a tool and its `results`.

    Returns:
        The conversation's text with the generation prompt, and the match of the stop token that
        ends the call's turn.

    Raises:
        BadRow: The template rejects the conversation, writes no such token, or leaves out the
            probe's result.
    """
    messages = [{"role": "user", "content": "?"}, _make_call_message(results[0]["name"]), *results]
    text = apply_template(renderer, messages, tools, add_generation_prompt=True)
    # The call's argument: templates may write it in quotes, but not in other words.
    call_position = text.find(PROBE_VALUE)
    stop = stops.search(text, call_position) if call_position >= 0 else None
    if stop is None:
        raise BadRow(
            "the chat template writes no token at which generation stops after a call; a marker "
            "that is no token of this tokenizer, such as <|im_end|>, belongs in added_tokens"
        )
    is_probe = results[0]["content"] == PROBE_RESULT
    if is_probe and PROBE_RESULT not in text[stop.end() :]:
        raise BadRow("the chat template does not write the result of a tool")
    return text, stop
