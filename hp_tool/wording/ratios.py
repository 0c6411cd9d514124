"""Ratios of times in words: `17% slower than TP 8 x PP 4 (+9% to +25%)`."""

from hp_tool.domain.units import format_factor

MIN_FACTOR_IN_WORDS = 1.5
"""Minimum ratio that sentences write as a factor instead of a percentage."""
MAX_EQUAL_DIFFERENCE = 0.005
"""Maximum relative difference between two times that sentences call equal."""
Ratio = tuple[float, tuple[float, float]]
"""Ratio of two times, and its 90% interval."""


def agreement_words(factor: float) -> str:
    """Return `8.6 times as long as predicted` or `12% longer than predicted`."""
    if factor >= MIN_FACTOR_IN_WORDS:
        return f"{format_factor(factor)} as long as predicted"
    if factor <= 1.0 / MIN_FACTOR_IN_WORDS:
        return f"{format_factor(1.0 / factor)} as fast as predicted"
    if abs(factor - 1.0) < MAX_EQUAL_DIFFERENCE:
        return "as predicted"
    return f"{difference_words(factor)} {'longer' if factor > 1.0 else 'shorter'} than predicted"


def measured_ratio_words(factor: float, first: str) -> str:
    """Return `17% slower than TP 8, measured`."""
    preposition = (
        ""
        if abs(factor - 1.0) < MAX_EQUAL_DIFFERENCE
        or factor >= MIN_FACTOR_IN_WORDS
        or factor <= 1.0 / MIN_FACTOR_IN_WORDS
        else "than "
    )
    return f"{slower_words(factor)} {preposition or 'as '}{first}, measured"


def predicted_ratio_words(ratio: Ratio, first: str) -> str:
    """Return `17% slower than TP 8 (+9% to +25%)` or, if the interval contains 0, `probably slower
    than TP 8: +17% (-4% to +42%)`.
    """
    factor, interval = ratio
    if abs(factor - 1.0) < MAX_EQUAL_DIFFERENCE:
        return f"about as fast as {first} ({interval_words(interval)})"
    if interval[0] < 1.0 < interval[1]:
        word = "slower" if factor > 1.0 else "faster"
        return f"probably {word} than {first}: {factor - 1.0:+.0%} ({interval_words(interval)})"
    return f"{slower_words(factor, allow_factor=False)} than {first} ({interval_words(interval)})"


def slower_words(factor: float, *, allow_factor: bool = True) -> str:
    """Return `17% slower` or, for a large ratio with `allow_factor`, `2.3 times as slow`."""
    if abs(factor - 1.0) < MAX_EQUAL_DIFFERENCE:
        return "as fast"
    if allow_factor and factor >= MIN_FACTOR_IN_WORDS:
        return f"{format_factor(factor)} as slow"
    if allow_factor and factor <= 1.0 / MIN_FACTOR_IN_WORDS:
        return f"{format_factor(1.0 / factor)} as fast"
    return f"{difference_words(factor)} {'slower' if factor > 1.0 else 'faster'}"


def interval_words(interval: tuple[float, float]) -> str:
    """Return the interval of a ratio as `-4% to +42%`."""
    return " to ".join(f"{end - 1.0:+.0%}" for end in interval)


def difference_words(factor: float) -> str:
    """Return the distance of a ratio from 1 as `17%`."""
    return f"{abs(factor - 1.0):.0%}"
