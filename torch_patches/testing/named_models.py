"""Parameters of well-known models by name, the plan of buckets by blocks that each should get, and a
small matcher of plans.

Names are those of the models' public sources: torchtitan's Llama and DeepSeek-V3, Hugging Face's
Llama, GPT-2, T5, Swin and SegFormer, torchvision's ViT, ResNet and ConvNeXt, lucidrains' ViT, a DiT
with two lists of blocks as in Flux.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch_patches._inductor.fx_passes.comm_overlap.graph.modules import ModuleScope
from torch_patches._inductor.fx_passes.comm_overlap.passes.blocks import (
    FoundBlocks,
    Owner,
    PlanEntry,
)

LINEAR = "torch.nn.modules.linear.Linear"
_CONTAINERS = frozenset(
    {"layers", "h", "blocks", "block", "layer", "stages", "experts", "towers", "heads"}
)


# -- a small matcher of plans ---------------------------------------------------------------------


def component_matches(pattern: str, name: str) -> bool:
    match = re.fullmatch(r"(.*)\[([\d,-]+)\]", pattern)
    if match is None:
        return pattern in ("*", name)
    text, ranges = match.groups()
    number = name.removeprefix(text)
    if not name.startswith(text) or not number.isdecimal() or str(int(number)) != number:
        return False
    ends = [(r.split("-")[0], r.split("-")[-1]) for r in ranges.split(",")]
    return any(int(low) <= int(number) <= int(high) for low, high in ends)


def matched(pattern: str, path: str) -> str | None:
    """The part of a path that a pattern matches."""
    patterns, names = pattern.split("."), path.split(".")
    if len(names) < len(patterns) or not all(map(component_matches, patterns, names)):
        return None
    return ".".join(names[: len(patterns)])


def buckets_of(plan: Sequence[PlanEntry], owner: Owner) -> list[str]:
    """Every bucket that an owner is in, by the module that uses it or else by its parameter."""
    for path in filter(None, (owner.scope, owner.parameter)):
        found = []
        for entry in plan:
            if isinstance(entry, str):
                found += [m for m in [matched(entry, path)] if m is not None]
            else:
                found += ["+".join(entry) for p in entry if matched(p, path) is not None]
        if found:
            return found
    return []


def assert_covers(found: FoundBlocks, owners: Sequence[Owner]) -> None:
    for index, owner in enumerate(owners):
        expected = 0 if index in found.uncovered else 1
        assert len(buckets_of(found.plan, owner)) == expected, (owner, found)
    names = [name for e in found.plan for name in ([e] if isinstance(e, str) else e)]
    assert len(set(names)) == len(names)


def blocks_in(found: FoundBlocks, owners: Sequence[Owner]) -> set[str]:
    stacks = [stack.entry for stack in found.stacks]
    return {bucket for owner in owners for bucket in buckets_of(stacks, owner)}


# -- hand-made owners -----------------------------------------------------------------------------


def kind_of(path: str) -> str:
    """A class by the last word: "layers.3" is a "layers" of the user's, "wq" a Linear."""
    words = [word for word in path.split(".") if not word.isdecimal()]
    return f"user.{words[-1].rstrip('0123456789_') if words else 'net'}"


def owner_of(parameter: str, kinds: dict[str, str] | None = None) -> Owner:
    """Owner of a parameter, made in its module; containers are never in stacks."""
    parts = parameter.split(".")[:-1]
    paths = [".".join(parts[: n + 1]) for n in range(len(parts))]
    called = [p for p in paths if p.split(".")[-1] not in _CONTAINERS]
    kinds = kinds or {}
    scopes = [
        ModuleScope(p, kinds.get(p, LINEAR if p == paths[-1] else kind_of(p))) for p in called
    ]
    return Owner(tuple(scopes), parameter)


def expand(text: str) -> list[str]:
    """a.{b,c}.w 3.x -> parameters; "{0..2}" counts, groups multiply from the left."""
    match = re.search(r"\{([^{}]*)\}", text)
    if match is None:
        return [text]
    body = match[1]
    if ".." in body:
        low, high = map(int, body.split(".."))
        choices = [str(n) for n in range(low, high + 1)]
    else:
        choices = body.split(",")
    done = [text[: match.start()] + choice + text[match.end() :] for choice in choices]
    return [name for item in done for name in expand(item)]


def parameters(*texts: str) -> list[str]:
    return list(dict.fromkeys(name for text in texts for name in expand(text)))


LLAMA_BLOCK = ["attention.wq", "attention.wk", "attention.wo", "feed_forward.w1", "feed_forward.w2", "attention_norm"]  # fmt: skip


