"""Whether a deployment that a commit speaks of still answers, with the model it was committed with.

Owns one question, asked when a flow is planned. Loads nothing but the standard library. The one decision: a
deployment's commit proves that it once answered; whether it does now is asked of the endpoint itself.
"""

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any, Protocol

TIMEOUT_SECONDS = 2.0


class HasFacts(Protocol):
    """The part of a commit that is read."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """Of the stage: `health_url`, `name`, `model_digest`."""
        ...


def why_not_live(commit: HasFacts, environment: Mapping[str, str], registry: object = None) -> str | None:
    """Why the endpoint of a committed deployment is not live, in plain words, or None where it is.

    Where the run is ephemeral nothing is kept up after it, so the committed smoke request is what counts. The model
    registry has no say in it.
    """
    del registry
    if environment.get("ephemeral") == "1":
        return None
    facts = commit.facts
    url, wanted = facts.get("health_url"), facts.get("model_digest")
    if not isinstance(url, str) or not isinstance(wanted, str):
        return "its commit names no endpoint"
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as answer:
            body = json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return f"{url} answers with status {error.code}"
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        return f"nothing answers at {url} ({reason})"
    except ValueError:
        return f"something else answers at {url}"
    models = body.get("models") if isinstance(body, dict) else None
    if not isinstance(models, dict):
        return f"something else answers at {url}"
    served = models.get(facts.get("name"))
    if not isinstance(served, dict):
        return f"{url} serves {', '.join(map(repr, models)) or 'nothing'}, not {facts.get('name')!r}"
    if served.get("digest") != wanted:
        return f"{url} serves another model (digest {str(served.get('digest'))[:12]}, not {wanted[:12]})"
    return None
