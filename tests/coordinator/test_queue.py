"""The queue: a state machine against an independent model, then one plain example per rule."""

from __future__ import annotations

import copy
from collections import defaultdict
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from krex_jupyter.coordinator.queue import FREEZE, Arbiter, Limits, Ticket
from krex_jupyter.coordinator.settings import Settings

DEVICES = ("GPU-a", "GPU-b", "GPU-c")
PARTICIPANTS = ("ada", "ben", "cleo", "dan")
ROUNDING_S = 1e-9
DUTY_BURST_S = 2.0
DUTY_MARGIN_S = 1e-3
"""The wake for the duty cap is a little late, so that it need not hit an exact moment."""
FOREVER_S = 1e9


def ticket(
    region_id: str,
    participant: str = "ada",
    *devices: str,
    freezes: bool = False,
    submitted_s: float = 0.0,
    timeout_s: float = FOREVER_S,
) -> Ticket:
    return Ticket(
        region_id=region_id,
        participant=participant,
        devices=devices or ("GPU-a",),
        freezes=freezes,
        submitted_s=submitted_s,
        deadline_s=submitted_s + timeout_s,
    )


def started(arbiter: Arbiter, now_s: float, not_now: tuple[str, ...] = ()) -> list[str]:
    """Everything that starts at one moment."""
    found = []
    while (next_one := arbiter.start_next(now_s, not_now)) is not None:
        found.append(next_one.region_id)
    return found


def hold(arbiter: Arbiter, next_one: Ticket, start_s: float, end_s: float, *, frozen: bool = False) -> None:
    """One whole region that gates somebody."""
    arbiter.submit(next_one)
    assert started(arbiter, start_s) == [next_one.region_id]
    arbiter.note_gated(next_one.region_id, start_s, frozen=frozen)
    arbiter.finish(next_one.region_id, end_s)


@dataclass
class Use:
    """What the model remembers of one resource: who held it last, and when it was gated."""

    last_participant: str = ""
    started_s: float = 0.0
    gated: list[list[float]] = field(default_factory=list)
    """Per region that gated somebody: its start, when it gated, its end. Rest is what lies between an end and a
    start."""

    def rests_until_s(self, limits: Limits) -> float:
        """By the rule's own words: a burst ends once there was a gap's worth of rest in it, all together."""
        burst: list[list[float]] = []
        rested_s = 0.0
        for interval in self.gated:
            rested_s += interval[0] - burst[-1][2] if burst else 0.0
            if rested_s + ROUNDING_S >= limits.gap_s:
                burst, rested_s = [], 0.0
            burst.append(interval)
        if not burst:
            return 0.0
        seconds = burst[-1][2] - burst[0][1]
        exhausted = len(burst) >= limits.handoff_regions or seconds >= limits.handoff_s
        return burst[-1][2] + limits.gap_s - rested_s if exhausted else 0.0


