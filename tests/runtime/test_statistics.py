"""The rules of a number, a comparison and a ranking, on numbers alone."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from krex_jupyter.runtime.statistics import (
    FIRST_LOOK,
    Block,
    Pair,
    binomial_cdf,
    compare,
    correlation_time,
    drift,
    effective_size,
    interval_ranks,
    look,
    median,
    next_look,
    proportion_interval,
    rank,
    summarise,
    two_states,
)

durations = st.floats(min_value=1e-7, max_value=100.0, allow_nan=False, allow_infinity=False)


def noisy(n: int, *, noise: float, seed: int = 0, mean: float = 1.0) -> list[float]:
    rng = random.Random(seed)
    return [mean * (1.0 + rng.gauss(0.0, noise)) for _ in range(n)]


def codes(samples: Sequence[float], **options: float) -> set[str]:
    return {finding.code for finding in look(samples, precision=0.005, **options).findings}  # type: ignore[arg-type]


# --- Summary ------------------------------------------------------------------------------------------------------


@given(st.lists(durations, min_size=1, max_size=200))
def test_a_summary_is_consistent_for_any_samples(samples: list[float]) -> None:
    summary = summarise(samples)
    assert summary.n == len(samples)
    assert summary.min_s == min(samples) <= summary.median_s <= max(samples)
    assert summary.min_s <= summary.mean_s * (1 + 1e-12)
    assert 1.0 <= summary.n_effective <= summary.n
    assert 0.0 <= summary.outlier_share <= 0.5
    if summary.ci95_s is not None:
        assert summary.ci95_s[0] <= summary.median_s <= summary.ci95_s[1]
    if summary.ci99_s is not None and summary.ci95_s is not None:
        assert summary.ci99_s[0] <= summary.ci95_s[0]
        assert summary.ci99_s[1] >= summary.ci95_s[1]


@given(st.lists(durations, min_size=1, max_size=100), st.floats(min_value=1e-3, max_value=1e3))
def test_a_change_of_unit_changes_nothing_but_the_unit(samples: list[float], factor: float) -> None:
    before, after = summarise(samples), summarise([value * factor for value in samples])
    assert math.isclose(after.median_s, before.median_s * factor, rel_tol=1e-9)
    assert math.isclose(after.n_effective, before.n_effective, rel_tol=1e-6) or len(set(samples)) < len(
        samples
    )


@pytest.mark.parametrize(
    ("n", "has_95", "has_99"), [(5, False, False), (6, True, False), (7, True, False), (8, True, True)]
)
def test_intervals_exist_from_the_sample_size_that_can_carry_them(n: int, has_95: bool, has_99: bool) -> None:
    assert (interval_ranks(n, 0.95) is not None) == has_95
    assert (interval_ranks(n, 0.99) is not None) == has_99


@given(st.integers(min_value=6, max_value=400), st.sampled_from([0.95, 0.99]))
def test_ranks_hold_the_median_with_at_least_the_level_and_no_wider_than_needed(n: int, level: float) -> None:
    ranks = interval_ranks(n, level)
    if ranks is None:
        return
    low, high = ranks
    assert low + high == n + 1
    assert 1.0 - 2.0 * binomial_cdf(low - 1, n) >= level - 1e-9
    assert 1.0 - 2.0 * binomial_cdf(low, n) < level + 1e-9


def test_known_ranks_of_the_sign_test() -> None:
    assert interval_ranks(20, 0.95) == (6, 15)
    assert interval_ranks(100, 0.95) == (40, 61)


def test_proportions_agree_with_published_intervals() -> None:
    assert proportion_interval(0, 100) == pytest.approx((0.0, 0.0362), abs=1e-4)
    assert proportion_interval(5, 20) == pytest.approx((0.0866, 0.4910), abs=1e-4)


def test_outliers_are_counted_and_stay_in() -> None:
    samples = [*noisy(95, noise=0.01), 2.0, 2.0, 3.0, 4.0, 5.0]
    summary = summarise(samples)
    assert summary.n == 100
    assert summary.outlier_share == pytest.approx(0.05)
    assert summary.mean_over_min > 0.1
    assert summary.median_s == pytest.approx(1.0, abs=0.01)


def test_one_sample_is_described_without_an_interval() -> None:
    summary = summarise([0.5])
    assert (summary.median_s, summary.stdev_s, summary.ci95_s, summary.ci99_s) == (0.5, 0.0, None, None)


@pytest.mark.parametrize("samples", [[], [1.0, math.nan], [math.inf]])
def test_what_is_no_number_is_refused(samples: list[float]) -> None:
    with pytest.raises(ValueError, match="sample"):
        summarise(samples)


# --- Parts of the rule --------------------------------------------------------------------------------------------


def test_the_schedule_is_geometric_from_twenty() -> None:
    seen = [next_look(0)]
    while seen[-1] < 300:
        seen.append(next_look(seen[-1]))
    assert seen == [20, 30, 45, 68, 100, 150, 220, 330]


@given(st.integers(min_value=FIRST_LOOK, max_value=10_000_000))
def test_the_schedule_always_grows_by_about_half(n: int) -> None:
    assert isinstance(next_look(n), int)
    assert 1.4 * n <= next_look(n) <= 1.6 * n


def test_independent_samples_count_nearly_fully_and_correlated_ones_do_not() -> None:
    rng = random.Random(3)
    correlated, state = [], 0.0
    for _ in range(1000):
        state = 0.8 * state + rng.gauss(0.0, 0.006)
        correlated.append(1.0 + state)
    assert effective_size(noisy(1000, noise=0.01)) > 700
    # An AR(1) of 0.8 has a correlation time of 9: 111 effective samples in 1,000.
    assert 50 < effective_size(correlated) < 160


def test_alternating_samples_earn_no_credit() -> None:
    assert correlation_time([(-1.0) ** k for k in range(100)]) >= 1.0


def test_a_state_that_lasts_is_seen_although_all_other_samples_are_independent() -> None:
    samples = noisy(40, noise=0.001)
    samples[30:36] = noisy(6, noise=0.001, mean=1.03)
    assert effective_size(samples) < 15


@given(slope=st.floats(min_value=-0.1, max_value=0.1), seed=st.integers(0, 1000))
def test_a_drift_is_found_within_its_error(slope: float, seed: int) -> None:
    samples = [value + slope * k / 99 for k, value in enumerate(noisy(100, noise=0.005, seed=seed))]
    change, error = drift(samples)
    assert abs(change - slope) < 6.0 * error


def test_an_outlier_at_the_end_is_no_drift() -> None:
    change, error = drift([*noisy(60, noise=0.002), 9.0])
    assert abs(change) < 3.0 * error


@given(st.integers(0, 500))
def test_a_flat_distribution_is_not_two_states(seed: int) -> None:
    rng = random.Random(seed)
    samples = [1.0 + 0.1 * rng.random() for _ in range(100)]
    p_value, _ = two_states(samples, precision=0.005, n_effective=100)
    assert p_value > 1e-4


def test_two_states_are_found_with_their_distance() -> None:
    samples = noisy(30, noise=0.003) + noisy(30, noise=0.003, seed=1, mean=1.03)
    random.Random(2).shuffle(samples)
    p_value, gap = two_states(samples, precision=0.005, n_effective=60)
    assert p_value < 1e-4
    assert gap == pytest.approx(0.03, rel=0.1)


# --- The look -----------------------------------------------------------------------------------------------------


@given(st.lists(durations, min_size=1, max_size=80), st.floats(min_value=1e-4, max_value=0.5))
@settings(max_examples=200)
def test_settled_means_no_findings_and_never_comes_early(samples: list[float], precision: float) -> None:
    seen = look(samples, precision=precision)
    assert seen.settled == (not seen.findings)
    if seen.settled:
        assert len(samples) >= FIRST_LOOK
        assert seen.summary.ci99_s is not None
        low, high = seen.summary.ci99_s
        assert max(
            high - seen.summary.median_s, seen.summary.median_s - low
        ) <= precision * seen.summary.median_s * (1 + 1e-9)
        assert not seen.hopeless


def test_quiet_samples_settle() -> None:
    assert look(noisy(45, noise=0.002), precision=0.005).settled


def test_nineteen_samples_are_too_few_however_quiet() -> None:
    assert codes(noisy(19, noise=1e-5)) == {"imprecise"}


def test_noise_beyond_the_precision_is_imprecise_and_says_how_much() -> None:
    seen = look(noisy(20, noise=0.05), precision=0.005)
    assert "imprecise" in {finding.code for finding in seen.findings}
    assert any("0.5% were asked for" in finding.detail for finding in seen.findings)
    assert not seen.hopeless


def test_a_ramp_is_unstable() -> None:
    samples = [value * (1.0 + 0.05 * (1.0 - k / 60)) for k, value in enumerate(noisy(60, noise=0.002))]
    assert "unstable" in codes(samples)


def test_a_step_between_the_halves_is_unstable() -> None:
    assert "unstable" in codes(noisy(50, noise=0.001) + noisy(50, noise=0.001, mean=1.02))


def test_ticks_are_hopeless_at_once() -> None:
    rng = random.Random(1)
    samples = [0.5e-6 * (10 + (rng.random() < 0.4)) for _ in range(20)]
    seen = look(samples, precision=0.005)
    assert seen.hopeless
    assert any("steps by 0.5 µs" in finding.detail for finding in seen.findings)


def test_fine_ticks_are_as_good_as_none() -> None:
    rng = random.Random(1)
    samples = [0.5e-6 * round(10_000 + rng.gauss(0.0, 3.0)) for _ in range(45)]
    assert look(samples, precision=0.005).settled


def test_equal_samples_are_trusted_only_as_far_as_the_timer_is_known() -> None:
    assert look([1e-3] * 20, precision=0.005).hopeless
    assert look([1e-3] * 20, precision=0.005, resolution_s=1e-6).settled


def test_a_known_resolution_widens_the_interval() -> None:
    samples = noisy(45, noise=0.0005)
    plain, coarse = summarise(samples), summarise(samples, resolution_s=0.002)
    assert plain.ci95_s is not None
    assert coarse.ci95_s is not None
    assert coarse.ci95_s[1] - coarse.ci95_s[0] == pytest.approx(plain.ci95_s[1] - plain.ci95_s[0] + 0.002)


@pytest.mark.parametrize(
    ("clocks", "unsteady"), [((1980, 1980), False), ((1980, 1965), False), ((1980, 1830), True), ((), False)]
)
def test_a_clock_that_went_elsewhere_is_named(clocks: tuple[float, ...], unsteady: bool) -> None:
    seen = look(noisy(45, noise=0.001), precision=0.005, clocks_mhz=clocks)
    assert ("clock_unsteady" in {finding.code for finding in seen.findings}) == unsteady


def test_two_states_for_long_enough_are_hopeless() -> None:
    rng = random.Random(1)
    samples = [(1.0 if rng.random() < 0.5 else 1.03) * (1 + rng.gauss(0, 0.002)) for _ in range(150)]
    assert look(samples, precision=0.005).hopeless


# --- Comparing ----------------------------------------------------------------------------------------------------


def experiment(
    scales: dict[str, float], *, blocks: int = 8, regions: int = 2, noise: float = 0.002, seed: int = 0
) -> list[list[Block]]:
    rng = random.Random(seed)
    return [
        [
            {name: 1e-3 * scale * (1 + rng.gauss(0, noise)) for name, scale in scales.items()}
            for _ in range(blocks)
        ]
        for _ in range(regions)
    ]


def relation_of(pairs: list[Pair], first: str, second: str) -> str:
    return next(pair.relation for pair in pairs if (pair.first, pair.second) == (first, second))


def test_faster_slower_and_tie_are_told_apart() -> None:
    pairs = compare(experiment({"a": 1.0, "b": 1.0, "c": 1.05, "d": 0.9}))
    assert relation_of(pairs, "a", "b") == "TIE"
    assert relation_of(pairs, "a", "c") == "FASTER"
    assert relation_of(pairs, "a", "d") == "SLOWER"
    assert all(pair.needs == "" for pair in pairs)


def test_what_the_blocks_do_not_decide_is_unresolved_and_says_what_it_would_take() -> None:
    pair = compare(experiment({"a": 1.0, "b": 1.015}, noise=0.02))[0]
    assert pair.relation == "UNRESOLVED"
    assert pair.needs


def test_few_blocks_decide_nothing_however_equal_they_are() -> None:
    pair = compare(experiment({"a": 1.0, "b": 1.5}, blocks=3, regions=1, noise=1e-6))[0]
    assert pair.relation == "UNRESOLVED"
    assert "blocks" in pair.needs


def test_drift_common_to_a_block_does_not_hide_a_difference() -> None:
    regions = experiment({"a": 1.0, "b": 1.03})
    drifting = [
        [{name: value * (1 + 0.1 * k) for name, value in block.items()} for k, block in enumerate(blocks)]
        for blocks in regions
    ]
    assert relation_of(compare(drifting), "a", "b") == "FASTER"


def test_a_candidate_without_blocks_costs_nobody_else_a_result() -> None:
    regions = experiment({"a": 1.0, "b": 1.05, "broken": 1.0})
    without = [
        [{name: value for name, value in block.items() if name != "broken"} for block in blocks]
        for blocks in regions
    ]
    assert relation_of(compare(without), "a", "b") == "FASTER"


@given(st.integers(0, 300))
@settings(max_examples=40, deadline=None)
def test_intervals_hold_the_ratio_and_turn_around_with_the_names(seed: int) -> None:
    forth = compare(experiment({"a": 1.0, "b": 1.02}, seed=seed), resamples=200)[0]
    back = compare(experiment({"b": 1.0, "a": 1.02}, seed=seed), resamples=200)[0]
    assert forth.interval[0] <= forth.ratio <= forth.interval[1]
    opposite = {"FASTER": "SLOWER", "SLOWER": "FASTER", "TIE": "TIE", "UNRESOLVED": "UNRESOLVED"}
    assert back.relation == opposite[forth.relation]


def test_equal_candidates_are_rarely_called_different() -> None:
    """Family-wise: of 100 experiments with six pairs of equals, at most a few have any false statement."""
    wrong = 0
    for seed in range(100):
        pairs = compare(experiment({"a": 1, "b": 1, "c": 1, "d": 1}, noise=0.02, seed=seed), resamples=200)
        wrong += any(pair.relation in ("FASTER", "SLOWER") for pair in pairs)
    assert wrong <= 5


def test_no_blocks_give_no_pairs() -> None:
    assert compare([]) == []
    assert rank([], []) == []


def test_a_ranking_groups_what_is_not_shown_to_differ() -> None:
    regions = experiment({"a": 1.0, "b": 1.0005, "c": 1.2, "d": 1.2005})
    places = rank(regions, compare(regions))
    assert [place.group for place in places] == [1, 1, 2, 2]
    assert {places[0].name, places[1].name} == {"a", "b"}
    assert places[1].flip_risk == 0.0
    assert places[0].flip_risk is not None
    assert places[-1].flip_risk is None


def test_exact_ties_flip_half_of_the_time() -> None:
    regions: list[list[Block]] = [[{"a": 1.0, "b": 1.0} for _ in range(6)]]
    assert rank(regions, compare(regions))[0].flip_risk == 0.5


@pytest.mark.parametrize("margin", [0.0, -1.0, math.nan])
def test_a_margin_that_is_none_is_refused(margin: float) -> None:
    with pytest.raises(ValueError, match="margin"):
        compare([], margin=margin)


def test_the_median_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        median([])


def test_a_slow_wander_far_below_the_precision_settles_with_an_interval_around_all_of_it() -> None:
    samples = [1.0 + 0.0005 * math.sin(position / 12.0) for position in range(100)]
    seen = look(samples, precision=0.005)
    assert seen.settled
    assert seen.summary.n_effective < 8
    assert seen.summary.ci95_s is not None
    assert seen.summary.ci95_s[0] < min(samples)
    assert seen.summary.ci95_s[1] > max(samples)
    assert not look([1.0 + 10 * (sample - 1.0) for sample in samples], precision=0.005).settled
