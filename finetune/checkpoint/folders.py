"""The folders of a run's checkpoints: how they are named, published, found, kept and removed;
`finetune checkpoints`.

    runs/<run_name>/checkpoints/
      step-00000100/        manifest.json (written last), model/, optimizer/, state.json
      .staging-00000200/    being written; never read
      .replaced-00000100/   about to be replaced by a newer save of the same step
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
    """Returns the folder of a run's checkpoints."""
    return run_folder / "checkpoints"


def step_folder(run_folder: Path, step: int) -> Path:
    """Returns the folder of the published checkpoint of `step`.

    >>> step_folder(Path("runs/math"), 100).as_posix()
    'runs/math/checkpoints/step-00000100'
    """
    return checkpoints_folder(run_folder) / f"step-{step:08d}"


def list_checkpoints(run_folder: Path) -> list[tuple[int, Path]]:
    """Returns (step, folder) of every folder with a checkpoint's name, in order of step.

    None of them is verified.
    """
    folder = checkpoints_folder(run_folder)
    if not folder.is_dir():
        return []
    checkpoints = []
    for path in folder.iterdir():
        match = NAME.fullmatch(path.name)
        if match and path.is_dir():
            checkpoints.append((int(match[1]), path))
    return sorted(checkpoints)


def refuse_later_steps(folder: Path, step: int) -> None:
    """Raises `UserError` where `folder` has checkpoints of another training, after `step`."""
    later = max((saved for saved, _ in list_checkpoints(folder)), default=0)
    if later > step:
        raise UserError(
            f"save: {folder} holds step {later} of another training, which would be exported in "
            "place of this one; call load() first, or set another output_dir"
        )


# (process, inode) of each lock that this process holds; a forked process holds none
_HELD: set[tuple[int, int]] = set()


def lock_run(run_folder: Path) -> None:
    """Locks a run's folder until the process ends, and removes what a killed run left.

    Two runs in one folder would prune each other's checkpoints. A process may lock a folder again
    for its next run. Rank 0 calls this before anything is written.

    Raises `UserError` where another process has locked the folder.
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
    """Returns the checkpoint with the highest step that verifies, or None.

    Args:
        run_folder: The run's folder.
        log: Called with a sentence for each damaged checkpoint of a higher step.
        verify: Returns the problems of a checkpoint, as `find_damage` does.
    """
    for _, checkpoint in reversed(list_checkpoints(run_folder)):
        problems = verify(checkpoint)
        if not problems:
            return checkpoint
        log(f"{checkpoint}: passed over: {'; '.join(problems)}")
    return None


def staging_folder(run_folder: Path, step: int) -> Path:
    """Returns the folder in which the checkpoint of `step` is written before it is published.

    It is on the filesystem of the published checkpoint.
    """
    return checkpoints_folder(run_folder) / f".staging-{step:08d}"


def make_staging(staging: Path) -> None:
    """Makes an empty staging folder."""
    durable.empty_folder(staging)
    for part in PARTS:
        durable.make_folder(staging / part)


def publish(run_folder: Path, staging: Path, step: int) -> Path:
    """Gives a completed staging folder its name by one rename; returns the checkpoint's folder.

    Only one process of a run may do this. A checkpoint of the same step is replaced. If the process
    is killed meanwhile, `remove_leftovers` restores it.
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
    """Removes all but the newest `keep` checkpoints up to step `newest`.

    Later checkpoints and incomplete folders are neither counted nor removed. Folders that
    `rename_damaged` named are removed up to `newest`: the run has trained their steps again.

    Args:
        run_folder: The run's folder.
        newest: The step that was just published. It is kept.
        keep: The number of checkpoints to keep; None: all.
        keep_every_steps: Checkpoints at multiples of it are kept, too.
        best_step: The step of another checkpoint that is kept.

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
        # renamed first, so that a folder that is removed in part is no checkpoint
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
    """Renames every checkpoint after `step` to damaged-N; returns the new paths.

    The run resumes at `step` because none of them verified. As checkpoints they would count in
    `save_total_limit`, and be verified at every start. Only the holder of the lock may call it.
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
    """Removes what a killed process left, and restores a checkpoint that it was replacing.

    A folder that cannot be removed stays: it is no checkpoint, and the run can start. Only the
    holder of the lock may call it.
    """
    folder = checkpoints_folder(run_folder)
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
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
    steps_per_epoch: int | None,
    carried_bytes: int,
) -> None:
    """Raises `UserError` where the disk under `run_folder` is too small for the run's files.

    Args:
        run_folder: The run's folder.
        recipe: The recipe.
        steps: The run's last step.
        checkpoint_bytes: The size of a checkpoint.
        parameters: The number of parameters in the export.
        steps_per_epoch: None: unknown.
        carried_bytes: The size of the base's tensors that an export carries over.
    """
    keys = recipe.checkpoint
    if keys.save_strategy == "epoch":
        every = steps_per_epoch
    else:
        every = count_steps(keys.save_steps, steps)
    kept = math.ceil(steps / every) if every else 1
    if keys.save_total_limit is not None:
        # one more than the limit: an old checkpoint is removed after the new one is published
        kept = min(kept, keys.save_total_limit + 1)
    new = max(1, kept - len(list_checkpoints(run_folder)))
    export = 0
    if keys.export_at_end:
        export = _bound_export(recipe, parameters, carried_bytes)
    spare = EXPORT_SPARE_BYTES if export else 0
    needed = new * checkpoint_bytes + export + spare
    free = shutil.disk_usage(run_folder).free
    if needed <= free:
        return
    with_spare = f" (with {disk_size(spare)} to spare)" if spare else ""
    fewer = "lower save_total_limit, " if keys.save_total_limit != 1 and kept > 1 else ""
    raise UserError(
        f"{run_folder}: the run will write {counted(new, 'checkpoint')} of "
        f"{disk_size(checkpoint_bytes)} and an export of {disk_size(export)}{with_spare}, but "
        f"{disk_size(free)} are free here; {fewer}free space, or set another output_dir"
    )


