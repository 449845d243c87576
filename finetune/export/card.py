"""The model card of an export: what was trained, on which data, how, and how it is used."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any

import yaml

from finetune.config.export_formats import EXPORT_FORMATS
from finetune.config.facts import names_vision_language
from finetune.config.keys import keys_of
from finetune.config.methods import ScoreHead, describe_method, fills_masks
from finetune.config.pretrained import SCORING_CLASS, TOKEN_SCORING_CLASS, names_class
from finetune.config.schema import Lora, Quantization
from finetune.config.yaml_file import read_value
from finetune.constants import CONFIG_FILE, EXPORT, Fields, Record
from finetune.export.merge_choice import TRAINED, MergeChoice
from finetune.export.sentence_transformer import USE, USE_RANKER, is_embedder, is_reranker
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
    "use_peft",
    "adapter_name_or_path",
    "lora_r",
    "lora_alpha",
    "lora_target_modules",
    "lora_target_parameters",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "use_rslora",
    "use_dora",
    "oft_block_size",
)
# the hub's fields; the last two where the first is "other"
LICENSE_KEYS = ("license", "license_name", "license_link")
UNKNOWN_LICENSE = "unknown"
# names in the card -> keys of a checkpoint's state, or of metrics.jsonl
COUNTS = {"Steps": "step", "Tokens read": "tokens", "Tokens trained on": "trained_tokens"}
LOSSES = {"Loss": "loss", "Held-out loss": "eval_loss"}
PREFERENCES = {
    "Reward margin, last": "rewards/margins",
    "Pairs in order, last": "rewards/accuracies",
}
HELD_OUT = {
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
USE_QUANTIZED = """\
The adapter was trained on the base in this quantization, made from the numbers as the base's \
files hold them (`dtype="auto"`):

```python
from peft import AutoPeftModelForCausalLM
from transformers import BitsAndBytesConfig

quantization = BitsAndBytesConfig(SETTINGS)
model = AutoPeftModelForCausalLM.from_pretrained(
    "PATH_OR_NAME", dtype="auto", quantization_config=quantization
)
```

On a CPU call `model.train()` before the forward: outside of training bitsandbytes multiplies in \
bf16 on some CPUs, and fails there where a layer's output width is no multiple of 32."""
OTHER_BASE = (
    "**These are not the weights that the adapter was trained on**: `--base-model` named them for "
    "the export."
)


def model_card(
    source: Source,
    name: str,
    *,
    is_adapter: bool = False,
    merge: MergeChoice | None = None,
    formats: Sequence[str] = ("safetensors",),
    of_base: Sequence[str] = (),
) -> str:
    """Writes the text of README.md for an export.

    Args:
        source: What is exported.
        name: The title.
        is_adapter: The card is that of the adapter alone.
        merge: How an adapter was merged onto a quantized base.
        formats: Those of the export.
        of_base: Sentences on the base's tensors.
    """
    front = yaml.safe_dump(_front_matter(source, is_adapter), sort_keys=False, allow_unicode=True)
    sections = [
        f"---\n{front}---",
        f"# {name}",
        _describe_origin(source, is_adapter),
        OTHER_BASE if source.base_differs else "",
        _section("Training", _training(source)),
        _section("Merge", _merge(merge, source.quantization) if merge is not None else ""),
        _section("Base", "\n".join(f"- {sentence}" for sentence in of_base)),
        _section("Data", _data(source)),
        _section("Recipe", _table(("Key", "Value"), _recipe_rows(source))),
        _section("Use", "\n\n".join(_uses(source, is_adapter, formats))),
    ]
    return "\n\n".join(filter(None, sections)) + "\n"


def _describe_origin(source: Source, is_adapter: bool) -> str:
    """Says in a sentence what the export is and from what it was trained."""
    what = "model"
    article = "A"
    if is_adapter:
        what = f"{_adapter_kind(source)} adapter"
        article = "An" if what.startswith("OFT") else "A"
    if source.base_model:
        origin = f"{article} {what} fine-tuned from {_shown_path(source.base_model)}"
    else:
        origin = f"A causal language {what}"
        if source.recipe.get("model_config"):
            origin += ", trained from random weights"
    teacher = source.recipe.get("teacher_model_name_or_path")
    if teacher:
        origin += f", distilled from {_shown_path(str(teacher))}"
    return f"{origin}."


def _adapter_kind(source: Source) -> str | None:
    """The name of an adapter's method; None without an adapter."""
    if source.adapter is None:
        return None
    return "OFT" if source.adapter.config.get("oft_block_size") else "LoRA"


