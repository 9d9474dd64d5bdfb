"""What a person, a saved notebook and an agent see of a report, a queue and a device list.

Pure functions turn protocol structs into text, HTML and versioned JSON; small classes around them have
``_repr_mimebundle_``. One thing here is not pure: `WaitingLine`, which shows where a request stands and then
becomes the badge.

The HTML must survive JupyterLab's sanitizer, which treats a notebook that came from elsewhere as untrusted:
it strips inline ``<svg>`` and CSS variables. So the badge is a picture in an ``<img>`` with a data URL (and
says the same in ``alt``), and all else inherits its colours. A verdict is a sign and a word before
it is a colour. Everything that came from a user or another process is escaped.
"""

from __future__ import annotations

import base64
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

from .protocol import (
    DeviceInfo,
    HolderStatus,
    Queued,
    RegionReport,
    SiblingReport,
    Status,
    Verdict,
    WaiterStatus,
    as_builtins,
)

REPORT_MIME = "application/vnd.krex.report.v1+json"
UPDATE_INTERVAL_S = 0.25
"""Live output changes at most this often: a busy queue must not flood the notebook's message channel."""

SIGNS: dict[Verdict, str] = {"clean": "✓", "suspect": "!", "contended": "×", "revoked": "⊘", "unknown": "?"}  # noqa: RUF001
_COLOURS: dict[Verdict, str] = {
    # White text on each has a contrast of at least 4.5 to 1.
    "clean": "#187a4b",
    "suspect": "#8a6100",
    "contended": "#b93a16",
    "revoked": "#6a4c9c",
    "unknown": "#59636e",
}
_MEANINGS: dict[str, str] = {
    "driver-lock": "drained and blocked (driver-lock)",
    "quiesce": "frozen, then drained (quiesce)",
    "freeze": "frozen",
    "observe": "only observed",
}
_NUMERIC, _TEXTUAL = ' style="text-align:right"', ' style="text-align:left"'


# --- A region's report --------------------------------------------------------------------------------------


class ReportView:
    """A `RegionReport` that knows how to show itself; ``report`` is the data."""

    def __init__(self, report: RegionReport) -> None:
        self.report = report

    def __repr__(self) -> str:
        return report_text(self.report)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        return report_bundle(self.report)


def report_bundle(report: RegionReport) -> dict[str, Any]:
    """The mimebundle of ``report``: one line of text, an HTML badge, versioned JSON."""
    return {
        "text/plain": report_text(report),
        "text/html": report_html(report),
        REPORT_MIME: as_builtins(report),
    }


def report_text(report: RegionReport) -> str:
    """One line: the verdict, how long it waited, held and took to enter, then each reason with what to do."""
    parts = [
        f"{SIGNS[report.verdict]} {report.verdict}",
        f"waited {seconds(report.wait_s)}",
        f"held {seconds(report.held_s)}",
        f"entered in {seconds(report.enter_s)}",
        report.device.id,
    ]
    if report.label:
        parts.append(report.label)
    line = " · ".join(parts)
    if report.reasons:
        line += " | " + " | ".join(f"{reason.code}: {reason.detail}" for reason in report.reasons)
    return _one_line(line)


def report_html(report: RegionReport) -> str:
    """The badge, the reasons, and behind a click who was gated and what was seen."""
    durations = (("waited", report.wait_s), ("held", report.held_s), ("entered in", report.enter_s))
    figures = " &nbsp; ".join(f"{name} <b>{escape(seconds(value_s))}</b>" for name, value_s in durations)
    label = f" &nbsp; <i>{escape(report.label)}</i>" if report.label else ""
    reasons = "".join(
        f"<li><code>{escape(reason.code)}</code>: {escape(reason.detail)}</li>" for reason in report.reasons
    )
    return (
        f"<div>{badge_html(report.verdict)} &nbsp; {figures}{label}"
        + (f"<ul>{reasons}</ul>" if reasons else "")
        + f"<details><summary>{escape(_summary(report))}</summary>{_siblings_html(report.siblings)}"
        f"{_evidence_html(report)}</details></div>"
    )


