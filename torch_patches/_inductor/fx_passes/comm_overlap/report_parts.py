"""Parts of a report: collectives by group, one collective's run, one bucket."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GroupReport:
    """Collectives of one kind on one process group."""

    kind: str
    group: str
    count: int
    size_bytes: int
    bytes_by_dtype: dict[str, int]


@dataclass(frozen=True)
class SpanReport:
    """One collective of the result, as the timeline expects it to run.

    Args:
        start: name of its start.
        start_ms, end_ms: on its group's stream.
        exposed_ms: how long compute stands still for it.
        hidden_ms: how long compute runs meanwhile.
        hidden_by: names of that compute, the longest first, eight at most.
    """

    start: str
    kind: str
    group: str
    start_ms: float
    end_ms: float
    exposed_ms: float
    hidden_ms: float
    hidden_by: tuple[str, ...]


@dataclass(frozen=True)
class BucketReport:
    """One bucket: what it is, what is in it, how far its members stood apart, why it closed; and the
    name of the module bucket, where modules decide."""

    kind: str
    group: str
    dtype: str
    reduce_op: str | None
    form: str
    members: tuple[str, ...]
    size_bytes: int
    span: int
    close_reason: str
    label: str = ""
