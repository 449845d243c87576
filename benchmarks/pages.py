"""docs/recipes.md and docs/coming-from.md, made from the schema and the tables of other tools'
keys.

Run it where a key or a counterpart has changed; tests hold both pages current.
"""

import json
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from annotated_types import Ge, Gt, Le, Lt

from finetune.config.keys import Key, keys_of
from finetune.config.schema import SECTIONS, DatasetSource, recipe_keys
from finetune.convert.counterparts import (
    DATA_SET_KEYS,
    GRPO,
    TOOL_NAMES,
    Counterpart,
    list_counterparts,
)

DOCS = Path(__file__).resolve().parents[1] / "docs"

INTRODUCTION = """\
# Recipes

<!-- Made from finetune/config/schema.py by `python benchmarks/pages.py`; change it there. -->

A recipe says what to train: a flat YAML file in the vocabulary of TRL and Transformers. How it is spread over GPUs (sharding,
bf16, activation checkpointing) belongs in an Accelerate file and nowhere else.

```yaml
model_name_or_path: meta-llama/Llama-3.2-1B-Instruct
accelerate_config: fsdp_full_shard
datasets:
  - path: openai/gsm8k
    name: main
    type: messages                    # questions and answers through the model's chat template
    prompt_column: question
    completion_column: answer
max_length: 2048
global_batch_size: 8
learning_rate: 1e-5
```

- `--recipe` takes a path, or the name of a file in `recipes/`.
- `key=value` on the command line (also `--key value`) overrides any key: `learning_rate=2e-5 "datasets=[{path: mine.jsonl}]"`.
- An unknown key, a wrong type, a key given twice, a missing file: all are reported at once, each with its line, before
  anything is loaded.
- A local path is looked for in the working directory, then in the recipe's folder; a name found in neither is a hub name.
- Numbers are YAML 1.2's: `2e-5` is a number. Aliases (`*name`) are not read, nor a file of more than 256 KiB ([limits](data.md#limits)).
"""  # noqa: E501

# What most recipes need, in the order of a file.
USUAL = (
    "model_name_or_path",
    "accelerate_config",
    "datasets",
    "eval_split_size",
    "max_length",
    "global_batch_size",
    "num_train_epochs",
    "learning_rate",
    "use_peft",
    "eval_steps",
)

TITLES = {
    "model": "Model",
    "method": "Method",
    "rollout": "Sampling and rewards",
    "lora": "LoRA",
    "quantization": "A base in 4 or 8 bits",
    "quantization_aware": "Quantization-aware training",
    "data": "Data",
    "batch": "Batch",
    "optimization": "Optimization",
    "run": "Run",
    "checkpoint": "Checkpoints and export",
}


def recipes_page() -> str:
    """The page: every key with its type, default and help, in the order of the schema."""
    keys = recipe_keys()
    parts = [
        INTRODUCTION,
        f"## The ten keys that most recipes need\n\n{_table(keys[name] for name in USUAL)}",
    ]
    for section, schema in SECTIONS.items():
        parts.append(
            f"## {TITLES[section]}\n\n{schema.__doc__}\n\n"
            f"{_table(keys_of(schema, section).values())}"
        )
        if section == "data":
            parts.append(
                "### An entry of `datasets` and `eval_datasets`\n\n"
                f"{_table(keys_of(DatasetSource).values())}"
            )
    return "\n".join(parts)


def _table(keys: Iterable[Key]) -> str:
    rows = [
        f"| `{key.name}` | {_type(key.annotation)} | {_default(key)} | {key.help} |" for key in keys
    ]
    return "\n".join(["| Key | Takes | Default | |", "|---|---|---|---|", *rows]) + "\n"


def _default(key: Key) -> str:
    if key.is_required:
        return "must be given"
    if key.default in (None, ""):
        return "`null`"
    return f"`{json.dumps(key.default)}`".replace('"', "")


