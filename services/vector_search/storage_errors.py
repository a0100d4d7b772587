"""Errors of the disk and the database, as clients see them."""

from __future__ import annotations

import shutil
import sqlite3
from errno import EDQUOT, EFBIG, ENOSPC
from pathlib import Path

from common.errors import SpillwayError, Unavailable

# Bytes of the disk kept free for the database's checkpoints and rollbacks.
RESERVE_BYTES = 16 * 1024 * 1024


def reserve(directory: Path) -> None:
    """Raise OSError (ENOSPC) when less than RESERVE_BYTES are free."""
    if shutil.disk_usage(directory).free < RESERVE_BYTES:
        raise OSError(ENOSPC, "less than 16 MiB free")


def is_full(error: Exception) -> bool:
    """True if an error of the file system or of SQLite means that the disk is full."""
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorname", "").startswith(("SQLITE_FULL", "SQLITE_IOERR"))
    return isinstance(error, OSError) and error.errno in (EFBIG, ENOSPC, EDQUOT)


def storage_error(error: Exception) -> SpillwayError:
    """Return the error that clients get: Unavailable with the code `disk_full` or `storage_failed`."""
    if is_full(error):
        return Unavailable(
            f"the disk of vector_search is full ({error}); searches go on, writes wait for space",
            code="disk_full",
            retry_after_s=5.0,
        )
    reason = error.strerror if isinstance(error, OSError) else error
    return Unavailable(f"storing failed: {reason}", code="storage_failed", retry_after_s=5.0)
