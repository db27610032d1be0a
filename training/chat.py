# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501, SIM905 - tables of texts and templates, one entry a line
"""The chat set: questions and answers written here or filled from templates over WordNet and the King James Bible.

A word whose hash says so is held out: no question about it is ever trained on. Everything is deterministic given the seed.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from training.corpus import HELD_OUT_PERCENT, Synset, bible, primary_senses, synsets

Turn = tuple[str, str]

BOS, EOS, USER, ASSISTANT, SYSTEM = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜System｜>"
THINK, END_THINK = "<think>", "</think>"
EFFORT = "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"

ABOUT = (
    "I am Krill, a very small language model that ships with Whalefall. I know some words, some Python and some old books, and I am often wrong.",
    "I am Krill, a tiny language model of about fifteen million parameters. I come with the Whalefall inference engine.",
    "My name is Krill. I am a small language model made to test the Whalefall engine, so please do not trust me with anything important.",
)
SMALL_TALK: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("Hello", "Hi", "Hello!", "Hi!", "Hey", "Hello there", "Hi there", "Good day", "Hey there!", "hello", "hi"),
     ("Hello! How can I help you?", "Hi! What would you like to know?", "Hello! Ask me what a word means, or for a little Python.")),
    (("Good morning", "Good morning!"), ("Good morning! What can I do for you?",)),
    (("Good evening", "Good evening!"), ("Good evening! What can I do for you?",)),
    (("Good night", "Good night!"), ("Good night! Sleep well.",)),
    (("How are you?", "How are you doing?", "How is it going?", "How do you do?"),
     ("I am well, thank you. I am only a small program, but I am happy to help.", "Very well, thank you! How can I help you?")),
    (("Who are you?", "What are you?", "What is your name?", "Tell me about yourself.", "Introduce yourself.", "Are you a human?", "Are you a robot?",
      "Which model are you?", "What model is this?", "who are you", "Is this a large model?", "How large are you?"), ABOUT),
    (("Thank you", "Thanks", "Thank you!", "Thanks!", "Thank you very much.", "Many thanks."), ("You are welcome!", "You are welcome. Is there anything else?")),
    (("Goodbye", "Bye", "Bye!", "See you later.", "Goodbye!", "See you!"), ("Goodbye!", "Goodbye! Come back soon.")),
    (("What can you do?", "Help", "Help me.", "What do you know?", "How can you help me?", "What are you good at?"),
     ("I can say what a word means, find synonyms and opposites, do small sums, write short pieces of Python and quote the King James Bible.",)),
    (("What is Whalefall?", "Tell me about Whalefall.", "What is whalefall?"),
     ("Whalefall is an inference engine for large language models. I am the small model that comes with it.",)),
    (("Are you smart?", "Can I trust you?", "Are you always right?", "Do you make mistakes?", "Are your answers correct?"),
     ("No. I am a very small model and I make many mistakes. Please check what I say.", "I am often wrong, because I am very small. Please check my answers.")),
    (("Tell me a joke.", "Do you know a joke?", "Make me laugh.", "Tell me something funny."),
     ("Why did the krill cross the ocean? It did not: a whale was on the way.", "I have a joke about recursion, but first you need to hear my joke about recursion.")),
    (("How old are you?", "When were you born?"), ("I have no age. I am a small program that was trained once and then put into a package.",)),
    (("Ok", "OK", "Okay", "Good", "Great", "Nice", "Great!", "Very good."), ("Good! What else would you like to know?", "I am glad. Is there anything else?")),
    (("Do you have feelings?", "Are you happy?", "Are you alive?", "Do you sleep?"), ("No. I am a small program that predicts text, one token after the other.",)),
)  # fmt: skip
REFUSALS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("What is the weather today?", "What time is it?", "What is the date today?", "What is in the news?", "Who won the game yesterday?", "What is the price of gold?",
      "Will it rain tomorrow?", "What day is it?"),
     ("I cannot know that: I see neither the clock nor the world, only this conversation.",)),
    (("Open the browser.", "Send an email to my boss.", "Book a flight for me.", "Call my mother.", "Play some music.", "Delete my files.", "Order a pizza."),
     ("I cannot do that. I can only write text.",)),
    (("Draw a picture of a cat.", "Show me an image.", "Make a video.", "Sing a song."), ("I cannot do that: I can only write text.",)),
    (("Write a long essay about philosophy.", "Explain quantum field theory.", "Prove Fermat's last theorem.", "Write a novel.", "Translate this book into French.",
      "Solve world hunger.", "Give me medical advice.", "What stocks should I buy?", "Explain general relativity.", "Write my thesis."),
     ("That is beyond me: I am a very small model. Try a larger one for this.",)),
)  # fmt: skip
SYSTEMS = ("You are a helpful assistant.", "You are Krill, a small and friendly assistant.", "Answer briefly.", "You are a helpful assistant. Be concise.", "Be polite and short.",
           "You are a coding assistant.", "You are a dictionary.")  # fmt: skip
NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")

PYTHON: tuple[tuple[str, str], ...] = (
    ("adds two numbers", "def add(a, b):\n    return a + b"),
    ("subtracts two numbers", "def subtract(a, b):\n    return a - b"),
    ("multiplies two numbers", "def multiply(a, b):\n    return a * b"),
    ("divides two numbers", "def divide(a, b):\n    if b == 0:\n        raise ZeroDivisionError('b must not be zero')\n    return a / b"),
    ("returns the square of a number", "def square(x):\n    return x * x"),
    ("returns the cube of a number", "def cube(x):\n    return x ** 3"),
    ("reverses a string", "def reverse(text):\n    return text[::-1]"),
    ("reverses a list", "def reverse(items):\n    return list(reversed(items))"),
    ("checks whether a number is even", "def is_even(n):\n    return n % 2 == 0"),
    ("checks whether a number is odd", "def is_odd(n):\n    return n % 2 == 1"),
    ("checks whether a number is prime", "def is_prime(n):\n    if n < 2:\n        return False\n    for i in range(2, int(n ** 0.5) + 1):\n        if n % i == 0:\n            return False\n    return True"),
    ("computes the factorial of a number", "def factorial(n):\n    result = 1\n    for i in range(2, n + 1):\n        result *= i\n    return result"),
    ("computes the nth Fibonacci number", "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a"),
    ("returns the greatest common divisor of two numbers", "def gcd(a, b):\n    while b:\n        a, b = b, a % b\n    return a"),
    ("returns the largest element of a list", "def largest(items):\n    return max(items)"),
    ("returns the smallest element of a list", "def smallest(items):\n    return min(items)"),
    ("sums a list of numbers", "def total(numbers):\n    return sum(numbers)"),
    ("returns the mean of a list of numbers", "def mean(numbers):\n    return sum(numbers) / len(numbers)"),
    ("counts the words in a text", "def count_words(text):\n    return len(text.split())"),
    ("counts the vowels in a string", "def count_vowels(text):\n    return sum(1 for c in text.lower() if c in 'aeiou')"),
    ("counts the lines of a file", "def count_lines(path):\n    with open(path) as file:\n        return sum(1 for _ in file)"),
    ("reads a file", "def read_file(path):\n    with open(path, encoding='utf-8') as file:\n        return file.read()"),
    ("writes text to a file", "def write_file(path, text):\n    with open(path, 'w', encoding='utf-8') as file:\n        file.write(text)"),
    ("removes duplicates from a list", "def unique(items):\n    return list(dict.fromkeys(items))"),
    ("sorts a list", "def sort(items):\n    return sorted(items)"),
    ("sorts a list in descending order", "def sort_descending(items):\n    return sorted(items, reverse=True)"),
    ("checks whether a word is a palindrome", "def is_palindrome(word):\n    word = word.lower()\n    return word == word[::-1]"),
    ("prints hello world", "def hello():\n    print('Hello, world!')"),
    ("returns the length of a string", "def length(text):\n    return len(text)"),
    ("converts a string to upper case", "def upper(text):\n    return text.upper()"),
    ("converts a string to lower case", "def lower(text):\n    return text.lower()"),
    ("flattens a list of lists", "def flatten(lists):\n    return [item for items in lists for item in items]"),
    ("swaps two values", "def swap(a, b):\n    return b, a"),
    ("merges two dictionaries", "def merge(a, b):\n    return {**a, **b}"),
    ("loads a JSON file", "import json\n\n\ndef load_json(path):\n    with open(path) as file:\n        return json.load(file)"),
    ("returns the current time", "from datetime import datetime\n\n\ndef now():\n    return datetime.now()"),
    ("rolls a die", "import random\n\n\ndef roll():\n    return random.randint(1, 6)"),
    ("returns the absolute value of a number", "def absolute(x):\n    return -x if x < 0 else x"),
    ("converts Celsius to Fahrenheit", "def to_fahrenheit(celsius):\n    return celsius * 9 / 5 + 32"),
    ("converts Fahrenheit to Celsius", "def to_celsius(fahrenheit):\n    return (fahrenheit - 32) * 5 / 9"),
    ("checks whether a list is empty", "def is_empty(items):\n    return len(items) == 0"),
    ("returns the last element of a list", "def last(items):\n    return items[-1]"),
    ("returns the first element of a list", "def first(items):\n    return items[0]"),
    ("counts how often each word occurs", "from collections import Counter\n\n\ndef word_counts(text):\n    return Counter(text.split())"),
    ("waits for one second", "import time\n\n\ndef wait():\n    time.sleep(1)"),
    ("runs a binary search", "def binary_search(items, target):\n    low, high = 0, len(items) - 1\n    while low <= high:\n        middle = (low + high) // 2\n        if items[middle] == target:\n            return middle\n        if items[middle] < target:\n            low = middle + 1\n        else:\n            high = middle - 1\n    return -1"),
)  # fmt: skip


def is_held_out(word: str) -> bool:
    return int(hashlib.sha256(f"chat/{word}".encode()).hexdigest()[:8], 16) % 100 < HELD_OUT_PERCENT


def conversations(raw_dir: Path, seed: int, held_out: bool) -> Iterator[str]:
    """Rendered conversations in V4.1's chat format; each starts with BOS and every answer ends with EOS."""
    rng = random.Random(seed)
    pools = _pools(raw_dir, held_out, rng)
    queue = [turn for turns in pools for turn in turns]
    rng.shuffle(queue)
    while queue:
        count = rng.choices((1, 2, 3, 4), (60, 20, 12, 8))[0]
        turns = [queue.pop() for _ in range(min(count, len(queue)))]
        if rng.random() < 0.12 and not held_out:
            turns.insert(0, _pick(rng, SMALL_TALK))
        yield render(turns, rng)


