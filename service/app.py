"""The web application: routes and middleware around one store."""

import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.concurrency import run_in_threadpool
from starlette.routing import Route

from hp_tool import __version__
from hp_tool.domain.access import AccessStore
from hp_tool.loop.learning import MadeCalibration, StoredCalibrations, refit
from hp_tool.loop.learning.make import import_fit_modules, outdated_notice
from hp_tool.store import open_store
from service import logs
from service.agents.mount import AgentsRoute
from service.api import (
    catalog,
    estimates,
    explanations,
    health,
    keys,
    measurements,
    openapi,
    problems,
    searches,
    watches,
    workers,
)
from service.api.watch import Watch
from service.dashboard import ask, pages
from service.http.answer_cache import AnswerCache, CachedAnswers, ETags
from service.http.compression import Compression
from service.http.error_pages import ErrorPages
from service.http.metrics import Metrics
from service.http.protocol import protocol_class
from service.http.request_limits import RequestLimits
from service.http.request_log import RequestLog
from service.http.routes import AGENTS_PATH
from service.http.security import Gate
from service.http.turns import Turns
from service.keys import Keyring
from service.settings import Settings

log = logging.getLogger(__name__)
DESCRIPTION = """Predict memory and step time of transformers under every kind of parallelism, search the best configuration
with a few real profiling runs, and learn from what was measured. Errors are problem+json with a stable `code` and the `field`
at fault."""  # noqa: E501


def create_app(settings: Settings, *, store: AccessStore | None = None) -> FastAPI:
    """Return the application for `store`.

    Without `store`, the application opens the database in the settings, and closes it at shutdown.

    Raises:
        StoreError: The database does not respond, or its schema belongs to another version.
    """
    opened = store or open_store(settings.database_url)
    agents = AgentsRoute()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with logs.log_errors("look for outdated calibrations", log):
            if notice := await run_in_threadpool(outdated_notice, opened):
                log.warning(notice)
        threading.Thread(target=import_fit_modules, name="load the modules of fits").start()
        async with agents.open():
            yield
        if store is None:
            opened.close()

    app = FastAPI(
        title="hp_tool",
        version=__version__,
        description=DESCRIPTION,
        lifespan=lifespan,
        # FastAPI's documentation pages load scripts from other hosts, which the content security
        # policy forbids.
        docs_url=None,
        redoc_url=None,
    )
    app.state.settings = settings
    app.state.store = opened
    app.state.keyring = keyring = Keyring(
        find=lambda key_id: opened.get_key(key_id=key_id), api_key=settings.api_key
    )
    app.state.calibrations = StoredCalibrations(store=opened, refit=partial(_refit, opened))
    problems.install(app)
    modules = (
        estimates,
        explanations,
        searches,
        workers,
        watches,
        measurements,
        catalog,
        keys,
        health,
        *pages.MODULES,
    )
    others = (estimates.formats, measurements.calibrations, searches.plans, watches.losses)
    for router in (*(module.router for module in modules), *others):
        # include_router would take a second of CPU time.
        app.router.routes.extend(router.routes)
    app.router.routes.append(Route(AGENTS_PATH, agents, methods=["POST"]))
    pages.mount_assets(app)
    openapi.install(app)
    app.state.watch = Watch(heads=opened.heads, poll_s=settings.poll_s)
    app.state.metrics = metrics = Metrics(store=opened)
    app.state.answers = AnswerCache()
    # More threads would compete for the interpreter and its caches and delay all requests.
    # Estimates have their own turns, so that a long ranking does not delay them.
    app.state.ranking_turns, app.state.estimate_turns = (
        Turns(at_once=1, at_once_per_key=1, max_wait_s=settings.max_queue_s) for _ in range(2)
    )
    app.state.upload_turns = Turns(
        at_once=2, at_once_per_key=1, max_wait_s=6 * settings.max_queue_s
    )
    app.add_middleware(RequestLimits, settings=settings)
    app.add_middleware(CachedAnswers, cache=app.state.answers, metrics=metrics)
    app.add_middleware(ETags)
    app.add_middleware(Gate, settings=settings, keyring=keyring)
    app.add_middleware(ErrorPages)
    app.add_middleware(Compression)
    # The middleware added last is the outermost.
    app.add_middleware(RequestLog, metrics=metrics, store=opened)
    return app


def _refit(store: AccessStore) -> tuple[MadeCalibration, ...]:
    """Return the result of `learning.refit`, or nothing if it fails.

    After a failure, answers report the fit as pending.
    """
    with logs.log_errors("fit due calibrations", log):
        return refit(store=store)
    return ()


def serve(*, settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT. Open event streams have a few seconds to end."""
    logs.configure_logging(form=settings.log_form, level=settings.log_level)
    app = create_app(settings)
    threading.Thread(
        target=_render_front_page, args=(app,), name="render the front page", daemon=True
    ).start()
    uvicorn.run(app, **server_options(settings))


def _render_front_page(app: FastAPI) -> None:
    with logs.log_errors("render the front page", log):
        ask.front_page(store=app.state.store, calibrations=app.state.calibrations.of(""))


def server_options(settings: Settings) -> dict[str, Any]:
    """Return the uvicorn options for the application."""
    return {
        "log_config": None,
        "host": settings.host,
        "port": settings.port,
        "access_log": False,
        "server_header": False,
        "timeout_graceful_shutdown": 5,
        "limit_concurrency": int(settings.max_connections),
        "http": protocol_class(settings),
        "h11_max_incomplete_event_size": settings.max_header_kib * 1024,
        # Each uvicorn worker would be a process with its own connection pool. Requests are short,
        # so one process with threads suffices.
        "workers": 1,
    }
