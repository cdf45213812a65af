"""The arguments of public functions: one name has one meaning and one type everywhere, and wrong ones are reported."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

import transaxle as tx
from tests.checkpoints import tiny
from transaxle import arguments, torch_tensors

ROOMS: tuple[ModuleType, ...] = (tx, tx.nn, tx.parallel, tx.quant, tx.refit)
RESULTS = {
    "Check", "Checkpoint", "Comparison", "Explanation", "Finding", "HubServer", "Leftover", "LoadReport", "Path",
    "Plan", "QuantizedTensor", "Refusal", "Report", "RefitReport", "ReshardReport", "SaveJob", "SaveReport",
    "StoredTensor", "Support", "Table", "TransaxleError", "Verification",
}  # fmt: skip
"""Classes that functions return: their constructors are called by nobody else."""
METHODS = (
    tx.nn.GroupedTensor.make_grouped_tensor,
    tx.quant.QuantizedTensor.dequantize,
    tx.quant.QuantizedTensor.quantize_,
    tx.quant.Quantizer.quantize,
    tx.Refit.push,
    tx.refit.VllmRefit.push,
)
"""Methods of classes that have arguments of the kinds below."""
OTHERWISE = {
    "optimizer": "of a function that opens a checkpoint, whether the state of one is taken; else the optimizer itself",
    "state": "a whole state here, a layer's there",
    "ep": "of a conversion, how many expert-parallel ranks; of a layer, these themselves",
    "filter": "of modules, or of their parameters too",
    "resume": "of a Trainer, the folder; of a conversion, whether",
    "bias": "whether a layer has one; of a product, the bias itself",
    "device": "of files of ranks, the type of their mesh; of tensors, where they are",
    "ranks": "names of a job's files, one for each rank; of a group, its ranks",
    "mesh": "of a conversion, how many ranks; of a layer, these themselves",
    "on": "of a conversion, who carries it out; of tensors put together, the ranks that get them",
    "shape": "of a matrix; of a matrix or a stack of them",
    "source": "of a conversion, what files have; of a refit, live weights",
    "src": "a checkpoint; of a report also a plan",
    "tensor": "what is converted, from one package to another",
    "values": "of a report, whether they are measured; of a quantized tensor, what it takes",
}
"""Names that mean two things, and which."""


def _name(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def _public() -> Iterator[Callable[..., Any]]:
    """Every function and constructor that is public."""
    for room in ROOMS:
        for name in room.__all__:
            found = getattr(room, name)
            if callable(found) and name not in RESULTS:
                yield found
    yield from METHODS


def _arguments(function: Callable[..., Any]) -> dict[str, str]:
    """Arguments of a function with their annotations, as the interpreter tells them."""
    return {
        parameter.name: str(parameter.annotation)
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name != "self" and function is not tx.Executor  # a protocol, of which nobody makes any
    }


PUBLIC = {_name(function): function for function in _public()}


def test_signatures_are_not_overridden_and_name_all_keywords() -> None:
    """`inspect.signature` gives what an editor reads in the source."""
    assert [name for name, function in PUBLIC.items() if hasattr(function, "__signature__")] == []
    assert [name for name, function in PUBLIC.items() if hasattr(vars(function).get("__init__"), "__signature__")] == []
    starred = [
        name
        for name, function in PUBLIC.items()
        if any(each.kind is each.VAR_KEYWORD for each in inspect.signature(function).parameters.values())
    ]
    assert starred == [_name(tx.Executor)]  # a protocol, of which nobody makes any


def test_one_name_takes_the_same_types_everywhere() -> None:
    """`None` aside: whether an argument may be left out is each function's own affair."""
    seen: dict[str, dict[str, list[str]]] = {}
    for function, found in PUBLIC.items():
        for name, annotation in _arguments(found).items():
            kinds = seen.setdefault(name, {})
            kinds.setdefault(annotation.removesuffix(" | None"), []).append(function)
    assert {name: kinds for name, kinds in seen.items() if len(kinds) > 1 and name not in OTHERWISE} == {}


