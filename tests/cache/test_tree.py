"""The prefixes of a key space as a tree: what leads to what, where it branches, and what is left out."""

from __future__ import annotations

import sqlite3

from mlxkv.cache.index import FILE, Entry, Index
from mlxkv.cache.keys import KeySpace, pack
from mlxkv.cache.tree import Found, account, on_disk, tree

BLOCK = 16
SPACE = KeySpace(b"r" * 32, BLOCK)


def chain(tokens: list[int], ends: list[int], used: float = 1.0) -> list[Found]:
    """Entries that end at ``ends`` of a prompt: full blocks, and leaves between them, each with a state."""
    found = []
    for end in ends:
        start = (end - 1) // BLOCK * BLOCK
        parent = SPACE.root
        for at in range(0, start, BLOCK):
            parent = SPACE.key_packed(parent, pack(tokens[at : at + BLOCK]))
        packed = pack(tokens[start:end])
        key = SPACE.key_packed(parent, packed)
        entry = Entry(key, SPACE.root, parent, start, end, start, None, packed, frozenset({"rows", "state"}))
        found.append(Found(entry, {"rows": 10 * (end - start), "state": 100}, used=used))
    return found


def shape(stretches):
    return [(s.start, s.end, [f.entry.end for f in s.found], shape(s.below)) for s in stretches]


def test_a_conversation_is_one_stretch():
    prompt = list(range(100, 140))
    found = tree(chain(prompt, [5, 16, 20, 32, 40]), [], SPACE.root)
    assert shape(found) == [(0, 40, [5, 16, 20, 32, 40], [])]
    assert found[0].token_ids(8) == prompt[:8]


def test_two_that_part_within_a_block_have_their_beginning_in_common():
    """No entry ends where they part: the stretch above them has none."""
    one, other = list(range(100, 140)), [*range(100, 126), *range(500, 514)]
    found = tree(chain(one, [16, 32, 40]) + chain(other, [16, 32, 36], 2.0)[1:], [], SPACE.root)
    assert shape(found) == [(0, 16, [16], [(16, 26, [], [(26, 36, [32, 36], []), (26, 40, [32, 40], [])])])]
    common = found[0].below[0]
    assert common.token_ids(99) == one[16:26]
    assert [s.token_ids(3) for s in common.below] == [other[26:29], one[26:29]]


def test_where_a_leaf_ends_is_where_it_branches():
    one, other = list(range(100, 130)), [*range(100, 110), *range(500, 510)]
    found = tree(chain(one, [10, 16, 30]) + chain(other, [16, 20]), [], SPACE.root)
    assert shape(found) == [(0, 10, [10], [(10, 30, [16, 30], []), (10, 20, [16, 20], [])])]


def test_what_was_used_last_comes_first_and_what_hangs_on_nothing_is_left_out():
    old, new = chain(list(range(100, 120)), [16, 20], 1.0), chain(list(range(300, 310)), [10], 2.0)
    lost = chain(list(range(900, 940)), [40])
    assert shape(tree(old + new + lost, [], SPACE.root)) == [(0, 10, [10], []), (0, 20, [16, 20], [])]


def test_what_ram_and_disk_have_is_told_apart():
    disk, more = chain(list(range(100, 130)), [16]), chain(list(range(100, 130)), [30])
    ram = [(disk[0].entry, {"state": 100}), (more[0].entry, {"rows": 7})]
    (top,) = tree(disk, ram, SPACE.root)
    assert [(dict(f.ssd), dict(f.ram)) for f in top.found] == [
        ({"rows": 160, "state": 100}, {"state": 100}),
        ({}, {"rows": 7}),
    ]


def test_a_long_conversation_is_no_deep_recursion():
    prompt = list(range(10_000, 10_000 + 4000 * BLOCK))
    blocks, parent = [], SPACE.root
    for at in range(0, len(prompt), BLOCK):
        packed = pack(prompt[at : at + BLOCK])
        key = SPACE.key_packed(parent, packed)
        blocks.append(
            Found(Entry(key, SPACE.root, parent, at, at + BLOCK, at, None, packed, frozenset({"rows"})), {"rows": 1})
        )
        parent = key
    # each block has a neighbour that goes on differently, so that there is a level for each
    others = [Found(chain(prompt[: f.entry.start] + [1, 2], [f.entry.start + 2])[0].entry) for f in blocks[::500]]
    (top,) = [s for s in tree(blocks + others, [], SPACE.root) if s.end > 100]
    depth = 0
    while top.below:
        depth, top = depth + 1, max(top.below, key=lambda s: s.end)
    assert depth == 7 and top.end == len(prompt)


def filled(folder) -> list[Found]:
    found = chain(list(range(100, 140)), [16, 32, 40], 5.0) + chain(list(range(300, 308)), [8], 9.0)
    index = Index(folder)
    with index.transaction(checked=False):
        index.add_root(SPACE.root, "m", b"f", "{}", b"l", BLOCK)
        for f in found:
            index.add_entry(f.entry, dict(f.ssd), f.used)
    index.close()
    return found


def test_the_index_is_read_most_recent_first_and_no_further_than_asked(tmp_path):
    wanted = filled(tmp_path)
    found = on_disk(tmp_path, SPACE.root)
    assert {f.entry.key for f in found} == {f.entry.key for f in wanted}
    assert found[0].entry.end == 8 and dict(found[0].ssd) == {"rows": 80, "state": 100} and found[0].used == 9.0
    assert len(on_disk(tmp_path, SPACE.root, 2)) == 2 and on_disk(tmp_path, b"x" * 32) == []
    books = account(tmp_path)
    assert books.bytes == sum(sum(f.ssd.values()) for f in wanted) and books.budget is None
    assert books.models == (("m", 4, 8, books.bytes),) and books.entries == {SPACE.root: 4}


def test_no_index_or_a_damaged_one_is_an_empty_tree(tmp_path):
    assert on_disk(tmp_path / "none", SPACE.root) == [] and account(tmp_path / "none").bytes == 0
    filled(tmp_path)
    with sqlite3.connect(tmp_path / FILE) as db:
        db.execute("UPDATE entries SET tokens = x'00' WHERE end = 8")
    found = on_disk(tmp_path, SPACE.root)
    assert {f.entry.end for f in found} == {16, 32, 40}
    (tmp_path / FILE).write_bytes(b"no database at all" * 1000)
    assert on_disk(tmp_path, SPACE.root) == [] and account(tmp_path).bytes == 0
