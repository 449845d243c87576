"""`finetune init`: a first recipe from a model, data and GPUs, which the plan says fits."""

import argparse
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil

from finetune.config.methods import (
    ADDED_MASK,
    DEFAULT_METHOD,
    EXITING,
    MASKING,
    METHODS,
    PAIRED,
    RATED,
    REWARDED,
    TAUGHT,
    RowKind,
)
from finetune.config.reader import read_recipe
from finetune.config.reward_names import SHIPPED_REWARDS, is_reward_model
from finetune.config.schema import DatasetSource, Model, Recipe
from finetune.config.user_code import file_of
from finetune.constants import Names, find_positions
from finetune.data.formats import (
    ANSWER_COLUMNS,
    QUESTION_COLUMNS,
    TEXT_COLUMNS,
    Completion,
    find_common_pair,
    parse_row,
)
from finetune.data.hosted_rows import rewrite_row
from finetune.data.messages import BadRow, describe_value, list_columns
from finetune.data.readers import file_kind
from finetune.data.sources import list_files
from finetune.errors import EXIT_USER_ERROR, UserError
from finetune.files.durable import replace_file
from finetune.files.json_files import read_json_object
from finetune.files.network import download_file
from finetune.init.environment import list_gpus
from finetune.init.new_recipe import (
    DataSummary,
    Fit,
    Hardware,
    Keys,
    Trained,
    choose_max_length,
    compose_recipe,
    find_kind,
    fit_recipe,
    inspect_command,
    launch_command,
    name_flags,
    plan_command,
    read_first_rows,
    summarize_data,
)
from finetune.plan.architecture import find_config
from finetune.plan.table import compare_need, name_unknown
from finetune.units import MIB, counted, read_gpu_memory, read_size

T = TypeVar("T")


class EndOfInput(UserError):
    """The person has closed the input: there is nobody left to ask again."""


def is_interactive() -> bool:
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout))


def ask(question: str, default: str) -> str:
    """The answer that is typed, or `default` for an empty one.

    Raises `EndOfInput` at the end of the input.
    """
    try:
        answer = input(f"{question} [{default}]: " if default else f"{question}: ").strip()
    except KeyboardInterrupt:
        print()
        raise
    except EOFError:
        print()
        raise EndOfInput("ended before all questions were answered; nothing was written") from None
    return answer or default


def require(
    given: str | None, flag: str, question: str, default: str = "", *, read: Callable[[str], T]
) -> T:
    """Reads `given`, else an answer to `question`, which is asked until it can be read.

    Raises `UserError` where `given` cannot be read, or nobody can be asked.
    """
    if given is not None:
        if not given.strip():
            raise UserError(f"{flag}: empty; leave the flag out to be asked, or give a value")
        return read(given)
    if not is_interactive():
        if default:
            return read(default)
        raise UserError(f"{flag}: needed, since there is no terminal to ask at")
    while True:
        answer = ask(question, default)
        if not answer:
            print("an answer is needed; Ctrl-C ends without writing anything")
            continue
        try:
            return read(answer)
        except EndOfInput:
            raise
        except UserError as error:
            print(error)


def find_gpus() -> Hardware | None:
    """The GPUs of this machine, with the memory of the smallest; None where nvidia-smi finds
    none.
    """
    mebibytes = [gpu.mebibytes for gpu in list_gpus()]
    if mebibytes:
        return Hardware(len(mebibytes), f"{int(min(mebibytes) / 1024 * 10) / 10:g}GiB")
    return None


