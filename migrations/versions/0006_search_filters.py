"""What a search asks for, beside its query: lists of a million by kind or model. Only adds: older
code works on it, and what it writes meanwhile is found by every filter but these two.
"""

import sqlalchemy as sa
from alembic import op

from hp_tool.store.moving import add_column, create_index, in_batches

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None
LOST_BY_DOWNGRADE = {}

ASKED = {
    "sqlite": """
        UPDATE hp_searches SET
            kind = substr(json_extract(query, '$.kind'), 1, 16),
            model = substr(CASE json_type(query, '$.model')
                WHEN 'text' THEN json_extract(query, '$.model')
                WHEN 'object' THEN json_extract(query, '$.model.name') END, 1, 200)""",
    "postgresql": """
        UPDATE hp_searches SET
            kind = left(query ->> 'kind', 16),
            model = left(CASE json_typeof(query -> 'model')
                WHEN 'string' THEN query ->> 'model'
                WHEN 'object' THEN query #>> '{model,name}' END, 200)""",
}


SEARCH = sa.table("hp_searches", sa.column("id"), sa.column("kind"))


def upgrade():
    add_column("hp_searches", sa.Column("kind", sa.String(length=16), nullable=True))
    add_column("hp_searches", sa.Column("model", sa.String(length=200), nullable=True))
    in_batches(sa.select(SEARCH.c.id).where(SEARCH.c.kind.is_(None)), key=SEARCH.c.id, change=fill)
    for name in ("kind", "model"):
        create_index(
            f"ix_hp_searches_{name}_created_at_id", "hp_searches", [name, "created_at", "id"]
        )


def fill(connection, rows):
    these = sa.bindparam("ids", expanding=True)
    statement = sa.text(f"{ASKED[connection.dialect.name]} WHERE id IN :ids").bindparams(these)
    connection.execute(statement, {"ids": [row.id for row in rows]})


def downgrade():
    for name in ("model", "kind"):
        op.drop_index(f"ix_hp_searches_{name}_created_at_id", "hp_searches")
        op.drop_column("hp_searches", name)
