"""The folders of one user: models, caches, settings and state."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

APPLICATION = "infer"


@dataclass(frozen=True)
class DataDirs:
    """Four folders, none of which need exist yet.

    models: downloaded model files. cache: what can be computed again (KV blocks, fingerprints, kernels).
    config: the settings file. state: histories.
    """

    models: Path
    cache: Path
    config: Path
    state: Path

    @classmethod
    def from_home(cls, home: Path | None = None) -> DataDirs:
        """Everything under `home` where one is given, else the platform's user folders (platformdirs)."""
        if home is not None:
            base = home.expanduser().absolute()
            return cls(
                models=base / "models", cache=base / "cache", config=base / "config", state=base / "state"
            )
        import platformdirs

        return cls(
            models=Path(platformdirs.user_data_dir(APPLICATION, appauthor=False)) / "models",
            cache=Path(platformdirs.user_cache_dir(APPLICATION, appauthor=False)),
            config=Path(platformdirs.user_config_dir(APPLICATION, appauthor=False)),
            state=Path(platformdirs.user_state_dir(APPLICATION, appauthor=False)),
        )
