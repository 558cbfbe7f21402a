"""Recipes are data: what they hold, and how they travel as JSON."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

import spikecal as sc
from spikecal.recipes import _STEPS, find_recipe

MMSE = sc.MMSE(per_channel=True)


def test_recipes_are_what_they_are_called() -> None:
    """Threshold rule and steps of each name; a change here changes every number that is published."""
    parts = {name: (make().threshold, make().steps) for name, make in sc.RECIPES.items()}
    shift, readout = sc.BiasShift(0.5), sc.WeightedReadout(0.03)
    theta = sc.OutputThreshold((0.8, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.2, 2.4))
    weights, gently = sc.ClosedFormWeights(0.1, even=0.3), sc.PotentialCalibration(0.5, 128, 1.0)
    assert parts == {
        "plain": (MMSE, (shift,)),
        "light": (MMSE, (shift, sc.BiasCalibration())),
        "advanced": (MMSE, (shift, sc.PotentialCalibration(), sc.WeightCalibration(5000, 1e-5, 0.9, 32))),
        "best": (
            sc.MMSE(100, True, 0.5, 3.0, 2.0),
            (sc.LateStart(0.25, 2.0, 1.0), theta, sc.BiasShift(0.3), weights, sc.EvenCurrent(), gently, readout),
        ),
        "pipelined": (
            sc.MMSE(100, True, 0.25),
            (theta, shift, weights, sc.Hesitation(0.25, 0.0), sc.PotentialCalibration(0.5, 128), readout),
        ),
        "max_activation": (sc.MaxActivation(), ()),
        "percentile": (sc.Percentile(0.999), ()),
        "opt": (sc.MaxActivation(), (shift,)),
    }
    images = {name: make().calibration_images for name, make in sc.RECIPES.items()}
    assert {name: n for name, n in images.items() if n != 128} == {"advanced": 1024, "best": 512, "pipelined": 512}


@pytest.mark.parametrize("name", sc.RECIPES)
def test_a_recipe_knows_its_name(name: str) -> None:
    assert sc.RECIPES[name]().name == name
    assert replace(sc.RECIPES[name](name="mine"), name=name) == sc.RECIPES[name]()
    assert find_recipe(name) == sc.RECIPES[name]()
    assert getattr(sc, name) is sc.RECIPES[name]


def test_options_reach_the_recipe() -> None:
    recipe = sc.light(per_channel=False, pool_to_conv=True, threshold_images=7, calibration_images=3)
    assert recipe.threshold == sc.MMSE(per_channel=False)
    assert (recipe.pool_to_conv, recipe.threshold_images, recipe.calibration_images) == (True, 7, 3)
    assert sc.percentile(q=0.9).threshold == sc.Percentile(0.9)
    assert sc.advanced(iterations=7, lr=0.1).steps[-1] == sc.WeightCalibration(7, 0.1)
    assert sc.advanced().calibration_images == 1024


def test_best_looks_at_more_images_where_steps_are_few_and_at_no_more_than_it_is_told() -> None:
    assert {T: sc.best().images_for(T) for T in (1, 4, 8, 10, 16, 64)} == {
        1: 1024, 4: 1024, 8: 1024, 10: 819, 16: 512, 64: 512,
    }  # fmt: skip
    assert sc.best(threshold_images=600).images_for(4) == 600
    assert {sc.best(calibration_images=40).images_for(T) for T in (1, 8, 64)} == {40}
    assert {sc.light().images_for(T) for T in (1, 8, 64)} == {128}
    assert {sc.pipelined().images_for(T) for T in (1, 8, 64)} == {512}
    assert {sc.advanced().images_for(T) for T in (1, 8, 64)} == {1024}


def test_a_recipe_written_before_there_were_image_steps_is_read_as_it_was() -> None:
    data = sc.light().to_dict()
    del data["image_steps"]
    assert sc.Recipe.from_dict(data) == sc.light()


def test_recipes_can_be_compared_and_not_changed() -> None:
    assert sc.light() == sc.light()
    assert sc.light() != sc.light(per_channel=False)
    with pytest.raises(dataclasses.FrozenInstanceError):
        sc.light().pool_to_conv = True  # type: ignore[misc]
    assert sc.Recipe(MMSE, [sc.BiasShift()]).steps == (sc.BiasShift(),)


shares, positive = st.floats(0.0, 1.0), st.floats(1e-3, 1e3)
rules = st.one_of(
    st.builds(sc.MaxActivation, st.booleans()),
    st.builds(sc.Percentile, st.floats(0.01, 1.0), st.booleans()),
    st.builds(sc.LTB, st.integers(1, 9999), st.booleans()),
    st.builds(sc.MMSE, st.integers(1, 500), st.booleans(), st.sampled_from([0.0, 0.1, 1 / 3, 0.5, 63 / 64])),
)
STEPS = {
    sc.BiasShift: (shares,),
    sc.InitialPotential: (shares,),
    sc.BiasCalibration: (),
    sc.PotentialCalibration: (shares, st.integers(0, 999), st.none() | shares),
    sc.WeightCalibration: (st.integers(0, 9999), st.floats(1e-9, 1.0), shares, st.integers(1, 256)),
    sc.ClosedFormWeights: (positive | st.lists(positive, min_size=1), st.booleans(), st.integers(1, 9999)),
    sc.TemporalBias: (positive, positive),
    sc.FiringDelay: (st.integers(0, 3), st.floats(0, 1)),
    sc.LateStart: (st.floats(0, 0.99), positive, st.none() | shares),
    sc.EvenCurrent: (),
    sc.Hesitation: (shares, shares),
    sc.TunedThreshold: (st.lists(positive, min_size=1),),
    sc.OutputThreshold: (st.lists(positive, min_size=1),),
    sc.LateReadout: (st.floats(0, 0.99),),
    sc.WeightedReadout: (positive,),
}
steps = st.one_of([st.builds(step, *fields) for step, fields in STEPS.items()])
recipes = st.builds(
    sc.Recipe,
    rules,
    st.lists(steps, max_size=4),
    st.text(max_size=10),
    st.booleans(),
    st.integers(1, 5000),
    st.integers(1, 5000),
)


def test_every_step_is_among_them() -> None:
    assert set(STEPS) == {*_STEPS.values()}


@given(recipes)
def test_recipes_survive_json(recipe: sc.Recipe) -> None:
    assert sc.Recipe.from_json(recipe.to_json()) == recipe
    assert sc.Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe


def edited(**changes: Any) -> str:
    data = sc.light().to_dict() | changes
    return json.dumps({key: value for key, value in data.items() if value is not ...})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "this is not a recipe"),
        ("{", "this is not a recipe"),
        ("[]", r"this is not a recipe: it must be a JSON object, not \[\]"),
        ("null", "this is not a recipe: it must be a JSON object, not None"),
        ("{}", "this is not a recipe: it has no 'version'"),
        (edited(version=2), "version 2; this spikecal reads version 1"),
        (edited(threshold=...), "this is not a recipe: it has no 'threshold'"),
        (edited(steps=3), "the steps of a recipe must be a list, not 3"),
        (edited(colour="red"), "Recipe has no 'colour'; it has threshold, steps, name, pool_to_conv"),
        (edited(name=3), "name of Recipe must be a text, not 3"),
        (edited(delay=0.5), "delay of Recipe must be a whole number, not 0.5"),
        (edited(delay=True), "delay of Recipe must be a whole number, not True"),
        (edited(signed=1), "signed of Recipe must be True or False, not 1"),
        (
            edited(threshold={"kind": "MMSE", "per_channel": "no"}),
            "per_channel of MMSE must be True or False, not 'no'",
        ),
        (
            edited(steps=[{"kind": "BiasShift", "fraction": float("nan")}]),
            "fraction of BiasShift must be a finite number",
        ),
        (
            edited(steps=[{"kind": "BiasShift", "fraction": None}]),
            "fraction of BiasShift must be a finite number, not None",
        ),
        (
            edited(steps=[{"kind": "PotentialCalibration", "common": "all"}]),
            "common of PotentialCalibration must be a finite number or None, not 'all'",
        ),
        (
            edited(steps=[{"kind": "ClosedFormWeights", "rows": 1.5}]),
            "rows of ClosedFormWeights must be a whole number",
        ),
        (edited(steps=[{"kind": "FiringDelay", "steps": 1.5}]), "steps of FiringDelay must be a whole number, not 1.5"),
        (edited(steps=[{"kind": "FiringDelay", "steps": True}]), "steps of FiringDelay must be a whole number"),
        (
            edited(steps=[{"kind": "TunedThreshold", "factors": []}]),
            r"must be factors, all of them above 0 .*, not \(\)",
        ),
        (edited(steps=[{"kind": "TunedThreshold", "factors": [1, -1]}]), "must be factors, all of them above 0"),
        (edited(steps=[{"kind": "OutputThreshold", "factors": [0]}]), "must be factors, all of them above 0"),
        (edited(steps=[{"kind": "TemporalBias", "rate": 0}]), "rate and rounds must be above 0, not 0 and 8.0"),
        (edited(steps=[{"kind": "WeightCalibration", "lr": 0}]), "and lr be above 0"),
        (edited(steps=[{"kind": "WeightCalibration", "batch_size": 0}]), "a batch have an image at least"),
        (edited(threshold={"kind": "Magic"}), "there is no threshold rule 'Magic'; choose one of LTB, MMSE, "),
        (edited(threshold={"kind": "MMSE", "grid": 0}), "at least one value, not 0"),
        (edited(threshold={"kind": "Percentile", "q": 2}), "q must be in"),
        (edited(threshold={"kind": "MMSE", "shift": 0.123}), "a denominator of at most 64, not 0.123"),
        (edited(threshold={"kind": "MMSE", "shape": 1}), "MMSE has no 'shape'; it has grid, per_channel, shift, lost"),
        (edited(threshold={"kind": "MMSE", "lost": "x"}), "lost of MMSE must be a finite number, not 'x'"),
        (edited(steps=[{"kind": "ClosedFormWeights", "ridge": -1}]), r"made of .*: a ridge above 0"),
        (
            edited(steps=[{"kind": "ClosedFormWeights", "ridge": "x"}]),
            "ridge of ClosedFormWeights must be a finite number or several finite numbers, not 'x'",
        ),
        (edited(threshold={"kind": "MMSE", "grid": "100"}), "grid of MMSE must be a whole number, not '100'"),
        (edited(steps=[{"kind": "LateStart", "share": "x"}]), "share of LateStart must be a finite number, not 'x'"),
        (edited(threshold="MMSE"), "a threshold rule must be an object with a 'kind' and its fields, not 'MMSE'"),
        (
            edited(steps=[{"fraction": 0.5}]),
            "a calibration step must be an object with a 'kind' .*, not {'fraction': 0.5}",
        ),
        (edited(calibration_images=0), "at least one image"),
        (edited(calibration_images="many"), "calibration_images of Recipe must be a whole number, not 'many'"),
        (edited(image_steps=-1), "image_steps must be a whole number of at least 0, not -1"),
        (edited(image_steps="many"), "image_steps of Recipe must be a whole number, not 'many'"),
    ],
)
def test_something_that_is_no_recipe_is_refused(text: str, message: str) -> None:
    with pytest.raises(sc.CalibrationError, match=message):
        sc.Recipe.from_json(text)


@pytest.mark.parametrize(("name", "meant"), [("bset", "best"), ("Best", "best"), ("pipeline", "pipelined")])
def test_a_misspelled_recipe_is_guessed(name: str, meant: str) -> None:
    with pytest.raises(sc.CalibrationError, match=rf"there is no recipe '{name}'; .*; did you mean {meant}\?"):
        find_recipe(name)


@pytest.mark.parametrize(
    "changes",
    [{"threshold": {"kind": "BiasShift"}}, {"steps": [{"kind": "MMSE"}]}],
    ids=["step as rule", "rule as step"],
)
def test_a_part_in_the_wrong_place_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(sc.CalibrationError):
        sc.Recipe.from_json(edited(**changes))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((sc.MMSE,), r"MMSE is a class, not a threshold rule; call it: MMSE\(\)"),
        (("MMSE",), "'MMSE' is not a threshold rule"),
        ((MMSE, [sc.BiasCalibration]), r"BiasCalibration is a class, not a calibration step; call it: Bias"),
        ((MMSE, [MMSE]), r"MMSE\(grid=100, .* is not a calibration step"),
        ((MMSE, sc.BiasShift()), r"must be a list, such as \[BiasShift\(\)\], not BiasShift\(fraction=0.5\)"),
    ],
)
def test_parts_that_are_none_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(sc.CalibrationError, match=message):
        sc.Recipe(*arguments)


def test_the_name_of_a_file_is_no_recipe() -> None:
    with pytest.raises(
        sc.CalibrationError, match=r"there is no recipe 'a.json'; .* a file is read by Recipe.from_json"
    ):
        find_recipe("a.json")


def test_a_recipe_that_was_not_called_is_refused() -> None:
    with pytest.raises(sc.CalibrationError, match=r"a recipe is made by calling light: write light\(\)"):
        find_recipe(sc.light)  # type: ignore[arg-type]


def test_a_threshold_rule_is_no_recipe() -> None:
    with pytest.raises(sc.CalibrationError, match=r"a part of a recipe: write Recipe\(MMSE\(grid=100"):
        find_recipe(MMSE)  # type: ignore[arg-type]


class OfOnesOwn:
    def apply(self, layer: Any) -> None:
        """Nothing."""


def test_a_step_of_ones_own_cannot_be_written_down() -> None:
    with pytest.raises(sc.CalibrationError, match="OfOnesOwn is not a part of spikecal"):
        sc.Recipe(MMSE, (OfOnesOwn(),)).to_json()


@pytest.mark.parametrize("field", ["threshold_images", "calibration_images"])
@pytest.mark.parametrize("count", [0, -1])
def test_a_recipe_without_images_is_refused(field: str, count: int) -> None:
    with pytest.raises(sc.CalibrationError, match="at least one image"):
        sc.light(**{field: count})


@pytest.mark.parametrize("make", sc.RECIPES.values(), ids=sc.RECIPES)
def test_an_option_that_does_not_exist_is_refused(make: Any) -> None:
    with pytest.raises(TypeError, match="colour"):
        make(colour="red")
