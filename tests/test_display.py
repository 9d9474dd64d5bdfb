# ruff: noqa: RUF001
"""What reports, queues and devices look like, to people and to programs."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser
from typing import Any

import msgspec
import pytest

from krex_jupyter import display
from krex_jupyter.protocol import (
    DeviceInfo,
    DeviceStatus,
    Evidence,
    HolderStatus,
    OwnerEvidence,
    Queued,
    Reason,
    RegionReport,
    ReportDevice,
    SiblingReport,
    Status,
    WaiterStatus,
)

HOSTILE = "</code><script>alert(1)</script>\n\"'&"


def a_report(**changes: Any) -> RegionReport:
    report = RegionReport(
        region_id="3f2a",
        epoch=7,
        device=ReportDevice(id="cuda:0", uuid="GPU-1", name="NVIDIA H200", vendor="nvidia"),
        label="tile 32",
        pid=4711,
        started_at=1_760_000_000.0,
        wait_s=0.31,
        enter_s=0.0071,
        held_s=0.12,
        exit_s=0.002,
        cpu_policy="isolate",
        siblings=(
            SiblingReport(pid=12, label="softmax", gate="driver-lock", drain_s=0.0004),
            SiblingReport(pid=13, label="train", gate="observe", error="another uid"),
        ),
        verdict="clean",
        evidence=Evidence(owner=OwnerEvidence(run_queue_delay_s=None, wall_s=0.12)),
    )
    return msgspec.structs.replace(report, **changes)


def a_status(**changes: Any) -> Status:
    device = DeviceInfo(uuid="GPU-1", name="NVIDIA H200", vendor="nvidia", index=0)
    holder = HolderStatus(
        region_id="3f2a",
        epoch=7,
        pid=4711,
        uid=1000,
        label="tile 32",
        notebook="work/tune.ipynb",
        devices=("GPU-1",),
        cpu_policy="isolate",
        phase="held",
        held_s=0.42,
        remaining_s=29.6,
        siblings_gated=4,
        siblings_observed=1,
    )
    waiter = WaiterStatus(
        pid=12,
        uid=1002,
        label="",
        notebook="softmax.ipynb",
        devices=("GPU-1",),
        position=1,
        waited_s=0.2,
        eta_s=0.6,
        waits_for="tune.ipynb",
        region_id="3f2b",
    )
    status = Status(
        coordinator_pid=1,
        guardian_pid=2,
        system=False,
        socket="/x",
        uptime_s=1.0,
        devices=(DeviceStatus(device=device, holder=holder, queue=(waiter,)),),
        participants=(),
        recent=(a_report(),),
    )
    return msgspec.structs.replace(status, **changes)


class Tags(HTMLParser):
    """Checks that tags are closed in order, and collects them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in ("img", "br"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag


def test_the_text_is_one_line_with_verdict_durations_and_what_to_do() -> None:
    reasons = (Reason(code="foreign_gpu_work", detail="train (pid 9) used the GPU.\nUse --foreign gate."),)
    text = display.report_text(a_report(verdict="contended", reasons=reasons))
    assert text == (
        "× contended · waited 0.31 s · held 0.12 s · entered in 7.1 ms · cuda:0 · tile 32"
        " | foreign_gpu_work: train (pid 9) used the GPU. Use --foreign gate."
    )


@pytest.mark.parametrize(
    ("verdict", "sign"),
    [("clean", "✓"), ("suspect", "!"), ("contended", "×"), ("revoked", "⊘"), ("unknown", "?")],
)
def test_every_verdict_is_a_sign_and_a_word_and_a_colour_of_its_own(verdict: Any, sign: str) -> None:
    report = a_report(verdict=verdict)
    assert display.report_text(report).startswith(f"{sign} {verdict}")
    image = dict(Tags(display.report_html(report)).seen)["img"]
    assert image["alt"] == f"{sign} {verdict}"
    svg = picture(image)
    assert f"{sign} {verdict}" in svg
    others = {
        re.findall('fill="(#[^"]+)"', picture_of(other))[0] for other in display.SIGNS if other != verdict
    }
    assert re.findall('fill="(#[^"]+)"', svg)[0] not in others


def picture_of(verdict: Any) -> str:
    return picture(dict(Tags(display.badge_html(verdict)).seen)["img"])


def picture(image: dict[str, str | None]) -> str:
    head, _, data = (image["src"] or "").partition(",")
    assert head == "data:image/svg+xml;base64"
    return base64.b64decode(data).decode()


def test_the_badge_is_readable_on_its_colour() -> None:
    def luminance(colour: str) -> float:
        channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for verdict in display.SIGNS:
        background, text = re.findall('fill="(#[^"]+)"', picture_of(verdict))
        assert (luminance(text) + 0.05) / (luminance(background) + 0.05) >= 4.5


def test_the_html_has_only_what_the_sanitizer_of_an_untrusted_notebook_keeps() -> None:
    for html in (display.report_html(a_report()), display.status_html(a_status())):
        tags = Tags(html)
        kept = {"div", "img", "b", "i", "ul", "ol", "li", "code", "details", "summary", "span"}
        kept |= {"table", "thead", "tbody", "tr", "th", "td", "p"}
        assert {tag for tag, _ in tags.seen} <= kept
        assert "var(" not in html
        assert "<svg" not in html


def test_what_others_wrote_is_escaped() -> None:
    hostile = a_report(
        label=HOSTILE,
        reasons=(Reason(code="x", detail=HOSTILE),),
        siblings=(SiblingReport(pid=1, label=HOSTILE, gate="freeze", error=HOSTILE),),
        device=ReportDevice(id=HOSTILE, uuid="u", name=HOSTILE, vendor="cpu"),
    )
    status = a_status(recent=(hostile,), notices=(HOSTILE,))
    device = DeviceInfo(uuid=HOSTILE, name=HOSTILE, vendor="cpu", note=HOSTILE)
    pages = [
        display.report_html(hostile),
        display.status_html(status),
        display.monitor_html(status, 0.0),
        display.DevicesView([device])._repr_mimebundle_()["text/html"],
        display.HistoryView([hostile])._repr_mimebundle_()["text/html"],
    ]
    for page in pages:
        assert "script" not in {tag for tag, _ in Tags(page).seen}


def test_the_bundle_carries_the_whole_report_as_versioned_json() -> None:
    report = a_report()
    bundle = display.ReportView(report)._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "text/html", "application/vnd.krex.report.v1+json"}
    sent = json.loads(json.dumps(bundle["application/vnd.krex.report.v1+json"]))
    assert msgspec.convert(sent, RegionReport) == report


