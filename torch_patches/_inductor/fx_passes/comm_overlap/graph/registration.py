"""The order in which FSDP2 lays out parameters, from their names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field


@dataclass
class _Module:
    own: list[str] = field(default_factory=list)
    children: dict[str, _Module] = field(default_factory=dict)

    def bottom_up(self) -> Iterator[str]:
        for child in self.children.values():
            yield from child.bottom_up()
        yield from self.own


def bottom_up(names: Iterable[str]) -> dict[str, int]:
    """Places of parameters where those of a module's children come before its own.

    Args:
        names: in the order of ``named_parameters()``, which has a module's own first.
    """
    root = _Module()
    for name in dict.fromkeys(names):
        module = root
        for step in name.split(".")[:-1]:
            module = module.children.setdefault(step, _Module())
        module.own.append(name)
    return {name: place for place, name in enumerate(root.bottom_up())}
