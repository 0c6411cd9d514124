"""A query as strangers send it: parsed strictly, and kept from reaching the server's files or running its programs."""

from __future__ import annotations

from pathlib import PurePath
from typing import Annotated

from fastapi import Depends, Request
from starlette.concurrency import run_in_threadpool

from hp_tool import catalog, schema
from hp_tool.domain.query import Query
from hp_tool.domain.records import JsonObject, RegistrationKind
from hp_tool.errors import InputError, UnsupportedError
from hp_tool.registered import Find, names_registered, with_registered
from service.api.bodies import read_body
from service.api.dependencies import FindDep


def nothing(kind: RegistrationKind, name: str) -> JsonObject | None:
    """`Find` where nobody registers anything."""
    return None


def read_query(data: bytes, *, find: Find = nothing) -> Query:
    """The query in a body or batch line, registered names looked up.

    Raises:
        InputError: it is no query, or it names a file, which would be the server's and not the sender's.
        NotFoundError: no such model.
        UnsupportedError: it brings a command, which a worker would run.
    """
    return resolve(schema.parse_query(data), find=find)


def resolve(query: Query, *, find: Find) -> Query:
    """The query with registered names looked up, and refused where it reaches for what is the server's."""
    query = with_registered(query, find=find)
    refuse_local(query)
    return query


def refuse_local(query: Query) -> None:
    """What is fine on one's own command line and not from afar."""
    refuse_model_file(query.model)
    if query.training is not None and query.training.sequence_lengths and _is_path(query.training.sequence_lengths):
        raise InputError("sequence_lengths names a file; the service reads none", field="training.sequence_lengths")
    if query.trainer is not None:
        raise UnsupportedError(
            "a worker runs no commands that come with a query; run `hp-tool tune` yourself", field="trainer.command"
        )


def refuse_model_file(model: object) -> None:
    """A name is looked up in the catalogue alone: a path would be the server's. Raises NotFoundError."""
    if isinstance(model, str):
        catalog.model(model, allow_files=False)


async def _body(request: Request, find: FindDep) -> Query:
    query = await read_body(request, schema.parse_query)
    if names_registered(query):
        request.state.by_owner = True  # and so no answer for anyone else
        return await run_in_threadpool(resolve, query, find=find)
    refuse_local(query)
    return query


QueryBody = Annotated[Query, Depends(_body)]
"""The parsed body. Not left to FastAPI, whose parsing coerces and knows no nearest key."""


def _is_path(name: str) -> bool:
    """Whether it looks like a file rather than a name."""
    return bool(PurePath(name).suffix) or len(PurePath(name).parts) > 1
