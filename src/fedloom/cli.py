"""The command line: thin, and made from the same settings as everything else.

Commands turn words into calls and results into text; nothing is computed here. Heavy modules are
imported inside the commands, so that help is fast.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
import typing
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from fedloom import __version__, names
from fedloom.errors import INTERRUPTED, FedloomError, Interrupted, is_shortage, shortage, unknown
from fedloom.experiment.settings import Config
from fedloom.imports import uncollected
from fedloom.notice import clear, say

if TYPE_CHECKING:
    from fedloom.experiment.sweep import Sweep

app = typer.Typer(
    name="fedloom",
    help="Federated learning where clients differ in data, capacity, personalisation and "
    "connectivity.",
    epilog="Add --debug to any command to see the traceback of an error.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(
    help="Data sets: list them, fetch them, see how a partition splits them.",
    no_args_is_help=True,
)
app.add_typer(data_app, name="data")
model_app = typer.Typer(help="Models: their layers, parameters and cost.", no_args_is_help=True)
app.add_typer(model_app, name="model")


def main() -> None:
    """The console script."""
    debug = "--debug" in sys.argv
    warnings.showwarning = _Warn()
    sys.argv[1:] = [word for word in sys.argv[1:] if word != "--debug"]
    try:
        app()
    except Interrupted as e:
        _end(str(e), e.exit_code)
    except FedloomError as e:
        if debug:
            raise
        _fail(str(e), e.exit_code)
    except SystemExit as e:
        if e.code == INTERRUPTED:  # typer's, for Ctrl-C
            _end("Interrupted. Finished work is kept.", INTERRUPTED)
        raise
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
    except (MemoryError, RuntimeError, OSError) as e:
        if debug:
            raise
        if is_shortage(e):
            _fail(shortage("this", e), 1)
        if not isinstance(e, OSError):
            raise
        with suppress(OSError):
            sys.stdout.close()  # it may be what can't be written
        where = "" if e.filename is None else f": '{e.filename}'"
        _fail(f"{e.strerror or e}{where}.", 1)


class _Warn:
    """Shows each warning of a command once: several runs may load the same data."""

    def __init__(self) -> None:
        self._shown: set[str] = set()

    def __call__(self, message: Warning | str, *_: object, **__: object) -> None:
        if str(message) not in self._shown:
            self._shown.add(str(message))
            clear()
            print(f"Warning: {message}", file=sys.stderr)


def _fail(text: str, code: int) -> None:
    _end(f"Error: {text}", code)


def _end(text: str, code: int) -> None:
    clear()
    print(text, file=sys.stderr)
    sys.exit(code)


# -- options made from the settings --------------------------------------------------------------

_NAMED = {"data": names.DATA, "model": names.MODELS, "topology": names.NETWORKS,
          "partition": names.PARTITIONS, "engine": names.ENGINES}  # fmt: skip


def _completing(words: Iterable[str]) -> Callable[[str], list[str]]:
    """Shell completions for the first letters of a word."""
    known = list(words)

    def complete(incomplete: str) -> list[str]:
        return [word for word in known if word.startswith(incomplete)]

    return complete


def _choices(annotation: Any) -> tuple[str, ...]:
    """The values that a setting accepts, if its type lists them."""
    if typing.get_origin(annotation) is typing.Literal:
        return tuple(w for w in typing.get_args(annotation) if isinstance(w, str))
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return tuple(w for part in typing.get_args(annotation) for w in _choices(part))
    return ()


_SEVERAL = ("params", "data_options", "model_options")  # reached with --set


def _setting_options(*skip: str) -> list[inspect.Parameter]:
    """One option per setting of `Config`, unset by default, so that only what is given counts."""
    kinds = {"int": int, "float": float, "bool": bool}
    out = []
    for name, field in Config.model_fields.items():
        if name in (*skip, "method", *_SEVERAL):
            continue
        hint = str(field.annotation).replace(" | None", "")
        hint = hint.removeprefix("<class '").removesuffix("'>")
        kind = kinds.get(hint, str)
        flag = f"--{name.replace('_', '-')}"
        flags = [f"{flag}/--no-{flag[2:]}"] if kind is bool else [flag]
        default = "" if field.default is None else f" [{field.default}]"
        offered = _NAMED.get(name) or _choices(field.annotation)
        option = typer.Option(
            *flags,
            help=f"{field.description}{default}".replace("[", r"\["),
            show_default=False,
            rich_help_panel="Settings",
            metavar={bool: "", int: "N", float: "X", str: "TEXT"}[kind],
            autocompletion=_completing(offered) if offered else None,
        )
        out.append(
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[Optional[kind], option],  # noqa: UP045
            )
        )
    return out


def _with_settings(*skip: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the settings as options; it gets those that were given as `settings`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True)
        options = _setting_options(*skip)
        names = [p.name for p in options]

        @functools.wraps(command)
        def wrapped(**words: Any) -> None:
            with uncollected():
                from fedloom.experiment.config import merge, parse_settings, read_config

            given = {n: v for n in names if (v := words.pop(n)) is not None}
            file, pairs = words.pop("config"), words.pop("set_")
            _trust(words.pop("trust"))
            chosen, named = parse_settings(pairs or []), words.get("method")
            if named is not None and chosen.get("method", named) != named:
                raise FedloomError(
                    f"The method is {named}, but --set says {chosen['method']}: give only one."
                )
            read = read_config(file) if file else {}
            if "tuned" in read:
                from fedloom.experiment.tune import chosen_for, with_chosen

                if command.__name__ == "compare":
                    over = {**given, **chosen}
                    words["methods"] = with_chosen(words["methods"] or (), read, over, file)
                    del read["tuned"]
                else:
                    read = chosen_for(read, named, file)
            _check_files(read, {"method": named, **given, **chosen})
            command(**words, settings=merge(read, given, chosen))

        kept = [p for p in own.parameters.values() if p.name != "settings"]
        shared = [
            inspect.Parameter(
                "config",
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[
                    Optional[Path],  # noqa: UP045
                    typer.Option("--config", help="YAML file of settings (a run's config.yaml)."),
                ],
            ),
            inspect.Parameter(
                "set_",
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[
                    Optional[list[str]],  # noqa: UP045
                    typer.Option(
                        "--set",
                        metavar="KEY=VALUE",
                        help="Any setting, or an option of the method (mu=0.1), "
                        "model (model_options.norm=group) or data set.",
                    ),
                ],
            ),
        ]
        shared.append(
            inspect.Parameter(
                "trust", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Trust
            )
        )
        keyword = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in kept]
        wrapped.__signature__ = inspect.Signature([*keyword, *shared, *options])  # type: ignore[attr-defined]
        wrapped.__annotations__ = {p.name: p.annotation for p in (*keyword, *shared, *options)}
        return wrapped

    return decorate


def _trust(files: list[Path] | None) -> None:
    from fedloom.experiment.plugins import trust

    for file in files or ():
        trust(file)


def _check_files(read: dict[str, Any], named: dict[str, Any]) -> None:
    """Refuse to run files that only a config names and that the user has never run."""
    from fedloom.experiment.plugins import check_files

    check_files({key: value for key, value in read.items() if named.get(key) is None})


def _flag(*names: str, **words: Any) -> Any:
    """An option without a value, which help must not show with one (`<bool>`)."""
    return typer.Option(*names, metavar="", **words)


def _picture(file: Path | None) -> Path | None:
    """A picture that can't be written is refused before a long run, not after it."""
    if file is not None:
        from fedloom.report.plots import check_picture

        check_picture(file)
    return file


