"""A real server, real kernels and a real coordinator: what is registered, shown, ended, and survives."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tornado.httpclient import HTTPClientError
from traitlets.config import Config

from krex_jupyter.launch import start_coordinator
from krex_jupyter.locate import Location
from krex_jupyter.server_ext.extension import KrexExtension
from krex_jupyter.server_ext.processes import Process

from .marks import needs_entry_point
from .waiting import eventually

JOIN = "from krex_jupyter.runtime.client import join; join(label='sibling')"
HOLD_ONCE = "import krex_jupyter as krex\nwith krex.exclusive('cpu', label='short'): pass"
HOLD = """
import sys
import krex_jupyter as krex
with krex.exclusive("cpu", max_hold=20, label=sys.argv[1]) as region:
    print(region.region_id, flush=True)
    sys.stdin.readline()
"""


async def fetched(request: Any) -> Any:
    return json.loads((await request).body)


async def status(jp_fetch: Any) -> Any:
    return await fetched(jp_fetch("krex", "api", "status"))


async def failed(request: Any) -> tuple[int, Any]:
    with pytest.raises(HTTPClientError) as caught:
        await request
    assert caught.value.response is not None
    return caught.value.code, json.loads(caught.value.response.body)


async def connection_of(extension: KrexExtension) -> Any:
    await eventually(
        lambda: extension._link is not None and (extension._link.connected or None),
        "a connection to the coordinator",
    )
    return extension._link


async def start_session(jp_fetch: Any, path: str, kernel_name: str | None = None) -> str:
    body = {"path": path, "name": path, "type": "notebook", "kernel": {"name": kernel_name}}
    session = await fetched(jp_fetch("api", "sessions", method="POST", body=json.dumps(body)))
    kernel_id: str = session["kernel"]["id"]
    return kernel_id


async def participant(jp_fetch: Any, kernel_id: str) -> Any:
    async def look() -> Any:
        try:
            seen = await status(jp_fetch)
        except HTTPClientError:
            return None
        found = [entry for entry in seen["participants"] if entry["kernel_id"] == kernel_id]
        return found[0] if found else None

    return await eventually(look, f"kernel {kernel_id} is a participant")


def process_of(jp_serverapp: Any, kernel_id: str) -> Process:
    process = Process.open(jp_serverapp.kernel_manager.get_kernel(kernel_id).provisioner.pid)
    assert process is not None
    return process


async def run_in(jp_serverapp: Any, kernel_id: str, code: str) -> None:
    client = jp_serverapp.kernel_manager.get_kernel(kernel_id).client()
    client.start_channels()
    try:
        await client.wait_for_ready(timeout=30)
        answer = await client.execute_interactive(code, timeout=30, output_hook=lambda _: None)
        assert answer["content"]["status"] == "ok", answer["content"]
    finally:
        client.stop_channels()


@asynccontextmanager
async def region_held_elsewhere(
    label: str = "elsewhere",
) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    """Another process holds the cpu device, which freezes every participant of this host."""
    holder = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", HOLD, label), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert holder.stdout is not None
    assert holder.stdin is not None
    try:
        region_id = (await asyncio.wait_for(holder.stdout.readline(), 20)).decode().strip()
        assert region_id
        yield region_id, holder
    finally:
        if holder.returncode is None:
            holder.stdin.close()
            try:
                await asyncio.wait_for(holder.wait(), 5)
            except TimeoutError:
                holder.kill()
                await holder.wait()


async def test_a_fresh_server_shows_its_host(
    jp_fetch: Any, extension: KrexExtension, krex_socket: Any
) -> None:
    await connection_of(extension)
    seen = await status(jp_fetch)
    assert seen["type"] == "status"
    assert seen["socket"] == str(krex_socket)
    assert seen["coordinator_pid"] > 0
    assert [entry["holder"] for entry in seen["devices"]] == [None] * len(seen["devices"])
    devices = await fetched(jp_fetch("krex", "api", "devices"))
    assert "cpu" in [device["vendor"] for device in devices]
    assert (await fetched(jp_fetch("krex", "api", "history", params={"limit": 5})))["reports"] == []


async def test_an_unknown_region_is_404_and_says_where_to_look(
    jp_fetch: Any, extension: KrexExtension
) -> None:
    await connection_of(extension)
    for method in ("GET", "DELETE"):
        code, body = await failed(jp_fetch("krex", "api", "regions", "no-such-region", method=method))
        assert code == 404
        assert body["message"]
        assert "status" in body["what_to_do"]


async def test_a_kernel_that_never_loads_krex_is_registered_with_id_and_notebook(
    jp_fetch: Any, jp_serverapp: Any, extension: KrexExtension
) -> None:
    await connection_of(extension)
    kernel_id = await start_session(jp_fetch, "tuning.ipynb")
    seen = await participant(jp_fetch, kernel_id)
    assert seen["pid"] == jp_serverapp.kernel_manager.get_kernel(kernel_id).provisioner.pid
    assert seen["notebook"].endswith("tuning.ipynb")
    assert seen["joined"] is False
    await jp_fetch("api", "kernels", kernel_id, method="DELETE")

    async def gone() -> bool:
        return all(entry["kernel_id"] != kernel_id for entry in (await status(jp_fetch))["participants"])

    await eventually(gone, "the kernel that ended is no participant")


class TestWithoutTheProvisioner:
    @pytest.fixture
    def jp_server_config(self, krex_socket: Any) -> Config:
        return Config(
            {
                "ServerApp": {"jpserver_extensions": {"krex_jupyter": True}},
                "KrexExtension": {"use_provisioner": False},
            }
        )

    async def test_kernels_are_registered_through_the_servers_events(
        self, jp_fetch: Any, jp_serverapp: Any, extension: KrexExtension
    ) -> None:
        await connection_of(extension)
        kernel_id = await start_session(jp_fetch, "plain.ipynb")
        first = await participant(jp_fetch, kernel_id)
        await jp_fetch("api", "kernels", kernel_id, "restart", method="POST", allow_nonstandard_methods=True)

        async def restarted() -> bool:
            return (await participant(jp_fetch, kernel_id))["pid"] != first["pid"]

        await eventually(restarted, "the restarted kernel is registered")
        assert any("use_provisioner" in notice for notice in (await status(jp_fetch))["notices"])

    async def test_a_frozen_kernel_is_thawed_just_after_an_interrupt(
        self, jp_fetch: Any, jp_serverapp: Any, extension: KrexExtension
    ) -> None:
        async with frozen_kernel(jp_fetch, jp_serverapp, extension) as (kernel_id, process):
            post = {"method": "POST", "allow_nonstandard_methods": True}
            await jp_fetch("api", "kernels", kernel_id, "interrupt", **post)
            await eventually(lambda: process.state != "T", "thawed after the interrupt", within_s=1.0)


class TestWithFrequentRounds:
    @pytest.fixture
    def jp_server_config(self, krex_socket: Any) -> Config:
        return Config(
            {
                "ServerApp": {"jpserver_extensions": {"krex_jupyter": True}},
                "KrexExtension": {"kernel_round_s": 0.5},
            }
        )

    async def test_a_renamed_notebook_is_followed(
        self, jp_fetch: Any, jp_serverapp: Any, extension: KrexExtension
    ) -> None:
        await connection_of(extension)
        kernel_id = await start_session(jp_fetch, "before.ipynb")
        (session,) = await fetched(jp_fetch("api", "sessions"))
        body = json.dumps({"path": "after.ipynb", "name": "after.ipynb"})
        await jp_fetch("api", "sessions", session["id"], method="PATCH", body=body)

        async def renamed() -> bool:
            seen = await participant(jp_fetch, kernel_id)
            return (seen["notebook"], seen["label"]) == ("after.ipynb", "after")

        await eventually(renamed, "the new name is known")


async def test_a_browser_gets_a_snapshot_and_then_what_changes(
    jp_fetch: Any, jp_ws_fetch: Any, extension: KrexExtension
) -> None:
    await connection_of(extension)
    socket = await jp_ws_fetch("krex", "api", "events")
    first = json.loads(await socket.read_message())
    assert first["type"] == "status"
    async with region_held_elsewhere("seen-by-browser") as (region_id, _):
        kinds: dict[str, Any] = {}
        while "granted" not in kinds:
            change = json.loads(await asyncio.wait_for(socket.read_message(), 10))
            if change["type"] == "event" and change["region_id"] == region_id:
                kinds[change["kind"]] = change
    while "released" not in kinds:
        change = json.loads(await asyncio.wait_for(socket.read_message(), 10))
        if change["type"] == "event" and change["region_id"] == region_id:
            kinds[change["kind"]] = change
    socket.close()
    assert kinds["released"]["report"]["label"] == "seen-by-browser"
    report = await fetched(jp_fetch("krex", "api", "regions", region_id))
    assert report["verdict"] == kinds["released"]["report"]["verdict"]
    later = await jp_ws_fetch("krex", "api", "events")
    assert [entry["region_id"] for entry in json.loads(await later.read_message())["recent"]] == [region_id]
    later.close()


async def test_regions_appear_on_the_servers_event_bus(
    jp_fetch: Any, jp_serverapp: Any, extension: KrexExtension
) -> None:
    await connection_of(extension)
    heard: list[tuple[str, Any]] = []

    async def listen(logger: Any, schema_id: str, data: Any) -> None:
        heard.append((schema_id.split("/")[-2], data))

    for kind in ("granted", "released"):
        jp_serverapp.event_logger.add_listener(
            schema_id=f"https://events.jupyter.org/krex_jupyter/{kind}/v1", listener=listen
        )
    async with region_held_elsewhere("on-the-bus") as (region_id, _):
        pass
    await eventually(lambda: {kind for kind, _ in heard} >= {"granted", "released"}, "both events")
    assert {data["region_id"] for _, data in heard} == {region_id}


async def test_a_region_can_be_ended_from_the_browser(jp_fetch: Any, extension: KrexExtension) -> None:
    await connection_of(extension)
    async with region_held_elsewhere() as (region_id, _):
        current = await fetched(jp_fetch("krex", "api", "regions", region_id))
        assert current["region_id"] == region_id
        assert current["phase"] == "held"
        answer = await jp_fetch("krex", "api", "regions", region_id, method="DELETE")
        assert answer.code == 204

        async def free() -> bool:
            return all(entry["holder"] is None for entry in (await status(jp_fetch))["devices"])

        await eventually(free, "the device is free")


async def test_a_region_of_this_servers_kernel_counts_as_activity(
    jp_fetch: Any, jp_serverapp: Any, extension: KrexExtension
) -> None:
    await connection_of(extension)
    kernel_id = await start_session(jp_fetch, "busy.ipynb")
    await participant(jp_fetch, kernel_id)
    assert "krex" not in jp_serverapp.web_app.settings["last_activity_times"]
    await run_in(
        jp_serverapp, kernel_id, "import krex_jupyter as krex\nwith krex.exclusive(device='cpu'): pass"
    )
    await eventually(lambda: "krex" in jp_serverapp.web_app.settings["last_activity_times"], "activity")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_a_coordinator_that_is_lost_is_replaced_and_knows_the_kernels_again(
    jp_fetch: Any, jp_serverapp: Any, extension: KrexExtension, how: signal.Signals
) -> None:
    link = await connection_of(extension)
    kernel_id = await start_session(jp_fetch, "survivor.ipynb")
    await participant(jp_fetch, kernel_id)
    first = Process.open(link.welcome.coordinator_pid)
    assert first is not None
    longest_gap_s = 0.0

    async def feel_the_loop() -> None:
        nonlocal longest_gap_s
        loop = asyncio.get_running_loop()
        while True:
            before_s = loop.time()
            await asyncio.sleep(0.01)
            longest_gap_s = max(longest_gap_s, loop.time() - before_s)

    feeling = asyncio.create_task(feel_the_loop())
    first.send(how)
    await eventually(lambda: first.has_exited, "the lost coordinator is gone")
    await eventually(
        lambda: link.connected and link.welcome.coordinator_pid != first.pid,
        "another coordinator",
        within_s=10.0,
    )
    seen = await participant(jp_fetch, kernel_id)
    feeling.cancel()
    first.close()
    assert seen["notebook"].endswith("survivor.ipynb")
    # A busy test machine delays everybody a little; starting a coordinator in the loop would take longer.
    assert longest_gap_s < 0.25


@asynccontextmanager
async def frozen_kernel(
    jp_fetch: Any, jp_serverapp: Any, extension: KrexExtension
) -> AsyncIterator[tuple[str, Process]]:
    """A kernel of this server that a real region of another process has frozen."""
    await connection_of(extension)
    kernel_id = await start_session(jp_fetch, "frozen.ipynb")
    await run_in(jp_serverapp, kernel_id, JOIN)
    process = process_of(jp_serverapp, kernel_id)
    try:
        async with region_held_elsewhere():
            await eventually(lambda: process.state == "T", f"the kernel is frozen (state {process.state})")
            yield kernel_id, process
        await eventually(lambda: process.state != "T", "nothing is left frozen")
    finally:
        process.send(signal.SIGCONT)
        process.close()


async def seconds(work: Any) -> float:
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await work
    return loop.time() - began_s


async def start_of_a_coordinator_s(krex_socket: Path) -> float:
    """How long a coordinator takes to start here and now; this one is nobody's."""
    place = Location(krex_socket.parent / "measured" / "krex.sock", "configured")
    return await seconds(asyncio.to_thread(start_coordinator, place, timeout_s=20.0))


