"""The schema and the tool that the proofs of clients use, and their questions."""

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["PRODUCT", "QUESTION", "Calculator", "Sum", "product"]

QUESTION = "What is 20 plus 2?"
PRODUCT = "What is 4821 times 377?"


class Sum(BaseModel):
    """The answer that each client must parse."""

    model_config = ConfigDict(extra="forbid")  # a small model would add properties without end

    result: int = Field(ge=0, le=99)
    even: bool


class Calculator(BaseModel):
    """Compute an expression."""

    expression: str


def product(expression: str) -> str:
    """The value of a product: the demo model calls the tool with "4821 * 377"."""
    left, _, right = expression.split()
    return str(int(left) * int(right))
