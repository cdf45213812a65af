"""Pickles that are out for harm: nothing runs, and each is refused with code, file, record and reason."""

from __future__ import annotations

import pickle
import struct
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.formats.pickled.assemble import FILE, HEAD, MARKER, RECORD, call, name, program, read, text, touches, value
from tests.formats.refusals import refuses
from transaxle.errors import TransaxleError
from transaxle.formats.flattened_state import flatten

Made = Callable[[Path], bytes]
"""Makes a pickle which, if it were run, would leave a marker in a folder."""


def _code(folder: Path) -> str:
    return f"__import__('pathlib').Path({str(folder / MARKER)!r}).touch()"


def _run(module: str, attribute: str, *args: Any, opcode: bytes = b"R") -> Made:
    """A call whose arguments name the marker: `$command` and `$code` stand for what leaves it."""

    def made(folder: Path) -> bytes:
        words = {"$command": touches(folder), "$code": _code(folder), "$path": str(folder / MARKER)}
        given = [words.get(arg, arg) if isinstance(arg, str) else arg for arg in args]
        return program(call(module, attribute, *given, opcode=opcode))

    return made


CALLS: tuple[tuple[Any, ...], ...] = (
    ("os", "system", "$command"), ("posix", "system", "$command"), ("nt", "system", "$command"),
    ("builtins", "eval", "$code"), ("builtins", "exec", "$code"), ("builtins", "compile", "$code", "x", "exec"),
    ("builtins", "open", "$path", "w"), ("builtins", "__import__", "antigravity"), ("builtins", "breakpoint"),
    ("builtins", "type", "X", value(()), value({})), ("builtins", "setattr", name("torch", "Tensor"), "x", 1),
    ("builtins", "globals"), ("subprocess", "Popen", "$command"), ("subprocess", "check_output", "$command"),
    ("pty", "spawn", "$command"), ("pathlib", "Path.touch", "$path"), ("importlib", "import_module", "antigravity"),
    ("runpy", "run_path", "$path"), ("shutil", "rmtree", "$path"), ("pickle", "loads", pickle.dumps(1)),
    ("marshal", "loads", b"x"), ("ctypes", "CDLL", "libc.so.6"), ("code", "InteractiveInterpreter"),
    ("timeit", "timeit", "$code"), ("pdb", "run", "$code"), ("cProfile", "run", "$code"),
    ("pip", "main", value(["install", "x"])), ("webbrowser", "open", "http://localhost"),
    ("socket", "create_connection", ("localhost", 1)), ("urllib.request", "urlopen", "http://localhost"),
    ("numpy", "load", "$path"), ("numpy.testing._private.utils", "runstring", "$code", value({})),
    ("torch", "load", "$path"), ("torch.hub", "load", "a/b", "c"), ("torch.jit", "load", "$path"),
    ("torch.utils.collect_env", "run", "$command"), ("torch._dynamo.guards", "import_from_str", "os.system"),
    ("torch.storage", "UntypedStorage.from_file", "$path"), ("torch.nn.modules.linear", "Linear", 1, 1),
    ("transformers.training_args", "TrainingArguments", "."),
    ("functools", "partial", name("os", "system"), "$command"), ("operator", "attrgetter", "system"),
    ("operator", "methodcaller", "system", "$command"), ("builtins", "map", name("os", "system"), ["$command"]),
)  # fmt: skip
"""Module, name and arguments of calls that would do harm."""
UNSAFE: dict[str, tuple[Made, str]] = {
    **{f"{where}.{what}": (_run(where, what, *args), f"{where}.{what}") for where, what, *args in CALLS},
    "eval of Python 2": (_run("__builtin__", "eval", "$code"), "builtins.eval"),
    "made by NEWOBJ": (_run("subprocess", "Popen", "$command", opcode=b"\x81"), "subprocess.Popen"),
    "a dotted name": (lambda _: b"\x80\x04" + text("os") + text("path.join") + b"\x93.", "os.path.join"),
    "STACK_GLOBAL": (
        lambda folder: b"\x80\x04" + text("os") + text("system") + b"\x93" + value((touches(folder),)) + b"R.",
        "os.system",
    ),
    "STACK_GLOBAL from the memo": (
        lambda folder: b"\x80\x04%b\x940%bh\0\x93%bR." % (text("system"), text("os"), value((touches(folder),))),
        "os.system",
    ),
    "INST": (lambda folder: b"(" + value(touches(folder)) + b"ios\nsystem\n.", "os.system"),
    "OBJ": (lambda folder: b"(" + name("os", "system") + value(touches(folder)) + b"o.", "os.system"),
    "INST after text": (lambda folder: f"(S'{touches(folder)}'\nios\nsystem\n.".encode(), "os.system"),
    "STACK_GLOBAL after text": (lambda _: b"S'a'\n" + text("os") + text("system") + b"\x93.", "os.system"),
    "protocol 0": (lambda folder: f"cos\nsystem\n(S'{touches(folder)}'\ntR.".encode(), "os.system"),
    "NEWOBJ_EX": (
        lambda folder: program(name("subprocess", "Popen"), value((touches(folder),)), value({"shell": True}), b"\x92"),
        "subprocess.Popen",
    ),
    "getattr of a module": (
        lambda _: program(call("builtins", "getattr", name("os", "path"), "join")), "os.path.join"),
    "getattr of an allowed class": (
        lambda _: program(call("builtins", "getattr", name("torch", "Tensor"), "__init__"), b")R"),
        "torch.Tensor.__init__",
    ),
    "getattr of getattr": (
        lambda _: program(
            call("builtins", "getattr", call("builtins", "getattr", name("torch", "Tensor"), "__class__"), "mro")
        ),
        "torch.Tensor.__class__",
    ),
    "__reduce_ex__": (lambda _: program(name("torch", "Tensor.__reduce_ex__")), "torch.Tensor.__reduce_ex__"),
    "a default factory": (
        lambda _: program(call("collections", "defaultdict", name("os", "system"))), "os.system"),
    "a class to reconstruct": (
        lambda _: program(call("copyreg", "_reconstructor", name("os", "system"), name("builtins", "object"), None)),
        "os.system",
    ),
    "a tensor's own rebuild function": (
        lambda folder: program(
            call("torch._tensor", "_rebuild_from_type_v2", name("os", "system"), name("torch", "Tensor"),
                 value((touches(folder),)), None)
        ),
        "os.system",
    ),
    "an argument of an allowed call": (
        lambda folder: program(call("argparse", "Namespace", call("os", "system", touches(folder)))), "os.system"),
    "in a state": (
        lambda folder: program(call("argparse", "Namespace"), call("os", "system", touches(folder)), b"b"),
        "os.system",
    ),
    "as a key": (lambda folder: program(b"}", call("os", "system", touches(folder)), b"Ns"), "os.system"),
    "as a persistent id": (lambda folder: program(call("os", "system", touches(folder)), b"Q"), "os.system"),
    "thrown away": (lambda folder: program(call("os", "system", touches(folder)), b"0N"), "os.system"),
    "a name with a line of its own": (lambda _: program(name("os ", "system")), "os .system"),
    "a name in disguise": (lambda _: program(name("o\u200bs", "system")), "u200b"),
    "an extension code": (lambda _: b"\x80\x02\x82\x01.", "extension"),
    "an extension code of two bytes": (lambda _: b"\x80\x02\x83\x01\x01.", "extension"),
    "an extension code of four bytes": (lambda _: b"\x80\x02\x84\x01\0\0\0.", "extension"),
}  # fmt: skip


