"""Operations of a service on the ranks of a layout: two adapters in turn, in one pass on several ranks in the second step, a restart, a
sample; rank 0 leaves what came of it.

`operations_on_ranks.py FOLDER LAYOUT.yaml MODEL`
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import finetune
from finetune.errors import exit_code
from finetune.service.operations import Operations
from tests.ranks import open_stores
from tests.service.served import datum, recipe

DATA = [datum([1, 403, 407, 261, 378, 383][: 3 + n % 4], weights=0.5 + n) for n in range(5)]
# two datums with several targets for a token, beside those with one
DATA[1]["inputs"] = {"target_tokens": [[5, 9], [7, 7], [8, 1]], "weights": [[1.0, 0.5]] * 3}
DATA[4]["inputs"] = {"target_tokens": [[5, 9, 12]] * 2, "weights": [[0.25, 0.5, 1.0]] * 2}
FORMS = [{"rank": 4, "seed": 1}, {"rank": 8, "seed": 2, "train_mlp": False}]
PARAMS = {
    "learning_rate": 1e-3,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-6,
    "weight_decay": 0.01,
    "grad_clip_norm": 1.0,
}


def main() -> None:
    folder, layout, model = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    open_stores()
    found: list[Any] = []
    with finetune.Session(recipe(folder / "run", model), layout) as session:
        operations = Operations(session, folder / "states")
        for number, form in enumerate(FORMS):
            own = {"model": str(number), "state": None, "form": form, "target": f"{number}/0"}
            operations.run("create", own)
        for step in range(3):
            if step == 2:  # as after a restart
                operations = Operations(session, folder / "states")
            how = {"loss": "cross_entropy", "options": {}}
            every = [
                {"model": str(number), "state": f"{number}/{step}", "form": form}
                for number, form in enumerate(FORMS)
            ]
            for data in ([DATA, DATA[1:]], [DATA[:1], DATA[:1]]):
                parts = [own | {"data": of_it} for own, of_it in zip(every, data, strict=True)]
                if step == 1 and session.world.size > 1:
                    passed = operations.run("forward_backward_together", {"parts": parts} | how)
                    found += passed["answers"]
                else:
                    found += [operations.run("forward_backward", part | how) for part in parts]
            for number, own in enumerate(every):
                found.append(
                    operations.run(
                        "optim_step", own | {"target": f"{number}/{step + 1}", "params": PARAMS}
                    )
                )
        asked = [
            {"prompt": [1, 403, n], "samples": 1, "max_tokens": 6, "seed": n}
            | {"scores_prompt": True, "top_prompt": n}
            for n in range(3)
        ]
        own = {
            "state": "1/3",
            "form": FORMS[1],
            "requests": asked,
            "temperature": 1.0,
            "stop_ids": None,
        }
        answer = operations.run("sample", own)
        found.append(answer | {"sampled": [each.as_json() for each in answer["sampled"]]})
        try:
            operations.run(
                "optim_step",
                {"model": "2", "state": "1/3", "form": FORMS[1], "target": "2/1", "params": PARAMS},
            )
        except finetune.UserError as error:
            found.append(str(error))
    if os.environ["RANK"] == "0":
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    sys.exit(exit_code(main))
