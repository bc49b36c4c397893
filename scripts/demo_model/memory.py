"""Things told in a chat and asked back later: how they are told, acknowledged, asked and answered.

A value stands between ``COPY`` marks in an answer, so that training can weigh copied tokens more.
"""

import random
from dataclasses import dataclass

from . import words as w
from .phrasing import ASK, TELL, around, capital, jumble
from .text import lines, options, spaced
from .words import Words

OPEN, CLOSE = "\x01", "\x02"


def copied(value: str) -> str:
    """``value`` marked as copied from the context."""
    return f"{OPEN}{value}{CLOSE}"


@dataclass(frozen=True)
class Fact:
    """One thing told: its key, the told sentence, the ways to ask, the acknowledgement and the answer."""

    key: str
    value: str
    tell: str
    asks: tuple[str, ...]
    phrases: tuple[str, ...]
    keep: frozenset[str]
    ack: str
    answer: str


TELL_NAME = options(
    "My name is {v}.|I am {v}.|I'm {v}.|Call me {v}.|They call me {v}.|My friends call me {v}.|This is {v}.|"
    "{v} is my name.|The name is {v}.|You can call me {v}.|I am called {v}.|{v} here.|My first name is {v}.|"
    "Let me introduce myself: {v}.|Most people know me as {v}.|You are talking to {v}.|It is me, {v}.|Name: {v}.|"
    "I was born as {v}.|My mother calls me {v}.|Please use my name, {v}.|At work I am known as {v}.|"
    "I would like to be called {v}.|On my passport it says {v}.|My name? It is {v}."
)
ASK_NAME = options(
    "What is my name?|What's my name?|Who am I?|Do you remember my name?|Tell me my name.|Say my name.|"
    "What am I called?|How am I called?|Can you tell me my name?|What did I say my name was?|My name?|"
    "And what was my name?|I forgot my name. What is it?|Which name did I give you?|What name do I have?|"
    "Do you know my name?|Do you know who I am?|What do my friends call me?|Now tell me what I am called.|"
    "Write my name.|Please answer with my name.|My name is what?|I told you my name. What was it?|"
    "Who are you talking to?|Who is speaking to you?|What should you call me?|Give me my name back."
)
CODE_NOUNS = options(
    "code word|code word|code word|password|secret word|magic word|passphrase|key word|call sign|secret|code|token|"
    "label|sign|signal word|secret code"
)
TELL_CODE = options(
    "The {n} is {v}.|The {n} is {v}.|Remember the {n} {v}.|Our {n} is {v}.|My {n} is {v}.|{v} is the {n}.|"
    "Please remember this {n}: {v}.|Keep the {n} {v} in mind.|Note the {n}: {v}.|Today's {n} is {v}.|"
    "Here is the {n}: {v}.|I give you the {n} {v}.|The {n} for today is {v}.|Use {v} as the {n}.|Store the {n} {v}.|"
    "Let the {n} be {v}.|We chose {v} as our {n}.|Do not forget the {n} {v}.|For later, the {n}: {v}.|"
    "The {n} will be {v}.|From now on {v} is the {n}.|Set the {n} to {v}.|I picked {v} as my {n}.|"
    "There is a {n}, and it is {v}.|The guard wants the {n} {v}.|Learn this {n}: {v}."
)
ASK_CODE = options(
    "What is the {n}?|What was the {n}?|Tell me the {n}.|Which {n} did I give you?|Do you remember the {n}?|"
    "Say the {n}.|Repeat the {n}.|What {n} did I tell you?|Can you tell me the {n}?|And the {n}?|The {n}, please.|"
    "I need the {n} now.|Give me the {n}.|Do you know the {n}?|Please write the {n}.|What did I say the {n} was?|"
    "I forgot the {n}. What is it?|Now what is the {n}?|Which {n} did we choose?|Quick, the {n}!|Name the {n}.|"
    "The guard asks for the {n}. What do you say?|Answer with the {n}.|Type the {n}."
)
TELL_FAV = options(
    "My favourite {n} is {v}.|I like {v} best of all. It is my favourite {n}.|My favorite {n} is {v}.|"
    "The {n} I like most is {v}.|{v} is my favourite {n}.|Of every {n}, I like {v} most.|My best {n} is {v}."
)
ASK_FAV = options(
    "What is my favourite {n}?|What is my favorite {n}?|Which {n} do I like most?|Tell me my favourite {n}.|"
    "Do you remember my favourite {n}?|What did I say is my favourite {n}?|Which {n} is my favourite?|"
    "My favourite {n}?|What {n} do I like best?"
)
TELL_PET = options(
    "My {n} is called {v}.|I have a {n} called {v}.|My {n}'s name is {v}.|The name of my {n} is {v}.|"
    "I have a {n}. Its name is {v}.|We have a {n} named {v}.|{v} is my {n}.|At home my {n} {v} waits for me."
)
ASK_PET = options(
    "What is my {n} called?|What is the name of my {n}?|What is my {n}'s name?|How is my {n} called?|"
    "Do you remember the name of my {n}?|Tell me my {n}'s name.|My {n}'s name?|What name does my {n} have?"
)
TELL_LIVE = options(
    "I live in {v}.|My home is in {v}.|My city is {v}.|I come from {v}.|I am from {v}.|My house is in {v}.|"
    "I moved to {v}.|{v} is where I live."
)
ASK_LIVE = options(
    "Where do I live?|Which city do I live in?|What is my city?|Where is my home?|In which city do I live?|"
    "Do you remember where I live?|Tell me where I live.|Where am I from?"
)
TELL_AT = options(
    "The {n} is in the {v}.|I put the {n} in the {v}.|The {n} lies in the {v}.|You will find the {n} in the {v}.|"
    "I left the {n} in the {v}.|I hid the {n} in the {v}.|In the {v} there is the {n}."
)
ASK_AT = options(
    "Where is the {n}?|Where did I put the {n}?|Where can I find the {n}?|Where was the {n}?|"
    "Tell me where the {n} is.|Do you remember where the {n} is?|In which place is the {n}?|I look for the {n}."
)
TELL_NUM = options(
    "The {n} is {v}.|My {n} is {v}.|Remember the {n} {v}.|Please note the {n} {v}.|{v} is the {n}.|"
    "Write down the {n}: {v}.|The {n} has the value {v}."
)
NUM_NOUNS = options(
    "number|lucky number|room number|pin|house number|code number|bus number|table number|seat number|gate number"
)
TELL_IS = options(
    "The {n} is {v}.|The {n} was {v}.|Remember that the {n} is {v}.|I have a {n}. It is {v}.|"
    "Look, the {n} is {v}.|Note: the {n} is {v}."
)
ASK_IS = options(
    "What is the {n}?|How is the {n}?|What did I say about the {n}?|Tell me about the {n}.|And the {n}?|"
    "What do you know about the {n}?|What was the {n}?"
)
TELL_JOB = options("I work as a {v}.|My job is {v}.|I am a {v}.|By trade I am a {v}.|I earn my money as a {v}.")
ASK_JOB = options("What is my job?|What do I work as?|What work do I do?|Do you remember my job?|Tell me my job.")
BEFORE = options(
    "Hello. |Hi! |Hi, |Hello, |Good morning. |By the way: |Listen. |One thing first. |Just so you know: |For later: |"
    "Please remember: |Something about me. |I want to tell you something. |Okay. |Well, |So, |Note this. |Also, |"
    "Good evening! |Hey. "
)
AFTER = options(
    " Please remember it.| Remember that.| Keep it in mind.| Do not forget it.| I will ask you later."
    "| Nice to meet you.| Thanks.| That is all for now.| Can you keep that?| How are you?| I like it here."
    "| Let us talk.| Hold on to it.| Okay?"
)
ASK_BEFORE = options(
    "Please: |Tell me, |Now, |And now: |One question. |Thanks. |Okay. |So: |Back to me. |Let me test you. |Quick: |"
    "Last question: |I have a question. |Good. |Fine. |A test: |Say, |Well then. |Let me see. |Do you still know? "
)
ASK_AFTER = options(
    " Please.| Do you remember?| I told you before.| Think back.| Tell me.| I said it earlier.| Answer."
)


