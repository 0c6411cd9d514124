"""The charts' colours: told apart by people with and without red and green receptors, and from the
ground they stand on.
"""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from fastapi.testclient import TestClient
from numpy.typing import NDArray

from hp_tool.domain.parts import MEMORY_KEYS, PARTS, REQUEST, SERVING_MEMORY_KEYS, STEP_KEYS
from service.dashboard.formats import colour
from service.dashboard.page import STATIC

Colours = NDArray[np.float64]
LEAST_DISTANCE = 0.05
"""In OKLab, where 0.02 is the least that people see side by side."""
LEAST_CONTRAST = 3.0
"""WCAG 1.4.11, of graphics."""
SIGHT = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
}
"""Machado, Oliveira and Fernandes 2009, severity 1, of linear RGB."""
TO_CONES = np.array(
    [
        [0.41222147, 0.53633254, 0.05144599],
        [0.2119035, 0.68069955, 0.10739696],
        [0.08830246, 0.28171884, 0.62997870],
    ]
)
TO_LAB = np.array(
    [
        [0.21045426, 0.79361779, -0.00407205],
        [1.9779985, -2.42859221, 0.45059371],
        [0.02590404, 0.78277177, -0.80867577],
    ]
)
"""Ottosson 2020, OKLab."""


def _palette(scheme: str) -> dict[str, str]:
    found = re.findall(
        r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", (STATIC / "tokens.css").read_text()
    )
    return {name: day if scheme == "light" else night for name, day, night in found}


def _linear(colours: list[str]) -> Colours:
    rgb = np.array([[int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)] for colour in colours])
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def _nearest(colours: list[str], sight: str) -> tuple[float, str, str]:
    """The two that are the hardest to tell apart, and how far they are from each other."""
    seen = np.cbrt(np.clip(_linear(colours) @ SIGHT[sight].T, 0, 1) @ TO_CONES.T) @ TO_LAB.T
    pairs = itertools.combinations(range(len(colours)), 2)
    return min((float(np.linalg.norm(seen[a] - seen[b])), colours[a], colours[b]) for a, b in pairs)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("sight", SIGHT)
def test_any_two_series_can_be_told_apart(scheme: str, sight: str) -> None:
    palette = _palette(scheme)
    series = [colour for name, colour in palette.items() if name.startswith("series-")]
    assert len(series) == 11
    distance, first, second = _nearest([*series, palette["idle"]], sight)
    assert distance >= LEAST_DISTANCE, (first, second)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_series_stand_out_from_their_ground(scheme: str) -> None:
    palette = _palette(scheme)
    series = [colour for name, colour in palette.items() if name.startswith("series-")]
    luminance = _linear([palette["surface-raised"], *series]) @ [0.2126, 0.7152, 0.0722] + 0.05
    contrast = np.maximum(luminance, luminance[0]) / np.minimum(luminance, luminance[0])
    assert contrast[1:].min() >= LEAST_CONTRAST


BARS = {
    "a step": STEP_KEYS,
    "a request": tuple(part.key for part in REQUEST),
    "memory of a stage": MEMORY_KEYS,
    "memory of a server": SERVING_MEMORY_KEYS,
    "a log's timers": ("passes", "pipeline", "data_parallel", "optimizer", "rest"),
}
"""Parts that one stacked bar shows."""


@pytest.mark.parametrize("bar", BARS)
def test_no_two_parts_of_a_bar_share_a_colour(bar: str) -> None:
    used = [PARTS[key].colour for key in BARS[bar]]
    assert len(set(used)) == len(used), dict(zip(BARS[bar], used, strict=True))


def test_every_colour_of_a_part_has_a_rule() -> None:
    css = (STATIC / "figures.css").read_text()
    for key in PARTS:
        assert f".{colour(key)} {{ fill: var(--{colour(key)}); }}" in css


def test_the_simulation_sees_what_red_and_green_hide() -> None:
    red_and_green = ["#2f6fae", "#8a63ad"]  # the blue and violet that this palette once had
    assert (
        _nearest(red_and_green, "normal")[0]
        > LEAST_DISTANCE
        > _nearest(red_and_green, "protanopia")[0]
    )


def test_a_legend_has_the_colours_of_its_bars(shared_http: TestClient) -> None:
    page = shared_http.get("/explorer").text
    bars = set(re.findall(r'<rect class="part ([\w-]+)"', page))
    legend = set(re.findall(r'<li><svg aria-hidden="true"><rect class="([^"]+)"', page))
    assert legend == bars and len(bars) > 4
