"""Runs and measurements of serving are stored as what they are. Before, `parallel` held one replica
in the words of training (`micro_batch_size`: the requests it serves at once), and `step_s` the
latency of a request with the penalty of missed targets.

Only values change, in columns that were there. Older code reads them without an error, and newer
code leaves out what older code writes afterwards; `downgrade` to 0007 and `upgrade` moves that too.
Events stay as they were told.
"""

import hashlib
import json

import sqlalchemy as sa

from hp_tool.store.moving import in_batches

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None
LOST_BY_DOWNGRADE = {}

FRAMEWORKS = ("megatron-core-serving", "vllm-serving")
BATCHED_TOKENS = 8192
"""Of one forward pass: the default of every engine that was ever measured."""
DEFAULTS = {
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "expert_parallel_size": 1,
    "attention_data_parallel_size": 1,
    "data_parallel_size": 1,
    "max_num_seqs": 256,
    "max_num_batched_tokens": BATCHED_TOKENS,
}


def columns(name, *others):
    json_columns = [sa.column(each, sa.JSON(none_as_null=True)) for each in others]
    return sa.table(
        name,
        sa.column("id"),
        sa.column("digest"),
        sa.column("search_id"),
        sa.column("framework"),
        *json_columns,
    )


SEARCH = columns("hp_searches", "query", "progress", "result")
RUN = columns("hp_runs", "parallel", "fidelity", "predicted")
MEASUREMENT = columns("hp_measurements", "query", "parallel", "predicted", "measurement")
MEASUREMENT.append_column(sa.column("step_s"))
SERVES = SEARCH.c.query["kind"].as_string() == "inference"


def upgrade():
    runs = sa.select(RUN.c.id, RUN.c.parallel, RUN.c.fidelity, RUN.c.predicted, SEARCH.c.query)
    each(
        RUN, runs.join_from(RUN, SEARCH, SEARCH.c.id == RUN.c.search_id).where(SERVES), upgraded_run
    )
    each(
        MEASUREMENT,
        sa.select(MEASUREMENT).where(MEASUREMENT.c.framework.in_(FRAMEWORKS)),
        upgraded_measurement,
    )
    each(
        SEARCH,
        sa.select(SEARCH.c.id, SEARCH.c.query, SEARCH.c.progress, SEARCH.c.result).where(SERVES),
        upgraded_search,
    )


def downgrade():
    runs = sa.select(RUN.c.id, RUN.c.parallel, RUN.c.fidelity).join_from(
        RUN, SEARCH, SEARCH.c.id == RUN.c.search_id
    )
    each(RUN, runs.where(SERVES), downgraded_run)
    each(
        MEASUREMENT,
        sa.select(MEASUREMENT).where(MEASUREMENT.c.framework.in_(FRAMEWORKS)),
        downgraded_measurement,
    )
    each(
        SEARCH,
        sa.select(SEARCH.c.id, SEARCH.c.progress, SEARCH.c.result).where(SERVES),
        downgraded_search,
    )


def each(table, query, changed):
    """Change the rows of a query by what `changed(connection, row)` returns."""

    def change(connection, rows):
        for row in rows:
            connection.execute(
                sa.update(table).where(table.c.id == row.id).values(changed(connection, row))
            )

    in_batches(query, key=table.c.id, change=change)


def upgraded_run(connection, row):
    config = deployment(row.parallel, query=row.query, predicted=row.predicted)
    return {"parallel": config, "digest": serving_digest(config, row.fidelity)}


def upgraded_measurement(connection, row):
    config = deployment(row.parallel, query=row.query, predicted=row.predicted)
    digest = serving_digest(config, row.measurement["fidelity"])
    measurement = with_load(row.measurement, config, row.query)
    return {"parallel": config, "digest": digest, "measurement": measurement, "step_s": None}


def upgraded_search(connection, row):
    best = connection.execute(
        sa.select(RUN.c.parallel).where(RUN.c.id == row.progress.get("best_run_id"))
    ).scalar()
    progress = row.progress | {"best_parallel": best} if best else row.progress
    result = changed_result(
        row.result, lambda measurement, config: with_load(measurement, config, row.query)
    )
    return {"progress": progress, "result": result}


