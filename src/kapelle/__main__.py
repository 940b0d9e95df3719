"""Run the command line: `python -m kapelle` is the same as the command `kapelle`.

The form `torchrun -m kapelle` also starts this module.
"""

from kapelle.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
