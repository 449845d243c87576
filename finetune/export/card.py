"""The model card of an export: what was trained, on which data and how, and how to use it."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import yaml

from finetune.config.export_formats import EXPORT_FORMATS
from finetune.config.facts import names_vision_language
from finetune.config.keys import keys_of
from finetune.config.methods import ScoreHead, describe_method
from finetune.config.pretrained import SCORING_CLASS, TOKEN_SCORING_CLASS, names_class
from finetune.config.schema import Lora, Quantization
from finetune.config.yaml_file import read_value
from finetune.constants import CONFIG_FILE, EXPORT
from finetune.export.merge_choice import TRAINED, MergeChoice
from finetune.export.sentence_transformer import USE, USE_RANKER
from finetune.export.source import Source
from finetune.files.json_files import read_json_lines, read_json_object
from finetune.files.run_files import (
    BenchmarkResult,
    benchmark_table,
    describe_missing,
    find_divergence,
    losses_of,
)

CARD_FILE = "README.md"
# keys of the recipe whose values the card shows
RECIPE_KEYS = (
    "learning_rate",
    "lr_scheduler_type",
    "num_train_epochs",
    "max_steps",
    "global_batch_size",
    "max_length",
    "packing",
    "optim",
    "weight_decay",
    "seed",
    "trainable_modules",
    "frozen_modules",
    *keys_of(Lora),
)
# the hub's fields for a license; the last two are there if the first is "other"
LICENSE_KEYS = ("license", "license_name", "license_link")
UNKNOWN_LICENSE = "unknown"
# name in the card -> key of a checkpoint's state
COUNTS = {"Steps": "step", "Tokens read": "tokens", "Tokens trained on": "trained_tokens"}
# name in the card -> key of metrics.jsonl
LOSSES = {"Loss": "loss", "Held-out loss": "eval_loss"}
LAST_VALUES = {
    "Reward margin, last": "rewards/margins",
    "Reward margin, last, held out": "eval_rewards/margins",
    "Pairs in order, last": "rewards/accuracies",
    "Pairs in order, last, held out": "eval_rewards/accuracies",
    "Accuracy, held out": "eval_accuracy",
    "F1, mean of the classes, held out": "eval_f1_macro",
    "AUC, mean of the classes, held out": "eval_auc",
    "Expected calibration error, held out": "eval_ece",
    "Temperature by which scores are divided, fitted on the held-out rows": "eval_temperature",
    "Expected calibration error with it": "eval_ece_with_temperature",
    "Recall@1, held out": "eval_recall@1",
    "MRR@10, held out": "eval_mrr@10",
    "NDCG@10, held out": "eval_ndcg@10",
}
# (a recipe's key, the key of data_report.json, what the rows are for)
DATA_KEYS = (("datasets", "sources", "training"), ("eval_datasets", "eval_sources", "held out"))
USE_MASKED = (
    "It fills in masked tokens (mask_token: `{}`), and was trained with attention in both "
    "directions: pass a mask of shape [rows, 1, tokens, tokens] that is true everywhere. The "
    "logits before a masked token predict it. `generate` and servers write one token after "
    "another: they do not sample from it."
)
PEFT_MODEL = 'model = PeftModel.from_pretrained(base, "PATH_OR_NAME")'
# for BitsAndBytesConfig: training quantizes no vision tower
ONLY_LANGUAGE_MODEL = (
    'llm_int8_skip_modules=["lm_head", "(?!.*(language_model|text_model)).*"]'  # names, as patterns
)
QUANTIZED_CAUSAL = """\
from peft import AutoPeftModelForCausalLM
from transformers import BitsAndBytesConfig

QUANTIZATION
model = AutoPeftModelForCausalLM.from_pretrained(
    "PATH_OR_NAME", dtype="auto", quantization_config=quantization
)"""
USE_QUANTIZED = """\
The adapter was trained on the base in this quantization, made from the numbers as the base's \
files hold them (`dtype="auto"`):

```python
LINES
```

On a CPU call `model.train()` before the forward: outside of training bitsandbytes multiplies in \
bf16 on some CPUs, and fails there where a layer's output width is no multiple of 32."""
OTHER_BASE = (
    "**These are not the weights that the adapter was trained on**: `--base-model` named them for "
    "the export."
)


