"""The table of docs/export.md on vLLM: its log-probabilities of prompts beside those of
transformers.

    python benchmarks/serving.py make FOLDER [FAMILY|KIND...]  # trains, exports, asks transformers
    VLLM_PYTHON benchmarks/serving.py ask FOLDER           # asks vLLM; with torchvision
    python benchmarks/serving.py table FOLDER              # writes served.json and the page

Each model has two layers and random weights, three steps of training away. A cell is the largest
difference over the tokens of 20 prompts, in fp32 on a CPU; or the error with which vLLM, the
training or the export ended. Families with a vision tower are asked about images.
"""

import itertools
import json
import multiprocessing
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "export.md"
QUICKSTART = ROOT / "recipes" / "quickstart"
PROMPTS = 20
START, END = "<!-- made by benchmarks/serving.py -->\n", "<!-- end -->"
# What an error of vLLM says -> its cause.
NO_HEAD = "vLLM's class of the family takes no adapter on lm_head, and refuses the file"
CAUSES = {"but received ['lm_head'": NO_HEAD, "but received ['language_model.lm_head'": NO_HEAD}
SIZES = {
    "vocab_size": 384,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "head_dim": 32,  # vLLM has kernels for it
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "initializer_range": 0.1,
}
# model_type -> what its config has beside the sizes.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen3": {},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    },
    "gemma3_text": {
        "query_pre_attn_scalar": 32,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "phi3": {"sliding_window": None, "original_max_position_embeddings": 256},
    "olmo2": {},
    "glm4": {"partial_rotary_factor": 0.5},
    # tied, as small published ones are; those of Gemma and SmolLM3 are by themselves
    "granite": {"tie_word_embeddings": True},
    "qwen2": {"tie_word_embeddings": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "gemma2": {"query_pre_attn_scalar": 32, "sliding_window": 64},
    "smollm3": {},
    "glm4_moe": {
        "partial_rotary_factor": 0.5,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 64,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "num_nextn_predict_layers": 1,
    },
    "qwen2_5_vl": {},
    "gemma3": {},
    "qwen3_5": {},
}
# A kind of adapter -> the run that trained it.
KINDS_OF_ADAPTERS = {"adapter": "lora", "experts": "experts", "head": "head"}
MIXTURES = ("qwen3_moe", "mixtral", "glm4_moe")
WITH_IMAGES = ("qwen2_5_vl", "gemma3", "qwen3_5")
# What the sizes of tests/vision.py are for the language model.
TEXT_OF_VISION: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 4, 8]}
    },
    "gemma3": {"query_pre_attn_scalar": 32},
    "qwen3_5": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
            "partial_rotary_factor": 0.25,
        },
        "mtp_num_hidden_layers": 1,
    },
}
# The layer for multi-token prediction: a copy of a decoder layer, and what else vLLM's class has:
# (rows, columns) in hidden sizes. The name of a family's copied layer, and of the copy.
COPIED = {
    "glm4_moe": ("model.layers.1.", "model.layers.2."),
    "qwen3_5": ("model.language_model.layers.1.", "mtp.layers.0."),
}
BESIDE_THE_COPY: dict[str, dict[str, tuple[int, ...]]] = {
    "glm4_moe": {"eh_proj": (1, 2), "enorm": (1,), "hnorm": (1,), "shared_head.norm": (1,)},
    "qwen3_5": {
        "fc": (1, 2),
        "norm": (1,),
        "pre_fc_norm_embedding": (1,),
        "pre_fc_norm_hidden": (1,),
    },
}
NAMED = "adapter-vllm"  # the folder of an adapter whose modules vLLM calls otherwise
LORA = {"use_peft": True, "lora_r": 8, "lora_alpha": 32}
KEYS: dict[str, dict[str, Any]] = {
    "lora": LORA,
    "experts": LORA
    | {
        "lora_target_modules": [],
        "lora_target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
    },
    "head": LORA | {"lora_target_modules": ["all-linear", "lm_head"]},
    "added": {"added_tokens": ["<|tool|>", "<|end_tool|>"]},
}


