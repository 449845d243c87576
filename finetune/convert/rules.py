"""How a file of another tool becomes ours: values kind by kind, several keys together, entries of data sets."""

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from finetune.config.methods import METHODS
from finetune.config.optimization import OPTIMIZERS, convert_optimizer
from finetune.config.quantization import QLORA
from finetune.config.schema import recipe_keys
from finetune.convert.counterparts import DATA_SET_KEYS, NOTES, Counterpart, Tool, list_counterparts
from finetune.convert.foreign_values import convert_number, read_number, shorten
from finetune.errors import UserError

DIONS_MUON = (
    "under FSDP Microsoft's there: updates times the root of rows / columns, other coefficients, and no Nesterov "
    "momentum"
)
DOWNLOAD = re.compile(r"tune download (\S+).*?--output-dir (\S+)")


@dataclass(slots=True)
class Conversion:
    """The recipe made from a file of `tool`, and what to report about it."""

    tool: Tool
    recipe: dict[str, Any] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)  # what this recipe does otherwise, or not at all
    remarks: list[str] = field(default_factory=list)  # converted, but worth a look
    ignored: list[str] = field(default_factory=list)  # keys without effect here
    to_do: list[str] = field(default_factory=list)  # what must be set or written before the recipe can train
    accelerate_file: str | None = None  # the text of one to write beside the recipe, where no shipped one does it
    images: str | None = None  # the model_type of the whole model, where the file trains on images
    missing_capabilities: list[str] = field(default_factory=list)  # those behind some of the differences

    def add_difference(self, key: str, value: Any, note: str, missing_capability: str = "") -> None:
        """Reports that their `key: value` works differently here, or needs a capability that is missing."""
        if missing_capability and missing_capability not in self.missing_capabilities:
            self.missing_capabilities.append(missing_capability)
        line, end = f"{key}: {shorten(value)}", f"   ({note})"
        same = next((i for i, other in enumerate(self.differences) if other.endswith(end)), None)
        if same is None:
            self.differences.append(line + end)
        else:  # one reason, one line
            self.differences[same] = f"{self.differences[same].removesuffix(end)}, {line}{end}"


def adapt_tool(settings: Mapping[str, Any], text: str, conversion: Conversion) -> None:
    """Adds what only several keys together determine; `text` is the file with its comments."""
    rules = {"Axolotl": _adapt_axolotl, "torchtune": _adapt_torchtune, "Automodel": _adapt_automodel}
    if conversion.tool in rules:
        rules[conversion.tool](settings, text, conversion)
    decays_all = conversion.tool in ("torchtune", "Automodel") or settings.get("use_muon")
    if decays_all and not conversion.recipe.get("use_peft") and conversion.recipe.get("weight_decay"):
        conversion.remarks.append("weight_decay: norms and biases are decayed too there, matrices alone here")


