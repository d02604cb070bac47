"""Links in a checkpoint's folder: a file outside the folder is not part of it, and is copied only if asked for.

Otherwise, whoever can put a link into a folder that somebody else converts could get any file copied that the other
person may read.
"""

from __future__ import annotations

import os
import pathlib

from jaxlowprec.checkpoints.errors import CheckpointError


def real_path(source: pathlib.Path, relative: pathlib.Path, follow_links: bool = False) -> pathlib.Path:
    """The real path of a file of a checkpoint.

    In Hugging Face's cache, the files of `snapshots/<revision>` are links to `blobs`, which belongs to the checkpoint.

    Arguments:
        source: the checkpoint's folder.
        relative: path of the file in it.
        follow_links: allow links that point anywhere.

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
