"""A coordinator first started from inside a kernel of a server that knows nothing of us, which is then shut down."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

import krex_jupyter as krex
from krex_jupyter.demo.server import JupyterServer, NotebookKernel, free_port
from tests.conftest import Place
from tests.scripts import Scripts, is_frozen, search_path, wait_thawed, wait_until

TOKEN = "born"


@dataclass(frozen=True)
class PlainServer:
    """A real Jupyter server without the extension."""

    process: subprocess.Popen[bytes]
    url: str
    token: str = TOKEN

    def answers(self) -> bool:
        request = urllib.request.Request(self.url + "api", headers={"Authorization": f"token {self.token}"})
        try:
            with urllib.request.urlopen(request, timeout=5):
                return True
        except OSError:
            return False

    def post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            self.url + path,
            data=json.dumps(body).encode(),
            headers={"Authorization": f"token {self.token}"},
            method="POST",
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read())


@pytest.fixture
def server(tmp_path: Path, place: Place) -> Iterator[PlainServer]:
    runtime = tmp_path / "runtime"
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "jupyter_server",
            "--no-browser",
            "--allow-root",
            f"--ServerApp.port={free_port()}",
            "--ServerApp.jpserver_extensions={'krex_jupyter': False}",
            f"--IdentityProvider.token={TOKEN}",
            f"--ServerApp.root_dir={tmp_path}",
        ],
        env={**os.environ, "JUPYTER_RUNTIME_DIR": str(runtime), "PYTHONPATH": search_path()},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    info = runtime / f"jpserver-{process.pid}.json"
    try:
        wait_until(info.exists, "the server has written where it listens", 60.0)
        wait_until(lambda: info.read_text().strip().endswith("}"), "it has written all of it", 5.0)
        started = PlainServer(process, json.loads(info.read_text())["url"])
        # It writes the file before it listens.
        wait_until(started.answers, "the server answers", 30.0)
        yield started
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(20)


def test_it_outlives_kernel_and_server_and_serves_others(
    server: PlainServer, place: Place, scripts: Scripts
) -> None:
    kernel_id = server.post("api/kernels", {})["id"]
    kernel = NotebookKernel(cast("JupyterServer", server), kernel_id, "born.ipynb")
    kernel.ready()
    kernel.execute("%load_ext krex_jupyter", timeout_s=30)
    kernel.execute("import krex_jupyter as krex\nwith krex.exclusive('cpu'): pass", timeout_s=30)
    coordinator = place.coordinator()
    sibling = scripts.sibling()
    kernel_pidfd = os.pidfd_open(kernel.pid)
    kernel.close()
    with krex.exclusive("cpu", timeout=20) as region:
        assert is_frozen(sibling.pid)
        assert is_frozen(kernel.pid)
    assert kernel.pid in {found.pid for found in region.siblings}
    wait_thawed(sibling.pid)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(20) is not None
    poller = select.poll()
    poller.register(kernel_pidfd, select.POLLIN)
    assert poller.poll(10_000), "the kernel outlived its server"
    os.close(kernel_pidfd)
    with krex.exclusive("cpu", timeout=10):
        assert is_frozen(sibling.pid)
    assert place.coordinator() == coordinator
