"""Traces of a training that never ran, in Kineto's form: kernels and collectives of each rank, with
a planted fault or none.
"""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

LAYERS = 6
STEPS = 4
TENSOR = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
DATA = {0: (0, 2), 1: (1, 3), 2: (0, 2), 3: (1, 3)}
MATMUL = (2048, 1024, 4416)
"""Rows, inner size and columns of each matmul. Eighteen a step are 333 GFLOPs on each rank, as 6
layers of hidden size 1,024 with a vocabulary of 32,000 take for 2,048 tokens on four ranks: 3 x
2,048 x (24 x 6 x 1,024^2 + 2 x 1,024 x 32,000) / 4.
"""
FAULTS = ("slow_rank", "host_gap", "exposed_communication", "slow_link", "unequal_work")


class Rank:
    """One rank's clock, in microseconds, and what it recorded."""

    def __init__(self, rank: int, *, world: int, offset_us: float) -> None:
        self.rank, self.world, self.now, self.sent, self.launched = rank, world, 0.0, 0.0, 0.0
        self.offset_us = offset_us
        self.events: list[dict[str, Any]] = []
        self._number = 0

    def kernel(
        self, name: str, length: float, *, stream: int = 7, start: float | None = None, **args: Any
    ) -> tuple[float, float]:
        """Record a kernel and its launch 5 us before, or when the host came to it."""
        self._number += 1
        begin = self.now if start is None else start
        launch = max(min(begin - 5.0, self.launched + 1.0), 0.0)
        self.launched = max(self.launched, launch)
        common = {"ph": "X", "args": {"correlation": self._number}}
        self.events.append(
            {
                **common,
                "cat": "cuda_runtime",
                "name": "cudaLaunchKernel",
                "pid": 1,
                "tid": 1,
                "ts": launch,
                "dur": 1.0,
            }
        )
        arguments = {"correlation": self._number, "stream": stream, "device": 0, **args}
        self.events.append(
            {
                "ph": "X",
                "cat": "kernel",
                "name": name,
                "pid": 0,
                "tid": stream,
                "ts": begin,
                "dur": length,
                "args": arguments,
            }
        )
        if stream == 7:
            self.now = begin + length
        else:
            self.sent = begin + length
        return begin, begin + length

    def matmul(self, rows: int, inner: int, columns: int) -> None:
        """Record the operator of a matmul with its shapes, called now."""
        dims = {"Input Dims": [[rows, inner], [inner, columns]]}
        event = {
            "ph": "X",
            "cat": "cpu_op",
            "name": "aten::mm",
            "pid": 1,
            "tid": 1,
            "ts": self.now,
            "dur": 1.0,
            "args": dims,
        }
        self.events.append(event)

    def span(self, name: str, start: float, end: float) -> None:
        event = {
            "ph": "X",
            "cat": "user_annotation",
            "name": name,
            "pid": 1,
            "tid": 1,
            "ts": start,
            "dur": end - start,
        }
        self.events.append(event)

    def document(self) -> dict[str, Any]:
        """The whole trace; its clock starts elsewhere than others'."""
        events = [each | {"ts": each["ts"] + 1e9 + self.offset_us} for each in self.events]
        random.Random(self.rank).shuffle(events)  # Kineto's order is not that of time
        info = {"backend": "nccl", "rank": self.rank, "world_size": self.world}
        return {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}],
            "distributedInfo": info,
            "traceEvents": [
                {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
                *events,
            ],
            "traceName": "trace.json",
        }


def collective(
    ranks: list[Rank],
    name: str,
    length: float,
    *,
    group: tuple[int, ...],
    text: str,
    elements: int,
    stream: int = 7,
) -> None:
    """One collective of a group: it begins where each rank is and ends on all when the last has
    come and sent.
    """
    members = [ranks[each] for each in group]
    end = max(each.now for each in members) + length
    args = {
        "Collective name": name,
        "In msg nelems": elements,
        "Out msg nelems": elements,
        "Group size": len(group),
        "dtype": "BFloat16",
        "Process Group Name": f"{text}{group}",
        "Process Group Description": text,
        "Process Group Ranks": str(list(group)),
    }
    for each in members:
        kernel = f"ncclDevKernel_{name}_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
        each.kernel(kernel, end - each.now, stream=stream, start=each.now, **args)