def render_card(
    source: Source,
    name: str,
    *,
    is_adapter: bool = False,
    merge: MergeChoice | None = None,
    formats: Sequence[str] = ("safetensors",),
    of_base: Sequence[str] = (),
) -> str:
    """Makes the text of README.md for an export.

    Args:
        source: What is exported.
        name: The card's title.
        is_adapter: Whether the card is for an adapter's folder; False: for a model's.
        merge: How an adapter was merged onto a quantized base; None if it was not.
        formats: The formats of the export.
        of_base: Sentences about the base's tensors that were not trained.
    """
    front = yaml.safe_dump(
        _make_front_matter(source, is_adapter), sort_keys=False, allow_unicode=True
    )
    sections = [
        f"---\n{front}---",
        f"# {name}",
        _describe_origin(source, is_adapter),
        OTHER_BASE if source.base_differs else "",
        _make_section("Training", _describe_training(source)),
        _make_section(
            "Merge", _describe_merge(merge, source.quantization) if merge is not None else ""
        ),
        _make_section("Base", "\n".join(f"- {sentence}" for sentence in of_base)),
        _make_section("Data", _describe_data(source)),
        _make_section("Recipe", _make_table(("Key", "Value"), _make_recipe_rows(source))),
        _make_section("Use", "\n\n".join(_list_uses(source, is_adapter, formats))),
    ]
    return "\n\n".join(filter(None, sections)) + "\n"


def _describe_origin(source: Source, is_adapter: bool) -> str:
    """Makes the sentence about what the export is and from which model it was trained."""
    noun = "model"
    article = "A"
    if is_adapter:
        noun = f"{_name_adapter_kind(source)} adapter"
        article = "An" if noun.startswith("OFT") else "A"
    if source.base_model:
        origin = f"{article} {noun} fine-tuned from {_shorten_path(source.base_model)}"
    else:
        kind = _name_model_kind(source)
        if is_adapter:
            origin = f"{article} {noun} for {kind}"
        else:
            origin = f"{kind[0].upper()}{kind[1:]}"
        if source.recipe.get("model_config"):
            origin += ", trained from random weights"
    teacher = source.recipe.get("teacher_model_name_or_path")
    if teacher:
        origin += f", distilled from {_shorten_path(str(teacher))}"
    return f"{origin}."


def _name_model_kind(source: Source) -> str:
    """Names what the model is, with an article: by its method, else by its head and its inputs."""
    if source.method.makes:
        return source.method.makes
    if _read_head(source).names:
        return "a model with a head of scores"
    return "a vision-language model" if _is_vision_language(source) else "a causal language model"


def _name_adapter_kind(source: Source) -> str | None:
    """Returns "OFT" or "LoRA", the kind of the source's adapter; None without an adapter."""
    if source.adapter is None:
        return None
    return "OFT" if source.adapter.config.get("oft_block_size") else "LoRA"


def add_evaluation(card: str, results: Sequence[BenchmarkResult]) -> str:
    """Returns `card` with a section "Evaluation" on `results`, in place of an earlier one."""
    body = f"{_make_table(*benchmark_table(results))}\n\n{_describe_harness(results)}"
    return insert_section(card, "Evaluation", body)


def insert_section(card: str, title: str, body: str) -> str:
    """Returns `card` with a section before "Use", in place of an earlier section of this title."""
    without_section = re.sub(rf"## {title}\n.*?(?=\n## |\Z)", "", card, flags=re.DOTALL)
    before, use_title, after = without_section.partition("## Use\n")
    return (
        f"{before.rstrip()}\n\n{_make_section(title, body)}\n\n{use_title}{after}".rstrip() + "\n"
    )


def _describe_harness(results: Sequence[BenchmarkResult]) -> str:
    """Makes the sentence about the program that measured `results`, and the bases compared with."""
    bases = sorted({_shorten_path(result.base_model) for result in results if result.base_model})
    versions = ", ".join(sorted({result.lm_eval for result in results}))
    harness = (
        f"[lm-evaluation-harness](https://github.com/EleutherAI/lm-evaluation-harness) {versions}"
    )
    return f"Measured with {harness}" + (f"; the base is {', '.join(bases)}." if bases else ".")


