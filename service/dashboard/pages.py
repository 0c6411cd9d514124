"""All pages and their files. Every page has its JSON twin at the same URL + .json: the context that its template renders."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.staticfiles import StaticFiles
from starlette.responses import Response
from starlette.types import Scope

from service.dashboard import plotly, searches
from service.dashboard.access import routes as access
from service.dashboard.calibration import routes as calibration
from service.dashboard.catalogue import routes as catalogue
from service.dashboard.configuration import measured
from service.dashboard.configuration import routes as configuration
from service.dashboard.explorer import routes as explorer
from service.dashboard.new import routes as new_search
from service.dashboard.rendering import ASSETS, STATIC

# new_search first: `new` is no search's id.
ROOMS = (new_search, searches, access, calibration, catalogue, configuration, measured, explorer, plotly)
"""Modules with a router of pages."""


class Assets(StaticFiles):
    """Static files whose URL holds the digest of their content: a browser need never ask again."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers["Cache-Control"] = "public, max-age=31536000, immutable"
        return response


def install(app: FastAPI) -> None:
    """Add the pages and their static files."""
    for room in ROOMS:
        app.include_router(room.router)
    app.mount(f"/static/{ASSETS}", Assets(directory=STATIC), name="static")
