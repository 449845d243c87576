"""An environment behind an OpenEnv server, through the generic client of its package.

Its tools are those that the server lists, or one named `step` with the fields of its actions.
"""

import json
import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from finetune.constants import Fields
from finetune.data.messages import Tool
from finetune.errors import UserError

LATEST = ("metadata", "reward", "done")  # of an observation, beside what the model reads


def connect(address: str) -> Callable[[], "OpenEnv"]:
    """Returns a function that opens a session of the server at `address`.

    Each completion that runs at a time has a session of its own.

    Raises `UserError` where the package is missing.
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
    """A session of an OpenEnv server, with TRL's methods.

    The reward of a completion is the last that the server gave, as in OpenEnv's own rollouts.
    """

    def __init__(self, client: Any, address: str) -> None:
        self._client = client
        self._address = address
        self.reward: float | None = None
        self.is_done = False
        self.served_tools = {tool["function"]["name"]: tool for tool in self._list_tools()}

    def reset(self, **row: Any) -> str | None:
        """Begins an episode by the columns of a row, with a seed of its own."""
        columns = {name: value for name, value in row.items() if name != "prompt"}
        seed = {"seed": random.getrandbits(31)}
        self.reward = None
        self.is_done = False
        return self._read(self._client.reset(**seed | columns)) or None

    def call(self, name: str, **arguments: Any) -> str:
        """Calls one of the server's tools; returns its answer."""
        if self.is_done:
            raise ValueError("The episode has ended.")
        if self._is_step:
            action = arguments
        else:
            action = {"type": "call_tool", "tool_name": name, "arguments": arguments}
        return self._read(self._client.step(action))

    def get_reward(self) -> float | None:
        """The last reward that the server gave; None where it gave none."""
        return self.reward

    def close(self) -> None:
        """Ends the session."""
        self._client.close()

    def _list_tools(self) -> list[Tool]:
        """Lists the server's tools, and notes whether the only one is `step`."""
        self._is_step = False
        try:
            listed = self._client.step({"type": "list_tools"}).observation.get("tools")
        except RuntimeError:  # as a server says that this is none of its actions
            listed = None
        if listed is not None:
            return [
                _make_tool(each["name"], each["description"], each["input_schema"])
                for each in listed
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
        """Returns the text of an observation; keeps its reward, and whether the episode has ended.

        Raises `ValueError` where the server reports an error of the tool.
        """
        if result.reward is not None:
            self.reward = float(result.reward)
        self.is_done = bool(result.done)
        observation: Fields = result.observation
        if "tool_name" not in observation:
            shown = {
                name: value
                for name, value in observation.items()
                if name not in LATEST and value not in (None, "", [], {})
            }
            return _write_fields(shown)
        if observation.get("error"):
            raise ValueError(observation["error"].get("message", observation["error"]))
        answered = observation.get("result")
        if not isinstance(answered, Mapping) or "content" not in answered:
            return _write_fields({"result": answered})
        return "\n".join(part.get("text", "") for part in answered["content"])


def call_served(environment: OpenEnv) -> dict[str, Callable[..., Any]]:
    """The tools of a session, by name."""
    return {name: partial(environment.call, name) for name in environment.served_tools}


def _make_tool(name: str, description: str, schema: Fields) -> Tool:
    """Describes a tool as chat templates read it, by the JSON schema of its arguments."""
    kept = ("type", "properties", "required", "$defs")
    parameters = {key: schema[key] for key in kept if key in schema}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def _write_fields(fields: Fields) -> str:
    """Writes fields for the model: a single text as it is, others as JSON, none as ""."""
    values = list(fields.values())
    if len(values) == 1 and isinstance(values[0], str):
        return values[0]
    return json.dumps(fields, ensure_ascii=False) if fields else ""
