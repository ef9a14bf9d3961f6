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
