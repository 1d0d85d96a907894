"""FedYogi (Reddi et al. 2021): the server follows the clients' mean change by Yogi."""

from __future__ import annotations

from fedloom.methods.fedadam import FedAdam
from fedloom.methods.registry import register


@register
class FedYogi(FedAdam):
    """FedAdam with v ← v − (1 − β₂)Δ² sign(v − Δ²), which forgets large changes slowly."""

    name = "fedyogi"
    kind = "yogi"
