-- The contract of doorbell, as functions. Clients in any language issue nothing but calls of these.
--
-- Tables.   channel names a log; message is the log; cursor says how far a handle has handled a channel. Rows of message
--           are inserted by post and post_many only, and are never updated. Having a cursor row is being subscribed.
-- Flow.     A post locks its channel's row, takes max(seq) + 1 in a statement of its own, and inserts. So numbers are given
--           and become visible in one order, and a rollback gives its number back. Readers take no lock at all.
-- Locks.    In this order, inside every function: channel row (for no key update), then cursor row. Nobody locks two
--           channels in one call. Several calls in one transaction lock in the order of the calls: go by channel name.
-- Waiting.  Functions that lock wait at most 5 s (55P03), so that one long transaction cannot stall the others forever.
-- Rights.   Every function runs as the owner of the schema; PUBLIC may execute none of them. Names that begin with an
--           underscore are private: no role is ever granted those.
-- Names.    A function pins its search_path, or is bound to what it names when it is made (return). A pin is paid for in
--           every call, so what every post, ack and poll calls writes all names in full instead, operators too.
-- Plans.    A session keeps the plan of a statement, and one that was made while a table was small reads all of it once it is
--           large. So functions that look up a few rows pin enable_seqscan and enable_bitmapscan off, and where they look up
--           rows for rows, do so in a subquery that cannot be turned into a join (offset 0); those that may want many rows
--           are planned anew in each call (plan_cache_mode). None gains by jit, which a wrong estimate would turn on.
-- Errors.   RB001 bad input, RB002 unknown channel, RB003 not subscribed, RB004 ack beyond head, RB005 the log rewound,
--           RB006 retention was forced past the cursor (operations.sql), RB008 the outcome is not known (combining.sql).
--           Each comes with what was expected and what to do.
--
-- This file is dropped and declared anew as a whole after each migration; a changed file wants a new revision.


-- ---------------------------------------------------------------------------------------------------------------------
-- Private: refusing, locking, announcing. _lock_channel and _head leave the pin to the functions that call them.
-- ---------------------------------------------------------------------------------------------------------------------

-- The first thing that is wrong with a name, or null. Names are 1 to most bytes of UTF-8.
create function doorbell._name_fault(field text, value text, most integer default 255) returns text
language sql immutable set search_path = pg_catalog, pg_temp
as $$
  select case
    when value is null then format('%s is null', field)
    when value = '' then format('%s is empty', field)
    when octet_length(value) > most then format('%s has %s bytes', field, octet_length(value))
  end
$$;

-- The first thing that is wrong with headers, or null. Headers are an object of text to text, 64 KiB in all.
create function doorbell._headers_fault(headers jsonb) returns text
language sql immutable set search_path = pg_catalog, pg_temp
as $$
  select case
    when headers is null then 'headers is null'
    when jsonb_typeof(headers) <> 'object' then format('headers is a JSON %s', jsonb_typeof(headers))
    when octet_length(headers::text) > 65536 then format('headers has %s bytes as JSON', octet_length(headers::text))
    else (
      select min(format('header %s is a JSON %s', quote_literal(h.key), jsonb_typeof(h.value)))
      from jsonb_each(headers) as h
      where jsonb_typeof(h.value) <> 'string'
    )
  end
$$;

-- Raises RB001 with the first fault that is given, and returns when there is none.
create function doorbell._refuse(variadic faults text[]) returns void
language plpgsql immutable set search_path = pg_catalog, pg_temp
as $$
declare
  fault text;
begin
  foreach fault in array faults loop
    if fault is not null then
      raise exception using
        errcode = 'RB001',
        message = fault || '.',
        detail = 'Channels, handles and senders are 1 to 255 bytes of UTF-8, idempotency keys 1 to 1,024; bodies at most 16 MiB; '
                 'headers a JSON object of strings, at most 64 KiB.',
        hint = 'Correct the argument and call again: nothing was written.';
    end if;
  end loop;
end
$$;

-- Raises RB001 where the transaction is not READ COMMITTED.
create function doorbell._refuse_isolation() returns void
language plpgsql stable set search_path = pg_catalog, pg_temp
as $$
begin
  if current_setting('transaction_isolation') <> 'read committed' then
    raise exception using
      errcode = 'RB001',
      message = format('the transaction runs at %s.', current_setting('transaction_isolation')),
      detail = 'Posting and subscribing need READ COMMITTED: an older snapshot cannot see the number that was given last.',
      hint = 'Begin the transaction with ISOLATION LEVEL READ COMMITTED, or post outside it.';
  end if;
end
$$;

create function doorbell._refuse_channel(channel text) returns void
language plpgsql immutable set search_path = pg_catalog, pg_temp
as $$
begin
  raise exception using
    errcode = 'RB002',
    message = format('channel %s does not exist.', quote_literal(channel)),
    detail = 'A channel begins with its first post or subscription.',
    hint = 'Check the spelling, or subscribe first.';
end
$$;

create function doorbell._refuse_handle(handle text, channel text) returns void
language plpgsql immutable set search_path = pg_catalog, pg_temp
as $$
begin
  raise exception using
    errcode = 'RB003',
    message = format('%s is not subscribed to %s.', quote_literal(handle), quote_literal(channel)),
    detail = 'A cursor exists from subscribe to unsubscribe.',
    hint = 'Subscribe first: at "head" (the default) behind the newest message, at "start" before the oldest that is kept.';
end
$$;

