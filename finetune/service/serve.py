"""`finetune serve-training`: the command, and the script that it starts on every rank.

Rank 0 serves HTTP. It announces each operation to the other ranks, and all ranks do it together.
"""

import argparse
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

SERVE = Path(__file__).resolve()
if __name__ == "__main__":
    sys.path[0] = str(SERVE.parents[2])  # as in run.py

from finetune.cli import add_service_options
from finetune.config.accelerate_file import read_sharding
from finetune.config.layout import Sharding
from finetune.config.reader import read_overrides, read_recipe
from finetune.config.schema import Recipe
from finetune.errors import (
    AgreedError,
    UserError,
    end_process,
    exit_code,
    install_command,
    set_library_environment,
)
from finetune.run import launch_script
from finetune.units import read_size

if TYPE_CHECKING:
    from finetune.service.operations import Operations

KEY = "FINETUNE_API_KEY"  # the environment variable of the secret that clients send
PACKAGES = ("starlette", "uvicorn", "google.protobuf")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
TURN_SECONDS = 2.0  # an idle rank 0 announces NOTHING after this time
# What rank 0 announces in place of an operation.
NOTHING = ""
STOP = "stop"


def serve_training_command(options: argparse.Namespace) -> int:
    """Starts the server on every rank, waits for its end, and returns the exit code.

    Raises `UserError` for mistakes that can be found before the start.
    """
    recipe = prepare(read_recipe(options.recipe, options.overrides, needs_data=False))
    _read_key(options.host)  # for its error
    if not all(map(_is_installed, PACKAGES)):
        raise UserError(
            f"serve-training needs Starlette, uvicorn and protobuf: {install_command('serve')}"
        )
    names = ("host", "port", "max_stacked", "max_sessions", "max_body", "max_disk")
    flags = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in names]
    if options.vllm_server is not None:
        flags.append(f"--vllm-server={options.vllm_server}")
    return launch_script(options, recipe, SERVE, flags)


def prepare(recipe: Recipe) -> Recipe:
    """Returns the recipe without data sets, since clients send the data.

    Raises `UserError` for a recipe without adapters, and for keys that a service does not support.
    """
    lora = recipe.lora
    if not lora.use_peft:
        raise UserError("serve-training: clients train adapters; set use_peft: true")
    values = {
        "use_dora": lora.use_dora,
        "oft_block_size": lora.oft_block_size,
        "modules_to_save": lora.modules_to_save,
        "lora_target_parameters": lora.lora_target_parameters,
        "lora_target_modules": lora.adapts_head,  # other modules are served
        "rank_pattern": lora.rank_pattern,
        "alpha_pattern": lora.alpha_pattern,
        "lora_dropout": lora.lora_dropout,
        "adapter_name_or_path": lora.adapter_name_or_path,
        "adapters": lora.adapters,
        "attention_dropout": recipe.model.attention_dropout,
        "neftune_noise_alpha": recipe.optimization.neftune_noise_alpha,
        "quantization_aware_training": recipe.quantization_aware.quantization_aware_training,
        "optim_in_backward": recipe.optimization.optim_in_backward,
        "optim_offload": recipe.optimization.optim_offload != "none",
    }
    refused = [name for name, value in values.items() if value]
    if refused:
        raise UserError(
            f"serve-training: {', '.join(refused)}: cannot be combined with it; leave them out"
        )
    data = replace(recipe.data, datasets=(), eval_datasets=(), eval_split_size=None)
    return replace(recipe, data=data)


def refuse_layout(sharding: Sharding) -> None:
    """Raises `UserError` for a layout that a service does not support."""
    is_served = sharding.layout in ("single", "ddp", "fsdp2")
    shares_rows = sharding.ranks_per_batch > 1
    if not is_served or shares_rows or sharding.mixed_precision == "fp16":
        raise UserError(
            "serve-training: one process, DDP and FSDP2 are served, in bf16 or float32; choose "
            "such an Accelerate file"
        )


