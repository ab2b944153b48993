"""Greetings, questions about the model itself, and questions that the model cannot answer.

The items of the split are wordings: the training contains the parts of a held-out wording, but not
their combination.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from demo.lexicon import Lexicon
from demo.sample import Draw, Sample, single
from demo.split import is_held_out, split_key

ABILITIES = (
    "I can calculate with small numbers, spell, reverse, sort and count words, "
    "look up facts in a text, write JSON, and call tools."
)
IDENTITY = "I am the minisgl demo model, a very small language model."
UNKNOWN = "Sorry, I am only a small demo model and do not know that."
_HELP = "How can I help you?"

_OPENERS = {
    "Hi": "Hello!",
    "Hello": "Hello!",
    "Hey": "Hello!",
    "Hiya": "Hello!",
    "Howdy": "Hello!",
    "Greetings": "Hello!",
    "Good day": "Hello!",
    "Good morning": "Good morning!",
    "Good afternoon": "Good afternoon!",
    "Good evening": "Good evening!",
}
_ADDRESSED = ("", " there", " minisgl", " friend", " computer", " model", " again", " everyone")
_GREETING_TAILS = ("", ".", "!", "!!", " :)", ", nice to meet you.", ", can you hear me?")
_WELLBEING = (", how are you?", "! How are you?", ", how are you today?", ". How do you do?")

_PREFIXES = ("", "Hi, ", "Hello! ", "So, ", "Please tell me: ", "Quick question: ", "Okay, ")
_SUFFIXES = ("", "?", " today?", " for me?", " exactly?", "?!")
_CAN_DO = (
    "what can you do",
    "what are you able to do",
    "what do you know how to do",
    "how can you help me",
    "what are your skills",
    "what can I ask you",
    "which tasks can you solve",
    "what are you good at",
    "what can you help with",
    "tell me what you can do",
    "list your abilities",
)
_WHO = (
    "who are you",
    "what are you",
    "what is your name",
    "what model are you",
    "which model is this",
    "are you a language model",
    "introduce yourself",
    "tell me who you are",
)
_THANKS = ("thanks", "thank you", "many thanks", "thank you very much", "thanks a lot", "cheers")
_THANKS_TAILS = ("", ".", "!", " :)", ", that helped.", ", minisgl!", ", great!", " for your help.")
_BYES = ("bye", "goodbye", "see you", "see you later", "good night", "farewell", "bye bye")
_BYE_TAILS = ("", ".", "!", " :)", ", minisgl.", ", take care!", ", friend!", " and thanks!")
_UNKNOWN = (
    "What is the capital of {p}?",
    "Who is the president of {p}?",
    "How many people live in {p}?",
    "What is the weather in {p}?",
    "How far is it to {p}?",
    "Tell me about {p}.",
    "Who is {n}?",
    "How old is {n}?",
    "Write a poem about the {w}.",
    "Tell me a joke about a {w}.",
    "Write a story about {n}.",
    "Explain {w} to me.",
    "What is a {w}?",
    "What does {w} mean?",
    "Translate {w} into French.",
    "Why is the {w} so {w2}?",
    "Who invented the {w}?",
    "Where can I buy a {w}?",
    "Write a program that prints {w}.",
    "Is a {w} better than a {w2}?",
)


def wording_key(text: str) -> str:
    """Return the split key of a wording. Upper and lower case give the same key."""
    return split_key("wording", text)


def _recased(rng: random.Random, text: str) -> str:
    style = rng.random()
    return text if style < 0.3 else text.lower() if style < 0.5 else text[0].upper() + text[1:]


def _hello(rng: random.Random) -> tuple[str, str]:
    opener = rng.choice(tuple(_OPENERS))
    if rng.random() < 0.3:
        text = opener + rng.choice(_ADDRESSED) + rng.choice(_WELLBEING)
        return text, f"{_OPENERS[opener]} I am well, thank you. {_HELP}"
    text = opener + rng.choice(_ADDRESSED) + rng.choice(_GREETING_TAILS)
    return text, f"{_OPENERS[opener]} {_HELP}"


def _can_do(rng: random.Random) -> tuple[str, str]:
    return rng.choice(_PREFIXES) + rng.choice(_CAN_DO) + rng.choice(_SUFFIXES), ABILITIES


def _who(rng: random.Random) -> tuple[str, str]:
    return rng.choice(_PREFIXES) + rng.choice(_WHO) + rng.choice(_SUFFIXES[:2]), IDENTITY


def _thanks(rng: random.Random) -> tuple[str, str]:
    return rng.choice(_THANKS) + rng.choice(_THANKS_TAILS), "You are welcome!"


def _bye(rng: random.Random) -> tuple[str, str]:
    return rng.choice(_BYES) + rng.choice(_BYE_TAILS), "Goodbye!"


_KINDS: tuple[Callable[[random.Random], tuple[str, str]], ...] = (
    _hello,
    _hello,
    _can_do,
    _who,
    _thanks,
    _bye,
)


def _unknown(rng: random.Random, lexicon: Lexicon, held_out: bool) -> Sample:
    words = {
        "p": lexicon.place(rng, held_out, 0.7),
        "n": lexicon.name(rng, held_out, 0.7),
        "w": lexicon.word(rng, held_out, 0.9),
        "w2": lexicon.word(rng, held_out, 0.9),
    }
    text = rng.choice(_UNKNOWN).format(**words)
    kinds = {"p": "place", "n": "name", "w": "word", "w2": "word"}
    keys = [split_key(kinds[slot], item) for slot, item in words.items()]
    return single("greeting", text, UNKNOWN, keys)


def greeting(draw: Draw) -> Sample:
    """Greet, ask what the model is or can do, or ask something that it cannot know."""
    if draw.rng.random() < 0.2:
        return _unknown(draw.rng, draw.lexicon, draw.held_out)
    while True:
        text, answer = draw.rng.choice(_KINDS)(draw.rng)
        if is_held_out(wording_key(text)) == draw.held_out:
            return single("greeting", _recased(draw.rng, text), answer, [wording_key(text)])
