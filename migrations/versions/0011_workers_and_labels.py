"""Which workers are alive and what they can run; names, tags and notes of searches, and their words
for look-ups. Only adds.
"""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None
LOST_BY_DOWNGRADE = {
    "names, tags and notes of searches": "SELECT count(*) FROM hp_searches WHERE label IS NOT NULL"
}


def upgrade():
    op.create_table(
        "hp_workers",
        sa.Column("holder", sa.String(length=200), nullable=False),
        sa.Column("offers", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("holder", name="pk_hp_workers"),
    )
    op.add_column("hp_searches", sa.Column("label", sa.JSON(none_as_null=True)))
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


def downgrade():
    op.drop_table("hp_search_words")
    op.drop_column("hp_searches", "label")
    op.drop_table("hp_workers")
