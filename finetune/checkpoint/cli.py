"""`finetune checkpoints RUN`: the checkpoints of a run, whether they are sound, and the commands that use them."""

import argparse
import json
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path

from finetune.checkpoint.manifest import MODEL, STATE, find_problems, read_manifest
from finetune.checkpoint.retention import checkpoints_folder, list_checkpoints
from finetune.errors import UserError
from finetune.files.durable import restore_exports
from finetune.files.run_json import read_json_object
from finetune.units import counted, disk_size

EXIT_DAMAGED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One checkpoint in the list. `problems` are sentences; an empty list means sound, as far as was checked."""

    path: str
    step: int
    problems: list[str]
    bytes: int | None = None
    layout: str | None = None
    ranks: int | None = None
    packages: dict[str, str] | None = None
    epoch: float | None = None
    tokens: int | None = None
    architecture: str | None = None
    base_model: str | None = None
    is_adapter: bool = False


def checkpoints_command(options: argparse.Namespace) -> int:
    """Lists the checkpoints of `options.run`, and with `options.verify` reads every byte. Returns 1 if any is bad."""
    run = Path(options.run)
    restore_exports(run)
    found = summarize_checkpoints(run, checksums=options.verify)
    if options.json:
        print(json.dumps([asdict(summary) for summary in found], indent=1))
    else:
        for line in format_list(run, found, options.verify):
            print(line)
    return EXIT_DAMAGED if any(summary.problems for summary in found) else 0


def summarize_checkpoints(run: Path, *, checksums: bool) -> list[Summary]:
    """The published checkpoints of a run, in order of step. Raises `UserError` where there are none."""
    published = list_checkpoints(run)
    if not published:
        where = "has no checkpoints yet" if run.is_dir() else "no such folder; name a run's, such as runs/quickstart"
        raise UserError(f"{run}: {where}")
    return [_summarize(step, path, find_problems(path, checksums=checksums)) for step, path in published]


def format_list(run: Path, found: list[Summary], verified: bool) -> list[str]:
    """The list for a terminal, the newest last, and what comes next."""
    sound = "verified" if verified else "whole (--verify reads every byte)"
    lines = []
    for one in found:
        if one.problems:
            lines.append(f"step {one.step:>8,}  DAMAGED: {'; '.join(one.problems)}")
            continue
        size = disk_size(one.bytes or 0)
        at = f"epoch {one.epoch:.2f}, {one.tokens or 0:,} tokens" if one.epoch is not None else ""
        lines.append(
            f"step {one.step:>8,}  {size:>10}  {at}; written as {one.layout} on "
            f"{counted(one.ranks or 0, 'rank')}; {sound}"
        )
    for path in sorted(checkpoints_folder(run).glob("damaged-*")):
        lines.append(
            f"{path.name}: did not verify when the run resumed from an older one; removed once the run has "
            "saved that step again"
        )
    usable = [one for one in found if not one.problems]
    if not usable:
        return [*lines, "none of them can be resumed or exported"]
    newest = usable[-1]
    made = f"a PEFT adapter and the model merged with {newest.base_model}" if newest.is_adapter else newest.architecture
    return [
        *lines,
        f"resume:  the run's own command continues after step {newest.step:,}, in any layout and on any "
        "number of ranks",
        f"export:  finetune export {shlex.quote(newest.path)} --output DIR   ({made})",
    ]


def _summarize(step: int, path: Path, problems: list[str]) -> Summary:
    if problems:
        return Summary(path=str(path), step=step, problems=problems)
    manifest = read_manifest(path)
    state, config = read_json_object(path / STATE), read_json_object(path / MODEL / "config.json")
    return Summary(
        path=str(path),
        step=step,
        problems=[],
        bytes=manifest.bytes,
        layout=manifest.layout,
        ranks=manifest.ranks,
        packages=manifest.packages,
        epoch=state.get("epoch"),
        tokens=state.get("tokens"),
        architecture=next(iter(config.get("architectures") or ()), None),
        base_model=state.get("base_model"),
        is_adapter=(path / MODEL / "adapter_config.json").exists(),
    )
