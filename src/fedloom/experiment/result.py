"""The results of a run, as tables, pictures and a model. Reads the run store and nothing else."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from fedloom.errors import FedloomError, nearest
from fedloom.experiment.folder import REPORT
from fedloom.experiment.plugins import is_file, method_class, model_factory
from fedloom.experiment.store import RunStore
from fedloom.layout import Columns, Layout
from fedloom.models import Factory, build
from fedloom.models.inputs import looks_up
from fedloom.models.norm import has_measured_norm, settle
from fedloom.population import Population
from fedloom.tasks import Classification, Measure, Regression, kind, task_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor, nn

    from fedloom.experiment.rescore import Scores
    from fedloom.tasks import Loss

_PREFIX = {"test": "test_", "clients": "", "newcomers": "new_"}
SCORED_ON = {
    "test": "all of their test data",
    "query": "the query part of their test data",
    "validation": "their validation data",
    "auto": "the part that the method declares",
}


class NoSharedModel(FedloomError):
    """The shared model of a run was asked for whose clients have their own; `client` has one."""

    def __init__(self, client: int) -> None:
        super().__init__(
            f"Clients of this method keep their own models: name one, for example client={client}."
        )
        self.client = client


class Result:
    """A run, finished or not.

    `rounds`: one row per round; scores (NaN where the round was not scored) are `test_accuracy`,
    `test_loss`, and over clients `micro`, `macro`, `std`, `worst10`, `best10`, `loss`, `precision`,
    `recall`, `f1`, the same with `new_` for newcomers; other tasks have other measures in their
    place (`measures`), so that `macro` of a regression is a squared error; `skipped` is the number
    of messages that were left out. `clients`: one row per scored client and evaluation. Where the
    data names its clients, tables have the names beside the numbers.
    """

    def __init__(self, path: str | Path) -> None:
        self.store = RunStore.open(Path(path))
        self.path = self.store.path

    def __repr__(self) -> str:
        done = self.summary
        return f"Result({str(self.path)!r}, method={done['method']}, rounds={done['rounds']})"

    @cached_property
    def config(self) -> dict[str, Any]:
        return self.store.config()

    @cached_property
    def options(self) -> dict[str, Any]:
        """The options of the method that are not its defaults (of one from a file: all)."""
        given = dict(self.config.get("params") or {})
        if is_file(self.config["method"]):
            return given
        try:
            known = method_class(self.config["method"])().model_dump()
        except FedloomError:  # a method that was registered in another process
            return given
        return {k: v for k, v in given.items() if k not in known or known[k] != v}

    @cached_property
    def about(self) -> dict[str, Any]:
        """What the last checkpoint says of its model and data."""
        return self.store.checkpoint()[1]

    @cached_property
    def task(self) -> str:
        """What was learned, by name: what `auto` stood for."""
        found = (record["task"] for record in reversed(self.records) if "task" in record)
        return next(found, Classification.name)

    @property
    def measures(self) -> tuple[Measure, ...]:
        """What the task is scored by; the first is what `micro`, `macro`, `std`, `worst10` and
        `best10` are of."""
        return kind(self.task).measures

    def values(self, outputs: Tensor) -> Tensor:
        """What the model of a regression answers, in the units of the values."""
        plain = self.about.get("task", {"name": self.task})
        if plain["name"] != Regression.name:
            raise FedloomError(f"Only a regression answers values; this is {self.task}.")
        found = task_of(plain)
        assert isinstance(found, Regression)
        return found.values(outputs)

    @property
    def scored_on(self) -> str | None:
        """The part of clients' test data that their scores are of, in words; None for a run from
        before that was a setting."""
        return SCORED_ON.get(self.config.get("score_on", ""))

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        return self.store.rounds()

    @cached_property
    def rounds(self) -> pd.DataFrame:
        return pd.DataFrame([flat(record) for record in self.records])

    @cached_property
    def clients(self) -> pd.DataFrame:
        return self.store.clients()

    @cached_property
    def names(self) -> tuple[str, ...]:
        """What the clients are called in the data, in the order of their numbers; empty where they
        have numbers only."""
        return self.store.names()

    def called(self, client: int) -> str:
        """The name of a client, or its number where it has none."""
        return self.names[client] if client < len(self.names) else str(client)

    def _with_names(self, table: pd.DataFrame) -> pd.DataFrame:
        """A table with the names of its clients beside their numbers."""
        if self.names:
            for column, name in (("client", "name"), ("partner", "partner_name")):
                if column in table:
                    at = int(table.columns.get_loc(column)) + 1  # type: ignore[arg-type]
                    table.insert(at, name, [self.called(int(c)) for c in table[column]])
        return table

    @property
    def evaluations(self) -> pd.DataFrame:
        """The rounds that were scored."""
        return (
            self.rounds[self.rounds["eval_seconds"].notna()]
            if "eval_seconds" in self.rounds
            else self.rounds.iloc[:0]
        )

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The last scores and the total cost."""
        out: dict[str, Any] = {
            "method": self.config["method"],
            "seed": self.config["seed"],
            "rounds": len(self.records),
            "rounds_asked": self.config["rounds"],
        }
        scored = self.evaluations
        if len(scored):
            last = scored.iloc[-1]
            names = [n for n in scored.columns if n not in _COST and pd.notna(last[n])]
            out |= {name: last[name].item() for name in names if np.isscalar(last[name])}
        if self.records:
            for name in ("bytes_up", "bytes_down", "macs", "seconds"):
                out[name] = sum(record[name] for record in self.records)
            out["skipped"] = int(self.rounds["skipped"].sum())
            out["bytes"] = out["bytes_up"] + out["bytes_down"]
            out["server_seconds"] = sum(record["profile"]["mix"] for record in self.records)
            out["eval_seconds"] = float(scored["eval_seconds"].sum()) if len(scored) else 0.0
            out["peak_memory"] = int(self.rounds["peak_memory"].max())
        return out

    @property
    def metrics(self) -> list[str]:
        """Columns of `rounds` that the method reports of itself (`Mixed.metrics`)."""
        names = dict.fromkeys(name for record in self.records for name in record)
        known = {*_OF_RUNNER, *_NESTED, *_PREFIX}
        numbers = self.rounds.select_dtypes("number") if names else self.rounds
        return [name for name in names if name not in known and name in numbers]

    @property
    def profile(self) -> pd.DataFrame:
        """Where the time went: seconds per phase and round. `select`, `data` and `train` are summed
        over workers; `store` is what writing the round before took."""
        rows = [{**r["profile"], "score": r.get("eval_seconds", 0.0)} for r in self.records]
        return pd.DataFrame(rows, index=[r["round"] for r in self.records]).fillna(0.0)

    @property
    def kernels(self) -> str:
        """Which kernels trained the clients in the last round, and why: fedloom's own or
        torch's."""
        return self.records[-1].get("kernels", "torch") if self.records else "torch"

    @property
    def skipped(self) -> pd.DataFrame:
        """Messages that were left out (`on_bad=skip`): round, client and why."""
        rows = [
            (record["round"], int(client), reason)
            for record in self.records
            for client, reason in record.get("skipped", {}).items()
        ]
        return self._with_names(pd.DataFrame(rows, columns=["round", "client", "reason"]))

    @property
    def idle_rounds(self) -> list[int]:
        """Rounds of which all messages were left out, so that nothing was combined."""
        found = ((r["round"], r.get("messages", {"left": 1})["left"]) for r in self.records)
        return [number for number, left in found if not left]

    @property
    def devices(self) -> pd.DataFrame:
        """Cost per round for devices of each capacity (`took_part` counts their rounds), the score
        of the model on their data, and that of the sub-model that fits them (`capacity_accuracy`,
        or another measure); empty if all clients have full capacity."""
        rounds = [record["devices"] for record in self.records if "devices" in record]
        last: dict[str, Any] = next(
            (r["clients"] for r in reversed(self.records) if "clients" in r), {}
        )
        rows = {}
        for capacity in sorted({c for found in rounds for c in found}, key=float, reverse=True):
            there = [found[capacity] for found in rounds if capacity in found]
            counts = np.array([t["clients"] for t in there])
            names = [name for name in there[0] if name != "clients"]
            means = {n: float(np.average([t[n] for t in there], weights=counts)) for n in names}
            score = last.get("groups", {capacity: last}).get(capacity, {})  # all may be alike
            names = ["micro", "macro", "std", f"capacity_{self.measures[0].name}"]
            found = {k: score[k] for k in names if k in score}
            rows[float(capacity)] = {"took_part": int(counts.sum()), **means, **found}
        table = pd.DataFrame.from_dict(rows, orient="index")
        table.index.name = "capacity"
        return table

    def model(self, client: int | str | None = None, factory: Factory | None = None) -> nn.Module:
        """The trained model as a plain `nn.Module`: the shared one, or a client's own, by number or
        name.

        It takes images as `normalise` makes them. A model of your own factory needs that factory
        again. Norm statistics that were measured before scoring (`measured`) are measured again, on
        the run's training data.
        """
        client = None if client is None else self._number(client)
        tensors, about = self.store.checkpoint()
        module = self._builder(about, factory)()
        layout = Layout.of(module, about["extras"])
        row = tensors["shared"]
        if "kept/clients" in tensors:
            ranges = tuple((start, stop) for start, stop in about["kept"])
            width = about.get("width", layout.size)
            kept = Population(Columns(ranges, width), layout.dtype)
            kept.restore({name: tensors[f"kept/{name}"] for name in ("clients", "rows")})
            if client is None and len(kept) and about.get("personal", True):
                raise NoSharedModel(int(kept.clients[0]))
            if client is not None:
                row = self._own_row(kept, client, row, about)
        layout.load(module, row)
        submodels = bool(about.get("submodels", False))
        if has_measured_norm(module, submodels):
            self._measure(module, client, submodels)
        return module.eval()

    def export(
        self,
        path: str | Path,
        client: int | str | None = None,
        factory: Factory | None = None,
    ) -> list[Path]:
        """Write the model for use elsewhere: the shared one, a client's, or, with {client} in the
        path, one file for every client.

        The ending says the form: `.safetensors` and `.pt` are a plain state_dict; `.ts`
        (TorchScript) and `.onnx` (with the extra `onnx`) take data in its own units and normalise
        it themselves. Class names, scale and shape are in a .json file beside it.
        """
        from fedloom.experiment.export import export

        return export(self, path, client, factory)

    def _number(self, client: int | str) -> int:
        """The number of a client, given by number or name."""
        if isinstance(client, str) and client in self.names:
            return self.names.index(client)
        if isinstance(client, int) and 0 <= client < self.config["clients"]:
            return client
        near = nearest(str(client), self.names)
        raise FedloomError(
            f"There is no client {client}; they are numbered 0 to {self.config['clients'] - 1}"
            + (f" and called {self.names[0]}, ... {near}".rstrip() if self.names else ".")
        )

    def _own_row(self, kept: Population, client: int, row: Tensor, about: dict[str, Any]) -> Tensor:
        """A client's model: what it keeps over the shared one, or its second model."""
        import torch

        base = torch.cat([row, row.new_zeros(kept.columns.width - len(row))])
        whole = kept.compose([client], base)[0]
        if about.get("own") is None or client not in kept:
            return whole[: len(row)]
        start, stop = about["own"]
        return whole[start:stop]

    def _measure(self, module: nn.Module, client: int | None, every: bool) -> None:
        """Norm statistics that no checkpoint holds, as they were when the run was scored."""
        import torch

        from fedloom.engine.batches import Source
        from fedloom.experiment.config import make_config
        from fedloom.experiment.setup import load_dataset, make_federation

        config, _ = make_config(self.config, method_class(self.config["method"]))
        try:
            federation = make_federation(config, load_dataset(config))
        except FedloomError as e:
            warnings.warn(
                f"The statistics of this model's norms can't be measured: {e} Measure them on "
                "your own images with fedloom.models.norm.settle(model, batches, every=True).",
                stacklevel=3,
            )
            return
        data, clients = federation.dataset, federation.everybody if client is None else [client]
        scale, cpu = (data.mean, data.std), torch.device("cpu")
        source = Source(data.x, data.y, *scale, cpu, tokens=looks_up(module, data.shape))
        images = source.batches(federation.calibration(clients, config.static_samples))
        settle(module, images, every)

    @property
    def measured(self) -> bool:
        """Whether norm statistics were measured on training data before scoring: those of static
        norms, and those of all tracked norms where clients trained sub-models."""
        return any(record.get("norms", {}).get("measured") for record in self.records)

    @property
    def public(self) -> str | None:
        """What the server's public set was, and whom it was taken from; None without one."""
        note: str | None = self.store.checkpoint()[1].get("public")
        return note

    @property
    def tracked(self) -> str | None:
        """How to see what a tracking tool has of this run; None where it was not tracked."""
        from fedloom.experiment.track import looked_at

        track = self.config.get("track")
        return None if track is None else looked_at(track, self.path)

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, in the order of the model's outputs."""
        return tuple(self.store.checkpoint()[1]["labels"])

    def score(
        self,
        *,
        data: Any = None,
        model: Factory | None = None,
        partition: Any = None,
        loss: Loss | None = None,
        **settings: Any,
    ) -> Scores:
        """The clients scored again, as the last checkpoint has them; nothing is trained or stored.

        `settings` are options of the method that matter only then, such as more fine-tuning
        (`tune_epochs=5`), or who is scored and where (`eval_clients`, `device`, `workers`); `data`,
        `model`, `partition` and `loss` those of the run, if they were Python objects.
        """
        from fedloom.experiment.rescore import rescore

        return rescore(self, settings, data, model, partition, loss)

    def newcomer_model(
        self,
        images: npt.ArrayLike,
        labels: npt.ArrayLike,
        factory: Factory | None = None,
        loss: Loss | None = None,
        **settings: Any,
    ) -> nn.Module:
        """A model for somebody who took no part, from a few labelled images of theirs.

        What the method does with newcomers is done: shared and private parts are tried, averaged or
        asked to vote, and fine-tuned on the images. These come in the data's own shape and units,
        not normalised; labels are names of `classes`, or their numbers (of other tasks: as the data
        has them). `settings` are options of
        the method that matter only here, such as `tune_epochs=5`.
        """
        from fedloom.experiment.personal import personal_model

        _, about = self.store.checkpoint()
        make = self._builder(about, factory)
        layout = Layout.of(make(), about["extras"])
        return personal_model(self, images, labels, make, layout, settings, loss)

    def _builder(self, about: dict[str, Any], factory: Factory | None) -> Callable[[], nn.Module]:
        if factory is None and about["model"] == "custom":
            raise FedloomError(
                "This run's model came from a factory given in Python: pass it again, factory=...."
            )
        source = factory or model_factory(about["model"])
        shape, options = tuple(about["shape"]), about["model_options"]
        return partial(build, source, shape, about["classes"], about["seed"], options)

    def normalise(self, images: npt.ArrayLike) -> Tensor:
        """Images in the data's own shape and units, as the model was fed them in training."""
        import torch

        from fedloom.data.images import laid_out
        from fedloom.experiment.personal import raw_images

        _, about = self.store.checkpoint()
        raw = torch.from_numpy(raw_images(images, about))
        if about.get("tokens"):
            return raw.to(torch.int64)
        shape, keys = tuple(about["shape"]), ("mean", "std")
        mean, std = (torch.from_numpy(laid_out(about[key], shape)).float() for key in keys)
        return (raw.to(torch.float32) / about["unit"] - mean) / std

    @cached_property
    def similarities(self) -> dict[int, pd.DataFrame]:
        """Round → how alike the clients' models were, before they were swapped by it."""
        out = {}
        for record in self.records:
            above = record.get("mix", {}).get("similarity")
            if above is not None:
                clients = record["participants"]
                values = np.zeros((len(clients), len(clients)))
                values[np.triu_indices(len(clients), 1)] = above
                values += values.T
                np.fill_diagonal(values, np.nan)  # nobody is compared with itself
                out[record["round"]] = pd.DataFrame(values, index=clients, columns=clients)
        return out

    @cached_property
    def swaps(self) -> pd.DataFrame:
        """A row for every exchange of models: round, client, partner, and their similarity where it
        was measured."""
        rows = []
        for record in self.records:
            alike = self.similarities.get(record["round"])
            for a, b in record.get("mix", {}).get("pairs", ()):
                rows.append((record["round"], a, b, np.nan if alike is None else alike.at[a, b]))
        table = pd.DataFrame(rows, columns=["round", "client", "partner", "similarity"])
        return self._with_names(table)

    def plot_swaps(self, file: str | Path | None = None) -> Figure:
        """How similar clients' models were over the rounds, and who swapped with whom."""
        from fedloom.report.plots import save
        from fedloom.report.swap_plot import plot_swaps

        scored = self.clients
        known = scored[scored["population"] == "local"].drop_duplicates("client", keep="last")
        main = known.set_index("client").get("main_class", pd.Series(dtype=int))
        figure = plot_swaps(
            self.swaps, self.similarities, main, self.classes, self.path.name, self.names
        )
        if file is not None:
            save(figure, Path(file))
        return figure

    def report(self, file: str | Path | None = None, figures: str | Path | None = None) -> Path:
        """Write report.html into the run's directory, or `file`; with `figures`, its figures as
        SVG and PDF and their data as CSV into that folder, too."""
        from fedloom.experiment.reporting import run_page, write_page

        return write_page(run_page(self), file or self.path / REPORT, figures)

    def _repr_html_(self) -> str:
        """How a notebook shows it."""
        from fedloom.experiment.reporting import run_page
        from fedloom.report.html import table

        page = run_page(self)
        return f"<p>{page.headline}</p>" + (table(page.table) if page.table else "")

    def plot(self, file: str | Path | None = None, width: float | None = None) -> Figure:
        """Scores over rounds and the spread over clients; saved if `file` is given, in a `width`
        of so many inches."""
        from fedloom.report.plots import finish, plot_run

        figure = plot_run(self.rounds, self.clients, self.path.name, self.measures[0])
        return finish(figure, file, width)

    def to_csv(self, file: str | Path) -> None:
        """`rounds` as a file, with all digits."""
        self.rounds.to_csv(file, index=False)

    def latex(self) -> str:
        """The last scores for a paper (with the package booktabs)."""
        from fedloom.experiment.reporting import run_page
        from fedloom.report.latex import escaped, framed

        table = run_page(self).table
        if table is None:
            raise FedloomError("This run has not been scored yet, so there is no table of scores.")
        return framed(table.heads, [[escaped(str(cell)) for cell in row] for row in table.rows])


