"""`finetune chat` and `finetune evaluate`: talk to a trained model, or measure it.

Both can compare the model with its base.
"""

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.constants import ADAPTER, EXPORT, Names
from finetune.data.formats import Conversation
from finetune.data.messages import IMAGE, OWN_VARIABLES
from finetune.errors import EXIT_INTERRUPTED, EXIT_USER_ERROR, UserError, install_command
from finetune.files.durable import replace_file
from finetune.files.json_files import parse_json, write_json_line
from finetune.files.run_files import (
    BENCHMARKS,
    BenchmarkResult,
    benchmark_table,
    merge_results,
    read_benchmarks,
    write_benchmarks,
)
from finetune.inference.inputs import (
    ModelLocation,
    check_utf8,
    find_model,
    locate_base,
    make_prompt,
    read_piped_prompt,
    read_prompts,
)
from finetune.plan.table import align_columns
from finetune.units import counted

if TYPE_CHECKING:
    from finetune.inference.conversation import AnswerOptions, Speaker


# The options of chat that cannot be combined with --rank.
ANSWER_FLAGS = ("compare", "compare_with", "system", "image", "chat_template", "base_model")


def chat_command(options: argparse.Namespace) -> int:
    """Answers prompts, or talks in the terminal if there are none.

    Returns the exit code, as `_answer_all` does for prompts, else 0.
    """
    _check_options(options)
    location = find_model(options.source)
    compared = _find_compared(options, location)
    prompts = _read_prompts(options)  # before torch is imported: a mistake is reported at once
    if not prompts and options.json:
        raise UserError("--json: for scripts; give prompts with --prompt, --prompts or a pipe")
    if options.rank is not None:
        return _rank(options, location, prompts)

    from finetune.inference.conversation import AnswerOptions

    sampling = AnswerOptions(
        max_new_tokens=options.max_new_tokens, temperature=options.temperature, top_p=options.top_p
    )
    speakers = _load_speakers(options, location, compared)
    if prompts:
        return _answer_all(speakers, prompts, sampling, as_json=options.json)
    from finetune.inference.conversation import converse

    print("/help lists the commands, Ctrl-D ends\n")
    converse(speakers, sampling, options.system)
    return 0


def _rank(
    options: argparse.Namespace, location: ModelLocation, prompts: Sequence[Conversation]
) -> int:
    """Ranks the lines of a file for each prompt, or if there are none, for queries that are typed.

    Returns 0.
    """
    refused = [flag for flag in ANSWER_FLAGS if getattr(options, flag) not in (None, False, [])]
    if refused:
        raise UserError(
            f"--{refused[0].replace('_', '-')}: is for answers, and --rank writes none; remove one"
        )
    if options.nearest < 1:
        raise UserError(f"--nearest {options.nearest}: at least one line is shown")
    from finetune.inference.inference_model import LoadOptions
    from finetune.inference.ranking import (
        Ranking,
        converse_ranked,
        load_embedder,
        rank_queries,
        read_lines,
    )

    lines = read_lines(options.rank)
    embedder = load_embedder(location, LoadOptions(trust_remote_code=options.trust_remote_code))
    vectors = embedder.embed([line.text for line in lines], "document")
    ranking = Ranking(embedder, lines, vectors, options.nearest)
    if prompts:
        queries = [prompt.messages[-1]["content"] for prompt in prompts]
        rank_queries(ranking, queries, as_json=options.json)
        return 0
    print(f"{options.rank}: {counted(len(lines), 'line')}; type a query, Ctrl-D ends\n")
    converse_ranked(ranking)
    return 0


