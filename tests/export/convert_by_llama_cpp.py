"""Runs llama.cpp's own converter on a model folder, without its tokenizer, which must be a published one:

    python tests/export/convert_by_llama_cpp.py LLAMA_CPP_SOURCE FOLDER

Leaves FOLDER/converted.gguf, in float32.
"""

import sys
from pathlib import Path


def convert(source: Path, folder: Path) -> None:
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    import gguf
    import torch
    from conversion import get_model_class
    from conversion.base import ModelBase

    (architecture,) = ModelBase.load_hparams(folder, False)["architectures"]
    converter = get_model_class(architecture)
    converter.set_vocab = lambda self: None
    with torch.inference_mode():
        converter(folder, gguf.LlamaFileType.ALL_F32, folder / "converted.gguf").write()


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
