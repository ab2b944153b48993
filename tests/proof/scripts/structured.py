"""The schema that the proofs of structured output use, and the check of an answer."""

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["QUESTION", "Sum"]

QUESTION = "What is 20 plus 2?"


class Sum(BaseModel):
    """The answer that each client must parse."""

    model_config = ConfigDict(extra="forbid")  # a small model would add properties without end

    result: int = Field(ge=0, le=99)
    even: bool
