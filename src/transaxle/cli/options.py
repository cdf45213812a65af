"""Options that several commands share, spelled once, and the values they take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import click
from click.shell_completion import CompletionItem

from transaxle.arguments import EVERYTHING, Overwrite, parse_size, read_degrees, read_float_type
from transaxle.cli.command import Bare
from transaxle.cli.screen.refusals import failed, interrupted
from transaxle.cli.screen.screen import Screen
from transaxle.cli.stop import outcome
from transaxle.errors import TransaxleError, refuse


class _FloatType(click.Choice[str]):
    """A choice of floating-point types; each is taken by any of its names (`bfloat16`, `BF16`)."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        name = read_float_type("type", value)
        return super().convert(name if name in self.choices else value, param, ctx)


def _size(_ctx: click.Context, _param: click.Parameter, typed: str | None) -> int | None:
    """Parse a number of bytes: `5GB`, `512MB`, `1.5GiB`."""
    count = None if typed is None else parse_size(typed)
    if typed is not None and not count:
        raise click.BadParameter(f"{typed!r} is not a size; write for example 5GB, 512MB or 1.5GiB")
    return count


def _memory(ctx: click.Context, param: click.Parameter, typed: str | None) -> int | None:
    """Parse the memory limit, and refuse one that is too small for a single worker."""
    from transaxle.move.workers import LEAST_MEMORY

    count = _size(ctx, param, typed)
    if count is not None and count < LEAST_MEMORY:
        raise click.BadParameter(f"{typed} is too little: one worker alone needs {LEAST_MEMORY >> 10}KiB of buffers")
    return count


def _axes(_ctx: click.Context, _param: click.Parameter, typed: tuple[str, ...]) -> dict[str, int]:
    """Parse sizes of axes: `g=8`."""
    sizes: dict[str, int] = {}
    for text in typed:
        axis, equals, count = text.partition("=")
        if not (axis and equals and count.isascii() and count.isdigit()):
            raise click.BadParameter(f"{text!r} is not AXIS=SIZE; write for example g=8")
        if sizes.setdefault(axis, int(count)) != int(count):
            raise click.BadParameter(f"axis {axis} is given twice: {sizes[axis]} and {count}")
    return sizes


def _overwrite(_ctx: click.Context, _param: click.Parameter, typed: str | None) -> Overwrite:
    return EVERYTHING if typed == EVERYTHING else typed is not None


