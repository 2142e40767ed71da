"""The form of output that a request asks for: OpenAI's response_format, and fields of vLLM, SGLang and llama.cpp."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from gapless.base.errors import RequestError
from gapless.base.structured import KINDS, StructuredOutputs


class JsonSchemaFormat(msgspec.Struct):
    """A schema is always kept to; `strict` and the names change nothing."""

    name: str | None = None
    description: str | None = None
    schema: msgspec.Raw | UnsetType = UNSET
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    """OpenAI's form, with the `schema` that llama.cpp takes beside either type of JSON."""

    type: str
    json_schema: JsonSchemaFormat | None = None
    schema: msgspec.Raw | UnsetType = UNSET
    structures: msgspec.Raw | UnsetType = UNSET
    triggers: msgspec.Raw | UnsetType = UNSET
    format: msgspec.Raw | UnsetType = UNSET


class FormFields(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's structured_outputs. A schema and a structural tag are JSON, or its text."""

    json: msgspec.Raw | UnsetType = UNSET
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: msgspec.Raw | UnsetType = UNSET
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None


_OWN = {**{name: name for name in ("regex", "grammar", "structural_tag")}, **{"ebnf": "grammar", "json_schema": "json"}}
"""Fields of SGLang and llama.cpp, and their names in structured_outputs"""


class FormRequest(msgspec.Struct, kw_only=True):
    """The fields of a request that may ask for a form."""

    response_format: ResponseFormat | None = None
    structured_outputs: FormFields | None = None
    guided_json: msgspec.Raw | UnsetType = UNSET
    guided_json_object: bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_structural_tag: msgspec.Raw | UnsetType = UNSET
    guided_whitespace_pattern: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    json_schema: msgspec.Raw | UnsetType = UNSET
    structural_tag: msgspec.Raw | UnsetType = UNSET

    def form(self) -> StructuredOutputs | None:
        """Return the form that is asked for. Raises RequestError naming the field, also when there are two."""
        forms = [one for one in (_response_format(self.response_format), *self._fields()) if one is not None]
        if len(forms) > 1:
            raise two_forms(*(one.where for one in forms))
        return forms[0] if forms else None

    def _fields(self) -> list[StructuredOutputs]:
        found = []
        spaces = self.guided_whitespace_pattern
        if spaces is not None and not self.guided_json_object and raw_text(self.guided_json) is None:
            text = "guided_whitespace_pattern goes with guided_json or guided_json_object alone"
            raise RequestError(text, "guided_whitespace_pattern")
        if self.structured_outputs is not None:
            fields = {name: raw_text(value) for name, value in msgspec.structs.asdict(self.structured_outputs).items()}
            found.append(StructuredOutputs(**{name: value for name, value in fields.items() if value is not None}))
        for kind in KINDS:
            value = raw_text(getattr(self, f"guided_{kind}"))
            if value is not None and value is not False:
                more = {"whitespace_pattern": spaces} if kind.startswith("json") else {}
                found.append(StructuredOutputs(**{kind: value, **more}, source=f"guided_{kind}"))
        for name, kind in _OWN.items():
            if value := raw_text(getattr(self, name)):  # an empty text is llama.cpp's way to ask for nothing
                found.append(StructuredOutputs(**{kind: value}, source=name))
        return found


def two_forms(*fields: str) -> RequestError:
    """Return the error of a request with two forms, which these fields ask for."""
    text = f"{' and '.join(fields)} both ask for a form of output: leave one of them out"
    return RequestError(text, fields[1])


def _response_format(asked: ResponseFormat | None) -> StructuredOutputs | None:
    if asked is None or asked.type == "text":
        return None
    beside = raw_text(asked.schema) is not None and asked.type.startswith("json_")
    if beside and asked.json_schema is not None:
        raise two_forms("response_format.json_schema", "response_format.schema")
    if beside:
        return schema_form(asked.schema, "response_format.schema")
    if asked.type == "json_object":
        return StructuredOutputs(json_object=True, source="response_format")
    if asked.type == "json_schema":
        schema = asked.json_schema.schema if asked.json_schema else None
        return schema_form(schema, "response_format.json_schema.schema")
    if asked.type == "structural_tag":
        parts = {"structures": asked.structures, "triggers": asked.triggers, "format": asked.format}
        text = msgspec.json.encode({name: part for name, part in parts.items() if part is not UNSET}).decode()
        return StructuredOutputs(structural_tag=text, source="response_format")
    types = "text, json_object, json_schema or structural_tag"
    raise RequestError(f"response_format.type must be {types}, got {asked.type[:40]!r}", "response_format.type")


def schema_form(schema: msgspec.Raw | UnsetType | None, field: str) -> StructuredOutputs:
    """Return the form of a JSON schema, which is in this field. Raises RequestError where there is none."""
    text = raw_text(schema)
    if text is None:
        raise RequestError(f"{field} is missing: give a JSON schema, or ask for json_object", field)
    return StructuredOutputs(json=text, source=field)


def raw_text(value: Any) -> Any:
    """Return the text of raw JSON, or the string that it is; None where there is none."""
    if not isinstance(value, msgspec.Raw):
        return None if value is UNSET else value
    text = bytes(value).strip()
    if text in (b"", b"null"):
        return None
    return msgspec.json.decode(text, type=str) if text.startswith(b'"') else text.decode()
