"""The plan: invariants over random process forests, then one plain example per rule."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from krex_jupyter.enforcement.plan import ProcessView, Request, Root, Step, members, plan
from krex_jupyter.protocol import EffectiveCpuPolicy, Vendor

D = "GPU-d"
OTHER = "GPU-other"
UID = 1000


# --- Random forests ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scene:
    processes: dict[int, ProcessView]
    roots: tuple[Root, ...]
    request: Request

    @property
    def steps(self) -> tuple[Step, ...]:
        return plan(self.request, self.roots, self.processes)


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    count = draw(st.integers(2, 14))
    processes = {1: ProcessView(pid=1, parent=0, session=1, uids=(0, 0, 0))}
    for pid in range(2, count + 2):
        parent = draw(st.integers(1, pid - 1))
        inherited = processes[parent].session
        processes[pid] = ProcessView(
            pid=pid,
            parent=parent,
            # A double fork keeps the session and loses the parent, so any session may be met anywhere.
            session=draw(st.sampled_from([inherited, inherited, pid, draw(st.integers(1, pid))])),
            uids=draw(st.sampled_from([(UID, UID, UID)] * 6 + [(UID, 0, 0), (UID, UID, 0), (0, 0, 0)])),
            stopped=draw(st.integers(0, 9)) == 0,
            traced=draw(st.integers(0, 9)) == 0,
            libcuda=draw(st.booleans()),
            foreground=draw(st.integers(0, 3)) == 0,
        )
    pids = sorted(processes.keys() - {1})
    owner = draw(st.sampled_from(pids))
    roots = tuple(
        Root(
            pid=pid,
            uid=UID,
            holds_region=draw(st.integers(0, 5)) == 0,
            waiting=draw(st.integers(0, 3)) == 0,
            counts=draw(st.integers(0, 5)) > 0,
            contexts=draw(
                st.sampled_from(
                    [None, frozenset(), frozenset({D}), frozenset({OTHER}), frozenset({D, OTHER})]
                )
            ),
        )
        for pid in draw(st.lists(st.sampled_from(pids), unique=True, max_size=6))
    )
    few = st.frozensets(st.sampled_from(pids), max_size=2)
    request = Request(
        owner=owner,
        devices=(D,),
        vendor=draw(st.sampled_from(["nvidia", "nvidia", "amd", "cpu"])),
        cpu_policy=draw(st.sampled_from(["freeze", "freeze", "isolate", "share"])),
        driver_lock=draw(st.booleans()),
        protected=draw(few),
        peers=draw(few),
    )
    return Scene(processes, roots, request)


def root_of(scene: Scene, pid: int) -> int | None:
    """By the rule's words: the nearest participant upwards, else the participant that leads its session."""
    roots = {root.pid for root in scene.roots} | {scene.request.owner}
    at = pid
    while at in scene.processes:
        if at in roots:
            return at
        at = scene.processes[at].parent
    session = scene.processes[pid].session
    leads = session in roots and scene.processes[session].session == session
    return session if leads else None


def above(scene: Scene, pid: int) -> set[int]:
    found = set()
    while pid in scene.processes:
        pid = scene.processes[pid].parent
        found.add(pid)
    return found


def shell_of(scene: Scene, pid: int) -> int | None:
    view = scene.processes[pid]
    leads = view.session == pid or view.session not in scene.processes
    return view.session if view.foreground and not leads else None


def touched(steps: Iterable[Step]) -> dict[int, Step]:
    return {step.pid: step for step in steps if step.lock or step.freeze != "no"}


every_scene = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@every_scene
@given(scenes())
def test_owner_protected_peers_and_holders_are_never_locked_nor_frozen(scene: Scene) -> None:
    holders = {root.pid for root in scene.roots if root.holds_region}
    spared = scene.request.protected | scene.request.peers
    for pid in touched(scene.steps):
        root = root_of(scene, pid)
        assert pid not in spared
        assert pid != scene.request.owner
        assert root != scene.request.owner, "a plain descendant, or session member, of the owner"
        assert root not in spared
        assert root not in holders - {scene.request.owner}


@every_scene
@given(scenes())
def test_ancestors_of_the_owner_are_at_most_observed(scene: Scene) -> None:
    assert not touched(scene.steps).keys() & above(scene, scene.request.owner)


@every_scene
@given(scenes())
def test_stopped_traced_and_other_users_processes_are_at_most_observed(scene: Scene) -> None:
    for pid in touched(scene.steps):
        view = scene.processes[pid]
        assert not view.stopped
        assert not view.traced
        assert set(view.uids) == {UID}


