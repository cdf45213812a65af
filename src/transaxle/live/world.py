"""The ranks that act together: what one of them knows, all learn; what one of them cannot do, none begins.

Every phase of a load or a save ends in `agree`: no rank goes on while another has failed, and every rank raises the
same error. Without an initialised process group the world is this process alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import torch.distributed as dist

from transaxle.errors import Refusal, TransaxleError, Where, gathered, refuse

Item = TypeVar("Item")


@contextmanager
def collective() -> Iterator[None]:
    """Run one collective operation of torch.

    Raises:
        StorageError: IO where a rank is lost, or does not answer within the group's timeout.
    """
    try:
        yield
    except RuntimeError as error:
        message = f"a rank was lost, or did not answer in time: {error}"
        raise refuse("IO", message, hint="look at the first error of the other ranks") from error


class World:
    """A process group, or this process alone.

    Args:
        group: the ranks that act together; None: all of them.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.live = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if self.live else 0
        self.size = dist.get_world_size(group) if self.live else 1
        self.ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD)) if self.live else (0,)

    def gather(self, item: Item) -> list[Item]:
        """Return every rank's item, in the order of `ranks`."""
        if self.size == 1:
            return [item]
        found: list[Item] = [item] * self.size
        with collective():
            dist.all_gather_object(found, item, group=self.group)
        return found

    def agree(self, error: TransaxleError | None) -> None:
        """Raise on every rank what any rank found.

        Raises:
            TransaxleError: the refusals of all ranks, each once.
        """
        refusals: dict[tuple[str, str, Where], Refusal] = {}
        for found in self.gather(() if error is None else error.refusals):
            for refusal in found:
                refusals.setdefault((refusal.code, refusal.message, refusal.where), refusal)
        if refusals:
            raise gathered(tuple(refusals.values()))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run a block on all ranks; where one refuses, all do.

        Raises:
            TransaxleError: as `agree`. An error of another kind stays this rank's own: the others learn that it failed.
        """
        found: TransaxleError | None = None
        try:
            yield
        except TransaxleError as error:
            found = error
        except BaseException as error:
            with suppress(Exception):  # what this rank has to say is raised below
                self.agree(refuse("IO", f"rank {self.rank} failed: {error!r}"))
            raise
        self.agree(found)