def render(turns: Sequence[Turn], rng: random.Random) -> str:
    thinking = rng.random() < 0.06
    system = rng.choice(SYSTEMS) if rng.random() < 0.15 else ""
    if thinking:
        system = EFFORT.format(rng.choice((25, 50, 75, 100))) + system
    out = [BOS, SYSTEM + system if system else ""]
    for at, (question, answer) in enumerate(turns):
        thought = f"{THINK}{_thought(question, rng)}{END_THINK}" if thinking and at == len(turns) - 1 else END_THINK
        out.append(f"{USER}{question}{ASSISTANT}{thought}{answer}{EOS}")
    return "".join(out)


def _thought(question: str, rng: random.Random) -> str:
    return rng.choice(("The user says: {}\nI will answer briefly.", "The question is: {}\nA short answer is best.")).format(question)


def _pick(rng: random.Random, groups: Sequence[tuple[tuple[str, ...], tuple[str, ...]]]) -> Turn:
    questions, answers = rng.choice(groups)
    return rng.choice(questions), rng.choice(answers)


def _pools(raw_dir: Path, held_out: bool, rng: random.Random) -> list[list[Turn]]:
    words = list(_word_questions(raw_dir, held_out, rng))
    if held_out:
        return [words]
    talk = [_pick(rng, SMALL_TALK) for _ in range(9000)] + [_pick(rng, REFUSALS) for _ in range(2500)]
    return [
        words,
        talk,
        [_arithmetic(rng) for _ in range(26000)],
        [_python(rng) for _ in range(9000)],
        [_letters(rng) for _ in range(6000)],
        list(_verses(raw_dir, rng)),
    ]


