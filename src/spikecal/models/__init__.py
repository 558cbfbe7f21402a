"""Networks in plain PyTorch: a small trained one for the demo, and the architectures of the paper, untrained."""

from .digits import DigitsNet, digits_net
from .paper import cifar_mobilenet, cifar_resnet20, cifar_vgg16, mobilenet, regnetx_4gf, resnet34, vgg16

__all__ = [
    "DigitsNet",
    "cifar_mobilenet",
    "cifar_resnet20",
    "cifar_vgg16",
    "digits_net",
    "mobilenet",
    "regnetx_4gf",
    "resnet34",
    "vgg16",
]
