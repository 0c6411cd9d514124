"""Collect the settings of a training configuration. Exporters write them as files for other
tools.
"""

import math
from dataclasses import replace

from hp_tool import catalog
from hp_tool.catalog.models import checkpoint
from hp_tool.domain.parallel import ParallelConfig, Strategy, TokenDispatcher
from hp_tool.domain.pipeline_layout import (
    LAYOUT_PATH,
    PipelineLayout,
    check_layout,
    ends_are_shorter,
    parse_layout,
)
from hp_tool.domain.setups import TrainingSetup
from hp_tool.errors import InputError
from hp_tool.questions.training.problem import TrainingProblem


def training_setup(problem: TrainingProblem, config: ParallelConfig) -> TrainingSetup:
    """Return the settings of one training configuration. Like reduced runs, it may use fewer
    devices than the problem.
    """
    model_parallel = (
        config.tensor_parallel_size * config.pipeline_parallel_size * config.context_parallel_size
    )
    used = model_parallel * config.data_parallel_size
    problem_on_used = problem if used == problem.cluster.num_gpus else problem.with_num_gpus(used)
    layout = _written_layout(problem_on_used, config)
    return TrainingSetup(
        model=problem_on_used.model,
        model_path=checkpoint(problem_on_used.model.name)
        if catalog.has_entry("models", problem_on_used.model.name)
        else None,
        cluster=problem_on_used.cluster,
        workload=problem_on_used.workload,
        parallel=replace(config, pipeline_layout=None if layout is None else layout.text),
        strategy=replace(
            problem_on_used.strategy,
            pipeline_layout=layout,
            moe_token_dispatcher_type=_written_dispatcher(problem_on_used.strategy, config),
        ),
    )


def _written_dispatcher(strategy: Strategy, config: ParallelConfig) -> TokenDispatcher:
    """Return the token dispatcher to write to files.

    If each rank has all experts, it is alltoall, because Megatron Core then rejects flex.
    """
    if config.expert_parallel_size * config.expert_tensor_parallel_size == 1:
        return "alltoall"
    return config.moe_token_dispatcher_type or strategy.moe_token_dispatcher_type


def _written_layout(problem: TrainingProblem, config: ParallelConfig) -> PipelineLayout | None:
    """Return the pipeline layout to write to files.

    None if the framework derives the layout from the sizes, or from a setting that gives the first
    and the last stage one layer fewer.
    """
    layers, dense, without_layout = (
        problem.model.num_hidden_layers,
        problem.model.begins_dense,
        replace(config, pipeline_layout=None),
    )
    sizes = {
        "stages": config.pipeline_parallel_size,
        "chunks": config.virtual_pipeline_parallel_size,
    }
    default_text = (
        problem.with_parallel(pipeline_layout=None)
        .with_common_settings(without_layout)
        .pipeline_layout
    )
    layout = (
        problem.strategy.pipeline_layout
        if config.pipeline_layout is None
        else parse_layout(config.pipeline_layout)
    )
    if layout is not None:
        check_layout(layout, num_layers=layers, mtp_layers=problem.model.num_nextn_predict_layers)
        if len(layout.chunks) != math.prod(sizes.values()):
            chunks = math.prod(sizes.values())
            raise InputError(
                f"pipeline_layout {layout.text} has {len(layout.chunks)} chunks, but "
                f"pipeline_parallel_size x virtual_pipeline_parallel_size is {chunks}; change "
                "one of them",
                field=LAYOUT_PATH,
            )
        if default_text is None or parse_layout(default_text).chunks != layout.chunks:
            return layout
    return (
        None
        if default_text is None or ends_are_shorter(num_layers=layers, begins_dense=dense, **sizes)
        else parse_layout(default_text)
    )
