"""The measured rows in evidence/: they keep to the schema, say where they come from, and cannot
contradict themselves.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.accuracy.data import rows
from evidence import add, readme
from evidence.cases import training_case
from evidence.schema import KINDS, SERVING, TRAINING
from evidence.table import FILE_OF, FOLDER, RefusedError, as_csv, files, read

COLLECTED_DAYS = (
    "model,params,tokens,gpus,gpu,tflops_gpu,days,source\n"
    "GPT-3 175B,175e9,300e9,1024,A100,140,34,a report\n"
)
"""One row with the columns of its source."""
HEADER = (
    "source,model,gpu,num_gpus,sequence_length,global_batch_size,micro_batch_size,"
    "tensor_parallel_size,step_s,tokens_per_second_per_gpu,mfu"
)
RUN = "a report,llama-3-8b,h100-sxm-80gb,8,8192,128,1,2,11.9,11015,0.55"


def table(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "new.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_every_file_keeps_to_its_schema_and_every_row_names_its_table_and_source(kind: Any) -> None:
    paths = files(kind.name)
    assert paths
    for path in paths:
        listed = read(path, kind)
        assert path.read_text() == as_csv(listed, kind), "columns in the schema's order, as written"
        for row in listed:
            assert row["source"] and FILE_OF[row["table"]] == f"{kind.name}/{path.stem}"
            assert row["date"] or kind.name == "models"
            assert bool(row["date"]) == bool(row["date_is"])


def test_no_table_is_empty_and_the_whole_is_small() -> None:
    assert all(rows(FOLDER, name, excluded=True) for name in FILE_OF)
    sizes = [path.stat().st_size for path in FOLDER.rglob("*") if path.suffix in (".csv", ".md")]
    assert sum(sizes) < 3e6


def one(name: str, **cells: object) -> dict[str, Any]:
    (row,) = (
        row
        for row in rows(FOLDER, name, excluded=True)
        if all(row[column] == value for column, value in cells.items())
    )
    return dict(row)


def test_figures_are_those_of_the_sources() -> None:
    """Copied by hand from the pages that the rows name."""
    gpt3 = one("training_mlperf", run="v3.0 NVIDIA", num_gpus=512)
    assert (gpt3["step_s"], gpt3["step_s_p10"], gpt3["step_s_p90"]) == (12.07436, 12.039, 12.103)
    assert (gpt3["tensor_parallel_size"], gpt3["pipeline_parallel_size"]) == (4, 8)
    assert gpt3["date"] == "2023-06" and gpt3["gradient_precision"] == "bf16"
    paper = one("korthikanti2022_table5", run="1T", recompute="selective")
    assert (paper["step_s"], paper["mfu"], paper["hfu"]) == (71.49, 0.563, 0.57)
    assert one("korthikanti2022_table4", run="sequence_parallelism")["forward_s"] == 0.0072
    assert one("memory_b200_megatron", run="llama3_70b_tp2_pp1_dp4_l12_mbc4_cef")[
        "allocated_bytes"
    ] == pytest.approx(60.68 * 2**30)
    mpt = one("training_llm_foundry_fsdp", model="mpt-70b", num_gpus=64, micro_batch_size=8)
    assert (mpt["tokens_per_second"], mpt["micro_batch_size"], mpt["mfu"]) == (26274, 8, 0.5333)
    served = one("serving_as_started", run="DeepSeek/DeepSeek-R1#1")
    assert (served["ttft_s"], served["tpot_s"], served["output_tokens_per_second"]) == (
        pytest.approx(0.153),
        pytest.approx(0.00916),
        105.24,
    )
    queued = one(
        "inference_trtllm_throughput",
        model="llama-3.1-8b",
        gpu="h200-sxm-141gb",
        precision="fp8",
        input_length=128,
        output_length=128,
    )
    assert queued["output_tokens_per_second_per_gpu"] == 29526.04
    cache = one("kv_cache_counts", model="llama-3.1-70b")
    assert cache["gpu"] == "h100-sxm-80gb" and cache["kv_cache_tokens"] == 22096
    assert cache["weights_bytes"] == pytest.approx(67.7229 * 2**30)
    grpo = one("rl_nemo", framework_version="0.4", model="Llama-3.1-8B", mode="sync", num_gpus=16)
    assert (grpo["step_s"], grpo["rollouts_per_step"], grpo["colocated"]) == (97.7, 2048, True)


def test_a_folder_without_tables_gives_the_rows_of_the_repository(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder of kernel timings alone names where tables are read from."""
    (tmp_path / "ops").mkdir()
    assert rows(tmp_path, "narayanan2021_days") == rows(FOLDER, "narayanan2021_days")
    assert f"read from {FOLDER}" in capsys.readouterr().err


