"""Runs that start from given weights, and models that leave for elsewhere."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import safetensors.torch
import torch
from torch import nn

import fedloom
from fedloom.cli import main
from fedloom.data.catalog import load
from fedloom.experiment.begin import weights


def test_a_run_starts_from_what_it_is_given(quick, row):
    """At a learning rate that changes nothing, the model is the one it began with."""
    first = quick(rounds=2, out="first")
    state = first.model().state_dict()
    safetensors.torch.save_file(state, "w.safetensors")
    torch.save(state, "w.pt")
    for i, init in enumerate((state, "w.safetensors")):
        still = quick(init=init, lr=1e-30, rounds=1, seed=7, out=f"r{i}")
        assert torch.equal(row(still), row(first))
    assert not torch.equal(row(first), row(quick(lr=1e-30, rounds=1, seed=7, out="random")))
    for init in (first.model(), first, "first", Path("first"), "w.pt", Path("w.safetensors")):
        found = weights(init, "auto")
        assert all(torch.equal(found[name], value) for name, value in state.items())


def test_all_engines_begin_with_the_same(quick, row):
    quick(rounds=2, out="first")
    serial, pool = (
        quick(init="first", rounds=1, engine=engine, workers=2, out=engine)
        for engine in ("serial", "processes")
    )
    assert torch.equal(row(serial), row(pool))


def test_a_run_that_began_with_an_object_goes_on_and_is_scored_without_it(quick):
    state = quick(rounds=1, out="first").model().state_dict()
    run = quick(init=state, rounds=1, out="r")
    assert run.config["init"] == "custom"
    assert run.score().summary["micro"] == run.summary["micro"]
    assert len(fedloom.run(out="r", rounds=2, resume=True).rounds) == 2


def test_weights_of_another_model_are_refused(quick):
    state = quick(rounds=1, out="first").model().state_dict()
    name = next(iter(state))
    for wrong, why in (
        ({k: v for k, v in state.items() if k != name}, f"has no '{name}'"),
        ({**state, "more": torch.zeros(1)}, "has 'more', which this model does not have"),
        ({**state, name: torch.zeros(3)}, r"of shape \(3,\), and this model of"),
        ({**state, name: state[name] * float("nan")}, "NaN or infinite"),
        ({name: 1.0}, "no state_dict"),
        (1.0, "not float"),
        ("none.safetensors", "no such file or run"),
    ):
        with pytest.raises(fedloom.FedloomError, match=why):
            quick(init=wrong, out="bad")
    file = next(Path("first/checkpoints").glob("*.safetensors"))
    with pytest.raises(fedloom.FedloomError, match="Name the run's directory"):
        quick(init=str(file), out="bad")
    with pytest.raises(fedloom.FedloomError, match="init would do nothing"):
        fedloom.run(fork="first", init="first", rounds=2, out="bad")


def table():
    rng = np.random.default_rng(0)
    a, kind = 1e3 * rng.normal(size=60), rng.choice(["x", "y"], 60)
    label = np.where(a + 500 * (kind == "x") > 0, "up", "down")
    return pd.DataFrame({"who": np.arange(60) % 3, "a": a, "kind": kind, "label": label})


@pytest.fixture
def run(quick):
    return quick(data=table(), partition="by:who", clients=None, participation=1.0, rounds=2)


def test_an_exported_state_dict_is_the_model(run):
    for file in ("m.safetensors", "m.pt"):
        (written,) = run.export(file)
        read = safetensors.torch.load_file if file.endswith("s") else torch.load
        state = read(written)
        assert all(torch.equal(state[k], v) for k, v in run.model().state_dict().items())
        about = json.loads(Path(f"{file}.json").read_text())
        assert about["classes"] == ["down", "up"]
        assert about["features"] == ["a", "kind=x", "kind=y"]
        assert (about["mean"], about["normalises"]) == (run.about["mean"], False)


def test_torchscript_takes_data_in_its_own_units(run):
    (file,) = run.export("deep/m.ts")
    extra = {"about.json": ""}
    loaded = torch.jit.load(str(file), _extra_files=extra)
    assert json.loads(extra["about.json"])["classes"] == ["down", "up"]
    x = load(table(), by="who").x
    with torch.no_grad():
        ours = run.model()(run.normalise(x))
        torch.testing.assert_close(loaded(torch.from_numpy(x)), ours, atol=1e-5, rtol=1e-5)
        one = torch.from_numpy(x[:1])
        torch.testing.assert_close(loaded(one), ours[:1], atol=1e-5, rtol=1e-5)


def test_bytes_and_tokens_are_exported_too(quick):
    run = quick(rounds=1)
    images = load("digits").x_test[:5]
    (file,) = run.export("digits.ts")
    with torch.no_grad():
        got = torch.jit.load(str(file))(torch.from_numpy(images))
        torch.testing.assert_close(got, run.model()(run.normalise(images)), atol=1e-5, rtol=1e-5)

    def words(shape, classes):
        return nn.Sequential(nn.Flatten(), nn.Embedding(9, 4), nn.Flatten(),
                             nn.Linear(4 * shape[2], classes))  # fmt: skip

    x = np.random.default_rng(0).integers(0, 9, (60, 5))
    tokens = quick(data=(x, x[:, 0] > 4), model=words, rounds=1, out="tokens")
    (file,) = tokens.export("tokens.ts", factory=words)
    with torch.no_grad():
        got = torch.jit.load(str(file))(torch.from_numpy(x))
        assert torch.equal(got, tokens.model(factory=words)(tokens.normalise(x)))


def test_every_client_has_a_file_of_its_own(quick, monkeypatch, capsys):
    local = quick("local", data=table(), partition="by:who", clients=None, rounds=1,
                  participation=1.0, out="local")  # fmt: skip
    files = local.export("all/{client}.pt")
    assert [file.name for file in files] == ["0.pt", "1.pt", "2.pt"]
    name = next(iter(torch.load(files[0])))
    assert not torch.equal(torch.load(files[0])[name], torch.load(files[1])[name])
    words = ["fedloom", "export", "local", "--client", "1", "--out", "one.pt"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit, match="0"):
        main()
    assert "Model: one.pt" in capsys.readouterr().out
    assert torch.equal(torch.load("one.pt")[name], torch.load(files[1])[name])
    with pytest.raises(fedloom.FedloomError, match=r"name one, for example client=0\."):
        local.export("one.pt")


def test_the_command_line_says_how_to_name_a_client(quick, call):
    farms = {f"Hof {name}": part for name, part in zip("AB", (table(), table()), strict=True)}
    quick("local", data=farms, clients=None, partition=None, rounds=1, participation=1.0, out="own")
    code, said = call("export", "own", "--out", "models/farm.ts")
    assert code == 2
    assert "name one (--client 'Hof A'), or write all of them (--out 'models/{client}.ts')" in said
    assert call("export", "own", "--client", "Hof A", "--out", "farm.pt")[0] == 0
    assert call("export", "own", "--out", "models/{client}.pt")[0] == 0


def test_what_cannot_be_exported_is_said(run):
    with pytest.raises(fedloom.FedloomError, match=r"must end in \.safetensors"):
        run.export("m.bin")
    with pytest.raises(fedloom.FedloomError, match="client can't be given"):
        run.export("{client}.pt", client=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(fedloom.FedloomError, match=r"fedloom\[onnx\]"):
            run.export("m.onnx")
    assert not Path("m.onnx").exists()


def onnx_outputs(file, x):
    """What ONNX's own runtime makes of data in its own units."""
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(["logits"], {"x": x})[0])


