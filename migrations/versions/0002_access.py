"""API keys, the audit log, and which key a search was submitted with. Only adds: older code works
on it.
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None
LOST_BY_DOWNGRADE = {
    "API keys": "SELECT count(*) FROM hp_api_keys",
    "rows of the audit log": "SELECT count(*) FROM hp_audit",
}


def upgrade():
    op.create_table(
        "hp_api_keys",
        sa.Column("id", sa.String(length=16), nullable=False),
        sa.Column("owner", sa.String(length=200), nullable=False),
        sa.Column("scope", sa.Integer(), nullable=False),
        sa.Column("secret_sha256", sa.String(length=64), nullable=False),
        sa.Column("requests_per_second", sa.Double(), nullable=True),
        sa.Column("gpu_seconds_per_day", sa.Double(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_hp_api_keys"),
    )
    op.create_index("ix_hp_api_keys_created_at_id", "hp_api_keys", ["created_at", "id"])
    op.create_table(
        "hp_audit",
        sa.Column("id", sa.String(length=16), nullable=False),
        sa.Column("owner", sa.String(length=200), nullable=True),
        sa.Column("api_key_id", sa.String(length=16), nullable=True),
        sa.Column("action", sa.String(length=200), nullable=False),
        sa.Column("resource", sa.String(length=500), nullable=False),
        sa.Column("outcome", sa.String(length=16), nullable=False),
        sa.Column("request_id", sa.String(length=64), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_hp_audit"),
    )
    op.create_index("ix_hp_audit_created_at_id", "hp_audit", ["created_at", "id"])
    op.create_index("ix_hp_audit_owner_created_at_id", "hp_audit", ["owner", "created_at", "id"])
    op.add_column("hp_searches", sa.Column("api_key_id", sa.String(length=16), nullable=True))
    op.create_index("ix_hp_searches_api_key_id", "hp_searches", ["api_key_id"])
    op.create_index("ix_hp_runs_finished_at", "hp_runs", ["finished_at"])


def downgrade():
    op.drop_index("ix_hp_runs_finished_at", "hp_runs")
    op.drop_index("ix_hp_searches_api_key_id", "hp_searches")
    op.drop_column("hp_searches", "api_key_id")
    op.drop_table("hp_audit")
    op.drop_table("hp_api_keys")
