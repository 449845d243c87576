"""The `finetune` command and its subcommands, each in the cli.py of its own package.

Nothing heavy is imported before a subcommand has been chosen and its arguments have been read.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from finetune import __version__
from finetune.config.methods import DEFAULT_METHOD, METHODS
from finetune.config.overrides import read_overrides
from finetune.errors import EXIT_PREEMPTED, EXIT_USER_ERROR, Preempted, UserError
from finetune.terminal import clean_output, discard, silence_libraries

# Subcommand -> the function that runs it, by name: importing it would import torch.
COMMANDS = {
    "init": "finetune.init.cli:init_command",
    "launch": "finetune.launch:launch_command",
    "plan": "finetune.plan.cli:plan_command",
    "inspect": "finetune.data.inspect:inspect_command",
    "export": "finetune.export.cli:export_command",
    "chat": "finetune.inference.cli:chat_command",
    "evaluate": "finetune.inference.cli:evaluate_command",
    "report": "finetune.report.cli:report_command",
    "checkpoints": "finetune.checkpoint.cli:checkpoints_command",
    "convert": "finetune.convert:convert_command",
}
TAKES_A_RECIPE = ("launch", "plan", "inspect")

Subcommands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


@clean_output()
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns its exit code: 0, 2 for a mistake that the user can fix, 75 for a preempted
    run."""
    silence_libraries()
    try:
        options = read_arguments(sys.argv[1:] if arguments is None else arguments)
        module, _, function = COMMANDS[options.command].partition(":")
        code: int = getattr(importlib.import_module(module), function)(options)
        sys.stdout.flush()  # here, not at the interpreter's end: what cannot be written is an error
    except UserError as error:
        print(error, file=sys.stderr)
        return EXIT_USER_ERROR
    except Preempted as stop:
        print(stop, file=sys.stderr)
        return EXIT_PREEMPTED
    except KeyboardInterrupt:
        return 130  # the shell's own for SIGINT
    except BrokenPipeError:
        discard(sys.stdout)  # its reader has gone (`| head`)
        return 0
    except OSError as error:
        if not getattr(sys.stdout, "has_failed", False):
            raise  # of another file
        discard(sys.stdout)
        print(f"stdout: cannot be written: {error.strerror}; send the output elsewhere, or make room", file=sys.stderr)
        return EXIT_USER_ERROR
    return code


def read_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line, read; for the subcommands that take a recipe, `overrides` holds its `key=value` texts."""
    parser = build_parser()
    options, rest = parser.parse_known_args(arguments)
    if options.command == "inspect":
        options.file = _take_file(rest)
    if options.command in TAKES_A_RECIPE:
        options.overrides = read_overrides(rest, vars(options).keys() - {"command"})
    elif rest:
        parser.error(
            f"{options.command} takes no {' '.join(rest)}; finetune {options.command} --help lists what it takes"
        )
    return options


def _take_file(rest: list[str]) -> str | None:
    """Takes the first word out of `rest` that is neither an option, nor an option's value, nor `key=value`."""
    for i, word in enumerate(rest):
        is_value = i > 0 and rest[i - 1].startswith("--") and "=" not in rest[i - 1]
        if not (word.startswith("--") or is_value or ("=" in word and not Path(word).exists())):
            return rest.pop(i)
    return None


