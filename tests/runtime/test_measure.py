"""`measure` and `compare` on the cpu, with real functions and a real coordinator.

The machine may be busy, so no test asks for a quiet verdict or for settled numbers where noise could deny them.
"""

from __future__ import annotations

import json
import math
import time
from typing import Any

import pytest

import krex_jupyter as krex
from krex_jupyter.protocol import RegionReport, ReportDevice
from krex_jupyter.runtime import results
from tests.conftest import Place

pytestmark = pytest.mark.usefixtures("place")

SHORT: dict[str, Any] = {"device": "cpu", "max_time": 0.15}


def spin(seconds: float = 3e-4) -> None:
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        pass


def released() -> bool:
    """Nobody holds the cpu."""
    return all(device.holder is None for device in krex.status().devices)


# --- One measurement ----------------------------------------------------------------------------------------------


def test_a_known_delay_is_measured_in_one_region_with_a_verdict() -> None:
    found = krex.measure(spin, (1e-3,), **SHORT)
    assert found.min_s == pytest.approx(1e-3, rel=0.05)
    assert found.median_s is not None
    assert found.median_s >= 1e-3
    assert found.n == len(found.samples_s) >= 20
    assert (found.timer, found.cache, found.batch) == ("host clock", "warm", 1)
    assert found.valid
    assert isinstance(found.region, RegionReport)
    assert found.region.label == found.label == "spin"
    assert [report.region_id for report in krex.history()] == [found.region.region_id]
    assert found.settled == (
        not {"imprecise", "unstable", "clock_unsteady"} & {r.code for r in found.reasons}
    )


def test_the_region_ends_by_max_time_and_says_what_is_missing() -> None:
    found = krex.measure(spin, (0.02,), device="cpu", max_time=0.2, precision=1e-6)
    assert not found.settled
    assert "imprecise" in {reason.code for reason in found.reasons}
    assert found.region is not None
    assert 0.0 < found.region.held_s < 0.6


def test_a_very_short_call_is_batched() -> None:
    found = krex.measure(lambda: None, **SHORT)
    assert found.batch > 10
    assert found.timer == "host clock, batch"
    assert found.median_s is not None
    assert 1e-9 < found.median_s < 1e-5


def test_arguments_reach_the_function() -> None:
    seen: set[tuple[int, str]] = set()
    krex.measure(lambda a, b: seen.add((a, b)), (1,), {"b": "x"}, **SHORT)
    assert seen == {(1, "x")}


def test_a_call_far_beyond_max_time_is_refused_without_holding_anything() -> None:
    with pytest.raises(krex.KrexError, match=r"max_time=\d+"):
        krex.measure(spin, (0.3,), device="cpu", max_time=0.05)
    assert krex.history() == []


@pytest.mark.parametrize("first_calls", [0, 40])
def test_what_the_function_raises_comes_through_and_the_region_is_released(first_calls: int) -> None:
    calls = 0

    def fails() -> None:
        nonlocal calls
        calls += 1
        spin()
        if calls > first_calls:
            raise ZeroDivisionError("the function's own")

    with pytest.raises(ZeroDivisionError, match="the function's own"):
        krex.measure(fails, **SHORT)
    assert released()
    assert len(krex.history()) == (1 if first_calls else 0)


def test_a_failed_check_is_invalid_and_costs_no_region() -> None:
    found = krex.measure(lambda: 41, check=lambda result: result == 42, **SHORT)
    assert not found.valid
    assert found.median_s is None
    assert [reason.code for reason in found.reasons] == ["check_failed"]
    assert "INVALID" in repr(found)
    assert krex.history() == []


def test_a_check_that_raises_is_a_failed_check() -> None:
    def check(result: int) -> None:
        assert result == 42, "not forty-two"

    found = krex.measure(lambda: 41, check=check, **SHORT)
    assert not found.valid
    assert "not forty-two" in found.reasons[0].detail


