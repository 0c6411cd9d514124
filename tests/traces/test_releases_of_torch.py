"""Forms that releases of torch and libraries gave their traces: times since 1970, torch's own
group, kernels without a rule.

Every trace is made here. Times are microseconds, and expectations are worked out by hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hp_tool.errors import InputError
from hp_tool.traces import read_traces
from hp_tool.traces.explain.explanation import Explanation, explain
from tests.command_line import hp_tool
from tests.traces.test_public_forms import ELEMENTWISE, GEMM, Modern, explained, us

EPOCH = 1_740_461_679_470_630.0
"""A day of 2025 in microseconds since 1970, as torch before 2.3 writes times."""
ALL_REDUCE = "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)"
SEND = "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)"
DEFAULT = {"Process Group Name": "0", "Process Group Description": "default_pg"}
BACKWARD = "void at::native::batch_norm_backward_kernel<float, float, float, int>(float const*)"


def write(folder: Path, name: str, **header: Any) -> Path:
    path = folder / name
    path.write_text(json.dumps({"schemaVersion": 1, **header}))
    return path


def test_times_since_1970_are_read_to_the_microsecond(tmp_path: Path) -> None:
    trace = Modern()
    trace.step(1, EPOCH, 1000.0)
    trace.kernel(GEMM, EPOCH + 10, EPOCH + 100, 600.0)
    trace.kernel(ELEMENTWISE, EPOCH + 20, EPOCH + 800, 200.0)
    answer = explained(tmp_path / "train.json", {"traceEvents": trace.events})
    assert us(answer, "compute", "overhead") == (800.0, 200.0)


def test_kernels_without_times_are_named_as_the_reason(tmp_path: Path) -> None:
    kernel = {"ph": "X", "cat": "kernel", "name": GEMM, "ts": 1, "dur": -1}
    with pytest.raises(InputError, match="none of its 2 kernels has a time") as error:
        read_traces([write(tmp_path, "trace.json", traceEvents=[kernel, kernel])])
    assert error.value.code == "no_times"


@pytest.mark.parametrize("listed", ["ranks", "all", "arguments"])
def test_plain_data_parallelism_names_the_rank_that_others_wait_for(
    tmp_path: Path, listed: str
) -> None:
    """Two ranks compute for 200 and 600, then reduce for 100: rank 0 waits for 400, rank 1 is the
    critical one.

    torch's own group is listed with its ranks, with none, which stands for all, or in the kernels'
    arguments.
    """
    paths = []
    for rank, busy in ((0, 200.0), (1, 600.0)):
        trace = Modern()
        for number in range(3):
            at = 1000.0 * number
            args = {
                **DEFAULT,
                "Collective name": "allreduce",
                "dtype": "Float",
                "In msg nelems": 10,
                "Group size": 2,
            }
            if listed == "arguments":
                args["Process Group Ranks"] = "[0, 1]"
            trace.step(number, at, 900.0)
            trace.kernel(GEMM, at + 5, at + 10, busy)
            trace.kernel(ALL_REDUCE, at + 6, at + 10 + busy, 710.0 - 10 - busy, stream=20, **args)
        info: dict[str, Any] = {"backend": "nccl", "rank": rank, "world_size": 2}
        if listed != "arguments":
            group = {
                "pg_name": "0",
                "pg_desc": "default_pg",
                "pg_size": 2,
                "ranks": [0, 1] if listed == "ranks" else [],
            }
            info["pg_config"] = [group]
        paths.append(
            write(tmp_path, f"rank{rank}.json", distributedInfo=info, traceEvents=trace.events)
        )
    answer = explain(read_traces(paths))
    assert answer.critical_rank == 1
    waits = [round(1e6 * rank.waits_s["data_parallel"], 3) for rank in answer.ranks]
    assert waits == [400.0, 0.0]
    assert [link.ranks for link in answer.links] == [(0, 1)] and answer.trace_query == {}


def test_kernels_of_no_rule_are_unknown_and_reported_with_their_share(tmp_path: Path) -> None:
    """600 of a matmul, 200 of a kernel that nobody knows, 100 of another, 100 nothing."""
    trace = Modern()
    trace.step(1, 1000.0, 1000.0)
    trace.kernel(GEMM, 1001, 1000.0, 600.0)
    trace.kernel("void acme::exchange_tokens<8>(int4*)", 1002, 1600.0, 200.0)
    trace.kernel("acme_finish", 1003, 1900.0, 100.0)
    answer = explained(tmp_path / "trace.json", {"traceEvents": trace.events})
    assert us(answer, "compute", "unknown", "overhead") == (600.0, 300.0, 100.0)
    assert answer.unknown_share == pytest.approx(0.3)
    assert [each.name for each in answer.unknown_kernels] == [
        "void acme::exchange_tokens<8>(int4*)",
        "acme_finish",
    ]
    (words,) = [each.text for each in answer.findings if "Unknown" in each.text]
    assert (
        words.startswith("Unknown kernels take 30% of the step")
        and "acme::exchange_tokens" in words
    )


def test_kernels_of_deepseek_s_own_dispatch_communicate(tmp_path: Path) -> None:
    """Of 1,000: a matmul (0 to 400), dispatch beside and after it (200 to 600), a barrier (700 to
    1,000).
    """
    trace = Modern()
    trace.step(1, 1000.0, 1000.0)
    trace.kernel(
        "void cutlass::device_kernel<dpsk::grouped_gemm::cuda::fp8_ptp128c::GemmKernel>(int)",
        1001,
        1000.0,
        400.0,
    )
    trace.kernel(
        "void dpsk::ep::internode::dispatch<false, 8, true, 8>(int4*, float*)",
        1002,
        1200.0,
        400.0,
        stream=27,
    )
    trace.kernel(
        "void dpsk::ep::internode::cached_notify<false>(int, int, int)",
        1003,
        1700.0,
        300.0,
        stream=27,
    )
    answer = explained(tmp_path / "train.json", {"traceEvents": trace.events})
    assert us(answer, "compute", "expert_parallel", "overhead") == (400.0, 500.0, 100.0)
    assert answer.critical.hidden_s["expert_parallel"] == pytest.approx(200e-6)
    assert [(each.operation, each.messages) for each in answer.links] == [("all_to_all", 2.0)]


def all_reduces(folder: Path, *, exposed: float) -> Explanation:
    """Two ranks that agree: a tensor-parallel all-reduce is exposed for this many of 1,000, the
    rest computes.
    """
    paths = []
    args = {
        "Collective name": "allreduce",
        "Process Group Name": "5",
        "Process Group Ranks": "[0, 1]",
        "Process Group Description": "TENSOR_MODEL_PARALLEL_GROUP",
    }
    for rank in range(2):
        trace = Modern()
        for number in range(2):
            at = 1000.0 * number
            trace.step(number, at, 999.0)
            trace.kernel(BACKWARD, at + 1, at, 1000.0 - exposed)
            trace.kernel(ALL_REDUCE, at + 2, at + 1000.0 - exposed, exposed, stream=20, **args)
        paths.append(
            write(
                folder, f"rank{rank}.json", distributedInfo={"rank": rank}, traceEvents=trace.events
            )
        )
    return explain(read_traces(paths))


def test_exposed_communication_is_named_even_if_all_ranks_agree(tmp_path: Path) -> None:
    (finding,) = all_reduces(tmp_path, exposed=630.0).findings
    assert finding.text.startswith("Tensor-parallel communication is exposed for 63% of the step")
    assert finding.seconds == pytest.approx(630e-6)
    assert all_reduces(tmp_path, exposed=90.0).findings == ()


def test_calls_tell_what_kernels_named_after_another_operation_do(tmp_path: Path) -> None:
    """Every kernel is called SendRecv; the calls that launch them are an all-to-all and an
    all-reduce of 4,000 floats.
    """
    trace = Modern()
    trace.step(1, EPOCH, 1000.0)
    trace.kernel(BACKWARD, EPOCH + 1, EPOCH, 300.0)
    for name, at, start in (("nccl:all_to_all", 10.0, 300.0), ("nccl:all_reduce", 30.0, 700.0)):
        span = {
            "ph": "X",
            "cat": "user_annotation",
            "pid": 4711,
            "tid": 4711,
            "ts": EPOCH + at,
            "dur": 15.0,
        }
        trace.events.append(
            {**span, "name": name, "args": {"Input Dims": [[4000]], "Input type": ["float"]}}
        )
        trace.kernel(SEND, EPOCH + at + 5, EPOCH + start, 300.0, stream=84)
    answer = explained(tmp_path / "trace.json", {"traceEvents": trace.events})
    assert us(answer, "expert_parallel", "data_parallel", "pipeline_p2p", "pipeline_bubble") == (
        300.0,
        300.0,
        0.0,
        0.0,
    )
    assert {(each.operation, each.size_bytes) for each in answer.links} == {
        ("all_to_all", 16e3),
        ("all_reduce", 16e3),
    }


@pytest.mark.parametrize(
    ("kernels", "workload"),
    [
        ((GEMM, "void vllm::paged_attention_v2_kernel<__nv_bfloat16, 128>(float*)"), "serving"),
        ((GEMM, "void flashinfer::BatchDecodeWithPagedKVCacheKernel<128>(float*)"), "serving"),
        ((GEMM, ELEMENTWISE), "inference"),
        ((GEMM, BACKWARD), "training"),
        ((GEMM, "void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<64>()"), "training"),
        ((ELEMENTWISE,), "unknown"),
    ],
)
def test_what_was_recorded_is_told_by_its_kernels(
    tmp_path: Path, kernels: tuple[str, ...], workload: str
) -> None:
    trace = Modern()
    for number, name in enumerate(kernels):
        trace.kernel(name, 100.0 * number, 100.0 * number, 90.0)
    path = write(tmp_path, "trace.json", traceEvents=trace.events)
    answer = json.loads(hp_tool("explain", str(path), "--json").stdout)
    named = [
        each["text"]
        for each in answer["findings"]
        if each["text"].startswith(("This is a serving trace", "This is an inference trace"))
    ]
    assert answer["workload"] == workload
    assert len(named) == (workload in ("serving", "inference"))


def test_copies_of_tensor_lists_mark_no_steps(tmp_path: Path) -> None:
    """Two _foreach_copy_ kernels beside a decode step of 900: they are no optimizer, and everything
    is one step.
    """
    copy = (
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous "
        "namespace)::"
        "TensorListMetadata<2>, at::native::(anonymous namespace)::UnaryOpFunctor<long, 2, 1, 1>, "
        "at::native::Copy<long, long>>"
    )
    trace = Modern()
    for start in (0.0, 10.0):
        trace.kernel(copy, start, start, 5.0)
    trace.kernel(GEMM, 20.0, 100.0, 900.0)
    answer = explained(tmp_path / "trace.json", {"traceEvents": trace.events})
    assert (answer.steps, answer.marked, answer.step_s) == (1, False, pytest.approx(1000e-6))
    assert us(answer, "optimizer", "compute") == (0.0, 910.0)
