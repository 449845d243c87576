"""The configs and the card's example that make an exported model one of sentence-transformers."""

from collections.abc import Mapping
from typing import Any

# sentence-transformers' files in a model's folder
MODULES = "modules.json"  # its modules in order; by this file it knows a folder as its own
POOLING = "1_Pooling/config.json"  # which hidden states are pooled
SETTINGS = "config_sentence_transformers.json"  # the prompts and the similarity
LIMITS = "sentence_bert_config.json"  # the largest number of tokens of a text


def describe_sentence_transformer(recipe: Mapping[str, Any], hidden_size: int) -> dict[str, Any]:
    """Makes sentence-transformers' configs for an embedding model.

    Args:
        recipe: Key -> value of a recipe that trains embeddings.
        hidden_size: The length of the model's hidden states.

    Returns:
        Path in the model's folder -> content of the JSON file.
    """
    names = ("Transformer", "Pooling", "Normalize")
    modules = []
    for index, name in enumerate(names):
        path = f"{index}_{name}" if index else ""  # the transformer is in the model's folder itself
        class_name = f"sentence_transformers.models.{name}"
        modules.append({"idx": index, "name": str(index), "path": path, "type": class_name})
    pooling = recipe.get("pooling", "lasttoken")
    # the recipe's value -> the config's key
    modes = {"lasttoken": "pooling_mode_lasttoken", "mean": "pooling_mode_mean_tokens"}
    return {
        MODULES: modules,
        POOLING: {
            "word_embedding_dimension": hidden_size,
            "pooling_mode_cls_token": False,
            **{key: mode == pooling for mode, key in modes.items()},
            "include_prompt": True,
        },
        LIMITS: {"max_seq_length": recipe.get("max_length"), "do_lower_case": False},
        SETTINGS: {
            "prompts": {key: recipe.get(f"{key}_prompt") or "" for key in ("query", "document")},
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
        },
    }


# Markdown for the model card: how to use a reranker, and an embedding model.
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
