"""Complete training and serving configurations. Exporters write them as files for other tools."""

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
    """One complete training configuration."""

    model: ModelSpec
    cluster: ClusterSpec
    workload: TrainingWorkload
    parallel: ParallelConfig
    strategy: Strategy = DEFAULT_STRATEGY
    model_path: str | None = None
    """Hugging Face id of the model; None if unknown."""

    @property
    def recompute(self) -> Recompute:
        """`parallel.recompute` as a Recompute object."""
        recompute = self.parallel.recompute
        return recompute if isinstance(recompute, Recompute) else Recompute(granularity=recompute)

    @property
    def recomputes_by_layer(self) -> bool | None:
        """Whether each layer is recomputed separately (True) or no layer is (False); None for other
        kinds of recomputation.
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
        """Overlaps and fusions, as Megatron Core settings."""
        return megatron_switches(
            model=self.model,
            workload=self.workload,
            parallel=self.parallel,
            dispatcher=self.strategy.moe_token_dispatcher_type,
            nvlink_domain_size=self.cluster.nvlink_domain_size,
        )

    @property
    def missing_layers(self) -> tuple[int, int]:
        """Number of layers that the first and the last pipeline stage lack compared with a full
        stage. Not valid with a pipeline layout.
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
        """Micro-batches per replica and optimizer step."""
        return self.workload.global_batch_size // (
            self.parallel.data_parallel_size * self.parallel.micro_batch_size
        )

    @property
    def processes_per_node(self) -> int:
        """Number of processes started on each node, one per device."""
        return min(self.cluster.gpus_per_node, self.cluster.num_gpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingSetup:
    """One complete serving configuration."""

    model: ModelSpec
    model_path: str | None
    """Model argument of the engine: a Hugging Face id or a folder; None: a placeholder for the
    user.
    """
    stored_precision: str | None
    """Precision of the stored weights; None if unknown."""
    cluster: ClusterSpec
    workload: InferenceWorkload
    longest: int
    """Maximum number of tokens per request."""
    parallel: ServingConfig
    memory_fraction: float
    """Fraction of device memory that the engine may use."""
    leaves_headroom: bool = False
    """Whether the query sets a headroom (and no memory_fraction) that exceeds what the engine
    leaves free by default.
    """

    @property
    def gpus_per_replica(self) -> int:
        """Number of devices of one replica."""
        c = self.parallel
        return c.tensor_parallel_size * c.pipeline_parallel_size * c.attention_data_parallel_size

    @property
    def replicas(self) -> int:
        """Number of replicas on the devices."""
        return self.cluster.num_gpus // self.gpus_per_replica