def _adapt_axolotl(settings: Mapping[str, Any], text: str, conversion: Conversion) -> None:
    total, micro = settings.get("batch_size"), settings.get("micro_batch_size") or 1
    if isinstance(total, int) and isinstance(micro, int) and "gradient_accumulation_steps" not in settings:
        conversion.recipe["gradient_accumulation_steps"] = max(1, total // micro)
    for per_epoch, ours in (("saves_per_epoch", "save_steps"), ("evals_per_epoch", "eval_steps")):
        events, epochs = convert_number(settings.get(per_epoch)), convert_number(settings.get("num_epochs") or 1)
        if isinstance(events, int | float) and isinstance(epochs, int | float) and events * epochs > 1:
            conversion.recipe[ours] = 1 / (events * epochs)  # else at the end only, there too
    if settings.get("pretraining_dataset"):
        conversion.recipe["streaming"] = True
    optim = conversion.recipe.get("optim")
    if optim and OPTIMIZERS[optim].count_matrix and ("fsdp_config" in settings or settings.get("fsdp")):
        conversion.add_difference("optimizer", optim, DIONS_MUON)
    elif optim and OPTIMIZERS[optim].count_matrix and not conversion.recipe.get("use_peft"):
        conversion.add_difference("optimizer", optim, "norms and biases are not trained there")


def _adapt_torchtune(settings: Mapping[str, Any], text: str, conversion: Conversion) -> None:
    model = read_section(settings, "model")
    folder = str(read_section(settings, "checkpointer").get("checkpoint_dir") or "")
    downloaded = {local.rstrip("/"): hub for hub, local in DOWNLOAD.findall(text)}
    conversion.recipe["model_name_or_path"] = downloaded.get(folder.rstrip("/"), folder)
    if folder.rstrip("/") in downloaded:
        conversion.remarks.append(
            f"checkpointer.checkpoint_dir: {shorten(folder)}   (downloaded there from this hub name, says the file)"
        )
    if "teacher_model" in settings:
        teacher = str(read_section(settings, "teacher_checkpointer").get("checkpoint_dir") or "").rstrip("/")
        conversion.recipe["teacher_model_name_or_path"] = downloaded.get(teacher, teacher)
    if "lora_attn_modules" in model:
        layers = model["lora_attn_modules"]
        layers = [*layers, "w1", "w3", "w2"] if model.get("apply_lora_to_mlp") and isinstance(layers, list) else layers
        conversion.recipe |= {"use_peft": True, "lora_target_modules": convert_targets(layers)}
    if "qlora_" in str(model.get("_component_")):
        conversion.recipe |= QLORA
        conversion.remarks.append(f"model._component_: {shorten(model['_component_'])}   ({NOTES['NF4_OF_TORCHAO']})")
    if read_section(settings, "optimizer"):
        conversion.recipe.setdefault("weight_decay", 0.01)  # torch's AdamW
    per_epoch = settings.get("max_steps_per_epoch")
    if isinstance(per_epoch, int) and isinstance(settings.get("epochs", 1), int):
        conversion.recipe["max_steps"] = per_epoch * settings.get("epochs", 1)
    if settings.get("shuffle") is False:
        conversion.add_difference("shuffle", False, IN_ORDER)
    alpha = conversion.recipe.get("lora_alpha")
    if isinstance(alpha, float) and alpha.is_integer():
        conversion.recipe["lora_alpha"] = int(alpha)


def _adapt_automodel(settings: Mapping[str, Any], text: str, conversion: Conversion) -> None:
    optimizer, schedule = read_section(settings, "optimizer"), settings.get("lr_scheduler")
    if teacher := read_section(settings, "teacher_model").get("pretrained_model_name_or_path"):
        conversion.recipe["teacher_model_name_or_path"] = teacher
    recipe = conversion.recipe
    is_adam = str(optimizer.get("_target_")).endswith(".Adam")
    recipe.setdefault("weight_decay", 0.0 if is_adam else 0.01)
    recipe.setdefault("learning_rate", 1e-3)
    if isinstance(schedule, dict):
        recipe.setdefault("lr_scheduler_type", "cosine")
        if "lr_warmup_steps" not in schedule:
            recipe["warmup_ratio"] = 0.1
            conversion.remarks.append(
                "lr_scheduler.lr_warmup_steps: null   (a tenth of the steps, but at most 1000 there)"
            )
        conversion.remarks.append("warm-up: from a tenth of the rate there, from 0 here")
        recipe.setdefault("min_lr_ratio", 0.01)
        min_lr = convert_number(schedule.get("min_lr"))
        if (
            isinstance(min_lr, float | int) and isinstance(recipe["learning_rate"], float) and recipe["learning_rate"]
        ):  # the schedule may come before the rate in the file
            recipe["min_lr_ratio"] = round(min(1.0, min_lr / recipe["learning_rate"]), 9)
    if read_section(settings, "dataloader").get("shuffle") is False:
        conversion.add_difference("dataloader.shuffle", False, IN_ORDER)
    packed, dataset = read_section(settings, "packed_sequence"), read_section(settings, "dataset")
    size, is_cut = packed.get("packed_sequence_size") or 0, dataset.get("truncation") not in NOT_CUT
    length = dataset.get("seq_length") if is_cut else None  # else it is the length of padding
    if size:
        overlength = "drop" if packed.get("drop_long_samples", True) else "error"
        recipe |= {"packing": True, "max_length": size, "overlength": overlength}
    elif length:
        recipe["max_length"] = length
    if size and length and length < size:
        conversion.add_difference(
            "dataset.seq_length", length, "a row is cut to it before it is packed there, to max_length here"
        )
    if any("bfloat16" in str(optimizer.get(key)) for key in ("exp_avg_dtype", "exp_avg_sq_dtype")):
        recipe["optim"] = next(name for name, row in OPTIMIZERS.items() if row.moment_itemsize)
    if "max_steps" in recipe and "num_train_epochs" not in recipe:
        recipe["num_train_epochs"] = 1.0  # max_steps decides
    if settings.get("wandb") and read_section(settings, "wandb").get("enable", True):
        recipe["report_to"] = "wandb"


NOT_CUT = (None, False, "do_not_truncate")
IN_ORDER = "rows are trained on in their order there, shuffled with the seed here"
SCHEDULES = {
    "cosine": "cosine", "cosine_with_min_lr": "cosine", "linear": "linear", "constant": "constant",
    "wsd": "warmup_stable_decay",
    "constant_with_warmup": "constant", "get_cosine_schedule_with_warmup": "cosine", "polynomial": "polynomial",
    "inverse_sqrt": "inverse_sqrt", "warmup_stable_decay": "warmup_stable_decay",
}  # fmt: skip
TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
ATTENTION = {"fa2": "flash_attention_2", "sdpa": "sdpa", "disabled": "eager", "auto": "auto"}
OVERLENGTH = {"drop": "drop", "truncate": "truncate", "raise": "error"}
DTYPES = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32"}
TORCHTUNE_LAYERS = {"output_proj": "o_proj", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
LINEAR_LAYERS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "self_attn"),
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "mlp"),
}

