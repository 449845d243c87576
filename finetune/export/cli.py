"""`finetune export`."""

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
M_ARENA_MAX = -8  # of glibc's malloc.h


def export_command(arguments: argparse.Namespace) -> int:
    """Exports `arguments.source` to `arguments.output`.

    Returns 0, or 1 if complete but not pushed.
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
    # glibc's: else each thread keeps freed blocks in a heap of its own
    if hasattr(ctypes.CDLL(None), "mallopt"):
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
    with ExitStack() as beside:
        beside.enter_context(exit_on_signals())
        is_opened = options.verify and options.model and "safetensors" in options.formats
        reload = None
        if is_opened:
            reload = beside.enter_context(start_reload())
        # it would walk through half a million objects that imports make, a third of their time
        gc.disable()
        beside.callback(gc.enable)
        with ThreadPoolExecutor(max_workers=1) as pool:
            from huggingface_hub import hf_hub_download, snapshot_download  # noqa: F401  # opening needs them

            from finetune.export.source import open_source

            # From here on the main thread imports nothing: of modules that import each other, each
            # thread may see half. opening waits meanwhile: for the disk, or a process that imports
            importing = pool.submit(_import_export)
            opened = open_source(source, base_model=arguments.base_model)
            export_source = importing.result()
        gc.freeze()
        gc.enable()
        exported = export_source(opened, output, options, reload=reload)
    if arguments.push_to_hub is not None and not push_folder(exported, arguments.push_to_hub):
        return EXIT_NOT_PUSHED
    return 0


def _import_export() -> Callable[..., Path]:
    """`export_source`, once all that it imports, which takes seconds, has been imported."""
    from finetune.export.export import export_source
    from finetune.export.target import import_transformers

    import_transformers()
    return export_source
