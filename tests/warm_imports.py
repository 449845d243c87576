"""Imported once by the fork server of warm_processes.py."""

import gc

gc.disable()  # no garbage is made; `freeze_imports` enables it again

from tests.forked_ranks import import_all  # noqa: E402

import_all()