def badge_html(verdict: Verdict) -> str:
    """The verdict's sign and word on its colour, as a picture that an untrusted notebook may show."""
    words = f"{SIGNS[verdict]} {verdict}"
    width = 22 + 8 * len(words)
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="24" role="img">'
        f'<rect width="{width}" height="24" rx="4" fill="{_COLOURS[verdict]}"/>'
        f'<text x="{width // 2}" y="16.5" fill="#ffffff" font-family="Helvetica,Arial,sans-serif" '
        f'font-size="14" font-weight="bold" text-anchor="middle">{escape(words)}</text></svg>'
    )
    data = base64.b64encode(svg.encode()).decode("ascii")
    return f'<img alt="{escape(words)}" src="data:image/svg+xml;base64,{data}">'


def _summary(report: RegionReport) -> str:
    counts: dict[str, int] = {}
    for sibling in report.siblings:
        counts[sibling.gate] = counts.get(sibling.gate, 0) + 1
    gated = [f"{_plural(count, 'sibling')} {_MEANINGS[gate]}" for gate, count in counts.items()]
    device = f"{report.device.id} {report.device.name}"
    return " · ".join(
        [device, *(gated or ["no siblings"]), f"cpu {report.cpu_policy}", f"region {report.region_id}"]
    )


def _siblings_html(siblings: Sequence[SiblingReport]) -> str:
    if not siblings:
        return ""
    rows = [
        (
            str(sibling.pid),
            sibling.label,
            sibling.gate,
            "yes" if sibling.frozen else "no",
            "" if sibling.drain_s is None else seconds(sibling.drain_s),
            sibling.error,
        )
        for sibling in siblings
    ]
    return table_html(("pid", "sibling", "gate", "frozen", "drained in", "error"), rows, numeric=(0, 4))


def _evidence_html(report: RegionReport) -> str:
    rows: list[tuple[str, str]] = []
    plain = as_builtins(report.evidence)
    for source, readings in plain.items():
        if readings is None:
            rows.append((source, "could not be read"))
            continue
        for name, value in readings.items():
            rows.append((f"{source}.{name}", _evidence_value(name, value)))
    return table_html(("evidence", "read"), rows)


def _evidence_value(name: str, value: Any) -> str:
    if value is None:
        # A failed reading looks like one: never like a zero.
        return "could not be read"
    if name.endswith("_s") and isinstance(value, int | float):
        return seconds(float(value))
    if value in ("", [], (), {}):
        return "none"
    return str(value)


# --- Status, devices, history -------------------------------------------------------------------------------


class StatusView:
    """Who holds which device, who waits, and what the last verdicts were."""

    def __init__(self, status: Status) -> None:
        self.status = status

    def __repr__(self) -> str:
        return status_text(self.status)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        return {"text/plain": status_text(self.status), "text/html": status_html(self.status)}


class DevicesView:
    """The devices of this host, and how each can be gated."""

    def __init__(self, devices: Iterable[DeviceInfo]) -> None:
        self.devices = list(devices)

    def __repr__(self) -> str:
        return table_text(_DEVICE_HEADER, self._rows()) if self.devices else "no devices"

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        return {"text/plain": repr(self), "text/html": table_html(_DEVICE_HEADER, self._rows(), numeric=(2,))}

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (
                device_name(device),
                device.uuid,
                "" if device.memory_bytes is None else f"{device.memory_bytes / 2**30:.0f} GiB",
                ", ".join(device.gates),
                device.note,
            )
            for device in self.devices
        ]


class HistoryView:
    """Reports, newest first."""

    def __init__(self, reports: Iterable[RegionReport]) -> None:
        self.reports = list(reports)

    def __repr__(self) -> str:
        return table_text(_HISTORY_HEADER, history_rows(self.reports)) if self.reports else "no regions yet"

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        html = table_html(_HISTORY_HEADER, history_rows(self.reports), numeric=(3, 4, 5))
        return {"text/plain": repr(self), "text/html": html if self.reports else "<p>no regions yet</p>"}


_DEVICE_HEADER = ("device", "uuid", "memory", "gates", "note")
_HISTORY_HEADER = ("at", "verdict", "device", "waited", "held", "entered in", "who", "reasons", "region")


def history_rows(reports: Iterable[RegionReport]) -> list[tuple[str, ...]]:
    """One row per report, as `HistoryView` shows them."""
    return [
        (
            time.strftime("%H:%M:%S", time.localtime(report.started_at)),
            f"{SIGNS[report.verdict]} {report.verdict}",
            report.device.id,
            seconds(report.wait_s),
            seconds(report.held_s),
            seconds(report.enter_s),
            who(report.label, report.notebook, report.pid),
            ", ".join(reason.code for reason in report.reasons),
            report.region_id,
        )
        for report in reports
    ]


