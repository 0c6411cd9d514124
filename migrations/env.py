"""Run the migration scripts on the connection that hp_tool.store.schema passes to Alembic.

To write a new script, run `alembic -c migrations/alembic.ini revision --autogenerate -m "what
changes"` on the database of HP_DATABASE_URL.
"""

import sqlalchemy as sa
from alembic import context

from hp_tool.store import database_url
from hp_tool.store.columns import UtcDateTime
from hp_tool.store.engine import create_engine
from hp_tool.store.schema import VERSION_TABLE, is_hp_table
from hp_tool.store.tables import metadata


def render_item(kind, item, autogen_context):
    """Return SQLAlchemy's type for a column, because a migration outlives hp_tool's own types."""
    if kind == "type" and isinstance(item, UtcDateTime):
        return "sa.DateTime(timezone=True)"
    return "sa.JSON()" if kind == "type" and isinstance(item, sa.JSON) else False


def run(connection):
    context.configure(
        connection=connection,
        target_metadata=metadata,
        version_table=VERSION_TABLE,
        include_name=is_hp_table,
        render_item=render_item,
        render_as_batch=True,  # SQLite changes a table by rebuilding it
        # both databases roll DDL back, SQLite once the driver leaves transactions to us
        transactional_ddl=True,
        transaction_per_migration=True,  # the next one needs no lock that this one took
    )
    with context.begin_transaction():
        context.run_migrations()


given = context.config.attributes.get("connection")
if given is not None:
    run(given)
else:
    with create_engine(database_url(), foreign_keys=False).connect() as own:
        run(own)
