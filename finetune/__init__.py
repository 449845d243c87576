"""Fine-tune Llama-style models on Hugging Face Accelerate: same losses on every layout, no silent
fault, safe exports.

What is public is listed in docs/api.md, with its types in `__init__.pyi`. It is imported when it is
first used: `import finetune` loads nothing else.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

__version__ = "0.2.0"
PUBLIC = {
    "inference.conversation": ("Chat",),
    "api": ("RunResult", "chat", "export_run", "load_recipe", "make_plan", "prepare", "train"),
    "session": ("Loss", "SampledAnswer", "Session", "Update"),
    "training.callbacks": ("Callback", "Event"),
    "data.batches": ("MicroBatch", "StepBatch"),
    "config.schema": ("Recipe",),
    "errors": ("Preempted", "UserError"),
}
__all__ = [name for names in PUBLIC.values() for name in names]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name in ("plan", "export"):  # which are called by the commands' names, too
        return import_module(f"finetune.{name}")
    home = next((home for home, names in PUBLIC.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'finetune' has no attribute {name!r}")
    return getattr(import_module(f"finetune.{home}"), name)


def make_callable(package: str, function: str) -> None:
    """Has a call of a package, as `finetune.plan(recipe)`, call the public function."""

    class CallablePackage(ModuleType):
        def __call__(self, *arguments: Any, **keys: Any) -> Any:
            return __getattr__(function)(*arguments, **keys)

    sys.modules[package].__class__ = CallablePackage
