"""An environment behind an OpenEnv server, through the generic client of its package.

Its tools are those that the server lists, or one named `step` with the fields of its actions.
"""

import json
import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from finetune.data.messages import Tool
from finetune.errors import UserError

LATEST = ("metadata", "reward", "done")  # of an observation, beside what the model reads


def connect(address: str) -> Callable[[], "OpenEnv"]:
    """Returns what connects to a server, once for each completion that runs at a time.

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

    What the completion is worth is the last reward that the server gave, as in OpenEnv's own
    rollouts.
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
        self._is_step = False
        try:
            listed = self._client.step({"type": "list_tools"}).observation.get("tools")
        except RuntimeError:  # as a server says that this is none of its actions
            listed = None
        if listed is not None:
            return [
                _describe(each["name"], each["description"], each["input_schema"])
                for each in listed
            ]
        import requests

        self._is_step = True
        answer = requests.get(f"{self._address.rstrip('/')}/schema", timeout=30)
        answer.raise_for_status()
        schema = answer.json()["action"]
        fields = {name: value for name, value in schema["properties"].items() if name != "metadata"}
        says = schema.get("description") or "Acts in the environment."
        return [_describe("step", says, schema | {"properties": fields})]

    def _read(self, result: Any) -> str:
        """The text of an observation, whose reward is kept.

        Raises `ValueError` for what the server says is an error.
        """
        if result.reward is not None:
            self.reward = float(result.reward)
        self.is_done = bool(result.done)
        observation: Mapping[str, Any] = result.observation
        if "tool_name" not in observation:
            said = {
                name: value
                for name, value in observation.items()
                if name not in LATEST and value not in (None, "", [], {})
            }
            return _write(said)
        if observation.get("error"):
            raise ValueError(observation["error"].get("message", observation["error"]))
        answered = observation.get("result")
        if not isinstance(answered, Mapping) or "content" not in answered:
            return _write({"result": answered})
        return "\n".join(part.get("text", "") for part in answered["content"])


def call_served(environment: OpenEnv) -> dict[str, Callable[..., Any]]:
    """The tools of a session, by name."""
    return {name: partial(environment.call, name) for name in environment.served_tools}


def _describe(name: str, says: str, schema: Mapping[str, Any]) -> Tool:
    kept = {
        key: schema[key] for key in ("type", "properties", "required", "$defs") if key in schema
    }
    return {"type": "function", "function": {"name": name, "description": says, "parameters": kept}}


def _write(said: Mapping[str, Any]) -> str:
    """Fields as a model reads them: a text alone as it is, others as JSON."""
    values = list(said.values())
    if len(values) == 1 and isinstance(values[0], str):
        return values[0]
    return json.dumps(said, ensure_ascii=False) if said else ""
