"""What the panel costs a browser, and how soon it shows what happened: ``python -m benchmarks.panel``.

Needs what `make test-ui` needs. Costs are ratios against the same Lab with the front end's extension switched off, from
loads and waits that alternate in one run: the machine's other load falls on both. Prints one JSON object; times in
seconds, ratios of medians.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

from tests.scripts import Script
from tests.ui import lab

REGIONS = """
import sys, time
import krex_jupyter as krex
for line in sys.stdin:
    with krex.exclusive("cpu", cpu="share", label="sample"):
        print(repr(time.time()), flush=True)
        sys.stdin.readline()
    print(repr(time.time()), flush=True)
"""
WATCH_BADGE = """() => {
    const device = document.querySelector('.jp-krex-Device');
    window.badges = [];
    const note = () => {
        const text = device.querySelector('.jp-krex-Badge').textContent;
        if (text !== window.badges.at(-1)?.[0]) window.badges.push([text, Date.now() / 1000]);
    };
    note();
    new MutationObserver(note).observe(device, {subtree: true, childList: true, characterData: true});
}"""
"""Notes when the page's text changed; it is painted with the next frame."""


def load_s(browser: Browser, served: lab.Server) -> tuple[Page, float]:
    """A page with the notebook, and how long it took until its cell was there."""
    page = browser.new_context().new_page()
    page.goto(served.address("lab/tree/empty.ipynb"))
    page.locator(".jp-Notebook .jp-CodeCell").first.wait_for()
    return page, float(page.evaluate("performance.now()")) / 1000


def task_s(page: Page, for_s: float) -> float:
    """Seconds that the page's main thread worked during a wait."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")

    def worked_s() -> float:
        metrics = session.send("Performance.getMetrics")["metrics"]
        return float(next(one["value"] for one in metrics if one["name"] == "TaskDuration"))

    before_s = worked_s()
    page.wait_for_timeout(for_s * 1000)
    return worked_s() - before_s


def delays_s(page: Page, served: lab.Server, count: int) -> list[float]:
    """From the grant and the end of regions, as their owner saw them, to the page's text."""
    script = Script(REGIONS, env=served.environment)
    found: list[float] = []
    try:
        page.evaluate(WATCH_BADGE)
        for _ in range(count):
            for shown in ("exclusive", "idle"):
                script.say("go on")
                at_s = float(script.line())
                page.wait_for_function("text => window.badges.at(-1)[0] === text", arg=shown)
                found.append(page.evaluate("window.badges.at(-1)[1]") - at_s)
            page.wait_for_timeout(150)
    finally:
        script.end()
    return found


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loads", type=int, default=9, help="page loads of each kind (default: 9)")
    parser.add_argument(
        "--idle-s", type=float, default=10.0, help="length of one idle wait in s (default: 10)"
    )
    parser.add_argument("--regions", type=int, default=30, help="regions whose delay is taken (default: 30)")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        browser = stack.enter_context(sync_playwright()).chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        servers: dict[str, lab.Server] = {}
        for kind in ("without", "with"):
            directory = Path(tempfile.mkdtemp(prefix="krex-panel-"))
            stack.callback(shutil.rmtree, directory, ignore_errors=True)
            if kind == "without":
                config = directory / "config" / "labconfig"
                config.mkdir(parents=True)
                (config / "page_config.json").write_text('{"disabledExtensions": {"krex-jupyter": true}}')
            servers[kind] = stack.enter_context(lab.server("lab", directory, cells={"empty.ipynb": ["1"]}))
        loads: dict[str, list[float]] = {"without": [], "with": []}
        idle: dict[str, list[float]] = {"without": [], "with": []}
        for turn in range(arguments.loads + 1):
            for kind in ("without", "with") if turn % 2 else ("with", "without"):
                page, took_s = load_s(browser, servers[kind])
                if turn:  # The first of each fills caches.
                    loads[kind].append(took_s)
                if turn in (1, 2, 3):
                    if kind == "with":
                        lab.show_panel(page)
                    page.wait_for_timeout(5000)
                    idle[kind].append(task_s(page, arguments.idle_s) / arguments.idle_s)
                page.context.close()
        page, _ = load_s(browser, servers["with"])
        lab.show_panel(page)
        delays = sorted(delays_s(page, servers["with"], arguments.regions))
        browser.close()
    medians = {kind: statistics.median(values) for kind, values in loads.items()}
    result = {
        "version": 1,
        "command": "panel",
        "load_s": medians,
        "load_ratio": medians["with"] / medians["without"],
        "idle_share": {kind: statistics.median(values) for kind, values in idle.items()},
        "event_to_text_s": {
            "n": len(delays),
            "median": statistics.median(delays),
            "p95": delays[int(len(delays) * 0.95)],
        },
    }
    print(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