-- The id of the channel, whose row is locked until the transaction ends; creates it where it is not there yet.
-- Locks: the channel row, for no key update. A rival's uncommitted creation is waited for by the unique index.
create function doorbell._lock_channel(channel text) returns bigint
language plpgsql volatile set enable_seqscan = off set enable_bitmapscan = off
as $$
declare
  v_id bigint;
begin
  loop
    select c.id into v_id from doorbell.channel as c where c.name = channel for no key update;
    exit when found;
    insert into doorbell.channel (name) values (channel) on conflict do nothing;
  end loop;
  return v_id;
end
$$;

-- The seq of the newest message; 0 when there is none. An index probe: the newest row of a channel is never removed.
create function doorbell._head(channel_id bigint) returns bigint
language plpgsql stable set enable_seqscan = off set enable_bitmapscan = off
as $$
begin
  return coalesce(
    (select m.seq from doorbell.message as m where m.channel_id = _head.channel_id order by m.seq desc limit 1), 0);
end
$$;

-- The seq of the message with this key; null when there is none. Each call sees what has been committed when it is made.
-- Looked for as the first key from here on, which only the index of keys can answer without sorting. A plain comparison, where
-- the channel was short when it was last analyzed, would be planned by the primary key, and read all messages of the channel.
create function doorbell._seq_of(channel_id bigint, idempotency_key text) returns bigint
language plpgsql volatile
set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off
as $$
begin
  return (
    select case when f.idempotency_key = _seq_of.idempotency_key then f.seq end
    from (
      select m.idempotency_key, m.seq
      from doorbell.message as m
      where m.channel_id = _seq_of.channel_id and m.idempotency_key >= _seq_of.idempotency_key
      order by m.idempotency_key
      limit 1
    ) as f);
end
$$;

-- Advisory keys are single bigints with our class in the top byte, since ids outgrow the two-integer form:
-- 0x51 the migration guard, 0x52 a channel that is waited on, 0x53 the wildcard for all channels, 0x54 a session's token,
-- 0x55 a channel's queue lock, by a hash of its name (combining.sql).
create function doorbell._key(class integer, id bigint) returns bigint
language sql immutable
return (class::bigint << 56) | id;

-- The key that a bell holds, shared, while it waits on the channel; channel 0 is the wildcard.
create function doorbell._bell_key(channel_id bigint) returns bigint
language sql immutable
return case when channel_id = 0 then doorbell._key(83, 0) else doorbell._key(82, channel_id) end;

-- Whether somebody waits for this channel's posts. Each probe locks and unlocks in one expression: in two statements, a
-- cancel in between would leak the lock. Nothing stays held, so arming never waits for a poster.
-- Probes of one channel cannot meet, being made under its row lock. Those of the wildcard can, and then read "armed": it
-- is asked twice, since a wrong answer costs a notification that nobody needs.
create function doorbell._armed(channel_id bigint) returns boolean
language sql volatile
return
  case when pg_try_advisory_lock(doorbell._key(82, channel_id)) then not pg_advisory_unlock(doorbell._key(82, channel_id)) else true end
    or (case when pg_try_advisory_lock(doorbell._key(83, 0)) then not pg_advisory_unlock(doorbell._key(83, 0)) else true end
        and case when pg_try_advisory_lock(doorbell._key(83, 0)) then not pg_advisory_unlock(doorbell._key(83, 0)) else true end);


-- ---------------------------------------------------------------------------------------------------------------------
-- Posting
-- ---------------------------------------------------------------------------------------------------------------------

-- Whether there is nothing to look into: most posts have neither key nor headers. Inlined, where a call would be a statement.
create function doorbell._is_plain(channel text, body text, sender text, idempotency_key text, headers jsonb, most integer) returns boolean
language sql stable
return
  (octet_length(channel) between 1 and 255
   and octet_length(sender) between 1 and 255
   and idempotency_key is null
   and octet_length(body) <= most
   and headers = '{}'
   and current_setting('transaction_isolation') = 'read committed') is true;

-- Raises RB001 with what is wrong with a post, and returns where nothing is.
create function doorbell._check_post(channel text, body text, sender text, idempotency_key text, headers jsonb) returns void
language plpgsql stable set search_path = pg_catalog, pg_temp
as $$
begin
  perform doorbell._refuse_isolation();
  perform doorbell._refuse(
    doorbell._name_fault('channel', channel),
    doorbell._name_fault('sender', sender),
    case when idempotency_key is not null then doorbell._name_fault('idempotency_key', idempotency_key, 1024) end,
    case when body is null then 'body is null' end,
    case when octet_length(body) > 16777216 then format('body has %s bytes', octet_length(body)) end,
    doorbell._headers_fault(headers));
end
$$;

