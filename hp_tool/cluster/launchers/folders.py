"""Folders of jobs that have ended: which lie under a root, how large they are, and their
removal.
"""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

LOCK = "lock"
GONE = "~gone-"
"""Before the name of a folder that is being removed; whoever comes next removes what a killed
process left of it.
"""


def job_folders(root: Path) -> list[str]:
    """Names of all jobs' folders under `root`, and of links in their place; empty where there is no
    such folder.
    """
    with contextlib.suppress(OSError), os.scandir(root) as entries:
        return sorted(
            each.name
            for each in entries
            if not each.name.startswith("~") and (each.is_symlink() or each.is_dir())
        )
    return []


def size_bytes(folder: Path) -> int:
    """Bytes of all files in a folder; links are not followed."""
    if folder.is_symlink():
        return 0
    return sum(path.lstat().st_size for path in _files(folder))


def remove(folder: Path) -> bool:
    """Remove a job's folder for good, and never anything that a link in it leads to; False where it
    stays, as its job is alive or this user may not remove it.
    """
    if _is_alive(folder):
        return False
    try:
        if folder.is_symlink():
            folder.unlink()
            return True
        gone = folder.rename(
            folder.with_name(GONE + folder.name)
        )  # at once: nobody sees a part of it
    except OSError:
        return False
    shutil.rmtree(gone, ignore_errors=True)
    return True


def clear(root: Path) -> None:
    """Remove what killed processes left of folders that they were removing."""
    with contextlib.suppress(OSError):
        for path in root.glob(f"{GONE}*"):
            shutil.rmtree(path, ignore_errors=True)


def _is_alive(folder: Path) -> bool:
    """Whether a supervisor on this host holds the job's lock."""
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
