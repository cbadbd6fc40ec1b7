"""Small language models in plain torch, for tests, the demo and captured graphs.

Two models with the communication patterns that matter: :class:`Llama` (dense) and :class:`MoE`
(a router, experts behind an all-to-all, a shared expert, dense first layers).  They know nothing of
data or tensor parallelism; :mod:`torch_patches.testing.parallelize` adds that from outside by
changing how parameters are stored, so the same model runs on one process, on gloo, or on the fake
process group.

    model = Llama(ModelConfig(layers=2))
    fully_shard_simple(model, init_device_mesh("cpu", (world_size,)))
    loss = torch.compile(model, fullgraph=True)(tokens, targets)
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from torch_patches.testing.parallelize import (
    expert_parallel,
    fully_shard_simple,
    replicate_simple,
    tensor_parallel,
)

__all__ = [
    "Llama",
    "MoE",
    "MoEConfig",
    "ModelConfig",
    "expert_parallel",
    "fully_shard_simple",
    "replicate_simple",
    "tensor_parallel",
]


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a model.

    Args:
        layers: transformer blocks.
        dim: width of the residual stream.
        heads: query heads.
        kv_heads: key and value heads, None for as many as ``heads``.
        vocab: size of the vocabulary.
        ffn_multiple: hidden width of a dense MLP over ``dim`` (Llama-3-8B: 3.5).
        max_seq: longest sequence the rotary tables cover.
        tied: the head uses the embedding's weight.
        checkpoint_blocks: recompute every block in the backward, except attention itself.
        kv_rank: width of the latent vector that keys and values are made from
            (:class:`LatentAttention`); None for plain attention.
    """

    layers: int = 2
    dim: int = 64
    heads: int = 4
    kv_heads: int | None = None
    vocab: int = 128
    ffn_multiple: float = 3.5
    max_seq: int = 64
    tied: bool = False
    checkpoint_blocks: bool = False
    kv_rank: int | None = None

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def rotary_dim(self) -> int:
        """How much of a head is rotated; of latent attention an extra half head is."""
        return self.head_dim if self.kv_rank is None else self.head_dim // 2

    @property
    def hidden(self) -> int:
        return int(self.dim * self.ffn_multiple)


@dataclass(frozen=True)
class MoEConfig(ModelConfig):
    """Shape of a mixture-of-experts model.

    Args:
        experts: routed experts in all, over all ranks of the expert group.
        top_k: experts that see a token.
        expert_multiple: hidden width of one expert over ``dim``.
        dense_layers: leading blocks with a dense MLP.
        capacity_factor: slots of an expert over its fair share of a rank's tokens; tokens beyond
            that are dropped.  None gives every expert a slot for every token: nothing is dropped,
            so the result does not depend on how the batch is spread over ranks.
        shared_experts: experts that see every token, as one MLP of their joint width.
    """

    experts: int = 8
    top_k: int = 2
    expert_multiple: float = 1.0
    dense_layers: int = 1
    capacity_factor: float | None = None
    shared_experts: int = 1

    def capacity(self, tokens: int) -> int:
        if self.capacity_factor is None:
            return tokens
        return math.ceil(tokens * self.top_k * self.capacity_factor / self.experts)


