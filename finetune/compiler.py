"""How torch.compile is used: sizes as symbols, and what is compiled kept for the next start."""

import os
from contextlib import suppress

import torch

from finetune.files.hub import find_cache

# Graphs that dynamo keeps for one piece of code before it runs the rest eagerly. A model soon needs more than the
# default of 8: one for each kind of layer, with and without gradients, and for a batch of one row.
RECOMPILE_LIMIT = 64
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def configure_compiler() -> None:
    """Sets torch's compiler up for packed rows, which differ in length. Call it before `torch.compile`."""
    _keep_compiled()
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    # Else sizes that are equal in the first batch (tokens and hidden size, tokens and the longest document) become one
    # symbol.
    torch.fx.experimental._config.use_duck_shape = False
    # Epsilons and scales as constants at once: as symbols they become constants after a whole compile, which then
    # starts over.
    torch._dynamo.config.specialize_float = True


def _keep_compiled() -> None:
    """Makes torch keep what it compiles where it outlives a reboot, for the next start. Its own folder is in /tmp.

    Where that cannot be written, or the user has set a folder, all stays as it is.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # torch sets the variable to its own folder when its compiler is imported, which another library may have done.
    if os.environ.get(CACHE_VARIABLE) not in (None, os.path.abspath(default_cache_dir())):  # noqa: PTH100
        return
    folder = find_cache("compiled")
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        os.environ[CACHE_VARIABLE] = str(folder)
