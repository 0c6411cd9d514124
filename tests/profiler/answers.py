"""Run by torchrun on every rank: serves each request of a folder with its KV cache, and again by
full passes without one.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import distributed

from hp_tool.cluster.profiler import backend, cpu_shim
from hp_tool.cluster.profiler.__main__ import read_request
from hp_tool.domain.requests import InferenceRequest


def main(folder: Path) -> None:
    paths = sorted(folder.glob("*.request.json"))
    device = backend.start(read_request(paths[0]))
    cpu_shim.install()

    from megatron.core import parallel_state

    from hp_tool.cluster.profiler import serving

    for path in paths:
        request = read_request(path)
        assert isinstance(request, InferenceRequest)
        gpt = serving.build(request, device=device)
        prompts = serving.make_prompts(request, device=device)
        with_cache = serving.generate(request, gpt, prompts, device=device).tokens
        without = full_passes(gpt, prompts, tokens=request.inference.output_length)
        if os.environ["RANK"] == "0":
            verdict = (
                "same tokens" if torch.equal(with_cache, without) else f"{with_cache} != {without}"
            )
            print(f"{verdict}: {path.name.partition('.')[0]}", flush=True)
        distributed.barrier()
        parallel_state.destroy_model_parallel()


@torch.inference_mode()
def full_passes(gpt: torch.nn.Module, prompts: torch.Tensor, *, tokens: int) -> torch.Tensor:
    """[concurrency, tokens] greedy tokens, the whole sequence through the model for each."""
    sequence = prompts
    for _ in range(tokens):
        positions = torch.arange(sequence.shape[1]).expand_as(sequence)
        logits = gpt(sequence, positions, attention_mask=None, runtime_gather_output=True)
        sequence = torch.cat([sequence, logits[:, -1:].argmax(-1)], dim=1)
    return sequence[:, prompts.shape[1] :]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)