def _rotary_tables(config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, [max_seq, head_dim / 2]."""
    half = config.rotary_dim // 2
    frequencies = 10000.0 ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = torch.outer(torch.arange(config.max_seq, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of ``x`` [batch, heads, seq, head_dim]."""
    first, second = x.float().chunk(2, dim=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(rotated, dim=-1).to(x.dtype)


def _recompute_block(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Checkpoint policy of a block: keep what draws random numbers, recompute the rest.

    Attention may draw (dropout).  Recomputing it would save the generator's state, which torch
    2.13 appends behind the saved DeviceMesh objects of DTensor parameters: an assertion fails.
    """
    if torch.Tag.nondeterministic_seeded in getattr(op, "tags", ()):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


_block_contexts = functools.partial(create_selective_checkpoint_contexts, _recompute_block)


class Attention(nn.Module):
    """Causal attention.  Head counts are read off the projections' outputs, so that it also runs
    on a tensor-parallel shard of the heads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_dim = (config.kv_heads or config.heads) * config.head_dim
        self.grouped = kv_dim != config.dim
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, kv_dim, bias=False)
        self.wv = nn.Linear(config.dim, kv_dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        query = _rotate(self._heads(self.wq(x)), cos, sin)
        key = _rotate(self._heads(self.wk(x)), cos, sin)
        value = self._heads(self.wv(x))
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=self.grouped
        )
        return self.wo(out.transpose(1, 2).flatten(2))


class LatentAttention(nn.Module):
    """Causal attention as in DeepSeek-V2 and V3 without the queries' own latent vector: keys and
    values of all heads come from one narrow vector a token, and a rotated half head goes beside."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.kv_rank is not None
        self.plain, self.rotated, self.kv_rank = config.head_dim, config.rotary_dim, config.kv_rank
        self.wq = nn.Linear(config.dim, config.heads * (self.plain + self.rotated), bias=False)
        self.wkv_a = nn.Linear(config.dim, config.kv_rank + self.rotated, bias=False)
        self.kv_norm = nn.RMSNorm(config.kv_rank, eps=1e-5)
        self.wkv_b = nn.Linear(config.kv_rank, config.heads * 2 * self.plain, bias=False)
        self.wo = nn.Linear(config.heads * self.plain, config.dim, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        plain, rotated = self.plain, self.rotated
        query = self.wq(x).unflatten(-1, (-1, plain + rotated)).transpose(1, 2)
        query_plain, query_rotated = query.split([plain, rotated], dim=-1)
        query = torch.cat([query_plain, _rotate(query_rotated, cos, sin)], dim=-1)
        latent, key_rotated = self.wkv_a(x).split([self.kv_rank, rotated], dim=-1)
        both = self.wkv_b(self.kv_norm(latent)).unflatten(-1, (-1, 2 * plain)).transpose(1, 2)
        key_plain, value = both.split([plain, plain], dim=-1)
        key_rotated = _rotate(key_rotated.unsqueeze(1), cos, sin)
        key = torch.cat([key_plain, key_rotated.expand(-1, key_plain.shape[1], -1, -1)], dim=-1)
        # Fused attention wants one width for queries, keys and values.
        value = F.pad(value, (0, rotated))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)[..., :plain]
        return self.wo(out.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """The gated MLP of Llama."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Experts(nn.Module):
    """The routed experts of one layer as batched SwiGLU weights [experts, in, out].

    ``group_name`` and ``group_size`` are set by :func:`expert_parallel`, after which the weights
    hold only this rank's experts and tokens travel to their owners and back by all-to-all.
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        hidden = int(config.dim * config.expert_multiple)
        self.w1 = nn.Parameter(torch.empty(config.experts, config.dim, hidden))
        self.w2 = nn.Parameter(torch.empty(config.experts, hidden, config.dim))
        self.w3 = nn.Parameter(torch.empty(config.experts, config.dim, hidden))
        self.group_name: str | None = None
        self.group_size = 1

    def _exchange(self, rows: torch.Tensor) -> torch.Tensor:
        """Swap equal slices of the first dimension between the ranks of the expert group."""
        if self.group_name is None:
            return rows
        # The contract of all_to_all_single is a contiguous input.
        swapped = funcol.all_to_all_single_autograd(
            rows.contiguous(),
            None,
            None,
            self.group_name,  # type: ignore[arg-type]
        )
        return funcol.wait_tensor(swapped)

    def forward(self, slots: torch.Tensor) -> torch.Tensor:
        """Slots [experts, capacity, dim] of all experts to their outputs, same shape."""
        experts, capacity, dim = slots.shape
        # [group, local experts, capacity, dim]: first by owner, after the exchange by sender.
        received = self._exchange(slots).view(self.group_size, -1, capacity, dim)
        rows = received.transpose(0, 1).flatten(1, 2)
        out = torch.bmm(F.silu(torch.bmm(rows, self.w1)) * torch.bmm(rows, self.w3), self.w2)
        returned = out.unflatten(1, (self.group_size, capacity)).transpose(0, 1)
        return self._exchange(returned.reshape(experts, capacity, dim))


class MoELayer(nn.Module):
    """Top-k routed experts plus shared ones that see every token."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.router = nn.Linear(config.dim, config.experts, bias=False)
        self.experts = Experts(config)
        shared = config.shared_experts * int(config.dim * config.expert_multiple)
        self.shared = SwiGLU(config.dim, shared)

    def _route(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gate and slot of each (token, choice), both [tokens * top_k].

        A slot is ``expert * capacity + arrival``; arrivals beyond the capacity all share one slot
        past the end, which is thrown away.  Shapes never depend on values: one graph.
        """
        config = self.config
        capacity = config.capacity(tokens.shape[0])
        scores = self.router(tokens).float().softmax(dim=-1)
        gates, chosen = scores.topk(config.top_k, dim=-1)
        gates = (gates / gates.sum(dim=-1, keepdim=True)).flatten()
        chosen = chosen.flatten()
        # Not one_hot, which asserts the range: a side effect that nothing may be moved across.
        taken = (chosen.unsqueeze(-1) == torch.arange(config.experts, device=tokens.device)).long()
        arrival = (taken.cumsum(dim=0) * taken).sum(dim=-1) - 1
        slot = chosen * capacity + arrival
        return gates, torch.where(arrival < capacity, slot, config.experts * capacity)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        config = self.config
        tokens = x.flatten(0, 1)
        gates, slot = self._route(tokens)
        capacity = config.capacity(tokens.shape[0])
        repeated = tokens.repeat_interleave(config.top_k, dim=0)
        slots = tokens.new_zeros(config.experts * capacity + 1, config.dim)
        slots = slots.index_add(0, slot, repeated)[:-1]
        out = self.experts(slots.view(config.experts, capacity, config.dim)).flatten(0, 1)
        out = torch.cat([out, out.new_zeros(1, config.dim)])[slot]
        routed = (out * gates.unsqueeze(-1).to(out.dtype)).unflatten(0, (-1, config.top_k))
        return self.shared(x) + routed.sum(dim=1).view_as(x)


class Block(nn.Module):
    """Pre-norm attention and MLP, each with a residual connection."""

    def __init__(self, config: ModelConfig, mlp: nn.Module) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-5)
        latent = config.kv_rank is not None
        self.attention = LatentAttention(config) if latent else Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.feed_forward = mlp

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """Embedding, blocks, norm, head.  ``forward`` gives the mean cross entropy, so that one
    compiled graph holds the whole step."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleList(
            Block(config, self._make_mlp(config, index)) for index in range(config.layers)
        )
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.output = nn.Linear(config.dim, config.vocab, bias=False)
        if config.tied:
            self.output.weight = self.tok_embeddings.weight
        cos, sin = _rotary_tables(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.reset_parameters()

    def _make_mlp(self, config: ModelConfig, index: int) -> nn.Module:
        return SwiGLU(config.dim, config.hidden)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Normal weights; norms keep their ones."""
        for parameter in self.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.05)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        seq = tokens.shape[1]
        cos, sin = self.cos[:seq], self.sin[:seq]
        x = self.tok_embeddings(tokens)
        for block in self.layers:
            if self.config.checkpoint_blocks:
                x = checkpoint(block, x, cos, sin, use_reentrant=False, context_fn=_block_contexts)
            else:
                x = block(x, cos, sin)
        return self.output(self.norm(x))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.logits(tokens)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class MoE(Llama):
    """Llama whose later blocks have routed experts instead of a dense MLP."""

    config: MoEConfig

    def __init__(self, config: MoEConfig) -> None:
        super().__init__(config)

    def _make_mlp(self, config: ModelConfig, index: int) -> nn.Module:
        assert isinstance(config, MoEConfig)
        if index < config.dense_layers:
            return super()._make_mlp(config, index)
        return MoELayer(config)
