"""What names of published models and of chat templates say: the family, the kind, and what differs
there.
"""

import fnmatch
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from finetune.config.facts import (
    find_linear_layers,
    find_vision_layers,
    has_fused_experts,
    read_family_source,
)
from finetune.config.families import IMAGE_FAMILIES, find_family
from finetune.config.module_names import find_alias, find_renames, rename_pattern
from finetune.config.quantization import LOAD_KEYS
from finetune.constants import ALL_LINEAR, CONFIG_FILE
from finetune.convert.counterparts import Counterpart, Tool, ToolFile
from finetune.convert.hints import find_texts
from finetune.convert.value_conversion import (
    LINEAR_LAYERS,
    Conversion,
    convert_names,
    find_method_facts,
    read_section,
)
from finetune.files.json_files import read_json_object

# evidence in a file, the capability that it asks for, whether the file trains
Unsupported = tuple[str, str, bool]

# Names of models -> model_type, the first that fits.
FAMILIES = (
    (r"nemotron-(super-49b|ultra-253b|nas)", None),  # whose code is not transformers'
    (r"distill.*llama|llama-?3\S*nemotron", "llama"),
    (r"distill.*qwen|openthinker|qwq", "qwen2"),
    (r"mixtral|8x\d+b", "mixtral"),
    (r"nemotron-(h|3|nano|ultra|super)|nano-30b", "nemotron_h"),
    (r"nemotron-labs-dory", "dory"),
    (r"nemotron|minitron", "nemotron"),
    (r"neox-japanese", "gpt_neox_japanese"),
    (r"redpajama|pythia|neox|dolly", "gpt_neox"),
    (r"gpt-?j", "gptj"),
    (r"cerebras-gpt|gpt-?2", "gpt2"),
    (r"gpt-?oss", "gpt_oss"),
    (r"falcon-?h1", "falcon_h1"),
    (r"falcon-?(7b|40b|rw)", "falcon"),
    (r"falcon-?mamba", "falcon_mamba"),
    (r"falcon-?(3|e)", "llama"),
    (r"\bmpt", "mpt"),
    (r"bloom", "bloom"),
    (r"stablelm|stable-?code", "stablelm"),
    (r"codegen", "codegen"),
    (r"rwkv", "rwkv"),
    (r"starcoder-?2|starchat-?2", "starcoder2"),
    (r"starcoder|santacoder", "gpt_bigcode"),
    (r"phi-?3\.5-moe|phi-(mini|tiny)-moe", "phimoe"),
    (r"phi-?(3|4)", "phi3"),
    (r"phi-?[12]", "phi"),
    (r"smollm-?3(?!\d)", "smollm3"),
    (r"apertus-v?1\.5", "apertus1p5_text"),
    (r"apertus", "apertus"),
    (r"qwen-?3\.\d-flash-next|qwen-?4-exp", "qwen4_exp_text"),
    (r"qwen-?3-next", "qwen3_next"),
    (r"qwen-?3(\.\d|[-_.]?5).*a\d+b|nex-n2\.5-mini", "qwen3_5_moe_text"),
    (r"qwen-?3(\.\d|[-_.]?5)", "qwen3_5_text"),
    (r"qwen-?3.*a\d+b|qwen-?3.*moe", "qwen3_moe"),
    (r"qwen-?3", "qwen3"),
    # the first generation's, which is not transformers'
    (r"(?<![\w.-])qwen-(1[._]8b|7b|14b|72b)", None),
    (r"qwen.*moe|qwen-?2.*a\d+b", "qwen2_moe"),
    (r"qwen", "qwen2"),
    # no causal models of text
    (r"(t5|diffusion)-?gemma|paligemma|shieldgemma-2-|embeddinggemma-2", None),
    (r"shieldgemma", "gemma2"),
    (r"embeddinggemma", "gemma3_text"),
    (r"recurrent-?gemma", "recurrent_gemma"),
    (r"vault-?gemma", "vaultgemma"),
    (r"gemma-?4-12b", "gemma4_unified_text"),
    (r"gemma-?4", "gemma4_text"),
    (r"gemma-?3n", "gemma3n_text"),
    (r"gemma-?3", "gemma3_text"),
    (r"gemma-?2-|gemma2", "gemma2"),
    (r"gemma", "gemma"),
    (r"deepseek-?(coder-)?v2", "deepseek_v2"),
    (r"deepseek-?v3\.?2", "deepseek_v32"),
    (r"deepseek-?(v3|r1)|moonlight|kimi-k2", "deepseek_v3"),
    (r"minimax-?m2", "minimax_m2"),
    (r"minimax-?(m1|text)", "minimax"),
    (r"mimo-v2-flash", "mimo_v2_flash"),
    (r"llama-?4|scout|maverick", "llama4_text"),
    (r"xglm", "xglm"),
    (r"glm-?5\.3-flash", "glm5_next_text"),
    (r"glm-?5", "glm_moe_dsa"),
    (r"granite-?4", "granitemoehybrid"),
    (r"bamba", "bamba"),
    (r"granite-swash.*a\d+m", "granitemoe_swa"),
    (r"granite-swash", "granite_swa"),
    (r"granite.*moe|granite.*a\d+m", "granitemoe"),
    (r"granite", "granite"),
    (r"olmoe", "olmoe"),
    (r"flex-?olmo", "flex_olmo"),
    (r"molmo", None),  # with a tower
    (r"olmo-?hybrid", "olmo_hybrid"),
    (r"olmo-?3", "olmo3"),
    (r"olmo-?2", "olmo2"),
    (r"olmo", "olmo"),
    (r"glm-?4\.(1v|6v-flash)", "glm4v_text"),
    (r"glm-?4\.7-flash", "glm4_moe_lite"),
    (r"glm-?4\.(5|6|7)", "glm4_moe"),
    (r"glm-?4-0414|glm-?4-32b|glm-?z1|glm-?4-(9b|32b)-0", "glm4"),
    (r"glm-?4", "glm"),
    (r"lfm2.*a\d+b", "lfm2_moe"),
    (r"lfm2", "lfm2"),
    (r"dbrx", "dbrx"),
    (r"jamba", "jamba"),
    (r"mamba-?2(?!\.)|mamba-codestral", "mamba2"),
    (r"mamba", "mamba"),
    (r"trinity", "afmoe"),
    (r"\bbeam-\d", "beam"),
    (r"kimi-linear", "kimi_linear"),
    (r"ling-3", "bailing_hybrid"),
    (r"hunyuan-a\d+b", "hunyuan_v1_moe"),
    (r"hunyuan-\d", "hunyuan_v1_dense"),
    (r"\bhy3|\bhy-?mt-?2.*a\d+b", "hy_v3"),
    (r"dots\.llm1", "dots1"),
    (r"ernie-?4\.5.*a\d+b", "ernie4_5_moe"),
    (r"ernie-?4\.5", "ernie4_5"),
    (r"command-?a-plus", "cohere2_moe"),
    (r"command-?r7b|command-?a", "cohere2"),
    (r"north-\w+-vision", "cohere_compass_text"),
    (r"zaya", "zaya"),
    (r"command|cohere|aya", "cohere"),
    (r"seed-?oss", "seed_oss"),
    (r"solar-open", "solar_open"),
    (
        r"seed-?coder|smollm|tiny-?llama|code-?llama|open-?llama|vicuna|\byi\b|arcee-sn|solar",
        "llama",
    ),
    (r"laguna-[a-z]+-\d", "laguna"),
    (r"mistral-large-4", "mistral_large4_text"),
    (r"mistral-small-4", "mistral4"),
    (r"shieldstral|ministral-3|devstral-(small-)?2-|mistral-medium-3\.5", "ministral3"),
    (r"mistral|zephyr|openhermes|ministral|magistral|devstral", "mistral"),
    (r"diffllama", "diffllama"),
    (r"llama", "llama"),
)
# Of vision-language models, the model_type of the whole.
VISION_FAMILIES = (
    (r"qwen-?3[-_]?vl.*a\d+b", "qwen3_vl_moe"),
    (r"qwen-?3[-_]?vl", "qwen3_vl"),
    (r"qwen-?2\.5[-_]?vl", "qwen2_5_vl"),
    (r"qwen-?2[-_]?vl", "qwen2_vl"),
    (r"qwen-?3\.\d-flash-next|qwen-?4-exp", "qwen4_exp"),
    (r"qwen-?3\.\d.*a\d+b|nex-n2\.5-mini", "qwen3_5_moe"),
    (r"qwen-?3\.\d", "qwen3_5"),
    (r"internvl", "internvl"),
    (r"gemma-?3n", "gemma3n"),
    (r"gemma-?3-(4|12|27)b", "gemma3"),
    (r"gemma-?4-12b", "gemma4_unified"),
    (r"gemma-?4", "gemma4"),
    (r"glm-?5\.3-flash", "glm5_next"),
    (r"glm-4\.6v", "glm46v"),
    (r"glm-4\.5v", "glm4v_moe"),
    (r"glm-4\.\dv", "glm4v"),
    (r"smolvlm", "smolvlm"),
    (r"llama-?3\.2.*vision", "mllama"),
    (r"llama-?4", "llama4"),
    (r"vip-?llava", "vipllava"),
    (r"video-llava", "video_llava"),
    (r"llava-next-video", "llava_next_video"),
    (r"llava-(v1\.6|next)", "llava_next"),
    (r"llava-onevision(?!-1)", "llava_onevision"),
    (r"pixtral|llava(?!-onevision-1)", "llava"),
    (r"idefics-?3", "idefics3"),
    (r"molmo-?2", "molmo2"),
    (r"video-?llama-?3", "video_llama_3"),
    (r"phi-4-multimodal", "phi4_multimodal"),
    (r"granite-(for-)?docling", "granite_docling"),
    (r"kimi-k2\.\d", "kimi_k25"),
    (r"lfm2.*-vl", "lfm2_vl"),
    (r"paddleocr-vl", "paddleocr_vl"),
    (r"north-\w+-vision", "cohere_compass"),
    (r"command-a-vision", "cohere2_vision"),
    (r"aya-vision", "aya_vision"),
    (r"ernie-?4\.5-vl.*a\d+b", "ernie4_5_vl_moe"),
    (
        r"shieldstral|mistral-small-(3\.[12]|4)|ministral-3|magistral-small-2509|"
        r"mistral-medium-3\.5",
        "mistral3",
    ),
    (r"moss-vl", "moss_vl"),
    (r"apertus-v?1\.5", "apertus1p5"),
)
AUDIO_MODEL = re.compile(r"voxtral|omni\b|audio|[-_]tts\b")
HEARING_MODEL = re.compile(r"gemma-?3n|gemma-?4|phi-?4-?multimodal|minicpm-?o")  # beside words
MULTIMODAL_MODEL = re.compile(
    r"[-_.]vl\d?\b|\bvl[-_]|vision|pixtral|smolvlm|llava|internvl|kimi-vl|glm-4\.\dv|"
    r"minicpm-[vo]|ocr\b|\bovis|\bemu3"
)
# Mixtures whose files hold numbers that are not read, whose code is not transformers' own, or that
# were not tried.
MOE_MODEL = re.compile(
    r"deepseek[-_]?v4|minimax-?m3|kimi-k2|ling[-_](mini|flash|1t|[12])|ring[-_](mini|flash)|arctic|"
    r"grok|step-3|"
    r"\bmimo(?!-7b|-v2-flash)"
)
MOE_CAUSE = "mixtures of experts whose files or code are of another kind, or not tried yet"
MIXTURE = re.compile(
    r"gpt[-_]oss|dbrx|deepseek[-_]?(v3|r1)(?!.*distill)|scout|maverick|\d+b[-_]\d+e\b|llama-?4|"
    r"glm-?5|minimax|mimo-v2|"
    r"nemotron-3(?!-nano-4b)|nemotron[-_](ultra|super)[-_]?v?3|mixtral|"
    r"laguna|moe\b|moe[-_]|\d+x\d+b|[-_]a\d+(\.\d+)?b\b|deepseek[-_]?v2|glm-?4\.[57]|hunyuan-a|hy3|olmoe|"
    r"qwen3(\.\d-flash)?-next|"
    r"nex-n2|trinity|jamba|dots\.|ling-3|kimi-linear|flex-?olmo|mistral-small-4|solar-open|command-?a-plus"
)
FIRST_QWEN = re.compile(r"(?<![\w.-])qwen-(1[._]8b|7b|14b|72b)")
DIFFUSION_MODEL = re.compile(
    r"labs-diffusion|diffusiongemma|\bllada|(?<![a-z])dream-(v0|7b|coder)|twotower"
)
HYBRID_MODEL = re.compile("nemotron-flash")  # whose code is not transformers'
# Of FP8 and MXFP4 their config says whether they are read; of these it must be a kind that is.
PACKED_MODEL = re.compile("gptq|awq|aqlm|nvfp4")
QUANTIZED_MODEL = re.compile(
    r"^(?!.*(gptq|awq|aqlm|nvfp4)).*"
    r"([-_]int[48]\b|[-_]fp4\b|(?<!bnb)[-_][48]-?bit)"
)
# Models whose names say that their files are in FP8, for which transformers keeps them so.
FP8_MODEL = re.compile(r"^(?!.*(bf16|nvfp4|bnb)).*[-_]fp8\b")
# Of which only their config says it.
MAYBE_FP8_MODEL = re.compile(
    r"^(?!.*(bf16|fp8|nvfp4|bnb|distill)).*(minimax-m2|deepseek-(v3|r1)\b|mimo-v2|"
    r"devstral-(2|small-2)-|ministral-3-\w+-instruct|mistral-(large-3|small-4|medium-3\.5)-)"
)
KEPT_IN_FP8 = (
    "the base stays in FP8 there, and the inputs of its linear layers are rounded to FP8 too; it "
    "is dequantized here, and computed in 16 bits"
)
MAYBE_KEPT_IN_FP8 = (
    f"where the base's config.json has a quantization_config of quant_method fp8, {KEPT_IN_FP8}"
)
DEQUANTIZED = "the base is packed there, and dequantized here: the same numbers, in 16 bits each"
# update_dtype of transformers' AwqQuantizer, and WQLinear_GEMM of AutoAWQ, which LLaMA-Factory's
# model/model_utils/quantization.py and ms-swift's model/model_meta.py ask for
DEQUANTIZED_AWQ = (
    "the base is packed there, and its layers compute in float16 under bf16 too; dequantized here, "
    "its numbers are rounded to the run's 16 bits"
)
# fp4_cute of its integrations/kernels, "native W4A4"
INPUTS_IN_4_BITS = (
    "on a Blackwell GPU the inputs of experts in NVFP4 are rounded to 4 bits too there, never here"
)
REFUSED_NAMES = {
    AUDIO_MODEL: "audio",
    MULTIMODAL_MODEL: "multimodal",
    MOE_MODEL: MOE_CAUSE,
    FIRST_QWEN: "a model whose code is not in transformers",
    DIFFUSION_MODEL: "diffusion",
    HYBRID_MODEL: "hybrid or linear attention",
    QUANTIZED_MODEL: "quantized weights",
}
BITSANDBYTES_MODEL = re.compile(r"\bbnb\b")  # stored quantized, and loaded as it is


