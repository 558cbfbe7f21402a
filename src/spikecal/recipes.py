"""Recipes: which threshold rule, which calibration steps, how many images. A recipe is data and travels as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from math import isfinite
from typing import Any

from .calibration import (
    BiasCalibration,
    BiasShift,
    InitialPotential,
    PotentialCalibration,
    Step,
    TunedThreshold,
    WeightCalibration,
)
from .closed_form import ClosedFormWeights
from .errors import CalibrationError, did_you_mean
from .outputs import LateReadout, OutputThreshold, WeightedReadout
from .thresholds import LTB, MMSE, MaxActivation, Percentile, ThresholdRule
from .timing import EvenCurrent, FiringDelay, Hesitation, LateStart, TemporalBias

_RULES = {cls.__name__: cls for cls in (LTB, MMSE, MaxActivation, Percentile)}
_STEPS = {
    cls.__name__: cls
    for cls in (
        BiasShift,
        InitialPotential,
        BiasCalibration,
        PotentialCalibration,
        WeightCalibration,
        ClosedFormWeights,
        TemporalBias,
        FiringDelay,
        LateStart,
        EvenCurrent,
        Hesitation,
        TunedThreshold,
        OutputThreshold,
        LateReadout,
        WeightedReadout,
    )
}
_VERSION = 1


@dataclass(frozen=True)
class Recipe:
    """How a network is converted.

    threshold: the rule for firing thresholds; steps: what corrects each layer, in this order.
    pool_to_conv: average pooling becomes a depthwise convolution with its own neurons, so that all spikes are binary.
    threshold_images, calibration_images: how many images the thresholds and the steps look at, at most.
    image_steps: where T is small, the steps may look at image_steps / T of the threshold images, if those are more.
    delay: every layer begins to fire this many steps after its input begins; the latency grows, the spikes do not.
    signed: neurons may take a spike back by a negative one, so spikes are no longer binary.
    """

    threshold: ThresholdRule
    steps: tuple[Step, ...] = ()
    name: str = "custom"
    pool_to_conv: bool = False
    threshold_images: int = 1024
    calibration_images: int = 128
    delay: int = 0
    signed: bool = False
    image_steps: int = 0

    def __post_init__(self) -> None:
        _check_part(self.threshold, "accumulator", "threshold rule")
        if not isinstance(self.steps, Iterable):
            raise CalibrationError(f"the steps of a recipe must be a list, such as [BiasShift()], not {self.steps!r}")
        object.__setattr__(self, "steps", tuple(self.steps))
        for step in self.steps:
            _check_part(step, "apply", "calibration step")
        _check_values(self)
        if not all(n >= 1 for n in (self.threshold_images, self.calibration_images)):
            raise CalibrationError("a recipe needs at least one image for thresholds and one for calibration")
        if self.image_steps < 0:
            raise CalibrationError(f"image_steps must be a whole number of at least 0, not {self.image_steps!r}")
        if self.delay < 0:
            raise CalibrationError(f"the firing delay must be 0 or more steps, not {self.delay}")

    @property
    def title(self) -> str:
        """Its name, for people: networks with spikes of two signs are in a league of their own."""
        return titled(self.name, self.signed)

    def images_for(self, T: int) -> int:
        """How many images the calibration steps look at with T time steps, at most."""
        return max(self.calibration_images, min(self.image_steps // T, self.threshold_images))

    def to_dict(self) -> dict[str, Any]:
        data = {f.name: getattr(self, f.name) for f in fields(self)}
        data["threshold"] = _part_to_dict(self.threshold)
        data["steps"] = [_part_to_dict(s) for s in self.steps]
        return {"version": _VERSION, **data}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Recipe:
        if not isinstance(data, Mapping):
            raise CalibrationError(f"this is not a recipe: it must be a JSON object, not {data!r}")
        try:
            data = dict(data)
            if (version := data.pop("version")) != _VERSION:
                raise CalibrationError(f"this recipe has version {version}; this spikecal reads version {_VERSION}")
            _check_names(data, Recipe)
            data["threshold"] = _part_from_dict(data["threshold"], _RULES)
            if not isinstance(data["steps"], list):
                raise CalibrationError(f"the steps of a recipe must be a list, not {data['steps']!r}")
            data["steps"] = tuple(_part_from_dict(s, _STEPS) for s in data["steps"])
            return Recipe(**data)
        except KeyError as e:
            raise CalibrationError(f"this is not a recipe: it has no {e}") from e
        except (TypeError, ValueError) as e:
            raise CalibrationError(f"this is not a recipe: {e}") from e

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @staticmethod
    def from_json(text: str) -> Recipe:
        try:
            data = json.loads(text)
        except json.JSONDecodeError as e:
            raise CalibrationError(f"this is not a recipe: {e}") from e
        return Recipe.from_dict(data)


def titled(name: str, signed: bool) -> str:
    return f"{name}, spikes of two signs" if signed else name


def _check_part(part: Any, method: str, what: str) -> None:
    if isinstance(part, type):
        raise CalibrationError(f"{part.__name__} is a class, not a {what}; call it: {part.__name__}()")
    if not callable(getattr(part, method, None)):
        raise CalibrationError(f"{part!r} is not a {what}")
    if type(part) in {*_RULES.values(), *_STEPS.values()}:
        _check_values(part)


def _check_values(part: Any) -> None:
    """A recipe may come from a file, and what a number is not should be said before an hour of calibration."""
    _check_types(type(part), {field.name: getattr(part, field.name) for field in fields(part)})


def _check_types(cls: type, values: Mapping[str, Any]) -> None:
    for field in (field for field in fields(cls) if field.name in values):
        wanted, value = str(field.type), values[field.name]
        if field.type not in ("ThresholdRule", "tuple[Step, ...]") and not _fits(value, wanted):
            words = wanted.replace("tuple[float, ...]", "several finite numbers").replace(" | ", " or ")
            words = words.replace("float", "a finite number").replace("int", "a whole number").replace("str", "a text")
            words = words.replace("bool", "True or False")
            raise CalibrationError(f"{field.name} of {cls.__name__} must be {words}, not {value!r}")


def _fits(value: Any, wanted: str) -> bool:
    """Whether a value is what the annotation of its field says, and finite."""
    if isinstance(value, tuple | list):
        return "tuple" in wanted and all(_fits(v, "float") for v in value)
    if isinstance(value, float):
        return "float" in wanted and isfinite(value)
    if type(value) is int:
        return "int" in wanted or "float" in wanted
    return type(value).__name__.removesuffix("Type") in wanted  # bool, str and None


def _part_to_dict(part: Any) -> dict[str, Any]:
    if type(part).__name__ not in {**_RULES, **_STEPS}:
        raise CalibrationError(
            f"{type(part).__name__} is not a part of spikecal, so this recipe cannot be written down"
        )
    return {"kind": type(part).__name__, **asdict(part)}


def _part_from_dict(data: Mapping[str, Any], known: Mapping[str, Any]) -> Any:
    what = "threshold rule" if known is _RULES else "calibration step"
    if not isinstance(data, Mapping) or "kind" not in data:
        raise CalibrationError(f"a {what} must be an object with a 'kind' and its fields, not {data!r}")
    data = dict(data)
    kind = data.pop("kind")
    if kind not in known:
        raise CalibrationError(f"there is no {what} {kind!r}; choose one of {', '.join(known)}")
    _check_names(data, known[kind])
    _check_types(known[kind], data)
    try:
        return known[kind](**data)
    except CalibrationError as e:
        raise CalibrationError(f"{kind} cannot be made of {data}: {e}") from e


def _check_names(data: Mapping[str, Any], cls: type) -> None:
    names = [field.name for field in fields(cls)]
    if strange := [name for name in data if name not in names]:
        raise CalibrationError(f"{cls.__name__} has no {strange[0]!r}; it has {', '.join(names) or 'no fields'}")


def plain(*, per_channel: bool = True, **options: Any) -> Recipe:
    """MMSE thresholds and the bias shift; nothing is calibrated."""
    return Recipe(MMSE(per_channel=per_channel), (BiasShift(),), **{"name": "plain", **options})


def light(*, per_channel: bool = True, **options: Any) -> Recipe:
    """The paper's light pipeline: MMSE thresholds and bias calibration."""
    return Recipe(MMSE(per_channel=per_channel), (BiasShift(), BiasCalibration()), **{"name": "light", **options})