_COST = {
    "round", "participants", "lr", "train_loss", "bytes_up", "bytes_down", "macs", "steps",
    "seconds", "eval_seconds", "peak_memory", "skipped",
}  # fmt: skip


#: numbers of a round that the runner writes and that are no scores
_OF_RUNNER = _COST | {
    "degree", "isolated", "contacts", "components", "similarity", "divergence", "gradient_gap",
    "update_gap",
}  # fmt: skip
_NESTED = {"task", "profile", "kernels", "mix", "devices", "norms", "skipped", "messages"}


def flat(record: dict[str, Any]) -> dict[str, Any]:
    """A round's record as a row of `rounds`."""
    out = {k: v for k, v in record.items() if k not in _PREFIX and k not in _NESTED}
    out["participants"] = len(record["participants"])
    known = record.get("messages", {"skipped": len(record.get("skipped", {}))})
    out["skipped"] = known["skipped"]
    return out | flat_scores(record)


def flat_scores(record: dict[str, Any]) -> dict[str, Any]:
    """Scores of all populations under the names that `rounds` gives them."""
    out: dict[str, Any] = {}
    for group, prefix in _PREFIX.items():
        scores = record.get(group, {})
        out |= {prefix + name: v for name, v in scores.items() if not isinstance(v, dict)}
    return out