ASK_PHRASES = {
    "name": "my name|my name|my own name|who I am|what I am called|what my name is|how I am called|the name I have|"
    "the name I gave you|the name that I told you|my first name|what people call me|what they call me|"
    "what to call me|the name of the user|the right name for me|the name of your friend here|who talks to you",
    "code": "the {n}|the {n}|our {n}|that {n}|the {n} I gave you|the {n} from before|which {n} I told you|"
    "what the {n} is|the right {n}|today's {n}|my {n}|a {n}",
    "fav": "my favourite {n}|the {n} I like most|which {n} I like best",
    "pet": "the name of my {n}|my {n}'s name|how my {n} is called|what my {n} is called",
    "live": "where I live|my city|my home town|the city I live in",
    "at": "where the {n} is|the place of the {n}|where I put the {n}",
    "num": "the {n}|my {n}|the {n} I gave you|what the {n} is",
    "is": "the {n}|how the {n} is|what I said about the {n}",
    "job": "my job|what my job is|what I work as",
}
CORES = {
    "name": "my name is {v}|I am {v}|I am called {v}|people call me {v}|{v} is my name|they named me {v}|"
    "the name {v} is mine|I have the name {v}|you are talking to {v}|{v} is here|{v} is writing to you|"
    "{v} wants to talk|you can say {v} to me|I answer to {v}|I sign with {v}|{v} says hello|this is {v} again|"
    "you have {v} before you|my family calls me {v}|best wishes from {v}|I am the one called {v}|"
    "everybody says {v} to me|call me {v}|my name will be {v}|they write {v} on my letters|my ticket is for {v}|"
    "I am known here as {v}|it is {v}|you know me, {v}|{v} is the user|{v} is my first name|I became {v}",
    "code": "the {n} is {v}|{v} is the {n}|our {n} is {v}|we use the {n} {v}|they gave us the {n} {v}|"
    "you need the {n} {v}|the king has the {n} {v}|I have a {n}, {v}|my friend told me the {n} {v}|"
    "we took {v} as the {n}|the {n} becomes {v}|the {n} was changed to {v}|a new {n} came in, {v}|"
    "the door opens with the {n} {v}|I found the {n} {v}|{v} will serve as {n}|please learn the {n} {v}|"
    "the letter says that the {n} is {v}|without the {n} {v} you stay outside|the {n} stays {v}|say {v} as a {n}",
}
WRITTEN = {kind: (lines(f"tell_{kind}.txt"), tuple(lines(f"ask_{kind}.txt"))) for kind in ("name", "code")}
KEEP = frozenset(spaced("i my me am who name called call favourite like live city home job work where is in"))


