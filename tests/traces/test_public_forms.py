"""The forms in which public traces are written, by what their makers document; small files of each,
with what must be read of them worked out by hand. Times are microseconds.

torch 1.8 to 1.11 as its tutorials show it (categories with capitals, threads as text, no
distributedInfo); torch 1.13 and 2 as HolisticTraceAnalysis reads them (flows `ac2g`, copies of
annotations on the device); Megatron-LM's (groups, sizes); DeepSeek's profile data (no steps, DeepEP
beside DeepGEMM); ROCm's (Tensile, composable kernels, RCCL); and Chrome's bare list.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

import hp_tool
from hp_tool.traces.explain.explanation import Explanation

LINKS = ("tensor_parallel", "context_parallel", "expert_parallel", "pipeline_p2p", "data_parallel")
GEMM = "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_nn"
ELEMENTWISE = (
    "void at::native::vectorized_elementwise_kernel<4, "
    "at::native::CUDAFunctor_add<float>, at::detail::Array<char*, 3> >"
)
Event = dict[str, Any]


def explained(path: Path, content: object, *, packed: bool = False) -> Explanation:
    text = json.dumps(content).encode()
    path.write_bytes(gzip.compress(text) if packed else text)
    answer = hp_tool.explain(path)
    assert isinstance(answer, Explanation)
    assert sum(answer.critical.parts_s.values()) == pytest.approx(answer.step_s)
    return answer


def us(answer: Explanation, *parts: str) -> tuple[float, ...]:
    """Microseconds of parts on the critical rank."""
    return tuple(round(1e6 * answer.critical.parts_s.get(part, 0.0), 3) for part in parts)


class Modern:
    """Events as torch 1.13 and later write them."""

    def __init__(self, **names: str) -> None:
        self.runtime, self.launch = (
            names.get("runtime", "cuda_runtime"),
            names.get("launch", "cudaLaunchKernel"),
        )
        self.events: list[Event] = [
            {
                "name": "process_name",
                "ph": "M",
                "ts": 1000.0,
                "pid": 4711,
                "tid": 0,
                "args": {"name": "python"},
            },
            {
                "name": "thread_name",
                "ph": "M",
                "ts": 1000.0,
                "pid": 0,
                "tid": 7,
                "args": {"name": "stream 7 "},
            },
            {
                "ph": "X",
                "cat": "Trace",
                "ts": 1000.0,
                "dur": 9e6,
                "pid": "Spans",
                "tid": "PyTorch Profiler",
                "name": "PyTorch Profiler (0)",
                "args": {"Op count": 0},
            },
            {
                "name": "Iteration Start: PyTorch Profiler",
                "ph": "i",
                "s": "g",
                "pid": "Traces",
                "tid": "Trace PyTorch Profiler",
                "ts": 1000.0,
            },
        ]
        self.correlation = 100

    def step(self, number: int, start: float, length: float) -> None:
        name = f"ProfilerStep#{number}"
        at = {"ph": "X", "name": name, "ts": start, "dur": length}
        self.events.append(
            {
                **at,
                "cat": "user_annotation",
                "pid": 4711,
                "tid": 4711,
                "args": {"External id": 1, "Ev Idx": 0},
            }
        )
        self.events.append(
            {**at, "cat": "gpu_user_annotation", "pid": 0, "tid": 7, "args": {"External id": 1}}
        )

    def kernel(
        self,
        name: str,
        launched: float,
        start: float,
        length: float,
        *,
        stream: int = 7,
        **args: Any,
    ) -> None:
        self.correlation += 1
        common = {"correlation": self.correlation, "External id": self.correlation}
        self.events += [
            {
                "ph": "X",
                "cat": self.runtime,
                "name": self.launch,
                "pid": 4711,
                "tid": 4711,
                "ts": launched,
                "dur": 5.0,
                "args": {"cbid": 211, **common},
            },
            {
                "ph": "s",
                "id": self.correlation,
                "pid": 4711,
                "tid": 4711,
                "ts": launched,
                "cat": "ac2g",
                "name": "ac2g",
            },
            {
                "ph": "X",
                "cat": "kernel",
                "name": name,
                "pid": 0,
                "tid": stream,
                "ts": start,
                "dur": length,
                "args": {
                    "queued": 0,
                    "device": 0,
                    "context": 1,
                    "stream": stream,
                    "registers per thread": 64,
                    "grid": [8, 1, 1],
                    "block": [128, 1, 1],
                    "est. achieved occupancy %": 25,
                    **common,
                    **args,
                },
            },
            {
                "ph": "f",
                "id": self.correlation,
                "pid": 0,
                "tid": stream,
                "ts": start,
                "cat": "ac2g",
                "name": "ac2g",
                "bp": "e",
            },
        ]


def test_a_trace_of_torch_1_8_to_1_11(tmp_path: Path) -> None:
    """Two steps of 1,000 us; in each a kernel of 600 and, after a pause of 100, one of 200: 200 us
    nothing runs.
    """
    events: list[Event] = []
    for number in (1, 2):
        at = 1_000_000 + 1000 * (number - 1)
        events.append(
            {
                "ph": "X",
                "cat": "Operator",
                "name": f"ProfilerStep#{number}",
                "pid": 3254,
                "tid": "3254",
                "ts": at,
                "dur": 1000,
                "args": {
                    "Device": 3254,
                    "External id": number,
                    "Trace name": "PyTorch Profiler",
                    "Trace iteration": 0,
                },
            }
        )
        for n, (name, start, length) in enumerate(((GEMM, 100, 600), (ELEMENTWISE, 800, 200))):
            link = {"correlation": 10 * number + n, "external id": n}
            events += [
                {
                    "ph": "X",
                    "cat": "Runtime",
                    "name": "cudaLaunchKernel",
                    "pid": 3254,
                    "tid": "3280",
                    "ts": at + 20 + n,
                    "dur": 5,
                    "args": {"cbid": 211, "external ts": at, **link},
                },
                {
                    "ph": "X",
                    "cat": "Kernel",
                    "name": name,
                    "pid": 0,
                    "tid": "stream 7",
                    "ts": at + start,
                    "dur": length,
                    "args": {
                        "queued": 0,
                        "device": 0,
                        "context": 1,
                        "stream": 7,
                        "shared memory": 0,
                        **link,
                    },
                },
            ]
    document = {
        "schemaVersion": 1,
        "traceEvents": [
            *events,
            {
                "name": "Record Window End",
                "ph": "i",
                "s": "g",
                "ts": 1_002_000,
                "pid": "",
                "tid": "",
            },
        ],
    }
    answer = explained(tmp_path / "resnet50.pt.trace.json", document)
    assert (answer.steps, answer.marked, answer.critical_rank) == (2, True, 0)
    assert answer.step_s == pytest.approx(1e-3)
    assert us(answer, "compute", "overhead") == (800.0, 200.0)


def test_a_trace_as_holistic_trace_analysis_reads_them(tmp_path: Path) -> None:
    """Steps of 1,000 us on rank 3: computing from 100 to 500, an all-reduce of no recorded group
    from 400 to 800 on a stream of its own, 100 us of a copy from the host after it: 100 us are
    hidden, 300 us exposed, 200 us nothing runs.
    """
    trace = Modern()
    for number in (550, 551, 552):
        at = 1000.0 * (number - 549)
        trace.step(number, at, 1000.0)
        trace.kernel(GEMM, at + 10, at + 100, 400.0)
        name = "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)"
        trace.kernel(name, at + 20, at + 400, 400.0, stream=20)
        trace.events.append(
            {
                "ph": "X",
                "cat": "gpu_memcpy",
                "name": "Memcpy HtoD (Pinned -> Device)",
                "pid": 0,
                "tid": 7,
                "ts": at + 800,
                "dur": 100.0,
                "args": {
                    "device": 0,
                    "stream": 7,
                    "correlation": 9000 + number,
                    "bytes": 4096,
                    "memory bandwidth (GB/s)": 0.04,
                },
            }
        )
    document = {
        "schemaVersion": 1,
        "deviceProperties": [
            {
                "id": 0,
                "name": "NVIDIA A100-SXM4-40GB",
                "totalGlobalMem": 42505273344,
                "computeMajor": 8,
            }
        ],
        "distributedInfo": {"backend": "nccl", "rank": 3, "world_size": 8},
        "record_shapes": 1,
        "trace_id": "00112233",
        "traceEvents": trace.events,
        "traceName": "/tmp/rank-3.json.tmp",
    }
    answer = explained(tmp_path / "benchmark_result_1.json.gz", document, packed=True)
    assert (answer.steps, answer.marked, answer.critical_rank, answer.device) == (
        3,
        True,
        3,
        "NVIDIA A100-SXM4-40GB",
    )
    assert us(answer, "compute", "offload", "overhead") == (400.0, 100.0, 200.0)
    exposed = {part: seconds for part in LINKS if (seconds := us(answer, part)[0])}
    assert list(exposed.values()) == [300.0]
    (part,) = exposed
    assert answer.critical.hidden_s[part] == pytest.approx(100e-6)


def test_groups_and_sizes_of_megatron_s_collectives(tmp_path: Path) -> None:
    """Computing for 500, a tensor parallel all-reduce of 2 MiB in 100, an all-gather of 4 MiB in
    all over four data parallel ranks in 200, a reduce-scatter of 8 MiB over the same in 300.
    """
    trace = Modern()
    trace.step(10, 1000.0, 2000.0)
    trace.kernel(GEMM, 1010, 1100.0, 500.0)
    tensor = {
        "Process Group Name": "5",
        "Process Group Description": "TENSOR_MODEL_PARALLEL_GROUP",
        "Process Group Ranks": "[0, 1]",
    }
    data = {
        "Process Group Name": "9",
        "Process Group Description": "DATA_PARALLEL_GROUP_WITH_CP",
        "Process Group Ranks": "[0, 2, 4, 6]",
    }
    trace.kernel(
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        1020,
        1600.0,
        100.0,
        stream=24,
        **{
            "Collective name": "allreduce",
            "dtype": "BFloat16",
            "In msg nelems": 1 << 20,
            "Out msg nelems": 1 << 20,
            "Group size": 2,
            "In split size": "[]",
            "Out split size": "[]",
            **tensor,
        },
    )
    trace.kernel(
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        1030,
        1700.0,
        200.0,
        stream=28,
        **{
            "Collective name": "_allgather_base",
            "dtype": "BFloat16",
            "In msg nelems": 1 << 19,
            "Out msg nelems": 1 << 21,
            "Group size": 4,
            **data,
        },
    )
    trace.kernel(
        "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        1040,
        1900.0,
        300.0,
        stream=28,
        **{
            "Collective name": "_reduce_scatter_base",
            "dtype": "Float",
            "In msg nelems": 1 << 21,
            "Out msg nelems": 1 << 19,
            "Group size": 4,
            **data,
        },
    )
    groups = [
        {
            "pg_name": "0",
            "pg_desc": "default_pg",
            "backend_config": "cuda:nccl",
            "pg_size": 8,
            "ranks": [],
        },
        {
            "pg_name": "5",
            "pg_desc": "TENSOR_MODEL_PARALLEL_GROUP",
            "backend_config": "cuda:nccl",
            "pg_size": 2,
            "ranks": [0, 1],
        },
        {
            "pg_name": "9",
            "pg_desc": "DATA_PARALLEL_GROUP_WITH_CP",
            "backend_config": "cuda:nccl",
            "pg_size": 4,
            "ranks": [0, 2, 4, 6],
        },
    ]
    distributed = {
        "backend": "nccl",
        "rank": 0,
        "world_size": 8,
        "pg_count": 3,
        "pg_config": groups,
        "nccl_version": "2.21.5",
    }
    document = {
        "schemaVersion": 1,
        "distributedInfo": distributed,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 1_712_000_000_000_000_000,
        "traceEvents": trace.events,
    }
    answer = explained(tmp_path / "rank-0.json", document)
    assert us(answer, "compute", "tensor_parallel", "data_parallel") == (500.0, 100.0, 500.0)
    links = {(each.part, each.operation): each for each in answer.links}
    reduced, gathered, scattered = (
        links[("tensor_parallel", "all_reduce")],
        links[("data_parallel", "all_gather")],
        links[("data_parallel", "reduce_scatter")],
    )
    assert (reduced.ranks, gathered.ranks) == ((0, 1), (0, 2, 4, 6))
    # NCCL's bus bandwidth: 2 (n - 1) / n of an all-reduce's bytes, (n - 1) / n of all that is
    # gathered or scattered.
    assert reduced.bytes_per_second == pytest.approx(2 * 1 / 2 * (2 << 20) / 100e-6)
    assert gathered.bytes_per_second == pytest.approx(3 / 4 * (4 << 20) / 200e-6)
    assert scattered.bytes_per_second == pytest.approx(3 / 4 * (8 << 20) / 300e-6)


def test_a_forward_and_backward_chunk_of_deepseek_s_profiles(tmp_path: Path) -> None:
    """No steps, no groups: a combine (200 to 500) and a dispatch (700 to 1,000) run on a few SMs
    beside computing and attention (0 to 900): 500 of them are hidden, 100 exposed.
    """
    trace = Modern()
    trace.kernel(
        "void deep_gemm::fp8_gemm_kernel<4096u, 7168u, 128u, 128u, 128u, 1u, 8u, "
        "1u>(__nv_bfloat16*, float*)",
        0.0,
        2000.0,
        300.0,
    )
    trace.kernel(
        "void deep_ep::internode::combine<4, __nv_bfloat16, 2, cudaFuncAttributes>(int4*, float*, "
        "bool const*)",
        1.0,
        2200.0,
        300.0,
        stream=16,
    )
    trace.kernel(
        "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<192, 64, 64, 4> "
        ">(flash::Flash_fwd_params)",
        2.0,
        2300.0,
        300.0,
    )
    trace.kernel(
        "void deep_ep::internode::dispatch<false, 4, false, 131072, 32>(int4*, float*, long*)",
        3.0,
        2700.0,
        300.0,
        stream=16,
    )
    trace.kernel(GEMM, 4.0, 2600.0, 300.0)
    answer = explained(tmp_path / "train.json", {"schemaVersion": 1, "traceEvents": trace.events})
    assert (answer.steps, answer.marked) == (1, False)
    assert us(answer, "compute", "attention", "expert_parallel") == (600.0, 300.0, 100.0)
    assert answer.critical.hidden_s["expert_parallel"] == pytest.approx(500e-6)


def test_the_marked_training_step_of_deepseek_s_profile_data(tmp_path: Path) -> None:
    """Its train.json: whole microseconds since 1970, a step that the host alone marks, kernels of
    DeepSeek's own namespaces. On stream 7 nothing until 100, computing to 400, attention to 600, a
    kernel of unknown kind to 640, computing to 700 and from 900 to 950. Of the communication on
    stream 27 (200 to 500, 650 to 930) 200 are exposed: 700 to 900.
    """
    at = 1_740_461_679_470_813
    trace = Modern(runtime="cuda_driver", launch="cuLaunchKernel")
    trace.step(1, at, 1000)
    names = {
        "cast": "void cuda::per_token_cast_to_fp8_with_channels<__nv_bfloat16, 128, "
        "false>(__nv_bfloat16 const*, int)",
        "experts": "void "
        "cutlass::device_kernel<dpsk::grouped_gemm::cuda::m_grouped_fp8_ptp128c::GemmKernel>(int)",
        "attention": "void "
        "cutlass::device_kernel<flash::FlashAttnBwd<flash::CollectiveMainloopBwd<2> > >(int)",
        "unknown": "void cuda::reduce_fused_impl<__nv_bfloat16, false, false>(int4 const*, float "
        "const*, int const*)",
        "norm": "void layer_norm::ln_bwd_kernel<layer_norm::Kernel_traits<__nv_bfloat16> "
        ">(layer_norm::BwdParams)",
        "swiglu": "void "
        "cuda::swiglu_forward_backward_with_weight_impl<__nv_bfloat16>(__nv_bfloat16*)",
        "dispatch": "void dpsk::ep::internode::dispatch<false, 8, true, 8>(int4*, float*, long*, "
        "float*)",
        "notify": "void dpsk::ep::internode::cached_notify<false>(int, int, int, int, int*, int)",
        "combine": "void dpsk::ep::internode::combine<false, 8, __nv_bfloat16, 8, 2, 16, "
        "24>(int4*, float*)",
    }
    for name, start, length in (
        ("cast", 100, 50),
        ("experts", 150, 250),
        ("attention", 400, 200),
        ("unknown", 600, 40),
        ("norm", 640, 60),
        ("swiglu", 900, 50),
    ):
        trace.kernel(names[name], at + 10, at + start, length)
    for name, start, length in (
        ("dispatch", 200, 300),
        ("notify", 650, 150),
        ("combine", 800, 130),
    ):
        trace.kernel(names[name], at + 20, at + start, length, stream=27)
    operator = {"ph": "X", "cat": "cpu_op", "pid": 4711, "tid": 2571, "ts": at + 5, "dur": 85}
    operator |= {"name": "autograd::engine::evaluate_function: BackwardWithAuxiliaryLossBackward"}
    flow = {
        "ph": "s",
        "id": 2,
        "pid": 4711,
        "tid": 2571,
        "ts": at + 6,
        "cat": "fwdbwd",
        "name": "fwdbwd",
    }
    document = {
        "schemaVersion": 1,
        "deviceProperties": [
            {"id": number, "name": "NVIDIA H800", "numSms": 132} for number in range(8)
        ],
        "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 64},
        "traceEvents": [each for each in trace.events if each.get("cat") != "gpu_user_annotation"]
        + [operator, flow],
        "traceName": "traces/prof.json",
    }
    answer = explained(tmp_path / "train.json", document)
    assert (answer.steps, answer.marked, answer.workload, answer.device) == (
        1,
        True,
        "training",
        "NVIDIA H800",
    )
    assert answer.step_s == pytest.approx(950e-6)
    parts = ("compute", "attention", "expert_parallel", "unknown", "overhead")
    assert us(answer, *parts) == (410.0, 200.0, 200.0, 40.0, 100.0)
    assert answer.critical.hidden_s["expert_parallel"] == pytest.approx(380e-6)


def test_a_trace_of_rocm(tmp_path: Path) -> None:
    """A pause (100), Tensile's matmul (300), composable kernels' attention (200), RCCL's kernel for
    all collectives (100).
    """
    trace = Modern(launch="hipExtModuleLaunchKernel")
    trace.step(3, 1000.0, 1000.0)
    trace.kernel(
        "Cijk_Alik_Bljk_BBS_BH_Bias_HAS_SAV_UserArgs_MT256x256x64_MI16x16x1_SN_LDSB1_AFC1",
        1001,
        1100.0,
        300.0,
    )
    trace.kernel(
        "void ck_tile::kentry<256, 2, ck_tile::FmhaFwdKernel<ck_tile::BlockFmhaPipelineQRKSVS<...> "
        "> >",
        1002,
        1400.0,
        200.0,
    )
    trace.kernel(
        "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)",
        1003,
        1600.0,
        100.0,
        stream=3,
        **{
            "Collective name": "allreduce",
            "dtype": "BFloat16",
            "In msg nelems": 1 << 20,
            "Out msg nelems": 1 << 20,
            "Group size": 8,
        },
    )
    document = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "AMD Instinct MI300X"}],
        "traceEvents": trace.events,
    }
    answer = explained(tmp_path / "rocm.json", document)
    assert us(answer, "compute", "attention", "overhead") == (300.0, 200.0, 100.0)
    (link,) = answer.links
    assert (link.operation, link.bytes_per_second) == (
        "all_reduce",
        pytest.approx(2 * 7 / 8 * (2 << 20) / 100e-6),
    )


@pytest.mark.parametrize("form", ["list", "header last", "header with lists", "text numbers"])
def test_where_the_events_stand_makes_no_difference(tmp_path: Path, form: str) -> None:
    trace = Modern()
    trace.step(1, 1000.0, 1000.0)
    trace.kernel(GEMM, 1001, 1100.0, 600.0)
    document: Any = {"traceEvents": trace.events, "schemaVersion": 1}
    if form == "list":  # Chrome's array form
        document = trace.events
    elif form == "header with lists":
        lists = {
            "trace": [{"ph": "X", "cat": "kernel", "name": GEMM, "ts": 1, "dur": 5}],
            "with": {"traceEvents": [[], [{}]]},
        }
        document = {
            "schemaVersion": 1,
            "metadata": lists,
            "stackFrames": {},
            "samples": [],
            "traceEvents": trace.events,
        }
    elif form == "text numbers":  # a process and a thread may be a number or text
        document["traceEvents"] = [
            {
                **each,
                "pid": str(each["pid"]),
                "tid": f"stream {each['tid']}" if each.get("cat") == "kernel" else str(each["tid"]),
            }
            for each in trace.events
        ]
    answer = explained(tmp_path / "trace.json", document)
    assert (answer.steps, answer.marked) == (1, True)
    assert us(answer, "compute", "overhead") == (600.0, 100.0)  # it ends with its last kernel


@pytest.mark.parametrize(
    ("collective", "operation", "factor"),
    [
        ("allreduce", "all_reduce", 2 * 7 / 8),
        ("_allgather_base", "all_gather", 7 / 8),
        ("alltoallv", "all_to_all", 7 / 8),
        ("broadcast", "broadcast", 1.0),  # every byte passes each link once
    ],
)
def test_the_bandwidth_of_a_link_is_nccls_bus_bandwidth(
    tmp_path: Path, collective: str, operation: str, factor: float
) -> None:
    """2 MiB in 100 us on eight ranks."""
    trace = Modern()
    trace.step(1, 1000.0, 1000.0)
    trace.kernel(GEMM, 1001, 1100.0, 500.0)
    arguments = {
        "Collective name": collective,
        "dtype": "BFloat16",
        "In msg nelems": 1 << 20,
        "Out msg nelems": 1 << 20,
        "Group size": 8,
    }
    trace.kernel("ncclDevKernel_Generic_4", 1002, 1700.0, 100.0, stream=3, **arguments)
    document = {"schemaVersion": 1, "traceEvents": trace.events}
    (link,) = explained(tmp_path / "rank0.json", document).links
    assert (link.operation, link.bytes_per_second) == (
        operation,
        pytest.approx(factor * (2 << 20) / 100e-6),
    )
