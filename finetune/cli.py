"""The `finetune` command: reads the arguments of all subcommands and runs one of them.

A subcommand's module, which may import torch, is imported only after its arguments have been read.
"""

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, TypeAlias

from finetune import __version__
from finetune.config.export_formats import EXPORT_FORMATS, list_keys
from finetune.config.methods import METHODS
from finetune.config.reader import add_hints, may_be_value, read_overrides
from finetune.convert import hints
from finetune.errors import (
    EXIT_PREEMPTED,
    EXIT_USER_ERROR,
    Preempted,
    UserError,
    clean_output,
    discard,
    explain_long_name,
    name_page,
    silence_libraries,
)

# Subcommand -> "module:function" that runs it. It is a name, because the module may import torch.
COMMANDS = {
    "init": "finetune.init.cli:init_command",
    "launch": "finetune.run:launch_command",
    "serve-training": "finetune.service.serve:serve_training_command",
    "plan": "finetune.plan.plan:plan_command",
    "inspect": "finetune.data.inspect:inspect_command",
    "export": "finetune.export.cli:export_command",
    "chat": "finetune.inference.cli:chat_command",
    "evaluate": "finetune.inference.cli:evaluate_command",
    "serve-check": "finetune.inference.serve_check:serve_check_command",
    "report": "finetune.report.page:report_command",
    "convert": "finetune.convert.conversion:convert_command",
    "checkpoints": "finetune.checkpoint.folders:checkpoints_command",
    "env": "finetune.init.environment:environment_command",
}
# subcommands with --recipe, whose further arguments override keys of the recipe
TAKES_A_RECIPE = ("launch", "serve-training", "plan", "inspect", "env")
# errors about a recipe's keys then also say what other tools' keys are called here
add_hints(hints)

Subcommands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


@clean_output()
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the `finetune` command and returns its exit code.

    The code is the subcommand's (0 for success), 2 for a mistake that the user can fix, 75 for a
    preempted run, and 130 after Ctrl-C. Without `arguments`, those of the process are read.
    """
    silence_libraries()
    try:
        options = read_arguments(sys.argv[1:] if arguments is None else arguments)
        module, _, function = COMMANDS[options.command].partition(":")
        run_command = getattr(importlib.import_module(module), function)
        code: int = run_command(options)
        # flushed here, so that a failure is handled below and not at the interpreter's end
        sys.stdout.flush()
    except UserError as error:
        print(error, file=sys.stderr)
        return EXIT_USER_ERROR
    except Preempted as stop:
        print(stop, file=sys.stderr)
        return EXIT_PREEMPTED
    except KeyboardInterrupt:
        return 130  # as shells report SIGINT
    except BrokenPipeError:  # the reader of the output has ended, such as `head`
        discard(sys.stdout)
        return 0
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            print(explain_long_name(error), file=sys.stderr)
            return EXIT_USER_ERROR
        if not getattr(sys.stdout, "has_failed", False):
            raise  # the error is about another file
        discard(sys.stdout)
        print(
            f"stdout: cannot be written: {error.strerror}; send the output elsewhere, or make room",
            file=sys.stderr,
        )
        return EXIT_USER_ERROR
    return code


def read_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Reads the command line: `command`, and the options of that subcommand.

    For the subcommands that take a recipe, `overrides` lists the recipe's overrides as `key=value`.
    Exits with argparse's message if an argument is wrong.
    """
    parser = build_parser()
    options, rest = parser.parse_known_args(arguments)
    if options.command == "inspect":
        options.file = _take_file(rest)
    if options.command in TAKES_A_RECIPE:
        options.overrides = read_overrides(rest, vars(options).keys() - {"command"})
    elif rest:
        parser.error(
            f"{options.command} takes no {' '.join(rest)}; finetune {options.command} --help lists "
            "what it takes"
        )
    return options


def _take_file(rest: list[str]) -> str | None:
    """Removes the data file of `finetune inspect` from the arguments `rest`, and returns it.

    It is the first word that is no option, no option's value and no `key=value`; None if there is
    no such word. A word with "=" is a file if that file exists.
    """
    for i, word in enumerate(rest):
        before = rest[i - 1] if i else ""
        key = before.removeprefix("--").replace("-", "_")
        is_value = before.startswith("--") and "=" not in before and may_be_value(word, key)
        if word.startswith("--") or is_value:
            continue
        # os.path: a long value raises in Path.exists, being no file name
        is_override = "=" in word and not os.path.exists(word)  # noqa: PTH110
        if not is_override:
            return rest.pop(i)
    return None


