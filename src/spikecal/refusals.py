"""Where a call of a model comes from, and what its user is told where it has no spiking meaning."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import fx

from .errors import Refusal

#: Modules that are one operation each, so that their path is name enough; and files that are no user's code.
LEAVES = ("torch.nn.modules.", "spikecal.onnx")
_OURS = ("onnx", "onnx_operators", "capture", "tracing", "observation")
_INTERNAL = ("/torch/", "<", *(f"/spikecal/{name}.py" for name in _OURS))


_KNOWN_AS = {
    "_native_batch_norm_legit": "batch_norm",
    "_native_batch_norm_legit_no_training": "batch_norm",
    "_native_batch_norm_legit_functional": "batch_norm",
    "_unsafe_view": "reshape",
    "_prelu_kernel": "prelu",
    "_softmax": "softmax",
    "_log_softmax": "log_softmax",
}


class Refuse(Exception):
    """Raised by a rule that cannot import this call; says why, and what to do."""


def refusal_message(refused: Sequence[Refusal]) -> str:
    """All of them at once, so that nobody meets them one by one."""
    places = "1 place" if len(refused) == 1 else f"{len(refused)} places"
    return f"this model cannot become a spiking network as it is, because of {places}:\n" + "\n".join(map(str, refused))


def _modules(node: fx.Node) -> list[tuple[str, str]]:
    stack = node.meta.get("nn_module_stack") or {}
    return [(path, kind if isinstance(kind, str) else kind.__name__) for path, kind in stack.values()]


def call_site(node: fx.Node) -> str:
    """The path of the module that made the call; with the operation behind it, unless it is a single operation."""
    path, kind = (_modules(node) or [("", "")])[-1]
    path = path.removeprefix("L['self'].").split("@")[0]
    if path.startswith("_empty"):  # torch's word for a call of which it does not know the module
        path = ""
    if kind.startswith(LEAVES) and not kind.startswith("torch.nn.modules.container"):
        return path or op_name(node)
    return f"{path}.{op_name(node)}" if path else op_name(node)


def place(node: fx.Node) -> str:
    """Module path and source line of a call, for messages."""
    path = call_site(node)
    lines = (node.meta.get("stack_trace") or "").strip().splitlines()
    frames = [line.strip() for line in lines if line.strip().startswith("File ")]
    own = [f for f in frames if is_users_code(f.split('"')[1])]
    if not own:
        return path
    file, line = own[-1].split('"')[1], own[-1].split("line ")[1].split(",")[0]
    return f"{path} ({Path(file).name}:{line})"


def is_users_code(file: str) -> bool:
    return not any(part in file for part in _INTERNAL)


def op_name(node: fx.Node) -> str:
    """The name of an operation as its users know it: `_native_batch_norm_legit` is a batch norm."""
    name = getattr(node.target, "__name__", str(node.target)).split(".")[0]
    return _KNOWN_AS.get(name, name)


_ATTENTION = "it multiplies activations with each other, as attention does; put convolutions in its place"

_SOFTMAX = (
    "a softmax has no spiking meaning; behind the last layer, apply it outside the model; in attention, put "
    "convolutions in place of the block"
)
_NOT_RELU = "it is not a ReLU; train or fine-tune the network with ReLU in its place"

#: What to do about well-known operations without a rule.
REMEDIES = {
    "silu": "SiLU is not a ReLU; train or fine-tune the network with ReLU in its place",
    "gelu": "GELU is not a ReLU; train or fine-tune the network with ReLU in its place",
    "hardswish": "Hardswish is not a ReLU; train or fine-tune the network with ReLU in its place",
    "hardsigmoid": "a gate has no spiking meaning; remove the squeeze-excitation blocks",
    "sigmoid": "a sigmoid has no spiking meaning; remove the gate; behind the last layer, apply it outside the model",
    "softmax": _SOFTMAX,
    "log_softmax": _SOFTMAX,
    "tanh": "tanh is not a ReLU; train or fine-tune the network with ReLU in its place",
    **dict.fromkeys(("mish", "selu", "celu", "softplus", "softsign", "log_sigmoid", "rrelu"), _NOT_RELU),
    "elu": "ELU is not a ReLU; train or fine-tune the network with ReLU in its place",
    "leaky_relu": "the negative slope has no spiking meaning; fine-tune the network with ReLU in its place",
    "prelu": "the negative slope has no spiking meaning; fine-tune the network with ReLU in its place",
    "layer_norm": "it normalises by the statistics of each image; use batch norm, which folds into the weights",
    "group_norm": "it normalises by the statistics of each image; use batch norm, which folds into the weights",
    "batch_norm": "batch norm without running statistics, or in training mode, mixes images; use eval mode",
    "cond": "which way it goes depends on the images; spiking networks have no control flow",
    "instance_norm": "it normalises by the statistics of each image; use batch norm, which folds into the weights",
    "scaled_dot_product_attention": _ATTENTION,
    "native_dropout": "dropout is active in the exported program; export it in eval mode",
    "abs": "the absolute value is not affine; write it as relu(x) + relu(-x)",
    "bmm": _ATTENTION,
    "baddbmm": _ATTENTION,
    **dict.fromkeys(
        ("slice_scatter", "select_scatter", "copy", "fill", "index_put"),
        "it writes into a part of a tensor, in place; put the parts together with torch.cat",
    ),
}

#: What is said of operations that are affine unless two of their arguments depend on the images.
PRODUCTS = {
    "mul": "it multiplies two activations, as attention and squeeze-excitation gates do; remove the gate",
    "div": "it divides by an activation, which is not affine; divide by a constant, or use batch norm to normalise",
    **dict.fromkeys(("matmul", "mm", "bmm", "baddbmm", "einsum"), _ATTENTION),
}

UNREAD = "unread"  # stands for what the reader of a file did not understand; it says so itself

NO_RULE = "spikecal has no rule for it; use affine operations and ReLU"
