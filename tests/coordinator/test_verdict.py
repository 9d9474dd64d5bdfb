"""The verdict: every reason is turned on and off, missing evidence is never clean, the worst reason decides."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from krex_jupyter.coordinator import verdict
from krex_jupyter.coordinator.verdict import Facts, Thresholds, judge
from krex_jupyter.protocol import (
    DeviceEvidence,
    Evidence,
    Gate,
    GuardianAudit,
    OwnerEvidence,
    SiblingReport,
)

GPU = "GPU-d"
WALL_S = 1.0
SEVERITY = ("clean", "suspect", "unknown", "contended", "revoked")
CALM = OwnerEvidence(run_queue_delay_s=0.0, wall_s=WALL_S, other_cpu_s=0.0, synchronised=True)


def sibling(pid: int = 20, gate: Gate = "driver-lock", label: str = "", error: str = "") -> SiblingReport:
    return SiblingReport(pid=pid, gate=gate, label=label, frozen=gate == "freeze", error=error)


def on_gpu(
    owner: OwnerEvidence | None = CALM,
    audit: GuardianAudit | None = GuardianAudit(),  # noqa: B008 (frozen)
    siblings: tuple[SiblingReport, ...] = (sibling(),),
    device: DeviceEvidence | None = DeviceEvidence(processes_before=(20,), processes_after=(20,)),  # noqa: B008
    **also: Any,
) -> Facts:
    devices = {} if device is None else {GPU: device}
    return Facts(
        **{
            "vendor": "nvidia",
            "held_s": WALL_S,
            "siblings": siblings,
            "evidence": Evidence(owner=owner, siblings=audit, device=devices),
            "gated": True,
            "devices": (GPU,),
            **also,
        }
    )


def on_cpu(
    owner: OwnerEvidence | None = CALM,
    audit: GuardianAudit | None = GuardianAudit(),  # noqa: B008 (frozen)
    siblings: tuple[SiblingReport, ...] = (sibling(gate="freeze"),),
    **also: Any,
) -> Facts:
    return Facts(
        **{
            "vendor": "cpu",
            "held_s": WALL_S,
            "siblings": siblings,
            "evidence": Evidence(owner=owner, siblings=audit),
            "gated": True,
            **also,
        }
    )


def owner(**changed: Any) -> OwnerEvidence:
    return msgspec.structs.replace(CALM, **changed)


def codes(facts: Facts) -> list[str]:
    return [reason.code for reason in judge(facts)[1]]


@dataclass(frozen=True)
class Case:
    """A reason, what turns it on, and the nearest thing that leaves it off."""

    code: str
    verdict: str
    on: Callable[[], Facts]
    off: Callable[[], Facts]


CASES = {
    "revoked": Case(
        "revoked",
        "revoked",
        lambda: on_gpu(revoked=("max_hold", "it was held for 30 s")),
        lambda: on_gpu(revoked=None),
    ),
    "cpu_delayed": Case(
        "cpu_delayed",
        "suspect",
        lambda: on_gpu(owner(run_queue_delay_s=0.0051)),
        lambda: on_gpu(owner(run_queue_delay_s=0.005)),
    ),
    "cpu_delayed, in a very short region": Case(
        "cpu_delayed",
        "suspect",
        lambda: on_gpu(owner(run_queue_delay_s=21e-6, wall_s=1e-3)),
        lambda: on_gpu(owner(run_queue_delay_s=20e-6, wall_s=1e-3)),
    ),
    "cpu_load_elsewhere": Case(
        "cpu_load_elsewhere",
        "suspect",
        lambda: on_cpu(owner(other_cpu_s=0.11)),
        lambda: on_cpu(owner(other_cpu_s=0.10)),
    ),
    "cpu_load_elsewhere, only where ticks can tell": Case(
        "cpu_load_elsewhere",
        "suspect",
        lambda: on_cpu(owner(other_cpu_s=0.2, wall_s=0.2)),
        lambda: on_cpu(owner(other_cpu_s=0.2, wall_s=0.19)),
    ),
    "cpu_load_elsewhere, only where the host is the device": Case(
        "cpu_load_elsewhere",
        "suspect",
        lambda: on_cpu(owner(other_cpu_s=3.0)),
        lambda: on_gpu(owner(other_cpu_s=3.0)),
    ),
    "not_synchronised": Case(
        "not_synchronised",
        "suspect",
        lambda: on_gpu(owner(synchronised=False, sync_error="rc 700")),
        lambda: on_gpu(owner(synchronised=None)),
    ),
    "interrupted": Case(
        "interrupted",
        "suspect",
        lambda: on_gpu(owner(interrupted=True)),
        lambda: on_gpu(owner(interrupted=False)),
    ),
    "not_pinned": Case(
        "not_pinned",
        "suspect",
        lambda: on_gpu(owner(pin_error="its CPU mask was set by somebody else"), pinned=True),
        lambda: on_gpu(owner(pin_error=""), pinned=True),
    ),
    "thread_pool_created": Case(
        "thread_pool_created",
        "suspect",
        lambda: on_gpu(owner(thread_pool_created=True), pinned=True),
        lambda: on_gpu(owner(thread_pool_created=True), pinned=False),
    ),
    "sibling_ran, though frozen": Case(
        "sibling_ran",
        "contended",
        lambda: on_gpu(audit=GuardianAudit(ran=((20, 0.004),))),
        lambda: on_gpu(audit=GuardianAudit(ran=())),
    ),
    "sibling_ran, unlocked by somebody": Case(
        "sibling_ran",
        "contended",
        lambda: on_gpu(audit=GuardianAudit(unlocked=(20,))),
        lambda: on_gpu(audit=GuardianAudit(unlocked=())),
    ),
    "sibling_ran, though only observed": Case(
        "sibling_ran",
        "contended",
        lambda: on_cpu(audit=GuardianAudit(observed_cpu_s={20: 0.011})),
        lambda: on_cpu(audit=GuardianAudit(observed_cpu_s={20: 0.010})),
    ),
    "sibling_ran, on the measured device": Case(
        "sibling_ran",
        "contended",
        lambda: on_cpu(audit=GuardianAudit(observed_cpu_s={20: 0.5})),
        lambda: on_gpu(audit=GuardianAudit(observed_cpu_s={20: 0.5})),
    ),
    "joined_late": Case(
        "joined_late",
        "suspect",
        lambda: on_gpu(late=(sibling(),)),
        lambda: on_gpu(late=()),
    ),
    "thawed_for_signal": Case(
        "thawed_for_signal",
        "suspect",
        lambda: on_gpu(audit=GuardianAudit(released_for_signal=(20,))),
        lambda: on_gpu(audit=GuardianAudit(released_for_signal=())),
    ),
    "not_drained, the lock was refused": Case(
        "not_drained",
        "suspect",
        lambda: on_gpu(siblings=(sibling(20, "observe", error="it is being profiled"),)),
        # The same refusal of one that has no context: it can have submitted nothing.
        lambda: on_gpu(siblings=(sibling(21, "observe", error="it never joined"),)),
    ),
    "not_drained, only where there is GPU work": Case(
        "not_drained",
        "suspect",
        lambda: on_gpu(siblings=(sibling(20, "observe", error="it was stopped already"),)),
        lambda: on_cpu(siblings=(sibling(gate="observe", error="it was stopped already"),)),
    ),
    "not_drained, frozen without a lock": Case(
        "not_drained",
        "suspect",
        lambda: on_gpu(siblings=(sibling(20, "freeze"),)),
        lambda: on_gpu(siblings=(sibling(21, "freeze"),)),
    ),
    "new_context": Case(
        "new_context",
        "contended",
        lambda: on_gpu(
            device=DeviceEvidence(processes_before=(20,), processes_after=(20, 99), ungated=(99,))
        ),
        lambda: on_gpu(device=DeviceEvidence(processes_before=(20,), processes_after=(20, 99), ungated=())),
    ),
    "foreign_gpu_work": Case(
        "foreign_gpu_work",
        "suspect",
        lambda: on_gpu(device=DeviceEvidence(processes_before=(99,), processes_after=(99,), ungated=(99,))),
        lambda: on_gpu(device=DeviceEvidence(processes_before=(99,), processes_after=(99,), ungated=())),
    ),
    "evidence_missing, of the owner": Case("evidence_missing", "unknown", lambda: on_gpu(owner=None), on_gpu),
    "evidence_missing, its run-queue delay": Case(
        "evidence_missing",
        "unknown",
        lambda: on_gpu(owner(run_queue_delay_s=None)),
        lambda: on_gpu(owner(run_queue_delay_s=0.0)),
    ),
    "evidence_missing, its length": Case(
        "evidence_missing", "unknown", lambda: on_gpu(owner(wall_s=None)), lambda: on_gpu(owner(wall_s=1.0))
    ),
    "evidence_missing, a length of nothing": Case(
        "evidence_missing", "unknown", lambda: on_gpu(owner(wall_s=0.0)), lambda: on_gpu(owner(wall_s=1e-6))
    ),
    "evidence_missing, the host's CPU use": Case(
        "evidence_missing",
        "unknown",
        lambda: on_cpu(owner(other_cpu_s=None)),
        lambda: on_gpu(owner(other_cpu_s=None)),
    ),
    "evidence_missing, the audit": Case(
        "evidence_missing",
        "unknown",
        lambda: on_gpu(audit=None, gated=True),
        lambda: on_gpu(audit=None, gated=False, siblings=()),
    ),
    "evidence_missing, a sibling's CPU time": Case(
        "evidence_missing",
        "unknown",
        lambda: on_gpu(audit=GuardianAudit(unreadable=(20,))),
        lambda: on_gpu(audit=GuardianAudit(unreadable=())),
    ),
    "evidence_missing, processes before": Case(
        "evidence_missing",
        "unknown",
        lambda: on_gpu(device=DeviceEvidence(processes_before=None, processes_after=())),
        lambda: on_gpu(device=DeviceEvidence(processes_before=(), processes_after=())),
    ),
    "evidence_missing, processes after": Case(
        "evidence_missing",
        "unknown",
        lambda: on_gpu(device=DeviceEvidence(processes_before=(), processes_after=None)),
        lambda: on_gpu(device=DeviceEvidence(processes_before=(), processes_after=())),
    ),
    "evidence_missing, a whole device": Case(
        "evidence_missing", "unknown", lambda: on_gpu(device=None), lambda: on_gpu(device=None, devices=())
    ),
    "evidence_missing, the second device": Case(
        "evidence_missing",
        "unknown",
        lambda: on_gpu(devices=(GPU, "GPU-e")),
        lambda: on_gpu(devices=(GPU,)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_reason_is_on(name: str) -> None:
    case = CASES[name]
    found, reasons = judge(case.on())
    assert found == case.verdict
    assert [reason.code for reason in reasons] == [case.code]
    assert all(reason.detail for reason in reasons)


@pytest.mark.parametrize("name", CASES)
def test_a_reason_is_off(name: str) -> None:
    assert judge(CASES[name].off()) == ("clean", ())


def test_every_code_that_the_module_can_say_is_tested() -> None:
    calls = [
        node
        for node in ast.walk(ast.parse(inspect.getsource(verdict)))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "say"
    ]
    said = {ast.literal_eval(call.args[1]) for call in calls}
    assert said == {case.code for case in CASES.values()}


def test_a_calm_region_with_all_its_evidence_is_clean() -> None:
    assert judge(on_gpu()) == ("clean", ())
    assert judge(on_cpu()) == ("clean", ())


def test_a_region_alone_on_its_device_needs_no_audit() -> None:
    empty = DeviceEvidence(processes_before=(), processes_after=())
    assert judge(on_gpu(audit=None, gated=False, siblings=(), device=empty)) == ("clean", ())


# --- Missing evidence ----------------------------------------------------------------------------------------------

maybe = st.sampled_from([None, 0.0, 1e-4, 1.0])
maybe_pids = st.sampled_from([None, (), (20,), (20, 99)])
owners = st.one_of(
    st.none(),
    st.builds(
        OwnerEvidence,
        run_queue_delay_s=maybe,
        wall_s=maybe,
        other_cpu_s=maybe,
        synchronised=st.sampled_from([None, True, False]),
        interrupted=st.booleans(),
        thread_pool_created=st.booleans(),
    ),
)
audits = st.one_of(
    st.none(),
    st.builds(
        GuardianAudit,
        ran=st.sampled_from([(), ((20, 0.1),)]),
        unreadable=st.sampled_from([(), (20,)]),
        unlocked=st.sampled_from([(), (20,)]),
        observed_cpu_s=st.sampled_from([{}, {20: 1e-4}, {20: 1.0}]),
        released_for_signal=st.sampled_from([(), (20,)]),
    ),
)
device_evidence = st.builds(
    DeviceEvidence,
    processes_before=maybe_pids,
    processes_after=maybe_pids,
    ungated=st.sampled_from([(), (20,), (99,)]),
)


@st.composite
def any_facts(draw: st.DrawFn) -> Facts:
    vendor = draw(st.sampled_from(["nvidia", "amd", "cpu"]))
    devices = () if vendor == "cpu" else (GPU,)
    read = draw(st.booleans()) and vendor != "cpu"
    return Facts(
        vendor=vendor,
        held_s=draw(st.sampled_from([0.0, 1e-3, 1.0])),
        siblings=draw(
            st.lists(
                st.builds(
                    SiblingReport,
                    pid=st.sampled_from([20, 21]),
                    label=st.just(""),
                    gate=st.sampled_from(["driver-lock", "freeze", "observe"]),
                    error=st.sampled_from(["", "rc 801"]),
                ),
                max_size=2,
            ).map(tuple)
        ),
        evidence=Evidence(
            owner=draw(owners),
            siblings=draw(audits),
            device={GPU: draw(device_evidence)} if read else {},
        ),
        gated=draw(st.booleans()),
        revoked=draw(st.sampled_from([None, None, ("max_hold", "x"), ("owner_died", "y")])),
        pinned=draw(st.booleans()),
        devices=devices,
    )


@given(any_facts())
def test_missing_evidence_is_never_clean(facts: Facts) -> None:
    evidence = facts.evidence
    missing = (
        evidence.owner is None
        or evidence.owner.run_queue_delay_s is None
        or not evidence.owner.wall_s
        or (evidence.siblings is None and facts.gated)
        or (evidence.siblings is not None and bool(evidence.siblings.unreadable))
        or evidence.device.keys() != set(facts.devices)
        or any(None in (one.processes_before, one.processes_after) for one in evidence.device.values())
    )
    found, reasons = judge(facts)
    if missing:
        assert found in ("unknown", "contended", "revoked")
    assert bool(reasons) == (found != "clean")


@given(any_facts())
def test_the_worst_reason_decides_and_comes_first(facts: Facts) -> None:
    found, reasons = judge(facts)
    named = {case.code: case.verdict for case in CASES.values()}
    ranks = [SEVERITY.index(named[reason.code]) for reason in reasons]
    assert ranks == sorted(ranks, reverse=True)
    assert found == (named[reasons[0].code] if reasons else "clean")


@given(any_facts())
def test_an_end_that_came_early_is_revoked_whatever_else_was_seen(facts: Facts) -> None:
    assert judge(replace(facts, revoked=("ended", "somebody ended it")))[0] == "revoked"


def test_what_can_be_told_without_the_run_queue_delay_is_told() -> None:
    assert codes(on_gpu(owner(run_queue_delay_s=None, interrupted=True))) == [
        "evidence_missing",
        "interrupted",
    ]


def test_a_revoked_region_is_not_blamed_for_evidence_that_it_could_not_give() -> None:
    facts = on_gpu(owner=None, audit=None, device=None, revoked=("owner_died", "pid 10 is gone"))
    assert codes(facts) == ["revoked"]


def test_the_advice_belongs_to_the_cause() -> None:
    def detail(code: str) -> str:
        return judge(on_gpu(revoked=(code, "why")))[1][0].detail

    assert "max_hold" in detail("max_hold")
    assert "Run it again" in detail("ended")


def test_a_reason_names_the_sibling_by_its_label_or_pid() -> None:
    ran = GuardianAudit(ran=((20, 0.004), (21, 0.004)))
    siblings = (sibling(20, label="notebook b"), sibling(21))
    details = [reason.detail for reason in judge(on_gpu(audit=ran, siblings=siblings))[1]]
    assert "notebook b" in details[0]
    assert "4.00 ms" in details[0]
    assert "pid 21" in details[1]


def test_the_administrators_threshold_is_used() -> None:
    facts = on_gpu(owner(run_queue_delay_s=0.02))
    assert judge(facts)[0] == "suspect"
    assert judge(facts, Thresholds(run_queue_share=0.05))[0] == "clean"
