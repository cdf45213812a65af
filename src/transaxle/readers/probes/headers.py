"""safetensors files without data: tensors on the meta device, with the names, shapes and dtypes of the real files.

A reader that opens such a file gets tensors on which every operation works but costs no memory. So its own code runs on
a checkpoint of any size, and this module records which tensors it takes.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Tensors = dict[str, tuple[str, list[int]]]
"""Tensor name -> (code of the dtype, shape)."""

DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "I32": "int32", "U32": "uint32",
    "I64": "int64", "U64": "uint64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "C64": "complex64",
    "F4": "float4_e2m1fn_x2",
}  # fmt: skip
"""Code of a dtype in safetensors files -> name of torch's dtype."""


class Headers:
    """The files of a checkpoint without their data, and a record of what a reader takes from them.

    Args:
        folder: the folder in which the reader looks for the files.
        files: file name -> tensor name -> (code of the dtype, shape).

    Attributes:
        taken: tensor name -> number of times that the reader took it.
    """

    def __init__(self, folder: str, files: dict[str, Tensors]) -> None:
        self.folder, self.files = os.path.realpath(folder), files
        self.taken: Counter[str] = Counter()

    def install(self) -> None:
        """Replace the functions that open safetensors files; files in other folders are opened as before.

        Must be called before the reader is imported, because readers import these functions by name.
        """
        import safetensors
        import safetensors.torch

        _FOLDERS[self.folder] = self
        if len(_FOLDERS) > 1:
            return
        real_open, real_load = safetensors.safe_open, safetensors.torch.load_file

        def safe_open(filename: Any, *arguments: Any, **options: Any) -> Any:
            here = _headers_at(filename)
            return real_open(filename, *arguments, **options) if here is None else _File(*here)

        def load_file(filename: Any, *arguments: Any, **options: Any) -> Any:
            here = _headers_at(filename)
            if here is None:
                return real_load(filename, *arguments, **options)
            headers, tensors = here
            return {name: headers.take(tensors, name) for name in tensors}

        for module, name, function in (
            (safetensors, "safe_open", safe_open),
            (safetensors.torch, "safe_open", safe_open),
            (safetensors.torch, "load_file", load_file),
        ):
            setattr(module, name, function)

    def take(self, tensors: Tensors, name: str) -> Any:
        """Return a tensor on the meta device, and count that the reader took it."""
        self.taken[name] += 1
        return _meta(*tensors[name])

    def write(self) -> None:
        """Write the headers of the files, without data, for readers that look at them by themselves."""
        for file, tensors in self.files.items():
            entries, start = {}, 0
            for name, (code, shape) in tensors.items():
                stop = start + _meta(code, shape).nbytes
                entries[name] = {"dtype": code, "shape": shape, "data_offsets": [start, stop]}
                start = stop
            text = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
            Path(self.folder, file).write_bytes(len(text).to_bytes(8, "little") + text)

    def tensor(self, name: str) -> Any:
        """Return a tensor on the meta device that the reader has taken before."""
        return next(_meta(*tensors[name]) for tensors in self.files.values() if name in tensors)

    def untaken(self) -> list[str]:
        """Return the names of the tensors that the reader never took."""
        return sorted(name for tensors in self.files.values() for name in tensors if name not in self.taken)


def _meta(code: str, shape: list[int]) -> Any:
    import torch

    packed = [*shape[:-1], shape[-1] // 2] if code == "F4" and shape else shape
    return torch.empty(packed, dtype=getattr(torch, DTYPES[code]), device="meta")


_FOLDERS: dict[str, Headers] = {}
"""Folder -> its files without data; several if one process runs several probes."""


def _headers_at(path: Any) -> tuple[Headers, Tensors] | None:
    """Return the tensors of a file without data; None for any other file."""
    folder, name = os.path.split(os.path.realpath(os.fspath(path)))
    headers = _FOLDERS.get(folder)
    tensors = None if headers is None else headers.files.get(name)
    return None if headers is None or tensors is None else (headers, tensors)


class _File:
    """What `safe_open` returns."""

    def __init__(self, headers: Headers, tensors: Tensors) -> None:
        self._headers, self._tensors = headers, tensors

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def keys(self) -> list[str]:
        return list(self._tensors)

    def offset_keys(self) -> list[str]:
        return list(self._tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def metadata(self) -> dict[str, str]:
        return {"format": "pt"}

    def get_tensor(self, name: str) -> Any:
        return self._headers.take(self._tensors, name)

    def get_tensors(self) -> dict[str, Any]:
        return {name: self.get_tensor(name) for name in self._tensors}

    def get_slice(self, name: str) -> _Slice:
        return _Slice(self._headers, self._tensors, name)


class _Slice:
    """What `get_slice` returns: its elements count as taken when they are indexed."""

    def __init__(self, headers: Headers, tensors: Tensors, name: str) -> None:
        self._headers, self._tensors, self._name = headers, tensors, name

    def get_shape(self) -> list[int]:
        return list(self._tensors[self._name][1])

    def get_dtype(self) -> str:
        return self._tensors[self._name][0]

    def __getitem__(self, index: Any) -> Any:
        return self._headers.take(self._tensors, self._name)[index]


def run(trace: Callable[[dict[str, Any], Headers, dict[str, Any]], None]) -> None:
    """Run a probe: read the request, trace the reader, and write the result.

    Args:
        trace: function of the request, the `Headers` of its checkpoint, and the result that it fills. An exception that
            it raises is recorded as the reader's error.
    """
    source, target = map(Path, sys.argv[1:3])
    request = json.loads(source.read_text("utf-8"))
    headers = Headers(request["folder"], request["files"])
    headers.install()
    result: dict[str, Any] = {}
    try:
        trace(request, headers, result)
    except Exception as error:  # noqa: BLE001 - whatever the reader raises is its answer
        result["error"] = explain(error)
    result["untaken"] = headers.untaken()
    part = target.with_suffix(".part")
    part.write_text(json.dumps(result, default=str), "utf-8")
    part.replace(target)


def explain(error: BaseException) -> str:
    """Return an exception as text: its type, its message, and the line of the reader's code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {str(error).strip()[:2000]}{place}"
