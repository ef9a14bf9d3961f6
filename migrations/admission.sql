-- Admission: one turn from an at-least-once log.
--
-- Tables.   turn is the marker that an event was taken on for a handle; delivery says which message was admitted as which
--           turn; turn_step and reservation say what the turn has done. A turn's primary key is (channel_id, id): channel_id
--           is the channel of the event, or 0 when the event has an id of its own, which spans channels.
-- Event.    The event_id passed, else the header event-id, else (channel, idempotency key), else (channel, seq): one of
--           three columns, so that an id, a key and a number never equal each other. What counts is the message in the log.
-- Flow.     admit inserts the marker. A racing twin waits for the winner's commit on the unique index, and then reads what
--           the winner has left. Everything else is for the owner: the session whose (holder, attempt) the turn carries.
--           finish_turn or fail_turn ends it, settles its deliveries, and moves the cursor over what is settled.
-- Owner.    holder is a session's token, whose key that session keeps locked (hold_session). Nobody reaps: who finds a turn
--           unfinished tries the key, and takes over, by compare-and-set on (holder, attempt), when it is free. Without a
--           token (holder 0) nobody can tell whether the owner lives: an unfinished turn then always reads as resumed. A token
--           that nobody holds gets no turn: its owner would count as dead while it works.
-- Locks.    In this order, inside every function: channel row (turn_post, fail_turn: also when nothing is posted in the
--           end), cursor rows by channel id, turn row. Deliveries are changed under the cursor's lock, or under the turn's.
-- Waiting.  As in contract.sql: at most 5 s for a lock (55P03).
-- Errors.   RB001 bad input, RB002 unknown channel, RB005 the log rewound, RB007 the turn is not the caller's (any more).
--
-- Every function takes the caller's transaction: what the application writes beside it commits with it, or not at all.
-- This file is declared after contract.sql; a changed file wants a new revision.


-- ---------------------------------------------------------------------------------------------------------------------
-- Private: owning, settling
-- ---------------------------------------------------------------------------------------------------------------------

create function doorbell._refuse_snapshot() returns void
language plpgsql stable set search_path = pg_catalog, pg_temp
as $$
begin
  if current_setting('transaction_isolation') <> 'read committed' then
    raise exception using
      errcode = 'RB001',
      message = format('the transaction runs at %s.', current_setting('transaction_isolation')),
      detail = 'Admission needs READ COMMITTED: an older snapshot cannot see what a twin has committed meanwhile.',
      hint = 'Begin the transaction with ISOLATION LEVEL READ COMMITTED, or call outside it.';
  end if;
end
$$;

create function doorbell._refuse_turn(message text, detail text) returns void
language plpgsql immutable set search_path = pg_catalog, pg_temp
as $$
begin
  raise exception using
    errcode = 'RB007',
    message = _refuse_turn.message,
    detail = _refuse_turn.detail,
    hint = 'Stop working on it: the rest would be done twice. Admit the message again to see where it stands.';
end
$$;

-- Whether the session that holds this token lives. The try is shared, so that two who ask at once do not take each other for
-- the session, and it is given back in the same expression. A session that takes its token again meanwhile tries once more.
create function doorbell._alive(holder bigint) returns boolean
language plpgsql volatile set search_path = pg_catalog, pg_temp
as $$
declare
  v_key constant bigint := doorbell._key(84, holder);
begin
  if holder is null or holder = 0 then
    return false;
  end if;
  return case when pg_try_advisory_lock_shared(v_key) then not pg_advisory_unlock_shared(v_key) else true end;
end
$$;

-- Whether a turn may not be given to this token, because no session holds it, not even this one: its owner would read as dead.
create function doorbell._unheld(holder bigint) returns boolean
language plpgsql volatile set search_path = pg_catalog, pg_temp
as $$
begin
  return holder <> 0 and not doorbell._alive(holder) and not doorbell._holds(doorbell._key(84, holder));
end
$$;

-- The turn of this event, or null. Exactly one of the last three is given. Looked for as keys are, see doorbell._seq_of.
create function doorbell._turn_of(channel_id bigint, handle text, event_id text, event_key text, event_seq bigint) returns bigint
language plpgsql stable
set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off
as $$
begin
  if event_id is not null then
    return (
      select case when f.event_id = _turn_of.event_id then f.id end
      from (
        select t.event_id, t.id
        from doorbell.turn as t
        where t.channel_id = _turn_of.channel_id and t.handle = _turn_of.handle and t.event_id >= _turn_of.event_id
        order by t.event_id
        limit 1
      ) as f);
  elsif event_key is not null then
    return (
      select case when f.event_key = _turn_of.event_key then f.id end
      from (
        select t.event_key, t.id
        from doorbell.turn as t
        where t.channel_id = _turn_of.channel_id and t.handle = _turn_of.handle and t.event_key >= _turn_of.event_key
        order by t.event_key
        limit 1
      ) as f);
  else
    return (
      select case when f.event_seq = _turn_of.event_seq then f.id end
      from (
        select t.event_seq, t.id
        from doorbell.turn as t
        where t.channel_id = _turn_of.channel_id and t.handle = _turn_of.handle and t.event_seq >= _turn_of.event_seq
        order by t.event_seq
        limit 1
      ) as f);
  end if;
