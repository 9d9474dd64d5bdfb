"""The demo from start to end: the device, the candidates, the blocks in order, then the verdict and files.

Everything is interleaved: in each repetition every policy works through the same candidates, in random order,
and right after each block the kernels it compiled are timed alone, in two interleaved sets of passes, so that
a machine whose speed drifts hurts all policies alike.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from krex_jupyter.bench.machine import machine
from krex_jupyter.protocol import DeviceInfo

from .agents import Agents, Block, Cells, Policy
from .analysis import Analysis, PolicyResult, Run, Timing, analyse
from .candidates import Language, Variant, chosen, variants
from .picture import Panel, Span, draw
from .server import DemoError, JupyterServer, NotebookKernel

Say = Callable[[str], None]

_NOTEBOOK: dict[Language, str] = {"numba": "tuning_agent_cpu.ipynb", "cuda": "tuning_agent_cuda.ipynb"}
_POLICIES: tuple[Policy, ...] = ("none", "command", "region")
_WINDOW_S = 6.0
_FEWEST = 8


@dataclass(frozen=True)
class Settings:
    """What the command line asks for."""

    agents: int = 4
    repetitions: int = 3
    device: str | None = None
    candidates: int | None = None
    """None: as many of the fixed set as fit into ``max_time_s``."""
    alone_passes: int = 5
    """Uncontended passes after each block: one to compare, the others as the reference. At least 2."""
    max_time_s: float = 170.0
    seed: int = 0


@dataclass(frozen=True)
class Outcome:
    """What the demo found, in every form."""

    analysis: Analysis
    document: dict[str, Any]
    picture: str


def run_demo(settings: Settings, say: Say) -> Outcome:
    """Run the demo; ``say`` is given lines of progress.

    Raises:
        DemoError: it cannot run here, or something it started failed. Everything it started is ended.
    """
    started_at, started_s = time.time(), time.monotonic()
    directory = notebooks_directory()
    names = [f"agent-{agent + 1}.ipynb" for agent in range(settings.agents)]
    say(f"starting a Jupyter server and {settings.agents} notebooks")
    with JupyterServer() as server:
        device, language, device_id, note = choose_device(server.devices, settings.device)
        if note:
            say(note)
        notebook = directory / _NOTEBOOK[language]
        server.copy_notebooks(dict.fromkeys(names, notebook))
        kernels = server.open_notebooks(names)
        agents = Agents(kernels, Cells.read(notebook), language, device_id, settings.seed)
        agents.set_up()
        server.wait_until_joined()
        say(
            f"{settings.agents} notebooks are ready ({time.monotonic() - started_s:.0f} s); "
            f"device {device.name}"
        )
        selection = _select(agents, language, settings, started_s)
        say(
            f"{len(selection)} candidates ({sum(variant.wrong for variant in selection)} of them wrong), "
            f"{settings.repetitions} repetitions of {len(_POLICIES)} policies"
        )
        runs, blocks = _repeat(agents, selection, settings, say)
        panels = _panels(blocks, kernels)
        device = _reported(blocks, server.devices) or device
    parallel = min(settings.agents, len(os.sched_getaffinity(0)))
    analysis = analyse(runs, agents=settings.agents, parallel=parallel, seed=settings.seed)
    document = {
        "version": 1,
        "command": "demo",
        "started_at": started_at,
        "elapsed_s": time.monotonic() - started_s,
        "machine": machine(),
        "device": _device(device),
        "settings": asdict(settings),
        "rows": [_as_row(row) for row in analysis.rows],
        "claims": [asdict(claim) for claim in analysis.claims],
        "alone_against_alone": analysis.alone_against_alone,
        "speedup_over_gapless_command": list(analysis.gapless_speedups),
    }
    return Outcome(analysis, document, draw(panels, _window_s(panels)))


def notebooks_directory() -> Path:
    """Where the example notebooks are: inside the installed package, or the repository's `examples/`."""
    installed = Path(__file__).parent / "notebooks"
    repository = Path(__file__).parents[2] / "examples"
    for directory in (installed, repository):
        if all((directory / name).is_file() for name in _NOTEBOOK.values()):
            return directory
    raise DemoError(
        f"the demo's notebooks are neither in {installed} nor in {repository}: reinstall krex-jupyter, "
        f"or run it from a complete clone"
    )