class QueueMachine(RuleBasedStateMachine):
    """Random tickets, time and ends, against a model that shares no code with the queue."""

    @initialize(
        limits=st.sampled_from(
            [
                Limits(),
                Limits(handoff_regions=2, handoff_s=0.3, gap_s=0.1, duty_cap=0.5),
                Limits(handoff_regions=3, duty_cap=1.0),
                Limits(handoff_regions=1, gap_s=0.0, duty_cap=0.2),
            ]
        ),
        now_s=st.sampled_from([0.0, 0.1, 12345.678]),
    )
    def begin(self, limits: Limits, now_s: float) -> None:
        self.limits = limits
        self.arbiter = Arbiter(limits)
        self.began_s = self.now_s = now_s
        self.count = 0
        self.epoch = 0
        self.waiting: list[Ticket] = []
        self.held: dict[str, Ticket] = {}
        self.uses: dict[str, Use] = defaultdict(Use)
        self.overtaken: dict[str, int] = defaultdict(int)
        self.frozen_since_s: dict[str, float] = {}
        self.frozen_s = 0.0
        self.longest_frozen_s = 0.0

    # --- What happens ------------------------------------------------------------------------------------------

    @rule(
        participant=st.sampled_from(PARTICIPANTS),
        devices=st.lists(st.sampled_from(DEVICES), min_size=1, max_size=3, unique=True),
        freezes=st.booleans(),
        timeout_s=st.sampled_from([0.0, 0.05, 1.0, 600.0]),
    )
    def submit(self, participant: str, devices: list[str], freezes: bool, timeout_s: float) -> None:
        self.count += 1
        new = ticket(
            f"r{self.count}",
            participant,
            *devices,
            freezes=freezes,
            submitted_s=self.now_s,
            timeout_s=timeout_s,
        )
        self.arbiter.submit(new)
        self.waiting.append(new)

    @rule(not_now=st.sets(st.sampled_from(PARTICIPANTS), max_size=2))
    def start_some(self, not_now: set[str]) -> None:
        self.settle(not_now)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), frozen=st.booleans())
    def gate(self, data: st.DataObject, frozen: bool) -> None:
        region_id = data.draw(st.sampled_from(sorted(self.held)))
        self.arbiter.note_gated(region_id, self.now_s, frozen=frozen)
        since_s = self.now_s
        for name in self.held[region_id].resources:
            use = self.uses[name]
            if not use.gated or use.gated[-1][2] < float("inf"):
                use.gated.append([use.started_s, self.now_s, float("inf")])
                since_s = use.started_s
        if frozen and self.held[region_id].freezes:
            self.frozen_since_s.setdefault(region_id, since_s)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        region_id = data.draw(st.sampled_from(sorted(self.held)))
        done = self.held.pop(region_id)
        assert self.arbiter.finish(region_id, self.now_s) == done
        for name in done.resources:
            gated = self.uses[name].gated
            if gated and gated[-1][2] == float("inf"):
                gated[-1][2] = self.now_s
        if region_id in self.frozen_since_s:
            frozen_s = self.now_s - self.frozen_since_s.pop(region_id)
            self.frozen_s += frozen_s
            self.longest_frozen_s = max(self.longest_frozen_s, frozen_s)

    @rule(number=st.integers(1, 60))
    def withdraw(self, number: int) -> None:
        region_id = f"r{number}"
        known = next((one for one in self.waiting if one.region_id == region_id), None)
        assert self.arbiter.withdraw(region_id) == known
        if known is not None:
            self.waiting.remove(known)

    @rule(elapsed_s=st.sampled_from([1e-6, 0.01, 0.04, 0.05, 0.3, 1.0, 2.0, 30.0]))
    def time_passes(self, elapsed_s: float) -> None:
        self.now_s += elapsed_s

    @rule(not_now=st.sets(st.sampled_from(PARTICIPANTS), max_size=1))
    def jump_to_the_next_wake(self, not_now: set[str]) -> None:
        self.settle(not_now)
        wake_s = self.arbiter.wake_s(self.now_s, not_now)
        if wake_s is None:
            blocked = self.blocked_by_a_holder(not_now)
            assert [one for one in self.waiting if one.participant not in not_now] == blocked
            return
        assert wake_s > self.now_s
        for share in (0.1, 0.5, 0.9, 0.999):
            earlier_s = self.now_s + share * (wake_s - self.now_s)
            if not self.now_s < earlier_s < wake_s - DUTY_MARGIN_S:
                continue
            probe = copy.deepcopy(self.arbiter)
            assert probe.start_next(earlier_s, not_now) is None, "it could have been woken earlier"
            assert not probe.expired(earlier_s), "a time-out passed before the wake"
        self.now_s = wake_s
        assert self.settle(not_now) > 0, "woken, and nothing happened"

    # --- What must hold ----------------------------------------------------------------------------------------

    def settle(self, not_now: set[str]) -> int:
        """As the coordinator does: start what may start, let time-outs pass, start what those kept waiting.

        Returns how many tickets started or timed out.
        """
        events = self.start_all(not_now)
        late = self.arbiter.expired(self.now_s)
        assert late == [one for one in self.waiting if one.deadline_s <= self.now_s]
        self.waiting = [one for one in self.waiting if one not in late]
        return events + len(late) + self.start_all(not_now)

    def start_all(self, not_now: set[str]) -> int:
        events = 0
        while True:
            before = {name: use.last_participant for name, use in self.uses.items()}
            found = self.arbiter.start_next(self.now_s, not_now)
            if found is None:
                return events
            events += 1
            self.check_start(found, not_now, before)

    def check_start(self, found: Ticket, not_now: set[str], last: dict[str, str]) -> None:
        note(f"at {self.now_s}: {found} starts")

        def goes_behind(one: Ticket) -> bool:
            return not self.overtaken[one.region_id] and any(
                last.get(name) == one.participant for name in one.devices
            )

        assert found in self.waiting
        assert found.participant not in not_now
        self.epoch += 1
        assert self.arbiter.epoch == self.epoch, "the epoch grows with every grant"
        for other in self.held.values():
            assert set(found.resources).isdisjoint(other.resources), "all its resources were free"
        position = self.waiting.index(found)
        rivals = [
            (at, one)
            for at, one in enumerate(self.waiting)
            if one is not found
            and one.participant not in not_now
            and not set(one.resources).isdisjoint(found.resources)
        ]
        for at, one in rivals:
            if at < position:
                assert goes_behind(one), f"{one} came first and did not just hold"
                assert not goes_behind(found)
                self.overtaken[one.region_id] += 1
                assert self.overtaken[one.region_id] == 1, f"{one} was overtaken twice"
            elif goes_behind(found):
                assert goes_behind(one), f"{one} should have gone before the one that just held"
        for name in found.resources:
            assert self.now_s >= self.uses[name].rests_until_s(self.limits) - ROUNDING_S, (
                f"{name} still rests"
            )
            self.uses[name].last_participant = found.participant
            self.uses[name].started_s = self.now_s
        self.waiting.remove(found)
        self.held[found.region_id] = found

    def blocked_by_a_holder(self, not_now: set[str]) -> list[Ticket]:
        """Waiting tickets that want what is held, or what somebody ahead of them who is blocked wants."""
        taken = {name for one in self.held.values() for name in one.resources}
        blocked = []
        for one in self.arbiter.order():
            if one.participant not in not_now and not taken.isdisjoint(one.resources):
                taken.update(one.resources)
                blocked.append(one)
        return [one for one in self.waiting if one in blocked]

    @invariant()
    def every_resource_has_at_most_one_holder(self) -> None:
        if not hasattr(self, "arbiter"):
            return
        assert self.arbiter.held == self.held
        for name in (*DEVICES, FREEZE):
            holders = [one for one in self.held.values() if name in one.resources]
            assert len(holders) <= 1
            assert self.arbiter.holder(name) == (holders[0] if holders else None)

    @invariant()
    def order_and_positions_name_every_waiting_ticket_once(self) -> None:
        if not hasattr(self, "arbiter"):
            return
        order = self.arbiter.order()
        assert sorted(one.region_id for one in order) == sorted(one.region_id for one in self.waiting)
        positions = self.arbiter.positions()
        assert positions.keys() == {one.region_id for one in order}
        assert not order or positions[order[0].region_id] == 1
        for name in (*DEVICES, FREEZE):
            here = [positions[one.region_id] for one in order if name in one.resources]
            assert here == sorted(set(here)), "each one further back than those before it on the same device"

    @invariant()
    def frozen_time_keeps_to_the_duty_cap(self) -> None:
        if not hasattr(self, "arbiter"):
            return
        running_s = [self.now_s - since_s for since_s in self.frozen_since_s.values()]
        frozen_s = self.frozen_s + sum(running_s)
        longest_s = max([self.longest_frozen_s, *running_s])
        cap = self.limits.duty_cap
        allowed_s = cap * (self.now_s - self.began_s) + (1 - cap) * (DUTY_BURST_S + longest_s)
        assert frozen_s <= allowed_s + 1e-6


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(
    max_examples=120,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


# --- Resources ---------------------------------------------------------------------------------------------------


def test_one_device_is_held_by_one_region_at_a_time() -> None:
    arbiter = Arbiter()
    arbiter.submit(ticket("first", "ada"))
    arbiter.submit(ticket("second", "ben"))
    assert started(arbiter, 0.0) == ["first"]
    assert arbiter.holder("GPU-a") is arbiter.held["first"]
    arbiter.finish("first", 1.0)
    assert arbiter.holder("GPU-a") is None
    assert started(arbiter, 1.0) == ["second"]


def test_regions_on_different_devices_are_held_together() -> None:
    arbiter = Arbiter()
    arbiter.submit(ticket("first", "ada", "GPU-a"))
    arbiter.submit(ticket("second", "ben", "GPU-b"))
    assert started(arbiter, 0.0) == ["first", "second"]


def test_freezing_regions_run_one_at_a_time_per_host() -> None:
    arbiter = Arbiter()
    arbiter.submit(ticket("first", "ada", "GPU-a", freezes=True))
    arbiter.submit(ticket("second", "ben", "GPU-b", freezes=True))
    arbiter.submit(ticket("third", "cleo", "GPU-c"))
    assert started(arbiter, 0.0) == ["first", "third"]
    arbiter.finish("first", 1.0)
    assert started(arbiter, 1.0) == ["second"]


def test_a_region_on_several_devices_gets_all_or_none() -> None:
    arbiter = Arbiter()
    arbiter.submit(ticket("small", "ada", "GPU-b"))
    arbiter.submit(ticket("both", "ben", "GPU-a", "GPU-b"))
    assert started(arbiter, 0.0) == ["small"]
    assert arbiter.holder("GPU-a") is None
    arbiter.finish("small", 1.0)
    assert started(arbiter, 1.0) == ["both"]
    assert arbiter.holder("GPU-a") is arbiter.holder("GPU-b") is arbiter.held["both"]


def test_the_epoch_grows_with_every_grant() -> None:
    arbiter = Arbiter()
    epochs = []
    for number in range(3):
        arbiter.submit(ticket(f"r{number}"))
        started(arbiter, float(number))
        epochs.append(arbiter.epoch)
        arbiter.finish(f"r{number}", number + 0.5)
    assert epochs == [1, 2, 3]


def test_a_region_id_is_used_once() -> None:
    arbiter = Arbiter()
    arbiter.submit(ticket("r"))
    with pytest.raises(ValueError, match="known already"):
        arbiter.submit(ticket("r"))
    started(arbiter, 0.0)
    with pytest.raises(ValueError, match="known already"):
        arbiter.submit(ticket("r"))


@pytest.mark.parametrize("devices", [(), ("GPU-a", "GPU-a")])
def test_a_ticket_names_at_least_one_device_and_none_twice(devices: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="none twice"):
        Arbiter().submit(Ticket("r", "ada", devices, False, 0.0, 1.0))


# --- Whose turn --------------------------------------------------------------------------------------------------


def test_first_come_first_served() -> None:
    arbiter = Arbiter()
    for name in ("ada", "ben", "cleo"):
        arbiter.submit(ticket(name, name))
    for at, name in enumerate(("ada", "ben", "cleo")):
        assert started(arbiter, float(at)) == [name]
        arbiter.finish(name, at + 0.5)


def test_a_participant_that_just_held_goes_behind_the_others() -> None:
    arbiter = Arbiter()
    hold(arbiter, ticket("first", "ada"), 0.0, 1.0)
    arbiter.submit(ticket("again", "ada"))
    arbiter.submit(ticket("other", "ben"))
    assert [one.region_id for one in arbiter.order()] == ["other", "again"]
    assert arbiter.positions() == {"other": 1, "again": 2}
    assert started(arbiter, 1.0) == ["other"]
    arbiter.submit(ticket("late", "cleo"))
    arbiter.finish("other", 2.0)
    assert started(arbiter, 2.0) == ["again"]


def test_small_regions_that_keep_coming_do_not_starve_one_on_several_devices() -> None:
    arbiter = Arbiter()
    arbiter.submit(ticket("small-0", "ada", "GPU-a"))
    started(arbiter, 0.0)
    arbiter.submit(ticket("both", "ben", "GPU-a", "GPU-b"))
    arbiter.submit(ticket("small-1", "cleo", "GPU-a"))
    arbiter.submit(ticket("small-2", "dan", "GPU-b"))
    assert started(arbiter, 0.5) == []
    arbiter.finish("small-0", 1.0)
    assert started(arbiter, 1.0) == ["both"]


@pytest.mark.parametrize("freezes", [False, True])
def test_the_only_user_of_one_device_is_not_starved_of_what_it_shares(freezes: bool) -> None:
    """Nobody else uses GPU-b, so its last participant stays the same for good."""
    arbiter = Arbiter(Limits(duty_cap=1.0))
    devices = ("GPU-b",) if freezes else ("GPU-a", "GPU-b")
    hold(arbiter, ticket("before", "ada", "GPU-b"), 0.0, 0.1)
    arbiter.submit(ticket("small-0", "ben", "GPU-a", freezes=freezes))
    assert started(arbiter, 1.0) == ["small-0"]
    arbiter.submit(ticket("wanted", "ada", *devices, freezes=freezes))
    served = []
    for number in range(1, 5):
        participant = ("ben", "cleo")[number % 2]
        arbiter.submit(ticket(f"small-{number}", participant, "GPU-a", freezes=freezes))
        for region_id in list(arbiter.held):
            arbiter.finish(region_id, float(number))
        served += started(arbiter, number + 0.5)
    assert "wanted" in served[:2]


def test_who_is_gated_by_another_region_is_passed_over_and_keeps_nobody_waiting() -> None:
    arbiter = Arbiter()
    arbiter.submit(ticket("gated", "ada", "GPU-a", "GPU-b"))
    arbiter.submit(ticket("free", "ben", "GPU-a"))
    assert started(arbiter, 0.0, ("ada",)) == ["free"]
    arbiter.finish("free", 1.0)
    assert started(arbiter, 1.0) == ["gated"]


def test_who_is_passed_over_does_not_delay_the_wake_of_others() -> None:
    arbiter = Arbiter(Limits(handoff_regions=1, gap_s=1.0))
    hold(arbiter, ticket("a", "cleo", "GPU-a"), 0.0, 1.0)
    hold(arbiter, ticket("b", "cleo", "GPU-b"), 1.0, 1.8)
    arbiter.submit(ticket("gated", "ada", "GPU-a", "GPU-b"))
    arbiter.submit(ticket("free", "ben", "GPU-a"))
    assert started(arbiter, 1.9, ("ada",)) == []
    assert arbiter.wake_s(1.9) == pytest.approx(2.8)
    assert arbiter.wake_s(1.9, ("ada",)) == pytest.approx(2.0)
    assert started(arbiter, 2.0, ("ada",)) == ["free"]


# --- Hand-off, gap and duty --------------------------------------------------------------------------------------


def test_after_eight_gating_regions_the_device_rests_for_the_gap() -> None:
    arbiter = Arbiter()
    for number in range(8):
        hold(arbiter, ticket(f"r{number}"), number * 0.01, (number + 1) * 0.01)
    arbiter.submit(ticket("ninth", "ben"))
    assert arbiter.start_next(0.08) is None
    assert arbiter.wake_s(0.08) == pytest.approx(0.13)
    assert started(arbiter, 0.1299) == []
    assert started(arbiter, 0.13 + ROUNDING_S) == ["ninth"]


def test_after_two_seconds_of_gating_the_device_rests_for_the_gap() -> None:
    arbiter = Arbiter()
    hold(arbiter, ticket("r0"), 0.0, 1.0)
    hold(arbiter, ticket("r1"), 1.01, 2.0)
    arbiter.submit(ticket("r2", "ben"))
    # One hundredth of a second of it has passed between the two.
    assert started(arbiter, 2.0399) == []
    assert started(arbiter, 2.0401) == ["r2"]


def test_regions_that_leave_the_gap_between_them_together_never_wait_for_it() -> None:
    arbiter = Arbiter()
    for number in range(50):
        start_s = number * 0.025
        hold(arbiter, ticket(f"r{number}"), start_s, start_s + 0.005)


def test_the_time_that_a_hand_off_takes_is_no_rest() -> None:
    """Siblings stay gated until the next region has entered, however long that takes."""
    arbiter = Arbiter(Limits(duty_cap=1.0))
    now_s = 0.0
    for number in range(8):
        arbiter.submit(ticket(f"r{number}"))
        assert started(arbiter, now_s) == [f"r{number}"]
        arbiter.note_gated(f"r{number}", now_s + 0.06, frozen=False)
        now_s += 0.1
        arbiter.finish(f"r{number}", now_s)
    arbiter.submit(ticket("ninth", "ben"))
    assert started(arbiter, now_s + 0.0499) == []
    assert started(arbiter, now_s + 0.0501) == ["ninth"]


def test_the_time_that_a_hand_off_takes_counts_as_frozen() -> None:
    arbiter = Arbiter(Limits(gap_s=0.0, duty_cap=0.5))
    now_s = frozen_s = 0.0
    for number in range(100):
        arbiter.submit(ticket(f"r{number}", freezes=True))
        while arbiter.start_next(now_s) is None:
            wake_s = arbiter.wake_s(now_s)
            assert wake_s is not None
            now_s = wake_s
        arbiter.wake_s(now_s + 0.1)
        arbiter.note_gated(f"r{number}", now_s + 0.1, frozen=True)
        now_s += 0.2
        frozen_s += 0.2
        arbiter.finish(f"r{number}", now_s)
    assert frozen_s <= 0.5 * now_s + 0.5 * (DUTY_BURST_S + 0.2) + 1e-6


def test_regions_that_gate_nobody_need_no_rest() -> None:
    arbiter = Arbiter()
    for number in range(50):
        arbiter.submit(ticket(f"r{number}"))
        assert started(arbiter, 0.1 * number) == [f"r{number}"]
        arbiter.finish(f"r{number}", 0.1 * (number + 1))


def test_a_gap_that_came_by_itself_begins_a_new_burst() -> None:
    arbiter = Arbiter()
    for number in range(20):
        start_s = number * 0.16
        hold(arbiter, ticket(f"r{number}"), start_s, start_s + 0.1)


def test_a_burst_begins_anew_at_the_very_end_of_the_gap() -> None:
    """Jumping to `wake_s` must count as a kept gap, however the sums round."""
    arbiter = Arbiter(Limits(handoff_regions=2, gap_s=0.05))
    now_s, rests = 0.1, 0
    for number in range(200):
        arbiter.submit(ticket(f"r{number}"))
        while arbiter.start_next(now_s) is None:
            wake_s = arbiter.wake_s(now_s)
            assert wake_s is not None
            assert wake_s > now_s
            now_s, rests = wake_s, rests + 1
        arbiter.note_gated(f"r{number}", now_s, frozen=False)
        now_s += 0.013
        arbiter.finish(f"r{number}", now_s)
    assert rests == 99


@pytest.mark.parametrize("cap", [0.5, 0.9])
@given(lengths_s=st.lists(st.floats(0.001, 40.0), min_size=1, max_size=60))
def test_over_a_long_run_frozen_time_stays_below_the_duty_cap(cap: float, lengths_s: list[float]) -> None:
    arbiter = Arbiter(Limits(duty_cap=cap))
    now_s = frozen_s = 0.0
    for number, length_s in enumerate(lengths_s):
        arbiter.submit(ticket(f"r{number}", freezes=True))
        while arbiter.start_next(now_s) is None:
            wake_s = arbiter.wake_s(now_s)
            assert wake_s is not None
            assert wake_s > now_s
            now_s = wake_s
        arbiter.note_gated(f"r{number}", now_s, frozen=True)
        now_s += length_s
        frozen_s += length_s
        arbiter.finish(f"r{number}", now_s)
    assert frozen_s <= cap * now_s + (1 - cap) * (DUTY_BURST_S + max(lengths_s)) + 1e-6


def test_the_duty_cap_counts_only_time_in_which_somebody_is_frozen() -> None:
    arbiter = Arbiter(Limits(gap_s=0.0, duty_cap=0.5))
    for number in range(50):
        hold(arbiter, ticket(f"r{number}", freezes=True), float(number), number + 1.0, frozen=False)


def test_a_duty_cap_of_one_is_no_cap() -> None:
    arbiter = Arbiter(Limits(gap_s=0.0, duty_cap=1.0))
    for number in range(50):
        hold(arbiter, ticket(f"r{number}", freezes=True), float(number), number + 1.0, frozen=True)


@pytest.mark.parametrize(
    "bounds",
    [
        {"duty_cap": 0.0},
        {"duty_cap": 1.1},
        {"handoff_regions": 0},
        {"gap_s": -1.0},
        {"handoff_s": float("nan")},
    ],
)
def test_bounds_that_make_no_sense_are_refused(bounds: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bounds))):
        Limits(**bounds)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=next(iter(bounds))):
        Settings(**bounds)  # type: ignore[arg-type]


