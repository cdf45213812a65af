"""What a hub's refusals mean, and what the user can do: each of them is another thing to do."""

from __future__ import annotations

from urllib.parse import urlsplit

from transaxle.errors import TransaxleError, refuse, without_secrets
from transaxle.formats.hub.hub_requests import ATTEMPTS, Answer
from transaxle.formats.hub.hub_url import HubUrl

_LOG_IN = "hf auth login, or HF_TOKEN"


def refusal(answer: Answer, place: HubUrl, endpoint: str, file: str) -> TransaxleError:
    """Return the error for an answer that is none of what was asked for.

    Args:
        answer: of the hub, or of a host that it sent us to.
        place: what is read.
        endpoint: the hub's address.
        file: name for errors.
    """
    repository, code, said = place.repository, answer.says("X-Error-Code"), answer.said
    page = f"{without_secrets(endpoint)}{place.page}"
    if code == "RevisionNotFound":
        message = f"{repository} has no revision {place.revision!r}"
        hint = f"Name a branch, a tag or a commit after the @; they are listed at {page}/tree/main."
    elif code == "GatedRepo":
        message = f"{repository} is gated: its files are for those who were given access"
        hint = f"Ask for access at {page}; then log in with that account ({_LOG_IN})."
    elif said.startswith("Access to this resource is disabled"):
        message, hint = f"the hub has disabled {repository}", f"See {page}."
    elif code == "EntryNotFound":
        message, hint = "the hub lists this file, but does not have it", f"See {page}."
    elif answer.status == 401 and answer.known and code != "RepoNotFound":
        message = "the hub does not accept the token"
        hint = f"It may have expired: log in again ({_LOG_IN}), or remove it to read what is public."
    elif code == "RepoNotFound" or answer.status in (401, 404):
        who = "that this token may see" if answer.known else "that everybody may see"
        message = f"the hub has no repository {repository} {who}"
        hint = f"Check the name at {page}. If it is private, log in with an account that may read it ({_LOG_IN})."
    elif answer.status == 403:
        message = f"access to {repository} is denied"
        hint = f"The token must be allowed to read it: see its permissions in the hub's settings ({_LOG_IN})."
    elif answer.status == 429:
        message, hint = f"too many requests: refused {ATTEMPTS} times", f"Wait, or log in for more ({_LOG_IN})."
    elif answer.status >= 500:
        message, hint = f"the hub answers {answer.status}, {ATTEMPTS} times", "Run it again later."
    else:
        message, hint = f"the hub answers {answer.status}", "Run it again later."
    return refuse("IO", f"{message} ({said})" if said else message, file=file, hint=hint)


def refusal_elsewhere(answer: Answer, file: str) -> TransaxleError:
    """Return the error for an answer of another host, to which the hub has sent us; args as of `refusal`."""
    message = f"the hub redirects to {urlsplit(answer.url).hostname}, which answers {answer.status}"
    return refuse("IO", message, file=file, hint="Run it again later. What the hub gives out is signed for some time.")
