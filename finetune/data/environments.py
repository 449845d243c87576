"""The environments of a recipe: how they are made, and what of them the model may call.

An environment is TRL's: an object for each completion, with `reset`, tools as its other public
methods, and `get_reward` where it says itself what the completion is worth.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from finetune.config.reward_names import SERVED_ENVIRONMENTS
from finetune.config.user_code import explained, load, place_of
from finetune.data.messages import BadRow, Tool, describe_tool, describe_value
from finetune.data.openenv import OpenEnv, call_served, connect
from finetune.errors import UserError

RESERVED = ("reset", "get_reward")
Environments = Mapping[str, "EnvironmentFacts"]
"""Value of the rows' column `environment` -> its environment; "" -> that of all rows."""


@dataclass(frozen=True, slots=True)
class EnvironmentFacts:
    """The facts about an environment that prompts and metrics need."""

    tools: tuple[Tool, ...]  # with those of the recipe
    reward: str | None  # what metrics call its own reward; None: it gives none


def load_environment(name: str) -> Callable[[], Any]:
    """Returns the class or function that makes an object of the environment `name`.

    Raises `UserError` where its file cannot be run, or lacks the name, and for a package that is
    missing.
    """
    kind, _, address = name.partition(":")
    if f"{kind}:" in SERVED_ENVIRONMENTS:
        return connect(address)
    made: Callable[[], Any] = load(name)
    return made


def list_tools(environment: Any) -> dict[str, Callable[..., Any]]:
    """Returns the methods that the model may call, by name: as TRL, the public functions of its
    class.
    """
    if isinstance(environment, OpenEnv):
        return call_served(environment)
    return {
        name: getattr(environment, name)
        for name, _ in inspect.getmembers(type(environment), inspect.isfunction)
        if name not in RESERVED and not name.startswith("_")
    }


def describe_environments(environments: Mapping[str, str], tools: tuple[Tool, ...]) -> Environments:
    """Returns the facts of each environment of a recipe.

    An object is made for it where the name is not a class.

    Args:
        environments: Value of the rows' column -> name.
        tools: Those of the recipe, which prompts describe too.

    Raises:
        UserError: For one without `reset`, a method without type hints or a docstring, and two
            tools of one name.
    """
    return {value: _describe(name, tools) for value, name in environments.items()}


def _describe(name: str, tools: tuple[Tool, ...]) -> EnvironmentFacts:
    """Returns the facts of one environment; arguments and errors as `describe_environments`."""
    factory = load_environment(name)
    if inspect.isclass(factory):
        probe = object.__new__(factory)
    else:
        with explained(f"{name}, an environment", factory):
            probe = factory()
    kind = type(probe)
    place = f"{place_of(kind)}{kind.__name__}, an environment"
    if not callable(getattr(kind, "reset", None)):
        raise UserError(
            f"{place}: has no method reset, which begins a completion; write one that takes "
            "**row and returns what the model reads, or None"
        )
    if isinstance(probe, OpenEnv):
        own = list(probe.served_tools.values())
        probe.close()
    else:
        own = [describe_tool(method, called) for called, method in list_tools(probe).items()]
    known = [each["function"]["name"] for each in (*tools, *own)]
    if twice := next((each for each in known if known.count(each) > 1), None):
        raise UserError(f"{place}: has a tool {twice}, as tools does; rename one of them")
    reward = kind.__name__ if callable(getattr(kind, "get_reward", None)) else None
    return EnvironmentFacts((*tools, *own), reward)


def choose_environment(environments: Environments, columns: Mapping[str, Any]) -> str:
    """Returns the key in `environments` that a row's `columns` name.

    Raises `BadRow` for a row that names none of them.
    """
    value = "" if "" in environments else columns.get("environment")
    if value not in environments:
        raise BadRow(
            f"environment: {describe_value(value)} is none of the recipe's, which are "
            f"{', '.join(environments)}"
        )
    return str(value)


def has_tools(tokenizer: Any) -> bool:
    """Whether prompts that the tokenizer of a recipe renders describe tools of the recipe."""
    environments: Environments = getattr(tokenizer, "environments", {})
    tools = getattr(tokenizer, "tools", ())
    return bool(tools) or any(facts.tools for facts in environments.values())
