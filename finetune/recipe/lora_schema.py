"""The sections of a recipe that say what LoRA trains, and how the frozen base beside it is kept."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Lt

from finetune.config.markers import FileOrName, ModulePatterns, Positive, SameOnResume


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """Low-rank adapters instead of full fine-tuning."""

    use_peft: Annotated[bool, SameOnResume, "Train LoRA adapters on a frozen bf16 base instead of all parameters."] = (
        False
    )
    adapter_name_or_path: Annotated[
        str | None,
        FileOrName,
        SameOnResume,
        "A LoRA adapter to train further: a PEFT folder, a run or a hub name. Rank, alpha, targets and the rest are taken from its "
        "adapter_config.json; what the recipe sets as well must agree.",
    ] = None
    lora_r: Annotated[Positive, SameOnResume, "The rank of the adapters."] = 16
    lora_alpha: Annotated[Positive, SameOnResume, "The adapters are scaled by lora_alpha / lora_r."] = 32
    lora_dropout: Annotated[float, Ge(0), Lt(1), SameOnResume, "Dropout on the adapters' input."] = 0.0
    lora_target_modules: Annotated[
        Literal["all-linear"] | tuple[str, ...],
        SameOnResume,
        "The linear layers that get adapters, by the end of their names.",
    ] = "all-linear"
    lora_target_parameters: Annotated[
        tuple[str, ...],
        SameOnResume,
        "Parameters that get adapters, by the end of their names: those that hold all experts of a layer of a mixture "
        "(experts.gate_up_proj, experts.down_proj). Not under FSDP1.",
    ] = ()
    rank_pattern: Annotated[
        dict[str, Positive] | None,
        ModulePatterns,
        SameOnResume,
        "The rank of some adapters in place of lora_r, by patterns for the end of their modules' names: {q_proj: 32, "
        "layers.0.mlp.*_proj: 4}.",
    ] = None
    alpha_pattern: Annotated[dict[str, Positive] | None, ModulePatterns, SameOnResume, "The same for lora_alpha."] = (
        None
    )
    modules_to_save: Annotated[
        tuple[str, ...],
        ModulePatterns,
        SameOnResume,
        "Modules of the base that are trained whole, in float32, beside the adapters, by patterns for the end of their "
        "names: embed_tokens, lm_head.",
    ] = ()
    use_rslora: Annotated[bool, SameOnResume, "Scale by lora_alpha / sqrt(lora_r) (rank-stabilized LoRA)."] = False
    use_dora: Annotated[bool, SameOnResume, "Train magnitude and direction separately (DoRA)."] = False

    @property
    def is_fused(self) -> bool:
        """Whether every adapter is computed with its layer (models/fused_lora.py), and all else is frozen in the compute dtype."""
        others = self.lora_dropout or self.use_dora or self.modules_to_save or self.lora_target_parameters
        return self.use_peft and not others


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """A base model in 4 or 8 bits under LoRA's adapters (QLoRA), by bitsandbytes."""

    load_in_4bit: Annotated[
        bool,
        SameOnResume,
        "Keep the linear layers of LoRA's frozen base in 4 bits; embeddings, norms and the head stay in the compute dtype. "
        "Needs the bitsandbytes package; not under FSDP1.",
    ] = False
    load_in_8bit: Annotated[
        bool,
        SameOnResume,
        "The same in 8 bits: each row scaled as in LLM.int8, multiplied in the compute dtype.",
    ] = False
    bnb_4bit_quant_type: Annotated[
        Literal["nf4", "fp4"], SameOnResume, "The 16 values of 4 bits: nf4 (for normally distributed weights) or fp4."
    ] = "nf4"
    bnb_4bit_use_double_quant: Annotated[
        bool, SameOnResume, "Quantize the scales of 4 bits as well: 0.37 bits less for each parameter."
    ] = False

    @property
    def bits(self) -> Literal[4, 8] | None:
        """Of a quantized weight; None where nothing is quantized."""
        return 4 if self.load_in_4bit else 8 if self.load_in_8bit else None