MANY = ["a", "list"]
WRONG: dict[str, tuple[Any, ...]] = {
    "a": (3, None), "axes": (3, [3], {"g": "8"}, {"g": 1.5}), "address": (29600, None, ("here", 29600)), "b": (3,),
    "bucket": (1.5, MANY, True, None), "refusal_code": (3, None, MANY), "config": (3, MANY, b"{}"), "decode": (3, MANY),
    "device": (1.5, MANY), "device_mesh": ("tp", 2),
    "dialect": (3, Path("hf"), MANY), "dst": (3, None, b"out"), "dtype": (3, MANY, float),
    "encode": (3, MANY), "ep": ("ep", 2), "family": (3, MANY), "format": (3, Path("dcp")), "group": ("all", 0, [0, 1]),
    "jobs": ("two", 1.5, True), "memory": (1.5, MANY, True), "merge": (3, b"adapter"), "mesh": ("tp", 2),
    "base": (3, None, b"base"), "graft": (3, b"base"), "graft_over": (3, [3]), "over": (3, [3]),
    "only": (3, [3]), "params_dtype": (3, MANY), "path": (3, None, b"model"), "python": (3, b"python"),
    "report": (3, b"page"), "restate": (3, MANY), "rules": (3, MANY), "shard_size": (1.5, MANY, True, None),
    "skip": (3, [3]), "token_file": (3, b"token"),
    "source": (3, MANY), "src": (3, None, b"model"), "to": (3, None, Path("hf")), "url": (3, b"s3://bucket"),
    "write": (3, b"plan"),
}  # fmt: skip
"""Values of wrong types, for every argument that is read by `arguments` or `torch_arguments`."""
READ = {"Config", "DType", "Device", "Patterns", "PathLike", "CheckpointLike", "Ranks", "Size", "DeviceMesh"}
"""Annotations whose values are so read."""


def test_every_kind_of_argument_is_tried() -> None:
    """An argument of a known kind that is missing in `WRONG` would not be tested."""
    kinds = {
        name: annotation.removesuffix(" | None")
        for function in PUBLIC.values()
        for name, annotation in _arguments(function).items()
    }
    assert {name for name, kind in kinds.items() if kind in READ} - WRONG.keys() - {"resume"} == set()


@pytest.fixture
def calls(tmp_path: Path) -> dict[str, Callable[..., Any]]:
    """Every public function, called rightly but for what it is given here."""
    model, x = torch.nn.Linear(2, 2), torch.ones(32, 32, dtype=torch.bfloat16)
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    src, out, state = tmp_path, tmp_path / "out", {"w": torch.ones(1)}
    quantized = tx.quant.MXFP8().quantize(x)

    def given(**rest: Any) -> Callable[..., Any]:
        """Return what calls a function with these arguments, a wrong one in the place of one of them."""
        return lambda function, wrong: function(**{**rest, **wrong})

    plan = given(src=src, dst=out, to="safetensors")
    save = given(state=state, dst=out)
    recast = given(state=state, dialect="hf")
    return defaultdict(given, {
        "open": given(path=src), "plan": plan, "convert": plan, "verify": given(a=src, b=src), "info": given(src=src),
        "check": given(src=src, reader="transformers"),
        "check_rules": given(rules=src), "derive": given(converter="llama"), "diff": given(a=src, b=src),
        "clean": given(path=out), "report": given(src=src, dst=out), "load": given(state=state, src=src), "save": save,
        "async_save": save, "prepare_async": given(state=state), "reshard": given(src_state=state, dst_state=state),
        "Refit": given(src_state=state, dst_state=state), "Refit.push": given(self=tx.Refit(state, state)),
        "named_tensors": given(state=state), "sharding": given(state=state),
        "VllmRefit": given(src_state=state, engine="http://127.0.0.1:1"), "VllmRefit.push": given(self=None),
        "VllmSource": given(state=state), "meet": given(address="127.0.0.1:1", number=0, size=1),
        "supports": given(config={}, target="hf"), "serve": given(src=src),
        "from_pretrained": given(model_class=torch.nn.Linear, src=src), "save_pretrained": given(model=model, dst=out),
        "state_dict_as": recast, "loadable_as": recast, "AccelerateHooks": given(model=model),
        "LightningCheckpoints": given(module=model), "tensor_parallel": given(model=model, mesh=None),
        "GroupedLinear": given(num_gemms=1, in_features=2, out_features=2),
        "MoE": given(hidden_size=2, intermediate_size=2, num_experts=2, top_k=1),
        "GroupedTensor.make_grouped_tensor": given(num_tensors=1, shape=(2, 2)),
        "MasterWeights": given(parameters=model.parameters(), optimizer=torch.optim.SGD),
        "from_components": given(
            quantizer=quantized.quantizer, components=quantized.components, shape=(32, 32), dtype="bf16"
        ),
        "batch_over": given(group=None), "load_state_dict": given(module=model, state=model.state_dict()),
        "Quantizer.quantize": given(self=tx.quant.MXFP8(), x=x), "QuantizedTensor.dequantize": given(self=quantized),
        "QuantizedTensor.quantize_": given(self=quantized, values=x),
    })  # fmt: skip