IMAGE_KEYS: Mapping[str, tuple[str, ...]] = {
    "Axolotl": ("processor_type", "is_multimodal"),
    "LLaMA-Factory": (
        "image_max_pixels",
        "freeze_vision_tower",
        "freeze_multi_modal_projector",
        "freeze_language_model",
        "model_class",  # of v1
    ),
}
NOT_OF_TEXT = re.compile("vision|visual|image|projector|audio")  # parts that get no adapters here
# Automodel's own classes with an auxiliary loss
BALANCED = re.compile(r"gpt-?oss|qwen-?3.*a\d+b|qwen3-next|ernie-4\.5.*a\d+b|laguna")
AUTOMODEL_ADAPTERS = (
    "peft: adapters have the base's dtype and another start there, fp32 and peft's start here"
)
AUTOMODELS_START = "peft: adapters have another start there, peft's start here"
OTHER_LAYERS = (
    "all linear layers but the head here, for this model's code is its own: one of another name "
    "gets no adapter there"
)
WITH_HEAD = [ALL_LINEAR, "lm_head"]
NO_SUCH_LAYER = "no layer is known by this name here, and none gets an adapter by it"
# a layer by its number, or a part of one that is not named by its end
PART_OF_MODEL = re.compile(r"[.*]\d+[.*]|[\[\]?]")
BY_ITS_END = "layers are named by the end of a pattern here, in every block of the model"
# of a layer's experts, to which a pattern that matches all that are called so gives adapters
EXPERT_PARAMETERS = ("experts.gate_up_proj", "experts.down_proj")
# Gate._compute_aux_loss of its components/moe/layers.py, and _set_moe_aux_loss_backward_scale of
# its recipes/base_recipe.py, beside load_balancing_loss_func of transformers
BY_LAYER = (
    "of each layer and micro-batch there, over the experts of a token: layers / experts of a token "
    "times as much where all layers are alike; of all layers and the whole step together here"
)
# _route_scores of the same, whose scores it takes
BY_BIASES = (
    "of each layer and micro-batch there, of all layers and the whole step together here; there "
    "of the experts that the routers' biases choose, here of those with the highest scores"
)
OTHER_EXPERTS = {
    "ernie4_5_moe": BY_BIASES,
    "laguna": f"{BY_BIASES}; by a token's sigmoids, divided by their sum, there, by a softmax here",
}
AUXILIARY = (
    "the routers' auxiliary loss of the model's config is added there; router_aux_loss_coef adds "
    "it here, {}"
)
NO_AUXILIARY = "no auxiliary loss is added there for this class"
# Whose losses over experts in 4 bits are not proven: the first draws experts at random in training.
UNTRIED_IN_FEW_BITS = ("phimoe", "bailing_hybrid", "qwen4_exp_text")
FEW_BITS = (*LOAD_KEYS, "quantization_bit")
MOE_KEYS = ("dsv4_fp4_grouped_mode", "use_moe")
EXPERTS_DEQUANTIZED = (
    "the experts are in 4 bits there too, and dequantized here as they are read: 16 bits a number"
)


def guess_family(name: str) -> str | None:
    """Returns the model_type that a model's name says; None where it says none.

    >>> guess_family("mistralai/Mixtral-8x7B-v0.1"), guess_family("org/ours")
    ('mixtral', None)
    """
    lower = name.lower()
    return next((family for pattern, family in FAMILIES if re.search(pattern, lower)), None)


def has_tower(name: str) -> bool:
    """Whether a model's name says that it has a vision tower.

    >>> has_tower("google/gemma-3-27b-it"), has_tower("google/gemma-3-1b-it")
    (True, False)
    """
    return any(re.search(pattern, name.lower()) for pattern, _ in VISION_FAMILIES)


def guess_vision_family(name: str) -> str | None:
    """Returns the model_type of a model with its tower, by its name; None where it says none.

    >>> (
    ...     guess_vision_family("Qwen/Qwen2-VL-7B-Instruct"),
    ...     guess_vision_family("meta-llama/Llama-3.1-8B"),
    ... )
    ('qwen2_vl', 'llama')
    """
    lower = name.lower()
    named = next((family for pattern, family in VISION_FAMILIES if re.search(pattern, lower)), None)
    return named or guess_family(name)


def is_mixture(name: str) -> bool:
    """Whether a model's name says that it is a mixture of experts.

    >>> is_mixture("mistralai/Mixtral-8x7B-v0.1"), is_mixture("google/gemma-4-31B")
    (True, False)
    """
    return any(pattern.search(name.lower()) for pattern in (MIXTURE, MOE_MODEL))


def name_model(settings: ToolFile) -> str:
    """Returns the model of a file, by whatever key the tool has for it."""
    return str(
        settings.get("base_model")
        or settings.get("model_name_or_path")
        or (settings.get("model") if isinstance(settings.get("model"), str) else "")
        or read_section(settings, "model").get("pretrained_model_name_or_path")
        or read_section(read_section(settings, "model"), "config").get(
            "pretrained_model_name_or_path"
        )
        or read_section(settings, "checkpointer").get("checkpoint_dir")
        or ""
    )


def _find_sound(settings: ToolFile) -> Iterator[Unsupported]:
    """Yields the data sets of a model that takes sound in whose names the word audio stands."""
    entries = settings.get("datasets")
    for entry in entries if isinstance(entries, list) else []:
        path = str(entry.get("path")) if isinstance(entry, dict) else ""
        if "audio" in re.split("[^a-z]+", path.rpartition("/")[2].lower()):
            yield f"datasets: {path}", "audio", True


def find_refused_models(settings: ToolFile) -> Iterator[Unsupported]:
    """Yields why a file's model is not trained here, by its name and the keys that go with it."""
    for key in MOE_KEYS:
        value = settings.get(key)
        if value not in (None, False, 1, ""):
            yield f"{key}: {value}", MOE_CAUSE, True
    name = name_model(settings)
    lower = name.lower()
    if HEARING_MODEL.search(lower):
        yield from _find_sound(settings)
    if (Path(name).expanduser() / CONFIG_FILE).is_file():
        return  # by which the rules of a run judge it
    family = guess_family(name) or ""
    is_untried = family in UNTRIED_IN_FEW_BITS or not has_fused_experts(family)
    asks = any(settings.get(key) for key in FEW_BITS)
    is_stored = BITSANDBYTES_MODEL.search(lower)  # whose experts are read as plain numbers
    if is_mixture(name) and asks and is_untried and not is_stored:
        yield f"{name} in few bits", "quantized experts", True
    for pattern, cause in REFUSED_NAMES.items():
        takes_images = (
            pattern in (MULTIMODAL_MODEL, HYBRID_MODEL)
            and guess_vision_family(lower) in IMAGE_FAMILIES
        )
        if pattern.search(lower) and not takes_images:
            yield name, cause, True


