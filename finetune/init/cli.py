"""`finetune init`: asks for a model, data and GPUs, and writes a recipe that fits by the plan."""

import argparse
import re
import shutil
import sys
import textwrap
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
from finetune.data.sources import RowBatch, list_files
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
    count_batch_items,
    find_kind,
    fit_recipe,
    inspect_command,
    launch_command,
    list_entry,
    name_flags,
    plan_command,
    read_first_rows,
    summarize_data,
)
from finetune.plan.architecture import find_config
from finetune.plan.table import compare_need, name_unknown
from finetune.units import MIB, read_gpu_memory, read_size

T = TypeVar("T")


class EndOfInput(UserError):
    """The person has closed the input (Ctrl-D), so no question can be asked again."""


def is_interactive() -> bool:
    """Whether both stdin and stdout are terminals, so that questions can be asked."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout))


def ask(question: str, default: str) -> str:
    """Asks a question at the terminal; returns the answer, or `default` if it is empty.

    Raises `EndOfInput` if the input is closed.
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


def read_or_ask(
    value: str | None, flag: str, question: str, default: str = "", *, read: Callable[[str], T]
) -> T:
    """Reads the value of a flag; if it is None, asks `question` until the answer can be read.

    Without a terminal, `default` is the answer.

    Raises `UserError` if the flag's value cannot be read, or there is neither a terminal nor a
    default.
    """
    if value is not None:
        if not value.strip():
            raise UserError(f"{flag}: empty; leave the flag out to be asked, or give a value")
        return read(value)
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
    """Returns the number of this machine's GPUs and the memory of the smallest one.

    The memory is rounded down to a tenth of a GiB. Returns None if nvidia-smi finds no GPU.
    """
    mebibytes = [gpu.mebibytes for gpu in list_gpus()]
    if mebibytes:
        tenths_of_gib = int(min(mebibytes) / 1024 * 10)
        return Hardware(len(mebibytes), f"{tenths_of_gib / 10:g}GiB")
    return None


MANY_ROWS = 50_000  # with this many rows, the recipe trains one epoch
SHOWN_FILES = 5  # files of the data folder that are listed as not read
# Kind of rows in the data -> the methods that learn from them, the default first.
BY_KIND: dict[RowKind, Names] = {
    "answers": (DEFAULT_METHOD, *MASKING, *EXITING, *TAUGHT, *REWARDED),
    "pairs": (*PAIRED, *RATED),
    "ratings": RATED,
    "classes": tuple(name for name, facts in METHODS.items() if facts.rows == "classes"),
    "retrieval": tuple(name for name, facts in METHODS.items() if facts.embeds),
}
KINDS: dict[str | None, RowKind] = {name: kind for kind, names in BY_KIND.items() for name in names}
# Value of --train -> what is trained. None: all parameters if they fit, else adapters.
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
# files that `datasets` saves beside its Arrow files, which hold no rows
SAVED_BESIDE_DATA = ("dataset_info.json", "dataset_dict.json", "state.json")
TEMPLATE_FILES = ("chat_template.jinja", "tokenizer_config.json")


def init_command(options: argparse.Namespace) -> int:
    """Asks for what the flags do not give, writes the recipe and prints the next commands.

    Returns the exit code: 0, or 2 if the data check has a fatal finding.
    """
    if options.output is not None:
        _check_output(options.output, options.overwrite)
    model, config = read_or_ask(
        options.model, "--model", "Model, a folder or a hub name", read=_read_model
    )
    data = read_or_ask(
        options.data,
        "--data",
        "Data, a file, a folder or a hub name",
        read=lambda path: _read_data(path, options, model),
    )
    method = _choose_method(options, data)
    trained = _choose_trained(options)
    hardware = _find_hardware(options)
    output = read_or_ask(
        options.output,
        "--output",
        "Recipe to write",
        "my_recipe.yaml",
        read=lambda output: _check_output(output, options.overwrite),
    )
    keys = _choose_keys(model, config, data)
    if method.get("method") in REWARDED:
        method["max_completion_length"] = keys["max_length"] // 2
    if options.chat_template is not None:
        keys["chat_template"] = options.chat_template
    keys |= method
    fit = fit_recipe(keys, count_batch_items(data, keys), hardware, trained)
    recipe = _write_recipe(Path(output), compose_recipe(data, fit, hardware, output))
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
            recipe = _write_recipe(Path(output), compose_recipe(data, fit, hardware, output))
            findings = check_sample(recipe, data)
    for line in _summarize(output, fit, hardware, findings, template):
        print(line)
    return EXIT_USER_ERROR if _is_fatal(findings) else 0