def _tried() -> Iterator[tuple[str, str]]:
    for function in PUBLIC.values():
        for name, annotation in _arguments(function).items():
            here = annotation.removesuffix(" | None") in READ | {"str"}
            if name in WRONG and here and function.__module__ != "transaxle.nn.checkpoint_layouts":
                yield _name(function), name


@pytest.mark.parametrize("function", sorted({function for function, _ in _tried()}))
def test_a_wrong_type_gets_a_clear_message(function: str, calls: dict[str, Callable[..., Any]]) -> None:
    """It names the argument, what was given and what may be given, and is raised before anything is done."""
    call = calls[PUBLIC[function].__qualname__]
    for name in (argument for each, argument in _tried() if each == function):
        for value in WRONG[name]:
            if value is None and _arguments(PUBLIC[function])[name].endswith("None"):
                continue
            with pytest.raises(TypeError) as found:
                call(PUBLIC[function], {name: value})
            text = str(found.value)
            assert text.startswith(f"{name} must be a"), (name, value, text)
            assert text.endswith(f"got {value!r} ({type(value).__name__})"), (name, value, text)


@pytest.mark.parametrize(
    "function", [tx.open, tx.info, tx.plan, tx.convert, tx.verify, tx.diff, tx.load, tx.save, tx.async_save]
)
def test_an_unknown_argument_is_named(function: Callable[..., Any], tmp_path: Path) -> None:
    first = [tmp_path] if function in (tx.open, tx.info, tx.verify) else [tmp_path, tmp_path / "out"]
    more = {"to": "hf"} if function in (tx.plan, tx.convert) else {}
    words = r"^\w+\(\) got an unexpected keyword argument 'famly'. Did you mean 'family'\?$"
    with pytest.raises(TypeError, match=words):
        function(*first, famly="qwen3_moe", **more)


def test_a_positional_value_gets_its_keyword_in_the_message(tmp_path: Path) -> None:
    for function in (tx.convert, tx.plan):
        with pytest.raises(TypeError, match=rf"^{function.__name__}\(\) takes 'dcp' only with its keyword: to='dcp'$"):
            cast("Any", function)(tmp_path, tmp_path / "out", "dcp", overwrite=True)
    with pytest.raises(TypeError, match=r"^diff\(\) takes 3 only with its keyword, which is one of numeric, report, "):
        cast("Any", tx.diff)(tmp_path, tmp_path, 3)
    with pytest.raises(TypeError, match=r"^load\(\) takes 'hf' only with its keyword, which is one of extra, strict, "):
        cast("Any", tx.load)({}, tmp_path, "hf", optimizer=None)
    with pytest.raises(TypeError, match=r"missing 1 required keyword-only argument: 'to'$"):
        cast("Any", tx.convert)(tmp_path, tmp_path / "out")