def test_a_folder_of_collected_tables_gives_the_same_rows() -> None:
    named = os.environ.get("HP_REFERENCE_DATA")
    if not named or not Path(named).is_dir():
        pytest.skip("HP_REFERENCE_DATA names no folder of collected tables")
    compared = 0
    for name in FILE_OF:
        collected, kept = (rows(folder, name, excluded=True) for folder in (Path(named), FOLDER))
        if len(collected) == len(kept):  # else the folder holds other runs
            assert collected == kept, name
            compared += 1
    assert compared > 15


def test_a_collected_table_is_read_by_its_own_columns(tmp_path: Path) -> None:
    (tmp_path / "narayanan2021_days.csv").write_text(COLLECTED_DAYS)
    (row,) = rows(tmp_path, "narayanan2021_days")
    assert row["value"] == 34.0 and not rows(tmp_path, "training_dgxc"), "skipped, not evidence's"


def test_a_folder_with_tables_gives_its_own_rows_alone(tmp_path: Path) -> None:
    (tmp_path / "figures").mkdir()
    header = "table,source,model,quantity,value,unit"
    line = "narayanan2021_days,a report,gpt-1t,days to train,3,d"
    (tmp_path / "figures/papers.csv").write_text(f"{header}\n{line}\n")
    (row,) = rows(tmp_path, "narayanan2021_days")
    assert row["value"] == 3.0 and not rows(tmp_path, "training_dgxc")


def test_a_row_of_settings_becomes_a_query_and_its_figure() -> None:
    case = training_case(one("training_mlperf", run="v3.0 NVIDIA", num_gpus=512))
    assert case.query.training is not None and case.query.parallel is not None
    assert case.step_s == 12.07436 and case.query.training.cross_entropy == "fused"
    assert case.query.parallel.virtual_pipeline_parallel_size == 12
    assert case.query.training.overlap is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("11.9", "5.9"), "tokens/s x 5.9 s is"),
        (("0.55", "1.2"), "mfu 1.2 is above 1"),
        (("8,8192,128,1,2", "8,8192,128,1,3"), "TP x PP x CP is 3, which does not divide"),
        (("128,1,2", "126,4,2"), "global_batch_size 126 is no multiple of"),
        (("128,1,2", "128,one,2"), "micro_batch_size: invalid literal"),
        (("a report,", ","), "source: missing"),
        (("11.9", "-1"), "step_s: -1 is not above zero"),
        (("llama-3-8b,", "llama-3-8b,x,"), "more cells than columns"),
    ],
)
def test_rows_that_cannot_be_right_are_refused_by_line(
    tmp_path: Path, change: tuple[str, str], reason: str
) -> None:
    path = table(tmp_path, HEADER, RUN, RUN.replace(*change))
    with pytest.raises(RefusedError) as refused:
        read(path, TRAINING)
    (problem,) = refused.value.problems
    assert problem.line == 3 and reason in problem.reason
    assert str(problem).startswith(f"{path}:3: ")


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"step_s_p10": "2", "step_s_p90": "1"}, "step_s_p10 2 is above step_s_p90 1"),
        ({"allocated_bytes": "2", "reserved_bytes": "1"}, "allocated_bytes 2 is above"),
        ({"num_gpus": "8", "data_parallel_size": "4"}, "TP x PP x CP x DP is 4, not num_gpus 8"),
        ({"mfu": "0.6", "hfu": "0.5"}, "mfu 0.6 is above hfu 0.5"),
        ({"date": "2026-13"}, "date: '2026-13' is not an ISO date"),
        ({"cuda_graphs": "yes"}, "cuda_graphs: 'yes' is neither true nor false"),
        ({"other": "a sentence"}, "other: 'a sentence' is not"),
        ({"speed": "3"}, "unknown columns of kind training: speed"),
    ],
)
def test_other_contradictions(tmp_path: Path, cells: dict[str, str], reason: str) -> None:
    names, values = ("source", "model", *cells), ("a report", "llama-3-8b", *cells.values())
    with pytest.raises(RefusedError, match=r"new\.csv:\d+: ") as refused:
        read(table(tmp_path, ",".join(names), ",".join(values)), TRAINING)
    assert reason in str(refused.value)


