"""The chat templates that a recipe can name, as Jinja text."""

from pathlib import Path

from finetune.errors import UserError

# For tokenizers without a template and without special tokens for turns; of those it uses only the EOS token.
PLAIN = """\
{%- for message in messages -%}
    {{- message['role'] + ':\\n' + message['content'] -}}
    {{- eos_token if message['role'] == 'assistant' else '\\n\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'assistant:\\n' -}}{%- endif -%}
"""
# Tool calls as Qwen and many others write them. https://qwen.readthedocs.io/en/latest/framework/function_call.html
CHATML = """\
{%- if tools -%}
    {{- '<|im_start|>system\\n' + (messages[0]['content'] + '\\n\\n' if messages[0]['role'] == 'system' else '') -}}
    {{- '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' -}}
    {{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' -}}
    {%- for tool in tools -%}{{- '\\n' + tool | tojson -}}{%- endfor -%}
    {{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within ' -}}
    {{- '<tool_call></tool_call> XML tags:\\n<tool_call>\\n{"name": <function-name>, "arguments": ' -}}
    {{- '<args-json-object>}\\n</tool_call><|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message['role'] == 'tool' -%}
        {{- '<|im_start|>user' if loop.first or loop.previtem['role'] != 'tool' else '' -}}
        {{- '\\n<tool_response>\\n' + message['content'] + '\\n</tool_response>' -}}
        {{- '<|im_end|>\\n' if loop.last or loop.nextitem['role'] != 'tool' else '' -}}
    {%- elif message['tool_calls'] -%}
        {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] -}}
        {%- for call in message['tool_calls'] -%}
            {{- '\\n' if message['content'] or not loop.first else '' -}}
            {{- '<tool_call>\\n{"name": ' + call['function']['name'] | tojson -}}
            {{- ', "arguments": ' + call['function']['arguments'] | tojson + '}\\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\\n' -}}
    {%- elif not (tools and loop.first and message['role'] == 'system') -%}
        {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
# Qwen2.5: ChatML, with a default system message.
QWEN = (
    """\
{%- if messages[0]['role'] != 'system' -%}
    {%- set words = 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' -%}
    {%- set messages = [{'role': 'system', 'content': words}] + messages -%}
{%- endif -%}
"""
    + CHATML
)
# Hermes 2 Pro and 3: ChatML with another description of the tools. https://github.com/NousResearch/Hermes-Function-Calling
HERMES = """\
{{- bos_token -}}
{%- if tools -%}
    {{- '<|im_start|>system\\nYou are a function calling AI model. You are provided with function signatures within ' -}}
    {{- '<tools></tools> XML tags. You may call one or more functions to assist with the user query. ' -}}
    {{- "Don't make assumptions about what values to plug into functions. Here are the available tools: <tools> " -}}
    {%- for tool in tools -%}{{- tool | tojson + ('' if loop.last else '\\n') -}}{%- endfor -%}
    {{- ' </tools> Use the following pydantic model json schema for each tool call you will make: {"properties": ' -}}
    {{- '{"name": {"title": "Name", "type": "string"}, "arguments": {"title": "Arguments", "type": "object"}}, ' -}}
    {{- '"required": ["name", "arguments"], "title": "FunctionCall", "type": "object"}\\n' -}}
    {{- 'For each function call return a json object with function name and arguments within ' -}}
    {{- '<tool_call></tool_call> XML tags as follows:\\n<tool_call>\\n{"name": <function-name>, "arguments": ' -}}
    {{- '<args-dict>}\\n</tool_call><|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message['role'] == 'tool' -%}
        {{- '<|im_start|>tool\\n' if loop.first or loop.previtem['role'] != 'tool' else '' -}}
        {{- '<tool_response>\\n' + message['content'] + '\\n</tool_response>\\n' -}}
        {{- '<|im_end|>\\n' if loop.last or loop.nextitem['role'] != 'tool' else '' -}}
    {%- else -%}
        {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] -}}
        {%- for call in message['tool_calls'] or [] -%}
            {{- '\\n' if message['content'] or not loop.first else '' -}}
            {{- '<tool_call>\\n{"name": ' + call['function']['name'] | tojson -}}
            {{- ', "arguments": ' + call['function']['arguments'] | tojson + '}\\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
LLAMA3 = """\
{{- bos_token -}}
{%- for message in messages -%}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}
"""
# Llama 3.1 and 3.2. https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1 (JSON based tool calling)
LLAMA3_1 = """\
{{- bos_token -}}
{%- set system = messages[0]['content'] | trim if messages[0]['role'] == 'system' else '' -%}
{%- set messages = messages[1:] if messages[0]['role'] == 'system' else messages -%}
{%- if tools and messages and messages[0]['role'] != 'user' -%}
    {{- raise_exception('this template describes the tools in the first user turn; the conversation begins otherwise') -}}
{%- endif -%}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + ('Environment: ipython\\n' if tools else '') -}}
{{- 'Cutting Knowledge Date: December 2023\\nToday Date: 26 Jul 2024\\n\\n' + system + '<|eot_id|>' -}}
{%- for message in messages -%}
    {%- set role = 'ipython' if message['role'] == 'tool' else message['role'] -%}
    {{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' -}}
    {%- if message['role'] == 'tool' -%}
        {{- message['content'] | tojson -}}
    {%- elif message['tool_calls'] -%}
        {%- if message['tool_calls'] | length > 1 or message['content'] | trim -%}
            {{- raise_exception('Llama 3.1 writes words or one tool call in a turn, not both and not several calls') -}}
        {%- endif -%}
        {%- set call = message['tool_calls'][0]['function'] -%}
        {{- '{"name": ' + call['name'] | tojson + ', "parameters": ' + call['arguments'] | tojson + '}' -}}
    {%- else -%}
        {%- if tools and loop.first -%}
            {{- 'Given the following functions, please respond with a JSON for a function call with its proper ' -}}
            {{- 'arguments that best answers the given prompt.\\n\\nRespond in the format {"name": function name, ' -}}
            {{- '"parameters": dictionary of argument name and its value}.Do not use variables.\\n\\n' -}}
            {%- for tool in tools -%}{{- tool | tojson(indent=4) + '\\n\\n' -}}{%- endfor -%}
        {%- endif -%}
        {{- message['content'] | trim -}}
    {%- endif -%}
    {{- '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}
"""
# Tools as in Mistral's tokenizers of version 3 (https://github.com/mistralai/mistral-common); call ids only if there are any.
MISTRAL = """\
{{- bos_token -}}
{%- set system = messages[0]['content'] + '\\n\\n' if messages[0]['role'] == 'system' else '' -%}
{%- set questions = messages | selectattr('role', 'equalto', 'user') | list | length -%}
{%- set asked = namespace(count=0) -%}
{%- for message in messages if message['role'] != 'system' -%}
    {%- if message['role'] == 'user' -%}
        {%- set asked.count = asked.count + 1 -%}
        {%- if tools and asked.count == questions -%}
            {{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' -}}
        {%- endif -%}
        {{- '[INST] ' + (system if loop.first else '') + message['content'] + '[/INST]' -}}
    {%- elif message['role'] == 'assistant' and message['tool_calls'] -%}
        {%- if message['content'] | trim -%}
            {{- raise_exception('Mistral writes words or tool calls in a turn, not both') -}}
        {%- endif -%}
        {{- '[TOOL_CALLS] [' -}}
        {%- for call in message['tool_calls'] -%}
            {{- '{"name": ' + call['function']['name'] | tojson -}}
            {{- ', "arguments": ' + call['function']['arguments'] | tojson -}}
            {{- ', "id": ' + call['id'] | tojson if call['id'] else '' -}}
            {{- '}' if loop.last else '}, ' -}}
        {%- endfor -%}
        {{- ']' + eos_token -}}
    {%- elif message['role'] == 'assistant' -%}
        {{- ' ' + message['content'] | trim + eos_token -}}
    {%- elif message['role'] == 'tool' -%}
        {%- set answer = message['content'] -%}
        {%- set is_json = answer.startswith('{') or answer.startswith('[') or answer | int | string == answer -%}
        {{- '[TOOL_RESULTS] {"content": ' + (answer if is_json else answer | tojson) -}}
        {{- ', "call_id": ' + message['tool_call_id'] | tojson if message['tool_call_id'] else '' -}}
        {{- '}[/TOOL_RESULTS]' -}}
    {%- else -%}
        {{- raise_exception('this template knows user, assistant, tool and system turns only') -}}
    {%- endif -%}
{%- endfor -%}
"""
GEMMA = """\
{{- bos_token -}}
{%- set system = messages[0]['content'] + '\\n\\n' if messages[0]['role'] == 'system' else '' -%}
{%- for message in messages if message['role'] != 'system' -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{- '<start_of_turn>' + role + '\\n' + (system if loop.first else '') + message['content'] | trim + '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}
"""
TEMPLATES = {
    "plain": PLAIN,
    "chatml": CHATML,
    "hermes": HERMES,
    "qwen": QWEN,
    "llama3": LLAMA3,
    "llama3.1": LLAMA3_1,
    "mistral": MISTRAL,
    "gemma": GEMMA,
}


def read_template(name: str) -> str:
    """The Jinja text that `chat_template` means: one of `TEMPLATES`, a file, or the text itself.

    Raises `UserError` for a file that does not exist or cannot be read.
    """
    if name in TEMPLATES:
        return TEMPLATES[name]
    if "{" in name:
        return name
    path = Path(name)
    if not path.is_file():
        raise UserError(f"chat_template: {name}: not a file, not Jinja text, and not one of {', '.join(TEMPLATES)}")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"chat_template: {name}: cannot be read: {error}") from None
