"""List, measure and remove the job folders of ended jobs."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

LOCK = "lock"
REMOVED_PREFIX = "~gone-"
"""Prefix of folders that are being removed. After a crash, a later call removes them."""


def job_folders(root: Path) -> list[str]:
    """Return the names of job folders under `root`, including symbolic links with such names."""
    with contextlib.suppress(OSError), os.scandir(root) as entries:
        return sorted(
            entry.name
            for entry in entries
            if not entry.name.startswith("~") and (entry.is_symlink() or entry.is_dir())
        )
    return []


def size_bytes(folder: Path) -> int:
    """Return the total file size of a folder in bytes. Symbolic links are not followed."""
    if folder.is_symlink():
        return 0
    return sum(path.lstat().st_size for path in _files(folder))


def remove(folder: Path) -> bool:
    """Remove a job folder without following symbolic links.

    Returns:
        False if the folder remains because its job is running or because permission is missing.
    """
    if _is_alive(folder):
        return False
    try:
        if folder.is_symlink():
            folder.unlink()
            return True
        # Atomic, so that nobody sees a partly removed folder.
        renamed = folder.rename(folder.with_name(REMOVED_PREFIX + folder.name))
    except OSError:
        return False
    shutil.rmtree(renamed, ignore_errors=True)
    return True


def remove_leftovers(root: Path) -> None:
    """Remove folders whose removal was interrupted."""
    with contextlib.suppress(OSError):
        for path in root.glob(f"{REMOVED_PREFIX}*"):
            shutil.rmtree(path, ignore_errors=True)


def _is_alive(folder: Path) -> bool:
    if folder.is_symlink():
        return False
    try:
        lock = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def _files(folder: Path) -> Iterator[Path]:
    for place, _, names in os.walk(folder):
        yield from (Path(place) / name for name in names)
