"""Where searches, runs, measurements and calibrations are kept: SQLite by default, PostgreSQL when outgrown.

`open_store` is the door; the guarantees stand with the port, `hp_tool.domain.ports.Store`. Import this package late:
it loads SQLAlchemy.
"""

from hp_tool.store.engine import database_url, masked
from hp_tool.store.opening import open_store
from hp_tool.store.sql import SqlStore

__all__ = ["SqlStore", "database_url", "masked", "open_store"]
