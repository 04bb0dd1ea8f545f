"""Figures by hand, intervals that hold what they should, and files that can be looked at."""

from __future__ import annotations

import numpy as np
import pytest

from sparseserve_jax.evaluation.plots import plot_budgets, plot_heat_maps
from sparseserve_jax.evaluation.report import depth_table, markdown_table, score_grid, summarize
from sparseserve_jax.evaluation.settings import Setting
from sparseserve_jax.evaluation.statistics import resample
from tests.evaluation.data import prediction

DENSE, SPARSE = Setting(), Setting(budget_tokens=512, method="quest")
ROWS = {
    DENSE: [
        prediction("qasper", "1", 1.0, nll=1.0),
        prediction("qasper", "2", 0.5, nll=3.0),
        prediction("lcc", "1", 0.25, nll=None, greedy_token_ids=[]),
        prediction("trec", "1", 1.0, nll=2.0),
    ],
    SPARSE: [
        prediction("qasper", "1", 1.0, nll=1.1, greedy_token_ids=[5, 7]),
        prediction("qasper", "2", 0.0, nll=3.3, token_ids=[9], failed=True),
        prediction("lcc", "1", 0.25, nll=None, greedy_token_ids=[]),
        prediction("trec", "1", 1.0, nll=2.2),
    ],
}


def test_figures():
    dense, sparse = summarize(ROWS, block_size=32)
    assert dense["average"] == pytest.approx((75 + 25 + 100) / 3)
    assert sparse["average"] == pytest.approx((50 + 25 + 100) / 3)
    assert sparse["retention"] == pytest.approx(175 / 200)
    assert dense["retention"] == 1.0 and dense["nll_rise"] == 0.0
    assert dense["nll"] == pytest.approx((2.0 + 2.0) / 2)
    assert sparse["nll_rise"] == pytest.approx(0.1)
    assert sparse["tasks"]["qasper"]["score"] == 50.0 and sparse["tasks"]["qasper"]["nll"] == pytest.approx(2.2)
    assert sparse["tasks"]["lcc"]["nll"] is None and sparse["tasks"]["lcc"]["agreement"] is None
    assert sparse["agreement"] == pytest.approx(5 / 6) and sparse["tasks"]["qasper"]["agreement"] == 3 / 4
    assert sparse["same_answers"] == 3 / 4
    assert (sparse["failures"], sparse["tasks"]["qasper"]["failures"], sparse["rows"]) == (1, 1, 4)
    assert (dense["budget_tokens"], dense["budget_blocks"], dense["method"]) == (None, None, None)
    assert (sparse["budget_tokens"], sparse["budget_blocks"], sparse["method"]) == (512, 16, "quest")


def test_intervals_are_paired():
    """Scores that differ by a factor have a retention without spread, however wide each one's own interval is."""
    rng = np.random.default_rng(0)
    values = rng.uniform(0.1, 1, 40)
    rows = {
        DENSE: [prediction("qasper", str(i), v, nll=v) for i, v in enumerate(values)],
        SPARSE: [prediction("qasper", str(i), v / 2, nll=v * 1.25) for i, v in enumerate(values)],
    }
    dense, sparse = summarize(rows, block_size=32)
    low, high = dense["average_interval"]
    assert low < dense["average"] < high and 5 < high - low < 30
    assert sparse["retention_interval"] == pytest.approx((0.5, 0.5))
    assert sparse["nll_rise_interval"] == pytest.approx([0.25, 0.25])


def test_interval_covers_the_mean_of_the_distribution():
    rng = np.random.default_rng(1)
    hits = 0
    for trial in range(40):
        low, high = resample({"a": rng.normal(3, 1, 60), "b": rng.normal(5, 1, 30)}, seed=trial).interval()
        hits += low < 4 < high
    assert 34 <= hits <= 40


def test_without_dense_nothing_is_compared():
    (entry,) = summarize({SPARSE: ROWS[SPARSE]}, block_size=32)
    assert entry["average"] == pytest.approx(175 / 3)
    for name in ("retention", "retention_interval", "nll_rise", "agreement", "same_answers"):
        assert entry[name] is None
    assert "| quest 512 | 16 |" in markdown_table([entry])


def test_a_dense_average_of_zero_has_no_retention():
    rows = {DENSE: [prediction("lcc", "1", 0.0)], SPARSE: [prediction("lcc", "1", 0.5)]}
    assert [entry["retention"] for entry in summarize(rows, block_size=32)] == [None, None]


def test_table():
    lines = markdown_table(summarize(ROWS, block_size=32)).splitlines()
    assert lines[0].startswith("| setting | blocks | qasper | lcc | trec | average | of dense | NLL |")
    assert lines[2].startswith("| dense | - | 75.00 | 25.00 | 100.00 | 66.67 | 100.0% (100.0% to 100.0%) | 2.0000 |")
    assert lines[3].startswith("| quest 512 | 16 | 50.00 | 25.00 | 100.00 | 58.33 | 87.5% (")
    assert len({line.count("|") for line in lines}) == 1


def test_length_by_depth():
    rows = [
        prediction("single", str(i), score, length=length, depth=depth)
        for i, (length, depth, score) in enumerate([(2000, 0.5, 1), (1000, 0.5, 0), (1000, 0.1, 1), (1000, 0.1, 0)])
    ]
    assert score_grid(rows) == ([1000, 2000], [0.1, 0.5], [[50.0, None], [0.0, 100.0]])
    assert depth_table(rows).splitlines()[2:] == ["| 10% | 50 | - |", "| 50% | 0 | 100 |"]


def test_pictures(tmp_path):
    plot_budgets(summarize(ROWS, block_size=32), tmp_path / "budgets.png")
    rows = [prediction("single", "1", 1.0, length=1000, depth=None)]
    plot_heat_maps({"one": rows, "two": rows}, tmp_path / "heat.png")
    for path in (tmp_path / "budgets.png", tmp_path / "heat.png"):
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000