MANY_ROWS = 50_000  # one epoch of these is enough
SHOWN_FILES = 5
# What the data holds -> the methods that learn from it, the default first.
BY_KIND: dict[RowKind, Names] = {
    "answers": (DEFAULT_METHOD, *MASKING, *EXITING, *TAUGHT, *REWARDED),
    "pairs": (*PAIRED, *RATED),
    "ratings": RATED,
    "classes": tuple(name for name, facts in METHODS.items() if facts.rows == "classes"),
    "retrieval": tuple(name for name, facts in METHODS.items() if facts.embeds),
}
KINDS: dict[str | None, RowKind] = {name: kind for kind, names in BY_KIND.items() for name in names}
# What --train takes -> what is trained; auto: all parameters if they fit, else adapters.
TRAINED: dict[str, Trained | None] = {
    "auto": None,
    "full": "full",
    "lora": "lora",
    "qlora": "qlora",
}
COLUMN_FLAGS = [
    f"{kind}_column"
    for kind in ("messages", "prompt", "completion", "text", "chosen", "rejected", "label")
]
# by `datasets`, beside its Arrow files
SAVED_BESIDE_DATA = ("dataset_info.json", "dataset_dict.json", "state.json")
TEMPLATE_FILES = ("chat_template.jinja", "tokenizer_config.json")


def init_command(options: argparse.Namespace) -> int:
    """Asks for what the flags leave open, writes the recipe and prints the next commands.

    Returns 0.
    """
    if options.output is not None:
        _check_output(options.output, options.overwrite)
    model, config = require(
        options.model, "--model", "Model, a folder or a hub name", read=_read_model
    )
    data = require(
        options.data,
        "--data",
        "Data, a file, a folder or a hub name",
        read=lambda path: _read_data(path, options, model),
    )
    method = _choose_method(options, data)
    trained = _choose_trained(options)
    hardware = _find_hardware(options)
    output = require(
        options.output,
        "--output",
        "Recipe to write",
        "my_recipe.yaml",
        read=lambda output: _check_output(output, options.overwrite),
    )
    keys, packed_rows = _given_keys(model, config, data)
    if method.get("method") in REWARDED:
        method["max_completion_length"] = keys["max_length"] // 2
    if options.chat_template is not None:
        keys["chat_template"] = options.chat_template
    if data.kind == "retrieval":
        packed_rows = data.rows  # a step draws rows, not what they are packed into
    fit = fit_recipe(keys | method, packed_rows, hardware, trained)
    recipe = _write(Path(output), compose_recipe(data, fit, hardware, output))
    findings = check_sample(recipe, data)
    template = None
    if _is_fatal(findings):
        template = _offer_template(recipe, data, findings)
    if template is not None and is_interactive():
        answer = ask(
            f"{findings[0]}\nchat_template: {template} has no such finding. Write it into the "
            "recipe?",
            "yes",
        )
        if answer.lower() in ("y", "yes"):
            fit = replace(fit, keys=fit.keys | {"chat_template": template})
            recipe = _write(Path(output), compose_recipe(data, fit, hardware, output))
            findings = check_sample(recipe, data)
    for line in _summary(output, fit, hardware, findings, template):
        print(line)
    return EXIT_USER_ERROR if _is_fatal(findings) else 0


def _is_fatal(findings: Sequence[str]) -> bool:
    return any(line.startswith("fatal:") for line in findings)


USUAL_TEMPLATES = ("chatml", "llama3.1", "qwen3", "mistral-v3")


def _offer_template(recipe: Recipe, data: DataSummary, findings: Sequence[str]) -> str | None:
    """The named chat template under which the rows have no fatal finding, and the fewest others;
    None where there is none, or the findings are not about templates.

    Those of families that the messages name are tried.
    """
    fatal = [line for line in findings if line.startswith("fatal:")]
    if not all("template" in line for line in fatal):
        return None
    from finetune.data.tokenizer import TEMPLATES  # imports transformers

    named = [word for line in fatal for word in re.findall(r"[\w.-]+", line) if word in TEMPLATES]
    left: dict[str, int] = {}
    for name in dict.fromkeys([*named, *USUAL_TEMPLATES]):
        changed = check_sample(replace(recipe, data=replace(recipe.data, chat_template=name)), data)
        if not _is_fatal(changed):
            left[name] = len(changed)
    return min(left, key=left.__getitem__, default=None)


