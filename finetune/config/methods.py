"""The training methods: what each learns from, its rows and losses, and the recipe's sections
`Method` and `RolloutKeys`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import Field

from finetune.config.judge import Judge, is_judge, read_judge
from finetune.config.keys import FileOrName, MayChange, Positive, PythonName
from finetune.config.reward_names import (
    SERVED_ENVIRONMENTS,
    SHIPPED_REWARDS,
    is_reward_model,
    name_of_reward,
)
from finetune.constants import Names


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """How a loss of sampled completions is averaged and bounded, and what its rewards are compared
    with.
    """

    paper: str
    # How the step averages the losses.
    # sequences: the mean over completions, each of which is the mean of its tokens' losses.
    # tokens: the mean over all trained tokens of the step.
    # budget: the sum over tokens, divided by completions times max_completion_length.
    # whole_sequences: the mean over completions, each of which has a single ratio and loss.
    average: Literal["sequences", "tokens", "budget", "whole_sequences"]
    # What a reward is compared with: the mean reward of its group, of the other completions in its
    # group, or of the whole step.
    baseline: Literal["group", "others", "step"] = "group"
    # How the probability ratio is bounded: by PPO's clipped surrogate, as a capped weight without a
    # gradient, or by the difference of the two probabilities, beyond which a token has no loss.
    bound: Literal["surrogate", "weight", "difference"] = "surrogate"

    @property
    def has_one_ratio(self) -> bool:
        """Whether a whole completion has a single probability ratio and loss."""
        return self.average == "whole_sequences"


POLICY_LOSSES: Mapping[str, PolicyLoss] = {
    "grpo": PolicyLoss(paper="Shao et al. 2024, arXiv:2402.03300, eq. 3", average="sequences"),
    "dapo": PolicyLoss(paper="Yu et al. 2025, arXiv:2503.14476, eq. 8", average="tokens"),
    "dr_grpo": PolicyLoss(paper="Liu et al. 2025, arXiv:2503.20783, listing 1", average="budget"),
    "cispo": PolicyLoss(
        paper="MiniMax 2025, arXiv:2506.13585, eq. 4 and 5", average="tokens", bound="weight"
    ),
    "rloo": PolicyLoss(
        paper="Ahmadian et al. 2024, arXiv:2402.14740, sec. 3.4",
        average="whole_sequences",
        baseline="others",
    ),
    "reinforce++": PolicyLoss(
        paper="Hu et al. 2025, arXiv:2501.03262", average="tokens", baseline="step"
    ),
    "dppo": PolicyLoss(
        paper="Qi et al. 2026, arXiv:2602.04879, binary total variation",
        average="tokens",
        bound="difference",
    ),
}
DEFAULT_POLICY_LOSS = "dapo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """How losses are weighted by the ratio of the probability in training to that in sampling."""

    paper: str
    # What has a ratio. token: each token; sequence: a completion, the product of its tokens'
    # ratios; mean: a completion, their geometric mean.
    level: Literal["token", "sequence", "mean"]
    # The weight of a loss whose ratio is beyond the bounds: the bound, 0, or still the ratio.
    weight_beyond: Literal["bound", "zero", "ratio"]
    is_weighted: bool = True  # whether the weight within the bounds is the ratio; else it is 1


SPEED_KILLS = "Liu et al. 2025, When Speed Kills Stability"
CORRECTIONS: Mapping[str, Correction] = {
    "token_truncate": Correction(  # TIS
        paper="Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL "
        "Training",
        level="token",
        weight_beyond="bound",
    ),
    "token_mask": Correction(  # IcePop
        paper="Ling Team 2025, arXiv:2510.18855", level="token", weight_beyond="zero"
    ),
    "sequence_truncate": Correction(paper=SPEED_KILLS, level="sequence", weight_beyond="bound"),
    "sequence_mask": Correction(paper=SPEED_KILLS, level="sequence", weight_beyond="zero"),
    "geometric_mask": Correction(
        paper=SPEED_KILLS, level="mean", weight_beyond="zero", is_weighted=False
    ),
    "decoupled": Correction(
        paper="Hilton et al. 2021, arXiv:2110.00641; Fu et al. 2025, arXiv:2505.24298, eq. 5",
        level="token",
        weight_beyond="ratio",
    ),
}
NO_CORRECTION = "none"
if TYPE_CHECKING:
    CorrectionName = str
else:
    CorrectionName = Literal[(NO_CORRECTION, *CORRECTIONS)]


def list_addresses(urls: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Lists the addresses in a value of `vllm_server_base_url`; none if it is None."""
    if isinstance(urls, str):
        return (urls,)
    return urls or ()