def status_text(status: Status) -> str:
    """The status of a host in lines of text."""
    lines: list[str] = []
    for device in status.devices:
        lines.append(f"{device_name(device.device)}: {holder_text(device.holder)}")
        lines.extend(f"  {waiter_text(waiter)}" for waiter in device.queue)
    lines.append(f"{_plural(len(status.participants), 'participant')}, {_paused(status)} paused")
    lines.extend(f"notice: {notice}" for notice in status.notices)
    if status.recent:
        lines.append(table_text(_HISTORY_HEADER, history_rows(status.recent[:_RECENT_SHOWN])))
    return "\n".join(lines)


def status_html(status: Status) -> str:
    """The status of a host: a paragraph per device, its queue, then the last verdicts."""
    return _status_html(status, holder_text, _waiter_words)


def monitor_html(status: Status, received_at: float) -> str:
    """The same for a view that stays: times of day, because durations would stand still between changes.

    ``received_at`` is the Unix time at which ``status`` came.
    """

    def clock(offset_s: float) -> str:
        return time.strftime("%H:%M:%S", time.localtime(received_at + offset_s))

    def holder_words(holder: HolderStatus | None) -> str:
        if holder is None:
            return "free"
        words = [f"exclusive: {who(holder.label, holder.notebook, holder.pid)} since {clock(-holder.held_s)}"]
        if holder.remaining_s is not None:
            words.append(f"ends by itself by {clock(holder.remaining_s)}")
        return " · ".join([*words, *_gated(holder)])

    def waiter_words(waiter: WaiterStatus) -> str:
        estimate = "" if waiter.eta_s is None else f" · ≈ {clock(waiter.eta_s)}"
        since = clock(-waiter.waited_s)
        return f"{who(waiter.label, waiter.notebook, waiter.pid)} · waiting since {since}{estimate}"

    return _status_html(status, holder_words, waiter_words)


def _status_html(
    status: Status,
    holder_words: Callable[[HolderStatus | None], str],
    waiter_words: Callable[[WaiterStatus], str],
) -> str:
    parts = []
    for device in status.devices:
        queue = "".join(f"<li>{escape(waiter_words(waiter))}</li>" for waiter in device.queue)
        holder = escape(holder_words(device.holder))
        parts.append(f"<div><b>{escape(device_name(device.device))}</b>: {holder}")
        parts.append(f"<ol>{queue}</ol></div>" if queue else "</div>")
    parts.append(f"<div>{_plural(len(status.participants), 'participant')}, {_paused(status)} paused</div>")
    parts.extend(f"<div>notice: {escape(notice)}</div>" for notice in status.notices)
    if status.recent:
        rows = history_rows(status.recent[:_RECENT_SHOWN])
        parts.append(table_html(_HISTORY_HEADER, rows, numeric=(3, 4, 5)))
    return "<div>" + "".join(parts) + "</div>"


_RECENT_SHOWN = 5


def _paused(status: Status) -> int:
    return sum(participant.state == "paused" for participant in status.participants)


def device_name(device: DeviceInfo) -> str:
    """How a person finds it on this host: its kind, the driver's index and the model."""
    index = "" if device.index is None else f" {device.index}"
    return f"{device.vendor}{index} {device.name}"


def holder_text(holder: HolderStatus | None) -> str:
    """Who has the device, and until when at most."""
    if holder is None:
        return "free"
    words = [
        f"exclusive: {who(holder.label, holder.notebook, holder.pid)}",
        f"{holder.phase} {seconds(holder.held_s)}",
    ]
    if holder.remaining_s is not None:
        words.append(f"ends by itself within {seconds(holder.remaining_s)}")
    return " · ".join([*words, *_gated(holder)])


def _gated(holder: HolderStatus) -> list[str]:
    words = f"{holder.siblings_gated} gated, {holder.siblings_observed} observed"
    return [words, holder.notice] if holder.notice else [words]


def waiter_text(waiter: WaiterStatus) -> str:
    """A place in the queue."""
    return f"{waiter.position}. {_waiter_words(waiter)}"


def _waiter_words(waiter: WaiterStatus) -> str:
    estimate = "" if waiter.eta_s is None else f" · ≈ {seconds(waiter.eta_s)} to go"
    return f"{who(waiter.label, waiter.notebook, waiter.pid)} · waited {seconds(waiter.waited_s)}{estimate}"


