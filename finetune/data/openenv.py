"""An environment behind an OpenEnv server, through the generic client of the package `openenv`.

The environment's tools are those that the server lists. A server without a list has one tool,
`step`, whose arguments are the fields of the server's actions.
"""

import json
import random
from collections.abc import Callable, Mapping
from typing import Any

from finetune.data.messages import Tool
from finetune.errors import UserError

HIDDEN_FIELDS = ("metadata", "reward", "done")  # of an observation: the model does not read them


def connect(address: str) -> Callable[[], "OpenEnv"]:
    """Returns a function that opens a new session of the server at `address`.

    Completions that run at the same time need one session each.

    Raises `UserError` if the package `openenv` is missing.
    """
    try:
        from openenv.core.generic_client import GenericEnvClient
    except ImportError as error:
        raise UserError(
            f"environment: openenv:{address}: the package openenv cannot be imported ({error}); "
            "pip install openenv"
        ) from None

    def open_session() -> OpenEnv:
        return OpenEnv(GenericEnvClient(base_url=address).sync(), address)

    return open_session


class OpenEnv:
    """A session of an OpenEnv server, with the methods of TRL's environments.

    The reward of a completion is the last one that the server gave, as in OpenEnv's own rollouts.
    """

    def __init__(self, client: Any, address: str) -> None:
        self._client = client
        self._address = address
        self.reward: float | None = None
        self.is_done = False
        self.served_tools = {tool["function"]["name"]: tool for tool in self._list_tools()}

    def reset(self, **row: Any) -> str | None:
        """Begins an episode and returns the text of its first observation; None if that is empty.

        The server gets the columns of the row without its prompt, and a random seed unless `seed`
        is one of the columns.
        """
        settings = {"seed": random.getrandbits(31)}
        settings |= {name: value for name, value in row.items() if name != "prompt"}
        self.reward = None
        self.is_done = False
        return self._read(self._client.reset(**settings)) or None

    def call(self, name: str, **arguments: Any) -> str:
        """Calls one of the server's tools and returns the answer's text.

        Raises `ValueError` if the episode has ended, or the tool reports an error.
        """
        if self.is_done:
            raise ValueError("The episode has ended.")
        if self._is_step:
            action = arguments
        else:
            action = {"type": "call_tool", "tool_name": name, "arguments": arguments}
        return self._read(self._client.step(action))

    def get_reward(self) -> float | None:
        """Returns the last reward that the server gave; None if it has given none."""
        return self.reward

    def close(self) -> None:
        """Ends the session."""
        self._client.close()

    def _list_tools(self) -> list[Tool]:
        """Lists the server's tools, or `step` alone if the server has no list of tools.

        Sets `_is_step`: whether `step` is the only tool.
        """
        self._is_step = False
        try:
            served_tools = self._client.step({"type": "list_tools"}).observation.get("tools")
        except RuntimeError:  # from the client, if the server does not know this action
            served_tools = None
        if served_tools is not None:
            return [
                _make_tool(tool["name"], tool["description"], tool["input_schema"])
                for tool in served_tools
            ]
        import requests

        self._is_step = True
        answer = requests.get(f"{self._address.rstrip('/')}/schema", timeout=30)
        answer.raise_for_status()
        schema = answer.json()["action"]
        fields = {name: value for name, value in schema["properties"].items() if name != "metadata"}
        description = schema.get("description") or "Acts in the environment."
        return [_make_tool("step", description, schema | {"properties": fields})]

    def _read(self, result: Any) -> str:
        """Returns the text of an observation; stores its reward and whether the episode has ended.

        Raises `ValueError` if the observation is an error of the called tool.
        """
        if result.reward is not None:
            self.reward = float(result.reward)
        self.is_done = bool(result.done)
        observation: Mapping[str, Any] = result.observation
        if "tool_name" not in observation:
            fields = {
                name: value
                for name, value in observation.items()
                if name not in HIDDEN_FIELDS and value not in (None, "", [], {})
            }
            return _write_fields(fields)
        if observation.get("error"):
            raise ValueError(observation["error"].get("message", observation["error"]))
        tool_result = observation.get("result")
        if not isinstance(tool_result, Mapping) or "content" not in tool_result:
            return _write_fields({"result": tool_result})
        return "\n".join(part.get("text", "") for part in tool_result["content"])


def _make_tool(name: str, description: str, schema: Mapping[str, Any]) -> Tool:
    """Describes a tool in the form that chat templates read.

    `schema`: the JSON schema of the tool's arguments.
    """
    template_keys = ("type", "properties", "required", "$defs")
    parameters = {key: schema[key] for key in template_keys if key in schema}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def _write_fields(fields: Mapping[str, Any]) -> str:
    """Writes fields as text for the model: a single string unchanged, other fields as JSON.

    Returns "" if there are no fields.
    """
    values = list(fields.values())
    if len(values) == 1 and isinstance(values[0], str):
        return values[0]
    return json.dumps(fields, ensure_ascii=False) if fields else ""
