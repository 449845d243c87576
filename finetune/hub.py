"""Files of the hub, and one sentence for each way in which they can be out of reach. No torch here."""

import os
from pathlib import Path

from finetune.errors import UserError


def hub_file(repository: str, name: str, revision: str | None = None) -> Path:
    """The local copy of one file of a hub repository, downloaded where it is not in the cache yet.

    Raises `UserError` in one sentence where it cannot be had.
    """
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repository, name, revision=revision))
    except Exception as error:  # the hub, the network and the disk each raise their own
        raise hub_error(repository, error, what=name, revision=revision) from None


def folder_at_hand(name: str, revision: str | None = None) -> Path | None:
    """The folder of a model without the network: a local one, or the hub's as far as it is in the cache; None where neither is."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def hub_error(repository: str, error: Exception, what: str = "its files", revision: str | None = None) -> UserError:
    """What the person can do about a hub that did not give `what` of `repository`."""
    from huggingface_hub import errors as hub

    offline = os.environ.get("HF_HUB_OFFLINE", "0").lower() not in ("", "0", "false", "off", "no")
    away = "HF_HUB_OFFLINE is set" if offline else "the hub is away"
    status = getattr(getattr(error, "response", None), "status_code", "an error")
    reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    # The first class that fits, so the particular ones come first.
    sentences: dict[type[Exception] | tuple[type[Exception], ...], str] = {
        hub.HFValidationError: "neither a local folder nor the form of a hub name (owner/name); correct model_name_or_path",
        hub.GatedRepoError: f"gated; accept its license at huggingface.co/{repository} and log in with `hf auth login`",
        hub.RepositoryNotFoundError: "the hub knows no such repository, or it is private; correct the name, or log in with "
        "`hf auth login`",
        hub.RevisionNotFoundError: f"no revision {revision}; correct model_revision or leave it out",
        (hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled, ConnectionError): (
            f"{what} is not on this machine and {away}; download it while online with `hf download {repository}`, or name "
            "a local folder"
        ),
        hub.EntryNotFoundError: f"has no {what}; name a repository of a transformers model",
        hub.HfHubHTTPError: f"the hub answered {status} for {what}; "
        + ("log in again with `hf auth login`" if status == 401 else "try again later, or name a local folder"),
        Exception: f"{what} cannot be had ({reason}); check the name and the network, or name a local folder",
    }
    return UserError(f"{repository}: {next(text for kind, text in sentences.items() if isinstance(error, kind))}")