STRATEGIES = {"eval_strategy": ("no", "epoch"), "save_strategy": ("no", "epoch", "best")}

LEAVE: Any = object()  # the default here does what they ask for


def read_section(settings: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The mapping under `key`; empty where there is none."""
    section = settings.get(key)
    return section if isinstance(section, dict) else {}


def convert_names(value: Any) -> list[str] | None:
    """A list of names, which may be written with commas between them.

    >>> convert_names("<a>, <b>"), convert_names(["<a>"]), convert_names(3)
    (['<a>', '<b>'], ['<a>'], None)
    """
    names = value.split(",") if isinstance(value, str) else value
    return [str(name).strip() for name in names] if isinstance(names, list) else None


def convert_targets(value: Any) -> Any:
    """The layers that get adapters, by our names for them; patterns are matched with the layers of a Llama.

    >>> convert_targets(["*.q_proj", "output_proj"]), convert_targets(r"model.layers.[\\d]+.mlp.(up|down)_proj")
    (['q_proj', 'o_proj'], ['up_proj', 'down_proj'])
    """
    if not isinstance(value, str | list):
        return None
    names = [str(name).strip() for name in (value.split(",") if isinstance(value, str) else value)]
    names = [TORCHTUNE_LAYERS.get(name, name) for name in names]
    if any(name in ("all", "all-linear", "*", "*_proj", "linear") for name in names):
        return "all-linear"
    plain: list[str] = []
    for name in names:
        plain += [name] if re.fullmatch(r"[\w.]+", name) else _matching_layers(name)
    return list(dict.fromkeys(plain)) or None


def _matching_layers(pattern: str) -> list[str]:
    dotted = {
        layer: [f"{start}layers.0.{block}.{layer}" for start in ("model.", "model.language_model.", "")]
        for layer, block in LINEAR_LAYERS.items()
    }
    if re.fullmatch(r"[\w.*]+", pattern):
        return [layer for layer, names in dotted.items() if any(fnmatch.fnmatch(name, pattern) for name in names)]
    try:
        return [layer for layer, names in dotted.items() if any(re.fullmatch(pattern, name) for name in names)]
    except re.error:
        return []


def _convert_patterns(value: Any) -> list[str] | None:
    """Axolotl's regular expressions for the start of a parameter's name; None where one names a range of rows.

    >>> patterns = ["^lm_head.weight$", r"model.layers.4[4-7]+.mlp"]
    >>> _convert_patterns(patterns), _convert_patterns(["lm_head.weight[:32000]"])
    (['lm_head.weight', 'model.layers.4[4-7]+.mlp'], None)
    """
    if not isinstance(value, list) or any(re.search(r"\[\d*:\d*\]$", str(pattern)) for pattern in value):
        return None
    return [str(pattern).removeprefix("^").removesuffix("$") for pattern in value]


def _convert_attention(value: Any) -> Any:
    if isinstance(value, bool):
        return "sdpa" if value else LEAVE
    if value == "xformers" or "/" in str(value):  # a kernel of the hub
        return LEAVE  # exact attention, as every one here
    name = ATTENTION.get(str(value), str(value))
    return name if name in get_args(get_args(recipe_keys()["attn_implementation"].annotation)[0]) else None


def _convert_tracker(pair: Counterpart, value: Any) -> Any:
    by_key = next((tracker for tracker in TRACKERS if tracker in pair.key), None)
    if by_key is not None:
        return by_key if value else LEAVE
    names = [str(name) for name in (value if isinstance(value, list) else [value])]
    wanted = [tracker for tracker in TRACKERS for name in names if tracker in name.lower()]
    return wanted[0] if wanted else LEAVE


def _convert_steps(key: str, value: Any) -> Any:
    number = read_number(key, value, "100") if value else 0
    is_share = isinstance(number, float) and 0 < number < 1
    return number if is_share else LEAVE if not number or number < 0 else int(number)


def _convert_parameters(value: Any) -> list[str] | None:
    names = convert_names(value)  # a tool's wrapper, which has no place in a parameter's name
    return names and [name.replace("_checkpoint_wrapped_module.", "") for name in names]


# Converts a value, by the `carry` of its key; None where there is no such value here.
CONVERTERS: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("same", "lora-only", "warmup"), convert_number),
    "by-code": lambda value: LEAVE,
    "not": lambda value: not value if isinstance(value, bool) else None,
    "adapter": lambda value: {"lora": True, "qlora": True, "full": False, "freeze": False}.get(str(value)),
    "all-linear": lambda value: "all-linear" if value else LEAVE,
    "on-if-true": lambda value: convert_number(value) if value else LEAVE,
    "flag": lambda value: True if value else LEAVE,
    "targets": convert_targets,
    "schedule": lambda value: SCHEDULES.get(str(value).lower().rsplit(".", 1)[-1]),
    "optimizer": lambda value: convert_optimizer(str(value)),
    "attention": _convert_attention,
    "dtype": lambda value: {"auto": LEAVE, **DTYPES}.get(str(value).rsplit(".", 1)[-1]),
    "resume": lambda value: "auto" if value is True else LEAVE if value in (False, "false") else str(value),
    "overlength": lambda value: OVERLENGTH.get(str(value)),
    "names": convert_names,
    "parameters": _convert_parameters,
    "module-patterns": _convert_patterns,
    "clip": lambda value: convert_number(value) or "null",
    "bits": lambda value: True if value in (4, 8) else None,
    "quantizer": lambda value: LEAVE if str(value) in ("bnb", "bitsandbytes") else None,
    "betas": lambda value: value if isinstance(value, list) and len(value) == 2 else None,
}


def convert_value(pair: Counterpart, value: Any, recipe: Mapping[str, Any]) -> Any:
    """Their value as ours; None where there is none, `LEAVE` where the default here is the same.

    `recipe` has what is converted already; the learning rate is needed for a rate that is given as such.
    """
    match pair.carry:
        case "tracker":
            return _convert_tracker(pair, value)
        case "strategy":
            name = "no" if value is False else str(value)
            return LEAVE if name == "steps" else name if name in STRATEGIES[str(pair.ours)] else None
        case "schedule-argument":
            return recipe.get("lr_scheduler_kwargs", {}) | {pair.key.rsplit(".", 1)[-1]: convert_number(value)}
        case "optimizer-flag":
            return convert_optimizer(pair.key.removeprefix("use_")) if value else LEAVE
        case "steps":
            return _convert_steps(pair.key, value)
        case "min-rate":
            lowest, rate = read_number(pair.key, value, "1e-6"), convert_number(recipe.get("learning_rate"))
            return round(lowest / rate, 9) if isinstance(rate, int | float) and rate else None
    return CONVERTERS[pair.carry](value)


# Values that ask for the behavior here.
SAME_ROLES = {"user": ("human",), "assistant": ("gpt",), "tool": ("observation",)}
USUAL: Mapping[str, tuple[Any, ...]] = {
    "roles_to_train": ("assistant", ["assistant"], ["gpt"]), "train_on_eos": ("turn",), "train_on_eot": ("turn",),
    "message_field_training": ("train", "weight"), "message_field_role": ("role", "from"),
    "message_field_content": ("content", "value"), "message_property_mappings.role": ("role", "from"),
    "message_property_mappings.content": ("content", "value"), "tags.role_tag": ("role", "from"),
    "tags.content_tag": ("content", "value"), "tags.user_tag": ("user", "human"),
    "tags.assistant_tag": ("assistant", "gpt"), "tags.observation_tag": ("tool", "observation"),
    "tags.function_tag": ("function_call",), "tags.system_tag": ("system",), "columns.tools": ("tools",),
    "columns.images": ("images", "image"),
    "conversation_style": ("sharegpt", "openai"), "answer_only_loss_mask": (True,),
    "template_thinking_key": ("thinking",), "field_thinking": ("thinking",), "data_files": ([],),
}  # fmt: skip
# Padding, the length (read with the recipe's) and the tokenizer, which is the model's own.
NO_EFFECT = ("padding", "truncation", "pad_to_max_length", "seq_length", "tokenizer", "shuffle_seed",
"start_of_turn_token",
             "packed")  # fmt: skip
BUILDERS = (None, "json", "csv", "parquet", "arrow", "text")  # their path where data_files lists the files


@dataclass(slots=True)
class DataSetEntry:
    """One data set of a file. A key that is converted is removed from `unread`; the rest have no counterpart."""

    where: str  # as in datasets[0]
    unread: dict[str, Any]  # dotted where it is nested

    @classmethod
    def of(cls, where: str, keys: Mapping[Any, Any]) -> "DataSetEntry":
        return cls(where, {str(key): value for key, value in keys.items()})

    def take(self, key: str) -> Any:
        return self.unread.pop(key, None)

    def flatten(self, *keys: str) -> None:
        """Gives what is nested under `keys` dotted names."""
        for key in keys:
            if isinstance(self.unread.get(key), dict):
                self.unread |= {f"{key}.{inner}": value for inner, value in self.unread.pop(key).items()}

    def paths(self, key: str = "path") -> list[Any]:
        """What is read: the path, or the files where the path only says of which kind they are."""
        path, files = self.take(key), self.unread.get("data_files")
        if path not in BUILDERS or not isinstance(files, str | list):
            return [path]
        self.take("data_files")
        return files if isinstance(files, list) else [files]

    def list_unread(self, tool: Tool) -> list[str]:
        """A line for each unread key that has an effect."""
        notes = {pair.key: pair.note for pair in list_counterparts(tool, DATA_SET_KEYS)}
        lines = []
        for key, value in self.unread.items():
            note = next((notes[name] for name in (key, key.split(".")[-1], key.split(".")[0]) if name in notes), None)
            if key.split(".")[0] in NO_EFFECT:
                continue
            names = map(str, value if isinstance(value, list) else [value])
            if key.startswith("roles.") and set(names) <= {key[6:], *SAME_ROLES.get(key[6:], ())}:
                continue  # as they are read anyway
            if value in (None, "", [], {}) or value in USUAL.get(key, ()) or (value is False and note is not None):
                continue
            lines.append(f"{self.where}.{key}: {shorten(value)}   ({note or 'not known here'})")
        return lines


Sources = list[dict[str, Any]]


def list_entries(value: Any, name: str, source: Path) -> list[DataSetEntry]:
    """The data sets listed under the key `name` of their file."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise UserError(
            f"{source}: {name}: a list of data sets is expected, found {shorten(value)}; write `- path: ...`"
        )
    for i, item in enumerate(value):
        if not isinstance(item, dict):
            raise UserError(
                f"{source}: {name}[{i}]: a mapping with a path is expected, found {shorten(item)}; write `- path: ...`"
            )
    return [DataSetEntry.of(f"{name}[{i}]", item) for i, item in enumerate(value)]


