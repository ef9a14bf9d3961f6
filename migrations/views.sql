-- What an operator sees. Columns are named and stay; a new one is added at the end.

create view doorbell.backlog as
select
  cu.handle,
  c.name as channel,
  h.seq as head,
  cu.acked_seq,
  h.seq - cu.acked_seq as unacked,
  o.created_at as oldest_unacked_at,
  cu.acked_at as last_acked_at,
  greatest(coalesce(p.up_to, 0) - cu.acked_seq, 0) as lost
from doorbell.cursor as cu
join (
  -- The head once a channel, not once a cursor.
  select d.id, d.name, (select m.seq from doorbell.message as m where m.channel_id = d.id order by m.seq desc limit 1) as head
  from doorbell.channel as d
  offset 0
) as c on c.id = cu.channel_id
cross join lateral (select coalesce(c.head, 0) as seq) as h
left join doorbell.pruned as p on p.channel_id = c.id
left join lateral (
  select m.created_at
  from doorbell.message as m
  where m.channel_id = c.id and m.seq = greatest(cu.acked_seq, coalesce(p.up_to, 0)) + 1
  limit 1  -- a probe for each cursor; a join would read the log
) as o on h.seq > cu.acked_seq;

comment on view doorbell.backlog is 'How far each handle is behind on each channel it is subscribed to, and since when.';
comment on column doorbell.backlog.handle is 'The subscribed handle.';
comment on column doorbell.backlog.channel is 'The channel.';
comment on column doorbell.backlog.head is 'The seq of the newest message; 0 when there is none.';
comment on column doorbell.backlog.acked_seq is 'The cursor: everything up to here was handled.';
comment on column doorbell.backlog.unacked is 'head - acked_seq: how many messages wait, those that are lost included.';
comment on column doorbell.backlog.oldest_unacked_at is 'When the first kept message behind the cursor was posted; null when none waits.';
comment on column doorbell.backlog.last_acked_at is 'When the cursor last moved; null when it never has.';
comment on column doorbell.backlog.lost is 'How many messages behind the cursor retention has removed by force. Its reader is refused until skip_pruned.';

create view doorbell.channels as
select
  c.name as channel,
  c.head,
  case when c.head > 0 then c.gone + 1 end as first_kept,
  c.head - c.gone as messages,
  -- The average over all of them, by arithmetic: no table is read for it.
  ((c.head - c.gone) * (pg_total_relation_size('doorbell.message') / greatest(sum(c.head - c.gone) over (), 1)))::bigint as estimated_bytes,
  c.last_posted_at,
  c.created_at
from (
  select d.name, coalesce(l.seq, 0) as head, coalesce(p.up_to, 0) as gone, l.created_at as last_posted_at, d.created_at
  from doorbell.channel as d
  left join doorbell.pruned as p on p.channel_id = d.id
  left join lateral (
    select m.seq, m.created_at from doorbell.message as m where m.channel_id = d.id order by m.seq desc limit 1
  ) as l on true
) as c;

comment on view doorbell.channels is 'One row a channel: how long its log is, and how large.';
comment on column doorbell.channels.channel is 'The channel.';
comment on column doorbell.channels.head is 'The seq of the newest message; 0 when there is none.';
comment on column doorbell.channels.first_kept is 'The seq of the oldest message that retention has kept; null when there is none.';
comment on column doorbell.channels.messages is 'How many messages are kept: a subtraction, since numbers have no gap.';
comment on column doorbell.channels.estimated_bytes is 'messages times the average size of all messages, indexes included. An estimate.';
comment on column doorbell.channels.last_posted_at is 'When the newest message was posted; null when there is none.';
comment on column doorbell.channels.created_at is 'When the channel was created.';

create view doorbell.turns as
select
  t.handle,
  case
    when t.event_id is not null then 'id ' || t.event_id
    when t.event_key is not null then 'key ' || t.event_key
    else 'seq ' || t.event_seq
  end as event,
  c.name as channel,
  t.origin_seq as seq,
  t.state,
  t.attempt as attempts,
  clock_timestamp() - t.admitted_at as age,
  t.state = 'unfinished' and t.holder > 0 and exists (
    select from pg_locks as l
    where l.locktype = 'advisory' and l.granted and l.mode = 'ExclusiveLock'
      and l.database = (select d.oid from pg_database as d where d.datname = current_database())
      and l.objsubid = 1
      and ((l.classid::bigint << 32) | l.objid::bigint) = ((84::bigint << 56) | t.holder)
  ) as held,
  t.error as last_error,
  (select count(*) from doorbell.turn_step as s where s.channel_id = t.channel_id and s.turn_id = t.id) as steps,
  (select count(*) from doorbell.reservation as r
   where r.channel_id = t.channel_id and r.turn_id = t.id and r.posted_seq is not null) as posts,
  t.admitted_at,
  t.attempted_at,
  t.ended_at
