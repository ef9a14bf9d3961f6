-- Running it: retention, a new epoch, and who may do what.
--
-- Retention. prune removes from the beginning of one channel's log what is old, was acked by every subscriber, belongs to no
--           unfinished turn and carries no key that may still be retried. doorbell.pruned says how far the log was removed.
--           Nothing is passed over in silence: what a cursor has not passed is kept, or (force) its reader is refused with
--           the lost range until it calls skip_pruned.
-- Locks.    As in contract.sql: the channel row, then the cursor row. prune holds the lock for one bounded batch.
-- Rights.   doorbell._rights() is the one list of who may call what. Nobody but the owner of the schema may prune, renew the
--           epoch, or let a role in.
-- Errors.   RB001 bad input, RB002 unknown channel, RB003 not subscribed, RB006 messages were removed before they were acked.


-- ---------------------------------------------------------------------------------------------------------------------
-- Private
-- ---------------------------------------------------------------------------------------------------------------------

-- What is wrong with a length of time, or null.
create function doorbell._interval_fault(field text, value interval) returns text
language sql immutable set search_path = pg_catalog, pg_temp
as $$
  select case
    when value is null then format('%s is null', field)
    when value < interval '0' then format('%s is %s; it is a length of time, 0 or more', field, value)
  end
$$;

-- How far one batch may remove messages of a channel now: from first to last, nothing when last < first.
--
-- more says that the next batch would find something too. Where a reader, a turn or a key stands in the way of messages that
-- are old enough, held_because is 'cursor', 'turn' or 'key', held_by names the handle (null for a key), and held_at is the
-- seq of the first message that is held. An index probe for each limit, and a scan of at most batch messages.
create function doorbell._prunable(
  channel_id bigint,
  keep interval,
  keep_keys interval,
  batch bigint,
  force boolean,
  out first bigint,
  out last bigint,
  out more boolean,
  out held_by text,
  out held_at bigint,
  out held_because text
)
language plpgsql stable set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off
as $$
declare
  v_old constant timestamptz := clock_timestamp() - keep;
  v_keys_old constant timestamptz := clock_timestamp() - greatest(keep, keep_keys);
  v_limit bigint := doorbell._head(channel_id) - 1;
  v_found record;
begin
  first := 1 + coalesce((select p.up_to from doorbell.pruned as p where p.channel_id = _prunable.channel_id), 0);
  more := false;

  if not force then
    select cu.handle, cu.acked_seq into v_found
      from doorbell.cursor as cu
      where cu.channel_id = _prunable.channel_id
      order by cu.acked_seq, cu.handle
      limit 1;
    if found and v_found.acked_seq < v_limit then
      v_limit := v_found.acked_seq;
      held_by := v_found.handle;
      held_because := 'cursor';
    end if;
  end if;

  -- Forced or not: a turn that has not ended may be resumed, and then its message is read again.
  select d.handle, d.seq into v_found
    from doorbell.delivery as d
    join doorbell.turn as t on t.channel_id = d.turn_channel_id and t.id = d.turn_id
    where d.channel_id = _prunable.channel_id and not d.settled and t.state = 'unfinished'
    order by d.seq
    limit 1;
  if found and v_found.seq - 1 < v_limit then
    v_limit := v_found.seq - 1;
    held_by := v_found.handle;
    held_because := 'turn';
  end if;

  last := least(v_limit, first - 1 + batch);
  -- The first that is too young, or whose key may still be retried. Times need not be in order, so each one is looked at.
  select m.seq, m.created_at < v_old as keyed into v_found
    from doorbell.message as m
    where m.channel_id = _prunable.channel_id and m.seq between first and last
      and m.created_at >= case when m.idempotency_key is null then v_old else v_keys_old end
    order by m.seq
    limit 1;
  if found then
    last := v_found.seq - 1;
    held_by := null;
    held_because := case when v_found.keyed then 'key' end;
    held_at := case when v_found.keyed then v_found.seq end;
    return;
  end if;
  -- The message behind what this batch removes: is it old enough too, and if it is, does anybody hold it?
  select m.created_at < case when m.idempotency_key is null then v_old else v_keys_old end as old into v_found
    from doorbell.message as m
    where m.channel_id = _prunable.channel_id and m.seq = greatest(last, first - 1) + 1;
  if not coalesce(v_found.old, false) then
    held_by := null;
    held_because := null;
  elsif last < v_limit then
    more := true;
    held_by := null;
    held_because := null;
  elsif held_because is not null then
    held_at := greatest(last, first - 1) + 1;
  end if;
