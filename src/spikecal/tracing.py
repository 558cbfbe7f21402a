"""torch.export, and what it cannot follow.

A decision by the values of the images (`if x.max() > 1`) has no graph, and torch.export ends there. To list what else
a model has to offend, it is then run on the images, what Python reads out of tensors is noted, and it is traced with
these answers given; once more for each decision with the other answer, so that offenders on both sides are seen.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import sys
import traceback
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from io import StringIO
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.overrides import TorchFunctionMode

from .errors import Refusal, UnsupportedModelError
from .rules import is_users_code

_DECISION = "an if, int() or item() on values that depend on the images has no graph; write it without"

Answers = dict[str, list[Any]]  # what Python reads out of tensors at a place, in order

#: How Python reads the values of a tensor.
_READS = {
    *(getattr(Tensor, f"__{name}__") for name in ("bool", "int", "float", "index", "complex", "contains")),
    *(Tensor.item, Tensor.tolist, Tensor.is_nonzero, Tensor.equal, Tensor.allclose),
    *(torch.is_nonzero, torch.equal, torch.allclose),
}


def traced(model: nn.Module, example: Sequence[Tensor]) -> tuple[list[ExportedProgram], list[Refusal]]:
    """The program of a model in eval mode with a free batch size, leaving the model as it was.

    If there is none: programs of what can be traced, to list what else offends, and why these are not the model.
    """
    with eval_mode(model), quiet(), torch.random.fork_rng(devices=[]), _Traceable():
        try:
            return [_program(model, example)], []
        except UnsupportedModelError:
            raise
        except Exception as e:
            refusal = _failed(e, model)
            programs, reasons = _along_paths(model, example)
            if not programs and refusal.what == "batch size":
                programs, reasons = [torch.export.export(model, _batch(example, 2))], [refusal]
            if programs:
                return programs, reasons
            raise UnsupportedModelError(
                f"torch.export cannot capture this model with input shapes {[tuple(x.shape[1:]) for x in example]} and "
                f"a free batch size:\n{refusal}\n"
                "Code that is no function of tensors alone, or a wrong input shape are the usual reasons.",
                [refusal],
            ) from e


def _program(model: nn.Module, example: Sequence[Tensor]) -> ExportedProgram:
    with _free_batch() as numbers:
        program = _exported(model, _batch(example, 2))  # a batch of one would be taken as a constant
        if numbers and program.graph_module.code != _exported(model, _batch(example, 64)).graph_module.code:
            raise UnsupportedModelError("the model computes with its batch size, so images are not independent")
        return _without_freeing(program)


def _exported(model: nn.Module, batch: tuple[Tensor, ...]) -> ExportedProgram:
    return torch.export.export(model, batch, dynamic_shapes=_dynamic_batch(model, batch, Dim("batch")))


def _batch(example: Sequence[Tensor], images: int) -> tuple[Tensor, ...]:
    return tuple(torch.cat([x[:1]] * images) for x in example)


def _dynamic_batch(model: nn.Module, example: Sequence[Tensor], batch: Any) -> Any:
    parameters = list(inspect.signature(model.forward).parameters.values())
    named = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    shapes = tuple({0: batch} for _ in example)
    starred = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return (*shapes[:named], shapes[named:]) if starred else shapes


# -- decisions by the values of the images ----------------------------------------------------------------------------


def _along_paths(model: nn.Module, example: Sequence[Tensor]) -> tuple[list[ExportedProgram], list[Refusal]]:
    """The programs of the path that the example takes, and of those that leave it at one decision."""
    taken = _answers(model, example, {})
    decisions = {where: values[0] for where, values in taken.items() if isinstance(values[0], bool)}
    left = [_answers(model, example, {where: [not decided]}) for where, decided in decisions.items()]
    programs = []
    for answers in filter(None, (taken, *left)):
        with suppress(Exception), _Reads(model, answers):
            programs.append(_exported(model, _batch(example, 2)))
    places = dict.fromkeys(itertools.chain(taken, *left))
    return programs, [Refusal("control flow", where, _DECISION) for where in places]


def _answers(model: nn.Module, example: Sequence[Tensor], forced: Answers) -> Answers:
    """What Python reads out of tensors on real images, if it first reads what is forced; nothing if that fails."""
    with suppress(Exception), torch.no_grad(), _Reads(model, forced) as reads:
        model(*_batch(example, 2))
        return dict(reads.given)
    return {}


class _Reads(TorchFunctionMode):
    """Gives the answers it has to whoever reads a tensor, and after them the values; notes what was given."""

    def __init__(self, model: nn.Module, answers: Answers) -> None:
        super().__init__()
        self.model, self.given = model, defaultdict[str, list[Any]](list)
        self.pending = {where: list(values) for where, values in answers.items()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _READS:
            return func(*args, **(kwargs or {}))
        where = _place(self._frames_of_model(), self.model)
        value = self.pending[where].pop(0) if self.pending.get(where) else func(*args, **(kwargs or {}))
        self.given[where].append(value)
        return value

    def _frames_of_model(self) -> list[tuple[FrameType, int]]:
        callers = traceback.walk_stack(sys._getframe(2))
        return [*itertools.takewhile(lambda frame: frame[0].f_code.co_filename != __file__, callers)][::-1]


# -- where tracing came to an end -------------------------------------------------------------------------------------


def _failed(e: Exception, model: nn.Module) -> Refusal:
    """Why and where tracing came to an end; what lies behind that place has not been seen."""
    where = _place(traceback.walk_tb(e.__traceback__), model)
    if isinstance(e, GuardOnDataDependentSymNode):
        return Refusal("control flow", where, _DECISION)
    if "Constraints violated (batch)" in str(e):
        why = "the code takes it for a fixed number; use x.shape[0], or -1 in view() and reshape()"
        return Refusal("batch size", where, why)
    lines = str(e).strip().splitlines()
    return Refusal("tracing", where, lines[0] if lines else type(e).__name__)


def _place(frames: Iterable[tuple[FrameType, int]], model: nn.Module) -> str:
    """The module that was running, and the line of the user's code; frames from the outermost on."""
    paths = {id(module): path for path, module in model.named_modules()}
    found, line = "", ""
    for frame, number in frames:
        found = paths.get(id(frame.f_locals.get("self")), found)
        if is_users_code(frame.f_code.co_filename):
            line = f" ({Path(frame.f_code.co_filename).name}:{number})"
    return f"{found or 'forward'}{line}"


