"""The HTML of a report: the text of each section, rendered with page.html.jinja."""

import html
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import yaml
from markupsafe import Markup

from finetune import __version__
from finetune.config.keys import leaves
from finetune.config.methods import DEFAULT_METHOD
from finetune.constants import RATIO_SHARES
from finetune.errors import UserError
from finetune.files.run_json import benchmark_table, describe_models, find_divergence, losses_of
from finetune.plan.plan import Plan
from finetune.plan.table import memory_rows
from finetune.report.charts import format_compact, list_metrics, make_charts
from finetune.report.run_data import RunRecord, read_run
from finetune.units import count, counted, gib

HERE = Path(__file__).parent
WAITING = "for the first line of metrics; this page then shows it"
MAX_SAMPLES = 20
DATA_TABLES = ("findings", "sources", "eval_sources")  # have a list or table of their own
# Counts in a data report by other names; left out where they are 0, as most are under any one method.
COUNT_NAMES = {
    "pairs": "pairs",
    "desirable": "answers rated good",
    "undesirable": "answers rated bad",
    "held out examples": "held-out examples",
    "held out groups pairs": "held-out pairs",
    "held out groups desirable": "held-out answers rated good",
    "held out groups undesirable": "held-out answers rated bad",
}
COLUMNS = (
    "rows_read", "rows_skipped", "examples", "pairs", "tokens", "trained_tokens", "overlong", "duplicates",
)  # fmt: skip
ALWAYS_DIFFERENT = ("output_dir", "run_name")
NOT_COMPARED = ("num_processes", "distributed_type", "use_cpu")  # of the Accelerate file: ranks and device say it


class Tile(NamedTuple):
    """One number of the summary."""

    name: str
    value: str
    note: str = ""


