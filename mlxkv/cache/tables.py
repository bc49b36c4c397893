"""The tables of the index, of this version. An index of another version is built again from the files."""

from __future__ import annotations

VERSION = 4
SUFFIX = ".safetensors"  # of the records' files
#: what the index needs at most for a record that waits: a row with 256 ids, twice, in pages that are half full
WAITING_ROOM = 2 * (2 * 1024 + 512)

TABLES = (
    "CREATE TABLE roots ("
    " root BLOB PRIMARY KEY, model TEXT, fingerprint BLOB, compute TEXT, layout BLOB, block INTEGER) WITHOUT ROWID",
    "CREATE TABLE entries ("
    " key BLOB PRIMARY KEY, root BLOB NOT NULL, parent BLOB NOT NULL, start INTEGER NOT NULL, end INTEGER NOT NULL,"
    " row_start INTEGER NOT NULL, base BLOB, tokens BLOB NOT NULL, used REAL NOT NULL) WITHOUT ROWID",
    "CREATE TABLE records ("
    " key BLOB NOT NULL, kind TEXT NOT NULL, bytes INTEGER NOT NULL, PRIMARY KEY (key, kind)) WITHOUT ROWID",
    "CREATE TABLE answers ("
    " digest BLOB PRIMARY KEY, key BLOB NOT NULL, start INTEGER NOT NULL, last INTEGER) WITHOUT ROWID",
    # files that are named like records and have no row yet; ``written``: when, seconds
    "CREATE TABLE waiting (name TEXT PRIMARY KEY, bytes INTEGER NOT NULL, written REAL NOT NULL) WITHOUT ROWID",
    # records: sum of their bytes; waiting: the same and room for their rows; outside, inside: other files beside and
    # under records/
    "CREATE TABLE ledger (name TEXT PRIMARY KEY, bytes INTEGER NOT NULL) WITHOUT ROWID",
    # a store that is open (its budget, no bytes), or what it has reserved (bytes, and the names of the files)
    "CREATE TABLE holds ("
    " id INTEGER PRIMARY KEY, store INTEGER, pid INTEGER, started TEXT, boot TEXT, temporaries TEXT, budget INTEGER,"
    " bytes INTEGER NOT NULL, files TEXT NOT NULL)",
    "INSERT INTO ledger VALUES ('records', 0), ('waiting', 0), ('outside', 0), ('inside', 0)",
)
#: made after a bulk load
LOOK_UPS = (
    "CREATE INDEX entries_prefix ON entries (parent, tokens)",
    "CREATE INDEX entries_base ON entries (base) WHERE base IS NOT NULL",
    "CREATE INDEX entries_used ON entries (used)",
    "CREATE INDEX answers_key ON answers (key)",
    "CREATE TRIGGER records_added AFTER INSERT ON records BEGIN"
    " UPDATE ledger SET bytes = bytes + new.bytes WHERE name = 'records';"
    f" DELETE FROM waiting WHERE name = lower(hex(new.key)) || '.' || new.kind || '{SUFFIX}'; END",
    "CREATE TRIGGER waiting_added AFTER INSERT ON waiting BEGIN"
    f" UPDATE ledger SET bytes = bytes + new.bytes + {WAITING_ROOM} WHERE name = 'waiting'; END",
    "CREATE TRIGGER waiting_gone AFTER DELETE ON waiting BEGIN"
    f" UPDATE ledger SET bytes = bytes - old.bytes - {WAITING_ROOM} WHERE name = 'waiting'; END",
    "CREATE TRIGGER records_gone AFTER DELETE ON records BEGIN"
    " UPDATE ledger SET bytes = bytes - old.bytes WHERE name = 'records'; END",
    "CREATE TRIGGER records_changed AFTER UPDATE OF bytes ON records BEGIN"
    " UPDATE ledger SET bytes = bytes + new.bytes - old.bytes WHERE name = 'records'; END",
)
