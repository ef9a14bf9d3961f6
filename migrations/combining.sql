-- Combining: posts that meet on one channel share a flush.
--
-- Flow.     Who finds the channel's queue lock and row free posts by itself (try_post). Who does not leaves the message in
--           doorbell.staged (stage), commits (nothing is flushed: that table is unlogged) and waits for the lock (collect). Who
--           gets it and has no number yet numbers everything that is staged there, in one commit, and writes the answers
--           back; the others find theirs. A channel's first message, and a key that is known, are left to doorbell.post.
-- Lock.     The queue lock is an advisory one of a transaction, for each channel (class 0x55). It orders those who combine; the
--           channel row's lock, taken behind it, orders them with everybody else.
-- Truth.    A post is in the log when the commit that numbered it is flushed; that one is flushed whatever synchronous_commit
--           its session has asked for. A staged row without an answer is in no log: who gives up removes it first, so that
--           "not posted" is true. A crash of the server empties the table; nobody was told that one of those was posted.
-- Names.    post_combined runs as its caller, with the caller's search_path: what looks like an operator in it would be the caller's.
-- Left.     A session that ends while it waits leaves its row: whoever comes next may still number it until it expires, and
--           prune removes it. Its client was told nothing, and with a key may post again.


-- An answer in numbers, since columns cost more than the insert: {channel_id, seq, created_at in µs since 1970, flags}. The
-- flag 1 says that a bell may wait for the announcement, 2 that the flush was shared.
create function doorbell._answer(channel_id bigint, seq bigint, created_at timestamptz, flags integer) returns bigint[]
language sql stable
return array[channel_id, seq, (date_part('epoch', created_at) * 1e6)::bigint, flags];

-- Whether the channel has a message with this key. Each call sees what has been committed when it is made.
create function doorbell._knows(channel text, idempotency_key text) returns boolean
language plpgsql volatile set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off
as $$
begin
  return idempotency_key is not null
    and doorbell._seq_of((select c.id from doorbell.channel as c where c.name = channel), idempotency_key) is not null;
end
$$;

