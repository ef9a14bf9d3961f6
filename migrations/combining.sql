-- Combining: posts that meet on one channel share a flush.
--
-- Flow.     Who finds the channel's queue lock and row free posts by itself (try_post). Who does not leaves the message in
--           doorbell.staged (stage), commits (nothing is flushed: that table is unlogged), waits for the lock and takes the
--           answer (collect). Who finds none takes its message back and numbers it with everything else that is staged there,
--           in one commit, and writes the answers of the others back (number_or_give_up). A channel's first message, and a key
--           that is known, are left to doorbell.post.
-- Lock.     The queue lock is an advisory one of a transaction, for each channel name (class 0x55). It orders those who combine;
--           the channel row's lock, taken behind it, orders them with everybody else. Who stages looks up nothing: names that
--           share a hash wait for each other, and are numbered apart.
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

-- The advisory key of the channel's queue lock.
create function doorbell._queue_key(channel text) returns bigint
language sql immutable
return doorbell._key(85, hashtextextended(channel, 0) & 72057594037927935); -- 56 bits

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
    where c.name operator(pg_catalog.=) channel and pg_catalog.pg_try_advisory_xact_lock(doorbell._queue_key(channel))
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
-- The ticket that collect wants, in the next transaction of this session. Null: nothing was written, and this wants
--   doorbell.post (a key that is known, a large message).
-- Errors: as try_post.
create function doorbell.stage(
  channel text,
  body text,
  sender text,
  idempotency_key text default null,
  headers jsonb default '{}',
  for_ms integer default 5000
) returns bigint
language plpgsql volatile security definer set lock_timeout = '5s'
as $$
declare
  v_ticket bigint;
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
  insert into doorbell.staged as s (channel, expires_at, sender, body, headers, idempotency_key)
    values (stage.channel, doorbell._in_ms(coalesce(for_ms, 5000)), stage.sender, stage.body, stage.headers, stage.idempotency_key)
    returning s.ticket into v_ticket;
  return v_ticket;
end
$$;

-- Waits for the queue lock, and takes the answer to a post that this session has staged, in a transaction after the one that
-- staged it.
--
-- The answer is as try_post's; null means that the key was known. {}: there is none yet, and this same transaction is to call
--   number_or_give_up.
-- Locks: the queue lock, for at most lock_timeout_ms.
create function doorbell.collect(channel text, ticket bigint, lock_timeout_ms integer) returns bigint[]
language plpgsql volatile security definer set lock_timeout = '5s' set enable_seqscan = off
as $$
declare
  v_locked pg_catalog.text; -- assigning is cheaper than PERFORM, which would be a query
  v_answer bigint[];
begin
  if lock_timeout_ms operator(pg_catalog.=) 5000 is not true then
    perform pg_catalog.set_config('lock_timeout', lock_timeout_ms::pg_catalog.text, true);
  end if;
  begin
    v_locked := pg_catalog.pg_advisory_xact_lock(doorbell._queue_key(channel))::pg_catalog.text;
  exception when query_canceled or others then
    -- For number_or_give_up, until this transaction ends. An answer in columns would cost all those who find theirs.
    perform pg_catalog.set_config('doorbell.locked_out', sqlstate operator(pg_catalog.||) sqlerrm, true);
  end;

  delete from doorbell.staged as s
    where s.channel operator(pg_catalog.=) collect.channel
      and s.ticket operator(pg_catalog.=) collect.ticket
      and s.backend operator(pg_catalog.=) pg_catalog.pg_backend_pid()
      and s.seq is not null
    returning case when s.flags is not null then doorbell._answer(s.channel_id, s.seq, s.created_at, s.flags) end into v_answer;
  if found then
    return v_answer;
  end if;
  return array[]::bigint[];
end
$$;

-- Numbers a post that its session has taken back, and what is staged on the channel, in order of arrival; writes the answers of
-- the others back, and returns its own. The queue lock is held by the caller.
--
-- It looks at most reach tickets away from its own, so that it never walks over the rows of a long past that an old snapshot
-- keeps from being removed; what lies further off is numbered by its own session. A row that is being given up is passed over.
-- Locks: the channel row, until its own post expires; the staged rows. Its pins are those of its only caller.
create function doorbell._number_staged(own doorbell.staged, reach integer) returns bigint[]
language plpgsql volatile
as $$
declare
  v_first constant bigint := own.ticket - reach;
  v_last constant bigint := own.ticket + reach;
  v_id bigint;
  v_head bigint;
  v_time timestamptz;
  v_flags integer;
  v_others tid[];
  v_keys text[]; -- in the order of the batch, as are the next two
  v_seqs bigint[]; -- null where no message has a key, and so is the next
  v_new boolean[];
  v_place integer; -- of its own in the batch
  v_seq bigint;
