"""Sums and differences of numbers below 100, products up to 12 times 12."""

from __future__ import annotations

import random

from demo.sample import Draw, Sample, single
from demo.split import is_held_out, split_key

LARGEST_TERM = 99
LARGEST_FACTOR = 12
# Users try small numbers first, and a uniform draw would rarely choose them.
_SMALL_TERM = 20
_SMALL_SHARE = 0.25

PHRASES: dict[str, tuple[str, ...]] = {
    "+": (
        "What is {a} + {b}?",
        "What is {a} plus {b}?",
        "{a} + {b} = ?",
        "{a}+{b}",
        "{a} + {b}",
        "Add {a} and {b}.",
        "Calculate {a} + {b}.",
        "Compute {a} + {b}",
        "How much is {a} plus {b}?",
        "What do you get when you add {a} and {b}?",
        "Please work out {a} + {b}.",
        "What is the sum of {a} and {b}?",
        "Tell me {a} plus {b}.",
    ),
    "-": (
        "What is {a} - {b}?",
        "What is {a} minus {b}?",
        "{a} - {b} = ?",
        "{a}-{b}",
        "{a} - {b}",
        "Take {b} away from {a}.",
        "Subtract {b} from {a}.",
        "Calculate {a} - {b}.",
        "Compute {a} - {b}",
        "How much is {a} minus {b}?",
        "Please work out {a} - {b}.",
        "What is the difference {a} minus {b}?",
        "Tell me {a} minus {b}.",
    ),
    "x": (
        "What is {a} x {b}?",
        "What is {a} times {b}?",
        "What is {a} * {b}?",
        "{a} * {b} = ?",
        "{a}*{b}",
        "{a} × {b}",  # noqa: RUF001 - users type this sign
        "Multiply {a} by {b}.",
        "Calculate {a} * {b}.",
        "Compute {a} times {b}",
        "How much is {a} times {b}?",
        "Please work out {a} x {b}.",
        "What is the product of {a} and {b}?",
        "Tell me {a} times {b}.",
    ),
}


def operand_key(operator: str, a: int, b: int) -> str:
    """Return the split key of an operand pair."""
    return split_key("pair", f"{a} {operator} {b}")


def pair_is_held_out(operator: str, a: int, b: int) -> bool:
    """Whether the evaluation uses the pair and the training does not.

    A product is held out in one order only. A model cannot compute 7 x 8 without having learnt
    the table, so the training contains the other order. The evaluation tests whether the model
    knows that both products are equal.
    """
    if operator != "x":
        return is_held_out(operand_key(operator, a, b))
    return (
        a != b and is_held_out(operand_key("x", a, b)) and not is_held_out(operand_key("x", b, a))
    )


def apply(operator: str, a: int, b: int) -> int:
    """Compute `a operator b`."""
    return {"+": a + b, "-": a - b, "x": a * b}[operator]


def draw_pair(rng: random.Random, operator: str, held_out: bool) -> tuple[int, int]:
    """Draw an operand pair from one side of the split; differences are mostly not negative."""
    largest = LARGEST_FACTOR if operator == "x" else LARGEST_TERM
    if rng.random() < _SMALL_SHARE:
        largest = min(largest, _SMALL_TERM)
    while True:
        a, b = rng.randint(0, largest), rng.randint(0, largest)
        if operator == "-" and b > a and rng.random() < 0.7:
            a, b = b, a
        if pair_is_held_out(operator, a, b) == held_out:
            return a, b


def arithmetic(draw: Draw) -> Sample:
    """Ask for one sum, difference or product; the answer is the number alone."""
    operator = draw.rng.choice("+++---xx")
    a, b = draw_pair(draw.rng, operator, draw.held_out)
    user = draw.rng.choice(PHRASES[operator]).format(a=a, b=b)
    keys = [operand_key(operator, a, b)]
    return single("arithmetic", user, str(apply(operator, a, b)), keys)
