"""The "verbs": public functions that open, convert and compare checkpoints; the command line calls them too.

The module `options` documents every option; tests compare the signatures in this module with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from transaxle.arguments import (
    Axes,
    Config,
    DType,
    Mesh,
    Overwrite,
    PathLike,
    Patterns,
    Size,
    Weights,
    read_degrees,
    read_mesh,
    read_options,
    read_path,
    read_source,
    read_text,
    suggests,
)
from transaxle.engine.checkpoint.checkpoint import Checkpoint, CheckpointLike, open_checkpoint, open_source
from transaxle.engine.observers import Progress, Unverified, Unwatched, Watch, no_progress, report_progress
from transaxle.errors import Refused
from transaxle.options import GRAFTING, OPENING, READING, SHAPING, SHARD_SIZE, select

if TYPE_CHECKING:
    from transaxle.engine.carry import Report
    from transaxle.engine.compare import Comparison
    from transaxle.engine.distribute.driver import On
    from transaxle.engine.distribute.work_plan import ConversionOrder
    from transaxle.engine.execute import CheckedPlan
    from transaxle.engine.plan.conversion import Prepared
    from transaxle.engine.plan.planned import Plan
    from transaxle.engine.support import Support
    from transaxle.engine.verification import Verification
    from transaxle.engine.views.encode import Encode
    from transaxle.readers.checking import Check
    from transaxle.reports.reporting import ConversionPage


@suggests
def open(  # noqa: A001 - the contract's name
    path: PathLike,
    *,
    format: str | None = None,  # noqa: A002 - the contract's name
    family: str | None = None,
    dialect: str | None = None,
    config: Config | None = None,
    axes: Axes | None = None,
    rules: PathLike | None = None,
    weights: Weights | None = None,
    optimizer: bool | None = None,
    average: bool = False,
    ranks: str | None = None,
    graft: PathLike | None = None,
    graft_over: Patterns = (),
    decode: DType | None = None,
    restate: str | None = None,
    dtype: DType | None = None,
    merge: PathLike | None = None,
    only: Patterns = (),
    skip: Patterns = (),
) -> Checkpoint:
    """Open a checkpoint; no tensor is read, and torch is not imported.

    Args:
        path: path or URL of the checkpoint: a folder or a file.
        format: container format, such as `dcp`; None means that the files determine it.
        family: model family, such as `qwen3_moe`; None means that config and tensor names determine it.
        dialect: dialect of the checkpoint's tensor names, such as `hf`; None means that the names determine it.
        config: the model's config: a path, a mapping, or an object with `to_dict()`; None means the checkpoint's.
        axes: sizes of axes, which replace those from config and files: `{"g": 8}`, "g=8" or ["g=8"].
        rules: path of the user's own rules file, with mapping rules for tensor names.
        weights: weights of a DeepSpeed or Megatron checkpoint to read: the optimizer's `fp32`, or the model's `lp`.
        optimizer: whether to include the optimizer's state; None means to include it, except in `safetensors:hf`.
        average: whether to replace replicas that differ between ranks (DeepSpeed, Megatron) by their mean.
        ranks: names of the torch files of a job's ranks, such as `model_rank{}.pt`; None means verl's names.
        graft: path or URL of a checkpoint of the same model, from which tensors are taken that `path` lacks.
        graft_over: patterns of the names of tensors of `path` that are replaced by those of `graft`.
        decode: `bf16` or `fp32`: the dtype to which quantized tensors are decoded when they are read.
        restate: convention or encoding in which quantized tensors are shown with the same values, such as `modelopt`.
        dtype: `bf16`, `fp16` or `fp32`: the dtype to which unquantized tensors are cast when they are read.
        merge: path of a peft LoRA adapter, merged into the weights when they are read.
        only: patterns of the tensor names to which `decode` or `dtype` applies; empty means all tensors.
        skip: patterns of the tensor names to which `decode` and `dtype` do not apply.

    Raises:
        TypeError: if an argument has a wrong type, or options exclude each other.
        StorageError: with the code IO if the path is missing or unreadable.
        Refused: with the code CORRUPT, INCOMPLETE, UNSUPPORTED or others; the error lists every problem in the files.
        UsageError: with the code UNKNOWN_AXIS if `axes` names an axis that no family has.
    """
    return open_checkpoint(path, **read_options("open", locals()))


@suggests
def info(
    src: CheckpointLike,
    *,
    format: str | None = None,  # noqa: A002 - the contract's name
    family: str | None = None,
    dialect: str | None = None,
    config: Config | None = None,
    axes: Axes | None = None,
    rules: PathLike | None = None,
    weights: Weights | None = None,
    optimizer: bool | None = None,
    average: bool = False,
    ranks: str | None = None,
    graft: PathLike | None = None,
    graft_over: Patterns = (),
    decode: DType | None = None,
    restate: str | None = None,
    dtype: DType | None = None,
    merge: PathLike | None = None,
    only: Patterns = (),
    skip: Patterns = (),
) -> dict[str, Any]:
    """Describe a checkpoint from the headers of its files: format, family, dialect, and contents.

    Args:
        src: path of a checkpoint, or an opened checkpoint.

    The other arguments are those of `open`.

    Returns:
        Plain data, as `transaxle info PATH --json` prints it: `format`, `family`, `dialect`, `reason` (why no family is
        recognised), `axes`, `unknown` (tensor names without a mapping rule), `tensors`, `bytes`, `files` and others.
    """
    from transaxle.engine.checkpoint_facts import checkpoint_facts

    with open_source("src", src, read_options("info", locals())) as checkpoint:
        return checkpoint_facts(checkpoint)


@suggests
def check(
    src: CheckpointLike,
    reader: str,
    *,
    python: PathLike | None = None,
    time_limit: int | None = None,
    format: str | None = None,  # noqa: A002 - the contract's name
    family: str | None = None,
    dialect: str | None = None,
    config: Config | None = None,
    axes: Axes | None = None,
    rules: PathLike | None = None,
    weights: Weights | None = None,
    optimizer: bool | None = None,
    average: bool = False,
    ranks: str | None = None,
) -> Check:
    """Check whether a program loads every tensor of a checkpoint, each to its place, with its values.

    The program's own loading code runs on the names, shapes and dtypes, in a process of its own; of the files, only
    headers, configs and scales of one element are read. Results are kept for equal names, configs and versions.

    Args:
        src: path of a checkpoint, or an opened checkpoint.
        reader: name of the program, such as `transformers` or `vllm`.
        python: path of the Python interpreter of the environment in which the program is installed; None means this
            one.
        time_limit: seconds after which the program is stopped; None means 600.

    The other arguments are those of `open`.

    Returns:
        The verdict, which is true if the program loads the checkpoint as it is; `.findings` lists what it does
        otherwise, and what would mend it.

    Raises:
        UsageError: with the code AMBIGUOUS if Transaxle does not know the program.
        Refused: with the code UNSUPPORTED if the program is not installed there, does not open this format, or takes
            too long.
    """
    from transaxle.readers.checking import check as check_opened

    options = read_options("check", locals())
    reader = read_text("reader", reader, "transformers")
    how = select(options, ("python", "time_limit"))
    with open_source("src", src, select(options, READING)) as checkpoint:
        return check_opened(checkpoint, reader, **how)


def _encode_request(options: Mapping[str, Any]) -> Encode | None:
    """Return which tensors the user wants to encode; None for no tensors."""
    if (encoding := options.get("encode")) is None:
        return None
    from transaxle.engine.views.encode import Encode

    return Encode(encoding, options.get("only", ()), options.get("skip", ()), options.get("group_size") or 0)


_WORK = ("overwrite", "sync", "jobs", "memory")
"""Options of a conversion that a plan file contains."""


class _Conversion:
    """A conversion that the user has requested, with options that have been checked.

    Args:
        src: path of a checkpoint, or an opened checkpoint.
        dst: path or URL of the target.
        options: option name -> value, for options that differ from their defaults.
        watch: observer of the run.

    Attributes:
        target: path or URL of the target.
        opening: option name -> value, for opening the source.
        limit: maximum number of workers, and maximum memory.
        page: object that writes the HTML page; None if no page was requested, and on all ranks of a job but the first.
        order: the conversion as plain data for other processes; None if this process converts alone.

    Raises:
        TypeError: if the source is an opened checkpoint, although other processes must open it themselves.
        TransaxleError: if creating `order` fails, or the page cannot be written.
    """

    def __init__(self, src: CheckpointLike, dst: PathLike, options: Mapping[str, Any], watch: Watch) -> None:
        from transaxle.move.workers import limits

        self._src, self._options, self._watch = src, options, watch
        self.target = read_path("dst", dst)
        self._encode = _encode_request(options)
        self._degrees, self._shaping = read_degrees(options), select(options, SHAPING)
        self.opening = select(options, OPENING if self._encode is None else (*READING, *GRAFTING))
        self.limit = limits(options.get("jobs"), options.get("memory"))
        self._together = options.get("on") == "torchrun"
        if "reader" in options:
            from transaxle.engine.plan.conversion import parse_to
            from transaxle.readers.checking import require_reader

            require_reader(options["reader"], options.get("python"), parse_to(options["to"])[0], self.target)
        self._leads = True
        if self._together:
            from transaxle.engine.distribute.driver import is_lead

            self._leads = is_lead()
        self.page: ConversionPage | None = self._new_page() if "report" in options and not self._together else None
        self.order: ConversionOrder | None = None
        if "on" in options or "write" in options:
            from transaxle.engine.distribute.driver import check_on
            from transaxle.engine.distribute.work_plan import order

            if "on" in options:
                check_on(options["on"])
            if isinstance(src, Checkpoint):
                needs = "on" if "on" in options else "write"
                raise TypeError(f"{needs} needs the path of src: other processes open it themselves")
            how: dict[str, Any] = {"encode": self._encode, "degrees": self._degrees}
            self.order = order(read_source("src", src), self.target, options["to"], self.opening, self._shaping, **how)

    def _new_page(self) -> ConversionPage:
        from transaxle.reports.reporting import ConversionPage

        return ConversionPage(self._options["report"])

    @contextmanager
    def open_and_plan(self, *, running: bool) -> Iterator[CheckedPlan]:
        """Open the source, plan the conversion, and check the target; files stay open inside the `with` block.

        Args:
            running: whether the plan will be executed next; the value is passed to `preflight`.
        """
        from transaxle.engine.execute import explain_swapped, preflight
        from transaxle.engine.plan.conversion import make_plan

        with explain_swapped(self._src, self.target), open_source("src", self._src, self.opening) as checkpoint:
            with self._watch.working("planning"):
                prepared = make_plan(
                    checkpoint,
                    self._options["to"],
                    target=self.target,
                    encode=self._encode,
                    degrees=self._degrees,
                    **self._shaping,
                )
                target = self.target if self.order is None or not running else self.order.target
                how: dict[str, Any] = {"running": running, "several": self.order is not None, "limit": self.limit}
                cleared = preflight(prepared, target, **how, **select(self._options, ("overwrite", "resume")))
            self._watch.planned(cleared)
            yield cleared

    def carry_out(self, progress: Progress) -> Report:
        """Carry out the conversion; then, if the user asked for it, read the result back and write the HTML page.

        Args:
            progress: function that is called with the number of bytes written.
        """
        from transaxle.engine.plan.conversion import require_ready

        way_on = "run the same command again to continue" if self._options.get("resume", False) else ""
        with ExitStack() as stack:
            prepared: Prepared | None = None
            if self._together:
                self._watch.state("nothing was written", way_on)
                report = self._by_ranks(progress)
                if self._leads and self.order is not None:
                    prepared = stack.enter_context(self.order.prepare())
            else:
                prepared = cleared = stack.enter_context(self.open_and_plan(running=True))
                if self.page is not None:
                    self.page.write_refused(cleared.plan)
                require_ready(cleared)
                self._watch.state("nothing was written", way_on)
                report = self._execute(cleared, progress)
            if prepared is not None and self._options.get("verify", False):
                self._watch.state(f"{self.target} is written, but not verified")
                report = replace(report, verification=self._read_back(prepared))
            if prepared is not None and "reader" in self._options:
                self._watch.state(f"{self.target} is written, but not checked for {self._options['reader']}")
                report = replace(report, check=self._check())
            if prepared is not None and self.page is not None:
                self._watch.state(f"{self.target} is written, but not its report")
                self.page.write(prepared.plan, report)
        self._require_sound(report)
        return report

    def _require_sound(self, report: Report) -> None:
        """Raise `Unverified` if the result is not equal to the source, or the reader would not load it."""
        if report.verification is not None:
            from transaxle.engine.read_back import refuse_unequal

            try:
                refuse_unequal(report.verification, report.path)
            except Refused as error:
                raise Unverified(error.refusals, report) from None
        if report.check is not None and not report.check:
            from transaxle.readers.findings import refusals_of

            raise Unverified(refusals_of(report.check.path, report.check.findings), report)

    def _execute(self, cleared: CheckedPlan, progress: Progress) -> Report:
        """Execute the plan, in this process or by several worker processes."""
        if self.order is not None:
            from transaxle.engine.distribute.driver import convert_on

            with self._watch.workers() as events:
                return convert_on(
                    self.order, cleared, self._options["on"], progress=progress, watch=events, **self._how
                )
        from transaxle.engine.execute import execute
        from transaxle.formats.store.staging import takes_parts

        how = select(self._options, ("overwrite", "resume", "sync"))
        total = sum(tensor.nbytes for tensor in cleared.plan.tensors)
        with report_progress(self._watch, progress, total, "copying", stays=True) as counted:
            if takes_parts(self.target):
                from transaxle.engine.distribute.driver import convert_in_parts

                return convert_in_parts(cleared, self.target, limit=self.limit, progress=counted, **how)
            times = None if self.page is None else self.page.times
            return execute(cleared, self.target, limit=self.limit, progress=counted, times=times, **how)

    def _by_ranks(self, progress: Progress) -> Report:
        """Convert together with the other ranks of a torchrun job; all ranks must call this method."""
        from transaxle.live.torchrun import convert_together

        assert self.order is not None
        if not self._leads:
            return convert_together(self.order, **self._how)
        with self._watch.workers() as events:
            return convert_together(self.order, progress=progress, watch=events, look=self._look, **self._how)

    def _look(self, prepared: Prepared) -> None:
        """Prepare the HTML page, and write it at once if the plan has errors; called on a job's first rank."""
        if "report" not in self._options:
            return
        from transaxle.engine.execute import preflight

        self.page, how = self._new_page(), select(self._options, ("overwrite", "resume"))
        self.page.write_refused(preflight(prepared, self.target, several=True, limit=self.limit, **how).plan)

    @property
    def _how(self) -> dict[str, Any]:
        return select(self._options, ("items", "overwrite", "resume", "sync", "jobs", "memory"))

    def _check(self) -> Check:
        """Check whether the reader loads the result."""
        from transaxle.readers.checking import check as check_opened

        how = select(self._options, ("python", "time_limit"))
        with self._watch.working(f"loading with {self._options['reader']}"), open_checkpoint(self.target) as written:
            return check_opened(written, self._options["reader"], **how)

    def _read_back(self, prepared: Prepared) -> Verification:
        """Verify the result by reading it back; the source is opened with the same options as before."""
        from transaxle.engine.read_back import read_back

        opening: Mapping[str, Any] = self.opening
        if isinstance(self._src, Checkpoint):
            opening = self._src.reopening.options if self._src.reopening else {}
        return read_back(prepared, self.target, opening, self.limit, self._watch.progress)


