"""CONTRIBUTING's "To add" is true: one of each kind is added to a copy of the package by touching only the files named there."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification

from tests.ranks import ROOT, run_command

# A row of the page -> the files that are touched: after which text, what is put.
ADDED = {
    "an optimizer": {
        "config/optimization.py": (
            "OPTIMIZERS: Mapping[str, OptimizerFacts] = {\n",
            '    "plain_sgd": OptimizerFacts(count_state=lambda shape, itemsize: 0, update_copies=1, reads_betas=False),\n',
        ),
        "optim/optimizers.py": (
            "CONSTRUCTORS: Mapping[str, Callable[[Groups, Optimization], Optimizer]] = {\n",
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
    "a kind of head": {
        "config/methods.py": (
            "ROWS: Mapping[RowKind, RowFacts] = {\n",
            '    "amounts": RowFacts(head="scores", label="number", averaged_over="text"),\n',
        ),
        "data/groups.py": (
            "READERS: Mapping[RowKind, Callable[[Row, DatasetSource, Data], ParsedRow]] = {\n",
            """    "amounts": lambda row, source, data: ParsedRow(
        (Group((Text(row["text"]),), labels=(label_of_number(row["amount"]),)),), "text", ()
    ),
""",
        ),
        "training/objectives/scores.py": (
            "SCORING: Mapping[RowKind, Callable[[Recipe, ProcessGroup | None], Objective]] = {\n",
            '    "amounts": lambda recipe, group: AmountScores(group),\n',
        ),
    },
    "a rule about what works together": {
        "config/recipe_rules.py": (
            "RULES: tuple[Rule, ...] = (\n",
            '    make_rule("seven", "seed", when=lambda c: c["seed"] == 7, message="seed: {seed} is unlucky"),\n',
        )
    },
    "what is known of a family of models": {
        "config/families.py": (
            "\nFAMILIES: Mapping[str, Family] = {\n",
            '    "helium": Family(tensor_parallel="heads", defaults=SIZES_7B),\n',
        )
    },
}
# An export format has a file of its own beside its row: config/export_formats.py and export/formats/ are named on the page.
ROW = (
    "EXPORT_FORMATS: Mapping[str, ExportFormat] = {\n",
    """    "names": ExportFormat(
        title="NAMES", plan="finetune.export.formats.names_export:plan_names", suffix=".names",
        keys=(
            ExportKey(name="first_names", flag="--first-names", metavar="N", help="how many", default=2, read=int),
        ),
        without="no names are written",
        check=lambda keys, is_model: refuse_unknown("--first-names", (str(keys["first_names"]),), ("1", "2")),
        refuses=lambda case: case.model.experts, refused="{name} is a mixture",
        card="```sh\\ncat FILE.names\\n```",
        use=lambda file, is_adapter: {"cat": f"cat {file}"},
        server="reader", start=lambda folder, file, port: ["cat", str(file)],
    ),
""",
)
PLANNER = """
class Plan:
    byte_count = 1000

    def __init__(self, names):
        self.names = names

    def write(self, folder, logits):
        (folder / "model.names").write_text("\\n".join(self.names))
        return [f"model.names: {len(self.names)} names"]


def plan_names(source, target, weights, options, title, log):
    return Plan([value.name for value in weights.values][: options["first_names"]])
"""
# The method of the kind of head, and its loss; both stand in files that the page names for it.
MORE = {
    "config/methods.py": (
        "METHODS: Mapping[str, MethodFacts] = {\n",
        '    "regress": MethodFacts(says="learns numbers", rows="amounts", defaults={"overlength": "drop"}),\n',
    ),
    "training/objectives/scores.py": (
        "SCORING: Mapping",
        """@dataclass(frozen=True, slots=True)
class AmountScores(Objective):
    sequence_group: ProcessGroup | None

    def measure(self, model, micro_batch, inputs, batch):
        micro_batch = micro_batch.with_documents()
        scores = score_documents(model, micro_batch, inputs, self.sequence_group)[:, 0]
        numbers = read_numbers(find_labels(micro_batch, self.sequence_group))
        return make_measured(((scores - numbers) ** 2).sum(), {}, self.sequence_group)


""",
    ),
    "data/groups.py": ("    parse_row,\n", "    label_of_number,\n"),
}
PAIRS = [{"prompt": f"{n} + {n} = ", "chosen": str(2 * n), "rejected": str(n)} for n in range(12)]
HELIUM = {"model_type": "helium", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 96}


def add_one_of_each(copy: Path) -> None:
    """Copies the project, and writes each row into the files that the page names for it."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for folder in ("finetune", "accelerate_configs", "recipes"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for what, touched in ADDED.items():
        row = next(line for line in page.splitlines() if line.startswith(f"| {what} |"))
        for name, (after, put) in touched.items():
            file = copy / "finetune" / name
            text = file.read_text(encoding="utf-8")
            assert file.name in row and text.count(after) == 1, name
            file.write_text(text.replace(after, after + put), encoding="utf-8")
    for name, (beside, put) in MORE.items():
        file = copy / "finetune" / name
        text = file.read_text(encoding="utf-8")
        assert text.count(beside) == 1, name
        if name.startswith("training"):
            file.write_text(text.replace(beside, put + beside), encoding="utf-8")
        else:
            file.write_text(text.replace(beside, beside + put), encoding="utf-8")


def test_the_page_names_the_files_that_one_of_each_kind_touches(tmp_path: Path) -> None:
    add_one_of_each(tmp_path / "project")


def test_one_of_each_kind_uses_names_that_its_files_know(tmp_path: Path) -> None:
    add_one_of_each(tmp_path)
    looked = run_command(["ruff", "check", "--isolated", "--select", "F821", str(tmp_path)])
    assert looked.returncode == 0, looked.stdout


