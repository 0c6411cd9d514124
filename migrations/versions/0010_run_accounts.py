"""What the engine said of a run: its wait, nodes, and the end of the log of one that was given up.
Only adds.
"""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None
LOST_BY_DOWNGRADE = {
    "runs with the engine's account of them": "SELECT count(*) FROM hp_runs WHERE account IS NOT "
    "NULL"
}


def upgrade():
    op.add_column("hp_runs", sa.Column("account", sa.JSON(none_as_null=True)))


def downgrade():
    op.drop_column("hp_runs", "account")
