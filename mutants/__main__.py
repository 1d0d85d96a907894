"""Put each deliberate error into a copy of the source and see whether its tests notice.

    python -m mutants [NAME ...] [--group randomness] [--list] [--jobs 2] [--verbose]

Names may be patterns (`swap-*`). Ends with 1 if fewer than 90 % of the errors that change something
are noticed, if one of the strict groups survives, or if an entry is broken.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import sys
from collections.abc import Sequence

from mutants.entries import GROUPS, Mutant, entries, faults
from mutants.runner import TIMEOUT, Outcome, Unsound, enough, run


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parse(arguments)
    chosen = [m for m in entries() if _wanted(m, args.names, args.group)]
    if not chosen:
        print("No entry has such a name or group; --list shows all.")
        return 2
    if args.list:
        for m in chosen:
            print(f"{m.group:16} {m.name:44} {m.promise}")
        return 0
    if wrong := faults(chosen):
        print("\n".join(wrong))
        return 2
    print(f"{len(chosen)} errors, {args.jobs} at a time; first the tests without any")
    count = 0

    def tell(outcome: Outcome) -> None:
        nonlocal count
        count += 1
        m = outcome.mutant
        note = "" if outcome.as_wanted else "  <--"
        print(f"{count:4}/{len(chosen)} {outcome.fate:9}{outcome.seconds:6.1f} s  {m.name}{note}",
              flush=True)  # fmt: skip
        if args.verbose or outcome.fate == "broken":
            print(outcome.output)

    try:
        outcomes = run(chosen, jobs=args.jobs, timeout=args.timeout, done=tell)
    except Unsound as e:
        print(e)
        print("These tests fail without any error in the source: mend them first.")
        return 2
    _report(outcomes)
    return 0 if enough(outcomes) else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser("mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="run only these; patterns such as 'swap-*'")
    parser.add_argument("--group", choices=GROUPS, help="run only this group")
    parser.add_argument("--list", action="store_true", help="show the entries and stop")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many at a time")
    parser.add_argument(
        "--timeout", type=float, default=TIMEOUT, help="seconds for one error's tests"
    )
    parser.add_argument("--verbose", action="store_true", help="show what pytest printed")
    return parser.parse_args(arguments)


def _wanted(m: Mutant, names: Sequence[str], group: str | None) -> bool:
    named = not names or any(fnmatch.fnmatch(m.name, name) for name in names)
    return named and group in (None, m.group)


def _report(outcomes: Sequence[Outcome]) -> None:
    print(
        f"\n{'group':16} {'errors':>7} {'noticed':>8} {'survived':>9} {'harmless':>9} {'broken':>7}"
    )
    for group in (*GROUPS, "all"):
        of = [o for o in outcomes if group in (o.mutant.group, "all")]
        real = [o for o in of if o.mutant.harmless is None]
        if of:
            fates = [sum(o.fate == fate for o in real) for fate in ("noticed", "survived")]
            broken = sum(o.fate == "broken" for o in of)
            print(f"{group:16} {len(of):7} {fates[0]:8} {fates[1]:9} {len(of) - len(real):9} "
                  f"{broken:7}")  # fmt: skip
    for o in outcomes:
        if not o.as_wanted:
            harmless = ", although marked harmless" if o.mutant.harmless else ""
            print(f"{o.fate}{harmless}: {o.mutant.name} ({o.mutant.file}): {o.mutant.promise}")


if __name__ == "__main__":
    sys.exit(main())
