"""The names under torch's signatures."""

from __future__ import annotations

import inspect

import pytest

from torch_patches import _compat, compat_api
from torch_patches.testing.beside_torch import HOMES, of_torch

#: Methods that torch's callers use.
METHODS = {
    "AugmentedGraphHelper": (
        "add_extra_dep",
        "remove_extra_dep",
        "merge_to_set",
        "unmerge_node",
        "get_merged_deps",
        "has_cycle",
        "has_path",
        "transfer_erased_node_deps",
        "remove_erased_extra_deps",
        "check_and_maybe_autofix_cyclic_extra_deps",
        "get_all_extra_deps",
    ),
    "OverlapPreservingBucketer": ("bucket_collectives",),
    "OverlapScheduler": ("run",),
    "ManualOverlapScheduler": ("run",),
}
NAMES = [
    *HOMES,
    *(f"{owner}.{method}" for owner, methods in METHODS.items() for method in methods),
]


def find(name, source):
    owner, _, method = name.partition(".")
    found = source(owner)
    return getattr(found, method, None) if method and found is not None else found


def parameters(function):
    """Names, kinds and defaults."""
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def test_the_public_names():
    """Those that the architecture lists: torch's nine and autoparallel's three."""
    ours = {"bucket_collectives", "fuse_chained_allgathers", "tag_collectives_for_bucketing"}
    assert set(compat_api.__all__) == set(HOMES) | ours
    assert all(hasattr(compat_api, name) for name in compat_api.__all__)


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_torchs(name):
    """Of torch 2.13 and newer; an older torch has some of them."""
    theirs = find(name, of_torch)
    ours = parameters(find(name, lambda owner: getattr(compat_api, owner)))
    if _compat.has_drop_in_signatures():
        assert theirs is not None, "this torch has dropped the name"
        assert ours == parameters(theirs)
        return
    if theirs is not None:
        known = [p for p in parameters(theirs) if p[0] not in _compat.DROPPED_ARGUMENTS]
        assert {p[0] for p in known} <= {p[0] for p in ours}


@pytest.mark.parametrize("name", sorted(HOMES))
def test_what_is_returned_is_annotated_alike(name):
    theirs, ours = of_torch(name), getattr(compat_api, name)
    if theirs is None or inspect.isclass(ours):
        assert inspect.isclass(ours) or not _compat.has_drop_in_signatures()
        return
    told = str(inspect.signature(theirs).return_annotation)
    expected = str(inspect.signature(ours, eval_str=True).return_annotation)
    for text in ("torch.fx.graph_module.", "torch.fx.node.", "torch.utils._ordered_set.", "torch."):
        told, expected = told.replace(text, ""), expected.replace(text, "")
    told = told.replace("fx.", "").removeprefix("<class '").removesuffix("'>")
    assert told == expected.replace("fx.", "").removeprefix("<class '").removesuffix("'>")
