"""What a conversion has found so far."""

import json
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Converted:
    """A recipe in the making: our keys, and what there is to say about theirs."""

    recipe: dict[str, Any] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)  # carried over, but worth a look
    without: list[str] = field(default_factory=list)  # no counterpart


def shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
