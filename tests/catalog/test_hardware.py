"""GPUs, servers and clusters: the data, the defaults, and the errors."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hp_tool import catalog
from hp_tool.catalog import library
from hp_tool.cost.network import local_bandwidth
from hp_tool.domain.hardware import ClusterQuery, StageGpus
from hp_tool.domain.inference import InferenceWorkload
from hp_tool.domain.query import Query
from hp_tool.domain.units import GIB
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.errors import InputError, NotFoundError, UnsupportedError
from hp_tool.loop.tuning import resolve_search

ADDED = {
    "h100-nvl-94gb": ("h100-nvl", 835.5, 4.0),
    "h200-nvl-141gb": ("h200-nvl", 835.5, 4.8),
    "gh200-96gb": ("gh200", 989.4, 4.0),
    "h20-sxm-96gb": ("h20", 148.0, 4.0),
    "h800-sxm-80gb": ("h800", 989.4, 3.35),
    "a800-sxm-80gb": ("a800", 312.0, 2.04),
    "b300-sxm-288gb": ("b300-sxm", 2250.0, 8.0),
    "gb300-nvl72": ("gb300", 2500.0, 8.0),
    "l4-24gb": ("l4", 121.0, 0.3),
    "a10g-24gb": ("a10g", 70.0, 0.6),
    "rtx-4090-24gb": ("4090", 165.2, 1.0),
    "rtx-5090-32gb": ("5090", 209.5, 1.8),
    "rtx-pro-6000-96gb": ("rtx-pro-6000", 503.8, 1.8),
    "mi300x-192gb": ("mi300x", 1307.4, 5.3),
    "mi325x-256gb": ("mi325x", 1307.4, 6.0),
    "mi350x-288gb": ("mi350x", 2306.9, 8.0),
    "mi355x-288gb": ("mi355x", 2516.6, 8.0),
    "gaudi3-128gb": ("gaudi3", 1835.0, 3.67),
}
"""By name: a common name, dense TFLOP/s of bf16 with fp32 accumulation, TB/s of memory."""
GPUS = {
    *ADDED,
    "v100-sxm-32gb",
    "a100-sxm-40gb",
    "a100-sxm-80gb",
    "h100-sxm-80gb",
    "h100-pcie-80gb",
    "h200-sxm-141gb",
    "b200-sxm-180gb",
    "gb200-nvl72",
    "l40s-48gb",
    "cpu",
}


def test_the_devices_that_queries_rely_on() -> None:
    assert set(catalog.names("gpus")) >= GPUS


def test_a_device_is_plausible_and_sourced(subtests: pytest.Subtests) -> None:
    for name in sorted(GPUS - {"cpu"}):
        with subtests.test(name=str(name)):
            gpu = catalog.gpu(name)
            assert gpu.name == name
            assert "datasheet" in gpu.source
            # Programs are offered somewhat less than the figure in the name, in GB or GiB.
            racks = {"gb200-nvl72": 192, "gb300-nvl72": 288}
            marketed = racks.get(name) or int(name.rsplit("-", 1)[1].removesuffix("gb"))
            assert 0.90 * marketed * 1e9 < gpu.memory_bytes < marketed * GIB
            rates = gpu.peak_flops_per_second
            assert gpu.power_w > 0.0 and gpu.host_power_w > 0.0
            if name == "gaudi3-128gb":  # one matrix engine, one rate
                assert rates == {"bf16": 1835e12, "fp8": 1835e12}
                continue
            assert rates["fp16"] > rates["fp32"]
            # Each halving of the operands' width doubles the dense rate. Blackwell Ultra and
            # GeForce have more of nvfp4.
            for narrow, wide, most in (
                ("fp8", "bf16", 2.0),
                ("mxfp8", "bf16", 2.0),
                ("nvfp4", "fp8", 4.0),
            ):
                if narrow in rates:
                    assert 1.98 <= rates[narrow] / rates[wide] <= 1.02 * most
            if gpu.nvlink_bandwidth_bytes_per_second is None:
                host = gpu.pcie_bandwidth_bytes_per_second
                assert local_bandwidth(gpu) == (host if gpu.peer_to_peer else host / 2)
            else:
                assert gpu.memory_bandwidth_bytes_per_second > gpu.nvlink_bandwidth_bytes_per_second
                assert (
                    gpu.nvlink_bandwidth_bytes_per_second
                    > gpu.inter_node_bandwidth_bytes_per_second
                )


def test_what_people_own_is_found_by_its_common_name(subtests: pytest.Subtests) -> None:
    for name, expected in ADDED.items():
        with subtests.test(name=str(name), expected=str(expected)):
            common, bf16, memory = expected
            gpu = catalog.gpu(common)
            assert gpu.name == name
            assert gpu.peak_flops_per_second["bf16"] == bf16 * 1e12
            assert gpu.memory_bandwidth_bytes_per_second == pytest.approx(memory * 1e12, rel=0.02)
            assert gpu.predict_only == name.startswith(("mi3", "gaudi"))
            if name.endswith("gb"):  # also without its memory
                assert catalog.gpu(name.rpartition("-")[0]) == gpu


def test_geforce_and_rented_gpus_without_peer_access() -> None:
    assert {name for name in GPUS if not catalog.gpu(name).peer_to_peer} == {
        "a10g-24gb",
        "rtx-4090-24gb",
        "rtx-5090-32gb",
    }


def test_a_search_on_a_predict_only_device_is_refused() -> None:
    served = InferenceWorkload(input_length=128, output_length=128, concurrency=4)
    trained = TrainingWorkload(sequence_length=2048, global_batch_size=64)
    cluster = ClusterQuery(gpu="mi300x", num_gpus=8)
    training = Query(kind="training", model="llama-3-8b", cluster=cluster, training=trained)
    for query in (
        training,
        Query(kind="inference", model="llama-3-8b", cluster=cluster, inference=served),
    ):
        with pytest.raises(
            UnsupportedError, match=r"predict-only\. Use `hp-tool recommend`"
        ) as caught:
            resolve_search(query)
        assert caught.value.field == "cluster.gpu"


def test_precisions_follow_the_hardware() -> None:
    for name, lacking in {
        "mi300x": "mxfp8",
        "mi355x": "nvfp4",
        "4090": "mxfp8",
        "gaudi3": "fp16",
        "a10g": "fp8",
    }.items():
        assert lacking not in catalog.gpu(name).peak_flops_per_second
    assert "bf16" not in catalog.gpu("v100-sxm-32gb").peak_flops_per_second
    assert "fp8" not in catalog.gpu("a100-sxm-80gb").peak_flops_per_second
    assert "nvfp4" not in catalog.gpu("h100-sxm-80gb").peak_flops_per_second
    assert catalog.gpu("a100-sxm-80gb").peak_flops_per_second["bf16"] == 312e12


def test_each_node_type_makes_a_cluster(subtests: pytest.Subtests) -> None:
    for name in catalog.names("clusters"):
        with subtests.test(name=str(name)):
            node = catalog.node_type(name)
            assert node.source
            cluster = catalog.cluster(name)
            assert cluster.name == name
            assert cluster.gpu == catalog.gpu(node.gpu)
            assert cluster.num_gpus == (node.num_gpus or node.gpus_per_node)
            assert (
                cluster.inter_node_bandwidth_bytes_per_second
                == node.inter_node_bandwidth_bytes_per_second
            )


def test_gpu_and_count_take_the_usual_server() -> None:
    cluster = catalog.cluster(ClusterQuery(gpu="a100-sxm-80gb", num_gpus=1024))
    assert (cluster.num_nodes, cluster.gpus_per_node, cluster.nvlink_domain_size) == (128, 8, 8)
    assert cluster.inter_node_bandwidth_bytes_per_second == 25e9
    assert cluster.inter_node_latency_s == 5e-6
    assert cluster.name == "1024 x a100-sxm-80gb"


@pytest.mark.parametrize("gpus_per_node", [None, 8])
def test_less_than_a_server_is_one_node(gpus_per_node: int | None) -> None:
    cluster = catalog.cluster(
        ClusterQuery(gpu="h100-sxm-80gb", num_gpus=4, gpus_per_node=gpus_per_node)
    )
    assert (cluster.num_nodes, cluster.gpus_per_node, cluster.nvlink_domain_size) == (1, 4, 4)


def test_a_part_of_a_cluster_is_whole_nodes_or_an_equal_share_of_one() -> None:
    """Of three nodes of six: 1, 2 or 3 of one node, or one, two or all nodes."""
    found = catalog.cluster(ClusterQuery(gpu="h100-sxm-80gb", num_gpus=18, gpus_per_node=6))
    parts = (1, 2, 3, 6, 12, 18)
    assert tuple(n for n in range(1, 19) if found.divides_into(n)) == parts
    assert found.legal_counts() == parts


def test_what_a_query_says_wins_over_node_type_over_gpu() -> None:
    node = catalog.cluster(ClusterQuery(node_type="gcp-a3-highgpu-8g", num_gpus=16))
    assert node.inter_node_bandwidth_bytes_per_second == 12.5e9
    assert node.price_per_gpu_hour == 11.06
    said = catalog.cluster(
        ClusterQuery(
            node_type="gcp-a3-highgpu-8g",
            num_gpus=16,
            gpus_per_node=4,
            inter_node_bandwidth_bytes_per_second=1e9,
            inter_node_latency_s=1e-5,
            price_per_gpu_hour=0.0,
            name="mine",
        )
    )
    assert (said.name, said.num_nodes, said.price_per_gpu_hour) == ("mine", 4, 0.0)
    assert (said.inter_node_bandwidth_bytes_per_second, said.inter_node_latency_s) == (1e9, 1e-5)


def test_an_nvlink_domain_spans_hosts() -> None:
    rack = catalog.cluster("gb200-nvl72")
    assert (rack.num_gpus, rack.gpus_per_node, rack.nvlink_domain_size) == (72, 4, 72)
    assert catalog.cluster(ClusterQuery(gpu="gb200-nvl72", num_gpus=16)).nvlink_domain_size == 16


def test_one_own_gpu_is_a_mapping() -> None:
    gpu = catalog.gpu("h100-sxm-80gb")
    assert catalog.cluster(ClusterQuery(gpu=gpu, num_gpus=8)) == catalog.cluster(
        ClusterQuery(gpu=gpu.name, num_gpus=8)
    )


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"memory_bytes": 0}, "cluster.gpu.memory_bytes"),
        (
            {"nvlink_bandwidth_bytes_per_second": -1.0},
            "cluster.gpu.nvlink_bandwidth_bytes_per_second",
        ),
        ({"peak_flops_per_second": {"bf16": 0.0}}, "cluster.gpu.peak_flops_per_second.bf16"),
        ({"peak_flops_per_second": {}}, "cluster.gpu.peak_flops_per_second"),
        ({"power_w": float("nan")}, "cluster.gpu.power_w"),
    ],
)
def test_an_impossible_datasheet_is_refused(change: dict[str, Any], field: str) -> None:
    gpu = dataclasses.replace(catalog.gpu("h100-sxm-80gb"), **change)
    with pytest.raises(InputError) as caught:
        catalog.cluster(ClusterQuery(gpu=gpu, num_gpus=8))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("query", "field", "message"),
    [
        (
            ClusterQuery(gpu="a100-sxm-80gb", num_gpus=12),
            "cluster.num_gpus",
            "num_gpus 12 is not a multiple of gpus_per_node 8",
        ),
        (
            ClusterQuery(gpu="a100-sxm-80gb", num_gpus=0),
            "cluster.num_gpus",
            "from 1 to 1,048,576, got 0",
        ),
        (
            ClusterQuery(gpu="a100-sxm-80gb", num_gpus=8, gpus_per_node=-8),
            "cluster.gpus_per_node",
            "got -8",
        ),
        (
            ClusterQuery(gpu="a100-sxm-80gb"),
            "cluster.num_gpus",
            "num_gpus is required without node_type",
        ),
        (ClusterQuery(num_gpus=8), "cluster.gpu", "gpu or node_type is missing; set one of them"),
        (
            ClusterQuery(gpu="a100-sxm-80gb", node_type="dgx-h100"),
            "cluster.gpu",
            "dgx-h100 has h100-sxm-80gb, not 'a100-sxm-80gb'",
        ),
        (
            ClusterQuery(node_type="dgx-h100", num_gpus=32, nvlink_domain_size=12),
            "cluster.nvlink_domain_size",
            "nvlink_domain_size 12 is not a multiple of gpus_per_node 8",
        ),
        (
            ClusterQuery(gpu="cpu", num_gpus=2, price_per_gpu_hour=-1.0),
            "cluster.price_per_gpu_hour",
            "from 0 to",
        ),
    ],
)
def test_errors_name_field_value_and_mend(query: ClusterQuery, field: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        catalog.cluster(query)
    assert caught.value.field == field


def test_two_kinds_are_resolved_each_on_its_own() -> None:
    stages = (
        StageGpus(gpu="a100-sxm-80gb", num_gpus=24),
        StageGpus(gpu="h100-sxm-80gb", num_gpus=8),
    )
    found = catalog.cluster(
        ClusterQuery(stages=stages, nodes_per_leaf=2, network_oversubscription=2.0)
    )
    assert [(kind.gpu.name, kind.num_gpus, kind.num_nodes) for kind in found.kinds] == [
        ("a100-sxm-80gb", 24, 3),
        ("h100-sxm-80gb", 8, 1),
    ]
    assert all(
        (kind.nodes_per_leaf, kind.network_oversubscription) == (2, 2.0) for kind in found.kinds
    )
    assert found.num_gpus == 32
    assert found.inter_node_bandwidth_bytes_per_second == 25e9
    a100, h100 = (kind.gpu for kind in found.kinds)
    mean = 0.75 * a100.peak_flops_per_second["bf16"] + 0.25 * h100.peak_flops_per_second["bf16"]
    assert found.gpu.peak_flops_per_second["bf16"] == pytest.approx(mean)
    assert "fp8" not in found.gpu.peak_flops_per_second
    assert found.gpu.power_w == pytest.approx(0.75 * a100.power_w + 0.25 * h100.power_w)


def test_unknown_names_suggest_the_nearest() -> None:
    with pytest.raises(NotFoundError, match="did you mean 'h100-80gb'"):
        catalog.gpu("h100-80")
    with pytest.raises(NotFoundError, match="did you mean 'dgx-h100'") as caught:
        catalog.cluster("dgxh100")
    assert caught.value.field == "cluster"
    with pytest.raises(NotFoundError) as caught:
        catalog.cluster(ClusterQuery(gpu="a100", node_type="dgxh100"))
    assert caught.value.field == "cluster.node_type"
    with pytest.raises(NotFoundError) as caught:
        catalog.cluster(ClusterQuery(gpu="h100-80", num_gpus=8))
    assert caught.value.field == "cluster.gpu"
    with pytest.raises(NotFoundError, match="`hp-tool gpus` lists"):
        catalog.gpu("zzzzzzzz")


def test_names_and_aliases_are_unique() -> None:
    kinds: tuple[catalog.Kind, ...] = ("gpus", "clusters")
    for kind in kinds:
        names = [
            name.casefold()
            for entry in library.entries(kind)
            for name in (entry.name, *entry.aliases)
        ]
        assert len(names) == len(set(names))
