"""Meta-learning and personal models: hand-worked steps, limiting cases, newcomers."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from test_contract import method, states
from torch import nn

import fedloom
from fedloom.adapt import FineTune
from fedloom.errors import FedloomError
from fedloom.experiment.settings import Config
from fedloom.experiment.setup import load_dataset, make_federation
from fedloom.local import (
    MAML,
    SGD,
    Back,
    Batch,
    Budget,
    LearnedRates,
    MetaSGD,
    Reptile,
    cross_entropy,
)
from fedloom.local.control import MoreauEnvelope
from fedloom.local.meta import QUERY, SUPPORT
from fedloom.local.rule import WHOLE
from fedloom.method import Method
from fedloom.methods.tuned import FedPerMeta
from fedloom.mix import Average, GradientStep
from fedloom.native.net import Native
from fedloom.newcomer import BestPart

META = ["fedmeta-maml", "fedmeta-metasgd", "fedmeta-per-maml", "fedmeta-per-metasgd"]
PERSONAL = ["fedper", "lg-fedavg", "fedper-meta", *META[2:]]
FAMILY = sorted({*META, *PERSONAL, "fedavg-meta"})


# -- the step, by hand ----------------------------------------------------------------------------


def quadratic(monkeypatch):
    """L(w; b) = ½ a (w − c)², with a batch b = (a, c): everything can be worked out on paper."""
    monkeypatch.setattr(Batch, "loss", lambda batch, out: out)

    def net(params, x):
        a, c = x
        return 0.5 * a * (params["w"] - c) ** 2

    return net


def step_data(inner, outer):
    support = Batch(torch.tensor(inner), torch.zeros(len(inner)))
    return {SUPPORT: support, QUERY: Batch(torch.tensor(outer), torch.zeros(1))}


def gradient(rule, net, params, data):
    return torch.func.grad(lambda p: rule.objective(net, p, data, None))(params)


def test_a_maml_step_on_a_quadratic(monkeypatch):
    net = quadratic(monkeypatch)
    params = {"w": torch.tensor(1.0, dtype=torch.float64)}
    data = step_data([[2.0, 3.0]], [4.0, -1.0])
    # ŵ = 1 − 0.1·2(1 − 3) = 1.4; g = 4(1.4 + 1)·(1 − 0.1·2) = 7.68; without it 9.6
    assert gradient(MAML(0.1), net, params, data)["w"] == pytest.approx(7.68)
    assert gradient(MAML(0.1, first_order=True), net, params, data)["w"] == pytest.approx(9.6)


def test_two_inner_steps_on_a_quadratic(monkeypatch):
    net = quadratic(monkeypatch)
    params = {"w": torch.tensor(1.0, dtype=torch.float64)}
    data = step_data([[2.0, 3.0], [1.0, 0.0]], [4.0, -1.0])
    # ŵ₁ = 1.4, ŵ₂ = 1.4·0.9 = 1.26; g = 4(1.26 + 1)·0.8·0.9
    assert gradient(MAML(0.1), net, params, data)["w"] == pytest.approx(4 * 2.26 * 0.72)


def small_net():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    params = {name: p.detach() for name, p in module.named_parameters()}
    return lambda p, x: torch.func.functional_call(module, p, (x,)), params


def random_data(steps=2):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(steps, 5, 3, generator=g, dtype=torch.float64)
    y = torch.randint(0, 2, (steps, 5), generator=g)
    q = torch.randn(6, 3, generator=g, dtype=torch.float64)
    return {SUPPORT: Batch(x, y), QUERY: Batch(q, torch.randint(0, 2, (6,), generator=g))}


def uneven(batch, *lengths):
    """The same samples as several batches, the last one smaller."""
    x, y = batch.x.reshape(-1, 3), batch.y.reshape(-1)
    return Batch(x[: sum(lengths)], y[: sum(lengths)], lengths=lengths)


@pytest.mark.parametrize("outer", ["round", "batch"])
@pytest.mark.parametrize("rule", [MAML(0.3), MetaSGD(0.3)], ids=["maml", "metasgd"])
def test_gradients_through_the_inner_steps_are_finite_differences(rule, outer):
    net, params = small_net()
    params |= {f"alpha/{n}": torch.full_like(p, 0.3) for n, p in params.items() if rule.extras}
    data = random_data()
    if outer == "round":
        data = {SUPPORT: uneven(data[SUPPORT], 5, 2), QUERY: uneven(data[QUERY], 4, 1)}
    grads = gradient(rule, net, params, data)
    h = 1e-6
    for name, value in params.items():
        for i in range(value.numel()):
            moved = []
            for sign in (1, -1):
                other = value.clone()
                other.view(-1)[i] += sign * h
                moved.append(rule.objective(net, {**params, name: other}, data, None).detach())
            assert grads[name].view(-1)[i] == pytest.approx(
                float((moved[0] - moved[1]) / (2 * h)), abs=1e-7
            )


def test_the_gradient_of_meta_sgds_rates():
    """∂L/∂α = −∇L_query(ŵ) ∘ ∇L_support(w), for one inner step."""
    net, params = small_net()
    rates = {f"alpha/{n}": torch.full_like(p, 0.2) for n, p in params.items()}
    data = random_data(steps=1)
    grads = gradient(MetaSGD(0.2), net, {**params, **rates}, data)

    def loss(p, batch):
        return cross_entropy(net(p, batch.x), batch)

    inner = torch.func.grad(loss)(params, next(data[SUPPORT].rows()))
    adapted = {n: p - 0.2 * inner[n] for n, p in params.items()}
    outer = torch.func.grad(loss)(adapted, data[QUERY])
    for name in params:
        assert torch.allclose(grads[f"alpha/{name}"], -outer[name] * inner[name])


def test_learned_rates_are_followed():
    rows = torch.tensor([[1.0, 2.0, 0.5, 0.25]])  # two weights, their two rates
    grad = torch.tensor([[4.0, 4.0, 9.0, 9.0]])
    assert LearnedRates().direction(grad, rows, rows).tolist() == [[2.0, 1.0, 0.0, 0.0]]


def test_one_outer_step_on_two_query_batches(monkeypatch):
    net = quadratic(monkeypatch)
    params = {"w": torch.tensor(1.0, dtype=torch.float64)}
    support = Batch(torch.tensor([[2.0, 3.0]]), torch.zeros(1))
    query = Batch(torch.tensor([[4.0, -1.0], [2.0, 0.0]]), torch.zeros(2, 1))
    data = {SUPPORT: support, QUERY: query}
    # ŵ = 1.4; losses ½·4·2.4² and ½·2·1.4², gradients (9.6 + 2.8)/2 · (1 − 0.1·2)
    assert gradient(MAML(0.1), net, params, data)["w"] == pytest.approx(6.2 * 0.8)
    loss = MAML(0.1).objective(net, params, data, None)
    assert float(loss.detach()) == pytest.approx((11.52 + 1.96) / 2)


@pytest.mark.parametrize(
    ("n", "steps", "sizes"),
    [(70, None, [32, 32, 6]), (5, None, [5]), (70, 4, [32, 32, 6, 32]), (64, None, [32, 32])],
)
def test_a_pass_over_the_support_part_has_no_sample_twice(n, steps, sizes):
    rng = np.random.default_rng(0)
    rule = MAML(0.1, inner_steps=steps)
    (only,) = rule.plan({SUPPORT: n, QUERY: 40}, Budget(), rng)
    there = only[SUPPORT] >= 0
    assert there.sum(1).tolist() == sizes
    if steps is None:
        assert sorted(only[SUPPORT][there]) == list(range(n))


def test_outer_steps_of_a_round_and_of_batches():
    def steps(rule, **budget):
        plan = rule.plan({SUPPORT: 9, QUERY: 70}, Budget(**budget), np.random.default_rng(0))
        return [(step[QUERY] >= 0).sum(-1).tolist() for step in plan]

    assert steps(MAML(0.1)) == [[32, 32, 6]]
    assert steps(MAML(0.1), epochs=2) == steps(MAML(0.1), steps=2) == [[32, 32, 6]] * 2
    assert steps(MAML(0.1, outer="batch")) == [32, 32, 6]
    assert steps(MAML(0.1, outer="batch"), steps=2) == [32, 32]


def test_a_client_without_support_or_query_has_no_steps():
    rule = MAML(0.1)
    assert rule.plan({SUPPORT: 0, QUERY: 1}, Budget(), np.random.default_rng(0)) == []


# -- limiting cases on whole runs -----------------------------------------------------------------


def test_fedper_with_no_private_layers_is_fedavg(quick, row):
    assert torch.equal(row(quick("fedper:private=none")), row(quick("fedavg")))


@dataclass(frozen=True)
class OnQuery(SGD):
    parts, weighs = (QUERY,), QUERY

    outer: str = "batch"

    def plan(self, sizes, budget, rng):
        steps = MAML(outer=self.outer).plan({SUPPORT: 9, **sizes}, budget, rng)
        return [{QUERY: step[QUERY]} for step in steps]

    def objective(self, net, params, data, me):
        query = data[QUERY]
        batches = list(query.rows()) if query.several else [query]
        return torch.stack([cross_entropy(net(params, b.x), b) for b in batches]).mean()


@pytest.mark.parametrize("outer", ["round", "batch"])
def test_fedmeta_without_an_inner_rate_is_fedavg_on_the_query_sets(quick, row, outer):
    class Same(MAML):
        """Draws its query batches as OnQuery does."""

        def plan(self, sizes, budget, rng):
            steps = OnQuery(outer).plan({QUERY: sizes[QUERY]}, budget, rng)
            return [{SUPPORT: np.arange(sizes[SUPPORT])[None], **step} for step in steps]

    meta = quick(method(local=Same(alpha=0.0, outer=outer)), rounds=3)
    plain = quick(method(local=OnQuery(outer)), rounds=3)
    assert torch.allclose(row(meta), row(plain), atol=1e-6)


def test_sending_gradients_and_stepping_on_the_server_is_the_same(quick, row):
    class Sends(MAML):
        hands_back = "gradients"

        def finish(self, me, row, grad):
            return Back(torch.cat([grad, row[grad.numel() :]]))

    settings = {"batch": "inf", "rounds": 3, "partition": "quantity:zipf"}
    weights = quick(method(local=MAML(0.1)), **settings)
    gradients = quick(method(local=Sends(0.1), mix=GradientStep()), **settings)
    assert torch.allclose(row(weights), row(gradients), atol=1e-6)


def test_reptile_with_epsilon_one_is_fedavg(quick, row):
    assert torch.equal(row(quick(method(local=Reptile(1.0)))), row(quick("fedavg")))
    half, start = row(quick(method(local=Reptile(0.5)), rounds=1)), row(quick(lr=1e-30, rounds=1))
    assert torch.allclose(half - start, (row(quick(rounds=1)) - start) / 2, atol=1e-6)


def test_first_order_differs_from_second_order(quick, row):
    second, first = (
        row(quick("fedmeta-maml", alpha=0.5, rule=r, rounds=2)) for r in ("maml", "fomaml")
    )
    assert not torch.allclose(second, first, atol=1e-4)


# -- what is kept, and by whom --------------------------------------------------------------------


@pytest.mark.parametrize("name", PERSONAL)
def test_private_parts_never_mix_and_cost_their_columns_only(quick, name):
    result = quick(name, rounds=3)
    tensors = states(result)
    body, head = 64 * 16 + 16, 16 * 10 + 10
    private, shared = (body, head) if name == "lg-fedavg" else (head, body)
    both = 2 if "metasgd" in name else 1
    assert tensors["kept/rows"].shape[1] == both * private
    assert result.rounds["bytes_up"].tolist() == [3 * both * shared * 4] * 3
    kept = tensors["kept/rows"]
    assert len({tuple(r.tolist()) for r in kept}) == len(kept) > 1
    one, two = (result.model(client=int(c)) for c in tensors["kept/clients"][:2])
    own, common = ("hidden.0.weight", "out.weight")[:: 1 if name == "lg-fedavg" else -1]
    assert torch.equal(one.state_dict()[common], two.state_dict()[common])
    assert not torch.equal(one.state_dict()[own], two.state_dict()[own])


def test_any_named_part_can_be_private(quick):
    result = quick("fedper", private="hidden.0.bias+out", rounds=2)
    assert states(result)["kept/rows"].shape[1] == 16 + 170
    with pytest.raises(FedloomError, match="Unknown part"):
        quick("fedper:private=hed")


@pytest.mark.parametrize("name", FAMILY)
def test_before_and_after_adaptation_are_both_told(quick, name):
    result = quick(name, rounds=2, newcomers=2, test_share=0.5, alpha=0.2) if name in META else (
        quick(name, rounds=2, newcomers=2, test_share=0.5)
    )  # fmt: skip
    table = result.clients
    assert set(table["population"]) == {"local", "new"}
    if "meta" in name:
        assert (table["accuracy_before"] != table["accuracy"]).any()
    assert {"micro", "macro", "std", "f1"} <= result.records[-1]["newcomers"].keys()


@pytest.mark.parametrize(("plain", "tuned"), [("fedavg", "fedavg-meta"), ("fedper", "fedper-meta")])
def test_a_method_that_is_tuned_has_the_scores_of_the_plain_one_before(quick, plain, tuned):
    common = {"rounds": 3, "eval_every": 3, "newcomers": 3, "test_share": 0.4, "score_on": "query"}
    before, after = quick(plain, **common), quick(tuned, **common)
    names = ("micro", "macro", "std", "precision", "recall_std", "f1", "loss", "worst10")
    for prefix in ("", "new_"):
        for name in names:
            found = after.summary[f"{prefix}before_{name}"]
            assert found == pytest.approx(before.summary[prefix + name]), name
        assert before.summary[f"{prefix}majority"] == after.summary[f"{prefix}majority"]
    assert after.summary["before_micro"] != after.summary["micro"]
    assert not [name for name in before.summary if "before" in name]


@pytest.mark.parametrize("name", META)
@pytest.mark.parametrize("outer", ["round", "batch"])
def test_adam_steps_meta_methods_alike_on_all_engines_and_kernels(quick, name, outer):
    common = {"optimiser": "adam", "lr": 0.01, "alpha": 0.1, "outer": outer, "batch": 8,
              "rounds": 2, "partition": "dirichlet:1"}  # fmt: skip
    reference = states(quick(name, engine="serial", kernels="torch", **common))
    for other in ({"engine": "serial"}, {"engine": "stacked"}, {"engine": "processes"}):
        for key, value in states(quick(name, **other, **common)).items():
            assert torch.allclose(value, reference[key], atol=2e-5), (other, key)


@pytest.mark.parametrize("name", ["fedmeta-maml", "fedmeta-metasgd", "pfedme"])
@pytest.mark.parametrize("model", ["mlp", "lenet"])
def test_parameters_as_one_tensor_are_the_same_as_by_name(quick, monkeypatch, name, model):
    more = {"engine": "serial", "kernels": "auto", "model": model, "rounds": 2, "clients": 3}
    if model == "lenet":
        more["data_options"], more["data"] = {"shape": "1x16x16", "samples": 90}, "synthetic"
    monkeypatch.setattr(Native, "can_meta", lambda self, steps=1: False)
    names = []
    one = states(quick(name, **more))
    for rule in (MAML, MoreauEnvelope):
        asked = rule.objective

        def objective(self, net, params, data, me, asked=asked):
            names.extend(params)
            return asked(self, net, params, data, me)

        monkeypatch.setattr(rule, "objective", objective)
    for rule in (MAML, MetaSGD, MoreauEnvelope):
        monkeypatch.setattr(rule, "alike", False)
    other = states(quick(name, **more))
    assert WHOLE not in names
    assert len(set(names)) > 1
    for key, value in one.items():
        assert torch.allclose(value, other[key], atol=1e-6), key  # sums in another order


def test_a_subclass_that_looks_at_names_gets_them(quick):
    @dataclass(frozen=True)
    class OnlyHead(MAML):
        def rates(self, params, weights):
            return {name: self.alpha if name.startswith("out") else 0.0 for name in weights}

    rule = method(local=OnlyHead(alpha=0.5))
    ours, torchs = (
        states(quick(rule, kernels=k, engine="serial"))["shared"] for k in ("auto", "torch")
    )
    assert torch.allclose(ours, torchs, atol=1e-6)
    assert not torch.allclose(
        ours, states(quick(method(local=MAML(alpha=0.5))))["shared"], atol=1e-4
    )


def test_a_pass_may_go_over_the_support_part_first():
    first, *rest = SGD().plan(
        {"train": 50, SUPPORT: 10}, Budget(batch=32), np.random.default_rng(0)
    )
    assert sorted(first["train"]) == list(range(10))
    assert [len(step["train"]) for step in rest] == [32, 8]
    assert sorted(np.concatenate([step["train"] for step in rest])) == list(range(10, 50))


def test_the_order_of_a_pass_is_a_setting(quick, row):
    common = {"batch": 8, "rounds": 2}
    mixed, ordered = (row(quick(order=o, **common)) for o in ("mixed", "support-first"))
    assert not torch.equal(mixed, ordered)
    for name, why in (("fedmeta-maml", "MAML plans its steps itself"), ("centralised", "one")):
        with pytest.raises(FedloomError, match=f"order=support-first would do nothing.*{why}"):
            quick(name, order="support-first")


def test_reptile_has_no_outer_steps():
    with pytest.raises(FedloomError, match="rule=reptile has no inner"):
        fedloom.run("fedmeta-maml", rule="reptile", outer="batch")


# -- newcomers ------------------------------------------------------------------------------------


def test_a_fedper_newcomer_gets_the_average_head(quick):
    result = quick("fedper", rounds=4, newcomers=2, participation=1.0)
    kept, shared = states(result)["kept/rows"], states(result)["shared"]
    sizes = result.clients.query("population == 'local'").groupby("client")["train_samples"].first()
    n = torch.tensor(sizes.to_numpy(), dtype=torch.float64)
    head = (n[:, None] * kept).sum(0) / n.sum()
    model = result.newcomer_model(np.zeros((4, 1, 8, 8)), [0, 1, 0, 1])
    flat = torch.cat([p.flatten() for p in model.out.parameters()])
    assert torch.allclose(flat.double(), head, atol=1e-6)
    assert torch.equal(model.hidden[0].weight.flatten(), shared[: 64 * 16])


def test_a_client_that_never_took_part_is_a_newcomer(quick):
    result = quick("fedmeta-per-maml", rounds=1, participation=2, newcomers=2, alpha=0.1)
    table = result.clients.query("population == 'local'").set_index("client")
    took_part = set(states(result)["kept/clients"].tolist())
    assert len(took_part) == 2
    for client, whose in table["part_of"].items():
        assert (whose in took_part) == (client not in took_part)


def test_the_best_part_has_the_lowest_support_loss_while_it_adapts(quick):
    """Each newcomer's choice, worked out again in plain torch: two full steps with every head."""
    result = quick("fedmeta-per-maml", rounds=6, newcomers=5, test_share=0.5, alpha=0.3, lr=0.3,
                   partition="classes:2", participation=1.0, batch="inf",
                   tune_epochs=2)  # fmt: skip
    config = Config(**result.config)
    federation = make_federation(config, load_dataset(config))
    data = federation.dataset
    for client, chosen in (
        result.clients.query("population == 'new' and round == 6").set_index("client")["part_of"]
    ).items():
        at = federation.indices(client, "test-support")
        x, y = result.normalise(data.x[at]), torch.from_numpy(data.y[at])
        losses = np.zeros(6)
        for owner in range(6):
            model = result.model(client=owner)
            for _ in range(2):
                loss = nn.functional.cross_entropy(model(x), y)
                losses[owner] += float(loss.detach()) / 2
                grads = torch.autograd.grad(loss, list(model.parameters()))
                with torch.no_grad():
                    for p, g in zip(model.parameters(), grads, strict=True):
                        p -= 0.3 * g
        assert chosen == int(np.argmin(losses))