# -- torch's tracing, made quiet and tolerant -------------------------------------------------------------------------


class _Traceable(TorchFunctionMode):
    """torch.export loses sight of x.data; x.detach() is the same value."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.data.__get__:  # type: ignore[attr-defined]
            return args[0].detach()
        return func(*args, **(kwargs or {}))


@contextmanager
def _free_batch() -> Iterator[list[int]]:
    """int(x.shape[0] * share) does not fix the batch size; what it gives is noted."""
    exact, numbers = torch.SymFloat.__int__, list[int]()

    def noted(x: torch.SymFloat) -> int:
        numbers.append(int(x.node.hint) if x.node.has_hint() else exact(x))  # type: ignore[no-untyped-call]
        return numbers[-1]

    torch.SymFloat.__int__ = noted  # type: ignore[method-assign]
    try:
        yield numbers
    finally:
        torch.SymFloat.__int__ = exact  # type: ignore[method-assign]


def _without_freeing(program: ExportedProgram) -> ExportedProgram:
    """Without x.set_(), which frees the memory of a value that nobody reads any more, and is not pure."""
    for module in program.graph_module.modules():
        if isinstance(module, fx.GraphModule):
            for node in list(module.graph.nodes):
                if node.target is torch.ops.aten.set_.default and not node.users:
                    module.graph.erase_node(node)
            module.recompile()
    return program


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings and logs of torch's tracing: what matters of them is in our own messages."""
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """The model in eval mode; afterwards every module is as it was."""
    training = [m for m in model.modules() if m.training]
    with suppress(NotImplementedError):  # the module of an exported program has no modes
        model.eval()
    try:
        yield
    finally:
        for m in training:
            m.training = True
