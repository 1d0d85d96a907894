"""What runs in a pass: layers, by name, and the calls of torch functions, by number. The same model
in the same mode makes the same calls, so one that is known from one pass can be found again in
another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_MAX_POOLS = ("max_pool", "adaptive_max_pool")


class Layers:
    """Which layer of a module is running, and in which one a pass failed."""

    def __init__(self) -> None:
        self._running: list[str] = []
        self._last = ""  # that ran to its end
        self._failed: str | None = None

    @contextmanager
    def followed(self, module: nn.Module) -> Iterator[None]:
        with ExitStack() as hooks:
            for name, layer in module.named_modules():
                if name:
                    hooks.enter_context(layer.register_forward_pre_hook(self._enter(name)))
                    left = layer.register_forward_hook(self._leave, always_call=True)
                    hooks.enter_context(left)
            yield

    @property
    def name(self) -> str:
        """Of the innermost layer; nothing where it is the module itself."""
        return self._running[-1] if self._running else self._failed or ""

    @property
    def where(self) -> str:
        after = f" after layer '{self._last}'" if self._last else ""
        return f"layer '{self.name}'" if self.name else f"its forward(){after}"

    def _enter(self, name: str) -> Callable[..., None]:
        return lambda *_: self._running.append(name)

    def _leave(self, _: nn.Module, inputs: Any, output: Any) -> None:
        name = self._running.pop()
        if output is not None:
            self._last = name
        elif self._failed is None:  # the innermost layer ends first
            self._failed = name


@dataclass(frozen=True)
class Call:
    """One of them: what it is called, its number, its results and the first tensor that it was
    given."""

    name: str
    number: int
    results: tuple[Tensor, ...]
    given: Tensor | None
    use: int  # how often that tensor has been given to a function by now


class Calls(TorchFunctionMode):
    """Notes the calls of a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Call] = []
        self._uses: Counter[int] = Counter()
        self._makers: dict[int, int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [a for a in args if isinstance(a, Tensor)]
        results = tensors_of(out)
        number = len(self.made)
        if results:  # asking for a shape is no use of a tensor
            self._uses.update(id(t) for t in given)
            if not any(results[0] is t for t in given):
                self._makers[id(results[0])] = number
        first_given = given[0] if given else None
        use = self._uses[id(first_given)]
        self.made.append(Call(name_of(func), number, results, first_given, use))
        return out

    def pooled(self, call: Call) -> int | None:
        """The number of the call of a max pooling whose result nobody but this call was given."""
        by = self._makers.get(id(call.given))
        in_place = bool(call.results) and call.results[0] is call.given
        if by is None or call.use != 1 or (self._uses[id(call.given)] != 1 and not in_place):
            return None
        return by if self.made[by].name.startswith(_MAX_POOLS) else None


def name_of(func: Any) -> str:
    return str(getattr(func, "__name__", func)).strip("_")


def tensors_of(out: Any) -> tuple[Tensor, ...]:
    """The tensors that a function returned, one or several."""
    several = out if isinstance(out, tuple | list) else (out,)
    return tuple(t for t in several if isinstance(t, Tensor))