def report_classes(settings: ToolFile, conversion: Conversion) -> None:
    """Reports what Automodel's own classes of models do otherwise, and the layers that get no
    adapters there; adds which parts of Llama 3.2 Vision torchtune trains.
    """
    if conversion.tool == "torchtune" and conversion.images:
        _adapt_fusion(read_section(settings, "model"), name_model(settings), conversion)
    if conversion.tool != "Automodel":
        return
    peft = read_section(settings, "peft")
    _report_auxiliary(settings, conversion)
    if peft:
        conversion.recipe["use_peft"] = True
        is_in_fp32 = "float32" in str(peft.get("lora_dtype"))
        conversion.remarks.append(AUTOMODELS_START if is_in_fp32 else AUTOMODEL_ADAPTERS)
        family = guess_family(name_model(settings)) or ""
        _adapt_automodel_targets(family, peft, conversion)
        if not _may_adapt_head(settings) and conversion.recipe["lora_target_modules"] == WITH_HEAD:
            conversion.recipe["lora_target_modules"] = ALL_LINEAR
        _report_router(family, settings, conversion)


# Gemma4Gate of its models/gemma4_moe
ROUTER_UNADAPTED = (
    "the adapter of a router's proj changes nothing there, where the router reads the weight "
    "alone; here it is trained"
)


def _report_router(family: str, settings: ToolFile, conversion: Conversion) -> None:
    """Reports the adapters of routers that have no effect in a class of Automodel's own."""
    targets = conversion.recipe["lora_target_modules"]
    is_adapted = ALL_LINEAR in targets or "proj" in targets
    is_own = is_mixture(name_model(settings)) and not is_of_transformers(settings)
    if family == "gemma4_text" and is_own and is_adapted:
        conversion.add_difference("lora_target_modules", targets, ROUTER_UNADAPTED)


# materialize_lm_weight of its components/loss/linear_ce.py, which reads the head's weight alone
FUSED_LOSS = "FusedLinearCrossEntropy"


def _may_adapt_head(settings: ToolFile) -> bool:
    """Whether Automodel trains an adapter of the output head: the fused loss leaves it at 0, and
    Baichuan's head is no linear layer.
    """
    is_fused = str(read_section(settings, "loss_fn").get("_target_")).endswith(FUSED_LOSS)
    return not is_fused and "baichuan" not in name_model(settings).lower()


def is_of_transformers(settings: ToolFile) -> bool:
    """Whether Automodel loads transformers' class of a model that it has one of its own for."""
    model, bits = (read_section(settings, key) for key in ("model", "quantization"))
    return bool(model.get("force_hf") or any(bits.get(key) for key in LOAD_KEYS))


def _report_auxiliary(settings: ToolFile, conversion: Conversion) -> None:
    """Reports how much of the routers' auxiliary loss Automodel adds."""
    name = name_model(settings)
    model = read_section(settings, "model")
    asked = model.get("router_aux_loss_coef")
    is_balanced = BALANCED.search(name.lower()) and not is_of_transformers(settings)
    how = OTHER_EXPERTS.get(str(guess_family(name)), BY_LAYER)
    if is_balanced and asked is None:
        conversion.add_difference("model", name, AUXILIARY.format(how))
    elif is_balanced and asked:
        conversion.add_difference("model.router_aux_loss_coef", asked, how)
    elif asked:
        conversion.recipe.pop("router_aux_loss_coef", None)
        conversion.add_remark("model.router_aux_loss_coef", asked, NO_AUXILIARY)


def _adapt_automodel_targets(family: str, peft: Mapping[str, Any], conversion: Conversion) -> None:
    excluded = convert_names(peft.get("exclude_modules")) or []
    conversion.excluded_layers = frozenset(name.split(".")[-1] for name in excluded)
    targets = peft.get("target_modules")
    names = convert_names(targets) or []
    unadaptable = find_family(family).unadaptable
    left_out = [
        name
        for name in excluded
        if not NOT_OF_TEXT.search(name)
        and "head" not in name  # all-linear leaves the head out
        and name.split(".")[-1] not in unadaptable
    ]
    if left_out:
        note = "they get adapters here"
        conversion.add_difference(
            "peft.exclude_modules", left_out, note, "LoRA without some layers"
        )
    is_all = peft.get("match_all_linear") or targets in (["*"], "*") or excluded
    layers = find_linear_layers(family)
    projections = sorted(layer for layer in layers if layer.endswith("_proj"))
    if is_all and not any("head" in name for name in excluded):
        conversion.recipe["lora_target_modules"] = list(WITH_HEAD)
    elif is_all:
        conversion.recipe["lora_target_modules"] = ALL_LINEAR
    elif targets and names != ["*_proj"]:
        _name_automodel_layers(names, layers, conversion)
    else:  # the default, too
        if len(projections) < len(layers):
            conversion.recipe["lora_target_modules"] = projections
        else:
            conversion.recipe["lora_target_modules"] = "all-linear"
        if not layers:
            conversion.add_difference("peft.target_modules", "*_proj", OTHER_LAYERS)
    names_experts = any(name == "*" or name.endswith(".experts") for name in names)
    if names_experts and has_fused_experts(family):
        conversion.recipe["lora_target_parameters"] = list(EXPERT_PARAMETERS)


def _name_automodel_layers(
    patterns: Sequence[str], layers: Collection[str], conversion: Conversion
) -> None:
    """Names the layers by the ends of patterns; those of a Llama where the family is not known."""
    known = layers or LINEAR_LAYERS.keys()
    named: dict[str, None] = {}
    for pattern in patterns:
        end = pattern.rpartition(".")[2]
        matching = sorted(layer for layer in (*known, "lm_head") if fnmatch.fnmatchcase(layer, end))
        named |= dict.fromkeys(matching)
        if PART_OF_MODEL.search(pattern) or (end == "*" and pattern != "*"):
            conversion.add_difference("peft.target_modules", pattern, BY_ITS_END)
        if not matching and end != "experts":
            conversion.add_difference("peft.target_modules", pattern, NO_SUCH_LAYER)
    conversion.recipe["lora_target_modules"] = list(named)


def find_images(tool: Tool, settings: ToolFile) -> tuple[str, str | None]:
    """Finds (the key by which a file trains on images, the model_type with the tower); none if it
    trains on text.
    """
    components = " ".join(find_texts(settings, "_component_"))
    if tool == "torchtune" and re.search("vision|multimodal|clip", components):
        return "model", "mllama"  # its only family
    key = _find_image_key(tool, settings)
    if key is None:
        return "", None
    name = name_model(settings)
    config = read_json_object(Path(name).expanduser() / "config.json")
    return key, str(config["model_type"]) if config.get("model_type") else guess_vision_family(name)


def _find_image_key(tool: Tool, settings: ToolFile) -> str | None:
    for key in IMAGE_KEYS.get(tool, ()):
        if settings.get(key) is not None:
            return key
    is_template_of_images = re.search("_vl$|_vl_", str(settings.get("template")))
    is_data_of_images = re.search("mllm|vlm|_vl|multimodal", str(settings.get("dataset")))
    if tool == "LLaMA-Factory" and (is_template_of_images or is_data_of_images):
        return "template"
    if tool == "Automodel" and reads_images(settings):
        return "model"
    return None


# functions of Automodel's whose rows are texts, in its recipe for images too
OF_TEXTS = re.compile(r"tulu3|ChatDataset$")


def reads_images(settings: ToolFile) -> bool:
    """Whether a file of Automodel's trains on rows with images."""
    rows = str(read_section(settings, "dataset").get("_target_"))
    return runs_for_images(settings) and not OF_TEXTS.search(rows)


def runs_for_images(settings: ToolFile) -> bool:
    """Whether a file of Automodel's is of its recipe for images, which reads texts, too."""
    target = f"{settings.get('recipe')} {read_section(settings, 'model').get('_target_')}"
    return re.search("ForVLM|ImageText", target) is not None


