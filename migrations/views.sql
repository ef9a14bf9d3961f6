-- What an operator sees. Columns are named and stay; a new one is added at the end.

create view doorbell.backlog as
select
  cu.handle,
  c.name as channel,
  h.seq as head,
  cu.acked_seq,
  h.seq - cu.acked_seq as unacked,
  o.created_at as oldest_unacked_at,
  cu.acked_at as last_acked_at
from doorbell.cursor as cu
join doorbell.channel as c on c.id = cu.channel_id
cross join lateral (
  select coalesce((select m.seq from doorbell.message as m where m.channel_id = c.id order by m.seq desc limit 1), 0) as seq
) as h
left join doorbell.message as o on o.channel_id = c.id and o.seq = cu.acked_seq + 1;

comment on view doorbell.backlog is 'How far each handle is behind on each channel it is subscribed to, and since when.';
comment on column doorbell.backlog.handle is 'The subscribed handle.';
comment on column doorbell.backlog.channel is 'The channel.';
comment on column doorbell.backlog.head is 'The seq of the newest message; 0 when there is none.';
comment on column doorbell.backlog.acked_seq is 'The cursor: everything up to here was handled.';
comment on column doorbell.backlog.unacked is 'head - acked_seq: how many messages wait.';
comment on column doorbell.backlog.oldest_unacked_at is 'When the first message behind the cursor was posted; null when none waits.';
comment on column doorbell.backlog.last_acked_at is 'When the cursor last moved; null when it never has.';

create view doorbell.channels as
select
  c.name as channel,
  coalesce(l.seq, 0) as head,
  f.seq as first_kept,
  coalesce(l.seq - f.seq + 1, 0) as messages,
  (coalesce(l.seq - f.seq + 1, 0) * s.bytes_per_message)::bigint as estimated_bytes,
  l.created_at as last_posted_at,
  c.created_at
from doorbell.channel as c
cross join (
  select pg_total_relation_size('doorbell.message') / greatest(r.reltuples, 1) as bytes_per_message
  from pg_class as r
  where r.oid = 'doorbell.message'::regclass
) as s
left join lateral (
  select m.seq, m.created_at from doorbell.message as m where m.channel_id = c.id order by m.seq desc limit 1
) as l on true
left join lateral (
  select m.seq from doorbell.message as m where m.channel_id = c.id order by m.seq limit 1
) as f on true;

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
