"""What makes a folder of weights a model: config, generation config, tokenizer with chat template,
and model card.
"""

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
from finetune.config.methods import ScoreHead, describe_method, fills_masks
from finetune.config.pretrained import SCORING_CLASS, TOKEN_SCORING_CLASS, names_class
from finetune.config.schema import Lora, Quantization
from finetune.config.yaml_file import read_value
from finetune.constants import (
    ADAPTER_CONFIG,
    CONFIG_FILE,
    CUTTING_KEYS,
    EXPORT,
    GENERATION_FILE,
    PROCESSOR_FILES,
    TOKENIZER_CONFIG,
    TOKENIZER_FILE,
)
from finetune.errors import UserError
from finetune.export.merge_choice import TRAINED, MergeChoice
from finetune.export.publish import ExportOptions
from finetune.export.sentence_transformer import (
    USE,
    USE_RANKER,
    describe_sentence_transformer,
    is_embedder,
    is_reranker,
)
from finetune.export.source import Source
from finetune.export.target import TargetModel
from finetune.export.write import Weights
from finetune.files.durable import sync_folder, write_file
from finetune.files.json_files import load_json, read_json_lines, read_json_object
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
USE_MASKED = (
    "It fills in masked tokens (mask_token: `{}`), and was trained with attention in both "
    "directions: pass a mask of shape [rows, 1, tokens, tokens] that is true everywhere. The "
    "logits before a masked token predict it. `generate` and servers write one token after "
    "another: they do not sample from it."
)
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
    """The text of README.md for an export of `source`; `merge`: how its adapter was merged onto a
    quantized base; `of_base`: sentences on the base's tensors.
    """
    front = yaml.safe_dump(_front_matter(source, is_adapter), sort_keys=False, allow_unicode=True)
    kind = "OFT" if source.adapter and source.adapter.config.get("oft_block_size") else "LoRA"
    what = f"{kind} adapter" if is_adapter else "model"
    if source.base_model:
        base = _shown_path(source.base_model)
    else:
        base = None
    if source.recipe.get("model_config"):
        origin = ", trained from random weights"
    else:
        origin = ""
    teacher = source.recipe.get("teacher_model_name_or_path")
    if teacher:
        teacher = f", distilled from {_shown_path(str(teacher))}"
    else:
        teacher = ""
    sections = [
        f"---\n{front}---",
        f"# {name}",
        (f"A {what} fine-tuned from {base}" if base else f"A causal language {what}{origin}")
        + f"{teacher}.",
        OTHER_BASE if source.base_differs else "",
        _section("Training", _training(source)),
        _section("Merge", _merge(merge, source.quantization) if merge is not None else ""),
        _section("Base", "\n".join(f"- {sentence}" for sentence in of_base)),
        _section("Data", _data(source)),
        _section("Recipe", _table(("Key", "Value"), _recipe_rows(source))),
        _section("Use", "\n\n".join(_uses(source, is_adapter, formats))),
    ]
    return "\n\n".join(filter(None, sections)) + "\n"


def add_evaluation(card: str, results: Sequence[BenchmarkResult]) -> str:
    """The text of a card with a section on `results`, in place of an earlier one."""
    return insert_section(
        card, "Evaluation", f"{_table(*benchmark_table(results))}\n\n{_measured_by(results)}"
    )


def insert_section(card: str, title: str, body: str) -> str:
    """The text of a card with a section before its use, in place of an earlier one of this
    title.
    """
    before, use, after = re.sub(
        rf"## {title}\n.*?(?=\n## |\Z)", "", card, flags=re.DOTALL
    ).partition("## Use\n")
    return f"{before.rstrip()}\n\n{_section(title, body)}\n\n{use}{after}".rstrip() + "\n"


def _measured_by(results: Sequence[BenchmarkResult]) -> str:
    bases = sorted({_shown_path(result.base_model) for result in results if result.base_model})
    versions = ", ".join(sorted({result.lm_eval for result in results}))
    harness = (
        f"[lm-evaluation-harness](https://github.com/EleutherAI/lm-evaluation-harness) {versions}"
    )
    return f"Measured with {harness}" + (f"; the base is {', '.join(bases)}." if bases else ".")


