"""The tables of the documentation are those of the rows in benchmarks/results, and goals are judged by them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import ablation
import beyond
import coverage
import diagnosis
import goals
import imagenet
import paper_pipeline
import pooling
import records
import robustness
import signed
import size
import speed
import weights_order

GRIDS = {module.__name__: module.GRID for module in (ablation, beyond, paper_pipeline, signed, weights_order)}
TABLES: dict[str, tuple[Path, tuple[str, str], Callable[[], str]]] = {
    **{name: (grid.page, grid.marks, grid.tables) for name, grid in GRIDS.items()},
    "equal latency": (beyond.GRID.page, beyond.MARKS, beyond.equal_latency),
    "coverage": (coverage.DOCS, coverage.MARKS, lambda: coverage.tables(coverage.read().values())),
    "diagnosis": (diagnosis.PAGE, diagnosis.MARKS, lambda: diagnosis.table(records.read(diagnosis.RESULTS))),
    "goals": (beyond.GRID.page, goals.MARKS, goals.tables),
    "imagenet": (imagenet.PAGE, imagenet.MARKS, imagenet.table),
    "pooling": (pooling.DOCS, pooling.MARKS, pooling.table),
    "robustness": (robustness.PAGE, robustness.MARKS, robustness.table),
    "size": (size.DOCS, size.MARKS, lambda: size.table(size.read())),
    "speed": (speed.PAGE, speed.MARKS, speed.tables),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_of_the_documentation_is_that_of_the_rows(name: str) -> None:
    path, marks, tables = TABLES[name]
    page = path.read_text()
    assert page.count(marks[0]) == page.count(marks[1]) == 1
    assert records.with_text_between(page, marks, tables()) == page


def rows(*accuracies: float, agreement: float = 0.9, images: int = 1000) -> list[dict[str, str]]:
    return [
        {"accuracy": f"{a}", "ann_accuracy": "0.9", "agreement": f"{agreement}", "images": f"{images}"}
        for a in accuracies
    ]


def test_the_error_of_a_gap_counts_images_that_differ_and_seeds() -> None:
    found = goals.cell(rows(0.85, 0.86, 0.87))
    assert found.gap == pytest.approx(4.0)
    assert found.error_of_gap == pytest.approx((100**2 * 0.1 / 1000 + 1.0**2 / 3) ** 0.5)


@pytest.mark.parametrize(
    ("accuracy", "verdict"), [(0.84, "missed"), (0.86, "met, within noise"), (0.89, "met"), (0.90, "met")]
)
def test_a_goal_is_met_beyond_two_standard_errors_or_within_noise(
    monkeypatch: pytest.MonkeyPatch, accuracy: float, verdict: str
) -> None:
    known = {("best", 8): goals.cell(rows(*[accuracy] * 3)), ("FTBC", 8): goals.cell(rows(*[0.80] * 3))}
    monkeypatch.setattr(goals, "cells", lambda network: known)
    assert goals.Goal("net", "best", 8).row().split("|")[-2].strip() == verdict
    assert goals.Goal("net", "best", 8).row().split("|")[5].strip() == "5.00"
    assert goals.Goal("net", "best", 8, 0.5).row().split("|")[5].strip() == "0.50"
