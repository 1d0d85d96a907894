"""What a model is scored on has no say in it."""

import numpy as np

from fedloom.experiment.config import make_config
from fedloom.experiment.plugins import method_class
from fedloom.experiment.setup import prepare


def test_what_newcomers_are_scored_on_has_no_say_in_static_norms(in_tmp):
    """Nor has anybody's: other images there change no score on images that stayed."""
    rng = np.random.default_rng(0)
    data = rng.normal(size=(240, 1, 8, 8)).astype(np.float32), np.arange(240) % 4
    config, options = make_config(
        {
            "clients": 4, "newcomers": 2, "partition": "classes:2", "test_share": 0.5,
            "model": "conv4", "model_options": {"channels": [4, 4], "norm": "static"},
            "engine": "serial", "data": "custom",
        },
        method_class("fedavg"),
    )  # fmt: skip
    x = prepare(config, options.build(), data=data)
    row, federation = x.state.shared.unsqueeze(0), x.federation

    def loss(client, part):
        return float(x.engine.score(np.array([client]), row, part).loss[0])

    for client in (0, *federation.newcomer_ids):
        before, query = loss(client, "test-support"), loss(client, "test-query")
        x.dataset.x[federation.indices(client, "test-query")] *= 50
        assert loss(client, "test-support") == before
        assert loss(client, "test-query") != query
