"""Single turns that need no memory: facts, sums, opposites, stories, copying, lists, questions about mlxkv."""

import random
from collections.abc import Callable

from . import words as w
from .memory import copied, keep_words
from .phrasing import ASK, around, clause, jumble, question
from .phrasing import capital as upper
from .text import options, spaced
from .words import Words

Turn = tuple[str, str]  # what the user says, what the assistant answers (copied values marked)

CAPITALS = dict(
    p.split(":")
    for p in options(
        "France:Paris|Italy:Rome|Germany:Berlin|Spain:Madrid|England:London|Norway:Oslo|Austria:Vienna|Portugal:Lisbon|"
        "Greece:Athens|Ireland:Dublin|Egypt:Cairo|Japan:Tokyo|Peru:Lima|Poland:Warsaw|Sweden:Stockholm|Russia:Moscow|"
        "China:Beijing|Cuba:Havana|Kenya:Nairobi|Finland:Helsinki|Denmark:Copenhagen|Hungary:Budapest|Canada:Ottawa"
    )
)
OPPOSITES = [
    tuple(p.split(":"))
    for p in options(
        "hot:cold|big:small|up:down|day:night|old:new|fast:slow|high:low|wet:dry|open:closed|full:empty|light:dark|"
        "happy:sad|hard:soft|long:short|near:far|early:late|rich:poor|strong:weak|loud:quiet|left:right|in:out|"
        "yes:no|true:false|good:bad|black:white|first:last|start:end|win:lose|buy:sell|clean:dirty|thick:thin"
    )
]
COLOUR_OF = dict(
    p.split(":")
    for p in options(
        "the sky:blue|grass:green|snow:white|blood:red|coal:black|the sun:yellow|a lemon:yellow|a leaf:green|"
        "milk:white|a banana:yellow|the sea:blue|a carrot:orange|chocolate:brown|a crow:black|a frog:green|gold:yellow"
    )
)
SOUNDS = dict(
    p.split(":")
    for p in options(
        "cat:meow|dog:woof|cow:moo|duck:quack|sheep:baa|owl:hoot|frog:croak|lion:roar|horse:neigh|pig:oink|bee:buzz|"
        "mouse:squeak|snake:hiss|crow:caw|wolf:howl"
    )
)
NUMBER_WORDS = spaced("zero one two three four five six seven eight nine ten eleven twelve")
FAQ = [
    (
        "What is mlxkv?|Tell me about mlxkv.|What does mlxkv do?|Explain mlxkv.|Describe mlxkv in one sentence.",
        "mlxkv runs language models with MLX and keeps their state on SSD, so that no prompt is read twice.",
    ),
    (
        "Who are you?|What are you?|What model are you?|Are you a person?|Introduce yourself.|What is your name?",
        "I am the small demo model of mlxkv.",
    ),
    (
        "Which models is mlxkv made for?|What models does mlxkv run?|What is a hybrid model?|What does hybrid mean?",
        "A hybrid model mixes attention layers with recurrent layers, and mlxkv is made for such models.",
    ),
    (
        "How do I start mlxkv?|How can I try mlxkv?|How do I run mlxkv?|Which command starts a chat?",
        "Run mlxkv chat for a conversation, or mlxkv run for one answer.",
    ),
    (
        "How do I go on with a chat?|How do I resume a chat?|Can I continue later?|How do I resume?",
        "Run mlxkv chat with the option --resume, and the kept state is used again.",
    ),
    (
        "How do I serve a model?|Does mlxkv have a server?|How do I start the server?|Which command starts the server?",
        "Run mlxkv serve, and an HTTP server answers on this machine.",
    ),
    (
        "How do I check my setup?|What does mlxkv doctor do?|Something is wrong. What can I run?|How do I find faults?",
        "Run mlxkv doctor, and it lists what is wrong and how to cure it.",
    ),
    (
        "What is kept on SSD?|What is a kept state?|What does mlxkv remember?|What does mlxkv store?",
        "mlxkv keeps the state that the model computed for a prompt.",
    ),
    (
        "Is a wrong hit allowed?|What does mlxkv promise?|What happens on a miss?|Can kept state be wrong?",
        "A miss is always allowed, and a wrong hit never.",
    ),
    (
        "What is speculation?|What does the MTP head do?|What is MTP?|How does the head help?",
        "A small head guesses the next tokens, and the model checks them in one step.",
    ),
    (
        "Are you smart?|How big are you?|How many parameters do you have?|What can you do?|What do you know?",
        "I am very small. I can chat a little, copy, and remember what you tell me.",
    ),
    (
        "Hello.|Hi.|Hello!|Hi there.|Good morning.|Good evening.|Hey!|Hello there.",
        "Hello! How can I help you?",
    ),
    ("Thank you.|Thanks.|Thanks a lot.|Thank you very much.|Well done.|Good answer.", "You are welcome."),
    ("Goodbye.|Bye.|See you.|Good night.|That is all.|I have to go.", "Goodbye, and come back soon."),
    ("How are you?|How do you feel?|Are you well?|How is it going?", "I am well, thank you."),
]