def test_onnx_has_normalisation_and_class_names_inside(run):
    onnx = pytest.importorskip("onnx")
    (file,) = run.export("deep/m.onnx")
    onnx.checker.check_model(str(file), full_check=True)
    stored = {p.key: json.loads(p.value) for p in onnx.load(str(file)).metadata_props}
    assert stored["classes"] == ["down", "up"]
    assert stored["features"] == ["a", "kind=x", "kind=y"]
    x = load(table(), by="who").x.astype(np.float32)
    ours = run.model()(run.normalise(x)).detach()
    for count in (1, 2, len(x)):  # any number at once
        got = onnx_outputs(file, x[:count])
        torch.testing.assert_close(got, ours[:count], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("model", ["mlp", "conv4"])
def test_images_go_into_onnx_as_they_are(quick, model):
    small = {"mlp": {"hidden": [8]}, "conv4": {"channels": [2, 2, 2, 2], "norm": "group"}}
    run = quick(model=model, model_options=small.get(model, {}), rounds=1, steps=1,
                partition="dirichlet:1", eval_clients=1)  # fmt: skip
    images = load("digits").x_test[:5]
    (file,) = run.export("m.onnx")
    ours = run.model()(run.normalise(images)).detach()
    got = onnx_outputs(file, images.astype(np.float32))
    torch.testing.assert_close(got, ours, atol=1e-4, rtol=1e-4)
