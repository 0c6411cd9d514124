"""Rename `mends` to `fixes` in stored results. Older code works on it: it reads neither key."""

import sqlalchemy as sa

from hp_tool.store.moving import in_batches

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None
LOST_BY_DOWNGRADE = {}

RENAME = {
    "sqlite": "UPDATE hp_searches SET result = replace(result, :old, :new)",
    "postgresql": (
        "UPDATE hp_searches SET result = CAST(replace(CAST(result AS text), :old, :new) AS json)"
    ),
}
SEARCH = sa.table("hp_searches", sa.column("id"), sa.column("result"))


def upgrade():
    rename("mends", "fixes")


def downgrade():
    rename("fixes", "mends")


def rename(old, new):
    names = {"old": f'"{old}":', "new": f'"{new}":'}
    holds_old = sa.cast(SEARCH.c.result, sa.Text).contains(names["old"], autoescape=True)

    def change(connection, rows):
        statement = sa.text(f"{RENAME[connection.dialect.name]} WHERE id IN :ids").bindparams(
            sa.bindparam("ids", expanding=True)
        )
        connection.execute(statement, {"ids": [row.id for row in rows], **names})

    in_batches(sa.select(SEARCH.c.id).where(holds_old), key=SEARCH.c.id, change=change)
