"""hp_tool as a Python package: what the commands answer, from arguments, mappings and files."""

from __future__ import annotations

import html.parser
import inspect
from pathlib import Path
from typing import Any

import pytest

import hp_tool
from hp_tool.api import QueryKeys
from hp_tool.errors import InputError
from hp_tool.questions import answers, schema

LLAMA: Any = {
    "model": "llama-3-70b",
    "gpu": "h100-sxm-80gb",
    "num_gpus": 64,
    "sequence_length": 8192,
    "global_batch_size": 128,
}
ROOT = Path(__file__).parents[2]


class Words(html.parser.HTMLParser):
    """Text of the cells, and whether tags are balanced."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_arguments_are_the_query_they_stand_for() -> None:
    written = {
        "kind": "training",
        "model": "llama-3-70b",
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 64},
        "training": {"sequence_length": 8192, "global_batch_size": 128, "attention": "flash"},
        "parallel": {"tensor_parallel_size": 8},
    }
    made = hp_tool.make_query(
        **LLAMA, training={"attention": "flash"}, parallel={"tensor_parallel_size": 8}
    )
    assert (
        made
        == schema.parse_query(written)
        == hp_tool.make_query(written)
        == hp_tool.make_query(made)
    )


def test_arguments_are_laid_over_a_file_and_leave_a_mapping_as_it_was() -> None:
    path = ROOT / "examples" / "gpt3-175b.yaml"
    changed = hp_tool.make_query(path, num_gpus=512, parallel={"micro_batch_size": 2})
    assert changed.parallel.tensor_parallel_size == 8
    assert changed.parallel.micro_batch_size == 2
    given: dict[str, Any] = {"model": "gpt-22b", "cluster": {"gpu": "a100-sxm-80gb", "num_gpus": 8}}
    hp_tool.make_query(given, num_gpus=16, sequence_length=2048, global_batch_size=16)
    assert given["cluster"]["num_gpus"] == 8


def test_the_answers_are_those_of_the_commands() -> None:
    asked = hp_tool.make_query(**LLAMA)
    assert hp_tool.estimate(asked) == answers.answer_estimate(asked)
    top = hp_tool.recommend(**LLAMA, top=3)
    assert top.recommendations == answers.answer_recommend(asked, top=3).recommendations


def test_an_answer_becomes_another_tools_file() -> None:
    answer = hp_tool.recommend(**LLAMA, top=1)
    assert "pretrain_gpt.py" in hp_tool.export(answer, format="megatron-lm").text
    again = hp_tool.export(answer, format="torchtitan", rerank=True)
    assert again.framework == "torch-fsdp" and "ranked for torchtitan" in again.cost_in_words()


def test_a_wrong_argument_names_the_nearest_key() -> None:
    with pytest.raises(InputError, match="did you mean model"):
        hp_tool.estimate(**(LLAMA | {"modell": "x"}))
    with pytest.raises(AttributeError, match="recomend"):
        hp_tool.recomend  # noqa: B018


@pytest.mark.parametrize(
    ("keys", "hint"),
    [
        ({"parallel": {"tp": 8}}, "unknown key parallel.tp; did you mean tensor_parallel_size?"),
        ({"parallel": {"mbs": 1}}, "unknown key parallel.mbs; did you mean micro_batch_size?"),
        ({"parallel": {"gradient_checkpointing": True}}, "did you mean recompute?"),
        (
            {"parallel": {"num_gpus": 8}},
            "unknown key parallel.num_gpus; did you mean cluster.num_gpus?",
        ),
        ({"training": {"seq-length": 1}}, "did you mean sequence_length?"),
        ({"tp": 8}, "unknown key tp; did you mean parallel.tensor_parallel_size?"),
        ({"n_gpus": 8}, "did you mean cluster.num_gpus?"),
        ({"max_days": 8}, "unknown key max_days; did you mean constraints.max_days?"),
        ({"parallel": {"nonsense": 8}}, "known keys: attention_data_parallel_size, "),
    ],
)
def test_a_nested_key_that_is_unknown_names_the_one_that_is_meant(
    keys: dict[str, Any], hint: str
) -> None:
    with pytest.raises(InputError) as caught:
        hp_tool.estimate(**(LLAMA | keys))
    assert hint in caught.value.message


def test_names_that_are_suggested_exist() -> None:
    from hp_tool.domain.query import Query
    from hp_tool.questions import schema
    from hp_tool.questions.short_names import COLUMNS, FOREIGN_NAMES

    for path in {*COLUMNS.values(), *FOREIGN_NAMES.values()}:
        assert schema.schemas_at(schema.adapter(Query), path.split(".")), path


def test_completion_and_help_name_what_there_is() -> None:
    assert {"estimate", "recommend", "size", "make_query"} <= set(
        dir(hp_tool)
    ) and "TYPE_CHECKING" not in dir(hp_tool)
    for function in (hp_tool.estimate, hp_tool.recommend):
        assert function.__doc__ is not None
        assert [key for key in QueryKeys.__annotations__ if key not in function.__doc__] == []
        assert QueryKeys.__annotations__.keys() <= inspect.signature(function).parameters.keys()


def test_what_a_session_prints_of_an_answer_is_short() -> None:
    ranked = hp_tool.recommend(**LLAMA, top=3)
    assert repr(ranked).startswith("<RecommendAnswer: 3 of ") and len(repr(ranked)) < 400
    assert "tensor_parallel_size" in repr(ranked.recommendations[0]) and "zero_stage" not in repr(
        ranked.recommendations[0]
    )
    assert repr(hp_tool.estimate(**LLAMA)).startswith(
        "<EstimateAnswer: <Estimate: infeasible (memory), step "
    )


def test_every_name_of_the_package_is_there() -> None:
    assert set(hp_tool.__all__) == {name for names in hp_tool._HOMES.values() for name in names}
    assert all(getattr(hp_tool, name).__name__ == name for name in hp_tool.__all__)


def test_a_notebook_shows_training() -> None:
    found = hp_tool.recommend(**LLAMA, top=3)
    words = Words(found._repr_html_()).words
    assert words.count(f"{100 * found.recommendations[0].estimate.mfu:.1f}") >= 1  # type: ignore[union-attr]
    assert "TP" in words and "recompute" in words
    infeasible = hp_tool.estimate(**LLAMA)  # a replica on every GPU
    assert "memory: needs" in " ".join(Words(infeasible._repr_html_()).words)
    assert "optimizer" in Words(infeasible._repr_html_()).words
    none = hp_tool.recommend(**(LLAMA | {"num_gpus": 2}))
    assert "no configuration fits and meets the constraints" in Words(none._repr_html_()).words


def test_a_notebook_shows_serving() -> None:
    serving: Any = {
        "model": "qwen3-32b",
        "gpu": "h200-sxm-141gb",
        "num_gpus": 8,
        "inference": {
            "input_length": 4000,
            "output_length": 1000,
            "concurrency": 64,
            "engine": "vllm",
        },
    }
    assert "TPOT, ms" in Words(hp_tool.recommend(**serving)._repr_html_()).words
    assert "kv_cache" in Words(hp_tool.estimate(**serving)._repr_html_()).words


def test_what_users_wrote_is_escaped() -> None:
    from hp_tool.wording.html import _table_html

    assert "<script>" not in _table_html(("<script>",), [("<script>",)])
