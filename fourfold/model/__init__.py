"""The GPT. Plain torch: nothing here knows that other processes exist."""
