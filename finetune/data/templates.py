"""Chat templates that can be named in a recipe."""

from pathlib import Path

from finetune.errors import UserError

# For tokenizers without a template and without special tokens for turns; only the end token is asked of them.
PLAIN = """\
{%- for message in messages -%}
    {{- message['role'] + ':\\n' + message['content'] -}}
    {{- eos_token if message['role'] == 'assistant' else '\\n\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'assistant:\\n' -}}{%- endif -%}
"""
CHATML = """\
{%- for message in messages -%}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
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
MISTRAL = """\
{{- bos_token -}}
{%- set system = messages[0]['content'] + '\\n\\n' if messages[0]['role'] == 'system' else '' -%}
{%- for message in messages if message['role'] != 'system' -%}
    {%- if message['role'] == 'user' -%}
        {{- '[INST] ' + (system if loop.first else '') + message['content'] + '[/INST]' -}}
    {%- elif message['role'] == 'assistant' -%}
        {{- ' ' + message['content'] | trim + eos_token -}}
    {%- else -%}
        {{- raise_exception('this template knows user, assistant and system turns only') -}}
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
NAMED = {"plain": PLAIN, "chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "gemma": GEMMA}


def read_template(name: str) -> str:
    """The Jinja text that `chat_template` means: one of `NAMED`, a file, or the text itself."""
    if name in NAMED:
        return NAMED[name]
    if "{" in name:
        return name
    path = Path(name)
    if not path.is_file():
        raise UserError(f"chat_template: {name}: neither a file, nor Jinja text, nor one of {', '.join(NAMED)}")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"chat_template: {name}: cannot be read: {error}") from None
