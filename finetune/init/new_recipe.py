"""Makes a first recipe: summarizes the first rows of the data, chooses keys that fit the hardware,
and writes them as YAML with comments.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any, Literal

from finetune.config.accelerate_file import read_sharding
from finetune.config.methods import DEFAULT_METHOD, METHODS, MethodFacts, RowKind
from finetune.config.quantization import LOAD_KEYS
from finetune.config.reader import read_recipe, to_dict
from finetune.config.schema import RENDERINGS, Data, DatasetSource
from finetune.config.yaml_file import write_yaml
from finetune.constants import Names, round_up
from finetune.data.classes import LABEL
from finetune.data.formats import (
    LABEL_COLUMNS,
    Candidate,
    Completion,
    Conversation,
    Document,
    ParsedRow,
    Question,
    Steps,
    Text,
    TokenRow,
)
from finetune.data.groups import READERS
from finetune.data.hosted_rows import rewrite_row
from finetune.data.messages import BadRow, list_columns
from finetune.data.preferences import find_answer_columns
from finetune.data.retrieval import OF_RETRIEVAL_ALONE, parse_retrieval
from finetune.data.sources import count_rows, list_files, read_rows
from finetune.errors import UserError
from finetune.plan.advice import Advice, Need, Room, advise, count_need
from finetune.plan.plan import Plan, make_plan
from finetune.units import counted, gib, name_place, read_size

ROWS_READ = 1000  # rows that are read, from the beginning of the data
MOST_CLASSES = 100  # a column with more values is not taken for one of classes
MOST_NEGATIVES = 4  # negatives of a row that are used; each is one more document to compute
# A guess: English has about 4; code, numbers and other languages have fewer.
CHARACTERS_A_TOKEN = 3.0
TEMPLATE_TOKENS = 16  # assumed tokens that a chat template adds to a row
# matches a recipe key that names a column
COLUMN_KEY = "(messages|prompt|completion|text|chosen|rejected|label)_column"


@dataclass(frozen=True, slots=True)
class DataSummary:
    """What the first rows of a data set show of it. Returned by `summarize_data`."""

    source: DatasetSource  # with the columns that the recipe will name
    format: str  # a key of RENDERINGS, such as messages, alpaca or text
    rows: int  # the number of all rows if `is_counted`; else of the rows that were read
    is_counted: bool
    longest_tokens: int  # of the 99th percentile of documents
    mean_tokens: float  # of a row
    is_tokenized: bool  # the model's tokenizer counted the tokens; else they are guessed
    kind: RowKind = "answers"
    labels: Names = ()  # the classes of the rows that were read
    num_negatives: int = 0  # negatives that every row of retrieval has, at most MOST_NEGATIVES
    sample: tuple[dict[str, Any], ...] = ()  # the rows that were read

    @property
    def row_count(self) -> str:
        """The number of rows in words: "8 rows", or "more than 1,000 rows"."""
        row_count = counted(self.rows, "row")
        return row_count if self.is_counted else f"more than {row_count}"


def read_first_rows(source: DatasetSource) -> tuple[list[dict[str, Any]], list[str], int]:
    """Reads about ROWS_READ rows from the beginning of `source`.

    Returns (the usable rows, the file and row number of each, how many rows were read with the
    unusable ones). Raises `UserError` if no row is usable.
    """
    rows: list[dict[str, Any]] = []
    places: list[str] = []
    problems: list[str] = []
    rows_read = 0
    for batch in read_rows(source, streaming=True):
        for number, row in zip(batch.numbers, batch.rows, strict=True):
            place = name_place(batch.file, number)
            if isinstance(row, BadRow):
                problems.append(f"{place}: {row}")
            else:
                rows.append(row)
                places.append(place)
            rows_read += 1
        if rows_read >= ROWS_READ:
            break
    if not rows:
        raise UserError(problems[0] if problems else f"{source.origin}: has no rows")
    return rows[:ROWS_READ], places[:ROWS_READ], rows_read


def summarize_data(
    source: DatasetSource,
    rows: list[dict[str, Any]],
    places: list[str],
    rows_read: int,
    kind: RowKind,
    model: str,
) -> DataSummary:
    """Summarizes the first rows of `source`.

    Args:
        source: With the columns that the recipe will name.
        rows: The usable rows.
        places: File and row number of each row, for messages.
        rows_read: How many rows were read, unusable ones included.
        kind: As which kind of row they are read.
        model: Folder of the model. If it holds a tokenizer.json, that counts the tokens.

    Raises:
        UserError: A row lacks a column of its kind.
    """
    labels: Names = ()
    if kind == "classes":
        labels = list_labels(rows, source)
    data = Data(labels=labels)
    parsed = [
        _parse_row(row, place, source, kind, data) for row, place in zip(rows, places, strict=True)
    ]
    documents = [document for row in parsed for group in row.groups for document in group.documents]
    files = () if source.function else list_files(source)
    is_at_end = rows_read < ROWS_READ  # all rows were read
    if files and not is_at_end:
        rows_read = sum(count_rows(file, Path(file).stat().st_mtime_ns) for file in files)
    lengths, is_tokenized = count_tokens(documents, Path(model))
    mean_length = sum(lengths) / len(lengths) + TEMPLATE_TOKENS
    return DataSummary(
        source=source,
        format=parsed[0].rendering,
        rows=rows_read,
        is_counted=is_at_end or bool(files),
        longest_tokens=int(lengths[int(0.99 * (len(lengths) - 1))]) + TEMPLATE_TOKENS,
        mean_tokens=mean_length * len(documents) / len(rows),
        is_tokenized=is_tokenized,
        kind=kind,
        labels=labels,
        num_negatives=_count_negatives(rows, source) if kind == "retrieval" else 0,
        sample=tuple(rows),
    )


def find_kind(row: Mapping[str, Any], source: DatasetSource) -> RowKind:
    """Finds the kind of rows in a data set by the columns that `source` names, else by one row.

    A named label column means classes; a named chosen or rejected column means pairs; a named
    completion, messages or text column means answers. Rows of an unknown kind are "answers".
    """
    if source.label_column:
        return "classes"
    if source.chosen_column or source.rejected_column:
        return "pairs"
    if source.completion_column or source.messages_column or source.text_column:
        return "answers"
    if None not in find_answer_columns(row, source):
        return "pairs"
    if any(isinstance(row.get(column), bool) for column in LABEL_COLUMNS):
        return "ratings"
    if row.get("text") is not None and row.get(LABEL) is not None:
        return "classes"
    with suppress(BadRow):
        if any(row.get(name) is not None for name in OF_RETRIEVAL_ALONE):
            parse_retrieval(row, source, Data())
            return "retrieval"
    return "answers"


def list_labels(rows: Sequence[Mapping[str, Any]], source: DatasetSource) -> Names:
    """Lists the classes of rows: their names in alphabetical order.

    If all classes are integers of at least 0, the list is "0" to the highest one. Raises
    `UserError` if no row has a class, or if rows or list have more than MOST_CLASSES.
    """
    name = source.label_column or LABEL
    values = {row.get(name) for row in rows if isinstance(row.get(name), str | int)}
    if not values:
        raise UserError(
            f"{source.origin}: {name}: no class; its columns are {list_columns(rows[0])}, and "
            "--label-column names the one of the class"
        )
    numbers = [value for value in values if isinstance(value, int)]
    are_indexes = len(numbers) == len(values) and min(numbers) >= 0
    names = sorted(map(str, values))
    count = max(numbers) + 1 if are_indexes else len(names)
    if count > MOST_CLASSES:
        last = max(numbers) if are_indexes else names[-1]
        raise UserError(
            f"{source.origin}: {name}: {count:,} classes, the last of them {last}; is it the "
            "column of the class? --label-column names another; number classes from 0"
        )
    return tuple(map(str, range(count))) if are_indexes else tuple(names)


def _count_negatives(rows: Sequence[Mapping[str, Any]], source: DatasetSource) -> int:
    """Counts how many negatives every row has, up to MOST_NEGATIVES."""
    count = 0
    with suppress(BadRow):  # raised by the first row with fewer negatives
        for num_negatives in range(1, MOST_NEGATIVES + 1):
            for row in rows:
                parse_retrieval(row, source, Data(num_negatives=num_negatives))
            count = num_negatives
    return count


def _parse_row(
    row: Mapping[str, Any], place: str, source: DatasetSource, kind: RowKind, data: Data
) -> ParsedRow:
    """Parses a row of a kind. Raises `UserError`, which begins with `place`, if it is faulty."""
    try:
        return READERS[kind](rewrite_row(row, source), source, data)
    except BadRow as error:
        raise UserError(f"{place}: {name_flags(str(error))}") from None


def name_flags(text: str) -> str:
    """Rewrites a message that names column keys of a recipe, so that it names flags of `init`.

    >>> name_flags("to train on the chosen answers alone, set completion_column: chosen")
    'to train on the chosen answers alone, pass --completion-column chosen'
    """
    text = re.sub(rf"(?:set )?\b{COLUMN_KEY}: (\w+)", r"pass --\1-column \2", text)
    return re.sub(rf"\b{COLUMN_KEY}\b", r"--\1-column", text)


def count_tokens(documents: Sequence[Document], model: Path) -> tuple[list[float], bool]:
    """Counts the tokens of each document by the tokenizer.json in the folder `model`.

    Without that file, or if it cannot be used, the counts are guessed from the characters. Tokens
    that a chat template adds are not counted.

    Returns (the counts in ascending order, whether the tokenizer made them).
    """
    texts = [join_text(document) for document in documents]
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        counts = [
            len(encoding.ids)
            for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)
        ]
    except Exception:  # `tokenizers` has no class of its own; `launch` reports a damaged file
        return sorted(len(text) / CHARACTERS_A_TOKEN for text in texts), False
    return sorted(map(float, counts)), True


def join_text(document: Document) -> str:
    """Returns about the text that the model reads of a document, to count its tokens.

    Token ids become as many characters as such a number of tokens usually has.
    """
    match document:
        case Text(text) | Candidate(text):
            return text
        case Steps(prompt, steps):
            return "\n".join((prompt, *steps))
        case Completion(prompt, completion):
            return prompt + completion
        case Question(question):
            return question if isinstance(question, str) else join_text(question)
        case TokenRow(ids):
            return "x" * round(len(ids) * CHARACTERS_A_TOKEN)
        case Conversation(messages, _, tools):
            parts = [_describe_message(message) for message in messages]
            return "\n".join(
                [*parts, *(json.dumps(tool, ensure_ascii=False, default=str) for tool in tools)]
            )


def _describe_message(message: Mapping[str, Any]) -> str:
    """Writes a message as role and content, or as JSON if it has more (such as tool calls)."""
    if message.keys() <= {"role", "content", "input"} and isinstance(message.get("content"), str):
        return f"{message['role']}\n{message['content']}\n"
    return json.dumps(message, ensure_ascii=False, default=str)


Trained = Literal["full", "lora", "qlora"]
Keys = dict[str, Any]  # of a recipe
FULL: Keys = {"learning_rate": 1e-5}
LORA: Keys = {"use_peft": True, "lora_r": 16, "lora_alpha": 32, "learning_rate": 2e-4}
QLORA: Keys = LORA | {LOAD_KEYS[0]: True}
# Factors on the learning rates above. Methods that compare answers, or learn from completions that
# the model samples, move a trained model only a little.
COMPARING_RATE = 1 / 40
SAMPLING_RATE = 1 / 10
ACCELERATE_CONFIG = "fsdp_full_shard_auto"  # works for every family and any number of GPUs
GLOBAL_BATCH_SIZE = 32  # the largest that is chosen
# The largest of a method that embeds. Its batch is larger: a query is compared with all documents.
PAIRS_OF_STEP = 256
STEPS_AN_EPOCH = 20  # the batch is small enough for this many, if the data allows it
ROWS_TRIED = (8, 4, 2)  # rows of a micro-batch; more rows are faster, if they fit


@dataclass(frozen=True, slots=True)
class Hardware:
    """The hardware that the run will have.

    Sizes are texts with a unit, such as "80GiB"; None if they are not known.
    """

    gpus: int  # 0: the run is on the CPU
    memory: str  # of each GPU; without GPUs, of the machine
    host_memory: str | None = None  # of the machine with the GPUs
    disk: str | None = None

    @property
    def room(self) -> Room:
        """The sizes in bytes, as the plan compares them."""
        host, disk = (
            None if size is None else read_size(size) for size in (self.host_memory, self.disk)
        )
        return Room(read_size(self.memory), host, disk)

    @property
    def ranks(self) -> int:
        """Ranks of the run: one on each GPU, or one on the CPU."""
        return max(1, self.gpus)

    @property
    def words(self) -> str:
        """The hardware in words: "8 GPUs of 80GiB", or "the CPU"."""
        if self.gpus:
            return f"{counted(self.gpus, 'GPU')} of {self.memory}"
        return "the CPU"

    @property
    def flags(self) -> str:
        """The flags that give these sizes to `finetune plan`."""
        sizes = {
            "--gpu-memory": self.memory,
            "--host-memory": self.host_memory,
            "--disk": self.disk,
        }
        return " ".join(f"{flag} {size}" for flag, size in sizes.items() if size is not None)


@dataclass(frozen=True, slots=True)
class Fit:
    """The keys of a recipe that fits the hardware. Returned by `fit_recipe`."""

    keys: Keys
    trained: Trained
    plan: Plan  # of these keys
    need: Need  # bytes that the plan counts
    # (key=value, its disadvantage) of each change that the plan advised to make the recipe fit
    changes: tuple[tuple[str, str], ...]


def fit_recipe(given: Keys, batch_items: float, hardware: Hardware, trained: Trained | None) -> Fit:
    """Chooses recipe keys that fit `hardware` and contain those `given` (such as model and data).

    If `trained` is None, all parameters are trained if that fits without changes, else LoRA. The
    last way to train is also tried with the changes that the plan advises.

    `batch_items`: what `count_batch_items` returned, which bounds the batch size. Raises
    `UserError` if nothing makes the recipe fit.
    """
    candidates = _list_candidates(given, batch_items, hardware, trained)
    for way, keys in candidates:
        plan = _make_plan(keys, hardware)
        need = count_need(plan.spec)
        if need.fits(hardware.room):
            return _widen_micro_batch(Fit(keys, way, plan, need, ()), hardware)
    # `way`, `keys` and `plan` are those of the last candidate
    advice = advise(plan.spec, hardware.room, in_recipe=True)
    return _apply_advice(given, way, keys, advice, hardware)


def _list_candidates(
    given: Keys, batch_items: float, hardware: Hardware, trained: Trained | None
) -> list[tuple[Trained, Keys]]:
    """Lists the ways to train, (what is trained, recipe keys), in the order to try them."""
    method = METHODS[given.get("method", DEFAULT_METHOD)]
    largest_batch = PAIRS_OF_STEP if method.embeds else GLOBAL_BATCH_SIZE
    batch = _choose_batch(batch_items, hardware, largest_batch)
    base = given | {"accelerate_config": ACCELERATE_CONFIG, **batch}
    keys: dict[Trained, Keys] = {"full": base | FULL, "lora": base | LORA, "qlora": base | QLORA}
    if trained is None:
        ways: list[Trained] = ["full", "lora"]
    else:
        ways = [trained]
    rate_factor: float = 1
    if method.compares and method.writes_text:
        rate_factor = COMPARING_RATE
    elif method.samples:
        rate_factor = SAMPLING_RATE
    return [
        (way, keys[way] | {"learning_rate": keys[way]["learning_rate"] * rate_factor})
        for way in ways
    ]


def _apply_advice(given: Keys, way: Trained, keys: Keys, advice: Advice, hardware: Hardware) -> Fit:
    """Changes `keys`, which do not fit, as the plan advises.

    Raises `UserError` if no changes make them fit, or if the changes would train LoRA adapters in
    place of all parameters, for which the person has asked.
    """
    if advice.need.fits_memory(hardware.room):
        raise _too_little_disk(given, advice.need, hardware)
    if advice.changes is None:
        raise _too_little_memory(given, way, advice, hardware)
    # each is key=value
    overrides = [override for change in advice.changes for override in change.text.split()]
    if way == "full" and "use_peft=true" in overrides:
        raise _too_little_memory(given, way, advice, hardware)
    plan = _make_plan(keys, hardware, overrides)
    need = count_need(plan.spec)
    assert need.fits_memory(hardware.room), "the plan fits with the changes that it advises"
    if not need.fits(hardware.room):
        raise _too_little_disk(given, need, hardware)
    changed_names = {override.partition("=")[0] for override in overrides}
    changed_keys = keys | {
        key: value for key, value in to_dict(plan.spec.recipe).items() if key in changed_names
    }
    changes = tuple((change.text, change.cost) for change in advice.changes)
    return Fit(changed_keys, way, plan, need, changes)


def _too_little_memory(given: Keys, way: Trained, advice: Advice, hardware: Hardware) -> UserError:
    """Makes the error for a model that no change of the recipe makes fit the memory."""
    enough = ""
    if advice.ranks:
        enough = f"; {advice.ranks} of them would be enough"
    lora = ""
    if way == "full":
        lora = "; --train lora trains adapters, which need less"
    if hardware.host_memory is None:
        host = ""
    else:
        host = f" with {hardware.host_memory} of host memory"
    model = given["model_name_or_path"]
    return UserError(
        f"{model}: does not fit {hardware.words}{host}, whatever is changed{enough}{lora}"
    )


def _too_little_disk(given: Keys, need: Need, hardware: Hardware) -> UserError:
    """Makes the error for a run that fits the memory and needs more disk than there is."""
    needed = (
        f"{given['model_name_or_path']}: needs {gib(need.disk)} GiB of disk, and there are "
        f"{hardware.disk}"
    )
    return UserError(f"{needed}; make room, or say with --disk how much there will be")


def _choose_batch(batch_items: float, hardware: Hardware, largest: int) -> Keys:
    """Chooses the keys of the batch size: at most `largest`, and at least STEPS_AN_EPOCH steps.

    The size is rounded up to a multiple of the ranks, so that none gets a filler row; that may
    exceed `largest`.
    """
    size = min(largest, max(1, int(batch_items) // STEPS_AN_EPOCH))
    return {"global_batch_size": round_up(size, hardware.ranks), "per_device_train_batch_size": 1}


def _widen_micro_batch(fit: Fit, hardware: Hardware) -> Fit:
    """Returns `fit` with the most rows of ROWS_TRIED in a micro-batch that fit, else unchanged."""
    for rows in ROWS_TRIED:
        if fit.keys["global_batch_size"] % (rows * hardware.ranks):
            continue
        wider = fit.keys | {"per_device_train_batch_size": rows}
        plan = _make_plan(wider, hardware)
        need = count_need(plan.spec)
        if need.fits(hardware.room):
            return replace(fit, keys=wider, plan=plan, need=need)
    return fit


def _make_plan(keys: Keys, hardware: Hardware, overrides: Sequence[str] = ()) -> Plan:
    """Plans a run with these recipe keys; `overrides` (key=value) replace or add keys."""
    recipe = read_recipe(
        None, [*(f"{key}={json.dumps(value)}" for key, value in keys.items()), *overrides]
    )
    sharding = read_sharding(
        None, recipe.run.accelerate_config, {"WORLD_SIZE": str(hardware.ranks)}
    )
    return make_plan(recipe, sharding, hardware.ranks, on_cpu=not hardware.gpus)


COMMENT_COLUMN = 40  # comments of the recipe begin behind this many characters
MIN_LENGTH = 512  # bounds of max_length, in tokens
MAX_LENGTH = 8192
TEXT_LENGTH = 2048  # max_length for plain texts, in tokens
# Keys that have a line of their own, whether the plan changes them or not.
WRITTEN = (
    "accelerate_config",
    "global_batch_size",
    "max_length",
    "per_device_train_batch_size",
    LOAD_KEYS[0],
)


def choose_max_length(data: DataSummary, positions: int | None) -> int:
    """Chooses max_length in tokens: the power of two that holds 99% of the documents.

    It is from MIN_LENGTH to MAX_LENGTH, for plain texts TEXT_LENGTH, and never more than
    `positions`, the positions that the model was made for (None: unbounded).
    """
    if data.format == "text":
        length = TEXT_LENGTH  # longer texts are split, so nothing is lost
    else:
        length = min(MAX_LENGTH, max(MIN_LENGTH, 1 << (data.longest_tokens - 1).bit_length()))
    return length if positions is None else min(length, positions)


def count_batch_items(data: DataSummary, keys: Keys) -> float:
    """Counts what the steps of an epoch draw: prompts, queries, or full rows of packed documents.

    `keys`: the recipe's, with `max_length` and `method`.
    """
    method = METHODS[keys.get("method", DEFAULT_METHOD)]
    if method.samples or method.embeds:
        return data.rows
    row_tokens: int = keys["max_length"] * method.documents
    # The second document of a rated answer is another row's prompt with this answer.
    documents = 2 if method.rows == "ratings" else 1
    return documents * data.rows * data.mean_tokens / row_tokens


def compose_recipe(data: DataSummary, fit: Fit, hardware: Hardware, file: str) -> str:
    """Writes the recipe's YAML. `file`: the recipe's path, for the commands in its first lines."""
    keys = fit.keys
    is_held_out = "eval_split_size" in keys
    method = METHODS[keys.get("method", DEFAULT_METHOD)]
    # `batch_items`: what a step draws global_batch_size of
    if method.samples:
        batch_items = "prompts"
        measured = "reward"
        worsens = "falls"
    else:
        batch_items = "rows"
        measured = "loss"
        worsens = "rises"
    if method.embeds:
        batch_items = "queries with their documents"
    steps = keys["num_train_epochs"] * count_batch_items(data, keys) / keys["global_batch_size"]
    # about ten evaluations and saves in the run; in a long one, after a multiple of 10 steps
    interval = max(1, round(steps / 10, -1 if steps > 200 else 0))
    comments = {
        "eval_split_size": f"rows that are not trained on: their {measured} shows what was learned",
        "chat_template": "in place of the tokenizer's own",
    }
    batch_comments = {
        "max_length": _explain_length(data, keys["max_length"], method),
        "global_batch_size": f"{batch_items} in a step, over all GPUs",
        "per_device_train_batch_size": "rows at once on a GPU: more are faster, and take memory",
        "num_train_epochs": f"watch the held-out {measured}: fewer, where it {worsens}"
        if is_held_out
        else "passes over the data",
    }
    if fit.trained == "full":
        rate_comment = "for all parameters of a trained model"
    else:
        rate_comment = "adapters take ten times the rate of full fine-tuning and more"
    lines = [
        *_describe_head(data, fit, hardware, file),
        *_write_lines(keys, FIRST_LINES),
        *_describe_method(keys),
        *_write_lines(keys, ADAPTER_LINES),
        "",
        *_describe_datasets(data, keys["datasets"][0]),
        *_write_lines(keys, comments),
        "",
        *_write_lines(keys, batch_comments),
        *_describe_advised(fit),
        "",
        *_write_lines(keys, {"learning_rate": rate_comment}),
        _line("warmup_ratio", 0.03),
        "",
        _line("logging_steps", max(1, min(10, int(interval) // 5))),
    ]
    if is_held_out:
        eval_comment = f"steps between two measurements of that {measured}"
        lines.append(_line("eval_steps", int(interval), eval_comment))
    save_comment = "steps between two checkpoints; the newest two are kept"
    lines.append(_line("save_steps", int(interval), save_comment))
    return "\n".join(lines) + "\n"


def plan_command(file: str, hardware: Hardware) -> str:
    """Writes the command that plans the recipe `file` for this hardware."""
    return f"finetune plan --recipe {quote(file)} --num-processes {hardware.ranks} {hardware.flags}"


def launch_command(file: str, hardware: Hardware) -> str:
    """Writes the command that trains the recipe `file` on this hardware."""
    return f"finetune launch --recipe {quote(file)} --num-processes {hardware.ranks}"


def inspect_command(file: str) -> str:
    """Writes the command that shows the data of the recipe `file` as the model will see it."""
    return f"finetune inspect --recipe {quote(file)}"


def _describe_head(data: DataSummary, fit: Fit, hardware: Hardware, file: str) -> Iterator[str]:
    """Yields the comment lines at the recipe's top: what it trains, and the commands for it."""
    if fit.trained == "full":
        trained = "All parameters of"
    else:
        trained = "Adapters (LoRA) for"
    model = fit.keys["model_name_or_path"]
    yield (
        f"# {trained} {model} on {data.source.origin}, for {hardware.words}; written by finetune "
        "init."
    )
    yield f"#   {inspect_command(file)}    # the rows as the model will see them"
    yield f"#   {plan_command(file, hardware)}    # {gib(fit.plan.peak_bytes)} GiB"
    yield f"#   {launch_command(file, hardware)}"