def _is_fatal(findings: Sequence[str]) -> bool:
    """Whether any of the findings is fatal: training would stop on it."""
    return any(line.startswith("fatal:") for line in findings)


USUAL_TEMPLATES = ("chatml", "llama3.1", "qwen3", "mistral-v3")


def _offer_template(recipe: Recipe, data: DataSummary, findings: Sequence[str]) -> str | None:
    """Finds a named chat template under which the data's sample has no fatal finding.

    It tries the templates that the fatal findings name, and USUAL_TEMPLATES, and takes the one with
    the fewest findings. Returns None if there is none, or a fatal finding is not about templates.
    """
    fatal = [line for line in findings if line.startswith("fatal:")]
    if not all("template" in line for line in fatal):
        return None
    from finetune.data.tokenizer import TEMPLATES  # imports transformers

    named = [word for line in fatal for word in re.findall(r"[\w.-]+", line) if word in TEMPLATES]
    finding_counts: dict[str, int] = {}
    for name in dict.fromkeys([*named, *USUAL_TEMPLATES]):
        changed = replace(recipe, data=replace(recipe.data, chat_template=name))
        new_findings = check_sample(changed, data)
        if not _is_fatal(new_findings):
            finding_counts[name] = len(new_findings)
    return min(finding_counts, key=finding_counts.__getitem__, default=None)


def _choose_method(options: argparse.Namespace, data: DataSummary) -> Keys:
    """Chooses the method by the flags or by asking; returns its recipe keys.

    The keys are `method` (unless it is the default one) and what the method requires, such as the
    labels, the teacher or the rewards. Raises `UserError` if the data or a flag does not fit the
    method.
    """
    if options.method in TRAINED:
        raise UserError(
            f"--method: {options.method} is what is trained: --train {options.method}; --method "
            f"says what it learns from: {', '.join(BY_KIND[data.kind])}"
        )
    known = BY_KIND[data.kind]

    def read_method(name: str) -> str:
        if name not in known:
            if name in METHODS:
                problem = "does not fit this data"
            else:
                problem = "no such method"
            raise UserError(f"--method: {name}: {problem}; choose one of {', '.join(known)}")
        return name

    if options.method is None and len(known) == 1:
        flag_value = known[0]  # nothing to ask
    else:
        flag_value = options.method
    question = f"Learn from what?\n{_list_methods(known)}\nMethod"
    name = read_or_ask(flag_value, "--method", question, known[0], read=read_method)
    keys: Keys = {} if name == DEFAULT_METHOD else {"method": name}
    if data.labels:
        keys["labels"] = list(data.labels)
    if data.num_negatives:
        keys["num_negatives"] = data.num_negatives
    if name in MASKING:
        keys |= {"added_tokens": [ADDED_MASK], "mask_token": ADDED_MASK}
    if name in TAUGHT:
        question = "Teacher, a folder or a hub name"
        keys["teacher_model_name_or_path"] = read_or_ask(
            options.teacher, "--teacher", question, read=lambda text: _read_model(text)[0]
        )
    elif options.teacher is not None:
        raise UserError(f"--teacher: is for --method {' or '.join(TAUGHT)}")
    if name in REWARDED:
        question = "Rewards, such as exact_answer or my_rewards.py:right"
        keys["rewards"] = read_or_ask(options.rewards, "--rewards", question, read=_read_rewards)
    elif options.rewards is not None:
        raise UserError(f"--rewards: is for --method {' or '.join(REWARDED)}")
    return keys


def _list_methods(names: Sequence[str]) -> str:
    """Lists methods with what each learns, a method on a line, as wide as the terminal."""
    width = shutil.get_terminal_size().columns
    column = max(len(name) for name in names) + 2
    lines = []
    for name in names:
        learned = METHODS[name].says.partition(" (")[0]
        text = f"{name:<{column}}{learned}"
        lines.append(
            textwrap.fill(text, width, initial_indent="  ", subsequent_indent=" " * (column + 2))
        )
    return "\n".join(lines)