-- Appends one message and says which number it got.
--
-- Promise: seq is the channel's next number, visible to readers in order, durable when the caller's transaction is. With an
--   idempotency_key that the channel has already seen, nothing is written: posted is false, seq and created_at are the
--   original's, and so are original_sender, original_body and original_headers (null for a new message: the caller has
--   them). A rival's uncommitted post of the same key is waited for; if it rolls back, this one becomes the original.
-- armed says that a bell may wait for the announcement; with notify the announcement is made here, in this transaction
--   (which then takes a cluster-wide lock while it commits). Delivery never depends on it.
-- Locks: the channel row, for at most lock_timeout_ms. A key that is found at once takes no lock.
-- Errors: RB001 bad input or not READ COMMITTED; 55P03 the channel was held for too long.
create function doorbell.post(
  channel text,
  body text,
  sender text,
  idempotency_key text default null,
  headers jsonb default '{}',
  notify boolean default false,
  lock_timeout_ms integer default 5000,
  out channel_id bigint,
  out seq bigint,
  out created_at timestamptz,
  out posted boolean,
  out armed boolean,
  out original_sender text,
  out original_body text,
  out original_headers jsonb
)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp set lock_timeout = '5s' set enable_seqscan = off set enable_bitmapscan = off
as $$
begin
  if not doorbell._is_plain(channel, body, sender, idempotency_key, headers, 16777216) then
    perform doorbell._check_post(channel, body, sender, idempotency_key, headers);
  end if;
  if lock_timeout_ms is distinct from 5000 then
    perform set_config('lock_timeout', lock_timeout_ms::text, true);
  end if;

  posted := false;
  armed := false;
  if idempotency_key is not null then
    channel_id := (select c.id from doorbell.channel as c where c.name = channel);
    seq := doorbell._seq_of(channel_id, idempotency_key);
    select m.created_at, m.sender, m.body, m.headers into created_at, original_sender, original_body, original_headers
      from doorbell.message as m
      where m.channel_id = post.channel_id and m.seq = post.seq;
    if found then  -- not so where prune has come in between
      return;
    end if;
  end if;

  channel_id := doorbell._lock_channel(channel);
  -- Under the lock, in new statements and so with new snapshots: the locking statement's own would be from before the wait.
  if idempotency_key is not null then
    seq := doorbell._seq_of(channel_id, idempotency_key);
    select m.created_at, m.sender, m.body, m.headers into created_at, original_sender, original_body, original_headers
      from doorbell.message as m
      where m.channel_id = post.channel_id and m.seq = post.seq;
    if found then
      return;
    end if;
  end if;
  insert into doorbell.message as m (channel_id, seq, sender, body, headers, idempotency_key, created_at)
    values (post.channel_id, doorbell._head(post.channel_id) + 1, post.sender, post.body, post.headers, post.idempotency_key,
            clock_timestamp())
    returning m.seq, m.created_at into seq, created_at;
  posted := true;
  armed := doorbell._armed(channel_id);
  if notify and armed then
    perform pg_notify('doorbell', channel_id::text);
  end if;
end
$$;

-- Where messages with these keys go, in their order, on a channel whose row is locked: a new one at the next number, one whose
-- key the channel knows at its original, one whose key is also an earlier one's at that one. Null is no key.
create function doorbell._place(channel_id bigint, head bigint, keys text[], out seqs bigint[], out are_new boolean[])
language plpgsql volatile set search_path = pg_catalog, pg_temp
as $$
begin
  with messages as (
    select k.n, case when k.key is null then k.n else min(k.n) over (partition by k.key) end as first,
           case when k.key is not null then doorbell._seq_of(channel_id, k.key) end as old_seq
    from unnest(keys) with ordinality as k (key, n)
  ), numbered as (
    select m.n, head + row_number() over (order by m.n) as seq
    from messages as m
    where m.old_seq is null and m.first = m.n
  )
  select array_agg(coalesce(m.old_seq, f.seq) order by m.n), array_agg(m.old_seq is null and m.first = m.n order by m.n)
    into seqs, are_new
    from messages as m
    left join numbered as f on f.n = m.first;
end
$$;

-- Appends many messages to one channel: one lock, one contiguous run of numbers, all or nothing.
--
-- Promise: one row a draft, in the order given. New messages get consecutive numbers in that order; a draft whose key the
--   channel knows, or an earlier draft of the same call has, is not posted and comes back as its original.
-- senders, where it is given, has a sender for each draft, and sender stands for those that are null.
-- Locks, errors, notify: as post.
create function doorbell.post_many(
  channel text,
  sender text,
  bodies text[],
  idempotency_keys text[] default null,
  headers jsonb[] default null,
  notify boolean default false,
  lock_timeout_ms integer default 5000,
  senders text[] default null
) returns table (
  channel_id bigint,
  draft bigint,
  seq bigint,
  created_at timestamptz,
  posted boolean,
  armed boolean,
  original_sender text,
  original_body text,
  original_headers jsonb
)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp set lock_timeout = '5s' set enable_seqscan = off set enable_bitmapscan = off
as $$
declare
  v_id bigint;
  v_count integer := coalesce(cardinality(bodies), 0);
  v_head bigint;
  v_time timestamptz;
  v_seqs bigint[];
  v_posted boolean[];
  v_armed boolean := false;