end
$$;

-- Refuses a reader whose cursor stands before what was removed.
create function doorbell._refuse_pruned(handle text, channel text, acked bigint, up_to bigint) returns void
language plpgsql immutable set search_path = pg_catalog, pg_temp
as $$
begin
  raise exception using
    errcode = 'RB006',
    message = format('messages %s to %s of %s were removed before %s had acked them.',
                     acked + 1, up_to, quote_literal(channel), quote_literal(handle)),
    detail = format('Retention was forced past the cursor, which stands at %s.', acked),
    hint = format('Nothing was changed. Call skip_pruned (doorbell skip %s %s) to give that range up, and go on with message %s.',
                  quote_literal(handle), quote_literal(channel), up_to + 1);
end
$$;


-- ---------------------------------------------------------------------------------------------------------------------
-- Retention
-- ---------------------------------------------------------------------------------------------------------------------

-- What prune would do now, channel by channel, for one or for all. Changes nothing.
--
-- removable counts the messages that would go; first_kept is the first that is there now. held_by, held_at, held_because: see
-- prune. loses names the handles that force would pass.
create function doorbell.prune_plan(
  keep interval,
  channel text default null,
  keep_keys interval default '7 days',
  force boolean default false
) returns table (
  channel_name text, first_kept bigint, removable bigint, held_by text, held_at bigint, held_because text, loses text[]
)
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  perform doorbell._refuse(
    doorbell._interval_fault('keep', keep), doorbell._interval_fault('keep_keys', keep_keys));
  if channel is not null and not exists (select from doorbell.channel as c where c.name = prune_plan.channel) then
    perform doorbell._refuse_channel(channel);
  end if;
  return query
    select c.name, p.first, greatest(p.last - p.first + 1, 0), p.held_by, p.held_at, p.held_because,
           case when p.last >= p.first then
             (select array_agg(cu.handle order by cu.handle)
              from doorbell.cursor as cu
              where cu.channel_id = c.id and cu.acked_seq < p.last)
           end
    from doorbell.channel as c
    cross join lateral doorbell._prunable(c.id, keep, keep_keys, 9223372036854775807 / 2, force) as p
    where prune_plan.channel is null or c.name = prune_plan.channel
    order by c.name;
end
$$;

-- Removes staged posts that nobody waits for any more. All of them are read: they are few, and no index says when they expire.
-- The pin undoes that of prune, which calls this.
create function doorbell._drop_expired() returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp set enable_seqscan = on
as $$
begin
  delete from doorbell.staged as s where s.expires_at < clock_timestamp() - interval '1 minute';
end
$$;

-- Removes one batch of messages from the beginning of one channel: the named one or, without a name, the first in name order
-- that has something to remove. Call it again while more is true.
--
-- Promise: only what is older than keep, was acked by every subscriber, belongs to no unfinished turn, and whose key, if it has
--   one, is older than keep_keys; never the newest message. A channel without subscribers is pruned by age alone. What is left
--   has no gap. With force, cursors that lag are passed: lost_by names them, and each is refused with RB006 until skip_pruned.
-- removed and up_to say what went: removed messages, the last of them up_to. more: another call would find something. Where
--   something old enough is held, held_because is 'cursor', 'turn' or 'key', held_by the handle and held_at the message.
-- Locks: the channel row, while one batch is deleted. Errors: RB001 (also when not READ COMMITTED), RB002; 55P03 the channel
--   was held for too long.
create function doorbell.prune(
  keep interval,
  inout channel text default null,
  keep_keys interval default '7 days',
  batch integer default 1000,
  force boolean default false,
  lock_timeout_ms integer default 5000,
  out removed bigint,
  out up_to bigint,
  out more boolean,
  out held_by text,
  out held_at bigint,
  out held_because text,
  out lost_by text[]
)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp set lock_timeout = '5s' set enable_seqscan = off set enable_bitmapscan = off
as $$
declare
  v_wanted constant text := channel;
  v_channel record;
  v_plan record;
  v_id bigint;
