"""Converts the files of torchtune's asynchronous GRPO, which nest their keys in four sections.

The recipe there is recipes/dev/async_grpo_full_finetune_distributed.py, with torchtune/dev/rl.
"""

from typing import Any

from finetune.convert.chat_templates import HEADER_TRAINED
from finetune.convert.counterparts import ToolFile, read_table
from finetune.convert.foreign_values import WrongValue, read_number
from finetune.convert.value_conversion import Conversion, read_section, read_value

SECTIONS = ("orchestration", "inference", "training", "postprocessing")
# (section, key in it) -> the same key in torchtune's other files, or in TRL's for GRPO. Empty for
# keys that this module reads, or that have no effect here, as top_k: torchtune's SyncLLMCollector
# does not pass it on to vLLM. Other keys are reported.
NAMES = {(row["section"], row["key"]): row["name"] for row in read_table("async_grpo_keys.csv")}
FREE_RUNNING = (
    "completions are sampled without end there, by each inference worker of all prompts, and are "
    "as old as it happens: the oldest are dropped where the queue is full; here those of a prompt "
    "are sampled once, by weights that are at most max_staleness steps older"
)
# an element of torchrl's replay buffer is one completion; the oldest make room for new ones
DRAWN = (
    "drawn at random from the newest completions, as many as replay_buffer_size says ({}), one "
    "maybe several times, on each training worker there; here each completion of a step is trained "
    "on once"
)
NEWEST = (
    "the newest completion alone, this many times, on each training worker there, for "
    "replay_buffer_size is 1; here each completion of a step is trained on once"
)
# LinearGRPOLoss, and batched_logits_to_logprobs of torchtune's PostProcessingWorker
UNTEMPERED = (
    "the loss divides the reference's logits by it there, and not the trained model's; both here"
)
NOT_CLIPPED = "not used there: the ratio is of a token's probability to itself, and always 1"
SECOND_UPDATE = "the ratio is 1 in each update on the same completions there, clipped here"
PROMPT_TOKENS = 512  # room for a prompt where max_seq_len leaves none
# importance_sampling_clip_max: so high that geometric_mask masks no completion
NO_CLIPPING = 1e6


def is_async(settings: ToolFile) -> bool:
    """Whether a torchtune file is one of asynchronous GRPO, by its section `orchestration`."""
    return isinstance(settings.get("orchestration"), dict)


def rename_async(settings: ToolFile) -> dict[str, Any]:
    """Returns the settings with the sections' keys at the top level, named as in other files.

    A key without such a name stays in its section.
    """
    flat = {"dtype": "bf16", **settings}  # such a file has no key for the dtype
    for section in SECTIONS:
        flat[section] = rest = {}
        for key, value in read_section(settings, section).items():
            name = NAMES.get((section, key))
            if name:
                flat[name] = value
            else:
                rest[key] = value
    return flat


def adapt_async(settings: ToolFile, conversion: Conversion) -> None:
    """Sets the recipe's keys that the tables do not, and reports each difference.

    `settings` are those that `rename_async` returns.
    """
    recipe = conversion.recipe
    training = read_section(settings, "training")
    loss = read_section(training, "loss")
    iterations = int(read_number("training.ppo_epochs", settings.get("num_iterations", 1), "1", 1))
    steps = int(read_number("orchestration.num_steps", settings.get("max_steps"), "250", 1))
    recipe |= {
        "loss_type": "grpo",  # averages each completion over its tokens, then all completions
        "beta": loss.get("kl_coeff", 0.1),
        "importance_sampling_correction": "geometric_mask",
        "importance_sampling_clip_max": NO_CLIPPING,
    }
    conversion.add_difference("training.loss.epsilon", loss.get("epsilon", 0.1), NOT_CLIPPED)
    temperature = settings.get("temperature", 1.0)
    if temperature != 1.0:
        conversion.add_difference("inference.temperature", temperature, UNTEMPERED)
    if iterations != 1:
        # max_steps counts updates here, which are as many for each of torchtune's steps
        recipe["max_steps"] = steps * iterations
        conversion.add_difference("training.ppo_epochs", iterations, SECOND_UPDATE)
    conversion.add_difference(
        "training.steps_before_weight_sync", recipe.setdefault("max_staleness", 1), FREE_RUNNING
    )
    conversion.remarks = [line for line in conversion.remarks if line != HEADER_TRAINED]
    _set_batch(settings, conversion)
    _set_length(settings, conversion)
    _add_rewards(settings.get("reward_functions") or [], conversion)
    recipe["vllm_server_base_url"] = "http://localhost:8000"
    conversion.to_do.append(
        "vllm_server_base_url: start the server of http://localhost:8000 as docs/online.md says, "
        "or several, in place of num_inference_workers"
    )
    for section in SECTIONS:
        for key, value in read_section(settings, section).items():
            if (section, key) not in NAMES:
                conversion.add_difference(f"{section}.{key}", value, "not known here")


