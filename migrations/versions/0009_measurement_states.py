"""Measurements that were held back, excluded or deleted do not teach; `trust` no longer decides it.
The cluster that a measurement belongs to is the machine's whole node and NVLink domain, not the
part that its job used.

Adds a column, and changes the keys of measurements of small jobs. Their calibrations stay where
they were, to be read; the next fit learns from all runs of a machine together. Older code works on
it.
"""

import re

import sqlalchemy as sa
from alembic import op

from hp_tool.store.moving import add_column, create_index, in_batches, update_in_batches

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None
LOST_BY_DOWNGRADE = {
    "measurements that were held, excluded or deleted": "SELECT count(*) FROM hp_measurements "
    "WHERE state <> 'accepted'"
}

MEASURED_CLUSTERS = "ix_hp_measurements_cluster_key_gpu_framework"
KEY = re.compile(r"^(?P<gpu>[^/]+)/node(?P<node>\d+)/nvlink(?P<domain>\d+)/")
EIGHT = (8, None)
WHOLE = {
    **dict.fromkeys(
        (
            "a100-sxm-40gb",
            "a100-sxm-80gb",
            "a10g-24gb",
            "a800-sxm-80gb",
            "b200-sxm-180gb",
            "b300-sxm-288gb",
        ),
        EIGHT,
    ),
    **dict.fromkeys(
        (
            "gaudi3-128gb",
            "h100-nvl-94gb",
            "h100-pcie-80gb",
            "h100-sxm-80gb",
            "h20-sxm-96gb",
            "h200-sxm-141gb",
        ),
        EIGHT,
    ),
    **dict.fromkeys(
        ("h800-sxm-80gb", "l4-24gb", "l40s-48gb", "mi300x-192gb", "mi325x-256gb", "mi350x-288gb"),
        EIGHT,
    ),
    **dict.fromkeys(
        ("mi355x-288gb", "rtx-4090-24gb", "rtx-5090-32gb", "rtx-pro-6000-96gb", "v100-sxm-32gb"),
        EIGHT,
    ),
    "gb200-nvl72": (4, 72),
    "gb300-nvl72": (4, 72),
    "gh200-96gb": (1, None),
    "h200-nvl-141gb": (4, None),
    "v100-sxm3-32gb-h": (16, None),
}
"""(devices of a node; of an NVLink domain, None: the node) of the catalogue's GPUs, as they were
when this was written.
"""
NODE_TYPES = {"dgx-2": (16, None), "dgx-2h": (16, None), "gb200-nvl72": (4, 72)}
"""Of node types, where they are not those of their GPU."""

MEASUREMENT = sa.table(
    "hp_measurements",
    *(sa.column(name) for name in ("id", "cluster_key", "trust", "state")),
    sa.column("query", sa.JSON(none_as_null=True)),
)


def upgrade():
    add_column(
        "hp_measurements",
        sa.Column("state", sa.String(16), nullable=False, server_default="accepted"),
    )
    create_index(
        "ix_hp_measurements_state_created_at_id", "hp_measurements", ["state", "created_at", "id"]
    )
    create_index(
        MEASURED_CLUSTERS + "_state",
        "hp_measurements",
        ["cluster_key", "gpu", "framework", "state"],
    )
    op.drop_index(MEASURED_CLUSTERS, "hp_measurements", if_exists=True)
    update_in_batches(MEASUREMENT, where=MEASUREMENT.c.trust < 0.5, values={"state": "excluded"})
    keys = sa.select(MEASUREMENT.c.id, MEASUREMENT.c.cluster_key, MEASUREMENT.c.query)
    in_batches(keys, key=MEASUREMENT.c.id, change=complete_keys)


def complete_keys(connection, rows):
    keys = {row.id: whole_key(row.cluster_key, row.query.get("cluster")) for row in rows}
    changed = [
        {"changed": row.id, "whole": keys[row.id]}
        for row in rows
        if keys[row.id] != row.cluster_key
    ]
    if changed:
        this = MEASUREMENT.c.id == sa.bindparam("changed")
        connection.execute(
            sa.update(MEASUREMENT).where(this).values(cluster_key=sa.bindparam("whole")), changed
        )


def downgrade():
    """Keys stay as they are: older code files its own measurements of small jobs beside them."""
    op.drop_index(MEASURED_CLUSTERS + "_state", "hp_measurements")
    op.create_index(MEASURED_CLUSTERS, "hp_measurements", ["cluster_key", "gpu", "framework"])
    op.drop_index("ix_hp_measurements_state_created_at_id", "hp_measurements")
    op.drop_column("hp_measurements", "state")


def whole_key(key, cluster):
    """The key with the sizes of the whole machine in place of the part that a job used."""
    found = KEY.match(key)
    if found is None or not isinstance(cluster, dict) or not cluster.get("num_gpus"):
        return key
    usual = NODE_TYPES.get(cluster.get("node_type")) or WHOLE.get(found["gpu"])
    if isinstance(cluster.get("gpu"), dict):  # a datasheet of one's own
        own = cluster["gpu"]
        usual = (own.get("gpus_per_node") or 8, own.get("nvlink_domain_size"))
    if usual is None:
        return key
    num_gpus = cluster["num_gpus"]
    node = whole(int(found["node"]), cluster.get("gpus_per_node"), usual[0], num_gpus)
    domain = whole(
        int(found["domain"]), cluster.get("nvlink_domain_size"), usual[1] or node, num_gpus
    )
    return key.replace(found[0], f"{found['gpu']}/node{node}/nvlink{max(node, domain)}/", 1)


def whole(used, asked, usual, num_gpus):
    """Devices of a whole node or domain, of which a job on `num_gpus` used `used`."""
    if asked is None or asked == num_gpus < usual:
        return usual if used == num_gpus else used
    return asked
