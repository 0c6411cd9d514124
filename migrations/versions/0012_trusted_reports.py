"""Reports that only their owner trusts (`trust` below a half) go into calibrations of that owner's
own. What was stored before teaches everybody, as it did.

Adds a column with a default. Older code beside it goes on as before: it does not write such
calibrations, and takes the newest one of any owner.
"""

import sqlalchemy as sa
from alembic import op

from hp_tool.store.moving import update_in_batches

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None
LOST_BY_DOWNGRADE = {
    "calibrations of owners": "SELECT count(*) FROM hp_calibrations WHERE owner <> ''"
}

TABLE, VERSION = "hp_calibrations", "uq_hp_calibrations_version"
SERIES = ("cluster_key", "framework", "model_family")
MEASUREMENT = sa.table("hp_measurements", *(sa.column(name) for name in ("id", "trust", "state")))


def upgrade():
    taught = sa.and_(
        MEASUREMENT.c.trust < 0.5, MEASUREMENT.c.state == "accepted"
    )  # once excluded by 0009
    update_in_batches(MEASUREMENT, where=taught, values={"trust": 1.0})
    with op.batch_alter_table(TABLE) as table:
        table.add_column(sa.Column("owner", sa.String(200), nullable=False, server_default=""))
        table.drop_constraint(VERSION, type_="unique")
        table.create_unique_constraint(VERSION, [*SERIES, "owner", "version"])


def downgrade():
    op.execute("DELETE FROM hp_calibrations WHERE owner <> ''")
    untrusted = sa.and_(MEASUREMENT.c.trust < 0.5, MEASUREMENT.c.state == "accepted")
    update_in_batches(MEASUREMENT, where=untrusted, values={"state": "excluded"})
    with op.batch_alter_table(TABLE) as table:
        table.drop_constraint(VERSION, type_="unique")
        table.create_unique_constraint(VERSION, [*SERIES, "version"])
        table.drop_column("owner")
