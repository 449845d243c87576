"""A small disk of a story's own, which fills up or can no longer be written: real mounts, as root alone may make them."""

import os
import shutil
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MEGABYTES = 512
FULL, FULL_FOR_A_WHILE = "disk full", "disk full for a while"
READ_ONLY, READ_ONLY_CHECKPOINTS = "run's folder read-only", "checkpoints read-only"
FAULTS = (FULL, FULL_FOR_A_WHILE, READ_ONLY, READ_ONLY_CHECKPOINTS)
SAID = "No space left on device|Read-only file system|free"  # what a run ends with then
FILLER = "filler"
SECONDS_UNTIL_UNUSED = 10.0


@dataclass(frozen=True, slots=True)
class DiskFault:
    """What happens to the disk."""

    kind: str  # of FAULTS
    spare: int  # bytes that are left on a full disk
    seconds: float  # after which one that is full for a while is not any more


class Disk:
    """A tmpfs of MEGABYTES in `folder`. Raises `OSError` where this process may not mount one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._protected: Path | None = None
        folder.mkdir(parents=True)
        _mount("-t", "tmpfs", "-o", f"size={MEGABYTES}m", "tmpfs", str(folder))

    def begin(self, fault: DiskFault, run_folder: Path) -> bool:
        """Begins a fault. Returns whether there was anything that it could meet."""
        if fault.kind in (FULL, FULL_FOR_A_WHILE):
            self._fill(fault.spare)
            return True
        path = run_folder / "checkpoints" if fault.kind == READ_ONLY_CHECKPOINTS else run_folder
        if not path.is_dir():
            return False
        # A second mount of the folder over itself: of the first one files are open for writing.
        _mount("--bind", str(path), str(path))
        self._protected = path
        _make_read_only(path)
        return True

    def end(self) -> None:
        """Ends whatever has begun."""
        (self.folder / FILLER).unlink(missing_ok=True)
        if self._protected is not None:
            _unmount(self._protected)
            self._protected = None

    def close(self) -> None:
        """Removes the disk."""
        self.end()
        _unmount(self.folder)

    def _fill(self, spare: int) -> None:
        with (self.folder / FILLER).open("wb") as file:
            while (free := shutil.disk_usage(self.folder).free) > spare:
                with suppress(OSError):  # the run writes as well
                    os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, free - spare)


def open_disk(folder: Path) -> Disk | None:
    """A disk in `folder`; None where this process may not mount one."""
    try:
        return Disk(folder)
    except OSError:
        return None


def unmount_below(folder: Path) -> None:
    """Removes all mounts below `folder`, the innermost first."""
    lines = Path("/proc/self/mounts").read_text().splitlines()
    for place in reversed([line.split()[1] for line in lines]):
        if Path(place).is_relative_to(folder):
            _unmount(Path(place))


def _mount(*arguments: str) -> None:
    try:
        subprocess.run(["mount", *arguments], check=True, capture_output=True)
    except subprocess.CalledProcessError as error:
        raise OSError(error.stderr.decode(errors="replace")) from None


def _make_read_only(place: Path) -> None:
    """Makes a mount read-only, at a moment when no file of it is open for writing."""
    deadline = time.monotonic() + SECONDS_UNTIL_UNUSED
    while True:
        try:
            return _mount("-o", "remount,bind,ro", str(place))
        except OSError:  # the mount point is busy
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _unmount(place: Path) -> None:
    subprocess.run(["umount", "--lazy", str(place)], check=False, capture_output=True)
