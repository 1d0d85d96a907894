"""What all engines are tried on: every method, on few samples that are dealt out unevenly."""

from functools import cache

from test_contract import Complete, Gossip, Half, Momentum, Swap, ToyMeta, method
from torch import nn

import fedloom
from fedloom.adapt import FineTune
from fedloom.data.catalog import load
from fedloom.experiment.config import make_config
from fedloom.experiment.plugins import method_class
from fedloom.experiment.setup import load_dataset, make_federation
from fedloom.local import Proximal
from fedloom.methods.registry import methods
from fedloom.mix import Average, DominatingSet, PeerAverage, Pull
from fedloom.topology import Peers, network

REGISTERED = {
    name: cls for name, cls in methods().items() if cls.__module__.startswith("fedloom.methods")
}
OWN = {
    "fine-tuned": method(local=Proximal(0.1), adapt=FineTune(lr=0.1)),
    "private heads": method(mix=Average("body")),
    "maml": method(local=ToyMeta(0.2)),
    "meta-sgd": method(local=ToyMeta(0.2, learned=True), mix=Average("body")),
    "sub-models": method(select=Half()),
    "swap": method(mix=Swap()),
    "gossip": method(mix=Gossip(), topology=Complete()),
    "momentum": method(mix=Momentum()),
    "peers": method(mix=Pull(0.7), topology=Peers(network("erdos-renyi:0.4"))),
    "dominating": method(mix=DominatingSet(), topology=Peers(network("waypoint,area=200"))),
    "sub-models by gossip": method(
        mix=PeerAverage(), select=Half(), topology=Peers(network("ring"))
    ),
}
VARIANTS = {
    "fedswap sequential": "fedswap:partner=sequential,average_every=2",
    "fedswap rotating": "fedswap:partner=rotating,average_every=2",
    "fedswap greedy": "fedswap:partner=greedy,average_every=3",
    "fedswap min": "fedswap:partner=min,similarity=dcka,kernel=rbf,average_every=3",
    "fedswap cosine": "fedswap:partner=min,similarity=cosine,average_every=2",
    "heterofl masked": "heterofl:mask=inf,by_class=true",
}
METHODS = {**{name: name for name in REGISTERED}, **VARIANTS, **OWN}

#: settings that a method can't do without, or that make it do more
MORE = {
    "fedprox": {"mu": 0.5},
    "fedrolex": {"mask": "inf"},
    "fedswap rotating": {"participation": 0.7},
    "federated-dropout": {"mask": "zero", "augment": "crop:1"},
    "fjord": {"mask": "inf"},
    "feddse": {"temperature": 1.0},
    "fedgse-spl": {"public": "share:0.1", "samples": 32},
    "fedgse-csl": {"public": "share:0.1", "samples": 16, "rounds": 3, "lr": 0.5},
    "fedbn": {"model": "conv4", "model_options": {"channels": [4, 4, 8, 8]}},
    "depthfl": {"model": "conv4", "model_options": {"channels": [4, 4, 8, 8]}, "ramp": 2},
}
EVERYBODY = {"participation": 1.0, "public": "share:0.1"}


@cache
def few():
    """The first 400 digits, as arrays."""
    digits = load("digits")
    return digits.x[:400], digits.y[:400]


def settings(name):
    """Uneven clients that lack classes, with everything that an optimiser does."""
    out = {
        "clients": 7, "newcomers": 2, "partition": "dirichlet:0.3", "participation": 0.7,
        "batch": 8, "rounds": 2, "eval_every": 1, "model_options": {"hidden": [16]},
        "momentum": 0.5, "clip": 1.0, "weight_decay": 0.01, "lr_schedule": "exp:0.5",
    }  # fmt: skip
    family = REGISTERED[name.split()[0]].family if name.split()[0] in REGISTERED else ""
    if family == "sub-models":
        out["capacities"] = "1:0.3,0.5:0.4,0.25:0.3"
    if name.startswith("fedswap"):
        out |= EVERYBODY
    if name == "fedsgd":
        for key in ("momentum", "clip", "weight_decay"):
            del out[key]
    fixed = REGISTERED[name].fixed if name in REGISTERED else {}
    return {k: v for k, v in (out | MORE.get(name, {})).items() if k not in fixed}


def run(name, out, **more):
    return fedloom.run(METHODS[name], data=few(), out=out, **{**settings(name), **more})


def federation(result):
    """Who got which of the samples in that run."""
    config, _ = make_config(result.config, method_class(result.config["method"]))
    return make_federation(config, load_dataset(config, few()))


def states(result):
    return result.store.checkpoint()[0]


def dropout(shape, classes):
    layers = nn.Linear(64, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, classes)
    return nn.Sequential(nn.Flatten(), *layers)