def render_page(
    runs: Sequence[RunRecord], plans: Sequence[Plan | None], *, live: bool = False, notices: Sequence[str] = ()
) -> str:
    """The whole HTML of one run, or of several with their plots overlaid. `plans`: each run's, where known.

    `live`: the page fetches itself again while it is open. `notices` are shown before all else.
    """
    charts = make_charts(runs, [plan.peak_bytes + plan.process_bytes if plan else None for plan in plans])
    columns = [name for name in COLUMNS if name != "pairs" or any(run.rows != "answers" for run in runs)]
    sections = [_describe_run(run, plan, columns) for run, plan in zip(runs, plans, strict=True)]
    names = list(dict.fromkeys(tile.name for section in sections for tile in section["tiles"]))
    data = {
        chart.key: [{"label": n.label, "run": n.run, "points": n.points, "steps": n.steps} for n in chart.lines]
        for chart in charts
    }
    page = _template().render(
        title=" · ".join(run.name for run in runs) or "Waiting",
        subtitle=_subtitle(runs[0]) if len(runs) == 1 else counted(len(runs), "run") if runs else WAITING,
        live=live,
        notices=notices,
        runs=sections,
        source_columns=[name.replace("_", " ") for name in columns],
        tile_names=names,
        differing=list_differences(runs),
        charts=charts,
        folders=", ".join(str(run.folder) for run in runs),
        version=__version__,
        style=_style(),
        script=Markup((HERE / "page.js").read_text(encoding="utf-8")),
        live_script=Markup((HERE / "live.js").read_text(encoding="utf-8")),
        # `<` is escaped, so that no name of a run can end the script element.
        data=Markup(json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")),
    )
    return page.encode("utf-8", "replace").decode()  # a file of JSON may hold half of a surrogate pair


def render_plots(run: RunRecord) -> str:
    """The plots of a run alone, with their style."""
    template = _template()
    plots = template.blocks["plots"](template.new_context({"charts": make_charts([run], [None])}))
    return f"<style>{_style()} body {{ padding: 0 }}</style>{''.join(plots)}"


def _template() -> jinja2.Template:
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string((HERE / "page.html.jinja").read_text(encoding="utf-8"))


def _style() -> Markup:
    return Markup((HERE / "page.css").read_text(encoding="utf-8"))


def _describe_run(run: RunRecord, plan: Plan | None, columns: Sequence[str]) -> dict[str, Any]:
    """What the template shows of one run; `columns`: of the table of its sources."""
    tiles = list(_make_tiles(run))
    questions = [sample for sample in run.samples if sample.get("expected")]
    asked = [sample for sample in run.samples if not sample.get("expected")]  # the recipe's sample_prompts
    findings, facts = _describe_data(run.data_report)
    process = plan.process_bytes if plan else 0
    sources = [*run.data_report.get("sources", []), *run.data_report.get("eval_sources", [])]
    return {
        "name": run.name,
        "tiles": tiles,
        "by_name": {tile.name: tile for tile in tiles},
        "subtitle": _subtitle(run),
        "diverged": find_divergence(losses_of(run.lines)),
        "questions": _pair_answers(questions),
        "prompts": _pair_answers(asked),
        "sampled": _page_completions(run.completions),
        "ratios": _ratio_histogram(run),
        "benchmarks": benchmark_table(run.benchmarks) if run.benchmarks else None,
        "benchmarks_note": describe_models(run.benchmarks),
        "findings": findings,
        "data": facts,
        "sources": [[Path(str(s.get("path", ""))).name, *(f"{s.get(key, 0):,}" for key in columns)] for s in sources],
        "memory": memory_rows(plan.phases) if plan else [],
        "memory_note": f"one rank; its process adds about {gib(process)} GiB" if process else "peak of each phase",
        "recipe": [
            (key, _format_value(value), _format_value(default)) for key, (value, default) in run.changed_keys().items()
        ],
        "whole_recipe": yaml.safe_dump(run.recipe, sort_keys=False, allow_unicode=True),
        "checkpoints": run.checkpoints,
        "environment": list(_flatten(run.environment)),
    }


def list_differences(runs: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """Where the runs differ, with each run's value: layout, ranks, device, and keys of the recipe; of lists and
    mappings only the entries that differ."""
    found = []
    for run in runs:
        machine = {key: run.environment.get(key) for key in ("layout", "ranks", "device")}
        spread = {key: value for key, value in run.sharding.items() if key not in NOT_COMPARED}
        found.append(dict(leaves(machine | {"accelerate": spread} | run.recipe)))
    keys = list(dict.fromkeys(key for of_run in found for key in of_run if key not in ALWAYS_DIFFERENT))
    values = [(key, [_format_value(of_run[key]) if key in of_run else "–" for of_run in found]) for key in keys]
    return [(key, of_runs) for key, of_runs in values if len(set(of_runs)) > 1]


def _subtitle(run: RunRecord) -> str:
    """The model, layout and machine in one line."""
    model = run.recipe.get("model_name_or_path") or (run.recipe.get("model_config") or {}).get("model_type")
    ranks = run.environment.get("ranks")
    parts = [
        str(model) if model else None,
        _describe_trained(run.recipe) if model else None,
        None if run.method == DEFAULT_METHOD else run.method,
        run.environment.get("layout"),
        counted(ranks, "rank") if ranks else None,
        run.environment.get("device"),
    ]
    return " · ".join(str(part) for part in parts if part)


def _describe_trained(recipe: Mapping[str, Any]) -> str:
    if recipe.get("use_peft"):
        return "LoRA"
    return f"{'some' if recipe.get('trainable_modules') or recipe.get('frozen_modules') else 'all'} parameters trained"


def _make_tiles(run: RunRecord) -> Iterator[Tile]:
    yield Tile("Steps", f"{run.last('step') or 0:,}", f"{run.last('epoch'):.2f} epochs" if run.last("epoch") else "")
    yield from _change_tiles(run, {"reward": "Reward", "eval_reward": "Held-out reward"}, format_compact)
    yield from _change_tiles(run, {"loss": "Training loss", "eval_loss": "Held-out loss"}, "{:.4f}".format)
    if run.last("rewards/accuracies") is not None:
        held_out = "eval_" if run.last("eval_rewards/accuracies") is not None else ""
        margin = f"reward margin {format_compact(run.last(f'{held_out}rewards/margins') or 0.0)}"
        name = "Held-out pairs in order" if held_out else "Pairs in order"
        yield Tile(name, f"{run.last(f'{held_out}rewards/accuracies'):.0%}", margin)
    yield from _change_tiles(run, {"exact_match": "Answered exactly"}, "{:.0%}".format)
    yield from _change_tiles(run, {key: key.partition("/")[2] for key in list_metrics([run])}, format_compact)
    if run.last("tokens"):
        trained = run.last("trained_tokens")
        yield Tile("Tokens read", count(run.last("tokens")), f"{count(trained)} trained" if trained else "")
    speeds = [value for _, value in run.series("tokens_per_second")]
    if speeds:
        mfu = [value for _, value in run.series("mfu")]
        speed = format_compact(statistics.median(speeds))
        yield Tile("Tokens/s", speed, f"{statistics.median(mfu):.0%} MFU" if mfu else "median")
    idle = run.last("idle_expert_share_by_layer")
    if isinstance(idle, list) and idle:
        worst = f"layer {idle.index(max(idle))} of {len(idle)} mixtures"
        busiest = f"busiest expert {run.last('largest_expert_share'):.0%}"
        yield Tile("Idle experts", f"{max(idle):.0%}", f"{worst}; {busiest}")
    if run.last("peak_memory_bytes"):
        yield Tile("Peak memory", f"{gib(max(v for _, v in run.series('peak_memory_bytes')))} GiB", "first rank")


def _change_tiles(run: RunRecord, names: Mapping[str, str], form: Callable[[float], str]) -> Iterator[Tile]:
    """The last value of each key that the run logged, under its name, and the first one."""
    for key, name in names.items():
        if (last := run.last(key)) is not None:
            yield Tile(name, form(last), f"from {form(run.first(key))}")


def _pair_answers(samples: Sequence[dict[str, Any]]) -> tuple[list[dict[str, str]], str]:
    """Each prompt with its first and last answer, and a note on their steps."""
    by_prompt: dict[str, list[dict[str, Any]]] = {}
    for sample in samples:
        by_prompt.setdefault(str(sample.get("prompt", "")), []).append(sample)
    shown = []
    for prompt, answers in list(by_prompt.items())[:MAX_SAMPLES]:
        expected = str(answers[-1].get("expected") or "")
        before = answers[0] if len(answers) > 1 or answers[0].get("step") == 0 else None
        after = answers[-1] if answers[-1] is not before else None  # a run in progress may have answered once
        shown.append(
            {"prompt": prompt, "expected": expected, **_grade_answer("before", before), **_grade_answer("after", after)}
        )
    hidden = len(by_prompt) - len(shown)
    steps = sorted({sample.get("step", 0) for sample in samples})
    notes = [f"at steps {steps[0]} and {steps[-1]}"] if len(steps) > 1 else []
    notes += [f"the first {len(shown)} of {len(by_prompt)}"] if hidden > 0 else []
    return shown, "; ".join(notes)


def _ratio_histogram(run: RunRecord) -> list[tuple[str, list[tuple[str, float]]]]:
    """(a range of probability ratios, the % of tokens in it in the first and last tenth of the run and in all of it,
    each as a text and as the length of a bar); empty where the method samples nothing."""
    series = [[value for _, value in run.series(name)] for name in RATIO_SHARES]
    count = min(map(len, series))
    tenth = max(1, count // 10)
    found = []
    for name, values in zip(RATIO_SHARES, series, strict=True) if count else ():
        means = [100 * sum(part) / len(part) for part in (values[:tenth], values[-tenth:], values)]
        said = name.rpartition("/")[2].replace("-", " to ")
        found.append((said, [(f"{mean:.3g}", round(mean, 2)) for mean in means]))
    return found


def _page_completions(lines: Sequence[dict[str, Any]]) -> list[tuple[int, list[dict[str, str]]]]:
    """(step, its completions) of at most MAX_SAMPLES steps, from the first to the last."""
    by_step: dict[int, list[dict[str, Any]]] = {}
    for line in lines:
        by_step.setdefault(line.get("step", 0), []).append(line)
    steps = sorted(by_step)
    last = len(steps) - 1
    shown = sorted({round(i * last / max(1, MAX_SAMPLES - 1)) for i in range(MAX_SAMPLES)}) if steps else []
    return [(steps[i], [_describe_completion(line) for line in by_step[steps[i]]]) for i in shown]


def _describe_completion(line: Mapping[str, Any]) -> dict[str, str]:
    rewards = ((name, value) for name, value in (line.get("rewards") or {}).items())
    said = ", ".join(f"{name} {'–' if value is None else _format_number(value)}" for name, value in rewards)
    advantage = line.get("advantage")
    texts = {key: str(line.get(key, "")) for key in ("prompt", "completion", "ended")}
    return texts | {"rewards": said, "advantage": "" if advantage is None else f"{advantage:+.2f}"}


def _grade_answer(name: str, sample: dict[str, Any] | None) -> dict[str, str]:
    """An answer under `name`, and its CSS class: right, wrong, or none where no answer is expected."""
    if sample is None:
        return {name: "", f"{name}_class": ""}
    text, expected = str(sample.get("answer", "")), str(sample.get("expected") or "").strip()
    grade = "" if not expected else "right" if text.strip() == expected else "wrong"
    return {name: text, f"{name}_class": grade}


def _describe_data(report: dict[str, Any]) -> tuple[list[dict[str, str]], list[tuple[str, str]]]:
    """The findings of a data report, and the rest of it as names and values."""
    findings = [
        {
            "severity": str(found.get("severity", "note")),
            "text": f"in {found.get('rows', 0):,} of {counted(found.get('of', 0), 'row')} {found.get('what', '')}"
            + (f" ({', '.join(found['where'])})" if found.get("where") else ""),
        }
        for found in report.get("findings", [])
    ]
    facts = _flatten({key: value for key, value in report.items() if key not in DATA_TABLES})
    return findings, [
        (COUNT_NAMES.get(name, name), value) for name, value in facts if name not in COUNT_NAMES or value != "0"
    ]


def _flatten(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Names and values of nested mappings; an inner name follows its outer one: `lengths median`."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flatten(inner, f"{name} {key}".strip().replace("_", " "))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for number, item in enumerate(value, start=1):
            yield from _flatten(item, f"{name} {number}")
    elif value not in (None, []):
        yield name, " ".join(map(str, value)) if isinstance(value, list) else _format_number(value)


def _format_number(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def _format_value(value: Any) -> str:
    """A recipe's value as YAML, without the keys that are null."""
    if isinstance(value, dict) or (isinstance(value, list) and any(isinstance(item, dict) for item in value)):
        items = [value] if isinstance(value, dict) else value
        given = [{k: v for k, v in item.items() if v is not None} if isinstance(item, dict) else item for item in items]
        plain = given[0] if isinstance(value, dict) else given
        return str(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)).strip()
    return "null" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


SECONDS = 1.0  # between two drawings, at least
HEIGHT = 430  # pixels: of the loss; the other plots are below it


class Plots:
    """A callback that shows the run's plots below the cell that trains."""

    def __init__(self) -> None:
        self._shown: Any = None
        self._drawn_at = 0.0

    def on_log(self, event: Any) -> None:
        """Draws, but for lines that follow one another closely."""
        if time.monotonic() > self._drawn_at + SECONDS:
            self._draw(event.folder)

    def on_end(self, event: Any) -> None:
        """Draws all that was logged."""
        self._draw(event.folder)

    def _draw(self, folder: Path) -> None:
        from IPython.display import HTML, display

        with suppress(UserError, OSError):  # it is only looked at
            page = html.escape(render_plots(read_run(folder)))
            frame = HTML(f'<div><iframe srcdoc="{page}" style="width:100%;height:{HEIGHT}px;border:0"></iframe></div>')
            if self._shown is None:
                self._shown = display(frame, display_id=True)
            else:
                self._shown.update(frame)
        self._drawn_at = time.monotonic()
