"""The command `finetune export`."""

import argparse
import ctypes
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from finetune.config.export_formats import list_keys, split_list
from finetune.export.publish import ExportOptions, check_request, exit_on_signals
from finetune.export.reload_process import start_reload
from finetune.files.network import check_push, push_folder

EXIT_NOT_PUSHED = 1
M_ARENA_MAX = -8  # from glibc's malloc.h: sets the largest number of heaps


def export_command(arguments: argparse.Namespace) -> int:
    """Exports `arguments.source` to `arguments.output`, and pushes the result if that is asked for.

    Returns the exit code: 0, or EXIT_NOT_PUSHED if the export is complete and the push failed.
    """
    source = Path(arguments.source)
    output = Path(arguments.output)
    options = ExportOptions(
        dtype=arguments.dtype,
        max_shard_size=arguments.max_shard_size,
        verify=arguments.verify,
        overwrite=arguments.overwrite,
        model=not arguments.adapter_only,
        adapter_names=arguments.adapter_names,
        trust_remote_code=arguments.trust_remote_code,
        merge_onto=arguments.merge_onto,
        formats=split_list(arguments.format),
        keys={key.name: getattr(arguments, key.name) for key in list_keys()},
    )
    check_request(source, output, options)
    if arguments.push_to_hub is not None:
        check_push(arguments.push_to_hub)
    # glibc alone has `mallopt`. With more than one heap, each thread keeps freed blocks in its own.
    c_library = ctypes.CDLL(None)
    if hasattr(c_library, "mallopt"):
        c_library.mallopt(M_ARENA_MAX, 1)
    with ExitStack() as stack:
        stack.enter_context(exit_on_signals())
        will_be_reloaded = options.verify and options.model and "safetensors" in options.formats
        reload = None
        if will_be_reloaded:
            # Started early: its imports take seconds.
            reload = stack.enter_context(start_reload())
        # Imports make half a million objects. Walking through them takes the collector a third of
        # the imports' time.
        gc.disable()
        stack.callback(gc.enable)
        # The main thread imports all that `open_source` needs before the worker begins to import:
        # where modules import each other, two threads at once may each see a half-made module.
        from huggingface_hub import hf_hub_download, snapshot_download  # noqa: F401

        from finetune.export.source import open_source

        with ThreadPoolExecutor(max_workers=1) as worker:
            importing = worker.submit(_import_export)
            # Mostly waits meanwhile: for the disk, or for a process that imports.
            opened = open_source(source, base_model=arguments.base_model)
            export_source = importing.result()
        gc.freeze()  # the collector skips the objects that exist now
        gc.enable()
        exported = export_source(opened, output, options, reload=reload)
    if arguments.push_to_hub is not None and not push_folder(exported, arguments.push_to_hub):
        return EXIT_NOT_PUSHED
    return 0


def _import_export() -> Callable[..., Path]:
    """Imports all that an export needs, which takes seconds, and returns `export_source`."""
    from finetune.export.export import export_source
    from finetune.export.target import import_transformers

    import_transformers()
    return export_source
