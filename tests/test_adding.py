"""CONTRIBUTING's "To add" is true: one of each kind is added to a copy of the package by touching only the files named there."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.ranks import ROOT, run_command

# A row of the page -> the files that are touched: after which text, what is put.
ADDED = {
    "an optimizer": {
        "config/optimization.py": (
            "OPTIMIZERS: Mapping[str, OptimizerFacts] = {\n",
            '    "plain_sgd": OptimizerFacts(count_state=lambda shape, itemsize: 0, update_copies=1, reads_betas=False),\n',
        ),
        "optim/optimizers.py": (
            "CONSTRUCTORS: Mapping[str, Callable[[Groups, Optimization], torch.optim.Optimizer]] = {\n",
            '    "plain_sgd": lambda groups, keys: torch.optim.SGD(groups, lr=keys.learning_rate),\n',
        ),
    },
    "a data format": {
        "config/schema.py": (
            "FORMATS: Mapping[str, FormatFacts] = {\n",
            '    "riddle": FormatFacts("riddles with their answers", columns=(("riddle", "solved"),)),\n',
        ),
        "data/formats.py": (
            "PARSERS: dict[str, Callable[[Columns, DatasetSource], Document]] = {\n",
            '    "riddle": lambda columns, source: Completion(columns.take_text("riddle"), columns.take_text("solved")),\n',
        ),
    },
    "a learning-rate schedule": {
        "config/schedules.py": (
            "SCHEDULES: Mapping[str, ScheduleFacts] = {\n",
            '    "halves": ScheduleFacts(share_left=lambda step, schedule: 0.5**step),\n',
        )
    },
    "a method of training": {
        "config/methods.py": (
            "METHODS: Mapping[str, MethodFacts] = {\n",
            '    "contrast": MethodFacts(says="learns from pairs", rows="pairs", keys=("beta",)),\n',
        ),
        "training/objectives/preference.py": (
            "WITHOUT_REFERENCE: Mapping[str, PairedLoss] = {\n",
            '    "contrast": (lambda averages, keys: (-keys.beta * averages.margin, {}), 0.0),\n',
        ),
    },
    "a rule about what works together": {
        "config/recipe_rules.py": (
            "RULES: tuple[Rule, ...] = (\n",
            '    Rule(name="seven", keys=("seed",), when=lambda c: c["seed"] == 7, message="seed: {seed} is unlucky"),\n',
        )
    },
    "what is known of a family of models": {
        "config/families.py": (
            "\nFAMILIES: Mapping[str, Family] = {\n",
            '    "helium": Family(tensor_parallel="heads", defaults=SIZES_7B),\n',
        )
    },
}
PAIRS = [{"prompt": f"{n} + {n} = ", "chosen": str(2 * n), "rejected": str(n)} for n in range(12)]
HELIUM = {"model_type": "helium", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 96}


def test_one_of_each_kind_is_added_by_the_files_that_the_page_names(
    tmp_path: Path, tiny_recipe: Callable[..., Path]
) -> None:
    copy, page = tmp_path / "project", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for folder in ("finetune", "accelerate_configs", "recipes"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for what, touched in ADDED.items():
        row = next(line for line in page.splitlines() if line.startswith(f"| {what} |"))
        for name, (after, put) in touched.items():
            file = copy / "finetune" / name
            text = file.read_text(encoding="utf-8")
            assert file.name in row and text.count(after) == 1, name
            file.write_text(text.replace(after, after + put), encoding="utf-8")
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    added = {
        "optim": "plain_sgd",
        "lr_scheduler_type": "halves",
        "method": "contrast",
        "datasets": [{"path": str(pairs)}],
    }
    recipe = str(tiny_recipe(**added, warmup_steps=0))
    run = [str(copy / "finetune" / "run.py"), "--config", "single", "--recipe", recipe]

    trained = run_command(["python", *run, "logging_steps=1"])
    assert trained.returncode == 0, trained.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["learning_rate"] for line in lines if "learning_rate" in line] == [1e-3 * 0.5**n for n in range(4)]
    assert all("rewards/margins" in line for line in lines if "learning_rate" in line)
    riddles = f'datasets=[{{"path": "{pairs}", "type": "riddle"}}]'
    refused = run_command(["python", *run, "seed=7", riddles])
    assert refused.returncode == 2 and "seed: 7 is unlucky" in refused.stderr
    reads = "from finetune.data.formats import DatasetSource, parse_row as p; print(p({'riddle': 'A', 'solved': 'B'}, DatasetSource(path='')))"
    parsed = run_command(["python", "-c", reads], cwd=copy)
    assert "Completion(prompt='A', completion='B')" in parsed.stdout and "'riddle'" in parsed.stdout, parsed.stderr
    known = "from finetune.data.formats import DatasetSource, parse_row as p; p({'nothing': 1}, DatasetSource(path=''))"
    assert "known formats: riddle + solved, messages" in run_command(["python", "-c", known], cwd=copy).stderr
    layout = ["--config", "fsdp_tensor_parallel", "--num-processes", "8"]
    plan = ["plan", "--recipe", recipe, *layout, "model_name_or_path=null", "tokenizer_name_or_path=T"]
    planned = run_command(["python", "-m", "finetune", *plan, f"model_config={json.dumps(HELIUM)}"], cwd=copy)
    assert planned.returncode == 0 and "GiB" in planned.stdout, planned.stderr
