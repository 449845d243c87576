"""Files of TRL's GRPO trainer: prompts and completions of a step, rewards by their names, and what differs here."""

from collections.abc import Iterator, Mapping
from typing import Any

from finetune.config.methods import POLICY_LOSSES
from finetune.config.other_tools import TRUNCATED
from finetune.convert.model_names import Found
from finetune.convert.rules import Conversion, convert_number

GRPO_SIGNS = ("reward_funcs", "num_generations", "max_completion_length", "steps_per_generation")
PROMPT_TOKENS = 512  # of max_prompt_length in TRL, until it bounded prompts no more
# TRL's rewards by the names that its command knows: ours, or a function to import.
REWARDS = {"think_format_reward": "think_format", "get_soft_overlong_punishment": "soft_overlong_punishment"}
TRL_PUNISHMENT = {"max_completion_length": 1280, "soft_punish_cache": 256}  # of its command
SUMMED = "sum_then_normalize"
LOCAL_MEAN = "the mean over the tokens of a local batch there, over those of the whole step here"


def is_online(theirs: Mapping[str, Any]) -> bool:
    """Whether a TRL file is for its GRPO trainer."""
    return any(key in theirs for key in GRPO_SIGNS)


def find_unsupported_online(theirs: Mapping[str, Any]) -> Iterator[Found]:
    """The losses that nothing here computes, and models as rewards."""
    loss = str(theirs.get("loss_type", "dapo"))
    if loss not in (*POLICY_LOSSES, "bnpo"):
        yield f"loss_type: {loss}", f"another loss ({loss.upper()})", True
    for key in ("reward_model_name_or_path", "reward_model_path"):
        if theirs.get(key):
            yield f"{key}: {theirs[key]}", "a reward model", True


def adapt_online(theirs: Mapping[str, Any], found: Conversion) -> None:
    """Adds what several keys of a GRPO file together mean."""
    recipe, loss = found.recipe, theirs.get("loss_type")
    recipe |= {"method": "grpo", "lora_dropout": 0.0, **({"loss_type": loss} if loss else {})}
    if loss == "bnpo":
        recipe["loss_type"] = "dapo"
        found.remarks.append(f"loss_type: bnpo   ({LOCAL_MEAN})")
    recipe.setdefault("learning_rate", 1e-6)
    scale = theirs.get("scale_rewards", "group")
    recipe["scale_rewards"] = {True: "group", False: "none"}.get(scale, str(scale))
    longest = convert_number(theirs.get("max_completion_length", 256))
    prompt = convert_number(theirs.get("max_prompt_length") or PROMPT_TOKENS)
    recipe["max_completion_length"], recipe["max_length"] = longest, longest + prompt
    found.remarks.append(f"max_length: {longest + prompt}   (prompts of over {prompt} tokens are dropped here)")
    recipe.pop("packing", None)  # what is sampled is packed here, for the same loss
    rows, accumulated = (
        convert_number(theirs.get(key, default))
        for key, default in (("per_device_train_batch_size", 8), ("gradient_accumulation_steps", 1))
    )
    generations = convert_number(theirs.get("num_generations", 8))
    recipe.pop("gradient_accumulation_steps", None)
    recipe["global_batch_size"] = max(1, rows * accumulated // generations)
    per_process = f"{rows} x {accumulated} completions, {generations} of each prompt, on one process there"
    found.remarks.append(f"global_batch_size: {recipe['global_batch_size']}   ({per_process}; times the processes)")
    sampled = convert_number(theirs.get("generation_batch_size") or 0) // rows  # in micro-batches, on one process
    micro_steps = convert_number(theirs.get("steps_per_generation") or sampled)
    if micro_steps > accumulated:
        recipe["steps_per_generation"] = micro_steps // accumulated
    if theirs.get("top_k") not in (None, 0, -1):
        found.add_difference("top_k", theirs["top_k"], TRUNCATED)
    if (rule := theirs.get("multi_objective_aggregation", SUMMED)) != SUMMED:
        note = "rewards are summed, and then normalized"
        found.add_difference("multi_objective_aggregation", rule, note, "normalizing each reward")
    _add_rewards(theirs.get("reward_funcs") or [], found)


def _add_rewards(names: list[str] | str, found: Conversion) -> None:
    rewards = []
    for name in [names] if isinstance(names, str) else names:
        module, _, function = str(name).rpartition(".")
        rewards.append(REWARDS.get(name) or f"{module.replace('.', '/') or 'my_rewards'}.py:{function}")
        if not module and name not in REWARDS:
            found.to_do.append(f"reward_funcs: {name}: write my_rewards.py: from trl.rewards import {name}")
    if "soft_overlong_punishment" in rewards:
        found.recipe["soft_punish_cache"] = TRL_PUNISHMENT["soft_punish_cache"]
        if (longest := found.recipe["max_completion_length"]) != TRL_PUNISHMENT["max_completion_length"]:
            note = f"up to 1280 tokens there, whatever max_completion_length is; up to {longest} here"
            found.add_difference("reward_funcs", "get_soft_overlong_punishment", note)
    if rewards:
        found.recipe["rewards"] = rewards
    else:
        found.to_do.append("rewards: the file names none; name your functions, such as my_rewards.py:right")