@every_scene
@given(scenes())
def test_every_member_of_every_root_appears_exactly_once(scene: Scene) -> None:
    spared = scene.request.protected | scene.request.peers | {scene.request.owner}
    expected = {
        pid
        for pid in scene.processes
        if (root := root_of(scene, pid)) is not None and root not in spared and pid not in spared
    }
    found = [step.pid for step in scene.steps]
    assert len(found) == len(set(found))
    extra = set(found) - expected
    assert set(found) - extra == expected
    # Beside members there are only shells that belong to nobody, and each of them for a job of its terminal.
    for pid in extra:
        assert root_of(scene, pid) is None
        assert any(shell_of(scene, other) == pid for other in touched(scene.steps).keys() & expected)
    for step in scene.steps:
        if step.pid in expected:
            assert step.root == root_of(scene, step.pid)


@every_scene
@given(scenes())
def test_a_step_says_one_thing(scene: Scene) -> None:
    """Gate, lock and freeze agree, and only what is left alone has a reason."""
    for step in scene.steps:
        if step.gate == "observe":
            assert not step.lock
            assert step.freeze == "no"
        else:
            assert not step.reason
            assert step.lock == (step.gate == "driver-lock")
            assert step.lock or step.freeze != "no"


@every_scene
@given(scenes())
def test_only_the_driver_of_the_device_locks_and_only_where_it_can(scene: Scene) -> None:
    contexts = {root.pid: root.contexts for root in scene.roots}
    for step in scene.steps:
        if step.lock:
            assert scene.request.vendor == "nvidia"
            assert scene.request.driver_lock
            assert scene.processes[step.pid].libcuda
            known = contexts[step.root]
            assert not known or D in known


@every_scene
@given(scenes())
def test_under_freeze_every_other_member_is_frozen_unless_it_truly_waits(scene: Scene) -> None:
    if scene.request.cpu_policy != "freeze":
        return
    roots = {root.pid: root for root in scene.roots}
    observed_above = above(scene, scene.request.owner)
    steps = {step.pid: step for step in scene.steps}
    for step in scene.steps:
        assert step.freeze in ("yes", "no")
        view, root = scene.processes[step.pid], roots[step.root]
        several = len(root.contexts or ()) > 1 and scene.request.vendor != "cpu"
        may_not = (
            step.pid in observed_above
            or root.holds_region
            or not root.counts
            or several
            or view.stopped
            or view.traced
            or set(view.uids) != {UID}
        )
        shell = shell_of(scene, step.pid)
        shell_runs = shell is not None and (shell not in steps or steps[shell].freeze != "yes")
        waits = root.waiting and step.pid == root.pid
        is_shell = any(shell_of(scene, other) == step.pid for other in touched(scene.steps))
        if may_not:
            assert step.gate == "observe"
            assert step.reason
        elif waits and not is_shell:
            # Not stopped, so no shell takes its terminal; it may be locked.
            assert step.freeze == "no"
        elif shell_runs:
            assert step.gate == "observe"
            assert step.reason
        else:
            assert step.freeze == "yes"


@every_scene
@given(scenes())
def test_isolate_freezes_only_what_has_no_context_and_share_nobody(scene: Scene) -> None:
    shells = {shell_of(scene, pid) for pid in touched(scene.steps)}
    for step in scene.steps:
        if scene.request.cpu_policy == "share":
            assert step.freeze == "no"
        if scene.request.cpu_policy == "isolate" and step.pid not in shells:
            assert step.freeze in ("no", "without_context")
            assert step.lock or step.freeze == "no"


@every_scene
@given(scenes())
def test_a_terminals_shell_is_frozen_before_its_job_or_the_job_is_not_frozen(scene: Scene) -> None:
    order = {step.pid: at for at, step in enumerate(scene.steps)}
    for step in scene.steps:
        shell = shell_of(scene, step.pid)
        if step.freeze != "no" and shell is not None:
            assert scene.steps[order[shell]].freeze == "yes"
            assert order[shell] < order[step.pid]


@every_scene
@given(scenes())
def test_a_multi_gpu_process_is_observed(scene: Scene) -> None:
    several = {root.pid for root in scene.roots if len(root.contexts or ()) > 1}
    if scene.request.vendor != "cpu":
        for step in touched(scene.steps).values():
            is_shell = root_of(scene, step.pid) is None
            assert is_shell or step.root not in several


@every_scene
@given(scenes())
def test_members_are_those_of_the_nearest_root(scene: Scene) -> None:
    found = members(scene.processes, {*(root.pid for root in scene.roots), scene.request.owner})
    assert found == {pid: root for pid in scene.processes if (root := root_of(scene, pid)) is not None}


# --- Examples ------------------------------------------------------------------------------------------------------


