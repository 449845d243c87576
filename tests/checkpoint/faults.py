"""What the soak does to files: damage to checkpoints, token caches and samples, edits of what a run is made from."""

import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from finetune.config.accelerate_file import read_sharding
from finetune.config.compatibility import find_problems
from finetune.config.facts import with_recipe_keys
from finetune.config.reader import read_recipe
from finetune.errors import UserError
from finetune.plan.architecture import find_local_facts
from tests.checkpoint.comparing import STEPS
from tests.conftest import CHAT_TEMPLATE, make_chat, make_model
from tests.ranks import ROOT
from tests.training.layouts import write_config

SHIPPED = ROOT / "recipes"
ROWS, HELD_OUT_ROWS = 160, 8  # of a quickstart's data
ROLLOUTS = "rollouts.jsonl"
# Layout -> (ranks, the Accelerate file's name, its mesh)
LAYOUTS: dict[str, tuple[int, str, dict[str, int]]] = {
    "single": (1, "single", {}),
    "full_shard": (2, "full_shard", {}),
    "ddp": (2, "ddp", {}),
    "hybrid": (4, "full_shard", {"dp_replicate_size": 2, "dp_shard_size": 2}),
    "FULL_SHARD": (2, "FULL_SHARD", {}),
    "shard_grad_op": (2, "shard_grad_op", {}),
    "tp": (2, "full_shard", {"tp_size": 2}),
    "sp": (2, "full_shard", {"cp_size": 2}),
    "ep": (2, "full_shard", {}),
}
LORA = {"use_peft": True, "lora_r": 4}
SAMPLED = {  # two updates on the same completions: every other checkpoint holds these
    "rewards": ["length"],
    "num_iterations": 2,
    "max_completion_length": 6,
    "log_completions": 2,
    "exact_match_samples": 0,
    "attention_dropout": 0.0,
    "eot_tokens": ["<|user|>", "<|system|>", "<|assistant|>", "<|begin|>"],
}
RECIPES: dict[
    str, dict[str, Any]
] = {  # ROOT stands for the setup's root, SCRATCH for a folder on a disk
    "full": {},
    "lora": LORA,
    "qlora": LORA | {"load_in_4bit": True},
    "dpo": {"method": "dpo"},  # a reference pass
    "dpo lora": {"method": "dpo"} | LORA,
    "kto": {"method": "kto"},
    "distill": {"method": "distill", "teacher_model_name_or_path": "ROOT/other"},
    "best": {"keep_best_checkpoint": True},
    "nvme": {"optim_offload": "nvme", "offload_dir": "SCRATCH"},
    "mixture": {},
    "orpo": {"method": "orpo"},
    "simpo": {"method": "simpo"},
    "distill top": {
        "method": "distill",
        "teacher_model_name_or_path": "ROOT/other",
        "distill_top_k": 4,
    },
    "grpo": SAMPLED | {"method": "grpo", "num_generations": 2, "beta": 0.1},
    "on-policy distill": SAMPLED
    | {"method": "on_policy_distill", "teacher_model_name_or_path": "ROOT/other"},
}
# The quickstarts as they are shipped, but for their lengths. Those that continue another one's export get a model of its shape.
QUICKSTARTS: dict[
    str, tuple[str, dict[str, Any]]
] = {  # name -> (whose model they take, what is changed in them)
    "quickstart": ("", {}),
    "quickstart_distill": ("quickstart", {"teacher_model_name_or_path": "ROOT/other"}),
    "quickstart_dpo": ("quickstart", {"model_name_or_path": "ROOT/model"}),
    "quickstart_grpo": ("quickstart", {"model_name_or_path": "ROOT/model"}),
    "quickstart_tools": ("quickstart_tools_sft", {"model_name_or_path": "ROOT/model"}),
    "quickstart_tools_sft": ("", {}),
    "quickstart_vision": ("", {}),
}
UNTOLD = (
    ("quickstart_vision", "tp"),
    ("quickstart_vision", "sp"),
)  # refused for what is known of the model once it is built
KINDS = (*RECIPES, *QUICKSTARTS)


