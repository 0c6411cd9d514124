"""The edition of hp-tool that stored a search, so that an older worker leaves it alone. Searches
stored before are for every worker.

Adds a column. Older code beside it goes on as before: it stores searches without an edition.
"""

import sqlalchemy as sa
from alembic import op

from hp_tool.store.moving import add_column

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None
LOST_BY_DOWNGRADE = {}


def upgrade():
    add_column("hp_searches", sa.Column("edition", sa.Integer))


def downgrade():
    op.drop_column("hp_searches", "edition")
