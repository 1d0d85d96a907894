"""nn.MultiheadAttention as a module whose heads can be left out.

Torch's takes the number of heads and their size from what it was built with, and wants as many
features inside as outside. The same weights under the same names, with sizes read off them, let a
sub-model have some of the heads and some of the features, each on its own.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F


class FreeHeads(nn.MultiheadAttention):
    """Self- or cross-attention by scaled dot products; heads keep their size."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        mask = F._canonical_mask(attn_mask, "attn_mask", None, "", query.dtype, False)
        padding = F._canonical_mask(
            key_padding_mask, "key_padding_mask", None, "", query.dtype, False
        )
        if padding is not None:
            padding = padding.unsqueeze(-2).unsqueeze(-2)
            mask = padding if mask is None else mask + padding
        q, k, v = (self._heads(x, i) for i, x in enumerate((query, key, value)))
        chance = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, mask, chance)
        out = out.transpose(-3, -2).flatten(-2)
        out = self.out_proj(out if self.batch_first else out.transpose(0, 1))
        weights = (q @ k.transpose(-2, -1) * self.head_dim**-0.5) if need_weights else None
        if weights is None:
            return out, None
        weights = (weights if mask is None else weights + mask).softmax(-1)
        return out, weights.mean(-3) if average_attn_weights else weights

    def _heads(self, x: Tensor, which: int) -> Tensor:
        """Queries, keys or values: (batch, heads, positions, size of a head)."""
        assert self.in_proj_weight is not None
        x = x if self.batch_first else x.transpose(0, 1)
        weight = self.in_proj_weight.chunk(3)[which]
        bias = None if self.in_proj_bias is None else self.in_proj_bias.chunk(3)[which]
        return F.linear(x, weight, bias).unflatten(-1, (-1, self.head_dim)).transpose(-3, -2)


def with_free_heads(module: nn.Module) -> nn.Module:
    """The same module, whose plain attention layers can be cut; others are left as they are."""
    for layer in module.modules():
        if type(layer) is nn.MultiheadAttention and _plain(layer):
            layer.__class__ = FreeHeads
            layer._qkv_same_embed_dim = False  # no fused kernels, which know of no smaller ones
    return module


def _plain(layer: Any) -> bool:
    odd = layer.bias_k is not None or layer.bias_v is not None or layer.add_zero_attn
    return layer._qkv_same_embed_dim and not odd
