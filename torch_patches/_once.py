"""Warnings that a process gives once for a topic."""

from __future__ import annotations

import logging

_warned: set[str] = set()


def warn_once(logger: logging.Logger, topic: str, message: str, *arguments: object) -> None:
    """``message % arguments``, unless the topic was warned of before."""
    if topic not in _warned:
        _warned.add(topic)
        logger.warning(message, *arguments)
