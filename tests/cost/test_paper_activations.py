"""Activation memory of arXiv 2205.05198, to the byte: section 4's formulas, section 4.2.3's and 5's
stages in flight.
"""

from __future__ import annotations

from fractions import Fraction

import pytest

from hp_tool.domain.parallel import Recompute
from hp_tool.domain.result import Estimate
from tests.cost.korthikanti_models import MODELS, Published, published_estimate

each_model = pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
each_size = pytest.mark.parametrize("t", (2, 4, 8))


def layers_bytes(estimate: Estimate) -> float:
    assert estimate.memory is not None
    return estimate.memory.layer_activations_bytes


@each_model
def test_no_parallelism(model: Published) -> None:
    found = layers_bytes(published_estimate(model, tensor=1, recompute="none"))
    assert found == model.layers * model.sbh * (34 + model.scores)


@each_model
@each_size
def test_tensor_parallel(model: Published, t: int) -> None:
    found = layers_bytes(
        published_estimate(model, tensor=t, recompute="none", sequence_parallel=False)
    )
    assert found == model.layers * model.sbh * (10 + Fraction(24, t) + model.scores / t)


@each_model
@each_size
def test_tensor_and_sequence_parallel(model: Published, t: int) -> None:
    found = layers_bytes(
        published_estimate(model, tensor=t, recompute="none", sequence_parallel=True)
    )
    assert found == model.layers * model.sbh * (34 + model.scores) / t


@each_model
@each_size
def test_tensor_parallel_and_selective(model: Published, t: int) -> None:
    found = layers_bytes(
        published_estimate(model, tensor=t, recompute="selective", sequence_parallel=False)
    )
    assert found == model.layers * model.sbh * (10 + Fraction(24, t))


@each_model
@each_size
def test_tensor_sequence_parallel_and_selective(model: Published, t: int) -> None:
    found = layers_bytes(
        published_estimate(model, tensor=t, recompute="selective", sequence_parallel=True)
    )
    assert found == model.layers * 34 * model.sbh / t


@each_model
@each_size
def test_full_keeps_the_layer_input_whole_without_sequence_parallelism(
    model: Published, t: int
) -> None:
    found = layers_bytes(
        published_estimate(model, tensor=t, recompute="full", sequence_parallel=False)
    )
    assert found == model.layers * 2 * model.sbh


@each_model
def test_full_keeps_the_sharded_layer_input_with_sequence_parallelism(model: Published) -> None:
    found = layers_bytes(
        published_estimate(model, tensor=8, recompute="full", sequence_parallel=True)
    )
    assert found == model.layers * 2 * model.sbh / 8


@each_model
def test_first_stage_holds_as_many_micro_batches_as_there_are_stages(model: Published) -> None:
    """1F1B: p micro-batches of L/p layers, so L layers however long the pipeline."""
    p = {48: 4, 96: 8, 105: 35, 128: 64}[model.layers]
    batch = 2 * p * model.micro_batch
    estimate = published_estimate(
        model, pipeline=p, batch=batch, recompute="selective", sequence_parallel=True
    )
    assert estimate.memory is not None and estimate.memory.worst_stage == 0
    assert layers_bytes(estimate) == model.layers * 34 * model.sbh / 8


@pytest.mark.parametrize("model", MODELS[1:3], ids=lambda model: model.name)
def test_interleaving_holds_more_chunks(model: Published) -> None:
    """L (1 + (p-1)/(pv)) layers on the first stage."""
    p, v = model.pipeline, model.chunks
    estimate = published_estimate(
        model,
        pipeline=p,
        batch=model.batch,
        virtual_pipeline_parallel_size=v,
        recompute="selective",
        sequence_parallel=True,
    )
    layers = model.layers * (1 + (p - 1) / (p * v))
    assert layers_bytes(estimate) == pytest.approx(layers * 34 * model.sbh / 8, rel=1e-14)


def test_fewer_micro_batches_than_stages_hold_no_more_than_there_are() -> None:
    model = MODELS[1]
    estimate = published_estimate(
        model, pipeline=8, batch=3, recompute="selective", sequence_parallel=True
    )
    assert layers_bytes(estimate) == 3 * model.layers / 8 * 34 * model.sbh / 8


def test_block_keeps_whole_layers_and_inputs_of_the_recomputed_ones() -> None:
    model = MODELS[0]
    estimate = published_estimate(
        model,
        recompute=Recompute(granularity="full", method="block", num_layers=20),
        sequence_parallel=True,
    )
    assert layers_bytes(estimate) == (28 * (34 + model.scores) + 20 * 2) * model.sbh / 8


def test_uniform_keeps_one_input_per_checkpoint() -> None:
    model = MODELS[0]
    estimate = published_estimate(
        model,
        recompute=Recompute(granularity="full", method="uniform", num_layers=5),
        sequence_parallel=True,
    )
    assert (
        layers_bytes(estimate) == 10 * 2 * model.sbh / 8
    )  # 48 layers in checkpoints of 5: the last one holds 3