begin
  perform doorbell._refuse(
    doorbell._interval_fault('keep', keep),
    doorbell._interval_fault('keep_keys', keep_keys),
    case when (batch between 1 and 100000) is not true then format('batch is %s; it is 1 to 100,000', coalesce(batch::text, 'null')) end,
    case when force is null then 'force is null' end);
  perform doorbell._refuse_isolation();
  if lock_timeout_ms is distinct from 5000 then
    perform set_config('lock_timeout', lock_timeout_ms::text, true);
  end if;
  removed := 0;
  more := false;
  -- What sessions that died while they posted have left behind.
  perform doorbell._drop_expired();
  if v_wanted is not null and not exists (select from doorbell.channel as c where c.name = v_wanted) then
    perform doorbell._refuse_channel(v_wanted);
  end if;

  for v_channel in
    select c.id, c.name from doorbell.channel as c where v_wanted is null or c.name = v_wanted order by c.name
  loop
    v_plan := doorbell._prunable(v_channel.id, keep, keep_keys, case when v_id is null then batch else 1 end, force);
    if v_id is not null then
      more := more or v_plan.last >= v_plan.first;
      exit when more;
    elsif v_plan.last >= v_plan.first then
      perform from doorbell.channel as c where c.id = v_channel.id for no key update;
      -- Under the lock, in a new snapshot: a reader that has just joined at the start keeps what it joined for.
      v_plan := doorbell._prunable(v_channel.id, keep, keep_keys, batch, force);
      held_by := v_plan.held_by;
      held_at := v_plan.held_at;
      held_because := v_plan.held_because;
      channel := v_channel.name;
      if v_plan.last >= v_plan.first then
        v_id := v_channel.id;
        more := v_plan.more;
        up_to := v_plan.last;
        delete from doorbell.message as m where m.channel_id = v_id and m.seq between v_plan.first and v_plan.last;
        get diagnostics removed = row_count;
        insert into doorbell.pruned as p (channel_id, up_to) values (v_id, v_plan.last)
          on conflict (channel_id) do update set up_to = excluded.up_to, pruned_at = clock_timestamp();
        if force then
          select array_agg(cu.handle order by cu.handle) into lost_by
            from doorbell.cursor as cu
            where cu.channel_id = v_id and cu.acked_seq < v_plan.last;
        end if;
        exit when more;
      end if;
    elsif held_because is null and v_plan.held_because is not null then
      channel := v_channel.name;
      held_by := v_plan.held_by;
      held_at := v_plan.held_at;
      held_because := v_plan.held_because;
    end if;
  end loop;
end
$$;

-- Removes one batch of turns that have ended and whose event is not recognised any more after this: with their steps and
-- reservations. Call it again while more is true.
--
-- Promise: only turns that ended longer than keep_keys ago, that nobody works on, and none of whose deliveries a cursor still
--   waits for. A replay of their event that comes later is a new turn.
-- Locks: the turn rows; those that somebody holds are left. Errors: RB001.
create function doorbell.prune_turns(
  keep_keys interval default '7 days', batch integer default 1000, out removed bigint, out more boolean
)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '5s'
as $$
declare
  v_old constant timestamptz := clock_timestamp() - keep_keys;
  v_channels bigint[];
  v_ids bigint[];
begin
  perform doorbell._refuse(
    doorbell._interval_fault('keep_keys', keep_keys),
    case when (batch between 1 and 100000) is not true then format('batch is %s; it is 1 to 100,000', coalesce(batch::text, 'null')) end);
  -- What a cursor has passed by a plain ack, and what lost its turn: nobody comes back for these. Whoever is at one of them
  -- just now is not waited for.
  with passed as (
    select d.channel_id, d.handle, d.seq, d.turn_channel_id, d.turn_id
    from doorbell.delivery as d
    where exists (
        select from doorbell.cursor as cu
        where cu.channel_id = d.channel_id and cu.handle = d.handle and cu.acked_seq >= d.seq)
      and (d.settled or exists (
        select from doorbell.turn as t
        where t.channel_id = d.turn_channel_id and t.id = d.turn_id and t.state <> 'unfinished'))
      or not exists (select from doorbell.turn as t where t.channel_id = d.turn_channel_id and t.id = d.turn_id)
    for update of d skip locked
  )
  delete from doorbell.delivery as d
    using passed as p
    where (d.channel_id, d.handle, d.seq, d.turn_channel_id, d.turn_id)
        = (p.channel_id, p.handle, p.seq, p.turn_channel_id, p.turn_id);
  with ended as (
    select t.channel_id, t.id
    from doorbell.turn as t
    where t.admitted_at < v_old and t.ended_at < v_old
      and t.state <> 'unfinished' and (t.holder is null or not doorbell._alive(t.holder))
      and not exists (select from doorbell.delivery as d where d.turn_channel_id = t.channel_id and d.turn_id = t.id)
    order by t.admitted_at
    limit batch
    for update skip locked
  ), gone as (
    delete from doorbell.turn as t using ended as e where t.channel_id = e.channel_id and t.id = e.id returning t.channel_id, t.id
  )
  select array_agg(g.channel_id), array_agg(g.id) into v_channels, v_ids from gone as g;
  delete from doorbell.turn_step as s
    using unnest(v_channels, v_ids) as g (channel_id, id) where s.channel_id = g.channel_id and s.turn_id = g.id;
  delete from doorbell.reservation as r
    using unnest(v_channels, v_ids) as g (channel_id, id) where r.channel_id = g.channel_id and r.turn_id = g.id;
  removed := coalesce(cardinality(v_ids), 0);
  more := removed >= batch;
