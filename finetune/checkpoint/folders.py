"""The checkpoints of one run: their folders' names, the newest that verifies, which are kept;
`finetune checkpoints`.

    runs/<run_name>/checkpoints/
      step-00000100/        manifest.json (written last), model/, optimizer/, state.json
      .staging-00000200/    being written; never read
      .replaced-00000100/   a published step that a newer one of its number is about to replace
      .pruned-00000050/     about to be removed
      damaged-00000150/     did not verify at a resume; kept until the run saves that step again

A checkpoint gets its name by one rename, after all its bytes are on disk.
"""

import argparse
import json
import math
import os
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from finetune.checkpoint.manifest import MODEL, NAME, PARTS, STATE, find_damage, read_manifest
from finetune.config.schema import Recipe
from finetune.constants import EXPORT_SPARE_BYTES, count_steps
from finetune.errors import UserError
from finetune.files import durable
from finetune.files.durable import restore_exports
from finetune.files.json_files import read_json_object
from finetune.files.network import find_local_folder
from finetune.files.tensors import choose_dtype
from finetune.units import counted, disk_size

_REPLACED = re.compile(r"\.replaced-([0-9]{8,})")
_DAMAGED = re.compile(r"damaged-([0-9]{8,})(?:-[0-9]+)?")


def checkpoints_folder(run_folder: Path) -> Path:
    """The folder in which a run keeps its checkpoints."""
    return run_folder / "checkpoints"