begin
  if current_setting('synchronous_commit') in ('off', 'local') then
    perform set_config('synchronous_commit', 'on', true);
  end if;
  select c.id into v_id from doorbell.channel as c where c.name = own.channel for no key update skip locked;
  if not found then
    perform set_config('lock_timeout', greatest(1, ceil(1000 * date_part('epoch', own.expires_at - clock_timestamp())))::integer::text, true);
    select c.id into v_id from doorbell.channel as c where c.name = own.channel for no key update;
    if not found then
      return null;
    end if;
  end if;
  v_head := doorbell._head(v_id);
  v_time := clock_timestamp();
  select array_agg(w.ctid), array_agg(w.idempotency_key), 1 + count(*) filter (where w.ticket < own.ticket)
    into v_others, v_keys, v_place
    from (
      select s.ctid, s.ticket, s.idempotency_key
      from doorbell.staged as s
      where s.channel = own.channel and s.ticket between v_first and v_last and s.seq is null and s.expires_at > v_time
      order by s.ticket
      for no key update skip locked
    ) as w;
  v_keys := v_keys[:v_place - 1] || own.idempotency_key || v_keys[v_place:];
  if num_nonnulls(variadic v_keys) > 0 then
    select p.seqs, p.are_new into v_seqs, v_new from doorbell._place(v_id, v_head, v_keys) as p;
  end if;
  -- Each is told, and announces for itself: this session may not want to, or may not live to do it.
  v_flags := doorbell._armed(v_id)::integer + case when v_others is not null then 2 else 0 end;
  if v_others is not null then
    -- They are locked, so they stay where they are.
    with batch as materialized (
      select r.ctid, p.n, coalesce(v_seqs[p.n], v_head + p.n) as seq, v_new[p.n] is not false as is_new
      from unnest(v_others) with ordinality as r (ctid, n)
      cross join lateral (select r.n + (r.n >= v_place)::integer as n) as p
    ), appended as (
      insert into doorbell.message (channel_id, seq, sender, body, headers, idempotency_key, created_at)
        select v_id, b.seq, s.sender, s.body, s.headers, s.idempotency_key, v_time
        from batch as b
        join doorbell.staged as s on s.ctid = b.ctid
        where b.is_new
        order by b.seq
    )
    update doorbell.staged as s
      set channel_id = v_id, seq = b.seq, created_at = v_time, flags = case when b.is_new then v_flags end
      from batch as b
      where s.ctid = b.ctid;
  end if;
  if v_new[v_place] is false then
    return null;
  end if;
  v_seq := coalesce(v_seqs[v_place], v_head + v_place);
  insert into doorbell.message (channel_id, seq, sender, body, headers, idempotency_key, created_at)
    values (v_id, v_seq, own.sender, own.body, own.headers, own.idempotency_key, v_time);
  return doorbell._answer(v_id, v_seq, v_time, v_flags);
end
$$;

-- What becomes of a post for which collect has found no answer: with the queue lock this session numbers it, and everybody
-- else's with it; without, or where that fails, it is given up.
--
-- Promise: as doorbell.post. The answer is as try_post's; null without a failure means that this wants doorbell.post (a key that
--   is known, a channel's first message). Where failure is not null, the post is not in the log and never will be, except for
--   RB008: then that is not known.
-- Locks: the staged row, for at most lock_timeout_ms; then as _number_staged.
create function doorbell.number_or_give_up(
  channel text,
  ticket bigint,
  lock_timeout_ms integer,
  out answer bigint[],
  out failure text,
  out failure_message text,
  out failure_hint text
)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp set lock_timeout = '5s'
set enable_seqscan = off set enable_bitmapscan = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_locked_out constant text := nullif(current_setting('doorbell.locked_out', true), '');
  v_own doorbell.staged;
  v_reach integer;
begin
  if lock_timeout_ms is distinct from 5000 then
    perform set_config('lock_timeout', lock_timeout_ms::text, true);
  end if;

  -- Its own answer or message is taken: whoever is numbering it just now is waited for.
  begin
    delete from doorbell.staged as s
      where s.channel = number_or_give_up.channel and s.ticket = number_or_give_up.ticket and s.backend = pg_backend_pid()
      returning s.* into v_own;
    if not found then
      failure := 'RB008';
      failure_message := 'the staged post is gone.';
    end if;
  exception when query_canceled or others then
    failure := 'RB008';
    failure_message := 'the commit that may have numbered the post has not ended.';
  end;
  if failure is not null then
    failure_hint := 'After the lock timeout, look whether it is in the log before you post it again; with a key, post it again.';
    return;
  end if;
  if v_own.seq is not null then
    answer := case when v_own.flags is not null then doorbell._answer(v_own.channel_id, v_own.seq, v_own.created_at, v_own.flags) end;
    return;
  end if;

  failure := left(v_locked_out, 5);
  failure_message := substr(v_locked_out, 6) || '.';
  if failure is null then
    -- Should another one's be what cannot be written, it fails alone.
    foreach v_reach in array array[256, 0] loop
      begin
        if current_setting('transaction_isolation') <> 'read committed' then
          perform doorbell._refuse_isolation();
        end if;
        answer := doorbell._number_staged(v_own, v_reach);
        failure := null;
        failure_message := null;
        return;
      exception when query_canceled or others then
        failure := sqlstate;
        failure_message := rtrim(sqlerrm, '.') || '.';
        exit when failure in ('55P03', '57014');
      end;
    end loop;
  end if;
  failure_hint := 'Nothing was posted.';
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
--   doorbell.staged, a migration that has come in between; or one that a DO block raises behind the call, which undoes its end.
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
  ticket pg_catalog.int8;
  p pg_catalog.record;
  told pg_catalog.text;
begin
  if busy is not true then
    answer := doorbell.try_post(channel, body, sender, idempotency_key, headers);
    busy := pg_catalog.cardinality(answer) operator(pg_catalog.=) 0;
  end if;
  if busy then
    answer := null;
    ticket := doorbell.stage(channel, body, sender, idempotency_key, headers, lock_timeout_ms);
    if ticket is not null then
      commit;
      answer := doorbell.collect(channel, ticket, lock_timeout_ms);
      if pg_catalog.cardinality(answer) operator(pg_catalog.=) 0 then
        p := doorbell.number_or_give_up(channel, ticket, lock_timeout_ms);
        if p.failure is not null then
          commit;
          raise exception using errcode = p.failure, message = p.failure_message, hint = p.failure_hint;
        end if;
        answer := p.answer;
      end if;
    end if;
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
