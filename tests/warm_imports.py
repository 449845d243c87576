"""Imported once by the fork server of warm_processes.py."""

from tests.forked_ranks import import_all

import_all()
