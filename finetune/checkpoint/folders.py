"""Names, publishes, finds and prunes a run's checkpoint folders; `finetune checkpoints` lists them.

    runs/<run_name>/checkpoints/
      step-00000100/        manifest.json (written last), model/, optimizer/, state.json
      .staging-00000200/    being written; never resumed from
      .replaced-00000100/   about to be replaced by a newer save of the same step
      .pruned-00000050/     about to be removed
      damaged-00000150/     did not verify at a resume; `prune` says how long it is kept

A checkpoint gets its name by one rename, after all its bytes are on disk.
"""

import argparse
import json
import os
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from finetune.checkpoint.manifest import MODEL, NAME, PARTS, STATE, find_damage, read_manifest
from finetune.config.schema import Recipe
from finetune.constants import EXPORT_SPARE_BYTES
from finetune.errors import UserError
from finetune.files import durable
from finetune.files.durable import restore_exports
from finetune.files.json_files import read_json_object
from finetune.files.network import find_local_folder
from finetune.files.tensors import choose_dtype
from finetune.units import counted, disk_size

if TYPE_CHECKING:  # imports transformers
    from finetune.models.load import ModelSize

# names of folders; the group is the step
_REPLACED = re.compile(r"\.replaced-([0-9]{8,})")
_DAMAGED = re.compile(r"damaged-([0-9]{8,})(?:-[0-9]+)?")  # a second of the same step ends in -2


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
    """Returns (step, folder) of every folder named like a checkpoint, in order of step.

    The folders are not verified. The list is empty if the run has no folder of checkpoints.
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
    """Raises `UserError` if the run's `folder` has a checkpoint of a later step than `step`.

    Such a checkpoint is of another training.
    """
    newest = max((saved_step for saved_step, _ in list_checkpoints(folder)), default=0)
    if newest > step:
        raise UserError(
            f"save: {folder} holds step {newest} of another training, which would be exported in "
            "place of this one; call load() first, or set another output_dir"
        )


# (process id, inode of the lock file) of each lock that this process holds. With the process id, a
# forked process does not take its parent's locks for its own.
_HELD: set[tuple[int, int]] = set()


def lock_run(run_folder: Path) -> None:
    """Locks a run's folder until this process ends, and cleans up after a killed run.

    Two runs in one folder would prune each other's checkpoints. A process that has locked a folder
    may call this again, for its next run. Rank 0 calls it before anything is written.

    Raises `UserError` if another process has locked the folder.
    """
    checkpoints = checkpoints_folder(run_folder)
    durable.make_folder(checkpoints)
    try:
        lock = checkpoints / ".lock"
        if not lock.exists() or (os.getpid(), lock.stat().st_ino) not in _HELD:
            # the lock lasts as long as its file descriptor, which is never closed
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
    """Returns the newest checkpoint without damage; None if there is none.

    Args:
        run_folder: The run's folder.
        log: Called with a sentence for each newer, damaged checkpoint.
        verify: Returns the problems of a checkpoint, as `find_damage` does.
    """
    for _, checkpoint in reversed(list_checkpoints(run_folder)):
        problems = verify(checkpoint)
        if not problems:
            return checkpoint
        if not checkpoint.exists():  # the run has pruned it meanwhile, so there are newer ones
            return find_newest_valid(run_folder, log, verify=verify)
        log(f"{checkpoint}: passed over: {'; '.join(problems)}")
    return None


def staging_folder(run_folder: Path, step: int) -> Path:
    """Returns the folder in which the checkpoint of `step` is written before it is published.

    It is on the same file system as the published checkpoint, so that a rename can publish it.
    """
    return checkpoints_folder(run_folder) / f".staging-{step:08d}"


def make_staging(staging: Path) -> None:
    """Makes a staging folder with its empty model/ and optimizer/; older content is removed."""
    durable.empty_folder(staging)
    for part in PARTS:
        durable.make_folder(staging / part)


def publish(run_folder: Path, staging: Path, step: int) -> Path:
    """Gives a complete staging folder its final name by one rename; returns the new path.

    An older checkpoint of the same step is replaced. If the process is killed in between,
    `remove_leftovers` restores that one. Only one process of a run may call this.
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
    """Removes all but the newest `keep` checkpoints, after step `newest` was published.

    Checkpoints of later steps and incomplete ones are neither counted nor removed. Folders named
    by `rename_damaged` are removed up to step `newest`, since the run has trained their steps
    again.

    Args:
        run_folder: The run's folder.
        newest: The step that was just published. Its checkpoint is kept.
        keep: The number of checkpoints to keep; None keeps all, and removes nothing.
        keep_every_steps: Checkpoints at multiples of this step are kept beyond `keep`.
        best_step: The step of one more checkpoint to keep beyond `keep`.

    Returns:
        A sentence for each folder that could not be removed.
    """
    if keep is None:
        return []
    older = [
        (step, path)
        for step, path in list_checkpoints(run_folder)
        if step < newest and not find_damage(path, checksums=False)
    ]
    surplus = max(0, len(older) - (keep - 1))  # the newest itself is one of `keep`
    unwanted = []
    for step, path in older[:surplus]:
        is_milestone = keep_every_steps is not None and step % keep_every_steps == 0
        if step != best_step and not is_milestone:
            unwanted.append(path)
    for path in sorted(checkpoints_folder(run_folder).glob("damaged-*")):
        match = _DAMAGED.fullmatch(path.name)
        if match and int(match[1]) <= newest:
            unwanted.append(path)
    problems = []
    for path in unwanted:
        # Renamed first: a folder whose removal stops halfway must not look like a checkpoint.
        set_aside = path.with_name(f".pruned-{path.name.removeprefix('step-')}")
        try:
            durable.remove_tree(set_aside)  # what an earlier, interrupted removal left
            durable.rename(path, set_aside)
            durable.remove_tree(set_aside)
        except OSError as error:
            problems.append(
                f"{path}: an old checkpoint that could not be removed: {error.strerror or error}"
            )
    return problems