@suggests
def plan(
    src: CheckpointLike,
    dst: PathLike,
    *,
    to: str,
    overwrite: Overwrite = False,
    resume: bool = False,
    sync: bool = True,
    verify: bool = False,
    reader: str | None = None,
    python: PathLike | None = None,
    time_limit: int | None = None,
    report: PathLike | None = None,
    write: PathLike | None = None,
    watch: Watch | None = None,
    format: str | None = None,  # noqa: A002 - the contract's name
    family: str | None = None,
    dialect: str | None = None,
    config: Config | None = None,
    axes: Axes | None = None,
    rules: PathLike | None = None,
    weights: Weights | None = None,
    optimizer: bool | None = None,
    average: bool = False,
    ranks: str | None = None,
    graft: PathLike | None = None,
    graft_over: Patterns = (),
    decode: DType | None = None,
    restate: str | None = None,
    dtype: DType | None = None,
    merge: PathLike | None = None,
    only: Patterns = (),
    skip: Patterns = (),
    shard_size: Size = SHARD_SIZE,
    allow_lossy: bool = False,
    strict: bool = False,
    check_source: bool = True,
    encode: str | None = None,
    group_size: int | None = None,
    tp: int | None = None,
    pp: int | None = None,
    ep: int | None = None,
    dp: int | None = None,
    device: str | None = None,
    make_vocab_size_divisible_by: int | None = None,
    jobs: int | None = None,
    memory: Size | None = None,
    on: On | None = None,
    items: int | None = None,
) -> Plan:
    """Plan a conversion without carrying it out; the plan lists every error that `convert` would raise.

    Args:
        src: path of a checkpoint, or an opened checkpoint.
        dst: path or URL of the target.
        report: path at which to write an HTML page of the plan; it must not exist.
        write: path at which to write a plan file, divided into `items`, for `transaxle work`.
        watch: observer of the run.

    The other arguments are those of `convert`.

    Returns:
        The plan; `.refusals` lists every reason against the conversion, in `src` and in `dst`.
    """
    conversion = _Conversion(src, dst, options := read_options("plan", locals()), watch or Unwatched())
    with conversion.open_and_plan(running=False) as cleared:
        if write is not None and conversion.order is not None and not cleared.plan.refusals:
            from transaxle.engine.distribute.work_plan import work_plan, write_plan

            write_plan(work_plan(conversion.order, cleared, items, **select(options, _WORK)), options["write"])
        if conversion.page is not None:
            conversion.page.write(cleared.plan)
        return cleared.plan


