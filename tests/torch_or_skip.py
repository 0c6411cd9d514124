"""torch as the judge of formulas, where it is installed."""

from __future__ import annotations

from typing import Any

from tests.conftest import skip_or_fail


def torch_or_skip() -> Any:
    """The module, which the profiler extra brings."""
    try:
        import torch
    except ImportError:
        skip_or_fail(component="MEGATRON", reason="torch (the profiler extra) is not installed")
    return torch