Out = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--out", help="Directory to write to.", show_default="a new one under runs/"),
]
Trust = Annotated[
    Optional[list[Path]],  # noqa: UP045
    typer.Option(
        "--trust",
        metavar="FILE.py",
        help="Allow this file to run: a config names it and you have not run it before.",
    ),
]
Resume = Annotated[
    bool,
    _flag(
        "--resume",
        help="Continue from the last complete round, as the same experiment: only its length, "
        "speed and scoring may change. For other changes see --fork.",
    ),
]
Overwrite = Annotated[
    bool,
    _flag(
        "--overwrite",
        help="Replace the run in --out, which is kept until the new one has a checkpoint.",
    ),
]
Plot = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--plot", metavar="FILE.png", help="Save a picture.", callback=_picture),
]


# -- commands ------------------------------------------------------------------------------------


def _version(wanted: bool) -> None:
    if wanted:
        print(f"fedloom {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, _flag("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command()
@_with_settings()
def run(
    method: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(
            help="Method name (see `fedloom methods`), NAME:option=value, or your own FILE.py.",
            show_default=False,
            autocompletion=_completing(names.METHODS),
        ),
    ] = None,
    out: Out = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    plot: Plot = None,
    profile: Annotated[bool, _flag("--profile", help="Show where the time went.")] = False,
    settings: dict[str, Any] | None = None,
) -> None:
    """Run one method and write its results to a directory."""
    with uncollected():
        from fedloom.experiment.api import run as run_method
        from fedloom.report.terminal import Progress, print_profile, print_result

    settings = settings or {}
    named = settings.pop("method", None)
    chosen = method or named
    stored = settings.get("fork") is not None or (resume and out is not None)
    if chosen is None and not stored:
        raise FedloomError("Name the method to run: fedloom run METHOD (see `fedloom methods`).")
    if method is not None and named is not None and method.partition(":")[0] != named:
        settings.pop("params", None)  # the file's options belong to the file's method
    progress = Progress()
    say("Preparing data, clients and model ...")
    with _resumable(progress):
        result = run_method(
            chosen, out=out, resume=resume, overwrite=overwrite, watchers=[progress], **settings
        )
    if plot:
        result.plot(plot)
    print_result(result)
    if profile:
        print_profile(result)
    _print_pictures(plot)
    try:
        print(f"Report: {result.report()}")
    except FedloomError as e:  # the run itself is safe
        print(f"No report: {e}")