-- Appends one message where that meets nobody, and waits for nobody.
--
-- The answer is that of doorbell._answer. {}: others are posting, and nothing was written. Null: nothing was written, and this
--   wants doorbell.post (a channel's first message, a key that is known).
-- Locks: the queue lock and the channel row, if both are free. A key that is found at once takes none.
-- Errors: RB001 bad input or not READ COMMITTED; 55P03 a table was locked for 5 s, as by VACUUM FULL.
create function doorbell.try_post(
  channel text,
  body text,
  sender text,
  idempotency_key text default null,
  headers jsonb default '{}'
) returns bigint[]
language plpgsql volatile security definer set lock_timeout = '5s' set enable_seqscan = off set enable_bitmapscan = off
as $$
declare
  v_id bigint;
  v_answer bigint[];
begin
  if not doorbell._is_plain(channel, body, sender, idempotency_key, headers, 16777216) then
    perform doorbell._check_post(channel, body, sender, idempotency_key, headers);
    if doorbell._knows(channel, idempotency_key) then
      return null;
    end if;
  end if;

  select c.id into v_id
    from doorbell.channel as c
    where c.name operator(pg_catalog.=) channel and pg_catalog.pg_try_advisory_xact_lock(doorbell._key(85, c.id))
    for no key update skip locked;
  if not found then
    return (select array[]::bigint[] from doorbell.channel as c where c.name operator(pg_catalog.=) channel);
  end if;
  -- Under the lock, in new statements and so with new snapshots.
  if idempotency_key is not null and doorbell._seq_of(v_id, idempotency_key) is not null then
    return null;
  end if;
  insert into doorbell.message as m (channel_id, seq, sender, body, headers, idempotency_key, created_at)
    -- As doorbell._head, whose call costs half as much again as its probe.
    values (v_id,
            doorbell._after(coalesce(
              (select h.seq from doorbell.message as h where h.channel_id operator(pg_catalog.=) v_id order by h.seq desc limit 1), 0)),
            try_post.sender, try_post.body, try_post.headers, try_post.idempotency_key, pg_catalog.clock_timestamp())
    returning doorbell._answer(m.channel_id, m.seq, m.created_at, doorbell._armed(m.channel_id)::integer) into v_answer;
  return v_answer;
end
$$;

-- So many milliseconds from now.
create function doorbell._in_ms(ms integer) returns timestamptz
language sql volatile
return clock_timestamp() + ms * interval '1 ms';

-- Leaves one message for whoever is posting to the channel: it waits for its number for at most so many milliseconds.
--
-- {channel_id, ticket}: collect wants the ticket, in the next transaction of this session. Null: nothing was written, and this
--   wants doorbell.post (a channel's first message, a key that is known, a large message).
-- Errors: as try_post.
create function doorbell.stage(
  channel text,
  body text,
  sender text,
  idempotency_key text default null,
  headers jsonb default '{}',
  for_ms integer default 5000
) returns bigint[]
language plpgsql volatile security definer set lock_timeout = '5s' set enable_seqscan = off
as $$
declare
  v_answer bigint[];
begin
  -- A larger body is worth a flush of its own.
  if not doorbell._is_plain(channel, body, sender, idempotency_key, headers, 65536) or for_ms operator(pg_catalog.<) 0 then
    perform doorbell._check_post(channel, body, sender, idempotency_key, headers);
    perform doorbell._refuse(
      case when for_ms operator(pg_catalog.<) 0 then pg_catalog.format('the lock timeout is %s ms', for_ms) end);
    if doorbell._knows(channel, idempotency_key) or pg_catalog.octet_length(body) operator(pg_catalog.>) 65536 then
      return null;
    end if;
  end if;
  insert into doorbell.staged as s (channel_id, expires_at, sender, body, headers, idempotency_key)
    select c.id, doorbell._in_ms(coalesce(for_ms, 5000)), stage.sender, stage.body, stage.headers,
           stage.idempotency_key
    from doorbell.channel as c
    where c.name operator(pg_catalog.=) channel
    returning array[s.channel_id, s.ticket] into v_answer;
  return v_answer;
end
$$;

-- Numbers what is staged on the channel, in order of arrival, and writes the answers back. The queue lock is held by the caller.
--
-- It looks at most reach tickets away from its own, so that it never walks over the rows of a long past that an old snapshot
-- keeps from being removed; what lies further off is numbered by its own session. A row that is being given up is passed over.
-- Locks: the channel row, until the row of this ticket expires; the staged rows.
create function doorbell._number_staged(channel_id bigint, ticket bigint, reach integer) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off
as $$
declare
  v_first constant bigint := ticket - reach;
  v_last constant bigint := ticket + reach;
  v_expires timestamptz;
  v_head bigint;
  v_time timestamptz;
  v_armed boolean;
  v_rows tid[];
  v_keys text[]; -- null where no message has one, and so are the next two
  v_seqs bigint[];
  v_new boolean[];
begin
  if current_setting('synchronous_commit') in ('off', 'local') then
    perform set_config('synchronous_commit', 'on', true);
  end if;
  perform from doorbell.channel as c where c.id = channel_id for no key update skip locked;
  if not found then
    select s.expires_at into v_expires
      from doorbell.staged as s
      where s.channel_id = _number_staged.channel_id and s.ticket = _number_staged.ticket;
    perform set_config('lock_timeout', greatest(1, ceil(1000 * date_part('epoch', v_expires - clock_timestamp())))::integer::text, true);
    perform from doorbell.channel as c where c.id = channel_id for no key update;
  end if;
  v_head := doorbell._head(channel_id);
  v_time := clock_timestamp();
  -- Each is told, and announces for itself: this session may not want to, or may not live to do it.
  v_armed := doorbell._armed(channel_id);
  select array_agg(w.ctid), case when count(w.idempotency_key) > 0 then array_agg(w.idempotency_key) end into v_rows, v_keys
    from (
      select s.ctid, s.idempotency_key
      from doorbell.staged as s
      where s.channel_id = _number_staged.channel_id and s.ticket between v_first and v_last
        and s.seq is null and (s.expires_at > v_time or s.ticket = _number_staged.ticket and s.backend = pg_backend_pid())
      order by s.ticket
      for no key update skip locked
    ) as w;
  if v_keys is not null then
    select p.seqs, p.are_new into v_seqs, v_new from doorbell._place(channel_id, v_head, v_keys) as p;
  end if;
  -- They are locked, so they stay where they are.
  with appended as (
    insert into doorbell.message (channel_id, seq, sender, body, headers, idempotency_key, created_at)
      select _number_staged.channel_id, coalesce(v_seqs[r.n], v_head + r.n), s.sender, s.body, s.headers, s.idempotency_key, v_time
      from unnest(v_rows) with ordinality as r (ctid, n)
      join doorbell.staged as s on s.ctid = r.ctid
      where v_new[r.n] is not false
      order by r.n
  )
  update doorbell.staged as s
    set seq = coalesce(v_seqs[r.n], v_head + r.n), created_at = v_time,
        flags = case when v_new[r.n] is not false then v_armed::integer + case when cardinality(v_rows) > 1 then 2 else 0 end end
    from unnest(v_rows) with ordinality as r (ctid, n)
    where s.ctid = r.ctid;
end
$$;

-- What became of a post that this session has staged, in a transaction of its own after the one that staged it.
--
-- Promise: as doorbell.post. The answer is as try_post's; null without a failure means that the key was known.
--   Where failure is not null, the post is not in the log and never will be, except for RB008: then that is not known.
--   With the lock and without an answer, this session numbers everybody's.
-- Locks: the queue lock, for at most lock_timeout_ms; then as _number_staged.
create function doorbell.collect(
  channel_id bigint,
  ticket bigint,
  lock_timeout_ms integer,
  out answer bigint[],
  out failure text,
  out failure_message text,
  out failure_hint text
)
language plpgsql volatile security definer set lock_timeout = '5s' set enable_seqscan = off
as $$
declare
  v_locked pg_catalog.text; -- assigning is cheaper than PERFORM, which would be a query
begin
  if pg_catalog.current_setting('transaction_isolation') operator(pg_catalog.<>) 'read committed' then
    perform doorbell._refuse_isolation();
  end if;
  if lock_timeout_ms operator(pg_catalog.=) 5000 is not true then
    perform pg_catalog.set_config('lock_timeout', lock_timeout_ms::pg_catalog.text, true);
  end if;
  begin
    v_locked := pg_catalog.pg_advisory_xact_lock(doorbell._key(85, channel_id))::pg_catalog.text;
  exception when query_canceled or others then
    failure := sqlstate;
    failure_message := sqlerrm;
  end;

  delete from doorbell.staged as s
    where s.channel_id operator(pg_catalog.=) collect.channel_id
      and s.ticket operator(pg_catalog.=) collect.ticket
      and s.backend operator(pg_catalog.=) pg_catalog.pg_backend_pid()
      and s.seq is not null
    returning case when s.flags is not null then doorbell._answer(s.channel_id, s.seq, s.created_at, s.flags) end into answer;
  if found then
    failure := null;
    failure_message := null;
  else
    select g.answer, g.failure, g.failure_message, g.failure_hint into answer, failure, failure_message, failure_hint
      from doorbell._number_or_give_up(channel_id, ticket, failure, failure_message) as g;
  end if;
end
$$;

-- What collect does with a post that has no number yet. locked_out says why it has no lock: then the post is given up. The
-- rest as in collect.
create function doorbell._number_or_give_up(
  channel_id bigint,
  ticket bigint,
  locked_out text,
  locked_out_message text,
  out answer bigint[],
  out failure text,
  out failure_message text,
  out failure_hint text
)
language plpgsql volatile set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off
as $$
declare
  v_found boolean;
  v_reach integer;
begin
  failure := locked_out;
  failure_message := locked_out_message || '.';
  if failure is null then
    -- Should another one's be what cannot be written, it fails alone.
    foreach v_reach in array array[256, 0] loop
      begin
        perform doorbell._number_staged(channel_id, ticket, v_reach);
        failure := null;
        exit;
      exception when query_canceled or others then
        failure := sqlstate;
        failure_message := sqlerrm || '.';
        exit when failure in ('55P03', '57014');
      end;
    end loop;
  end if;

  -- Its own answer is taken, or the post is given up: whoever is numbering it just now is waited for.
  begin
    delete from doorbell.staged as s
      where s.channel_id = _number_or_give_up.channel_id and s.ticket = _number_or_give_up.ticket and s.backend = pg_backend_pid()
      returning s.seq is not null, case when s.flags is not null then doorbell._answer(s.channel_id, s.seq, s.created_at, s.flags) end
      into v_found, answer;
    if not found then
      failure := 'RB008';
      failure_message := 'the staged post is gone.';
    elsif not v_found and failure is null then
      failure := '55P03'; -- somebody else held the row
      failure_message := 'the staged post was locked.';
    end if;
  exception when query_canceled or others then
    failure := 'RB008';
    failure_message := 'the commit that may have numbered the post has not ended.';
  end;
  if v_found then
    failure := null;
  elsif failure = 'RB008' then
    failure_hint := 'After the lock timeout, look whether it is in the log before you post it again; with a key, post it again.';
  else
    failure_hint := 'Nothing was posted.';
  end if;
end
$$;

-- Appends one message as doorbell.post does, sharing the flush with others that are posting to the channel.
--
-- Call it outside a transaction block: it commits, and where the channel is busy does so twice. In a block a channel that is
--   busy, or where a bell waits, raises 2D000, and nothing is posted. The answer is as try_post's; null means that nothing was written and that this wants
--   doorbell.post. With announce, bells that may wait are told, in a transaction that flushes nothing; whatever happens to
--   that, the post is in the log. busy says that the caller has just met others there: it saves a look.
-- Errors: as doorbell.post; RB008 the outcome is not known (with a key the post may be sent again). Nor is it after another error
--   that comes from behind the first commit, as its context shows, and does not say "Nothing was posted": a cancel, a lock on
--   doorbell.staged, a migration that has come in between.
create procedure doorbell.post_combined(
  channel text,
  body text,
  sender text,
  idempotency_key text default null,
  headers jsonb default '{}',
  announce boolean default true,
  lock_timeout_ms integer default 5000,
  busy boolean default false,
  inout answer bigint[] default null
)
language plpgsql
as $$
declare
  p pg_catalog.record;
  told pg_catalog.text;
begin
  if busy then
    answer := doorbell.stage(channel, body, sender, idempotency_key, headers, lock_timeout_ms);
  else
    answer := doorbell.try_post(channel, body, sender, idempotency_key, headers);
    if pg_catalog.cardinality(answer) operator(pg_catalog.=) 0 then
      answer := doorbell.stage(channel, body, sender, idempotency_key, headers, lock_timeout_ms);
    end if;
  end if;
  if pg_catalog.cardinality(answer) operator(pg_catalog.=) 2 then
    commit;
    p := doorbell.collect(answer[1], answer[2], lock_timeout_ms);
    if p.failure is not null then
      commit;
      raise exception using errcode = p.failure, message = p.failure_message, hint = p.failure_hint;
    end if;
    answer := p.answer;
  end if;
  if announce and answer[4] operator(pg_catalog.&) 1 operator(pg_catalog.=) 1 then
    commit;
    begin
      told := doorbell.announce(array[answer[1]])::pg_catalog.text;
    exception when query_canceled or others then
      null; -- the post is in the log; bells find it by polling
    end;
  end if;
end
$$;
