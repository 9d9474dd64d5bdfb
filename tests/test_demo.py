"""`krex demo`: what its numbers mean, what its candidates are, and that a real run leaves nothing behind."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import nbformat
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from krex_jupyter.demo import analysis, candidates, picture, session, table
from krex_jupyter.demo.agents import Cells
from krex_jupyter.demo.analysis import Run, Timing
from krex_jupyter.demo.server import DemoError
from krex_jupyter.protocol import DeviceInfo

from .left_overs import REPOSITORY, processes_that_mention

CPU = DeviceInfo(uuid="cpu", name="cpu", vendor="cpu")
GPU = DeviceInfo(uuid="GPU-1", name="GPU", vendor="nvidia", index=0)
TIMES_S = {"a": 1e-3, "b": 2e-3, "c": 3e-3, "d": 3.003e-3}


def run_of(
    policy: str, repetition: int, factor: float = 1.0, again: float = 1.0, elapsed_s: float = 4.0
) -> Run:
    timings = tuple(
        Timing(task="task", name=name, loaded_s=time_s * factor, alone_s=time_s, again_s=time_s * again)
        for name, time_s in TIMES_S.items()
    )
    held_s = () if policy == "none" else (0.1,) * 4
    return Run(policy, repetition, elapsed_s, 5, 1, timings, held_s, 0.0)


def demo_of(**factors: float) -> list[Run]:
    elapsed_s = {"none": 2.0, "command": 4.0, "region": 2.0}
    return [
        run_of(policy, repetition, factor, elapsed_s=elapsed_s[policy])
        for repetition in range(3)
        for policy, factor in factors.items()
    ]


def source() -> random.Random:
    return random.Random(0)


# --- Inflation ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("alone_s", "band"),
    [(5e-5, "<0.1ms"), (1e-4, "0.1-1ms"), (9.9e-4, "0.1-1ms"), (1e-3, "1-10ms"), (0.01, ">10ms")],
)
def test_a_kernel_belongs_to_the_band_of_its_alone_time(alone_s: float, band: str) -> None:
    assert analysis.band_of(alone_s) == band


def test_a_known_slow_down_is_found_with_an_interval_around_it() -> None:
    timings = [Timing("t", f"k{at}", 1e-3 * (1.2 + 0.01 * (at % 3 - 1)), 1e-3, 1e-3) for at in range(30)]
    band = analysis.inflation(timings, lambda timing: timing.loaded_s, source())["1-10ms"]
    assert band.n == 30
    assert band.mean == pytest.approx(0.2)
    assert 0.19 < band.low < 0.2 < band.high < 0.21


def test_repetitions_of_one_candidate_do_not_narrow_the_interval() -> None:
    few = [Timing("t", f"k{at}", 1e-3 * (1 + 0.1 * at), 1e-3, 1e-3) for at in range(5)]
    once = analysis.inflation(few, lambda timing: timing.loaded_s, source())["1-10ms"]
    often = analysis.inflation(few * 20, lambda timing: timing.loaded_s, source())["1-10ms"]
    assert often.n == 20 * once.n
    assert (often.low, often.high) == (pytest.approx(once.low), pytest.approx(once.high))


@given(clusters=st.lists(st.lists(st.floats(-0.5, 5), min_size=1, max_size=4), min_size=1, max_size=8))
@settings(deadline=None, max_examples=50)
def test_the_interval_of_a_mean_lies_within_its_values(clusters: list[list[float]]) -> None:
    low, high = analysis.bootstrap_mean(clusters, source(), resamples=50)
    values = [value for cluster in clusters for value in cluster]
    assert min(values) - 1e-9 <= low <= high <= max(values) + 1e-9


def test_alone_against_alone_does_not_let_signs_cancel() -> None:
    timings = [Timing("t", "up", 1e-3, 1e-3, 1.05e-3), Timing("t", "down", 1e-3, 1e-3, 0.95e-3)]
    assert analysis.alone_against_alone(timings)["all"] == pytest.approx(0.05)


# --- Rankings -----------------------------------------------------------------------------------------------

rankings = st.dictionaries(st.sampled_from("abcdefg"), st.floats(1e-5, 1e-1), min_size=2)


def flip_rate(times: dict[str, float], reference: dict[str, float]) -> float:
    rate = analysis.flips([(times, reference)], {"t": sorted(times)}, set(), source(), resamples=1).rate
    assert rate is not None
    return rate


@given(times=rankings, factor=st.sampled_from([0.5, 2.0, 8.0]))
def test_a_uniform_slow_down_flips_nothing_but_ties(times: dict[str, float], factor: float) -> None:
    slower = {name: value * factor for name, value in times.items()}
    assert flip_rate(slower, times) == flip_rate(times, times)


@given(times=rankings)
def test_a_reversed_order_flips_every_pair_and_ties_count_half(times: dict[str, float]) -> None:
    reversed_order = {name: -value for name, value in times.items()}
    assert flip_rate(reversed_order, times) == pytest.approx(1 - flip_rate(times, times))
    names = sorted(times)
    ties = sum(times[a] == times[b] for at, a in enumerate(names) for b in names[:at])
    assert flip_rate(times, times) == pytest.approx(0.5 * ties / (len(names) * (len(names) - 1) / 2))


def test_one_exchanged_pair_is_one_flip_and_costs_regret() -> None:
    reference = {"a": 1.0, "b": 2.0, "c": 3.0}
    found = analysis.flips(
        [({"a": 2.0, "b": 1.0, "c": 3.0}, reference)],
        {"t": ["a", "b", "c"]},
        {("a", "b"), ("a", "c")},
        source(),
    )
    assert found.rate == pytest.approx(1 / 3)
    assert found.separable_rate == pytest.approx(1 / 2)
    assert found.top1_rate == 1.0
    assert found.regret == pytest.approx(2.0)


def test_pairs_within_the_margin_are_not_separable() -> None:
    passes = [dict(TIMES_S) for _ in range(6)]
    found = analysis.separable_pairs(passes, {"task": sorted(TIMES_S)})
    assert ("c", "d") not in found
    assert ("a", "b") in found


def test_five_passes_prove_no_order() -> None:
    assert analysis.separable_pairs([dict(TIMES_S)] * 5, {"task": sorted(TIMES_S)}) == set()


# --- Claims -------------------------------------------------------------------------------------------------


def claims(runs: list[Run]) -> dict[str, bool]:
    return {claim.name: claim.held for claim in analysis.analyse(runs, agents=4, parallel=2).claims}


def test_a_good_run_holds_every_claim() -> None:
    found = analysis.analyse(demo_of(none=1.5, command=1.0, region=1.001), agents=4, parallel=2)
    assert found.held
    assert {row.policy for row in found.rows} == {"alone", "none", "command", "region"}
    region = next(row for row in found.rows if row.policy == "region")
    assert region.speedups == (2.0, 2.0, 2.0)


def test_harm_inside_regions_is_not_claimed_away() -> None:
    assert claims(demo_of(none=1.5, command=1.0, region=1.05))["fidelity"] is False


def test_a_run_in_which_none_shows_no_harm_says_so() -> None:
    runs = demo_of(none=1.0, command=1.0, region=1.0)
    assert claims(runs)["control"] is False
    assert "shows no harm" in table.render(analysis.analyse(runs, agents=4, parallel=2))


def test_a_machine_that_disagrees_with_itself_is_called_too_noisy() -> None:
    runs = [
        run_of(policy, 0, factor, again=1.04)
        for policy, factor in (("none", 1.5), ("command", 1), ("region", 1))
    ]
    found = analysis.analyse(runs, agents=4, parallel=2)
    assert found.too_noisy
    assert "too noisy" in table.render(found)


def test_one_slow_repetition_breaks_the_throughput_claim() -> None:
    runs = demo_of(none=1.5, command=1.0, region=1.0)
    runs[2] = run_of("region", 0, elapsed_s=5.0)
    assert claims(runs)["throughput"] is False


def test_the_table_has_a_line_per_policy() -> None:
    text = table.render(analysis.analyse(demo_of(none=1.5, command=1.0, region=1.0), agents=4, parallel=2))
    for policy in ("alone", "none", "command", "region"):
        assert any(line.startswith(policy) for line in text.splitlines())


# --- Picture ------------------------------------------------------------------------------------------------


@given(
    title=st.text(
        st.characters(blacklist_categories=["Cc", "Cs"], blacklist_characters="\ufffe\uffff"), max_size=20
    ),
    spans=st.lists(
        st.tuples(
            st.integers(0, 1),
            st.sampled_from(["compile", "check", "wait", "held", "paused"]),
            st.floats(-1, 10),
            st.floats(0, 3),
        ),
        max_size=10,
    ),
)
@settings(deadline=None, max_examples=50)
def test_the_picture_is_xml_whatever_happened(title: str, spans: list[tuple[int, Any, float, float]]) -> None:
    drawn = picture.draw(
        [
            picture.Panel(
                title,
                ("agent 1", title),
                tuple(
                    picture.Span(lane, kind, start, start + length, title)
                    for lane, kind, start, length in spans
                ),
            )
        ],
        window_s=6.0,
    )
    root = ET.fromstring(drawn)
    assert root.tag.endswith("svg")
    for shape in root.iter("{http://www.w3.org/2000/svg}rect"):
        assert float(shape.get("width", "0")) >= 0


def test_the_picture_reads_on_dark_and_light() -> None:
    drawn = picture.draw([picture.Panel("p", ("a",), (picture.Span(0, "held", 0, 1),))], 1.0)
    assert "prefers-color-scheme: dark" in drawn


# --- Candidates and notebooks -------------------------------------------------------------------------------


@pytest.mark.parametrize("language", ["numba", "cuda"])
def test_the_set_has_wrong_candidates_and_every_source_is_new(language: candidates.Language) -> None:
    whole = candidates.variants(language)
    assert len({variant.name for variant in whole}) == len(whole)
    assert sum(variant.wrong for variant in whole) >= 3
    for variant in whole:
        one, other = (candidates.write(variant, language, nonce).source for nonce in ("x1", "x2"))
        assert one != other


@pytest.mark.parametrize(("count", "wrong"), [(2, 1), (8, 1), (20, 3)])
def test_a_part_of_the_set_covers_its_tasks_and_has_its_share_of_wrong_ones(count: int, wrong: int) -> None:
    part = candidates.chosen("numba", count)
    assert len(part) == count
    assert sum(variant.wrong for variant in part) == wrong
    tasks = {variant.task for variant in candidates.variants("numba")}
    assert len({variant.task for variant in part}) >= min(count - 1, len(tasks))


@pytest.mark.parametrize("name", ["tuning_agent_cpu.ipynb", "tuning_agent_cuda.ipynb"])
def test_the_example_notebooks_are_valid_and_tagged(name: str) -> None:
    path = session.notebooks_directory() / name
    nbformat.validate(nbformat.read(path, 4))
    cells = Cells.read(path)
    assert cells.setup[0].startswith("%load_ext krex_jupyter")
    assert "krex.exclusive(" in cells.candidate


@pytest.mark.slow
def test_the_notebook_accepts_every_honest_candidate_and_catches_every_wrong_one() -> None:
    pytest.importorskip("numba", reason="the CPU candidates need Numba")
    cells = Cells.read(session.notebooks_directory() / "tuning_agent_cpu.ipynb")
    names: dict[str, Any] = {}
    for code in cells.setup:
        exec(code.replace("%load_ext krex_jupyter", ""), names)
    for variant in candidates.variants("numba"):
        payload = candidates.write(variant, "numba", "test").payload()
        kernel = names["compile_candidate"](payload)
        assert bool(names["is_correct"](kernel, payload)) is not variant.wrong, variant.name


def test_the_device_is_the_one_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KREX_DEVICE", raising=False)
    assert session.choose_device([GPU, CPU], "cpu")[0] == CPU
    assert session.choose_device([CPU], None)[:3] == (CPU, "numba", "cpu")
    monkeypatch.setenv("KREX_DEVICE", "cpu")
    assert session.choose_device([GPU, CPU], None)[0] == CPU


def test_a_device_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(DemoError, match=r"'cuda:0'.*Devices here: cpu"):
        session.choose_device([CPU], "cuda:0")
    with pytest.raises(DemoError, match=r"'cuda:1'.*CUDA_VISIBLE_DEVICES"):
        session.choose_device([GPU, CPU], "cuda:1")


# --- Real runs ----------------------------------------------------------------------------------------------


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory with a short path (sockets!) that every process of a run mentions; none may be left."""
    with tempfile.TemporaryDirectory(prefix="kd-", dir="/tmp") as name:
        yield Path(name)
        left = processes_that_mention(name)
        for pid in left:
            os.kill(pid, signal.SIGCONT)
            os.kill(pid, signal.SIGKILL)
        assert not left


