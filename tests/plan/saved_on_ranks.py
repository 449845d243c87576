"""Run on every rank: takes the state of a tiny model in a layout as a save does; prints what it allocates on rank 0.

Arguments: the model's folder, and the layout.
"""

import sys

from finetune.checkpoint.shards import get_model_state, get_optimizer_state
from finetune.config.layout import Sharding
from finetune.distributed.join import join, leave
from tests.checkpoint.tiny_run import build, train_step
from tests.plan.traced import allocated_peak

if __name__ == "__main__":
    world = join(Sharding(layout=sys.argv[2], use_cpu=True))  # type: ignore[arg-type]
    model, optimizer = build(sys.argv[1], lora=False, world=world)
    train_step(0, model, optimizer, world)
    states = []

    def save() -> None:
        states.append(get_model_state(model))
        states.append(get_optimizer_state(model, optimizer.optimizer))

    peak = allocated_peak(save)
    if world.is_main:
        print("allocated", peak)
    leave(world)
