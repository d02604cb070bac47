"""A relay between a trainer and a receiver that damages what it passes on.

It flips a bit, cuts the connection, leaves bytes out, sends some twice, or out of order.
"""

import contextlib
import socket
import threading

from jaxlowprec.weight_sync.transports.sockets import close


def flip(data, at, bit):
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


DAMAGE = {
    "flip": lambda data, at, size: flip(data, at, size % 8),
    "cut": lambda data, at, size: None,
    "drop": lambda data, at, size: data[:at] + data[at + size :],
    "repeat": lambda data, at, size: data[: at + size] + data[at:],
    "swap": lambda data, at, size: (
        data[:at] + data[at + size : at + 2 * size] + data[at : at + size] + data[at + 2 * size :]
    ),
}


class Relay:
    """Listens, and passes one connection on to an address, with one kind of damage at one place of one direction."""

    def __init__(self, address, kind, to_engine, place, size):
        self._address, self._kind, self._to_engine, self._place, self._size = address, kind, to_engine, place, size
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self.damaged = False
        self.seen = {True: bytearray(), False: bytearray()}  # what came on the damaged direction, on the other one
        self._ends = []
        self._threads = [threading.Thread(target=self._run)]
        self._threads[0].start()

    def _run(self):
        with contextlib.suppress(OSError):
            trainer = self._listener.accept()[0]
            engine = socket.create_connection(self._address)
            self._ends += [trainer, engine]
            back = threading.Thread(target=self._pass, args=(engine, trainer, not self._to_engine))
            self._threads.append(back)
            back.start()
            self._pass(trainer, engine, self._to_engine)

    def _pass(self, source, target, damages):
        seen = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.seen[damages] += data
                at = self._place - seen
                seen += len(data)
                if damages and 0 <= at < len(data):
                    changed = DAMAGE[self._kind](data, at, self._size)
                    self.damaged = changed != data
                    if changed is None:
                        target.sendall(data[:at])
                        break
                    data = changed
                target.sendall(data)
        close(source)
        close(target)

    def close(self):
        self._listener.close()
        with contextlib.suppress(OSError):  # wakes it if nobody came
            socket.create_connection(self.address, 0.1).close()
        for end in self._ends:
            close(end)
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()