end
$$;

-- Locks the turn for its owner until the transaction ends, and says whose it is and how it stands.
--
-- With ended, an owner whose own attempt has ended it is let through: a call whose answer was lost is sent again.
-- Locks: the turn row, for no key update. Errors: RB001 not READ COMMITTED; RB007 it is not the caller's.
create function doorbell._lock_turn(
  turn_channel_id bigint,
  turn_id bigint,
  attempt integer,
  holder bigint,
  ended boolean default false,
  out handle text,
  out state text
)
language plpgsql volatile set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off
as $$
declare
  v_attempt integer;
  v_holder bigint;
begin
  perform doorbell._refuse_snapshot();
  select t.handle, t.state, t.attempt, t.holder into handle, state, v_attempt, v_holder
    from doorbell.turn as t
    where t.channel_id = turn_channel_id and t.id = turn_id
    for no key update;
  if not found then
    perform doorbell._refuse_turn('the turn is not there.', 'The transaction that admitted it has rolled back, or it was pruned.');
  end if;
  if v_attempt is distinct from attempt then
    perform doorbell._refuse_turn(
      'another session has taken the turn over.',
      format('This is attempt %s, and attempt %s has begun.', coalesce(attempt::text, 'null'), v_attempt));
  end if;
  if v_holder is null and not (ended and state <> 'unfinished') then
    perform doorbell._refuse_turn(
      case state when 'unfinished' then 'the turn was released.' else format('the turn has %s.', state) end,
      'Who releases, finishes or fails a turn does not own it any more.');
  end if;
  if v_holder is not null and v_holder is distinct from holder then
    perform doorbell._refuse_turn('another session holds the turn.', 'The attempt is the same, its holder is not.');
  end if;
end
$$;

-- Locks the cursors of the turn's handle on the channels where the turn was delivered until the transaction ends, in the order
-- of the channel ids, and returns those ids. A delivery that comes later is settled when it is delivered again, as a duplicate.
create function doorbell._lock_cursors(turn_channel_id bigint, turn_id bigint) returns bigint[]
language plpgsql volatile set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off
as $$
declare
  v_handle constant text := (
    select t.handle from doorbell.turn as t where t.channel_id = turn_channel_id and t.id = _lock_cursors.turn_id);
  v_channel bigint;
  v_locked bigint[] := '{}';
begin
  for v_channel in
    select distinct d.channel_id
    from doorbell.delivery as d
    where d.turn_channel_id = _lock_cursors.turn_channel_id and d.turn_id = _lock_cursors.turn_id
    order by d.channel_id
  loop
    perform from doorbell.cursor as cu where cu.channel_id = v_channel and cu.handle = v_handle for no key update;
    if found then
      v_locked := v_locked || v_channel;
    end if;
  end loop;
  return v_locked;
end
$$;

-- Moves the handle's cursor on the channel over the longest unbroken run of settled messages from where it stands, and
-- removes their deliveries. A message that the handle posted counts as settled, unless it was admitted and is not; those
-- of the ended turn that is passed count as settled.
--
-- The caller took the cursor's lock in a statement before this one: so of two who finish at once the second sees what the
-- first has settled. A range that retention has removed is never passed.
create function doorbell._advance(handle text, channel_id bigint, turn_channel_id bigint, turn_id bigint) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off
as $$
declare
  v_acked bigint;
  v_to bigint;
