"""spikecal: trained networks become accurate, low-latency spiking networks, by calibration instead of retraining."""

from .calibration import (
    BiasCalibration,
    BiasShift,
    InitialPotential,
    NoEffectWarning,
    PotentialCalibration,
    WeightCalibration,
)
from .checkpoint import load
from .conversion import convert
from .errors import CalibrationError, CheckpointError, DataError, SpikecalError, UnsupportedModelError
from .evaluation import Evaluation, LayerResult, evaluate
from .network import SpikingNetwork
from .recipes import RECIPES, Recipe, advanced, light, max_activation, opt, percentile, plain
from .thresholds import MMSE, MaxActivation, Percentile

__version__ = "0.1.0"

__all__ = [
    "MMSE",
    "RECIPES",
    "BiasCalibration",
    "BiasShift",
    "CalibrationError",
    "CheckpointError",
    "DataError",
    "Evaluation",
    "InitialPotential",
    "LayerResult",
    "MaxActivation",
    "NoEffectWarning",
    "Percentile",
    "PotentialCalibration",
    "Recipe",
    "SpikecalError",
    "SpikingNetwork",
    "UnsupportedModelError",
    "WeightCalibration",
    "advanced",
    "convert",
    "evaluate",
    "light",
    "load",
    "max_activation",
    "opt",
    "percentile",
    "plain",
]
