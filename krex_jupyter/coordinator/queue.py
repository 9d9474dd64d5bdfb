"""Who may start a region now: a pure state machine over tickets, without a clock and without I/O.

Every region needs *resources*: each of its devices, and `FREEZE` where it freezes processes, because freezing
regions run one at a time per host. A waiting ticket starts when all its resources are free and no ticket ahead
of it wants any of them, so a region on several devices gets all or none and cannot be starved by small ones.

Two bounds keep work outside regions going. In every *burst* of regions that gate somebody (`handoff_regions` of
them, or `handoff_s` seconds, on one resource) there is rest of `gap_s` together; regions that leave that much
between them anyway never wait for it. And while processes are frozen, a
bucket drains: over time at most `duty_cap` of it may be frozen time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

FREEZE = "freeze"
"""The host's freeze lease, as a resource beside the device uuids."""

_DUTY_BURST_S = 2.0
"""Frozen seconds on end after which the duty cap starts to bite."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The administrator's bounds (`ENFORCEMENT.md`, Bounds)."""

    handoff_regions: int = 8
    handoff_s: float = 2.0
    gap_s: float = 0.05
    duty_cap: float = 0.9
    """Largest share of time that siblings may stand frozen; 1 switches the cap off."""

    def __post_init__(self) -> None:
        if self.handoff_regions < 1:
            raise ValueError(f"handoff_regions must be 1 or more, not {self.handoff_regions}")
        for name, bound_s in (("handoff_s", self.handoff_s), ("gap_s", self.gap_s)):
            if not 0 <= bound_s < float("inf"):
                raise ValueError(f"{name} must be a number of seconds, 0 or more, not {bound_s}")
        if not 0 < self.duty_cap <= 1:
            raise ValueError(f"duty_cap must be above 0 and at most 1 (no cap), not {self.duty_cap}")


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request for a region. ``participant`` is whatever identifies the asking process."""

    region_id: str
    participant: str
    devices: tuple[str, ...]
    freezes: bool
    submitted_s: float
    deadline_s: float

    @property
    def resources(self) -> tuple[str, ...]:
        """What it needs for itself."""
        return (*self.devices, FREEZE) if self.freezes else self.devices


@dataclass(slots=True)
class _Resource:
    """Use of one device, or of the freeze lease."""

    holder: str = ""
    last_participant: str = ""
    started_s: float = float("-inf")
    """When the present holder started. From then on siblings do not rest: at a hand-off they stay gated from one
    region to the next, and else they are being gated."""
    gated: bool = False
    """The present holder gates somebody."""
    burst_started_s: float = float("-inf")
    burst_regions: int = 0
    rested_s: float = 0.0
    """Time in this burst in which nobody was gated."""
    gated_until_s: float = float("-inf")
    """When the last region that gated somebody ended."""

    def rest_until_s(self, limits: Limits) -> float:
        """Before this no region that may gate somebody starts here."""
        exhausted = (
            self.burst_regions >= limits.handoff_regions
            or self.gated_until_s - self.burst_started_s >= limits.handoff_s
        )
        if not self.burst_regions or not exhausted:
            return float("-inf")
        return self.gated_until_s + limits.gap_s - self.rested_s


@dataclass(slots=True)
class _Duty:
    """The bucket behind the duty cap: drains while frozen, fills while not; empty means rest."""

    cap: float
    level: float
    at_s: float = float("-inf")
    frozen: bool = False
    begun: tuple[float, float] = (float("-inf"), 0.0)
    """When the present freezing region started, and the level then."""

    def begin(self) -> None:
        """A region that may freeze starts now (as of the last `advance`)."""
        self.begun = (self.at_s, self.level)

    def froze_since_begin(self) -> None:
        """It did freeze, so what `advance` took for rest since its start was none."""
        self.at_s, self.level = self.begun

    def advance(self, now_s: float) -> None:
        """Account for the time since the last call."""
        if now_s > self.at_s > float("-inf"):
            elapsed_s = now_s - self.at_s
            change = -(1 - self.cap) * elapsed_s if self.frozen else self.cap * elapsed_s
            self.level = min(self.level + change, self.full)
        self.at_s = max(now_s, self.at_s)

    @property
    def full(self) -> float:
        return (1 - self.cap) * _DUTY_BURST_S

    def rest_until_s(self) -> float:
        """When it is above empty again, if nobody is frozen meanwhile."""
        if self.level > 0 or self.cap >= 1:
            return float("-inf")
        # A little above empty, so that the caller's clock need not hit the zero exactly.
        return self.at_s + (-self.level + 1e-4) / self.cap


@dataclass
class Arbiter:
    """Waiting and held tickets of one host. All times are one monotonic clock's, passed in."""

    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        self.epoch = 0
        self.waiting: dict[str, Ticket] = {}
        self.held: dict[str, Ticket] = {}
        self._overtaken: set[str] = set()
        """Waiting tickets that have let a later one go first: once is enough."""
        self._resources: dict[str, _Resource] = {}
        self._duty = _Duty(cap=self.limits.duty_cap, level=0.0)
        self._duty.level = self._duty.full

    def submit(self, ticket: Ticket) -> None:
        """Put ``ticket`` at the end of the queue."""
        if ticket.region_id in self.waiting or ticket.region_id in self.held:
            raise ValueError(f"region {ticket.region_id} is known already")
        if not ticket.devices or len(set(ticket.devices)) != len(ticket.devices):
            raise ValueError("a ticket names at least one device, and none twice")
        self.waiting[ticket.region_id] = ticket

    def withdraw(self, region_id: str) -> Ticket | None:
        """Take a waiting ticket out of the queue; None where it is not waiting."""
        self._overtaken.discard(region_id)
        return self.waiting.pop(region_id, None)

    def start_next(self, now_s: float, not_now: Collection[str] = ()) -> Ticket | None:
        """Start the first ticket that may start at ``now_s`` and return it; None where none may.

        ``not_now`` names participants that are passed over: another held region gates them.
        """
        for ticket, startable_s in self._startable(now_s, not_now):
            if startable_s <= now_s:
                self._note_overtaken(ticket, not_now)
                self.withdraw(ticket.region_id)
                self.held[ticket.region_id] = ticket
                self.epoch += 1
                for name in ticket.resources:
                    resource = self._resource(name)
                    resource.holder = ticket.region_id
                    resource.last_participant = ticket.participant
                    resource.started_s = now_s
                    resource.gated = False
                if ticket.freezes:
                    self._duty.begin()
                return ticket
        return None

    def note_gated(self, region_id: str, now_s: float, *, frozen: bool) -> None:
        """A held region gates somebody from now on, and, if ``frozen``, has frozen somebody."""
        ticket = self.held[region_id]
        first = not self._resource(ticket.resources[0]).gated
        for name in ticket.resources:
            resource = self._resource(name)
            if resource.gated:
                continue
            start_s = resource.started_s
            rested_s = resource.rested_s + (start_s - resource.gated_until_s)
            # The second is the same sum as in `rest_until_s`: a difference may round to less than the gap kept.
            if rested_s >= self.limits.gap_s or start_s >= resource.rest_until_s(self.limits) > float("-inf"):
                resource.burst_started_s = now_s
                resource.burst_regions = 0
                rested_s = 0.0
            resource.rested_s = rested_s
            resource.gated = True
            resource.burst_regions += 1
        if frozen and ticket.freezes:
            if first:
                self._duty.froze_since_begin()
            else:
                self._duty.advance(now_s)
            self._duty.frozen = True

    def finish(self, region_id: str, now_s: float) -> Ticket | None:
        """A held region is over; None where it was not held."""
        ticket = self.held.pop(region_id, None)
        if ticket is None:
            return None
        for name in ticket.resources:
            resource = self._resource(name)
            resource.holder = ""
            if resource.gated:
                resource.gated_until_s = now_s
            resource.gated = False
        if ticket.freezes:
            self._duty.advance(now_s)
            self._duty.frozen = False
        return ticket

    def expired(self, now_s: float) -> list[Ticket]:
        """Waiting tickets whose time-out has passed, taken out of the queue."""
        late = [ticket for ticket in self.waiting.values() if ticket.deadline_s <= now_s]
        for ticket in late:
            self.withdraw(ticket.region_id)
        return late

    def wake_s(self, now_s: float, not_now: Collection[str] = ()) -> float | None:
        """When to ask again though nothing else happened: a time-out passes or a rest ends. None: never.

        ``not_now`` as for `start_next`: who is passed over there keeps nobody waiting here either.
        """
        times = [ticket.deadline_s for ticket in self.waiting.values()]
        times += [startable_s for _, startable_s in self._startable(now_s, not_now) if startable_s > now_s]
        return min(times, default=None)

    def holder(self, resource: str) -> Ticket | None:
        """The ticket that holds a device or the freeze lease."""
        return self.held.get(self._resource(resource).holder)

    def order(self) -> list[Ticket]:
        """Waiting tickets in the order in which they will be considered.

        First come, first served; but a participant that was the last to hold one of the devices goes behind
        the others, so that a tight loop of regions cannot crowd out everybody else. It does so once per ticket:
        whoever is the only one to use a device stays its last participant for good, and would otherwise never
        get it together with something that others keep asking for (another device, the freeze lease).
        """
        return sorted(self.waiting.values(), key=self._goes_behind)

    def _goes_behind(self, ticket: Ticket) -> bool:
        return ticket.region_id not in self._overtaken and any(
            self._resource(name).last_participant == ticket.participant for name in ticket.devices
        )

    def _note_overtaken(self, starting: Ticket, not_now: Collection[str]) -> None:
        """Remember which earlier tickets let ``starting``, which wants something of theirs, go first."""
        wanted = set(starting.resources)
        for ticket in self.waiting.values():
            if ticket is starting:
                return
            if ticket.participant not in not_now and not wanted.isdisjoint(ticket.resources):
                self._overtaken.add(ticket.region_id)

    def positions(self) -> dict[str, int]:
        """How many tickets must start before each one, itself counted: 1 is next for all it needs."""
        # As bits, one per ticket: those ahead of the next one on a resource, and those ahead of them elsewhere.
        ahead: dict[str, int] = {}
        found: dict[str, int] = {}
        for number, ticket in enumerate(self.order()):
            before = 0
            for name in ticket.resources:
                before |= ahead.get(name, 0)
            found[ticket.region_id] = 1 + before.bit_count()
            ahead.update(dict.fromkeys(ticket.resources, before | 1 << number))
        return found

    def _startable(self, now_s: float, not_now: Collection[str] = ()) -> Iterator[tuple[Ticket, float]]:
        """Tickets that nobody blocks, and when their resources have rested; infinity is never yielded."""
        self._duty.advance(now_s)
        claimed: set[str] = set()
        for ticket in self.order():
            if ticket.participant in not_now:
                continue
            resources = ticket.resources
            free = not any(self._resource(name).holder or name in claimed for name in resources)
            claimed.update(resources)
            if free:
                rests = [self._resource(name).rest_until_s(self.limits) for name in resources]
                if ticket.freezes:
                    rests.append(self._duty.rest_until_s())
                yield ticket, max(rests)

    def _resource(self, name: str) -> _Resource:
        return self._resources.setdefault(name, _Resource())