begin
  -- One statement, one snapshot: a message that is posted meanwhile is neither the first unsettled one nor the head.
  select cu.acked_seq, coalesce(
      (select m.seq - 1
       from doorbell.message as m
       where m.channel_id = _advance.channel_id and m.seq > cu.acked_seq
         and not coalesce(
           (select bool_and(d.settled or (d.turn_channel_id = _advance.turn_channel_id and d.turn_id = _advance.turn_id) is true)
            from doorbell.delivery as d
            where d.channel_id = m.channel_id and d.handle = _advance.handle and d.seq = m.seq),
           m.sender = _advance.handle)
       order by m.seq
       limit 1),
      (select m.seq from doorbell.message as m where m.channel_id = _advance.channel_id order by m.seq desc limit 1))
    into v_acked, v_to
    from doorbell.cursor as cu
    where cu.channel_id = _advance.channel_id and cu.handle = _advance.handle
      and exists (select from doorbell.message as m where m.channel_id = _advance.channel_id and m.seq = cu.acked_seq + 1);
  if v_to > v_acked then
    update doorbell.cursor as cu
      set acked_seq = v_to, acked_at = clock_timestamp()
      where cu.channel_id = _advance.channel_id and cu.handle = _advance.handle;
    delete from doorbell.delivery as d
      where d.channel_id = _advance.channel_id and d.handle = _advance.handle and d.seq > v_acked and d.seq <= v_to;
  end if;
end
$$;

-- Settles the deliveries of a turn that has ended, and moves the handle's cursors on these channels, which the caller has
-- locked. What lies behind a cursor is removed: the event, not the delivery, is what a replay is recognised by.
create function doorbell._settle(turn_channel_id bigint, turn_id bigint, handle text, channel_ids bigint[]) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off
as $$
declare
  v_channel bigint;
begin
  foreach v_channel in array channel_ids loop
    perform doorbell._advance(handle, v_channel, turn_channel_id, turn_id);
  end loop;
  -- What the cursors have not passed just now.
  if exists (select from doorbell.delivery as d
             where d.turn_channel_id = _settle.turn_channel_id and d.turn_id = _settle.turn_id)
  then
    delete from doorbell.delivery as d
      where d.turn_channel_id = _settle.turn_channel_id and d.turn_id = _settle.turn_id
        and d.seq <= (
          select cu.acked_seq from doorbell.cursor as cu where cu.channel_id = d.channel_id and cu.handle = d.handle);
    update doorbell.delivery as d
      set settled = true
      where d.turn_channel_id = _settle.turn_channel_id and d.turn_id = _settle.turn_id and not d.settled;
  end if;
end
$$;

-- An error as it is kept: one line of at most 500 characters.
create function doorbell._error_line(error text) returns text
language sql immutable set search_path = pg_catalog, pg_temp
as $$
  select left(btrim(regexp_replace(left(error, 4000), '[[:cntrl:][:space:]]+', ' ', 'g')), 500)
$$;

-- How many messages the turn has posted, a notice of its failure included.
create function doorbell._posts(turn_channel_id bigint, turn_id bigint) returns integer
language sql stable set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off
as $$
  select count(*)::integer
  from doorbell.reservation as r
  where r.channel_id = turn_channel_id and r.turn_id = _posts.turn_id and r.posted_seq is not null
$$;


-- ---------------------------------------------------------------------------------------------------------------------
-- Admitting
-- ---------------------------------------------------------------------------------------------------------------------

-- Takes on the event that this message carries as a turn of the handle, once, and says how the turn stands.
--
-- Promise: state is
--     new        nobody had admitted it; it is the caller's now;
--     resumed    it was admitted and has not ended, and nobody alive works on it; it is the caller's now, and of many who
--                ask at once only one is told so;
--     running    somebody alive works on it, perhaps another thread of this very session;
--     duplicate  it has ended: failed and error tell how;
--     unheld     it would be the caller's, but no session holds the token (any more): nothing was taken, and turn_id is null.
--                Call hold_session, then this again, with the same nonce.
--   should_run is true for new and resumed, never for running, and for a duplicate when on_duplicate is 'run', which then
--   makes it the caller's. The owner passes turn_channel_id, turn_id and attempt, and the holder that it passed here, to the
--   other functions. The delivery of the message is recorded, and settled when the turn ends.
-- holder is the session's token (hold_session), at most 56 bits; 0 for none. nonce marks the call: sent again with the same
--   one, because its answer was lost, it is told what it was told before.
-- created_at is the time of the message that the caller has read: another message under its number is refused.
-- Locks: the turn row, when it is taken over or has ended; a rival's uncommitted admission is waited for by the unique index.
-- Errors: RB001 bad input, not READ COMMITTED, or no such message; RB002; RB005 the log rewound; 55P03.
create function doorbell.admit(
  handle text,
  channel text,
  seq bigint,
  event_id text default null,
  on_duplicate text default 'skip',
  holder bigint default 0,
  nonce bigint default null,
  created_at timestamptz default null,
  out turn_channel_id bigint,
  out turn_id bigint,
  out state text,
  out should_run boolean,
  out attempt integer,
  out failed boolean,
  out error text,
  out posts integer
)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp set lock_timeout = '5s' set enable_seqscan = off set enable_bitmapscan = off
as $$
declare
  v_channel bigint;
  v_head bigint;
  v_read bigint;
  v_header text;
  v_key text;
  v_posted_at timestamptz;
  v_seq bigint;
  v_turn record;
