"""What a run is told: typed sections, how they are read, and what can be wrong with them."""
