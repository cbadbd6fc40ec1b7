"""Plans by name: what matches, which bucket a name belongs to, and what a check finds.

The texts of errors are in test_module_plan_errors.py.
"""

from __future__ import annotations

import copy
import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_patches._inductor.fx_passes.comm_overlap.passes.module_pattern import (
    PatternIndex,
)
from torch_patches._inductor.fx_passes.comm_overlap.passes.module_plan import (
    ModulePlan,
    ModulePlanError,
    check_overlap_names,
    parse_plan,
)
from torch_patches._inductor.fx_passes.comm_overlap.passes.near_names import (
    KnownNames,
    near_names,
)

LLAMA = [["tok_embeddings"], "layers.*", ["norm", "output"]]
LLAMA_PARAMETERS = [
    "tok_embeddings.weight",
    *(
        f"layers.{layer}.{part}.weight"
        for layer in range(12)
        for part in ("attention.wq", "attention.wo", "feed_forward.w1", "ffn_norm")
    ),
    "norm.weight",
    "output.weight",
]
LLAMA_MODULES = [name.removesuffix(".weight") for name in LLAMA_PARAMETERS]


# -- which bucket ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "bucket"),
    [
        ("tok_embeddings", "tok_embeddings"),
        ("tok_embeddings.weight", "tok_embeddings"),
        ("layers.3", "layers.3"),
        ("layers.11.attention.wq.weight", "layers.11"),
        ("norm.weight", "norm+output"),
        ("output", "norm+output"),
        ("layers", None),  # holds what the pattern matches, is not matched
        ("norm2.weight", None),  # components are whole
        ("decoder.layers.3", None),  # patterns begin at the model
        ("", None),
    ],
)
def test_bucket_of_a_name_in_a_llama_plan(path: str, bucket: str | None) -> None:
    assert parse_plan(LLAMA).bucket_of(path) == bucket


@pytest.mark.parametrize(
    ("pattern", "matched", "not_matched"),
    [
        ("layers.[2-4]", ["2", "3", "4"], ["1", "5", "22", "2x", "x2", "-2"]),
        ("layers.[0,2,5-7]", ["0", "2", "5", "7"], ["1", "3", "4", "8"]),
        ("layers.[3]", ["3", "03"], ["30", "33", "", "³"]),
        ("layers.1", ["1"], ["10", "01", "11"]),
        ("layers.block_[0-3]", ["block_0", "block_3"], ["block_4", "block_", "block", "0"]),
        ("layers.[0-3]_block", ["0_block"], ["0", "_block"]),
        ("layers.h*", ["h", "h1", "head"], ["1h", "H"]),
        ("layers.ab*ba", ["abba", "abxba"], ["aba", "ab"]),  # the ends may not overlap
        ("layers.[1000-999999999]", ["1000", "999999999"], ["999", "1000000000", "9" * 5000]),
    ],
)
def test_components(pattern: str, matched: list[str], not_matched: list[str]) -> None:
    plan = parse_plan([pattern])
    for component in matched:
        assert plan.bucket_of(f"layers.{component}.weight") == f"layers.{component}"
    for component in not_matched:
        assert plan.bucket_of(f"layers.{component}.weight") is None


def test_sub_blocks_get_buckets_of_their_own() -> None:
    plan = parse_plan(["layers.*.attention", "layers.*.feed_forward"])
    assert plan.bucket_of("layers.3.attention.wq.weight") == "layers.3.attention"
    assert plan.bucket_of("layers.3.feed_forward") == "layers.3.feed_forward"
    assert plan.bucket_of("layers.3.ffn_norm.weight") is None


def test_list_with_wildcards_is_one_bucket() -> None:
    plan = parse_plan([["layers.[0-1]", "layers.[2-3].attention"], "layers.4"])
    name = "layers.[0-1]+layers.[2-3].attention"
    assert {plan.bucket_of(f"layers.{i}.attention.wq") for i in range(4)} == {name}
    assert plan.bucket_of("layers.2.ffn_norm") is None
    assert plan.bucket_of("layers.4.ffn_norm") == "layers.4"