begin
  if current_setting('transaction_isolation') <> 'read committed' then
    perform doorbell._refuse_snapshot();
  end if;
  if (octet_length(handle) between 1 and 255
      and octet_length(channel) between 1 and 255
      and seq >= 1
      and (event_id is null or octet_length(event_id) between 1 and 1024)
      and on_duplicate in ('skip', 'run')
      and holder between 0 and 72057594037927935) is not true
  then
    perform doorbell._refuse(
      doorbell._name_fault('handle', handle),
      doorbell._name_fault('channel', channel),
      case when seq is null then 'seq is null' when seq < 1 then format('seq is %s; it is 1 or more', seq) end,
      case when event_id is not null then doorbell._name_fault('event_id', event_id, 1024) end,
      case when on_duplicate is null or on_duplicate not in ('skip', 'run')
        then format('on_duplicate is %s; it is ''skip'' or ''run''', coalesce(quote_literal(on_duplicate), 'null')) end,
      case when holder is null or holder < 0 or holder > 72057594037927935
        then format('holder is %s; it is a token of at most 56 bits, or 0', coalesce(holder::text, 'null')) end);
  end if;

  select c.id, m.seq, m.headers ->> 'event-id', m.idempotency_key, m.created_at
    into v_channel, v_read, v_header, v_key, v_posted_at
    from doorbell.channel as c
    left join lateral (
      select * from doorbell.message as n where n.channel_id = c.id and n.seq = admit.seq offset 0
    ) as m on true
    where c.name = admit.channel;
  if not found then
    perform doorbell._refuse_channel(channel);
  end if;
  if v_read is null then
    v_head := doorbell._head(v_channel);
    raise exception using
      errcode = 'RB001',
      message = format('message %s of %s is not in the log.', seq, quote_literal(channel)),
      detail = case when seq > v_head
        then format('The head is %s: it was not posted, or its transaction has not committed.', v_head)
        else 'Retention has removed it.' end,
      hint = 'Catch up, and admit a message that comes from there.';
  end if;
  if v_posted_at <> admit.created_at then
    raise exception using
      errcode = 'RB005',
      message = format('message %s of %s is not the one that was read: the log has rewound.', seq, quote_literal(channel)),
      detail = 'A restore or a failover has lost the end of the log, and another message carries its number.',
      hint = 'Nothing was admitted. Catch up again, and handle what comes.';
  end if;

  -- A poster may write any header. One that fits no index is known by its hash, an empty one is none.
  v_header := nullif(v_header, '');
  if octet_length(v_header) > 1024 then
    v_header := 'sha256:' || encode(sha256(convert_to(v_header, 'UTF8')), 'hex');
  end if;
  event_id := coalesce(event_id, v_header);
  if event_id is not null then
    turn_channel_id := 0;
    v_key := null;
  else
    turn_channel_id := v_channel;
    v_seq := case when v_key is null then seq end;
  end if;
  posts := 0;
  failed := false;

  loop
    -- The marker first. Where a twin's is there, uncommitted, this waits for its end.
    insert into doorbell.turn as t (channel_id, handle, event_id, event_key, event_seq, holder, nonce, origin_channel_id, origin_seq)
      values (turn_channel_id, admit.handle, admit.event_id, v_key, v_seq, admit.holder, admit.nonce, v_channel, admit.seq)
      on conflict do nothing
      returning t.id into turn_id;
    if found then
      if doorbell._unheld(holder) then
        delete from doorbell.turn as t where t.channel_id = turn_channel_id and t.id = turn_id;
        exit;
      end if;
      state := 'new';
      should_run := true;
      attempt := 1;
      insert into doorbell.delivery (channel_id, handle, seq, turn_channel_id, turn_id)
        values (v_channel, admit.handle, admit.seq, admit.turn_channel_id, admit.turn_id);
      return;
    end if;

    turn_id := doorbell._turn_of(turn_channel_id, handle, event_id, v_key, v_seq);
    select t.state, t.attempt, t.holder, t.nonce, t.error into v_turn
      from doorbell.turn as t
      where t.channel_id = turn_channel_id and t.id = turn_id;
    continue when not found;  -- it was pruned between the two looks
    attempt := v_turn.attempt;
    error := v_turn.error;
    failed := v_turn.state = 'failed';

    if v_turn.nonce = admit.nonce and v_turn.holder = admit.holder then
      -- This very call, sent again.
      exit when doorbell._unheld(holder);
      state := case when v_turn.state <> 'unfinished' then 'duplicate' when v_turn.attempt = 1 then 'new' else 'resumed' end;
      exit;
    end if;
    if v_turn.state <> 'unfinished' and on_duplicate = 'skip' then
      -- Held until the delivery below is committed: retention must not take the turn from under it.
      perform from doorbell.turn as t where t.channel_id = turn_channel_id and t.id = turn_id for key share;
      continue when not found;
      state := 'duplicate';
      exit;
    end if;
    if v_turn.holder is not null and ((v_turn.holder = admit.holder and admit.holder <> 0) or doorbell._alive(v_turn.holder)) then
      state := 'running';
      exit;
    end if;
    exit when doorbell._unheld(holder);
    -- Nobody alive has it. Who finds it as it was a moment ago takes it; everybody else looks again.
    update doorbell.turn as t
      set holder = admit.holder, attempt = t.attempt + 1, nonce = admit.nonce, attempted_at = clock_timestamp()
      where t.channel_id = turn_channel_id and t.id = turn_id
        and t.attempt = v_turn.attempt and t.holder is not distinct from v_turn.holder and t.state = v_turn.state
      returning t.attempt into attempt;
    if found then
      state := case v_turn.state when 'unfinished' then 'resumed' else 'duplicate' end;
      exit;
    end if;
  end loop;

  if state is null then
    state := 'unheld';
    should_run := false;
    turn_id := null;
    attempt := null;
    return;
  end if;
  should_run := state in ('new', 'resumed') or (state = 'duplicate' and on_duplicate = 'run');
  posts := doorbell._posts(turn_channel_id, turn_id);
  -- Behind the cursor only an owner records one: nobody else would come back to settle it.
  insert into doorbell.delivery (channel_id, handle, seq, turn_channel_id, turn_id)
    select v_channel, admit.handle, admit.seq, admit.turn_channel_id, admit.turn_id
    where should_run
       or not exists (select from doorbell.cursor as cu
                      where cu.channel_id = v_channel and cu.handle = admit.handle and cu.acked_seq >= admit.seq)
    on conflict do nothing;
