"""Errors of storage drivers, as errors of an operating system.

Owns the translation of what s3fs, gcsfs and adlfs let through of their HTTP libraries. Imports none of them. The one
decision: an error is known by the package its type comes from, and counts as passing (EIO) unless it speaks of
credentials, of a right, of a request that is wrong, or of an object that is not there.
"""

import contextlib
import errno
from collections.abc import Iterator

_DRIVERS = frozenset({"botocore", "aiobotocore", "aiohttp", "gcsfs", "google", "azure"})
_BY_STATUS = {400: errno.EINVAL, 401: errno.EACCES, 403: errno.EACCES, 404: errno.ENOENT}
_BY_WORD = {"Credential": errno.EACCES, "Auth": errno.EACCES, "Token": errno.EACCES, "Validation": errno.EINVAL}
"""In the name of an error's type."""


@contextlib.contextmanager
def as_os_errors() -> Iterator[None]:
    """Raise a driver's own error as the `OSError` that says the same."""
    try:
        yield
    except Exception as error:
        told = os_error_of(error)
        if told is None:
            raise
        raise told from error


def os_error_of(error: Exception) -> OSError | None:
    """What a driver's own error says, or None where it is none."""
    kind = type(error)
    if kind.__module__.partition(".")[0] not in _DRIVERS:
        return None
    words = [number for word, number in _BY_WORD.items() if word in kind.__name__]
    statuses = [getattr(error, name, None) for name in ("status", "status_code", "code")]
    by_status = [_BY_STATUS[status] for status in statuses if isinstance(status, int) and status in _BY_STATUS]
    number = (*words, *by_status, errno.EIO)[0]
    return OSError(number, f"{kind.__name__}: {error}")
