"""What the annotations of a recipe's keys say beside type and help."""

from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Gt, Lt
from pydantic import Field

Positive = Annotated[int, Gt(0)]
FileName = Annotated[str, Field(pattern=r"^[^\x00]+$")]
StepsOrShare = Positive | Annotated[float, Gt(0), Lt(1)]  # a share of the run's steps; see constants.count_steps


class FileOrName:
    """Marks a key whose value may be a local path, from the working directory or else the recipe's folder."""


class PythonName:
    """Marks a key whose value, or each of a list, names a function or a class in a file: see user_code.py."""


class ModulePatterns:
    """Marks a key whose value (a list, or a mapping's keys) is patterns of module names: see module_names.py."""


class SameOnResume:
    """Marks a key that decides the course of a run (data, model, batch, seed), which a resumed run must keep."""


@dataclass(frozen=True, slots=True)
class ReadAs:
    """Marks a key for which a value that other tools' files have is read as one of ours."""

    written: Any
    meant: Any


NO_IN_YAML = ReadAs(False, "no")  # YAML reads a plain `no` as false