def test_votes_of_one_candidate_are_its_predictions(quick):
    """LG-FedAvg with a single client: the vote is that client's model."""
    common = {"clients": 1, "participation": 1.0, "rounds": 3, "newcomers": 1, "test_share": 0.5,
              "partition": "iid", "newcomer_classes": 3}  # fmt: skip
    voted, own = quick("lg-fedavg", **common), quick("fedper", **common)
    columns = ["samples", "correct", "loss"]
    assert np.allclose(voted.clients[columns], own.clients[columns])


@pytest.mark.parametrize("name", FAMILY)
def test_a_newcomer_with_twenty_images_gets_a_usable_model(quick, name):
    from sklearn.datasets import load_digits

    settings = {"alpha": 0.1} if name in META else {}
    settings |= {"rounds": 12, "eval_every": 12, "lr": 0.2 if name == "lg-fedavg" else 0.5}
    result = quick(name, participation=1.0, **settings)
    digits = load_digits()
    some = np.flatnonzero(digits.target < 2)
    x, y = np.rint(digits.images[some][:, None] * 255 / 16), digits.target[some]
    model = result.newcomer_model(x[:20], y[:20])
    right = model(result.normalise(x[20:])).argmax(1).numpy() == y[20:]
    assert right.mean() > (0.5 if name == "lg-fedavg" else 0.8)
    with pytest.raises(FedloomError, match="shape"):
        result.newcomer_model(np.zeros((3, 1, 5, 5)), [0, 1, 2])
    for images, labels, why in (
        (x[:2], [0, 10], "not a label"),
        (x[:2], [0], "one for each"),
        (x[:0], [], "at least one"),
        (x[:2] / 255, [0, 1], "whole numbers"),
        (result.normalise(x[:2]), [0, 1], "whole numbers"),
    ):
        with pytest.raises(FedloomError, match=why):
            result.newcomer_model(images, labels)


