"""Conversations of two and three turns whose last answer depends on an earlier turn."""

from __future__ import annotations

from demo.sample import Draw, Exchange, Sample
from demo.split import is_held_out, split_key
from demo.tasks.letters import reversing, spelling, word_key
from demo.tasks.lists import draw_numbers, numbers_key
from demo.tasks.numbers import apply, arithmetic, draw_pair, operand_key
from demo.words import ANIMALS, COLOURS, FRUITS, JOBS

_Part = tuple[Exchange, Exchange, list[str]]
_FAVOURITES = (("colour", COLOURS), ("animal", ANIMALS), ("fruit", FRUITS), ("job", JOBS))


def _name(draw: Draw) -> _Part:
    rng = draw.rng
    name = draw.lexicon.name(rng, draw.held_out, 0.5)
    told = rng.choice(
        ("My name is {n}.", "I am {n}.", "Hello, my name is {n}.", "Hi, I am {n}.", "I'm {n}.")
    )
    asked = rng.choice(
        ("What is my name?", "Who am I?", "Do you remember my name?", "Tell me my name.")
    )
    first = Exchange(told.format(n=name), f"Nice to meet you, {name}!")
    return first, Exchange(asked, f"Your name is {name}."), [split_key("name", name)]


def _favourite(draw: Draw) -> _Part:
    rng = draw.rng
    kind, items = rng.choice(_FAVOURITES)
    own = [item for item in items if is_held_out(word_key(item)) == draw.held_out]
    if not own or rng.random() < 0.4:
        kind, value = "word", draw.lexicon.word(rng, draw.held_out, 0.6)
    else:
        value = rng.choice(own)
    told = rng.choice(("My favourite {k} is {v}.", "The {k} I like best is {v}."))
    asked = rng.choice(
        ("What is my favourite {k}?", "Which {k} do I like best?", "Tell me my favourite {k}.")
    )
    first = Exchange(told.format(k=kind, v=value), f"Noted: your favourite {kind} is {value}.")
    second = Exchange(asked.format(k=kind), f"Your favourite {kind} is {value}.")
    return first, second, [word_key(value)]


def _home(draw: Draw) -> _Part:
    rng = draw.rng
    name = draw.lexicon.name(rng, draw.held_out, 0.5)
    place = draw.lexicon.place(rng, draw.held_out, 0.5)
    told = rng.choice(("I am {n} and I live in {p}.", "My name is {n} and I come from {p}."))
    first = Exchange(told.format(n=name, p=place), f"Hello {name}, how is life in {place}?")
    if rng.random() < 0.6:
        asked = rng.choice(("Where do I live?", "Which place do I live in?", "Where am I from?"))
        second = Exchange(asked, f"You live in {place}.")
    else:
        second = Exchange("What is my name?", f"Your name is {name}.")
    return first, second, [split_key("name", name), split_key("place", place)]


def _pet(draw: Draw) -> _Part:
    rng = draw.rng
    name = draw.lexicon.name(rng, draw.held_out, 0.4)
    animal = rng.choice(("cat", "dog", "horse", "parrot", "rabbit", "hamster"))
    told = rng.choice(
        ("I have a {a} called {n}.", "My {a} is called {n}.", "My {a}'s name is {n}.")
    )
    asked = rng.choice(("What is my {a} called?", "What is the name of my {a}?"))
    first = Exchange(told.format(a=animal, n=name), f"{name} is a lovely name for a {animal}.")
    second = Exchange(asked.format(a=animal), f"Your {animal} is called {name}.")
    return first, second, [split_key("name", name)]


def _number(draw: Draw) -> _Part:
    rng = draw.rng
    operator = rng.choice("+-")
    a, b = draw_pair(rng, operator, draw.held_out)
    told = rng.choice(("Remember the number {a}.", "My number is {a}.", "Keep {a} in mind."))
    first = Exchange(told.format(a=a), f"I will remember {a}.")
    keys = [operand_key(operator, a, b)]
    if rng.random() < 0.5:
        asked = rng.choice(
            ("Which number did I tell you?", "What was my number?", "What is the number?")
        )
        return first, Exchange(asked, str(a)), keys
    verb = "Add {b} to it." if operator == "+" else "Subtract {b} from it."
    return first, Exchange(verb.format(b=b), str(apply(operator, a, b))), keys


def _spell_then_reverse(draw: Draw) -> _Part:
    rng = draw.rng
    sample = spelling(draw)
    first = sample.exchanges[0]
    word = first.assistant.replace("-", "")
    asked = rng.choice(("Now reverse it.", "And backwards?", "Now write that word backwards."))
    return first, Exchange(asked, word[::-1], by_letter=True), [word_key(word)]


def _sort_then_turn(draw: Draw) -> _Part:
    rng = draw.rng
    if rng.random() < 0.5:
        numbers = draw_numbers(rng, draw.held_out)
        items, ordered = map(str, numbers), [str(n) for n in sorted(numbers)]
        keys = [numbers_key(numbers)]
    else:
        words = draw.lexicon.distinct_words(rng, draw.held_out, rng.randint(3, 5), 0.7)
        items, ordered = iter(words), sorted(words)
        keys = [word_key(word) for word in words]
    first = Exchange(f"Sort {', '.join(items)}.", ", ".join(ordered))
    asked, answer = rng.choice(
        (
            ("And in the opposite order?", ", ".join(reversed(ordered))),
            ("Which one comes first?", ordered[0]),
            ("Which one is last?", ordered[-1]),
        )
    )
    return first, Exchange(asked, answer), keys


_PARTS = (_name, _favourite, _home, _pet, _number, _spell_then_reverse, _sort_then_turn)
# In the last three, a turn in between would change the meaning of "it".
_MAY_BE_INTERRUPTED = (_name, _favourite, _home, _pet)


def conversation(draw: Draw) -> Sample:
    """Tell something, then ask about it, sometimes with an unrelated exchange in between."""
    part = draw.rng.choice(_PARTS)
    first, second, keys = part(draw)
    exchanges = [first, second]
    if part in _MAY_BE_INTERRUPTED and draw.rng.random() < 0.35:
        aside = draw.rng.choice((arithmetic, spelling, reversing))(draw)
        exchanges.insert(1, aside.exchanges[0])
        keys = [*keys, *aside.keys]
    return Sample("conversation", tuple(exchanges), frozenset(keys))