def test_serving_rows_cannot_emit_more_than_their_requests_do(tmp_path: Path) -> None:
    header = "source,model,engine,concurrency,tpot_s,output_tokens_per_second"
    fine, wrong = (f"a report,qwen3-32b,vllm,8,0.02,{rate}" for rate in ("390", "900"))
    with pytest.raises(RefusedError, match="900 tokens/s is more than 8 requests give"):
        read(table(tmp_path, header, fine, wrong), SERVING)


def test_an_excluded_row_may_contradict_itself(tmp_path: Path) -> None:
    path = table(tmp_path, f"{HEADER},excluded", f"{RUN.replace('0.55', '1.2')},printed so")
    assert [row["excluded"] for row in read(path, TRAINING)] == ["printed so"]


def test_the_page_of_columns_is_the_schema_s() -> None:
    text = readme.PAGE.read_text(encoding="utf-8")
    assert readme.generate_page(text) == text, "python -m evidence.readme"
    assert "`tokens_per_second_per_gpu` | number | tokens/s | Speed of one GPU" in text


def test_a_new_table_is_predicted_before_anything_is_fitted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = table(tmp_path, HEADER, RUN, RUN.replace("11.9,11015", "12.2,10744"))
    assert add.main([str(path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    figures = report["figures"]["step time"]
    assert report["rows"] == figures["rows"] == 2
    assert figures["median_error"] <= figures["worst_error"] < 0.5
    assert 0.0 <= figures["coverage"] <= 1.0 and "bias" in figures
    assert add.main([str(path)]) == 0
    assert "step time" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("llama-3-8b", "no-such-model"), "unknown model no-such-model"),
        (("h100-sxm-80gb", "x9000"), "unknown GPU x9000"),
        ((",8192,128,1,2,11.9,11015,", ",,128,1,2,11.9,,"), "no sequence_length"),
    ],
)
def test_a_row_that_is_no_query_is_counted_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: tuple[str, str], reason: str
) -> None:
    path = table(tmp_path, HEADER, RUN.replace(*change))
    assert add.main([str(path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["not_predicted"] == {reason: 1} and report["figures"] == {}


def test_a_setting_that_hp_tool_does_not_take_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = table(tmp_path, f"{HEADER},attention", f"{RUN},linear")
    assert add.main([str(path)]) == 0
    assert "training.attention: expected" in capsys.readouterr().out


def test_a_new_serving_table_is_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    header = (
        "source,model,gpu,engine,engine_version,precision,input_length,output_length,concurrency,"
        "tensor_parallel_size,pipeline_parallel_size,ttft_s,tpot_s"
    )
    run = "a report,Qwen/Qwen3-32B,h100-sxm-80gb,vllm,0.12.0,fp8,1024,128,16,2,1,0.4,0.02"
    assert add.main([str(table(tmp_path, header, run)), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["kind"] == "serving" and report["figures"]["time per output token"]["rows"] == 1


def test_a_new_table_with_an_impossible_row_is_refused(tmp_path: Path) -> None:
    path = table(tmp_path, HEADER, RUN, RUN.replace("0.55", "1.2"))
    done = subprocess.run(
        [sys.executable, "-m", "evidence.add", str(path)], capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.strip() == f"{path}:3: mfu 1.2 is above 1"