# --- Leaving the queue -------------------------------------------------------------------------------------------


def test_a_time_out_takes_the_ticket_out_of_the_queue() -> None:
    arbiter = Arbiter()
    arbiter.submit(ticket("holder", "ada"))
    started(arbiter, 0.0)
    arbiter.submit(ticket("late", "ben", timeout_s=1.0))
    arbiter.submit(ticket("patient", "cleo"))
    assert arbiter.wake_s(0.0) == 1.0
    assert arbiter.expired(0.999) == []
    assert [one.region_id for one in arbiter.expired(1.0)] == ["late"]
    assert arbiter.expired(1.0) == []
    arbiter.finish("holder", 2.0)
    assert started(arbiter, 2.0) == ["patient"]


def test_a_time_out_lets_those_start_whom_it_kept_waiting() -> None:
    arbiter = Arbiter()
    arbiter.submit(ticket("small", "ada", "GPU-b"))
    started(arbiter, 0.0)
    arbiter.submit(ticket("both", "ben", "GPU-a", "GPU-b", timeout_s=1.0))
    arbiter.submit(ticket("next", "cleo", "GPU-a"))
    assert started(arbiter, 1.0) == []
    assert [one.region_id for one in arbiter.expired(1.0)] == ["both"]
    assert started(arbiter, 1.0) == ["next"]


