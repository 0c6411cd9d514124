"""Validate the pipeline layout of a query, and drop a layout that equals the framework's
default.
"""

import dataclasses

from hp_tool.domain.frameworks import training_engine
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelQuery
from hp_tool.domain.pipeline_layout import (
    LAYOUT_PATH,
    PipelineLayout,
    check_layout,
    chunk_layers,
    parse_layout,
)
from hp_tool.domain.releases import STAGES_IN_PATTERNS, is_at_least
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.errors import UnsupportedError
from hp_tool.questions.training.recompute_rules import first_case


def drop_default_layout(parallel: ParallelQuery, model: ModelSpec) -> ParallelQuery:
    """Return `parallel` without its pipeline_layout if it equals the framework's default.

    The `parallel` of an answer may contain such a layout.
    """
    stages, text = parallel.pipeline_parallel_size, parallel.pipeline_layout
    if text is None or not isinstance(stages, int):
        return parallel
    layout = parse_layout(text)
    chunks = parallel.virtual_pipeline_parallel_size or max(len(layout.chunks) // stages, 1)
    layers = model.num_hidden_layers
    if (
        not isinstance(chunks, int)
        or stages * chunks != len(layout.chunks)
        or layers % len(layout.chunks) == 0
    ):
        return parallel
    default_layers = chunk_layers(
        num_layers=layers, stages=stages, chunks=chunks, begins_dense=model.begins_dense
    )
    if [chunk.layers for chunk in layout.chunks] != default_layers or layout.chunks[
        -1
    ].mtp_layers != model.num_nextn_predict_layers:
        return parallel
    return dataclasses.replace(
        parallel, pipeline_layout=None, virtual_pipeline_parallel_size=chunks
    )


def ends_alone_differ(model: ModelSpec, workload: TrainingWorkload) -> bool:
    """Return whether all pipeline stages except the first and the last must have the same number of
    layers.

    They must for models whose mixers and FFNs are separate layers, in Megatron Core releases whose
    layer pattern cannot specify stages.
    """
    hybrid = any("none" in (kind.mixer, kind.feed_forward) for _, kind in model.kinds)
    return hybrid and not is_at_least(workload.framework_version or "", since=STAGES_IN_PATTERNS)


def parse_pipeline_layout(
    text: str | None, *, model: ModelSpec, workload: TrainingWorkload
) -> PipelineLayout | None:
    """Parse a pipeline layout and check it against the model. Return None without a layout.

    Raises:
        InputError: The layout is malformed or does not match the model.
        UnsupportedError: The query combines it with an unsupported feature.
    """
    if text is None:
        return None
    if what := first_case(
        (training_engine(workload.framework) != "megatron-core", f"framework {workload.framework}"),
        (model.architecture != "decoder", f"architecture {model.architecture}"),
        (workload.task == "lora" or workload.lora is not None, "LoRA"),
        (workload.packed, "packed rows"),
        (workload.offload not in (None, "none"), f"offload {workload.offload}"),
    ):
        raise UnsupportedError(
            f"a pipeline_layout with {what} is not supported; remove it", field=LAYOUT_PATH
        )
    layout = parse_layout(text)
    check_layout(
        layout, num_layers=model.num_hidden_layers, mtp_layers=model.num_nextn_predict_layers
    )
    return layout