end
$$;

-- Prunes every channel and then the turns, batch by batch, and commits after each: for pg_cron and the like.
-- removed counts messages.
--
-- Postgres forbids COMMIT in a procedure that runs as its owner or has settings of its own, so this is a bare shell that
-- touches no table: each step is one call of prune, with its lock timeout, and every name and type here is qualified.
-- A channel that is held for too long is left for the next run, with a warning. Not inside BEGIN.
create procedure doorbell.prune_all(
  keep interval,
  keep_keys interval default '7 days',
  batch integer default 1000,
  force boolean default false,
  inout removed bigint default 0
)
language plpgsql
as $$
declare
  v_channels constant pg_catalog.text[] := array(select doorbell.channel_names());
  v_channel pg_catalog.text;
  v_more pg_catalog.bool;
  v_removed pg_catalog.int8;
begin
  foreach v_channel in array v_channels loop
    loop
      begin
        select p.removed, p.more into v_removed, v_more
          from doorbell.prune(keep, v_channel, keep_keys, batch, force) as p;
      exception when lock_not_available then
        raise warning 'channel % was held by another transaction; it is left for the next run', pg_catalog.quote_literal(v_channel);
        v_removed := 0;
        v_more := false;
      end;
      commit;
      removed := removed operator(pg_catalog.+) v_removed;
      exit when not v_more;
    end loop;
  end loop;
  loop
    select t.more into v_more from doorbell.prune_turns(keep_keys, batch) as t;
    commit;
    exit when not v_more;
  end loop;
end
$$;

-- Gives up what retention has removed before the handle had acked it, and returns how many messages that were; 0 when none.
--
-- Promise: the cursor then stands before the first kept message, and moves no further.
-- Locks: the cursor row. Errors: RB001, RB002, RB003.
create function doorbell.skip_pruned(handle text, channel text) returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp set lock_timeout = '5s' set enable_seqscan = off set enable_bitmapscan = off
as $$
declare
  v_id bigint;
  v_acked bigint;
  v_gone bigint;
begin
  perform doorbell._refuse(doorbell._name_fault('handle', handle), doorbell._name_fault('channel', channel));
  select c.id into v_id from doorbell.channel as c where c.name = skip_pruned.channel;
  if not found then
    perform doorbell._refuse_channel(channel);
  end if;
  select cu.acked_seq into v_acked
    from doorbell.cursor as cu
    where cu.channel_id = v_id and cu.handle = skip_pruned.handle
    for no key update;
  if not found then
    perform doorbell._refuse_handle(handle, channel);
  end if;
  select p.up_to into v_gone from doorbell.pruned as p where p.channel_id = v_id;
  if v_gone is null or v_gone <= v_acked then
    return 0;
  end if;
  update doorbell.cursor as cu
    set acked_seq = greatest(cu.acked_seq, v_gone), acked_at = clock_timestamp()
    where cu.channel_id = v_id and cu.handle = skip_pruned.handle;
  delete from doorbell.delivery as d
    where d.channel_id = v_id and d.handle = skip_pruned.handle and d.seq <= v_gone and d.settled;
  return v_gone - v_acked;
end
$$;

-- Renews the identity of this log and returns it: the operator's step after a restore, so that live clients look again.
create function doorbell.new_epoch() returns uuid
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  update doorbell.meta set epoch = gen_random_uuid() returning epoch
$$;


-- ---------------------------------------------------------------------------------------------------------------------
-- Who may do what
-- ---------------------------------------------------------------------------------------------------------------------

