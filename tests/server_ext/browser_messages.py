"""Messages as a browser gets them: one fixture that Python writes and TypeScript reads.

``python -m tests.server_ext.browser_messages`` writes the file that the tests of `labextension/` parse.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from krex_jupyter.protocol import (
    DeviceEvidence,
    DeviceInfo,
    DeviceStatus,
    ErrorBody,
    Event,
    Evidence,
    GuardianAudit,
    History,
    HolderStatus,
    OwnerEvidence,
    ParticipantStatus,
    Reason,
    RegionReport,
    ReportDevice,
    SiblingReport,
    Status,
    Unavailable,
    WaiterStatus,
    as_builtins,
)

FILE = Path(__file__).parents[2] / "labextension" / "src" / "__tests__" / "messages.json"

GPU = "GPU-1b2c"
NOW = 1_800_000_000.0


def messages() -> dict[str, Any]:
    """All of them by name, as JSON parses to."""
    found: dict[str, Any] = {
        "status": status(),
        "event": Event(
            kind="released",
            at=NOW + 0.5,
            region_id="r3",
            pid=103,
            label="agent",
            notebook="agent-3.ipynb",
            devices=(GPU,),
            report=report("r3", pid=103, started_at=NOW, verdict="contended"),
        ),
        "status_event": Event(kind="status", at=NOW + 0.6, status=status(recent=())),
        "notice": Event(kind="notice", at=NOW + 0.7, detail="The guardian was restarted."),
        "unavailable": Unavailable(at=NOW + 1.0, detail="The coordinator ended; another is being started."),
        "history": History(request_id=7, reports=(report("r2"), report("r1", started_at=NOW - 900.0))),
        "error": ErrorBody(
            message="No region has that id.", what_to_do="See krex/api/status.", code="not_found"
        ),
    }
    plain = {name: as_builtins(message) for name, message in found.items()}
    parsed: dict[str, Any] = json.loads(json.dumps(plain))
    return parsed


def status(recent: tuple[RegionReport, ...] | None = None) -> Status:
    """A GPU that one notebook holds, two wait for, and one stands paused."""
    return Status(
        coordinator_pid=10,
        guardian_pid=11,
        system=False,
        socket="/run/user/1000/krex/krex.sock",
        uptime_s=120.0,
        devices=(
            DeviceStatus(
                device=DeviceInfo(
                    uuid=GPU,
                    name="NVIDIA H200",
                    vendor="nvidia",
                    index=0,
                    memory_bytes=141_000_000_000,
                    gates=("driver-lock", "quiesce", "observe"),
                ),
                holder=HolderStatus(
                    region_id="r4",
                    epoch=4,
                    pid=101,
                    uid=1000,
                    label="tile 32",
                    notebook="work/tune-matmul.ipynb",
                    devices=(GPU,),
                    cpu_policy="isolate",
                    phase="held",
                    held_s=0.5,
                    remaining_s=29.5,
                    siblings_gated=3,
                    siblings_observed=1,
                ),
                queue=(
                    waiter(102, 1, "softmax.ipynb", eta_s=0.6),
                    waiter(103, 2, "agent-3.ipynb", eta_s=None),
                ),
            ),
            DeviceStatus(
                device=DeviceInfo(uuid="cpu", name="AMD EPYC", vendor="cpu", gates=("freeze",)),
                holder=None,
                queue=(),
            ),
        ),
        participants=(
            participant(100, "", "Jupyter server 8888", protected=True),
            participant(101, "k1", "tune-matmul", notebook="work/tune-matmul.ipynb", state="holding"),
            participant(102, "k2", "softmax", notebook="softmax.ipynb", state="queued"),
            participant(103, "k3", "agent-3", notebook="agent-3.ipynb", state="queued"),
            participant(
                104, "k4", "idle", notebook="idle.ipynb", state="paused", paused_by="r4", paused_s=0.4
            ),
            participant(105, "k5", "train-lora", joined=False),
        ),
        recent=(report("r2"),) if recent is None else recent,
        notices=("History is kept in memory: its directory cannot be written.",),
    )


def waiter(pid: int, position: int, notebook: str, eta_s: float | None) -> WaiterStatus:
    return WaiterStatus(
        pid=pid,
        uid=1000,
        label=notebook.removesuffix(".ipynb"),
        notebook=notebook,
        devices=(GPU,),
        position=position,
        waited_s=0.3,
        eta_s=eta_s,
        waits_for="tune-matmul.ipynb, which has held it for 0.5 s",
        region_id=f"w{pid}",
    )


def participant(pid: int, kernel_id: str, label: str, **more: Any) -> ParticipantStatus:
    return ParticipantStatus(pid=pid, uid=1000, label=label, kernel_id=kernel_id, **{"joined": True, **more})


def report(
    region_id: str, *, pid: int = 101, started_at: float = NOW - 10.0, verdict: Any = "clean"
) -> RegionReport:
    device = ReportDevice(id="cuda:0", uuid=GPU, name="NVIDIA H200", vendor="nvidia")
    clean = verdict == "clean"
    return RegionReport(
        region_id=region_id,
        epoch=3,
        device=device,
        devices=(device,),
        label="tile 32",
        pid=pid,
        notebook="work/tune-matmul.ipynb" if pid == 101 else "agent-3.ipynb",
        uid=1000,
        started_at=started_at,
        wait_s=0.31,
        enter_s=0.006,
        held_s=0.12,
        exit_s=0.002,
        cpu_policy="isolate",
        siblings=(
            SiblingReport(pid=104, label="idle", gate="driver-lock", drain_s=0.0006),
            SiblingReport(pid=105, label="train-lora", gate="observe"),
        ),
        verdict=verdict,
        reasons=()
        if clean
        else (Reason(code="foreign_gpu_work", detail="train-lora (pid 105) is not paused."),),
        evidence=Evidence(
            owner=OwnerEvidence(run_queue_delay_s=0.0001, wall_s=0.12, synchronised=True),
            siblings=GuardianAudit(ran=((104, 0.01),), observed_cpu_s={105: 0.02}),
            device={GPU: DeviceEvidence(processes_before=(101, 104), processes_after=(101, 104))},
        ),
    )


def text() -> str:
    """The file."""
    return json.dumps(messages(), indent=2) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
    sys.exit(0)
