"""`python -m transaxle`: the command line, where its script is not on the PATH."""

from transaxle.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
