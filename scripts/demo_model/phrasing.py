"""Ways to put things: frames around a noun phrase or a statement, clauses that mean nothing here, and word noise.

They make the sentences of the grammar so many that a model has to find the few words that matter.
"""

import random

from .text import options, spaced

# {x} is a noun phrase: "my name", "the code word", "the capital of France".
ASK = options(
    "What is {x}?|What was {x}?|Tell me {x}.|Do you know {x}?|Do you remember {x}?|Say {x}.|Can you tell me {x}?|"
    "I want to hear {x}.|I would like to know {x}.|Can you say {x} again?|Will you say {x}?|Give me {x}.|"
    "It is time to say {x}.|Show me that you know {x}.|Have you forgotten {x}?|They ask you about {x}.|"
    "Now {x}, please.|{x}?|Let me hear {x}.|You should know {x} by now.|Please bring back {x}.|What about {x}?|"
    "I hope that you remember {x}.|Is {x} in your head?|Think of {x} and say it.|Print {x}.|Use {x} in your answer.|"
    "I am looking for {x}.|Please find {x} for me.|My question is about {x}.|Somebody must tell me {x}.|"
    "Are you able to tell {x}?|How about {x}?|If you know {x}, say it.|I cannot recall {x}.|Help me with {x}.|"
    "You know {x}, right?|Answer this: {x}.|Would you write down {x}?|May I hear {x}?|The answer that I need is {x}.|"
    "Maybe you can tell us {x}.|Just {x}.|I bet you do not know {x}.|Let us talk about {x}.|Send me {x}.|"
    "Which one is {x}?|Check {x} for me.|I forgot {x}.|Do not be shy, tell me {x}.|We need {x} here.|Explain {x}.|"
    "Read out {x}.|Could we get {x}?|Hand me {x}.|A word about {x}, please.|Then what is {x}?|And {x}?"
)
# {c} is a statement: "my name is Ruby".
TELL = options(
    "{c}.|{c}.|{c}.|{c}.|I tell you that {c}.|You must know that {c}.|Please note that {c}.|Listen: {c}.|{c}, okay?|"
    "As you may guess, {c}.|Write down that {c}.|Since yesterday {c}.|It is true that {c}.|Remember that {c}.|"
    "Today {c}.|{c} now.|You see, {c}.|I think you should know that {c}.|{c}, if you want to know.|"
    "{c} and that is that.|"
    "Keep in mind that {c}.|Here is something: {c}.|{c}, as they say.|I want you to know that {c}.|Well, {c}!|{c}!"
)
NOUNS = spaced(
    "market harbour coast bench office school museum hill field forest street corner station island valley kitchen "
    "window ladder bucket hammer blanket engine letter picture candle bottle basket mirror ribbon saddle kettle drum "
    "neighbour uncle sister farmer baker sailor driver teacher doctor king queen child friend man woman crowd team "
    "dinner breakfast sandwich apple potato pepper lemon rain snow wind storm cloud sun winter spring summer autumn "
    "bicycle train bus boat ship road bridge gate door wall roof floor garden tree leaf bird cow pig bee spider fish "
    "stone feather paper book page story song game ball clock machine computer program file number sign colour shape "
    "hour week month evening morning night question answer idea plan problem reason way place thing part side end"
)
VERBS = spaced(
    "walked carried opened closed painted repaired watched found lost bought sold cooked cleaned moved pulled pushed "
    "visited liked wanted needed kept left took gave made built broke held heard saw met knew thought told asked used "
    "tried turned started stopped followed helped played worked waited learned wrote read sang slept ate drank"
)
PRESENT = spaced(
    "sees needs likes wants keeps takes makes opens holds carries finds moves turns brings uses knows reads sells buys"
)
ADJECTIVES = spaced(
    "big small old new long short high low strange nice bad good wet dry full empty quiet loud slow fast dark bright "
    "heavy light thick thin clean dirty early late warm cold soft hard sweet bitter proud tired lucky poor rich"
)
ADVERBS = spaced(
    "slowly quickly often never always again today yesterday tomorrow soon later early quietly together outside there "
    "here really perhaps still almost only also even then once twice already"
)
PREPOSITIONS = spaced("in on under behind near along across through with without before after at from to for of above")
WHO = spaced("we they he she it you I everyone somebody nobody people") + options("my friend|the boss|a guard|our team")
SMALL = spaced(
    "the a my your our this that these some any every each now then so well please just very quite too not yes no is "
    "was are has had will would can could should must may might do does did be been who what when where why how which "
    "and or but if because while that than as like about into over out up down off me us them him her it all one two "
    "more most other same own few many much still yet ever"
)