def test_nonsense_is_refused():
    with pytest.raises(FedloomError, match="nothing is adapted"):
        Method(mix=Average("body"), newcomer=BestPart())
    with pytest.raises(FedloomError, match="does not learn"):
        Method(adapt=FineTune(LearnedRates()))
    with pytest.raises(FedloomError, match="alpha"):
        MAML(-1.0)
    with pytest.raises(FedloomError, match="inner_steps"):
        MAML(inner_steps=0)


@pytest.mark.parametrize("name", FAMILY)
def test_a_resumed_run_is_the_uninterrupted_one(quick, name):
    settings = {"newcomers": 2, "test_share": 0.4, "eval_every": 2}
    whole = quick(name, rounds=4, **settings)
    quick(name, rounds=2, out="half", **settings)
    again = quick(name, rounds=4, out="half", resume=True, **settings)
    for key, value in states(whole).items():
        assert torch.equal(value, states(again)[key]), key
    assert whole.clients.equals(again.clients)
    assert fedloom.load("half").clients.equals(again.clients)


@pytest.mark.parametrize("name", FAMILY)
def test_a_run_that_is_scored_again_has_the_scores_it_had(quick, name):
    result = quick(name, rounds=3, eval_every=3, newcomers=2, test_share=0.4, participation=0.5)
    before = result.path.joinpath("clients.parquet").read_bytes()
    again = result.score()
    assert again.round == 3
    assert again.clients.equals(result.clients)
    assert again.summary
    assert again.summary.items() <= result.summary.items()
    assert result.path.joinpath("clients.parquet").read_bytes() == before


