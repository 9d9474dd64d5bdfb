"""What a user's name for a device means in a process with this environment."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from krex_jupyter.devices.names import must_ask_cuda, resolve, resolve_here, visible_uuids
from krex_jupyter.errors import DeviceNotFound
from krex_jupyter.protocol import DeviceInfo

A = "GPU-7cd69a69-1f3d-32e1-9e8e-d34d8b1e49ab"
B = "GPU-7cd6ffff-aaaa-bbbb-cccc-000000000001"
C = "GPU-11111111-aaaa-bbbb-cccc-000000000002"
SLICE_1, SLICE_2 = "MIG-5e6e6f0a-0000-5000-8000-000000000001", "MIG-5e6e6f0a-0000-5000-8000-000000000002"

CPU = DeviceInfo(uuid="cpu", name="A processor", vendor="cpu")


def gpu(uuid: str, index: int, name: str = "NVIDIA H200", vendor: str = "nvidia") -> DeviceInfo:
    return DeviceInfo(uuid=uuid, name=name, vendor=vendor, index=index)  # type: ignore[arg-type]


HOST = [gpu(A, 0), gpu(B, 1), gpu(C, 2), CPU]
AMD_HOST = [gpu("GPU-aa00", 0, "MI300X", "amd"), gpu("GPU-bb00", 1, "MI300X", "amd"), CPU]


def parent_of(slice_uuid: str) -> str | None:
    return {SLICE_1: B, SLICE_2: B}.get(slice_uuid)


def uuid_of(wanted: str | None, environment: dict[str, str] | None = None, **options: object) -> str:
    return resolve(wanted, HOST, environment or {}, mig_parent=parent_of, **options).uuid  # type: ignore[arg-type]


# Seen on a machine with one GPU (driver 580.159, CUDA 13.0): how many devices each value leaves.
@pytest.mark.parametrize(
    ("value", "count"),
    [
        (None, 1),
        ("", 0),
        ("-1", 0),
        ("0", 1),
        ("0,0", 0),
        ("0,-1", 1),
        ("1,0", 0),
        ("0abc", 1),
        (" 0", 1),
        ("+0", 1),
        ("0 ,1", 1),
        ("GPU", 0),
        ("GPU-", 0),
        (A, 1),
        (A[:8], 1),
        (A[:8].lower(), 0),
        (A.upper(), 1),
        (f"{A},{A}", 0),
        (f"0,{A}", 1),
        (f"{A},0", 1),
        ("0,foo", 1),
        ("MIG-x", 0),
        (A[4:12], 0),
        ("00", 1),
        ("0,1,0", 1),
        ("0x0", 1),
        ("0,0,5", 0),
    ],
)
def test_the_visible_devices_are_those_that_cuda_was_seen_to_show(value: str | None, count: int) -> None:
    assert visible_uuids(value, [A], parent_of) == [A] * count


@given(order=st.permutations([A, B, C]), length=st.integers(0, 3), junk=st.sampled_from(["-1", "9", "x", ""]))
def test_numbers_choose_and_order_devices_until_the_first_invalid_entry(
    order: list[str], length: int, junk: str
) -> None:
    uuids = [A, B, C]
    chosen = order[:length]
    value = ",".join([*(str(uuids.index(uuid)) for uuid in chosen), junk, "0"])
    assert visible_uuids(value, uuids, parent_of) == chosen


@given(order=st.permutations([A, B, C]), length=st.integers(1, 3), cut=st.integers(9, len(A)))
def test_uuids_and_their_unambiguous_beginnings_choose_devices(
    order: list[str], length: int, cut: int
) -> None:
    chosen = order[:length]
    assert visible_uuids(",".join(uuid[:cut] for uuid in chosen), [A, B, C], parent_of) == chosen


@given(value=st.text(alphabet="0123-+,GPUMIGabcdef 7", max_size=30))
def test_any_text_gives_known_devices_each_once(value: str) -> None:
    chosen = visible_uuids(value, [A, B, C], parent_of)
    assert set(chosen) <= {A, B, C}
    assert len(chosen) == len(set(chosen))


def test_an_ambiguous_beginning_ends_the_list() -> None:
    assert visible_uuids(f"{C},GPU-7cd,{B}", [A, B, C], parent_of) == [C]


def test_slices_of_one_gpu_are_two_devices_that_mean_their_parent() -> None:
    assert visible_uuids(f"{SLICE_1},{SLICE_2}", [A, B], parent_of) == [B, B]
    assert uuid_of("cuda:1", {"CUDA_VISIBLE_DEVICES": f"{SLICE_1},{SLICE_2}"}) == B


def test_a_slice_in_the_old_form_names_its_parent() -> None:
    assert uuid_of(f"MIG-{C}/1/0") == C


def test_without_settings_cuda_numbers_are_the_drivers() -> None:
    assert [uuid_of(f"cuda:{number}") for number in range(3)] == [A, B, C]


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "CUDA:0", " cuda:0 "])
def test_spellings_of_the_first_cuda_device(name: str) -> None:
    assert uuid_of(name, {"CUDA_VISIBLE_DEVICES": "2,0"}) == C


def test_cuda_itself_is_believed_over_the_environment() -> None:
    assert uuid_of("cuda:0", {"CUDA_VISIBLE_DEVICES": "1"}, cuda_order=(C, A)) == C
    assert uuid_of(None, {}, cuda_order=(C, A)) == C


@pytest.mark.parametrize("beginning", [B, B[:9], B.lower(), B[4:12], "GPU-7CD6F", "7cd6f"])
def test_a_uuid_or_its_unambiguous_beginning_names_a_device(beginning: str) -> None:
    assert uuid_of(beginning) == B


def test_a_uuid_names_a_device_that_this_process_hides_from_itself() -> None:
    assert uuid_of(C, {"CUDA_VISIBLE_DEVICES": "0"}) == C


def test_nothing_means_the_configured_device_then_the_first_visible_gpu_then_the_cpu() -> None:
    assert uuid_of(None, {"KREX_DEVICE": "cuda:2"}) == C
    assert uuid_of("cuda:0", {"KREX_DEVICE": "cuda:2"}) == A
    assert uuid_of(None, {"KREX_DEVICE": ""}) == A
    assert uuid_of(None, {"CUDA_VISIBLE_DEVICES": "1"}) == B
    assert uuid_of(None, {"CUDA_VISIBLE_DEVICES": ""}) == "cpu"
    assert resolve(None, AMD_HOST, {}).uuid == "GPU-aa00"
    assert resolve(None, [CPU], {}).uuid == "cpu"


def test_cpu_is_the_host() -> None:
    assert uuid_of("cpu") == "cpu"
    assert uuid_of("CPU") == "cpu"


def test_on_an_amd_host_cuda_numbers_mean_amd_devices() -> None:
    assert resolve("cuda:1", AMD_HOST, {}).uuid == "GPU-bb00"
    assert resolve("hip:1", AMD_HOST, {}).uuid == "GPU-bb00"


def test_rocm_hides_by_its_lower_layer_first_and_then_by_hip() -> None:
    environment = {"ROCR_VISIBLE_DEVICES": "1,0", "HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0"}
    assert resolve("hip:0", AMD_HOST, environment).uuid == "GPU-aa00"
    del environment["HIP_VISIBLE_DEVICES"]
    assert resolve("hip:0", AMD_HOST, environment).uuid == "GPU-bb00"


def test_a_hidden_device_is_refused_with_what_is_visible_and_why() -> None:
    with pytest.raises(DeviceNotFound) as refused:
        uuid_of("cuda:1", {"CUDA_VISIBLE_DEVICES": "2"})
    message = str(refused.value)
    assert f"cuda:0 = NVIDIA H200 ({C})" in message
    assert "CUDA_VISIBLE_DEVICES='2' hides the rest" in message
    assert A in message


def test_a_device_of_a_missing_vendor_is_refused_with_what_exists() -> None:
    with pytest.raises(DeviceNotFound, match=r"no AMD GPU on this host.*NVIDIA H200"):
        uuid_of("hip:0")
    with pytest.raises(DeviceNotFound, match=r"no NVIDIA GPU.*It has: cpu"):
        resolve("cuda:0", [CPU], {})


def test_a_wrong_default_is_blamed_on_its_variable() -> None:
    with pytest.raises(DeviceNotFound, match="from KREX_DEVICE"):
        uuid_of(None, {"KREX_DEVICE": "cuda:7"})


@pytest.mark.parametrize(
    "name", ["0", "7cd", "gpu", "GPU-", "tpu:0", "cuda:", "cuda:-1", "GPU-ffff", "cuda:0:1"]
)
def test_a_name_of_nothing_is_refused_with_how_to_write_it(name: str) -> None:
    with pytest.raises(DeviceNotFound, match=r"cuda:N or hip:N"):
        uuid_of(name)


def test_an_ambiguous_beginning_is_refused_with_its_candidates() -> None:
    with pytest.raises(DeviceNotFound) as refused:
        uuid_of("GPU-7cd6")
    assert A in str(refused.value)
    assert B in str(refused.value)
    assert C not in str(refused.value)


def test_cuda_must_be_asked_where_different_gpus_are_ordered_by_speed() -> None:
    mixed = [gpu(A, 0, "NVIDIA T4"), gpu(B, 1, "NVIDIA H200")]
    assert must_ask_cuda(mixed, {}, 2)
    assert must_ask_cuda(mixed, {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, 2)
    assert not must_ask_cuda(mixed, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, 2)
    assert not must_ask_cuda(HOST, {}, 3)
    assert not must_ask_cuda([CPU], {}, 0)


def test_cuda_must_be_asked_in_a_container_that_has_only_some_of_the_gpus() -> None:
    assert must_ask_cuda(HOST, {}, 1)
    assert not must_ask_cuda(HOST, {}, None)
    assert not must_ask_cuda(HOST, {}, 0)


def test_where_cuda_cannot_be_asked_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    mixed = [gpu(A, 0, "NVIDIA T4"), gpu(B, 1, "NVIDIA H200"), CPU]
    monkeypatch.delenv("KREX_DEVICE", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert resolve_here("cuda:0", mixed).uuid == B
