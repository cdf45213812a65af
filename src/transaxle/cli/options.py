"""Options that several commands share, spelled once, and the values they take."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem

from transaxle.cli.refusals import failed, interrupted
from transaxle.cli.screen import Screen
from transaxle.cli.units import parse_size
from transaxle.errors import TransaxleError, refuse


def _size(_ctx: click.Context, _param: click.Parameter, typed: str | None) -> int | None:
    """Read a number of bytes: `5GB`, `512MB`, `1.5GiB`."""
    count = None if typed is None else parse_size(typed)
    if typed is not None and not count:
        raise click.BadParameter(f"{typed!r} is not a size; write 5GB, 512MB or 1.5GiB")
    return count


def _axes(_ctx: click.Context, _param: click.Parameter, typed: tuple[str, ...]) -> dict[str, int]:
    """Read sizes of axes: `g=8`."""
    sizes: dict[str, int] = {}
    for text in typed:
        axis, equals, count = text.partition("=")
        if not (axis and equals and count.isascii() and count.isdigit()):
            raise click.BadParameter(f"{text!r} is not AXIS=SIZE, such as g=8")
        if sizes.setdefault(axis, int(count)) != int(count):
            raise click.BadParameter(f"axis {axis} is given twice: {sizes[axis]} and {count}")
    return sizes


def completing(names: Callable[[], Sequence[str]]) -> Callable[..., list[CompletionItem]]:
    """Return what click calls to complete one of these names."""

    def complete(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(name) for name in names() if name.startswith(incomplete)]

    return complete


def dialects() -> list[str]:
    """Return the dialects that ship, each once."""
    from transaxle.families import builtin

    labels = [label for family in builtin().values() for d in family.dialects for label in (d.name, d.label)]
    return sorted(dict.fromkeys(labels))


def _families() -> list[str]:
    from transaxle.families import builtin

    return sorted(builtin())


def _targets() -> list[str]:
    """Return what `--to` understands: dialects alone, and formats with dialects."""
    from transaxle.engine.plan import SINKS

    names = [*dialects(), "identity"]
    return [*names, *(f"{form}:{name}" for form in SINKS for name in names)]


_READING = (
    click.option("--family", metavar="NAME", shell_complete=completing(_families),
                 help="Model family, where it is not recognised."),
    click.option("--config", metavar="FILE", type=click.Path(), help="A config.json to take sizes from."),
    click.option("--axis", "axes", metavar="AXIS=SIZE", callback=_axes, multiple=True,
                 help="Size of one axis, such as g=8; may be repeated."),
    click.option("--rules", metavar="FILE", type=click.Path(), help="A table with families and dialects of your own."),
    click.option("--from", "dialect", metavar="DIALECT", shell_complete=completing(dialects),
                 help="Dialect of the source, where it is not recognised."),
    click.option("--format", metavar="FORMAT", help="Format of the source, where a folder holds several."),
    click.option("--weights", type=click.Choice(["fp32", "lp"]),
                 help="Of a DeepSpeed checkpoint: the weights that the optimizer keeps, or those in low precision."),
)  # fmt: skip
_PLANNING = (
    click.option("--to", metavar="TARGET", required=True, shell_complete=completing(_targets),
                 help="FORMAT, FORMAT:DIALECT, or a dialect: `hf` is short for safetensors:hf."),
    click.option("--shard-size", metavar="SIZE", callback=_size, default="5GB", show_default=True,
                 help="Tensors in one file that is written."),
    click.option("--allow-lossy", is_flag=True, help="Allow arithmetic that a table marks as lossy."),
    click.option("--strict", is_flag=True, help="Refuse tensors that the target dialect has no line for."),
)  # fmt: skip
_WORKING = (
    click.option("--jobs", metavar="N", type=click.IntRange(1, 1024), help="Workers.  [default: cores, up to 8]"),
    click.option("--memory", metavar="SIZE", callback=_size, help="Memory for all buffers together.  [default: 64MB]"),
)  # fmt: skip
_EVERYWHERE = (
    click.option("--all", "everything", is_flag=True, help="Print lists and refusals to their end."),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON document."),
)  # fmt: skip


def printing(body: Callable[..., int]) -> Callable[..., int]:
    """Add `--all` and `--json`, give the command its screen, and print what it raises."""

    @functools.wraps(body)
    def command(*args: Any, as_json: bool, everything: bool, **rest: Any) -> int:
        screen = Screen(as_json=as_json, everything=everything)
        try:
            return body(screen, *args, **rest)
        except TransaxleError as error:
            return failed(screen, error)
        except MemoryError:
            hint = "Give it less to hold at once: --memory 32MB --jobs 1."
            return failed(screen, refuse("IO", "not enough memory", hint=hint))
        except KeyboardInterrupt:
            return interrupted(screen)

    return _with(_EVERYWHERE, command)


def reading(body: Callable[..., int]) -> Callable[..., int]:
    """Add the options that say how a checkpoint is read; the command gets them as `said`, for `open_checkpoint`."""

    @functools.wraps(body)
    def command(*args: Any, axes: dict[str, int], **rest: Any) -> int:
        names = ("family", "config", "rules", "dialect", "format", "weights")
        said = {name: rest.pop(name) for name in names}
        given = {name: value for name, value in said.items() if value is not None}
        return body(*args, said={**given, **({"axes": axes} if axes else {})}, **rest)

    return _with(_READING, command)


def planning(body: Callable[..., int]) -> Callable[..., int]:
    """Add the options that say what is to be written."""
    return _with(_PLANNING, body)


def working(body: Callable[..., int]) -> Callable[..., int]:
    """Add the options that limit what a command uses of the machine; the command gets them as `limit`."""

    @functools.wraps(body)
    def command(*args: Any, jobs: int | None, memory: int | None, **rest: Any) -> int:
        from transaxle.engine.produce import limits

        return body(*args, limit=limits(jobs, memory), **rest)

    return _with(_WORKING, command)


def _with(
    options: Sequence[Callable[[Callable[..., int]], Callable[..., int]]], body: Callable[..., int]
) -> Callable[..., int]:
    for option in reversed(options):
        body = option(body)
    return body


def of_second(said: dict[str, Any]) -> dict[str, Any]:
    """Return what also holds for the second checkpoint of a comparison: all but its own dialect and format."""
    return {name: value for name, value in said.items() if name not in {"dialect", "format"}}
