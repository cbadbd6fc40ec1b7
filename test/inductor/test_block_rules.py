"""Single rules of finding blocks, each by the smallest model that needs it."""

import pytest

from torch_patches._inductor.fx_passes.comm_overlap.graph.modules import (
    ModuleScope,
)
from torch_patches._inductor.fx_passes.comm_overlap.passes.blocks import (
    FoundBlocks,
    Owner,
    find_blocks,
)
from torch_patches.testing.named_models import (
    LINEAR,
    MODELS,
    SWIN_BLOCK,
    assert_covers,
    llama,
    owner_of,
    parameters,
)


def scoped(*path_and_kind: tuple[str, str], parameter: str | None = None) -> Owner:
    return Owner(tuple(ModuleScope(*entry) for entry in path_and_kind), parameter)


def test_module_dict_of_blocks_without_numbers() -> None:
    """Its children repeat a class, and it has no forward."""
    owners = [
        scoped((f"dl.{key}", "user.Block"), (f"dl.{key}.{part}", LINEAR))
        for key in ("text", "image")
        for part in ("q", "o")
    ]
    owners = [scoped(("stem", LINEAR)), *owners]
    assert find_blocks(owners).plan == (("stem",), "dl.*")
    called = [Owner((ModuleScope("dl", "user.Dl"), *o.stack), None) for o in owners[1:]]
    assert find_blocks(called).stacks == ()
    other = [
        scoped((o.stack[0].path, f"user.{n}"), (o.scope, LINEAR)) for n, o in enumerate(owners[1:])
    ]
    assert find_blocks(other).stacks == ()


def test_module_dict_of_a_whole_model_is_no_list_of_blocks() -> None:
    """nanoGPT: ``transformer`` has no forward and two Embeddings; ``h`` in it has the blocks."""
    blocks = [
        scoped((f"transformer.h.{n}", "user.Block"), (f"transformer.h.{n}.{part}", LINEAR))
        for n in range(3)
        for part in ("attn", "mlp")
    ]
    ends = [
        scoped((f"transformer.{name}", kind))
        for name, kind in [("wte", "E"), ("wpe", "E"), ("ln_f", "N")]
    ]
    plan = find_blocks([*ends[:2], *blocks, ends[2]]).plan
    assert plan == (
        ("transformer.wte", "transformer.wpe"),
        "transformer.h.*",
        ("transformer.ln_f",),
    )


def composites(*path_and_kind: tuple[str, str]) -> list[Owner]:
    return [
        scoped(entry, (f"{entry[0]}.{part}", LINEAR)) for entry in path_and_kind for part in "qo"
    ]


def test_two_towers_of_one_class_are_no_list_of_blocks() -> None:
    """Neither of the model itself, nor of a dict that holds a list of blocks beside them."""
    assert find_blocks(composites(("text", "user.T"), ("image", "user.T"))).stacks == ()
    blocks = composites(*((f"net.h.{n}", "user.Block") for n in range(2)))
    towers = composites(("net.text", "user.T"), ("net.image", "user.T"))
    assert find_blocks([*towers, *blocks]).plan == (("net.text", "net.image"), "net.h.*")


def test_numbered_attributes_that_are_not_alike_are_no_blocks() -> None:
    unlike = [*composites(("part1", "user.A")), scoped(("part2", "user.B"))]
    third = scoped(("part3", "user.C"), ("part3.x", LINEAR))
    assert find_blocks([*unlike, third]).stacks == ()


def test_leaves_of_a_users_class_with_three_parameters_are_blocks() -> None:
    """They compute with their parameters themselves; heads are beside them."""

    def owners(kind: str, weights: int) -> list[Owner]:
        blocks = [
            scoped((f"layers.{n}", kind), parameter=f"layers.{n}.w{w}")
            for n in range(2)
            for w in range(weights)
        ]
        towers = [scoped((f"towers.{n}", "T"), (f"towers.{n}.fc", LINEAR)) for n in range(2)]
        return [*blocks, *towers]

    assert find_blocks(owners("user.Block", 3)).plan == ("layers.*", "towers.*")
    assert find_blocks(owners("user.Block", 2)).plan == (("layers",), "towers.*")
    assert find_blocks(owners("torch.nn.modules.rnn.LSTMCell", 3)).plan == (("layers",), "towers.*")


def test_attention_and_mlp_in_one_wrapper_class_stay_in_their_layer() -> None:
    """lucidrains' PreNorm: one class around unlike modules."""
    parts = {"0": ["norm", "fn.to_qkv", "fn.to_out"], "1": ["norm", "fn.net.0", "fn.net.3"]}
    owners = [
        scoped((f"layers.{n}.{part}", "user.PreNorm"), (f"layers.{n}.{part}.{name}", LINEAR))
        for n in range(2)
        for part, names in parts.items()
        for name in names
    ]
    assert find_blocks(owners).plan == ("layers.*",)


def test_tied_embedding_that_is_used_twice_is_named_once() -> None:
    """In front of the blocks and behind them, in the same module."""
    embed = scoped(("tok_embeddings", LINEAR), parameter="tok_embeddings.weight")
    blocks = [owner_of(n) for n in llama(2)]
    norm = scoped(("norm", "N"), parameter="norm.weight")
    owners = [embed, *blocks, norm, embed]
    found = find_blocks(owners)
    assert found.plan == (("tok_embeddings",), "layers.*", ("norm",))
    assert_covers(found, owners)


