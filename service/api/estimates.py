"""Routes that answer at once: estimates, recommendations, sizings, batches, exports, imports."""

import functools
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import Depends, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, StrictBool
from starlette.concurrency import run_in_threadpool

from hp_tool.domain import query as domain
from hp_tool.domain.result import Front
from hp_tool.domain.sizing import SizingAnswer, SizingQuery
from hp_tool.formats.exchange import (
    Assessment,
    Exported,
    assess,
    export_configuration,
    export_for_tool,
    read_configuration,
)
from hp_tool.questions import schema
from hp_tool.questions.answers import (
    EstimateAnswer,
    RecommendAnswer,
    Task,
    answer_estimate,
    answer_lines,
    answer_recommend,
)
from hp_tool.questions.budgets import answer_sizing, parse_sizing
from hp_tool.questions.registered import has_registered_names, insert_registered, registered_model
from service.api import openapi
from service.api.bodies import (
    QueryBody,
    json_response,
    read_body,
    read_query,
    resolve_names,
    stream_answers,
)
from service.api.dependencies import (
    CalibrationsDep,
    EstimateTurn,
    FindDep,
    RankingTurn,
    RecordedDep,
    versioned_router,
)
from service.api.format_names import Readable, Writable

router = versioned_router(tag="estimates")
formats = versioned_router(tag="formats")
"""Routes to export and import other tools' configurations."""
EXAMPLE: dict[str, Any] = {
    "kind": "training",
    "model": "gpt-22b",
    "cluster": {"gpu": "a100-sxm-80gb", "num_gpus": 8},
    "training": {"sequence_length": 2048, "global_batch_size": 4},
    "parallel": {"tensor_parallel_size": 8, "micro_batch_size": 4, "recompute": "selective"},
}
SPACE_EXAMPLE = {name: part for name, part in EXAMPLE.items() if name != "parallel"}
MAX_LOG_CHARACTERS = 1_000_000
EXPORT_EXAMPLE: dict[str, Any] = {"result": EXAMPLE, "format": "megatron-lm"}
IMPORT_EXAMPLE: dict[str, Any] = {
    "command": "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 24 --hidden-size 2048 "
    "--num-attention-heads 16 "
    "--seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 2 --global-batch-size 64 "
    "--bf16 "
    "--tensor-model-parallel-size 2 --vocab-size 51200",
    "num_gpus": 8,
    "overrides": {"cluster.gpu": "a100-sxm-80gb"},
}
SIZING_EXAMPLE = {"cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 64}, "days": 7.0}


@router.post(
    "/estimates",
    response_model=EstimateAnswer,
    openapi_extra=openapi.body(domain.Query, example=EXAMPLE),
)
def estimates(query: QueryBody, calibrations: RecordedDep, _turn: EstimateTurn) -> Response:
    """Estimate memory and step time of one configuration.

    A configuration that does not fit returns `feasible: false` with reasons.
    """
    return json_response(answer_estimate(query, calibrations=calibrations))


@router.post(
    "/recommendations",
    response_model=RecommendAnswer,
    openapi_extra=openapi.body(domain.Query, example=SPACE_EXAMPLE),
)
def recommendations(
    query: QueryBody,
    calibrations: RecordedDep,
    _turn: RankingTurn,
    top: Annotated[int, Query(ge=1, le=1000, description="Maximum number of rows")] = 10,
    pareto: Annotated[
        Front | None,
        Query(
            description="Also return the Pareto front of step time and memory (or gpus); for "
            "serving, of throughput per user and per GPU"
        ),
    ] = None,
    sensitivity: Annotated[
        bool,
        Query(
            description="Also return how the step time depends on the number of GPUs, on each "
            "axis, and on faster or larger hardware"
        ),
    ] = False,
) -> Response:
    """Rank all legal configurations by the cost model, corrected by measurements on the cluster."""
    answer = answer_recommend(
        query, top=top, calibrations=calibrations, pareto=pareto, sensitivity=sensitivity
    )
    return json_response(answer)


async def _sizing(request: Request, find: FindDep) -> SizingQuery:
    query = await read_body(request, parse_sizing)
    if has_registered_names(query):
        query = await run_in_threadpool(insert_registered, query, find=find)
    return query


@router.post(
    "/sizings",
    response_model=SizingAnswer,
    openapi_extra=openapi.body(SizingQuery, example=SIZING_EXAMPLE),
)
def sizings(
    query: Annotated[SizingQuery, Depends(_sizing)],
    calibrations: CalibrationsDep,
    _turn: RankingTurn,
) -> Any:
    """Size a model for a budget.

    Returns its shape, tokens, starting hyperparameters and days including failures; or the fewest
    devices for a deadline.
    """
    return json_response(answer_sizing(query, calibrations=calibrations))


@router.post(
    "/batch",
    response_class=StreamingResponse,
    responses=openapi.answer_lines("One answer per line, in the order of the queries"),
    openapi_extra=openapi.lines(example=EXAMPLE),
)
async def batch(
    request: Request,
    calibrations: CalibrationsDep,
    find: FindDep,
    task: Annotated[Task, Query(description="Task for every line")] = "estimate",
    top: Annotated[int, Query(ge=1, le=1000, description="recommend: rows per answer")] = 10,
) -> StreamingResponse:
    """Answer every line. An invalid line returns `status: error` and does not affect others."""
    read = functools.partial(read_query, find=find)
    return stream_answers(
        request,
        functools.partial(answer_lines, task=task, top=top, read=read, calibrations=calibrations),
    )


class ExportRequest(BaseModel):
    """A result or query, and the format to export it to."""

    model_config = ConfigDict(
        extra="forbid", use_attribute_docstrings=True, json_schema_extra={"example": EXPORT_EXAMPLE}
    )

    result: dict[str, Any]
    """Result of an estimate, a recommendation or a search; or a query."""
    format: Writable
    rank: Annotated[int, Field(ge=1, le=1000)] = 1
    """Rank of the recommendation to export."""
    rerank: StrictBool = False
    """Rank again among configurations that the format's tool can run, instead of rejecting others.
    The answer reports the cost.
    """


class ImportRequest(BaseModel):
    """An existing configuration or run of another tool."""

    model_config = ConfigDict(
        extra="forbid", use_attribute_docstrings=True, json_schema_extra={"example": IMPORT_EXAMPLE}
    )

    command: Annotated[str, Field(max_length=200_000)]
    """Launch script, configuration file, or log that begins with Megatron's arguments. It is never
    executed.
    """
    format: Readable = None
    num_gpus: Annotated[int | None, Field(ge=1, le=1 << 20)] = None
    """Number of devices, if the configuration does not contain it."""
    overrides: Annotated[dict[str, Any], Field(max_length=100)] = {}
    """Values that the configuration lacks, by dotted path: cluster.gpu, model, model.vocab_size."""
    variables: Annotated[
        dict[str, Annotated[str, Field(max_length=10_000)]], Field(max_length=200)
    ] = {}
    """Environment variables of a script; 1, 2, ... are its arguments."""
    files: Annotated[
        dict[str, Annotated[str, Field(max_length=200_000)]], Field(max_length=16)
    ] = {}
    """Contents of files that it sources or names, by name."""
    ignore: Annotated[list[str], Field(max_length=200)] = []
    """Flags and keys to ignore because they affect neither time nor memory."""
    log: Annotated[str | None, Field(max_length=MAX_LOG_CHARACTERS)] = None
    """Log of the run: step times, memory, and values that the script omits."""


@formats.post("/exports")
def exports(request: ExportRequest, find: FindDep) -> Exported:
    """Write a configuration in the format of the tool that will run it."""

    def read(query: Mapping[str, Any]) -> domain.Query:
        return resolve_names(schema.parse_query(query), find=find)

    if request.rerank:
        return export_for_tool(result=request.result, format=request.format, read=read)
    return export_configuration(
        result=request.result, format=request.format, rank=request.rank, read=read
    )


@formats.post("/imports", response_model=Assessment)
def imports(request: ImportRequest, find: FindDep, _turn: RankingTurn) -> Any:
    """Convert a configuration in use to a query and assess it.

    Returns the query, how each flag was read, the prediction compared with the log, and the best
    configuration for the same work as changed flags. Incomplete or invalid input is rejected with a
    list of all problems.
    """
    lines = [] if request.log is None else request.log.splitlines()
    registered_models = {
        key: registered_model(name, find=find)
        for key, name in request.overrides.items()
        if key == "model"
    }
    reading = read_configuration(
        request.command,
        format=request.format,
        num_gpus=request.num_gpus,
        overrides=request.overrides | registered_models,
        variables=request.variables,
        files=request.files,
        ignore=request.ignore,
        log=lines,
    )
    query = resolve_names(schema.parse_query(reading.query), find=find)
    return json_response(assess(query, reading=reading, log=None if request.log is None else lines))
