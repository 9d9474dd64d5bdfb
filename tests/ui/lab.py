"""A real JupyterLab or Notebook 7 with two notebooks, beside a coordinator that nobody else can meet."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import nbformat
from playwright.sync_api import Locator, Page, expect

from tests.scripts import ROOT, descendants_matching, wait_until

LOAD = "%load_ext krex_jupyter\nimport pathlib, time\nimport krex_jupyter as krex\n'loaded'"
SHARED_HOLDER = """
import os, sys
import krex_jupyter as krex
with krex.exclusive("cpu", cpu="share", label="first", max_hold=30) as region:
    print("held", flush=True)
    sys.stdin.readline()
print("left", flush=True)
sys.stdin.read()
"""
"""Holds the cpu and pauses nobody, so that notebooks can be seen to queue up behind it."""


def hold(label: str, until: str) -> str:
    """A cell that holds the device until the test makes a file."""
    return f"""with krex.exclusive("cpu", label={label!r}, max_hold=25) as region:
    while not pathlib.Path({until!r}).exists():
        time.sleep(0.005)
region.report.verdict"""


ARGUMENTS = {
    "lab": ["-m", "jupyterlab"],
    "notebook": ["-m", "notebook"],
}


@dataclass
class Server:
    """A running server."""

    process: subprocess.Popen[bytes]
    url: str
    token: str
    notebooks: Path
    directory: Path
    log: Path
    environment: dict[str, str]
    """What its coordinator is found by."""

    def address(self, path: str) -> str:
        return f"{self.url}{path}?token={self.token}"

    def make(self, name: str) -> None:
        """Make a file that a cell waits for."""
        (self.notebooks / name).touch()

    def coordinator(self) -> int:
        lock = self.directory / "krex" / "coordinator.lock"
        return int(lock.read_text(encoding="ascii").split()[1])


@contextlib.contextmanager
def server(
    app: str, directory: Path, *extra: str, cells: dict[str, list[str]], dark: bool = False
) -> Iterator[Server]:
    """Start a server whose directory has a notebook per entry of ``cells``; end it and all it started."""
    notebooks, krex = directory / "notebooks", directory / "krex"
    notebooks.mkdir()
    krex.mkdir(mode=0o700)
    (krex / "locks").mkdir()
    for name, sources in cells.items():
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
        notebook.metadata["kernelspec"] = {
            "name": "python3",
            "display_name": "Python 3",
            "language": "python",
        }
        nbformat.write(notebook, notebooks / name)
    settings = directory / "settings" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    (settings / "notification.jupyterlab-settings").write_text(
        '{"fetchNews": "false", "checkForUpdates": false}'
    )
    if dark:
        (settings / "themes.jupyterlab-settings").write_text('{"theme": "JupyterLab Dark"}')
    runtime = directory / "runtime"
    environment = {
        **os.environ,
        "HOME": str(directory),
        "IPYTHONDIR": str(directory / "ipython"),
        "JUPYTER_CONFIG_DIR": str(directory / "config"),
        "JUPYTER_DATA_DIR": str(directory / "data"),
        "JUPYTER_RUNTIME_DIR": str(runtime),
        "JUPYTERLAB_SETTINGS_DIR": str(directory / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(directory / "workspaces"),
        "KREX_SOCKET": str(krex / "krex.sock"),
        "KREX_LOCK_DIR": str(krex / "locks"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    environment.pop("KREX_DEVICE", None)
    log = directory / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                sys.executable,
                *ARGUMENTS[app],
                "--no-browser",
                "--allow-root",
                "--ServerApp.port=0",
                "--LabApp.expose_app_in_browser=True",
                "--JupyterNotebookApp.expose_app_in_browser=True",
                f"--ServerApp.root_dir={notebooks}",
                *extra,
            ],
            cwd=notebooks,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    found = runtime / f"jpserver-{process.pid}.json"
    try:
        wait_until(
            # It is written while it is there already.
            lambda: (
                (found.exists() and found.read_text().rstrip().endswith("}")) or process.poll() is not None
            ),
            "the server runs",
            60.0,
            lambda: log.read_text()[-2000:],
        )
        assert process.poll() is None, log.read_text()
        info = json.loads(found.read_text())
        place = {name: environment[name] for name in ("KREX_SOCKET", "KREX_LOCK_DIR")}
        yield Server(process, info["url"], info["token"], notebooks, directory, log, place)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
        end_daemons(directory)


def end_daemons(directory: Path) -> None:
    """End the coordinator and guardian of a place; they ended by themselves or do so now."""
    for pid in descendants_matching(str(directory)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
            os.kill(pid, signal.SIGTERM)
    wait_until(
        lambda: not list(descendants_matching(str(directory))),
        "coordinator and guardian have ended",
        8.0,
        lambda: list(descendants_matching(str(directory))),
    )


def open_notebook(page: Page, served: Server, name: str, *, app: str = "lab", wait: bool = True) -> None:
    """Open a notebook, alone in its page, and wait until its kernel can be used."""
    path = f"lab/workspaces/{Path(name).stem}/tree/{name}" if app == "lab" else f"notebooks/{name}"
    page.goto(served.address(path))
    expect(page.locator(".jp-Notebook").first).to_be_visible(timeout=60_000)
    if wait:
        wait_for_kernel(page, served, name)


def wait_for_kernel(page: Page, served: Server, name: str) -> None:
    """Wait until the kernel of a notebook is idle and the page is connected to it; before that it runs no cell."""

    def kernel() -> dict[str, object]:
        sessions = page.request.get(served.address("api/sessions")).json()
        return next((one["kernel"] for one in sessions if one["path"] == name), {})

    def connected() -> bool:
        seen = kernel()
        return seen.get("execution_state") == "idle" and bool(seen.get("connections"))

    wait_until(connected, f"the kernel of {name} can be used", 60.0, kernel)
    expect(page.locator(".jp-Notebook-ExecutionIndicator[data-status='idle']").first).to_be_visible()


def run_cell(page: Page, index: int, *, wait: bool = True) -> None:
    """Run a cell as a user does; wait until it is done, or only until it has begun."""
    cell = page.locator(".jp-Notebook .jp-CodeCell").nth(index)
    cell.locator(".cm-content").click()
    page.keyboard.press("Control+Enter")
    prompt = cell.locator(".jp-InputPrompt")
    if wait:
        expect(prompt).to_have_text(re.compile(r"\[\d+\]:"), timeout=30_000)
    else:
        expect(prompt).to_have_text("[*]:", timeout=10_000)


def output(page: Page, index: int) -> Locator:
    """What a cell has put out."""
    return page.locator(".jp-Notebook .jp-CodeCell").nth(index).locator(".jp-OutputArea")


def show_panel(page: Page) -> Locator:
    """Click the indicator in the toolbar; the panel that it brings up."""
    indicator(page).click()
    found = panel(page)
    expect(found).to_be_visible()
    return found


def panel(page: Page) -> Locator:
    return page.get_by_role("region", name="KREX", exact=True)


def indicator(page: Page) -> Locator:
    """The item in the notebook's toolbar."""
    return page.locator(
        ".jp-NotebookPanel-toolbar .jp-krex-Indicator-button, .jp-Toolbar .jp-krex-Indicator-button"
    ).first


def status_item(page: Page) -> Locator:
    """The item in Lab's status bar."""
    return page.locator("#jp-main-statusbar .jp-krex-Indicator-button")
