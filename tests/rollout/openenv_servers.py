"""Serves OpenEnv environments: `openenv_servers.py NAME PORT` with NAME echo (that of the package's own template) or multiply (MCP)."""

import random
import sys
import tempfile
from pathlib import Path
from typing import Any


def load_echo() -> tuple[Any, Any, Any]:
    """The environment that `openenv init` writes, with its action and its observation."""
    import openenv.cli

    template = Path(openenv.cli.__file__).parent / "templates" / "openenv_env"
    folder = Path(tempfile.mkdtemp())
    (folder / "server").mkdir()
    for name, written in (
        ("models.py", "models.py"),
        ("server/__ENV_NAME___environment.py", "server/echo_environment.py"),
    ):
        text = (template / name).read_text()
        for mark, value in (("CLASS_NAME", "Echo"), ("TITLE_NAME", "Echo"), ("NAME", "echo")):
            text = text.replace(f"__ENV_{mark}__", value)
        (folder / written).write_text(text)
    sys.path.append(str(folder))
    import models  # type: ignore[import-not-found]
    from server.echo_environment import EchoEnvironment  # type: ignore[import-not-found]

    return EchoEnvironment, models.EchoAction, models.EchoObservation


def make_multiply() -> tuple[Any, Any, Any]:
    """An environment with a tool of the Model Context Protocol, which pays for odd factors."""
    from fastmcp import FastMCP
    from openenv.core.env_server.mcp_environment import MCPEnvironment
    from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
    from openenv.core.env_server.types import Observation, State

    class Asked(Observation):  # type: ignore[misc]
        question: str

    class Multiply(MCPEnvironment):  # type: ignore[misc]
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            server = FastMCP("multiply")

            @server.tool
            def multiply(a: int, b: int) -> int:
                """Multiplies two whole numbers."""
                self.paid += a % 2
                return a * b

            super().__init__(server)

        def reset(self, seed: int | None = None, **row: Any) -> Any:
            self.paid = 0
            self.calls = 0
            drawn = random.Random(seed)
            return Asked(question=f"What is {drawn.randint(20, 60)} times {drawn.randint(2, 99)}?")

        def _pay(self, observation: Any) -> Any:
            self.calls += 1
            observation.reward = float(self.paid)
            observation.done = self.calls >= 2
            return observation

        def step(self, action: Any, **keys: Any) -> Any:
            observation = super().step(action, **keys)
            return self._pay(observation) if isinstance(action, CallToolAction) else observation

        async def step_async(self, action: Any, **keys: Any) -> Any:
            observation = await super().step_async(action, **keys)
            return self._pay(observation) if isinstance(action, CallToolAction) else observation

        def _step_impl(self, action: Any, **keys: Any) -> Any:
            raise ValueError(action)

        @property
        def state(self) -> Any:
            return State()

    return Multiply, CallToolAction, CallToolObservation


def main() -> None:
    """Serves until it is killed."""
    import uvicorn
    from openenv.core.env_server.http_server import create_fastapi_app

    name, port = sys.argv[1:]
    made = load_echo() if name == "echo" else make_multiply()
    app = create_fastapi_app(*made, max_concurrent_envs=64)
    uvicorn.run(app, port=int(port), log_level="error")


if __name__ == "__main__":
    main()
