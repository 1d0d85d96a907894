"""From what the user gave, in whatever form, to checked settings.

Unknown names are refused with the nearest valid one; values that can't be are explained.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from fedloom.errors import FedloomError, unknown
from fedloom.experiment.concern import idle_draw
from fedloom.experiment.settings import BadYaml, Config, parse_yaml
from fedloom.method import Method
from fedloom.methods.registry import MethodOptions, configure, without_nones
from fedloom.options import quoted, wrong
from fedloom.returned import returned

VALIDATION_SHARE = 0.1  # of a client's training data, where a method validates


def make_config(
    settings: Mapping[str, Any], method: type[MethodOptions], *, lenient: bool = False
) -> tuple[Config, MethodOptions]:
    """The checked config and the configured method.

    A setting that is not one of the config's may be one of the method's own. What the method's
    definition fixes can't be set otherwise, except (`lenient`) in a comparison, where the same
    settings go to several methods and each takes what concerns it.
    """
    layers = (method.defaults, _preset(method, settings.get("preset")), settings)
    given = merge(*(_grouped(layer, method) for layer in layers))
    params = given.pop("params")
    given = without_nones(Config, given)
    if given.get("topology") is not None and not any(
        "participation" in layer for layer in layers[1:]
    ):
        given["participation"] = 1.0  # among nodes, those that do not take part meet nobody
    for key in given:
        if key not in Config.model_fields:
            raise FedloomError(
                f"{unknown('setting', key, [*Config.model_fields, *method.model_fields])} Options "
                f"of a data set or model are written data_options.{key} or model_options.{key}."
            )
    for key, value in method.fixed.items():
        if key in given and not lenient and normal(key, given[key]) != value:
            raise FedloomError(
                f"{method.name} fixes {key} to {value} by definition, so {key}={given[key]} "
                f"would do nothing. Leave {key} out."
            )
        given[key] = value
    options = configure(method, params)
    try:
        config = Config(**given, params=options.model_dump())
    except ValidationError as e:
        raise _sentence(e) from None
    if config.participants > config.clients:
        raise FedloomError(
            f"participation={config.participation:g} asks for more clients than there are "
            f"({config.clients}). Give a fraction up to 1, or a number up to {config.clients}."
        )
    method_ = returned(options, "build", options.build(), Method)
    resolved: dict[str, Any] = {"score_on": method_.adapt.on(config.score_on).score_on}
    if "draw" not in settings and config.draw != "uniform" and idle_draw(config, method_):
        resolved["draw"] = "uniform"  # a preset's, where the run's own settings leave no choice
    if "participation" not in given and config.participants < method_.mix.fewest:
        resolved["participation"] = float(min(method_.mix.fewest, config.clients))
    if config.validation_share is None:
        validates = "validation" in (method_.mix.validates, config.score_on)
        resolved["validation_share"] = VALIDATION_SHARE if validates else 0.0
    elif config.score_on == "validation" and not config.validation_share:
        raise FedloomError(
            "score_on=validation leaves nothing to score on: validation_share is 0. Give a share, "
            "such as --validation-share 0.1."
        )
    return config.model_copy(update=resolved), options


def agreed(configs: Iterable[Config]) -> dict[str, Any]:
    """Settings that runs must share to be compared on the same samples: where one adapts to the
    support part, all are scored without it; where one validates, nobody trains on that part."""
    found, out = list(configs), dict[str, Any]()
    if any(config.score_on == "query" for config in found):
        out["score_on"] = "query"
    validated = max((config.validation_share or 0.0 for config in found), default=0.0)
    if validated:
        out["validation_share"] = validated
    return out


def _grouped(settings: Mapping[str, Any], method: type[MethodOptions]) -> dict[str, Any]:
    """The method's own options all under `params`, where some may be already."""
    params = settings.get("params")
    params = {} if params is None else params
    if not isinstance(params, Mapping):
        raise FedloomError(
            f"params={quoted(params)} is not valid: give options of the method by name."
        )
    own = {
        key: value
        for key, value in settings.items()
        if key in method.model_fields and key not in Config.model_fields
    }
    rest = {key: value for key, value in settings.items() if key not in own}
    return {**rest, "params": {**params, **own}}