# Keys of a recipe, in the order of their lines -> their comments.
FIRST_LINES = {
    "model_name_or_path": "",
    "accelerate_config": "sharded over all GPUs; accelerate_configs/ has others",
}
ADAPTER_LINES = {
    "use_peft": "train adapters on a frozen model, a hundredth of its parameters or less",
    "lora_r": "their rank: more learns more, and takes more memory",
    "lora_alpha": "they are scaled by lora_alpha / lora_r",
    LOAD_KEYS[0]: "the frozen model in 4 bits (QLoRA)",
}
METHOD_LINES = {
    "added_tokens": "or a token that the tokenizer has",
    "mask_token": "what stands in a masked token's place",
    "labels": "the classes of the first rows; add others",
    "num_negatives": "of each row, beside all others'",
    "teacher_model_name_or_path": "with the same tokenizer",
    "rewards": "what a completion is worth",
}


def _write_lines(keys: Keys, comments: Mapping[str, str]) -> Iterator[str]:
    """Yields the line of each key of `comments` that `keys` have."""
    for key, comment in comments.items():
        if key in keys:
            yield _line(key, keys[key], comment)


def _describe_method(keys: Keys) -> Iterator[str]:
    """Yields the lines of the method and of the keys that it requires; none for the default."""
    if "method" not in keys:
        return
    facts = METHODS[keys["method"]]
    yield from _write_lines(keys, {"method": facts.says, **METHOD_LINES})
    if "rewards" in keys:
        yield (
            "# tools: [my_tools.py:multiply]  # functions that the model may call before it answers"
        )
        yield "# environment: my_game.py:Game  # a world with a state, whose methods are tools"
        if "num_generations" not in facts.defaults:  # else as the plan has it
            yield _line("num_generations", 8, "completions of each prompt, which are compared")
        comment = "tokens; the rest is for the prompt"
        yield from _write_lines(keys, {"max_completion_length": comment})


