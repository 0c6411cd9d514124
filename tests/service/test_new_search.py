"""The page that starts a search: it accepts every query, shows the API's answer and the cost, and
reports errors.
"""

import re
import shlex
from typing import Any
from urllib.parse import urlencode

import pytest
import yaml
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import escape

from hp_tool.domain.ports import Store
from hp_tool.errors import InputError
from hp_tool.questions import schema
from hp_tool.questions.form_fields import form_fields
from service.dashboard.ask_question import OF_ONE, SENTENCE
from service.dashboard.new_search_form import to_query, to_values
from service.dashboard.page import read_form

Query = dict[str, Any]
FILLED = {
    "kind": "training",
    "model": "llama-3-70b",
    "cluster.gpu": "h100-sxm-80gb",
    "cluster.num_gpus": "64",
    "cluster.gpus_per_node": "8",
    "training.sequence_length": "8192",
    "training.global_batch_size": "128",
}
SERVED = {
    "kind": "inference",
    "model": "qwen3-32b",
    "cluster.gpu": "h200-sxm-141gb",
    "cluster.num_gpus": "8",
    "inference.input_length": "4000",
    "inference.output_length": "1000",
    "inference.concurrency": "64",
    "inference.precision": "fp8",
    "targets.ttft_s": "1.0",
    "targets.tpot_s": "0.03",
}
EVIL = "<script>alert('x')</script>"


def post(http: TestClient, path: str, values: dict[str, str], **options: Any) -> Any:
    return http.post(
        path,
        content=urlencode(values),
        headers={"Content-Type": "application/x-www-form-urlencoded"},
        **options,
    )


def started(http: TestClient, values: dict[str, str]) -> Any:
    """The page of a search that is not yet started, as JSON."""
    return http.get("/searches/new.json", params=values).json()


def test_what_fields_may_hold_is_the_schemas_to_say() -> None:
    known = form_fields("training")
    assert known["training.precision"].options == ("bf16", "fp16", "fp8", "mxfp8", "nvfp4", "fp32")
    assert known["training.precision"].default == "bf16"
    assert known["parallel.recompute"].several
    assert known["parallel.recompute"].options == (
        "none",
        "selective",
        "full",
        "per_op",
        "per_layer",
    )
    assert known["search.reuse"].options == ("true", "false")
    assert form_fields("inference")["inference.load.arrival"].options == (
        "closed",
        "burst",
        "poisson",
        "offline",
    )
    assert "Sequences per optimizer step" in known["training.global_batch_size"].help


def test_inputs_of_numbers_have_the_schemas_bounds(http: TestClient) -> None:
    texts = {"model", "cluster", "cluster.gpu", "inference.engine", "trainer"}
    texts |= {f"training.{name}" for name in ("framework", "framework_version", "recipe")}
    for kind in ("training", "inference"):
        page = http.get(f"/explorer?kind={kind}").text
        page += http.get(f"/searches/new?kind={kind}&model=llama-3-8b").text
        for name, field in form_fields("training" if kind == "training" else "inference").items():
            if name in texts or field.options:
                assert field.maximum is None
                continue
            if name in SENTENCE | OF_ONE:
                continue
            assert (
                field.minimum is not None
                and field.maximum is not None
                and field.minimum < field.maximum
            ), name
            (tag,) = re.findall(rf'<input name="{re.escape(name)}"[^>]*>', page)
            bounds = f'min="{field.minimum}" max="{field.maximum}"'
            assert (bounds in tag) != field.several
            assert f"({field.minimum} to {field.maximum})" in tag


