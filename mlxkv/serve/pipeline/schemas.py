"""What is asked of a function's arguments, as far as formats that write them one by one need to know it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
#: what says more of an object than its properties do
_MORE = ("anyOf", "oneOf", "allOf", "not", "if", "patternProperties", "dependentSchemas", "dependentRequired")
_COUNTS = ("minProperties", "maxProperties", "propertyNames")


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """``schema``, or what its local reference points at; {} where that is nowhere."""
    for _ in range(16):
        if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
            return schema
        path = schema["$ref"]
        found: Any = root if path.startswith("#") else {}
        for step in path.lstrip("#").split("/"):
            if step:
                found = found.get(step, {}) if isinstance(found, Mapping) else {}
        schema = found
    return {}


def plainly(schema: Any, root: Mapping[str, Any]) -> Any:
    """``schema`` without references, and without null where there is one thing else that it may be."""
    for _ in range(16):
        schema = resolved(schema, root)
        if not isinstance(schema, Mapping):
            return schema
        for name in ("anyOf", "oneOf", "allOf"):
            branches = schema.get(name)
            if isinstance(branches, list) and "type" not in schema:
                others = [each for each in branches if each != {"type": "null"}]
                if len(others) == 1:
                    schema = {k: v for k, v in schema.items() if k != name} | dict(resolved(others[0], root) or {})
                    break
        else:
            break
    given = schema.get("type")
    if isinstance(given, list) and len(rest := [each for each in given if each != "null"]) == 1:
        schema = {**schema, "type": rest[0]}
    if isinstance(schema.get("enum"), list):
        schema = {**schema, "enum": [value for value in schema["enum"] if value is not None]}
    return schema


def nullable(schema: Any, root: Mapping[str, Any]) -> bool:
    """Whether null is among what a value may be, by name."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping):
        return False
    given = schema.get("type")
    if given == "null" or (isinstance(given, list) and "null" in given):
        return True
    return any(
        nullable(e, {}) for name in ("anyOf", "oneOf") if isinstance(schema.get(name), list) for e in schema[name]
    )


def kinds(schema: Any, root: Mapping[str, Any], depth: int = 4) -> set[str]:
    """JSON types that a value may have, null left out; empty where anything goes, or nobody knows."""
    schema = plainly(schema, root)
    if not isinstance(schema, Mapping) or not depth:
        return set()
    if "type" in schema:
        given = schema["type"]
        return {t for t in (given if isinstance(given, list) else [given]) if isinstance(t, str)} - {"null"}
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return {_TYPES[type(value)] for value in values if type(value) in _TYPES}
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            branches = [kinds(each, root, depth - 1) for each in schema[name] if each != {"type": "null"}]
            return set().union(*branches) if all(branches) else set()
    return set()


def texts(schema: Any) -> list[str]:
    """The strings that a plain schema lists, if it lists its values."""
    if not isinstance(schema, Mapping):
        return []
    given = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return [value for value in given if isinstance(value, str)] if isinstance(given, list) else []


def properties(schema: Any, root: Mapping[str, Any]) -> list[tuple[str, Any, bool]] | None:
    """An object's properties: name, schema, whether it is required. None where they do not say it all."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or any(name in schema for name in (*_MORE, *_COUNTS)):
        return None
    found = schema.get("properties") or {}
    required = schema.get("required") or []
    if not isinstance(found, Mapping) or not isinstance(required, list) or any(r not in found for r in required):
        return None
    return [(name, each, name in required) for name, each in found.items()]