def test_siblings_and_evidence_are_behind_a_click_and_a_failed_reading_is_no_zero() -> None:
    html = display.report_html(a_report())
    before, _, behind = html.partition("<details>")
    assert "softmax" not in before
    assert "softmax" in behind
    assert "another uid" in behind
    assert '<td style="text-align:left">owner.run_queue_delay_s</td>' in behind
    assert behind.split("owner.run_queue_delay_s</td>")[1].startswith(
        '<td style="text-align:left">could not be read</td>'
    )


def test_the_status_says_who_holds_until_when_and_who_waits() -> None:
    text = display.status_text(a_status())
    assert "nvidia 0 NVIDIA H200: exclusive: tune.ipynb “tile 32” (pid 4711) · held 0.42 s" in text
    assert "ends by itself within 29.6 s · 4 gated, 1 observed" in text
    assert "1. softmax.ipynb (pid 12) · waited 0.20 s · ≈ 0.60 s to go" in text
    assert "✓ clean" in text


def test_the_monitor_shows_times_of_day_that_stay_true_between_changes() -> None:
    first = display.monitor_html(a_status(), 1_760_000_000.5)
    later = msgspec.structs.replace
    holder = a_status().devices[0].holder
    assert holder is not None
    moved = later(a_status().devices[0], holder=later(holder, held_s=5.42, remaining_s=24.6), queue=())
    before = later(a_status().devices[0], queue=())
    assert display.monitor_html(a_status(devices=(moved,)), 1_760_000_005.5) == display.monitor_html(
        a_status(devices=(before,)), 1_760_000_000.5
    )
    assert "since " in first


@pytest.mark.parametrize(
    ("value_s", "shown"),
    [
        (0.0, "0 s"),
        (4.348e-4, "435 µs"),
        (0.0071, "7.1 ms"),
        (0.09996, "0.10 s"),
        (0.31, "0.31 s"),
        (9.996, "10.0 s"),
        (99.96, "100 s"),
        (600.0, "600 s"),
        (-0.5, "-0.50 s"),
    ],
)
def test_durations_have_the_unit_that_fits(value_s: float, shown: str) -> None:
    assert display.seconds(value_s) == shown


def test_a_waiting_line_outside_a_notebook_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    line = display.WaitingLine(object())
    line.start()
    for position in (3, 2, 1):
        line.queued(
            Queued(request_id=1, region_id="r", position=position, waits_for="tune\nholds it", eta_s=1.5)
        )
    assert capsys.readouterr().out == "waiting, position 3: tune holds it · ≈ 1.50 s to go\n"


def test_tables_survive_line_breaks_in_their_cells() -> None:
    text = display.table_text(("a", "b"), [("1\n2", "x"), ("3", "y")])
    assert text.splitlines() == ["a    b", "1 2  x", "3    y"]