@pytest.mark.parametrize(("made", "said"), UNSAFE.values(), ids=UNSAFE.keys())
def test_what_would_run(tmp_path: Path, made: Made, said: str) -> None:
    modules = set(sys.modules)
    with pytest.raises(TransaxleError) as caught:
        read(made(tmp_path))
    first = caught.value.refusals[0]
    assert (first.code, first.where.file) == ("UNSAFE_PICKLE", FILE)
    assert f"record {RECORD}" in first.message
    assert said in str(caught.value)
    assert not list(tmp_path.iterdir())
    assert {one for one in set(sys.modules) - modules if "transaxle" not in one} == set()


def test_the_marker_would_be_there(tmp_path: Path) -> None:
    """The test above would pass on anything if the payloads were harmless: Python's own unpickler leaves the marker."""
    file = tmp_path / "payload"
    for case in ("os.system", "builtins.eval", "STACK_GLOBAL", "INST", "OBJ", "protocol 0"):
        file.write_bytes(UNSAFE[case][0](tmp_path))
        script = f"import pickle; pickle.load(open({str(file)!r}, 'rb'))"
        subprocess.run([sys.executable, "-c", script], check=False, timeout=60, capture_output=True)
        assert (tmp_path / MARKER).exists(), case
        (tmp_path / MARKER).unlink()


