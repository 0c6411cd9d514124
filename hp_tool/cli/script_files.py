"""Find the files in a script's folder that the script names."""

import itertools
import re
from pathlib import Path, PurePosixPath

from hp_tool.catalog.documents import MAX_FILE_BYTES, read_text
from hp_tool.errors import InputError

_FILE_NAME = re.compile(r"[\w.*/-]*[\w*-]\.(sh|bash|env|sbatch|slurm|json|ya?ml|toml|conf|cfg)\b")
_VARIABLE = re.compile(r"\$(\{[^}\s]*\}|\w+)")
MAX_FILES = 50


def find_script_files(script: Path, text: str) -> dict[str, str]:
    """Return the contents of files that `text` names, directly or through other files, by path
    relative to the script's folder.

    Only files below that folder are read. A variable in a file name matches any text.
    """
    folder = script.parent.resolve()
    texts_by_name: dict[str, str] = {script.name: text}
    texts = [text]
    while texts:
        names = {
            match[0].lstrip("./*") for match in _FILE_NAME.finditer(_VARIABLE.sub("*", texts.pop()))
        }
        for name in sorted(names):
            if name.rpartition("/")[2].startswith("*.") and name.endswith("sh"):
                continue  # `*.sh` matches every script.
            for path in itertools.islice(
                _matching_files(folder, name), MAX_FILES - len(texts_by_name)
            ):
                key = path.relative_to(folder).as_posix()
                if key not in texts_by_name and (content := _read_file(path)) is not None:
                    texts_by_name[key] = content
                    texts.append(content)
    del texts_by_name[script.name]
    return texts_by_name


def add_base_names(texts: dict[str, str]) -> dict[str, str]:
    """Return the contents by path, and also by file name. If several files have the same name, the
    first one is used.
    """
    return {PurePosixPath(name).name: text for name, text in reversed(texts.items())} | texts


def _matching_files(folder: Path, name: str) -> list[Path]:
    paths = [
        path.resolve()
        for path in (folder.glob(name) if "*" in name else (folder / name,))
        if path.is_file()
    ]
    return [
        path
        for path in paths
        if path.is_relative_to(folder) and path.stat().st_size < MAX_FILE_BYTES
    ]


def _read_file(path: Path) -> str | None:
    try:
        return read_text(path)
    except InputError:
        return None
