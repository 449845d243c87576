"""`python -m finetune`: the `finetune` command, also where the package is not installed."""

import sys

from finetune.cli import main

sys.exit(main())
