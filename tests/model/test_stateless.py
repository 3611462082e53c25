import torch

from fourfold.model.stateless import bernoulli_btd, bits32, key_of, mix64, normal_


def splitmix64(x: int) -> int:
    """SplitMix64 as published, in Python's unbounded integers; a signed result."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    x = x ^ (x >> 31)
    return x - 2**64 if x >= 2**63 else x


def test_mix64_is_splitmix64() -> None:
    inputs = [0, 1, -1, 1234, 2**63 - 1, -(2**63), 2**40 + 5]
    assert mix64(torch.tensor(inputs)).tolist() == [splitmix64(x % 2**64) for x in inputs]


def test_values_are_the_same_for_ever() -> None:
    """Fixed numbers: a checkpoint's run and a published loss curve depend on them."""
    assert key_of(1234, "embedding.tokens.weight") == -4161153204364701420
    assert bits32(torch.tensor([5, -5]), range(3)).tolist() == [
        [-232473079, 75531893, -1030449123],
        [1499963086, -1000892150, -402073105],
    ]
    drawn = normal_(torch.empty(1, 3), 7, 1.0, range(1), range(3))
    torch.testing.assert_close(drawn, torch.tensor([[-0.5178106, 0.8118068, -0.4977071]]))
    mask = bernoulli_btd(torch.tensor([11]), 2, torch.arange(1), 12, 0.5)
    assert mask.int().flatten().tolist() == [1, 1, 1, 1, 1, 0, 0, 1, 0, 1, 0, 1]
