"""Whatever is given for a setting, it is taken as it was meant or refused in a sentence."""

import contextlib
import datetime
import math

import numpy as np
import pytest

import fedloom
from fedloom.errors import FedloomError
from fedloom.experiment.config import make_config, parse_settings, read_config
from fedloom.experiment.settings import Config
from fedloom.local import Schedule
from fedloom.methods.registry import methods

#: as they come from a command line or a YAML file
WORDS = [
    "", "true", "no", "[1]", "[]", "{}", "{a: 1}", ".nan", "inf", "-.inf", "-1", "0", "1e400",
    "1e-320", "9" * 25, "9" * 5000, "~", "x", "-", "2001-99-99", "2001-01-01", "!!binary aGk=",
    "&a [*a]", "&a {x: *a}", "[[1, true]]", "!!set {a}", "!!int x", "!!timestamp x", "0x", "é", "@",
]  # fmt: skip
#: as they come from Python
OBJECTS = [
    True, None, math.nan, math.inf, -math.inf, 10**400, -(10**5000), (), (1, 2), {1}, b"x",
    object(), len, int, np.float64("nan"), np.int64(3), np.True_, np.array([1, 2]),
    np.array("none"), 1 + 2j, datetime.date(2001, 1, 1), "\x00", "x" * 100_000, "9" * 5000, Config,
]  # fmt: skip


def fields():
    """Every setting of a run, and every option of a method (those that share one: once)."""
    avg = methods()["fedavg"]
    out = {("run", name): (name, avg, field) for name, field in Config.model_fields.items()}
    for cls in methods().values():
        for name, field in cls.model_fields.items():
            out.setdefault((name, repr(field)), (name, cls, field))
    return list(out.values())


def parsed():
    """The values that those words stand for; some stand for none."""
    out = []
    for word in WORDS:
        with contextlib.suppress(FedloomError):
            out.append(parse_settings([f"x={word}"])["x"])
    return out


@pytest.mark.parametrize("kind", ["words", "objects"])
def test_any_value_of_any_setting_is_taken_or_refused_in_a_sentence(kind):
    values = parsed() if kind == "words" else OBJECTS
    taken, refused = 0, []
    for name, cls, _ in fields():
        for value in values:
            try:
                make_config({name: value}, cls)[0].dump()
                taken += 1
            except FedloomError as e:
                refused.append(str(e))
    assert taken > 50
    assert len(refused) > 1000
    assert all(20 < len(sentence) < 2000 for sentence in refused)


def numbers():
    """The settings that are numbers, by their names."""
    plain = {int, float, int | None, float | None}
    return [(name, cls) for name, cls, field in fields() if field.annotation in plain]


def test_true_and_false_are_no_numbers(tmp_path):
    file = tmp_path / "c.yaml"
    assert len(numbers()) > 40
    for name, cls in [*numbers(), ("batch", methods()["fedavg"])]:
        file.write_text(f"{name}: yes")
        for given in ({name: True}, {name: False}, {name: np.True_}, read_config(file)):
            with pytest.raises(FedloomError):
                make_config(given, cls)
    with pytest.raises(FedloomError, match="true and false"):
        make_config({"levels": [0.5, True]}, methods()["fjord"])


def test_numbers_are_finite():
    for name, cls in numbers():
        for value in (math.nan, math.inf, -math.inf):
            if (name, value) != ("temperature", math.inf):  # FedDSE's: any channels alike
                with pytest.raises(FedloomError):
                    make_config({name: value}, cls)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"participation": "inf"}, "finite number"),
        ({"preset": [1]}, "no presets"),
        ({"clients": True}, "true and false"),
        ({"rounds": 10**400}, "a number of 400 digits"),
        ({"data": "x" * 5000}, r"more than 4,096 characters"),
        ({"params": False}, "by name"),
        ({"partition": np.arange(3)}, "valid string"),
        ({"topology": np.arange(3)}, "valid string"),
        ({"lr_schedule": "cosine:inf"}, "not a learning-rate schedule"),
    ],
)
def test_wrong_values_are_explained(settings, why):
    with pytest.raises(FedloomError, match=why):
        make_config(settings, methods()["fedavg"])


def test_explicit_settings_override_a_preset_and_options_are_merged():
    given = {"preset": "source", "lr": 0.5, "by_class": False, "model_options": {"channels": 8}}
    config, options = make_config(given, methods()["heterofl"])
    assert (config.lr, config.epochs, config.capacities) == (0.5, 2, "low-quality")
    assert config.model_options == {"norm": "static", "channels": 8}
    assert (options.by_class, options.mask) == (False, "inf")


def test_a_preset_that_is_no_word_is_refused():
    with pytest.raises(FedloomError, match=r"Unknown preset of fjord '\[1\]'"):
        make_config({"preset": [1]}, methods()["fjord"])


@pytest.mark.parametrize(
    "spec", ["cosine:inf", "cosine:nan", "step:inf,0.5", "step:2,inf", "exp:inf"]
)
def test_schedules_are_finite(spec):
    with pytest.raises(FedloomError, match="not a learning-rate schedule"):
        Schedule(spec)


@pytest.mark.parametrize("text", ["lr: 2001-99-99", "lr: !!int x", "lr: " + "9" * 5000])
def test_yaml_that_no_constructor_takes_is_no_yaml(tmp_path, text):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(FedloomError, match="not valid YAML"):
        read_config(tmp_path / "c.yaml")
    with pytest.raises(FedloomError, match="not valid YAML"):
        parse_settings([text.replace(": ", "=")])


@pytest.mark.parametrize(
    ("methods", "more", "why"),
    [
        ([("fedprox", 0.1)], {}, "is not a method"),
        ([int], {}, "is not a method"),
        ("fedavg", {}, "as a list"),
        (5, {}, "as a list"),
        (("fedavg", "local"), {"seeds": True}, "seeds=True"),
        (("fedavg", "local"), {"seeds": 10**9}, "from 1 to 10,000"),
        (("fedavg", "local"), {"seed": "x"}, "seed='x'"),
        (("fedavg", "local"), {"seed": -1}, "seed=-1"),
    ],
)
def test_a_comparison_of_what_can_not_be_is_refused(in_tmp, methods, more, why):
    with pytest.raises(FedloomError, match=why):
        fedloom.compare(methods, **more)
    assert not list(in_tmp.iterdir())


@pytest.mark.parametrize("spec", ["dirichlet:1e-320", "quantity:lognormal,sigma=1e9"])
def test_a_partition_beyond_what_floats_can_hold_is_refused(quick, spec):
    with pytest.raises(FedloomError, match="too extreme"):
        quick(partition=spec)
