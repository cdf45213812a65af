"""Headers: what the library writes is read, what it accepts is understood, everything else is refused by name."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError

from tests.formats.files import FILE, header_of, info, library, made, raw
from tests.formats.refusals import refuses
from tests.work import peak
from transaxle.errors import Code, Refused, TransaxleError
from transaxle.formats.catalog import BITS, Spec
from transaxle.formats.safetensors import MAX_DIMS, MAX_HEADER, METADATA, encode_header, parse_header
from transaxle.formats.storage.storage import MAX_PAIRS

ONE = info("F32", [1], 0, 4)
FOUR = b"\0" * 4
EIGHT = b"\0" * 8
NAME = "layer.weight"


def text_of(name: str, dtype: str = '"F32"', shape: str = "[1]", offsets: str = "[0,4]") -> bytes:
    return f'{{"{name}":{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}}}'.encode()


@dataclass(frozen=True)
class Hostile:
    case: str
    file: bytes
    code: Code = "CORRUPT"
    tensor: str | None = NAME


def entry(case: str, code: Code = "CORRUPT", data: bytes = FOUR, **parts: str) -> Hostile:
    return Hostile(case, raw(text_of(NAME, **parts), data), code)


def whole(case: str, header: bytes, code: Code = "CORRUPT", data: bytes = FOUR, tensor: str | None = None) -> Hostile:
    return Hostile(case, raw(header, data), code, tensor)


GOOD = text_of(NAME)
INFO = GOOD[GOOD.index(b":") + 1 : -1]
NESTED = 1_000_000

HOSTILE = [
    # The length field.
    Hostile("empty file", b"", tensor=None),
    Hostile("seven bytes", b"\0" * 7, tensor=None),
    Hostile("length beyond the file", (999).to_bytes(8, "little") + GOOD, tensor=None),
    Hostile("length beyond the limit", (MAX_HEADER + 1).to_bytes(8, "little") + GOOD, tensor=None),
    Hostile("length of all ones", b"\xff" * 8 + GOOD, tensor=None),
    Hostile("length one short", (len(GOOD) - 1).to_bytes(8, "little") + GOOD + FOUR, tensor=None),
    Hostile("no header", bytes(8), tensor=None),
    Hostile("a Git LFS pointer", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4\n", tensor=None),
    # The JSON.
    whole("no JSON", b"\x80\x04\x95"),
    whole("a list", b"[]"),
    whole("a string", b'"' + b"a" * 20 + b'"'),
    whole("null", b"null"),
    whole("two objects", GOOD + b"{}"),
    whole("cut off", GOOD[:-1]),
    whole("zero padding", GOOD + b"\0\0"),
    whole("byte order mark", b"\xef\xbb\xbf" + GOOD),
    whole("UTF-16", GOOD.decode().encode("utf-16")),
    whole("no UTF-8 in a name", GOOD.replace(b"layer", b"\xff")),
    whole("no UTF-8 in a value", GOOD.replace(b"F32", b"\xff")),
    whole("surrogate in UTF-8", GOOD.replace(b"layer", b"\xed\xa0\x80")),
    whole("lone surrogate", GOOD.replace(b"layer", b"\\ud800")),
    whole("control character", GOOD.replace(b"layer", b"lay\ner")),
    whole("trailing comma", GOOD[:-1] + b",}"),
    whole("comment", b"/**/" + GOOD),
    whole("single quotes", GOOD.replace(b'"', b"'")),
    whole("a name without quotes", GOOD.replace(b'"layer.weight"', b"layer")),
    whole("NaN", GOOD.replace(b"[1]", b"[NaN]")),
    whole("leading zero", GOOD.replace(b"[1]", b"[01]")),
    whole("nested arrays", b'{"a":' + b"[" * NESTED + b"]" * NESTED + b"}"),
    whole("nested objects", b'{"a":' * NESTED + b"1" + b"}" * NESTED),
    whole("nested metadata", b'{"__metadata__":' + b'{"a":' * NESTED + b"1" + b"}" * (NESTED + 1)),
    # Keys given twice: decoders keep one of them and say nothing.
    whole("a name twice", b"{" + GOOD[1:-1] + b"," + GOOD[1:-1] + b"}", "NAME_COLLISION", tensor=NAME),
    whole("a name twice, once escaped", b"{" + GOOD[1:-1] + b',"\\u006cayer.weight":' + INFO + b"}",
          "NAME_COLLISION", tensor=NAME),
    whole("a name twice, one empty", b"{" + GOOD[1:-1] + b',"layer.weight":' + INFO.replace(b"[1]", b"[0]").replace(
        b"[0,4]", b"[4,4]") + b"}", "NAME_COLLISION", tensor=NAME),
    whole("dtype twice", GOOD.replace(b'"dtype"', b'"dtype":"F32","dtype"'), tensor=NAME),
    whole("shape twice", GOOD.replace(b'"shape"', b'"shape":[2],"shape"'), tensor=NAME),
    whole("offsets twice", GOOD[:-2] + b',"data_offsets":[0,4]}}', tensor=NAME),
    whole("metadata twice", b'{"__metadata__":{},"__metadata__":{},' + GOOD[1:], "NAME_COLLISION", tensor=METADATA),
    whole("metadata key twice", b'{"__metadata__":{"k":"1","k":"2"},' + GOOD[1:], tensor=METADATA),
    # The metadata.
    whole("metadata of numbers", b'{"__metadata__":{"a":1},' + GOOD[1:]),
    whole("metadata of null", b'{"__metadata__":{"a":null},' + GOOD[1:]),
    whole("metadata of lists", b'{"__metadata__":{"a":[]},' + GOOD[1:]),
    whole("metadata is a list", b'{"__metadata__":[],' + GOOD[1:]),
    whole("metadata is a string", b'{"__metadata__":"pt",' + GOOD[1:]),
    # One entry.
    whole("entry is null", b'{"layer.weight":null}', tensor=NAME),
    whole("entry is a number", b'{"layer.weight":1}', tensor=NAME),
    whole("entry is a list", b'{"layer.weight":["F32",[1],[0,4]]}', tensor=NAME),
    whole("entry is empty", b'{"layer.weight":{}}', tensor=NAME),
    whole("no dtype", GOOD.replace(b'"dtype":"F32",', b""), tensor=NAME),
    whole("no shape", GOOD.replace(b'"shape":[1],', b""), tensor=NAME),
    whole("no offsets", GOOD.replace(b',"data_offsets":[0,4]', b""), tensor=NAME),
    whole("a fourth key", GOOD.replace(b'"dtype"', b'"strides":[1],"dtype"'), tensor=NAME),
    entry("dtype is a number", dtype="32"),
    entry("dtype is null", dtype="null"),
    entry("dtype unknown", "UNSUPPORTED", dtype='"F128"'),
    entry("dtype in small letters", "UNSUPPORTED", dtype='"f32"'),
    entry("dtype empty", "UNSUPPORTED", dtype='""'),
    entry("dtype of torch", "UNSUPPORTED", dtype='"COMPLEX32"'),
    *(entry(f"shape {text}", shape=text) for text in (
        "null", "1", '"1"', "{}", "[true]", "[1.0]", "[1e0]", '["1"]', "[null]", "[[1]]", "[-1]", "[-1,-1]",
        f"[{2**63}]", f"[{2**64}]", f"[{2**62},{2**62}]", f"[{2**63 - 1},{2**63 - 1}]", f"[{2**62 + 1}]", "[0]",
        "[2]",
    )),
    entry("dim of 5000 digits", shape=f"[{'9' * 5000}]"),
    entry("overflow before a zero", shape=f"[{2**62},{2**62},0]", offsets="[0,0]", data=b""),
    entry("overflow after a zero", shape=f"[0,{2**62},{2**62}]", offsets="[0,0]", data=b""),
    entry("too many dims", "UNSUPPORTED", shape="[" + ",".join(["1"] * (MAX_DIMS + 1)) + "]"),
    entry("half a byte", dtype='"F4"', shape="[7]"),
    entry("three quarters of a byte", dtype='"F6_E2M3"', shape="[5]"),
    *(entry(f"offsets {text}", offsets=text) for text in (
        "null", "[4]", "[0,4,4]", '{"0":0,"1":4}', "[0,4.0]", "[false,4]", "[-4,0]", f"[0,{2**63}]", "[4,0]", "[4,8]",
    )),
    entry("does not begin at zero", offsets="[4,8]", data=EIGHT),
    whole("ends before the file", GOOD, data=EIGHT),
    entry("truncated data", data=b"\0\0\0"),
    entry("no data", data=b""),
    # Several entries.
    Hostile("gap", made({"a": ONE, NAME: info("F32", [1], 8, 12)}, bytes(12))),
    Hostile("overlap", made({"a": ONE, NAME: info("F32", [1], 2, 6)}, bytes(6)), "OVERLAP"),
    Hostile("same bytes", made({"a": ONE, NAME: ONE}, FOUR), "OVERLAP"),
    Hostile("inside another", made({"a": info("U8", [8], 0, 8), NAME: info("U8", [2], 2, 4)}, EIGHT), "OVERLAP"),
    Hostile("empty inside another", made({"a": ONE, NAME: info("F32", [0], 2, 2)}, FOUR), "OVERLAP"),
    Hostile("empty beyond the end", made({"a": ONE, NAME: info("F32", [0], 8, 8)}, FOUR)),
    Hostile("data without tensors", made({}, FOUR), tensor=None),
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda hostile: hostile.case)
def test_hostile_headers_are_refused(folder: Path, hostile: Hostile) -> None:
    folder.joinpath(FILE).write_bytes(hostile.file)
    with pytest.raises(Refused) as caught:
        header_of(folder)
    first = caught.value
    assert (first.code, first.where.file, first.where.tensor) == (hostile.code, FILE, hostile.tensor), str(first)
    assert first.exit_code == 3


def test_every_problem_is_named_at_once(folder: Path) -> None:
    entries = {
        "backwards": info("F32", [1], 4, 0),
        "misfit": info("F32", [3], 0, 4),
        "strange": info("F128", [1], 4, 20),
        "untyped": {"shape": [1], "data_offsets": [0, 4]},
    }
    folder.joinpath(FILE).write_bytes(made(entries, bytes(20)))
    with pytest.raises(Refused) as caught:
        header_of(folder)
    assert {refusal.where.tensor for refusal in caught.value.refusals} == entries.keys()
    assert {refusal.where.file for refusal in caught.value.refusals} == {FILE}


def test_a_flood_of_problems_is_cut_off(folder: Path) -> None:
    folder.joinpath(FILE).write_bytes(made({f"t{i}": info("F32", [1], 0, 4) for i in range(20_000)}, FOUR))
    begun = time.monotonic()
    with pytest.raises(Refused) as caught:
        header_of(folder)
    assert len(caught.value.refusals) < 200
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize(
    "text",
    [
        b'{"a":[' + b"[]," * 10**6 + b"[]]}",
        b'{"a":{"shape":[' + b"[]," * 10**6 + b"[]]}}",
        b'{"a":' + b"[" * 2 * 10**6 + b"]" * 2 * 10**6 + b"}",
        b'{"__metadata__":{"a":[' + b"{}," * 10**6 + b"{}]}}",
        b"{" + b'"":1,' * (MAX_PAIRS + 1) + b'"":1}',
    ],
)
def test_a_hostile_header_takes_no_memory_to_speak_of(text: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(Refused):
            parse_header(text, FILE, 0)
        assert tracemalloc.get_traced_memory()[1] < 2 * len(text)
    finally:
        tracemalloc.stop()


ODD = {
    "leading space": b"  " + GOOD,
    "leading newline": b"\n\t " + GOOD,
    "trailing spaces": GOOD + b"   ",
    "trailing newlines": GOOD + b"\r\n\t",
    "spaces inside": GOOD.replace(b":", b" : ").replace(b",", b" ,\n"),
    "metadata is null": b'{"__metadata__":null,' + GOOD[1:],
    "metadata at the end": GOOD[:-1] + b',"__metadata__":{"a":"b"}}',
    "keys in another order": b'{"layer.weight":{"data_offsets":[0,4],"shape":[1],"dtype":"F32"}}',
    "escaped quotes and colons": GOOD.replace(b"layer.weight", rb"a\"b\\:\\\"{c}:\\"),
    "empty name": text_of(""),
    "name with NUL": text_of("a\\u0000b"),
    "name is a path": text_of("../../etc/passwd"),
    "name is not ASCII": text_of("層.🚗"),
    "escaped pair of surrogates": text_of("\\ud83d\\ude97"),
    "0-d": text_of(NAME, shape="[]"),
    "many ones": text_of(NAME, shape="[" + ",".join(["1"] * MAX_DIMS) + "]"),
}


@pytest.mark.parametrize("text", ODD.values(), ids=ODD.keys())
def test_odd_but_valid_headers_are_read(folder: Path, text: bytes) -> None:
    data = b"\1\2\3\4"
    folder.joinpath(FILE).write_bytes(raw(text, data))
    header = header_of(folder)
    ((name, theirs),) = library(raw(text, data)).items()
    (ours,) = header.entries.values()
    assert (ours.name, ours.dtype, list(ours.shape)) == (name, theirs["dtype"], theirs["shape"])
    assert header.size == 8 + len(text) == ours.extents[0].offset


def test_empty_tensors_may_lie_anywhere_between_others(folder: Path) -> None:
    entries = {
        "last": info("F32", [0], 8, 8),
        "b": info("F32", [1], 4, 8),
        "between": info("F32", [0, 3], 4, 4),
        "a": ONE,
        "first": info("F32", [2, 0], 0, 0),
    }
    folder.joinpath(FILE).write_bytes(made(entries, EIGHT))
    assert list(header_of(folder).entries) == ["first", "a", "between", "b", "last"]


def test_a_file_without_tensors_is_one(folder: Path) -> None:
    folder.joinpath(FILE).write_bytes(made({METADATA: {"format": "pt"}}))
    assert header_of(folder).metadata == {"format": "pt"}


def test_the_library_knows_no_dtype_that_we_do_not() -> None:
    with pytest.raises(SafetensorError) as caught:
        library(raw(text_of(NAME, dtype='"?"'), FOUR))
    listed = str(caught.value).partition("expected one of ")[2].partition(" at line")[0]
    assert listed.replace("`", "").split(", ") == list(BITS)


# Fuzzing: one rule for everything: we succeed, or we refuse; and where we succeed, the library does and agrees.


def parsed(file: bytes) -> Mapping[str, Any] | None:
    """Parse as `read_header` would, without a file; None if refused."""
    length = int.from_bytes(file[:8], "little")
    if len(file) < 8 or length > len(file) - 8:
        return None
    try:
        return parse_header(file[8 : 8 + length], FILE, len(file) - 8 - length).entries
    except TransaxleError as error:
        if {refusal.where.file for refusal in error.refusals} != {FILE}:
            raise AssertionError("a refusal names no file") from error
        return None


def agrees_with_the_library(file: bytes) -> None:
    ours = parsed(file)
    if ours is None or b"-0" in file:  # the library takes a zero with a sign for a float
        return
    theirs = library(file)
    assert ours.keys() == theirs.keys()
    for name, item in ours.items():
        assert (item.dtype, list(item.shape)) == (theirs[name]["dtype"], theirs[name]["shape"])
        begin = item.extents[0].offset
        assert file[begin : begin + item.nbytes] == bytes(theirs[name]["data"])


VALID = made(
    {
        METADATA: {"format": "pt", "k": 'a:"b\\'},
        "a": info("BF16", [2, 3], 0, 12),
        "b.é": info("F4", [2, 2], 12, 14),
        "c": info("I64", [0, 7], 14, 14),
        "d": info("BOOL", [], 14, 15),
    },
    bytes(range(15)),
)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**65) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
near_infos = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "U8", "F4", "F6_E3M2", "nope"]),
        "shape": st.lists(st.integers(0, 4), max_size=3),
        "data_offsets": st.lists(st.integers(0, 12), min_size=2, max_size=2),
    }
)


@settings(max_examples=300)
@given(
    st.lists(st.tuples(st.integers(0, len(VALID) - 1), st.integers(0, 255)), max_size=4),
    st.integers(0, len(VALID)),
    st.binary(max_size=3),
)
def test_valid_files_with_changed_bytes(flips: list[tuple[int, int]], cut: int, inserted: bytes) -> None:
    file = bytearray(VALID)
    for at, byte in flips:
        file[at] = byte
    agrees_with_the_library(bytes(file))
    agrees_with_the_library(bytes(file[:cut]))
    agrees_with_the_library(bytes(file[:cut] + inserted + file[cut:]))


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.text(max_size=2), near_infos | json_values, max_size=4), st.integers(0, 12))
def test_headers_of_any_shape(entries: dict[str, Any], size: int) -> None:
    agrees_with_the_library(made(entries, bytes(size)))


# Writing.


@given(
    st.dictionaries(st.text(max_size=5), st.sampled_from(sorted(BITS)), max_size=6),
    st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
)
def test_what_we_write_the_library_reads(dtypes: dict[str, str], metadata: dict[str, str]) -> None:
    dtypes.pop(METADATA, None)
    rows, end = [], 0
    for name, dtype in dtypes.items():
        size = 8 * BITS[dtype] // 8
        rows.append((Spec(name, dtype, (2, 4)), end, end + size))
        end += size
    header = encode_header(rows, metadata)
    assert len(header) % 8 == 0
    file = header + bytes(i % 251 for i in range(end))
    agrees_with_the_library(file)
    assert parsed(file) is not None
    assert {name: item["dtype"] for name, item in library(file).items()} == dtypes
    written = json.loads(header[8:])
    assert written.get(METADATA, {}) == metadata


def test_seventy_thousand_tensors_take_a_moment() -> None:
    count, size = 70_000, 2 * 1536 * 4096
    name = "model.layers.{}.mlp.experts.{}.gate_proj.weight"
    rows = [
        (Spec(name.format(i // 1000, i % 1000), "BF16", (1536, 4096)), i * size, (i + 1) * size) for i in range(count)
    ]
    text = encode_header(rows, {"format": "pt"})[8:]
    begun = time.process_time()
    header = parse_header(text, FILE, count * size)
    assert time.process_time() - begun < 2  # 0.3 s on an idle core; a shared one may be slow, never quadratic
    assert len(header.entries) == count


def test_a_name_longer_than_any_is_refused_in_memory_like_the_header(tmp_path: Path) -> None:
    for name in ("x" * 3_000_000, "x.0" * 1_000_000):
        text = made({name: info("U8", [1], 0, 1)}, b"\0")
        tmp_path.joinpath(FILE).write_bytes(text)

        def read() -> None:
            with refuses("UNSUPPORTED", "its name has 3,000,000 characters; names have at most 4,096"):
                header_of(tmp_path)

        assert peak(read) < 6 * len(text)
    longest = "x" * 4_096
    tmp_path.joinpath(FILE).write_bytes(made({longest: info("U8", [1], 0, 1)}, b"\0"))
    assert list(header_of(tmp_path).entries) == [longest]


def test_metadata_of_more_keys_than_any_is_refused_before_it_is_built(tmp_path: Path) -> None:
    said = {f"k{at}": "" for at in range(100_001)}
    text = made({"__metadata__": said, "t": info("U8", [1], 0, 1)}, b"\0")
    tmp_path.joinpath(FILE).write_bytes(text)

    def read() -> None:
        with pytest.raises(Refused, match="__metadata__ has more than 100,000 keys"):
            header_of(tmp_path)

    assert peak(read) < 8 * len(text)
    said.pop("k0")
    tmp_path.joinpath(FILE).write_bytes(made({"__metadata__": said, "t": info("U8", [1], 0, 1)}, b"\0"))
    assert len(header_of(tmp_path).metadata) == 100_000