def _make_front_matter(source: Source, is_adapter: bool) -> dict[str, Any]:
    """Makes the card's front matter, by which the hub lists a model. Empty fields are left out."""
    base = source.base_model
    adapter = _name_adapter_kind(source)
    tags = ("finetune", source.recipe.get("method"), adapter and adapter.lower())
    paths = [str(entry.get("path")) for entry in _list_entries(source.recipe, "datasets")]
    front: dict[str, Any] = {
        "base_model": base if base and _is_hub_name(base) else None,
        "library_name": "peft" if is_adapter else _name_library(source),
        "pipeline_tag": _find_pipeline(source),
        **_find_license(source),
        "tags": [tag for tag in tags if tag],
        "datasets": [path for path in paths if _is_hub_name(path)],
    }
    return {key: value for key, value in front.items() if value}


def _name_library(source: Source) -> str:
    """Names the library that loads the exported model, as the hub's `library_name`."""
    if source.method.embeds or source.method.ranks:
        return "sentence-transformers"
    return "transformers"


def _find_license(source: Source) -> dict[str, Any]:
    """Finds the license in the card or config.json of the base, else of the source's own folder.

    The fields are copied: nobody but the base's authors can grant a license.
    """
    for folder in filter(None, (source.base, source.description)):
        for front in (
            _read_front_matter(folder / CARD_FILE),
            read_json_object(folder / CONFIG_FILE),
        ):
            if isinstance(front.get("license"), str):
                return {key: front[key] for key in LICENSE_KEYS if isinstance(front.get(key), str)}
    return {"license": UNKNOWN_LICENSE}


def _read_front_matter(card: Path) -> dict[str, Any]:
    """Reads the front matter of a model card; {} if there is none, or if it is unreadable."""
    if not card.is_file():
        return {}
    text = card.read_text(encoding="utf-8", errors="replace")
    match = re.match(r"---\s*\n(.{0,65536}?)\n---", text, re.DOTALL)
    if match is None:
        return {}
    entry, _ = read_value(match[1], "front", str(card))
    return entry.value if isinstance(entry.value, dict) else {}


def _describe_training(source: Source) -> str:
    """Makes the section on the training: warnings, and a table of counts and metrics.

    Metrics count up to the exported checkpoint only, since the run may have continued after it.
    """
    # of a run's adapter the step is not known
    lines = read_metrics(source.run) if "step" in source.state else []
    rows = [*_make_count_rows(source), *_make_metric_rows(lines, source.state.get("step"))]
    return "\n\n".join([*_find_warnings(source, lines), _make_table(("", ""), rows)])


def _make_count_rows(source: Source) -> Iterator[tuple[str, str]]:
    """Yields (name, text) for the method, and for each count in the checkpoint's state."""
    if source.recipe:
        # The keys of a teacher are left out: one may hold a path.
        values = {
            key: value for key, value in source.recipe.items() if not key.startswith("teacher")
        }
        yield "Method", describe_method(values)
    state = source.state
    for name, key in COUNTS.items():
        if isinstance(state.get(key), int):
            yield name, f"{state[key]:,}"
    if isinstance(state.get("epoch"), int | float):
        yield "Epochs", f"{state['epoch']:.3g}"


def _make_metric_rows(lines: list[dict[str, Any]], last_step: Any) -> Iterator[tuple[str, str]]:
    """Yields (name, text) for each metric that `lines` of metrics.jsonl have up to `last_step`."""
    for name, key in LOSSES.items():
        points = _find_points(lines, key, last_step)
        if points:
            _, first = points[0]
            _, last = points[-1]
            yield f"{name}, first and last", f"{first:.4f} → {last:.4f}"
        if points and key == "eval_loss":
            best_step, best = min(points, key=lambda point: point[1])
            yield f"{name}, best", f"{best:.4f} at step {best_step:,}"
    for name, key in LAST_VALUES.items():
        points = _find_points(lines, key, last_step)
        if points:
            _, last = points[-1]
            digits = ".3g" if "rewards/" in key else ".4f"  # a reward may have any size
            yield name, f"{last:{digits}}"


