"""What a save costs: the stall of the loop, synchronous and async, against the disk's own rate for
as many bytes.

    python benchmarks/checkpoint.py [--megabytes 200] [--rounds 9] [--folder DIR]

One process, FSDP2 in a world of one. In every round `dd conv=fdatasync`, a synchronous save and an
async save take turns, so that all meet the same machine; the medians are compared. A step is
trained after each save. A stall is the time in `Saver.save` and, at the step's update, in
`Saver.before_update`.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch  # noqa: E402
import yaml  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: E402

from finetune.checkpoint import folders  # noqa: E402
from finetune.checkpoint.manifest import Progress  # noqa: E402
from finetune.checkpoint.save import Saver  # noqa: E402
from finetune.config.layout import Sharding  # noqa: E402
from finetune.config.reader import read_recipe  # noqa: E402
from finetune.distributed.join import join, leave  # noqa: E402
from finetune.distributed.parallelize import parallelize  # noqa: E402
from finetune.distributed.world import World  # noqa: E402

TOKENS = 128  # in a step
COPIES = 3  # of each parameter in the state: the weight and Adam's two moments, all fp32


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", type=Path, default=Path())
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="benchmark-checkpoint-", dir=options.folder))
    try:
        print(json.dumps(measure(root, options.megabytes, options.rounds), indent=1))
    finally:
        shutil.rmtree(root)


def measure(root: Path, megabytes: int, rounds: int) -> dict[str, Any]:
    """Seconds of each kind of save, and what follows from them."""
    world = join(Sharding(layout="fsdp2", use_cpu=True))
    model, optimizer = build(megabytes * 1_000_000 // (COPIES * 4), world)
    recipe_file = root / "recipe.yaml"
    seconds: dict[str, list[float]] = defaultdict(list)
    recipe_file.write_text(
        yaml.safe_dump(
            {
                "model_name_or_path": "none",
                "datasets": [{"path": str(recipe_file)}],
                "output_dir": str(root),
            }
        )
    )
    savers = {
        kind: Saver(
            root,
            model,
            optimizer,
            world,
            read_recipe(str(recipe_file), [f"async_save={kind}"]),
            tokenizer(),
        )
        for kind in ("false", "true")
    }
    size = savers["false"].check_save(steps=1)
    train_step(model, optimizer, savers["true"])
    savers["true"].save(Progress(step=1))  # the first one allocates what the others reuse
    savers["true"].finish()
    for step in range(2, 2 + 2 * rounds, 2):
        seconds["dd"].append(timed(lambda: dd(root, size)))
        for saver in savers.values():
            stall = timed(
                lambda saver=saver, step=step: saver.save(Progress(step=step + saver.is_async))
            )
            stall += train_step(model, optimizer, saver)
            seconds["async stall" if saver.is_async else "sync"].append(stall)
            saver.finish()
    assert folders.find_newest_valid(root) == folders.step_folder(root, 1 + 2 * rounds)
    leave(world)
    middle = {kind: median(values) for kind, values in seconds.items()}
    return {
        "state_bytes": size,
        "rounds": rounds,
        "median_seconds": {kind: round(value, 4) for kind, value in middle.items()},
        "sync_rate_of_dd": round(middle["dd"] / middle["sync"], 3),
        "async_stall_of_sync": round(middle["async stall"] / middle["sync"], 3),
        "sync_bytes_per_second": round(size / middle["sync"]),
        "dd_bytes_per_second": round(size / middle["dd"]),
    }


def build(parameters: int, world: World) -> tuple[Any, Any]:
    """A Llama of about so many parameters in the world's layout."""
    width = 512
    vocabulary = 8192
    layers = max(1, round((parameters - 2 * width * vocabulary) / (12 * width * width)))
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=8,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    model = parallelize(model, lambda name, slices: torch.randn(shapes[name])[slices], world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return model, optimizer


def train_step(model: Any, optimizer: Any, saver: Saver) -> float:
    """A step. Returns how many seconds its update waited for a save."""
    ids = torch.arange(TOKENS)[None]
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    waited = timed(saver.before_update)
    optimizer.step()
    optimizer.zero_grad()
    return waited


def tokenizer() -> PreTrainedTokenizerFast:
    """The smallest there is: what is measured is the state."""
    from tokenizers import Tokenizer, models

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))


def dd(root: Path, size: int) -> None:
    """As many bytes as a checkpoint has, as fast as the disk takes them."""
    blocks = round(size / 2**20)
    output = f"of={root / 'dd'}"
    subprocess.run(
        ["dd", "if=/dev/zero", output, "bs=1M", f"count={blocks}", "conv=fdatasync"],
        check=True,
        capture_output=True,
    )
    (root / "dd").unlink()


def timed(action: Callable[[], object]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