from doorbell.turn as t
join doorbell.channel as c on c.id = t.origin_channel_id;

comment on view doorbell.turns is 'The work that events have caused: what is unfinished and since when, what failed and why.';
comment on column doorbell.turns.handle is 'Whose turn it is.';
comment on column doorbell.turns.event is 'What it is known by: the id of the event, else the key of its message in the channel, else the number.';
comment on column doorbell.turns.channel is 'The channel of the message that was admitted first.';
comment on column doorbell.turns.seq is 'The number of that message.';
comment on column doorbell.turns.state is 'unfinished, finished or failed.';
comment on column doorbell.turns.attempts is 'How often somebody began to work on it.';
comment on column doorbell.turns.age is 'The time since it was admitted.';
comment on column doorbell.turns.held is 'Whether a session that is alive works on it. An unfinished turn that nobody holds waits for the next delivery.';
comment on column doorbell.turns.last_error is 'What the last failed attempt said; null when none has.';
comment on column doorbell.turns.steps is 'How many of its steps are done.';
comment on column doorbell.turns.posts is 'How many messages it has posted, a notice of its failure included.';
comment on column doorbell.turns.admitted_at is 'When it was admitted first.';
comment on column doorbell.turns.attempted_at is 'When the last attempt began.';
comment on column doorbell.turns.ended_at is 'When it finished or failed last; null for an unfinished one.';

create view doorbell.health as
select
  (select v.version_num from doorbell.schema_version as v) as schema_revision,
  current_setting('server_version') as server_version,
  pg_is_in_recovery() as replica,
  pg_notification_queue_usage() as notification_queue_usage,
  (select count(distinct l.pid) from pg_locks as l
   where l.locktype = 'advisory' and l.mode = 'ShareLock' and l.objsubid = 1
     and l.database = (select d.oid from pg_database as d where d.datname = current_database())
     and l.classid::bigint >> 24 in (82, 83)) as waiting_sessions,
  case
    when not s.seen then 'unknown'
    when t.pid is null then 'none'
    else format('pid %s, %s, open for %s s', t.pid, t.state, floor(extract(epoch from clock_timestamp() - t.xact_start)))
  end as oldest_transaction,
  case when s.seen then extract(epoch from clock_timestamp() - t.xact_start)::float8 end as oldest_transaction_seconds,
  case
    when not s.seen then 'unknown'
    when b.waiting = 0 then 'none'
    else format('%s waiting for %s', b.waiting, b.blockers)
  end as blocked_sessions,
  case when s.seen then b.waiting end as blocked_session_count,
  (select count(*) from pg_prepared_xacts) as prepared_transactions,
  m.epoch
from (select pg_has_role(current_user, 'pg_read_all_stats', 'usage') as seen) as s
cross join (select e.epoch from doorbell.meta as e) as m
left join lateral (
  select a.pid, a.state, a.xact_start
  from pg_stat_activity as a
  where a.xact_start is not null and a.pid <> pg_backend_pid() and a.backend_type in ('client backend', 'walsender')
  order by a.xact_start
  limit 1
) as t on s.seen
left join lateral (
  select count(*) as waiting, string_agg(distinct 'pid ' || p.pid, ', ') as blockers
  from pg_stat_activity as a
  left join lateral unnest(pg_blocking_pids(a.pid)) as p (pid) on true
  where a.datname = current_database() and a.wait_event_type = 'Lock'
) as b on s.seen;

