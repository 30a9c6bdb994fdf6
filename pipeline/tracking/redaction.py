"""Secrets taken out of text before it is remembered.

Owns what counts as a secret: the password of a URI, a signature in its query, a parameter whose name says so. Knows
nothing of where the text goes. The one decision: what identifies (scheme, user, host, path) stays, so that a scrubbed
URI still says which server was meant.
"""

import re

MASK = "***"

_USER_AND_PASSWORD = re.compile(r"(?P<head>[A-Za-z][A-Za-z0-9+.-]*://[^\s/@:?#\"']*):[^\s/?#\"']*@")
_TOKEN_AS_USER = re.compile(r"(?P<head>[A-Za-z][A-Za-z0-9+.-]*://)[^\s/@:?#\"']{16,}@")
_QUERY = re.compile(
    r"(?P<head>[?&](?:[\w.-]*(?:password|passwd|secret|token|signature|credential|api_?key|access_?key)|sig)=)[^&\s\"'#]+",
    re.IGNORECASE,
)
_SECRET_NAME = re.compile(
    r"(?:^|[._-])(?:password|passwd|secret|token|credentials?|api_?key|access_?key|private_?key)$", re.IGNORECASE
)


def scrub(text: str) -> str:
    """`text` with passwords, token users and signed queries of the URIs in it replaced by `***`."""
    if "://" not in text:
        return text
    text = _USER_AND_PASSWORD.sub(rf"\g<head>:{MASK}@", text)
    text = _TOKEN_AS_USER.sub(rf"\g<head>{MASK}@", text)
    return _QUERY.sub(rf"\g<head>{MASK}", text)


def names_a_secret(name: str) -> bool:
    """True where a parameter of this (dotted) name holds a secret: `db.password`, `api_key`; not `num_tokens`."""
    return _SECRET_NAME.search(name) is not None
