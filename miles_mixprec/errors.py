"""Every error that the package raises on purpose.

One line each: what was wrong with which pool, sample or flag, and what to change.
"""


class MixprecError(Exception):
    """Base class."""


class ConfigError(MixprecError):
    """A configuration or a set of Miles flags that cannot work."""


class CapabilityError(MixprecError):
    """A Miles or SGLang installation that lacks what the configuration needs."""


class ContractError(MixprecError):
    """Sampler data that contradicts itself or the trainer's view of it."""


class StoreError(MixprecError):
    """A weight store that is torn, foreign, full, or asked to go backwards."""


class EngineError(MixprecError):
    """An engine or a router that does not start, died, or answered garbage."""


class PoolUnavailable(MixprecError):
    """A pool without a usable engine; its live sessions fail, they never move to another pool."""