def evaluate_command(options: argparse.Namespace) -> int:
    """Measures the model, and under --compare its base, on lm-eval's tasks.

    Prints the results and writes them to files. Returns 0.
    """
    tasks = _read_tasks(options)
    location = find_model(options.source)
    base = _find_base(options, location)
    if (spec := find_spec("lm_eval")) is None or spec.origin is None:
        raise UserError(f"finetune evaluate needs lm-eval; {install_command('evaluate')}")
    _refuse_unknown_tasks(tasks, [options.include_path, Path(spec.origin).parent / "tasks"])

    from finetune.inference.harness import BenchmarkOptions, evaluate_models
    from finetune.inference.inference_model import LoadOptions

    benchmark = BenchmarkOptions(
        tasks=tasks,
        include_path=options.include_path,
        num_fewshot=options.num_fewshot,
        limit=options.limit,
        batch_size=options.batch_size,
        apply_chat_template=options.apply_chat_template,
    )
    load_options = LoadOptions(
        chat_template_kwargs=_read_variables(options),
        use_chat_template=options.apply_chat_template,
        base_model=options.base_model,
        trust_remote_code=options.trust_remote_code,
    )
    results = evaluate_models(location, base, load_options, benchmark, _log)
    head, rows = benchmark_table(results)
    print(align_columns([head, *rows], left=(0, 1)))
    for path in keep_results(results, location, options.output):
        print(path)
    return 0


def _read_tasks(options: argparse.Namespace) -> Names:
    """Reads --tasks, and checks the other options of evaluate. Raises `UserError` for a mistake."""
    tasks = tuple(filter(None, (task.strip() for task in options.tasks.split(","))))
    if not tasks:
        raise UserError(
            "--tasks: names of lm-eval's tasks are expected, with commas between, such as "
            "gsm8k,mmlu"
        )
    if options.limit is not None and not options.limit > 0:
        raise UserError(
            f"--limit {options.limit}: a number of documents, or a share below 1, is expected"
        )
    if options.include_path is not None and not Path(options.include_path).is_dir():
        raise UserError(
            f"--include-path {options.include_path}: no such folder; name one with task files of "
            "lm-eval"
        )
    if options.output is not None:
        _check_output(Path(options.output))
    return tasks


def _refuse_unknown_tasks(tasks: Sequence[str], folders: Sequence[str | Path | None]) -> None:
    """Raises `UserError` for a task whose name is in no YAML file of the folders.

    lm-eval finds it too, but takes 20 seconds to start. Patterns with * and files are left to
    lm-eval.
    """
    word = r"[\w.+-]+"
    unknown = {task for task in tasks if re.fullmatch(word, task) and not Path(task).is_file()}
    existing = [Path(folder) for folder in folders if folder is not None]
    for path in chain.from_iterable(folder.rglob("*.yaml") for folder in existing):
        if not unknown:
            return
        unknown -= set(re.findall(word, path.read_text(encoding="utf-8", errors="replace")))
    if unknown:
        raise UserError(
            f"--tasks: {', '.join(sorted(unknown))}: no such task of lm-eval {version('lm_eval')}; "
            "`lm-eval ls tasks` lists them, and --include-path names a folder with your own"
        )


def _find_base(options: argparse.Namespace, location: ModelLocation) -> ModelLocation | None:
    """Locates the base model to measure.

    Returns None without --compare. Returns None and logs the reason if the base is not known.
    """
    if not options.compare:
        return None
    if options.base_model is not None:
        return find_model(options.base_model)
    try:
        return locate_base(location)
    except UserError as error:
        _log(str(error).replace("--compare-with", "--base-model"))
        return None


def _check_output(path: Path) -> None:
    """Raises `UserError` if --output cannot be written: before the hours of measuring."""
    if path.is_dir():
        raise UserError(f"--output {path}: a folder; name a file in it")
    if not path.parent.is_dir():
        raise UserError(
            f"--output {path}: {path.parent} is no folder; make it, or name another file"
        )
    target = path if path.exists() else path.parent
    if not os.access(target, os.W_OK):
        raise UserError(f"--output {path}: cannot be written; name a file in a folder of yours")


