"""The demo: its numbers are those of the network it leaves behind, and what it proposes works."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import spikecal
from spikecal.cli import app
from spikecal.cli.tables import demo_tables, next_commands
from spikecal.data import load_data
from spikecal.demo import DemoResult, demo_recipes, run_demo


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> DemoResult:
    recipes = {"max_activation": spikecal.max_activation(), "best": spikecal.best()}
    return run_demo(tmp_path_factory.mktemp("a demo"), recipes=recipes, steps=(2, 8))


def test_calibration_wins_at_few_steps(result: DemoResult) -> None:
    assert result.accuracy["best"][0] > result.accuracy["max_activation"][0] + 0.5
    assert result.accuracy["best"][1] > result.ann_accuracy - 0.02


def test_the_network_it_leaves_has_the_accuracy_it_shows(result: DemoResult) -> None:
    snn = spikecal.load(result.network)
    assert (snn.T, snn.recipe) == (8, spikecal.best())
    evaluation = spikecal.evaluate(snn, load_data("digits", split="test").batches())
    assert evaluation.accuracy == pytest.approx(result.accuracy["best"][1])
    assert evaluation.ann_accuracy == result.ann_accuracy
    assert evaluation.images == result.images


def test_results_are_written_with_what_they_came_from(result: DemoResult) -> None:
    found = json.loads(result.results.read_text())
    assert found == result.to_dict()
    assert {"spikecal", "torch", "python"} == set(found["versions"])
    assert (found["images"], found["seed"]) == (544, 0)
    assert [(row["recipe"], row["T"]) for row in found["table"]] == [
        ("max_activation", 2), ("max_activation", 8), ("best", 2), ("best", 8),
    ]  # fmt: skip


def test_the_commands_it_proposes_work(result: DemoResult) -> None:
    for command in next_commands(result):
        program, *arguments = shlex.split(command)
        assert Path(program).name == "spikecal"
        assert shutil.which(program) is not None
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, f"{command}: {done.stderr}"


def test_the_table_shows_every_recipe_and_the_ann(result: DemoResult) -> None:
    from rich.console import Console

    console = Console(width=120)
    with console.capture() as capture:
        for part in demo_tables(result):
            console.print(part)
    lines = capture.get().splitlines()
    (best,) = (line.split() for line in lines if line.strip().startswith("best "))
    expected = [*result.accuracy["best"], result.ann_accuracy]
    assert best == ["best", *(f"{100 * share:.1f}" for share in expected)]
    assert any("544 test images" in line for line in lines)


def test_the_short_advanced_recipe_says_that_it_is_short() -> None:
    (name,) = (name for name, recipe in demo_recipes().items() if recipe.name == "advanced")
    assert name == "advanced (200 it.)"


def test_a_file_in_the_way_is_wrong_usage(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = CliRunner().invoke(app, ["demo", "-o", str(tmp_path / "file")])
    assert done.exit_code == 2
    assert "cannot make the folder" in " ".join(done.stderr.replace("│", " ").split())


@pytest.mark.slow
def test_the_whole_demo_takes_less_than_a_minute(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["demo", "-o", str(tmp_path / "new" / "folder"), "--json"])
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["table"]) == 30
    assert found["seconds"] < 60
    assert {path.name for path in (tmp_path / "new" / "folder").iterdir()} == {"digits-best-T8.spk", "results.json"}