def _find_warnings(source: Source, lines: list[dict[str, Any]]) -> list[str]:
    """Makes up to two sentences: one if the run diverged, one if metrics.jsonl lacks lines.

    Only the steps up to the exported checkpoint count. `lines` are those of metrics.jsonl.
    """
    step = source.state.get("step")
    warnings = []
    diverged = find_divergence(losses_of(lines, step))
    if diverged:
        warnings.append(f"**This run diverged**: {diverged}.")
    if source.run and isinstance(step, int):
        missing = describe_missing(source.run / "metrics.jsonl", step)
        if missing:
            warnings.append(f"The run's metrics are incomplete: {missing}.")
    return warnings


def _describe_merge(merge: MergeChoice, quantization: Quantization) -> str:
    """Makes the section on which base the adapter was merged onto, and why.

    If the choice was measured, a table compares the possible merges with the trained model.
    """
    text = (
        f"The adapter was trained on the base in {quantization.bits} bits; here it is merged onto "
        f"the {merge.onto} base, {merge.reason}."
    )
    if merge.rows is None:
        return text
    text += f" Each on {merge.rows.description}, computed in float32:"
    rows = []
    for name, score in merge.measured.items():
        if name == TRAINED:
            label = f"{quantization.bits}-bit base with the adapter"
        else:
            label = f"merged onto the {name} base"
        label += " (this one)" if name == merge.onto else ""
        rows.append((label, f"{score.loss:.4f}", f"{score.logit_difference:.3g}"))
    return f"{text}\n\n{_make_table(('Model', 'Loss', 'Largest logit difference'), rows)}"


def _find_points(lines: list[dict[str, Any]], key: str, last_step: Any) -> list[tuple[int, float]]:
    """Returns (step, value) of the lines up to `last_step` that have a finite number under `key`.

    If `last_step` is no int, as without a checkpoint's state, all lines count.
    """
    last = last_step if isinstance(last_step, int) else math.inf
    points = []
    for line in lines:
        step = line.get("step")
        value = line.get(key)
        if not isinstance(step, int) or step > last:
            continue
        if isinstance(value, int | float) and math.isfinite(value):
            points.append((step, float(value)))
    return points


def read_metrics(run: Path | None) -> list[dict[str, Any]]:
    """Reads the lines of a run's metrics.jsonl that hold an object; [] without a run."""
    if run:
        return [line for line in read_json_lines(run / "metrics.jsonl") if line is not None]
    return []


def _describe_data(source: Source) -> str:
    """Makes the section on data: a table of the sources for training and for the held-out loss."""
    report = read_json_object(source.run / "data_report.json") if source.run else {}
    rows = []
    for key, report_key, use in DATA_KEYS:
        entries = _list_entries(source.recipe, key)
        reports = report.get(report_key)
        if not isinstance(reports, list) or len(reports) != len(entries):
            reports = [{}] * len(entries)  # without a report, or with one on other sources
        for entry, entry_report in zip(entries, reports, strict=True):
            if not isinstance(entry_report, dict):
                entry_report = {}
            rows.append((use, *_make_data_cells(entry, entry_report)))
    table = _make_table(("Use", "Source", "Split", "Format", "Weight", "Examples"), rows)
    size = source.recipe.get("eval_split_size")
    if not isinstance(size, int | float):
        return table
    share = f"{size:.3g}" if size >= 1 else f"{size:.3%}"  # from 1 on it is a number of rows
    return f"{table}\n\nHeld out from these: {share} of the rows."


def _make_data_cells(entry: Mapping[str, Any], entry_report: Mapping[str, Any]) -> tuple[str, ...]:
    """Makes the table's cells for one source: path, split, format, weight and size.

    Args:
        entry: The source in the recipe.
        entry_report: The source in data_report.json; {} if it is not there.
    """
    formats = entry_report.get("formats")
    examples = entry_report.get("examples")
    pairs = entry_report.get("pairs")
    # Without `type` the format of each row was recognized. The report lists the formats.
    if isinstance(formats, list) and formats:
        recognized = ", ".join(map(str, formats))
    else:
        recognized = "recognized"  # a word for readers: which formats is unknown
    size = ""
    if pairs:
        size = f"{pairs:,} pairs"
    elif isinstance(examples, int):
        size = f"{examples:,}"
    return (
        _shorten_path(str(entry.get("function") or entry.get("path"))),
        str(entry.get("split", "")),
        str(entry.get("type") or recognized),
        str(entry.get("weight", 1.0)),
        size,
    )