def list_entry(source: DatasetSource) -> Keys:
    """Lists the keys of a source that differ from their defaults, as an entry of `datasets`."""
    default = DatasetSource()
    values = ((key, getattr(source, key)) for key in source.__slots__)
    return {key: value for key, value in values if value != getattr(default, key)}


def _describe_datasets(data: DataSummary, entry: Keys) -> Iterator[str]:
    """Yields the lines of `datasets`, which has one entry."""
    yield "datasets:"
    (origin_key, origin), *others = entry.items()
    says = RENDERINGS[data.format].says
    columns = list_columns(data.sample[0])
    yield _line(f"  - {origin_key}", origin, f"{data.row_count} with the columns {columns}")
    for key, value in others:
        yield _line(f"    {key}", value, says if key == "type" else "")
    if "type" not in entry:
        yield f"    # recognized as {data.format}: {says}"


def _explain_length(data: DataSummary, max_length: int, method: MethodFacts) -> str:
    """Says what max_length counts, and what happens to longer rows."""
    if method.samples:
        return "tokens of a prompt with its completion; longer prompts are dropped, and counted"
    if not method.writes_text:
        return "tokens of a document; rows with a longer one are dropped, and counted"
    if data.format == "text":
        return "tokens in a row; longer texts are split"
    if method.compares:
        held = f"a row holds {method.documents} times as many"
        counted_tokens = f"tokens of each answer with its prompt ({held})"
    else:
        counted_tokens = "tokens in a row of several examples"
    if data.longest_tokens > max_length:
        return (
            f"{counted_tokens}; some have about {data.longest_tokens:,} and are cut, see finetune "
            "inspect"
        )
    return f"{counted_tokens}; 99% of them have fewer than about {data.longest_tokens:,}"


def _describe_advised(fit: Fit) -> Iterator[str]:
    """Yields the lines of keys that the plan advised, except the WRITTEN, which have lines."""
    for text, cost in fit.changes:
        for override in text.split():
            key = override.partition("=")[0]
            if key not in WRITTEN:
                yield _line(key, fit.keys[key], f"to fit; {cost}")


def _line(key: str, value: Any, comment: str = "") -> str:
    """Writes `key: value` as YAML, with the comment behind it at COMMENT_COLUMN."""
    if isinstance(value, float):
        written = f"{value:g}".replace("e-0", "e-")
    else:
        flow = True if isinstance(value, list) else None
        written = write_yaml(value, width=10**6, default_flow_style=flow)
    # PyYAML ends a bare value with a line of "..."
    text = f"{key}: {written.removesuffix(chr(10)).removesuffix('...').strip()}"
    return f"{text.ljust(COMMENT_COLUMN - 1)} # {comment}" if comment else text