def _nested(depth: int) -> bytes:
    return b"(" * depth + b"t" * depth


CORRUPT: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "ends before"),
    "only a head": (HEAD, "ends before"),
    "no stop": (HEAD + b"N", "ends before"),
    "nothing left": (HEAD + b".", "one value"),
    "two values": (HEAD + b"NN.", "one value"),
    "a mark is left": (HEAD + b"N(.", "one value"),
    "an unknown opcode": (HEAD + b"\xff.", "unknown opcode"),
    "protocol 6": (b"\x80\x06N.", "protocol"),
    "underflow": (HEAD + b"0N.", "mark"),
    "underflow behind a mark": (HEAD + b"N(\x85.", "stack"),
    "a mark that is not there": (HEAD + b"Nt.", "mark"),
    "a memo that is not there": (HEAD + b"h\x07.", "not built"),
    "a text step before a name from the memo": (
        HEAD + text("torch") + b"\x940S'a'\n0" + text("storage_data") + b"0h\0" + text("Tensor") + b"\x93.",
        "protocol 0"),
    "a memo that is not there, in text": (b"g7\n.", "protocol 0"),
    "a memo out of range": (b"Np99999999999999\n.", "protocol 0"),
    "a negative memo": (b"Np-1\n.", "protocol 0"),
    "a memo of nothing": (HEAD + b"q\0.", "stack"),
    "a number without its bytes": (HEAD + b"J\0\0", "ends"),
    "a text without its bytes": (HEAD + b"X\xff\0\0\0ab.", "announces 255 bytes"),
    "a text of four gigabytes": (HEAD + b"X\xff\xff\xff\xffab.", " follow"),
    "a text of all there is": (HEAD + b"\x8d" + b"\xff" * 8 + b"ab.", " follow"),
    "a text of a negative length": (HEAD + b"T\xff\xff\xff\xffab.", "negative"),
    "bytes of all there is": (HEAD + b"\x8e" + b"\xff" * 8 + b".", " follow"),
    "a byte array of all there is": (HEAD + b"\x96" + b"\xff" * 8 + b".", " follow"),
    "a frame of all there is": (b"\x80\x04\x95" + b"\xff" * 8 + b"N.", "frame"),
    "an integer of a megabyte": (HEAD + b"\x8b" + struct.pack("<i", 1 << 20) + b"\x7f" * (1 << 20) + b".", "integer"),
    "an integer of a million digits": (b"I" + b"9" * 1_000_000 + b"\n.", "number"),
    "a long of a million digits": (b"L" + b"9" * 1_000_000 + b"L\n.", "number"),
    "a float of a million digits": (b"F" + b"9" * 1_000_000 + b"\n.", "protocol 0"),
    "a negative integer length": (HEAD + b"\x8b\xff\xff\xff\xff.", "negative"),
    "no number": (b"Iseven\n.", "number"),
    "an empty number": (b"I\n.", "number"),
    "a number with underscores": (b"I1_0\n.", "number"),
    "a line that never ends": (b"I1", "line"),
    "no UTF-8": (HEAD + b"X\x01\0\0\0\xff.", "Unicode"),
    "a bad escape": (b"S'\\x4'\n.", "protocol 0"),
    "a text without quotes": (b"Sab\n.", "protocol 0"),
    "a text with one quote": (b"S'\n.", "protocol 0"),
    "a bad raw escape": (b"V\\ud\n.", "protocol 0"),
    "a name that is no UTF-8": (HEAD + b"c\xff\nx\n.", "Unicode"),
    "a name that is a number": (b"\x80\x04K\x01K\x02\x93.", "not text"),
    "a call of a number": (HEAD + b"K\x01)R.", "calls a int"),
    "a call of a text": (program(text("eval"), b")R"), "calls a str"),
    "a call of an object": (program(call("argparse", "Namespace"), b")R"), "calls a Object"),
    "a call of a dtype": (program(name("torch", "float32"), b")R"), "calls a DType"),
    "a call without a tuple": (program(name("torch", "Size"), b"]R"), "arguments"),
    "OBJ of nothing": (HEAD + b"(o.", "protocol 0"),
    "named arguments in a list": (program(name("argparse", "Namespace"), b")]\x92"), "named arguments"),
    "named arguments of a builder": (program(name("torch", "Size"), b")", value({"x": 1}), b"\x92"), "named arguments"),
    "attributes of a list": (HEAD + b"]Nb.", "attributes to a list"),
    "attributes of a number": (HEAD + b"K\x01}b.", "attributes to a int"),
    "attributes of a name": (program(name("torch", "Tensor"), value({"__setstate__": 1}), b"b"), "attributes"),
    "attributes twice": (program(call("argparse", "Namespace"), b"}b}b"), "twice"),
    "an item for a tuple": (HEAD + b")Na.", "appends to a tuple"),
    "items for a text": (program(text("x"), b"(Ne"), "appends to a str"),
    "a key in a list": (HEAD + b"]NNs.", "key of a list"),
    "keys in a tuple": (HEAD + b")(NNu.", "key of a tuple"),
    "a key without a value": (HEAD + b"}(Nu.", "without a value"),
    "a dict with a key only": (HEAD + b"(Nd.", "protocol 0"),
    "a list as key": (HEAD + b"}]Ns.", "list as a key"),
    "a dict as key": (HEAD + b"}}Ns.", "dict as a key"),
    "the same key twice": (HEAD + b"}(K\x01NK\x01Nu.", "same key"),
    "the same key later": (HEAD + b"}K\x01NsK\x01Ns.", "same key"),
    "the same key in two types": (HEAD + b"}(K\x01N\x88Nu.", "same key"),
    "attributes of what is no class": (program(call("builtins", "getattr", [], "append")), "not a class"),
    "an attribute that is no text": (program(call("builtins", "getattr", name("torch", "Tensor"), 1)), "not a class"),
    "an OrderedDict of a number": (program(call("collections", "OrderedDict", 5)), "cannot take a int"),
    "an OrderedDict of no pairs": (program(call("collections", "OrderedDict", [[1, 2, 3]])), "pairs"),
    "an OrderedDict of too much": (program(call("collections", "OrderedDict", 1, 2)), "arguments"),
    "a Counter of a text": (program(call("collections", "Counter", "aab")), "cannot take a str"),
    "a set of a text": (program(call("builtins", "set", "ab")), "cannot take a str"),
    "bytes of a number": (program(call("_codecs", "encode", 5)), "needs bytes"),
    "a codec of one's own": (program(call("_codecs", "encode", "x", "rot13")), "needs bytes"),
    "no Latin": (program(call("_codecs", "encode", "\u0416", "latin1")), "Unicode"),
    "a complex text": (program(call("builtins", "complex", "1", "2")), "numbers"),
    "a size of texts": (program(call("torch", "Size", ["a"])), "out of range"),
    "a negative size": (program(call("torch", "Size", [-1])), "-1 is not valid in the sizes"),
    "a size of a truth": (program(call("torch", "Size", [True])), "bool"),
    "an endless size": (program(call("torch", "Size", [1] * 65)), "65"),
    "a scalar of the wrong length": (program(call("numpy.core.multiarray", "scalar",
        call("numpy", "dtype", "f8", False, True) + value((3, "<", None)) + b"b", value(b"\0\0\0"))), "3 bytes"),
    "a tensor of no arguments": (program(call("torch._utils", "_rebuild_tensor_v2")), "arguments"),
    "a tensor of texts": (program(call("torch._utils", "_rebuild_tensor_v2", *"abcdef")), "str"),
    "a tensor with a negative stride": (
        program(call("torch._utils", "_rebuild_tensor_v2", None, 0, (2,), (-1,), False, {})), "-1 is not valid in"),
    "a tensor with a negative offset": (
        program(call("torch._utils", "_rebuild_tensor_v2", None, -4, (2,), (1,), False, {})), "-4 is not valid in"),
    "a tensor with an endless size": (
        program(call("torch._utils", "_rebuild_tensor_v2", None, 0, (2**70,), (1,), False, {})), "out of range"),
    "a tensor of two sizes and one stride": (
        program(call("torch._utils", "_rebuild_tensor_v2", None, 0, (2, 2), (1,), False, {})), "2 sizes, but 1 stride"),
    "a tensor without a dtype": (
        program(call("torch._utils", "_rebuild_tensor_v3", None, 0, (2,), (1,), False, {}, "float32")), "a dtype"),
    "a tensor with odd metadata": (
        program(call("torch._utils", "_rebuild_tensor_v2", None, 0, (2,), (1,), False, {}, "conj")), "metadata"),
    "a parameter of a number": (program(call("torch._utils", "_rebuild_parameter", 5, True, {})), "needs a tensor"),
    "a subclass without a class": (
        program(call("torch._tensor", "_rebuild_from_type_v2", 1, 2, value(()), None)), "needs a class"),
    "calls in calls in calls": (program(name("torch._tensor", "_rebuild_from_type_v2"), b"(",
        *[name("torch._tensor", "_rebuild_from_type_v2") + name("torch", "Tensor") + b"("] * 40,
        name("torch._tensor", "_rebuild_from_type_v2"), name("torch", "Tensor"), b")N", b"tN" * 40, b"tR"),
        "nested too deeply"),
}  # fmt: skip


