"""Read torch.profiler and Nsight Systems traces into arrays for `hp_tool.traces.timeline`."""

from hp_tool.traces.files import read_traces

__all__ = ["read_traces"]
