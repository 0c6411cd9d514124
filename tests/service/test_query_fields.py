"""The fields of a query in a real browser: what they show is what the form sends, and the explorer
follows them.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import pytest
from fastapi.testclient import TestClient

from hp_tool.domain.inference import DisaggregationSpec, InferenceWorkload
from hp_tool.domain.parallel import ParallelConfig, ParallelQuery, Recompute
from hp_tool.domain.ports import Store
from hp_tool.domain.query import Query
from hp_tool.domain.workload import OverlapSpec, TrainingWorkload
from hp_tool.questions import schema
from hp_tool.questions.form_fields import form_fields
from hp_tool.questions.training.evaluate import resolve_configuration
from service.dashboard.ask_question import further_sections
from service.dashboard.new_search_form import to_query
from service.dashboard.page import read_form
from tests.service.detailed import DETAILED

if TYPE_CHECKING:
    from playwright.sync_api import Page

OF_EXPERTS = re.compile("expert|dispatch|two_batch|attention_data_parallel")
SPECS = {
    "training": TrainingWorkload,
    "training.overlap": OverlapSpec,
    "parallel": ParallelQuery,
    "inference": InferenceWorkload,
    "inference.disaggregated": DisaggregationSpec,
}
KEYS = [
    f"{section}.{key}"
    for section, spec in SPECS.items()
    for key in spec.__slots__
    if OF_EXPERTS.search(key)
]
SENT = (
    "(action) => new URLSearchParams(new "
    "FormData(document.querySelector(`form[action='${action}']`))).toString()"
)

KEPT = (
    "() => new URLSearchParams(new FormData(document.querySelector('[data-part=layout]')))"
    ".toString()"
)


def _in_order(query: Query) -> ParallelConfig:
    """The configuration of a query, the modules that it recomputes by name: the explorer's boxes
    have their own order.
    """
    config = resolve_configuration(query).config
    recompute = config.recompute
    if not isinstance(recompute, Recompute):
        return config
    return replace(
        config, recompute=replace(recompute, modules=tuple(sorted(recompute.modules or ())))
    )


@pytest.mark.parametrize("key", KEYS)
def test_every_key_of_experts_is_in_the_form_the_explorer_and_the_documents(key: str) -> None:
    serving = key.startswith("inference") or "redundant" in key or "attention_data" in key
    assert key in form_fields("inference" if serving else "training")
    asked = further_sections("inference" if serving else "training", several=False)
    assert key in {field.name for group in asked for field in group.fields}
    documents = "".join(
        (Path(__file__).parents[2] / "docs" / name).read_text()
        for name in ("queries.md", "serving.md")
    )
    assert key.rpartition(".")[2].removeprefix("prefill").removeprefix("decode") in documents


def configuration(http: TestClient, query: Any) -> dict[str, Any]:
    answer: dict[str, Any] = http.get(
        "/configurations.json", params={"query": json.dumps(query)}
    ).json()
    return answer


@pytest.mark.parametrize(
    "name",
    [
        name
        if name in ("rack", "experts", "unusual")
        else pytest.param(name, marks=pytest.mark.long)
        for name in DETAILED
    ],
)
def test_forms_send_what_they_were_opened_with(
    page: Page, server: str, http: TestClient, name: str
) -> None:
    query = DETAILED[name]
    expected, hrefs = schema.parse_query(query), configuration(http, query)
    page.goto(server + hrefs["form_href"])
    assert schema.parse_query(to_query(read_form(page.evaluate(SENT, "/searches/new")))) == expected
    page.goto(server + hrefs["explorer_href"])
    again = http.get(f"/explorer.json?{page.evaluate(KEPT)}").json()["view"]["query_text"]
    assert schema.parse_query(again).training == expected.training
    assert schema.parse_query(again).cluster == expected.cluster
    assert _in_order(schema.parse_query(again)) == _in_order(expected)


def test_fields_of_the_question_reach_the_search_and_errors_open_their_group(
    page: Page, server: str, store: Store
) -> None:
    values = {
        "model": "llama-3-8b",
        "cluster.gpu": "gb200-nvl72",
        "cluster.num_gpus": "72",
        "training.sequence_length": "4096",
        "training.global_batch_size": "72",
    }
    page.goto(f"{server}/explorer?{urlencode(values)}")
    page.get_by_text("Further settings").click()
    segment = page.get_by_label("GPUs per NVLink segment")
    assert not segment.is_visible()
    page.get_by_text("Precision and kernels").click()
    gradients = page.get_by_label("Gradient precision")
    assert gradients.locator("option").first.inner_text() == "framework's own"
    page.get_by_text("NVLink", exact=True).click()
    segment.fill("13")
    wrong = page.locator("[data-error='cluster.nvlink_segment_gpus']", has_text="multiple")
    wrong.wait_for()
    page.get_by_text("NVLink", exact=True).click()
    assert not segment.is_visible()
    gradients.select_option("bf16")  # the next answer opens the group again
    segment.wait_for()
    assert segment.get_attribute("aria-invalid") == "true"
    segment.fill("")
    page.locator("[aria-invalid]").wait_for(state="detached")
    page.locator("summary", has_text="Parallelism").click()
    page.locator("[name='parallel.recompute']").fill("none, selective layernorm+mlp")
    page.locator("[name='parallel.recompute']").press("Tab")
    page.wait_for_url("**parallel.recompute**")
    page.locator(".findings[aria-busy=false]").wait_for()
    page.get_by_role("link", name="Search with real runs").click()
    page.get_by_role("button", name="Start the search").click()
    page.locator("h1 + .state").wait_for()
    query = store.list_searches().items[0].query
    assert query["training"]["gradient_precision"] == "bf16"
    assert query["parallel"]["recompute"][0] == "none"
    assert query["parallel"]["recompute"][1]["modules"] == ["layernorm", "mlp"]
    page.get_by_role("link", name="Clone").click()
    page.get_by_role("link", name="Change the query").click()
    recompute = page.locator("#ask [name='parallel.recompute']")
    assert recompute.input_value() == "none, selective layernorm+mlp"


def test_the_explorer_follows_the_fields_of_its_groups(page: Page, server: str) -> None:
    page.goto(f"{server}/explorer")
    memory = (
        page.get_by_role("region", name="Predicted")
        .locator("div", has_text="Memory")
        .locator("dd")
        .first
    )
    before = memory.inner_text()
    page.get_by_role("combobox", name="Recomputation").select_option("selective")
    page.wait_for_url("**at.parallel.recompute=selective**")
    page.get_by_text("Recomputed modules", exact=True).click()
    page.get_by_role("checkbox", name="mlp").check()
    page.get_by_role("checkbox", name="layernorm").check()
    page.get_by_role("status").get_by_text("selective layernorm+mlp recomputation").wait_for()
    page.get_by_text("Further settings").click()
    page.get_by_text("Precision and kernels").click()
    page.get_by_label("Gradient precision").select_option("bf16")
    page.wait_for_url("**training.gradient_precision=bf16**")
    page.locator(".findings[aria-busy=false]").wait_for()
    assert memory.inner_text() != before and "at." not in page.url, "another question"
    page.get_by_text("Cluster", exact=True).click()
    page.get_by_label("GPUs per node").fill("4")
    page.wait_for_url("**cluster.gpus_per_node=4**")
    page.get_by_text("Other fields").click()
    page.get_by_label("Other query fields, as YAML").fill("training: {optimizer: muon}")
    page.get_by_label("Other query fields, as YAML").press("Tab")
    page.wait_for_url("**muon**")
    page.get_by_role("combobox", name="GPU", exact=True).select_option(label="h200-sxm-141gb")
    page.wait_for_url("**gpu=h200**")
    assert page.get_by_label("Gradient precision").input_value() == "bf16"
    assert "muon" in page.get_by_label("Other query fields, as YAML").input_value()
    assert "gpus_per_node=4" in page.url, "what is asked stays asked"


SCRIPT = (
    "A=(--num-layers 32 --hidden-size 4096)\ntorchrun --nproc-per-node 8 pretrain_gpt.py "
    '"${A[@]}" --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 '
    "--micro-batch-size 1 "
    "--global-batch-size 64 --bf16 --tensor-model-parallel-size 2 --vocab-size 32000 "
    "--position-embedding-type rope"
)


def _paste(page: Page, button: str) -> None:
    page.get_by_text("Check a launch script").click()
    part = page.locator("#import")
    part.get_by_label("Script or file").fill(SCRIPT)
    part.get_by_label("GPU model").fill("h100-sxm-80gb")
    part.get_by_text(button).click()


def test_a_launch_script_fills_the_form_or_is_shown_as_it_is(page: Page, server: str) -> None:
    """What the server reads of it opens as the form of a search that is compared with it; from the
    explorer, as it is.
    """
    page.goto(f"{server}/explorer")
    _paste(page, "Predict")
    page.wait_for_url("**/configurations?**")
    assert page.locator("h1").inner_text().startswith("TP 2 x PP 1 x DP 4")
    page.goto(f"{server}/explorer")
    _paste(page, "Search for a better layout")
    page.wait_for_url("**global_batch_size=64**")
    query = schema.parse_query(to_query(read_form(page.evaluate(SENT, "/searches/new"))))
    assert query.training is not None and query.training.global_batch_size == 64
    assert query.search.baseline is not None and query.search.baseline.tensor_parallel_size == 2
    assert query.parallel.tensor_parallel_size is None, "free: that is what the search is for"
    page.get_by_role("heading", name="Best predicted configuration").wait_for()
