"""A real CUDA process for tests, through libcuda alone: does what its standard input says.

``submit SECONDS COUNT`` queues kernels that spin so long and answers ``submitted`` once they are queued,
``synchronise`` waits for them and answers ``done``, ``exit`` ends it. Says ``ready`` when it has its context.
Run by its path: it imports only the standard library.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

# One thread reads the device's own nanosecond timer until the time is over.
SPIN = b"""
.version 6.0
.target sm_50
.address_size 64
.visible .entry spin(.param .u64 nanoseconds)
{
    .reg .u64 %rd<5>;
    .reg .pred %p<2>;
    ld.param.u64 %rd1, [nanoseconds];
    mov.u64 %rd2, %globaltimer;
again:
    mov.u64 %rd3, %globaltimer;
    sub.u64 %rd4, %rd3, %rd2;
    setp.lt.u64 %p1, %rd4, %rd1;
    @%p1 bra again;
    ret;
}
\0"""


class CudaProcess:
    """This process's context and its spinning kernel."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        device, self._context = ctypes.c_int(), ctypes.c_void_p()
        module, self._kernel = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuInit", ctypes.c_uint(0))
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(0))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self._call("cuCtxSetCurrent", self._context)
        self._call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(SPIN))
        self._call("cuModuleGetFunction", ctypes.byref(self._kernel), module, ctypes.c_char_p(b"spin"))
        self.submit(0.0)
        self.synchronise()

    def submit(self, duration_s: float) -> None:
        nanoseconds = ctypes.c_uint64(round(duration_s * 1e9))
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(nanoseconds))
        one, none = ctypes.c_uint(1), ctypes.c_uint(0)
        self._call("cuLaunchKernel", self._kernel, one, one, one, one, one, one, none, None, parameters, None)

    def synchronise(self) -> None:
        self._call("cuCtxSynchronize")

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code != 0:
            raise RuntimeError(f"{name} returned {code}")


def serve(process: Any) -> None:
    """Follow the commands on standard input until it ends."""
    _say("ready")
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "submit":
            for _ in range(int(arguments[1])):
                process.submit(float(arguments[0]))
            _say("submitted")
        elif command == "synchronise":
            process.synchronise()
            _say("done")
        elif command == "profile":
            process.set_profiled(arguments[0] == "on")
            _say("profiled")
        elif command == "exit":
            return


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    serve(CudaProcess())