@pytest.mark.parametrize("size", ["0", "", "5 apples", "-1", "1e9", "9" * 400, 0, -5], ids=lambda size: repr(size)[:9])
def test_an_invalid_size_gets_a_clear_message(size: int | str, tmp_path: Path) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    for call in (
        lambda: tx.convert(tmp_path, tmp_path / "out", to="safetensors", shard_size=size),
        lambda: tx.save({"w": torch.ones(1)}, tmp_path / "out", to="safetensors", shard_size=size),
    ):
        with pytest.raises(ValueError, match=r"^shard_size must be "):
            call()


def test_sizes_are_those_of_the_command_line(tmp_path: Path) -> None:
    save_file({f"w{n}": torch.ones(300) for n in range(4)}, tmp_path / "model.safetensors")
    sizes: list[int | str] = ["2.4kB", "2400", 2400]
    for number, size in enumerate(sizes):
        out, saved = tmp_path / f"out{number}", tmp_path / f"saved{number}"
        tx.convert(tmp_path / "model.safetensors", out, to="safetensors", shard_size=size, memory="2MiB", jobs=1)
        tx.save({f"w{n}": torch.ones(300) for n in range(4)}, saved, to="safetensors", shard_size=size)
        assert len(list(out.glob("*.safetensors"))) == len(list(saved.glob("*.safetensors"))) == 2


def test_a_config_may_be_any_of_its_kinds(tmp_path: Path) -> None:
    """A path, its folder, its content and a config object, for what reads files and for what reads a model."""
    settings = {"model_type": "qwen3_moe", "num_hidden_layers": 1}
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen3_moe", "num_hidden_layers": 1}', "utf-8")
    weights = tmp_path / "weights.safetensors"
    state = {"w": torch.ones(1)}
    save_file(state, weights)
    config_object = SimpleNamespace(to_dict=lambda: settings)
    given: list[arguments.Config] = [str(folder), folder, folder / "config.json", settings, config_object]
    for number, config in enumerate(given):
        assert tx.open(weights, config=config).config == settings
        out = tmp_path / f"out{number}"
        tx.save(state, out, to="safetensors", config=config)
        assert tx.open(out).config == settings
        tx.load(state, weights, config=config)
        tx.reshard(state, {"w": torch.zeros(1)}, config=config)


def test_a_missing_config_is_an_io_error(tmp_path: Path) -> None:
    with pytest.raises(tx.TransaxleError) as found:
        tx.save({"w": torch.ones(1)}, tmp_path / "out", config=tmp_path / "missing.json")
    assert (found.value.code, found.value.where.file) == ("IO", str(tmp_path / "missing.json"))


@pytest.mark.parametrize("dtype", ["bf16", "bfloat16", "BF16", torch.bfloat16])
def test_a_type_may_be_called_by_any_of_its_names(dtype: str | torch.dtype, tmp_path: Path) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    assert tx.open(tmp_path, dtype=dtype)["w"].dtype == "BF16"
    state = {"w": torch.zeros(1, dtype=torch.bfloat16)}
    tx.load(state, tmp_path, dtype=dtype)
    assert state["w"].item() == 1
    layer = tx.nn.GroupedLinear(1, 2, 2, params_dtype=dtype, device="cpu")
    assert {parameter.dtype for parameter in layer.parameters()} == {torch.bfloat16}


def test_unknown_names_of_types_and_devices() -> None:
    with pytest.raises(ValueError, match=r"^dtype must be an element type such as .*; got 'bf15'$"):
        torch_tensors.read_dtype("dtype", "bf15")
    with pytest.raises(ValueError, match=r"^device must be a device such as .*; got 'gpu'$"):
        torch_tensors.read_device("device", "gpu")
    assert torch_tensors.read_dtype("dtype", "F8_E4M3") == torch.float8_e4m3fn
    assert torch_tensors.read_device("device", "cpu") == torch.device("cpu")
    assert arguments.read_float_type("dtype", "fp8") == "fp8"


