"""Render contexts as HTML. Templates use only the context's fields and these filters."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from fastapi.responses import HTMLResponse
from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from service.dashboard import formats, plotly

STATIC = Path(__file__).parent / "static"
SECTIONS = (
    ("Searches", "/"),
    ("New search", "/searches/new"),
    ("Explorer", "/explorer"),
    ("Calibration", "/calibration"),
    ("Models", "/models"),
    ("GPUs", "/gpus"),
    ("Clusters", "/clusters"),
    ("Keys", "/keys"),
)
"""The navigation bar: name and address."""


def _assets_version() -> str:
    """Digest of the static files. It is part of their URLs, so they can be cached forever."""
    content = b"".join(path.read_bytes() for path in sorted(STATIC.iterdir()))
    return hashlib.sha256(content).hexdigest()[:12]


ASSETS = _assets_version()

_environment = Environment(
    loader=PackageLoader("service.dashboard"),
    autoescape=select_autoescape(default=True, default_for_string=True),
    # A misspelt field fails a test instead of leaving an empty cell.
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_environment.globals |= {"assets": ASSETS, "sections": SECTIONS, "plotly_href": plotly.HREF}
_environment.globals["plotly_styles"] = " ".join(plotly.style_ids())
for _name in (
    *("seconds", "count", "gib", "percent", "share", "moment", "words", "measured", "arrows", "duration", "gpu_time"),
    *("billions", "per_second", "tflops", "tick"),
):
    _environment.filters[_name] = getattr(formats, _name)


def rendered(template: str, **variables: Any) -> str:
    """HTML of `template` with these variables."""
    return _environment.get_template(template).render(variables)


def render(template: str, *, page: Any, section: str | None = None, status: int = 200) -> HTMLResponse:
    """HTML response of `template` with the context `page`; `section` is marked in the navigation bar."""
    return HTMLResponse(rendered(template, page=page, section=section), status_code=status)