def test_tied_embedding_that_another_module_uses_has_a_name_for_each_use() -> None:
    first = scoped(("tok_embeddings", LINEAR), parameter="tok_embeddings.weight")
    second = scoped(("output", LINEAR), parameter="tok_embeddings.weight")
    owners = [first, *[owner_of(n) for n in llama(2)], second]
    found = find_blocks(owners)
    assert found.plan == (("tok_embeddings",), "layers.*", ("output",))
    assert_covers(found, owners)


def test_module_in_the_middle_of_a_stack_has_an_entry_of_its_own() -> None:
    blocks = [owner_of(n) for n in llama(4)]
    half = len(blocks) // 2
    owners = [scoped(("stem", LINEAR)), *blocks[:half], scoped(("bridge", LINEAR)), *blocks[half:]]
    found = find_blocks(owners)
    assert found.plan == (("stem",), "layers.*", ("bridge",))
    assert find_blocks([scoped(("stem", LINEAR)), *owners]).plan == found.plan


@pytest.mark.parametrize("backward", [False, True])
def test_what_is_mixed_into_the_first_or_last_block_lies_outside(backward: bool) -> None:
    """As recomputed gathers and scatters of a backward are."""
    blocks = [owner_of(n) for n in llama(3)]
    stem, norm, head = (scoped((name, LINEAR)) for name in ("stem", "norm", "head"))
    owners = [blocks[0], stem, *blocks[1:-1], norm, blocks[-1], head]
    found = find_blocks(owners[::-1] if backward else owners)
    assert set(found.plan) == {("stem",), "layers.*", ("norm", "head")}


def test_parameter_of_a_container_is_not_a_block() -> None:
    """``layers.*`` would match "layers.scale" too."""
    owners = [
        *[owner_of(n) for n in llama(3)],
        scoped(("layers", "user.Layers"), parameter="layers.scale"),
    ]
    found = find_blocks(owners)
    assert found.plan == ("layers.[0-2]", ("layers.scale",))
    assert_covers(found, owners)


def test_list_of_numbers_that_are_not_in_a_row() -> None:
    names = [n for k in (0, 2, 5, 6, 7) for n in llama(1, start=k)]
    owners = [owner_of(n) for n in [*names, "layers.9.weight"]]
    assert find_blocks(owners).plan == ("layers.[0,2,5-7]", ("layers.9",))


@pytest.mark.parametrize("prefix", ["", "net."])
def test_two_series_in_one_module(prefix: str) -> None:
    """``*`` would match both, and the stem too."""
    names = parameters(f"{prefix}{{img,txt}}{{0..2}}.{{attn.qkv,mlp.fc}}.weight")
    both = (f"{prefix}img[0-2]", f"{prefix}txt[0-2]")
    owners = [owner_of(n) for n in [f"{prefix}stem.weight", *names]]
    assert find_blocks(owners).plan == ((f"{prefix}stem",), *both)
    assert find_blocks(owners[1:]).plan == (f"{prefix}*",)


def test_star_for_stages_only_where_every_match_is_a_block() -> None:
    """``stages.*.blocks.*`` would match the plain ``stages.2.blocks.0`` too."""
    names = parameters(
        f"stages.{{0..1}}.blocks.{{0..1}}.{SWIN_BLOCK}", "stages.2.blocks.{0..1}.weight"
    )
    owners = [owner_of(n) for n in names]
    found = find_blocks(owners)
    assert found.plan == ("stages.0.blocks.*", "stages.1.blocks.*", ("stages.2",))
    assert_covers(found, owners)


def test_module_that_computes_with_the_blocks_parameters_is_named_by_them() -> None:
    """Else an entry for ``runner`` would take the blocks' parameters, which are in ``layers.*``."""
    blocks = [owner_of(n) for n in llama(2)]
    runner = (ModuleScope("runner", "user.Runner"),)
    owners = [
        *blocks,
        Owner(runner, "layers.1.feed_forward.w3.weight"),
        Owner(runner, "output.weight"),
    ]
    found = find_blocks(owners)
    assert found.plan == ("layers.*", ("output",))
    assert_covers(found, owners)


def test_head_used_in_the_loss_goes_by_the_loss() -> None:
    owners = [
        *[owner_of(n) for n in llama(2)],
        scoped(("loss", "user.Loss"), parameter="output.weight"),
    ]
    assert find_blocks(owners).plan == ("layers.*", ("loss",))


def test_function_that_holds_all_parameters_goes_by_their_names() -> None:
    """Only the outermost module is known of each."""
    owners = [
        scoped(("model", "user.Model"), parameter=f"model.{n}") for n in ["embed.weight", *llama(3)]
    ]
    found = find_blocks(owners)
    assert found.plan == (("model.embed",), "model.layers.*")
    assert_covers(found, owners)


def test_owners_without_a_name_are_told() -> None:
    blocks = [owner_of(n) for n in llama(2, "vision.")]
    owners = [Owner((), None), *blocks, scoped(("vision", "user.Vision"))]
    found = find_blocks(owners)
    assert found.plan == ("vision.layers.*",)
    assert found.uncovered == (0, len(owners) - 1)


def test_nothing_at_all() -> None:
    assert find_blocks([]) == FoundBlocks((), (), ())
    assert find_blocks([]).describe() == "no repeated blocks\nbuckets beside them: none"


def test_description() -> None:
    names, _ = MODELS["encoder_decoder"]
    assert find_blocks([owner_of(n) for n in names]).describe() == (
        "5 repeated blocks: encoder.layers.* (2), decoder.layers.* (3)\n"
        "buckets beside them: embed, encoder.norm, head"
    )
