"""Whose file it is, and whether what it does is done here: other methods, models and purposes are refused by name."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from finetune.config.other_tools import LOSSES
from finetune.convert.preference_methods import AXOLOTL_METHODS, Found, find_method, find_unsupported_losses
from finetune.convert.rules import read_section
from finetune.convert.tool_keys import Tool
from finetune.errors import UserError

MULTIMODAL_MODEL = re.compile(
    r"[-_.]vl\b|\bvl[-_]|vision|pixtral|voxtral|smolvlm|llava|gemma-?3n|internvl|omni\b|audio|kimi-vl|glm-4\.\dv|minicpm-[vo]"
)
# Mixtures of experts whose published weights are quantized, whose code is not transformers' own, or that have not been tried.
MOE_MODEL = re.compile(
    r"gpt[-_]oss|dbrx|deepseek[-_]?(v3|v4|r1)(?!.*distill)|jamba-1\.5|scout|maverick|\d+b[-_]\d+e\b|llama-?4|glm-?5|minimax|kimi-k2|"
    r"ling[-_](mini|flash|1t|2)|ring[-_](mini|flash)|arctic|mistral-small-4|nemotron-3|nemotron[-_](ultra|super)[-_]?v?3|grok|step-3|mimo"
)
MOE_CAUSE = "mixtures of experts whose weights are quantized, or not tried yet"
MIXTURE = re.compile(
    r"mixtral|moe\b|moe[-_]|\d+x\d+b|[-_]a\d+(\.\d+)?b\b|deepseek[-_]?v2|glm-?4\.[57]|hunyuan-a|hy3|olmoe|qwen3-next|trinity|dots\.?1"
)
FEW_BITS = ("load_in_4bit", "load_in_8bit", "quantization_bit", "quantize_moe_experts")
HYBRID_MODEL = re.compile(
    r"nemotron-?h|falcon-?h1|jamba|mamba|lfm2|nemotron-flash|granite-4\.0-h|rwkv|bamba|zamba|qwen3\.5"
)
QUANTIZED_MODEL = re.compile(r"gptq|awq|aqlm|nvfp4|mxfp4|[-_](int|fp)[48]\b|(?<!bnb)[-_][48]-?bit|prequantized")
BITSANDBYTES_MODEL = re.compile(r"\bbnb\b")  # stored quantized, and loaded as it is
MOE_KEYS = (
    "llama4_linearized_experts", "dsv4_fp4_grouped_mode", "use_moe",
)  # fmt: skip
TRL_METHODS = {
    "online RL": ("num_generations", "reward_funcs", "reward_model_path", "max_completion_length"),
    "distillation": ("teacher_model_name_or_path", "lmbda"),
}
FACTORY_IMAGES = ("image_max_pixels", "video_max_pixels", "freeze_vision_tower", "image_dir")
AUTOMODEL_RECIPE = "TrainFinetuneRecipeForNextTokenPrediction"


class Refusal(UserError):
    """A file that is not converted. `cause` names the method or capability; `is_training` whether the file trains at all."""

    cause: str = ""
    is_training: bool = True

    @classmethod
    def because(cls, where: object, found: str, cause: str, is_training: bool = True) -> "Refusal":
        """What was `found` in the file, and the `cause` that it stands for."""
        reason = (
            f"{cause}: not supported; supervised fine-tuning and preference training of text models are converted"
            if is_training
            else f"{cause}, not a training recipe"
        )
        refusal = cls(f"{where}: {found}: {reason}")
        refusal.cause, refusal.is_training = cause, is_training
        return refusal


def recognize_tool(theirs: Mapping[str, Any]) -> Tool | None:
    """Whose file it is, by the keys that only one of them has."""
    if any("nemo_automodel" in text for text in _texts(theirs, "_target_")) or "step_scheduler" in theirs:
        return "Automodel"
    if any(True for _ in _texts(theirs, "_component_")):
        return "torchtune"
    if "base_model" in theirs or {"sequence_len", "micro_batch_size"} & theirs.keys():
        return "LLaMA-Factory" if is_factory_v1(theirs) else "Axolotl"
    if {"finetuning_type", "stage", "cutoff_len", "template", "export_dir"} & theirs.keys() or is_factory_v1(theirs):
        return "LLaMA-Factory"
    return "TRL" if "model_name_or_path" in theirs else None


def is_factory_v1(theirs: Mapping[str, Any]) -> bool:
    """Whether a file is in LLaMA-Factory's v1 schema."""
    return "model" in theirs and bool(
        {"train_dataset", "dist_config", "sample_backend", "kernel_config"} & theirs.keys()
    )


