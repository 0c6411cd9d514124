"""Ports to cluster engines and to the store."""

from hp_tool.domain.ports.launcher import Launcher as Launcher
from hp_tool.domain.ports.launcher import Queueing as Queueing
from hp_tool.domain.ports.launcher import Timekeeping as Timekeeping
from hp_tool.domain.ports.store import Store as Store
from hp_tool.domain.ports.watches import WatchStore as WatchStore
