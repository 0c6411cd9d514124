"""`python -m benchmarks.traces [--gigabytes 1]`: processor seconds and memory of explaining a large
trace.

The file has the form of torch.profiler's traces of a GPU: for each kernel its launch and the
operator that asked for it, in steps of 20,000 kernels. Where ijson is installed, the time of its C
backend over the same events is printed too.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

KERNELS = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>, "
    "std::array<char*, 3ul> >",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas",
    "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, false, "
    "cutlass::bfloat16_t> >",
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
)
SHAPE = {
    "grid": [2112, 1, 1],
    "block": [128, 1, 1],
    "registers per thread": 32,
    "est. achieved occupancy %": 100,
}
A_STEP = 20_000


def write(path: Path, *, size_bytes: float) -> None:
    """Write a trace of about this size."""
    with path.open("w") as file:
        file.write(
            '{"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA H100"}], '
            '"traceEvents": [\n'
        )
        number = 0
        while file.tell() < size_bytes:
            at = 1e9 + 10.0 * number
            if number % A_STEP == 0:
                step = {
                    "ph": "X",
                    "cat": "user_annotation",
                    "name": f"ProfilerStep#{number // A_STEP}",
                    "pid": 7,
                    "tid": 7,
                }
                file.write(json.dumps(step | {"ts": at - 2.0, "dur": 10.0 * A_STEP - 5.0}) + ",\n")
            host = {"ph": "X", "pid": 7, "tid": 7, "ts": at, "dur": 3.5}
            call = {
                "cat": "cpu_op",
                "name": "aten::add",
                "args": {"External id": number, "Record function id": 0, "Ev Idx": number},
            }
            launch = {
                "cat": "cuda_runtime",
                "name": "cudaLaunchKernel",
                "args": {"External id": number, "correlation": number + 1},
            }
            arguments = {
                "External id": number,
                "device": 0,
                "context": 1,
                "stream": 7,
                "correlation": number + 1,
                **SHAPE,
            }
            kernel = {
                "cat": "kernel",
                "name": KERNELS[number % len(KERNELS)],
                "pid": 0,
                "tid": 7,
                "args": arguments,
            }
            kernel |= {"ts": at + 4.0, "dur": 9.5}
            file.write(
                "".join(
                    json.dumps(host | each, indent=2) + ",\n" for each in (call, launch, kernel)
                )
            )
            number += 1
        file.write('{"ph": "M", "name": "end"}]}\n')


def explained(path: Path) -> None:
    """Explain the trace and print what it took; run in a process of its own."""
    from hp_tool.traces import read_traces
    from hp_tool.traces.explain.explanation import explain

    started = time.process_time()
    answer = explain(read_traces([path]))
    spent_s, memory = (
        time.process_time() - started,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    )
    size = path.stat().st_size
    print(
        f"{size / 1e9:.2f} GB, {answer.steps} steps: {spent_s:.1f} s of processor time, "
        f"{memory:,.0f} MiB at most"
    )


def by_ijson(path: Path) -> None:
    """Go over the same events with ijson, and print the time."""
    import ijson

    started = time.process_time()
    with path.open("rb") as file:
        count = sum(1 for _ in ijson.items(file, "traceEvents.item", use_float=True))
    print(
        f"ijson ({ijson.backend}): {count:,} events in {time.process_time() - started:.1f} s, "
        "nothing done with them"
    )


def main() -> None:
    """Write the trace and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.read is not None:
        explained(arguments.read)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        write(path, size_bytes=1e9 * arguments.gigabytes)
        subprocess.run([sys.executable, "-m", "benchmarks.traces", "--read", str(path)], check=True)
        if importlib.util.find_spec("ijson") is not None:
            by_ijson(path)


if __name__ == "__main__":
    main()