def refuse_other_methods(tool: Tool, theirs: Mapping[str, Any], source: Path) -> None:
    """Raises `Refusal` for a file whose method, model or purpose is not supported, naming the key that says so."""
    losses = find_unsupported_losses(tool, theirs, source)
    for found, cause, is_training in (*_methods(tool, theirs), *losses, *_models(tool, theirs)):
        raise Refusal.because(source, found, cause, is_training)


def _methods(tool: Tool, theirs: Mapping[str, Any]) -> Iterator[Found]:
    readers = {
        "TRL": _trl,
        "Axolotl": _axolotl,
        "LLaMA-Factory": _factory,
        "torchtune": _torchtune,
        "Automodel": _automodel,
    }
    yield from readers[tool](theirs)
    for key in LOSSES:
        if theirs.get(key):
            name = key.removeprefix("use_").removesuffix("_loss").upper()
            yield f"{key}: {theirs[key]}", f"another loss ({name})" if "use_" in key else "mixture of depths", True


def _trl(theirs: Mapping[str, Any]) -> Iterator[Found]:
    for cause, keys in TRL_METHODS.items():
        for key in keys:
            if key in theirs:
                yield f"{key}: {theirs[key]}", cause, True


def _axolotl(theirs: Mapping[str, Any]) -> Iterator[Found]:
    rl = theirs.get("rl")
    if rl and str(rl) not in AXOLOTL_METHODS:
        yield f"rl: {rl}", "online RL", True
    for key in ("reward_model", "process_reward_model"):
        if theirs.get(key):
            yield f"{key}: true", "reward model", True
    if theirs.get("num_labels") or "Classification" in str(theirs.get("model_type")):
        yield "model_type: a classifier", "classification", True
    plugins = str(theirs.get("plugins", "")).lower()
    if "diffusion" in theirs or "diffusion" in plugins:
        yield "diffusion", "diffusion", True
    if "kd_trainer" in theirs or ".kd." in plugins:
        yield "kd_trainer", "distillation", True
    if theirs.get("processor_type"):
        yield f"processor_type: {theirs['processor_type']}", "multimodal", True
    if theirs.get("qat"):
        yield "qat", "quantization-aware training", True
    if theirs.get("use_onebitllms"):
        yield "use_onebitllms: true", "1-bit training", True


def _factory(theirs: Mapping[str, Any]) -> Iterator[Found]:
    if is_factory_v1(theirs):
        is_training = "train_dataset" in theirs
        yield "model with train_dataset or dist_config", "LLaMA-Factory's v1 schema", is_training
    if not theirs.get("do_train") and "stage" not in theirs and "dataset" not in theirs:
        purpose = (
            "merging (finetune export)"
            if "export_dir" in theirs
            else "evaluation"
            if "task" in theirs
            else "generation"
        )
        yield next(key for key in ("export_dir", "task", "template", *theirs) if key in theirs), purpose, False
    elif theirs.get("do_predict") and not theirs.get("do_train"):
        yield "do_predict: true", "generation", False
    causes = {"rm": "reward model", "ppo": "online RL"}
    stage = str(theirs.get("stage"))
    if stage in causes:
        yield f"stage: {stage}", causes[stage], True
    for key in FACTORY_IMAGES:
        if key in theirs:
            yield f"{key}: {theirs[key]}", "multimodal", True
    if "_vl" in str(theirs.get("template")) or "mllm" in str(theirs.get("dataset")):
        yield f"template: {theirs.get('template')}", "multimodal", True
    if theirs.get("finetuning_type", "lora") not in ("lora", "full"):
        kind = theirs["finetuning_type"]
        yield f"finetuning_type: {kind}", "freezing by name" if kind == "freeze" else str(kind).upper(), True
    if theirs.get("train_from_scratch"):
        yield "train_from_scratch: true", "training a named architecture from random weights", True


