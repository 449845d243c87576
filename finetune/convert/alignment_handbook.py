"""alignment-handbook's mixtures, in files for TRL's trainers: names of data sets with shares of
their rows.
"""

from pathlib import Path
from typing import Any

from finetune.convert.counterparts import ToolFile
from finetune.convert.entries import DataSetEntry, Sources, list_entries, make_sources
from finetune.convert.foreign_values import WrongValue, read_number
from finetune.convert.value_conversion import Conversion

DRAWN = "a share that no slice names exactly: drawn by the seed here, the first rows there"


def read_mixer(settings: ToolFile, conversion: Conversion) -> tuple[Sources, Sources]:
    """Reads (the entries, those held out) of the older dataset_mixer.

    A share of whole percents is a slice, another one a weight.
    """
    mixer = settings.get("dataset_mixer")
    splits = settings.get("dataset_splits") or ["train", "test"]
    if not isinstance(mixer, dict) or not isinstance(splits, list):
        return [], []
    names = settings.get("dataset_configs") or [None] * len(mixer)
    if not isinstance(names, list) or len(names) != len(mixer):
        raise WrongValue.of_key(
            "dataset_configs", names, "a list with a name for each data set", "[default]"
        )
    shares = {
        path: read_number(f"dataset_mixer.{path}", share, "0.5", 0) for path, share in mixer.items()
    }
    train: Sources = []
    held_out: Sources = []
    for split in map(str, splits):
        for (path, share), name in zip(shares.items(), names, strict=True):
            if share > 0 and "train" in split:
                train += make_sources([path], name=name, **_cut(split, share))
            if share > 0 and "test" in split:
                held_out += make_sources([path], name=name, split=split)
    drawn = [f"{entry['path']}: {entry['weight']}" for entry in train if "weight" in entry]
    if drawn:
        conversion.remarks.append(f"dataset_mixer: {', '.join(drawn)}   ({DRAWN})")
    return train, held_out


def _cut(split: str, share: float) -> dict[str, Any]:
    """Returns the keys of an entry that read a share of a split.

    >>> _cut("train", 0.5), _cut("train", 0.004), _cut("train", 1)
    ({'split': 'train[:50%]'}, {'split': 'train', 'weight': 0.004}, {'split': 'train'})
    """
    percent = round(100 * share, 9)
    if share >= 1:
        return {"split": split}
    if percent % 1 == 0:
        return {"split": f"{split}[:{percent:.0f}%]"}
    return {"split": split, "weight": share}


def read_mixture(settings: ToolFile, source: Path, conversion: Conversion) -> list[DataSetEntry]:
    """Lists the entries of its dataset_mixture, in TRL's names."""
    mixture = settings.get("dataset_mixture")
    if not isinstance(mixture, dict):
        return []
    if mixture.get("test_split_size"):
        conversion.recipe["eval_split_size"] = mixture["test_split_size"]
    entries = list_entries(mixture.get("datasets"), "dataset_mixture.datasets", source)
    for entry in entries:
        entry.unread |= {"path": entry.take("id"), "name": entry.take("config")}
        columns = entry.unread.get("columns")
        if isinstance(columns, list) and len(columns) == 1:
            entry.take("columns")
            entry.unread["messages_column"] = columns[0]
    return entries
