"""GPUs, servers and clusters."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from annotated_types import Interval

from hp_tool.domain.fields import Amount, Choice, Devices, NonNegative, Rate, Shown, Strict
from hp_tool.domain.prices import Market

Precision = Literal["bf16", "fp16", "fp8", "mxfp8", "nvfp4", "fp32"]
Kind = Literal["gpu", "cpu"]
NetworkTopology = Literal["fat_tree", "rail_optimized"]
Oversubscription = Annotated[float, Interval(ge=1.0, le=1e3)]
PerDay = Annotated[float, Interval(ge=0.0, le=1e3)]
Effectiveness = Annotated[float, Interval(ge=1.0, le=10.0)]
DEFAULT_RANK_ORDER = "tp-cp-ep-dp-pp"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec(Strict):
    """Datasheet of one device. Rates are per device and dense (no sparsity); link rates are per
    direction.
    """

    name: str
    """Catalogue name, such as h100-sxm-80gb."""
    kind: Kind = "gpu"
    """gpu, or cpu: one process with one thread on a host."""
    silicon: str | None = None
    """Die whose measured constants apply, such as h100. Cards with one die differ in clocks, power,
    memory and links. None: constants typical of the measured dies.
    """
    memory_bytes: Annotated[int, Interval(ge=1, le=1 << 60)]
    """Memory that programs can use, as nvidia-smi and torch report it (less than the marketing
    figure).
    """
    memory_bandwidth_bytes_per_second: Rate
    """Peak bandwidth of device memory."""
    peak_flops_per_second: dict[Precision, Rate]
    """Dense peak by matmul input precision; a precision that is absent is not supported by the
    hardware.
    """
    nvlink_bandwidth_bytes_per_second: Rate | None = None
    """Per-direction bandwidth to peers of the same NVLink domain; None: peers talk over PCIe."""
    pcie_bandwidth_bytes_per_second: Rate
    """Bandwidth to the host per direction, and to peers without NVLink."""
    peer_to_peer: bool = True
    """Whether devices of a host reach each other's memory over PCIe; false: messages pass through
    the host's memory.
    """
    gpus_per_node: Devices = 8
    """Devices per server, in the usual server; a cluster may have another number."""
    nvlink_domain_size: Devices | None = None
    """Devices of one NVLink domain; None: those of a node."""
    inter_node_bandwidth_bytes_per_second: Rate
    """Per-direction network bandwidth per device in the usual server; a cluster may differ."""
    power_w: NonNegative
    """Board power at full load (TDP)."""
    idle_power_w: NonNegative | None = None
    """Board power when waiting; None: a quarter of power_w."""
    host_power_w: NonNegative = 0.0
    """Power of the rest of the server per device, in watts."""
    host_memory_bytes: NonNegative | None = None
    """Host memory per device of the usual server; None: unknown, and not limited."""
    host_memory_bandwidth_bytes_per_second: Rate | None = None
    """Host memory bandwidth per device of the usual server."""
    price_per_hour: NonNegative | None = None
    """A typical on-demand price in US dollars; None: cost is left out."""
    predict_only: bool = False
    """Whether the device can only be predicted, because `hp-tool tune` cannot run on it."""
    source: str = ""
    """Source of the figures."""

    @property
    def idle_w(self) -> float:
        """Power of an idle device, in watts."""
        return 0.25 * self.power_w if self.idle_power_w is None else self.idle_power_w


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec(Strict):
    """A resolved cluster, as input to the cost model."""

    name: str = "custom"
    gpu: GpuSpec
    num_gpus: Devices
    gpus_per_node: Devices
    """Devices that share a host."""
    nvlink_domain_size: Devices
    """Devices that reach each other at NVLink speed; at least gpus_per_node where NVLink exists."""
    nvlink_segment_gpus: Devices | None = None
    """Devices of one NVLink domain that a job uses together; None: all, or the largest number of
    whole nodes that the innermost groups fill evenly.
    """
    inter_node_bandwidth_bytes_per_second: Rate
    """Per-direction network bandwidth per device."""
    inter_node_latency_s: NonNegative = 5e-6
    """End-to-end latency of one network message, in seconds."""
    node_gpus: Devices | None = None
    """Devices of a whole host, which differs from gpus_per_node if a small job uses only some of
    them; None: gpus_per_node.
    """
    domain_gpus: Devices | None = None
    """Devices of a whole NVLink domain, which differs from nvlink_domain_size if a small job uses
    only some of them; None: nvlink_domain_size.
    """
    network_topology: NetworkTopology = "fat_tree"
    """fat_tree: a leaf switch connects all ports of its nodes; rail_optimized: a leaf switch
    connects the n-th port (rail) of each of its nodes.
    """
    nodes_per_leaf: Devices | None = None
    """Nodes that reach each other below the oversubscribed level (one leaf, or a pod); None: all
    nodes.
    """
    network_oversubscription: Oversubscription = 1.0
    """Bandwidth below the leaf switches divided by bandwidth above them; 1: full bisection
    bandwidth.
    """
    kinds: tuple[ClusterSpec, ...] = ()
    """For a cluster with two kinds of GPU: each kind as a separate cluster, in the order of
    pipeline stages. The other fields are then means over all devices, or the smaller value.
    """
    rank_order: str = DEFAULT_RANK_ORDER
    """Order of the parallel dimensions in rank numbering, innermost first (Megatron Core's
    `order`).
    """
    price_per_gpu_hour: NonNegative | None = None
    """US dollars per GPU-hour; None: results omit the cost."""
    interruptions_per_node_day: PerDay = 0.0
    """Interruptions per node and day, for example of spot instances. Another node replaces the
    interrupted one.
    """
    grid_carbon_kg_per_kwh: NonNegative | None = None
    """kg of CO2 equivalent per kWh; None: results omit emissions."""
    power_usage_effectiveness: Effectiveness = 1.0
    """Energy of the data centre divided by that of its machines (PUE)."""

    @property
    def runs_flex_dispatcher(self) -> bool:
        """Whether all devices support DeepEP and HybridEP: NVIDIA GPUs since Ampere (the first with
        bf16), connected by NVLink (Megatron-Bridge, apply_flex_dispatcher_backend).
        """
        gpus = [kind.gpu for kind in self.kinds] or [self.gpu]
        return all(
            gpu.nvlink_bandwidth_bytes_per_second is not None
            and "bf16" in gpu.peak_flops_per_second
            and not gpu.predict_only
            for gpu in gpus
        )

    @property
    def num_nodes(self) -> int:
        return -(-self.num_gpus // self.gpus_per_node)

    def divides_into(self, num_gpus: int) -> bool:
        """Return whether this many devices are whole nodes, or an equal part of one node."""
        node = self.gpus_per_node
        return num_gpus % node == 0 if num_gpus > node else node % num_gpus == 0

    def legal_counts(self) -> tuple[int, ...]:
        """Return the numbers of devices that a part of the cluster may have, ascending."""
        shares = (n for n in range(1, self.gpus_per_node) if self.divides_into(n))
        nodes = range(self.gpus_per_node, self.num_gpus, self.gpus_per_node)
        return (*(n for n in shares if n < self.num_gpus), *nodes, self.num_gpus)

    def with_num_gpus(self, num_gpus: int) -> ClusterSpec:
        """Return a part of the cluster with this many devices: whole nodes, or a part of one
        node.
        """
        per_node = min(self.gpus_per_node, num_gpus)
        domain = max(per_node, min(self.nvlink_domain_size, num_gpus))
        segment = self.nvlink_segment_gpus and max(
            per_node, min(self.nvlink_segment_gpus, num_gpus)
        )
        return replace(
            self,
            num_gpus=num_gpus,
            gpus_per_node=per_node,
            nvlink_domain_size=domain,
            nvlink_segment_gpus=segment,
            node_gpus=self.node_gpus or self.gpus_per_node,
            domain_gpus=self.domain_gpus or self.nvlink_domain_size,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageGpus(Strict):
    """One of two GPU kinds of a mixed cluster, by pipeline stage."""

    gpu: str | GpuSpec
    """Catalogue name, or the datasheet itself."""
    num_gpus: Devices
    """Number of these devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterQuery(Strict):
    """A cluster as a query describes it; omitted fields come from the catalogue."""

    name: str | None = None
    """Name in results; None: derived from gpu and num_gpus."""
    node_type: str | None = None
    """A server or cloud instance of the catalogue (dgx-h100, aws-p5.48xlarge); sets GPU, network
    and price.
    """
    gpu: Annotated[
        Choice[str | GpuSpec | None], Shown("GPU", "Cluster", example="h100-sxm-80gb")
    ] = None
    """GPU of the cluster: a catalogue name or a datasheet; optional with node_type. `recommend`
    also accepts a list.
    """
    num_gpus: Annotated[Choice[Devices | None], Shown("GPUs", "Cluster", example="64")] = None
    """Total number of devices; None: the number in node_type. `recommend` also accepts a list."""
    gpus_per_node: Annotated[Devices | None, Shown("GPUs per node", "Cluster", example="8")] = None
    """Devices of one host; None: as in the usual server of this GPU, at most num_gpus."""
    nvlink_domain_size: Annotated[
        Devices | None, Shown("GPUs per NVLink domain", "NVLink", unset="the usual server's")
    ] = None
    """Devices of one NVLink domain; None: as in the usual server."""
    nvlink_segment_gpus: Annotated[
        Devices | None, Shown("GPUs per NVLink segment", "NVLink", unset="automatic")
    ] = None
    """Devices of one NVLink domain that the job uses, in whole nodes; None: all of them, or the
    most whole nodes that fit a whole number of innermost groups.
    """
    inter_node_bandwidth_bytes_per_second: Rate | None = None
    """Per-direction network bandwidth per device; None: the usual server's."""
    inter_node_latency_s: NonNegative | None = None
    """End-to-end latency of one network message, in seconds; None: 5 us."""
    network_topology: NetworkTopology | None = None
    """fat_tree: a leaf switch holds all ports of its nodes; rail_optimized: the n-th port (rail) of
    each. None: fat_tree.
    """
    nodes_per_leaf: Devices | None = None
    """Nodes that reach each other at full bandwidth, below one leaf switch or in one pod; None: all
    of them.
    """
    network_oversubscription: Oversubscription | None = None
    """Bandwidth below the leaf switches divided by the bandwidth above them, 1 to 1000; requires
    nodes_per_leaf. None: 1, full bisection.
    """
    price_per_gpu_hour: NonNegative | None = None
    """US dollars per GPU-hour; None: the catalogue's price, if it has one."""
    market: Market | None = None
    """Which price to use for each machine of `priced`; None: on_demand. spot requires
    interruptions_per_node_day.
    """
    interruptions_per_node_day: PerDay | None = None
    """Interruptions per node and day, for example of spot instances; counted like the failures of
    training.reliability.
    """
    power_cap_w: Amount | None = None
    """Power limit of each device in watts, below its default; clocks and matmul throughput fall
    with its cube root.
    """
    grid_carbon_kg_per_kwh: NonNegative | None = None
    """kg of CO2 equivalent per kWh at the cluster's location; adds co2_kg to the answer. None: the
    value of the price list's region.
    """
    power_usage_effectiveness: Effectiveness | None = None
    """Energy of the data centre divided by that of its machines (PUE); None: 1."""
    stages: tuple[StageGpus, ...] | None = None
    """Two kinds of GPU in one cluster, in the order of their pipeline stages; replaces gpu and
    num_gpus.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeType(Strict):
    """A server or cloud instance: the number of GPUs, network and price that usually come with a
    GPU.
    """

    name: str
    gpu: str
    """Catalogue name of its devices."""
    gpus_per_node: Devices
    nvlink_domain_size: Devices | None = None
    """None: gpus_per_node."""
    inter_node_bandwidth_bytes_per_second: Rate
    """Per-direction network bandwidth per device."""
    fabric: str
    """The network in words, such as 8 x ConnectX-7 400 Gb/s InfiniBand NDR."""
    network_topology: NetworkTopology | None = None
    """As in a query's cluster; None: fat_tree."""
    nodes_per_leaf: Devices | None = None
    network_oversubscription: Oversubscription | None = None
    price_per_gpu_hour: NonNegative | None = None
    """On-demand list price in US dollars, if published."""
    num_gpus: Devices | None = None
    """Number of devices of a registered cluster; None for a node type."""
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRuns:
    """How profile runs reach a registered cluster, and how much of it they may use: `runs` of its
    catalogue entry.
    """

    launcher: str
    """Launcher: local, slurm, ray, kubernetes, or endpoint (a running server to which searches of
    kind inference send requests).
    """
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the launcher. gpu, gpus_per_node, max_nodes and name default to the cluster's."""
    max_concurrent_runs: Annotated[int, Interval(ge=1, le=10_000)] = 1
    """Maximum number of runs at once, over all searches on the cluster."""
    max_gpu_seconds_per_search: Amount | None = None
    """Maximum GPU-seconds of one search; None: no limit."""
    max_gpu_seconds_per_day: Amount | None = None
    """Maximum GPU-seconds of all searches on the cluster per day (UTC); None: no limit."""