def build_parser() -> argparse.ArgumentParser:
    """Every subcommand with its options."""
    parser = argparse.ArgumentParser(
        prog="finetune", description="Fine-tune Llama-style models on Hugging Face Accelerate.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"finetune {__version__}")
    subcommands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_init(subcommands)
    _add_commands_on_recipes(subcommands)
    _add_commands_on_folders(subcommands)
    return parser


def _add_init(subcommands: "Subcommands") -> None:
    init = _add(subcommands, "init", "write a first recipe for a model, data and GPUs, which the plan says fits")
    init.epilog = "What no flag says is asked, where there is a terminal."
    init.add_argument("--model", metavar="M", help="what to train: a folder or hub name")
    init.add_argument("--data", metavar="PATH", help="a file, glob, folder or hub name")
    init.add_argument("--data-name", metavar="NAME", help="the hub data set's configuration")
    init.add_argument("--split", default="train", metavar="SPLIT", help="of the data (default: train)")
    for column in ("messages", "prompt", "completion", "text", "chosen", "rejected"):
        init.add_argument(f"--{column}-column", metavar="NAME", help=f"the column that holds the {column}")
    init.add_argument("--gpus", metavar="N", help="for the run, 0 for the CPU (default: those of this machine)")
    init.add_argument(
        "--gpu-memory", metavar="SIZE", help="of each, for example 80GiB; a bare 80 is GiB (default: this machine's)"
    )
    init.add_argument(
        "--method",
        choices=("full", "lora", "qlora", *(name for name in METHODS if name != DEFAULT_METHOD)),
        help="what is trained, or what it learns from (default: as the data asks, all parameters where they fit)",
    )
    init.add_argument("--teacher", metavar="M", help="the model to learn from, a folder or hub name")
    init.add_argument("--output", metavar="FILE", help="the recipe to write (default: my_recipe.yaml)")
    init.add_argument("--overwrite", action="store_true", help="replace FILE where it exists")


def _add_commands_on_recipes(subcommands: "Subcommands") -> None:
    launch = _add(subcommands, "launch", "start a run on this machine's GPUs, or on CPU ranks")
    _add_recipe(launch)
    _add_config(launch)
    _add_processes(launch, "ranks on this machine (default: one for each GPU, or one on the CPU)")
    launch.add_argument("--dry-run", action="store_true", help="print the plan of the run and stop")

    plan = _add(subcommands, "plan", "predict memory and time of a run; needs no GPU and no weights")
    _add_recipe(plan)
    _add_config(plan)
    _add_processes(plan, "ranks of the run (default: a table over many)")
    plan.add_argument(
        "--gpu-memory", metavar="SIZE", help="print whether the run fits, and what would make it fit, for example 80GiB"
    )
    plan.add_argument(
        "--gpu-link", metavar="SIZE", help="bytes a second, one way, between GPUs of a node (default: 450GB)"
    )
    plan.add_argument(
        "--network", metavar="SIZE", help="bytes a second, one way, from a node to others (default: 400GB)"
    )
    plan.add_argument("--mfu", type=float, metavar="SHARE", help="assumed share of the peak FLOP/s (default: 0.4)")
    plan.add_argument("--json", action="store_true", help="print JSON")

    inspect = _add(subcommands, "inspect", "show the data as the model will see it, and what is wrong with it")
    inspect.usage = (
        "finetune inspect [FILE [--model M] | --recipe R] [--rows N | --examples ID,ID] [--turns] [--html FILE] "
        "[--json] [key=value ...]"
    )
    inspect.description = (
        "Show the data as the model will see it, and what is wrong with it: a recipe's, or FILE's without one."
    )
    inspect.add_argument("--recipe", metavar="R", help="a file, or a name in recipes/ (default: quickstart)")
    inspect.add_argument(
        "--model", metavar="M", help="use this model's tokenizer and chat template: a folder or hub name"
    )
    inspect.add_argument("--rows", type=int, default=3, metavar="N", help="examples to show (default: 3)")
    inspect.add_argument("--examples", metavar="ID,ID", help="show these instead, by the numbers in a run's messages")
    inspect.add_argument(
        "--turns", action="store_true", help="and the prompt that inference gives for each turn of them"
    )
    inspect.add_argument("--html", metavar="FILE", help="write these prompts beside what is trained into a page")
    inspect.add_argument("--json", action="store_true", help="print JSON")


def _add_commands_on_folders(subcommands: "Subcommands") -> None:
    export = _add(subcommands, "export", "turn a checkpoint into a verified Hugging Face folder")
    export.add_argument(
        "source", metavar="RUN_OR_CHECKPOINT", help="a run's folder (its newest checkpoint), or a checkpoint"
    )
    export.add_argument("--output", required=True, metavar="DIR", help="the folder to make")
    export.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="of the weights (default: the base checkpoint's)"
    )
    export.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of one weights file (default: 5GB)")
    export.add_argument(
        "--no-verify", dest="verify", action="store_false", help="do not read the result back and compare"
    )
    export.add_argument("--overwrite", action="store_true", help="replace DIR where it exists")
    export.add_argument("--adapter-only", action="store_true", help="LoRA: the PEFT folder alone, nothing merged")
    export.add_argument(
        "--merge-onto",
        choices=("original", "dequantized"),
        help="QLoRA: the base that the adapter is merged onto (default: the one with the lower held-out loss)",
    )
    export.add_argument(
        "--base-model",
        metavar="MODEL",
        help="the base model, where the checkpoint does not name it: a folder or hub name",
    )
    export.add_argument("--push-to-hub", metavar="REPO", help="upload the verified folder to this hub repository")
    export.add_argument("--trust-remote-code", action="store_true", help="run the base model's own code")

    _add_chat(subcommands)
    _add_evaluate(subcommands)

    report = _add(subcommands, "report", "write an HTML file on one run, or on several side by side")
    report.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder")
    report.add_argument(
        "--output",
        metavar="FILE",
        help="the file to write, and its .png (default: report.html and loss.png in the first RUN)",
    )
    report.add_argument(
        "--serve", action="store_true", help="write no file; serve the report on localhost, as it grows"
    )
    report.add_argument("--port", type=int, metavar="N", help="of --serve (default: the first free one from 8000)")

    checkpoints = _add(subcommands, "checkpoints", "list what a run can be resumed or exported from")
    checkpoints.add_argument("run", metavar="RUN", help="a run's folder")
    checkpoints.add_argument("--verify", action="store_true", help="read every file and compare its checksum")
    checkpoints.add_argument("--json", action="store_true", help="print JSON")

    convert = _add(
        subcommands, "convert", "write a recipe from TRL's, Axolotl's, LLaMA-Factory's, torchtune's, Automodel's"
    )
    convert.add_argument("source", metavar="THEIR.yaml", help="the other tool's file")
    convert.add_argument("--output", metavar="FILE", help="the recipe to write (default: print it)")
    convert.add_argument("--overwrite", action="store_true", help="replace FILE where it exists")


