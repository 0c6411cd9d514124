"""POST /v1/explanations: compare recorded steps with a prediction. Uploads are never stored."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from anyio import to_thread
from fastapi import Request, Response
from starlette.datastructures import FormData, UploadFile
from starlette.requests import ClientDisconnect

from hp_tool.domain.query import Query
from hp_tool.errors import HpToolError, InputError
from hp_tool.questions.registered import Find
from hp_tool.traces.explain.explanation import Explanation
from hp_tool.traces.explain.logged import LoggedExplanation
from hp_tool.traces.files import MAX_FILES
from service.analysis.job import Job, Limits
from service.analysis.process import analyse
from service.api import openapi
from service.api.bodies import read_query
from service.api.dependencies import FindDep, SettingsDep, versioned_router, wait_for_turn
from service.settings import Settings

T = TypeVar("T")
router = versioned_router("/explanations", tag="explanations")
FORM = "multipart/form-data"
EXAMPLE: dict[str, Any] = {
    "trace": [
        '[{"ph": "X", "cat": "kernel", "name": "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "tid": '
        '7, "ts": 0, "dur": 100}]'
    ]
}


@router.post(
    "",
    response_model=Explanation | LoggedExplanation,
    openapi_extra=openapi.upload(example=EXAMPLE, max_files=MAX_FILES),
)
async def explanations(request: Request, settings: SettingsDep, find: FindDep) -> Response:
    """Compare the recorded step of each rank with its prediction.

    Reports the parts that differ, their causes, and the time that changes would save. Accepts
    traces, or one log with Megatron's timers. Equivalent to `hp-tool explain --json`. The upload is
    deleted.
    """

    def answer(form: FormData) -> Response:
        check_fields(form, texts=("query",))
        query = read_upload_query(form, find=find)
        return Response(
            explain_uploads(form, query=query, settings=settings), media_type="application/json"
        )

    return await with_form(request, answer, settings=settings, texts=1)


async def with_form(
    request: Request, answer: Callable[[FormData], T], *, settings: Settings, texts: int
) -> T:
    """Call `answer` with the posted form, in a thread, when it is the turn of the request's key.

    Args:
        request: The request.
        answer: Computes the result for the form.
        settings: Limits of the service.
        texts: Maximum number of text fields.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != FORM:
        raise InputError(
            f"Send {FORM}: each trace as a file `trace`, the query as a text `query`.",
            field="body",
            code="syntax",
        )

    try:
        async with (
            request.form(
                max_files=MAX_FILES, max_fields=texts, max_part_size=settings.max_body_bytes
            ) as form,
            wait_for_turn(request, request.app.state.upload_turns),
        ):
            return await to_thread.run_sync(partial(answer, form))
    except ClientDisconnect:
        raise HpToolError("The client disconnected.", code="client_gone") from None


def check_fields(form: FormData, *, texts: tuple[str, ...]) -> None:
    """Raise InputError for unknown fields, files in text fields, and text in file fields."""
    for name, value in form.multi_items():
        if name not in ("trace", *texts):
            allowed = ", ".join(("trace", *texts))
            raise InputError(
                f"Unknown field {name[:100]!r}; known: {allowed}.",
                field=name[:100],
                code="unknown_key",
            )
        if isinstance(value, UploadFile) != (name == "trace"):
            raise InputError(f"Send `trace` as a file, and `{texts[0]}` as a text.", field=name)


def read_upload_query(form: FormData, *, find: Find) -> Query | None:
    """Return the form's query with registered names resolved; None without a query."""
    text = form.get("query")
    return read_query(text.encode(), find=find) if isinstance(text, str) and text.strip() else None


def explain_uploads(form: FormData, *, query: Query | None, settings: Settings) -> bytes:
    """Explain the files in the form as JSON, and delete them.

    A child process reads the files, so that running out of memory or time does not affect the
    server.
    """
    uploads = [
        upload
        for upload in form.getlist("trace")
        if isinstance(upload, UploadFile) and (upload.filename or upload.size)
    ]
    with TemporaryDirectory(prefix="hp-explain-") as folder:
        # SQLite needs paths. The sender's file names are used only in errors and to determine
        # ranks.
        paths = [Path(folder) / str(place) for place in range(len(uploads))]
        for path, upload in zip(paths, uploads, strict=True):
            with path.open("wb") as copy:
                shutil.copyfileobj(upload.file, copy, 2**20)
            upload.file.close()  # Frees the first copy of a large file.
        names = [PurePath(upload.filename or "trace").name[:100] for upload in uploads]
        job = Job(paths=paths, names=names, query=query, limits=_limits(settings))
        return analyse(job, folder=Path(folder))


def _limits(settings: Settings) -> Limits:
    return Limits(
        memory_mib=settings.max_upload_memory_mib,
        cpu_s=settings.max_upload_cpu_s,
        max_combinations=settings.max_combinations,
        max_values=settings.max_values,
        max_yaml_bytes=settings.max_yaml_bytes,
    )
