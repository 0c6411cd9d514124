"""What a table shows of a configuration: enough to tell any two rows apart, and no column that says nothing."""

from __future__ import annotations

from hp_tool.domain.parallel import ParallelConfig
from hp_tool.render.words import arithmetic, configuration_cells


def test_context_and_expert_columns_stand_only_where_they_are_used() -> None:
    plain, experts = ParallelConfig(data_parallel_size=8), ParallelConfig(data_parallel_size=8, expert_parallel_size=4)
    heads, _ = configuration_cells([plain])
    assert not {"CP", "EP", "ETP"} & set(heads)
    heads, rows = configuration_cells([plain, experts])
    assert "EP" in heads and not {"CP", "ETP"} & set(heads)
    assert [row[heads.index("EP")] for row in rows] == ["1", "4"]
    assert configuration_cells([])[1] == []


def test_the_arithmetic_names_experts() -> None:
    assert "EP 4" in arithmetic(ParallelConfig(data_parallel_size=8, expert_parallel_size=4))
    assert "EP" not in arithmetic(ParallelConfig(data_parallel_size=8))