end
$$;

-- Gives back what the admit call with this nonce has taken, if it has: its answer was lost, and its session lives on without
-- knowing. False when there is nothing to give back. Locks: the turn row.
create function doorbell.abandon_admission(handle text, channel text, seq bigint, nonce bigint, holder bigint) returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp set lock_timeout = '5s' set enable_seqscan = off set enable_bitmapscan = off
as $$
begin
  update doorbell.turn as t
    set holder = null
    from doorbell.channel as c
    join doorbell.delivery as d
      on d.channel_id = c.id and d.handle = abandon_admission.handle and d.seq = abandon_admission.seq
    where c.name = abandon_admission.channel and t.channel_id = d.turn_channel_id and t.id = d.turn_id
      and t.nonce = abandon_admission.nonce and t.holder = abandon_admission.holder;
  return found;
end
$$;

-- What the handle has taken on and not ended, the oldest first: what a predecessor left, and what lives.
--
-- held says that the session that works on it is alive. The message is the one that was admitted first; to take a turn up
-- again, admit that, with event_id where it is not null.
create function doorbell.unfinished_turns(handle text)
returns table (
  channel text,
  seq bigint,
  sender text,
  body text,
  headers jsonb,
  idempotency_key text,
  created_at timestamptz,
  event_id text,
  attempt integer,
  held boolean,
  error text,
  steps text[],
  posts integer,
  admitted_at timestamptz
)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set plan_cache_mode = force_custom_plan
as $$
begin
  return query
    select c.name, t.origin_seq, m.sender, m.body, m.headers, m.idempotency_key, m.created_at, t.event_id, t.attempt,
           doorbell._alive(t.holder), t.error,
           array(select s.step from doorbell.turn_step as s where s.channel_id = t.channel_id and s.turn_id = t.id order by s.recorded_at),
           doorbell._posts(t.channel_id, t.id), t.admitted_at
    from (
      select distinct d.turn_channel_id, d.turn_id
      from doorbell.delivery as d
      where d.handle = unfinished_turns.handle and not d.settled
    ) as u
    join doorbell.turn as t on t.channel_id = u.turn_channel_id and t.id = u.turn_id
    join doorbell.channel as c on c.id = t.origin_channel_id
    left join doorbell.message as m on m.channel_id = t.origin_channel_id and m.seq = t.origin_seq
    where t.state = 'unfinished'
    order by t.admitted_at, t.id;
end
$$;


-- ---------------------------------------------------------------------------------------------------------------------
-- Working on a turn. For its owner; everybody else gets RB007.
-- ---------------------------------------------------------------------------------------------------------------------

