"""The update: AdamW, its schedule, the one gradient norm, the loss scale."""
