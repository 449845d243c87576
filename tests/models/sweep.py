"""The sweep: every causal family of transformers, and every vision-language class on text, of two layers with random weights,
tried as a run would try it.

    python -m tests.models.sweep            # prints the table
    python -m tests.models.sweep --write    # writes it into docs/families.md
    python -m tests.models.sweep gemma rwkv # prints the rows of some families, and why they are refused

A family's config class gives the architecture; what it does not say takes TINY's sizes, and SPECIAL holds what some
families need to be that small. Nothing here knows an outcome: it comes from what refuses a run at its start (the config,
the files, the export's check, the probe), and from the loss over packed documents against the same model's loss over one
document at a time.
"""

import contextlib
import io
import re
import shutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version

from finetune.config.compatibility import find_problems, refuse_problems
from finetune.config.layout import Sharding
from finetune.config.pretrained import load_config, read_facts
from finetune.config.schema import Data, DatasetSource, Lora, Model, Recipe
from finetune.distributed.join import join, leave
from finetune.distributed.world import World
from finetune.errors import UserError
from finetune.export.logits import check_streamed_logits
from finetune.models.load import auto_class_of, load_model
from finetune.models.probe import check_training_forward
from tests import vision
from tests.models.families import DELTA, EVERY, VOCABULARY, documents, packed, padded, plain_loss
from tests.ranks import ROOT

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
HEAD = ["| `packing: true` | `packing: false` | `model_type` |", "|---|---|---|"]
HEAD_OF_CLASSES = ["| `packing: true` | `packing: false` | Class |", "|---|---|---|"]
TOO_LARGE = "not tried: no config this small"
SAME = "the same"  # as under `packing: true`
CLOSE = 1e-5  # of the loss, relative: packed against unpacked, and against transformers' own

# Sizes by the names that config classes use for them; a family takes those that its class has.
TINY: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim"), 48),
    **dict.fromkeys(
        (
            "num_hidden_layers",
            "n_layer",
            "n_layers",
            "num_layers",
            "decoder_layers",
            "encoder_layers",
        ),
        2,
    ),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "attention_heads", "decoder_attention_heads"),
        4,
    ),
    **dict.fromkeys(
        (
            "intermediate_size",
            "ffn_dim",
            "decoder_ffn_dim",
            "n_inner",
            "moe_shared_expert_intermediate_size",
        ),
        64,
    ),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 32
    ),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2),
    "num_key_value_heads": 2,
    **dict.fromkeys(("vocab_size", "unpadded_vocab_size"), VOCABULARY),
    "max_position_embeddings": 256,
    "head_dim": 16,
    "rotary_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "sliding_window": 7,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "state_size": 8,
}
OF_LAYERS = {
    "attn_config",
    "ffn_config",
}  # sections of a text model's config; any others belong to several models
DEFAULT = object()  # the class's own
SPECIAL: dict[str, dict[str, Any]] = EVERY | {
    "falcon": {"head_dim": DEFAULT},
    "gemma4_unified_text": EVERY["gemma4_text"],
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    },
    "xlnet": {"max_position_embeddings": DEFAULT},
    "zaya": {"num_experts_per_tok": 1},
    "dots1": {"n_shared_experts": 1},
    "longcat_flash": {"zero_expert_num": 2},  # with 256 a rank's tokens may enter no other
    "electra": {"embedding_size": 48},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "helium": {"head_dim": 12},
    "xlstm": EVERY["xlstm"] | {"v_head_dim": DEFAULT},
    "prophetnet": {
        "num_hidden_layers": DEFAULT,
        "num_decoder_layers": 2,
        "num_decoder_attention_heads": 4,
    },
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [16, 32], "attention_head_size": 12},
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid", "hybrid"],
        "hybrid_layer_ids": [1, 2],
        "num_hidden_layers": 3,
    },
    "zamba": {
        "layers_block_type": ["mamba", "hybrid", "hybrid"],
        "num_hidden_layers": 3,
        "head_dim": 24,
    }
    | {"initializer_range": 0.1},  # with 0.3 gradients round by more than 1e-5
    "hrm_text": {"initializer_range": 0.1},  # with 0.3 its recurrence makes much of rounding
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {
            "hidden_size": 48,
            "ffn_hidden_size": 32,
            "moe_num_experts": 4,
            "moe_top_k": 2,
        },
    },
    **dict.fromkeys(("olmo_hybrid", "qwen3_next", "qwen3_5_moe_text"), DELTA),
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"]},
    "bailing_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "llama4_text": {
        "layer_types": ["chunked_attention", "full_attention"],
        "attention_chunk_size": 5,
    },
}


