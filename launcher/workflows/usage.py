"""What was typed and cannot be understood, as a refusal with a fix; llama.cpp's own flags get the option of ours."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.errors import UsageError
from launcher.facts.slug_values import INSTEAD, OWNED_FLAGS

# By the slug's key that a flag of llama.cpp belongs to.
_OPTIONS = {
    "placement.residency": "--residency auto     # the plan writes -ngl and -ot itself",
    "placement.order": "--devices CUDA0,CUDA1     # in the order that you want",
    "placement.margin": "--margin 1GiB",
    "serve.load_mode": "--load-mode none",
    "drafter": "--drafter /path/to/drafter.gguf",
    "mmproj": "--mmproj /path/to/mmproj.gguf",
    "model": "launcher plan /path/to/model.gguf",
}


def refusal(
    message: str, option: str | None, words: Sequence[str], command: str, spellings: Sequence[str] = ()
) -> UsageError:
    """The refusal of a command line.

    message  the parser's own words
    option   the option that it does not know, cut to a letter where it read `-ngl` as three; None for other problems
    words    the command line as it was typed
    command  `launcher plan`, to name its help
    spellings  of the option whose value is wrong: the parser does not say which value that was
    """
    fix = f"{command} --help"
    if option is None:
        at = next((i for i, w in enumerate(words) if w.partition("=")[0] in spellings), None)
        typed = "" if at is None else " ".join(words[at : at + 1 if "=" in words[at] else at + 2])
        return UsageError("usage", message.rstrip("."), context=typed and f"typed: {typed}", fix=fix)
    cut = [w.partition("=")[0] for w in words if w.startswith(option)]
    whole = next((w for w in cut if w in OWNED_FLAGS), cut[0] if cut else option)
    key = OWNED_FLAGS.get(whole)
    if key is None:
        return UsageError("usage", message.rstrip(".").replace(option, whole, 1), fix=fix)
    what = f"{whole} is a flag of llama.cpp that the launcher writes itself"
    return UsageError("usage", what, context=INSTEAD.get(whole, ""), fix=_OPTIONS.get(key, fix))
