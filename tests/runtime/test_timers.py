"""Which timer a call gets, and how it is batched. Device timers: `tests/runtime/test_measure_gpu.py`."""

from __future__ import annotations

import functools
import sys
import time
import types
from collections.abc import Iterator

import pytest

from krex_jupyter.errors import KrexError
from krex_jupyter.protocol import DeviceInfo
from krex_jupyter.runtime.timers import GraphRefused, HostTimer, choose, framework_of, plan

CPU = DeviceInfo(uuid="cpu", name="cpu", vendor="cpu")
GPU = DeviceInfo(uuid="GPU-1", name="NVIDIA H200", vendor="nvidia", index=0)


def nothing() -> None:
    """Called by tests."""


@pytest.fixture
def no_frameworks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in list(sys.modules):
        if name.partition(".")[0] in ("torch", "cupy", "numba"):
            monkeypatch.delitem(sys.modules, name)
    return


def test_the_cpu_is_timed_by_the_host_clock() -> None:
    assert choose("auto", CPU, [], [nothing]).name == "host clock"


@pytest.mark.parametrize("timer", ["events", "torch", "cupy"])
def test_a_device_timer_on_the_cpu_is_refused_and_not_replaced(timer: str) -> None:
    with pytest.raises(KrexError, match="timer='host'"):
        choose(timer, CPU, [], [nothing])


def test_an_unknown_timer_is_refused_with_what_exists() -> None:
    with pytest.raises(ValueError, match="auto, host, events, torch, cupy, numba"):
        choose("stopwatch", CPU, [], [nothing])


@pytest.mark.usefixtures("no_frameworks")
def test_a_gpu_without_a_framework_is_refused_and_not_timed_by_the_host() -> None:
    with pytest.raises(KrexError, match="timer='host'"):
        choose("auto", GPU, [], [nothing])


@pytest.mark.usefixtures("no_frameworks")
def test_a_framework_that_is_not_loaded_is_refused() -> None:
    with pytest.raises(KrexError, match="cupy is not loaded"):
        choose("cupy", GPU, [], [nothing])


@pytest.mark.usefixtures("no_frameworks")
def test_a_framework_that_is_half_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = types.ModuleType("torch")
    torch.cuda = types.ModuleType("torch.cuda")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch.cuda", torch.cuda)
    with pytest.raises(KrexError, match="no usable events"):
        choose("torch", GPU, [], [nothing])


def device_array(module: str) -> object:
    kind = type("Array", (), {"__module__": module, "__cuda_array_interface__": {}, "is_cuda": True})
    return kind()


@pytest.mark.parametrize(
    ("module", "framework"),
    [("torch", "torch"), ("cupy", "cupy"), ("numba.cuda.cudadrv.devicearray", "numba"), ("numpy", "")],
)
def test_the_framework_is_read_off_the_arrays(module: str, framework: str) -> None:
    array = device_array(module)
    assert framework_of([array]) == framework
    assert framework_of([1, {"x": [array]}]) == framework


def test_arrays_that_a_function_closes_over_are_found(
    no_frameworks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = device_array("cupy")

    def closes_over() -> object:
        return array

    with pytest.raises(KrexError, match="cupy is not loaded"):
        choose("auto", GPU, [], [closes_over])
    with pytest.raises(KrexError, match="cupy is not loaded"):
        choose("auto", GPU, [], [functools.partial(nothing, array)])


def test_the_host_clock_reads_a_known_delay() -> None:
    timer = HostTimer()
    timer.prepare()

    def spin() -> None:
        end_s = time.perf_counter() + 2e-3
        while time.perf_counter() < end_s:
            pass

    samples = timer.sample(spin, 3, batch=1, cache="warm", setup=None, expected_s=2e-3)
    assert min(samples) == pytest.approx(2e-3, rel=0.05)


def test_setup_runs_before_each_call_and_untimed() -> None:
    order: list[str] = []
    HostTimer().sample(
        lambda: order.append("call"),
        3,
        batch=1,
        cache="warm",
        setup=lambda: order.append("setup"),
        expected_s=1e-6,
    )
    assert order == ["setup", "call"] * 3


def test_long_calls_come_back_one_at_a_time_so_that_max_time_is_kept() -> None:
    def spin() -> None:
        end_s = time.perf_counter() + 6e-3
        while time.perf_counter() < end_s:
            pass

    assert len(HostTimer().sample(spin, 20, batch=1, cache="warm", setup=None, expected_s=6e-3)) == 1


def test_the_host_clock_captures_no_graphs() -> None:
    with pytest.raises(GraphRefused):
        HostTimer().graph(nothing, 10)


def test_short_calls_are_batched_and_long_ones_are_not() -> None:
    timer = HostTimer()
    timer.prepare()
    short = plan(timer, 1e-7, precision=0.005, cache="cold", has_setup=False)
    assert short.batch > 10
    assert short.cache == "warm"
    assert plan(timer, 1e-2, precision=0.005, cache="cold", has_setup=False).batch == 1


def test_setup_forbids_a_batch_and_the_result_says_so() -> None:
    timer = HostTimer()
    timer.prepare()
    planned = plan(timer, 1e-7, precision=0.005, cache="cold", has_setup=True)
    assert planned.batch == 1
    assert any("setup" in note for note in planned.notes)
