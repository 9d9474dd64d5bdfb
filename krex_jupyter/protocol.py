"""Every message that crosses a socket, a pipe or REST, and nothing else.

One module, so that all sides (kernel, server, coordinator, guardian, browser) read the same shapes. Messages
are msgspec structs, sent as JSON, one message per packet of a ``SOCK_SEQPACKET`` Unix socket (`wire.py`).
A receiver ignores fields it does not know, so the two ends may differ in version; an unknown *message* is
answered with `Failed`.

Units are in the names: ``_s`` seconds, ``_bytes``, ``_mhz``, ``_c``. ``started_at`` is wall-clock (Unix time);
everything else is a duration.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec

PROTOCOL_VERSION = 1
"""Raised when an older peer could misread a message; added fields do not raise it."""

CpuPolicy: TypeAlias = Literal["auto", "freeze", "isolate", "share"]
EffectiveCpuPolicy: TypeAlias = Literal["freeze", "isolate", "share"]
Foreign: TypeAlias = Literal["observe", "gate"]
Gate: TypeAlias = Literal["driver-lock", "quiesce", "freeze", "observe"]
Verdict: TypeAlias = Literal["clean", "suspect", "contended", "revoked", "unknown"]
Vendor: TypeAlias = Literal["nvidia", "amd", "cpu"]
Participants: TypeAlias = Literal["gpu", "all", "joined"]
Number: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]
"""An integer of a client's: JSON knows larger ones, which neither browsers nor the encoder of an answer can take."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=False):
    """Base of everything that is sent as a packet of its own."""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """Base of what messages are made of."""


# --- Parts -----------------------------------------------------------------------------------------------------


class DeviceInfo(Part, frozen=True, kw_only=True):
    """A device of this host. ``index`` is the driver's, None for the cpu; ``uuid`` is its identity everywhere."""

    uuid: str
    name: str
    vendor: Vendor
    index: int | None = None
    memory_bytes: int | None = None
    gates: tuple[Gate, ...] = ()
    """Gates that this host can use for it, best first."""
    note: str = ""
    """Why a better gate is missing, and what to do about it; empty where nothing is."""


class Reason(Part, frozen=True, kw_only=True):
    """Why a verdict is not `clean`: a stable ``code`` and a sentence that says what to do."""

    code: str
    detail: str


class SiblingReport(Part, frozen=True, kw_only=True):
    """What was done to one sibling process for one region."""

    pid: int
    label: str
    gate: Gate
    frozen: bool = False
    drain_s: float | None = None
    """Seconds the lock call took, the sibling's own queued work included; None where nothing was locked."""
    error: str = ""


class OwnerEvidence(Part, frozen=True, kw_only=True):
    """What the owner's process read of itself around its region. None is "could not be read", never zero."""

    run_queue_delay_s: float | None = None
    """Seconds the measuring thread was runnable but not running (`/proc/PID/task/TID/schedstat`)."""
    cpu_time_s: float | None = None
    wall_s: float | None = None
    involuntary_switches: int | None = None
    major_faults: int | None = None
    migrations_off_reserved: int | None = None
    other_cpu_s: float | None = None
    """CPU seconds used on the host by everything but the owner (`/proc/stat` minus the owner's threads)."""
    steal_s: float | None = None
    synchronised: bool | None = None
    """None: no GPU context to synchronise; False: it was tried and failed."""
    sync_error: str = ""
    other_contexts: bool | None = None
    pin_error: str = ""
    """Why the measuring thread was not pinned though it should have been."""
    thread_pool_created: bool = False
    interrupted: bool = False


class GuardianAudit(Part, frozen=True, kw_only=True):
    """What the guardian saw of the siblings while all was still gated."""

    frozen_threads: int = 0
    ran: tuple[tuple[int, float], ...] = ()
    """(pid, CPU seconds) of processes that should have stood still and did not."""
    unreadable: tuple[int, ...] = ()
    """Pids whose schedstat could not be read though they live: evidence that is missing."""
    unlocked: tuple[int, ...] = ()
    """Pids that were locked at entry and are not any more."""
    observed_cpu_s: dict[int, float] = {}
    """CPU seconds of observed processes during the region, by pid."""
    released_for_signal: tuple[int, ...] = ()
    joined_late: tuple[SiblingReport, ...] = ()
    """Participants that appeared during the region and were gated then."""


