"""Device timers and `measure` on a real NVIDIA GPU, against kernels that take a known time.

The kernel spins on the GPU's own nanosecond timer, so that its duration is known whatever the clock does.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import krex_jupyter as krex
from krex_jupyter.runtime.timers import CupyTimer
from tests.scripts import ROOT

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("place")]

SPIN = r"""
extern "C" __global__ void spin(long long nanoseconds) {
    long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do { asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); } while (now - start < nanoseconds);
}
"""
"""`%globaltimer` steps by up to 1 us on some GPUs: a spin may last that much longer."""


@pytest.fixture
def cupy() -> Any:
    return pytest.importorskip("cupy", reason="cupy is not installed")


@pytest.fixture
def torch() -> Any:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    return torch


@pytest.fixture
def spin(cupy: Any) -> Callable[[float], None]:
    kernel = cupy.RawKernel(SPIN, "spin")

    def launch(duration_s: float) -> None:
        kernel((1,), (1,), (cupy.int64(round(duration_s * 1e9)),))

    launch(1e-6)
    cupy.cuda.Device().synchronize()
    return launch


@pytest.mark.parametrize("duration_s", [2e-4, 1e-3, 1e-2])
def test_events_read_a_known_duration(spin: Callable[[float], None], duration_s: float) -> None:
    found = krex.measure(spin, (duration_s,), device="cuda:0", timer="cupy")
    assert found.median_s == pytest.approx(duration_s, rel=0.02, abs=8e-6)
    assert found.timer == "device events (cupy)"
    assert found.cache == "cold"
    assert found.batch == 1
    assert found.clock_mhz is not None
    assert all(clock > 0 for clock in found.clock_mhz)
    assert found.temperature_c is not None


def test_events_and_the_host_clock_agree_on_a_long_call(spin: Callable[[float], None]) -> None:
    by_events = krex.measure(spin, (5e-3,), device="cuda:0", timer="cupy")
    by_host = krex.measure(spin, (5e-3,), device="cuda:0", timer="host")
    # It may take several calls per sample: waiting for the device is coarser than its events.
    assert by_host.timer.startswith("host clock + device-wide synchronise")
    assert by_host.median_s == pytest.approx(by_events.median_s, rel=0.05)


def test_a_short_kernel_is_launched_from_a_graph(spin: Callable[[float], None]) -> None:
    found = krex.measure(spin, (1e-5,), device="cuda:0", timer="cupy")
    assert found.timer == "device events (cupy), graph"
    assert found.batch > 1
    assert found.cache == "warm"
    assert any("Warm cache" in note for note in found.notes)
    assert found.median_s == pytest.approx(1e-5, rel=0.5)


def test_work_on_another_stream_is_noticed(cupy: Any, spin: Callable[[float], None]) -> None:
    side = cupy.cuda.Stream(non_blocking=True)

    def elsewhere() -> None:
        with side:
            spin(2e-3)

    found = krex.measure(elsewhere, device="cuda:0", timer="cupy", max_time=0.3)
    assert "other_stream" in {reason.code for reason in found.reasons}
    assert found.verdict != "clean"


def test_work_on_the_current_stream_is_not_taken_for_another(
    cupy: Any, spin: Callable[[float], None]
) -> None:
    with cupy.cuda.Stream(non_blocking=True):
        found = krex.measure(spin, (1e-3,), device="cuda:0", timer="cupy")
    assert "other_stream" not in {reason.code for reason in found.reasons}
    assert found.median_s == pytest.approx(1e-3, rel=0.02)


def test_a_call_that_launches_nothing_is_noticed(cupy: Any) -> None:
    found = krex.measure(lambda: None, device="cuda:0", timer="cupy", max_time=0.3)
    assert "nothing_launched" in {reason.code for reason in found.reasons}


def test_the_framework_is_found_by_the_arrays(cupy: Any) -> None:
    a = cupy.ones(1 << 22, dtype=cupy.float32)
    assert krex.measure(cupy.sum, (a,), device="cuda:0", max_time=0.3).timer.startswith(
        "device events (cupy)"
    )


def test_torch_is_found_by_its_tensors_and_timed_on_its_stream(torch: Any) -> None:
    a = torch.randn(2048, 2048, device="cuda")
    found = krex.measure(torch.matmul, (a, a), device="cuda:0", timer="auto")
    assert found.timer.startswith("device events (torch)")
    starts = [torch.cuda.Event(enable_timing=True) for _ in range(50)]
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(50)]
    for start, end in zip(starts, ends, strict=True):
        start.record()
        torch.matmul(a, a)
        end.record()
    torch.cuda.synchronize()
    by_hand_s = statistics.median(s.elapsed_time(e) for s, e in zip(starts, ends, strict=True)) / 1e3
    assert found.median_s == pytest.approx(by_hand_s, rel=0.2)


def test_a_short_torch_call_is_launched_from_a_graph(torch: Any) -> None:
    a = torch.ones(1024, device="cuda")
    found = krex.measure(torch.add, (a, a), device="cuda:0")
    assert found.timer == "device events (torch), graph"
    assert found.median_s is not None
    assert 1e-7 < found.median_s < 2e-5


def test_a_call_that_cannot_be_captured_is_batched_and_says_so(torch: Any) -> None:
    a = torch.ones(16, device="cuda")
    found = krex.measure(lambda: a.sum().item(), device="cuda:0", timer="torch")
    assert "graph" not in found.timer
    assert found.batch == 1 or any("No graph" in note for note in found.notes)


def test_a_triton_kernel_is_timed_through_torch(torch: Any, tmp_path: Any) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    script = tmp_path / "with_triton.py"
    script.write_text(
        """
