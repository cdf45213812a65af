"""Meeting: a process group of the ranks of several jobs that know nothing of each other but an address.

Each job keeps its own torch world, which the group does not become a part of. Other ways to make such a group, such as
those of verl and OpenRLHF, will do as well: `World` finds out which ranks belong together.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore, distributed_c10d  # type: ignore[attr-defined]  # public

from transaxle.arguments import read_count, read_text
from transaxle.errors import refuse

_GLOO, _NCCL = "gloo", "nccl"
_BACKENDS = {_GLOO: ("cpu", "cuda"), _NCCL: ("cuda",)}
"""What each backend moves."""
_NAME = "transaxle-refit"
_PATIENCE = 300


def meet(
    address: str, number: int, size: int, *, backend: str | None = None, timeout: float = _PATIENCE
) -> dist.ProcessGroup:
    """Meet ranks of other jobs, in a process group that no job's torch world knows of; all of them call this.

        group = tx.refit.meet("10.0.0.7:29600", number=rank, size=4 + 2)         # a trainer of 4 ranks
        group = tx.refit.meet("10.0.0.7:29600", number=4 + rank, size=4 + 2)     # an engine of 2

    Args:
        address: `HOST:PORT` where number 0 listens.
        number: this rank's, from 0 to `size - 1`; every rank has another one.
        size: how many meet.
        backend: `gloo` or `nccl`, the same for all; None: `nccl` where torch has a GPU, else `gloo`.
        timeout: seconds that any of them waits for the others, now and in each exchange. gloo tells of a lost rank
            those that are just talking to it at once, the others when this time is over.

    Raises:
        TypeError, ValueError: an argument that it cannot have.
        StorageError: IO where the others do not come in time.
        UsageError: AMBIGUOUS where they give another size or backend.
    """
    host, port = _read_address(address)
    if not 0 <= number < read_count("size", size):
        raise ValueError(f"number must be from 0 to {size - 1}; got {number!r}")
    if backend is None:
        backend = _NCCL if torch.cuda.is_available() and dist.is_nccl_available() else _GLOO
    if backend not in _BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(_BACKENDS)}; got {backend!r}")
    patience = timedelta(seconds=timeout)
    try:
        store = TCPStore(host, port, size, is_master=number == 0, wait_for_workers=False, timeout=patience)
        said = f"{size} ranks over {backend}"
        first = store.compare_set("said", "", said).decode()
    except RuntimeError as error:
        message = f"cannot meet at {address}: {error}"
        raise refuse("IO", message, hint="Is number 0 there, and can this machine reach it?") from error
    if first != said:
        message = f"this rank meets {said}, but another one {first}"
        raise refuse("AMBIGUOUS", message, hint="Give the same size and backend everywhere.")
    try:
        return _group(backend, PrefixStore(_NAME, store), number, size, patience)
    except RuntimeError as error:
        raise refuse("IO", f"not all {size} ranks came to {address} in time: {error}") from error


def _read_address(given: object) -> tuple[str, int]:
    host, colon, port = read_text("address", given, "10.0.0.7:29600").rpartition(":")
    if not (host and colon and port.isdecimal()):
        raise ValueError(f"address must be HOST:PORT, such as 10.0.0.7:29600; got {given!r}")
    return host.strip("[]"), int(port)


def _group(backend: str, store: PrefixStore, number: int, size: int, patience: timedelta) -> dist.ProcessGroup:
    """Make the group; as `init_process_group` does, but without making it the default or any other known one."""
    group = dist.ProcessGroup(store, number, size)
    made: Any
    if backend == _NCCL:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = patience
        made, kind = dist.ProcessGroupNCCL(store, number, size, options), dist.ProcessGroup.BackendType.NCCL
    else:
        made = dist.ProcessGroupGloo(store, number, size, patience)
        kind = dist.ProcessGroup.BackendType.GLOO
    made._set_sequence_number_for_group()
    group._set_default_backend(kind)
    for device in _BACKENDS[backend]:
        group._register_backend(torch.device(device), kind, made)
    # torch asks for the backend of a group whose operation failed, and hides the failure if it does not find one.
    distributed_c10d._world.pg_map[group] = backend, store
    return group
