"""Split recorded steps into the parts of `time.parts_s`, by rank, from arrays of events.

This package reads no files and has no kernel names; `hp_tool.traces` reads and classifies events.
"""

from hp_tool.traces.timeline.events import KINDS, Collectives, Group, Phases, RankEvents
from hp_tool.traces.timeline.faults import Fault, exposed_s, faults
from hp_tool.traces.timeline.ranks import Timeline, timeline
from hp_tool.traces.timeline.split import StepSplit

__all__ = [
    "KINDS",
    "Collectives",
    "Fault",
    "Group",
    "Phases",
    "RankEvents",
    "StepSplit",
    "Timeline",
    "exposed_s",
    "faults",
    "timeline",
]