def test_a_flag_is_true_or_false(tmp_path: Path) -> None:
    """The text "false" counts as True in Python: it would allow what is lossy, or remove files."""
    ck = tiny(tmp_path / "ck")
    calls: dict[str, Callable[[Any], object]] = {
        "allow_lossy": lambda flag: tx.convert(ck, tmp_path / "out", to="hf", allow_lossy=flag),
        "strict": lambda flag: tx.plan(ck, tmp_path / "out", to="hf", strict=flag),
        "check_source": lambda flag: tx.plan(ck, tmp_path / "out", to="hf", check_source=flag),
        "resume": lambda flag: tx.plan(ck, tmp_path / "out", to="hf", resume=flag),
        "sync": lambda flag: tx.convert(ck, tmp_path / "out", to="hf", sync=flag),
        "verify": lambda flag: tx.convert(ck, tmp_path / "out", to="hf", verify=flag),
        "average": lambda flag: tx.open(ck, average=flag),
        "optimizer": lambda flag: tx.open(ck, optimizer=flag),
        "numeric": lambda flag: tx.diff(ck, ck, numeric=flag),
        "remove": lambda flag: tx.clean(tmp_path, remove=flag),
        "overwrite": lambda flag: tx.report(ck, tmp_path / "page.html", overwrite=flag),
        "check_copies": lambda flag: tx.save({}, tmp_path / "out", check_copies=flag),
        "broadcast_replicated": lambda flag: tx.load({}, ck, broadcast_replicated=flag),
    }
    flags: tuple[object, ...] = ("false", 0, [], np.zeros(2))
    for name, call in calls.items():
        for flag in flags:
            with pytest.raises(TypeError, match=rf"^{name} must be a bool: True or False; got "):
                call(flag)
    assert [path.name for path in tmp_path.iterdir()] == ["ck"]


@pytest.mark.parametrize("path", ["a\0b", "\0", "half of a pair: \ud800"])
def test_an_invalid_path_is_an_io_error(path: str, tmp_path: Path) -> None:
    ck = tiny(tmp_path / "ck")
    calls: tuple[Callable[[], object], ...] = (
        lambda: tx.open(path),
        lambda: tx.plan(path, tmp_path / "out", to="hf"),
        lambda: tx.convert(ck, tmp_path / path, to="hf"),
        lambda: tx.verify(ck, path),
        lambda: tx.open(ck, config=path),
        lambda: tx.open(ck, rules=path),
        lambda: tx.clean(path),
    )
    for call in calls:
        with pytest.raises(tx.TransaxleError, match="has a character that no path can have") as caught:
            call()
        assert caught.value.code == "IO"


@pytest.mark.parametrize(
    ("said", "code"),
    [({"family": "nope"}, "UNKNOWN_FAMILY"), ({"dialect": "nope"}, "AMBIGUOUS"), ({"axes": {"m": 3}}, "UNKNOWN_AXIS")],
)
def test_a_checkpoint_that_is_refused_on_use_can_be_looked_at(said: Any, code: str, tmp_path: Path) -> None:
    with tx.open(tiny(tmp_path / "ck"), **said) as ck:
        assert f"refused: {code}" in repr(ck)
        assert code in ck._repr_html_()


@pytest.mark.parametrize("box", [(range(3), slice(None)), (0, slice(None)), ("0:2", slice(None)), (None, None)])
def test_a_box_of_anything_but_slices_is_refused(box: Any, tmp_path: Path) -> None:
    with tx.open(tiny(tmp_path / "ck")) as ck, pytest.raises(tx.TransaxleError, match="a box is a tuple of slices"):
        ck["lm_head.weight"].read(box)


def test_no_tensors_match_no_table(tmp_path: Path) -> None:
    with pytest.raises(tx.TransaxleError, match=r"\(no tensors\)") as caught:
        tx.save({}, tmp_path / "out", to="hf")
    assert "Closest" not in caught.value.hint


def test_a_long_value_is_shown_by_its_beginning() -> None:
    found = arguments.wrong_type("config", "a mapping", list(range(1000)))
    assert re.fullmatch(r"config must be a mapping; got \[0, 1, .{0,80} … \(list\)", str(found))


# Wrong arguments that type checkers, and callbacks when they are created, report.