comment on view doorbell.health is 'One row: the state of the server, as far as the reader may see it. What needs pg_read_all_stats reads unknown without it.';
comment on column doorbell.health.schema_revision is 'The revision that the schema was migrated to.';
comment on column doorbell.health.server_version is 'The version of Postgres.';
comment on column doorbell.health.replica is 'True on a standby: it takes no posts, and its clients poll.';
comment on column doorbell.health.notification_queue_usage is 'Share of the notification queue that is in use, 0 to 1. When it is full, announcing fails; delivery goes on by poll.';
comment on column doorbell.health.waiting_sessions is 'How many sessions have bells waiting here with notifications. Those that only poll are not counted.';
comment on column doorbell.health.oldest_transaction is 'The longest open transaction of the server but this one: pid, state, age. none, or unknown when this role may not see it.';
comment on column doorbell.health.oldest_transaction_seconds is 'Its age in seconds; null when there is none, and when it is unknown.';
comment on column doorbell.health.blocked_sessions is 'How many sessions of this database wait for a lock, and for whom. none, or unknown when this role may not see it.';
comment on column doorbell.health.blocked_session_count is 'How many; null when unknown.';
comment on column doorbell.health.prepared_transactions is 'Transactions that were prepared for two-phase commit and left: they hold locks and snapshots without a session.';
comment on column doorbell.health.epoch is 'Identity of this log; renewed by new_epoch after a restore.';

create view doorbell.violations as
with logs as materialized (
  -- The only scan: one pass over the primary key.
  select m.channel_id, min(m.seq) as first, max(m.seq) as last, count(*) as messages
  from doorbell.message as m
  group by m.channel_id
), channels as (
  select c.id, c.name, l.first, coalesce(l.last, 0) as head, coalesce(l.messages, 0) as messages, coalesce(p.up_to, 0) as gone
  from doorbell.channel as c
  left join logs as l on l.channel_id = c.id
  left join doorbell.pruned as p on p.channel_id = c.id
)
select 'gap' as violation, c.name as channel, null::text as handle, g.seq,
       format('messages %s to %s are missing', g.previous + 1, g.seq - 1) as detail
from channels as c
cross join lateral (
  select m.seq, lag(m.seq) over (order by m.seq) as previous from doorbell.message as m where m.channel_id = c.id
) as g
where c.messages > 0 and c.messages <> c.head - c.first + 1 and g.seq > g.previous + 1
union all
select 'wrong beginning', c.name, null, c.first,
       format('the log begins at %s; %s was removed last, so it must begin at %s', c.first, c.gone, c.gone + 1)
from channels as c
where c.first <> c.gone + 1
union all
select 'newest message removed', c.name, null, c.gone, format('retention has removed %s, and no newer message is there', c.gone)
from channels as c
where c.gone > 0 and c.gone >= c.head
union all
select 'number below 1', c.name, null, c.first, 'numbers begin at 1'
from channels as c
where c.first < 1
union all
select 'messages without channel', null, null, l.last, format('channel %s has %s messages and no row', l.channel_id, l.messages)
from logs as l
where not exists (select from doorbell.channel as c where c.id = l.channel_id)
union all
select 'cursor beyond head', c.name, cu.handle, cu.acked_seq, format('the head is %s', c.head)
from doorbell.cursor as cu
join channels as c on c.id = cu.channel_id
where cu.acked_seq > c.head
union all
select 'cursor below 0', c.name, cu.handle, cu.acked_seq, 'a cursor begins at 0'
from doorbell.cursor as cu
left join doorbell.channel as c on c.id = cu.channel_id
where cu.acked_seq < 0
union all
select 'cursor without channel', null, cu.handle, cu.acked_seq, format('there is no channel %s', cu.channel_id)
from doorbell.cursor as cu
where not exists (select from doorbell.channel as c where c.id = cu.channel_id)
union all
select 'retention without channel', null, null, p.up_to, format('there is no channel %s', p.channel_id)
from doorbell.pruned as p
where not exists (select from doorbell.channel as c where c.id = p.channel_id)
union all
select 'name out of bounds', c.name, null, null, format('a channel name of %s bytes; 1 to 255 are allowed', octet_length(c.name))
from doorbell.channel as c
where octet_length(c.name) not between 1 and 255
union all
select 'name out of bounds', c.name, cu.handle, null, format('a handle of %s bytes; 1 to 255 are allowed', octet_length(cu.handle))
from doorbell.cursor as cu
left join doorbell.channel as c on c.id = cu.channel_id
where octet_length(cu.handle) not between 1 and 255
union all
select 'turn out of bounds', c.name, t.handle, t.origin_seq, format('turn %s is of no event or of two, or in no state', t.id)
from doorbell.turn as t
left join doorbell.channel as c on c.id = t.origin_channel_id
where num_nonnulls(t.event_id, t.event_key, t.event_seq) <> 1
  or (t.event_id is not null) <> (t.channel_id = 0)
  or t.state not in ('unfinished', 'finished', 'failed')