import torch, triton, triton.language as tl
import krex_jupyter as krex

@triton.jit
def double(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)

x = torch.ones(1 << 24, device="cuda")
out = torch.empty_like(x)
def run(x, out):
    double[(triton.cdiv(x.numel(), 1024),)](x, out, x.numel(), BLOCK=1024)
found = krex.measure(run, (x, out), device="cuda:0", check=lambda _: bool((out == 2).all()))
assert found.valid, found
# On a fast device the call is below 50 us, and is then launched from a graph.
assert found.timer.startswith("device events (torch)"), found
print("ok", found.median_s)
"""
    )
    done = subprocess.run(
        [sys.executable, str(script)], cwd=ROOT, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ok")


def test_numba_is_timed_on_its_stream(tmp_path: Any) -> None:
    """In a process of its own, as Numba may need an older NumPy than the rest."""
    script = tmp_path / "with_numba.py"
    script.write_text(
        """
import sys
try:
    from numba import cuda
    import numpy as np
    assert cuda.is_available()
except Exception as error:
    print("skip", error)
    sys.exit(0)
import krex_jupyter as krex

@cuda.jit
def double(x, out):
    at = cuda.grid(1)
    if at < x.size:
        out[at] = x[at] * 2

x = cuda.to_device(np.ones(1 << 24, dtype=np.float32))
out = cuda.device_array_like(x)
try:
    double[x.size // 256, 256](x, out)
except AttributeError as error:
    print("skip", f"this Numba does not go with NumPy {np.__version__}: {error}")
    sys.exit(0)
found = krex.measure(lambda: double[x.size // 256, 256](x, out), device="cuda:0")
assert found.timer == "device events (numba)", found
print("ok", found.median_s)
"""
    )
    done = subprocess.run(
        [sys.executable, str(script)], cwd=ROOT, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    if done.stdout.startswith("skip"):
        pytest.skip(f"Numba cannot be used here: {done.stdout[5:].strip()}")
    assert done.stdout.startswith("ok")


def test_a_candidate_that_breaks_the_context_is_named(tmp_path: Any, cupy: Any) -> None:
    """In a process of its own, whose context is broken for good afterwards."""
    script = tmp_path / "breaks.py"
    script.write_text(
        """
import cupy
import krex_jupyter as krex
bad = cupy.RawKernel('extern "C" __global__ void bad(int* p) { *p = 1; }', "bad")
a = cupy.ones(1 << 22)
def breaks():
    bad((1,), (1,), (cupy.int64(8),))
candidates = {"good": lambda: a.sum(), "breaks": breaks, "late": lambda: a.max()}
found = krex.compare(candidates, device="cuda:0", timer="cupy")
errors = {candidate.name: candidate.error for candidate in found.candidates}
assert "illegal" in errors["breaks"].lower() or "CUDA" in errors["breaks"], errors
assert "restart the kernel" in errors["breaks"], errors
assert "'breaks' broke the device context" in errors["late"], errors
print("ok", flush=True)
import os
os._exit(0)
"""
    )
    done = subprocess.run(
        [sys.executable, str(script)], cwd=ROOT, capture_output=True, text=True, timeout=110
    )
    assert done.stdout.startswith("ok"), done.stderr


def test_the_held_time_of_a_quiet_kernel_is_short(spin: Callable[[float], None]) -> None:
    found = krex.measure(spin, (5e-4,), device="cuda:0", timer="cupy")
    assert found.region is not None
    assert found.region.held_s < 0.5


def test_the_timer_knows_its_step_and_an_empty_sample(cupy: Any) -> None:
    cupy.zeros(1)
    timer = CupyTimer()
    timer.prepare()
    assert 1e-9 <= timer.resolution_s <= 2e-6
    assert 0.0 <= timer.empty_s < 2e-5
