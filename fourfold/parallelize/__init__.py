"""What is done to a model, from outside, before it trains: one file per axis, one function for their order."""
