"""One rank of a run: request in, a few steps or answers, result out."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
import warnings
from pathlib import Path

from hp_tool.domain.measurement import Measurement
from hp_tool.domain.requests import RunRequest
from hp_tool.profiler.files import failure_path, read_request, write_measurement

_LOG_TAIL_CHARACTERS = 4096
_CAUSE_CHARACTERS = 500


def main() -> int:
    """Exit code 0 where the result was written, 1 where this rank left a failure file instead."""
    parser = argparse.ArgumentParser(prog="python -m hp_tool.profiler", description=__doc__)
    parser.add_argument("request", type=Path)
    parser.add_argument("result", type=Path)
    arguments = parser.parse_args()
    rank = int(os.environ.get("RANK", "0"))
    try:
        measurement = profile(read_request(arguments.request))
        if rank == 0:
            write_measurement(arguments.result, measurement)
    except Exception as error:
        traceback.print_exc()
        write_measurement(failure_path(arguments.result, rank=rank), failure(error, rank=rank))
        return 1
    return 0


def profile(request: RunRequest) -> Measurement:
    """Do what the request asks. Every rank calls it and gets the same answer; raises whatever went wrong here."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron overlaps TP communication only under this setting
    warnings.simplefilter("ignore")  # Megatron's many remarks on every rank would push a failure out of the log's tail

    from hp_tool.profiler import runs

    match request.kind:
        case "training":
            return runs.train(request)
        case "inference":
            return runs.serve(request)
        case "benchmark":
            return runs.time_operations(request)


def failure(error: Exception, *, rank: int) -> Measurement:
    """This rank's account of why the run ended."""
    status = "crashed"
    if "torch" in sys.modules:
        from hp_tool.profiler.memory import is_out_of_memory

        status = "oom" if is_out_of_memory(error) else "crashed"
    message = " ".join(str(error).split())[:_CAUSE_CHARACTERS]
    return Measurement(
        status=status,
        cause=f"rank {rank}: {type(error).__name__}: {message}".removesuffix(": "),
        log_tail=traceback.format_exc()[-_LOG_TAIL_CHARACTERS:],
    )


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: gloo's threads sometimes abort the interpreter's shutdown after the result is safe, and NCCL's
    # communicators hang it after a failure.
    os._exit(code)
