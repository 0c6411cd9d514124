"""Changes of what measurements teach that no calibration was fitted to yet.

Adds a table. Older code beside it goes on as before: it fits within the request.
"""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None
LOST_BY_DOWNGRADE = {
    "calibrations that are due (run `hp-tool calibrate`)": "SELECT count(*) FROM hp_due_refits"
}


def upgrade():
    op.create_table(
        "hp_due_refits",
        sa.Column("id", sa.String(length=16), nullable=False),
        sa.Column("cluster_key", sa.String(length=200), nullable=False),
        sa.Column("framework", sa.String(length=100), nullable=False),
        sa.Column("owner", sa.String(length=200)),
        sa.PrimaryKeyConstraint("id", name="pk_hp_due_refits"),
    )


def downgrade():
    op.drop_table("hp_due_refits")
