"""`finetune export`."""

import argparse
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from finetune.export.preflight import refuse_mistakes

EXIT_NOT_PUSHED = 1


def export_command(arguments: argparse.Namespace) -> int:
    """Exports `arguments.source` to `arguments.output`. Returns 0, or 1 where the export stands but could not be pushed."""
    source, output = Path(arguments.source), Path(arguments.output)
    dtype, max_shard_size, overwrite = arguments.dtype, arguments.max_shard_size, arguments.overwrite
    refuse_mistakes(source, output, dtype=dtype, max_shard_size=max_shard_size, overwrite=overwrite)
    from finetune.export.export import Options, export_source
    from finetune.export.push import push
    from finetune.export.source import open_source

    options = Options(
        dtype=dtype,
        max_shard_size=max_shard_size,
        verify=arguments.verify,
        overwrite=overwrite,
        merged=not arguments.adapter_only,
        trust_remote_code=arguments.trust_remote_code,
    )
    with stopped_by_signals():
        made = export_source(open_source(source, base_model=arguments.base_model), output, options, print)
    if arguments.push_to_hub is not None and not push(made, arguments.push_to_hub, print):
        return EXIT_NOT_PUSHED
    return 0


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """SIGINT, SIGTERM and a lost terminal end the block by `SystemExit`, so that what was half made is cleared away."""
    stopped_by: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        if not stopped_by:  # Ctrl-C under a launcher comes twice; the second must not break off the clearing away
            stopped_by.append(number)
            raise SystemExit(128 + number)

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    heeded = [number for number in signals if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores SIGHUP
    before = {number: signal.signal(number, stop) for number in heeded}
    try:
        yield
    except Exception:
        if stopped_by:  # a C extension has put an error of its own in place of the exit
            raise SystemExit(128 + stopped_by[0]) from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
