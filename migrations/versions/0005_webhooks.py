"""Webhooks of searches. Only adds: older code works on it."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None
LOST_BY_DOWNGRADE = {"webhooks": "SELECT count(*) FROM hp_webhooks"}


def upgrade():
    op.create_table(
        "hp_webhooks",
        sa.Column("search_id", sa.String(length=16), nullable=False),
        sa.Column("url", sa.String(length=2000), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("next_attempt_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_error", sa.String(length=500), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("delivered_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["search_id"], ["hp_searches.id"], name="fk_hp_webhooks_search_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("search_id", name="pk_hp_webhooks"),
    )
    op.create_index(
        "ix_hp_webhooks_state_next_attempt_at", "hp_webhooks", ["state", "next_attempt_at"]
    )


def downgrade():
    op.drop_table("hp_webhooks")