def add_evaluation(card: str, results: Sequence[BenchmarkResult]) -> str:
    """Writes a section on `results` into a card, in place of an earlier one."""
    body = f"{_table(*benchmark_table(results))}\n\n{_measured_by(results)}"
    return insert_section(card, "Evaluation", body)


def insert_section(card: str, title: str, body: str) -> str:
    """Writes a section before that on its use, in place of an earlier one of this title."""
    others = re.sub(rf"## {title}\n.*?(?=\n## |\Z)", "", card, flags=re.DOTALL)
    before, use, after = others.partition("## Use\n")
    return f"{before.rstrip()}\n\n{_section(title, body)}\n\n{use}{after}".rstrip() + "\n"


def _measured_by(results: Sequence[BenchmarkResult]) -> str:
    bases = sorted({_shown_path(result.base_model) for result in results if result.base_model})
    versions = ", ".join(sorted({result.lm_eval for result in results}))
    harness = (
        f"[lm-evaluation-harness](https://github.com/EleutherAI/lm-evaluation-harness) {versions}"
    )
    return f"Measured with {harness}" + (f"; the base is {', '.join(bases)}." if bases else ".")


def _front_matter(source: Source, is_adapter: bool) -> Record:
    """The fields by which the hub finds a model; without those that say nothing."""
    base = source.base_model
    method = source.recipe.get("method")
    adapter = _adapter_kind(source)
    paths = [str(entry.get("path")) for entry in _entries(source.recipe, "datasets")]
    front: Record = {
        "base_model": base if base and _is_hub_name(base) else None,
        "library_name": "peft" if is_adapter else _name_library(source),
        "pipeline_tag": _find_pipeline(source),
        **_license(source),
        "tags": [tag for tag in ("finetune", method, adapter and adapter.lower()) if tag],
        "datasets": [path for path in paths if _is_hub_name(path)],
    }
    return {key: value for key, value in front.items() if value}


def _name_library(source: Source) -> str:
    if is_embedder(source.recipe) or is_reranker(source.recipe):
        return "sentence-transformers"
    return "transformers"


def _license(source: Source) -> Record:
    """The base model's license, as its own card or config says; no one else can grant one."""
    for folder in filter(None, (source.base, source.description)):
        for front in (_front_of(folder / CARD_FILE), read_json_object(folder / CONFIG_FILE)):
            if isinstance(front.get("license"), str):
                return {key: front[key] for key in LICENSE_KEYS if isinstance(front.get(key), str)}
    return {"license": UNKNOWN_LICENSE}


def _front_of(card: Path) -> Record:
    """The front matter of a model card; empty where there is none."""
    if not card.is_file():
        return {}
    text = card.read_text(encoding="utf-8", errors="replace")
    match = re.match(r"---\s*\n(.{0,65536}?)\n---", text, re.DOTALL)
    if match is None:
        return {}
    front = read_value(match[1], "front", str(card))[0].value
    return front if isinstance(front, dict) else {}


def _training(source: Source) -> str:
    """Steps, tokens and losses up to the checkpoint that is exported; the run may have continued
    after it.
    """
    lines = read_metrics(source.run)
    rows = [*_count_rows(source), *_metric_rows(lines, source.state.get("step"))]
    return "\n\n".join([*_find_warnings(source, lines), _table(("", ""), rows)])


def _count_rows(source: Source) -> Iterator[tuple[str, str]]:
    """Yields (name, text) of the method and of what the checkpoint has counted."""
    if source.recipe:
        # a teacher's key may hold a path
        shown = {
            key: value for key, value in source.recipe.items() if not key.startswith("teacher")
        }
        yield "Method", describe_method(shown)
    state = source.state
    for name, key in COUNTS.items():
        if isinstance(state.get(key), int):
            yield name, f"{state[key]:,}"
    if isinstance(state.get("epoch"), int | float):
        yield "Epochs", f"{state['epoch']:.3g}"


def _metric_rows(lines: list[Record], last_step: Any) -> Iterator[tuple[str, str]]:
    """Yields (name, text) of the metrics that the run has, up to `last_step`."""
    for name, key in LOSSES.items():
        points = _series(lines, key, last_step)
        if points:
            yield f"{name}, first and last", f"{points[0][1]:.4f} → {points[-1][1]:.4f}"
        if points and key == "eval_loss":
            best_step, best = min(points, key=lambda point: point[1])
            yield f"{name}, best", f"{best:.4f} at step {best_step:,}"
    for name, key in PREFERENCES.items():
        for shown, held_out in ((name, key), (f"{name}, held out", f"eval_{key}")):
            points = _series(lines, held_out, last_step)
            if points:
                yield shown, f"{points[-1][1]:.3g}"
    for name, key in HELD_OUT.items():
        points = _series(lines, key, last_step)
        if points:
            yield name, f"{points[-1][1]:.4f}"