-- Whether this step of the turn is still to be done. Names are scoped to the turn. Nothing is locked: who loses the turn after
-- this answer is told by record_step, and what he wrote in the meantime rolls back with it.
-- Errors: RB001, RB007.
create function doorbell.step_pending(turn_channel_id bigint, turn_id bigint, attempt integer, step text, holder bigint default 0)
returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp set lock_timeout = '5s' set enable_seqscan = off set enable_bitmapscan = off
as $$
begin
  perform doorbell._refuse(doorbell._name_fault('step', step));
  if not exists (
    select from doorbell.turn as t
    where t.channel_id = turn_channel_id and t.id = step_pending.turn_id
      and t.attempt = step_pending.attempt and t.holder = step_pending.holder)
  then
    perform doorbell._lock_turn(turn_channel_id, turn_id, attempt, holder);  -- says why not
  end if;
  return not exists (
    select from doorbell.turn_step as s
    where s.channel_id = turn_channel_id and s.turn_id = step_pending.turn_id and s.step = step_pending.step);
end
$$;

-- Records that this step is done, with what the caller's transaction writes beside it. False when it was recorded before.
-- Locks: the turn row. Errors: RB001, RB007, 55P03.
create function doorbell.record_step(turn_channel_id bigint, turn_id bigint, attempt integer, step text, holder bigint default 0)
returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp set lock_timeout = '5s' set enable_seqscan = off set enable_bitmapscan = off
as $$
begin
  perform doorbell._refuse(doorbell._name_fault('step', step));
  perform doorbell._lock_turn(turn_channel_id, turn_id, attempt, holder);
  insert into doorbell.turn_step (channel_id, turn_id, step, attempt)
    values (turn_channel_id, record_step.turn_id, record_step.step, record_step.attempt)
    on conflict do nothing;
  return found;
end
$$;

-- The time that belongs to this correlation id of the turn: now for the first who asks, and the same for everybody after.
-- Locks: the turn row. Errors: RB001, RB007, 55P03.
create function doorbell.reserve(turn_channel_id bigint, turn_id bigint, attempt integer, correlation_id text, holder bigint default 0)
returns timestamptz
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp set lock_timeout = '5s' set enable_seqscan = off set enable_bitmapscan = off
as $$
begin
  perform doorbell._refuse(doorbell._name_fault('correlation_id', correlation_id, 1024));
  perform doorbell._lock_turn(turn_channel_id, turn_id, attempt, holder);
  insert into doorbell.reservation (channel_id, turn_id, correlation_id, reserved_at)
    values (turn_channel_id, reserve.turn_id, reserve.correlation_id, clock_timestamp())
    on conflict do nothing;
  return (
    select r.reserved_at from doorbell.reservation as r
    where r.channel_id = turn_channel_id and r.turn_id = reserve.turn_id and r.correlation_id = reserve.correlation_id);
end
$$;

-- Posts a message as the turn's handle, once for each correlation id, and reserves that in the same commit.
--
-- Promise: as post. Where the turn has posted under this correlation id before, in whatever attempt, nothing is written:
--   posted is false, and channel, seq, created_at and original_* are the original's, whatever the arguments say now. Where
--   retention has removed the original, the reservation still tells its number and time, and original_* are null.
--   posts is how many messages the turn has posted by now.
-- Locks: the channel row, also when nothing is posted in the end; then the turn row.
-- Errors: as post, and RB007.
create function doorbell.turn_post(
  turn_channel_id bigint,
  turn_id bigint,
  attempt integer,
  channel text,
  body text,
  correlation_id text,
  headers jsonb default '{}',
  idempotency_key text default null,
  holder bigint default 0,
  notify boolean default false,
  lock_timeout_ms integer default 5000,
  out posted_channel text,
  out channel_id bigint,
  out seq bigint,
  out created_at timestamptz,
  out posted boolean,
  out armed boolean,
  out posts integer,
  out original_sender text,
  out original_body text,
  out original_headers jsonb,
  out original_key text
)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp set lock_timeout = '5s' set enable_seqscan = off set enable_bitmapscan = off
as $$
declare
  v_handle text;
