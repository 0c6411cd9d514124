"""Registrations stand under their owner: two may give their own model the same name. Nothing before
this wrote any.
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None
LOST_BY_DOWNGRADE = {
    "names registered by several owners": "SELECT count(*) - count(DISTINCT kind || '/' || name) "
    "FROM hp_registrations"
}

TABLE, KEY = "hp_registrations", "pk_hp_registrations"


def upgrade():
    op.execute("UPDATE hp_registrations SET owner = '' WHERE owner IS NULL")
    with op.batch_alter_table(TABLE) as table:
        table.alter_column(
            "owner", existing_type=sa.String(length=200), nullable=False, server_default=""
        )
        table.drop_constraint(KEY, type_="primary")
        table.create_primary_key(KEY, ["kind", "owner", "name"])


def downgrade():
    # One row a name is what the older schema can hold: everybody's, else the first owner's.
    op.execute(
        "DELETE FROM hp_registrations WHERE EXISTS (SELECT 1 FROM hp_registrations AS other WHERE "
        "other.kind = "
        "hp_registrations.kind AND other.name = hp_registrations.name AND other.owner < "
        "hp_registrations.owner)"
    )
    with op.batch_alter_table(TABLE) as table:
        table.drop_constraint(KEY, type_="primary")
        table.create_primary_key(KEY, ["kind", "name"])
        table.alter_column(
            "owner", existing_type=sa.String(length=200), nullable=True, server_default=None
        )
    op.execute("UPDATE hp_registrations SET owner = NULL WHERE owner = ''")