def phrase(r: random.Random, words) -> str:
    """A noun phrase; one in six nouns is made up."""
    noun = words.word() if r.random() < 0.17 else r.choice(NOUNS)
    adjective = r.choice(ADJECTIVES) + " " if r.random() < 0.3 else ""
    return f"{r.choice(('the', 'a', 'my', 'our', 'the', 'the', 'some', 'this'))} {adjective}{noun}"


def clause(r: random.Random, words) -> str:
    """A clause without meaning for the chat, in lower case and without a full stop."""
    p = r.random()
    where = f" {r.choice(PREPOSITIONS)} {phrase(r, words)}" if r.random() < 0.5 else ""
    adverb = " " + r.choice(ADVERBS) if r.random() < 0.25 else ""
    if p < 0.4:
        return f"{r.choice(WHO)} {r.choice(VERBS)} {phrase(r, words)}{where}{adverb}"
    if p < 0.55:
        return f"{phrase(r, words)} {r.choice(VERBS)}{where}{adverb}"
    if p < 0.7:
        return f"{phrase(r, words)} {r.choice(('is', 'was', 'seems'))} {r.choice(ADJECTIVES)}{where}{adverb}"
    if p < 0.85:
        return f"{phrase(r, words)} {r.choice(PRESENT)} {phrase(r, words)}{where}"
    return f"there {r.choice(('is', 'was'))} {phrase(r, words)}{where}{adverb}"


def question(r: random.Random, words) -> str:
    """A question about nothing that was told."""
    p = r.random()
    if p < 0.3:
        verb = r.choice(PRESENT)[:-1]
        return f"{r.choice(('Does', 'Did', 'Can', 'Will'))} {phrase(r, words)} {verb} {phrase(r, words)}?"
    if p < 0.55:
        return (
            f"{r.choice(('Why', 'When', 'How'))} {r.choice(('is', 'was'))} {phrase(r, words)} {r.choice(ADJECTIVES)}?"
        )
    if p < 0.8:
        return f"Who {r.choice(VERBS)} {phrase(r, words)}?"
    return f"How {r.choice(('many', 'much'))} {r.choice(NOUNS)} {r.choice(('is', 'are', 'has'))} {phrase(r, words)}?"


def capital(text: str) -> str:
    """``text`` with its first letter in upper case."""
    return text[:1].upper() + text[1:]


def _bare(word: str) -> str:
    return word.lower().strip(".,:;?!'\"")


def jumble(r: random.Random, words, text: str, keep: set[str], times: int = 1) -> str:
    """``text`` with words put in, replaced or left out; words of ``keep`` (lower case, no punctuation) stay."""
    parts = text.split(" ")
    for _ in range(times):
        i, p = r.randrange(len(parts) + 1), r.random()
        noise = words.word() if r.random() < 0.2 else r.choice(r.choice((SMALL, NOUNS, VERBS, ADVERBS, ADJECTIVES)))
        if p < 0.45:
            if i and any(c in parts[i - 1][-1:] for c in ".:?!"):
                noise = capital(noise)
            if 0 < i < len(parts) and {_bare(parts[i - 1]), _bare(parts[i])} <= keep:
                continue  # inside a phrase that must hold together
            parts.insert(i, noise)
        elif i < len(parts) and len(parts) > 2:
            bare = _bare(parts[i])
            if bare in keep or not bare.isalpha():
                continue
            end = parts[i][len(parts[i].rstrip(".,:;?!")) :]
            parts[i] = noise + end if p < 0.8 else end
            if not parts[i]:
                del parts[i]
    return " ".join(parts)


def around(r: random.Random, words, text: str, p: float = 0.3) -> str:
    """``text`` with idle clauses before or after it, each with half of ``p``."""
    if r.random() < p / 2:
        text = f"{capital(clause(r, words))}. {text}"
    if r.random() < p / 2:
        text = f"{text} {capital(clause(r, words))}."
    return text