def build_parser() -> argparse.ArgumentParser:
    """Builds the parser of the command line, with all subcommands and their options."""
    parser = argparse.ArgumentParser(
        prog="finetune",
        description="Fine-tune Llama-style models on Hugging Face Accelerate.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"finetune {__version__}")
    subcommands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_init(subcommands)
    _add_commands_on_recipes(subcommands)
    _add_commands_on_folders(subcommands)
    return parser


def _add_init(subcommands: "Subcommands") -> None:
    """Adds `finetune init`."""
    init = _add_command(
        subcommands,
        "init",
        "write a first recipe for a model, data and GPUs, which the plan says fits",
    )
    init.epilog = "What no flag says is asked, where there is a terminal."
    _add_argument(init, "--model", "M", "what to train: a folder or hub name")
    _add_argument(
        init, "--data", "PATH", "a file, glob, folder, hub name or function (my_data.py:rows)"
    )
    _add_argument(init, "--data-name", "NAME", "the hub data set's configuration")
    _add_argument(init, "--split", "SPLIT", "of the data (default: train)", default="train")
    for column in ("messages", "prompt", "completion", "text", "chosen", "rejected", "label"):
        _add_argument(init, f"--{column}-column", "NAME", f"the column that holds the {column}")
    _add_argument(
        init, "--gpus", "N", "for the run, 0 for the CPU (default: those of this machine)"
    )
    _add_argument(
        init,
        "--gpu-memory",
        "SIZE",
        "of each, for example 80GiB; a bare 80 is GiB (default: this machine's)",
    )
    _add_argument(
        init,
        "--host-memory",
        "SIZE",
        "of the machine (default: this machine's, where the GPUs are its own)",
    )
    _add_argument(
        init,
        "--disk",
        "SIZE",
        "for the run (default: what is free here, where the GPUs are this machine's)",
    )
    methods = f"{', '.join(METHODS)} (default: as the data asks, answers, pairs or ratings)"
    _add_argument(init, "--method", "NAME", f"what it learns from: {methods}")
    _add_argument(
        init,
        "--train",
        "WHAT",
        "auto, full, lora or qlora (default: all parameters where they fit, else lora)",
    )
    _add_argument(
        init,
        "--chat-template",
        "T",
        "a name, a file or Jinja text, in place of the tokenizer's own",
    )
    _add_argument(init, "--teacher", "M", "the model to learn from, a folder or hub name")
    _add_argument(
        init,
        "--rewards",
        "NAMES",
        "what completions are worth, such as exact_answer,my_rewards.py:short",
    )
    _add_argument(init, "--output", "FILE", "the recipe to write (default: my_recipe.yaml)")
    _add_flag(init, "--overwrite", "replace FILE where it exists")


def _add_commands_on_recipes(subcommands: "Subcommands") -> None:
    """Adds the subcommands of TAKES_A_RECIPE."""
    launch = _add_command(
        subcommands, "launch", "start a run on this machine's GPUs, or on CPU ranks"
    )
    _add_run_options(launch, "ranks on this machine (default: one for each GPU, or one on the CPU)")
    _add_flag(launch, "--dry-run", "print the plan of the run and stop")

    serve = _add_command(
        subcommands, "serve-training", "serve the Tinker API: clients train adapters on one base"
    )
    _add_run_options(serve, "ranks on this machine (default: one for each GPU, or one on the CPU)")
    add_service_options(serve)

    plan = _add_command(
        subcommands, "plan", "predict memory and time of a run; needs no GPU and no weights"
    )
    _add_run_options(plan, "ranks of the run (default: a table over many)")
    _add_argument(
        plan,
        "--gpu-memory",
        "SIZE",
        "of each GPU, such as 80GiB: print whether the run fits, or what makes it fit",
    )
    _add_argument(plan, "--host-memory", "SIZE", "of a node, which is compared too")
    _add_argument(plan, "--disk", "SIZE", "for checkpoints and export, which is compared too")
    _add_argument(
        plan,
        "--gpu-link",
        "SIZE",
        "bytes a second, one way, between GPUs of a node (default: 450GB)",
    )
    _add_argument(
        plan, "--network", "SIZE", "bytes a second, one way, from a node to others (default: 400GB)"
    )
    _add_argument(
        plan,
        "--mfu",
        "SHARE",
        "assumed share of the peak FLOP/s (default: as measured, 0.22 to 0.58)",
        type=float,
    )
    _add_flag(plan, "--json", "print JSON")

    env = _add_command(
        subcommands, "env", "print versions, devices and kernels, and what a recipe lacks here"
    )
    _add_run_options(env, "ranks of the run (default: one for each GPU, or one)", recipe=None)

    inspect = _add_command(
        subcommands, "inspect", "show the data as the model will see it, and what is wrong with it"
    )
    inspect.usage = (
        "finetune inspect [FILE [--model M] | --recipe R] [--rows N | --examples ID,ID] [--turns] "
        "[--html FILE] [--json] [key=value ...]"
    )
    inspect.description = (
        "Show the data as the model will see it, and what is wrong with it: a recipe's, or FILE's "
        "without one."
    )
    _add_argument(inspect, "--recipe", "R", "a file, or a name in recipes/ (default: quickstart)")
    _add_argument(
        inspect,
        "--model",
        "M",
        "use this model's tokenizer and chat template: a folder or hub name",
    )
    _add_argument(inspect, "--rows", "N", "examples to show (default: 3)", type=int, default=3)
    _add_argument(
        inspect, "--examples", "ID,ID", "show these instead, by the numbers in a run's messages"
    )
    _add_flag(inspect, "--turns", "and the prompt that inference gives for each turn of them")
    _add_argument(
        inspect, "--html", "FILE", "write these prompts beside what is trained into a page"
    )
    _add_flag(inspect, "--json", "print JSON")


def add_service_options(serve: argparse.ArgumentParser) -> None:
    """Adds the options of `serve-training`, which the script on the server's ranks takes too."""
    _add_argument(
        serve,
        "--host",
        "HOST",
        "where to listen (default: 127.0.0.1); elsewhere FINETUNE_API_KEY is what clients send",
        default="127.0.0.1",
    )
    _add_argument(serve, "--port", "N", "default: 8010; 0: a free one", type=int, default=8010)
    _add_argument(
        serve,
        "--max-stacked",
        "N",
        "adapters that share a pass of the base (default: 8); 1: they take turns",
        type=int,
        default=8,
    )
    _add_argument(
        serve,
        "--vllm-server",
        "URL",
        "a vLLM server of the base that samples; it reads adapters from output_dir (default: the "
        "model itself samples)",
    )
    _add_argument(serve, "--max-sessions", "N", "open at once (default: 64)", type=int, default=64)
    _add_argument(serve, "--max-body", "SIZE", "of a request (default: 64MiB)", default="64MiB")
    _add_argument(serve, "--max-disk", "SIZE", "of all states (default: 100GiB)", default="100GiB")


def _add_export(subcommands: "Subcommands") -> None:
    """Adds `finetune export`."""
    export = _add_command(
        subcommands, "export", "turn a checkpoint into a verified Hugging Face folder"
    )
    _add_argument(
        export,
        "source",
        "RUN_OR_CHECKPOINT",
        "a run's folder (its newest checkpoint), or a checkpoint",
    )
    _add_argument(export, "--output", "DIR", "the folder to make", required=True)
    export.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of the weights (default: the base checkpoint's)",
    )
    _add_argument(
        export,
        "--format",
        "FORMATS",
        f"{', '.join(EXPORT_FORMATS)}, or several with commas between (default: safetensors)",
        default="safetensors",
    )
    for key in list_keys():
        _add_argument(
            export,
            key.flag,
            key.metavar,
            key.help,
            dest=key.name,
            type=key.read,
            default=key.default,
        )
    _add_argument(
        export, "--max-shard-size", "SIZE", "of one weights file (default: 5GB)", default="5GB"
    )
    _add_flag(export, "--no-verify", "do not read the result back and compare", clears="verify")
    _add_flag(export, "--overwrite", "replace DIR where it exists")
    _add_flag(export, "--adapter-only", "LoRA: the PEFT folder alone, nothing merged")
    export.add_argument(
        "--adapter-names",
        choices=("peft", "vllm"),
        default="peft",
        help=(
            "of the modules in a PEFT folder: vLLM knows those of some families by others, and the "
            "last screen says where (default: peft)"
        ),
    )
    export.add_argument(
        "--merge-onto",
        choices=("original", "dequantized"),
        help=(
            "QLoRA: the base that the adapter is merged onto (default: the one with the lower "
            "held-out loss)"
        ),
    )
    _add_argument(
        export,
        "--base-model",
        "MODEL",
        "the base model, where the checkpoint does not name it: a folder or hub name",
    )
    _add_argument(
        export, "--push-to-hub", "REPO", "upload the verified folder to this hub repository"
    )
    _add_flag(export, "--trust-remote-code", "run the base model's own code")


def _add_commands_on_folders(subcommands: "Subcommands") -> None:
    """Adds the subcommands whose first argument is a run, a model or another tool's file."""
    _add_export(subcommands)
    _add_chat(subcommands)
    _add_evaluate(subcommands)
    _add_serve_check(subcommands)

    report = _add_command(
        subcommands, "report", "write an HTML file on one run, or on several side by side"
    )
    _add_argument(report, "runs", "RUN", "a run's folder", nargs="+")
    _add_argument(
        report,
        "--output",
        "FILE",
        "the file to write, and its .png (default: report.html and loss.png in the first RUN)",
    )
    _add_flag(report, "--serve", "write no file; serve the report on localhost, as it grows")
    _add_argument(
        report, "--port", "N", "of --serve (default: the first free one from 8000)", type=int
    )

    checkpoints = _add_command(
        subcommands, "checkpoints", "list what a run can be resumed or exported from"
    )
    _add_argument(checkpoints, "run", "RUN", "a run's folder")
    _add_flag(checkpoints, "--verify", "read every file and compare its checksum")
    _add_flag(checkpoints, "--json", "print JSON")

    convert = _add_command(
        subcommands,
        "convert",
        (
            "write a recipe from another tool's: TRL, Axolotl, LLaMA-Factory, torchtune, "
            "Automodel, ms-swift"
        ),
    )
    _add_argument(
        convert,
        "source",
        "THEIR.yaml",
        "the other tool's file, a script, or a command line in quotes",
    )
    _add_argument(convert, "--output", "FILE", "the recipe to write (default: print it)")
    _add_flag(convert, "--overwrite", "replace FILE where it exists")


def _add_chat(subcommands: "Subcommands") -> None:
    """Adds `finetune chat`."""
    chat = _add_command(
        subcommands,
        "chat",
        "talk to a trained model, with its base beside it, or answer the prompts of a script",
    )
    _add_argument(
        chat,
        "source",
        "RUN_OR_FOLDER",
        "a run's folder, a checkpoint, an adapter, a model's folder or hub name",
    )
    _add_flag(chat, "--compare", "also answer with the base model")
    _add_argument(chat, "--compare-with", "OTHER", "also answer with this model: as RUN_OR_FOLDER")
    prompts = chat.add_mutually_exclusive_group()
    _add_argument(
        prompts,
        "--prompt",
        "TEXT",
        "answer this and end; may be repeated",
        action="append",
        default=[],
    )
    _add_argument(
        prompts,
        "--prompts",
        "FILE",
        "answer every row (JSON Lines, CSV, Parquet, ...) or line of text",
    )
    _add_flag(chat, "--json", "print a JSON object for each prompt")
    _add_argument(chat, "--rank", "FILE", "with an embedder: rank the lines of FILE by each prompt")
    _add_argument(
        chat, "--nearest", "K", "lines that --rank shows (default: 5)", type=int, default=5
    )
    _add_argument(
        chat,
        "--image",
        "FILE",
        "what --prompt asks about; may be repeated",
        action="append",
        default=[],
    )
    _add_argument(chat, "--system", "TEXT", "the system message")
    _add_argument(
        chat, "--max-new-tokens", "N", "of an answer (default: 512)", type=int, default=512
    )
    _add_argument(
        chat,
        "--temperature",
        "T",
        "0 answers greedily (default: the model's generation_config.json)",
        type=float,
    )
    _add_argument(chat, "--top-p", "P", "sample from this share of the probability", type=float)
    _add_argument(chat, "--seed", "N", "sample the same answers again", type=int)
    template = chat.add_mutually_exclusive_group()
    _add_argument(
        template,
        "--chat-template",
        "T",
        "a name, a file or Jinja text (default: the tokenizer's own)",
    )
    _add_flag(
        template, "--no-chat-template", "continue prompts as they are", clears="use_chat_template"
    )
    _add_model_options(chat)


def _add_evaluate(subcommands: "Subcommands") -> None:
    """Adds `finetune evaluate`."""
    evaluate = _add_command(
        subcommands, "evaluate", "measure a trained model and its base on lm-eval's tasks"
    )
    _add_argument(evaluate, "source", "RUN_OR_FOLDER", "as for chat; a run keeps the results")
    _add_argument(
        evaluate,
        "--tasks",
        "T,T",
        "such as gsm8k,mmlu; `lm-eval ls tasks` lists them",
        required=True,
    )
    _add_argument(
        evaluate, "--include-path", "DIR", "also take tasks from the YAML files in this folder"
    )
    _add_argument(
        evaluate, "--num-fewshot", "N", "examples in a prompt (default: the task's)", type=int
    )
    _add_argument(
        evaluate, "--limit", "N", "documents of each task, or a share (default: all)", type=float
    )
    _add_argument(
        evaluate, "--batch-size", "N", "documents at once (default: auto)", default="auto"
    )
    _add_flag(evaluate, "--apply-chat-template", "ask in the model's chat template")
    _add_flag(evaluate, "--no-compare", "do not measure the base model", clears="compare")
    _add_argument(evaluate, "--output", "FILE", "also write the results to this JSON file")
    _add_model_options(evaluate)


def _add_serve_check(subcommands: "Subcommands") -> None:
    """Adds `finetune serve-check`."""
    check = _add_command(
        subcommands, "serve-check", "compare a server's answers with those of transformers"
    )
    _add_argument(
        check,
        "source",
        "RUN_OR_FOLDER",
        "as for chat: what transformers answers with, and vLLM serves",
    )
    _add_argument(
        check,
        "--server",
        "S",
        "llama.cpp or vllm, which is started; ollama or a URL, which is running",
        required=True,
    )
    # an option for each format whose export is a file that a server reads, such as --gguf
    for name, row in EXPORT_FORMATS.items():
        if row.suffix is not None and row.server is not None:
            _add_argument(
                check,
                f"--{name}",
                "FILE",
                f"what {row.server} serves (default: the first in the folder)",
            )
    _add_argument(
        check,
        "--served-model",
        "NAME",
        "what a running server calls the model (default: its only one)",
    )
    _add_argument(
        check, "--prompts", "FILE", "rows or lines, as for chat (default: the run's held-out rows)"
    )
    _add_argument(check, "--count", "N", "prompts to ask (default: 8)", type=int, default=8)
    _add_argument(
        check, "--max-new-tokens", "N", "of an answer (default: 32)", type=int, default=32
    )
    _add_argument(
        check,
        "--max-difference",
        "NATS",
        "also exit with 1 where a log-probability differs by more",
        type=float,
    )
    _add_argument(
        check,
        "--base-model",
        "MODEL",
        "the base model, where it is not named or has moved: a folder or hub name",
    )
    _add_flag(check, "--trust-remote-code", "run the model's own code")


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a subcommand that loads a model and its chat template."""
    _add_argument(
        parser,
        "--chat-template-kwargs",
        "JSON",
        "what the template also reads: '{\"enable_thinking\": false}'",
    )
    _add_argument(
        parser,
        "--base-model",
        "MODEL",
        "the base model, where it is not named or has moved: a folder or hub name",
    )
    _add_flag(parser, "--trust-remote-code", "run the model's own code")


def _add_command(subcommands: "Subcommands", name: str, help_text: str) -> argparse.ArgumentParser:
    """Adds a subcommand and returns its parser. `help_text` says what the subcommand does."""
    parser = subcommands.add_parser(
        name,
        help=help_text,
        description=help_text[0].upper() + help_text[1:] + ".",
        allow_abbrev=False,
    )
    if name in TAKES_A_RECIPE:
        parser.epilog = (
            "key=value (also --key value) overrides any key of the recipe; they are listed in "
            f"{name_page('recipes')}."
        )
    return parser


def _add_argument(parser: Any, name: str, metavar: str, help_text: str, **keys: Any) -> None:
    """Adds an option (or a positional argument, without "--") that has a value."""
    parser.add_argument(name, metavar=metavar, help=help_text, **keys)


def _add_flag(parser: Any, name: str, help_text: str, *, clears: str | None = None) -> None:
    """Adds an option without a value. It sets the attribute of its own name to True.

    With `clears`, it sets the attribute of that name to False instead, which is True without it.
    """
    if clears is None:
        keys: dict[str, Any] = {"action": "store_true"}
    else:
        keys = {"action": "store_false", "dest": clears}
    parser.add_argument(name, help=help_text, **keys)


def _add_run_options(
    parser: argparse.ArgumentParser, ranks: str, *, recipe: str | None = "quickstart"
) -> None:
    """Adds the options that describe a run: --recipe, --config and --num-processes.

    `ranks`: the help text of --num-processes. `recipe`: the default recipe; None: there is none.
    """
    _add_argument(
        parser,
        "--recipe",
        "R",
        f"a file, or a name in recipes/ (default: {recipe or 'none'})",
        default=recipe,
    )
    _add_argument(
        parser,
        "--config",
        "C",
        "an Accelerate file, or a name in accelerate_configs/ (default: the recipe's)",
    )
    _add_argument(parser, "--num-processes", "N", ranks, type=int)
