"""Encoder-decoder models: what both sides and the attention between them cost, from first
principles.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hp_tool.catalog import model as catalogue_model
from hp_tool.cost.attention import core_seconds
from hp_tool.cost.block import shapes
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.encoder_decoder import counted_candidates
from hp_tool.cost.flops import step_tokens, token_flops
from hp_tool.domain.parallel import ParallelConfig, Recompute
from hp_tool.domain.query import Query
from hp_tool.domain.result import Estimate
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.questions.schema import parse_query
from hp_tool.questions.training import estimate
from hp_tool.questions.training.problem import resolve_training
from tests.cost.cases import case_of

SHAPE = catalogue_model("t5-v1.1-xl")


def query(*, training: dict[str, Any] | None = None, **parallel: Any) -> Query:
    return parse_query(
        {
            "kind": "training",
            "model": "t5-v1.1-xl",
            "cluster": {"gpu": "a100-sxm-80gb", "num_gpus": 8},
            "training": {"sequence_length": 512, "global_batch_size": 64, **(training or {})},
            "parallel": {"micro_batch_size": 8, **parallel},
        }
    )


def asked(**change: Any) -> Estimate:
    found = estimate(query=query(**change), with_fixes=False)
    assert found.memory is not None and found.time is not None
    return found


def test_flops_of_a_row_by_hand() -> None:
    """24 layers a side, h = 2048, 32 heads of 64, gated MLP of 5120; 512 tokens in, 128 out."""
    workload = TrainingWorkload(
        sequence_length=512, decoder_sequence_length=128, global_batch_size=1
    )
    h, inner, mlp = 2048, 32 * 64, 3 * 2048 * 5120
    encoder = 24 * 512 * (2 * (4 * h * inner + mlp) + 4 * 512 * inner)
    own = 2 * (4 * h * inner + mlp) + 4 * 128 * inner
    across = (
        2 * 2 * h * inner + 4 * 512 * inner
    )  # query and output projection; scores over the encoder's output
    decoder = 24 * (
        128 * (own + across) + 512 * 2 * 2 * h * inner
    )  # keys and values of the encoder's tokens
    logits = 128 * 2 * h * 32128
    assert step_tokens(workload) == 640
    assert token_flops(SHAPE, workload).forward * 640 == pytest.approx(
        encoder + decoder + logits, rel=1e-12
    )


def test_the_decoder_is_as_long_as_the_encoder_unless_told_otherwise() -> None:
    assert resolve_training(query()).workload.decoder_sequence_length == 512
    assert asked().time == asked(training={"decoder_sequence_length": 512}).time


def test_a_shorter_decoder_saves_time_and_memory() -> None:
    long, short = asked(), asked(training={"decoder_sequence_length": 128})
    assert (
        long.memory is not None
        and short.memory is not None
        and long.time is not None
        and short.time is not None
    )
    assert short.time.step_s < long.time.step_s
    assert short.memory.activations_bytes < long.memory.activations_bytes
    assert short.memory.logits_bytes == pytest.approx(long.memory.logits_bytes / 4)
    assert short.memory.weights_bytes == long.memory.weights_bytes


@pytest.mark.parametrize("t", (2, 4, 8))
def test_tensor_parallel_ranks_hold_the_model_between_them(t: int) -> None:
    """Norms and the tables of relative positions are on every rank."""
    alone, split = (asked(tensor_parallel_size=size, zero_stage=0).memory for size in (1, t))
    assert alone is not None and split is not None
    repeated = 2 * (24 * 2 * 2048 + 24 * 3 * 2048 + 2 * 2048 + 2 * 32 * 32)
    assert t * split.weights_bytes == pytest.approx(
        alone.weights_bytes + (t - 1) * repeated, rel=1e-12
    )


def test_block_recomputation_counts_layers_of_both_sides() -> None:
    """All 24 of each side recomputed is full recomputation; none of them would be none."""
    block: Any = {"granularity": "full", "method": "block", "num_layers": 24}
    half: Any = {**block, "num_layers": 12}
    full, all_, some, none = (
        asked(recompute=value).memory for value in ("full", block, half, "none")
    )
    assert full is not None and all_ is not None and some is not None and none is not None
    assert all_.layer_activations_bytes == pytest.approx(full.layer_activations_bytes, rel=1e-12)
    middle = (full.layer_activations_bytes + none.layer_activations_bytes) / 2
    assert some.layer_activations_bytes == pytest.approx(middle, rel=1e-12)


def test_an_encoder_and_a_decoder_are_not_split_by_a_pipeline_or_along_the_sequence() -> None:
    for change in ({"pipeline_parallel_size": 2}, {"context_parallel_size": 2}):
        found = estimate(query=query(**change))
        assert [reason.code for reason in found.reasons] == ["encoder_decoder_not_split"]
        assert found.fixes and found.fixes[0].parallel.pipeline_parallel_size == 1


def test_layers_may_differ_between_the_sides() -> None:
    """The parts of a decoder layer cost more than an encoder layer's: cross attention."""
    shape = replace(SHAPE, num_hidden_layers=12, num_decoder_layers=36)
    workload = TrainingWorkload(
        sequence_length=512, decoder_sequence_length=512, global_batch_size=1
    )
    assert shape.total_layers == SHAPE.total_layers
    assert token_flops(shape, workload).model > token_flops(SHAPE, workload).model


@pytest.mark.parametrize(("num_layers", "counted"), [(8, 16), (24, 36), (40, 48)])
def test_a_side_with_fewer_layers_than_are_recomputed_is_recomputed_whole(
    num_layers: int, counted: int
) -> None:
    shape = replace(SHAPE, num_hidden_layers=12, num_decoder_layers=36)
    recompute = Recompute(granularity="full", method="block", num_layers=num_layers)
    candidates = Candidates.from_configs([ParallelConfig(recompute=recompute)])
    assert counted_candidates(shape, candidates).recompute_num_layers == [counted]


@pytest.mark.parametrize("attention", ["flash", "unfused"])
def test_the_work_between_the_sides_grows_with_the_encoders_tokens(attention: Any) -> None:
    workload = TrainingWorkload(sequence_length=8192, global_batch_size=1, attention=attention)
    case = case_of(model=SHAPE, workload=workload)
    s = shapes(case=case, candidates=Candidates.from_configs([ParallelConfig()]))
    once, fourfold = (
        core_seconds(case=case, s=s, keys_per_query=keys, causal=False)[0] for keys in (1.0, 4.0)
    )
    assert fourfold == pytest.approx(
        4.0 * once, rel=0.05
    )  # but for the queries, which are read once