begin
  perform doorbell._refuse_isolation();
  perform doorbell._refuse(
    doorbell._name_fault('channel', channel),
    doorbell._name_fault('sender', sender),
    case when cardinality(idempotency_keys) <> v_count then
      format('there are %s bodies and %s keys', v_count, cardinality(idempotency_keys)) end,
    case when cardinality(senders) <> v_count then format('there are %s bodies and %s senders', v_count, cardinality(senders)) end,
    (select min(doorbell._name_fault(format('sender %s', d.n), d.sender))
       from unnest(senders) with ordinality as d (sender, n)
       where d.sender is not null),
    case when cardinality(headers) <> v_count then format('there are %s bodies and %s headers', v_count, cardinality(headers)) end,
    (select min(format('body %s %s', d.n, case when d.body is null then 'is null' else format('has %s bytes', octet_length(d.body)) end))
       from unnest(bodies) with ordinality as d (body, n)
       where d.body is null or octet_length(d.body) > 16777216),
    (select min(doorbell._name_fault(format('idempotency_key %s', d.n), d.key, 1024))
       from unnest(idempotency_keys) with ordinality as d (key, n)
       where d.key is not null),
    (select min(format('draft %s: %s', d.n, doorbell._headers_fault(d.headers)))
       from unnest(post_many.headers) with ordinality as d (headers, n)
       where d.headers is null or (d.headers <> '{}' and doorbell._headers_fault(d.headers) is not null)));
  if lock_timeout_ms is distinct from 5000 then
    perform set_config('lock_timeout', lock_timeout_ms::text, true);
  end if;
  if v_count = 0 then
    return;
  end if;

  v_id := doorbell._lock_channel(channel);
  v_head := doorbell._head(v_id);
  v_time := clock_timestamp();
  if idempotency_keys is null then
    v_seqs := array(select v_head + n from generate_series(1, v_count) as n);
    v_posted := array_fill(true, array[v_count]);
  else
    select p.seqs, p.are_new into v_seqs, v_posted from doorbell._place(v_id, v_head, idempotency_keys) as p;
  end if;

  insert into doorbell.message (channel_id, seq, sender, body, headers, idempotency_key, created_at)
    select v_id, d.seq, coalesce(d.sender, post_many.sender), d.body, coalesce(d.headers, '{}'), d.key, v_time
    from unnest(bodies, idempotency_keys, post_many.headers, senders, v_seqs, v_posted) with ordinality
      as d (body, key, headers, sender, seq, posted, n)
    where d.posted
    order by d.n;
  if found then
    v_armed := doorbell._armed(v_id);
    if notify and v_armed then
      perform pg_notify('doorbell', v_id::text);
    end if;
  end if;

  return query
    select v_id, d.n, d.seq, coalesce(o.created_at, v_time), d.posted, v_armed, o.sender, o.body, o.headers
    from unnest(v_seqs, v_posted) with ordinality as d (seq, posted, n)
    left join lateral (
      select m.created_at, m.sender, m.body, m.headers
      from doorbell.message as m
      where not d.posted and m.channel_id = v_id and m.seq = d.seq
      limit 1
    ) as o on true
    order by d.n;
end
$$;

-- Announces new messages of these channels to the bells that wait. Called after the commit of the posts, in a transaction
-- of its own: a pending notification holds a cluster-wide lock while its transaction commits, and this one flushes nothing.
-- Nothing is announced while the queue is nearly full: that would fail the commit, and bells poll.
--
-- It asks again whether somebody waits: of 1,000 posts beside each other one had met another's probe of the wildcard, whose
-- session was put aside just then, and a notification that nobody needs wakes every listening session of the database.
create function doorbell.announce(channel_ids bigint[]) returns void
language plpgsql volatile security definer
as $$
declare
  v_id bigint;
  v_told pg_catalog.text; -- assigning is cheaper than PERFORM, which would be a query
begin
  foreach v_id in array coalesce(channel_ids, '{}') loop
    if doorbell._armed(v_id) and pg_catalog.pg_notification_queue_usage() operator(pg_catalog.<) 0.9 then
      v_told := pg_catalog.pg_notify('doorbell', v_id::pg_catalog.text)::pg_catalog.text;
    end if;
  end loop;
end
$$;


-- ---------------------------------------------------------------------------------------------------------------------
-- Subscribing and acking
-- ---------------------------------------------------------------------------------------------------------------------

-- Subscribes the handle and returns its cursor; a channel that is not there yet is created.
--
-- Promise: a post that commits after this returned is delivered. A cursor that exists is left where it is.
-- "head" joins behind the newest message, "start" before the oldest kept one.
-- Locks: the channel row, then the new cursor row. Subscribing again takes none.
-- Errors: RB001; 55P03 the channel was held for too long.
create function doorbell.subscribe(handle text, channel text, at text default 'head', lock_timeout_ms integer default 5000) returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp set lock_timeout = '5s' set enable_seqscan = off set enable_bitmapscan = off
as $$
declare
  v_id bigint;
  v_acked bigint;
begin
  perform doorbell._refuse(
    doorbell._name_fault('handle', handle),
    doorbell._name_fault('channel', channel),
    case when at is null or at not in ('head', 'start') then format('at is %s; it is ''head'' or ''start''', coalesce(quote_literal(at), 'null')) end);
  perform doorbell._refuse_isolation();
  if lock_timeout_ms is distinct from 5000 then
    perform set_config('lock_timeout', lock_timeout_ms::text, true);
  end if;

  select cu.acked_seq into v_acked
    from doorbell.cursor as cu
    join doorbell.channel as c on c.id = cu.channel_id
    where c.name = subscribe.channel and cu.handle = subscribe.handle;
  if found then
    return v_acked;
  end if;

  v_id := doorbell._lock_channel(channel);
  -- The first kept message is behind what prune has removed, under the lock that prune takes too.
  insert into doorbell.cursor (channel_id, handle, acked_seq)
    values (v_id, subscribe.handle,
            case at when 'head' then doorbell._head(v_id)
                    else coalesce((select p.up_to from doorbell.pruned as p where p.channel_id = v_id), 0) end)
    on conflict do nothing;
  select cu.acked_seq into v_acked from doorbell.cursor as cu where cu.channel_id = v_id and cu.handle = subscribe.handle;
  return v_acked;
end
$$;

-- Removes the handle's cursor on the channel; false when there was none. Messages stay.
-- Locks: the cursor row. Errors: RB001, RB002.
create function doorbell.unsubscribe(handle text, channel text) returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp set lock_timeout = '5s' set enable_seqscan = off set enable_bitmapscan = off
as $$
declare
  v_id bigint;
begin
  perform doorbell._refuse(doorbell._name_fault('handle', handle), doorbell._name_fault('channel', channel));
  select c.id into v_id from doorbell.channel as c where c.name = unsubscribe.channel;
  if not found then
    perform doorbell._refuse_channel(channel);
  end if;
  delete from doorbell.cursor as cu where cu.channel_id = v_id and cu.handle = unsubscribe.handle;
  return found;