SIZES = st.one_of(st.integers(1, 64), st.lists(st.integers(1, 64), min_size=1, max_size=4))
PRECISIONS = st.sampled_from(["fp32", "bf16", "fp8", None])
SOFTWARE = {
    "framework": st.sampled_from(["torch-fsdp", "megatron-core"]),
    "framework_version": st.sampled_from(["25.04", "26", " odd "]),
    "parameter_precision": PRECISIONS,
    "gradient_precision": PRECISIONS,
    "cross_entropy": st.sampled_from(["unfused", "fused", "in_place", "chunked"]),
    "gated_product": st.sampled_from(["kept", "recomputed", None]),
    "gradient_reduction": st.sampled_from(["micro_batch", "run", None]),
    "cuda_graphs": st.booleans(),
    "cuda_graph_modules": st.sampled_from([["attn", "moe_router"], ["mlp"]]),
    "expert_precision": PRECISIONS,
    "dispatch_precision": st.sampled_from(["bf16", "fp8", None]),
    "kernel_fusion": st.booleans(),
    "activation_func_fp8_input_store": st.sampled_from([True, False, None]),
    "task": st.sampled_from(["pretrain", "sft", "lora"]),
    "lora": st.fixed_dictionaries(
        {"rank": st.integers(1, 64)},
        optional={
            "dropout": st.floats(0.0, 0.9),
            "target_modules": st.just(["linear_qkv", "linear_fc1"]),
        },
    ),
    "frozen_precision": st.sampled_from(["bf16", "fp8", "nf4", None]),
}
MODULES = st.lists(st.sampled_from(["core_attn", "layernorm", "mlp", "moe_act"]), max_size=3)
RECOMPUTE = st.one_of(
    st.sampled_from(["none", "selective", "full", "per_layer"]),
    st.fixed_dictionaries({"granularity": st.just("selective")}, optional={"modules": MODULES}),
    st.fixed_dictionaries(
        {"granularity": st.just("full")},
        optional={
            "method": st.sampled_from(["uniform", "block"]),
            "num_layers": st.integers(1, 64),
        },
    ),
)


@given(
    tensor=SIZES,
    sequence_parallel=st.sampled_from([None, True, False, [True, False]]),
    recompute=RECOMPUTE | st.lists(RECOMPUTE, min_size=1, max_size=3),
    software=st.fixed_dictionaries({}, optional=SOFTWARE),
    optimizer=st.sampled_from(["adam", "muon"]),
    days=st.one_of(st.none(), st.floats(0.5, 1e6)),
    model=st.sampled_from(
        [
            "llama-3-70b",
            {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "vocab_size": 99},
        ]
    ),
)
def test_every_query_stands_in_the_form_and_comes_back(
    tensor: Any,
    sequence_parallel: Any,
    recompute: Any,
    software: Query,
    optimizer: str,
    days: float | None,
    model: Any,
) -> None:
    query = schema.parse_query(
        {
            "kind": "training",
            "model": model,
            "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 64, "nvlink_segment_gpus": 8},
            "training": software
            | {
                "sequence_length": 128,
                "global_batch_size": 8,
                "optimizer": optimizer,
                "total_tokens": 1e12,
            },
            "parallel": {
                "tensor_parallel_size": tensor,
                "sequence_parallel": sequence_parallel,
                "recompute": recompute,
            },
            "constraints": {"max_days": days},
        }
    )
    values = to_values(schema.query_mapping(query))
    assert schema.parse_query(to_query(read_form(urlencode(values)))) == query
    assert values["cluster.nvlink_segment_gpus"] == "8"
    left_empty = {
        name: "" for name in form_fields("training") if name not in values and name != "cluster"
    }
    assert schema.parse_query(to_query(read_form(urlencode(values | left_empty)))) == query


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("selective", "selective"),
        ({"granularity": "selective", "modules": ["core_attn", "mlp"]}, "selective core_attn+mlp"),
        (
            ["none", {"granularity": "full", "method": "block", "num_layers": 4}],
            "none, full block 4",
        ),
        ({"granularity": "full", "num_layers": 2}, "full 2"),
        ({"granularity": "full"}, None),  # not the word `full`: it stays in the YAML
    ],
)
def test_recomputation_in_detail_is_one_line(value: Any, text: str | None) -> None:
    query = {"kind": "training", "parallel": {"recompute": value}}
    assert to_values(query).get("parallel.recompute") == text
    assert to_query(to_values(query)) == query


