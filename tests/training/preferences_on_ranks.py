"""Runs on freshly forked ranks: `preferences_on_ranks.py STARTS.json`.

STARTS.json: a list of {ranks, log, killed_after, stopped_at, signal, runs}; runs: a list of [recipe, config, overrides], which one
set of ranks walks. `killed_after`: all ranks are killed once this step has been saved; null: they are not. `stopped_at`: the last
rank gets `signal` in this batch of the reference's pass, with SIGKILL every rank, and each batch before it has been kept; 0: in
none. Prints the exit codes of each start.
"""

import json
import os
import signal
import sys
from pathlib import Path
from threading import Event
from typing import Any

from finetune.checkpoint.manifest import Progress
from finetune.checkpoint.save import Saver
from finetune.config.accelerate_file import read_sharding
from finetune.config.reader import read_recipe
from finetune.run import fine_tune
from finetune.training import reference, watch
from tests.forked_ranks import fork_ranks, import_all, wait


def start(given: dict[str, Any]) -> list[int]:
    """Trains every run on one set of ranks; the exit code of each rank."""

    def train(_rank: int) -> None:
        if given["killed_after"] is not None:
            kill_after(given["killed_after"])
        if given["stopped_at"] is not None:
            stop_at(given["stopped_at"], signal.Signals(given["signal"]))
        launched = dict(os.environ)
        for number, (recipe, config, overrides) in enumerate(given["runs"]):
            os.environ.clear()
            os.environ |= launched | {"MASTER_PORT": str(int(launched["MASTER_PORT"]) + number)}
            fine_tune(read_recipe(recipe, overrides), read_sharding(config, None, os.environ))

    return wait(fork_ranks(train, given["ranks"], Path(given["log"])), seconds=200)


def kill_after(step: int) -> None:
    """Kills this rank once it has saved `step`."""
    save = Saver.save

    def save_and_die(self: Saver, progress: Progress) -> None:
        save(self, progress)
        if progress.step == step:
            self.finish()
            os.kill(os.getpid(), signal.SIGKILL)

    Saver.save = save_and_die  # type: ignore[method-assign]


def stop_at(batch: int, sent: signal.Signals) -> None:
    """Writes a line for each batch of the reference's pass; the last rank is sent a signal in the one with this number, from 1."""
    heard, calls, compute = Event(), [0], reference.sum_log_probabilities
    on_signal = watch.SignalListener._on_signal

    def hear(self: watch.SignalListener, number: int) -> None:
        on_signal(self, number)
        heard.set()

    def count(*arguments: Any) -> Any:
        calls[0] += 1
        if os.environ["RANK"] == "0":
            os.write(1, b"batch of the reference\n")  # in one piece: the ranks write into one file
        if calls[0] == batch and (
            sent == signal.SIGKILL or int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
        ):
            os.kill(os.getpid(), sent)
            assert heard.wait(60)
        return compute(*arguments)

    reference.SAVE_SECONDS = 0.0 if sent == signal.SIGKILL else reference.SAVE_SECONDS
    watch.SignalListener._on_signal = hear  # type: ignore[method-assign]
    reference.sum_log_probabilities = count


if __name__ == "__main__":
    import_all()

    for each in json.loads(Path(sys.argv[1]).read_text()):
        print(json.dumps(start(each)), flush=True)
