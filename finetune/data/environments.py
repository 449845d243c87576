"""The environments of a recipe: how they are made, and what of them the model may call.

As in TRL, an environment is an object that is made for each completion. Its method `reset` begins
the completion, `get_reward`, if it has one, gives the completion's reward, and its other public
methods are tools.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from finetune.config.reward_names import SERVED_ENVIRONMENTS
from finetune.config.user_code import explained, load, place_of
from finetune.data.messages import BadRow, Tool, describe_tool, describe_value
from finetune.data.openenv import OpenEnv, connect
from finetune.errors import UserError

RESERVED = ("reset", "get_reward")  # methods that are not tools
Environments = Mapping[str, "EnvironmentFacts"]
"""Value in a row's column `environment` -> the row's environment; "" -> the one of every row."""


@dataclass(frozen=True, slots=True)
class EnvironmentFacts:
    """The facts about an environment that prompts and metrics need."""

    tools: tuple[Tool, ...]  # the recipe's tools, then the environment's
    reward: str | None  # the name of its reward in metrics; None: it has no get_reward


def load_environment(name: str) -> Callable[[], Any]:
    """Returns the class or function whose call makes an object of the environment.

    Args:
        name: FILE.py:NAME, or openenv: and the address of a server.

    Raises:
        UserError: The file cannot be run or lacks the name, or a package is missing.
    """
    prefix, _, address = name.partition(":")
    if f"{prefix}:" in SERVED_ENVIRONMENTS:
        return connect(address)
    factory: Callable[[], Any] = load(name)
    return factory


def list_tools(environment: Any) -> dict[str, Callable[..., Any]]:
    """Returns the environment's tools, name -> method: as in TRL, the public methods of its class.

    The tools of an OpenEnv server are those that it lists.
    """
    if isinstance(environment, OpenEnv):
        return {name: partial(environment.call, name) for name in environment.served_tools}
    return {
        name: getattr(environment, name)
        for name, _ in inspect.getmembers(type(environment), inspect.isfunction)
        if name not in RESERVED and not name.startswith("_")
    }


def describe_environments(environments: Mapping[str, str], tools: tuple[Tool, ...]) -> Environments:
    """Returns the facts of each environment of a recipe.

    Args:
        environments: Value of the rows' column `environment` -> name of the environment.
        tools: The recipe's tools, which prompts describe together with the environment's.

    Raises:
        UserError: An environment cannot be loaded, has no `reset`, a tool without type hints or
            a docstring, or a tool with the name of another.
    """
    return {value: _describe(name, tools) for value, name in environments.items()}


def _describe(name: str, tools: tuple[Tool, ...]) -> EnvironmentFacts:
    """Returns the facts of one environment; arguments and errors as `describe_environments`.

    A class is inspected without its `__init__`. A function is called, and the object that it
    returns is inspected.
    """
    factory = load_environment(name)
    if inspect.isclass(factory):
        probe = object.__new__(factory)
    else:
        with explained(f"{name}, an environment", factory):
            probe = factory()
    environment_class = type(probe)
    class_name = environment_class.__name__
    place = f"{place_of(environment_class)}{class_name}, an environment"
    if not callable(getattr(environment_class, "reset", None)):
        raise UserError(
            f"{place}: has no method reset, which begins a completion; write one that takes "
            "**row and returns what the model reads, or None"
        )
    if isinstance(probe, OpenEnv):
        own_tools = list(probe.served_tools.values())
        probe.close()
    else:
        own_tools = [
            describe_tool(method, tool_name) for tool_name, method in list_tools(probe).items()
        ]
    all_tools = (*tools, *own_tools)
    names = [tool["function"]["name"] for tool in all_tools]
    if twice := next((each for each in names if names.count(each) > 1), None):
        raise UserError(f"{place}: has a tool {twice}, as tools does; rename one of them")
    has_reward = callable(getattr(environment_class, "get_reward", None))
    return EnvironmentFacts(all_tools, reward=class_name if has_reward else None)


def choose_environment(environments: Environments, columns: Mapping[str, Any]) -> str:
    """Returns the key in `environments` of the environment of a row.

    It is "" if every row has the same environment, else the value of the row's column
    `environment`. Raises `BadRow` if that is not a key.
    """
    value = "" if "" in environments else columns.get("environment")
    if not isinstance(value, str) or value not in environments:
        raise BadRow(
            f"environment: {describe_value(value)} is none of the recipe's, which are "
            f"{', '.join(environments)}"
        )
    return value


def has_tools(tokenizer: Any) -> bool:
    """Whether the tokenizer of a recipe describes tools in prompts: its own, or an environment's.

    A tokenizer that no recipe has set up has neither.
    """
    environments: Environments = getattr(tokenizer, "environments", {})
    tools = getattr(tokenizer, "tools", ())
    return bool(tools) or any(facts.tools for facts in environments.values())