@dataclass(frozen=True, slots=True)
class Setup:
    """What a story's run is: its inputs below `root`, and how it is trained. Hashable: stories share a reference."""

    root: Path
    scratch: Path
    layout: str
    kind: str  # of KINDS
    optim: str
    streaming: bool
    asynchronous: bool
    limit: int | None
    exports: bool

    @property
    def ranks(self) -> int:
        return LAYOUTS[self.layout][0]

    @property
    def label(self) -> str:
        kinds = [name for name in ("streaming", "asynchronous", "exports") if getattr(self, name)]
        return " ".join([self.layout, self.kind, self.optim, *kinds, f"limit={self.limit}"])

    @property
    def cache(self) -> Path:
        return self.root / "cache"

    @property
    def config(self) -> Path:
        return self.root / "accelerate.yaml"

    def arguments(self, name: str, limit: int | None) -> list[str]:
        """The command's, for the run `name`, keeping `limit` checkpoints. The recipe is written beside it."""
        keys = self._keys(name, limit)
        config = ["--config", str(self.config)]
        if self.kind in QUICKSTARTS:
            return [
                "--recipe",
                self.kind,
                *config,
                *(f"{key}={json.dumps(value)}" for key, value in keys.items()),
            ]
        path = self.root / f"{name.replace('/', '-')}.yaml"
        path.write_text(yaml.safe_dump(keys))
        return ["--recipe", str(path), *config]

    def _keys(self, name: str, limit: int | None) -> dict[str, Any]:
        """The recipe of the run `name`; of a quickstart what is changed in it."""
        keys = RECIPES[self.kind] if self.kind in RECIPES else QUICKSTARTS[self.kind][1]
        text = (
            json.dumps(keys).replace("ROOT", str(self.root)).replace("SCRATCH", str(self.scratch))
        )
        keys = json.loads(text)
        common = {
            "dataset_cache_dir": str(self.cache),
            "streaming": self.streaming,
            "max_steps": STEPS,
            "save_steps": 1,
            "save_total_limit": limit,
            "async_save": self.asynchronous,
            "logging_steps": 1,
            "optim": self.optim,
            "export_at_end": self.exports,
            "timeout_seconds": 150,
            "output_dir": str(self.root / name),
        }
        if self.kind in QUICKSTARTS:
            return common | {"sample_prompts": []} | _shorten(self.kind) | keys
        return (
            common
            | {
                "run_name": "soak",
                "model_name_or_path": str(self.root / "model"),
                "chat_template": str(self.root / "template.jinja"),
                "datasets": [{"path": str(self.root / "chat.jsonl")}],
                "eval_datasets": [{"path": str(self.root / "held_out.jsonl")}],
                "eval_steps": 2,
                "exact_match_samples": 1,
                "max_length": 64,
                "global_batch_size": 4,
                "learning_rate": 1e-2,
                "attention_dropout": 0.1,
            }
            | ({"expert_parallel_size": 2} if self.layout == "ep" else {})
            | keys
        )

    def is_possible(self) -> bool:
        """Whether the rulebook allows it; the setup's files are there."""
        if (self.kind in QUICKSTARTS and self.layout == "ep") or (self.kind, self.layout) in UNTOLD:
            return False  # none is a mixture
        _, recipe_file, _, _, *overrides = self.arguments("run", self.limit)
        try:
            recipe = read_recipe(recipe_file, overrides)
        except UserError:
            return False
        sharding = with_recipe_keys(read_sharding(str(self.config), None, {}), recipe)
        problems = find_problems(recipe, sharding, find_local_facts(recipe.model), self.ranks)
        return not any(not problem.is_note for problem in problems)


