"""docs/recipes.md and docs/coming-from.md, made from the schema and the tables of other tools'
keys.

Run it where a key or a counterpart has changed; tests hold both pages current.
"""

import json
import re
import types
import typing
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from annotated_types import Ge, Gt, Le, Lt

from finetune.config.keys import Key, keys_of
from finetune.config.schema import SECTIONS, DatasetSource, recipe_keys
from finetune.convert.counterparts import (
    DATA_SET_KEYS,
    GRPO,
    KEYS,
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
        f"## The ten keys that most recipes need\n\n{_short_table(keys[name] for name in USUAL)}",
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


def _short_table(keys: Iterable[Key]) -> str:
    """A table of keys with the first sentence of their help; the section of each has the rest."""
    rows = [f"| `{key.name}` | {key.help.partition('. ')[0].rstrip('.')} |" for key in keys]
    return "\n".join(["| Key | |", "|---|---|", *rows]) + "\n"


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


COMING_FROM = """\
# Coming from TRL, Axolotl, LLaMA-Factory, torchtune, NeMo Automodel or ms-swift

<!-- Made from finetune/convert/*.csv by `python benchmarks/pages.py`; change it there. -->

`finetune convert THEIRS --output recipe.yaml` writes our recipe from theirs. `THEIRS` is their file, a script, or a command line in quotes:
`finetune convert "trl dpo --model_name_or_path ..."`.

- The recipe has their values, and their tool's defaults where ours differ. Every difference is a line in it.
- The rules of a run judge it, for the model's family. What they would refuse is changed, with a line. A file of another method is refused by name.
- Four things have no line. Each tool draws its own random order. On several GPUs Transformers' `Trainer` fills an epoch's last batch with rows
  from its beginning (Accelerate's `even_batches`), and torchtune and Automodel's recipe for images the rows of each GPU (torch's `DistributedSampler`);
  here the last step has what remains, and no row twice. On one GPU that batch is short there too, but under preferences and rewards its mean counts as
  much as a full one's in the last step; here each pair counts alike. Of a share of held-out rows TRL, Axolotl and LLaMA-Factory round the number up, ms-swift down for
  each data set; here it is the nearest, so that one row more or one fewer may be held out. Trainer of Transformers 5.2 to 5.5.3 divides gradients by
  `gradient_accumulation_steps` twice, so that their norm there is that fraction of the norm here, and is clipped later.
- Sharding, `mixed_precision`, `fsdp_activation_checkpointing`, `parallelism_config_tp_size` and `parallelism_config_cp_size` stand in the Accelerate file
  that `accelerate_config` names ([layouts](layouts.md)). Where no shipped one computes as theirs (fp16, FP8, tensor parallelism), one is written beside the recipe.
- Another tool's key in a recipe is an error that names ours.

Scripts of [Unsloth](from-unsloth.md) have a page of their own, and [compatibility](compatibility.md) says how many published files convert.
`benchmarks/beside_trl.py` trains files by TRL and by the recipes that are made of them, and compares losses, gradient norms, rates and weights step by step; with `--draw SEED COUNT` of keys drawn at random.

The tables omit keys that are the same in both, nested there or not (`optimizer.weight_decay`), and keys that change nothing here: `finetune convert` drops these, and a recipe that has one is
refused with the reason.
"""  # noqa: E501

WITHIN = "Within a data set's own entry:"
LONG = 5  # words of a note that is not repeated
SHARED_KEYS = """
## Keys of several tools

These keys mean the same in two or more tools, mostly because transformers' `Trainer` has them. "As `optim`" below refers to this table.
"""  # noqa: E501


def coming_from_page() -> str:
    """docs/coming-from.md, from the tables."""
    shared = _shared_keys(KEYS)
    shared_of_data = _shared_keys(DATA_SET_KEYS)
    lines = [COMING_FROM + SHARED_KEYS, *_counterparts(shared)]
    lines += ["", WITHIN, "", *_counterparts(shared_of_data)]
    for tool in TOOL_NAMES:
        pairs = list_counterparts(tool)
        if tool == "TRL":
            pairs += list_counterparts(GRPO)
        lines += ["", f"## {tool}", "", *_counterparts(pairs, shared)]
        of_data = list_counterparts(tool, DATA_SET_KEYS)
        if any(pair not in shared_of_data for pair in of_data):
            lines += ["", WITHIN, "", *_counterparts(of_data, shared_of_data)]
    return "\n".join(lines) + "\n"


def _shared_keys(table: str) -> list[Counterpart]:
    """The keys that two or more tools have, with one meaning."""
    tools = Counter(pair for tool in TOOL_NAMES for pair in set(list_counterparts(tool, table)))
    in_order = dict.fromkeys(p for tool in TOOL_NAMES for p in list_counterparts(tool, table))
    return [pair for pair in in_order if tools[pair] > 1]


def _counterparts(pairs: Iterable[Counterpart], shared: Sequence[Counterpart] = ()) -> list[str]:
    """A table, a row for the keys of one counterpart and note; below it those that only have
    another name, and those of what is not supported.

    Args:
        pairs: Keys of one tool.
        shared: Keys in a table above, which are left out. What it says of one is not said twice.
    """
    above = {_here(pair): pair.key for pair in reversed(shared)}
    keys_of_row: dict[str, dict[str, None]] = {}
    keys_of_capability: dict[str, list[str]] = {}
    renamed = []
    for pair in pairs:
        is_same = pair.ours == pair.key.rpartition(".")[2] and not pair.note
        if is_same or not pair.has_effect or pair in shared:
            continue
        key = f"`{pair.key}`"
        if pair.ours and not pair.note:
            renamed.append(f"{key}: `{pair.ours}`")
        elif not pair.ours and pair.note == f"{pair.missing_capability}: not supported":
            capability = re.sub(rf" with {pair.key}$", "", pair.missing_capability)
            keys_of_capability.setdefault(capability, []).append(key)
        else:
            here = _here(pair)
            if here in above and len(here.split()) > LONG:
                here = f"as `{above[here]}`"
            keys_of_row.setdefault(here, {})[key] = None
    lines = ["| There | Here |", "| --- | --- |"]
    lines += [f"| {', '.join(keys)} | {here} |" for here, keys in keys_of_row.items()]
    if renamed:
        lines += ["", f"Under another name (theirs: ours): {', '.join(renamed)}."]
    if keys_of_capability:
        missing = (f"{name} ({', '.join(keys)})" for name, keys in keys_of_capability.items())
        lines += ["", f"Not supported here: {'; '.join(missing)}."]
    return lines


def _here(pair: Counterpart) -> str:
    """Our key, where there is one that the note does not name, and the note."""
    if pair.ours == "accelerate_config":
        return "the Accelerate file"
    if pair.ours is None or re.search(rf"\b{pair.ours}\b", pair.note):
        return pair.note
    return f"`{pair.ours}`: {pair.note}"


if __name__ == "__main__":
    (DOCS / "recipes.md").write_text(recipes_page(), encoding="utf-8")
    (DOCS / "coming-from.md").write_text(coming_from_page(), encoding="utf-8")