def test_the_first_entry_counts_where_nobody_checked() -> None:
    assert parse_plan(["layers.*", "layers.*.attention"]).bucket_of("layers.0.attention") == (
        "layers.0"
    )
    assert parse_plan(["layers.*.attention", "layers.*"]).bucket_of("layers.0.attention") == (
        "layers.0.attention"
    )


# -- the plan as a value --------------------------------------------------------------------------


def test_lists_and_tuples_are_one_plan() -> None:
    from_lists, from_tuples = parse_plan(LLAMA), parse_plan((("tok_embeddings",), *LLAMA[1:]))
    assert from_lists.entries == (("tok_embeddings",), "layers.*", ("norm", "output"))
    assert from_lists == from_tuples and hash(from_lists) == hash(from_tuples)
    assert parse_plan(from_lists.entries) == from_lists
    assert repr(from_lists) == (
        "ModulePlan(entries=(('tok_embeddings',), 'layers.*', ('norm', 'output')))"
    )


def test_one_bucket_each_and_one_bucket_together_differ() -> None:
    assert parse_plan(["layers.*"]) != parse_plan([["layers.*"]])


def test_subclass_of_str_has_the_repr_of_a_str() -> None:
    """Else the compile cache key would differ although the plan is equal."""

    class Name(str):
        def __repr__(self) -> str:
            return "Name(...)"

    assert repr(parse_plan([Name("norm")])) == repr(parse_plan(["norm"]))


@pytest.mark.parametrize("again", [copy.deepcopy, lambda plan: pickle.loads(pickle.dumps(plan))])
def test_copies_still_match(again) -> None:
    plan = again(parse_plan(LLAMA))
    assert plan == parse_plan(LLAMA)
    assert plan.bucket_of("layers.7.attention") == "layers.7"


def test_plan_does_not_change_with_the_list_it_was_read_from() -> None:
    written = [["norm"]]
    plan = parse_plan(written)
    written[0].append("output")
    assert plan.entries == (("norm",),)


# -- checks against a graph -----------------------------------------------------------------------


def test_plan_that_fits_gives_no_sentence() -> None:
    plan = parse_plan(LLAMA)
    assert plan.check(LLAMA_PARAMETERS, LLAMA_MODULES, "error") == []
    assert plan.check(LLAMA_PARAMETERS, [], "error") == []
    assert plan.check([], LLAMA_MODULES, "error") == []  # a backward graph


def test_items_of_one_entry_may_overlap() -> None:
    plan = parse_plan([["layers.*", "layers.*.attention"]])
    assert plan.check(LLAMA_PARAMETERS, LLAMA_MODULES, "error") == []


def test_entries_that_could_overlap_but_do_not_here_are_no_error() -> None:
    plan = parse_plan(["layers.[0-5]", "layers.1*"])
    with pytest.raises(ModulePlanError, match=r"'layers\.1\.attention\.wo\.weight'"):
        plan.check(LLAMA_PARAMETERS, [], "error")
    without_layer_1 = [name for name in LLAMA_PARAMETERS if not name.startswith("layers.1.")]
    assert plan.check(without_layer_1, [], "error") == []


def test_of_several_overlaps_the_first_in_the_plan_is_named() -> None:
    plan = parse_plan(["layers.1", "layers.0", "layers.[0-1].attention", "layers.1.attention"])
    with pytest.raises(ModulePlanError, match=r"'layers\.1' .* and 'layers\.\[0-1\]\.attention'"):
        plan.check(LLAMA_PARAMETERS, [], "error")


def test_overlap_is_an_error_also_under_warn() -> None:
    with pytest.raises(ModulePlanError, match="both match"):
        parse_plan(["layers.*", "layers.0"]).check(LLAMA_PARAMETERS, [], "warn")


def test_warn_returns_a_sentence_for_each_item_that_matches_nothing() -> None:
    plan = parse_plan([["norm", "outputs"], "layer.*", "layers.*"])
    assert plan.check(LLAMA_PARAMETERS, LLAMA_MODULES, "warn") == [
        "'outputs' (in entry 0 of the module plan) matches no parameter and no module of this "
        "graph. Nearest: 'output'.",
        "'layer.*' (entry 1 of the module plan) matches no parameter and no module of this graph. "
        "Nearest: 'layers.*'.",
    ]


