"""Table definitions. A change here needs a migration.

Table names begin with hp_, so that the database can also contain Optuna's tables.
"""

import sqlalchemy as sa

from hp_tool.store.columns import UtcDateTime, json_column

PREFIX = "hp_"
ID = sa.String(16)
DIGEST = sa.String(64)

metadata = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

searches = sa.Table(
    "hp_searches",
    metadata,
    sa.Column("id", ID, primary_key=True),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("query", json_column(), nullable=False),
    sa.Column("edition", sa.Integer),  # edition of the hp-tool that stored it; NULL: unknown
    sa.Column("owner", sa.String(200)),
    sa.Column("api_key_id", ID),
    sa.Column("cluster", sa.String(200)),
    sa.Column("kind", sa.String(16)),
    sa.Column("model", sa.String(200)),
    sa.Column("priority", sa.Integer, nullable=False),
    sa.Column("requested", sa.String(16)),
    sa.Column("lease_holder", sa.String(200)),
    sa.Column("lease_token", sa.Integer, nullable=False),
    # Number of claims lost in a row without progress of a run.
    sa.Column("lost_claims", sa.Integer, nullable=False, server_default="0"),
    sa.Column("lease_expires_at", UtcDateTime),
    sa.Column("heartbeat_at", UtcDateTime),
    sa.Column("last_event", sa.Integer, nullable=False),
    sa.Column("progress", json_column(), nullable=False),
    sa.Column("result", json_column()),
    sa.Column("error", json_column()),
    sa.Column("stopped_because", sa.Text),
    sa.Column("label", json_column()),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("updated_at", UtcDateTime, nullable=False),
    sa.Column("started_at", UtcDateTime),
    sa.Column("finished_at", UtcDateTime),
    sa.Index(None, "created_at", "id"),
    *(sa.Index(None, name, "created_at", "id") for name in ("owner", "kind", "model", "state")),
    sa.Index(None, "owner", "started_at"),
    sa.Index(None, "api_key_id"),
    sa.Index(None, "state", "priority", "created_at"),
)

search_words = sa.Table(  # words of names, tags and notes
    "hp_search_words",
    metadata,
    sa.Column("word", sa.String(64), primary_key=True),
    sa.Column(
        "search_id", ID, sa.ForeignKey("hp_searches.id", ondelete="CASCADE"), primary_key=True
    ),
    sa.Index(None, "search_id"),
)

workers = sa.Table(
    "hp_workers",
    metadata,
    sa.Column("holder", sa.String(200), primary_key=True),
    sa.Column("offers", json_column(), nullable=False),
    sa.Column("started_at", UtcDateTime, nullable=False),
    sa.Column("seen_at", UtcDateTime, nullable=False),
)

