"""`python -m transaxle` runs the command line, for users whose PATH does not contain the script `transaxle`."""

from transaxle.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