def test_order_of_the_names_does_not_change_the_error() -> None:
    plan = parse_plan(["layers.*.attention", "layers.*", "nrom"])
    texts = set()
    for names in (LLAMA_PARAMETERS, LLAMA_PARAMETERS[::-1], frozenset(LLAMA_PARAMETERS)):
        with pytest.raises(ModulePlanError) as caught:
            plan.check(names, names, "error")
        texts.add(str(caught.value))
    assert len(texts) == 1


def test_overlap_names_that_are_known() -> None:
    buckets = ["layers.3", "norm+output"]
    overlap = {"layers.3": "layers.1.attention", "norm+output": "layers.0"}
    assert check_overlap_names(overlap, buckets, ["layers.0.ffn", "layers.1.attention"]) == []


def test_overlap_names_under_warn() -> None:
    sentences = check_overlap_names({"a": "layers.0"}, ["b"], ["layers.0"], "warn")
    assert len(sentences) == 1 and "no bucket of this graph is named 'a'" in sentences[0]


# -- nearest names --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "near"),
    [
        ("layer.*", ["layers.*"]),
        ("layer.[0-5]", ["layers.[0-5]"]),
        ("layer.[50-60]", ["layers.*"]),  # numbers that match nothing are not repeated
        ("layer.3", ["layers.3"]),
        ("layers.99", ["layers.*"]),
        ("Layers.*", ["layers.*"]),
        ("layers.*.attn", ["layers.*.attention", "layers.*.ffn_norm"]),
        ("layers.*.feedforward.w1", ["layers.*.feed_forward.w1"]),
        ("model.layers.[0-5]", ["layers.[0-5]"]),
        ("_orig_mod.layers.*", ["layers.*"]),
        ("tok_embedding", ["tok_embeddings"]),
        ("attention.wq", ["layers.*.attention.wq"]),
        ("tok.embeddings", ["tok_embeddings"]),  # alike with another number of components
        ("zzz", []),
    ],
)
def test_nearest_names_of_a_llama(asked: str, near: list[str]) -> None:
    assert KnownNames(LLAMA_MODULES).near(asked) == near


def test_nearest_name_of_a_model_inside_another() -> None:
    known = KnownNames([f"towers.{i}.layers.{j}.w" for i in range(2) for j in range(3)])
    assert known.near("layers.[0-2]") == ["towers.*.layers.[0-2]"]
    assert known.near("layers.*") == ["towers.*.layers.*"]


def test_of_many_models_inside_the_three_least_deep_are_near() -> None:
    known = KnownNames(["a.b.c.norm", "a.b.norm", "z.norm", "y.norm"])
    assert known.near("norm") == ["y.norm", "z.norm", "a.b.norm"]


def test_nearest_name_is_one_that_can_be_written() -> None:
    """Two numbers in a component have no pattern: a name that exists is given."""
    # In the order of a set another one would be likely.
    assert KnownNames({f"conv{n}x{n}.weight" for n in range(10)}).near("convx") == ["conv0x0"]


def test_nearest_exact_names_are_no_patterns() -> None:
    assert near_names("layer.3", ["layers.1", "layers.3", "norm"]) == ["layers.3", "layers.1"]
    assert near_names("model.layers.3", ["layers.33", "layers.3"]) == ["layers.3"]
    assert near_names("layers.3", ["model.layers.3", "layers.2"]) == ["model.layers.3"]


# -- against a slow matcher -----------------------------------------------------------------------

WORDS = st.sampled_from(["a", "b", "ab", "ba", "0", "1", "2", "10", "01", "a0", "a1", "a10", "a1b"])
NAMES = st.lists(WORDS, min_size=1, max_size=4).map(".".join)
NUMBERS = st.one_of(
    st.integers(0, 12).map(str),
    st.tuples(st.integers(0, 12), st.integers(0, 12)).map(lambda ab: f"{min(ab)}-{max(ab)}"),
)
WILD = st.one_of(
    st.just("*"), st.lists(NUMBERS, min_size=1, max_size=3).map(lambda n: f"[{','.join(n)}]")
)
COMPONENTS = st.one_of(
    WORDS,
    st.tuples(st.sampled_from(["", "a", "ab"]), WILD, st.sampled_from(["", "b"])).map("".join),
)
PATTERNS = st.lists(COMPONENTS, min_size=1, max_size=3).map(".".join)
PLANS = st.lists(
    st.one_of(PATTERNS, st.lists(PATTERNS, min_size=1, max_size=3)), min_size=1, max_size=5
).filter(lambda plan: len(texts := flat(plan)) == len(set(texts)))


