"""Everything needed to go on, on disk: what is saved, how it is committed, and how it is found again."""
