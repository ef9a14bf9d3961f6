-- Combining: posts that meet on one channel share a flush.
--
-- Flow.     Who finds the channel's gate free posts as doorbell.post does. Who does not leaves its message in doorbell.staged,
--           commits (nothing is flushed: the table is unlogged), and waits for the gate. Whoever gets it and has no number yet
--           numbers all that wait there, in one commit, and writes the numbers back; the others find theirs and are done.
-- Gate.     A transaction's advisory lock, one a channel (class 0x55). It orders those who combine among themselves; the
--           channel row's lock still excludes everybody else, and is taken behind it.
-- Truth.    A post is in the log when the commit that numbered it is flushed, whatever synchronous_commit its session has.
--           A staged row without a number belongs to nobody but its post: what gives up deletes it first.


create function doorbell._sequence(channel_id bigint, ticket bigint) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp set enable_seqscan = off
as $$
declare
  v_head bigint;
  v_time timestamptz;
begin
  perform from doorbell.channel as c where c.id = channel_id for no key update;
  v_head := doorbell._head(channel_id);
  v_time := clock_timestamp();
  with waiting as materialized (
    select s.ticket, s.sender, s.body, s.headers, s.idempotency_key
    from doorbell.staged as s
    where s.channel_id = _sequence.channel_id and s.ticket > _sequence.ticket - 256 and s.seq is null
      and (s.expires_at > v_time or s.ticket = _sequence.ticket)
    order by s.ticket
    for update skip locked
  ), placed as (
    select w.ticket, o.seq as old_seq, o.created_at as old_time,
           case when w.idempotency_key is null then w.ticket else min(w.ticket) over (partition by w.idempotency_key) end as first
    from waiting as w
    left join doorbell.message as o on o.channel_id = _sequence.channel_id and o.idempotency_key = w.idempotency_key
  ), numbered as (
    select p.ticket, v_head + row_number() over (order by p.ticket) as seq
    from placed as p
    where p.old_seq is null and p.first = p.ticket
  ), appended as (
    insert into doorbell.message (channel_id, seq, sender, body, headers, idempotency_key, created_at)
      select _sequence.channel_id, n.seq, w.sender, w.body, w.headers, w.idempotency_key, v_time
      from numbered as n
      join waiting as w using (ticket)
      order by n.seq
  )
  update doorbell.staged as s
    set seq = coalesce(p.old_seq, n.seq), created_at = coalesce(p.old_time, v_time), posted = p.old_seq is null and p.first = p.ticket
    from placed as p
    left join numbered as n on n.ticket = p.first
    where s.channel_id = _sequence.channel_id and s.ticket = p.ticket and s.ticket > _sequence.ticket - 256;
end
$$;

create function doorbell.collect(
  channel_id bigint,
  ticket bigint,
  out seq bigint,
  out created_at timestamptz,
  out posted boolean,
  out armed boolean,
  out original_sender text,
  out original_body text,
  out original_headers jsonb,
  out failure text
)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '5s'
as $$
begin
  armed := false;
  begin
    perform pg_advisory_xact_lock(85::bigint << 56 | channel_id);
  exception when lock_not_available or query_canceled then
    failure := sqlstate;
  end;
  delete from doorbell.staged as s
    where s.channel_id = collect.channel_id and s.ticket = collect.ticket and s.seq is not null
    returning s.seq, s.created_at, s.posted into seq, created_at, posted;
  if not found then
    perform doorbell._sequence(channel_id, ticket);
    armed := doorbell._armed(channel_id);
    delete from doorbell.staged as s
      where s.channel_id = collect.channel_id and s.ticket = collect.ticket
      returning s.seq, s.created_at, s.posted into seq, created_at, posted;
  end if;
end
$$;

create procedure doorbell.post_combined(
  channel text,
  body text,
  sender text,
  idempotency_key text,
  headers jsonb,
  announce boolean,
  lock_timeout_ms integer,
  inout channel_id bigint default null,
  inout seq bigint default null,
  inout created_at float8 default null,
  inout posted boolean default null,
  inout armed boolean default null,
  inout original_sender text default null,
  inout original_body text default null,
  inout original_headers jsonb default null
)
language plpgsql
as $$
declare
  p record;
begin
  p := doorbell.post(channel, body, sender, idempotency_key, headers, false, lock_timeout_ms, true);
  channel_id := p.channel_id;
  if p.ticket is not null then
    commit;
    p := doorbell.collect(channel_id, p.ticket);
  end if;
  seq := p.seq;
  created_at := pg_catalog.date_part('epoch', p.created_at);
  posted := p.posted;
  armed := p.armed;
  if not posted then
    original_sender := p.original_sender;
    original_body := p.original_body;
    original_headers := p.original_headers;
  end if;
  if armed and announce then
    commit;
    perform doorbell.announce(array[channel_id]);
    armed := false;
  end if;
end
$$;
