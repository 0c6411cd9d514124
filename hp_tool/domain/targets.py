"""Targets of serving queries: maximum latencies, as means or as quantiles over requests."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from hp_tool.domain.fields import Amount, Flattened, Shown, bounds_error, bounds_of
from hp_tool.domain.latencies import LATENCIES_BY_QUANTILE_KEY
from hp_tool.errors import InputError

QUANTILE_TARGET = re.compile(rf"({'|'.join(LATENCIES_BY_QUANTILE_KEY)})_p(\d\d)\.?(\d*)_s")
"""Pattern of a quantile target. Digits after the second are decimals, with or without a point:
p99.9 and p999 are the same.
"""
LOWEST, HIGHEST = 50.0, 99.9
"""Lowest and highest percentile that a target may use."""


def parse_target(name: str) -> tuple[str, str | None]:
    """Return the latency and the quantile of the target with this name (p90, p99.9; None: the
    mean).
    """
    quantile = QUANTILE_TARGET.fullmatch(name)
    return _target_of_quantile(quantile) if quantile else (name, None)


def quantile_fraction(quantile: str) -> float:
    """Return a quantile as a fraction of requests: 0.999 for p99.9."""
    return float(quantile.removeprefix("p")) / 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets(Flattened):
    """Inference: maximum latencies in seconds. Any quantile from p50 to p99.9 of ttft, tpot and e2e
    (the request's latency) may be set, as ttft_p95_s or tpot_p99.9_s (also written tpot_p999_s).
    """

    ttft_s: Annotated[
        Amount | None, Shown("Maximum TTFT (s)", "Goal", example="1.0", kind="inference")
    ] = None
    """Mean time to the first token."""
    tpot_s: Annotated[
        Amount | None, Shown("Maximum TPOT (s)", "Goal", example="0.03", kind="inference")
    ] = None
    """Mean time per output token after the first."""
    request_latency_s: Amount | None = None
    """Mean time from a request to its last token."""
    ttft_p90_s: Amount | None = None
    ttft_p99_s: Amount | None = None
    tpot_p90_s: Amount | None = None
    tpot_p99_s: Amount | None = None
    others: tuple[tuple[str, float], ...] = ()
    """(key, limit) of the other quantiles; in JSON and YAML keys like those above."""

    def limits(self) -> Iterator[tuple[str, str, str | None, float]]:
        """Yield (name, latency, quantile, limit) of each target. If quantile is None, the target is
        on the mean.
        """
        named = ((name, getattr(self, name)) for name in self.__slots__ if name != "others")
        for name, limit in (*named, *self.others):
            if limit is not None:
                yield (name, *parse_target(name), limit)

    @classmethod
    def _fold(cls, data: dict[str, Any]) -> dict[str, Any]:
        if "others" in data:
            raise InputError(
                "unknown key targets.others; name a quantile, such as ttft_p95_s",
                field="targets.others",
                code="unknown_key",
            )
        keys = {
            key: _target_of_quantile(match)[1]
            for key in data
            if key not in cls.__slots__ and (match := QUANTILE_TARGET.fullmatch(key))
        }
        bounds = bounds_of(Targets)["ttft_s"]
        for key, quantile in keys.items():
            field, limit = f"targets.{key}", data[key]
            if not LOWEST <= 100.0 * quantile_fraction(quantile) <= HIGHEST:
                raise InputError(
                    f"{field}: {quantile} is not predicted; use a quantile from p{LOWEST:g} to "
                    f"p{HIGHEST:g}",
                    field=field,
                    code="invalid_value",
                )
            if not isinstance(limit, int | float) or isinstance(limit, bool):
                raise InputError(
                    f"{field} must be a number of seconds, got {str(limit)[:80]!r}",
                    field=field,
                    code="invalid_value",
                )
            if not bounds[0] <= limit <= bounds[1]:
                raise bounds_error(limit, bounds, field=field)
        return {key: value for key, value in data.items() if key not in keys} | {
            "others": tuple((key, data[key]) for key in keys)
        }

    @classmethod
    def _other_keys(cls) -> tuple[str, dict[str, Any]]:
        low, high = bounds_of(Targets)["ttft_s"]
        return QUANTILE_TARGET.pattern, {"type": "number", "minimum": low, "maximum": high}


def _target_of_quantile(quantile: re.Match[str]) -> tuple[str, str]:
    """Return the latency and the quantile of a target, as reported: p95, p99.9."""
    latency, whole, decimals = quantile.groups()
    return (
        LATENCIES_BY_QUANTILE_KEY[latency].key,
        f"p{float(f'{whole}.{decimals or 0}'):g}",
    )