@pytest.mark.parametrize("name", ["fedavg-meta", "fedper-meta", *META])
def test_more_passes_when_scored_again_are_those_of_a_run_with_more_passes(quick, name):
    common = {"rounds": 2, "eval_every": 2, "newcomers": 2, "test_share": 0.4}
    one, three = (quick(name, tune_epochs=n, out=f"passes-{n}", **common) for n in (1, 3))
    again = one.score(tune_epochs=3)
    assert again.clients.equals(three.clients)
    assert not again.clients.equals(one.clients)
    x, y = np.zeros((4, 1, 8, 8)) + np.arange(4)[:, None, None, None], [0, 1, 0, 1]
    assert same_answers(one.newcomer_model(x, y, tune_epochs=3), three.newcomer_model(x, y))
    assert not same_answers(one.newcomer_model(x, y), three.newcomer_model(x, y))


def same_answers(one, other):
    images = torch.ones(1, 1, 8, 8)
    return torch.equal(one(images), other(images))


def test_what_was_learned_can_not_be_scored_otherwise(quick):
    result = quick("fedmeta-per-maml", rounds=1)
    for setting in ({"alpha": 0.5}, {"private": "head:2"}, {"lr": 1.0}, {"method": "fedavg"},
                    {"model_options": {"hidden": 7}}, {"rounds": 9}):  # fmt: skip
        with pytest.raises(FedloomError, match="can't be scored with another"):
            result.score(**setting, tune_epochs=2)
    with pytest.raises(FedloomError, match="Did you mean 'tune_epochs'"):
        result.score(tune_epoch=2)
    with pytest.raises(FedloomError, match="can't be scored with another device"):
        result.newcomer_model(np.zeros((1, 1, 8, 8)), [0], device="cpu")
    with pytest.raises(FedloomError, match="fedavg has no 'tune_epochs'"):
        quick("fedavg", rounds=1, out="plain").score(tune_epochs=2)