class DeviceEvidence(Part, frozen=True, kw_only=True):
    """Process lists of the device at both ends. None: could not be read."""

    processes_before: tuple[int, ...] | None = None
    processes_after: tuple[int, ...] | None = None
    ungated: tuple[int, ...] = ()
    """Processes with a context on the device that nothing gates and that are not the owner's."""
    error: str = ""


class Evidence(Part, frozen=True, kw_only=True):
    """Everything that a verdict rests on."""

    owner: OwnerEvidence | None = None
    siblings: GuardianAudit | None = None
    device: dict[str, DeviceEvidence] = {}


class ReportDevice(Part, frozen=True, kw_only=True):
    """The device of a report."""

    id: str
    uuid: str
    name: str
    vendor: Vendor


class EntryCosts(Part, frozen=True, kw_only=True):
    """Where the time of an entry went, as far as the guardian spent it."""

    lock_s: float = 0.0
    """Until the last lock call returned, the siblings' own queued work included."""
    freeze_s: float = 0.0
    verify_s: float = 0.0
    """Seeing every thread stand still."""


class RegionReport(Part, frozen=True, kw_only=True):
    """One region: what was done, what was seen, and what that makes of its numbers."""

    version: int = 1
    region_id: str
    epoch: int
    device: ReportDevice
    """The first device, in UUID order, where the region holds several (``devices`` has all)."""
    devices: tuple[ReportDevice, ...] = ()
    label: str = ""
    pid: int
    notebook: str = ""
    uid: int = -1
    started_at: float
    """Unix time of the grant."""
    wait_s: float
    """Queued: from the request to the start of enforcement."""
    enter_s: float
    """Enforcing: from there to the grant."""
    held_s: float
    exit_s: float
    """From the release request to the answer."""
    enter_costs: EntryCosts = msgspec.field(default_factory=EntryCosts)
    cpu_policy: EffectiveCpuPolicy
    siblings: tuple[SiblingReport, ...] = ()
    verdict: Verdict
    reasons: tuple[Reason, ...] = ()
    evidence: Evidence = msgspec.field(default_factory=Evidence)


class ParticipantStatus(Part, frozen=True, kw_only=True):
    """A process that the coordinator knows."""

    pid: int
    uid: int
    label: str
    kernel_id: str = ""
    notebook: str = ""
    joined: bool = False
    """It connected itself; otherwise its server registered it."""
    gpu_library: bool | None = None
    state: Literal["running", "queued", "holding", "paused"] = "running"
    paused_by: str = ""
    """Region that gates it now."""
    paused_s: float = 0.0
    protected: bool = False
    """Never gated, nor asks for regions: a Jupyter server."""


class HolderStatus(Part, frozen=True, kw_only=True):
    """A held region."""

    region_id: str
    epoch: int
    pid: int
    uid: int
    label: str
    notebook: str
    devices: tuple[str, ...]
    cpu_policy: EffectiveCpuPolicy
    phase: Literal["entering", "held", "leaving"]
    held_s: float
    remaining_s: float | None
    siblings_gated: int
    siblings_observed: int
    notice: str = ""
    """Set once a region is held so long that others should know (5 s by default)."""


class WaiterStatus(Part, frozen=True, kw_only=True):
    """A queued request."""

    pid: int
    uid: int
    label: str
    notebook: str
    devices: tuple[str, ...]
    position: int
    """1 is next."""
    waited_s: float
    eta_s: float | None
    """Estimated from the regions held lately; None where there is no history to estimate from."""
    waits_for: str
    region_id: str
    """The id that the region will have; `End` takes it too."""


class DeviceStatus(Part, frozen=True, kw_only=True):
    """A device with its holder and queue."""

    device: DeviceInfo
    holder: HolderStatus | None
    queue: tuple[WaiterStatus, ...]


class Status(Message, frozen=True, kw_only=True, tag="status"):
    """Snapshot of a host: the answer to `GetStatus`, and the first event of a subscription."""

    request_id: int = 0
    version: int = 1
    coordinator_pid: int
    guardian_pid: int | None
    system: bool
    socket: str
    uptime_s: float
    devices: tuple[DeviceStatus, ...]
    participants: tuple[ParticipantStatus, ...]
    recent: tuple[RegionReport, ...] = ()
    """Last reports, newest first."""
    notices: tuple[str, ...] = ()
    """What somebody should know: history fell back, a first foreign freeze, a guardian was restarted."""


