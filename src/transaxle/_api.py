"""The public Python interface: functions over checkpoints of any format and dialect."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

from transaxle.arguments import (
    Config,
    Overwrite,
    PathLike,
    Patterns,
    Size,
    check_flags,
    check_keywords,
    read_degrees,
    read_flag,
    read_optional_text,
    read_path,
    read_patterns,
    read_size,
    read_source,
    read_text,
    shows,
    wrong_type,
)
from transaxle.engine.checkpoint.checkpoint import (
    Checkpoint,
    CheckpointLike,
    StoredTensor,
    open_checkpoint,
    opened,
)
from transaxle.engine.checkpoint.settings import Reading, model_config
from transaxle.engine.compare.compare import Comparison
from transaxle.engine.compare.compare import compare as _compare
from transaxle.engine.compare.pair import opened_pair
from transaxle.engine.compare.verification import Verification, verify_against
from transaxle.engine.compare.verification import verify as _verify
from transaxle.engine.execute.carry import Report
from transaxle.engine.execute.execute import execute
from transaxle.engine.execute.preflight import in_order, preflight
from transaxle.engine.plan.conversion import SHARD_SIZE, Prepared, make_plan
from transaxle.engine.plan.planned import Plan
from transaxle.engine.views.encode import Encode
from transaxle.formats.staging.leftovers import Leftover, leftovers
from transaxle.formats.staging.leftovers import clean as _clean
from transaxle.formats.staging.location import takes_parts
from transaxle.move.workers import Limits, Progress, limits, unwatched

if TYPE_CHECKING:
    from transaxle.derivation.sources import Table
    from transaxle.engine.distribute.driver import On


_OPENED: dict[str, Any] = {"average": False, "only": (), "skip": ()}
_PLANNED: dict[str, Any] = {**_OPENED, "shard_size": SHARD_SIZE, "allow_lossy": False, "strict": False}
"""Where options stand that are not given, if not at None."""
_CONVERTED = ("hf", "converted")
"""Dialects of a function's table: what it takes and what it gives."""


class Opening(Reading, total=False):
    """How a checkpoint is opened; see `Reading` for the rest."""

    only: Patterns
    """Patterns of the names that `decode` or `dtype` is for; none: all."""
    skip: Patterns
    """Patterns of the names that it is not for."""


class Planning(Opening, total=False):
    """How a conversion is planned; see `Reading` for the rest."""

    shard_size: Size
    """Bytes of tensors per file."""
    allow_lossy: bool
    """Run a dialect's arithmetic."""
    strict: bool
    """Refuse tensors without a line in the target dialect instead of keeping them under their names."""
    encode: str | None
    """`float8_block`, `mxfp8` or `nvfp4`: weights of linear layers are written in this encoding."""
    tp: int | None
    """Tensor-parallel ranks of a checkpoint with a folder for each rank (`megatron_torch`)."""
    pp: int | None
    """Its pipeline stages."""
    ep: int | None
    """Its expert-parallel ranks."""
    make_vocab_size_divisible_by: int | None
    """Its vocabulary is padded to a multiple of this, times `tp`; 128 where it is not given, as in Megatron."""
    jobs: int | None
    """Worker threads."""
    memory: Size | None
    """Bytes of all buffers together."""


class Converting(Planning, total=False):
    """How a conversion is planned and carried out; see `Planning` for the rest."""

    on: On | None
    """Who carries it out: `ray`, `ray://HOST:PORT`, `torchrun`, an executor, or a pool with `submit`."""
    items: int | None
    """Into how many items of work it is divided then."""