def advanced(
    *,
    per_channel: bool = True,
    iterations: int = 5000,
    lr: float = 1e-5,
    calibration_images: int = 1024,
    **options: Any,
) -> Recipe:
    """The paper's advanced pipeline: MMSE thresholds, potential and weights calibration."""
    steps = (BiasShift(), PotentialCalibration(), WeightCalibration(iterations, lr))
    options = {"name": "advanced", "calibration_images": calibration_images, **options}  # the paper has 1024
    return Recipe(MMSE(per_channel=per_channel), steps, **options)


def best(*, calibration_images: int | None = None, **options: Any) -> Recipe:
    """Ours, and the default: weights by least squares, even currents, potentials, and care for what outputs read.

    It looks at 512 images; with fewer than 16 steps, at as many as take the same time to simulate, up to 1024.
    """
    count = {"calibration_images": 512, "image_steps": 512 * 16}
    if calibration_images is not None:
        count = {"calibration_images": calibration_images}
    options = {"name": "best", **count, **options}
    rule = MMSE(per_channel=True, shift=0.5, lost=3.0, regained=2.0)
    potentials = PotentialCalibration(rate=0.5, images=128, common=1.0)
    thresholds, weights = (LateStart(root=1.0), OutputThreshold(), BiasShift(0.3)), ClosedFormWeights()
    steps = (*thresholds, weights, EvenCurrent(), potentials, WeightedReadout())
    return Recipe(rule, steps, **options)


