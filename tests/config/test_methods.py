"""Which keys go with which method, and what a method that does not train yet says."""

from pathlib import Path

import pytest

from finetune.config.keys import keys_of
from finetune.config.methods import METHODS, Method, RolloutKeys
from finetune.config.reader import read_recipe, to_dict, write_recipe
from finetune.errors import UserError

GOOD = ["model_name_or_path=some/model", "datasets=[{path: some/data}]"]


def read(*keys: str) -> list[str]:
    """What is wrong with a recipe of these keys."""
    try:
        read_recipe(None, [*GOOD, *keys])
    except UserError as error:
        return [line.partition(": ")[2] for line in str(error).splitlines()]
    return []


@pytest.mark.parametrize(
    "keys",
    [
        ["method=sft", "label_smoothing=0.9"],
        ["method=sft", "token_loss=eaft", "eaft_alpha=2"],
        ["method=dpo", "beta=0.5", "loss_type=ipo", "rpo_alpha=1"],
        ["method=dpo", "label_smoothing=0.4"],
        ["method=orpo", "beta=0.2", "overlength=drop"],
        ["method=masked_diffusion", "mask_token=<|mask|>", "mask_eps=0.01"],
        ["method=masked_diffusion", "mask_token=128002"],
        ["method=early_exit", "exit_layers=[8, 16]", "exit_curriculum=gradual", "exit_weights=inverse_root", "exit_scale=0"],
        ["method=early_exit", "exit_layers=[]", "layer_dropout=0.2", "layer_dropout_layers=1::2"],
        ["method=simpo", "beta=2", "simpo_gamma=1.2"],
        ["method=kto", "desirable_weight=1.3", "undesirable_weight=0"],
        ["method=grpo", "rewards=['exact_answer']", "loss_type=rloo", "num_generations=2", "epsilon=0.1"],
        ["method=ppo", "rewards=['exact_answer']", "loss_type=grpo", "gamma=0.9", "lam=0.8", "vf_coef=0.5", "cliprange_value=0.3", "beta=0.1"],
        ["method=distill", "teacher_model_name_or_path=some/teacher", "teacher_model_revision=main", "teacher_load_in_4bit=True", "distill_beta=0", "temperature=2", "distill_alpha=0.5", "label_smoothing=0.1"],
    ],
)  # fmt: skip
def test_each_method_takes_its_keys(keys: list[str], tmp_path: Path) -> None:
    recipe = read_recipe(None, [*GOOD, *keys])
    flat = to_dict(recipe)
    for key in keys:
        name, _, value = key.partition("=")
        assert str(flat[name]).removesuffix(".0") == value
    write_recipe(
        recipe, tmp_path / "r.yaml"
    )  # with every key, the other methods' defaults among them
    assert to_dict(read_recipe(str(tmp_path / "r.yaml"))) == flat


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        (["beta=0.2"], "beta has no effect with method: sft; it is for dpo, orpo, simpo, kto, grpo, ppo"),
        (["method=orpo", "loss_type=hinge"], "loss_type has no effect with method: orpo; it is for dpo, grpo, ppo, on_policy_distill"),
        (["method=kto", "simpo_gamma=1"], "simpo_gamma has no effect with method: kto; it is for simpo"),
        (["method=simpo", "label_smoothing=0.1"], "label_smoothing has no effect with method: simpo; it is for sft, dpo"),
        (["method=distill", "teacher_model_name_or_path=a/b", "label_smoothing=0.1"], "label_smoothing has no effect with distill_alpha: 1, which"),
        (["method=dpo", "loss_type=ipo", "label_smoothing=0.1"], "label_smoothing has no effect with loss_type: ipo"),
        (["token_loss=dft", "label_smoothing=0.1"], "label_smoothing cannot be combined with token_loss: dft; remove"),
        (["token_loss=dft", "method=dpo"], "token_loss has no effect with method: dpo; it is for sft, distill"),
        (["method=distill", "teacher_model_name_or_path=a/b", "token_loss=dft"], "token_loss has no effect with distill_alpha: 1, which"),
        (["eaft_alpha=2"], "eaft_alpha has no effect without token_loss: eaft"),
        (["method=dpo", "label_smoothing=0.5"], "label_smoothing: 0.5: under dpo it is the share of pairs whose order is"),
        (["mask_token=5"], "mask_token has no effect with method: sft; it is for masked_diffusion"),
        (["method=masked_diffusion", "token_loss=dft"], "token_loss has no effect with method: masked_diffusion"),
        (["method=masked_diffusion", "attn_implementation=sdpa"], "attn_implementation: sdpa cannot be combined with method: masked_diffusion: only the attention that is built in sees what is after"),
        (["method=masked_diffusion", "sample_prompts=[Hi]"], "sample_prompts cannot be combined with method: masked_diffusion: it trains a model that fills in masked tokens, and writes none after another; remove sample_prompts"),
        (["method=masked_diffusion", "exact_match_samples=4", "eval_split_size=4"], "exact_match_samples cannot be combined with method: masked_diffusion"),
        (["method=masked_diffusion", "export_formats=[safetensors, gguf]"], "export_formats cannot be combined with method: masked_diffusion"),
        (["exit_scale=2"], "exit_scale has no effect with method: sft; it is for early_exit"),
        (["method=early_exit", "token_loss=dft"], "token_loss has no effect with method: early_exit"),
        (["method=early_exit", "exit_layers=all"], "exit_layers: \"all\" does not fit; a list or a slice such as ::4 is expected"),
        (["method=early_exit", "exit_layers=::0"], "exit_layers: \"::0\" does not fit; "),
        (["method=early_exit", "exit_layers=[-1]"], "exit_layers: [-1] does not fit; a number of at least 0 or text is expected"),
        (["method=early_exit", "exit_layers=[]"], "method: early_exit: without exit_layers and layer_dropout it is fine-tuning"),
        (["method=early_exit", "layer_dropout=1"], "layer_dropout: 1 does not fit; "),
        (["method=early_exit", "layer_dropout_schedule=sin"], "layer_dropout_schedule has no effect without layer_dropout"),
        (["method=masked_diffusion", "mask_eps=0"], "mask_eps: 0 does not fit; "),
        (["method=distill"], "method: distill learns from a teacher; set teacher_model_name_or_path"),
        (["temperature=2"], "temperature has no effect with method: sft; it is for distill, grpo, ppo, on_policy_distill"),
        (["method=dpo", "overlength=split"], "overlength: split cannot be combined with method: dpo: the answers would be cut apart; set overlength"),
        (["method=kto", "assistant_only_loss=false"], "assistant_only_loss cannot be combined with method: kto: it compares answers"),
        (["method=dpo", "turns=split"], "turns cannot be combined with method: dpo: it compares answers"),
        (["turns=last", "assistant_only_loss=false"], "turns has no effect with assistant_only_loss: false"),
        (["method=pp0"], 'method: "pp0" does not fit; one of sft, dpo, orpo, simpo, kto, distill, masked_diffusion, early_exit, grpo, ppo, on_policy_distill, reward, process_reward, classify, embed, rerank is expected'),
        (["method=rlhf"], "method: rlhf: another tool's name; here it is method: ppo"),
        (["method=grpo", "rewards=[length]", "lam=0.9"], "lam has no effect with method: grpo; it is for ppo"),
        (["method=ppo", "rewards=[length]", "vllm_server_base_url=http://a:1"], "vllm_server_base_url cannot be combined with method: ppo; remove vllm_server_base_url"),
        (["method=ppo", "rewards=[length]", "scale_rewards=none"], "scale_rewards has no effect with method: ppo; it is for grpo, on_policy_distill"),
        (["method=distill", "teacher_model_name_or_path=./nowhere"], "teacher_model_name_or_path: ./nowhere: no such"),
        (["method=dpo", "beta=0"], "beta: 0: method: dpo would learn nothing; set a number above 0"),
        (["method=dpo", "beta=-1"], "beta: -1 does not fit; a number of at least 0 is expected"),
        (["num_generations=4"], "num_generations has no effect with method: sft; it is for grpo, ppo, on_policy_distill"),
    ],
)  # fmt: skip
def test_a_key_that_the_method_does_not_use_is_refused_with_those_that_do(
    keys: list[str], problem: str
) -> None:
    (found,) = read(*keys)
    assert found.startswith(problem)


def test_every_key_belongs_to_a_method() -> None:
    of_methods = {key for facts in METHODS.values() for key in facts.keys}
    own = keys_of(Method).keys() - {"method"} | keys_of(RolloutKeys).keys()
    assert of_methods == own | {"label_smoothing", "token_loss", "eaft_alpha"}
    assert not any(key.may_change for key in keys_of(Method).values())


def test_a_row_has_room_for_any_pair() -> None:
    assert read_recipe(None, [*GOOD, "max_length=100"]).row_tokens == 100
    assert read_recipe(None, [*GOOD, "max_length=100", "method=dpo"]).row_tokens == 200
