"""/explorer: the controls stand in the address."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query

from hp_tool import catalog
from hp_tool.domain.workload import AttentionKind
from service.api.dependencies import CalibrationsDep, FindDep, StoreDep
from service.api.queries import resolve
from service.dashboard.explorer.building import explorer_page
from service.dashboard.explorer.contexts import ExplorerPage, Recomputation, Settings
from service.dashboard.twins import page_at

router = APIRouter(tags=["dashboard"])

Name = Annotated[str, Query(max_length=100)]
Count = Annotated[int, Query(ge=1, le=1 << 20)]
Size = Annotated[int | None, Query(ge=1, le=1 << 20)]


def settings(
    model: Name = "llama-3-70b",
    gpu: Name = "h100-sxm-80gb",
    num_gpus: Count = 64,
    sequence_length: Annotated[int, Query(ge=1, le=1 << 24)] = 8192,
    global_batch_size: Count = 512,
    precision: Annotated[str, Query(max_length=20)] = "bf16",
    attention: AttentionKind = "flash",
    tp: Size = None,
    pp: Size = None,
    vpp: Size = None,
    cp: Size = None,
    ep: Size = None,
    mbs: Size = None,
    recompute: Recomputation | None = None,
    sp: Literal["on", "off"] | None = None,
    zero: Annotated[int | None, Query(ge=0, le=3)] = None,
) -> Settings:
    return Settings(
        model=model, gpu=gpu, num_gpus=num_gpus, sequence_length=sequence_length, global_batch_size=global_batch_size,
        precision=precision, attention=attention,
        tp=tp, pp=pp, vpp=vpp, cp=cp, ep=ep, mbs=mbs, recompute=recompute, sp=sp, zero=zero,
    )  # fmt: skip


@page_at(router, "/explorer", template="explorer.html", section="Explorer")
def explorer_context(
    asked: Annotated[Settings, Depends(settings)], store: StoreDep, find: FindDep, calibrations: CalibrationsDep
) -> ExplorerPage:
    """The explorer as its page shows it."""
    registered = {record.name for record in store.list_registrations(kind="model")}
    return explorer_page(
        asked,
        models=sorted({*catalog.models(), *registered}),
        gpus=catalog.gpus(),
        resolve=partial(resolve, find=find),
        calibrations=calibrations,
    )