def _find_warnings(source: Source, lines: list[Record]) -> list[str]:
    """Sentences on a run that diverged, and on metrics that are incomplete."""
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


def _merge(merge: MergeChoice, quantization: Quantization) -> str:
    """Says what the adapter was merged onto, and compares both possible merges with the trained
    model.
    """
    text = (
        f"The adapter was trained on the base in {quantization.bits} bits; here it is merged onto "
        f"the {merge.onto} base, {merge.reason}."
    )
    if merge.rows is None:
        return text
    kind = "held-out" if merge.rows.held_out else "training"
    tokens = f"{merge.rows.labeled_tokens:,} labeled tokens"
    text += f" Each on {len(merge.rows)} {kind} rows ({tokens}), computed in float32:"
    rows = []
    for name, score in merge.measured.items():
        if name == TRAINED:
            label = f"{quantization.bits}-bit base with the adapter"
        else:
            label = f"merged onto the {name} base"
        label += " (this one)" if name == merge.onto else ""
        rows.append((label, f"{score.loss:.4f}", f"{score.logit_difference:.3g}"))
    return f"{text}\n\n{_table(('Model', 'Loss', 'Largest logit difference'), rows)}"


def _series(lines: list[Record], key: str, last_step: Any) -> list[tuple[int, float]]:
    """Returns (step, value) of the lines up to `last_step` that have a number under `key`."""
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


def read_metrics(run: Path | None) -> list[Record]:
    """The lines of a run's metrics.jsonl, without those that cannot be read."""
    if run:
        return [line for line in read_json_lines(run / "metrics.jsonl") if line is not None]
    return []


def _data(source: Source) -> str:
    """A table of what was trained on and what the held-out loss was measured on."""
    report = read_json_object(source.run / "data_report.json") if source.run else {}
    rows = []
    for key, report_key, use in DATA_KEYS:
        entries = _entries(source.recipe, key)
        reported = report.get(report_key)
        if not isinstance(reported, list) or len(reported) != len(entries):
            reported = [{}] * len(entries)
        for entry, of_entry in zip(entries, reported, strict=True):
            rows.append((use, *_data_cells(entry, of_entry if isinstance(of_entry, dict) else {})))
    table = _table(("Use", "Source", "Split", "Format", "Weight", "Examples"), rows)
    size = source.recipe.get("eval_split_size")
    if not isinstance(size, int | float):
        return table
    number = f"{size:.3g}" if size >= 1 else f"{size:.3%}"
    return f"{table}\n\nHeld out from these: {number} of the rows."


def _data_cells(entry: Fields, reported: Fields) -> tuple[str, ...]:
    """Path, split, format, weight and examples of one source; `reported` is its entry in
    data_report.json.
    """
    formats, examples, pairs = (reported.get(key) for key in ("formats", "examples", "pairs"))
    if isinstance(formats, list) and formats:
        recognized = ", ".join(map(str, formats))
    else:
        recognized = "recognized"
    size = ""
    if pairs:
        size = f"{pairs:,} pairs"
    elif isinstance(examples, int):
        size = f"{examples:,}"
    return (
        _shown_path(str(entry.get("function") or entry.get("path"))),
        str(entry.get("split", "")),
        str(entry.get("type") or recognized),
        str(entry.get("weight", 1.0)),
        size,
    )


def _recipe_rows(source: Source) -> list[tuple[str, str]]:
    """Rows of (key, value) for those of RECIPE_KEYS that the recipe sets."""
    recipe = source.recipe
    bits = source.quantization.bits
    unused = set() if recipe.get("use_peft") else set(keys_of(Lora)) - {"use_peft"}
    shown = [key for key in RECIPE_KEYS if key not in unused]
    shown += [key for key in keys_of(Quantization) if f"{bits}bit" in key]
    values = {key: recipe[key] for key in shown if recipe.get(key) not in (None, [], {})}
    adapter = values.get("adapter_name_or_path")
    if isinstance(adapter, str):
        values["adapter_name_or_path"] = _shown_path(adapter)
    return [(f"`{key}`", f"`{json.dumps(value)}`") for key, value in values.items()]