def who(label: str, notebook: str, pid: int) -> str:
    """A process as people know it: its notebook, what it is doing, its pid."""
    name = notebook.rsplit("/", 1)[-1]
    if name and label and label != name:
        return f"{name} “{label}” (pid {pid})"
    return f"{name or label or 'process'} (pid {pid})"


# --- While waiting ------------------------------------------------------------------------------------------


_STARTED = "exclusive region …"


class WaitingLine:
    """One output of a cell: first where its request stands, in the end the badge.

    Under a notebook kernel it is one output that changes in place (`is_live`), put up before the region
    is asked for, so that the badge always stands above what the cell prints. A terminal prints every update
    as a new line: there it is one line when the wait begins, and the badge. With ``quiet`` there is no badge,
    and a line only while somebody else holds the device, because no wait is silent.
    """

    def __init__(self, shell: Any, *, quiet: bool = False) -> None:
        self._shell = shell
        self._live = is_live(shell)
        self._quiet = quiet
        self._display_id = uuid.uuid4().hex
        self._placed = False
        self._waited = False
        self._shown = ""

    def start(self) -> None:
        """Take the output's place in the cell."""
        if self._live and not self._quiet:
            self._show(_STARTED)

    def queued(self, message: Queued) -> None:
        """Show where the request stands; called by the waiting thread, at most four times a second."""
        line = queued_text(message)
        if self._live:
            self._waited = True
            self._show(line)
        elif not self._shown:
            self._shown = line
            print(line, flush=True)

    def granted(self) -> None:
        """Say that the wait is over, where one was shown; costs the region nothing where it did not wait."""
        if self._waited:
            self._show(_STARTED)

    def finish(self, report: RegionReport | None, refusal: BaseException | None = None) -> None:
        """Become the badge; without a report say why the region was not entered, or vanish."""
        if report is not None and not self._quiet:
            self._replace(report_bundle(report))
        elif self._placed:
            self._show("" if refusal is None else f"not entered: {type(refusal).__name__}")

    def _show(self, line: str) -> None:
        if line == self._shown:
            return
        self._shown = line
        self._replace({"text/plain": line, "text/html": f"<span>{escape(line)}</span>"})

    def _replace(self, bundle: dict[str, Any]) -> None:
        # Straight to the shell's publisher: `display` works only for the one shell of a process.
        publish = self._shell.display_pub.publish
        if self._live:
            publish(data=bundle, transient={"display_id": self._display_id}, update=self._placed)
        else:
            publish(data=bundle)
        self._placed = True


def queued_text(message: Queued) -> str:
    """One line: the position, what is waited for, and the estimate."""
    estimate = "" if message.eta_s is None else f" · ≈ {seconds(message.eta_s)} to go"
    waits_for = message.waits_for.rstrip(".")
    return _one_line(f"waiting, position {message.position}: {waits_for}{estimate}")


def is_live(shell: object) -> bool:
    """Whether outputs can change in place: a real notebook kernel, not a terminal or a test's shell."""
    # Never imports ipykernel: where it is not loaded, the shell is none of its.
    zmqshell = sys.modules.get("ipykernel.zmqshell")
    return zmqshell is not None and isinstance(shell, zmqshell.ZMQInteractiveShell)


# --- Building blocks ----------------------------------------------------------------------------------------


def seconds(value_s: float) -> str:
    """``value_s`` for people: three significant digits, in the unit that fits."""
    if value_s < 0:
        return f"-{seconds(-value_s)}"
    if value_s == 0:
        return "0 s"
    if value_s < 0.999_5e-3:
        return f"{value_s * 1e6:.3g} µs"
    if value_s < 0.099_95:
        return f"{value_s * 1e3:.3g} ms"
    if value_s < 9.995:
        return f"{value_s:.2f} s"
    if value_s < 99.95:
        return f"{value_s:.1f} s"
    return f"{value_s:.0f} s"


def table_text(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns, aligned; no line break of a cell survives."""
    lines = [list(header), *([_one_line(cell) for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    return "\n".join("  ".join(line).rstrip() for line in padded)


def table_html(header: Sequence[str], rows: Sequence[Sequence[str]], *, numeric: Sequence[int] = ()) -> str:
    """A plain table; every cell is escaped."""

    def line(cells: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{_NUMERIC if column in numeric else _TEXTUAL}>{escape(cell)}</{tag}>"
            for column, cell in enumerate(cells)
        )

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return f"<table><thead><tr>{line(header, 'th')}</tr></thead><tbody>{body}</tbody></table>"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
