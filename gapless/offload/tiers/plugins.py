"""Finds what opens a tier: ours, or that of a package with an entry point in the group `gapless.kv_tiers`."""

from __future__ import annotations

from gapless.base.plug_ins import load
from gapless.base.tiers import PLUG_INS
from gapless.offload.tiers.disk import DiskTier
from gapless.offload.tiers.lmcache import LMCacheTier
from gapless.offload.tiers.mooncake import MooncakeTier
from gapless.offload.tiers.nixl import NixlTier
from gapless.offload.tiers.redis import RedisTier
from gapless.offload.tiers.seam import TierFactory

OWN_TIERS: dict[str, TierFactory] = {
    "disk": DiskTier,
    "redis": RedisTier,
    "lmcache": LMCacheTier,
    "mooncake": MooncakeTier,
    "nixl": NixlTier,
}


def factory_of(kind: str) -> TierFactory:
    """Return what opens tiers of this kind. Raises ConfigError for a plug-in that cannot be imported."""
    if kind in OWN_TIERS:
        return OWN_TIERS[kind]
    factory: TierFactory = load(PLUG_INS, kind, "kv_tiers")
    return factory
