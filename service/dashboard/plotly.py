"""Serve plotly.min.js from the installed Python package."""

import gzip
import re
from functools import cache
from importlib.metadata import version
from importlib.resources import files

from fastapi import APIRouter, Header, Response

HREF = f"/static/plotly-{version('plotly')}.min.js"
"""Contains the version, so browsers can cache it forever."""
ETAG = f'"plotly-{version("plotly")}"'
CACHED = {"Cache-Control": "public, max-age=31536000, immutable", "ETag": ETAG, "Vary": "Accept-Encoding"}

router = APIRouter(include_in_schema=False)


@cache
def source() -> str:
    """Text of the script."""
    return (files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")


@cache
def style_ids() -> tuple[str, ...]:
    """Ids of style elements that the script adds to a page unless elements with these ids exist.

    The content policy refuses inline styles, and only maps, which no page draws, need these.
    """
    return tuple(dict.fromkeys(re.findall(r'document\.getElementById\("([0-9a-f]{64})"\)', source())))


@cache
def _compressed() -> bytes:
    return gzip.compress(source().encode(), compresslevel=6, mtime=0)


@router.get(HREF)
def plotly(accept_encoding: str = Header(""), if_none_match: str = Header("")) -> Response:
    """The script, compressed if the browser accepts gzip."""
    if ETAG in if_none_match:
        return Response(status_code=304, headers=CACHED)
    if "gzip" in accept_encoding:
        headers = {**CACHED, "Content-Encoding": "gzip"}
        return Response(_compressed(), media_type="text/javascript", headers=headers)
    return Response(source(), media_type="text/javascript", headers=CACHED)