def keep_results(
    results: Sequence[BenchmarkResult], location: ModelLocation, output: str | None
) -> Iterator[Path]:
    """Writes the results to the run's benchmarks.json, to `output`, and to the exports' cards.

    Args:
        results: The results.
        location: The model that was measured.
        output: The path of --output; None: it is not given.

    Yields:
        The path of each file after it was written.

    Raises:
        UserError: A file cannot be written.
    """
    from finetune.export.card import CARD_FILE, add_evaluation  # imports torch

    path: Path | None = None  # the file that is being written, for the error
    try:
        if location.run is not None:
            path = location.run / BENCHMARKS
            write_benchmarks(path, merge_results(read_benchmarks(location.run), results))
            yield path
        if output is not None:
            path = Path(output)
            write_benchmarks(path, results)
            yield path
        if location.run is None:
            return
        exports = [location.run / name for name in (EXPORT, ADAPTER)]
        if Path(location.name).resolve() not in [folder.resolve() for folder in exports]:
            return  # the cards are not of this checkpoint: a different one may be exported
        for folder in exports:
            path = folder / CARD_FILE
            if path.is_file():
                replace_file(path, add_evaluation(path.read_text(encoding="utf-8"), results))
                yield path
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written: {error.strerror}; the results are above"
        ) from None


def _check_options(options: argparse.Namespace) -> None:
    """Raises `UserError` for an option of chat that is out of range, or contradicts another."""
    if options.max_new_tokens < 1:
        raise UserError(
            f"--max-new-tokens {options.max_new_tokens}: an answer has at least one token"
        )
    if options.temperature is not None and not 0 <= options.temperature < float("inf"):
        raise UserError(f"--temperature {options.temperature}: 0 (greedy) or above is expected")
    if options.top_p is not None and not 0 < options.top_p <= 1:
        raise UserError(f"--top-p {options.top_p}: above 0 and at most 1 is expected")
    if options.chat_template_kwargs is not None and not options.use_chat_template:
        raise UserError(
            "--chat-template-kwargs: is read by the chat template, which --no-chat-template turns "
            "off"
        )
    if options.system is not None and not options.use_chat_template:
        raise UserError(
            "--system: goes through the chat template, which --no-chat-template turns off"
        )


def _read_variables(options: argparse.Namespace) -> dict[str, Any]:
    """Reads --chat-template-kwargs; {} if not given. Raises `UserError` for an invalid value."""
    text = options.chat_template_kwargs
    try:
        variables = parse_json(text or "{}")
    except ValueError:
        variables = None
    if not isinstance(variables, dict):
        raise UserError(
            f'--chat-template-kwargs {text}: a JSON object, as {{"enable_thinking": false}}, is '
            "expected"
        )
    reserved = sorted(OWN_VARIABLES & variables.keys())
    if reserved:
        raise UserError(
            f"--chat-template-kwargs: {reserved[0]} is set by rendering itself; remove it"
        )
    return variables


def _find_compared(options: argparse.Namespace, location: ModelLocation) -> ModelLocation | None:
    """Locates the model to compare with: --compare-with, or the base under --compare.

    Returns None with neither option.
    """
    if options.compare_with:
        return find_model(options.compare_with)
    if not options.compare:
        return None
    if options.base_model:
        return find_model(options.base_model)
    return locate_base(location)


def _read_prompts(options: argparse.Namespace) -> list[Conversation]:
    """Reads the prompts of --prompt and --prompts, or without these options the prompt of a pipe.

    Returns an empty list if there are none and the user can type them.
    """
    check_utf8(options.system or "", "--system")
    if options.image and not options.prompt:
        raise UserError(
            "--image: is asked about by --prompt; give one, or type /image PATH in the conversation"
        )
    prompts = [
        make_prompt(check_utf8(text, "--prompt"), options.system, options.image)
        for text in options.prompt
    ]
    if options.prompts is not None:
        prompts += read_prompts(options.prompts, options.system)
        if not prompts:
            raise UserError(f"{options.prompts}: holds no prompts")
    if prompts or (_is_terminal(sys.stdin) and _is_terminal(sys.stdout)):
        return prompts
    if not _is_terminal(sys.stdin):
        return [make_prompt(read_piped_prompt(), options.system)]
    raise UserError(
        "stdout is no terminal, and there is no prompt; give one with --prompt or --prompts"
    )


