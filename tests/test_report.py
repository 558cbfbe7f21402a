"""The report: one file with everything in it, whose numbers are those of the evaluation."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import spikecal as sc
from helpers import converted, inputs
from spikecal.cli import app
from spikecal.data import load_data
from spikecal.models import digits_net
from spikecal.report import render, uncalibrated

pytest.importorskip("plotly", reason="the report needs the extra 'report'")

X = inputs("resnet_block", 8, seed=7)[0]
Y = torch.randint(0, 5, (8,), generator=torch.Generator().manual_seed(0))


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    data: dict[str, Any] = json.loads(found[1])
    return data


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("report") / "report.html"
    sc.write_report(converted("resnet_block"), [(X[:5], Y[:5]), (X[5:], Y[5:])], path, title="A net", command="made by")
    return path.read_text(encoding="utf-8")


def test_the_numbers_are_those_of_the_evaluation(page: str) -> None:
    data, result = data_of(page), sc.evaluate(converted("resnet_block"), [(X, Y)])
    assert data["accuracy_over_time"] == pytest.approx(result.accuracy_over_time)
    assert (data["images"], data["T"], data["sample"]) == (8, result.T, 8)
    assert (data["title"], data["command"], data["verdict"]) == ("A net", "made by", sc.verdict(result))
    assert data["advice"] == sc.advice(result)
    for shown, layer in zip(data["layers"], result.layers, strict=True):
        assert shown["name"] == layer.name
        assert shown["error"] == pytest.approx(layer.error)
    total = sum(layer["synaptic_operations"] for layer in data["operations"]["layers"])
    assert total == pytest.approx(result.operations.synaptic_operations)


def test_an_evaluation_alone_can_be_drawn(tmp_path: Path) -> None:
    snn, path = converted("resnet_block"), tmp_path / "report.html"
    result = sc.evaluate(snn, [(X, Y)])
    assert sc.write_report(result, path, title="A net", classes="abcde") is result
    data = data_of(path.read_text(encoding="utf-8"))
    assert (data["title"], data["class_names"], data["sample"]) == ("A net", list("abcde"), 0)
    assert (data["verdict"], data["advice"]) == (sc.verdict(result), sc.advice(result))
    assert {key: data[key] for key in result.to_dict() if key != "layers"} == {
        key: value for key, value in json.loads(json.dumps(result.to_dict())).items() if key != "layers"
    }
    assert [layer["after"] for layer in data["layers"]] == [layer.error for layer in result.layers]
    assert {layer["before"] for layer in data["layers"]} == {None}
    assert not any("raster" in layer for layer in data["layers"])


def test_histograms_and_rasters_hold_every_value(page: str) -> None:
    snn = converted("resnet_block")
    for layer in data_of(page)["layers"]:
        neurons = 8 * layer["neurons"]
        assert sum(layer["ann_histogram"]) == pytest.approx(layer["ann_positive"] * neurons)
        assert sum(layer["snn_histogram"]) == pytest.approx(layer["snn_positive"] * neurons)
        assert len(layer["raster"]) == 4
        for steps, rows in layer["raster"]:
            assert len(steps) == len(rows)
            assert all(1 <= t <= snn.T for t in steps)
            assert all(0 <= row < 64 for row in rows)


def test_the_file_needs_nothing_else(page: str) -> None:
    head = page[: page.index('<script type="application/json"')]
    assert not re.search(r"(src|href)\s*=|url\(|@import", head)
    assert "Plotly" in page
    assert len(page) < 6e6


def test_before_calibration_nothing_is_corrected() -> None:
    snn = converted("resnet_block", sc.best())
    before = uncalibrated(snn)
    plain = sc.convert(snn, X, snn.T, sc.Recipe(sc.MMSE(per_channel=True)))
    for name, site in before.sites.items():
        assert not site.bias.any()
        assert name in plain.sites
    assert before.graph is snn.source
    assert sc.evaluate(before, [X]).layers[-1].error > sc.evaluate(snn, [X]).layers[-1].error


def test_names_are_data_and_never_markup() -> None:
    evil = "</script><script>alert(1)</script>&<b>"
    page = render("page.html", {"title": evil, "layers": [{"name": evil}]})
    assert evil not in page
    assert "&lt;/script&gt;" in page[: page.index("<style>")]
    assert data_of(page)["title"] == evil


def test_the_command_writes_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pytest.importorskip("sklearn")
    sc.convert(digits_net(), load_data("digits", split="train", limit=32).batches(), 4).save("net.spk")
    result = CliRunner().invoke(app, ["report", "net.spk", "--data", "digits", "--limit", "20", "-o", "page.html"])
    assert result.exit_code == 0, result.stderr
    assert "wrote page.html" in result.stderr
    data = data_of(Path("page.html").read_text(encoding="utf-8"))
    assert (data["title"], data["images"]) == ("net.spk on digits", 20)
    assert data["command"].split()[0] == "spikecal"


def test_networks_are_compared_on_the_same_images(tmp_path: Path) -> None:
    light, best = converted("resnet_block"), converted("resnet_block", sc.best())
    light.save(tmp_path / "light.spk")
    results = sc.compare([tmp_path / "light.spk", best, best], iter([(X[:5], Y[:5]), (X[5:], Y[5:])]))
    assert list(results) == [str(tmp_path / "light.spk"), f"best, T={best.T}", f"best, T={best.T}'"]
    assert results[f"best, T={best.T}"] == sc.evaluate(best, [(X[:5], Y[:5]), (X[5:], Y[5:])])
    sc.write_comparison(results, tmp_path / "comparison.html", title="Two nets")
    data = data_of((tmp_path / "comparison.html").read_text(encoding="utf-8"))
    assert [net["name"] for net in data["networks"]] == list(results)
    assert data["networks"][1]["accuracy"] == results[f"best, T={best.T}"].accuracy
    assert sc.compare({"mine": best}, [X])["mine"].accuracy is None
    with pytest.raises(sc.DataError, match="no networks to compare"):
        sc.compare([], [X])


def test_the_command_compares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)
    for T in (1, 4):
        sc.convert(digits_net(), load_data("digits", split="train", limit=32).batches(), T).save(f"{T}.spk")
    options = ["--data", "digits", "--limit", "40"]
    result = CliRunner().invoke(app, ["compare", "1.spk", "4.spk", *options, "-o", "page.html"])
    assert result.exit_code == 0, result.stderr
    assert "4.spk does best" in " ".join(result.stdout.split())
    data = data_of(Path("page.html").read_text(encoding="utf-8"))
    assert [net["T"] for net in data["networks"]] == [1, 4]
    found = json.loads(CliRunner().invoke(app, ["compare", "1.spk", "4.spk", *options, "--json"]).stdout)
    assert list(found) == ["1.spk", "4.spk"]


def test_errors_before_and_after_are_those_of_the_same_images(tmp_path: Path) -> None:
    snn = converted("resnet_block", sc.max_activation())
    sc.write_report(snn, [X[:1], X[1:2], X[2:]], tmp_path / "report.html")
    data = data_of((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert data["sample"] == 8
    assert [layer["before"] for layer in data["layers"]] == [None] * len(data["layers"])  # nothing was done
    assert data["shift"] == 0
    after = {layer.name: layer.error for layer in sc.evaluate(snn, [X]).layers}
    assert {layer["name"]: layer["after"] for layer in data["layers"]} == pytest.approx(after)


def test_what_cannot_be_reported_is_refused_in_words(tmp_path: Path) -> None:
    path, snn = tmp_path / "report.html", converted("resnet_block")
    with pytest.raises(sc.UnsupportedModelError, match="not of a Sequential"):
        sc.write_report(torch.nn.Sequential(), [X], path)
    with pytest.raises(sc.DataError, match="compare\\(\\) takes several networks"):
        sc.compare("mine.spk", [X])
    with pytest.raises(sc.DataError, match=r"there is no folder .*nowhere to write report\.html into"):
        sc.write_report(snn, [X], tmp_path / "nowhere" / "report.html")
    for wrong, words in ((([X],), "not to a list"), (([X], path), "has seen its images")):
        with pytest.raises(sc.DataError, match=words):
            sc.write_report(sc.evaluate(snn, [X]), *wrong)  # type: ignore[call-overload]
    with pytest.raises(sc.DataError, match=r"needs images: write_report\(snn, loader, path\)"):
        sc.write_report(snn, path)  # type: ignore[call-overload]
    unclassified = replace(sc.evaluate(snn, [X]), classes=0)
    with pytest.raises(sc.DataError, match="of a network that classifies"):
        sc.write_report(unclassified, path)
    assert not path.exists()
    scores = sc.compare([snn], [X], metric=lambda result, wanted: (result - wanted).square().mean())
    with pytest.raises(sc.DataError, match="evaluated by a metric"):
        sc.write_comparison(scores, path)


def test_bad_input_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(sc.DataError, match="no images to evaluate"):
        sc.write_report(converted("resnet_block"), [], tmp_path / "report.html")
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(sc.DataError, match=r"pip install 'spikecal\[report\]'"):
        sc.write_report(converted("resnet_block"), [X], tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_report_of_a_large_network_stays_small(tmp_path: Path) -> None:
    if find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    import_module("coverage").load_torchvision()  # of the benchmarks
    x = torch.randn(8, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    snn = sc.convert(import_module("torchvision.models").resnet50().eval(), x, 32, "light")
    sc.write_report(snn, [x], tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < 6e6
