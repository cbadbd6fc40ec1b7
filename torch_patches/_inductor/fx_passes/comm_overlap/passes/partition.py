"""Cuts a row of collectives into buckets so that least is exposed: a dynamic program.

    gathers, in order of use                         a b | c d e | f
    late[j] = min over i of max(late[i], end of i..j on the link - compute in front of the first use)

A bucket occupies its link for latency + bytes / bandwidth, after the one before it; compute waits for
the end of it at the first use of a member, and everything behind is as much later.  Reductions are
the mirror image: a bucket is ready with its last member, and what counts is when the last one ends.

An early end of the link's work may be worth some exposed time later on, so of each beginning of the
row the states that no other one beats are kept, a few at most.  Near-linear: each place is joined to
those behind it that a bucket may reach, and the steps are counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

#: States that are kept of each beginning of a row.
MAX_STATES = 5


class State(NamedTuple):
    """What the rest of a row depends on; less is better in each.

    Args:
        late_ms: how long compute has stood still so far (gathers), or when the last bucket so far is
            done (reductions).
        free_ms: when the link is done with the buckets so far.
        cost_ms: of the buckets so far, wherever they stand.
    """

    late_ms: float = 0.0
    free_ms: float = 0.0
    cost_ms: float = 0.0


class Load(NamedTuple):
    """A bucket, as the lanes see it.

    Args:
        ms: on its link.
        ready_ms: compute in front of the place where it can start.
        due_ms: compute in front of its first use.
        before_ms, after_ms: of other traffic on the link, that comes between it and the bucket in
            front of it, or behind it.
        lead_ms, tail_ms: of a collective in front of it or behind it on another link, which serves
            the same members.
        copy_in_ms, copy_out_ms: kernels of a copying bucket.
        cost_ms: what it costs although nothing waits for it: compute that is slower under it, other
            collectives that it keeps from the link.
    """

    ms: float
    ready_ms: float = 0.0
    due_ms: float = 0.0
    before_ms: float = 0.0
    after_ms: float = 0.0
    lead_ms: float = 0.0
    tail_ms: float = 0.0
    copy_in_ms: float = 0.0
    copy_out_ms: float = 0.0
    cost_ms: float = 0.0


@dataclass(frozen=True)
class Partition:
    """The best one.

    Args:
        ends: of each bucket, the place behind its last member.
        state: in the end.
        steps: counted work.
    """

    ends: tuple[int, ...]
    state: State
    steps: int


Step = Callable[[State, Load], State]


def after_gathers(state: State, load: Load) -> State:
    """The state behind one more bucket of gathers."""
    late, free, cost = state
    ms, ready, due, before, after, _, _, copy_in, copy_out, own_cost = load
    end = max(free + before, ready + late) + ms
    return State(max(late + copy_in, end - due) + copy_out, end + after, cost + own_cost)


def after_reductions(state: State, load: Load) -> State:
    """The state behind one more bucket of reductions."""
    late, free, cost = state
    ms, ready, _, before, after, lead, tail, copy_in, copy_out, own_cost = load
    end = max(free + before, ready + copy_in + lead) + ms
    done = max(late, end + tail + copy_out)
    return State(done, end + after, cost + own_cost + (copy_in + copy_out))


class _Beginning(NamedTuple):
    """A way to cut the front of a row.

    Args:
        state: behind it.
        buckets: number of them.
        before: without the last bucket.
        end: place behind its last member.
    """

    state: State
    buckets: int
    before: _Beginning | None
    end: int


def cut(
    count: int,
    load_of: Callable[[int, int], Load | None],
    step: Step,
    max_steps: int | None = None,
    max_states: int = MAX_STATES,
) -> Partition | None:
    """The partition of a row into contiguous buckets with least ``late_ms + cost_ms``;
    of equals the one with fewer buckets.

    Args:
        count: members of the row.
        load_of: (first, end) -> what a bucket of ``first`` to ``end`` - 1 is; None where that is too
            much, and any longer one as well.  A member by itself must be one.
        step: :func:`after_gathers` or :func:`after_reductions`.
        max_steps: None for no bound.

    Returns:
        None beyond the bound.
    """
    reached: list[list[_Beginning]] = [[] for _ in range(count + 1)]
    reached[0] = [_Beginning(State(), 0, None, 0)]
    steps = 0
    for first in range(count):
        kept = _unbeaten(reached[first], max_states)
        for end in range(first + 1, count + 1):
            load = load_of(first, end)
            if load is None:
                break
            steps += len(kept)
            if max_steps is not None and steps > max_steps:
                return None
            reached[end] += [
                _Beginning(step(before.state, load), before.buckets + 1, before, end)
                for before in kept
            ]
    best = min(reached[count], key=lambda b: (_worth(b.state), b.buckets))
    ends: list[int] = []
    found: _Beginning | None = best
    while found is not None and found.before is not None:
        ends.append(found.end)
        found = found.before
    return Partition(tuple(reversed(ends)), best.state, steps)


def _worth(state: State) -> float:
    return state.late_ms + state.cost_ms


def _unbeaten(beginnings: list[_Beginning], max_states: int) -> list[_Beginning]:
    """Those than which none is as good in all; of many the best so far and some between the one whose
    link is free first and the least late, as any may turn out best."""
    if len(beginnings) < 2:
        return beginnings
    beginnings.sort(key=itemgetter(0, 1))  # by state, then buckets
    kept: list[_Beginning] = []
    for beginning in beginnings:
        _, free, cost = beginning.state
        for better in kept:  # those in front are no later
            if better.state.free_ms <= free and better.state.cost_ms <= cost:
                break
        else:
            kept.append(beginning)
    if len(kept) <= max_states:
        return kept
    kept.sort(key=lambda b: (b.state.free_ms, b.state.late_ms))
    last = len(kept) - 1
    best = min(range(len(kept)), key=lambda place: _worth(kept[place].state))
    spread = {last * number // (max_states - 2) for number in range(max_states - 1)}
    return [kept[place] for place in sorted({*spread, best})]
