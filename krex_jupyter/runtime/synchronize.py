"""Finishing the owner's own GPU work at a region's borders, whatever framework submitted it.

Only where libcuda is mapped in the process and a primary context of a device is active: nothing is loaded and no
context is created here. The call itself runs on a standing helper thread and is waited for in short slices, so
that Ctrl-C works while the device is busy (called plainly, it came 2.7 s late). Contexts other than the primary
ones are not known here, and the evidence says so.
"""

from __future__ import annotations

import ctypes
import os
import queue
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass

from krex_jupyter.errors import KrexError

_SLICE_S = 0.05
_UUID_BYTES = 16


@dataclass(frozen=True, slots=True)
class Synchronised:
    """What `synchronise` did. ``done`` is None where there was no context to synchronise."""

    done: bool | None
    error: str = ""


class _Uuid(ctypes.Structure):
    _fields_ = (("octets", ctypes.c_ubyte * _UUID_BYTES),)


class _Helper:
    """A thread for driver calls that may block."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], str], threading.Event, list[str]]] = (
            queue.SimpleQueue()
        )
        threading.Thread(target=self._serve, name="krex-synchronize", daemon=True).start()

    def run(self, work: Callable[[], str]) -> str:
        """The result of ``work``, waited for interruptibly."""
        done = threading.Event()
        result: list[str] = []
        self._work.put((work, done, result))
        while not done.wait(_SLICE_S):
            pass
        return result[0]

    def _serve(self) -> None:
        while True:
            work, done, result = self._work.get()
            try:
                result.append(work())
            finally:
                done.set()


_helper: _Helper | None = None
_helper_pid = 0


def synchronise(uuids: tuple[str, ...]) -> Synchronised:
    """Wait until this process's submitted work on the devices is done; interruptible, else unbounded.

    Nothing is looked at where ``uuids`` is empty: a region on the cpu alone has no work to finish. Work that a
    user's kernel never finishes is ended by Ctrl-C or by the region's lease.
    """
    if not uuids:
        return Synchronised(None)
    library = mapped_libcuda()
    if library is None:
        return Synchronised(None)
    contexts = _active_primary_contexts(library, uuids)
    if not contexts:
        return Synchronised(None)

    def work() -> str:
        for device, context in contexts:
            code = library.cuCtxSetCurrent(context) or library.cuCtxSynchronize()
            library.cuCtxSetCurrent(None)
            library.cuDevicePrimaryCtxRelease_v2(device)
            if code:
                return f"CUDA error {code}"
        return ""

    global _helper, _helper_pid
    if _helper is None or _helper_pid != os.getpid():
        _helper, _helper_pid = _Helper(), os.getpid()
    error = _helper.run(work)
    return Synchronised(not error, error)


def refuse_inside_capture() -> None:
    """Raise `KrexError` where the current stream of a loaded framework is capturing a graph.

    Synchronising would break the capture, so a region cannot begin there.
    """
    torch = sys.modules.get("torch")
    capturing = False
    if torch is not None and mapped_libcuda() is not None:
        is_capturing = getattr(getattr(torch, "cuda", None), "is_current_stream_capturing", None)
        capturing = bool(is_capturing is not None and torch.cuda.is_initialized() and is_capturing())
    cupy = sys.modules.get("cupy")
    if cupy is not None and not capturing and mapped_libcuda() is not None:
        get_stream = getattr(getattr(cupy, "cuda", None), "get_current_stream", None)
        capturing = bool(get_stream is not None and get_stream().is_capturing())
    if capturing:
        raise KrexError(
            "The current stream is capturing a CUDA graph; a region would break the capture. "
            "Enter the region first, then capture and launch inside it."
        )


def mapped_libcuda() -> ctypes.CDLL | None:
    """libcuda, if something in this process has loaded it already."""
    global _library
    if _library is None and hasattr(os, "RTLD_NOLOAD"):
        try:
            _library = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        except OSError:
            return None
    return _library


_library: ctypes.CDLL | None = None


def _active_primary_contexts(
    library: ctypes.CDLL, uuids: tuple[str, ...]
) -> list[tuple[int, ctypes.c_void_p]]:
    """(device, retained primary context) of each of the devices that has an active one."""
    count = ctypes.c_int()
    if library.cuDeviceGetCount(ctypes.byref(count)):
        return []
    found: list[tuple[int, ctypes.c_void_p]] = []
    for ordinal in range(count.value):
        device = ctypes.c_int()
        uuid = _Uuid()
        flags, active = ctypes.c_uint(), ctypes.c_int()
        if library.cuDeviceGet(ctypes.byref(device), ordinal) or library.cuDeviceGetUuid_v2(
            ctypes.byref(uuid), device
        ):
            continue
        # With one visible device it must be the region's; a MIG slice has a uuid that is not its parent's.
        if count.value > 1 and _text(bytes(uuid.octets)) not in uuids:
            continue
        if (
            library.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
            or not active.value
        ):
            continue
        context = ctypes.c_void_p()
        if library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0:
            found.append((device.value, context))
    return found


def _text(octets: bytes) -> str:
    digits = octets.hex()
    return f"GPU-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"