@dataclass(frozen=True, slots=True)
class Trial:
    """What became of one family on one kind of rows: None where it trains, else why not."""

    refused: str | None
    implementation: str = "auto"

    def __str__(self) -> str:
        if self.refused is not None:
            return f"refused: {reason(self.refused)}"
        return (
            "trains"
            if self.implementation == "auto"
            else f"trains with `attn_implementation: {self.implementation}`"
        )


REASONS = {
    "do not keep documents apart": "attention or a state reaches from one document into the next",
    "in which packed documents cannot be kept apart": "layers carry a state from one document into the next",
    "cannot be trained on packed documents": "its own attention takes no document boundaries",
    "does not compute what the model's own forward does": "no causal trunk with a linear head",
    "is a mixture of experts": "a mixture of experts",
    "name or arrange its tensors otherwise": "its files name tensors otherwise than its modules do",
    "arrange its tensors otherwise": "its files arrange tensors otherwise than its modules do",
    "cannot be trained on padded rows": "its forward fails on padded rows",
    "missing: these are not the weights": "its files lack tensors that the model has",
    "without a place in": "its files have tensors that the model lacks",
    "not a plain linear layer": "its output head is not a linear layer",
    "take rows of one length alone": "its positions take rows of one length alone",
    "its head reads several vectors of a token": "its head reads several vectors of a token",
    "its logits are something else than the scores": "its logits are no scores of a head, scaled or capped",
    "has no causal language model of this type": "no language model of its own",
    "`get_input_embeddings` not": "transformers does not say which module is its embedding",
    "its embedding has 0 rows": "its config gives no vocabulary",
    "its export could not be verified": "its export could not be verified",
}


def reason(error: str) -> str:
    """The reason of a refusal in few words."""
    return next((text for part, text in REASONS.items() if part in error), error)


def families() -> list[str]:
    """The `model_type` of every family with a causal language model."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name in CONFIG_MAPPING)


def is_composite(family: str) -> bool:
    """Whether the family is made of several models, of text and images, say."""
    from transformers import CONFIG_MAPPING

    return not set(CONFIG_MAPPING[family].sub_configs or ()) <= OF_LAYERS


def language_model(family: str) -> str | None:
    """The `model_type` of a composite family's language model; None where it has none with a row of its own."""
    from transformers import CONFIG_MAPPING

    try:
        found = CONFIG_MAPPING[family]().get_text_config().model_type
    except Exception:  # several, or a default that its own check refuses
        return None
    return found if found in families() and not is_composite(found) else None


def tiny_config(family: str) -> Any:
    """The family's config at two layers."""
    from transformers import CONFIG_MAPPING, AutoConfig

    default = CONFIG_MAPPING[family]()
    known = {name: value for name, value in TINY.items() if _has(default, name)}
    if _has(default, "kv_lora_rank"):  # every head has a key of its own, and rotates a part of it
        known |= {"num_key_value_heads": 4, "head_dim": TINY["qk_rope_head_dim"]}
    wanted = known | SPECIAL.get(family, {})
    return AutoConfig.for_model(
        family, **{name: value for name, value in wanted.items() if value is not DEFAULT}
    )