def _make_recipe_rows(source: Source) -> list[tuple[str, str]]:
    """Makes rows of (key, value) for the keys of RECIPE_KEYS, and of quantization, that are set.

    The keys of LoRA are left out if the run had no adapter.
    """
    recipe = source.recipe
    bits = source.quantization.bits
    unused = set() if recipe.get("use_peft") else set(keys_of(Lora)) - {"use_peft"}
    keys = [key for key in RECIPE_KEYS if key not in unused]
    keys += [key for key in keys_of(Quantization) if f"{bits}bit" in key]  # none if bits is None
    values = {key: recipe[key] for key in keys if recipe.get(key) not in (None, [], {})}
    adapter = values.get("adapter_name_or_path")
    if isinstance(adapter, str):
        values["adapter_name_or_path"] = _shorten_path(adapter)
    return [(f"`{key}`", f"`{json.dumps(value)}`") for key, value in values.items()]


def _list_uses(source: Source, is_adapter: bool, formats: Sequence[str]) -> Iterator[str]:
    """Yields a paragraph for each way to use the export."""
    if source.method.embeds and not is_adapter:
        yield USE
        return
    if source.method.ranks and not is_adapter:
        yield USE_RANKER
    if source.method.masks:
        yield USE_MASKED.format(json.dumps(source.recipe.get("mask_token")))
    if "safetensors" in formats:
        yield _show_loading(source, is_adapter)
    yield from filter(None, (EXPORT_FORMATS[name].card for name in formats))


def _show_loading(source: Source, is_adapter: bool) -> str:
    """Makes the Markdown that shows how Python loads the export: an adapter onto its base."""
    head = _read_head(source)
    auto_class = _name_auto_class(source, head)
    if is_adapter and source.quantization.bits is not None:
        return _show_quantized_loading(source, auto_class, head)
    if not is_adapter:
        lines = [
            f"from transformers import {auto_class}, AutoTokenizer",
            "",
            f'model = {auto_class}.from_pretrained("PATH_OR_NAME")',
            'tokenizer = AutoTokenizer.from_pretrained("PATH_OR_NAME")',
        ]
    elif auto_class == "AutoModelForCausalLM":
        lines = [
            "from peft import AutoPeftModelForCausalLM",
            "",
            'model = AutoPeftModelForCausalLM.from_pretrained("PATH_OR_NAME")',
        ]
    else:
        lines = [*_show_base_loading(auto_class, head), PEFT_MODEL]
    return "\n".join(["```python", *lines, "```"])


def _show_base_loading(auto_class: str, head: ScoreHead, quantization: str = "") -> list[str]:
    """Makes the lines of Python that load an adapter's base, with a head like the trained one.

    Args:
        auto_class: transformers' class that loads the base.
        head: The head of scores; without names: the base has its own head for the vocabulary.
        quantization: The lines of Python that set `quantization`; "": the base is not quantized.
    """
    imported = [auto_class]
    config_lines = []
    options = '"BASE"'
    if head.reads_tokens:
        imported.insert(0, "AutoConfig")
        config_lines = [
            f'config = AutoConfig.from_pretrained("BASE", num_labels={len(head.names)})',
            "config.token_classification_bias = False",
        ]
        options += ", config=config"
    elif head.names:
        options += f", num_labels={len(head.names)}"
    if quantization:
        imported.append("BitsAndBytesConfig")
        config_lines.append(quantization)
        options = f'\n    {options}, dtype="auto", quantization_config=quantization\n'
    return [
        "from peft import PeftModel",
        f"from transformers import {', '.join(imported)}",
        "",
        *config_lines,
        f"base = {auto_class}.from_pretrained({options})",
    ]


