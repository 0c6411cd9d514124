"""`hp-tool NAME` builds the named command alone."""

from __future__ import annotations

import pytest
import typer

from hp_tool.cli.main import COMMANDS, build


@pytest.mark.parametrize("name", ["estimate", "recommend", "tune", "models"])
def test_a_command_built_alone_has_the_options_it_has_among_all(name: str) -> None:
    whole, alone = (typer.main.get_command(each).commands for each in (build(), build(name)))  # type: ignore[attr-defined]
    assert list(alone) == [name] and len(whole) > len(COMMANDS)
    assert [each.opts for each in alone[name].params] == [each.opts for each in whole[name].params]
    assert alone[name].help == whole[name].help
