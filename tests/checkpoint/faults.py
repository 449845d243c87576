"""What the soak does to files: damage to checkpoints, token caches and samples, edits of what a run is made from."""

import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.conftest import CHAT_TEMPLATE, make_chat, make_model
from tests.training.layouts import write_config

STEPS = 6
LAYOUTS = {"single": 1, "full_shard": 2, "ddp": 2, "hybrid": 4, "FULL_SHARD": 2, "shard_grad_op": 2}  # -> ranks


@dataclass(frozen=True, slots=True)
class Setup:
    """What a story's run is: its inputs below `root`, and how it is trained. Hashable: stories share a reference."""

    root: Path
    layout: str
    optim: str
    lora: bool
    streaming: bool
    asynchronous: bool
    limit: int | None
    exports: bool

    @property
    def ranks(self) -> int:
        return LAYOUTS[self.layout]

    @property
    def label(self) -> str:
        kinds = [name for name in ("lora", "streaming", "asynchronous", "exports") if getattr(self, name)]
        return " ".join([self.layout, self.optim, *kinds, f"limit={self.limit}"])

    @property
    def cache(self) -> Path:
        return self.root / "cache"

    @property
    def config(self) -> Path:
        return self.root / "accelerate.yaml"

    def recipe(self, name: str, limit: int | None) -> dict[str, Any]:
        """The recipe of the run `name`, keeping `limit` checkpoints."""
        return {
            "model_name_or_path": str(self.root / "model"),
            "chat_template": str(self.root / "template.jinja"),
            "datasets": [{"path": str(self.root / "chat.jsonl")}],
            "eval_datasets": [{"path": str(self.root / "held_out.jsonl")}],
            "exact_match_samples": 1,
            "dataset_cache_dir": str(self.cache),
            "streaming": self.streaming,
            "max_length": 64,
            "global_batch_size": 4,
            "max_steps": STEPS,
            "save_steps": 1,
            "save_total_limit": limit,
            "async_save": self.asynchronous,
            "learning_rate": 1e-2,
            "attention_dropout": 0.1,
            "logging_steps": 1,
            "optim": self.optim,
            "use_peft": self.lora,
            "export_at_end": self.exports,
            "timeout_seconds": 60,
            "output_dir": str(self.root / name),
        } | ({"lora_r": 4} if self.lora else {})


def make_inputs(setup: Setup) -> None:
    """The model, data, template and Accelerate file of a setup, and a copy of them all to restore from."""
    setup.root.mkdir(parents=True)
    make_model(setup.root / "model", num_hidden_layers=1, hidden_size=32, intermediate_size=32)
    make_model(setup.root / "other", num_hidden_layers=1, hidden_size=32, intermediate_size=32, seed=1)
    make_chat(setup.root / "chat.jsonl", rows=24)
    held_out = '{"messages": [{"role": "user", "content": "A\u2028B"}, {"role": "assistant", "content": "C"}]}\n'
    (setup.root / "held_out.jsonl").write_text(held_out, encoding="utf-8")
    (setup.root / "template.jinja").write_text(CHAT_TEMPLATE)
    made = write_config(setup.root, "full_shard", mesh=(2, 2)) if setup.layout == "hybrid" else None
    made = made or write_config(setup.root, setup.layout)
    made.rename(setup.config)
    content = yaml.safe_load(setup.config.read_text()) | {"use_cpu": True}
    setup.config.write_text(yaml.safe_dump(content))
    pristine = setup.root / "pristine"
    pristine.mkdir()
    for name in ("chat.jsonl", "template.jinja"):
        shutil.copy(setup.root / name, pristine / name)
    shutil.copytree(setup.root / "model", pristine / "model")


def phases(setup: Setup, name: str, newest: int, chance: random.Random) -> list[tuple[str, str]]:
    """Where the run `name`, which resumes from step `newest`, may be met: what it does, and what is seen then below the root."""
    saved = min(STEPS, newest + chance.choice((1, 1, 2)))
    checkpoints = f"{name}/checkpoints"
    found = [("checking that a save works", f"{checkpoints}/.staging-{0:08d}")]
    if newest < STEPS:
        found += [
            ("staging", f"{checkpoints}/.staging-{saved:08d}"),
            ("writing the manifest", f"{checkpoints}/.staging-{saved:08d}/manifest.json"),
            ("after publishing", f"{checkpoints}/step-{saved:08d}"),
        ]
    if newest < STEPS and setup.limit and newest >= setup.limit:
        found += [("pruning", f"{checkpoints}/.pruned-*")] * 2
    if setup.exports and saved == STEPS:
        found += [("exporting", f"{name}/*export*")] * 3
    if not setup.streaming and not list(setup.cache.glob("[0-9a-f]*")):
        found.append(("tokenizing", "cache/making-*"))
    return found


def edit(setup: Setup, kind: str) -> None:
    """Changes one input of the run."""
    if kind == "chat template":
        path = setup.root / "template.jinja"
        path.write_text(path.read_text().replace("<|end|>", "<|end|> "))
    elif kind == "tokenizer":
        path = setup.root / "model" / "tokenizer.json"
        text = path.read_text()
        assert '"e":' in text and '"t":' in text
        path.write_text(text.replace('"e":', '"\x00":').replace('"t":', '"e":').replace('"\x00":', '"t":'))
    elif kind == "LoRA base":
        shutil.copy(setup.root / "other" / "model.safetensors", setup.root / "model" / "model.safetensors")
    else:
        path = setup.root / "chat.jsonl"
        rows = path.read_text().splitlines(keepends=True)
        path.write_text("".join(reversed(rows)) if kind == "data order" else "".join(rows).replace("7", "8"))


def restore(setup: Setup) -> None:
    """Puts every input back as it was."""
    pristine = setup.root / "pristine"
    for name in ("chat.jsonl", "template.jinja"):
        shutil.copy(pristine / name, setup.root / name)
    for path in (pristine / "model").iterdir():
        shutil.copy(path, setup.root / "model" / path.name)


def damage_checkpoint(checkpoint: Path, chance: random.Random) -> str:
    """Damages one file of a checkpoint so that it no longer verifies; returns how."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.stat().st_size)
    return damage_file(chance.choice(files), chance)


def damage_file(path: Path, chance: random.Random) -> str:
    """Flips a bit of a file, cuts it, empties or removes it; returns which."""
    content = bytearray(path.read_bytes())
    kind = chance.choice(("bit flipped", "cut", "emptied", "removed") if content else ("removed",))
    if kind == "removed":
        path.unlink()
        return kind
    if kind == "bit flipped":
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    else:
        del content[chance.randrange(len(content)) if kind == "cut" else 0 :]
    path.write_bytes(content)
    return kind


def damage_samples(path: Path, chance: random.Random) -> str:
    """Leaves samples.jsonl as a kill in the middle of a line would."""
    if chance.random() < 0.5:
        path.write_bytes(path.read_bytes()[: -chance.randint(1, 20)])
        return "cut"
    with path.open("ab") as file:
        file.write('{"step": 3, "prompt": "A\u2028'.encode()[: chance.randint(1, 26)])
    return "half a line"
