"""Posts are staged by the name of their channel, so that they look up nothing."""

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

# sha256 over the declared files as this revision declares them. One of them changed: write a new revision.
DECLARES = "6fcdabd9a44e7438364c4849cd386336c98b76de4ddca7b4584f1652e7e63c61"

# The lock of the drop waits for the commits that are numbering what is there. Nobody was told that the rest is posted.
TABLES = """
drop table doorbell.staged;
create unlogged table doorbell.staged (
  channel text collate "C" not null,
  ticket bigint generated always as identity,
  backend integer not null default pg_backend_pid(),
  expires_at timestamptz not null,
  sender text collate "C" not null,
  body text not null,
  headers jsonb not null,
  idempotency_key text collate "C",
  channel_id bigint,
  seq bigint,
  created_at timestamptz,
  flags integer,
  primary key (channel, ticket)
) with (
  -- The answer is written into the row, in its page (HOT). A vacuum must not take the lock that truncation wants.
  fillfactor = 50,
  vacuum_truncate = off,
  autovacuum_vacuum_scale_factor = 0.0,
  autovacuum_vacuum_threshold = 5000,
  autovacuum_vacuum_cost_delay = 0
);
comment on table doorbell.staged is 'Posts that wait for their number because their channel is being written to. Unlogged: a crash empties it, and nobody was told that one of these was posted.';
comment on column doorbell.staged.ticket is 'The order of arrival.';
comment on column doorbell.staged.backend is 'The session that waits for the answer, and the only one that may take it.';
comment on column doorbell.staged.expires_at is 'After this the post gets no number any more.';
comment on column doorbell.staged.seq is 'The answer, with channel_id, created_at and flags: the message under which this post is in the log. Without flags that one had the key before.';
"""


def upgrade() -> None:
    op.execute(TABLES)
