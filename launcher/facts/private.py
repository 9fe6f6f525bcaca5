"""What identifies this machine and its user, so that a page to share can leave it out. Reads, never writes."""

from __future__ import annotations

import os
import pwd
import re
import socket
from collections.abc import Iterable, Mapping

from launcher.structs import Private

# Names of variables and flags whose value is a secret. `--api-key-file` names a file, which is none.
_SECRET_NAME = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|AUTH)$", re.I)
_SECRET_FLAG = re.compile(r"^--?(hft|(.*-)?(api-?key|key|token|secret|password|passphrase))$", re.I)
# A shorter secret would be cut out of ordinary words; where it stands alone it is hidden all the same. Of our own
# environment only what is as long as a key: `REQUIRE_AUTH=true` there is no secret, nor is a slug's name.
_SHORTEST, _SHORTEST_OURS = 4, 8
_NO_SECRETS = frozenset({"WEIGHT_KEY"})
_NOBODY = frozenset({"", "root", "localhost"})  # names that say nothing of anybody


def private(
    argvs: Iterable[tuple[str, ...]] = (), envs: Iterable[Mapping[str, str]] = (), env: Mapping[str, str] | None = None
) -> Private:
    """Home folder, user and host names of this machine; secrets that these command lines and environments hold.

    env  our own environment, searched for secrets too; None takes the process's
    """
    ours = os.environ if env is None else env
    names = {socket.gethostname(), os.uname().nodename, ours.get("HOSTNAME", "")}
    hosts = {part for name in names for part in (name, name.partition(".")[0])} - _NOBODY
    home, user = _home(ours), _user(ours)
    words = {word for argv in argvs for word in secret_words(argv)} | {v for e in envs for v in _secret_values(e)}
    words -= {""}
    literals = {part for value in words for part in (value, *value.split(",")) if len(part) >= _SHORTEST}
    literals |= {value for value in _secret_values(ours) if len(value) >= _SHORTEST_OURS}
    return Private(
        home=home if home not in ("", "/") else "",
        user=user if user not in _NOBODY else "",
        hosts=tuple(sorted(hosts, key=lambda h: (-len(h), h))),
        literals=tuple(sorted(literals, key=lambda s: (-len(s), s))),
        words=frozenset(words),
    )


def _secret_values(env: Mapping[str, str]) -> set[str]:
    return {value for name, value in env.items() if _SECRET_NAME.search(name) and name not in _NO_SECRETS}


def secret_words(argv: tuple[str, ...]) -> tuple[str, ...]:
    """Values of flags that hold a secret, as `--api-key VALUE` or `--api-key=VALUE`."""
    found = [value for flag, _, value in (word.partition("=") for word in argv) if value and _SECRET_FLAG.match(flag)]
    found += [value for flag, value in zip(argv, argv[1:], strict=False) if _SECRET_FLAG.match(flag)]
    return tuple(found)


def _home(env: Mapping[str, str]) -> str:
    return env.get("HOME", "").rstrip("/") or _entry("pw_dir").rstrip("/")


def _user(env: Mapping[str, str]) -> str:
    return _entry("pw_name") or env.get("USER", "") or env.get("LOGNAME", "")


def _entry(field: str) -> str:
    try:
        return str(getattr(pwd.getpwuid(os.getuid()), field))
    except KeyError:  # a container that runs with a number of no account
        return ""
