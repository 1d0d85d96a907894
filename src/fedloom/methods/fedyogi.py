"""FedYogi (Reddi et al. 2021): the server applies the clients' mean update with Yogi."""

from __future__ import annotations

from fedloom.methods.fedadam import FedAdam
from fedloom.methods.registry import register


@register
class FedYogi(FedAdam):
    """FedAdam with v ← v − (1 − β₂)Δ² sign(v − Δ²), which forgets large updates slowly."""

    name = "fedyogi"
    kind = "yogi"