def _choose_method(options: argparse.Namespace, data: DataSummary) -> Keys:
    """The keys of what the model learns from; none for answers."""
    if options.method in TRAINED:
        raise UserError(
            f"--method: {options.method} is what is trained: --train {options.method}; --method "
            f"says what it learns from: {', '.join(BY_KIND[data.kind])}"
        )
    known = BY_KIND[data.kind]

    def read(name: str) -> str:
        if name not in known:
            if name in METHODS:
                problem = "does not fit this data"
            else:
                problem = "no such method"
            raise UserError(f"--method: {name}: {problem}; choose one of {', '.join(known)}")
        return name

    asked = "; ".join(f"{name} {METHODS[name].says.partition(' (')[0]}" for name in known)
    if options.method is None and len(known) == 1:
        given = known[0]
    else:
        given = options.method
    name = require(given, "--method", f"Learn from what? {asked}", known[0], read=read)
    keys: Keys = {} if name == DEFAULT_METHOD else {"method": name}
    if data.labels:
        keys["labels"] = list(data.labels)
    if data.num_negatives:
        keys["num_negatives"] = data.num_negatives
    if name in MASKING:
        keys |= {"added_tokens": [ADDED_MASK], "mask_token": ADDED_MASK}
    if name in TAUGHT:
        asked = "Teacher, a folder or a hub name"
        keys["teacher_model_name_or_path"] = require(
            options.teacher, "--teacher", asked, read=lambda text: _read_model(text)[0]
        )
    elif options.teacher is not None:
        raise UserError(f"--teacher: is for --method {' or '.join(TAUGHT)}")
    if name in REWARDED:
        asked = "Rewards, such as exact_answer or my_rewards.py:right"
        keys["rewards"] = require(options.rewards, "--rewards", asked, read=_read_rewards)
    elif options.rewards is not None:
        raise UserError(f"--rewards: is for --method {' or '.join(REWARDED)}")
    return keys


def _choose_trained(options: argparse.Namespace) -> Trained | None:
    """Chooses what is trained; None: all parameters, or adapters where these do not fit."""

    def read(name: str) -> Trained | None:
        if name not in TRAINED:
            raise UserError(f"--train: {name}: one of {', '.join(TRAINED)} is expected")
        return TRAINED[name]

    asked = "Train what? auto: all parameters where they fit, else adapters; full, lora, qlora"
    return require(options.train, "--train", asked, "auto", read=read)


def _read_rewards(names: str) -> list[str]:
    rewards = [name.strip() for name in names.split(",")]
    for name in rewards:
        is_model = is_reward_model(name) and ("/" in name or Path(name).is_dir())
        if name not in SHIPPED_REWARDS and not is_model and not file_of(name).is_file():
            known = ", ".join(SHIPPED_REWARDS)
            raise UserError(
                f"--rewards: {name}: no such file; name a function as my_rewards.py:right, a "
                f"reward model's folder, or one of {known}"
            )
    return rewards


def check_sample(recipe: Recipe, data: DataSummary) -> list[str]:
    """Returns the findings of `finetune inspect` about the rows that were read, the most severe
    first.
    """
    from finetune.data.findings import Finding  # below it torch-free too
    from finetune.data.sources import RowBatch

    try:
        from finetune.data.source_tokens import SourceStats, tokenize_rows
        from finetune.data.tokenizer import load_tokenizer  # imports transformers

        tokenizer = load_tokenizer(recipe.model, recipe.data)
        stats = SourceStats()
        rows = data.sample
        batch = RowBatch(data.source.origin, tuple(range(1, len(rows) + 1)), rows)
        keys = replace(recipe.data, on_bad_row="skip")
        kind = recipe.method_facts.rows
        for _ in tokenize_rows([(recipe.data.datasets[0], batch)], keys, tokenizer, stats, kind):
            pass
    except UserError as error:
        return [f"notice: the rows were not checked with the model's tokenizer: {error}"]
    findings: list[Finding] = stats.tally.list_findings(stats.rows_read, stats.unused_columns)
    return [str(finding) for finding in findings]


def _read_model(name: str) -> tuple[str, dict[str, Any]]:
    """`name` with its config.json."""
    return name, find_config(Model(model_name_or_path=name))[0]