def rename_damaged(run_folder: Path, step: int) -> list[Path]:
    """Renames each checkpoint of a later step than `step` to damaged-N; returns the new paths.

    The run resumes at `step`, because the later checkpoints did not verify. Under their old names
    they would count in `save_total_limit`, and be verified at every start. Only the holder of the
    run's lock may call this.
    """
    renamed = []
    for damaged_step, path in list_checkpoints(run_folder):
        if damaged_step <= step:
            continue
        target = path.with_name(f"damaged-{damaged_step:08d}")
        copies = 1
        while target.exists() or target.is_symlink():
            copies += 1
            target = path.with_name(f"damaged-{damaged_step:08d}-{copies}")
        durable.rename(path, target)
        renamed.append(target)
    return renamed


def remove_leftovers(run_folder: Path) -> None:
    """Removes what a killed process left.

    A checkpoint that it was replacing gets its name back if the newer one was not published; else
    it is removed. A folder that cannot be removed stays: it has no checkpoint's name, so the run
    can start. Only the holder of the run's lock may call this.
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
    steps_per_epoch: int | None,
    size: "ModelSize | None",
) -> None:
    """Raises `UserError` if the disk is too small for the run's checkpoints and its export.

    Args:
        run_folder: The run's folder.
        recipe: The recipe.
        steps: The run's last step.
        checkpoint_bytes: The size of one checkpoint.
        steps_per_epoch: The number of steps in an epoch; None if it is not known.
        size: The numbers of the model's parameters; None: only checkpoints are counted.
    """
    keys = recipe.checkpoint
    kept = keys.count_kept(steps)
    existing = list_checkpoints(run_folder)
    newest = max((step for step, _ in existing), default=0)
    if steps_per_epoch is None and kept is not None:
        steps_per_epoch = 1  # an epoch may end at any step, but only `kept` are kept
    new_saves = [step for step in recipe.list_saves(steps, steps_per_epoch) if step > newest]
    most = len(existing) + len(new_saves)
    # one more than are kept: an old checkpoint is removed after the new one is published
    checkpoints = most if kept is None else min(most, kept + 1)
    new_checkpoints = max(1, checkpoints - len(existing))
    export_bytes = 0
    if keys.export_at_end and size is not None:
        export_bytes = _bound_export(recipe, size)
    spare_bytes = EXPORT_SPARE_BYTES if export_bytes else 0
    needed = new_checkpoints * checkpoint_bytes + export_bytes + spare_bytes
    free = shutil.disk_usage(run_folder).free
    if needed <= free:
        return
    spare = f" (with {disk_size(spare_bytes)} to spare)" if spare_bytes else ""
    can_keep_fewer = keys.save_total_limit != 1 and checkpoints > 1
    advice = "lower save_total_limit, " if can_keep_fewer else ""
    raise UserError(
        f"{run_folder}: the run will write {counted(new_checkpoints, 'checkpoint')} of "
        f"{disk_size(checkpoint_bytes)} and an export of {disk_size(export_bytes)}{spare}, but "
        f"{disk_size(free)} are free here; {advice}free space, or set another output_dir"
    )


def _bound_export(recipe: Recipe, size: "ModelSize") -> int:
    """Returns an upper bound of the bytes that the export will write, all its formats together."""
    name = recipe.model.model_name_or_path
    base = find_local_folder(name, recipe.model.model_revision) if name is not None else None
    keys = recipe.checkpoint
    dtype = choose_dtype(keys.export_dtype, base, getattr(torch, recipe.model.dtype))
    return (size.total * dtype.itemsize + size.carried_bytes) * len(keys.export_formats)


EXIT_DAMAGED = 1  # the exit code of `finetune checkpoints` if a checkpoint has a problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What `finetune checkpoints` says about one checkpoint.

    If there are problems, the fields after them have their defaults.
    """

    path: str
    step: int
    problems: list[str]  # sentences
    bytes: int | None = None
    layout: str | None = None  # the layout that wrote it, such as fsdp2
    ranks: int | None = None  # the number of ranks that wrote it
    packages: dict[str, str] | None = None  # name -> version
    epoch: float | None = None
    tokens: int | None = None  # read by the run so far
    architecture: str | None = None  # the class of the model
    base_model: str | None = None
    is_adapter: bool = False  # whether it has a LoRA adapter in place of a whole model


