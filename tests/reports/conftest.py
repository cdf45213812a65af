"""The fixtures of the command line: a working directory, and the program."""

from tests.cli.conftest import here, transaxle

__all__ = ["here", "transaxle"]
