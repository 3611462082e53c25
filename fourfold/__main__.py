"""`python -m fourfold` and `torchrun -m fourfold` are the same program as the `fourfold` command."""

from fourfold.cli import main

if __name__ == "__main__":
    main()