end
$$;

-- Whether retention has removed messages behind this one. A function, so that its table is opened only where a cursor jumps.
create function doorbell._lost_behind(channel_id bigint, seq bigint) returns boolean
language plpgsql stable set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off
as $$
begin
  return exists (select from doorbell.pruned as p where p.channel_id = _lost_behind.channel_id and p.up_to > seq);
end
$$;

-- Moves the cursor to up_to and returns where it stands.
--
-- Promise: it never moves back, whoever acks in whatever order; 0 and stale numbers change nothing. With created_at, the time
--   of the message that the caller handled, an ack of another message under the same number is refused.
-- Locks: the cursor row. The head only grows, so it is read without a lock.
-- Errors, checked in this order: RB001, RB002 unknown channel, RB003 not subscribed, RB005 the log rewound, RB004 beyond head,
--   RB006 messages were removed before the handle had acked them.
create function doorbell.ack(handle text, channel text, up_to bigint, created_at timestamptz default null) returns bigint
language plpgsql volatile security definer set lock_timeout = '5s' set enable_seqscan = off
as $$
begin
  -- The usual case in one statement: the cursor moves forward to a message that is there, is the one that was handled, and
  -- has no gap before it; the very next one has none. Scalar subqueries, so that no plan can join instead. Each looks for
  -- one row by a whole unique key, for which a bitmap is never the cheaper plan.
  update doorbell.cursor as cu
    set acked_seq = up_to, acked_at = pg_catalog.clock_timestamp()
    where cu.channel_id operator(pg_catalog.=) (select c.id from doorbell.channel as c where c.name operator(pg_catalog.=) ack.channel)
      and cu.handle operator(pg_catalog.=) ack.handle
      and cu.acked_seq operator(pg_catalog.<) up_to
      and (select ack.created_at is null or m.created_at operator(pg_catalog.=) ack.created_at
           from doorbell.message as m
           where m.channel_id operator(pg_catalog.=) cu.channel_id and m.seq operator(pg_catalog.=) up_to)
      and (doorbell._after(cu.acked_seq) operator(pg_catalog.=) up_to or not doorbell._lost_behind(cu.channel_id, cu.acked_seq));
  if found then
    return up_to;
  end if;
  return doorbell._ack(handle, channel, up_to, created_at);
end
$$;

-- What ack does where its usual case is not given: says what is wrong, or acks all the same.
create function doorbell._ack(handle text, channel text, up_to bigint, created_at timestamptz) returns bigint
language plpgsql volatile set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off
as $$
declare
  v_id bigint;
  v_gone bigint;
  v_acked bigint;
  v_head bigint;
begin
  perform doorbell._refuse(
    doorbell._name_fault('handle', handle),
    doorbell._name_fault('channel', channel),
    case when up_to is null then 'up_to is null' when up_to < 0 then format('up_to is %s; it is 0 or more', up_to) end);

  -- Before the cursor: prune passes no cursor unforced, so what it had removed by now is behind a cursor that is read later.
  select c.id, (select p.up_to from doorbell.pruned as p where p.channel_id = c.id) into v_id, v_gone
    from doorbell.channel as c
    where c.name = _ack.channel;
  if not found then
    perform doorbell._refuse_channel(channel);
  end if;
  select cu.acked_seq into v_acked from doorbell.cursor as cu where cu.channel_id = v_id and cu.handle = _ack.handle;
  if not found then
    perform doorbell._refuse_handle(handle, channel);
  end if;

  v_head := doorbell._head(v_id);
  if _ack.created_at is not null and (
    up_to > v_head
    or exists (select from doorbell.message as m
               where m.channel_id = v_id and m.seq = up_to and m.created_at <> _ack.created_at))
  then
    raise exception using
      errcode = 'RB005',
      message = format('message %s of %s is not the one that was read: the log has rewound.', up_to, quote_literal(channel)),
      detail = format('The head is %s. A restore or a failover has lost the end of the log, and other messages may carry its numbers.', v_head),
      hint = 'Nothing was acked. Catch up again, and handle what comes.';
  end if;
  if up_to > v_head then
    raise exception using
      errcode = 'RB004',
      message = format('cannot ack %s on %s: its head is %s.', up_to, quote_literal(channel), v_head),
      detail = 'Only a message that was posted can have been handled.',
      hint = 'Ack the seq of the last message that was handled.';
  end if;
  if v_gone > v_acked then
    perform doorbell._refuse_pruned(handle, channel, v_acked, v_gone);
  end if;
  if up_to <= v_acked then
    return v_acked;
  end if;

  update doorbell.cursor as cu
    set acked_seq = greatest(cu.acked_seq, up_to), acked_at = clock_timestamp()
    where cu.channel_id = v_id and cu.handle = _ack.handle
    returning cu.acked_seq into v_acked;
  if not found then
    perform doorbell._refuse_handle(handle, channel);
  end if;
  return v_acked;
end
$$;


-- ---------------------------------------------------------------------------------------------------------------------
-- Reading. None of these writes or locks anything; all of them run in a read-only transaction.
-- ---------------------------------------------------------------------------------------------------------------------