async def test_a_frozen_kernel_is_interrupted_within_a_second(
    jp_fetch: Any, jp_serverapp: Any, extension: KrexExtension
) -> None:
    async with frozen_kernel(jp_fetch, jp_serverapp, extension) as (kernel_id, process):
        post = {"method": "POST", "allow_nonstandard_methods": True}
        assert await seconds(jp_fetch("api", "kernels", kernel_id, "interrupt", **post)) < 1.0
        await eventually(lambda: process.state != "T", "thawed for the interrupt", within_s=1.0)


@needs_entry_point
async def test_a_frozen_kernel_is_shut_down_politely_within_a_second(
    jp_fetch: Any, jp_serverapp: Any, extension: KrexExtension
) -> None:
    async with frozen_kernel(jp_fetch, jp_serverapp, extension) as (kernel_id, process):
        provisioner = jp_serverapp.kernel_manager.get_kernel(kernel_id).provisioner
        child = provisioner.process
        assert await seconds(jp_fetch("api", "kernels", kernel_id, method="DELETE")) < 1.0
        assert process.has_exited
        assert child.returncode == 0, "it was killed instead of asked"


@needs_entry_point
async def test_a_frozen_kernel_is_restarted_as_fast_as_one_that_runs(
    jp_fetch: Any, jp_serverapp: Any, extension: KrexExtension
) -> None:
    async with frozen_kernel(jp_fetch, jp_serverapp, extension) as (kernel_id, process):
        manager = jp_serverapp.kernel_manager.get_kernel(kernel_id)
        # What a restart waits for in the old process; the new one then needs its usual time to start.
        took_s = await seconds(manager.shutdown_kernel(restart=True))
        assert took_s < 1.0
        assert process.has_exited
        await manager.start_kernel(**manager._launch_args)
        assert (await participant(jp_fetch, kernel_id))["pid"] == manager.provisioner.pid


