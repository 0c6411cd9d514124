"""Read and write files in a job folder. The job may have replaced any of them.

Damage by the job (a link, pipe or folder in place of a file, or a missing file) is distinguished
from errors of the host. Damage fails only the job's own run. Host errors are raised as OSError and
may be temporary.
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

from hp_tool.domain.fields import build_validators
from hp_tool.errors import LauncherError

T = TypeVar("T")
MAX_FILE_BYTES = 4 * 2**20
"""Maximum size of a file that is read as a whole. A result lists a few thousand steps."""
_NOT_REGULAR_FILE = (errno.ELOOP, errno.ENXIO)
"""Errors from opening a symbolic link (ELOOP) or a socket (ENXIO)."""
_CAUSED_BY_JOB = (
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENOENT,
    errno.EACCES,
    errno.EPERM,
    errno.ENOTEMPTY,
    *_NOT_REGULAR_FILE,
)
"""Error numbers that a job can cause in its folder. While the runs folder is intact, only the job
can cause them.
"""


_HOST_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")


class DamagedError(LauncherError):
    """The job damaged its folder or replaced one of its files by something else."""


@functools.cache
def json_adapter(kind: type[T]) -> TypeAdapter[T]:
    """Return the JSON adapter of a type.

    It is built on first use, because most commands do not need it.
    """
    with build_validators(described=False):
        return TypeAdapter(kind)


@contextlib.contextmanager
def _detect_damage(folder: Path, *, access: int = os.X_OK) -> Iterator[None]:
    """Convert OSErrors that the job in `folder` caused to DamagedError.

    Other errors are raised unchanged. This includes all errors if the runs folder is not
    accessible.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _CAUSED_BY_JOB or not os.access(folder.parent, access):
            raise
        raise DamagedError(
            f"Cannot read {error.filename} in job folder {folder.name}: {error.strerror}. The "
            "job may have modified or deleted it."
        ) from None


def is_host_name(name: str) -> bool:
    """Return True if `name` is a valid host name.

    It may contain letters, digits, `.`, `_` and `-`, and has at most 253 characters.
    """
    return _HOST_NAME.fullmatch(name) is not None


def open_regular_file(path: Path) -> BinaryIO:
    """Open a regular file for reading without blocking.

    Raise ValueError if it is not a regular file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _NOT_REGULAR_FILE:
            raise ValueError("not a regular file") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError("not a regular file")
    return os.fdopen(descriptor, "rb")


def read_file(path: Path) -> bytes:
    """Return the content of a file that the job may have replaced by a link, a pipe or a huge file.

    Raises:
        ValueError: The path is not a regular file of at most MAX_FILE_BYTES.
        OSError: The file cannot be read.
    """
    with open_regular_file(path) as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"larger than {MAX_FILE_BYTES // 2**20} MiB")
    return content


def read_json(path: Path) -> dict[str, Any] | None:
    """Return a JSON object; None if the file is missing, incomplete or not a regular file.

    Raises:
        OSError: The host's file system failed.
    """
    try:
        with _detect_damage(path.parent):
            value = json.loads(read_file(path))
    except (ValueError, RecursionError, DamagedError):
        return None
    return value if isinstance(value, dict) else None


def read_json_as(adapter: TypeAdapter[T], path: Path) -> T | None:
    """Read a JSON file as the adapter's type.

    Return None if `read_json` returns None or the content does not match the type.
    """
    try:
        with _detect_damage(path.parent):
            return adapter.validate_json(read_file(path), strict=True)
    except (ValueError, DamagedError):  # pydantic's errors are ValueErrors
        return None


def log_tail(folder: Path, *, name: str, size_bytes: int = 4096) -> str:
    """Return the end of a regular file in the job folder. Empty if the file is missing."""
    try:
        with open_regular_file(folder / name) as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - size_bytes))
            return log.read(size_bytes).decode(errors="replace")
    except (OSError, ValueError):
        return ""


def path_exists(path: Path) -> bool:
    """Return True if the path exists, even as a dangling link. Raise OSError if the host fails."""
    try:
        with _detect_damage(path.parent):
            path.lstat()
    except DamagedError:
        return False
    return True


def find_damage(
    folder: Path, *, needed: tuple[str, ...], allowed: tuple[str, ...] = ()
) -> str | None:
    """Describe what is wrong with the job's files; None if they are intact.

    Files in `allowed` may be missing, but those in `needed` must exist.
    """
    for name in (*needed, *allowed):
        try:
            mode = (folder / name).lstat().st_mode
        except OSError:
            if name in needed:
                return f"{name} is missing"
        else:
            if not stat.S_ISREG(mode):
                return f"{name} is not a regular file"
    return None


@contextlib.contextmanager
def _open_folder(folder: Path) -> Iterator[int]:
    """Open a descriptor of the folder itself; a symbolic link is not followed."""
    with _detect_damage(folder, access=os.W_OK | os.X_OK):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            yield descriptor
        finally:
            os.close(descriptor)


def touch(folder: Path, name: str) -> None:
    """Create the empty file `name` in `folder`. A link with this name is replaced.

    Raises:
        DamagedError: The job damaged the folder.
        OSError: The host's file system failed.
    """
    with _open_folder(folder) as within:
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
    """Write `value` as JSON, atomically. See `write_text` for errors."""
    write_text(path, json.dumps(value))


def write_text(path: Path, text: str) -> None:
    """Write `text` atomically.

    Raises:
        DamagedError: The job damaged the folder.
        OSError: The host's file system failed.
    """
    temporary = f"~{path.name}.{secrets.token_hex(4)}"
    with _open_folder(path.parent) as within:
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
def open_lock_file(folder: Path, name: str) -> Iterator[int]:
    """Open a regular file in `folder` for locking; create the file if it is missing.

    Raises:
        DamagedError: The job damaged the folder.
        OSError: The host's file system failed.
    """
    with _open_folder(folder) as within:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        lock = os.open(name, flags, 0o644, dir_fd=within)
        try:
            if not stat.S_ISREG(os.fstat(lock).st_mode):
                raise DamagedError(
                    f"Cannot read {name} in job folder {folder.name}: not a regular file. The "
                    "job may have replaced it."
                )
            yield lock
        finally:
            os.close(lock)