def vary(r: random.Random, words: Words, asks: list[str], phrase: str, keep: str) -> str:
    """One of ``asks``, or a frame around ``phrase``, often with noise that leaves the words of ``keep``."""
    text = r.choice(asks) if r.random() < 0.5 else upper(r.choice(ASK).format(x=phrase))
    if r.random() < 0.3:
        text = jumble(r, words, text, keep_words(keep), r.choice((1, 1, 2, 3)))
    return around(r, words, text, 0.2)


def capital(r: random.Random, words: Words) -> Turn:
    c, city = r.choice(list(CAPITALS.items()))
    asks = options(
        f"What is the capital of {c}?|Tell me the capital of {c}.|Which city is the capital of {c}?|Capital of {c}?|"
        f"Do you know the capital of {c}?|Name the capital of {c}.|{c}: which capital?|In {c}, what is the capital?"
    )
    return vary(r, words, asks, f"the capital of {c}", f"capital {c}"), f"The capital of {c} is {city}."


def total(r: random.Random, words: Words) -> Turn:
    a, b = r.randint(0, 9), r.randint(0, 9)
    x, y = (NUMBER_WORDS[a], NUMBER_WORDS[b]) if r.random() < 0.3 else (a, b)
    asks = options(
        f"What is {x} plus {y}?|{x} plus {y}?|Add {x} and {y}.|How much is {x} plus {y}?|What is {x} + {y}?|"
        f"Tell me the sum of {x} and {y}.|Can you add {x} and {y}?|{x} and {y} make how much?|Put {x} and {y} together."
    )
    return vary(r, words, asks, f"{x} plus {y}", f"{x} {y} plus and + sum add"), f"{a} plus {b} is {a + b}."


def opposite(r: random.Random, words: Words) -> Turn:
    a, b = r.choice(OPPOSITES)
    if r.random() < 0.5:
        a, b = b, a
    asks = options(
        f"What is the opposite of {a}?|Opposite of {a}?|Tell me the opposite of {a}.|Give me the opposite of {a}.|"
        f"Which word is the opposite of {a}?|{a} has which opposite?|What is not {a}?"
    )
    return vary(r, words, asks, f"the opposite of {a}", f"opposite not {a}"), f"The opposite of {a} is {b}."


def colour(r: random.Random, words: Words) -> Turn:
    t, c = r.choice(list(COLOUR_OF.items()))
    asks = options(
        f"What colour is {t}?|Which colour has {t}?|Tell me the colour of {t}.|What color is {t}?|How is {t} painted?"
    )
    return vary(r, words, asks, f"the colour of {t}", f"colour color {t}"), f"{upper(t)} is {c}."


def sound(r: random.Random, words: Words) -> Turn:
    a, s = r.choice(list(SOUNDS.items()))
    asks = options(
        f"What does a {a} say?|Which sound does a {a} make?|How does a {a} sound?|What sound has a {a}?|"
        f"A {a} says what?"
    )
    return vary(r, words, asks, f"the sound of a {a}", f"sound say says {a}"), f"A {a} says {s}."


def count(r: random.Random, _: Words) -> Turn:
    n = r.randint(3, 10)
    if r.random() < 0.5:
        ask = r.choice(options("Count to {n}.|Please count to {n}.|Can you count to {n}?|Count from one to {n}."))
        return ask.format(n=NUMBER_WORDS[n]), ", ".join(NUMBER_WORDS[1 : n + 1]).capitalize() + "."
    i = r.randrange(12)
    ask = r.choice(("What month comes after {m}?", "Which month follows {m}?", "The month after {m}?"))
    return ask.format(m=w.MONTHS[i]), f"After {w.MONTHS[i]} comes {w.MONTHS[(i + 1) % 12]}."


def faq(r: random.Random, words: Words) -> Turn:
    asks, answer = r.choice(FAQ)
    ask = r.choice(options(asks))
    if len(ask) > 18 and r.random() < 0.35:
        ask = jumble(
            r, words, ask, keep_words("mlxkv mtp hybrid speculation server resume doctor you wrong head big"), 1
        )
    return around(r, words, ask, 0.15), answer


def unknown(r: random.Random, words: Words) -> Turn:
    return around(r, words, question(r, words), 0.2), "I do not know."


def repeat(r: random.Random, words: Words) -> Turn:
    n = r.choice((1, 1, 2, 3, 4, 5))
    text = " ".join(r.choice((words.word, words.word, words.code, words.name))() for _ in range(n))
    ask = r.choice(
        options(
            "Repeat: {t}|Say: {t}|Repeat after me: {t}|Copy this: {t}|Write: {t}|Please say {t}|Say {t}|Echo: {t}|"
            "Repeat this text: {t}|Type this: {t}|Say the following: {t}|Copy the words: {t}"
        )
    )
    return ask.format(t=text), copied(text)