def downgraded_run(connection, row):
    return {"parallel": replica(row.parallel), "digest": replica_digest(row.parallel, row.fidelity)}


def downgraded_measurement(connection, row):
    measurement = with_step(row.measurement)
    digest = replica_digest(row.parallel, row.measurement["fidelity"])
    changes = {"parallel": replica(row.parallel), "digest": digest, "measurement": measurement}
    return changes | {"step_s": measurement["step_s"]}


def downgraded_search(connection, row):
    best = row.progress.get("best_parallel")
    progress = row.progress | {"best_parallel": replica(best)} if best else row.progress
    return {
        "progress": progress,
        "result": changed_result(row.result, lambda measurement, _: with_step(measurement)),
    }


def deployment(parallel, *, query, predicted):
    """The deployment whose replica an old row holds.

    How many devices the query has, its cluster's name alone does not say; the prediction's two
    figures of the load do: tokens/s per device = concurrency x output_length / devices / step_s.
    """
    if "max_num_seqs" in parallel:
        return parallel
    tensor, load = parallel["tensor_parallel_size"], query.get("inference") or {}
    rate = predicted.get("tokens_per_second_per_gpu", 0.0) * predicted.get("step_s", 0.0)
    tokens = load.get("concurrency", 0) * load.get("output_length", 0)
    batched = (query.get("parallel") or {}).get("max_num_batched_tokens") or BATCHED_TOKENS
    return DEFAULTS | {
        "tensor_parallel_size": tensor,
        "data_parallel_size": max(round(tokens / rate / tensor) if rate else 1, 1),
        "max_num_seqs": parallel["micro_batch_size"],
        "max_num_batched_tokens": batched[0] if isinstance(batched, list) else batched,
    }


def replica(config):
    if "max_num_seqs" not in config:  # written by older code after the upgrade
        return config
    return {
        "tensor_parallel_size": config["tensor_parallel_size"],
        "micro_batch_size": config["max_num_seqs"],
    }


def with_load(measurement, config, query):
    """The measurement with the load's latencies in place of a step."""
    times, load = measurement.get("serving"), query.get("inference") or {}
    if measurement.get("load") or measurement.get("step_s") is None or times is None:
        return measurement
    batch, following = config["max_num_seqs"], load["output_length"] - 1
    batch_s = batch * load["output_length"] / times["output_tokens_per_second"]
    queue_s = batch_s * (max(load["concurrency"] / config["data_parallel_size"] / batch, 1.0) - 1.0)
    latencies = {
        "ttft_s": queue_s + times["ttft_s"],
        "tpot_s": (batch_s - times["ttft_s"]) / following if following else 0.0,
        "request_latency_s": queue_s + batch_s,
        "penalised_latency_s": measurement["step_s"],
        "request_latencies_s": measurement["step_times_s"],
    }
    return measurement | {"load": latencies, "step_s": None, "step_times_s": []}


def with_step(measurement):
    load = measurement.get("load")
    if load is None:
        return measurement
    kept = {name: value for name, value in measurement.items() if name != "load"}
    return kept | {
        "step_s": load["penalised_latency_s"],
        "step_times_s": load["request_latencies_s"],
    }


def changed_result(result, changed):
    """A stored result with its measurements changed; its configurations are deployments in every
    version.
    """
    if result is None:
        return None
    lists = {
        name: [
            row
            | {
                "measurement": row.get("measurement")
                and changed(row["measurement"], row["parallel"])
            }
            for row in result[name]
        ]
        for name in ("recommendations", "nearest_misses")
        if name in result
    }
    return result | lists


def serving_digest(config, fidelity):
    return sha256(
        {name: value for name, value in config.items() if value != DEFAULTS[name]}, fidelity
    )


def replica_digest(config, fidelity):
    sizes = {name: value for name, value in replica(config).items() if value != 1}
    return sha256(sizes | {"recompute": {"granularity": "none"}}, fidelity)


def sha256(parallel, fidelity):
    """`configuration_digest` as it was when this was written: defaults are left out."""
    content = {
        "parallel": parallel,
        "fidelity": {name: value for name, value in fidelity.items() if value is not None},
    }
    return hashlib.sha256(
        json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()
