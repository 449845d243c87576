"""From sharded checkpoints to Hugging Face folders: bounded memory, verified, published whole or
not at all.

Each stage of an export is a file:

1. `source` opens what is exported.
2. `target` describes the model to write.
3. `merge_choice` decides which base a QLoRA adapter is merged onto.
4. `base_account` finds what is carried over from the base's files.
5. `write` plans the weights and streams them to disk; `values` says how each tensor is computed.
6. `metadata` writes the other files of the folder, with the model card of `card`.
7. `verify` reads everything back, and compares it with the checkpoint.
8. `publish` gives the folder its name.

`export.export_source` runs them. `formats` has the formats beside safetensors. docs/export.md
describes the result.
"""

from finetune import make_callable

make_callable(__name__, "export_run")
