"""A recipe of the cookbook as it is, that leaves a line for each forward_backward and each optim_step which it has asked for.

`recorded_recipe.py FILE MODULE ARGUMENTS`
"""

import json
import runpy
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    import tinker

    log = Path(sys.argv[1])
    forward_backward = tinker.TrainingClient.forward_backward
    optim_step = tinker.TrainingClient.optim_step

    def note(**asked: Any) -> None:
        with log.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(asked) + "\n")

    def describe(datum: Any) -> dict[str, Any]:
        inputs = {name: each.tolist() for name, each in datum.loss_fn_inputs.items()}
        return {"tokens": datum.model_input.to_ints(), "inputs": inputs}

    def noted_pass(self: Any, data: Any, loss_fn: str, *more: Any, **options: Any) -> Any:
        note(loss=loss_fn, data=[describe(datum) for datum in data])
        return forward_backward(self, data, loss_fn, *more, **options)

    def noted_step(self: Any, *given: Any, **options: Any) -> Any:
        params = options.get("adam_params") or given[0]
        names = ("learning_rate", "beta1", "beta2", "eps")
        note(adam={name: getattr(params, name) for name in names})
        return optim_step(self, *given, **options)

    tinker.TrainingClient.forward_backward = noted_pass
    tinker.TrainingClient.optim_step = noted_step
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
