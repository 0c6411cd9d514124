"""Workers that a search lost one after another. Only adds: older code works on it, and leaves the
count as it is.
"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None
LOST_BY_DOWNGRADE = {}


def upgrade():
    op.add_column(
        "hp_searches", sa.Column("lost_claims", sa.Integer(), nullable=False, server_default="0")
    )


def downgrade():
    op.drop_column("hp_searches", "lost_claims")
