"""Links in a checkpoint's folder: what lies outside of it is not part of it, and is copied only if that was asked for.

Who can put a link into a folder that somebody else converts could otherwise have any file copied that the other one may
read.
"""

from __future__ import annotations

import os
import pathlib

from jaxlowprec.checkpoints.errors import CheckpointError


def real_path(source: pathlib.Path, relative: pathlib.Path, follow_links: bool = False) -> pathlib.Path:
    """Where a file of a checkpoint lies.

    In Hugging Face's cache the files of `snapshots/<revision>` are links to `blobs` beside it, which belongs to it.

    Arguments:
        source: folder of the checkpoint.
        relative: path of the file in it.
        follow_links: wherever a link points to.

    Raises:
        CheckpointError: it lies outside of the checkpoint.
    """
    root, real = (pathlib.Path(os.path.realpath(path)) for path in (source, source / relative))
    inside = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    if not follow_links and not any(real.is_relative_to(folder) for folder in inside):
        raise CheckpointError(
            f"{source / relative}: is a link to {real}, which is outside of the checkpoint and would be copied; put "
            "the file itself there, or say that links may be followed (--follow-links)"
        )
    return real
