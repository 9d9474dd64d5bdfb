"""What is done to whom for one region: a pure decision over a snapshot of processes.

The guardian takes the snapshot and carries the plan out. Rules are those of ENFORCEMENT.md; what must never
happen (a protected process in a plan, a process frozen that was stopped already) is decided here, so that it can
be tested without a single signal.

Words: a *root* is a participant's process. Its *members* are the root, its descendants as far as no other root
is met, and, where the root leads a session (a kernel does), the members of that session: `!busy &` in a notebook
has parent 1 but still the kernel's session.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from krex_jupyter.protocol import EffectiveCpuPolicy, Gate, Vendor

FreezeWhen: TypeAlias = Literal["no", "yes", "without_context"]
"""``without_context``: only where the lock answers that the process has no context (rc 3)."""


@dataclass(frozen=True, slots=True)
class ProcessView:
    """What the plan needs to know of a process (`/proc/PID/stat`, `status`, `maps`)."""

    pid: int
    parent: int
    session: int
    uids: tuple[int, ...]
    """Real, effective, saved."""
    stopped: bool = False
    """In state T, and not by us."""
    traced: bool = False
    libcuda: bool = True
    """libcuda is mapped, or may be: unknown counts as mapped."""
    foreground: bool = False
    """It is in the foreground group of a controlling terminal."""
    group: int = 0
    """Its process group: a shell with job control gives each of its jobs one of its own."""

    def running(self) -> ProcessView:
        """The same of a process that is stopped by us, not by somebody else."""
        return replace(self, stopped=False)


@dataclass(frozen=True, slots=True)
class Root:
    """A participant other than the owner."""

    pid: int
    uid: int
    holds_region: bool = False
    waiting: bool = False
    """Blocked in our client and using no CPU."""
    counts: bool = True
    contexts: frozenset[str] | None = None
    """Devices it has contexts on; None: unknown."""


@dataclass(frozen=True, slots=True)
class Request:
    """The region that a plan is for."""

    owner: int
    devices: tuple[str, ...]
    vendor: Vendor
    cpu_policy: EffectiveCpuPolicy
    driver_lock: bool
    """The driver can lock, and a probe showed it."""
    protected: frozenset[int] = frozenset()
    peers: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Step:
    """What is done to one process."""

    pid: int
    root: int
    gate: Gate
    lock: bool = False
    freeze: FreezeWhen = "no"
    first: bool = False
    """A terminal's shell: it must stand before what comes behind it in the plan is stopped, and go on after it."""
    reason: str = ""
    """Why it is only observed, or why it is not frozen."""


def members(processes: Mapping[int, ProcessView], roots: Iterable[int]) -> dict[int, int]:
    """Which root each process belongs to; processes that belong to none are left out."""
    known_roots = set(roots)
    children: dict[int, list[int]] = defaultdict(list)
    for view in processes.values():
        children[view.parent].append(view.pid)
    belongs: dict[int, int] = {}
    leaders = {pid for pid in known_roots if pid in processes and processes[pid].session == pid}
    # Descent first, nearest root wins; the session only claims what descent did not.
    for root in known_roots:
        if root not in processes:
            continue
        pending = [root]
        while pending:
            pid = pending.pop()
            if pid in belongs:
                continue
            belongs[pid] = root
            pending += [child for child in children[pid] if child not in known_roots]
    for view in processes.values():
        if view.pid not in belongs and view.session in leaders:
            belongs[view.pid] = view.session
    return belongs


def ancestors(processes: Mapping[int, ProcessView], pid: int) -> set[int]:
    """The chain of parents of ``pid``, itself not included."""
    found: set[int] = set()
    view = processes.get(pid)
    while view is not None and view.parent not in found and view.parent != pid:
        found.add(view.parent)
        view = processes.get(view.parent)
    return found