def llama(layers: int, prefix: str = "", start: int = 0) -> list[str]:
    return [
        f"{prefix}layers.{n}.{name}.weight"
        for n in range(start, start + layers)
        for name in LLAMA_BLOCK
    ]


SWIN_BLOCK = "{norm1,attn.qkv,attn.proj,norm2,mlp.fc1,mlp.fc2}.weight"
MODELS: dict[str, tuple[list[str], tuple[PlanEntry, ...]]] = {
    "llama": (
        ["tok_embeddings.weight", *llama(12), "norm.weight", "output.weight"],
        (("tok_embeddings",), "layers.*", ("norm", "output")),
    ),
    "hf_llama": (
        parameters(
            "model.embed_tokens.weight",
            "model.layers.{0..10}.{self_attn.q_proj,self_attn.o_proj,mlp.up_proj}.weight",
            "model.norm.weight",
            "lm_head.weight",
        ),
        (("model.embed_tokens",), "model.layers.*", ("model.norm", "lm_head")),
    ),
    "gpt2": (
        parameters(
            "transformer.{wte,wpe}.weight",
            "transformer.h.{0..3}.{ln_1,attn.c_attn,mlp.c_fc}.{weight,bias}",
            "transformer.ln_f.weight",
            "lm_head.weight",
        ),
        (("transformer.wte", "transformer.wpe"), "transformer.h.*", ("transformer.ln_f", "lm_head")),
    ),
    "one_layer": (
        ["tok_embeddings.weight", *llama(1), "output.weight"],
        (("tok_embeddings",), "layers.*", ("output",)),
    ),
    "torchvision_vit": (
        parameters(
            "conv_proj.weight",
            "encoder.pos_embedding",
            "encoder.layers.encoder_layer_{0..11}.{ln_1,self_attention.out_proj,mlp.0}.weight",
            "encoder.ln.weight",
            "heads.head.weight",
        ),
        (
            ("conv_proj", "encoder.pos_embedding"),
            "encoder.layers.*",
            ("encoder.ln", "heads"),
        ),
    ),
    "vit_sequential": (
        parameters(
            "patch_embed.proj.weight",
            "pos_embed",
            "blocks.{0..5}.{norm1,attn.qkv,mlp.fc1}.weight",
            "norm.weight",
            "head.weight",
        ),
        (("patch_embed", "pos_embed"), "blocks.*", ("norm", "head")),
    ),
    "lucidrains_vit": (
        parameters(
            "to_patch.weight",
            "transformer.layers.{0..3}.{0.norm,0.to_qkv,1.net.0,1.net.3}.weight",
            "mlp_head.weight",
        ),
        (("to_patch",), "transformer.layers.*", ("mlp_head",)),
    ),
    "swin": (
        parameters(
            "patch_embed.weight",
            f"stages.0.blocks.{{0..1}}.{SWIN_BLOCK}",
            "stages.0.downsample.{norm,reduction}.weight",
            f"stages.1.blocks.{{0..5}}.{SWIN_BLOCK}",
            "stages.1.downsample.{norm,reduction}.weight",
            f"stages.2.blocks.0.{SWIN_BLOCK}",  # one block, as in the others
            "norm.weight",
        ),
        (
            ("patch_embed",),
            "stages.*.blocks.*",
            ("stages.0.downsample",),
            ("stages.1.downsample",),
            ("norm",),
        ),
    ),
    "segformer": (
        parameters("encoder.block.{0..1}.{0..2}.{norm,attention.q,attention.k,mlp.fc}.weight"),
        ("encoder.block.*.*",),
    ),
    "t5": (
        parameters(
            "shared.weight",
            "encoder.block.{0..3}.{layer.0.SelfAttention.q,layer.0.layer_norm}.weight",
            "encoder.block.{0..3}.{layer.1.DenseReluDense.wi,layer.1.layer_norm}.weight",
            "encoder.final_layer_norm.weight",
            "decoder.block.{0..2}.layer.{0.SelfAttention,1.EncDecAttention,2.Dense}.q.weight",
            "decoder.final_layer_norm.weight",
            "lm_head.weight",
        ),
        (
            ("shared",),
            "encoder.block.*",
            ("encoder.final_layer_norm",),
            "decoder.block.*",
            ("decoder.final_layer_norm", "lm_head"),
        ),
    ),
    "encoder_decoder": (
        [
            "embed.weight",
            *llama(2, "encoder."),
            "encoder.norm.weight",
            *llama(3, "decoder."),
            "head.weight",
        ],
        (("embed",), "encoder.layers.*", ("encoder.norm",), "decoder.layers.*", ("head",)),
    ),
    "moe_mixed": (
        parameters(
            "tok_embeddings.weight",
            "layers.0.{attention.wq,attention.wo,feed_forward.w1,feed_forward.w2}.weight",
            "layers.{1..3}.{attention.wq,attention.wo,moe.router.gate,moe.experts.{0..7}.{w1,w2}}.weight",
            "output.weight",
        ),
        (("tok_embeddings",), "layers.*", ("output",)),
    ),
    "experts_directly_in_the_layer": (
        parameters("layers.{0..2}.{attention.wq,attention.wo,experts.{0..7}.{w1,w2,w3}}.weight"),
        ("layers.*",),
    ),
    "deep_experts_beside_attention": (
        parameters("layers.{0..2}.{attention.{q,k,v,o},norm,experts.{0..1}.{mlp.{fc1,fc2},norm}}.weight"),
        ("layers.*",),
    ),
    "vision_beside_text": (
        parameters(
            "vision.patch.weight",
            "vision.pos_embed",
            "vision.blocks.{0..3}.{attn.qkv,mlp.fc1}.weight",
            "vision.norm.weight",
            "text.embed.weight",
            "text.layers.{0..2}.{attn.qkv,mlp.fc1}.weight",
            "logit_scale",
        ),
        (
            ("vision.patch", "vision.pos_embed"),
            "vision.blocks.*",
            ("vision.norm", "text.embed"),
            "text.layers.*",
            ("logit_scale",),
        ),
    ),
    "dit_two_lists": (
        parameters(
            "img_in.weight",
            "double_blocks.{0..2}.{img_attn.qkv,txt_attn.qkv,img_mlp.0}.weight",
            "single_blocks.{0..4}.{linear1,linear2,modulation.lin}.weight",
            "final_layer.linear.weight",
        ),
        (("img_in",), "double_blocks.*", "single_blocks.*", ("final_layer",)),
    ),
    "blocks_as_attributes": (
        parameters("stem.weight", "block{1..3}.{attn.qkv,mlp.fc}.weight", "blockhead.weight"),
        (("stem",), "block[1-3]", ("blockhead",)),
    ),
    "resnet": (
        parameters(
            "conv1.weight",
            "bn1.weight",
            "layer1.{0..1}.{conv1,bn1,conv2,bn2}.weight",
            "layer2.{0..1}.{conv1,bn1,conv2,bn2}.weight",
            "fc.weight",
        ),
        (("conv1", "bn1"), "layer1.*", "layer2.*", ("fc",)),
    ),
    "convnext": (
        parameters(
            "features.0.{0,1}.weight",
            "features.1.{0..2}.block.{0,2,3,5}.weight",
            "features.2.{0,1}.weight",
            "features.3.{0..2}.block.{0,2,3,5}.weight",
            "classifier.2.weight",
        ),
        (("features.0",), "features.1.*", ("features.2",), "features.3.*", ("classifier",)),
    ),
    "list_of_models": (
        [
            name
            for m in range(2)
            for name in [f"models.{m}.embed.weight", *llama(4, f"models.{m}.model.")]
        ],
        (("models.0.embed",), "models.*.model.layers.*", ("models.1.embed",)),
    ),
    "sequential_with_ends": (
        parameters("net.0.weight", "net.{1..3}.{attn.qkv,mlp.fc}.weight", "net.4.weight"),
        (("net.0",), "net.[1-3]", ("net.4",)),
    ),
    "sequential_compiled_itself": (
        parameters("{0..2}.{attn.qkv,mlp.fc}.weight"),
        ("*",),
    ),
    "heads_and_embeddings_in_lists": (
        parameters("embeddings.{0..3}.weight", *llama(2), "heads.{0..2}.weight"),
        (("embeddings",), "layers.*", ("heads",)),
    ),
    "toy_mlp": (parameters("layers.{0..4}.weight"), ("layers.*",)),
    "toy_attributes": (parameters("fc{1..3}.weight", "out.weight"), ("fc[1-3]", ("out",))),
    "nothing_repeats": (
        parameters("model.{embed,attention.wq,attention.wo,head}.weight"),
        ("model.embed", "model.attention", "model.head"),
    ),
    "leading_zeros": (
        parameters("blocks.x.weight", "blocks.b{01,02}.{attn.q,mlp.w}.weight"),
        (("blocks.x",), "blocks.b0[1-2]"),
    ),
}  # fmt: skip
