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
    """The options of a measurement, with lm-eval's names."""

    tasks: Names
    include_path: str | None = None  # a folder with the user's task files
    num_fewshot: int | None = None  # None: as each task says
    limit: float | None = None  # of each task: a number of documents, or a share below 1; None: all
    batch_size: str = "auto"
    apply_chat_template: bool = False


def evaluate_models(
    location: ModelLocation,
    base: ModelLocation | None,
    load_options: LoadOptions,
    options: BenchmarkOptions,
    log: Callable[[str], object],
) -> list[BenchmarkResult]:
    """Loads and measures a model, then its base.

    Args:
        location: The model.
        base: The base; None: only the model is measured.
        load_options: The options of loading, for both.
        options: The options of the measurement.
        log: Called with messages for the user.

    Raises:
        UserError: A task is unknown, or one of the models cannot be loaded or measured.
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
    """Makes lm-eval's index of tasks: of those in `include_path`, and of lm-eval's own if needed.

    Raises `UserError` for an unknown task.
    """
    unknown = list(options.tasks)
    if options.include_path is not None:
        # lm-eval's own tasks are thousands of files, read only if a task is not found here
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
    """Returns the tasks that are neither in the index nor a file."""
    return [task for task in tasks if not manager.match_tasks([task]) and not Path(task).is_file()]


def measure(
    model: InferenceModel, options: BenchmarkOptions, manager: TaskManager
) -> dict[str, Any]:
    """Measures one model, and returns what lm-eval's `simple_evaluate` does.

    Raises `UserError` for any error of lm-eval, and for a model that lacks a chat template.
    """
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
    """Makes a result for every metric of every task and group that is a finite number.

    Args:
        trained: What `measure` returned for the model.
        base: What `measure` returned for the base; None: it was not measured.
        names: The names of the model and of the base; None: the base was not measured.
        options: The options of the measurement.
    """
    model_name, base_name = names
    results = []
    for task, metrics in trained["results"].items():
        config = trained.get("configs", {}).get(task, {})
        samples = trained.get("n-samples", {}).get(task, {})
        fewshot = trained.get("n-shot", {}).get(task, config.get("num_fewshot"))
        higher_is_better = trained.get("higher_is_better", {}).get(task, {})
        base_metrics = base["results"].get(task, {}) if base is not None else {}
        is_sampled = samples.get("effective") != samples.get("original")
        for name, value in metrics.items():
            # "{metric},{filter}", or "{metric}_stderr,{filter}"; other keys are not metrics
            metric, _, filter_name = name.partition(",")
            is_metric = bool(filter_name) and not metric.endswith("_stderr")
            if not (is_metric and _is_number(value)):
                continue
            stderr = f"{metric}_stderr,{filter_name}"
            result = BenchmarkResult(
                task=task,
                metric=metric,
                filter=filter_name,
                trained=float(value),
                trained_stderr=_read_number(metrics.get(stderr)),
                base=_read_number(base_metrics.get(name)),
                base_stderr=_read_number(base_metrics.get(stderr)),
                higher_is_better=higher_is_better.get(metric) is not False,
                samples=samples.get("effective"),
                is_limited=options.limit is not None and is_sampled,
                num_fewshot=fewshot if isinstance(fewshot, int) else None,
                chat_template=options.apply_chat_template,
                version=str(trained.get("versions", {}).get(task, "")),
                model=model_name,
                base_model=base_name if base is not None else None,
                lm_eval=version("lm_eval"),
            )
            results.append(result)
    return results


def _is_number(value: Any) -> bool:
    """Whether a value is a finite number, and not a truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _read_number(value: Any) -> float | None:
    """Returns a finite number as a float; None for any other value, such as lm-eval's "N/A"."""
    return float(value) if _is_number(value) else None
