"""Where the time of entering and leaving a region goes, beside idle CUDA siblings; and what single calls cost.

    python benchmarks/entry_profile.py [--siblings 8] [--regions 100]

Prints medians in milliseconds: the caller's own clock around entry and exit, the coordinator's part of each, the
guardian's locking, freezing and verifying, and the NVML and driver calls that evidence could be read with.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median

SIBLING = """
import sys
from krex_jupyter.runtime import client
import cupy
a = cupy.ones(1 << 20)
cupy.cuda.get_current_stream().synchronize()
client.join(label="sibling")
print("ready", flush=True)
sys.stdin.read()
"""


def main() -> None:
    """Start the siblings, measure, end them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--siblings", type=int, default=8)
    parser.add_argument("--regions", type=int, default=100)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="krex-profile-") as directory:
        os.environ["KREX_SOCKET"] = f"{directory}/krex.sock"
        siblings = [
            subprocess.Popen([sys.executable, "-c", SIBLING], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for _ in range(arguments.siblings)
        ]
        try:
            for sibling in siblings:
                assert sibling.stdout is not None
                sibling.stdout.readline()
            calls([sibling.pid for sibling in siblings])
            regions(arguments.regions)
        finally:
            from krex_jupyter.runtime import client

            client.leave()
            for sibling in siblings:
                sibling.kill()
                sibling.wait()


def regions(count: int) -> None:
    """Regions 20 ms apart, under both CPU policies."""
    import cupy

    import krex_jupyter as krex
    from krex_jupyter.enforcement.cpus import full_cpuset, pinned
    from krex_jupyter.runtime.synchronize import synchronise

    cupy.ones(8).sum().item()
    full = full_cpuset()

    def pin() -> None:
        with pinned(threading.get_native_id(), sorted(full)[-2:], full):
            pass

    print(f"pin and unpin              {cost_ms(pin):8.3f} ms")
    print(f"synchronise                {cost_ms(lambda: synchronise(('any',))):8.3f} ms")
    for policy in ("isolate", "freeze"):
        rows: dict[str, list[float]] = {}
        for _ in range(count):
            manager = krex.exclusive("cuda:0", cpu=policy)
            asked_s = time.perf_counter()
            region = manager.__enter__()
            granted_s = time.perf_counter()
            while time.perf_counter() - granted_s < 0.002:
                pass
            ended_s = time.perf_counter()
            manager.__exit__(None, None, None)
            answered_s = time.perf_counter()
            report = region.report
            assert report is not None
            costs = report.enter_costs
            for name, value_s in (
                ("enter", granted_s - asked_s),
                ("  coordinator enter", report.enter_s),
                ("  waited", report.wait_s),
                ("  lock", costs.lock_s),
                ("  freeze", costs.freeze_s),
                ("  verify", costs.verify_s),
                ("exit", answered_s - ended_s),
                ("  coordinator exit", report.exit_s),
                ("both", granted_s - asked_s + answered_s - ended_s),
            ):
                rows.setdefault(name, []).append(value_s * 1e3)
            time.sleep(0.02)
        print(f"--- {policy}: {report.verdict} {[reason.code for reason in report.reasons]}")
        for name, values in rows.items():
            values.sort()
            print(f"{name:22} p50 {median(values):7.3f}   p99 {values[int(0.99 * (len(values) - 1))]:7.3f}")


def calls(pids: list[int]) -> None:
    """What single calls cost, and locking all siblings on 1, 2, 4 and 8 threads."""
    import pynvml

    from krex_jupyter.enforcement.driver_lock import LibcudaLock

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    lock = LibcudaLock()
    pid = pids[0]
    lock.state(pid)

    def lock_and_unlock() -> None:
        lock.lock(pid, 1.0)
        lock.unlock(pid)

    for threads in (1, 2, 4, 8):
        with ThreadPoolExecutor(threads) as pool:
            values: list[float] = []
            for _ in range(30):
                started_s = time.perf_counter()
                list(pool.map(lambda pid: lock.lock(pid, 1.0), pids))
                values.append((time.perf_counter() - started_s) * 1e3)
                list(pool.map(lock.unlock, pids))
                time.sleep(0.02)
        print(f"lock {len(pids)} on {threads} threads      {median(values):8.3f} ms")

    for name, call in (
        ("NVML compute processes", lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(handle)),
        ("NVML graphics processes", lambda: pynvml.nvmlDeviceGetGraphicsRunningProcesses(handle)),
        ("NVML memory info", lambda: pynvml.nvmlDeviceGetMemoryInfo(handle)),
        ("NVML utilisation", lambda: pynvml.nvmlDeviceGetUtilizationRates(handle)),
        ("NVML SM clock", lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)),
        ("NVML temperature", lambda: pynvml.nvmlDeviceGetTemperature(handle, 0)),
        ("driver state", lambda: lock.state(pid)),
        ("driver lock + unlock", lock_and_unlock),
    ):
        print(f"{name:26} {cost_ms(call):8.3f} ms")


def cost_ms(call: Callable[[], object], times: int = 40) -> float:
    """Median cost of a call."""
    values: list[float] = []
    for _ in range(times):
        started_s = time.perf_counter()
        call()
        values.append((time.perf_counter() - started_s) * 1e3)
    return median(values)


if __name__ == "__main__":
    main()
