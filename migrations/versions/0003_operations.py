"""What retention has removed, and who operates."""

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

# sha256 over the declared files as this revision declares them. One of them changed: write a new revision.
DECLARES = "e51ced7f301075f01c0bd4329d75442ceb8e1536b560f5b24d7f61d9b9bac2d5"

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

-- A check is parsed again by every statement that writes a row: three of them were a third of what a turn costs the server.
-- Only functions write here, and doorbell.violations shows what they would have refused.
alter table doorbell.turn
  drop constraint turn_check,
  drop constraint turn_check1,
  drop constraint turn_state_check;

-- Not led by channel_id: plans that were made while the table was empty took it in place of the primary key.
drop index doorbell.turn_admitted_at;
create index turn_admitted_at on doorbell.turn (admitted_at);
"""


def upgrade() -> None:
    op.execute(TABLES)
