"""A host where no coordinator can be had: everything but exclusive regions works, and the reason is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tornado.httpclient import HTTPClientError
from traitlets.config import Config

from .waiting import eventually


@pytest.fixture
def jp_server_config(krex_socket: Path) -> Config:
    return Config(
        {
            "ServerApp": {"jpserver_extensions": {"krex_jupyter": True}},
            "KrexExtension": {"start_coordinator": False},
        }
    )


async def failed(request: Any) -> tuple[int, dict[str, Any], Any]:
    with pytest.raises(HTTPClientError) as caught:
        await request
    response = caught.value.response
    assert response is not None
    return caught.value.code, json.loads(response.body), response.headers


@pytest.mark.parametrize("path", ["status", "devices", "history", "regions/some"])
async def test_every_route_answers_503_with_a_reason_and_when_to_retry(
    jp_fetch: Any, extension: Any, path: str
) -> None:
    await eventually(lambda: extension._link and "not to start one" in extension._link.problem, "the reason")
    code, body, headers = await failed(jp_fetch("krex", "api", *path.split("/")))
    assert code == 503
    assert int(headers["Retry-After"]) > 0
    assert "start_coordinator" in body["message"]
    assert body["what_to_do"]
    assert body["code"] == "no_coordinator"


async def test_unauthenticated_requests_are_refused(jp_fetch: Any) -> None:
    for path in ("status", "devices", "history", "regions/some"):
        code, _, _ = await failed(jp_fetch("krex", "api", *path.split("/"), headers={"Authorization": ""}))
        assert code == 403


async def test_an_unauthenticated_event_socket_is_refused(jp_ws_fetch: Any) -> None:
    with pytest.raises(HTTPClientError) as caught:
        await jp_ws_fetch("krex", "api", "events", headers={"Authorization": ""})
    assert caught.value.code == 403


async def test_the_event_socket_says_that_nobody_coordinates(jp_ws_fetch: Any, extension: Any) -> None:
    socket = await jp_ws_fetch("krex", "api", "events")
    first = json.loads(await socket.read_message())
    socket.close()
    assert first["type"] == "unavailable"
    assert first["detail"]


async def test_a_limit_out_of_range_is_explained(jp_fetch: Any, extension: Any) -> None:
    code, body, _ = await failed(jp_fetch("krex", "api", "history", params={"limit": "many"}))
    assert code == 400
    assert "'many'" in body["message"]
    assert "1000" in body["message"]


async def test_kernels_start_answer_and_shut_down(jp_fetch: Any, extension: Any, jp_serverapp: Any) -> None:
    started = await jp_fetch("api", "kernels", method="POST", body="{}")
    kernel_id = json.loads(started.body)["id"]
    assert kernel_id in jp_serverapp.kernel_manager
    await jp_fetch("api", "kernels", kernel_id, "interrupt", method="POST", allow_nonstandard_methods=True)
    await jp_fetch("api", "kernels", kernel_id, "restart", method="POST", allow_nonstandard_methods=True)
    await jp_fetch("api", "kernels", kernel_id, method="DELETE")
    assert kernel_id not in jp_serverapp.kernel_manager