@pytest.mark.parametrize(("data", "said"), CORRUPT.values(), ids=CORRUPT.keys())
def test_what_makes_no_sense(data: bytes, said: str) -> None:
    with refuses("CORRUPT", f"record {RECORD}", said, file=FILE):
        read(data)


@pytest.mark.parametrize("data", [b"\x80\x05\x97.", b"\x80\x05N\x98."], ids=["NEXT_BUFFER", "READONLY_BUFFER"])
def test_buffers_out_of_band(data: bytes) -> None:
    with refuses("UNSUPPORTED", "outside"):
        read(data)


def _laughs(levels: int, width: int) -> bytes:
    """A list of lists of lists …, each shared `width` times: `width ** levels` leaves in a few hundred bytes."""
    steps = [value(["ha"]), b"q\0"]
    for level in range(levels):
        steps += [b"0](", b"h%c" % level * width, b"eq%c" % (level + 1)]
    return program(*steps)


def _itself() -> bytes:
    return program(b"}q\0", text("me"), b"h\0s")


def _deep(levels: int) -> bytes:
    return program(b"}", *[text("x") + b"}"] * levels, b"s" * levels)


WALKS: dict[str, tuple[bytes, str]] = {
    "billion laughs": (_laughs(9, 10), "more than"),
    "laughs without end": (_laughs(99, 100), "more than"),
    "laughs that are deep": (_laughs(103, 2), "deep"),
    "laughs in dicts": (program(b"}q\0", text("a"), b"Ns",
        *[b"0}q%c(" % i + b"".join(text(key) + b"h%c" % (i - 1) for key in "abcdefgh") + b"u" for i in range(1, 20)]),
        "more than"),
    "itself": (_itself(), "contains itself"),
    "itself in a tuple": (program(b"]q\0", b"h\0\x85a"), "contains itself"),
    "a million deep": (_deep(1_000_000), "deep"),
    "a key of a million letters": (program(b"}", text("x" * 1_000_000), value(1), b"s"), "characters"),
}  # fmt: skip