def _show_quantized_loading(source: Source, auto_class: str, head: ScoreHead) -> str:
    """Makes the paragraph on how to load an adapter onto the quantized base of its training.

    `auto_class` and `head` are as in `_show_base_loading`.
    """
    quantization = source.quantization
    options = [f"load_in_{quantization.bits}bit=True"]
    if quantization.bits == 4:
        compute_dtype = str(source.compute_dtype).removeprefix("torch.")
        options += [
            f'bnb_4bit_quant_type="{quantization.bnb_4bit_quant_type}"',
            f"bnb_4bit_use_double_quant={quantization.bnb_4bit_use_double_quant}",
            f'bnb_4bit_compute_dtype="{compute_dtype}"',
        ]
    if auto_class == "AutoModelForImageTextToText":
        options.append(ONLY_LANGUAGE_MODEL)
    settings = options[0]
    if len(options) > 1:
        settings = "".join(["\n", *(f"    {option},\n" for option in options)])
    setting = f"quantization = BitsAndBytesConfig({settings})"
    if auto_class == "AutoModelForCausalLM":
        lines = QUANTIZED_CAUSAL.replace("QUANTIZATION", setting)
    else:
        lines = "\n".join([*_show_base_loading(auto_class, head, setting), PEFT_MODEL])
    return USE_QUANTIZED.replace("LINES", lines)


def _name_auto_class(source: Source, head: ScoreHead) -> str:
    """Names the class of transformers that loads the model, by its head and its inputs."""
    if head.reads_tokens:
        return "AutoModelForTokenClassification"
    if head.names:
        return "AutoModelForSequenceClassification"
    if _is_vision_language(source):
        return "AutoModelForImageTextToText"
    return "AutoModelForCausalLM"


def _read_head(source: Source) -> ScoreHead:
    """Reads the head of scores from config.json. For a language model the result has no names."""
    config = read_json_object(source.description / CONFIG_FILE)
    classes = config.get("architectures")
    if not names_class(classes, SCORING_CLASS, TOKEN_SCORING_CLASS):
        return ScoreHead()
    names = tuple((config.get("id2label") or {}).values())
    return ScoreHead(names, reads_tokens=names_class(classes, TOKEN_SCORING_CLASS))


def _find_pipeline(source: Source) -> str:
    """Finds the hub's `pipeline_tag` of the model; "" if no pipeline opens it."""
    if source.method.masks:
        return ""
    if source.method.embeds:
        return "sentence-similarity"
    if source.method.ranks:
        return "text-ranking"
    head = _read_head(source)
    if head.names:
        return "token-classification" if head.reads_tokens else "text-classification"
    if _is_vision_language(source):
        return "image-text-to-text"
    return "text-generation"


def _is_vision_language(source: Source) -> bool:
    return names_vision_language(read_json_object(source.description / CONFIG_FILE))


def _make_section(title: str, body: str) -> str:
    """Makes a section of Markdown; "" without a body."""
    return f"## {title}\n\n{body}" if body else ""


def _make_table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Makes a Markdown table of `rows` under the titles `head`; "" without rows."""
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    if not cells:
        return ""
    rule = ["---"] * len(head)
    lines = map(" | ".join, [head, rule, *cells])
    return "\n".join(f"| {line} |" for line in lines)


def _list_entries(recipe: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    """Lists the entries of `datasets` or `eval_datasets` that name a path or a function."""
    entries = recipe.get(key) or []
    return [
        entry
        for entry in entries
        if isinstance(entry, dict) and (entry.get("function") or entry.get("path"))
    ]


def _shorten_path(path: str) -> str:
    """Shortens a local path to its last part, since the rest is private; a hub name stays.

    The path of a run's export/ becomes the run's name.
    """
    local = PurePath(path)
    if _is_hub_name(path):
        return path
    is_export = local.name == EXPORT and local.parent.name
    return local.parent.name if is_export else local.name


def _is_hub_name(name: str) -> bool:
    """Whether `name` looks like OWNER/NAME on the hub, and not like a local file or folder."""
    is_file = Path(name).suffix.startswith((".json", ".parquet", ".csv", ".txt", ".arrow"))
    return (
        re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None
        and not is_file
        and not Path(name).exists()
    )