-- One page of what the handle has not acked, by channel name, then seq, from behind (after_channel, after_seq).
--
-- Promise: starts at the cursors, wherever after_* points back to. An empty page is the true head of every subscribed channel; a short
--   page is not. At most page_size messages, and no more once their bodies reach max_bytes (null: no limit).
-- Plans: made once a session. A limit that is not known looks costly, so that each page would be planned again, which takes
--   as long as reading it; the index is the only plan that is good at every size of the log.
-- Errors: RB006 where messages behind a cursor were removed (prune with force), until skip_pruned.
create function doorbell.unacked(
  handle text,
  after_channel text default null,
  after_seq bigint default 0,
  page_size integer default 100,
  max_bytes bigint default null
) returns table (channel text, seq bigint, sender text, body text, headers jsonb, idempotency_key text, created_at timestamptz)
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
  set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set jit = off
as $$
declare
  v_cursor record;
  v_rows integer := page_size;
  v_bytes bigint := max_bytes;
  v_last bigint;
  v_found bigint;
  v_size bigint;
begin
  for v_cursor in
    select cu.channel_id as id, c.name, cu.acked_seq,
           case when c.name = after_channel then greatest(cu.acked_seq, after_seq) else cu.acked_seq end as floor,
           (select p.up_to from doorbell.pruned as p where p.channel_id = cu.channel_id) as up_to
    from doorbell.cursor as cu
    cross join lateral (select d.name from doorbell.channel as d where d.id = cu.channel_id offset 0) as c
    where cu.handle = unacked.handle and (after_channel is null or c.name >= after_channel)
    order by c.name
  loop
    if v_cursor.up_to > v_cursor.acked_seq then
      perform doorbell._refuse_pruned(handle, v_cursor.name, v_cursor.acked_seq, v_cursor.up_to);
    end if;
    v_last := null;
    if max_bytes is not null then
      -- The last message that still fits. The sizes are read from the rows alone, without their bodies; mostly all of
      -- them fit, and a sum takes a fifth of the running sums.
      select max(n.seq), sum(octet_length(n.body)) into v_last, v_size
        from (
          select m.seq, m.body
          from doorbell.message as m
          where m.channel_id = v_cursor.id and m.seq > v_cursor.floor
          order by m.seq
          limit v_rows
        ) as n;
      continue when v_last is null;
      if v_size >= v_bytes then
        select max(p.seq), sum(p.size) into v_last, v_size
          from (
            select m.seq, octet_length(m.body) as size, sum(octet_length(m.body)) over (order by m.seq) - octet_length(m.body) as before
            from doorbell.message as m
            where m.channel_id = v_cursor.id and m.seq > v_cursor.floor and m.seq <= v_last
          ) as p
          where p.before < v_bytes;
      end if;
      v_bytes := v_bytes - v_size;
    end if;
    return query
      select v_cursor.name, m.seq, m.sender, m.body, m.headers, m.idempotency_key, m.created_at
      from doorbell.message as m
      where m.channel_id = v_cursor.id and m.seq > v_cursor.floor and (v_last is null or m.seq <= v_last)
      order by m.seq
      limit v_rows;
    get diagnostics v_found = row_count;
    v_rows := v_rows - v_found;
    exit when v_rows <= 0 or v_bytes <= 0;
  end loop;
end
$$;

-- The messages of one channel behind after_seq, in order, at most page_size; none for a channel that does not exist.
create function doorbell.messages_after(channel text, after_seq bigint, page_size integer default 100)
returns table (seq bigint, sender text, body text, headers jsonb, idempotency_key text, created_at timestamptz)
language plpgsql stable security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off
as $$
declare
  v_id bigint;
begin
  select c.id into v_id from doorbell.channel as c where c.name = messages_after.channel;
  return query
    select m.seq, m.sender, m.body, m.headers, m.idempotency_key, m.created_at
    from doorbell.message as m
    where m.channel_id = v_id and m.seq > after_seq
    order by m.seq
    limit page_size;
end
$$;

-- The seq of the newest message; 0 for an empty or absent channel.
create function doorbell.head(channel text) returns bigint
language plpgsql stable security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off
as $$
begin
  return doorbell._head((select c.id from doorbell.channel as c where c.name = head.channel));
end
$$;

-- The names of all channels, in code point order.
create function doorbell.channel_names() returns setof text
language sql stable security definer set search_path = pg_catalog, pg_temp
as $$
  select c.name from doorbell.channel as c order by c.name
$$;

-- The names of the channels that the handle is subscribed to, in code point order.
create function doorbell.subscriptions(handle text) returns setof text
language sql stable security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off set jit = off
as $$
  select c.name
  from doorbell.cursor as cu
  cross join lateral (select d.name from doorbell.channel as d where d.id = cu.channel_id offset 0) as c
  where cu.handle = subscriptions.handle
  order by c.name
$$;

-- Where the handle's cursor stands. Errors: RB002 unknown channel, RB003 not subscribed.
create function doorbell.acked_seq(handle text, channel text) returns bigint
language plpgsql stable security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off
as $$
declare
  v_id bigint;
  v_acked bigint;
begin
  select c.id into v_id from doorbell.channel as c where c.name = acked_seq.channel;
  if not found then
    perform doorbell._refuse_channel(channel);
  end if;
  select cu.acked_seq into v_acked from doorbell.cursor as cu where cu.channel_id = v_id and cu.handle = acked_seq.handle;
  if not found then
    perform doorbell._refuse_handle(handle, channel);
  end if;
  return v_acked;
end
$$;

-- The rows of the view doorbell.backlog for one handle, or for all: what an agent role may ask without reading the view.
create function doorbell.backlog_of(handle text default null)
returns table (
  handle_name text, channel text, head bigint, acked_seq bigint, unacked bigint, oldest_unacked_at timestamptz, last_acked_at timestamptz, lost bigint
)
language plpgsql stable security definer set search_path = pg_catalog, pg_temp set plan_cache_mode = force_custom_plan set jit = off
as $$
begin
  return query
    select b.handle, b.channel, b.head, b.acked_seq, b.unacked, b.oldest_unacked_at, b.last_acked_at, b.lost
    from doorbell.backlog as b
    where backlog_of.handle is null or b.handle = backlog_of.handle
    order by b.handle, b.channel;