def _type(annotation: Any) -> str:
    """A type of the schema in words."""
    if typing.get_origin(annotation) is typing.Annotated:
        base, *metadata = typing.get_args(annotation)
        return " ".join([_type(base), *(bound for item in metadata for bound in _bound(item))])
    if typing.get_origin(annotation) is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in typing.get_args(annotation))
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return " or ".join(
            _type(choice) for choice in typing.get_args(annotation) if choice is not types.NoneType
        )
    if typing.get_origin(annotation) is tuple:
        item = typing.get_args(annotation)[0]
        return "list of entries" if item is DatasetSource else f"list of {_type(item)}"
    if typing.get_origin(annotation) is dict:
        return "mapping"
    return {int: "whole number", float: "number", bool: "`true`, `false`", str: "text"}[annotation]


def _bound(item: Any) -> Iterable[str]:
    for kind, sign, name in ((Gt, ">", "gt"), (Ge, "≥", "ge"), (Lt, "<", "lt"), (Le, "≤", "le")):
        if isinstance(item, kind) and getattr(item, name) < 2**62:
            yield f"{sign} {getattr(item, name):g}"


def coming_from_page() -> str:
    """docs/coming-from.md, from the tables."""
    lines = [
        "# Coming from TRL, Axolotl, LLaMA-Factory, torchtune, NeMo Automodel or ms-swift",
        "",
        (
            "`finetune convert THEIR.yaml --output recipe.yaml` converts their file into a recipe: "
            "its "
            "values, and"
        ),
        "that tool's defaults where ours differ. Differences are listed in it; a file of another "
        "method is refused by name. In place of a file it takes a script, or a command line in "
        "quotes: "
        '`finetune convert "trl dpo --model_name_or_path ..."`.',
        "The recipe is judged by the rules of a run, for the family that the model's config or "
        "name says: what would be refused",
        "is changed, with a line. Where no shipped Accelerate file computes as theirs does (fp16, "
        "FP8, tensor parallelism), one",
        "is written beside the recipe.",
        (
            "Another tool's key in a recipe is an error that names ours. This page is made from "
            "the same tables"
        ),
        "(`finetune/convert/*.csv`): `python benchmarks/pages.py`.",
        "",
        "Sharding, compute dtype and activation checkpointing belong in the Accelerate file that "
        "`accelerate_config` (or",
        "`--config`) names, and nowhere else: see [layouts](layouts.md). Keys that are the same "
        "in both are not in the tables.",
    ]
    for tool in TOOL_NAMES:
        pairs = list_counterparts(tool)
        if tool == "TRL":
            pairs += list_counterparts(GRPO)
        lines += ["", f"## {tool}", "", *_counterparts(pairs)]
        unneeded = ", ".join(f"`{pair.key}`" for pair in pairs if not pair.has_effect)
        lines += ["", f"Without effect here: {unneeded}."]
        lines += ["", "Within a data set's own entry:", ""]
        lines += _counterparts(list_counterparts(tool, DATA_SET_KEYS))
    return "\n".join(lines) + "\n"


def _counterparts(pairs: Iterable[Counterpart]) -> list[str]:
    """A table, a row for the keys of one counterpart and note; below it those that only have
    another name.
    """
    keys_of_row: dict[tuple[str | None, str], list[str]] = {}
    renamed = []
    for pair in pairs:
        if not pair.has_effect or (pair.ours == pair.key and not pair.note):
            continue
        if pair.ours and not pair.note:
            renamed.append(f"`{pair.key}` is `{pair.ours}`")
        else:
            keys_of_row.setdefault((pair.ours, pair.note), []).append(f"`{pair.key}`")
    lines = ["| There | Here | |", "| --- | --- | --- |"]
    for (ours, note), keys in keys_of_row.items():
        lines.append(f"| {', '.join(keys)} | {f'`{ours}`' if ours else '–'} | {note} |")
    if renamed:
        lines += ["", f"Under another name: {', '.join(renamed)}."]
    return lines


if __name__ == "__main__":
    (DOCS / "recipes.md").write_text(recipes_page(), encoding="utf-8")
    (DOCS / "coming-from.md").write_text(coming_from_page(), encoding="utf-8")