def _choose_trained(options: argparse.Namespace) -> Trained | None:
    """Chooses what is trained, by --train or by asking.

    Returns None for "auto": all parameters if they fit, else adapters.
    """

    def read_train(name: str) -> Trained | None:
        if name not in TRAINED:
            raise UserError(f"--train: {name}: one of {', '.join(TRAINED)} is expected")
        return TRAINED[name]

    question = "Train what? auto: all parameters where they fit, else adapters; full, lora, qlora"
    return read_or_ask(options.train, "--train", question, "auto", read=read_train)


def _read_rewards(names: str) -> list[str]:
    """Splits a list of rewards at its commas.

    Raises `UserError` if a name is neither shipped, nor a reward model, nor a function in a file.
    """
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
    """Checks the sampled rows as `finetune inspect` does; returns its findings, the worst first.

    If the model's tokenizer cannot be loaded, the only finding is a notice that says so.
    """
    try:
        from finetune.data.source_tokens import SourceStats, tokenize_rows
        from finetune.data.tokenizer import load_tokenizer  # imports transformers

        tokenizer = load_tokenizer(recipe.model, recipe.data)
        stats = SourceStats()
        rows = data.sample
        batch = RowBatch(data.source.origin, tuple(range(1, len(rows) + 1)), rows)
        keys = replace(recipe.data, on_bad_row="skip")
        kind = recipe.method_facts.rows
        # only the statistics are wanted, which fill while the tokenized rows are drawn
        for _ in tokenize_rows([(recipe.data.datasets[0], batch)], keys, tokenizer, stats, kind):
            pass
    except UserError as error:
        return [f"notice: the rows were not checked with the model's tokenizer: {error}"]
    return list(map(str, stats.tally.list_findings(stats.rows_read, stats.unused_columns)))


def _read_model(name: str) -> tuple[str, dict[str, Any]]:
    """Returns (`name`, the model's config.json). Raises `UserError` if it has none."""
    config = find_config(Model(model_name_or_path=name))[0]
    return name, config


def _check_output(output: str, overwrite: bool) -> str:
    """Returns `output`, the path of the recipe to write.

    Raises `UserError` if it does not end in .yaml or .yml, or exists without --overwrite.
    """
    path = Path(output)
    if path.suffix not in (".yaml", ".yml"):
        raise UserError(
            f"{output or 'an empty name'}: a recipe's name ends in .yaml; write --output "
            "my_recipe.yaml"
        )
    if path.exists() and not overwrite:
        raise UserError(
            f"{output}: exists; choose another --output, or replace it with --overwrite"
        )
    return output


