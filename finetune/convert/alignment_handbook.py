"""Reads alignment-handbook's dataset mixtures, which stand in files for TRL's trainers.

A mixture names data sets, each with the share of its rows that is trained on.
"""

from pathlib import Path
from typing import Any

from finetune.convert.counterparts import ToolFile
from finetune.convert.entries import DataSetEntry, Sources, list_entries, make_sources
from finetune.convert.foreign_values import WrongValue, read_number
from finetune.convert.value_conversion import Conversion

# columns that are read beside one of messages, there and here
BESIDE_MESSAGES = ("chat_template_kwargs", "tools")
# maybe_insert_system_message and decontaminate_humaneval of alignment-handbook before its TRL 0.14
EMPTY_SYSTEM = (
    "an empty system message begins a conversation without one there, by default and where the "
    "chat template names that role; none here"
)
DECONTAMINATED = (
    "dataset_mixer: rows whose answer holds a problem of HumanEval are left out there under dpo"
)
ROWS_DRAWN = "a share that no slice names exactly: drawn by the seed here, the first rows there"


def read_mixer(settings: ToolFile, conversion: Conversion) -> tuple[Sources, Sources]:
    """Reads `dataset_mixer`, the older key of mixtures: {data set: share of its rows}.

    Returns the recipe's entries for training and for evaluation; both are empty without the key.
    Held-out splits are read whole, whatever the share.
    """
    mixer = settings.get("dataset_mixer")
    splits = settings.get("dataset_splits") or ["train", "test"]
    if not isinstance(mixer, dict) or not isinstance(splits, list):
        return [], []
    configs = settings.get("dataset_configs") or [None] * len(mixer)
    if not isinstance(configs, list) or len(configs) != len(mixer):
        raise WrongValue.of_key(
            "dataset_configs", configs, "a list with a name for each data set", "[default]"
        )
    shares = {
        path: read_number(f"dataset_mixer.{path}", share, "0.5", 0) for path, share in mixer.items()
    }
    train: Sources = []
    held_out: Sources = []
    for split in map(str, splits):
        for (path, share), config in zip(shares.items(), configs, strict=True):
            if share > 0 and "train" in split:
                train += make_sources([path], name=config, **_select_share(split, share))
            if share > 0 and "test" in split:
                held_out += make_sources([path], name=config, split=split)
    weighted = [f"{entry['path']}: {entry['weight']}" for entry in train if "weight" in entry]
    if weighted:
        conversion.remarks.append(f"dataset_mixer: {', '.join(weighted)}   ({ROWS_DRAWN})")
    _report_changed_rows(settings, conversion)
    return train, held_out


def _report_changed_rows(settings: ToolFile, conversion: Conversion) -> None:
    """Reports the rows that the scripts which read `dataset_mixer` change or leave out."""
    if settings.get("auto_insert_empty_system_msg", True):
        conversion.add_difference("auto_insert_empty_system_msg", True, EMPTY_SYSTEM)
    if conversion.recipe.get("method") == "dpo":
        conversion.remarks.append(DECONTAMINATED)


def _select_share(split: str, share: float) -> dict[str, Any]:
    """Returns the keys with which a recipe's entry reads a share of a split.

    Whole percents become a slice, the first rows of the split. Any other share becomes a weight.

    >>> _select_share("train", 0.5), _select_share("train", 1)
    ({'split': 'train[:50%]'}, {'split': 'train'})
    >>> _select_share("train", 0.004)
    {'split': 'train', 'weight': 0.004}
    """
    percent = round(100 * share, 9)  # 100 * 0.07 is 7.000000000000001
    if share >= 1:
        return {"split": split}
    if percent % 1 == 0:
        return {"split": f"{split}[:{percent:.0f}%]"}
    return {"split": split, "weight": share}


def read_mixture(settings: ToolFile, source: Path, conversion: Conversion) -> list[DataSetEntry]:
    """Lists the data sets of `dataset_mixture`, with their keys renamed to TRL's; empty without it.

    Renamed are `id` to `path`, `config` to `name`, and the column of messages, which stands alone
    or beside those of `BESIDE_MESSAGES`, to `messages_column`. The mixture's `test_split_size`
    becomes the recipe's `eval_split_size`.
    """
    mixture = settings.get("dataset_mixture")
    if not isinstance(mixture, dict):
        return []
    if mixture.get("test_split_size"):
        conversion.recipe["eval_split_size"] = mixture["test_split_size"]
    entries = list_entries(mixture.get("datasets"), "dataset_mixture.datasets", source)
    for entry in entries:
        entry.unread |= {"path": entry.take("id"), "name": entry.take("config")}
        columns = entry.unread.get("columns")
        names = [name for name in columns or () if name not in BESIDE_MESSAGES]
        if isinstance(columns, list) and len(names) == 1:
            entry.take("columns")
            entry.unread["messages_column"] = names[0]
    return entries
