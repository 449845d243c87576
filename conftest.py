"""Examples in docstrings: a module that needs an optional package is skipped without it."""

from importlib.util import find_spec

GGUF_FILES = ("adapter", "export", "file", "model", "tokenizer")
NEEDS = {
    "finetune/optim/adamw_8bit.py": "torchao",
    "finetune/models/fp8.py": "torchao",
    "finetune/inference/harness.py": "lm_eval",
    **{f"finetune/export/formats/gguf_{name}.py": "gguf" for name in GGUF_FILES},
}

collect_ignore = [module for module, package in NEEDS.items() if not find_spec(package)]
# These import the one beside them.
collect_ignore += [
    f"recipes/quickstart/make_{name}.py" for name in ("spoken", "pictures", "products")
]
