"""Intervals of derived figures, at every interface that prints them: the ends of the base interval,
put through the derivation.

Days, GPU-hours and cost grow with the step; tokens per second, FLOP/s and their shares of the peak
shrink with it. So the high end of the step gives the high end of the cost and the low end of MFU.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from fastapi.testclient import TestClient

from hp_tool.domain.units import format_decimal
from hp_tool.wording import figures
from service.agents import figures as agents
from service.dashboard import formats
from tests.command_line import hp_tool as command

Ends = tuple[float, float]
PRICE = 3.0
QUERY: dict[str, Any] = {
    "kind": "training",
    "model": "llama-3-8b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 64, "price_per_gpu_hour": PRICE},
    "training": {"sequence_length": 8192, "global_batch_size": 256, "total_tokens": 1e11},
    "parallel": {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 1,
        "context_parallel_size": 1,
        "micro_batch_size": 1,
    },
}
SERVING: dict[str, Any] = {
    "kind": "inference",
    "model": "llama-3-8b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 8, "price_per_gpu_hour": PRICE},
    "inference": {"input_length": 1000, "output_length": 200, "concurrency": 64},
    "parallel": {"tensor_parallel_size": 1},
}
WITH_BASE = {
    "days",
    "effective_days",
    "calendar_days",
    "gpu_hours",
    "cost",
    "request_rate_per_second",
}
AGAINST_BASE = {"tokens_per_second_per_gpu", "mfu", "mfu_causal", "hfu", "model_tflops_per_gpu"}
AGAINST_BASE |= {"cost_per_million_output_tokens", "cost_per_million_input_tokens"}


def test_figures_vary_with_their_base_or_against_it(subtests: pytest.Subtests) -> None:
    """A base of 10 (seconds per step, or output tokens per second) in 8 to 20, which is not
    symmetric in logarithms.

    A figure of 40 in proportion to it is 40 x 0.8 to 40 x 2; one in inverse proportion is 40 / 2 to
    40 / 0.8.
    """
    for figure in (
        *figures.TRAINING,
        *agents.TRAINING,
        figures.DAYS,
        figures.REQUESTS,
        figures.PER_MILLION,
        figures.INPUT_PRICE,
    ):
        with subtests.test(figure=str(figure)):
            estimate: dict[str, Any] = dict.fromkeys((*WITH_BASE, *AGAINST_BASE, "energy"), 40.0)
            estimate |= {
                "time": {"step_s": 10.0},
                "output_tokens_per_second_per_gpu": 10.0,
                "memory": {"total_bytes": 40.0},
            }
            estimate |= {"cost_per_million_tokens": {"input": 40.0}}
            ends = {
                "step_s": [8.0, 20.0],
                "output_tokens_per_second_per_gpu": [8.0, 20.0],
                "memory_total_bytes": [30.0, 60.0],
            }
            expected = {
                **dict.fromkeys(WITH_BASE, (32.0, 80.0)),
                **dict.fromkeys(AGAINST_BASE, (20.0, 50.0)),
                "step_s": (8.0, 20.0),
                "memory_total_bytes": (30.0, 60.0),
                "energy": None,  # no interval is stated: a step that waits longer draws less power
            }[figure.name]
            assert figure.interval_in(estimate | {"intervals": ends}) == (
                expected and pytest.approx(expected)
            )


def derived(estimate: dict[str, Any], step_s: float) -> dict[str, float]:
    """Figures of QUERY's training if its step took `step_s`: 1e11 tokens in steps of 256 x 8,192,
    on 64 GPUs.
    """
    days = 1e11 / (256 * 8192) * step_s / 86_400
    calendar = days / (estimate["goodput"] or {"fraction": 1.0})["fraction"]
    return {
        "days": days,
        "effective_days": calendar,
        "gpu_hours": calendar * 24 * 64,
        "cost": calendar * 24 * 64 * PRICE,
        "tokens_per_second_per_gpu": 256 * 8192 / (64 * step_s),
        "mfu": estimate["model_tflops_per_gpu"]
        * 1e12
        * estimate["time"]["step_s"]
        / step_s
        / 989.4e12,
    }


def mapped(estimate: dict[str, Any], name: str) -> Ends:
    first, second = (derived(estimate, end)[name] for end in estimate["intervals"]["step_s"])
    return min(first, second), max(first, second)


@pytest.fixture(
    params=[{}, {"reliability": {"restart_s": 900.0}}], ids=["uninterrupted", "with failures"]
)
def query(request: pytest.FixtureRequest) -> dict[str, Any]:
    return QUERY | {"training": QUERY["training"] | request.param}


def test_json_text_http_page_and_agents_map_the_step(
    query: dict[str, Any], shared_http: TestClient, tmp_path: Path
) -> None:
    (row,) = shared_http.post("/v1/recommendations", json=query).json()["recommendations"][:1]
    estimate = row["estimate"]
    days, cost = mapped(estimate, "effective_days"), mapped(estimate, "cost")
    assert derived(estimate, estimate["time"]["step_s"])["mfu"] == pytest.approx(
        estimate["mfu"], rel=1e-3
    )
    assert (row["days_interval"], row["cost_interval"]) == (
        pytest.approx(list(days)),
        pytest.approx(list(cost)),
    )

    told = agents.recommendation(row)["figures"]
    for name in {
        "days",
        "effective_days",
        "gpu_hours",
        "cost",
        "tokens_per_second_per_gpu",
        "mfu",
    } & told.keys():
        assert told[name]["interval"] == pytest.approx(mapped(estimate, name), rel=1e-3), name

    path = tmp_path / "query.json"
    path.write_text(json.dumps(query))
    (printed,) = json.loads(command("recommend", str(path), "--json", "--top", "1").stdout)[
        "recommendations"
    ]
    assert (printed["days_interval"], printed["cost_interval"]) == (
        row["days_interval"],
        row["cost_interval"],
    )
    text = " ".join(command("recommend", str(path), COLUMNS="200").stdout.split())
    assert (
        f"days ({format_decimal(days[0])}-{format_decimal(days[1])} days), ${row['cost']:,.0f} "
        f"(${cost[0]:,.0f}-${cost[1]:,.0f})" in text
    )

    # Several machines: a table of the terminal, and the page.
    if "reliability" in query["training"]:
        return
    path.write_text(json.dumps(query | {"cluster": [query["cluster"]]}))
    text = " ".join(command("recommend", str(path), COLUMNS="240").stdout.split())
    assert (
        f" {cost[0]:,.0f}-{cost[1]:,.0f} " in text
        and f" {format_decimal(days[0])}-{format_decimal(days[1])} " in text
    )
    asked = {
        "model": "llama-3-8b",
        "cluster.node_type": "priced",
        "cluster.gpu": "h100-sxm-80gb",
        "cluster.num_gpus": "64",
        "cluster.price_per_gpu_hour": str(PRICE),
        "training.sequence_length": "8192",
        "training.global_batch_size": "256",
        "training.total_tokens": "1e11",
        **{f"parallel.{name}": str(value) for name, value in query["parallel"].items()},
    }
    page = shared_http.get("/explorer", params=asked).text
    assert f"{formats.dollars(cost[0])} – {formats.dollars(cost[1])}" in page
    assert f"{formats.number(days[0])} – {formats.number(days[1])}" in page


def test_a_size_maps_the_step_of_its_training(shared_http: TestClient) -> None:
    asked = {
        "model": "llama-3-8b",
        "cluster": QUERY["cluster"],
        "days": 7.0,
        "reliability": {"restart_s": 900.0},
    }
    sizing = shared_http.post("/v1/sizings", json=asked).json()["sizing"]
    estimate = sizing["recommendation"]["estimate"]
    step_s = estimate["time"]["step_s"]
    told = agents.sizing(sizing)["figures"]
    assert {"days", "effective_days", "gpu_hours", "cost"} <= told.keys()
    for name, figure in told.items():
        ends = [sizing[name] / step_s * end for end in estimate["intervals"]["step_s"]]
        assert figure["interval"] == pytest.approx(ends, rel=1e-3), name


def dollars_per_million(tokens_per_second_per_gpu: float) -> float:
    return PRICE / 3600 / tokens_per_second_per_gpu * 1e6


def test_serving_maps_its_throughput_and_its_latencies(shared_http: TestClient) -> None:
    """Requests per second are tokens per second x 8 GPUs / 200 tokens; a GPU-hour is $3.

    A request waits for its first token and then for 199 more: both latencies' low ends give the low
    end of the sum.
    """
    estimate = shared_http.post("/v1/estimates", json=SERVING).json()["estimate"]
    intervals = estimate["intervals"]
    low, high = intervals["output_tokens_per_second_per_gpu"]
    latency = [
        first + 199 * each
        for first, each in zip(intervals["ttft_s"], intervals["tpot_s"], strict=True)
    ]
    told = agents.estimate(estimate)["figures"]
    assert told["request_rate_per_second"]["interval"] == pytest.approx(
        [low * 8 / 200, high * 8 / 200], rel=1e-3
    )
    assert told["request_latency_s"]["interval"] == pytest.approx(latency, rel=1e-3)
    # Input and output share a device's time in a fixed proportion.
    for name in ("input", "output"):
        price = estimate["cost_per_million_tokens"][name]
        throughput = estimate["output_tokens_per_second_per_gpu"]
        ends = [price * throughput / high, price * throughput / low]
        assert told[f"cost_per_million_{name}_tokens"]["interval"] == pytest.approx(ends, rel=1e-3)


def test_the_page_of_machines_maps_the_price_of_tokens(shared_http: TestClient) -> None:
    asked = {
        "kind": "inference",
        "cluster.node_type": "priced",
        "cluster.gpu": "h100-sxm-80gb",
        "cluster.num_gpus": "8",
        "cluster.price_per_gpu_hour": str(PRICE),
    }
    row = shared_http.get("/explorer.json", params=asked).json()["machines"]["rows"][0]
    (text,) = parse_qs(urlsplit(row["configuration"]["href"]).query)["query"]
    estimate = shared_http.post("/v1/estimates", content=text).json()["estimate"]
    low, high = estimate["intervals"]["output_tokens_per_second_per_gpu"]
    assert row["per_million_tokens"] == pytest.approx(
        dollars_per_million(estimate["output_tokens_per_second_per_gpu"])
    )
    assert row["per_million_interval"] == pytest.approx(
        [dollars_per_million(high), dollars_per_million(low)]
    )
    ends = " – ".join(map(formats.dollars, row["per_million_interval"]))
    assert ends in shared_http.get("/explorer", params=asked).text


@pytest.mark.parametrize(
    ("predicted", "figure"),
    [
        (
            {"step_s": 2.0, "calibrated_step_s": 1.5, "calibrated_step_s_interval": [1.2, 1.9]},
            (1.5, [1.2, 1.9]),
        ),
        ({"step_s": 2.0}, (2.0, None)),
    ],
)
def test_agents_report_the_calibrated_step_of_a_run(
    predicted: dict[str, Any], figure: tuple[float, Any]
) -> None:
    trial = {
        "number": 0,
        "state": "succeeded",
        "parallel": {},
        "predicted": predicted,
        "measurement": None,
        "cause": None,
    }
    told = agents.run(trial)["predicted_step_s"]
    assert (told["value"], told["interval"]) == figure