begin
  perform doorbell._refuse(
    doorbell._name_fault('channel', channel),
    doorbell._name_fault('correlation_id', correlation_id, 1024));
  if lock_timeout_ms is distinct from 5000 then
    perform set_config('lock_timeout', lock_timeout_ms::text, true);
  end if;
  perform doorbell._refuse_snapshot();
  perform doorbell._lock_channel(channel);
  v_handle := (select l.handle from doorbell._lock_turn(turn_channel_id, turn_id, attempt, holder) as l);

  select r.posted_channel_id, r.posted_seq, r.posted_at into channel_id, seq, created_at
    from doorbell.reservation as r
    where r.channel_id = turn_channel_id and r.turn_id = turn_post.turn_id and r.correlation_id = turn_post.correlation_id
      and r.posted_seq is not null;
  if found then
    posted := false;
    armed := false;
    posted_channel := (select c.name from doorbell.channel as c where c.id = turn_post.channel_id);
    select m.sender, m.body, m.headers, m.idempotency_key into original_sender, original_body, original_headers, original_key
      from doorbell.message as m
      where m.channel_id = turn_post.channel_id and m.seq = turn_post.seq;
  else
    select p.channel_id, p.seq, p.created_at, p.posted, p.armed, p.original_sender, p.original_body, p.original_headers
      into channel_id, seq, created_at, posted, armed, original_sender, original_body, original_headers
      from doorbell.post(channel, body, v_handle, idempotency_key, headers, notify, lock_timeout_ms) as p;
    posted_channel := channel;
    original_key := case when not posted then idempotency_key end;
    insert into doorbell.reservation as r
      (channel_id, turn_id, correlation_id, reserved_at, posted_channel_id, posted_seq, posted_at)
      values (turn_channel_id, turn_post.turn_id, turn_post.correlation_id, turn_post.created_at,
              turn_post.channel_id, turn_post.seq, turn_post.created_at)
      on conflict on constraint reservation_pkey do update
        set posted_channel_id = excluded.posted_channel_id, posted_seq = excluded.posted_seq, posted_at = excluded.posted_at;
  end if;
  posts := doorbell._posts(turn_channel_id, turn_id);
end
$$;


-- ---------------------------------------------------------------------------------------------------------------------
-- Ending a turn
-- ---------------------------------------------------------------------------------------------------------------------

-- Ends the turn as finished: settles its deliveries and moves the handle's cursors over what is settled.
--
-- Promise: returns the state that the turn has now. Again by the same owner: nothing changes, and a turn that has failed stays
--   failed. The cursor moves over the longest unbroken run of settled messages from where it stands; a message that nobody
--   has admitted stops it. Where the handle is not subscribed, the delivery is settled all the same.
-- Locks: the handle's cursors on the channels of the deliveries, then the turn row. Errors: RB001, RB007, 55P03.
create function doorbell.finish_turn(turn_channel_id bigint, turn_id bigint, attempt integer, holder bigint default 0)
returns text
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp set lock_timeout = '5s' set enable_seqscan = off set enable_bitmapscan = off
as $$
declare
  v_channels bigint[];
  v_handle text;
begin
  if current_setting('transaction_isolation') <> 'read committed' then
    perform doorbell._refuse_snapshot();
  end if;
  v_channels := doorbell._lock_cursors(turn_channel_id, turn_id);
  update doorbell.turn as t
    set state = 'finished', holder = null, ended_at = clock_timestamp()
    where t.channel_id = turn_channel_id and t.id = finish_turn.turn_id
      and t.attempt = finish_turn.attempt and t.holder = finish_turn.holder
    returning t.handle into v_handle;
  if not found then
    return (select l.state from doorbell._lock_turn(turn_channel_id, turn_id, attempt, holder, true) as l);  -- or says why not
  end if;
  perform doorbell._settle(turn_channel_id, turn_id, v_handle, v_channels);
  return 'finished';
end
$$;

-- Ends the turn as failed: records the error, settles its deliveries as finish_turn does, and posts the notice, if there is one and
-- the turn has posted nothing. Once: the same owner's second call changes nothing and returns the notice of the first.
--
-- posted is true when this call has posted the notice; seq and what follows are null when there is none.
-- Locks: the channel row of the notice, also when it is not posted; the cursors; the turn row.
-- Errors: as post and finish_turn; RB001 for a turn that its owner has finished.
create function doorbell.fail_turn(
  turn_channel_id bigint,
  turn_id bigint,
  attempt integer,
  error text,
  notice_to text default null,
  notice text default null,
  holder bigint default 0,
  notify boolean default false,
  lock_timeout_ms integer default 5000,
  out posted boolean,
  out armed boolean,
  out channel text,
  out channel_id bigint,
  out seq bigint,
  out sender text,
  out body text,
  out headers jsonb,
  out created_at timestamptz
)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp set lock_timeout = '5s' set enable_seqscan = off set enable_bitmapscan = off
as $$
declare
  v_channels bigint[];
  v_handle text;
  v_state text;
