"""The first tables."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None
LOST_BY_DOWNGRADE = {
    "measurements": "SELECT count(*) FROM hp_measurements",
    "searches": "SELECT count(*) FROM hp_searches",
    "calibrations": "SELECT count(*) FROM hp_calibrations",
    "registered models and clusters": "SELECT count(*) FROM hp_registrations",
}


def upgrade():
    op.create_table(
        "hp_calibrations",
        sa.Column("id", sa.String(length=16), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("cluster_key", sa.String(length=200), nullable=False),
        sa.Column("framework", sa.String(length=100), nullable=False),
        sa.Column("model_family", sa.String(length=100), nullable=False),
        sa.Column("payload", sa.JSON(), nullable=False),
        sa.Column("num_measurements", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_hp_calibrations"),
        sa.UniqueConstraint(
            "cluster_key", "framework", "model_family", "version", name="uq_hp_calibrations_version"
        ),
    )
    op.create_index("ix_hp_calibrations_created_at_id", "hp_calibrations", ["created_at", "id"])

    op.create_table(
        "hp_idempotency_keys",
        sa.Column("scope", sa.String(length=32), nullable=False),
        sa.Column("owner", sa.String(length=200), nullable=False),
        sa.Column("key", sa.String(length=200), nullable=False),
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("resource_id", sa.String(length=16), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("scope", "owner", "key", name="pk_hp_idempotency_keys"),
    )
    op.create_table(
        "hp_registrations",
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("owner", sa.String(length=200), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("kind", "name", name="pk_hp_registrations"),
    )
    op.create_table(
        "hp_searches",
        sa.Column("id", sa.String(length=16), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("query", sa.JSON(), nullable=False),
        sa.Column("owner", sa.String(length=200), nullable=True),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("requested", sa.String(length=16), nullable=True),
        sa.Column("lease_holder", sa.String(length=200), nullable=True),
        sa.Column("lease_token", sa.Integer(), nullable=False),
        sa.Column("lease_expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("heartbeat_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("last_event", sa.Integer(), nullable=False),
        sa.Column("progress", sa.JSON(), nullable=False),
        sa.Column("result", sa.JSON(), nullable=True),
        sa.Column("error", sa.JSON(), nullable=True),
        sa.Column("stopped_because", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_hp_searches"),
    )
    op.create_index("ix_hp_searches_created_at_id", "hp_searches", ["created_at", "id"])
    op.create_index(
        "ix_hp_searches_owner_created_at_id", "hp_searches", ["owner", "created_at", "id"]
    )
    op.create_index(
        "ix_hp_searches_state_priority_created_at",
        "hp_searches",
        ["state", "priority", "created_at"],
    )

    op.create_table(
        "hp_events",
        sa.Column("search_id", sa.String(length=16), nullable=False),
        sa.Column("seq", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("kind", sa.String(length=64), nullable=False),
        sa.Column("payload", sa.JSON(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["search_id"], ["hp_searches.id"], name="fk_hp_events_search_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("search_id", "seq", name="pk_hp_events"),
    )
    op.create_table(
        "hp_runs",
        sa.Column("id", sa.String(length=16), nullable=False),
        sa.Column("search_id", sa.String(length=16), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("parallel", sa.JSON(), nullable=False),
        sa.Column("fidelity", sa.JSON(), nullable=False),
        sa.Column("predicted", sa.JSON(), nullable=False),
        sa.Column("job_name", sa.String(length=64), nullable=False),
        sa.Column("token", sa.Integer(), nullable=False),
        sa.Column("handle", sa.Text(), nullable=True),
        sa.Column("gpu_seconds", sa.Double(), nullable=True),
        sa.Column("cause", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("submitted_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["search_id"], ["hp_searches.id"], name="fk_hp_runs_search_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_hp_runs"),
        sa.UniqueConstraint("job_name", name="uq_hp_runs_job_name"),
        sa.UniqueConstraint(
            "search_id", "digest", "attempt", name="uq_hp_runs_search_id_digest_attempt"
        ),
        sa.UniqueConstraint("search_id", "number", name="uq_hp_runs_search_id_number"),
    )
    op.create_table(
        "hp_measurements",
        sa.Column("id", sa.String(length=16), nullable=False),
        sa.Column("source", sa.String(length=16), nullable=False),
        sa.Column("search_id", sa.String(length=16), nullable=True),
        sa.Column("run_id", sa.String(length=16), nullable=True),
        sa.Column("cluster_key", sa.String(length=200), nullable=False),
        sa.Column("gpu", sa.String(length=100), nullable=False),
        sa.Column("framework", sa.String(length=100), nullable=False),
        sa.Column("model", sa.String(length=200), nullable=False),
        sa.Column("query", sa.JSON(), nullable=False),
        sa.Column("parallel", sa.JSON(), nullable=False),
        sa.Column("problem_digest", sa.String(length=64), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("step_s", sa.Double(), nullable=True),
        sa.Column("tokens_per_second_per_gpu", sa.Double(), nullable=True),
        sa.Column("peak_memory_bytes", sa.BigInteger(), nullable=True),
        sa.Column("measurement", sa.JSON(), nullable=False),
        sa.Column("predicted", sa.JSON(), nullable=False),
        sa.Column("trust", sa.Double(), nullable=False),
        sa.Column("owner", sa.String(length=200), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id"], ["hp_runs.id"], name="fk_hp_measurements_run_id", ondelete="SET NULL"
        ),
        sa.ForeignKeyConstraint(
            ["search_id"],
            ["hp_searches.id"],
            name="fk_hp_measurements_search_id",
            ondelete="SET NULL",
        ),
        sa.PrimaryKeyConstraint("id", name="pk_hp_measurements"),
        sa.UniqueConstraint("run_id", name="uq_hp_measurements_run_id"),
    )
    op.create_index(
        "ix_hp_measurements_cluster_key_framework_created_at_id",
        "hp_measurements",
        ["cluster_key", "framework", "created_at", "id"],
    )
    op.create_index("ix_hp_measurements_created_at_id", "hp_measurements", ["created_at", "id"])
    op.create_index(
        "ix_hp_measurements_problem_digest_digest", "hp_measurements", ["problem_digest", "digest"]
    )
    op.create_index("ix_hp_measurements_search_id", "hp_measurements", ["search_id"])


def downgrade():
    op.drop_table("hp_measurements")
    op.drop_table("hp_runs")
    op.drop_table("hp_events")
    op.drop_table("hp_searches")
    op.drop_table("hp_registrations")
    op.drop_table("hp_idempotency_keys")
    op.drop_table("hp_calibrations")