def image_classes() -> list[tuple[str, str]]:
    """(`model_type`, class) of every vision-language model."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    pairs = []
    for family, names in sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items()):
        named = [names] if isinstance(names, str) else names
        pairs += [(family, name) for name in named if family in CONFIG_MAPPING]
    return pairs


def is_newer() -> bool:
    """Whether transformers is newer than the one of constraints.txt, which the pages are about."""
    import transformers

    pinned = re.search(
        r"^transformers==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE
    )
    assert pinned is not None
    return Version(transformers.__version__) > Version(pinned[1])


def small_config(family: str) -> Any:
    """The config of a class with small sizes: of a causal model `tiny_config`, of others that of tests/vision.py if it has one."""
    from transformers import CONFIG_MAPPING, AutoConfig

    if not is_composite(family):
        return tiny_config(family)
    if family in vision.FAMILIES | vision.MORE:
        return AutoConfig.for_model(**vision.whole_config(family))
    whole = CONFIG_MAPPING[family]().to_dict()
    sections = CONFIG_MAPPING[family].sub_configs
    small = {
        key: shrink(value) if key in sections and isinstance(value, dict) else value
        for key, value in whole.items()
    }
    return AutoConfig.for_model(**small)


MOST_NUMBERS = 100_000_000  # of a model that is tried
WIDTHS = (
    "hidden_size",
    "out_hidden_size",
    "adapter_in_dim",
    "adapter_input_size",
    "adapter_out_dim",
)
SIZES = TINY | dict.fromkeys(WIDTHS, TINY["hidden_size"]) | {"depth": 2, "num_key_value_heads": 4}
OF_A_LAYER = (
    "intermediate_size",
    "moe_intermediate_size",
    "n_routed_experts",
    "num_attention_heads",
    "num_key_value_heads",
    "q_lora_rank",
    "kv_lora_rank",
)


def shrink(section: dict[str, Any]) -> dict[str, Any]:
    """A section of a config with small sizes."""
    if "per_layer_config" in section:  # which says for each of its own layers what to have
        kept = ("model_type", *WIDTHS, *OF_A_LAYER)
        return {key: SIZES.get(key, section[key]) for key in kept if key in section}
    small = {}
    for key, value in section.items():
        if isinstance(value, list) and len(value) == section.get("num_hidden_layers"):
            small[key] = value[: SIZES["num_hidden_layers"]]
        elif key in SIZES and key != "head_dim" and isinstance(value, int) and value:
            small[key] = SIZES[key]
        elif (
            key == "rope_parameters"
            and "mrope_section" in (value or {})
            and "qk_rope_head_dim" in section
        ):
            small[key] = value | {"mrope_section": [SIZES["qk_rope_head_dim"] // 2 - 2, 1, 1]}
        else:
            small[key] = value
    return small


def _has(config: Any, name: str) -> bool:
    try:
        return hasattr(config, name)
    except Exception:  # an attribute that differs from layer to layer
        return False


def save_tiny(family: str, folder: Path) -> None:
    """A model of `tiny_config` with random weights."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(
        tiny_config(family), dtype=torch.float32, attn_implementation="eager"
    ).save_pretrained(folder)


def save_small(family: str, name: str, folder: Path) -> None:
    """A whole vision-language model of `small_config` with random weights. Raises `ValueError` where it is not small."""
    import transformers

    torch.manual_seed(0)
    config = small_config(family)
    with torch.device("meta"):
        numbers = sum(
            p.numel() for p in getattr(transformers, name)._from_config(config).parameters()
        )
    if numbers > MOST_NUMBERS:
        raise ValueError(f"{numbers:,} parameters")
    model: Any = getattr(transformers, name)._from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    model.save_pretrained(folder)


def try_family(folder: Path, world: World, *, packing: bool) -> Trial:
    """Whether the model of `folder` trains on packed documents, or on one document a row, as a run would decide."""
    first = Trial(None)
    for implementation in ("auto", "eager"):
        trial = Trial(_why_refused(folder, world, packing, implementation), implementation)
        if trial.refused is None or packing:
            return trial
        first = trial if implementation == "auto" else first
    return first


def _why_refused(folder: Path, world: World, packing: bool, implementation: str) -> str | None:
    recipe = Model(model_name_or_path=str(folder), attn_implementation=implementation)  # type: ignore[arg-type]
    data = Data(packing=packing, max_length=64)
    try:
        config = load_config(recipe)
        given = Recipe(
            path="recipe.yaml",
            model=recipe,
            data=replace(data, datasets=(DatasetSource(path="data.jsonl"),)),
        )
        refuse_problems(find_problems(given, facts=read_facts(config, str(folder), VOCABULARY)))
        check_streamed_logits(config)
        model = load_model(recipe, Lora(), 0, world)[0]
        check_training_forward(model, recipe, data, world)
        _check_loss(model, folder, packing)
    except UserError as error:
        return str(error)
    except Exception as error:
        return f"FAULT {type(error).__name__}: {' '.join(str(error).split())} {traceback.extract_tb(error.__traceback__)[-1]}"
    return None


