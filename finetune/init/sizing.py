"""How a first recipe fits its GPUs: all parameters or adapters, rows in a micro-batch, and what else the plan advises. No torch."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from finetune.config.accelerate_file import read_sharding
from finetune.config.reader import read_recipe, to_dict
from finetune.errors import UserError
from finetune.plan.advice import Advice, advise
from finetune.plan.plan import Plan, make_plan
from finetune.units import counted, read_size

Trained = Literal["full", "lora", "qlora"]
Keys = dict[str, Any]
FULL: Keys = {"learning_rate": 1e-5}
LORA: Keys = {"use_peft": True, "lora_r": 16, "lora_alpha": 32, "learning_rate": 2e-4}
QLORA: Keys = LORA | {"load_in_4bit": True}
COMPARING = ("dpo", "simpo", "orpo", "kto")  # methods that move a trained model a little: a fortieth of the rate
ACCELERATE_CONFIG = "fsdp_full_shard_auto"  # every family, any number of GPUs
GLOBAL_BATCH_SIZE = 32  # at most
STEPS_AN_EPOCH = 20  # at least, where the data allows it
ROWS_TRIED = (8, 4, 2)  # of a micro-batch: more rows are faster, where they fit


@dataclass(frozen=True, slots=True)
class Hardware:
    """What the run will have. `memory`: of each GPU, or of the machine where there is none."""

    gpus: int
    memory: str  # as it is written: 80GiB

    @property
    def memory_bytes(self) -> int:
        return read_size(self.memory)

    @property
    def ranks(self) -> int:
        return max(1, self.gpus)

    @property
    def words(self) -> str:
        return f"{counted(self.gpus, 'GPU')} of {self.memory}" if self.gpus else "the CPU"


@dataclass(frozen=True, slots=True)
class Fit:
    """A recipe that fits. Returned by `fit_recipe`."""

    keys: Keys  # the given ones, and those that make it fit
    trained: Trained
    plan: Plan
    changes: tuple[tuple[str, str], ...]  # key=value and its cost, which the plan advised


def fit_recipe(given: Keys, packed_rows: float, hardware: Hardware, trained: Trained | None) -> Fit:
    """The keys that train `given` (model, data, max_length, method) on `hardware`: what `trained` says, else all parameters where
    that fits as it is, else LoRA. `packed_rows`: full rows of max_length tokens in the data.

    Raises `UserError` where nothing makes it fit.
    """
    base = given | {"accelerate_config": ACCELERATE_CONFIG, **_choose_batch(packed_rows, hardware)}
    known: dict[Trained, Keys] = {"full": base | FULL, "lora": base | LORA, "qlora": base | QLORA}
    candidates = [(name, keys) for name, keys in known.items() if name == trained or (not trained and name != "qlora")]
    if given.get("method") in COMPARING:
        candidates = [(name, keys | {"learning_rate": keys["learning_rate"] / 40}) for name, keys in candidates]
    for chosen, keys in candidates:
        plan, advice = _plan(keys, hardware)
        if advice.fits:
            return _widen(keys, chosen, plan, hardware)
    chosen, keys = candidates[-1]
    if advice.changes is None or (
        chosen == "full" and any("use_peft=true" in change.text.split() for change in advice.changes)
    ):
        enough = f"; {advice.ranks} of them would be enough" if advice.ranks else ""
        lora = "; --method lora trains adapters, which need less" if trained == "full" else ""
        raise UserError(
            f"{given['model_name_or_path']}: does not fit {hardware.words}, whatever is changed{enough}{lora}"
        )
    overrides = [text for change in advice.changes for text in change.text.split()]  # key=value each
    plan, after = _plan(keys, hardware, overrides)
    assert after.fits, "the plan fits with the changes that it advises"
    names = {text.partition("=")[0] for text in overrides}
    changed = keys | {key: value for key, value in to_dict(plan.spec.recipe).items() if key in names}
    return Fit(changed, chosen, plan, tuple((change.text, change.cost) for change in advice.changes))


def _choose_batch(packed_rows: float, hardware: Hardware) -> Keys:
    """The rows in a step: so few that an epoch has some steps, and a multiple of the ranks, so that none gets a filler row."""
    size = min(GLOBAL_BATCH_SIZE, max(1, int(packed_rows) // STEPS_AN_EPOCH))
    return {"global_batch_size": -(-size // hardware.ranks) * hardware.ranks, "per_device_train_batch_size": 1}


def _widen(keys: Keys, trained: Trained, plan: Plan, hardware: Hardware) -> Fit:
    """The same with more rows in a micro-batch, where they fit."""
    for rows in ROWS_TRIED:
        if keys["global_batch_size"] % (rows * hardware.ranks):
            continue
        wider = keys | {"per_device_train_batch_size": rows}
        wider_plan, advice = _plan(wider, hardware)
        if advice.fits:
            return Fit(wider, trained, wider_plan, ())
    return Fit(keys, trained, plan, ())


def _plan(keys: Keys, hardware: Hardware, overrides: Sequence[str] = ()) -> tuple[Plan, Advice]:
    recipe = read_recipe(None, [*(f"{key}={json.dumps(value)}" for key, value in keys.items()), *overrides])
    sharding = read_sharding(None, recipe.run.accelerate_config, {"WORLD_SIZE": str(hardware.ranks)})
    plan = make_plan(recipe, sharding, hardware.ranks)
    return plan, advise(plan.spec, hardware.memory_bytes, in_recipe=True)
