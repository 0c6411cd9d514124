"""Processes that begin with everything imported: an interpreter each would take seconds to come so
far.
"""

from __future__ import annotations

import multiprocessing

FORKED = multiprocessing.get_context("forkserver")
"""Its server holds no connection that processes would share."""
FORKED.set_forkserver_preload(["hp_tool.store.sql", "hp_tool.loop.tuning", "optuna.storages"])