# Each key below has its type and marks, then its help text and default.
@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutKeys:
    """How completions are sampled from the model in training, and what they are worth."""

    rewards: Annotated[
        tuple[str, ...],
        PythonName,
        FileOrName,
        "What a completion is worth: functions of files of yours, such as my_rewards.py:right, "
        "with TRL's arguments; reward models, by folder or hub name, which score the "
        "conversation; a model behind an OpenAI-compatible server, as {url: http://localhost:8000, "
        "model: ..., prompt: 'Grade from 0 to 10: {prompt} {completion}'}; and these names: "
        + "; ".join(f"{name}: {says}" for name, says in SHIPPED_REWARDS.items())
        + ".",
    ] = ()
    tools: Annotated[
        tuple[str, ...],
        PythonName,
        "What the model may call before it answers: functions of files of yours, such as "
        "my_tools.py:multiply, with type hints and a docstring that describes each argument, as "
        "TRL's. Their results are part of the completion and are not trained on.",
    ] = ()
    max_tool_calling_iterations: Annotated[
        Positive | None,
        (
            "How many turns of a completion may call tools; null: as many as max_completion_length "
            "has room for."
        ),
    ] = None
    environment: Annotated[
        dict[str, str] | str | None,
        PythonName,
        "The world that a completion acts in: a class of a file of yours, such as "
        "my_game.py:Game, with TRL's methods: reset gets the row, the other public ones are "
        "tools, and get_reward says what the completion is worth; or openenv:http://HOST:PORT, an "
        "OpenEnv server. A mapping has one for each value of the rows' column `environment`.",
    ] = None
    environment_processes: Annotated[
        Positive,
        MayChange,
        "The number of processes that the environments of a step are divided among. A process "
        "answers one call at a time; if it ends, its environments end with it.",
    ] = 8
    reward_weights: Annotated[
        tuple[float, ...] | None,
        "A weight for each entry of rewards, with which they are summed; null: each has 1.",
    ] = None
    num_generations: Annotated[
        Positive,
        "Completions of each prompt, which are compared with each other: a group. A step samples "
        "them for global_batch_size prompts.",
    ] = 8
    max_completion_length: Annotated[
        Positive,
        "The largest number of tokens in a completion. With its prompt it has at most max_length; "
        "longer prompts are dropped, and counted.",
    ] = 256
    num_iterations: Annotated[
        Positive,
        (
            "How often the completions of a step are trained on, an optimizer step each time (mu "
            "in the GRPO paper)."
        ),
    ] = 1
    steps_per_generation: Annotated[
        Positive,
        (
            "The steps whose completions are sampled together, from the same weights; each trains "
            "on its own share."
        ),
    ] = 1
    max_num_gen_batches: Annotated[
        Positive,
        "How often a step may sample until it has global_batch_size groups whose rewards differ: "
        "groups without signal are dropped, and other prompts take their places (DAPO's dynamic "
        "sampling). 1: none is dropped.",
    ] = 1
    per_device_generation_batch_size: Annotated[
        Positive,
        MayChange,
        "Completions that a rank samples at once; the next begin when all of these have ended. "
        "Sets the memory of the key-value cache.",
    ] = 64
    vllm_server_base_url: Annotated[
        str | tuple[str, ...] | None,
        MayChange,
        "The vLLM server, or servers, that sample in place of the model in training, such as "
        "http://localhost:8000; several divide the prompts. They read the weights of each step "
        "from output_dir, so that all see the same files; docs/online.md has their command.",
    ] = None
    vllm_server_timeout: Annotated[
        float,
        Gt(0),
        MayChange,
        "How many seconds the server may take for a completion, or to load weights.",
    ] = 600.0
    max_staleness: Annotated[
        int,
        Ge(0),
        "How many generations ahead of training the server samples: the completions of step n come "
        "from the weights before step n - max_staleness, or later ones.",
    ] = 0
    routing_replay: Annotated[
        bool,
        "Whether training uses the experts that a mixture chose for each token while it sampled "
        "(R3, arXiv 2510.11370); their weights are computed again.",
    ] = False
    in_flight: Annotated[
        Literal["keep", "restart"],
        "What becomes of completions that are being sampled when the weights change: they "
        "continue from where they are under the new ones, or begin again.",
    ] = "keep"
    scale_rewards: Annotated[
        Literal["group", "batch", "none"],
        "What the difference of a reward from its baseline is divided by: the standard deviation "
        "in its group, in the step, or nothing.",
    ] = "group"
    epsilon: Annotated[
        float,
        Gt(0),
        "How far below 1 the loss follows the probability ratio, and how far above 1 if "
        "epsilon_high is null; with loss_type: dppo how far the probability itself may have moved.",
    ] = 0.2
    epsilon_high: Annotated[
        float | None,
        Gt(0),
        "How far above 1 the loss follows the probability ratio; with loss_type: cispo the largest "
        "ratio itself.",
    ] = None
    importance_sampling_level: Annotated[
        Literal["token", "sequence"],
        (
            "What has a probability ratio: each token, or the sequence, as the geometric mean of "
            "its tokens' (GSPO)."
        ),
    ] = "token"
    importance_sampling_correction: Annotated[
        CorrectionName,
        "How the loss is corrected where sampling and training compute different probabilities: "
        "it is multiplied by their ratio, of each token or of the sequence, truncated at "
        "importance_sampling_clip_max, or 0 beyond it; geometric_mask drops completions whose mean "
        "ratio is beyond it, and decoupled has no bound.",
    ] = "none"
    importance_sampling_clip_max: Annotated[
        float, Gt(0), "The largest ratio that importance_sampling_correction follows."
    ] = 3.0
    importance_sampling_clip_min: Annotated[
        float | None,
        Gt(0),
        "The smallest ratio that importance_sampling_correction follows; null: there is none.",
    ] = None
    soft_punish_cache: Annotated[
        int | None,
        Gt(0),
        (
            "The last tokens before max_completion_length, over which the reward "
            "soft_overlong_punishment falls to -1."
        ),
    ] = None
    mask_truncated_completions: Annotated[
        bool, "Learn nothing from completions that max_completion_length has cut (DAPO)."
    ] = False
    log_completions: Annotated[
        int,
        Ge(0),
        MayChange,
        (
            "The number of prompts in a step whose completions are written to completions.jsonl, "
            "with their rewards."
        ),
    ] = 1
    reward_timeout_seconds: Annotated[
        float,
        Gt(0),
        MayChange,
        "How long each reward may take for what is sampled together, and the tools of a turn or "
        "the resets of a step; they run in processes of their own. Their files have as long to "
        "load, and at least a minute.",
    ] = 60.0
    on_bad_reward: Annotated[
        Literal["error", "zero"],
        "What is done where a reward raises, takes too long, ends its process or is no finite "
        "number: the run ends, or it is 0 and counted. Where a tool or an environment takes too "
        "long, ends its process or says too much: the run ends, or the model reads so in place of "
        "a result.",
    ] = "error"

    @property
    def environments(self) -> dict[str, str]:
        """Value of the rows' column `environment` -> environment, as the recipe names it.

        An environment for all rows stands under ""; empty if the recipe names none.
        """
        if isinstance(self.environment, str):
            return {"": self.environment}
        return self.environment or {}

    @property
    def environment_files(self) -> tuple[str, ...]:
        """The environments that are classes in files, each once; the others run on servers."""
        names = dict.fromkeys(self.environments.values())
        return tuple(name for name in names if not name.startswith(SERVED_ENVIRONMENTS))

    @property
    def servers(self) -> tuple[str, ...]:
        """The addresses of the vLLM servers that sample; none if the model in training does."""
        return list_addresses(self.vllm_server_base_url)

    @property
    def takes_turns(self) -> bool:
        """Whether a completion may have several turns: the model has tools or an environment."""
        return bool(self.tools or self.environment)

    @property
    def reward_models(self) -> Names:
        """The entries of `rewards` that are models, by folder or hub name."""
        return tuple(name for name in self.rewards if is_reward_model(name))

    @property
    def reward_functions(self) -> Names:
        """The entries of `rewards` that are no models: shipped rewards, functions and judges."""
        return tuple(name for name in self.rewards if not is_reward_model(name))

    @property
    def judges(self) -> tuple[Judge, ...]:
        """The entries of `rewards` that ask a model behind a server."""
        return tuple(read_judge(name) for name in self.rewards if is_judge(name))

    @property
    def reward_files(self) -> tuple[str, ...]:
        """The entries of `rewards` that are functions in files."""
        names = self.reward_functions
        return tuple(name for name in names if name not in SHIPPED_REWARDS and not is_judge(name))

    @property
    def updates_per_generation(self) -> int:
        """Optimizer steps on the completions that are sampled together.

        From the second step on, the trained model differs from the one that sampled.
        """
        return self.num_iterations * self.steps_per_generation

    @property
    def corrects_sampling(self) -> bool:
        """Whether the loss is weighted by the sampling ratio that `policy_losses.py` defines."""
        return self.importance_sampling_correction != NO_CORRECTION