def plan(request: Request, roots: Iterable[Root], processes: Mapping[int, ProcessView]) -> tuple[Step, ...]:
    """The steps for ``request``, in the order in which processes are frozen (a terminal's shell first).

    ``roots`` are the participants other than the owner; members of the owner are never part of a plan.
    """
    by_pid = {root.pid: root for root in roots if root.pid != request.owner}
    belongs = members(processes, {*by_pid, request.owner})
    untouchable = request.protected | request.peers | {request.owner}
    above_owner = ancestors(processes, request.owner)
    steps: dict[int, Step] = {}
    for pid, root_pid in belongs.items():
        untouched = {pid, root_pid} & untouchable
        if root_pid != request.owner and not untouched:
            steps[pid] = _step(request, by_pid[root_pid], processes[pid], above_owner=pid in above_owner)
    # A shell that sees its job stop takes the terminal back, so it is stopped before the job, or the job runs on.
    shells: dict[int, Step] = {}
    for pid, step in list(steps.items()):
        found: dict[int, Step] = {}
        for shell in _job_control_shells(processes, processes[pid]) if step.freeze != "no" else ():
            own = steps.get(shell)
            if own is not None:
                may_stop = own.freeze != "no" or not own.reason
            else:
                never = shell in belongs or shell in untouchable or shell in above_owner
                may_stop = not never and not _why_not_touched(processes[shell], by_pid[step.root].uid)
            if not may_stop:
                reason = f"it runs in the foreground of a terminal whose shell (pid {shell}) must not stop"
                steps[pid] = Step(pid, step.root, "observe", reason=reason)
                break
            if own is not None and own.lock:
                found[shell] = replace(own, freeze="yes", first=True)
            else:
                root = step.root if own is None else own.root
                found[shell] = Step(shell, root, "freeze", freeze="yes", first=True)
        else:
            shells.update(found)
    return (*shells.values(), *(step for pid, step in steps.items() if pid not in shells))


def _step(request: Request, root: Root, view: ProcessView, *, above_owner: bool) -> Step:
    """What is done to one member, by the first rule that applies."""

    def observe(reason: str) -> Step:
        return Step(view.pid, root.pid, "observe", reason=reason)

    if above_owner:
        return observe("it is an ancestor of the region's owner")
    if root.holds_region:
        return observe("it holds a region on another device")
    if not root.counts:
        return observe("it never joined, and the configuration does not count it as a participant")
    refused = _why_not_touched(view, root.uid)
    if refused:
        return observe(refused)
    on_gpu = request.vendor != "cpu"
    if on_gpu and root.contexts is not None and len(root.contexts) > 1:
        return observe("it uses several GPUs; locking one rank of a collective would hang the others")
    lock = (
        request.vendor == "nvidia"
        and request.driver_lock
        and view.libcuda
        and (root.contexts is None or not root.contexts or bool(root.contexts & set(request.devices)))
    )
    waits = root.waiting and view.pid == root.pid
    if request.cpu_policy == "freeze" and not waits:
        return Step(view.pid, root.pid, "driver-lock" if lock else "freeze", lock=lock, freeze="yes")
    if lock:
        # A process without a context could create one: it is frozen instead, unless nobody may be frozen. One
        # that waits creates none, and frozen it would answer to Ctrl-C only when the region is over.
        without_context: FreezeWhen = (
            "without_context" if request.cpu_policy == "isolate" and not waits else "no"
        )
        return Step(view.pid, root.pid, "driver-lock", lock=True, freeze=without_context)
    if request.cpu_policy == "freeze":
        return observe("it waits for its own region and uses no CPU")
    return observe("" if on_gpu else "cpu='share' gates nobody")


def _why_not_touched(view: ProcessView, uid: int) -> str:
    """Why a process must not be stopped by us, as a clause; empty where it may."""
    if view.traced:
        return "a debugger traces it"
    if view.stopped:
        return "it was stopped already"
    if any(found != uid for found in view.uids):
        return f"it runs as uid {'/'.join(map(str, view.uids))}, its participant as uid {uid}"
    return ""


def _job_control_shells(processes: Mapping[int, ProcessView], view: ProcessView) -> list[int]:
    """The shells that would see this process stop and take its terminal back, the outermost first.

    That is the leader of its session, and those of its ancestors below that which gave it, or each other, a
    process group: a shell that was started in a shell is a job of that one and has jobs of its own. Empty for a
    process that is not in a terminal's foreground, or is its session's leader.
    """
    if not view.foreground or view.session == view.pid:
        return []
    found: list[int] = []
    group, above = view.group, processes.get(view.parent)
    while above is not None and above.session == view.session and above.pid not in (view.session, *found):
        if above.group != group:
            found.append(above.pid)
            group = above.group
        above = processes.get(above.parent) if above.parent != above.pid else None
    if view.session in processes:
        found.append(view.session)
    return found[::-1]
