"""The number of examples of a test by Hypothesis, and the settings of all such tests."""

from hypothesis import settings

DEEP = "deep"  # the profile of `make proof`


def examples(most: int) -> int:
    """Return the value of max_examples: `most` in a proof, otherwise a quarter."""
    return most if settings.get_current_profile_name() == DEEP else most // 4


def register_profiles() -> None:
    """Let each run draw new examples, also where CI is set, and print how to repeat a failure."""
    common = settings(derandomize=False, deadline=None, print_blob=True)
    settings.register_profile(DEEP, common, max_examples=100)
    settings.register_profile("quarter", common, max_examples=100 // 4)
    settings.load_profile("quarter")