def _front_matter(source: Source, is_adapter: bool) -> dict[str, Any]:
    base = source.base_model
    datasets = [
        path
        for entry in _entries(source.recipe, "datasets")
        if _is_hub_name(path := str(entry.get("path")))
    ]
    front: dict[str, Any] = {
        "base_model": base if base and _is_hub_name(base) else None,
        "library_name": "peft" if is_adapter else _name_library(source),
        "pipeline_tag": _find_pipeline(source),
        **_license(source),
        "tags": [
            "finetune",
            *filter(None, [source.recipe.get("method")]),
            *(["lora"] if source.adapter else []),
        ],
        "datasets": datasets,
    }
    return {key: value for key, value in front.items() if value}


def _name_library(source: Source) -> str:
    if is_embedder(source.recipe) or is_reranker(source.recipe):
        return "sentence-transformers"
    return "transformers"


def _license(source: Source) -> dict[str, Any]:
    """The base model's license, as its own card or config says; no one else can grant one."""
    for folder in filter(None, (source.base, source.description)):
        for front in (_front_of(folder / CARD_FILE), read_json_object(folder / CONFIG_FILE)):
            if isinstance(front.get("license"), str):
                return {key: front[key] for key in LICENSE_KEYS if isinstance(front.get(key), str)}
    return {"license": UNKNOWN_LICENSE}


def _front_of(card: Path) -> dict[str, Any]:
    """The front matter of a model card; empty where there is none."""
    if card.is_file():
        text = card.read_text(encoding="utf-8", errors="replace")
    else:
        text = ""
    match = re.match(r"---\s*\n(.{0,65536}?)\n---", text, re.DOTALL)
    if match:
        front = read_value(match[1], "front", str(card))[0].value
    else:
        front = None
    return front if isinstance(front, dict) else {}


def _training(source: Source) -> str:
    """Steps, tokens and losses up to the checkpoint that is exported; the run may have continued
    after it.
    """
    state = source.state
    rows = [(label, f"{state[key]:,}") for label, key in _COUNTS if isinstance(state.get(key), int)]
    if source.recipe:
        # may be a path
        shown = {
            key: value for key, value in source.recipe.items() if not key.startswith("teacher")
        }
        rows.insert(0, ("Method", describe_method(shown)))
    if isinstance(state.get("epoch"), int | float):
        rows.append(("Epochs", f"{state['epoch']:.3g}"))
    lines = read_metrics(source.run)
    for label, key in (("Loss", "loss"), ("Held-out loss", "eval_loss")):
        if points := _series(lines, key, state.get("step")):
            rows.append((f"{label}, first and last", f"{points[0][1]:.4f} → {points[-1][1]:.4f}"))
            best_step, best = min(points, key=lambda point: point[1])
            rows += (
                [(f"{label}, best", f"{best:.4f} at step {best_step:,}")]
                if key == "eval_loss"
                else []
            )
    for label, key in _PREFERENCES:
        named = ((label, key), (f"{label}, held out", f"eval_{key}"))
        rows += [
            (name, f"{points[-1][1]:.3g}")
            for name, of in named
            if (points := _series(lines, of, state.get("step")))
        ]
    for label, key in _HELD_OUT:
        if points := _series(lines, key, state.get("step")):
            rows.append((label, f"{points[-1][1]:.4f}"))
    diverged = find_divergence(losses_of(lines, state.get("step")))
    if diverged:
        warning = [f"**This run diverged**: {diverged}."]
    else:
        warning = []
    step = state.get("step")
    if (
        source.run
        and isinstance(step, int)
        and (missing := describe_missing(source.run / "metrics.jsonl", step))
    ):
        warning.append(f"The run's metrics are incomplete: {missing}.")
    return "\n\n".join([*warning, _table(("", ""), rows)])


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


def _series(lines: list[dict[str, Any]], key: str, last_step: Any) -> list[tuple[int, float]]:
    """Returns (step, value) of the lines up to `last_step` that have a number under `key`."""
    last = last_step if isinstance(last_step, int) else math.inf
    points = [(line.get("step"), line.get(key)) for line in lines]
    return [
        (s, float(v))
        for s, v in points
        if isinstance(s, int) and s <= last and isinstance(v, int | float) and math.isfinite(v)
    ]