# --- Client to coordinator -----------------------------------------------------------------------------------


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    """First message of every connection. Identity is the socket's peer credentials, never these fields."""

    version: Number = PROTOCOL_VERSION
    role: Literal["participant", "server", "viewer"] = "participant"
    """participant: this process may be gated. server: a Jupyter server (protected). viewer: reads only."""
    label: str = ""
    kernel_id: str = ""
    notebook: str = ""


class Acquire(Message, frozen=True, kw_only=True, tag="acquire"):
    """Ask for a region. Answered by `Queued` (zero or more), then `Granted` or `Failed`."""

    request_id: Number
    devices: tuple[str, ...]
    """UUIDs."""
    device_ids: tuple[str, ...] = ()
    """What the user called them, in the same order: for reports."""
    timeout_s: float | None = None
    max_hold_s: float | None = None
    """0 means no limit, allowed only with ``cpu="share"``; None the configured default."""
    cpu: CpuPolicy = "auto"
    foreign: Foreign = "observe"
    peers: tuple[Number, ...] = ()
    label: str = ""
    tid: Number = 0
    """Thread that measures; it alone is pinned under `isolate`."""


class Confirm(Message, frozen=True, kw_only=True, tag="confirm"):
    """The owner saw its grant, or its report.

    After a grant the lease clock starts; unanswered for 1 s, the next in line is served. After a report the siblings
    go on, so that they do not compete with the owner for the CPU before it has its answer; unanswered for 2 ms, they
    go on anyway.
    """

    region_id: str


class Release(Message, frozen=True, kw_only=True, tag="release"):
    """The region's end. Answered by `Released`, then the siblings go on."""

    request_id: Number
    region_id: str
    owner: OwnerEvidence


class Cancel(Message, frozen=True, kw_only=True, tag="cancel"):
    """Leave the queue, or abandon an entry in progress. Answered by `Failed` with code `cancelled`."""

    request_id: Number


class End(Message, frozen=True, kw_only=True, tag="end"):
    """End a region or leave the queue on the owner's behalf: same uid, or root."""

    request_id: Number
    region_id: str


class Register(Message, frozen=True, kw_only=True, tag="register"):
    """A server registers one of its kernels; exactly one pidfd travels with the message."""

    request_id: Number
    label: str = ""
    kernel_id: str = ""
    notebook: str = ""


class Ungate(Message, frozen=True, kw_only=True, tag="ungate"):
    """Thaw and unlock one process now, because a signal is about to be sent to it. Answered by `Done`."""

    request_id: Number
    pid: Number
    why: str = "signal"


class GetStatus(Message, frozen=True, kw_only=True, tag="get_status"):
    """Ask for a `Status`."""

    request_id: Number
    recent: Number = 20


class GetHistory(Message, frozen=True, kw_only=True, tag="get_history"):
    """Ask for a `History`, newest first."""

    request_id: Number
    limit: Number = 100
    device: str = ""
    label: str = ""
    verdict: str = ""
    since: float = 0.0
    """Unix time; 0 is no bound."""


class GetReport(Message, frozen=True, kw_only=True, tag="get_report"):
    """Ask for one report by its region id: a `History` of one, or `Failed` with `not_found`."""

    request_id: Number
    region_id: str


class Subscribe(Message, frozen=True, kw_only=True, tag="subscribe"):
    """Ask for a `Status`, then an `Event` per change."""

    request_id: Number


class Ping(Message, frozen=True, kw_only=True, tag="ping"):
    """Is somebody there? Answered by `Pong`."""

    request_id: Number


# --- Coordinator to client ------------------------------------------------------------------------------------


class Welcome(Message, frozen=True, kw_only=True, tag="welcome"):
    """Answer to `Hello`."""

    version: int
    coordinator_pid: int
    guardian_pid: int | None
    system: bool
    devices: tuple[DeviceInfo, ...]
    timeout_s: float
    max_hold_s: float


class Queued(Message, frozen=True, kw_only=True, tag="queued"):
    """Where a request stands; sent when that changes."""

    request_id: int
    region_id: str
    position: int
    waits_for: str
    """A sentence: who holds it, since when, until when."""
    eta_s: float | None = None


