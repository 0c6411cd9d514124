"""Run by torchrun on every rank: real steps of the built-in profiler under torch.profiler, each
with a planted fault or none.

python -m torch.distributed.run --nproc-per-node 4 tests/traces/recorded.py FOLDER WIDTH:FAULT ...
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RANK = int(os.environ["RANK"])
MODEL = {
    "num_hidden_layers": 8,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "vocab_size": 1024,
    "tie_word_embeddings": False,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {"parallel": {"data_parallel_size": 2}},
    # Few tokens for many weights: gradients take as long as matmuls.
    "wide": {
        "parallel": {"data_parallel_size": 2},
        "model": {**MODEL, "hidden_size": 512},
        "sequence_length": 32,
    },
    "pp": {"parallel": {"pipeline_parallel_size": 2}},
    "tpdp": {
        "parallel": {"tensor_parallel_size": 2, "data_parallel_size": 2},
        "model": {**MODEL, "num_hidden_layers": 4},
    },
}
RATE = 4_000_000
"""Bytes per second of a slow link."""
SO_MAX_PACING_RATE = 47
STEPS = 4


def main(folder: Path, cases: list[str]) -> None:
    if any(case.endswith(":slow_rank") for case in cases) and RANK == 1:
        os.environ["MKL_ENABLE_INSTRUCTIONS"] = "SSE4_2"  # matmuls take several times as long
    from torch import distributed

    from hp_tool.cluster.profiler import backend, cpu_shim, model, training
    from hp_tool.cluster.profiler.__main__ import free_previous_model
    from hp_tool.domain.workload import OverlapSpec
    from tests.profiler.requests import request

    device = None
    for case in cases:
        layout, _, fault = case.partition(":")
        hides = fault != "exposed_communication"
        known = dict(LAYOUTS[layout])
        length = known.pop("sequence_length", 256)
        work = {
            "sequence_length": length,
            "global_batch_size": 8,
            "overlap": OverlapSpec(data_parallel=hides),
        }
        wanted = request(**{"model": MODEL, "training": work, **known})
        if device is None:
            device = backend.start(wanted)
            cpu_shim.install()
        training.steps.run = recorder(folder / f"{case.replace(':', '_')}", fault)
        unequal = {"num_layers_in_first_pipeline_stage": 7, "num_layers_in_last_pipeline_stage": 1}
        usual, ddp = model._end_stage_layers, model.ddp_fields
        # One bucket would have nothing to hide behind.
        bucket = {"bucket_size": 1_000_000 if hides else None}
        model.ddp_fields = lambda request, fields=ddp, more=bucket: {**fields(request), **more}
        if fault == "unequal_work":
            model._end_stage_layers = lambda _, ends=unequal: ends
        groups = distributed.new_group
        if fault == "slow_link":
            distributed.new_group = paced(groups)
        training.train(wanted, model.build(wanted, device=device), device=device)
        model._end_stage_layers, model.ddp_fields, distributed.new_group = usual, ddp, groups
        distributed.barrier()
        free_previous_model()


def recorder(path: Path, fault: str) -> Callable[..., Any]:
    """What runs steps in place of `profiler.steps.run`: one unrecorded step, then STEPS under
    torch.profiler.
    """

    def run(request: Any, step: Callable[[], Any], *, device: Any) -> None:
        from torch.profiler import ProfilerActivity, profile, schedule

        plan = schedule(wait=0, warmup=1, active=STEPS, repeat=1)
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True, schedule=plan) as trace:
            longest = 0.0
            for number in range(STEPS + 1):
                started = time.perf_counter()
                if fault == "host_gap" and RANK == 1 and number:
                    time.sleep(0.6 * longest)
                step()
                longest = max(longest, time.perf_counter() - started)
                trace.step()
        trace.export_chrome_trace(f"{path}.rank{RANK}.json")

    return run


def paced(new_group: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.distributed.new_group`, whose sockets send slowly where they connect ranks 2 and 3
    alone.
    """

    def sockets() -> set[int]:
        links = {
            int(each.name): each.readlink()
            for each in Path("/proc/self/fd").iterdir()
            if each.is_symlink()
        }
        return {number for number, target in links.items() if target.name.startswith("socket:")}

    def make(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        before = sockets()
        group = new_group(ranks, *args, **kwargs)
        if (
            list(ranks or ()) == [2, 3]
            and RANK in (2, 3)
            and kwargs.get("group_desc") == "TENSOR_MODEL_PARALLEL_GROUP"
        ):
            for number in sockets() - before:
                with socket.socket(fileno=os.dup(number)) as one:
                    if one.family != socket.AF_UNIX and one.type == socket.SOCK_STREAM:
                        one.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, RATE)
        return group

    return make


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
    sys.stdout.flush()
    os._exit(0)  # gloo's threads sometimes abort the interpreter's own shutdown
