"""The rules on the training method: which keys, rows and losses it takes, and what sampling allows.

Imports no torch.
"""

from dataclasses import fields
from pathlib import Path

from finetune.config.methods import (
    COLUMN_KEYS,
    CORRECTIONS,
    DROPOUT_KEYS,
    LABEL_KEYS,
    METHODS,
    MOST_LABELS,
    MULTI_LABEL,
    POINTWISE,
    POLICY_LOSSES,
    ROWS,
    Method,
    RolloutKeys,
    choose_layers,
    list_addresses,
)
from finetune.config.reward_names import name_of_reward
from finetune.config.rule import (
    Case,
    Rule,
    all_of,
    is_set,
    make_rule,
    no_effect,
    samples,
    samples_itself,
)


def _refuse_under_other_methods(key: str) -> Rule:
    """Makes the rule that only the methods that read `key` may set it."""
    methods = ", ".join(name for name, facts in METHODS.items() if key in facts.keys)
    return no_effect(
        key,
        f"with method: {{method}}; it is for {methods}",
        lambda case: key not in case.method_facts.keys,
        "method",
    )


def _refuse_column_under_other_methods(list_key: str, key: str) -> Rule:
    """Makes the rule that a dataset may name a column only if the method reads it.

    Args:
        list_key: The recipe's key of a list of datasets: "datasets" or "eval_datasets".
        key: The key of a dataset, of `COLUMN_KEYS`.
    """
    methods = ", ".join(name for name, facts in METHODS.items() if facts.rows in COLUMN_KEYS[key])

    def is_unused(case: Case) -> bool:
        is_set_in_any = any(getattr(source, key) for source in case[list_key])
        return is_set_in_any and case.method_facts.rows not in COLUMN_KEYS[key]

    return make_rule(
        f"{key} of {list_key} with another method",
        list_key,
        "method",
        when=is_unused,
        message=lambda case: (
            f"{key} has no effect with method: {case['method']}; it is for {methods}"
        ),
    )


def _require_layers(key: str) -> Rule:
    """Makes the rule that `key`, if set, names at least one layer and only layers of the model."""

    def names_missing_layers(case: Case) -> bool:
        count = case.model.layers
        layers = choose_layers(case[key], count)  # ascending
        return bool(case[key]) and (not layers or layers[-1] >= count)

    return make_rule(
        f"{key} that the model lacks",
        key,
        "method",
        "model_name_or_path",
        when=all_of(lambda case: case.method_facts.exits, names_missing_layers),
        message=lambda case: (
            f"{key}: {_describe_layers(case[key])}: {case['name']} has {case.model.layers} layers, "
            "counted from 0"
        ),
        advice="name layers that it has",
    )


def _describe_layers(layers: tuple[int, ...] | str) -> str:
    """Describes the layers that a key names: a slice as it is, a list as "0, 4, 8"."""
    return layers if isinstance(layers, str) else ", ".join(map(str, layers))


def _refuse_with_other_rows(key: str) -> Rule:
    """Makes the rule that only methods whose rows need `key` (`RowFacts.keys`) may set it."""
    return no_effect(
        key,
        "with method: {method}",
        lambda case: key not in ROWS[case.method_facts.rows].keys,
        "method",
    )


def _has_reference(case: Case) -> bool:
    """Whether completions are sampled and a beta above 0 holds the model to its reference."""
    return "beta" in case.method_facts.keys and samples(case) and case["beta"] > 0


def _find_baseline(case: Case) -> str:
    """Returns `PolicyLoss.baseline` of `loss_type`; "group" if that is no loss of completions."""
    loss = POLICY_LOSSES.get(case["loss_type"])
    return loss.baseline if loss else "group"


def _has_one_ratio(case: Case) -> bool:
    """Whether `loss_type` has one probability ratio for a whole completion, as rloo does."""
    loss = POLICY_LOSSES.get(case["loss_type"])
    return loss is not None and loss.has_one_ratio


def _has_reward_source(case: Case) -> bool:
    """Whether the recipe names something that can reward a completion."""
    return bool(case["rewards"] or case["environment"])


def _has_bound(case: Case, bound: str) -> bool:
    """Whether `loss_type` bounds the probability ratio in the way `bound` (`PolicyLoss.bound`)."""
    return case["loss_type"] in POLICY_LOSSES and POLICY_LOSSES[case["loss_type"]].bound == bound


