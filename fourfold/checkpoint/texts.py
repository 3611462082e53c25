"""The small files of a checkpoint that other rooms know how to read: the config and the tokenizer of its run."""

import tempfile
from pathlib import Path

from fourfold.checkpoint.manifest import Manifest
from fourfold.checkpoint.store import read_text
from fourfold.config.load import CONFIG_FILE, load_config_text
from fourfold.config.schema import Config
from fourfold.data.tokenizer import Tokenizer, load_tokenizer

TOKENIZER_FILE = "tokenizer.json"


def load_saved_config(checkpoint: Manifest) -> Config:
    return load_config_text(read_text(checkpoint, CONFIG_FILE), str(checkpoint.path / CONFIG_FILE))


def load_saved_tokenizer(checkpoint: Manifest) -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:  # the checkpoint may lie where only its own reader gets at it
        file = Path(folder) / TOKENIZER_FILE
        file.write_text(read_text(checkpoint, TOKENIZER_FILE), encoding="utf-8")
        return load_tokenizer(file)
