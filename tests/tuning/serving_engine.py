"""A cluster engine in memory that serves: replicas whose latencies are the cost model's times a
factor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.measurement import Measurement, ServingTimes
from hp_tool.domain.parallel import ParallelQuery
from hp_tool.domain.query import Query
from hp_tool.domain.requests import InferenceRequest
from hp_tool.questions import serving
from tests.tuning.cpu_engine import CpuEngine

FACTOR = 3.0


@dataclass
class ServingEngine(CpuEngine):
    """Its jobs end at once, like those of its base."""

    ttft_factor: float = FACTOR
    tpot_factor: float = FACTOR

    def fetch(self, handle: str) -> Measurement:
        request = self.requests[handle]
        assert isinstance(request, InferenceRequest)
        config = request.parallel
        query = Query(
            kind="inference",
            model=request.model,
            cluster=ClusterQuery(
                gpu=request.gpu, num_gpus=request.num_gpus, gpus_per_node=request.num_gpus
            ),
            inference=request.inference,
            parallel=ParallelQuery(
                tensor_parallel_size=config.tensor_parallel_size,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
            ),
        )
        found = serving.estimate(query=query)
        assert (
            found.ttft_s is not None
            and found.tpot_s is not None
            and found.request_latency_s is not None
        )
        batch, output = request.inference.concurrency or 1, request.inference.output_length
        times = ServingTimes(
            ttft_s=self.ttft_factor * found.ttft_s,
            ttft_s_spread=0.0,
            tpot_s=self.tpot_factor * found.tpot_s,
            tpot_s_spread=0.0,
            ttft_times_s=(self.ttft_factor * found.ttft_s,) * request.repetitions,
            tpot_times_s=(self.tpot_factor * found.tpot_s,) * request.repetitions,
            output_tokens_per_second=batch * output / (self.tpot_factor * found.request_latency_s),
            runner="megatron-core",
        )
        return Measurement(
            status="ok",
            serving=times,
            wall_s=5.0,
            hardware=replace(self.hardware(), num_gpus=request.num_gpus),
        )
