"""Collect the settings of a training configuration from which other tools' files are written."""

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
    """Return the settings of one training configuration, which may use fewer devices than the
    problem, as reduced runs do.
    """
    model_parallel = (
        config.tensor_parallel_size * config.pipeline_parallel_size * config.context_parallel_size
    )
    used = model_parallel * config.data_parallel_size
    at = problem if used == problem.cluster.num_gpus else problem.with_num_gpus(used)
    layout = _written_layout(at, config)
    return TrainingSetup(
        model=at.model,
        model_path=checkpoint(at.model.name)
        if catalog.has_entry("models", at.model.name)
        else None,
        cluster=at.cluster,
        workload=at.workload,
        parallel=replace(config, pipeline_layout=None if layout is None else layout.text),
        strategy=replace(
            at.strategy,
            pipeline_layout=layout,
            moe_token_dispatcher_type=_written_dispatcher(at.strategy, config),
        ),
    )


def _written_dispatcher(strategy: Strategy, config: ParallelConfig) -> TokenDispatcher:
    """Return the token dispatcher to write to files.

    It is alltoall if each rank has all experts, because Megatron Core then rejects flex.
    """
    if config.expert_parallel_size * config.expert_tensor_parallel_size == 1:
        return "alltoall"
    return config.moe_token_dispatcher_type or strategy.moe_token_dispatcher_type


def _written_layout(problem: TrainingProblem, config: ParallelConfig) -> PipelineLayout | None:
    """Return the pipeline layout to write to files.

    None if the framework derives the layout from the sizes, or from a setting for one layer fewer
    on the first and last stage.
    """
    layers, dense, own = (
        problem.model.num_hidden_layers,
        problem.model.begins_dense,
        replace(config, pipeline_layout=None),
    )
    sizes = {
        "stages": config.pipeline_parallel_size,
        "chunks": config.virtual_pipeline_parallel_size,
    }
    usual = problem.with_parallel(pipeline_layout=None).with_common_settings(own).pipeline_layout
    wanted = (
        problem.strategy.pipeline_layout
        if config.pipeline_layout is None
        else parse_layout(config.pipeline_layout)
    )
    if wanted is not None:
        check_layout(wanted, num_layers=layers, mtp_layers=problem.model.num_nextn_predict_layers)
        if len(wanted.chunks) != math.prod(sizes.values()):
            chunks = math.prod(sizes.values())
            raise InputError(
                f"pipeline_layout {wanted.text} has {len(wanted.chunks)} chunks, but stages x "
                "chunks "
                f"per stage is {chunks}; change one of them",
                field=LAYOUT_PATH,
            )
        if usual is None or parse_layout(usual).chunks != wanted.chunks:
            return wanted
    return (
        None
        if usual is None or ends_are_shorter(num_layers=layers, begins_dense=dense, **sizes)
        else parse_layout(usual)
    )
