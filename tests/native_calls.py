"""The compiled kernels on NumPy arrays, without a compiled program around them: thousands of calls a second.

An op's handlers are those that XLA calls; ctypes makes XLA's call frame (jaxlib/include/xla/ffi/api/c_api.h). So the
decoding of operands and attributes is tested, too, and a wheel needs nothing that only tests use.
"""

import ctypes
import functools
import math
from ctypes import POINTER, c_char_p, c_int, c_int64, c_size_t, c_void_p

import numpy as np

from jaxlowprec.wiring import native

THREADS = 3
"""How many threads the handlers are told of; their tasks run one after the other, in the calling thread."""

_DTYPES = {
    "bool": 1,
    "int8": 2,
    "int16": 3,
    "int32": 4,
    "int64": 5,
    "uint8": 6,
    "uint32": 8,
    "float16": 10,
    "float32": 11,
    "float64": 12,
    "bfloat16": 16,
    "float8_e5m2": 19,
    "float8_e4m3fn": 20,
    "float8_e8m0fnu": 33,
}
_ARRAY, _DICTIONARY, _SCALAR, _STRING = 1, 2, 3, 4
_EXECUTE = 3


def _struct(name, *fields, sized=True):
    head = [("struct_size", c_size_t), ("extension_start", c_void_p)] if sized else []
    return type(name, (ctypes.Structure,), {"_fields_": [*head, *fields]})


def _sized(kind, *values, last=None):
    """A struct that begins with its own size: up to its last field, or to the one that the header counts as such."""
    field = getattr(kind, last or kind._fields_[-1][0])
    return kind(field.offset + field.size, None, *values)


_Buffer = _struct("Buffer", ("dtype", c_int), ("data", c_void_p), ("rank", c_int64), ("dims", POINTER(c_int64)))
_ByteSpan = _struct("ByteSpan", ("ptr", c_char_p), ("len", c_size_t), sized=False)
_Array = _struct("Array", ("dtype", c_int), ("size", c_size_t), ("data", c_void_p), sized=False)
_Scalar = _struct("Scalar", ("dtype", c_int), ("value", c_void_p), sized=False)
_Values = _struct("Values", ("size", c_int64), ("types", POINTER(c_int)), ("values", POINTER(c_void_p)))
_Attrs = _struct(
    "Attrs", ("size", c_int64), ("types", POINTER(c_int)), ("names", POINTER(c_void_p)), ("values", POINTER(c_void_p))
)
_CallFrame = _struct(
    "CallFrame",
    ("api", c_void_p),
    ("ctx", c_void_p),
    ("stage", c_int),
    ("args", _Values),
    ("rets", _Values),
    ("attrs", _Attrs),
    ("future", c_void_p),
)
_ErrorCreate = _struct("ErrorCreate", ("message", c_char_p), ("code", c_int))
_Schedule = _struct("Schedule", ("ctx", c_void_p), ("task", c_void_p), ("data", c_void_p))
_NumThreads = _struct("NumThreads", ("ctx", c_void_p), ("num_threads", POINTER(c_int64)))
_Function = ctypes.CFUNCTYPE(c_void_p, c_void_p)
_API = ("Error_Create", "Error_GetMessage", "Error_Destroy", "Handler_Register", "Stream_Get", "Type_Register")
_API += ("ExecutionContext_Get", "State_Set", "State_Get", "DeviceMemory_Allocate", "DeviceMemory_Free")
_API += ("ThreadPool_Schedule", "ThreadPool_NumThreads", "Future_Create", "Future_SetAvailable", "Future_SetError")
_API += ("RunId_Get", "DeviceOrdinal_Get")
_Api = _struct(
    "Api",
    *(("version_size", c_size_t), ("version_extension", c_void_p), ("major", c_int), ("minor", c_int)),
    ("internal_api", c_void_p),
    *((name, _Function) for name in _API),
)

_errors: list[str] = []


