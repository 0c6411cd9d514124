"""A comparison says first which is faster, by how much, and which does not fit; and says one ratio
once.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
from fastapi.testclient import TestClient

from hp_tool.questions import schema
from hp_tool.questions.training.evaluate import resolve_configuration
from hp_tool.questions.training.ratio import step_ratio
from hp_tool.wording.ratios import measured_ratio_words
from service.dashboard.verdict import Speed, recommended_index
from tests.service.every_page import LLAMA, SERVING

PIPELINED: dict[str, Any] = LLAMA | {
    "parallel": {"tensor_parallel_size": 8, "pipeline_parallel_size": 4, "recompute": "full"}
}
QUICK: dict[str, Any] = LLAMA | {
    "parallel": {"tensor_parallel_size": 8, "pipeline_parallel_size": 4}
}
TOO_LARGE: dict[str, Any] = LLAMA | {"parallel": {"tensor_parallel_size": 1}}


def compared(http: TestClient, first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    page: dict[str, Any] = http.get(
        "/compare.json", params={"first": json.dumps(first), "second": json.dumps(second)}
    ).json()
    assert page["error"] is None
    return page


def known(query: dict[str, Any]) -> Any:
    configuration = resolve_configuration(schema.parse_query(query))
    return configuration.problem, configuration.estimate(with_fixes=False)


def test_a_ratio_is_known_better_than_either_step() -> None:
    one, other = known(QUICK), known(PIPELINED)
    ratio = step_ratio(one, other)
    assert ratio is not None
    factor, (low, high) = ratio
    assert factor == other[1].time.step_s / one[1].time.step_s > 1.0
    assert low < factor < high and math.isclose(low * high, factor**2)
    alone = [
        math.log(end[1] / end[0]) for end in (each[1].intervals.step_s for each in (one, other))
    ]
    assert math.log(high / low) < math.hypot(*alone), "errors that both share cancel"
    back = step_ratio(other, one)
    assert (
        back is not None
        and math.isclose(back[0], 1.0 / factor)
        and math.isclose(back[1][0], 1.0 / high)
    )
    elsewhere = step_ratio(
        one, known(PIPELINED | {"cluster": {"gpu": "h200-sxm-141gb", "num_gpus": 64}})
    )
    assert elsewhere is not None and elsewhere[1][1] / elsewhere[1][0] > high / low, (
        "of two machines nothing cancels"
    )


def test_the_verdict_comes_first(shared_http: TestClient) -> None:
    page = compared(shared_http, QUICK, PIPELINED)
    step = next(row for row in page["rows"] if row["name"] == "Step time")
    match = re.fullmatch(
        r"Use TP 8 x PP 4 x DP 2, recompute none: "
        r"TP 8 x PP 4 x DP 2, recompute full is (\d+)% slower than TP 8 x PP 4 x DP 2, recompute "
        r"none \(\+(\d+)% to \+(\d+)%\)\.",
        page["verdict"],
    )
    assert match is not None, page["verdict"]
    percent, low, high = map(int, match.groups())
    assert percent == round(100 * step["changes"][1]) and low < percent < high
    speed = page["speeds"][1]
    assert page["speeds"][0] is None and speed["factor"] == 1.0 + step["changes"][1]
    assert [round(100 * (end - 1.0)) for end in speed["interval"]] == [low, high]
    back = compared(shared_http, PIPELINED, QUICK)["verdict"]
    assert "% faster than TP 8 x PP 4 x DP 2, recompute full (" in back
    unfit = compared(shared_http, TOO_LARGE, QUICK)
    assert re.fullmatch(
        r"Use TP 8 x PP 4 x DP 2: "
        r"TP 1 x PP 1 x DP 64 does not fit; TP 8 x PP 4 x DP 2 is \d+% slower than TP 1 x PP 1 x "
        r"DP 64 would be \(\+\d+% to \+\d+%\)\.",
        unfit["verdict"],
    )
    text = shared_http.get(
        "/compare", params={"first": json.dumps(TOO_LARGE), "second": json.dumps(QUICK)}
    ).text
    assert text.index("does not fit") < text.index("Settings that differ")
    assert unfit["recommended"] == 1
    assert compared(shared_http, TOO_LARGE, TOO_LARGE)["recommended"] is None
    served = compared(shared_http, SERVING, SERVING | {"parallel": {"tensor_parallel_size": 8}})[
        "verdict"
    ]
    assert "TP 8 x 1 replica is " in served, served


def test_a_configuration_is_recommended_only_if_it_is_clearly_faster() -> None:
    def speed(factor: float, interval: tuple[float, float] | None) -> Speed:
        return Speed(factor=factor, interval=interval)

    nothing_runs = ["does not fit", "does not fit"]
    for unfit, relative, expected in (
        (["", ""], speed(1.2, (1.1, 1.3)), 0),
        (["", ""], speed(0.8, (0.7, 0.9)), 1),
        (["", ""], speed(1.1, (0.9, 1.4)), None),
        (["", ""], None, None),
        (["does not fit", ""], speed(1.2, (1.1, 1.3)), 1),
        (nothing_runs, speed(1.2, (1.1, 1.3)), None),
    ):
        assert recommended_index(unfit, [None, None], [None, relative]) == expected
    three = [None, speed(0.8, (0.7, 0.9)), speed(0.85, (0.75, 0.95))]
    assert recommended_index(["", "", ""], [None] * 3, three) is None, "two are alike"


def test_the_range_is_called_narrower_only_if_it_is(shared_http: TestClient) -> None:
    elsewhere = PIPELINED | {"cluster": {"gpu": "h200-sxm-141gb", "num_gpus": 64}}
    served = SERVING | {"parallel": {"tensor_parallel_size": 8}}
    for first, second, narrower in (
        (QUICK, PIPELINED, True),
        (QUICK, elsewhere, False),
        (SERVING, served, False),
    ):
        page = compared(shared_http, first, second)
        assert ("narrower than the interval of either" in page["range_note"]) == narrower
        assert ("combines the intervals of both" in page["range_note"]) != narrower
        text = shared_http.get(
            "/compare", params={"first": json.dumps(first), "second": json.dumps(second)}
        ).text
        assert page["range_note"] in text


def test_settings_are_written_as_the_command_line_takes_them(shared_http: TestClient) -> None:
    modules = {"granularity": "selective", "modules": ["core_attn", "mlp"]}
    parallel = QUICK["parallel"] | {
        "recompute": modules,
        "context_parallel_size": 8,
        "context_parallel_communication": "a2a+p2p",
    }
    parallel |= {
        "pipeline_parallel_size": 1,
        "hierarchical_context_parallel_sizes": [2, 4],
        "tensor_parallel_size": 1,
    }
    page = compared(shared_http, QUICK, QUICK | {"parallel": parallel})
    differences = {each["path"]: each["values"] for each in page["differences"]}
    name, value = "parallel.recompute", json.loads(differences["parallel.recompute"][1])
    assert value["granularity"] == "selective" and value["modules"] == ["core_attn", "mlp"]
    assert differences["parallel.hierarchical_context_parallel_sizes"] == ["–", "[2, 4]"]
    again = schema.parse_query(QUICK | {"parallel": QUICK["parallel"] | {"recompute": value}})
    assert schema.to_dict(again.parallel.recompute) == value, name


def test_figures_in_one_ratio_are_one_row(shared_http: TestClient) -> None:
    rows = {row["name"]: row for row in compared(shared_http, QUICK, PIPELINED)["rows"]}
    assert (
        not rows["Step time"]["repeats"]
        and not rows["Tokens/s per GPU"]["repeats"]
        and not rows["Memory"]["repeats"]
    )
    assert rows["MFU"]["repeats"] and rows["Cost"]["repeats"] and rows["Training"]["repeats"]
    assert not rows["HFU"]["repeats"], "recomputation works more"


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (1.004, "as fast as TP 8, measured"),
        (0.996, "as fast as TP 8, measured"),
        (1.17, "17% slower than TP 8, measured"),
        (0.83, "17% faster than TP 8, measured"),
        (4.0, "4.0 times as slow as TP 8, measured"),
        (0.25, "4.0 times as fast as TP 8, measured"),
    ],
)
def test_what_was_measured_is_compared_in_words(factor: float, words: str) -> None:
    assert measured_ratio_words(factor, "TP 8") == words