def make_inputs(setup: Setup) -> None:
    """The model, data, template and Accelerate file of a setup, and a copy of them all to restore from."""
    setup.root.mkdir(parents=True)
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32}
    if setup.kind == "mixture" or setup.layout == "ep":
        sizes |= {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    shape = QUICKSTARTS[setup.kind][0] if setup.kind in QUICKSTARTS else ""
    for seed, name in enumerate(MODELS):
        if shape:
            make_quickstart_model(setup.root / name, shape, seed)
        else:
            make_model(setup.root / name, seed=seed, **sizes)
    make_rows(setup.root / "chat.jsonl", setup.kind, 24)
    make_rows(setup.root / "held_out.jsonl", setup.kind, 2)
    (setup.root / "template.jinja").write_text(CHAT_TEMPLATE)
    _, layout, sizes = LAYOUTS[setup.layout]
    write_config(setup.root, layout, sizes=sizes or None).rename(setup.config)
    content = yaml.safe_load(setup.config.read_text()) | {"use_cpu": True}
    setup.config.write_text(yaml.safe_dump(content))
    pristine = setup.root / "pristine"
    pristine.mkdir()
    for name in FILES:
        shutil.copy(setup.root / name, pristine / name)
    for name in MODELS:
        shutil.copytree(setup.root / name, pristine / name)


FILES, MODELS = ("chat.jsonl", "held_out.jsonl", "template.jinja"), ("model", "other")


def make_quickstart_model(folder: Path, name: str, seed: int) -> None:
    """A model of a quickstart's shape with random weights, and its tokenizer: what it would have exported."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    recipe = yaml.safe_load((SHIPPED / f"{name}.yaml").read_text())
    torch.manual_seed(seed)
    config = AutoConfig.for_model(**recipe["model_config"])
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(SHIPPED / recipe["tokenizer_name_or_path"]).save_pretrained(
        folder
    )


def _shorten(name: str) -> dict[str, Any]:
    """The data sets of a quickstart, cut; so many of its held-out questions are answered."""
    recipe = yaml.safe_load((SHIPPED / f"{name}.yaml").read_text())
    changed: dict[str, Any] = {"exact_match_samples": 1} if "exact_match_samples" in recipe else {}
    for key, rows in (("datasets", ROWS), ("eval_datasets", HELD_OUT_ROWS)):
        entries = recipe.get(key, [])
        cut = [
            entry | {"path": str(SHIPPED / entry["path"]), "max_samples": rows} for entry in entries
        ]
        changed |= {key: cut} if cut else {}
    if "eval_datasets" in changed:
        changed["eval_steps"] = 3
    return changed


def make_rows(path: Path, kind: str, rows: int) -> None:
    """Conversations, or what the method of `kind` reads in their place; the last ends in a line separator of Unicode."""
    make_chat(path, rows=rows)
    conversations = [json.loads(line)["messages"] for line in path.read_text().splitlines()]
    conversations[-1][0]["content"] += "\u2028"
    made = []
    for number, (question, answer) in enumerate(conversations):
        wrong = answer | {"content": "No" + " idea" * (number % 3) + "."}
        if kind.startswith("dpo") or kind in ("orpo", "simpo"):
            made.append({"prompt": [question], "chosen": [answer], "rejected": [wrong]})
        elif kind == "kto":
            made.append(
                {
                    "prompt": [question],
                    "completion": [(answer, wrong)[number % 2]],
                    "label": number % 2 == 0,
                }
            )
        else:
            made.append({"messages": [question, answer]})
    path.write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in made), encoding="utf-8"
    )


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


def find_edits(setup: Setup) -> list[str]:
    """What of its inputs can be edited so that the run must not continue without a word."""
    edits = [
        "chat template",
        "tokenizer",
        "held-out data",
        "data order" if setup.streaming else "data",
    ]
    if setup.kind in QUICKSTARTS:  # whose files are the project's
        edits = []
    has_base = setup.kind in ("lora", "qlora", "dpo", "dpo lora", "kto", "grpo", "quickstart_dpo")
    has_teacher = setup.kind in (
        "distill",
        "distill top",
        "on-policy distill",
        "quickstart_distill",
    )
    return [*edits, *["base"] * has_base, *["teacher"] * has_teacher]


def edit(setup: Setup, kind: str) -> None:
    """Changes one input of the run."""
    if kind == "chat template":
        path = setup.root / "template.jinja"
        path.write_text(path.read_text().replace("<|end|>", "<|end|> "))
    elif kind == "tokenizer":
        path = setup.root / "model" / "tokenizer.json"
        text = path.read_text()
        assert '"e":' in text and '"t":' in text
        path.write_text(
            text.replace('"e":', '"\x00":').replace('"t":', '"e":').replace('"\x00":', '"t":')
        )
    elif kind in ("base", "teacher"):
        one, other = MODELS if kind == "base" else reversed(MODELS)
        shutil.copy(
            setup.root / other / "model.safetensors", setup.root / one / "model.safetensors"
        )
    else:
        path = setup.root / ("held_out.jsonl" if kind == "held-out data" else "chat.jsonl")
        rows = path.read_text(encoding="utf-8").split("\n")[:-1]
        rows = rows[::-1] if kind == "data order" else [row.replace("What", "Whet") for row in rows]
        path.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")


def restore(setup: Setup) -> None:
    """Puts every input back as it was."""
    for path in (setup.root / "pristine").rglob("*"):
        if path.is_file():
            shutil.copy(path, setup.root / path.relative_to(setup.root / "pristine"))


def damage_checkpoint(checkpoint: Path, others: list[Path], chance: random.Random) -> str:
    """Damages one file of a checkpoint so that it no longer verifies; returns how. `others`: checkpoints of the run."""
    rollouts = checkpoint / ROLLOUTS
    if rollouts.exists() and chance.random() < 0.5:
        return damage_rollouts(rollouts, [each / ROLLOUTS for each in others], chance)
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.stat().st_size)
    return damage_file(chance.choice(files), chance)


def damage_rollouts(path: Path, others: list[Path], chance: random.Random) -> str:
    """Edits a checkpoint's completions, or puts those of another step in their place; they can be read all the same."""
    swapped = [
        other for other in others if other.exists() and other.read_bytes() != path.read_bytes()
    ]
    if swapped and chance.random() < 0.5:
        shutil.copy(chance.choice(swapped), path)
        return "rollouts.jsonl swapped"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    line = chance.choice(lines)
    line["reward"] = 9.0
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return "rollouts.jsonl edited"


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


def damage_lines(path: Path, chance: random.Random) -> str:
    """Leaves samples.jsonl or metrics.jsonl as a kill in the middle of a line would, or with a line too many."""
    lines = path.read_bytes().splitlines(keepends=True)
    if path.name != "metrics.jsonl" and chance.random() < 0.5:
        path.write_bytes(b"".join(lines)[: -chance.randint(1, 20)])
        return "cut"
    where = chance.randint(0, len(lines)) if path.name == "metrics.jsonl" else len(lines)
    kind = chance.choice(("doubled", "junk")) if 0 < where < len(lines) else "half a line"
    half = b'{"step": 3, "prompt": "A'[: chance.randint(1, 24)]
    added = {"half a line": half, "doubled": b"".join(lines[:where][-1:]), "junk": b"\xff\n"}[kind]
    lines.insert(len(lines) if kind == "half a line" else where, added)
    path.write_bytes(b"".join(lines))
    return kind


def remove_line(path: Path, step: int, chance: random.Random) -> None:
    """Removes one of metrics.jsonl's training lines up to `step`."""
    lines = path.read_text().splitlines(keepends=True)
    victims = [
        line for line in lines if json.loads(line)["step"] <= step and "loss" in json.loads(line)
    ]
    lines.remove(chance.choice(victims))
    path.write_text("".join(lines))
