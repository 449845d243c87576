"""docs/compatibility.md: how many published recipes of other tools run here, which of them without
a difference, and what the rest need.

    python -m tests.convert.published FOLDER > STARTED.json
    python benchmarks/compatibility.py FOLDER STARTED.json AXOLOTL STARTED.json > PAGE

PAGE is docs/compatibility.md.

FOLDER holds one folder of YAML files for each tool, such as FOLDER/axolotl/*.yaml. Each file is
given to `finetune convert`'s own code. STARTED.json says which of those that convert trained for
two steps: a tiny model of the file's family, rows of its format, one process, fp32. AXOLOTL holds
the folder axolotl with the examples of that tool's source package of version 0.21, whose folders
are part of the files' names (llama-3__lora.yaml).
"""

import json
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from finetune.convert.conversion import MISSING_FILE, convert_file, read_back
from finetune.convert.recognize import Refusal
from finetune.errors import UserError

INTRODUCTION = """\
# Compatibility

<!-- Made by `python benchmarks/compatibility.py FOLDER STARTED.json AXOLOTL STARTED.json`; change it there. -->

Will my recipe run? `finetune convert THEIRS --output recipe.yaml` answers for yours, and lists every difference ([coming from another
tool](coming-from.md)). Here it was given the configuration files that other tools publish as examples. Each file is counted once:

- **Converted, no difference**: learning rate, schedule, warm-up, batch, clipping, decay, epochs, packing, length, trained tokens, LoRA's scale,
  precision and layout are the same. Remarks under "Worth a look" do not count, such as that the tool also caps the warm-up.
- **Converted, with differences listed**: everything it needs is supported, but something works differently, such as a warm-up that is quadratic there
  and linear here.
- **Needs a missing capability**: refused by name, or converted with that difference listed.
- **Not a training recipe**: a launcher's file, generation, evaluation, merging, a benchmark.
- **Run two steps**: of the converted recipes, lacking capabilities included, those that trained two steps on one CPU process in fp32, with a random
  model of two layers of the family that the name says, and a few rows of the file's format.
"""  # noqa: E501


COLUMNS = ("files", "converted", "different", "lacking", "not_training", "ran")


@dataclass(slots=True)
class Count:
    """One tool's files, by outcome."""

    files: int = 0
    converted: int = 0
    different: int = 0
    lacking: int = 0
    not_training: int = 0
    ran: int = 0  # of those that convert
    unread: list[str] = field(default_factory=list)


SECOND = """\

## Axolotl 0.21's own examples

Every file under `examples/` in the source package of that version, counted in the same way; many
are among those above. The runs are those of an earlier count, before the last changes to what
convert writes.
"""


def main(
    folder: Path, started: dict[str, bool], axolotl: Path, axolotl_started: dict[str, bool]
) -> str:
    """The page."""
    counted = count_files(folder, started)
    first, _, tables = counted.partition("\n\n")
    introduction = INTRODUCTION.replace("Will my recipe run?", f"{first}\n\nWill my recipe run?")
    second = count_files(axolotl, axolotl_started).replace("\n## ", "\n### ")
    return f"{introduction}\n{tables}{SECOND}\n{second}"


def count_files(folder: Path, started: dict[str, bool]) -> str:
    """The tables of the files under one folder."""
    tools: dict[str, Count] = {}
    capabilities: Counter[str] = Counter()
    differences: Counter[str] = Counter()
    other: Counter[str] = Counter()
    for path in sorted(path for path in folder.glob("*/*") if path.suffix in (".yaml", ".yml")):
        if path.parent.name == "accelerate_files":
            continue
        count = tools.setdefault(path.parent.name, Count())
        count.files += 1
        try:
            found = convert_file(path)
            missing = found.missing_capabilities
            differences_here = found.differences
            wrong = [p for p in read_back(found.recipe) if not p.endswith(MISSING_FILE)]
            if wrong:  # our own reader refuses what was written: the file is counted here alone
                count.unread.append(f"{path.name}: {'; '.join(wrong)}")
                continue
        except Refusal as refusal:
            missing = [refusal.cause]
            differences_here = []
            if not refusal.is_training:
                count.not_training += 1
                other[refusal.cause] += 1
                continue
        except UserError as error:
            count.unread.append(str(error).splitlines()[0].replace(f"{folder}/", ""))
            continue
        count.ran += started.get(f"{path.parent.name}/{path.name}", False)
        capabilities.update(missing)
        count.lacking += bool(missing)
        count.different += bool(differences_here) and not missing
        count.converted += not differences_here and not missing
        if not missing:
            differences.update(
                {line.partition("   (")[2].removesuffix(")") or line for line in differences_here}
            )
    return page(tools, capabilities, differences, other)


def page(
    tools: dict[str, Count],
    capabilities: Counter[str],
    differences: Counter[str],
    other: Counter[str],
) -> str:
    whole = {key: sum(getattr(count, key) for count in tools.values()) for key in COLUMNS}
    training = whole["files"] - whole["not_training"]
    first = (
        f"**Of {training} published training files {whole['converted'] + whole['different']} "
        f"convert with all that they need, and {whole['ran']} recipes train two steps on a tiny "
        "model of their family.**"
    )
    lines = [
        first,
        "",
        "| Tool | Files | Converted, no difference | Converted, with differences listed | Need a "
        "missing capability | Not a training recipe | Run two steps on a tiny model of their "
        "family | Not read |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, count in tools.items():
        numbers = (getattr(count, key) for key in COLUMNS)
        lines.append(f"| {name} | {' | '.join(map(str, numbers))} | {len(count.unread)} |")
    lines.append(
        f"| all | {' | '.join(map(str, whole.values()))} | "
        f"{sum(len(count.unread) for count in tools.values())} |"
    )
    lines += [
        "",
        "## Differences of the converted files",
        "",
        *(
            ["A file may have several.", "", "| Difference | Files |", "| --- | --- |"]
            if differences
            else ["There are none."]
        ),
        *(
            f"| {name} | {number} |"
            for name, number in sorted(differences.items(), key=lambda c: (-c[1], c[0]))
        ),
        "",
        "## Missing capabilities",
        "",
        "A file may need several.",
        "",
        "| Capability | Files |",
        "| --- | --- |",
    ]
    lines += [
        f"| {name} | {number} |"
        for name, number in sorted(capabilities.items(), key=lambda c: (-c[1], c[0]))
    ]
    lines += ["", "## Not training recipes", "", "| Kind | Files |", "| --- | --- |"]
    lines += [
        f"| {name} | {number} |"
        for name, number in sorted(other.items(), key=lambda c: (-c[1], c[0]))
    ]
    unread = [line for count in tools.values() for line in count.unread]
    if unread:
        lines += ["", "## Not read", "", *(f"- {line}" for line in unread)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if len(sys.argv) != 5 or not Path(sys.argv[1]).is_dir() or not Path(sys.argv[3]).is_dir():
        sys.exit(
            f"usage: python {sys.argv[0]} FOLDER STARTED.json AXOLOTL STARTED.json (folders of a "
            "folder for each tool)"
        )
    folders = [Path(sys.argv[1]), Path(sys.argv[3])]
    trained = [json.loads(Path(sys.argv[i]).read_text()) for i in (2, 4)]
    print(main(folders[0], trained[0], folders[1], trained[1]), end="")
