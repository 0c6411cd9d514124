"""A question over several machines: its rows are the answers about each alone, and money and days
decide between them.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

import hp_tool
from hp_tool.cli.machine_tables import print_machines
from hp_tool.domain.bounds import Bounds, apply_bounds
from hp_tool.domain.prices import PRICED
from hp_tool.errors import InputError, NotFoundError, UnsupportedError
from hp_tool.questions import schema
from hp_tool.questions.answers import RecommendAnswer
from tests.command_line import hp_tool as command

H100, A100 = "h100-sxm-80gb", "a100-sxm-80gb"
OWN = {"gpu": H100, "num_gpus": 16, "price_per_gpu_hour": 2.0}
DEAR = {"gpu": H100, "num_gpus": 16, "price_per_gpu_hour": 5.0}
SLOW = {"gpu": A100, "num_gpus": 16, "price_per_gpu_hour": 1.5}
PARALLEL = {"pipeline_parallel_size": 1, "context_parallel_size": 1, "recompute": "none"}


def query(cluster: Any, **changes: Any) -> dict[str, Any]:
    asked: dict[str, Any] = {
        "kind": "training",
        "model": "llama-3-8b",
        "cluster": cluster,
        "training": {"sequence_length": 4096, "global_batch_size": 128, "total_tokens": 1e11},
        "parallel": PARALLEL,
    }
    return asked | changes


def ranked(cluster: Any, *, top: int = 10, **changes: Any) -> RecommendAnswer:
    return hp_tool.recommend(query(cluster, **changes), top=top)


def test_rows_are_the_answers_about_each_machine_alone() -> None:
    answer = ranked([OWN, SLOW, {"gpu": H100, "num_gpus": [8, 16], "price_per_gpu_hour": 3.0}])
    assert len(answer.recommendations) == 4
    for row in answer.recommendations:
        alone = query(row.set["cluster"])
        for path, value in row.set.items():
            if path != "cluster":
                schema.set_paths(alone, {path: value})
        (same,) = hp_tool.recommend(alone, top=1).recommendations
        assert row.parallel == same.parallel
        whole = hp_tool.estimate({**alone, "parallel": schema.to_dict(row.parallel)}).estimate
        assert row.estimate == whole
        assert whole.gpu_hours is not None and row.cost == whole.gpu_hours * row.price == whole.cost


def test_cost_decides_under_a_deadline_and_days_under_a_budget() -> None:
    free = ranked([OWN, DEAR, SLOW])
    assert [row.price for row in free.recommendations] == sorted(
        (2.0, 5.0, 1.5), key=lambda p: _row(free, p).cost
    )
    fast, slow = _row(free, 2.0).estimate.days, _row(free, 1.5).estimate.days
    assert fast is not None and slow is not None and fast < slow
    within = ranked([DEAR, SLOW, OWN], constraints={"max_days": (fast + slow) / 2})
    assert [row.price for row in within.recommendations] == [2.0, 5.0]
    budget = _row(free, 2.0).cost
    assert budget is not None
    cheap = ranked([DEAR, SLOW, OWN], constraints={"max_cost": 1.01 * budget})
    assert cheap.recommendations[0].price == 2.0 and 5.0 not in [
        row.price for row in cheap.recommendations
    ]


def _row(answer: RecommendAnswer, price: float) -> Any:
    return next(row for row in answer.recommendations if row.price == price)


def test_the_front_holds_what_no_other_beats_in_cost_and_days() -> None:
    answer = ranked([{"gpu": [H100, A100], "num_gpus": [8, 16, 32], "price_per_gpu_hour": 2.0}])
    rows = [(row.cost, row.estimate.days) for row in answer.recommendations]
    front = [(row.cost, row.estimate.days) for row in answer.pareto or ()]
    assert front == [
        one
        for one in sorted(rows)
        if not any(o != one and o[0] <= one[0] and o[1] <= one[1] for o in rows)
    ]
    assert 1 < len(front) < len(rows)


def test_machines_that_differ_in_price_alone_are_ranked_once() -> None:
    one, several = (
        ranked([OWN]),
        ranked([OWN, DEAR, OWN | {"name": "elsewhere", "grid_carbon_kg_per_kwh": 0.4}]),
    )
    assert several.space.legal == one.space.legal and len(several.recommendations) == 3


def test_an_open_number_of_devices_is_found_under_a_deadline() -> None:
    answer = ranked([{"gpu": H100, "price_per_gpu_hour": 2.0}], constraints={"max_days": 12.0})
    (row,) = answer.recommendations
    fewer = ranked(
        [{"gpu": H100, "num_gpus": row.set["cluster"]["num_gpus"] // 2}],
        constraints={"max_days": 12.0},
    )
    assert row.estimate.days <= 12.0 and not fewer.recommendations and fewer.nearest_misses
    assert answer.pareto and len(answer.pareto) > 1
    assert (
        0.5 < row.deadline_probability <= 1.0
        and row.days_interval[0] < row.estimate.days < row.days_interval[1]
    )


def test_priced_is_the_whole_list_and_one_s_own_prices(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prices").mkdir()
    mine = {
        "provider": "mine",
        "gpu": H100,
        "on_demand": 0.5,
        "date": "2026-11-01",
        "source": "a contract",
        "line": "0.50",
    }
    (tmp_path / "prices" / "mine.yaml").write_text(json.dumps(mine))
    monkeypatch.setenv("HP_CATALOG_DIR", str(tmp_path))
    answer = ranked({"node_type": PRICED, "num_gpus": 8}, top=40)
    first = answer.recommendations[0]
    assert (first.cluster, first.price, first.price_date) == ("mine", 0.5, "2026-11-01")
    assert {row.cluster for row in answer.recommendations} >= {
        "hyperstack-h100-sxm",
        "lambda-8x-h100-sxm",
    }
    of_one_kind = ranked({"node_type": PRICED, "gpu": H100, "num_gpus": 8}, top=40).recommendations
    assert [row.cluster for row in of_one_kind] == [
        row.cluster
        for row in answer.recommendations
        if row.preferred_estimate.provenance["gpu"] == H100
    ]
    aws = next(row for row in answer.recommendations if row.cluster == "aws-p5.48xlarge")
    assert aws.co2_kg == pytest.approx(aws.energy / 3.6e6 * 0.34348)


def test_a_network_that_nobody_stated_is_called_assumed() -> None:
    pod = {"node_type": PRICED, "gpu": H100, "num_gpus": [8, 16]}
    rows = ranked([pod], top=40).recommendations
    kinds = {row.cluster: row.set["cluster"].get("node_type") for row in rows}
    assert None in kinds.values() and len({*kinds.values()}) > 1, (
        "some offers name a machine with its network"
    )
    for row in rows:
        several = row.set["cluster"]["num_gpus"] > 8
        assert row.network_assumed == (several and kinds[row.cluster] is None)
        assert (row.network_bandwidth_bytes_per_second is not None) == several
    stated = ranked([pod | {"inter_node_bandwidth_bytes_per_second": 1e9}], top=40).recommendations
    assert not any(row.network_assumed for row in stated)
    assert {row.network_bandwidth_bytes_per_second for row in stated} == {None, 1e9}


def test_the_table_marks_an_assumed_network() -> None:
    asked = query({"node_type": PRICED, "gpu": H100, "num_gpus": [8, 16]})
    printed = command("recommend", "-", "--top=40", stdin=json.dumps(asked), COLUMNS="250").stdout
    rows = [
        line
        for line in printed.partition("Pareto front")[0].splitlines()
        if "hyperstack-h100-sxm" in line
    ]
    assert len(rows) == 2 and [" assumed" in row for row in rows] == [" 16 " in row for row in rows]
    assert "assumed: usual network of this GPU" in printed


def test_spot_needs_its_interruptions_and_they_cost_days() -> None:
    with pytest.raises(InputError, match="interruptions_per_node_day"):
        ranked({"node_type": PRICED, "num_gpus": 8, "market": "spot"})
    calm, rough = (
        ranked(
            {
                "node_type": PRICED,
                "num_gpus": 8,
                "market": "spot",
                "interruptions_per_node_day": rate,
            }
        )
        for rate in (0.0, 4.0)
    )
    assert {row.price for row in calm.recommendations} <= {2.00, 1.48}
    assert rough.recommendations[0].cost > calm.recommendations[0].cost
    assert rough.recommendations[0].estimate.effective_days > rough.recommendations[0].estimate.days


def test_a_power_cap_takes_time_and_saves_energy() -> None:
    whole, capped = (
        ranked([{**OWN, "power_cap_w": watts}]).recommendations[0] for watts in (700.0, 450.0)
    )
    assert capped.estimate.days > whole.estimate.days and capped.energy < whole.energy
    assert whole.estimate.days == ranked([OWN]).recommendations[0].estimate.days
    with pytest.raises(InputError, match="power_cap_w 900"):
        hp_tool.estimate(query({**OWN, "power_cap_w": 900.0}))
    with pytest.raises(UnsupportedError, match="mi300x"):
        hp_tool.estimate(query({"gpu": "mi300x-192gb", "num_gpus": 8, "power_cap_w": 500.0}))


def test_a_data_centre_emits_by_its_grid_and_its_effectiveness() -> None:
    plain = ranked([{**OWN, "grid_carbon_kg_per_kwh": 0.5}]).recommendations[0]
    cooled = ranked(
        [{**OWN, "grid_carbon_kg_per_kwh": 0.5, "power_usage_effectiveness": 1.2}]
    ).recommendations[0]
    assert plain.co2_kg == pytest.approx(
        plain.energy / 3.6e6 * 0.5
    ) and cooled.co2_kg == pytest.approx(1.2 * plain.co2_kg)


def test_a_service_is_asked_of_several_machines() -> None:
    load = {"input_length": 1000, "output_length": 200, "request_rate_per_second": 8.0}
    asked = {
        "kind": "inference",
        "model": "llama-3-8b",
        "inference": load,
        "targets": {"ttft_s": 1.0, "tpot_s": 0.05},
    }
    answer = hp_tool.recommend({**asked, "cluster": [{"gpu": [H100, A100, "l40s-48gb"]}]}, top=40)
    costs = [row.cost for row in answer.recommendations]
    assert costs == [row.price * row.set["cluster"]["num_gpus"] for row in answer.recommendations]
    tokens = [row.estimate.cost_per_million_output_tokens for row in answer.recommendations]
    assert tokens == sorted(tokens) and len(tokens) == 3


def test_other_questions_are_of_one_machine() -> None:
    with pytest.raises(InputError) as refused:
        hp_tool.estimate(query([OWN, SLOW]))
    assert (refused.value.code, refused.value.field) == ("several_machines", "cluster")
    with pytest.raises(InputError, match="num_gpus"):
        ranked([{"gpu": H100}])
    with pytest.raises(NotFoundError, match="unknown gpu"):
        ranked([{"gpu": "h1000", "num_gpus": 8}, {"gpu": "h1001", "num_gpus": 8}])
    with pytest.raises(NotFoundError, match="unknown gpu"):
        ranked([OWN, {"gpu": "h1000", "num_gpus": 8}])
    with pytest.raises(NotFoundError, match="nosuch"):
        ranked(["nosuch", OWN])
    answer = ranked([OWN, {**OWN, "num_gpus": 12, "name": "odd"}, OWN])
    assert len(answer.recommendations) == 1 and answer.rejections["invalid_input"] == 1
    (note,) = answer.not_ranked
    assert (note.cluster, note.code) == ("12 x odd", "invalid_input") and "12" in note.message


def test_what_no_throughput_lets_keep_the_limits_is_not_ranked() -> None:
    """1e11 tokens of 8e9 parameters are 4.8e21 FLOPs or more: at twice 989 TFLOP/s 674 hours of one
    device, so $1,348 at $2.
    """
    cheap, dear = OWN | {"name": "cheap"}, DEAR | {"name": "dear"}
    answer = ranked([cheap, dear], constraints={"max_cost": 100.0})
    assert answer.recommendations == () and len(answer.nearest_misses) == 2
    assert answer.nearest_misses[0].cluster == "cheap" and answer.not_ranked == ()
    alone = ranked([cheap], constraints={"max_cost": 100.0})
    assert alone.nearest_misses[0].parallel == answer.nearest_misses[0].parallel
    free = ranked([cheap])
    within = ranked(
        [cheap, dear | {"price_per_gpu_hour": 50.0}],
        constraints={"max_cost": 1.1 * free.recommendations[0].cost},
    )
    assert within.recommendations[0].estimate == free.recommendations[0].estimate
    assert [(each.cluster, each.code) for each in within.not_ranked] == [
        ("16 x dear", "target_missed")
    ]
    assert within.space.legal < 2 * free.space.legal


def test_a_request_that_costs_too_much_says_after_how_many_machines() -> None:
    def spent(bounds: Bounds) -> None:
        raise InputError("1 s of processor time were used up", code="request_too_costly")

    limits = Bounds(max_combinations=10**9, max_values=128, max_yaml_bytes=1, check=spent)
    message = r"^after 0 of 2 machines: 1 s of processor time were used up, or list fewer machines$"
    with apply_bounds(limits), pytest.raises(InputError, match=message) as refused:
        ranked([OWN, SLOW])
    assert (refused.value.code, refused.value.field, limits.questions) == (
        "request_too_costly",
        "cluster",
        2,
    )
    with (
        apply_bounds(limits),
        pytest.raises(InputError, match=r"cluster\.num_gpus lists 129 values"),
    ):
        ranked([{"gpu": H100, "num_gpus": list(range(1, 130))}])


def test_a_budget_that_nothing_keeps_costs_less_work_and_changes_no_miss() -> None:
    """What takes longer than the longest step in time is not acceptable, so that bounds may rule it
    out.
    """
    free = hp_tool.recommend(query(OWN), top=1)
    cost, step_s = (
        free.recommendations[0].preferred_estimate.cost,
        free.recommendations[0].preferred_estimate.time.step_s,
    )
    missed = hp_tool.recommend(query(OWN, constraints={"max_cost": 0.9 * cost}), top=1)
    assert (
        missed.recommendations == ()
        and missed.nearest_misses[0].preferred_estimate.time.step_s <= step_s
    )
    assert missed.space.legal <= 2 * free.space.legal


def test_a_market_of_a_machine_that_the_list_does_not_name_needs_its_figures() -> None:
    for cluster, missing in (
        ({"gpu": H100, "num_gpus": 16, "market": "reserved"}, "price_per_gpu_hour"),
        (
            {"node_type": "aws-p5.48xlarge", "market": "spot", "interruptions_per_node_day": 1.0},
            "price_per_gpu_hour",
        ),
        ({**OWN, "market": "spot"}, "interruptions_per_node_day"),
    ):
        with pytest.raises(InputError) as refused:
            hp_tool.estimate(query(cluster))
        assert (refused.value.code, refused.value.field) == ("missing_field", f"cluster.{missing}")
    assert (
        hp_tool.estimate(
            query({**OWN, "market": "spot", "interruptions_per_node_day": 1.0})
        ).estimate.goodput
        is not None
    )


def test_the_price_list_without_numbers_means_one_node_of_each() -> None:
    answer = ranked({"node_type": PRICED, "gpu": H100}, top=40)
    assert {row.set["cluster"]["num_gpus"] for row in answer.recommendations} == {8}
    names = {row.cluster for row in answer.recommendations}
    assert {
        "hyperstack-h100-sxm",
        "aws-p5.48xlarge",
    } <= names and "invalid_input" not in answer.rejections


def test_the_price_list_may_be_asked_for_one_node_type() -> None:
    answer = ranked({"gpu": PRICED, "node_type": "aws-p5.48xlarge", "num_gpus": 8}, top=40)
    assert {row.set["cluster"]["node_type"] for row in answer.recommendations} == {
        "aws-p5.48xlarge"
    }


def test_the_command_line_shows_money_days_and_the_front(tmp_path: Any) -> None:
    path = tmp_path / "query.json"
    path.write_text(json.dumps(query([OWN, SLOW], constraints={"max_days": 60.0})))
    shown = command("recommend", str(path), COLUMNS="160")
    assert shown.returncode == 0 and "cheapest within 60 days" in shown.stdout
    answer = json.loads(command("recommend", str(path), "--json").stdout)
    row = answer["recommendations"][0]
    assert f"{row['cost']:,.0f}" in shown.stdout and row["cluster"] in shown.stdout
    result = tmp_path / "result.json"
    result.write_text(json.dumps(answer))
    script = command("export", str(result), "--format", "megatron-lm", "--rank", "2")
    assert script.returncode == 0 and "a100" in script.stdout
    assert command("tune", str(path), "--plan").returncode == 2


@pytest.mark.parametrize(
    ("dates", "printed"),
    [
        ((None, None), None),
        (("2026-11-01", "2026-11-01"), "Prices are from 2026-11-01; the price list"),
        (("2026-11-03", "2026-11-01"), "Prices are from 2026-11-01 to 2026-11-03; the price list"),
    ],
)
def test_the_dates_of_prices_are_printed_once(
    dates: tuple[str | None, ...], printed: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = ranked([OWN, SLOW])
    rows = tuple(
        replace(row, price_date=date)
        for row, date in zip(answer.recommendations, dates, strict=True)
    )
    print_machines(
        replace(answer, recommendations=rows, pareto=None), schema.parse_query(query([OWN, SLOW]))
    )
    text = capsys.readouterr().out
    assert ("Prices are from" in text) is (printed is not None)
    assert printed is None or printed in text