def _uses(source: Source, is_adapter: bool, formats: Sequence[str]) -> Iterator[str]:
    """Yields a paragraph for each way in which the export is used."""
    if is_embedder(source.recipe) and not is_adapter:
        yield USE
        return
    if is_reranker(source.recipe) and not is_adapter:
        yield USE_RANKER
    if fills_masks(source.recipe):
        yield USE_MASKED.format(json.dumps(source.recipe.get("mask_token")))
    if "safetensors" in formats:
        yield _use(source, is_adapter)
    yield from filter(None, (EXPORT_FORMATS[name].card for name in formats))


def _use(source: Source, is_adapter: bool) -> str:
    """The lines of Python that load the export."""
    if is_adapter and source.quantization.bits is not None:
        return _use_on_quantized(source)
    head = _read_head(source)
    auto_class = _name_auto_class(source, head)
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
        lines = [*_load_base(auto_class, head), PEFT_MODEL]
    return "\n".join(["```python", *lines, "```"])


def _load_base(auto_class: str, head: ScoreHead) -> list[str]:
    """The lines of Python that load an adapter's base with the head that it was trained with."""
    imported = auto_class
    before = []
    options = ""
    if head.reads_tokens:
        imported = f"AutoConfig, {auto_class}"
        before = [
            f'config = AutoConfig.from_pretrained("BASE", num_labels={len(head.names)})',
            "config.token_classification_bias = False",
        ]
        options = ", config=config"
    elif head.names:
        options = f", num_labels={len(head.names)}"
    return [
        "from peft import PeftModel",
        f"from transformers import {imported}",
        "",
        *before,
        f'base = {auto_class}.from_pretrained("BASE"{options})',
    ]


def _use_on_quantized(source: Source) -> str:
    """How an adapter is loaded onto the quantized base that it was trained on."""
    quantization = source.quantization
    settings = f"load_in_{quantization.bits}bit=True"
    if quantization.bits == 4:
        compute_dtype = str(source.compute_dtype).removeprefix("torch.")
        settings = (
            f"\n    {settings},\n    "
            f'bnb_4bit_quant_type="{quantization.bnb_4bit_quant_type}",\n'
            f"    bnb_4bit_use_double_quant={quantization.bnb_4bit_use_double_quant},\n"
            f'    bnb_4bit_compute_dtype="{compute_dtype}",\n'
        )
    return USE_QUANTIZED.replace("SETTINGS", settings)


def _name_auto_class(source: Source, head: ScoreHead) -> str:
    if head.reads_tokens:
        return "AutoModelForTokenClassification"
    if head.names:
        return "AutoModelForSequenceClassification"
    if _is_vision_language(source):
        return "AutoModelForImageTextToText"
    return "AutoModelForCausalLM"


def _read_head(source: Source) -> ScoreHead:
    """The head of a reward model or classifier; a language model's has no names."""
    config = read_json_object(source.description / CONFIG_FILE)
    classes = config.get("architectures")
    if not names_class(classes, SCORING_CLASS, TOKEN_SCORING_CLASS):
        return ScoreHead()
    names = tuple((config.get("id2label") or {}).values())
    return ScoreHead(names, reads_tokens=names_class(classes, TOKEN_SCORING_CLASS))


def _find_pipeline(source: Source) -> str:
    if fills_masks(source.recipe):
        return ""  # none of the hub's opens it
    if is_embedder(source.recipe):
        return "sentence-similarity"
    if is_reranker(source.recipe):
        return "text-ranking"
    head = _read_head(source)
    if head.names:
        return "token-classification" if head.reads_tokens else "text-classification"
    if _is_vision_language(source):
        return "image-text-to-text"
    return "text-generation"


def _is_vision_language(source: Source) -> bool:
    return names_vision_language(read_json_object(source.description / CONFIG_FILE))


def _section(title: str, body: str) -> str:
    return f"## {title}\n\n{body}" if body else ""


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table; no text without rows."""
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    if not cells:
        return ""
    lines = map(" | ".join, [head, ["---"] * len(head), *cells])
    return "\n".join(f"| {line} |" for line in lines)


def _entries(recipe: Fields, key: str) -> list[Fields]:
    entries = recipe.get(key) or []
    return [
        entry
        for entry in entries
        if isinstance(entry, dict) and (entry.get("function") or entry.get("path"))
    ]


def _shown_path(path: str) -> str:
    """A hub name, or the last part of a local path, of a run's export/ the run's name: the rest is
    private.
    """
    local = PurePath(path)
    if _is_hub_name(path):
        return path
    is_export = local.name == EXPORT and local.parent.name
    return local.parent.name if is_export else local.name


def _is_hub_name(name: str) -> bool:
    is_file = Path(name).suffix.startswith((".json", ".parquet", ".csv", ".txt", ".arrow"))
    return (
        re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None
        and not is_file
        and not Path(name).exists()
    )