def _bound_export(recipe: Recipe, parameters: int, carried_bytes: int) -> int:
    """Returns an upper bound of the bytes that `finetune export` will write, in all formats."""
    name = recipe.model.model_name_or_path
    base = find_local_folder(name, recipe.model.model_revision) if name is not None else None
    keys = recipe.checkpoint
    dtype = choose_dtype(keys.export_dtype, base, getattr(torch, recipe.model.dtype))
    return (parameters * dtype.itemsize + carried_bytes) * len(keys.export_formats)


EXIT_DAMAGED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One checkpoint in the list. The other fields are known where it has no problems."""

    path: str
    step: int
    problems: list[str]  # sentences
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
    """Lists the checkpoints of `options.run`. With `options.verify` it reads every byte of them.

    Returns 1 if any has a problem, else 0.
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
    """Describes the published checkpoints of a run, in order of step.

    Raises `UserError` where there are none.
    """
    published = list_checkpoints(run)
    if not published:
        raise UserError(f"{run}: {_why_none(run)}")
    return [
        _summarize(step, path, find_damage(path, checksums=checksums)) for step, path in published
    ]


def _why_none(run: Path) -> str:
    """Returns the reason why a folder has no checkpoints."""
    if not run.is_dir():
        return "no such folder; name a run's, such as runs/quickstart"
    if (run / "recipe.yaml").is_file() or (run / "metrics.jsonl").is_file():
        return "has no checkpoints yet"
    path = run.absolute()
    above = None
    if path.name == "checkpoints":
        above = path.parent
    elif NAME.fullmatch(path.name):
        above = path.parent.parent
    if above is not None and list_checkpoints(above):
        return f"a part of a run; name the run's folder, {above}"
    return (
        "no run's folder, for it has neither recipe.yaml nor metrics.jsonl; name a run's, such as "
        "runs/quickstart"
    )


def format_list(run: Path, summaries: list[Summary], verified: bool) -> list[str]:
    """Returns the lines for a terminal: the checkpoints, the newest last, and the next commands."""
    sound = "verified" if verified else "whole (--verify reads every byte)"
    lines = []
    for one in summaries:
        if one.problems:
            lines.append(f"step {one.step:>8,}  DAMAGED: {'; '.join(one.problems)}")
            continue
        size = disk_size(one.bytes or 0)
        at = ""
        if one.epoch is not None:
            at = f"epoch {one.epoch:.2f}, {one.tokens or 0:,} tokens"
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
    made = newest.architecture
    if newest.is_adapter:
        made = f"a PEFT adapter and the model merged with {newest.base_model}"
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
