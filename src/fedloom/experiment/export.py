"""Export a trained model: a plain state_dict, TorchScript or ONNX.

What a model needs besides its weights (class names, normalisation, columns) is in a .json file next
to it. TorchScript and ONNX take data in its own units: they normalise it themselves.
"""

from __future__ import annotations

import importlib.util
import json
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from torch import Tensor, nn

from fedloom.data.images import laid_out
from fedloom.errors import FedloomError
from fedloom.files import atomic_file
from fedloom.tasks import Classification, Regression, task_of

if TYPE_CHECKING:
    from fedloom.experiment.result import Result
    from fedloom.models import Factory

FORMATS = {".safetensors": "state_dict", ".pt": "state_dict", ".pth": "state_dict",
           ".ts": "torchscript", ".onnx": "onnx"}  # fmt: skip
EACH = "{client}"  # in a path: a file for every client


class Deployed(nn.Module):
    """A model that takes data in its own units, and answers values in theirs."""

    def __init__(self, model: nn.Module, about: dict[str, Any]) -> None:
        super().__init__()
        self.model = model
        self.tokens = bool(about.get("tokens"))
        shape = tuple(about["shape"])
        unit = float(about["unit"])
        # (x / unit - mean) / std as one product and sum
        mean, std = (torch.from_numpy(laid_out(about[key], shape)) for key in ("mean", "std"))
        self.scale: Tensor
        self.shift: Tensor
        self.register_buffer("scale", (1 / (unit * std)).float())
        self.register_buffer("shift", (-mean / std).float())
        # values to predict, in their own units: output · spread + centre
        of = task_of(about.get("task", Classification(about["classes"]).plain()))
        self.spread: Tensor | None
        self.centre: Tensor | None
        spread, centre = (of.std_of, of.mean_of) if isinstance(of, Regression) else ((), ())
        self.register_buffer("spread", torch.tensor(spread) if spread else None)
        self.register_buffer("centre", torch.tensor(centre) if centre else None)

    def forward(self, x: Tensor) -> Tensor:
        fed = x.to(torch.int64) if self.tokens else x.to(torch.float32) * self.scale + self.shift
        out: Tensor = self.model(fed)
        if self.spread is not None and self.centre is not None:
            out = out * self.spread + self.centre
        return out


def export(
    result: Result, path: str | Path, client: int | str | None, factory: Factory | None
) -> list[Path]:
    """Write the shared model, a client's, or (with {client} in the path) those of all."""
    form = FORMATS.get(Path(path).suffix)
    if form is None:
        raise FedloomError(
            f"'{path}' must end in .safetensors or .pt (a state_dict), .ts (TorchScript) or .onnx."
        )
    if form == "onnx" and importlib.util.find_spec("onnx") is None:
        raise FedloomError(
            "To write ONNX, install its extra: pip install 'fedloom[onnx]'. TorchScript (.ts) "
            "needs nothing more."
        )
    if EACH not in str(path):
        return [_write(result, Path(path), form, client, factory)]
    if client is not None:
        raise FedloomError(f"'{path}' asks for a file for every client, so client can't be given.")
    names = [re.sub(r"[^\w.=-]+", "-", result.called(c)) for c in range(result.config["clients"])]
    if len(set(names)) < len(names):
        names = [f"{number}-{name}" for number, name in enumerate(names)]
    return [
        _write(result, Path(str(path).replace(EACH, name)), form, number, factory)
        for number, name in enumerate(names)
    ]


def _write(
    result: Result, path: Path, form: str, client: int | str | None, factory: Factory | None
) -> Path:
    model, about = result.model(client, factory), result.about
    keys = ("task", "shape", "mean", "std", "unit", "tokens", "model", "model_options", "round")
    described = {
        "classes": about["labels"],
        **{key: about.get(key) for key in keys},
        "features": about.get("features", []),
        "normalises": form != "state_dict",
        "run": str(result.path),
        "client": client,
    }
    text = json.dumps(described, indent=1, ensure_ascii=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as part:
        if form == "state_dict":
            state = {name: value.clone() for name, value in model.state_dict().items()}
            if path.suffix == ".safetensors":
                safetensors.torch.save_file(state, part, metadata={"fedloom": text})
            else:
                torch.save(state, part)
        else:
            _traced(Deployed(model, about).eval(), about, form, part, text)
    beside = path.with_name(f"{path.name}.json")
    with atomic_file(beside) as part:
        part.write_text(text, encoding="utf-8")
    return path


def _traced(model: Deployed, about: dict[str, Any], form: str, file: Path, text: str) -> None:
    example = torch.zeros(
        (2, *about["shape"]), dtype=torch.int64 if model.tokens else torch.float32
    )
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tracing, which is all that is asked for
        if form == "torchscript":
            made = torch.jit.trace(model, example)
            torch.jit.save(made, str(file), _extra_files={"about.json": text})
            return
        torch.onnx.export(
            model, (example,), str(file), input_names=["x"], output_names=["logits"],
            dynamic_axes={"x": {0: "batch"}, "logits": {0: "batch"}}, dynamo=False,
        )  # fmt: skip
    import onnx

    stored = onnx.load(str(file))
    for key, value in json.loads(text).items():
        entry = stored.metadata_props.add()
        entry.key, entry.value = key, json.dumps(value, ensure_ascii=False)
    onnx.save(stored, str(file))