@app.command()
@_with_settings("seed")
def compare(
    methods: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(
            help="Methods, as in `fedloom run`; NAME@setting=value gives one its own setting. With "
            "--resume --out DIR, those that DIR was started with, unless given.",
            show_default=False,
            autocompletion=_completing(names.METHODS),
        ),
    ] = None,
    seeds: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--seeds", help=r"Number of seeds: runs per method. \[default: 3]"),
    ] = None,
    seed: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--seed", help=r"First seed. \[default: 0]"),
    ] = None,
    out: Out = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    extend: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--extend",
            metavar="DIR",
            help="Add these methods to an existing comparison, with its settings and seeds.",
        ),
    ] = None,
    sweep: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            "--sweep",
            metavar="SETTING=VALUES",
            help="Run all methods with each of these values (lr=0.01,0.1), one run per core at a "
            "time. Repeatable: all combinations.",
        ),
    ] = None,
    settings: dict[str, Any] | None = None,
) -> None:
    """Run several methods with the same settings and seeds, and print one table."""
    with uncollected():
        from fedloom.experiment.comparing import SEEDS
        from fedloom.experiment.comparing import compare as compare_methods
        from fedloom.experiment.folder import STUDY
        from fedloom.report.terminal import Progress, print_comparison

    settings = settings or {}
    for key in ("method", "params", "seed"):
        settings.pop(key, None)  # of a run's config: here they are arguments
    if sweep:
        if extend is not None or overwrite or seed is not None:
            raise FedloomError(
                "A sweep always starts at seed 0 and continues what is in its --out: leave out "
                "--extend, --overwrite and --seed."
            )
        from fedloom.experiment.sweep import Axis, Sweep

        chosen = Sweep(methods or [], [Axis.parse(text) for text in sweep], settings)
        _sweep(chosen, SEEDS if seeds is None else seeds, out, resume)
        return
    again = out if resume and not methods else None
    if not methods and again is None:
        raise FedloomError(
            "Name the methods to compare: fedloom compare METHOD METHOD (see `fedloom methods`). "
            "To continue a comparison or sweep: fedloom compare --resume --out DIR."
        )
    if again is not None and (again / STUDY).is_file():
        _resume_sweep(again, {"seeds": seeds, "seed": seed, **settings})
        return
    runs = len(methods or ()) * (seeds or SEEDS)
    if (there := extend or again) is not None:
        from fedloom.experiment.compare import Record

        stored = Record.read(there)
        runs = len(methods or stored.own) * stored.seeds
    progress = Progress(runs=runs)
    say("Checking the methods, preparing data and clients ...")
    with _resumable(progress, None if extend is None else "the same command with --resume"):
        comparison = compare_methods(
            methods or None, seeds=seeds, seed=seed, out=out, resume=resume, overwrite=overwrite,
            extend=extend, watchers=[progress], **settings,
        )  # fmt: skip
    report = comparison.report()
    print_comparison(comparison, report)
    if comparison.diverged:
        raise typer.Exit(1)


def _resume_sweep(folder: Path, given: dict[str, Any]) -> None:
    from fedloom.experiment.study import reopen
    from fedloom.experiment.sweep import Sweep

    found, ask, _ = reopen(folder)
    if not isinstance(found, Sweep):
        raise FedloomError(f"'{folder}' is a study. Run the command that started it again.")
    again = next((key for key, value in given.items() if value is not None), None)
    if again is not None:
        raise FedloomError(
            f"A sweep is resumed with the settings and seeds it was started with, so {again} can't "
            "be given."
        )
    _sweep(found, ask.seeds, folder, True)


def _sweep(chosen: Sweep, seeds: int, out: Path | None, resume: bool) -> None:
    from fedloom.experiment.swept import run_sweep
    from fedloom.report.terminal import StudyProgress, print_tables

    with StudyProgress() as progress:
        found = run_sweep(chosen, seeds, out, 0, progress, resume)
    print_tables(found.tables)
    print(f"Tables and figures: {found.path}, report: {found.path / 'report.html'}")