def test_a_check_of_assertions_passes_without_returning_anything() -> None:
    def check(result: int) -> None:
        assert result == 42

    assert krex.measure(lambda: 42, check=check, **SHORT).valid


def test_a_result_that_is_wrong_only_later_is_invalid_too() -> None:
    calls = 0

    def drifts() -> int:
        nonlocal calls
        calls += 1
        spin(1e-4)
        return 42 if calls < 10 else 41

    found = krex.measure(drifts, check=lambda result: result == 42, **SHORT)
    assert not found.valid
    assert found.median_s is not None
    assert "check_failed" in {reason.code for reason in found.reasons}


def test_setup_restores_what_the_function_changes() -> None:
    values = [3, 1, 2]

    def restore() -> None:
        values[:] = [3, 1, 2]

    found = krex.measure(values.sort, setup=restore, check=lambda _: values == [1, 2, 3], **SHORT)
    assert found.valid
    assert found.batch == 1


def test_a_function_that_changes_its_inputs_is_pointed_out() -> None:
    found = krex.measure(lambda values: values.sort(), ([3, 1, 2],), **SHORT)
    assert any("setup=" in note for note in found.notes)


def test_a_coroutine_function_is_refused() -> None:
    async def work() -> None:
        """Never run."""

    with pytest.raises(TypeError, match="asynchronous"):
        krex.measure(work, **SHORT)


def test_a_generator_function_is_refused() -> None:
    def work() -> Any:
        yield 1

    with pytest.raises(TypeError, match="generator"):
        krex.measure(work, **SHORT)


