"""`hp-tool estimate` and `recommend` for queries of kind inference."""

from __future__ import annotations

import json

import pytest

from tests.command_line import Ended, hp_tool

QUERY = """
kind: inference
model: llama-3.1-8b
cluster: {gpu: h100-sxm-80gb, num_gpus: 2}
inference: {input_length: 1024, output_length: 256, concurrency: 32, engine: trtllm}
"""


def run(*arguments: str, query: str) -> Ended:
    return hp_tool(*arguments, stdin=query)


@pytest.mark.parametrize(
    ("task", "shown"), [("estimate", "output tokens/s per GPU"), ("recommend", "TTFT")]
)
def test_people_get_tables_and_programs_json(task: str, shown: str) -> None:
    table = run(task, "-", query=QUERY)
    assert table.returncode == 0 and shown in table.stdout
    answer = json.loads(run(task, "-", "--json", query=QUERY).stdout)
    assert answer["status"] == "ok"


def test_a_missed_target_exits_3() -> None:
    found = run("estimate", "-", query=QUERY + "targets: {tpot_s: 0.0001}\n")
    assert (
        found.returncode == 3
        and "target_missed" in found.stdout
        and "How to fix it" in found.stdout
    )
    assert run("recommend", "-", query=QUERY + "targets: {tpot_s: 0.0001}\n").returncode == 3


def test_bad_input_exits_2() -> None:
    found = run("estimate", "-", query=QUERY.replace("trtllm", "nothing"))
    assert found.returncode == 2 and "inference.engine" in found.stderr


EXPERTS = """
kind: inference
model: deepseek-v3
cluster: {gpu: h800-sxm-80gb, num_gpus: 144}
inference: {input_length: 4096, output_length: 512, concurrency: 4096, precision: fp8, engine: sglang}
"""  # noqa: E501


def test_experts_over_nodes_say_their_second_copies() -> None:
    sizes = (
        "tensor_parallel_size=1",
        "expert_parallel_size=144",
        "attention_data_parallel_size=144",
    )
    flags = [word for size in sizes for word in ("--set", f"parallel.{size}")]
    table = run("estimate", "-", *flags, query=EXPERTS)
    assert table.returncode == 0 and "EP 144, 32 redundant experts" in table.stdout
    found = json.loads(run("estimate", "-", "--json", *flags, query=EXPERTS).stdout)["estimate"]
    assert found["parallel"]["redundant_experts"] == 32 and found["expert_imbalance"] > 1.0
    uneven = run("estimate", "-", *flags, "--set", "parallel.redundant_experts=31", query=EXPERTS)
    assert uneven.returncode == 3 and "remove redundant_experts" in " ".join(uneven.stdout.split())


def test_pools_of_experts_are_sized_and_shown() -> None:
    sizes = (
        "{decode_expert_parallel_size: 64, decode_attention_data_parallel_size: 64, "
        "prefill_tensor_parallel_size: 1}"
    )
    flags = ("--set", f"inference.disaggregated={sizes}")
    shown = run("recommend", "-", *flags, query=EXPERTS).stdout.partition("separate pools")[2]
    assert "EP 64" in shown and "attention" in shown
    rows = json.loads(run("recommend", "-", "--json", *flags, query=EXPERTS).stdout)[
        "disaggregated"
    ]
    assert {row["decode"]["expert_parallel_size"] for row in rows} == {64}
    assert all(row["prefill"]["tensor_parallel_size"] == 1 for row in rows)


def test_an_offline_load_needs_no_concurrency() -> None:
    offline = QUERY.replace("concurrency: 32", "load: {arrival: offline}")
    assert offline != QUERY
    table = run("estimate", "-", query=offline)
    found = json.loads(run("estimate", "-", "--json", query=offline).stdout)["estimate"]
    closed = json.loads(run("estimate", "-", "--json", query=QUERY).stdout)["estimate"]
    assert (
        table.returncode == 0
        and found["output_tokens_per_second_per_gpu"] > closed["output_tokens_per_second_per_gpu"]
    )
    assert run("estimate", "-", "--set", "inference.concurrency=8", query=offline).returncode == 2


OPEN = """
kind: inference
model: llama-3.1-8b
cluster: {gpu: h100-sxm-80gb, num_gpus: 2}
inference: {input_length: 2000, output_length: 300, engine: vllm}
"""


def shown(task: str, *settings: str) -> str:
    flags = [word for each in settings for word in ("--set", each)]
    return " ".join(run(task, "-", *flags, query=OPEN).stdout.split())


def test_the_quantile_that_a_target_limits_is_in_headline_and_table() -> None:
    by_rate = ("inference.request_rate_per_second=8", "targets.ttft_p95_s=0.9")
    answer = shown("recommend", *by_rate)
    assert "(target 900.0 ms), " in answer and "TTFT p95" in answer
    assert "TTFT p95: target 900.0 ms" in answer
    assert " per request, p99 " in shown("estimate", by_rate[0], "targets.e2e_p99_s=60")


def test_loads_have_units_and_say_whether_they_were_asked() -> None:
    missed = ("parallel.tensor_parallel_size=1", "targets.ttft_p95_s=0.3")
    by_rate = (*missed, "inference.request_rate_per_second=20")
    for task in ("estimate", "recommend"):
        answer = shown(task, *by_rate)
        assert "ighest load: " in answer and "requests/s within the targets" in answer
    in_flight = shown("estimate", *missed, "inference.concurrency=2000")
    assert "requests in flight within the targets." in in_flight
    assert "Highest load that fits: " in shown("estimate", missed[0])
    assert "Highest sustained load: " in shown(
        "estimate", missed[0], "inference.load.arrival=poisson"
    )
    assert "Highest load within the targets: " in shown("estimate", *missed)
    one = shown("estimate", missed[0], "inference.concurrency=1")
    assert "1 request runs at once" in one and "Load: 1 request in flight" in one
    assert "(1 user with one request" in one and "per GPU-hour: $" in one
