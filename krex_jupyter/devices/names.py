"""Which device a user means: ``cuda:N``, ``hip:N``, ``cpu``, a UUID or a part of one, or nothing at all.

``cuda:0`` is the *framework's* device 0 in *that process*, which is not the driver's index 0: the vendors'
runtimes hide devices by ``CUDA_VISIBLE_DEVICES`` and its like, and CUDA numbers the rest fastest first unless
``CUDA_DEVICE_ORDER=PCI_BUS_ID``. A region on the wrong GPU would protect nothing and look clean, so where the
environment alone does not decide the order, CUDA itself is asked: in this process if it has started it
already (the environment may have changed since), else in a child (starting CUDA here would break later
forks).

`resolve` is pure; `resolve_here` adds this process. MIG slices stand for their parent GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from krex_jupyter.devices import CPU_UUID, default_of, listing
from krex_jupyter.errors import DeviceNotFound
from krex_jupyter.protocol import DeviceInfo

MigParent = Callable[[str], str | None]
"""From a MIG slice's UUID to its GPU's; None where it is unknown."""

_RTLD_NOLOAD = 4
"""Of dlfcn.h on Linux; Python's os module has no name for it."""
_CHILD_TIMEOUT_S = 20.0
_SHORTEST_BEGINNING = 4
_FRAMEWORK_NAME = re.compile(r"(cuda|hip)(?::(\d+))?", re.IGNORECASE)
_MIG_OLD_FORM = re.compile(r"MIG-(GPU-[0-9a-fA-F-]+)/\d+/\d+")
_LEADING_INTEGER = re.compile(r"[+-]?\d+")


def resolve_here(wanted: str | None, devices: Sequence[DeviceInfo]) -> DeviceInfo:
    """The device that ``wanted`` means in this process.

    Blocks up to 20 s where CUDA must be asked in a child (0.3 s as a rule), else for microseconds.

    Raises:
        DeviceNotFound: there is none, or this process may not see it.
    """
    environment = dict(os.environ)
    name = _effective_name(wanted, environment)
    visible: tuple[str, ...] | None = None
    if name is None or _FRAMEWORK_NAME.fullmatch(name):
        visible = cuda_order_here()
        if visible is None and must_ask_cuda(devices, environment, _nvidia_device_files()):
            visible = _cuda_order_in_child(environment)
    return resolve(wanted, devices, environment, cuda_order=visible, mig_parent=_mig_parent)


def resolve(
    wanted: str | None,
    devices: Sequence[DeviceInfo],
    environment: Mapping[str, str],
    *,
    cuda_order: Sequence[str] | None = None,
    mig_parent: MigParent = lambda _: None,
) -> DeviceInfo:
    """The device that ``wanted`` means in a process with this environment.

    ``devices`` are the host's (the coordinator's list), ``cuda_order`` the UUIDs in CUDA's own order where
    CUDA was asked. None means ``KREX_DEVICE``, else the first GPU that the process sees, else the cpu.

    Raises:
        DeviceNotFound: there is none, or the process may not see it; the message says what there is.
    """
    name = _effective_name(wanted, environment)
    if name is None:
        return _default(devices, environment, cuda_order, mig_parent)
    source = f"{name!r}" if wanted is not None else f"{name!r} (from KREX_DEVICE)"
    if name.lower() == CPU_UUID:
        return _by_uuid(CPU_UUID, source, devices, mig_parent)
    framework = _FRAMEWORK_NAME.fullmatch(name)
    if framework is None:
        return _by_uuid(name, source, devices, mig_parent)
    number = int(framework[2] or 0)
    vendor = _vendor_of(framework[1].lower(), devices)
    visible = _visible(vendor, devices, environment, cuda_order, mig_parent)
    if number < len(visible):
        return visible[number]
    raise DeviceNotFound(_not_visible(source, vendor, visible, devices, environment))


def must_ask_cuda(
    devices: Sequence[DeviceInfo], environment: Mapping[str, str], device_files: int | None
) -> bool:
    """Whether the environment alone does not tell CUDA's order.

    So it is with GPUs of different models unless the order is PCI's, and in a container that was given only
    some of the host's GPUs (``device_files``: how many ``/dev/nvidiaN`` are here; None: unknown).
    """
    gpus = [device for device in devices if device.vendor == "nvidia"]
    if len(gpus) < 2:
        return False
    mixed = len({gpu.name for gpu in gpus}) > 1
    by_pci = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    return (mixed and not by_pci) or (device_files is not None and 0 < device_files < len(gpus))


