"""Exclusive regions for trustworthy GPU timings on a shared machine.

``with krex.exclusive():`` marks the timed part of a program; at its door other processes' GPU work is drained
and held back, and everything else runs at once. This module holds the public names and the entry points that
Jupyter and IPython look for. Importing it loads no framework, no driver library and no server: names are
resolved when they are first used.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from .errors import (
        CoordinatorUnavailable,
        DeviceNotFound,
        KrexError,
        NotExclusive,
        RegionRevoked,
        UnsupportedPlatform,
        WaitTimeout,
    )
    from .runtime.compare import compare
    from .runtime.measure import measure
    from .runtime.queries import devices, history, report, status
    from .runtime.region import Region, exclusive
    from .runtime.results import Comparison, Measurement
    from .widgets import Monitor

__version__ = "0.1.0.dev0"

_WHERE = {
    "exclusive": "runtime.region",
    "Region": "runtime.region",
    "measure": "runtime.measure",
    "compare": "runtime.compare",
    "Measurement": "runtime.results",
    "Comparison": "runtime.results",
    "devices": "runtime.queries",
    "status": "runtime.queries",
    "history": "runtime.queries",
    "report": "runtime.queries",
    "Monitor": "widgets",
    "KrexError": "errors",
    "WaitTimeout": "errors",
    "RegionRevoked": "errors",
    "NotExclusive": "errors",
    "CoordinatorUnavailable": "errors",
    "DeviceNotFound": "errors",
    "UnsupportedPlatform": "errors",
}

__all__ = [
    "Comparison",
    "CoordinatorUnavailable",
    "DeviceNotFound",
    "KrexError",
    "Measurement",
    "Monitor",
    "NotExclusive",
    "Region",
    "RegionRevoked",
    "UnsupportedPlatform",
    "WaitTimeout",
    "compare",
    "devices",
    "exclusive",
    "history",
    "measure",
    "report",
    "status",
]


def __getattr__(name: str) -> Any:
    try:
        module = _WHERE[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    return getattr(import_module(f"{__name__}.{module}"), name)


class _Package(ModuleType):
    """This package, where ``devices`` always means the function.

    The import system binds a sub-package to its name here as soon as anybody imports it, and would put the
    sub-package `krex_jupyter.devices` in place of the public ``krex.devices()``. ``from krex_jupyter.devices
    import ...`` does not look here.
    """

    @property
    def devices(self) -> Any:
        return __getattr__("devices")

    @devices.setter
    def devices(self, _subpackage: ModuleType) -> None:
        pass


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register the magics and tell the coordinator of this process (``%load_ext krex_jupyter``)."""
    from .magics import load

    load(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Take the magics away again; this process leaves the coordinator."""
    from .magics import unload

    unload(shell)


def _jupyter_server_extension_points() -> list[dict[str, Any]]:
    from .server_ext.extension import KrexExtension

    return [{"module": "krex_jupyter.server_ext.extension", "app": KrexExtension}]


def _jupyter_labextension_paths() -> list[dict[str, str]]:
    return [{"src": "labextension", "dest": "krex-jupyter"}]
