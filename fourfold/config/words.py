"""How values and choices are worded in a sentence for the user. Text only; no rule lives here."""

from collections.abc import Iterable


def any_of(values: Iterable[object]) -> str:
    """`1, 2 or 4`."""
    words = [str(value) for value in values]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def nearest_numbers(values: Iterable[int], wanted: int, most: int = 12) -> list[int]:
    """The values closest to the one asked for, in order: a wide model has more divisors than a sentence can hold."""
    return sorted(sorted(values, key=lambda value: abs(value - wanted))[:most])


def shown(value: object) -> str:
    """A value as the user would write it in YAML, shortened where it is long."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
