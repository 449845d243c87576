"""Run on every rank: saves a tiny model on trial in a layout, and resumes it; prints what either allocates on rank 0.

gloo lets go of a finished collective's tensors a moment late, now and then: of several trial saves the smallest counts.

Arguments: the model's folder, and the layout.
"""

import sys
from pathlib import Path

from transformers import AutoTokenizer

from finetune.checkpoint.folders import step_folder
from finetune.checkpoint.manifest import Progress
from finetune.checkpoint.resume import load_checkpoint
from finetune.checkpoint.save import Saver
from finetune.config.layout import Sharding
from finetune.config.reader import read_recipe
from finetune.distributed.join import join, leave
from tests.checkpoint.tiny_run import build, train_step
from tests.plan.traced import allocated_peak

if __name__ == "__main__":
    folder, layout = sys.argv[1:]
    run = Path(folder).with_name("run")
    data = f"datasets=[{{path: {Path(folder) / 'config.json'}}}]"  # which is not read
    recipe = read_recipe(None, [f"model_name_or_path={folder}", f"output_dir={run}", data])
    world = join(Sharding(layout=layout, use_cpu=True))  # type: ignore[arg-type]
    model, optimizer = build(folder, lora=False, world=world)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with Saver(run, model, optimizer, world, recipe, tokenizer) as saver:
        trials = []
        for _ in range(8):
            trials.append(allocated_peak(lambda: saver.check_save(1)))
            optimizer.optimizer.state.clear()
        train_step(0, model, optimizer, world, saver)
        saver.save(Progress(step=1))
    optimizer.optimizer.state.clear()
    resumed = allocated_peak(lambda: load_checkpoint(step_folder(run, 1), model, optimizer, world))
    if world.is_main:
        print("save", min(trials), "resume", resumed)
    leave(world)
