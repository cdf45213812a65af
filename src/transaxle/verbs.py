"""The "verbs": public functions that open, convert and compare checkpoints; the command line calls them too.

The module `options` documents every option; tests compare the signatures in this module with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
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
    read_source,
    read_text,
    suggests,
)
from transaxle.conversions import Conversion, open_and_make_plan
from transaxle.engine.checkpoint.checkpoint import Checkpoint, CheckpointLike, open_checkpoint, open_source
from transaxle.engine.observers import Progress, Unverified, Unwatched, Watch, no_progress, report_progress
from transaxle.options import OPENING, READING, SHAPING, SHARD_SIZE, select

if TYPE_CHECKING:
    from transaxle.engine.carry import Report
    from transaxle.engine.compare import Comparison
    from transaxle.engine.distribute.driver import On
    from transaxle.engine.plan.planned import Plan
    from transaxle.engine.support import Support
    from transaxle.engine.verification import Verification
    from transaxle.readers.checking import Check
    from transaxle.serving import HubServer


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


def _numbers(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments `encode` and `degrees` of `make_plan`: what to encode, and the parallel degrees."""
    numbers: dict[str, Any] = {"encode": None, "degrees": read_degrees(options)}
    if "encode" in options:
        from transaxle.engine.views.encode import Encode

        only, skip, group = options.get("only", ()), options.get("skip", ()), options.get("group_size") or 0
        numbers["encode"] = Encode(options["encode"], only, skip, group)
    return numbers


_WORK = ("overwrite", "sync", "jobs", "memory")
"""Options of a conversion that a plan file contains."""


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
    options = read_options("plan", locals())
    conversion = Conversion(src, dst, options, _numbers(options), watch or Unwatched())
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
    way_on = "run the same command again to continue" if resume else ""
    return Conversion(src, dst, options, _numbers(options), observer).carry_out(progress, way_on)


@suggests
def serve(
    src: CheckpointLike,
    to: str = "hf",
    *,
    name: str | None = None,
    host: str | None = None,
    port: int | None = None,
    token_file: PathLike | None = None,
    log: Callable[[str], None] | None = None,
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
    jobs: int | None = None,
    memory: Size | None = None,
) -> HubServer:
    """Serve a checkpoint as a hub: clients with `HF_ENDPOINT` set download the files that `convert` would write.

    Nothing is written: the files are computed while they are sent, in threads of this process, until the result is
    closed.

        with tx.serve("run/step-1000", decode="bf16") as hub:
            subprocess.run(["hf", "download", hub.name], env=os.environ | hub.environment)

    Args:
        src: path of a checkpoint, or an opened checkpoint, which must stay open.
        to: format and dialect of the files, as in `convert`.
        name: name of the model for clients, `NAME` or `OWNER/NAME`; None means the name of the folder.
        host: address on which to listen; None means 127.0.0.1. On any address but the loopback, requests need a token.
        port: port on which to listen; None means a free one.
        token_file: path of a file with the token that each request needs; None means none on the loopback, and a new
            one elsewhere.
        log: function called with a line of text for each request, from several threads.
        watch: observer of the preparation.
        jobs: number of threads that compute at the same time.
        memory: maximum bytes of their buffers together.

    The other arguments are those of `convert`.

    Returns:
        The running server, a context manager: `.url`, `.name`, `.commit`, `.token`, `.environment`, `.close()`.

    Raises:
        TypeError: if an argument has a wrong type, or options exclude each other.
        UsageError: with the code AMBIGUOUS if clients would not accept the name, or the file holds no token.
        TransaxleError: with every reason against the conversion; or with the code IO if the port is in use.
    """
    from transaxle.engine.planned_files import PlannedFiles
    from transaxle.move.workers import limits
    from transaxle.serving import LOOPBACK, HubServer, read_token, repository_name

    options, target = read_options("serve", locals()), read_text("to", to, "hf")
    observer, address = watch or Unwatched(), (host or LOOPBACK, port or 0)
    path = src.path if isinstance(src, Checkpoint) else read_source("src", src)
    chosen = repository_name(name, path), address, read_token(options.get("token_file"), address[0])
    with ExitStack() as stack:
        opened = open_and_make_plan(src, target, None, options, _numbers(options), observer)
        prepared = stack.enter_context(opened)
        with observer.working("checking copies"):
            files = PlannedFiles(prepared, limits(jobs, memory))
        return HubServer(files, prepared.plan, *chosen, log or _ignore, stack.pop_all())


def _ignore(_: str) -> None:
    """Ignore a line of text; the default of `log`."""


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
    return answer(
        settings(config=config, **select(options, ("family", "axes", "rules"))),
        (source, target),
        select(options, ("decode", "restate", "dtype", "only", "skip")),
        {**_numbers({**read_mesh(mesh), **options}), **select(options, SHAPING)},
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


__all__ = ["Unverified", "Watch", "check", "convert", "diff", "info", "open", "plan", "serve", "supports", "verify"]
