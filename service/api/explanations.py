"""POST /v1/explanations: recorded steps split into parts, beside their prediction. The traces are gone before the answer is."""

import shutil
from functools import partial
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory
from typing import Any

import anyio
from anyio import to_thread
from fastapi import Request, Response
from starlette.datastructures import FormData, UploadFile
from starlette.requests import ClientDisconnect

from hp_tool import bounds
from hp_tool.errors import HpToolError, InputError
from hp_tool.exchange.explanation import Explanation, explain
from hp_tool.queries.registered import Find
from hp_tool.traces import read_traces
from hp_tool.traces.files import MAX_FILES
from service.api import openapi
from service.api.bodies import json_response, read_query
from service.api.dependencies import FindDep, SettingsDep, versioned

router = versioned("/explanations", tag="explanations")
FORM = "multipart/form-data"
EXAMPLE: dict[str, Any] = {
    "trace": [
        '[{"ph": "X", "cat": "kernel", "name": "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "tid": 7, "ts": 0, "dur": 100}]'
    ]
}
_TURN = anyio.CapacityLimiter(1)
"""One trace is read at a time: millions of events take some hundred megabytes."""


@router.post("", response_model=Explanation, openapi_extra=openapi.upload(example=EXAMPLE, most=MAX_FILES))
async def explanations(request: Request, settings: SettingsDep, find: FindDep) -> Response:
    """Split the recorded step of each rank into the parts of a prediction, and say which differ from it, why, and what would
    win how much: what `hp-tool explain --json` says. Nothing of the upload is kept.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != FORM:
        raise InputError(f"send {FORM}: each trace as a file `trace`, the query as a text `query`", field="body", code="syntax")
    try:
        async with request.form(max_files=MAX_FILES, max_fields=1, max_part_size=settings.max_body_bytes) as form:
            return await to_thread.run_sync(partial(_answer, form, find=find), limiter=_TURN)
    except ClientDisconnect:
        raise HpToolError("the client hung up", code="client_gone") from None


def _answer(form: FormData, *, find: Find) -> Response:
    bounds.check()  # the client may have hung up while it waited for its turn
    for name, value in form.multi_items():
        if name not in ("trace", "query"):
            raise InputError(f"unknown field {name[:100]!r}; known: trace, query", field=name[:100], code="unknown_key")
        if isinstance(value, UploadFile) != (name == "trace"):
            raise InputError("send `trace` as a file, and `query` as a text", field=name)
    text = form.get("query")
    query = read_query(text.encode(), find=find) if isinstance(text, str) else None
    uploads = [each for each in form.getlist("trace") if isinstance(each, UploadFile)]
    with TemporaryDirectory(prefix="hp-explain-") as folder:
        # Files with a path, which SQLite needs; the sender's names only stand in errors, and may tell ranks.
        paths = [Path(folder) / str(place) for place in range(len(uploads))]
        for path, upload in zip(paths, uploads, strict=True):
            with path.open("wb") as copy:
                shutil.copyfileobj(upload.file, copy, 2**20)
            upload.file.close()  # so that no two copies of a large one are left
        names = [PurePath(upload.filename or "trace").name[:100] for upload in uploads]
        ranks = read_traces(paths, names=names)
    return json_response(explain(ranks, query=query))
