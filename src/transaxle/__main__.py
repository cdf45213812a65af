"""`python -m transaxle` runs the command line, for when its script is not on the PATH."""

from transaxle.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
