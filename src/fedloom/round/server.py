"""The server side: the shared columns of the model, named state, and memory of what was sent.

It knows what it keeps and what it is sent, never a client's data, private columns or state. Without
a server, this stands for the nodes' meetings: it combines what they tell each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.errors import FedloomError
from fedloom.kinds import Declared, Sizes
from fedloom.layout import Columns, Layout
from fedloom.local import Optimiser
from fedloom.mix.base import Fields, Gathering, Mix, Mixed, Traffic
from fedloom.returned import returned, returned_if_any, returned_names
from fedloom.round.messages import Sent, Told
from fedloom.select import Last
from fedloom.topology.base import Contacts

_LAST = "last"  # memory of what each client last sent
_HELD = "held"  # memory of the model that each client has


@dataclass(frozen=True)
class Opening:
    """The general facts of a round."""

    round: int
    contacts: Contacts
    optimiser: Optimiser
    stream: Callable[..., np.random.Generator]
    total: int  # registered clients


class Server:
    """The server's side of the line."""

    def __init__(
        self, mix: Mix, layout: Layout, columns: Columns, initial: Tensor, sizes: Sizes,
        told: Sequence[str] = (), remembers: bool = False, screens: bool = False,
        counts: bool = False,
    ) -> None:  # fmt: skip
        self.mix = mix
        self.layout = layout.part(columns)
        self.columns = columns
        self._initial = initial
        self.model = columns.take(initial).clone()
        self.state = {name: kind.initial(sizes, initial) for name, kind in mix.keeps.items()}
        self.memory: dict[str, dict[int, Fields]] = {name: {} for name in mix.memory}
        self._told = tuple(told)
        self._seen: dict[int, int] | None = {} if counts else None  # the last round of each
        self._lasts: dict[int, Fields] | None = {} if remembers else None
        # To tell a change from a model, a server that passes models on remembers who has which.
        passes_on = mix.home == "node" and not mix.meets
        self._held: dict[int, Tensor] | None = {} if screens and passes_on else None

    @property
    def shared(self) -> Tensor:
        """The shared model as a whole row, with initial values where columns are private."""
        row = self._initial.clone()
        self.columns.put(row, self.model)
        return row

    def tell(self) -> Told:
        return Told(self.model, {name: self.state[name] for name in self._told})

    def combine(
        self, opening: Opening, sent: Sent, facts: Mapping[str, Any], own: Tensor | None = None
    ) -> Mixed:
        """Let the mix combine what was sent, and take over what it made of it; `own` are nodes'
        models as they themselves have them."""
        name = type(self.mix).__name__
        # Copies of what is kept: a mix returns what changes, it does not write.
        state = {key: value.clone() for key, value in self.state.items()}
        gathering = Gathering(
            round=opening.round,
            layout=self.layout,
            contacts=opening.contacts,
            shared=self.model.clone(),
            clients=sent.clients,
            weights=sent.weights,
            rows=sent.model if own is None else own,
            arrived=None if own is None else sent.model,
            lr=opening.optimiser.lr,
            stream=opening.stream,
            indexes=sent.indexes,
            total=opening.total,
            steps=sent.steps,
            momentum=opening.optimiser.momentum,
            sent=Declared(sent.values, name, "takes"),
            state=Declared(state, name, "keeps"),
            memory=Declared(self.memory, name, "memory"),
            facts=Declared(facts, name, "needs"),
        )
        mixed = returned(self.mix, "combine", self.mix.combine(gathering), Mixed)
        self._check(mixed)
        if self._seen is not None:
            self._seen |= dict.fromkeys(opening.contacts.participants.tolist(), opening.round)
        if mixed.shared is not None:
            self.model = mixed.shared.to(self.model.dtype)
        self.state |= {key: value.to(self.state[key]) for key, value in mixed.state.items()}
        for key, entries in mixed.memory.items():
            self.memory[key].update(entries)
        self._note_holders(sent, mixed)
        return mixed

    def origin(self, clients: np.ndarray) -> Tensor:
        """Where the models of these clients were when the round began, as far as is known here:
        what they were told, or, where models live with the clients, what went through last."""
        if self._held is None:
            return self.model.expand(len(clients), -1)
        return torch.stack([self._held.get(int(client), self.model) for client in clients])

    def _note_holders(self, sent: Sent, mixed: Mixed) -> None:
        if self._held is None:
            return
        if mixed.reset:
            self._held.clear()
            return
        self._held.update(zip(sent.clients.tolist(), sent.model.clone(), strict=True))
        if mixed.clients is not None and mixed.rows is not None:
            self._held.update(zip(mixed.clients.tolist(), mixed.rows, strict=True))

    def seen(self, clients: int) -> np.ndarray:
        """The last round in which each client took part; 0: never."""
        known = self._seen or {}
        return np.array([known.get(c, 0) for c in range(clients)], dtype=np.int64)

    def lasts(self, clients: np.ndarray) -> list[Last | None] | None:
        """What these clients last sent, if a part of the method needs it."""
        if self._lasts is None:
            return None
        known = [self._lasts.get(int(client)) for client in clients]
        return [None if k is None else Last(k["row"], k.get("index")) for k in known]

    def remember(self, sent: Sent) -> None:
        """Keep what clients sent, as it arrived, if a part of the method will need it."""
        if self._lasts is None:
            return
        for client, model, index in zip(sent.clients, sent.model, sent.indexes, strict=True):
            row = model.clone() if index is None else model[index]
            where = {} if index is None else {"index": index.to(torch.int32)}
            self._lasts[int(client)] = {"row": row, **where}

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint has to hold of this side."""
        out = {"shared": self.shared}
        out |= {f"server/{name}": value for name, value in self.state.items()}
        if self._seen:
            out["seen"] = torch.tensor(sorted(self._seen.items()))
        for name, entries in self.memories().items():
            for key, fields in entries.items():
                out |= {f"memory/{name}/{key}/{field}": v for field, v in fields.items()}
        return out

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        if tensors["shared"].shape != self._initial.shape:
            raise FedloomError(
                f"The checkpoint holds a model of {tensors['shared'].numel():,} values, this "
                f"config builds one of {self._initial.numel():,}."
            )
        self._initial = tensors["shared"].clone()
        self.model = self.columns.take(self._initial).clone()
        for name in self.state:
            self.state[name] = tensors[f"server/{name}"].clone()
        if self._seen is not None and "seen" in tensors:
            self._seen = {int(client): int(t) for client, t in tensors["seen"]}
        memories = self.memories()
        for path, value in tensors.items():
            if path.startswith("memory/"):
                _, name, key, field = path.split("/", 3)
                memories[name].setdefault(int(key), {})[field] = value.clone()
        if self._held is not None:
            self._held = {client: fields["row"] for client, fields in memories[_HELD].items()}

    def memories(self) -> dict[str, dict[int, Fields]]:
        """All that is kept by name and key."""
        held = {client: {"row": row} for client, row in (self._held or {}).items()}
        lasts = {} if self._lasts is None else {_LAST: self._lasts}
        return self.memory | lasts | ({} if self._held is None else {_HELD: held})

    def _check(self, mixed: Mixed) -> None:
        """What a mix returns must be declared, of the right shape, and finite."""
        name = type(self.mix).__name__
        _check_kinds(self.mix, mixed)
        for word, given, known in (
            ("keeps", mixed.state, self.state),
            ("memory", mixed.memory, self.memory),
        ):
            undeclared = sorted(set(given) - set(known))
            if undeclared:
                raise FedloomError(
                    f"{name} keeps '{undeclared[0]}' without declaring it: add it to its "
                    f"`{word}`, so that checkpoints include it."
                )
        made = {"shared": (mixed.shared, self.model.shape)}
        if mixed.rows is not None:
            made["rows"] = (mixed.rows, (len(mixed.clients), *self.model.shape))  # type: ignore
        made |= {key: (value, self.state[key].shape) for key, value in mixed.state.items()}
        for what, (value, shape) in made.items():
            if value is not None and tuple(value.shape) != tuple(shape):
                raise FedloomError(
                    f"{name} returned '{what}' of shape {tuple(value.shape)}, and it must be "
                    f"{tuple(shape)}: the columns that were sent, and no others."
                )


def _check_kinds(mix: Mix, mixed: Mixed) -> None:
    """What a mix returns must be of the types that a `Mixed` has."""
    kinds: dict[str, type] = {"shared": Tensor, "rows": Tensor, "clients": np.ndarray,
                              "traffic": Traffic}  # fmt: skip
    for field, kind in kinds.items():
        where = f"as {field} of its Mixed"
        returned_if_any(mix, "combine", getattr(mixed, field), kind, where)
    if mixed.rows is not None and mixed.clients is None:
        raise FedloomError(
            f"{type(mix).__name__}.combine returned a Mixed with rows and without clients; it must "
            "say whose they are: clients=g.clients."
        )
    for field in ("state", "memory", "metrics", "notes"):
        returned_names(mix, "combine", getattr(mixed, field), f"as {field} of its Mixed")
    for name, value in mixed.state.items():
        returned(mix, "combine", value, Tensor, f"as '{name}' in `state`")
