"""Complete training and serving configurations, with names looked up."""

from dataclasses import dataclass

from hp_tool.domain.hardware import ClusterSpec
from hp_tool.domain.inference import InferenceWorkload
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import DEFAULT_STRATEGY, ParallelConfig, Recompute, Strategy
from hp_tool.domain.pipeline_layout import missing_layers
from hp_tool.domain.serving import ServingConfig
from hp_tool.domain.switches import Switches, megatron_switches
from hp_tool.domain.workload import TrainingWorkload


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
        return megatron_switches(
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
