"""A state.json for checkpoints that tests write without a model."""

import json


def state_of(step: int) -> bytes:
    """The least that a state.json says."""
    progress = {"step": step, "epoch": 0.5, "tokens": 10, "trained_tokens": 5, "skipped_steps": 0}
    best = {"best_eval_loss": None, "best_step": None, "evaluations_since_best": 0, "scaler": None}
    return json.dumps(progress | best | {"recipe": {}, "global_batch_size": 4}).encode()
