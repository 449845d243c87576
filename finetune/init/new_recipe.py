"""A first recipe: what the first rows show of the data, what fits the GPUs, and the YAML that says
why.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any, Literal

import yaml

from finetune.config.accelerate_file import read_sharding
from finetune.config.methods import DEFAULT_METHOD, METHODS, MethodFacts, RowKind
from finetune.config.quantization import LOAD_KEYS
from finetune.config.reader import read_recipe, to_dict
from finetune.config.schema import RENDERINGS, Data, DatasetSource
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
from finetune.data.sources import list_files, read_rows
from finetune.errors import UserError
from finetune.plan.advice import Advice, Need, Room, advise, count_need
from finetune.plan.plan import Plan, make_plan
from finetune.units import counted, gib, name_place, read_size

ROWS_READ = 1000  # of a data set, from its beginning
MOST_CLASSES = 100  # more are no classes, but texts
MOST_NEGATIVES = 4  # of each row: each is one more document to compute
CHARACTERS_A_TOKEN = 3.0  # English has some 4; code, numbers and other languages fewer
TEMPLATE_TOKENS = 16  # around the turns of a row
COLUMN_KEY = "(messages|prompt|completion|text|chosen|rejected|label)_column"


@dataclass(frozen=True, slots=True)
class DataSummary:
    """A data set as far as its first rows show it. Returned by `summarize_data`."""

    source: DatasetSource  # with the columns that a recipe has to name
    format: str  # messages, sharegpt, alpaca, prompt_completion or text
    columns: tuple[str, ...]
    rows: int  # in all, where `is_counted`; else those that were read
    is_counted: bool
    longest_tokens: int  # of all but the longest hundredth of the rows
    mean_tokens: float  # of a row
    is_tokenized: bool  # counted by the model's tokenizer; else guessed from characters
    kind: RowKind = "answers"
    labels: Names = ()  # the classes of the rows that were read
    num_negatives: int = 0  # that each row of retrieval has, at most MOST_NEGATIVES
    sample: tuple[dict[str, Any], ...] = ()  # the rows that were read


def read_first_rows(source: DatasetSource) -> tuple[list[dict[str, Any]], list[str], int]:
    """Returns (the first rows of `source` that can be read, the place of each, how many were
    taken).

    Raises `UserError` where there are none.
    """
    rows: list[dict[str, Any]] = []
    places: list[str] = []
    bad: list[str] = []
    taken = 0
    for batch in read_rows(source, streaming=True):
        for number, row in zip(batch.numbers, batch.rows, strict=True):
            place = name_place(batch.file, number)
            bad += [f"{place}: {row}"] if isinstance(row, BadRow) else []
            rows += [row] if not isinstance(row, BadRow) else []
            places += [place] if not isinstance(row, BadRow) else []
            taken += 1
        if taken >= ROWS_READ:
            break
    if not rows:
        raise UserError(bad[0] if bad else f"{source.origin}: has no rows")
    return rows[:ROWS_READ], places[:ROWS_READ], taken


def summarize_data(
    source: DatasetSource,
    rows: list[dict[str, Any]],
    places: list[str],
    taken: int,
    kind: RowKind,
    model: str,
) -> DataSummary:
    """Summarizes the first rows of `source`.

    Args:
        source: With the columns that a recipe has to name.
        rows: Those that were read.
        places: Of each, for messages.
        taken: How many were taken for them, bad ones included.
        kind: What the method reads of them.
        model: A tokenizer in this folder counts their tokens.

    Raises:
        UserError: A row does not have the columns.
    """
    labels: Names = ()
    if kind == "classes":
        labels = list_labels(rows, source)
    data = Data(labels=labels)
    read = [_read(row, place, source, kind, data) for row, place in zip(rows, places, strict=True)]
    documents = [document for row in read for group in row.groups for document in group.documents]
    files = () if source.function else list_files(source)
    lengths, is_tokenized = count_tokens(documents, Path(model))
    return DataSummary(
        source=source,
        format=read[0].rendering,
        columns=tuple(map(str, rows[0])),
        rows=taken if taken < ROWS_READ else _count_rows(files, taken),
        is_counted=taken < ROWS_READ or bool(files),
        longest_tokens=int(lengths[int(0.99 * (len(lengths) - 1))]) + TEMPLATE_TOKENS,
        mean_tokens=(sum(lengths) / len(lengths) + TEMPLATE_TOKENS) * len(documents) / len(rows),
        is_tokenized=is_tokenized,
        kind=kind,
        labels=labels,
        num_negatives=_count_negatives(rows, source) if kind == "retrieval" else 0,
        sample=tuple(rows),
    )


def find_kind(row: Mapping[str, Any], source: DatasetSource) -> RowKind:
    """Returns the kind of a row: a pair of answers, a rated answer, a query with its document, a
    text with its class, or answers.

    Columns that a person names are answers.
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
    """The classes of rows: their names in order, or places from 0 as text.

    Raises `UserError` where a row has none, or there are too many for classes.
    """
    name = source.label_column or LABEL
    values = {row.get(name) for row in rows if isinstance(row.get(name), str | int)}
    if not values:
        raise UserError(
            f"{source.origin}: {name}: no class; its columns are {list_columns(rows[0])}, and "
            "--label-column names the one of the class"
        )
    if len(values) > MOST_CLASSES:
        raise UserError(
            f"{source.origin}: {name}: {len(values):,} classes in {len(rows):,} rows; is it the "
            "column of the class? --label-column names another"
        )
    places = [value for value in values if isinstance(value, int)]
    if len(places) == len(values) and min(places) >= 0:
        return tuple(str(place) for place in range(max(places) + 1))
    return tuple(sorted(map(str, values)))