# Names of Axolotl and LLaMA-Factory for templates -> ours. Their alpaca, vicuna, and zephyr write
# other turns.
TEMPLATES = {
    "llama3": "llama3",
    "llama-3": "llama3",
    "llama4": "llama4",
    "chatml": "chatml",
    "yi": "chatml",
    "smollm": "chatml",
    "qwen": "qwen",
    "qwen_25": "qwen",
    "qwen2_5": "qwen",
    "qwen3": "qwen3",
    "qwen3_nothink": "chatml",
    "qwen3_5_nothink": "chatml",
    "qwen3_5": "qwen3.5",
    "qwen3_6": "qwen3.6",
    "gemma": "gemma",
    "gemma2": "gemma",
    "gemma3": "gemma",
    "gemma3n": "gemma",
    "mistral": "mistral",
    "mistral_v1": "mistral-v1",
    "mistral_v2v3": "mistral-v3",
    "mistral_v3_tekken": "mistral-v3-tekken",
    "mistral_v7_tekken": "mistral-v7-tekken",
    "mistral_small": "mistral-v7-tekken",
    "phi_3": "phi3",
    "phi_35": "phi3",
    "phi": "phi3",
    "phi4": "phi4",
    "phi_4": "phi4",
    "deepseek3": "deepseek-v3",
    "deepseek_v2": "deepseek-v3",
    "deepseek_v3": "deepseek-v3",
    "cohere": "command-r",
    "aya": "command-r",
    "granite3": "granite",
    "llama2": "inst",
    "falcon_h1": "hermes",
    "nemotron_h": "chatml",
    "gemma4": "gemma4",
    "gemma4_unified": "gemma4",
}
FIRST_TOKEN = "the BOS token begins a conversation there"
OWN_SYSTEM = "a system message of its own there, where a row has none"
NO_SYSTEM = "system messages are left out there"
THOUGHT = "an empty thought in every turn there, in the last one here"
THOUGHT_OF_IMAGES = (
    "an empty thought before an answer without one there; what the tokenizer's template writes here"
)
OWN_THOUGHT = (
    "an empty thought, or its end, that the tokenizer's template writes before an answer is not "
    "trained there; it is here"
)
ONE_TEXT = (
    "one text for all answers of a row there, with an empty thought in the last one; here each "
    "follows the prompt of inference, and what that lacks of an empty thought is trained"
)
# _encode_normal_content_assistant_message of mistral-common's tokens/tokenizers/instruct.py
ANSWERS_STRIPPED = "chat_template: spaces at the end of an answer are left out there"
# MultiModalChatDataCollator, which trains all that stands between the marks of an answer
THOUGHT_WHOLE = (
    "a thought that the template writes before an answer, an empty one too, is trained from its "
    "first token on there; here from the end of the prompt of inference, which may open it"
)
# _IMSTART_TEMPLATE_PROCESSORS of Automodel's components/datasets/vlm/collate_fns.py: of these
# families all is trained that follows <|im_start|>assistant; of others what follows the start of an
# answer without a thought, as the template writes it
MARKED_BY_HEADER = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
EARLIER_THOUGHTS = (
    "of a row with several answers one text is made there, in which the template leaves out the "
    "thinking of all but the last; here each has its own, after the prompt of inference"
)
MAYBE_EARLIER_THOUGHTS = (
    "of a row with several answers one text is made there, without the thinking of all but the "
    "last where the tokenizer's template leaves it out; here each has its own, after the prompt of "
    "inference"
)
EARLIER_ENDS = (
    "answers before the last one of a row end with <|end|> there, all with <|return|> here"
)
SCORED_END = (
    "the EOS token follows an answer here, and is scored; there the line break before it is"
)
EMPTY_SYSTEM = (
    "a row whose system column is empty has a system message without words there, none here"
)
SYSTEM_REFUSED = (
    "each row has a system message there, which this template refuses: no run ends; here one with "
    "words begins the question"
)
REFUSING_SYSTEMS = ("gemma",)  # templates of Axolotl's
# Of Axolotl, by bradley_terry.chat_template.
LOST_WORDS = ("gemma4", "gemma4_unified", "mistral_v2v3", "mistral_v3_tekken")
# templates/gemma4.jinja of Axolotl
CALLS_THOUGHT_OF = (
    "an answer's reasoning is written there only beside a tool call; here it is written, and "
    "trained, wherever it follows the last question"
)
# (tool, its name) -> what it writes otherwise than our template, by its rendering
# (tests/convert/test_token_ids.py).
OTHER_TURNS: Mapping[tuple[Tool, str], str] = {
    **{("LLaMA-Factory", name): THOUGHT for name in ("qwen3", "qwen3_5", "qwen3_6")},
    (
        "LLaMA-Factory",
        "gemma4",
    ): f"{OWN_SYSTEM}, which asks for thoughts, and an empty thought in every turn",
    (
        "LLaMA-Factory",
        "gemma2",
    ): "the token after an answer is trained too there, at the end the EOS token",
    ("torchtune", "phi3_mini_tokenizer"): FIRST_TOKEN,
    (
        "torchtune",
        "phi4_tokenizer",
    ): "no <|im_end|> follows an answer there: the model does not learn to end",
    ("Axolotl", "phi_3"): FIRST_TOKEN,
    ("Axolotl", "phi_4"): OWN_SYSTEM,
    ("Axolotl", "mistral_v7_tekken"): OWN_SYSTEM,
    ("Axolotl", "mistral_v2v3"): NO_SYSTEM,
    ("Axolotl", "mistral_v3_tekken"): NO_SYSTEM,
    **{("Axolotl", name): ONE_TEXT for name in ("qwen3", "qwen3_5")},
    ("Axolotl", "deepseek_v2"): "an empty line follows a system message there",
}
# Axolotl's templates that write a system message of their own where a row has none -> the families
# whose own template writes the same one before images.
SYSTEM_OF_IMAGES: Mapping[str, tuple[str, ...]] = {
    "qwen2_vl": ("qwen2_vl", "qwen2_5_vl"),
    "mistral_v7_tekken": (),
}
# What Axolotl's templates write otherwise of a row with tools, by their rendering. Others write the
# same, or one of the two refuses the row.
OTHER_TOOLS: Mapping[str, str] = {
    "falcon_h1": (
        "of a row with tools, these are described in other words there, and the calls are left out"
    ),
    **dict.fromkeys(
        ("chatml", "nemotron_h"),
        "of a row with tools, their description and the calls are left out there",
    ),
    "mistral_v7_tekken": "of a row with tools, their description is left out there",
    "deepseek_v2": "of a row with tools, the calls and their results are left out there",
    "qwen3_5": (
        "of a row with tools, their description and the calls are in JSON there, in XML here"
    ),
}
# Of LLaMA-Factory: names of its template.py, of whose tools its data/tool_utils.py writes what ours
# write.
SAME_TOOLS = ("qwen",)
TOOLS_IN_ITS_WORDS = (
    "of a row with tools, their description, the calls or the results are written in its own words "
    "there, in the chat template's here"
)
# Axolotl's templates that write a space before an answer, which SentencePiece makes a token of its
# own.
SPACED = ("mistral_v1", "mistral_v2v3")
SPACE_TRAINED = (
    "the token of the space before an answer is trained here, not there, where a tokenizer has one "
    "for it"
)
# Axolotl's templates that keep, or trim, the white space around a turn otherwise than ours.
OTHER_SPACE = {
    "qwen3_5": "white space around a turn is kept there, trimmed here",
    "mistral_v2v3": "white space around an answer is trimmed there, kept here",
}
# LLaMA-Factory trains their line break after an answer.
BREAK_TRAINED = "the line break after an answer is trained too there"
HEADER = "the header of an answer is trained too there"
HEADER_TRAINED = f"chat_template: {HEADER}, about three tokens"
BREAKS = ("chatml", "hermes", "qwen", "qwen3", "qwen3.5", "qwen3.6", "gemma", "phi3", "granite")
# its templates of images that write one
BREAKS_OF_IMAGES = re.compile(
    "chatml|qwen|(?<!pali)gemma|paligemma_chat|intern|minicpm|keye|lfm2|moss|mimo|yi|youtu"
)
# its templates of images by which it adds an empty thought (ReasoningTemplate)
THOUGHTS_OF_IMAGES = re.compile(
    "(ernie|keye|kimi|mimo|qwen3)_vl|gemma4n?|glm4v|glm4_5v|qwen3_[56]|qwen3_omni"
)
# Models whose tokenizers' templates write an empty thought: in every turn, or in the last one.
THINKING = re.compile(r"glm-?4\.[567]|nex-n2|nemotron-?3-|kimi-k2-thinking|qwen-?3\.8")
FORGETTING = re.compile(r"glm-?4\.[567]|nemotron-?3-|kimi-k2-thinking")  # in earlier turns
THINKING_LAST = re.compile(r"qwen-?3(?!\.8|.*(instruct|coder|embedding|guard|omni))")
# Of these some may.
MAYBE_THINKING = re.compile(
    r"think|reason|nemotron-?3\.|glm-?5|minimax-?m|deepseek-?(r1|v3\.|v4)|kimi|hunyuan|\bhy3|ernie|"
    r"mimo|seed-oss|\bbeam-\d|minicpm-?5|deepcoder"
)
# templates that trim a turn's text; LLaMA-Factory's do not
TRIMMED = ("llama3", "gemma", "mistral", "command-r")
# _tokenize_body of the tokenizers in torchtune's transforms of Llama 3.2 Vision and Llama 4
MESSAGES_TRIMMED = "chat_template: white space around a message is left out there"
# tokenize_messages and __call__ of torchtune's Phi3MiniTokenizer; the model's own tokenizer has
# these tokens with rstrip, and puts a space before every text
OF_PHI3 = (
    "chat_template: a space and a line break follow <|user|>, <|assistant|> and <|end|> there, as "
    "tokens of their turns; here the model's tokenizer leaves them out",
    "chat_template: the first word of a question or a system message, and of an answer where all "
    "turns are trained, has no space before it there; here the model's tokenizer writes one, which "
    "makes it another token",
    "chat_template: spaces at the end of a turn are left out there, kept here",
    "chat_template: since 0.7 the EOS token follows each answer there, and the BOS token begins "
    "each question; here an EOS token ends the row, and no BOS token is written",
)
# torchtune's tokenizers, which have a chat format built in -> ours.
TOKENIZERS = {
    "llama2_tokenizer": "inst-torchtune",
    "mistral_tokenizer": "inst-torchtune",
    "gemma_tokenizer": "joined",
    "llama3_tokenizer": "llama3",
    "qwen2_tokenizer": "chatml",
    "qwen2_5_tokenizer": "chatml",
    "qwen3_tokenizer": "chatml",
    "phi3_mini_tokenizer": "phi3",
    "phi4_tokenizer": "phi4",
}
# Models whose turns mistral-common writes, by the version of their tokenizers; those of Devstral
# and of the first Magistral by the tokens of Axolotl's tests/prompt_strategies.
MISTRAL_COMMON = {
    r"ministral-3-|magistral-small-25(07|09)|devstral-small-2507": "mistral-v13-tekken",
    r"mistral-small-3\.2|magistral-small-2506": "mistral-v11-tekken",
    r"mistral-small-(3\.1|24b)|devstral-small-2505": "mistral-v7-tekken",
    r"ministral-8b|nemo": "mistral-v3-tekken",
}
WITH_SYSTEM_LAST = ("mistral-v3-tekken",)  # of these
# Templates whose turns do not end with a model's EOS token as such -> the token at the end of a
# turn.
TURN_ENDS: Mapping[str, str] = {
    **dict.fromkeys(
        ("chatml", "hermes", "qwen", "qwen3", "qwen3.5", "qwen3.6", "phi4"), "<|im_end|>"
    ),
    "llama3": "<|eot_id|>",
    "llama4": "<|eot|>",
    "gemma": "<end_of_turn>",
    "gemma4": "<turn|>",
    "phi3": "<|end|>",
}
FAMILY_TEMPLATES = {
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "gemma3n_text"), "gemma"),
    "gemma4_text": "gemma4",
    "phi3": "phi3",
}
# Models whose EOS token ends their turns too, by their names.
ENDS_AS_EOS = (
    (r"qwen-?[12]\S*(instruct|chat|-vl)|qwen-?3(?!.*base)|smollm\S*instruct|phi-?4", "<|im_end|>"),
    (r"llama-?3\S*instruct", "<|eot_id|>"),
    (r"llama-?4\S*instruct", "<|eot|>"),
)
OTHER_STYLES = ("alpaca", "metharme")  # Axolotl's names that are of no model
OWN_TEMPLATE = ("tokenizer_default", "default", "empty")


def set_template(key: str, value: Any, pair: Counterpart, conversion: Conversion) -> None:
    """Sets our template for the tool's, or reports that none is known here."""
    name = str(value)
    if conversion.images:
        conversion.add_remark(key, value, "the tokenizer's own template, which writes the images")
        if conversion.tool == "Axolotl":
            _compare_templates_of_images(key, name, conversion)
        if conversion.tool == "LLaMA-Factory" and BREAKS_OF_IMAGES.search(name):
            conversion.add_remark(key, value, BREAK_TRAINED)
        if conversion.tool == "LLaMA-Factory" and THOUGHTS_OF_IMAGES.fullmatch(name):
            conversion.add_difference(key, value, THOUGHT_OF_IMAGES)
        return
    if name in OWN_TEMPLATE and pair.key != "template":  # LLaMA-Factory's default writes `Human:`
        return
    ours = TEMPLATES.get(name.lower())
    if ours is not None:
        conversion.recipe["chat_template"] = ours
        compare_turns(key, name, conversion)
    elif conversion.tool == "Axolotl" and name not in OTHER_STYLES:
        conversion.add_remark(
            key, value, "the tokenizer's own template is used; name a file for another"
        )
    else:
        conversion.add_difference(
            key, value, "its turns are not known here; name a file for chat_template"
        )


