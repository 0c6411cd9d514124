"""Balance the pipelines of models with different kinds of layers, so that all stages take equally
long.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from hp_tool.cost.balanced_stages import balanced_chunks, layer_seconds, pipeline_seconds
from hp_tool.cost.step_time import micro_batches
from hp_tool.domain.pipeline_layout import chunk_layers, text_of_chunks
from hp_tool.errors import InputError
from hp_tool.questions.training.layouts import ends_alone_differ
from hp_tool.questions.training.problem import TrainingProblem
from hp_tool.questions.training.ranking.exact import BestSearch, UnfinishedRows

MAX_STEP_RATIO = 0.99
"""Maximum step time of a balanced pipeline, relative to the same pipeline with default stages, for
it to be used.
"""


def balanced_problems(search: BestSearch) -> Iterator[tuple[TrainingProblem, UnfinishedRows]]:
    """Yield the search's problem with balanced stages, and the layouts to try with them.

    Stages are balanced for each number of stages and chunks, based on its fastest layout. The lower
    bounds of the step times of all its layouts are reduced by the same ratio.
    """
    problem, model = search.problem, search.problem.model
    if not search.pipelined or problem.parallel.pipeline_layout is not None:
        return
    layouts = UnfinishedRows.joined(search.pipelined)
    order = np.argsort(layouts.bound_s, kind="stable")
    pairs = np.stack(
        [
            layouts.candidates.pipeline_parallel_size,
            layouts.candidates.virtual_pipeline_parallel_size,
        ],
        axis=1,
    )
    _, firsts, pair = np.unique(pairs[order], axis=0, return_index=True, return_inverse=True)
    fastest = layouts.candidates.take(order[firsts])
    only_ends_differ = ends_alone_differ(model, problem.workload)
    m = np.asarray(micro_batches(fastest, workload=problem.workload))
    for place, seconds in enumerate(layer_seconds(problem, fastest) if len(firsts) else ()):
        p, v = pairs[order[firsts[place]]].tolist()
        sizes = balanced_chunks(seconds, stages=p, chunks=v, ends_alone=only_ends_differ)
        default_sizes = chunk_layers(
            num_layers=model.num_hidden_layers, stages=p, chunks=v, begins_dense=model.begins_dense
        )
        if sizes is None:
            continue
        balanced_s, default_s = (
            pipeline_seconds(seconds, each, stages=p, micro_batches=m[place])
            for each in (sizes, default_sizes)
        )
        if balanced_s > MAX_STEP_RATIO * default_s:
            continue
        try:
            balanced = problem.with_parallel(
                pipeline_parallel_size=p,
                virtual_pipeline_parallel_size=v,
                pipeline_layout=text_of_chunks(sizes, mtp_layers=model.num_nextn_predict_layers),
            )
        except InputError:  # the framework has no layouts
            return
        same_sizes = layouts.take(order[pair == place])
        yield balanced, replace(same_sizes, bound_s=same_sizes.bound_s * balanced_s / default_s)
