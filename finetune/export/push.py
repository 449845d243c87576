"""Pushing an exported folder to the hub: after it stands on disk, and never a reason to lose it."""

import shlex
from collections.abc import Callable
from pathlib import Path


def push(folder: Path, repository: str, tell: Callable[[str], object]) -> bool:
    """Uploads `folder` to the model repository `repository`, made private where it is new. Returns whether it went.

    Whatever goes wrong is told, with the command that tries again, and not raised.
    """
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        api.create_repo(repository, repo_type="model", private=True, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, repo_type="model", commit_message="Upload model")
    except Exception as error:  # the hub, the network, a token: nothing of it is the export's fault
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        tell(
            f"{repository}: not pushed ({reason}); the export stands in {folder}; try again: hf upload {repository} {shlex.quote(str(folder))}"
        )
        return False
    tell(f"pushed to https://huggingface.co/{repository}")
    return True