def keep_words(*texts: str) -> set[str]:
    """The words of ``texts`` as ``jumble`` compares them."""
    return {word.lower().strip(".,:;?!'\"") for t in texts for word in t.split()}


def _lower_start(text: str) -> str:
    return text if text[:2] in ("I ", "I'") else text[0].lower() + text[1:]


def dress(rng: random.Random, text: str, before: list[str], after: list[str], p: float = 0.25) -> str:
    """``text`` with an opening and a closing remark, each with probability ``p``."""
    if rng.random() < p:
        opening = rng.choice(before)
        keep = opening.rstrip()[-1] in ".!?" or rng.random() < 0.5
        text = opening + (text if keep else _lower_start(text) if not text.startswith("{v}") else text)
    if rng.random() < p:
        text += rng.choice(after)
    return text


def make_fact(rng: random.Random, words: Words, kind: str | None = None) -> Fact:
    """A random fact; half of them are names and code words."""
    others = ("fav", "pet", "live", "at", "num", "is", "job", "pet", "is")
    kind = kind or rng.choice(("name",) * 7 + ("code",) * 7 + others)
    if kind == "name":
        v, n, key = words.name(), "", "name"
        tell, asks = rng.choice(TELL_NAME), ASK_NAME
        ack, answer = f"Hello, {copied(v)}.", f"Your name is {copied(v)}."
    elif kind == "code":
        v, n = words.code(), rng.choice(CODE_NOUNS)
        tell, asks, key = rng.choice(TELL_CODE), ASK_CODE, n
        ack, answer = f"OK, the {n} is {copied(v)}.", f"The {n} is {copied(v)}."
    elif kind == "fav":
        n = rng.choice(("colour", "food", "animal", "city", "month", "day", "word", "tree", "game", "song"))
        lists = {"colour": w.COLOURS, "food": w.FOODS, "animal": w.ANIMALS, "month": w.MONTHS, "day": w.DAYS}
        v = words.city() if n == "city" else words.mixed(lists.get(n, w.WORDS))
        tell, asks, key = rng.choice(TELL_FAV), ASK_FAV, "favourite " + n
        ack, answer = f"OK, you like {copied(v)}.", f"Your favourite {n} is {copied(v)}."
    elif kind == "pet":
        n = rng.choice(
            spaced(
                "dog cat horse friend sister brother rabbit teacher boss neighbour wife husband son daughter "
                "parrot boat aunt uncle cousin"
            )
        )
        v, key = words.name(), n
        tell, asks = rng.choice(TELL_PET), ASK_PET
        ack, answer = f"OK, your {n} is {copied(v)}.", f"Your {n} is called {copied(v)}."
    elif kind == "live":
        v, n, key = words.city(), "", "live"
        tell, asks = rng.choice(TELL_LIVE), ASK_LIVE
        ack, answer = f"OK, you live in {copied(v)}.", f"You live in {copied(v)}."
    elif kind == "at":
        n = rng.choice(w.THINGS)
        v, key = words.mixed(w.PLACES), "at " + n
        tell, asks = rng.choice(TELL_AT), ASK_AT
        ack, answer = f"OK, the {n} is in the {copied(v)}.", f"The {n} is in the {copied(v)}."
    elif kind == "num":
        v, n = words.digits(), rng.choice(NUM_NOUNS)
        tell, asks, key = rng.choice(TELL_NUM), ASK_CODE, n
        ack, answer = f"OK, the {n} is {copied(v)}.", f"The {n} is {copied(v)}."
    elif kind == "job":
        v, n, key = words.mixed(w.JOBS), "", "job"
        tell, asks = rng.choice(TELL_JOB), ASK_JOB
        ack, answer = f"OK, you are a {copied(v)}.", f"You are a {copied(v)}."
    else:
        n = rng.choice(w.THINGS) if rng.random() < 0.7 else words.word()
        v, key = words.mixed(w.ADJECTIVES + w.COLOURS), "is " + n
        tell, asks = rng.choice(TELL_IS), ASK_IS
        ack, answer = f"OK, the {n} is {copied(v)}.", f"The {n} is {copied(v)}."
    p = rng.random()
    if kind in WRITTEN and p < 0.5:
        tell, asks = rng.choice(WRITTEN[kind][0]), WRITTEN[kind][1] if rng.random() < 0.7 else asks
    elif kind in CORES and p < 0.75:
        tell = capital(rng.choice(TELL).format(c=rng.choice(options(CORES[kind]))))
    tell = dress(rng, tell, BEFORE, AFTER, 0.2).format(n=n, v=v)
    keep = KEEP | keep_words(n)
    if rng.random() < 0.3:
        tell = jumble(rng, words, tell, keep | keep_words(v), rng.choice((1, 1, 2, 3)))
    tell = around(rng, words, tell, 0.25)
    filled = tuple(a.format(n=n, v=v) for a in asks)
    phrases = tuple(a.format(n=n) for a in options(ASK_PHRASES[kind]))
    return Fact(key, v, tell, filled, phrases, frozenset(keep), ack, answer)


def make_ask(rng: random.Random, words: Words, fact: Fact) -> str:
    """A question for ``fact``."""
    if rng.random() < 0.55:
        text = rng.choice(fact.asks)
    else:
        text = capital(rng.choice(ASK).format(x=rng.choice(fact.phrases)))
    text = dress(rng, text, ASK_BEFORE, ASK_AFTER, 0.15)
    if rng.random() < 0.35:
        text = jumble(rng, words, text, set(fact.keep), rng.choice((1, 1, 2, 3)))
    return around(rng, words, text, 0.25)
