"""The public Python interface: five functions over checkpoints of any format and dialect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transaxle.engine.checkpoint.checkpoint import Checkpoint, StoredTensor, check_decoded, open_checkpoint
from transaxle.engine.compare.compare import Comparison
from transaxle.engine.compare.compare import compare as _compare
from transaxle.engine.compare.verification import Verification, verify_against
from transaxle.engine.compare.verification import verify as _verify
from transaxle.engine.execute.execute import Report, execute
from transaxle.engine.execute.preflight import preflight
from transaxle.engine.plan.conversion import SHARD_SIZE, Plan, make_plan
from transaxle.engine.views.encode import Encode
from transaxle.formats.staging.belongings import Overwrite
from transaxle.formats.staging.leftovers import Leftover, leftovers
from transaxle.formats.staging.leftovers import clean as _clean
from transaxle.move.workers import Progress, limits, unwatched

Source = str | Path | Checkpoint


def open(path: str | Path, **said: Any) -> Checkpoint:  # noqa: A001 - the contract's name
    """Open a checkpoint; nothing is loaded and torch is not imported.

    Args:
        path: a folder or a file.
        **said: `format`, `family`, `dialect`, `config` (path or mapping), `axes` (axis -> size), `rules` (path),
            `weights` (`fp32` or `lp`, of a DeepSpeed checkpoint), `optimizer` (whether its state is taken),
            `decode` (`bf16` or `fp32`: encoded tensors are plain ones, decoded when they are read) or `dtype` (`bf16`,
            `fp16` or `fp32`: plain floating-point tensors are cast when they are read), with `only` and `skip`
            (patterns of the names that are, or are not).

    Raises:
        StorageError: IO where it is missing or unreadable.
        Refused: CORRUPT, INCOMPLETE, UNSUPPORTED …: every problem of its files.
        UsageError: UNKNOWN_AXIS for an axis that no family has.
    """
    return open_checkpoint(path, **said)


@contextmanager
def _opened(source: Source, said: dict[str, Any]) -> Iterator[Checkpoint]:
    """Give a checkpoint; one that is opened here is closed again, the caller's own is not."""
    if isinstance(source, Checkpoint):
        if said:
            raise TypeError(f"{', '.join(said)}: say this to open(); this checkpoint is open already")
        yield source
        return
    with open_checkpoint(source, **said) as checkpoint:
        yield checkpoint


@contextmanager
def _both(a: Source, b: Source, said: dict[str, Any]) -> Iterator[tuple[Checkpoint, Checkpoint]]:
    """Give two checkpoints; dialect and format are said of the first one only."""
    of_first = {"dialect", "format", "only", "skip", "dtype"}
    of_second = {name: value for name, value in said.items() if name not in of_first}
    first = {} if isinstance(a, Checkpoint) and not isinstance(b, Checkpoint) else said
    if said.get("decode") is not None:
        first, of_second = ({**each, "lenient": True} if each else each for each in (first, of_second))
    with _opened(a, first) as one, _opened(b, {} if isinstance(b, Checkpoint) else of_second) as two:
        check_decoded(one, two, said.get("decode"))
        yield one, two


def _encode(encoding: str | None, only: Sequence[str], skip: Sequence[str], said: dict[str, Any]) -> Encode | None:
    """Return what is to be encoded; where something is decoded instead, the patterns are said of that."""
    only, skip = ((one,) if isinstance(one, str) else tuple(one) for one in (only, skip))
    given = [name for name in ("decode", "dtype") if said.get(name) is not None]
    given += [] if encoding is None else ["encode"]
    if len(given) > 1:
        raise TypeError(f"{' or '.join(given)}: one of them at a time")
    if (only or skip) and not given:
        raise TypeError("only and skip say what is decoded, encoded or cast; say which")
    if encoding is None and given:
        said.update(only=only, skip=skip)
    return None if encoding is None else Encode(encoding, only, skip)


def plan(
    src: Source,
    dst: str | Path,
    *,
    to: str,
    shard_size: int = SHARD_SIZE,
    allow_lossy: bool = False,
    strict: bool = False,
    encode: str | None = None,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    overwrite: Overwrite = False,
    resume: bool = False,
    jobs: int | None = None,
    memory: int | None = None,
    **said: Any,
) -> Plan:
    """Plan a conversion without writing anything: with the arguments of `convert`, it tells what that would refuse.

    Args:
        src: path, or an opened checkpoint.
        dst: where it would be written.
        to: `FORMAT[:DIALECT]`; `hf` is short for `safetensors:hf`.
        shard_size: bytes of tensors per file.
        allow_lossy: run a dialect's arithmetic.
        strict: refuse tensors without a line in the target dialect instead of keeping them under their names.
        encode: `float8_block`, `mxfp8` or `nvfp4`: weights of linear layers are written in this encoding.
        only: patterns of the table names that are encoded instead, or, with `decode` or `dtype`, decoded or cast.
        skip: patterns of names that are neither.
        overwrite: plan to replace the checkpoint at `dst`.
        resume: plan to continue an interrupted run.
        jobs: worker threads.
        memory: bytes of all buffers together.
        **said: as for `open`.

    Returns:
        The plan; what stands against it, in the tensors and files of `src` and at `dst`, is in `.refusals`.
    """
    wanted = _encode(encode, only, skip, said)
    with _opened(src, said) as checkpoint:
        prepared = make_plan(
            checkpoint,
            to,
            shard_size=shard_size,
            allow_lossy=allow_lossy,
            strict=strict,
            target=str(dst),
            encode=wanted,
        )
        cleared = preflight(prepared, str(dst), overwrite=overwrite, resume=resume, limit=limits(jobs, memory))
    return cleared.plan


