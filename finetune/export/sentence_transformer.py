"""What makes an exported language model one of sentence-transformers: which states are pooled, and
the prompts.
"""

from finetune.config.methods import METHODS
from finetune.constants import Fields, Record

MODULES = "modules.json"  # by which sentence-transformers knows a folder as its own
POOLING = "1_Pooling/config.json"
SETTINGS = "config_sentence_transformers.json"  # its prompts
LIMITS = "sentence_bert_config.json"  # how many tokens it reads


def is_embedder(recipe: Fields) -> bool:
    """Whether a recipe, as a flat mapping, trains embeddings."""
    method = METHODS.get(str(recipe.get("method")))
    return method is not None and method.embeds


def is_reranker(recipe: Fields) -> bool:
    """Whether a recipe, as a flat mapping, trains a reranker."""
    method = METHODS.get(str(recipe.get("method")))
    return method is not None and method.ranks


def describe_sentence_transformer(recipe: Fields, hidden: int) -> Record:
    """The content of each file of JSON beside the model, by its path in the folder.

    Args:
        recipe: As a flat mapping, of a method that embeds.
        hidden: Numbers in a state.
    """
    names = ("Transformer", "Pooling", "Normalize")
    modules = []
    for place, name in enumerate(names):
        path = f"{place}_{name}" if place else ""
        kind = f"sentence_transformers.models.{name}"
        modules.append({"idx": place, "name": str(place), "path": path, "type": kind})
    pooled = recipe.get("pooling", "lasttoken")
    modes = {"lasttoken": "pooling_mode_lasttoken", "mean": "pooling_mode_mean_tokens"}
    return {
        MODULES: modules,
        POOLING: {
            "word_embedding_dimension": hidden,
            "pooling_mode_cls_token": False,
            **{name: mode == pooled for mode, name in modes.items()},
            "include_prompt": True,
        },
        LIMITS: {"max_seq_length": recipe.get("max_length"), "do_lower_case": False},
        SETTINGS: {
            "prompts": {key: recipe.get(f"{key}_prompt") or "" for key in ("query", "document")},
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
        },
    }


USE_RANKER = """```python
from sentence_transformers import CrossEncoder

model = CrossEncoder("PATH_OR_NAME")
ranked = model.rank("...", ["...", "..."])
```

The chat template writes a query with a document."""
USE = """```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("PATH_OR_NAME")
queries = model.encode_query(["..."])
documents = model.encode_document(["..."])
scores = model.similarity(queries, documents)
```"""
