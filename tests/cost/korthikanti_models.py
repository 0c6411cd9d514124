"""The four models of arXiv 2205.05198, table 3, and queries in the software of that paper."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.parallel import ParallelQuery
from hp_tool.domain.query import Query
from hp_tool.domain.result import Estimate
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.questions.training import estimate

SEQUENCE = 2048


@dataclass(frozen=True)
class Published:
    """One column of table 3, and what table 5 measured: MFU and HFU in percent with SP and
    selective recomputation.
    """

    name: str
    heads: int
    hidden: int
    layers: int
    pipeline: int
    chunks: int
    micro_batch: int
    batch: int
    seconds: float
    mfu: float
    hfu: float

    @property
    def sbh(self) -> int:
        return SEQUENCE * self.micro_batch * self.hidden

    @property
    def scores(self) -> Fraction:
        """5 a s / h: what the attention core keeps; exact, so that bytes are."""
        return Fraction(5 * self.heads * SEQUENCE, self.hidden)


MODELS = (
    Published("gpt-22b", 64, 6144, 48, 1, 1, 4, 4, 1.10, 41.5, 43.7),
    Published("gpt3-175b", 96, 12288, 96, 8, 3, 1, 64, 13.75, 51.4, 52.8),
    Published("mt-nlg-530b", 128, 20480, 105, 35, 3, 1, 280, 37.83, 56.0, 57.0),
    Published("gpt-1t", 160, 25600, 128, 64, 1, 1, 512, 71.49, 56.3, 57.0),
)


def published_estimate(
    model: Published,
    *,
    tensor: int = 8,
    pipeline: int = 1,
    batch: int | None = None,
    **parallel: Any,
) -> Estimate:
    """An estimate in the paper's software: 16-bit floats, unfused attention, dropout, states
    replicated.
    """
    query = Query(
        kind="training",
        model=model.name,
        cluster=ClusterQuery(gpu="a100-sxm-80gb", num_gpus=tensor * pipeline),
        training=TrainingWorkload(
            sequence_length=SEQUENCE,
            global_batch_size=batch or model.micro_batch,
            precision="fp16",
            attention="unfused",
            dropout=0.1,
        ),
        parallel=ParallelQuery(
            tensor_parallel_size=tensor,
            pipeline_parallel_size=pipeline,
            micro_batch_size=model.micro_batch,
            zero_stage=0,
            **parallel,
        ),
    )
    return estimate(query=query)
