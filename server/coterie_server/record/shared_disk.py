"""Whether a folder is on a file system that several machines share, where SQLite's write-ahead log does not work."""

import os
import re
from pathlib import Path

from coterie.errors import ConfigError

OVERRIDE = "COTERIE_RUN_DB_JOURNAL"  # of the environment: `wal` or `rollback`, whatever the file system
_MOUNTS = Path("/proc/mounts")
_ESCAPED = re.compile(r"\\([0-7]{3})")  # a space in a mount point is \040
_SHARED = re.compile(
    r"9p|afs|beegfs\w*|ceph|cifs|coda|gfs2|glusterfs|gpfs|lustre|nfs4?|ocfs2|orangefs|panfs|pvfs2|smb3|smbfs|virtiofs|wekafs|"
    r"fuse\.(beegfs|ceph|gcsfuse|glusterfs|juicefs|mfs|quobyte|rclone|s3fs|sshfs)"
)


def why_no_wal(folder: Path) -> str:
    """Why the run database of this folder cannot have a write-ahead log, as a clause; "" if it can. ConfigError for an unknown override."""
    override = os.environ.get(OVERRIDE, "")
    if override not in ("", "wal", "rollback"):
        raise ConfigError(f"{OVERRIDE} is {override!r}, want wal, rollback or nothing")
    if override:
        return f"{OVERRIDE} is {override}" if override == "rollback" else ""
    kind = file_system(folder)
    return f"its folder is on a shared file system ({kind})" if _SHARED.fullmatch(kind) else ""


def file_system(folder: Path) -> str:
    """The type of the file system of a folder, such as ext4; "" where the system does not say."""
    place, kind, depth = folder.resolve(), "", -1
    try:
        lines = _MOUNTS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ""
    for line in lines:
        _, at, found, *_ = line.split(" ")
        mount = Path(_ESCAPED.sub(lambda match: chr(int(match[1], 8)), at))
        if len(mount.parts) >= depth and place.is_relative_to(mount):  # a later mount at the same place hides the former
            kind, depth = found, len(mount.parts)
    return kind
