"""A thousand kills, one line of counts: `python tests/soak.py [--kills 1000] [--ranks 2] [--seed 0] [--minutes 60]`."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from tests.checkpoint.killing import main  # noqa: E402

if __name__ == "__main__":
    main(kills=1000)