def step_folder(run_folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` is once it is published.

    >>> step_folder(Path("runs/math"), 100).as_posix()
    'runs/math/checkpoints/step-00000100'
    """
    return checkpoints_folder(run_folder) / f"step-{step:08d}"


def list_checkpoints(run_folder: Path) -> list[tuple[int, Path]]:
    """Returns (step, folder) of every folder that has a checkpoint's name, in order of step.

    Not verified.
    """
    folder = checkpoints_folder(run_folder)
    if folder.is_dir():
        matches = [(NAME.fullmatch(path.name), path) for path in folder.iterdir()]
    else:
        matches = []
    return sorted((int(match[1]), path) for match, path in matches if match and path.is_dir())


def refuse_later_steps(folder: Path, step: int) -> None:
    """Raises `UserError` where another training has left later checkpoints in the run's `folder`
    than `step`'s.
    """
    later = max((saved for saved, _ in list_checkpoints(folder)), default=0)
    if later > step:
        raise UserError(
            f"save: {folder} holds step {later} of another training, which would be exported in "
            "place of this one; call load() first, or set another output_dir"
        )


# process and inode of the locks taken; a forked process holds none
_HELD: set[tuple[int, int]] = set()


def lock_run(run_folder: Path) -> None:
    """Locks the folder for this process until it ends, and removes what a killed run left: of two
    runs in one folder, each would prune the other's checkpoints.

    The same process may lock it again: its runs follow one another.

    Rank 0 calls this before anything is written. Raises `UserError` where another process has the
    folder.
    """
    checkpoints = checkpoints_folder(run_folder)
    durable.make_folder(checkpoints)
    try:
        lock = checkpoints / ".lock"
        if not lock.exists() or (os.getpid(), lock.stat().st_ino) not in _HELD:
            # the descriptor stays open until the process ends
            durable.lock_folder(checkpoints, lock.name)
            _HELD.add((os.getpid(), lock.stat().st_ino))
    except durable.FolderInUse as holder:
        raise UserError(
            f"{run_folder}: {holder} is writing here; wait for it, or set another output_dir"
        ) from None
    remove_leftovers(run_folder)


def find_newest_valid(
    run_folder: Path,
    log: Callable[[str], object] = lambda _: None,
    *,
    verify: Callable[[Path], list[str]] = find_damage,
) -> Path | None:
    """The checkpoint with the highest step that verifies, or None.

    Each damaged one above it is passed to `log`.

    `verify(checkpoint)` returns what is wrong with one, as `find_damage` does.
    """
    for _, checkpoint in reversed(list_checkpoints(run_folder)):
        problems = verify(checkpoint)
        if not problems:
            return checkpoint
        log(f"{checkpoint}: passed over: {'; '.join(problems)}")
    return None


def staging_folder(run_folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` is written, on the filesystem where it will be published."""
    return checkpoints_folder(run_folder) / f".staging-{step:08d}"


def make_staging(staging: Path) -> None:
    """Makes an empty staging folder."""
    durable.empty_folder(staging)
    for part in PARTS:
        durable.make_folder(staging / part)


def publish(run_folder: Path, staging: Path, step: int) -> Path:
    """Gives a completed staging folder its name, in one rename.

    Only one process of a run may do this.

    A checkpoint of the same step is replaced; `remove_leftovers` restores it where the process is
    killed in between.
    """
    target = step_folder(run_folder, step)
    durable.publish_folder(
        target, staging, checkpoints_folder(run_folder) / f".replaced-{step:08d}"
    )
    return target


def prune(
    run_folder: Path,
    newest: int,
    keep: int | None,
    keep_every_steps: int | None = None,
    best_step: int | None = None,
) -> list[str]:
    """Removes all but the newest `keep` checkpoints up to step `newest`, by step and never by time.

    None keeps all.

    `newest` has just been published, so it is sound and always kept. Also keeps the checkpoint of
    `best_step` and those at multiples of `keep_every_steps`. Later checkpoints and incomplete
    folders are neither counted nor removed. Damaged checkpoints (`rename_damaged`) up to `newest`
    are removed too: the run has trained their steps again.

    Returns:
        A sentence for each checkpoint that could not be removed.
    """
    if keep is None:
        return []
    older = [
        (step, path)
        for step, path in list_checkpoints(run_folder)
        if step < newest and not find_damage(path, checksums=False)
    ]
    unwanted = []
    for step, path in older[: max(0, len(older) - (keep - 1))]:
        is_milestone = keep_every_steps is not None and step % keep_every_steps == 0
        if step != best_step and not is_milestone:
            unwanted.append(path)
    for path in sorted(checkpoints_folder(run_folder).glob("damaged-*")):
        match = _DAMAGED.fullmatch(path.name)
        if match and int(match[1]) <= newest:
            unwanted.append(path)
    problems = []
    for path in unwanted:
        # under another name first: what is removed in part is no checkpoint
        set_aside = path.with_name(f".pruned-{path.name.removeprefix('step-')}")
        try:
            durable.remove_tree(set_aside)
            durable.rename(path, set_aside)
            durable.remove_tree(set_aside)
        except OSError as error:
            problems.append(
                f"{path}: an old checkpoint that could not be removed: {error.strerror or error}"
            )
    return problems


def rename_damaged(run_folder: Path, step: int) -> list[Path]:
    """Renames every checkpoint newer than `step` to damaged-N, and returns the new paths.

    Only the holder of the lock may call it. The run resumes at `step` because none of the newer
    ones verified; under a checkpoint's name they would count in `save_total_limit` and be verified
    again at every start.
    """
    renamed = []
    for number, path in list_checkpoints(run_folder):
        if number <= step:
            continue
        target = path.with_name(f"damaged-{number:08d}")
        copies = 1
        while target.exists() or target.is_symlink():
            copies += 1
            target = path.with_name(f"damaged-{number:08d}-{copies}")
        durable.rename(path, target)
        renamed.append(target)
    return renamed


def remove_leftovers(run_folder: Path) -> None:
    """Removes what a killed process left, and restores a checkpoint it was replacing.

    For the holder of the lock only.

    What cannot be removed stays: it is no checkpoint, and no reason not to start.
    """
    folder = checkpoints_folder(run_folder)
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        replaced = _REPLACED.fullmatch(path.name)
        if replaced is not None:
            durable.recover_replaced(step_folder(run_folder, int(replaced[1])), path)
        elif path.name.startswith((".staging-", ".pruned-")):
            durable.remove_tree(path, ignore_errors=True)


def refuse_small_disk(
    run_folder: Path,
    recipe: Recipe,
    steps: int,
    checkpoint_bytes: int,
    parameters: int,
    steps_per_epoch: int | None = None,
    carried_bytes: int = 0,
) -> None:
    """Raises `UserError` where the disk under `run_folder` cannot hold what the run will write
    there.

    That is one checkpoint more than are kept, since an old one is removed after the new one is
    published; and the export, in the dtype that `finetune export` will choose, with what it carries
    over from the base, and the space that it keeps free.
    """
    keys = recipe.checkpoint
    if keys.save_strategy == "epoch":
        every = steps_per_epoch
    else:
        every = count_steps(keys.save_steps, steps)
    saves = math.ceil(steps / every) if every else 1
    if keys.save_total_limit is None:
        kept = saves
    else:
        kept = min(saves, keys.save_total_limit + 1)
    new = max(1, kept - len(list_checkpoints(run_folder)))
    name = recipe.model.model_name_or_path
    if name is not None:
        base = find_local_folder(name, recipe.model.model_revision)
    else:
        base = None
    dtype = choose_dtype(keys.export_dtype, base, getattr(torch, recipe.model.dtype))
    of_format = parameters * dtype.itemsize + carried_bytes
    export = of_format * len(keys.export_formats) if keys.export_at_end else 0  # at most
    spare = EXPORT_SPARE_BYTES if export else 0
    needed = new * checkpoint_bytes + export + spare
    free = shutil.disk_usage(run_folder).free
    if needed > free:
        if keys.save_total_limit != 1 and kept > 1:
            fewer = "lower save_total_limit, "
        else:
            fewer = ""
        raise UserError(
            f"{run_folder}: the run will write {counted(new, 'checkpoint')} of "
            f"{disk_size(checkpoint_bytes)} and an export of "
            f"{disk_size(export)}{f' (with {disk_size(spare)} to spare)' if spare else ''}, but "
            f"{disk_size(free)} are free here; {fewer}free space, or set another output_dir"
        )


EXIT_DAMAGED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One checkpoint in the list.

    `problems` are sentences; an empty list means sound, as far as was checked.
    """

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
    """Lists the checkpoints of `options.run`, and with `options.verify` reads every byte.

    Returns 1 if any is bad.
    """
    run = Path(options.run)
    restore_exports(run)
    summaries = summarize_checkpoints(run, checksums=options.verify)
    if options.json:
        print(json.dumps([asdict(summary) for summary in summaries], indent=1))
    else:
        for line in format_list(run, summaries, options.verify):
            print(line)
    if any(summary.problems for summary in summaries):
        return EXIT_DAMAGED
    return 0


def summarize_checkpoints(run: Path, *, checksums: bool) -> list[Summary]:
    """The published checkpoints of a run, in order of step.

    Raises `UserError` where there are none.
    """
    published = list_checkpoints(run)
    if not published:
        raise UserError(f"{run}: {_why_none(run)}")
    return [
        _summarize(step, path, find_damage(path, checksums=checksums)) for step, path in published
    ]


def _why_none(run: Path) -> str:
    """Says what is wrong with a folder in which no checkpoints are."""
    if not run.is_dir():
        return "no such folder; name a run's, such as runs/quickstart"
    if (run / "recipe.yaml").is_file() or (run / "metrics.jsonl").is_file():
        return "has no checkpoints yet"
    at = run.absolute()
    above = {"checkpoints": at.parent}.get(
        at.name, at.parent.parent if NAME.fullmatch(at.name) else None
    )
    if above is not None and list_checkpoints(above):
        return f"a part of a run; name the run's folder, {above}"
    return (
        "no run's folder, for it has neither recipe.yaml nor metrics.jsonl; name a run's, such as "
        "runs/quickstart"
    )


def format_list(run: Path, summaries: list[Summary], verified: bool) -> list[str]:
    """The list for a terminal, the newest last, and what comes next."""
    if verified:
        sound = "verified"
    else:
        sound = "whole (--verify reads every byte)"
    lines = []
    for one in summaries:
        if one.problems:
            lines.append(f"step {one.step:>8,}  DAMAGED: {'; '.join(one.problems)}")
            continue
        size = disk_size(one.bytes or 0)
        if one.epoch is not None:
            at = f"epoch {one.epoch:.2f}, {one.tokens or 0:,} tokens"
        else:
            at = ""
        lines.append(
            f"step {one.step:>8,}  {size:>10}  {at}; written as {one.layout} on "
            f"{counted(one.ranks or 0, 'rank')}; {sound}"
        )
    for path in sorted(checkpoints_folder(run).glob("damaged-*")):
        lines.append(
            f"{path.name}: did not verify when the run resumed from an older one; removed once the "
            "run has saved that step again"
        )
    usable = [one for one in summaries if not one.problems]
    if not usable:
        return [*lines, "none of them can be resumed or exported"]
    newest = usable[-1]
    made = (
        f"a PEFT adapter and the model merged with {newest.base_model}"
        if newest.is_adapter
        else newest.architecture
    )
    return [
        *lines,
        f"resume:  the run's own command continues after step {newest.step:,}, in any layout and "
        "on any number of ranks",
        f"export:  finetune export {shlex.quote(newest.path)} --output DIR   ({made})",
    ]


def _summarize(step: int, path: Path, problems: list[str]) -> Summary:
    if problems:
        return Summary(path=str(path), step=step, problems=problems)
    manifest = read_manifest(path)
    state = read_json_object(path / STATE)
    config = read_json_object(path / MODEL / "config.json")
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
