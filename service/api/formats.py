"""POST /v1/exports and /v1/imports: other tools' configurations, both ways."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from hp_tool.exchange import Assessment, assess, detect, export, read_query
from hp_tool.queries import schema
from service.api.bodies import json_response
from service.api.estimates import EXAMPLE

router = APIRouter(tags=["formats"])
MAX_LOG_CHARACTERS = 1_000_000
EXPORT_EXAMPLE: dict[str, Any] = {"result": EXAMPLE, "format": "megatron-lm"}
IMPORT_EXAMPLE: dict[str, Any] = {
    "command": "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 24 --hidden-size 2048 --num-attention-heads 16 "
    "--seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 2 --global-batch-size 64 --bf16 "
    "--tensor-model-parallel-size 2 --vocab-size 51200",
    "num_gpus": 8,
    "overrides": {"cluster.gpu": "a100-sxm-80gb"},
}


class ExportRequest(BaseModel):
    """A result or a query, and whose words it is wanted in."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, json_schema_extra={"example": EXPORT_EXAMPLE})

    result: dict[str, Any]
    """What estimates, recommendations or a search's result answered, or a query."""
    format: str
    """megatron-lm, megatron-lm-yaml, nemo, torchtitan, deepspeed, accelerate, slurm, vllm, sglang or trtllm."""
    rank: Annotated[int, Field(ge=1, le=1000)] = 1
    """Which recommendation."""


class ExportAnswer(BaseModel):
    """A configuration as another tool's text."""

    format: str
    text: str


class ImportRequest(BaseModel):
    """A configuration as someone runs it."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, json_schema_extra={"example": IMPORT_EXAMPLE})

    command: Annotated[str, Field(max_length=200_000)]
    """A Megatron-LM launch script, a torchtitan TOML or a DeepSpeed JSON file."""
    format: str | None = None
    """megatron-lm, torchtitan or deepspeed; guessed where left out."""
    num_gpus: Annotated[int | None, Field(ge=1, le=1 << 20)] = None
    """Where the configuration does not say."""
    overrides: Annotated[dict[str, Any], Field(max_length=100)] = {}
    """What it cannot say, by dotted path: cluster.gpu, model, model.vocab_size."""
    log: Annotated[str | None, Field(max_length=MAX_LOG_CHARACTERS)] = None
    """The run's log."""


@router.post("/exports")
def exports(request: ExportRequest) -> ExportAnswer:
    """A chosen configuration in the words of the tool that will run it."""
    return ExportAnswer(format=request.format, text=export(result=request.result, format=request.format, rank=request.rank))


@router.post("/imports", response_model=Assessment)
def imports(request: ImportRequest) -> Any:
    """What someone runs as a query, its prediction beside its log, and the best configuration for the same work."""
    tool = request.format or detect(request.command)
    data = read_query(request.command, format=tool, num_gpus=request.num_gpus, overrides=request.overrides)
    lines = None if request.log is None else request.log.splitlines()
    return json_response(assess(schema.parse_query(data), log=lines, reader=tool))