def checkpoints_command(options: argparse.Namespace) -> int:
    """Prints the checkpoints of `options.run`, as text or JSON.

    With `options.verify` every byte of the checkpoints is read. Returns the exit code:
    EXIT_DAMAGED if any checkpoint has a problem, else 0.
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

    Those that the run prunes meanwhile are left out.

    `checksums`: whether every byte is read; else only names and sizes are compared. Raises
    `UserError` if there are no checkpoints.
    """
    published = list_checkpoints(run)
    if not published:
        raise UserError(f"{run}: {_explain_absence(run)}")
    summaries = []
    for step, path in published:
        problems = find_damage(path, checksums=checksums)
        if not problems or path.exists():
            summaries.append(_summarize(step, path, problems))
    # If all were pruned, there are newer ones.
    return summaries or summarize_checkpoints(run, checksums=checksums)


def _explain_absence(run: Path) -> str:
    """Returns why the folder `run` has no checkpoints, and which folder to name instead."""
    if not run.is_dir():
        return "no such folder; name a run's, such as runs/quickstart"
    if (run / "recipe.yaml").is_file() or (run / "metrics.jsonl").is_file():
        return "has no checkpoints yet"
    path = run.absolute()
    for run_above in (path.parent, path.parent.parent):
        if list_checkpoints(run_above):
            return f"a part of a run; name the run's folder, {run_above}"
    return (
        "no run's folder, for it has neither recipe.yaml nor metrics.jsonl; name a run's, such as "
        "runs/quickstart"
    )


def format_list(run: Path, summaries: list[Summary], verified: bool) -> list[str]:
    """Returns the lines for a terminal: the checkpoints, newest last, and what to do with them.

    `verified`: whether every byte of the checkpoints was read.
    """
    condition = "verified" if verified else "whole (--verify reads every byte)"
    lines = []
    for summary in summaries:
        if summary.problems:
            lines.append(f"step {summary.step:>8,}  DAMAGED: {'; '.join(summary.problems)}")
            continue
        size = disk_size(summary.bytes or 0)
        progress = ""
        if summary.epoch is not None:
            progress = f"epoch {summary.epoch:.2f}, {summary.tokens or 0:,} tokens"
        lines.append(
            f"step {summary.step:>8,}  {size:>10}  {progress}; written as {summary.layout} on "
            f"{counted(summary.ranks or 0, 'rank')}; {condition}"
        )
    for path in sorted(checkpoints_folder(run).glob("damaged-*")):
        lines.append(
            f"{path.name}: did not verify when the run resumed from an older one; with "
            "save_total_limit removed once the run has saved that step again"
        )
    usable = [summary for summary in summaries if not summary.problems]
    if not usable:
        return [*lines, "none of them can be resumed or exported"]
    newest = usable[-1]
    exported = newest.architecture
    if newest.is_adapter:
        exported = f"a PEFT adapter and the model merged with {newest.base_model}"
    return [
        *lines,
        f"resume:  the run's own command continues after step {newest.step:,}, in any layout and "
        "on any number of ranks",
        f"export:  finetune export {shlex.quote(newest.path)} --output DIR   ({exported})",
    ]


def _summarize(step: int, path: Path, problems: list[str]) -> Summary:
    """Describes the checkpoint in `path`; its files are read only if it has no problems."""
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
