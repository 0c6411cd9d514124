"""Queries as strangers send them: parsed strictly, and kept from running programs on the server. They cannot open its files
either: a name is a path only for the command line and the Python API (hp_tool.domain.query.OwnFile).
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request
from starlette.concurrency import run_in_threadpool

from hp_tool.domain.query import Query
from hp_tool.domain.records import JsonObject, RegistrationKind
from hp_tool.errors import UnsupportedError
from hp_tool.queries import schema
from hp_tool.queries.registered import Find, names_registered, with_registered
from service.api.bodies import read_body
from service.api.dependencies import FindDep


def nothing(kind: RegistrationKind, name: str) -> JsonObject | None:
    """A `Find` without registrations."""
    return None


def read_query(data: bytes, *, find: Find = nothing) -> Query:
    """The query in a body or batch line, registered names looked up.

    Raises:
        InputError: it is no query.
        UnsupportedError: it brings a command, which a worker would run.
    """
    return resolve(schema.parse_query(data), find=find)


def resolve(query: Query, *, find: Find) -> Query:
    """The query with registered names looked up. Raises UnsupportedError where it brings a command."""
    query = with_registered(query, find=find)
    refuse_trainer(query)
    return query


def refuse_trainer(query: Query) -> None:
    """Raise UnsupportedError where the query brings a command: only one's own command line may run those."""
    if query.trainer is not None:
        raise UnsupportedError(
            "a worker runs no commands that come with a query; run `hp-tool tune` yourself", field="trainer.command"
        )


async def _body(request: Request, find: FindDep) -> Query:
    query = await read_body(request, schema.parse_query)
    if names_registered(query):
        request.state.by_owner = True  # so the answer is cached for nobody
        return await run_in_threadpool(resolve, query, find=find)
    refuse_trainer(query)
    return query


QueryBody = Annotated[Query, Depends(_body)]
"""The query in the body."""