@suggests
def convert(
    src: CheckpointLike,
    dst: PathLike,
    *,
    to: str,
    overwrite: Overwrite = False,
    resume: bool = False,
    sync: bool = True,
    verify: bool = False,
    reader: str | None = None,
    python: PathLike | None = None,
    time_limit: int | None = None,
    report: PathLike | None = None,
    progress: Progress = no_progress,
    watch: Watch | None = None,
    format: str | None = None,  # noqa: A002 - the contract's name
    family: str | None = None,
    dialect: str | None = None,
    config: Config | None = None,
    axes: Axes | None = None,
    rules: PathLike | None = None,
    weights: Weights | None = None,
    optimizer: bool | None = None,
    average: bool = False,
    ranks: str | None = None,
    graft: PathLike | None = None,
    graft_over: Patterns = (),
    decode: DType | None = None,
    restate: str | None = None,
    dtype: DType | None = None,
    merge: PathLike | None = None,
    only: Patterns = (),
    skip: Patterns = (),
    shard_size: Size = SHARD_SIZE,
    allow_lossy: bool = False,
    strict: bool = False,
    check_source: bool = True,
    encode: str | None = None,
    group_size: int | None = None,
    tp: int | None = None,
    pp: int | None = None,
    ep: int | None = None,
    dp: int | None = None,
    device: str | None = None,
    make_vocab_size_divisible_by: int | None = None,
    jobs: int | None = None,
    memory: Size | None = None,
    on: On | None = None,
    items: int | None = None,
) -> Report:
    """Convert a checkpoint into another format or dialect; the target appears complete or not at all.

    Args:
        src: path of a checkpoint, or an opened checkpoint.
        dst: folder, or one file (`.safetensors`, `.bin`, `.pt`, `.pth`); it must not exist unless `overwrite`.
        to: format and dialect of the target, `FORMAT[:DIALECT]`; `hf` is short for `safetensors:hf`.
        overwrite: whether to replace the checkpoint at `dst`, which stays readable until the new one is complete. If
            the folder has unrelated files, True refuses, and `"everything"` deletes those files too.
        resume: whether to keep finished work if interrupted, and continue it in the next call; a `dst` that is already
            the expected result is kept. If False, unfinished work beside `dst` is refused, or with `overwrite` deleted.
        sync: whether to sync all written files to disk before `dst` appears.
        verify: whether to read the result back, check it against its manifest and compare it with `src`; the report
            then has a `verification`.
        reader: program for which to check the result, as `check` does; the report then has a `check`.
        python: Python interpreter of the environment in which `reader` is installed; None means this one.
        time_limit: seconds after which `reader` is stopped; None means 600.
        report: path at which to write an HTML page of the conversion, or of the errors; the file must not exist.
        progress: function called with the number of bytes of each written block, from several threads.
        watch: observer of the run, including progress.
        shard_size: maximum bytes of tensors per file, as 5_000_000_000 or "5GB"; ignored if `dst` is one file.
        allow_lossy: allow arithmetic that a mapping rule marks as lossy, and casts that make finite values infinite.
        strict: refuse tensors for which the target dialect has no mapping rule; otherwise they keep their names.
        check_source: whether to check what is read against the hashes and checksums in `src`, if it has any, and to
            refuse damaged bytes before `dst` appears. If False, they are converted, and the report says so.
        encode: `float8_block`, `mxfp8`, `nvfp4` or `int4`: the encoding in which weights of linear layers are written.
        group_size: number of values in a row that share one scale, for `int4`; None means 32.
        only: patterns of the names of tensors to encode, decode or cast; empty means linear layers with `encode`.
        skip: patterns of the names of tensors to leave unchanged.
        tp: number of tensor-parallel ranks, for `megatron_torch`, `vllm_sharded` and the padding in `torch_dist`.
        pp: number of pipeline stages, for `megatron_torch`.
        ep: number of expert-parallel ranks, for `megatron_torch`; `tp` or 1 for `vllm_sharded`.
        dp: number of FSDP ranks, for `ranks`, which has files for each of them.
        device: device type of the mesh of the trainer that loads `ranks`, such as "cpu"; None means "cuda".
        make_vocab_size_divisible_by: pads the vocabulary to multiples of this times `tp`; `megatron_torch`: 128.
        jobs: number of worker threads.
        memory: maximum bytes of all buffers together.
        on: worker processes: "ray", "ray://HOST:PORT", "torchrun", an object with the method of `Executor`, or a pool
            with `submit`. `jobs` and `memory` then apply to each worker. Under torchrun, the first rank reads the
            result back and writes the page.
        items: number of work items (parts of the plan for one worker each); None means one per GiB.

    The other arguments are those of `open`.

    Raises:
        TypeError: if an argument has a wrong type, or options exclude each other.
        TransaxleError: before anything is written, with all problems; or if writing fails. With `verify`, `Unverified`
            is raised if the result is wrong, and with `reader` if that program would not load it; it contains the
            report of the conversion.
    """
    options = read_options("convert", locals())
    observer = watch or Unwatched()
    observer.state("nothing was written")
    return _Conversion(src, dst, options, observer).carry_out(progress)