end
$$;

-- How many messages lie between cursors and heads, for one channel, one handle, both or all. 0 is quiet: acked equals posted.
create function doorbell.unacked_count(channel text default null, handle text default null) returns bigint
language plpgsql stable security definer set search_path = pg_catalog, pg_temp set plan_cache_mode = force_custom_plan
as $$
begin
  return (
    select coalesce(sum(doorbell._head(cu.channel_id) - cu.acked_seq), 0)
    from doorbell.cursor as cu
    where (unacked_count.handle is null or cu.handle = unacked_count.handle)
      and (unacked_count.channel is null
           or cu.channel_id = (select c.id from doorbell.channel as c where c.name = unacked_count.channel)));
end
$$;


-- ---------------------------------------------------------------------------------------------------------------------
-- The doorbell. It peeks: nothing here writes, and the session it runs in is read-only.
-- ---------------------------------------------------------------------------------------------------------------------

-- What a new bell starts from: each subscribed channel with the handle's cursor, the time of the message at the cursor, the
-- head, and the store's epoch, by channel name.
create function doorbell.bell_floors(handle text)
returns table (channel_id bigint, channel text, floor bigint, floor_at timestamptz, head bigint, epoch uuid)
language plpgsql stable security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off set jit = off
as $$
begin
  return query
    select cu.channel_id, c.name, cu.acked_seq,
           (select m.created_at from doorbell.message as m where m.channel_id = cu.channel_id and m.seq = cu.acked_seq),
           doorbell._head(cu.channel_id), e.epoch
    from doorbell.cursor as cu
    cross join lateral (select d.name from doorbell.channel as d where d.id = cu.channel_id offset 0) as c
    join doorbell.meta as e on e.only_row
    where cu.handle = bell_floors.handle
    order by c.name;
end
$$;

-- For each watch (a handle at a floor on a channel) that has something to look at: the head, and the first message behind
-- the floor that is not the handle's own. One statement for all the bells of a process.
--
-- Promise: no row for a watch whose floor is the head. seq is null when all that is new is the handle's own; created_at is
--   then that of the message at the head. preview holds at most the first preview_len characters of the body. rewound says
--   that the floor is beyond the head, that another message than the one at floor_at carries its number, or that the store
--   has another epoch than the one the watch began in (new_epoch, after a restore): epochs has one for each, or one for all. lost_from and
--   lost_to are the range that retention was forced past before the handle had acked it, whatever the floor; else null.
-- Planned once a session: that takes several times as long as the statement. (select …) hides how long the arrays are, for
--   which the planner would plan each call anew; and a plan that scans a table while it is small would outlive its growth.
create function doorbell.peek(
  handles text[],
  channel_ids bigint[],
  floors bigint[],
  floor_times timestamptz[],
  preview_len integer,
  epochs uuid[] default null
) returns table (
  watch bigint, head bigint, rewound boolean, seq bigint, sender text, preview text, created_at timestamptz, lost_from bigint, lost_to bigint
)
language plpgsql stable security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off
as $$
begin
  return query
    select w.n, h.seq, h.seq < w.floor or f.created_at <> w.floor_at or coalesce(e.is_new, false), m.seq, m.sender, left(m.body, preview_len),
           coalesce(m.created_at, (select t.created_at from doorbell.message as t where t.channel_id = w.channel_id and t.seq = h.seq)),
           l.acked_seq + 1, l.up_to
    from unnest((select handles), (select channel_ids), (select floors), (select floor_times))
      with ordinality as w (handle, channel_id, floor, floor_at, n)
    cross join lateral (
      select m.epoch <> epochs[least(w.n, cardinality(epochs))] as is_new from doorbell.meta as m where m.only_row
    ) as e
    cross join lateral (select doorbell._head(w.channel_id) as seq) as h
    left join lateral (
      select g.created_at from doorbell.message as g where g.channel_id = w.channel_id and g.seq = w.floor offset 0
    ) as f on true
    left join lateral (
      select o.seq, o.sender, o.body, o.created_at
      from doorbell.message as o
      -- An expression, which has no statistics: in a log of one sender those say that no other message will come, and then
      -- the whole table is read instead of the index from the floor on.
      where o.channel_id = w.channel_id and o.seq > w.floor and o.sender || '' <> w.handle
      order by o.seq
      limit 1
    ) as m on h.seq > w.floor
    left join lateral (
      select cu.acked_seq, p.up_to
      from (select up_to from doorbell.pruned where pruned.channel_id = w.channel_id offset 0) as p
      cross join lateral (
        select c.acked_seq from doorbell.cursor as c where c.channel_id = w.channel_id and c.handle = w.handle offset 0
      ) as cu
      where cu.acked_seq < p.up_to
    ) as l on true
    where h.seq <> w.floor or f.created_at <> w.floor_at or e.is_new or l.up_to is not null
    order by w.n;
end
$$;

-- The number behind another; the greatest has none.
create function doorbell._after(seq bigint) returns bigint
language sql immutable
return least(seq, 9223372036854775806) + 1;

-- A message as glance gives it.
create function doorbell._shown(seq bigint, sender text, body text, created_at timestamptz, preview_len integer) returns text[]
language sql stable
return array[seq::text, sender, left(body, preview_len), date_part('epoch', created_at)::text];