def test_a_held_region_does_not_time_out() -> None:
    arbiter = Arbiter()
    arbiter.submit(ticket("r", timeout_s=1.0))
    started(arbiter, 0.0)
    assert arbiter.expired(100.0) == []
    assert "r" in arbiter.held


def test_who_leaves_the_queue_lets_the_next_one_in() -> None:
    arbiter = Arbiter()
    arbiter.submit(ticket("small", "ada", "GPU-b"))
    started(arbiter, 0.0)
    arbiter.submit(ticket("both", "ben", "GPU-a", "GPU-b"))
    arbiter.submit(ticket("next", "cleo", "GPU-a"))
    assert started(arbiter, 0.1) == []
    withdrawn = arbiter.withdraw("both")
    assert withdrawn is not None
    assert withdrawn.region_id == "both"
    assert started(arbiter, 0.1) == ["next"]


def test_what_is_not_waiting_cannot_be_withdrawn_nor_what_is_not_held_finished() -> None:
    arbiter = Arbiter()
    arbiter.submit(ticket("r"))
    assert arbiter.finish("r", 0.0) is None
    started(arbiter, 0.0)
    assert arbiter.withdraw("r") is None
    assert arbiter.withdraw("unknown") is None
    assert arbiter.finish("r", 1.0) is not None
    assert arbiter.finish("r", 1.0) is None


def test_with_nothing_waiting_there_is_nothing_to_wake_for() -> None:
    arbiter = Arbiter()
    assert arbiter.wake_s(0.0) is None
    arbiter.submit(ticket("r"))
    started(arbiter, 0.0)
    assert arbiter.wake_s(0.0) is None
