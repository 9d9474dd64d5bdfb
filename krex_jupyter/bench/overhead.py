"""`krex bench overhead`: what entering and leaving a region costs, with real notebooks' kernels as siblings.

Everything is its own: coordinator, kernels and the measuring process; nobody else's work is touched. The base
case has no siblings. Times are the caller's, around ``__enter__`` and ``__exit__``; of the former the time spent
queued is taken off and shown by itself (``wait_ms``): with nobody else in the queue it is the rest that siblings
get between regions back to back. The coordinator's own figures stand beside them.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from krex_jupyter.errors import KrexError
from krex_jupyter.protocol import DeviceInfo

from .kernels import Kernel
from .machine import machine
from .private import PrivateCoordinator, private_coordinator

State: TypeAlias = Literal["idle", "busy"]

SPACED_S = 0.02
"""Regions "20 ms apart": at least this long between two of them."""

_BUSY_CPU = "while True:\n    pass"
_BUSY_CUDA = """
kernel = cupy.RawKernel(r'''
extern "C" __global__ void spin(long long clocks) {
    const long long end = clock64() + clocks;
    while (clock64() < end) { }
}''', 'spin')
while True:
    for _ in range(4):
        kernel((1,), (1,), (1_000_000,))
    cupy.cuda.get_current_stream().synchronize()
"""
_CONTEXT_CUDA = "import cupy; cupy.zeros(1)"
_CASE_S = 300.0


@dataclass(frozen=True)
class Case:
    """One row to measure."""

    siblings: int
    state: State
    spacing_s: float
    """0 is back to back."""


def cases(siblings: int) -> list[Case]:
    """The base case, then idle, then busy siblings; each spaced and back to back."""
    counts: Iterable[tuple[int, State]] = [(0, "idle")]
    if siblings:
        counts = [(0, "idle"), (siblings, "idle"), (siblings, "busy")]
    return [Case(count, state, spacing_s) for count, state in counts for spacing_s in (SPACED_S, 0.0)]


def measure_overhead(
    *, siblings: int, device: str | None, regions: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """The whole benchmark, as the document that `--json` prints.

    Raises:
        KrexError: the device is none of this host, or a process did not do as it should. All are ended.
    """
    started_at = time.time()
    rows = []
    with private_coordinator() as coordinator, contextlib.ExitStack() as kernels:
        found, device_id = _choose(coordinator.devices, device)
        say(f"device {found.name}; starting {siblings} ipykernels")
        running: list[Kernel] = []
        for case in cases(siblings):
            if case.siblings and not running:
                running = _start(coordinator, siblings, device_id, kernels)
            if case.state == "busy" and case.spacing_s:
                for kernel in running:
                    kernel.begin(_BUSY_CUDA if device_id != "cpu" else _BUSY_CPU)
            row = summary(case, _measure(coordinator, case, device_id, regions))
            rows.append(row)
            say(describe(row))
    return {
        "version": 1,
        "command": "overhead",
        "started_at": started_at,
        "machine": machine(),
        "device": {
            "uuid": found.uuid,
            "name": found.name,
            "vendor": found.vendor,
            "gates": list(found.gates),
        },
        "rows": rows,
    }


def summary(case: Case, measured: dict[str, Any]) -> dict[str, Any]:
    """A row: percentiles in milliseconds. Pure."""
    enter_s = [enter - wait for enter, wait in zip(measured["enter_s"], measured["wait_s"], strict=True)]
    total_s = [enter + leave for enter, leave in zip(enter_s, measured["exit_s"], strict=True)]
    gates = measured["gates"]
    return {
        "siblings": case.siblings,
        "state": case.state,
        "gate": max(gates, key=gates.__getitem__) if gates else "none",
        "cpu_policy": measured["cpu_policy"],
        "spacing": "back to back" if case.spacing_s == 0 else f"{case.spacing_s * 1e3:.0f} ms",
        "regions": len(total_s),
        "enter_ms": percentiles_ms(enter_s),
        "exit_ms": percentiles_ms(measured["exit_s"]),
        "total_ms": percentiles_ms(total_s),
        "wait_ms": percentiles_ms(measured["wait_s"]),
        "coordinator_enter_ms": percentiles_ms(measured["coordinator_enter_s"]),
        "coordinator_exit_ms": percentiles_ms(measured["coordinator_exit_s"]),
        "siblings_seen": measured["siblings"],
        "frozen_per_region": measured["frozen"] / len(total_s) if total_s else 0.0,
        "verdicts": measured["verdicts"],
        "errors": measured["errors"],
    }


def percentiles_ms(values_s: Sequence[float]) -> dict[str, float | None]:
    """p50 and p99 (nearest rank) in milliseconds; None where there are no values. Pure."""
    if not values_s:
        return {"p50": None, "p99": None}
    ordered = sorted(values_s)
    # Ceiling of share * n, in integers: a float share of 100 values would round up to the next rank.
    ranks = {name: -(-percent * len(ordered) // 100) - 1 for name, percent in (("p50", 50), ("p99", 99))}
    return {name: ordered[rank] * 1e3 for name, rank in ranks.items()}


def describe(row: dict[str, Any]) -> str:
    """One line for the terminal. Pure."""
    parts = "  ".join(
        f"{name} {_ms(row[f'{name}_ms']['p50'])} / {_ms(row[f'{name}_ms']['p99'])}"
        for name in ("enter", "exit", "total")
    )
    who = f"{row['siblings']} {row['state']}" if row["siblings"] else "none"
    return f"{who:>8}  {row['spacing']:<12} {row['gate']:<11} {row['cpu_policy']:<7} {parts}  ms (p50 / p99)"


def _ms(value: float | None) -> str:
    return "     -" if value is None else f"{value:6.2f}"


def _choose(devices: Sequence[DeviceInfo], wanted: str | None) -> tuple[DeviceInfo, str]:
    gpu = next((device for device in devices if device.vendor == "nvidia"), None)
    cpu = next((device for device in devices if device.vendor == "cpu"), None)
    wanted = wanted or ("cpu" if gpu is None else "cuda:0")
    found = cpu if wanted == "cpu" else gpu if wanted.startswith("cuda:") else None
    if found is None:
        known = ", ".join(device.name for device in devices) or "none"
        raise KrexError(
            f"overhead is measured on 'cpu' or 'cuda:N', not on {wanted!r}; devices here: {known}"
        )
    return found, wanted


def _start(
    coordinator: PrivateCoordinator, count: int, device_id: str, owned: contextlib.ExitStack
) -> list[Kernel]:
    started = [
        owned.enter_context(Kernel.start(coordinator.directory, str(at), coordinator.environment))
        for at in range(count)
    ]
    for kernel in started:
        kernel.ready()
        kernel.run("%load_ext krex_jupyter")
        if device_id != "cpu":
            kernel.run(_CONTEXT_CUDA)
    coordinator.wait_for(kernel.pid for kernel in started)
    return started


def _measure(coordinator: PrivateCoordinator, case: Case, device_id: str, regions: int) -> dict[str, Any]:
    asked = json.dumps({"device": device_id, "regions": regions, "spacing_s": case.spacing_s})
    log = Path(coordinator.directory) / "owner.log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "krex_jupyter.bench.owner"],
            env=coordinator.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        try:
            answer, _ = process.communicate(asked.encode(), timeout=_CASE_S)
        except BaseException:
            process.kill()
            process.wait()
            raise
    if process.returncode:
        tail = log.read_text(encoding="utf-8", errors="replace")[-2000:]
        raise KrexError(f"the measuring process ended with {process.returncode}:\n{tail}")
    return dict(json.loads(answer))