-- The one list: every public function, and whether agents and operators may call it. Neither: the owner of the schema only.
-- Operators read no message. Views are for operators; tables and private functions for nobody.
create function doorbell._rights() returns table (function text, agent boolean, operator boolean)
language sql immutable set search_path = pg_catalog, pg_temp
as $$
  values
    ('abandon_admission', true, false),
    ('ack', true, false),
    ('acked_seq', true, false),
    ('admit', true, false),
    ('announce', true, false),
    ('arm', true, false),
    ('backlog_of', true, true),
    ('bell_floors', true, false),
    ('channel_names', true, true),
    ('collect', true, false),
    ('fail_turn', true, false),
    ('finish_turn', true, false),
    ('glance', true, false),
    ('grant_role', false, false),
    ('head', true, true),
    ('head_moved', true, false),
    ('heads_moved', true, false),
    ('hello', true, true),
    ('hold_session', true, false),
    ('messages_after', true, false),
    ('new_epoch', false, false),
    ('number_or_give_up', true, false),
    ('peek', true, false),
    ('post', true, false),
    ('post_combined', true, false),
    ('post_many', true, false),
    ('prune', false, false),
    ('prune_all', false, false),
    ('prune_plan', false, true),
    ('prune_turns', false, false),
    ('record_step', true, false),
    ('release_turn', true, false),
    ('reserve', true, false),
    ('revoke_role', false, false),
    ('settle_delivery', true, false),
    ('skip_pruned', true, false),
    ('stage', true, false),
    ('step_pending', true, false),
    ('subscribe', true, false),
    ('subscriptions', true, true),
    ('try_post', true, false),
    ('turn_post', true, false),
    ('unacked', true, false),
    ('unacked_count', true, true),
    ('unfinished_turns', true, false),
    ('unsubscribe', true, false)
$$;

-- Lets a role in as an agent, or as an operator; a role may be both. Recorded, so that an upgrade keeps it.
-- Errors: RB001 there is no such role.
create function doorbell.grant_role(role_name text, operator boolean default false) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if not exists (select from pg_roles as r where r.rolname = grant_role.role_name) then
    raise exception using
      errcode = 'RB001',
      message = format('there is no role %s.', coalesce(quote_literal(grant_role.role_name), 'null')),
      detail = 'A role is let in by its exact name, as pg_roles shows it.',
      hint = format('Create it first: create role %I login; nothing was changed.', coalesce(grant_role.role_name, 'name'));
  end if;
  perform doorbell._refuse(case when grant_role.operator is null then 'operator is null' end);
  insert into doorbell.role_grant as g (role_name, agent, operator)
    values (grant_role.role_name, not grant_role.operator, grant_role.operator)
    on conflict on constraint role_grant_pkey do update
    set agent = g.agent or excluded.agent, operator = g.operator or excluded.operator, granted_at = now();
  perform doorbell._apply_grants();
end
$$;

-- Takes back everything that grant_role gave; false when the role was never let in.
create function doorbell.revoke_role(role_name text) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  delete from doorbell.role_grant as g where g.role_name = revoke_role.role_name;
  if not found then
    return false;
  end if;
  if exists (select from pg_roles as r where r.rolname = revoke_role.role_name) then
    execute format('revoke all on schema doorbell from %I', revoke_role.role_name);
    execute format('revoke all on all routines in schema doorbell from %I', revoke_role.role_name);
    execute format('revoke all on all tables in schema doorbell from %I', revoke_role.role_name);
  end if;
  return true;
end
$$;

-- Applies the recorded grants: the functions of doorbell._rights() and, for operators, the views.
create function doorbell._apply_grants() returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp
as $$
declare
  v_role record;
  v_thing record;
begin
  for v_role in
    select g.role_name, g.agent, g.operator from doorbell.role_grant as g join pg_roles as r on r.rolname = g.role_name
  loop
    execute format('grant usage on schema doorbell to %I', v_role.role_name);
    for v_thing in
      select p.oid::regprocedure as signature
      from pg_proc as p
      join doorbell._rights() as r on r.function = p.proname
      where p.pronamespace = 'doorbell'::regnamespace and (r.agent and v_role.agent or r.operator and v_role.operator)
    loop
      execute format('grant execute on routine %s to %I', v_thing.signature, v_role.role_name);
    end loop;
    if v_role.operator then
      for v_thing in
        select c.oid::regclass as name from pg_class as c where c.relnamespace = 'doorbell'::regnamespace and c.relkind = 'v'
      loop
        execute format('grant select on %s to %I', v_thing.name, v_role.role_name);
      end loop;
    end if;
  end loop;
end
$$;