def _compare_templates_of_images(key: str, name: str, conversion: Conversion) -> None:
    """Reports what Axolotl's template of that name writes otherwise than a family's own."""
    if name in OTHER_SPACE:
        conversion.add_remark(key, name, OTHER_SPACE[name])
    if name in SYSTEM_OF_IMAGES and conversion.images not in SYSTEM_OF_IMAGES[name]:
        conversion.add_difference(key, name, OWN_SYSTEM)


def shows_images(settings: ToolFile) -> bool:
    """Whether rows of torchtune's data sets hold images."""
    components = find_texts(settings, "_component_")
    return any(".datasets.multimodal." in each for each in components)


def add_tokenizers_turns(settings: ToolFile, conversion: Conversion) -> None:
    """Adds the chat format that torchtune's tokenizers and mistral-common have built in, whatever
    the files say.
    """
    if settings.get("tokenizer_use_mistral_common"):
        conversion.remarks.append(ANSWERS_STRIPPED)
    if settings.get("tokenizer_use_mistral_common") and conversion.images:
        conversion.add_difference("tokenizer_use_mistral_common", True, COMMON_TURNS_OF_IMAGES)
    elif settings.get("tokenizer_use_mistral_common"):
        _add_mistral_turns(settings, conversion)
    tokenizer = read_section(settings, "tokenizer")
    component = str(tokenizer.get("_component_"))
    name = TOKENIZERS.get(component.rsplit(".", 1)[-1])
    if component.endswith("llama3_2_vision_transform") and not shows_images(settings):
        name = "llama3"  # the model's own writes a system message into a row without images
    elif component.endswith("_transform"):
        conversion.remarks += [MESSAGES_TRIMMED, HEADER_TRAINED]
    data = str(read_section(settings, "dataset").get("_component_"))
    if name is None or tokenizer.get("prompt_template") or data.endswith("text_completion_dataset"):
        return
    conversion.recipe["chat_template"] = name
    compare_turns("tokenizer._component_", component, conversion)
    if name == "phi3":
        conversion.remarks += OF_PHI3
    if (
        name in ("llama3", "chatml", "phi3", "phi4")
        and conversion.recipe.get("assistant_only_loss") is not False
    ):
        conversion.remarks.append(HEADER_TRAINED)


# encode_user_message of mistral-common's third version, which is that of the second
SYSTEM_LAST = (
    "of a row with a system message and several answers one text is made there, with that message "
    "in the last question alone; here each answer has a text, with it in the last question of that"
)
COMMON_TURNS_OF_IMAGES = (
    "mistral-common writes a system message only where a row has one, and an image at the end of a "
    "question before its words; here the tokenizer's template decides, which may have a system "
    "message of its own"
)


# _convert_content_parts of ChatTemplateStrategy, whose images come by another way
THOUGHTS_LEFT_OUT = (
    "an answer's parts of type thinking are left out there, in 0.18 and 0.21; here they are its "
    "reasoning"
)


def _add_mistral_turns(settings: ToolFile, conversion: Conversion) -> None:
    model = str(settings.get("base_model")).lower()
    name = next(
        (name for pattern, name in MISTRAL_COMMON.items() if re.search(pattern, model)), None
    )
    kinds = find_texts(settings, "type")
    are_turns = any(kind.startswith("chat_template") for kind in kinds) and not settings.get("rl")
    if are_turns:
        conversion.add_difference("tokenizer_use_mistral_common", True, THOUGHTS_LEFT_OUT)
    if name in WITH_SYSTEM_LAST and are_turns:
        conversion.add_difference("tokenizer_use_mistral_common", True, SYSTEM_LAST)
    if name is None:
        note = "the tokenizer's own template is used"
        conversion.add_difference("tokenizer_use_mistral_common", True, note)
    else:
        conversion.recipe["chat_template"] = name


# copy_files of torchtune's checkpointers, fix_jinja_template of LLaMA-Factory's templates, and
# HFMistralTokenizer of Axolotl
SAVED_TEMPLATE = (
    "chat_template: {}, which writes the turns, is saved with the tokenizer here; there {}"
)
SAVED_BY_FACTORY = ("chatml",)  # replace_jinja_template, of the names in TEMPLATES
# add_eos of its trainers, which get Axolotl's rows as texts
SCORED_EOS = "the EOS token follows {} there unless it is that, and is scored; it is not here"
# add_bos_token_if_needed and add_eos_token_if_needed of its ORPO and CPO trainers
ENDS_ADDED = (
    "the tokenizer's BOS token begins a prompt there, and its EOS token ends an answer and is "
    "scored, also where the template writes neither; here what the template writes"
)
SCORED_BREAK = (
    "chat_template: what it writes after the end of an answer, as ChatML's line break, is scored "
    "too there"
)
TOKENIZERS_BOS = (
    "chat_template: a prompt begins with the BOS token that the tokenizer writes by itself there, "
    "where it writes one; the template writes none here"
)
# of a template that is not known here
MAYBE_BOS = (
    "chat_template: a prompt begins with the tokenizer's BOS token there, where it has one, also "
    "under a template that writes none; not here"
)
ASKED_WITH_THOUGHT = "the prompt of a pair ends with an empty thought there, not here"
WITHOUT_BOS = ("chatml", "granite", "phi3", "phi4", "qwen", "qwen3", "qwen3.5", "qwen3.6")
OTHER_ENDS = (
    "the EOS token alone ends a trained turn there: where the tokenizer's template ends turns with "
    "another token, that is trained here alone"
)
CHANNEL = (
    "<|channel|> at the start of an answer is not trained there, nor the name and <|message|> "
    "after it where a row has no thinking; all three are here"
)


def report_turn_ends(settings: ToolFile, conversion: Conversion) -> None:
    """Reports where Axolotl leaves the start of a turn untrained, which gpt-oss writes itself, or
    its end: it trains the EOS token alone, without `eot_tokens`.
    """
    entries = settings.get("datasets")
    entries = entries if isinstance(entries, list) else []
    kinds = [str(entry.get("type")) for entry in entries if isinstance(entry, dict)]
    if settings.get("rl") or not any(kind.startswith("chat_template") for kind in kinds):
        return
    name = name_model(settings)
    if guess_family(name) == "gpt_oss":
        for note in (CHANNEL, EARLIER_THOUGHTS, EARLIER_ENDS):
            conversion.add_difference("datasets.type", "chat_template", note)
    has_own = not settings.get("tokenizer_use_mistral_common")  # which comes later
    if has_own and "chat_template" not in conversion.recipe and not conversion.images:
        report_own_thoughts(name, "datasets.type", "chat_template", conversion)
    end = _find_other_end(name, conversion)
    if end is not None and not settings.get("eot_tokens"):
        note = (
            f"the EOS token alone ends a trained turn there: {end} is not trained unless it is "
            "that; it is here"
        )
        conversion.add_difference("eot_tokens", settings.get("eot_tokens"), note)
    is_unknown = (
        "chat_template" not in conversion.recipe
        and guess_family(name) not in FAMILY_TEMPLATES
        and not any(re.search(pattern, name.lower()) for pattern, _ in ENDS_AS_EOS)
    )
    if has_own and is_unknown and not (settings.get("eot_tokens") or conversion.images):
        conversion.add_remark("eot_tokens", None, OTHER_ENDS)


def _find_other_end(name: str, conversion: Conversion) -> str | None:
    """Returns the token at the end of a turn; None where it is not known, or the model's EOS."""
    recipe = conversion.recipe
    template = str(recipe.get("chat_template") or FAMILY_TEMPLATES.get(guess_family(name) or ""))
    end = TURN_ENDS.get(template)
    eos = recipe.get("special_tokens", {}).get("eos_token")
    if eos is None:
        eos = next(
            (token for pattern, token in ENDS_AS_EOS if re.search(pattern, name.lower())), None
        )
    return None if eos == end else end


def report_saved_template(settings: ToolFile, conversion: Conversion) -> None:
    """Reports which template a tool saves with the tokenizer where it writes turns by another."""
    ours = conversion.recipe.get("chat_template")
    if ours is None or conversion.images or conversion.is_factory_v1:
        return
    if conversion.tool == "torchtune":
        saved = "the model's own tokenizer files are copied"
    elif conversion.tool == "LLaMA-Factory" and settings.get("template") not in SAVED_BY_FACTORY:
        saved = "the tokenizer's own, where it has one"
    elif conversion.tool == "Axolotl" and ours in MISTRAL_COMMON.values():
        saved = "tekken.json, without a template"
    else:
        return
    conversion.remarks.append(SAVED_TEMPLATE.format(ours, saved))


def report_scored_ends(settings: ToolFile, conversion: Conversion) -> None:
    """Reports what TRL's trainers of preferences, which are Axolotl's too, read before a prompt and
    score after an answer.
    """
    if find_method_facts(conversion.recipe).rows not in ("pairs", "ratings"):
        return
    method = conversion.recipe.get("method")
    is_axolotl = conversion.tool == "Axolotl"
    # argilla of Axolotl's prompt_strategies/orpo strips no answer
    if conversion.tool == "TRL" or (is_axolotl and method == "orpo"):
        conversion.remarks.append(SCORED_BREAK)
    adds_ends = method in ("orpo", "simpo")
    if adds_ends and conversion.tool in ("TRL", "Axolotl"):
        conversion.remarks.append(ENDS_ADDED)
    if not is_axolotl:
        return
    end = _find_other_end(name_model(settings), conversion)
    if end is not None and not adds_ends:
        conversion.add_remark("rl", settings.get("rl"), SCORED_EOS.format(end))
    if conversion.recipe.get("chat_template") == "gemma4":
        template = settings.get("chat_template")
        conversion.add_difference("chat_template", template, ASKED_WITH_THOUGHT)
    if adds_ends:
        return
    template = conversion.recipe.get("chat_template")
    template = template or FAMILY_TEMPLATES.get(guess_family(name_model(settings)) or "")
    if template in WITHOUT_BOS:
        conversion.remarks.append(TOKENIZERS_BOS)
    elif template not in TEMPLATES.values():
        conversion.remarks.append(MAYBE_BOS)


