"""The folders of one user: models, caches, settings and state."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from infer.runtime.errors import UsageError

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
        """Everything under `home` where one is given, else the platform's user folders (platformdirs).

        Raises UsageError where neither is known.
        """
        if home is not None:
            base = home.expanduser().absolute()
            return cls(
                models=base / "models", cache=base / "cache", config=base / "config", state=base / "state"
            )
        import platformdirs

        found = cls(
            models=Path(platformdirs.user_data_dir(APPLICATION, appauthor=False)) / "models",
            cache=Path(platformdirs.user_cache_dir(APPLICATION, appauthor=False)),
            config=Path(platformdirs.user_config_dir(APPLICATION, appauthor=False)),
            state=Path(platformdirs.user_state_dir(APPLICATION, appauthor=False)),
        )
        if not all(path.is_absolute() for path in (found.models, found.cache, found.config, found.state)):
            raise UsageError("this user has no home folder: set INFER_HOME to a folder for models and caches")
        return found