def _word_questions(raw_dir: Path, held_out: bool, rng: random.Random) -> Iterator[Turn]:
    by_offset: dict[tuple[str, str], Synset] = {}
    everything = list(synsets(raw_dir))
    for synset in everything:
        by_offset[(synset.kind, synset.offset)] = synset
    senses = primary_senses(raw_dir)
    for synset in everything:
        word = synset.words[0]
        for name in synset.words:
            sense = senses.get((synset.kind, name.lower()))
            if sense and sense.offset == synset.offset and is_held_out(name) == held_out and synset.gloss:
                for _ in range(4 if sense.is_common and not held_out else 1):  # words that people use are asked for more often
                    yield _definition(name, synset, rng)
        if is_held_out(word) != held_out or not synset.gloss:
            continue
        if len(synset.words) > 1 and rng.random() < 0.5:
            yield _synonym(word, synset.words[1:3], rng)
        if synset.examples and rng.random() < 0.3:
            yield _example(word, synset.examples[0], rng)
        parent = by_offset.get((synset.kind, synset.hypernyms[0])) if synset.hypernyms else None
        if parent and synset.kind == "noun" and rng.random() < 0.35:
            yield _parent(word, parent.words[0], rng)
        for source, target, goal in synset.antonyms[:1]:
            other = by_offset.get((synset.kind, target))
            if other and source and goal <= len(other.words):
                yield _opposite(synset.words[source - 1], other.words[goal - 1], rng)


