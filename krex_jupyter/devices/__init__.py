"""What a device is to KREX, and which ones this host has.

A vendor is one class with the methods of `DeviceBackend`; nothing here gates anybody (`enforcement/`), and
nothing here creates a GPU context. A reading that fails is None, never zero.
"""

from __future__ import annotations

from typing import Protocol

from krex_jupyter.protocol import DeviceInfo, Vendor


class DeviceBackend(Protocol):
    """One vendor's devices on this host. Methods may take milliseconds: never call them in a grant's path."""

    vendor: Vendor

    def devices(self) -> list[DeviceInfo]:
        """The devices, in the driver's order; empty where there are none. Never raises."""
        ...

    def processes(self, uuid: str) -> dict[int, int | None] | None:
        """Pids (of this pid namespace, as far as the driver knows it) with a context on the device, and the
        device memory of each in bytes (None: unknown). None where the list could not be read."""
        ...