@suggests
def supports(
    config: Config,
    target: str,
    source: str = "safetensors:hf",
    mesh: Mesh | None = None,
    *,
    family: str | None = None,
    axes: Axes | None = None,
    rules: PathLike | None = None,
    decode: DType | None = None,
    restate: str | None = None,
    dtype: DType | None = None,
    only: Patterns = (),
    skip: Patterns = (),
    allow_lossy: bool = False,
    strict: bool = False,
    encode: str | None = None,
    group_size: int | None = None,
    tp: int | None = None,
    pp: int | None = None,
    ep: int | None = None,
    dp: int | None = None,
    device: str | None = None,
    make_vocab_size_divisible_by: int | None = None,
) -> Support:
    """Say from a model's config alone, without any file, whether a conversion works, and why not.

    The tables say which tensors the model has in the dialect of the source; the conversion of these is planned as
    `plan` plans it for files. Quantized weights are those that the config's `quantization_config` describes.

    Args:
        config: the model's config: a path, a mapping, or an object with `to_dict()`.
        target: format and dialect of the target, as `to` of `convert` has it.
        source: format and dialect of the source: `FORMAT:DIALECT`, or one of both, as in `target`.
        mesh: parallel degrees of a target with files for each rank, in place of `tp`, `pp`, `ep` and `dp`:
            `{"tp": 2, "ep": 4}`, or a device mesh of torch whose dims have these names; `fsdp` means `dp`.

    The other arguments are those of `open` and `convert`.

    Returns:
        The answer, which is true if the conversion works; `.refusals` are the reasons against it, with the codes that
        `plan` would have, and `.notes` what programs that load the target need to know.

    Raises:
        TypeError: if an argument has a wrong type, or options exclude each other.
        Refused: with the code UNSUPPORTED if the config does not determine the answer, because it depends on values or
            on files.
        UsageError: with the code AMBIGUOUS or UNKNOWN_AXIS if the config does not say which tensors the model has.
    """
    options = read_options("supports", locals())
    from transaxle.engine.checkpoint.settings import settings
    from transaxle.engine.support import answer

    source, target = read_text("source", source, "safetensors:hf"), read_text("target", target, "dcp:torchtitan")
    degrees = read_degrees({**read_mesh(mesh), **options})
    return answer(
        settings(config=config, **select(options, ("family", "axes", "rules"))),
        (source, target),
        select(options, ("decode", "restate", "dtype", "only", "skip")),
        {"encode": _encode_request(options), "degrees": degrees, **select(options, SHAPING)},
    )


