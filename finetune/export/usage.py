"""The commands that use an export: for transformers, vLLM and llama.cpp, true for what was written. No torch."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# What vLLM takes as --max-lora-rank.
VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
QUESTION = "What can you do?"


def use_model(
    folder: Path, *, has_template: bool, is_vision_language: bool, opens_in_mlx: bool = False
) -> dict[str, str]:
    """The commands that use a Hugging Face folder, by the program."""
    asked = f"[dict(role='user', content='{QUESTION}')]" if has_template else f"'{QUESTION}'"
    answer = "[0]['generated_text'][-1]['content']" if has_template else "[0]['generated_text']"
    code = f"from transformers import pipeline; print(pipeline('text-generation', {str(folder)!r})({asked}){answer})"
    is_plain = not set(code) & set('"$`\\!')  # what double quotes of a shell leave as it is
    commands = {"transformers": f'python -c "{code}"' if is_plain else shlex.join(["python", "-c", code])}
    if is_vision_language:  # which takes images, and another pipeline
        commands = {"transformers": f"finetune chat {shlex.quote(str(folder))}"}
    commands |= {"vLLM": f"vllm serve {shlex.quote(str(folder))}"}
    if opens_in_mlx and not is_vision_language:
        commands["MLX"] = shlex.join(["mlx_lm.generate", "--model", str(folder), "--prompt", QUESTION])
    return commands


def use_adapter(folder: Path, base: str | None, config: Mapping[str, Any]) -> dict[str, str]:
    """The commands that use a PEFT folder on its base; none for vLLM where it cannot serve the adapter."""
    commands = {"transformers": f"finetune chat {shlex.quote(str(folder))}"}
    ranks = [config.get("r", 0), *(config.get("rank_pattern") or {}).values()]
    rank = next((each for each in VLLM_RANKS if each >= max(ranks)), None)
    unserved = ("modules_to_save", "use_dora", "target_parameters", "bias")
    if base is None or rank is None or any(config.get(key) not in (None, False, [], "none") for key in unserved):
        return commands
    named = f"{folder.name}={folder}"
    serve = ["vllm", "serve", base, "--enable-lora", "--max-lora-rank", str(rank), "--lora-modules", named]
    return commands | {"vLLM": shlex.join(serve)}


def use_gguf(file: Path, *, is_adapter: bool = False) -> dict[str, str]:
    """The commands that use a GGUF file; those of an adapter name the file of its base BASE.gguf."""
    if is_adapter:
        return {"llama.cpp": f"llama-server -m BASE.gguf --lora {shlex.quote(str(file))}"}
    name = file.stem.lower()
    made = f"echo {shlex.quote(f'FROM {file}')} > Modelfile && ollama create {shlex.quote(name)} -f Modelfile"
    return {"llama.cpp": f"llama-server -m {shlex.quote(str(file))}", "Ollama": made}


def describe_use(commands: Mapping[str, str]) -> list[str]:
    """The commands, for the terminal.

    >>> describe_use({"vLLM": "vllm serve out"})
    ['use     vLLM          vllm serve out']
    """
    lines = [f"{program:<14}{command}" for program, command in commands.items()]
    return [f"{'use' if number == 0 else '':<8}{line}" for number, line in enumerate(lines)]
