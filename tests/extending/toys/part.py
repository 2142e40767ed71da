"""A part that gives each tenant a budget of tokens. A tenant is the salt of its requests."""

from __future__ import annotations

from collections import Counter
from typing import Any

from gapless.base.errors import RequestError
from gapless.base.part import Part
from gapless.base.records import Request, StepTokens


class TenantBudget(Part):
    """Refuses requests of a tenant without tokens, and ends those that run when the last is spent."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._spent = Counter[str]()
        self._tenants: dict[int, str] = {}
        """Tenants of open requests, by the requests' keys"""

    def check(self, request: Request) -> Request:
        if self._spent[request.salt] >= self._tokens:
            raise RequestError("this tenant has spent all its tokens: come back tomorrow", "cache_salt")
        return request

    def begin(self, request: Request) -> None:
        self._tenants[request.key] = request.salt

    def end(self, request: Request) -> None:
        self._tenants.pop(request.key, None)

    def settled(self, flight: Any, lines: Any, tokens: StepTokens) -> None:
        for key, token, _ in tokens.entries():
            if token >= 0 and key in self._tenants:
                self._spent[self._tenants[key]] += 1

    def failed(self) -> list[tuple[int, RequestError]]:
        error = RequestError("this tenant spent its last token", "cache_salt")
        return [(key, error) for key, tenant in self._tenants.items() if self._spent[tenant] >= self._tokens]
