"""Create the tables of the first release.

The revision keeps the number that these tables had in the last preview, whose databases are
therefore up to date.
"""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = None
branch_labels = None
depends_on = None


def upgrade():
    op.create_table(
        "hp_api_keys",
        sa.Column("id", sa.String(length=16), nullable=False),
        sa.Column("owner", sa.String(length=200), nullable=False),
        sa.Column("scope", sa.Integer(), nullable=False),
        sa.Column("secret_sha256", sa.String(length=64), nullable=False),
        sa.Column("requests_per_second", sa.Double()),
        sa.Column("gpu_seconds_per_day", sa.Double()),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True)),
        sa.Column("revoked_at", sa.DateTime(timezone=True)),
        sa.PrimaryKeyConstraint("id", name="pk_hp_api_keys"),
    )
    op.create_index("ix_hp_api_keys_created_at_id", "hp_api_keys", ["created_at", "id"])
    op.create_table(
        "hp_audit",
        sa.Column("id", sa.String(length=16), nullable=False),
        sa.Column("owner", sa.String(length=200)),
        sa.Column("api_key_id", sa.String(length=16)),
        sa.Column("action", sa.String(length=200), nullable=False),
        sa.Column("resource", sa.String(length=500), nullable=False),
        sa.Column("outcome", sa.String(length=16), nullable=False),
        sa.Column("request_id", sa.String(length=64)),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_hp_audit"),
    )
    op.create_index("ix_hp_audit_created_at_id", "hp_audit", ["created_at", "id"])
    op.create_index("ix_hp_audit_owner_created_at_id", "hp_audit", ["owner", "created_at", "id"])
    op.create_table(
        "hp_calibrations",
        sa.Column("id", sa.String(length=16), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("cluster_key", sa.String(length=200), nullable=False),
        sa.Column("framework", sa.String(length=100), nullable=False),
        sa.Column("model_family", sa.String(length=100), nullable=False),
        sa.Column("owner", sa.String(length=200), server_default="", nullable=False),
        sa.Column("payload", sa.JSON(), nullable=False),
        sa.Column("num_measurements", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_hp_calibrations"),
        sa.UniqueConstraint(
            "cluster_key",
            "framework",
            "model_family",
            "owner",
            "version",
            name="uq_hp_calibrations_version",
        ),
    )
    op.create_index("ix_hp_calibrations_created_at_id", "hp_calibrations", ["created_at", "id"])
    op.create_table(
        "hp_due_refits",
        sa.Column("id", sa.String(length=16), nullable=False),
        sa.Column("cluster_key", sa.String(length=200), nullable=False),
        sa.Column("framework", sa.String(length=100), nullable=False),
        sa.Column("owner", sa.String(length=200)),
        sa.PrimaryKeyConstraint("id", name="pk_hp_due_refits"),
    )
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
        sa.Column("owner", sa.String(length=200), server_default="", nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("kind", "owner", "name", name="pk_hp_registrations"),
    )
    op.create_table(
        "hp_searches",
        sa.Column("id", sa.String(length=16), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("query", sa.JSON(), nullable=False),
        sa.Column("edition", sa.Integer()),
        sa.Column("owner", sa.String(length=200)),
        sa.Column("api_key_id", sa.String(length=16)),
        sa.Column("cluster", sa.String(length=200)),
        sa.Column("kind", sa.String(length=16)),
        sa.Column("model", sa.String(length=200)),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("requested", sa.String(length=16)),
        sa.Column("lease_holder", sa.String(length=200)),
        sa.Column("lease_token", sa.Integer(), nullable=False),
        sa.Column("lost_claims", sa.Integer(), server_default="0", nullable=False),
        sa.Column("lease_expires_at", sa.DateTime(timezone=True)),
        sa.Column("heartbeat_at", sa.DateTime(timezone=True)),
        sa.Column("last_event", sa.Integer(), nullable=False),
        sa.Column("progress", sa.JSON(), nullable=False),
        sa.Column("result", sa.JSON()),
        sa.Column("error", sa.JSON()),
        sa.Column("stopped_because", sa.Text()),
        sa.Column("label", sa.JSON()),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True)),
        sa.Column("finished_at", sa.DateTime(timezone=True)),
        sa.PrimaryKeyConstraint("id", name="pk_hp_searches"),
    )
    op.create_index("ix_hp_searches_api_key_id", "hp_searches", ["api_key_id"])
    op.create_index("ix_hp_searches_created_at_id", "hp_searches", ["created_at", "id"])
    op.create_index(
        "ix_hp_searches_kind_created_at_id", "hp_searches", ["kind", "created_at", "id"]
    )
    op.create_index(
        "ix_hp_searches_model_created_at_id", "hp_searches", ["model", "created_at", "id"]
    )
    op.create_index(
        "ix_hp_searches_owner_created_at_id", "hp_searches", ["owner", "created_at", "id"]
    )
    op.create_index("ix_hp_searches_owner_started_at", "hp_searches", ["owner", "started_at"])
    op.create_index(
        "ix_hp_searches_state_created_at_id", "hp_searches", ["state", "created_at", "id"]
    )
    op.create_index(
        "ix_hp_searches_state_priority_created_at",
        "hp_searches",
        ["state", "priority", "created_at"],
    )
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
        "hp_workers",
        sa.Column("holder", sa.String(length=200), nullable=False),
        sa.Column("offers", sa.JSON(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("holder", name="pk_hp_workers"),
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
        sa.Column("handle", sa.Text()),
        sa.Column("gpu_seconds", sa.Double()),
        sa.Column("cause", sa.Text()),
        sa.Column("account", sa.JSON()),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("submitted_at", sa.DateTime(timezone=True)),
        sa.Column("finished_at", sa.DateTime(timezone=True)),
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
    op.create_index("ix_hp_runs_finished_at", "hp_runs", ["finished_at"])
    op.create_index("ix_hp_runs_state_gpu_seconds", "hp_runs", ["state", "gpu_seconds"])
    op.create_table(
        "hp_search_words",
        sa.Column("word", sa.String(length=64), nullable=False),
        sa.Column("search_id", sa.String(length=16), nullable=False),
        sa.ForeignKeyConstraint(
            ["search_id"],
            ["hp_searches.id"],
            name="fk_hp_search_words_search_id",
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("word", "search_id", name="pk_hp_search_words"),
    )
    op.create_index("ix_hp_search_words_search_id", "hp_search_words", ["search_id"])
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
    op.create_table(
        "hp_webhooks",
        sa.Column("search_id", sa.String(length=16), nullable=False),
        sa.Column("url", sa.String(length=2000), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("next_attempt_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_error", sa.String(length=500)),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("delivered_at", sa.DateTime(timezone=True)),
        sa.ForeignKeyConstraint(
            ["search_id"], ["hp_searches.id"], name="fk_hp_webhooks_search_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("search_id", name="pk_hp_webhooks"),
    )
    op.create_index(
        "ix_hp_webhooks_state_next_attempt_at", "hp_webhooks", ["state", "next_attempt_at"]
    )
    op.create_table(
        "hp_measurements",
        sa.Column("id", sa.String(length=16), nullable=False),
        sa.Column("source", sa.String(length=16), nullable=False),
        sa.Column("search_id", sa.String(length=16)),
        sa.Column("run_id", sa.String(length=16)),
        sa.Column("cluster_key", sa.String(length=200), nullable=False),
        sa.Column("gpu", sa.String(length=100), nullable=False),
        sa.Column("framework", sa.String(length=100), nullable=False),
        sa.Column("model", sa.String(length=200), nullable=False),
        sa.Column("query", sa.JSON(), nullable=False),
        sa.Column("parallel", sa.JSON(), nullable=False),
        sa.Column("problem_digest", sa.String(length=64), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("step_s", sa.Double()),
        sa.Column("tokens_per_second_per_gpu", sa.Double()),
        sa.Column("peak_memory_bytes", sa.BigInteger()),
        sa.Column("measurement", sa.JSON(), nullable=False),
        sa.Column("predicted", sa.JSON(), nullable=False),
        sa.Column("trust", sa.Double(), nullable=False),
        sa.Column("state", sa.String(length=16), server_default="accepted", nullable=False),
        sa.Column("owner", sa.String(length=200)),
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
    op.create_index(
        "ix_hp_measurements_cluster_key_gpu_framework_state",
        "hp_measurements",
        ["cluster_key", "gpu", "framework", "state"],
    )
    op.create_index("ix_hp_measurements_created_at_id", "hp_measurements", ["created_at", "id"])
    op.create_index(
        "ix_hp_measurements_framework_created_at_id",
        "hp_measurements",
        ["framework", "created_at", "id"],
    )
    op.create_index(
        "ix_hp_measurements_gpu_created_at_id", "hp_measurements", ["gpu", "created_at", "id"]
    )
    op.create_index(
        "ix_hp_measurements_model_created_at_id", "hp_measurements", ["model", "created_at", "id"]
    )
    op.create_index(
        "ix_hp_measurements_owner_created_at_id", "hp_measurements", ["owner", "created_at", "id"]
    )
    op.create_index(
        "ix_hp_measurements_problem_digest_digest", "hp_measurements", ["problem_digest", "digest"]
    )
    op.create_index("ix_hp_measurements_search_id", "hp_measurements", ["search_id"])
    op.create_index(
        "ix_hp_measurements_source_created_at_id", "hp_measurements", ["source", "created_at", "id"]
    )
    op.create_index(
        "ix_hp_measurements_state_created_at_id", "hp_measurements", ["state", "created_at", "id"]
    )
    op.create_index(
        "ix_hp_measurements_status_created_at_id", "hp_measurements", ["status", "created_at", "id"]
    )
