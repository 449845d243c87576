"""Where pytest looks for examples in docstrings, a module that needs an optional package is passed over without it."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("torchao") else ["finetune/optim/adamw_8bit.py"]
