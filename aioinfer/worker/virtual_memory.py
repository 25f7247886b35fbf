"""Memory of a GPU that can be given back and taken again at the same addresses, so that CUDA graphs
and tensors that refer to it stay valid: virtual memory management of the CUDA driver, called by
ctypes (the idea of torch's expandable segments, and of vLLM's `CuMemAllocator`).

A `VirtualMemory` reserves a range of addresses once. Physical memory is mapped to it in chunks, all
of which `unmap` gives back to the driver. `rank_memory` keeps weights and KV cache in such
ranges.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import torch

from aioinfer.errors import ConfigError

#: Physical memory is taken in pieces of at most so many bytes, so that tensors can move into a
#: range while the memory that they leave is given back.
CHUNK_BYTES = 256 << 20

# of cuda.h
_SUCCESS = 0
_PINNED = _DEVICE = 1
_READ_WRITE = 3
_MINIMUM_GRANULARITY = 0

_Address = ctypes.c_uint64
_Handle = ctypes.c_uint64
_Size = ctypes.c_size_t


class _Location(ctypes.Structure):
    """`CUmemLocation`."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _AllocationFlags(ctypes.Structure):
    """`CUmemAllocationProp.allocFlags`."""

    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _AllocationProperties(ctypes.Structure):
    """`CUmemAllocationProp`."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("metadata", ctypes.c_void_p),
        ("flags", _AllocationFlags),
    )


class _Access(ctypes.Structure):
    """`CUmemAccessDesc`."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


#: The functions of the driver that are called, with the types of their arguments.
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cuGetErrorString": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
    "cuCtxGetCurrent": (ctypes.POINTER(ctypes.c_void_p),),
    "cuCtxSetCurrent": (ctypes.c_void_p,),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(ctypes.c_void_p), ctypes.c_int),
    "cuMemGetAllocationGranularity": (
        ctypes.POINTER(_Size), ctypes.POINTER(_AllocationProperties), ctypes.c_int,
    ),
    "cuMemAddressReserve": (
        ctypes.POINTER(_Address), _Size, _Size, _Address, ctypes.c_ulonglong,
    ),
    "cuMemAddressFree": (_Address, _Size),
    "cuMemCreate": (
        ctypes.POINTER(_Handle), _Size, ctypes.POINTER(_AllocationProperties), ctypes.c_ulonglong,
    ),
    "cuMemRelease": (_Handle,),
    "cuMemMap": (_Address, _Size, _Size, _Handle, ctypes.c_ulonglong),
    "cuMemUnmap": (_Address, _Size),
    "cuMemSetAccess": (_Address, _Size, ctypes.POINTER(_Access), _Size),
}  # fmt: skip


class _Driver:
    """The CUDA driver, for memory of one device. Torch has set the device up before."""

    def __init__(self, device: torch.device):
        """Raises `ConfigError` where there is no driver."""
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise ConfigError(f"there is no CUDA driver: {error}") from error
        for name, types in _FUNCTIONS.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = types, ctypes.c_int
        self._number = torch.cuda.current_device() if device.index is None else device.index
        self._context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._number)
        location = _Location(_DEVICE, self._number)
        self.properties = _AllocationProperties(type=_PINNED, location=location)
        self._access = _Access(location, _READ_WRITE)
        granularity = _Size()
        self.call(
            "cuMemGetAllocationGranularity",
            ctypes.byref(granularity), ctypes.byref(self.properties), _MINIMUM_GRANULARITY,
        )  # fmt: skip
        self.granularity = granularity.value

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function of the driver. Raises `RuntimeError`, as torch does."""
        status = getattr(self._library, name)(*arguments)
        if status != _SUCCESS:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(status, ctypes.byref(text))
            what = (text.value or b"unknown").decode()
            raise RuntimeError(f"{name} fails: {what} ({status})")

    def enter(self) -> None:
        """Makes the device's context the current one of this thread, unless it has one."""
        current = ctypes.c_void_p()
        self.call("cuCtxGetCurrent", ctypes.byref(current))
        if not current.value:
            self.call("cuCtxSetCurrent", self._context)

    def create(self, nbytes: int) -> _Handle:
        """Returns new physical memory."""
        handle = _Handle()
        self.call("cuMemCreate", ctypes.byref(handle), nbytes, ctypes.byref(self.properties), 0)
        return handle

    def map(self, address: int, nbytes: int, handle: _Handle) -> None:
        """Maps physical memory to addresses, for reading and writing. The range alone keeps the
        memory from then on: `cuMemUnmap` frees it."""
        try:
            self.call("cuMemMap", address, nbytes, 0, handle, 0)
        finally:
            self.call("cuMemRelease", handle)
        self.call("cuMemSetAccess", address, nbytes, ctypes.byref(self._access), 1)


