"""Layers for multi-token prediction, which predict tokens beyond the next: servers draft by them.

No model class of transformers trains these layers: it ignores their tensors in the files
(tests/export/test_carried.py checks every class). Imports no torch.
"""

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any

# What names of keys and of tensors contain. The keys: num_nextn_predict_layers (DeepSeek, GLM and
# MiMo), mtp_num_hidden_layers (Qwen), num_mtp_modules (MiniMax).
PREDICTION_NAME = re.compile(r"mtp|nextn")
LAYER_NUMBER = re.compile(r"(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d+)\.")


def count_predicting_layers(config: Mapping[str, Any]) -> int:
    """Returns how many layers for multi-token prediction a config promises, by whichever key.

    >>> (
    ...     count_predicting_layers({"text_config": {"mtp_num_hidden_layers": 1}}),
    ...     count_predicting_layers({}),
    ... )
    (1, 0)
    """
    return max((section[key] for section, key in _find_counts(config)), default=0)


def promise_no_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of `config` in which each count of such layers is 0.

    >>> promise_no_layers({"num_nextn_predict_layers": 1, "vocab_size": 5})
    {'num_nextn_predict_layers': 0, 'vocab_size': 5}
    """
    changed = copy.deepcopy(dict(config))
    for section, key in _find_counts(changed):
        section[key] = 0
    return changed


def list_promising_keys(config: Mapping[str, Any]) -> list[str]:
    """Lists the keys that promise layers for multi-token prediction, sorted."""
    return sorted({key for _, key in _find_counts(config)})


def _find_counts(
    config: Mapping[str, Any], section_name: str = ""
) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields (section, key) of each count of layers for multi-token prediction that is above 0.

    `section_name`: the key of the section `config`, which may say what its counts are of; "" for a
    whole config.
    """
    for key, value in list(config.items()):
        if isinstance(value, dict):
            yield from _find_counts(value, str(key))
        elif (
            type(value) is int
            and value > 0
            and "num" in str(key)
            and PREDICTION_NAME.search(f"{section_name}.{key}")
        ):
            assert isinstance(config, dict)
            yield config, key


def predicts_further(name: str, layers: int, predicting_layers: int) -> bool:
    """Whether the tensor `name` belongs to a layer for multi-token prediction.

    Some families name these layers by what they are for, others number them on after the decoder's.

    Args:
        name: The tensor's name in the files.
        layers: Decoder layers of the model.
        predicting_layers: As `count_predicting_layers` returns it.

    >>> (
    ...     predicts_further("mtp.fc.weight", 4, 1),
    ...     predicts_further("model.layers.4.eh_proj.weight", 4, 1),
    ... )
    (True, True)
    >>> predicts_further("model.layers.3.mlp.up_proj.weight", 4, 1)
    False
    """
    if PREDICTION_NAME.search(name):
        return True
    match = LAYER_NUMBER.match(name)
    return match is not None and layers <= int(match[1]) < layers + predicting_layers