def choose_device(devices: Sequence[DeviceInfo], wanted: str | None) -> tuple[DeviceInfo, Language, str, str]:
    """The device, what candidates are written in, what a kernel calls the device, and a note for the user.

    ``wanted`` None: ``KREX_DEVICE``, else the first NVIDIA GPU where CuPy is installed, else the cpu.

    Raises:
        DemoError: there is no such device, or what its candidates need is not installed.
    """
    wanted = wanted or os.environ.get("KREX_DEVICE") or None
    cpu = next((device for device in devices if device.vendor == "cpu"), None)
    gpu = next((device for device in devices if device.vendor == "nvidia"), None)
    note = ""
    if wanted is None:
        if gpu is not None and importlib.util.find_spec("cupy") is None:
            note = (
                "CuPy is not installed, so the CPU is used; for the GPU: pip install 'krex-jupyter[cuda13]'"
            )
            gpu = None
        wanted = "cpu" if gpu is None else "cuda:0"
    if wanted == "cpu":
        if cpu is None:
            raise DemoError(
                "the coordinator lists no cpu device: restart it (krex thaw), then run the demo again"
            )
        _need("numba", "pip install 'krex-jupyter[numba]'")
        return cpu, "numba", "cpu", note
    if wanted == "cuda:0" and gpu is not None:
        _need("cupy", "pip install 'krex-jupyter[cuda13]' (or [cuda12])")
        return gpu, "cuda", wanted, note
    known = ", ".join(device.name for device in devices) or "none"
    raise DemoError(
        f"there is no {wanted!r} for the demo: it runs on 'cpu', or on 'cuda:0' where the coordinator finds an "
        f"NVIDIA GPU (CUDA_VISIBLE_DEVICES chooses which). Devices here: {known}"
    )


def write_files(outcome: Outcome, directory: Path) -> tuple[Path, Path]:
    """Write `krex-demo.json` and `krex-demo.svg` into ``directory``."""
    data, picture = directory / "krex-demo.json", directory / "krex-demo.svg"
    data.write_text(json.dumps(outcome.document, indent=1) + "\n", encoding="utf-8")
    picture.write_text(outcome.picture, encoding="utf-8")
    return data, picture


# --- Blocks -------------------------------------------------------------------------------------------------


def _select(agents: Agents, language: Language, settings: Settings, started_s: float) -> tuple[Variant, ...]:
    """Warm every kernel's compiler up, and take as many candidates as fit into the time."""
    warm_up = chosen(language, 2 * settings.agents)
    block = agents.tune("none", warm_up, lambda _: None)
    alone_started_s = time.monotonic()
    agents.time_alone(backwards=False)
    alone_s = (time.monotonic() - alone_started_s) / len(warm_up)
    if settings.candidates is not None:
        return chosen(language, settings.candidates)
    parallel = min(settings.agents, len(os.sched_getaffinity(0)))
    together_s = block.elapsed_s / len(warm_up)
    # `none` and `region` take about as long as the warm-up, `command` as if it had one core; alone is timed
    # in passes after each. A third is kept back: the machine may slow down meanwhile.
    one_s = 2.3 * together_s + together_s * parallel + settings.alone_passes * len(_POLICIES) * alone_s
    left_s = settings.max_time_s - (time.monotonic() - started_s) - 8.0
    fitting = int(left_s * 0.67 / (settings.repetitions * one_s))
    return chosen(language, max(_FEWEST, min(fitting, len(variants(language)))))


def _repeat(
    agents: Agents, selection: Sequence[Variant], settings: Settings, say: Say
) -> tuple[list[Run], dict[Policy, Block]]:
    order = random.Random(settings.seed)  # noqa: S311  an order, not a secret
    runs: list[Run] = []
    blocks: dict[Policy, Block] = {}
    for repetition in range(settings.repetitions):
        for policy in order.sample(_POLICIES, len(_POLICIES)):
            block = agents.tune(policy, selection, lambda _: None)
            alone, again = _alone_and_again(agents, settings.alone_passes)
            run = _run(block, repetition, alone, again)
            runs.append(run)
            blocks[policy] = block
            say(
                f"repetition {repetition + 1}/{settings.repetitions}  {policy:<8} "
                f"{run.per_s * 60:6.0f} candidates/min  ({run.wrong_caught} wrong ones caught)"
            )
    return runs, blocks


