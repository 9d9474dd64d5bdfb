"""What a region's evidence makes of its numbers: a pure function, with its thresholds.

`clean` is a claim, so it needs evidence: whatever could not be read makes the verdict `unknown`. Every code is
stable and comes with a sentence that says what to do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from krex_jupyter.protocol import Evidence, Reason, SiblingReport, Vendor, Verdict


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Bounds beyond which evidence becomes a reason (`MEASUREMENT.md`, Verdicts)."""

    run_queue_share: float = 0.005
    """Run-queue delay of the measuring thread as a share of the region. An intruder at 2% duty reads 2.2%; quiet
    regions read above 0.1% in up to 5.5% of cases and above 1% in up to 1.7%."""
    run_queue_floor_s: float = 20e-6
    """Below this the delay is a scheduler tick's noise, whatever its share of a very short region."""
    observed_cpu_share: float = 0.01
    """CPU time of an observed sibling as a share of the region, on the `cpu` device."""
    elsewhere_share: float = 0.10
    """CPU time of everything else, in cores, on the `cpu` device."""
    elsewhere_from_s: float = 0.2
    """`/proc/stat` counts ticks of 10 ms: over a shorter region it says nothing."""


@dataclass(frozen=True, slots=True)
class Facts:
    """A region as the verdict sees it."""

    vendor: Vendor
    held_s: float
    siblings: tuple[SiblingReport, ...]
    evidence: Evidence
    late: tuple[SiblingReport, ...] = ()
    """Those of the siblings that appeared during the region."""
    gated: bool = False
    """The guardian acted, so its audit is due."""
    revoked: tuple[str, str] | None = None
    """(code, detail) where exclusivity ended early."""
    pinned: bool = False
    devices: tuple[str, ...] = ()
    """UUIDs of its GPUs, whose process lists are due."""


Say: TypeAlias = Callable[[Verdict, str, str], None]

_SEVERITY: dict[Verdict, int] = {"clean": 0, "suspect": 1, "unknown": 2, "contended": 3, "revoked": 4}


def judge(facts: Facts, thresholds: Thresholds | None = None) -> tuple[Verdict, tuple[Reason, ...]]:
    """The verdict and its reasons; the worst reason decides."""
    bounds = thresholds or Thresholds()
    found: list[tuple[Verdict, Reason]] = []

    def say(verdict: Verdict, code: str, detail: str) -> None:
        found.append((verdict, Reason(code=code, detail=detail)))

    if facts.revoked is not None:
        code, detail = facts.revoked
        advice = " Measure less in one region, or raise max_hold." if code == "max_hold" else " Run it again."
        say("revoked", "revoked", f"Exclusivity ended early ({code}): {detail}.{advice}")
    _judge_owner(facts, bounds, say)
    _judge_siblings(facts, bounds, say)
    _judge_device(facts, say)
    worst: Verdict = max((verdict for verdict, _ in found), key=_SEVERITY.__getitem__, default="clean")
    return worst, tuple(reason for _, reason in sorted(found, key=lambda pair: -_SEVERITY[pair[0]]))


def _judge_owner(facts: Facts, bounds: Thresholds, say: Say) -> None:
    owner = facts.evidence.owner
    wall_s = 0.0 if owner is None or owner.wall_s is None else owner.wall_s
    if owner is None or owner.run_queue_delay_s is None or wall_s <= 0:
        if facts.revoked is None:
            say("unknown", "evidence_missing", "The owner's run-queue delay could not be read. Run it again.")
    else:
        share = owner.run_queue_delay_s / wall_s
        if share > bounds.run_queue_share and owner.run_queue_delay_s > bounds.run_queue_floor_s:
            say(
                "suspect",
                "cpu_delayed",
                f"The measuring thread waited for a CPU for {share:.1%} of the region "
                f"(allowed: {bounds.run_queue_share:.1%}). Run it again; if it stays, something that KREX does not "
                f"gate uses the CPUs.",
            )
    if owner is None:
        return
    if facts.vendor == "cpu" and wall_s >= bounds.elsewhere_from_s:
        if owner.other_cpu_s is None:
            if facts.revoked is None:
                say("unknown", "evidence_missing", "The host's CPU use could not be read. Run it again.")
        elif (cores := owner.other_cpu_s / wall_s) > bounds.elsewhere_share:
            say(
                "suspect",
                "cpu_load_elsewhere",
                f"Other processes used {cores:.2f} cores meanwhile (allowed: {bounds.elsewhere_share:.2f}); they "
                f"share caches and memory with the measurement. Let them join, or run it when they are done.",
            )
    if owner.synchronised is False:
        say(
            "suspect",
            "not_synchronised",
            f"The device could not be synchronised at the region's border ({owner.sync_error}); work may have "
            f"crossed it. Look for an earlier error of a kernel.",
        )
    if owner.interrupted:
        say("suspect", "interrupted", "The region was interrupted. Run it again.")
    if owner.pin_error and facts.pinned:
        say(
            "suspect",
            "not_pinned",
            f"The measuring thread was not pinned to the reserved cores: {owner.pin_error}. Leave its CPU mask to "
            f"KREX, or use cpu='freeze'.",
        )
    if owner.thread_pool_created and facts.pinned:
        say(
            "suspect",
            "thread_pool_created",
            "Threads were born while the measuring thread was pinned. Create thread pools before the region.",
        )


