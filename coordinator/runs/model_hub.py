"""Publishing of a version on a model hub: the folder of `run export`, as one commit of a
repository.

The upload uses the hub's token on the machine where the organiser runs the command. The library is
the extra `hub`; HF_TOKEN and HF_ENDPOINT apply to it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from coordinator.storage.secret_file import is_secret
from shared.errors import BadRequest, Configuration, Unauthorized, Unavailable, VolunteerError, why
from shared.programs.installation import missing_extra_error

PREFIX = "hub:"
REFUSED = (401, 403)
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


class HubRepository:
    """One repository of a hub, and the right to write to it."""

    def __init__(self, repository: str, token: str) -> None:
        self.repository = repository
        self._token = token

    @classmethod
    def of(cls, target: str) -> HubRepository:
        """Return the repository `hub:OWNER/NAME`, with this machine's token.

        Raises BadRequest for another form, Configuration without library or token.
        """
        name = repository(target)
        try:
            from huggingface_hub import get_token
        except ImportError as error:
            raise missing_extra_error("publishing on a hub", "hub") from error
        token = get_token()
        if not token:
            raise Configuration(
                "there is no token for the hub: set HF_TOKEN to one that may write, or log in "
                "with `hf auth login`"
            )
        if not is_secret(token):
            raise Configuration("the token for the hub must be one line of printable characters")
        return cls(name, token)

    def publish(self, folder: Path, message: str) -> str:
        """Publish a folder as one commit; return its address. A missing repository is made,
        private.

        Raises Unauthorized if the hub refuses the token, Unavailable if it cannot be reached,
        VolunteerError for another refusal.
        """
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError
        from huggingface_hub.utils.tqdm import disable_progress_bars

        # an error may quote the request, and with it the token
        def without_token(error: Exception) -> str:
            return why(error).replace(self._token, "***")

        disable_progress_bars()
        endpoint = os.environ.get("HF_ENDPOINT") or None
        api = HfApi(endpoint=endpoint, token=self._token, library_name="volunteer")
        try:
            address = api.create_repo(self.repository, private=True, exist_ok=True)
            api.upload_folder(repo_id=self.repository, folder_path=folder, commit_message=message)
        except HfHubHTTPError as error:
            raise self._refused(error.response.status_code, without_token(error)) from None
        # errors of httpx are known by their module: this package may not import it
        except Exception as error:
            if not type(error).__module__.startswith("httpx"):
                raise VolunteerError(
                    f"the hub refused {self.repository}: {without_token(error)}"
                ) from None
            where = re.sub("//[^/@]*@", "//", api.endpoint)  # the address may hold a password
            raise Unavailable(
                f"the hub {where} cannot be reached: {without_token(error)}"
            ) from None
        return str(address)

    def _refused(self, status: int, answer: str) -> VolunteerError:
        if status in REFUSED:
            return Unauthorized(
                f"the hub does not let this token write to {self.repository}: check its scope"
            )
        first = answer.strip().partition("\n")[0]
        return VolunteerError(f"the hub refused {self.repository}: {first}")


def repository(target: str) -> str:
    """Return OWNER/NAME of `hub:OWNER/NAME`. Raises BadRequest for another form."""
    name = target.removeprefix(PREFIX)
    if not _REPOSITORY.fullmatch(name):
        raise BadRequest(f'"{target}" names no repository: write --to {PREFIX}OWNER/NAME')
    return name
