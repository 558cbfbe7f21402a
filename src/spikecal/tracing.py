"""torch.export, and what is left to say where it fails.

A decision by the values of the images (`if x.max() > 1`) has no graph. To list what else a model has to offend, it is
then traced along the way that the example takes, with what Python read out of tensors there given as answers; the
offenders on the other sides of the decisions are seen by running them.
"""

from __future__ import annotations

import inspect
import logging
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.overrides import TorchFunctionMode

from .errors import Refusal, UnsupportedModelError
from .observation import DECISION, Observation, Watch, observe, other_ways, place_of
from .refusals import refusal_message


@dataclass(frozen=True)
class Traced:
    """A program; if it is not all of the model, why, and what offends in the rest."""

    program: ExportedProgram
    seen: list[Refusal] = field(default_factory=list)  # calls in a run, with the lines of helper methods
    reasons: list[Refusal] = field(default_factory=list)
    elsewhere: list[Refusal] = field(default_factory=list)


class PartlyRead(nn.Module):
    """A model from a file; once it is traced, `refusals` tells what in the file could not be read."""

    @property
    def refusals(self) -> list[Refusal]:
        raise NotImplementedError


def traced(model: nn.Module, example: Sequence[Tensor]) -> Traced:
    """The program of a model in eval mode with a free batch size, leaving the model as it was."""
    with eval_mode(model), quiet(), torch.random.fork_rng(devices=[]), _Traceable():
        batch = _batch(example, 2)  # one image would make a constant of the batch size
        seen, failure = observe(model, batch), None
        try:
            program = _program(model, example)
            if not seen.decisions:
                return Traced(program, seen.made)
        except UnsupportedModelError:
            raise
        except Exception as e:
            failure = e
        return _as_far_as_possible(model, batch, seen, failure)


def _as_far_as_possible(
    model: nn.Module, batch: tuple[Tensor, ...], seen: Observation, failure: Exception | None
) -> Traced:
    """The program of the way that the images take; or an error with all that was seen."""
    refusal = _failed(failure, model) if failure else None
    if seen.returned:
        why = f"the model returns a {', a '.join(seen.returned)}; return tensors in tuples, lists or dicts"
        refusal = Refusal("output", "forward", why)
    reasons, elsewhere = seen.refusals, list[Refusal]()
    with suppress(Exception):  # a model that cannot be copied, for one
        for way in other_ways(model, batch, seen):
            reasons += [r for r in way.refusals if r not in reasons]
            elsewhere += [r for r in way.offenders if r not in elsewhere]
    with suppress(Exception), Watch(model, seen.answers):
        if refusal and refusal.what == "batch size":
            return Traced(torch.export.export(model, batch), seen.made, [refusal, *reasons], elsewhere)
        return Traced(_exported(model, batch), seen.made, reasons, elsewhere)
    if refusal and not any(refusal.where == r.where for r in reasons):
        reasons.append(refusal)
    found = [*reasons, *seen.offenders, *(r for r in elsewhere if r not in seen.offenders)]
    message = f"for images of shapes {[tuple(x.shape[1:]) for x in batch]}, {refusal_message(found)}"
    raise UnsupportedModelError(message, found) from failure


def _program(model: nn.Module, example: Sequence[Tensor]) -> ExportedProgram:
    with _free_batch() as numbers:
        program = _exported(model, _batch(example, 2))
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


# -- where tracing came to an end -------------------------------------------------------------------------------------


def _failed(e: Exception, model: nn.Module) -> Refusal:
    """Why and where tracing came to an end; what lies behind that place has not been seen."""
    paths = {id(module): path for path, module in model.named_modules()}
    where = place_of(traceback.walk_tb(e.__traceback__), paths)
    if isinstance(e, GuardOnDataDependentSymNode):
        return Refusal("control flow", where, DECISION)
    if "Constraints violated (batch)" in str(e):
        why = "the code takes it for a fixed number; use x.shape[0], or -1 in view() and reshape()"
        return Refusal("batch size", where, why)
    lines = str(e).strip().splitlines()
    why = f"torch.export cannot follow it ({lines[0] if lines else type(e).__name__}); use tensors alone"
    return Refusal("tracing", where, why)


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
