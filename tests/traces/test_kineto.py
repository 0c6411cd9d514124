"""Traces of torch.profiler: every form that releases wrote, and files that are none."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path

import numpy as np
import pytest

from hp_tool.errors import InputError
from hp_tool.traces import files, json_stream, read_traces
from hp_tool.traces.json_stream import TraceStream
from hp_tool.traces.messages import Messages
from hp_tool.traces.names import Names, table
from hp_tool.traces.timeline import KINDS, RankEvents, timeline
from hp_tool.traces.timeline.events import COLLECTIVES, Group
from hp_tool.traces.timeline.use import matmul_flops_per_second
from tests.timeline.made import training, write

OLD = [
    # Categories, names and arguments as torch 1.x wrote them (the form of HolisticTraceAnalysis'
    # test data).
    {
        "ph": "X",
        "cat": "Runtime",
        "name": "cudaLaunchKernel",
        "tid": 9,
        "ts": 10,
        "dur": 4,
        "args": {"correlation": 1},
    },
    {
        "ph": "X",
        "cat": "Runtime",
        "name": "cudaLaunchKernel",
        "tid": 9,
        "ts": 15,
        "dur": 4,
        "args": {"correlation": 2},
    },
    {
        "ph": "X",
        "cat": "Kernel",
        "name": "ampere_fp16_s16816gemm_fp16_128x64",
        "pid": 0,
        "tid": 7,
        "ts": 20,
        "dur": 30,
        "args": {"stream": 7, "correlation": 1},
    },
    {
        "ph": "X",
        "cat": "Kernel",
        "name": "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)",
        "pid": 0,
        "tid": 13,
        "ts": 40,
        "dur": 25,
        "args": {"stream": 13, "correlation": 2},
    },
    {
        "ph": "X",
        "cat": "Memcpy",
        "name": "Memcpy HtoD (Pageable -> Device)",
        "tid": 7,
        "ts": 70,
        "dur": 5,
        "args": {},
    },
    {
        "ph": "X",
        "cat": "user_annotation",
        "name": "ProfilerStep#551",
        "pid": 9,
        "tid": 9,
        "ts": 5,
        "dur": 90,
        "args": {},
    },
    {"ph": "i", "s": "t", "name": "[memory]", "pid": 9, "tid": 9, "ts": 6, "args": {"Bytes": 512}},
]


def written(folder: Path, value: object, name: str = "trace.json") -> Path:
    path = folder / name
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


@pytest.mark.parametrize("wrapped", [True, False])
def test_categories_of_older_releases_and_a_bare_list_are_read(
    tmp_path: Path, wrapped: bool
) -> None:
    (rank,) = read_traces([written(tmp_path, {"traceEvents": OLD} if wrapped else OLD)])
    assert [KINDS[kind] for kind in rank.kind] == ["matmul", "collective", "copy_host"]
    assert np.round(1e6 * (rank.launch_s[:2] - rank.start_s[:2])).tolist() == [
        -10,
        -25,
    ] and np.isnan(rank.launch_s[2])
    line = timeline([rank])
    parts_us = {
        name: round(1e6 * seconds, 3)
        for name, seconds in line.splits[0][0].parts_s.items()
        if seconds
    }
    # The step ends with its last launched kernel; nothing says whose collective it is, and flat
    # buffers are gradients.
    assert parts_us == {"compute": 30.0, "data_parallel": 15.0, "overhead": 15.0}
    assert round(1e6 * line.splits[0][0].hidden_s["data_parallel"], 3) == 10.0


def test_arguments_of_collectives_say_group_operation_and_bytes(tmp_path: Path) -> None:
    rank = read_traces(write(training()[:1], tmp_path, packed=True))[0]
    groups = {group.part: group.ranks for group in rank.groups}
    assert groups == {"tensor_parallel": (0, 1), "data_parallel": (0, 2)}
    sizes = {
        COLLECTIVES[each]: size
        for each, size in zip(rank.collectives.operation, rank.collectives.size_bytes, strict=True)
    }
    assert sizes == {"all_reduce": 2 * 2**22, "reduce_scatter": 2 * 2**24}
    assert rank.device == "NVIDIA H100 80GB HBM3" and len(rank.steps_s) == 4


@pytest.mark.parametrize(
    ("base_ns", "apart_ms"),
    [
        (
            (1_700_000_000_000_000_000, 1_700_000_000_002_000_000),
            3.0,
        ),  # 2 ms later, and its events 1 ms after that
        ((None, None), 1.0),  # releases without baseTimeNanoseconds: `ts` alone
    ],
)
def test_ranks_are_on_the_clock_of_the_first(
    tmp_path: Path, base_ns: tuple[int | None, int | None], apart_ms: float
) -> None:
    """An event is at baseTimeNanoseconds + ts. The second rank records the same events, 1,000 us
    later by `ts`.
    """
    paths = []
    for rank, base in enumerate(base_ns):
        later = [each | {"ts": each["ts"] + 1000 * rank} for each in OLD]  # type: ignore[operator]
        header = {} if base is None else {"baseTimeNanoseconds": base}
        paths.append(written(tmp_path, {**header, "traceEvents": later}, f"rank{rank}.json"))
    first, second = read_traces(paths)
    for name in ("start_s", "end_s", "launch_s", "steps_s"):
        difference_ms = 1e3 * (getattr(second, name) - getattr(first, name))
        assert difference_ms[~np.isnan(difference_ms)] == pytest.approx(apart_ms, abs=1e-3), name


def test_steps_are_found_where_none_is_marked(tmp_path: Path) -> None:
    ranks = training()
    marked = timeline(read_traces(write(ranks, tmp_path)))
    for rank in ranks:
        rank.events = [each for each in rank.events if not each["name"].startswith("ProfilerStep")]
    line = timeline(read_traces(write(ranks, tmp_path)))
    lengths = [np.diff(spans)[:, 0] for spans in line.windows_s]
    assert (
        line.marked and [len(each) for each in lengths] == [3] * 4
    )  # before the first update nothing says where it began
    expected = np.median(np.diff(marked.windows_s[0])[:, 0])
    assert np.median(lengths[0]) == pytest.approx(expected, rel=0.02)


def test_matmuls_of_recorded_shapes_are_counted(tmp_path: Path) -> None:
    calls = [
        ("aten::mm", [[8, 4], [4, 2]]),
        ("aten::addmm", [[2], [8, 4], [4, 2]]),
        ("aten::bmm", [[3, 8, 4], [3, 4, 2]]),
    ]
    events = [
        {
            "ph": "X",
            "cat": "cpu_op",
            "name": name,
            "tid": 1,
            "ts": 5,
            "dur": 1,
            "args": {"Input Dims": shapes},
        }
        for name, shapes in calls
    ]
    (rank,) = read_traces([written(tmp_path, {"traceEvents": [*OLD, *events]})])
    assert rank.flops[:, 1].tolist() == [128.0, 128.0, 384.0]


def test_the_rate_of_matmuls_counts_the_first_kernel_of_an_unmarked_recording() -> None:
    """By hand: 60 and 40 FLOPs in two matmuls of a second each are 50 FLOP/s, whatever else runs.
    The recording counts as one step, which begins with the first call.
    """
    start = np.array([0.0, 1.0, 2.0])
    events = RankEvents(
        rank=0,
        start_s=start,
        end_s=start + 1.0,
        kind=np.array([KINDS.index(name) for name in ("matmul", "elementwise", "matmul")]),
        launch_s=start,
        thread=np.zeros(3, dtype=np.int64),
        flops=np.array([[0.0, 60.0], [2.0, 40.0]]),
        on_device=False,
    )
    assert matmul_flops_per_second(timeline([events]), row=0) == 50.0


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("[" * 100_000, "nesting"),
        ('{"traceEvents": [{"args": ' + '{"a":' * 50_000, "nesting"),
        ('{"traceEvents": [{"ts": ' + "9" * 5_000 + "}]}", "number"),
        ('{"traceEvents": [{"ts": NaN}]}', "number"),
        ('{"traceEvents": [{"ph": "X"', "cut_off"),
        ('{"traceEvents": [', "cut_off"),
        ('{"traceEvents": [}]}', "syntax"),
        ('{"other": 1}', "no_trace"),
        ('"text"', "no_trace"),
        ("", "cut_off"),
    ],
)
def test_what_is_no_trace_is_refused_with_what_was_wrong(
    tmp_path: Path, text: str, code: str
) -> None:
    with pytest.raises(InputError) as error:
        read_traces([written(tmp_path, text)])
    assert error.value.code == code and "trace.json" in error.value.message


def test_numbers_and_types_that_no_trace_has_are_passed_over(tmp_path: Path) -> None:
    strange = [
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1e300, "dur": 1},
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1, "dur": -5},
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": True, "dur": 1},
        {"ph": "X", "cat": "kernel", "name": ["gemm"], "ts": 1, "dur": 1},
        {"ph": "X", "cat": {"kernel": 1}, "name": "gemm", "ts": 1, "dur": 1},
        {
            "ph": "X",
            "cat": "kernel",
            "name": "ncclDevKernel_AllReduce",
            "ts": 2,
            "dur": 1,
            "args": [1],
        },
        {
            "ph": "X",
            "cat": "kernel",
            "name": "ncclDevKernel_AllReduce",
            "ts": 3,
            "dur": 1,
            "args": {
                "Process Group Ranks": "[0, 1, ...]",
                "In msg nelems": "many",
                "dtype": 7,
                "correlation": 10**30,
            },
        },
        {
            "ph": "X",
            "cat": "cpu_op",
            "name": "aten::mm",
            "ts": 3,
            "dur": 1,
            "args": {"Input Dims": [[10**30], 5]},
        },
        {
            "ph": "X",
            "cat": "user_annotation",
            "name": "ProfilerStep#" + "9" * 50,
            "ts": 3,
            "dur": 1,
        },
        7,
        None,
        [],
    ]
    header = {
        "distributedInfo": {"rank": -1, "pg_config": [{"pg_desc": "TENSOR", "ranks": "[...]"}, 4]},
        "deviceProperties": 3,
    }
    (rank,) = read_traces([written(tmp_path, {**header, "traceEvents": strange})])
    assert (
        len(rank.start_s) == 2
        and np.isnan(rank.collectives.size_bytes).all()
        and not len(rank.steps_s)
    )


def test_what_unpacks_to_far_more_than_traces_do_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    spaces = b" " * (files.MIN_CHECKED_BYTES + 10 * json_stream.CHUNK)
    path.write_bytes(gzip.compress(b"[" + spaces))
    with pytest.raises(InputError, match=r"unpacks to .* times its size") as error:
        read_traces([path])
    assert error.value.code == "zip_bomb"
    path.write_bytes(gzip.compress(b"[]")[:-4])
    with pytest.raises(InputError, match="damaged"):
        read_traces([path])


def test_bounds_of_size_and_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hp_tool.traces.columns.MAX_EVENTS", 1)
    with pytest.raises(InputError, match="Profile fewer steps"):
        read_traces([written(tmp_path, OLD)])
    monkeypatch.setattr("hp_tool.traces.files.MAX_BYTES", 100)
    with pytest.raises(InputError, match="larger than"):
        read_traces([written(tmp_path, OLD)])
    with pytest.raises(InputError, match="Cannot read"):
        read_traces([tmp_path / "none.json"])
    with pytest.raises(InputError, match="1 to 256"):
        read_traces([])


def test_a_rank_is_given_once_and_known_by_trace_name_or_place(tmp_path: Path) -> None:
    paths = [written(tmp_path, OLD, name) for name in ("worker.json", "x_rank_7.json")]
    assert [each.rank for each in read_traces(paths)] == [0, 7]
    with pytest.raises(InputError, match="rank 7"):
        read_traces([paths[1], written(tmp_path, OLD, "rank7.json")])


def test_values_that_lie_across_chunks_are_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_stream, "CHUNK", 7)
    content = {
        "baseTimeNanoseconds": 12345678901,
        "other": 1,
        "traceEvents": [{"n": n, "text": 'é{["}]'} for n in range(20)],
    }
    content["distributedInfo"] = [1, {"b": 2}]
    stream = TraceStream(io.BytesIO(json.dumps(content, ensure_ascii=False).encode()), name="trace")
    assert [each["n"] for each in stream] == list(range(20))
    assert stream.header == {"baseTimeNanoseconds": 12345678901, "distributedInfo": [1, {"b": 2}]}


def test_names_of_kernels_have_their_class(subtests: pytest.Subtests) -> None:
    for name, kind in [
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT", "matmul"),
        (
            "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1",
            "matmul",
        ),
        (
            "void "
            "cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_nn_align8>",
            "matmul",
        ),
        ("Cijk_Alik_Bljk_BBS_BH_Bias_HAS_SAV_UserArgs_MT256x256x32", "matmul"),
        (
            "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3i_128x128x128_4x1x1",
            "attention",
        ),
        ("void flash::compute_dq_dk_dv_1colblock", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", "attention"),
        ("attn_fwd.kd", "attention"),
        (
            "void "
            "cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::GroupProblemShape<...>>>",
            "experts",
        ),
        ("void permute_kernel<__nv_bfloat16>", "experts"),
        ("void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float>>", "optimizer"),
        ("void deep_ep::internode::dispatch<false, 8>", "collective"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "collective"),
        ("gloo:all_reduce", "collective"),
        ("Memcpy DtoH (Device -> Pinned)", "copy_host"),
        ("Memset (Device)", "copy_device"),
        ("void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel", "elementwise"),
        ("triton_poi_fused_add_mul_silu_0", "elementwise"),
    ]:
        with subtests.test(name=str(name), kind=str(kind)):
            assert KINDS[Names().kernel(name)] == kind


@pytest.mark.parametrize(
    ("description", "part"),
    [
        ("TENSOR_MODEL_PARALLEL_GROUP", "tensor_parallel"),
        ("DATA_PARALLEL_GROUP_WITH_CP", "data_parallel"),
        ("EXPERT_DATA_PARALLEL_GROUP", "data_parallel"),
        ("EXPERT_MODEL_PARALLEL_GROUP", "expert_parallel"),
        ("EXPERT_TENSOR_PARALLEL_GROUP", "tensor_parallel"),
        ("CONTEXT_PARALLEL_GROUP", "context_parallel"),
        ("PIPELINE_MODEL_PARALLEL_GROUP", "pipeline_p2p"),
        ("mesh_tp", "tensor_parallel"),
        ("mesh_dp_shard", "data_parallel"),
        ("default_pg", None),
    ],
)
def test_groups_have_their_part(description: str, part: str | None) -> None:
    assert Names().group(description) == part


def test_every_rule_names_its_source() -> None:
    sections = table()
    rules = [
        *sections["kernels"],
        *sections["operators"],
        *sections["groups"],
        *sections["phases"],
        sections["steps"],
    ]
    assert len(rules) > 15 and all(each["source"] for each in rules)


@pytest.mark.parametrize(
    ("shape", "part"), [([8192], "data_parallel"), ([128, 64], "tensor_parallel")]
)
def test_a_flat_tensor_of_gloo_is_of_gradients_and_a_shaped_one_of_activations(
    shape: list[int], part: str
) -> None:
    listed = {
        each: Group(part=each, ranks=ranks, name=each)
        for each, ranks in (("data_parallel", (0, 2)), ("tensor_parallel", (0, 1)))
    }
    messages = Messages(names=Names())
    messages.add_host(0, "gloo:all_reduce", {"Input Dims": [shape], "Input type": ["float"]})
    collectives, (group,) = messages.finish(listed)
    assert (group.part, group.ranks) == (part, listed[part].ranks)
    assert collectives.size_bytes.tolist() == [4.0 * 8192]