def view(pid: int, parent: int = 1, session: int | None = None, **also: object) -> ProcessView:
    defaults: dict[str, object] = {"uids": (UID, UID, UID)}
    return ProcessView(pid, parent, pid if session is None else session, **(defaults | also))  # type: ignore[arg-type]


def steps_of(
    views: Iterable[ProcessView],
    roots: Iterable[Root],
    *,
    owner: int = 10,
    vendor: Vendor = "nvidia",
    cpu_policy: EffectiveCpuPolicy = "freeze",
    driver_lock: bool = True,
    protected: Iterable[int] = (),
    peers: Iterable[int] = (),
) -> dict[int, Step]:
    request = Request(
        owner=owner,
        devices=(D,),
        vendor=vendor,
        cpu_policy=cpu_policy,
        driver_lock=driver_lock,
        protected=frozenset(protected),
        peers=frozenset(peers),
    )
    return {step.pid: step for step in plan(request, roots, {one.pid: one for one in views})}


def test_a_kernel_with_a_context_is_locked_then_frozen() -> None:
    assert steps_of([view(10), view(20)], [Root(20, UID)]) == {
        20: Step(20, 20, "driver-lock", lock=True, freeze="yes")
    }


def test_without_the_drivers_lock_a_kernel_is_frozen() -> None:
    steps = steps_of([view(10), view(20)], [Root(20, UID)], driver_lock=False)
    assert steps == {20: Step(20, 20, "freeze", freeze="yes")}


def test_on_the_cpu_device_nobody_is_locked() -> None:
    steps = steps_of([view(10), view(20)], [Root(20, UID)], vendor="cpu")
    assert steps == {20: Step(20, 20, "freeze", freeze="yes")}


def test_under_isolate_a_process_is_frozen_only_where_it_has_no_context_to_lock() -> None:
    steps = steps_of([view(10), view(20)], [Root(20, UID)], cpu_policy="isolate")
    assert steps == {20: Step(20, 20, "driver-lock", lock=True, freeze="without_context")}


def test_under_isolate_a_compiler_runs_on() -> None:
    views = [view(10), view(20), view(21, 20, 20, libcuda=False)]
    assert steps_of(views, [Root(20, UID)], cpu_policy="isolate")[21].gate == "observe"


def test_under_share_a_process_is_locked_and_never_frozen() -> None:
    steps = steps_of([view(10), view(20)], [Root(20, UID)], cpu_policy="share")
    assert steps == {20: Step(20, 20, "driver-lock", lock=True)}


def test_a_process_of_another_device_is_not_locked_but_frozen() -> None:
    steps = steps_of([view(10), view(20)], [Root(20, UID, contexts=frozenset({OTHER}))])
    assert steps[20] == Step(20, 20, "freeze", freeze="yes")


def test_a_background_job_whose_parent_is_init_is_a_member_by_its_session() -> None:
    steps = steps_of([view(1, 0), view(10), view(20), view(21, 1, session=20)], [Root(20, UID)])
    assert steps[21].freeze == "yes"
    assert steps[21].root == 20


def test_a_session_that_no_participant_leads_makes_no_members() -> None:
    views = [view(5), view(10), view(20, 5, session=5), view(21, 5, session=5)]
    assert 21 not in steps_of(views, [Root(20, UID)])


def test_descendants_of_the_owner_are_left_alone() -> None:
    views = [view(10), view(11, 10), view(12, 11), view(13, 1, session=10)]
    assert steps_of(views, [Root(20, UID)]) == {}


def test_a_kernel_that_the_owner_started_is_a_sibling_unless_named_a_peer() -> None:
    views = [view(10), view(11, 10), view(20, 11), view(21, 20)]
    assert steps_of(views, [Root(20, UID)]).keys() == {20, 21}
    assert steps_of(views, [Root(20, UID)], peers=[20]) == {}


def test_the_notebook_that_started_the_owner_is_observed_and_its_other_children_are_not_spared() -> None:
    views = [view(20), view(21, 20), view(10, 20, session=20)]
    steps = steps_of(views, [Root(20, UID)])
    assert steps[20].gate == "observe"
    assert "ancestor" in steps[20].reason
    assert steps[21].freeze == "yes"


def test_who_holds_another_region_is_observed_with_all_its_members() -> None:
    steps = steps_of([view(10), view(20), view(21, 20)], [Root(20, UID, holds_region=True)])
    assert [step.gate for step in steps.values()] == ["observe", "observe"]


def test_a_protected_process_does_not_protect_its_root() -> None:
    steps = steps_of([view(10), view(20), view(21, 20)], [Root(20, UID)], protected=[21])
    assert steps.keys() == {20}
    assert steps[20].freeze == "yes"


