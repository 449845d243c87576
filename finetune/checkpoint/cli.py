"""`finetune checkpoints RUN`: what a run has left, whether it is sound, and what can be done with it."""

import argparse
import json
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from finetune.checkpoint import manifest as folder
from finetune.errors import UserError
from finetune.export.publish import bring_back_exports
from finetune.units import counted, disk_size

EXIT_DAMAGED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One checkpoint as a person wants to see it. `problems` are sentences; without any it is sound as far as was looked."""

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
    """Lists the checkpoints of `options.run`; with `options.verify` reads every byte. Returns 1 where one is damaged."""
    run = Path(options.run)
    bring_back_exports(run)
    found = list_checkpoints(run, checksums=options.verify)
    if options.json:
        print(json.dumps([asdict(listed) for listed in found], indent=1))
    else:
        for line in shown(run, found, options.verify):
            print(line)
    return EXIT_DAMAGED if any(listed.problems for listed in found) else 0


def list_checkpoints(run: Path, *, checksums: bool) -> list[Listed]:
    """The published checkpoints of a run, in order of step. Raises `UserError` where there are none."""
    published = folder.published(run)
    if not published:
        where = "has no checkpoints yet" if run.is_dir() else "no such folder; name a run's, such as runs/quickstart"
        raise UserError(f"{run}: {where}")
    return [_listed(step, path, folder.problems_of(path, checksums=checksums)) for step, path in published]


def shown(run: Path, found: list[Listed], verified: bool) -> list[str]:
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
            f"step {one.step:>8,}  {size:>10}  {at}; written as {one.layout} on {counted(one.ranks or 0, 'rank')}; {sound}"
        )
    for path in sorted(folder.checkpoints_of(run).glob("damaged-*")):
        lines.append(f"{path.name}: did not verify when the run resumed below it; remove it when you need the room")
    usable = [one for one in found if not one.problems]
    if not usable:
        return [*lines, "none of them can be resumed or exported"]
    newest = usable[-1]
    made = f"a PEFT adapter and the model merged with {newest.base_model}" if newest.is_adapter else newest.architecture
    return [
        *lines,
        f"resume:  the run's own command goes on after step {newest.step:,}, in any layout and on any number of ranks",
        f"export:  finetune export {shlex.quote(newest.path)} --output DIR   ({made})",
    ]


def _listed(step: int, path: Path, problems: list[str]) -> Listed:
    if problems:
        return Listed(path=str(path), step=step, problems=problems)
    manifest = folder.read_manifest(path)
    state, config = _json(path / folder.STATE), _json(path / folder.MODEL / "config.json")
    return Listed(
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
        is_adapter=(path / folder.MODEL / "adapter_config.json").exists(),
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
