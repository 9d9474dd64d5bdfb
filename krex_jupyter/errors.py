"""The exceptions of the public API. Each message says what happened, to whom, and what to do next."""

from __future__ import annotations


class KrexError(RuntimeError):
    """Base of every error that KREX raises on purpose."""


class WaitTimeout(KrexError, TimeoutError):
    """The region's turn did not come within ``timeout``."""


class RegionRevoked(KrexError):
    """Exclusivity ended before the region did. Raised at the region's end, only with ``strict=True``."""


class NotExclusive(KrexError):
    """The region's verdict is not `clean`. Raised at the region's end, only with ``strict=True``."""


class CoordinatorUnavailable(KrexError):
    """No coordinator answers, and none could be started."""


class DeviceNotFound(KrexError, LookupError):
    """The device does not exist here, or this process may not see it."""


class UnsupportedPlatform(KrexError):
    """Exclusive regions need Linux; everything else of the package works here too."""