@pytest.mark.parametrize(
    ("bad", "error", "says"),
    [
        ({"precision": math.nan}, ValueError, "precision"),
        ({"precision": 0.0}, ValueError, "precision"),
        ({"precision": 5}, ValueError, "precision"),
        ({"max_time": math.nan}, ValueError, "max_time"),
        ({"max_time": 0}, ValueError, "max_time"),
        ({"cache": "lukewarm"}, ValueError, "cache"),
        ({"timer": "sundial"}, ValueError, "timer"),
        ({"device": "cuda:99"}, krex.DeviceNotFound, "99"),
        ({"device": ["cpu"]}, TypeError, "device"),
        ({"args": "x"}, TypeError, "args"),
        ({"kwargs": [1]}, TypeError, "kwargs"),
        ({"setup": 1}, TypeError, "setup"),
        ({"check": True}, TypeError, "check"),
        ({"fn": 7}, TypeError, "fn"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(
    bad: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        krex.measure(**{"fn": spin, **SHORT, **bad})


def test_inside_a_held_region_the_verdict_is_the_outer_one_s() -> None:
    with krex.exclusive("cpu") as region:
        found = krex.measure(spin, **SHORT)
        assert found.verdict == "unknown"
        assert "inside_region" in {reason.code for reason in found.reasons}
        assert found.region is None
    assert region.report is not None
    assert len(krex.history()) == 1


def test_the_result_shows_itself_and_travels_as_json() -> None:
    found = krex.measure(spin, **SHORT)
    bundle = found._repr_mimebundle_()
    shown = bundle["application/vnd.krex.measurement.v1+json"]
    assert json.loads(json.dumps(shown))["median_s"] == found.median_s
    assert shown["version"] == 1
    assert bundle["text/html"].count('<img alt="') == 2
    assert "<svg" not in bundle["text/html"]
    assert bundle["text/plain"] == repr(found)
    assert found.to_dict()["region"]["region_id"] == found.region.region_id  # type: ignore[union-attr]


def test_at_most_a_thousand_samples_go_into_a_notebook() -> None:
    found = krex.Measurement(
        label="",
        device=ReportDevice(id="cpu", uuid="cpu", name="cpu", vendor="cpu"),
        verdict="clean",
        reasons=(),
        valid=True,
        settled=True,
        precision=0.005,
        median_s=1.0,
        mean_s=1.0,
        min_s=1.0,
        samples_s=tuple(float(number) for number in range(1, 2502)),
    )
    shown = found._repr_mimebundle_()[results.MEASUREMENT_MIME]["samples_s"]
    assert len(shown) == 1000
    assert shown[0] == 1.0
    assert len(found.to_dict()["samples_s"]) == 2501


def test_without_pandas_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    found = krex.measure(spin, **SHORT)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(krex.KrexError, match="pip install pandas"):
        found.to_pandas()


# --- Comparisons --------------------------------------------------------------------------------------------------


def test_a_clear_difference_is_found_in_few_short_regions() -> None:
    found = krex.compare(
        {"slow": lambda: spin(4e-4), "fast": lambda: spin(2e-4)}, **SHORT | {"max_time": 0.5}
    )
    assert found.relation("fast", "slow") == "FASTER"
    assert found.relation("slow", "fast") == "SLOWER"
    assert [place.name for place in found.ranking] == ["fast", "slow"]
    assert [place.group for place in found.ranking] == [1, 2]
    assert 2 <= len(found.regions) <= 5
    assert all(candidate.valid for candidate in found.candidates)


def test_a_broken_candidate_is_reported_for_itself() -> None:
    calls = 0

    def breaks_later() -> None:
        nonlocal calls
        calls += 1
        spin()
        if calls > 12:
            raise OSError("worn out")

    def raises() -> None:
        raise ZeroDivisionError("at once")

    found = krex.compare(
        {"good": spin, "raises": raises, "wears": breaks_later, "other": lambda: spin(9e-4)},
        **SHORT | {"max_time": 0.5},
    )
    errors = {candidate.name: candidate.error for candidate in found.candidates}
    assert errors["good"] == errors["other"] == ""
    assert "ZeroDivisionError: at once" in errors["raises"]
    assert "OSError: worn out" in errors["wears"]
    assert found.relation("good", "other") == "FASTER"
    assert found.relation("good", "raises") == "UNRESOLVED"
    assert {place.name for place in found.ranking} == {"good", "other"}
    assert released()


def test_a_candidate_that_fails_its_check_is_not_ranked() -> None:
    found = krex.compare(
        {"right": lambda: 42, "wrong": lambda: 41}, check=lambda result: result == 42, **SHORT
    )
    assert [candidate.valid for candidate in found.candidates] == [True, False]
    assert [place.name for place in found.ranking] == ["right"]
    assert found.pairs == ()


def test_all_candidates_broken_is_a_result_without_numbers() -> None:
    def raises() -> None:
        raise ZeroDivisionError

    found = krex.compare({"a": raises}, **SHORT)
    assert found.ranking == ()
    assert found.verdict == "unknown"
    assert krex.history() == []


@pytest.mark.parametrize(
    ("candidates", "options", "error", "says"),
    [
        ({}, {}, ValueError, "at least one"),
        ([spin], {}, TypeError, "by name"),
        ({"a": spin}, {"margin": math.nan}, ValueError, "margin"),
        ({"a": spin}, {"precision": math.nan}, ValueError, "precision"),
    ],
)
def test_comparisons_that_cannot_be_meant_are_refused(
    candidates: Any, options: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        krex.compare(candidates, **SHORT, **options)


def test_a_name_that_was_not_compared_is_a_key_error() -> None:
    found = krex.compare({"a": spin}, **SHORT)
    with pytest.raises(KeyError):
        found.relation("a", "b")


def test_a_comparison_shows_itself_and_travels_as_json() -> None:
    found = krex.compare({"a<b": spin, "c": lambda: spin(6e-4)}, **SHORT)
    bundle = found._repr_mimebundle_()
    assert json.loads(json.dumps(bundle["application/vnd.krex.comparison.v1+json"]))["version"] == 1
    assert "a&lt;b" in bundle["text/html"]
    assert "a<b" not in bundle["text/html"]
    assert "a<b" in bundle["text/plain"]


def test_nothing_is_left_behind(place: Place) -> None:
    krex.measure(spin, **SHORT)
    assert released()
    assert place.socket.exists()