def visible_uuids(value: str | None, uuids: Sequence[str], mig_parent: MigParent) -> list[str]:
    """What ``CUDA_VISIBLE_DEVICES=value`` leaves of ``uuids``, in its order; None is "unset".

    As CUDA 13.0 was seen to read it. The first entry says whether the list is of numbers (the digits at the
    start count, so ``1abc`` is 1) or of UUIDs (``GPU-`` and at least one more character of an unambiguous
    beginning, or a MIG slice); it ends at the first entry that is not such a one or names no device; and if a
    device before that end is named twice, nothing at all is visible.
    """
    if value is None:
        return list(uuids)
    entries = [entry.strip() for entry in value.split(",")]
    by_number = _LEADING_INTEGER.match(entries[0]) is not None
    named: list[str] = []
    chosen: list[str] = []
    for entry in entries:
        uuid = _numbered(entry, uuids) if by_number else _identified(entry, uuids, mig_parent)
        if uuid is None:
            break
        # Two slices of one GPU are two devices.
        name = entry if entry.startswith("MIG-") else uuid
        if name in named:
            return []
        named.append(name)
        chosen.append(uuid)
    return chosen


def parent_of_slice(slice_uuid: str, uuids: Sequence[str], mig_parent: MigParent) -> str | None:
    """The GPU of a MIG slice: from its name in the old form (``MIG-GPU-…/1/0``), else as NVML tells."""
    old_form = _MIG_OLD_FORM.fullmatch(slice_uuid)
    parent = old_form[1] if old_form else mig_parent(slice_uuid)
    return parent if parent in uuids else None