def _preset(method: type[MethodOptions], name: Any) -> Mapping[str, Any]:
    if name is None:
        return {}
    if not method.presets:
        raise FedloomError(
            f"{method.name} has no presets, so preset={quoted(name)} would do nothing."
        )
    if not isinstance(name, str) or name not in method.presets:
        given = name if isinstance(name, str) and len(name) < 80 else quoted(name)
        raise unknown(f"preset of {method.name}", given, method.presets)
    return method.presets[name]


def normal(key: str, value: Any) -> Any:
    """A single setting, checked, in the form that a config holds."""
    try:
        return getattr(Config(**{key: value}), key)
    except ValidationError as e:
        raise _sentence(e) from None


def _sentence(error: ValidationError) -> FedloomError:
    name, value, why = wrong(error)
    about = Config.model_fields[name].description if name in Config.model_fields else ""
    return FedloomError(f"{name}={value} is not valid: {why} ({name}: {about}).")


class _Strict(yaml.SafeLoader):
    """YAML without a key that is given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for name in names:
            if names.count(name) > 1:
                raise yaml.YAMLError(f"'{name}' is given twice")
        return super().construct_mapping(node, deep)


def read_config(path: Path) -> dict[str, Any]:
    """Settings from a YAML file."""
    try:
        content = parse_yaml(path.read_text(encoding="utf-8"), _Strict)
    except FileNotFoundError:
        raise FedloomError(f"There is no config file '{path}'.") from None
    except (OSError, UnicodeDecodeError) as e:
        raise FedloomError(f"The config file '{path}' can't be read: {e}.") from None
    except BadYaml as e:
        raise FedloomError(f"'{path}' is not valid YAML: {e}.") from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise FedloomError(f"'{path}' must hold settings as 'key: value' lines.")
    return content


def parse_settings(pairs: Iterable[str]) -> dict[str, Any]:
    """`key=value` words; values are read as YAML, dots lead into options.

    >>> parse_settings(["lr=0.1", "model_options.norm=group", "mu=1"])
    {'lr': 0.1, 'model_options': {'norm': 'group'}, 'mu': 1}
    """
    out: dict[str, Any] = {}
    for pair in pairs:
        key, sign, text = pair.partition("=")
        if not sign or not key.strip():
            raise FedloomError(f"--set takes key=value, not '{pair}'.")
        try:
            value = _number(parse_yaml(text))
        except BadYaml:
            raise FedloomError(f"The value in --set {quoted(pair)} is not valid YAML.") from None
        *path, last = key.strip().split(".")
        at = out
        for step in path:
            at = at.setdefault(step, {})
            if not isinstance(at, dict):
                raise FedloomError(f"--set {pair}: '{step}' has a value already.")
        at[last] = value
    return out


def as_words(settings: Mapping[str, Any], before: str = "") -> list[str]:
    """Settings as `parse_settings` reads them.

    >>> as_words({"lr": 0.1, "model_options": {"hidden": [8]}, "partition": "iid"})
    ['lr=0.1', 'model_options.hidden=[8]', 'partition=iid']
    """
    out = []
    for key, value in settings.items():
        if isinstance(value, Mapping):
            out += as_words(value, f"{before}{key}.")
        elif value is not None:
            text = yaml.safe_dump(value, default_flow_style=True).strip().removesuffix("\n...")
            out.append(f"{before}{key}={value if isinstance(value, str) else text}")
    return out


def _number(value: Any) -> Any:
    """YAML 1.1 reads 1e-5 as text; people mean the number."""
    if isinstance(value, str):
        try:
            return float(value) if "e" in value.lower() and value[:1] in "+-.0123456789" else value
        except ValueError:
            return value
    return value


def merge(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Later settings over earlier ones; the option groups are merged, not replaced."""
    out: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            if isinstance(value, Mapping) and isinstance(out.get(key), Mapping):
                out[key] = {**out[key], **value}
            else:
                out[key] = dict(value) if isinstance(value, Mapping) else value
    return out
