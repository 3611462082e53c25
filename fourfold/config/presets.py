"""Published GPT sizes by name. A preset fills the model keys that neither the file nor a flag gives.

The names are PaddleNLP's and GPT-3's; 345M and 350M are two names of one model. Weights are not part of a preset.
"""

PRESETS: dict[str, dict[str, int]] = {
    name: {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "vocab_size": 50304,
        "max_position_embeddings": 1024,
    }
    for name, (layers, hidden, heads) in {
        "gpt2-en": (12, 768, 12),
        "gpt2-medium-en": (24, 1024, 16),
        "gpt2-large-en": (36, 1280, 20),
        "gpt2-xl-en": (48, 1600, 25),
        "gpt2-small-en": (4, 1024, 4),
        "gpt3-125M": (12, 768, 12),
        "gpt3-345M": (24, 1024, 16),
        "gpt3-350M": (24, 1024, 16),
        "gpt3-760M": (24, 1536, 16),
        "gpt3-1.3B": (24, 2048, 16),
        "gpt3-2.7B": (32, 2560, 32),
        "gpt3-6.7B": (32, 4096, 32),
        "gpt3-13B": (40, 5120, 40),
        "gpt3-89B": (48, 12288, 96),
        "gpt3-175B": (96, 12288, 96),
    }.items()
}


def find_preset(name: str) -> dict[str, int] | None:
    """The model keys of a preset, in any case; the gpt3 sizes also go by PaddleNLP's `gpt3-13B-en`."""
    wanted = name.lower()
    for preset, fields in PRESETS.items():
        known = preset.lower()
        if wanted == known or (known.startswith("gpt3-") and wanted == f"{known}-en"):
            return fields
    return None