union all
select 'delivery without turn', c.name, d.handle, d.seq, format('there is no turn %s of channel %s', d.turn_id, d.turn_channel_id)
from doorbell.delivery as d
left join doorbell.channel as c on c.id = d.channel_id
where not exists (select from doorbell.turn as t where t.channel_id = d.turn_channel_id and t.id = d.turn_id)
union all
select 'delivery beyond head', c.name, d.handle, d.seq, format('the head is %s', coalesce(c.head, 0))
from doorbell.delivery as d
left join channels as c on c.id = d.channel_id
where d.seq > coalesce(c.head, 0)
union all
select 'delivery settled too soon', c.name, d.handle, d.seq, 'its turn has not ended'
from doorbell.delivery as d
join doorbell.turn as t on t.channel_id = d.turn_channel_id and t.id = d.turn_id
left join doorbell.channel as c on c.id = d.channel_id
where d.settled and t.state = 'unfinished'
union all
-- The first message behind the cursor was settled after the cursor had last moved, and settling moves it.
select 'cursor left behind', c.name, cu.handle, cu.acked_seq, format('message %s is settled', cu.acked_seq + 1)
from doorbell.cursor as cu
join doorbell.channel as c on c.id = cu.channel_id
cross join lateral (
  select bool_and(d.settled and t.ended_at > greatest(cu.acked_at, cu.subscribed_at)) as settled
  from doorbell.delivery as d
  join doorbell.turn as t on t.channel_id = d.turn_channel_id and t.id = d.turn_id
  where d.channel_id = cu.channel_id and d.handle = cu.handle and d.seq = cu.acked_seq + 1
) as s
where s.settled and exists (select from doorbell.message as m where m.channel_id = cu.channel_id and m.seq = cu.acked_seq + 1)
union all
select 'unfinished turn without delivery', c.name, t.handle, t.origin_seq, format('turn %s of channel %s, which nobody can find', t.id, t.channel_id)
from doorbell.turn as t
left join doorbell.channel as c on c.id = t.origin_channel_id
where t.state = 'unfinished'
  and not exists (select from doorbell.delivery as d where d.turn_channel_id = t.channel_id and d.turn_id = t.id)
union all
select 'turn without end', c.name, t.handle, t.origin_seq, format('state %s, ended_at %s', t.state, coalesce(t.ended_at::text, 'null'))
from doorbell.turn as t
left join doorbell.channel as c on c.id = t.origin_channel_id
where (t.state = 'unfinished') <> (t.ended_at is null)
union all
select 'step without turn', null, null, null, format('step %s of turn %s of channel %s', quote_literal(s.step), s.turn_id, s.channel_id)
from doorbell.turn_step as s
where not exists (select from doorbell.turn as t where t.channel_id = s.channel_id and t.id = s.turn_id)
union all
select 'reservation without turn', null, null, r.posted_seq, format('reservation %s of turn %s of channel %s', quote_literal(r.correlation_id), r.turn_id, r.channel_id)
from doorbell.reservation as r
where not exists (select from doorbell.turn as t where t.channel_id = r.channel_id and t.id = r.turn_id)
union all
select 'reservation beyond head', c.name, null, r.posted_seq, format('posted as %s, and the head is %s', r.posted_seq, coalesce(c.head, 0))
from doorbell.reservation as r
left join channels as c on c.id = r.posted_channel_id
where r.posted_seq > coalesce(c.head, 0)
union all
select 'not one store', null, null, null, format('doorbell.meta has %s rows instead of one', count(*))
from doorbell.meta as m
having count(*) <> 1
union all
select 'open to everybody', null, null, null, format('PUBLIC may execute doorbell.%s(%s)', p.proname, pg_get_function_identity_arguments(p.oid))
from pg_proc as p
cross join lateral aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) as a
where p.pronamespace = 'doorbell'::regnamespace and a.grantee = 0 and a.privilege_type = 'EXECUTE'
union all
select 'open to everybody', null, null, null, format('PUBLIC has %s on doorbell.%s', a.privilege_type, r.relname)
from pg_class as r
cross join lateral aclexplode(r.relacl) as a
where r.relnamespace = 'doorbell'::regnamespace and a.grantee = 0;

comment on view doorbell.violations is 'What must never be; always empty. Each row is an invariant that somebody or something has broken from outside. It scans the log.';
comment on column doorbell.violations.violation is 'Which invariant.';
comment on column doorbell.violations.channel is 'The channel, where the violation has one.';
comment on column doorbell.violations.handle is 'The handle, where the violation has one.';
comment on column doorbell.violations.seq is 'The number at which it shows, where it has one.';
comment on column doorbell.violations.detail is 'What is true and what was expected.';