@app.command()
def methods(
    name: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(
            help="Show one method with its options.",
            show_default=False,
            autocompletion=_completing(names.METHODS),
        ),
    ] = None,
    model: Annotated[
        str, typer.Option("--model", help="Model to compute the manifest's bytes for.")
    ] = "auto",
    shape: Annotated[
        str, typer.Option("--shape", metavar="CxHxW", help="Image size of that model.")
    ] = "1x28x28",
    classes: Annotated[int, typer.Option("--classes", min=2, help="Number of classes.")] = 10,
    encode: Annotated[
        str,
        typer.Option("--encode", help="Message encoding: fp32, fp16, int8, topk:SHARE."),
    ] = "fp32",
    set_: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="An option of the method (mu=0.1), or model_options.NAME=VALUE.",
        ),
    ] = None,
) -> None:
    """List the methods, or show one with its options and its manifest.

    The manifest says what leaves a client, what stays with it and what the server keeps, in bytes.
    """
    from fedloom.experiment.plugins import method_class, trust
    from fedloom.methods.registry import configure
    from fedloom.methods.registry import methods as all_methods
    from fedloom.report.terminal import print_manifest, print_method, print_methods

    if name is None:
        print_methods(all_methods())
    else:
        from fedloom.experiment.blueprint import manifest
        from fedloom.experiment.config import parse_settings

        trust(name)
        cls, settings = method_class(name), parse_settings(set_ or [])
        options = settings.pop("model_options", {})
        print_method(cls, configure(cls, settings).build())
        found = manifest(cls, settings, model, _shape(shape), classes, options, encode)
        print_manifest(found, f"{model}, {shape}, {encode}")


@app.command()
def score(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="A run's directory.")],
    set_: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A test-time option of the method (tune_epochs=5), or a setting of the scoring "
            "(eval_clients, score_on, device, workers, ...).",
        ),
    ] = None,
    table: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--table", metavar="FILE.csv", help="Save one row per scored client."),
    ] = None,
    trust: Trust = None,
) -> None:
    """Score a run's clients again from its last checkpoint, without changing the run."""
    from fedloom.experiment.config import parse_settings
    from fedloom.experiment.rescore import rescore
    from fedloom.experiment.result import Result
    from fedloom.report.terminal import print_scores

    _trust(trust)
    result = Result(path)
    if table is not None and (not table.resolve().parent.is_dir() or table.is_dir()):
        raise FedloomError(f"The table can't be written to '{table}': give a file in a directory.")
    if table is not None and result.path.resolve() in table.resolve().parents:
        raise FedloomError(f"'{table}' is inside the run, which is not changed: write elsewhere.")
    scores = rescore(result, parse_settings(set_ or []))
    print_scores(result, scores)
    if table is not None:
        scores.clients.to_csv(table, index=False)


@app.command()
def export(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="A run's directory.")],
    out: Annotated[
        str,
        typer.Option(
            "--out",
            metavar="FILE",
            help="Ends in .safetensors or .pt (a state_dict), .ts (TorchScript) or .onnx; with "
            "{client} in it, a file for every client.",
        ),
    ],
    client: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--client", help="Client (name or number); none: the shared model."),
    ] = None,
    trust: Trust = None,
) -> None:
    """Export a run's model for use elsewhere, with class names and normalisation."""
    from fedloom.experiment.result import NoSharedModel, Result

    _trust(trust)
    clear()
    result = Result(path)
    number = client is not None and client not in result.names and client.isdigit()
    try:
        files = result.export(out, int(client) if client and number else client)
    except NoSharedModel as e:
        one, each = result.called(e.client), Path(out).with_stem("{client}")
        raise FedloomError(
            f"Clients of this method keep their own models: name one (--client '{one}'), or write "
            f"all of them (--out '{each}')."
        ) from None
    for file in files:
        print(f"Model: {file}")


@app.command()
def show(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Directory of a run, a comparison or a sweep, or several runs to compare.",
        ),
    ],
    plot: Plot = None,
    width: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            "--width",
            metavar="INCHES",
            help="Width of the picture: 3.3 is a column of a paper.",
            show_default=False,
        ),
    ] = None,
    latex: Annotated[
        bool, _flag("--latex", help="Print the table for a paper, and nothing else.")
    ] = False,
    csv: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--csv", metavar="FILE.csv", help="Save the table with all digits."),
    ] = None,
    swaps: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--swaps",
            metavar="FILE.png",
            help="Save a picture of who swapped models with whom, and how similar they were.",
            callback=_picture,
        ),
    ] = None,
) -> None:
    """Print a run's settings, scores and cost, or the table of a comparison or sweep."""
    from fedloom.experiment.api import load
    from fedloom.experiment.compare import Comparison
    from fedloom.experiment.result import Result
    from fedloom.experiment.study import is_study, reopen
    from fedloom.experiment.sweep import Sweep
    from fedloom.experiment.swept import Swept
    from fedloom.report.terminal import print_comparison, print_result, print_tables

    if width is not None and plot is None:
        raise FedloomError("--width is that of a picture: say which, --plot FILE.pdf.")
    if len(paths) == 1 and is_study(paths[0]) and not isinstance(reopen(paths[0])[0], Sweep):
        if plot or csv or latex:
            raise FedloomError(f"The pictures and tables of a study are in '{paths[0]}' already.")
        known, ask, results = reopen(paths[0])
        print_tables(known.tables(ask, results))
        return
    found = Comparison.of(paths) if len(paths) > 1 else load(paths[0])
    if swaps and not isinstance(found, Result):
        raise FedloomError("--swaps is a picture of one run: name a single run.")
    if plot:
        found.plot(file=plot, width=width)
    if csv:
        found.to_csv(csv)
    if latex:
        print(found.latex())
        return
    if isinstance(found, Result):
        if swaps:
            found.plot_swaps(swaps)
        print_result(found, details=True)
    elif isinstance(found, Swept):
        print_tables(found.tables)
    else:
        print_comparison(found)
    _print_pictures(plot, swaps)