def _corrects_tokens(case: Case) -> bool:
    """Whether the correction of the sampling mismatch has a ratio for each token."""
    correction = CORRECTIONS.get(case["importance_sampling_correction"])
    return correction is not None and correction.level == "token"


# A correction by each token's ratio -> the correction to advise where a completion has one ratio.
SEQUENCE_CORRECTIONS = {
    "token_truncate": "sequence_truncate",
    "token_mask": "sequence_mask",
    "decoupled": "sequence_truncate",
}


def _has_unbounded_correction(case: Case) -> bool:
    """Whether no bound applies to the ratio of training to sampling probabilities.

    That is so without a correction, and with one that uses every ratio as it is.
    """
    correction = CORRECTIONS.get(case["importance_sampling_correction"])
    return correction is None or correction.weight_beyond == "ratio"


def _list_wrong_addresses(case: Case) -> list[str]:
    """Lists the entries of `vllm_server_base_url` that are not HTTP addresses.

    For an empty value it lists the text "[]", which the message shows.
    """
    value = case["vllm_server_base_url"]
    if value is not None and not value:
        return ["[]"]
    return [
        address
        for address in list_addresses(value)
        if not address.startswith(("http://", "https://"))
    ]


def _require_distinct_names(key: str) -> Rule:
    """Makes the rule that no two entries of `key` ("rewards" or "tools") have the same short name.

    Metrics name a reward, and calls name a tool, by the short name alone.
    """

    def find_shared_name(case: Case) -> str | None:
        names = [name_of_reward(entry) for entry in case[key] or ()]
        return next((name for name in names if names.count(name) > 1), None)

    return make_rule(
        f"two {key} of one name",
        key,
        when=find_shared_name,
        message=lambda case: (
            f"{key}: two are named {find_shared_name(case)}, under which metrics and calls know "
            "both"
        ),
        advice="rename one of them",
    )


def _require_one_each(key: str, of_key: str) -> Rule:
    """Makes the rule that the list `key`, if set, has a number for each entry of `of_key`."""
    return make_rule(
        f"a number of {key} for each of {of_key}",
        key,
        of_key,
        when=lambda case: (
            is_set(key)(case)
            and key in case.method_facts.keys
            and len(case[key]) != len(case[of_key])
        ),
        message=lambda case: f"{key}: {len(case[key])} numbers for {len(case[of_key])} {of_key}",
        advice="give one for each",
    )


SOFT_OVERLONG = "soft_overlong_punishment"  # the shipped reward that soft_punish_cache is for


def _differs_with_cache(case: Case) -> bool:
    """Whether transformers' forward with a cache, as in sampling, computes something else than the
    training forward.
    """
    family = case.model.family
    if family.recurrence is None:
        return family.counts_positions
    return not family.recurrence.can_be_sampled


def _names_student(case: Case) -> bool:
    """Whether the teacher is the model that is trained: the same folder, or the same name and
    revision.
    """
    teacher = case["teacher_model_name_or_path"]
    student = case["model_name_or_path"]
    if not case.method_facts.needs_teacher or None in (teacher, student):
        return False
    is_same_folder = (
        Path(teacher).is_dir() and Path(student).is_dir() and Path(teacher).samefile(student)
    )
    is_same_revision = case["teacher_model_revision"] == case["model_revision"]
    return is_same_folder or (teacher == student and is_same_revision)


def _differs_from_teacher(case: Case) -> bool:
    """Whether a student that is its own teacher still has something to learn.

    It does if either model is quantized, if the student starts from an adapter, or if it also
    learns from labels or rewards.
    """
    is_rounded = (
        case["load_in_4bit"]
        or case["load_in_8bit"]
        or case["quantization_aware_training"] is not None
    )
    learns_more = case["distill_alpha"] < 1 or bool(case["rewards"])
    return bool(
        is_rounded or learns_more or case["adapter_name_or_path"] or case["teacher_load_in_4bit"]
    )