def overwriting(what: str, text: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Return the option `--overwrite`; the command gets it as the Python functions take it.

    Args:
        what: what it replaces without a value.
        text: its help.
    """
    choice = click.Choice([what, EVERYTHING])
    return click.option(
        "--overwrite", cls=Bare, bare=what, metavar=f"[={EVERYTHING}]", type=choice, callback=_overwrite, help=text
    )


def completing(names: Callable[[], Sequence[str]]) -> Callable[..., list[CompletionItem]]:
    """Return the click callback that completes these names."""

    def complete(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(name) for name in names() if name.startswith(incomplete)]

    return complete


def dialects() -> list[str]:
    """Return the built-in dialects, each once."""
    from transaxle.families import builtin

    labels = [
        name
        for entry in builtin().everything.entries.values()
        for label in entry.dialects
        for name in (label.partition("@")[0], label)
    ]
    return sorted(dict.fromkeys(labels))


def families() -> list[str]:
    """Return the names of the families."""
    from transaxle.families import builtin

    return sorted(builtin())


def _readable() -> list[str]:
    from transaxle.formats.registry import every_format

    return [kind.name for kind in every_format()]


def _targets() -> list[str]:
    """Return the values of `--to`: dialects alone, and formats with dialects."""
    from transaxle.formats.registry import writable

    names = [*dialects(), "identity"]
    return [*names, *(f"{form}:{name}" for form in writable() for name in names)]


def _reading_options(optimizer_default: str) -> tuple[Callable[[Callable[..., int]], Callable[..., int]], ...]:
    """Return the options on how a checkpoint is read.

    Args:
        optimizer_default: what becomes of the optimizer state where the user says nothing.
    """
    return (
        click.option("--family", metavar="NAME", shell_complete=completing(families),
                     help="Model family, if it is not recognised."),
        click.option("--config", metavar="FILE", type=click.Path(readable=False),
                     help="Read the model's sizes from this config.json."),
        click.option("--axis", "axes", metavar="AXIS=SIZE", callback=_axes, multiple=True,
                     help="Size of one axis, for example g=8. Repeatable."),
        click.option("--rules", metavar="FILE", type=click.Path(readable=False),
                     help="File with families and dialects of your own."),
        click.option("--from", "dialect", metavar="DIALECT", shell_complete=completing(dialects),
                     help="Dialect of the source, if it is not recognised."),
        click.option("--format", metavar="FORMAT", shell_complete=completing(_readable),
                     help="Format of the source, if a folder holds several."),
        click.option("--weights", type=_FloatType(["fp32", "lp"]),
                     help="DeepSpeed, Megatron: read the optimizer's fp32 weights, or the model's own."),
        click.option("--optimizer/--no-optimizer", default=None,
                     help=f"Include the optimizer state, or leave it out.  [default: {optimizer_default}]"),
        click.option("--average-replicas", "average", is_flag=True, default=None,
                     help="DeepSpeed, Megatron: where replicas differ between ranks, use their mean."),
    )  # fmt: skip


class _Target(click.types.StringParamType):
    """The type of `--to`, which says what can be written where it is missing."""

    def get_missing_message(self, param: click.Parameter, ctx: click.Context | None) -> str:  # noqa: ARG002
        """Return what follows "Missing option"."""
        return "For example --to hf, --to dcp:torchtitan or --to torch_dist; `transaxle dialects` lists more."


_PLANNING = (
    click.option("--to", metavar="TARGET", required=True, type=_Target(), shell_complete=completing(_targets),
                 help="FORMAT, FORMAT:DIALECT, or DIALECT alone: `hf` is short for safetensors:hf."),
    click.option("--shard-size", metavar="SIZE", callback=_size, default="5GB", show_default=True,
                 help="Most bytes of tensors in one written file."),
    click.option("--allow-lossy", is_flag=True, help="Allow arithmetic that the table marks as lossy."),
    click.option("--strict", is_flag=True, help="Refuse tensors that have no line in the target dialect."),
)  # fmt: skip
_DEGREES = tuple(
    click.option(f"--{name.replace('_', '-')}", name, metavar="N", type=click.IntRange(1, 1 << 20), help=text)
    for name, text in (
        ("tp", "megatron_torch: tensor-parallel ranks; torch_dist: those for which to pad.  [default: 1]"),
        ("pp", "megatron_torch only: pipeline stages.  [default: 1]"),
        ("ep", "megatron_torch only: expert-parallel ranks.  [default: 1]"),
        ("make_vocab_size_divisible_by",
         "megatron_torch, torch_dist: pad the vocabulary to N times --tp.  [default: 128; torch_dist: none]"),
    )
)  # fmt: skip
_DERIVE = click.option("--derive", is_flag=True,
                       help="If no table knows the model, derive one from the installed transformers.")  # fmt: skip
_DECODE = click.option("--decode", type=_FloatType(["bf16", "fp32"]),
                       help="Decode quantized tensors to this dtype.")  # fmt: skip
_RECODING = (
    _DECODE,
    click.option("--encode", type=click.Choice(["float8_block", "mxfp8", "nvfp4"]),
                 help="Quantize the weights of linear layers in this encoding."),
    click.option("--dtype", type=_FloatType(["bf16", "fp16", "fp32"]),
                 help="Cast plain floating-point tensors to this type."),
    click.option("--merge", metavar="ADAPTER", type=click.Path(readable=False),
                 help="Merge this LoRA adapter of peft (a folder) into the weights."),
    click.option("--only", metavar="PATTERN", multiple=True,
                 help="Decode, encode or cast only tensors with these names; * stands for any text.  Repeatable."),
    click.option("--skip", metavar="PATTERN", multiple=True,
                 help="Leave tensors with these names unchanged.  Repeatable."),
)  # fmt: skip
_WORKING = (
    click.option("--jobs", metavar="N", type=click.IntRange(1, 1024), help="Threads.  [default: cores, up to 8]"),
    click.option("--memory", metavar="SIZE", callback=_memory,
                 help="Memory for all buffers together.  [default: 64MB]"),
    click.option("--profile", metavar="FILE", type=click.Path(readable=False), envvar="TRANSAXLE_TRACE",
                 help="Write what was done when, and in which thread, into FILE, for https://ui.perfetto.dev."),
)  # fmt: skip
_WRITING = (
    overwriting("checkpoint",
                "Replace the checkpoint at DST once the new one is complete; `=everything` also deletes the other "
                "files in its folder."),
    click.option("--resume", is_flag=True, help="Keep finished work if interrupted, and continue it."),
    click.option("--verify", "check", is_flag=True,
                 help="Read the result back, and check it against SRC and its manifest."),
    click.option("--no-sync", is_flag=True, help="Do not wait until everything is on disk."),
)  # fmt: skip
_EVERYWHERE = (
    click.option("--all", "everything", is_flag=True, help="Print all rows of lists and all refusals."),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON document."),
    click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors, and JSON where --json asks for it."),
    click.option("-v", "--verbose", is_flag=True, help="Say what was done, and how long it took."),
)  # fmt: skip


def printing(body: Callable[..., int]) -> Callable[..., int]:
    """Add the options on what is printed, give the command its screen, and print the errors that it raises."""

    @wraps(body)
    def command(*args: Any, **options: Any) -> int:
        names = ("as_json", "everything", "quiet", "verbose")
        profile = options.pop("profile", None)  # of commands that move bytes
        screen = Screen(**{name: options.pop(name) for name in names})
        if screen.quiet and screen.verbose:
            raise click.UsageError("--quiet and --verbose exclude each other; give only one")
        try:
            if profile is None:
                return body(screen, *args, **options)
            from transaxle.cli.shell.profile_file import profiled

            with profiled(profile):
                return body(screen, *args, **options)
        except TransaxleError as error:
            return failed(screen, error)
        except MemoryError:
            hint = "Use smaller buffers: --memory 32MB --jobs 1."
            return failed(screen, refuse("IO", "not enough memory", hint=hint))
        except KeyboardInterrupt as stop:
            return interrupted(screen, *outcome(stop))

    return _with(_EVERYWHERE, command)


def reading(body: Callable[..., int], optimizer_default: str = "include it") -> Callable[..., int]:
    """Add the options on how a checkpoint is read; the command gets them as `source_options`, for `open_checkpoint`.

    Args:
        body: the command.
        optimizer_default: as for `_reading_options`.
    """

    @wraps(body)
    def command(*args: Any, axes: dict[str, int], **other_options: Any) -> int:
        names = ("family", "config", "rules", "dialect", "format", "weights", "optimizer", "average")
        source_options = {name: other_options.pop(name) for name in names}
        options_given = {name: value for name, value in source_options.items() if value is not None}
        return body(*args, source_options={**options_given, **({"axes": axes} if axes else {})}, **other_options)

    return _with(_reading_options(optimizer_default), command)


def deriving(body: Callable[..., int]) -> Callable[..., int]:
    """Add the option that derives a missing table, which joins the command's `source_options`. Below `printing`."""

    @wraps(body)
    def command(
        screen: Screen, *args: Any, src: str, source_options: dict[str, Any], derive: bool, **other_options: Any
    ) -> int:
        if derive:
            from transaxle.cli.tracing import check_dialect, check_target, with_table

            screen.consequence = "nothing was written"

            def check() -> None:
                check_dialect(**other_options)
                if click.get_current_context().info_name == "convert":
                    check_target(**other_options)

            source_options = with_table(screen, src, source_options, check)
        return body(screen, *args, src=src, source_options=source_options, **other_options)

    return _with((_DERIVE,), command)


def planning(body: Callable[..., int]) -> Callable[..., int]:
    """Add the options on what is written; the command gets `degrees`: for which ranks, or None."""

    @wraps(body)
    def command(*args: Any, **other_options: Any) -> int:
        names = ("tp", "pp", "ep", "make_vocab_size_divisible_by")
        return body(*args, degrees=read_degrees({name: other_options.pop(name) for name in names}), **other_options)

    return _with((*_PLANNING, *_DEGREES), command)


def writing(body: Callable[..., int]) -> Callable[..., int]:
    """Add the options on how the result reaches its place."""
    return _with(_WRITING, body)


def decoding(body: Callable[..., int]) -> Callable[..., int]:
    """Add the option that shows encoded tensors as plain ones. Below `reading`: it joins the command's
    `source_options`.
    """

    @wraps(body)
    def command(*args: Any, source_options: dict[str, Any], decode: str | None, **other_options: Any) -> int:
        return body(
            *args, source_options={**source_options, "decode": decode} if decode else source_options, **other_options
        )

    return _with((_DECODE,), command)


def recoding(body: Callable[..., int]) -> Callable[..., int]:
    """Add the options that change numbers. Below `reading`: decoding and casting join the command's `source_options`.

    The command gets `encode`: what to encode, or None.
    """

    @wraps(body)
    def command(
        *args: Any,
        source_options: dict[str, Any],
        decode: str | None,
        encode: str | None,
        dtype: str | None,
        merge: str | None,
        only: tuple[str, ...],
        skip: tuple[str, ...],
        **other_options: Any,
    ) -> int:
        from transaxle.engine.views.encode import Encode

        given = {"--decode": decode, "--encode": encode, "--dtype": dtype, "--merge": merge}
        changes = [name for name, value in given.items() if value]
        if len(changes) > 1:
            raise click.UsageError(f"{' and '.join(changes)} exclude each other; give only one")
        if (only or skip) and changes in ([], ["--merge"]):
            raise click.UsageError("--only and --skip need --decode, --encode or --dtype")
        if decode:
            source_options = {**source_options, "decode": decode, "only": only, "skip": skip}
        if merge:
            source_options = {**source_options, "merge": merge}
        if dtype:
            source_options = {**source_options, "dtype": dtype, "only": only, "skip": skip}
        return body(
            *args, source_options=source_options, encode=Encode(encode, only, skip) if encode else None, **other_options
        )

    return _with(_RECODING, command)


def working(body: Callable[..., int]) -> Callable[..., int]:
    """Add the options that limit the use of the machine; the command gets them as `limit`."""

    @wraps(body)
    def command(*args: Any, jobs: int | None, memory: int | None, **other_options: Any) -> int:
        from transaxle.move.workers import limits

        return body(*args, limit=limits(jobs, memory), **other_options)

    return _with(_WORKING, command)


def _with(
    options: Sequence[Callable[[Callable[..., int]], Callable[..., int]]], body: Callable[..., int]
) -> Callable[..., int]:
    for option in reversed(options):
        body = option(body)
    return body


_DIVIDING = (
    click.option("--on", metavar="WHERE", help="Let several processes do it: ray, ray://HOST:PORT or torchrun."),
    click.option("--items", metavar="N", type=click.IntRange(1, 1 << 20),
                 help="Divide their work into so many items.  [default: one for each GiB]"),
)  # fmt: skip


def said(name: str) -> int | None:
    """Return the threads (`jobs`) or the memory that the user typed, for workers elsewhere; None: they choose."""
    typed: int | None = click.get_current_context().params[name]
    return typed


def converting(body: Callable[..., int]) -> Callable[..., int]:
    """Add all that a conversion takes: its places, and what is read, changed, written and printed."""
    parts = (
        click.argument("src", type=click.Path(readable=False)),
        click.argument("dst", type=click.Path(readable=False)),
        planning,
        partial(reading, optimizer_default="include it, except with `--to hf`"),
        *(recoding, writing, working, *_DIVIDING, printing, deriving),
    )
    return _with(parts, body)
