"""docs/compatibility.md: how many published recipes of other tools run here with their meaning, and what the others need.

    python benchmarks/compatibility.py FOLDER > docs/compatibility.md

FOLDER holds one folder of YAML files for each tool, such as FOLDER/axolotl/*.yaml. Nothing is run or loaded: each file is
given to `finetune convert`'s own code.
"""

import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from finetune.convert.cli import MISSING_FILE, read_back
from finetune.convert.conversion import convert_file
from finetune.convert.methods import Refusal
from finetune.errors import UserError

INTRODUCTION = """\
# Compatibility

<!-- Made by `python benchmarks/compatibility.py FOLDER`; change it there. -->

Will my recipe run? `finetune convert` was given configuration files that other tools publish as examples. A file **converts**
where the recipe trains the same: rate, schedule, warm-up, batch, clipping, decay, epochs, packing, length, what is trained on,
LoRA's scale, precision, layout. It **lacks a capability** where that needs something not supported here: it is then refused by
name, or converted with the difference listed. What is **no training recipe** (a launcher's file, generation, evaluation,
merging, a benchmark) is not counted further. How often a run saves and evaluates, and where it logs, is not part of the meaning.
"""


@dataclass(slots=True)
class Count:
    """What became of one tool's files."""

    files: int = 0
    converted: int = 0
    lacking: int = 0
    not_training: int = 0
    unread: list[str] = field(default_factory=list)


def main(folder: Path) -> str:
    """The page. Raises `NotADirectoryError` where `folder` is none."""
    tools: dict[str, Count] = {}
    capabilities: Counter[str] = Counter()
    other: Counter[str] = Counter()
    for path in sorted(path for path in folder.glob("*/*") if path.suffix in (".yaml", ".yml")):
        if path.parent.name == "accelerate_files":
            continue
        count = tools.setdefault(path.parent.name, Count())
        count.files += 1
        try:
            found = convert_file(path)
            lacks = found.lacks
            wrong = [p for p in read_back(found.recipe) if not p.endswith(MISSING_FILE)]
            count.unread += [f"{path.name}: {problem}" for problem in wrong]
        except Refusal as refusal:
            lacks = [refusal.cause]
            if not refusal.is_training:
                count.not_training += 1
                other[refusal.cause] += 1
                continue
        except UserError as error:
            count.unread.append(str(error).splitlines()[0].replace(f"{folder}/", ""))
            continue
        capabilities.update(lacks)
        count.lacking += bool(lacks)
        count.converted += not lacks
    return page(tools, capabilities, other)


def page(tools: dict[str, Count], capabilities: Counter[str], other: Counter[str]) -> str:
    lines = [
        INTRODUCTION,
        "| Tool | Files | Convert with their meaning | Lack a capability | No training recipe | Not read |",
    ]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for name, count in tools.items():
        numbers = (count.files, count.converted, count.lacking, count.not_training, len(count.unread))
        lines.append(f"| {name} | {' | '.join(map(str, numbers))} |")
    total = [sum(getattr(c, key) for c in tools.values()) for key in ("files", "converted", "lacking", "not_training")]
    lines.append(f"| all | {' | '.join(map(str, total))} | {sum(len(count.unread) for count in tools.values())} |")
    lines += [
        "",
        "## What the others need",
        "",
        "A file may need several.",
        "",
        "| Capability | Files |",
        "| --- | --- |",
    ]
    lines += [f"| {name} | {number} |" for name, number in sorted(capabilities.items(), key=lambda c: (-c[1], c[0]))]
    lines += ["", "## No training recipes", "", "| Kind | Files |", "| --- | --- |"]
    lines += [f"| {name} | {number} |" for name, number in sorted(other.items(), key=lambda c: (-c[1], c[0]))]
    unread = [line for count in tools.values() for line in count.unread]
    if unread:
        lines += ["", "## Not read", "", *(f"- {line}" for line in unread)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.exit(f"usage: python {sys.argv[0]} FOLDER (of one folder of YAML files for each tool)")
    print(main(Path(sys.argv[1])), end="")