@_Function
def _create_error(address):
    _errors.append(_ErrorCreate.from_address(address).message.decode())
    return len(_errors)  # not null


@_Function
def _schedule(address):
    given = _Schedule.from_address(address)
    ctypes.CFUNCTYPE(None, c_void_p)(given.task)(given.data)


@_Function
def _num_threads(address):
    _NumThreads.from_address(address).num_threads[0] = THREADS


@functools.cache
def _api():
    api = _sized(_Api, 24, None, *native.library().module.ffi_api_version)
    api.Error_Create, api.ThreadPool_Schedule, api.ThreadPool_NumThreads = _create_error, _schedule, _num_threads
    return api


@functools.cache
def _handler(name):
    address = ctypes.pythonapi.PyCapsule_GetPointer
    address.restype, address.argtypes = c_void_p, [ctypes.py_object, c_char_p]
    return _Function(address(native.library().module.cpu_handlers()[name], None))


def _values(kind, types, *lists):
    """A struct of arrays, of which the last are pointers to structs, and what has to live as long as it."""
    pointers = [(c_void_p * len(structs))(*map(ctypes.addressof, structs)) for structs in lists]
    return _sized(kind, len(types), (c_int * len(types))(*types), *pointers), [lists, pointers]


def _buffers(arrays):
    made = []
    for array in arrays:
        assert array.flags.c_contiguous
        dims = (c_int64 * array.ndim)(*array.shape)
        made.append(_sized(_Buffer, _DTYPES[array.dtype.name], array.ctypes.data, array.ndim, dims))
    return _values(_Values, [1] * len(made), made)


def _attributes(attributes):
    """As XLA passes them, sorted by name; numbers are of NumPy's dtype, an int of Python int64."""
    types, names, values, kept = [], [], [], []
    for name, value in sorted(attributes.items()):
        names.append(_ByteSpan(name.encode(), len(name)))
        if isinstance(value, dict):
            kind, (made, inner) = _DICTIONARY, _attributes(value)
            kept.append(inner)
        elif isinstance(value, str):
            kind, made = _STRING, _ByteSpan(value.encode(), len(value))
        else:
            number = np.ascontiguousarray(value) if np.ndim(value) else np.array(value)
            dtype, address = _DTYPES[number.dtype.name], number.ctypes.data
            kept.append(number)
            kind, made = (
                (_ARRAY, _Array(dtype, number.size, address)) if number.ndim else (_SCALAR, _Scalar(dtype, address))
            )
        types.append(kind)
        values.append(made)
    struct, inner = _values(_Attrs, types, names, values)
    return struct, [kept, inner]


def _full_of_ones(result):
    dtype = np.dtype(result.dtype)
    return np.full(math.prod(result.shape) * dtype.itemsize, 0xFF, np.uint8).view(dtype).reshape(result.shape)


def call(name, results, operands, attributes):
    """A handler's results for NumPy arrays: a list, or one array where `results` is not a list.

    Arguments:
        name: of the handler, as in `jax.ffi.ffi_call`.
        results: the shapes and dtypes of its results. Their memory is full of ones before the call, for no kernel may
            count on zeros.
        operands: NumPy arrays.
        attributes: scalars, texts and dictionaries of them.

    Raises:
        ValueError: the handler's error.
    """
    operands = [np.require(x, requirements="CA") for x in operands]
    several = isinstance(results, list | tuple)
    outputs = [_full_of_ones(r) for r in (results if several else [results])]
    args, kept_args = _buffers(operands)
    rets, kept_rets = _buffers(outputs)
    attrs, kept_attrs = _attributes(attributes)
    frame = _sized(_CallFrame, ctypes.addressof(_api()), None, _EXECUTE, args, rets, attrs, None, last="attrs")
    failed = _handler(name)(ctypes.addressof(frame))
    del kept_args, kept_rets, kept_attrs
    if failed:
        raise ValueError(_errors.pop())
    return outputs if several else outputs[0]