class Granted(Message, frozen=True, kw_only=True, tag="granted"):
    """The region is the caller's. It answers with `Confirm`."""

    request_id: int
    region_id: str
    epoch: int
    started_at: float
    wait_s: float
    enter_s: float
    max_hold_s: float
    cpu_policy: EffectiveCpuPolicy
    cores: tuple[int, ...] = ()
    """Cores to pin the measuring thread to (`isolate`); empty: do not pin."""
    reserved: tuple[int, ...] = ()
    """Every core that is reserved on this host, for whichever device: others are kept off them."""
    siblings: tuple[SiblingReport, ...] = ()


class Released(Message, frozen=True, kw_only=True, tag="released"):
    """Answer to `Release`."""

    request_id: int
    report: RegionReport


class Revoked(Message, frozen=True, kw_only=True, tag="revoked"):
    """Exclusivity ended before the region did; its siblings go on already."""

    region_id: str
    code: str
    detail: str


class Failed(Message, frozen=True, kw_only=True, tag="failed"):
    """A request came to nothing. ``code`` is stable; ``detail`` says what happened and what to do."""

    request_id: int
    code: Literal[
        "bad_request",
        "cancelled",
        "device_not_found",
        "ended",
        "not_exclusive",
        "not_found",
        "not_permitted",
        "other_coordinator",
        "unsupported",
        "wait_timeout",
    ]
    detail: str


class Goodbye(Message, frozen=True, kw_only=True, tag="goodbye"):
    """The coordinator was told to end. Without this, the end of a connection means that it died."""


class Done(Message, frozen=True, kw_only=True, tag="done"):
    """A request without a result of its own was carried out."""

    request_id: int


class Pong(Message, frozen=True, kw_only=True, tag="pong"):
    """Answer to `Ping`."""

    request_id: int


class History(Message, frozen=True, kw_only=True, tag="history"):
    """Reports, newest first."""

    request_id: int
    reports: tuple[RegionReport, ...]


class Event(Message, frozen=True, kw_only=True, tag="event"):
    """Something changed. ``status`` events carry a fresh snapshot; the others say what happened."""

    kind: Literal[
        "queued", "granted", "released", "revoked", "left", "registered", "gone", "notice", "status"
    ]
    at: float
    """Unix time."""
    region_id: str = ""
    pid: int = 0
    label: str = ""
    notebook: str = ""
    devices: tuple[str, ...] = ()
    detail: str = ""
    report: RegionReport | None = None
    status: Status | None = None


ToCoordinator: TypeAlias = (
    Hello
    | Acquire
    | Confirm
    | Release
    | Cancel
    | End
    | Register
    | Ungate
    | GetStatus
    | GetHistory
    | GetReport
    | Subscribe
    | Ping
)
FromCoordinator: TypeAlias = (
    Welcome
    | Queued
    | Granted
    | Released
    | Revoked
    | Failed
    | Done
    | Goodbye
    | Pong
    | Status
    | History
    | Event
)


# --- Jupyter server to browser ---------------------------------------------------------------------------------


class Unavailable(Message, frozen=True, kw_only=True, tag="unavailable"):
    """Nobody coordinates this host now; what was shown before is stale. A `Status` follows once that changes."""

    at: float
    """Unix time."""
    detail: str
    """Why, and what to do."""


class ErrorBody(Part, frozen=True, kw_only=True):
    """Body of every REST answer that is an error."""

    message: str
    what_to_do: str
    code: str


ToBrowser: TypeAlias = Status | Event | Unavailable
"""What the event socket carries: a snapshot, then changes."""


# --- Coordinator and guardian -----------------------------------------------------------------------------------


class ProcessRef(Part, frozen=True, kw_only=True):
    """A process that cannot be confused with a later one of the same pid."""

    pid: int
    start_ticks: int
    """Field 22 of `/proc/PID/stat`."""
    inode: int
    """`st_ino` of its pidfd: unique from Linux 6.9 on, 0 below that."""


class Watch(Message, frozen=True, kw_only=True, tag="watch"):
    """A participant the guardian should keep ready for gating; its pidfd travels with the message."""

    process: ProcessRef
    uid: int
    label: str
    protected: bool = False
    """Never gated: a Jupyter server, the coordinator, whatever the configuration protects."""
    cores: tuple[int, ...] = ()
    """Not empty: reserved cores that this participant's threads are to stay off, from now on."""