@app.command()
def report(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Directory of a run, a comparison or a study, or several runs to compare.",
        ),
    ],
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--out", metavar="FILE.html", help=r"Where to write it. \[default: in RUN]"),
    ] = None,
    figures: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--figures",
            metavar="DIR",
            help="Write every figure as SVG and PDF and its data as CSV into this folder, too.",
        ),
    ] = None,
) -> None:
    """Write the report of a run, a comparison, a study or several runs side by side.

    The page shows scores, curves, every client, costs, and the command to run it again. It is one
    HTML file that needs no network.
    """
    from fedloom.experiment.compare import Comparison
    from fedloom.experiment.result import Result
    from fedloom.experiment.study import is_study, reopen, write_report

    clear()
    if out is not None and (out.suffix not in (".html", ".htm") or out.is_dir()):
        raise FedloomError(f"'{out}' is not a page: give a file that ends in .html.")
    if len(paths) > 1:
        if out is None:
            raise FedloomError(
                "Several runs have no directory in common: say where, --out FILE.html."
            )
        print(Comparison.of(paths).report(out, figures))
    elif Comparison.is_in(paths[0]):
        print(Comparison.load(paths[0]).report(out, figures))
    elif is_study(paths[0]):
        study, ask, results = reopen(paths[0])
        write_report(study, ask, results, paths[0], out, figures)
        print(out or paths[0] / "report.html")
    elif (paths[0] / "tables.md").is_file() and not (paths[0] / "config.yaml").is_file():
        raise FedloomError(
            f"'{paths[0]}' is a study of an older version, which did not write down what it was. "
            "Run its command again: it runs nothing twice, and writes the report."
        )
    else:
        print(Result(paths[0]).report(out, figures))


@app.command()
def watch(
    folder: Annotated[
        Path, typer.Argument(metavar="RUNS_DIR", help="Folder of runs; those below it count too.")
    ] = Path("runs"),
    host: Annotated[
        str,
        typer.Option(
            "--host", help="Address to listen on; anything other than localhost requires --token."
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port; 0: any free one.")
    ] = 8765,
    token: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--token",
            metavar="TEXT",
            help="Require this token; `new` generates one.",
            show_default=False,
        ),
    ] = None,
    browser: Annotated[
        Optional[bool],  # noqa: UP045
        _flag(
            "--open/--no-open", help="Open the page in a browser.",
            show_default="open where there is a screen",
        ),
    ] = None,
) -> None:  # fmt: skip
    r"""Follow runs live on a local web page.

    It shows progress, curves, clients and the log of each run; you can overlay runs, replay a
    moving network, stop a run cleanly and open its report. Ctrl-C stops the page, not the runs.
    Needs the extra `watch`: pip install '.\[watch]' in a clone of the repository.
    """
    import secrets

    try:
        from fedloom.watch.server import is_loopback, serve
    except ModuleNotFoundError as e:
        if (e.name or "").partition(".")[0] not in ("starlette", "uvicorn", "anyio"):
            raise
        raise FedloomError(
            "fedloom watch needs two more packages: pip install 'fedloom[watch]'."
        ) from None

    if folder.exists() and not folder.is_dir():
        raise FedloomError(f"'{folder}' is a file. Name a folder of runs.")
    if not folder.exists() and folder != Path("runs"):  # runs/ appears with the first run
        raise FedloomError(f"'{folder}' does not exist. Name the folder that your runs are in.")
    if token is None and not is_loopback(host):
        raise FedloomError(
            f"With --host {host}, others on the network could see and stop your runs. Add --token "
            "new, and pass the address that is then printed only to those who may."
        )
    token = secrets.token_urlsafe(24) if token == "new" else token
    if token is not None and len(token) < 16:
        raise FedloomError("A token of fewer than 16 characters can be guessed: --token new.")

    def ready(address: str) -> None:
        print(f"Watching {folder}: {address}\nCtrl-C ends the page; runs go on.", flush=True)
        if browser or (browser is None and is_loopback(host) and _has_screen()):
            import webbrowser

            webbrowser.open(address)

    serve(folder, host, port, token, ready)


@app.command()
def doctor() -> None:
    """Check the installation, with a federated run of a few seconds.

    Lists versions, extras, devices, compiler and kernels, data and free disk space. Exits with 1 if
    something is wrong.
    """
    from fedloom.doctor import examine
    from fedloom.report.terminal import print_finding

    wrong = 0
    for finding in examine():
        print_finding(finding)
        wrong += finding.state == "wrong"
    if wrong:
        lines = "1 line" if wrong == 1 else f"{wrong} lines"
        _fail(f"Something that should work does not: see the {lines} with ✗.", 1)
    print("Everything that should work does.")


