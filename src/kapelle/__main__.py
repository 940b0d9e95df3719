"""`python -m kapelle` is the same as `kapelle`; `torchrun -m` starts this form."""

from kapelle.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
