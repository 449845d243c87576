"""docs/families.md: its table is that of the sweep over every family of transformers (`python -m tests.models.sweep --write`)."""

from typing import Any

import pytest

from tests.models import sweep
from tests.models.families import FAMILIES, HYBRIDS, MASKED, OTHERS, OWN_ATTENTION

GOAL = 130  # families that train on packed rows


def rows() -> dict[str, tuple[str, str]]:
    """The page's table: model_type -> what becomes of packed rows, and of one document a row."""
    lines = sweep.rows_of(sweep.PAGE.read_text(encoding="utf-8").splitlines())
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {name.strip("`"): (packed, unpacked) for name, packed, unpacked in cells}


def test_every_family_of_transformers_has_a_row() -> None:
    """A new release of transformers brings new families: run the sweep again when it is pinned."""
    listed = set(rows())
    assert listed == {
        family for family in sweep.families() if family in listed or not sweep.is_newer()
    }


def test_most_families_train() -> None:
    trained = [family for family, (packed, _) in rows().items() if packed == "trains"]
    assert len(trained) >= GOAL
    assert trained[0] in rows() and set(FAMILIES) <= {*trained}


def test_two_ranks_find_what_the_page_says(loaded: dict[str, Any]) -> None:
    """The sweep runs in one process; these families are also walked under FSDP2 on two ranks."""
    for family in (*OTHERS, *HYBRIDS, *MASKED, *OWN_ATTENTION, "modernbert-decoder"):
        packed, unpacked = rows()[family]
        for found, said in (
            (loaded[f"{family}, packed"], packed),
            (loaded[f"{family}, padded"], unpacked),
        ):
            assert said.startswith(
                "trains" if found["error"] is None else str(sweep.Trial(found["error"]))
            ), family


@pytest.mark.slow
def test_the_sweep_finds_what_the_page_says(tmp_path: Any) -> None:
    with sweep.one_process() as world:
        found = [sweep.row(family, world, tmp_path) for family in sweep.families()]
    assert sorted(found) == sweep.rows_of(sweep.PAGE.read_text(encoding="utf-8").splitlines())


def rows_of_classes() -> list[str]:
    """The page's table of vision-language classes."""
    return sweep.rows_of(sweep.PAGE.read_text(encoding="utf-8").splitlines(), sweep.HEAD_OF_CLASSES)


def test_every_vision_language_class_has_a_row() -> None:
    listed = {row.partition(" |")[0] for row in rows_of_classes()}
    named = {f"| `{name}` (`{family}`)" for family, name in sweep.image_classes()}
    assert listed == {name for name in named if name in listed or not sweep.is_newer()}
    assert sum("trains" in row for row in rows_of_classes()) >= 50


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("family", "name"), sweep.image_classes())
def test_the_sweep_of_classes_finds_what_the_page_says(
    family: str, name: str, tmp_path: Any
) -> None:
    """Each says that it is trained on text, or what stands in the way."""
    with sweep.one_process() as world:
        assert sweep.row_of_class(family, name, world, tmp_path) in rows_of_classes()
