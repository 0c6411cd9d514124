"""Run torchrun with a store that listens on a single address.

This file is sent with a job and needs only torch. torchrun's own stores listen on every interface
without a password, and `--standalone` unpickles their contents. Anyone who reaches the port can
therefore run code as the job. Here, the first node opens the socket and passes it to the store. It
listens on the loopback device for one node, or on the address in PET_MASTER_ADDR for several. Ranks
join that store (TORCHELASTIC_USE_AGENT_STORE), and nothing in it is unpickled.
"""

import os
import socket
import sys
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore, run
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

_BACKEND = "hp-tool"
_LOOPBACK = "127.0.0.1"
_BACKLOG = 2048


class BoundRendezvous(RendezvousHandler):
    """A rendezvous of a fixed number of nodes through a store that listens on a single address."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._nodes, self._run_id = parameters.max_nodes, parameters.run_id
        self._timeout = timedelta(seconds=int(parameters.get("timeout") or 900))
        is_single_node = self._nodes == 1
        self._node = 0 if is_single_node else int(os.environ["PET_NODE_RANK"])
        self._address = _LOOPBACK if is_single_node else os.environ["PET_MASTER_ADDR"]
        self._port = 0 if is_single_node else int(os.environ["PET_MASTER_PORT"])
        self._store: TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        if self._store is None:
            self._store = self._open()
        where = RendezvousStoreInfo(self._address, self._port)
        return RendezvousInfo(
            PrefixStore(self._run_id, self._store), self._node, self._nodes, where
        )

    def _open(self) -> TCPStore:
        """Open the store: as a server on the first node, as a client on the others."""
        common: dict[str, Any] = {"world_size": self._nodes, "timeout": self._timeout}
        if self._node != 0:
            return TCPStore(self._address, self._port, is_master=False, **common)
        family, _, _, _, address = socket.getaddrinfo(
            self._address, self._port, type=socket.SOCK_STREAM
        )[0]
        server = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
        self._port = server.getsockname()[1]
        return TCPStore(
            self._address, self._port, is_master=True, master_listen_fd=server.detach(), **common
        )

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return _BACKEND

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing. No node joins later, so the store can stay open."""

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


if __name__ == "__main__":
    rendezvous_handler_registry.register(_BACKEND, BoundRendezvous)
    run.main([f"--rdzv-backend={_BACKEND}", *sys.argv[1:]])
