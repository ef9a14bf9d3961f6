"""The tables of the contract.

Tables and indexes only: functions and views are declared from contract.sql and views.sql after the last revision.
"""

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# sha256 over contract.sql and views.sql as this revision declares them. Either file changed: write a new revision.
DECLARES = "e634996ce20e0804d7e32e71e9d4d68f580b86a3869e7a00ece8e42466d1648a"

TABLES = """
create table doorbell.meta (
  only_row boolean primary key default true check (only_row),
  epoch uuid not null default gen_random_uuid(),
  declares text
);
comment on table doorbell.meta is 'Facts about this store as a whole; always one row.';
comment on column doorbell.meta.epoch is 'Identity of this log. An operator renews it after a restore, so that live clients look again.';
comment on column doorbell.meta.declares is 'sha256 of the function and view files that were declared last.';
insert into doorbell.meta default values;

create table doorbell.role_grant (
  role_name name primary key,
  operator boolean not null default false,
  granted_at timestamptz not null default now()
);
comment on table doorbell.role_grant is 'Roles that were let in. Declaring the functions anew drops their grants; these rows restore them.';

create table doorbell.channel (
  id bigint generated always as identity primary key,
  name text collate "C" not null unique,
  created_at timestamptz not null default clock_timestamp()
);
comment on table doorbell.channel is 'One row a channel. Its row lock is what orders the posts of that channel.';

create table doorbell.message (
  channel_id bigint not null,
  seq bigint not null,
  sender text collate "C" not null,
  body text not null,
  headers jsonb not null default '{}',
  idempotency_key text collate "C",
  created_at timestamptz not null,
  primary key (channel_id, seq)
) with (
  -- Rows are inserted and, much later, pruned: freeze as they come, and keep the visibility map fresh for index-only scans.
  autovacuum_vacuum_insert_scale_factor = 0.02,
  autovacuum_vacuum_insert_threshold = 10000,
  autovacuum_analyze_scale_factor = 0.02,
  autovacuum_freeze_min_age = 0
);
create unique index message_idempotency_key on doorbell.message (channel_id, idempotency_key) where idempotency_key is not null;
comment on table doorbell.message is 'The log: written by functions only, never changed, removed only by prune. No foreign key and no trigger, by design.';
comment on column doorbell.message.seq is '1, 2, 3 … in its channel, without a gap, visible in that order.';
comment on column doorbell.message.created_at is 'The clock of the server at the insert, under the channel lock. Nothing is ordered by it.';

create table doorbell.cursor (
  channel_id bigint not null,
  handle text collate "C" not null,
  acked_seq bigint not null,
  subscribed_at timestamptz not null default clock_timestamp(),
  acked_at timestamptz,
  primary key (channel_id, handle)
) with (
  -- An ack rewrites the row in its page and touches no index (HOT) as long as the page has room.
  fillfactor = 50,
  autovacuum_vacuum_scale_factor = 0.0,
  autovacuum_vacuum_threshold = 1000
);
create index cursor_handle on doorbell.cursor (handle, channel_id);
comment on table doorbell.cursor is 'One row a subscription: how far a handle has handled a channel. acked_seq only grows.';
comment on column doorbell.cursor.acked_at is 'When the cursor last moved; null until the first ack.';
"""


def upgrade() -> None:
    op.execute(TABLES)
