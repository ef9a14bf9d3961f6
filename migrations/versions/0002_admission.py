"""The tables of admission: which event caused which turn, what was delivered for it, and what it has done.

Tables and indexes only: functions and views are declared from the .sql files after the last revision.
"""

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

# sha256 over the declared files as this revision declares them. One of them changed: write a new revision.
DECLARES = "ab8ba35853cb6e57e8e3c33820936a079ff9737e65f6e912209d18b5a4a71d98"

TABLES = """
create table doorbell.turn (
  channel_id bigint not null,
  id bigint generated always as identity,
  handle text collate "C" not null,
  event_id text collate "C",
  event_key text collate "C",
  event_seq bigint,
  state text collate "C" not null default 'unfinished' check (state in ('unfinished', 'finished', 'failed')),
  attempt integer not null default 1,
  holder bigint,
  nonce bigint,
  error text,
  origin_channel_id bigint not null,
  origin_seq bigint not null,
  admitted_at timestamptz not null default clock_timestamp(),
  attempted_at timestamptz not null default clock_timestamp(),
  ended_at timestamptz,
  primary key (channel_id, id),
  check (num_nonnulls(event_id, event_key, event_seq) = 1),
  check ((event_id is not null) = (channel_id = 0))
) with (
  -- A turn is written twice, at its admission and at its end. Nothing that moves is indexed, so the second write stays in
  -- the page (HOT) as long as there is room.
  fillfactor = 70,
  autovacuum_vacuum_scale_factor = 0.02
);
create unique index turn_event_id on doorbell.turn (channel_id, handle, event_id) where event_id is not null;
create unique index turn_event_key on doorbell.turn (channel_id, handle, event_key) where event_key is not null;
create unique index turn_event_seq on doorbell.turn (channel_id, handle, event_seq) where event_seq is not null;
-- For prune: the oldest first. Not by ended_at, which moves.
create index turn_admitted_at on doorbell.turn (channel_id, admitted_at);
comment on table doorbell.turn is 'The work that one event causes for one handle. The row is the marker: it commits with what the application writes beside it.';
comment on column doorbell.turn.channel_id is 'The channel that the event belongs to; 0 when the event has an id of its own, which spans channels.';
comment on column doorbell.turn.event_id is 'The event by an id of its own: the one passed to admit, else the header event-id. Exactly one of the three event columns is set.';
comment on column doorbell.turn.event_key is 'The event by the idempotency key of its message in channel_id.';
comment on column doorbell.turn.event_seq is 'The event by the number of its message in channel_id.';
comment on column doorbell.turn.state is 'unfinished, or how it ended last: finished or failed. An ended turn never becomes unfinished again.';
comment on column doorbell.turn.attempt is 'How often somebody began to work on it. Who took it over has raised it: with holder, it tells the owner from his predecessors.';
comment on column doorbell.turn.holder is 'The token of the session that works on it; 0 for a session that holds no token, null when nobody does.';
comment on column doorbell.turn.nonce is 'Of the admit call that began this attempt, so that the same call sent again recognises itself.';
comment on column doorbell.turn.error is 'What the last failed attempt said: one line of at most 500 characters.';
comment on column doorbell.turn.origin_channel_id is 'The channel of the message that was admitted first; with origin_seq, that message.';

create table doorbell.delivery (
  channel_id bigint not null,
  handle text collate "C" not null,
  seq bigint not null,
  turn_channel_id bigint not null,
  turn_id bigint not null,
  settled boolean not null default false,
  primary key (channel_id, handle, seq, turn_channel_id, turn_id)
) with (
  -- Short-lived rows: those that the cursor has passed are removed.
  fillfactor = 80,
  autovacuum_vacuum_scale_factor = 0.0,
  autovacuum_vacuum_threshold = 1000
);
create index delivery_turn on doorbell.delivery (turn_channel_id, turn_id);
comment on table doorbell.delivery is 'Which message was admitted as which turn of a handle, until the turn has ended and the cursor has passed the message.';
comment on column doorbell.delivery.settled is 'The turn has ended: the cursor may pass this message.';

create table doorbell.turn_step (
  channel_id bigint not null,
  turn_id bigint not null,
  step text collate "C" not null,
  attempt integer not null,
  recorded_at timestamptz not null default clock_timestamp(),
  primary key (channel_id, turn_id, step)
) with (autovacuum_vacuum_insert_scale_factor = 0.02, autovacuum_analyze_scale_factor = 0.02);
comment on table doorbell.turn_step is 'One row a step that a turn has done; it commits with what the step wrote. channel_id and turn_id are those of the turn.';
comment on column doorbell.turn_step.attempt is 'The attempt that did it.';

create table doorbell.reservation (
  channel_id bigint not null,
  turn_id bigint not null,
  correlation_id text collate "C" not null,
  reserved_at timestamptz not null,
  posted_channel_id bigint,
  posted_seq bigint,
  posted_at timestamptz,
  primary key (channel_id, turn_id, correlation_id)
) with (fillfactor = 80);
comment on table doorbell.reservation is 'One row a correlation id that a turn has used. channel_id and turn_id are those of the turn.';
comment on column doorbell.reservation.correlation_id is 'What the turn calls one of its outbound events. The empty one, which no caller can use, is the notice of its failure.';
comment on column doorbell.reservation.reserved_at is 'The one timestamp to remember: a retry reads it back and rebuilds the same bytes.';
comment on column doorbell.reservation.posted_channel_id is 'Where the event was posted, with posted_seq and the time of the message; null while it is only reserved.';
"""


def upgrade() -> None:
    op.execute(TABLES)
