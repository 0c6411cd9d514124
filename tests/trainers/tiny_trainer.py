"""A real data-parallel training of a small network, that talks as Megatron-LM does. Started by
torchrun, with its flags.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from torch import distributed, nn


def main() -> None:
    parser = argparse.ArgumentParser()
    for flag in (
        "train-iters",
        "micro-batch-size",
        "global-batch-size",
        "seq-length",
        "hidden-size",
    ):
        parser.add_argument(f"--{flag}", type=int, required=True)
    parser.add_argument("--recompute-granularity", default="none")
    parser.add_argument(
        "--out-of-memory-from", type=int, default=1 << 30, help="micro-batches that do not fit"
    )
    asked, _ = parser.parse_known_args()
    distributed.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if asked.micro_batch_size >= asked.out_of_memory_from:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    model = nn.Sequential(
        nn.Linear(asked.hidden_size, asked.hidden_size), nn.GELU(), nn.Linear(asked.hidden_size, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    micro_batches = asked.global_batch_size // (
        asked.micro_batch_size * distributed.get_world_size()
    )
    for iteration in range(1, asked.train_iters + 1):
        started, total = time.perf_counter(), 0.0
        for _ in range(micro_batches):
            loss = (
                model(torch.randn(asked.micro_batch_size * asked.seq_length, asked.hidden_size))
                .square()
                .mean()
            )
            loss.backward()
            total += float(loss)
        for parameter in model.parameters():
            distributed.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        elapsed_ms = 1e3 * (time.perf_counter() - started)
        if distributed.get_rank() == distributed.get_world_size() - 1:
            print(
                f" [2026-01-01 00:00:00] iteration {iteration:8d}/{asked.train_iters:8d} | "
                "consumed samples: 0 | "
                f"elapsed time per iteration (ms): {elapsed_ms:.3f} | learning rate: 1.0E-02 | lm "
                f"loss: {total:.6E} |",
                flush=True,
            )
    distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
