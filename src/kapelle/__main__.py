"""`python -m kapelle` is `kapelle`: the form that `torchrun -m` starts."""

from kapelle.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
