"""The training block of a recurrent mixer against arithmetic done by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hp_tool.cost.block import shapes
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.recurrent_block import recurrent_time
from hp_tool.domain.efficiency import MixerRoofline
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.workload import TrainingWorkload
from tests.cost.cases import NODE, Problem
from tests.cost.test_primitives import plain_profile

NVLINK, BANDWIDTH = 450e9, 3.35e12
"""Bytes a second on H100: NVLink in each direction, memory."""
COMMON: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "vocab_size": 1024,
}
DELTA = ModelSpec(
    mixer="gated_delta",
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    linear_key_head_dim=64,
    **COMMON,
)
STATES = ModelSpec(
    mixer="mamba2",
    mamba_num_heads=16,
    mamba_head_dim=64,
    mamba_n_groups=8,
    ssm_state_size=128,
    **COMMON,
)


def problem(model: ModelSpec, **workload: Any) -> Problem:
    """Half of every bandwidth; elementwise kernels without launches; the convolution and the scan
    take 1 ms each.
    """
    plain = plain_profile(NODE)
    roof = MixerRoofline(peak_fraction=1e30, bandwidth_fraction=1e30, overhead_s=1e-3)
    kernels = {model.mixer: {"convolution": roof, "scan": roof}}
    gpu = replace(
        plain.gpu,
        mixers=kernels,
        memory_fraction=0.5,
        kernel_overhead_s=0.0,
        all_to_all=plain.gpu.nvlink,
    )
    framework = replace(
        plain.framework, elementwise_traffic_factor=1.0, state_scan_flops_per_second=None
    )
    return Problem(
        model=model,
        cluster=NODE,
        profile=replace(plain, gpu=gpu, framework=framework),
        workload=TrainingWorkload(sequence_length=4096, global_batch_size=8, **workload),
    )


@pytest.mark.parametrize(
    ("workload", "forward", "backward"),
    [
        ({}, 10_240 + 18_464, 16_384 + 27_696),
        (
            {"precision": "fp8", "fp8_recipe": "delayed", "dropout": 0.1},
            11_264 + 18_464 + 6_144,
            17_408 + 27_696 + 10_304,
        ),
    ],
)
def test_elementwise_traffic_of_a_delta_rule(
    workload: dict[str, Any], forward: int, backward: int
) -> None:
    """Bytes per token, added up per pass:

    Norm and residual, as in attention: 5 numbers of 2 bytes per hidden element forward, 8 backward
    (1,024 elements: 10,240 and 16,384 bytes), and with dropout a mask of one byte each (1,024 bytes
    per pass). Kept between the projections: keys 4 x 256, values 4 x 512, keys copied per value
    head 2 x 512, a chunk's inverse and a decay per head 8 x 65 = 4,616 numbers of 2 bytes. Forward
    writes and reads them (4 bytes: 18,464). Backward reads them, and writes and reads their
    gradients (6 bytes: 27,696). fp8 reads 2 bytes and writes 2 of 1 byte per matmul input (1,024 +
    512: 6,144) and per output's gradient (1,552 + 1,024: 10,304). The input projection has 2 x 256
    + 2 x 512 + 2 x 8 = 1,552 outputs.
    """
    case, alone = problem(DELTA, **workload), Candidates.alone(ParallelConfig())
    found = recurrent_time(case=case, candidates=alone, s=shapes(case=case, candidates=alone))
    assert found.elementwise == pytest.approx(2e-3 + 4096 * forward / (0.5 * BANDWIDTH))
    # Backward, the convolution and the scan take three times as long as forward.
    assert found.elementwise_backward == pytest.approx(
        3 * 2e-3 + 4096 * backward / (0.5 * BANDWIDTH)
    )


def test_context_parallel_ranks_exchange_what_the_projection_puts_out_and_what_the_scan_does() -> (
    None
):
    """4 ranks of 1,024 tokens each, tensor parallelism 2.

    The input projection puts out 2 x 1,024 channels, 2 x 8 x 128 numbers of states and 16 steps,
    half of them on a rank: 2,056. The scan puts out 1,024 / 2 = 512. Three quarters of each leave
    the rank, in 2 bytes, over half of NVLink, with a latency of 1 us each.
    """
    case = problem(STATES)
    split = Candidates.alone(
        ParallelConfig(tensor_parallel_size=2, context_parallel_size=4, sequence_parallel=True)
    )
    found = recurrent_time(case=case, candidates=split, s=shapes(case=case, candidates=split))
    wire = 1024 * 2 * 0.75 * (2056 + 512)
    assert (
        found.context == found.context_backward == pytest.approx(2 * 1e-6 + wire / (0.5 * NVLINK))
    )
