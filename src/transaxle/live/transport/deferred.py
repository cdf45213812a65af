"""Errors that wait: inside a collective no rank may leave early, or the others would wait for it forever."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec

Given = ParamSpec("Given")


class Deferred:
    """Callbacks that never raise: the first error is kept, later calls do nothing, `check` raises it."""

    def __init__(self) -> None:
        self._error: BaseException | None = None

    def __call__(self, work: Callable[Given, None]) -> Callable[Given, None]:
        """Return `work` with its errors kept back."""

        def quietly(*args: Given.args, **kwargs: Given.kwargs) -> None:
            if self._error is not None:
                return
            try:
                work(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001 - it is raised again by `check`
                self._error = error

        return quietly

    def check(self) -> None:
        """Raise what was kept back."""
        if self._error is not None:
            raise self._error