def _check_output(output: str, overwrite: bool) -> str:
    """`output`. Raises `UserError` where it is no recipe's name, or exists."""
    path = Path(output)
    if path.suffix not in (".yaml", ".yml"):
        if path.name in ("", ".."):
            example = path / "my_recipe.yaml"
        else:
            example = path.with_suffix(".yaml")
        raise UserError(
            f"{output or 'an empty name'}: a recipe's name ends in .yaml; write --output {example}"
        )
    if path.exists() and not overwrite:
        raise UserError(
            f"{output}: exists; choose another --output, or replace it with --overwrite"
        )
    return output


def _read_data(path: str, options: argparse.Namespace, model: str) -> DataSummary:
    flags = {key: getattr(options, key) for key in COLUMN_FLAGS}
    named: dict[str, Any] = {"function" if ".py:" in path else "path": path}
    if "function" in named and not file_of(path).is_file():
        raise UserError(f"--data: {path}: no such file; name a function as my_data.py:rows")
    source = DatasetSource(**named, name=options.data_name, split=options.split, **flags)
    first, places, taken = read_first_rows(source)
    kind = KINDS.get(options.method) or find_kind(first[0], source)
    if kind == "answers":
        source = choose_columns(first[0], source, finds_chat_template(model))
    summary = summarize_data(source, first, places, taken, kind, model)
    if summary.is_counted:
        rows = counted(summary.rows, "row")
    else:
        rows = f"more than {counted(summary.rows, 'row')}"
    if summary.is_tokenized:
        by = ""
    else:
        by = " (a guess from their characters)"
    print(
        f"data    {path}: {rows}, read as {summary.format}, about {summary.mean_tokens:,.0f} "
        f"tokens each{by}"
    )
    if unread := list_unread_files(source):
        more = ""
        if len(unread) > SHOWN_FILES:
            more = f" and {len(unread) - SHOWN_FILES} more"
        print(
            f"        not read: {', '.join(unread[:SHOWN_FILES])}{more}; name a file or a glob as "
            "--data to choose"
        )
    return summary


def choose_columns(
    row: Mapping[str, Any], source: DatasetSource, has_template: bool
) -> DatasetSource:
    """Returns `source` with the columns that a recipe has to name: none where our own readers
    recognize the row.
    """
    is_named = (
        source.messages_column
        or source.prompt_column
        or source.completion_column
        or source.text_column
    )
    if not is_named:
        source = _find_columns(row, source, has_template)
    if source.prompt_column and source.completion_column and source.type is None and has_template:
        source = replace(source, type="messages")
    return source


def _find_columns(
    row: Mapping[str, Any], source: DatasetSource, has_template: bool
) -> DatasetSource:
    try:
        recognized = parse_row(rewrite_row(row, source), source)
    except BadRow as error:
        return _name_columns(row, source, error)
    pair = find_common_pair(row, source)
    if pair:  # a recipe says what was recognized
        source = replace(source, prompt_column=pair[0], completion_column=pair[1])
    is_completion = recognized.format == "prompt_completion" and isinstance(
        recognized.document, Completion
    )
    if is_completion and has_template:
        completion = "chosen" if row.get("completion") is None else "completion"
        source = replace(source, prompt_column="prompt", completion_column=completion)
    return source


def _name_columns(row: Mapping[str, Any], source: DatasetSource, error: BadRow) -> DatasetSource:
    """Guesses the columns of a row that our readers refuse with `error`, or asks for them.

    Raises `UserError` where the row has a known format, and a fault.
    """
    is_unknown = str(error).startswith("unknown format")
    # another column may hold the text
    is_null = row.get(str(error).partition(":")[0], error) is None
    guessed = _guess_columns(row, source) if is_unknown or is_null else None
    if guessed is not None:
        return guessed
    if not is_unknown:
        raise UserError(f"{source.origin}: {name_flags(str(error))}") from None
    return _ask_columns(row, source)