@shows(Opening, **_OPENED)
def open(path: PathLike, **reading: Unpack[Opening]) -> Checkpoint:  # noqa: A001 - the contract's name
    """Open a checkpoint; nothing is loaded and torch is not imported.

    Args:
        path: a folder or a file.
        **reading: `format`, `family`, `dialect` (of the checkpoint's names), `config` (a path, a mapping or an object
            with `to_dict()`), `axes` (axis -> size), `rules` (path), `weights` (`fp32` or `lp`, of a DeepSpeed
            checkpoint), `optimizer` (whether to include its state), `average` (replace replicas of a DeepSpeed
            checkpoint that differ by their mean), `decode` (`bf16` or `fp32`: show encoded tensors as plain ones,
            decoded when they are read) or `dtype` (`bf16`, `fp16` or `fp32`: cast plain floating-point tensors when
            they are read), with `only` and `skip` (patterns of the names to change, or to leave unchanged); or `merge`
            (path of a LoRA adapter of peft, merged into the weights when they are read).

    Raises:
        TypeError: an argument of a type that it cannot have.
        StorageError: IO if the path is missing or unreadable.
        Refused: CORRUPT, INCOMPLETE, UNSUPPORTED …: every problem in the files.
        UsageError: UNKNOWN_AXIS for an axis that no family has.
    """
    check_keywords("open", reading, Opening.__annotations__)
    return open_checkpoint(path, **reading)


@shows(Opening, **_OPENED)
def info(src: CheckpointLike, **reading: Unpack[Opening]) -> dict[str, Any]:
    """Describe a checkpoint by its headers: how it is recognised, and what it holds.

    Args:
        src: path, or an opened checkpoint.
        **reading: as for `open`.

    Returns:
        Plain data, which `transaxle info PATH --json` prints beside what it says of the installation: `format`,
        `family`, `dialect`, `reason` (of a family that is not recognised), `axes`, `unknown` (names that no line
        reads), `tensors`, `bytes`, `dtypes`, `encodings`, `files`, `manifest` and others.
    """
    from transaxle.engine.facts.checkpoint_facts import checkpoint_facts

    check_keywords("info", reading, Opening.__annotations__)
    with opened("src", src, reading) as checkpoint:
        return checkpoint_facts(checkpoint)


def check_rules(rules: PathLike, path: PathLike | None = None) -> dict[str, Any]:
    """Check a table of families and dialects, and tell what it reads of a checkpoint.

    Args:
        rules: path of the table.
        path: a checkpoint that the table is for.

    Returns:
        Plain data, as `transaxle check-rules --json` prints it: `families` that the table declares; with a checkpoint
        also `reads`, and `fits`, which is False where a tensor does not have the shape that its line says.

    Raises:
        Refused: CORRUPT with every mistake in the table.
        UsageError: UNKNOWN_FAMILY where the table reads no name of the checkpoint.
    """
    from transaxle.engine.facts.rules_facts import rules_facts

    return rules_facts(read_path("rules", rules), None if path is None else read_path("path", path))


@contextmanager
def _planned(
    src: CheckpointLike, dst: PathLike, to: str, options: Mapping[str, Any]
) -> Iterator[tuple[Prepared, str, Limits]]:
    """Give the plan of a conversion, its target as text, and the workers that it may have."""
    reading = {name: value for name, value in options.items() if name in Reading.__annotations__}
    target, limit = read_path("dst", dst), limits(options.get("jobs"), options.get("memory"))
    shard_size = read_size("shard_size", options.get("shard_size", SHARD_SIZE))
    allow_lossy, strict = (read_flag(name, options.get(name, False)) for name in ("allow_lossy", "strict"))
    encode = _encode(options, reading)
    with in_order(src, target), opened("src", src, reading) as checkpoint:
        prepared = make_plan(
            checkpoint,
            read_text("to", to, "safetensors:hf"),
            shard_size=shard_size,
            allow_lossy=allow_lossy,
            strict=strict,
            target=target,
            encode=encode,
            degrees=read_degrees(options),
        )
        yield prepared, target, limit


def _encode(options: Mapping[str, Any], reading: dict[str, Any]) -> Encode | None:
    """Return what is to be encoded; where something is decoded or cast instead, `reading` gets the patterns."""
    only, skip = (read_patterns(name, options.get(name, ())) for name in ("only", "skip"))
    given = [name for name in ("decode", "dtype", "encode", "merge") if options.get(name) is not None]
    if len(given) > 1:
        raise TypeError(f"{' and '.join(given)} exclude each other; give only one")
    if (only or skip) and given in ([], ["merge"]):
        raise TypeError("only and skip need decode, encode or dtype")
    if options.get("encode") is not None:
        return Encode(read_text("encode", options["encode"], "mxfp8"), only, skip)
    if given and given != ["merge"]:
        reading.update(only=only, skip=skip)
    return None


