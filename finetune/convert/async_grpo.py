"""Files of torchtune's asynchronous GRPO: their sections in the keys of its other files, and what
they mean here.

Its source: recipes/dev/async_grpo_full_finetune_distributed.py and torchtune/dev/rl.
"""

from collections.abc import Mapping
from typing import Any

from finetune.convert.chat_templates import HEADER_TRAINED
from finetune.convert.counterparts import ToolFile
from finetune.convert.foreign_values import WrongValue, read_number
from finetune.convert.value_conversion import Conversion, read_section

SECTIONS = ("orchestration", "inference", "training", "postprocessing")
# A section and its key -> a key of torchtune's other files, or of TRL's trainer for GRPO.
RENAMED: Mapping[tuple[str, str], str] = {
    ("orchestration", "num_steps"): "max_steps",
    ("inference", "group_size"): "num_generations",
    ("inference", "max_generated_tokens"): "max_completion_length",
    ("inference", "temperature"): "temperature",
    ("training", "ppo_epochs"): "num_iterations",
    ("training", "steps_before_weight_sync"): "max_staleness",
    ("postprocessing", "ref_checkpointer"): "ref_checkpointer",
}
SAME = (  # in the section training as in torchtune's other files
    "checkpointer",
    "optimizer",
    "clip_grad_norm",
    "save_every_n_steps",
    "enable_activation_checkpointing",
    "enable_activation_offloading",
    "compile",
    "fsdp_cpu_offload",
    "custom_sharded_layers",
    "seed",
)
READ_HERE: Mapping[str, tuple[str, ...]] = {
    "orchestration": (
        "num_inference_workers",
        "num_postprocessing_workers",
        "num_training_workers",
        "replay_buffer_size",
    ),
    "inference": (
        "engine",
        "model",
        "tensor_parallel_dim",
        "batch_size",
        "total_batch_size",
        "steps_before_weight_sync",
        "queue_maxsize",
        "top_k",  # which its SyncLLMCollector does not give vLLM
    ),
    "training": ("batch_size", "loss"),
    "postprocessing": (),
}
FREE_RUNNING = (
    "completions are sampled without end there, by each inference worker of all prompts, and are "
    "as old as it happens: the oldest are dropped where the queue is full; here those of a prompt "
    "are sampled once, by weights that are at most max_staleness steps older"
)
# a completion is an element of torchrl's buffer, which keeps as many as it has room for
DRAWN = (
    "drawn at random from the newest completions, as many as replay_buffer_size says ({}), one "
    "maybe several times, on each training worker there; here each completion of a step is trained "
    "on once"
)
NEWEST = (
    "the newest completion alone, this many times, on each training worker there, for "
    "replay_buffer_size is 1; here each completion of a step is trained on once"
)
# LinearGRPOLoss, beside batched_logits_to_logprobs of its PostProcessingWorker
UNTEMPERED = (
    "the loss divides the reference's logits by it there, and not the trained model's; both here"
)
NOT_CLIPPED = "not used there: the ratio is of a token's probability to itself, and always 1"
SECOND_UPDATE = "the ratio is 1 in each update on the same completions there, clipped here"
PROMPT_TOKENS = 512  # where max_seq_len leaves no room for a prompt
WIDEST = 1e6  # of the ratio of a whole completion, within which geometric_mask changes nothing


def is_async(settings: ToolFile) -> bool:
    return isinstance(settings.get("orchestration"), dict)


def rename_async(settings: ToolFile) -> dict[str, Any]:
    """Returns the settings with the keys of its sections beside those of torchtune's other
    files; what the table does not know stays in its section.
    """
    renamed = {"dtype": "bf16", **settings}  # the dtype is no key of such a file
    for name in SECTIONS:
        unread = dict(read_section(settings, name))
        for key in [key for key in unread if (name, key) in RENAMED]:
            renamed[RENAMED[name, key]] = unread.pop(key)
        for key in [key for key in unread if name == "training" and key in SAME]:
            renamed[key] = unread.pop(key)
        renamed[name] = unread
    return renamed


def adapt_async(settings: ToolFile, conversion: Conversion) -> None:
    """Adds what several keys together mean, and each difference."""
    recipe = conversion.recipe
    training = read_section(settings, "training")
    loss = read_section(training, "loss")
    iterations = int(read_number("training.ppo_epochs", settings.get("num_iterations", 1), "1", 1))
    steps = int(read_number("orchestration.num_steps", settings.get("max_steps"), "250", 1))
    recipe |= {
        "loss_type": "grpo",  # the mean over completions of the mean of each
        "beta": loss.get("kl_coeff", 0.1),
        "importance_sampling_correction": "geometric_mask",
        "importance_sampling_clip_max": WIDEST,
    }
    conversion.add_difference("training.loss.epsilon", loss.get("epsilon", 0.1), NOT_CLIPPED)
    temperature = settings.get("temperature", 1.0)
    if temperature != 1.0:
        conversion.add_difference("inference.temperature", temperature, UNTEMPERED)
    if iterations != 1:
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
    for name, known in READ_HERE.items():
        for key, value in read_section(settings, name).items():
            if key not in known:
                conversion.add_difference(f"{name}.{key}", value, "not known here")


def _set_batch(settings: ToolFile, conversion: Conversion) -> None:
    """Sets the prompts of a step: each training worker there takes a batch of completions."""
    orchestration = read_section(settings, "orchestration")
    workers = read_number(
        "orchestration.num_training_workers", orchestration.get("num_training_workers", 1), "2", 1
    )
    completions = read_number(
        "training.batch_size", read_section(settings, "training").get("batch_size", 1), "16", 1
    )
    group = read_number("inference.group_size", settings.get("num_generations"), "16", 1)
    conversion.recipe["global_batch_size"] = max(1, int(completions * workers) // int(group))
    size = read_number("replay_buffer_size", orchestration.get("replay_buffer_size", 1), "1", 1)
    note = NEWEST if size == 1 else DRAWN.format(int(size))
    conversion.add_difference("training.batch_size", completions, note)


def _set_length(settings: ToolFile, conversion: Conversion) -> None:
    recipe = conversion.recipe
    completion = int(
        read_number(
            "inference.max_generated_tokens", settings.get("max_completion_length"), "512", 1
        )
    )
    recipe["max_completion_length"] = completion
    longest = read_section(settings, "tokenizer").get("max_seq_len") or 0
    longest = int(read_number("tokenizer.max_seq_len", longest, "1024", 0))
    if longest <= completion:
        recipe["max_length"] = completion + PROMPT_TOKENS
    note = f"prompts of over {recipe['max_length'] - completion} tokens are dropped here"
    conversion.remarks.append(f"max_length: {recipe['max_length']}   ({note})")


def _add_rewards(functions: Any, conversion: Conversion) -> None:
    """Names a function for each of the file's, and says how torchtune's own class is called in
    it.
    """
    if not isinstance(functions, list) or not all(isinstance(each, dict) for each in functions):
        raise WrongValue.of_key("reward_functions", functions, "a list of components", "[]")
    rewards = []
    for section in functions:
        values = dict(section)
        module, _, name = str(values.pop("_component_", "")).rpartition(".")
        arguments = ", ".join(f"{key}={value!r}" for key, value in values.items())
        rewards.append(f"my_rewards.py:{name}")
        conversion.to_do.append(
            f"reward_functions: write in my_rewards.py: def {name}(completions, completion_ids, "
            f"answer, **_): a list of the total_reward of {module}.{name}({arguments}) of "
            "(completion_ids, texts of completions, what follows '#### ' in answer)"
        )
    conversion.recipe["rewards"] = rewards
