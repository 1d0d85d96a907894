"""The console script, and `python -m fedloom`: what must hold before anything else is imported."""

import gc
import os
import sys

from fedloom.notice import clear, greet


def main() -> None:
    """Run the command line; Ctrl-C during its imports gets a sentence too."""
    for name in ("stdout", "stderr"):  # closed, as daemons leave them
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    try:
        greet(sys.argv[1:])
        from fedloom.cli import main as command_line

        command_line()
    except KeyboardInterrupt:
        clear()
        print("Interrupted before anything was run.", file=sys.stderr)
        sys.exit(130)
    finally:
        gc.freeze()  # the process ends: nothing is left that is worth collecting


if __name__ == "__main__":
    main()
