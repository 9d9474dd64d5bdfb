"""Makes the pictures of the panel that README and docs show: ``python -m tests.ui.pictures`` (`make pictures`).

Real kernels, real regions, a real browser. The regions themselves sleep: the pictures show the panel, not timings.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from jupyter_client.blocking.client import BlockingKernelClient
from playwright.sync_api import APIRequestContext, Browser, expect, sync_playwright

from tests.scripts import ROOT, wait_until

from . import lab

IMAGES = ROOT / "docs" / "images"
TUNE = """%%krex_exclusive -d cpu -l "tile 32"
while not pathlib.Path("measured").exists():
    time.sleep(0.005)"""
CELLS = {"tune-matmul.ipynb": [lab.LOAD, TUNE], "agent-7.ipynb": [lab.LOAD, "x = 1"]}
OTHERS = ("softmax", "agent-3")
SWEEP = """
import random
random.seed({seed})
for candidate in range(9):
    time.sleep(random.uniform(0.3, 1.6))
    with krex.exclusive("cpu", label=f"candidate {{candidate}}"):
        time.sleep(random.uniform(0.05, 0.5))
"""
WAIT = """
with krex.exclusive("cpu", label={label!r}):
    pass
"""
HOLD_AND_PAUSE_NOBODY = """
with krex.exclusive("cpu", label="warm-up", cpu="share"):
    while not pathlib.Path("queued").exists():
        time.sleep(0.005)
"""


class Kernel:
    """A kernel of the server, driven without a page."""

    def __init__(self, served: lab.Server, request: APIRequestContext, name: str) -> None:
        path = f"{name}.ipynb"
        body = {"path": path, "name": path, "type": "notebook", "kernel": {"name": "python3"}}
        answer = request.post(served.address("api/sessions"), data=body)
        self.id = answer.json()["kernel"]["id"]
        self.client = BlockingKernelClient()
        file = served.directory / "runtime" / f"kernel-{self.id}.json"
        wait_until(file.exists, f"the kernel of {path} runs", 20.0)
        self.client.load_connection_file(str(file))
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def run(self, code: str) -> str:
        """Begin to run code; the id of its message."""
        return str(self.client.execute(code))

    def wait(self, message: str) -> None:
        """Wait until that code is done, which must not fail."""
        while True:
            reply = self.client.get_shell_msg(timeout=120)
            if reply["parent_header"].get("msg_id") == message:
                assert reply["content"]["status"] == "ok", reply["content"]
                return

    def close(self) -> None:
        self.client.stop_channels()


@contextlib.contextmanager
def scene(browser: Browser, *, dark: bool) -> Iterator[None]:
    """One theme: everything is run, the pictures are taken."""
    theme = "dark" if dark else "light"
    directory = Path(tempfile.mkdtemp(prefix="krex-pictures-"))
    kernels: list[Kernel] = []
    try:
        with lab.server("lab", directory, cells=CELLS, dark=dark) as served:
            context = browser.new_context(viewport={"width": 1360, "height": 900}, device_scale_factor=1.5)
            page = context.new_page()
            lab.open_notebook(page, served, "tune-matmul.ipynb")
            lab.run_cell(page, 0)
            paused = context.new_page()
            lab.open_notebook(paused, served, "agent-7.ipynb")
            lab.run_cell(paused, 0)
            kernels += [Kernel(served, page.request, name) for name in OTHERS]
            kernels.append(Kernel(served, page.request, "train-lora"))
            for kernel in kernels[:2]:
                kernel.wait(kernel.run(lab.LOAD))
            sweeps = [kernel.run(SWEEP.format(seed=index)) for index, kernel in enumerate(kernels[:2])]
            for kernel, sweep in zip(kernels[:2], sweeps, strict=True):
                kernel.wait(sweep)
            kernels[2].run("pass")

            driver = Kernel(served, page.request, "agent-7")
            kernels.append(driver)
            driver.run(HOLD_AND_PAUSE_NOBODY)
            for shown in (page, paused):
                widen(shown)
            panel = lab.show_panel(page)
            lab.show_panel(paused)
            queue = panel.get_by_role("list", name="Queue of cpu").get_by_role("listitem")
            expect(panel.get_by_role("group", name="Holder")).to_be_visible()
            lab.run_cell(page, 1, wait=False)
            expect(queue).to_have_count(1)
            for count, kernel in enumerate(kernels[:2], start=2):
                kernel.run(WAIT.format(label=f"candidate {count}"))
                expect(queue).to_have_count(count)
            served.make("queued")
            expect(lab.indicator(page)).to_contain_text("exclusive")
            expect(lab.indicator(paused)).to_contain_text("paused")
            page.mouse.move(600, 700)
            page.screenshot(path=IMAGES / f"lab-{theme}.png")
            panel.screenshot(path=IMAGES / f"panel-{theme}.png")
            if not dark:
                toolbar = paused.locator(".jp-NotebookPanel-toolbar")
                toolbar.screenshot(path=IMAGES / "paused.png")
            served.make("measured")
            expect(panel).to_contain_text("Nobody waits.")
            yield
            context.close()
    finally:
        for kernel in kernels:
            kernel.close()
        shutil.rmtree(directory, ignore_errors=True)


def widen(page: lab.Page) -> None:
    """Show the panel at a width that people give it: drag its border, and fold the file browser away."""
    lab.show_panel(page)
    page.get_by_role("tab", name="File Browser (Ctrl+Shift+F)").click()
    handle = page.locator("#jp-main-split-panel > .lm-SplitPanel-handle:not(.lm-mod-hidden)").last
    box = handle.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 1, 400)
    page.mouse.down()
    page.mouse.move(box["x"] - 120, 400, steps=4)
    page.mouse.up()


def main() -> int:
    """Make all pictures."""
    IMAGES.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--force-color-profile=srgb"]
        )
        for dark in (False, True):
            with scene(browser, dark=dark):
                pass
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
