"""What people see in a real browser while notebooks hold, wait, are paused, and lose their coordinator."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="tests in a browser need the extra: pip install 'krex-jupyter[ui]'")

from playwright.sync_api import BrowserContext, Page, expect

from tests.scripts import Script, is_frozen, wait_until

from . import lab

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

TWO_NOTEBOOKS = {
    "tune-matmul.ipynb": [lab.LOAD, lab.hold("tile 32", "one"), "1 + 1"],
    "softmax.ipynb": [lab.LOAD, lab.hold("rows 8", "two"), "1 + 1"],
}
WATCH_FEED = """() => {
    const feed = document.querySelector('.jp-krex-feed');
    window.seenFeeds = [feed.textContent];
    new MutationObserver(() => window.seenFeeds.push(feed.textContent)).observe(
        feed, {subtree: true, childList: true, characterData: true});
}"""


def two_pages(context: BrowserContext, served: lab.Server, app: str = "lab") -> tuple[Page, Page]:
    """Both notebooks, each in a tab of its own, loaded and with the panel open."""
    pages = []
    for name in TWO_NOTEBOOKS:
        page = context.new_page()
        lab.open_notebook(page, served, name, app=app)
        lab.run_cell(page, 0)
        lab.show_panel(page)
        pages.append(page)
    return pages[0], pages[1]


def first_holder(served: lab.Server, holders: list[Script]) -> Script:
    script = Script(lab.SHARED_HOLDER, env=served.environment)
    holders.append(script)
    assert script.line() == "held"
    return script


def kernel_pid(served: lab.Server, page: Page, notebook: str) -> int:
    """Pid of the kernel of a notebook, as the server tells it."""
    answer = page.request.get(served.address("krex/api/status"))
    return next(one["pid"] for one in answer.json()["participants"] if one["notebook"] == notebook)


def test_the_queue_moves_and_a_frozen_sibling_is_shown_as_paused(
    context: BrowserContext, tmp_path: Path, holders: list[Script]
) -> None:
    with lab.server("lab", tmp_path, cells=TWO_NOTEBOOKS) as served:
        matmul, softmax = two_pages(context, served)
        first = first_holder(served, holders)
        expect(lab.panel(matmul).get_by_role("group", name="Holder")).to_contain_text("first")
        lab.run_cell(matmul, 1, wait=False)
        queue = lab.panel(softmax).get_by_role("list", name="Queue of cpu").get_by_role("listitem")
        expect(queue).to_have_count(1)
        lab.run_cell(softmax, 1, wait=False)
        expect(queue).to_have_count(2)
        expect(queue.nth(0)).to_contain_text("tune-matmul.ipynb")
        expect(queue.nth(1)).to_contain_text("softmax.ipynb")
        expect(lab.indicator(matmul)).to_contain_text("queued")
        expect(lab.indicator(softmax)).to_contain_text("②")

        first.say("leave")
        expect(queue).to_have_count(1)
        expect(queue.nth(0)).to_contain_text("softmax.ipynb")
        expect(lab.indicator(matmul)).to_contain_text("exclusive")
        expect(lab.status_item(matmul)).to_contain_text("exclusive")
        expect(lab.panel(softmax).get_by_role("group", name="Holder")).to_contain_text("tune-matmul.ipynb")

        served.make("one")
        expect(lab.indicator(softmax)).to_contain_text("exclusive")
        wait_until(
            lambda: is_frozen(kernel_pid(served, matmul, "tune-matmul.ipynb")), "the sibling stands frozen"
        )
        for shown in (lab.indicator(matmul), lab.status_item(matmul)):
            expect(shown).to_contain_text(re.compile(r"paused while softmax measures · \d+\.\d s"))
        lab.run_cell(matmul, 2, wait=False)
        served.make("two")
        expect(lab.indicator(matmul)).to_have_text("○KREX")
        expect(lab.output(matmul, 2)).to_contain_text("2")
        expect(
            lab.panel(matmul).get_by_role("list", name="Last regions of cpu").get_by_role("listitem")
        ).to_have_count(3)


def test_leaving_the_queue_from_the_panel_ends_the_wait_in_the_notebook(
    context: BrowserContext, tmp_path: Path, holders: list[Script]
) -> None:
    with lab.server("lab", tmp_path, cells=TWO_NOTEBOOKS) as served:
        matmul, _ = two_pages(context, served)
        first = first_holder(served, holders)
        lab.run_cell(matmul, 1, wait=False)
        leave = lab.panel(matmul).get_by_role("button", name="Take tune-matmul.ipynb out of the queue")
        # By keyboard, as who does not use a mouse.
        leave.focus()
        matmul.keyboard.press("Enter")
        expect(lab.output(matmul, 1)).to_contain_text("taken out of the queue", timeout=10_000)
        expect(lab.panel(matmul)).to_contain_text("Nobody waits.")
        expect(lab.indicator(matmul)).to_have_text("○KREX")
        # The holder is left alone, until its user ends it.
        lab.panel(matmul).get_by_role("button", name=re.compile("End the region of")).click()
        expect(lab.panel(matmul)).to_contain_text("Nobody holds it")
        first.say("leave")
        expect(lab.panel(matmul).get_by_role("list", name="Last regions of cpu")).to_contain_text("revoked")


def test_a_reload_in_the_middle_shows_the_truth_and_the_report_can_be_copied(
    context: BrowserContext, tmp_path: Path
) -> None:
    # Below a base URL, as behind a hub's proxy.
    with lab.server("lab", tmp_path, "--ServerApp.base_url=/user/somebody/", cells=TWO_NOTEBOOKS) as served:
        matmul, softmax = two_pages(context, served)
        lab.run_cell(matmul, 1, wait=False)
        expect(lab.indicator(softmax)).to_contain_text("paused while tune-matmul measures")
        matmul.keyboard.press("Control+s")
        for page in (matmul, softmax):
            page.reload()
            expect(page.locator(".jp-Notebook").first).to_be_visible(timeout=60_000)
        expect(lab.indicator(matmul)).to_contain_text("exclusive", timeout=20_000)
        expect(lab.indicator(softmax)).to_contain_text("paused while tune-matmul measures", timeout=20_000)
        shown = lab.show_panel(matmul) if not lab.panel(matmul).is_visible() else lab.panel(matmul)
        expect(shown.get_by_role("group", name="Holder")).to_contain_text("tune-matmul.ipynb")
        served.make("one")
        expect(lab.indicator(softmax)).to_have_text("○KREX")
        shown.get_by_role("button", name=re.compile("Copy the report")).first.click()
        expect(matmul.get_by_text(re.compile("The report of region .* was copied")).first).to_be_visible()
        report = json.loads(matmul.evaluate("navigator.clipboard.readText()"))
        assert report["notebook"] == "tune-matmul.ipynb"
        assert report["label"] == "tile 32"


def test_a_killed_coordinator_is_told_and_its_successor_is_shown(
    context: BrowserContext, tmp_path: Path
) -> None:
    with lab.server("lab", tmp_path, cells=TWO_NOTEBOOKS) as served:
        matmul, _ = two_pages(context, served)
        expect(lab.panel(matmul).get_by_role("status")).to_contain_text("live")
        matmul.evaluate(WATCH_FEED)
        before = served.coordinator()
        os.kill(before, signal.SIGKILL)
        matmul.wait_for_function("window.seenFeeds.some(text => text.includes('no coordinator'))")
        expect(lab.panel(matmul).get_by_role("status")).to_contain_text("live", timeout=15_000)
        wait_until(lambda: served.coordinator() != before, "another coordinator runs")
        lab.run_cell(matmul, 1, wait=False)
        expect(lab.indicator(matmul)).to_contain_text("exclusive")
        served.make("one")
        expect(lab.indicator(matmul)).to_have_text("○KREX")


def test_without_a_coordinator_the_panel_says_what_to_do_and_keeps_what_was_known(
    context: BrowserContext, tmp_path: Path, holders: list[Script]
) -> None:
    with lab.server(
        "lab", tmp_path, "--KrexExtension.start_coordinator=False", cells=TWO_NOTEBOOKS
    ) as served:
        page = context.new_page()
        lab.open_notebook(page, served, "softmax.ipynb")
        expect(lab.indicator(page)).to_contain_text("no coordinator")
        panel = lab.show_panel(page)
        advice = panel.get_by_role("alert", name="No coordinator")
        expect(advice).to_contain_text("krex status")
        # Any region starts one.
        first = first_holder(served, holders)
        advice.get_by_role("button", name="Try now").click()
        expect(panel.get_by_role("status")).to_contain_text("live", timeout=30_000)
        expect(panel.get_by_role("group", name="Holder")).to_contain_text("first")
        first.end()
        expect(panel).to_contain_text("Nobody holds it")
        os.kill(served.coordinator(), signal.SIGTERM)
        expect(advice).to_contain_text("Below is what was last known")
        expect(panel.locator(".jp-krex-mod-stale")).to_be_visible()


def test_a_server_without_the_extension_and_one_that_ended_are_told_apart(
    context: BrowserContext, tmp_path: Path
) -> None:
    page = context.new_page()
    off = "--ServerApp.jpserver_extensions={'krex_jupyter': False}"
    with lab.server("lab", tmp_path, off, cells=TWO_NOTEBOOKS) as served:
        lab.open_notebook(page, served, "softmax.ipynb")
        expect(lab.indicator(page)).to_contain_text("not on this server")
        panel = lab.show_panel(page)
        expect(panel.get_by_role("alert")).to_contain_text("pip install krex-jupyter")
    panel.get_by_role("button", name="Try now").click()
    expect(panel.get_by_role("alert", name="Disconnected")).to_contain_text("does not answer", timeout=15_000)


def test_a_server_that_does_not_permit_it_says_whom_to_ask(context: BrowserContext, tmp_path: Path) -> None:
    deny = "--ServerApp.authorizer_class=tests.ui.denying.DenyKrex"
    with lab.server("lab", tmp_path, deny, cells=TWO_NOTEBOOKS) as served:
        page = context.new_page()
        lab.open_notebook(page, served, "softmax.ipynb", wait=False)
        expect(lab.indicator(page)).to_contain_text("no permission")
        expect(lab.show_panel(page).get_by_role("alert", name="No permission")).to_contain_text(
            "administrator"
        )


def test_notebook_7_has_the_toolbar_item_and_the_panel(context: BrowserContext, tmp_path: Path) -> None:
    with lab.server("notebook", tmp_path, cells=TWO_NOTEBOOKS) as served:
        matmul, softmax = two_pages(context, served, "notebook")
        lab.run_cell(matmul, 1, wait=False)
        expect(lab.indicator(matmul)).to_contain_text("exclusive")
        expect(lab.indicator(softmax)).to_contain_text("paused while tune-matmul measures")
        expect(lab.panel(softmax).get_by_role("group", name="Holder")).to_contain_text("tune-matmul.ipynb")
        served.make("one")
        expect(lab.indicator(softmax)).to_have_text("○KREX")


def test_the_other_pages_of_notebook_7_are_left_in_peace(context: BrowserContext, tmp_path: Path) -> None:
    # What the extension writes to the console, or throws, fails the test (see the fixture).
    with lab.server("notebook", tmp_path, cells=TWO_NOTEBOOKS) as served:
        page = context.new_page()
        page.goto(served.address("tree"))
        expect(page.get_by_text("softmax.ipynb").first).to_be_visible(timeout=60_000)
        expect(page.locator(".jp-krex-Indicator")).to_have_count(0)


def test_the_palette_has_the_commands(context: BrowserContext, tmp_path: Path) -> None:
    with lab.server("lab", tmp_path, cells=TWO_NOTEBOOKS) as served:
        page = context.new_page()
        lab.open_notebook(page, served, "tune-matmul.ipynb")
        lab.run_cell(page, 0)
        lab.run_cell(page, 1, wait=False)
        expect(lab.indicator(page)).to_contain_text("exclusive")
        page.keyboard.press("Escape")
        page.keyboard.press("Control+Shift+c")
        page.locator(".lm-CommandPalette-input").fill("KREX")
        palette = page.locator(".lm-CommandPalette-content")
        for label in ("Show the Panel", "Leave the Queue or End the Region", "Connect Again"):
            expect(palette).to_contain_text(label)
        palette.get_by_text("Leave the Queue or End the Region").click()
        expect(page.get_by_text(re.compile("Region .* was ended")).first).to_be_visible()
        served.make("one")
        expect(lab.output(page, 1)).to_contain_text("revoked")