def report_own_thoughts(name: str, key: str, value: str, conversion: Conversion) -> None:
    """Reports the empty thoughts that a tokenizer's own template writes; `key: value` asks for
    it.
    """
    lower = name.lower()
    is_marked = conversion.tool != "Automodel" or conversion.images in MARKED_BY_HEADER
    is_marked = is_marked and not conversion.is_factory_v1
    own_thought = THOUGHT_WHOLE if conversion.images and is_marked else OWN_THOUGHT
    # LLaMA-Factory's v1 splits the turns as here
    is_one_text = conversion.tool in ("Axolotl", "Automodel")
    if THINKING.search(lower):
        conversion.add_difference(key, value, own_thought)
        if is_one_text and FORGETTING.search(lower):
            conversion.add_difference(key, value, EARLIER_THOUGHTS)
    elif THINKING_LAST.search(lower):
        if is_one_text:
            conversion.add_difference(key, value, ONE_TEXT)
        if conversion.tool != "Axolotl" or conversion.images:
            conversion.add_difference(key, value, own_thought)
    elif MAYBE_THINKING.search(lower):
        conversion.remarks.append(f"{key}: {value}   ({own_thought})")
        if is_one_text:
            conversion.remarks.append(f"{key}: {value}   ({MAYBE_EARLIER_THOUGHTS})")


def compare_scored_turns(settings: ToolFile, conversion: Conversion) -> None:
    """Reports where a reward model reads another text there, in place of which tokens are trained:
    one is scored.
    """
    conversion.differences = [line for line in conversion.differences if ONE_TEXT not in line]
    for note in (SPACE_TRAINED, BREAK_TRAINED):
        conversion.remarks = [line for line in conversion.remarks if note not in line]
    template = settings.get("chat_template") or settings.get("template")
    if conversion.recipe.get("chat_template") == "phi3":
        conversion.add_difference("chat_template", template, SCORED_END)
    if conversion.tool == "Axolotl":
        note = SYSTEM_REFUSED if template in REFUSING_SYSTEMS else EMPTY_SYSTEM
        conversion.add_difference("datasets.type", "bradley_terry.chat_template", note)
        if template in LOST_WORDS:
            conversion.add_difference(
                "chat_template", template, "words of the answers are left out there"
            )


def compare_turns(key: str, value: str, conversion: Conversion) -> None:
    """Reports where their template of that name and ours differ: in the text, or in the tokens that
    are trained.
    """
    note = OTHER_TURNS.get((conversion.tool, value.rsplit(".", 1)[-1]))
    if note is not None:
        conversion.add_difference(key, value, note)
    if conversion.tool == "Axolotl" and value in ("gemma4", "gemma4_unified"):
        conversion.add_remark(key, value, CALLS_THOUGHT_OF)
    if conversion.tool == "Axolotl" and value in SPACED:
        conversion.add_remark(key, value, SPACE_TRAINED)
    if conversion.tool == "Axolotl" and value in OTHER_SPACE:
        conversion.add_remark(key, value, OTHER_SPACE[value])
    _compare_tools(key, value, conversion)
    name = conversion.recipe["chat_template"]
    if conversion.tool == "LLaMA-Factory" and name in BREAKS:
        conversion.remarks.append(f"{key}: {value}   ({BREAK_TRAINED})")
    if conversion.tool == "LLaMA-Factory" and name in TRIMMED:
        conversion.remarks.append(
            f"{key}: {value}   (white space around a turn is kept there, trimmed here)"
        )


def _compare_tools(key: str, value: str, conversion: Conversion) -> None:
    """Reports what a template of that name writes otherwise of a row with tools."""
    if conversion.tool == "Axolotl" and value in OTHER_TOOLS:
        conversion.add_remark(key, value, OTHER_TOOLS[value])
    if conversion.tool == "LLaMA-Factory" and value not in SAME_TOOLS:
        conversion.add_remark(key, value, TOOLS_IN_ITS_WORDS)


ALL_OF_TEXT = r"language_model(\.model)?(\.\*|\.\.\*)?$"
# Decoder layers of models whose last ones a file may name, by the models' names.
LAYERS = {
    r"llama-?[23][^a-z]*-?(7b|8b)|mistral-7b": 32,
    r"llama-?2-13b": 40,
    r"llama-?3\S*70b|llama-?2-70b": 80,
    r"llama-?3\.2-1b": 16,
    r"llama-?3\.2-3b": 28,
    r"qwen3-(0\.6|1\.7)b|qwen2\S*-7b|qwen2\.5-1\.5b": 28,
    r"qwen3-(4|8)b": 36,
}
TRAINED_TOWER = (
    "the vision tower and the projector are trained too there, frozen here; trainable_modules: "
    "[visual] trains them alone"
)
IMAGE_LABELS = (
    "some versions train on all text of rows with images, here the answers; assistant_only_loss: "
    "false trains all"
)
# get_processing_strategy of Axolotl's processing_strategies.py, by whose other classes no role is
# left out of the loss, whatever train_on_inputs says: chat templates, and families by model_support
ROLES_BY_TEMPLATE = (
    "qwen2_vl",
    "qwen3_5",
    "gemma3",
    "gemma3n",
    "gemma4",
    "gemma4_unified",
    "llama3_2_vision",
    "llama4",
    "pixtral",
    "mistral_v7_tekken",
)
ROLES_BY_FAMILY = ("cohere_compass", "paddleocr_vl", "qwen3_5_moe", "qwen4_exp")
ROLES_BY_KEY = ("role_boundaries", "tokenizer_use_mistral_common")
ALL_OF_IMAGES = (
    "no role is known of this model there, and all text of a row is trained on; so it is here by "
    "assistant_only_loss: false, and by true the answers alone"
)
# whose processors write more than the patches' tokens for an image (replace_image_token), of which
# Axolotl leaves the patches' alone out
MARKED_IMAGES = ("gemma3", "gemma3n", "gemma4", "idefics3", "llama4", "mistral3", "smolvlm")
PIXTRAL = "pixtral"  # in names of models of LLaVA's family with Pixtral's processor
MARKS_TRAINED = "what the processor writes around an image's patches is trained too there, not here"
# Glm4vProcessingStrategy
GLM_IMAGES = ("glm4v", "glm46v")
GLM_MARKS = "<|begin_of_image|> and <|end_of_image|> are trained here, not there"
# transformers' get_keys_to_not_convert, which leaves the head in 16 bits
QUANTIZED_PARTS = (
    "the linear layers of the vision tower and the projector are in as few bits there, in 16 here"
)
QUANTIZED_TOWER = "the vision tower's linear layers are in as few bits there, in 16 here"
# apply_chat_template of transformers' processors, which encodes as the tokenizer does by itself
# what begins with no BOS token; the templates of other families begin with it
TOKENIZERS_BOS_OF_IMAGES = (
    "chat_template: where it writes no BOS token and the tokenizer does by itself, a row begins "
    "with it there, not here"
)
WITHOUT_BOS_BEFORE_IMAGES = ("llava", "llava_next")
# utils/collators/mm_chat.py of Axolotl
IMAGES_UNCUT = "a row is trained on at any length there; a longer one is dropped here"
# _maybe_adapt_message of transformers' MistralCommonBackend
COLUMN_REFUSED = (
    "a row with a column of images ends the run there, where parts of messages name an image by "
    "path, url or base64; here such a column is read"
)
# ProcessingStrategy.__call__ of Axolotl
IMAGES_OF_COLUMN = (
    "of a column of images the first of a row alone is read there, all here; it stands after the "
    "words of the first question there, and before them here, unless a part of a message holds its "
    "place; here <image> in the words does too"
)
CHATML = "<|im_end|>"
CHATML_ADDED = (
    "chat_template: its tokens are added here, and <|im_end|> is the EOS token, as in older "
    "versions; the newest adds none for a template that a file names"
)
# Keys of added tokens, by tool, beside those in special_tokens.
ADDED_TOKENS: Mapping[str, tuple[str, ...]] = {
    "Axolotl": ("tokens",),
    "LLaMA-Factory": ("add_tokens", "add_special_tokens"),
    "ms-swift": ("new_special_tokens",),
}
TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


def adapt_model(settings: ToolFile, conversion: Conversion) -> None:
    """Adds what several keys together say of the model: its tokens, what is frozen of it, and its
    images.
    """
    name = name_model(settings).lower()
    if BITSANDBYTES_MODEL.search(name) and is_mixture(name):
        conversion.add_difference("base_model", name_model(settings), EXPERTS_DEQUANTIZED)
    loads_plain = conversion.tool in ("LLaMA-Factory", "Automodel") or read_section(
        settings, "model_quantization_config_kwargs"
    ).get("dequantize")
    for pattern, note in ((FP8_MODEL, KEPT_IN_FP8), (MAYBE_FP8_MODEL, MAYBE_KEPT_IN_FP8)):
        if pattern.search(name) and not loads_plain:
            conversion.add_difference("model", name_model(settings), note)
    if PACKED_MODEL.search(name):
        by_autoawq = conversion.tool in ("LLaMA-Factory", "ms-swift") and "awq" in name
        note = DEQUANTIZED_AWQ if by_autoawq else DEQUANTIZED
        conversion.remarks.append(f"model: {name_model(settings)}   ({note})")
    if "nvfp4" in name and settings.get("use_sonicmoe"):
        conversion.add_difference("use_sonicmoe", True, INPUTS_IN_4_BITS)
    _adapt_tokens(settings, conversion)
    _adapt_frozen(settings, conversion)
    _adapt_images(settings, conversion)


def _adapt_tokens(settings: ToolFile, conversion: Conversion) -> None:
    """Adds tokens by the keys of Axolotl, LLaMA-Factory and TRL; the padding token only without
    adapters.
    """
    recipe = conversion.recipe
    section = read_section(settings, "special_tokens")
    special = {name: section.get(name) for name in TOKEN_NAMES}
    if conversion.tool == "TRL" and "eos_token" in settings:
        special["eos_token"] = settings["eos_token"]
    has_adapters = (
        recipe.get("use_peft")
        or settings.get("adapter")
        or settings.get("finetuning_type") == "lora"
    )
    if has_adapters and special.pop("pad_token"):
        conversion.ignored.append("special_tokens.pad_token")  # padding is not trained on
    given = {name: str(token) for name, token in special.items() if token}
    if given:
        recipe["special_tokens"] = given
    added: list[str] = []
    if conversion.tool == "Axolotl" and isinstance(settings.get("tokens"), dict):
        note = "a list of tokens to add is read there too; special_tokens names the four"
        conversion.add_difference("tokens", settings["tokens"], note)
    listed = [settings.get(key) for key in ADDED_TOKENS.get(conversion.tool, ())]
    for names in [*listed, section.get("additional_special_tokens")]:
        added += convert_names(names or None) or []
    if added:
        recipe["added_tokens"] = list(dict.fromkeys(added))
    # by its setup_chat_format
    if conversion.tool == "TRL" and CHATML in str(settings.get("chat_template")):
        conversion.remarks.append(CHATML_ADDED)
        recipe.setdefault("added_tokens", ["<|im_start|>", CHATML])
        recipe["special_tokens"] = {"eos_token": CHATML} | recipe.get("special_tokens", {})
    if conversion.tool == "Axolotl":
        _adapt_rows(settings, given, conversion)