begin
  perform doorbell._refuse(
    case when error is null then 'error is null' end,
    case when notice_to is not null then doorbell._name_fault('notice_to', notice_to) end,
    case when (notice_to is null) <> (notice is null) then 'a notice needs both notice_to, its channel, and notice, its body' end);
  if lock_timeout_ms is distinct from 5000 then
    perform set_config('lock_timeout', lock_timeout_ms::text, true);
  end if;
  perform doorbell._refuse_snapshot();
  if notice_to is not null then
    perform doorbell._lock_channel(notice_to);
  end if;
  v_channels := doorbell._lock_cursors(turn_channel_id, turn_id);
  select l.handle, l.state into v_handle, v_state
    from doorbell._lock_turn(turn_channel_id, turn_id, attempt, holder, true) as l;

  posted := false;
  armed := false;
  if v_state = 'unfinished' or exists (
    select from doorbell.turn as t where t.channel_id = turn_channel_id and t.id = fail_turn.turn_id and t.holder is not null)
  then
    update doorbell.turn as t
      set state = 'failed', holder = null, error = doorbell._error_line(fail_turn.error), ended_at = clock_timestamp()
      where t.channel_id = turn_channel_id and t.id = fail_turn.turn_id;
    if notice_to is not null and doorbell._posts(turn_channel_id, turn_id) = 0 then
      select p.channel_id, p.seq, p.created_at, p.armed into channel_id, seq, created_at, armed
        from doorbell.post(notice_to, notice, v_handle, notify => fail_turn.notify, lock_timeout_ms => fail_turn.lock_timeout_ms) as p;
      posted := true;
      insert into doorbell.reservation (channel_id, turn_id, correlation_id, reserved_at, posted_channel_id, posted_seq, posted_at)
        values (turn_channel_id, fail_turn.turn_id, '', fail_turn.created_at, fail_turn.channel_id, fail_turn.seq, fail_turn.created_at);
    end if;
    perform doorbell._settle(turn_channel_id, turn_id, v_handle, v_channels);
  elsif v_state = 'finished' then
    perform doorbell._refuse('the turn has finished: it cannot fail any more');
  end if;

  select c.name, m.channel_id, m.seq, m.sender, m.body, m.headers, m.created_at
    into channel, channel_id, seq, sender, body, headers, created_at
    from doorbell.reservation as r
    join doorbell.message as m on m.channel_id = r.posted_channel_id and m.seq = r.posted_seq
    join doorbell.channel as c on c.id = m.channel_id
    where r.channel_id = turn_channel_id and r.turn_id = fail_turn.turn_id and r.correlation_id = '';
end
$$;

-- Gives the turn back unfinished, so that whoever is delivered the message next resumes it, and records the error of this
-- attempt where there is one. False, and nothing changes, when the caller does not own it (any more).
-- Locks: the turn row.
create function doorbell.release_turn(
  turn_channel_id bigint, turn_id bigint, attempt integer, error text default null, holder bigint default 0
) returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp set lock_timeout = '5s' set enable_seqscan = off set enable_bitmapscan = off
as $$
begin
  update doorbell.turn as t
    set holder = null, error = coalesce(doorbell._error_line(release_turn.error), t.error)
    where t.channel_id = turn_channel_id and t.id = release_turn.turn_id
      and t.attempt = release_turn.attempt and t.holder = release_turn.holder;
  return found;
end
$$;

-- Settles the delivery of this message as far as the turns that it was admitted as have ended, and moves the handle's cursor. For a
-- duplicate that is skipped: a replay has a number of its own, which no turn would settle.
-- Locks: the cursor row. Errors: RB001, RB002, 55P03.
create function doorbell.settle_delivery(handle text, channel text, seq bigint) returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp set lock_timeout = '5s' set enable_seqscan = off set enable_bitmapscan = off
as $$
declare
  v_channel bigint;
begin
  perform doorbell._refuse_snapshot();
  select c.id into v_channel from doorbell.channel as c where c.name = settle_delivery.channel;
  if not found then
    perform doorbell._refuse_channel(channel);
  end if;
  perform
    from doorbell.cursor as cu
    where cu.channel_id = v_channel and cu.handle = settle_delivery.handle
    for no key update;
  update doorbell.delivery as d
    set settled = true
    where d.channel_id = v_channel and d.handle = settle_delivery.handle and d.seq = settle_delivery.seq and not d.settled
      and (select t.state from doorbell.turn as t where t.channel_id = d.turn_channel_id and t.id = d.turn_id) <> 'unfinished';
  perform doorbell._advance(handle, v_channel, null, null);
  delete from doorbell.delivery as d
    where d.channel_id = v_channel and d.handle = settle_delivery.handle and d.seq = settle_delivery.seq and d.settled
      and d.seq <= (
          select cu.acked_seq from doorbell.cursor as cu where cu.channel_id = d.channel_id and cu.handle = d.handle);
end
$$;
