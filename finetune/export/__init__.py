"""From sharded checkpoints to Hugging Face folders: bounded memory, verified, published whole or not at all.

A pipeline, each stage a file: `source` opens what is exported, `target` describes the resulting model, `merge_choice`
decides which base a QLoRA adapter is merged onto, `write` plans the weights and streams them to disk, `card`
writes what else a model folder holds, `verify` reads it all back, `publish` gives it its name.
`export.export_source` runs them in this order. docs/export.md describes the result.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from finetune.export.export import export

__all__ = ["export"]


def __getattr__(name: str) -> Any:
    """Imports `export` on first use: it needs torch, which takes seconds to import."""
    if name != "export":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from finetune.export.export import export

    return export
