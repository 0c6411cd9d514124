"""What a reduced run may leave out, and what it implies."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_tool.cost.candidates import Candidates
from hp_tool.domain.measurement import Fidelity, Measurement
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.records import RunRecord
from hp_tool.domain.states import RunState
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.loop.search.fidelity import (
    EXTRAPOLATION_RATIO,
    WHOLE,
    extrapolate,
    fewest_micro_batches,
    fewest_replicas,
    num_gpus,
    reduce_run,
    representative_runs,
)

POWERS = st.sampled_from([1, 2, 4, 8])


@given(t=POWERS, c=POWERS, p=POWERS, d=st.integers(1, 96), per_node=st.sampled_from([2, 4, 8]))
def test_replicas_keep_the_pattern_of_their_group(t, c, p, d, per_node):
    config = ParallelConfig(
        tensor_parallel_size=t,
        context_parallel_size=c,
        pipeline_parallel_size=p,
        data_parallel_size=d,
    )
    one = Candidates.from_configs([config])
    kept = int(
        fewest_replicas(one, data_parallel_size=one.data_parallel_size, gpus_per_node=per_node)[0]
    )
    assert d % kept == 0
    assert (kept == 1) == (d == 1)
    assert (t * c * kept > per_node) == (t * c * d > per_node) or t * c * 2 > per_node >= t * c * d


def test_a_reduced_request_is_consistent():
    model = ModelSpec(num_hidden_layers=32, hidden_size=512, num_attention_heads=8, vocab_size=1024)
    training = TrainingWorkload(sequence_length=128, global_batch_size=512)
    config = ParallelConfig(pipeline_parallel_size=4, data_parallel_size=16, micro_batch_size=2)
    assert fewest_micro_batches(training, config) == 8
    fidelity = Fidelity(num_hidden_layers=16, data_parallel_size=2, num_micro_batches=8)
    small, batch, parallel = reduce_run(
        fidelity=fidelity, model=model, training=training, parallel=config
    )
    assert (small.num_hidden_layers, batch.global_batch_size, parallel.data_parallel_size) == (
        16,
        2 * 8 * 2,
        2,
    )
    assert num_gpus(config, fidelity) == num_gpus(parallel) == 8
    same = reduce_run(fidelity=Fidelity(steps=9), model=model, training=training, parallel=config)
    assert same == (model, training, config) and Fidelity(steps=9).is_whole


def run(config, *, step_s, fidelity=WHOLE, ratio=4.0):
    return RunRecord(
        id="r",
        search_id="s",
        number=0,
        digest="d",
        attempt=0,
        state=RunState.FINISHED,
        parallel=config,
        fidelity=fidelity,
        predicted={EXTRAPOLATION_RATIO: ratio},
        job_name="j",
        token=1,
        measurement=Measurement(status="ok", step_s=step_s, fidelity=fidelity),
        created_at=datetime.now(UTC),
    )


SMALL = Fidelity(num_micro_batches=2)


def test_a_reduced_run_stands_for_the_whole_with_an_interval():
    first = run(ParallelConfig(), step_s=2.0, fidelity=SMALL)
    found = extrapolate(first, replace(first.measurement, fidelity=Fidelity()), runs=[])
    assert (found.step_s, found.extrapolated_step_s, found.fidelity) == (
        2.0,
        pytest.approx(8.0),
        SMALL,
    )
    low, high = found.extrapolated_step_s_interval
    assert low < 8.0 < high
    assert found.objective_s == found.extrapolated_step_s
    whole = run(ParallelConfig(), step_s=2.0)
    assert extrapolate(whole, whole.measurement, runs=[first]) == whole.measurement
    failed = Measurement(status="oom")
    assert extrapolate(first, failed, runs=[]) == failed


def test_configurations_that_ran_both_ways_correct_the_others():
    """The whole takes 20% longer than reduced runs imply: after a few pairs that is believed, and
    the interval narrows.
    """
    configs = [ParallelConfig(micro_batch_size=b) for b in (1, 2, 3, 4, 5)]
    new = run(configs[-1], step_s=2.0, fidelity=SMALL)
    answers = []
    for pairs in range(5):
        known = [
            each
            for c in configs[:pairs]
            for each in (run(c, step_s=1.0, fidelity=SMALL), run(c, step_s=4.8))
        ]
        answers.append(extrapolate(new, new.measurement, runs=known))
    steps = [answer.extrapolated_step_s for answer in answers]
    assert steps == sorted(steps)
    assert steps[0] == pytest.approx(8.0)
    assert steps[-1] == pytest.approx(9.6, rel=0.02)
    widths = [
        math.log(a.extrapolated_step_s_interval[1] / a.extrapolated_step_s_interval[0])
        for a in answers
    ]
    assert np.all(np.diff(widths) < 0)


def test_what_a_reduced_run_implied_is_void_once_the_whole_failed():
    config = ParallelConfig()
    small, whole = run(config, step_s=1.0, fidelity=SMALL), run(config, step_s=4.0)
    failed = replace(whole, measurement=Measurement(status="oom"))
    assert representative_runs([small])[config] is small
    assert representative_runs([small, failed])[config] is failed
    assert representative_runs([small, whole])[config] is whole
    assert (
        representative_runs([whole, failed])[config] is whole
    )  # a repeat that fails takes nothing back
    late = replace(whole, measurement=Measurement(status="timeout"))
    assert representative_runs([small, late])[config] is small  # it was cut off: that says nothing
    later = run(config, step_s=4.2, fidelity=Fidelity(steps=10))
    assert representative_runs([whole, later, small])[config] is later
