"""Name, tags and note of a search, and its report as one file."""

import re

from fastapi import APIRouter
from fastapi.responses import RedirectResponse, Response

from hp_tool.domain.records import Label
from hp_tool.questions import schema
from service.api.dependencies import StoreDep
from service.dashboard.formats import subject
from service.dashboard.page import Form, done
from service.dashboard.report import report_html

router = APIRouter(tags=["dashboard"])


@router.post("/searches/{search_id}/label", include_in_schema=False)
def label(search_id: str, values: Form, store: StoreDep) -> RedirectResponse:
    tags = [tag.strip() for tag in values.get("tags", "").split(",") if tag.strip()]
    changes = {"name": values.get("name", ""), "tags": tags, "note": values.get("note", "")}
    store.label_search(search_id=search_id, label=schema.parse(Label, changes))
    return done(f"/searches/{search_id}", "changed")


@router.get("/searches/{search_id}/report", response_class=Response)
def report(search_id: str, store: StoreDep) -> Response:
    """Return a search with its charts as one HTML file, as written by `hp-tool report`."""
    record = store.get_search(search_id=search_id)
    named = re.sub(r"[^a-z0-9]+", "-", (record.label.name or subject(record.query)).lower()).strip(
        "-"
    )[:60]
    headers = {
        "Content-Disposition": "attachment; "
        f'filename="{"-".join(filter(None, (named, record.id[:8])))}.html"'
    }
    return Response(
        report_html(store=store, search_id=search_id), media_type="text/html", headers=headers
    )
