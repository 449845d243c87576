"""Other tools' keys of preference training and ours, as tables; finetune/config/other_tools.py joins them with the rest.

Sources: TRL 1.9 (DPOConfig, ORPOConfig, CPOConfig, KTOConfig), Axolotl 0.18 (docs/rlhf.qmd and its RL builder),
LLaMA-Factory (RLHFArguments).
"""

from finetune.recipe.counterpart import Counterpart, ignored, unsupported, without_counterpart

REFERENCE = "the reference is the model before training: its adapters switched off, or its log-probabilities computed once, without a key"
CUT_PROMPTS = (
    "max_length bounds prompt and answer together here, and cuts the end; a longer prompt loses its beginning there"
)
ANOTHER_REFERENCE = f"another reference model: not supported; {REFERENCE}"
NO_DROPOUT = "adapters are trained without dropout in preference training there: lora_dropout: 0"
MEAN_OF_MEANS = "a mean of each answer's mean there, a mean over all tokens here"
TOKEN_SUMS = "the same sums of log-probabilities, computed otherwise"

TRL_PREFERENCES = (
    Counterpart("loss_type", "loss_type", "of DPO: sigmoid, hinge, ipo; [sigmoid, sft] is rpo_alpha; simpo is a method here", "by-code"),
    Counterpart("loss_weights", "rpo_alpha", "the weight of sft in loss_type: [sigmoid, sft]", "by-code"),
    Counterpart("cpo_alpha", None, "0 is SimPO; else CPO-SimPO adds a cross entropy, which is not supported", "by-code"),
    Counterpart("disable_dropout", "lora_dropout", NO_DROPOUT, "by-code"),
    Counterpart("truncation_mode", None, "keep_start is what is done here", "by-code"),
    *without_counterpart(CUT_PROMPTS, "max_prompt_length", "max_completion_length"),
    *unsupported("another loss (WPO)", "use_weighting"),
    *unsupported("another loss (LD-DPO)", "ld_alpha"),
    *unsupported("another reference model", "reference_free", "sync_ref_model", "ref_model_revision", note=ANOTHER_REFERENCE),
    *ignored("reverse_kl is the only one", "f_divergence_type", "f_alpha_divergence_coef"),
    *ignored(REFERENCE, "precompute_ref_log_probs", "precompute_ref_batch_size", "ref_model_init_kwargs",
               "ref_model_mixup_alpha", "ref_model_sync_steps"),
    *ignored(TOKEN_SUMS, "use_logits_to_keep", "label_pad_token_id", "padding_value", "generate_during_eval"),
)  # fmt: skip

AXOLOTL_PREFERENCES = (
    Counterpart("rl", "method", "dpo, orpo, kto or simpo; ipo is method: dpo with loss_type: ipo", "by-code"),
    Counterpart("rl_beta", "beta"),
    Counterpart("trl.beta", "beta"),
    Counterpart("orpo_alpha", "beta", "of orpo", "by-code"),
    Counterpart("cpo_alpha", None, "0 is SimPO; else CPO-SimPO adds a cross entropy, which is not supported", "by-code"),
    Counterpart("kto_desirable_weight", "desirable_weight"),
    Counterpart("kto_undesirable_weight", "undesirable_weight"),
    Counterpart("dpo_label_smoothing", "label_smoothing"),
    Counterpart("dpo_loss_type", "loss_type", "sigmoid, hinge, ipo; [sigmoid, sft] is rpo_alpha", "by-code"),
    Counterpart("dpo_loss_weights", "rpo_alpha", "the weight of sft in dpo_loss_type: [sigmoid, sft]", "by-code"),
    *without_counterpart(CUT_PROMPTS, "max_prompt_len"),
    *unsupported("another loss (WPO)", "dpo_use_weighting"),
    *unsupported("another loss (normalized DPO)", "dpo_norm_loss"),
    *ignored(REFERENCE, "precompute_ref_log_probs", "rl_adapter_ref_model"),
    *ignored(TOKEN_SUMS, "dpo_use_logits_to_keep", "dpo_padding_free", "dpo_generate_during_eval"),
)  # fmt: skip

FACTORY_PREFERENCES = (
    Counterpart("stage", "method", "dpo and kto; sft, and pt with rows of type text, need no key", "by-code"),
    Counterpart("pref_loss", "loss_type", "sigmoid, hinge, ipo; orpo and simpo are methods here", "by-code"),
    Counterpart("pref_beta", "beta"),
    Counterpart("pref_ftx", "rpo_alpha", MEAN_OF_MEANS, "on-if-true", inexact=True),
    Counterpart("dpo_label_smoothing", "label_smoothing"),
    Counterpart("kto_chosen_weight", "desirable_weight"),
    Counterpart("kto_rejected_weight", "undesirable_weight"),
    *unsupported("another loss (BCO)", "pref_bco_weight"),
    *unsupported("another loss (LD-DPO)", "ld_alpha"),
    *unsupported("another reference model", "ref_model", "ref_model_adapters", note=ANOTHER_REFERENCE),
    *ignored(REFERENCE, "ref_model_quantization_bit"),
)  # fmt: skip

TORCHTUNE_PREFERENCES = (
    Counterpart("loss.beta", "beta", "of DPOLoss"),
    Counterpart("loss.label_smoothing", "label_smoothing", "of DPOLoss"),
    *ignored(REFERENCE, "ref_checkpointer"),
)