def _count_negatives(rows: Sequence[Mapping[str, Any]], source: DatasetSource) -> int:
    """Counts the negatives of a row, up to MOST_NEGATIVES."""
    count = 0
    with suppress(BadRow):
        for number in range(1, MOST_NEGATIVES + 1):
            for row in rows:
                parse_retrieval(row, source, Data(num_negatives=number))
            count = number
    return count


def _read(
    row: Mapping[str, Any], place: str, source: DatasetSource, kind: RowKind, data: Data
) -> ParsedRow:
    try:
        return READERS[kind](rewrite_row(row, source), source, data)
    except BadRow as error:
        raise UserError(f"{place}: {name_flags(str(error))}") from None


def name_flags(text: str) -> str:
    """A message on a recipe's keys in the words of `finetune init`.

    >>> name_flags("to train on the chosen answers alone, set completion_column: chosen")
    'to train on the chosen answers alone, pass --completion-column chosen'
    """
    text = re.sub(rf"(?:set )?\b{COLUMN_KEY}: (\w+)", r"pass --\1-column \2", text)
    return re.sub(rf"\b{COLUMN_KEY}\b", r"--\1-column", text)


def count_tokens(documents: Sequence[Document], model: Path) -> tuple[list[float], bool]:
    """Returns (the tokens of each document from the shortest on, whether the tokenizer in the
    folder `model` has counted them).

    Without one they are guessed from the characters. What a chat template adds is not counted.
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
    except (
        Exception
    ):  # tokenizers raises no class of its own; launch says what is wrong with the file
        return sorted(len(text) / CHARACTERS_A_TOKEN for text in texts), False
    return sorted(map(float, counts)), True


def join_text(document: Document) -> str:
    """About the text that a model reads of a document."""
    match document:
        case Text(text) | Candidate(text):
            return text
        case Steps(prompt, steps):
            return "\n".join((prompt, *steps))
        case Completion(prompt, completion):
            return prompt + completion
        case Question(asked):
            return asked if isinstance(asked, str) else join_text(asked)
        case TokenRow(ids):
            return "x" * round(len(ids) * CHARACTERS_A_TOKEN)
        case Conversation(messages, _, tools):
            parts = [_describe_message(message) for message in messages]
            return "\n".join(
                [*parts, *(json.dumps(tool, ensure_ascii=False, default=str) for tool in tools)]
            )


def _describe_message(message: Mapping[str, Any]) -> str:
    if message.keys() <= {"role", "content", "input"} and isinstance(message.get("content"), str):
        return f"{message['role']}\n{message['content']}\n"
    return json.dumps(message, ensure_ascii=False, default=str)


def _count_rows(files: Sequence[str], taken: int) -> int:
    """All rows of local files; of a data set of the hub or a function, those that were read."""
    from finetune.data.sources import count_rows

    if files:
        return sum(count_rows(file, Path(file).stat().st_mtime_ns) for file in files)
    return taken


Trained = Literal["full", "lora", "qlora"]
Keys = dict[str, Any]
FULL: Keys = {"learning_rate": 1e-5}
LORA: Keys = {"use_peft": True, "lora_r": 16, "lora_alpha": 32, "learning_rate": 2e-4}
QLORA: Keys = LORA | {LOAD_KEYS[0]: True}
# of the usual rate: a method that compares answers moves a trained model a little
COMPARING_RATE = 1 / 40
SAMPLING_RATE = 1 / 10  # and one that learns from what it samples
ACCELERATE_CONFIG = "fsdp_full_shard_auto"  # every family, any number of GPUs
GLOBAL_BATCH_SIZE = 32  # at most
PAIRS_OF_STEP = 256  # at most, of a method that embeds: a query is compared with all of them
STEPS_AN_EPOCH = 20  # at least, where the data allows it
ROWS_TRIED = (8, 4, 2)  # of a micro-batch: more rows are faster, where they fit


@dataclass(frozen=True, slots=True)
class Hardware:
    """The hardware that the run will have.

    `memory`: of each GPU, or of the machine where there is none. Sizes as they are written: 80GiB;
    None where they are not known.
    """

    gpus: int
    memory: str
    host_memory: str | None = None  # of the machine with the GPUs
    disk: str | None = None

    @property
    def room(self) -> Room:
        """The same in bytes."""
        host, disk = (
            None if size is None else read_size(size) for size in (self.host_memory, self.disk)
        )
        return Room(read_size(self.memory), host, disk)

    @property
    def ranks(self) -> int:
        return max(1, self.gpus)

    @property
    def words(self) -> str:
        if self.gpus:
            return f"{counted(self.gpus, 'GPU')} of {self.memory}"
        return "the CPU"

    @property
    def flags(self) -> str:
        """The flags that give `finetune plan` these sizes."""
        sizes = {
            "--gpu-memory": self.memory,
            "--host-memory": self.host_memory,
            "--disk": self.disk,
        }
        return " ".join(f"{flag} {size}" for flag, size in sizes.items() if size is not None)


@dataclass(frozen=True, slots=True)
class Fit:
    """A recipe that fits. Returned by `fit_recipe`."""

    keys: Keys  # the given ones, and those that make it fit
    trained: Trained
    plan: Plan
    need: Need
    changes: tuple[tuple[str, str], ...]  # key=value and its cost, which the plan advised


def fit_recipe(given: Keys, packed_rows: float, hardware: Hardware, trained: Trained | None) -> Fit:
    """The keys that train `given` (model, data, max_length, method) on `hardware`: what `trained`
    says, else all parameters where that fits as it is, else LoRA. `packed_rows`: full rows of
    max_length tokens in the data.

    Raises `UserError` where nothing makes it fit.
    """
    candidates = _list_candidates(given, packed_rows, hardware, trained)
    for chosen, keys in candidates:
        plan = _plan(keys, hardware)
        need = count_need(plan.spec)
        if need.fits(hardware.room):
            return _widen(Fit(keys, chosen, plan, need, ()), hardware)
    chosen, keys = candidates[-1]
    advice = advise(plan.spec, hardware.room, in_recipe=True)
    return _change(given, chosen, keys, advice, hardware)


def _list_candidates(
    given: Keys, packed_rows: float, hardware: Hardware, trained: Trained | None
) -> list[tuple[Trained, Keys]]:
    """The keys of each way to train that may be taken, in the order in which they are tried."""
    method = METHODS[given.get("method", DEFAULT_METHOD)]
    most = PAIRS_OF_STEP if method.embeds else GLOBAL_BATCH_SIZE
    batch = _choose_batch(packed_rows, hardware, most)
    base = given | {"accelerate_config": ACCELERATE_CONFIG, **batch}
    ways: dict[Trained, Keys] = {"full": base | FULL, "lora": base | LORA, "qlora": base | QLORA}
    if trained is None:
        tried: list[Trained] = ["full", "lora"]
    else:
        tried = [trained]
    share: float = 1
    if method.compares and method.writes_text:
        share = COMPARING_RATE
    elif method.samples:
        share = SAMPLING_RATE
    return [
        (way, ways[way] | {"learning_rate": ways[way]["learning_rate"] * share}) for way in tried
    ]


def _change(given: Keys, chosen: Trained, keys: Keys, advice: Advice, hardware: Hardware) -> Fit:
    """The keys with the changes that make them fit. Raises `UserError` where nothing does."""
    if advice.need.fits_memory(hardware.room):
        raise _too_little_disk(given, advice.need, hardware)
    if advice.changes is None:
        raise _too_little_memory(given, chosen, advice, hardware)
    # key=value each
    overrides = [text for change in advice.changes for text in change.text.split()]
    if chosen == "full" and "use_peft=true" in overrides:
        raise _too_little_memory(given, chosen, advice, hardware)
    plan = _plan(keys, hardware, overrides)
    after = count_need(plan.spec)
    assert after.fits_memory(hardware.room), "the plan fits with the changes that it advises"
    if not after.fits(hardware.room):
        raise _too_little_disk(given, after, hardware)
    names = {text.partition("=")[0] for text in overrides}
    changed = keys | {
        key: value for key, value in to_dict(plan.spec.recipe).items() if key in names
    }
    return Fit(
        changed, chosen, plan, after, tuple((change.text, change.cost) for change in advice.changes)
    )


def _too_little_memory(
    given: Keys, chosen: Trained, advice: Advice, hardware: Hardware
) -> UserError:
    enough = ""
    if advice.ranks:
        enough = f"; {advice.ranks} of them would be enough"
    lora = ""
    if chosen == "full":
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
    needed = (
        f"{given['model_name_or_path']}: needs {gib(need.disk)} GiB of disk, and there are "
        f"{hardware.disk}"
    )
    return UserError(f"{needed}; make room, or say with --disk how much there will be")


def _choose_batch(packed_rows: float, hardware: Hardware, most: int) -> Keys:
    """The rows in a step: an epoch has some steps, and no rank gets a filler row."""
    size = min(most, max(1, int(packed_rows) // STEPS_AN_EPOCH))
    return {"global_batch_size": round_up(size, hardware.ranks), "per_device_train_batch_size": 1}


def _widen(fit: Fit, hardware: Hardware) -> Fit:
    """The same with more rows in a micro-batch, where they fit."""
    for rows in ROWS_TRIED:
        if fit.keys["global_batch_size"] % (rows * hardware.ranks):
            continue
        wider = fit.keys | {"per_device_train_batch_size": rows}
        plan = _plan(wider, hardware)
        need = count_need(plan.spec)
        if need.fits(hardware.room):
            return replace(fit, keys=wider, plan=plan, need=need)
    return fit


def _plan(keys: Keys, hardware: Hardware, overrides: Sequence[str] = ()) -> Plan:
    recipe = read_recipe(
        None, [*(f"{key}={json.dumps(value)}" for key, value in keys.items()), *overrides]
    )
    sharding = read_sharding(
        None, recipe.run.accelerate_config, {"WORLD_SIZE": str(hardware.ranks)}
    )
    return make_plan(recipe, sharding, hardware.ranks, on_cpu=not hardware.gpus)


COMMENT_COLUMN = 40
MIN_LENGTH = 512
MAX_LENGTH = 8192
TEXT_LENGTH = 2048  # tokens
# whatever is changed
WRITTEN = ("accelerate_config", "global_batch_size", "max_length", "per_device_train_batch_size")


def choose_max_length(data: DataSummary, positions: int | None) -> int:
    """Tokens in a row: the power of two that holds all but the longest rows.

    `positions`: what the model can read.
    """
    if data.format == "text":
        length = TEXT_LENGTH  # longer texts are split, none is cut
    else:
        length = min(MAX_LENGTH, max(MIN_LENGTH, 1 << (data.longest_tokens - 1).bit_length()))
    return length if positions is None else min(length, positions)


def compose_recipe(data: DataSummary, fit: Fit, hardware: Hardware, file: str) -> str:
    """The whole text. `file`: its name, for the commands in its first lines."""
    keys = fit.keys
    is_held_out = "eval_split_size" in keys
    method = METHODS[keys.get("method", DEFAULT_METHOD)]
    samples = method.samples
    drawn, measured, worse = (
        ("prompts", "reward", "falls") if samples else ("rows", "loss", "rises")
    )
    if method.embeds:
        drawn = "queries with their documents"
    # of what a step draws
    if samples or method.embeds:
        an_epoch = data.rows
    else:
        an_epoch = data.rows * data.mean_tokens / keys["max_length"]
    steps = keys["num_train_epochs"] * an_epoch / keys["global_batch_size"]
    every = max(1, round(steps / 10, -1 if steps > 200 else 0))
    lines = [
        *_head(data, fit, hardware, file),
        _line("model_name_or_path", keys["model_name_or_path"]),
        _line(
            "accelerate_config",
            keys["accelerate_config"],
            "sharded over all GPUs; accelerate_configs/ has others",
        ),
        *_method(fit),
        *_trained(fit),
        "",
        *_datasets(data),
        *(
            [
                _line(
                    "eval_split_size",
                    keys["eval_split_size"],
                    f"rows that are not trained on: their {measured} shows what was learned",
                )
            ]
            if is_held_out
            else []
        ),
        *(
            [_line("chat_template", keys["chat_template"], "in place of the tokenizer's own")]
            if "chat_template" in keys
            else []
        ),
        "",
        _line("max_length", keys["max_length"], _about_length(data, keys["max_length"], method)),
        _line("global_batch_size", keys["global_batch_size"], f"{drawn} in a step, over all GPUs"),
        _line(
            "per_device_train_batch_size",
            keys["per_device_train_batch_size"],
            "rows at once on a GPU: more are faster, and take memory",
        ),
        _line(
            "num_train_epochs",
            keys["num_train_epochs"],
            f"watch the held-out {measured}: fewer, where it {worse}"
            if is_held_out
            else "passes over the data",
        ),
        *_advised(fit),
        "",
        _line(
            "learning_rate",
            keys["learning_rate"],
            "for all parameters of a trained model"
            if fit.trained == "full"
            else "adapters take ten times the rate of full fine-tuning and more",
        ),
        _line("warmup_ratio", 0.03),
        "",
        _line("logging_steps", max(1, min(10, int(every) // 5))),
        *(
            [_line("eval_steps", int(every), f"steps between two measurements of that {measured}")]
            if is_held_out
            else []
        ),
        _line("save_steps", int(every), "steps between two checkpoints; the newest two are kept"),
    ]
    return "\n".join(lines) + "\n"


def plan_command(file: str, hardware: Hardware) -> str:
    return f"finetune plan --recipe {quote(file)} --num-processes {hardware.ranks} {hardware.flags}"


def launch_command(file: str, hardware: Hardware) -> str:
    return f"finetune launch --recipe {quote(file)} --num-processes {hardware.ranks}"


def inspect_command(file: str) -> str:
    return f"finetune inspect --recipe {quote(file)}"


def _head(data: DataSummary, fit: Fit, hardware: Hardware, file: str) -> Iterator[str]:
    if fit.trained == "full":
        what = "All parameters of"
    else:
        what = "Adapters (LoRA) for"
    yield (
        f"# {what} {fit.keys['model_name_or_path']} on {data.source.origin}, for {hardware.words}; "
        "written by finetune init."
    )
    yield f"#   {inspect_command(file)}    # the rows as the model will see them"
    yield f"#   {plan_command(file, hardware)}    # {gib(fit.plan.peak_bytes)} GiB"
    yield f"#   {launch_command(file, hardware)}"


METHOD_LINES = {
    "labels": "the classes of the first rows; add others",
    "num_negatives": "of each row, beside all others'",
    "teacher_model_name_or_path": "with the same tokenizer",
}


def _method(fit: Fit) -> Iterator[str]:
    """Returns the keys of the method, where the model learns from more than answers."""
    method = fit.keys.get("method")
    if method is not None:
        yield _line("method", method, METHODS[method].says)
    if "mask_token" in fit.keys:
        yield _line("added_tokens", fit.keys["added_tokens"], "or a token that the tokenizer has")
        yield _line("mask_token", fit.keys["mask_token"], "what stands in a masked token's place")
    for key, says in METHOD_LINES.items():
        if key in fit.keys:
            yield _line(key, fit.keys[key], says)
    if "rewards" in fit.keys:
        yield _line("rewards", fit.keys["rewards"], "what a completion is worth")
        yield (
            "# tools: [my_tools.py:multiply]  # functions that the model may call before it answers"
        )
        yield "# environment: my_game.py:Game  # a world with a state, whose methods are tools"
        yield _line("num_generations", 8, "completions of each prompt, which are compared")
        yield _line(
            "max_completion_length",
            fit.keys["max_completion_length"],
            "tokens; the rest is for the prompt",
        )


def _trained(fit: Fit) -> Iterator[str]:
    if fit.trained != "full":
        yield _line(
            "use_peft",
            True,
            "train adapters on a frozen model, a hundredth of its parameters or less",
        )
        yield _line(
            "lora_r", fit.keys["lora_r"], "their rank: more learns more, and takes more memory"
        )
        yield _line("lora_alpha", fit.keys["lora_alpha"], "they are scaled by lora_alpha / lora_r")
    if fit.trained == "qlora":
        yield _line(LOAD_KEYS[0], True, "the frozen model in 4 bits (QLoRA)")


def _datasets(data: DataSummary) -> Iterator[str]:
    source = data.source
    if data.is_counted:
        rows = counted(data.rows, "row")
    else:
        rows = f"more than {counted(data.rows, 'row')}"
    yield "datasets:"
    named = "function" if source.function else "path"
    yield _line(
        f"  - {named}", source.origin, f"{rows} with the columns {list_columns(data.columns)}"
    )
    default = DatasetSource(path="")
    for key in source.__slots__[2:]:  # all but path and function
        if (value := getattr(source, key)) != getattr(default, key):
            yield _line(f"    {key}", value, RENDERINGS[data.format].says if key == "type" else "")
    if source.type is None:
        yield f"    # recognized as {data.format}: {RENDERINGS[data.format].says}"


def _about_length(data: DataSummary, max_length: int, method: MethodFacts) -> str:
    if method.samples:
        return "tokens of a prompt with its completion; longer prompts are dropped, and counted"
    if not method.writes_text:
        return "tokens of a document; rows with a longer one are dropped, and counted"
    if data.format == "text":
        return "tokens in a row; longer texts are split"
    if data.longest_tokens > max_length:
        return (
            f"tokens in a row; some have about {data.longest_tokens:,} and are cut, see finetune "
            "inspect"
        )
    return (
        "tokens in a row of several examples; 99% of them have fewer than about "
        f"{data.longest_tokens:,}"
    )


def _advised(fit: Fit) -> Iterator[str]:
    """Returns the keys that the plan changed, beside those that are written anyway."""
    for text, cost in fit.changes:
        for change in text.split():
            key = change.partition("=")[0]
            if key not in WRITTEN:
                yield _line(key, fit.keys[key], f"to fit; {cost}")


def _line(key: str, value: Any, comment: str = "") -> str:
    """`key: value`, with a comment in the column of all comments."""
    if isinstance(value, float):
        written = f"{value:g}".replace("e-0", "e-")
    else:
        flow = True if isinstance(value, list) else None
        written = yaml.safe_dump(value, width=10**6, allow_unicode=True, default_flow_style=flow)
    text = f"{key}: {written.removesuffix(chr(10)).removesuffix('...').strip()}"
    return f"{text.ljust(COMMENT_COLUMN - 1)} # {comment}" if comment else text
