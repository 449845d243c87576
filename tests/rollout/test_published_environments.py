"""Games of TextArena as environments (slow): the whole of a rollout, with rewards and turns recomputed by the games' own code from what it holds.

`FINETUNE_ENVIRONMENTS` names folders with their packages (`pip install --target FOLDER --no-deps textarena chess nltk python-dotenv`, and openenv).
"""

import json
import os
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from finetune.config.reader import read_recipe
from finetune.data.packing import StoredBatches
from finetune.data.prepare import prepare_data
from finetune.data.tokenizer import load_tokenizer
from finetune.data.tool_calls import make_tool_turns
from finetune.distributed.world import alone
from finetune.rollout.collect import Sampler
from finetune.rollout.engine import Ended, Request, Sampled
from finetune.rollout.rewards import Rewards
from tests.conftest import make_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "FINETUNE_ENVIRONMENTS" not in os.environ,
        reason="FINETUNE_ENVIRONMENTS names no folders with textarena",
    ),
]
FILE = '''
import random

import textarena


class Game:
    """A game for one player, as TRL's documentation wraps Wordle."""

    def reset(self, game, **row):
        self.game = textarena.make(f"{game}-v0")
        self.game.reset(num_players=1, seed=random.getrandbits(16))
        self.is_done = False
        self.reward = 0.0
        return self.game.get_observation()[1]

    def act(self, move: str) -> str:
        """Makes a move.

        Args:
            move: As the rules of the game write it.
        """
        if self.is_done:
            raise ValueError("Game over.")
        self.is_done, _ = self.game.step(move)
        if self.is_done:
            self.reward = self.game.close()[0][0]
            return "Game over."
        return self.game.get_observation()[1]

    def get_reward(self):
        return float(self.reward) if not isinstance(self.reward, str) else 0.0


def lengths(environments, **columns):
    return [float(each.reward) if not isinstance(each.reward, str) else 0.0 for each in environments]
'''
MOVES = {
    "2048": "[up] [down] [left] [right]",
    "Bandit": "[red] [blue] [green] [yellow] [purple]",
    "Blackjack": "[Hit] [Stand]",
    "FifteenPuzzle": "[up] [down] [left] [right]",
    "FrozenLake": "[up] [down] [left] [right]",
    "GuessTheNumber": "[3] [7] [12] [15] [18]",
    "LightsOut": "[1,1] [2,3] [0,4]",
    "Mastermind": "[1 2 3 4] [4 3 2 1] [1 3 5 6]",
    "Minesweeper": "[3 4] [0 0] [7 7]",
    "PegJump": "[4 1] [6 1] [7 2]",
    "Secretary": "[continue] [accept]",
    "Sokoban": "[up] [down] [left] [right]",
    "TowerOfHanoi": "[A C] [A B] [C B]",
}
GENERATIONS, TURNS = 3, 5


class Player:
    """An engine that plays drawn moves, as the chat template writes calls."""

    def __init__(self, tokenizer: Any, games: dict[tuple[int, ...], str]) -> None:
        self.tokenizer = tokenizer
        self.games = games
        self.asked: list[Request] = []

    def sample(self, requests: Any, _: Any) -> list[Sampled]:
        made = []
        for request in requests:
            self.asked.append(request)
            turn = request.seed[4] if len(request.seed) > 4 else 0
            drawn = random.Random(str(request.seed))
            found = re.findall(r"\[.*?\]", MOVES[self.games[request.seed[2:3]]])
            call = json.dumps({"name": "act", "arguments": {"move": drawn.choice(found)}})
            text = (
                f"<tool_call>\n{call}\n</tool_call><|im_end|>"
                if turn < TURNS
                else "Enough.<|im_end|>"
            )
            ids = self.tokenizer.encode(text, add_special_tokens=False)
            made.append(Sampled(ids, [-1.0] * len(ids), 1.0, Ended.STOPPED))
        return made

    def forget(self) -> None:
        pass


def play_again(game: Any, text: str) -> tuple[int, float]:
    """(the moves that a transcript makes, the reward), by the game itself, which says the same."""
    moves = re.findall(r'"move": "(.*?)"', text)
    said = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", text, re.DOTALL)
    is_done, reward, made = False, 0.0, 0
    for move, answer in zip(moves, said, strict=True):
        if is_done:
            assert answer == str({"error": "Game over."})
            continue
        made += 1
        is_done, _ = game.step(move)
        if is_done:
            paid = game.close()[0][0]
            reward = 0.0 if isinstance(paid, str) else float(paid)
            assert answer == "Game over."
        else:
            assert answer.strip() == game.get_observation()[1].strip()
    return made, reward


def test_games_pay_what_their_own_code_says(tmp_path: Path) -> None:
    folders = os.environ["FINETUNE_ENVIRONMENTS"].split(os.pathsep)
    sys.path += [each for each in folders if each not in sys.path]  # behind our own
    textarena = pytest.importorskip("textarena")
    (tmp_path / "my_games.py").write_text(FILE)
    rows = [{"prompt": [{"role": "user", "content": "Play. "}], "game": game} for game in MOVES]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    make_tokenizer().save_pretrained(tmp_path)
    keys: dict[str, Any] = {
        "model_name_or_path": str(tmp_path),
        "method": "grpo",
        "environment": f"{tmp_path / 'my_games.py'}:Game",
        "rewards": [f"{tmp_path / 'my_games.py'}:lengths"],
        "datasets": [{"path": str(tmp_path / "rows.jsonl")}],
        "dataset_cache_dir": str(tmp_path / "cache"),
        "chat_template": "qwen",
        "added_tokens": ["<|im_end|>"],
        "eot_tokens": ["<|im_end|>"],
        "max_length": 60_000,
        "max_completion_length": 30_000,
        "global_batch_size": len(MOVES),
    }
    recipe = read_recipe(None, [f"{key}={json.dumps(value)}" for key, value in keys.items()])
    tokenizer = load_tokenizer(recipe.model, recipe.data, (), recipe.rollout.environments)
    data = prepare_data(recipe, tokenizer, alone())
    assert isinstance(data.train, StoredBatches)
    examples = data.train.examples
    games = {(i,): examples.read_row(i)["columns"]["game"] for i in range(len(MOVES))}
    engine = Player(tokenizer, games)
    world: Any = SimpleNamespace(
        is_main=True,
        size=1,
        rank=0,
        tensor_group_count=1,
        tensor_group_index=0,
        stage_size=1,
        gather=lambda value, *_: [value],
    )
    rewards = Rewards(recipe.rollout)
    sampler = Sampler(
        recipe, world, tokenizer, engine, rewards, 1, False, make_tool_turns(recipe, tokenizer)
    )
    try:
        rollout = sampler.roll_out(examples, np.arange(len(MOVES)), 4, GENERATIONS)
    finally:
        rewards.close()
    assert rollout.failures == 0
    several = 0
    for place, sampled in enumerate(rollout.sampled):
        group = place // GENERATIONS
        seed = random.Random(str((recipe.run.seed, 4, group))).getrandbits(16)
        game = textarena.make(f"{games[group,]}-v0")
        game.reset(num_players=1, seed=seed)
        assert f"Play. {game.get_observation()[1]}" in tokenizer.decode(rollout.prompts[place])
        assert sampled.calls == TURNS
        moves, reward = play_again(game, tokenizer.decode(sampled.token_ids))
        assert rollout.scores[place].tolist() == [reward, reward], games[group,]
        several += moves
    assert several > 2 * len(rollout.sampled), "most games take several turns"
    prompts = {tuple(each) for each in rollout.prompts}
    assert len(prompts) == len(MOVES), "the games of a group begin alike"