events = sa.Table(
    "hp_events",
    metadata,
    sa.Column(
        "search_id", ID, sa.ForeignKey("hp_searches.id", ondelete="CASCADE"), primary_key=True
    ),
    sa.Column("seq", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("kind", sa.String(64), nullable=False),
    sa.Column("payload", json_column(), nullable=False),
    sa.Column("at", UtcDateTime, nullable=False),
)

webhooks = sa.Table(
    "hp_webhooks",
    metadata,
    sa.Column(
        "search_id", ID, sa.ForeignKey("hp_searches.id", ondelete="CASCADE"), primary_key=True
    ),
    sa.Column("url", sa.String(2000), nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("next_attempt_at", UtcDateTime, nullable=False),
    sa.Column("last_error", sa.String(500)),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("delivered_at", UtcDateTime),
    sa.Index(None, "state", "next_attempt_at"),
)

runs = sa.Table(
    "hp_runs",
    metadata,
    sa.Column("id", ID, primary_key=True),
    sa.Column("search_id", ID, sa.ForeignKey("hp_searches.id", ondelete="CASCADE"), nullable=False),
    sa.Column("number", sa.Integer, nullable=False),
    sa.Column("digest", DIGEST, nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("parallel", json_column(), nullable=False),
    sa.Column("fidelity", json_column(), nullable=False),
    sa.Column("predicted", json_column(), nullable=False),
    sa.Column("job_name", sa.String(64), nullable=False, unique=True),
    sa.Column("token", sa.Integer, nullable=False),
    sa.Column("handle", sa.Text),
    sa.Column("gpu_seconds", sa.Double),
    sa.Column("cause", sa.Text),
    sa.Column("account", json_column()),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("submitted_at", UtcDateTime),
    sa.Column("finished_at", UtcDateTime),
    sa.UniqueConstraint("search_id", "number"),
    sa.UniqueConstraint("search_id", "digest", "attempt"),
    sa.Index(None, "finished_at"),
    sa.Index(None, "state", "gpu_seconds"),
)

measurements = sa.Table(
    "hp_measurements",
    metadata,
    sa.Column("id", ID, primary_key=True),
    sa.Column("source", sa.String(16), nullable=False),
    sa.Column("search_id", ID, sa.ForeignKey("hp_searches.id", ondelete="SET NULL")),
    sa.Column("run_id", ID, sa.ForeignKey("hp_runs.id", ondelete="SET NULL"), unique=True),
    sa.Column("cluster_key", sa.String(200), nullable=False),
    sa.Column("gpu", sa.String(100), nullable=False),
    sa.Column("framework", sa.String(100), nullable=False),
    sa.Column("model", sa.String(200), nullable=False),
    sa.Column("query", json_column(), nullable=False),
    sa.Column("parallel", json_column(), nullable=False),
    sa.Column("problem_digest", DIGEST, nullable=False),
    sa.Column("digest", DIGEST, nullable=False),
    sa.Column("status", sa.String(16), nullable=False),
    sa.Column("step_s", sa.Double),
    sa.Column("tokens_per_second_per_gpu", sa.Double),
    sa.Column("peak_memory_bytes", sa.BigInteger),
    sa.Column("measurement", json_column(), nullable=False),
    sa.Column("predicted", json_column(), nullable=False),
    # Below 0.5, the measurement calibrates only its owner's predictions.
    sa.Column("trust", sa.Double, nullable=False, default=1.0),
    sa.Column("state", sa.String(16), nullable=False, server_default="accepted"),
    sa.Column("owner", sa.String(200)),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Index(None, "created_at", "id"),
    sa.Index(None, "cluster_key", "framework", "created_at", "id"),
    sa.Index(None, "cluster_key", "gpu", "framework", "state"),
    *(
        sa.Index(None, name, "created_at", "id")
        for name in ("owner", "model", "gpu", "framework", "status", "source", "state")
    ),
    sa.Index(None, "problem_digest", "digest"),
    sa.Index(None, "search_id"),
)

calibrations = sa.Table(
    "hp_calibrations",
    metadata,
    sa.Column("id", ID, primary_key=True),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("cluster_key", sa.String(200), nullable=False),
    sa.Column("framework", sa.String(100), nullable=False),
    sa.Column("model_family", sa.String(100), nullable=False),
    sa.Column("owner", sa.String(200), nullable=False, server_default=""),  # empty: shared
    sa.Column("payload", json_column(), nullable=False),
    sa.Column("num_measurements", sa.Integer, nullable=False),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.UniqueConstraint(
        "cluster_key",
        "framework",
        "model_family",
        "owner",
        "version",
        name="uq_hp_calibrations_version",
    ),
    sa.Index(None, "created_at", "id"),
)

due_refits = sa.Table(  # one row per changed measurement, until a calibration is refitted
    "hp_due_refits",
    metadata,
    sa.Column("id", ID, primary_key=True),
    sa.Column("cluster_key", sa.String(200), nullable=False),
    sa.Column("framework", sa.String(100), nullable=False),
    sa.Column("owner", sa.String(200)),
)

watches = sa.Table(  # watched jobs
    "hp_watches",
    metadata,
    sa.Column("id", ID, primary_key=True),
    sa.Column("name", sa.String(200), nullable=False),
    sa.Column("owner", sa.String(200)),
    sa.Column("query", json_column()),
    sa.Column("expected", json_column()),
    sa.Column("state", json_column()),
    sa.Column("status", sa.String(32), nullable=False),
    sa.Column("measurement_id", ID),
    sa.Column("teaching", sa.String(500)),
    sa.Column("webhook", sa.String(2000)),
    sa.Column("webhook_state", sa.String(16)),
    sa.Column("event", sa.Integer, nullable=False),
    sa.Column("message", json_column()),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("next_attempt_at", UtcDateTime),
    sa.Column("last_error", sa.String(500)),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("updated_at", UtcDateTime, nullable=False),
    sa.Index(None, "created_at", "id"),
    sa.Index(None, "owner", "created_at", "id"),
    sa.Index(None, "webhook_state", "next_attempt_at"),
)

watch_sources = sa.Table(  # processes of watched jobs
    "hp_watch_sources",
    metadata,
    sa.Column("watch_id", ID, sa.ForeignKey("hp_watches.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("source", sa.String(64), primary_key=True),
    sa.Column("state", json_column(), nullable=False),
)

registrations = sa.Table(
    "hp_registrations",
    metadata,
    sa.Column("kind", sa.String(16), primary_key=True),
    sa.Column("owner", sa.String(200), primary_key=True, server_default=""),  # empty: shared
    sa.Column("name", sa.String(200), primary_key=True),
    sa.Column("spec", json_column(), nullable=False),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("updated_at", UtcDateTime, nullable=False),
)

idempotency_keys = sa.Table(
    "hp_idempotency_keys",
    metadata,
    sa.Column("scope", sa.String(32), primary_key=True),
    sa.Column("owner", sa.String(200), primary_key=True),
    sa.Column("key", sa.String(200), primary_key=True),
    sa.Column("fingerprint", DIGEST, nullable=False),
    sa.Column("resource_id", ID, nullable=False),
    sa.Column("created_at", UtcDateTime, nullable=False),
)

api_keys = sa.Table(
    "hp_api_keys",
    metadata,
    sa.Column("id", ID, primary_key=True),
    sa.Column("owner", sa.String(200), nullable=False),
    sa.Column("scope", sa.Integer, nullable=False),
    sa.Column("secret_sha256", DIGEST, nullable=False),
    sa.Column("requests_per_second", sa.Double),
    sa.Column("gpu_seconds_per_day", sa.Double),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("expires_at", UtcDateTime),
    sa.Column("revoked_at", UtcDateTime),
    sa.Index(None, "created_at", "id"),
)

audit = sa.Table(
    "hp_audit",
    metadata,
    sa.Column("id", ID, primary_key=True),
    sa.Column("owner", sa.String(200)),
    sa.Column("api_key_id", ID),
    sa.Column("action", sa.String(200), nullable=False),
    sa.Column("resource", sa.String(500), nullable=False),
    sa.Column("outcome", sa.String(16), nullable=False),
    sa.Column("request_id", sa.String(64)),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Index(None, "created_at", "id"),
    sa.Index(None, "owner", "created_at", "id"),
)