-- What peek would say of one watch, where that is the usual: the very next message, of somebody else, in a log that is as it
-- was. It is what a bell waits for while it rings, and peek takes twice as long.
--
-- Promise: {seq, sender, preview, created_at in seconds since 1970}, as peek would give them; null says nothing: ask peek.
create function doorbell.glance(
  handle text, channel_id bigint, floor bigint, floor_at double precision, preview_len integer, epoch uuid
) returns text[]
language plpgsql stable security definer set enable_seqscan = off set enable_bitmapscan = off
as $$
begin
  return (
    select doorbell._shown(m.seq, m.sender, m.body, m.created_at, preview_len)
    from doorbell.message as m
    where m.channel_id operator(pg_catalog.=) glance.channel_id
      and m.seq operator(pg_catalog.=) doorbell._after(glance.floor)
      and m.sender operator(pg_catalog.<>) glance.handle
      and (glance.floor_at is null or exists (
        select from doorbell.message as f
        where f.channel_id operator(pg_catalog.=) glance.channel_id
          and f.seq operator(pg_catalog.=) glance.floor
          and f.created_at operator(pg_catalog.=) pg_catalog.to_timestamp(glance.floor_at)))
      and not exists (
        select from doorbell.pruned as p
        where p.channel_id operator(pg_catalog.=) glance.channel_id and doorbell._is_behind(glance.handle, p.channel_id, p.up_to))
      and (select e.epoch from doorbell.meta as e where e.only_row) operator(pg_catalog.=) glance.epoch);
end
$$;

-- Whether the newest message of the channel has another number than is given: the poll of a bell at rest, at a third of the cost
-- of peek. Beside others that post, what a poll costs them is the code and the tables that it enters: hence one expression.
--
-- Promise: true for every post behind that number, and for a log that has become shorter. Not for one that was replaced by
--   another as long, for what was pruned, or for a new epoch: ask peek for these now and then.
create function doorbell.head_moved(channel_id bigint, head bigint) returns boolean
language plpgsql stable security definer set enable_seqscan = off set enable_bitmapscan = off
as $$
begin
  return coalesce(
           (select m.seq from doorbell.message as m where m.channel_id operator(pg_catalog.=) head_moved.channel_id
            order by m.seq desc limit 1),
           0) operator(pg_catalog.<>) head is not false; -- a head that is not given is another one
end
$$;

-- Whether head_moved is true of any of these channels.
create function doorbell.heads_moved(channel_ids bigint[], heads bigint[]) returns boolean
language plpgsql stable security definer set enable_seqscan = off set enable_bitmapscan = off
as $$
begin
  for i in 1 .. coalesce(pg_catalog.cardinality(channel_ids), 0) loop
    if coalesce(
         (select m.seq from doorbell.message as m where m.channel_id operator(pg_catalog.=) channel_ids[i] order by m.seq desc limit 1),
         0) operator(pg_catalog.<>) heads[i] is not false -- a head that is not given is another one
    then
      return true;
    end if;
  end loop;
  return false;
end
$$;

-- Whether the handle has a cursor on the channel that stands before up_to. A function, so that its tables are opened only
-- for a channel that was pruned.
create function doorbell._is_behind(handle text, channel_id bigint, up_to bigint) returns boolean
language plpgsql stable set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off
as $$
begin
  return exists (
    select from doorbell.cursor as cu
    where cu.channel_id = _is_behind.channel_id and cu.handle = _is_behind.handle and cu.acked_seq < _is_behind.up_to);
end
$$;

-- Takes the bells' keys of some channels for this session and lets those of others go; channel 0 is the wildcard.
--
-- Promise: never waits. Returns the channels whose key was refused: a post was looking at it in this very moment. Keys are
--   taken before others are let go.
-- The keys go with the session. Behind a pooler in transaction mode this must not be called: the session is not one's own.
create function doorbell.arm(take bigint[], release bigint[]) returns bigint[]
language plpgsql volatile security definer
as $$
declare
  v_refused constant bigint[] := array(
    select t.id from pg_catalog.unnest(take) as t (id) where not pg_catalog.pg_try_advisory_lock_shared(doorbell._bell_key(t.id)));
begin
  perform pg_catalog.pg_advisory_unlock_shared(doorbell._bell_key(r.id)) from pg_catalog.unnest(release) as r (id);
  return v_refused;
end
$$;

-- Whether this very session holds the advisory lock with this key.
create function doorbell._holds(key bigint) returns boolean
language sql stable set search_path = pg_catalog, pg_temp
as $$
  select exists (
    select from pg_locks as l
    where l.locktype = 'advisory' and l.pid = pg_backend_pid() and l.granted
      and l.classid = ((key >> 32) & 4294967295)::oid and l.objid = (key & 4294967295)::oid and l.objsubid = 1)
$$;

-- Holds the session's token, exclusively, for as long as this session lives: what says that the owner of a turn is alive.
-- False when another session holds it. Again in the same session: still true, and held once.
create function doorbell.hold_session(token bigint) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  v_key constant bigint := doorbell._key(84, token & 72057594037927935);
begin
  return doorbell._holds(v_key) or pg_try_advisory_lock(v_key);
end
$$;


-- ---------------------------------------------------------------------------------------------------------------------
-- Opening
-- ---------------------------------------------------------------------------------------------------------------------

-- What a client asks when it opens: the revision of this schema, its epoch, and whether this server takes writes.
create function doorbell.hello(out revision text, out epoch uuid, out read_only boolean)
language sql stable security definer set search_path = pg_catalog, pg_temp
as $$
  select (select v.version_num from doorbell.schema_version as v), m.epoch, pg_is_in_recovery()
  from doorbell.meta as m
$$;
