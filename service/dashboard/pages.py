"""Routes of all pages, and their static files."""

from fastapi import FastAPI
from fastapi.staticfiles import StaticFiles
from starlette.responses import Response
from starlette.types import Scope

from service.dashboard import (
    access,
    ask,
    calibration,
    catalogue,
    compare,
    configuration,
    explain,
    exports,
    find,
    guide,
    labels,
    measurements,
    new_search,
    run,
    search,
    searches,
    watches,
    workers,
)
from service.dashboard.page import ASSETS, STATIC

# new_search precedes search, whose path /searches/{search_id} also matches /searches/new.
MODULES = (
    *(new_search, searches, search, exports, labels, workers, access, calibration, measurements),
    *(catalogue, configuration, compare, explain, ask, run, watches, guide, find),
)
"""Modules that have a router with pages."""


class Assets(StaticFiles):
    """Static files whose URLs contain a content digest, so that browsers cache them forever."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers["Cache-Control"] = "public, max-age=31536000, immutable"
        return response


def mount_assets(app: FastAPI) -> None:
    """Add the pages' static files and the guide's pictures to the app."""
    app.mount(
        "/guide/pictures",
        StaticFiles(directory=guide.guide_folder() / "pictures", check_dir=False),
        name="pictures",
    )
    app.mount(f"/static/{ASSETS}", Assets(directory=STATIC), name="static")