class _Pointer:
    """Memory that torch takes as a tensor of bytes, which keeps the range alive."""

    def __init__(self, memory: VirtualMemory, address: int, nbytes: int):
        self._memory = memory
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


class VirtualMemory:
    """A range of addresses of a GPU, of which a part at the beginning has physical memory.

    Args:
        nbytes: of the range, at least.
        device: the GPU.

    Attributes:
        nbytes: of the range, which is a multiple of the driver's granularity.
        mapped_bytes: how many of them have memory.
    """

    def __init__(self, nbytes: int, device: torch.device):
        """Raises `ConfigError` where the driver has no virtual memory management."""
        try:
            self._driver = driver = _Driver(device)
            driver.enter()
            unit = driver.granularity
            self.nbytes = -(-max(1, nbytes) // unit) * unit
            address = _Address()
            driver.call("cuMemAddressReserve", ctypes.byref(address), self.nbytes, 0, 0, 0)
        except (RuntimeError, AttributeError) as error:
            raise ConfigError(
                f"model.sleep_mode: the GPU's driver has no virtual memory management ({error})"
            ) from error
        self._device, self._address = device, address.value
        self._sizes: list[int] = []  # of the chunks that are mapped
        weakref.finalize(
            self, _free, driver, self._address, self.nbytes, self._sizes
        ).atexit = False

    @property
    def mapped_bytes(self) -> int:
        """See above."""
        return sum(self._sizes)

    def map(self, nbytes: int | None = None) -> None:
        """Gives the first `nbytes` of the range, by default all, memory, where they have none.
        What it holds is undefined. Raises `RuntimeError` where memory is too short: what was taken
        stays mapped."""
        self._driver.enter()
        wanted = self.nbytes if nbytes is None else nbytes
        while (mapped := self.mapped_bytes) < wanted:
            size = min(CHUNK_BYTES, self.nbytes - mapped)
            self._driver.map(self._address + mapped, size, self._driver.create(size))
            self._sizes.append(size)

    def unmap(self) -> None:
        """Gives all memory back, once the GPU has done what it was given to do."""
        torch.cuda.synchronize(self._device)
        self._driver.enter()
        _unmap(self._driver, self._address, self._sizes)

    def tensor(self) -> torch.Tensor:
        """Returns the whole range as uint8 [nbytes]. What is mapped of it may be read and
        written."""
        if not self.mapped_bytes:
            raise ValueError("torch asks the driver about the first byte")
        return torch.as_tensor(_Pointer(self, self._address, self.nbytes), device=self._device)


def _unmap(driver: _Driver, address: int, sizes: list[int]) -> None:
    while sizes:
        size = sizes.pop()
        driver.call("cuMemUnmap", address + sum(sizes), size)


def _free(driver: _Driver, address: int, nbytes: int, sizes: list[int]) -> None:
    """Frees a range that nothing refers to any more."""
    driver.enter()
    torch.cuda.synchronize()
    _unmap(driver, address, sizes)
    driver.call("cuMemAddressFree", address, nbytes)