def _is_installed(package: str) -> bool:
    """Whether a package, or a subpackage by its dotted name, can be imported."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def _read_key(host: str) -> str | None:
    """Reads the key that clients must send from the environment; None: they send none.

    Raises `UserError` if there is no key and other machines can reach `host`.
    """
    key = os.environ.get(KEY)
    if host not in LOOPBACK and not key:
        raise UserError(
            f"--host {host}: others can reach it; set {KEY} to a secret that clients send as their "
            "TINKER_API_KEY"
        )
    return key


def main() -> None:
    """Takes part in the server as one rank, until rank 0 gets SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="finetune/service/serve.py", allow_abbrev=False)
    parser.add_argument("--recipe", default="quickstart")
    parser.add_argument("--config")
    add_service_options(parser)
    options, rest = parser.parse_known_args()
    overrides = read_overrides(rest, vars(options))
    recipe = prepare(read_recipe(options.recipe, overrides, needs_data=False))
    sharding = read_sharding(options.config, recipe.run.accelerate_config, os.environ)
    refuse_layout(sharding)
    key = _read_key(options.host)
    set_library_environment(deterministic=recipe.run.deterministic)
    from finetune.service.operations import Operations
    from finetune.session import Session

    signals = _collect_signals()
    with Session(recipe, sharding) as session:
        folder = session.folder / "service"
        operations = Operations(session, folder / "states", options.vllm_server)
        if session.world.is_main:
            _lead(operations, folder, options, key, signals)
        else:
            _follow(operations)


def _collect_signals() -> list[int]:
    """Handles SIGTERM and SIGINT; returns a list to which each of them appends its number."""
    received: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        received.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, note)
    return received


def _follow(operations: "Operations") -> None:
    """Does the operations that rank 0 announces, until STOP."""
    from finetune.service.failure import sharing_failure, watch_for_failure

    world = operations.session.world
    watch_for_failure(world, lambda _: None)
    while True:
        operation, arguments = world.broadcast(None)
        if operation == STOP:
            return
        if operation != NOTHING:
            with suppress(AgreedError), sharing_failure(world):  # rank 0 answers an `AgreedError`
                operations.run(operation, arguments)


def _lead(
    operations: "Operations",
    folder: Path,
    options: argparse.Namespace,
    key: str | None,
    signals: list[int],
) -> None:
    """Serves clients on rank 0 until a signal is received.

    Args:
        operations: The operations of this rank.
        folder: The folder of the ledger and the states.
        options: The options of the command.
        key: The key that clients must send; None: they send none.
        signals: The list that `_collect_signals` returned. The server stops once it is not empty.
    """
    from finetune.service.failure import sharing_failure, watch_for_failure
    from finetune.service.server import Border, start_server
    from finetune.service.service import Service

    world = operations.session.world

    def run_on_all(operation: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        with sharing_failure(world):
            world.broadcast([operation, arguments])  # which the other ranks await in `_follow`
            return operations.run(operation, arguments)

    service = Service(
        operations,
        folder,
        run_on_all,
        most_stacked=max(1, options.max_stacked),
        most_sessions=options.max_sessions,
        most_body_bytes=read_size(options.max_body),
        most_disk_bytes=read_size(options.max_disk),
    )
    watch_for_failure(world, service.give_up)
    server, port = start_server(Border(service, key).make_app(), options.host, options.port)
    url = f"http://{options.host}:{port}"
    print(f"serving {service.model_name} at {url}")
    shown_key = "tml-any" if key is None else f"${KEY}"
    print(f"clients TINKER_BASE_URL={url} TINKER_API_KEY={shown_key}", flush=True)
    while not signals:
        if not service.work(TURN_SECONDS):
            world.broadcast([NOTHING, None])  # a collective of idle ranks would time out
    server.should_exit = True
    service.ledger.close()
    world.broadcast([STOP, None])


if __name__ == "__main__":
    end_process(exit_code(main))