@pytest.mark.oracle
@pytest.mark.parametrize(("data", "said"), WALKS.values(), ids=WALKS.keys())
def test_walks_end(data: bytes, said: str) -> None:
    with pytest.raises(TransaxleError, match=said) as caught:
        flatten(read(data).value, FILE)
    assert (caught.value.code, caught.value.where.file) == ("CORRUPT", FILE)


GREEDY: dict[str, Callable[[], bytes]] = {
    "lists": lambda: HEAD + b"]" * 40_000_000,
    "dicts": lambda: HEAD + b"}" * 40_000_000,
    "marks": lambda: HEAD + b"(" * 40_000_000,
    "nothing": lambda: HEAD + b"N" * 150_000_000,
    "tuples": lambda: HEAD + b"N" + b"\x85" * 40_000_000,
    "copies of a dict": lambda: program(b"}(", *[b"J" + struct.pack("<i", i) + b"N" for i in range(100_000)], b"uq\0",
        (name("collections", "OrderedDict") + b"h\0\x85R") * 500),
    "copies of a list": lambda: program(b"](", b"N" * 1_000_000, b"eq\0",
        (name("builtins", "set") + b"h\0\x85R") * 1000),
    "copies of a text": lambda: program(text("x" * 10_000_000), b"q\0",
        (name("_codecs", "encode") + b"h\0\x85R") * 1000),
    "wide texts": lambda: program(text("\U0001f600" + "x" * 10_000_000) * 10),
    "names that grow": lambda: program(text("x" * 5_000_000), b"q\0", name("torch", "Tensor"), b"q\1",
        (name("builtins", "getattr") + b"h\1h\0\x86R") * 500),
    "equal hashes": lambda: program(b"}(", *[value(i * (2**61 - 1)) + b"N" for i in range(50_000)], b"u"),
    "hashes of nested tuples": lambda: program(b"}q\0", b")", b"2\x86" * 60, b"Ns"),
    "laughs": lambda: _laughs(9, 10),
    "laughs, deeply": lambda: _laughs(99, 100),
}  # fmt: skip


@pytest.mark.oracle
@pytest.mark.slow
@pytest.mark.parametrize("case", GREEDY)
def test_memory_and_time_have_an_end(tmp_path: Path, case: str) -> None:
    """In a process that may not have a gigabyte beyond the file itself, every greedy pickle ends by itself."""
    file = tmp_path / "greedy"
    file.write_bytes(GREEDY[case]())
    script = """
        import resource, sys
        from transaxle.errors import TransaxleError
        from transaxle.formats.flattened_state import flatten
        from transaxle.formats.pickled.interpreter import Bounds, read_pickle
        data = open(sys.argv[1], "rb").read()
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), used + (1 << 30)))
        resource.setrlimit(resource.RLIMIT_CPU, (120, 120))
        try:
            flatten(read_pickle(data, file="f").value, "f")
        except TransaxleError as error:
            print(error.code)
        else:
            print("fine")
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() in ("CORRUPT", "UNSAFE_PICKLE", "fine")