def pipelined(*, delay: int = 1, calibration_images: int = 512, **options: Any) -> Recipe:
    """Every layer waits a step before it fires, and hesitates where it is not sure: fewer errors, more latency.

    Its thresholds count on half of the bias shift: spikes come nearly as rounded as if they had all the time.
    """
    options = {"name": "pipelined", "calibration_images": calibration_images, "delay": delay, **options}
    potentials = PotentialCalibration(rate=0.5, images=128)
    steps = (OutputThreshold(), BiasShift(), ClosedFormWeights(), Hesitation(), potentials, WeightedReadout())
    rule = MMSE(per_channel=True, shift=0.25)
    return Recipe(rule, steps, **options)


def max_activation(**options: Any) -> Recipe:
    """Baseline: the largest activation is the threshold (Diehl et al. 2015)."""
    return Recipe(MaxActivation(), **{"name": "max_activation", **options})


def percentile(*, q: float = 0.999, **options: Any) -> Recipe:
    """Baseline: a high percentile of the activations is the threshold (Rueckauer et al. 2017)."""
    return Recipe(Percentile(q), **{"name": "percentile", **options})


def opt(**options: Any) -> Recipe:
    """Baseline: the largest activation, with bias shift (Deng & Gu 2021)."""
    return Recipe(MaxActivation(), (BiasShift(),), **{"name": "opt", **options})


#: Recipes by name.
RECIPES: dict[str, Callable[..., Recipe]] = {
    f.__name__: f for f in (plain, light, advanced, best, pipelined, max_activation, percentile, opt)
}


#: What a conversion takes if nothing else is said.
DEFAULT = best.__name__


def find_recipe(recipe: Recipe | str) -> Recipe:
    """A recipe, or the one of that name with its defaults."""
    if isinstance(recipe, Recipe):
        return recipe
    if callable(recipe):
        name = getattr(recipe, "__name__", "it")
        raise CalibrationError(f"a recipe is made by calling {name}: write {name}()")
    if callable(getattr(recipe, "accumulator", None)):
        raise CalibrationError(f"a threshold rule is a part of a recipe: write Recipe({recipe!r})")
    if not isinstance(recipe, str) or recipe not in RECIPES:
        hint = "; a file is read by Recipe.from_json(Path(...).read_text())" if str(recipe).endswith(".json") else ""
        hint += did_you_mean(str(recipe).lower(), RECIPES, most=1)
        raise CalibrationError(f"there is no recipe {recipe!r}; choose one of {', '.join(RECIPES)}{hint}")
    return RECIPES[recipe]()
