"""Which names in a query may be files: those of someone who may read this machine's files anyway."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from hp_tool.domain.query import Query
from hp_tool.domain.sizing import SizingQuery

Q = TypeVar("Q", Query, SizingQuery)


class OwnFile(str):
    """A name that may be a path on this machine; a plain string is a name of the catalogue, and never opened.

    JSON and YAML hold none, so neither does what arrives over HTTP or stands in a database. Copies of a query keep it.
    """

    __slots__ = ()


def with_own_files(query: Q) -> Q:
    """The query as the command line and the Python API ask it: its model and its distribution of lengths may be files."""
    if isinstance(query.model, str):
        query = replace(query, model=OwnFile(query.model))
    if isinstance(query, Query) and query.training is not None and query.training.sequence_lengths is not None:
        lengths = OwnFile(query.training.sequence_lengths)
        query = replace(query, training=replace(query.training, sequence_lengths=lengths))
    return query