def _judge_siblings(facts: Facts, bounds: Thresholds, say: Say) -> None:
    labels = {sibling.pid: sibling.label or f"pid {sibling.pid}" for sibling in facts.siblings}
    for sibling in facts.late:
        say(
            "suspect",
            "joined_late",
            f"{labels[sibling.pid]} appeared during the region and ran until it was gated. Run it again.",
        )
    audit = facts.evidence.siblings
    if audit is None:
        if facts.gated and facts.revoked is None:
            say("unknown", "evidence_missing", "The siblings' audit is missing. Run it again.")
        return
    for pid, used_s in audit.ran:
        say(
            "contended",
            "sibling_ran",
            f"{labels.get(pid, f'pid {pid}')} should have stood still and used {used_s * 1e3:.2f} ms of CPU time. "
            f"Run it again.",
        )
    for pid in audit.unlocked:
        say(
            "contended",
            "sibling_ran",
            f"{labels.get(pid, f'pid {pid}')} was unlocked by somebody. Run it again.",
        )
    for pid in audit.unreadable:
        say(
            "unknown",
            "evidence_missing",
            f"CPU time of {labels.get(pid, f'pid {pid}')} could not be read. Run it again.",
        )
    for pid in audit.released_for_signal:
        say(
            "suspect",
            "thawed_for_signal",
            f"{labels.get(pid, f'pid {pid}')} was let go during the region to receive a signal. Run it again.",
        )
    if facts.vendor == "cpu" and facts.held_s > 0:
        for pid, used_s in audit.observed_cpu_s.items():
            if used_s > bounds.observed_cpu_share * facts.held_s:
                say(
                    "contended",
                    "sibling_ran",
                    f"{labels.get(pid, f'pid {pid}')} was only observed and used the CPU for "
                    f"{used_s / facts.held_s:.0%} of the region. Run it again, or let it join.",
                )


def _judge_device(facts: Facts, say: Say) -> None:
    if facts.revoked is None:
        for uuid in facts.devices:
            if uuid not in facts.evidence.device:
                say(
                    "unknown",
                    "evidence_missing",
                    f"The process list of {uuid} was not read in time. Run it again.",
                )
    if facts.vendor == "cpu":
        return
    # Without a lock nobody saw the end of what a sibling had submitted; one without a context submitted nothing.
    undrained = {
        sibling.pid: (
            f"{sibling.label or f'pid {sibling.pid}'} has a context on the device and "
            + ("was frozen without being drained" if sibling.frozen else "was only observed")
            + (f": {sibling.error}" if sibling.error else "")
        )
        for sibling in facts.siblings
        if sibling.gate in ("freeze", "observe")
    }
    for device in facts.evidence.device.values():
        if device.processes_after is None or device.processes_before is None:
            say(
                "unknown",
                "evidence_missing",
                f"The device's process list could not be read ({device.error or 'no reason given'}). "
                f"See: krex devices",
            )
            continue
        with_context = {*device.processes_before, *device.processes_after}
        for pid in sorted(undrained.keys() & with_context):
            say(
                "suspect", "not_drained", f"{undrained[pid]}. Its GPU work may have overlapped. Run it again."
            )
        new = sorted(set(device.ungated) - set(device.processes_before))
        old = sorted(set(device.ungated) & set(device.processes_before) - undrained.keys())
        if new:
            say(
                "contended",
                "new_context",
                f"Processes {', '.join(map(str, new))} created a GPU context during the region and were not gated. "
                f"Let them join KREX, then run it again.",
            )
        if old:
            say(
                "suspect",
                "foreign_gpu_work",
                f"Processes {', '.join(map(str, old))} have a context on the device and are only observed. "
                f"Let them join KREX, or end them.",
            )