# load_tokenizer of its loaders/tokenizer.py
SPECIAL_FIRST = (
    "special_tokens: those that the tokenizer does not have get the first of the new ids there, "
    "and here those behind added_tokens"
)


def _adapt_rows(settings: ToolFile, special: Mapping[str, str], conversion: Conversion) -> None:
    """Sets how many rows an embedding gets for new tokens by Axolotl (_resize_token_embeddings of
    its loaders/model.py), and reports in which order.
    """
    recipe = conversion.recipe
    if settings.get("resize_token_embeddings_to_32x"):
        recipe["pad_vocab_to_multiple_of"] = 32
    elif special or recipe.get("added_tokens"):
        recipe["pad_vocab_to_multiple_of"] = 1
    if special and settings.get("tokens") and recipe.get("added_tokens"):
        conversion.remarks.append(SPECIAL_FIRST)


# freeze_layers_except of Axolotl, which its train.py calls once the adapters are in place: it
# matches the start of names, which is base_model then
ADAPTERS_FROZEN = (
    "no pattern names the adapters, and all that none names is frozen there, so that nothing is "
    "trained; the adapters are trained here"
)


HEAD_CLASS = re.compile(
    r"^class \w+For(?:CausalLM|ConditionalGeneration)\(.*?(?=^class |\Z)", re.DOTALL | re.MULTILINE
)
# LayerNamePattern of its utils/freeze.py, where each dot of a pattern is a dot, beside the names of
# transformers 5
NAMED_OTHERWISE = (
    "a pattern is the start of a name in transformers 5 there, and a dot in it is a dot: what is "
    "meant by {} is frozen there, trained here"
)


def _report_unnamed(settings: ToolFile, conversion: Conversion) -> None:
    """Reports patterns of Axolotl's that name nothing there, and something here."""
    patterns = settings.get("unfrozen_parameters")
    if not isinstance(patterns, list) or not conversion.recipe.get("trainable_modules"):
        return
    family = guess_vision_family(name_model(settings)) or ""
    unnamed = [each for each in map(str, patterns) if _names_nothing(each, family)]
    if unnamed:
        note = NAMED_OTHERWISE.format(", ".join(unnamed))
        conversion.add_difference("unfrozen_parameters", patterns, note)


def _names_nothing(pattern: str, family: str) -> bool:
    """Whether Axolotl's pattern is the start of no parameter's name; in doubt it is of one.

    >>> [
    ...     _names_nothing(pattern, "mixtral")
    ...     for pattern in ("model.layers.1.mlp", "model.layers.1.block_sparse_moe", "layers.1")
    ... ]
    [False, True, True]
    """
    start = pattern.removeprefix("^")
    is_other = rename_pattern(start, find_renames(family)) != start
    if is_other or "\\." in start or ".*" in start.removesuffix(".*"):
        return True
    heads = HEAD_CLASS.findall(read_family_source(family))
    parts = set(re.findall(r"self\.(\w+) = ", "".join(heads)))
    first = re.split(r"\W", start)[0]
    return bool(parts and first) and not any(part.startswith(first) for part in parts)


def _adapt_frozen(settings: ToolFile, conversion: Conversion) -> None:
    """Adds what is trained of a model in full: layers by their numbers, and names of a model with
    images.
    """
    recipe = conversion.recipe
    patterns = recipe.get("trainable_modules")
    if patterns and (
        recipe.get("use_peft") or any(re.search(ALL_OF_TEXT, str(name)) for name in patterns)
    ):
        # else all that is loaded here is named
        del recipe["trainable_modules"]
        frozen = ", and LoRA freezes it by itself" if recipe.get("use_peft") else ""
        conversion.remarks.append(
            f"trainable_modules is dropped: the language model is loaded alone{frozen}"
        )
        names_adapters = any(str(name).startswith((".", "base_model")) for name in patterns)
        unfrozen = settings.get("unfrozen_parameters")
        if unfrozen and recipe.get("use_peft") and not names_adapters:
            conversion.add_difference("unfrozen_parameters", unfrozen, ADAPTERS_FROZEN)
    _report_unnamed(settings, conversion)
    if settings.get("finetuning_type") == "freeze" and conversion.tool == "LLaMA-Factory":
        recipe["use_peft"] = False
        _train_layers(settings, conversion)


def report_shared_experts(settings: ToolFile, conversion: Conversion) -> None:
    """Reports where a pattern of the whole name leaves shared experts out, whose layers have the
    names of an MLP's.
    """
    pattern = settings.get("lora_target_modules")
    targets = conversion.recipe.get("lora_target_modules")
    if (
        not isinstance(pattern, str)
        or not isinstance(targets, list)
        or re.fullmatch(r"[\w.,]+", pattern)
    ):
        return
    shared = [name for name in targets if LINEAR_LAYERS.get(name) == "mlp"]
    family = guess_family(name_model(settings)) or ""
    if shared and SHARED_EXPERTS.search(read_family_source(family)):
        note = "the shared experts get adapters by these names too here, not by the pattern there"
        conversion.add_difference("lora_target_modules", pattern, note)


def _train_layers(settings: ToolFile, conversion: Conversion) -> None:
    """Names LLaMA-Factory's layers by their numbers: the last ones, or with a number below 0 the
    first ones.
    """
    count = settings.get("freeze_trainable_layers", 2)
    name = str(settings.get("model_name_or_path")).lower()
    depth = next((depth for pattern, depth in LAYERS.items() if re.search(pattern, name)), None)
    if isinstance(count, int) and count <= 0:
        numbers = range(-count)
    elif isinstance(count, int) and depth is not None:
        numbers = range(depth - count, depth)
    else:
        note = f"trainable_modules: name the last {count} layers, as in layers.(30|31)"
        conversion.to_do.append(f"freeze_trainable_layers: {count}: {note}")
        return
    modules = convert_names(settings.get("freeze_trainable_modules", "all")) or []
    inner = "" if "all" in modules else rf"\.({'|'.join(modules)})"
    layers = f"layers.({'|'.join(map(str, numbers))}){inner}"
    extra = convert_names(settings.get("freeze_extra_modules")) or []
    conversion.recipe["trainable_modules"] = [layers, *extra]


def _adapt_images(settings: ToolFile, conversion: Conversion) -> None:
    """Reports what a tool trains of a vision-language model beside the language model, which is
    trained alone here.
    """
    key = _find_image_key(conversion.tool, settings)
    if conversion.images is None and key is not None:
        capability = "images of a family that the model's name does not say"
        conversion.add_difference(key, name_model(settings), UNKNOWN_IMAGES, capability)
    if conversion.images is None:
        return
    load_key = next((key for key in LOAD_KEYS if conversion.recipe.get(key)), None)
    if load_key and conversion.tool in ("Axolotl", "LLaMA-Factory"):
        conversion.add_difference(load_key, True, QUANTIZED_PARTS)
    if conversion.is_factory_v1:  # which freezes no part by itself
        adapts = settings.get("finetuning_type") == "lora"
        conversion.add_difference("model_class", "llm", TOWER_ADAPTED if adapts else TRAINED_TOWER)
    elif conversion.tool == "LLaMA-Factory":
        _report_frozen(settings, conversion)
    elif conversion.tool == "Automodel":
        _adapt_automodels_parts(settings, conversion)
        name = name_model(settings)
        report_own_thoughts(name, "model", name, conversion)
    elif conversion.tool == "Axolotl":
        _report_axolotl_images(settings, conversion)


UNKNOWN_IMAGES = (
    "rows with images are trained on there; the model's name says no family whose images are read "
    "here, and what else differs for it is not listed"
)
# Of torchtune's parts of Llama 3.2 Vision, the layers with cross attention by the models' sizes.
FUSION_LAYERS = {r"90b": range(3, 100, 5), "": range(3, 40, 5)}
TOWER_ADAPTED = "the vision tower gets adapters too there"
PROJECTOR_ADAPTED = "the projector gets adapters too there"
FUSION_MLP = "the MLPs of the layers that read images get adapters too there"
# MultiHeadAttention of lora_llama3_2_vision_decoder, where a part gets no adapters
ATTENTION_IN_16_BITS = "the attention of {} is in 16 bits there, in 4 here"
FUSION_ROWS = "the embedding's rows for images are trained too there"


def _adapt_fusion(model: Mapping[str, Any], name: str, conversion: Conversion) -> None:
    """Adds which parts of Llama 3.2 Vision a file trains: the decoder, the layers of cross
    attention, the tower.
    """
    parts = {part: model.get(f"{part}_trainable") for part in ("decoder", "fusion", "encoder")}
    recipe = conversion.recipe
    if recipe.get("use_peft"):
        if parts["encoder"] == "lora":
            conversion.add_difference("model.encoder_trainable", "lora", TOWER_ADAPTED)
        if parts["fusion"] == "lora":  # fusion_lora of llama3_2_vision_encoder
            conversion.add_difference("model.fusion_trainable", "lora", PROJECTOR_ADAPTED)
        if parts["decoder"] != "lora" and parts["fusion"] == "lora":
            targets = recipe.get("lora_target_modules") or []
            own = [each for each in targets if LINEAR_LAYERS.get(each) == "self_attn"]
            recipe["lora_target_modules"] = [f"cross_attn.{each}" for each in own]
            if own != targets:
                conversion.add_difference("model.apply_lora_to_mlp", True, FUSION_MLP)
        if recipe.get("load_in_4bit"):
            _report_fusion_bits(parts, conversion)
        return
    if all(value in (True, "full") for value in (parts["decoder"], parts["fusion"])):
        trained = ["language_model", "lm_head"]
    elif parts["fusion"] in (True, "full"):
        sizes = (layers for pattern, layers in FUSION_LAYERS.items() if pattern in name.lower())
        trained = [rf"language_model\.layers\.({'|'.join(map(str, next(sizes)))})\."]
        conversion.add_difference("model.fusion_trainable", parts["fusion"], FUSION_ROWS)
    else:
        trained = []
    if parts["encoder"] in (True, "full"):
        trained += ["vision_model", "multi_modal_projector"]
    recipe["trainable_modules"] = trained


def _report_fusion_bits(parts: Mapping[str, Any], conversion: Conversion) -> None:
    """Reports which parts of Llama 3.2 Vision QLoRA has in 4 bits there, or in 16."""
    for part, layers in (("decoder", "layers of text"), ("fusion", "layers that read images")):
        if parts[part] != "lora":
            note = ATTENTION_IN_16_BITS.format(layers)
            conversion.add_difference(f"model.{part}_trainable", parts[part], note)
    if "lora" in (parts["encoder"], parts["fusion"]):
        conversion.add_difference("load_in_4bit", True, QUANTIZED_TOWER)