def test_an_empty_choice_leaves_its_field_out(http: TestClient) -> None:
    names = (
        "training.cross_entropy",
        "training.cuda_graphs",
        "training.gradient_precision",
        "training.dispatch_precision",
    )
    page = http.get("/explorer").text
    for name in names:
        (select,) = re.findall(
            rf'<select name="{re.escape(name)}".*?</select>', page, flags=re.DOTALL
        )
        assert re.findall(r'<option value=""[^>]*>([^<]+)', select) == [
            escape(form_fields("training")[name].placeholder)
        ]
        assert "selected" not in select
        options = form_fields("training")[name].options
        assert all(f'<option value="{option}"' in select for option in options)


def test_recipes_can_be_chosen_and_say_what_they_are(http: TestClient) -> None:
    page = http.get("/explorer?training.recipe=trl&model=llama-3-8b").text
    (select,) = re.findall(r'<select name="training.recipe".*?</select>', page, flags=re.DOTALL)
    for recipe in http.get("/v1/recipes").json()["items"]:
        assert f'data-about="{escape(recipe["description"])}"' in select
        selected = f"selected>{recipe['name']}<" in select
        assert selected == (recipe["name"] == "trl")
        assert f">{escape(recipe['description'])}</span>" in page or not selected
    # One of another machine's catalogue, and an alias, stay what they are.
    assert "<option selected>ours</option>" in http.get("/explorer?training.recipe=ours").text
    wrong = started(http, FILLED | {"training.recipe": "ours"})["error"]
    assert wrong["field"] == "training.recipe"


def test_an_address_may_name_any_path_of_a_query(http: TestClient) -> None:
    path = "/searches/new.json?model=llama-3-8b&training.optimizer=muon&training.cuda_graphs=true&training.dropout=0.1"  # noqa: E501
    values = http.get(path).json()["values"]
    assert values["training.cuda_graphs"] == "true"
    assert yaml.safe_load(values["extra"]) == {"training": {"optimizer": "muon", "dropout": 0.1}}
    # What another kind's tab left over is no mistake; a path that no query has is one.
    assert (
        "extra"
        not in http.get(
            "/searches/new.json?kind=inference&model=qwen3-32b&training.sequence_length=8"
        ).json()["values"]
    )
    wrong = started(http, FILLED | {"training.cross_entropi": "fused"})["error"]
    assert "did you mean cross_entropy" in wrong["message"]


@given(st.text(max_size=200))
def test_any_body_is_a_form_or_bad_input(body: str) -> None:
    try:
        to_query(read_form(body))
    except InputError as error:
        assert error.message


def test_the_best_configuration_is_the_recommendation(http: TestClient) -> None:
    page = started(http, FILLED)
    answer = http.post("/v1/recommendations?top=40", json=to_query(FILLED)).json()
    best = answer["recommendations"][0]
    assert page["best"]["step_s"] == best["estimate"]["time"]["step_s"]
    text = http.get("/searches/new", params=FILLED).text
    assert page["best"]["details"] in text
    asked = http.get("/explorer.json", params=FILLED).json()
    assert asked["tied"] == answer["groups"][0]
    assert dict(asked["rejections"]) == answer["rejections"]


def test_the_same_as_text_says_the_same(http: TestClient) -> None:
    values = FILLED | {
        "parallel.tensor_parallel_size": "2, 4",
        "extra": "training:\n  optimizer: muon\nid: it's 'mine'",
    }
    commands = {c["title"]: c["text"] for c in started(http, values)["commands"]}
    query = schema.parse_query(to_query(values))
    assert schema.parse_query(commands["YAML"]) == query
    told = shlex.split(commands["Command line"].splitlines()[0])
    settings = [told[n + 1].partition("=") for n, word in enumerate(told) if word == "--set"]
    assert (
        schema.parse_query(
            schema.set_paths({}, {path: yaml.safe_load(value) for path, _, value in settings})
        )
        == query
    )
    assert schema.parse_query(shlex.split(commands["curl"].splitlines()[0])[-1]) == query


