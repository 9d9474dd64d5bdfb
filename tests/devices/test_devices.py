"""Discovery: which devices there are, and that a missing driver is a sentence instead of an error."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from krex_jupyter.devices import Devices, discover
from krex_jupyter.devices.cpu import CpuBackend, usable_core_count, usable_cores
from krex_jupyter.devices.nvidia import NvidiaBackend
from krex_jupyter.errors import DeviceNotFound
from tests.simulated_driver import SimulatedBackend


def test_the_cpu_is_always_there_and_last() -> None:
    devices = discover()
    assert devices.infos[-1].uuid == "cpu"
    assert devices.infos[-1].name
    assert devices.infos[-1].memory_bytes
    assert devices.infos[-1].gates == ("freeze", "observe")


def test_named_backends_take_the_place_of_the_vendors(tmp_path: Path) -> None:
    devices = discover([f"tests.simulated_driver:SimulatedBackend:{tmp_path}"])
    assert [info.uuid for info in devices.infos] == ["GPU-sim-0", "GPU-sim-1", "cpu"]
    assert devices.default().uuid == "GPU-sim-0"
    assert devices.backend_of("GPU-sim-1").vendor == "nvidia"
    assert devices.backend_of("cpu").vendor == "cpu"


def test_without_a_gpu_the_default_is_the_cpu() -> None:
    assert Devices([CpuBackend()]).default().uuid == "cpu"


def test_an_unknown_uuid_is_refused_with_what_exists(tmp_path: Path) -> None:
    with pytest.raises(DeviceNotFound, match="Simulated GPU"):
        Devices([SimulatedBackend(tmp_path)]).backend_of("GPU-other")


def test_a_withdrawn_gate_is_gone_and_says_why(tmp_path: Path) -> None:
    devices = Devices([SimulatedBackend(tmp_path), CpuBackend()])
    devices.withdraw_gate("nvidia", "driver-lock", "The trial hung.")
    assert devices.infos[0].gates == ("freeze", "observe")
    assert "The trial hung." in devices.infos[0].note
    assert devices.infos[-1].note == ""


def test_an_unreadable_process_list_is_none_and_not_empty(tmp_path: Path) -> None:
    assert SimulatedBackend(tmp_path / "gone").processes("GPU-sim-0") is None
    assert NvidiaBackend().processes("GPU-00000000-0000-0000-0000-000000000000") is None


def test_a_host_without_nvidia_says_so_and_raises_nothing() -> None:
    backend = NvidiaBackend()
    if backend.devices():
        pytest.skip("needs a host without an NVIDIA GPU")
    assert backend.unavailable.endswith("no NVIDIA GPU is seen.")
    assert backend.driver_version() == ""
    assert backend.mps_clients("GPU-x") is None
    assert backend.parent_of("MIG-x") is None
    assert backend.numa_node("GPU-x") is None


def test_usable_cores_follow_the_mask() -> None:
    assert usable_cores() == frozenset(os.sched_getaffinity(0))
    assert 1 <= usable_core_count() <= len(usable_cores())


@pytest.mark.gpu
def test_a_gpu_is_found_with_its_driver_and_memory() -> None:
    backend = NvidiaBackend()
    info = backend.devices()[0]
    assert info.uuid.startswith("GPU-")
    assert info.memory_bytes
    assert "driver-lock" in info.gates
    assert backend.driver_version()
    assert backend.parent_of(info.uuid) == info.uuid
    assert backend.processes(info.uuid) is not None
    assert backend.mps_clients(info.uuid) is not None