ROOT = Path(__file__).parent.parent
SRC = Path(tx.__file__).parent.parent
RIGHT_CALLS = """
import torch
import transaxle as tx

model = torch.nn.Linear(2, 2)
tx.open("a", family="llama", config={"model_type": "llama"}, only="*.weight")
tx.plan("a", "b", to="hf", shard_size="5GB", overwrite="everything")
tx.convert("a", "b", to="hf", overwrite=True, jobs=2, axes={"g": 8}, rules="my.rules")
tx.convert("a", "b", to="hf", verify=True)
tx.info("a", family="llama")
tx.check_rules("my.rules", "a")
tx.verify("a", "b", family="llama")
tx.diff("a", "b", decode="bf16")
tx.load(model, "a", family="llama", dtype=torch.bfloat16)
tx.save(model, "b", to="hf", shard_size=5_000_000)
tx.async_save(model, "b", overwrite=True).result()
tx.reshard(model, model, family="llama")
tx.Refit(model, {}, family="llama", bucket="1GB")
tx.refit.VllmRefit(model, "http://127.0.0.1:1", dtype="bf16")
tx.refit.VllmSource(model, dtype="bf16")
tx.refit.named_tensors(model, dtype="bf16")
tx.TrainerCheckpoints(to="hf", family="llama")
tx.AccelerateHooks(model, to="hf", family="llama")
tx.SavePlanner("hf", family="llama", flatten_state_dict=True)
tx.LoadPlanner("hf", family="llama", allow_partial_load=True)
"""
"""Calls as they should be, one a line."""
WRONG_CALLS = """
import torch
import transaxle as tx

model = torch.nn.Linear(2, 2)
tx.open("a", famly="llama")
tx.open("a", family=3)
tx.plan("a", "b", to="hf", famly="llama")
tx.convert("a", "b", to="hf", overwite=True)
tx.convert("a", "b", to="hf", overwrite="all")
tx.convert("a", "b", to="hf", shard_size=2.5)
tx.convert("a", "b", to="hf", verify="yes")
tx.info("a", famly="llama")
tx.check_rules("my.rules", family="llama")
tx.verify("a", famly="llama")
tx.diff("a", "b", famly="llama")
tx.load(model, "a", famly="llama")
tx.save(model, "b", overwite=True)
tx.async_save(model, "b", overwite=True)
tx.reshard(model, model, famly="llama")
tx.Refit(model, {}, famly="llama")
tx.refit.VllmRefit(model, "http://127.0.0.1:1", famly="llama")
tx.refit.VllmSource(model, famly="llama")
tx.refit.named_tensors(model, famly="llama")
tx.TrainerCheckpoints(famly="llama")
tx.AccelerateHooks(model, overwite=True)
tx.SavePlanner("hf", famly="llama")
tx.LoadPlanner("hf", famly="llama")
"""
"""Calls each of which is wrong, one a line."""
_CALL = "tx."


def _calls(program: str) -> set[int]:
    """Numbers of the lines with calls."""
    return {number for number, line in enumerate(program.splitlines(), 1) if line.startswith(_CALL)}


def _lines_with_errors(tool: str, programs: Mapping[str, str], folder: Path) -> dict[str, set[int]]:
    """Return for each program, by its name, the lines of which a type checker complains."""
    files = [f"{name}.py" for name in programs]
    for file, program in zip(files, programs.values(), strict=True):
        (folder / file).write_text(program, "utf-8")
    if tool == "mypy":
        # As strict as this project is with itself, and with what `make lint` has found out about torch.
        command = [sys.executable, "-m", "mypy", "--output", "json", *(str(folder / file) for file in files)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode in {0, 1}, done.stderr
        complaints = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        found = [(each["file"], each["line"]) for each in complaints if each["severity"] == "error"]
    else:
        (folder / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(SRC)], "include": files}), "utf-8")
        command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(folder)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode in {0, 1}, done.stderr
        complaints = json.loads(done.stdout)["generalDiagnostics"]
        errors = [each for each in complaints if each["severity"] == "error"]
        found = [(each["file"], each["range"]["start"]["line"] + 1) for each in errors]
    lines: dict[str, set[int]] = {name: set() for name in programs}
    for file, line in found:
        lines[Path(file).stem].add(line)
    return lines


