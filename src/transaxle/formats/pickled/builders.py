"""Functions that build the results of well-known calls in pickles; each of these builders checks the arguments and
returns plain data.

No builder calls the function that the pickle names. A pickle that passes arguments which the real function never gets
is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from msgspec.structs import replace

from transaxle.formats.pickled.descriptors import (
    NOTHING,
    DType,
    Global,
    Object,
    OrderedMap,
    Quantized,
    Scalar,
    TensorRef,
    malformed,
    put,
)

Args = tuple[Any, ...]
Tensor = TensorRef | Object | Quantized


class Caller(Protocol):
    """The methods of the pickle interpreter that builders call."""

    def call(self, function: object, args: object) -> Any:
        """Return the result of a call of the given global (class or function), or a description of the call."""

    def charge(self, amount: int) -> None:
        """Subtract the bytes of a copied value from the interpreter's memory budget."""


Build = Callable[[Global, Args, Caller], Any]
"""A builder: `build(function, arguments, caller)` returns the result of the call."""

MAX_DIMS = 64
_MAX_COUNT = 2**63 - 1
_PLAIN_TENSORS = frozenset(
    {("torch", "Tensor"), ("torch.nn.parameter", "Parameter"), ("torch.nn.parameter", "Buffer"), ("torch", "Parameter")}
)


def check_length(function: Global, args: Args, *lengths: int) -> None:
    """Refuse a call unless its number of arguments is in `lengths`."""
    if len(args) not in lengths:
        raise malformed(f"{function} takes {' or '.join(map(str, lengths))} arguments, not {len(args)}")


# Globals of Python's standard library.


def ordered_map(function: Global, args: Args, caller: Caller) -> OrderedMap:
    """Build the dict of `OrderedDict()`, `OrderedDict([(key, value), …])` or `Counter({key: count})`."""
    check_length(function, args, 0, 1)
    ordered = OrderedMap()
    argument = args[0] if args else []
    if type(argument) is dict or type(argument) is OrderedMap:
        caller.charge(100 * len(argument))
        ordered.update(argument)
    elif type(argument) in (list, tuple):
        caller.charge(100 * len(argument))
        if any(type(pair) not in (list, tuple) or len(pair) != 2 for pair in argument):
            raise malformed(f"{function} needs pairs")
        put(ordered, [item for pair in argument for item in pair])
    else:
        raise malformed(f"{function} cannot take a {type(argument).__name__}")
    return ordered


def default_map(function: Global, args: Args, caller: Caller) -> OrderedMap:
    """Build the dict of `defaultdict(factory)`; the factory function is ignored."""
    check_length(function, args, 0, 1, 2)
    return ordered_map(function, args[1:], caller)


def collection(function: Global, args: Args, caller: Caller) -> Object:
    """Describe `set([…])`, `frozenset([…])` or `deque([…], length)`; the elements become the `items` of the
    `Object`.
    """
    check_length(function, args, 0, 1, 2)
    argument = args[0] if args else []
    if type(argument) not in (list, tuple):
        raise malformed(f"{function} cannot take a {type(argument).__name__}")
    caller.charge(8 * len(argument))
    return Object(function, args[1:], items=list(argument))


def octets(function: Global, args: Args, caller: Caller) -> bytes:
    """Build the bytes of `_codecs.encode(text, "latin1")`, `bytearray(octets)` or `bytearray(text, "latin-1")`."""
    check_length(function, args, 0, 1, 2)
    if not args:
        return b""
    argument = args[0]
    if type(argument) is bytes and len(args) == 1:
        return argument
    if type(argument) is str and args[1:] in ((), ("latin1",), ("latin-1",)):
        caller.charge(len(argument))
        return argument.encode("latin-1")
    raise malformed(f"{function} needs bytes")


def complex_number(function: Global, args: Args, _: Caller) -> complex:
    """Build the number of `complex(real, imaginary)`."""
    check_length(function, args, 2)
    if any(type(number) not in (float, int) for number in args):
        raise malformed(f"{function} needs numbers")
    return complex(float(args[0]), float(args[1]))


def describe_reconstructor(function: Global, args: Args, _: Caller) -> Object:
    """Describe a call `copyreg._reconstructor(cls, base, state)`, which creates objects in pickle protocols 0 and 1."""
    check_length(function, args, 3)
    if type(args[0]) is not Global:
        raise malformed(f"{function} needs a class")
    return Object(args[0], () if args[2] is None else (args[2],), new=True)


# Globals of numpy.

_NUMPY_CODES = {
    "b1": "BOOL", "i1": "I8", "i2": "I16", "i4": "I32", "i8": "I64", "u1": "U8", "u2": "U16", "u4": "U32", "u8": "U64",
    "f2": "F16", "f4": "F32", "f8": "F64", "c8": "C64",
}  # fmt: skip
_ORDERS = frozenset({"<", ">", "|", "="})


