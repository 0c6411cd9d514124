"""Codes of illegal and unacceptable configurations: one sentence each, in the terminal and the
documentation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hp_tool.cost import legality
from hp_tool.cost.serving import legality as serving_legality
from hp_tool.wording.rejections import RULES
from scripts.rejections_table import PAGE, with_table


def test_each_rule_has_a_sentence_and_a_row_of_the_page() -> None:
    assert {*legality.REASONS, *serving_legality.REASONS, legality.MEMORY} <= RULES.keys()
    page = PAGE.read_text(encoding="utf-8")
    assert "| `heads_not_divisible` |" in page
    assert page == with_table(page), "run: python scripts/rejections_table.py"


def test_a_ranking_without_a_legal_layout_prints_what_the_commonest_rule_requires(
    entry_point: Callable[..., Any],
) -> None:
    shown = entry_point(
        "recommend",
        "--model=gpt2",
        "--gpu=h100-sxm-80gb",
        "--num-gpus=16",
        "--sequence-length=1024",
        "--global-batch-size=64",
        "--set=parallel.tensor_parallel_size=16",
    )
    assert shown.returncode == 3
    assert f"heads_not_divisible: {RULES['heads_not_divisible']}." in shown.stdout


def test_the_sizes_offered_for_heads_are_legal(entry_point: Callable[..., Any]) -> None:
    """Llama 3.2 3B has 24 heads and 8 KV heads: 12 divides the former alone."""
    shown = entry_point(
        "estimate",
        "--model=llama-3.2-3b",
        "--set=cluster={gpu: h100-sxm-80gb, num_gpus: 12, gpus_per_node: 12}",
        "--sequence-length=1024",
        "--global-batch-size=64",
        "--set=parallel.tensor_parallel_size=12",
    ).stdout
    assert "does not divide num_key_value_heads 8" in shown
    assert "choose one of [1, 2, 4, 8, 24]" in shown
