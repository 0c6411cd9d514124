"""Lists of a million rows by any filter, turns between owners, and which cluster a search keeps
busy. Only adds: older code works on it.
"""

import sqlalchemy as sa
from alembic import op

from hp_tool.store.moving import add_column, create_index

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None
LOST_BY_DOWNGRADE = {
    "searches with the cluster that they keep busy": "SELECT count(*) FROM hp_searches WHERE "
    "cluster IS NOT NULL"
}

MEASUREMENTS = ("owner", "model", "gpu", "framework", "status", "source")


def upgrade():
    add_column("hp_searches", sa.Column("cluster", sa.String(length=200), nullable=True))
    for name in MEASUREMENTS:
        create_index(
            f"ix_hp_measurements_{name}_created_at_id",
            "hp_measurements",
            [name, "created_at", "id"],
        )
    create_index(
        "ix_hp_measurements_cluster_key_gpu_framework",
        "hp_measurements",
        ["cluster_key", "gpu", "framework"],
    )
    create_index("ix_hp_runs_state_gpu_seconds", "hp_runs", ["state", "gpu_seconds"])
    create_index("ix_hp_searches_state_created_at_id", "hp_searches", ["state", "created_at", "id"])
    create_index("ix_hp_searches_owner_started_at", "hp_searches", ["owner", "started_at"])


def downgrade():
    op.drop_index("ix_hp_searches_owner_started_at", "hp_searches")
    op.drop_index("ix_hp_searches_state_created_at_id", "hp_searches")
    op.drop_column("hp_searches", "cluster")
    op.drop_index("ix_hp_runs_state_gpu_seconds", "hp_runs")
    op.drop_index("ix_hp_measurements_cluster_key_gpu_framework", "hp_measurements")
    for name in reversed(MEASUREMENTS):
        op.drop_index(f"ix_hp_measurements_{name}_created_at_id", "hp_measurements")