def _add_chat(subcommands: "Subcommands") -> None:
    chat = _add(
        subcommands, "chat", "talk to a trained model, with its base beside it, or answer the prompts of a script"
    )
    chat.add_argument(
        "source", metavar="RUN_OR_FOLDER", help="a run's folder, a checkpoint, an adapter, a model's folder or hub name"
    )
    chat.add_argument("--compare", action="store_true", help="also answer with the base model")
    chat.add_argument("--compare-with", metavar="OTHER", help="also answer with this model: as RUN_OR_FOLDER")
    prompts = chat.add_mutually_exclusive_group()
    prompts.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="answer this and end; may be repeated"
    )
    prompts.add_argument(
        "--prompts", metavar="FILE", help="answer every row (JSON Lines, CSV, Parquet, ...) or line of text"
    )
    chat.add_argument("--json", action="store_true", help="print a JSON object for each prompt")
    chat.add_argument("--system", metavar="TEXT", help="the system message")
    chat.add_argument("--max-new-tokens", type=int, default=512, metavar="N", help="of an answer (default: 512)")
    chat.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="0 answers greedily (default: the model's generation_config.json)",
    )
    chat.add_argument("--top-p", type=float, metavar="P", help="sample from this share of the probability")
    chat.add_argument("--seed", type=int, metavar="N", help="sample the same answers again")
    template = chat.add_mutually_exclusive_group()
    template.add_argument(
        "--chat-template", metavar="T", help="a name, a file or Jinja text (default: the tokenizer's own)"
    )
    template.add_argument(
        "--no-chat-template", dest="use_chat_template", action="store_false", help="continue prompts as they are"
    )
    _add_model_options(chat)


def _add_evaluate(subcommands: "Subcommands") -> None:
    evaluate = _add(subcommands, "evaluate", "measure a trained model and its base on lm-eval's tasks")
    evaluate.add_argument("source", metavar="RUN_OR_FOLDER", help="as for chat; a run keeps the results")
    evaluate.add_argument(
        "--tasks", required=True, metavar="T,T", help="such as gsm8k,mmlu; `lm-eval ls tasks` lists them"
    )
    evaluate.add_argument("--include-path", metavar="DIR", help="also take tasks from the YAML files in this folder")
    evaluate.add_argument("--num-fewshot", type=int, metavar="N", help="examples in a prompt (default: the task's)")
    evaluate.add_argument("--limit", type=float, metavar="N", help="documents of each task, or a share (default: all)")
    evaluate.add_argument("--batch-size", default="auto", metavar="N", help="documents at once (default: auto)")
    evaluate.add_argument("--apply-chat-template", action="store_true", help="ask in the model's chat template")
    evaluate.add_argument("--no-compare", dest="compare", action="store_false", help="do not measure the base model")
    evaluate.add_argument("--output", metavar="FILE", help="also write the results to this JSON file")
    _add_model_options(evaluate)


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--chat-template-kwargs", metavar="JSON", help="what the template also reads: '{\"enable_thinking\": false}'"
    )
    parser.add_argument(
        "--base-model", metavar="MODEL", help="the base model, where it is not named or has moved: a folder or hub name"
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run the model's own code")


def _add(subcommands: "Subcommands", name: str, what: str) -> argparse.ArgumentParser:
    parser = subcommands.add_parser(name, help=what, description=what[0].upper() + what[1:] + ".", allow_abbrev=False)
    if name in TAKES_A_RECIPE:
        parser.epilog = "key=value (also --key value) overrides any key of the recipe; docs/recipes.md lists them."
    return parser


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--recipe", default="quickstart", metavar="R", help="a file, or a name in recipes/ (default: quickstart)"
    )


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", metavar="C", help="an Accelerate file, or a name in accelerate_configs/ (default: the recipe's)"
    )


def _add_processes(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--num-processes", type=int, metavar="N", help=what)