def test_where_nothing_fits_the_nearest_say_what_they_lack(http: TestClient) -> None:
    few = {
        "parallel.tensor_parallel_size": "1",
        "cluster.num_gpus": "8",
        "parallel.zero_stage": "1",
    }
    values = FILLED | few | {"extra": "training:\n  offload: none"}
    assert started(http, values)["best"] is None
    assert "No configuration fits" in http.get("/searches/new", params=values).text
    rows = http.get("/explorer.json", params=values).json()["rows"]
    assert rows and all("GiB" in row["reasons"][0] for row in rows)


def test_serving_has_predictions_and_cannot_be_searched(http: TestClient) -> None:
    page = started(http, SERVED)
    assert page["best"]["ttft_s"] <= 1.0 and page["best"]["tpot_s"] <= 0.03
    assert page["unsearchable"] and page["refused"]
    assert '<button class="primary" disabled>' in http.get("/searches/new", params=SERVED).text
    assert not started(http, FILLED)["refused"]
    figures = http.get("/explorer.json", params=SERVED).json()["figures"]
    assert [shape["to"] for figure in figures for shape in figure["shapes"]] == [1.0, 0.03]


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"model": "llama-9"}, "model"),
        ({"cluster.num_gpus": "many"}, "cluster.num_gpus"),
        ({"training.precision": "fp7"}, "training.precision"),
        ({"parallel.tensor_parallel_size": "2, x"}, "parallel.tensor_parallel_size"),
        ({"cluster": "ours"}, "cluster"),
        ({"extra": "a: [1"}, "extra"),
        ({"extra": "trainer: {command: [sh], reader: megatron-lm}"}, "trainer.command"),
        ({"model": EVIL}, "model"),
    ],
)
def test_a_mistake_comes_back_at_its_field(
    http: TestClient, store: Store, changed: dict[str, str], field: str
) -> None:
    error = started(http, FILLED | changed)["error"]
    assert error["field"].startswith(field)
    page = post(http, "/searches/new", FILLED | changed)
    assert page.status_code == 422
    assert EVIL not in page.text
    assert store.list_searches().items == ()


def test_submitting_queues_the_search_and_a_clone_fills_the_form(
    http: TestClient, store: Store, query: Query
) -> None:
    values = to_values(query)
    assert values["training.sequence_length"] == "128"
    assert "gpt-tiny" in values["extra"]  # a model of one's own has no field
    answer = post(http, "/searches/new", values, follow_redirects=False)
    assert answer.status_code == 303
    stored = store.list_searches().items[0]
    assert answer.headers["location"] == f"/searches/{stored.id}"
    assert schema.parse_query(stored.query) == schema.parse_query(query)
    named = post(
        http, "/searches/new", values | {"name": "long context"}, follow_redirects=False
    ).headers["location"]
    assert (
        "<h1>long context</h1>" in http.get(named).text
        and ">long context</a>" in http.get("/searches").text
    )
    cloned = http.get(f"/searches/new.json?from={stored.id}").json()["values"]
    assert schema.parse_query(to_query(cloned)) == schema.parse_query(query)
    assert http.get("/searches/new?from=nope").status_code == 422
    wrong = http.get("/searches/new.json?num_gpus=8")
    assert wrong.status_code == 422 and "did you mean cluster.num_gpus" in wrong.text
    refused = http.post(
        "/searches/new", content=urlencode(values), headers={"Origin": "https://evil.example"}
    )
    assert refused.status_code == 403
