"""Where pytest looks for examples in docstrings, a module that needs an optional package is passed over without it."""

from importlib.util import find_spec

NEEDS = {
    "finetune/optim/adamw_8bit.py": "torchao",
    "finetune/models/fp8.py": "torchao",
    "finetune/inference/harness.py": "lm_eval",
}

collect_ignore = [module for module, package in NEEDS.items() if not find_spec(package)]
