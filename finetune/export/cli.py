"""`finetune export`."""

import argparse
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from finetune.export.options import ExportOptions, check_request
from finetune.export.publish import push_folder

EXIT_NOT_PUSHED = 1


def export_command(arguments: argparse.Namespace) -> int:
    """Exports `arguments.source` to `arguments.output`. Returns 0, or 1 where the export is complete but was not pushed."""
    source, output = Path(arguments.source), Path(arguments.output)
    options = ExportOptions(
        dtype=arguments.dtype,
        max_shard_size=arguments.max_shard_size,
        verify=arguments.verify,
        overwrite=arguments.overwrite,
        model=not arguments.adapter_only,
        trust_remote_code=arguments.trust_remote_code,
        merge_onto=arguments.merge_onto,
    )
    check_request(source, output, options)
    from finetune.export.export import export_source
    from finetune.export.source import open_source

    with exit_on_signals():
        exported = export_source(open_source(source, base_model=arguments.base_model), output, options)
    if arguments.push_to_hub is not None and not push_folder(exported, arguments.push_to_hub):
        return EXIT_NOT_PUSHED
    return 0


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """SIGINT, SIGTERM and a lost terminal end the block by `SystemExit`, so that unfinished files are removed."""
    received: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        if not received:  # under a launcher Ctrl-C arrives twice; the second must not interrupt the removal
            received.append(number)
            raise SystemExit(128 + number)

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handled = [number for number in signals if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores SIGHUP
    before = {number: signal.signal(number, stop) for number in handled}
    try:
        yield
    except Exception:
        if received:  # a C extension replaced the exit by an error of its own
            raise SystemExit(128 + received[0]) from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