class Waits(Message, frozen=True, kw_only=True, tag="waits"):
    """A participant began to wait for its region: what CPU it uses from now on tells whether it truly waits."""

    process: ProcessRef


class Forget(Message, frozen=True, kw_only=True, tag="forget"):
    """A watched process is gone or left."""

    process: ProcessRef


class SiblingRequest(Part, frozen=True, kw_only=True):
    """A participant other than the owner, as the coordinator knows it."""

    process: ProcessRef
    holds_region: bool = False
    waiting: bool = False
    """Blocked in our client (`Waits` was sent): locked, but frozen only if it uses CPU nevertheless."""
    counts: bool = True
    """False: registered, but not a participant by the configured rule; it is observed."""
    contexts: tuple[str, ...] | None = None
    """UUIDs it has GPU contexts on, as far as known; None: unknown."""


class Enter(Message, frozen=True, kw_only=True, tag="enter"):
    """Gate the siblings of a region. Answered by `Entered`."""

    region_id: str
    epoch: int
    owner: ProcessRef
    devices: tuple[str, ...]
    vendor: Vendor
    cpu_policy: EffectiveCpuPolicy
    foreign: Foreign
    peers: tuple[int, ...]
    siblings: tuple[SiblingRequest, ...]
    max_hold_s: float
    driver_lock: bool
    """The driver's lock was probed and works here."""


class Entered(Message, frozen=True, kw_only=True, tag="entered"):
    """All siblings are gated, or `error` says why not (then nothing of this region is gated any more)."""

    region_id: str
    siblings: tuple[SiblingReport, ...]
    costs: EntryCosts
    error: str = ""


class StartLease(Message, frozen=True, kw_only=True, tag="start_lease"):
    """The owner confirmed: its time runs."""

    region_id: str


class Audit(Message, frozen=True, kw_only=True, tag="audit"):
    """Read the evidence while all is still gated. Answered by `Audited`."""

    region_id: str


class Audited(Message, frozen=True, kw_only=True, tag="audited"):
    """Answer to `Audit`."""

    region_id: str
    audit: GuardianAudit


class Leave(Message, frozen=True, kw_only=True, tag="leave"):
    """Thaw, then unlock, what no other region gates. Answered by `Left`."""

    region_id: str


class Left(Message, frozen=True, kw_only=True, tag="left"):
    """Answer to `Leave`; ``failed`` names what could not be undone, and why."""

    region_id: str
    failed: tuple[tuple[int, str], ...] = ()


class Spare(Message, frozen=True, kw_only=True, tag="spare"):
    """Take one process out of every gate now. Answered by `Spared`."""

    pid: int
    why: str


class Spared(Message, frozen=True, kw_only=True, tag="spared"):
    """Answer to `Spare`; the regions it was gated for."""

    pid: int
    regions: tuple[str, ...]


class Undone(Message, frozen=True, kw_only=True, tag="undone"):
    """The guardian undid a region unasked: its deadline passed, or its owner died."""

    region_id: str
    code: Literal["max_hold", "owner_died", "coordinator_late"]
    detail: str


class Heartbeat(Message, frozen=True, kw_only=True, tag="heartbeat"):
    """Sent both ways while anything is gated; 0.5 s late means dead or stopped."""

    count: int


HEARTBEAT_S = 0.1
LATE_S = 0.5
"""A peer that was not heard for so long while somebody is gated is taken for dead or stopped."""


class Ready(Message, frozen=True, kw_only=True, tag="ready"):
    """The guardian has the journal's lock and has replayed it."""

    pid: int
    replayed: int
    """Processes it had to set free."""


class Warned(Message, frozen=True, kw_only=True, tag="warned"):
    """Something the administrator or the user should read in status and log."""

    detail: str


ToGuardian: TypeAlias = Watch | Waits | Forget | Enter | StartLease | Audit | Leave | Spare | Heartbeat
FromGuardian: TypeAlias = Ready | Entered | Audited | Left | Spared | Undone | Heartbeat | Warned


def as_builtins(value: Part | Message) -> dict[str, Any]:
    """The plain dictionary that JSON of ``value`` parses to."""
    plain: dict[str, Any] = msgspec.to_builtins(value)
    return plain