DEFAULT_METHOD = "sft"
RowKind = Literal[
    "answers",
    "pairs",
    "ratings",
    "prompts",
    "scored_pairs",
    "classes",
    "steps",
    "retrieval",
    "ranked",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFacts:
    """What a kind of rows means for the data, the output head and the report."""

    # Documents that a row becomes, without num_negatives: 2 for chosen and rejected, say. They are
    # a group, which is never divided between batches.
    documents: int = 1
    # What the loss reads: logits over the vocabulary, scores of a head in its place, or the hidden
    # states.
    head: Literal["vocabulary", "scores", "states"] = "vocabulary"
    # What the label of a scored document says: by how much its score should exceed that of the next
    # document, its class, the classes of its steps, or a number.
    label: Literal["margin", "class", "steps", "number"] = "margin"
    keys: Names = ()  # the recipe's data keys that these rows use and most other kinds do not
    averaged_over: str = "token"  # what the loss is averaged over, as the report names it

    def count_documents(self, num_negatives: int) -> int:
        """Counts the documents of a group; `num_negatives` is the recipe's key."""
        if "num_negatives" in self.keys:
            return self.documents + num_negatives
        return self.documents


SINGLE_LABEL: Final = "single_label_classification"  # as transformers has it
MULTI_LABEL: Final = "multi_label_classification"
MOST_LABELS = 31  # under MULTI_LABEL: the labels of a row are stored as the bits of one number


@dataclass(frozen=True, slots=True)
class ScoreHead:
    """Which output head the model has: the vocabulary's, or one that computes scores."""

    names: Names = ()  # of the scores; empty: it is the vocabulary's head
    problem_type: str | None = None  # of transformers' config
    # whether it scores each token (transformers' token classification), not each document
    reads_tokens: bool = False
    has_values: bool = False  # whether a critic's value head stands beside the vocabulary's


STEP_SCORES = ("wrong", "right")  # the scores of a step of an answer
QUERY_KEYS = ("num_negatives", "query_prompt", "document_prompt")
ROWS: Mapping[RowKind, RowFacts] = {
    "answers": RowFacts(),
    "pairs": RowFacts(documents=2, averaged_over="pair"),
    "ratings": RowFacts(documents=2, averaged_over="rated answer"),
    "prompts": RowFacts(averaged_over="token or completion"),
    "scored_pairs": RowFacts(documents=2, head="scores", averaged_over="pair"),
    "classes": RowFacts(
        head="scores", label="class", keys=("labels", "problem_type"), averaged_over="document"
    ),
    "steps": RowFacts(head="scores", label="steps", keys=("step_separator",), averaged_over="step"),
    "retrieval": RowFacts(
        documents=2, head="states", keys=("pooling", *QUERY_KEYS), averaged_over="query"
    ),
    "ranked": RowFacts(head="scores", label="number", keys=QUERY_KEYS, averaged_over="query"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodFacts:
    """What a method needs and does, as data, training, plan and `finetune init` read it."""

    says: str  # what the model learns, for the recipe that `finetune init` writes
    # what the trained model is, with an article; "": a language model that writes token by token
    makes: str = ""
    rows: RowKind = "answers"  # the kind of rows that it reads
    # the recipe's keys, beside `method`, that this method uses and not every other one does
    keys: Names = ()
    needs_reference: bool = False  # reads the log-probabilities of the model before training
    needs_teacher: bool = False  # reads another model's probabilities
    has_critic: bool = False  # trains a second head, which predicts a value at each token
    # key -> its default under this method, where that differs from the key's own
    defaults: Mapping[str, Any] = field(default_factory=dict)
    losses: Names = ()  # the values of loss_type that it takes
    # whether tokens are masked, and predicted from the tokens before and after them
    masks: bool = False
    exits: bool = False  # whether the loss also scores the outputs of inner layers

    @property
    def compares(self) -> bool:
        """Whether a row is a group of documents that the loss compares, such as a pair."""
        return self.documents > 1

    @property
    def samples(self) -> bool:
        """Whether it learns from completions that are sampled during training."""
        return self.rows == "prompts"

    @property
    def scores(self) -> bool:
        """Whether it trains a head that computes scores, in place of the vocabulary's."""
        return ROWS[self.rows].head == "scores"

    @property
    def embeds(self) -> bool:
        """Whether each document becomes one vector, which is compared with the vectors of all
        documents in the step.
        """
        return ROWS[self.rows].head == "states"

    @property
    def reads_queries(self) -> bool:
        """Whether a row is a query with documents for it."""
        return self.embeds or self.ranks

    @property
    def ranks(self) -> bool:
        """Whether each document is scored together with its query, as by a reranker."""
        return self.rows == "ranked"

    @property
    def writes_text(self) -> bool:
        """Whether the trained model predicts tokens."""
        return ROWS[self.rows].head == "vocabulary"

    @property
    def documents(self) -> int:
        """Documents in a group, without num_negatives (`RowFacts.documents`)."""
        return ROWS[self.rows].documents


TEACHER_KEYS = ("teacher_model_name_or_path", "teacher_model_revision", "teacher_load_in_4bit")
PAIR_LOSSES = ("sigmoid", "hinge", "ipo", "apo_zero")
POINTWISE = "pointwise"
RANKING_LOSSES = (POINTWISE, "pairwise", "listwise", "listnet")
# of the cross entropy with the labels
LABEL_KEYS = ("label_smoothing", "token_loss", "eaft_alpha")
DROPOUT_KEYS = ("layer_dropout_layers", "layer_dropout_schedule")  # that refine layer_dropout
EXIT_KEYS = (
    "exit_layers",
    "exit_curriculum",
    "exit_weights",
    "exit_scale",
    "layer_dropout",
    *DROPOUT_KEYS,
)
CRITIC_KEYS = ("gamma", "lam", "vf_coef", "cliprange_value")
# Of losses that compare a group's completions or give a completion one ratio: ppo has neither.
GROUP_KEYS = ("scale_rewards", "max_num_gen_batches", "importance_sampling_level")
METHODS: Mapping[str, MethodFacts] = {
    DEFAULT_METHOD: MethodFacts(
        says="learns the answers (supervised fine-tuning)", keys=LABEL_KEYS
    ),
    "dpo": MethodFacts(
        says="learns from pairs which answer is the better one, against the model before training",
        rows="pairs",
        keys=("beta", "loss_type", "label_smoothing", "rpo_alpha"),
        needs_reference=True,
        losses=PAIR_LOSSES,
    ),
    "orpo": MethodFacts(
        says="learns the chosen answers, and to prefer them to the rejected ones",
        rows="pairs",
        keys=("beta",),
    ),
    "simpo": MethodFacts(
        says="learns from pairs which answer is the better one, without a reference",
        rows="pairs",
        keys=("beta", "simpo_gamma"),
    ),
    "kto": MethodFacts(
        says="learns from answers that are rated good or bad",
        rows="ratings",
        keys=("beta", "desirable_weight", "undesirable_weight"),
        needs_reference=True,
    ),
    "distill": MethodFacts(
        says="learns a larger model's probabilities for every token of the answers",
        keys=(
            *TEACHER_KEYS,
            "distill_beta",
            "temperature",
            "distill_top_k",
            "distill_alpha",
            *LABEL_KEYS,
        ),
        needs_teacher=True,
    ),
    "masked_diffusion": MethodFacts(
        says="learns to predict tokens that are masked at random, from those before and after them "
        "(LLaDA)",
        makes="a language model that fills in masked tokens",
        keys=("mask_token", "mask_eps"),
        masks=True,
    ),
    "early_exit": MethodFacts(
        says="learns the answers after inner layers too, so that the last ones can be left out "
        "(LayerSkip)",
        keys=EXIT_KEYS,
        exits=True,
    ),
    "grpo": MethodFacts(
        says="samples completions of prompts, and learns which of them get the larger reward",
        rows="prompts",
        keys=("loss_type", "beta", "temperature", *(key.name for key in fields(RolloutKeys))),
        defaults={"loss_type": DEFAULT_POLICY_LOSS, "beta": 0.0},
        losses=tuple(POLICY_LOSSES),
    ),
    "ppo": MethodFacts(
        says=(
            "samples completions of prompts, and learns which of their tokens lead to more reward "
            "than its critic expected"
        ),
        rows="prompts",
        keys=(
            "loss_type",
            "beta",
            "temperature",
            *CRITIC_KEYS,
            *(key.name for key in fields(RolloutKeys) if key.name not in GROUP_KEYS),
        ),
        has_critic=True,
        defaults={
            "loss_type": DEFAULT_POLICY_LOSS,
            "beta": 0.05,
            "num_generations": 1,
            "num_iterations": 4,
        },
        losses=(DEFAULT_POLICY_LOSS, "grpo"),
    ),
    "on_policy_distill": MethodFacts(
        says=(
            "samples completions of prompts, and learns a larger model's probabilities for their "
            "tokens"
        ),
        rows="prompts",
        keys=(
            "loss_type",
            "temperature",
            *TEACHER_KEYS,
            *(key.name for key in fields(RolloutKeys)),
        ),
        needs_teacher=True,
        defaults={"loss_type": DEFAULT_POLICY_LOSS, "num_generations": 1},
        losses=tuple(
            name for name, loss in POLICY_LOSSES.items() if loss.average != "whole_sequences"
        ),
    ),
    "reward": MethodFacts(
        says="learns to score answers from pairs: a reward model",
        makes="a reward model",
        rows="scored_pairs",
        keys=("center_rewards_coefficient",),
        defaults={"overlength": "drop"},
    ),
    "process_reward": MethodFacts(
        says="learns which steps of an answer are right: a process reward model",
        makes="a process reward model",
        rows="steps",
        defaults={"overlength": "drop"},
    ),
    "classify": MethodFacts(
        says="learns which of the classes a text or a conversation belongs to",
        makes="a classifier",
        rows="classes",
        keys=("class_weights",),
        defaults={"overlength": "drop"},  # a document that is cut has lost the token that is scored
    ),
    "embed": MethodFacts(
        says=(
            "learns embeddings, in which a query lies near its document and far from all others of "
            "the step"
        ),
        makes="an embedding model",
        rows="retrieval",
        keys=("temperature", "matryoshka_dims"),
        defaults={"overlength": "drop", "temperature": 0.05},
    ),
    "rerank": MethodFacts(
        says="learns to score documents beside a query by how well they answer it: a reranker",
        makes="a reranker",
        rows="ranked",
        keys=("loss_type",),
        defaults={
            "overlength": "drop",
            "loss_type": POINTWISE,
            "query_prompt": "Query: ",
            "document_prompt": "\nDocument: ",
        },
        losses=RANKING_LOSSES,
    ),
}
# The names of the methods, by what they learn from.
PAIRED = tuple(name for name, facts in METHODS.items() if facts.rows in ("pairs", "scored_pairs"))
RATED = tuple(name for name, facts in METHODS.items() if facts.rows == "ratings")
REWARDED = tuple(
    name for name, facts in METHODS.items() if facts.samples and not facts.needs_teacher
)
MASKING = tuple(name for name, facts in METHODS.items() if facts.masks)
EXITING = tuple(name for name, facts in METHODS.items() if facts.exits)
TAUGHT = tuple(name for name, facts in METHODS.items() if facts.needs_teacher and not facts.samples)

ADDED_MASK = "<|mask|>"  # the token to add where a tokenizer has no mask token
LAYER_SLICE = r"\d*:\d*(:[1-9]\d*)?"  # a slice as Python writes it, START:STOP or START:STOP:STEP
LayerNumbers = tuple[Annotated[int, Ge(0)], ...] | Annotated[str, Field(pattern=f"^{LAYER_SLICE}$")]
# exit_weights -> the formula in words; l is the number of layers up to the exit
EXIT_WEIGHTS: Mapping[str, str] = {
    "uniform": "1",
    "linear": "l",
    "sum": "the sum of l over this exit and those before it",
    "root": "the root of l",
    "inverse": "1 / l",
    "inverse_root": "1 / the root of l",
}
if TYPE_CHECKING:
    MethodName = str
    LossName = str
    ExitWeights = str
else:
    ExitWeights = Literal[tuple(EXIT_WEIGHTS)]
    MethodName = Literal[tuple(METHODS)]
    LossName = Literal[(*PAIR_LOSSES, *POLICY_LOSSES, *RANKING_LOSSES)]


# Each key below has its type and marks, then its help text and default.
@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """The recipe's keys that choose a training method and set its loss."""

    method: Annotated[
        MethodName, "; ".join(f"{name}: {facts.says}" for name, facts in METHODS.items()) + "."
    ] = DEFAULT_METHOD
    beta: Annotated[
        float,
        Ge(0),
        "dpo, kto: how strongly the model is held to the reference; orpo: the weight of the odds "
        "ratio; simpo: the scale of the rewards; grpo: the weight of the KL divergence from the "
        "reference, 0 unless it is given; ppo: each token's log-ratio to the reference, times "
        "this, is subtracted from its reward; 0.05 unless it is given.",
    ] = 0.1
    loss_type: Annotated[
        LossName,
        "dpo: the loss of a pair; sigmoid is the paper's. grpo, on_policy_distill: of sampled "
        f"completions, {DEFAULT_POLICY_LOSS} unless it is given; docs/online.md has the papers. "
        f"ppo: what its losses are averaged over, as in {DEFAULT_POLICY_LOSS} or grpo. "
        f"rerank: of each document alone ({POINTWISE}), of pairs of a query's documents, or of all "
        f"of a query's documents; {POINTWISE} unless it is given.",
    ] = "sigmoid"
    rpo_alpha: Annotated[
        float | None, Gt(0), "dpo: add the cross entropy of the chosen answers, times this (RPO)."
    ] = None
    simpo_gamma: Annotated[
        float, Ge(0), "simpo: how much larger the reward of the chosen answer should be."
    ] = 0.5
    desirable_weight: Annotated[float, Ge(0), "kto: the weight of answers rated good."] = 1.0
    undesirable_weight: Annotated[float, Ge(0), "kto: the weight of answers rated bad."] = 1.0
    teacher_model_name_or_path: Annotated[
        str | None,
        FileOrName,
        "The teacher of a distillation, with the same tokenizer and vocabulary.",
    ] = None
    teacher_model_revision: Annotated[
        str | None, "The hub revision of teacher_model_name_or_path."
    ] = None
    teacher_load_in_4bit: Annotated[
        bool,
        (
            "Keep the teacher's linear layers in 4 bits (nf4, double quantization); needs "
            "bitsandbytes."
        ),
    ] = False
    distill_beta: Annotated[
        float,
        Ge(0),
        Le(1),
        "distill: 0 is the forward KL divergence, 1 the reverse, between them the generalized "
        "Jensen-Shannon divergence.",
    ] = 0.5
    temperature: Annotated[
        float,
        Gt(0),
        "What logits are divided by: distill: those of teacher and student; grpo, ppo, "
        "on_policy_distill: all, in sampling and in training; embed: the cosines of a query and "
        "the documents, by 0.05 unless it is given.",
    ] = 1.0
    distill_top_k: Annotated[
        int | None,
        Gt(0),
        "distill: ask the teacher once, before training: at each trained token its k likeliest "
        "tokens are stored in files, and the divergence is over them and all others together. "
        "null: ask it in each step.",
    ] = None
    distill_alpha: Annotated[
        float,
        Gt(0),
        Le(1),
        (
            "distill: the weight of the divergence; the rest is the weight of the labels' cross "
            "entropy."
        ),
    ] = 1.0
    gamma: Annotated[
        float,
        Ge(0),
        Le(1),
        "ppo: the discount: the factor of a reward for each token that it comes later.",
    ] = 1.0
    lam: Annotated[
        float,
        Ge(0),
        Le(1),
        "ppo: how far advantages trust rewards over the critic's values: 1 compares a token's "
        "value with all that follows, 0 with the next value alone (GAE).",
    ] = 0.95
    vf_coef: Annotated[
        float, Ge(0), "ppo: the weight of the critic's loss beside the policy's."
    ] = 0.1
    cliprange_value: Annotated[
        float,
        Gt(0),
        "ppo: how far a value may move from the one at sampling before its loss has no gradient.",
    ] = 0.2
    center_rewards_coefficient: Annotated[
        float | None,
        Gt(0),
        "reward: add the square of the two scores' sum, times this, so that scores lie around zero "
        "(Eisenstein et al. 2023).",
    ] = None
    class_weights: Annotated[
        tuple[float, ...],
        "classify: a weight for each of labels, by which the losses of rows of this class are "
        "multiplied; the sum is still divided by the number of rows. Empty: each has 1.",
    ] = ()
    matryoshka_dims: Annotated[
        tuple[Positive, ...],
        "embed: the loss is the sum of the losses of embeddings cut to each of these lengths, such "
        "as [1024, 256, 64] (Kusupati et al. 2022). Empty: embeddings are not cut.",
    ] = ()
    mask_token: Annotated[
        str | int | None,
        "masked_diffusion: the token that stands in a masked one's place, as text or as its id; "
        "added_tokens adds one. null: the tokenizer's own mask token.",
    ] = None
    mask_eps: Annotated[
        float,
        Gt(0),
        Lt(1),
        "masked_diffusion: the smallest probability with which a document's tokens are masked. "
        "In each step one is drawn for each document, uniform up to 1, and its losses are divided "
        "by it.",
    ] = 1e-3
    exit_layers: Annotated[
        LayerNumbers,
        "early_exit: the layers, from 0, after which the answers are scored beside the model's "
        "output: a list, or a slice such as '::4'. Empty: none.",
    ] = "::4"
    exit_curriculum: Annotated[
        Literal["none", "rotational", "gradual"],
        "early_exit: none scores all of exit_layers in each step; rotational moves them by one "
        "layer in each step, around the model; gradual adds one after another from the last, up to "
        "half the run.",
    ] = "rotational"
    exit_weights: Annotated[
        ExitWeights,
        "early_exit: the weight of each exit's loss, by the number l of layers up to it: "
        + "; ".join(f"{name}: {says}" for name, says in EXIT_WEIGHTS.items())
        + ". They are divided by their sum.",
    ] = "sum"
    exit_scale: Annotated[
        float, Ge(0), "early_exit: the factor of the weight of each exit but the model's output."
    ] = 1.0
    layer_dropout: Annotated[
        float,
        Ge(0),
        Lt(1),
        "early_exit: the probability with which a document skips the last layer in a step; "
        "layer_dropout_schedule gives that of the layers before it.",
    ] = 0.0
    layer_dropout_layers: Annotated[
        LayerNumbers,
        "early_exit: the layers, from 0, that documents may skip: a list, or a slice such as "
        "'1::2'.",
    ] = ":"
    layer_dropout_schedule: Annotated[
        Literal["uniform", "exp", "linear", "log", "sin", "sigmoid"],
        "early_exit: how the probability grows from 0 at the first layer to layer_dropout at the "
        "last: exp, as in the paper, by 2 to the power of the layer's share of the model's depth, "
        "less 1; uniform: the same everywhere.",
    ] = "exp"


# A key of an entry of `datasets` that only some kinds of rows use -> these kinds.
COLUMN_KEYS: Mapping[str, tuple[RowKind, ...]] = {
    "chosen_column": ("pairs", "scored_pairs", "ratings", "retrieval", "ranked"),
    "rejected_column": ("pairs", "scored_pairs", "ratings", "retrieval", "ranked"),
    "label_column": ("ratings", "classes", "ranked"),
    "answers_apart": ("answers",),
}


def choose_layers(numbers: tuple[int, ...] | str, count: int) -> tuple[int, ...]:
    """Returns the layers that a list of numbers or a slice names, ascending and each once.

    Args:
        numbers: Layers from 0, or a slice as text.
        count: The model's layers. A slice is cut to them; numbers are not compared with it.

    >>> choose_layers("1::4", 12), choose_layers((3, 0), 12)
    ((1, 5, 9), (0, 3))
    """
    if isinstance(numbers, str):
        start_stop_step = [int(part) if part else None for part in numbers.split(":")]
        return tuple(range(count)[slice(*start_stop_step)])
    return tuple(sorted({*numbers}))


def facts_of(values: Mapping[str, Any]) -> MethodFacts:
    """Returns the facts about a recipe's method; those of DEFAULT_METHOD if it is not known.

    `values`: the recipe's keys with their values.
    """
    return METHODS.get(str(values.get("method")), METHODS[DEFAULT_METHOD])


# Keys of how completions are sampled and rewarded, not of what is learned.
UNDESCRIBED_KEYS = (
    "per_device_generation_batch_size",
    "vllm_server_base_url",
    "vllm_server_timeout",
    "in_flight",
    "log_completions",
    "reward_timeout_seconds",
    "on_bad_reward",
)


def describe_method(values: Mapping[str, Any]) -> str:
    """Describes a recipe's method in a line: the name, and the method's keys that have a value.

    `values`: the recipe's keys with their values. A key with 0, False or an empty value is left
    out.

    >>> describe_method(
    ...     {
    ...         "method": "dpo",
    ...         "beta": 0.1,
    ...         "loss_type": "sigmoid",
    ...         "rpo_alpha": None,
    ...         "label_smoothing": 0.0,
    ...     }
    ... )
    'dpo: beta 0.1, loss_type sigmoid'
    """
    method = values.get("method", DEFAULT_METHOD)
    if method == DEFAULT_METHOD:
        return "supervised fine-tuning"
    settings = [
        f"{key} {_describe_value(values[key])}"
        for key in METHODS[method].keys
        if key not in UNDESCRIBED_KEYS and values.get(key)
    ]
    return f"{method}: {', '.join(settings)}" if settings else method


def _describe_value(value: Any) -> str:
    """Describes a key's value in a line; a function or class keeps its file's name, not its folder.

    >>> _describe_value(["exact_answer", "/home/me/rewards.py:short"])
    'exact_answer + rewards.py:short'
    """
    if isinstance(value, Mapping):
        return " + ".join(f"{key}: {_describe_value(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return " + ".join(_shorten_name(str(item)) for item in value)
    if isinstance(value, str) and ".py:" in value:
        return _shorten_name(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _shorten_name(text: str) -> str:
    """Returns FILE.py:NAME without folders; of any other text what `name_of_reward` makes of it."""
    if ".py:" in text and not is_judge(text):
        return text.rpartition("/")[2]
    return name_of_reward(text)
