"""From sharded checkpoints to Hugging Face folders: bounded memory, verified, published whole or
not at all.

A pipeline, each stage a file: `source` opens what is exported, `target` describes the resulting
model, `merge_choice` decides which base a QLoRA adapter is merged onto, `write` plans the weights
and streams them to disk, `card` writes what else a model folder holds, `verify` reads it all back,
`publish` gives it its name. `export.export_source` runs them in this order. docs/export.md
describes the result.
"""

from finetune import make_callable

make_callable(__name__, "export_run")
