"""Page /offline: the page that a browser stores for times when the service is unreachable."""

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, Response

from service.dashboard.page import rendered

router = APIRouter(include_in_schema=False)


@router.get("/offline", response_class=HTMLResponse)
def offline_html() -> HTMLResponse:
    page = {"title": "The service does not answer", "json_href": None}
    return HTMLResponse(rendered("offline.html", page=page, section=None))


@router.get("/offline.js", response_class=Response)
def offline_script() -> Response:
    """Return the service worker's script, at the top level because it serves the addresses below
    its own.
    """
    return Response(rendered("offline.js"), media_type="text/javascript")
