"""SCAFFOLD, FedNova, server steps, Ditto, FedBN, pFedMe, DS-FL: limits and plain references."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import fedloom
from fedloom.data.catalog import load
from fedloom.data.split import federate
from fedloom.errors import FedloomError
from fedloom.layout import Layout

FULL = {"batch": "inf", "participation": 1.0, "clients": 3, "partition": "dirichlet:0.5", "lr": 0.1}


def state(result):
    return result.store.checkpoint()[0]


def clients_data(count=3):
    """Everybody's training images and labels, as a run has them."""
    federation = federate(load("digits"), "dirichlet:0.5", count, 0)
    data = federation.dataset
    out = []
    for client in range(count):
        rows = federation.indices(client, "train")
        x = torch.from_numpy(data.x[rows]).float()
        x = (x / 255 if data.x.dtype == np.uint8 else x) - data.mean[0]
        out.append((x / data.std[0], torch.from_numpy(data.y[rows].astype(np.int64))))
    return out


def gradient(module, row, layout, x, y):
    layout.load(module, row)
    module.zero_grad()
    F.cross_entropy(module(x), y).backward()
    return torch.cat([p.grad.flatten() for p in module.parameters()])


def start():
    module = fedloom.models.build("mlp", (1, 8, 8), 10, options={"hidden": [16]})
    layout = Layout.of(module)
    return module, layout, layout.flatten(module)


# -- SCAFFOLD -------------------------------------------------------------------------------------


def test_scaffold_with_control_variates_of_zero_is_fedavg_to_the_bit(quick, row):
    """They are zero in the first round."""
    assert torch.equal(row(quick("scaffold", rounds=1)), row(quick("fedavg", rounds=1)))
    assert not torch.equal(row(quick("scaffold", rounds=2)), row(quick("fedavg", rounds=2)))