def _alone_and_again(agents: Agents, passes: int) -> tuple[dict[str, float], dict[str, float]]:
    """Two uncontended times of each kernel, in seconds: a reference, and what one pass alone reads.

    The pass in the middle is held back; the reference is the median of the others, which surround it in time. So
    alone against alone compares one pass with a pooled reference, just as inflation does: two pooled times
    would agree better than anything that is measured once, and make every policy look bad beside them. Every
    other pass visits the notebooks in the opposite order, so that none is always the first.
    """
    read = [
        {name: median(samples_s) for name, samples_s in agents.time_alone(backwards=at % 2 == 1).items()}
        for at in range(passes)
    ]
    again = read.pop(passes // 2)
    return {name: median(one[name] for one in read) for name in again}, again


def _run(block: Block, repetition: int, alone: Mapping[str, float], again: Mapping[str, float]) -> Run:
    timings = tuple(
        Timing(
            task=trial.variant.task,
            name=trial.variant.name,
            loaded_s=median(trial.result["samples_s"]),
            alone_s=alone[trial.variant.name],
            again_s=again[trial.variant.name],
        )
        for trial in block.trials
        if trial.result["correct"]
    )
    reports = [trial.result["report"] for trial in block.trials if trial.result["report"] is not None]
    covered_s = sum(report["enter_s"] + report["held_s"] + report["exit_s"] for report in reports)
    return Run(
        policy=block.policy,
        repetition=repetition,
        elapsed_s=block.elapsed_s,
        candidates=len(block.trials),
        wrong_caught=sum(not trial.result["correct"] for trial in block.trials),
        timings=timings,
        held_s=tuple(report["held_s"] for report in reports),
        gaps_s=max(0.0, block.elapsed_s - covered_s) if reports else 0.0,
    )


def _reported(blocks: Mapping[Policy, Block], devices: Sequence[DeviceInfo]) -> DeviceInfo | None:
    """The device that the regions were on: what a process calls cuda:0 need not be the driver's first."""
    reports = (trial.result["report"] for block in blocks.values() for trial in block.trials)
    uuids = {report["device"]["uuid"] for report in reports if report is not None}
    return next((device for device in devices if device.uuid in uuids), None)


# --- Picture ------------------------------------------------------------------------------------------------


def _panels(blocks: Mapping[Policy, Block], kernels: Sequence[NotebookKernel]) -> list[Panel]:
    lanes = tuple(f"agent {agent + 1}" for agent in range(len(kernels)))
    lane_of = {kernel.pid: agent for agent, kernel in enumerate(kernels)}
    titles: dict[Policy, str] = {
        "command": "command: a lock around the whole candidate",
        "region": "region: a lock around the timed part only",
    }
    panels = []
    for policy, title in titles.items():
        block = blocks[policy]
        pace = f"{60 * len(block.trials) / block.elapsed_s:.0f} candidates per minute"
        panels.append(Panel(f"{title} ({pace})", lanes, tuple(_spans(block, lane_of))))
    return panels


def _spans(block: Block, lane_of: Mapping[int, int]) -> list[Span]:
    spans: list[Span] = []
    zero = block.started_at
    for trial in block.trials:
        name, result, lane = trial.variant.name, trial.result, trial.agent
        for kind in ("compile", "check"):
            start, end = (at - zero for at in result[f"{kind}_at"])
            spans.append(Span(lane, kind, start, end, f"{name}: {kind}"))
        report = result["report"]
        if report is None:
            continue
        granted = report["started_at"] - zero
        entering = granted - report["enter_s"]
        released = granted + report["held_s"] + report["exit_s"]
        spans.append(Span(lane, "wait", entering - report["wait_s"], entering, f"{name}: waits"))
        spans.append(
            Span(
                lane,
                "held",
                entering,
                released,
                f"{name}: held {report['held_s']:.3f} s, {report['verdict']}",
            )
        )
        spans.extend(
            Span(lane_of[sibling["pid"]], "paused", granted, released, f"paused by {name}")
            for sibling in report["siblings"]
            if sibling["pid"] in lane_of and sibling["gate"] != "observe"
        )
    return spans


def _window_s(panels: Sequence[Panel]) -> float:
    ends = [max((span.end_s for span in panel.spans), default=_WINDOW_S) for panel in panels]
    return min(_WINDOW_S, *ends)


# --- JSON ---------------------------------------------------------------------------------------------------


def _as_row(row: PolicyResult) -> dict[str, Any]:
    return {
        "policy": row.policy,
        "agents": row.agents,
        "candidates": row.candidates,
        "wrong_caught": row.wrong_caught,
        "candidates_per_s": fmean(row.per_s) if row.per_s else None,
        "candidates_per_s_by_repetition": list(row.per_s),
        "speedup_over_command": fmean(row.speedups) if row.speedups else None,
        "speedup_over_command_by_repetition": list(row.speedups),
        "share_of_bound": row.share_of_bound,
        "held_s": row.held_s,
        "inflation": {
            name: {
                "n": band.n,
                "median": band.median,
                "mean": band.mean,
                "p95": band.p95,
                "mean_ci95": [band.low, band.high],
            }
            for name, band in row.inflation.items()
        },
        "flip_rate": row.flips.rate,
        "flip_rate_ci95": None if row.flips.low is None else [row.flips.low, row.flips.high],
        "flip_rate_separable": row.flips.separable_rate,
        "top1_flip_rate": row.flips.top1_rate,
        "regret": row.flips.regret,
        "pairs": row.flips.pairs,
        "separable_pairs": row.flips.separable_pairs,
    }


def _device(device: DeviceInfo) -> dict[str, Any]:
    return {
        "uuid": device.uuid,
        "name": device.name,
        "vendor": device.vendor,
        "index": device.index,
        "memory_bytes": device.memory_bytes,
        "gates": list(device.gates),
    }


def _need(module: str, install: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise DemoError(
            f"the demo's candidates need {module}, which {sys.executable} does not have: {install}"
        )