@suggests
def verify(
    a: CheckpointLike,
    b: CheckpointLike | None = None,
    *,
    jobs: int | None = None,
    memory: Size | None = None,
    progress: Progress = no_progress,
    watch: Watch | None = None,
    format: str | None = None,  # noqa: A002 - the contract's name
    family: str | None = None,
    dialect: str | None = None,
    config: Config | None = None,
    axes: Axes | None = None,
    rules: PathLike | None = None,
    weights: Weights | None = None,
    optimizer: bool | None = None,
    average: bool = False,
    ranks: str | None = None,
    graft: PathLike | None = None,
    graft_over: Patterns = (),
    decode: DType | None = None,
    restate: str | None = None,
    dtype: DType | None = None,
    merge: PathLike | None = None,
    only: Patterns = (),
    skip: Patterns = (),
) -> Verification:
    """Verify a checkpoint against its own manifest, or two checkpoints against each other across formats and dialects.

    Args:
        a: path of a checkpoint, or an opened checkpoint.
        b: checkpoint to compare with; None means that `a` is checked against its own manifest.
        jobs: number of worker threads.
        memory: maximum bytes of all buffers together.
        progress: function that is called with the number of bytes of each block read.
        watch: observer of the run, including progress.

    The other arguments are those of `open`. The options `dialect`, `format`, `ranks`, `graft`, `graft_over`, `dtype`,
    `merge`, `only` and `skip` apply to the first checkpoint only.

    Returns:
        The verification, which is true on success, so that `assert tx.verify(a, b)` fails if the checkpoints differ.
        `.ok` is the same boolean; `.problems` and `.differences` list the errors.
    """
    options = read_options("verify", locals())
    from transaxle.engine.verification import open_pair, verify_against
    from transaxle.engine.verification import verify as verify_alone
    from transaxle.move.workers import limits

    limit, opening = limits(jobs, memory), select(options, OPENING)
    if b is None:
        with (
            open_source("a", a, opening) as alone,
            report_progress(watch, progress, alone.container.nbytes, "verifying") as counted,
        ):
            return verify_alone(alone, limit, counted)
    with (
        open_pair(a, b, opening) as (first, second),
        report_progress(watch, progress, first.container.nbytes, "comparing") as counted,
    ):
        return verify_against(first, second, limit, counted)


