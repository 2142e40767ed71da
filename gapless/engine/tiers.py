"""Opens the tiers below an engine's host tier, and names the origin of their pages."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256

from gapless.base.config import EngineConfig
from gapless.base.errors import ConfigError
from gapless.base.host import memory
from gapless.base.peers import with_key
from gapless.loop.loop import Loop
from gapless.loop.spec import HostSizes
from gapless.model.config import ModelConfig, model_length, resolve_model_dir
from gapless.model.fingerprint import fingerprint
from gapless.model.seam import LoadedModel
from gapless.offload.below import LowerTiers
from gapless.offload.tiers.link import Adopt
from gapless.offload.tiers.peer import SHELF_BYTES, PeerWorker, open_peer_tier
from gapless.offload.tiers.plugins import factory_of
from gapless.offload.tiers.seam import Namespace, TierSetup
from gapless.offload.tiers.worker import TierWorker

PAGE_FORMAT = 2
"""Version of the pages' bytes and checksums in a host tier"""


def host_sizes(config: EngineConfig) -> HostSizes | None:
    """Return the bounds of the host tier, None without one. Slots for peers come on top of the user's size."""
    if not config.tiers:
        return None
    given = (config.tiers["peer"].nbytes or SHELF_BYTES) if config.peer_plan.listen else 0
    return HostSizes(config.tiers["host"].nbytes, weighs=True, given=given)


class EngineTiers:
    """The tiers below an engine's host tier, none for most engines."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises ConfigError."""
        if unused := config.file_without_peers:  # only here: serve --pd gives the roles to its children
            raise ConfigError(f"{unused} is for engines with peers: add --role, or leave it out")
        if "peer" in config.tiers and not config.peer_plan:
            raise ConfigError("kv_tiers: peer is for engines with a role: add --role, prefill, decode or both")
        self.kinds = [kind for kind in config.tiers if kind != "host"]
        asked = sum(tier.nbytes for kind, tier in config.tiers.items() if kind in ("host", "peer"))
        if asked > (most := memory()[1]):
            raise ConfigError(f"kv_tiers: host and peer need {asked:,} bytes, this machine has {most:,}: give less")
        plan = config.peer_plan
        self._config, self._peers = config, with_key(plan, config.kv_peer_key_file) if plan else plan
        self.namespace, self._weights = Namespace(""), ""
        self._workers: list[TierWorker] = []
        self._below: LowerTiers | None = None
        self._wake: Callable[[], None] = lambda: None

    def look_at_weights(self) -> None:
        """Compute the fingerprint of the weights if there are tiers. Called before and after loading them."""
        if self.kinds:
            dummy = self._config.load_format == "dummy"
            self._weights = (
                f"dummy {self._config.base_seed}" if dummy else fingerprint(resolve_model_dir(self._config.model))
            )

    def name(self, model_config: ModelConfig, model: LoadedModel, device: str) -> str:
        """Return a name of everything that KV depends on, so that equal digests mean equal KV, with tiers also in other
        processes."""
        config = self._config
        head, kv = config.speculation.in_pages if config.speculation else "", getattr(model, "kv_origin", "auto")
        if not self.kinds:
            length = model_length(config, model_config)
            what = f"{model_config.impl}|{length}|{model.dtype}|{config.batch_invariant}|{config.quantization}"
            name = f"{config.model}|{config.load_format}|{config.base_seed}|{what}"
            return "|".join([name, *[head] * bool(head), *[kv] * (kv != "auto")])
        before = self._weights
        self.look_at_weights()
        if self._weights != before:
            raise ConfigError("model: its files changed while they were loaded; start again when they are complete")
        self.namespace = Namespace.of(
            {
                "format": PAGE_FORMAT,
                "model": model_config.architecture,
                "layers": model_config.sizes.layers,
                "config": sha256(f"{model_config} {model_length(config, model_config)}".encode()).hexdigest(),
                "weights": self._weights,
                "kv_cache_dtype": kv,
                "dtype": str(model.dtype).removeprefix("torch."),
                "page_size": config.block_size,
                "page_bytes": model.page_bytes(config.block_size),
                "groups": [(name, rule.kind, rule.window) for name, rule in model.groups()],
                "batch_invariant": config.batch_invariant,
                "drafts": head,
                "device": device,
                "ranks": config.tensor_parallel_size,
            }
        )
        return self.namespace.digest.hex()

    def wakes(self, wake: Callable[[], None]) -> None:
        """Call `wake` too, which ends an idle engine's wait, when a tier has news."""
        self._wake = wake

    def attach(self, loop: Loop) -> None:
        """Open the tiers and attach them to the loop's host tier. Raises ConfigError."""
        transfers = loop.parts.transfers
        if transfers is None or not self.kinds:
            return

        def ring() -> None:
            """End the engine's present wait: a tier has news."""
            loop.bell.ring()
            self._wake()

        slots = tuple(transfers.memory)
        slot_bytes = tuple(transfers.stride(group) for group in range(len(slots)))
        for kind in self.kinds:
            tier = self._config.tiers[kind]
            setup = TierSetup(tier.target, tier.nbytes, self.namespace, slots, slot_bytes, transfers.shared)
            worker = self._open(kind, setup, ring, transfers.adopt)
            worker.start()
            self._workers.append(worker)
        self._below = transfers.host.attach(self._workers, transfers.slot)

    def _open(self, kind: str, setup: TierSetup, ring: Callable[[], None], adopt: Adopt) -> TierWorker:
        if kind != "peer":
            return TierWorker(kind, factory_of(kind)(setup), ring)
        return PeerWorker(kind, open_peer_tier(setup, self._peers, adopt), ring)

    def close(self) -> None:
        """Store waiting pages as time allows, and release the host tier's memory."""
        if self._below is not None:
            self._below.flush()
        for worker in self._workers:
            worker.close()