def _set_batch(settings: ToolFile, conversion: Conversion) -> None:
    """Sets the number of prompts in a step, and reports how a step draws its completions there.

    Each training worker there takes a batch of completions. A prompt has a group of them.
    """
    orchestration = read_section(settings, "orchestration")
    workers = read_number(
        "orchestration.num_training_workers", orchestration.get("num_training_workers", 1), "2", 1
    )
    batch_size = read_number(
        "training.batch_size", read_value(settings, "training.batch_size", 1), "16", 1
    )
    group_size = read_number("inference.group_size", settings.get("num_generations"), "16", 1)
    prompts = int(batch_size * workers) // int(group_size)
    conversion.recipe["global_batch_size"] = max(1, prompts)
    buffer = read_number("replay_buffer_size", orchestration.get("replay_buffer_size", 1), "1", 1)
    note = NEWEST if buffer == 1 else DRAWN.format(int(buffer))
    conversion.add_difference("training.batch_size", batch_size, note)


def _set_length(settings: ToolFile, conversion: Conversion) -> None:
    """Sets the lengths of a completion and of a prompt with it, and says which prompts are dropped.

    Without a max_seq_len above the completion's length, a prompt gets PROMPT_TOKENS.
    """
    recipe = conversion.recipe
    completion_length = int(
        read_number(
            "inference.max_generated_tokens", settings.get("max_completion_length"), "512", 1
        )
    )
    recipe["max_completion_length"] = completion_length
    asked_length = read_value(settings, "tokenizer.max_seq_len") or 0
    max_seq_len = int(read_number("tokenizer.max_seq_len", asked_length, "1024", 0))
    # a longer max_seq_len is the recipe's max_length already, by the table of keys
    if max_seq_len <= completion_length:
        recipe["max_length"] = completion_length + PROMPT_TOKENS
    note = f"prompts of over {recipe['max_length'] - completion_length} tokens are dropped here"
    conversion.remarks.append(f"max_length: {recipe['max_length']}   ({note})")


def _add_rewards(functions: Any, conversion: Conversion) -> None:
    """Names a reward function of `my_rewards.py` for each reward of the file.

    What is to do then is to write these functions, each around torchtune's own class.
    """
    if not isinstance(functions, list) or not all(isinstance(each, dict) for each in functions):
        raise WrongValue.of_key("reward_functions", functions, "a list of components", "[]")
    rewards = []
    for component in functions:
        keywords = dict(component)
        module, _, name = str(keywords.pop("_component_", "")).rpartition(".")
        arguments = ", ".join(f"{key}={value!r}" for key, value in keywords.items())
        rewards.append(f"my_rewards.py:{name}")
        conversion.to_do.append(
            f"reward_functions: write in my_rewards.py: def {name}(completions, completion_ids, "
            f"answer, **_): a list of the total_reward of {module}.{name}({arguments}) of "
            "(completion_ids, texts of completions, what follows '#### ' in answer)"
        )
    conversion.recipe["rewards"] = rewards