def make(folder: Path, chosen: Sequence[str]) -> None:
    """Makes each family's base, trains it in every way, and writes what transformers computes
    beside each export.

    chosen: Families and keys of `KEYS`; all of either where none is named.
    """
    import finetune.export.export
    import finetune.session
    import finetune.training.lifecycle  # noqa: F401  # imported once, for all children

    for family in [each for each in chosen if each in FAMILIES] or FAMILIES:
        base = folder / family / "base"
        _run_in_child(partial(_save_base, base, family), base)
        for name in [each for each in chosen if each in KEYS] or KEYS:
            if name == "experts" and family not in MIXTURES:
                continue
            run = folder / family / name
            shutil.rmtree(run, ignore_errors=True)
            _run_in_child(partial(train, run, base, family, name), run)
            print(family, name, _read_error(run) or "trained", flush=True)


def _run_in_child(work: Callable[[], object], folder: Path) -> None:
    """Runs `work` in a process forked from this one, with its output and error in FOLDER.log and
    FOLDER.error.
    """

    def run() -> None:
        log = os.open(f"{folder}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        try:
            work()
        except BaseException as error:
            Path(f"{folder}.error").write_text(
                f"{type(error).__name__}: {' '.join(str(error).split())}"[:4000]
            )
            raise

    folder.parent.mkdir(parents=True, exist_ok=True)
    Path(f"{folder}.error").unlink(missing_ok=True)
    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    child.join()
    if child.exitcode != 0 and not _read_error(folder):
        Path(f"{folder}.error").write_text(f"ended with {child.exitcode}")


def _read_error(folder: Path) -> str | None:
    path = Path(f"{folder}.error")
    return path.read_text() if path.is_file() else None


def _save_base(base: Path, family: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    if family in WITH_IMAGES:
        _save_vision_base(base, family)
    else:
        config = AutoConfig.for_model(family, **SIZES | FAMILIES[family])
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(base)
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(QUICKSTART / file, base)
    if family in COPIED:
        _add_prediction(base, family)
    if family == "gemma3":
        _name_as_published(base)


def _save_vision_base(base: Path, family: str) -> None:
    """A model of tests/vision.py with heads that vLLM has kernels for, and its pictures beside
    it.
    """
    sys.path.insert(0, str(ROOT))
    from tests import vision

    sizes = {
        key: value
        for key, value in SIZES.items()
        if not key.endswith("_id") and key != "vocab_size"
    }
    vision.TEXT |= sizes
    if family != "gemma3":
        of_qwen = {"out_hidden_size": SIZES["hidden_size"], "hidden_size": 64, "num_heads": 2}
        vision.FAMILIES[family]["vision_config"] |= of_qwen
    vision.FAMILIES[family]["text_config"] |= TEXT_OF_VISION[family]
    vision.make_vision_model(base, family)
    vision.add_processor(base, family)
    _complete_processor(base, family)
    # Pictures of the processors' own size: torchvision, by which vLLM's resize, and PIL interpolate
    # differently.
    vision.draw_image = _draw_square
    vision.make_image_chat(base, rows=60)


def _complete_processor(base: Path, family: str) -> None:
    """Adds what published files have and vLLM reads: the normalization of pixels, and Gemma's
    tokens of line breaks.
    """
    from transformers import AutoTokenizer

    from tests.vision import open_processor

    images = open_processor(base, family).image_processor
    file = base / "preprocessor_config.json"
    said = {key: getattr(images, key) for key in ("image_mean", "image_std", "rescale_factor")}
    said |= {"do_normalize": True, "do_rescale": True}
    file.write_text(json.dumps(json.loads(file.read_text()) | said))
    if family == "gemma3":
        tokenizer = AutoTokenizer.from_pretrained(base)
        tokenizer.add_tokens(["\n" * count for count in (1, 2, 3, 4)])
        tokenizer.save_pretrained(base)


def _draw_square(path: Path, number: int) -> Path:
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", (28, 28), (37 * number % 256, 90, 200))
    ImageDraw.Draw(picture).ellipse((3, 5, 20 + number % 8, 25), fill=(250, 20 * number % 256, 0))
    picture.save(path)
    return path


def _name_as_published(base: Path) -> None:
    """Gives Gemma 3's tower the names of published files: transformers 5.23 writes others, which
    vLLM does not know.
    """
    from safetensors.torch import load_file, save_file

    tensors = load_file(base / "model.safetensors")
    published = {
        name.replace("vision_tower.", "vision_tower.vision_model."): each
        for name, each in tensors.items()
    }
    save_file(published, base / "model.safetensors", metadata={"format": "pt"})


def _add_prediction(base: Path, family: str) -> None:
    """Adds a layer for multi-token prediction to the files, which transformers leaves in them."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(base / "model.safetensors")
    start, copy = COPIED[family]
    copies = {
        name.replace(start, copy): tensor * 1.1
        for name, tensor in tensors.items()
        if name.startswith(start)
    }
    prefix = copy if family == "glm4_moe" else "mtp."
    size = SIZES["hidden_size"]
    for name, shape in BESIDE_THE_COPY[family].items():
        copies[f"{prefix}{name}.weight"] = (
            torch.randn([each * size for each in shape]) * SIZES["initializer_range"]
        )
    if family == "glm4_moe":  # published files hold these again
        copies[f"{copy}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        copies[f"{copy}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors | copies, base / "model.safetensors", metadata={"format": "pt"})


def train(run: Path, base: Path, family: str, name: str) -> None:
    """A run of three steps from `base`, and transformers' log-probabilities of what it exports."""
    import finetune
    from finetune.config.families import find_family

    rows = base / "images.jsonl" if family in WITH_IMAGES else QUICKSTART / "train.jsonl"
    keys: dict[str, Any] = {
        "model_name_or_path": str(base),
        "datasets": [{"path": str(rows), "max_samples": 60}],
        "max_length": 128 if family in WITH_IMAGES else 64,
        "global_batch_size": 4,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "export_dtype": "float32",
        "output_dir": str(run),
    }
    finetune.train(finetune.load_recipe(None, **keys | KEYS[name]), "single")
    if find_family(family).vllm_modules and (run / "adapter").is_dir():
        options: dict[str, Any] = {"adapter_only": True, "adapter_names": "vllm"}
        finetune.export_run(run / "adapter", run / NAMED, **options)
    ask_transformers = _ask_about_images if family in WITH_IMAGES else _ask_about_texts
    (run / "expected.json").write_text(json.dumps(ask_transformers(run / "export", base, family)))


def _ask_about_texts(export: Path, base: Path, family: str) -> list[dict[str, Any]]:
    """The ids of each prompt, and the log-probability of each token after the first."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(export)
    expected = []
    for line in (QUICKSTART / "heldout.jsonl").read_text().splitlines()[:PROMPTS]:
        text = tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=False)
        # an added token, where there is one
        added = [len(tokenizer) - 1] * (len(tokenizer) > SIZES["vocab_size"])
        ids = [*tokenizer.encode(text, add_special_tokens=False), *added, 5]
        expected.append({"ids": ids, "logprobs": _score(model, {"input_ids": torch.tensor([ids])})})
    return expected


def _ask_about_images(export: Path, base: Path, family: str) -> list[dict[str, Any]]:
    """The same, with the text and the pictures of each prompt, of which vLLM makes the ids
    itself.
    """
    import torch
    from transformers import AutoModelForImageTextToText

    from tests.vision import open_processor, process_row

    model = AutoModelForImageTextToText.from_pretrained(export, dtype=torch.float32).eval()
    processor = open_processor(export, family)
    expected = []
    for number, line in enumerate((base / "images.jsonl").read_text().splitlines()[:PROMPTS], 1):
        messages = json.loads(line)["messages"]
        parts = [
            part
            for message in messages
            if isinstance(message["content"], list)
            for part in message["content"]
        ]
        inputs = process_row(f"{base / 'images.jsonl'}:{number}", processor)
        expected.append(
            {
                "ids": inputs["input_ids"][0].tolist(),
                "logprobs": _score(model, inputs),
                "text": processor.tokenizer.apply_chat_template(messages, tokenize=False),
                "images": [str(base / part["path"]) for part in parts if part["type"] == "image"],
            }
        )
    return expected


def _score(model: Any, inputs: dict[str, Any]) -> list[float]:
    import torch

    with torch.no_grad():
        scores = torch.log_softmax(model(**inputs).logits[0].double(), -1)
    given: list[float] = scores[:-1].gather(1, inputs["input_ids"][0, 1:, None])[:, 0].tolist()
    return given


def ask(folder: Path) -> None:
    """Asks vLLM for each export that has not been asked for. Writes FOLDER/cells.json."""
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
    }
    import vllm.lora.request
    import vllm.v1.engine.llm_engine  # imported once, for all children

    file = folder / "cells.json"
    cells: dict[str, Any] = {"vllm": vllm.__version__}
    if file.is_file():
        cells |= json.loads(file.read_text())
    for cell in _list_cells(folder):
        name = f"{cell.family} {cell.kind}"
        if name in cells:
            continue
        answer = folder / cell.family / f"vllm-{cell.kind}"
        if not (error := _read_error(cell.run)):
            _run_in_child(partial(ask_vllm, cell, answer), answer)
            error = _read_error(answer)
        cells[name] = error or float(answer.read_text())
        print(name, cells[name], flush=True)
        file.write_text(json.dumps(cells, indent=1))


@dataclass(frozen=True)
class Cell:
    """A model that vLLM is asked about."""

    family: str
    kind: str
    run: Path
    model: Path
    adapter: Path | None = None


def _list_cells(folder: Path) -> Iterator[Cell]:
    for family in FAMILIES:
        at = folder / family
        yield Cell(family, "merged", at / "lora", at / "lora" / "export")
        for kind, name in KINDS_OF_ADAPTERS.items():
            if kind != "experts" or family in MIXTURES:
                run = at / name
                named = run / NAMED
                adapter = named if named.is_dir() else run / "adapter"
                yield Cell(family, kind, run, at / "base", adapter)
        yield Cell(family, "added", at / "added", at / "added" / "export")
        if family in COPIED:
            yield Cell(family, "mtp", at / "lora", at / "lora" / "export")


def ask_vllm(cell: Cell, result: Path) -> None:
    """Writes the largest difference between vLLM's log-probabilities of the prompts and those in
    expected.json.
    """
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    options: dict[str, Any] = {"max_num_seqs": 4}
    request = None
    if cell.adapter:
        # vLLM 0.32 on a CPU multiplies the adapter's head for each prompt, not for each token that
        # is scored: with several prompts at once the shapes do not fit.
        options = {"enable_lora": True, "max_lora_rank": LORA["lora_r"], "max_num_seqs": 1}
        options |= {"enable_mixed_moe_lora_format": True} if cell.kind == "experts" else {}
        request = LoRARequest(
            "adapter", 1, str(cell.adapter), is_3d_lora_weight=cell.kind == "experts"
        )
    if cell.kind == "mtp":
        options |= {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
    if cell.family == "qwen3_5":
        # for cached prefixes vLLM copies states by Triton kernels, which need a GPU
        options |= {"enable_prefix_caching": False}
    if cell.family in WITH_IMAGES:
        options |= {"limit_mm_per_prompt": {"image": 2, "video": 0}}
    for replace_kernel in list_replaced(cell.family, cell.kind):
        replace_kernel()
    llm = LLM(str(cell.model), dtype="float32", enforce_eager=True, max_model_len=256, **options)
    prompts = json.loads((cell.run / "expected.json").read_text())
    answers = llm.generate(
        [_describe_prompt(each) for each in prompts],
        SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0),
        lora_request=request,
        use_tqdm=False,
    )
    largest = 0.0
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.prompt_token_ids == prompt["ids"], (
            "vLLM's processor makes other ids of the prompt"
        )
        for token, ours, theirs in zip(
            prompt["ids"][1:], prompt["logprobs"], answer.prompt_logprobs[1:], strict=True
        ):
            difference = abs(theirs[token].logprob - ours)
            largest = max(largest, difference if difference == difference else float("inf"))
    result.write_text(str(largest))


def _describe_prompt(prompt: dict[str, Any]) -> dict[str, Any]:
    """A prompt as vLLM takes it."""
    from PIL import Image

    if "images" not in prompt:
        return {"prompt_token_ids": prompt["ids"]}
    return {
        "prompt": prompt["text"],
        "multi_modal_data": {"image": [Image.open(path) for path in prompt["images"]]},
    }


def _compute_experts_in_torch() -> None:
    """Replaces the Triton kernels of experts beside an adapter, which vLLM has for GPUs alone, by
    the same in torch.

    How the adapter is read, named, stacked and scaled, and the router, remain vLLM's.
    """
    import torch
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

    def add_lora(rows: Any, stacked_a: Any, stacked_b: Any, expert: int) -> Any:
        products = [
            rows @ a[0, expert].T @ b[0, expert].T
            for a, b in zip(stacked_a, stacked_b, strict=True)
        ]
        return torch.cat(products, -1)

    def apply(experts: Any, **given: Any) -> None:
        lora = experts._lora_context
        output = given["output"].zero_()
        for expert in given["topk_ids"].unique().tolist():
            rows, places = (given["topk_ids"] == expert).nonzero(as_tuple=True)
            inputs = given["hidden_states"][rows]
            inner = inputs @ given["w1"][expert].T
            inner += add_lora(inputs, lora.w13_lora_a_stacked, lora.w13_lora_b_stacked, expert)
            activated = inner.new_empty(len(rows), inner.shape[1] // 2)
            experts.activation(given["activation"], activated, inner)
            outputs = activated @ given["w2"][expert].T
            outputs += add_lora(activated, lora.w2_lora_a_stacked, lora.w2_lora_b_stacked, expert)
            output.index_add_(
                0, rows, outputs * given["topk_weights"][rows, places, None].to(outputs.dtype)
            )

    TritonExperts.apply = apply


def _attend_in_torch() -> None:
    """Replaces vLLM's attention for a CPU, which is causal within an image, by what its backends
    for GPUs compute: causal within the window, or both in one range of its `mm_req_doc_ranges`.

    Each prompt is computed at once, so that nothing is read from the cache.
    """
    import torch
    from vllm.v1.attention.backends import cpu_attn

    build = cpu_attn.CPUAttentionMetadataBuilder.build

    def build_with_ranges(builder: Any, prefix: int, common: Any, **given: Any) -> Any:
        metadata = build(builder, prefix, common, **given)
        metadata.ranges = common.mm_req_doc_ranges or {}
        return metadata

    def mask(length: int, window: int, ranges: Sequence[tuple[int, int]]) -> Any:
        places = torch.arange(length)
        distance = places[:, None] - places[None, :]
        seen = distance >= 0
        if window > 0:
            seen &= distance < window
        for first, last in ranges:
            within = (places >= first) & (places <= last)
            seen |= within[:, None] & within[None, :]
        return seen

    def forward(
        kernel: Any,
        layer: Any,
        query: Any,
        key: Any,
        value: Any,
        cache: Any,
        metadata: Any,
        output: Any,
        **others: Any,
    ) -> Any:
        if metadata is None:  # for warming up
            return output
        starts = metadata.query_start_loc.tolist()
        for number, (start, stop) in enumerate(itertools.pairwise(starts)):
            length = int(metadata.seq_lens[number])
            assert stop - start == length, "a prompt in parts"
            heads = [each[start:stop].transpose(0, 1) for each in (query, key, value)]
            attended = torch.nn.functional.scaled_dot_product_attention(
                *heads,
                attn_mask=mask(length, kernel.sliding_window, metadata.ranges.get(number, ())),
                scale=kernel.scale,
                enable_gqa=True,
            )
            output[start:stop] = attended.transpose(0, 1)
        return output

    cpu_attn.CPUAttentionMetadataBuilder.build = build_with_ranges
    cpu_attn.CPUAttentionBackendImpl.forward = forward


def _carry_state_in_torch() -> None:
    """Replaces vLLM's gated delta net for a CPU, which computes in bf16 alone, by its recurrence
    (Yang et al. 2024, equation 10) in fp32, token by token.

    Each prompt is computed at once, from no state.
    """
    import torch
    from torch.nn import functional
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
    from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name

    def recur(query: Any, key: Any, value: Any, decay: Any, rate: Any) -> Any:
        state = query.new_zeros(value.shape[1], query.shape[-1], value.shape[-1])
        outputs = []
        for q, k, v, kept, share in zip(query, key, value, decay, rate, strict=True):
            state = state * kept[:, None, None]
            error = v - torch.einsum("hkv,hk->hv", state, k)
            state = state + torch.einsum("hk,hv->hkv", k, error * share[:, None])
            outputs.append(torch.einsum("hkv,hk->hv", state, q))
        return torch.stack(outputs)

    # torch makes the operator's schema of names and types
    def core(
        mixed_qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        core_attn_out: torch.Tensor,
        layer_name: LayerNameType,
    ) -> None:
        context = get_forward_context()
        if context.attn_metadata is None:  # for warming up
            return
        layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
        metadata = context.attn_metadata[layer.prefix]
        assert not metadata.num_decodes and not metadata.has_initial_state.any()
        kernel = layer.conv1d.weight
        starts = metadata.non_spec_query_start_loc.tolist()
        for start, stop in itertools.pairwise(starts):
            padded = functional.pad(mixed_qkv[start:stop].T, (kernel.shape[-1] - 1, 0))
            rows = functional.silu(functional.conv1d(padded, kernel, groups=len(kernel))).T
            query, key, value = (each[0] for each in layer.rearrange_mixed_qkv(rows))
            times = value.shape[1] // key.shape[1]
            query, key = (
                functional.normalize(each, dim=-1, eps=1e-6).repeat_interleave(times, 1)
                for each in (query, key)
            )
            step = functional.softplus(a[start:stop] + layer.dt_bias)
            core_attn_out[start:stop] = recur(
                query * query.shape[-1] ** -0.5,
                key,
                value,
                (-layer.A_log.exp() * step).exp(),
                b[start:stop].sigmoid(),
            )

    gdn_attention.cpu_gdn_attention_core = core


def list_replaced(family: str, kind: str) -> list[Callable[[], None]]:
    """What replaces kernels of vLLM where a cell is asked: without them it has no number on a
    CPU.
    """
    replaced = []
    if family in MIXTURES and kind in KINDS_OF_ADAPTERS:
        replaced.append(_compute_experts_in_torch)
    if family == "gemma3":
        replaced.append(_attend_in_torch)
    if family == "qwen3_5":
        replaced.append(_carry_state_in_torch)
    return replaced


def table(folder: Path) -> None:
    """Writes served.json, and the table of the page."""
    from finetune.config.served import SERVED_FILE, read_served

    cells = json.loads((folder / "cells.json").read_text())
    families: dict[str, dict[str, Any]] = {}
    for cell in _list_cells(folder):
        value = cells.get(f"{cell.family} {cell.kind}", "not run")
        families.setdefault(cell.family, {})[cell.kind] = (
            value[:200] if isinstance(value, str) else float(f"{value:.1e}")
        )
        for part, cause in CAUSES.items():
            if part in str(value):
                families[cell.family][cell.kind] = cause
    SERVED_FILE.write_text(
        json.dumps({"vllm": cells["vllm"], "families": families}, indent=1) + "\n", encoding="utf-8"
    )
    read_served.cache_clear()
    PAGE.write_text(render_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def render_page(page: str) -> str:
    """docs/export.md with the table of served.json in place of the one that it has."""
    from finetune.config.served import KINDS, read_served

    served = read_served()
    lines = [
        f"| vLLM {served['vllm']} | {' | '.join(KINDS.values())} |",
        f"|---|{'---|' * len(KINDS)}",
    ]
    for family, cells in served["families"].items():
        row: list[str] = []
        for kind in KINDS:
            cell = cells.get(kind, "-")
            is_marked = isinstance(cell, float) and list_replaced(family, kind)
            shown = _show(cell) + (" *" if is_marked else "")
            is_cause = isinstance(cell, str) and " " in cell
            row.append("the same cause" if is_cause and shown in row else shown)
        lines.append(f"| `{family}` | {' | '.join(row)} |")
    before, _, after = page.partition(START)
    return before + START + "\n".join(lines) + "\n" + END + after.partition(END)[2]


def _show(cell: float | str) -> str:
    return f"{cell:.1e}" if isinstance(cell, float) else cell.replace("|", "/")


if __name__ == "__main__":
    COMMANDS: dict[str, Callable[[], None]] = {
        "make": lambda: make(Path(sys.argv[2]), sys.argv[3:]),
        "ask": lambda: ask(Path(sys.argv[2])),
        "table": lambda: table(Path(sys.argv[2])),
    }
    COMMANDS[sys.argv[1]]()
