"""What is exported: a training or serving configuration with its names looked up."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

from hp_tool.domain.hardware import ClusterSpec
from hp_tool.domain.inference import InferenceWorkload
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import DEFAULT_STRATEGY, ParallelConfig, Recompute, Strategy
from hp_tool.domain.pipeline_layout import missing_layers
from hp_tool.domain.serving import ServingConfig
from hp_tool.domain.switches import Switches, switches
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.errors import InputError, UnsupportedError
from hp_tool.formats.stated_release import release_in_words


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSetup:
    """One training configuration, complete."""

    model: ModelSpec
    cluster: ClusterSpec
    workload: TrainingWorkload
    parallel: ParallelConfig
    strategy: Strategy = DEFAULT_STRATEGY
    model_path: str | None = None
    """Its Hugging Face id; None: nobody knows one."""

    @property
    def recompute(self) -> Recompute:
        """`parallel.recompute` in its long form."""
        recompute = self.parallel.recompute
        return recompute if isinstance(recompute, Recompute) else Recompute(granularity=recompute)

    @property
    def recomputes_by_layer(self) -> bool | None:
        """Whether each layer is recomputed on its own (True) or none is (False); None for any other
        recomputation.
        """
        recompute = self.recompute
        if recompute.granularity == "none":
            return False
        each = recompute.num_layers is None or (
            recompute.num_layers == 1 and recompute.method != "block"
        )
        return True if recompute.granularity in ("full", "per_layer") and each else None

    @property
    def switches(self) -> Switches:
        """What Megatron Core overlaps and fuses of it."""
        return switches(
            model=self.model,
            workload=self.workload,
            parallel=self.parallel,
            dispatcher=self.strategy.moe_token_dispatcher_type,
            nvlink_domain_size=self.cluster.nvlink_domain_size,
        )

    @property
    def missing_layers(self) -> tuple[int, int]:
        """Layers that the first and the last pipeline stage hold fewer than the others, unless
        there is a layout.
        """
        c = self.parallel
        stages, chunks = c.pipeline_parallel_size, c.virtual_pipeline_parallel_size
        model = self.model
        return missing_layers(
            num_layers=model.num_hidden_layers,
            stages=stages,
            chunks=chunks,
            begins_dense=model.begins_dense,
        )

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches each replica runs in one optimizer step."""
        return self.workload.global_batch_size // (
            self.parallel.data_parallel_size * self.parallel.micro_batch_size
        )

    @property
    def processes_per_node(self) -> int:
        """Processes that are started on each node, one for each device."""
        return min(self.cluster.gpus_per_node, self.cluster.num_gpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingSetup:
    """One serving configuration, complete."""

    model: ModelSpec
    model_path: str | None
    """What the engine is told to load: a Hugging Face id or a folder; None: to be filled in."""
    stored_precision: str | None
    """What its weights are stored in; None: nobody knows."""
    cluster: ClusterSpec
    workload: InferenceWorkload
    longest: int
    """Tokens that a request may have."""
    parallel: ServingConfig
    memory_fraction: float
    """Share of device memory that the engine may take."""
    leaves_headroom: bool = False
    """Whether the query states a headroom, and no memory_fraction, that is larger than the engine's
    default leaves.
    """

    @property
    def gpus_per_replica(self) -> int:
        """Devices of one replica."""
        c = self.parallel
        return c.tensor_parallel_size * c.pipeline_parallel_size * c.attention_data_parallel_size

    @property
    def replicas(self) -> int:
        """Replicas on the devices."""
        return self.cluster.num_gpus // self.gpus_per_replica


DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""torch's names of number formats, which most tools write."""
Values = Mapping[str, bool | int | float | str | list[str] | None]
"""By option: true for a switch that is on; one that is None or false is left out."""


def option_words(values: Values) -> dict[str, list[str]]:
    """The words behind each option that is not left out."""

    def words(value: int | float | str | list[str]) -> list[str]:
        if isinstance(value, list):
            return value
        return [] if value is True else [f"{value:g}" if isinstance(value, float) else str(value)]

    return {
        name: words(value)
        for name, value in values.items()
        if value is not None and value is not False
    }


def headline(setup: TrainingSetup | ServingSetup) -> str:
    """`qwen3.6-27b without the vision tower (27 layers of 1152) on 64 x h100-sxm-80gb,
    megatron-core 0.18`, on one line whatever the names hold: it stands in comments of scripts.
    """
    name = setup.model.name + (
        f" without {setup.model.left_out[:100]}" if setup.model.left_out else ""
    )
    release = release_in_words(setup.workload)
    text = (
        f"{name} on {setup.cluster.num_gpus} x {setup.cluster.gpu.name}{release and f', {release}'}"
    )
    return "".join(c if c.isprintable() else " " for c in text)[:200]


def one_word(name: str) -> str:
    """A model's name as an argument of a command. Raises InputError for what a program would read
    as an option or two lines.
    """
    if name.startswith("-") or not name.isprintable():
        raise InputError(
            f"the model's name {name[:80]!r} begins with a dash, or holds a line break or control "
            "character; rename it",
            field="model.name",
        )
    return name


SHAPE = {f.name for f in fields(ModelSpec)}
"""Fields that a tool expresses as a whole: by a model's name, or in the code of a training
script.
"""
ACCOUNTING = {
    "name",
    "framework",
    "framework_version",
    "total_tokens",
    "reliability",
    "attention_mask_flops",
    "expert_imbalance",
    "max_position_embeddings",
    "data_parallel_size",
    "left_out",
    "tower_parameters",
}
"""Fields that no training command needs: they name, predict or follow from others; the headline
names what is left out.
"""


def refuse_unsaid(
    setup: TrainingSetup, *, tool: str, expressed: Collection[str], runs: str | None = None
) -> None:
    """Raise UnsupportedError for the first setting that is not at its default and that the tool has
    no word for.

    `expressed` are the names of the fields that the export has words for, `runs` is the one
    framework that the tool runs. Nothing is dropped silently, and a field that a later version adds
    is refused until an export learns it.
    """
    if runs is not None and setup.workload.framework != runs:
        raise UnsupportedError(
            f"{tool} runs {runs}, but this configuration was chosen for "
            f"{setup.workload.framework}; "
            f"ask again with training.framework: {runs}",
            field="training.framework",
        )
    sections: tuple[tuple[str, Any], ...] = (
        ("model", setup.model),
        ("training", setup.workload),
        ("parallel", setup.parallel),
        ("parallel", setup.strategy),
    )
    for section, spec in sections:
        for f in fields(spec):
            value = getattr(spec, f.name)
            if f.name in expressed or f.name in ACCOUNTING or value is None or value == f.default:
                continue
            raise UnsupportedError(
                f"{tool} has no setting for {section}.{f.name}: {value}; choose another format, or "
                "leave it out",
                field=f"{section}.{f.name}",
            )
