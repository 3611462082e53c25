"""What `fourfold prepare` leaves: `OUT.manifest.json`, `OUT.tokenizer.json`, and per shard tokens and lengths.

A shard is two .npy files, `OUT-00000.tokens.npy` and `OUT-00000.lengths.npy`. The manifest is written last: without
it nothing here is complete, and nothing here is read.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from fourfold.data.formats.paddle import load_ids
from fourfold.data.formats.tokenfile import TokenFile, check_lengths, unreadable
from fourfold.errors import DataError

MANIFEST, TOKENIZER, PROGRESS = ".manifest.json", ".tokenizer.json", ".progress.json"
TOKENS, LENGTHS = ".tokens.npy", ".lengths.npy"
VERSION = 1


def shard_paths(prefix: Path, number: int) -> tuple[Path, Path]:
    stem = f"{prefix.name}-{number:05d}"
    return prefix.with_name(stem + TOKENS), prefix.with_name(stem + LENGTHS)


def read_manifest(prefix: Path) -> dict[str, Any]:
    path = prefix.with_name(prefix.name + MANIFEST)
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if manifest["version"] != VERSION:
            raise DataError(f"'{path}' has version {manifest['version']}; version {VERSION} is read: prepare it again")
        return dict(manifest)
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"'{path}' is no manifest of prepared data ({error!r}); prepare the corpus again") from error


def open_prepared(prefix: Path) -> list[TokenFile]:
    manifest = read_manifest(prefix)
    tokenizer = prefix.with_name(prefix.name + TOKENIZER)
    found = []
    for number, shard in enumerate(manifest["shards"]):
        ids, index = shard_paths(prefix, number)
        tokens, lengths = load_ids(ids), load_ids(index)
        if len(tokens) != shard["tokens"] or len(lengths) != shard["documents"]:
            raise DataError(
                f"'{ids}' holds {len(tokens):,} tokens in {len(lengths):,} documents, not the {shard['tokens']:,} in "
                f"{shard['documents']:,} of '{prefix.name}{MANIFEST}'; copy the folder again, or prepare again"
            )
        lengths = lengths.astype(np.int64)
        check_lengths(ids, lengths, len(tokens), str(index))
        fingerprint = manifest["tokenizer"]["fingerprint"]
        found.append(TokenFile(ids, "fourfold", tokens, lengths, tokenizer, fingerprint, shard["checksum"]))
    return found
