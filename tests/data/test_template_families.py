"""The named templates write what their families publish, and the assistant's turns with their ends are what is trained on.

The texts below are what the published templates give: those of the model repositories as of November 2026 (Llama 4, Phi, Zephyr,
DeepSeek, Command R, Granite, OLMo 2, SmolLM3, Qwen3, Gemma 3), the test data of mistral-common, and FastChat's page on
Vicuna's prompt. >> and << stand around what is trained on.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, LlamaTokenizer

from finetune.config.schema import Data, DatasetSource, Model
from finetune.data.formats import Conversation, parse_row
from finetune.data.messages import BadRow
from finetune.data.render import render
from finetune.data.tokenizer import (
    ALIASES,
    TEMPLATES,
    find_stop_token_ids,
    fit_template,
    load_tokenizer,
    make_renderer,
    read_template,
)
from finetune.errors import UserError
from tests.conftest import make_model, make_tokenizer
from tests.data.test_chat import conversation

ENDS = (
    "<|im_start|>", "<|im_sep|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eot|>",
    "<start_of_turn>", "<end_of_turn>", "<|END_OF_TURN_TOKEN|>", "<|end_of_text|>", "[INST]", "[/INST]", "[TOOL_CALLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<|tool_call|>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁outputs▁end｜>",
)  # fmt: skip
SMOLLM3 = (
    "<|im_start|>system\n## Metadata\n\nKnowledge Cutoff Date: June 2025\nToday Date: 08 July 2025\nReasoning Mode: /think\n\n"
    "## Custom Instructions\n\nBe brief.\n\n"
)
# inst-torchtune and joined are torchtune's Llama2ChatTemplate and GemmaTokenizer, whose texts are tokenized one by one.
# Be brief. / Hello / Hi there / Who are you / A model
PUBLISHED = {
    "llama2": "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHello [/INST]>> Hi there </s><<<s>[INST] Who are you [/INST]>> A model </s><<",
    "inst": "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHello [/INST]>> Hi there</s><<<s>[INST] Who are you [/INST]>> A model</s><<",
    "inst-torchtune": "<s>[INST] <<SYS>>\n Be brief. \n<</SYS>>\n\n Hello  [/INST]>> Hi there</s><<<s>[INST] <<SYS>>\n Be brief. \n<</SYS>>\n\n Who are you  [/INST]>> A model</s><<",
    "joined": "<s>Be brief.Hello>>Hi there</s><<<s>Who are you>>A model</s><<",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHello<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n>>Hi there<|eot_id|><<<|start_header_id|>user<|end_header_id|>\n\nWho are you<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n>>A model<|eot_id|><<",
    "llama4": "<s><|header_start|>system<|header_end|>\n\nBe brief.<|eot|><|header_start|>user<|header_end|>\n\nHello<|eot|><|header_start|>assistant<|header_end|>\n\n>>Hi there<|eot|><<<|header_start|>user<|header_end|>\n\nWho are you<|eot|><|header_start|>assistant<|header_end|>\n\n>>A model<|eot|><<",
    "mistral-v1": "<s> [INST] Be brief.\n\nHello [/INST]>> Hi there</s><< [INST] Who are you [/INST]>> A model</s><<",
    "mistral-v2": "<s>[INST] Hello[/INST]>> Hi there</s><<[INST] Be brief.\n\nWho are you[/INST]>> A model</s><<",
    "mistral-v3": "<s>[INST] Hello[/INST]>> Hi there</s><<[INST] Be brief.\n\nWho are you[/INST]>> A model</s><<",
    "mistral-v3-tekken": "<s>[INST]Hello[/INST]>>Hi there</s><<[INST]Be brief.\n\nWho are you[/INST]>>A model</s><<",
    "mistral-v7": "<s>[SYSTEM_PROMPT] Be brief.[/SYSTEM_PROMPT][INST] Hello[/INST]>> Hi there</s><<[INST] Who are you[/INST]>> A model</s><<",
    "mistral-v7-tekken": "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]Hello[/INST]>>Hi there</s><<[INST]Who are you[/INST]>>A model</s><<",
    "phi3": "<|system|>\nBe brief.<|end|>\n<|user|>\nHello<|end|>\n<|assistant|>\n>>Hi there<|end|><<\n<|user|>\nWho are you<|end|>\n<|assistant|>\n>>A model<|end|><<\n</s>",
    "phi4": "<|im_start|>system<|im_sep|>Be brief.<|im_end|><|im_start|>user<|im_sep|>Hello<|im_end|><|im_start|>assistant<|im_sep|>>>Hi there<|im_end|><<<|im_start|>user<|im_sep|>Who are you<|im_end|><|im_start|>assistant<|im_sep|>>>A model<|im_end|><<",
    "zephyr": "<|system|>\nBe brief.</s>\n<|user|>\nHello</s>\n<|assistant|>\n>>Hi there</s><<\n<|user|>\nWho are you</s>\n<|assistant|>\n>>A model</s><<\n",
    "vicuna": "<s>Be brief. USER: Hello ASSISTANT:>> Hi there</s><<USER: Who are you ASSISTANT:>> A model</s><<",
    "alpaca": "<s>Be brief.\n\n### Instruction:\nHello\n\n### Response:\n>>Hi there</s><<\n\n### Instruction:\nWho are you\n\n### Response:\n>>A model</s><<",
    "deepseek-v2": "<s>Be brief.\n\nUser: Hello\n\nAssistant:>> Hi there</s><<User: Who are you\n\nAssistant:>> A model</s><<",
    "deepseek-v3": "<s>Be brief.<｜User｜>Hello<｜Assistant｜>>>Hi there</s><<<｜User｜>Who are you<｜Assistant｜>>>A model</s><<",
    "command-r": "<s><|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>Be brief.<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|USER_TOKEN|>Hello<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>>>Hi there<|END_OF_TURN_TOKEN|><<<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Who are you<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>>>A model<|END_OF_TURN_TOKEN|><<",
    "granite": "<|start_of_role|>system<|end_of_role|>Be brief.<|end_of_text|>\n<|start_of_role|>user<|end_of_role|>Hello<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>>>Hi there<|end_of_text|><<\n<|start_of_role|>user<|end_of_role|>Who are you<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>>>A model<|end_of_text|><<\n",
    "olmo2": "<s><|system|>\nBe brief.\n<|user|>\nHello\n<|assistant|>\n>>Hi there</s><<\n<|user|>\nWho are you\n<|assistant|>\n>>A model</s><<",
    "smollm3": SMOLLM3 + "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n>>Hi there<|im_end|><<\n<|im_start|>user\nWho are you<|im_end|>\n<|im_start|>assistant\n>>A model<|im_end|><<\n",
    "qwen": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n>>Hi there<|im_end|><<\n<|im_start|>user\nWho are you<|im_end|>\n<|im_start|>assistant\n>>A model<|im_end|><<\n",
    "qwen3": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n>>Hi there<|im_end|><<\n<|im_start|>user\nWho are you<|im_end|>\n<|im_start|>assistant\n>><think>\n\n</think>\n\nA model<|im_end|><<\n",
    "glm4": "[gMASK]<sop><|system|>\nBe brief.<|user|>\nHello<|assistant|>>>\nHi there<|user|><<\nWho are you<|assistant|>>>\nA model<|user|><<",
    "gemma": "<s><start_of_turn>user\nBe brief.\n\nHello<end_of_turn>\n<start_of_turn>model\n>>Hi there<end_of_turn><<\n<start_of_turn>user\nWho are you<end_of_turn>\n<start_of_turn>model\n>>A model<end_of_turn><<\n",
}  # fmt: skip

TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}
SCHEMA = '{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}'
CALL, WITH_ID = '{"name": "weather", "arguments": {"city": "Köln"}}', '{"name": "weather", "arguments": {"city": "Köln"}, "id": "a1b2c3d4e"}'  # fmt: skip
INDENTED = '{\n    "type": "function",\n    "function": {\n        "name": "weather",\n        "parameters": {\n            "type": "object",\n            "properties": {}\n        }\n    }\n}'
# Weather? / a call / rain / It rains.
WITH_TOOLS = {
    "llama4": f'<s><|header_start|>user<|header_end|>\n\nGiven the following functions, please respond with a JSON for a function call with its proper arguments that best answers the given prompt.\n\nRespond in the format {{"name": function name, "parameters": dictionary of argument name and its value}}.Do not use variables.\n\n{INDENTED}\n\nWeather?<|eot|><|header_start|>assistant<|header_end|>\n\n>><|python_start|><|python_end|>{{"name": "weather", "parameters": {{"city": "Köln"}}}}<|eot|><<<|header_start|>ipython<|header_end|>\n\n"rain"<|eot|><|header_start|>assistant<|header_end|>\n\n>>It rains.<|eot|><<',
    "mistral-v2": f'<s>[AVAILABLE_TOOLS] [{SCHEMA}][/AVAILABLE_TOOLS][INST] Weather?[/INST]>>[TOOL_CALLS] [{CALL}]</s><<[TOOL_RESULTS] [{{"name": "weather", "content": "rain"}}][/TOOL_RESULTS]>> It rains.</s><<',
    "mistral-v3": f'<s>[AVAILABLE_TOOLS] [{SCHEMA}][/AVAILABLE_TOOLS][INST] Weather?[/INST]>>[TOOL_CALLS] [{WITH_ID}]</s><<[TOOL_RESULTS] {{"content": "rain", "call_id": "a1b2c3d4e"}}[/TOOL_RESULTS]>> It rains.</s><<',
    "mistral-v3-tekken": f'<s>[AVAILABLE_TOOLS][{SCHEMA}][/AVAILABLE_TOOLS][INST]Weather?[/INST]>>[TOOL_CALLS][{WITH_ID}]</s><<[TOOL_RESULTS]{{"content": "rain", "call_id": "a1b2c3d4e"}}[/TOOL_RESULTS]>>It rains.</s><<',
    "mistral-v7": f"<s>[AVAILABLE_TOOLS] [{SCHEMA}][/AVAILABLE_TOOLS][INST] Weather?[/INST]>>[TOOL_CALLS] [{WITH_ID}]</s><<[TOOL_RESULTS] a1b2c3d4e[TOOL_CONTENT] rain[/TOOL_RESULTS]>> It rains.</s><<",
    "mistral-v7-tekken": f"<s>[AVAILABLE_TOOLS][{SCHEMA}][/AVAILABLE_TOOLS][INST]Weather?[/INST]>>[TOOL_CALLS][{WITH_ID}]</s><<[TOOL_RESULTS]a1b2c3d4e[TOOL_CONTENT]rain[/TOOL_RESULTS]>>It rains.</s><<",
    "deepseek-v3": '<s><｜User｜>Weather?<｜Assistant｜>>><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"city": "Köln"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜></s><<<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>rain<｜tool▁output▁end｜><｜tool▁outputs▁end｜>>>It rains.</s><<',
    "granite": f"<|start_of_role|>available_tools<|end_of_role|>\n{INDENTED}<|end_of_text|>\n<|start_of_role|>user<|end_of_role|>Weather?<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>>><|tool_call|>[{CALL}]<|end_of_text|><<\n<|start_of_role|>tool_response<|end_of_role|>rain<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>>>It rains.<|end_of_text|><<\n",
    "qwen3": f'<|im_start|>system\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{SCHEMA}\n</tools>\n\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{{"name": <function-name>, "arguments": <args-json-object>}}\n</tool_call><|im_end|>\n<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n>><tool_call>\n{CALL}\n</tool_call><|im_end|><<\n<|im_start|>user\n<tool_response>\nrain\n</tool_response><|im_end|>\n<|im_start|>assistant\n>><think>\n\n</think>\n\nIt rains.<|im_end|><<\n',
}  # fmt: skip


def tokenizer_with(name: str) -> Any:
    tokenizer = make_tokenizer()
    tokenizer.bos_token, tokenizer.eos_token = "<s>", "</s>"
    tokenizer.add_special_tokens({"additional_special_tokens": [*ENDS, "<|end|>"]})
    tokenizer.chat_template = read_template(name)
    return tokenizer


def marked(document: Conversation, name: str) -> str:
    """The text of a document, >> and << around what is trained on."""
    rendered = render(document, make_renderer(tokenizer_with(name), True))
    assert not {
        finding for finding in rendered.findings if "dropped" in finding or "end_of_turn" in finding
    }
    text, pieces, at = rendered.text, [], 0
    for start, end in rendered.spans:
        pieces += [text[at:start], ">>", text[start:end], "<<"]
        at = end
    return "".join([*pieces, text[at:]])


def document(row: dict[str, Any], **options: Any) -> Conversation:
    found = parse_row(row, DatasetSource(path="rows.jsonl", **options)).document
    assert isinstance(found, Conversation)
    return found


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_family_is_written_and_masked_as_it_publishes_it(name: str) -> None:
    asked = conversation("Hello", "Hi there", "Who are you", "A model", system="Be brief.")
    assert marked(asked, name) == PUBLISHED[name]


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_tool_calls_are_written_and_masked_as_the_family_publishes_them(name: str) -> None:
    call = {
        "type": "function",
        "id": "a1b2c3d4e",
        "function": {"name": "weather", "arguments": {"city": "Köln"}},
    }
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "rain", "name": "weather", "tool_call_id": "a1b2c3d4e"},
        {"role": "assistant", "content": "It rains."},
    ]
    tools = (
        [] if name == "deepseek-v3" else [TOOL]
    )  # it does not describe them; `tools_dropped` reports that
    assert marked(document({"messages": messages, "tools": tools}), name) == WITH_TOOLS[name]


def test_smollm3_writes_calls_as_its_system_message_asks_for_them() -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    text = marked(document({"messages": messages, "tools": [TOOL]}), "smollm3")
    assert (
        "### Tools\n\nYou may call one or more functions to assist with the user query.\n" in text
    )
    assert text.endswith(
        f"<|im_start|>assistant\n>><tool_call>\n{CALL}\n</tool_call><|im_end|><<\n"
    )


@pytest.mark.parametrize("name", ["llama2", "mistral-v1", "phi3", "phi4", "zephyr", "vicuna", "alpaca", "deepseek-v2", "command-r", "olmo2", "glm4"])  # fmt: skip
def test_a_family_without_tools_refuses_them(name: str) -> None:
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]},
    ]
    rows = document(
        {
            "messages": [
                *messages,
                {"role": "tool", "content": "x"},
                {"role": "assistant", "content": "y"},
            ]
        }
    )
    with pytest.raises(
        BadRow, match=r"this template (knows|writes) system, user and assistant turns"
    ):
        render(rows, make_renderer(tokenizer_with(name), True))


def test_reasoning_of_qwen3_is_trained_after_the_last_question_only() -> None:
    asked = conversation("Q", "<think>\nhm\n</think>\n\nA", "Q", "<think>\nso\n</think>\n\nB")
    rendered = render(asked, make_renderer(tokenizer_with("qwen3"), True, turns="whole"))
    assert "reasoning_dropped" in rendered.findings
    assert [rendered.text[slice(*span)] for span in rendered.spans] == [
        "A<|im_end|>",
        "<think>\nso\n</think>\n\nB<|im_end|>",
    ]
    reasoned = document({"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "B", "reasoning_content": "so"}]})  # fmt: skip
    assert marked(reasoned, "qwen3").endswith(">><think>\nso\n</think>\n\nB<|im_end|><<\n")


# Command R7B's own (https://huggingface.co/CohereLabs/c4ai-command-r7b-12-2024), without its preamble. Generation stops at the
# second of the two tokens that end a turn.
COHERE2 = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
    "<|START_RESPONSE|>{{ message['content'] }}<|END_RESPONSE|><|END_OF_TURN_TOKEN|>{% else %}<|START_OF_TURN_TOKEN|><|USER_TOKEN|>"
    "{{ message['content'] }}<|END_OF_TURN_TOKEN|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>{% endif %}"
)
MARKED = COHERE2.replace("{{ message['content'] }}<|END_RESPONSE|>", "{% generation %}{{ message['content'] }}<|END_RESPONSE|>{% endgeneration %}")  # fmt: skip


@pytest.mark.parametrize("template", [COHERE2, MARKED])
@pytest.mark.parametrize("content", ["Hi there", '{"tool": 1}'])
def test_the_token_that_generation_stops_at_is_trained(template: str, content: str) -> None:
    tokenizer = tokenizer_with("chatml")
    tokenizer.add_special_tokens({"additional_special_tokens": [*ENDS, "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|CHATBOT_TOKEN|>"]})  # fmt: skip
    tokenizer.chat_template, tokenizer.eos_token = template, "<|END_OF_TURN_TOKEN|>"
    rendered = render(
        conversation("Hello", content, "Who are you", "A model"), make_renderer(tokenizer, True)
    )
    ended = [f"{words}<|END_RESPONSE|><|END_OF_TURN_TOKEN|>" for words in (content, "A model")]
    assert [rendered.text[start:end] for start, end in rendered.spans] == ended
    assert "stop_not_trained" not in rendered.findings
    tokenizer.eos_token = "<|END_RESPONSE|>"
    rendered = render(conversation("Hello", content), make_renderer(tokenizer, True))
    assert [rendered.text[start:end] for start, end in rendered.spans] == [
        f"{content}<|END_RESPONSE|>"
    ]


def test_a_turn_that_ends_with_a_token_at_which_generation_does_not_stop_is_a_finding(
    tmp_path: Path,
) -> None:
    tokenizer = tokenizer_with("llama4")
    asked = conversation("Hello", "Hi there")
    assert "stop_not_trained" in render(asked, make_renderer(tokenizer, True)).findings
    folder = make_model(tmp_path)
    tokenizer.save_pretrained(folder)
    end = tokenizer.convert_tokens_to_ids("<|eot|>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, end]}))
    for model in (
        Model(model_name_or_path=str(folder)),
        Model(model_name_or_path=str(folder), eot_tokens=("<|eot|>",)),
    ):
        loaded = load_tokenizer(model, Data())
        assert "stop_not_trained" not in render(asked, make_renderer(loaded, True)).findings
        assert end in find_stop_token_ids(loaded)
        (folder / "generation_config.json").unlink(missing_ok=True)


def test_generation_continues_after_a_thought_that_ends_like_another_familys_answer() -> None:
    tokenizer = tokenizer_with("gpt-oss")
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert end in find_stop_token_ids(tokenizer)  # as phi3 ends an answer
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>", "<|return|>"]})
    tokenizer.eos_token = "<|return|>"
    asked = conversation("2+2?", "4")
    asked.messages[1]["reasoning_content"] = "easy"
    rendered = render(asked, make_renderer(tokenizer, True))
    (span,) = rendered.spans
    ids = tokenizer(rendered.text[slice(*span)], add_special_tokens=False).input_ids
    ends = [i for i, token in enumerate(ids) if token in find_stop_token_ids(tokenizer)]
    assert end in ids and ends == [len(ids) - 1]
    tokenizer.stop_tokens = ("<|end|>",)  # as if the recipe's eot_tokens name it
    assert end in find_stop_token_ids(tokenizer)


def test_white_space_inside_generation_markers_is_trained_as_by_transformers() -> None:
    tokenizer = tokenizer_with("chatml")
    tokenizer.chat_template = (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
        "{% generation\n%}{{ message['content'] + '<|im_end|>\n' }}{% endgeneration %}"
        "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    )
    asked = conversation("Hello", "Hi there", "Who are you", "A model")
    rendered = render(asked, make_renderer(tokenizer, True))
    theirs = tokenizer.apply_chat_template(
        [{"role": m["role"], "content": m["content"]} for m in asked.messages],
        return_dict=True, return_assistant_tokens_mask=True,
    )  # fmt: skip
    of_theirs = [
        i
        for i, is_trained in zip(theirs["input_ids"], theirs["assistant_masks"], strict=True)
        if is_trained
    ]
    assert "".join(rendered.text[start:end] for start, end in rendered.spans) == tokenizer.decode(
        of_theirs
    )


ADD = {"instruction": "Add the numbers.", "input": "2 and 3", "output": "5"}
# https://github.com/tatsu-lab/stanford_alpaca: PROMPT_DICT, with a line break after the last heading.
PAIRED = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a response "
    "that appropriately completes the request.\n\n### Instruction:\nAdd the numbers.\n\n### Input:\n2 and 3\n\n### Response:\n"
)
ALONE = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\nAdd the numbers.\n\n### Response:\n"
)


def test_alpacas_wording_with_and_without_input() -> None:
    assert marked(document(ADD), "alpaca") == f"<s>{PAIRED}>>5</s><<"
    assert marked(document({**ADD, "input": ""}), "alpaca") == f"<s>{ALONE}>>5</s><<"
    # other templates write the two as one question
    assert "user\nAdd the numbers.\n\n2 and 3<|im_end|>" in marked(document(ADD), "chatml")


def test_alpaca_prompt_puts_the_wording_into_the_users_turn() -> None:
    for row, prompt in ((ADD, PAIRED), ({**ADD, "input": ""}, ALONE)):
        assert marked(document(row, alpaca_prompt=True), "chatml") == (
            f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n>>5<|im_end|><<\n"
        )


def test_torchtunes_texts_have_no_spaces_at_their_end() -> None:
    """tokenize_messages_no_special_tokens: text.rstrip(" "), and SentencePiece puts no space before an empty text."""
    turns = conversation("Hello  ", " Hi \n ", "And ", "")
    assert marked(turns, "inst-torchtune") == (
        "<s>[INST] Hello  [/INST]>>  Hi \n</s><<<s>[INST] And  [/INST]>></s><<"
    )
    assert marked(turns, "joined") == "<s>Hello>> Hi \n</s><<<s>And>></s><<"
    asked = tokenizer_with("inst-torchtune").apply_chat_template(
        [{"role": "system", "content": " "}, {"role": "user", "content": "Hello"}], tokenize=False
    )
    assert asked == "<s>[INST] <<SYS>>\n \n<</SYS>>\n\n Hello  [/INST]"


@pytest.mark.parametrize("loader", [AutoTokenizer, LlamaTokenizer])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("inst-torchtune", "[INST] Who?  [/INST]"),
        ("inst", "[INST] Who? [/INST]"),
        ("alpaca", "Below is an instruction"),
    ],
)
def test_a_text_after_bos_begins_as_a_text_alone(
    name: str, text: str, loader: Any, shared: Path
) -> None:
    """SentencePiece puts a space before a text; of transformers 5 LlamaTokenizer puts none behind
    BOS.
    """
    tokenizer = loader.from_pretrained(shared / "models" / "stories260k", add_bos_token=True)
    tokenizer.chat_template = fit_template(name, tokenizer)
    turns = [{"role": "user", "content": "Who?"}]
    written = tokenizer.apply_chat_template(turns, tokenize=False)
    ids = tokenizer(written, add_special_tokens=False).input_ids
    alone = tokenizer(text).input_ids
    assert ids[: len(alone)] == alone
    assert fit_template("llama2", tokenizer) == TEMPLATES["llama2"]


def test_vicunas_own_system_message_and_page() -> None:
    # https://github.com/lm-sys/FastChat/blob/main/docs/vicuna_weights_version.md
    assert marked(conversation("Hello!", "Hello!", "How are you?", "I am good."), "vicuna") == (
        "<s>A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, "
        "and polite answers to the user's questions. USER: Hello! ASSISTANT:>> Hello!</s><<USER: How are you? ASSISTANT:>> I am good.</s><<"
    )


def test_names_of_templates() -> None:
    assert read_template("qwen2.5") == TEMPLATES["qwen"]
    assert set(ALIASES.values()) <= set(TEMPLATES) and not set(ALIASES) & set(TEMPLATES)
    with pytest.raises(UserError, match=r"chat_template: mistral_v3: .*did you mean mistral-v3\?"):
        read_template("mistral_v3")
    with pytest.raises(UserError, match=r"did you mean gemma or gemma4 or gemma3\?"):
        read_template("gemma5")
    page = (Path(__file__).parents[2] / "docs" / "chat-templates.md").read_text(encoding="utf-8")
    assert [name for name in (*TEMPLATES, *ALIASES) if f"`{name}`" not in page] == []


def test_llama_3s_own_template_is_the_named_one(shared: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(shared / "tokenizers" / "llama3")
    messages = list(
        conversation("Hello", "Hi there", "Who are you", "A model", system="Be brief.").messages
    )
    own = tokenizer.apply_chat_template(messages, tokenize=False)
    named = tokenizer.apply_chat_template(
        messages, tokenize=False, chat_template=TEMPLATES["llama3"]
    )
    assert named in own or own in named