@shows(Planning, **_PLANNED)
def plan(
    src: CheckpointLike,
    dst: PathLike,
    *,
    to: str,
    overwrite: Overwrite = False,
    resume: bool = False,
    **options: Unpack[Planning],
) -> Plan:
    """Plan a conversion without writing anything; with the arguments of `convert`, it finds every refusal in advance.

    Args:
        src: path, or an opened checkpoint.
        dst: where it would be written.
        to: `FORMAT[:DIALECT]`; `hf` is short for `safetensors:hf`.
        overwrite: plan to replace the checkpoint at `dst`.
        resume: plan to continue an interrupted run.
        **options: those of `convert`, and those of `open`.

    Returns:
        The plan; `.refusals` lists all that prevents it, in the tensors and files of `src` and at `dst`.
    """
    check_keywords("plan", options, Planning.__annotations__)
    read_flag("resume", resume)
    with _planned(src, dst, to, options) as (prepared, target, limit):
        return preflight(prepared, target, overwrite=overwrite, resume=resume, limit=limit).plan


@shows(Converting, **_PLANNED)
def convert(
    src: CheckpointLike,
    dst: PathLike,
    *,
    to: str,
    overwrite: Overwrite = False,
    resume: bool = False,
    sync: bool = True,
    verify: bool = False,
    progress: Progress = unwatched,
    **options: Unpack[Converting],
) -> Report:
    """Convert a checkpoint; the target appears complete or not at all.

    Args:
        src: path, or an opened checkpoint.
        dst: folder, or one file (`.safetensors`, `.bin`, `.pt`, `.pth`); it must not exist unless `overwrite`.
        to: `FORMAT[:DIALECT]`; `hf` is short for `safetensors:hf`.
        overwrite: replace the checkpoint at `dst`; it stays readable until the new one is complete. If its folder
            contains anything else, True refuses, and `"everything"` removes that too.
        resume: keep finished work if interrupted, and continue it; a `dst` that is already the expected result stays as
            it is. Without it, unfinished work beside `dst` is refused, and with `overwrite` deleted.
        sync: sync everything to disk before `dst` appears.
        verify: read the result back, check it against its manifest and compare it with `src`; the report has the
            verification. What is read of `src` is always held against its own hashes, if it has any.
        progress: called with the bytes of each block written, from several threads.
        **options: `shard_size` (bytes of tensors per file, 5_000_000_000 or "5GB"; ignored if `dst` is one file),
            `allow_lossy` (allow a dialect's arithmetic), `strict` (refuse tensors without a line in the target dialect
            instead of keeping them under their names), `encode` (`float8_block`, `mxfp8` or `nvfp4`: write the weights
            of linear layers in this encoding), `only` (patterns of the table names to encode instead, or, with `decode`
            or `dtype`, to decode or cast) and `skip` (patterns of names to leave unchanged), `tp`, `pp`, `ep` and
            `make_vocab_size_divisible_by` (the ranks of `megatron_torch`, which has a folder for each; for
            `torch_dist` the first and the last, which pad), `jobs` (worker threads), `memory` (bytes of all buffers
            together); `on` (by whom: "ray", "ray://HOST:PORT", "torchrun", an object with the method of `Executor`, or
            a pool with `submit`; `jobs` and `memory` are then those of each worker) and `items` (into how many items of
            work; one for each GiB); and those of `open`.

    Raises:
        TypeError: an argument of a type that it cannot have.
        TransaxleError: all refusals at once, before anything is written; or what went wrong while writing.
    """
    check_keywords("convert", options, Converting.__annotations__)
    check_flags(resume=resume, sync=sync, verify=verify)
    on, items = options.get("on"), options.get("items")
    if on is not None and verify:
        raise TypeError("verify is for a conversion in this process; after one with on, call tx.verify(src, dst)")
    if on is not None:
        how = {"overwrite": overwrite, "resume": resume, "sync": sync, "progress": progress}
        return _converted_on(on, how, src, dst, to, options)
    if items is not None:
        raise TypeError("items needs on: nothing else is divided")
    with _planned(src, dst, to, options) as (prepared, target, limit):
        carry_out: Callable[..., Report] = execute
        if takes_parts(target):
            from transaxle.engine.distribute.driver import convert_in_parts as carry_out
        report = carry_out(
            prepared, target, overwrite=overwrite, resume=resume, sync=sync, limit=limit, progress=progress
        )
        return _verified(prepared, target, report, src, options, limit) if verify else report


