"""The report as a person sees it, in a real browser without a window: `make browser`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import spikecal as sc
from spikecal.data import load_data
from spikecal.models import digits_net

pytestmark = pytest.mark.browser

selenium = pytest.importorskip("selenium.webdriver", reason="selenium is not installed; make browser does so")
exceptions = pytest.importorskip("selenium.common.exceptions")
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync "
    "--disable-component-update --disable-dev-shm-usage --hide-scrollbars --window-size=1200,5000"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("report")


@pytest.fixture(scope="module")
def browser(folder: Path) -> Iterator[Any]:
    found, driver = (shutil.which("chromium") or shutil.which("google-chrome")), shutil.which("chromedriver")
    if not found or not driver:
        pytest.skip("chromium and chromedriver are not on this machine")
    options = selenium.ChromeOptions()
    options.binary_location = found
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for flag in (*FLAGS.split(), f"--user-data-dir={folder / 'profile'}"):
        options.add_argument(flag)
    snn = sc.convert(digits_net(), load_data("digits", split="train", limit=64).batches(), 4)
    test = load_data("digits", split="test", limit=128)
    sc.write_report(snn, test.batches(), folder / "report.html", classes=[f"<b>{name}</b>" for name in test.classes])
    try:
        opened = selenium.Chrome(options, selenium.ChromeService(driver))
    except exceptions.WebDriverException as e:
        pytest.skip(f"chromium does not start on this machine: {str(e).splitlines()[0]}")
    opened.get((folder / "report.html").as_uri())
    yield opened
    opened.quit()


def texts(browser: Any, selector: str) -> list[str]:
    return [e.text for e in browser.find_elements("css selector", selector)]


def test_every_chart_is_drawn_without_errors(browser: Any, folder: Path) -> None:
    charts = browser.find_elements("css selector", ".chart")
    assert len(charts) == 11
    assert all(chart.find_elements("css selector", "svg.main-svg") for chart in charts)
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
    assert browser.save_screenshot(str(folder / "report.png"))
    assert (folder / "report.png").stat().st_size > 50_000


def test_the_verdict_is_the_first_thing_to_read(browser: Any) -> None:
    (verdict,) = texts(browser, "#verdict")
    assert "% of the ANN's accuracy at T=4." in verdict


def test_another_layer_can_be_chosen(browser: Any) -> None:
    def spikes() -> list[Any]:
        trace = "document.getElementById('raster').data[0]"
        return [browser.execute_script(f"return {trace}.{axis}") for axis in ("x", "y")]

    before = spikes()
    assert before[0]
    browser.find_elements("css selector", "#layer option")[2].click()
    assert spikes() != before


def test_break_even_follows_the_chosen_constants(browser: Any) -> None:
    (before,) = texts(browser, "#break-even")
    browser.find_elements("css selector", "#constants option")[2].click()
    (after,) = texts(browser, "#break-even")
    assert before != after
    assert "the FP32 ANN below" in after


def test_mistakes_carry_the_names_of_classes(browser: Any) -> None:
    labels = texts(browser, "#mistakes tbody td:first-child")
    assert labels
    assert all(label == f"{label[0]} <b>{label[0]}</b>" for label in labels)  # as text, not as markup


def test_the_table_sorts_and_filters(browser: Any) -> None:
    names = texts(browser, "#layers tbody td:first-child")
    assert len(names) == 4
    neurons = next(b for b in browser.find_elements("css selector", "#layers th button") if b.text == "neurons")
    neurons.click()
    column = [int(t.replace(",", "")) for t in texts(browser, "#layers tbody td:nth-child(2)")]
    assert column == sorted(column, reverse=True)
    browser.find_element("id", "find").send_keys("stem")
    assert texts(browser, "#layers tbody td:first-child") == ["stem.2"]


def test_a_report_of_an_evaluation_hides_what_needs_images(browser: Any, folder: Path) -> None:
    snn = sc.convert(digits_net(), load_data("digits", split="train", limit=64).batches(), 4)
    result = sc.evaluate(snn, load_data("digits", split="test", limit=64).batches())
    sc.write_report(result, folder / "evaluation.html")
    browser.get((folder / "evaluation.html").as_uri())
    drawn = [chart for chart in browser.find_elements("css selector", ".chart") if chart.is_displayed()]
    assert len(drawn) == 8
    assert all(chart.find_elements("css selector", "svg.main-svg") for chart in drawn)
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
    assert "before" not in " ".join(texts(browser, "#layers th"))
    assert browser.save_screenshot(str(folder / "evaluation.png"))


def test_networks_are_compared(browser: Any, folder: Path) -> None:
    test = load_data("digits", split="test", limit=64).batches()
    nets = [sc.convert(digits_net(), load_data("digits", split="train", limit=64).batches(), T) for T in (2, 4)]
    sc.write_comparison(sc.compare(nets, test), folder / "comparison.html")
    browser.get((folder / "comparison.html").as_uri())
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
    for choice in browser.find_elements("css selector", "#against option"):
        choice.click()
        assert choice.text in texts(browser, "#tradeoff .xtitle")
    assert texts(browser, "#networks tbody td:first-child") == ["best, T=2", "best, T=4"]
    browser.save_screenshot(str(folder / "comparison.png"))
