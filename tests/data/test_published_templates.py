"""The named templates write what their families publish: compared on generated conversations with the templates that TRL, llama.cpp
and vLLM ship, with mistral-common, with openai-harmony and with DeepSeek's own encoder. A reference that is absent is a skip.

    FINETUNE_CHAT_TEMPLATES   folders with published templates, as PATH has them: trl/chat_templates, llama.cpp's
                              models/templates, vLLM's examples
    FINETUNE_DEEPSEEK_V32     encoding_dsv32.py of DeepSeek-V3.2, or vLLM's copy of it
    TIKTOKEN_ENCODINGS_BASE   a folder with o200k_base.tiktoken, which openai-harmony needs
"""

import importlib.util
import json
import os
import re
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pytest

from finetune.data.formats import Conversation
from finetune.data.spans import ask_turns
from finetune.data.tokenizer import TEMPLATES, make_renderer
from tests.data.test_turns import ROWS, make_row, read, read_published, use_template

Asked = tuple[
    list[dict[str, Any]], list[dict[str, Any]] | None, bool
]  # messages, tools, whether an answer is asked for
VARIABLES: tuple[dict[str, Any], ...] = (
    {},
    {"enable_thinking": False},
    {"enable_thinking": True},
    {
        "preserve_thinking": True,
        "clear_thinking": False,
        "truncate_history_thinking": False,
        "reasoning_effort": "low",
    },
)


def make_asked(rows: int = ROWS) -> Iterator[Asked]:
    """Every beginning of generated conversations, with the generation prompt and without."""
    generator = np.random.default_rng(5)
    for _ in range(rows):
        conversation = read(make_row(generator))
        messages = list(conversation.messages)
        for end in range(1 + (messages[0]["role"] == "system"), len(messages) + 1):
            for asks in (False, True):
                yield messages[:end], list(conversation.tools) or None, asks


def render(tokenizer: Any, template: str, asked: Asked, **variables: Any) -> str:
    messages, tools, asks = asked
    return str(
        tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=asks,
            **variables,
        )
    )


def render_plainly(tokenizer: Any, template: str, asked: Asked, **variables: Any) -> str:
    """The same without transformers' sandbox, which refuses the lists that Kimi's templates change."""
    messages, tools, asks = asked
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    options = {"messages": messages, "tools": tools, "add_generation_prompt": asks}
    return environment.from_string(template).render(
        bos_token=tokenizer.bos_token, **options, **variables
    )


def as_mistral_reads(message: dict[str, Any]) -> dict[str, Any]:
    """A message with its reasoning as a part of its content."""
    if "reasoning_content" not in message:
        return message
    parts = [{"type": "thinking", "thinking": message["reasoning_content"]}]
    parts += [{"type": "text", "text": message["content"]}] if message["content"] else []
    return {key: value for key, value in message.items() if key != "reasoning_content"} | {
        "content": parts
    }


# Where ours differ on purpose: what of a conversation is compared, or None.
def align(name: str, asked: Asked, ours: str, theirs: str) -> tuple[str, str] | None:
    messages, tools, asks = asked
    ends = messages[-1]["role"] == "assistant" and not asks
    answers = [
        message
        for message in messages
        if message["role"] == "assistant" and not message.get("tool_calls")
    ]
    if name.startswith("glm4.") and ends:  # theirs leaves out the token that ends the last answer
        return re.sub(r"<\|(user|observation)\|>$", "", ours), theirs
    if (
        name == "kimi-k2-thinking"
    ):  # this copy finds the first answer, where its comment says the last; and writes no reasoning in it
        return None if len(answers) > 1 or (ends and answers) else (ours, theirs)
    if (
        name.startswith("mistral") and messages[0]["role"] != "system"
    ):  # theirs has a system message of its own
        return None
    if name == "deepseek-v3.1":  # vLLM's copy has line breaks and spaces between its blocks
        return re.sub(r"\s", "", ours), re.sub(r"\s", "", theirs)
    if (
        name == "smollm3"
    ):  # this copy writes no day and no tools, and ends the system turn also where there are no tools
        ours = ours.replace("Today Date: 08 July 2025\n", "")
        return None if tools else (ours, theirs.replace("<|im_end|>\n", "", 1))
    return ours, theirs


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("qwen", "qwen2_5"),
        ("qwen3", "qwen3"),
        ("qwen3.5", "qwen3_5_think"),
        ("qwen3.6", "qwen3_6"),
        ("qwen3.8", "qwen3_8"),
        ("glm4.5", "glm4moe"),
        ("glm4.5", "GLM-4.6"),
        ("glm4.7", "GLM-4.7-Flash"),
        ("gemma4", "gemma4_v5"),
        ("gpt-oss", "gptoss"),
        ("kimi-k2", "Kimi-K2-Instruct"),
        ("kimi-k2-thinking", "Kimi-K2-Thinking"),
        ("granite4", "ibm-granite-granite-4.1"),
        ("nemotron3", "nemotron_3_nano"),
        ("nemotron3", "nemotron_3_super"),
        ("mistral-v11-tekken", "Mistral-Small-3.2-24B-Instruct-2506"),
        ("mistral-v13-tekken", "mistralai-Ministral-3-14B-Reasoning-2512"),
        ("deepseek-v3.1", "tool_chat_template_deepseekv31"),
        ("smollm3", "HuggingFaceTB-SmolLM3-3B"),
    ],
)
def test_a_named_template_writes_what_the_published_one_does(
    name: str, published: str, shared_tokenizer: Any
) -> None:
    theirs, compared = read_published(published), 0
    render_theirs = render_plainly if name.startswith("kimi") else render
    for asked in make_asked():
        messages, tools, asks = asked
        if name == "gpt-oss" and any(
            len(message.get("tool_calls", ())) > 1 for message in messages
        ):
            with pytest.raises(
                jinja2.TemplateError, match="one call in a turn"
            ):  # theirs writes the first alone
                render(shared_tokenizer, TEMPLATES[name], asked)
            continue
        read_by_them = (
            [as_mistral_reads(message) for message in messages]
            if "Ministral" in published
            else messages
        )
        for given in VARIABLES:
            if (
                name == "deepseek-v3.1" and "enable_thinking" in given
            ):  # theirs has another name for it, and only in the prompt
                given = {
                    "thinking": given["enable_thinking"] and asks and messages[-1]["role"] == "user"
                }
            ours = render(shared_tokenizer, TEMPLATES[name], asked, **given)
            other = render_theirs(shared_tokenizer, theirs, (read_by_them, tools, asks), **given)
            aligned = align(name, asked, ours, other)
            if aligned is not None:
                assert aligned[0] == aligned[1]
                compared += 1
    assert compared > ROWS * 2