def training(*, fault: str | None = None, seed: int = 0) -> list[Rank]:
    """Four ranks, TP 2 and DP 2; with `unequal_work` or `pipeline` two stages instead."""
    if fault in ("unequal_work", "pipeline"):
        return _pipeline(seed=seed, layers=(9, 3) if fault == "unequal_work" else (6, 6))
    chance = random.Random(seed)
    ranks = [Rank(rank, world=4, offset_us=chance.uniform(-5e3, 5e3)) for rank in range(4)]

    def compute(name: str, length: float) -> None:
        for each in ranks:
            slow = 1.5 if fault == "slow_rank" and each.rank == 3 else 1.0
            each.kernel(name, slow * length * chance.gauss(1.0, 0.01))

    def called(matmuls: int) -> None:
        for each in ranks:
            for _ in range(matmuls):
                each.matmul(*MATMUL)

    def reduce_tensor() -> None:
        for group in ((0, 1), (2, 3)):
            slow = 5.0 if fault == "slow_link" and group == (2, 3) else 1.0
            collective(
                ranks,
                "AllReduce",
                slow * 30.0,
                group=group,
                text="TENSOR_MODEL_PARALLEL_GROUP",
                elements=2**22,
            )

    def reduce_data(length: float) -> None:
        overlapped = fault != "exposed_communication"
        for group in ((0, 2), (1, 3)):
            collective(
                ranks,
                "ReduceScatter",
                length,
                group=group,
                text="DATA_PARALLEL_GROUP_WITH_CP",
                elements=2**24,
                stream=20 if overlapped else 7,
            )

    for step in range(STEPS):
        starts = [each.now for each in ranks]
        for each in ranks:
            each.now += 20.0 + (1500.0 if fault == "host_gap" and each.rank == 1 else 0.0)
            each.launched = each.now - 6.0
        for _ in range(LAYERS):
            called(1)
            compute("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", 100.0)
            compute(
                "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, "
                "64>>(flash::Flash_fwd_params)",
                40.0,
            )
            compute("void at::native::vectorized_elementwise_kernel<4>", 20.0)
            reduce_tensor()
        for _ in range(LAYERS):
            if fault != "exposed_communication":
                reduce_data(80.0)
            called(2)
            compute("sm90_xmma_gemm_bf16bf16_bf16f32_f32_nt_n_tilesize128x128x64", 200.0)
            compute("void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", 100.0)
            reduce_tensor()
        if fault == "exposed_communication":
            reduce_data(6 * 150.0)
        for each in ranks:
            each.now = max(each.now, each.sent)
        compute(
            "void at::native::(anonymous "
            "namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>",
            60.0,
        )
        for each, start in zip(ranks, starts, strict=True):
            each.span(f"ProfilerStep#{step + 3}", start, each.now - 4.0)
    return ranks


def _pipeline(*, seed: int, layers: tuple[int, int], micro_batches: int = 8) -> list[Rank]:
    """Two stages: all forward passes, then all backward passes, and messages that wait for their
    sender.
    """
    chance = random.Random(seed)
    ranks = [Rank(rank, world=2, offset_us=0.0) for rank in range(2)]
    gemm = "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT"

    def stage(rank: int, length: float) -> float:
        for _ in range(layers[rank]):
            ranks[rank].kernel(gemm, length * chance.gauss(1.0, 0.01))
        return ranks[rank].now

    def receive(rank: int, sent: float) -> None:
        here = ranks[rank]
        args = {
            "Collective name": "recv",
            "In msg nelems": 2**20,
            "Out msg nelems": 2**20,
            "dtype": "BFloat16",
        }
        text = {
            "Process Group Name": "5",
            "Process Group Description": "PIPELINE_MODEL_PARALLEL_GROUP",
        }
        end = max(here.now, sent) + 10.0
        here.kernel(
            "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
            end - here.now,
            **args,
            **text,
        )

    for step in range(STEPS):
        starts = [each.now for each in ranks]
        for each in ranks:
            each.launched = each.now
        forward = [stage(0, 20.0) for _ in range(micro_batches)]
        backward = []
        for sent in forward:
            receive(1, sent)
            stage(1, 20.0)
        for _ in range(micro_batches):
            backward.append(stage(1, 40.0))
        for sent in backward:
            receive(0, sent)
            stage(0, 40.0)
        end = max(each.now for each in ranks)
        for each, start in zip(ranks, starts, strict=True):
            group = {
                "Process Group Description": "EMBEDDING_GROUP",
                "Process Group Ranks": "[0, 1]",
                "dtype": "Float",
            }
            name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
            each.kernel(
                name,
                end + 15.0 - each.now,
                **{"Collective name": "allreduce", "In msg nelems": 1024},
                **group,
            )
            each.span(f"ProfilerStep#{step}", start, each.now - 4.0)
    return ranks


def write(ranks: list[Rank], folder: Path, *, packed: bool = False) -> list[Path]:
    """One file for each rank."""
    paths = []
    for each in ranks:
        text = json.dumps(each.document()).encode()
        path = folder / f"rank{each.rank}.pt.trace.json{'.gz' if packed else ''}"
        path.write_bytes(gzip.compress(text) if packed else text)
        paths.append(path)
    return paths