def convert(
    src: Source,
    dst: str | Path,
    *,
    to: str,
    shard_size: int = SHARD_SIZE,
    allow_lossy: bool = False,
    strict: bool = False,
    encode: str | None = None,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    overwrite: Overwrite = False,
    resume: bool = False,
    sync: bool = True,
    jobs: int | None = None,
    memory: int | None = None,
    progress: Progress = unwatched,
    **said: Any,
) -> Report:
    """Convert a checkpoint; the target appears complete or not at all.

    Args:
        src: path, or an opened checkpoint.
        dst: folder, or one file (`.safetensors`, `.bin`, `.pt`, `.pth`); it must not exist unless `overwrite`.
        to: `FORMAT[:DIALECT]`; `hf` is short for `safetensors:hf`.
        shard_size: bytes of tensors per file; one file that `dst` names holds them all.
        allow_lossy: run a dialect's arithmetic.
        strict: refuse tensors without a line in the target dialect instead of keeping them under their names.
        encode: `float8_block`, `mxfp8` or `nvfp4`: weights of linear layers are written in this encoding.
        only: patterns of the table names that are encoded instead, or, with `decode` or `dtype`, decoded or cast.
        skip: patterns of names that are neither.
        overwrite: replace the checkpoint at `dst`; it stays readable until the new one is complete. Where its folder
            holds anything else, that is refused, or goes too if this is `"everything"`.
        resume: continue an interrupted run; a `dst` that is just what it would write is left alone.
        sync: make everything durable before `dst` appears.
        jobs: worker threads.
        memory: bytes of all buffers together.
        progress: called with the bytes of each block written, from several threads.
        **said: as for `open`.

    Raises:
        TransaxleError: all refusals at once, before anything is written; or what went wrong while writing.
    """
    wanted = _encode(encode, only, skip, said)
    with _opened(src, said) as checkpoint:
        prepared = make_plan(
            checkpoint,
            to,
            shard_size=shard_size,
            allow_lossy=allow_lossy,
            strict=strict,
            target=str(dst),
            encode=wanted,
        )
        return execute(
            prepared,
            str(dst),
            overwrite=overwrite,
            resume=resume,
            sync=sync,
            limit=limits(jobs, memory),
            progress=progress,
        )


def verify(
    a: Source, b: Source | None = None, *, jobs: int | None = None, progress: Progress = unwatched, **said: Any
) -> Verification:
    """Hold one checkpoint against its own manifest, or two against each other across formats and dialects.

    Args:
        a: path or opened checkpoint.
        b: the other one; None: `a`'s manifest.
        jobs: worker threads.
        progress: called with the bytes of each block read.
        **said: as for `open`; `dialect` and `format` are said of the first one only.

    Returns:
        What was found. It is true where all is well, so `assert tx.verify(a, b)` fails where they differ; `.ok` is the
        same verdict, `.problems` and `.differences` say what is wrong.
    """
    if b is None:
        with _opened(a, said) as checkpoint:
            return _verify(checkpoint, limits(jobs), progress)
    with _both(a, b, said) as (first, second):
        return verify_against(first, second, limits(jobs), progress)


def diff(
    a: Source,
    b: Source,
    *,
    numeric: bool = False,
    jobs: int | None = None,
    progress: Progress = unwatched,
    **said: Any,
) -> Comparison:
    """Compare two checkpoints across formats and dialects.

    Args:
        a: path or opened checkpoint.
        b: the other one.
        numeric: compare values, across number formats too, and measure how far they are apart.
        jobs: worker threads.
        progress: called with the bytes of each block read.
        **said: as for `open`; `dialect` and `format` are said of the first one only.

    Returns:
        What differs. It is true where nothing does; `.equal` is the same.
    """
    with _both(a, b, said) as (first, second):
        return _compare(first, second, numeric=numeric, limit=limits(jobs), progress=progress)


def clean(path: str | Path, *, remove: bool = True) -> tuple[Leftover, ...]:
    """Remove what killed runs have left beside a target, and directly inside of it where it is a folder of targets.

    A checkpoint that was moved aside while another took its place, which never came, is put back.

    Args:
        path: a target, which need not exist, a folder of targets, or a leftover itself.
        remove: False: only tell what is there.

    Returns:
        Each leftover with its `outcome`: `removed`, `put back`, `found` where nothing is to be removed, or `kept` with
        the reason in `why`: a process works with it, or it holds what belongs to no checkpoint.

    Raises:
        Refused: UNSUPPORTED for a URL.
        StorageError: IO.
    """
    found = leftovers(path)
    return tuple(_clean(each) if each.outcome == "found" else each for each in found) if remove else found


__all__ = [
    "Checkpoint",
    "Comparison",
    "Leftover",
    "Plan",
    "Report",
    "StoredTensor",
    "Verification",
    "clean",
    "convert",
    "diff",
    "open",
    "plan",
    "verify",
]