# apply_parameter_freezing of Automodel's components/utils/model_utils.py: a part is of the tower by
# its name, which a projector of these names is not
OF_TOWER = ("vision", "visual", "image_encoder")
TOWER_PART = re.compile(r"self\.(vision_tower|visual|vision_model|embed_vision) = ")
PROJECTOR = re.compile(r"self\.(\w*projector|connector|image_newline) = ")
TEXT_PART = re.compile(r"self\.(language_model|text_model) = ")
EMBEDDING_THERE = (
    "not read there since 0.3, nor here: the embedding is trained; frozen_modules: [embed_tokens] "
    "freezes it, as 0.2 does"
)
SOUND_THERE = "the tower of sound is trained there by rows with sound, which are not read here"


def _adapt_automodels_parts(settings: ToolFile, conversion: Conversion) -> None:
    """Adds which parts of a vision-language model Automodel trains: its freeze_config freezes the
    tower, and no projector beside it; without one nothing is frozen.
    """
    frozen = read_section(settings, "freeze_config")
    if frozen.get("freeze_audio_tower") is False:
        conversion.add_remark("freeze_audio_tower", False, SOUND_THERE)
    source = read_family_source(conversion.images or "")
    parts = sorted(set(PROJECTOR.findall(source)))
    parts = [part for part in parts if not any(name in part for name in OF_TOWER)]
    peft = read_section(settings, "peft")
    if peft:  # adapters alone are trained
        _report_adapted_parts(peft, parts, conversion)
        return
    if frozen.get("freeze_embeddings"):
        conversion.add_remark("freeze_embeddings", True, EMBEDDING_THERE)
    text = sorted(set(TEXT_PART.findall(source)))
    tower = sorted(set(TOWER_PART.findall(source)))
    trains_tower = not frozen.get("freeze_vision_tower", bool(frozen))
    if frozen.get("freeze_language_model") or (trains_tower and not (text and tower)):
        _report_frozen({"freeze_vision_tower": not trains_tower} | frozen, conversion)
    elif trains_tower:
        conversion.recipe["trainable_modules"] = [*text, "lm_head", *parts, *tower]
    elif parts:
        conversion.recipe["trainable_modules"] = [*text, "lm_head", *parts]


PART_ADAPTED = "layers of this part get adapters too there; those of the language model here"


def _report_adapted_parts(
    peft: Mapping[str, Any], projectors: Sequence[str], conversion: Conversion
) -> None:
    """Reports which parts beside the language model get adapters there: ModuleMatcher of its
    components/_peft/module_matcher.py, by names of layers as its own classes have them.
    """
    family = conversion.images or ""
    source = read_family_source(family)
    of_tower = find_vision_layers(family) or ("q_proj",)  # as in other families' towers
    towers = set(TOWER_PART.findall(source))
    layers = [f"model.{part}.{name}" for part in towers for name in of_tower]
    classes = re.split(r"^(?=class )", source, flags=re.MULTILINE)
    of_projector = "".join(each for each in classes if re.match(r"class \w*Projector", each))
    linear = re.findall(r"self\.(\w+) = nn\.Linear", of_projector)
    layers += [f"model.{part}.{name}" for part in projectors for name in linear]
    asked = convert_names(peft.get("target_modules")) or []
    excluded = convert_names(peft.get("exclude_modules")) or []
    if not (asked or excluded or peft.get("match_all_linear")):
        asked = ["*_proj"]
    adapted = [
        name
        for name in layers
        if not any(_matches(pattern, name) for pattern in excluded)
        and (not asked or any(_matches(pattern, name) for pattern in asked))
    ]
    for part in sorted({name.split(".")[1] for name in adapted}):
        conversion.add_difference("peft", part, PART_ADAPTED)


def _matches(pattern: str, name: str) -> bool:
    """Whether Automodel's pattern names a layer, in full or by its last part."""
    return pattern == name.rpartition(".")[2] or fnmatch.fnmatchcase(name, pattern)


FROZEN_HERE = {
    "freeze_vision_tower": TRAINED_TOWER,
    "freeze_multi_modal_projector": (
        "the projector is trained too there, frozen here; trainable_modules names parts of the "
        "model"
    ),
}


def _report_frozen(frozen: Mapping[str, Any], conversion: Conversion) -> None:
    for key, note in FROZEN_HERE.items():
        if frozen.get(key) is False:
            conversion.add_difference(key, False, note)
    if frozen.get("freeze_language_model"):
        note = "trained here; trainable_modules: [visual] trains the tower"
        conversion.add_difference("freeze_language_model", True, note)


def _may_adapt_tower(targets: Any, family: str) -> bool:
    """Whether a family's vision tower may have a layer by one of these names; in doubt it may."""
    of_tower = find_vision_layers(family)
    names = {name.rpartition(".")[2] for name in targets} if isinstance(targets, list) else set()
    return not of_tower or not names or bool(of_tower & names)


MLP_NAMES = frozenset(name for name, block in LINEAR_LAYERS.items() if block == "mlp")
WITH_PEFT = ("TRL", "Axolotl", "LLaMA-Factory", "ms-swift")
SHARED_EXPERTS = re.compile("shared_(expert|mlp)")
ONTO_EXPERTS = (
    "since transformers 5 peft takes gate_proj, up_proj and down_proj for layers of the routed "
    "experts: their adapters are on these there, of twice the rank where two are one, and on no "
    "shared expert or dense layer; here on linear layers of these names, and on experts by "
    "lora_target_parameters"
)
ALL_WITH_EXPERTS = (
    "since transformers 5 peft's all-linear is also the routed experts, of twice the rank where "
    "two are one, and the routers, but no shared expert or dense layer; here all linear layers, "
    "and experts by lora_target_parameters"
)
TWICE_THE_RANK = (
    "w1 and w3 of the experts are one parameter since transformers 5, whose adapter has twice the "
    "rank there, and lora_r here"
)


def report_expert_names(settings: ToolFile, conversion: Conversion) -> None:
    """Reports where peft moves adapters onto routed experts, by its _convert_peft_config_moe."""
    recipe = conversion.recipe
    if conversion.tool not in WITH_PEFT or not recipe.get("use_peft"):
        return
    family = guess_family(name_model(settings)) or ""
    is_mixtrals = "mixtral" in (family, find_alias(family))
    is_qwens = find_alias(family) == "qwen2_moe"  # not Qwen2 MoE itself, which is no alias
    targets = recipe.get("lora_target_modules", ALL_LINEAR)
    named = {name.rpartition(".")[2] for name in ([] if targets == ALL_LINEAR else targets)}
    # a list of names in other tools than TRL, where shared experts have them
    has_others = bool(SHARED_EXPERTS.search(read_family_source(family)))
    if ALL_LINEAR in targets and conversion.tool == "TRL" and (is_mixtrals or is_qwens):
        conversion.add_difference("lora_target_modules", targets, ALL_WITH_EXPERTS)
    elif is_qwens and (named & MLP_NAMES or (ALL_LINEAR in targets and has_others)):
        conversion.add_difference("lora_target_modules", targets, ONTO_EXPERTS)
    elif is_mixtrals and named & {"w1", "w3"}:
        conversion.add_difference("lora_target_modules", targets, TWICE_THE_RANK)


def _report_tower(settings: ToolFile, conversion: Conversion) -> None:
    """Reports where Axolotl trains the vision tower, or adapters on it."""
    if not settings.get("adapter"):
        conversion.add_difference("adapter", None, TRAINED_TOWER)
        return
    targets = settings.get("lora_target_modules")
    if settings.get("lora_target_linear"):
        targets = "all-linear"
    is_of_text = re.search("language_model|text_model", str(targets))
    if not is_of_text and _may_adapt_tower(targets, str(conversion.images)):
        note = "layers of the vision tower by these names too there"
        conversion.add_difference("lora_target_modules", targets, note)


def _report_axolotl_images(settings: ToolFile, conversion: Conversion) -> None:
    if not settings.get("freeze_mm_modules"):  # tower and projector: its utils/freeze.py
        _report_tower(settings, conversion)
    conversion.add_difference("sequence_len", settings.get("sequence_len"), IMAGES_UNCUT)
    knows_roles = (
        settings.get("chat_template") in ROLES_BY_TEMPLATE
        or conversion.images in ROLES_BY_FAMILY
        or any(map(settings.get, ROLES_BY_KEY))
        or settings.get("rl")  # TRL's
    )
    if not knows_roles:
        conversion.recipe["assistant_only_loss"] = False
        conversion.add_remark("processor_type", settings.get("processor_type"), ALL_OF_IMAGES)
        _report_marks(settings, conversion)
    elif "train_on_inputs" not in settings:
        conversion.add_difference("processor_type", settings.get("processor_type"), IMAGE_LABELS)
    if settings.get("rl"):
        return  # TRL's
    _report_rows_of_images(settings, conversion)
    if knows_roles and not settings.get("train_on_inputs"):
        _report_thoughts_of_images(settings, conversion)


def _report_rows_of_images(settings: ToolFile, conversion: Conversion) -> None:
    """Reports where an image stands in a row, and what the row begins with."""
    is_common = settings.get("tokenizer_use_mistral_common")
    conversion.remarks.append(f"datasets: {COLUMN_REFUSED if is_common else IMAGES_OF_COLUMN}")
    is_pixtral = PIXTRAL in name_model(settings).lower()
    if conversion.images in WITHOUT_BOS_BEFORE_IMAGES and not is_pixtral:
        conversion.remarks.append(TOKENIZERS_BOS_OF_IMAGES)


def _report_thoughts_of_images(settings: ToolFile, conversion: Conversion) -> None:
    """Reports the thoughts in the one text that Axolotl makes of a row, and trains with its
    answers.
    """
    template = settings.get("chat_template")
    if OTHER_TURNS.get(("Axolotl", str(template))) == ONE_TEXT:
        conversion.add_difference("chat_template", template, ONE_TEXT)
        conversion.add_difference("chat_template", template, THOUGHT_WHOLE)
    elif template in (None, *OWN_TEMPLATE) and not settings.get("tokenizer_use_mistral_common"):
        name = name_model(settings)
        report_own_thoughts(name, "datasets.type", "chat_template", conversion)


def _report_marks(settings: ToolFile, conversion: Conversion) -> None:
    """Reports which tokens of an image are trained where all of a row's text is."""
    processor = settings.get("processor_type")
    if conversion.images in MARKED_IMAGES or PIXTRAL in name_model(settings).lower():
        conversion.add_difference("processor_type", processor, MARKS_TRAINED)
    elif conversion.images in GLM_IMAGES:
        conversion.add_difference("processor_type", processor, GLM_MARKS)
