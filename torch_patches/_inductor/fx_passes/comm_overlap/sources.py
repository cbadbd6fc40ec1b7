"""Hash of the package's sources, for compile caches."""

from __future__ import annotations

import functools
import hashlib
import uuid
from pathlib import Path


@functools.cache
def source_digest() -> str:
    """Hash of every source file of the package; part of Inductor's cache key."""
    return digest_of(Path(__file__).parents[3])


def digest_of(root: Path) -> str:
    """Hash of the names and contents of all Python files under ``root``."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def unshared_digest() -> str:
    """A part of a key that no other compile has: nothing is found under it."""
    return f"unshared {uuid.uuid4().hex}"