def _verified(
    prepared: Prepared, target: str, report: Report, src: CheckpointLike, options: Mapping[str, Any], limit: Limits
) -> Report:
    """Read the result back, with what was said when the source was opened; return the report with the verification."""
    from transaxle.engine.execute.read_back import read_back, refuse_unequal

    known: Mapping[str, Any] = options
    if isinstance(src, Checkpoint):
        known = src.reopening.options if src.reopening else {}
    reading = {name: value for name, value in known.items() if name in Reading.__annotations__}
    found = read_back(prepared, target, reading, limit)
    refuse_unequal(found, target)
    return replace(report, verification=found)


def _converted_on(
    on: On, how: Mapping[str, Any], src: CheckpointLike, dst: PathLike, to: str, options: Mapping[str, Any]
) -> Report:
    """Convert by several workers, which open the source themselves."""
    from transaxle.engine.distribute.driver import Launch
    from transaxle.engine.distribute.work_plan import order
    from transaxle.live.conversion.chosen_workers import convert_by

    jobs = options.get("jobs")
    memory = limits(jobs, options.get("memory")).memory if "memory" in options else None
    launch = Launch(on=on, items=options.get("items"), jobs=jobs, memory=memory, **how)
    if isinstance(src, Checkpoint):
        raise TypeError("on needs the path of src: other processes open it themselves")
    reading = {name: value for name, value in options.items() if name in Reading.__annotations__}
    encode = _encode(options, reading)
    shaping = {name: value for name, value in options.items() if name in Planning.__annotations__} | {"encode": encode}
    asked = order(
        read_source("src", src), read_path("dst", dst), read_text("to", to, "safetensors:hf"), reading, shaping
    )
    with ExitStack() as stack:
        return convert_by(asked, lambda: stack.enter_context(_planned(src, dst, to, options))[0], launch)


@shows(Opening, **_OPENED)
def verify(
    a: CheckpointLike,
    b: CheckpointLike | None = None,
    *,
    jobs: int | None = None,
    progress: Progress = unwatched,
    **reading: Unpack[Opening],
) -> Verification:
    """Verify one checkpoint against its own manifest, or two against each other across formats and dialects.

    Args:
        a: path or opened checkpoint.
        b: the other one; None: `a`'s manifest.
        jobs: worker threads.
        progress: called with the bytes of each block read.
        **reading: as for `open`; `dialect` and `format` apply to the first checkpoint only.

    Returns:
        The verification. It is true if all is well, so `assert tx.verify(a, b)` fails if they differ; `.ok` is the same
        verdict, and `.problems` and `.differences` list what is wrong.
    """
    check_keywords("verify", reading, Opening.__annotations__)
    if b is None:
        with opened("a", a, reading) as checkpoint:
            return _verify(checkpoint, limits(jobs), progress)
    with opened_pair(a, b, reading) as (first, second):
        return verify_against(first, second, limits(jobs), progress)