def _has_screen() -> bool:
    import os

    screens = ("DISPLAY", "WAYLAND_DISPLAY")
    return sys.platform in ("darwin", "win32") or any(os.environ.get(s) for s in screens)


def _print_pictures(*files: Path | None) -> None:
    for file in files:
        if file is not None:
            print(f"Picture: {file}")


@app.command()
@_with_settings("seed", "tune_share")
def tune(
    methods: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(
            help="Methods, as in `fedloom run`.",
            show_default=False,
            autocompletion=_completing(names.METHODS),
        ),
    ] = None,
    search: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            "--search",
            metavar="NAME=RANGE",
            help="A setting or method option, and the range to search: lr=log:1e-4..0.3, "
            "alpha=0.01|0.1, ditto:lam=log:0.01..10 for one method only. Repeatable.",
            show_default=False,
        ),
    ] = None,
    study: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--study",
            metavar="NAME",
            help="Take methods, settings and ranges from a study, for its tuned preset.",
            show_default=False,
        ),
    ] = None,
    runs: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--runs", min=1, help="Trials per method.", show_default=False),
    ] = None,
    minutes: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            "--minutes", help="Time budget per method, instead of --runs.", show_default=False
        ),
    ] = None,
    halving: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            "--halving",
            metavar="N",
            help="Successive halving: train all trials for a few rounds, keep the best of every N, "
            "and repeat until the last ones have all rounds.",
            show_default="all trials run all rounds",
        ),
    ] = None,
    by: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--by",
            metavar="SCORE",
            help="Score to choose by: macro, micro, worst10, f1, new_micro, ..., or several: "
            "micro+new_micro.",
            show_default="macro; with --study, micro+new_micro",
        ),
    ] = None,
    share: Annotated[
        float,
        typer.Option("--share", help="Fraction of the clients' training data to score on."),
    ] = 0.25,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Runs per trial.")] = 1,
    seed: Annotated[int, typer.Option("--seed", min=0, help="First seed.")] = 0,
    jobs: Annotated[int, typer.Option("--jobs", min=0, help="Parallel runs; 0: one per core.")] = 0,
    out: Out = None,
    settings: dict[str, Any] | None = None,
) -> None:
    """Tune methods, with the same budget for each, on training data only.

    Writes chosen.yaml, which `fedloom run METHOD --config` and `fedloom study --values` read, and
    tries.csv with every trial. Run the same command again to continue after an interruption.
    """
    from fedloom.engine.choose import cores
    from fedloom.experiment.study import Ask
    from fedloom.experiment.tune import Range, Search, concerns, run_search
    from fedloom.report.terminal import StudyProgress, print_tuning

    given = {k: v for k, v in (settings or {}).items() if k not in ("method", "params", "seed")}
    space: dict[str, Range] = {}
    if study is not None:
        from fedloom.studies import find

        known = find(study)
        ask = Ask(given.get("data", known.data[0]), known.presets[0], "full")
        if ask.data not in known.data:
            raise unknown("data set of this study", ask.data, known.data)
        methods, by = methods or list(known.methods), by or "micro+new_micro"
        given = {n: v for n, v in known.to_search(ask).items() if concerns(n, methods)} | given
        space |= {n: r for n, r in known.space.items() if concerns(n, methods)}
    for word in search or ():
        name, sign, text = word.partition("=")
        if not sign:
            raise FedloomError(
                f"--search takes NAME=RANGE, such as lr=log:1e-4..0.3, not '{word}'."
            )
        space[name.strip()] = Range.parse(text.strip())
    if given.get("tune_share"):
        raise FedloomError("The share of a search is set by --share, not by tune_share.")
    asked = Search(
        tuple(methods or ()), space, runs, None if minutes is None else 60 * minutes, halving,
        by or "macro", seeds, seed, {**given, "tune_share": share},
    )  # fmt: skip
    with StudyProgress() as progress:
        found = run_search(asked, out or Path("runs") / "tune", jobs or cores(), progress)
    print_tuning(found)