def start_demo(place: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "krex_jupyter.app", "demo", "--output", str(place), *options],
        env={**os.environ, "TMPDIR": str(place), "KREX_LOCK_DIR": str(place), "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_quick_demo_runs_and_leaves_nothing(place: Path) -> None:
    started_s = time.monotonic()
    process = start_demo(place, "--quick", "--device", "cpu")
    output, _ = process.communicate(timeout=150)
    assert process.returncode == 0, output
    document = json.loads((place / "krex-demo.json").read_text())
    assert document["version"] == 1
    assert document["command"] == "demo"
    rows = {row["policy"]: row for row in document["rows"]}
    assert set(rows) == {"alone", "none", "command", "region"}
    assert rows["region"]["candidates"] == rows["command"]["candidates"] == 16
    assert rows["region"]["wrong_caught"] == 2
    assert len(rows["region"]["speedup_over_command_by_repetition"]) == 2
    assert all(set(band) >= {"n", "median", "mean", "p95"} for band in rows["region"]["inflation"].values())
    ET.fromstring((place / "krex-demo.svg").read_text())
    assert time.monotonic() - started_s < 90


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_ends_everything_it_started(place: Path, number: signal.Signals) -> None:
    process = start_demo(place, "--device", "cpu")
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("repetition 1/"):
            break
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert not processes_that_mention(str(place))
    assert not (place / "krex-demo.json").exists()


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_a_quick_demo_runs_on_the_gpu(place: Path) -> None:
    pytest.importorskip("cupy", reason="the GPU's candidates need CuPy")
    process = start_demo(place, "--quick", "--device", "cuda:0")
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 0, output
    document = json.loads((place / "krex-demo.json").read_text())
    assert document["device"]["vendor"] == "nvidia"