@suggests
def diff(
    a: CheckpointLike,
    b: CheckpointLike,
    *,
    numeric: bool = False,
    report: PathLike | None = None,
    jobs: int | None = None,
    memory: Size | None = None,
    progress: Progress = no_progress,
    watch: Watch | None = None,
    format: str | None = None,  # noqa: A002 - the contract's name
    family: str | None = None,
    dialect: str | None = None,
    config: Config | None = None,
    axes: Axes | None = None,
    rules: PathLike | None = None,
    weights: Weights | None = None,
    optimizer: bool | None = None,
    average: bool = False,
    ranks: str | None = None,
    graft: PathLike | None = None,
    graft_over: Patterns = (),
    decode: DType | None = None,
    restate: str | None = None,
    dtype: DType | None = None,
    merge: PathLike | None = None,
    only: Patterns = (),
    skip: Patterns = (),
) -> Comparison:
    """Compare two checkpoints across formats and dialects.

    Args:
        a: path of a checkpoint, or an opened checkpoint.
        b: path or opened checkpoint to compare with.
        numeric: whether to compare values, also across number formats, and measure the differences.
        report: path at which to write an HTML page of the differences; the file must not exist. Implies `numeric`.
        jobs: number of worker threads.
        memory: maximum bytes of all buffers together.
        progress: function that is called with the number of bytes of each block read.
        watch: observer of the run, including progress.

    The other arguments are those of `open`. The options `dialect`, `format`, `ranks`, `graft`, `graft_over`, `dtype`,
    `merge`, `only` and `skip` apply to the first checkpoint only.

    Returns:
        The comparison, which is true if the checkpoints do not differ; `.equal` is the same boolean.
    """
    options = read_options("diff", locals())
    from transaxle.engine.compare import compare
    from transaxle.engine.verification import open_pair
    from transaxle.move.workers import limits

    observer = watch or Unwatched()
    measured = numeric or report is not None
    if report is not None:
        from transaxle.reports.html_page import check_destination, check_jinja

        check_jinja()
        check_destination(options["report"], overwrite=None)
    with open_pair(a, b, select(options, OPENING)) as (first, second):
        observer.opened(first, second)
        with report_progress(watch, progress, first.container.nbytes, "comparing") as counted:
            comparison = compare(first, second, numeric=measured, limit=limits(jobs, memory), progress=counted)
    if report is not None:
        from transaxle.reports.reporting import report as write_report

        write_report(comparison, options["report"])
    return comparison


__all__ = ["Unverified", "Watch", "check", "convert", "diff", "info", "open", "plan", "supports", "verify"]
