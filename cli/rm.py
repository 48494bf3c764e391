"""`infer rm`: delete a model of the store."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from infer.cli import render
from infer.cli.config import data_dirs
from infer.cli.options import NoteOptions, complete_model, takes
from infer.runtime.errors import UsageError


@takes(NoteOptions)
def rm(
    options: NoteOptions,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A name of `infer ls`.", autocompletion=complete_model)
    ],
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.")] = False,
) -> None:
    """Delete a model of the store, or what an interrupted download of it left."""
    from infer.runtime.store import catalog, hub
    from infer.runtime.store.files import human_size
    from infer.runtime.store.local import remove, stored_file
    from infer.runtime.store.pull import partial_bytes

    if name.startswith(hub.PREFIX):
        raise UsageError(
            f"{name} lies in the hub's own cache, which other programs use too: see `hf cache rm`"
        )
    dirs = data_dirs()
    path = stored_file(name, dirs)
    entry = catalog.find(name)
    there = os.path.lexists(path) or (entry is not None and partial_bytes(entry, dirs) > 0)
    if there and not yes and not render.confirm_deletion("rm", str(path)):
        return
    freed = remove(name, dirs)
    if not options.quiet:
        render.say(f"deleted {name}: {human_size(freed)}")