def _guess_columns(row: Mapping[str, Any], source: DatasetSource) -> DatasetSource | None:
    """Guesses by their names which columns hold question and answer, or text; None: no guess.

    Raises `UserError` where the answer is a number.
    """
    by_name = {}
    numbers = {}
    for column, value in row.items():
        if isinstance(value, str):
            by_name[str(column).lower()] = str(column)
        elif isinstance(value, int | float):
            numbers[str(column).lower()] = str(column)
    prompt = _first_of(by_name, (*QUESTION_COLUMNS, "user"))
    completion = _first_of(by_name, (*ANSWER_COLUMNS, "label"))
    number = _first_of(numbers, ANSWER_COLUMNS[:6])
    if prompt is not None and completion is None and number is not None:
        raise UserError(
            f"{source.origin}: {number}: text is expected, found {describe_value(row[number])}; "
            "write it as text, in quotes"
        )
    if prompt is not None and completion is not None:
        return replace(source, prompt_column=prompt, completion_column=completion)
    text = _first_of(by_name, TEXT_COLUMNS)
    if text is None and len(by_name) == 1:
        text = next(iter(by_name.values()))
    if text is not None and prompt is None:
        return replace(source, text_column=text)
    return None


def _first_of(columns: Mapping[str, str], names: Iterable[str]) -> str | None:
    """The column of the first of `names` that `columns` has; None where it has none."""
    return next((columns[name] for name in names if name in columns), None)


def _ask_columns(row: Mapping[str, Any], source: DatasetSource) -> DatasetSource:
    columns = list_columns(row) or "none"
    if not is_interactive():
        raise UserError(
            f"{source.origin}: its columns are {columns}; say which to read with --prompt-column "
            "and --completion-column, --messages-column or --text-column"
        )
    print(f"{source.origin}: its columns are {columns}")
    prompt = _ask_column("Which one holds the prompt or question? (none: plain text)", row)
    if not prompt:
        return replace(source, text_column=_ask_column("Which one holds the text?", row) or None)
    return replace(
        source,
        prompt_column=prompt,
        completion_column=_ask_column("Which one holds the answer?", row),
    )


def _ask_column(question: str, row: Mapping[str, Any]) -> str:
    while column := ask(question, ""):
        if column not in row:
            print(f"{column}: no such column; there are {list_columns(row)}")
        elif isinstance(row[column], int | float):
            print(
                f"{column}: text is expected, found {describe_value(row[column])}; write it as "
                "text, in quotes"
            )
        else:
            break
    return column


def list_unread_files(source: DatasetSource) -> list[str]:
    """The data files in the folder that `source` names which are none of its split's, by their
    paths in the folder.
    """
    folder = Path(source.origin)
    if not folder.is_dir():
        return []
    read = {Path(file).resolve() for file in list_files(source)}
    unread = (
        file.relative_to(folder)
        for file in folder.rglob("*")
        if file.is_file() and file.resolve() not in read
    )
    return sorted(str(path) for path in unread if _is_data(path))


def _is_data(path: Path) -> bool:
    is_hidden = any(part.startswith((".", "__")) for part in path.parts)
    return file_kind(str(path)) is not None and not is_hidden and path.name not in SAVED_BESIDE_DATA


def finds_chat_template(model: str) -> bool:
    """Whether the tokenizer of a folder or hub name has a chat template."""
    for name in TEMPLATE_FILES:
        try:
            if Path(model).is_dir():
                path = Path(model) / name
            else:
                path = download_file(model, name)
            is_template = path.suffix == ".jinja" and path.is_file()
            if is_template or read_json_object(path).get("chat_template"):
                return True
        except (UserError, OSError):  # it has no such file
            continue
    return False