@pytest.mark.parametrize(
    "guardian_by", [signal.SIGKILL, signal.SIGSTOP], ids=["guardian-killed", "guardian-stopped"]
)
@pytest.mark.parametrize("coordinator_by", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_without_coordinator_and_guardian_a_frozen_kernel_runs_again_within_a_second(
    jp_fetch: Any,
    jp_serverapp: Any,
    extension: KrexExtension,
    krex_socket: Path,
    coordinator_by: signal.Signals,
    guardian_by: signal.Signals,
) -> None:
    async with frozen_kernel(jp_fetch, jp_serverapp, extension) as (kernel_id, process):
        seen = await status(jp_fetch)
        holder = next(entry["holder"] for entry in seen["devices"] if entry["holder"])
        owner, guardian, coordinator = (
            Process.open(pid) for pid in (holder["pid"], seen["guardian_pid"], seen["coordinator_pid"])
        )
        assert owner is not None
        assert guardian is not None
        assert coordinator is not None
        # A start takes a fifth of a second on a quiet machine; where it takes longer, so may this.
        allowed_s = max(1.0, 0.5 + 2 * await start_of_a_coordinator_s(krex_socket))
        # The owner would start a coordinator too; here the server is alone.
        owner.send(signal.SIGSTOP)
        try:
            guardian.send(guardian_by)
            coordinator.send(coordinator_by)
            await eventually(lambda: process.state not in {"T", ""}, "the kernel runs", within_s=allowed_s)
            await eventually(lambda: guardian.has_exited, "the old guardian is gone")
            assert (await participant(jp_fetch, kernel_id))["pid"] == process.pid
        finally:
            owner.send(signal.SIGCONT)
            for held in (owner, guardian, coordinator):
                held.close()