def read_each(
    tool: Tool, entries: Iterable[DataSetEntry], read: Callable[[DataSetEntry], Sources], conversion: Conversion
) -> Sources:
    """Reads our entries from a file's; the keys that `read` does not take are listed as differences."""
    sources: Sources = []
    for entry in entries:
        sources += read(entry)
        conversion.differences += entry.list_unread(tool)
        lacking = {pair.key: pair.missing_capability for pair in list_counterparts(tool, DATA_SET_KEYS)}
        conversion.missing_capabilities += sorted({lacking[key] for key in entry.unread if lacking.get(key)})
    return sources


def make_sources(paths: Iterable[Any], **keys: Any) -> Sources:
    return [{key: value for key, value in {"path": path, **keys}.items() if value is not None} for path in paths]


def take_first_rows(entry: dict[str, Any], limit: Any) -> dict[str, Any]:
    """An entry with the first `limit` rows of its split; all if that is None or the split is a slice already."""
    split = str(entry.get("split") or "train")
    if not isinstance(limit, int) or isinstance(limit, bool) or "[" in split:
        return entry
    return entry | {"split": f"{split}[:{limit}]"}


def compares_answers(conversion: Conversion) -> bool:
    """Whether the rows hold pairs of answers or rated ones."""
    return METHODS[conversion.recipe.get("method", "sft")].rows != "answers"


ROOT_DEPTH = 7  # folders


def find_from_root(source: Path, name: str | Path) -> Path | None:
    """Finds a file that `source` names, from its own folder or from the root of the tool, some folders above."""
    folders = (source.parent, *source.resolve().parents[1:ROOT_DEPTH], Path())
    return next((folder / name for folder in folders if (folder / name).is_file()), None)