@app.command()
def study(
    name: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(
            help="Study name.", show_default=False, autocompletion=_completing(names.STUDIES)
        ),
    ] = None,
    listed: Annotated[bool, _flag("--list", help="List all studies.")] = False,
    data: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--data", help="Data set.", show_default="the study's first"),
    ] = None,
    preset: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--preset", help="Constants to run with.", show_default="the study's first"),
    ] = None,
    scale: Annotated[
        str, typer.Option("--scale", help="quick, medium (S2 only) or full.")
    ] = "quick",
    seeds: Annotated[int, typer.Option("--seeds", help="Number of seeds: runs per cell.")] = 1,
    only: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--only", metavar="CELL", help="Run these cells only: 'fedavg*'. Repeatable."),
    ] = None,
    workers: Annotated[
        int, typer.Option("--workers", min=0, help="Parallel runs; 0: one per core.")
    ] = 0,
    values: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--values",
            metavar="FILE.yaml",
            help="Values chosen by `fedloom tune` (s0-swap: by --preset rates), for a preset that "
            "takes them.",
            show_default="those shipped with the study",
        ),
    ] = None,
    out: Out = None,
) -> None:
    """Run a whole study: its runs in parallel, then its tables and figures.

    Finished runs are never repeated: run the same command again to continue after an interruption.
    """
    from fedloom.engine.choose import cores
    from fedloom.experiment.study import Ask, run_study, write_report
    from fedloom.report.terminal import StudyProgress, print_studies, print_tables
    from fedloom.studies import STUDIES, find

    if listed or name is None:
        print_studies(STUDIES)
        return
    chosen = find(name)
    ask = Ask(
        data or chosen.data[0], preset or chosen.presets[0], scale, seeds, tuple(only or ()), values
    )
    folder = out or Path("runs") / f"study-{name}-{ask.data}-{ask.preset}-{ask.scale}"
    with StudyProgress() as progress:
        results = run_study(chosen, ask, folder, workers or cores(), progress)
    print_tables(write_report(chosen, ask, results, folder))
    print(f"Tables and figures: {folder}")


def _film(file: Path | None) -> Path | None:
    if file is not None:
        from fedloom.report.topology_plot import check_film

        check_film(file)
    return file


@app.command()
def topology(
    spec: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(
            metavar="TOPOLOGY", help="A network, such as waypoint,area=500.", show_default=False,
            autocompletion=_completing(names.NETWORKS),
        ),
    ] = None,
    clients: Annotated[int, typer.Option("--clients", min=1, help="Number of nodes.")] = 50,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Number of rounds.")] = 50,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the network.")] = 0,
    faults: Annotated[str, typer.Option("--faults", help="As in `fedloom run`.")] = "none",
    plot: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--plot", metavar="FILE", help="Save a film strip (.png) or an animation (.gif).",
            callback=_film,
        ),
    ] = None,
    spread: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--spread", metavar="FILE", callback=_picture,
            help="Save a picture of how models spread within a round, step by step, if nodes "
            "relay what they hear.",
        ),
    ] = None,
    shown: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--round", min=1, help=r"The round that --spread shows. \[default: 1]"),
    ] = None,
) -> None:  # fmt: skip
    """List the networks for serverless learning, or show who meets whom in one of them."""
    from fedloom.report.terminal import print_contacts, print_networks
    from fedloom.topology import NETWORKS, Faults, Peers, network
    from fedloom.topology.report import ContactReport

    if spec is None and (plot or spread):
        raise FedloomError("Name the network to draw: fedloom topology waypoint,area=500 ...")
    if spec is None:
        print_networks(NETWORKS)
        return
    if shown is not None and spread is None:
        raise FedloomError("--round says which round --spread shows. Add --spread FILE.")
    if shown is not None and shown > rounds:
        raise FedloomError(f"There is no round {shown} of {rounds}. Give more --rounds.")
    links = network(spec)
    report = ContactReport.of(Peers(links, Faults.parse(faults)), clients, rounds, seed)
    print_contacts(report, spec)
    if plot:
        from fedloom.report.topology_plot import save_film

        save_film(report, links, seed, f"{spec}, {clients} nodes", plot)
        print(f"\nPicture: {plot}")
    if spread:
        from fedloom.report.plots import save
        from fedloom.report.topology_plot import spread_strip

        save(spread_strip(report, links, seed, shown or 1, f"{spec}, {clients} nodes"), spread)
        print(f"\nPicture: {spread}")


@data_app.command("list")
def data_list() -> None:
    """List the data sets, and which of them are in the cache."""
    from fedloom.data.catalog import describe
    from fedloom.report.terminal import print_datasets

    print_datasets(describe())


@data_app.command("fetch")
def data_fetch(
    name: Annotated[
        str, typer.Argument(help="Data set name.", autocompletion=_completing(names.DATA))
    ],
    split: Annotated[
        Optional[str], typer.Option("--split", help="EMNIST split.")  # noqa: UP045
    ] = None,
    force: Annotated[bool, _flag("--force", help="Download again.")] = False,
) -> None:
    """Download a data set, verify it and keep it in the cache (FEDLOOM_DATA)."""
    from fedloom.data.fetch import fetch
    from fedloom.report.terminal import downloading

    with downloading() as progress:
        path = fetch(name, progress=progress, force=force, split=split)
    print(f"{name} is in {path}")


