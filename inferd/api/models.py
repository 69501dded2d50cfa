"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response

from inferd.api.admission import Admission, NotReady
from inferd.api.errors import ModelNotFound
from inferd.api.exchange import Exchange, json_response
from inferd.api.responses import Json
from shared.ids import VersionTag


class Models:
    """Tells which model there is and in which versions."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._created = int(time.time())

    async def listing(self, request: Request) -> Response:
        """Every model that can answer now: one, or none while no version serves."""
        tag = self._enter(request)
        data = [] if tag is None else [self._model(tag)]
        return json_response({"object": "list", "data": data})

    async def one(self, request: Request) -> Response:
        """The model named in the path.  Raises ModelNotFound, and NotReady while no version serves."""
        tag = self._enter(request)
        name = request.path_params["model"]
        if name != self._admission.model:
            raise ModelNotFound(name)
        if tag is None:
            raise NotReady("No version of the model serves yet.")
        return json_response(self._model(tag))

    def _enter(self, request: Request) -> VersionTag | None:
        Exchange.of(request.scope).endpoint = "models"
        return self._admission.serving()

    def _model(self, tag: VersionTag) -> Json:
        return {
            "id": self._admission.model,
            "object": "model",
            "created": self._created,
            "owned_by": "changeover",
            "version": str(tag),
            "resident_versions": [str(one) for one in self._admission.resident()],
        }