@pytest.mark.slow
def test_one_of_each_kind_works(tmp_path: Path, tiny_recipe: Callable[..., Path]) -> None:
    copy = tmp_path / "project"
    add_one_of_each(copy)
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
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["learning_rate"] for line in lines if "learning_rate" in line] == [
        1e-3 * 0.5**n for n in range(4)
    ]
    assert all("rewards/margins" in line for line in lines if "learning_rate" in line)
    riddles = f'datasets=[{{"path": "{pairs}", "type": "riddle"}}]'
    refused = run_command(["python", *run, "seed=7", riddles])
    assert_a_kind_of_head(run, tmp_path)
    assert refused.returncode == 2 and "seed: 7 is unlucky" in refused.stderr
    reads = "from finetune.data.formats import DatasetSource, parse_row as p; print(p({'riddle': 'A', 'solved': 'B'}, DatasetSource(path='')))"
    parsed = run_command(["python", "-c", reads], cwd=copy)
    assert (
        "Completion(prompt='A', completion='B')" in parsed.stdout and "'riddle'" in parsed.stdout
    ), parsed.stderr
    known = "from finetune.data.formats import DatasetSource, parse_row as p; p({'nothing': 1}, DatasetSource(path=''))"
    assert (
        "known formats: riddle + solved, messages"
        in run_command(["python", "-c", known], cwd=copy).stderr
    )
    layout = ["--config", "fsdp_tensor_parallel", "--num-processes", "8"]
    plan = [
        "plan",
        "--recipe",
        recipe,
        *layout,
        "model_name_or_path=null",
        "tokenizer_name_or_path=T",
    ]
    planned = run_command(
        ["python", "-m", "finetune", *plan, f"model_config={json.dumps(HELIUM)}"], cwd=copy
    )
    assert planned.returncode == 0 and "GiB" in planned.stdout, planned.stderr


def assert_a_kind_of_head(run: list[str], folder: Path) -> None:
    """It trains, and transformers opens what it exports."""
    numbers = folder / "numbers.jsonl"
    rows = [{"text": f"It is {n}.", "amount": n / 8} for n in range(12)]
    numbers.write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = folder / "regress"
    data = f'datasets=[{{"path": "{numbers}"}}]'
    keys = ["method=regress", "export_at_end=true", f"output_dir={output}", data]
    trained = run_command(["python", *run, *keys, "logging_steps=1"])
    assert trained.returncode == 0, trained.stderr
    config = json.loads((output / "export" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert list(config["id2label"].values()) == ["regress"]
    opened = AutoModelForSequenceClassification.from_pretrained(output / "export")
    assert opened.num_labels == 1


@pytest.mark.slow
def test_an_export_format_is_added_by_its_row_and_its_file(
    tmp_path: Path, tiny_llama: Callable[..., Path]
) -> None:
    """Its key is an argument of the public function and an option of the command; card, rules and servers know it."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    row = next(line for line in page.splitlines() if line.startswith("| an export format |"))
    assert "`config/export_formats.py`" in row and "`export/formats/`" in row
    copy = tmp_path / "project"
    for folder in ("finetune", "accelerate_configs", "recipes"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    rows = copy / "finetune" / "config" / "export_formats.py"
    text = rows.read_text(encoding="utf-8")
    assert text.count(ROW[0]) == 1
    rows.write_text(text.replace(ROW[0], "".join(ROW)), encoding="utf-8")
    (copy / "finetune" / "export" / "formats" / "names_export.py").write_text(
        PLANNER, encoding="utf-8"
    )
    model = str(tiny_llama())

    def run(*command: str) -> tuple[int, str]:
        done = run_command(
            ["python", *command], cwd=copy, env={"PYTHONPATH": str(copy)}, timeout=300
        )
        return done.returncode, done.stdout + done.stderr

    out = tmp_path / "out"
    asked = "import finetune; finetune.export_run({!r}, {!r}, formats=['safetensors', 'names'], first_names={!r})"
    code, said = run("-c", asked.format(model, str(out), 1))
    assert code == 0, said
    assert (out / "model.names").read_text() == "model.embed_tokens.weight"
    assert (out / "model.safetensors").is_file() and "cat FILE.names" in (
        out / "README.md"
    ).read_text()
    assert f"cat {out}/model.names" in said and f"{out}/model.names: 1 names" in said
    code, said = run("-c", asked.format(model, str(tmp_path / "three"), 3))
    assert code != 0 and "--first-names: 3: one or more of 1, 2 are expected" in said

    command = [
        "-m",
        "finetune",
        "export",
        model,
        "--output",
        str(tmp_path / "two"),
        "--first-names",
        "2",
    ]
    code, said = run(*command)
    assert code == 2 and "--first-names: no names are written; add --format names" in said
    code, said = run(*command, "--format", "names")
    assert code == 0 and len((tmp_path / "two" / "model.names").read_text().splitlines()) == 2, said
    assert run(*command, "--format", "names", "--overwrite")[0] == 0, (
        "the folder is known as an export by its suffix"
    )
    code, said = run(
        "-m", "finetune", "export", model, "--output", str(tmp_path / "no"), "--format", "name"
    )
    assert code == 2 and "names, safetensors, gguf" in said
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Once\n")
    asked = ["serve-check", model, "--prompts", str(prompts), "--server", "reader"]
    code, said = run("-m", "finetune", *asked, "--names", str(tmp_path / "none"))
    assert code == 2 and "--names: " in said and "no such file" in said, said
    code, said = run("-m", "finetune", "chat", str(out / "model.names"), "--prompt", "A")
    assert code == 2 and "a NAMES file; chat with it in cat" in said, said
