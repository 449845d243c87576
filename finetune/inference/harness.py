"""Measures a model and its base with EleutherAI's lm-eval."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from finetune.constants import Names
from finetune.errors import UserError, on_one_line
from finetune.files.run_files import BenchmarkResult
from finetune.inference.inference_model import (
    InferenceModel,
    LoadOptions,
    load_base,
    load_inference_model,
)
from finetune.inference.inputs import ModelLocation
from finetune.models.documents import depends_on_length


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkOptions:
    """The options of a measurement, by lm-eval's names."""

    tasks: Names
    include_path: str | None = None  # a folder with the user's task files
    num_fewshot: int | None = None  # None: as each task says
    limit: float | None = None  # documents of each task, or a share below 1; None: all
    batch_size: str = "auto"
    apply_chat_template: bool = False


def evaluate_models(
    location: ModelLocation,
    base: ModelLocation | None,
    load_options: LoadOptions,
    options: BenchmarkOptions,
    log: Callable[[str], object],
) -> list[BenchmarkResult]:
    """Loads and measures the model, then its base.

    Raises `UserError` where one of them cannot be loaded or measured.
    """
    manager = make_task_manager(options)
    model = load_inference_model(location, load_options, log)
    log(f"model   {model.name} on {model.model.device}")
    trained = measure(model, options, manager)
    if base is None:
        return collect_results(trained, None, (location.name, None), options)
    base_model = load_base(model, base, load_options, log)
    log(f"beside  {base_model.name}")
    measured_base = measure(base_model, options, manager)
    return collect_results(trained, measured_base, (location.name, base.name), options)


def make_task_manager(options: BenchmarkOptions) -> TaskManager:
    """Makes an index of the tasks in `include_path`, with lm-eval's own where one is asked for.

    Raises `UserError` for an unknown task.
    """
    unknown = list(options.tasks)
    if options.include_path is not None:
        # lm-eval's own tasks are thousands of files, and may not be needed
        manager = TaskManager(include_path=options.include_path, include_defaults=False)
        unknown = _find_unknown(manager, options.tasks)
    if unknown:
        manager = TaskManager(include_path=options.include_path)
        unknown = _find_unknown(manager, options.tasks)
    if unknown:
        raise UserError(
            f"--tasks: {', '.join(unknown)}: no such task of lm-eval {version('lm_eval')}; "
            "`lm-eval ls tasks` lists them, and --include-path names a folder with your own"
        )
    return manager


def _find_unknown(manager: TaskManager, tasks: Sequence[str]) -> list[str]:
    return [task for task in tasks if not manager.match_tasks([task]) and not Path(task).is_file()]


def measure(
    model: InferenceModel, options: BenchmarkOptions, manager: TaskManager
) -> dict[str, Any]:
    """Returns lm-eval's results for one model. Raises `UserError` where lm-eval fails."""
    if options.apply_chat_template and model.template is None:
        raise UserError(f"{model.name}: has no chat template, which --apply-chat-template needs")
    # padding would change the results of a model that depends on the length of its input
    batch_size = 1 if depends_on_length(model.model) else options.batch_size
    try:
        with model.computing():
            results = simple_evaluate(
                model=HFLM(
                    pretrained=model.model,
                    tokenizer=model.tokenizer,
                    batch_size=batch_size,
                    chat_template_args=dict(model.variables),
                ),
                tasks=list(options.tasks),
                num_fewshot=options.num_fewshot,
                limit=options.limit,
                apply_chat_template=options.apply_chat_template,
                task_manager=manager,
                log_samples=False,
            )
    except Exception as error:  # the hub, data sets and the code of tasks raise any kind of error
        reason = on_one_line(error)
        raise UserError(
            f"{','.join(options.tasks)}: lm-eval cannot measure it: {reason}"
        ) from error
    assert isinstance(results, dict)
    return results


def collect_results(
    trained: Mapping[str, Any],
    base: Mapping[str, Any] | None,
    names: tuple[str, str | None],
    options: BenchmarkOptions,
) -> list[BenchmarkResult]:
    """Makes a result for every metric of every task and group to which lm-eval gives a number.

    Args:
        trained: lm-eval's results for the model.
        base: Those for its base; None if it was not measured.
        names: The names of both models.
        options: The options of the measurement.
    """
    results = []
    for task, metrics in trained["results"].items():
        config = trained.get("configs", {}).get(task, {})
        samples = trained.get("n-samples", {}).get(task, {})
        fewshot = trained.get("n-shot", {}).get(task, config.get("num_fewshot"))
        better = trained.get("higher_is_better", {}).get(task, {})
        base_metrics = base["results"].get(task, {}) if base is not None else {}
        is_sampled = samples.get("effective") != samples.get("original")
        for name, value in metrics.items():
            metric, _, filtered = name.partition(",")  # a metric of each of the task's filters
            is_metric = bool(filtered) and not metric.endswith("_stderr")
            if not (is_metric and _is_number(value)):
                continue
            stderr = f"{metric}_stderr,{filtered}"
            result = BenchmarkResult(
                task=task,
                metric=metric,
                filter=filtered,
                trained=float(value),
                trained_stderr=_number(metrics.get(stderr)),
                base=_number(base_metrics.get(name)),
                base_stderr=_number(base_metrics.get(stderr)),
                higher_is_better=better.get(metric) is not False,
                samples=samples.get("effective"),
                is_limited=options.limit is not None and is_sampled,
                num_fewshot=fewshot if isinstance(fewshot, int) else None,
                chat_template=options.apply_chat_template,
                version=str(trained.get("versions", {}).get(task, "")),
                model=names[0],
                base_model=names[1] if base is not None else None,
                lm_eval=version("lm_eval"),
            )
            results.append(result)
    return results


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _number(value: Any) -> float | None:
    return float(value) if _is_number(value) else None