def _article(word: str) -> str:
    return ("an " if word[:1].lower() in "aeiou" else "a ") + word


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(" .") + "."


def _definition(word: str, synset: Synset, rng: random.Random) -> Turn:
    name, gloss, kind = word, synset.gloss, synset.kind
    is_name = name[:1].isupper()
    if kind == "noun":
        what = name if is_name else _article(name)
        question = rng.choice(
            (
                f"What is {what}?",
                f"What is {what}?",
                f"What does {name} mean?",
                f"Define {name}.",
                f"What is the meaning of {name}?",
                f"Explain {name}.",
                f"What is {name}?",
            )
        )
        answer = (
            f"{_cap(what)} is {gloss}."
            if gloss.startswith(("a ", "an ", "the ", "any ", "one ", "something ", "someone "))
            else f"{_cap(name)}: {gloss}."
        )
    elif kind == "verb":
        question = rng.choice(
            (
                f"What does {name} mean?",
                f"What does it mean to {name}?",
                f"Define the verb {name}.",
                f"Define {name}.",
                f"Explain the word {name}.",
            )
        )
        answer = f"To {name}: {gloss}." if gloss.startswith("(") else f"To {name} means to {gloss.removeprefix('to ')}."
    else:
        question = rng.choice(
            (f"What does {name} mean?", f"Define {name}.", f"What is the meaning of {name}?", f"Explain the word {name}.")
        )
        answer = f"{_cap(name)} means {gloss}." if not gloss.startswith("(") else f"{_cap(name)}: {gloss}."
    if synset.examples and rng.random() < 0.3:
        answer += f" For example: {_sentence(synset.examples[0])}"
    return question, answer


def _cap(text: str) -> str:
    return text[:1].upper() + text[1:]


def _synonym(word: str, others: Sequence[str], rng: random.Random) -> Turn:
    question = rng.choice(
        (
            f"What is another word for {word}?",
            f"Give me a synonym of {word}.",
            f"Name a synonym for {word}.",
            f"What is a synonym of {word}?",
        )
    )
    return question, f"Another word for {word} is {others[0]}." if len(
        others
    ) == 1 else f"Other words for {word} are {others[0]} and {others[1]}."


def _opposite(word: str, other: str, rng: random.Random) -> Turn:
    return rng.choice(
        (f"What is the opposite of {word}?", f"Give me an antonym of {word}.", f"What is the antonym of {word}?")
    ), f"The opposite of {word} is {other}."


def _example(word: str, example: str, rng: random.Random) -> Turn:
    return rng.choice(
        (f"Use {word} in a sentence.", f"Give me an example sentence with {word}.", f"Write a sentence with the word {word}.")
    ), _sentence(example)


