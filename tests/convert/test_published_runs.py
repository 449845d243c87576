"""Given every published file that converts, when it is started with a tiny model of its family, then it trains, or convert has said why not."""

from pathlib import Path

import pytest

from tests.convert.published import list_trials, start


@pytest.mark.slow
def test_what_converts_trains_two_steps(shared: Path, tmp_path: Path) -> None:
    folder = shared / "peer_configs"
    if not folder.is_dir():
        pytest.skip("the published files of other tools are not at hand")
    failed = {}
    for trial in list_trials(folder, tmp_path):
        trained, said = start(trial)
        if not trained and not trial.found.to_do:
            failed[f"{trial.tool}/{trial.file.name}"] = said[-400:]
    assert not failed