def _check_loss(model: Any, folder: Path, packing: bool) -> None:
    """What was let in must compute the loss of one document at a time: its own, and transformers'."""
    name = f"{folder.name}, {'packed' if packing else 'padded'}"
    model.eval()
    with torch.no_grad():
        found = float(model(**(packed if packing else padded)(documents())))
        alone = sum(float(model(**padded([document]))) for document in documents())
        assert abs(found - alone) <= CLOSE * alone, (
            f"{name}: loss {found}, and {alone} for one document at a time"
        )
        losses = {}
        for implementation in (
            "eager",
            "sdpa",
        ):  # HRM's recurrence makes 7e-5 of the rounding in which these two differ
            kwargs = {"dtype": torch.float32, "attn_implementation": implementation}
            truth = auto_class_of(model.config).from_pretrained(folder, **kwargs).eval()
            losses[implementation] = float(plain_loss(truth, documents()))
            if abs(found - losses[implementation]) <= CLOSE * found:
                return
    raise AssertionError(f"{name}: loss {found}, and by transformers {losses}")


@contextlib.contextmanager
def one_process() -> Iterator[World]:
    """A world of one, and the libraries' notices unsaid."""
    world = join(Sharding(layout="single", use_cpu=True))
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield world
    finally:
        leave(world)


def row(family: str, world: World, root: Path) -> str:
    """The family's line of the table."""
    folder = root / family
    if is_composite(family):
        text = language_model(family)
        outcome = (
            f"its language model is `{text}`" if text else "not tried: no language model of its own"
        )
        return f"| `{family}` | {outcome} | {outcome} |"
    try:
        save_tiny(family, folder)
    except (
        Exception
    ) as error:  # a config class that cannot be made small, which is a fault of TINY and SPECIAL
        print(f"{family}: {' '.join(str(error).split())}", file=sys.stderr)
        return f"| `{family}` | {TOO_LARGE} | {TOO_LARGE} |"
    trials = [try_family(folder, world, packing=packing) for packing in (True, False)]
    return f"| `{family}` | {trials[0]} | {trials[1]} |"


def row_of_class(family: str, name: str, world: World, root: Path) -> str:
    """The line of a whole vision-language class."""
    folder = root / f"{family}-{name}"
    try:
        save_small(family, name, folder)
    except Exception as error:  # as in `row`; or a package that it needs is not installed
        print(f"{name}: {' '.join(str(error).split())}", file=sys.stderr)
        return f"| `{name}` (`{family}`) | {TOO_LARGE} | {TOO_LARGE} |"
    trials = [try_family(folder, world, packing=packing) for packing in (True, False)]
    shutil.rmtree(folder)
    return f"| `{name}` (`{family}`) | {trials[0]} | {trials[1]} |"


def make_table(rows: list[str], head: list[str] = HEAD) -> list[str]:
    """The lines of a table of the page: one for all families with the same outcome."""
    names: dict[str, list[str]] = {}
    for line in rows:
        name, packed, padded = line.strip("| ").split(" | ")
        shown = SAME if packed == padded else padded
        names.setdefault(f"{packed} | {shown}", []).append(name)
    return [*head, *(f"| {outcome} | {', '.join(names[outcome])} |" for outcome in names)]


def table_of(lines: list[str], head: list[str] = HEAD) -> list[str]:
    """The lines of one of the page's two tables."""
    start = lines.index(head[0])
    end = next(
        (index for index in range(start, len(lines)) if not lines[index].startswith("|")),
        len(lines),
    )
    return lines[start:end]


def rows_of(lines: list[str], head: list[str] = HEAD) -> list[str]:
    """The rows of one of the page's two tables, one for each family, sorted."""
    found = []
    for line in table_of(lines, head)[2:]:
        packed, shown, names = line.strip("| ").split(" | ")
        padded = packed if shown == SAME else shown
        found += [f"| {name} | {packed} | {padded} |" for name in names.split(", ")]
    return sorted(found)


def main(arguments: list[str]) -> None:
    chosen = [name for name in arguments if not name.startswith("-")]
    lines: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as root, one_process() as world:
        for family in families():
            if not chosen or family in chosen:
                lines.setdefault(HEAD[0], []).append(row(family, world, Path(root)))
                print(lines[HEAD[0]][-1], flush=True)
        for family, name in image_classes():
            if not chosen or family in chosen or name in chosen:
                lines.setdefault(HEAD_OF_CLASSES[0], []).append(
                    row_of_class(family, name, world, Path(root))
                )
                print(lines[HEAD_OF_CLASSES[0]][-1], flush=True)
    if "--write" in arguments:
        page = PAGE.read_text(encoding="utf-8")
        for head in (HEAD, HEAD_OF_CLASSES):
            old = "\n".join(table_of(page.splitlines(), head))
            page = page.replace(old, "\n".join(make_table(lines[head[0]], head)))
        PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