@pytest.mark.slow
@pytest.mark.parametrize("tool", [pytest.param("mypy", marks=pytest.mark.oracle), "pyright"])
def test_type_checkers_catch_wrong_arguments(tool: str, tmp_path: Path) -> None:
    """Both programs are checked by one start, which reads torch once."""
    found = _lines_with_errors(tool, {"right": RIGHT_CALLS, "wrong": WRONG_CALLS}, tmp_path)
    assert found == {"right": set(), "wrong": _calls(WRONG_CALLS)}


def test_planners_take_what_torch_takes() -> None:
    for ours, torchs in ((tx.SavePlanner, DefaultSavePlanner), (tx.LoadPlanner, DefaultLoadPlanner)):
        own, known = inspect.signature(ours).parameters, inspect.signature(torchs).parameters
        more = {"dialect", "family", "source", "config", "trust_copies"}
        ours_alone = {name: each.default for name, each in own.items() if name not in more}
        assert {name: each.default for name, each in known.items()} == ours_alone
        with pytest.raises(TypeError, match=r"unexpected keyword argument 'famly'. Did you mean 'family'"):
            ours(famly="llama")  # type: ignore[call-arg]  # what is tried


def _made(**options: Any) -> None:
    """Make both kinds of callbacks."""
    with pytest.raises((TypeError, tx.TransaxleError)) as first:
        tx.TrainerCheckpoints(**options)
    with pytest.raises((TypeError, tx.TransaxleError)) as second:
        tx.AccelerateHooks(torch.nn.Linear(2, 2), **options)
    assert str(first.value).replace("TrainerCheckpoints", "AccelerateHooks") == str(second.value)
    raise first.value


def test_callbacks_check_their_arguments_when_they_are_made(tmp_path: Path) -> None:
    """Not only at the first save, after hours of training."""
    refused: list[tuple[dict[str, Any], str]] = [
        ({"to": "safetensrs:hf"}, "there is no format 'safetensrs'"),
        ({"to": "torchtitn"}, "no family has a dialect 'torchtitn'"),
        ({"to": "dcp:torchtitn"}, "Did you mean torchtitan"),
        ({"dialect": "hff"}, "no family has a dialect 'hff'"),
        ({"family": "lama"}, "no family 'lama'"),
        ({"family": "llama", "to": "hff"}, "family llama has no dialect 'hff'"),
        ({"config": tmp_path / "missing.json"}, "missing.json"),
    ]
    for options, message in refused:
        with pytest.raises(tx.TransaxleError, match=message):
            _made(**options)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"famly": "llama"}, "'famly'. Did you mean 'family'"),
        ({"family": 3}, "family must be a str"),
        ({"to": None}, "to must be a str"),
        ({"shard_size": 2.5}, "shard_size must be a number of bytes"),
        ({"sync": "no"}, "sync must be a bool"),
        ({"check_copies": 1}, "check_copies must be a bool"),
        ({"config": 3}, "config must be a path"),
        ({"group": "all"}, "group must be a ProcessGroup"),
    ]
    for options, message in wrong:
        with pytest.raises(TypeError, match=message):
            _made(**options)
    with pytest.raises(TypeError, match="background must be a bool"):
        tx.TrainerCheckpoints(background="no")  # type: ignore[arg-type]  # what is tried
    with pytest.raises(TypeError, match="extra must be a mapping"):
        tx.AccelerateHooks(torch.nn.Linear(2, 2), extra=[1])  # type: ignore[arg-type]  # what is tried
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module"):
        tx.AccelerateHooks({}, None)  # type: ignore[arg-type]  # what is tried
    for options in ({}, {"to": "dcp:torchtitan"}, {"to": "dcp"}, {"to": "identity"}, {"family": "llama", "to": "hf"}):
        tx.TrainerCheckpoints(**options)  # type: ignore[arg-type]  # several at once
