"""Other tools' values of keys that are the same here: what each is called here, or why there is none."""

from collections.abc import Mapping

# key -> their name -> ours
OTHER_VALUES: Mapping[str, Mapping[str, str]] = {
    "optim": {
        "adamw_hf": "adamw_torch",
        "adamw_apex_fused": "adamw_torch_fused",
        "adamw_bnb_8bit": "adamw_8bit",
        "adamw_torch_8bit": "adamw_8bit",
        "paged_adamw_8bit": "adamw_8bit",
        "paged_adamw_32bit": "adamw_torch_fused",
        "adamw": "adamw_torch_fused",
    },
    "lr_scheduler_type": {"constant_lr": "constant", "1-sqrt": "warmup_stable_decay"},
    "attn_implementation": {"fa2": "flash_attention_2", "fa3": "flash_attention_3", "flash_attention": "auto"},
}
LION = "not supported: no kept library has Lion for sharded parameters; adamw_bf16_moments takes the same memory, adamw_8bit less"
# key -> their name -> why there is none
REFUSED_VALUES: Mapping[str, Mapping[str, str]] = {
    "optim": dict.fromkeys(("lion", "lion_32bit", "lion_8bit", "paged_lion_32bit", "paged_lion_8bit"), LION)
    | {"adamw_torch_4bit": "not supported; adamw_8bit is the smallest AdamW here"},
    "lr_scheduler_type": {
        "cosine_with_restarts": "a rate that jumps back is not supported; cosine, or warmup_stable_decay",
        "reduce_lr_on_plateau": "the rate is a function of the step here; cosine, or warmup_stable_decay",
    },
    "save_strategy": {"best": "every new best is saved with keep_best_checkpoint: true"},
    "eval_strategy": {"best": "it is for save_strategy in Transformers; here see keep_best_checkpoint"},
}