def flat(plan: list[str | list[str]]) -> list[str]:
    return [text for entry in plan for text in ([entry] if isinstance(entry, str) else entry)]


def slow_regex(component: str) -> str:
    """One regular expression that spells out every integer."""
    found = re.search(r"\[(.*)\]", component)
    if found is None:
        return ".*".join(map(re.escape, component.split("*")))
    integers = set()
    for part in found[1].split(","):
        low, _, high = part.partition("-")
        integers |= set(range(int(low), int(high or low) + 1))
    spelled = "|".join(map(str, integers))
    before, after = component[: found.start()], component[found.end() :]
    return f"{re.escape(before)}0*(?:{spelled}){re.escape(after)}"


def slow_prefix(pattern: str, name: str) -> str | None:
    """The beginning of a name that a pattern matches."""
    parts, components = pattern.split("."), name.split(".")
    if len(components) < len(parts):
        return None
    for part, component in zip(parts, components, strict=False):
        if not re.fullmatch(slow_regex(part), component):
            return None
    return ".".join(components[: len(parts)])


def slow_buckets(plan: list[str | list[str]], name: str) -> list[str]:
    """The bucket of each entry that matches."""
    found = []
    for entry in plan:
        if isinstance(entry, str):
            if (prefix := slow_prefix(entry, name)) is not None:
                found.append(prefix)
        elif any(slow_prefix(item, name) is not None for item in entry):
            found.append("+".join(entry))
    return found


@given(PLANS, st.lists(NAMES, min_size=1, max_size=8))
def test_bucket_of_agrees_with_a_slow_matcher(plan, names) -> None:
    parsed = parse_plan(plan)
    for name in names:
        slow = slow_buckets(plan, name)
        assert parsed.bucket_of(name) == (slow[0] if slow else None), f"{plan!r}, {name!r}"


@given(PLANS, st.lists(NAMES, min_size=1, max_size=8))
def test_check_agrees_with_a_slow_matcher(plan, names) -> None:
    """It raises where two entries match one name; else it lists what matches nothing."""
    parsed = parse_plan(plan)
    where = f"{plan!r}, {names!r}"
    if any(len(slow_buckets(plan, name)) > 1 for name in names):
        with pytest.raises(ModulePlanError, match="both match"):
            parsed.check(names, [], "warn")
        return
    sentences = parsed.check(names, [], "warn")
    unmatched = [t for t in flat(plan) if all(slow_prefix(t, n) is None for n in names)]
    assert [s.partition(" (")[0] for s in sentences] == [repr(t) for t in unmatched], where


@given(PATTERNS, st.lists(NAMES, min_size=1, max_size=8))
def test_what_is_called_near_matches_something(asked, names) -> None:
    for answer in KnownNames(names).near(asked):
        assert any(slow_prefix(answer, name) is not None for name in names), f"{asked}, {names}"


# -- work -----------------------------------------------------------------------------------------


def test_look_up_does_not_grow_with_the_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """10,000 names: as many steps with 50 literal entries as with one."""
    node = type(PatternIndex([])._root)
    steps = 0
    real = node.following

    def counted(self, component):
        nonlocal steps
        for child in real(self, component):
            steps += 1
            yield child

    monkeypatch.setattr(node, "following", counted)
    names = [f"layers.{i}.part{j}.weight" for i in range(100) for j in range(100)]

    def steps_for(entries: list[str]) -> int:
        nonlocal steps
        steps = 0
        plan = ModulePlan(tuple(entries))
        assert sum(plan.bucket_of(name) is not None for name in names) == 100 * len(entries)
        return steps

    # Every name takes one step to "layers"; those of an entry's layer one more.
    assert steps_for(["layers.0"]) == 10_000 + 100
    assert steps_for([f"layers.{i}" for i in range(50)]) == 10_000 + 50 * 100