@data_app.command("show")
def data_show(
    name: Annotated[
        str,
        typer.Argument(
            help="Data set name, .csv, .parquet, .npz or .txt file, folder, or sites:DIR.",
            autocompletion=_completing(names.DATA),
        ),
    ],
    partition: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--partition",
            help="How to split the samples among clients.",
            show_default="iid, or the data's own clients",
        ),
    ] = None,
    clients: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            "--clients",
            min=1,
            help="Number of clients.",
            show_default="50, or as many as the partition names",
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the partition.")] = 0,
    plot: Plot = None,
    pool: Annotated[bool, _flag("--pool", help="Pool the train and test files.")] = False,
    set_: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="An option of the data set (label=COLUMN; also data_options.label=COLUMN).",
        ),
    ] = None,
    task: Annotated[
        str, typer.Option("--task", help="What the labels are for; auto: by the labels.")
    ] = "auto",
) -> None:
    """Show a data set and how a partition splits it among clients."""
    from fedloom.data.catalog import load, natural
    from fedloom.data.partition import by_column
    from fedloom.data.split import check_options, deal, named_clients
    from fedloom.experiment.config import parse_settings
    from fedloom.report.terminal import print_partition
    from fedloom.tasks import check

    given = parse_settings(set_ or [])
    named = given.pop("data_options", {})
    if not isinstance(named, dict):
        raise FedloomError(
            f"data_options={named} names no option. Give one, such as data_options.label=COLUMN."
        )
    options = {**named, **given}
    own = natural(name)
    partition = partition or ("iid" if own is None else f"by:{own}")
    check_options(partition, options)
    dataset = load(name, options=options, by=by_column(partition), task=check(task))
    clients = clients or named_clients(dataset, partition, pool) or 50
    if pool:
        dataset = dataset.pooled()
    dataset, parts = deal(dataset, partition, clients, seed)
    print_partition(dataset, parts, partition)
    if plot:
        from fedloom.report.partition_plot import plot_partition
        from fedloom.report.plots import save

        title = f"{dataset.name}, {partition}, {clients} clients"
        if not dataset.task.by_class:
            raise FedloomError(
                f"The samples of '{dataset.name}' have no class (the task is {dataset.task.name}), "
                "so there is nothing to plot of a partition."
            )
        save(plot_partition(parts, dataset.y, dataset.classes, title), plot)
        print(f"\nPicture: {plot}")


@model_app.command("list")
def model_list() -> None:
    """List the built-in models."""
    from fedloom.models import MODELS
    from fedloom.report.terminal import print_models

    print_models({name: what for name, (_, _, what) in MODELS.items()})


@model_app.command("show")
def model_show(
    name: Annotated[
        str,
        typer.Argument(
            help="Model name, or your own FILE.py:FACTORY.",
            autocompletion=_completing(names.MODELS),
        ),
    ],
    capacity: Annotated[
        float, typer.Option("--capacity", help="Fraction of the channels to keep.")
    ] = 1.0,
    shape: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--shape",
            metavar="CxHxW",
            help="Image size, such as 3x32x32.",
            show_default="1x28x28 for mlp and conv4, else 3x32x32",
        ),
    ] = None,
    classes: Annotated[int, typer.Option("--classes", min=2, help="Number of classes.")] = 10,
    batch: Annotated[
        int, typer.Option("--batch", min=1, help="Batch size of the memory estimate.")
    ] = 32,
    set_: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="An option of the model; exits=true cuts by depth (depthfl).",
        ),
    ] = None,
) -> None:
    """Show a model, or its sub-model of some capacity, layer by layer: parameters, MACs, memory."""
    from fedloom.experiment.blueprint import blueprint
    from fedloom.experiment.config import parse_settings
    from fedloom.experiment.plugins import trust
    from fedloom.report.terminal import print_blueprint

    sizes = _shape(shape or ("1x28x28" if name in ("mlp", "conv4") else "3x32x32"))
    trust(name)
    found = blueprint(name, sizes, classes, capacity, batch, parse_settings(set_ or []))
    print_blueprint(name, sizes, capacity, batch, found)


def _shape(text: str) -> tuple[int, int, int]:
    sizes = text.lower().replace("×", "x").split("x")
    if len(sizes) != 3 or not all(s.isdigit() and int(s) > 0 for s in sizes):
        raise FedloomError(
            f"--shape {text} is not valid: give channels, height and width, 3x32x32."
        )
    c, h, w = map(int, sizes)
    return c, h, w


@contextmanager
def _resumable(progress: Any, then: str | None = None) -> Iterator[None]:
    """Ctrl-C ends with the command that continues: unless given, that of the run's folder."""
    from fedloom.experiment.api import Stopped
    from fedloom.experiment.folder import resuming

    try:
        yield
    except Stopped as stopped:
        progress.end()
        if stopped.old_is_back:
            raise Interrupted(
                f"Interrupted before the first checkpoint; '{stopped.path}' holds the run that was "
                "there before."
            ) from None
        how = "Interrupted" if stopped.after is None else f"Stopped after round {stopped.after}"
        raise Interrupted(
            f"{how}; finished rounds are kept. Continue with: {then or resuming(stopped.path)}"
        ) from None
