"""Latent attention against the real framework, with and without latent queries: see
test_megatron_layers.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from hp_tool.cost.candidates import Candidates
from hp_tool.cost.layer import layer_bytes
from hp_tool.domain.parallel import ParallelConfig
from tests.cost.cases import case_of
from tests.cost.test_megatron_layers import (
    MICRO_BATCH,
    SEQUENCE,
    SLACK_BYTES,
    count_bytes,
    megatron_case,
    parameters,
    workload,
)
from tests.cost.test_megatron_modules import LATENT_FAMILIES, latent_case, left_out

pytestmark = pytest.mark.components

DIVISIONS = ((1, False), (2, False), (2, True), (4, True))
CASES = list(itertools.product(LATENT_FAMILIES, DIVISIONS, ("none", "selective", "full")))


@pytest.mark.parametrize(
    "case",
    parameters(CASES, long=((2, False), (4, True))),
    ids=lambda case: "-".join(map(str, case)),
)
def test_saved_bytes_are_megatrons(case: tuple[Any, ...]) -> None:
    """To the byte, but for what test_megatron_modules leaves out, and the angles that each layer's
    rotary embedding caches, whatever is recomputed.
    """
    family, (t, sharded), recompute = case
    model = LATENT_FAMILIES[family]
    config = ParallelConfig(
        tensor_parallel_size=t, sequence_parallel=sharded, micro_batch_size=MICRO_BATCH
    )
    found = layer_bytes(
        case=case_of(model=model, workload=workload(family, "flash")),
        candidates=Candidates.alone(config),
    )
    saved = {"none": found.saved, "selective": found.saved_selective, "full": found.saved_full}[
        recompute
    ]
    angles = 4 * SEQUENCE * (model.qk_rope_head_dim or 0)
    expected = float(saved) + (angles if recompute == "full" else left_out(family, t, sharded, ()))
    asked = megatron_case(
        model, workload(family, "flash"), t=t, sharded=sharded, recompute=recompute
    )
    assert count_bytes(asked | latent_case(model, asked["config"])) == pytest.approx(
        expected, abs=SLACK_BYTES
    )