@pytest.mark.parametrize(
    ("also", "why"),
    [
        ({"stopped": True}, "stopped already"),
        ({"traced": True}, "debugger"),
        ({"uids": (UID, 0, 0)}, f"{UID}/0/0"),
        ({"uids": (UID, UID, 0)}, f"{UID}/{UID}/0"),
    ],
)
def test_what_is_not_ours_to_stop_is_observed_and_says_why(also: dict[str, object], why: str) -> None:
    steps = steps_of([view(10), view(20), view(21, 20, **also)], [Root(20, UID)])
    assert steps[20].freeze == "yes"
    assert steps[21].gate == "observe"
    assert why in steps[21].reason


def test_a_multi_gpu_job_is_observed() -> None:
    steps = steps_of([view(10), view(20)], [Root(20, UID, contexts=frozenset({D, OTHER}))])
    assert steps[20].gate == "observe"
    assert "several GPUs" in steps[20].reason


def test_a_registered_kernel_that_does_not_count_is_observed() -> None:
    assert steps_of([view(10), view(20)], [Root(20, UID, counts=False)])[20].gate == "observe"


@pytest.mark.parametrize("cpu_policy", ["freeze", "isolate"])
def test_a_waiter_is_locked_and_not_frozen(cpu_policy: EffectiveCpuPolicy) -> None:
    steps = steps_of([view(10), view(20)], [Root(20, UID, waiting=True)], cpu_policy=cpu_policy)
    assert steps[20] == Step(20, 20, "driver-lock", lock=True)


def test_children_of_a_waiter_are_frozen() -> None:
    steps = steps_of([view(10), view(20), view(21, 20)], [Root(20, UID, waiting=True)])
    assert steps[21].freeze == "yes"


def test_a_shell_outside_is_frozen_before_the_script_in_its_foreground() -> None:
    views = [view(10), view(30), view(20, 30, session=30, foreground=True)]
    assert list(steps_of(views, [Root(20, UID)])) == [30, 20]


def test_a_shell_that_is_a_member_itself_is_frozen_before_its_job() -> None:
    """A kernel's terminal: the job joined for itself, and was known before the shell."""
    views = [view(10), view(20), view(30, 20), view(40, 30, session=30, foreground=True)]
    steps = steps_of(views, [Root(40, UID), Root(20, UID)])
    assert next(iter(steps)) == 30
    assert {step.freeze for step in steps.values()} == {"yes"}


def nested(**of_the_inner_shell: object) -> list[ProcessView]:
    """A script (60) started by a command (50) of a shell (40) that was started in the terminal's shell (30)."""
    return [
        view(10),
        view(30, group=30),
        view(40, 30, session=30, group=40, **of_the_inner_shell),
        view(50, 40, session=30, group=50, foreground=True),
        view(60, 50, session=30, group=50, foreground=True),
    ]


def test_of_a_shell_within_a_shell_the_outer_one_is_frozen_first() -> None:
    steps = steps_of(nested(), [Root(60, UID)])
    assert list(steps) == [30, 40, 60]
    assert [step.first for step in steps.values()] == [True, True, False]


def test_where_the_inner_shell_must_not_stop_the_outer_one_runs_on_too() -> None:
    steps = steps_of(nested(traced=True), [Root(60, UID)])
    assert steps.keys() == {60}
    assert steps[60].gate == "observe"
    assert "pid 40" in steps[60].reason


def test_a_script_in_the_foreground_of_a_background_session_needs_no_shell() -> None:
    views = [view(10), view(30), view(20, 30, session=30, foreground=False)]
    assert list(steps_of(views, [Root(20, UID)])) == [20]


@pytest.mark.parametrize(
    ("shell", "also"),
    [
        (view(30, stopped=True), {}),
        (view(30, uids=(0, 0, 0)), {}),
        (view(30), {"protected": [30]}),
        (view(30), {"peers": [30]}),
        (view(30, 10), {}),
    ],
    ids=["stopped", "another user's", "protected", "a peer", "the owner's child"],
)
def test_a_script_whose_shell_must_not_stop_is_observed(
    shell: ProcessView, also: dict[str, Iterable[int]]
) -> None:
    views = [view(10), shell, view(20, 30, session=30, foreground=True)]
    steps = steps_of(views, [Root(20, UID)], **also)  # type: ignore[arg-type]
    assert steps.keys() == {20}
    assert steps[20].gate == "observe"
    assert "pid 30" in steps[20].reason


def test_a_script_beside_the_owner_in_one_terminal_is_observed() -> None:
    """The shell is the owner's ancestor."""
    views = [view(30), view(10, 30, session=30), view(20, 30, session=30, foreground=True)]
    assert steps_of(views, [Root(20, UID)])[20].gate == "observe"


def test_a_participant_that_is_gone_is_no_error() -> None:
    assert steps_of([view(10)], [Root(20, UID)]) == {}