MISTRALS_TOKENS = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
    "[TOOL_CALLS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]",
    "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[IMG]",
)  # fmt: skip


@pytest.mark.parametrize("version", [3, 7, 11, 13])
def test_mistrals_templates_write_what_mistral_common_does(
    version: int, shared_tokenizer: Any, tmp_path: Path
) -> None:
    common = pytest.importorskip("mistral_common", reason="mistral-common is not installed")
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.protocol.instruct.validator import ValidationMode
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    # The package has Tekken's words; the later versions differ in how they write a conversation, and in their special tokens.
    tekken = json.loads(
        (Path(str(common.__file__)).parent / "data" / "tekken_240911.json").read_text("utf-8")
    )
    tekken["config"]["version"] = f"v{version}"
    tekken["special_tokens"] = [
        {"rank": rank, "token_str": word, "is_control": True}
        for rank, word in enumerate(MISTRALS_TOKENS)
    ]
    del tekken["image"]
    (tmp_path / "tekken.json").write_text(json.dumps(tekken))
    modes = {True: ValidationMode.test, False: ValidationMode.finetuning}
    theirs = {
        asks: MistralTokenizer.from_file(str(tmp_path / "tekken.json"), mode)
        for asks, mode in modes.items()
    }
    ends, compared = {"<s>": shared_tokenizer.bos_token, "</s>": shared_tokenizer.eos_token}, 0
    for asked in make_asked():
        messages, tools, asks = asked
        if (messages[-1]["role"] == "assistant") == asks or messages[-1].get("tool_calls"):
            continue  # it knows conversations that end with an answer, and those that are asked after a question or a result
        if version < 13 and any("reasoning_content" in message for message in messages):
            continue
        request = ChatCompletionRequest.from_openai(list(map(as_mistral_reads, messages)), tools)
        text = theirs[asks].encode_chat_completion(request).text
        ours = render(shared_tokenizer, TEMPLATES[f"mistral-v{version}-tekken"], asked)
        assert ours == re.sub("</?s>", lambda match: ends[match[0]], text)
        compared += 1
    assert compared > ROWS


