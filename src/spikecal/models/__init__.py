"""Small trained networks in plain PyTorch, for the demo and for trying things out."""

from .digits import DigitsNet, digits_net

__all__ = ["DigitsNet", "digits_net"]