@pytest.mark.parametrize("engine", ["serial", "stacked"])
def test_scaffold_is_algorithm_1_in_plain_torch(quick, engine):
    """Three clients, full batches, two steps, three rounds."""
    result = quick("scaffold", rounds=3, steps=2, engine=engine, workers=1, **FULL)
    data = clients_data()
    module, layout, x = start()
    c, ci = torch.zeros(len(x)), torch.zeros(3, len(x))
    n = torch.tensor([float(len(y)) for _, y in data])
    for _ in range(3):
        ys, dc = [], []
        for i, (images, labels) in enumerate(data):
            y = x.clone()
            for _ in range(2):
                g = gradient(module, y, layout, images, labels)
                y = y - 0.1 * (g + c - ci[i])
            new = ci[i] - c + (x - y) / (2 * 0.1)
            dc.append(new - ci[i])
            ci[i] = new
            ys.append(y)
        x = (torch.stack(ys) * n[:, None]).sum(0) / n.sum()
        c = c + torch.stack(dc).mean(0)  # all of N take part
    kept = state(result)
    torch.testing.assert_close(kept["shared"], x, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(kept["server/c"], c, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(kept["kept/rows"], ci, atol=1e-4, rtol=1e-3)


def test_scaffold_is_no_personal_method(quick):
    result = quick("scaffold", rounds=2)
    assert result.model() is not None
    assert "test_accuracy" not in result.clients  # one model is scored, not one for each
    plain = quick("fedavg", rounds=2)
    assert result.summary["bytes_up"] == 2 * plain.summary["bytes_up"]


def test_scaffold_runs_with_sub_models(quick):
    from fedloom.local import Controlled
    from fedloom.method import Method
    from fedloom.mix import ControlledAverage
    from fedloom.select import Ordered

    method = Method(local=Controlled(), mix=ControlledAverage(), select=Ordered())
    result = quick(method, rounds=3, capacities="1:0.5,0.5:0.5", participation=1.0)
    assert np.isfinite(result.rounds["train_loss"]).all()
    rows = state(result)["kept/rows"]
    weak = (rows == 0).float().mean(1)
    assert sorted(weak > 0.4) == [False] * 3 + [True] * 3  # of weights they never trained


# -- FedNova and server optimisers ----------------------------------------------------------------


def test_fednova_with_equal_steps_is_fedavg(quick, row):
    settings = {"steps": 3, "partition": "quantity:zipf", "momentum": 0.5}
    torch.testing.assert_close(
        row(quick("fednova", **settings)), row(quick("fedavg", **settings)), atol=1e-6, rtol=1e-5
    )


def test_fednova_takes_the_weight_of_many_steps_back(quick, row):
    settings = {"partition": "quantity:zipf", "participation": 1.0, "batch": 8, "rounds": 1}
    nova, plain = quick("fednova", **settings), quick("fedavg", **settings)
    assert not torch.allclose(row(nova), row(plain), atol=1e-4)


@pytest.mark.parametrize("method", ["fedavgm:beta=0", "fedavgm:beta=0,server_lr=1"])
def test_a_server_step_of_one_without_momentum_is_fedavg_to_the_bit(quick, row, method):
    assert torch.equal(row(quick(method)), row(quick("fedavg")))


@pytest.mark.parametrize("method", ["fedavgm", "fedadam", "fedyogi", "fedadagrad"])
def test_server_optimisers_leave_batch_statistics_alone(quick, method):
    result = quick(method, model="conv4", rounds=4, participation=1.0,
                   model_options={"channels": [4, 4, 8, 8]})  # fmt: skip
    for name, value in result.model().state_dict().items():
        assert torch.isfinite(value).all()
        if name.endswith("running_var"):
            assert (value > 0).all()


@pytest.mark.parametrize("method", ["scaffold", "fedadam", "ditto", "ds-fl", "pfedme"])
def test_a_resumed_run_is_the_uninterrupted_one(quick, method):
    settings = {"public": "share:0.1"} if method == "ds-fl" else {}
    whole = quick(method, rounds=4, **settings)
    quick(method, rounds=2, out="half", **settings)
    half = quick(method, rounds=4, out="half", resume=True, **settings)
    for name, value in state(whole).items():
        assert torch.equal(value, state(half)[name]), name


# -- Ditto, FedBN, pFedMe, DS-FL ------------------------------------------------------------------


def test_ditto_without_a_tether_is_local_training_beside_fedavg(quick, row):
    ditto, local = quick("ditto:lam=0"), quick("local")
    assert torch.equal(row(ditto), row(quick("fedavg")))
    assert torch.equal(state(ditto)["kept/clients"], state(local)["kept/clients"])
    for client in state(local)["kept/clients"].tolist():
        mine, alone = (r.model(client=client).state_dict() for r in (ditto, local))
        assert all(torch.equal(mine[name], alone[name]) for name in mine)


def test_a_strong_tether_keeps_ditto_close_to_the_shared_model(quick):
    far = []
    for lam in (0.0, 0.5, 5.0):
        result = quick(f"ditto:lam={lam}", rounds=4, participation=1.0)
        shared = state(result)["shared"]
        far.append(float((state(result)["kept/rows"] - shared).norm(dim=1).mean()))
    assert far[0] > far[1] > far[2]


def test_dittos_second_model_costs_work_and_no_traffic(quick):
    ditto, plain = quick("ditto"), quick("fedavg")
    assert ditto.summary["bytes"] == plain.summary["bytes"]
    assert ditto.summary["macs"] == 2 * plain.summary["macs"]


def test_fedbn_keeps_norm_layers_and_refuses_models_without(quick):
    result = quick("fedbn", model="conv4", participation=1.0, model_options={"channels": [4] * 4})
    a, b = (result.model(client=c).state_dict() for c in (0, 1))
    for name in a:
        same = torch.equal(a[name], b[name])
        assert same != (".norm." in name and "num_batches" not in name), name
    with pytest.raises(FedloomError, match="has none"):
        quick("fedbn", model="mlp")


def test_pfedme_steps_towards_the_proximal_point(quick):
    """One full batch, one round: w ← w − ηλ(w − θ), θ by two steps from w."""
    settings = {**FULL, "clients": 1, "partition": "iid", "rounds": 1}
    result = quick("pfedme:lam=3,alpha=0.05,inner=2", **settings)
    federation = federate(load("digits"), "iid", 1, 0)
    assert federation.n_clients == 1
    module, layout, w = start()
    data = federation.dataset
    rows = federation.indices(0, "train")
    x = torch.from_numpy(data.x[rows]).float()
    x = ((x / 255 if data.x.dtype == np.uint8 else x) - data.mean[0]) / data.std[0]
    y = torch.from_numpy(data.y[rows].astype(np.int64))
    theta = w.clone()
    for _ in range(2):
        g = gradient(module, theta, layout, x, y)
        theta = theta - 0.05 * (g + 3 * (theta - w))
    torch.testing.assert_close(state(result)["shared"], w - 0.1 * 3 * (w - theta), atol=1e-5,
                               rtol=1e-4)  # fmt: skip


def test_ds_fl_sends_as_much_whatever_the_model(quick):
    settings = {"public": "share:0.1", "rounds": 2}
    small, large = (quick("ds-fl", model_options={"hidden": [h]}, **settings) for h in (4, 64))
    images = int(small.public.split()[0])
    assert small.summary["bytes_up"] == large.summary["bytes_up"] == 2 * 3 * images * 10 * 4
    assert "shared" in state(small)
    targets = state(small)["server/targets"]
    assert torch.allclose(targets.sum(1), torch.ones(images), atol=1e-5)


def test_ds_fls_clients_learn_from_one_another(quick):
    settings = {"public": "share:0.3", "rounds": 12, "partition": "classes:2", "clients": 10,
                "participation": 1.0, "eval_every": 12, "lr": 0.1}  # fmt: skip
    together, alone = quick("ds-fl", **settings), quick("local", **settings)
    assert together.summary["test_accuracy"] > alone.summary["test_accuracy"] + 0.05


# -- local optimisers -----------------------------------------------------------------------------


@pytest.mark.parametrize("optimiser", ["adam", "adamw,beta2=0.99", "adagrad"])
@pytest.mark.parametrize("kept", ["fresh", "kept"])
def test_optimisers_do_the_same_on_every_engine(quick, row, optimiser, kept):
    settings = {"optimiser": optimiser, "optimiser_state": kept, "lr": 0.01, "weight_decay": 0.01}
    serial, pool, stack = (
        quick(engine=e, workers=w, **settings)
        for e, w in (("serial", 1), ("processes", 2), ("stacked", 1))
    )
    assert torch.equal(row(serial), row(pool))
    torch.testing.assert_close(row(stack), row(serial), atol=1e-5, rtol=1e-3)
    assert ("kept/rows" in state(serial)) == (kept == "kept")
    assert serial.model() is not None


def test_what_an_optimiser_remembers_is_kept_only_if_asked(quick, row):
    settings = {"momentum": 0.9, "rounds": 3, "participation": 1.0}
    fresh, kept = quick(**settings), quick(optimiser_state="kept", **settings)
    assert not torch.equal(row(fresh), row(kept))
    assert torch.equal(row(quick(**{**settings, "rounds": 1})),
                       row(quick(optimiser_state="kept", **{**settings, "rounds": 1})))  # fmt: skip
    with pytest.raises(FedloomError, match="has no state"):
        quick(optimiser_state="kept")
    with pytest.raises(FedloomError, match="would do nothing"):
        quick(optimiser="adam", momentum=0.9)


@pytest.mark.parametrize("spec", ["sdg", "adam,beta1=2", "adam,mu=1", "adagrad,beta1=0.5", "sgd,x"])
def test_wrong_optimisers_are_refused(quick, spec):
    with pytest.raises(FedloomError, match="ptimiser"):
        quick(optimiser=spec)
