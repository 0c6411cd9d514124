"""Rename `mends` to `fixes` in stored results, and drop the advice that a verdict replaces.

An older edition cannot read results that are stored with a verdict.
"""

import sqlalchemy as sa

from hp_tool.store.moving import in_batches

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None
LOST_BY_DOWNGRADE = {}

SEARCH = sa.table("hp_searches", sa.column("id"), sa.column("result", sa.JSON))


def upgrade():
    rewrite(names={"mends": "fixes"}, without="advice")


def downgrade():
    rewrite(names={"fixes": "mends"}, without="verdict")


def rewrite(*, names, without):
    def change(connection, rows):
        for row in rows:
            result = renamed(row.result, names)
            if result.get("answer"):
                result["answer"].pop(without, None)
            if result != row.result:
                connection.execute(
                    sa.update(SEARCH).where(SEARCH.c.id == row.id).values(result=result)
                )

    stored = sa.select(SEARCH.c.id, SEARCH.c.result).where(SEARCH.c.result.is_not(None))
    in_batches(stored, key=SEARCH.c.id, change=change)


def renamed(value, names):
    if isinstance(value, dict):
        return {names.get(key, key): renamed(each, names) for key, each in value.items()}
    if isinstance(value, list):
        return [renamed(each, names) for each in value]
    return value
