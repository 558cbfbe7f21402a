"""spikecal: trained networks become accurate, low-latency spiking networks, by calibration instead of retraining."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .calibration import (
        BiasCalibration as BiasCalibration,
        BiasShift as BiasShift,
        InitialPotential as InitialPotential,
        NoEffectWarning as NoEffectWarning,
        PotentialCalibration as PotentialCalibration,
        TunedThreshold as TunedThreshold,
        WeightCalibration as WeightCalibration,
    )
    from .checkpoint import load as load
    from .closed_form import ClosedFormWeights as ClosedFormWeights
    from .conversion import convert as convert
    from .energy import Constants as Constants, Energy as Energy, Operations as Operations, estimate as estimate
    from .errors import (
        CalibrationError as CalibrationError,
        CheckpointError as CheckpointError,
        DataError as DataError,
        MemoryBudgetError as MemoryBudgetError,
        SpikecalError as SpikecalError,
        UnsupportedModelError as UnsupportedModelError,
    )
    from .evaluation import Evaluation as Evaluation, compare as compare, evaluate as evaluate
    from .judgement import advice as advice, verdict as verdict
    from .layer_results import ErrorParts as ErrorParts, LayerError as LayerError, LayerResult as LayerResult
    from .network import SpikingNetwork as SpikingNetwork
    from .outputs import (
        LateReadout as LateReadout,
        OutputThreshold as OutputThreshold,
        WeightedReadout as WeightedReadout,
    )
    from .recipes import (
        RECIPES as RECIPES,
        Recipe as Recipe,
        advanced as advanced,
        best as best,
        light as light,
        max_activation as max_activation,
        opt as opt,
        percentile as percentile,
        pipelined as pipelined,
        plain as plain,
    )
    from .report import write_comparison as write_comparison, write_report as write_report
    from .thresholds import LTB as LTB, MMSE as MMSE, MaxActivation as MaxActivation, Percentile as Percentile
    from .time_steps import Search as Search, find_T as find_T
    from .timing import (
        EvenCurrent as EvenCurrent,
        FiringDelay as FiringDelay,
        Hesitation as Hesitation,
        LateStart as LateStart,
        TemporalBias as TemporalBias,
    )

__version__ = "0.1.0"

#: The public names by the module that holds them. They are imported when first used: the command line answers
#: `--help` without waiting for torch.
_NAMES = {
    "calibration": "BiasCalibration BiasShift InitialPotential NoEffectWarning PotentialCalibration TunedThreshold "
    "WeightCalibration",
    "checkpoint": "load",
    "closed_form": "ClosedFormWeights",
    "conversion": "convert",
    "energy": "Constants Energy Operations estimate",
    "errors": "CalibrationError CheckpointError DataError MemoryBudgetError SpikecalError UnsupportedModelError",
    "evaluation": "Evaluation compare evaluate",
    "judgement": "advice verdict",
    "layer_results": "ErrorParts LayerError LayerResult",
    "network": "SpikingNetwork",
    "outputs": "LateReadout OutputThreshold WeightedReadout",
    "recipes": "RECIPES Recipe advanced best light max_activation opt percentile pipelined plain",
    "report": "write_comparison write_report",
    "thresholds": "LTB MMSE MaxActivation Percentile",
    "time_steps": "Search find_T",
    "timing": "EvenCurrent FiringDelay Hesitation LateStart TemporalBias",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'spikecal' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f".{_MODULES[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
