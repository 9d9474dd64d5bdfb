"""The extension becomes the default provisioner of its process only where that takes nothing away."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jupyter_client.provisioning.factory import KernelProvisionerFactory
from jupyter_client.provisioning.local_provisioner import LocalProvisioner
from traitlets.config import Config

from krex_jupyter.server_ext.extension import KrexExtension
from krex_jupyter.server_ext.provisioner import KrexProvisioner

from .marks import needs_entry_point


@pytest.fixture
def jp_server_config(krex_socket: Any, request: pytest.FixtureRequest) -> Any:
    config = {
        "ServerApp": {"jpserver_extensions": {"krex_jupyter": True}},
        "KrexExtension": {"start_coordinator": False},
    }
    for section, options in getattr(request, "param", {}).items():
        config.setdefault(section, {}).update(options)
    return Config(config)


async def started(jp_fetch: Any, jp_serverapp: Any) -> Any:
    answer = await jp_fetch("api", "kernels", method="POST", body="{}")
    return jp_serverapp.kernel_manager.get_kernel(json.loads(answer.body)["id"])


@needs_entry_point
async def test_kernels_are_started_by_it_where_nothing_else_was_chosen(
    jp_fetch: Any, jp_serverapp: Any, extension: KrexExtension
) -> None:
    manager = await started(jp_fetch, jp_serverapp)
    assert isinstance(manager.provisioner, KrexProvisioner)
    assert extension.notices == []


@pytest.mark.parametrize("jp_server_config", [{"KrexExtension": {"use_provisioner": False}}], indirect=True)
async def test_switched_off_kernels_are_started_as_ever_and_status_says_so(
    jp_fetch: Any, jp_serverapp: Any, extension: KrexExtension
) -> None:
    manager = await started(jp_fetch, jp_serverapp)
    assert type(manager.provisioner) is LocalProvisioner
    assert "use_provisioner" in extension.notices[0]


@pytest.mark.parametrize(
    "jp_server_config",
    [{"KernelProvisionerFactory": {"default_provisioner_name": "somebody-elses"}}],
    indirect=True,
)
async def test_another_configured_provisioner_stays(jp_serverapp: Any, extension: KrexExtension) -> None:
    assert KernelProvisionerFactory.instance().default_provisioner_name == "somebody-elses"
    assert "somebody-elses" in extension.notices[0]


async def test_stopping_gives_the_default_back(jp_serverapp: Any, extension: KrexExtension) -> None:
    await extension.stop_extension()
    assert KernelProvisionerFactory.instance().default_provisioner_name == "local-provisioner"
