"""Finds what ``MODULE:FACTORY`` on the command line names."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any


def load_factory(target: str) -> Callable[[], Any]:
    """Imports the function that ``MODULE:FACTORY`` names; the current folder is on the path.

    Raises:
        ValueError: In one sentence, if there is no such module or function, or it cannot be called without arguments.
    """
    module_name, colon, attribute = target.partition(":")
    if not (module_name and colon and attribute):
        raise ValueError(f"{target!r} does not fit: write MODULE:FACTORY, such as train:build.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            where = "the current folder or among the installed packages"
            raise ValueError(f"{target!r} does not fit: there is no module {module_name!r} in {where}.") from None
        raise ValueError(f"{target!r} cannot be imported: {error}.") from error
    except Exception as error:
        raise ValueError(f"{target!r} cannot be imported: {type(error).__name__}: {error}.") from error
    for name in attribute.split("."):
        if not hasattr(found, name):
            near = difflib.get_close_matches(name, dir(found), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise ValueError(f"{target!r} does not fit: {module_name!r} has no {name!r}{hint}")
        found = getattr(found, name)
    if not callable(found):
        raise ValueError(
            f"{target!r} does not fit: it is of type {type(found).__name__}; name a function without arguments that"
            " returns the LightningModule."
        )
    required = _required_arguments(found)
    if required:
        raise ValueError(
            f"{target!r} does not fit: it needs the arguments {', '.join(required)}; name a function without arguments"
            " that returns the LightningModule."
        )
    return found


def _required_arguments(function: Callable[..., Any]) -> list[str]:
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind not in optional]