def test_a_class_must_be_known_by_name_to_be_scored_again(quick):
    class Mine(FedPerMeta):
        name = "mine"

    result = quick(Mine(), rounds=1)
    with pytest.raises(FedloomError, match="register"):
        result.score()


def test_a_run_of_arrays_needs_them_to_be_scored_again(quick):
    x = np.random.default_rng(0).normal(size=(80, 6)).astype(np.float32)
    y = (x[:, 0] > 0).astype(int)
    result = quick("fedper", data=(x, y), rounds=1)
    with pytest.raises(FedloomError, match=r"pass data=\.\.\. again"):
        result.score()
    with pytest.raises(FedloomError, match="other data"):
        result.score(data=(x + 1, y))
    with pytest.raises(FedloomError, match="other data"):
        result.score(data=(x[:, ::-1], y))
    assert result.score(data=(x, y)).clients.equals(result.clients)


def test_a_newcomer_may_give_rows_and_names(quick):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 6)).astype(np.float32)
    y = np.where(x[:, 0] > 0, "warm", "cold")
    result = quick("fedper-meta", data=(x, y), rounds=8, lr=0.5, participation=1.0)
    assert result.classes == ("cold", "warm")
    model = result.newcomer_model(x[:20], y[:20])
    right = model(result.normalise(x)).argmax(1).numpy() == (y == "warm")
    assert right.mean() > 0.8
    with pytest.raises(FedloomError, match="'hot' is not a label"):
        result.newcomer_model(x[:1], ["hot"])


