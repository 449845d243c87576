"""What the annotations of a recipe's keys say beside type and help."""

from typing import Annotated

from annotated_types import Gt

Positive = Annotated[int, Gt(0)]


class FileOrName:
    """Marks a key whose value may be a local path; the reader looks in the working directory, then in the recipe's folder."""


class SameOnResume:
    """Marks a key that decides the course of a run (data, model, batch, horizon, seed): a resumed run must have it unchanged."""