def _torchtune(theirs: Mapping[str, Any]) -> Iterator[Found]:
    components = " ".join(_texts(theirs, "_component_"))
    if {"orchestration", "reward_functions", "reward_model", "ppo_epochs", "num_output_samples"} & theirs.keys():
        yield (
            next(k for k in theirs if k in ("orchestration", "reward_functions", "reward_model", "ppo_epochs")),
            "online RL",
            True,
        )
    loss = str(read_section(theirs, "loss").get("_component_", "")).rsplit(".", 1)[-1]
    if "rlhf.loss" in components and find_method("torchtune", theirs, Path()) == "sft":
        yield f"loss: {loss}", f"another loss ({loss.removesuffix('Loss')})", True
    if {"teacher_model", "kd_loss"} & theirs.keys():
        yield "teacher_model", "distillation", True
    if "vision" in components or "multimodal" in components or "clip" in components:
        yield "model", "multimodal", True
    if "tasks" in theirs:
        yield "tasks", "evaluation", False
    if "prompt" in theirs or "max_new_tokens" in theirs:
        yield "prompt", "generation", False
    if "quantizer" in theirs:
        is_training = "dataset" in theirs
        yield "quantizer", "quantization-aware training" if is_training else "quantization", is_training
    if {"early_exit_loss", "layer_dropout"} & theirs.keys():
        yield "early_exit_loss", "early exit", True
    if "llama4" in components or "moe" in components:
        yield "model", MOE_CAUSE, True
    if "dataset" not in theirs:
        yield "no dataset", "a file of another purpose", False


def _automodel(theirs: Mapping[str, Any]) -> Iterator[Found]:
    recipe = theirs.get("recipe")
    name = str(recipe.get("_target_") if isinstance(recipe, dict) else recipe or AUTOMODEL_RECIPE).rsplit(".", 1)[-1]
    causes = {
        "Benchmark": "a benchmark", "KnowledgeDistillation": "distillation", "DiffusionLM": "diffusion",
        "Diffusion": "diffusion", "VLM": "multimodal", "Encoder": "retrieval", "SequenceClassification": "classification",
        "Omni": "multimodal", "Eagle": "speculative decoding", "Pretrain": "pretraining",
    }  # fmt: skip
    if name != AUTOMODEL_RECIPE:
        cause = next((cause for part, cause in causes.items() if part in name), name)
        yield f"recipe: {name}", cause, cause != "a benchmark"
    if "teacher_model" in theirs:
        yield "teacher_model", "distillation", True
    if "dllm" in theirs:
        yield "dllm", "diffusion", True
    targets = " ".join(_texts(theirs, "_target_"))
    if "mock" in targets:
        yield "dataset: made-up tokens", "a benchmark", False
    model = read_section(theirs, "model")
    kind = str(model.get("_target_", ""))
    if "Seq2Seq" in kind:
        yield f"model: {kind.rsplit('.', 2)[-2]}", "encoder-decoder models", True
    if "ImageText" in kind or "MultiModal" in kind:
        yield f"model: {kind.rsplit('.', 2)[-2]}", "multimodal", True
    if "SequenceClassification" in kind:
        yield f"model: {kind.rsplit('.', 2)[-2]}", "classification", True
    qat = theirs.get("qat")
    if isinstance(qat, dict) and qat.get("enabled"):
        yield "qat", "quantization-aware training", True
    if "prefix_tree" in str(theirs):
        yield "dataloader: prefix trees", "online RL", True
    if kind.endswith("from_config"):
        yield "model: from_config", "training a named architecture from random weights", True


def _models(tool: Tool, theirs: Mapping[str, Any]) -> Iterator[Found]:
    for key in MOE_KEYS:
        value = theirs.get(key)
        if value not in (None, False, 1, ""):
            yield f"{key}: {value}", MOE_CAUSE, True
    name = (
        theirs.get("base_model")
        or theirs.get("model_name_or_path")
        or read_section(theirs, "model").get("pretrained_model_name_or_path")
        or read_section(theirs, "checkpointer").get("checkpoint_dir")
        or ""
    )
    lower = str(name).lower()
    if MIXTURE.search(lower) and (any(theirs.get(key) for key in FEW_BITS) or QUANTIZED_MODEL.search(lower)):
        yield f"{name} in few bits", "quantized experts", True
    for pattern, cause in (
        (MULTIMODAL_MODEL, "multimodal"),
        (MOE_MODEL, MOE_CAUSE),
        (HYBRID_MODEL, "hybrid or linear attention"),
        (QUANTIZED_MODEL, "quantized weights"),
    ):
        if pattern.search(lower):
            yield str(name), cause, True


def _texts(value: Any, key: str) -> Iterator[str]:
    """Every text under `key`, however deep."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name == key and isinstance(inner, str):
                yield inner
            else:
                yield from _texts(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner, key)
