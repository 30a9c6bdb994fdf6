"""API keys: read from where a secret reference points, and known from then on by their digests alone.

Owns the reading and the comparison. Knows nothing of HTTP. The one decision: a key is hashed before anything else is
done with it, so no setting, record, log or error can hold one; what travels to a replica is the sha256 of each.
"""

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from pipeline.errors import ParameterError

MIN_KEY_CHARACTERS = 16
"""A shorter key could be found from its digest by trying."""
_SEPARATORS = re.compile(r"[\s,]+")


def digest_of(key: str) -> str:
    """sha256 in hexadecimal digits."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def read_key_digests(reference: str, *, environment: Mapping[str, str], directory: Path) -> tuple[str, ...]:
    """Digests of the keys that a reference points to.

    Args:
        reference: `env:NAME`, keys separated by white space or commas; `file:PATH`, one key a line, where a line that
            starts with `#` is a comment.
        environment: of this process.
        directory: where a relative path starts.

    Raises:
        ParameterError: the reference is of another form, points to nothing, or a key is too short. No message holds
            any part of a key.
    """
    kind, _, place = reference.partition(":")
    if kind == "env" and place:
        if not environment.get(place):
            raise ParameterError(
                f"api_keys: the environment variable {place!r} is not set where the stage runs",
                hint="a local head keeps the environment it was started with: set the variable and start it anew "
                "(`pipeline down`), or use file:PATH",
            )
        keys = [key for key in _SEPARATORS.split(environment[place]) if key]
    elif kind == "file" and place:
        keys = _lines(directory / place)
    else:
        raise ParameterError(
            "api_keys: must be a reference, `env:NAME` or `file:PATH`, and never a key",
            hint="put the keys into a file outside of the project, one a line, and write `api_keys: file:PATH`",
        )
    wrong = sum(len(key) < MIN_KEY_CHARACTERS or not (key.isascii() and key.isprintable()) for key in keys)
    if wrong or not keys:
        found = f"{wrong} of {len(keys)} keys that are not {MIN_KEY_CHARACTERS} or more of ASCII's characters"
        raise ParameterError(
            f"api_keys: {kind}:{place} holds {found if wrong else 'no key'}",
            hint=f"make keys of {MIN_KEY_CHARACTERS} characters or more, such as `openssl rand -hex 24` gives",
        )
    return tuple(dict.fromkeys(map(digest_of, keys)))


def _lines(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ParameterError(f"api_keys: {path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ParameterError(f"api_keys: {path}: is no text in UTF-8") from None
    lines = [line.strip() for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def is_among(digest: str, digests: Iterable[str]) -> bool:
    """True where one of them equals `digest`; takes the same time whichever it is."""
    found = False
    for held in digests:
        found |= hmac.compare_digest(held, digest)
    return found


def bearer_digest(authorization: str) -> str | None:
    """Digest of the key in an `Authorization` header; None where there is none."""
    scheme, _, key = authorization.partition(" ")
    key = key.strip()
    return digest_of(key) if scheme.lower() == "bearer" and key else None