def test_those_who_share_nothing_have_nothing_for_a_newcomer(quick):
    with pytest.raises(FedloomError, match="share nothing"):
        quick("local", rounds=1).newcomer_model(np.zeros((1, 1, 8, 8)), [0])


@pytest.mark.parametrize("name", META)
def test_meta_learning_under_batch_norm(quick, name):
    def factory(shape, classes):
        norm = nn.BatchNorm1d(8)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), norm, nn.Linear(8, classes))

    result = quick(name, model=factory, rounds=2, alpha=0.1)
    model = result.model(client=0, factory=factory)
    assert model[2].num_batches_tracked > 0
    assert not torch.equal(model[2].running_mean, torch.zeros(8))
    with pytest.raises(FedloomError, match="can't be stacked"):
        quick(name, model=factory, rounds=1, engine="stacked")


def test_a_model_that_vmap_does_not_know_is_refused_in_a_sentence(quick):
    class Recurrent(nn.Module):
        def __init__(self, classes):
            super().__init__()
            self.gru, self.out = nn.GRU(8, 4, batch_first=True), nn.Linear(4, classes)

        def forward(self, x):
            return self.out(self.gru(x[:, 0])[0][:, -1])

    with pytest.raises(FedloomError, match="can't be stacked"):
        quick("local", model=lambda shape, classes: Recurrent(classes), rounds=1, engine="stacked")


def test_an_epsilon_without_reptile_would_do_nothing(quick):
    with pytest.raises(FedloomError, match="for rule=reptile"):
        quick("fedmeta-maml:epsilon=0.5")
