"""A user who may not have a coordinator where it should be still has a Jupyter server.

As root every directory is writable, so the server runs in a child that has changed its uid.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NOBODY = 65534
TOKEN = "only-for-this-test"

pytestmark = pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("setpriv") is None, reason="changing the uid needs root and setpriv"
)


@pytest.fixture
def home() -> Iterator[Path]:
    """A directory that another user can reach, which pytest's own temporary ones are not."""
    directory = Path(tempfile.mkdtemp(prefix="krex-home-"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


@contextmanager
def server_as_nobody(home: Path, krex_socket: Path) -> Iterator[tuple[int, Path]]:
    """A Jupyter server of uid 65534; yields its port and its log. It and its kernels are gone afterwards."""
    own = home / "own"
    own.mkdir()
    os.chown(own, NOBODY, NOBODY)
    log = home / "server.log"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "HOME": str(own),
        "JUPYTER_PLATFORM_DIRS": "0",
        "JUPYTER_CONFIG_DIR": str(own / "config"),
        "JUPYTER_DATA_DIR": str(own / "data"),
        "JUPYTER_RUNTIME_DIR": str(own / "runtime"),
        "IPYTHONDIR": str(own / "ipython"),
        "KREX_SOCKET": str(krex_socket),
        "KREX_LOCK_DIR": str(own),
    }
    command = [
        *as_nobody(),
        *(
            sys.executable,
            "-m",
            "jupyter_server",
            "--no-browser",
            f"--port={port}",
            "--ServerApp.port_retries=0",
        ),
        *(f"--IdentityProvider.token={TOKEN}", f"--ServerApp.root_dir={own}"),
        "--ServerApp.jpserver_extensions={'krex_jupyter': True}",
    ]
    with (
        log.open("wb") as output,
        subprocess.Popen(command, env=environment, cwd="/", stdout=output, stderr=output) as server,
    ):
        try:
            yield port, log
        finally:
            server.terminate()
            try:
                server.wait(10)
            except subprocess.TimeoutExpired:
                server.kill()


def as_nobody() -> list[str]:
    """A command prefix that changes the uid. It may still read everything: the interpreter of a test machine can
    lie in root's home. It may write nowhere it could not."""
    reading = "+dac_read_search"
    identity = [f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    return ["setpriv", *identity, f"--inh-caps={reading}", f"--ambient-caps={reading}"]


def ask(port: int, method: str, path: str, body: str | None = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request(method, path, body=body, headers={"Authorization": f"token {TOKEN}"})
        answer = connection.getresponse()
        content = answer.read()
        return answer.status, json.loads(content) if content else None
    finally:
        connection.close()


def until_it_listens(port: int, log: Path) -> None:
    deadline_s = time.monotonic() + 30.0
    while time.monotonic() < deadline_s:
        with socket.socket() as probe:
            probe.settimeout(1.0)
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        # Linux tells nobody that a port has begun to listen.
        subprocess.run(["sleep", "0.1"], check=True)
    pytest.fail(f"the server does not listen:\n{log.read_text()}")


@pytest.mark.parametrize("mode", [0o700, 0o755], ids=["unreachable", "unwritable"])
def test_the_server_and_its_kernels_work_and_the_reason_is_told(home: Path, mode: int) -> None:
    elsewhere = home / "of-root"
    elsewhere.mkdir()
    elsewhere.chmod(mode)
    with server_as_nobody(home, elsewhere / "krex.sock") as (port, log):
        until_it_listens(port, log)
        code, kernel = ask(port, "POST", "/api/kernels", "{}")
        assert code == 201, log.read_text()
        code, told = ask(port, "GET", "/krex/api/status")
        assert code == 503
        assert str(elsewhere) in told["message"] or "KREX_SOCKET" in told["message"], told
        assert told["what_to_do"]
        assert ask(port, "POST", f"/api/kernels/{kernel['id']}/interrupt")[0] == 204
        assert ask(port, "POST", f"/api/kernels/{kernel['id']}/restart")[0] == 200
        assert ask(port, "DELETE", f"/api/kernels/{kernel['id']}")[0] == 204
        assert "KREX" in log.read_text()
    assert not list(elsewhere.iterdir())