def numpy_scalar(function: Global, args: Args, _: Caller) -> Scalar | Object:
    """Build the number of `scalar(dtype, octets)`; if the dtype has no safetensors code, only describe the call."""
    dtype, data = args if len(args) == 2 else (None, None)
    if type(dtype) is not Object or type(data) is not bytes or not dtype.args or type(dtype.state) is not tuple:
        return Object(function, args)
    name, order = dtype.args[0], dtype.state[1] if len(dtype.state) > 1 else None
    code = _NUMPY_CODES.get(name) if type(name) is str else None
    if code is None or type(order) is not str or order not in _ORDERS:
        return Object(function, args)
    if len(data) != int(name[1:]):
        raise malformed(f"a number of numpy's type {name} has {len(data)} bytes")
    if order == ">" and code == "C64":
        return Object(function, args)
    return Scalar(code, data[::-1] if order == ">" else data)


# Globals of torch.


def size(function: Global, args: Args, _: Caller) -> tuple[int, ...]:
    """Build the tuple of `torch.Size(sizes)`."""
    check_length(function, args, 0, 1)
    return counts(function, "sizes", args[0]) if args else ()


def counts(function: Global, noun: str, values: Any) -> tuple[int, ...]:
    """Return sizes or strides as a tuple; refuse any value that is not a short sequence of non-negative integers."""
    if type(values) not in (tuple, list):
        raise malformed(f"{function}: the {noun} must be a list of counts, not a {type(values).__name__}")
    if len(values) > MAX_DIMS:
        raise malformed(f"{function}: {len(values)} {noun}, and at most {MAX_DIMS} are allowed")
    for item in values:
        if type(item) is not int or not 0 <= item <= _MAX_COUNT:
            _count(function, noun, item)
    return tuple(values)


def _count(function: Global, noun: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_COUNT:
        shown = value if type(value) is int and abs(value) <= _MAX_COUNT else f"a {type(value).__name__} out of range"
        raise malformed(f"{function}: {shown} is not valid in the {noun}")
    return value


def _view(function: Global, args: Args, dtype: object, metadata: object) -> TensorRef:
    storage, offset, sizes, strides = args[:4]
    if dtype is not None and type(dtype) is not DType:
        raise malformed(f"{function} needs a dtype")
    if metadata is not None and type(metadata) is not dict:
        raise malformed(f"{function} needs metadata")
    shape, steps = counts(function, "sizes", sizes), counts(function, "strides", strides)
    if len(shape) != len(steps):
        raise malformed(f"{function}: {len(shape)} sizes, but {len(steps)} strides")
    flags = tuple(key for key, bit in (metadata or {}).items() if type(key) is str and bit is not False)
    return TensorRef(storage, dtype, _count(function, "offset", offset), shape, steps, flags)


def tensor(function: Global, args: Args, _: Caller) -> TensorRef:
    """Describe the tensor that `_rebuild_tensor(storage, offset, size, stride)` creates."""
    check_length(function, args, 4)
    return _view(function, args, None, None)


def tensor_v2(function: Global, args: Args, _: Caller) -> TensorRef:
    """Describe `_rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks[, metadata])`."""
    check_length(function, args, 6, 7)
    return _view(function, args, None, args[6] if len(args) > 6 else None)


def tensor_v3(function: Global, args: Args, _: Caller) -> TensorRef:
    """Describe `_rebuild_tensor_v3(storage, offset, size, stride, requires_grad, hooks, dtype[, metadata])`."""
    check_length(function, args, 7, 8)
    if type(args[6]) is not DType:
        raise malformed(f"{function} needs a dtype")
    return _view(function, args, args[6], args[7] if len(args) > 7 else None)


def parameter(function: Global, args: Args, _: Caller) -> Tensor:
    """Return the tensor inside `_rebuild_parameter(data, requires_grad, hooks[, state])`."""
    check_length(function, args, 3, 4)
    return tensor_of(function, args[0])


def parameter_class(function: Global, args: Args, _: Caller) -> Tensor:
    """Return the tensor inside `Parameter(data, requires_grad)`."""
    return tensor_of(function, args[0]) if args else Object(function, new=True)


def tensor_of(function: Global, value: object) -> Tensor:
    """Return the argument if it is a tensor of any kind; refuse any other value."""
    if not isinstance(value, TensorRef | Object | Quantized):
        raise malformed(f"{function} needs a tensor, not a {type(value).__name__}")
    return value


def of_type(function: Global, args: Args, caller: Caller) -> Tensor:
    """Build the tensor of `_rebuild_from_type_v2(function, type, args, state)`; if the type is a subclass of a tensor
    class, describe the call.
    """
    check_length(function, args, 4)
    rebuild, kind, inner, state = args
    if type(kind) is not Global or type(rebuild) is not Global:
        raise malformed(f"{function} needs a class")
    tensor = tensor_of(function, caller.call(rebuild, inner))
    if (kind.module, kind.name) in _PLAIN_TENSORS:
        return tensor
    return Object(kind, (tensor,), state=NOTHING if state is None else state)


def from_cpu(function: Global, args: Args, _: Caller) -> Tensor:
    """Return the tensor `data` of `_rebuild_device_tensor_from_cpu_tensor(data, dtype, device, requires_grad)`."""
    check_length(function, args, 4)
    tensor = tensor_of(function, args[0])
    if type(args[1]) is not DType:
        raise malformed(f"{function} needs a dtype")
    return replace(tensor, dtype=args[1]) if type(tensor) is TensorRef else tensor
