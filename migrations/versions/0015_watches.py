"""Watched jobs: what their detectors remember, and their webhooks. Only adds: older code works on
it.
"""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None
LOST_BY_DOWNGRADE = {"watched jobs": "SELECT count(*) FROM hp_watches"}


def upgrade():
    op.create_table(
        "hp_watches",
        sa.Column("id", sa.String(length=16), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("owner", sa.String(length=200)),
        sa.Column("query", sa.JSON()),
        sa.Column("expected", sa.JSON()),
        sa.Column("state", sa.JSON()),
        sa.Column("status", sa.String(length=32), nullable=False),
        sa.Column("measurement_id", sa.String(length=16)),
        sa.Column("teaching", sa.String(length=500)),
        sa.Column("webhook", sa.String(length=2000)),
        sa.Column("webhook_state", sa.String(length=16)),
        sa.Column("event", sa.Integer(), nullable=False),
        sa.Column("message", sa.JSON()),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("next_attempt_at", sa.DateTime(timezone=True)),
        sa.Column("last_error", sa.String(length=500)),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_hp_watches"),
    )
    op.create_index("ix_hp_watches_created_at_id", "hp_watches", ["created_at", "id"])
    op.create_index(
        "ix_hp_watches_owner_created_at_id", "hp_watches", ["owner", "created_at", "id"]
    )
    op.create_index(
        "ix_hp_watches_webhook_state_next_attempt_at",
        "hp_watches",
        ["webhook_state", "next_attempt_at"],
    )
    op.create_table(
        "hp_watch_sources",
        sa.Column("watch_id", sa.String(length=16), nullable=False),
        sa.Column("source", sa.String(length=64), nullable=False),
        sa.Column("state", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(
            ["watch_id"], ["hp_watches.id"], name="fk_hp_watch_sources_watch_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("watch_id", "source", name="pk_hp_watch_sources"),
    )


def downgrade():
    op.drop_table("hp_watch_sources")
    op.drop_table("hp_watches")
