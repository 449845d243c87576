"""From sharded checkpoints to Hugging Face folders: bounded memory, verified, published whole or not at all.

`beforehand` tells what can be told at once; `sources` finds what is to be exported and opens it without reading values;
`architecture` says what the model must consist of; `values` and `lora` say how every tensor of the result follows from
what is stored; `writing` streams them to disk; `folder` and `card` add what makes the folder complete; `verification`
reads it all back; `publishing` gives it its name, `progress` tells how far it is. `exporting.export` puts these in a
row, `command` is the command line's way to it. docs/export.md describes it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from finetune.export.export import export

__all__ = ["export"]


def __getattr__(name: str) -> Any:
    """`export`, imported when it is asked for: it needs torch, which takes seconds, and a mistake is told before."""
    if name != "export":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from finetune.export.export import export

    return export