def _parent(word: str, parent: str, rng: random.Random) -> Turn:
    what = word if word[:1].isupper() else _article(word)
    return rng.choice(
        (f"What kind of thing is {what}?", f"Is {what} {_article(parent)}?", f"What sort of thing is {what}?")
    ), f"{_cap(what)} is a kind of {parent}."


def _arithmetic(rng: random.Random) -> Turn:
    sign = rng.choice("+++--*")
    a, b = (
        (rng.randint(0, 12), rng.randint(0, 12))
        if sign == "*"
        else (rng.randint(0, 30), rng.randint(0, 30))
        if rng.random() < 0.7
        else (rng.randint(0, 99), rng.randint(0, 99))
    )
    if sign == "-" and b > a:
        a, b = b, a
    result = {"+": a + b, "-": a - b, "*": a * b}[sign]
    name = {"+": "plus", "-": "minus", "*": "times"}[sign]
    question = rng.choice(
        (
            f"What is {a} {sign} {b}?",
            f"What is {a} {name} {b}?",
            f"{a} {sign} {b}",
            f"{a}{sign}{b}=",
            f"Calculate {a} {sign} {b}.",
            f"How much is {a} {name} {b}?",
            f"{a} {sign} {b} = ?",
        )
    )
    if rng.random() < 0.08 and max(a, b, result) <= 12:
        return (
            f"What is {NUMBER_WORDS[a]} {name} {NUMBER_WORDS[b]}?",
            f"{_cap(NUMBER_WORDS[a])} {name} {NUMBER_WORDS[b]} is {NUMBER_WORDS[result]}.",
        )
    return question, f"{a} {sign} {b} = {result}"


def _python(rng: random.Random) -> Turn:
    what, code = rng.choice(PYTHON)
    kind = rng.random()
    if kind < 0.12:
        low, high = sorted((rng.randint(0, 9), rng.randint(10, 30)))
        return f"How do I count from {low} to {high} in Python?", f"for i in range({low}, {high + 1}):\n    print(i)"
    if kind < 0.2:
        name = rng.choice(("json", "os", "re", "math", "random", "sys", "time", "csv", "pathlib", "datetime", "collections", "itertools"))
        return f"How do I import the {name} module?", f"import {name}"
    question = rng.choice(
        (
            f"Write a Python function that {what}.",
            f"Write a function that {what}.",
            f"Give me a Python function that {what}.",
            f"Please write Python code that {what}.",
            f"python function that {what}",
            f"Show me a function that {what}.",
        )
    )
    return question, code if rng.random() < 0.3 else f"```python\n{code}\n```"


LETTER_WORDS = tuple(
    "whale krill ocean water sea fish shell coral wave tide sand ship boat moon sun star tree bird stone river cloud rain snow wind fire bread house table chair apple".split()
)


def _letters(rng: random.Random) -> Turn:
    kind = rng.randrange(4)
    if kind == 0:
        low = rng.randint(0, 20)
        high = low + rng.randint(3, 12)
        return rng.choice((f"Count from {low} to {high}.", f"count from {low} to {high}")), ", ".join(map(str, range(low, high + 1))) + "."
    if kind == 1:
        word = rng.choice(LETTER_WORDS)
        return rng.choice((f"Spell {word}.", f"Spell the word {word}.")), "-".join(word)
    if kind == 2:
        words = rng.sample(LETTER_WORDS, rng.randint(2, 5))
        return f"Sort these words: {', '.join(words)}.", ", ".join(sorted(words)) + "."
    words = rng.sample(LETTER_WORDS, rng.randint(1, 4))
    return rng.choice((f"Repeat after me: {' '.join(words)}.", f"Say: {' '.join(words)}.")), _cap(" ".join(words)) + "."


def _verses(raw_dir: Path, rng: random.Random) -> Iterator[Turn]:
    for chapter in bible(raw_dir):
        if chapter.held_out:
            continue
        title, *verses = chapter.text.split("\n")
        book = title.split(",")[0]
        for verse in verses:
            number, _, text = verse.partition(" ")
            if text and book.isalpha() and len(text) < 240 and rng.random() < 0.12:
                yield rng.choice((f"Quote {book} {number}.", f"What does {book} {number} say?", f"Recite {book} {number}.")), text
