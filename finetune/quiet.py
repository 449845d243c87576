"""The first screen of a run is ours: what libraries say at import of things that no user of ours can mend is left unsaid."""

import logging

# torchao, which transformers imports wherever it is installed: kernels for other GPUs that it does not find, and the
# deprecation that its own enums then run into.
TALKATIVE = ("torchao", "torch.utils._pytree")


def quieten() -> None:
    """Errors of TALKATIVE libraries are still told, their warnings not. To be called before they are imported."""
    for name in TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)
