"""Regions on a real NVIDIA GPU whose driver offers the process lock."""

from __future__ import annotations

import os
import signal
import time

import pytest

import krex_jupyter as krex
from tests.conftest import Place
from tests.scripts import JOIN, Counter, Script, Scripts, wait_until

pytestmark = pytest.mark.gpu

CUDA_LOOP = (
    JOIN.replace('print("joined", flush=True)\n', "")
    + """
import mmap
import cupy
counter = memoryview(mmap.mmap(int(sys.argv[2]), 8)).cast("Q")
a = cupy.ones(1 << 22, dtype=cupy.float32)
cupy.cuda.get_current_stream().synchronize()
print("joined", flush=True)
while True:
    for _ in range(8):
        a *= 1.0001
    cupy.cuda.get_current_stream().synchronize()
    counter[0] += 1
"""
)

CUDA_IDLE = (
    JOIN.replace('print("joined", flush=True)\n', "")
    + """
import cupy
a = cupy.ones(1 << 20)
cupy.cuda.get_current_stream().synchronize()
print("joined", flush=True)
sys.stdin.read()
"""
)


def looping(scripts: Scripts) -> tuple[Script, Counter]:
    counter = Counter()
    scripts._counters.append(counter)
    script = scripts(CUDA_LOOP, "cuda loop", str(counter.fd), pass_fds=(counter.fd,))
    assert script.line(60.0) == "joined"
    return script, counter


def test_a_cuda_sibling_is_drained_blocked_and_goes_on(scripts: Scripts) -> None:
    sibling, counter = looping(scripts)
    with krex.exclusive("cuda:0", cpu="freeze") as region:
        at_start = counter.value
        end_s = time.monotonic() + 0.2
        while time.monotonic() < end_s:
            pass
        assert counter.value == at_start
    wait_until(lambda: counter.value > at_start, "the sibling goes on")
    report = region.report
    assert report is not None
    (found,) = [s for s in report.siblings if s.pid == sibling.pid]
    assert found.gate == "driver-lock"
    assert found.frozen
    assert found.drain_s is not None
    assert report.evidence.device[report.device.uuid].processes_after is not None
    assert not {reason.code for reason in report.reasons} & {
        "evidence_missing",
        "new_context",
        "foreign_gpu_work",
    }


def test_under_isolate_a_sibling_is_locked_but_not_frozen(scripts: Scripts) -> None:
    _sibling, counter = looping(scripts)
    with krex.exclusive("cuda:0", cpu="isolate") as region:
        at_start = counter.value
        end_s = time.monotonic() + 0.2
        while time.monotonic() < end_s:
            pass
        # One round may have been counted after the lock had drained it.
        assert counter.value <= at_start + 1
        assert os.sched_getaffinity(0) == set(region.cores)
    wait_until(lambda: counter.value > at_start + 1, "the sibling goes on")
    report = region.report
    assert report is not None
    assert {s.gate for s in report.siblings} == {"driver-lock"}
    assert not any(s.frozen for s in report.siblings)
    assert set(os.sched_getaffinity(0)) != set(region.cores)


def test_a_sibling_without_a_context_is_frozen_where_it_has_libcuda(scripts: Scripts) -> None:
    plain = scripts.sibling()
    loaded = scripts.sibling(
        JOIN + "import ctypes\nctypes.CDLL('libcuda.so.1')\nprint('loaded', flush=True)\nsys.stdin.read()\n"
    )
    assert loaded.line() == "loaded"
    with krex.exclusive("cuda:0", cpu="isolate") as region:
        gates = {s.pid: s.gate for s in region.siblings}
    assert gates[loaded.pid] == "freeze"
    assert gates[plain.pid] == "observe"
    assert region.report is not None
    assert "not_drained" not in {reason.code for reason in region.report.reasons}


def test_a_profiled_sibling_refuses_the_lock_and_the_report_says_so(scripts: Scripts) -> None:
    profiled = scripts.sibling(
        JOIN
        + "import torch\n"
        + "with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]):\n"
        + "    torch.ones(8, device='cuda').sum().item()\n"
        + "    print('profiling', flush=True)\n"
        + "    sys.stdin.read()\n"
    )
    assert profiled.line(90.0) == "profiling"
    with krex.exclusive("cuda:0", cpu="isolate") as region:
        pass
    (found,) = [s for s in region.siblings if s.pid == profiled.pid]
    assert found.gate == "observe"
    assert found.error
    assert region.report is not None
    assert region.report.verdict != "clean"
    assert "not_drained" in {reason.code for reason in region.report.reasons}


def test_a_stranger_with_a_context_is_named(scripts: Scripts) -> None:
    stranger = scripts("import sys, cupy\ncupy.ones(8).sum(); print('up', flush=True); sys.stdin.read()")
    assert stranger.line(60.0) == "up"
    # Held by another process than this one, whose own child the stranger would be.
    holder, region_id = scripts.holder("cuda:0")
    holder.say("leave")
    assert holder.line().startswith("left")
    report = krex.report(region_id)
    assert report.verdict != "clean"
    assert str(stranger.pid) in " ".join(reason.detail for reason in report.reasons)


@pytest.mark.parametrize("victim", ["guardian", "coordinator", "both"])
def test_death_unlocks_a_locked_sibling(scripts: Scripts, place: Place, victim: str) -> None:
    _sibling, counter = looping(scripts)
    with krex.exclusive("cuda:0", cpu="isolate") as region:
        pids = {
            "guardian": [place.guardian()],
            "coordinator": [place.coordinator()],
            "both": [place.guardian(), place.coordinator()],
        }[victim]
        at_kill = counter.value
        started_s = time.monotonic()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        # A new guardian needs cuInit (up to 0.2 s) before it can unlock.
        wait_until(lambda: counter.value > at_kill + 1, "the sibling goes on", 3.0)
        print(f"{victim} killed: sibling unlocked after {time.monotonic() - started_s:.2f} s")
    assert region.report is not None
    assert region.report.verdict == "revoked"


def test_ctrl_c_while_synchronising_comes_at_once(scripts: Scripts) -> None:
    script = scripts(
        "import os, signal, sys, threading, time\n"
        "import cupy, krex_jupyter as krex\n"
        "spin = cupy.RawKernel(r'''extern \"C\" __global__ void spin(long long n) "
        "{ long long t = clock64(); while (clock64() - t < n); }''', 'spin')\n"
        "spin((1,), (1,), (1000,)); cupy.cuda.get_current_stream().synchronize()\n"
        "sent = []\n"
        "def interrupt():\n"
        "    sent.append(time.monotonic()); os.kill(os.getpid(), signal.SIGINT)\n"
        "try:\n"
        "    with krex.exclusive('cuda:0') as region:\n"
        "        spin((1,), (1,), (4_000_000_000,))\n"
        "        threading.Timer(0.3, interrupt).start()\n"
        "except KeyboardInterrupt:\n"
        "    print(time.monotonic() - sent[0], region.report.verdict, flush=True)\n"
        "sys.stdin.read()\n"
    )
    delay, verdict = script.line(60.0).split()
    assert float(delay) < 0.2
    assert verdict != "clean"