def cuda_order_here() -> tuple[str, ...] | None:
    """UUIDs of CUDA's devices 0, 1, … in this process; None where CUDA has not been started in it.

    Looks only: loads no library, starts nothing, creates no context.
    """
    try:
        libcuda = ctypes.CDLL("libcuda.so.1", mode=_RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None
    return _cuda_order(libcuda)


def _cuda_order(libcuda: ctypes.CDLL) -> tuple[str, ...] | None:
    count = ctypes.c_int()
    if libcuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return None
    uuids: list[str] = []
    for number in range(count.value):
        device, octets = ctypes.c_int(), (ctypes.c_ubyte * 16)()
        if libcuda.cuDeviceGet(ctypes.byref(device), number) != 0:
            return None
        # The first version of the call names the physical GPU, the second the MIG slice where there is one. A
        # slice stands for its GPU here, so the first is the one wanted.
        ask = getattr(libcuda, "cuDeviceGetUuid", None) or libcuda.cuDeviceGetUuid_v2
        if ask(ctypes.byref(octets), device) != 0:
            return None
        uuids.append(_uuid_text(bytes(octets)))
    return tuple(uuids)


def _uuid_text(octets: bytes) -> str:
    digits = octets.hex()
    return f"GPU-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def _cuda_order_in_child(environment: Mapping[str, str]) -> tuple[str, ...] | None:
    try:
        answer = subprocess.run(
            [sys.executable, "-m", __name__],
            env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_CHILD_TIMEOUT_S,
            check=True,
        )
        order = json.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return None if order is None else tuple(order)


def _nvidia_device_files() -> int | None:
    try:
        return sum(1 for path in Path("/dev").iterdir() if re.fullmatch(r"nvidia\d+", path.name))
    except OSError:
        return None


def _mig_parent(slice_uuid: str) -> str | None:
    # Here and not above: a kernel that uses no MIG need not load NVML.
    from krex_jupyter.devices.nvidia import NvidiaBackend

    return NvidiaBackend().parent_of(slice_uuid)


def _effective_name(wanted: str | None, environment: Mapping[str, str]) -> str | None:
    name = environment.get("KREX_DEVICE", "") if wanted is None else wanted
    return name.strip() or None


def _default(
    devices: Sequence[DeviceInfo],
    environment: Mapping[str, str],
    cuda_order: Sequence[str] | None,
    mig_parent: MigParent,
) -> DeviceInfo:
    """The first GPU that this process sees; where everything is hidden from it, the cpu."""
    for vendor in ("nvidia", "amd"):
        visible = _visible(vendor, devices, environment, cuda_order, mig_parent)
        if visible:
            return visible[0]
    return default_of([device for device in devices if device.vendor == "cpu"] or list(devices))


def _vendor_of(framework: str, devices: Sequence[DeviceInfo]) -> str:
    """PyTorch and CuPy on ROCm say ``cuda:N`` too, and so that is AMD's where there is no NVIDIA GPU."""
    if framework == "hip":
        return "amd"
    vendors = {device.vendor for device in devices}
    return "amd" if "amd" in vendors and "nvidia" not in vendors else "nvidia"


def _visible(
    vendor: str,
    devices: Sequence[DeviceInfo],
    environment: Mapping[str, str],
    cuda_order: Sequence[str] | None,
    mig_parent: MigParent,
) -> list[DeviceInfo]:
    """The vendor's devices in the order in which the process numbers them."""
    by_uuid = {device.uuid: device for device in devices if device.vendor == vendor}
    if vendor == "nvidia" and cuda_order is not None:
        return [by_uuid[uuid] for uuid in cuda_order if uuid in by_uuid]
    uuids: Sequence[str] = list(by_uuid)
    for variable in _variables(vendor, environment):
        uuids = visible_uuids(environment.get(variable), uuids, mig_parent)
    return [by_uuid[uuid] for uuid in uuids]


def _variables(vendor: str, environment: Mapping[str, str]) -> tuple[str, ...]:
    """The variables that hide a vendor's devices, each applied to what the one before has left."""
    if vendor == "nvidia":
        return ("CUDA_VISIBLE_DEVICES",)
    # ROCm's lower layer, then HIP, which takes CUDA's variable only where its own is not set.
    return (
        "ROCR_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in environment else "CUDA_VISIBLE_DEVICES",
    )


def _numbered(entry: str, uuids: Sequence[str]) -> str | None:
    number = _LEADING_INTEGER.match(entry)
    index = -1 if number is None else int(number[0])
    return uuids[index] if 0 <= index < len(uuids) else None


def _identified(entry: str, uuids: Sequence[str], mig_parent: MigParent) -> str | None:
    if entry.startswith("MIG-"):
        return parent_of_slice(entry, uuids, mig_parent)
    if not entry.startswith("GPU-") or entry == "GPU-":
        return None
    matches = [uuid for uuid in uuids if uuid.lower().startswith(entry.lower())]
    return matches[0] if len(matches) == 1 else None


def _by_uuid(name: str, source: str, devices: Sequence[DeviceInfo], mig_parent: MigParent) -> DeviceInfo:
    by_uuid = {device.uuid.lower(): device for device in devices}
    if name.lower() in by_uuid:
        return by_uuid[name.lower()]
    if name.startswith("MIG-"):
        parent = parent_of_slice(name, [device.uuid for device in devices], mig_parent)
        if parent is not None:
            return by_uuid[parent.lower()]
    matches = [device for device in devices if device.vendor != "cpu" and _begins(device.uuid, name)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise DeviceNotFound(
            f"{source} is the beginning of several UUIDs: {listing(matches)}. Write more of the one you mean."
        )
    raise DeviceNotFound(
        f"There is no device {source}. This host has: {listing(devices)}. "
        f"Write cuda:N or hip:N (as your framework numbers them), cpu, or a UUID."
    )


def _begins(uuid: str, beginning: str) -> bool:
    """With or without the ``GPU-`` in front, whatever the case.

    At least four characters of the rest: ``0`` and ``1`` are meant as numbers, and no name should work on one
    machine because its UUID happens to begin so.
    """
    beginning = beginning.lower().removeprefix("gpu-")
    rest = uuid.lower().removeprefix("gpu-")
    return len(beginning) >= _SHORTEST_BEGINNING and rest.startswith(beginning)


def _not_visible(
    source: str,
    vendor: str,
    visible: Sequence[DeviceInfo],
    devices: Sequence[DeviceInfo],
    environment: Mapping[str, str],
) -> str:
    present = [device for device in devices if device.vendor == vendor]
    if not present:
        maker = {"nvidia": "NVIDIA", "amd": "AMD"}[vendor]
        return (
            f"There is no device {source}: KREX sees no {maker} GPU on this host. "
            f"It has: {listing(devices)}. "
            f"Where one should be: does nvidia-smi list it? device='cpu' measures on the host."
        )
    settings = [
        f"{name}={environment[name]!r}" for name in _variables(vendor, environment) if name in environment
    ]
    framework = "cuda" if vendor == "nvidia" else "hip"
    numbered = ", ".join(
        f"{framework}:{number} = {info.name} ({info.uuid})" for number, info in enumerate(visible)
    )
    cause = f"; {' and '.join(settings)} hides the rest" if settings and len(visible) < len(present) else ""
    return (
        f"This process cannot see {source}. It sees: {numbered or 'no GPU'}{cause}. "
        f"This host has: {listing(present)}. "
        f"Use one that it sees, or change the variable before the framework starts."
    )


if __name__ == "__main__":
    # A child that asks CUDA for its order and dies with it.
    _order = None
    with contextlib.suppress(OSError, AttributeError):
        _libcuda = ctypes.CDLL("libcuda.so.1")
        if _libcuda.cuInit(0) == 0:
            _order = _cuda_order(_libcuda)
    sys.stdout.write(json.dumps(_order))
