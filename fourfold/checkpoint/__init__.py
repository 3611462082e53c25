"""Everything needed to go on, on disk: what is saved, and how it is committed."""
