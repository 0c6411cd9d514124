"""Format values in SI units and bytes."""

import math

MIB = 2**20
GB = 10**9
GIB = 2**30
MIN_CHANGE = 0.0005
"""Relative difference (0.05%) below which two printed times count as equal."""
SECONDS_PER_DAY = 86_400.0
SECONDS_PER_HOUR = 3_600.0
JOULES_PER_MWH = 3.6e9


def format_gib(size_bytes: float) -> str:
    """Return bytes as `91.4 GiB`; GiB is 2**30 bytes."""
    return f"{size_bytes / GIB:.1f} GiB"


def format_duration(seconds: float) -> str:
    """Return a duration in a suitable unit: `431 us`, `12.3 ms`, `4.56 s`, `712.0 s`, `3.2 h`,
    `24.1 days`.

    Durations up to two hours are in seconds. Hours would hide small differences between step times.
    """
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1.0:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 100.0:
        return f"{seconds:.2f} s"
    if seconds < 2 * SECONDS_PER_HOUR:
        return f"{seconds:,.{1 if seconds < 1000.0 else 0}f} s"
    if seconds < 2 * SECONDS_PER_DAY:
        return f"{seconds / SECONDS_PER_HOUR:.1f} h"
    return f"{seconds / SECONDS_PER_DAY:.1f} days"


def format_duration_range(low_s: float, high_s: float) -> str:
    """Return `11.80-18.20 s`; `980.0 ms-1.20 s` if the ends have different units."""
    low, high = format_duration(low_s), format_duration(high_s)
    number, _, unit = low.rpartition(" ")
    return f"{number}-{high}" if high.endswith(f" {unit}") else f"{low}-{high}"


def format_factor(factor: float) -> str:
    """Return a factor as `31 times`, `8.6 times`, `1.63 times` or `1.004 times`."""
    if factor >= 10.0:
        return f"{factor:,.0f} times"
    near = abs(factor - 1.0)
    return f"{factor:.{1 if factor >= 2.0 else 2 if near >= 0.01 else 3}f} times"


def format_count(count: int, noun: str) -> str:
    """Return `1 measurement`, `1,000 measurements`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def capitalize_first(text: str) -> str:
    """Return the text with a capital first letter."""
    return f"{text[:1].upper()}{text[1:]}"


def format_whole(value: float) -> str:
    """Return a number without decimals or, below 1, with two significant digits: `1,024`,
    `0.41`.
    """
    return format_decimal(value) if abs(value) < 1.0 else f"{value:,.0f}"


def format_decimal(value: float) -> str:
    """Return a number with one decimal or, below 1, with two significant digits: `23.2`,
    `0.0041`.
    """
    if value == 0.0 or abs(value) >= 0.95:
        return f"{value:,.1f}"
    return f"{value:.{min(1 - math.floor(math.log10(abs(value))), 9)}f}"
