"""Read traces of torch.profiler and Nsight Systems as arrays for `hp_tool.traces.timeline`."""

from hp_tool.traces.files import read_traces

__all__ = ["read_traces"]