def pairs(r: random.Random, words: Words) -> Turn:
    n = r.randint(2, 6)
    keys = list(dict.fromkeys(r.choice((words.word, words.name))() for _ in range(n)))
    values = [r.choice((words.code, words.word, words.digits))() for _ in keys]
    link = r.choice((" is ", ": ", " = ", " means ", " has "))
    k = r.randrange(len(keys))
    listing = r.choice((", ", ". ", "; ", "\n")).join(a + link + b for a, b in zip(keys, values, strict=True))
    ask = r.choice(("What is {k}?", "Which value has {k}?", "Tell me {k}.", "And {k}?", "What about {k}?"))
    return f"{listing}. {ask.format(k=keys[k])}", f"{copied(keys[k])} is {copied(values[k])}."


def pick(r: random.Random, words: Words) -> Turn:
    items = [words.word() for _ in range(r.randint(2, 5))]
    which, i = r.choice((("first", 0), ("last", -1)))
    ask = r.choice(
        ("What is the {q} word of this list: {l}?", "List: {l}. Which word is the {q}?", "{l}. Say the {q} word.")
    )
    return ask.format(q=which, l=", ".join(items)), f"The {which} word is {copied(items[i])}."


def continue_(r: random.Random, words: Words) -> Turn:
    unit = [words.word() for _ in range(r.randint(2, 4))]
    ask = r.choice(("Continue: {t}", "Go on: {t}", "What comes next? {t}", "Continue the pattern: {t}"))
    return ask.format(t=" ".join(unit * 2)), copied(" ".join(unit))


def story_text(r: random.Random, words: Words, hero: str | None = None) -> str:
    """A short story; its hero and object come back, so that reading it takes memory."""
    a, n, t = hero or r.choice(w.ANIMALS), words.name(), r.choice(w.THINGS)
    p, adj, c = r.choice(w.PLACES), r.choice(w.ADJECTIVES), words.word()
    return (
        f"Once there was a {a} called {n}. {copied(n)} had a {adj} {t}. One day the {t} was gone. "
        f"{copied(n)} looked in the {p}, and there was a {c}. The {copied(c)} had the {t}. "
        f"{copied(n)} took the {adj} {t} home and was happy."
    )


def story(r: random.Random, words: Words) -> Turn:
    a, n = r.choice(w.ANIMALS), words.name()
    ask = r.choice(
        options(
            "Tell me a story about a {a} called {n}.|Write a short story about a {a} named {n}.|"
            "A story about {n} the {a}, please.|Can you tell a story about the {a} {n}?"
        )
    )
    answer = (
        f"Once there was a {copied(a)} called {copied(n)}. {copied(n)} lived in a small house near the river. "
        f"One day {copied(n)} went out and found a golden key. The key opened an old door, and behind it was a garden. "
        f"{copied(n)} was happy and stayed there."
    )
    return ask.format(a=a, n=n), answer


def about_story(r: random.Random, words: Words) -> Turn:
    text = story_text(r, words).replace("\x01", "").replace("\x02", "")
    name, thing = text.split(" called ")[1].split(".")[0], text.split("One day the ")[1].split(" was")[0]
    adj, place = text.split(" had a ")[1].split()[0], text.split("looked in the ")[1].split(",")[0]
    animal = text.split("there was a ")[1].split(" called")[0]
    ask, answer = r.choice(
        (
            (f"What was the {animal} called?", f"The {animal} was called {copied(name)}."),
            (f"What did {name} have?", f"{copied(name)} had a {copied(adj + ' ' + thing)}."),
            (f"Where did {name} look?", f"{copied(name)} looked in the {copied(place)}."),
            (f"Who was {name}?", f"{copied(name)} was a {copied(animal)}."),
        )
    )
    return f"{text} {ask}", answer


def say_ok(r: random.Random, words: Words) -> Turn:
    if r.random() < 0.7:
        return ". ".join(upper(clause(r, words)) for _ in range(r.choice((1, 1, 2)))) + ".", "I see."
    topic = r.choice(
        options(
            "The weather is nice today.|I had a long day.|It rains a lot here.|I went for a walk.|I ate some soup.|"
            "The train was late.|I read a good book.|My garden is green.|The shop was closed.|I slept well.|"
            "I bought a {t}.|I saw a {a} today.|There is a {t} on the table.|The {a} sleeps.|We met {n} yesterday."
        )
    )
    return topic.format(t=r.choice(w.THINGS), a=r.choice(w.ANIMALS), n=words.name()), "I see."


SHORT: tuple[Callable[[random.Random, Words], Turn], ...] = (
    capital, total, total, opposite, colour, sound, count, faq, faq, repeat, repeat, pairs, pick, continue_,
    say_ok, say_ok, unknown,
)  # fmt: skip
LONG: tuple[Callable[[random.Random, Words], Turn], ...] = (story, about_story)
COPYING: tuple[Callable[[random.Random, Words], Turn], ...] = (repeat, pairs, continue_, pick, repeat, pairs)
