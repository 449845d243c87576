"""Multi-token prediction: layers that guess the tokens after the next, by which servers draft.

No torch.

No model class of transformers trains them: each leaves them in the files
(tests/export/test_carried.py asks them all).
"""

import copy
import re
from collections.abc import Iterator

from finetune.constants import Fields, Record

# DeepSeek, GLM and MiMo: num_nextn_predict_layers; Qwen: mtp_num_hidden_layers; MiniMax:
# num_mtp_modules.
OF_PREDICTION = re.compile(r"mtp|nextn")
NUMBERED = re.compile(r"(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d+)\.")


def count_predicting_layers(config: Fields) -> int:
    """Counts the layers for multi-token prediction that a config promises, whichever key its family
    has for them.

    >>> (
    ...     count_predicting_layers({"text_config": {"mtp_num_hidden_layers": 1}}),
    ...     count_predicting_layers({}),
    ... )
    (1, 0)
    """
    return max((section[key] for section, key in _find_counts(config)), default=0)


def promise_no_layers(config: Fields) -> Record:
    """Returns `config` with 0 for each count of layers for multi-token prediction.

    >>> promise_no_layers({"num_nextn_predict_layers": 1, "vocab_size": 5})
    {'num_nextn_predict_layers': 0, 'vocab_size': 5}
    """
    changed = copy.deepcopy(dict(config))
    for section, key in _find_counts(changed):
        section[key] = 0
    return changed


def list_promising_keys(config: Fields) -> list[str]:
    """Returns the keys that `count_predicting_layers` counts by."""
    return sorted({key for _, key in _find_counts(config)})


def _find_counts(config: Fields, above: str = "") -> Iterator[tuple[Record, str]]:
    """Lists (section, key) of each such count above 0."""
    for key, value in list(config.items()):
        if isinstance(value, dict):
            yield from _find_counts(value, str(key))
        elif (
            type(value) is int
            and value > 0
            and "num" in str(key)
            and OF_PREDICTION.search(f"{above}.{key}")
        ):
            assert isinstance(config, dict)
            yield config, key


def predicts_further(name: str, layers: int, predicting_layers: int) -> bool:
    """Whether the tensor `name` belongs to a layer for multi-token prediction, of a model with
    `layers` decoder layers.

    Some families name them so, others number them on after the decoder's.

    >>> (
    ...     predicts_further("mtp.fc.weight", 4, 1),
    ...     predicts_further("model.layers.4.eh_proj.weight", 4, 1),
    ... )
    (True, True)
    >>> predicts_further("model.layers.3.mlp.up_proj.weight", 4, 1)
    False
    """
    if OF_PREDICTION.search(name):
        return True
    numbered = NUMBERED.match(name)
    return numbered is not None and layers <= int(numbered[1]) < layers + predicting_layers
