"""The report's page: what each section says, handed to one template."""

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jinja2
import yaml
from markupsafe import Markup

from finetune import __version__
from finetune.divergence import find_divergence, losses_of
from finetune.recipe.keys import leaves
from finetune.report.charts import charts
from finetune.report.planned import Planned
from finetune.report.run_data import RunRecord
from finetune.report.series import compact
from finetune.units import count, counted, disk_size, gib

HERE = Path(__file__).parent
SAMPLES_SHOWN = 20
DATA_TABLES = ("findings", "sources", "eval_sources")  # shown in their own form
SOURCE_COLUMNS = ("rows_read", "rows_skipped", "examples", "tokens", "trained_tokens", "overlong", "duplicates")
WHERE_KEYS = ("output_dir", "run_name")  # every run differs in these


@dataclass(frozen=True, slots=True)
class Tile:
    """One number of the summary."""

    name: str
    value: str
    note: str = ""


def page(runs: Sequence[RunRecord], planned: Sequence[Planned | None]) -> str:
    """The whole HTML of one run, or of several with their plots laid over each other."""
    drawn = charts(runs, [plan.peak_bytes if plan else None for plan in planned])
    sections = [section(run, plan) for run, plan in zip(runs, planned, strict=True)]
    names = list(dict.fromkeys(tile.name for described in sections for tile in described["tiles"]))
    data = {
        chart.key: [{"label": n.label, "run": n.run, "points": n.points, "steps": n.steps} for n in chart.lines]
        for chart in drawn
    }
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((HERE / "page.html.jinja").read_text(encoding="utf-8"))
    return template.render(
        title=" · ".join(run.name for run in runs),
        subtitle=subtitle(runs[0]) if len(runs) == 1 else f"{len(runs)} runs",
        runs=sections,
        source_columns=[name.replace("_", " ") for name in SOURCE_COLUMNS],
        tile_names=names,
        differing=differing(runs),
        charts=drawn,
        folders=", ".join(str(run.folder) for run in runs),
        version=__version__,
        style=Markup((HERE / "page.css").read_text(encoding="utf-8")),
        script=Markup((HERE / "page.js").read_text(encoding="utf-8")),
        # `<` is escaped, so that no name of a run can end the script element.
        data=Markup(json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")),
    )


def section(run: RunRecord, plan: Planned | None) -> dict[str, Any]:
    """What the template shows of one run."""
    tiles = list(_tiles(run))
    questions = [sample for sample in run.samples if sample.get("expected")]
    asked = [sample for sample in run.samples if not sample.get("expected")]  # the recipe's sample_prompts
    diverged = find_divergence(losses_of(run.lines))
    findings, facts = _data(run.data_report)
    sources = [*run.data_report.get("sources", []), *run.data_report.get("eval_sources", [])]
    return {
        "name": run.name,
        "tiles": tiles,
        "by_name": {tile.name: tile for tile in tiles},
        "subtitle": subtitle(run),
        "diverged": str(diverged) if diverged else "",
        "questions": _samples(questions),
        "prompts": _samples(asked),
        "findings": findings,
        "data": facts,
        "sources": [
            [Path(str(s.get("path", ""))).name, *(f"{s.get(key, 0):,}" for key in SOURCE_COLUMNS)] for s in sources
        ],
        "memory": plan.table if plan else [],
        "memory_note": plan.note if plan else "",
        "recipe": [(key, _short(value), _short(default)) for key, (value, default) in run.changed_keys().items()],
        "whole_recipe": yaml.safe_dump(run.recipe, sort_keys=False, allow_unicode=True),
        "checkpoints": [asdict(point) | {"size": disk_size(point.size_bytes)} for point in run.checkpoints],
        "environment": list(_flat(run.environment)),
    }


def differing(runs: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """What the runs disagree on, with each run's value: layout, ranks, device, and the recipe's keys; of lists and
    mappings only what differs in them."""
    found = [dict(leaves(_machine(run) | run.recipe)) for run in runs]
    keys = list(dict.fromkeys(key for of_run in found for key in of_run if key not in WHERE_KEYS))
    values = [(key, [_short(of_run[key]) if key in of_run else "–" for of_run in found]) for key in keys]
    return [(key, of_runs) for key, of_runs in values if len(set(of_runs)) > 1]


def _machine(run: RunRecord) -> dict[str, Any]:
    """How a run was spread, and over what: where runs of one recipe differ."""
    machine = {key: run.environment.get(key) for key in ("layout", "ranks", "device")}
    spread = {
        key: value for key, value in run.sharding.items() if key not in ("num_processes", "distributed_type", "use_cpu")
    }
    return machine | {"accelerate": spread}


def subtitle(run: RunRecord) -> str:
    """The model, the layout and the machine in a line."""
    model = run.recipe.get("model_name_or_path") or (run.recipe.get("model_config") or {}).get("model_type")
    ranks = run.environment.get("ranks")
    parts = [
        str(model) if model else None,
        "LoRA" if run.recipe.get("use_peft") else "all parameters trained" if model else None,
        run.environment.get("layout"),
        counted(ranks, "rank") if ranks else None,
        run.environment.get("device"),
    ]
    return " · ".join(str(part) for part in parts if part)


def _tiles(run: RunRecord) -> Iterator[Tile]:
    yield Tile("Steps", f"{run.last('step') or 0:,}", f"{run.last('epoch'):.2f} epochs" if run.last("epoch") else "")
    for key, name in (("loss", "Training loss"), ("eval_loss", "Held-out loss")):
        if run.last(key) is not None:
            yield Tile(name, f"{run.last(key):.4f}", f"from {run.first(key):.4f}")
    if run.last("exact_match") is not None:
        yield Tile("Answered exactly", f"{run.last('exact_match'):.0%}", f"from {run.first('exact_match'):.0%}")
    if run.last("tokens"):
        trained = run.last("trained_tokens")
        yield Tile("Tokens read", count(run.last("tokens")), f"{count(trained)} trained" if trained else "")
    speeds = [value for _, value in run.series("tokens_per_second")]
    if speeds:
        mfu = [value for _, value in run.series("mfu")]
        yield Tile(
            "Tokens/s",
            compact(statistics.median(speeds)),
            f"{statistics.median(mfu):.0%} MFU" if mfu else "median",
        )
    if run.last("peak_memory_bytes"):
        yield Tile("Peak memory", f"{gib(max(v for _, v in run.series('peak_memory_bytes')))} GiB", "first rank")


def _samples(samples: Sequence[dict[str, Any]]) -> tuple[list[dict[str, str]], str]:
    """Each prompt's first and last answer, and a note on when these were given."""
    by_prompt: dict[str, list[dict[str, Any]]] = {}
    for sample in samples:
        by_prompt.setdefault(str(sample.get("prompt", "")), []).append(sample)
    shown = []
    for prompt, answers in list(by_prompt.items())[:SAMPLES_SHOWN]:
        expected = str(answers[-1].get("expected") or "")
        before = answers[0] if len(answers) > 1 or answers[0].get("step") == 0 else None
        after = answers[-1] if answers[-1] is not before else None  # a run that is going on has not answered again
        shown.append({"prompt": prompt, "expected": expected, **_judged("before", before), **_judged("after", after)})
    hidden = len(by_prompt) - len(shown)
    steps = sorted({sample.get("step", 0) for sample in samples})
    notes = [f"at steps {steps[0]} and {steps[-1]}"] if len(steps) > 1 else []
    notes += [f"the first {len(shown)} of {len(by_prompt)}"] if hidden > 0 else []
    return shown, "; ".join(notes)


def _judged(name: str, sample: dict[str, Any] | None) -> dict[str, str]:
    """An answer under `name`, with the class that says whether it is right; nothing where nothing was expected."""
    if sample is None:
        return {name: "", f"{name}_class": ""}
    text, expected = str(sample.get("answer", "")), str(sample.get("expected") or "").strip()
    judgment = "" if not expected else "right" if text.strip() == expected else "wrong"
    return {name: text, f"{name}_class": judgment}


def _data(report: dict[str, Any]) -> tuple[list[dict[str, str]], list[tuple[str, str]]]:
    """The findings, and everything else as name and value."""
    findings = [
        {
            "severity": str(found.get("severity", "note")),
            "text": f"in {found.get('rows', 0):,} of {counted(found.get('of', 0), 'row')} {found.get('what', '')}"
            + (f" ({', '.join(found['where'])})" if found.get("where") else ""),
        }
        for found in report.get("findings", [])
    ]
    return findings, list(_flat({key: value for key, value in report.items() if key not in DATA_TABLES}))


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Nested mappings as `outer inner` names."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(inner, f"{name} {key}".strip().replace("_", " "))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for number, item in enumerate(value, start=1):
            yield from _flat(item, f"{name} {number}")
    elif value not in (None, []):
        yield name, " ".join(map(str, value)) if isinstance(value, list) else _plain(value)


def _plain(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def _short(value: Any) -> str:
    """A recipe's value as its file would have it, what is left out left out."""
    if isinstance(value, dict) or (isinstance(value, list) and any(isinstance(item, dict) for item in value)):
        items = [value] if isinstance(value, dict) else value
        given = [{k: v for k, v in item.items() if v is not None} if isinstance(item, dict) else item for item in items]
        plain = given[0] if isinstance(value, dict) else given
        return str(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)).strip()
    return "null" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