RULES: tuple[Rule, ...] = (
    make_rule(
        "no teacher",
        "teacher_model_name_or_path",
        "method",
        when=lambda c: c.method_facts.needs_teacher and not c["teacher_model_name_or_path"],
        message="method: {method} learns from a teacher",
        advice="set teacher_model_name_or_path",
    ),
    make_rule(
        "a teacher that is the student",
        "teacher_model_name_or_path",
        "model_name_or_path",
        when=lambda c: _names_student(c) and not _differs_from_teacher(c),
        message=(
            "teacher_model_name_or_path: {teacher_model_name_or_path} is the model that is "
            "trained, so that there is nothing to learn from it"
        ),
        advice="name another model",
    ),
    *(_refuse_under_other_methods(key.name) for key in fields(Method) if key.name != "method"),
    *(_refuse_under_other_methods(key.name) for key in fields(RolloutKeys)),
    *map(_refuse_under_other_methods, LABEL_KEYS),
    *(
        _refuse_column_under_other_methods(entry, key)
        for entry in ("datasets", "eval_datasets")
        for key in COLUMN_KEYS
    ),
    no_effect(
        "label_smoothing",
        "with loss_type: {loss_type}",
        lambda c: c["loss_type"] != "sigmoid",
        "loss_type",
        "method",
    ),
    make_rule(
        "label_smoothing of half the pairs",
        "label_smoothing",
        "method",
        when=lambda c: c.method_facts.compares and c["label_smoothing"] >= 0.5,
        message=(
            "label_smoothing: {label_smoothing:g}: under {method} it is the share of pairs whose "
            "order is wrong"
        ),
        advice="a number below 0.5 is expected",
    ),
    *(
        no_effect(
            key,
            "with distill_alpha: 1, which gives the cross entropy no weight",
            lambda c: c.method_facts.needs_teacher and c["distill_alpha"] == 1,
            "distill_alpha",
            "method",
        )
        for key in LABEL_KEYS
    ),
    no_effect(
        "eaft_alpha", "without token_loss: eaft", lambda c: c["token_loss"] != "eaft", "token_loss"
    ),
    *(
        no_effect(key, "without layer_dropout", lambda c: not c["layer_dropout"], "layer_dropout")
        for key in DROPOUT_KEYS
    ),
    make_rule(
        "early exits nowhere",
        "exit_layers",
        "layer_dropout",
        "method",
        when=lambda c: c.method_facts.exits and c["exit_layers"] == () and not c["layer_dropout"],
        message="method: {method}: without exit_layers and layer_dropout it is fine-tuning",
        advice="name layers, or set method: sft",
    ),
    *(_require_layers(key) for key in ("exit_layers", "layer_dropout_layers")),
    make_rule(
        "streaming with a reference",
        "streaming",
        "method",
        "use_peft",
        "modules_to_save",
        "added_tokens",
        "adapter_name_or_path",
        when=lambda c: c["streaming"] and c.method_facts.needs_reference and c.recipe.trains_base,
        message=(
            "streaming: {method} needs the reference's log-probabilities of all data before "
            "training, unless only new adapters are trained"
        ),
        advice=(
            "remove streaming, or set use_peft without modules_to_save, added_tokens and "
            "adapter_name_or_path"
        ),
        fix={"streaming": False},
    ),
    *(
        no_effect(
            key,
            "with assistant_only_loss: false, which trains on whole rows",
            lambda c: not c["assistant_only_loss"],
            "assistant_only_loss",
        )
        for key in ("turns", "train_on_reasoning")
    ),
    # Classes and queries
    make_rule(
        "no classes",
        "labels",
        "method",
        # fewer than two labels, or a label twice
        when=lambda c: (
            c.method_facts.rows == "classes" and len(set(c["labels"])) < max(2, len(c["labels"]))
        ),
        message="labels: method: {method} learns which of several classes a row has",
        advice="name two or more, each once, such as [negative, positive]",
    ),
    *map(
        _refuse_with_other_rows, dict.fromkeys(key for facts in ROWS.values() for key in facts.keys)
    ),
    make_rule(
        "steps that nothing ends",
        "step_separator",
        "method",
        when=lambda c: c.method_facts.rows == "steps" and not c["step_separator"],
        message="step_separator: empty text has no token at which a step could be scored",
        advice="name one, or remove it",
    ),
    _require_one_each("class_weights", "labels"),
    make_rule(
        "weights of classes that weigh nothing",
        "class_weights",
        when=lambda c: (
            c["class_weights"] and (min(c["class_weights"]) < 0 or max(c["class_weights"]) == 0)
        ),
        message=lambda c: f"class_weights: {list(c['class_weights'])}",
        advice="give numbers from 0 on, not all of them 0",
    ),
    make_rule(
        "more labels than a row can have",
        "labels",
        "problem_type",
        when=lambda c: c["problem_type"] == MULTI_LABEL and len(c["labels"]) > MOST_LABELS,
        message=lambda c: (
            f"labels: {len(c['labels'])} are named, and problem_type: {c['problem_type']} knows "
            f"{MOST_LABELS} at most"
        ),
        advice="name fewer",
    ),
    make_rule(
        "a document that is compared with none",
        "num_negatives",
        "loss_type",
        "method",
        when=lambda c: (
            c.method_facts.ranks and c["loss_type"] != POINTWISE and c["num_negatives"] == 0
        ),
        message=(
            "num_negatives: 0: loss_type: {loss_type} compares the documents of a query, and there "
            "is one"
        ),
        advice=f"set num_negatives, or loss_type: {POINTWISE}",
    ),
    # Sampled completions
    make_rule(
        "no rewards",
        "rewards",
        "method",
        when=lambda c: (
            samples(c) and not _has_reward_source(c) and not c.method_facts.needs_teacher
        ),
        message="method: {method} learns from rewards",
        advice=(
            "set rewards, such as [exact_answer], [my_rewards.py:right] or [runs/reward/export], a "
            "reward model"
        ),
    ),
    make_rule(
        "held-out prompts without rewards",
        "rewards",
        "eval_datasets",
        "eval_split_size",
        when=lambda c: (
            samples(c)
            and not _has_reward_source(c)
            and (c["eval_datasets"] or c["eval_split_size"])
        ),
        message="held-out prompts are answered and rewarded, but there are no rewards",
        advice=(
            "set rewards, such as [exact_answer], which have no part in the loss unless "
            "completions are compared"
        ),
    ),
    make_rule(
        "nothing to compare",
        "num_generations",
        "method",
        when=lambda c: (
            samples(c)
            and c["num_generations"] == 1
            and _find_baseline(c) != "step"
            and not c.method_facts.needs_teacher
            and not c.method_facts.has_critic
        ),
        message="num_generations: 1: {method} compares the completions of a prompt with each other",
        advice="set 2 or more; 8 is usual",
    ),
    make_rule(
        "beta of sums",
        "beta",
        "loss_type",
        when=lambda c: _has_reference(c) and _has_one_ratio(c),
        message=(
            "beta has no effect with loss_type: {loss_type}, whose loss has one ratio for a "
            "completion"
        ),
        advice="set beta: 0, or another loss_type",
    ),
    no_effect(
        "max_tool_calling_iterations",
        "without tools or an environment",
        lambda c: not c["tools"] and not c["environment"],
        "tools",
    ),
    no_effect(
        "environment_processes",
        "without environment",
        lambda c: not c["environment"],
        "environment",
    ),
    _require_one_each("reward_weights", "rewards"),
    make_rule(
        "loss_type of another method",
        "loss_type",
        "method",
        when=lambda c: (
            "loss_type" in c.method_facts.keys and c["loss_type"] not in c.method_facts.losses
        ),
        message="loss_type: {loss_type} is not for method: {method}",
        advice=lambda c: f"set one of {', '.join(c.method_facts.losses)}",
    ),
    make_rule(
        "beta of nothing",
        "beta",
        "method",
        when=lambda c: not samples(c) and "beta" in c.method_facts.keys and c["beta"] == 0,
        message="beta: 0: method: {method} would learn nothing",
        advice="set a number above 0",
    ),
    make_rule(
        "no room for a prompt",
        "max_completion_length",
        "max_length",
        when=lambda c: samples(c) and c["max_completion_length"] >= c["max_length"],
        message=(
            "max_completion_length: {max_completion_length} leaves no room for a prompt in "
            "{max_length} tokens"
        ),
        advice="raise max_length, or lower max_completion_length",
    ),
    make_rule(
        "the largest ratio",
        "epsilon_high",
        "loss_type",
        when=lambda c: samples(c) and _has_bound(c, "weight") and (c["epsilon_high"] or 0) < 1,
        message=(
            "loss_type: {loss_type} bounds the probability ratio itself by epsilon_high, which is "
            "to be above 1"
        ),
        advice="set epsilon_high: 5",
    ),
    no_effect(
        "epsilon",
        "with loss_type: {loss_type}, which reads epsilon_high alone",
        lambda c: samples(c) and _has_bound(c, "weight"),
        "loss_type",
    ),
    no_effect(
        "scale_rewards",
        "with loss_type: {loss_type}, which has a baseline of its own",
        lambda c: samples(c) and _find_baseline(c) != "group",
        "loss_type",
    ),
    make_rule(
        "a correction of tokens in sums",
        "importance_sampling_correction",
        "loss_type",
        when=lambda c: samples(c) and _corrects_tokens(c) and _has_one_ratio(c),
        message=(
            "importance_sampling_correction: {importance_sampling_correction} cannot be "
            "combined with loss_type: {loss_type}, which has one ratio for a completion"
        ),
        advice=lambda c: (
            "set " + SEQUENCE_CORRECTIONS.get(c["importance_sampling_correction"], "none")
        ),
    ),
    make_rule(
        "bounds of a correction",
        "importance_sampling_clip_min",
        "importance_sampling_clip_max",
        when=lambda c: (
            samples(c)
            and c["importance_sampling_clip_min"] is not None
            and c["importance_sampling_clip_min"] >= c["importance_sampling_clip_max"]
        ),
        message="importance_sampling_clip_min: {importance_sampling_clip_min} is not below "
        "importance_sampling_clip_max: {importance_sampling_clip_max}",
        advice="lower it",
    ),
    *(
        no_effect(
            key,
            "without an importance_sampling_correction that has bounds, such as token_truncate",
            lambda c: samples(c) and _has_unbounded_correction(c),
            "importance_sampling_correction",
        )
        for key in ("importance_sampling_clip_max", "importance_sampling_clip_min")
    ),
    make_rule(
        "a punishment without its tokens",
        "soft_punish_cache",
        "rewards",
        when=lambda c: (
            samples(c)
            and (
                # one of the two is set without the other
                (c["soft_punish_cache"] is None) == (SOFT_OVERLONG in c["rewards"])
                or (c["soft_punish_cache"] or 0) > c["max_completion_length"]
            )
        ),
        message=f"the reward {SOFT_OVERLONG} and soft_punish_cache go together: the last tokens of "
        "max_completion_length, over which it falls from 0 to -1",
        advice="set both, such as soft_punish_cache: 64, or none of them",
    ),
    make_rule(
        "dynamic sampling without groups",
        "max_num_gen_batches",
        "loss_type",
        "method",
        when=lambda c: (
            samples(c)
            and c["max_num_gen_batches"] > 1
            and (_find_baseline(c) == "step" or c.method_facts.needs_teacher)
        ),
        message=lambda c: (
            "max_num_gen_batches drops groups whose rewards are all alike, from which "
            f"{'a teacher' if c.method_facts.needs_teacher else c['loss_type']} still teaches"
        ),
        advice="set 1",
    ),
    no_effect(
        "importance_sampling_level",
        "with loss_type: {loss_type}, which has ratios of its own",
        lambda c: samples(c) and (_has_one_ratio(c) or _has_bound(c, "difference")),
        "loss_type",
    ),
    make_rule(
        "a scale beside Dr. GRPO",
        "scale_rewards",
        "loss_type",
        when=lambda c: (
            samples(c)
            and c["loss_type"] in POLICY_LOSSES
            and POLICY_LOSSES[c["loss_type"]].average == "budget"
            and c["scale_rewards"] != "none"
        ),
        message=(
            "loss_type: {loss_type} without scale_rewards: none: its paper divides by no standard "
            "deviation"
        ),
        is_note=True,
    ),
    *map(_require_distinct_names, ("rewards", "tools")),
    make_rule(
        "models that are sampled otherwise",
        "method",
        "model_name_or_path",
        "vllm_server_base_url",
        when=lambda c: samples_itself(c) and _differs_with_cache(c),
        message=(
            "method: {method} cannot sample {name} here: with a cache, {model.model_type} computes "
            "other states or positions than without one"
        ),
        advice="set vllm_server_base_url",
    ),
    make_rule(
        "a server's address",
        "vllm_server_base_url",
        when=_list_wrong_addresses,
        message=lambda case: (
            f"vllm_server_base_url: {_list_wrong_addresses(case)[0]} is no address; write it as "
            "http://localhost:8000"
        ),
    ),
    no_effect(
        "in_flight",
        "without max_staleness",
        lambda c: samples(c) and not c["max_staleness"],
        "max_staleness",
    ),
)
