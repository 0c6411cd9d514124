"""One configuration in detail: what each pipeline stage holds and takes, when it runs what, and where its ranks lie."""

from hp_tool.anatomy.placement import Placement, placement
from hp_tool.anatomy.schedule import Schedule, schedule
from hp_tool.anatomy.stages import StageAnatomy, stages

__all__ = ["Placement", "Schedule", "StageAnatomy", "placement", "schedule", "stages"]
