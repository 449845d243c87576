"""Runs llama.cpp's own converter on a model folder, without its tokenizer, which must be a published one:

    python tests/export/convert_by_llama_cpp.py LLAMA_CPP_SOURCE FOLDER

Leaves FOLDER/converted.gguf, in float32.
"""

import sys
from pathlib import Path

source, folder = Path(sys.argv[1]), Path(sys.argv[2])
sys.path[:0] = [str(source), str(source / "gguf-py")]

import gguf  # noqa: E402
import torch  # noqa: E402
from conversion import get_model_class  # noqa: E402
from conversion.base import ModelBase  # noqa: E402

(architecture,) = ModelBase.load_hparams(folder, False)["architectures"]
converter = get_model_class(architecture)
converter.set_vocab = lambda self: None
with torch.inference_mode():
    converter(folder, gguf.LlamaFileType.ALL_F32, folder / "converted.gguf").write()
