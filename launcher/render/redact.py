"""What must not leave a machine, cut out of text: pure, and safe to apply twice.

A page is redacted as a document, string by string, before any word of it is rendered: a new field cannot be forgotten.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from typing import Any

from launcher.structs import Private

SECRET = "<secret>"
_KEPT = 8  # characters of an id that still tell two cards apart

_UUID = re.compile(r"(?<![0-9a-f])([0-9a-f]{8})-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}(?![0-9a-f])", re.I)
_SERIAL = re.compile(
    r"(\bserial(?:[ _-]?(?:no\.?|number))?['\"]?\s*[:=#]?\s*['\"]?)(?=[A-Z-]*\d)([A-Z0-9][A-Z0-9-]{8,})", re.I
)
_HOMES = re.compile(r"/(home|Users)/[^/\s'\":,;]+")
_MAC = re.compile(r"\b[0-9a-f]{2}(?::[0-9a-f]{2}){5}\b", re.I)
_MAIL = re.compile(r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)+\b")
_IPV4 = re.compile(r"(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?!\d|\.\d)")
_IPV6 = re.compile(r"(?<![\w:.])[0-9a-f]{0,4}(?::[0-9a-f]{0,4}){2,7}(?![\w:])", re.I)
# The forms of well-known tokens, and whatever stands behind a word that says that a secret follows.
_TOKENS = (
    re.compile(r"\b(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[abprs]-)[A-Za-z0-9_-]{8,}"),
    re.compile(r"\bAKIA[0-9A-Z]{12,}\b"),
    re.compile(r"\beyJ[\w-]{8,}\.[\w-]+\.[\w-]*"),
)
_BEARER = re.compile(r"(\b(?:bearer|basic)\s+)[^\s'\",;<]+", re.I)
_NAMED = re.compile(
    r"((?:(?<![a-z0-9])(?:\w*api[_-]?keys?|\w+[_-]key|\w*[_-]?secret|\w*passw(?:or)?d|\w*passphrase)|(?<=[?&])key"
    r"|(?P<count>(?<![a-z0-9])[\w-]*token))['\"]?\s*[:=]\s*['\"]?)(?!<secret>)(?P<value>[^\s'\",;&]+)",
    re.I,
)
_FLAG = re.compile(r"(--?(?:hft|(?:[\w-]*-)?(?:api-?key|token|secret|password))(?:\s+|=))(?!<secret>)(\S+)", re.I)
_LOGIN = re.compile(r"(\w+://)[^/\s@:]+(?::[^/\s@]*)?@")


def text(value: str, private: Private) -> str:
    """A string without secrets, names, whole ids and public addresses.

    Home folders become `~`, the user `<user>`, this host `<host>`, secrets `<secret>`, public addresses `<ip>`;
    UUIDs and serials keep their first 8 characters.
    """
    if value in private.words:
        return SECRET
    for secret in private.literals:
        value = value.replace(secret, SECRET)
    for form in _TOKENS:
        value = form.sub(SECRET, value)
    value = _BEARER.sub(rf"\g<1>{SECRET}", value)
    value = _LOGIN.sub(rf"\g<1>{SECRET}@", value)
    value = _NAMED.sub(_named, value)
    value = _FLAG.sub(rf"\g<1>{SECRET}", value)
    value = _MAIL.sub("<mail>", value)
    if private.home:
        value = re.sub(rf"{re.escape(private.home)}(?=$|[^\w.-])", "~", value)
    value = _HOMES.sub("~", value)
    for host in private.hosts:
        value = _word(host).sub("<host>", value)
    if private.user:
        value = _word(private.user).sub("<user>", value)
    value = _UUID.sub(r"\1", value)
    value = _SERIAL.sub(lambda m: m[1] + m[2][:_KEPT], value)
    value = _MAC.sub("<mac>", value)
    value = _IPV4.sub(_address, value)
    return _IPV6.sub(_address, value)


def document(value: Any, private: Private) -> Any:
    """Every string of a document; keys are ours, except those that look like an id."""
    if isinstance(value, str):
        return text(value, private)
    if isinstance(value, Mapping):
        return {_UUID.sub(r"\1", str(k)): document(v, private) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [document(v, private) for v in value]
    return value


def _word(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", re.I)


def _named(found: re.Match[str]) -> str:
    # `n_token=12`, `EOS token = 151643` are figures of every log, and no secret.
    counted = found["count"] and re.fullmatch(r"-?[\d.]+", found["value"])
    harmless = counted or found["value"].lower() in ("null", "none", "true", "false")
    return found[0] if harmless else found[1] + SECRET


def _address(found: re.Match[str]) -> str:
    try:
        return "<ip>" if ipaddress.ip_address(found[0]).is_global else found[0]
    except ValueError:  # a version, a time, a PCI id
        return found[0]
