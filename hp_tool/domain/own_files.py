"""Names in a query that may be files: those of someone who may read this machine's files anyway."""

from __future__ import annotations


class OwnFile(str):
    """A name that may be a path on this machine; a plain string is a name of the catalogue, and never opened.

    JSON and YAML hold none, so neither does what arrives over HTTP or stands in a database. Copies of a query keep it.
    """

    __slots__ = ()
