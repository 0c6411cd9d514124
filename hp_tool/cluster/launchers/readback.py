"""Files in a job's folder, read and written as the job's own: it may have put anything in their
place.

What the job did to its folder (a link, a pipe, a folder or nothing where a file was) is told apart
from what befell the host (a disk that is full, read-only or away): the first is damage, ends the
run, and is nobody else's matter; the second is raised as OSError, and may be waited for.
"""

import contextlib
import errno
import functools
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from pydantic import TypeAdapter

from hp_tool.domain.fields import building
from hp_tool.errors import LauncherError

T = TypeVar("T")
MAX_FILE_BYTES = 4 * 2**20
"""Limit of a file that is read whole: a result has a few thousand steps."""
_NO_PLAIN_FILE = (errno.ELOOP, errno.ENXIO)
"""Opening a link, or a socket."""
_BY_THE_JOB = (
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENOENT,
    errno.EACCES,
    errno.EPERM,
    errno.ENOTEMPTY,
    *_NO_PLAIN_FILE,
)
"""Errors that a job can cause in its folder; on a host whose runs folder is sound nobody else
does.
"""


_HOST_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")


class DamagedError(LauncherError):
    """The job left something else where one of its files was."""


@functools.cache
def typed(kind: type[T]) -> TypeAdapter[T]:
    """Return what reads and writes a type as JSON, built at its first use: most commands need none
    of them.
    """
    with building(described=False):
        return TypeAdapter(kind)


@contextlib.contextmanager
def _damage(folder: Path, *, access: int = os.X_OK) -> Iterator[None]:
    """Raise DamagedError for an OSError that the job in `folder` caused; others, and those of a
    runs folder that does not give `access`, pass.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _BY_THE_JOB or not os.access(folder.parent, access):
            raise
        raise DamagedError(
            f"the job damaged its folder {folder.name}: {error.strerror}: {error.filename}"
        ) from None


def is_host_name(name: str) -> bool:
    """Return whether `name` may be a node's: letters, digits, `.`, `_` and `-`, at most 253."""
    return _HOST_NAME.fullmatch(name) is not None


def opened(path: Path) -> BinaryIO:
    """Open a plain file for reading, without waiting for anybody. Raises ValueError for anything
    else, and OSError.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _NO_PLAIN_FILE:
            raise ValueError("it is no plain file") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError("it is no plain file")
    return os.fdopen(descriptor, "rb")


def read_file(path: Path) -> bytes:
    """Return the bytes of a file that a job may have written, and may have written anything to: a
    link, a pipe that nobody fills, more than there is memory for.

    Raises ValueError for what is no plain file of at most MAX_FILE_BYTES, and OSError for one that
    cannot be read.
    """
    with opened(path) as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"it is larger than {MAX_FILE_BYTES // 2**20} MiB")
    return content


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in `path`; None if it is missing, incomplete or no plain file. Raises
    OSError for the host's.
    """
    try:
        with _damage(path.parent):
            value = json.loads(read_file(path))
    except (ValueError, RecursionError, DamagedError):
        return None
    return value if isinstance(value, dict) else None


def read_as(adapter: TypeAdapter[T], path: Path) -> T | None:
    """Return what the JSON in `path` says, by its type; None as of `read_json`, or if it says
    something else.
    """
    try:
        with _damage(path.parent):
            return adapter.validate_json(read_file(path), strict=True)
    except (ValueError, DamagedError):  # pydantic's errors are ValueErrors
        return None


def log_tail(folder: Path, *, name: str, size_bytes: int = 4096) -> str:
    """Return the end of a plain file in the job's folder; empty if there is none."""
    try:
        with opened(folder / name) as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - size_bytes))
            return log.read(size_bytes).decode(errors="replace")
    except (OSError, ValueError):
        return ""


def is_there(path: Path) -> bool:
    """Return whether anything has this name, a dangling link too. Raises OSError for the host's."""
    try:
        with _damage(path.parent):
            path.lstat()
    except DamagedError:
        return False
    return True


def wrong(folder: Path, *, needed: tuple[str, ...], allowed: tuple[str, ...] = ()) -> str | None:
    """Return what the job did to its files `needed` and `allowed`, which may be missing; None if
    they are plain files.
    """
    for name in (*needed, *allowed):
        try:
            mode = (folder / name).lstat().st_mode
        except OSError:
            if name in needed:
                return f"{name} is gone"
        else:
            if not stat.S_ISREG(mode):
                return f"{name} is no plain file"
    return None


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[int]:
    """A descriptor of the folder itself, never of what a link in its place names."""
    with _damage(folder, access=os.W_OK | os.X_OK):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            yield descriptor
        finally:
            os.close(descriptor)


def touch(folder: Path, name: str) -> None:
    """Create the empty file `name` in `folder`, in place of a link if there is one. Raises
    DamagedError, and OSError.
    """
    with _inside(folder) as within:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISLNK(os.stat(name, dir_fd=within, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=within)
        with contextlib.suppress(FileExistsError):
            os.close(
                os.open(
                    name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=within
                )
            )


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Write `value` as `write_text` does."""
    write_text(path, json.dumps(value))


def write_text(path: Path, text: str) -> None:
    """Write `text` atomically: a reader sees all of it or nothing. Raises DamagedError, and OSError
    for the host's.
    """
    temporary = f"~{path.name}.{secrets.token_hex(4)}"
    with _inside(path.parent) as within:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with os.fdopen(os.open(temporary, flags, 0o644, dir_fd=within), "w") as file:
            try:
                file.write(text)
                file.flush()
                os.rename(temporary, path.name, src_dir_fd=within, dst_dir_fd=within)
            except OSError:
                os.unlink(temporary, dir_fd=within)
                raise


@contextlib.contextmanager
def opened_lock(folder: Path, name: str) -> Iterator[int]:
    """A descriptor of a plain file in `folder` to lock, made if missing. Raises DamagedError, and
    OSError for the host's.
    """
    with _inside(folder) as within:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        lock = os.open(name, flags, 0o644, dir_fd=within)
        try:
            if not stat.S_ISREG(os.fstat(lock).st_mode):
                raise DamagedError(
                    f"the job damaged its folder {folder.name}: {name} is no plain file"
                )
            yield lock
        finally:
            os.close(lock)