def _read_data(path: str, options: argparse.Namespace, model: str) -> DataSummary:
    """Reads the first rows of --data, chooses their columns, and prints what the data holds.

    Raises `UserError` if the rows cannot be read, or the columns are unknown and nobody can be
    asked.
    """
    columns = {key: getattr(options, key) for key in COLUMN_FLAGS}
    origin: dict[str, Any] = {"function" if ".py:" in path else "path": path}
    if "function" in origin and not file_of(path).is_file():
        raise UserError(f"--data: {path}: no such file; name a function as my_data.py:rows")
    source = DatasetSource(**origin, name=options.data_name, split=options.split, **columns)
    rows, places, rows_read = read_first_rows(source)
    kind = KINDS.get(options.method) or find_kind(rows[0], source)
    if kind == "answers":
        source = choose_columns(rows[0], source, finds_chat_template(model))
    summary = summarize_data(source, rows, places, rows_read, kind, model)
    if summary.is_tokenized:
        caveat = ""
    else:
        caveat = " (a guess from their characters)"
    print(
        f"data    {path}: {summary.row_count}, read as {summary.format}, about "
        f"{summary.mean_tokens:,.0f} tokens each{caveat}"
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
    """Returns `source` with the columns that the recipe will name.

    Columns that `source` names stay. Else they are found by the example `row`. A prompt and a
    completion are read as turns (`type: messages`) if the model has a chat template.
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
    """Returns `source` with the columns found in `row`; unchanged if its format needs no names.

    Raises `UserError` if the columns cannot be found, or the row is faulty.
    """
    try:
        recognized = parse_row(rewrite_row(row, source), source)
    except BadRow as error:
        return _name_columns(row, source, error)
    pair = find_common_pair(row, source)
    if pair:  # the recipe states what was recognized by the columns' names
        prompt_column, completion_column = pair
        source = replace(source, prompt_column=prompt_column, completion_column=completion_column)
    is_completion = recognized.format == "prompt_completion" and isinstance(
        recognized.document, Completion
    )
    if is_completion and has_template:
        completion_column = "chosen" if row.get("completion") is None else "completion"
        source = replace(source, prompt_column="prompt", completion_column=completion_column)
    return source


def _name_columns(row: Mapping[str, Any], source: DatasetSource, error: BadRow) -> DatasetSource:
    """Guesses the columns of a row that our readers refuse with `error`, or asks for them.

    Raises `UserError` if the row has a known format and a fault, or nobody can be asked.
    """
    is_unknown = str(error).startswith("unknown format")
    # The error may begin with the name of a column. If that is null, another may hold the text.
    column, _, _ = str(error).partition(":")
    is_null = column in row and row[column] is None
    guess = _guess_columns(row, source) if is_unknown or is_null else None
    if guess is not None:
        return guess
    if not is_unknown:
        raise UserError(f"{source.origin}: {name_flags(str(error))}") from None
    return _ask_columns(row, source)


def _guess_columns(row: Mapping[str, Any], source: DatasetSource) -> DatasetSource | None:
    """Guesses by the columns' names which hold question and answer, or a text.

    Returns None if the names are not usual ones. Raises `UserError` if the answer is a number.
    """
    # name in lower case -> name, for the columns with texts and with numbers
    text_columns = {}
    number_columns = {}
    for column, value in row.items():
        if isinstance(value, str):
            text_columns[str(column).lower()] = str(column)
        elif isinstance(value, int | float):
            number_columns[str(column).lower()] = str(column)
    prompt = _find_first(text_columns, (*QUESTION_COLUMNS, "user"))
    completion = _find_first(text_columns, (*ANSWER_COLUMNS, "label"))
    number = _find_first(number_columns, ANSWER_COLUMNS[:6])  # not "assistant" and "reply"
    if prompt is not None and completion is None and number is not None:
        raise UserError(
            f"{source.origin}: {number}: text is expected, found {describe_value(row[number])}; "
            "write it as text, in quotes"
        )
    if prompt is not None and completion is not None:
        return replace(source, prompt_column=prompt, completion_column=completion)
    text = _find_first(text_columns, TEXT_COLUMNS)
    if text is None and len(text_columns) == 1:
        [text] = text_columns.values()
    if text is not None and prompt is None:
        return replace(source, text_column=text)
    return None


def _find_first(columns: Mapping[str, str], names: Iterable[str]) -> str | None:
    """Returns the value in `columns` of the first of `names` that is a key of it, else None."""
    return next((columns[name] for name in names if name in columns), None)


def _ask_columns(row: Mapping[str, Any], source: DatasetSource) -> DatasetSource:
    """Asks which columns hold the prompt and the answer, or the text; returns `source` with them.

    Raises `UserError` if there is no terminal.
    """
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
    """Asks for a column until the answer is empty or a column of `row` without a number."""
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
    """Lists the data files in the folder of `source` that its split does not read.

    Each is a path relative to the folder. The list is empty if `source` is no folder.
    """
    folder = Path(source.origin)
    if not folder.is_dir():
        return []
    read_files = {Path(file).resolve() for file in list_files(source)}
    unread_files = (
        file.relative_to(folder)
        for file in folder.rglob("*")
        if file.is_file() and file.resolve() not in read_files
    )
    return sorted(str(path) for path in unread_files if _is_data(path))


def _is_data(path: Path) -> bool:
    """Whether a file may hold rows, by its path: a known type, not hidden, none of `datasets`'s."""
    is_hidden = any(part.startswith((".", "__")) for part in path.parts)
    return file_kind(str(path)) is not None and not is_hidden and path.name not in SAVED_BESIDE_DATA


def finds_chat_template(model: str) -> bool:
    """Whether the tokenizer of a model, given as a folder or a hub name, has a chat template.

    It downloads the files that may hold the template, if they are not in the cache.
    """
    for name in TEMPLATE_FILES:
        try:
            if Path(model).is_dir():
                path = Path(model) / name
            else:
                path = download_file(model, name)
            is_template = path.suffix == ".jinja" and path.is_file()
            if is_template or read_json_object(path).get("chat_template"):
                return True
        except (UserError, OSError):  # the model has no such file
            continue
    return False


def _find_hardware(options: argparse.Namespace) -> Hardware:
    """Reads the hardware of the run from the flags, or asks for it.

    If the run will have this machine's GPUs, or none, host memory and disk without a flag are this
    machine's. Otherwise they are not known.
    """
    are_given = options.gpus is not None and options.gpu_memory is not None
    machine = None if are_given else find_gpus()
    default_gpus = str(machine.gpus if machine else 0)
    question = "GPUs for the run (0: the CPU)"
    gpus = read_or_ask(options.gpus, "--gpus", question, default_gpus, read=_read_gpu_count)
    machine_host_memory = f"{psutil.virtual_memory().total // MIB}MiB"
    machine_disk = f"{shutil.disk_usage(Path()).free // MIB}MiB"
    host_memory = _read_memory_or_none("--host-memory", options.host_memory)
    disk = _read_memory_or_none("--disk", options.disk)
    if gpus == 0:
        host_memory = host_memory or machine_host_memory
        return Hardware(0, host_memory, host_memory, disk or machine_disk)
    memory = read_or_ask(
        options.gpu_memory,
        "--gpu-memory",
        "Memory of each GPU",
        machine.memory if machine else "80GiB",
        read=partial(_read_memory, "--gpu-memory"),
    )
    if machine is not None and (gpus, memory) == (machine.gpus, machine.memory):
        host_memory = host_memory or machine_host_memory
        disk = disk or machine_disk
    return Hardware(gpus, memory, host_memory, disk)


def _read_memory_or_none(flag: str, text: str | None) -> str | None:
    """Reads the size that `flag` gives; None if the flag is not given."""
    return None if text is None else _read_memory(flag, text)


def _read_memory(flag: str, text: str) -> str:
    """Returns `text` with a unit and without spaces, and prints how it was read if that differs.

    Raises `UserError` if `text` is no size, or a size below 1 GiB.
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


def _read_gpu_count(text: str) -> int:
    """Reads a number of GPUs from 0 to 100,000. Raises `UserError` for any other text."""
    if not text.isdecimal() or len(text) > 6 or int(text) > 100_000:
        raise UserError(f"--gpus: {text}: a number of GPUs is expected")
    return int(text)


def _choose_keys(model: str, config: dict[str, Any], data: DataSummary) -> Keys:
    """Chooses the recipe keys that do not depend on the method or the hardware."""
    positions = find_positions(config)
    max_length = choose_max_length(data, positions if positions and positions > 1 else None)
    keys: Keys = {
        "model_name_or_path": model,
        "datasets": [list_entry(data.source)],
        "max_length": max_length,
        "num_train_epochs": 1 if data.rows >= MANY_ROWS else 3,
    }
    if data.is_counted and data.rows >= 40:
        keys["eval_split_size"] = min(200, data.rows // 20)
    return keys


def _write_recipe(path: Path, text: str) -> Recipe:
    """Writes the recipe's text to `path`, reads it back, and returns the recipe.

    Raises `UserError` if it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written: {error.strerror}; choose another --output"
        ) from None
    return read_recipe(str(path))


def _summarize(
    output: str, fit: Fit, hardware: Hardware, findings: Sequence[str], template: str | None
) -> Iterator[str]:
    """Yields the lines that `finetune init` prints at its end.

    They say what the recipe trains, what it needs by the plan, what the data check found, and which
    commands come next. After a fatal finding no command to plan or train is among them.
    """
    trained = {"full": "all parameters", "lora": "adapters (LoRA)", "qlora": "adapters (QLoRA)"}[
        fit.trained
    ]
    method = f" by {fit.keys['method']}" if "method" in fit.keys else ""
    room = hardware.room
    uncounted = fit.plan.spec.uncounted
    if room.is_known and not uncounted:
        verdict = f"fits {hardware.words}:"
    else:
        verdict = "requires"
    caveat = ""
    if uncounted:
        caveat = ", without activations, which are not counted"
    yield f"wrote   {output}: trains {trained}{method}"
    yield (
        f"        by the plan it {verdict} "
        f"{compare_need(fit.need, room)}{caveat}{name_unknown(room)}"
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
