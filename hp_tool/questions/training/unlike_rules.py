"""Rules for trainings with layers other than attention and MLP."""

from hp_tool.domain.blocks import Mixer
from hp_tool.domain.frameworks import framework_facts, training_engine
from hp_tool.domain.hardware import ClusterSpec
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelQuery, axis_values
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.errors import UnsupportedError

_SCHEDULES = {"1f1b", "interleaved", "gpipe", "zb-h1"}
"""Schedules that place one stage on each rank."""
_MEGATRON_MIXERS: tuple[Mixer, ...] = ("attention", "gated_delta", "mamba2", "none")
"""Mixers of Megatron Core (0.16: ssm/, transformer/)."""


def check_unlike(
    *, model: ModelSpec, workload: TrainingWorkload, parallel: ParallelQuery, cluster: ClusterSpec
) -> None:
    """Check trainings with layers other than attention and MLP.

    Raises:
        UnsupportedError: A feature is not modelled, or the framework lacks a mixer.
    """
    if model.is_uniform and model.index_topk is None:
        return
    framework = workload.framework
    if what := next(
        (each for holds, each in _unsupported_cases(model, workload, parallel, cluster) if holds),
        None,
    ):
        field, name = what
        raise UnsupportedError(
            f"{model.name}: {name} is not supported with layers of different kinds or "
            "without attention",
            field=field,
        )
    if training_engine(framework) == "megatron-core":
        for _, kind in model.kinds:
            if kind.mixer not in _MEGATRON_MIXERS:
                raise UnsupportedError(
                    f"{model.name}: Megatron Core does not support {kind.mixer} layers; choose "
                    "another training.framework",
                    field="training.framework",
                )


def _unsupported_cases(
    model: ModelSpec, workload: TrainingWorkload, parallel: ParallelQuery, cluster: ClusterSpec
) -> tuple[tuple[object, tuple[str, str]], ...]:
    """Yield (whether the query uses it, (field, name)) for each unsupported case."""
    return (
        (
            framework_facts(workload.framework).is_plain,
            ("training.framework", f"framework {workload.framework}"),
        ),
        (cluster.kinds, ("cluster.stages", "a pipeline over two kinds of GPU")),
        (workload.lora is not None or workload.task == "lora", ("training.task", "LoRA")),
        (workload.optimizer == "muon", ("training.optimizer", "optimizer muon")),
        (
            workload.sequence_lengths is not None,
            ("training.sequence_lengths", "a distribution of lengths"),
        ),
        (workload.merges_passes, ("training.overlap.expert_parallel", "merging passes")),
        (
            set(axis_values(parallel.pipeline_schedule)) - _SCHEDULES,
            ("parallel.pipeline_schedule", "a schedule with two stages on a rank"),
        ),
        (model.architecture != "decoder", ("model.architecture", f"an {model.architecture}")),
    )
