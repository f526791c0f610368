"""Where engines come from: URLs that exist, processes of this machine, Ray actors, Modal containers."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from miles_mixprec.config import Config
from miles_mixprec.providers.base import Provider
from miles_mixprec.providers.engine import SGLANG


def provider_of(
    config: Config,
    *,
    python: str = sys.executable,
    server: Sequence[str] = SGLANG,
    extra_env: Mapping[str, str] | None = None,
    models: Mapping[str, str] | None = None,
    router_url: str = "",
) -> Provider:
    """The provider that `config.fleet.provider` names. Ray and Modal start the sidecars too; local and static do not.

    `python`, `server`, `extra_env` and `models` (view -> initial checkpoint) say how processes and actors start
    engines; containers have their own image. `router_url` is for the sidecars of Ray actors.
    """
    if config.fleet.provider == "local":
        from miles_mixprec.providers.local import LocalProvider

        return LocalProvider(
            config.fleet, config.run_dir, python=python, server=server, extra_env=extra_env, models=models
        )
    if config.fleet.provider == "ray":
        from miles_mixprec.providers.ray import Launch, RayProvider

        launch = Launch(
            run_dir=config.run_dir,
            python=python,
            server=tuple(server),
            extra_env=extra_env,
            models=models,
            sidecar=config if router_url else None,
            router_url=router_url,
        )
        return RayProvider(config.fleet, launch)
    if config.fleet.provider == "modal":
        from miles_mixprec.providers.modal import ModalProvider

        return ModalProvider(config)
    from miles_mixprec.providers.static import StaticProvider

    return StaticProvider(config.fleet)