def _find_hardware(options: argparse.Namespace) -> Hardware:
    """Reads the hardware from the flags or the answers; host memory and disk are this machine's
    where its GPUs are.
    """
    are_given = options.gpus is not None and options.gpu_memory is not None
    machine = None if are_given else find_gpus()
    count = str(machine.gpus if machine else 0)
    gpus = require(options.gpus, "--gpus", "GPUs for the run (0: the CPU)", count, read=_read_count)
    here = f"{psutil.virtual_memory().total // MIB}MiB"
    own = f"{shutil.disk_usage(Path()).free // MIB}MiB"
    host = _read_if_given("--host-memory", options.host_memory)
    disk = _read_if_given("--disk", options.disk)
    if gpus == 0:
        return Hardware(0, host or here, host or here, disk or own)
    memory = require(
        options.gpu_memory,
        "--gpu-memory",
        "Memory of each GPU",
        machine.memory if machine else "80GiB",
        read=partial(_read_memory, "--gpu-memory"),
    )
    if machine is not None and (gpus, memory) == (machine.gpus, machine.memory):
        host = host or here
        disk = disk or own
    return Hardware(gpus, memory, host, disk)


def _read_if_given(flag: str, text: str | None) -> str | None:
    return None if text is None else _read_memory(flag, text)


def _read_memory(flag: str, text: str) -> str:
    """`text` with its unit.

    Raises `UserError` where it is no size of a machine's memory or disk.
    """
    size = read_gpu_memory(text)
    try:
        if read_size(size) < 1 << 30:
            raise UserError(f"{text}: less than 1 GiB")
    except UserError as error:
        raise UserError(f"{flag}: {error}") from None
    if size != text.replace(" ", ""):
        print(f"memory  {text} is read as {size}")
    return size


def _read_count(text: str) -> int:
    if not text.isdecimal() or len(text) > 6 or int(text) > 100_000:
        raise UserError(f"--gpus: {text}: a number of GPUs is expected")
    return int(text)


def _given_keys(model: str, config: dict[str, Any], data: DataSummary) -> tuple[Keys, float]:
    """The keys that do not depend on the hardware, and the full rows that they make of the data."""
    positions = find_positions(config)
    max_length = choose_max_length(data, positions if positions and positions > 1 else None)
    entry = {
        key: value
        for key in data.source.__slots__
        if (value := getattr(data.source, key)) not in (None, "")
    }
    keys: Keys = {
        "model_name_or_path": model,
        "datasets": [entry],
        "max_length": max_length,
        "num_train_epochs": 1 if data.rows >= MANY_ROWS else 3,
    }
    if data.is_counted and data.rows >= 40:
        keys["eval_split_size"] = min(200, data.rows // 20)
    return keys, data.rows * data.mean_tokens / max_length


def _write(path: Path, text: str) -> Recipe:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written: {error.strerror}; choose another --output"
        ) from None
    return read_recipe(str(path))  # what was written is a recipe


def _summary(
    output: str, fit: Fit, hardware: Hardware, findings: Sequence[str], template: str | None
) -> Iterator[str]:
    """Lists what was written, what was found, and the commands that come next; none that trains
    what is fatal.
    """
    what = {"full": "all parameters", "lora": "adapters (LoRA)", "qlora": "adapters (QLoRA)"}[
        fit.trained
    ]
    what += f" by {fit.keys['method']}" if "method" in fit.keys else ""
    room = hardware.room
    uncounted = fit.plan.spec.uncounted
    if room.is_known and not uncounted:
        verdict = f"fits {hardware.words}:"
    else:
        verdict = "requires"
    without = ""
    if uncounted:
        without = ", without activations, which are not counted"
    yield f"wrote   {output}: trains {what}"
    yield (
        f"        by the plan it {verdict} "
        f"{compare_need(fit.need, room)}{without}{name_unknown(room)}"
    )
    yield from (f"        {text}   ({cost})" for text, cost in fit.changes)
    yield from (f"        {line}" for line in findings)
    yield f"look    {inspect_command(output)}"
    if not _is_fatal(findings):
        yield f"plan    {plan_command(output, hardware)}"
        yield f"train   {launch_command(output, hardware)}"
        return
    yield "        a fatal finding stops the training: change the data or the recipe first"
    if template is not None:
        yield (
            f"fix     the same command with --chat-template {template} --overwrite, under which no "
            "finding is fatal"
        )
