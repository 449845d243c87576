"""`finetune serve-training`: the command, and the script that it starts on every rank.

Rank 0 speaks HTTP. It announces each operation to the other ranks, and all do it together.
"""

import argparse
import os
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

SERVE = Path(__file__).resolve()
if __name__ == "__main__":
    sys.path[0] = str(SERVE.parents[2])  # as in run.py

from finetune.cli import add_service_options
from finetune.config.accelerate_file import read_sharding
from finetune.config.layout import Sharding
from finetune.config.reader import read_overrides, read_recipe
from finetune.config.schema import Recipe
from finetune.constants import Fields, Record
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
    from finetune.distributed.world import World
    from finetune.service.operations import Operations

KEY = "FINETUNE_API_KEY"
PACKAGES = ("starlette", "uvicorn", "google.protobuf")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
TURN_SECONDS = 2.0  # an idle rank 0 announces NOTHING after this time
NOTHING = ""
STOP = "stop"


def serve_training_command(options: argparse.Namespace) -> int:
    """Starts the server on the ranks; returns its exit code. Raises `UserError`."""
    recipe = prepare(read_recipe(options.recipe, options.overrides, needs_data=False))
    _find_key(options.host)
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
    """Returns the recipe without its data. Raises `UserError` for keys that a service ignores."""
    lora = recipe.lora
    if not lora.use_peft:
        raise UserError("serve-training: clients train adapters; set use_peft: true")
    refused = {
        "use_dora": lora.use_dora,
        "oft_block_size": lora.oft_block_size,
        "modules_to_save": lora.modules_to_save,
        "lora_target_parameters": lora.lora_target_parameters,
        "lora_target_modules": lora.adapts_head,
        "rank_pattern": lora.rank_pattern,
        "alpha_pattern": lora.alpha_pattern,
        "lora_dropout": lora.lora_dropout,
        "adapter_name_or_path": lora.adapter_name_or_path,
        "adapters": lora.adapters,
        "optim_in_backward": recipe.optimization.optim_in_backward,
    }
    named = [name for name, value in refused.items() if value]
    if recipe.optimization.optim_offload != "none":
        named.append("optim_offload")
    if named:
        raise UserError(
            f"serve-training: {', '.join(named)}: cannot be combined with it; leave them out"
        )
    data = replace(recipe.data, datasets=(), eval_datasets=(), eval_split_size=None)
    return replace(recipe, data=data)


def refuse_layout(sharding: Sharding) -> None:
    """Raises `UserError` for a layout that a service does not support."""
    is_served = sharding.layout in ("single", "ddp", "fsdp2")
    others = sharding.ranks_per_row * sharding.pipeline_parallel_size
    if not is_served or others > 1 or sharding.mixed_precision == "fp16":
        raise UserError(
            "serve-training: one process, DDP and FSDP2 are served, in bf16 or float32; choose "
            "such an Accelerate file"
        )


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def _find_key(host: str) -> str | None:
    """Returns the clients' key of the environment, or None.

    Raises `UserError` without one where other machines reach the server.
    """
    key = os.environ.get(KEY)
    if host not in LOOPBACK and not key:
        raise UserError(
            f"--host {host}: others can reach it; set {KEY} to a secret that clients send as their "
            "TINKER_API_KEY"
        )
    return key


def main() -> None:
    """Serves on this rank until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="finetune/service/serve.py", allow_abbrev=False)
    parser.add_argument("--recipe", default="quickstart")
    parser.add_argument("--config")
    add_service_options(parser)
    options, rest = parser.parse_known_args()
    overrides = read_overrides(rest, vars(options))
    recipe = prepare(read_recipe(options.recipe, overrides, needs_data=False))
    sharding = read_sharding(options.config, recipe.run.accelerate_config, os.environ)
    refuse_layout(sharding)
    key = _find_key(options.host)
    set_library_environment(deterministic=recipe.run.deterministic)
    from finetune.service.operations import Operations
    from finetune.session import Session

    stopping = _listen()
    with Session(recipe, sharding) as session:
        folder = session.folder / "service"
        operations = Operations(session, folder / "states", options.vllm_server)
        if session.world.is_main:
            _lead(operations, folder, options, key, stopping)
        else:
            _follow(operations)


def _listen() -> list[int]:
    """Returns a list to which each SIGTERM and SIGINT appends its number."""
    received: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        received.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, note)
    return received


def _announce(world: "World", operation: str, arguments: Fields | None = None) -> None:
    """Sends an operation to the other ranks, which wait for it in `_follow`."""
    world.gather([operation, arguments])


def _follow(operations: "Operations") -> None:
    """Does the operations that rank 0 announces, until STOP."""
    from finetune.service.failure import sharing_failure, watch_for_failure

    world = operations.session.world
    watch_for_failure(world, lambda _: None)
    while True:
        operation, arguments = world.gather(None)[0]
        if operation == STOP:
            return
        if operation != NOTHING:
            with suppress(AgreedError), sharing_failure(world):  # rank 0 answers the error
                operations.run(operation, arguments)


def _lead(
    operations: "Operations",
    folder: Path,
    options: argparse.Namespace,
    key: str | None,
    stopping: list[int],
) -> None:
    """Serves clients on rank 0 until a signal is received.

    Args:
        operations: Those of this rank.
        folder: The folder of the ledger and the states.
        options: The options of the command.
        key: The key that clients must send; None: none.
        stopping: What `_listen` returned.
    """
    from finetune.service.failure import sharing_failure, watch_for_failure
    from finetune.service.server import Border, start_server
    from finetune.service.service import Service

    world = operations.session.world

    def run(operation: str, arguments: Fields) -> Record:
        with sharing_failure(world):
            _announce(world, operation, arguments)
            return operations.run(operation, arguments)

    service = Service(
        operations,
        folder,
        run,
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
    while not stopping:
        if not service.work(TURN_SECONDS):
            _announce(world, NOTHING)  # a collective of idle ranks would time out
    server.should_exit = True
    service.ledger.close()
    _announce(world, STOP)


if __name__ == "__main__":
    end_process(exit_code(main))