@shows(Opening, **_OPENED)
def diff(
    a: CheckpointLike,
    b: CheckpointLike,
    *,
    numeric: bool = False,
    jobs: int | None = None,
    progress: Progress = unwatched,
    **reading: Unpack[Opening],
) -> Comparison:
    """Compare two checkpoints across formats and dialects.

    Args:
        a: path or opened checkpoint.
        b: the other one.
        numeric: compare values, also across number formats, and measure their differences.
        jobs: worker threads.
        progress: called with the bytes of each block read.
        **reading: as for `open`; `dialect` and `format` apply to the first checkpoint only.

    Returns:
        The comparison. It is true if nothing differs; `.equal` is the same verdict.
    """
    check_keywords("diff", reading, Opening.__annotations__)
    read_flag("numeric", numeric)
    with opened_pair(a, b, reading) as (first, second):
        return _compare(first, second, numeric=numeric, limit=limits(jobs), progress=progress)


def derive(
    converter: str | Callable[[dict[str, Any]], Mapping[str, Any]],
    *,
    config: Config | None = None,
    samples: Sequence[Mapping[str, Any]] = (),
    configs: Sequence[Mapping[str, Any]] = (),
    family: str | None = None,
    dialects: tuple[str, str] = _CONVERTED,
) -> Table:
    """Derive a table from what a converter does with numbered elements.

    Args:
        converter: a model type of the installed transformers, or a function from a state dict to a state dict.
        config: of a model type: a config whose flags and kinds of layers count.
        samples: for a function: state dicts of numpy arrays or torch tensors whose values do not matter. Several, of
            models of different sizes, show which sizes hang together; the last one proves the table.
        configs: for a function: the config of each sample.
        family: name of the family; None: the model type's or the function's, of a lambda `derived`.
        dialects: for a function: names of what it takes and what it gives.

    Returns:
        The table; `.text` is what `--rules` reads, `.left_out` lists what no table can say.

    Raises:
        TypeError: the samples are no mappings of names to arrays or tensors, or the function returns none; an argument
            that is not for such a converter.
        ValueError: `configs` is not one for each sample, or `dialects` not two different names.
        Refused: UNSUPPORTED where no table says what the converter does.
        UsageError: UNKNOWN_FAMILY for a model type that transformers does not know.
    """
    from transaxle.derivation.sources import UNNAMED, are_dialects, family_name, from_function, from_transformers
    from transaxle.derivation.writing.table import Labels

    family = read_optional_text("family", family, "glm4_moe")
    if isinstance(converter, str):
        if samples or configs or dialects != _CONVERTED:
            raise TypeError("samples, configs and dialects are for a function, not for a model type")
        return from_transformers(converter, model_config(config), family)
    if not callable(converter):
        raise wrong_type("converter", "a model type or a function", converter)
    if config is not None:
        raise TypeError("config is for a model type; for a function, give configs, one for each sample")
    if not are_dialects(dialects):
        raise ValueError(f"dialects must be two different names, such as ('hf', 'mine'); got {dialects!r}")
    own_name = str(getattr(converter, "__name__", UNNAMED))
    name = family_name(family or (UNNAMED if own_name == "<lambda>" else own_name))
    return from_function(converter, samples, configs, Labels(name, dialects=dialects))


def clean(path: PathLike, *, remove: bool = True) -> tuple[Leftover, ...]:
    """Remove what killed runs have left beside a target, or directly inside a folder of targets.

    If a run died while it replaced a checkpoint, the old checkpoint is put back. On S3 these are uploads that were not
    completed, and unfinished work of several workers; a run that is still at work on them fails.

    Args:
        path: a target, which need not exist, a folder of targets, or a leftover itself; on S3 a URL, also of a bucket.
        remove: False only lists the leftovers.

    Returns:
        Each leftover with its `outcome`: `removed`, `put back`, `found` if `remove` is False, or `kept` with the reason
        in `why`: a process is using it, or it contains files that belong to no checkpoint.

    Raises:
        Refused: UNSUPPORTED for a URL of another service.
        StorageError: IO.
    """
    read_flag("remove", remove)
    found = leftovers(read_path("path", path))
    return tuple(_clean(each) if each.outcome == "found" else each for each in found) if remove else found


__all__ = [
    "Checkpoint",
    "Comparison",
    "Leftover",
    "Plan",
    "Report",
    "StoredTensor",
    "Verification",
    "check_rules",
    "clean",
    "convert",
    "derive",
    "diff",
    "info",
    "open",
    "plan",
    "verify",
]
