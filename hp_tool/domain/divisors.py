"""Whole numbers that divide another."""

from __future__ import annotations


def divisors(number: int, *, limit: int) -> tuple[int, ...]:
    """Those up to `limit`, rising."""
    return tuple(k for k in range(1, min(number, limit) + 1) if number % k == 0)
