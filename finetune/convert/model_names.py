"""Guesses a published model's family, vision tower and experts by its name, and refuses some."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from finetune.config.facts import EXPERT_COUNTS, count_experts, has_fused_experts
from finetune.config.families import IMAGE_FAMILIES
from finetune.config.quantization import LOAD_KEYS
from finetune.constants import CONFIG_FILE
from finetune.convert.counterparts import ToolFile
from finetune.convert.value_conversion import read_section
from finetune.files.json_files import read_json_object

# (what in a file asks for it, the capability that is missing here, whether the file trains at all)
Unsupported = tuple[str, str, bool]
# (pattern of a model's name in lower case, model_type); the first pattern that matches counts. None
# is for models that are no causal language models in transformers.
FAMILIES = (
    (r"nemotron-(super-49b|ultra-253b|nas)", None),  # its code is not in transformers
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
    # the first generation, whose code is not in transformers
    (r"(?<![\w.-])qwen-(1[._]8b|7b|14b|72b)", None),
    (r"qwen.*moe|qwen-?2.*a\d+b", "qwen2_moe"),
    (r"qwen", "qwen2"),
    # no causal language models
    (r"(t5|diffusion)-?gemma|paligemma|shieldgemma-2-|embeddinggemma-2", None),
    (r"shieldgemma", "gemma2"),
    (r"embeddinggemma", "gemma3_text"),
    (r"recurrent-?gemma", "recurrent_gemma"),
    (r"vault-?gemma", "vaultgemma"),
    (r"gemma-?4-12b", "gemma4_unified_text"),
    (r"(med|translate|function)gemma", "gemma3_text"),
    (r"txgemma", "gemma2"),
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
    (r"molmo", None),  # a vision-language model
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
        r"seed-?coder|smollm|tiny-?llama|code-?llama|open-?llama|vicuna|\byi\b|arcee-sn|solar|"
        r"minicpm-?5",
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
# The same for vision-language models: the model_type of the whole model with its tower.
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
    (r"medgemma-(?!27b-text)|translategemma", "gemma3"),
    (r"gemma-?4-12b", "gemma4_unified"),
    (r"gemma-?4(?!b)", "gemma4"),
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
AUDIO = "audio"
AUDIO_MODEL = re.compile(r"voxtral|omni\b|audio|[-_]tts\b")
# models of text that also take sound
HEARING_MODEL = re.compile(r"gemma-?3n|gemma-?4(?!b)|phi-?4-?multimodal|minicpm-?o")
MULTIMODAL_MODEL = re.compile(
    r"[-_.]vl\d?\b|\bvl[-_]|vision|pixtral|smolvlm|llava|internvl|kimi-vl|glm-4\.\dv|"
    r"minicpm-[vo]|ocr\b|\bovis|\bemu3"
)
# Mixtures that are refused: their files have number formats that are not read, their code is not
# in transformers, or they were not tried.
MOE_MODEL = re.compile(
    r"deepseek[-_]?v4|minimax-?m3|kimi-k2|ling[-_](mini|flash|1t|[12])|ring[-_](mini|flash)|arctic|"
    r"grok|step-3|"
    r"\bmimo(?!-7b|-v2-flash)"
)
MOE_CAUSE = "mixtures of experts whose files or code are of another kind, or not tried yet"
# the other mixtures of experts
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
HYBRID_MODEL = re.compile("nemotron-flash")  # its code is not in transformers
# weights in few bits, in other formats than the four after `?!`
QUANTIZED_MODEL = re.compile(
    r"^(?!.*(gptq|awq|aqlm|nvfp4)).*"
    r"([-_]int[48]\b|[-_]fp4\b|(?<!bnb)[-_][48]-?bit)"
)
REFUSED_NAMES = {  # pattern of a name -> the cause that the refusal names
    AUDIO_MODEL: AUDIO,
    MULTIMODAL_MODEL: "multimodal",
    MOE_MODEL: MOE_CAUSE,
    FIRST_QWEN: "a model whose code is not in transformers",
    DIFFUSION_MODEL: "diffusion",
    HYBRID_MODEL: "hybrid or linear attention",
    QUANTIZED_MODEL: "quantized weights",
}
BITSANDBYTES_MODEL = re.compile(r"\bbnb\b")  # its files are quantized by bitsandbytes
# Families of mixtures whose losses with experts in 4 bits are not proven: phimoe draws experts at
# random in training.
UNTRIED_IN_FEW_BITS = ("phimoe", "bailing_hybrid", "qwen4_exp_text")
FEW_BITS_KEYS = (*LOAD_KEYS, "quantization_bit")  # each asks for a quantized base
# each asks for a mixture that is not supported, unless it is off
MOE_KEYS = ("dsv4_fp4_grouped_mode", "use_moe")


# model (a pattern) -> its number of decoder layers
DEPTHS = {
    r"llama-?[23][^a-z]*-?(7b|8b)|mistral-7b": 32,
    r"llama-?2-13b": 40,
    r"llama-?3\S*70b|llama-?2-70b": 80,
    r"llama-?3\.2-1b": 16,
    r"llama-?3\.2-3b": 28,
    r"qwen3-(0\.6|1\.7)b|qwen2\S*-7b|qwen2\.5-1\.5b": 28,
    r"qwen3-(4|8)b": 36,
}


def _read_local_config(name: str) -> Mapping[str, Any]:
    """Reads config.json of the local model `name`; empty if `name` is no folder with one."""
    return read_json_object(Path(name).expanduser() / CONFIG_FILE) if name else {}


def _read_text_config(name: str) -> Mapping[str, Any]:
    """The same for the language model in it."""
    config = _read_local_config(name)
    return read_section(config, "text_config") or config


def guess_family(name: str) -> str | None:
    """Returns the model_type of the language model of `name`: by its config.json if it is local.

    Otherwise by `FAMILIES`; None if the name does not say it.

    >>> guess_family("mistralai/Mixtral-8x7B-v0.1"), guess_family("org/ours")
    ('mixtral', None)
    """
    local_family = _read_text_config(name).get("model_type")
    if local_family is not None:
        return str(local_family)
    lower = name.lower()
    return next((family for pattern, family in FAMILIES if re.search(pattern, lower)), None)


def guess_depth(name: str) -> int | None:
    """Returns the number of decoder layers of the model `name`, by its local config.json or its
    name; None if the name does not say it.

    >>> guess_depth("meta-llama/Llama-3.2-1B"), guess_depth("org/ours")
    (16, None)
    """
    depth = _read_text_config(name).get("num_hidden_layers")
    if depth is not None:
        return int(depth)
    lower = name.lower()
    return next((depth for pattern, depth in DEPTHS.items() if re.search(pattern, lower)), None)


def has_tower(name: str) -> bool:
    """Whether the model `name` has a vision tower, by its local config.json or its name.

    >>> has_tower("google/gemma-3-27b-it"), has_tower("google/gemma-3-1b-it")
    (True, False)
    """
    config = _read_local_config(name)
    if config:
        return "vision_config" in config
    return any(re.search(pattern, name.lower()) for pattern, _ in VISION_FAMILIES)


def guess_vision_family(name: str) -> str | None:
    """Returns the model_type of the model `name` with its vision tower.

    Without a tower this is what `guess_family` returns. None if the name does not say it.

    >>> (
    ...     guess_vision_family("Qwen/Qwen2-VL-7B-Instruct"),
    ...     guess_vision_family("meta-llama/Llama-3.1-8B"),
    ... )
    ('qwen2_vl', 'llama')
    """
    local_family = _read_local_config(name).get("model_type")
    if local_family is not None:
        return str(local_family)
    lower = name.lower()
    vision_family = next(
        (family for pattern, family in VISION_FAMILIES if re.search(pattern, lower)), None
    )
    return vision_family or guess_family(name)


def is_mixture(name: str) -> bool:
    """Whether the model `name` is a mixture of experts, by its local config.json or its name.

    >>> is_mixture("mistralai/Mixtral-8x7B-v0.1"), is_mixture("google/gemma-4-31B")
    (True, False)
    """
    config = _read_text_config(name)
    if config:
        # a list, as Ernie 4.5 VL's of text and images, counts as 0
        return count_experts(config) > 0 or any(config.get(key) for key in EXPERT_COUNTS)
    return any(pattern.search(name.lower()) for pattern in (MIXTURE, MOE_MODEL))


def name_model(settings: ToolFile) -> str:
    """Returns the name or path of a file's model, under any tool's key; empty if there is none."""
    model = settings.get("model")
    section = read_section(settings, "model")
    return str(
        settings.get("base_model")
        or settings.get("model_name_or_path")
        or (model if isinstance(model, str) else "")
        or section.get("pretrained_model_name_or_path")
        or read_section(section, "config").get("pretrained_model_name_or_path")
        or read_section(settings, "checkpointer").get("checkpoint_dir")
        or ""
    )


def _find_sound(settings: ToolFile) -> Iterator[Unsupported]:
    """Yields the data sets that have the word "audio" in their names."""
    entries = settings.get("datasets")
    for entry in entries if isinstance(entries, list) else []:
        path = str(entry.get("path")) if isinstance(entry, dict) else ""
        if "audio" in re.split("[^a-z]+", path.rpartition("/")[2].lower()):
            yield f"datasets: {path}", "audio", True


def find_refused_models(settings: ToolFile) -> Iterator[Unsupported]:
    """Yields each reason not to train a file's model, by its name and by keys about it.

    The name of a local model with its config.json is not judged: the rules of a run do that.
    """
    for key in MOE_KEYS:
        value = settings.get(key)
        is_dense = value in (None, False, 1, "") and value is not True
        if not is_dense:
            yield f"{key}: {value}", MOE_CAUSE, True
    name = name_model(settings)
    lower = name.lower()
    if HEARING_MODEL.search(lower):
        yield from _find_sound(settings)
    if _read_local_config(name):
        return
    family = guess_family(name) or ""
    is_untried = family in UNTRIED_IN_FEW_BITS or not has_fused_experts(family)
    asks_for_few_bits = any(settings.get(key) for key in FEW_BITS_KEYS)
    is_stored_quantized = BITSANDBYTES_MODEL.search(lower)  # its experts are dequantized at reading
    if is_mixture(name) and asks_for_few_bits and is_untried and not is_stored_quantized:
        yield f"{name} in few bits", "quantized experts", True
    for pattern, cause in REFUSED_NAMES.items():
        is_known_image_model = (
            pattern in (MULTIMODAL_MODEL, HYBRID_MODEL)
            and guess_vision_family(lower) in IMAGE_FAMILIES
        )
        if pattern.search(lower) and not is_known_image_model:
            yield name, cause, True
