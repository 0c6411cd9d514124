"""Time kernels, the allocator and a small training step on one GPU.

`python -m benchmarks.kernels [--parts ...] [--output FILE]` takes about ten minutes and needs only
torch. It times weight gradients with 16- and 32-bit accumulation, attention kernels from 2k to 256k
tokens, a training step as memory fills, and the parts of a small step. It writes a JSON object with
the device, the versions and a list of rows per part.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PARTS = ("weight_gradient", "attention", "steps", "allocator", "allocator_expandable")


def main() -> None:
    """Run the requested parts, each in a separate process, so that none uses memory of another."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument(
        "--kernels",
        nargs="+",
        default=("fa2", "fa3", "cudnn"),
        help="attention kernels: fa2 fa3 cudnn efficient fa4",
    )
    parser.add_argument("--output", default="-", help="JSON file, or - for standard output")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        json.dump(_rows(arguments.parts[0], tuple(arguments.kernels)), sys.stdout)
        return
    if not _has_gpu():
        parser.error("torch finds no CUDA device on this host")
    answer: dict[str, Any] = {"parts": {}}
    for part in arguments.parts:
        start = time.perf_counter()
        command = [
            sys.executable,
            "-m",
            "benchmarks.kernels",
            "--child",
            "--parts",
            part,
            "--kernels",
            *arguments.kernels,
        ]
        expandable = (
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
            if part.endswith("expandable")
            else {}
        )
        child = subprocess.run(
            command, stdout=subprocess.PIPE, env=os.environ | expandable, text=True, check=False
        )
        if child.returncode:
            print(f"{part}: failed with {child.returncode}", file=sys.stderr)
            continue
        reply = json.loads(child.stdout)
        answer |= reply["machine"]
        answer["parts"][part] = reply["rows"]
        print(
            f"{part}: {len(reply['rows'])} rows in {time.perf_counter() - start:.0f} s",
            file=sys.stderr,
        )
        text = json.dumps(answer, indent=1)
        if arguments.output != "-":
            Path(arguments.output).write_text(text)
    if arguments.output == "-":
        print(json.dumps(answer, indent=1))


def _has_gpu() -> bool:
    """Return True if torch finds a CUDA device. A separate process checks it, because a CUDA
    context would use memory of the parts.
    """
    command = [sys.executable, "-c", "import sys, torch; sys.exit(not torch.cuda.is_available())"]
    return subprocess.run(command, check=False).returncode == 0


def _rows(part: str, kernels: tuple[str, ...]) -> dict[str, Any]:
    import torch

    from benchmarks.kernels.allocator import nearly_full
    from benchmarks.kernels.attention import attention_kernels
    from benchmarks.kernels.steps import steps_by_part
    from benchmarks.kernels.weight_gradient import weight_gradients

    torch.manual_seed(0)
    rows = {
        "weight_gradient": weight_gradients,
        "attention": lambda: attention_kernels(kernels),
        "steps": steps_by_part,
        "allocator": nearly_full,
        "allocator_expandable": nearly_full,
    }[part]()
    machine = {
        "device": torch.cuda.get_device_name(0),
        "versions": {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        },
    }
    return {"machine": machine, "rows": list(rows)}


if __name__ == "__main__":
    main()