_COUNTS = (("Steps", "step"), ("Tokens read", "tokens"), ("Tokens trained on", "trained_tokens"))
_HELD_OUT = (
    ("Accuracy, held out", "eval_accuracy"),
    ("F1, mean of the classes, held out", "eval_f1_macro"),
    ("AUC, mean of the classes, held out", "eval_auc"),
    ("Expected calibration error, held out", "eval_ece"),
    ("Temperature by which scores are divided, fitted on the held-out rows", "eval_temperature"),
    ("Expected calibration error with it", "eval_ece_with_temperature"),
    ("Recall@1, held out", "eval_recall@1"),
    ("MRR@10, held out", "eval_mrr@10"),
    ("NDCG@10, held out", "eval_ndcg@10"),
)
_PREFERENCES = (
    ("Reward margin, last", "rewards/margins"),
    ("Pairs in order, last", "rewards/accuracies"),
)


def read_metrics(run: Path | None) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl, without those that cannot be read."""
    if run:
        return [line for line in read_json_lines(run / "metrics.jsonl") if line is not None]
    return []


def _data(source: Source) -> str:
    """A table of what was trained on and what the held-out loss was measured on."""
    if source.run:
        report = read_json_object(source.run / "data_report.json")
    else:
        report = {}
    kinds = (("datasets", "sources", "training"), ("eval_datasets", "eval_sources", "held out"))
    rows = []
    for key, report_key, use in kinds:
        entries = _entries(source.recipe, key)
        reported = report.get(report_key)
        for number, entry in enumerate(entries):
            if isinstance(reported, list) and len(reported) == len(entries):
                of_entry = reported[number]
            else:
                of_entry = {}
            rows.append((use, *_data_cells(entry, of_entry if isinstance(of_entry, dict) else {})))
    table = _table(("Use", "Source", "Split", "Format", "Weight", "Examples"), rows)
    size = source.recipe.get("eval_split_size")
    if not isinstance(size, int | float):
        return table
    return (
        f"{table}\n\nHeld out from these: {f'{size:.3g}' if size >= 1 else f'{size:.3%}'} of the "
        "rows."
    )


def _data_cells(entry: Mapping[str, Any], reported: Mapping[str, Any]) -> tuple[str, ...]:
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
    recipe = source.recipe
    bits = source.quantization.bits
    shown = [
        key
        for key in RECIPE_KEYS
        if recipe.get("use_peft") or key == "use_peft" or key not in keys_of(Lora)
    ]
    shown += [key for key in keys_of(Quantization) if f"{bits}bit" in key]
    values = {key: recipe[key] for key in shown if recipe.get(key) not in (None, [], {})}
    if isinstance(adapter := values.get("adapter_name_or_path"), str):
        values["adapter_name_or_path"] = _shown_path(adapter)
    return [(f"`{key}`", f"`{json.dumps(value)}`") for key, value in values.items()]


def _uses(source: Source, is_adapter: bool, formats: Sequence[str]) -> Iterator[str]:
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
    quantization = source.quantization
    if is_adapter and quantization.bits is not None:
        settings = f"load_in_{quantization.bits}bit=True"
        if quantization.bits == 4:
            compute_dtype = str(source.compute_dtype).removeprefix("torch.")
            settings = (
                f"\n    {settings},\n    "
                f'bnb_4bit_quant_type="{quantization.bnb_4bit_quant_type}",\n'
                f"    bnb_4bit_use_double_quant={quantization.bnb_4bit_use_double_quant},\n"
                f'    bnb_4bit_compute_dtype="{compute_dtype}",\n'
            )
        return (
            "The adapter was trained on the base in this quantization, made from the numbers as "
            "the base's files hold them "
            '(`dtype="auto"`):\n\n'
            "```python\nfrom peft import AutoPeftModelForCausalLM\nfrom transformers import "
            f"BitsAndBytesConfig\n\nquantization = BitsAndBytesConfig({settings})\nmodel = "
            "AutoPeftModelForCausalLM.from_pretrained(\n"
            '    "PATH_OR_NAME", dtype="auto", quantization_config=quantization\n)\n```\n\n'
            "On a CPU call `model.train()` before the forward: outside of training bitsandbytes "
            "multiplies in bf16 on some CPUs, and fails there where a layer's output width is no "
            "multiple of 32."
        )
    if _is_vision_language(source):
        auto_class = "AutoModelForImageTextToText"
    else:
        auto_class = "AutoModelForCausalLM"
    head = _read_head(source)
    if head.names:
        auto_class = "AutoModelForSequenceClassification"
    if head.reads_tokens:
        auto_class = "AutoModelForTokenClassification"
    if is_adapter and head.reads_tokens:
        lines = [f"from transformers import AutoConfig, {auto_class}", "from peft import PeftModel"]
        lines += ["", f'config = AutoConfig.from_pretrained("BASE", num_labels={len(head.names)})']
        lines.append("config.token_classification_bias = False")
        lines.append(f'base = {auto_class}.from_pretrained("BASE", config=config)')
        lines.append('model = PeftModel.from_pretrained(base, "PATH_OR_NAME")')
    elif is_adapter and head.names:
        lines = ["from peft import PeftModel", f"from transformers import {auto_class}", ""]
        lines.append(f'base = {auto_class}.from_pretrained("BASE", num_labels={len(head.names)})')
        lines.append('model = PeftModel.from_pretrained(base, "PATH_OR_NAME")')
    elif is_adapter and _is_vision_language(source):
        lines = ["from peft import PeftModel", f"from transformers import {auto_class}", ""]
        lines.append(
            f'model = PeftModel.from_pretrained({auto_class}.from_pretrained("BASE"), '
            f'"PATH_OR_NAME")'
        )
    elif is_adapter:
        lines = ["from peft import AutoPeftModelForCausalLM", ""]
        lines.append('model = AutoPeftModelForCausalLM.from_pretrained("PATH_OR_NAME")')
    else:
        lines = [f"from transformers import {auto_class}, AutoTokenizer", ""]
        lines += [f'model = {auto_class}.from_pretrained("PATH_OR_NAME")']
        lines += ['tokenizer = AutoTokenizer.from_pretrained("PATH_OR_NAME")']
    return "\n".join(["```python", *lines, "```"])


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
    lines = [
        " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) for row in rows
    ]
    if not lines:
        return ""
    return "\n".join(
        f"| {line} |" for line in [" | ".join(head), " | ".join("---" for _ in head), *lines]
    )


def _entries(recipe: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
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


TOKENIZER_FILES = (
    "tokenizer*.json",
    "tokenizer.model*",
    "*.tiktoken",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*.jin*",
    "chat_template*.json",
    "additional_chat_templates/*.jinja",
    *PROCESSOR_FILES,
)


def write_metadata(
    folder: Path,
    source: Source,
    target: TargetModel,
    weights: Weights,
    title: str,
    options: ExportOptions,
) -> None:
    """Everything but the weights: of the model, of the adapter in its own folder, or of an adapter
    alone.

    Raises `UserError` where the tokenizer is damaged, or runs code of its own without
    `trust_remote_code`.
    """
    is_folder = "safetensors" in options.formats
    if weights.model and is_folder:
        if not options.trust_remote_code:
            _check_tokenizer_code(source.description)
        _write_json(
            folder / CONFIG_FILE, target.written_config(weights.dtype, options.trust_remote_code)
        )
        _write_json(folder / GENERATION_FILE, _generation_config(source, target))
        if is_embedder(source.recipe):
            for name, content in describe_sentence_transformer(
                source.recipe, _read_hidden(source)
            ).items():
                (folder / name).parent.mkdir(exist_ok=True)
                _write_json(folder / name, content)
                sync_folder((folder / name).parent)
    if weights.model:
        keys: Any = {
            "merge": weights.merge,
            "formats": options.formats,
            "of_base": weights.account.sentences,
        }
        _write_text(folder / CARD_FILE, model_card(source, title, **keys))
    if not is_folder:
        return
    if source.adapter is not None and weights.adapter is not None:
        adapter_folder = (folder / weights.adapter.name).parent
        adapter_folder.mkdir(exist_ok=True)
        config = dict(weights.adapter_config) | {
            "base_model_name_or_path": source.base_model,
            "inference_mode": True,
        }
        if source.recipe.get("model_name_or_path") == source.base_model:
            config |= {
                "revision": source.adapter.config.get("revision")
                or source.recipe.get("model_revision")
            }
        _write_json(adapter_folder / ADAPTER_CONFIG, config)
        _write_text(adapter_folder / CARD_FILE, model_card(source, title, is_adapter=True))
    _copy_tokenizer(source.description, folder)
    if weights.model and options.trust_remote_code:
        for path in sorted(source.description.glob("*.py")):
            _copy(path, folder / path.name)


def _read_hidden(source: Source) -> int:
    """Numbers in a state of the model."""
    return int(read_json_object(source.description / CONFIG_FILE)["hidden_size"])


def _copy_tokenizer(description: Path, folder: Path) -> None:
    """The tokenizer's files and its chat template, byte for byte but for what would cut or pad a
    text.

    Raises `UserError` where one of JSON is damaged.
    """
    for path in sorted({path for pattern in TOKENIZER_FILES for path in description.glob(pattern)}):
        destination = folder / path.relative_to(description)
        destination.parent.mkdir(exist_ok=True)
        content = load_json(path) if path.suffix == ".json" else {}
        cutting = CUTTING_KEYS.get(path.name, ())
        if any(content.get(key) for key in cutting):
            kept = {key: value for key, value in content.items() if key not in cutting}
            _write_text(destination, json.dumps(kept, indent=2, ensure_ascii=False))
        else:
            _copy(path, destination)
        sync_folder(destination.parent)


def has_tokenizer(folder: Path) -> bool:
    return (folder / TOKENIZER_CONFIG).exists() or (folder / TOKENIZER_FILE).exists()


def has_chat_template(folder: Path) -> bool:
    """Whether the tokenizer in `folder` has a chat template, in a file of its own or in its
    config.
    """
    config = read_json_object(folder / TOKENIZER_CONFIG)
    return bool(config.get("chat_template")) or any(folder.glob("chat_template*"))


def _check_tokenizer_code(description: Path) -> None:
    """Raises `UserError` where the tokenizer's config names code to run, and transformers has no
    class for it.
    """
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    path = description / TOKENIZER_CONFIG
    config = load_json(path) if path.is_file() else {}
    name = config.get("tokenizer_class")
    if "auto_map" in config and (
        not isinstance(name, str) or tokenizer_class_from_name(name) is None
    ):
        raise UserError(
            f"{path}: auto_map: this tokenizer has code of its own ({name}); read it, then allow "
            "it with --trust-remote-code"
        )


def _copy(path: Path, destination: Path) -> None:
    """Copies a small file: the target of a link, as in the hub's cache."""
    try:
        write_file(destination, [path.read_bytes()])
    except OSError as error:
        raise UserError(f"{path}: cannot be copied to {destination}: {error.strerror}") from None


def _write_json(path: Path, content: dict[str, Any]) -> None:
    """JSON as transformers writes it."""
    write_file(
        path, [f"{json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False)}\n".encode()]
    )


def _write_text(path: Path, text: str) -> None:
    write_file(path, [text.encode(errors="backslashreplace")])


def _generation_config(source: Source, target: TargetModel) -> dict[str, Any]:
    """The base model's, which names the tokens that end an answer; else the source's, or one from
    the config.
    """
    from transformers import GenerationConfig

    folders = [folder for folder in (source.base, source.description) if folder is not None]
    if source.recipe.get("special_tokens") or source.recipe.get("eot_tokens"):
        folders.reverse()  # the checkpoint's is the base's with these tokens
    path = next(
        (folder / GENERATION_FILE for folder in folders if (folder / GENERATION_FILE).exists()),
        None,
    )
    if path is not None:
        content: Any = load_json(path, "fix it, or remove it to derive one from config.json")
    else:
        content = GenerationConfig.from_model_config(target.model.config).to_diff_dict()
    if content.get("use_cache") is False:
        del content["use_cache"]
    return dict(content)
