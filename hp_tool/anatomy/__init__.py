"""One configuration looked into: what each pipeline stage holds and takes, when it runs what, and where its ranks lie."""

from hp_tool.anatomy.placement import Node, Placement, RankGroup, RankPlace, placement
from hp_tool.anatomy.schedule import Schedule, ScheduleRow, ScheduleSpan, schedule
from hp_tool.anatomy.stages import StageAnatomy, stages

__all__ = [
    "Node",
    "Placement",
    "RankGroup",
    "RankPlace",
    "Schedule",
    "ScheduleRow",
    "ScheduleSpan",
    "StageAnatomy",
    "placement",
    "schedule",
    "stages",
]
