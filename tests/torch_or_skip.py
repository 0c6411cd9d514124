"""torch as the judge of formulas, where it is installed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from tests.conftest import skip_or_fail


def torch_or_skip() -> Any:
    """The module, which the profiler extra brings."""
    try:
        import torch
    except ImportError:
        skip_or_fail(component="MEGATRON", reason="torch (the profiler extra) is not installed")
    return torch


def profiler_extra_or_skip() -> None:
    """Skip, without importing it, for want of what a profile run on this host needs."""
    if not (find_spec("torch") and find_spec("megatron")):
        skip_or_fail(component="MEGATRON", reason="the profiler extra is not installed")