def _is_terminal(stream: object) -> bool:
    """Whether a standard stream is a terminal; False for None and for a stream without isatty."""
    isatty: Callable[[], bool] | None = getattr(stream, "isatty", None)
    return isatty is not None and isatty()


def _load_speakers(
    options: argparse.Namespace, location: ModelLocation, compared: ModelLocation | None
) -> "list[Speaker]":
    """Loads the model, and the one to compare with, which comes first in the result.

    Args:
        options: The options of chat.
        location: The model.
        compared: The model to compare with; None: there is none.
    """
    import torch

    from finetune.inference.conversation import Chat, Speaker
    from finetune.inference.inference_model import (
        LoadOptions,
        describe_base,
        load_base,
        load_inference_model,
    )

    if options.seed is not None:
        torch.manual_seed(options.seed)
    load_options = LoadOptions(
        chat_template=options.chat_template,
        chat_template_kwargs=_read_variables(options),
        use_chat_template=options.use_chat_template,
        base_model=options.base_model,
        trust_remote_code=options.trust_remote_code,
    )
    for notice in location.notices:
        _log(notice)
    model = load_inference_model(location, load_options, _log)
    _log(f"model   {model.name} on {model.model.device}{describe_base(model, location)}")
    if compared is None:
        return [Speaker("", Chat(model))]
    if options.compare_with is not None:
        other = load_inference_model(compared, load_options, _log, beside=model)
        speakers = [Speaker(other.name, Chat(other)), Speaker(model.name, Chat(model))]
    else:
        other = load_base(model, compared, load_options, _log)
        speakers = [Speaker("base", Chat(other)), Speaker("trained", Chat(model))]
    _log(f"beside  {other.name}")
    return speakers


def _answer_all(
    speakers: "Sequence[Speaker]",
    prompts: Sequence[Conversation],
    sampling: "AnswerOptions",
    *,
    as_json: bool,
) -> int:
    """Prints the answers of every model to every prompt.

    A text is printed as it is made. If there are several prompts or models, they get labels.

    Args:
        speakers: The models.
        prompts: The prompts.
        sampling: The options of sampling.
        as_json: Prints a JSON line for each prompt instead.

    Returns:
        The exit code: 2 if a prompt could not be answered, 130 after Ctrl-C, else 0.
    """
    from finetune.inference.conversation import answer, write_piece

    exit_code = 0
    for number, prompt in enumerate(prompts, start=1):
        answers: list[dict[str, Any]] = []
        label = f"prompt {number}: " if len(prompts) > 1 else ""
        if label and not as_json:
            empty_line = "\n" if number > 1 else ""
            question = prompt.messages[-1]["content"].replace(IMAGE, "[image] ")
            print(f"{empty_line}> {question}")
        for speaker in speakers:
            if not as_json and len(speakers) > 1:
                print(f"{speaker.label}:")
            write = (lambda _: None) if as_json else write_piece
            try:
                answered = answer(speaker.chat.model, prompt, sampling, write)
            except UserError as error:  # of this prompt: it may be too long, for example
                _log(f"{label}{error}")
                answers.append({"model": speaker.chat.model.name, "error": str(error)})
                exit_code = EXIT_USER_ERROR
                continue
            if not as_json:
                print()
            answers.append(
                {
                    "model": speaker.chat.model.name,
                    "answer": answered.text,
                    "tokens": answered.tokens,
                    "is_cut": answered.is_cut,
                }
            )
            if answered.is_interrupted:
                return EXIT_INTERRUPTED
        if as_json:
            print(write_json_line({"messages": prompt.messages, "answers": answers}), flush=True)
    return exit_code


def _log(line: str) -> None:
    """Prints a line on stderr."""
    print(line, file=sys.stderr)
