"""Names that a shell completes. Listed here, since importing what they name takes seconds; a test
keeps the lists true."""

from __future__ import annotations

METHODS = (
    "centralised", "depthfl", "ditto", "ds-fl", "fedadagrad", "fedadam", "fedavg", "fedavg-meta",
    "fedavgm", "fedbn", "feddom", "feddse", "federated-dropout", "fedgse-csl", "fedgse-spl",
    "fedmeta-maml", "fedmeta-metasgd", "fedmeta-per-maml", "fedmeta-per-metasgd", "fednova",
    "fedper", "fedper-meta", "fedprox", "fedrolex", "fedsgd", "fedswap", "fedyogi", "fjord",
    "heterofl", "lg-fedavg", "local", "p2p-fedavg", "pfedme", "scaffold", "wafl",
)  # fmt: skip
DATA = (
    "digits", "breast-cancer", "wine", "diabetes", "harbour", "mnist", "fashion-mnist", "emnist",
    "cifar10", "cifar100", "tiny-imagenet", "synthetic",
)  # fmt: skip
MODELS = ("mlp", "lenet", "conv4", "resnet18", "resnet34", "gru", "unet")
STUDIES = (
    "s0-swap", "s1", "s1-when", "s2-low", "s2-high", "s2-temperature", "s2-rho", "s2-classes",
    "s2-participation", "s2-samples", "s2-activations", "s2-gradient-gap", "s4-table", "s4-why",
    "s4-alpha", "s4-mobility", "s4-domset", "s4-similarity",
)  # fmt: skip
NETWORKS = (
    "waypoint", "ring", "complete", "star", "grid", "erdos-renyi:", "watts-strogatz:", "edges:",
    "trace:",
)  # fmt: skip
PARTITIONS = (
    "iid", "dirichlet:", "classes:", "shards:", "quantity:lognormal", "quantity:zipf", "ring:",
    "skew:", "by:", "file:",
)  # fmt: skip
ENGINES = ("auto", "serial", "stacked", "processes", "ray")
