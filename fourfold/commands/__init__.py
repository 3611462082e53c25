"""One file per command: it reads its arguments, calls one function and prints."""