def test_gpt_oss_is_written_as_openai_harmony_does(shared_tokenizer: Any) -> None:
    harmony = pytest.importorskip("openai_harmony", reason="openai-harmony is not installed")
    if not Path(os.environ.get("TIKTOKEN_ENCODINGS_BASE", ""), "o200k_base.tiktoken").is_file():
        pytest.skip(
            "openai-harmony needs o200k_base.tiktoken: TIKTOKEN_ENCODINGS_BASE names no folder that has it"
        )
    encoding = harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    assistant, compared = harmony.Role.ASSISTANT, 0
    renderer = make_renderer(use_template(shared_tokenizer, TEMPLATES["gpt-oss"]), True)

    def convert(message: dict[str, Any]) -> Iterator[Any]:
        if message["role"] == "user":
            yield harmony.Message.from_role_and_content(harmony.Role.USER, message["content"])
        elif message["role"] == "tool":
            author = harmony.Author.new(harmony.Role.TOOL, "functions.weather")
            content = json.dumps(message["content"], ensure_ascii=False)
            result = harmony.Message.from_author_and_content(author, content)
            yield result.with_channel("commentary").with_recipient("assistant")
        else:
            if "reasoning_content" in message:
                reasoning = message["reasoning_content"]
                yield harmony.Message.from_role_and_content(assistant, reasoning).with_channel(
                    "analysis"
                )
            for call in message.get("tool_calls", ()):
                arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
                made = harmony.Message.from_role_and_content(assistant, arguments).with_channel(
                    "commentary"
                )
                yield made.with_recipient(
                    f"functions.{call['function']['name']}"
                ).with_content_type("json")
            if not message.get("tool_calls"):
                yield harmony.Message.from_role_and_content(
                    assistant, message["content"]
                ).with_channel("final")

    for asked in make_asked():
        messages, tools, asks = asked
        if (messages[-1]["role"] == "assistant") == asks or any(
            len(m.get("tool_calls", ())) > 1 for m in messages
        ):
            continue
        earlier = [m for m in messages[:-1] if m["role"] == "assistant" and not m.get("tool_calls")]
        if len(earlier) > (messages[-1]["role"] == "user"):
            continue  # of earlier turns it drops only the first one's reasoning, and the model's own template all
        system = harmony.SystemContent.new().with_conversation_start_date(date.today().isoformat())
        converted = [harmony.Message.from_role_and_content(harmony.Role.SYSTEM, system)]
        if messages[0]["role"] == "system" or tools:
            developer = harmony.DeveloperContent.new()
            if messages[0]["role"] == "system":
                developer = developer.with_instructions(messages[0]["content"])
            if tools:
                functions = [tool["function"] for tool in tools]
                described = [
                    harmony.ToolDescription.new(
                        each["name"], each["description"], parameters=each["parameters"]
                    )
                    for each in functions
                ]
                developer = developer.with_function_tools(described)
            converted.append(
                harmony.Message.from_role_and_content(harmony.Role.DEVELOPER, developer)
            )
        given = [
            part
            for message in messages[: None if asks else -1]
            if message["role"] != "system"
            for part in convert(message)
        ]
        whole = harmony.Conversation.from_messages([*converted, *given])
        text = encoding.decode_utf8(encoding.render_conversation_for_completion(whole, assistant))
        if not asks:  # what the model writes then
            written = "".join(
                encoding.decode_utf8(encoding.render(part)) for part in convert(messages[-1])
            )
            text = text.removesuffix("<|start|>assistant") + written
            text = (
                text
                if messages[-1].get("tool_calls")
                else text.removesuffix("<|end|>") + "<|return|>"
            )
        if (
            messages[0]["role"] == "system" and not tools
        ):  # the model's own template writes two line breaks after instructions
            text = text.replace(
                f"{messages[0]['content']}<|end|>", f"{messages[0]['content']}\n\n<|end|>", 1
            )
        if asks:
            ours = render(shared_tokenizer, TEMPLATES["gpt-oss"], asked)
        else:  # with the reasoning before a call, which the template itself drops once an answer follows
            trained = (*[False] * (len(messages) - 1), True)
            ours = ask_turns(Conversation(tuple(messages), trained, tuple(tools or ())), renderer)[
                len(trained) - 1
            ].text
        assert ours == text
        compared += 1
    assert compared > ROWS


def test_deepseek_v3_2_is_written_as_its_encoder_does(shared_tokenizer: Any) -> None:
    """The model has no chat template: https://huggingface.co/deepseek-ai/DeepSeek-V3.2/tree/main/encoding."""
    file = os.environ.get("FINETUNE_DEEPSEEK_V32", "")
    spec = (
        importlib.util.spec_from_file_location("encoding_dsv32", file)
        if Path(file).is_file()
        else None
    )
    if spec is None or spec.loader is None:
        pytest.skip("FINETUNE_DEEPSEEK_V32 names no encoding_dsv32.py")
    encoder = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(encoder)
    compared = 0
    for messages, tools, asks in make_asked():
        if (messages[-1]["role"] == "assistant") == asks:
            continue  # its text of a question or a result ends with what opens the answer
        for thinks in (False, True):
            mine = [message for message in messages if message["role"] != "system"]
            system = messages[0]["content"] if messages[0]["role"] == "system" else ""
            given: list[dict[str, Any]] = [{"role": "system", "content": system, "tools": tools}]
            given += [
                {**message, "reasoning": message.get("reasoning_content")} for message in mine
            ]
            try:
                text = encoder.encode_messages(given, "thinking" if thinks else "chat")
            except (
                ValueError
            ):  # an answer without reasoning, where it thinks; results of which one is missing
                continue
            ours = render(
                shared_tokenizer,
                TEMPLATES["deepseek-v3.2"],
                (messages, tools, asks),
                thinking=thinks,
            )
            assert ours == text.replace(encoder.bos_token, shared_tokenizer.bos_token, 1)
            compared += 1
    assert compared > ROWS
