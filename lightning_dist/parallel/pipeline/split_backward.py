"""Whether a stage's backward can be split into the gradients of its inputs and, later, of its weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor


def can_split(outputs: Iterable[Tensor], inputs: Iterable[Tensor]) -> bool:
    """Whether torch's split backward computes this graph: the paths from each weight meet those from the inputs once.

    torch 2.13 computes weights' gradients from the nodes where their paths meet the paths from the inputs. A weight
    that meets them at several (used twice, or outside the chain and used by several modules) makes it go through parts
    of the graph whose saved tensors it has freed, and a graph without differentiable inputs has no such nodes at all.

    Args:
        outputs: The stage's outputs, or its loss.
        inputs: What the stage received.
    """
    roots = [output.grad_fn for output in outputs if output.grad_fn is not None]
    leaves = {id(tensor) for tensor in inputs if tensor.requires_grad}
    if not leaves:
        return False
    order = _outputs_first(roots)
    from_inputs: set[Any] = set()
    for node in reversed(order):
        is_input = id(getattr(node, "variable", None)) in leaves
        if is_input or any(following in from_inputs for following, _ in node.next_functions):
            from_inputs.add(node)
    meeting: dict[Any, set[Any]] = {}
    for node in order:
        if node not in from_inputs and hasattr(node, "variable") and len(meeting.get(node, ())) > 1:
            return False
        here = {node} if node in from_inputs else meeting.get(node, set())
        for following, _ in node.next_functions:
            if following is not None and following not in from_inputs:
                meeting.setdefault(following, set()).update(here)
    return True


def _outputs_first(roots: list[Any]) -> list[Any]:
    """The nodes of the graph, each behind all nodes that lead to it."""
    order: list[Any] = []
    seen: set[Any] = set()
    stack: list[tuple[Any, bool]] = [(root, False) for root in roots]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
            continue
        if node in seen:
            continue
        seen.add(node)
        stack.append((node, True))
        stack.extend((following, False) for following, _ in node.next_functions if following is not None)
    order.reverse()
    return order
