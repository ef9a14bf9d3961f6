"""What retention has removed, and who operates."""

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

# sha256 over the declared files as this revision declares them. One of them changed: write a new revision.
DECLARES = "1f357fc47f2fc4c8ee94f267e4752785d1bd65bd3159cb286f5e97a49e9b74ae"

TABLES = """
create table doorbell.pruned (
  channel_id bigint primary key,
  up_to bigint not null check (up_to > 0),
  pruned_at timestamptz not null default clock_timestamp()
) with (
  fillfactor = 50,
  autovacuum_vacuum_scale_factor = 0.0,
  autovacuum_vacuum_threshold = 1000
);
comment on table doorbell.pruned is 'One row a channel that prune has shortened: its log begins behind up_to. A table of its own, so that no post passes over its row versions.';
comment on column doorbell.pruned.up_to is 'The seq of the newest message that was removed. A cursor below it has lost messages.';
comment on column doorbell.pruned.pruned_at is 'When messages were last removed.';

alter table doorbell.role_grant add column agent boolean not null default true;
comment on column doorbell.role_grant.agent is 'May call the contract: post, subscribe, read, ack.';
comment on column doorbell.role_grant.operator is 'May read the views.';

-- Retention leaves dead rows where there were none: clean them up well before a fifth of the table is dead.
alter table doorbell.message set (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 10000);
"""


def upgrade() -> None:
    op.execute(TABLES)
