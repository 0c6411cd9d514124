"""Where the seconds of recorded steps went: arrays of events in, the parts of `time.parts_s` of
each rank out.

It reads no file and knows no tool's names: `hp_tool.traces` reads and classes what was recorded.
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
