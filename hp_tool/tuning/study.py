"""A search's Optuna study in a file of its own, for Optuna's tools."""

from __future__ import annotations

from pathlib import Path

from hp_tool.errors import InputError, NotFoundError
from hp_tool.tuning.run import study_storage


def copy_study(*, search_id: str, database_url: str, path: Path) -> None:
    """Copy the study that the search keeps in the database at this URL into an SQLite file, which is made where there is none.

    Raises NotFoundError where the search has no study (it never ran), InputError where the file has one of its name.
    """
    import optuna

    if not path.parent.is_dir():
        raise InputError(f"{path.parent} is no folder", field="--optuna")
    source = study_storage(database_url)
    if search_id not in optuna.get_all_study_names(source):
        raise NotFoundError(f"search {search_id} has no Optuna study here: no run of it was planned", field="search_id")
    try:
        optuna.copy_study(
            from_study_name=search_id, from_storage=source, to_storage=study_storage(f"sqlite:///{path.resolve()}")
        )
    except optuna.exceptions.DuplicatedStudyError:
        raise InputError(f"{path} holds a study of this search already; name another file", field="--optuna") from None
