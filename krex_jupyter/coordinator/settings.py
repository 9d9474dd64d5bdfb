"""The administrator's settings: every bound the coordinator keeps, with its unit, its default and what 0 means."""

from __future__ import annotations

import msgspec

from krex_jupyter.protocol import Participants

from .queue import Limits
from .verdict import Thresholds


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Read from a TOML file by ``krex serve --config``; the defaults are those of `ENFORCEMENT.md`."""

    timeout_s: float = 600.0
    """How long a region waits for its turn where it names no time-out."""
    max_hold_s: float = 30.0
    """Lease of a region that names none. A region may ask for less or more, up to ``longest_hold_s``."""
    longest_hold_s: float = 3600.0
    """Longest lease that anybody gets."""
    notice_s: float = 5.0
    """A region held longer than this is pointed out to those who wait."""
    confirm_s: float = 1.0
    """An owner that does not take its grant within this is passed over."""
    stuck_s: float = 3.0
    """An owner that uses no CPU for so long while siblings stand frozen may be waiting for one of them: its
    region is revoked. 0 switches that off."""
    idle_exit_s: float = 60.0
    """The coordinator ends this long after its last participant. 0: never."""
    participants: Participants = "gpu"
    """Which registered kernels count as participants before they join: those with a GPU library mapped, all, or
    none."""
    allow_foreign: bool | None = None
    """Whether a region may gate processes that never took part (``foreign="gate"``); None: where the coordinator
    is one user's own, and not where it serves a whole host."""
    handoff_regions: int = 8
    handoff_s: float = 2.0
    gap_s: float = 0.05
    duty_cap: float = 0.9
    run_queue_share: float = 0.005

    def __post_init__(self) -> None:
        # Whoever reads the file learns of a bound that makes no sense at once, not from the first region.
        self.limits()

    def limits(self) -> Limits:
        """For the queue."""
        return Limits(
            handoff_regions=self.handoff_regions,
            handoff_s=self.handoff_s,
            gap_s=self.gap_s,
            duty_cap=self.duty_cap,
        )

    def thresholds(self) -> Thresholds:
        """For the verdict."""
        return Thresholds(run_queue_share=self.run_queue_share)
